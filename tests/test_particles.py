"""States by particles against the Kalman filter, dense grids and quadrature, with slopes and curvatures."""

import csv
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy import stats
from scipy.special import gammaln

import gp_thesis as gpt
from gp_thesis.gpssm import CollapsedGPSSM, Draws, LinearEmission, MarkovStates, posteriors, series
from gp_thesis.parameters import free, lower_triangular, partition, unwrap
from gp_thesis.particles import (
    ApproximatePowerCoupledGPSSM, FreeStates, ParticleGPSSM, by_particles, particle_filter, propose, select, sight)
from gp_thesis.propagation import columns
from gp_thesis.svgp import VariationalGaussian
from test_gpssm import KEY, STILL, SYSTEMS, conditional, kalman, model, nodes, observed, some_q, with_q

Y = np.array([0.3, np.nan, -0.8, 0.4])
GRID = np.linspace(-9, 9, 601)


def bent(measurement=None, emission=None, number=2000, steps=len(Y), variance=0.9, noise=0.4, **more):
    "One state, a function of which something is known, and q(u) that is nobody's best."
    emission = emission or LinearEmission(np.array([[1.2]]), 0.1, measurement or gpt.Gaussian(0.3))
    prior = gpt.Process(gpt.RBF(1.1, variance), gpt.LinearMean(np.array([[0.7]]), 0.2))
    made = gpt.StateSpace(prior, emission, noise, initial_mean=0.5, initial_variance=1.5)
    inducing = gpt.InducingPoints(np.linspace(-2, 2, 4)[:, None])
    return with_q(ParticleGPSSM(made, inducing, steps, number=number, **more), some_q(P=1))


def log_likelihood(approx, g, x, y):
    "log p of one observation at states on the grid, or E log p under q(g)."
    emission = approx.model.emission
    if g is not None:
        mean, var = (a[:, 0] for a in columns(g, x[:, None]))
        noise = emission.likelihood.variance
        return -0.5 * (jnp.log(2 * jnp.pi * noise) + ((y - mean) ** 2 + var) / noise)
    at = emission.weights[0, 0] * x + emission.bias
    if isinstance(emission.likelihood, gpt.Poisson):
        return y * at - jnp.exp(at) - gammaln(y + 1)
    noise = emission.likelihood.variance
    return -0.5 * (jnp.log(2 * jnp.pi * noise) + (y - at) ** 2 / noise)


def by_grid(approx, Y):
    "log Z of the best states, and their marginal densities, with sums over a grid for integrals."
    (f, g), model, h = posteriors(approx), approx.model, GRID[1] - GRID[0]
    normal = lambda e, v: jnp.exp(-0.5 * e**2 / v) / jnp.sqrt(2 * jnp.pi * v)
    x, (Q,) = jnp.asarray(GRID), model.noise
    mean, var = (a[:, 0] for a in columns(f, x[:, None]))
    onward = h * normal(x - mean[:, None], Q) * jnp.exp(-0.5 * var / Q)[:, None]  # from, to
    seen = [jnp.ones_like(x) if np.isnan(y) else jnp.exp(log_likelihood(approx, g, x, y)) for y in Y]
    forward = [normal(x - model.initial_mean, model.initial_variance)]
    for like in seen:
        forward.append((forward[-1] @ onward) * like)
    backward = [jnp.ones_like(x)]
    for like in seen[::-1]:
        backward.append(onward @ (like * backward[-1]))
    Z = h * jnp.sum(forward[-1])
    return jnp.log(Z), jnp.stack(forward) * jnp.stack(backward[::-1]) / Z


def test_the_evidence_of_linear_systems():
    for p in SYSTEMS.values():
        columns_of = len(p["F"]) + p["B"].shape[1]
        points = gpt.InducingPoints(np.random.default_rng(7).normal(size=(4, columns_of)))
        approx = ParticleGPSSM(model(p, STILL), points, len(p["Y"]), p["c"] if p["B"].shape[1] else None, number=3000)
        values = np.array([float(approx.objective(*observed(p), key=key)) for key in jax.random.split(KEY, 6)])
        error = values.std(ddof=1) / len(values) ** 0.5
        assert abs(values.mean() - kalman(p)[0]) < 4 * error + values.var() and error < 0.2


def gp_emission():
    "One output through a process, whose q is not its prior."
    approx = bent(emission=gpt.GP(gpt.RBF(1.5), gpt.Gaussian(0.3)), emission_inducing=gpt.InducingPoints(np.linspace(-2, 2, 4)[:, None]))
    rng = np.random.default_rng(5)
    root = np.tril(0.2 * rng.normal(size=(4, 4)), -1) + np.diag(rng.uniform(0.3, 0.9, 4))
    q = VariationalGaussian(free(rng.normal(size=4)), lower_triangular(root))
    return eqx.tree_at(lambda a: a.emission.q, approx, q)


CASES = {"Gaussian": lambda: (bent(), Y), "counts": lambda: (bent(gpt.Poisson()), np.array([1.0, np.nan, 0.0, 2.0])),
         "through a process": lambda: (gp_emission(), Y)}


@pytest.mark.parametrize("case", CASES)
def test_value_slopes_and_curvature_are_those_of_sums_over_a_grid(case):
    approx, y = CASES[case]()
    flat, back = ravel_pytree(partition(approx)[0])
    whole = lambda v: eqx.combine(back(v), partition(approx)[1])
    kl = lambda a: sum(s.q.kl_from_standard_normal() for s in (a.transition, a.emission) if s is not None)
    direction = jnp.asarray(np.random.default_rng(2).normal(size=len(flat)) / len(flat) ** 0.5)

    def three(function):
        slope = jax.grad(function)
        return jnp.concatenate([function(flat)[None], slope(flat), jax.jvp(slope, (flat,), (direction,))[1] @ direction[:, None]])

    exact = jax.jit(lambda: three(lambda v: by_grid(unwrap(whole(v)), y)[0] - kl(unwrap(whole(v)))))()
    one = lambda key: three(lambda v: type(approx).bound(unwrap(whole(v)), np.arange(1, 5), jnp.asarray(y)[:, None], key))
    found = jax.jit(lambda keys: jax.lax.map(one, keys))(jax.random.split(KEY, 60))
    error = found.std(0) / len(found) ** 0.5
    assert (abs(found.mean(0) - exact) < 4.5 * error + 0.003 * (1 + abs(exact))).all()
    assert error[0] < 0.01 and abs(exact[1:]).max() > 1


def test_states_on_the_way_back():
    sure_below = VariationalGaussian(some_q(P=1).m, np.diag([0.05, 0.05, 1, 1]))  # so that the price of a step differs
    approx = with_q(bent(number=4000, noise=0.15), sure_below)
    _, density = by_grid(unwrap(approx), Y)
    h = GRID[1] - GRID[0]
    assert np.allclose(h * density.sum(1), 1, atol=1e-6)
    x = approx.draw(Y, KEY, 4000)
    assert x.shape == (4000, 5, 1)
    mean = h * density @ GRID
    spread = np.sqrt(h * density @ GRID**2 - mean**2)
    error = spread / 4000**0.5
    assert (abs(x.mean(0)[:, 0] - mean) < 6 * error).all()
    assert np.allclose(x.std(0)[:, 0], spread, rtol=0.06)
    post = approx.posterior(*series(Y))
    assert (abs(post.mean[:, 0] - mean) < 6 * error).all() and np.allclose(post.cov[:, 0, 0], spread**2, rtol=0.12)
    assert post.forecast(2).mean.shape == (2, 1)


def test_what_proposes_and_who_survives():
    at = jnp.asarray([[0.2], [1.0]])
    approx = unwrap(bent())
    seen = jax.tree.map(lambda a: a[0], sight(approx.model, jnp.asarray(Y)[:, None]))
    x, log_q = jax.vmap(lambda key: propose(key, at, jnp.asarray([0.4]), seen))(jax.random.split(KEY, 4000))
    precision = 1 / 0.4 + 1.2**2 / 0.3
    centre = (at[:, 0] / 0.4 + 1.2 * (0.3 - 0.1) / 0.3) / precision
    assert np.allclose(log_q, stats.norm(centre, precision**-0.5).logpdf(x[..., 0]))
    assert np.allclose(x.mean(0)[:, 0], centre, atol=0.03)
    log_w = jnp.log(jnp.asarray([0.1, 0.4, 0.3, 0.2]))
    counts = sum(np.bincount(select(key, log_w), minlength=4) for key in jax.random.split(KEY, 2000))
    assert np.allclose(counts / counts.sum(), jnp.exp(log_w), atol=0.02)
    assert not np.any(sight(unwrap(bent(gpt.Poisson())).model, jnp.asarray(Y)[:, None]).precision)


def test_particles_begin_where_a_chain_ended_and_are_above_it():
    y = np.random.default_rng(4).normal(size=12).cumsum() * 0.5
    made = unwrap(bent()).model
    chain = CollapsedGPSSM(made, gpt.InducingPoints(np.linspace(-2, 2, 5)[:, None]), MarkovStates(np.r_[0, y][:, None], 0.4))
    chain = gpt.fit(chain, series(y), steps=300, progress=False).approx
    freed = by_particles(chain, 3000)
    values = np.array([float(freed.objective(*series(y), key=key)) for key in jax.random.split(KEY, 5)])
    assert values.mean() > float(chain.objective(*series(y))) - 3 * values.std() / 5**0.5
    assert isinstance(freed.states, FreeStates) and freed.through == Draws(3000)
    x = np.linspace(-2, 2, 7)[:, None]
    before, after = chain.posterior().transition, freed.posterior(*series(y)).transition
    assert np.allclose(before.mean(x), after.mean(x)) and np.allclose(before.marginals(x)[1], after.marginals(x)[1])


def own(power, steps=1, number=200_000, variance=0.9):
    prior = bent(variance=variance).model
    states = gpt.PriorStates(np.array([0.3]), steps, 0.6)
    approx = ApproximatePowerCoupledGPSSM(prior, gpt.InducingPoints(np.linspace(-2, 2, 4)[:, None]), states, power, number=number)
    return with_q(approx, some_q(P=1))


def cavity_by_hand(m, S, share):
    "q^(1 - share) p^share, normalised, for a standard normal p: mean, covariance, and Rényi's divergence."
    P = (1 - share) * np.linalg.inv(S) + share * np.eye(len(m))
    mean = np.linalg.solve(P, (1 - share) * np.linalg.solve(S, m))
    partition = lambda m, S: 0.5 * (m @ np.linalg.solve(S, m) + np.linalg.slogdet(S)[1])
    log_integral = partition(mean, np.linalg.inv(P)) - (1 - share) * partition(m, S)
    return mean, np.linalg.inv(P), -log_integral / share


def cavities_by_hand(plain, share):
    "Cavities of u and of x_0, and both divergences together."
    prior, q, s = plain.model, plain.transition.q, plain.states
    unit = prior.initial_variance**0.5
    m, S, renyi = cavity_by_hand(q.m, q.S_factor @ q.S_factor.T, share)
    m0, S0, renyi_0 = cavity_by_hand((s.mean - prior.initial_mean) / unit, (s.root / unit) ** 2, share)
    return (m, S), (prior.initial_mean + unit * m0, unit**2 * S0), renyi + renyi_0


def log_tilted(plain, y, mean, var, power):
    "log ∫ p(y | x)^power N(x | mean, var) dx, where N(y | Ux, R)^power is a Gaussian of variance R / power."
    emission = plain.model.emission
    U, R = emission.weights[0, 0], emission.likelihood.variance
    constant = 0.5 * (1 - power) * np.log(2 * np.pi * R) - 0.5 * np.log(power)
    return stats.norm(U * mean + emission.bias, (U**2 * var + R / power) ** 0.5).logpdf(y) + constant


@pytest.mark.parametrize("power", [0.3, 1.0])
def test_own_steps_by_quadrature(power):
    "One step: p(y)^power averaged over x_0, f and x_1 under cavities, and Rényi's divergences."
    approx = own(power)
    plain = jax.tree.map(np.asarray, unwrap(approx))
    (m, S), (m0, S0), renyi = cavities_by_hand(plain, power)
    e, w = nodes(1)
    x0 = m0 + e * S0[0, 0] ** 0.5
    prior = plain.model.transition
    f, v = (a[:, 0] for a in conditional([prior.kernel], plain.transition.inducing.Z, VariationalGaussian(m, np.linalg.cholesky(S)), x0))
    f = f + (x0 @ prior.mean.weights + prior.mean.bias)[:, 0]
    log_Z = np.log(w @ np.exp(log_tilted(plain, 0.3, f, v + plain.model.noise[0], power)))
    found = float(approx.objective(*series(np.array([0.3])), key=KEY))
    assert abs(found - (log_Z / power - renyi)) < 0.02


@pytest.mark.parametrize("power", [0.3, 1.0])
def test_own_steps_of_a_known_system(power):
    "Where f is known, states of all times are Gaussian; each measurement takes its share from q(u) and q(x_0)."
    approx = own(power, len(Y), variance=STILL)
    plain = jax.tree.map(np.asarray, unwrap(approx))
    _, (mean, var), renyi = cavities_by_hand(plain, power / len(Y))
    model, total = plain.model, -renyi
    A, b = model.transition.mean.weights[0, 0], model.transition.mean.bias
    mean, var = mean[0], var[0, 0]
    for y in Y:
        mean, var = A * mean + b, A**2 * var + model.noise[0]
        total += 0.0 if np.isnan(y) else log_tilted(plain, y, mean, var, power) / power
    assert abs(float(approx.objective(*series(Y), key=KEY)) - total) < 0.02


def test_own_steps_towards_power_zero():
    small = own(1e-7, len(Y), 50)
    bound = with_q(gpt.CoupledGPSSM(small.model, small.transition.inducing, small.states, number=50), some_q(P=1))
    assert np.isclose(small.objective(*series(Y), key=KEY), bound.objective(*series(Y), key=KEY), rtol=1e-5)


def test_single_precision():
    whole = bent(number=500)
    single = gpt.cast(whole, jnp.float32)
    found = float(single.objective(*series(Y.astype(np.float32)), key=KEY))
    values = [float(whole.objective(*series(Y), key=key)) for key in jax.random.split(KEY, 20)]
    assert abs(found - np.mean(values)) < 5 * np.std(values)
    x = single.draw(Y.astype(np.float32), KEY, 50)
    assert x.dtype == jnp.float32 and jnp.isfinite(x).all()


def test_bad_input():
    approx, y = bent(number=10), series(Y)
    with pytest.raises(ValueError, match="key"):
        approx.objective(*y)
    with pytest.raises(ValueError, match="times and Y"):
        approx.posterior()
    with pytest.raises(ValueError, match="num_steps"):
        bent(steps=0)
    with pytest.raises(ValueError, match="number"):
        bent(number=0)
    with pytest.raises(ValueError, match="whole series"):
        approx.objective([1, 2], Y[:2], key=KEY)
    with pytest.raises(ValueError, match="whole series"):
        approx.draw(Y[:2], KEY)
    with pytest.raises(ValueError, match="n must"):
        approx.draw(Y, KEY, 0)
    with pytest.raises(ValueError, match="MarkovStates"):
        by_particles(approx)
    with pytest.raises(ValueError, match="PriorStates"):
        ApproximatePowerCoupledGPSSM(approx.model, approx.transition.inducing, FreeStates(4))
    with pytest.raises(ValueError, match="power"):
        own(1.5)


def test_chapter_62_says_rightly_that_particles_lead_to_higher_ends_of_the_chain():
    "Measurements of variance 0.8, where 62 has an end from the measurements and one from the truth."
    results = Path(__file__).parents[1] / "nbs" / "results"
    with open(results / "B-X1.csv") as file:
        chains = [row for row in csv.DictReader(file) if row["measurement"] == "0.8" and row["method"].startswith("collapsed chain")]
    with open(results / "B-T3.1.csv") as file:
        again = {row["series"]: row for row in csv.DictReader(file) if row["measurement"] == "0.8"}
    ends = {series: [float(row["objective"]) for row in chains if row["series"] == series] for series in again}
    assert all(len(of_series) == 2 for of_series in ends.values())
    higher = [row for series, row in again.items() if float(row["chain again"]) > max(ends[series]) + 1]
    assert len(higher) >= 2 and all(float(row["noise, chain again"]) < 0.1 for row in higher)
