"Quantiles of predictions against Monte Carlo, SciPy's distributions, and what they must keep to."
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import gp_thesis as gpt
from gp_thesis import likelihoods
from gp_thesis.exact import conditional_cdf, predictive_quantiles

Φ = scipy.stats.norm.cdf
LEVELS = np.array([0.02, 0.3, 0.5, 0.9])
MEAN, VAR = np.array([-0.4, 1.2]), np.array([0.3, 1.5])



class Edged:
    "The label of the interval that f and standard normal noise lie in."
    def __init__(self, f):
        self.f = np.asarray(f)

    def rvs(self, random_state):
        return np.digitize(self.f + random_state.normal(size=self.f.shape), [-0.5, 0.2, 1.0])

    def ppf(self, q):
        return np.digitize(self.f + scipy.stats.norm.ppf(q), [-0.5, 0.2, 1.0])


# A likelihood, and the same in SciPy: the distribution of y given f.
CASES = {
    "Gaussian": (gpt.Gaussian(0.2), lambda f: scipy.stats.norm(f, np.sqrt(0.2))),
    "Bernoulli, probit": (gpt.Bernoulli(), lambda f: scipy.stats.bernoulli(Φ(f))),
    "Bernoulli, logit": (gpt.Bernoulli("logit"), lambda f: scipy.stats.bernoulli(scipy.special.expit(f))),
    "Poisson": (gpt.Poisson(2.5), lambda f: scipy.stats.poisson(2.5 * np.exp(f))),
    "Poisson, exposures": (gpt.Poisson(None), lambda f: scipy.stats.poisson(np.exp(f))),
    "Gamma": (gpt.Gamma(3.0), lambda f: scipy.stats.gamma(3.0, scale=np.exp(-f))),
    "Exponential": (likelihoods.Exponential(), lambda f: scipy.stats.expon(scale=np.exp(-f))),
    "Beta": (gpt.Beta(4.0), lambda f: scipy.stats.beta(4 * Φ(f), 4 * Φ(-f))),
    "Binomial": (gpt.Binomial(7), lambda f: scipy.stats.binom(7, Φ(f))),
    "NegativeBinomial": (gpt.NegativeBinomial(0.4, binsize=3.0), lambda f: scipy.stats.nbinom(2.5, 1 / (1 + 1.2 * np.exp(f)))),
    "Ordinal": (gpt.Ordinal([-0.5, 0.2, 1.0]), lambda f: Edged(f)),
    "StudentT": (gpt.StudentT(0.3, df=2.5), lambda f: scipy.stats.t(2.5, f, 0.3)),
}


@pytest.fixture(params=CASES, scope="module")
def case(request):
    likelihood, law = CASES[request.param]
    quantiles = jax.jit(lambda mean, var: predictive_quantiles(gpt.unwrap(likelihood), mean, var, jnp.asarray(LEVELS)))
    return quantiles, law


def test_against_monte_carlo(case):
    quantiles, law = case
    found = np.asarray(quantiles(jnp.asarray(MEAN), jnp.asarray(VAR)))
    assert found.shape == (4, 2)
    rng, n = np.random.default_rng(0), 400_000
    y = law(MEAN + np.sqrt(VAR) * rng.normal(size=(n, 2))).rvs(random_state=rng)
    below, at_most = (y[:, None] < found - 1e-9).mean(0), (y[:, None] <= found + 1e-9).mean(0)
    noise = 4.5 * np.sqrt(LEVELS * (1 - LEVELS) / n)[:, None]
    assert (below <= LEVELS[:, None] + noise).all() and (at_most >= LEVELS[:, None] - noise).all()


def test_where_f_is_known_they_are_those_of_the_likelihood(case):
    quantiles, law = case
    found = quantiles(jnp.asarray(MEAN), jnp.zeros(2))
    assert np.allclose(found, law(MEAN).ppf(LEVELS[:, None]), rtol=1e-9, atol=1e-9)


def test_of_a_posterior():
    X, Xs = np.linspace(0, 3, 9)[:, None], np.array([[0.5], [4.0]])
    Y = np.sin(X) * [1.0, 2.0]
    post = gpt.Exact(gpt.GP(gpt.RBF(), gpt.Gaussian(0.1))).posterior(X, Y)
    mean, var = post.predict_y(Xs)
    assert np.allclose(post.quantiles(Xs, LEVELS), scipy.stats.norm(mean, np.sqrt(var)).ppf(LEVELS[:, None, None]))
    assert np.allclose(post.quantiles(Xs, 0.5), mean)
    svgp = lambda likelihood: gpt.SVGP(gpt.GP(gpt.RBF(), likelihood), gpt.InducingPoints(X[::4])).posterior()
    counts = svgp(gpt.Poisson()).quantiles(Xs, [0.1, 0.99])
    assert counts.shape == (2, 2) and np.array_equal(counts, np.floor(counts)) and (counts[0] <= counts[1]).all()
    for likelihood in (gpt.Softmax(3), gpt.RobustMax(2)):
        with pytest.raises(ValueError, match=f"not known for the likelihood {type(likelihood).__name__}: register it"):
            svgp(likelihood).quantiles(Xs, 0.5)
    for q in (0.0, 1.0, [0.5, np.nan], [[0.5]], [], -1):
        with pytest.raises(ValueError, match="q must be a level strictly between 0 and 1"):
            post.quantiles(Xs, q)


def test_noise_that_is_a_function():
    mean, var = np.array([[0.5, -1.0], [2.0, 1.0]]), np.array([[0.3, 0.8], [0.0, 0.0]])
    found = predictive_quantiles(gpt.Heteroscedastic(), jnp.asarray(mean), jnp.asarray(var), jnp.asarray(LEVELS))
    assert found.shape == (4, 2) and np.allclose(found[:, 1], scipy.stats.norm(2.0, np.exp(0.5)).ppf(LEVELS))
    rng = np.random.default_rng(0)
    f, g = mean[0][:, None] + np.sqrt(var[0])[:, None] * rng.normal(size=(2, 400_000))
    y = f + np.exp(g / 2) * rng.normal(size=400_000)
    assert np.abs((y[:, None] <= found[:, 0]).mean(0) - LEVELS).max() < 4e-3


def test_a_likelihood_of_ones_own():
    class Uniform(gpt.Likelihood):
        "y is at most one half above or below f."

    @conditional_cdf.register
    def _(likelihood: Uniform, f, y):
        return jnp.clip(y - f + 0.5, 0, 1)

    found = predictive_quantiles(Uniform(), jnp.array([3.0, 1e6]), jnp.array([0.01, 4.0]), jnp.array(0.25))
    f = np.random.default_rng(1).normal(size=1_000_000)
    y = np.random.default_rng(2).uniform(-0.5, 0.5, 1_000_000)
    assert np.allclose(found, [np.quantile(3 + 0.1 * f + y, 0.25), 1e6 + np.quantile(2 * f + y, 0.25)], rtol=0, atol=0.01)
