"The likelihoods, against adaptive quadrature, fine grids, SciPy's densities and optimisers, finite differences and draws."

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from numpyro.distributions import constraints
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.special import erfcx, expit, gammaln, log_expit, log_ndtr, logsumexp, ndtr, softmax
from scipy.stats import beta, chi2, expon, gamma, nbinom, norm, t

from gp_thesis.likelihoods import (Bernoulli, Beta, Binomial, Exponential, Gamma, Gaussian, Heteroscedastic, Likelihood,
                                   LogRate, NegativeBinomial, Ordinal, Poisson, RobustMax, Softmax, StudentT,
                                   log_expectation_of_several, log_normal_cdf, log_omega, log_sum_exp_bound, normal_hazard,
                                   tilted_moments)
from gp_thesis.parameters import Parameter, cast, partition, positive, unwrap

METHODS = ("variational_expectations", "log_tilted")


@eqx.filter_jit
def _ask(likelihood, method, args):
    return getattr(likelihood, method)(*args) if isinstance(method, str) else method(likelihood, *args)


def ask(likelihood, method, *args):
    "A method, by name or one of the base class, compiled once for all values of parameters and arguments."
    return _ask(likelihood, method, [np.asarray(a) for a in args])


@eqx.filter_jit
def _slopes(likelihood, mean, var, y, direction, power):
    def of(method, *more):
        total = lambda mean, var: jnp.sum(getattr(likelihood, method)(mean, var, y, *more))
        gradient = jax.grad(total, argnums=(0, 1))
        (in_mean, in_var), (along, _) = jax.jvp(lambda mean: gradient(mean, var), (mean,), (direction,))
        return getattr(likelihood, method)(mean, var, y, *more), in_mean, in_var, along

    return of("variational_expectations"), of("log_tilted", *([] if power is None else [power]))


def slopes(likelihood, mean, var, y, direction=None, power=None):
    """For the expected log density and for log_tilted: the value, derivatives in mean and var, and that of the first
    along `direction` in the means."""
    direction = np.ones_like(mean) if direction is None else direction
    found = _slopes(likelihood, *(np.asarray(a) for a in (mean, var, y, direction)), power)
    return jax.tree.map(np.asarray, found)


def check_slopes(likelihood, mean, var, y, direction=None, step=1e-5, rtol=1e-5, atol=1e-8, power=None):
    "First derivatives against finite differences, entry by entry, and second ones against differences of the first."
    found = slopes(likelihood, mean, var, y, direction, power)
    direction = np.ones_like(mean) if direction is None else direction
    P = mean.shape[-1] if likelihood.num_latents else 1
    for p in range(P):                                             # rows do not look at each other
        e = step * (np.eye(P)[p] if likelihood.num_latents else 1) * np.ones_like(mean)
        pick = lambda a: a[:, p] if likelihood.num_latents else a
        for argument, (up, down) in enumerate([[slopes(likelihood, mean + s * e, var, y, direction, power) for s in (1, -1)],
                                               [slopes(likelihood, mean, var + s * e, y, direction, power) for s in (1, -1)]]):
            for k in range(2):
                finite = (up[k][0] - down[k][0]) / (2 * step)
                assert np.allclose(pick(found[k][1 + argument]), finite, rtol=rtol, atol=atol)
    ahead, behind = (slopes(likelihood, mean + s * step * direction, var, y, direction, power) for s in (1, -1))
    for k in range(2):
        assert np.allclose(found[k][3], (ahead[k][1] - behind[k][1]) / (2 * step), rtol=10 * rtol, atol=10 * atol)


class Student(Likelihood):
    "A density in one line, with four degrees of freedom."
    scale: Parameter

    def __init__(self, scale=1.0):
        self.scale = positive(scale, name="scale")

    def log_density(self, f, y):
        return jax.scipy.stats.t.logpdf(y, 4.0, loc=f, scale=self.scale)


class Rate(Likelihood):
    "Counts with rate exp(f): only the moments matter here."
    support = constraints.nonnegative_integer
    accepts = "counts 0, 1, 2, ..."

    def conditional_mean(self, f):
        return jnp.exp(f)

    def conditional_variance(self, f):
        return jnp.exp(f)


def integrate(g, mean, var):
    "E g(f) by adaptive quadrature over twelve standard deviations."
    sd = np.sqrt(var)
    return quad(lambda f: g(f) * norm.pdf(f, mean, sd), mean - 12 * sd, mean + 12 * sd, epsabs=1e-13, epsrel=1e-12, limit=400)[0]


@pytest.mark.parametrize("noise", [0.04, 1.0, 9.0])
@pytest.mark.parametrize("mean,var,y", [(0.0, 1.0, 0.3), (-2.0, 0.01, 1.0), (1.0, 5.0, -3.0)])
def test_gaussian_closed_forms_against_adaptive_quadrature(noise, mean, var, y):
    likelihood = unwrap(Gaussian(noise))
    log_density = lambda f: norm.logpdf(y, f, np.sqrt(noise))
    assert np.isclose(ask(likelihood, "log_density", mean, y), log_density(mean))
    assert np.isclose(ask(likelihood, "variational_expectations", mean, var, y), integrate(log_density, mean, var))
    for power in (0.01, 0.5, 1.0, 2.0):
        f = np.linspace(min(mean, y) - 30, max(mean, y) + 30, 200_001)
        exact = logsumexp(power * log_density(f) + norm.logpdf(f, mean, np.sqrt(var))) + np.log(f[1] - f[0])
        assert np.isclose(ask(likelihood, "log_tilted", mean, var, y, power), exact, rtol=1e-8)
    assert np.isclose(ask(likelihood, "predictive_log_density", mean, var, y), norm.logpdf(y, mean, np.sqrt(var + noise)))
    assert np.allclose(ask(likelihood, "predict_mean_and_var", mean, var), (mean, var + noise))


@pytest.mark.parametrize("mean,var,y", [(0.0, 0.5, 0.3), (1.0, 0.2, -1.0), (-0.5, 0.8, 2.5)])
def test_one_line_density_gets_its_integrals(mean, var, y):
    likelihood = unwrap(Student(0.9))
    log_density = lambda f: t.logpdf(y, 4.0, f, 0.9)
    assert np.isclose(ask(likelihood, "variational_expectations", mean, var, y), integrate(log_density, mean, var), atol=2e-4)
    for power in (0.3, 1.0):
        expected = np.log(integrate(lambda f: np.exp(power * log_density(f)), mean, var))
        assert np.isclose(ask(likelihood, "log_tilted", mean, var, y, power), expected, atol=2e-4)


def test_more_nodes_are_a_class_attribute_and_help():
    class Finer(Student):
        points = 80

    exact = integrate(lambda f: t.logpdf(2.0, 4.0, f, 0.3), 0.0, 1.0)
    error = lambda kind: abs(ask(unwrap(kind(0.3)), "variational_expectations", 0.0, 1.0, 2.0) - exact)
    assert error(Finer) < 0.1 * error(Student) and error(Student) > 1e-6


def test_moments_by_quadrature_are_those_of_a_lognormal_rate():
    mean, var = np.array([0.2, -1.0, 1.0]), np.array([0.1, 0.5, 1.0])
    y_mean, y_var = ask(Rate(), "predict_mean_and_var", mean, var)
    rate = np.exp(mean + var / 2)
    assert np.allclose(y_mean, rate) and np.allclose(y_var, rate + rate**2 * (np.exp(var) - 1))


@pytest.mark.parametrize("likelihood", [Poisson(2.5), Gamma(3.0), Exponential(), NegativeBinomial(0.4)], ids=lambda each: type(each).__name__)
def test_moments_of_wide_gaussians_overflow_only_where_they_must(likelihood):
    mean, var = np.array([-100.0, 0.3, 0.3]), np.array([100.0, 100.0, 1e-6])
    mean = -mean if isinstance(likelihood, (Gamma, Exponential)) else mean
    double = ask(unwrap(likelihood), "predict_mean_and_var", mean, var)
    single = ask(unwrap(cast(likelihood, np.float32)), "predict_mean_and_var", mean.astype(np.float32), var.astype(np.float32))
    with np.errstate(over="ignore"):
        for a, b in zip(double, single):
            assert b.dtype == np.float32 and np.allclose(np.asarray(a).astype(np.float32), b, rtol=1e-3)
    assert np.isfinite(single[1]).tolist() == [True, False, True]               # though exp(100) is too large for float32


def test_variance_of_y_is_never_negative_in_single_precision():
    class Shifted(Rate):
        def conditional_variance(self, f):
            return jnp.zeros_like(f)

        def conditional_mean(self, f):
            return 1e4 + f

    mean, var = np.zeros(3, np.float32), np.array([1e-10, 1e-4, 1.0], np.float32)
    assert np.all(np.asarray(ask(Shifted(), "predict_mean_and_var", mean, var)[1]) >= 0)


def test_base_agrees_with_overrides_elementwise_and_over_outputs():
    rng = np.random.default_rng(0)
    mean, y, var = rng.normal(size=(7, 2)), rng.normal(size=(7, 2)), rng.uniform(0.1, 0.5, (7, 2))
    likelihood = unwrap(Gaussian([0.5, 2.0]))                  # one variance for each output
    base = Likelihood
    expected = ask(likelihood, "variational_expectations", mean, var, y)
    assert np.allclose(expected, ask(likelihood, base.variational_expectations, mean, var, y))
    density = ask(likelihood, "predictive_log_density", mean, var, y)
    assert np.allclose(density, ask(likelihood, base.log_tilted, mean, var, y), atol=1e-3)
    for ours, theirs in zip(*(ask(likelihood, method, mean, var) for method in ("predict_mean_and_var", base.predict_mean_and_var))):
        assert np.allclose(ours, theirs) and ours.shape == (7, 2)
    column = ask(unwrap(Gaussian(2.0)), "variational_expectations", mean[:, 1], var[:, 1], y[:, 1])
    assert np.allclose(column, expected[:, 1])
    assert ask(likelihood, "conditional_variance", mean).shape == (7, 2)


class FineStudent(Student):
    points = 80


@pytest.mark.parametrize("likelihood,power", [(Gaussian(0.3), 0.4), (FineStudent(1.0), None), (Bernoulli(), None)], ids=["Gaussian", "quadrature", "probit"])
def test_gradients_against_finite_differences(likelihood, power):
    mean, var, y = np.array([0.0, 1.0, -2.0]), np.array([0.3, 1.0, 0.1]), np.array([0.5, 0.5, 0.5])
    check_slopes(unwrap(likelihood), mean, var, y, power=power)


def test_expected_log_likelihood_ignores_correlation():
    rng = np.random.default_rng(1)
    cov = np.array([[1.0, 0.95], [0.95, 1.2]])
    f = rng.multivariate_normal([0.0, 1.0], cov, size=400_000)
    y = np.array([0.5, 0.0])
    likelihood = unwrap(Student(0.7))
    draws = np.asarray(ask(likelihood, "log_density", f, y)).sum(1)
    sum_of_integrals = np.sum(ask(likelihood, "variational_expectations", [0.0, 1.0], np.diag(cov), y))
    assert abs(draws.mean() - sum_of_integrals) < 4 * draws.std() / np.sqrt(len(draws))


def test_jensen_holds_and_is_strict():
    mean, var, y = np.linspace(-1, 1, 9), np.full(9, 0.4), np.linspace(1, -2, 9)
    for likelihood in (unwrap(Gaussian(0.5)), unwrap(Student(0.5))):
        assert np.all(ask(likelihood, "variational_expectations", mean, var, y) < ask(likelihood, "log_tilted", mean, var, y))


def test_far_away_the_log_density_stays_finite():
    assert np.isfinite(ask(unwrap(Student(1.0)), "predictive_log_density", 0.0, 1.0, 1e6))
    far = ask(unwrap(Gaussian(1.0)), Likelihood.log_tilted, 0.0, 1.0, 200.0)
    assert np.isfinite(far) and far < -5000


def test_single_precision_stays_single():
    likelihood = unwrap(cast(Gaussian(0.5), jnp.float32))
    mean, var, y = (np.array(a, np.float32) for a in ([0.0, 1.0], [0.1, 0.2], [0.3, 0.4]))
    values = (*(ask(likelihood, method, mean, var, y) for method in ("variational_expectations", "predictive_log_density")),
              *ask(likelihood, "predict_mean_and_var", mean, var))
    assert all(v.dtype == jnp.float32 for v in values)
    double = unwrap(Gaussian(0.5))
    assert np.allclose(values[0], ask(double, "variational_expectations", [0.0, 1.0], [0.1, 0.2], [0.3, 0.4]), atol=1e-5)


def test_variance_is_a_positive_parameter():
    assert isinstance(Gaussian(0.5).variance, Parameter) and np.isclose(Gaussian(0.5).variance.value, 0.5)
    assert len(jax.tree.leaves(partition(Gaussian())[0])) == 1
    for wrong in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match="variance must be positive"):
            Gaussian(wrong)


@pytest.mark.parametrize("likelihood,y,words", [
    (Gaussian(), [0.0, np.nan], r"y must hold finite real numbers .* Gaussian, .*y\[1\] = nan"),
    (Gaussian(), [[0.0, 1.0], [np.inf, 0.0]], r"y\[1, 0\] = inf"),
    (Rate(), [0, 1, -2, 3], r"y must hold counts 0, 1, 2, \.\.\. .* 1 of 4 .*y\[2\] = -2"),
    (Rate(), [0.5], r"y\[0\] = 0.5"),
    (Gaussian(), 1.0, r"y must have shape \(N,\) or \(N, P\) .* got shape \(\)"),
    (Gaussian(), [], r"at least one row, got shape \(0,\)"),
    (Gaussian(), np.zeros((2, 2, 2)), r"got shape \(2, 2, 2\)"),
    (Gaussian(), "seven", r"y must be a number or an array of numbers"),
])
def test_check_names_what_came(likelihood, y, words):
    with pytest.raises(ValueError, match=words):
        likelihood.check(y)


def test_check_returns_floats_and_looks_at_shapes_only_under_jit():
    assert Rate().check([0, 1, 5]).dtype == jnp.float64
    assert Gaussian().check(np.zeros(3, np.float32)).dtype == jnp.float32
    assert np.isnan(jax.jit(lambda y: Gaussian().check(y).sum())(jnp.array([1.0, jnp.nan])))
    with pytest.raises(ValueError, match="got shape"):
        jax.jit(lambda y: Gaussian().check(y))(jnp.zeros((2, 2, 2)))


def test_what_a_subclass_left_out_is_named():
    with pytest.raises(NotImplementedError, match="Student defines no conditional_mean"):
        unwrap(Student()).predict_mean_and_var(jnp.zeros(2), jnp.ones(2))
    with pytest.raises(NotImplementedError, match="Rate must define log_density"):
        Rate().variational_expectations(jnp.zeros(2), jnp.ones(2), jnp.zeros(2))


LINKS = {"probit": (ndtr, log_ndtr), "logit": (expit, log_expit)}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("mean,var", [(0.0, 1.0), (-2.0, 0.1), (1.5, 3.0)])
@pytest.mark.parametrize("y", [0.0, 1.0])
def test_bernoulli_integrals_against_adaptive_quadrature(link, mean, var, y):
    (probability, log_probability), sign, likelihood = LINKS[link], 2 * y - 1, Bernoulli(link)
    assert np.isclose(ask(likelihood, "log_density", 0.7, y), log_probability(sign * 0.7))
    expected = integrate(lambda f: log_probability(sign * f), mean, var)
    assert np.isclose(ask(likelihood, "variational_expectations", mean, var, y), expected, atol=2e-6)
    p = integrate(lambda f: probability(sign * f), mean, var)
    assert np.isclose(ask(likelihood, "predictive_log_density", mean, var, y), np.log(p), atol=1e-9 if link == "probit" else 1e-5)
    half = np.log(integrate(lambda f: np.exp(0.5 * log_probability(sign * f)), mean, var))
    assert np.isclose(ask(likelihood, "log_tilted", mean, var, y, 0.5), half, atol=1e-5)
    assert np.isclose(ask(likelihood, "log_tilted", mean, var, y, 1.0), np.log(p), atol=1e-5)   # a traced power: quadrature
    one, variance = ask(likelihood, "predict_mean_and_var", mean, var)
    assert np.isclose(one, integrate(probability, mean, var), atol=1e-5) and np.isclose(variance, one * (1 - one))
    for ours, theirs in zip((one, variance), ask(likelihood, Likelihood.predict_mean_and_var, mean, var)):
        assert np.isclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("dtype,rtol", [(jnp.float64, 1e-9), (jnp.float32, 1e-4)])
def test_bernoulli_tails_are_exact_to_rounding(link, dtype, rtol):
    f = np.array([-100.0, -30.0, -15.0, -5.0, -1.0, 0.0, 1.0, 3.0])
    log_probability = LINKS[link][1]
    one = jax.jit(jax.vmap(jax.value_and_grad(Bernoulli(link).log_density), (0, None)))
    for y, sign in ((1.0, 1), (0.0, -1)):
        ours, slope = one(jnp.asarray(sign * f, dtype), jnp.asarray(y, dtype))
        assert ours.dtype == dtype and np.allclose(ours, log_probability(f), rtol=rtol)
        true_slope = np.exp(norm.logpdf(f) - log_ndtr(f)) if link == "probit" else expit(-f)
        assert np.allclose(sign * slope, true_slope, rtol=10 * rtol)
    far = np.tile(np.array([-1e4, -200.0, 200.0, 1e4], dtype), 2)
    assert all(np.isfinite(a).all() for a in one(far, jnp.asarray(1, dtype)))
    for method in METHODS:
        value = ask(Bernoulli(link), method, far, np.full_like(far, 0.5), np.ones_like(far))
        assert value.dtype == dtype and np.isfinite(value).all()


@pytest.mark.parametrize("link", LINKS)
def test_bernoulli_probabilities_add_up_and_moments_keep_small_ones(link):
    likelihood, f = Bernoulli(link), np.linspace(-8, 8, 33)
    assert np.allclose(np.exp(ask(likelihood, "log_density", f, 1.0)) + np.exp(ask(likelihood, "log_density", f, 0.0)), 1.0)
    assert np.allclose(ask(likelihood, "conditional_mean", f), LINKS[link][0](f))
    assert np.allclose(ask(likelihood, "conditional_variance", f), LINKS[link][0](f) * LINKS[link][0](-f), rtol=1e-9)   # 1 - p would lose the digits
    p, variance = ask(likelihood, "predict_mean_and_var", [9.0, -9.0], [0.1, 0.1])
    assert 0 < variance[0] < 1e-3 and variance[0] < 1.01 * p[1]


@pytest.mark.parametrize("link", LINKS)
def test_bernoulli_gradients_against_finite_differences_and_outputs(link):
    mean, var, y = np.array([[0.0, 1.0], [-2.0, 0.3]]), np.array([[0.3, 1.0], [0.1, 0.5]]), np.array([[0.0, 1.0], [1.0, 0.0]])
    check_slopes(Bernoulli(link), mean, var, y, power=0.5 if link == "probit" else None)
    for method in METHODS:
        values = ask(Bernoulli(link), method, mean, var, y)
        assert values.shape == (2, 2) and np.isclose(values[1, 0], ask(Bernoulli(link), method, -2.0, 0.1, 1.0))


def test_bernoulli_quadrature_is_as_good_as_the_chapter_says():
    for link, var, error in (("probit", 1.0, 1e-9), ("probit", 9.0, 3e-4), ("logit", 9.0, 2e-4), ("probit", 25.0, 6e-3)):
        for mean in (-6.0, -1.5, 0.7, 4.0):
            exact = integrate(LINKS[link][1], mean, var)
            assert abs(ask(Bernoulli(link), "variational_expectations", mean, var, 1.0) - exact) < error


def test_bernoulli_links_and_labels_are_checked():
    assert Bernoulli().link == "probit" and not jax.tree.leaves(Bernoulli("logit"))        # static: nothing to train
    for wrong in ("cloglog", "Probit", None):
        with pytest.raises(ValueError, match="link must be one of 'probit', 'logit', got"):
            Bernoulli(wrong)
    assert np.array_equal(Bernoulli().check([[0, 1], [1, 1]]), [[0.0, 1.0], [1.0, 1.0]])
    for labels, first in (([1, -1], r"y\[1\] = -1"), ([0.5, 1.0], r"y\[0\] = 0.5"), ([0, np.nan], r"y\[1\] = nan")):
        with pytest.raises(ValueError, match=f"y must hold labels 0 or 1 for the likelihood Bernoulli, .*{first}"):
            Bernoulli().check(labels)


def normal_grid(count=20_001, reach=12.0):
    t = np.linspace(-reach, reach, count)
    return t, np.log(t[1] - t[0]) - 0.5 * t**2 - 0.5 * np.log(2 * np.pi)


def poisson(f, y, binsize):
    return y * (f + np.log(binsize)) - binsize * np.exp(f) - gammaln(y + 1)


def binomial(f, y, n, log_probability):
    return gammaln(n + 1) - gammaln(y + 1) - gammaln(n - y + 1) + y * log_probability(f) + (n - y) * log_probability(-f)


def interval(a, b):
    "log(Φ(b) - Φ(a)) from the side where the logarithms differ."
    low, high = np.where(a + b > 0, -b, a), np.where(a + b > 0, -a, b)
    with np.errstate(divide="ignore"):
        return log_ndtr(high) + np.log1p(-np.exp(log_ndtr(low) - log_ndtr(high)))


CUTS = np.array([-1.0, 0.2, 1.5])

# A likelihood, its log density by other means, draws of y given f, and an observation.
ONE = {
    "poisson 0": (Poisson(), lambda f: poisson(f, 0, 1), lambda f, rng: rng.poisson(np.exp(f)), 0.0),
    "poisson 7": (Poisson(2.5), lambda f: poisson(f, 7, 2.5), lambda f, rng: rng.poisson(2.5 * np.exp(f)), 7.0),
    "poisson 400": (Poisson(), lambda f: poisson(f, 400, 1), lambda f, rng: rng.poisson(np.exp(f)), 400.0),
    "exponential": (Exponential(), lambda f: expon.logpdf(0.7, scale=np.exp(-f)), lambda f, rng: rng.exponential(np.exp(-f)), 0.7),
    "exponential 0": (Exponential(), lambda f: f, lambda f, rng: rng.exponential(np.exp(-f)), 0.0),
    "gamma": (Gamma(3.3), lambda f: gamma.logpdf(0.7, 3.3, scale=np.exp(-f)), lambda f, rng: rng.gamma(3.3, np.exp(-f)), 0.7),
    "beta": (Beta(4.0), lambda f: beta.logpdf(0.3, 4 * ndtr(f), 4 * ndtr(-f)), lambda f, rng: rng.beta(4 * ndtr(f), 4 * ndtr(-f)), 0.3),
    "negative binomial": (NegativeBinomial(0.5, 2.5), lambda f: nbinom.logpmf(7, 2, 1 / (1 + 1.25 * np.exp(f))),
                          lambda f, rng: rng.poisson(2.5 * np.exp(f) * rng.gamma(2.0, 0.5, np.shape(f))), 7.0),
    "binomial": (Binomial(300, "logit"), lambda f: binomial(f, 240, 300, log_expit), lambda f, rng: rng.binomial(300, expit(f)), 240.0),
    "ordinal": (Ordinal(CUTS), lambda f: interval(CUTS[1] - f, CUTS[2] - f),
                lambda f, rng: np.searchsorted(CUTS, f + rng.normal(size=np.shape(f))), 2.0),
    "student": (StudentT(0.8, df=5.0), lambda f: t.logpdf(0.3, 5.0, f, 0.8), lambda f, rng: f + 0.8 * rng.standard_t(5.0, np.shape(f)), 0.3),
}


@pytest.mark.parametrize("case", ONE)
def test_integrals_of_one_latent_against_a_fine_grid(case):
    likelihood, log_density, _, y = ONE[case]
    likelihood, closed = unwrap(likelihood), isinstance(likelihood, (LogRate, StudentT))
    inside = np.linspace(-5, 5, 1001)                           # where the comparison itself can be trusted
    assert np.allclose(ask(likelihood, "log_density", inside, y), log_density(inside), rtol=1e-9, atol=1e-9)
    means, variances, ys = np.array([0.0, -1.2, 0.8]), np.array([0.5, 0.05, 1.5]), np.full(3, y)
    values = ask(likelihood, "variational_expectations", means, variances, ys)
    whole, root = (ask(likelihood, "log_tilted", means, variances, ys, power) for power in (1.0, 0.5))
    grid, log_weight = normal_grid(40_001, reach=45.0)
    for n, (mean, var) in enumerate(zip(means, variances)):
        f = mean + np.sqrt(var) * grid
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            expected = np.sum(np.where(log_weight > -70, np.exp(log_weight) * log_density(f), 0.0))
            density = logsumexp(np.nan_to_num(log_weight + log_density(f), nan=-np.inf))
            half = logsumexp(np.nan_to_num(log_weight + 0.5 * log_density(f), nan=-np.inf))
        assert np.isclose(values[n], expected, rtol=1e-9 if closed else 1e-4, atol=1e-12 if closed else 2e-4)
        for ours, exact in ((whole[n], density), (root[n], half)):
            assert np.isclose(ours, exact, rtol=0, atol=1e-6 if closed else 4e-3)


@pytest.mark.parametrize("case", ["poisson 7", "exponential", "gamma", "beta", "student", "negative binomial", "binomial", "ordinal"])
def test_moments_of_one_latent_against_draws_and_the_base_class(case):
    likelihood, _, draw, _ = ONE[case]
    likelihood, mean, var, rng = unwrap(likelihood), 0.3, 0.2, np.random.default_rng(0)
    y = draw(mean + np.sqrt(var) * rng.normal(size=1_000_000), rng)
    y_mean, y_var = ask(likelihood, "predict_mean_and_var", mean, var)
    assert abs(y.mean() - y_mean) < 5 * y.std() / 1000
    assert abs(y.var() - y_var) < 5 * ((y - y.mean()) ** 2).std() / 1000
    for ours, theirs in zip((y_mean, y_var), ask(likelihood, Likelihood.predict_mean_and_var, mean, var)):
        assert np.isclose(ours, theirs, rtol=1e-6)


def test_a_large_count_needs_nodes_about_the_mode():
    grid, log_weight = normal_grid(400_001)
    for y in (30.0, 1000.0):
        exact = logsumexp(log_weight + poisson(2.0 + grid, y, 1))
        assert abs(ask(Poisson(), "predictive_log_density", 2.0, 1.0, y) - exact) < 1e-9
        assert abs(ask(Poisson(), Likelihood.log_tilted, 2.0, 1.0, y) - exact) > 0.1
    a = np.array([-700.0, -3.0, 0.0, 1.0, 1.5, 20.0, 1e6])
    u = np.asarray(jax.jit(log_omega)(a))
    assert np.allclose(u + np.exp(u), a, rtol=1e-12, atol=1e-12)


def grid_moments(log_density, mean, var, power=1.0):
    "Normaliser, mean and variance of the tilted distribution by summation."
    grid, log_weight = normal_grid()
    f = mean + np.sqrt(var) * grid
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        log_tilted = np.nan_to_num(log_weight + power * log_density(f), nan=-np.inf)
    log_Z = logsumexp(log_tilted)
    p = np.exp(log_tilted - log_Z)
    return log_Z, p @ f, p @ (f - p @ f) ** 2


@eqx.filter_jit
def moments(likelihood, mean, var, y, power=1.0):
    return tilted_moments(likelihood, mean, var, y, power)


@pytest.mark.parametrize("case", ONE)
def test_derivatives_of_the_log_density_are_moments(case):
    "Slope and curvature in the mean are those of the tilted distribution, from a grid: what expectation propagation reads off."
    likelihood, log_density, _, y = ONE[case]
    likelihood, mean, var = unwrap(likelihood), 0.4, 0.6
    for power in (1.0, 0.5):
        log_Z, m1, v1 = grid_moments(log_density, mean, var, power)
        (_, slope, in_var, curvature) = slopes(likelihood, mean, var, y, power=np.asarray(power))[1]
        assert np.isclose(slope, (m1 - mean) / var, rtol=1e-3, atol=1e-5)
        assert np.isclose(curvature, (v1 - var) / var**2, rtol=5e-3, atol=1e-3)
        assert np.isclose(in_var, 0.5 * ((v1 + (m1 - mean) ** 2) / var**2 - 1 / var), rtol=5e-3, atol=1e-3)
        assert np.isclose(in_var, (curvature + slope**2) / 2, rtol=1e-9)                    # the Gaussian's own identity
        ours = moments(likelihood, *(np.asarray(a) for a in (mean, var, y, power)))
        assert np.allclose(ours, (log_Z, mean + var * slope, var + var**2 * curvature), atol=4e-3)
        assert np.allclose(ours, (log_Z, m1, v1), rtol=4e-3, atol=1e-3)


EXTREMES = np.array([(m, v) for m in (-50.0, -10.0, 0.0, 3.0, 50.0) for v in (1e-8, 1e-3, 1.0, 10.0)]).T


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("likelihood,ys", [
    (Poisson(2.0), [0, 1, 200]), (Exponential(), [0, 0.5, 30]), (Gamma(2.5), [1e-6, 0.5, 30]),
    (Beta(3.0), [1e-6, 0.5, 1 - 1e-6]), (StudentT(0.3, 3.0), [-100.0, 0.0]),
], ids=lambda x: type(x).__name__)
def test_two_derivatives_are_finite_far_out(likelihood, ys, dtype):
    likelihood = unwrap(cast(likelihood, dtype))
    mean, var, y = (a.ravel().astype(dtype) for a in np.broadcast_arrays(*EXTREMES, np.array(ys)[:, None]))
    found = slopes(likelihood, mean, var, y)
    for array in jax.tree.leaves(found):
        assert array.dtype == dtype and array.shape == mean.shape and np.isfinite(array).all()
    if dtype == jnp.float64:                                       # weights on points have a variance
        assert np.all(1 + var * found[1][3] > -1e-9)
    assert all(moment.dtype == dtype for moment in ask(likelihood, "predict_mean_and_var", mean, var))


@pytest.mark.parametrize("df", [1e6, 1e9, 1e13, 1e16])
def test_the_gaussian_is_the_limit_of_students_t(df):
    assert np.isclose(ask(unwrap(StudentT(0.7, df)), "log_density", 0.3, 0.9), norm.logpdf(0.9, 0.3, 0.7), rtol=2 / df + 1e-12)


@pytest.mark.parametrize("case", ["poisson 7", "gamma", "student"])
def test_entry_by_entry_over_outputs_and_under_vmap(case):
    likelihood, _, _, y = ONE[case]
    likelihood, rng = unwrap(likelihood), np.random.default_rng(2)
    mean, var, ys = rng.normal(size=(4, 3)), rng.uniform(0.1, 1, (4, 3)), np.full((4, 3), y)
    for method in METHODS:
        together = ask(likelihood, method, mean, var, ys)
        one_by_one = lambda likelihood, *args: jax.vmap(jax.vmap(getattr(likelihood, method)))(*args)
        assert together.shape == (4, 3) and np.allclose(together, ask(likelihood, one_by_one, mean, var, ys))


def test_exponential_is_gamma_with_shape_one():
    mean, var, y = np.array([0.3, -1.0]), np.array([0.2, 2.0]), np.array([0.5, 4.0])
    one = unwrap(Gamma(1.0))
    for method in METHODS:
        assert np.allclose(ask(Exponential(), method, mean, var, y), ask(one, method, mean, var, y))
    for ours, theirs in zip(ask(Exponential(), "predict_mean_and_var", mean, var), ask(one, "predict_mean_and_var", mean, var)):
        assert np.allclose(ours, theirs)
    assert [len(jax.tree.leaves(partition(likelihood)[0])) for likelihood in (Gamma(), Beta(), StudentT(), Poisson(), RobustMax(3))] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("likelihood,y", [(Gamma([0.7, 2.0]), [0.4, 3.0]), (Beta(2.0), [0.4, 0.9]), (StudentT(0.5), [0.4, -3.0])],
                         ids=["gamma", "beta", "student"])
def test_parameters_train(likelihood, y):
    mean, var, y = np.array([0.3, -1.0]), np.array([0.2, 2.0]), np.array(y)
    moving, rest = partition(likelihood)
    flat, unravel = ravel_pytree(moving)
    flat = np.asarray(flat)

    @jax.jit
    @jax.value_and_grad
    def total(flat, weights):
        likelihood = unwrap(eqx.combine(unravel(flat), rest))
        return sum(w * jnp.sum(getattr(likelihood, method)(mean, var, y)) for w, method in zip(weights, METHODS))

    for weights in np.eye(2):
        step = 1e-5 * np.eye(len(flat))
        finite = [(total(flat + s, weights)[0] - total(flat - s, weights)[0]) / 2e-5 for s in step]
        assert np.allclose(total(flat, weights)[1], finite, rtol=1e-4, atol=1e-7)


def test_student_moments_exist_where_they_do():
    mean, var = np.array([0.0, 1.0]), np.array([0.5, 0.5])
    assert np.allclose(ask(unwrap(StudentT(2.0, df=3.0)), "predict_mean_and_var", mean, var)[1], 0.5 + 4 * 3)
    infinite = ask(unwrap(StudentT(2.0, df=2.0)), "predict_mean_and_var", mean, var)
    assert np.allclose(infinite[0], mean) and np.isposinf(infinite[1]).all()
    assert all(np.isnan(moment).all() for moment in ask(unwrap(StudentT(df=1.0)), "predict_mean_and_var", mean, var))
    many = unwrap(StudentT(0.7, df=1e6))
    assert np.allclose(ask(many, "log_density", mean, 0.4), ask(unwrap(Gaussian(0.49)), "log_density", mean, 0.4), atol=1e-5)


@pytest.mark.parametrize("scale,df", [(0.01, 1.0), (0.05, 4.0), (0.2, 30.0)])
def test_integrals_of_a_narrow_student_under_a_wide_gaussian(scale, df):
    likelihood, means, h = unwrap(StudentT(scale, df)), np.linspace(0, 6, 7), 1e-5

    def under_gaussian(g, m):
        "The integral of g(f) N(f | m, 1), by many nodes between breaks about the spike at y = 0 and about m."
        spike = scale * np.array([-100, -20, -5, -1, 0, 1, 5, 20, 100])
        ends = np.unique([*spike, -1, 1, m - 9, m - 3, m, m + 3, m + 9])
        nodes, weights = np.polynomial.legendre.leggauss(100)
        middle, half = (ends[1:] + ends[:-1]) / 2, (ends[1:] - ends[:-1]) / 2
        f = middle[:, None] + half[:, None] * nodes
        return np.sum(half[:, None] * weights * g(f) * norm.pdf(f, m))

    expected = [under_gaussian(lambda f: t.logpdf(0, df, f, scale), m) for m in means]
    assert np.allclose(student_integrals(likelihood, means, 1.0)[0], expected, rtol=0, atol=1e-8)
    for power in (1.0, 0.5, 0.01):
        exact = [np.log(under_gaussian(lambda f: np.exp(power * t.logpdf(0, df, f, scale)), m)) for m in means]
        _, value, slope = student_integrals(likelihood, means, power)
        assert np.allclose(value, exact, rtol=0, atol=1e-8)
        differences = [student_integrals(likelihood, means + step, power)[1] for step in (h, -h)]
        assert np.allclose(slope, (differences[0] - differences[1]) / (2 * h), rtol=0, atol=1e-6)


@eqx.filter_jit
def student_integrals(likelihood, means, power):
    "Of y = 0 under N(mean, 1): the expected log density, the log tilted integral and its derivative in the mean."
    value = lambda m: likelihood.log_tilted(m, jnp.ones_like(m), jnp.zeros_like(m), power)
    expected = likelihood.variational_expectations(means, jnp.ones_like(means), jnp.zeros_like(means))
    return expected, value(means), jax.grad(lambda m: value(m).sum())(means)


def largest(mean, var, y):
    "Probability that entry y is the largest, from a fine grid over its own value."
    grid, log_weight = normal_grid()
    f = mean[y] + np.sqrt(var[y]) * grid
    others = [i for i in range(len(mean)) if i != y]
    return np.exp(logsumexp(log_weight + log_ndtr((f[:, None] - mean[others]) / np.sqrt(var[others])).sum(1)))


@pytest.mark.parametrize("classes,atol", [(2, 1e-6), (3, 1e-5), (10, 1e-4)])
def test_robust_max_against_a_fine_grid_and_draws(classes, atol):
    rng = np.random.default_rng(classes)
    mean, var, y = rng.normal(size=(8, classes)), rng.uniform(0.5, 1.0, (8, classes)), rng.integers(0, classes, 8)
    likelihood = RobustMax(classes, epsilon=0.02)
    S = np.array([largest(*row) for row in zip(mean, var, y)])
    assert np.allclose(ask(likelihood, "probability_largest", mean, var, y), S, atol=atol)
    hit, miss = 0.98, 0.02 / (classes - 1)
    expected = ask(likelihood, "variational_expectations", mean, var, y)
    assert np.allclose(expected, S * np.log(hit) + (1 - S) * np.log(miss), atol=20 * atol)
    for power in (1.0, 0.3):
        exact = np.log(S * hit**power + (1 - S) * miss**power)
        assert np.allclose(ask(likelihood, "log_tilted", mean, var, y, power), exact, atol=20 * atol)
    f = mean + np.sqrt(var) * rng.normal(size=(40_000, 8, classes))
    terms = np.asarray(ask(likelihood, "log_density", f, y))
    assert terms.shape == (40_000, 8)
    assert np.all(np.abs(terms.mean(0) - expected) < 5 * terms.std(0) / 200 + 1e-3)
    p, p_var = map(np.asarray, ask(likelihood, "predict_mean_and_var", mean, var))
    assert np.allclose(p, np.mean(ask(likelihood, "conditional_mean", f), axis=0), atol=0.015)
    assert np.allclose(p_var, p * (1 - p))
    assert np.allclose(p.sum(1), 1, atol=classes * atol) and np.allclose(np.log(p[np.arange(8), y]), ask(likelihood, "log_tilted", mean, var, y))
    if classes == 2:
        other = 1 - y
        rows = np.arange(8)
        assert np.allclose(S, ndtr((mean[rows, y] - mean[rows, other]) / np.sqrt(var.sum(1))), atol=1e-9)


@pytest.mark.parametrize("likelihood", [RobustMax(3), Softmax(3)], ids=["robust", "softmax"])
def test_multiclass_gradients_against_finite_differences(likelihood):
    rng = np.random.default_rng(3)
    mean, var, y = rng.normal(size=(4, 3)), rng.uniform(0.3, 1.5, (4, 3)), np.array([0, 2, 1, 1])
    direction = np.ones_like(mean) * [3.0, 1.0, 1.0]               # of a second derivative: Softmax's last Newton step is in it
    check_slopes(likelihood, mean, var, y, direction)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("likelihood", [RobustMax(3), Softmax(3)], ids=["robust", "softmax"])
def test_multiclass_is_finite_far_out(likelihood, dtype):
    means = np.concatenate([np.array([[s, -s, 0], [0, s, -s], [1, s, 1]]) for s in (0, 1, 50, 1e4)])
    mean, var = np.tile(means, (6, 1)), np.repeat([1e-30, 1e-8, 1e-3, 1.0, 10.0, 1000.0], 12)[:, None] * np.ones(3)
    mean, var, y = (np.asarray(a, dtype) for a in (mean, var, np.tile([0, 0, 2], 24)))
    for array in jax.tree.leaves(slopes(likelihood, mean, var, y, np.ones_like(mean) * np.array([2, 1, 1], dtype))):
        assert array.dtype == dtype and np.isfinite(array).all()
    p = np.asarray(ask(likelihood, "predict_mean_and_var", mean, var)[0])
    assert ask(likelihood, "log_density", mean, y).dtype == ask(likelihood, "conditional_variance", mean).dtype == dtype
    assert p.dtype == dtype and np.allclose(p.sum(1), 1, atol=1e-4)


def test_robust_max_gradient_is_the_same_in_single_precision():
    rng = np.random.default_rng(4)
    mean, var, y = rng.normal(size=(50, 10)), rng.uniform(0.1, 1.0, (50, 10)), rng.integers(0, 10, 50)
    total = lambda mean, var, y: RobustMax(10).variational_expectations(mean, var, y).sum()
    single, double = (jax.jit(jax.grad(total, argnums=(0, 1)))(*(jnp.asarray(a, dtype) for a in (mean, var, y))) for dtype in (jnp.float32, jnp.float64))
    for ours, theirs in zip(single, double):
        assert ours.dtype == jnp.float32 and np.allclose(ours, theirs, atol=2e-4)


@jax.jit
def bounds_after(mean, var):
    "The bound after as many steps as it takes by default, after one and after two."
    return log_sum_exp_bound(mean, var), log_sum_exp_bound(mean, var, steps=1), log_sum_exp_bound(mean, var, steps=2)


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("var", [0.1, 1.0, 10.0, 300.0])
def test_tilted_bound_is_a_bound_and_the_best_of_its_kind(classes, var):
    rng = np.random.default_rng(classes)
    mean, var = 2 * rng.normal(size=(6, classes)), var * rng.uniform(0.3, 1.7, (6, classes))
    bound, *early = map(np.asarray, bounds_after(mean, var))
    draws = logsumexp(mean + np.sqrt(var) * rng.normal(size=(40_000, 6, classes)), axis=-1)
    assert np.all(bound > draws.mean(0) - 4 * draws.std(0) / 200)
    def right_side(a, m, v):
        "The value and its gradient in a."
        return 0.5 * np.sum(a**2 * v) + logsumexp(m + (0.5 - a) * v), v * (a - softmax(m + (0.5 - a) * v))

    for m, v, b in zip(mean, var, bound):
        best = min((minimize(right_side, start, args=(m, v), jac=True, tol=1e-12) for start in (np.full(classes, 1 / classes), softmax(m))), key=lambda r: r.fun)
        assert abs(b - best.fun) < 1e-6 * max(1, abs(b))
    jensen = logsumexp(mean + var / 2, axis=1)
    assert np.all(bound < jensen)
    for sooner in early:                                           # a bound however early it stops
        assert np.all(sooner >= bound - 1e-9)


def test_softmax_probabilities_against_gumbel_noise_and_draws():
    "An independent road: the largest of f + Gumbel noise has the softmax probabilities."
    rng = np.random.default_rng(5)
    mean, var, y = rng.normal(size=(3, 4)), rng.uniform(0.2, 2.0, (3, 4)), np.array([0, 3, 1])
    f = mean + np.sqrt(var) * rng.normal(size=(400_000, 3, 4))
    winners = np.argmax(f + rng.gumbel(size=f.shape), axis=-1)
    frequencies = np.stack([np.mean(winners == c, axis=0) for c in range(4)], axis=1)
    likelihood = Softmax(4)
    p, p_var = map(np.asarray, ask(likelihood, "predict_mean_and_var", mean, var))
    assert np.allclose(p, frequencies, atol=4e-3) and np.allclose(p.sum(1), 1) and np.allclose(p_var, p * (1 - p))
    assert np.allclose(ask(likelihood, "log_tilted", mean, var, y), np.log(p[np.arange(3), y]))
    log_density = np.asarray(ask(likelihood, "log_density", f, y))
    assert np.allclose(log_density[0], np.log(softmax(f[0], axis=-1)[np.arange(3), y]))
    expected = np.mean(log_density, axis=0)
    bound = ask(likelihood, "variational_expectations", mean, var, y)
    assert np.all(bound < expected) and np.all(bound > expected - 0.2)
    assert np.allclose(ask(likelihood, "log_tilted", mean, var, y, 1e-6) / 1e-6, expected, atol=6e-3)   # not the bound
    half = np.log(np.mean(np.exp(0.5 * log_density), axis=0))
    assert np.allclose(ask(likelihood, "log_tilted", mean, var, y, 0.5), half, atol=3e-3)
    assert np.array_equal(p, ask(Softmax(4), "predict_mean_and_var", mean, var)[0])


@pytest.mark.parametrize("kind", [RobustMax, Softmax])
def test_labels_and_latents_of_many_classes(kind):
    likelihood = kind(3)
    assert likelihood.num_latents == 3 and Gaussian().num_latents is None and Bernoulli().num_latents is None
    assert np.array_equal(likelihood.check([0, 2, 2]), [0.0, 2.0, 2.0])                     # class 1 is missing: fine
    for labels, words in (([0, 3], r"y must hold labels 0, \.\.\., 2 .* 1 of 2 .*y\[1\] = 3"), ([-1, 0], r"y\[0\] = -1"), ([0.5], r"y\[0\] = 0.5"),
                          ([0, np.nan], r"y\[1\] = nan"), (np.eye(3), r"y must have shape \(N,\) .*\(3, 3\).* labels 0, \.\.\., 2"), ([], "at least one row")):
        with pytest.raises(ValueError, match=words):
            likelihood.check(labels)
    for wrong in (1, 0, 2.0, "three", True, None):
        with pytest.raises(ValueError, match="num_classes must be an integer, at least 2"):
            kind(wrong)
    for method in METHODS:
        with pytest.raises(ValueError, match="one column for each of the 3 classes"):
            getattr(likelihood, method)(jnp.zeros((5, 2)), jnp.ones((5, 2)), jnp.zeros(5))
    value, slope, _, _ = slopes(likelihood, np.zeros((4, 3)), np.ones((4, 3)), np.zeros(4, int))[0]   # all functions alike
    assert value.shape == (4,) and np.isfinite(slope).all()


@pytest.mark.parametrize("likelihood,y,words", [
    (Poisson(), [1, -1], r"y must hold counts 0, 1, 2, \.\.\. .*y\[1\] = -1"), (Poisson(), [1, np.inf], r"y\[1\] = inf"),
    (Exponential(), [0.0, -0.1], "numbers that are not negative"), (Exponential(), [np.inf], r"y\[0\] = inf"),
    (Gamma(), [0.0], r"y must hold positive numbers .*y\[0\] = 0"), (Gamma(), [np.nan], r"y\[0\] = nan"),
    (Beta(), [0.5, 1.0], r"strictly between 0 and 1 .*y\[1\] = 1"), (Beta(), [1.2], r"y\[0\] = 1.2"), (StudentT(), [np.inf], "finite real numbers"),
    (NegativeBinomial(), [1, 0.5], r"counts 0, 1, 2, \.\.\. for the likelihood NegativeBinomial.*y\[1\] = 0.5"), (Heteroscedastic(), [[1.0, 2.0]], r"shape \(N,\) .*\(1, 2\)"),
    (Binomial(3), [1, 4], r"successes 0, 1, 2, \.\.\. in 3 trials for the likelihood Binomial.*y\[1\] = 4"), (Binomial(3), [-1], r"y\[0\] = -1"),
    (Ordinal(CUTS), [0, 4], r"labels 0, \.\.\., 3 for the likelihood Ordinal.*y\[1\] = 4"), (Ordinal(CUTS), [0.5], r"y\[0\] = 0.5"),
    (Binomial(None), [3.0, 4.0], r"y must have shape \(N, 2\), successes and trials in each row .* for Binomial\(trials=None\), got shape \(2,\)"),
    (Binomial(None), [[1, 0]], r"y\[:, 1\] must hold trials 1, 2, \.\.\., .* y\[0, 1\] = 0"), (Binomial(None), [[0.5, 1]], r"y\[:, 0\] must hold successes 0, 1, 2"),
    (Binomial(None), [[1, 2], [3, 2]], r"no more successes than y\[:, 1\] has trials, but 1 of 2 rows do; the first is y\[1\] = \[3. 2.\]"),
    (NegativeBinomial(binsize=None), [[1, -1.0]], "positive exposures"), (NegativeBinomial(binsize=None), [1, 2], r"a count and an exposure .* NegativeBinomial\(binsize=None\)"),
])
def test_support_of_one_latent(likelihood, y, words):
    with pytest.raises(ValueError, match=words):
        likelihood.check(y)


@pytest.mark.parametrize("make,words", [
    (lambda: RobustMax(3, epsilon=0.0), "epsilon must be strictly between 0 and 1, got 0.0"), (lambda: RobustMax(3, epsilon=1.0), "got 1.0"),
    (lambda: Poisson(0.0), "binsize must be positive and finite, or None"), (lambda: Poisson(np.inf), "binsize"), (lambda: StudentT(df=0.0), "df must be positive"),
    (lambda: NegativeBinomial(0.0), "dispersion must be positive"), (lambda: NegativeBinomial(1.0, 0.0), "binsize must be positive and finite, or None"),
    (lambda: Binomial(0), "trials must be a positive integer, or None for a number of trials in each row, got 0"), (lambda: Binomial(2.0), "got 2.0"),
    (lambda: Binomial(True), "got True"), (lambda: Binomial(3, "cloglog"), "link must be one of 'probit', 'logit'"),
    (lambda: Ordinal([]), "edges must be increasing numbers, one fewer than there are classes"), (lambda: Ordinal([0.0, 0.0]), "edges must be increasing"),
    (lambda: Ordinal([1.0, 0.0]), r"got \[1. 0.\]"), (lambda: Ordinal(1.0), "edges must be increasing"), (lambda: Ordinal([0.0, np.nan]), "edges must be"),
    (lambda: Ordinal([np.inf]), "edges must be increasing"),
    (lambda: StudentT(scale=-1.0), "scale must be positive"), (lambda: Gamma(0.0), "shape must be positive"), (lambda: Beta(-2.0), "scale must be positive"),
])
def test_constructors_refuse_what_makes_no_sense(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# one integral for all powers

EACH = {name: ONE[name][::3] for name in ("poisson 7", "exponential", "gamma", "beta", "student", "negative binomial", "ordinal")} | {
    "trials": (Binomial(None, "logit"), [3.0, 8.0]), "noise": (Heteroscedastic(), 0.7),
    "gaussian": (Gaussian(0.7), 0.3), "probit": (Bernoulli(), 1.0), "logit": (Bernoulli("logit"), 0.0),
    "one line": (Student(0.9), 0.3), "exposure": (Poisson(None), [3.0, 2.5]), "robust": (RobustMax(3, epsilon=0.02), 1)}


def three_rows(likelihood, y):
    "Means, variances and observations of three rows."
    columns = (likelihood.num_latents,) if likelihood.num_latents else ()
    rng = np.random.default_rng(6)
    return rng.normal(size=(3, *columns)), rng.uniform(0.1, 0.9, (3, *columns)), np.broadcast_to(np.array(y), (3, *np.shape(y)))


@pytest.mark.parametrize("name", EACH)
def test_expected_log_density_is_the_limit_of_log_tilted_by_the_power(name):
    likelihood, y = EACH[name]
    likelihood = unwrap(likelihood)
    mean, var, y = three_rows(likelihood, y)
    expected = ask(likelihood, "variational_expectations", mean, var, y)
    small = [ask(likelihood, "log_tilted", mean, var, y, power) / power for power in (2e-6, 1e-6)]
    assert np.allclose(2 * small[1] - small[0], expected, rtol=1e-5, atol=1e-6)             # what is left goes with the square
    values = np.array([ask(likelihood, "log_tilted", mean, var, y, power) / power for power in (1e-4, 0.2, 0.5, 1.0, 2.0)])
    assert np.all(np.diff(values, axis=0) > 0) and np.all(values[0] > expected)             # a generalised mean rises
    assert np.allclose(values[3], ask(likelihood, "predictive_log_density", mean, var, y), atol=3e-6)


def test_nodes_that_stay_give_the_gaussian_identity_and_ignore_kinks():
    class Kink(Likelihood):
        def log_density(self, f, y):
            return -3.0 * jnp.abs(y - f) - 2.0 * (f < 0)

    mean, var, y = np.array([-0.4, 0.1, 2.0]), np.array([0.2, 1.0, 30.0]), np.array([0.0, 1.0, -1.0])
    _, slope, in_var, curvature = slopes(Kink(), mean, var, y)[1]
    assert np.allclose(in_var, (curvature + slope**2) / 2, rtol=1e-9)
    _, m, v = moments(Kink(), mean, var, y)
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    for ours, (mean, sd, y) in zip(zip(m, v), zip(mean, np.sqrt(var), y)):
        p = weights * np.exp(ask(Kink(), "log_density", mean + sd * nodes, y))
        p, f = np.asarray(p / p.sum()), np.asarray(mean + sd * nodes)
        assert np.allclose(ours, (p @ f, p @ (f - p @ f) ** 2), rtol=1e-8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("link", LINKS)
def test_moments_of_a_label_far_out(link, dtype):
    mean, var = (a.ravel() for a in np.meshgrid([-1e4, -1e3, -100.0, -10.0, -1.0, 0.0, 3.0, 100.0, 1e4], np.geomspace(1e-8, 1e8, 17)))
    rounded = (a.astype(dtype) for a in (mean, var, np.ones_like(mean)))
    log_Z, m, v = (np.asarray(a, float) for a in moments(Bernoulli(link), *rounded))
    shrinkage = v / var.astype(dtype).astype(float)
    assert np.isfinite(log_Z).all() and np.isfinite(m).all() and np.all(v > 0)
    assert np.all(shrinkage <= 1 + 1e4 * jnp.finfo(dtype).eps)                              # log concave
    if link == "probit":                                                                    # by erfcx, which has no cancellation
        z = mean / np.sqrt(1 + var)
        hazard = np.sqrt(2 / np.pi) / erfcx(-z / np.sqrt(2))
        # z + hazard, from the asymptotic series where that is a difference of equals
        u = np.maximum(-z, 30)
        rest = np.where(z < -30, 1 / u - 2 / u**3 + 10 / u**5, np.maximum(z, -30) + hazard)
        exact = np.maximum(1 - var / (1 + var) * hazard * rest, np.sqrt(float(jnp.finfo(dtype).eps)))
        assert np.allclose(shrinkage, exact, rtol=3e-3 if dtype == jnp.float32 else 1e-6, atol=1e-6)
    else:
        near = (np.abs(mean) <= 10) & (var <= 2)
        exact = np.array([grid_moments(log_expit, a, b) for a, b in zip(mean[near], var[near])])
        assert np.allclose(shrinkage[near], exact[:, 2] / var[near], atol=1e-4)


def test_two_slopes_of_the_hazard_against_differences():
    "The rule gives the first without the fraction; the second differentiates the rule. Both sides of -5, where it changes form."
    z, h = np.array([-40.0, -9.0, -5.2, -4.8, -1.0, 0.5, 3.0]), 1e-5
    for order in (normal_hazard, jax.grad(normal_hazard)):
        value, slope = (jax.jit(jax.vmap(f)) for f in (order, jax.grad(order)))
        assert np.allclose(slope(z), (value(z + h) - value(z - h)) / (2 * h), rtol=1e-5, atol=1e-9)


def test_hazard_of_the_normal_in_both_tails_and_its_derivatives():
    z = np.concatenate([-np.geomspace(1e4, 1.0, 41), [-5.1, -5.0, -4.9, 0.0, 2.0, 10.0]])
    exact = np.sqrt(2 / np.pi) / erfcx(-z / np.sqrt(2))
    hazard = jax.jit(normal_hazard)
    assert np.allclose(hazard(z), exact, rtol=1e-13)
    assert np.allclose(hazard(z.astype(np.float32)), exact, rtol=1e-5)
    zero, (one, two) = jax.jit(lambda z: (log_normal_cdf(z), jax.vmap(jax.value_and_grad(jax.grad(log_normal_cdf)))(z)))(z)
    one, two = np.asarray(one), np.asarray(two)
    assert np.allclose(zero, log_ndtr(z), rtol=1e-13) and np.allclose(one, exact, rtol=1e-13)
    middle = z > -30
    assert np.allclose(two[middle], (-exact * (z + exact))[middle], rtol=1e-11) and np.allclose(two[~middle], -1 + 1 / z[~middle] ** 2, atol=1e-5)


class Scaled(Likelihood):
    "Noise whose log deviation is a second function."
    num_latents = 2

    def log_density(self, f, y):
        return -0.5 * np.log(2 * np.pi) - f[..., 1] - 0.5 * ((y - f[..., 0]) * jnp.exp(-f[..., 1])) ** 2


class OwnScaled(Scaled):
    def variational_expectations(self, mean, var, y):
        square = (y - mean[..., 0]) ** 2 + var[..., 0]
        return -0.5 * np.log(2 * np.pi) - mean[..., 1] - 0.5 * square * jnp.exp(2 * (var[..., 1] - mean[..., 1]))

    def log_tilted(self, mean, var, y, power=1.0):
        return log_expectation_of_several(lambda f: power * self.log_density(f, y), mean, var, points=8192)


def test_several_functions_without_integrals_are_refused():
    mean, var, y = jnp.zeros((4, 2)), jnp.ones((4, 2)), jnp.ones(4)
    for method, args in (("variational_expectations", (mean, var, y)), ("log_tilted", (mean, var, y)), ("predict_mean_and_var", (mean, var)),
                         ("predictive_log_density", (mean, var, y))):
        named = "log_tilted" if method == "predictive_log_density" else method
        with pytest.raises(NotImplementedError, match=rf"Scaled looks at 2 latent functions at once and must define {named}\("):
            getattr(Scaled(), method)(*args)
    with pytest.raises(NotImplementedError, match="log_tilted"):
        tilted_moments(Scaled(), mean, var, y)
    assert np.isfinite(ask(OwnScaled(), "predictive_log_density", mean, var, y)).all()


def dense(likelihood, mean, var, y, power, points):
    "Normaliser and moments of each function by a product rule."
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    axes = np.meshgrid(*[nodes] * len(mean), indexing="ij")
    f = np.asarray(mean) + np.sqrt(var) * np.stack([a.ravel() for a in axes], 1)
    log_w = sum(np.log(w).ravel() for w in np.meshgrid(*[weights / weights.sum()] * len(mean), indexing="ij"))
    log_p = log_w + power * np.asarray(ask(likelihood, "log_density", f, np.full(len(f), y)))
    log_Z = logsumexp(log_p)
    p = np.exp(log_p - log_Z)
    return log_Z, p @ f, p @ (f - p @ f) ** 2


@pytest.mark.parametrize("likelihood,atol", [(OwnScaled(), 0.02), (Softmax(3), 0.01)], ids=["two", "softmax"])
def test_moments_of_several_functions_against_a_dense_rule(likelihood, atol):
    P = likelihood.num_latents
    mean, var = np.array([[0.3, -0.2, 0.9], [0.0, 0.0, 0.0]])[:, :P], np.array([[0.5, 0.3, 1.2], [2.0, 0.4, 2.0]])[:, :P]
    y = np.array([1.0, 2.0])
    for power in (1.0, 0.5):
        found = jax.tree.map(np.asarray, moments(likelihood, mean, var, y, np.asarray(power)))
        for n in range(2):
            exact = dense(likelihood, mean[n], var[n], y[n], power, 60 if P == 2 else 40)
            for ours, theirs in zip(found, exact):
                assert np.allclose(ours[n], theirs, atol=atol)
    var = var / 4
    _, slope, in_var, _ = slopes(likelihood, mean, var, y)[1]
    for p in range(P):                                             # the identity holds for each function by itself
        unit = np.ones_like(mean) * np.eye(P)[p]
        curvature = slopes(likelihood, mean, var, y, unit)[1][3][:, p]
        assert np.allclose(2 * in_var[:, p], curvature + slope[:, p] ** 2, atol=2 * atol)


def test_moments_of_softmax_are_not_row_sums_of_a_hessian():
    v = np.asarray(moments(Softmax(3), np.zeros((1, 3)), np.full((1, 3), 2.0), np.zeros(1))[2])[0]
    assert np.all((1.5 < v) & (v < 1.7)) and np.allclose(v, dense(Softmax(3), np.zeros(3), np.full(3, 2.0), 0, 1.0, 40)[2], atol=0.01)


def test_moments_of_robust_max_against_draws():
    rng, likelihood = np.random.default_rng(8), RobustMax(3, epsilon=0.05)
    mean, var, y = np.array([[0.3, -0.2, 0.9]]), np.array([[0.5, 0.9, 1.2]]), np.array([1])
    f = mean[0] + np.sqrt(var[0]) * rng.normal(size=(400_000, 3))
    p = np.exp(ask(likelihood, "log_density", f, np.full(len(f), 1)))
    p /= p.sum()
    _, m, v = map(np.asarray, moments(likelihood, mean, var, y))
    assert np.allclose(m[0], p @ f, atol=0.01) and np.allclose(v[0], p @ (f - p @ f) ** 2, atol=0.02)


# an exposure in each row


def test_exposures_are_bins_of_their_own():
    rng, likelihood = np.random.default_rng(9), Poisson(binsize=None)
    mean, var, exposure = rng.normal(size=5), rng.uniform(0.1, 1, 5), np.array([0.2, 1.0, 3.5, 20.0, 7.0])
    y = likelihood.check(np.stack([rng.poisson(exposure), exposure], 1))
    rows = np.array([3, 1, 0, 4, 2])
    for method in METHODS:
        together = ask(likelihood, method, mean, var, y)
        in_bins_of_one = ask(Poisson(), method, mean + np.log(exposure), var, y[:, 0])      # b exp(f) = exp(f + log b)
        assert together.shape == (5,) and np.allclose(together, in_bins_of_one, rtol=1e-9)
        assert np.allclose(ask(likelihood, method, mean[rows], var[rows], y[rows]), together[rows])   # they travel with their rows
    by_hand = [poisson(m, count, b) for m, (count, b) in zip(mean, y.tolist())]
    assert np.allclose(ask(likelihood, "log_density", mean, y), by_hand)
    for ours, unit in zip(*(ask(each, "predict_mean_and_var", mean, var) for each in (likelihood, Poisson()))):
        assert np.allclose(ours, unit)
    log_Z, m, v = moments(likelihood, mean, var, y)
    exact = np.array([grid_moments(lambda f: poisson(f, *row), *at) for row, at in zip(y.tolist(), zip(mean, var))])
    assert np.allclose(np.stack([log_Z, m, v], 1), exact, atol=1e-6)


@pytest.mark.parametrize("y,words", [
    ([1.0, 2.0], r"y must have shape \(N, 2\), a count and an exposure in each row .* got shape \(2,\)"),
    (np.ones((3, 3)), r"got shape \(3, 3\)"), (np.ones((0, 2)), "at least one row"),
    ([[1.0, 1.0], [0.5, 1.0]], r"y\[:, 0\] must hold counts 0, 1, 2, \.\.\., but 1 of 2 .* y\[1, 0\] = 0.5"),
    ([[1.0, 0.0]], r"y\[:, 1\] must hold positive exposures, but 1 of 1 .* y\[0, 1\] = 0.0"),
    ([[1.0, np.nan]], r"y\[0, 1\] = nan"), ([[-1.0, 1.0]], r"y\[0, 0\] = -1.0")])
def test_exposures_are_checked(y, words):
    with pytest.raises(ValueError, match=words):
        Poisson(binsize=None).check(y)


def test_shapes_of_what_is_observed():
    for likelihood in (Gaussian(), Poisson(), Bernoulli(), Binomial(3), NegativeBinomial(), Ordinal(CUTS)):
        assert likelihood.observed_shape((7,)) == (7,) and likelihood.observed_shape((7, 2)) == (7, 2)
    assert Softmax(3).observed_shape((7, 3)) == (7,) and Scaled().observed_shape((7, 2)) == (7,)
    assert Heteroscedastic().observed_shape((7, 2)) == (7,)
    for likelihood in (Poisson(binsize=None), NegativeBinomial(binsize=None), Binomial(None)):
        assert likelihood.observed_shape((7,)) == (7, 2)
        with pytest.raises(ValueError, match=r"=None\) takes one latent function, \(N,\), got latent functions of shape \(7, 2\)"):
            likelihood.observed_shape((7, 2))
    assert np.isnan(jax.jit(lambda y: Poisson(None).check(y).sum())(jnp.array([[jnp.nan, 1.0]])))


DRAWN = [Gaussian(0.4), Bernoulli(), Bernoulli("logit"), RobustMax(3, 0.2), Softmax(3), Poisson(2.5), Gamma(3.0), Exponential(),
         Beta(4.0), Binomial(7), Binomial(4, "logit"), NegativeBinomial(0.7, 2.0), Ordinal([-0.6, 0.3, 1.1]), Heteroscedastic(),
         StudentT(0.6, 7.0)]
COUNTED = {"Bernoulli": 2, "RobustMax": 3, "Softmax": 3, "Poisson": 12, "Binomial": 5, "NegativeBinomial": 12, "Ordinal": 4}


@cache
def drawn(likelihood, n=20_000):
    "One of DRAWN, values of f, (3,) or (3, P), each repeated n times, and a y for each of them, (3, n)."
    likelihood, P = unwrap(DRAWN[likelihood]), DRAWN[likelihood].num_latents
    f = np.array([[-0.9, 0.8, 0.1], [0.2, -0.5, 0.7], [1.3, 0.4, -1.0]])[:, :P] if P else np.array([-0.9, 0.2, 1.3])
    y = likelihood.simulate(jax.random.key(3), jnp.repeat(jnp.asarray(f), n, axis=0))
    return likelihood, f, np.asarray(likelihood.check(y)).reshape(3, n)


@pytest.mark.parametrize("likelihood", range(len(DRAWN)), ids=lambda k: type(DRAWN[k]).__name__)
def test_draws_of_y_have_the_moments_that_the_likelihood_states(likelihood):
    likelihood, f, y = drawn(likelihood)
    if likelihood.num_latents and likelihood.num_latents > 2:   # moments are those of each class's indicator
        y = np.moveaxis(y[..., None] == np.arange(3), 1, 0)
    else:
        y = y.T
    mean, var = (np.asarray(moment(f)) for moment in (likelihood.conditional_mean, likelihood.conditional_variance))
    fourth = np.mean((y - mean) ** 4, axis=0)
    assert np.all(np.abs(y.mean(0) - mean) < 4.5 * np.sqrt(var / len(y)))
    assert np.all(np.abs(np.mean((y - mean) ** 2, axis=0) - var) < 5 * np.sqrt((fourth - var**2) / len(y)))


@pytest.mark.parametrize("likelihood", [k for k, c in enumerate(DRAWN) if type(c).__name__ in COUNTED], ids=lambda k: type(DRAWN[k]).__name__)
def test_frequencies_of_draws_are_the_probabilities_of_the_density(likelihood):
    likelihood, f, y = drawn(likelihood)
    for f, y in zip(f, y):
        values = np.arange(max(COUNTED[type(likelihood).__name__], likelihood.trials + 1 if isinstance(likelihood, Binomial) else 0))
        p = np.exp([likelihood.log_density(jnp.asarray(f)[None], jnp.array([1.0 * k]))[0] for k in values])
        found = np.array([np.sum(y == k) for k in values])
        p, found = np.append(p, max(1 - p.sum(), 0)), np.append(found, len(y) - found.sum())  # the rest
        assert found[p < 1e-9].sum() == 0
        few = p * len(y) > 5
        p, found = (np.append(a[few], a[~few].sum()) for a in (p, found))
        if p[-1] * len(y) < 1:
            p, found = p[:-1] / p[:-1].sum(), found[:-1]
        assert chi2.sf(np.sum((found - len(y) * p) ** 2 / (len(y) * p)), len(p) - 1) > 1e-4


@pytest.mark.parametrize("likelihood", [Gaussian(0.4), Bernoulli(), Poisson(2.5), Ordinal([-0.6, 0.3, 1.1])], ids=lambda c: type(c).__name__)
def test_draws_have_the_shape_and_the_precision_of_the_functions(likelihood):
    f = jnp.asarray(np.linspace(-3, 3, 12).reshape(4, 3), jnp.float32)
    y = unwrap(cast(likelihood, jnp.float32)).simulate(jax.random.key(0), f)
    assert y.shape == f.shape and y.dtype == jnp.float32
    likelihood.check(y)


def test_a_fraction_that_rounds_to_an_end_stays_inside():
    y = unwrap(Beta(0.01)).simulate(jax.random.key(0), jnp.zeros(1000))
    assert Beta(0.01).check(y).size == 1000


@pytest.mark.parametrize("likelihood, words", [(Poisson(None), "one binsize"), (Binomial(None), "one trials"),
                                               (NegativeBinomial(1.0, None), "one binsize")])
def test_sizes_that_stand_in_the_data_cannot_be_drawn(likelihood, words):
    with pytest.raises(ValueError, match=words):
        unwrap(likelihood).simulate(jax.random.key(0), jnp.zeros(3))


def test_a_likelihood_without_draws_says_so():
    class Silent(Likelihood):
        pass

    with pytest.raises(NotImplementedError, match=r"Silent defines no simulate\(key, f\)"):
        Silent().simulate(jax.random.key(0), jnp.zeros(3))
