"The likelihoods, against adaptive quadrature, fine grids, SciPy's densities and optimisers, finite differences and draws."

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from numpyro.distributions import constraints
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.special import expit, gammaln, log_expit, log_ndtr, logsumexp, ndtr, softmax
from scipy.stats import beta, expon, gamma, norm, t

from gp_thesis.likelihoods import (Bernoulli, Beta, Exponential, Gamma, Gaussian, Likelihood, LogRate, Poisson, RobustMax,
                                   Softmax, StudentT, log_omega, log_sum_exp_bound)
from gp_thesis.parameters import Parameter, cast, partition, positive, unwrap


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
    assert np.isclose(likelihood.log_density(mean, y), log_density(mean))
    assert np.isclose(likelihood.variational_expectations(mean, var, y), integrate(log_density, mean, var))
    assert np.isclose(likelihood.predictive_log_density(mean, var, y), np.log(integrate(lambda f: np.exp(log_density(f)), mean, var)))
    assert np.allclose(likelihood.predict_mean_and_var(mean, var), (mean, var + noise))


@pytest.mark.parametrize("mean,var,y", [(0.0, 0.5, 0.3), (1.0, 0.2, -1.0), (-0.5, 0.8, 2.5)])
def test_one_line_density_gets_its_integrals(mean, var, y):
    likelihood = unwrap(Student(0.9))
    log_density = lambda f: t.logpdf(y, 4.0, f, 0.9)
    assert np.isclose(likelihood.variational_expectations(mean, var, y), integrate(log_density, mean, var), atol=2e-4)
    expected = np.log(integrate(lambda f: np.exp(log_density(f)), mean, var))
    assert np.isclose(likelihood.predictive_log_density(mean, var, y), expected, atol=2e-4)


def test_more_nodes_are_a_class_attribute_and_help():
    class Finer(Student):
        points = 80

    exact = integrate(lambda f: t.logpdf(2.0, 4.0, f, 0.3), 0.0, 1.0)
    error = lambda kind: abs(unwrap(kind(0.3)).variational_expectations(0.0, 1.0, 2.0) - exact)
    assert error(Finer) < 0.1 * error(Student) and error(Student) > 1e-6


def test_moments_by_quadrature_are_those_of_a_lognormal_rate():
    mean, var = jnp.array([0.2, -1.0, 1.0]), jnp.array([0.1, 0.5, 1.0])
    y_mean, y_var = Rate().predict_mean_and_var(mean, var)
    rate = np.exp(mean + var / 2)
    assert np.allclose(y_mean, rate) and np.allclose(y_var, rate + rate**2 * (np.exp(var) - 1))


def test_variance_of_y_is_never_negative_in_single_precision():
    class Shifted(Rate):
        def conditional_variance(self, f):
            return jnp.zeros_like(f)

        def conditional_mean(self, f):
            return 1e4 + f

    mean, var = jnp.zeros(3, jnp.float32), jnp.array([1e-10, 1e-4, 1.0], jnp.float32)
    assert np.all(np.asarray(Shifted().predict_mean_and_var(mean, var)[1]) >= 0)


def test_base_agrees_with_overrides_elementwise_and_over_outputs():
    rng = np.random.default_rng(0)
    mean, y, var = rng.normal(size=(7, 2)), rng.normal(size=(7, 2)), rng.uniform(0.1, 0.5, (7, 2))
    likelihood = unwrap(Gaussian([0.5, 2.0]))                  # one variance for each output
    base = Likelihood
    assert np.allclose(likelihood.variational_expectations(mean, var, y), base.variational_expectations(likelihood, mean, var, y))
    assert np.allclose(likelihood.predictive_log_density(mean, var, y), base.predictive_log_density(likelihood, mean, var, y), atol=1e-3)
    for ours, theirs in zip(likelihood.predict_mean_and_var(mean, var), base.predict_mean_and_var(likelihood, mean, var)):
        assert np.allclose(ours, theirs) and ours.shape == (7, 2)
    column = unwrap(Gaussian(2.0)).variational_expectations(mean[:, 1], var[:, 1], y[:, 1])
    assert np.allclose(column, likelihood.variational_expectations(mean, var, y)[:, 1])
    assert likelihood.conditional_variance(jnp.asarray(mean)).shape == (7, 2)


@pytest.mark.parametrize("likelihood", [Gaussian(0.3), Student(1.0)], ids=["closed", "quadrature"])
def test_gradients_against_finite_differences(likelihood):
    mean, var, y = jnp.array([0.0, 1.0, -2.0]), jnp.array([0.3, 1.0, 0.1]), jnp.array([0.5, 0.5, 0.5])
    for method in ("variational_expectations", "predictive_log_density"):
        total = lambda mean, var: getattr(unwrap(likelihood), method)(mean, var, y).sum()
        for argument, gradient in enumerate(jax.grad(total, argnums=(0, 1))(mean, var)):
            for n in range(3):
                step = 1e-5 * np.eye(3)[n]
                up, down = ((mean + s * step, var) if argument == 0 else (mean, var + s * step) for s in (1, -1))
                assert np.isclose(gradient[n], (total(*up) - total(*down)) / 2e-5, rtol=1e-5, atol=1e-8)


def test_expected_log_likelihood_ignores_correlation():
    rng = np.random.default_rng(1)
    cov = np.array([[1.0, 0.95], [0.95, 1.2]])
    f = rng.multivariate_normal([0.0, 1.0], cov, size=400_000)
    y = np.array([0.5, 0.0])
    likelihood = unwrap(Student(0.7))
    draws = np.asarray(likelihood.log_density(f, y)).sum(1)
    sum_of_integrals = likelihood.variational_expectations(jnp.array([0.0, 1.0]), jnp.diag(jnp.asarray(cov)), y).sum()
    assert abs(draws.mean() - sum_of_integrals) < 4 * draws.std() / np.sqrt(len(draws))


def test_jensen_holds_and_is_strict():
    mean, var, y = jnp.linspace(-1, 1, 9), jnp.full(9, 0.4), jnp.linspace(1, -2, 9)
    for likelihood in (unwrap(Gaussian(0.5)), unwrap(Student(0.5))):
        assert np.all(likelihood.variational_expectations(mean, var, y) < likelihood.predictive_log_density(mean, var, y))


def test_far_away_the_log_density_stays_finite():
    assert np.isfinite(unwrap(Student(1.0)).predictive_log_density(0.0, 1.0, 1e6))
    far = Likelihood.predictive_log_density(unwrap(Gaussian(1.0)), 0.0, 1.0, 200.0)
    assert np.isfinite(far) and far < -5000


def test_single_precision_stays_single():
    likelihood = unwrap(cast(Gaussian(0.5), jnp.float32))
    mean, var, y = (jnp.asarray(a, jnp.float32) for a in ([0.0, 1.0], [0.1, 0.2], [0.3, 0.4]))
    values = (likelihood.variational_expectations(mean, var, y), likelihood.predictive_log_density(mean, var, y),
              *likelihood.predict_mean_and_var(mean, var))
    assert all(v.dtype == jnp.float32 for v in values)
    double = unwrap(Gaussian(0.5))
    assert np.allclose(values[0], double.variational_expectations(np.array([0.0, 1.0]), np.array([0.1, 0.2]), np.array([0.3, 0.4])), atol=1e-5)


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
    assert np.isclose(likelihood.log_density(0.7, y), log_probability(sign * 0.7))
    expected = integrate(lambda f: log_probability(sign * f), mean, var)
    assert np.isclose(likelihood.variational_expectations(mean, var, y), expected, atol=2e-6)
    p = integrate(lambda f: probability(sign * f), mean, var)
    assert np.isclose(likelihood.predictive_log_density(mean, var, y), np.log(p), atol=1e-9 if link == "probit" else 1e-5)
    one, variance = likelihood.predict_mean_and_var(mean, var)
    assert np.isclose(one, integrate(probability, mean, var), atol=1e-5) and np.isclose(variance, one * (1 - one))
    for ours, theirs in zip((one, variance), Likelihood.predict_mean_and_var(likelihood, mean, var)):
        assert np.isclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("dtype,rtol", [(jnp.float64, 1e-9), (jnp.float32, 1e-4)])
def test_bernoulli_tails_are_exact_to_rounding(link, dtype, rtol):
    f = np.array([-100.0, -30.0, -15.0, -5.0, -1.0, 0.0, 1.0, 3.0])
    log_probability = LINKS[link][1]
    for y, sign in ((1.0, 1), (0.0, -1)):
        ours = Bernoulli(link).log_density(jnp.asarray(sign * f, dtype), jnp.asarray(y, dtype))
        assert ours.dtype == dtype and np.allclose(ours, log_probability(f), rtol=rtol)
        slope = jax.vmap(jax.grad(Bernoulli(link).log_density), (0, None))(jnp.asarray(sign * f, dtype), jnp.asarray(y, dtype))
        true_slope = np.exp(norm.logpdf(f) - log_ndtr(f)) if link == "probit" else expit(-f)
        assert np.allclose(sign * slope, true_slope, rtol=10 * rtol)
    far = jnp.array([-1e4, -200.0, 200.0, 1e4], jnp.float32)
    value, slope = jax.vmap(jax.value_and_grad(lambda f: Bernoulli(link).log_density(f, jnp.float32(1))))(far)
    assert np.isfinite(value).all() and np.isfinite(slope).all()
    var = jnp.full(4, 0.5, jnp.float32)
    assert np.isfinite(Bernoulli(link).predictive_log_density(far, var, jnp.ones(4, jnp.float32))).all()
    assert np.isfinite(Bernoulli(link).variational_expectations(far, var, jnp.ones(4, jnp.float32))).all()


@pytest.mark.parametrize("link", LINKS)
def test_bernoulli_probabilities_add_up_and_moments_keep_small_ones(link):
    likelihood, f = Bernoulli(link), jnp.linspace(-8, 8, 33)
    assert np.allclose(jnp.exp(likelihood.log_density(f, 1.0)) + jnp.exp(likelihood.log_density(f, 0.0)), 1.0)
    assert np.allclose(likelihood.conditional_mean(f), LINKS[link][0](f))
    assert np.allclose(likelihood.conditional_variance(f), LINKS[link][0](f) * LINKS[link][0](-f), rtol=1e-9)   # 1 - p would lose the digits
    p, variance = likelihood.predict_mean_and_var(jnp.array([9.0]), jnp.array([0.1]))
    assert 0 < variance[0] < 1e-3 and variance[0] < 1.01 * (likelihood.predict_mean_and_var(jnp.array([-9.0]), jnp.array([0.1]))[0][0])


@pytest.mark.parametrize("link", LINKS)
def test_bernoulli_gradients_against_finite_differences_and_outputs(link):
    mean, var, y = jnp.array([[0.0, 1.0], [-2.0, 0.3]]), jnp.array([[0.3, 1.0], [0.1, 0.5]]), jnp.array([[0.0, 1.0], [1.0, 0.0]])
    for method in ("variational_expectations", "predictive_log_density"):
        values = getattr(Bernoulli(link), method)(mean, var, y)
        assert values.shape == (2, 2) and np.isclose(values[1, 0], getattr(Bernoulli(link), method)(-2.0, 0.1, 1.0))
        total = lambda mean, var: getattr(Bernoulli(link), method)(mean, var, y).sum()
        for argument, gradient in enumerate(jax.grad(total, argnums=(0, 1))(mean, var)):
            step = 1e-5 * np.eye(4).reshape(4, 2, 2)
            moved = lambda s: (mean + s, var) if argument == 0 else (mean, var + s)
            finite = [(total(*moved(s)) - total(*moved(-s))) / 2e-5 for s in step]
            assert np.allclose(gradient.reshape(-1), finite, rtol=1e-5, atol=1e-8)


def test_bernoulli_quadrature_is_as_good_as_the_chapter_says():
    for link, var, error in (("probit", 1.0, 1e-9), ("probit", 9.0, 3e-4), ("logit", 9.0, 2e-4), ("probit", 25.0, 6e-3)):
        for mean in (-6.0, -1.5, 0.7, 4.0):
            exact = integrate(LINKS[link][1], mean, var)
            assert abs(Bernoulli(link).variational_expectations(mean, var, 1.0) - exact) < error


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


# A likelihood, its log density by other means, draws of y given f, and an observation.
ONE = {
    "poisson 0": (Poisson(), lambda f: poisson(f, 0, 1), lambda f, rng: rng.poisson(np.exp(f)), 0.0),
    "poisson 7": (Poisson(2.5), lambda f: poisson(f, 7, 2.5), lambda f, rng: rng.poisson(2.5 * np.exp(f)), 7.0),
    "poisson 400": (Poisson(), lambda f: poisson(f, 400, 1), lambda f, rng: rng.poisson(np.exp(f)), 400.0),
    "exponential": (Exponential(), lambda f: expon.logpdf(0.7, scale=np.exp(-f)), lambda f, rng: rng.exponential(np.exp(-f)), 0.7),
    "exponential 0": (Exponential(), lambda f: f, lambda f, rng: rng.exponential(np.exp(-f)), 0.0),
    "gamma": (Gamma(3.3), lambda f: gamma.logpdf(0.7, 3.3, scale=np.exp(-f)), lambda f, rng: rng.gamma(3.3, np.exp(-f)), 0.7),
    "beta": (Beta(4.0), lambda f: beta.logpdf(0.3, 4 * ndtr(f), 4 * ndtr(-f)), lambda f, rng: rng.beta(4 * ndtr(f), 4 * ndtr(-f)), 0.3),
    "student": (StudentT(0.8, df=5.0), lambda f: t.logpdf(0.3, 5.0, f, 0.8), lambda f, rng: f + 0.8 * rng.standard_t(5.0, np.shape(f)), 0.3),
}


@pytest.mark.parametrize("case", ONE)
@pytest.mark.parametrize("mean,var", [(0.0, 0.5), (-1.2, 0.05), (0.8, 1.5)])
def test_integrals_of_one_latent_against_a_fine_grid(case, mean, var):
    likelihood, log_density, _, y = ONE[case]
    likelihood = unwrap(likelihood)
    grid, log_weight = normal_grid(40_001, reach=45.0)
    f = mean + np.sqrt(var) * grid
    inside = np.abs(f) < 5                                      # where the comparison itself can be trusted
    assert np.allclose(likelihood.log_density(f[inside], y), log_density(f[inside]), rtol=1e-9, atol=1e-9)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        expected = np.sum(np.where(log_weight > -70, np.exp(log_weight) * log_density(f), 0.0))
        density = logsumexp(np.nan_to_num(log_weight + log_density(f), nan=-np.inf))
    closed = isinstance(likelihood, LogRate)
    assert np.isclose(likelihood.variational_expectations(mean, var, y), expected, rtol=1e-9 if closed else 1e-4, atol=1e-12 if closed else 2e-4)
    assert np.isclose(likelihood.predictive_log_density(mean, var, y), density, rtol=0, atol=1e-6 if closed else 4e-3)


@pytest.mark.parametrize("case", ["poisson 7", "exponential", "gamma", "beta", "student"])
def test_moments_of_one_latent_against_draws_and_the_base_class(case):
    likelihood, _, draw, _ = ONE[case]
    likelihood, mean, var, rng = unwrap(likelihood), 0.3, 0.2, np.random.default_rng(0)
    y = draw(mean + np.sqrt(var) * rng.normal(size=1_000_000), rng)
    y_mean, y_var = likelihood.predict_mean_and_var(mean, var)
    assert abs(y.mean() - y_mean) < 5 * y.std() / 1000
    assert abs(y.var() - y_var) < 5 * ((y - y.mean()) ** 2).std() / 1000
    for ours, theirs in zip((y_mean, y_var), Likelihood.predict_mean_and_var(likelihood, mean, var)):
        assert np.isclose(ours, theirs, rtol=1e-6)


def test_a_large_count_needs_nodes_about_the_mode():
    grid, log_weight = normal_grid(400_001)
    for y in (30.0, 1000.0):
        exact = logsumexp(log_weight + poisson(2.0 + grid, y, 1))
        assert abs(Poisson().predictive_log_density(2.0, 1.0, y) - exact) < 1e-9
        assert abs(Likelihood.predictive_log_density(Poisson(), 2.0, 1.0, y) - exact) > 0.1
    for a in (-700.0, -3.0, 0.0, 1.0, 1.5, 20.0, 1e6):
        u = float(log_omega(jnp.asarray(a)))
        assert np.isclose(u + np.exp(u), a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ONE)
def test_derivatives_of_the_log_density_are_moments(case):
    "Slope and curvature in the mean are those of the tilted distribution, from a grid: what expectation propagation reads off."
    likelihood, log_density, _, y = ONE[case]
    likelihood, mean, var = unwrap(likelihood), 0.4, 0.6
    grid, log_weight = normal_grid()
    f = mean + np.sqrt(var) * grid
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        log_tilted = log_weight + log_density(f)
    p = np.exp(log_tilted - logsumexp(log_tilted))
    m1 = np.sum(p * f)
    v1 = np.sum(p * (f - m1) ** 2)
    log_z = lambda m: likelihood.predictive_log_density(m, var, y)
    assert np.isclose(jax.grad(log_z)(mean), (m1 - mean) / var, rtol=1e-3, atol=1e-5)
    assert np.isclose(jax.grad(jax.grad(log_z))(mean), (v1 - var) / var**2, rtol=5e-3, atol=1e-3)
    in_var = jax.grad(lambda v: likelihood.predictive_log_density(mean, v, y))(var)
    assert np.isclose(in_var, 0.5 * ((v1 + (m1 - mean) ** 2) / var**2 - 1 / var), rtol=5e-3, atol=1e-3)


EXTREMES = np.array([(m, v) for m in (-50.0, -10.0, 0.0, 3.0, 50.0) for v in (1e-8, 1e-3, 1.0, 10.0)]).T


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("likelihood,ys", [
    (Poisson(2.0), [0, 1, 200]), (Exponential(), [0, 0.5, 30]), (Gamma(2.5), [1e-6, 0.5, 30]),
    (Beta(3.0), [1e-6, 0.5, 1 - 1e-6]), (StudentT(0.3, 3.0), [-100.0, 0.0]),
], ids=lambda x: type(x).__name__)
def test_two_derivatives_are_finite_far_out(likelihood, ys, dtype):
    likelihood = unwrap(cast(likelihood, dtype))
    mean, var, y = (jnp.asarray(a.ravel(), dtype) for a in np.broadcast_arrays(*EXTREMES, np.array(ys)[:, None]))
    for method in (likelihood.variational_expectations, likelihood.predictive_log_density):
        @jax.jit
        def derivatives(mean, var):
            gradient = jax.grad(lambda m, v: method(m, v, y).sum(), argnums=(0, 1))
            return method(mean, var, y), gradient(mean, var), jax.jvp(lambda m: gradient(m, var), (mean,), (jnp.ones_like(mean),))[1]

        for array in jax.tree.leaves(derivatives(mean, var)):
            assert array.dtype == dtype and array.shape == mean.shape and np.isfinite(array).all()
    assert all(moment.dtype == dtype for moment in likelihood.predict_mean_and_var(mean, var))


@pytest.mark.parametrize("case", ONE)
def test_entry_by_entry_over_outputs_and_under_vmap(case):
    likelihood, _, _, y = ONE[case]
    likelihood, rng = unwrap(likelihood), np.random.default_rng(2)
    mean, var, ys = jnp.asarray(rng.normal(size=(4, 3))), jnp.asarray(rng.uniform(0.1, 1, (4, 3))), jnp.full((4, 3), y)
    for method in (likelihood.variational_expectations, likelihood.predictive_log_density):
        together = method(mean, var, ys)
        assert together.shape == (4, 3)
        assert np.allclose(together, jax.vmap(jax.vmap(method))(mean, var, ys)) and np.isclose(together[2, 1], method(mean[2, 1], var[2, 1], y))


def test_exponential_is_gamma_with_shape_one_and_parameters_train():
    mean, var, y = jnp.array([0.3, -1.0]), jnp.array([0.2, 2.0]), jnp.array([0.5, 4.0])
    one = unwrap(Gamma(1.0))
    for method in ("variational_expectations", "predictive_log_density"):
        assert np.allclose(getattr(Exponential(), method)(mean, var, y), getattr(one, method)(mean, var, y))
    for ours, theirs in zip(Exponential().predict_mean_and_var(mean, var), one.predict_mean_and_var(mean, var)):
        assert np.allclose(ours, theirs)
    assert [len(jax.tree.leaves(partition(likelihood)[0])) for likelihood in (Gamma(), Beta(), StudentT(), Poisson(), RobustMax(3))] == [1, 1, 1, 0, 0]
    for likelihood, y in ((Gamma([0.7, 2.0]), [0.4, 3.0]), (Beta(2.0), [0.4, 0.9]), (StudentT(0.5), [0.4, -3.0])):
        for method in ("variational_expectations", "predictive_log_density"):
            moving, rest = partition(likelihood)
            total = jax.jit(lambda moving: getattr(unwrap(eqx.combine(moving, rest)), method)(mean, var, jnp.asarray(y)).sum())
            flat, unravel = ravel_pytree(moving)
            gradient = ravel_pytree(jax.grad(total)(moving))[0]
            step = 1e-5 * np.eye(len(flat))
            finite = [(total(unravel(flat + s)) - total(unravel(flat - s))) / 2e-5 for s in step]
            assert np.allclose(gradient, finite, rtol=1e-4, atol=1e-7)


def test_student_moments_exist_where_they_do():
    mean, var = jnp.array([0.0, 1.0]), jnp.array([0.5, 0.5])
    assert np.allclose(unwrap(StudentT(2.0, df=3.0)).predict_mean_and_var(mean, var)[1], 0.5 + 4 * 3)
    infinite = unwrap(StudentT(2.0, df=2.0)).predict_mean_and_var(mean, var)
    assert np.allclose(infinite[0], mean) and np.isposinf(infinite[1]).all()
    assert all(np.isnan(moment).all() for moment in unwrap(StudentT(df=1.0)).predict_mean_and_var(mean, var))
    many = unwrap(StudentT(0.7, df=1e6))
    assert np.allclose(many.log_density(mean, 0.4), unwrap(Gaussian(0.49)).log_density(mean, 0.4), atol=1e-5)


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
    assert np.allclose(likelihood.probability_largest(mean, var, y), S, atol=atol)
    hit, miss = 0.98, 0.02 / (classes - 1)
    assert np.allclose(likelihood.variational_expectations(mean, var, y), S * np.log(hit) + (1 - S) * np.log(miss), atol=20 * atol)
    assert np.allclose(likelihood.predictive_log_density(mean, var, y), np.log(S * hit + (1 - S) * miss), atol=20 * atol)
    f = mean + np.sqrt(var) * rng.normal(size=(40_000, 8, classes))
    terms = np.asarray(likelihood.log_density(f, y))
    assert terms.shape == (40_000, 8)
    assert np.all(np.abs(terms.mean(0) - likelihood.variational_expectations(mean, var, y)) < 5 * terms.std(0) / 200 + 1e-3)
    p, p_var = likelihood.predict_mean_and_var(jnp.asarray(mean), jnp.asarray(var))
    assert np.allclose(p, likelihood.conditional_mean(f).mean(0), atol=0.015) and np.allclose(p_var, p * (1 - p))
    assert np.allclose(p.sum(1), 1, atol=classes * atol) and np.allclose(np.log(p[np.arange(8), y]), likelihood.predictive_log_density(mean, var, y))
    if classes == 2:
        other = 1 - y
        rows = np.arange(8)
        assert np.allclose(S, ndtr((mean[rows, y] - mean[rows, other]) / np.sqrt(var.sum(1))), atol=1e-9)


@pytest.mark.parametrize("likelihood", [RobustMax(3), Softmax(3)], ids=["robust", "softmax"])
def test_multiclass_gradients_against_finite_differences(likelihood):
    rng = np.random.default_rng(3)
    mean, var, y = jnp.asarray(rng.normal(size=(4, 3))), jnp.asarray(rng.uniform(0.3, 1.5, (4, 3))), jnp.array([0, 2, 1, 1])
    for method in ("variational_expectations", "predictive_log_density"):
        total = jax.jit(lambda mean, var: getattr(likelihood, method)(mean, var, y).sum())
        gradients = jax.grad(total, argnums=(0, 1))
        for argument in (0, 1):
            step = 1e-5 * np.eye(12).reshape(12, 4, 3)
            moved = lambda s: (mean + s, var) if argument == 0 else (mean, var + s)
            finite = [(total(*moved(s)) - total(*moved(-s))) / 2e-5 for s in step]
            assert np.allclose(gradients(mean, var)[argument].ravel(), finite, rtol=1e-5, atol=1e-8)
        curvature = jax.jvp(lambda m: gradients(m, var)[0], (mean,), (jnp.ones_like(mean).at[:, 0].set(3.0),))[1]   # the last step is in it
        ahead, behind = (gradients(mean + s * jnp.ones_like(mean).at[:, 0].set(3.0), var)[0] for s in (1e-5, -1e-5))
        assert np.allclose(curvature, (ahead - behind) / 2e-5, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("likelihood", [RobustMax(3), Softmax(3)], ids=["robust", "softmax"])
def test_multiclass_is_finite_far_out(likelihood, dtype):
    means = np.concatenate([np.array([[s, -s, 0], [0, s, -s], [1, s, 1]]) for s in (0, 1, 50, 1e4)])
    mean, var = np.tile(means, (6, 1)), np.repeat([1e-30, 1e-8, 1e-3, 1.0, 10.0, 1000.0], 12)[:, None] * np.ones(3)
    mean, var, y = (jnp.asarray(a, dtype) for a in (mean, var, np.tile([0, 0, 2], 24)))
    for method in (likelihood.variational_expectations, likelihood.predictive_log_density):
        @jax.jit
        def derivatives(mean, var):
            gradient = jax.grad(lambda m, v: method(m, v, y).sum(), argnums=(0, 1))
            return method(mean, var, y), gradient(mean, var), jax.jvp(lambda m: gradient(m, var)[0], (mean,), (jnp.ones_like(mean).at[:, 0].set(2),))[1]

        for array in jax.tree.leaves(derivatives(mean, var)):
            assert array.dtype == dtype and np.isfinite(array).all()
    p = likelihood.predict_mean_and_var(mean, var)[0]
    assert likelihood.log_density(mean, y).dtype == dtype and likelihood.conditional_variance(mean).dtype == dtype
    assert p.dtype == dtype and np.allclose(p.sum(1), 1, atol=1e-4)


def test_robust_max_gradient_is_the_same_in_single_precision():
    rng = np.random.default_rng(4)
    mean, var, y = rng.normal(size=(50, 10)), rng.uniform(0.1, 1.0, (50, 10)), rng.integers(0, 10, 50)
    total = lambda mean, var, y: RobustMax(10).variational_expectations(mean, var, y).sum()
    single, double = (jax.grad(total, argnums=(0, 1))(*(jnp.asarray(a, dtype) for a in (mean, var, y))) for dtype in (jnp.float32, jnp.float64))
    for ours, theirs in zip(single, double):
        assert ours.dtype == jnp.float32 and np.allclose(ours, theirs, atol=2e-4)


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("var", [0.1, 1.0, 10.0, 300.0])
def test_tilted_bound_is_a_bound_and_the_best_of_its_kind(classes, var):
    rng = np.random.default_rng(classes)
    mean, var = 2 * rng.normal(size=(6, classes)), var * rng.uniform(0.3, 1.7, (6, classes))
    bound = np.asarray(log_sum_exp_bound(jnp.asarray(mean), jnp.asarray(var)))
    draws = logsumexp(mean + np.sqrt(var) * rng.normal(size=(40_000, 6, classes)), axis=-1)
    assert np.all(bound > draws.mean(0) - 4 * draws.std(0) / 200)
    right_side = lambda a, m, v: 0.5 * np.sum(a**2 * v) + logsumexp(m + (0.5 - a) * v)
    for m, v, b in zip(mean, var, bound):
        best = min((minimize(right_side, start, args=(m, v), tol=1e-12) for start in (np.full(classes, 1 / classes), softmax(m))), key=lambda r: r.fun)
        assert abs(b - best.fun) < 1e-6 * max(1, abs(b))
    jensen = logsumexp(mean + var / 2, axis=1)
    assert np.all(bound < jensen)
    for steps in (1, 2):                                           # a bound however early it stops
        assert np.all(log_sum_exp_bound(jnp.asarray(mean), jnp.asarray(var), steps=steps) >= bound - 1e-9)


def test_softmax_probabilities_against_gumbel_noise_and_draws():
    "An independent road: the largest of f + Gumbel noise has the softmax probabilities."
    rng = np.random.default_rng(5)
    mean, var, y = rng.normal(size=(3, 4)), rng.uniform(0.2, 2.0, (3, 4)), np.array([0, 3, 1])
    f = mean + np.sqrt(var) * rng.normal(size=(400_000, 3, 4))
    winners = np.argmax(f + rng.gumbel(size=f.shape), axis=-1)
    frequencies = np.stack([np.mean(winners == c, axis=0) for c in range(4)], axis=1)
    likelihood = Softmax(4)
    p, p_var = likelihood.predict_mean_and_var(jnp.asarray(mean), jnp.asarray(var))
    assert np.allclose(p, frequencies, atol=4e-3) and np.allclose(p.sum(1), 1) and np.allclose(p_var, p * (1 - p))
    assert np.allclose(likelihood.predictive_log_density(mean, var, y), np.log(p[np.arange(3), y]))
    assert np.allclose(likelihood.log_density(f[0], y), np.log(softmax(f[0], axis=-1)[np.arange(3), y]))
    expected = np.mean(likelihood.log_density(f, y), axis=0)
    bound = likelihood.variational_expectations(mean, var, y)
    assert np.all(bound < expected) and np.all(bound > expected - 0.2)
    assert np.array_equal(p, Softmax(4).predict_mean_and_var(jnp.asarray(mean), jnp.asarray(var))[0])


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
    for method in (likelihood.variational_expectations, likelihood.predictive_log_density):
        with pytest.raises(ValueError, match="one column for each of the 3 classes"):
            method(jnp.zeros((5, 2)), jnp.ones((5, 2)), jnp.zeros(5))
    y = jnp.zeros(5)
    assert likelihood.variational_expectations(jnp.zeros((5, 3)), jnp.ones((5, 3)), y).shape == (5,)
    assert np.isfinite(jax.grad(lambda m: likelihood.variational_expectations(m, jnp.ones((5, 3)), y).sum())(jnp.zeros((5, 3)))).all()


@pytest.mark.parametrize("likelihood,y,words", [
    (Poisson(), [1, -1], r"y must hold counts 0, 1, 2, \.\.\. .*y\[1\] = -1"), (Poisson(), [1, np.inf], r"y\[1\] = inf"),
    (Exponential(), [0.0, -0.1], "numbers that are not negative"), (Exponential(), [np.inf], r"y\[0\] = inf"),
    (Gamma(), [0.0], r"y must hold positive numbers .*y\[0\] = 0"), (Gamma(), [np.nan], r"y\[0\] = nan"),
    (Beta(), [0.5, 1.0], r"strictly between 0 and 1 .*y\[1\] = 1"), (Beta(), [1.2], r"y\[0\] = 1.2"), (StudentT(), [np.inf], "finite real numbers"),
])
def test_support_of_one_latent(likelihood, y, words):
    with pytest.raises(ValueError, match=words):
        likelihood.check(y)


@pytest.mark.parametrize("make,words", [
    (lambda: RobustMax(3, epsilon=0.0), "epsilon must be strictly between 0 and 1, got 0.0"), (lambda: RobustMax(3, epsilon=1.0), "got 1.0"),
    (lambda: Poisson(0.0), "binsize must be positive and finite"), (lambda: Poisson(np.inf), "binsize"), (lambda: StudentT(df=0.0), "df must be positive"),
    (lambda: StudentT(scale=-1.0), "scale must be positive"), (lambda: Gamma(0.0), "shape must be positive"), (lambda: Beta(-2.0), "scale must be positive"),
])
def test_constructors_refuse_what_makes_no_sense(make, words):
    with pytest.raises(ValueError, match=words):
        make()
