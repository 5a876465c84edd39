"The stochastic bound, natural gradients and the recipe, against formulas written out, Monte Carlo, VGP, VFE and finite differences."
import equinox as eqx
import gp_thesis as gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gp_thesis import products
from gp_thesis.inducing import GaussianWindow, InducingPoints
from gp_thesis.parameters import free, lower_triangular
from gp_thesis.sparse import uncollapsed_bound
from gp_thesis.svgp import SVGP, adadelta, kmeans_centres, natural_gradient, natural_step
from scipy.spatial import cKDTree
from sklearn.cluster import KMeans

MEANS = {"linear": gpt.LinearMean([0.3, -0.2])}


def inputs(rows=30, columns=2, seed=0):
    return np.random.default_rng(seed).uniform(0, 4, (rows, columns))


def observations(kind, X, P=None, seed=1):
    random = np.random.default_rng(seed)
    f = np.sin(2 * X).sum(1) if P is None else np.sin(2 * X).sum(1)[:, None] + np.arange(P)
    noisy = f + 0.3 * random.normal(size=f.shape)
    return {"real": noisy, "binary": (noisy > 0.5) * 1.0, "counts": random.poisson(np.exp(noisy / 2)) * 1.0,
            "fractions": 1 / (1 + np.exp(-noisy))}.get(kind, np.floor(2.5 * X[:, 0] % 3))


def factors(P, M, random):
    "Random lower triangles that are far from the identity."
    R = np.tril(random.normal(size=(P, M, M)) / np.sqrt(M))
    R[:, range(M), range(M)] = random.uniform(0.3, 1.2, (P, M))
    return R


def shaken(approx, seed=3):
    "The same with a random q."
    random, q = np.random.default_rng(seed), approx.q
    m, R = q.m.value, q.S_factor.value
    R_new = factors(1 if R.ndim == 2 else len(R), len(m), random).reshape(R.shape)
    new = free(jnp.asarray(random.normal(size=m.shape), m.dtype)), lower_triangular(jnp.asarray(R_new, R.dtype))
    return eqx.tree_at(lambda a: (a.q.m, a.q.S_factor), approx, new)


def with_q(approx, m, S_factor):
    return eqx.tree_at(lambda a: (a.q.m, a.q.S_factor), approx, (free(m), lower_triangular(S_factor)))


def parts(approx):
    "The inducing variables of all latent functions, or of each."
    return approx.inducing if isinstance(approx.inducing, tuple) else (approx.inducing,)


Z = inputs(6, seed=5)
OWN = [InducingPoints(inputs(6, seed=seed)) for seed in (5, 6, 7)]
CASES = {  # likelihood, observations, columns of y, inducing variables, other arguments
    "one": (gpt.Bernoulli(), "binary", None, InducingPoints(Z), {}),
    "one, plain": (gpt.Bernoulli("logit"), "binary", None, InducingPoints(Z), {"whiten": False}),
    "windows": (gpt.Bernoulli(), "binary", None, GaussianWindow(Z, 0.3), {}),
    "Poisson": (gpt.Poisson(0.5), "counts", None, InducingPoints(Z), {}),
    "shared": (gpt.Bernoulli(), "binary", 3, InducingPoints(Z), {"num_latents": 3}),
    "shared, plain": (gpt.Gaussian(0.2), "real", 3, InducingPoints(Z), {"num_latents": 3, "whiten": False}),
    "own": (gpt.Bernoulli(), "binary", 3, OWN, {}),
    "own, plain": (gpt.StudentT(0.4), "real", 3, OWN, {"whiten": False}),
    "robust max": (gpt.RobustMax(3), "classes", None, InducingPoints(Z), {}),
    "robust max, own": (gpt.RobustMax(3), "classes", None, OWN, {}),
    "softmax": (gpt.Softmax(3), "classes", None, InducingPoints(Z), {}),
    "panels": (gpt.Bernoulli(), "binary", 3, InducingPoints(inputs(110, seed=5)), {"num_latents": 3}),
}


def case(name, rows=30, mean="linear"):
    likelihood, kind, P, inducing, other = CASES[name]
    X = inputs(rows)
    model = gpt.GP(gpt.Matern32([0.9, 1.4], 1.3), likelihood, MEANS.get(mean, gpt.Zero()))
    return shaken(SVGP(model, inducing, **other)), X, observations(kind, X, P)


def written_out(approx, X, y):
    "The bound from inverses of K_uu, without whitening, for each latent function by itself."
    approx = gpt.unwrap(approx)
    model, M = approx.model, len(parts(approx)[0])
    m, R = approx.q.m.reshape(M, -1), approx.q.S_factor.reshape(-1, M, M)

    def of_one(inducing, m, R):
        K, Kuf = inducing.covariance(model.kernel), inducing.cross_covariance(model.kernel, X)
        L = jnp.linalg.cholesky(K) if approx.whiten else jnp.eye(M)
        mean_u, S_u = L @ m, L @ R @ R.T @ L.T
        K_inv = jnp.linalg.inv(K)
        W = K_inv @ Kuf
        var = model.kernel.evaluate_diag(X) + jnp.sum(W * ((S_u - K) @ W), axis=0)
        kl = 0.5 * (jnp.trace(K_inv @ S_u) + mean_u @ K_inv @ mean_u - M
                    + jnp.linalg.slogdet(K)[1] - jnp.linalg.slogdet(S_u)[1])
        return model.mean.evaluate(X) + W.T @ mean_u, var, kl

    inducing = jax.tree.map(lambda *each: jnp.stack(each), *(parts(approx) * len(R))[:len(R)])
    mean, var, kl = jax.lax.map(lambda each: of_one(*each), (inducing, m.T, R))  # jaxlib's batches of LAPACK can wait for ever
    mean, var = (mean.T, var.T) if approx.q.m.ndim == 2 else (mean[0], var[0])
    return jnp.sum(model.likelihood.variational_expectations(mean, var, y)) - jnp.sum(kl)


def flat_function(function, approx, *data):
    "The numbers an optimiser moves, and the value and gradient of `function(approx, *data)` in them, compiled."
    trainable, rest = gpt.partition(approx)
    leaves, structure = jax.tree.flatten(trainable)

    def value(v):
        cut = jnp.split(v, np.cumsum([leaf.size for leaf in leaves])[:-1])
        moved = structure.unflatten(part.reshape(leaf.shape) for part, leaf in zip(cut, leaves))
        return function(eqx.combine(moved, rest), *data)

    return numbers(approx), jax.jit(jax.value_and_grad(value))


def numbers(tree):
    "The numbers an optimiser moves, frozen or not, as one vector."
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gpt.partition(gpt.unfreeze(tree))[0])])


def bound(approx, X, y):
    return approx.objective(X, y)


@pytest.mark.parametrize("name", ["windows", "own, plain", "robust max, own", "panels"])
def test_bound_and_gradient_are_the_formula_written_out(name):
    approx, X, y = case(name)
    flat, ours = flat_function(bound, approx, X, y)
    value, gradient = ours(flat)
    truth, slope = flat_function(written_out, approx, jnp.asarray(X), jnp.asarray(y))[1](flat)
    assert np.allclose(value, truth, rtol=1e-8) and np.isfinite(value)
    assert np.abs(gradient - slope).max() < 1e-6 * np.abs(slope).max()


@pytest.mark.parametrize("name", ["Poisson", "shared", "softmax"])
def test_bound_is_the_uncollapsed_bound_of_the_posterior(name):
    approx, X, y = case(name)
    assert np.allclose(approx.objective(X, y), eqx.filter_jit(uncollapsed_bound)(approx.posterior(), X, y), rtol=1e-10)


@eqx.filter_jit
def answers(approx, X, y, Xs):
    "The objective, moments of f and y at Xs, and the covariance of f(Xs) with f(X)."
    post = approx.posterior()
    return approx.objective(X, y), (*post.marginals(Xs), *post.predict_y(Xs)), post.covariance(Xs, X)


@pytest.mark.parametrize("name", ["own, plain"])
def test_independent_outputs_are_single_approximations(name):
    approx, X, y = case(name)
    Xs, total = inputs(5, seed=9), 0.0
    objective, moments, covariance = answers(approx, X, y, Xs)
    for p in range(3):
        alone = SVGP(approx.model, parts(approx)[p % len(parts(approx))], whiten=approx.whiten)
        alone = with_q(alone, approx.q.m.value[:, p], approx.q.S_factor.value[p])
        own, own_moments, own_covariance = answers(alone, X, y[:, p], Xs)
        total += own
        for a, b in zip(moments, own_moments):
            assert np.allclose(a[:, p], b, rtol=0, atol=1e-10)
        assert np.allclose(covariance[p], own_covariance, rtol=0, atol=1e-10)
    assert np.allclose(objective, total, rtol=1e-10)


@pytest.mark.parametrize("name", ["shared"])
def test_plain_coordinates_are_the_whitened_ones_moved_by_L(name):
    approx, X, y = case(name)
    L = np.linalg.cholesky(np.stack([approx.model.kernel(part.Z.value) for part in parts(approx)]))
    m, R = np.asarray(approx.q.m.value).reshape(6, -1), np.asarray(approx.q.S_factor.value).reshape(-1, 6, 6)
    u_mean, u_factor = (L @ m.T[..., None])[..., 0].T.reshape(approx.q.m.value.shape), (L @ R).reshape(approx.q.S_factor.value.shape)
    inducing = list(approx.inducing) if isinstance(approx.inducing, tuple) else approx.inducing
    plain = with_q(SVGP(approx.model, inducing, num_latents=m.shape[1], whiten=False), u_mean, u_factor)
    assert np.allclose(plain.objective(X, y), approx.objective(X, y), rtol=1e-10)
    assert np.allclose(plain.posterior().covariance(X), approx.posterior().covariance(X), rtol=0, atol=1e-10)


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("inducing", [InducingPoints(Z), OWN[:2]], ids=["one", "own"])
def test_q_starts_as_the_prior(inducing, whiten):
    approx = SVGP(gpt.GP(gpt.Matern32(0.9, 1.3), gpt.Gaussian(0.1), gpt.ConstantMean(0.7)), inducing, whiten=whiten)
    Xs = inputs(5, seed=9)
    mean, cov = approx.posterior().mean(Xs), approx.posterior().covariance(Xs)
    assert np.allclose(mean, 0.7, atol=1e-10) and np.allclose(cov, approx.model.kernel(Xs), atol=1e-10)


# Monte Carlo

def draws(approx, X, number, random):
    "f(X) (number, N, P) drawn from q by way of u, and log p(u) - log q(u) of each."
    kernel, M = gpt.unwrap(approx.model.kernel), len(approx.q.m.value)
    m, R = np.asarray(approx.q.m.value).reshape(M, -1), np.asarray(approx.q.S_factor.value).reshape(-1, M, M)
    K, Kuf = (np.asarray(kernel.evaluate(Z_, X_)) for Z_, X_ in ((Z, Z), (Z, X)))
    L, W = np.linalg.cholesky(K), np.linalg.solve(K, Kuf)
    C = np.linalg.cholesky(np.asarray(kernel.evaluate(X)) - Kuf.T @ W + 1e-12 * np.eye(len(X)))
    f, log_ratio = np.empty((number, len(X), m.shape[1])), np.zeros(number)
    for p in range(m.shape[1]):
        e = random.standard_normal((number, M))
        v = m[:, p] + e @ R[p].T
        log_ratio += 0.5 * (e**2).sum(1) - 0.5 * (v**2).sum(1) + np.log(np.diag(R[p])).sum()
        f[:, :, p] = v @ L.T @ W + random.standard_normal((number, len(X))) @ C.T
    return f, log_ratio


def test_bound_is_the_average_of_a_million_draws():
    approx, X, y = case("robust max", rows=5, mean="zero")
    f, log_ratio = draws(approx, X, 10**6, np.random.default_rng(0))
    log_p = np.where(f.argmax(2) == y, np.log(1 - 1e-3), np.log(1e-3 / 2)).sum(1)
    estimates = log_p + log_ratio
    error = estimates.std() / 1e3
    assert abs(estimates.mean() - approx.objective(X, y)) < 4 * error < 0.1


# its limits: VGP and VFE

HALF, ONE = natural_gradient(0.5), natural_gradient(1.0)  # each compiled once for a shape


def quiet(approx, data, optimiser, steps, **other):
    return gpt.fit(approx, data, optimiser=optimiser, steps=steps, progress=False, **other).approx


VGP_CASES = {"binary": (gpt.Bernoulli(), "binary", None), "softmax": (gpt.Softmax(3), "classes", None)}


@pytest.mark.parametrize("name", VGP_CASES)
def test_with_the_data_as_inducing_points_it_is_vgp(name):
    likelihood, kind, P = VGP_CASES[name]
    X = inputs(20)
    y, P = observations(kind, X, P), P or likelihood.num_latents or 1
    model = gpt.GP(gpt.Matern32(0.9, 1.3), likelihood, MEANS["linear"])
    vgp, approx = gpt.VGP(model, len(X), P), SVGP(model, InducingPoints(X), P)
    random = np.random.default_rng(0)
    shape = vgp.latent_shape(len(X))
    vgp = eqx.tree_at(lambda a: (a.targets, a.precision), vgp,
                      (free(random.normal(size=shape)), gpt.positive(random.uniform(0.5, 2, shape))))
    q = vgp.posterior(X)
    S_factor = np.asarray(q.S_factor)
    same = with_q(approx, q.m, np.linalg.cholesky(S_factor @ np.swapaxes(S_factor, -1, -2)))
    assert np.allclose(same.objective(X, y), vgp.objective(X, y), rtol=1e-8)
    best = vgp.fixed_point(X, y, rounds=60, rate=0.7)
    ours = quiet(same, (X, y), natural_gradient(0.7), 60)
    assert best.objective(X, y) > vgp.objective(X, y) + 1
    assert np.allclose(ours.objective(X, y), best.objective(X, y), rtol=0, atol=1e-7)
    assert np.allclose(ours.posterior().mean(X), best.posterior(X).mean(X), rtol=0, atol=1e-5)


def test_robust_max_with_the_data_as_inducing_points_is_whitened_vgp():
    X = inputs(20)
    y, model = observations("classes", X), gpt.GP(gpt.Matern32(0.9, 1.3), gpt.RobustMax(3))
    approx, vgp = shaken(SVGP(model, InducingPoints(X))), gpt.WhitenedVGP(model, 20, 3)
    vgp = eqx.tree_at(lambda a: (a.m, a.S_factor), vgp, (approx.q.m, approx.q.S_factor))
    assert np.allclose(approx.objective(X, y), vgp.objective(X, y), rtol=1e-9)
    post, same = approx.posterior(), vgp.posterior(X)
    assert np.allclose(post.predict_y(inputs(5, seed=9))[0], same.predict_y(inputs(5, seed=9))[0], rtol=0, atol=1e-8)


@pytest.mark.parametrize("name, whiten", [("shared", True), ("own", False)])
def test_one_natural_step_with_gaussian_noise_is_vfe_from_any_start(name, whiten):
    P = None if name == "one" else 3
    X, Xs = inputs(), inputs(5, seed=9)
    y, model = observations("real", X, P), gpt.GP(gpt.Matern32(0.9, 1.3), gpt.Gaussian(0.1), MEANS["linear"])
    prior = SVGP(model, OWN if name == "own" else OWN[0], num_latents=P, whiten=whiten)
    approx, other = (quiet(start, (X, y), ONE, 1) for start in (shaken(prior), prior))
    post, total = approx.posterior(), 0.0
    assert np.allclose(numbers(approx.q), numbers(other.q), rtol=0, atol=1e-8)
    for p in range(P or 1):
        vfe = gpt.VFE(model, parts(approx)[p % len(parts(approx))])
        column = y if P is None else y[:, p]
        truth = vfe.posterior(X, column)
        total += vfe.objective(X, column)
        mean, cov = post.mean(Xs), post.covariance(Xs)
        assert np.allclose(mean if P is None else mean[:, p], truth.mean(Xs), rtol=0, atol=1e-8)
        assert np.allclose(cov if P is None else cov[p], truth.covariance(Xs), rtol=0, atol=1e-8)
    assert np.allclose(approx.objective(X, y), total, rtol=1e-10)


# natural gradients

def of_covariance(m, S):
    "Something to maximise that is not quadratic in m, as a function of S itself: its derivative there needs no chain rule."
    a = jnp.asarray(np.random.default_rng(8).normal(size=(9, len(m))))
    mean, var = a @ m, jnp.sum(a * (a @ S), axis=1)
    expected = jnp.sum(gpt.Poisson().variational_expectations(mean / 2, var / 4, jnp.arange(9.0) % 3))
    return expected - 0.5 * (jnp.trace(S) + m @ m - jnp.linalg.slogdet(S)[1])


slopes_in_covariance = jax.jit(jax.grad(of_covariance, (0, 1)))
slopes_in_factor = jax.jit(jax.grad(lambda m, R: of_covariance(m, R @ R.T), (0, 1)))
natural_step_compiled = jax.jit(natural_step)


@pytest.mark.parametrize("gamma", [1.0, 0.3])
def test_natural_step_is_its_definition(gamma):
    random = np.random.default_rng(4)
    m, R = random.normal(size=5) / 2, factors(1, 5, random)[0] / 2
    g, G = slopes_in_covariance(m, R @ R.T)
    m_bar, R_bar = slopes_in_factor(m, R)
    new_m, new_R = map(np.asarray, natural_step_compiled(m, R, m_bar, R_bar + np.triu(np.ones((5, 5)), 1), gamma))
    precision = np.linalg.inv(R @ R.T) - gamma * (G + G.T)
    assert np.linalg.eigvalsh(precision).min() > 0  # no halving here
    assert np.allclose(new_R @ new_R.T, np.linalg.inv(precision), rtol=1e-10, atol=1e-12)
    assert np.allclose(new_m, m + gamma * np.linalg.inv(precision) @ g, rtol=1e-10, atol=1e-12)
    assert np.all(np.triu(new_R, 1) == 0) and np.all(np.diag(new_R) > 0)


def test_a_step_that_leaves_the_covariances_is_halved_until_it_does_not():
    random = np.random.default_rng(4)
    m, R, m_bar = random.normal(size=5), factors(1, 5, random)[0], random.normal(size=5)
    W = np.tril(random.normal(size=(5, 5)))
    W = W + W.T
    W = 5.0 * W / np.linalg.eigvalsh(W).max()  # I - γ W is positive definite for γ < 0.2
    R_bar = np.tril(np.linalg.solve(R.T, W))
    left = [np.linalg.eigvalsh(np.eye(5) - step * symmetric(R, R_bar)).min() for step in (0.25, 0.125)]
    assert left[0] < 0 < left[1]
    halved, plain = (natural_step_compiled(m, R, m_bar, R_bar, step) for step in (1.0, 0.125))
    assert np.allclose(halved[0], plain[0], rtol=1e-12) and np.allclose(halved[1], plain[1], rtol=1e-12)
    assert np.isfinite(halved[1]).all() and np.all(np.diag(halved[1]) > 0) and np.all(np.triu(halved[1], 1) == 0)
    R_bar[2, 1] = np.nan
    assert np.isnan(natural_step_compiled(m, R, m_bar, R_bar, 1.0)[1]).any()  # and does not try for ever


def symmetric(R, R_bar):
    W = np.tril(R.T @ R_bar)
    return W + np.tril(W, -1).T


def test_a_log_density_that_is_not_concave_keeps_a_covariance():
    X, model = np.repeat(Z, 5, axis=0) + 0.01, gpt.GP(gpt.Matern32(0.9, 1.3), gpt.StudentT(0.3))
    y = np.random.default_rng(0).choice([-1.0, 1.0], 30)  # where f is near zero every datum has a negative precision
    R = 0.2 * np.eye(6)
    start = with_q(SVGP(model, InducingPoints(Z)), np.zeros(6), R)
    R_bar = jax.jit(jax.grad(lambda R: with_q(start, jnp.zeros(6), R).objective(X, y)))(R)
    assert np.linalg.eigvalsh(np.eye(6) - symmetric(R, R_bar)).min() < 0  # a step of one is too long
    for size in (ONE, natural_gradient(0.2)):
        end = quiet(start, (X, y), size, 20)
        assert np.all(np.diag(end.q.S_factor.value) > 0) and np.isfinite(end.posterior().covariance(X)).all()
    assert end.objective(X, y) > start.objective(X, y) + 1  # small steps climb


@pytest.mark.parametrize("frozen", [True, False])
def test_without_another_optimiser_only_q_moves(frozen):
    approx, X, y = case("one")
    model, inducing = approx.model, approx.inducing
    if frozen:
        approx = eqx.tree_at(lambda a: (a.model, a.inducing), approx, gpt.freeze((model, inducing)))
    end = quiet(approx, (X, y), HALF, 3)
    assert np.array_equal(numbers((end.model, end.inducing)), numbers((model, inducing)))
    assert not np.allclose(end.q.m.value, approx.q.m.value) and end.objective(X, y) > approx.objective(X, y) + 1


def test_the_rest_moves_as_its_optimiser_says():
    (approx, X, y), rest = case("one"), optax.adam(0.01)
    end = quiet(approx, (X, y), natural_gradient(0.5, rest), 1)
    loss = lambda part: -eqx.tree_at(lambda a: (a.model, a.inducing), approx, part).objective(X, y)
    part = gpt.partition((approx.model, approx.inducing))
    moving = lambda free_part: loss(eqx.combine(free_part, part[1]))

    @jax.jit
    def moved(free_part):
        updates, _ = rest.update(jax.grad(moving)(free_part), rest.init(free_part), free_part)
        return eqx.apply_updates(free_part, updates)

    expected = numbers(eqx.combine(moved(part[0]), part[1]))
    assert np.allclose(numbers((end.model, end.inducing)), expected, rtol=1e-8, atol=1e-10)
    only_q = quiet(approx, (X, y), HALF, 1)
    assert np.allclose(numbers(end.q), numbers(only_q.q), rtol=1e-8, atol=1e-10) and not np.allclose(numbers(end.q), numbers(approx.q))


def test_a_schedule_gives_each_step_its_size():
    approx, X, y = case("one")
    scheduled = quiet(approx, (X, y), natural_gradient(lambda taken: 0.5 / (1 + taken)), 2)
    stepwise = approx
    for optimiser in (HALF, natural_gradient(0.25)):
        stepwise = quiet(stepwise, (X, y), optimiser, 1)
    assert np.allclose(numbers(scheduled.q), numbers(stepwise.q), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name, dtype", [("one", jnp.float32)])
def test_minibatches_in_fit(name, dtype):
    approx, X, y = case(name)
    approx, X, y = gpt.cast(approx, dtype), jnp.asarray(X, dtype), jnp.asarray(y, dtype)
    optimiser = natural_gradient(0.1, optax.adam(1e-2))
    run = lambda key: gpt.fit(approx, (X, y), optimiser=optimiser, steps=60, batch_size=10, key=jax.random.key(key), progress=False)
    first, again, other = run(0), run(0), run(1)
    assert np.array_equal(numbers(first.approx), numbers(again.approx))
    assert not np.array_equal(numbers(first.approx), numbers(other.approx))
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(gpt.partition(first.approx)[0]))
    assert first.approx.objective(X, y) > approx.objective(X, y) + 5


def test_natural_gradient_refuses_what_it_cannot_move():
    approx, X, y = case("one")
    for wrong in (0.0, -0.1, 1.5, jnp.nan):
        with pytest.raises(ValueError, match="step_size must be above 0 and at most 1, or a schedule"):
            natural_gradient(wrong)
    with pytest.raises(ValueError, match="a VariationalGaussian q that is not frozen"):
        gpt.fit(gpt.VGP(approx.model, 30), (X, y), optimiser=natural_gradient(0.5), steps=1, progress=False)
    frozen = eqx.tree_at(lambda a: a.q, approx, gpt.freeze(approx.q))
    half = eqx.tree_at(lambda a: a.q.S_factor, approx, gpt.freeze(approx.q.S_factor))
    for wrong in (frozen, half):
        with pytest.raises(ValueError, match="a VariationalGaussian q that is not frozen"):
            gpt.fit(wrong, (X, y), optimiser=natural_gradient(0.5), steps=1, progress=False)


# minibatches

def test_a_partition_into_minibatches_averages_to_the_whole():
    approx, X, y = case("one")
    estimate = eqx.filter_jit(eqx.filter_value_and_grad(lambda approx, X, y: approx.objective(X, y, num_data=30)))
    each = [estimate(approx, X[i:i + 6], y[i:i + 6]) for i in range(0, 30, 6)]
    value, gradient = np.mean([one[0] for one in each]), np.mean([numbers(one[1]) for one in each], axis=0)
    whole = estimate(approx, X, y)
    assert np.allclose(value, whole[0], rtol=1e-10) and np.allclose(gradient, numbers(whole[1]), rtol=1e-9, atol=1e-9)


def test_random_minibatches_are_unbiased():
    approx, X, y = case("one", rows=200)
    random = np.random.default_rng(0)
    estimate = jax.jit(lambda X, y: approx.objective(X, y, num_data=200))
    values = [estimate(X[rows], y[rows]) for rows in (random.choice(200, 10, replace=False) for _ in range(1000))]
    error = np.std(values) / np.sqrt(1000)
    assert abs(np.mean(values) - approx.objective(X, y)) < 4 * error and error > 1e-3


def test_num_data_scales_the_data_and_not_the_kl():
    approx, X, y = case("one")
    one, ten = approx.objective(X, y), approx.objective(X, y, num_data=300)
    kl = gpt.unwrap(approx.q).kl_from_standard_normal()
    assert np.allclose(ten, 10 * (one + kl) - kl, rtol=1e-10) and approx.objective(X, y, num_data=30) == one
    with pytest.raises(ValueError, match="num_data must be at least 30, the rows of the batch, got 29"):
        approx.objective(X, y, num_data=29)


# AdaDelta and k-means

def test_adadelta_is_its_recursion():
    rate, momentum, decay, offset = 0.3, 0.8, 0.7, 1e-3
    optimiser = adadelta(rate, momentum, decay, offset)
    params, update = np.array([1.0, -2.0, 0.5]), jax.jit(optimiser.update)
    state, random = optimiser.init(params), np.random.default_rng(0)
    square, step_square, speed = np.zeros(3), np.zeros(3), np.zeros(3)
    for _ in range(6):
        g = random.normal(size=3)
        square = decay * square + (1 - decay) * g**2
        step = np.sqrt(step_square + offset) / np.sqrt(square + offset) * g
        step_square = decay * step_square + (1 - decay) * step**2
        speed = step + momentum * speed
        updates, state = update(g, state, params)
        assert np.allclose(updates, -rate * (step + momentum * speed), rtol=1e-12)  # Nesterov: where the speed is going to take it


def test_kmeans_centres_are_centres():
    random = np.random.default_rng(0)
    corners = np.array([[0.0, 0], [0, 9], [9, 0], [9, 9]])
    X = np.repeat(corners, 25, axis=0) + 0.1 * random.normal(size=(100, 2))
    centres = kmeans_centres(X, 4)
    assert centres.shape == (4, 2) and centres.dtype == X.dtype
    means = X.reshape(4, 25, 2).mean(1)
    assert all(np.isclose(centres, mean).all(axis=1).any() for mean in means)
    many = random.normal(size=(300, 3))
    assert np.array_equal(kmeans_centres(many, 7), kmeans_centres(many, 7))
    assert not np.array_equal(kmeans_centres(many, 7), kmeans_centres(many, 7, seed=1))
    assert kmeans_centres(many.astype(np.float32), 5).dtype == np.float32
    large = random.normal(size=(1001, 1000))
    assert kmeans_centres(large, 5).shape == (5, 1000)  # more than a million numbers: from batches


def test_kmeans_centres_of_a_part_of_many_rows_are_nearly_as_near():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60_000, 3)) + 4 * rng.integers(0, 3, size=(60_000, 1))
    spread = lambda Z: np.mean(cKDTree(Z).query(X)[0] ** 2)
    every = KMeans(12, n_init=1, random_state=0).fit(X).cluster_centers_
    assert 1 - 0.02 < spread(kmeans_centres(X, 12)) / spread(every) < 1 + 0.02
    rare = np.repeat([[0.0], [1.0]], [60_000, 1], axis=0)                        # the part may not have the second
    assert np.allclose(sorted(kmeans_centres(rare, 2).ravel()), [0.0, 1.0])


def test_kmeans_centres_refuses():
    X = np.repeat(np.arange(3.0), 4)[:, None]
    assert sorted(kmeans_centres(X, 3).ravel()) == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="num_inducing must be at most 3, the number of distinct rows of X, got 4"):
        kmeans_centres(X, 4)
    for wrong in (0, 2.0, True):
        with pytest.raises(ValueError, match="num_inducing must be a positive integer"):
            kmeans_centres(X, wrong)
    for wrong in (np.where(X == 1, np.nan, X), X[:, 0]):
        with pytest.raises(ValueError, match="X must"):
            kmeans_centres(wrong, 2)


# single precision and corners

def test_single_precision_is_close():
    X, P = inputs(150), 1
    y = observations("binary", X)
    model = gpt.GP(gpt.RBF(0.4, 1.3), gpt.Bernoulli(), MEANS["linear"])  # K_uu of a condition that leaves single precision a meaning
    grid = np.stack(np.meshgrid(*[np.linspace(0, 4, 10)] * 2), axis=-1).reshape(100, 2)
    approx = SVGP(model, InducingPoints(grid), P, whiten=False)
    random = np.random.default_rng(0)
    A = np.linalg.cholesky(model.kernel(grid))
    m, R = random.normal(size=(100, P)), np.eye(100) * random.uniform(0.3, 1.2, (P, 1, 100))
    m, R = (A @ m).reshape(approx.q.m.value.shape), (A @ R).reshape(approx.q.S_factor.value.shape)
    approx = with_q(approx, m, R)

    def run(dtype):
        flat, f = flat_function(bound, gpt.cast(approx, dtype), jnp.asarray(X, dtype), jnp.asarray(y, dtype))
        return f(flat)

    (value, gradient), (truth, slope) = run(jnp.float32), run(jnp.float64)
    assert value.dtype == gradient.dtype == jnp.float32
    assert abs(value - truth) < 1e-2 * abs(truth)
    assert np.abs(gradient - slope).max() < 1e-2 * np.abs(slope).max()


CORNERS = {
    "duplicated": lambda X: np.concatenate([X[:4] + 0.1, X[:4] + 0.1]),
    "all the data twice": lambda X: np.concatenate([X, X]), "one": lambda X: X[:1] + 0.1, "more than rows": lambda X: inputs(24, seed=5),
}


@pytest.mark.parametrize("corner, P, dtype", [("all the data twice", 1, jnp.float32), ("one", 1, jnp.float64),
                                              ("duplicated", 2, jnp.float32), ("more than rows", 1, jnp.float64)])
def test_corners_are_finite(corner, P, dtype):
    X = inputs(12)
    y, model = observations("binary", X, None if P == 1 else P), gpt.GP(gpt.RBF(0.9, 1.3), gpt.Bernoulli())
    approx = SVGP(model, InducingPoints(CORNERS[corner](X)), P)
    tiny = with_q(approx, approx.q.m.value, 1e-5 * np.asarray(approx.q.S_factor.value))
    approx, tiny = gpt.cast((approx, tiny), dtype)
    X, y = X.astype(dtype), y.astype(dtype)
    value, gradient, _, at_prior = at_a_corner(approx, X, y)
    tiny_value, tiny_gradient, (mean, var), _ = at_a_corner(tiny, X, y)
    assert np.isfinite([value, tiny_value]).all() and np.isfinite([numbers(gradient), numbers(tiny_gradient)]).all()
    assert np.allclose(value, at_prior, rtol=1e-4 if dtype == jnp.float32 else 1e-6)
    assert np.isfinite(mean).all() and (var >= 0).all() and mean.dtype == value.dtype == dtype


@eqx.filter_jit
def at_a_corner(approx, X, y):
    "Bound, gradient, marginals, and the bound where q is the prior: no KL, and the prior's own variances."
    value, gradient = eqx.filter_value_and_grad(bound)(approx, X, y)
    at_prior = gpt.unwrap(approx.model.likelihood).variational_expectations(np.zeros(y.shape), np.full(y.shape, 1.3), y)
    return value, gradient, approx.posterior().marginals(X), jnp.sum(at_prior)


# bad input

@pytest.fixture
def uncompiled(monkeypatch):
    "Fails where anything is compiled."
    def refuse(*_):
        raise AssertionError("the bound was compiled")
    monkeypatch.setattr(SVGP, "bound", refuse)


BAD_LABELS = [(gpt.RobustMax(3), -1.0), (gpt.RobustMax(3), 3.0), (gpt.Softmax(3), 0.5), (gpt.RobustMax(3), np.nan), (gpt.Bernoulli(), 2.0),
              (gpt.Beta(), 1.2), (gpt.Beta(), 0.0), (gpt.Poisson(), -1.0), (gpt.Poisson(), 1.5), (gpt.Gamma(), 0.0)]


@pytest.mark.parametrize("likelihood, value", BAD_LABELS, ids=lambda x: type(x).__name__ if not isinstance(x, float) else str(x))
def test_observations_outside_the_support_are_refused_before_compilation(likelihood, value, uncompiled):
    X = inputs()
    y = np.full(30, 0.5) if isinstance(likelihood, gpt.Beta) else np.ones(30)
    approx = SVGP(gpt.GP(gpt.RBF(), likelihood), InducingPoints(Z))
    with pytest.raises(AssertionError, match="compiled"):
        approx.objective(X, y)
    y[7] = value
    fit = lambda X, y: gpt.fit(approx, (X, y), optimiser=HALF, steps=1, batch_size=5, key=jax.random.key(0))
    for run in (approx.objective, fit):
        with pytest.raises(ValueError, match=r"y must hold .*1 of 30 values are something else; the first is y\[7\]"):
            run(X, y)


def test_data_that_do_not_fit_are_refused_before_compilation(uncompiled):
    X = inputs()
    one, three, classes = (case(name)[0] for name in ("one", "shared", "robust max"))
    y, Y, labels = (observations(*a) for a in (("binary", X), ("binary", X, 3), ("classes", X)))
    wrong = lambda match: pytest.raises(ValueError, match=match)
    for approx, observed, shape in ((one, Y, r"\(30,\)"), (three, y, r"\(30, 3\)"), (three, Y[:, :2], r"\(30, 3\)")):
        with wrong(f"y must have shape {shape}, to fit latent functions of shape"):
            approx.objective(X, observed)
    with wrong(r"y must have shape \(N,\)"):
        classes.objective(X, np.eye(3)[labels.astype(int)])
    with wrong("X must have 2 columns, as the inducing variables have"):
        SVGP(gpt.GP(gpt.RBF(), gpt.Bernoulli()), InducingPoints(Z)).objective(X[:, :1], y)
    with wrong("same number of rows"):
        one.objective(X, y[:-1])
    with wrong("X must"):
        one.objective(np.where(X < 1, np.nan, X), y)
    with wrong("mixed dtypes: X is float64"):
        gpt.cast(one, np.float32).objective(X, y)


def test_arguments_that_do_not_fit_are_refused():
    binary, classes = gpt.GP(gpt.RBF(), gpt.Bernoulli()), gpt.GP(gpt.RBF(), gpt.RobustMax(3))
    points = InducingPoints(Z)
    wrong = lambda match: pytest.raises(ValueError, match=match)
    for inducing in (Z, [], [points, Z], None, gpt.RBF()):
        with wrong("inducing must be inducing variables such as InducingPoints"):
            SVGP(binary, inducing)
    for other in (InducingPoints(Z[:4]), InducingPoints(Z[:, :1])):
        with wrong("must be equally many, on equally many columns"):
            SVGP(binary, [points, other])
    with wrong("inducing must have one entry for each of 3 latent functions, got 2"):
        SVGP(classes, [points, points], num_latents=3)
    for model, inducing, P in ((classes, points, 2), (classes, [points, points], None)):
        with wrong("RobustMax looks at 3 latent functions at once"):
            SVGP(model, inducing, num_latents=P)
    for P in (0, -1, 2.0, True):
        with wrong("num_latents must be a positive integer"):
            SVGP(binary, points, num_latents=P)
    for model in (gpt.RBF(), None):
        with wrong("model must be a gp_thesis GP"):
            SVGP(model, points)


def test_a_class_missing_from_a_batch_is_no_matter():
    approx, X, _ = case("robust max")
    flat, f = flat_function(lambda a, X, y: a.objective(X, y, num_data=30), approx, X[:7], np.zeros(7))
    value, gradient = f(flat)
    assert np.isfinite(value) and np.isfinite(gradient).all()


# the posterior

@pytest.mark.parametrize("name", ["one", "own, plain", "robust max"])
def test_posterior_answers_in_its_shapes(name):
    approx, X, y = case(name)
    post, Xs, ys = approx.posterior(), inputs(5, seed=9), y[:5]
    P = approx.q.m.value.shape[1:]
    mean, var = map(np.asarray, post.marginals(Xs))
    cov = np.asarray(post.covariance(Xs))
    assert mean.shape == var.shape == (5, *P) and cov.shape == (*P, 5, 5) and post.covariance(Xs, X).shape == (*P, 5, 30)
    assert np.allclose(np.diagonal(cov, axis1=-2, axis2=-1).T, var, rtol=1e-8) and (var > 0).all()
    assert np.allclose(post.covariance(Xs, Xs), cov, rtol=0, atol=1e-12)
    draws = np.asarray(post.sample(jax.random.key(0), Xs, 4000))
    assert draws.shape == (4000, 5, *P)
    assert (np.abs(draws.mean(0) - mean) < 5 * np.sqrt(var / 4000)).all()
    y_mean, y_var = map(np.asarray, post.predict_y(Xs))
    assert y_mean.shape == y_var.shape == (5, *P)
    lpd = np.asarray(post.log_predictive_density(Xs, ys))
    assert lpd.shape == ys.shape and (lpd < 0).all()
    if "robust" in name:
        assert np.allclose(y_mean.sum(1), 1, atol=1e-3)
        assert np.allclose(np.exp(lpd), y_mean[np.arange(5), ys.astype(int)], atol=1e-8)
    with pytest.raises(ValueError, match="Xs must"):
        post.mean(Xs[:, :1])
    with pytest.raises(ValueError, match="ys must have shape"):
        post.log_predictive_density(Xs, ys[:-1])


def test_separate_posterior_is_its_parts():
    approx, X, _ = case("own")
    post, Xs = approx.posterior(), inputs(5, seed=9)
    for p, part in enumerate(post.posteriors):
        assert np.array_equal(post.mean(Xs)[:, p], part.mean(Xs)) and np.array_equal(post.marginals(Xs)[1][:, p], part.marginals(Xs)[1])
        assert np.array_equal(post.covariance(Xs, X)[p], part.covariance(Xs, X))
    assert post.num_dims == 2 and type(post.model.mean) is type(approx.model.mean)


def test_chunks_of_rows_change_nothing(monkeypatch):
    approx, X, y = case("shared", rows=53)  # rows that no other test has: the program that is kept has small chunks
    monkeypatch.setattr(products, "TALL", 0)
    monkeypatch.setattr(products, "CHUNK", 6 * 10)  # five chunks of nine rows and one of eight
    flat, chunked = flat_function(bound, approx, X, y)
    assert "scan" in str(jax.make_jaxpr(chunked)(flat))
    value, gradient = chunked(flat)
    whole, slope = flat_function(written_out, approx, jnp.asarray(X), jnp.asarray(y))[1](flat)
    assert np.allclose(value, whole, rtol=1e-10)
    assert np.abs(gradient - slope).max() < 1e-8 * np.abs(slope).max()


# ---- a kernel for each latent function

def shaken(approx):
    "The same with q off the prior."
    move = lambda leaf: leaf + 0.1 * np.random.default_rng(1).normal(size=leaf.shape)
    return eqx.tree_at(lambda approx: approx.q, approx, jax.tree.map(move, approx.q))


@pytest.mark.parametrize("whiten", [True, False])
def test_a_kernel_for_each_latent_function_is_a_regression_for_each(whiten):
    rng = np.random.default_rng(0)
    X, Y, Xs = rng.normal(size=(12, 2)), rng.normal(size=(12, 2)), rng.normal(size=(4, 2))
    kernels, level = (gpt.RBF([0.5, 1.0], 0.8), gpt.Matern32(0.7, 1.5)), np.array([0.3, -1.0])
    Z = [gpt.InducingPoints(X[:4]), gpt.InducingPoints(X[4:8])]
    model = gpt.GP(gpt.Independent(kernels), gpt.Gaussian(0.2), gpt.ConstantMean(level))
    for inducing in (Z[0], Z):                                        # shared inducing points, or each its own
        both = shaken(gpt.SVGP(model, inducing, whiten=whiten))
        assert both.q.m.value.shape == (4, 2)
        alone = []
        for p in range(2):
            own = inducing if inducing is Z[0] else inducing[p]
            one = gpt.SVGP(gpt.GP(kernels[p], gpt.Gaussian(0.2), gpt.ConstantMean(level[p])), own, whiten=whiten)
            q = (gpt.free(both.q.m.value[:, p]), gpt.lower_triangular(both.q.S_factor.value[p]))
            alone.append(eqx.tree_at(lambda a: (a.q.m, a.q.S_factor), one, q))
        assert np.isclose(both.objective(X, Y), sum(one.objective(X, Y[:, p]) for p, one in enumerate(alone)), rtol=1e-10)
        post, posts = both.posterior(), [one.posterior() for one in alone]
        for ours, theirs in zip(post.marginals(Xs), zip(*(each.marginals(Xs) for each in posts))):
            np.testing.assert_allclose(ours, np.stack(theirs, 1), rtol=1e-8, atol=1e-10)
        assert all(np.array_equal(post.mean(Xs)[:, p], part.mean(Xs)) for p, part in enumerate(post.posteriors))
        np.testing.assert_allclose(post.covariance(Xs, X), np.stack([each.covariance(Xs, X) for each in posts]), rtol=1e-8, atol=1e-10)
        assert post.sample(jax.random.key(0), Xs, 3).shape == (3, 4, 2) and post.predict_y(Xs)[0].shape == (4, 2)
        assert post.log_predictive_density(Xs, Y[:4]).shape == (4, 2)


def test_equal_kernels_for_each_are_the_shared_kernel():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(12, 2)), rng.integers(0, 2, 12).astype(float)
    shared, each = (shaken(gpt.SVGP(gpt.GP(kernel, gpt.Softmax(2)), gpt.InducingPoints(X[:4])))
                    for kernel in (gpt.RBF(0.8), gpt.Independent([gpt.RBF(0.8), gpt.RBF(0.8)])))
    (value, slope), (value2, slope2) = (eqx.filter_jit(eqx.filter_value_and_grad(lambda approx: approx.objective(X, y)))(a) for a in (shared, each))
    assert np.isclose(value, value2, rtol=1e-12)
    for a, b in zip(jax.tree.leaves(slope.q), jax.tree.leaves(slope2.q)):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)
    kernels = slope2.model.kernel.kernels
    total = kernels[0].lengthscale.unconstrained + kernels[1].lengthscale.unconstrained
    assert np.isclose(total, slope.model.kernel.lengthscale.unconstrained, rtol=1e-8)
    assert kernels[0].lengthscale.unconstrained != kernels[1].lengthscale.unconstrained


def test_noise_with_a_function_of_its_own_is_learned():
    x = np.linspace(0, 1, 60)[:, None]
    sd = 0.05 + 0.6 * (x[:, 0] > 0.5)
    y = np.sin(6 * x[:, 0]) + sd * np.random.default_rng(0).normal(size=60)
    model = gpt.GP(gpt.Independent([gpt.RBF(0.3), gpt.RBF(0.2)]), gpt.Heteroscedastic(), gpt.ConstantMean([0.0, -2.0]))
    fitted = gpt.fit(gpt.SVGP(model, gpt.InducingPoints(x[::6])), (x, y), optimiser=gpt.natural_gradient(0.1, optax.adam(0.02)), steps=150, progress=False)
    learned = np.exp(0.5 * np.asarray(fitted.approx.posterior().mean(x)[:, 1]))
    assert 0.5 < np.median(learned[:25] / sd[:25]) < 2 and 0.5 < np.median(learned[35:] / sd[35:]) < 2
    first, second = fitted.approx.model.kernel.kernels
    assert float(first.lengthscale) != 0.3 and float(second.lengthscale) != 0.2


@pytest.mark.parametrize("make, words", [
    (lambda model, points: gpt.SVGP(model, points, num_latents=3), "Independent must hold a kernel for each of 3 latent functions, got 2"),
    (lambda model, points: gpt.SVGP(model, [points] * 3), "Independent must hold a kernel for each of 3 latent functions, got 2"),
    (lambda model, points: gpt.GFITC(model, points).objective(np.ones((3, 1)), np.ones(3)), "Independent holds a kernel for each of 2 functions"),
])
def test_kernels_and_latent_functions_are_equally_many(make, words):
    with pytest.raises(ValueError, match=words):
        make(gpt.GP(gpt.Independent([gpt.RBF(), gpt.RBF()]), gpt.Bernoulli()), gpt.InducingPoints(np.arange(2.0)[:, None]))
