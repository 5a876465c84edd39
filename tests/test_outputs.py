"Several functions at once: coregionalisation, with outputs observed apart, and a kernel for each."

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gp_thesis as gpt
from gp_thesis.kernels import RBF, ConstantMean, Coregion, Independent, Matern12, Process, sample_prior
from test_kernels import CASES, ell, outputs_W, some, weights


def regression(K, Ks, Kss, y, noise):
    "Log evidence, posterior mean and covariance of exact regression, in NumPy."
    S = K + noise * np.eye(len(K))
    _, log_det = np.linalg.slogdet(S)
    evidence = -0.5 * (y @ np.linalg.solve(S, y) + log_det + len(y) * np.log(2 * np.pi))
    return evidence, Ks.T @ np.linalg.solve(S, y), Kss - Ks.T @ np.linalg.solve(S, Ks)


def test_regression_with_several_outputs_is_the_dense_kronecker_formula():
    rng = np.random.default_rng(0)
    x, xs, B = np.sort(rng.uniform(0, 3, 6)), np.array([0.2, 1.4]), outputs_W @ outputs_W.T + np.diag([0.3, 1.1, 0.6])
    smooth, rough = (lambda a, b: np.exp(-0.5 * (a[:, None] - b) ** 2)), (lambda a, b: np.exp(-np.abs(a[:, None] - b) / 0.4))
    dense = lambda a, b: np.kron(B, smooth(a, b)) + np.kron(np.diag([0.5, 0.2, 0.9]) + 0.2, rough(a, b))    # a linear model: two kernels
    table = lambda x: np.stack([np.tile(x, 3), np.repeat(np.arange(3.0), len(x))], axis=1)
    kernel = (RBF(active_dims=[0]) * Coregion(3, 2, outputs_W, [0.3, 1.1, 0.6], active_dims=[1])
              + Matern12(0.4, active_dims=[0]) * Coregion(3, 1, np.full((3, 1), np.sqrt(0.2)), [0.5, 0.2, 0.9], active_dims=[1]))
    model, y = gpt.GP(kernel, gpt.Gaussian(0.1)), rng.normal(size=18)
    seen = np.array([0, 1, 2, 3, 4, 5, 7, 10, 11, 13])                       # outputs 1 and 2 observed at other places, and less often
    for rows in (np.arange(18), seen):
        evidence, mean, cov = regression(dense(x, x)[np.ix_(rows, rows)], dense(x, xs)[rows], dense(xs, xs), y[rows], 0.1)
        exact = gpt.Exact(model)
        post = exact.posterior(table(x)[rows], y[rows])
        assert np.isclose(exact.objective(table(x)[rows], y[rows]), evidence)
        np.testing.assert_allclose(post.mean(table(xs)), mean, atol=1e-9)
        np.testing.assert_allclose(post.covariance(table(xs)), cov, atol=1e-9)
    everywhere = gpt.VFE(model, gpt.InducingPoints(table(x)[seen]))
    assert np.isclose(everywhere.objective(table(x)[seen], y[seen]), evidence, atol=1e-4)
    Z = table(x)[[0, 4, 8, 13, 15]]                                          # an inducing point belongs to an output
    K, Kuf, Kuu = dense(x, x)[np.ix_(seen, seen)], kernel(Z, table(x)[seen]), kernel(Z)
    Q = Kuf.T @ np.linalg.solve(Kuu, Kuf)
    bound = regression(Q, Q, Q, y[seen], 0.1)[0] - 0.5 * np.trace(K - Q) / 0.1
    assert np.isclose(gpt.VFE(model, gpt.InducingPoints(Z)).objective(table(x)[seen], y[seen]), bound, rtol=1e-6)


def test_the_number_of_an_output_has_no_derivative_and_no_value_but_its_own():
    kernel, X = CASES["Coregion"][0](), some("Coregion")
    slope = np.asarray(jax.grad(lambda X: jnp.sum(jnp.sin(kernel(X))) + jnp.sum(kernel.diag(X)))(X))
    assert np.all(slope[:, 1] == 0) and np.abs(slope[:, 0]).max() > 0
    start = Coregion(4, 3)
    assert np.linalg.matrix_rank(start.W.value) == 3 and np.allclose(start.B, np.asarray(start.W.value) @ start.W.value.T + np.eye(4))
    gradient = jax.grad(lambda kernel: jnp.sum(weights(9, 9) * kernel(X)))(kernel)
    assert np.all(gradient.kernels[1].W.unconstrained != 0) and np.all(gradient.kernels[1].kappa.unconstrained != 0)


# ---- a kernel for each function

def test_a_kernel_for_each_of_several_functions():
    X, parts = some("RBF"), (RBF(ell), Matern12(0.5, 0.3))
    kernel = Independent(parts)
    np.testing.assert_array_equal(kernel(X), np.stack([part(X) for part in parts]))
    np.testing.assert_array_equal(kernel(X, X[:4]), np.stack([part(X, X[:4]) for part in parts]))
    np.testing.assert_array_equal(kernel.diag(X), np.stack([part.diag(X) for part in parts], axis=1))
    mean, var = Process(kernel, ConstantMean(1.0)).marginals(X)
    assert mean.shape == (9, 2) and np.all(np.asarray(mean) == 1) and np.allclose(var, [1.0, 0.3])
    few, num = X[:3], 40_000
    draws = np.asarray(sample_prior(jax.random.key(2), kernel, few, num, ConstantMean([0.0, 2.0])))
    joint = np.zeros((6, 6))
    joint[:3, :3], joint[3:, 3:] = kernel(few)
    assert draws.shape == (num, 3, 2) and np.all(np.abs(draws.mean(0) - [0.0, 2.0]) < 5 / np.sqrt(num))
    assert np.all(np.abs(np.cov(np.moveaxis(draws, 1, 2).reshape(num, 6).T) - joint) < 7 / np.sqrt(num))


@pytest.mark.parametrize("approx, y", [
    (lambda model: gpt.Exact(model), 0), (lambda model: gpt.VFE(model, gpt.InducingPoints(good_rows[:2])), 0),
    (lambda model: gpt.VGP(model, 4, 2), 1), (lambda model: gpt.MeanField(model, 4), 0)], ids=["Exact", "VFE", "VGP", "MeanField"])
def test_approximations_that_need_one_kernel_refuse_several(approx, y):
    model = gpt.GP(Independent([RBF(), Matern12()]), gpt.Gaussian(0.1))
    with pytest.raises(ValueError, match="Independent holds a kernel for each of 2 functions, but here one is needed for all; SVGP"):
        approx(model).objective(good_rows, good_rows if y else good_rows[:, 0])


good_rows = np.arange(8.0).reshape(4, 2)
