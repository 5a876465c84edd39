"Inducing variables: closed forms against sums over grids, limits, gradients, the factor, the conditional, and errors."
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gp_thesis as gpt
from gp_thesis.inducing import (GaussianWindow, InducingPoints, InducingPosterior, InducingVariables, Wavelet, Windows,
                                inducing_factor, inducing_inputs, window_covariance)
from gp_thesis.linalg import solve_lower
from gp_thesis.parameters import unwrap
from gp_thesis.variational import conditional, conditional_covariance

rng = np.random.default_rng(0)


@eqx.filter_jit
def covariances(inducing, kernel, X):
    inducing, kernel = unwrap((inducing, kernel))
    return inducing.covariance(kernel), inducing.cross_covariance(kernel, X)


@eqx.filter_jit
def matrix(kernel, a, b=None):
    return kernel(a, b)


factor = eqx.filter_jit(lambda *of: inducing_factor(*of).L)


@eqx.filter_jit
def explained(inducing, kernel, X):
    inducing, kernel = unwrap((inducing, kernel))
    L = inducing_factor(inducing, kernel).L
    return jnp.sum(solve_lower(L, inducing.cross_covariance(kernel, X)) ** 2, axis=0)


def rbf(a, b, lengthscale, variance):
    "The kernel written out, with an infinite lengthscale for columns it does not see."
    return variance * np.exp(-0.5 * (((a[:, None] - b[None]) / lengthscale) ** 2).sum(-1))


def on_a_grid(k, Z, width, frequency, X, nodes):
    "K_uu and K_uf from sums over a grid of window times kernel; `k` is a function of two arrays."
    M, D = Z.shape
    b, w = np.broadcast_to(width, (M, D)), np.broadcast_to(frequency, (M, D))
    axis = np.linspace(-7, 7, nodes)
    steps = np.stack(np.meshgrid(*[axis] * D, indexing="ij"), -1).reshape(-1, D)
    mass = np.exp(-0.5 * (steps**2).sum(1)) * ((axis[1] - axis[0]) / np.sqrt(2 * np.pi)) ** D
    at = [Z[r] + b[r] * steps for r in range(M)]
    g = [mass * np.cos((b[r] * steps) @ w[r]) for r in range(M)]
    lower = np.array([[g[i] @ k(at[i], at[j]) @ g[j] if j <= i else 0.0 for j in range(M)] for i in range(M)])
    Kuu = lower + np.tril(lower, -1).T
    return Kuu, np.array([g[i] @ k(at[i], X) for i in range(M)])


def shaped(shape, D, M, low, high):
    return rng.uniform(low, high, {"number": (), "columns": (D,), "all": (M, D)}[shape])


@pytest.mark.parametrize("D, nodes, shape", [(1, 105, "all"), (2, 32, "number"), (2, 32, "columns"), (2, 32, "all")])
@pytest.mark.parametrize("wave", [False, True])
def test_closed_forms_equal_sums_over_a_grid(D, nodes, shape, wave):
    M, Z, X = 3, rng.normal(size=(3, D)), rng.normal(size=(4, D))
    width, frequency = shaped(shape, D, M, 0.2, 0.7), shaped(shape, D, M, -3, 3) * wave
    inducing = Wavelet(Z, width, frequency) if wave else GaussianWindow(Z, width)
    lengthscale, hidden = rng.uniform(0.6, 1.2, D), np.array([0.8] + [np.inf] * (D - 1))
    cases = [(gpt.RBF(lengthscale, 1.3), lambda a, b: rbf(a, b, lengthscale, 1.3)),
             (gpt.RBF(0.8, 0.7, active_dims=[0]) + 0.4 + gpt.White(2.0), lambda a, b: rbf(a, b, hidden, 0.7) + 0.4)]
    for kernel, k in cases:
        for ours, brute in zip(covariances(inducing, kernel, jnp.asarray(X)), on_a_grid(k, Z, width, frequency, X, nodes)):
            assert np.abs(ours - brute).max() < 1e-10


def test_nested_active_columns():
    Z, X = rng.normal(size=(3, 3)), jnp.asarray(rng.normal(size=(4, 3)))
    inner = gpt.Sum((gpt.RBF(0.7, active_dims=[1]), gpt.Constant(0.3)), active_dims=[0, 2])
    flat = gpt.RBF(0.7, active_dims=[2]) + 0.3
    for inducing in (GaussianWindow(Z, [0.3, 0.4, 0.5]), Wavelet(Z, [0.3, 0.4, 0.5], [1.0, 2.0, -1.0])):
        for a, b in zip(covariances(inducing, inner, X), covariances(inducing, flat, X)):
            assert np.allclose(a, b, atol=1e-13)


@pytest.mark.parametrize("D", [1, 2])
def test_quadrature_equals_the_closed_form_for_a_kernel_that_has_one(D):
    class Unrecognised(gpt.RBF):
        "An RBF to all but the type."
    Z, X = rng.normal(size=(3, D)), jnp.asarray(rng.normal(size=(4, D)))
    width, frequency = rng.uniform(0.1, 0.5, (3, D)), rng.uniform(-2, 2, (3, D))
    for inducing in (GaussianWindow(Z, width), Wavelet(Z, width, frequency)):
        ours = covariances(inducing, Unrecognised([0.9] * D, 1.4), X)
        closed = covariances(inducing, gpt.RBF([0.9] * D, 1.4), X)
        assert max(np.abs(a - b).max() for a, b in zip(ours, closed)) < 1e-9


def test_periodic_is_no_rbf():
    Z, X, width = rng.normal(size=(3, 1)), rng.normal(size=(4, 1)), 0.3
    k = lambda a, b: 1.2 * np.exp(-2 * np.sin(np.pi * (a - b.T) / 1.7) ** 2 / 0.8**2)
    ours = covariances(GaussianWindow(Z, width, points=40), gpt.Periodic(0.8, 1.2, 1.7), jnp.asarray(X))
    brute = on_a_grid(k, Z, width, 0.0, X, 200)
    assert max(np.abs(a - b).max() for a, b in zip(ours, brute)) < 1e-8


@pytest.mark.parametrize("kernel", [gpt.Matern12(0.5), gpt.Linear(0.7) * gpt.Matern32(), gpt.Cosine(2.0)])
def test_quadrature_is_a_sum_over_function_values(kernel):
    Z, X = rng.normal(size=(3, 2)), jnp.asarray(rng.normal(size=(4, 2)))
    inducing = Wavelet(Z, 0.4, [1.0, -2.0], points=3)
    nodes, masses = np.polynomial.hermite_e.hermegauss(3)
    steps = 0.4 * np.array([[a, b] for a in nodes for b in nodes])
    weights = np.array([a * b for a in masses for b in masses]) / (2 * np.pi) * np.cos(steps @ [1.0, -2.0])
    at = (Z[:, None] + steps).reshape(-1, 2)
    W = np.kron(np.eye(3), weights[None])                    # u = W f(at)
    Kuu, Kuf = covariances(inducing, kernel, X)
    K = np.asarray(matrix(kernel, at, np.vstack([at, X])))
    assert np.allclose(Kuu, W @ K[:, :len(at)] @ W.T, atol=1e-12) and np.allclose(Kuf, W @ K[:, len(at):], atol=1e-12)


@pytest.mark.parametrize("kernel", [gpt.RBF(0.8, 1.2), gpt.Matern52(0.8) + gpt.Linear(0.2)])
def test_windows_become_points_as_the_width_vanishes(kernel):
    Z, X = rng.normal(size=(4, 2)), jnp.asarray(rng.normal(size=(5, 2)))
    want = covariances(InducingPoints(Z), kernel, X)
    error = lambda inducing: max(np.abs(a - b).max() for a, b in zip(covariances(inducing, kernel, X), want))
    for make in (lambda b: GaussianWindow(Z, b, points=8), lambda b: Wavelet(Z, b, 3.0, points=8)):
        assert error(make(0.02)) / error(make(0.002)) == pytest.approx(100, rel=0.05)      # of second order
        assert error(make(0.002)) < 1e-3
    assert error(Wavelet(Z, 0.002, 0.01 / 0.002, points=8)) < 1e-3


def test_a_wave_of_frequency_zero_is_a_window():
    Z, X, kernel = rng.normal(size=(4, 2)), jnp.asarray(rng.normal(size=(5, 2))), gpt.RBF(0.8) + gpt.Matern32()
    wave, window = Wavelet(Z, 0.4, 0.0, points=6), GaussianWindow(Z, 0.4, points=6)
    for a, b in zip(covariances(wave, kernel, X), covariances(window, kernel, X)):
        assert np.allclose(a, b, atol=1e-14)


KERNELS = [gpt.RBF(0.9), gpt.RBF(0.5) + gpt.Matern12(2.0) + 0.5 + gpt.White(0.1), gpt.Periodic(1.1, period=1.5) * gpt.RBF(3.0)]


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), which=st.integers(0, 2), kind=st.integers(0, 2), spread=st.floats(0.01, 5.0))
def test_u_and_f_have_a_covariance(seed, which, kind, spread):
    random = np.random.default_rng(seed)
    Z, X = spread * random.normal(size=(5, 1)), jnp.asarray(spread * random.normal(size=(6, 1)))
    width, frequency = np.exp(random.normal(size=(5, 1))), 3 * random.normal(size=(5, 1))
    inducing = [InducingPoints(Z), GaussianWindow(Z, width, points=7), Wavelet(Z, width, frequency, points=7)][kind]
    kernel = KERNELS[which]
    Kuu, Kuf = covariances(inducing, kernel, X)
    joint = np.block([[Kuu, Kuf], [Kuf.T, matrix(kernel, X)]])
    assert np.allclose(Kuu, Kuu.T, rtol=1e-12, atol=1e-14)
    assert np.linalg.eigvalsh(joint)[0] > -1e-12 * np.trace(joint)


@pytest.mark.parametrize("kernel", [gpt.RBF([0.8, 1.1], 1.2), gpt.Matern52([0.8, 1.1], 1.2)])
@pytest.mark.parametrize("kind", [InducingPoints, GaussianWindow, Wavelet])
def test_gradients_equal_finite_differences(kernel, kind):
    Z, X = rng.normal(size=(3, 2)), jnp.asarray(rng.normal(size=(6, 2)))
    own = dict(width=rng.uniform(0.3, 0.8, (3, 2)), points=4) if kind is not InducingPoints else {}
    own |= dict(frequency=rng.uniform(-2, 2, (3, 2))) if kind is Wavelet else {}
    trainable, rest = gpt.partition((kind(Z, **own), kernel))
    v, unravel = jax.flatten_util.ravel_pytree(trainable)
    v, X, weights = np.asarray(v), np.asarray(X), rng.normal(size=6)
    both = jax.jit(jax.value_and_grad(lambda v, X: weights @ explained(*eqx.combine(unravel(v), rest), X), (0, 1)))
    value = lambda v, X: float(both(v, X)[0])
    finite = [(value(v + e, X) - value(v - e, X)) / 2e-5 for e in 1e-5 * np.eye(len(v))]
    in_v, in_X = both(v, X)[1]
    assert np.allclose(in_v, finite, rtol=1e-5, atol=1e-6)
    step = 1e-5 * rng.normal(size=X.shape)
    along = (value(v, X + step) - value(v, X - step)) / 2
    assert np.allclose(np.sum(in_X * step), along, rtol=1e-5, atol=1e-11)


def test_windows_in_many_dimensions():
    D, b = 12, 0.3
    Z, X = rng.normal(size=(4, D)), jnp.asarray(rng.normal(size=(5, D)))
    Kuu, Kuf = covariances(GaussianWindow(Z, b), gpt.RBF(2.0, 1.5), X)
    wider = lambda times: gpt.RBF(np.sqrt(4 + times * b**2), 1.5 * (1 + times * b**2 / 4) ** (-D / 2))
    assert np.allclose(Kuu, matrix(wider(2), Z), atol=1e-13) and np.allclose(Kuf, matrix(wider(1), Z, X), atol=1e-13)


def test_exact_differences_far_from_the_origin():
    Z, X = rng.normal(size=(4, 1)), rng.normal(size=(5, 1))
    for make in (lambda Z: GaussianWindow(Z, 0.3), lambda Z: Wavelet(Z, 0.3, 2.0)):
        near, far = (covariances(make(Z + shift), gpt.RBF(0.5), jnp.asarray(X + shift)) for shift in (0.0, 2.0**20))
        assert all(np.allclose(a, b, atol=1e-8) for a, b in zip(near, far))


def test_white_noise_has_no_integral_but_a_value():
    Z, X = rng.normal(size=(3, 1)), jnp.asarray(rng.normal(size=(4, 1)))
    noisy = gpt.RBF() + gpt.White(0.5)
    for inducing in (GaussianWindow(Z), Wavelet(Z)):
        for a, b in zip(covariances(inducing, noisy, X), covariances(inducing, gpt.RBF(), X)):
            assert np.array_equal(a, b)
    Kuu, Kuf = covariances(InducingPoints(Z), noisy, X)
    assert np.allclose(Kuu, np.asarray(matrix(gpt.RBF(), Z)) + 0.5 * np.eye(3)) and np.allclose(Kuf, matrix(gpt.RBF(), Z, X))
    assert not explained(GaussianWindow(Z), gpt.White(), X).any()


def test_duplicates_say_the_same_twice():
    Z, X, kernel = rng.normal(size=(3, 2)), jnp.asarray(rng.normal(size=(8, 2))), gpt.RBF(0.8)
    again = np.array([0, 1, 2, 1, 1, 0])
    for make in (InducingPoints, GaussianWindow, Wavelet):
        assert np.allclose(explained(make(Z[again]), kernel, X), explained(make(Z), kernel, X), atol=1e-10)


class Rescaled(InducingPoints):
    units: jax.Array

    def __init__(self, Z, units):
        self.Z, self.units = inducing_inputs(Z), jnp.asarray(units)

    def covariance(self, kernel):
        return self.units[:, None] * super().covariance(kernel) * self.units

    def cross_covariance(self, kernel, X):
        return self.units[:, None] * super().cross_covariance(kernel, X)


def test_units_do_not_matter_even_with_duplicates():
    Z, X, kernel = rng.normal(size=(4, 1)), jnp.asarray(rng.normal(size=(8, 1))), gpt.RBF(0.8)
    Z[3] = Z[0]
    want = explained(InducingPoints(Z), kernel, X)
    assert np.allclose(explained(Rescaled(Z, [1e6, 1e-9, 1.0, 1e-3]), kernel, X), want, atol=1e-10)


def test_the_factor():
    inducing, kernel = unwrap(Wavelet(rng.normal(size=(6, 1)), np.geomspace(0.1, 3, 6)[:, None], 2.0)), unwrap(gpt.RBF())
    L = np.asarray(factor(inducing, kernel))
    K, _ = covariances(inducing, kernel, inducing.Z)
    assert np.array_equal(L, np.tril(L)) and np.allclose(L @ L.T, K, rtol=1e-10, atol=0)
    nothing = unwrap(InducingPoints(np.array([[0.0], [1.0], [2.0]])))             # zero variance at the origin
    L = np.asarray(factor(nothing, unwrap(gpt.Linear())))
    assert np.isfinite(L).all() and np.allclose(L @ L.T, np.outer([0, 1, 2], [0, 1, 2]), atol=1e-12)
    at = lambda Z: eqx.tree_at(lambda inducing: inducing.Z, nothing, Z)
    assert np.isfinite(jax.jit(jax.grad(lambda Z: jnp.sum(inducing_factor(at(Z), unwrap(gpt.Linear())).L)))(nothing.Z)).all()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("turns", [1.0, 10.0, 100.0])
def test_waves_that_the_prior_rules_out_do_no_harm(dtype, turns):
    X = jnp.linspace(-3, 3, 40, dtype=dtype)[:, None]
    for kernel in (gpt.RBF(), gpt.RBF() + gpt.Matern12(), gpt.Constant(), gpt.Periodic()):
        inducing = Wavelet(np.linspace(-3, 3, 8)[:, None], 0.5, turns / 0.5)
        got = explained(*gpt.cast((inducing, kernel), dtype), X)
        assert got.dtype == dtype and np.isfinite(got).all()
        assert (got < kernel.diag(X.astype("float64")) + 1e-3).all()


def test_a_small_variance_is_heard():
    X = jnp.linspace(0, 8, 50)[:, None]
    inducing = Wavelet(np.linspace(0, 8, 12)[:, None], 0.1, 100.0)
    assert covariances(inducing, gpt.RBF(), X)[0].max() < 1e-40
    assert explained(inducing, gpt.RBF(), X).mean() > 0.9


@pytest.mark.parametrize("make", [InducingPoints, GaussianWindow, lambda Z: Wavelet(Z, 0.3, 2.0)])
def test_float32_is_close_to_float64(make):
    Z, X = rng.normal(size=(6, 2)), rng.normal(size=(20, 2))
    for kernel in (gpt.RBF([0.7, 0.9]), gpt.Matern32() + gpt.White(0.1)):
        double = covariances(make(Z), kernel, jnp.asarray(X))
        single = covariances(*gpt.cast((make(Z), kernel), "float32"), jnp.asarray(X, "float32"))
        assert all(a.dtype == "float32" and np.allclose(a, b, atol=3e-6) for a, b in zip(single, double))


def q(P=()):
    "Ingredients of a conditional: factor, covariances, and a q(v) for each latent function."
    M, S = 5, 7
    inducing, kernel = unwrap(GaussianWindow(rng.normal(size=(M, 2)), 0.3)), unwrap(gpt.RBF(0.9, 1.3))
    X = jnp.asarray(rng.normal(size=(S, 2)))
    m, R = rng.normal(size=(M, *P)), np.tril(rng.normal(size=(*P, M, M)))
    return inducing, kernel, X, factor(inducing, kernel), m, R


@pytest.mark.parametrize("P", [(), (3,)])
@pytest.mark.parametrize("whiten", [True, False])
def test_conditional_equals_the_joint_gaussian(P, whiten):
    inducing, kernel, X, L, m, R = q(P)
    Kuu, Kuf = covariances(inducing, kernel, X)
    K = np.asarray(matrix(kernel, X))
    mean, var = (np.asarray(a) for a in jax.jit(conditional, static_argnums=5)(L, Kuf, np.diag(K), m, R, whiten))
    cov = np.asarray(jax.jit(conditional_covariance, static_argnums=5)(L, Kuf, Kuf, K, R, whiten))
    assert mean.shape == var.shape == (7, *P) and cov.shape == (*P, 7, 7)
    Kuu, Kuf = np.asarray(Kuu), np.asarray(Kuf)
    B = np.linalg.solve(Kuu, Kuf).T
    to_u = np.asarray(L) if whiten else np.eye(5)
    for p in np.ndindex(*P):
        mu, S = to_u @ m[(slice(None), *p)], to_u @ R[p] @ R[p].T @ to_u.T
        want = K - B @ Kuf + B @ S @ B.T
        assert np.allclose(mean[(slice(None), *p)], B @ mu, atol=1e-9)
        assert np.allclose(cov[p], want, atol=1e-9) and np.allclose(var[(slice(None), *p)], np.diag(want), atol=1e-9)


@pytest.mark.parametrize("P", [(), (3,)])
@pytest.mark.parametrize("shared", [True, False])
def test_the_posterior_answers_in_the_right_shapes(P, shared):
    inducing, kernel, X, L, m, R = q(P)
    R = R[0] if P and shared else R
    post = InducingPosterior(unwrap(gpt.GP(kernel, gpt.Gaussian(0.1), gpt.ConstantMean(2.0))), inducing, L, m, R)
    mean, var = post.marginals(X)
    cov = post.covariance(X)
    assert mean.shape == var.shape == (7, *P) and cov.shape == (*P, 7, 7) and post.num_dims == 2
    assert np.allclose(np.diagonal(cov, axis1=-2, axis2=-1).T, var, atol=1e-12)
    assert np.allclose(post.covariance(X, X[:3]), cov[..., :3], atol=1e-12)
    assert post.sample(jax.random.key(0), X, 4).shape == (4, 7, *P)
    assert np.allclose(post.inducing_mean, L @ m)
    S = L @ R @ np.swapaxes(R, -1, -2) @ L.T
    assert np.allclose(post.inducing_covariance, S)
    single = InducingPosterior(post.model, inducing, L, m if not P else m[:, 1], R if R.ndim == 2 else R[1])
    assert np.allclose(single.marginals(X)[0], mean if not P else mean[:, 1])
    assert np.allclose(single.covariance(X), cov if not P else cov[1])


def test_all_data_as_inducing_points_is_exact_regression():
    X, Xs = jnp.asarray(rng.uniform(0, 6, (15, 1))), jnp.linspace(-1, 7, 9)[:, None]
    y = jnp.sin(X[:, 0])
    exact = gpt.Exact(gpt.GP(gpt.Matern32(), gpt.Gaussian(0.1), gpt.LinearMean([0.3], 1.0))).posterior(X, y)
    at_data = unwrap(InducingPoints(X))
    L = inducing_factor(at_data, exact.model.kernel).L
    centred, R = exact.mean(X) - exact.model.mean(X), np.linalg.cholesky(exact.covariance(X))
    same = InducingPosterior(exact.model, at_data, L, solve_lower(L, centred), solve_lower(L, R))
    assert np.allclose(same.mean(Xs), exact.mean(Xs), atol=1e-9)
    assert np.allclose(same.covariance(Xs), exact.covariance(Xs), atol=1e-9)


def test_parameters_pass_through_and_move():
    Z = rng.normal(size=(4, 2))
    inducing = Wavelet(gpt.freeze(gpt.free(Z)), gpt.positive(0.3), gpt.freeze(gpt.free(2.0)))
    assert len(inducing) == 4 and inducing.num_dims == 2
    moving = jax.tree.leaves(gpt.partition(inducing)[0])
    assert len(moving) == 1 and moving[0].shape == ()
    assert np.allclose(unwrap(inducing).Z, Z) and np.allclose(unwrap(inducing).width, 0.3)
    single = GaussianWindow(jnp.asarray(Z, "float32"), 0.5)
    assert unwrap(single).width.dtype == "float32"


Z4 = np.linspace(0, 1, 4)[:, None]


@pytest.mark.parametrize("make, says", [
    (lambda: InducingPoints(Z4[:, 0]), r"Z must have shape \(N, D\)"),
    (lambda: InducingPoints(np.zeros((0, 2))), "Z must have at least one row"),
    (lambda: GaussianWindow(np.where(Z4 > 0.5, np.nan, Z4)), "Z must be finite"),
    (lambda: Wavelet([["a"]]), "Z must be"),
    (lambda: GaussianWindow(Z4, -1.0), "width must be positive"),
    (lambda: GaussianWindow(Z4, np.nan), "width must be positive"),
    (lambda: GaussianWindow(Z4, np.ones(4)), "width must be one number"),
    (lambda: GaussianWindow(Z4, gpt.positive(np.ones((4, 2)))), "width must be one number"),
    (lambda: Wavelet(Z4, 1.0, np.ones((2, 1))), "frequency must be one number"),
    (lambda: Wavelet(Z4, 1.0, np.inf), "frequency must be real and finite"),
    (lambda: GaussianWindow(Z4, points=0), "points"),
    (lambda: GaussianWindow(Z4, points=2.5), "points"),
    (lambda: unwrap(GaussianWindow(np.zeros((2, 3)))).covariance(unwrap(gpt.Matern32())), "points must be at most 10"),
    (lambda: unwrap(GaussianWindow(Z4)).covariance(unwrap(gpt.RBF(active_dims=[1]))), "active_dims"),
    (lambda: unwrap(GaussianWindow(Z4)).covariance(unwrap(gpt.RBF([1.0, 2.0]))), "lengthscale must be one number"),
    (lambda: unwrap(GaussianWindow(Z4, 1.0)).cross_covariance(unwrap(gpt.Wiener()), jnp.asarray(Z4)), "Wiener needs inputs"),
])
def test_mistakes_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_points_of_a_table_are_those_of_its_numbers():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame({"a": [0.5, 1.5], "b": [True, False], "c": pd.array([1, 2], dtype="Int64")})
    assert np.array_equal(InducingPoints(table).Z.value, [[0.5, 1, 1], [1.5, 0, 2]])


OUTPUTS = gpt.RBF(active_dims=[0]) * gpt.Coregion(2, active_dims=[1])
MAKERS = [gpt.VFE, gpt.DTC, gpt.SVGP, gpt.SGPMC, gpt.GFITC, gpt.PowerEP, gpt.SparseMeanField, gpt.ApproximatePowerEP,
          lambda model, points: gpt.SVGP(model, [points, points], 2)]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_kernel_refuses_points_that_it_cannot_take(make):
    noise = gpt.Bernoulli() if make is gpt.SparseMeanField else gpt.Gaussian()
    for kernel, Z, says in ((OUTPUTS, [[1.0, 0.0], [2.0, 0.4]], "the numbers of the outputs, 0 to 1, got 0.4"),
                            (OUTPUTS, [[1.0, 2.0], [2.0, 0.0]], "the numbers of the outputs, 0 to 1, got 2.0"),
                            (gpt.Wiener(active_dims=[0]), [[1.0, 0.0], [-2.0, 0.0]], "inputs that are at least 0, got -2.0")):
        make(gpt.GP(kernel, noise), InducingPoints(np.abs(np.round(Z)) % 2))
        with pytest.raises(ValueError, match=says):
            make(gpt.GP(kernel, noise), InducingPoints(np.array(Z)))


def test_only_the_kernel_s_own_columns_count_towards_the_nodes():
    inducing = unwrap(GaussianWindow(rng.normal(size=(2, 5)), 0.4, points=20))
    assert jax.eval_shape(inducing.covariance, unwrap(gpt.Matern32(active_dims=[3]))).shape == (2, 2)


def test_inducing_variables_are_abstract():
    with pytest.raises(TypeError):
        InducingVariables()


def test_windows_without_columns_left_out_are_themselves():
    windows = Windows(jnp.asarray(Z4), jnp.ones((1, 1)), None, jnp.zeros(1))
    assert windows.active(gpt.RBF()) is windows
    assert window_covariance(unwrap(gpt.White()), windows, jnp.asarray(Z4[:2]), 5).shape == (4, 2)
