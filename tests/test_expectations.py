"Chapter 15: averages of kernels under Gaussian inputs, against quadrature, draws, and the kernels themselves."
import itertools
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gp_thesis.expectations import (expectation_rule, expected_diag, expected_input_kernel, expected_kernel, expected_product,
                                    kernel_averages, log_bump, observed, semidefinite_root, standard_nodes, weighted_distance)
from gp_thesis.kernels import RBF, Constant, Cosine, Linear, Matern32, Matern52, Polynomial, White
from gp_thesis.parameters import cast, free, partition, unwrap

ARD = np.array([0.9, 1.4])
CLOSED = {
    "rbf": RBF(0.8, 1.3), "ard": RBF(ARD, 0.7), "column": RBF(0.6, active_dims=[1]), "linear": Linear([0.5, 1.2]),
    "constant": Constant(0.4), "polynomial": Polynomial(0.3, offset=0.5, degree=2), "sum": RBF(ARD) + Linear(0.4) + Constant(0.3),
    "product": RBF(ARD, 1.1) * Linear([0.7, 0.2]), "columns": RBF(0.7, active_dims=[0]) * RBF(1.2, active_dims=[1]),
    "same columns": RBF(0.7) * RBF(ARD), "nested": (RBF(0.9) + Linear(0.3)) * (Constant(0.5) + Linear(0.8, active_dims=[1])),
    "cubic": Polynomial(0.3, offset=0.2, degree=3), "with noise": RBF(0.8) + White(0.3), "noise inside": (RBF(0.8) + White(0.3)) * Linear(0.4)}
OTHER = {"matern": Matern52(1.1, 0.8), "periodic": Cosine(2.0, active_dims=[0]), "mixed": RBF(1.2) * Matern32(2.0, active_dims=[1])}

rng = np.random.default_rng(0)
MEAN, Z = rng.normal(size=(3, 2)), rng.normal(size=(4, 2))
ROOT = 0.6 * rng.normal(size=(3, 2, 2))
COV = ROOT @ np.swapaxes(ROOT, 1, 2)
VARIANCES = rng.uniform(0.1, 0.6, (3, 2))


def many_nodes(points=60):
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    square = lambda values: np.array(list(itertools.product(values, repeat=2)))
    return square(nodes), square(weights / weights.sum()).prod(1)


def by_grid(kernel, mean, cov):
    "All four averages by Gauss-Hermite's rule with many nodes."
    grid, mass = many_nodes()
    kernel, found = unwrap(kernel), []
    for m, C in zip(mean, cov):
        x = jnp.asarray(m + grid @ np.linalg.cholesky(C).T)
        k = np.asarray(kernel.evaluate(x, jnp.asarray(Z)))
        found.append((mass @ np.asarray(kernel.evaluate_diag(x)), mass @ k, (k.T * mass) @ k, (k.T * mass) @ np.asarray(x)))
    return [np.array(part) for part in zip(*found)]


@jax.jit
def all_four(kernel, mean, cov, Z=Z):
    Z = jnp.asarray(Z, mean.dtype)
    return (expected_diag(kernel, mean, cov), expected_kernel(kernel, mean, cov, Z), expected_product(kernel, mean, cov, Z),
            expected_input_kernel(kernel, mean, cov, Z))


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("full", [True, False], ids=["full", "independent"])
def test_closed_forms_are_those_of_quadrature(name, full):
    cov = COV if full else VARIANCES
    known = by_grid(CLOSED[name], MEAN, cov if full else [np.diag(v) for v in cov])
    for ours, theirs in zip(all_four(CLOSED[name], jnp.asarray(MEAN), jnp.asarray(cov)), known):
        np.testing.assert_allclose(ours, theirs, atol=1e-10)
    assert expectation_rule(CLOSED[name], 2) == "closed form"


@pytest.mark.parametrize("name", CLOSED)
def test_a_known_input_gives_the_kernel(name):
    kernel, X = unwrap(CLOSED[name]), jnp.asarray(MEAN)
    k = kernel.evaluate(X, jnp.asarray(Z))
    known = kernel.evaluate_diag(X), k, k[:, :, None] * k[:, None], k[:, :, None] * X[:, None]
    for cov in (np.zeros((3, 2, 2)), np.zeros((3, 2))):
        for ours, theirs in zip(all_four(kernel, X, jnp.asarray(cov)), known):
            np.testing.assert_allclose(ours, theirs, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", OTHER)
def test_nodes_are_near_the_average(name):
    known = by_grid(OTHER[name], MEAN, 0.2 * COV)
    for ours, theirs in zip(all_four(OTHER[name], jnp.asarray(MEAN), jnp.asarray(0.2 * COV)), known):
        np.testing.assert_allclose(ours, theirs, atol=3e-4)
    assert "20 nodes in" in expectation_rule(OTHER[name], 2)


def test_nodes_at_a_known_input_give_the_kernel_and_its_moments_belong_together():
    kernel, X = unwrap(Matern52(1.1)), jnp.asarray(MEAN)
    k = kernel.evaluate(X, jnp.asarray(Z))
    np.testing.assert_allclose(expected_kernel(kernel, X, jnp.zeros((3, 2, 2)), jnp.asarray(Z)), k, rtol=1e-13)
    _, mean, second, _ = all_four(kernel, X, jnp.asarray(COV))
    assert np.linalg.eigvalsh(second - mean[:, :, None] * mean[:, None]).min() > -1e-14


def test_nodes_know_columns_that_the_kernel_does_not_look_at():
    "E x k for a column that is correlated with the one that is looked at, against a rule with many nodes in both."
    kernel = Matern52(0.8, active_dims=[1])
    ours = expected_input_kernel(kernel, jnp.asarray(MEAN), jnp.asarray(COV), jnp.asarray(Z))
    np.testing.assert_allclose(ours, by_grid(kernel, MEAN, COV)[3], atol=2e-3)


@pytest.mark.parametrize("name", ["sum", "product", "nested"])
def test_averages_of_a_million_draws(name):
    kernel, draws, two = unwrap(CLOSED[name]), np.random.default_rng(1).normal(size=(1_000_000, 2)), jnp.asarray(Z[:2])
    ours = all_four(kernel, jnp.asarray(MEAN[1:2]), jnp.asarray(COV[1:2]), two)
    x = jnp.asarray(MEAN[1] + draws @ ROOT[1].T)
    k = kernel.evaluate(x, two)
    for (found,), sample in zip(ours, (kernel.evaluate_diag(x), k, k[:, :, None] * k[:, None], k[:, :, None] * x[:, None])):
        error = jnp.std(sample, axis=0) / 1000
        assert (jnp.abs(found - jnp.mean(sample, axis=0)) < 5 * error + 1e-12).all()


def test_two_kernels_at_a_time():
    k, k2, Z2 = RBF(ARD, 0.7), RBF(0.5) + Linear(0.3), jnp.asarray(Z[:3] + 0.2)
    ours = expected_product(k, jnp.asarray(MEAN), jnp.asarray(COV), jnp.asarray(Z), k2, Z2)
    nodes, masses = many_nodes()
    x = MEAN[:, None] + nodes @ np.swapaxes(np.linalg.cholesky(COV), 1, 2)
    values = [np.einsum("q,qi,qj->ij", masses, unwrap(k).evaluate(jnp.asarray(a), jnp.asarray(Z)),
                        unwrap(k2).evaluate(jnp.asarray(a), Z2)) for a in x]
    np.testing.assert_allclose(ours, values, atol=1e-10)
    swapped = expected_product(k2, jnp.asarray(MEAN), jnp.asarray(COV), Z2, k, jnp.asarray(Z))
    np.testing.assert_allclose(ours, np.swapaxes(swapped, 1, 2), rtol=1e-12)


def total_of(kernel, mean, cov, Z):
    return sum(jnp.sum(jnp.sin(part)) for part in all_four(kernel, mean, cov, Z))


@pytest.mark.parametrize("name, full", [("ard", True), ("ard", False), ("nested", True), ("columns", False), ("matern", True)])
def test_derivatives(name, full):
    "First against differences, second in forward over reverse against differences of the first, in all arguments."
    moving, rest = partition((CLOSED | OTHER)[name])
    cov = jnp.asarray(COV + 0.05 * np.eye(2) if full else VARIANCES)
    flat, back = jax.flatten_util.ravel_pytree((moving, jnp.asarray(MEAN), cov, jnp.asarray(Z)))

    def value(flat):
        moving, mean, cov, Z = back(flat)
        return total_of(unwrap(eqx.combine(moving, rest)), mean, (cov + jnp.swapaxes(cov, -1, -2)) / 2 if full else cov, Z)

    way, step = jnp.asarray(np.random.default_rng(2).normal(size=flat.shape)), 1e-5
    both = jax.jit(jax.value_and_grad(value))
    forward = jax.jit(lambda x: jax.jvp(value, (x,), (way,))[1])(flat)
    slope, second = jax.jit(lambda x: jax.jvp(jax.grad(value), (x,), (way,)))(flat)
    (above, slope_above), (below, slope_below) = both(flat + step * way), both(flat - step * way)
    np.testing.assert_allclose(slope @ way, (above - below) / (2 * step), rtol=1e-6)
    np.testing.assert_allclose(forward, slope @ way, rtol=1e-10)
    differences = (slope_above - slope_below) / (2 * step)
    np.testing.assert_allclose(second, differences, rtol=2e-5, atol=2e-5 * np.abs(differences).max())


def test_derivatives_where_the_input_is_known():
    "At zero variance the closed forms have the derivative in it, half of the expected curvature (Price)."
    kernel, x, Zs = unwrap(RBF(0.8)), jnp.asarray(MEAN[:1]), jnp.asarray(Z)
    ours = jax.jacobian(lambda cov: expected_kernel(kernel, x, cov[None], Zs)[0])(jnp.zeros((2, 2)))
    curvature = jax.hessian(lambda x: kernel.evaluate(x[None], Zs)[0])(x[0])
    np.testing.assert_allclose(ours + jnp.swapaxes(ours, 1, 2), curvature, atol=1e-12)
    independent = jax.jacobian(lambda var: expected_kernel(kernel, x, var[None], Zs)[0])(jnp.zeros(2))
    np.testing.assert_allclose(independent, 0.5 * jnp.diagonal(curvature, axis1=1, axis2=2), atol=1e-12)


@pytest.mark.parametrize("name", ["ard", "nested"])
def test_single_precision(name):
    single = [jnp.asarray(a, jnp.float32) for a in (MEAN, COV, Z)]
    ours = all_four(unwrap(cast(CLOSED[name], jnp.float32)), *single)
    for found, known in zip(ours, all_four(CLOSED[name], jnp.asarray(MEAN), jnp.asarray(COV))):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, known, rtol=2e-5, atol=2e-6)


def test_an_input_with_no_rank_and_one_far_away():
    flat = np.outer([1.0, 2.0], [1.0, 2.0])
    log_Z, mean, cov = observed(jnp.zeros(2), jnp.asarray(flat), jnp.array([[1.0, 2.0]]), jnp.ones(2))
    np.testing.assert_allclose(mean[0], [5 / 6, 10 / 6], rtol=1e-14)  # five units of precision against one
    np.testing.assert_allclose(cov, flat / 6, rtol=1e-14)
    far = expected_kernel(RBF(1e-3), jnp.full((1, 2), 1e6), jnp.full((1, 2), 1e-8), jnp.full((1, 2), 1e6))
    np.testing.assert_allclose(far, 1 / (1 + 1e-2), rtol=1e-9)


def test_roots_of_singular_matrices():
    for cov in (COV, np.zeros((2, 2)), np.outer([0.0, 1.0], [0.0, 1.0]), np.ones((3, 3)), np.diag([1.0, 0.0, 2.0])):
        R = semidefinite_root(jnp.asarray(cov))
        np.testing.assert_allclose(R @ jnp.swapaxes(R, -1, -2), cov, atol=1e-14)
        assert (np.triu(np.asarray(R), 1) == 0).all()
        assert np.isfinite(jax.grad(lambda C: jnp.sum(jnp.sin(semidefinite_root(C))))(jnp.asarray(cov))).all()


def test_sigma_points_are_exact_for_cubics():
    kernel, D = Matern52(1.0), 5
    assert expectation_rule(kernel, D) == "10 sigma points"
    steps, masses, _ = standard_nodes(D)
    np.testing.assert_allclose(masses @ steps, 0, atol=1e-15)
    np.testing.assert_allclose((steps.T * masses) @ steps, np.eye(D), atol=1e-14)
    mean, cov, Zs = rng.normal(size=(2, D)), 1e-8 * np.ones((2, D)), rng.normal(size=(3, D))
    np.testing.assert_allclose(expected_kernel(kernel, jnp.asarray(mean), jnp.asarray(cov), jnp.asarray(Zs)),
                               unwrap(kernel).evaluate(jnp.asarray(mean), jnp.asarray(Zs)), atol=1e-7)


def test_log_bump_is_what_rows_say():
    r, var = jnp.array([1.2, 0.4]), jnp.asarray(VARIANCES)
    by_rows = jnp.stack([observed(m, jnp.diag(v), jnp.asarray(Z), r)[0] for m, v in zip(jnp.asarray(MEAN), var)])
    np.testing.assert_allclose(log_bump(jnp.asarray(MEAN), var, jnp.asarray(Z), r), by_rows, rtol=1e-13)


@pytest.mark.parametrize("D", [2, 11])
def test_weighted_distance(D):
    t, X, c = (rng.normal(size=shape) + 3 for shape in ((4, D), (6, D), (4, D)))
    S = rng.normal(size=(4, 6))
    naive = lambda t, c, X: jnp.sum(c[:, None] * (X[None] - t[:, None]) ** 2, -1)

    def everything(f):
        "Values with weights of each row and of all, the gradient, and with two columns the Hessian."
        gradient = jax.grad(lambda *a: jnp.sum(S * f(*a)), (0, 1, 2))(t, c, X)
        hessian = jax.hessian(lambda t: jnp.sum(S * f(t, c, X) ** 2))(t) if D == 2 else ()
        return f(t, c, X), f(t, c[:1], X), gradient, hessian

    (one, all_rows, gradient, hessian), known = (jax.jit(lambda f=f: everything(f))() for f in (weighted_distance, naive))
    assert np.allclose(one, known[0], atol=1e-12) and np.allclose(all_rows, known[1], atol=1e-12)
    assert all(np.allclose(a, b, atol=1e-10) for a, b in zip(gradient, known[2]))
    assert np.allclose(hessian, known[3], atol=1e-8)


def test_many_pairs_are_quick():
    random = np.random.default_rng(4)
    mean, Zs = jnp.asarray(random.normal(size=(1000, 10))), jnp.asarray(random.normal(size=(50, 10)))
    psi = jax.jit(lambda mean: jnp.sum(expected_product(RBF(np.ones(10)), mean, jnp.full((1000, 10), 0.1), Zs), 0))
    psi(mean).block_until_ready()
    began = time.process_time()
    psi(mean).block_until_ready()
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("arguments, message", [
    ((np.zeros(2), np.zeros((1, 2)), Z), r"mean must have shape \(N, D\), got \(2,\)"),
    ((MEAN, COV[0], Z), r"cov must have shape \(3, 2, 2\), or \(3, 2\) for variances of independent columns, got \(2, 2\)"),
    ((MEAN, COV, Z[:, :1]), r"Z must have shape \(M, 2\), got \(4, 1\)")])
def test_shapes_that_do_not_fit(arguments, message):
    for function in (expected_kernel, expected_product, expected_input_kernel):
        with pytest.raises(ValueError, match=message):
            function(RBF(), *map(jnp.asarray, arguments))


def test_averages_say_their_rule():
    mean, cov, Z = np.random.default_rng(0).normal(size=(3, 2)), np.stack([np.eye(2)] * 3), np.ones((4, 2))
    for kernel, rule in ((RBF(), "closed form"), (Matern32(), expectation_rule(Matern32(), 2))):
        found = kernel_averages(kernel, mean, cov, Z)
        assert found.rule == rule and (found.rule == "closed form") == isinstance(kernel, RBF)
        assert np.allclose(found.diag, expected_diag(kernel, mean, cov))
        assert np.allclose(found.kernel, expected_kernel(kernel, mean, cov, Z))
        assert np.allclose(found.input_kernel, expected_input_kernel(kernel, mean, cov, Z))
        assert np.allclose(found.product, expected_product(kernel, mean, cov, Z))
    assert "sigma" in kernel_averages(Matern32(), np.zeros((1, 9)), np.ones((1, 9)), np.ones((2, 9))).rule
    with pytest.raises(ValueError, match="shape"):
        kernel_averages(RBF(), mean[0], cov, Z)
