"Kernels, means and draws, against computations that do not use them."

import math
import re

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special
from sklearn.gaussian_process import kernels as sk

from gp_thesis.kernels import (
    RBF, Constant, ConstantMean, Coregion, Cosine, Exponential, IdentityMean, Independent, Kernel, Linear, LinearMean, Matern12,
    Matern32, Matern52, Periodic, Polynomial, Process, Product, RationalQuadratic, Stationary, Sum, White, Wiener, Zero,
    check_inputs, sample_prior, squared_distance)
from gp_thesis.parameters import cast, free, freeze, partition, positive, unwrap


ell, period = np.array([0.7, 1.9]), np.array([1.3, 2.2])


def differences(A, B):
    return A[:, None, :] - B[None, :, :]


def matern(nu, r):
    "The Matérn correlation from its Bessel function."
    s = np.sqrt(2 * nu) * np.where(r == 0, 1, r)
    return np.where(r == 0, 1, 2 ** (1 - nu) / special.gamma(nu) * s**nu * special.kv(nu, s))


outputs_W = np.array([[1.0, 0.2], [-0.7, 0.4], [0.1, -1.2]])


def euclidean(A, B):
    return np.sqrt((differences(A / ell, B / ell) ** 2).sum(-1))


# name: (kernel for two columns, or one for Wiener; the same in NumPy)
CASES = {
    "RBF": (lambda: RBF(ell, 1.3), lambda A, B: 1.3 * np.exp(-0.5 * euclidean(A, B) ** 2)),
    "Matern12": (lambda: Matern12(ell, 1.3), lambda A, B: 1.3 * matern(0.5, euclidean(A, B))),
    "Matern32": (lambda: Matern32(ell, 1.3), lambda A, B: 1.3 * matern(1.5, euclidean(A, B))),
    "Matern52": (lambda: Matern52(ell, 1.3), lambda A, B: 1.3 * matern(2.5, euclidean(A, B))),
    "Exponential": (lambda: Exponential(ell, 1.3), lambda A, B: 1.3 * np.exp(-np.abs(differences(A, B) / ell).sum(-1))),
    "Cosine": (lambda: Cosine(ell, 1.3), lambda A, B: 1.3 * np.cos(2 * np.pi * (differences(A, B) / ell).sum(-1))),
    "Periodic": (lambda: Periodic(ell, 1.3, period),
                 lambda A, B: 1.3 * np.exp(-2 * ((np.sin(np.pi * differences(A, B) / period) / ell) ** 2).sum(-1))),
    "Linear": (lambda: Linear(ell), lambda A, B: np.einsum("id,d,jd->ij", A, ell, B)),
    "Polynomial": (lambda: Polynomial(0.4, 0.6, degree=3), lambda A, B: (0.4 * np.einsum("id,jd->ij", A, B) + 0.6) ** 3),
    "RationalQuadratic": (lambda: RationalQuadratic(ell, 1.3, 0.8), lambda A, B: 1.3 * (1 + euclidean(A, B) ** 2 / 1.6) ** -0.8),
    "Coregion": (lambda: RBF(0.7, active_dims=[0]) * Coregion(3, 2, outputs_W, [0.3, 1.1, 0.6], active_dims=[1]),
                 lambda A, B: np.exp(-0.5 * (differences(A, B)[..., 0] / 0.7) ** 2)
                 * (outputs_W @ outputs_W.T + np.diag([0.3, 1.1, 0.6]))[np.ix_(A[:, 1].astype(int), B[:, 1].astype(int))]),
    "White": (lambda: White(1.3), lambda A, B: np.zeros((len(A), len(B)))),
    "Constant": (lambda: Constant(1.3), lambda A, B: np.full((len(A), len(B)), 1.3)),
    "Wiener": (lambda: Wiener(1.3), lambda A, B: 1.3 * np.minimum(A, B.T)),
    "composite": (lambda: RBF(0.7, 1.3, active_dims=[1]) * Periodic(0.9, active_dims=[0]) + 0.5 * Linear(active_dims=[0]) + White(0.1),
                  lambda A, B: 1.3 * np.exp(-0.5 * (differences(A, B)[..., 1] / 0.7) ** 2)
                  * np.exp(-2 * (np.sin(np.pi * differences(A, B)[..., 0]) / 0.9) ** 2) + 0.5 * A[:, :1] * B[:, :1].T),
}
NOISE = {"White": 1.3, "composite": 0.1}
every_kernel = pytest.mark.parametrize("name", CASES)
few = settings(max_examples=15, deadline=None)


def columns(name, X):
    "Inputs that the kernel takes: one column that is not negative for Wiener, else two, for Coregion an output's number in the second."
    if name == "Coregion":
        return np.stack([X[:, 0], np.floor(3 * np.abs(X[:, 1])) % 3], axis=1)
    return np.abs(X[:, :1]) if name == "Wiener" else X


def some(name, num=9, seed=0, dtype=np.float64):
    return columns(name, np.random.default_rng(seed).normal(size=(num, 2)).astype(dtype))


# A fixed number of rows, so that each kernel compiles once; values with repetitions, zeros and near misses.
numbers = st.floats(-10, 10, width=32).map(float) | st.sampled_from([0.0, 1.0, 1.0 + 1e-9, 1e-20, -2.5])
inputs = hnp.arrays(np.float64, (6, 2), elements=numbers)


@jax.jit
def everything(kernel, X):
    "One program of a kernel for all of: K(X), the blocks of its first rows with the others, its diagonal, and a gradient."
    return kernel(X), kernel(X[:4], X[4:]), kernel(X[4:], X[:4]), kernel.diag(X), jax.grad(lambda X: jnp.sum(kernel(X)))(X)


@every_kernel
@few
@given(X=inputs)
def test_gram_matrix_and_cross_covariances_which_are_its_blocks(name, X):
    X, (make, by_numpy) = columns(name, X), CASES[name]
    K, right, left, diagonal, _ = (np.asarray(a) for a in everything(make(), X))
    assert np.array_equal(K, K.T) or np.allclose(K, K.T, rtol=1e-14, atol=0)
    assert np.linalg.eigvalsh(K).min() >= -1e-8 * max(np.abs(K).max(), 1e-12)
    np.testing.assert_allclose(diagonal, np.diag(K), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(K, by_numpy(X, X) + NOISE.get(name, 0) * np.eye(6), rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(right, K[:4, 4:], rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(left, K[4:, :4], rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("ours, theirs", [
    (RBF(ell, 2.0), 2.0 * sk.RBF(ell)),
    (Matern12(ell), sk.Matern(ell, nu=0.5)),
    (Matern32(ell), sk.Matern(ell, nu=1.5)),
    (Matern52(ell), sk.Matern(ell, nu=2.5)),
    (RationalQuadratic(0.7, 2.0, 0.4), 2.0 * sk.RationalQuadratic(0.7, 0.4)),
    (Linear(1.0) + 4.0, sk.DotProduct(2.0)),
    (Polynomial(1.0, 4.0, degree=2), sk.DotProduct(2.0) ** 2),
    (Constant(0.7), sk.ConstantKernel(0.7)),
    (White(0.7), sk.WhiteKernel(0.7)),
    (RBF(0.5) * Matern32(2.0) + White(0.1), sk.RBF(0.5) * sk.Matern(2.0, nu=1.5) + sk.WhiteKernel(0.1)),
])
def test_scikit_learn_agrees(ours, theirs):
    X, X2 = some("RBF"), some("RBF", 4, seed=1)
    K, cross, diagonal = jax.jit(lambda kernel, X, X2: (kernel(X), kernel(X, X2), kernel.diag(X)))(ours, X, X2)
    np.testing.assert_allclose(K, theirs(X), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(cross, theirs(X, X2), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(diagonal, theirs.diag(X), rtol=1e-12)


def test_scikit_learn_agrees_on_the_periodic_kernel():
    X = some("RBF")[:, :1]
    np.testing.assert_allclose(Periodic(0.8, period=1.7)(X), sk.ExpSineSquared(0.8, 1.7)(X), rtol=1e-12)


def test_exponential_and_matern12_agree_in_one_dimension_only():
    X = some("RBF")
    np.testing.assert_allclose(Exponential(0.6)(X[:, :1]), Matern12(0.6)(X[:, :1]), rtol=1e-14)
    assert not np.allclose(Exponential(0.6)(X), Matern12(0.6)(X))


# ---- derivatives

def central(function, x, step=1e-6):
    "Derivatives of a scalar function of a vector by central differences, one coordinate after another."
    return np.array([(function(x + shift) - function(x - shift)) / (2 * step) for shift in step * np.eye(len(x))])


def weights(*shape):
    "Fixed weights, not symmetric, that make a scalar of a covariance matrix."
    return np.random.default_rng(5).normal(size=shape)


tens = np.linspace(1, 2, 10)                                                 # more columns than EXACT_COLUMNS
WIDE = {name: (make, 2) for name, (make, _) in CASES.items()} | {
    "RBF, wide": (lambda: RBF(tens), 10), "Matern32, wide": (lambda: Matern32(tens), 10)}


@eqx.filter_jit
def derivatives(restore, rest, direction, v):
    "A scalar of kernel matrices as a function of hyperparameters and inputs, its gradient, and its Hessian times a direction, twice."
    def total(v):
        trainable, X, X2 = restore(v)
        kernel = eqx.combine(trainable, rest)
        return (jnp.sum(weights(3, 3) * kernel(X)) + jnp.sum(weights(3, 2) * kernel(X, X2)) + jnp.sum(jnp.sin(kernel.diag(X))))

    gradient, forward = jax.jvp(jax.grad(total), (v,), (direction,))
    return total(v), gradient, forward, jax.grad(lambda v: direction @ jax.grad(total)(v))(v)


@pytest.mark.parametrize("name", WIDE)
def test_first_and_second_derivatives_against_finite_differences(name):
    "In inputs and hyperparameters at once; the second ones forward over reverse and reverse over reverse, along a direction."
    make, num_dims = WIDE[name]
    rng = np.random.default_rng(0)
    X, X2 = (columns(name, rng.normal(size=(num, num_dims))) for num in (3, 2))
    trainable, rest = partition(make())
    flat, restore = jax.flatten_util.ravel_pytree((trainable, X, X2))
    direction = rng.normal(size=flat.size)
    at = jax.tree_util.Partial(derivatives, restore, rest, direction)
    flat = np.asarray(flat)

    _, gradient, forward, reverse = (np.asarray(a) for a in at(flat))
    np.testing.assert_allclose(gradient, central(lambda v: float(at(v)[0]), flat), rtol=1e-6, atol=1e-7)
    step = 1e-5 * direction
    expected = (np.asarray(at(flat + step)[1]) - np.asarray(at(flat - step)[1])) / 2e-5
    np.testing.assert_allclose(forward, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    np.testing.assert_allclose(reverse, forward, rtol=1e-10, atol=1e-10 * np.abs(forward).max())

    X[1] = X2[0] = X[0]                                                      # coincident inputs
    _, _, forward, reverse = (np.asarray(a) for a in at(np.asarray(jax.flatten_util.ravel_pytree((trainable, X, X2))[0])))
    assert np.all(np.isfinite(forward)) and np.abs(forward).max() < 1e4
    np.testing.assert_allclose(reverse, forward, rtol=1e-10, atol=1e-10 * np.abs(forward).max())


def test_hessian_with_respect_to_parameters():
    X, G = some("RBF", 5), weights(5, 5)
    total = lambda p: jnp.sum(G * Matern52(p[:2], p[2])(X))
    gradient_and_hessian = jax.jit(lambda p: (jax.grad(total)(p), jax.hessian(total)(p)))
    p = np.array([0.7, 1.4, 0.9])
    hessian, gradient = np.asarray(gradient_and_hessian(p)[1]), lambda p: np.asarray(gradient_and_hessian(p)[0])
    expected = np.stack([(gradient(p + s) - gradient(p - s)) / 2e-5 for s in 1e-5 * np.eye(3)])
    np.testing.assert_allclose(hessian, expected, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-12)


@every_kernel
@few
@given(X=inputs)
def test_gradients_stay_finite_at_coincident_and_nearly_coincident_inputs(name, X):
    X = columns(name, np.concatenate([X, X[:2], X[:1] + 1e-13]))
    gradients = GRADIENTS[name](CASES[name][0](), X)
    for gradient in jax.tree.leaves(gradients):
        assert np.all(np.isfinite(gradient))
        assert np.abs(gradient).max() < 1e7


GRADIENTS = {name: jax.jit(jax.grad(lambda kernel, X: jnp.sum(kernel(X)) + jnp.sum(kernel(X, X[::-1])), (0, 1))) for name in CASES}


@pytest.mark.parametrize("kernel, expected", [(RBF(), 1.0), (Matern32(), 3.0), (Matern52(), 5 / 3), (Periodic(), 4 * math.pi**2)])
def test_covariance_of_derivatives_at_one_input(kernel, expected):
    "var f'(x) = ∂²k(x, x') / ∂x ∂x' at x = x', where a plain square root would give 0 or NaN."
    scalar = lambda a, b: kernel(a[None, None], b[None, None])[0, 0]
    assert np.isclose(jax.jit(jax.grad(jax.grad(scalar, 0), 1))(0.3, 0.3), expected)


# ---- the distance

@pytest.mark.parametrize("num_dims", [1, 8, 9, 30])
def test_squared_distance(num_dims):
    rng = np.random.default_rng(0)
    A, B = rng.normal(size=(7, num_dims)) + 50, rng.normal(size=(5, num_dims)) + 50
    exact = lambda A, B: (differences(A, B) ** 2).sum(-1)
    np.testing.assert_allclose(squared_distance(A, B), exact(A, B), rtol=1e-11)
    np.testing.assert_allclose(squared_distance(A), exact(A, A), rtol=1e-11)
    assert np.all(np.diag(squared_distance(A)) == 0)
    assert squared_distance(A, A).min() >= 0


@pytest.mark.parametrize("num_dims", [3, 30])
def test_single_precision_distance_far_from_the_origin(num_dims):
    "Centring keeps what the formula with norms about the origin would lose."
    rng = np.random.default_rng(0)
    A = (rng.normal(size=(40, num_dims)) + 300).astype(np.float32)
    exact = (differences(A.astype(float), A.astype(float)) ** 2).sum(-1)
    got = squared_distance(jnp.asarray(A))
    assert got.dtype == jnp.float32
    assert np.abs(got - exact).max() < 1e-4 * exact.max()


@pytest.mark.parametrize("num_dims", [1, 3, 9, 20])
@pytest.mark.parametrize("scale", [1e3, 1e4, 1e5])
def test_slopes_far_from_the_centre_in_single_precision(scale, num_dims):
    "Pairs of inputs, one apart, each too far from the others to see them: the sum over K has slope 2 exp(-1/2) for each."
    place = np.round(np.linspace(-scale, scale, 30))
    X = np.stack([place, place + 1], axis=1).reshape(-1, 1) * np.eye(num_dims)[0]
    total = lambda ell, X, X2=None: jnp.sum(RBF(ell, np.float32(1))(X, X2))
    slope = jax.grad(total, (0, 1))

    @jax.jit
    def derivatives(ell, X, direction):
        forward = jax.jvp(lambda ell: total(ell, X), (ell,), (direction,))[1]
        return (*slope(ell, X), total_between(ell, X), forward, jax.jvp(lambda ell: slope(ell, X)[0], (ell,), (direction,))[1])

    total_between = jax.grad(lambda ell, X: total(ell, X[::2], X[1::2]))
    one = np.eye(num_dims, dtype=np.float32)[0]
    in_ell, in_X, between, forward, curvature = map(np.asarray, derivatives(jnp.ones(num_dims, jnp.float32), X.astype(np.float32), one))
    e, rtol = np.exp(-0.5), max(1e-3, 2e-7 * scale)                                         # what an x in X / ell is rounded by
    np.testing.assert_allclose(in_ell, 60 * e * one, rtol=rtol, atol=1e-6)
    np.testing.assert_allclose(between, 30 * e * one, rtol=rtol, atol=1e-6)
    np.testing.assert_allclose(forward, 60 * e, rtol=rtol)
    np.testing.assert_allclose(curvature, -120 * e * one, rtol=rtol, atol=1e-6)           # (r⁴ - 3 r²) exp(-r² / 2)
    np.testing.assert_allclose(in_X, np.outer(np.tile([2 * e, -2 * e], 30), one), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("num_dims", [3, 12])
@pytest.mark.parametrize("ard", [True, False])
@pytest.mark.parametrize("moving, between", [(moving, between) for moving in [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
                                             for between in [True, False] if between or 1 not in moving])
def test_derivatives_of_the_distance_in_whatever_changes(moving, between, ard, num_dims):
    "Inputs of either side (0, 1) and lengthscales (2), which take fewer products where others stand still."
    rng = np.random.default_rng(0)
    X2 = rng.normal(size=(4, num_dims)) + 3 if between else None
    arguments = rng.normal(size=(5, num_dims)) + 3, X2, np.linspace(1, 2, num_dims) if ard else 1.3
    naive = lambda X, X2, ell: jnp.sum(((X[:, None] - (X if X2 is None else X2)) / ell) ** 2, -1)

    def derivatives(distance):
        total = lambda moved: jnp.sum(jnp.sin(distance(*(moved.get(i, fixed) for i, fixed in enumerate(arguments)))))
        return jax.jit(lambda moved: (jax.grad(total)(moved), jax.hessian(total)(moved), jax.jacfwd(total)(moved)))

    ours, expected = (derivatives(distance)({i: jnp.asarray(arguments[i]) for i in moving}) for distance in (squared_distance, naive))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), ours, expected)


@pytest.mark.parametrize("lengthscale", [1e-9, 5e-11])
def test_what_has_no_neighbour_has_no_slope_in_the_lengthscale(lengthscale):
    "With rounding left on the diagonal it was 65536, and L-BFGS stopped there on a slope in the noise."
    X = np.sort(np.random.default_rng(0).uniform(0, 6, (30, 1)), 0)
    weights = np.random.default_rng(1).normal(size=(30, 30))
    slope = lambda ell: jax.grad(lambda ell: jnp.sum(weights * RBF(ell)(X)))(ell)
    assert slope(lengthscale) == 0 and jax.grad(slope)(lengthscale) == 0
    assert jax.jvp(lambda ell: jnp.sum(weights * RBF(ell)(X)), (lengthscale,), (1.0,))[1] == 0


def test_one_row_that_is_far_away_leaves_the_others_their_slope():
    "Of many: the mean of thirty is so far from them that rounding takes a hundredth of their slope."
    rng = np.random.default_rng(0)
    X, weights = rng.normal(size=(300, 2)), rng.normal(size=(300, 300))
    far = np.concatenate([X[:-1], [[1e8, 0.0]]])
    total = lambda ell, X, weights: jnp.sum(weights * RBF(ell)(X))
    slope, expected = (jax.grad(total)(jnp.ones(2), A, W) for A, W in ((far, weights), (far[:-1], weights[:-1, :-1])))
    np.testing.assert_allclose(slope, expected, rtol=1e-3)


def test_neighbours_at_the_end_of_what_products_can_tell_are_not_torn_apart():
    "A rule for single rows took one of each pair for far, and its slope for 1e15."
    edge = np.finfo(float).eps ** -0.5
    X = np.concatenate([side * edge + np.linspace(-2, 2, 9) for side in (-1, 1)])[:, None]
    slope = jax.grad(lambda ell: jnp.sum(RBF(ell)(X)))(1.0)
    r2 = (X - X[:, 0]) ** 2
    assert abs(slope - np.sum(r2 * np.exp(-r2 / 2))) < len(X) ** 2


@pytest.mark.parametrize("num_dims", [2, 8])
@pytest.mark.parametrize("lengthscale", [1e-9, 1e-60])
def test_equal_values_in_a_column_have_no_slope_in_its_lengthscale(lengthscale, num_dims):
    "Energy has such columns; products left 1e116 of a slope of zero there."
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, num_dims))
    X[:, 0] = rng.integers(0, 3, 40)
    ell, weights = np.ones(num_dims), rng.normal(size=(40, 40))
    ell[0] = lengthscale
    for X2 in (None, X[::2]):
        other = X if X2 is None else X2
        equal, W = X[:, :1] == other[:, 0], weights[:, :len(other)]
        rest = lambda ell: jnp.where(equal, RBF(ell)(X[:, 1:], other[:, 1:]), 0)        # the kernel of the other columns
        np.testing.assert_allclose(RBF(ell)(X, X2), rest(ell[1:]), rtol=1e-10)
        slope, expected = (jax.grad(lambda ell: jnp.sum(W * K(ell)))(e) for K, e in ((lambda ell: RBF(ell)(X, X2), ell), (rest, ell[1:])))
        np.testing.assert_allclose(slope, [0, *expected], rtol=1e-10)


def test_the_slope_in_lengthscales_and_inducing_points_is_one_product_with_the_data():
    "In reverse: the value's product, the slope's, and none for inputs that are data."
    Z, X = jnp.zeros((300, 100)), jnp.zeros((400, 100))
    total = lambda Z, ell: jnp.sum(jnp.sin(squared_distance(Z, X, ell)))
    text = jax.jit(jax.grad(total, (0, 1))).lower(Z, jnp.ones(100)).as_text()
    assert len(re.findall("stablehlo.dot_general", text)) == 2
    text = jax.jit(jax.grad(lambda ell: jnp.sum(jnp.sin(squared_distance(X, None, ell))))).lower(jnp.ones(100)).as_text()
    assert len(re.findall("stablehlo.dot_general", text)) == 2


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("num_dims", [3, 12])
def test_no_three_dimensional_array_in_value_or_gradient(num_dims, dtype):
    G = jnp.ones((300, 200), dtype)
    gradient = jax.grad(lambda A, B: jnp.sum(G * squared_distance(A, B)), (0, 1))
    program = jax.jit(gradient).lower(jnp.zeros((300, num_dims), dtype), jnp.zeros((200, num_dims), dtype)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2 * G.nbytes


# ---- precision, transformations, parameters

@every_kernel
def test_single_precision(name):
    kernel, X = CASES[name][0](), some(name, 6).astype(np.float32)
    for got, exact in zip(everything(cast(kernel, jnp.float32), X), everything(kernel, X.astype(float))):
        assert got.dtype == jnp.float32 and exact.dtype == jnp.float64
        np.testing.assert_allclose(got, exact, rtol=2e-4, atol=1e-4)


batched = jax.jit(jax.vmap(lambda kernel, X: kernel(X), in_axes=(None, 0)))


@every_kernel
def test_jit_and_vmap(name):
    kernel, X = CASES[name][0](), np.stack([some(name, 9, seed) for seed in range(3)])
    np.testing.assert_allclose(batched(kernel, X), np.stack([kernel(x) for x in X]), rtol=1e-12, atol=1e-14)


def test_integers_and_lists_are_inputs():
    np.testing.assert_allclose(RBF()([[0], [1]]), [[1, np.exp(-0.5)], [np.exp(-0.5), 1]])
    np.testing.assert_allclose(RBF()(np.arange(3)[:, None]), RBF()(np.arange(3.0)[:, None]))


def test_parameters_with_priors_and_frozen_ones():
    kernel = RBF(positive(2.0, prior=dist.Gamma(2.0, 1.0)), freeze(positive(3.0)))
    assert np.isclose(unwrap(kernel).lengthscale, 2.0) and np.isclose(unwrap(kernel).variance, 3.0)
    gradient = jax.jit(jax.grad(lambda kernel: jnp.sum(kernel(some("RBF")))))(kernel)
    assert gradient.lengthscale.unconstrained != 0
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(gradient.variance))


# ---- composition

def test_sums_and_products_are_flat():
    a, b, c = RBF(), White(), Linear()
    assert [type(k) for k in (a + b + c).kernels] == [RBF, White, Linear]
    assert [type(k) for k in (a * (b * c)).kernels] == [RBF, White, Linear]
    assert isinstance(a * b + c, Sum) and isinstance(a * (b + c), Product)


def test_numbers_in_sums_and_products():
    X = some("RBF")
    np.testing.assert_allclose((2.0 * RBF() + 3)(X), 2 * RBF()(X) + 3)
    np.testing.assert_allclose((3 + RBF() * 2.0).diag(X), 5.0)
    with pytest.raises(ValueError, match="variance must be positive"):
        -1.0 * RBF()
    with pytest.raises(ValueError, match="variance must be a number"):
        RBF() + "noise"


def test_active_dims():
    X = np.random.default_rng(0).normal(size=(5, 4))
    for dims, picked in (([2, 0], X[:, [2, 0]]), ((1,), X[:, [1]]), (slice(1, 3), X[:, 1:3]), (slice(0, 4, 2), X[:, ::2]),
                         (np.array([3]), X[:, [3]]), (range(2), X[:, :2])):
        np.testing.assert_array_equal(RBF(active_dims=dims)(X), RBF()(picked))
        np.testing.assert_array_equal(Linear(active_dims=dims).diag(X), Linear().diag(picked))
    inner = RBF(active_dims=[1]) + Linear(active_dims=[0])
    np.testing.assert_allclose(Sum(inner.kernels, active_dims=[3, 2])(X), RBF()(X[:, [2]]) + Linear()(X[:, [3]]))
    np.testing.assert_allclose((Sum(inner.kernels, active_dims=[3, 2]) + Constant())(X), RBF()(X[:, [2]]) + Linear()(X[:, [3]]) + 1)


def test_vector_lengthscale_goes_with_the_active_columns():
    X = np.random.default_rng(0).normal(size=(5, 4))
    np.testing.assert_allclose(RBF([0.5, 2.0], active_dims=[3, 1])(X), RBF()(X[:, [3, 1]] / [0.5, 2.0]))


# ---- means and draws

def test_means():
    X = some("RBF")
    np.testing.assert_array_equal(Zero()(X), np.zeros(9))
    np.testing.assert_array_equal(ConstantMean(1.5)(X), np.full(9, 1.5))
    np.testing.assert_allclose(LinearMean([1.0, -2.0], 0.5)(X), X @ [1.0, -2.0] + 0.5)
    gradient = jax.grad(lambda mean: jnp.sum(mean(X)))(LinearMean([1.0, -2.0]))
    np.testing.assert_allclose(gradient.weights.unconstrained, X.sum(0))
    assert Zero()(X.astype(np.float32)).dtype == jnp.float32


def test_draws_have_the_mean_and_the_covariance_of_the_process():
    X, num = np.linspace(0, 2, 4)[:, None], 40_000
    kernel = Matern32(0.8, 2.0) + Linear()
    draws = np.asarray(sample_prior(jax.random.key(1), kernel, X, num, LinearMean([1.0])))
    assert draws.shape == (num, 4)
    sd = np.sqrt(np.asarray(kernel.diag(X)))
    assert np.all(np.abs(draws.mean(0) - X[:, 0]) < 5 * sd / np.sqrt(num))
    assert np.all(np.abs(np.cov(draws.T) - kernel(X)) < 7 * np.outer(sd, sd) / np.sqrt(num))
    np.testing.assert_array_equal(draws[:3], sample_prior(jax.random.key(1), kernel, X, num, LinearMean([1.0]))[:3])


def test_draws_in_single_precision_and_from_a_singular_matrix():
    X = np.zeros((3, 1), np.float32)
    draws = sample_prior(jax.random.key(0), cast(RBF(), jnp.float32), X, 2)
    assert draws.dtype == jnp.float32 and np.all(np.isfinite(draws))
    np.testing.assert_allclose(draws, draws[:, :1].repeat(3, 1), atol=5e-3)


def test_a_kernel_of_ones_own():
    class Cauchy(Stationary):
        def correlation(self, r2):
            return 1 / (1 + r2 / 2)

    X = some("RBF")
    np.testing.assert_allclose(Cauchy(0.6, 2.0)(X), 2.0 * sk.RationalQuadratic(0.6, 1.0)(X), rtol=1e-12)


def test_what_a_subclass_is_passed():
    "Active columns, plain arrays for parameters, and None where X is compared with itself."
    seen = []

    class Spy(Kernel):
        scale: object = eqx.field(converter=positive)

        def covariance(self, X, X2=None):
            seen.append((X.shape, None if X2 is None else X2.shape, isinstance(self.scale, jax.Array)))
            return self.scale * X @ (X if X2 is None else X2).T

    kernel = Spy(0.5, active_dims=[1])
    kernel(np.ones((3, 2))), kernel(np.ones((3, 2)), np.ones((4, 2)))
    assert seen == [((3, 1), None, True), ((3, 1), (4, 1), True)]
    assert "X2 is None" in Kernel.__doc__


# ---- scale mixtures

def test_rational_quadratic_is_a_mixture_of_rbfs_over_scales_and_tends_to_one():
    X, alpha = some("RBF"), 1.7
    nodes, weights = special.roots_genlaguerre(60, alpha - 1)
    mixture = sum(w * np.exp(-0.5 * euclidean(X, X) ** 2 * node / alpha) for node, w in zip(nodes, weights / weights.sum()))
    np.testing.assert_allclose(RationalQuadratic(ell, 1.0, alpha)(X), mixture, atol=1e-10)
    for alpha, atol in ((1e4, 1e-3), (1e12, 1e-9)):
        np.testing.assert_allclose(RationalQuadratic(ell, 1.3, alpha)(X), RBF(ell, 1.3)(X), atol=atol)
    single = cast(RationalQuadratic(ell, 1.3, 1e7), jnp.float32)(X.astype(np.float32))
    np.testing.assert_allclose(single, RBF(ell, 1.3)(X), atol=1e-5)


# ---- errors

good = np.ones((3, 2))


@pytest.mark.parametrize("call, message", [
    (lambda: RBF()(np.ones(3)), r"X must have shape \(N, D\), got \(3,\).*pass X\[:, None\]"),
    (lambda: RBF()(np.ones((3, 2, 1))), r"X must have shape \(N, D\), got \(3, 2, 1\)"),
    (lambda: RBF()(1.0), r"X must have shape \(N, D\), got \(\)"),
    (lambda: RBF()(np.ones((0, 2))), r"X must have at least one row and one column, got shape \(0, 2\)"),
    (lambda: RBF()(np.ones((2, 0))), r"X must have at least one row and one column, got shape \(2, 0\)"),
    (lambda: RBF()(np.array([[1.0], [np.nan]])), "X must be finite, got NaN or infinity in 1 rows, first in row 1"),
    (lambda: RBF().diag(np.array([[np.inf]])), "X must be finite"),
    (lambda: RBF()([["a"]]), "X must be a number or an array of numbers"),
    (lambda: RBF()(np.ones((2, 1)) * 1j), "X must be real"),
    (lambda: RBF()(good, np.ones(2)), r"X2 must have shape \(N, D\)"),
    (lambda: RBF()(good, np.ones((4, 3))), r"X2 must have 2 columns, got shape \(4, 3\)"),
    (lambda: RBF()(good, np.full((4, 2), np.nan)), "X2 must be finite"),
    (lambda: check_inputs(good, "Z", 3), r"Z must have 3 columns, got shape \(3, 2\)"),
    (lambda: ConstantMean()(np.ones(3)), r"X must have shape \(N, D\)"),
    (lambda: RBF(-1.0), "lengthscale must be positive"),
    (lambda: RBF([1.0, 0.0]), "lengthscale must be positive"),
    (lambda: Matern32(1.0, -2.0), "variance must be positive"),
    (lambda: Periodic(period=0.0), "period must be positive"),
    (lambda: Polynomial(offset=-1.0), "offset must be positive"),
    (lambda: Polynomial(degree=1.5), "degree must be a positive integer, got 1.5"),
    (lambda: Polynomial(degree=0), "degree must be a positive integer, got 0"),
    (lambda: White("loud"), "variance must be a number"),
    (lambda: RBF([1.0, 2.0, 3.0])(good), r"lengthscale must be one number, or one for each of the 2 active columns, got shape \(3,\)"),
    (lambda: RBF([1.0])(good), "lengthscale must be one number"),
    (lambda: RBF([[1.0, 2.0]]), r"lengthscale must be one number or a vector, got shape \(1, 2\)"),
    (lambda: RBF(variance=[1.0, 2.0, 3.0]), r"variance must be one number, got shape \(3,\)"),
    (lambda: Polynomial(offset=[1.0, 2.0]), r"offset must be one number, got shape \(2,\)"),
    (lambda: White(positive([1.0, 2.0])), r"variance must be one number, got shape \(2,\)"),
    (lambda: RBF([1.0, 2.0], active_dims=[0])(good), "for each of the 1 active columns"),
    (lambda: Linear([1.0, 2.0, 3.0]).diag(good), "variance must be one number"),
    (lambda: Periodic(period=[1.0, 2.0, 3.0])(good), "period must be one number"),
    (lambda: RBF(active_dims=[2])(good), r"active_dims of RBF are \(2,\), but the inputs have 2 columns"),
    (lambda: (RBF() + White(active_dims=[0, 5])).diag(good), r"active_dims of White are \(0, 5\)"),
    (lambda: RBF(active_dims=[0, 0]), r"active_dims must be distinct column numbers.*got \[0, 0\]"),
    (lambda: RBF(active_dims=[]), "active_dims must be distinct"),
    (lambda: RBF(active_dims=[-1]), "counted from 0"),
    (lambda: RBF(active_dims=[0.5]), "active_dims must be distinct"),
    (lambda: RBF(active_dims=[True, False]), "active_dims must be distinct"),
    (lambda: RBF(active_dims=1), "active_dims must be distinct"),
    (lambda: RBF(active_dims="01"), "active_dims must be distinct"),
    (lambda: RBF(active_dims=slice(1, None)), "a slice needs an end"),
    (lambda: RBF(active_dims=slice(2, 1)), "active_dims must be distinct"),
    (lambda: cast(RBF(), jnp.float32)(good + 1e-12), "mixed dtypes: X is float64, lengthscale is float32, variance is float32.*astype.*cast"),
    (lambda: cast(RBF(), jnp.float32)(good.astype(np.float32), good + 1e-12), "mixed dtypes: X is float32, X2 is float64"),
    (lambda: cast(RBF() + White(), jnp.float32)(good + 1e-12), r"kernels\[1\].variance is float32"),
    (lambda: cast(ConstantMean(1.0), jnp.float32)(good + 1e-12), "mixed dtypes: X is float64, value is float32"),
    (lambda: Wiener()(good), "Wiener needs one active column, got 2"),
    (lambda: Wiener()(np.array([[-0.5]])), "Wiener needs inputs that are at least 0, got -0.5"),
    (lambda: Wiener().diag(np.array([[-0.5]])), "Wiener needs inputs that are at least 0"),
    (lambda: LinearMean([1.0, 2.0, 3.0])(good), "weights must be one number for each of the 2 columns"),
    (lambda: RationalQuadratic(alpha=0.0), "alpha must be positive"),
    (lambda: Coregion(0), "num_outputs must be a positive integer, got 0"), (lambda: Coregion(2.0), "num_outputs must be a positive integer"),
    (lambda: Coregion(2, 3), "rank must be a positive integer and at most 2, the outputs, got 3"),
    (lambda: Coregion(2, W=[1.0, 2.0]), r"W must have shape \(2, 1\), a row for each output .* got shape \(2,\)"),
    (lambda: Coregion(2, kappa=[1.0, 2.0, 3.0]), r"kappa must be one number, or one for each of the 2 outputs, got shape \(3,\)"),
    (lambda: Coregion(2, kappa=-1.0), "kappa must be positive"),
    (lambda: Coregion(2)(good), "Coregion needs one active column, the number of the output, got 2; name it with active_dims"),
    (lambda: Coregion(2, active_dims=[1])([[0.3, 1.0], [0.1, 2.0]]), "the numbers of the outputs, 0 to 1, got 2.0"),
    (lambda: Coregion(2)([[0.5]]), "0 to 1, got 0.5"), (lambda: Coregion(2).diag([[-1.0]]), "0 to 1, got -1.0"),
    (lambda: Independent([]), "kernels must be a non-empty list of kernels"), (lambda: Independent([RBF(), 2.0]), "list of kernels"),
    (lambda: Independent([RBF()]), "Independent needs two kernels or more, got one"),
    (lambda: Independent([RBF(), RBF()], active_dims=[0]), r"active_dims belong to the kernels inside Independent, got \(0,\)"),
    (lambda: (Independent([RBF(), RBF()]) + White())(good), "it cannot be part of a sum or a product"),
    (lambda: Sum([]), "kernels must be a non-empty list of kernels"),
    (lambda: Product([RBF(), 2.0]), "kernels must be a non-empty list of kernels"),
])
def test_errors_name_the_argument_and_what_is_accepted(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_shapes_are_checked_while_tracing_and_values_are_not():
    assert np.all(np.isnan(jax.jit(lambda X: RBF()(X))(np.full((2, 1), np.nan))))
    with pytest.raises(ValueError, match="X must have shape"):
        jax.jit(lambda X: RBF()(X))(np.ones(3))
    with pytest.raises(ValueError, match="mixed dtypes"):
        jax.jit(lambda X: cast(RBF(), jnp.float32)(X))(np.ones((3, 1)))


@every_kernel
def test_every_kernel_is_a_kernel_with_active_dims(name):
    assert isinstance(CASES[name][0](), Kernel)
    assert CASES[name][0]().active_dims is None


# ---- processes, means of several columns

def test_means_of_several_functions():
    X, W = some("RBF"), np.array([[1.0, 0.5, 0.0], [-2.0, 1.0, 3.0]])
    np.testing.assert_array_equal(ConstantMean([1.5, -2.0, 0.0])(X), np.tile([1.5, -2.0, 0.0], (9, 1)))
    np.testing.assert_allclose(LinearMean(W, 0.5)(X), X @ W + 0.5)
    np.testing.assert_allclose(LinearMean(W, [0.1, 0.2, 0.3])(X), X @ W + [0.1, 0.2, 0.3])
    np.testing.assert_array_equal(IdentityMean()(X), X)
    for mean, shape in ((Zero(), (9,)), (LinearMean(W[:, :1]), (9, 1)), (ConstantMean([0.0]), (9, 1))):
        assert mean(X).shape == shape


def test_a_frozen_projection_does_not_move():
    X, W = some("RBF"), np.array([[1.0], [-2.0]])
    loss = lambda mean: jnp.sum((mean(X) - 1.0) ** 2)
    for projection in (LinearMean(freeze(free(W))), LinearMean(freeze(jnp.asarray(W)))):
        gradient = jax.grad(loss)(projection)
        assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(gradient.weights))
        np.testing.assert_allclose(gradient.bias.unconstrained, 2 * np.sum(X @ W - 1))
        assert len(jax.tree.leaves(partition(projection)[0])) == 1          # the bias
    assert not jax.tree.leaves(partition(freeze(LinearMean(W)))[0])
    np.testing.assert_allclose(freeze(LinearMean(W))(X), X @ W)


def test_process_marginals():
    X, kernel = some("RBF"), Matern32(0.8, 2.0) + Linear([0.3, 0.1])
    mean, var = Process(kernel).marginals(X)
    np.testing.assert_array_equal(mean, np.zeros(9))
    np.testing.assert_allclose(var, np.diag(kernel(X)))
    mean, var = Process(kernel, LinearMean(np.eye(2)[:, [1, 0]])).marginals(X)
    np.testing.assert_allclose(mean, X[:, ::-1])
    np.testing.assert_allclose(var, np.diag(kernel(X))[:, None].repeat(2, 1))


def test_draws_of_several_functions_are_independent():
    X, num = np.array([[0.0], [0.3], [1.1]]), 40_000
    kernel, mean = Matern32(0.8, 2.0), LinearMean([[1.0, -1.0]], [0.0, 3.0])
    draws = np.asarray(sample_prior(jax.random.key(1), kernel, X, num, mean))
    assert draws.shape == (num, 3, 2)
    np.testing.assert_array_equal(draws[:2], Process(kernel, mean).sample(jax.random.key(1), X, num)[:2])
    assert np.all(np.abs(draws.mean(0) - np.hstack([X, 3 - X])) < 5 * np.sqrt(2.0 / num))
    joint = np.kron(np.eye(2), kernel(X))                                    # the columns one after another
    got = np.cov(np.moveaxis(draws, 1, 2).reshape(num, 6).T)
    assert np.all(np.abs(got - joint) < 7 * 2.0 / np.sqrt(num))
    assert Process(kernel).sample(jax.random.key(0), X).shape == (1, 3)


@pytest.mark.parametrize("call, message", [
    (lambda: Process(Zero()), r"kernel must be a gp_thesis Kernel, got Zero\(\)"),
    (lambda: Process(RBF(), RBF()), "mean must be a gp_thesis Mean, got RBF"),
    (lambda: Process(RBF(), 0.0), "mean must be a gp_thesis Mean, got 0.0"),
    (lambda: Process(RBF()).marginals(np.ones(3)), r"X must have shape \(N, D\)"),
    (lambda: ConstantMean(np.ones((2, 2))), r"value must be one number or a vector, got shape \(2, 2\)"),
    (lambda: LinearMean(2.0), r"weights must be a vector or a matrix, got shape \(\)"),
    (lambda: LinearMean(np.ones((2, 2, 2))), r"weights must be a vector or a matrix, got shape \(2, 2, 2\)"),
    (lambda: LinearMean(np.ones(2), [1.0, 2.0]), r"bias must be one number, or one for each column of the weights \(2,\), got shape \(2,\)"),
    (lambda: LinearMean(np.ones((2, 3)), [1.0, 2.0]), r"weights \(2, 3\), got shape \(2,\)"),
    (lambda: LinearMean(np.ones((3, 1)))(good), r"each of the 2 columns of X, or one row of numbers, got shape \(3, 1\)"),
    (lambda: IdentityMean()(np.ones(3)), r"X must have shape \(N, D\)"),
])
def test_errors_of_processes_and_means(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- vmap over hyperparameters

@pytest.mark.parametrize("name", ["RBF", "Matern32", "RationalQuadratic", "Coregion", "Periodic", "Polynomial", "Wiener", "composite", "RBF, wide"])
def test_vmap_over_hyperparameters(name):
    make, num_dims = WIDE[name]
    X = columns(name, np.random.default_rng(0).normal(size=(4, num_dims)))
    trainable, rest = partition(make())
    shifts = jnp.array([-0.5, 0.0, 0.7])

    @jax.jit
    def at_once_and_one_by_one(shifts):
        K = lambda shift: eqx.combine(jax.tree.map(lambda leaf: leaf + shift, trainable), rest)(X)
        return jax.vmap(K)(shifts), jnp.stack([K(shift) for shift in shifts])

    at_once, one_by_one = at_once_and_one_by_one(shifts)
    np.testing.assert_allclose(at_once, one_by_one, rtol=1e-12, atol=1e-14)
    assert not np.allclose(at_once[0], at_once[2])


def test_vmap_over_a_constructor():
    X, scales = some("RBF", 4), np.array([0.5, 1.0, 2.0])
    at_once = jax.jit(jax.vmap(lambda scale: Matern52(scale, 2 * scale)(X)))(scales)
    np.testing.assert_allclose(at_once, np.stack([Matern52(scale, 2 * scale)(X) for scale in scales]), rtol=1e-12)
