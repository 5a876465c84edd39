"Power EP regression and its corners, against formulas with N x N matrices, exact regression, finite differences and each other."
import warnings

import equinox as eqx
import gp_thesis as gpt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gp_thesis import products
from gp_thesis.fitting import negative_objective
from gp_thesis.inducing import GaussianWindow, InducingPoints
from gp_thesis.linalg import nan_on_failure
from gp_thesis.optimisers import cut_like, end_to_end, loss_and_gradient
from gp_thesis.processes import kl_to_posterior
from gp_thesis.sparse import DTC, FITC, PITC, VFE, PowerEPRegression, uncollapsed_bound
from jax.flatten_util import ravel_pytree
from scipy.stats import multivariate_normal

NOISE = 0.1
MEAN = gpt.LinearMean([0.1, -0.2])


def problem(seed=0, rows=40, columns=2, kernel=gpt.RBF, mean=MEAN):
    "A model and data; most tests take this one, with seven inducing points, and share its compiled programs."
    random = np.random.default_rng(seed)
    X = random.uniform(0, 4, (rows, columns))
    y = np.sin(X).sum(1) + 0.3 * random.normal(size=rows)
    return gpt.GP(kernel(0.9, 1.3), gpt.Gaussian(NOISE), mean), X, y


def blocks_of(rows, seed=0, number=5):
    return np.array_split(np.random.default_rng(seed).permutation(rows), number)


@eqx.filter_jit
def answers(approx, X, y):
    "The objective and the posterior, by one program."
    with nan_on_failure():
        return approx.objective(X, y), approx.posterior(X, y)


def value_and_gradient(approx, X, y, move=0.0):
    "The objective and its gradient in all parameters end to end, moved or not, by the program of `fit`."
    trainable, rest = gpt.partition(approx)
    moved = cut_like(trainable, end_to_end(trainable) + move)
    value, gradient = loss_and_gradient(negative_objective, moved, rest, (X, y))
    return -np.asarray(value), -end_to_end(gradient)


@eqx.filter_jit
def prior_matrices(model, inducing, X):
    kernel, inducing = gpt.unwrap(model.kernel), gpt.unwrap(inducing)
    return inducing.covariance(kernel), inducing.cross_covariance(kernel, X), kernel.evaluate(X), model.mean(X)


def written_out(model, inducing, X, y, power, blocks):
    "Bui's section 2.3.7 word for word: (objective, mean of u, covariance of u), with N x N matrices."
    Kuu, Kuf, K, mean = (np.asarray(a) for a in prior_matrices(model, inducing, X))
    Q = Kuf.T @ np.linalg.solve(Kuu, Kuf)
    D, S, price = K - Q, NOISE * np.eye(len(X)), 0.0
    for alpha, rows in zip(np.broadcast_to(power, len(blocks)), blocks):
        square = np.ix_(rows, rows)
        S[square] += alpha * D[square]
        if alpha == 0:
            price += np.trace(D[square]) / (2 * NOISE)
        else:
            price += (1 - alpha) / (2 * alpha) * np.linalg.slogdet(np.eye(len(rows)) + alpha * D[square] / NOISE)[1]
    residual = y - mean
    G = np.linalg.solve(Q + S, Kuf.T)
    return multivariate_normal(np.zeros(len(X)), Q + S).logpdf(residual) - price, G.T @ residual, Kuu - Kuf @ G


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
    model, X, y = problem()
    blocks = blocks and blocks_of(len(X), number=5)
    variables = inducing(X[:7])
    value, post = answers(PowerEPRegression(model, variables, power, blocks), X, y)
    objective, m, S = written_out(model, variables, X, y, power, blocks or np.arange(len(X))[:, None])
    assert np.allclose(value, objective, rtol=1e-9, atol=1e-9)
    assert np.allclose(post.inducing_mean, m, rtol=0, atol=1e-8) and np.allclose(post.inducing_covariance, S, rtol=0, atol=1e-8)


@pytest.mark.parametrize("case, kernel", [*((case, gpt.RBF) for case in CASES),
                                          ("each its own", gpt.Matern52), ("blocks of their own", gpt.Matern52)])
def test_all_data_as_inducing_points_is_exact(case, kernel):
    power, blocks = CASES[case]
    model, X, y = problem(1, kernel=kernel)
    Xs = np.random.default_rng(2).uniform(0, 4, (15, 2))
    value, post = answers(PowerEPRegression(model, InducingPoints(X), power, blocks and blocks_of(40)), X, y)
    evidence, truth = answers(gpt.Exact(model), X, y)
    assert np.allclose(value, evidence, rtol=0, atol=1e-8)
    assert np.allclose(post.mean(Xs), truth.mean(Xs), rtol=0, atol=1e-8)
    assert np.allclose(post.covariance(Xs), truth.covariance(Xs), rtol=0, atol=1e-8)


@eqx.filter_jit
def objectives(approxes, X, y):
    with nan_on_failure():
        return jnp.stack([approx.objective(X, y) for approx in approxes])


def test_power_to_zero_is_linear_in_the_power():
    model, X, y = problem()
    for blocks in (None, blocks_of(len(X))):
        make = lambda power: PowerEPRegression(model, InducingPoints(X[:7]), power, blocks)
        zero, powers = answers(make(0.0), X, y)[0], np.array([1e-3, 1e-4, 1e-5])
        slopes = (np.array(objectives([make(power) for power in powers], X, y)) - zero) / powers
        assert abs(slopes[0]) > 1 and abs(slopes[1] / slopes[0] - 1) < 0.02 and abs(slopes[2] / slopes[1] - 1) < 0.002


def test_one_block_of_all_rows_with_power_one_is_exact_at_Z():
    model, X, y = problem()
    Z = X[:7] + 0.1
    value, post = answers(PITC(model, InducingPoints(Z), [np.arange(len(X))]), X, y)
    evidence, truth = answers(gpt.Exact(model), X, y)
    assert np.allclose(value, evidence, rtol=0, atol=1e-8)
    assert np.allclose(post.mean(Z), truth.mean(Z), rtol=0, atol=1e-8)
    assert np.allclose(post.covariance(Z), truth.covariance(Z), rtol=0, atol=1e-8)


def test_dtc_is_the_evidence_of_a_low_rank_prior_with_the_variational_posterior():
    model, X, y = problem()
    Kuu, Kuf, K, mean = (np.asarray(a) for a in prior_matrices(model, InducingPoints(X[:7]), X))
    Q = Kuf.T @ np.linalg.solve(Kuu, Kuf)
    (dtc, q), (vfe, q_vfe) = (answers(kind(model, InducingPoints(X[:7])), X, y) for kind in (DTC, VFE))
    assert np.allclose(dtc, multivariate_normal(mean, Q + NOISE * np.eye(40)).logpdf(y), rtol=0, atol=1e-8)
    assert np.allclose(vfe, dtc - np.trace(K - Q) / (2 * NOISE), rtol=0, atol=1e-8)
    assert np.allclose(q.covariance(X), q_vfe.covariance(X))


@eqx.filter_jit
def bounds_and_kl(model, Z, X, y):
    "The interval of the evidence, the objective, and KL[q ‖ exact posterior]."
    with nan_on_failure():
        approx = VFE(model, InducingPoints(Z))
        kl = kl_to_posterior(approx.posterior(X, y), gpt.Exact(model).posterior(X, y))
        return approx.evidence_interval(X, y), approx.objective(X, y), kl


@pytest.mark.parametrize("seed", range(12))
def test_bounds_enclose_the_evidence_tighten_with_M_and_leave_the_kl(seed):
    columns = 2 - seed % 2
    model, X, y = problem(seed, 30, columns, (gpt.RBF, gpt.Matern12)[seed % 2], gpt.Zero())
    evidence, last = np.asarray(gpt.Exact(model).objective(X, y)), -np.inf
    for M in (2, 9, 30):
        interval, objective, kl = jax.tree.map(np.asarray, bounds_and_kl(model, X[:M], X, y))
        lower, upper = interval
        assert np.allclose(lower, objective, rtol=1e-12) and interval.kl_bound == upper - lower
        assert last - 1e-9 <= lower <= evidence + 1e-9 and evidence <= upper + 1e-9
        assert np.allclose(kl, evidence - lower, rtol=0, atol=1e-8)
        last = lower


@pytest.mark.parametrize("seed", range(6))
def test_optimised_bound_stays_below_the_evidence_and_grows_with_M(seed):
    model, X, y = problem(seed, 25, 1, gpt.Matern32, gpt.Zero())
    fixed, last, Z = gpt.freeze(model), -np.inf, X[:2]
    evidence = float(gpt.Exact(model).objective(X, y))
    for M in (2, 4, 6):
        Z = np.concatenate([Z, X[len(Z):M]])  # the optimum so far, and new points: theorem 3's extended family
        fit = gpt.fit(VFE(fixed, InducingPoints(Z)), (X, y), steps=200, progress=False)
        Z, bound = np.asarray(fit.approx.inducing.Z.value), value_and_gradient(fit.approx, X, y)[0]
        assert last - 1e-9 <= bound <= evidence + 1e-9
        last = bound


def test_outputs_share_q_and_add_up():
    model, X, y = problem()
    Y = np.stack([y, y**2, -y], axis=1)
    for approx in (VFE(model, InducingPoints(X[:7])), FITC(model, InducingPoints(X[:7])),
                   PITC(model, InducingPoints(X[:7]), blocks_of(len(X)))):
        value, post = answers(approx, X, Y)
        mean, cov = np.asarray(post.mean(X)), np.asarray(post.covariance(X))
        alone = [answers(approx, X, column) for column in Y.T]
        assert np.allclose(value, sum(float(objective) for objective, _ in alone), rtol=1e-10)
        for p, (_, q) in enumerate(alone):
            assert np.allclose(mean[:, p], q.mean(X)) and np.allclose(cov[p], q.covariance(X))


@pytest.mark.parametrize("case", ["each its own", "blocks of their own", "VFE in blocks"])
def test_gradients_with_powers_and_blocks_of_their_own_are_finite_differences(case):
    power, blocks = CASES[case]
    model, X, y = problem()
    approx = PowerEPRegression(model, InducingPoints(X[:7]), power, blocks and blocks_of(len(X), number=5))
    gradient, step = value_and_gradient(approx, X, y)[1], 1e-5
    moved = lambda move: value_and_gradient(approx, X, y, move)[0]
    differences = np.stack([(moved(e) - moved(-e)) / (2 * step) for e in step * np.eye(len(gradient))])
    assert np.abs(gradient - differences).max() < 1e-6 * np.abs(differences).max()


@pytest.mark.parametrize("case", ["VFE", "each its own", "blocks of their own"])
def test_float32_gradients_are_finite_and_close(case):
    power, blocks = CASES[case]
    model, X, y = problem()

    def gradient(dtype):
        approx = PowerEPRegression(model, InducingPoints(X[:7]), power, blocks and blocks_of(40))
        value, slopes = value_and_gradient(gpt.cast(approx, dtype), X.astype(dtype), y.astype(dtype))
        assert value.dtype == dtype
        return slopes

    single, double = gradient(np.float32), gradient(np.float64)
    assert np.isfinite(single).all()
    assert np.abs(single - double).max() < 1e-2 * np.abs(double).max()


KEPT_OR_COMPUTED_AGAIN = pytest.mark.parametrize("kept", [2**24, 0])


@KEPT_OR_COMPUTED_AGAIN
def test_chunks_of_rows_change_nothing(kept, monkeypatch):
    model, X, y = problem(rows=103)
    approxes = [PowerEPRegression(model, InducingPoints(X[:6] + 0.05), power) for power in (0.0, np.linspace(0, 1, 103))]

    def everything(approx):
        "Bound, gradient and mean of q, compiled anew: the size of a chunk is read when a program is traced."
        trainable, rest = gpt.partition(approx)
        whole = lambda trainable: gpt.unwrap(eqx.combine(trainable, rest))
        bound = lambda trainable: whole(trainable).bound(X, y)
        (value, gradient), m = jax.jit(lambda t: (jax.value_and_grad(bound)(t), whole(t).q_f(X, y).m))(trainable)
        return value, np.asarray(ravel_pytree(gradient)[0]), m

    at_once = [everything(approx) for approx in approxes]
    monkeypatch.setattr(products, "TALL", 0)
    monkeypatch.setattr(products, "CHUNK", 6 * 20)
    monkeypatch.setattr(products, "KEPT", kept)
    for approx, (value, gradient, m) in zip(approxes, at_once):
        in_chunks = everything(approx)
        assert np.allclose(in_chunks[0], value, rtol=1e-12) and np.allclose(in_chunks[2], m, rtol=1e-8)
        assert np.allclose(in_chunks[1], gradient, rtol=1e-8, atol=1e-8 * np.abs(gradient).max())


@KEPT_OR_COMPUTED_AGAIN
def test_slopes_in_chunks_are_those_at_once_where_K_uu_is_nearly_singular(kept, monkeypatch):
    """The parts that come through K_uf and through L are large and all but cancel, so both need the same A.

    With a part of L that is put in once for all rows, and an A that is computed again, the two differ by a hundredth."""
    rng = np.random.default_rng(0)
    plane = rng.uniform(0, 3, (3000, 2))
    X, y = np.tanh(plane @ rng.normal(size=(2, 16))), np.sin(2 * plane[:, 0]) * plane[:, 1]
    X, y = ((a - a.mean(0)) / a.std(0) for a in (X, y))
    gp = gpt.GP(gpt.RBF(np.full(16, 3.8), 9.3), gpt.Gaussian(1.4e-6))
    trainable, rest = gpt.partition(gpt.VFE(gp, gpt.InducingPoints(X[::30])))
    slope = lambda: ravel_pytree(jax.jit(jax.grad(lambda t: gpt.unwrap(eqx.combine(t, rest)).bound(X, y)))(trainable))[0]
    at_once = slope()
    monkeypatch.setattr(products, "TALL", 0)
    monkeypatch.setattr(products, "CHUNK", 2**17)
    monkeypatch.setattr(products, "KEPT", kept)
    assert np.linalg.norm(slope() - at_once) < 1e-3 * np.linalg.norm(at_once)


def test_curvature_is_the_same_whether_rows_are_kept_or_computed_again(monkeypatch):
    model, X, y = problem(rows=43)
    trainable, rest = gpt.partition(VFE(model, InducingPoints(X[:6] + 0.05)))
    flat, unravel = ravel_pytree(trainable)
    bound = lambda flat: gpt.unwrap(eqx.combine(unravel(flat), rest)).bound(X, y)
    at_once = jax.jit(jax.hessian(bound))(flat)
    monkeypatch.setattr(products, "TALL", 0)
    monkeypatch.setattr(products, "CHUNK", 6 * 20)
    for kept in (2**24, 0):
        monkeypatch.setattr(products, "KEPT", kept)
        curvature = jax.jit(jax.hessian(lambda flat: bound(flat)))(flat)
        assert np.allclose(curvature, at_once, rtol=1e-7, atol=1e-8 * np.abs(at_once).max())


@eqx.filter_jit
def by_batches(approx, X, y):
    "Objective and posterior from sums over rows, and the gradient of the former."
    def objective_and_posterior(approx):
        total = sum(approx.statistics(X[i:i + 15], y[i:i + 15]) for i in range(0, len(X), 15))
        return approx.objective_from(total), approx.posterior_from(total)

    with nan_on_failure():
        return eqx.filter_value_and_grad(objective_and_posterior, has_aux=True)(approx)


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_statistics_of_batches_add_up_and_give_the_gradient(power):
    model, X, y = problem()
    approx = PowerEPRegression(model, InducingPoints(X[:7]), power)
    (value, q), gradient = by_batches(approx, X, y)
    objective, post = answers(approx, X, y)
    assert np.allclose(value, objective, rtol=1e-12)
    assert np.allclose(q.covariance(X), post.covariance(X), atol=1e-10)
    if power == 0:
        assert np.allclose(ravel_pytree(gradient)[0], value_and_gradient(approx, X, y)[1], rtol=1e-8, atol=1e-8)


@eqx.filter_jit
def uncollapsed_with_gradient(q, X, y, num_data=None):
    "The bound, and its gradient in all that q is made of."
    return eqx.filter_value_and_grad(lambda q: uncollapsed_bound(q, X, y, num_data))(q)


def test_uncollapsed_bound_is_greatest_at_the_collapsed_q_and_minibatches_are_unbiased():
    model, X, y = problem()
    approx = VFE(model, InducingPoints(X[:7]))
    bound, q = answers(approx, X, y)
    value, slope = uncollapsed_with_gradient(q, X, y)
    assert np.allclose(value, bound, rtol=1e-10)
    assert np.abs(slope.m).max() < 1e-8 and np.abs(np.triu(slope.S_factor)).max() < 1e-8
    parts = [uncollapsed_with_gradient(q, X[i:i + 8], y[i:i + 8], 40)[0] for i in range(0, 40, 8)]
    assert np.allclose(np.mean(parts), bound, rtol=1e-10)
    Y = np.stack([y, -2 * y, y**2], axis=1)
    bound, q = answers(approx, X, Y)
    assert np.allclose(uncollapsed_with_gradient(q, X, Y)[0], bound)


def test_gradient_of_the_uncollapsed_bound_is_finite_differences():
    model, X, y = problem()
    q = answers(FITC(model, InducingPoints(X[:7] + 0.1)), X, y)[1]  # not the optimum of this bound; no kink at the data
    parts = lambda q: (q.m, q.S_factor, q.model.kernel, q.model.likelihood, q.inducing.Z)
    flat, unravel = ravel_pytree(parts(q))
    at = lambda move: uncollapsed_with_gradient(eqx.tree_at(parts, q, unravel(flat + move)), X, y)
    differences = np.stack([float(at(e)[0] - at(-e)[0]) / 2e-6 for e in 1e-6 * np.eye(len(flat))])
    gradient = np.asarray(ravel_pytree(parts(at(0.0)[1]))[0])
    assert np.abs(gradient - differences).max() < 1e-6 * np.abs(differences).max()


def test_large_blocks_are_the_formula_written_out():
    model, X, y = problem(rows=260)
    blocks = blocks_of(260, number=2)  # 130 rows: factorised by blocks, two at a time
    approx = PowerEPRegression(model, InducingPoints(X[:7]), 0.5, blocks)
    assert np.allclose(approx.objective(X, y), written_out(model, InducingPoints(X[:7]), X, y, 0.5, blocks)[0], rtol=1e-10)


def test_duplicated_inducing_points_change_nothing():
    model, X, y = problem()
    once, twice = (VFE(model, InducingPoints(Z)) for Z in (X[:7], np.concatenate([X[:7], X[:7]])))
    value, gradient = value_and_gradient(twice, X, y)
    assert np.allclose(answers(once, X, y)[0], value, atol=1e-6)
    assert np.isfinite(gradient).all()


def test_more_inducing_variables_than_rows_are_allowed_and_said():
    model, X, y = problem(rows=5)
    K, mean = (np.asarray(a) for a in prior_matrices(model, InducingPoints(X), X)[2:])
    with pytest.warns(UserWarning, match="8 inducing variables for 5 rows"):
        bound = VFE(model, InducingPoints(np.concatenate([X, X[:3] + 1]))).objective(X, y)
    assert np.allclose(bound, multivariate_normal(mean, K + NOISE * np.eye(5)).logpdf(y), atol=1e-7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(VFE(model, InducingPoints(X)).objective, X, y)              # traced, not compiled


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
        VFE(model, points).objective(X, np.where(np.arange(40) == 3, np.nan, y))
