"Divergences by partitions, the conditional, mean field and both Gaussian approximations, against brute force."
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_normal, norm

from gp_thesis.exact import GP, Exact
from gp_thesis.fitting import fit
from gp_thesis.gaussians import kl_divergence, kl_from_cholesky
from gp_thesis.kernels import RBF, ConstantMean, Matern12, Matern32
from gp_thesis.likelihoods import Bernoulli, Gaussian, Likelihood, Softmax, tilted_moments
from gp_thesis.linalg import nan_on_failure
from gp_thesis.parameters import cast, free, freeze, partition, positive, unwrap
from gp_thesis.variational import VGP, MeanField, PointPosterior, WhitenedVGP, conditional, conditional_covariance


class Student(Likelihood):
    "Heavy tails: a log density that is not concave."
    points = 150

    def log_density(self, f, y):
        return jax.scipy.stats.t.logpdf(y, 4.0, loc=f, scale=0.5)


class Fine(Bernoulli):
    points = 100


def problem(N=12, P=None, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 4, (N, 1))
    f = np.sin(2 * X) + (0 if P is None else np.arange(P))
    y = f[:, 0] if P is None else f
    return X, y + 0.3 * rng.normal(size=y.shape)


def model(likelihood, variance=1.5):
    return GP(RBF(0.8, variance), likelihood, ConstantMean(0.2))


def labels(y):
    return (y > 0).astype(float)


def plane(K, reach=7.0, n=401):
    "A grid over the plane in units of the prior's standard deviation: points (n², 2) and the area of a cell."
    edge = np.linspace(-reach, reach, n) * np.sqrt(K[0, 0])
    return np.stack(np.meshgrid(edge, edge, indexing="ij"), -1).reshape(-1, 2), (edge[1] - edge[0]) ** 2


def two_points(likelihood, variance=1.5):
    "A problem of two data, with the exact log joint density on a grid: (approximation's model, X, y, grid, cell, log joint)."
    X, y = np.array([[0.0], [0.5]]), np.array([1.0, 0.0])
    gp = model(likelihood, variance)
    K = np.asarray(gp.kernel(X))
    grid, cell = plane(K)
    log_joint = multivariate_normal.logpdf(grid, [0.2, 0.2], K) + log_density(likelihood, grid, y).sum(1)
    return gp, X, y, grid, cell, log_joint


@eqx.filter_jit
def _log_density(likelihood, f, y):
    return unwrap(likelihood).log_density(f, y)


def log_density(likelihood, f, y):
    "log p(y | f) as a NumPy array."
    return np.asarray(_log_density(likelihood, f, y))


@eqx.filter_jit
def _answers(approx, X, y, Xs):
    with nan_on_failure():
        post = approx.posterior(X, y)
        return approx.objective(X, y), *post.marginals(Xs), post.covariance(Xs)


def answers(approx, X, y, Xs):
    "The bound, and mean, variances and covariance of the posterior at Xs, in one program, as NumPy arrays."
    return tuple(map(np.asarray, _answers(approx, X, y, Xs)))


def log_evidence(cell, log_joint):
    return np.log(np.exp(log_joint).sum() * cell)


# divergences by partitions


@given(st.integers(0, 2**32 - 1))
def test_refining_a_partition_never_lowers_the_divergence(seed):
    rng = np.random.default_rng(seed)
    u, v = rng.dirichlet(np.full(24, 0.3)), rng.dirichlet(np.full(24, 0.3)) + 1e-12
    fine, coarse = rng.integers(0, 8, 24), rng.integers(0, 3, 8)     # atoms into 8 cells, those into 3

    def divergence(cells):
        a, b = np.bincount(cells, u), np.bincount(cells, v)
        return np.sum(a[a > 0] * np.log(a[a > 0] / b[a > 0]))
    assert 0 <= divergence(coarse[fine]) + 1e-12
    assert divergence(coarse[fine]) <= divergence(fine) + 1e-12
    assert divergence(fine) <= divergence(np.arange(24)) + 1e-12


# the conditional


@eqx.filter_jit
def conditionals(L, Kuf, Kuf2, variances, covariance, m, S_factor, whiten=True):
    marginals = conditional(L, Kuf, variances, m, S_factor, whiten)
    return marginals, conditional_covariance(L, Kuf, Kuf2, covariance, S_factor, whiten)


@pytest.mark.parametrize("whiten", [True, False])
def test_conditional_is_what_simulation_says(whiten):
    rng = np.random.default_rng(0)
    Z, Xs = np.array([[0.0], [1.0], [2.5]]), np.array([[0.3], [1.0], [4.0]])
    kernel, S = RBF(0.8, 1.3), 400_000
    Kuu, Kuf, Kff = (np.asarray(a) for a in (kernel(Z), kernel(Z, Xs), kernel(Xs)))
    L = np.linalg.cholesky(Kuu)
    m, R = rng.normal(size=3), np.tril(rng.normal(size=(3, 3))) * 0.5
    q = m + rng.normal(size=(S, 3)) @ R.T
    u = q @ L.T if whiten else q
    f = u @ np.linalg.solve(Kuu, Kuf) + rng.multivariate_normal(np.zeros(3), Kff - Kuf.T @ np.linalg.solve(Kuu, Kuf), S)
    (mean, var), cov = conditionals(L, Kuf, Kuf, np.diag(Kff), Kff, m, R, whiten)
    assert np.allclose(mean, f.mean(0), atol=6 * f.std(0).max() / np.sqrt(S))
    assert np.allclose(cov, np.cov(f.T), atol=0.02 * np.abs(cov).max()) and np.allclose(np.diag(cov), var)


def test_whitened_and_plain_coordinates_agree_and_outputs_are_a_loop():
    rng = np.random.default_rng(1)
    Z, Xs, Xs2, P = rng.uniform(0, 3, (5, 2)), rng.uniform(0, 3, (7, 2)), rng.uniform(0, 3, (4, 2)), 3
    kernel = Matern32(0.9, 1.4)
    together = np.asarray(kernel(np.concatenate([Z, Xs, Xs2])))
    L, Kuf, Kuf2 = np.linalg.cholesky(together[:5, :5]), together[:5, 5:12], together[:5, 12:]
    prior = Kuf, Kuf2, np.diag(together)[5:12], together[5:12, 12:]
    m, R = rng.normal(size=(5, P)), rng.normal(size=(P, 5, 5))
    (mean, var), cov = conditionals(L, *prior, m, R)
    assert mean.shape == var.shape == (7, P) and cov.shape == (P, 7, 4)
    for ours, plain in zip((mean, var, cov), jax.tree.leaves(conditionals(L, *prior, L @ m, L @ R, whiten=False))):
        assert np.allclose(ours, plain)
    for p in range(P):
        (one_mean, one_var), one_cov = conditionals(L, *prior, m[:, p], R[p])
        assert np.allclose(mean[:, p], one_mean) and np.allclose(var[:, p], one_var) and np.allclose(cov[p], one_cov)


def test_the_prior_conditional_cancels_from_the_divergence():
    X, rng = np.linspace(0, 3, 6)[:, None], np.random.default_rng(2)
    kernel, Z = Matern32(0.8, 1.2), X[[1, 4]]
    L = jnp.asarray(np.linalg.cholesky(kernel(Z)))
    m, R = rng.normal(size=2), np.array([[0.5, 0.0], [0.3, 0.4]])
    post = PointPosterior(unwrap(GP(kernel, Gaussian())), jnp.asarray(Z), L, jnp.asarray(m), jnp.asarray(R))
    everywhere = jax.jit(kl_divergence)(post.mean(X), post.covariance(X), np.zeros(6), kernel(X))
    assert np.isclose(everywhere, jax.jit(kl_from_cholesky)(m, R), rtol=1e-6)


# mean field


@pytest.mark.parametrize("likelihood", [Bernoulli(), Bernoulli("logit"), Gaussian(0.4), Student()], ids=["probit", "logit", "Gaussian", "Student"])
def test_tilted_moments_by_summation(likelihood):
    mean, var, y = np.array([-1.0, 0.3, 2.0]), np.array([0.3, 1.0, 0.6]), np.array([1.0, 0.0, 0.0])
    log_Z, mu, v = eqx.filter_jit(tilted_moments)(unwrap(likelihood), mean, var, y)
    for i in range(3):
        f = np.linspace(-10, 10, 40_001)
        w = np.exp(norm.logpdf(f, mean[i], np.sqrt(var[i])) + log_density(likelihood, f, y[i]))
        Z = w.sum() * (f[1] - f[0])
        w /= w.sum()
        assert np.allclose((log_Z[i], mu[i], v[i]), (np.log(Z), w @ f, w @ f**2 - (w @ f) ** 2), rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("likelihood", [Fine(), Fine("logit"), Gaussian(0.3)], ids=["probit", "logit", "Gaussian"])
def test_mean_field_objective_against_quadrature_in_the_plane(likelihood):
    gp, X, y, grid, cell, log_joint = two_points(likelihood)
    a = np.array([0.3, -0.5])
    approx = eqx.tree_at(lambda approx: approx.a, MeanField(gp, 2), free(a))
    spread = 1 / np.diag(np.linalg.inv(gp.kernel(X)))
    log_q = log_density(likelihood, grid, y) + norm.logpdf(grid, 0.2 + a, np.sqrt(spread))
    log_q = log_q.sum(1)
    log_q -= np.log(np.exp(log_q).sum() * cell)
    q = np.exp(log_q)
    bound = np.sum(q * (log_joint - log_q)) * cell
    ours, our_mean, our_var, our_covariance = answers(approx, X, y, X)
    assert np.isclose(ours, bound, atol=1e-6)
    mean = (q @ grid) * cell
    assert np.allclose(our_mean, mean, atol=1e-6)
    assert np.allclose(our_var, (q @ grid**2) * cell - mean**2, atol=1e-6)
    assert np.allclose(our_covariance[0, 1], 0.0, atol=1e-9)


def test_coordinate_ascent_climbs_to_what_fit_finds():
    X, y = problem(8)
    approx, bounds = MeanField(freeze(GP(Matern32(0.4), Bernoulli())), 8), []
    for _ in range(25):
        bounds.append(float(approx.objective(X, labels(y))))
        approx = approx.coordinate_ascent(X, labels(y), 4)
    assert np.all(np.diff(bounds) > -1e-12) and bounds[-1] > bounds[0] + 0.1
    fitted = fit(MeanField(freeze(GP(Matern32(0.4), Bernoulli())), 8), (X, labels(y)), tolerance=1e-13, progress=False).approx
    assert np.isclose(bounds[-1], fitted.objective(X, labels(y)), atol=1e-7)
    assert np.allclose(unwrap(approx.a), unwrap(fitted.a), atol=1e-4)
    slope = jax.jit(jax.grad(lambda a: eqx.tree_at(lambda s: s.a.unconstrained, approx, a).objective(X, labels(y))))(approx.a.unconstrained)
    assert np.abs(slope).max() < 1e-6


def test_mean_field_with_gaussian_noise_has_the_exact_mean_and_too_little_variance():
    X, y = problem(8)
    gp = GP(Matern32(0.4), Gaussian(0.1))
    evidence, mean, var, covariance = answers(Exact(gp), X, y, X)
    bound, our_mean, our_var, _ = answers(MeanField(gp, 8).coordinate_ascent(X, y, 500), X, y, X)
    assert np.allclose(our_mean, mean, atol=1e-6)                           # for a Gaussian target mean field finds the mean,
    precision = np.linalg.inv(covariance)
    assert np.allclose(our_var, 1 / np.diag(precision), rtol=1e-5)
    assert np.all(1 / np.diag(precision) < var)
    gap = 0.5 * (np.log(np.diag(precision)).sum() - np.linalg.slogdet(precision)[1])
    assert np.isclose(evidence - bound, gap, atol=1e-6)


def test_mean_field_samples_come_from_the_free_form():
    gp, X, y, grid, cell, _ = two_points(Bernoulli(), 9.0)
    post = MeanField(gp, 2).coordinate_ascent(X, y, 50).posterior(X, y)
    Xs = np.array([[0.0], [0.25], [0.5], [2.0]])
    f = np.asarray(post.sample(jax.random.key(0), Xs, 200_000))
    mean, var = post.marginals(Xs)
    assert f.shape == (200_000, 4)
    assert np.allclose(f.mean(0), mean, atol=0.03) and np.allclose(f.var(0), var, rtol=0.02)
    assert np.allclose(np.cov(f.T), post.covariance(Xs), atol=0.02 * np.max(var))
    t = np.linspace(-25, 25, 20_001)                                      # the first marginal is q_1 itself, with its skewness
    log_q = log_density(post.model.likelihood, t, y[0]) - 0.5 * (t - post.centre[0]) ** 2 / post.spread[0]
    q = np.exp(log_q - log_q.max())
    distribution = np.cumsum(q) / q.sum()
    probabilities = np.array([0.01, 0.1, 0.5, 0.9, 0.99])
    assert np.allclose(np.interp(np.quantile(f[:, 0], probabilities), t, distribution), probabilities, atol=0.004)
    assert np.isfinite(post.log_predictive_density(Xs, np.array([1.0, 0.0, 1.0, 0.0]))).all()


# the Gaussian approximations


@pytest.mark.parametrize("kind, likelihood", [(VGP, Bernoulli("logit")), (VGP, Student()), (WhitenedVGP, Bernoulli()), (WhitenedVGP, Student())],
                         ids=["VGP-logit", "VGP-Student", "whitened-probit", "whitened-Student"])
def test_the_bound_is_what_simulation_says_and_below_the_evidence(kind, likelihood):
    gp, X, y, grid, cell, log_joint = two_points(likelihood)
    approx = kind(gp, 2)
    trainable, rest = partition(approx)
    rng = np.random.default_rng(3)
    for _ in range(3):
        moved = eqx.combine(jax.tree.map(lambda x: np.asarray(x) + 0.7 * rng.normal(size=x.shape), trainable), rest)
        moved = eqx.tree_at(lambda a: a.model, moved, gp)
        bound, mean, _, cov = answers(moved, X, y, X)
        f = rng.multivariate_normal(mean, cov, 400_000)
        terms = (log_density(likelihood, f, y).sum(1) + multivariate_normal.logpdf(f, [0.2, 0.2], gp.kernel(X))
                 - multivariate_normal.logpdf(f, mean, cov))
        assert abs(terms.mean() - bound) < 5 * terms.std() / np.sqrt(len(f)) + 1e-4
        assert bound < log_evidence(cell, log_joint)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Bernoulli("logit")], ids=["probit", "logit"])
def test_both_forms_agree_at_the_optimum_and_meet_the_conditions_for_it(likelihood):
    X, y = problem()
    y, gp = labels(y), freeze(model(likelihood))
    full = fit(WhitenedVGP(gp, 12), (X, y), tolerance=1e-14, progress=False).approx
    small = VGP(gp, 12).fixed_point(X, y, 80, rate=0.5)
    assert np.isclose(full.objective(X, y), small.objective(X, y), atol=1e-8)
    fitted = fit(small, (X, y), tolerance=1e-12, progress=False).approx
    assert np.isclose(fitted.objective(X, y), small.objective(X, y), atol=1e-9)
    from_scratch = fit(VGP(gp, 12), (X, y), progress=False).approx
    assert np.isclose(from_scratch.objective(X, y), small.objective(X, y), atol=1e-4)
    Xs = np.linspace(-1, 5, 12)[:, None]  # as many as the data, to be asked by the same programs
    post = small.posterior(X)
    for a, b in zip(full.posterior(X).marginals(Xs), post.marginals(Xs)):
        assert np.allclose(a, b, atol=1e-5)
    mean, var = map(np.asarray, post.marginals(X))
    force, half_curvature = jax.jit(jax.grad(lambda m, v: unwrap(likelihood).variational_expectations(m, v, y).sum(), argnums=(0, 1)))(mean, var)
    K = np.asarray(gp.kernel(X))
    force, half_curvature = np.asarray(force), np.asarray(half_curvature)
    assert np.allclose(K @ force, mean - 0.2, atol=1e-8) and np.allclose(unwrap(small.precision), -2 * half_curvature, atol=1e-8)
    assert np.allclose(np.linalg.inv(post.covariance(X)), np.linalg.inv(K) + np.diag(-2 * half_curvature), rtol=1e-5)


@pytest.mark.parametrize("P", [None, 2])
def test_gaussian_noise_is_inferred_exactly(P):
    X, y = problem(P=P)
    gp, Xs = model(Gaussian(0.1)), np.linspace(-1, 5, 20)[:, None]
    exact = Exact(gp)
    fits = {"one step": VGP(gp, 12, P or 1).fixed_point(X, y)}
    if P is None:
        fits["fit"] = fit(VGP(freeze(gp), 12).fixed_point(X, y), (X, y), tolerance=1e-13, progress=False).approx
    else:
        fits["whitened"] = fit(WhitenedVGP(freeze(gp), 12, P), (X, y), tolerance=1e-15, steps=5000, progress=False).approx
    for name, approx in fits.items():
        assert np.isclose(approx.objective(X, y), exact.objective(X, y), atol=1e-8), name
        post, truth = approx.posterior(X, y), exact.posterior(X, y)
        for ours, theirs in zip((*post.marginals(Xs), post.covariance(Xs, X), *post.predict_y(Xs)),
                                (*truth.marginals(Xs), truth.covariance(Xs, X), *truth.predict_y(Xs))):
            assert ours.shape == theirs.shape and np.allclose(ours, theirs, atol=1e-6), name
        assert post.sample(jax.random.key(0), Xs, 3).shape == (3, 20, *y.shape[1:])


@pytest.mark.parametrize("kind", [VGP, WhitenedVGP])
def test_several_latent_functions_are_a_loop(kind):
    X, y = problem(P=3)
    y, gp = labels(y), freeze(model(Bernoulli()))
    rng = np.random.default_rng(4)
    approx, one = kind(gp, 12, 3), kind(gp, 12)
    trainable, rest = partition(approx)
    approx = eqx.combine(jax.tree.map(lambda x: np.asarray(x) + 0.3 * rng.normal(size=x.shape), trainable), rest)
    layer = lambda p: jax.tree.map(lambda x, like: x[:, p] if x.shape[:1] == (12,) else x[p], partition(approx)[0], partition(one)[0])
    alone = [eqx.combine(layer(p), partition(one)[1]) for p in range(3)]
    Xs = np.linspace(-1, 5, 6)[:, None]
    together, each = answers(approx, X, y, Xs), [answers(a, X, y[:, p], Xs) for p, a in enumerate(alone)]
    assert np.isclose(together[0], sum(one[0] for one in each))
    for p, one in enumerate(each):
        for ours, theirs in zip((together[1][:, p], together[2][:, p], together[3][p]), one[1:]):
            assert np.allclose(ours, theirs)
    if kind is VGP:
        assert np.isclose(approx.fixed_point(X, y, 3).objective(X, y), sum(a.fixed_point(X, y[:, p], 3).objective(X, y[:, p]) for p, a in enumerate(alone)))


def test_vgp_divergence_is_that_of_its_posterior():
    X, y = problem()
    approx = VGP(model(Bernoulli()), 12).fixed_point(X, labels(y), 3)
    post = approx.posterior(X)
    mean, var = post.marginals(X)
    expected = eqx.filter_jit(lambda likelihood, *at: likelihood.variational_expectations(*at))
    kl = np.sum(expected(unwrap(approx.model.likelihood), mean, var, labels(y))) - approx.objective(X, labels(y))
    S = np.asarray(post.S_factor) @ np.asarray(post.S_factor).T
    assert np.isclose(kl, kl_from_cholesky(post.m, np.linalg.cholesky(S)), rtol=1e-9)


APPROXIMATIONS = {"MeanField": MeanField, "VGP": VGP, "WhitenedVGP": WhitenedVGP}


@pytest.mark.parametrize("name,likelihood", [("MeanField", Bernoulli()), ("VGP", Bernoulli("logit")), ("WhitenedVGP", Gaussian(0.2))],
                         ids=["MeanField", "VGP", "WhitenedVGP"])
def test_single_precision_is_finite_and_close(name, likelihood):
    X, y = problem()
    y = labels(y) if isinstance(likelihood, Bernoulli) else y
    make = lambda: APPROXIMATIONS[name](GP(Matern32(0.5), cast(likelihood, jnp.result_type(float))), 12)
    value_and_slopes = eqx.filter_jit(eqx.filter_value_and_grad(lambda approx, X, y: approx.objective(X, y)))
    value64, gradient64 = value_and_slopes(make(), jnp.asarray(X), jnp.asarray(y))
    with jax.enable_x64(False):
        single, X32, y32 = make(), jnp.asarray(X), jnp.asarray(y)
        value, gradient = value_and_slopes(single, X32, y32)
        post = single.posterior(X32, y32)
        answers = (*post.marginals(X32), post.covariance(X32), post.sample(jax.random.key(0), X32))
    assert value.dtype == jnp.float32 and np.isclose(value, value64, rtol=1e-4)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(gradient64)):
        assert ours.dtype == jnp.float32 and np.allclose(ours, theirs, rtol=1e-2, atol=1e-3)
    assert all(a.dtype == jnp.float32 and np.isfinite(a).all() for a in answers)


@jax.jit
def bound_and_slopes(trainable, rest, X, y):
    with nan_on_failure():
        return jax.value_and_grad(lambda trainable: eqx.combine(trainable, rest).objective(X, y))(trainable)


@pytest.mark.parametrize("variance, stretch, close", [(1e4, 1.0, 1e-3), (1e6, 1.0, 0.1), (1e8, 1.0, 1.0), (1e6, 1e6, 1e-3), (1e8, 1e3, 1e-3)])
def test_wide_priors_in_single_precision(variance, stretch, close):
    "Where K is singular and 10⁸, rounding adds a white noise of ten to the model: the bound is another one, and a bound."
    X, y = problem(30)
    X, found = (stretch * X).astype(np.float32), {}
    for dtype in (np.float64, np.float32):
        approx = VGP(GP(RBF(0.8, variance), Bernoulli()), 30)
        approx = eqx.tree_at(lambda a: a.targets, approx, free(2 * labels(y) - 1))
        found[dtype] = bound_and_slopes(*partition(cast(approx, dtype)), X.astype(dtype), labels(y).astype(dtype))
    (double, slopes), (single, slopes32) = found.values()
    assert single < 0 and np.isclose(single, double, rtol=close)
    for a, b in zip(*map(jax.tree.leaves, (slopes, slopes32))):
        assert b.dtype == np.float32 and np.allclose(a, b, atol=10 * close * (1 + np.abs(a).max()))


def test_moments_from_either_side_of_what_the_data_tell():
    from gp_thesis.variational import made_up_regression

    (X, _), rng = problem(12), np.random.default_rng(0)
    K, precision, residual = np.asarray(Matern32(0.8, 1.5)(X)), np.exp(rng.uniform(-40, 12, 12)), rng.normal(size=12)
    S = K - K @ np.linalg.solve(K + np.diag(1 / precision), K)
    mean = K @ np.linalg.solve(K + np.diag(1 / precision), residual)
    ratio = np.linalg.solve(K, S)
    kl = 0.5 * (np.trace(ratio) - 12 - np.linalg.slogdet(ratio)[1] + mean @ np.linalg.solve(K, mean))
    offset, var, divergence = jax.jit(made_up_regression)(K, residual, precision)
    assert np.allclose(offset, mean, atol=1e-9) and np.allclose(var, np.diag(S), rtol=1e-7) and np.isclose(divergence, kl)


def test_the_fixed_point_climbs_whatever_the_prior():
    X, y = problem(30)
    approx = VGP(GP(RBF(0.8, 1e4), Bernoulli()), 30)
    walk = [approx, *(approx.fixed_point(X, labels(y), rounds) for rounds in (1, 2, 3, 5, 10, 30, 100, 600))]
    bounds, slopes = zip(*(bound_and_slopes(*partition(a), X, labels(y)) for a in walk))
    assert (np.diff(bounds) >= -1e-9).all() and bounds[-1] > bounds[0] + 10
    for site in (slopes[-1].targets, slopes[-1].precision):   # at the top it is level
        assert np.abs(site.unconstrained).max() < 1e-5


def test_a_fixed_point_without_a_bound_to_begin_with_says_what_to_do():
    X, y = problem(30)
    approx = eqx.tree_at(lambda a: a.targets, VGP(GP(RBF(0.8, 1e4), Bernoulli()), 30), free(np.full(30, 1e200)))
    with pytest.raises(eqx.EquinoxRuntimeError, match="no finite bound.*Begin with a new VGP.*lower the variance.*float64"):
        approx.fixed_point(X, labels(y), 3)


def test_mean_field_refuses_what_rounding_has_made():
    X, y = problem(60)
    value = lambda kernel, dtype: cast(MeanField(GP(kernel, Bernoulli()), 60), dtype).objective(X.astype(dtype), labels(y).astype(dtype))
    with pytest.raises(eqx.EquinoxRuntimeError, match="MeanField: the spread of a value.*float64.*Matern12"):
        value(RBF(0.8), np.float32)
    with nan_on_failure():
        assert np.isnan(value(RBF(0.8), np.float32)) and np.isnan(value(RBF(0.8), np.float64))
        assert np.isclose(value(Matern12(0.8), np.float32), value(Matern12(0.8), np.float64), rtol=1e-5)


@pytest.mark.parametrize("name", ["MeanField", "VGP"])
def test_parameters_are_made_in_the_dtype_of_the_model(name):
    X, y = (jnp.asarray(a, jnp.float32) for a in problem())
    approx = APPROXIMATIONS[name](cast(GP(Matern12(), Gaussian()), jnp.float32), 12)
    assert approx.objective(X, y).dtype == approx.posterior(X, y).mean(X).dtype == jnp.float32


@pytest.mark.parametrize("kind", [VGP, WhitenedVGP])
def test_points_that_coincide_do_no_harm(kind):
    X, y = problem()
    X[8:], y[8:] = X[:4], y[:4]
    y = labels(y)
    approx = fit(kind(freeze(model(Bernoulli())), 12), (X, y), steps=200, progress=False).approx
    assert np.isfinite(approx.objective(X, y)) and all(np.isfinite(a).all() for a in approx.posterior(X).marginals(X))


def test_hyperparameters_by_the_bound():
    X, y = problem()
    start = WhitenedVGP(GP(RBF(0.3, 1.0), Bernoulli(), ConstantMean(0.2)), 12)
    result = fit(start, (X, labels(y)), progress=False)
    assert result.converged and result.history.objective[-1] > fit(WhitenedVGP(freeze(start.model), 12), (X, labels(y)), progress=False).history.objective[-1]
    p, var = result.approx.posterior(X).predict_y(np.linspace(-5, 5, 7)[:, None])
    assert np.all((p > 0) & (p < 1)) and np.allclose(var, p * (1 - p))


@pytest.mark.parametrize("name", APPROXIMATIONS)
def test_mistakes_are_named(name):
    kind, (X, y) = APPROXIMATIONS[name], problem()
    approx = kind(model(Gaussian()), 12)
    with pytest.raises(ValueError, match="num_data must be 12, the rows of X, got 6"):
        approx.objective(X, y, num_data=6)
    with pytest.raises(ValueError, match="X must have the 12 rows .* got 11"):
        approx.objective(X[:-1], y[:-1])
    with pytest.raises(ValueError, match=r"y must have shape \(12,\).* got \(12, 2\)"):
        approx.objective(X, np.stack([y, y], 1))
    with pytest.raises(ValueError, match="same number of rows"):
        approx.objective(X, y[:-1])
    with pytest.raises(ValueError, match="X must be finite"):
        approx.posterior(np.full((12, 1), np.nan), y)
    with pytest.raises(ValueError, match="labels 0 or 1"):
        kind(model(Bernoulli()), 12).objective(X, y)
    with pytest.raises(ValueError, match="model must be a gp_thesis GP"):
        kind(RBF(), 12)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="num_data must be a positive integer"):
            kind(model(Gaussian()), wrong)
    with pytest.raises(ValueError, match="(sweeps|rounds) must be a positive integer"):
        approx.coordinate_ascent(X, y, 0) if kind is MeanField else VGP(model(Gaussian()), 12).fixed_point(X, y, 0)
    with pytest.raises(ValueError, match="rate must be above 0 and at most 1, got 1.5"):
        VGP(model(Gaussian()), 12).fixed_point(X, y, rate=1.5)
    if kind is not MeanField:
        with pytest.raises(ValueError, match="num_latents must be a positive integer"):
            kind(model(Gaussian()), 12, 0)
        with pytest.raises(ValueError, match="Softmax looks at 3 latent functions at once: num_latents must be that, got 2"):
            kind(model(Softmax(3)), 12, 2)
        assert kind(model(Softmax(3)), 12).latent_shape(12) == (12, 3)                # left out, it is what y needs
        with pytest.raises(ValueError, match=r"y must have shape \(12, 2\).* got \(12,\)"):
            kind(model(Gaussian()), 12, 2).objective(X, y)
        with pytest.raises(ValueError, match="X must have the 12 rows"):
            approx.posterior(X[:5])
    assert np.isfinite(approx.objective(X, y, num_data=12))
    assert isinstance(approx.posterior(X, y), PointPosterior)
