"Power EP regression and its corners, against formulas with N x N matrices, exact regression, finite differences and each other."
import warnings

import equinox as eqx
import gp_thesis as gpt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gp_thesis import products
from gp_thesis.inducing import GaussianWindow, InducingPoints
from gp_thesis.linalg import log_density
from gp_thesis.processes import kl_to_posterior
from gp_thesis.sparse import DTC, FITC, PITC, VFE, PowerEPRegression, uncollapsed_bound
from jax.flatten_util import ravel_pytree

NOISE = 0.1


def problem(seed=0, rows=40, columns=2, kernel=gpt.Matern32, mean=gpt.Zero()):
    random = np.random.default_rng(seed)
    X = jnp.asarray(random.uniform(0, 4, (rows, columns)))
    y = jnp.asarray(np.sin(X).sum(1) + 0.3 * random.normal(size=rows))
    return gpt.GP(kernel(0.9, 1.3), gpt.Gaussian(NOISE), mean), X, y


def blocks_of(rows, seed=0, number=5):
    return np.array_split(np.random.default_rng(seed).permutation(rows), number)


def written_out(model, inducing, X, y, power, blocks):
    "Bui's section 2.3.7 word for word: (objective, mean of u, covariance of u), with N x N matrices."
    kernel, noise = gpt.unwrap(model.kernel), NOISE
    Kuu, Kuf = gpt.unwrap(inducing).covariance(kernel), gpt.unwrap(inducing).cross_covariance(kernel, X)
    Q = Kuf.T @ jnp.linalg.solve(Kuu, Kuf)
    D, S, price = kernel.evaluate(X) - Q, noise * jnp.eye(len(X)), 0.0
    for alpha, rows in zip(np.broadcast_to(power, len(blocks)), blocks):
        square = np.ix_(rows, rows)
        S = S.at[square].add(alpha * D[square])
        if alpha == 0:
            price += jnp.trace(D[square]) / (2 * noise)
        else:
            price += (1 - alpha) / (2 * alpha) * jnp.linalg.slogdet(jnp.eye(len(rows)) + alpha * D[square] / noise)[1]
    residual = y - model.mean(X)
    G = jnp.linalg.solve(Q + S, Kuf.T)
    return log_density(residual, 0.0, Q + S) - price, G.T @ residual, Kuu - Kuf @ G


CASES = {
    "VFE": (0.0, None), "half": (0.5, None), "FITC": (1.0, None),
    "each its own": (np.linspace(0, 1, 40), None), "PITC": (1.0, "blocks"), "blocks": (0.4, "blocks"),
    "blocks of their own": ([0.0, 0.2, 0.5, 0.9, 1.0], "blocks"), "VFE in blocks": (0.0, "blocks"),
}


@pytest.mark.parametrize("case", [*CASES, "each its own, windows", "blocks of their own, windows"])
def test_closed_form_is_the_formula_written_out(case):
    windows, case = case.endswith("windows"), case.removesuffix(", windows")
    inducing = (lambda Z: GaussianWindow(Z, 0.3)) if windows else InducingPoints
    power, blocks = CASES[case]
    model, X, y = problem(mean=gpt.ConstantMean(0.4) if windows else gpt.Zero(), kernel=gpt.RBF)
    blocks = blocks and blocks_of(len(X), number=5)
    variables = inducing(X[:7])
    approx = PowerEPRegression(model, variables, power, blocks)
    objective, m, S = written_out(model, variables, X, y, power, blocks or np.arange(len(X))[:, None])
    post = approx.posterior(X, y)
    assert jnp.allclose(approx.objective(X, y), objective, rtol=1e-9, atol=1e-9)
    assert jnp.allclose(post.inducing_mean, m, rtol=0, atol=1e-8) and jnp.allclose(post.inducing_covariance, S, rtol=0, atol=1e-8)


@pytest.mark.parametrize("case, kernel", [*((case, gpt.RBF) for case in CASES),
                                          ("each its own", gpt.Matern52), ("blocks of their own", gpt.Matern52)])
def test_all_data_as_inducing_points_is_exact(case, kernel):
    power, blocks = CASES[case]
    model, X, y = problem(1, kernel=kernel, mean=gpt.LinearMean([0.1, -0.2]))
    approx = PowerEPRegression(model, InducingPoints(X), power, blocks and blocks_of(40))
    exact, Xs = gpt.Exact(model), jnp.asarray(np.random.default_rng(2).uniform(0, 4, (15, 2)))
    post, truth = approx.posterior(X, y), exact.posterior(X, y)
    assert jnp.allclose(approx.objective(X, y), exact.objective(X, y), rtol=0, atol=1e-8)
    assert jnp.allclose(post.mean(Xs), truth.mean(Xs), rtol=0, atol=1e-8)
    assert jnp.allclose(post.covariance(Xs), truth.covariance(Xs), rtol=0, atol=1e-8)


def test_power_to_zero_is_linear_in_the_power():
    model, X, y = problem()
    for blocks in (None, blocks_of(len(X))):
        objective = lambda power: PowerEPRegression(model, InducingPoints(X[:9]), power, blocks).objective(X, y)
        slopes = [(objective(power) - objective(0.0)) / power for power in (1e-3, 1e-4, 1e-5)]
        assert abs(slopes[0]) > 1 and abs(slopes[1] / slopes[0] - 1) < 0.02 and abs(slopes[2] / slopes[1] - 1) < 0.002


def test_one_block_of_all_rows_with_power_one_is_exact_at_Z():
    model, X, y = problem()
    approx, Z = PITC(model, InducingPoints(X[:5] + 0.1), [np.arange(len(X))]), X[:5] + 0.1
    post, exact = approx.posterior(X, y), gpt.Exact(model)
    assert jnp.allclose(approx.objective(X, y), exact.objective(X, y), rtol=0, atol=1e-8)
    assert jnp.allclose(post.mean(Z), exact.posterior(X, y).mean(Z), rtol=0, atol=1e-8)
    assert jnp.allclose(post.covariance(Z), exact.posterior(X, y).covariance(Z), rtol=0, atol=1e-8)


def test_dtc_is_the_evidence_of_a_low_rank_prior_with_the_variational_posterior():
    model, X, y = problem()
    Kuf = model.kernel(X[:6], X)
    Q = Kuf.T @ jnp.linalg.solve(model.kernel(X[:6]), Kuf)
    dtc, vfe = DTC(model, InducingPoints(X[:6])), VFE(model, InducingPoints(X[:6]))
    assert jnp.allclose(dtc.objective(X, y), log_density(y, 0.0, Q, diagonal=NOISE), rtol=0, atol=1e-8)
    assert jnp.allclose(vfe.objective(X, y), dtc.objective(X, y) - jnp.trace(model.kernel(X) - Q) / (2 * NOISE), rtol=0, atol=1e-8)
    assert jnp.allclose(dtc.posterior(X, y).covariance(X), vfe.posterior(X, y).covariance(X))


@pytest.mark.parametrize("seed", range(12))
def test_bounds_enclose_the_evidence_tighten_with_M_and_leave_the_kl(seed):
    model, X, y = problem(seed, rows=30, columns=2 - seed % 2, kernel=(gpt.RBF, gpt.Matern12)[seed % 2])
    exact = gpt.Exact(model)
    evidence, last = exact.objective(X, y), -jnp.inf
    for M in (2, 9, 30):
        approx = VFE(model, InducingPoints(X[:M]))
        lower, upper = interval = approx.evidence_interval(X, y)
        assert jnp.allclose(lower, approx.objective(X, y), rtol=1e-12) and interval.kl_bound == upper - lower
        assert last - 1e-9 <= lower <= evidence + 1e-9 and evidence <= upper + 1e-9
        kl = kl_to_posterior(approx.posterior(X, y), exact.posterior(X, y))
        assert jnp.allclose(kl, evidence - lower, rtol=0, atol=1e-8)
        last = lower


@pytest.mark.parametrize("seed", range(6))
def test_optimised_bound_stays_below_the_evidence_and_grows_with_M(seed):
    model, X, y = problem(seed, rows=25, columns=1)
    fixed, last, Z = gpt.freeze(model), -jnp.inf, X[:2]
    for M in (2, 3, 4, 6):
        Z = jnp.concatenate([Z, X[len(Z):M]])  # the optimum so far, and new points: theorem 3's extended family
        fit = gpt.fit(VFE(fixed, InducingPoints(Z)), (X, y), steps=200, progress=False)
        Z, bound = fit.approx.inducing.Z.value, fit.approx.objective(X, y)
        assert last - 1e-9 <= bound <= gpt.Exact(model).objective(X, y) + 1e-9
        last = bound


def test_outputs_share_q_and_add_up():
    model, X, y = problem(mean=gpt.ConstantMean(0.2))
    Y = jnp.stack([y, y**2, -y], axis=1)
    for approx in (VFE(model, InducingPoints(X[:8])), FITC(model, InducingPoints(X[:8])),
                   PITC(model, InducingPoints(X[:8]), blocks_of(len(X)))):
        assert jnp.allclose(approx.objective(X, Y), sum(approx.objective(X, column) for column in Y.T), rtol=1e-10)
        post = approx.posterior(X, Y)
        for p, column in enumerate(Y.T):
            alone = approx.posterior(X, column)
            assert jnp.allclose(post.mean(X)[:, p], alone.mean(X)) and jnp.allclose(post.covariance(X)[p], alone.covariance(X))


@pytest.mark.parametrize("case", ["each its own", "blocks of their own", "VFE in blocks"])
def test_gradients_with_powers_and_blocks_of_their_own_are_finite_differences(case):
    power, blocks = CASES[case]
    model, X, y = problem(mean=gpt.LinearMean([0.1, -0.2]))
    approx = PowerEPRegression(model, InducingPoints(X[:7]), power, blocks and blocks_of(len(X), number=5))
    trainable, rest = gpt.partition(approx)
    flat, unravel = ravel_pytree(trainable)
    objective = jax.jit(jax.value_and_grad(lambda v: eqx.combine(unravel(v), rest).objective(X, y)))
    gradient, step = objective(flat)[1], 1e-5
    shifts = step * jnp.eye(len(flat))
    differences = jnp.stack([(objective(flat + s)[0] - objective(flat - s)[0]) / (2 * step) for s in shifts])
    assert jnp.abs(gradient - differences).max() < 1e-6 * jnp.abs(differences).max()


@pytest.mark.parametrize("case", ["VFE", "each its own", "blocks of their own"])
def test_float32_gradients_are_finite_and_close(case):
    power, blocks = CASES[case]
    model, X, y = problem(kernel=gpt.RBF)

    def gradient(dtype):
        approx = PowerEPRegression(gpt.cast(model, dtype), InducingPoints(X[:7].astype(dtype)), power, blocks and blocks_of(40))
        trainable, rest = gpt.partition(approx)
        objective = jax.jit(lambda t: eqx.combine(t, rest).objective(X.astype(dtype), y.astype(dtype)))
        return ravel_pytree(jax.grad(objective)(trainable))[0]

    single, double = gradient(jnp.float32), gradient(jnp.float64)
    assert single.dtype == jnp.float32 and jnp.isfinite(single).all()
    assert jnp.abs(single - double).max() < 1e-2 * jnp.abs(double).max()


def test_chunks_of_rows_change_nothing(monkeypatch):
    model, X, y = problem(rows=103)
    approxes = [PowerEPRegression(model, InducingPoints(X[:6] + 0.05), power) for power in (0.0, np.linspace(0, 1, 103))]

    def everything(approx):
        "Bound, gradient and mean of q, compiled anew: the size of a chunk is read when a program is traced."
        trainable, rest = gpt.partition(approx)
        whole = lambda trainable: gpt.unwrap(eqx.combine(trainable, rest))
        bound = lambda trainable: whole(trainable).bound(X, y)
        (value, gradient), m = jax.jit(lambda t: (jax.value_and_grad(bound)(t), whole(t).q_f(X, y).m))(trainable)
        return value, ravel_pytree(gradient)[0], m

    at_once = [everything(approx) for approx in approxes]
    monkeypatch.setattr(products, "CHUNK", 6 * 20)
    for approx, (value, gradient, m) in zip(approxes, at_once):
        in_chunks = everything(approx)
        assert jnp.allclose(in_chunks[0], value, rtol=1e-12) and jnp.allclose(in_chunks[2], m, rtol=1e-8)
        assert jnp.allclose(in_chunks[1], gradient, rtol=1e-8, atol=1e-8 * jnp.abs(gradient).max())


def test_statistics_of_batches_add_up():
    model, X, y = problem(rows=60)
    for power in (0.0, 0.6):
        approx = PowerEPRegression(model, InducingPoints(X[:6]), power)
        total = sum(approx.statistics(X[i:i + 17], y[i:i + 17]) for i in range(0, 60, 17))
        assert jnp.allclose(approx.objective_from(total), approx.objective(X, y), rtol=1e-12)
        assert jnp.allclose(approx.posterior_from(total).covariance(X), approx.posterior(X, y).covariance(X), atol=1e-10)


def test_statistics_of_batches_give_the_gradient():
    model, X, y = problem(rows=60)
    trainable, rest = gpt.partition(VFE(model, InducingPoints(X[:6])))

    def streamed(t):
        approx = eqx.combine(t, rest)
        return approx.objective_from(sum(approx.statistics(X[i:i + 20], y[i:i + 20]) for i in (0, 20, 40)))

    whole = jax.grad(lambda t: eqx.combine(t, rest).objective(X, y))(trainable)
    assert jnp.allclose(ravel_pytree(jax.grad(streamed)(trainable))[0], ravel_pytree(whole)[0], rtol=1e-8, atol=1e-8)


def test_uncollapsed_bound_is_greatest_at_the_collapsed_q_and_minibatches_are_unbiased():
    model, X, y = problem()
    approx = VFE(model, InducingPoints(X[:7]))
    q, bound = approx.posterior(X, y), approx.objective(X, y)
    assert jnp.allclose(uncollapsed_bound(q, X, y), bound, rtol=1e-10)
    slope = jax.grad(lambda m, S: uncollapsed_bound(eqx.tree_at(lambda q: (q.m, q.S_factor), q, (m, S)), X, y), (0, 1))(q.m, q.S_factor)
    assert jnp.abs(slope[0]).max() < 1e-8 and jnp.abs(jnp.triu(slope[1])).max() < 1e-8
    parts = [uncollapsed_bound(q, X[i:i + 8], y[i:i + 8], num_data=40) for i in range(0, 40, 8)]
    assert jnp.allclose(jnp.mean(jnp.stack(parts)), bound, rtol=1e-10)
    outputs = VFE(model, InducingPoints(X[:7])), jnp.stack([y, -2 * y], axis=1)
    assert jnp.allclose(uncollapsed_bound(outputs[0].posterior(X, outputs[1]), X, outputs[1]), outputs[0].objective(X, outputs[1]))


def test_gradient_of_the_uncollapsed_bound_is_finite_differences():
    model, X, y = problem(mean=gpt.ConstantMean(0.2))
    q = VFE(model, InducingPoints(X[:5] + 0.1)).posterior(X[:9], y[:9])  # not the optimum for all rows; no kink at the data
    parts = lambda q: (q.m, q.S_factor, q.model.kernel, q.model.likelihood, q.inducing.Z)
    flat, unravel = ravel_pytree(parts(q))
    bound = jax.jit(lambda v: uncollapsed_bound(eqx.tree_at(parts, q, unravel(v)), X, y))
    differences = jnp.stack([(bound(flat + s) - bound(flat - s)) / 2e-6 for s in 1e-6 * jnp.eye(len(flat))])
    assert jnp.abs(jax.grad(bound)(flat) - differences).max() < 1e-6 * jnp.abs(differences).max()


def test_large_blocks_are_the_formula_written_out():
    model, X, y = problem(rows=260)
    blocks = blocks_of(260, number=2)  # 130 rows: factorised by blocks, two at a time
    approx = PowerEPRegression(model, InducingPoints(X[:7]), 0.5, blocks)
    assert jnp.allclose(approx.objective(X, y), written_out(model, InducingPoints(X[:7]), X, y, 0.5, blocks)[0], rtol=1e-10)


def test_duplicated_inducing_points_change_nothing():
    model, X, y = problem()
    once, twice = (VFE(model, InducingPoints(Z)) for Z in (X[:6], jnp.concatenate([X[:6], X[:6]])))
    assert jnp.allclose(once.objective(X, y), twice.objective(X, y), atol=1e-6)
    gradient = jax.grad(lambda Z: VFE(model, InducingPoints(Z)).objective(X, y))(jnp.concatenate([X[:6], X[:6]]))
    assert jnp.isfinite(gradient).all()


def test_more_inducing_variables_than_rows_are_allowed_and_said():
    model, X, y = problem(rows=5)
    with pytest.warns(UserWarning, match="8 inducing variables for 5 rows"):
        bound = VFE(model, InducingPoints(jnp.concatenate([X, X[:3] + 1]))).objective(X, y)
    assert jnp.allclose(bound, gpt.Exact(model).objective(X, y), atol=1e-7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        VFE(model, InducingPoints(X)).objective(X, y)


@pytest.mark.parametrize("power", [-0.1, 1.2, np.nan, "half", [[0.5]], [0.1, 2.0], None])
def test_powers_outside_the_unit_interval_are_refused(power):
    model, X, _ = problem()
    with pytest.raises(ValueError, match=r"power must be a number in \[0, 1\]"):
        PowerEPRegression(model, InducingPoints(X[:3]), power)


@pytest.mark.parametrize("blocks", [[], [[]], [[0, 1], [1, 2]], [[0], [2]], [[1, 2]], [[0.0, 1.0]], 3, [[[0, 1]]], [[True, False]]])
def test_blocks_that_do_not_partition_the_rows_are_refused(blocks):
    model, X, _ = problem()
    with pytest.raises(ValueError, match="blocks must partition the rows"):
        PowerEPRegression(model, InducingPoints(X[:3]), blocks=blocks)


def test_other_bad_input_is_refused_by_name():
    model, X, y = problem()
    points = InducingPoints(X[:3])
    refuse = lambda match: pytest.raises(ValueError, match=match)
    with refuse("one for each of the 2 blocks, got 3"):
        PowerEPRegression(model, points, [0.1, 0.2, 0.3], [range(20), range(20, 40)])
    with refuse("blocks and power are for 30 rows, but X has 40"):
        PITC(model, points, [range(30)]).objective(X, y)
    with refuse("blocks and power are for 2 rows, but X has 40"):
        PowerEPRegression(model, points, [0.1, 0.2]).posterior(X, y)
    with refuse("num_data must be 40"):
        VFE(model, points).objective(X, y, num_data=100)
    with refuse("X must have 2 columns"):
        VFE(gpt.GP(gpt.RBF(), gpt.Gaussian()), points).objective(X[:, :1], y)
    with refuse("model must be a GP"):
        VFE(gpt.RBF(), points)
    with refuse("variance must be one number"):
        VFE(gpt.GP(gpt.RBF(), gpt.Gaussian([0.1, 0.2])), points)
    with refuse("inducing must be inducing variables"):
        VFE(model, X[:3])
    with refuse("same number of rows"):
        VFE(model, points).objective(X, y[:-1])
    with refuse("y must hold finite real numbers"):
        VFE(model, points).objective(X, y.at[3].set(jnp.nan))
