"Counts in trials, clumped counts, ordered labels and noise with a function of its own: limits, tails, modes, grids and draws."

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy.special import log_expit, log_ndtr, logsumexp, ndtr
from scipy.stats import nbinom, norm

from gp_thesis.likelihoods import (Bernoulli, Binomial, Gaussian, Heteroscedastic, LogConcave, NegativeBinomial, Ordinal, Poisson,
                                   concave_bump, log_normal_interval, log_rising)
from gp_thesis.parameters import cast, partition, unwrap
from test_likelihoods import CUTS, LINKS, METHODS, ONE, ask, binomial, check_slopes, interval, moments, three_rows


@pytest.mark.parametrize("link", LINKS)
def test_one_trial_is_a_label_and_trials_in_rows_are_trials(link):
    mean, var, y = np.array([-1.5, 0.3, 2.0, 0.0]), np.array([0.2, 1.0, 0.7, 2.0]), np.array([0.0, 1.0, 1.0, 0.0])
    for method in METHODS:
        assert np.allclose(ask(Binomial(1, link), method, mean, var, y), ask(Bernoulli(link), method, mean, var, y), atol=2e-5)
    assert np.allclose(ask(Binomial(1, link), "log_density", mean, y), ask(Bernoulli(link), "log_density", mean, y), atol=1e-14)
    for ours, theirs in zip(*(ask(likelihood, "predict_mean_and_var", mean, var) for likelihood in (Binomial(1, link), Bernoulli(link)))):
        assert np.allclose(ours, theirs, rtol=1e-13)
    likelihood, successes = Binomial(None, link), np.array([0.0, 2.0, 7.0, 5.0])
    pairs = likelihood.check(np.stack([successes, np.full(4, 7)], 1))
    for method in METHODS:
        together = ask(likelihood, method, mean, var, pairs)
        assert together.shape == (4,) and np.allclose(together, ask(Binomial(7, link), method, mean, var, successes), rtol=1e-12)
    per_trial = ask(likelihood, "predict_mean_and_var", mean, var)
    assert np.allclose(per_trial, ask(Bernoulli(link), "predict_mean_and_var", mean, var), rtol=1e-13)


def test_negative_binomial_tends_to_poisson_and_takes_exposures():
    y, f = np.arange(60.0), np.linspace(-3, 4, 60)
    for dispersion, atol in ((1e-3, 2.0), (1e-6, 2e-3), (1e-10, 2e-7), (1e-13, 1e-9)):
        apart = np.asarray(ask(unwrap(NegativeBinomial(dispersion)), "log_density", f, y)) - ask(Poisson(), "log_density", f, y)
        assert np.abs(apart).max() < atol
    mean, var = f[::6] / 2, np.full(10, 0.4)
    small = unwrap(NegativeBinomial(1e-10, 2.0))
    for method in METHODS:
        assert np.allclose(ask(small, method, mean, var, y[:10]), ask(Poisson(2.0), method, mean, var, y[:10]), atol=1e-5)
    for ours, theirs in zip(*(ask(likelihood, "predict_mean_and_var", mean, var) for likelihood in (small, Poisson(2.0)))):
        assert np.allclose(ours, theirs, rtol=1e-8)
    own, exposure = unwrap(NegativeBinomial(0.3, binsize=None)), np.geomspace(0.1, 20, 10)
    for method in METHODS:
        together = ask(own, method, mean, var, np.stack([y[:10], exposure], 1))
        shifted = ask(unwrap(NegativeBinomial(0.3)), method, mean + np.log(exposure), var, y[:10])
        assert np.allclose(together, shifted, rtol=1e-9)


def test_rising_factors_and_their_slope_at_all_dispersions():
    alpha, counts = np.array([1e-12, 1e-6, 1e-3, 0.03, 0.049, 0.051, 0.3, 5.0]), np.array([0.0, 1.0, 2.0, 17.0, 400.0])
    value, slope = jax.jit(jax.vmap(jax.vmap(jax.value_and_grad(log_rising, 1), (None, 0)), (0, None)))(counts, alpha)
    for n, y in enumerate(counts):
        k = np.arange(y)
        assert np.allclose(value[n], np.log1p(alpha[:, None] * k).sum(1), rtol=1e-9, atol=1e-11)
        assert np.allclose(slope[n, 1:], (k / (1 + alpha[1:, None] * k)).sum(1), rtol=1e-6, atol=1e-6)
    single = jax.jit(log_rising)(np.float32(17), alpha.astype(np.float32))
    assert single.dtype == jnp.float32 and np.allclose(single, value[3], rtol=1e-4, atol=1e-5)


def test_two_ordered_classes_are_a_probit_label_and_all_add_up():
    mean, var = np.array([-1.5, 0.3, 2.0]), np.array([0.2, 1.0, 0.7])
    two, shifted = unwrap(Ordinal([0.0])), unwrap(Ordinal([0.8]))
    for y in (np.zeros(3), np.ones(3)):
        for method in METHODS:
            label = ask(Bernoulli(), method, mean, var, y)
            assert np.allclose(ask(two, method, mean, var, y), label, atol=1e-12)
            assert np.allclose(ask(shifted, method, mean + 0.8, var, y), label, atol=1e-12)
    for ours, theirs in zip(*(ask(likelihood, "predict_mean_and_var", mean, var) for likelihood in (two, Bernoulli()))):
        assert np.allclose(ours, theirs, rtol=1e-12)
    four = unwrap(Ordinal(CUTS))
    p = np.asarray(ask(four, "class_probabilities", mean, var))
    below = ndtr((CUTS - mean[:, None]) / np.sqrt(1 + var)[:, None])
    assert p.shape == (3, 4) and np.allclose(p, np.diff(below, axis=1, prepend=0, append=1), atol=1e-14)
    assert np.allclose(ask(four, "conditional_mean", mean), ndtr(mean[:, None] - CUTS).sum(1))
    assert np.allclose(unwrap(Ordinal(CUTS)).edges.values, CUTS) and Ordinal(CUTS).num_classes == 4 and len(Ordinal(CUTS).edges) == 3


@pytest.mark.parametrize("dtype,rtol", [(np.float64, 1e-9), (np.float32, 2e-4)])
def test_interval_of_the_normal_in_both_tails(dtype, rtol):
    a = np.array([-3.0, 2.0, 8.0, 30.0, -30.0, -1.0, -np.inf, 5.0, -np.inf, 35.0])
    b = np.array([-1.0, 2.5, 9.0, 31.0, -29.0, 1.0, -4.0, np.inf, 12.0, np.inf])
    value, slope = jax.jit(jax.vmap(jax.value_and_grad(lambda s, a, b: log_normal_interval(a - s, b - s)), (None, 0, 0)))(dtype(0), a.astype(dtype), b.astype(dtype))
    exact = interval(a, b)
    assert value.dtype == dtype and np.allclose(value, exact, rtol=rtol)
    pdf = lambda z: np.where(np.isfinite(z), np.exp(norm.logpdf(np.where(np.isfinite(z), z, 0)) - exact), 0)
    assert np.allclose(slope, pdf(a) - pdf(b), rtol=10 * rtol, atol=rtol)
    far = np.array([-1e4, -300.0, 300.0, 1e4], dtype)
    for y in range(4):
        found = jax.vmap(jax.value_and_grad(unwrap(cast(Ordinal(CUTS), dtype)).log_density), (0, None))(far, y)
        assert all(np.isfinite(part).all() for part in found)


@pytest.mark.parametrize("likelihood,y,log_density", [
    (Binomial(5000, "logit"), 4000.0, lambda f: binomial(f, 4000, 5000, log_expit)),
    (NegativeBinomial(0.01), 900.0, lambda f: nbinom.logpmf(900, 100, 1 / (1 + 0.01 * np.exp(f)))),
    (Ordinal(CUTS), 1.0, lambda f: interval(CUTS[0] - f, CUTS[1] - f))], ids=["binomial", "negative binomial", "ordinal"])
def test_the_one_mode_is_found_from_far_away(likelihood, y, log_density):
    likelihood, means, variances = unwrap(likelihood), np.array([-8.0, 0.0, 5.0, 30.0]), np.array([4.0, 100.0, 0.01, 9.0])

    @jax.jit
    def both(mean, var):
        bump = concave_bump(lambda f: 0.7 * likelihood.log_density(f, y), mean, var)
        return *bump, likelihood.log_tilted(mean, var, jnp.full(4, y), 0.7)

    place, width, ours = map(np.asarray, both(means, variances))
    assert np.all((0 < width) & (width <= 1 + 1e-12))
    for n, (mean, sd) in enumerate(zip(means, np.sqrt(variances))):
        exponent = lambda e: 0.7 * log_density(mean + sd * e) - 0.5 * e**2
        e = place[n] + width[n] * np.linspace(-30, 30, 60_001)          # steps of a thousandth of the width
        values = np.nan_to_num(exponent(e), nan=-np.inf)
        assert np.abs(e[np.argmax(values)] - place[n]) < 3e-3 * width[n]
        assert np.isclose(ours[n], logsumexp(values) + np.log((e[1] - e[0]) / np.sqrt(2 * np.pi)), rtol=1e-4, atol=5e-3)


@pytest.mark.parametrize("trials,mean,var", [(1000, -4.0, 1.0), (1000, -3.0, 1.0), (50, -4.0, 1.0), (10, -10.0, 9.0), (10, -50.0, 9.0)])
def test_the_one_mode_is_found_between_two_flat_sides(trials, mean, var):
    # Newton's step from either side leads to the other, so that without halving it goes to and fro.
    for sign, y in ((1.0, float(trials)), (-1.0, 0.0)):
        ours = ask(Binomial(trials, "logit"), "predictive_log_density", sign * mean, var, y)
        f = mean + np.sqrt(var) * np.linspace(-20, 20, 400_001)
        exact = logsumexp(trials * log_expit(f) + norm.logpdf(f, mean, np.sqrt(var))) + np.log(f[1] - f[0])
        assert np.isclose(ours, exact, atol=2e-3)


@pytest.mark.parametrize("name", ["negative binomial", "ordinal"])
def test_slopes_in_parameters_of_concave_likelihoods(name):
    likelihood, _, _, y = ONE[name]
    mean, var, y = np.array([-1.0, 0.2, 0.9]), np.array([0.3, 1.0, 0.1]), np.full(3, y)
    trainable, rest = partition(likelihood)
    flat, restore = ravel_pytree(trainable)

    @jax.jit
    @jax.value_and_grad
    def total(v):
        model = unwrap(eqx.combine(restore(v), rest))
        return jnp.sum(model.variational_expectations(mean, var, y)) + 2 * jnp.sum(model.log_tilted(mean, var, y, 0.5))

    gradient = np.asarray(total(flat)[1])
    finite = [(total(flat + e)[0] - total(flat - e)[0]) / 2e-5 for e in 1e-5 * np.eye(flat.size)]
    assert np.allclose(gradient, finite, rtol=1e-4, atol=1e-5)
    assert np.all(gradient != 0)


@eqx.filter_jit
def everything(likelihood, mean, var, y):
    return (likelihood.variational_expectations(mean, var, y), likelihood.log_tilted(mean, var, y, 1.0), *likelihood.predict_mean_and_var(mean, var))


@pytest.mark.parametrize("likelihood", [Binomial(9), NegativeBinomial(0.4), Ordinal(CUTS), Heteroscedastic()], ids=lambda likelihood: type(likelihood).__name__)
def test_counts_orders_and_noise_stay_single_and_near(likelihood):
    rows = three_rows(likelihood, 2.0)
    double = everything(unwrap(likelihood), *rows)
    single = everything(unwrap(cast(likelihood, jnp.float32)), *(a.astype(np.float32) for a in rows))
    assert all(ours.dtype == jnp.float32 and np.allclose(ours, theirs, rtol=1e-4, atol=1e-4) for ours, theirs in zip(single, double))
    assert isinstance(likelihood, (LogConcave, Heteroscedastic))


def test_numbers_are_broadcast_against_rows():
    likelihood, y = unwrap(NegativeBinomial(0.4)), jnp.array([0.0, 3.0])
    together = eqx.filter_jit(lambda: (likelihood.log_tilted(jnp.full(2, 0.3), jnp.full(2, 0.5), y, 0.5), likelihood.log_tilted(0.3, 0.5, y, 0.5),
                                       likelihood.log_tilted(0.3, 0.5, 3.0, 0.5)))
    rows, broadcast, one = together()
    assert np.allclose(broadcast, rows, rtol=1e-12) and np.isclose(one, rows[1], rtol=1e-12)


# noise with a function of its own


def noisy_grid(mean, var, y, power=1.0):
    "log Z and moments of both functions, on a grid of both."
    t = np.linspace(-9, 9, 1201)
    f, g = mean[0] + np.sqrt(var[0]) * t[:, None], mean[1] + np.sqrt(var[1]) * t
    log_p = power * norm.logpdf(y, f, np.exp(g / 2)) - 0.5 * t[:, None] ** 2 - 0.5 * t**2 - np.log(2 * np.pi) + 2 * np.log(t[1] - t[0])
    log_Z = logsumexp(log_p)
    p = np.exp(log_p - log_Z)
    m = np.array([np.sum(p * f), np.sum(p * g)])
    return log_Z, m, np.array([np.sum(p * (f - m[0]) ** 2), np.sum(p * (g - m[1]) ** 2)])


def test_integrals_over_mean_and_log_noise_against_a_grid_and_draws():
    mean = np.array([[0.4, -1.0], [0.0, 0.5], [-2.0, 0.0], [1.0, -3.0]])
    var, y = np.array([[0.5, 0.8], [2.0, 1.5], [0.3, 0.2], [0.05, 1.0]]), np.array([1.5, -0.3, 3.0, 4.0])
    likelihood = Heteroscedastic()
    f = mean[:, None] + np.sqrt(var)[:, None] * np.random.default_rng(3).normal(size=(4, 400_000, 2))
    assert np.allclose(ask(likelihood, "log_density", f[0, :5], y[0]), norm.logpdf(y[0], f[0, :5, 0], np.exp(0.5 * f[0, :5, 1])))
    terms = norm.logpdf(y[:, None], f[..., 0], np.exp(0.5 * f[..., 1]))
    expected = np.asarray(ask(likelihood, "variational_expectations", mean, var, y))
    assert expected.shape == (4,) and np.all(np.abs(expected - terms.mean(1)) < 5 * terms.std(1) / np.sqrt(400_000))
    simulated = f[..., 0] + np.exp(0.5 * f[..., 1]) * np.random.default_rng(4).normal(size=(4, 400_000))
    y_mean, y_var = ask(likelihood, "predict_mean_and_var", mean, var)
    assert np.allclose(simulated.mean(1), y_mean, atol=0.02) and np.allclose(simulated.var(1), y_var, rtol=0.03)
    for power in (1.0, 0.5):
        log_Z, m, v = moments(likelihood, mean, var, y, np.asarray(power))
        for n in range(4):
            exact = noisy_grid(mean[n], var[n], y[n], power)
            assert np.isclose(log_Z[n], exact[0], atol=2e-5)
            assert np.allclose(m[n], exact[1], atol=1e-3) and np.allclose(v[n], exact[2], atol=2e-3)


def test_heteroscedastic_noise_known_is_gaussian_noise_and_columns_are_checked():
    mean, y = np.array([[0.4, -1.0], [0.0, 0.5]]), np.array([1.5, -0.3])
    var = np.array([[0.5, 1e-12], [2.0, 1e-12]])
    for n in range(2):
        known = unwrap(Gaussian(np.exp(mean[n, 1])))
        for method in METHODS:
            assert np.isclose(ask(Heteroscedastic(), method, mean, var, y)[n], ask(known, method, mean[n, 0], var[n, 0], y[n]))
    check_slopes(Heteroscedastic(), mean, var + np.array([0.0, 0.4]), y, power=0.5, rtol=2e-4, atol=1e-6)
    for method in METHODS:
        with pytest.raises(ValueError, match=r"f must have two columns, the mean of y and the log of its variance, got shape \(4, 3\)"):
            getattr(Heteroscedastic(), method)(jnp.zeros((4, 3)), jnp.ones((4, 3)), jnp.zeros(4))
    assert Heteroscedastic.num_latents == 2 and not jax.tree.leaves(Heteroscedastic())
