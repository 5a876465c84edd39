"Products: each form that saves work against the plain one, in value and in derivatives to second order by every combination of modes."
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

from gp_thesis import products
from gp_thesis.linalg import cholesky, inverse_lower, solve_lower
from gp_thesis.products import (at_optimum, chunk_rows, gram, in_motion, in_one_chunk, log_normaliser, over_rows, project,
                                projected_gram, quadratic_forms, rows_at_once, solution, solve, squares, training_marginals,
                                unexplained, wait_for, with_inverse)

rng = np.random.default_rng(0)
M, N = 3, 4
normal = lambda *shape: rng.normal(size=shape)
L = np.eye(M) + 0.3 * normal(M, M)
Kuf, m, R = 0.5 * normal(M, N), normal(M), normal(M, M)


def same_to_second_order(ours, plain, *args):
    """Values, gradients and second derivatives in each order of modes of `ours`, against autodiff of `plain`: one program.

    The second derivatives are the Hessian times a direction that moves all arguments."""
    direction = np.random.default_rng(1).normal(size=sum(np.size(arg) for arg in jax.tree.leaves(args)))

    @jax.jit
    def everything(args):
        flat, unravel = ravel_pytree(args)
        outputs = lambda function: ravel_pytree(function(*unravel(flat)))[0]

        def scalar(function):  # bent, so that second derivatives of every output count
            def at(flat):
                outputs = ravel_pytree(function(*unravel(flat)))[0]
                return jnp.sum(jnp.sin(outputs + jnp.arange(len(outputs))))
            return at

        mine, other = scalar(ours), scalar(plain)
        along = lambda derivative, flat: jax.jvp(derivative, (flat,), (direction,))
        reverse, forward_over_reverse = along(jax.grad(mine), flat)
        forward, forward_over_forward = along(jax.jacfwd(mine), flat)
        reverse_over_reverse = jax.grad(lambda flat: direction @ jax.grad(mine)(flat))(flat)
        reverse_over_forward = jax.grad(lambda flat: along(mine, flat)[1])(flat)
        second = [forward_over_reverse, reverse_over_reverse, reverse_over_forward, forward_over_forward]
        return (outputs(ours), reverse, forward, second), (outputs(plain), *along(jax.grad(other), flat))

    (value, reverse, forward, second), (known, gradient, curvature) = jax.tree.map(np.asarray, everything(args))
    assert np.abs(gradient).max() > 0.01 and np.abs(curvature).max() > 0.01  # there is something to be right about
    assert np.allclose(value, known, rtol=1e-11, atol=1e-11)
    for mine, theirs in [(reverse, gradient), (forward, gradient), *((h, curvature) for h in second)]:
        assert np.allclose(mine, theirs, rtol=1e-8, atol=1e-9 * np.abs(theirs).max())


def substitution(L, Kuf):
    return jax.scipy.linalg.solve_triangular(jnp.tril(L), Kuf, lower=True)


def factor(L):
    L = jnp.tril(L)
    return with_inverse(L @ L.T, L)


def plain_project(L, Kuf):
    A = substitution(L, Kuf)
    return A, 9.0 - jnp.sum(A**2, axis=0)


def plain_normaliser(G, b):
    B = jnp.eye(M) + G @ G.T
    return 0.5 * (jnp.sum(b * jnp.linalg.solve(B, b)) - b[0].size * jnp.linalg.slogdet(B)[1])


def plain_forms(L, Kuf, m, R):
    A = substitution(L, Kuf)
    return A.T @ m, jnp.diag(A.T @ (R @ R.T - jnp.eye(M)) @ A)


def plain_marginals(L, Kuf, variances, m, R):
    A, columns = substitution(L, Kuf), m.reshape(M, -1)
    S = jnp.einsum("...ij,...kj->...ik", R, R).reshape(-1, M, M)
    variance = variances + jnp.einsum("in,pij,jn->pn", A, S - jnp.eye(M), A)
    return (A.T @ columns).reshape(N, *m.shape[1:]), variance.T.reshape(N, *m.shape[1:])


CASES = {
    "project": (lambda L, K: tuple(project(jnp.tril(L), K, jnp.full(N, 9.0))), plain_project, L, Kuf),
    "with_inverse": (factor, lambda L: (jnp.tril(L) @ jnp.tril(L).T, jnp.tril(L), substitution(L, jnp.eye(M))), L),
    "solve": (lambda L, K: solve(factor(L), K), substitution, L, Kuf),
    "solve, a product alone": (lambda L, K: solve(factor(L), K, False), substitution, L, Kuf),
    "gram": (gram, lambda A: A @ A.T, Kuf),
    "log_normaliser": (lambda G, b: log_normaliser(G @ G.T, b), plain_normaliser, R, m),
    "log_normaliser, columns": (lambda G, b: log_normaliser(G @ G.T, b), plain_normaliser, R, normal(M, 2)),
    "quadratic_forms": (lambda L, *rest: quadratic_forms(factor(L), *rest), plain_forms, L, Kuf, m, R),
    "training_marginals": (lambda L, *rest: training_marginals(factor(L), *rest), plain_marginals,
                           L, Kuf, np.full(N, 9.0), m, R),
    "training_marginals, columns": (lambda L, K, v, m, R: training_marginals(factor(L), K, v, m, jnp.tril(R)),
                                    lambda L, K, v, m, R: plain_marginals(L, K, v, m, jnp.tril(R)),
                                    L, Kuf, np.full(N, 9.0), normal(M, 2), normal(2, M, M)),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_plain_form_to_second_order(case):
    same_to_second_order(*CASES[case])


@pytest.mark.parametrize("panel", [2, 3, 100])
def test_squares_leave_out_nothing_but_zeros(panel, monkeypatch):
    monkeypatch.setattr(products, "PANEL", panel)
    same_to_second_order(lambda R, A: squares(jnp.tril(R), A), lambda R, A: jnp.sum((jnp.tril(R).mT @ A) ** 2, axis=1),
                         normal(2, 5, 5), normal(5, 2))


def test_variances_are_cut_off_where_rounding_makes_them_negative():
    A = np.array([[1.0, 2.0], [0.0, 0.5]])
    assert np.array_equal(jax.jit(unexplained)(np.array([1.0 - 1e-9, 5.0]), A), [0.0, 0.75])
    still = np.zeros((2, 2))                             # a point mass for q, and inducing values that tell all
    marginals = jax.jit(lambda L, *rest: training_marginals(factor(L), *rest))
    var = np.asarray(marginals(np.eye(2), A, np.sum(A**2, axis=0), np.ones(2), still)[1])
    assert (var > 0).all() and (var < 1e-14).all()


def test_a_correction_mends_a_product_with_the_inverse_of_a_nearly_singular_triangle():
    x = np.linspace(0, 5, 40)[:, None]
    K = lambda a, b: np.exp(-0.5 * ((a - b.T) / 0.7) ** 2)
    triangle, right = np.linalg.cholesky(K(x, x) + 1e-12 * np.eye(40)), K(x, x[:20] + 0.05)
    both = jax.jit(lambda triangle, right: [solve(factor(triangle), right, corrected) for corrected in (False, True)])
    product, corrected = (np.abs(triangle @ np.asarray(A) - right).max() for A in both(triangle, right))
    assert corrected < 1e-13 < 1e-12 < product


def sums(L, X, r, corrected, at_rest):
    "C = A Aᵀ and b = A r over rows in chunks, where K_uf is nonlinear in the rows."
    of_rows = lambda X, r: projected_gram(factor(L), jnp.cos(X.T), r, corrected, at_rest)
    found = over_rows(of_rows, chunk_rows(M), (X, r), again=not at_rest)
    return in_motion(factor(L), *found) if at_rest else found


def plain_sums(L, X, r):
    A = substitution(L, jnp.cos(X.T))
    return A @ A.T, A @ r


@pytest.mark.parametrize("at_rest", [False, True])
@pytest.mark.parametrize("chunk, corrected", [(2**19, True), (2 * M, False), (2 * M, True)])
def test_projected_sums_are_the_plain_ones_in_one_chunk_and_in_several(chunk, corrected, at_rest, monkeypatch):
    monkeypatch.setattr(products, "TALL", 0)
    monkeypatch.setattr(products, "CHUNK", chunk)
    assert in_one_chunk(5, M) == (chunk > 5 * M)
    columns = normal(5) if corrected else normal(5, 2)
    same_to_second_order(lambda *args: sums(*args, corrected, at_rest), plain_sums, L, normal(5, M), columns)


def in_a_loop(function):
    "JAX drops the rules of `custom_jvp` from a part of a loop that it takes the gradient of."
    scaled = lambda args, c: jax.tree.map(lambda a: c * a, args)
    return lambda *args: lax.map(lambda c: function(*scaled(args, c)), jnp.array([1.0, 1.1]))


@pytest.mark.parametrize("at_rest", [False, True])
def test_projected_sums_keep_their_derivatives_within_a_loop(at_rest):
    ours = lambda *args: sums(*args, False, at_rest)
    same_to_second_order(in_a_loop(ours), in_a_loop(plain_sums), L, normal(5, M), normal(5))


K, B = L @ L.T, normal(M, 2)
symmetric = lambda K: (K + K.T) / 2
FACTORS = {"cholesky": (lambda K: cholesky(symmetric(K)), lambda K: jnp.linalg.cholesky(symmetric(K)), K),
           "inverse": (lambda L: inverse_lower(jnp.tril(L)), lambda L: jnp.linalg.inv(jnp.tril(L)), L),
           "solve": (solve_lower, substitution, L, B),
           "batch": (jax.vmap(lambda K: cholesky(symmetric(K))), lambda K: jnp.linalg.cholesky((K + K.mT) / 2), np.stack([K, 2 * K]))}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_and_solves_keep_their_derivatives_within_a_loop(name):
    ours, plain, *args = FACTORS[name]
    same_to_second_order(in_a_loop(ours), in_a_loop(plain), *args)


@pytest.mark.parametrize("rows", [4, 7])
def test_chunks_of_rows_change_neither_value_nor_derivatives(rows, monkeypatch):
    def plain(theta, X, y):  # a tree of results, one of which counts rows
        rows = jnp.asarray(float(len(X)))
        return {"a": jnp.sum(jnp.tanh(X @ theta - y) ** 2), "b": (X.T @ jnp.sin(y * theta[0]), rows)}

    def ours(theta, X, y):
        return over_rows(lambda X, y: plain(theta, X, y), chunk_rows(M), (X, y))

    monkeypatch.setattr(products, "TALL", 0)
    monkeypatch.setattr(products, "CHUNK", 2 * M)  # 4 rows: two chunks; 7: three and a rest
    same_to_second_order(ours, plain, m, normal(rows, M), normal(rows))


def test_no_more_than_a_chunk_of_rows_is_worked_on_at_once():
    seen = []

    def of_rows(X):
        seen.append(len(X))
        return jnp.sum(X)

    assert float(jax.jit(lambda X: over_rows(of_rows, 10, (X,)))(np.ones((94, 2)))) == 188
    assert max(seen) == 10 and min(seen) == 4


def test_what_waits_is_itself_once_the_first_is_there():
    X = jnp.arange(6.0).reshape(3, 2)
    assert np.array_equal(wait_for(jnp.array(2.0), X), X) and np.all(np.isnan(wait_for(jnp.array(jnp.nan), X)))
    slope = jax.grad(lambda first, X: jnp.sum(wait_for(first, X) ** 2), (0, 1))(jnp.array(2.0), X)
    assert slope[0] == 0 and np.array_equal(slope[1], 2 * X)


def test_a_chunk_is_never_short_beside_the_matrix_of_inducing_variables():
    assert chunk_rows(100) == 2**19 // 100 and chunk_rows(1000) == 8000 and chunk_rows(10**6) == 8 * 10**6
    assert rows_at_once(100) == 2**19 // 100 and rows_at_once(10**6) == 1
    assert in_one_chunk(8000, 1000) and not in_one_chunk(8001, 1000)


WEIGHTS = 0.4 * np.array([[0.6, -0.8], [0.5, 0.7]])


def residual(s, theta):
    return jnp.tanh(theta["gain"] * WEIGHTS @ s + theta["shift"]) - s


def fixed_point(theta):
    return lax.scan(lambda s, _: (s + residual(s, theta), None), jnp.zeros(2), length=60)[0]


THETA = {"gain": np.array(0.9), "shift": np.array([0.3, -0.7])}


def test_a_solution_has_the_derivatives_of_the_loop_that_finds_it():
    ours = lambda theta: solution(fixed_point(lax.stop_gradient(theta)), theta, residual=residual)
    same_to_second_order(ours, fixed_point, THETA)
    assert np.array_equal(solution(np.ones(2), THETA, residual=residual), np.ones(2))  # NumPy's are arrays, too
    same_to_second_order(in_a_loop(ours), in_a_loop(fixed_point), THETA)


def energy(s, theta):
    return 0.5 * s @ s + theta["gain"] * jnp.sum(jnp.cos(WEIGHTS @ s)) + jnp.sum(jnp.sin(theta["shift"] * s))


def descend(theta):
    return lax.scan(lambda s, _: (s - 0.5 * jax.grad(energy)(s, theta), None), jnp.zeros(2), length=100)[0]


def test_a_value_at_an_optimum_has_the_derivatives_of_the_whole_loop():
    assert np.abs(jax.jit(lambda theta: jax.grad(energy)(descend(theta), theta))(THETA)).max() < 1e-14

    def find(theta):
        return solution(descend(lax.stop_gradient(theta)), theta, residual=jax.grad(energy))

    ours = lambda theta: at_optimum(theta, function=energy, find=find)
    plain = lambda theta: energy(descend(theta), theta)
    same_to_second_order(ours, plain, THETA)
    same_to_second_order(in_a_loop(ours), in_a_loop(plain), THETA)


def test_a_first_derivative_at_an_optimum_does_not_go_through_the_loop():
    def find(theta):  # a loop without a derivative in reverse
        return lax.while_loop(lambda s: jnp.abs(jax.grad(energy)(s, theta)).max() > 1e-15 * 10,
                              lambda s: s - 0.5 * jax.grad(energy)(s, theta), jnp.zeros(2))

    ours = jax.jit(jax.grad(lambda theta: at_optimum(theta, function=energy, find=find)))(THETA)
    known = jax.jit(jax.grad(lambda theta: energy(descend(theta), theta)))(THETA)
    assert all(np.allclose(ours[name], known[name], rtol=1e-10) for name in THETA)
