"Linear algebra: the safe Cholesky, inverses by blocks, the log density and its derivatives, low rank, reverse mode."
import os
import re
import subprocess
import sys
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.flatten_util import ravel_pytree
from threadpoolctl import threadpool_info, threadpool_limits

from gp_thesis import linalg
from gp_thesis.linalg import (JITTER, add_diagonal, cholesky, cholesky_reverse_blocked, cholesky_reverse_unblocked,
                              fails_with_nan, inverse_lower, inverses, log_density, nan_on_failure,
                              kept_memory, log_determinant, low_rank_log_determinant, one_blas_thread, solve_lower, solve_upper, times,
                              transpose_times, woodbury_solve)

rng = np.random.default_rng(0)


def spd(n, floor=0.3, dtype=float):
    A = rng.normal(size=(n, n))
    return (A @ A.T / n + floor * np.eye(n)).astype(dtype)


def symmetric(K):
    return 0.5 * (K + K.T)


compiled_cholesky, compiled_log_density = eqx.filter_jit(cholesky), jax.jit(log_density)


def check_derivatives(function, *arguments, order=2):
    "First and second derivatives along two directions, in both modes, against central differences: one program."
    size, step = sum(np.size(argument) for argument in arguments), 1e-4
    directions = rng.normal(size=(2, size)) / np.sqrt(size)
    shifts = step * np.concatenate([np.zeros((1, size)), directions, -directions])

    @jax.jit
    def everything(arguments):
        flat, unravel = ravel_pytree(arguments)
        scalar = lambda flat: function(*unravel(flat))
        values, slopes = jax.lax.map(jax.value_and_grad(scalar), flat + shifts)
        found = {"reverse": directions @ slopes[0],
                 "forward": jax.lax.map(lambda d: jax.jvp(scalar, (flat,), (d,))[1], directions)}
        along = {"forward over reverse": jax.lax.map(lambda d: jax.jvp(jax.grad(scalar), (flat,), (d,))[1], directions),
                 "reverse over reverse": jax.lax.map(lambda d: jax.grad(lambda v: jax.grad(scalar)(v) @ d)(flat), directions),
                 } if order == 2 else {}
        return values[1:], slopes[1:], found, along

    values, slopes, found, along = jax.tree.map(np.asarray, everything(arguments))
    for mode, ours in found.items():
        assert np.allclose(ours, (values[:2] - values[2:]) / (2 * step), rtol=1e-5, atol=1e-6), mode
    differences = (slopes[:2] - slopes[2:]) / (2 * step)
    for mode, ours in along.items():
        assert np.allclose(ours, differences, rtol=1e-5, atol=1e-6 * max(1, np.abs(differences).max())), mode


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-13), ("float32", 1e-5)])
def test_cholesky_adds_no_jitter_where_none_is_needed(dtype, tolerance):
    K = spd(40, dtype=dtype)
    L = cholesky(K)
    assert L.dtype == dtype
    assert np.allclose(L, np.linalg.cholesky(np.asarray(K, float)), atol=tolerance)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_jitter_is_relative_and_small(dtype, scale):
    x = np.linspace(0, 1, 200, dtype=dtype)
    K = np.asarray(scale, dtype) * np.exp(-0.5 * (x[:, None] - x) ** 2)
    L = np.asarray(compiled_cholesky(K), float)
    assert np.isfinite(L).all()
    assert np.abs(L @ L.T - np.asarray(K, float)).max() <= 1.1 * scale * JITTER[dtype][-1]


@pytest.mark.parametrize("broken", [-np.eye(3), np.full((3, 3), np.nan), np.diag([1.0, np.inf, 1.0]),
                                    np.array([[1.0, 2, 0], [2, 1, 0], [0, 0, 1]])])
def test_hopeless_matrices_raise_with_their_name(broken):
    with pytest.raises(Exception, match=r"K_uu of size \d x \d \(float64\) is not positive definite"):
        jax.block_until_ready(compiled_cholesky(broken, "K_uu"))


@pytest.mark.parametrize("n, rows", [(4, range(4)), (40, (0, 17, 39)), (linalg.WHOLE + 200, (0, 500, linalg.WHOLE + 199))])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_one_bad_number_anywhere_is_a_failure(n, rows, dtype):
    K, programs = spd(n, dtype=dtype), jax.jit(lambda K: linalg.cholesky_or_nan(K, jnp.zeros((), K.dtype)))
    assert np.isfinite(np.diag(programs(K))).all() and not linalg._has_failed(programs(K))
    for i in rows:
        for j in {i, 0, i // 2}:
            for bad in (np.nan, np.inf, -np.inf, -100.0 if i == j else 100.0):
                broken = K.copy()
                broken[i, j] = broken[j, i] = bad
                if i == j or not np.isfinite(bad) or np.linalg.eigvalsh(broken)[0] < -1:
                    assert linalg._has_failed(programs(broken)), (i, j, bad)


def test_the_diagonal_and_its_derivatives():
    A = rng.normal(size=(5, 5))
    assert (linalg.diagonal_of(A) == np.diag(A)).all() and linalg.diagonal_of(jnp.zeros((0, 0))).shape == (0,)
    assert (jax.vmap(linalg.diagonal_of)(jnp.stack([A, 2 * A])) == np.stack([np.diag(A), 2 * np.diag(A)])).all()
    check_derivatives(lambda A: jnp.sum(jnp.sin(linalg.diagonal_of(A))), A)


def test_failure_inside_a_gradient_raises_too():
    with pytest.raises(Exception, match="my matrix of size 3 x 3"):
        jax.block_until_ready(eqx.filter_jit(jax.grad(lambda K: log_density(jnp.ones(3), 0.0, K, "my matrix")))(-np.eye(3)))


def test_cholesky_derivatives():
    check_derivatives(lambda K: jnp.sum(jnp.sin(cholesky(symmetric(K)))), spd(6))


def test_cholesky_under_vmap_mixes_good_and_singular():
    K = np.stack([spd(4), np.ones((4, 4))])
    L = np.asarray(jax.vmap(cholesky)(K))
    assert np.allclose(L[0], compiled_cholesky(K[0])) and np.allclose(L[1], compiled_cholesky(K[1]))


@pytest.mark.parametrize("n", [1, 5, 125, 126, 501])
def test_inverses(n):
    K = spd(n)
    L_inv, K_inv, diagonal = inverses(np.linalg.cholesky(K))
    assert np.allclose(diagonal, np.diag(np.linalg.inv(K)), atol=1e-10)
    assert np.allclose(L_inv, np.linalg.inv(np.linalg.cholesky(K)), atol=1e-10)
    assert np.allclose(K_inv, np.linalg.inv(K), atol=1e-10)


@pytest.mark.parametrize("n", [39, 259])
def test_large_matrices_go_block_by_block(n, monkeypatch):
    monkeypatch.setattr(linalg, "WHOLE", 10)                    # four blocks for the smaller matrix, eight for the larger
    K = spd(n)
    L = np.linalg.cholesky(K)
    assert np.allclose(jax.jit(linalg.factor_or_nan)(K), L, rtol=0, atol=1e-13)
    assert np.allclose(jax.jit(linalg.factor_or_nan)(np.triu(K) + np.tril(np.full_like(K, np.nan), -1)), L, rtol=0, atol=1e-13)
    assert np.isnan(jax.jit(linalg.factor_or_nan)(K - 3 * np.diag(np.arange(n) == n - 1))).any()
    assert np.allclose(inverses(L)[0], np.linalg.inv(L), atol=1e-10) and np.allclose(inverses(L)[1], np.linalg.inv(K), atol=1e-10)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_products_with_a_triangle_leave_out_nothing_but_zeros(n, monkeypatch):
    monkeypatch.setattr(linalg, "WHOLE", 0)                     # however small
    L, B = np.tril(rng.normal(size=(n, n))), rng.normal(size=(n, 3))
    half = np.where((np.arange(n)[:, None] < n // 2) & (np.arange(n) >= n // 2), np.nan, L)    # which is not looked at
    assert np.allclose(linalg.lower_times(half, B), L @ B) and np.allclose(linalg.times_lower(B.T, half), B.T @ L)
    monkeypatch.undo()
    assert np.allclose(linalg.lower_times(L, B), L @ B, rtol=1e-15)


@pytest.mark.parametrize("function", [cholesky, inverse_lower, lambda L: solve_lower(L, L), lambda L: solve_upper(L, L)],
                         ids=["cholesky", "inverse_lower", "solve_lower", "solve_upper"])
def test_lapack_never_works_on_a_batch(function):                               # two batches at a time can wait for ever
    K = np.stack([spd(9), spd(9)])[:, None].repeat(3, axis=1)
    twice = jax.jit(jax.vmap(jax.vmap(function)))
    calls = re.findall(r"= \(?f64\[([\d,]*)\].*custom-call\(.*lapack_", twice.lower(K).compile().as_text())
    assert calls and all(shape in ("9,9", "1,9,9") for shape in calls)
    assert np.allclose(twice(K), [[function(k) for k in row] for row in K], atol=1e-12)


@pytest.mark.parametrize("solve", [solve_lower, solve_upper])
def test_solves_to_second_order_in_a_batch_and_for_a_vector(solve):
    L, B = np.linalg.cholesky(spd(4)), rng.normal(size=(4, 2))
    check_derivatives(lambda L, B: jnp.sum(jnp.sin(solve(jnp.tril(L), B))), L, B)
    both = jax.jit(jax.vmap(jax.grad(lambda L, b: jnp.sum(solve(L, b) ** 2)), (None, 1)))(L, B)
    assert np.allclose(both[1], jax.grad(lambda L: jnp.sum(solve(L, B[:, 1]) ** 2))(L))


def test_times_is_a_product_to_second_order_under_vmap_and_where_one_factor_stands_still():
    A, B = rng.normal(size=(3, 4)), rng.normal(size=(4, 2))
    check_derivatives(lambda A, B: jnp.sum(jnp.sin(times(A, B))), A, B)
    check_derivatives(lambda B: jnp.sum(jnp.sin(times(A, B))), B)
    check_derivatives(lambda A: jnp.sum(jnp.sin(times(A, B))), A)
    assert np.allclose(jax.jit(jax.vmap(times, (0, None)))(np.stack([A, 2 * A]), B), np.stack([A @ B, 2 * A @ B]))


def test_blas_has_one_thread_within_the_context_and_as_many_as_before_after_it():
    threads = lambda: [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    with threadpool_limits(2, user_api="blas"):
        before = threads()
        with pytest.raises(ZeroDivisionError), one_blas_thread():
            assert before and set(threads()) == {1}
            1 / 0
        assert threads() == before


PAGES = """if True:
    import resource, sys, time, jax, jax.numpy as jnp
    from gp_thesis.linalg import _glibc, kept_memory, log_density, nan_on_failure, quick_jit
    pages_of = "/sys/kernel/mm/transparent_hugepage/enabled"
    if not _glibc() or "[always]" in open(pages_of).read():
        print("none"); raise SystemExit
    def value(K):
        with nan_on_failure():  # as in a fit, so that nothing else calls back
            return log_density(jnp.ones(3000), 0.0, K)
    slope = {"jax": jax.jit(jax.grad(lambda K: log_density(jnp.ones(3000), 0.0, K))),
             "quick": quick_jit(jax.value_and_grad(value))}[sys.argv[1]]
    K = 2 * jnp.eye(3000)
    def pages():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        jax.block_until_ready(slope(K))
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    def resident():
        time.sleep(0.5)  # another thread may still give its memory back
        return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
    pages()
    before, size = pages(), resident()
    with kept_memory():
        pages()
        with kept_memory():
            pages()
        within, largest = min(pages() for _ in range(5)), resident()  # each thread has its own
    print(before, within, pages(), largest - resident(), resident() - size)"""


@pytest.mark.parametrize("kind", ["jax", "quick"])
def test_large_pieces_of_memory_are_asked_for_once_within_the_context_and_given_back(kind):
    "Pages that the system hands out for each value and slope of a log density, and what the process holds of them."
    others = ("MALLOC", "GLIBC_TUNABLES", "COMPILATION_CACHE", "XLA_FLAGS")  # with them it is not kept, or not everywhere
    clean = {name: value for name, value in os.environ.items() if not any(other in name for other in others)}
    run = subprocess.run([sys.executable, "-c", PAGES, kind], env=clean, capture_output=True, text=True, check=True)
    if run.stdout.strip() == "none":
        pytest.skip("not GNU's C library, or pages so large that they are few")
    before, within, after, given_back, left = map(float, run.stdout.split())
    assert before > 1000 and within < 100 and after > 1000, run.stdout
    assert given_back > 50 > left, run.stdout


def test_a_cache_on_disk_gets_the_program_of_a_fit(tmp_path):
    "It takes none that may call back to Python, as they do elsewhere to have their memory kept."
    code = """if True:
        import sys, jax, jax.numpy as jnp
        jax.config.update("jax_compilation_cache_dir", sys.argv[1])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        from gp_thesis.linalg import kept_memory, quick_jit
        def step(x):
            return jnp.sum(x**2)
        with kept_memory():
            assert quick_jit(step)(jnp.arange(3.0)) == 5.0"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert any(file.name.startswith("jit_step-") for file in tmp_path.iterdir())


def test_a_program_that_runs_in_its_callers_thread_returns_what_another_does(monkeypatch):
    "Whatever it returns and for any shape: numbers, none at all, whole numbers, keys, nothing to compute with."
    monkeypatch.setattr(linalg, "LARGE", 0)
    monkeypatch.setattr(linalg, "_runs_here", linalg._kept.entered)  # also on several devices and with a cache
    here, run_here = [], linalg._run_here
    monkeypatch.setattr(linalg, "_run_here", lambda function: here.append(function) or run_here(function))
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    call = linalg.quick_jit(lambda tree: jax.tree.map(lambda x: jax.random.split(x) if is_key(x) else 2 * x, tree))

    trees = ({"a": jnp.arange(3.0), "b": jnp.array(jnp.nan)}, [jnp.arange(3)], [jnp.arange(4)], (), jax.random.key(0), jnp.zeros((0, 2)))
    before = [call(tree) for tree in trees]
    assert not here
    with kept_memory():
        within = [call(tree) for tree in trees]
    assert len(here) == len(trees)
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(within), strict=True):
        one, other = (jax.random.key_data(x) if is_key(x) else x for x in (one, other))
        np.testing.assert_array_equal(one, other)


def test_a_program_that_runs_in_its_callers_thread_is_one_for_each_of_jaxs_contexts(monkeypatch):
    "Where failures are NaN and where they are errors, for one; each is traced once."
    monkeypatch.setattr(linalg, "LARGE", 0)
    monkeypatch.setattr(linalg, "_runs_here", linalg._kept.entered)
    K, traced = -jnp.eye(3), []
    factor = linalg.quick_jit(lambda K: traced.append(1) or linalg.cholesky(K))
    with kept_memory():
        with linalg.nan_on_failure():
            assert all(np.isnan(factor(K)[-1, -1]) for _ in range(2)) and len(traced) == 1
        with pytest.raises(eqx.EquinoxRuntimeError, match="not positive definite"):
            factor(K)
        with linalg.nan_on_failure():
            assert np.isnan(factor(K)[-1, -1])


def test_the_largest_array_of_a_program_is_found_within_its_parts():
    square = jax.jit(lambda x: jnp.outer(x, x))
    for function in (square, lambda x: jax.lax.map(lambda _: square(x).sum(), x), jax.checkpoint(lambda x: square(x).sum()),
                     lambda x: jax.lax.cond(x[0] > 0, lambda: square(x).sum(), lambda: x[0])):
        assert linalg._largest(jax.make_jaxpr(function)(jnp.ones(100, jnp.float32))) == 40_000
    assert linalg._largest(jax.make_jaxpr(lambda x: x)(jnp.ones(100))) == 0
    split = jax.make_jaxpr(lambda key: jax.random.normal(jax.random.split(key)[0]))(jax.random.key(0))
    assert 0 < linalg._largest(split) < 100


def test_memory_is_left_to_who_has_a_wish_of_their_own(monkeypatch):
    linalg._glibc.cache_clear()
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert linalg._glibc() is None
    with kept_memory():
        pass
    linalg._glibc.cache_clear()


def test_the_last_of_overlapping_threads_gives_blas_its_threads_back():
    threads = lambda: [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    in_first, in_second, out_first, out_second, limits, seen = *(threading.Event() for _ in range(4)), [], []

    def in_a_thread(*functions):
        every = [threading.Thread(target=function) for function in functions]
        [each.start() for each in every] and [each.join() for each in every]

    def first():
        with one_blas_thread():
            in_first.set()
            in_second.wait(60)
        out_first.set()
        out_second.wait(60)                                 # lives on, as those of an executor do

    def second():
        in_first.wait(60)
        with one_blas_thread():
            in_second.set()
            out_first.wait(60)
            seen.append(threads())
        seen.append(threads())
        out_second.set()

    in_a_thread(lambda: limits.append(threadpool_limits(2, user_api="blas")))
    try:
        if not (before := threads()):
            pytest.skip("no library whose threads can be limited")
        in_a_thread(first, second)
        assert set(seen[0]) == {1} and seen[1] == threads() == before
    finally:
        in_a_thread(limits[0].restore_original_limits)


def test_inverse_of_an_ill_conditioned_matrix_is_as_accurate_as_its_condition_number_allows():
    x = np.linspace(0, 5, 400)
    K = np.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-6 * np.eye(400)
    ours, lapack = np.asarray(inverses(np.linalg.cholesky(K))[1]), np.linalg.inv(K)
    assert np.abs(ours - lapack).max() < 10 * np.finfo(float).eps * np.linalg.cond(K) * np.abs(lapack).max()


@pytest.mark.parametrize("n, P", [(1, 1), (7, 3), (150, 2)])
def test_log_density_against_scipy(n, P):
    K, Y, m = spd(n), rng.normal(size=(n, P)), rng.normal(size=n)
    want = sum(scipy.stats.multivariate_normal.logpdf(Y[:, p], m, K) for p in range(P))
    assert np.isclose(compiled_log_density(Y, m, K), want, rtol=1e-11)
    assert np.isclose(compiled_log_density(Y[:, 0], m, K), scipy.stats.multivariate_normal.logpdf(Y[:, 0], m, K), rtol=1e-11)


@pytest.mark.parametrize("n, P", [(1, 1), (6, 2), (140, 1)])
def test_log_density_derivatives(n, P):
    arguments = rng.normal(size=(n, P)), rng.normal(size=n), spd(n, floor=1.0)
    check_derivatives(lambda Y, m, K: log_density(Y, m, symmetric(K)), *arguments, order=1 if n > 10 else 2)


@pytest.mark.parametrize("d", [0.7, np.linspace(0.2, 2.0, 6)])
def test_a_diagonal_given_apart_is_one_added_before(d):
    K, Y, d = spd(6), rng.normal(size=(6, 2)), np.asarray(d)
    whole = K + np.diag(np.broadcast_to(d, 6))
    assert np.allclose(compiled_cholesky(K, diagonal=d), np.linalg.cholesky(whole), atol=1e-13)
    assert np.isclose(compiled_log_density(Y, 0.0, K, diagonal=d), compiled_log_density(Y, 0.0, whole), rtol=1e-13)
    check_derivatives(lambda K, d: log_density(Y, 0.0, symmetric(K), diagonal=d)
                      + jnp.sum(jnp.sin(cholesky(symmetric(K), diagonal=d))), K, d)


def test_gradient_in_float32():
    K, y = spd(200), rng.normal(size=200)
    gradient = jax.jit(jax.grad(log_density, argnums=2))
    exact, single = np.asarray(gradient(y, 0.0, K)), gradient(y.astype("float32"), np.float32(0), K.astype("float32"))
    assert single.dtype == jnp.float32
    assert np.abs(single - exact).max() < 1e-3 * np.abs(exact).max()


@pytest.mark.parametrize("columns", [None, 3])
def test_low_rank_identities(columns):
    d, U = rng.uniform(0.1, 2, 30), rng.normal(size=(30, 4))
    B = rng.normal(size=30 if columns is None else (30, columns))
    dense = np.diag(d) + U @ U.T
    assert np.allclose(jax.jit(woodbury_solve)(d, U, B), np.linalg.solve(dense, B))
    assert np.isclose(jax.jit(low_rank_log_determinant)(d, U), np.linalg.slogdet(dense)[1])
    function = lambda d, U: jnp.sum(jnp.sin(woodbury_solve(d, U, B))) + low_rank_log_determinant(d, U)
    check_derivatives(function, d, U, order=1)


@pytest.mark.parametrize("n, block", [(4, 4), (9, 4), (70, 64)])
def test_reverse_mode_cholesky(n, block):
    K, L_bar = spd(n), rng.normal(size=(n, n))
    L, pullback = jax.vjp(lambda K: jnp.linalg.cholesky(K), K)  # JAX's own derivation
    full = np.asarray(pullback(np.tril(L_bar))[0])
    want = np.tril(full + full.T) - np.diag(np.diag(full))
    assert np.allclose(jax.jit(cholesky_reverse_unblocked)(L, L_bar), want, atol=1e-9)
    blocked = jax.jit(cholesky_reverse_blocked, static_argnums=2)
    assert np.allclose(blocked(L, L_bar, block), want, atol=1e-9)


def test_small_helpers():
    K, B = spd(5), rng.normal(size=(5, 2))
    L = np.linalg.cholesky(K)
    for right in (B, B[:, 0]):
        assert np.allclose(L @ np.asarray(solve_lower(L, right)), right) and np.allclose(L.T @ np.asarray(solve_upper(L, right)), right)
    assert np.isclose(log_determinant(L), np.linalg.slogdet(K)[1])
    assert np.allclose(add_diagonal(K, np.arange(5.0)), K + np.diag(np.arange(5.0)))


def test_a_failure_is_nan_for_those_who_ask_and_ends_nobody_else():
    K = np.stack([spd(4), -np.eye(4)])
    with nan_on_failure():
        L = np.asarray(jax.jit(jax.vmap(cholesky))(K))
        value, slope = jax.jit(jax.value_and_grad(lambda K: log_density(np.ones(4), 0.0, K)))(K[1])
    assert np.allclose(L[0], compiled_cholesky(K[0])) and np.isnan(L[1]).any()
    assert np.isnan(value) and np.isnan(slope).any()
    with pytest.raises(eqx.EquinoxRuntimeError, match="K of size 4 x 4"):
        jax.block_until_ready(jax.vmap(cholesky)(K))


def test_a_program_compiled_for_nan_is_not_reused_for_errors():
    factor = jax.jit(cholesky)
    with nan_on_failure():
        assert np.isnan(factor(-np.eye(3))).any()
    with pytest.raises(Exception, match="K of size 3 x 3"):
        jax.block_until_ready(factor(-np.eye(3)))
    assert not fails_with_nan()


def test_second_derivatives_through_inverses():
    function = lambda L: jnp.sum(jnp.sin(inverses(jnp.tril(L))[1])) + jnp.sum(inverse_lower(jnp.tril(L)) ** 2)
    check_derivatives(function, np.linalg.cholesky(spd(5, floor=1.0)))


def test_a_function_within_a_program_is_traced_once():
    calls = []

    @jax.custom_jvp
    def square(x):
        calls.append("value")
        return x * x

    @square.defjvp
    def slope(primals, tangents):
        calls.append("slope")
        return primals[0] ** 2, 2 * primals[0] * tangents[0]

    assert jax.jit(jax.grad(linalg.quick_jit(square)))(3.0) == 6
    assert calls == ["slope"]


def test_a_quick_function_of_constants_may_stand_in_loops_batches_and_their_derivatives():
    "To find out whether a program is traced leaves nothing behind that another transformation stumbles over."
    nine = linalg.quick_jit(lambda x: x**2)
    within = lambda x: x * nine(jnp.asarray(3.0))
    twice = lambda x: jax.lax.scan(lambda x, _: (within(x), None), x, length=2)[0]
    branch = lambda x: jax.lax.cond(x > 0, within, lambda x: x, x)
    for function, factor in ((within, 9.0), (twice, 81.0), (jax.checkpoint(twice), 81.0), (branch, 9.0)):
        for jit in (lambda function: function, jax.jit):
            assert jit(function)(1.0) == jit(jax.grad(function))(1.0) == factor and jit(jax.hessian(function))(1.0) == 0
            for batch in (jax.vmap(function), jax.vmap(jax.grad(function))):
                np.testing.assert_array_equal(jit(batch)(jnp.ones(2)), [factor, factor])


def test_options_that_this_xla_does_not_know_are_left_out(monkeypatch):
    monkeypatch.setattr(linalg, "QUICK", {jax.default_backend(): {"xla_no_such_option": True}})
    traced = []
    twice = linalg.quick_jit(lambda x: traced.append(x) or 2 * x)
    assert twice(3.0) == 6 and twice(jnp.ones(2)).sum() == 4
    tried = len(traced)
    assert twice(jnp.ones(2)).sum() == 4 and len(traced) == tried  # nor is it asked again


@pytest.mark.parametrize("options", [of[backend] for of in (linalg.QUICK, linalg.DRAFT) for backend in of])
def test_the_options_of_all_backends_are_known(options):
    assert linalg._known(**options)


@pytest.mark.parametrize("backend, asked", [("cpu", linalg.QUICK["cpu"] | linalg.PLAIN_SUMS["cpu"]), ("gpu", linalg.QUICK["gpu"]), ("tpu", {})])
def test_a_program_asks_for_the_options_of_its_backend(monkeypatch, backend, asked):
    found = []
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(linalg, "_left_open", lambda **wanted: found.append(wanted) or {})
    assert linalg.quick_jit(lambda x: 2 * x)(1.0) == 2 and found == [asked]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="XLA's options for a CPU")
@pytest.mark.parametrize("jit", [linalg.quick_jit, linalg.draft_jit])
def test_a_sum_is_one_loop_but_in_drafts_of_single_precision(jit, monkeypatch):
    programs, compile_with = [], jax.jit

    def kept(function, **options):
        program = compile_with(function, **options)
        if options.get("compiler_options"):
            programs.append(program)
        return program

    monkeypatch.setattr(jax, "jit", kept)
    monkeypatch.setattr(linalg, "_left_open", lambda **wanted: wanted)  # whatever XLA_FLAGS says
    loops = {}
    for dtype in (jnp.float64, jnp.float32):
        x = jnp.linspace(0, 1, 700, dtype=dtype)
        programs.clear()
        total = jit(lambda x: jnp.sum(jnp.exp(x)))
        assert np.isclose(total(x), np.exp(np.asarray(x, float)).sum(), rtol=4 * jnp.finfo(dtype).eps)
        (program,) = programs
        loops[dtype] = program.lower(x).compile().as_text().count("reduce-window(")
    assert loops[jnp.float64] == 0 and (loops[jnp.float32] > 0) == (jit is linalg.draft_jit)


@pytest.mark.parametrize("shape", [(linalg.FEW,), (2 * linalg.FEW,), (linalg.FEW, linalg.FEW)])
@pytest.mark.parametrize("jit", [linalg.quick_jit, linalg.draft_jit])
def test_sums_in_single_precision_keep_their_digits(jit, shape):
    x = jnp.full(shape, 1.1, jnp.float32)  # one by one, equal numbers are rounded the same way again and again
    for function in (jnp.sum, lambda x: jnp.sum(jnp.log(x)), lambda x: jnp.sum(x**2), lambda x: jnp.sum(x.reshape(10, -1), 1)):
        np.testing.assert_allclose(jit(function)(x), function(x.astype(jnp.float64)), rtol=2e-6)


def test_only_what_runs_a_few_times_on_short_arrays_is_drafted(monkeypatch):
    asked = []
    monkeypatch.setattr(linalg, "_left_open", lambda **wanted: asked.append(wanted["xla_backend_optimization_level"]) or {})
    total = lambda arrays, name: sum(a.sum() for a in arrays)
    few, many = jnp.ones((linalg.FEW, 3)), jnp.ones((2, linalg.FEW + 1))
    for jit, arrays, level in ((linalg.draft_jit, [few], 0), (linalg.draft_jit, [few, many], 1), (linalg.draft_jit, [jnp.ones(())], 0),
                               (linalg.quick_jit, [few], 1)):
        assert jit(total)(arrays, "sum") == sum(a.size for a in arrays) and asked.pop() == level and not asked


@pytest.mark.parametrize("jit", [linalg.quick_jit, linalg.draft_jit])
def test_a_program_is_traced_once_for_each_structure_and_returns_what_is_no_array(jit):
    traced = []

    class Power(eqx.Module):
        base: jax.Array
        exponent: int = eqx.field(static=True)

    @jit
    def up(power, name):
        traced.append((power.exponent, name))
        return Power(power.base**power.exponent, power.exponent + 1), name, None

    for base, exponent, name in ((2.0, 2, "a"), (3.0, 2, "a"), (3.0, 3, "a"), (3.0, 3, "b"), (2.0, 3, "a")):
        power, same, nothing = up(Power(jnp.array(base), exponent), name)
        assert (power.base, power.exponent, same, nothing) == (base**exponent, exponent + 1, name, None)
    assert traced == [(2, "a"), (3, "a"), (3, "b")]


def test_a_call_takes_its_arguments_apart_once():
    apart = []

    @jax.tree_util.register_pytree_node_class
    class Pair:
        def __init__(self, *numbers):
            self.numbers = numbers

        def tree_flatten(self):
            apart.append(1)
            return self.numbers, None

        @classmethod
        def tree_unflatten(cls, _, numbers):
            return cls(*numbers)

    total, pair = linalg.quick_jit(lambda pair: sum(pair.numbers)), Pair(jnp.ones(2), jnp.zeros(2))
    total(pair)
    apart.clear()
    assert total(pair).sum() == 2 and len(apart) == 1

    of_pair = linalg.quick_jit(lambda c, pair: c * sum(pair.numbers)).of_arrays(1, 3.0, pair)
    apart.clear()
    for one in (1.0, 2.0):
        (result,) = of_pair(jnp.full(2, one), jnp.ones(2))
        assert result.sum() == 6 * (one + 1) and not apart


def test_a_function_of_arrays_fails_as_a_call_does():
    of_arrays = linalg.quick_jit(lambda name, K: linalg.cholesky(K, name)).of_arrays(1, "K_uu", jnp.eye(3))
    assert np.allclose(of_arrays(4 * jnp.eye(3))[0], 2 * np.eye(3))
    with pytest.raises(eqx.EquinoxRuntimeError, match="K_uu of size 3 x 3"):
        of_arrays(-jnp.eye(3))


@pytest.mark.parametrize("m", [rng.normal(size=4), rng.normal(size=(4, 3))], ids=["vector", "columns"])
def test_a_transpose_times_columns_is_the_plain_product_to_second_order(m):
    A, m = jnp.asarray(rng.normal(size=(4, 5))), jnp.asarray(m)
    for derivative in (lambda f: f, jax.jacfwd, jax.jacrev, jax.hessian):
        ours, plain = (derivative(lambda A: jnp.sin(product(A, m)))(A) for product in (transpose_times, lambda A, m: A.T @ m))
        assert np.allclose(ours, plain, rtol=0, atol=1e-12)


def test_an_error_of_the_function_itself_is_raised_and_it_runs_once():
    runs = []

    def fail(x):
        runs.append(float(x))
        raise OSError("no such file")

    def function(x):
        return jax.pure_callback(fail, jax.ShapeDtypeStruct((), x.dtype), x)

    with pytest.raises(jax.errors.JaxRuntimeError, match="no such file"):
        jax.block_until_ready(linalg.quick_jit(function)(jnp.float32(1.0)))
    assert runs == [1.0]


def test_an_error_of_equinox_says_what_failed_and_the_next_call_is_as_before():
    root = linalg.quick_jit(lambda x: {"root": jnp.sqrt(eqx.error_if(x, x < 0, "x is negative")), "of": "x"})
    assert root(jnp.array(4.0)) == {"root": 2, "of": "x"}
    with pytest.raises(eqx.EquinoxRuntimeError, match="x is negative") as failure:
        root(jnp.array(-1.0))
    assert "perhaps you are using `jax.jit`" not in str(failure.value)
    assert root(jnp.array(9.0))["root"] == 3


def test_a_value_error_of_the_function_is_raised_as_it_is_and_traced_once():
    traced = []

    @linalg.quick_jit
    def refuse(x):
        traced.append(x)
        raise ValueError("x must be something else")

    with pytest.raises(ValueError, match="^x must be something else"):
        refuse(jnp.ones(3))
    assert len(traced) == 1


def test_what_is_taken_one_at_a_time_is_traced_once_whatever_surrounds_it():
    traced = []

    @linalg.one_at_a_time
    def double(x):
        traced.append(x)
        return 2 * x

    @jax.jit
    def program(x):
        with linalg.nan_on_failure():
            return linalg.precise(double)(x) + double(x + 1)

    assert program(jnp.ones(3)).sum() == 18 and len(traced) == 1
