"""What holds for every approximation: derivatives to second order, batches of models, failures.

A new approximation joins by being listed in APPROXIMATIONS."""
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpyro.infer import MCMC, NUTS

import gp_thesis as gpt
from gp_thesis.parameters import partition

rng = np.random.default_rng(0)
N = 8
X = np.sort(rng.uniform(0, 4, (N, 1)), axis=0)
y = np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=N)
labels, classes, counts = (y > 0).astype(float), rng.integers(0, 3, N).astype(float), rng.poisson(np.exp(y)).astype(float)
points = gpt.InducingPoints(X[1::3] + 0.1)
noisy, label = gpt.GP(gpt.RBF(0.8, 1.2), gpt.Gaussian(0.2)), gpt.GP(gpt.Matern52(0.9, 1.5), gpt.Bernoulli())
robust, soft = gpt.GP(gpt.RBF(0.8), gpt.RobustMax(3)), gpt.GP(gpt.RBF(0.8), gpt.Softmax(2))
count = gpt.GP(gpt.Matern52(0.9, 1.5), gpt.Poisson())

APPROXIMATIONS = {
    "Exact": (gpt.Exact(noisy), y),
    "VFE": (gpt.VFE(noisy, points), y),
    "FITC": (gpt.FITC(noisy, points), y),
    "PITC": (gpt.PITC(noisy, points, np.array_split(np.arange(N), 3)), y),
    "PowerEPRegression": (gpt.PowerEPRegression(noisy, points, 0.5), np.stack([y, -y**2], axis=1)),
    "DTC": (gpt.DTC(noisy, points), y),
    "VGP": (gpt.VGP(label, N), labels),
    "WhitenedVGP": (gpt.WhitenedVGP(label, N), labels),
    "MeanField": (gpt.MeanField(gpt.GP(gpt.Matern12(0.9, 1.5), gpt.Bernoulli()), N), labels),
    "SVGP, probit": (gpt.SVGP(label, points), labels),
    "SVGP, unwhitened": (gpt.SVGP(label, points, whiten=False), labels),
    "SVGP, robust max": (gpt.SVGP(robust, points), classes),
    "SVGP, softmax": (gpt.SVGP(soft, [points] * 2), labels),
    "SVGP, a kernel for each": (gpt.SVGP(gpt.GP(gpt.Independent([gpt.RBF(0.8), gpt.Matern32(1.5, 0.7)]), gpt.Heteroscedastic()), points), y),
    "SVGP, Gaussian": (gpt.SVGP(noisy, points, 2), np.stack([y, -y], axis=1)),
    "ApproximatePowerEP": (gpt.ApproximatePowerEP(label, points, 0.5), labels),
    "ApproximatePowerEP, power 1": (gpt.ApproximatePowerEP(noisy, points), y),
    "ApproximatePowerEP, robust max": (gpt.ApproximatePowerEP(robust, points, 0.5), classes),
    "EP": (gpt.EP(count, tolerance=1e-11), counts),
    "GFITC": (gpt.GFITC(label, points, tolerance=1e-11), labels),
    "PowerEP": (gpt.PowerEP(label, points, 0.5, tolerance=1e-11), labels),
    "PowerEP, softmax": (gpt.PowerEP(soft, points, 0.5, tolerance=1e-11), labels),
    "SparseMeanField": (gpt.SparseMeanField(label, points), labels),
    "WeakBound": (gpt.WeakBound(label, points), labels),
}
REVERSE_TWICE = ("Exact", "VFE", "SVGP, probit", "ApproximatePowerEP", "EP", "WeakBound")   # one of each way to differentiate


@pytest.fixture(params=APPROXIMATIONS, scope="module")
def problem(request):
    "The objective as a function of all numbers that move, and where: at no special point."
    approx, observed = APPROXIMATIONS[request.param]
    trainable, rest = partition(approx)
    leaves, structure = jax.tree.flatten(trainable)
    flat = np.concatenate([np.ravel(leaf) for leaf in leaves])  # NumPy, which compiles nothing
    theta = flat + 0.1 * np.random.default_rng(1).normal(size=flat.shape)

    def objective(theta):
        cut = jnp.split(theta, np.cumsum([leaf.size for leaf in leaves])[:-1])
        moved = structure.unflatten(part.reshape(leaf.shape) for part, leaf in zip(cut, leaves))
        return eqx.combine(moved, rest).objective(X, observed)

    return objective, theta, request.param in REVERSE_TWICE


def test_first_and_second_derivatives_and_batches_of_models(problem):
    objective, theta, reverse_twice = problem
    n, step, directions = len(theta), 1e-4, np.random.default_rng(2).normal(size=(2, len(theta)))
    shifted = theta + step * np.concatenate([directions, -directions])

    # As few programs as can be, since programs are what these tests take their time for: this one gives, for each model of
    # a batch, value and gradient and, forward over reverse, the derivatives of both in a direction.
    @jax.jit
    def in_a_batch(thetas, tangents):
        second_order = lambda *at: jax.jvp(jax.value_and_grad(objective), *zip(at))
        return jax.vmap(second_order)(thetas, tangents)

    @jax.jit
    def alone(theta, tangent):
        return jax.jvp(objective, (theta,), (tangent,))

    @jax.jit
    def reverse_over_reverse(theta, tangent):
        return jax.grad(lambda theta: jax.grad(objective)(theta) @ tangent)(theta)

    with gpt.nan_on_failure():
        thetas, tangents = np.concatenate([np.tile(theta, (n, 1)), shifted]), np.concatenate([np.eye(n), np.zeros((4, n))])
        (value, slope), (slope_forward, hessian) = jax.tree.map(np.asarray, in_a_batch(thetas, tangents))
    each = [alone(at, directions[0]) for at in (theta, shifted[0])]                         # these with errors where a matrix fails
    along = reverse_over_reverse(theta, directions[0]) if reverse_twice else None

    gradient, slope_forward, hessian = slope[0], slope_forward[:n], hessian[:n]
    assert np.isfinite(value).all() and np.isfinite(hessian).all()
    differences, scale = (value[n:n + 2] - value[n + 2:]) / (2 * step), 1 + np.abs(slope).max()
    assert np.allclose(directions @ gradient, differences, rtol=1e-5, atol=1e-6 * scale)
    assert np.allclose(slope_forward, gradient, rtol=1e-8, atol=1e-8 * scale)
    assert np.isclose(each[0][1], directions[0] @ gradient, rtol=1e-8, atol=1e-8 * scale)
    differences, scale = (slope[n:n + 2] - slope[n + 2:]) / (2 * step), 1 + np.abs(hessian).max()
    assert np.allclose(directions @ hessian, differences, rtol=1e-4, atol=1e-5 * scale)
    assert np.allclose(hessian, hessian.T, rtol=1e-6, atol=1e-7 * scale)
    assert along is None or np.allclose(along, directions[0] @ hessian, rtol=1e-6, atol=1e-7 * scale)
    assert np.allclose([value[0], value[n]], [of_one for of_one, _ in each], rtol=1e-10, atol=1e-10)


# A toy of each coming kind: what a deep model, a latent variable model, a sampler and a mixture need.

class TwoLayers(gpt.Approximation):
    "A function of a function, whose bound is sampled through the hidden layer."
    model: gpt.GP
    hidden: gpt.SVGP
    last: gpt.SVGP
    draws_samples: ClassVar[bool] = True

    def bound(self, X, y, scale, key):
        mean, var = self.hidden.q_f().latent_marginals(X)
        H = mean + jnp.sqrt(var) * jax.random.normal(key, mean.shape)
        expected = self.model.likelihood.variational_expectations(*self.last.q_f().latent_marginals(H), y)
        return scale * jnp.sum(expected) - self.hidden.q.kl_from_standard_normal() - self.last.q.kl_from_standard_normal()


class LatentInputs(gpt.Approximation):
    "Outputs whose inputs are unknown: a batch is (numbers of rows, Y), and each row has parameters of its own."
    model: gpt.GP
    outputs: gpt.SVGP
    H: gpt.Parameter

    def bound(self, rows, Y, scale):
        H = self.H[rows]
        expected = self.model.likelihood.variational_expectations(*self.outputs.q_f().latent_marginals(H), Y)
        return scale * (jnp.sum(expected) - 0.5 * jnp.sum(H**2)) - self.outputs.q.kl_from_standard_normal()

    def check(self, rows, Y):
        return jnp.asarray(rows), jnp.asarray(Y, float)


class Mixture(gpt.Posterior):
    "Posteriors with equal weights, such as one for each sample of hyperparameters."
    parts: tuple[gpt.Posterior, ...]

    def marginals(self, Xs):
        means, variances = map(jnp.stack, zip(*(part.marginals(Xs) for part in self.parts)))
        return means.mean(0), (variances + means**2).mean(0) - means.mean(0) ** 2

    def covariance(self, Xs, Xs2=None):
        mean = lambda part, X: part.mean(X) - self.mean(X)
        between = [jnp.outer(mean(part, Xs), mean(part, Xs if Xs2 is None else Xs2)) for part in self.parts]
        return sum(part.covariance(Xs, Xs2) + outer for part, outer in zip(self.parts, between)) / len(self.parts)

    def sample(self, key, Xs, n=1):
        which, each = jax.random.randint(key, (n,), 0, len(self.parts)), jnp.stack([part.sample(key, Xs, n) for part in self.parts])
        return each[which, jnp.arange(n)]

    def predict_y(self, Xs):
        means, variances = map(jnp.stack, zip(*(part.predict_y(Xs) for part in self.parts)))
        return means.mean(0), (variances + means**2).mean(0) - means.mean(0) ** 2

    def log_predictive_density(self, Xs, ys):
        each = jnp.stack([part.log_predictive_density(Xs, ys) for part in self.parts])
        return jax.nn.logsumexp(each, axis=0) - jnp.log(len(self.parts))


class Tent(gpt.Kernel):
    "1 - s |x - x'|, which is no covariance where s is large."
    slope: gpt.Parameter

    def covariance(self, X, X2=None):
        return 1 - self.slope * jnp.abs(X - (X if X2 is None else X2).T)

    def variances(self, X):
        return jnp.ones(len(X))


def test_a_deep_model_is_fitted_by_sampling():
    key, plane = jax.random.key(0), np.hstack([X, -X])
    layer = lambda model, P: gpt.SVGP(model, gpt.InducingPoints(plane[1::3]), num_latents=P)
    deep = TwoLayers(noisy, layer(gpt.GP(gpt.RBF(), gpt.Gaussian(), gpt.IdentityMean()), 2), layer(noisy, 1))
    with pytest.raises(ValueError, match="draws samples: key must be a JAX random key"):
        deep.objective(plane, y)
    fitted = gpt.fit(deep, (plane, y), optimiser=optax.adam(0.05), steps=60, batch_size=4, key=key, progress=False)
    before, after = (np.array([a.objective(plane, y, key=jax.random.key(k)) for k in range(5)]) for a in (deep, fitted.approx))
    assert after.mean() > before.mean() + 1 and len(np.unique(after)) == 5


def test_rows_with_parameters_of_their_own():
    Y, start = np.hstack([np.sin(X), np.cos(X)]), 0.1 * rng.normal(size=(N, 1))
    approx = LatentInputs(noisy, gpt.SVGP(noisy, gpt.InducingPoints(X[1::3] - 2), num_latents=2), gpt.free(start))
    rows = np.arange(N)
    halves = [approx.objective(rows[half], Y[half], num_data=N) for half in (slice(0, 4), slice(4, 8))]
    assert np.isclose(np.mean(halves), approx.objective(rows, Y))
    fitted = gpt.fit(approx, (rows, Y), optimiser=optax.adam(0.05), steps=100, batch_size=4, key=jax.random.key(0), progress=False)
    assert fitted.approx.objective(rows, Y) > approx.objective(rows, Y) + 1
    assert np.all(np.asarray(fitted.approx.H.value) != start)


def tent_evidence(slope):
    return gpt.Exact(gpt.GP(Tent(gpt.parameters.positive(slope)), gpt.Gaussian(0.1))).objective(X, y)


def test_one_model_that_fails_ends_neither_a_batch_nor_a_chain():
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"the matrix K \+ σ²I of size 8 x 8"):
        tent_evidence(20.0)

    def potential(log_slope):
        with gpt.nan_on_failure():
            return 0.5 * (log_slope / 2) ** 2 - tent_evidence(jnp.exp(log_slope))

    batch = jax.jit(jax.vmap(potential))(np.log([0.1, 20.0, 0.2]))
    assert np.array_equal(np.isfinite(batch), [True, False, True])
    chain = MCMC(NUTS(potential_fn=potential), num_warmup=100, num_samples=200, progress_bar=False)
    chain.run(jax.random.key(0), init_params=jnp.asarray(np.log(0.1)), extra_fields=("diverging", "potential_energy"))
    samples, extra = chain.get_samples(), jax.tree.map(np.asarray, chain.get_extra_fields())
    assert len(samples) == 200 and np.isfinite(extra["potential_energy"]).all() and len(np.unique(samples)) > 50
    assert extra["diverging"].sum() > 0


def test_a_mixture_answers_what_a_posterior_is_asked():
    parts = tuple(gpt.Exact(gpt.GP(gpt.RBF(ell), gpt.Gaussian(0.2))).posterior(X, y) for ell in (0.4, 1.5))
    post, Xs, ys = Mixture(parts), np.linspace(0, 4, 3)[:, None], np.array([0.1, -0.4, 0.3])
    draws = np.asarray(post.sample(jax.random.key(0), Xs, 40_000))
    mean, var = post.marginals(Xs)
    assert np.allclose(draws.mean(0), mean, atol=0.02) and np.allclose(np.cov(draws.T), post.covariance(Xs), atol=0.02)
    assert np.allclose(np.diag(post.covariance(Xs)), var) and np.allclose(post.predict_y(Xs)[1], var + 0.2)
    density = np.mean([np.exp(part.log_predictive_density(Xs, ys)) for part in parts], axis=0)
    assert np.allclose(np.exp(post.log_predictive_density(Xs, ys)), density) and np.array_equal(post.mean(Xs), mean)


ROWS = 20
places = np.sort(np.random.default_rng(1).uniform(size=(ROWS, 1)), axis=0)
PLACES = {"plain": places, "repeated": np.repeat(places[::4], 4, axis=0), "all the same": 0 * places, "far away": places + 1e6, "wide": 1e6 * places,
          "narrow": 1e-6 * places}
REGRESSIONS = {"Exact": lambda model, points: gpt.Exact(model), "VFE": gpt.VFE, "FITC": gpt.FITC}
CLASSIFICATIONS = {"VGP": lambda model, points: gpt.VGP(model, ROWS), "SVGP": gpt.SVGP, "GFITC": gpt.GFITC}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", [*REGRESSIONS, *CLASSIFICATIONS])
def test_ill_conditioned_problems_in_single_precision_end_in_numbers_or_say_why(method):
    wave, failed = np.sin(6 * places[:, 0]), 0
    for name, X in PLACES.items():
        for lengthscale, variance, noise in ((1e3, 1.0, 1e-6), (1e-3, 1e6, 1e-10), (1.0, 1e8, 1e-8)):
            observed, likelihood = (wave, gpt.Gaussian(noise)) if method in REGRESSIONS else (wave > 0, gpt.Bernoulli())
            model = gpt.GP(gpt.RBF(lengthscale, variance), likelihood)
            approx = gpt.cast((REGRESSIONS | CLASSIFICATIONS)[method](model, gpt.InducingPoints(X[::3])), np.float32)
            batch = X.astype(np.float32), observed.astype(np.float32)
            try:
                post = approx.posterior(*batch)
            except eqx.EquinoxRuntimeError as error:
                failed += 1
                assert method == "GFITC" and "no fixed point" in str(error) and "float64" in str(error)
                continue
            value, (mean, var) = approx.objective(*batch), post.marginals(batch[0][:7])
            assert np.isfinite(value) and np.isfinite(mean).all() and np.isfinite(var).all() and (np.asarray(var) >= 0).all(), (name, lengthscale)
            assert method in REGRESSIONS or value < 0                                # the logarithm of a probability, or a bound of it
    assert failed <= 2
