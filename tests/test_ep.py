"EP, generalised FITC and the two-stage bounds, against quadrature, orthant probabilities, plain loops and finite differences."
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from scipy.special import ndtr
from scipy.stats import multivariate_normal, norm

from gp_thesis.ep import EP, GFITC, SparseMeanField, WeakBound, weak_bound
from gp_thesis.exact import GP, Exact
from gp_thesis.fitting import fit
from gp_thesis.inducing import InducingPoints, InducingPosterior, inducing_factor
from gp_thesis.kernels import RBF, ConstantMean, Matern32
from gp_thesis.likelihoods import Bernoulli, Gaussian, Likelihood, Poisson, RobustMax
from gp_thesis.linalg import nan_on_failure
from gp_thesis.parameters import Parameter, cast, freeze, partition, positive, unwrap
from gp_thesis.sparse import FITC, uncollapsed_bound
from gp_thesis.variational import VGP


class Student(Likelihood):
    "Heavy tails: a log density that is not concave."
    scale: Parameter
    points = 150

    def __init__(self, scale=0.3):
        self.scale = positive(scale)

    def log_density(self, f, y):
        return jax.scipy.stats.t.logpdf(y, 4.0, loc=f, scale=self.scale)


class Logit(Bernoulli):
    points = 60


def problem(N=12, D=1, seed=0):
    "Inputs, and values of a curve with noise."
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 4, (N, D))
    return X, np.sin(2 * X).sum(1) + 0.3 * rng.normal(size=N)


def labels(y):
    return (y > 0).astype(float)


def model(likelihood=Bernoulli(), variance=3.0, lengthscale=0.8):
    return GP(RBF(lengthscale, variance), likelihood, ConstantMean(0.2))


def matrices(gp, X):
    "Mean and covariance of the prior at X."
    return np.asarray(gp.mean(X)), np.asarray(gp.kernel(X))


def orthant(mean, K, y):
    "log p(y) of the probit model as the probability that a Gaussian with covariance K + I has the signs of the labels."
    sign = 2 * y - 1
    distribution = multivariate_normal(np.zeros(len(y)), sign[:, None] * (K + np.eye(len(y))) * sign, maxpts=1_000_000, abseps=1e-9, releps=1e-9)
    return np.log(distribution.cdf(sign * mean))


def explained(gp, X, Z):
    "Q = K_fu K_uu⁻¹ K_uf."
    return np.asarray(gp.kernel(X, Z)) @ np.linalg.solve(np.asarray(gp.kernel(Z)), np.asarray(gp.kernel(Z, X)))


def by_quadrature(gp, X, y, points=60):
    "log p(y), posterior mean and covariance on three inputs, by a tensor product of Gauss-Hermite rules."
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    grid = np.stack(np.meshgrid(nodes, nodes, nodes, indexing="ij"), -1).reshape(-1, 3)
    prior = np.einsum("i,j,k->ijk", weights, weights, weights).ravel() / weights.sum() ** 3
    f = np.asarray(gp.mean(X)) + grid @ np.linalg.cholesky(np.asarray(gp.kernel(X))).T
    joint = prior * np.exp(np.asarray(unwrap(gp).likelihood.log_density(f, y)).sum(1))
    Z = joint.sum()
    mean = joint @ f / Z
    return np.log(Z), mean, (f - mean).T @ (joint[:, None] * (f - mean)) / Z


def textbook_ep(mean, K, y, sweeps=60):
    "Sequential EP for the probit likelihood with explicit matrices, in the way of Rasmussen and Williams, algorithm 3.5."
    sign = 2 * y - 1
    tau, nu = np.zeros(len(y)), np.zeros(len(y))                     # sites in f less the prior mean
    refresh = lambda: np.linalg.inv(np.linalg.inv(K) + np.diag(tau))
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


def gradient_and_differences(approx, X, y, step=1e-4):
    "The gradient in all parameters, and central differences of the whole objective."
    trainable, rest = partition(approx)
    flat, unravel = ravel_pytree(trainable)
    objective = jax.jit(lambda flat: eqx.combine(unravel(flat), rest).objective(X, y))
    moved = lambda i, h: float(objective(flat.at[i].add(h)))
    differences = [(8 * (moved(i, step) - moved(i, -step)) - moved(i, 2 * step) + moved(i, -2 * step)) / (12 * step) for i in range(len(flat))]
    return np.asarray(jax.grad(objective)(flat)), np.array(differences)


# expectation propagation


def test_three_points_against_quadrature():
    X, y = np.array([[0.0], [0.6], [1.5]]), np.array([1.0, 0.0, 1.0])
    gp = model()
    log_Z, mean, cov = by_quadrature(gp, X, y)
    assert np.isclose(log_Z, orthant(*matrices(gp, X), y), atol=1e-6)  # the two truths agree
    post, vgp = EP(gp).posterior(X, y), VGP(gp, 3).fixed_point(X, y, 100)
    error = abs(EP(gp).objective(X, y) - log_Z)
    assert error < 2e-3 and error < 0.2 * abs(vgp.objective(X, y) - log_Z)
    assert np.allclose(post.mean(X), mean, atol=0.01) and np.allclose(post.covariance(X), cov, atol=0.03)
    assert np.abs(post.mean(X) - mean).max() < 0.3 * np.abs(vgp.posterior(X).mean(X) - mean).max()


@pytest.mark.parametrize("likelihood", [Bernoulli(), Logit("logit")], ids=["probit", "logit"])
def test_one_point_is_exact(likelihood):
    X, y, gp = np.array([[0.3]]), np.array([0.0]), model(likelihood)
    f = np.linspace(-15, 15, 60001)
    joint = norm.pdf(f, 0.2, np.sqrt(3.0)) * np.exp(likelihood.log_density(f, 0.0))
    Z = joint.sum() * (f[1] - f[0])
    mean = joint @ f / joint.sum()
    point, post = EP(gp).fixed_point(X, y), EP(gp).posterior(X, y)
    assert point.rounds <= 3 and np.allclose([point.mean[0], point.var[0]], [0.2, 3.0])
    assert np.isclose(EP(gp).objective(X, y), np.log(Z), atol=1e-6)
    assert np.allclose(np.ravel(post.marginals(X)), [mean, joint @ (f - mean) ** 2 / joint.sum()], atol=1e-5)


def test_the_textbook_algorithm_ends_at_the_same_place():
    X, y = problem(10)
    gp = model()
    log_Z, mean, cov = textbook_ep(*matrices(gp, X), labels(y))
    approx = EP(gp, tolerance=1e-10)
    assert np.isclose(approx.objective(X, labels(y)), log_Z, atol=1e-8)
    post = approx.posterior(X, labels(y))
    assert np.allclose(post.mean(X), mean, atol=1e-7) and np.allclose(post.covariance(X), cov, atol=1e-7)


@pytest.mark.parametrize("inducing", [False, True])
def test_sequential_and_parallel_rounds_meet(inducing):
    X, y = problem(30)
    make = (lambda **s: GFITC(model(), InducingPoints(X[::5]), **s)) if inducing else (lambda **s: EP(model(), **s))
    parallel, sequential = make(tolerance=1e-9), make(tolerance=1e-9, sequential=True)
    first, second = (approx.fixed_point(X, labels(y)) for approx in (parallel, sequential))
    assert max(first.misfit, second.misfit) <= 1e-9 and second.rounds <= first.rounds
    assert np.allclose(first.sites.precision, second.sites.precision, atol=1e-7)
    assert np.isclose(parallel.objective(X, labels(y)), sequential.objective(X, labels(y)), atol=1e-9)


def test_a_slower_rate_takes_longer_to_the_same_place():
    X, y = problem(20)
    fast, slow = EP(model()), EP(model(), rate=0.5)
    assert slow.fixed_point(X, labels(y)).rounds > fast.fixed_point(X, labels(y)).rounds
    assert np.isclose(fast.objective(X, labels(y)), slow.objective(X, labels(y)), atol=1e-8)
    assert EP(model(), rounds=2).fixed_point(X, labels(y)).rounds == 2


@examples(max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_evidence_knows_no_order_and_no_sign(seed):
    X, y = problem(8, seed=seed)
    order = np.random.default_rng(seed).permutation(8)
    gp, mirrored = model(), GP(RBF(0.8, 3.0), Bernoulli(), ConstantMean(-0.2))
    value = EP(gp).objective(X, labels(y))
    assert np.isclose(value, EP(gp).objective(X[order], labels(y)[order]), atol=1e-8)
    assert np.isclose(value, EP(mirrored).objective(X, 1 - labels(y)), atol=1e-8)


def test_gaussian_noise_is_exact_regression():
    X, y = problem(20)
    gp = model(Gaussian(0.1))
    assert np.isclose(EP(gp).objective(X, y), Exact(gp).objective(X, y), atol=1e-8)
    assert EP(gp).fixed_point(X, y).rounds <= 2
    Xs = np.linspace(-1, 5, 9)[:, None]
    assert np.allclose(EP(gp).posterior(X, y).covariance(Xs), Exact(gp).posterior(X, y).covariance(Xs), atol=1e-8)
    assert np.allclose(EP(gp).posterior(X, y).mean(Xs), Exact(gp).posterior(X, y).mean(Xs), atol=1e-8)


def test_counts_on_three_points_against_quadrature():
    X, y, gp = np.array([[0.0], [0.6], [1.5]]), np.array([2.0, 0.0, 5.0]), model(Poisson(), 1.0)
    log_Z, mean, cov = by_quadrature(gp, X, y)
    post = EP(gp).posterior(X, y)
    assert np.isclose(EP(gp).objective(X, y), log_Z, atol=2e-3)
    assert np.allclose(post.mean(X), mean, atol=5e-3) and np.allclose(post.covariance(X), cov, atol=0.01)


@pytest.mark.parametrize("sequential", [False, True])
def test_outliers_get_negative_precisions_and_proper_cavities(sequential):
    X, y = problem(40)
    y[[5, 17, 30]] += [6.0, -8.0, 5.0]
    approx = EP(model(Student()), sequential=sequential, rounds=300)
    point = approx.fixed_point(X, y)
    assert point.misfit <= 1e-6 and (np.asarray(point.sites.precision)[[5, 17, 30]] < 0.05).all()
    assert np.asarray(point.sites.precision).min() < 0 and (np.asarray(point.var) > 0).all()
    clean = Exact(model(Gaussian(0.1))).posterior(*(np.delete(a, [5, 17, 30], axis=0) for a in (X, y)))
    assert np.abs(approx.posterior(X, y).mean(X) - clean.mean(X)).max() < 0.3
    assert np.isfinite(approx.objective(X, y))


@eqx.filter_jit
def value_and_gradient(approx, X, y):
    with nan_on_failure():
        return eqx.filter_value_and_grad(lambda approx: approx.objective(X, y))(approx)


@pytest.mark.parametrize("kernel", [RBF(0.8, 1e6), RBF(20.0, 1e5), RBF(1e-3, 100.0), RBF(1e4, 1e-10), RBF(0.5, 1e4)])
def test_extreme_hyperparameters_do_no_harm(kernel):
    X, y = problem(60)
    gp = GP(kernel, Bernoulli())
    for approx in (EP(gp), GFITC(gp, InducingPoints(X[::6])), SparseMeanField(gp, InducingPoints(X[::6])), WeakBound(gp, InducingPoints(X[::6]))):
        value, gradient = value_and_gradient(approx, X, labels(y))
        assert np.isfinite(value) and value < 0 and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert EP(gp).fixed_point(X, labels(y)).misfit <= 1e-6


def test_rows_may_repeat():
    X, y = problem(10)
    twice, y2 = np.repeat(X, 2, axis=0), np.repeat(labels(y), 2)
    assert np.isfinite(EP(model()).objective(twice, y2))
    assert EP(model()).fixed_point(twice, y2).misfit <= 1e-6


@pytest.mark.parametrize("sparse, likelihood, target", [(True, Student(1.0), lambda y: y), (False, Poisson(), lambda y: np.round(np.exp(y)))],
                         ids=["Student", "counts"])
def test_gradients_of_the_converged_evidence(sparse, likelihood, target):
    X, y = problem(15)
    gp = GP(Matern32(0.8, 1.5), likelihood, ConstantMean(0.2))
    settings = dict(tolerance=1e-11, rounds=500)  # derivatives hold the nodes of the quadrature: it must be exact
    Z = np.linspace(0.2, 3.8, 4)[:, None]
    approx = GFITC(gp, InducingPoints(Z), **settings) if sparse else EP(gp, **settings)
    gradient, differences = gradient_and_differences(approx, X, target(y))
    assert len(gradient) == 3 + (4 if sparse else 0) + isinstance(likelihood, Student)
    assert np.allclose(gradient, differences, rtol=1e-5, atol=1e-6) and np.abs(gradient).min() > 1e-4


def test_fit_raises_the_evidence_above_the_variational_one():
    X, y = problem(40)
    result = fit(EP(model()), (X, labels(y)))
    assert result.converged and result.history.objective[-1] > result.history.objective[0] + 0.1
    vgp = VGP(result.approx.model, 40).fixed_point(X, labels(y), 200)
    assert result.approx.objective(X, labels(y)) > vgp.objective(X, labels(y))


def test_single_precision():
    X, y = problem(30)
    X32, y32 = X.astype(np.float32), labels(y).astype(np.float32)
    Z = InducingPoints(X[::5])
    for approx in (EP(model()), GFITC(model(), Z), SparseMeanField(model(), Z), WeakBound(model(), Z)):
        small = cast(approx, jnp.float32)
        value = small.objective(X32, y32)
        assert value.dtype == jnp.float32 and np.isclose(value, approx.objective(X, labels(y)), atol=2e-2)
        assert small.posterior(X32, y32).mean(X32).dtype == jnp.float32


# generalised FITC


def test_all_inputs_as_inducing_points_is_ep():
    X, y = problem(25)
    full, sparse = EP(model()), GFITC(model(), InducingPoints(X))
    assert np.isclose(full.objective(X, labels(y)), sparse.objective(X, labels(y)), atol=1e-6)
    Xs = np.linspace(-1, 5, 9)[:, None]
    for a, b in zip(full.posterior(X, labels(y)).marginals(Xs), sparse.posterior(X, labels(y)).marginals(Xs)):
        assert np.allclose(a, b, atol=1e-5)


def test_gaussian_noise_is_fitc():
    X, y = problem(25)
    gp, Z = model(Gaussian(0.1)), InducingPoints(X[::5])
    assert np.isclose(GFITC(gp, Z).objective(X, y), FITC(gp, Z).objective(X, y), atol=1e-8)
    Xs = np.linspace(-1, 5, 9)[:, None]
    ours, theirs = GFITC(gp, Z).posterior(X, y), FITC(gp, Z).posterior(X, y)
    assert np.allclose(ours.mean(Xs), theirs.mean(Xs), atol=1e-8) and np.allclose(ours.covariance(Xs), theirs.covariance(Xs), atol=1e-8)


def test_generalised_fitc_is_ep_with_another_matrix():
    X, y = problem(9)
    gp, Z = model(), X[:3]
    mean, K = matrices(gp, X)
    Q = explained(gp, X, Z)
    log_Z, latent, _ = textbook_ep(mean, Q + np.diag(np.diag(K - Q)), labels(y))
    approx = GFITC(gp, InducingPoints(Z), tolerance=1e-9)
    assert np.isclose(approx.objective(X, labels(y)), log_Z, atol=1e-7)
    point = approx.fixed_point(X, labels(y))
    q = 1 / point.var + point.sites.precision                       # marginals from cavities and sites
    assert np.allclose((point.mean / point.var + point.sites.shift) / q, latent, atol=1e-6)


# the two-stage bounds


def random_problem(seed, N=3, M=2):
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
        assert kind(gp, InducingPoints(X)).objective(X, y) <= truth + 1e-6
        assert kind(gp, InducingPoints(Z)).objective(X, y) <= first_stage + 1e-6 <= truth + 2e-6


def test_bounds_are_not_far_below():
    X, y = np.array([[0.0], [0.6], [1.5]]), np.array([1.0, 0.0, 1.0])
    truth = orthant(*matrices(model(), X), y)
    assert 0 < truth - SparseMeanField(model(), InducingPoints(X)).objective(X, y) < 0.1
    assert 0.1 < truth - WeakBound(model(), InducingPoints(X)).objective(X, y) < 1


def test_mean_field_bound_is_what_its_factors_give():
    gp, X, y, Z = random_problem(3, 6, 2)
    approx = SparseMeanField(gp, InducingPoints(Z))
    centre, spread = (np.asarray(a) for a in approx.factors(X, y))
    mean, K = matrices(gp, X)
    Q = explained(gp, X, Z)
    S_inv = np.linalg.inv(Q + np.eye(6))
    assert np.allclose(spread, 1 / np.diag(S_inv))

    def by_summation(centre):
        "E_q[log N(g | mean, Q + I) - log q(g)] - tr(K - Q) / 2 with moments and entropies from sums on a grid."
        g = np.linspace(-40, 40, 400001)
        q = np.where((2 * y[:, None] - 1) * g > 0, norm.pdf(g, centre[:, None], np.sqrt(spread)[:, None]), 0.0)
        q /= q.sum(1, keepdims=True) * (g[1] - g[0])
        expect = lambda h: (q * h).sum(1) * (g[1] - g[0])
        mu, second = expect(g), expect(g**2)
        entropy = -expect(np.where(q > 0, np.log(np.where(q > 0, q, 1)), 0)).sum()
        r = mu - mean
        log_prior = -0.5 * (r @ S_inv @ r + np.diag(S_inv) @ (second - mu**2) + np.linalg.slogdet(2 * np.pi * (Q + np.eye(6)))[1])
        return log_prior + entropy - 0.5 * np.trace(K - Q), mu, second - mu**2

    best, mu, v = by_summation(centre)
    assert np.isclose(best, approx.objective(X, y), atol=1e-3)
    assert np.allclose(centre, mu - spread * (S_inv @ (mu - mean)), atol=1e-3)     # each is the best for the others
    rng = np.random.default_rng(0)
    assert all(by_summation(centre + 0.3 * rng.normal(size=6))[0] < best for _ in range(10))
    post = approx.posterior(X, y)                                                  # u given g, mixed over q(g)
    Kuf, Kuu = np.asarray(gp.kernel(Z, X)), np.asarray(gp.kernel(Z))
    assert np.allclose(post.inducing_mean, Kuf @ S_inv @ (mu - mean), atol=1e-3)
    assert np.allclose(post.inducing_covariance, Kuu - Kuf @ (S_inv - S_inv * v @ S_inv) @ Kuf.T, atol=1e-3)


@examples(max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_the_weak_bound_is_below_the_bound_that_averages_the_log_density(seed):
    gp, X, y, Z = random_problem(seed, 8, 3)
    rng = np.random.default_rng(seed)
    inducing, kernel = unwrap(InducingPoints(Z)), unwrap(gp.kernel)
    q = InducingPosterior(unwrap(gp), inducing, inducing_factor(inducing, kernel), jnp.asarray(rng.normal(size=3)),
                          jnp.asarray(np.tril(rng.normal(size=(3, 3)))))
    X, y = jnp.asarray(X), jnp.asarray(y)
    weak, strong = weak_bound(q, X, y), uncollapsed_bound(q, X, y)
    assert weak < strong < weak + 0.5 * q.latent_marginals(X)[1].sum()
    parts = [weak_bound(q, X[i:i + 2], y[i:i + 2], num_data=8) for i in range(0, 8, 2)]
    assert np.isclose(np.mean(parts), weak)


def test_the_weak_optimum():
    X, y = problem(15)
    approx = WeakBound(model(), InducingPoints(X[::4]))
    q = approx.posterior(X, labels(y))
    X, y = jnp.asarray(X), jnp.asarray(labels(y))
    value = lambda m, S_factor: weak_bound(eqx.tree_at(lambda q: (q.m, q.S_factor), q, (m, S_factor)), X, y)
    assert np.isclose(value(q.m, q.S_factor), approx.objective(X, y), atol=1e-8)
    slopes = jax.grad(value, argnums=(0, 1))(q.m, q.S_factor)
    assert max(np.abs(slopes[0]).max(), np.abs(np.triu(slopes[1])).max()) < 1e-6
    full = WeakBound(model(), InducingPoints(X)).posterior(X, y)                   # S⁻¹ = K⁻¹ + I whatever the labels
    assert np.allclose(full.covariance(X), Exact(model(Gaussian(1.0))).posterior(X, y).covariance(X), atol=1e-6)
    vgp = VGP(model(), 15).fixed_point(X, y, 100)
    assert WeakBound(model(), InducingPoints(X)).objective(X, y) < vgp.objective(X, y) < EP(model()).objective(X, y) + 0.01


def test_fit_improves_the_bounds():
    X, y = problem(40)
    for kind in (SparseMeanField, WeakBound, GFITC):
        result = fit(kind(model(), InducingPoints(X[:6])), (X, labels(y)), steps=30)
        assert result.history.objective[-1] > result.history.objective[0] + 0.3
        assert np.mean((result.approx.posterior(X, labels(y)).predict_y(X)[0] > 0.5) == (y > 0)) > 0.8


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
    with pytest.warns(UserWarning, match="7 inducing variables for 6 rows"):
        make(model(), InducingPoints(np.random.default_rng(0).normal(size=(7, 2)))).objective(X, labels(y))


@pytest.mark.parametrize("settings, message", [(dict(rate=0.0), "rate"), (dict(rate=1.5), "rate"), (dict(tolerance=0.0), "tolerance"),
                                               (dict(rounds=0), "rounds"), (dict(rounds=2.5), "rounds")])
def test_unusable_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        EP(model(), **settings)


def test_unusable_models():
    for kind in (EP, lambda gp: GFITC(gp, InducingPoints(np.ones((2, 1))))):
        with pytest.raises(ValueError, match="one function value"):
            kind(RBF())
        with pytest.raises(ValueError, match="one function value"):
            kind(GP(RBF(), RobustMax(3)))
    for kind in (SparseMeanField, WeakBound):
        for gp in (model(Bernoulli("logit")), model(Gaussian()), RBF()):
            with pytest.raises(ValueError, match="probit"):
                kind(gp, InducingPoints(np.ones((2, 1))))
    with pytest.raises(ValueError, match="probit"):
        weak_bound(EP(model(Bernoulli("logit"))).posterior(np.ones((1, 1)), np.ones(1)), np.ones((1, 1)), np.ones(1))


def test_frozen_parts_stay():
    X, y = problem(20)
    approx = GFITC(model(), freeze(InducingPoints(X[:4])))
    result = fit(approx, (X, labels(y)), steps=5)
    assert np.array_equal(unwrap(result.approx).inducing.Z, X[:4]) and unwrap(result.approx).model.kernel.lengthscale != 0.8
