"""Gaussian algebra and quadrature against NumPy's linear algebra, SciPy's quadrature, finite differences and Monte Carlo."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from gp_thesis.gaussians import (
    condition, expectation_gradients, gauss_hermite, kl_divergence, kl_from_cholesky, log_expectation, marginal, product,
)

# One program for each pair of shapes instead of one for each operation.
compiled_marginal, compiled_product, compiled_kl = jax.jit(marginal), jax.jit(product), jax.jit(kl_divergence)
expectation = jax.jit(gauss_hermite, static_argnums=(0, 3))


def gaussian(rng, size):
    "A mean and a well conditioned covariance whose scale is random too."
    B = rng.normal(size=(size, 2 * size + 1))
    return rng.normal(size=size), np.exp(rng.uniform(-2, 2)) * (B @ B.T / size + 0.1 * np.eye(size))


def log_pdf(x, mean, cov):
    return stats.multivariate_normal(mean, cov).logpdf(x)


def finite_difference(f, x, step=1e-5):
    "Central differences of a scalar function in every entry of `x`."
    x, out = np.asarray(x, float), np.zeros(np.shape(x))
    for i in np.ndindex(x.shape):
        d = np.zeros(x.shape)
        d[i] = step
        out[i] = (f(x + d) - f(x - d)) / (2 * step)
    return out


# Few pairs of sizes, since each compiles: a number, a row, a column, square, wide, tall.
sizes = st.sampled_from([(1, 1), (1, 3), (3, 1), (3, 3), (2, 4), (4, 2)])
problems = st.tuples(st.integers(0, 2**32 - 1), sizes).map(lambda problem: (problem[0], *problem[1]))
many = settings(max_examples=15)


# Marginal, conditional, product

@many
@given(problems)
def test_marginal_has_the_moments_of_a_linear_map(problem):
    seed, size, n = problem
    rng = np.random.default_rng(seed)
    mean, cov = gaussian(rng, size)
    A, b, noise = rng.normal(size=(n, size)), rng.normal(size=n), gaussian(rng, n)[1]
    got_mean, got_cov = compiled_marginal(A, b, mean, cov, noise)
    root = np.hstack([A @ np.linalg.cholesky(cov), np.linalg.cholesky(noise)])        # y = A m + b + root e, e standard
    np.testing.assert_allclose(got_mean, A @ mean + b, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(got_cov, root @ root.T, rtol=1e-10, atol=1e-10)


def test_marginal_against_draws():
    rng = np.random.default_rng(0)
    mean, cov = gaussian(rng, 3)
    A, b, noise = rng.normal(size=(2, 3)), rng.normal(size=2), gaussian(rng, 2)[1]
    draws, count = rng.multivariate_normal(mean, cov, 200_000), 200_000
    y = draws @ A.T + b + rng.multivariate_normal(np.zeros(2), noise, count)
    got_mean, got_cov = map(np.asarray, compiled_marginal(A, b, mean, cov, noise))
    assert np.all(np.abs(y.mean(0) - got_mean) < 5 * y.std(0) / np.sqrt(count))
    standard_error = np.sqrt((got_cov**2 + np.outer(np.diag(got_cov), np.diag(got_cov))) / count)
    assert np.all(np.abs(np.cov(y.T) - got_cov) < 5 * standard_error)


@many
@given(problems, st.data())
def test_condition_divides_the_joint_density_by_the_marginal(problem, data):
    seed, _, size = problem
    size = 2 if size == 1 else 4
    rng = np.random.default_rng(seed)
    mean, cov = gaussian(rng, size)
    index = data.draw(st.permutations(range(size)))[:data.draw(st.integers(1, size - 1))]
    x = rng.normal(size=size)
    got_mean, got_cov = condition(mean, cov, index, x[index])
    rest = [i for i in range(size) if i not in index]
    expected = log_pdf(x, mean, cov) - log_pdf(x[index], mean[index], cov[np.ix_(index, index)])
    np.testing.assert_allclose(log_pdf(x[rest], got_mean, got_cov), expected, rtol=1e-6, atol=1e-6)
    precision = np.linalg.inv(cov)                     # the conditional covariance is a block of the precision, inverted
    np.testing.assert_allclose(got_cov, np.linalg.inv(precision[np.ix_(rest, rest)]), rtol=1e-6, atol=1e-8)


def test_condition_accepts_every_kind_of_index():
    mean, cov = gaussian(np.random.default_rng(1), 4)
    expected = condition(mean, cov, [1, 2], [0.3, -0.2])
    for index in (slice(1, 3), np.array([False, True, True, False]), (1, 2), [-3, -2], jnp.array([1, 2])):
        for got, want in zip(condition(mean, cov, index, [0.3, -0.2]), expected):
            np.testing.assert_array_equal(got, want)
    swapped = condition(mean, cov, [2, 1], [-0.2, 0.3])
    for got, want in zip(swapped, expected):
        np.testing.assert_allclose(got, want, rtol=1e-12)
    one = condition(mean, cov, 0, 1.0)
    assert one[0].shape == (3,) and one[1].shape == (3, 3)


@many
@given(problems)
def test_product_is_the_product(problem):
    seed, size, n = problem
    rng = np.random.default_rng(seed)
    (mean_a, cov_a), (mean_b, cov_b), A = gaussian(rng, n), gaussian(rng, size), rng.normal(size=(n, size))
    mean, cov, log_normaliser = compiled_product(mean_a, cov_a, mean_b, cov_b, A)
    for x in rng.normal(size=(3, size)):
        both = log_pdf(A @ x, mean_a, cov_a) + log_pdf(x, mean_b, cov_b)
        np.testing.assert_allclose(log_pdf(x, mean, cov) + log_normaliser, both, rtol=1e-6, atol=1e-6)
    precision = A.T @ np.linalg.inv(cov_a) @ A + np.linalg.inv(cov_b)
    np.testing.assert_allclose(cov, np.linalg.inv(precision), rtol=1e-6, atol=1e-8)


def test_product_without_a_map_is_symmetric_and_integrates():
    rng = np.random.default_rng(2)
    a, b = gaussian(rng, 3), gaussian(rng, 3)
    for got, want in zip(compiled_product(*a, *b), compiled_product(*b, *a)):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    _, _, log_normaliser = product([0.4], [[0.7]], [-1.0], [[2.0]])
    area, _ = integrate.quad(lambda x: stats.norm.pdf(x, 0.4, 0.7**0.5) * stats.norm.pdf(x, -1.0, 2.0**0.5), -30, 30)
    np.testing.assert_allclose(np.exp(log_normaliser), area, rtol=1e-8)


def test_product_with_a_singular_prior():
    direction = np.array([1.0, -2.0, 0.5])
    mean, cov, _ = compiled_product(np.ones(3), 0.1 * np.eye(3), np.zeros(3), np.outer(direction, direction))
    weight = direction @ np.ones(3) / (0.1 + direction @ direction)           # regression on one standard normal weight
    np.testing.assert_allclose(mean, weight * direction, rtol=1e-9)
    np.testing.assert_allclose(cov, np.outer(direction, direction) * 0.1 / (0.1 + direction @ direction), atol=1e-9)


# Divergence

@many
@given(problems)
def test_kl_against_the_formula_and_its_sign(problem):
    seed, _, size = problem
    rng = np.random.default_rng(seed)
    (m, S), (mu, P) = gaussian(rng, size), gaussian(rng, size)
    got = compiled_kl(m, S, mu, P)
    P_inv = np.linalg.inv(P)
    expected = 0.5 * (np.trace(P_inv @ S) + (m - mu) @ P_inv @ (m - mu) - size
                      + np.linalg.slogdet(P)[1] - np.linalg.slogdet(S)[1])
    np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-9)
    assert got >= 0
    np.testing.assert_allclose(compiled_kl(m, S, m, S), 0.0, atol=1e-9)


def test_kl_against_draws_of_the_log_ratio():
    rng = np.random.default_rng(3)
    q, p = gaussian(rng, 3), gaussian(rng, 3)
    x = rng.multivariate_normal(*q, 200_000)
    ratio = log_pdf(x, *q) - log_pdf(x, *p)
    assert abs(ratio.mean() - compiled_kl(*q, *p)) < 5 * ratio.std() / np.sqrt(len(x))


def test_kl_from_cholesky_whitened_and_with_flipped_columns():
    rng = np.random.default_rng(4)
    (m, S), (_, P) = gaussian(rng, 4), gaussian(rng, 4)
    L, L_prior = np.linalg.cholesky(S), np.linalg.cholesky(P)
    expected = compiled_kl(m, S, np.zeros(4), P)
    signs = np.array([1.0, -1.0, -1.0, 1.0])
    np.testing.assert_allclose(kl_from_cholesky(m, L * signs, L_prior), expected, rtol=1e-10)
    white = kl_from_cholesky(np.linalg.solve(L_prior, m), np.linalg.solve(L_prior, L))
    np.testing.assert_allclose(white, expected, rtol=1e-10)
    stack = jax.jit(jax.vmap(kl_from_cholesky, in_axes=(0, 0, None)))(np.stack([m, 2 * m]), np.stack([L, L]), L_prior)
    np.testing.assert_allclose(stack, [expected, compiled_kl(2 * m, S, np.zeros(4), P)], rtol=1e-10)


# Quadrature

@pytest.mark.parametrize("points", [1, 2, 3, 8, 20, 150])
def test_quadrature_is_exact_up_to_its_degree_and_not_beyond(points):
    mean, sd = 0.3, 1.2
    exact, degrees = min(2 * points, 12), np.arange(13)            # degrees below `exact`, and more
    expected = [stats.norm.moment(degree, mean, sd) if degree else 1.0 for degree in degrees]
    got = np.asarray(expectation(lambda x: x[..., None] ** degrees, mean, sd**2, points))
    np.testing.assert_allclose(got[:exact], expected[:exact], rtol=1e-9)
    if points < 5:
        assert abs(got[2 * points] - expected[2 * points]) > 1e-3


@pytest.mark.parametrize("f, numpy_f", [
    (jax.nn.log_sigmoid, lambda x: -np.logaddexp(0, -x)),
    (jax.scipy.stats.norm.logcdf, stats.norm.logcdf),
    (jnp.sin, np.sin),
])
def test_quadrature_against_scipy(f, numpy_f):
    means, variances = np.array([-2.0, 0.1, 1.5]), np.array([0.01, 0.5, 2.0])
    expected = [integrate.quad(lambda x: numpy_f(x) * stats.norm.pdf(x, m, v**0.5), m - 12 * v**0.5, m + 12 * v**0.5)[0]
                for m, v in zip(means, variances)]
    np.testing.assert_allclose(expectation(f, means, variances, 40), expected, rtol=1e-6, atol=1e-8)


def test_quadrature_keeps_shapes_and_sees_the_data():
    y = jnp.arange(6.0).reshape(2, 3)
    mean, var = 0.1 * y, jnp.array([0.5, 1.0, 2.0])
    seen = []
    got = gauss_hermite(lambda x: seen.append(x.shape) or (x - y) ** 2, mean, var)
    assert seen == [(2, 3)]
    np.testing.assert_allclose(got, (mean - y) ** 2 + var, rtol=1e-10)
    several = gauss_hermite(lambda x: jnp.stack([x, x**2], -1), mean, var)
    np.testing.assert_allclose(several, np.stack([mean, mean**2 + var], -1), rtol=1e-10, atol=1e-12)
    assert gauss_hermite(lambda x: x, 0.0, 1.0).shape == ()
    np.testing.assert_allclose(gauss_hermite(lambda x: jnp.where(x > -9, 1, 0), 0.0, 1.0), 1.0, rtol=1e-12)   # integers
    np.testing.assert_allclose(gauss_hermite(lambda x: y, mean, var), y, rtol=1e-12)                          # a constant
    np.testing.assert_allclose(gauss_hermite(jnp.sin, mean, 0.0), jnp.sin(mean), rtol=1e-12)                  # no variance


def test_log_expectation_agrees_where_nothing_underflows_and_survives_where_it_does():
    means, variances = np.array([-1.0, 0.0, 2.0]), np.array([0.2, 1.0, 1.7])
    g = lambda x: jax.scipy.stats.norm.logcdf(1.3 * x)
    exact = stats.norm.logcdf(1.3 * means / np.sqrt(1 + 1.3**2 * variances))

    @jax.jit
    def everything(m, v):
        small = lambda m, v: log_expectation(lambda x: g(x) - 5000.0, m, v)
        return (log_expectation(g, m, v, 60), log_expectation(lambda x: g(x) - 5000.0, m, v, 60),
                log_expectation(lambda x: jnp.stack([g(x), 2 * g(x)]), m, v, 60), jax.vmap(jax.grad(small))(m, v))

    plain, shifted, two, gradient = map(np.asarray, everything(means, variances))
    np.testing.assert_allclose(plain, exact, rtol=1e-6)
    np.testing.assert_allclose(shifted + 5000.0, exact, rtol=1e-6, atol=1e-8)
    assert np.all(np.isfinite(gradient))
    np.testing.assert_allclose(two[0], exact, rtol=1e-6)
    assert two.shape == (2, 3)


# Derivatives

@pytest.mark.parametrize("f", [jax.nn.softplus, jnp.sin, lambda x: jnp.exp(0.5 * x)])
def test_expectation_gradients_against_differences_and_autodiff(f):
    means, variances = np.array([-1.0, 0.3, 2.0]), np.array([0.1, 0.8, 1.5])
    got = jax.jit(expectation_gradients, static_argnums=(0, 3))(f, means, variances, 60)
    value = jax.jit(jax.value_and_grad(lambda m, v: gauss_hermite(f, m, v, 60).sum(), argnums=(0, 1)))
    autodiff = value(means, variances)[1]
    differences = (finite_difference(lambda m: float(value(m, variances)[0]), means),
                   finite_difference(lambda v: float(value(means, v)[0]), variances))
    for a, b, c in zip(got, autodiff, differences):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-8)


def test_expectation_gradients_against_draws_and_without_variance():
    m, v = 0.4, 0.9
    x = m + v**0.5 * np.random.default_rng(5).normal(size=400_000)
    score = (x - m) / v                                   # d log N / dm, and below d log N / dv: no derivative of f at all
    draws = (np.tanh(x) * score, np.tanh(x) * 0.5 * (score**2 - 1 / v))
    for got, sample in zip(expectation_gradients(jnp.tanh, m, v, 80), draws):
        assert abs(got - sample.mean()) < 5 * sample.std() / np.sqrt(sample.size)
    slope, half_curvature = expectation_gradients(jnp.sin, 0.7, 0.0)
    np.testing.assert_allclose([slope, half_curvature], [np.cos(0.7), -0.5 * np.sin(0.7)], rtol=1e-12)


def test_everything_is_differentiable():
    rng = np.random.default_rng(6)
    (m, S), (mu, P), A = gaussian(rng, 3), gaussian(rng, 2), rng.normal(size=(2, 3))
    symmetric = lambda C: 0.5 * (C + C.T)
    functions = {
        "kl": lambda C: kl_divergence(m, symmetric(C), 0.5 * m, P3),
        "prior": lambda C: kl_divergence(m, P3, 0.5 * m, symmetric(C)),
        "normaliser": lambda C: product(mu, P, m, symmetric(C), A)[2],
        "product": lambda C: product(mu, P, m, symmetric(C), A)[0].sum(),
        "condition": lambda C: condition(m, symmetric(C), [1], [0.3])[1].sum(),
        "marginal": lambda C: marginal(A, mu, m, symmetric(C), P)[1].sum(),
    }
    P3 = gaussian(rng, 3)[1]
    for name, f in functions.items():
        f = jax.jit(jax.value_and_grad(f))
        np.testing.assert_allclose(f(S)[1], finite_difference(lambda C: float(f(C)[0]), S), rtol=1e-5, atol=1e-7, err_msg=name)


# Precision, transformations, errors

@pytest.mark.parametrize("dtype, rtol", [(np.float32, 2e-4), (np.float64, 1e-9)])
def test_precision_follows_the_input(dtype, rtol):
    rng = np.random.default_rng(7)
    (m, S), (mu, P), A = gaussian(rng, 4), gaussian(rng, 2), rng.normal(size=(2, 4))
    low = [np.asarray(x, dtype) for x in (m, S, mu, P, A)]
    def everything(m, S, mu, P, A):
        return (*marginal(A, mu, m, S, P), *condition(m, S, [1, 3], mu), *product(mu, P, m, S, A),
                kl_divergence(m, S, 2 * m, S), gauss_hermite(jnp.sin, m, 0.5), gauss_hermite(jnp.sin, 0.5, jnp.exp(m)),
                log_expectation(jax.nn.log_sigmoid, m, 0.5), *expectation_gradients(jax.nn.softplus, m, 0.5))
    for got, want in zip(jax.jit(everything)(*low), everything(m, S, mu, P, A)):
        assert got.dtype == dtype
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)


def test_single_precision_default():
    with jax.enable_x64(False):
        got = jax.jit(lambda: (*product([1.0], [[1]], [0.0], [[1]]), gauss_hermite(lambda x: x**2, 0.0, 1.0)))()
        assert all(x.dtype == jnp.float32 for x in got)
        np.testing.assert_allclose(got[3], 1.0, rtol=1e-5)


def test_vmap_over_stacks_equals_a_loop():
    rng = np.random.default_rng(8)
    means, covs = map(np.stack, zip(*[gaussian(rng, 3) for _ in range(4)]))
    a = gaussian(rng, 3)
    alone = lambda m, S: (*product(*a, m, S), *condition(m, S, [0], [1.0]), kl_divergence(m, S, *a))
    together, one = [np.asarray(x) for x in jax.jit(jax.vmap(alone))(means, covs)], jax.jit(alone)
    for i in range(4):
        for x, y in zip(together, one(means[i], covs[i])):
            np.testing.assert_allclose(x[i], y, rtol=1e-9, atol=1e-11)


I2, I3, zero2, zero3 = np.eye(2), np.eye(3), np.zeros(2), np.zeros(3)

@pytest.mark.parametrize("name, call", [
    ("mean", lambda: marginal(I2, 0.0, I2, I2, I2)),
    ("mean", lambda: marginal(np.zeros((2, 0)), 0.0, np.zeros(0), np.zeros((0, 0)), I2)),
    ("cov", lambda: marginal(I2, 0.0, zero2, I3, I2)),
    ("A", lambda: marginal(I3, 0.0, zero2, I2, I3)),
    ("A", lambda: marginal(zero2, 0.0, zero2, I2, I2)),
    ("b", lambda: marginal(I2, zero3, zero2, I2, I2)),
    ("noise_cov", lambda: marginal(I2, 0.0, zero2, I2, I3)),
    ("cov", lambda: condition(zero3, I2, [0], [0.0])),
    ("value", lambda: condition(zero3, I3, [0, 1], [0.0])),
    ("value", lambda: condition(zero3, I3, [0], "one")),
    ("index", lambda: condition(zero3, I3, [3], [0.0])),
    ("index", lambda: condition(zero3, I3, [1, 1], [0.0, 0.0])),
    ("index", lambda: condition(zero3, I3, [], [])),
    ("index", lambda: condition(zero3, I3, [0.5], [0.0])),
    ("index", lambda: condition(zero3, I3, np.array([True, False]), [0.0])),
    ("index", lambda: condition(zero3, I3, slice(5, 9), [])),
    ("mean_a", lambda: product(zero2, I2, zero3, I3)),
    ("cov_a", lambda: product(zero2, I3, zero3, I3)),
    ("cov_b", lambda: product(zero3, I3, zero3, I2)),
    ("A", lambda: product(zero2, I2, zero3, I3, np.zeros((3, 2)))),
    ("mean_p", lambda: kl_divergence(zero2, I2, zero3, I2)),
    ("cov_p", lambda: kl_divergence(zero2, I2, zero2, I3)),
    ("L", lambda: kl_from_cholesky(zero2, I3)),
    ("L_prior", lambda: kl_from_cholesky(zero2, I2, I3)),
    ("mean, var", lambda: gauss_hermite(jnp.sin, zero2, np.ones(3))),
    ("points", lambda: gauss_hermite(jnp.sin, 0.0, 1.0, points=0)),
    ("points", lambda: log_expectation(jnp.sin, 0.0, 1.0, points=2.5)),
    ("points", lambda: expectation_gradients(jnp.sin, 0.0, 1.0, points=151)),
])
def test_bad_input_is_named(name, call):
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        call()


def test_a_covariance_that_is_none_is_an_error_and_not_nan():
    with pytest.raises(Exception, match="cov_q"):
        jax.block_until_ready(kl_divergence(zero2, np.diag([1.0, -1.0]), zero2, I2))
