"""What holds for every approximation: derivatives to second order, batches of models, failures.

A new approximation joins by being listed in APPROXIMATIONS."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import gp_thesis as gpt
from gp_thesis.parameters import partition

rng = np.random.default_rng(0)
N = 8
X = jnp.asarray(np.sort(rng.uniform(0, 4, (N, 1)), axis=0))
y = jnp.sin(2 * X[:, 0]) + 0.3 * jnp.asarray(rng.normal(size=N))
labels, classes = (y > 0).astype(float), jnp.asarray(rng.integers(0, 3, N), float)
points = gpt.InducingPoints(X[1::3] + 0.1)
noisy, label = gpt.GP(gpt.RBF(0.8, 1.2), gpt.Gaussian(0.2)), gpt.GP(gpt.Matern52(0.9, 1.5), gpt.Bernoulli())
robust, soft = gpt.GP(gpt.RBF(0.8), gpt.RobustMax(3)), gpt.GP(gpt.RBF(0.8), gpt.Softmax(3))

APPROXIMATIONS = {
    "Exact": (gpt.Exact(noisy), y),
    "VFE": (gpt.VFE(noisy, points), y),
    "FITC": (gpt.FITC(noisy, points), y),
    "PITC": (gpt.PITC(noisy, points, np.array_split(np.arange(N), 3)), y),
    "PowerEPRegression": (gpt.PowerEPRegression(noisy, points, 0.5), jnp.stack([y, -y**2], axis=1)),
    "DTC": (gpt.DTC(noisy, points), y),
    "VGP": (gpt.VGP(label, N), labels),
    "WhitenedVGP": (gpt.WhitenedVGP(label, N), labels),
    "MeanField": (gpt.MeanField(gpt.GP(gpt.Matern12(0.9, 1.5), gpt.Bernoulli()), N), labels),
    "SVGP, probit": (gpt.SVGP(label, points), labels),
    "SVGP, unwhitened": (gpt.SVGP(label, points, whiten=False), labels),
    "SVGP, robust max": (gpt.SVGP(robust, points), classes),
    "SVGP, softmax": (gpt.SVGP(soft, [points] * 3), classes),
    "SVGP, Gaussian": (gpt.SVGP(noisy, points, 2), jnp.stack([y, -y], axis=1)),
    "EP": (gpt.EP(label, tolerance=1e-11), labels),
    "GFITC": (gpt.GFITC(label, points, tolerance=1e-11), labels),
    "SparseMeanField": (gpt.SparseMeanField(label, points), labels),
    "WeakBound": (gpt.WeakBound(label, points), labels),
}


@pytest.fixture(params=APPROXIMATIONS, scope="module")
def problem(request):
    "The objective as a function of all numbers that move, and where: at no special point."
    approx, observed = APPROXIMATIONS[request.param]
    trainable, rest = partition(approx)
    flat, unravel = ravel_pytree(trainable)
    theta = flat + 0.1 * jnp.asarray(np.random.default_rng(1).normal(size=flat.shape))

    def objective(theta):
        return eqx.combine(unravel(theta), rest).objective(X, observed)

    return objective, theta


def test_first_and_second_derivatives_and_batches_of_models(problem):
    objective, theta = problem
    directions = jnp.asarray(np.random.default_rng(2).normal(size=(2, len(theta))))
    step = 1e-4
    shifts = step * jnp.concatenate([jnp.zeros((1, len(theta))), directions, -directions])

    @jax.jit  # one program, since programs are what these tests take their time for
    def everything(thetas):
        with gpt.nan_on_failure():
            value, slope = jax.vmap(jax.value_and_grad(objective))(thetas)
            forward = jax.jvp(objective, (thetas[0],), (directions[0],))[1]
            along = jax.grad(lambda theta: jax.grad(objective)(theta) @ directions[0])(thetas[0])
            return value, slope, forward, along, jax.hessian(objective)(thetas[0])

    value, slope, forward, along, hessian = everything(theta + shifts)
    assert np.isfinite(value).all() and np.isfinite(hessian).all()
    differences = (value[1:3] - value[3:]) / (2 * step)
    scale = 1 + np.abs(slope).max()
    assert np.allclose(directions @ slope[0], differences, rtol=1e-5, atol=1e-6 * scale)
    assert np.isclose(forward, directions[0] @ slope[0], rtol=1e-8, atol=1e-8 * scale)
    differences, scale = (slope[1:3] - slope[3:]) / (2 * step), 1 + np.abs(hessian).max()
    assert np.allclose(directions @ hessian, differences, rtol=1e-4, atol=1e-5 * scale)
    assert np.allclose(hessian, hessian.T, rtol=1e-6, atol=1e-7 * scale)
    assert np.allclose(along, directions[0] @ hessian, rtol=1e-6, atol=1e-7 * scale)
    alone = [objective(theta + shift) for shift in shifts[:2]]
    assert np.allclose(value[:2], alone, rtol=1e-10, atol=1e-10)
