"""EP, generalised FITC and the two-stage bounds, against quadrature, orthant probabilities, plain loops and finite differences.

Compiling costs more than computing here: most tests have 20 rows, 4 inducing points and one tolerance, to share programs."""
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from scipy.special import ndtr
from scipy.stats import multivariate_normal, norm, poisson

from gp_thesis.ep import EP, GFITC, SparseMeanField, WeakBound, weak_bound
from gp_thesis.exact import GP, Exact
from gp_thesis.fitting import fit, negative_objective
from gp_thesis.inducing import InducingPoints, InducingPosterior, inducing_factor
from gp_thesis.kernels import RBF, ConstantMean, Matern32
from gp_thesis.likelihoods import Bernoulli, Gaussian, Poisson, RobustMax, StudentT
from gp_thesis.linalg import nan_on_failure
from gp_thesis.optimisers import cut_like, end_to_end, loss_and_gradient
from gp_thesis.parameters import cast, freeze, partition, unwrap
from gp_thesis.sparse import FITC, uncollapsed_bound
from gp_thesis.variational import VGP


class Logit(Bernoulli):
    points = 60


TIGHT = dict(tolerance=1e-10)
XS = np.linspace(-1, 5, 9)[:, None]


def problem(N=20, D=1, seed=0):
    "Inputs, and values of a curve with noise."
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 4, (N, D))
    return X, np.sin(2 * X).sum(1) + 0.3 * rng.normal(size=N)


def labels(y):
    return (y > 0).astype(float)


def model(likelihood=Bernoulli(), variance=3.0, lengthscale=0.8):
    return GP(RBF(lengthscale, variance), likelihood, ConstantMean(0.2))


def covariance(gp, X, Z):
    "k(X, Z) of one column, for RBF."
    kernel = unwrap(gp.kernel)
    return float(kernel.variance) * np.exp(-0.5 * ((X - Z.T) / float(kernel.lengthscale)) ** 2)


def matrices(gp, X):
    "Mean and covariance of the prior at X."
    return np.full(len(X), float(unwrap(gp.mean).value)), covariance(gp, X, X)


def orthant(mean, K, y):
    """log p(y) of the probit model with three rows, as the probability that a Gaussian with covariance K + I has the signs of
    the labels: an integral over the first, by Gauss and Legendre, of that of the other two, which SciPy knows to rounding."""
    sign = 2 * y - 1
    m, S = sign * mean, sign[:, None] * (K + np.eye(3)) * sign
    nodes, weights = np.polynomial.legendre.leggauss(200)
    sd = np.sqrt(S[0, 0])
    start, end = max(0, m[0] - 9 * sd), max(0, m[0]) + 9 * sd
    first = start + (end - start) * (nodes + 1) / 2
    others = m[1:] + np.outer(first - m[0], S[0, 1:] / S[0, 0])
    both = multivariate_normal(np.zeros(2), S[1:, 1:] - np.outer(S[0, 1:], S[0, 1:]) / S[0, 0]).cdf(others)
    return np.log(weights @ (norm.pdf(first, m[0], sd) * both) * (end - start) / 2)


def explained(gp, X, Z):
    "Q = K_fu K_uu⁻¹ K_uf."
    return covariance(gp, X, Z) @ np.linalg.solve(covariance(gp, Z, Z), covariance(gp, Z, X))


def by_quadrature(gp, X, log_density, points=60):
    "log p(y), posterior mean and covariance on three inputs, by a tensor product of Gauss-Hermite rules."
    mean, K = matrices(gp, X)
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    grid = np.stack(np.meshgrid(nodes, nodes, nodes, indexing="ij"), -1).reshape(-1, 3)
    prior = np.einsum("i,j,k->ijk", weights, weights, weights).ravel() / weights.sum() ** 3
    f = mean + grid @ np.linalg.cholesky(K).T
    joint = prior * np.exp(log_density(f).sum(1))
    Z = joint.sum()
    mean = joint @ f / Z
    return np.log(Z), mean, (f - mean).T @ (joint[:, None] * (f - mean)) / Z


def textbook_ep(mean, K, y, sweeps=60):
    "Sequential EP for the probit likelihood with explicit matrices, in the way of Rasmussen and Williams, algorithm 3.5."
    sign = 2 * y - 1
    tau, nu = np.zeros(len(y)), np.zeros(len(y))                     # sites in f less the prior mean
    refresh = lambda: np.linalg.solve(np.eye(len(y)) + K * tau, K)    # (K⁻¹ + T)⁻¹ where K may be singular
    cavity = lambda n, S: (1 / S[n, n] - tau[n], (S @ nu)[n] / S[n, n] - nu[n])
    for _ in range(sweeps):
        for n in range(len(y)):
            S = refresh()
            t, b = cavity(n, S)
            m, v = b / t + mean[n], 1 / t
            z = sign[n] * m / np.sqrt(1 + v)
            ratio = norm.pdf(z) / ndtr(z)
            new_mean = m + sign[n] * v * ratio / np.sqrt(1 + v) - mean[n]
            new_var = v - v**2 * ratio / (1 + v) * (z + ratio)
            tau[n], nu[n] = 1 / new_var - t, new_mean / new_var - b
    S = refresh()
    log_Z = -0.5 * np.linalg.slogdet(np.eye(len(y)) + K * tau)[1] + 0.5 * nu @ S @ nu
    for n in range(len(y)):
        t, b = cavity(n, S)
        m, v = b / t, 1 / t
        log_Z += norm.logcdf(sign[n] * (m + mean[n]) / np.sqrt(1 + v))
        log_Z -= 0.5 * np.log(t / (t + tau[n])) + 0.5 * ((b + nu[n]) ** 2 / (t + tau[n]) - b**2 / t)
    return log_Z, S @ nu + mean, S


def value_and_gradient(approx, X, y, move=0.0):
    "The objective and its gradient in all parameters end to end, moved or not, by the program of `fit`."
    trainable, rest = partition(approx)
    moved = cut_like(trainable, end_to_end(trainable) + move)
    value, gradient = loss_and_gradient(negative_objective, moved, rest, (X, y))
    return -float(value), -end_to_end(gradient)


def objective(approx, X, y):
    return value_and_gradient(approx, X, y)[0]


@eqx.filter_jit
def answers(approx, X, y, *methods):
    "What these methods return, by one program: it takes less time to compile than one for each."
    with nan_on_failure():
        return [getattr(approx, method)(X, y) for method in methods]


def gradient_and_differences(approx, X, y, step=1e-4):
    "The gradient in all parameters, and central differences of the whole objective."
    gradient = value_and_gradient(approx, X, y)[1]
    moved = lambda direction: value_and_gradient(approx, X, y, step * direction)[0]
    differences = [(8 * (moved(e) - moved(-e)) - moved(2 * e) + moved(-2 * e)) / (12 * step) for e in np.eye(len(gradient))]
    return gradient, np.array(differences)


# expectation propagation


def test_three_points_against_quadrature():
    X, y = np.array([[0.0], [0.6], [1.5]]), np.array([1.0, 0.0, 1.0])
    gp = model()
    log_Z, mean, cov = by_quadrature(gp, X, lambda f: norm.logcdf((2 * y - 1) * f))
    assert np.isclose(log_Z, orthant(*matrices(gp, X), y), rtol=0, atol=1e-6)  # the two truths agree
    post, vgp = EP(gp).posterior(X, y), VGP(gp, 3).fixed_point(X, y, 100)
    error = abs(float(EP(gp).objective(X, y)) - log_Z)
    assert error < 2e-3 and error < 0.2 * abs(float(vgp.objective(X, y)) - log_Z)
    latent_mean, vgp_mean = (np.asarray(q.marginals(X)[0]) for q in (post, vgp.posterior(X)))
    assert np.allclose(latent_mean, mean, atol=0.01) and np.allclose(post.covariance(X), cov, atol=0.03)
    assert np.abs(latent_mean - mean).max() < 0.3 * np.abs(vgp_mean - mean).max()


@pytest.mark.parametrize("likelihood, log_density", [(Bernoulli(), norm.logcdf), (Logit("logit"), lambda f: -np.logaddexp(0, -f))],
                         ids=["probit", "logit"])
def test_points_far_apart_are_exact(likelihood, log_density):
    X, y, gp = np.array([[0.3], [1000.0], [2000.0]]), np.array([0.0, 1.0, 0.0]), model(likelihood)
    f = np.linspace(-15, 15, 60001)
    joint = norm.pdf(f, 0.2, np.sqrt(3.0)) * np.exp(log_density((2 * y[:, None] - 1) * f))
    Z = joint.sum(1) * (f[1] - f[0])
    mean = joint @ f / joint.sum(1)
    var = (joint * (f - mean[:, None]) ** 2).sum(1) / joint.sum(1)
    value, post, point = EP(gp).objective(X, y), EP(gp).posterior(X, y), EP(gp).fixed_point(X, y)
    assert point.rounds <= 3 and np.allclose(point.mean, 0.2) and np.allclose(point.var, 3.0)
    assert np.isclose(value, np.log(Z).sum(), rtol=0, atol=1e-6)
    assert np.allclose(post.marginals(X), [mean, var], atol=1e-5)


def test_the_textbook_algorithm_ends_at_the_same_place():
    X, y = problem()
    gp = model()
    log_Z, mean, cov = textbook_ep(*matrices(gp, X), labels(y))
    approx = EP(gp, **TIGHT)
    assert np.isclose(objective(approx, X, labels(y)), log_Z, rtol=0, atol=1e-8)
    post = approx.posterior(X, labels(y))
    assert np.allclose(post.mean(X), mean, rtol=0, atol=1e-7) and np.allclose(post.covariance(X), cov, rtol=0, atol=1e-7)


@pytest.mark.parametrize("inducing", [False, True])
def test_sequential_and_parallel_rounds_meet(inducing):
    X, y = problem()
    make = (lambda **s: GFITC(model(), InducingPoints(X[::5]), **s, **TIGHT)) if inducing else (lambda **s: EP(model(), **s, **TIGHT))
    first = make().fixed_point(X, labels(y))
    value, second = answers(make(sequential=True), X, labels(y), "objective", "fixed_point")
    assert max(first.misfit, second.misfit) <= 1e-9 and second.rounds <= first.rounds
    assert np.allclose(first.sites.precision, second.sites.precision, rtol=0, atol=1e-7)
    assert np.isclose(objective(make(), X, labels(y)), value, rtol=0, atol=1e-9)


def test_a_slower_rate_takes_longer_to_the_same_place():
    X, y = problem()
    fast = EP(model(), **TIGHT)
    value, slow = answers(EP(model(), rate=0.5, **TIGHT), X, labels(y), "objective", "fixed_point")
    assert slow.rounds > fast.fixed_point(X, labels(y)).rounds
    assert np.isclose(objective(fast, X, labels(y)), value, rtol=0, atol=1e-8)
    assert EP(model(), rounds=2).fixed_point(X, labels(y)).rounds == 2


@examples(max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_evidence_knows_no_order_and_no_sign(seed):
    X, y = problem(seed=seed)
    order = np.random.default_rng(seed).permutation(len(X))
    gp, mirrored = model(), GP(RBF(0.8, 3.0), Bernoulli(), ConstantMean(-0.2))
    value = objective(EP(gp, **TIGHT), X, labels(y))
    assert np.isclose(value, objective(EP(gp, **TIGHT), X[order], labels(y)[order]), rtol=0, atol=1e-8)
    assert np.isclose(value, objective(EP(mirrored, **TIGHT), X, 1 - labels(y)), rtol=0, atol=1e-8)


def test_gaussian_noise_is_exact_regression():
    X, y = problem()
    gp = model(Gaussian(0.1))
    value, post, point = answers(EP(gp), X, y, "objective", "posterior", "fixed_point")
    exact = Exact(gp).posterior(X, y)
    assert np.isclose(value, Exact(gp).objective(X, y), rtol=0, atol=1e-8)
    assert point.rounds <= 2
    assert np.allclose(post.covariance(XS), exact.covariance(XS), rtol=0, atol=1e-8)
    assert np.allclose(post.mean(XS), exact.mean(XS), rtol=0, atol=1e-8)


def test_counts_on_three_points_against_quadrature():
    X, y, gp = np.array([[0.0], [0.6], [1.5]]), np.array([2.0, 0.0, 5.0]), model(Poisson(), 1.0)
    log_Z, mean, cov = by_quadrature(gp, X, lambda f: poisson.logpmf(y, np.exp(f)))
    value, post = answers(EP(gp), X, y, "objective", "posterior")
    assert np.isclose(value, log_Z, atol=2e-3)
    assert np.allclose(post.mean(X), mean, atol=5e-3) and np.allclose(post.covariance(X), cov, atol=0.01)


@pytest.mark.parametrize("sequential", [False, True])
def test_outliers_get_negative_precisions_and_proper_cavities(sequential):
    X, y = problem(40)
    y[[5, 17, 30]] += [6.0, -8.0, 5.0]
    approx = EP(model(StudentT(0.3)), sequential=sequential)
    value, post, point = answers(approx, X, y, "objective", "posterior", "fixed_point")
    assert point.misfit <= 1e-6 and (np.asarray(point.sites.precision)[[5, 17, 30]] < 0.05).all()
    assert np.asarray(point.sites.precision).min() < 0 and (np.asarray(point.var) > 0).all()
    clean = Exact(model(Gaussian(0.1))).posterior(*(np.delete(a, [5, 17, 30], axis=0) for a in (X, y)))
    assert np.abs(np.asarray(post.mean(X)) - np.asarray(clean.mean(X))).max() < 0.3
    assert np.isfinite(value)


def outliers(seed, N=40):
    "A curve with little noise, of which every tenth point is somewhere else."
    rng = np.random.default_rng(seed)
    X, far = rng.uniform(0, 5, (N, 1)), rng.choice(N, N // 10, replace=False)
    y = np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=N)
    y[far] += 5 * rng.normal(size=len(far))
    return X, y


def heavy(scale, *prior):
    return EP(model(StudentT(scale), *prior))


def test_where_no_fixed_point_is_found_nothing_is_returned():
    (X, y), approx = outliers(1), heavy(0.02, 5.0, 0.3)
    value, post, point = answers(approx, X, y, "objective", "posterior", "fixed_point")
    assert np.isnan(value) and np.isnan(post.m).all() and point.misfit > 1e-3  # which shows what is left
    with pytest.raises(eqx.EquinoxRuntimeError, match="EP: no fixed point in 200 rounds.*StudentT with a larger scale.*VGP"):
        approx.posterior(X, y)
    with pytest.raises(FloatingPointError, match="after 0 steps .EP: no fixed point"):
        fit(approx, (X, y), progress=False)


@pytest.mark.parametrize("scale, seed", [(0.05, 0), (0.1, 1), (0.3, 2)])
def test_a_fit_beside_heavy_tails_ends_at_a_fixed_point(scale, seed):
    X, y = outliers(seed)
    result = fit(heavy(scale, 1.0), (X, y), steps=60, progress=False)
    assert np.isfinite(result.history.objective).all() and result.history.objective[0] < result.history.objective[-1] < 100
    value, post, point = answers(result.approx, X, y, "objective", "posterior", "fixed_point")
    assert point.misfit <= 1e-6 and np.isclose(value, result.history.objective[-1])
    assert np.sqrt(np.mean((np.asarray(post.L @ post.m) + unwrap(result.approx.model.mean).value - np.sin(2 * X[:, 0])) ** 2)) < 0.15


def test_too_few_rounds_find_nothing_and_a_fit_stays_where_they_do():
    X, y = problem()
    value, point = answers(EP(model(), rounds=6), X, labels(y), "objective", "fixed_point")
    assert np.isnan(value) and 1e-6 < point.misfit < 1e-3
    result = fit(EP(model(variance=0.1), rounds=6), (X, labels(y)), progress=False)     # the evidence is larger where six do not do
    assert result.approx.fixed_point(X, labels(y)).misfit <= 1e-6 and not result.converged


def test_the_evidence_is_no_number_from_where_the_fixed_point_is_lost():
    X, y = outliers(1)
    values = np.array([answers(heavy(scale, 5.0, 0.3), X, y, "objective", "posterior", "fixed_point")[0] for scale in (0.3, 0.15, 0.07, 0.03, 0.01)])
    assert np.isfinite(values[:2]).all() and np.isnan(values[-1]) and (values[np.isfinite(values)] < 100).all()


@pytest.mark.parametrize("kernel", [RBF(0.8, 1e6), RBF(200.0, 1e5), RBF(1e-3, 100.0), RBF(1e4, 1e-10), RBF(0.5, 1e4)])
def test_extreme_hyperparameters_do_no_harm(kernel):  # with 200, four inducing points make a singular matrix
    X, y = problem()
    gp, Z = GP(kernel, Bernoulli(), ConstantMean()), InducingPoints(X[::5])
    for approx in (EP(gp, **TIGHT), GFITC(gp, Z, **TIGHT), SparseMeanField(gp, Z), WeakBound(gp, Z)):
        value, gradient = value_and_gradient(approx, X, labels(y))
        assert np.isfinite(value) and value < 0 and np.isfinite(gradient).all()
    assert EP(gp, **TIGHT).fixed_point(X, labels(y)).misfit <= 1e-6


def test_rows_may_repeat():
    X, y = problem(10)
    twice, y2 = np.repeat(X, 2, axis=0), np.repeat(labels(y), 2)
    assert np.isfinite(objective(EP(model(), **TIGHT), twice, y2))
    assert EP(model(), **TIGHT).fixed_point(twice, y2).misfit <= 1e-6


@pytest.mark.parametrize("sparse, likelihood, target", [(True, StudentT(0.3), lambda y: y), (False, Poisson(), lambda y: np.round(np.exp(y)))],
                         ids=["Student", "counts"])
def test_gradients_of_the_converged_evidence(sparse, likelihood, target):
    X, y = problem(15)
    gp = GP(Matern32(0.8, 1.5), likelihood, ConstantMean(0.2))
    settings = dict(tolerance=1e-11, rounds=500)  # derivatives hold the nodes of the quadrature: it must be exact
    Z = np.linspace(0.2, 3.8, 4)[:, None]
    approx = GFITC(gp, InducingPoints(Z), **settings) if sparse else EP(gp, **settings)
    gradient, differences = gradient_and_differences(approx, X, target(y))
    assert len(gradient) == 3 + (4 if sparse else 0) + isinstance(likelihood, StudentT)
    assert np.allclose(gradient, differences, rtol=1e-5, atol=1e-6) and np.abs(gradient).min() > 1e-4


def test_fit_raises_the_evidence_above_the_variational_one():
    X, y = problem()
    result = fit(EP(model(), **TIGHT), (X, labels(y)))
    assert result.converged and result.history.objective[-1] > result.history.objective[0] + 0.1
    vgp = VGP(result.approx.model, 20).fixed_point(X, labels(y), 200)
    assert objective(result.approx, X, labels(y)) > float(vgp.objective(X, labels(y)))


def test_single_precision():
    X, y = problem()
    X32, y32 = X.astype(np.float32), labels(y).astype(np.float32)
    Z = InducingPoints(X[::5])
    for approx in (EP(model(), **TIGHT), GFITC(model(), Z, **TIGHT), SparseMeanField(model(), Z), WeakBound(model(), Z)):
        value, post = answers(cast(approx, jnp.float32), X32, y32, "objective", "posterior")
        assert value.dtype == jnp.float32 and np.isclose(value, objective(approx, X, labels(y)), atol=2e-2)
        assert post.mean(X32).dtype == jnp.float32


# generalised FITC


def test_all_inputs_as_inducing_points_is_ep():
    X, y = problem()
    full = EP(model(), **TIGHT)
    value, post = answers(GFITC(model(), InducingPoints(X), **TIGHT), X, labels(y), "objective", "posterior")
    assert np.isclose(objective(full, X, labels(y)), value, rtol=0, atol=1e-8)
    for a, b in zip(full.posterior(X, labels(y)).marginals(X), post.marginals(X)):
        assert np.allclose(a, b, rtol=0, atol=1e-8)


def test_gaussian_noise_is_fitc():
    X, y = problem()
    gp, Z = model(Gaussian(0.1)), InducingPoints(X[::5])
    value, ours = answers(GFITC(gp, Z), X, y, "objective", "posterior")
    expected, theirs = answers(FITC(gp, Z), X, y, "objective", "posterior")
    assert np.isclose(value, expected, rtol=0, atol=1e-8)
    assert np.allclose(ours.mean(XS), theirs.mean(XS), rtol=0, atol=1e-8) and np.allclose(ours.covariance(XS), theirs.covariance(XS), rtol=0, atol=1e-8)


def test_generalised_fitc_is_ep_with_another_matrix():
    X, y = problem()
    gp, Z = model(), X[::5]
    mean, K = matrices(gp, X)
    Q = explained(gp, X, Z)
    log_Z, latent, _ = textbook_ep(mean, Q + np.diag(np.diag(K - Q)), labels(y))
    approx = GFITC(gp, InducingPoints(Z), **TIGHT)
    assert np.isclose(objective(approx, X, labels(y)), log_Z, rtol=0, atol=1e-8)
    point = jax.tree.map(np.asarray, approx.fixed_point(X, labels(y)))
    q = 1 / point.var + point.sites.precision                       # marginals of z = E[f | u] from cavities and sites
    explained_part = mean + Q @ np.linalg.solve(Q + np.diag(np.diag(K - Q)), latent - mean)
    assert np.allclose((point.mean / point.var + point.sites.shift) / q, explained_part, rtol=0, atol=1e-6)


# the two-stage bounds


def random_problem(seed, N=3, M=3):
    rng = np.random.default_rng(seed)
    X, Z = rng.uniform(0, 4, (N, 1)), rng.uniform(0, 4, (M, 1))
    gp = GP(RBF(rng.uniform(0.3, 3), rng.uniform(0.1, 20)), Bernoulli(), ConstantMean(rng.normal()))
    return gp, X, rng.integers(0, 2, N).astype(float), Z


@examples(max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_bounds_lie_below_the_evidence(seed):
    gp, X, y, Z = random_problem(seed)
    mean, K = matrices(gp, X)
    truth = orthant(mean, K, y)
    first_stage = orthant(mean, explained(gp, X, Z), y) - 0.5 * np.trace(K - explained(gp, X, Z))
    for kind in (SparseMeanField, WeakBound):
        assert float(kind(gp, InducingPoints(X)).objective(X, y)) <= truth + 1e-6
        assert float(kind(gp, InducingPoints(Z)).objective(X, y)) <= first_stage + 1e-6 <= truth + 2e-6


def test_bounds_are_not_far_below():
    X, y = np.array([[0.0], [0.6], [1.5]]), np.array([1.0, 0.0, 1.0])
    truth = orthant(*matrices(model(), X), y)
    assert 0 < truth - float(SparseMeanField(model(), InducingPoints(X)).objective(X, y)) < 0.1
    assert 0.1 < truth - float(WeakBound(model(), InducingPoints(X)).objective(X, y)) < 1


def test_mean_field_bound_is_what_its_factors_give():
    gp, X, y, Z = random_problem(3, 20, 4)
    approx = SparseMeanField(gp, InducingPoints(Z))
    centre, spread = (np.asarray(a) for a in approx.factors(X, y))
    mean, K = matrices(gp, X)
    Q = explained(gp, X, Z)
    S_inv = np.linalg.inv(Q + np.eye(20))
    assert np.allclose(spread, 1 / np.diag(S_inv))
    width = 0.002
    g = (2 * y[:, None] - 1) * width * (np.arange(20000) + 0.5)       # each on its side of zero

    def by_summation(centre):
        "E_q[log N(g | mean, Q + I) - log q(g)] - tr(K - Q) / 2 with moments and entropies from sums on a grid."
        q = norm.pdf(g, centre[:, None], np.sqrt(spread)[:, None])
        q /= q.sum(1, keepdims=True) * width
        expect = lambda h: (q * h).sum(1) * width
        mu, second = expect(g), expect(g**2)
        entropy = -expect(np.log(np.where(q > 0, q, 1))).sum()
        r = mu - mean
        log_prior = -0.5 * (r @ S_inv @ r + np.diag(S_inv) @ (second - mu**2) + np.linalg.slogdet(2 * np.pi * (Q + np.eye(20)))[1])
        return log_prior + entropy - 0.5 * np.trace(K - Q), mu, second - mu**2

    best, mu, v = by_summation(centre)
    assert np.isclose(best, objective(approx, X, y), atol=1e-3)
    assert np.allclose(centre, mu - spread * (S_inv @ (mu - mean)), atol=1e-3)     # each is the best for the others
    rng = np.random.default_rng(0)
    assert all(by_summation(centre + 0.3 * rng.normal(size=20))[0] < best for _ in range(10))
    post = approx.posterior(X, y)                                                  # u given g, mixed over q(g)
    Kuf, Kuu = covariance(gp, Z, X), covariance(gp, Z, Z)
    assert np.allclose(post.inducing_mean, Kuf @ S_inv @ (mu - mean), atol=1e-3)
    assert np.allclose(post.inducing_covariance, Kuu - Kuf @ (S_inv - S_inv * v @ S_inv) @ Kuf.T, atol=1e-3)


@eqx.filter_jit
def both_bounds(gp, Z, m, S_factor, X, y):
    "The weak bound, the other, the sum of the variances, and the weak bound from each pair of rows."
    inducing = InducingPoints(Z)
    q = unwrap(InducingPosterior(gp, inducing, inducing_factor(unwrap(inducing), unwrap(gp.kernel)).L, m, S_factor))
    pairs = [weak_bound(q, X[i:i + 2], y[i:i + 2], num_data=len(X)) for i in range(0, len(X), 2)]
    return weak_bound(q, X, y), uncollapsed_bound(q, X, y), q.latent_marginals(X)[1].sum(), jnp.stack(pairs)


@examples(max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_the_weak_bound_is_below_the_bound_that_averages_the_log_density(seed):
    gp, X, y, Z = random_problem(seed, 8, 3)
    rng = np.random.default_rng(seed)
    results = both_bounds(gp, Z, rng.normal(size=3), np.tril(rng.normal(size=(3, 3))), X, y)
    weak, strong, variances, pairs = (np.asarray(a) for a in results)
    assert weak < strong < weak + 0.5 * variances
    assert np.isclose(np.mean(pairs), weak)


def test_the_weak_optimum():
    X, y = problem()
    y = labels(y)
    approx = WeakBound(model(), InducingPoints(X[::5]))
    q = approx.posterior(X, y)
    at = lambda m, S_factor: weak_bound(eqx.tree_at(lambda q: (q.m, q.S_factor), q, (m, S_factor)), X, y)
    value, slopes = jax.jit(jax.value_and_grad(at, argnums=(0, 1)))(q.m, q.S_factor)
    assert np.isclose(value, objective(approx, X, y), rtol=0, atol=1e-8)
    assert max(np.abs(slopes[0]).max(), np.abs(np.triu(slopes[1])).max()) < 1e-6
    bound, full = answers(WeakBound(model(), InducingPoints(X)), X, y, "objective", "posterior")
    exact = Exact(model(Gaussian(1.0))).posterior(X, y)                            # S⁻¹ = K⁻¹ + I whatever the labels
    assert np.allclose(full.covariance(XS), exact.covariance(XS), rtol=0, atol=1e-6)
    vgp = VGP(model(), 20).fixed_point(X, y, 200)
    assert bound < vgp.objective(X, y) < objective(EP(model(), **TIGHT), X, y) + 0.01


@pytest.mark.parametrize("kind, frozen", [(SparseMeanField, False), (WeakBound, False), (partial(GFITC, **TIGHT), True)],
                         ids=["mean field", "weak", "GFITC"])
def test_fit_improves_the_bounds_and_leaves_frozen_parts(kind, frozen):
    X, y = problem()
    Z = InducingPoints(X[::5])
    result = fit(kind(model(), freeze(Z) if frozen else Z), (X, labels(y)), steps=30)
    assert result.history.objective[-1] > result.history.objective[0] + 0.3
    predicted = np.asarray(result.approx.posterior(X, labels(y)).predict_y(X)[0])
    assert np.mean((predicted > 0.5) == (y > 0)) > 0.8
    fitted = unwrap(result.approx)
    assert np.array_equal(fitted.inducing.Z, X[::5]) == frozen and float(fitted.model.kernel.lengthscale) != 0.8


# what users can get wrong


ALL = [lambda gp, Z: EP(gp), GFITC, SparseMeanField, WeakBound]


@pytest.mark.parametrize("make", ALL, ids=["EP", "GFITC", "mean field", "weak"])
def test_unusable_data(make):
    X, y = problem(6, 2)
    approx = make(model(), InducingPoints(X[:3]))
    for bad_X, bad_y, message in [(X[:, 0], labels(y), r"X must have shape \(N, D\)"), (X, y, "labels 0 or 1"), (X, labels(y)[:4], "same number of rows"),
                                  (X, np.stack([labels(y)] * 2, 1), r"y must have shape \(6,\)"), (X * np.nan, labels(y), "finite"),
                                  (X[:0], labels(y)[:0], "at least one row")]:
        for call in (approx.objective, approx.posterior):
            with pytest.raises(ValueError, match=message):
                call(bad_X, bad_y)
    with pytest.raises(ValueError, match="num_data must be 6"):
        approx.objective(X, labels(y), num_data=12)


@pytest.mark.parametrize("make", ALL[1:], ids=["GFITC", "mean field", "weak"])
def test_unusable_inducing_variables(make):
    X, y = problem(6, 2)
    with pytest.raises(ValueError, match="inducing must be"):
        make(model(), X)
    with pytest.raises(ValueError, match="3 columns"):
        make(model(), InducingPoints(np.ones((2, 3)))).objective(X, labels(y))
    with pytest.warns(UserWarning, match="7 inducing variables for 6 rows"):      # traced, not compiled
        jax.eval_shape(make(model(), InducingPoints(np.random.default_rng(0).normal(size=(7, 2)))).objective, X, labels(y))


@pytest.mark.parametrize("settings, message", [(dict(rate=0.0), "rate"), (dict(rate=1.5), "rate"), (dict(tolerance=0.0), "tolerance"),
                                               (dict(rounds=0), "rounds"), (dict(rounds=2.5), "rounds")])
def test_unusable_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        EP(model(), **settings)


def test_unusable_models():
    for kind in (EP, lambda gp: GFITC(gp, InducingPoints(np.ones((2, 1))))):
        with pytest.raises(ValueError, match="must be a gp_thesis GP"):
            kind(RBF())
    for kind in (SparseMeanField, WeakBound):
        for gp in (model(Bernoulli("logit")), model(Gaussian()), RBF()):
            with pytest.raises(ValueError, match="probit"):
                kind(gp, InducingPoints(np.ones((2, 1))))
    with pytest.raises(ValueError, match="probit"):
        weak_bound(EP(model(Logit("logit"))).posterior(np.ones((3, 1)), np.ones(3)), np.ones((3, 1)), np.ones(3))
