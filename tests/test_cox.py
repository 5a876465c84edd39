"Cox processes: what happens in a window, on a grid and without one."
import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import integrate, special, stats

import gp_thesis as gpt
from gp_thesis.cox import (
    LINKS, CoxSGPMC, CoxSVGP, Intensity, PoissonProcess, box_integrals, cell_counts, expected_log_square, integral_by_rule,
    integral_of_square, window_rule)
from gp_thesis.data import coal_disasters, finnish_pines
from gp_thesis.mcmc import sample
from gp_thesis.svgp import latent_marginals, whitened

rng = np.random.default_rng(0)
window, plane = [[0.0, 4.0]], [[-1.0, 2.0], [0.0, 1.5]]
events = np.sort(rng.uniform(0, 4, (9, 1)), axis=0)
Z = np.array([[0.3], [1.4], [2.5], [3.8]])
plain = lambda x: gpt.unwrap(x)


def model(link="square", mean=0.8, box=window, **kernel):
    return gpt.GP(gpt.RBF(**({"lengthscale": 1.1, "variance": 0.6} | kernel)), PoissonProcess(box, link), gpt.ConstantMean(mean))


def with_q(approx, key=1, spread=0.4):
    "The same at a q of no special kind."
    noise, M = np.random.default_rng(key), len(approx.inducing)
    R = np.tril(0.1 * noise.normal(size=(M, M)), -1) + spread * np.eye(M)
    q = gpt.VariationalGaussian(gpt.free(noise.normal(size=M)), gpt.lower_triangular(R))
    return eqx.tree_at(lambda a: a.q, approx, q)


# The expected logarithm of a square

RATIOS = [0.0, 1e-12, 1e-6, 1e-3, 0.1, 1.0, 10.0, 40.0, 97.9, 98.1, 150.0, 1e3]   # x = mean² / (2 var); the two forms meet at 98 / 2


def by_digammas(mean, var):
    x = mean**2 / (2 * var)
    j = np.arange(max(0, int(x - 20 * np.sqrt(x)) - 5), int(x + 20 * np.sqrt(x) + 60))
    return np.log(2 * var) + stats.poisson.pmf(j, x) @ special.digamma(j + 0.5)


@pytest.mark.parametrize("var", [1e-8, 0.7, 1e6])
def test_expected_log_of_a_square_is_the_mixture_of_digammas(var):
    means = np.sqrt(2 * var * np.array(RATIOS))
    ours = expected_log_square(jnp.array(means), jnp.full(len(means), var))
    assert np.allclose(ours, [by_digammas(m, var) for m in means], rtol=1e-12, atol=1e-11)


def test_expected_log_of_a_square_by_quadrature_and_monte_carlo():
    for mean, var in [(0.0, 1.0), (0.5, 2.0), (3.0, 0.5), (-4.0, 0.2)]:
        density = lambda f: np.log(f**2) * stats.norm.pdf(f, mean, var**0.5)
        ends = mean - 12 * var**0.5, mean + 12 * var**0.5
        value = integrate.quad(density, min(ends[0], -1), 0, limit=200)[0] + integrate.quad(density, 0, max(ends[1], 1), limit=200, points=[max(mean, 0.1)])[0]
        draws = np.log((mean + var**0.5 * rng.normal(size=200_000)) ** 2)
        ours = float(expected_log_square(mean, var))
        assert np.isclose(ours, value, atol=1e-7)
        assert abs(ours - draws.mean()) < 5 * draws.std() / 200_000**0.5


def test_derivatives_of_the_expected_log():
    mean, var = np.array([0.0, 0.3, -3.0, 6.99, 7.01, 40.0]), np.array([1.0, 0.7, 0.5, 0.5, 0.5, 0.01])
    step = 1e-4 * var

    @jax.jit
    @jax.vmap
    def derivatives(mean, var):
        slope = jax.grad(expected_log_square, (0, 1))
        ahead = [jax.jvp(slope, (mean, var), tangent) for tangent in ((1.0, 0.0), (0.0, 1.0))]       # forward over reverse
        twice = jax.grad(lambda m: slope(m, var)[0])(mean)                                          # reverse over reverse
        return ahead[0][0], ahead[0][1], ahead[1][1], twice

    (by_mean, by_var), (mm, vm), (mv, vv), twice = derivatives(mean, var)
    assert np.allclose(by_mean, 2 * np.sqrt(2 / var) * special.dawsn(mean / np.sqrt(2 * var)), rtol=1e-10)
    assert np.allclose(by_var, 0.5 * mm, rtol=1e-9, atol=1e-12)                                     # the heat equation
    assert np.allclose(twice, mm, rtol=1e-10) and np.allclose(mv, vm, rtol=1e-10, atol=1e-14)
    differences = (derivatives(mean, var + step)[0][1] - derivatives(mean, var - step)[0][1]) / (2 * step)
    assert np.allclose(vv, differences, rtol=1e-5, atol=1e-7)
    assert np.isclose(derivatives(np.array([2.0]), np.array([0.0]))[1][0][0], -0.5)                 # no spread: log f² itself
    assert np.isfinite(expected_log_square(jnp.float32(3e4), jnp.float32(1e-6)))


# Integrals over a window

def test_box_integrals_against_a_rule():
    kernel, centres = plain(gpt.RBF([0.6, 0.9], 1.3)), rng.uniform(-1.5, 2.5, (5, 2))     # some outside of the window
    X, weights = window_rule(plane, 60)
    K = np.asarray(kernel.evaluate(jnp.asarray(centres), jnp.asarray(X)))
    psi, Psi = box_integrals(jnp.asarray(centres), kernel, jnp.asarray(plane))
    assert np.isclose(weights.sum(), 4.5)
    assert np.allclose(psi, K @ weights, rtol=1e-10, atol=1e-12)
    assert np.allclose(Psi, (K * weights) @ K.T, rtol=1e-10, atol=1e-12)


def integrals(approx):
    approx = plain(approx)
    part, = whitened(approx)
    moments = lambda X: latent_marginals(approx.model, [part], X)
    return integral_of_square(approx.model, part), integral_by_rule(approx.model, part, moments)


def test_closed_form_of_the_integral_and_its_derivatives():
    approx = with_q(CoxSVGP(model(), gpt.InducingPoints(Z)))
    assert np.isclose(*eqx.filter_jit(integrals)(approx), rtol=1e-10)
    slope = eqx.filter_jit(lambda a, which: eqx.filter_grad(lambda a: integrals(a)[which])(a))
    slopes = [slope(approx, which) for which in (0, 1)]
    for one, other in zip(*(jax.tree.leaves(eqx.filter(s, eqx.is_inexact_array)) for s in slopes)):
        assert np.allclose(one, other, rtol=1e-8, atol=1e-9)


def test_crowded_inducing_points_do_not_cost_digits():
    few, many = (CoxSVGP(model(), gpt.InducingPoints(np.linspace(0, 4, M)[:, None])) for M in (4, 30))
    mean = lambda a: eqx.tree_at(lambda a: a.q.m, a, gpt.free(np.cos(np.arange(len(a.inducing)))))
    closed, rule = eqx.filter_jit(integrals)(mean(many))
    likelihood = eqx.tree_at(lambda a: a.model.likelihood, mean(many), PoissonProcess(window, "square", nodes=300))
    assert abs(float(mean(many).objective(events)) - float(likelihood.objective(events))) < 1e-6
    assert abs(closed - rule) > 1e-6          # if not, the choice between the two is not needed any more
    assert np.isclose(*eqx.filter_jit(integrals)(mean(few)), rtol=1e-9)


# The bound

def by_brute_force(link, mean, points=120):
    "log p(Y) with f known exactly from its values at a few inputs: the kernel is constant."
    f, weights = np.polynomial.hermite_e.hermegauss(points)
    f = mean + np.sqrt(0.6) * f
    rate = np.asarray(LINKS[link].intensity(jnp.asarray(f)))
    return special.logsumexp(len(events) * np.log(rate) - 4 * rate, b=weights / np.sqrt(2 * np.pi))


@pytest.mark.parametrize("link", list(LINKS))
def test_bound_is_below_the_evidence_of_a_constant_function(link):
    flat = gpt.GP(gpt.RBF(1e4, 0.6), PoissonProcess(window, link), gpt.ConstantMean(0.8))
    result = gpt.fit(CoxSVGP(gpt.freeze(flat), gpt.freeze(gpt.InducingPoints(Z[:1]))), (events,), progress=False)
    bound, evidence = float(result.approx.objective(events)), by_brute_force(link, 0.8, 150)
    assert evidence - 0.3 < bound < evidence + 1e-6


@pytest.mark.parametrize("link", list(LINKS))
def test_expectations_of_links(link):
    mean, var = jnp.array([-0.7, 0.4, 2.0]), jnp.array([0.3, 0.6, 0.05])
    f = np.asarray(mean) + np.sqrt(var) * rng.normal(size=(400_000, 3))
    rate = np.asarray(LINKS[link].intensity(jnp.asarray(f)))
    for ours, draws in ((LINKS[link].expected(mean, var), rate), (LINKS[link].expected_log(mean, var), np.log(rate))):
        assert np.all(np.abs(ours - draws.mean(0)) < 5 * draws.std(0) / 400_000**0.5)
    assert np.allclose(LINKS[link].variance(mean, var), rate.var(0), rtol=0.05)
    t = jnp.array([0.5, 1.0, 4.0])
    assert np.allclose(LINKS[link].below(t, mean, jnp.sqrt(var)), (rate <= np.asarray(t)).mean(0), atol=5e-3)


def test_more_inducing_points_raise_the_bound():
    bounds = []
    for M in (2, 6):
        approx = CoxSVGP(gpt.freeze(model("exp", 0.6, lengthscale=0.7)), gpt.freeze(gpt.InducingPoints(np.linspace(0, 4, M)[:, None])))
        bounds.append(float(gpt.fit(approx, (events,), progress=False).approx.objective(events)))
    assert bounds[0] < bounds[1] - 1e-3


def test_the_grid_tends_to_the_continuum():
    continuous = with_q(CoxSVGP(model("exp", 0.6), gpt.InducingPoints(Z)))
    whole, apart = float(continuous.objective(events)), []
    for cells in (10, 100, 4000):
        X, y, area = cell_counts(events, window, cells)
        grid = gpt.SVGP(gpt.GP(continuous.model.kernel, gpt.Poisson(binsize=area), continuous.model.mean), continuous.inducing)
        grid = eqx.tree_at(lambda a: a.q, grid, continuous.q)
        bound = float(grid.objective(X, y)) + special.gammaln(y + 1).sum() - len(events) * np.log(area)
        apart.append(abs(bound - whole))
    assert apart[2] < 1e-3 and apart[2] < apart[0]


@pytest.mark.parametrize("link", ["square", "exp"])
def test_batches_of_events_are_unbiased(link):
    approx = with_q(CoxSVGP(model(link), gpt.InducingPoints(Z)))
    parts = [float(approx.objective(events[k:k + 3], num_data=9)) for k in (0, 3, 6)]
    assert np.isclose(np.mean(parts), float(approx.objective(events)), rtol=1e-10)
    result = gpt.fit(approx, (events,), batch_size=3, steps=5, key=jax.random.key(0), optimiser=optax.adam(1e-3), progress=False)
    assert np.isfinite(result.approx.objective(events))


@pytest.mark.parametrize("make, link", [(CoxSVGP, "square"), (CoxSGPMC, "exp")])
def test_derivatives_of_the_objectives(make, link):
    approx = make(model(link), gpt.InducingPoints(Z))
    trainable, rest = gpt.partition(with_q(approx) if make is CoxSVGP else approx)
    theta, unravel = jax.flatten_util.ravel_pytree(trainable)
    theta, direction, step = theta + 0.1 * rng.normal(size=theta.shape), rng.normal(size=theta.shape), 1e-4
    objective = lambda theta: eqx.combine(unravel(theta), rest).objective(events)

    @jax.jit
    def derivatives(theta):
        ahead = jax.jvp(jax.value_and_grad(objective), (theta,), (direction,))
        return *ahead, jax.grad(lambda theta: jax.grad(objective)(theta) @ direction)(theta)

    with gpt.nan_on_failure():
        (_, slope), (forward, curvature), twice = derivatives(theta)
        above, below = (derivatives(theta + sign * step * direction)[0] for sign in (1, -1))
    assert np.isclose(forward, slope @ direction, rtol=1e-8)
    assert np.isclose((above[0] - below[0]) / (2 * step), forward, rtol=1e-5)
    assert np.allclose((above[1] - below[1]) / (2 * step), curvature, rtol=1e-4, atol=1e-4)
    assert np.allclose(twice, curvature, rtol=1e-6, atol=1e-8)


# Sampling

@pytest.mark.parametrize("link", ["square", "exp"])
def test_density_of_the_sampler_is_that_of_its_parts(link):
    approx = CoxSGPMC(model(link), gpt.InducingPoints(Z))
    v = jnp.array([0.3, -0.5, 0.9, 0.1])
    ours = float(eqx.tree_at(lambda a: a.v, approx, gpt.free(v)).objective(events))
    svgp = CoxSVGP(model(link), gpt.InducingPoints(Z))      # a q with hardly any spread is a point
    tiny = 1e-9
    q = gpt.VariationalGaussian(gpt.free(v), gpt.lower_triangular(tiny * np.eye(4)))
    at = eqx.tree_at(lambda a: a.q, svgp, q)
    kl = float(plain(at).q.kl_from_standard_normal())
    expected = float(at.objective(events)) + kl
    assert np.isclose(ours, expected - 0.5 * float(v @ v) - 2 * np.log(2 * np.pi), rtol=1e-7)


def test_draws_of_one_value_have_the_moments_of_their_density():
    held = gpt.freeze(model("exp", 0.6))
    approx = CoxSGPMC(held, gpt.InducingPoints(Z[1:2]))
    run = sample(approx, (events,), key=jax.random.key(1), warmup=200, samples=1000, chains=2, progress=False)
    grid = np.linspace(-6, 6, 601)
    at = eqx.filter_jit(lambda v: eqx.tree_at(lambda a: a.v, approx, gpt.free(v)).objective(events))
    log_p = np.asarray(jax.lax.map(lambda v: at(v[None]), jnp.asarray(grid)))
    weights = np.exp(log_p - log_p.max())
    mean = (weights * grid).sum() / weights.sum()
    deviation = np.sqrt((weights * (grid - mean) ** 2).sum() / weights.sum())
    draws = np.asarray(run.draws.v)[..., 0]
    assert abs(draws.mean() - mean) < 5 * deviation / np.sqrt(run.table.bulk[0])
    assert np.isclose(draws.std(), deviation, rtol=0.12)
    found = Intensity(run.posterior)
    low, high = found.quantiles(Z, [0.05, 0.95])
    lam = np.asarray(found.sample(jax.random.key(2), Z, 4000))
    assert low.shape == (4,) and np.all(low < high) and found.quantiles(Z, 0.5).shape == (4,)
    assert np.allclose(np.mean(lam < np.asarray(low), axis=0), 0.05, atol=0.02)
    assert np.allclose(found.mean(Z), lam.mean(0), rtol=0.06)


def test_intensity_of_a_gaussian_and_of_a_grid():
    approx = with_q(CoxSVGP(model("square"), gpt.InducingPoints(Z)))
    found = Intensity(approx.posterior())
    mean, var = approx.posterior().marginals(Z)
    assert np.allclose(found.mean(Z), mean**2 + var, rtol=1e-6)
    f = np.asarray(mean) + np.sqrt(np.asarray(var)) * rng.normal(size=(200_000, 4))
    assert np.allclose(found.quantiles(Z, [0.1, 0.9]), np.quantile(f**2, [0.1, 0.9], axis=0), rtol=0.05, atol=2e-3)
    grid = gpt.SVGP(gpt.GP(gpt.RBF(1.1, 0.6), gpt.Poisson(binsize=0.25), gpt.ConstantMean(0.8)), gpt.InducingPoints(Z))
    assert np.allclose(Intensity(grid.posterior()).mean(Z), np.exp(0.8 + 0.3), rtol=1e-6)      # for each unit, not each cell
    with pytest.raises(ValueError, match="PoissonProcess or a Poisson"):
        Intensity(gpt.SVGP(gpt.GP(gpt.RBF(), gpt.Gaussian()), gpt.InducingPoints(Z)).posterior())


# Data and mistakes

def test_counts_on_a_grid():
    edge = np.array([[0.0, 0.0], [1.0, 1.0], [0.5, 0.2], [0.49, 0.2]])
    centres, counts, area = cell_counts(edge, [[0, 1], [0, 1]], (2, 4))
    assert area == 0.125 and counts.sum() == 4 and np.allclose(centres[0], [0.25, 0.125])
    inside = [np.all(np.abs(edge - c) <= [0.25, 0.125], axis=1).sum() for c in centres]
    assert np.all(counts <= inside) and counts[4] == 1 and counts[0] == 2


def test_patterns():
    days, years = coal_disasters()
    assert days.shape == (191, 1) and np.all(np.diff(days[:, 0]) >= 0)
    assert years.tolist() == [[1851.2026, 1962.2197]]
    counts = np.histogram(days, np.linspace(*years[0], 113))[0]
    assert counts[:10].tolist() == [4, 5, 5, 0, 0, 5, 3, 3, 0, 6] and counts.sum() == 191


def test_pines_from_a_file_and_without(tmp_path, monkeypatch):
    monkeypatch.setattr("gp_thesis.data.cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("GP_THESIS_DATA", str(tmp_path))
    with pytest.warns(UserWarning, match="finpines.txt"):
        pattern = finnish_pines()
    assert pattern.synthetic and pattern.events.shape == (126, 2)
    table = np.c_[pattern.events, np.ones((126, 2))]
    np.savetxt(tmp_path / "finpines.txt", table, header="x y diameter height", comments="")
    assert not finnish_pines().synthetic and np.allclose(finnish_pines().events, pattern.events)
    np.savetxt(tmp_path / "finpines.csv", table[:5], header="x,y", comments="", delimiter=",")
    with pytest.raises(ValueError, match="126 points"):
        finnish_pines()


@pytest.mark.parametrize("box, words", [
    (None, "missing"), ([0.0, 1.0], "shape"), ([[0.0, 0.0]], "volume"), ([[1.0, 0.0]], "volume"), ([[0.0, np.inf]], "volume")])
def test_windows_that_are_none(box, words):
    with pytest.raises(ValueError, match=words):
        PoissonProcess(box)
    with pytest.raises(ValueError, match=words):
        cell_counts(events, box, 4)


def test_mistakes():
    approx = CoxSVGP(model(), gpt.InducingPoints(Z))
    for wrong, words in [(events + 3.5, r"events must lie in the window .*first is events\["), (events[:, 0], r"events\[:, None\]"),
                         (np.ones((3, 2)), "1 columns"), (np.full((2, 1), np.nan), "finite"), (np.zeros((0, 1)), "at least one row")]:
        with pytest.raises(ValueError, match=words):
            approx.objective(wrong)
    with pytest.raises(ValueError, match="without a y"):
        approx.objective(events, np.ones(9))
    with pytest.raises(ValueError, match="CoxSVGP"):
        gpt.SVGP(model(), gpt.InducingPoints(Z)).objective(events, np.ones(9))
    with pytest.raises(ValueError, match="PoissonProcess"):
        CoxSVGP(gpt.GP(gpt.RBF(), gpt.Poisson()), gpt.InducingPoints(Z))
    with pytest.raises(ValueError, match="2 columns"):
        CoxSGPMC(model(box=plane), gpt.InducingPoints(Z))
    with pytest.raises(ValueError, match="one latent"):
        CoxSVGP(model(), [gpt.InducingPoints(Z)] * 2)
    with pytest.raises(ValueError, match="link must be one of"):
        PoissonProcess(window, "cube")
    with pytest.raises(ValueError, match="nodes must be"):
        PoissonProcess(plane, nodes=1000)
    with pytest.raises(ValueError, match="cells must be"):
        cell_counts(events, window, 0)
