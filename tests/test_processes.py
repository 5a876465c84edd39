"Divergences between processes against brute force, Monte Carlo, stationarity and limits; their errors and dtypes."
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gp_thesis as gpt
from gp_thesis.linalg import cholesky, solve_lower, solve_upper
from gp_thesis.parameters import unwrap
from gp_thesis.processes import kl_from_posterior, kl_to_posterior
from gp_thesis.variational import ConditionalPosterior, PointPosterior

BOTH = pytest.mark.parametrize("divergence", [kl_to_posterior, kl_from_posterior])


def brute_force(q, p):
    "KL between two Gaussians (mean, covariance) in plain NumPy, summed over outputs."
    (mq, Cq), (mp, Cp) = ((np.asarray(mean), np.asarray(cov)) for mean, cov in (q, p))
    if mq.ndim == 2:
        return sum(brute_force((mq[:, i], Cq[i]), (mp[:, i], Cp[i])) for i in range(mq.shape[1]))
    d = mq - mp
    return 0.5 * (np.trace(np.linalg.solve(Cp, Cq)) + d @ np.linalg.solve(Cp, d) - len(d)
                  + np.linalg.slogdet(Cp)[1] - np.linalg.slogdet(Cq)[1])


@eqx.filter_jit
def mean_and_covariance(post, inputs):
    return post.mean(inputs), post.covariance(inputs)


def joint(post, *inputs):
    return tuple(np.asarray(part) for part in mean_and_covariance(post, np.concatenate(inputs)))


def at(rows, gaussian):
    "The marginal of a Gaussian (mean, covariance) at some of its inputs."
    mean, cov = (np.asarray(part) for part in gaussian)
    return mean[rows], cov[..., rows, rows]


@jax.jit
def factor(kernel, Z):
    return cholesky(kernel.evaluate(Z))


def problem(seed=0, outputs=(), shared=True, kernel=None, mean=None, N=7, M=4, S=5, noise=0.2):
    "q with an arbitrary q(u), the exact posterior, and all inputs about which they are compared."
    rng = np.random.default_rng(seed)
    uniform = lambda *shape: rng.uniform(0.0, 4.0, shape)
    kernel = gpt.Matern32(lengthscale=[0.9, 1.6], variance=1.4) if kernel is None else kernel
    mean = gpt.LinearMean(weights=[0.5, -0.3], bias=0.7) if mean is None else mean
    model = unwrap(gpt.GP(kernel, gpt.Gaussian(noise), mean))
    X, Z, Xs = uniform(N, 2), uniform(M, 2), uniform(S, 2)
    S_factor = np.eye(M) + 0.3 * rng.normal(size=(() if shared else outputs) + (M, M))
    q = PointPosterior(model, jnp.asarray(Z), factor(model.kernel, Z), jnp.asarray(rng.normal(size=(M, *outputs))), jnp.asarray(S_factor))
    return q, gpt.Exact(model).posterior(X, rng.normal(size=(N, *outputs))), Xs


@eqx.filter_jit
def optimal(model, Z, exact, y):
    "The q(u) of least KL[Q || P̂] for a prior with mean zero, Matthews (5.10) to (5.13)."
    noise, M = model.likelihood.variance, len(Z)
    L = cholesky(model.kernel.evaluate(Z), "K_uu", 1e-14 * M)
    A = solve_lower(L, model.kernel.evaluate(Z, exact.X))
    R = solve_upper(cholesky(A @ A.T / noise, "B", 1.0), jnp.eye(M, dtype=A.dtype))
    return PointPosterior(model, Z, L, R @ (R.T @ (A @ y)) / noise, R)


def regression(kernel=None, N=20, M=6, noise=0.1, seed=0):
    rng = np.random.default_rng(seed)
    X, Z = np.sort(rng.uniform(0, 5, N))[:, None], np.linspace(0.2, 4.8, M)[:, None]
    y = np.sin(2 * X[:, 0]) + np.sqrt(noise) * rng.normal(size=N)
    model = unwrap(gpt.GP(gpt.RBF(0.7, 1.3) if kernel is None else kernel, gpt.Gaussian(noise)))
    exact = gpt.Exact(model).posterior(X, y)
    return model, X, y, Z, exact, optimal(model, Z, exact, y)


KERNELS = {"Matern32": None, "RBF": gpt.RBF([0.5, 0.8], 2.0), "sum": gpt.Matern12(1.0) + gpt.Linear(0.3)}


@pytest.mark.parametrize("kernel, outputs, shared", [("Matern32", (), True), ("Matern32", (3,), True), ("Matern32", (3,), False),
                                                     ("RBF", (), True), ("sum", (2,), False)])
def test_equals_brute_force_on_inducing_data_and_further_inputs(kernel, outputs, shared):
    q, exact, Xs = problem(outputs=outputs, shared=shared, kernel=KERNELS[kernel])
    Q, posterior = joint(q, q.Z, exact.X, Xs), joint(exact, q.Z, exact.X, Xs)
    there, back = float(kl_to_posterior(q, exact)), float(kl_from_posterior(q, exact))
    for rows in (slice(11), slice(None)):                                # at Z and X, and at all of them
        assert abs(there - brute_force(at(rows, Q), at(rows, posterior))) < 1e-8
        assert abs(back - brute_force(at(rows, posterior), at(rows, Q))) < 1e-8


def test_is_larger_than_the_divergence_at_the_data_alone():
    q, exact, Xs = problem()
    at_data = slice(4, 11)
    Q, posterior = (at(at_data, joint(post, q.Z, exact.X, Xs)) for post in (q, exact))
    assert brute_force(Q, posterior) < float(kl_to_posterior(q, exact)) - 0.01
    assert brute_force(posterior, Q) < float(kl_from_posterior(q, exact)) - 0.01


@jax.jit
def prior_at(model, inputs):
    return model.mean.evaluate(inputs), model.kernel.evaluate(inputs)


@pytest.mark.parametrize("reverse", [False, True])
def test_equals_the_average_log_weight_of_draws(reverse):
    q, exact, Xs = problem(seed=3)
    all_inputs, union = (q.Z, exact.X, Xs), slice(11)
    mean, cov = at(union, joint(exact if reverse else q, *all_inputs))
    f = np.random.default_rng(0).multivariate_normal(mean, cov, size=100_000)
    prior_mean, K = at(union, prior_at(q.model, np.concatenate(all_inputs)))
    L, alpha = np.asarray(exact.L), np.asarray(exact.alpha)
    y = L @ (L.T @ alpha) + prior_mean[4:]

    def log_normal(x, mean, cov):
        return -0.5 * (np.sum((x - mean) * np.linalg.solve(cov, (x - mean).T).T, axis=-1)
                       + np.linalg.slogdet(cov)[1] + len(cov) * np.log(2 * np.pi))

    Z, X = np.arange(4), np.arange(4, 11)
    at_Z = at(slice(4), joint(q, *all_inputs))
    log_q = log_normal(f[:, Z], *at_Z) - log_normal(f[:, Z], prior_mean[Z], K[np.ix_(Z, Z)])                 # log dQ/dP
    evidence = log_normal(y[None], prior_mean[X], K[np.ix_(X, X)] + 0.2 * np.eye(7))[0]
    log_posterior = log_normal(y - f[:, X], np.zeros(7), 0.2 * np.eye(7)) - evidence                        # log dP̂/dP
    log_ratio = log_posterior - log_q if reverse else log_q - log_posterior
    want = float(kl_from_posterior(q, exact) if reverse else kl_to_posterior(q, exact))
    assert abs(log_ratio.mean() - want) < 5 * log_ratio.std() / np.sqrt(len(f))


def test_the_best_gaussians_of_both_directions_are_stationary_points():
    model, X, y, Z, exact, q = regression()
    K = np.asarray(prior_at(model, np.concatenate([Z, X]))[1])
    A = np.linalg.solve(np.asarray(q.L), K[:len(Z), len(Z):])
    Sigma = K[len(Z):, len(Z):] + 0.1 * np.eye(len(X))
    posterior_cov = np.eye(len(Z)) - A @ np.linalg.solve(Sigma, A.T)
    at_posterior = PointPosterior(model, q.Z, q.L, jnp.asarray(A @ np.asarray(exact.alpha)), jnp.asarray(np.linalg.cholesky(posterior_cov)))
    for best, other, divergence in ((q, at_posterior, kl_to_posterior), (at_posterior, q, kl_from_posterior)):
        @jax.jit
        def value_and_slope(m, S_factor):
            return jax.value_and_grad(lambda *moments: divergence(PointPosterior(model, q.Z, q.L, *moments), exact), (0, 1))(m, S_factor)

        least, slope = value_and_slope(best.m, best.S_factor)
        for part in slope:
            assert np.abs(np.tril(np.atleast_2d(part))).max() < 1e-8
        assert float(least) < float(value_and_slope(other.m, other.S_factor)[0]) - 1e-6


@BOTH
def test_gradients_equal_finite_differences(divergence):
    q, exact, _ = problem(seed=5)
    direction = jax.tree.map(lambda a: jnp.asarray(np.random.default_rng(1).normal(size=a.shape)), (q.m, q.S_factor, q.Z))

    @jax.jit
    @jax.value_and_grad
    def value(t):
        m, S_factor, Z = jax.tree.map(lambda a, d: a + t * d, (q.m, q.S_factor, q.Z), direction)
        return divergence(PointPosterior(q.model, Z, cholesky(q.model.kernel.evaluate(Z)), m, S_factor), exact)

    h = 1e-5
    assert np.isclose(value(0.0)[1], (float(value(h)[0]) - float(value(-h)[0])) / (2 * h), rtol=1e-6)


@BOTH
def test_any_square_root_of_the_covariance_will_do(divergence):
    q, exact, _ = problem(seed=6)
    S = np.asarray(q.S_factor) @ np.asarray(q.S_factor).T
    values, vectors = np.linalg.eigh(S)
    roots = [np.linalg.cholesky(S), np.linalg.cholesky(S) * [1, -1, 1, -1], vectors * np.sqrt(values),
             np.linalg.cholesky(S[::-1, ::-1])[::-1, ::-1]]                                                 # upper triangular
    for root in roots:
        assert np.allclose(root @ root.T, S)
        other = eqx.tree_at(lambda q: q.S_factor, q, jnp.asarray(root))
        assert abs(float(divergence(other, exact)) - float(divergence(q, exact))) < 1e-9


@BOTH
def test_is_zero_for_the_posterior_itself_and_positive_otherwise(divergence):
    model, X, y, Z, exact, q = regression(gpt.Matern32(1.0))
    assert abs(divergence(optimal(model, X, exact, y), exact)) < 1e-8
    assert divergence(q, exact) > 1e-3


@BOTH
def test_two_inducing_inputs_in_one_place_count_once(divergence):
    model, X, y, Z, exact, q = regression()
    for gap in (0.0, 1e-12, 1e-9):
        doubled = optimal(model, np.concatenate([Z, Z[2:4] + gap]), exact, y)
        found, once = float(divergence(doubled, exact)), float(divergence(q, exact))
        assert abs(found - once) < 1e-5 * once + 1e-6


def test_smooth_kernels_with_many_inducing_inputs_stay_accurate():
    "K_uu has eigenvalues far below rounding; the divergence is tiny and must not drown."
    model, X, y, Z, exact, q = regression(gpt.RBF(1.5, 1.0), N=60, M=40)
    assert abs(kl_to_posterior(q, exact)) < 1e-7 and abs(kl_from_posterior(q, exact)) < 1e-7


@BOTH
def test_a_singular_covariance_is_infinitely_far(divergence):
    q, exact, _ = problem()
    assert jnp.isposinf(divergence(eqx.tree_at(lambda q: q.S_factor, q, jnp.zeros_like(q.S_factor)), exact))


def test_more_inducing_inputs_are_never_worse():
    for seed in range(3):
        model, X, y, _, exact, _ = regression(gpt.RBF(0.8, 1.0), seed=seed)
        Z = np.random.default_rng(seed).uniform(0, 5, (8, 1))
        curve = [float(kl_to_posterior(optimal(model, Z[:M], exact, y), exact)) for M in (1, 2, 4, 8)]
        assert (np.diff(curve) < 1e-8).all() and curve[-1] < curve[0]


class Averages(ConditionalPosterior):
    "u = weights @ (f(places) - m(places))."
    model: gpt.GP
    places: jax.Array
    weights: jax.Array
    L: jax.Array
    m: jax.Array
    S_factor: jax.Array
    num_dims = property(lambda self: self.places.shape[1])

    def cross_covariance(self, Xs):
        return self.weights @ self.model.kernel.evaluate(self.places, Xs)


def test_inducing_variables_may_be_other_linear_functionals():
    q, exact, places = problem(seed=7)
    weights = np.random.default_rng(8).normal(size=(4, 5))
    K = np.asarray(prior_at(q.model, np.concatenate([q.Z, exact.X, places]))[1])[11:, 11:]
    L = jnp.asarray(np.linalg.cholesky(weights @ K @ weights.T))
    averages = Averages(q.model, jnp.asarray(places), jnp.asarray(weights), L, q.m, q.S_factor)
    Q, posterior = (joint(post, places, exact.X, q.Z) for post in (averages, exact))
    assert abs(float(kl_to_posterior(averages, exact)) - brute_force(Q, posterior)) < 1e-8
    assert abs(float(kl_from_posterior(averages, exact)) - brute_force(posterior, Q)) < 1e-8


@BOTH
def test_works_in_single_precision(divergence):
    double = regression(gpt.Matern32(1.0))
    single = jax.tree.map(lambda a: a.astype(jnp.float32) if eqx.is_inexact_array(a) else a, double[4:])
    got = divergence(single[1], single[0])
    assert got.dtype == jnp.float32 and np.isclose(got, divergence(double[5], double[4]), rtol=1e-3, atol=1e-3)


@BOTH
def test_mistakes_are_named(divergence):
    q, exact, _ = problem()
    put = lambda where, value: eqx.tree_at(where, q, value)
    wrong = {
        "q must be of type ConditionalPosterior, got ExactPosterior": (exact, exact),
        "exact must be of type ExactPosterior, got PointPosterior": (q, q),
        r"same model.*\n?.*hyperparameters": (put(lambda q: q.model.likelihood.variance, jnp.asarray(0.3)), exact),
        r"same dtype": (put(lambda q: q.model, jax.tree.map(lambda a: a.astype(jnp.float32), q.model)), exact),
        r"the same model": (put(lambda q: q.model.kernel, unwrap(gpt.RBF())), exact),
        r"number of input columns, got 1 and 2": (put(lambda q: q.Z, q.Z[:, :1]), exact),
        r"q\.m must have shape \(4,\).*got \(4, 1\)": (put(lambda q: q.m, q.m[:, None]), exact),
        r"q\.L must have shape \(4, 4\).*got \(3, 3\)": (put(lambda q: q.L, q.L[:3, :3]), exact),
        r"q\.S_factor must have shape \(4, 4\).*got \(4, 3\)": (put(lambda q: q.S_factor, q.S_factor[:, :3]), exact),
    }
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            divergence(*arguments)
