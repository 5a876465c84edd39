"Chapter 60: moments of f(x) at Gaussian x, against dense quadrature over marginals, draws, derivatives and loops written by hand."
import itertools

import equinox as eqx
import gp_thesis as gpt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gp_thesis.mcmc import Mixture
from gp_thesis.parameters import cast, free, lower_triangular, unwrap
from gp_thesis.propagation import (Moments, by_nodes, draws_through, linear, linearise, match, match_moments, propagation_rule,
                                   sigma_points, unscented, weights_of)
from gp_thesis.svgp import VariationalGaussian

rng = np.random.default_rng(0)
N, M = 16, 6
X = rng.uniform(-1.5, 1.5, (N, 2))
y = np.sin(2 * X[:, 0]) + X[:, 1] + 0.1 * rng.normal(size=N)
Y = np.stack([y, np.cos(y) - X[:, 0]], axis=1)
labels, counts = (y > 0).astype(float), rng.poisson(np.exp(0.5 * y)).astype(float)
MEAN = rng.normal(size=(3, 2))
ROOT = 0.5 * rng.normal(size=(3, 2, 2))
COV = ROOT @ np.swapaxes(ROOT, 1, 2)
points, other = gpt.InducingPoints(X[:M]), gpt.InducingPoints(X[M:2 * M] + 0.1)
k, noise = gpt.RBF([0.9, 1.2], 1.3), gpt.Gaussian(0.05)
several = gpt.Independent([k, gpt.RBF(1.4) + gpt.Linear(0.3)])
slanted = gpt.LinearMean([[0.3, -0.5], [1.0, 0.2]], [0.5, -1.0])


def with_q(approx, seed=1):
    "The same with a q of no special kind."
    r, shape = np.random.default_rng(seed), unwrap(approx.q.m).shape
    R = np.tril(0.2 * r.normal(size=(*shape[1:], shape[0], shape[0])), -1) + 0.6 * np.eye(shape[0])
    return eqx.tree_at(lambda a: a.q, approx, VariationalGaussian(free(r.normal(size=shape)), lower_triangular(R)))


def mixture(approx, data=(), T=3):
    "Of approximations that differ in v and in the lengthscale."
    plain, r = unwrap(approx), np.random.default_rng(2)
    v, ell = r.normal(size=(T, *plain.v.shape)), np.linspace(0.8, 1.6, T)
    where = lambda a: (a.v, a.model.kernel.lengthscale)
    drawn = eqx.tree_at(where, jax.tree.map(lambda _: False, plain), (True, True))
    draws = eqx.tree_at(where, eqx.filter(plain, drawn), (jnp.asarray(v), jnp.asarray(ell)))
    return Mixture(draws, eqx.filter(plain, drawn, inverse=True), tuple(map(jnp.asarray, data)), 2)


def posteriors():
    "Of each chapter, all with a closed form."
    gp, few = lambda *more, kernel=k: gpt.GP(kernel, *more), lambda approx: approx.fixed_point(X, counts, rounds=5)
    whitened = gpt.WhitenedVGP(gp(gpt.Bernoulli()), N)
    whitened = eqx.tree_at(lambda a: a.m, whitened, free(np.linspace(-1, 1, N)))
    return {
        "exact": lambda: gpt.Exact(gp(noise)).posterior(X, y),
        "exact, two outputs, slanted": lambda: gpt.Exact(gp(noise, slanted)).posterior(X, Y),
        "exact, one column": lambda: gpt.Exact(gp(noise, gpt.ConstantMean(0.7), kernel=k * gpt.Linear(0.4) + gpt.White(0.1))).posterior(X, Y[:, :1]),
        "VFE": lambda: gpt.VFE(gp(noise, gpt.LinearMean([0.3, -0.5], 0.2)), points).posterior(X, y),
        "FITC": lambda: gpt.FITC(gp(noise), points).posterior(X, Y),
        "PITC": lambda: gpt.PITC(gp(noise), points, np.arange(N).reshape(4, 4)).posterior(X, y),
        "DTC": lambda: gpt.DTC(gp(noise), points).posterior(X, y),
        "power EP regression": lambda: gpt.PowerEPRegression(gp(noise), points, 0.5).posterior(X, y),
        "mean field": lambda: gpt.MeanField(gp(gpt.Bernoulli(), kernel=gpt.RBF(0.5)), N).posterior(X, labels),
        "VGP": lambda: few(gpt.VGP(gp(gpt.Poisson()), N)).posterior(X),
        "whitened VGP": lambda: whitened.posterior(X),
        "EP": lambda: gpt.EP(gp(gpt.Bernoulli())).posterior(X, labels),
        "GFITC": lambda: gpt.GFITC(gp(gpt.Bernoulli()), points).posterior(X, labels),
        "power EP": lambda: gpt.PowerEP(gp(gpt.Poisson()), points, 0.5).posterior(X, counts),
        "SVGP": lambda: with_q(gpt.SVGP(gp(gpt.Bernoulli()), points)).posterior(),
        "SVGP, two": lambda: with_q(gpt.SVGP(gp(noise, slanted), points, num_latents=2)).posterior(),
        "SVGP, two of u": lambda: with_q(gpt.SVGP(gp(noise, gpt.IdentityMean()), points, num_latents=2, whiten=False)).posterior(),
        "SVGP, two kernels": lambda: with_q(gpt.SVGP(gp(noise, slanted, kernel=several), points)).posterior(),
        "SVGP, two of all": lambda: with_q(gpt.SVGP(gp(noise, kernel=several), [points, other])).posterior(),
        "GPMC": lambda: mixture(gpt.GPMC(gpt.GP(gpt.RBF(), gpt.Bernoulli()), N), (X,)),
        "SGPMC, two": lambda: mixture(gpt.SGPMC(gpt.GP(gpt.RBF(), noise, slanted), points, num_latents=2))}


POSTERIORS = posteriors()


def dense(post, mean, cov, points=60):
    "The same moments by Gauss-Hermite's rule with many nodes over what the posterior says at each: laws of total expectation and covariance."
    nodes, masses = np.polynomial.hermite_e.hermegauss(points)
    square = lambda values: np.array(list(itertools.product(values, repeat=2)))
    nodes, masses = square(nodes), square(masses / masses.sum()).prod(1)
    steps = nodes @ np.swapaxes(np.linalg.cholesky(cov + 1e-300 * np.eye(2)), 1, 2)                  # (S, Q, D)
    f, v = (np.asarray(a).reshape(*steps.shape[:2], -1) for a in post.marginals((mean[:, None] + steps).reshape(-1, 2)))
    average = np.einsum("q,sqp->sp", masses, f)
    apart = f - average[:, None]
    own = np.einsum("q,sqp->sp", masses, v)[:, :, None] * np.eye(f.shape[2])
    return Moments(average, np.einsum("q,sqp,sqr->spr", masses, apart, apart) + own, np.einsum("q,sqd,sqp->sdp", masses, steps, apart))


def compiled(way):
    "In one program, traced anew."
    return eqx.filter_jit(lambda *arguments: way(*arguments))


def with_axis(moments):
    "With an axis for P functions, whatever P is."
    if moments.mean.ndim == 2:
        return Moments(*map(np.asarray, moments))
    return Moments(np.asarray(moments.mean)[:, None], np.asarray(moments.cov)[:, None, None], np.asarray(moments.cross)[:, :, None])


def close(ours, theirs, **tolerance):
    for a, b in zip(with_axis(ours), with_axis(theirs)):
        np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.parametrize("name", [name for name in POSTERIORS if "MC" not in name])
def test_closed_forms_are_those_of_dense_quadrature_and_a_known_input_gives_marginals(name):
    post = POSTERIORS[name]()
    assert propagation_rule(post) == "closed form"
    close(match_moments(post, MEAN, COV), dense(post, MEAN, COV), rtol=1e-8, atol=1e-9)
    known, (f, v) = match_moments(post, MEAN, 0 * COV), post.marginals(MEAN)
    np.testing.assert_allclose(known.mean, f, rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(with_axis(known).cov, with_axis(known._replace(mean=f, cov=v)).cov if f.ndim == 1 else
                               np.asarray(v)[:, :, None] * np.eye(v.shape[1]), rtol=1e-8, atol=1e-10)
    assert np.abs(known.cross).max() == 0 and known.mean.shape == f.shape


@pytest.mark.parametrize("name", ["GPMC", "SGPMC, two"])
def test_a_mixture_is_the_law_of_total_covariance_over_its_members(name):
    post = POSTERIORS[name]()
    members = [post.member(jax.tree.map(lambda a: a[t], post.draws)) for t in range(len(post))]
    for ours, of_one in ((match_moments, dense), (linearise, linearise), (sigma_points, sigma_points)):
        each = [with_axis(of_one(member, MEAN, COV)) for member in members]
        mean, cov, cross = (np.mean([getattr(one, part) for one in each], axis=0) for part in Moments._fields)
        for one in each:
            cov = cov + np.einsum("sp,sq->spq", one.mean - mean, one.mean - mean) / len(each)
        close(ours(post, MEAN, COV), Moments(mean, cov, cross), rtol=1e-6, atol=1e-7)
    assert match_moments(post, MEAN, COV).mean.shape == post.marginals(MEAN)[0].shape
    np.testing.assert_allclose(match_moments(post, MEAN, 0 * COV).mean, post.marginals(MEAN)[0], rtol=1e-6, atol=1e-7)


OTHERS = {
    "window": (gpt.RBF(0.9), gpt.GaussianWindow(X[:M], 0.4)), "wavelet": (gpt.RBF(0.9), gpt.Wavelet(X[:M], 0.4, 1.5)),
    "matern": (gpt.Matern52(1.5), points), "product": (gpt.RBF(1.0) * gpt.Matern52(2.0, active_dims=[1]), points)}


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_closed_form_goes_by_nodes(name):
    kernel, inducing = OTHERS[name]
    post = with_q(gpt.SVGP(gpt.GP(kernel, noise, slanted), inducing, num_latents=2)).posterior()
    assert propagation_rule(post) == "30 nodes in each of 2 columns"
    tolerance = 1e-9 if "w" in name else 1e-5
    close(match_moments(post, MEAN, 0.5 * COV), dense(post, MEAN, 0.5 * COV), atol=tolerance)


def test_nodes_for_a_mean_that_is_not_affine_and_for_columns_that_kernels_see():
    class Wave(gpt.Mean):
        def evaluate(self, X):
            return jnp.sin(X[:, 0] * X[:, 1])

    post = gpt.Exact(gpt.GP(gpt.RBF(0.8, active_dims=[1]), noise, Wave())).posterior(X, y)
    assert propagation_rule(post) == "30 nodes in each of 2 columns"
    close(match_moments(post, MEAN, COV), dense(post, MEAN, COV), atol=1e-6)
    one = gpt.Exact(gpt.GP(gpt.Matern52(2.0, active_dims=[1]), noise, gpt.LinearMean([1.0, -0.5]))).posterior(X, y)
    assert propagation_rule(one) == "60 nodes in one column"
    close(match_moments(one, MEAN, 0.3 * COV), dense(one, MEAN, 0.3 * COV), atol=1e-5)


def test_nodes_and_the_closed_form_agree():
    post = unwrap(POSTERIORS["SVGP, two"]())
    for cov in (COV, np.diagonal(COV, axis1=1, axis2=2)):
        close(*compiled(lambda *x: (by_nodes(post, *x), match(post, *x)))(jnp.asarray(MEAN), jnp.asarray(cov)), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["SVGP, two kernels", "SGPMC, two"])
def test_draws(name):
    "Means, covariances and those with the input, of two hundred thousand draws; five standard errors."
    post, n = POSTERIORS[name](), 200_000
    x, f = (np.asarray(a) for a in draws_through(jax.random.key(3), post, MEAN[:2], COV[:2], n))
    assert x.shape == (n, 2, 2) and f.shape == (n, *post.marginals(MEAN[:2])[0].shape)
    f, ours = f.reshape(n, 2, -1), with_axis(match_moments(post, MEAN[:2], COV[:2]))
    a, b = f - ours.mean, x - MEAN[:2]
    for sample, known in ((f, ours.mean), (a[..., None] * a[..., None, :], ours.cov), (b[..., None] * a[..., None, :], ours.cross)):
        assert (np.abs(sample.mean(0) - known) < 5 * sample.std(0) / n**0.5).all()


def test_draws_from_a_mixture_take_members_equally_often():
    post = POSTERIORS["GPMC"]()
    x, f = draws_through(jax.random.key(0), post, MEAN[:1], 0 * COV[:1], 2)
    assert x.shape == (2, 1, 2) and f.shape == (2, 1) and (x == MEAN[:1]).all()
    many = np.asarray(draws_through(jax.random.key(0), post, X[:1], 0 * COV[:1], 7)[1])              # members know f at the data
    values = np.array([post.member(jax.tree.map(lambda a: a[t], post.draws)).mean(X[:1])[0] for t in range(3)])
    which = np.abs(many - values).argmin(1)
    assert np.abs(many[:, 0] - values[which]).max() < 1e-5 and np.bincount(which).tolist() in ([3, 2, 2], [2, 3, 2], [2, 2, 3])


def test_a_linear_function_leaves_nothing_to_approximate():
    model = gpt.GP(gpt.Linear([0.5, 1.2]), noise, slanted)
    q = with_q(gpt.SVGP(model, gpt.InducingPoints(X[:2]), num_latents=2)).posterior()
    steep = lambda X: np.asarray(q.mean(X))
    f0, W = steep(np.zeros((1, 2))), steep(np.eye(2)) - steep(np.zeros((1, 2)))
    ours = match_moments(q, MEAN, COV)
    np.testing.assert_allclose(ours.mean, f0 + MEAN @ W, rtol=1e-10)
    np.testing.assert_allclose(ours.cross, COV @ W, rtol=1e-8, atol=1e-10)
    spread = np.einsum("dp,sde,eq->spq", W, COV, W)
    for way in (match_moments, linearise, sigma_points):
        found = way(q, MEAN, COV)
        np.testing.assert_allclose(found.mean, ours.mean, rtol=1e-9)
        np.testing.assert_allclose(found.cross, ours.cross, rtol=1e-7, atol=1e-9)
        # The variance given x is a quadratic function of x: sigma points average it as it is, linearisation takes it at E x.
        own = np.asarray(found.cov) - spread
        assert np.abs(own - np.asarray(ours.cov) + spread).max() < (np.inf if way is linearise else 1e-9)
    still = gpt.Exact(gpt.GP(gpt.Constant(1e-12), gpt.Gaussian(1.0), gpt.LinearMean([0.3, -2.0], 1.0))).posterior(X, y)
    for way in (match_moments, linearise, sigma_points):
        np.testing.assert_allclose(way(still, MEAN, COV).cov, np.einsum("d,sde,e->s", [0.3, -2.0], COV, [0.3, -2.0]), rtol=1e-8, atol=1e-11)


def test_linearisation_by_hand():
    post = POSTERIORS["SVGP, two kernels"]()
    f, v = post.marginals(MEAN)
    step = 1e-5 * np.eye(2)
    slope = np.stack([np.asarray(post.mean(MEAN + e) - post.mean(MEAN - e)) / 2e-5 for e in step], axis=1)  # (S, D, P)
    cov = np.einsum("sdp,sde,seq->spq", slope, COV, slope) + np.asarray(v)[:, :, None] * np.eye(2)
    close(linearise(post, MEAN, COV), Moments(f, cov, COV @ slope), rtol=1e-7, atol=1e-7)


def test_sigma_points_by_hand():
    post = POSTERIORS["exact, two outputs, slanted"]()
    roots = np.linalg.cholesky(COV)
    for s in range(3):
        at = np.concatenate([MEAN[s] + 2**0.5 * roots[s].T, MEAN[s] - 2**0.5 * roots[s].T])
        f, v = map(np.asarray, post.marginals(at))
        cov = np.cov(f.T, bias=True) + np.diag(v.mean(0))
        ours = sigma_points(post, MEAN[s:s + 1], COV[s:s + 1])
        np.testing.assert_allclose(ours.mean[0], f.mean(0), rtol=1e-10)
        np.testing.assert_allclose(ours.cov[0], cov, rtol=1e-10)
        np.testing.assert_allclose(ours.cross[0], (at - MEAN[s]).T @ (f - f.mean(0)) / 4, rtol=1e-9)


def test_ways_come_together_as_the_input_becomes_known():
    "The differences are of the order of the variance, as second derivatives are what the ways differ in."
    post, apart = POSTERIORS["SVGP, two"](), []
    for shrink in (1e-2, 1e-3):
        exact, others = match_moments(post, MEAN, shrink * COV), [way(post, MEAN, shrink * COV) for way in (linearise, sigma_points)]
        apart.append([np.abs(other.cov - exact.cov).max() for other in others])
        np.testing.assert_allclose(others[0].cross, exact.cross, atol=10 * shrink**2)
    (line, sigma), (line2, sigma2) = apart
    assert 8 < line / line2 < 12 and 50 < sigma / sigma2 < 200          # first order, and second


WAYS = {"match": match, "linear": linear, "unscented": unscented, "nodes": by_nodes}


@pytest.mark.parametrize("way, full", [("match", True), ("match", False), ("linear", True), ("unscented", True), ("nodes", True)])
def test_derivatives(way, full):
    "In means and covariances and in Z, first order against differences of the value, second against differences of the first."
    post = unwrap(POSTERIORS["SVGP, two"]())
    cov = jnp.asarray(COV + 0.05 * np.eye(2) if full else np.diagonal(COV, axis1=1, axis2=2) + 0.05)
    flat, back = jax.flatten_util.ravel_pytree((jnp.asarray(MEAN), cov, post.inducing.Z))

    def value(flat):
        mean, cov, Z = back(flat)
        moved = eqx.tree_at(lambda p: p.inducing.Z, post, Z)
        cov = (cov + jnp.swapaxes(cov, 1, 2)) / 2 if full else cov
        return sum(jnp.sum(jnp.sin(part)) for part in WAYS[way](moved, mean, cov))

    to = jnp.asarray(np.random.default_rng(2).normal(size=flat.shape))
    value, slope, h = jax.jit(value), jax.jit(jax.grad(value)), 1e-5
    np.testing.assert_allclose(slope(flat) @ to, (value(flat + h * to) - value(flat - h * to)) / (2 * h), rtol=1e-6)
    second = jax.jit(lambda x: jax.jvp(jax.grad(value), (x,), (to,))[1])(flat)
    differences = (slope(flat + h * to) - slope(flat - h * to)) / (2 * h)
    np.testing.assert_allclose(second, differences, rtol=2e-5, atol=2e-5 * np.abs(differences).max())


def test_the_covariance_with_the_input_is_that_of_stein():
    "cov(x, f) = cov(x) times the derivative of E f in E x, and dE f / dcov is half the curvature of E f in E x (Price)."
    post = unwrap(POSTERIORS["SVGP, two"]())
    mean, cov = jnp.asarray(MEAN[:1]), jnp.asarray(COV[:1])
    average = lambda mean, cov: match(post, mean[None], cov[None]).mean[0]
    everything = lambda *x: (jax.jacobian(average)(*x), jax.jacobian(average, 1)(*x), jax.hessian(average)(*x))
    slope, by_cov, curvature = compiled(everything)(mean[0], cov[0])
    for way in (match, by_nodes):
        np.testing.assert_allclose(compiled(way)(post, mean, cov).cross[0], cov[0] @ slope.T, rtol=1e-8)
    np.testing.assert_allclose(by_cov + jnp.swapaxes(by_cov, 1, 2), curvature, rtol=1e-6, atol=1e-8)


def test_variances_are_diagonal_covariances_and_jit_and_vmap_change_nothing():
    post, var = POSTERIORS["SVGP, two"](), np.diagonal(COV, axis1=1, axis2=2)
    for way in (match_moments, linearise, sigma_points):
        close(way(post, MEAN, var), way(post, MEAN, var[:, :, None] * np.eye(2)), rtol=1e-9, atol=1e-9)
    ours = match_moments(post, MEAN, var)
    each = jax.vmap(lambda mean, var: jax.tree.map(lambda a: a[0], match_moments(post, mean[None], var[None])))
    close(jax.jit(each)(MEAN, var), ours, rtol=1e-9, atol=1e-9)
    mixed = POSTERIORS["GPMC"]()
    close(jax.jit(lambda mean, var: match_moments(mixed, mean, var))(MEAN, var), match_moments(mixed, MEAN, var), rtol=1e-9, atol=1e-9)


def test_many_rows_are_worked_on_in_parts(monkeypatch):
    "To the same results, the gradient of the closed form included."
    import gp_thesis.propagation as module
    post = unwrap(POSTERIORS["VFE"]())
    mean, cov = (jnp.asarray(np.tile(a, (4,) + (1,) * (a.ndim - 1))[:11]) for a in (MEAN, COV))
    total = lambda mean: sum(jnp.sum(jnp.sin(part)) for part in match(post, mean, cov))
    everything = lambda mean: (match(post, mean, cov), by_nodes(post, mean, cov), jax.grad(total)(mean))
    whole = compiled(everything)(mean)
    monkeypatch.setattr(gpt.products, "CHUNK", 4 * M**2)
    monkeypatch.setattr(module, "ROWS", 1000)
    parts = compiled(everything)(mean)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts)):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)


def test_single_precision():
    post = POSTERIORS["SVGP, two"]()
    single, mean, var = cast(post, jnp.float32), MEAN.astype(np.float32), np.diagonal(COV, axis1=1, axis2=2)
    for way, cov in ((match_moments, COV), (match_moments, var), (linearise, var), (sigma_points, var)):
        ours = way(single, mean, cov.astype(np.float32))
        assert all(part.dtype == jnp.float32 for part in ours)
        close(ours, way(post, MEAN, cov), rtol=1e-3, atol=2e-4)
    nodes = compiled(by_nodes)(unwrap(single), jnp.asarray(mean), jnp.asarray(COV, jnp.float32))
    x, f = draws_through(jax.random.key(0), single, mean, COV.astype(np.float32), 3)
    assert all(part.dtype == jnp.float32 for part in (*nodes, x, f))


def test_a_closed_form_that_rounding_would_drown_is_left_for_nodes():
    "Thirty inducing inputs, three to a lengthscale, and a q that is not smooth: K_uu is singular but for rounding."
    Z = np.linspace(0, 6, 30)[:, None]
    q = VariationalGaussian(free(np.random.default_rng(0).normal(size=30)), lower_triangular(0.5 * np.eye(30)))
    post = eqx.tree_at(lambda a: a.q, gpt.SVGP(gpt.GP(gpt.RBF(1.0), noise), gpt.InducingPoints(Z)), q).posterior()
    mean, var = np.array([[1.0], [3.0]]), np.full((2, 1), 0.04)
    assert propagation_rule(post) == "60 nodes in one column, because K_uu is nearly singular"
    nodes, masses = np.polynomial.hermite_e.hermegauss(100)
    f, v = (np.asarray(a).reshape(2, 100) for a in post.marginals((mean + 0.2 * nodes).reshape(-1, 1)))
    masses = masses / masses.sum()
    known = (v + (f - (f @ masses)[:, None]) ** 2) @ masses
    np.testing.assert_allclose(match_moments(post, mean, var).cov, known, rtol=1e-7)
    closed = compiled(match)(unwrap(post), jnp.asarray(mean), jnp.asarray(var)).cov[:, 0, 0]
    assert np.abs(closed - known).max() > 1e-3
    wide = eqx.tree_at(lambda a: a.q, gpt.SVGP(gpt.GP(gpt.RBF(30.0), noise), gpt.InducingPoints(rng.normal(size=(30, 4)))), q).posterior()
    assert propagation_rule(wide).startswith("closed form, with rounding of ")


def test_variances_are_never_negative():
    "At the data of a regression almost without noise."
    post = gpt.Exact(gpt.GP(gpt.RBF(1.0), gpt.Gaussian(1e-9))).posterior(X, y)
    of_data = compiled(lambda scale: match(unwrap(post), jnp.asarray(X), jnp.full((N, 2), scale)).cov)
    for scale in (0.0, 1e-12, 1e-6):
        assert (of_data(scale) > 0).all()


def test_weights_say_what_marginals_say():
    for name in ("exact", "VFE", "SVGP, two of all"):
        post = unwrap(POSTERIORS[name]())
        groups, (f, v) = compiled(lambda post: (weights_of(post), post.latent_marginals(jnp.asarray(MEAN))))(post)
        for p, a in enumerate(groups):
            ks = a.kernel.evaluate(jnp.asarray(MEAN), a.Z)
            assert np.allclose(ks @ a.beta[:, 0] + (post.model.mean.evaluate(MEAN)), f.reshape(3, -1)[:, p], rtol=1e-9)
            C = a.C if a.C.ndim == 2 else a.C[0]
            assert np.allclose(a.kernel.evaluate_diag(jnp.asarray(MEAN)) - np.sum(ks @ C * ks, 1), v.reshape(3, -1)[:, p], rtol=1e-7)


GOOD = gpt.Exact(gpt.GP(k, noise))


@pytest.mark.parametrize("arguments, message", [
    ((GOOD, MEAN, COV), r"post must be a posterior, such as approx\.posterior\(X, y\), got Exact"),
    ((None, MEAN[0], COV), r"mean must have shape \(N, 2\)|mean must .*2"),
    ((None, MEAN[:, :1], COV), r"mean must .*2"),
    ((None, MEAN * np.nan, COV), r"mean .*(NaN|finite)"),
    ((None, MEAN, COV[0]), r"cov must have shape \(3, 2, 2\), or \(3, 2\) for variances of independent columns, got \(2, 2\)"),
    ((None, MEAN, -np.ones((3, 2))), r"cov must hold variances, got -1\.0"),
    ((None, MEAN, np.full((3, 2), np.nan)), r"cov must be finite, got NaN or infinity"),
    ((None, MEAN, COV + np.array([[0, 0.5], [0, 0]])), r"cov must hold symmetric matrices"),
    ((None, MEAN, COV - 2 * np.eye(2)), r"cov must hold covariances, got one with the eigenvalue -")])
def test_inputs_that_do_not_fit(arguments, message):
    post, *inputs = arguments
    post = post or GOOD.posterior(X, y)
    for way in (match_moments, linearise, sigma_points):
        with pytest.raises(ValueError, match=message):
            way(post, *inputs)
    with pytest.raises(ValueError, match=message):
        draws_through(jax.random.key(0), post, *inputs)


def test_a_number_of_draws_that_is_none():
    with pytest.raises(ValueError, match="n must be a positive integer, got 0"):
        draws_through(jax.random.key(0), GOOD.posterior(X, y), MEAN, COV, 0)
