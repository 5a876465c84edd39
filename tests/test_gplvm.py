"Latent inputs: bounds and energies against quadrature and dense formulas, their limits, gaps, further rows, and what is refused."
import json
from functools import partial

import equinox as eqx
import gp_thesis as gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import TOP
from gp_thesis import gplvm
from gp_thesis.gplvm import (
    ApproximatePowerGPLVM, CollapsedGPLVM, GPLVM, Latents, PointGPLVM, PowerGPLVM, infer_rows, input_cavities, predict_rows,
    principal_components, row_log_density, with_best_q)
from gp_thesis.parameters import free, lower_triangular, partition, positive, unwrap
from gp_thesis.svgp import VariationalGaussian
from gp_thesis.tied_factors import tied_cavity
from scipy import stats

rng = np.random.default_rng(5)
N, M, Q, P = 9, 5, 2, 3
MEANS, DEVIATIONS = rng.normal(size=(N, Q)), rng.uniform(0.1, 0.7, (N, Q))
ROOTS = np.tril(0.3 * rng.normal(size=(N, Q, Q)), -1) + DEVIATIONS[:, :, None] * np.eye(Q)
Y = np.sin(MEANS @ rng.normal(size=(Q, P))) + 0.2 * rng.normal(size=(N, P))
GAPS = np.where(rng.uniform(size=(N, P)) < 0.3, np.nan, Y)
ROWS, Z = np.arange(N), rng.normal(size=(M, Q))
KERNELS = {"RBF": gpt.RBF(np.array([0.9, 1.4]), 1.3), "sum": gpt.RBF(1.1, 0.8) + gpt.Linear(np.array([0.4, 0.7])) + gpt.White(0.1)}
POINTS = gpt.InducingPoints(Z)


def model(kernel="RBF", likelihood=None):
    return gpt.GP(KERNELS[kernel], likelihood or gpt.Gaussian(0.15), gpt.ConstantMean(0.2))


def at(approx, root=DEVIATIONS, q=None):
    "The same with these deviations, or roots, of x, and this q."
    made = positive(root) if root.ndim == 2 else lower_triangular(root)
    approx = eqx.tree_at(lambda a: a.latents, approx, Latents(free(MEANS[:len(root)]), made))
    if q is None:
        return approx
    return eqx.tree_at(lambda a: a.q, approx, VariationalGaussian(free(q.m), lower_triangular(q.S_factor)))


def some_q(P=P, spread=0.5):
    m, R = spread * rng.normal(size=(M, P or 1)), np.tril(0.2 * rng.normal(size=(P or 1, M, M)), -1) + 0.7 * np.eye(M)
    return VariationalGaussian(m if P else m[:, 0], R if P else R[0])


def kind(cls, root=DEVIATIONS, q=None, prior=None, **more):
    each = () if cls is CollapsedGPLVM else (P,)
    return at(cls(prior or model(), POINTS, N, Q, *each, full=root.ndim == 3, **more), root, q)


def nodes(mean, root, points=30):
    "Nodes (S, Q) and masses (S,) of a Gauss-Hermite grid for N(mean, root rootᵀ)."
    t, w = np.polynomial.hermite_e.hermegauss(points)
    grid = np.stack(np.meshgrid(*[t] * len(mean)), -1).reshape(-1, len(mean))
    mass = np.prod(np.stack(np.meshgrid(*[w / w.sum()] * len(mean)), -1).reshape(-1, len(mean)), axis=1)
    return mean + grid @ (root if root.ndim == 2 else np.diag(root)).T, mass


def averages(kernel, root, points=30):
    "ψ₀ (N,), Ψ₁ (N, M) and Ψ₂ (N, M, M) by quadrature, without what is white off the diagonal."
    kernel, psi0, Psi1, Psi2 = unwrap(kernel), [], [], []
    for mean, R in zip(MEANS, root):
        X, mass = nodes(mean, R, points)
        K = np.asarray(kernel.evaluate(jnp.asarray(X), jnp.asarray(Z)))
        psi0.append(mass @ kernel.evaluate_diag(jnp.asarray(X)))
        Psi1.append(mass @ K)
        Psi2.append(np.einsum("s,si,sj->ij", mass, K, K))
    return np.array(psi0), np.array(Psi1), np.array(Psi2)


def lifted(kernel, Z=Z):
    "K_uu with the noise of the inducing values."
    K = np.asarray(unwrap(kernel).evaluate(jnp.asarray(Z)))
    return K + 1e-8 * np.diag(np.diag(K))


def divergences(root):
    S = root[:, :, None] * np.eye(Q) * root[:, None] if root.ndim == 2 else root @ np.swapaxes(root, 1, 2)
    return 0.5 * np.array([np.trace(C) + m @ m - Q - np.linalg.slogdet(C)[1] for m, C in zip(MEANS, S)])


def titsias_lawrence(kernel, root, Y, noise=0.15):
    "The collapsed bound of their 2010 paper for each output, dense, with the rows that the output was seen in."
    psi0, Psi1, Psi2 = averages(kernel, root)
    Kuu, total = lifted(kernel), 0.0
    for y in Y.T - 0.2:
        seen = ~np.isnan(y)
        y, C, A = y[seen], Psi2[seen].sum(axis=0), Psi1[seen]
        B = noise * Kuu + C
        W = np.eye(len(y)) / noise - A @ np.linalg.solve(B, A.T) / noise
        log_det = len(y) * np.log(2 * np.pi * noise) + np.linalg.slogdet(B)[1] - np.linalg.slogdet(Kuu)[1] - M * np.log(noise)
        price = psi0[seen].sum() - np.trace(np.linalg.solve(Kuu, C))
        total -= 0.5 * (log_det + y @ W @ y + price / noise)
    return total - divergences(root).sum()


@pytest.mark.parametrize("root", [DEVIATIONS, ROOTS], ids=["independent columns", "full"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_collapsed_bound_is_that_of_titsias_and_lawrence(kernel, root):
    for seen in (Y, GAPS):
        ours = kind(CollapsedGPLVM, root, prior=model(kernel)).objective(ROWS, seen)
        assert np.isclose(ours, titsias_lawrence(KERNELS[kernel], root, seen), rtol=0, atol=1e-8)


@pytest.mark.parametrize("kernel, root", [("RBF", ROOTS), ("sum", DEVIATIONS)], ids=["full", "independent columns"])
def test_the_uncollapsed_bound_lies_below_and_touches_at_the_best_q(kernel, root):
    prior = model(kernel, gpt.Gaussian(np.array([0.1, 0.2, 0.4])))
    collapsed = kind(CollapsedGPLVM, root, prior=prior)
    for seen in (Y, GAPS):
        most = collapsed.objective(ROWS, seen)
        for _ in range(3):
            assert kind(GPLVM, root, some_q(), prior).objective(ROWS, seen) < most - 1e-3
        best = with_best_q(kind(GPLVM, root, some_q(), prior), ROWS, seen)
        assert np.isclose(best.objective(ROWS, seen), most, rtol=1e-10)
        for query in ("mean", "marginals", "covariance"):
            ours, theirs = getattr(best.posterior(), query)(MEANS), getattr(collapsed.posterior(ROWS, seen), query)(MEANS)
            assert all(np.allclose(a, b, atol=1e-8) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)))


def moments_of_f(q, root, means=MEANS):
    "Mean and variance of f(x_n) under q(f) and q(x_n), (N, P), by quadrature."
    L = np.linalg.cholesky(lifted(KERNELS["RBF"]))
    expected, variances = [], []
    for mean, R in zip(means, root):
        X, mass = nodes(mean, R)
        A = np.linalg.solve(L, np.asarray(unwrap(KERNELS["RBF"]).evaluate(jnp.asarray(Z), jnp.asarray(X))))
        f = 0.2 + A.T @ q.m
        v = (1.3 - np.sum(A**2, axis=0) + np.sum(np.einsum("pij,is->pjs", q.S_factor, A) ** 2, axis=1)).T
        expected.append(mass @ f)
        variances.append(mass @ v + mass @ (f - mass @ f) ** 2)
    return np.array(expected), np.array(variances)


@pytest.mark.parametrize("root", [DEVIATIONS, ROOTS], ids=["independent columns", "full"])
def test_the_uncollapsed_bound_by_quadrature(root):
    q = some_q()
    f, var = moments_of_f(q, root)
    expected = -0.5 * (np.log(2 * np.pi * 0.15) + ((Y - f) ** 2 + var) / 0.15)
    kl = sum(0.5 * (np.sum(R**2) + m @ m - M) - np.sum(np.log(np.diag(R))) for m, R in zip(q.m.T, q.S_factor))
    assert np.isclose(kind(GPLVM, root, q).objective(ROWS, Y), expected.sum() - kl - divergences(root).sum(), rtol=1e-9)


def log_integral(precision, shift):
    return 0.5 * shift @ np.linalg.solve(precision, shift) - 0.5 * np.linalg.slogdet(precision)[1]


def without_a_share(m, R, count, power):
    "Of N(m, R Rᵀ) whose prior N(0, I) has so many equal sites: their part of the energy, and mean and root of the cavity."
    precision = np.linalg.inv(R @ R.T)
    site, shift = (precision - np.eye(len(m))) / count, precision @ m / count
    left = np.eye(len(m)) + (count - power) * site, (count - power) * shift
    G, S = log_integral(precision, precision @ m), np.linalg.inv(left[0])
    return G + count / power * (log_integral(*left) - G), S @ left[1], np.linalg.cholesky(S)


@pytest.mark.parametrize("power", [0.3, 1.0])
@pytest.mark.parametrize("root", [DEVIATIONS, ROOTS], ids=["independent columns", "full"])
def test_the_energy_is_that_of_equal_sites(root, power):
    "N P sites, each a factor of one u and one x, in natural parameters."
    q, seen = some_q(), np.maximum(np.sum(~np.isnan(GAPS), axis=1), 1)
    of_u = [without_a_share(m, R, N, power) for m, R in zip(q.m.T, q.S_factor)]
    of_x = [without_a_share(m, R if R.ndim == 2 else np.diag(R), count, power) for m, R, count in zip(MEANS, root, seen)]
    energy = sum(each[0] for each in of_u + of_x)
    rest = VariationalGaussian(np.array([m for _, m, _ in of_u]).T, np.array([R for *_, R in of_u]))
    f, var = moments_of_f(rest, np.array([R for *_, R in of_x]), [m for _, m, _ in of_x])
    tilted = -0.5 * (power * np.log(2 * np.pi * 0.15) + np.log1p(power * var / 0.15) + power * (GAPS - f) ** 2 / (0.15 + power * var))
    ours = kind(ApproximatePowerGPLVM, root, q, power=power).objective(ROWS, GAPS)
    assert np.isclose(ours, energy + np.nansum(tilted) / power, rtol=1e-8)


def test_the_energy_goes_to_the_bound_with_its_gradients():
    q, values = some_q(), []

    @eqx.filter_jit
    def value_and_slopes(approx):
        moving, rest = partition(approx)
        value, slopes = jax.value_and_grad(lambda moving: eqx.combine(moving, rest).objective(ROWS, GAPS))(moving)
        return jnp.concatenate([value[None], *(jnp.ravel(a) for a in jax.tree.leaves(slopes))])

    for power in 0.004 * 0.5 ** np.arange(5):
        values.append(value_and_slopes(kind(ApproximatePowerGPLVM, q=q, power=power)))
    for order in range(1, len(values)):
        values = [b + (b - a) / (2**order - 1) for a, b in zip(values, values[1:])]
    assert np.allclose(values[0], value_and_slopes(kind(GPLVM, q=q)), rtol=1e-7, atol=1e-6)


def test_known_inputs_give_the_bounds_and_energies_of_regression():
    "As deviations go to zero; the energy's cavities are wider than q by 1 / (1 - α / P)."
    q, tiny = some_q(), np.full((N, Q), 1e-8)
    same = lambda approx: eqx.tree_at(lambda a: a.q, approx, VariationalGaussian(free(q.m), lower_triangular(q.S_factor)))
    constant = kind(GPLVM, tiny).latents
    gain = jnp.sum(unwrap(constant).divergence())
    svgp = same(gpt.SVGP(model(), POINTS, P)).objective(MEANS, Y)
    assert np.isclose(kind(GPLVM, tiny, q).objective(ROWS, Y) + gain, svgp, rtol=1e-6)  # but for the lift of K_uu
    vfe = gpt.VFE(model(), POINTS).objective(MEANS, Y)
    assert np.isclose(kind(CollapsedGPLVM, tiny).objective(ROWS, Y) + gain, vfe, rtol=1e-6)
    for power in (0.4, 1.0):
        _, divergence = input_cavities(unwrap(constant), jnp.full(N, power / P))
        moved = MEANS * (1 - power / P) / (1 - power / P + power / P * 1e-16)
        regression = same(gpt.ApproximatePowerEP(model(), POINTS, power, P)).objective(moved, Y)
        ours = kind(ApproximatePowerGPLVM, tiny, q, power=power).objective(ROWS, Y)
        assert np.isclose(ours + jnp.sum(divergence), regression, rtol=1e-6)


def test_one_entry_at_power_one_is_exact_and_says_nothing_of_q():
    "N = P = 1: the cavities are the priors, under which f(x) has the variance of the kernel, whatever x is."
    one = gpt.GP(gpt.RBF(0.8, 1.3), gpt.Gaussian(0.15))
    exact = stats.norm(0, np.sqrt(1.3 + 0.15)).logpdf(0.7)
    for mean, deviation in ((0.0, 1.0), (1.5, 0.2)):
        approx = ApproximatePowerGPLVM(one, gpt.InducingPoints(np.zeros((1, 1))), 1, 1, start=[[mean]])
        approx = eqx.tree_at(lambda a: a.latents.root, approx, positive(np.array([[deviation]])))
        approx = eqx.tree_at(lambda a: a.q.m, approx, free(np.array([mean])))
        assert np.isclose(approx.objective([0], np.array([0.7])), exact, rtol=1e-8)


def test_it_is_a_bound_of_the_evidence_of_two_rows():
    prior, y = gpt.GP(gpt.RBF(1.0, 1.0), gpt.Gaussian(0.1)), np.array([[1.2], [-0.9]])
    t, w = np.polynomial.hermite_e.hermegauss(60)
    r = np.exp(-0.5 * (t[:, None] - t) ** 2)
    det = 1.1**2 - r**2
    log_p = -np.log(2 * np.pi) - 0.5 * np.log(det) - 0.5 * (1.1 * (y**2).sum() - 2 * r * y[0] * y[1]) / det
    evidence = np.log(np.sum(np.outer(w, w) / (2 * np.pi) * np.exp(log_p)))
    approx = CollapsedGPLVM(prior, gpt.InducingPoints(np.linspace(-2, 2, 7)[:, None]), 2, 1, [[0.9], [-0.8]])
    fitted = gpt.fit(eqx.tree_at(lambda a: (a.model, a.inducing), approx, replace_fn=gpt.freeze), ([0, 1], y), progress=False).approx
    bound = fitted.objective([0, 1], y)
    assert approx.objective([0, 1], y) < bound < evidence < bound + 3


KINDS = {"variational": partial(kind, GPLVM), "collapsed": partial(kind, CollapsedGPLVM), "full": partial(kind, GPLVM, ROOTS),
         "power": partial(kind, ApproximatePowerGPLVM, power=0.6), "power, full": partial(kind, ApproximatePowerGPLVM, ROOTS, power=0.6),
         "points": lambda: PointGPLVM(gpt.VFE(model(), POINTS), N, Q, MEANS)}


@pytest.mark.parametrize("name", ["variational", "collapsed", "power, full", "points"])
def test_gradients_by_finite_differences(name):
    approx, seen = KINDS[name](), Y if name == "points" else GAPS
    moving, rest = partition(approx)
    value = jax.jit(lambda moving: eqx.combine(moving, rest).objective(ROWS, seen))
    slopes = jax.grad(value)(moving)
    for _ in range(3):
        way = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), moving)
        step = lambda h: value(jax.tree.map(lambda a, d: a + h * d, moving, way))
        differences = [(step(h) - step(-h)) / (2 * h) for h in (2e-5, 1e-5)]
        slope = sum(jnp.sum(a * b) for a, b in zip(jax.tree.leaves(slopes), jax.tree.leaves(way)))
        assert np.isclose(slope, differences[1] + (differences[1] - differences[0]) / 3, rtol=1e-6, atol=1e-6)


def test_inducing_points_that_are_too_many_for_the_kernel_change_nothing():
    "A linear kernel of two columns has rank two; without the lift, rounding made the bound as large as an optimiser liked."
    data, start = (np.arange(40), rng.normal(size=(40, 2)) @ rng.normal(size=(2, 4)) + 0.3 * rng.normal(size=(40, 4))), rng.normal(size=(40, 2))
    ends = []
    for count in (2, 5):
        approx = CollapsedGPLVM(gpt.GP(gpt.Linear(np.ones(2)), gpt.Gaussian(0.1)), gpt.InducingPoints(rng.normal(size=(count, 2))), 40, 2, start)
        ends.append(gpt.fit(approx, data, steps=150, progress=False).history.objective[-1])
    assert np.isclose(*ends, rtol=1e-3)


@pytest.mark.parametrize("name", ["variational", "power"])
def test_minibatches_are_unbiased_and_only_their_rows_have_gradients(name):
    approx = at(KINDS[name](), q=some_q())
    parts = [approx.objective(rows, GAPS[rows], num_data=N) for rows in np.split(ROWS, 3)]
    assert np.isclose(np.mean(parts), approx.objective(ROWS, GAPS), rtol=1e-10)
    moving, rest = partition(approx)
    slopes = jax.grad(lambda moving: eqx.combine(moving, rest).objective(ROWS[2:5], GAPS[2:5], num_data=N))(moving).latents
    for slope in jax.tree.leaves(slopes):
        assert np.all(np.any(slope[2:5] != 0, axis=1)) and not np.any(np.delete(slope, [2, 3, 4], axis=0))
    ended = gpt.fit(approx, (ROWS, GAPS), optimiser=optax.adam(0.02), steps=60, batch_size=3, key=jax.random.key(0), progress=False).approx
    assert ended.objective(ROWS, GAPS) > approx.objective(ROWS, GAPS) + 1


def test_draws_agree_with_closed_forms_within_their_error():
    q = some_q()
    for root in (DEVIATIONS, ROOTS):
        drawn, closed = kind(GPLVM, root, q, samples=500), kind(GPLVM, root, q).objective(ROWS, GAPS)
        values = np.array([drawn.objective(ROWS, GAPS, key=jax.random.key(k)) for k in range(12)])
        error = values.std(ddof=1) / np.sqrt(len(values))
        assert error < 1 and abs(values.mean() - closed) < 4 * error


def test_draws_of_the_energy_are_the_tilted_integral_itself():
    "By quadrature over x, where moments would take f(x) for Gaussian; one output and many draws."
    q, power, y = some_q(None), 0.5, Y[:, :1]
    drawn = at(ApproximatePowerGPLVM(model(), POINTS, N, Q, samples=4000, power=power), DEVIATIONS, q)
    rest, divergence = input_cavities(Latents(MEANS, DEVIATIONS), jnp.full(N, power))
    v, renyi = tied_cavity(VariationalGaussian(jnp.asarray(q.m), jnp.asarray(q.S_factor)), power / N)
    known = gpt.SVGP(model(), POINTS)
    known = eqx.tree_at(lambda a: a.q, known, VariationalGaussian(free(v.m), lower_triangular(v.S_factor))).posterior()
    total = -renyi - divergence.sum()
    for mean, root, value in zip(np.asarray(rest.mean), np.asarray(rest.root), y[:, 0]):
        X, mass = nodes(mean, root)
        f, var = known.marginals(X)
        total += np.log(mass @ np.exp(unwrap(gpt.Gaussian(0.15)).log_tilted(f, var, value, power))) / power
    assert np.isclose(drawn.objective(ROWS, y[:, 0], key=jax.random.key(1)), total, atol=0.2)


def test_gaps_are_entries_of_a_smaller_problem():
    "A column without entries, a row without, and a key that all draws share."
    column, row = np.where(np.arange(P) == 1, np.nan, Y), np.where((ROWS == 4)[:, None], np.nan, Y)
    prior_q, rest = some_q(), np.delete(ROWS, 4)
    m, R = prior_q.m.copy(), prior_q.S_factor.copy()
    m[:, 1], R[1] = 0, np.eye(M)
    smaller = VariationalGaussian(np.delete(m, 1, axis=1), np.delete(R, 1, axis=0))
    for cls, more in ((GPLVM, {}), (GPLVM, {"samples": 3}), (ApproximatePowerGPLVM, {"power": 0.6})):
        draws = {"key": jax.random.key(0)} if more.get("samples") else {}
        whole = kind(cls, q=VariationalGaussian(m, R), **more).objective(ROWS, column, **draws)
        part = at(cls(model(), POINTS, N, Q, P - 1, **more), q=smaller).objective(ROWS, np.delete(Y, 1, axis=1), **draws)
        assert np.isclose(whole, part, rtol=1e-10)
    collapsed = kind(CollapsedGPLVM)
    assert np.isclose(collapsed.objective(ROWS, column), collapsed.objective(ROWS, np.delete(Y, 1, axis=1)), rtol=1e-10)
    unseen = eqx.tree_at(lambda a: a.latents, kind(GPLVM, q=prior_q), Latents(
        free(np.where((ROWS == 4)[:, None], 0, MEANS)), positive(np.where((ROWS == 4)[:, None], 1, DEVIATIONS))))
    assert np.isclose(unseen.objective(ROWS, row), unseen.objective(rest, Y[rest]), rtol=1e-10)


def test_functions_with_kernels_and_inducing_points_of_their_own():
    kernels, each = (gpt.RBF(0.8), gpt.RBF(1.2) + gpt.Linear(0.5)), [POINTS, gpt.InducingPoints(Z + 0.3)]
    noise, q = gpt.Gaussian(0.2), some_q(2)
    for more in ({}, {"samples": 4}):
        draws = {"key": jax.random.key(0)} if more else {}
        both = at(GPLVM(gpt.GP(gpt.Independent(kernels), noise), each, N, Q, **more), q=q)
        value = both.objective(ROWS, Y[:, :2], **draws) + jnp.sum(unwrap(both.latents).divergence())
        alone = [at(GPLVM(gpt.GP(kernel, noise), part, N, Q, **more), q=one) for kernel, part, one in zip(kernels, each, q.split())]
        parts = [one.objective(ROWS, y, **draws) + jnp.sum(unwrap(one.latents).divergence()) for one, y in zip(alone, Y.T)]
        assert np.isclose(value, sum(parts), rtol=1e-10)
    latents = unwrap(both.latents)
    mean, var = predict_rows(both.posterior(), latents)
    assert np.allclose(mean[:, 1], predict_rows(alone[1].posterior(), latents)[0]) and var.shape == (N, 2)


OTHERS = {"labels": (gpt.Bernoulli(), np.where(np.isnan(GAPS), np.nan, GAPS > 0)),
          "positive": (gpt.Gamma(2.0), np.where(np.isnan(GAPS), np.nan, np.exp(GAPS))),
          "counts": (gpt.Poisson(), np.where(np.isnan(GAPS), np.nan, np.round(np.exp(GAPS)))),
          "classes": (gpt.RobustMax(3), np.where(ROWS == 2, np.nan, ROWS % 3.0))}


@pytest.mark.parametrize("name", OTHERS)
def test_any_likelihood_has_draws_gaps_and_gradients(name):
    likelihood, seen = OTHERS[name]
    for approx in (kind(GPLVM, q=some_q(), prior=model(likelihood=likelihood), samples=2),
                   kind(ApproximatePowerGPLVM, q=some_q(), prior=model(likelihood=likelihood), power=0.5)):
        draws = {"key": jax.random.key(0)} if approx.draws_samples else {}
        moving, rest = partition(approx)
        value, slopes = jax.value_and_grad(lambda moving: eqx.combine(moving, rest).objective(ROWS, seen, **draws))(moving)
        assert np.isfinite(value) and all(np.all(np.isfinite(a)) for a in jax.tree.leaves(slopes))


@pytest.mark.parametrize("name", ["labels", "classes"])
def test_without_closed_forms_it_trains_and_finds_rows_by_draws(name):
    likelihood, seen = OTHERS[name]
    fitted = gpt.fit(kind(GPLVM, prior=model(likelihood=likelihood), samples=2), (ROWS, seen), optimiser=optax.adam(0.05), steps=30,
                     batch_size=3, key=jax.random.key(1), progress=False)
    assert fitted.history.objective[-10:].mean() > fitted.history.objective[:10].mean()
    post = fitted.approx.posterior()
    new = infer_rows(post, seen[:2], MEANS, samples=4, key=jax.random.key(2), steps=5)
    mean, var = predict_rows(post, new, samples=10, key=jax.random.key(3))
    assert mean.shape == var.shape == (2, 3) and np.all(np.isfinite(var))


@pytest.mark.parametrize("name", ["full", "collapsed", "power", "points"])
def test_single_precision(name):
    approx, seen = KINDS[name](), Y if name == "points" else GAPS
    value = gpt.cast(approx, jnp.float32).objective(ROWS, seen.astype("float32"))
    assert value.dtype == jnp.float32 and np.isclose(value, approx.objective(ROWS, seen), rtol=1e-3)
    if name in ("collapsed", "power"):
        fitted = gpt.fit(gpt.cast(approx, jnp.float32), (ROWS, seen.astype("float32")), steps=20, progress=False)
        assert fitted.history.objective[-1] > fitted.history.objective[0]


def test_points_are_the_inputs_of_any_regression():
    log_prior = stats.norm.logpdf(MEANS).sum()
    for inner in (gpt.Exact(model()), gpt.FITC(model(), POINTS), gpt.ApproximatePowerEP(model(), POINTS, 0.5, P)):
        approx = PointGPLVM(inner, N, Q, MEANS)
        assert np.isclose(approx.objective(ROWS[::-1], Y[::-1]), inner.objective(MEANS[::-1], Y[::-1]) + log_prior, rtol=1e-10)
        known = inner.posterior(*(MEANS, Y)[:len(inner.posterior_needs)]).marginals(Z)
        assert np.allclose(approx.posterior(*(ROWS, Y)[:len(inner.posterior_needs)]).marginals(Z), known)
        if not approx.needs_all_rows:
            parts = [approx.objective(rows, Y[rows], num_data=N) for rows in np.split(ROWS, 3)]
            assert np.isclose(np.mean(parts), approx.objective(ROWS, Y), rtol=1e-10)
    fitted = gpt.fit(PointGPLVM(gpt.Exact(model()), N, Q, MEANS), (ROWS, Y), steps=50, progress=False)
    assert fitted.history.objective[-1] > fitted.history.objective[0] + 1


@pytest.fixture(scope="module")
def settled():
    "A model of two outputs of one input each, fitted until it stands still, and its posterior."
    x = np.linspace(-1.5, 1.5, 14)
    seen = np.column_stack([np.sin(2 * x), x]) + 0.05 * np.random.default_rng(6).normal(size=(14, 2))
    prior = gpt.freeze(gpt.GP(gpt.RBF(1.0, 1.5), gpt.Gaussian(0.01)))
    start = CollapsedGPLVM(prior, gpt.freeze(gpt.InducingPoints(np.linspace(-2, 2, 8)[:, None])), 14, 1, x[:, None])
    found = gpt.fit(start, (np.arange(14), seen), steps=3000, tolerance=1e-15, progress=False).approx
    return seen, unwrap(found.latents), found.posterior(np.arange(14), seen)


def test_rows_of_the_training_set_are_found_again(settled):
    seen, latents, post = settled
    new = infer_rows(post, seen[3:6], latents.mean)
    assert np.allclose(new.mean, latents.mean[3:6], atol=1e-3) and np.allclose(new.root, latents.root[3:6], rtol=1e-2)


def test_what_was_not_seen_is_predicted_with_its_uncertainty(settled):
    seen, latents, post = settled
    flat, steep = [3, 10], [6, 7]  # where the sine is
    half = np.column_stack([np.full(4, np.nan), seen[flat + steep, 1]])
    new = infer_rows(post, half, latents.mean)
    mean, var = predict_rows(post, new)
    assert np.all(np.abs(mean[:, 0] - seen[flat + steep, 0]) < 3 * np.sqrt(var[:, 0])) and np.all(var > 0.01)
    assert var[2:, 0].min() > 2 * var[:2, 0].max()
    draws = predict_rows(post, new, samples=10_000, key=jax.random.key(0))
    assert np.allclose(draws[0], mean, atol=5e-3) and np.allclose(draws[1], var, rtol=0.1)
    nothing = infer_rows(post, np.array([[np.nan, np.nan], [0.3, np.nan]]), latents.mean)
    assert np.allclose(nothing.mean[0], 0, atol=1e-3) and np.allclose(nothing.root[0], 1, atol=1e-3)


def test_the_density_of_a_row_by_quadrature(settled):
    seen, latents, post = settled
    rows = np.array([[0.5, 0.4], [np.nan, 1.0], [3.0, -1.0]])
    new = infer_rows(post, rows, latents.mean)
    x = np.linspace(-6, 6, 6001)
    f, var = post.marginals(x[:, None])
    log_p = np.nan_to_num(stats.norm.logpdf(rows[:, None], f, np.sqrt(var + 0.01)), nan=0.0).sum(axis=2) + stats.norm.logpdf(x)
    exact = np.log(np.trapezoid(np.exp(log_p), x, axis=1))
    for full in (False, True):
        q = Latents(new.mean, new.root[:, :, None]) if full else new
        ours = row_log_density(post, q, rows, jax.random.key(0), 20_000)
        assert np.allclose(ours[:2], exact[:2], atol=0.03) and np.allclose(ours[2], exact[2], atol=0.5)


def test_principal_components():
    scores = principal_components(Y, 2)
    assert np.allclose(scores.T @ scores / N, np.eye(2)) and np.allclose(scores.mean(axis=0), 0)
    rank = rng.normal(size=(60, 2)) @ rng.normal(size=(2, 8))
    holes = np.where(rng.uniform(size=rank.shape) < 0.1, np.nan, rank)
    inside, full = principal_components(holes, 2, rounds=500), principal_components((holes := np.asarray(rank)), 2)
    angles = np.linalg.svd(inside.T @ full / 60)[1]
    assert np.all(angles > 0.995)
    constant = np.column_stack([np.ones(9), Y])
    assert np.allclose(np.abs(principal_components(constant, 2)), np.abs(scores))
    with pytest.raises(ValueError, match="latent_dims must be from 1 to 3"):
        principal_components(Y, 4)


# Sites of their own

def settled_sites(approx, seen, sites=None, damping=0.5, number=300):
    sites, left = approx.rounds(seen, approx.start(seen) if sites is None else sites, number, damping)
    assert left == 0
    return sites


@pytest.mark.parametrize("power", [0.3, 1.0])
def test_sites_at_known_inputs_are_those_of_regression(power, monkeypatch):
    "Output by output, with gaps and a noise variance of each; without the noise on u that regression does not have."
    monkeypatch.setitem(gplvm.LIFT, "float64", 0.0)
    noise = np.array([0.15, 0.3, 0.08])
    approx = PowerGPLVM(model(likelihood=gpt.Gaussian(noise)), POINTS, power, MEANS, 1e-12)
    sites = settled_sites(approx, GAPS, damping=1.0, number=40)
    post, total = approx.posterior(GAPS, sites), 0.0
    for p, (y, variance) in enumerate(zip(GAPS.T, noise)):
        seen = ~np.isnan(y)
        closed = gpt.PowerEPRegression(model(likelihood=gpt.Gaussian(variance)), POINTS, power)
        total += closed.objective(MEANS[seen], y[seen])
        theirs = closed.posterior(MEANS[seen], y[seen])
        assert np.allclose(post.m[:, p], theirs.m, atol=1e-7)
        assert np.allclose(post.S_factor[p] @ post.S_factor[p].T, theirs.S_factor @ theirs.S_factor.T, atol=1e-7)
    assert np.isclose(approx.energy(GAPS, sites), total, rtol=1e-8)
    alone = PowerGPLVM(model(likelihood=gpt.Gaussian(0.15)), POINTS, power, MEANS, 1e-12)
    one = settled_sites(alone, Y[:, 0], damping=1.0, number=40)
    closed = gpt.PowerEPRegression(model(likelihood=gpt.Gaussian(0.15)), POINTS, power)
    assert np.isclose(alone.energy(Y[:, 0], one), closed.objective(MEANS, Y[:, 0]), rtol=1e-8)
    assert alone.posterior(Y[:, 0], one).marginals(Z)[0].shape == (M,)


@pytest.fixture(scope="module")
def fitted_bound():
    "Two outputs of one unknown input, the bound at its optimum with its hyperparameters held, and that bound."
    x = np.linspace(-1.5, 1.5, 10)
    seen = np.column_stack([np.sin(2 * x), np.cos(2 * x)]) + 0.2 * np.random.default_rng(8).normal(size=(10, 2))
    seen[3, 0] = seen[7, 1] = np.nan
    prior, points = gpt.freeze((gpt.GP(gpt.RBF(0.8, 0.7), gpt.Gaussian(0.1)), gpt.InducingPoints(np.linspace(-1.8, 1.8, 6)[:, None])))
    start = CollapsedGPLVM(prior, points, 10, 1, x[:, None])
    found = gpt.fit(start, (np.arange(10), seen), steps=3000, tolerance=1e-15, progress=False).approx
    free_q = eqx.tree_at(lambda a: a.latents, GPLVM(prior, points, 10, 1, 2), found.latents)
    return seen, with_best_q(free_q, np.arange(10), seen), float(found.objective(np.arange(10), seen))


def test_shared_out_sites_have_the_posterior_that_they_came_from(fitted_bound):
    seen, fitted, _ = fitted_bound
    for mean, variance in ((0.0, 1.0), (0.4, 2.5)):
        approx = PowerGPLVM(fitted.model, fitted.inducing, 0.5, mean, variance)
        sites = approx.start(seen, fitted)
        ours, theirs = approx.latents(seen, sites), unwrap(fitted.latents)
        assert np.allclose(ours.mean, theirs.mean) and np.allclose(ours.root[:, :, 0], theirs.root)
        post, q = approx.posterior(seen, sites), unwrap(fitted.q)
        square = lambda R: R @ np.swapaxes(R, 1, 2)
        assert np.allclose(post.m, q.m) and np.allclose(square(post.S_factor), square(q.S_factor))
        assert not np.any(np.asarray(sites.u.precision)[np.isnan(seen)]) and not np.any(np.asarray(sites.x.shift)[np.isnan(seen)])
        assert np.allclose(post.marginals(Z[:, :1])[0], fitted.posterior().marginals(Z[:, :1])[0])


def test_sites_towards_power_zero_reach_the_bound(fitted_bound):
    seen, fitted, best = fitted_bound
    energies = []
    for power in (0.02, 0.01):
        approx = PowerGPLVM(fitted.model, fitted.inducing, power)
        sites = settled_sites(approx, seen, approx.start(seen, fitted))
        energies.append(float(approx.energy(seen, sites)))
        assert np.allclose(approx.latents(seen, sites).mean, unwrap(fitted.latents).mean, atol=0.5 * power)
    assert np.isclose(2 * energies[1] - energies[0], best, rtol=0, atol=1e-3)
    assert energies[0] - best > 2e-3  # the two are told apart


@pytest.mark.parametrize("power", [0.5, 0.8])
def test_the_energy_is_stationary_in_its_sites_and_its_slope_that_of_the_settled_one(fitted_bound, power):
    seen, fitted, _ = fitted_bound
    made = lambda noise, lengthscale: PowerGPLVM(
        gpt.GP(gpt.RBF(lengthscale, 0.7), gpt.Gaussian(noise)), fitted.inducing, power)
    approx = made(0.1, 0.8)
    sites = settled_sites(approx, seen, approx.start(seen, fitted), number=1500)
    slope_in_sites = jax.jit(jax.grad(lambda sites: approx.energy(jnp.asarray(seen), sites)))
    both = lambda a: a + np.swapaxes(a, -1, -2) if a.ndim == 4 else a  # ways of a symmetric matrix
    largest = lambda sites: max(np.max(np.abs(both(a))[~np.isnan(seen)]) for a in jax.tree.leaves(slope_in_sites(sites)))
    assert largest(sites) < 1e-6 and largest(jax.tree.map(lambda a: 1.01 * a, sites)) > 1e-4
    for up, down in (((0.1001, 0.8), (0.0999, 0.8)), ((0.1, 0.8001), (0.1, 0.7999))):
        held = [made(*each).energy(seen, sites) for each in (up, down)]
        again = [made(*each).energy(seen, settled_sites(made(*each), seen, sites, number=1500)) for each in (up, down)]
        assert abs(held[0] - held[1]) > 1e-5
        assert np.isclose(held[0] - held[1], again[0] - again[1], rtol=1e-4)
    moving, rest = partition(approx)
    slope = jax.grad(lambda moving: eqx.combine(moving, rest).energy(seen, sites))(moving).model
    assert all(np.all(np.isfinite(a)) and np.any(a) for a in jax.tree.leaves(slope))


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_number_at_power_one_has_the_matched_moments_of_quadrature(kernel):
    "Then cavities are the priors: the energy is log Z by moments of f over nodes of x, and q(x), q(v) follow from its slopes."
    prior, (mean, deviation), y = model(kernel), (np.array([0.3, -0.8]), np.array([0.7, 0.4])), 1.1
    L = np.linalg.cholesky(lifted(KERNELS[kernel]))

    def log_Z(m=np.zeros(M), V=np.eye(M), centre=mean, cov=np.diag(deviation**2)):
        X, mass = nodes(centre, np.linalg.cholesky(cov), 40)
        k = unwrap(KERNELS[kernel])
        A = np.linalg.solve(L, np.asarray(k.evaluate(jnp.asarray(Z), jnp.asarray(X))))
        f = 0.2 + A.T @ m
        v = np.asarray(k.evaluate_diag(jnp.asarray(X))) - np.sum(A**2, axis=0) + np.einsum("is,ij,js->s", A, V, A)
        return stats.norm.logpdf(y, mass @ f, np.sqrt(mass @ v + mass @ (f - mass @ f) ** 2 + 0.15))

    approx = PowerGPLVM(prior, POINTS, 1.0, mean[None], deviation[None] ** 2)
    sites = settled_sites(approx, [y], damping=1.0, number=1)
    assert np.isclose(approx.energy([y], sites), log_Z(), rtol=1e-9)
    x, post, h = approx.latents([y], sites), approx.posterior([y], sites), 1e-4
    for name, start, cov, m, S in (("centre", mean, np.diag(deviation**2), x.mean[0], x.root[0] @ x.root[0].T),
                                   ("m", np.zeros(M), np.eye(M), post.m, post.S_factor @ post.S_factor.T)):
        eye, second = np.eye(len(start)), {"centre": "cov", "m": "V"}[name]
        g = np.array([(log_Z(**{name: start + h * e}) - log_Z(**{name: start - h * e})) / (2 * h) for e in eye])
        both = [[0.5 * (np.outer(a, b) + np.outer(b, a)) for b in eye] for a in eye]
        G = np.array([[(log_Z(**{second: cov + h * B}) - log_Z(**{second: cov - h * B})) / (2 * h) for B in row] for row in both])
        assert np.allclose(m, start + cov @ g, atol=1e-6)
        assert np.allclose(S, cov - cov @ (np.outer(g, g) - 2 * G) @ cov, atol=1e-6)
    assert np.max(np.abs(x.mean - mean)) > 1e-3 or kernel == "RBF"


def test_a_site_that_would_leave_no_density_stays_and_is_counted(fitted_bound):
    seen, fitted, _ = fitted_bound
    approx = PowerGPLVM(fitted.model, fitted.inducing, 1.0)
    sites = approx.start(seen, fitted)
    spoilt = eqx.tree_at(lambda s: s.x.precision, sites, sites.x.precision.at[2, 0].set(50.0).at[2, 1].set(-20.0))
    after, left = approx.rounds(seen, spoilt, 1, 1.0)
    assert left == 1 and after.x.precision[2, 0, 0, 0] == 50.0 and after.x.precision[2, 1, 0, 0] != -20.0
    assert all(np.all(np.isfinite(a)) for a in jax.tree.leaves(after))


def test_sites_of_single_precision():
    approx = gpt.cast(PowerGPLVM(model(), POINTS, 0.5, MEANS, 0.1), jnp.float32)
    double = PowerGPLVM(model(), POINTS, 0.5, MEANS, 0.1)
    ours, theirs = (each.energy(GAPS, settled_sites(each, GAPS, number=60)) for each in (approx, double))
    assert ours.dtype == jnp.float32 and np.isclose(ours, theirs, rtol=1e-2)


def power_ep(prior=None, points=POINTS, power=0.5, **more):
    return PowerGPLVM(model() if prior is None else prior, points, power, **more)


REFUSED = [
    (lambda: GPLVM(model(), POINTS, N, 3, P), "inducing must have 3 columns"),
    (lambda: GPLVM(gpt.GP(gpt.RBF(np.ones(3)), gpt.Gaussian()), POINTS, N, Q, P), "lengthscale"),
    (lambda: GPLVM(model(), POINTS, 0, Q, P), "num_rows must be a positive integer"),
    (lambda: GPLVM(model(), POINTS, N, 0, P), "latent_dims must be a positive integer"),
    (lambda: GPLVM(model(), POINTS, N, Q, P, MEANS[:4]), r"start must have shape \(9, 2\)"),
    (lambda: GPLVM(model(), POINTS, N, Q, P, samples=0), "samples must be a positive integer"),
    (lambda: GPLVM(model(likelihood=gpt.Bernoulli()), POINTS, N, Q, P), "Bernoulli has no closed form.*samples"),
    (lambda: GPLVM(gpt.GP(gpt.Matern32(), gpt.Gaussian()), POINTS, N, Q, P), "Matern32 has no closed form.*samples"),
    (lambda: GPLVM(model(), gpt.GaussianWindow(Z), N, Q, P), "GaussianWindow has no closed form.*samples"),
    (lambda: GPLVM(gpt.GP(gpt.RBF(), gpt.Gaussian(), gpt.LinearMean(np.ones(Q))), POINTS, N, Q, P), "LinearMean has no closed form"),
    (lambda: CollapsedGPLVM(gpt.GP(gpt.Independent([gpt.RBF(), gpt.RBF()]), gpt.Gaussian()), POINTS, N, Q), "one kernel for all outputs"),
    (lambda: CollapsedGPLVM(model(), Z, N, Q), "inducing must be inducing variables"),
    (lambda: PointGPLVM(model(), N, Q), "approx must be an approximation for known inputs"),
    (lambda: ApproximatePowerGPLVM(model(), POINTS, N, Q, P, power=0.0), "power must be a number above 0"),
    (lambda: KINDS["variational"]().objective(ROWS + 1, Y), "rows must be numbers from 0 to 8.*got 1 to 9"),
    (lambda: KINDS["variational"]().objective(ROWS - 1, Y), "got -1 to 7"),
    (lambda: KINDS["variational"]().objective(MEANS[:, 0], Y), "rows must be whole numbers"),
    (lambda: KINDS["variational"]().objective(ROWS, Y[:, :2]), r"Y must have shape \(9, 3\).*got \(9, 2\)"),
    (lambda: KINDS["variational"]().objective(ROWS[:4], Y), r"Y must have shape \(4, 3\)"),
    (lambda: KINDS["variational"]().objective(ROWS), "objective needs Y: pass rows and Y"),
    (lambda: KINDS["variational"]().objective(ROWS, np.full((N, P), np.nan)), "at least one entry that is not NaN"),
    (lambda: KINDS["variational"]().objective(ROWS, np.where(Y == Y[0, 0], np.inf, Y)), "finite"),
    (lambda: KINDS["variational"]().objective(ROWS, Y, num_data=20), "num_data must be 9, the rows"),
    (lambda: kind(GPLVM, samples=2).objective(ROWS, Y), "draws samples: key must be a JAX random key"),
    (lambda: kind(GPLVM, prior=model(likelihood=gpt.Bernoulli()), samples=2).objective(ROWS, Y, key=jax.random.key(0)), "labels 0 or 1"),
    (lambda: KINDS["collapsed"]().objective(ROWS[:4], Y[:4]), r"rows must hold each of 0, \.\.\., 8 once"),
    (lambda: KINDS["collapsed"]().objective(np.where(ROWS == 3, 2, ROWS), Y), "each of 0, .* once"),
    (lambda: KINDS["collapsed"]().posterior(ROWS), "posterior needs the data again: pass rows and Y"),
    (lambda: gpt.fit(KINDS["collapsed"](), (ROWS, Y), batch_size=3, key=jax.random.key(0), optimiser=optax.adam(0.1)), "all data at once"),
    (lambda: KINDS["points"]().objective(ROWS, GAPS), "finite real numbers"),
    (lambda: with_best_q(KINDS["variational"](), ROWS[:3], Y[:3]), "each of 0, .* once"),
    (lambda: infer_rows(KINDS["variational"]().posterior(), Y[:, :2], MEANS), r"Y must have shape \(9, 3\)"),
    (lambda: infer_rows(KINDS["variational"]().posterior(), Y, MEANS[:, :1]), "starts must have 2 columns"),
    (lambda: infer_rows(gpt.Exact(model()).posterior(MEANS, Y), Y, MEANS), "ExactPosterior has no closed form"),
    (lambda: infer_rows(KINDS["variational"]().posterior(), Y, MEANS, samples=3), "key must be a JAX random key"),
    (lambda: predict_rows(gpt.Exact(model()).posterior(MEANS, Y), Latents(MEANS, DEVIATIONS)), "ExactPosterior has no closed form"),
    (lambda: power_ep(power=0.0), "power must be a number above 0 and at most 1, got 0.0"),
    (lambda: power_ep(power=1.5), "power must be a number above 0 and at most 1, got 1.5"),
    (lambda: power_ep(model(likelihood=gpt.Bernoulli())), "needs Gaussian noise.*not Bernoulli"),
    (lambda: power_ep(gpt.GP(gpt.Matern32(), gpt.Gaussian())), "closed forms.*not Matern32"),
    (lambda: power_ep(points=gpt.GaussianWindow(Z)), "InducingPoints.*not GaussianWindow"),
    (lambda: power_ep(gpt.GP(gpt.RBF(), gpt.Gaussian(), gpt.LinearMean(np.ones(Q)))), "constant, not LinearMean"),
    (lambda: power_ep(gpt.GP(gpt.Independent([gpt.RBF(), gpt.RBF()]), gpt.Gaussian())), "one kernel for all outputs"),
    (lambda: power_ep(variance=-1.0), "variance must be positive, got -1.0"),
    (lambda: power_ep(mean=np.zeros(3)), r"mean must be a number, \(2,\) or \(N, 2\).*got shape \(3,\)"),
    (lambda: power_ep(mean=MEANS).start(Y[:4]), "Y must have 9 rows, as mean has, got 4"),
    (lambda: power_ep().start(np.where(Y == Y[0, 0], np.inf, Y)), "finite"),
    (lambda: power_ep().start(np.zeros((2, 2, 2))), r"Y must be \(N,\) or \(N, P\), got shape \(2, 2, 2\)"),
    (lambda: power_ep().start(Y, KINDS["collapsed"]()), "fitted must be a GPLVM.*got CollapsedGPLVM"),
    (lambda: power_ep().start(Y[:, :2], KINDS["variational"]()), r"fitted must have rows.*\(9, 2, 5, 2\), got \(9, 3, 5, 2\)"),
    (lambda: power_ep().rounds(Y, power_ep().start(Y[:5])), r"sites must be for rows.*\(9, 3, 5, 2\), got \(5, 3, 5, 2\)"),
    (lambda: power_ep().rounds(Y, power_ep().start(Y), damping=0.0), "damping must be above 0 and at most 1, got 0.0"),
    (lambda: power_ep().rounds(Y, power_ep().start(Y), number=0), "number must be a positive integer"),
]


@pytest.mark.parametrize("make, message", REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_states_go_to_a_file_and_back(tmp_path):
    approx = at(KINDS["power"](), q=some_q())
    gpt.save(tmp_path / "state", approx)
    assert np.isclose(gpt.load(tmp_path / "state").objective(ROWS, GAPS), approx.objective(ROWS, GAPS), rtol=1e-14)


PEERS = json.loads((TOP / "benchmarks" / "results" / "latent_variables.json").read_text())


@pytest.mark.parametrize("library", ["gpflow", "gpy"])
def test_the_bound_is_that_of_peers(library):
    "benchmarks/latent_variables.py made the numbers; all add 1e-8 to the diagonal of the kernel matrix of Z, GPy not times the variance."
    p = {name: np.asarray(value) for name, value in PEERS["small"].items() if name != "bounds"}
    prior = gpt.GP(gpt.RBF(p["lengthscale"], p["variance"].item()), gpt.Gaussian(p["noise"].item()))
    approx = CollapsedGPLVM(prior, gpt.InducingPoints(p["Z"]), *p["mean"].shape)
    approx = eqx.tree_at(lambda a: a.latents, approx, Latents(free(p["mean"]), positive(np.sqrt(p["var"]))))
    ours, tolerance = approx.objective(np.arange(len(p["Y"])), p["Y"]), {"gpflow": 1e-10, "gpy": 1e-7}[library]
    assert np.isclose(ours, PEERS["small"]["bounds"][library], rtol=tolerance)
