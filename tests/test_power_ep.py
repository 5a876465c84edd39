"""Power EP at any power, against closed forms, programs with whole matrices, quadrature, finite differences and limits.

Compiling costs more than computing here: most tests have the same 15 rows, 4 inducing points and tolerance."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm, poisson
from scipy.stats import t as student

import gp_thesis as gpt
from gp_thesis.ep import Sites, prior_of
from gp_thesis.likelihoods import normal_nodes
from gp_thesis.parameters import partition, unwrap
from gp_thesis.power_ep import energy_at, posterior_at, start_sites, visit_sites

rng = np.random.default_rng(3)
N = 15
X = np.sort(rng.uniform(0, 4, (N, 1)), axis=0)
f = 1.2 * np.sin(2 * X[:, 0])
noisy = f + 0.3 * rng.standard_t(4, N)
TARGETS = {"probit": (gpt.Bernoulli(), (noisy > 0).astype(float)), "counts": (gpt.Poisson(), rng.poisson(np.exp(f)).astype(float)),
           "Student": (gpt.StudentT(0.3), noisy)}
DENSITIES = {"probit": lambda f, y: norm.cdf((2 * y - 1) * f), "counts": lambda f, y: poisson.pmf(y, np.exp(f)),
             "Student": lambda f, y: student.pdf((y - f) / 0.3, float(unwrap(gpt.StudentT(0.3)).df)) / 0.3}
CLASSES = np.where(f > 0.4, 0.0, np.where(f > -0.4, 1.0, 2.0))
ONE_OF = TARGETS | {"robust max": (gpt.RobustMax(3, 0.05), CLASSES)}
Z = gpt.InducingPoints(np.linspace(0.3, 3.7, 4)[:, None])
KERNEL = gpt.RBF(0.8, 1.5)


def make(name, power, inducing=Z, **settings):
    return gpt.PowerEP(gpt.GP(KERNEL, TARGETS[name][0], gpt.ConstantMean(0.2)), inducing, power, **{"tolerance": 1e-11, **settings})


def matrices():
    "K, Q and the prior mean, by NumPy alone."
    k = lambda a, b: 1.5 * np.exp(-0.5 * ((a - b.T) / 0.8) ** 2)
    points = np.linspace(0.3, 3.7, 4)[:, None]
    Kuf = k(points, X)
    return k(X, X), Kuf.T @ np.linalg.solve(k(points, points), Kuf), 0.2


def plain(name, alpha, K, Q, mean, sweeps=150, points=4001):
    """For f of covariance K, of which Q is that of z. Energy, mean and covariance of z under q, by sites on N x N matrices, sums on a grid for all integrals, and the energy
    from normalisers as Bui writes them, A.87 with (2.21): nothing of the package takes part."""
    y, density = TARGETS[name][1], DENSITIES[name]
    D = np.diag(K - Q)
    tau, nu = np.zeros(N), np.zeros(N)                       # sites in z - mean

    def posterior(tau, nu):
        S = np.linalg.solve(np.eye(N) + Q * tau, Q)
        return S @ nu, S

    def tilted(n, m, v):
        t = np.linspace(-9, 9, points)
        grid = mean + m + np.sqrt(v + D[n]) * t
        w = norm.pdf(t) * (t[1] - t[0]) * density(grid, y[n]) ** alpha
        mass = w.sum()
        first = w @ (grid - mean) / mass
        second = w @ (grid - mean - first) ** 2 / mass
        gain = v / (v + D[n])                                # moments of z from those of f
        return np.log(mass), m + gain * (first - m), v - gain * v + gain**2 * second

    for _ in range(sweeps):
        before = tau.copy()
        for n in range(N):
            m, S = posterior(tau, nu)
            left = 1 / S[n, n] - alpha * tau[n]
            cavity = ((m[n] / S[n, n] - alpha * nu[n]) / left, 1 / left)
            _, m_hat, v_hat = tilted(n, *cavity)
            tau[n] = (1 - alpha) * tau[n] + 1 / v_hat - left
            nu[n] = (1 - alpha) * nu[n] + m_hat / v_hat - cavity[0] * left
        if np.abs(tau - before).max() < 1e-11:
            break
    m, S = posterior(tau, nu)
    energy = -0.5 * np.linalg.slogdet(np.eye(N) + Q * tau)[1] + 0.5 * nu @ m
    for n in range(N):
        left, v = 1 / S[n, n] - alpha * tau[n], S[n, n]
        cavity = ((m[n] / v - alpha * nu[n]) / left, 1 / left)
        log_normaliser = lambda a, b: 0.5 * np.log(b) + 0.5 * a**2 / b
        energy += (tilted(n, *cavity)[0] + log_normaliser(*cavity) - log_normaliser(m[n], v)) / alpha
    return energy, mean + m, S


def numbers_of(approx, X, y):
    "Energy, its gradient, mean and factor of q(v), end to end."
    trainable, rest = partition(approx)

    @eqx.filter_jit
    def all_of(trainable, rest):
        value, slope = jax.value_and_grad(lambda t: eqx.combine(t, rest).objective(X, y))(trainable)
        q = eqx.combine(trainable, rest).posterior(X, y)
        return value, slope, q.m, q.S_factor

    with gpt.nan_on_failure():
        return np.concatenate([np.ravel(a) for a in jax.tree.leaves(all_of(trainable, rest))])


@pytest.mark.parametrize("name, alpha", [("probit", 0.5), ("counts", 0.5), ("Student", 0.5)])
def test_whole_matrices_and_sums_end_at_the_same_place(name, alpha):
    energy, mean, S = plain(name, alpha, *matrices())
    approx = make(name, alpha)
    point = jax.tree.map(np.asarray, approx.fixed_point(X, TARGETS[name][1]))
    whole = 1 / point.var + alpha * point.sites.precision
    assert np.isclose(approx.objective(X, TARGETS[name][1]), energy, rtol=0, atol=1e-8)
    assert np.allclose((point.mean / point.var + alpha * point.sites.shift) / whole, mean, rtol=0, atol=1e-8)
    assert np.allclose(1 / whole, np.diag(S), rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", TARGETS)
def test_power_one_is_generalised_fitc(name):
    "EP under the prior that FITC puts in the place of the first: nothing is left for ε there."
    (K, Q, mean), y = matrices(), TARGETS[name][1]
    changed = Q + np.diag(np.diag(K - Q))
    energy, latent, S = plain(name, 1.0, changed, changed, mean)
    approx = make(name, 1.0)
    assert np.isclose(approx.objective(X, y), energy, rtol=0, atol=1e-8)
    ours = approx.posterior(X, y)
    share = np.linalg.solve(changed, Q).T                              # what z has of f in that prior
    assert np.allclose(ours.mean(X), mean + share @ (latent - mean), rtol=0, atol=1e-8)
    assert np.allclose(np.asarray(ours.covariance(X)) - K, share @ (S - changed) @ share.T, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", TARGETS)
def test_power_one_with_all_inputs_is_ep(name):
    gp, y = gpt.GP(gpt.Matern32(0.8, 1.5), TARGETS[name][0], gpt.ConstantMean(0.2)), TARGETS[name][1]
    full, all_of = gpt.EP(gp, tolerance=1e-11), gpt.PowerEP(gp, gpt.InducingPoints(X), 1.0, tolerance=1e-11)
    assert np.isclose(full.objective(X, y), all_of.objective(X, y), rtol=0, atol=1e-8)
    a, b = (approx.posterior(X, y) for approx in (full, all_of))
    assert np.allclose(a.marginals(X + 0.1), b.marginals(X + 0.1), rtol=0, atol=1e-8)


def test_the_energy_of_twenty_rows_is_near_the_evidence():
    "log p(y) by importance sampling, with the posterior of EP, a little wider, for the proposal."
    random = np.random.default_rng(1)
    inputs = np.sort(random.uniform(0, 5, (20, 1)), axis=0)
    y = (np.sin(2 * inputs[:, 0]) + 0.3 * random.normal(size=20) > 0).astype(float)
    gp = gpt.GP(gpt.Matern32(0.8, 1.5), gpt.Bernoulli())
    q = gpt.EP(gp).posterior(inputs, y)
    root = 1.15 * np.linalg.cholesky(np.asarray(q.S_factor @ q.S_factor.T))
    e = random.normal(size=(200_000, 20))
    v = np.asarray(q.m) + e @ root.T
    log_w = 0.5 * (e**2).sum(1) - 0.5 * (v**2).sum(1) + np.log(np.diag(root)).sum()
    log_w += norm.logcdf((2 * y - 1) * (v @ np.asarray(q.L).T)).sum(1)
    w = np.exp(log_w - log_w.max())
    truth = log_w.max() + np.log(w.mean())
    assert w.sum() ** 2 / (w**2).sum() > 20_000                        # the effective number of draws
    gaps = [float(gpt.PowerEP(gp, None, alpha).objective(inputs, y)) - truth for alpha in (0.01, 0.5, 1.0)]
    assert gaps[0] < gaps[1] < gaps[2] and abs(gaps[2]) < 0.05 and gaps[0] > -0.2


@pytest.mark.parametrize("alpha", [1.0, 0.8, 0.5, 0.2, 0.01])
def test_gaussian_noise_has_the_closed_form(alpha):
    gp = gpt.GP(KERNEL, gpt.Gaussian(0.2))
    ours, closed = gpt.PowerEP(gp, Z, alpha), gpt.PowerEPRegression(gp, Z, alpha)
    assert np.isclose(ours.objective(X, noisy), closed.objective(X, noisy), rtol=0, atol=1e-8)
    a, b = (approx.posterior(X, noisy) for approx in (ours, closed))
    assert np.allclose(a.mean(X), b.mean(X), rtol=0, atol=1e-8) and np.allclose(a.covariance(X), b.covariance(X), rtol=0, atol=1e-8)


def towards_zero(make, y):
    "Energy, gradient, mean and factor of q at power zero, by Richardson's extrapolation."
    table = [numbers_of(make(0.08 / 2**k), X, y) for k in range(6)]
    for order in range(1, 6):
        table = [(2**order * b - a) / (2**order - 1) for a, b in zip(table, table[1:])]
    q = make(0.08).posterior(X, y)
    P = len(table[0]) - 1 - q.m.size - q.S_factor.size
    value, slope, m, S = np.split(table[0], np.cumsum([1, P, q.m.size]))
    return value[0], slope, m.reshape(q.m.shape), S.reshape(q.S_factor.shape)


def bound_and_slopes(approx, m, S, y):
    "The bound of SVGP at this q, and its gradient in parameters and in q."
    trainable, rest = partition(approx)

    @eqx.filter_jit
    def bound(trainable, m, S):
        def at(trainable, m, S):
            plain = unwrap(eqx.combine(trainable, rest))
            q = gpt.InducingPosterior(plain.model, plain.inducing, prior_of(plain, jnp.asarray(X)).L, m, S)
            return gpt.uncollapsed_bound(q, jnp.asarray(X), jnp.asarray(y))
        return jax.value_and_grad(at, (0, 1, 2))(trainable, m, S)

    value, (of_theta, of_m, of_S) = bound(trainable, m, S)
    flat = np.concatenate([np.ravel(a) for a in jax.tree.leaves(of_theta)])
    return float(value), flat, max(np.abs(of_m).max(), np.abs(np.triu(of_S)).max())


@pytest.mark.parametrize("name", [*TARGETS, "robust max"])
def test_the_limit_at_zero_is_the_variational_bound(name):
    likelihood, y = ONE_OF[name]
    make = lambda alpha: gpt.PowerEP(gpt.GP(KERNEL, likelihood, gpt.ConstantMean(0.2)), Z, alpha, tolerance=1e-13, rounds=1000)
    value, slope, m, S = towards_zero(make, y)
    bound, of_theta, of_q = bound_and_slopes(make(0.5), m, S, y)
    assert abs(value - bound) < 1e-8
    assert of_q < 1e-6                                                # the best q of the bound
    assert np.allclose(slope, of_theta, rtol=0, atol=1e-6)
    assert np.abs(slope).max() > 0.1


class Expected(gpt.Softmax):
    "Softmax with the expectation itself, over the nodes of `log_tilted`."

    def variational_expectations(self, mean, var, y):
        nodes = jnp.asarray(normal_nodes(3, self.points), mean.dtype)
        return jnp.mean(jax.vmap(lambda t: self.log_density(mean + jnp.sqrt(var) * t, y))(nodes), 0)


def test_softmax_goes_to_the_expectation_that_its_bound_is_below():
    make = lambda alpha, kind=gpt.Softmax: gpt.PowerEP(gpt.GP(KERNEL, kind(3)), Z, alpha, tolerance=1e-13, rounds=1000)
    value, slope, m, S = towards_zero(make, CLASSES)
    itself, of_theta, of_q = bound_and_slopes(make(0.5, Expected), m, S, CLASSES)
    assert abs(value - itself) < 1e-8 and of_q < 1e-6 and np.allclose(slope, of_theta, rtol=0, atol=1e-6)
    below = bound_and_slopes(make(0.5), m, S, CLASSES)[0]
    assert value - below > 0.1


def test_towards_zero_the_energy_of_any_sites_is_the_bound():
    y, random = TARGETS["probit"][1], np.random.default_rng(0)
    sites = Sites(jnp.asarray(random.normal(size=N)), jnp.asarray(random.uniform(size=N)))
    q = posterior_at(make("probit", 0.5), sites, X)
    bound = float(gpt.uncollapsed_bound(q, X, y))
    gaps = [float(energy_at(make("probit", alpha), sites, X, y)) - bound for alpha in (0.1, 0.01, 0.001)]
    assert abs(gaps[0]) > 1e-3 and np.allclose(np.divide(gaps[:2], gaps[1:]), 10, rtol=0.2) and abs(gaps[2]) < 0.01


@pytest.mark.parametrize("name", ["Student", "robust max"])
def test_gradients_are_those_of_the_converged_energy(name):
    likelihood, y = ONE_OF[name]
    approx = gpt.PowerEP(gpt.GP(gpt.Matern32(0.8, 1.5), likelihood, gpt.ConstantMean(0.2)), Z, 0.4, tolerance=1e-12, rounds=1000)
    trainable, rest = partition(approx)
    flat, back = jax.flatten_util.ravel_pytree(trainable)
    with gpt.nan_on_failure():
        energy = jax.jit(jax.value_and_grad(lambda flat: eqx.combine(back(flat), rest).objective(X, y)))
        slope, step = energy(flat)[1], 1e-4
        at = lambda e: float(energy(flat + e)[0])
        differences = [(8 * (at(e) - at(-e)) - at(2 * e) + at(-2 * e)) / (12 * step) for e in step * np.eye(len(flat))]
    free = 2 if name == "robust max" else 0        # the order of functions knows neither their scale nor a common mean
    assert len(flat) == 3 + (name == "Student") + 4 and np.sort(np.abs(slope))[free] > 1e-4
    assert np.allclose(slope, differences, rtol=1e-5, atol=1e-5)


def test_order_and_rate_do_not_move_the_fixed_point():
    y = TARGETS["counts"][1]
    first = make("counts", 0.5).fixed_point(X, y)
    for settings in (dict(sequential=True), dict(rate=0.5)):
        other = make("counts", 0.5, **settings).fixed_point(X, y)
        assert other.left == 0 and np.allclose(other.sites.precision, first.sites.precision, rtol=0, atol=1e-8)
        assert np.allclose(other.sites.shift, first.sites.shift, rtol=0, atol=1e-8)


def test_interdomain_variables_need_only_their_covariances():
    y = TARGETS["probit"][1]
    wide, narrow = (make("probit", 0.5, gpt.GaussianWindow(np.linspace(0.3, 3.7, 4)[:, None], b)) for b in (0.5, 1e-5))
    points = make("probit", 0.5)
    assert np.isclose(narrow.objective(X, y), points.objective(X, y), rtol=0, atol=1e-6)
    assert abs(float(wide.objective(X, y) - points.objective(X, y))) > 1e-3
    gp = gpt.GP(KERNEL, gpt.Gaussian(0.2))
    assert np.isclose(gpt.PowerEP(gp, wide.inducing, 0.3).objective(X, noisy),
                      gpt.PowerEPRegression(gp, wide.inducing, 0.3).objective(X, noisy), rtol=0, atol=1e-8)


# several latent functions


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_several_functions_match_the_moments_of_each(alpha):
    approx = gpt.PowerEP(gpt.GP(KERNEL, gpt.RobustMax(3, 0.05)), Z, alpha, rate=0.3, rounds=400, tolerance=1e-7)
    point = jax.tree.map(np.asarray, approx.fixed_point(X, CLASSES))
    assert point.left == 0 and point.sites.shift.shape == (N, 3)
    prior = jax.tree.map(np.asarray, prior_of(unwrap(approx), jnp.asarray(X)))
    whole = 1 / point.var + alpha * point.sites.precision
    n = int(np.argmax(np.abs(point.sites.shift).sum(1)))
    draws = point.mean[n] + np.sqrt(point.var[n]) * np.random.default_rng(0).normal(size=(1_000_000, 3))
    seen = draws + np.sqrt(prior.D[n]) * np.random.default_rng(1).normal(size=draws.shape)
    w = np.where(np.argmax(seen, 1) == CLASSES[n], 0.95, 0.025) ** alpha       # tilted, by Monte Carlo
    mean = w @ draws / w.sum()
    var = w @ (draws - mean) ** 2 / w.sum()
    assert np.allclose(((point.mean / point.var + alpha * point.sites.shift) / whole)[n], mean, atol=5e-3)
    assert np.allclose(1 / whole[n], var, rtol=1e-2)


def test_functions_of_their_own_are_as_many_problems_of_one():
    class Apart(gpt.Softmax):  # y holds two labels, each of a function of its own
        num_latents = 2

        def log_tilted(self, mean, var, y, power=1.0):
            both = jnp.stack([y % 2, y // 2], axis=-1)
            return jnp.sum(gpt.Bernoulli().log_tilted(mean, var, both, power), -1)

    a, b = (noisy > 0).astype(float), (noisy > 0.5).astype(float)
    together = gpt.PowerEP(gpt.GP(KERNEL, Apart(4)), Z, 0.5, tolerance=1e-11)
    apart = [gpt.PowerEP(gpt.GP(KERNEL, gpt.Bernoulli()), Z, 0.5, tolerance=1e-11) for _ in range(2)]
    assert np.isclose(together.objective(X, a + 2 * b), sum(float(one.objective(X, y)) for one, y in zip(apart, (a, b))), rtol=0, atol=1e-8)
    both, each = together.posterior(X, a + 2 * b), [one.posterior(X, y) for one, y in zip(apart, (a, b))]
    assert np.allclose(both.mean(X), np.stack([q.mean(X) for q in each], 1), rtol=0, atol=1e-8)
    assert np.allclose(both.covariance(X), np.stack([q.covariance(X) for q in each]), rtol=0, atol=1e-8)


def test_both_orders_end_at_the_same_sites_with_softmax():
    gp, tight = gpt.GP(KERNEL, gpt.Softmax(3)), dict(tolerance=1e-11)
    first, second = (gpt.PowerEP(gp, Z, 0.5, **tight, sequential=order).fixed_point(X, CLASSES) for order in (False, True))
    assert first.left == second.left == 0 and np.allclose(first.sites.shift, second.sites.shift, rtol=0, atol=1e-8)


# rounds of one's own


def test_minibatches_of_sites_come_to_the_fixed_point():
    y = TARGETS["probit"][1]
    for settings, visits in ((dict(rate=0.5), 90), (dict(sequential=True), 40)):
        approx = make("probit", 0.5, **settings)
        sites, random = start_sites(approx, X, y), np.random.default_rng(0)
        assert not np.any(sites.shift) and sites.shift.shape == (N,)
        for _ in range(visits):
            rows = random.choice(N, 5, replace=False)
            new = visit_sites(approx, sites, X, y, rows)
            others = np.setdiff1d(np.arange(N), rows)
            assert np.array_equal(np.asarray(new.shift)[others], np.asarray(sites.shift)[others])
            sites = new
        found = approx.fixed_point(X, y)
        assert np.allclose(sites.shift, found.sites.shift, atol=1e-4)
        assert np.isclose(energy_at(approx, found.sites, X, y), approx.objective(X, y), rtol=0, atol=1e-10)
        assert np.allclose(posterior_at(approx, found.sites, X).mean(X), approx.posterior(X, y).mean(X), rtol=0, atol=1e-8)
        assert approx.fixed_point(X, y, sites=found.sites).rounds == 0


def contradictions():
    "Measurements of which every eighth is somewhere else, and a model that EP finds no fixed point for."
    inputs = np.linspace(0, 6, 34)[:, None]
    y = np.sin(1.5 * inputs[:, 0]) + 0.2 * np.random.default_rng(2).normal(size=34)
    y[::8] += 4.0
    return inputs, y, gpt.GP(gpt.RBF(0.6), gpt.StudentT(0.03, df=3.0))


def test_a_smaller_power_has_a_fixed_point_where_one_has_none():
    inputs, y, gp = contradictions()
    with pytest.warns(UserWarning, match=r"no fixed point in 100 rounds: \d+ of 34 observations"):
        lost = gpt.PowerEP(gp, None, 1.0, rounds=100).fixed_point(inputs, y)
    assert 0 < lost.left <= 34 and np.isfinite(lost.mean).all() and (np.asarray(lost.var) > 0).all()
    with pytest.raises(eqx.EquinoxRuntimeError, match="smaller power"):
        gpt.PowerEP(gp, None, 1.0, rounds=100).objective(inputs, y)
    found = gpt.PowerEP(gp, None, 0.3, rounds=400, rate=0.5).fixed_point(inputs, y)
    assert found.left == 0 and found.misfit <= 1e-6 and np.asarray(found.sites.precision).min() < 0
    whole = gpt.PowerEP(gp, None, 1.0)                                  # of which it takes out too much
    for call in (lambda: whole.fixed_point(inputs, y, found.sites), lambda: visit_sites(whole, found.sites, inputs, y),
                 lambda: energy_at(whole, found.sites, inputs, y), lambda: posterior_at(whole, found.sites, inputs)):
        with pytest.raises(ValueError, match=r"sites must leave Gaussians: without its own, \d+ of 34 rows have none"):
            call()


@pytest.mark.parametrize("sequential", [False, True])
def test_visits_leave_the_sites_that_would_leave_no_gaussian(sequential):
    inputs, y, gp = contradictions()
    approx = gpt.PowerEP(gp, None, 1.0, rate=0.5, sequential=sequential)
    sites, random, moved = start_sites(approx, inputs, y), np.random.default_rng(0), []
    for _ in range(40):
        rows = random.choice(34, 4, replace=False)
        new = visit_sites(approx, sites, inputs, y, rows)
        moved.append(np.sum(np.asarray(new.shift != sites.shift)[rows]))
        sites = new
    assert 0 in moved and max(moved) == 4
    assert np.isfinite(energy_at(approx, sites, inputs, y)) and np.isfinite(posterior_at(approx, sites, inputs).S_factor).all()


# what users can get wrong


@pytest.mark.parametrize("power", [0, 0.0, -0.5, 1.01, np.nan, np.inf, "half", [0.5, 0.5], True, None])
def test_unusable_powers(power):
    with pytest.raises(ValueError, match="power must be a number above 0 and at most 1.*VGP.*SVGP"):
        gpt.PowerEP(gpt.GP(KERNEL, gpt.Bernoulli()), Z, power)


def test_unusable_arguments():
    gp, y = gpt.GP(KERNEL, gpt.Bernoulli()), TARGETS["probit"][1]
    with pytest.raises(ValueError, match="inducing must be"):
        gpt.PowerEP(gp, X, 0.5)
    with pytest.raises(ValueError, match="must be a gp_thesis GP"):
        gpt.PowerEP(KERNEL, Z)
    approx = gpt.PowerEP(gp, Z, 0.5)
    for call in (approx.objective, approx.posterior, approx.fixed_point, lambda X, y: start_sites(approx, X, y)):
        with pytest.raises(ValueError, match="labels 0 or 1"):
            call(X, noisy)
    for rows in ([N], [-1], [], [0.5], [[1]]):
        with pytest.raises(ValueError, match=f"rows must be numbers from 0 to {N - 1}"):
            visit_sites(approx, start_sites(approx, X, y), X, y, rows)


@pytest.mark.parametrize("alter, message", [
    (lambda s: None, "sites must be Sites, such as those of a fixed_point, got NoneType"),
    (lambda s: tuple(s), "sites must be Sites, .*got tuple"),
    (lambda s: Sites(s.shift[:-1], s.precision[:-1]), rf"must have shape \({N},\), as there are {N} rows, got \({N - 1},\) and"),
    (lambda s: Sites(s.shift, s.precision[0]), rf"must have shape \({N},\), .*got \({N},\) and \(\)"),
    (lambda s: Sites(s.shift, s.precision - 100.0), rf"sites must leave Gaussians: without its own, {N} of {N} rows have none"),
    (lambda s: Sites(s.shift.at[3].set(jnp.nan), s.precision), "sites must leave Gaussians")])
def test_unusable_sites(alter, message):
    approx, y = gpt.PowerEP(gpt.GP(KERNEL, gpt.Bernoulli()), Z, 0.5), TARGETS["probit"][1]
    sites = alter(start_sites(approx, X, y))
    calls = [lambda: visit_sites(approx, sites, X, y), lambda: energy_at(approx, sites, X, y), lambda: posterior_at(approx, sites, X)]
    calls += [] if sites is None else [lambda: approx.fixed_point(X, y, sites=sites)]    # None: it begins with none
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_kernel_for_each_function_is_for_others():
    gp = gpt.GP(gpt.Independent([KERNEL] * 3), gpt.Softmax(3))
    with pytest.raises(ValueError, match="SVGP and ApproximatePowerEP take it as the kernel of their model"):
        gpt.PowerEP(gp, Z, 0.5).objective(X, CLASSES)
    assert np.isfinite(gpt.ApproximatePowerEP(gp, Z, 0.5).objective(X, CLASSES))


def test_settings_of_one_class():
    gp = gpt.GP(KERNEL, gpt.Bernoulli())
    assert isinstance(gpt.EP(gp), gpt.PowerEP) and isinstance(gpt.GFITC(gp, Z, rate=0.5), gpt.PowerEP)
    assert gpt.EP(gp).power is None and gpt.PowerEP(gp, Z, 1).power is None
