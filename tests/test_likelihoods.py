"The likelihood base, the Gaussian and the Bernoulli, against adaptive quadrature, SciPy's densities, finite differences and draws."

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.distributions import constraints
from scipy.integrate import quad
from scipy.special import expit, log_expit, log_ndtr, ndtr
from scipy.stats import norm, t

from gp_thesis.likelihoods import Bernoulli, Gaussian, Likelihood
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
