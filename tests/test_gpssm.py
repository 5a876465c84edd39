"""State space models against the Kalman filter and smoother, ours and dynamax's, dense
Gaussians, quadrature, natural parameters and limits.

Compiling costs more than computing here: most tests share the shapes of one system,
whose kernel variance makes it linear or not. dynamax's numbers are
benchmarks/results/kalman.json, made by benchmarks/with_dynamax.py."""
import json
from itertools import product

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.polynomial.hermite_e import hermegauss
from numpyro import distributions
from scipy import stats
from scipy.special import gammaln, ndtr

import gp_thesis as gpt
from conftest import TOP
from gp_thesis.gpssm import (
    ApproximatePowerGPSSM, CollapsedGPSSM, CoupledGPSSM, CoupledStates, Draws,
    FactorisedStates, GPSSM, LinearEmission, MarkovStates, PowerChainGPSSM, PowerGPSSM,
    PriorStates, StateSpace, best_q, coupled, emission_sites, emitted_terms, initial_means, posteriors, priors,
    series, state_cavities, step_terms, trajectories, with_u_drawn)
from gp_thesis.parameters import free, log_prior, lower_triangular, partition, unwrap
from gp_thesis.propagation import linear, match, unscented
from gp_thesis.svgp import VariationalGaussian

RECORD = json.loads((TOP / "benchmarks" / "results" / "kalman.json").read_text())
SYSTEMS = {name: {key: value if key == "dynamax" else np.asarray(value)
                  for key, value in p.items()}
           for name, p in RECORD["systems"].items()}
STILL = 1e-13  # a kernel variance that leaves the mean of the transition
KEY = jax.random.key(0)
usual, gappy, single = (SYSTEMS[name] for name in (
    "two states, controls", "two states, gaps", "one state"))
T, D = len(usual["Y"]), 2


def points(p):
    columns = len(p["F"]) + p["B"].shape[1]
    return gpt.InducingPoints(np.random.default_rng(7).normal(size=(4, columns)))


def model(p, variance=0.8, emission=None, kernel=None, num_outputs=None):
    kernel = kernel or gpt.RBF(np.full(len(p["F"]) + p["B"].shape[1], 1.3), variance)
    mean = gpt.LinearMean(np.vstack([p["F"].T, p["B"].T]), p["b"])
    emission = emission or LinearEmission(p["U"], p["d"], gpt.Gaussian(p["R"]))
    return StateSpace(gpt.Process(kernel, mean), emission, p["Q"], len(p["F"]), p["m0"],
                      p["S0"], num_outputs)


def observed(p):
    return series(np.where(p["seen"], p["Y"], np.nan))


def kalman(p):
    """Log likelihood, means and covariances of x_0 to x_T given all, and
    cov(x_t, x_{t-1}), by plain filter and smoother."""
    F, Q, R = p["F"], np.diag(p["Q"]), np.diag(p["R"])
    m, V, total, ahead = p["m0"], np.diag(p["S0"]), 0.0, []
    filtered = [(m, V)]
    for c, y, seen in zip(p["c"], p["Y"], p["seen"]):
        m, V = F @ m + p["B"] @ c + p["b"], F @ V @ F.T + Q
        ahead.append((m, V))
        if seen.any():
            h, e = p["U"][seen], y[seen] - p["U"][seen] @ m - p["d"][seen]
            S = h @ V @ h.T + R[np.ix_(seen, seen)]
            total += stats.multivariate_normal(cov=S).logpdf(e)
            gain = V @ h.T @ np.linalg.inv(S)
            m, V = m + gain @ e, V - gain @ S @ gain.T
        filtered.append((m, V))
    smooth, back = [filtered[-1]], []
    for (m, V), (ma, Va) in zip(filtered[-2::-1], ahead[::-1]):
        J, (ms, Vs) = V @ F.T @ np.linalg.inv(Va), smooth[0]
        back.insert(0, Vs @ J.T)
        smooth.insert(0, (m + J @ (ms - ma), V + J @ (Vs - Va) @ J.T))
    means, covs = map(np.array, zip(*smooth))
    return total, means, covs, np.array(back)


def dense_log_likelihood(p):
    "From one Gaussian of all observations."
    n, T = len(p["F"]), len(p["Y"])
    mean, root = [p["m0"]], [np.pad(np.diag(np.sqrt(p["S0"])), ((0, 0), (0, n * T)))]
    for t, c in enumerate(p["c"], 1):
        mean.append(p["F"] @ mean[-1] + p["B"] @ c + p["b"])
        root.append(p["F"] @ root[-1])
        root[-1][:, n * t:n * (t + 1)] += np.diag(np.sqrt(p["Q"]))
    rows = np.vstack([p["U"] @ now for now in root[1:]])
    cov = rows @ rows.T + np.diag(np.tile(p["R"], T))
    e, seen = (p["Y"] - mean[1:] @ p["U"].T - p["d"]).ravel(), p["seen"].ravel()
    return stats.multivariate_normal(cov=cov[np.ix_(seen, seen)]).logpdf(e[seen])


def states_of(mean, root, coupling=None):
    "Factorised states, or Markov ones, with these parameters."
    made = (FactorisedStates if coupling is None else MarkovStates)(mean)
    made = eqx.tree_at(lambda s: s.root, made, lower_triangular(root))
    if coupling is None:
        return made
    return eqx.tree_at(lambda s: s.coupling, made, free(coupling))


def smoothed_states(p):
    _, m, V, back = kalman(p)
    R = np.linalg.cholesky(V)
    C = np.array([np.linalg.solve(R2, np.linalg.solve(R1, B.T).T)
                  for R1, R2, B in zip(R, R[1:], back)])
    left = np.linalg.cholesky(np.eye(R.shape[1]) - C @ C.swapaxes(1, 2))
    return states_of(m, R, np.linalg.solve(left, C))


def some_states(markov=True, p=usual):
    random, shape = np.random.default_rng(11), (len(p["Y"]) + 1, len(p["F"]))
    root = np.tril(0.2 * random.normal(size=(*shape, shape[1])), -1)
    root = root + 0.4 * np.eye(shape[1])
    coupling = 0.7 * random.normal(size=(shape[0] - 1, shape[1], shape[1]))
    mean = kalman(p)[1] + 0.3 * random.normal(size=shape)
    return states_of(mean, root, coupling if markov else None)


def movable(q):
    return VariationalGaussian(free(q.m), lower_triangular(q.S_factor))


def with_q(approx, q):
    where = lambda a: a.transition.q
    return eqx.tree_at(where, approx, movable(q), is_leaf=lambda x: x is None)


def some_q(M=4, P=D):
    random = np.random.default_rng(13)
    m, R = 0.3 * random.normal(size=(M, P)), 0.2 * random.normal(size=(P, M, M))
    R = np.tril(R, -1) + 0.6 * np.eye(M)
    return VariationalGaussian(m, R) if P > 1 else VariationalGaussian(m[:, 0], R[0])


def learned(kind=GPSSM, markov=True, p=usual, **settings):
    "An approximation of the system as an unknown one, q(u) and q(x) anywhere."
    states = some_states(markov, p)
    approx = kind(model(p), points(p), states, controls=p["c"], **settings)
    if approx.transition.q is None:
        return approx
    return with_q(approx, some_q(P=len(p["F"])))


def nodes(D, points=40):
    "Nodes (Q, D) and masses (Q,) for N(0, I)."
    x, w = hermegauss(points)
    masses = [np.prod(c) for c in product(w / w.sum(), repeat=D)]
    return np.array(list(product(x, repeat=D))), np.array(masses)


def rbf(kernel, a, b):
    apart = np.sum(((a[:, None] - b) / kernel.lengthscale) ** 2, axis=2)
    return kernel.variance * np.exp(-0.5 * apart)


def conditional(kernels, Z, q, X):
    """Means and variances of functions at X under q, less the prior mean, by NumPy;
    K_uu is lifted as the package says."""
    M, means, variances = len(Z), [], []
    roots = q.S_factor.reshape(-1, M, M)
    for kernel, m, R in zip(kernels, q.m.reshape(M, -1).T, roots):
        K = rbf(kernel, Z, Z)
        lift = np.diag(K) * (1e-8 + M * np.finfo(float).eps)
        A = np.linalg.solve(np.linalg.cholesky(K + np.diag(lift)), rbf(kernel, Z, X))
        left = kernel.variance - np.sum(A**2, axis=0)
        means.append(A.T @ m)
        variances.append(left + np.sum((R.T @ A) ** 2, axis=0))
    return np.array(means).T, np.array(variances).T


def pairs_by_hand(states, t):
    "Of x_{t-1} = m + R e and x_t = m2 + G e + H h: m, R, m2, G, H Hᵀ."
    (m, m2), (R, R2) = states.mean[t - 1:t + 1], states.root[t - 1:t + 1]
    A = getattr(states, "coupling", np.zeros((t, *R.shape)))[t - 1]
    L = np.linalg.cholesky(np.eye(len(m)) + A @ A.T)
    H = R2 @ np.linalg.inv(L)
    return m, R, m2, H @ A, H @ H.T


def residual_at_nodes(approx, states, q, t):
    """Given nodes of x_{t-1}, mean (Q, D) and variances (Q, D, D) of
    x_t - f(x_{t-1}), and their masses, by NumPy."""
    (m, R, m2, G, HH), (e, w) = pairs_by_hand(states, t), nodes(states.mean.shape[1])
    X = np.hstack([m + e @ R.T, np.tile(approx.controls[t - 1], (len(e), 1))])
    kernel, mean = approx.model.transition.kernel, approx.model.transition.mean
    kernels = getattr(kernel, "kernels", [kernel] * len(m))
    f, v = conditional(kernels, approx.transition.inducing.Z, q, X)
    residual = m2 + e @ G.T - f - X @ mean.weights - mean.bias
    return residual, HH + v[:, :, None] * np.eye(len(m)), w


def gaussian_moments(approx, states, q, t):
    e, S, w = residual_at_nodes(approx, states, q, t)
    mean = w @ e
    square = np.einsum("q,qd,qe->de", w, e, e) + np.tensordot(w, S, 1)
    return mean, square - np.outer(mean, mean)


def entropy_by_hand(states):
    """From the covariance of x_0 to x_T together, which the regressions of each on the
    last make."""
    rows, D = len(states.mean), states.mean.shape[1]
    root = [np.hstack([states.root[0], np.zeros((D, (rows - 1) * D))])]
    for t in range(1, rows):
        _, R, _, G, HH = pairs_by_hand(states, t)
        row = G @ np.linalg.solve(R, root[-1])
        row[:, t * D:(t + 1) * D] = np.linalg.cholesky(HH)
        root.append(row)
    root = np.vstack(root)
    joint = root @ root.T
    return 0.5 * np.linalg.slogdet(2 * np.pi * np.e * joint)[1], joint


def start_by_hand(model, states):
    V = np.diag(states.root[0] @ states.root[0].T)
    prior = stats.norm(model.initial_mean, np.sqrt(model.initial_variance))
    return np.sum(prior.logpdf(states.mean[0]) - 0.5 * V / model.initial_variance)


def step_by_hand(approx, states, q, t):
    (e, S, w), noise = residual_at_nodes(approx, states, q, t), approx.model.noise
    square = e**2 + np.diagonal(S, axis1=1, axis2=2)
    return -0.5 * np.sum(np.log(2 * np.pi * noise) + w @ square / noise)


def emitted_by_hand(approx, states, Y, t):
    emission, y = approx.model.emission, Y[t - 1]
    U, R = emission.weights, np.broadcast_to(emission.likelihood.variance, y.shape)
    mean, root = U @ states.mean[t] + emission.bias, U @ states.root[t]
    spread = np.sum(root**2, axis=1)
    terms = stats.norm(mean, np.sqrt(R)).logpdf(y) - 0.5 * spread / R
    return np.sum(terms[~np.isnan(y)])


def kl_by_hand(q):
    diagonal = np.diagonal(q.S_factor, axis1=-2, axis2=-1)
    square = np.sum(q.m**2) + np.sum(q.S_factor**2) - q.m.size
    return 0.5 * square - np.sum(np.log(diagonal))


# 1. Linear systems

@pytest.mark.parametrize("name", SYSTEMS)
def test_dynamax(name):
    "It adds 1e-9 to what it factorises."
    p, theirs = SYSTEMS[name], SYSTEMS[name]["dynamax"]
    log_likelihood, m, V, _ = kalman(p)
    assert np.isclose(log_likelihood, theirs["log_likelihood"], rtol=0, atol=1e-7)
    assert np.isclose(log_likelihood, dense_log_likelihood(p), rtol=0, atol=1e-10)
    assert np.allclose(m, theirs["mean"], atol=1e-7)
    assert np.allclose(V, theirs["cov"], atol=1e-7)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_linear_system_is_solved_exactly(name):
    p, theirs = SYSTEMS[name], SYSTEMS[name]["dynamax"]
    log_likelihood, m, V, _ = kalman(p)
    for kind in (GPSSM, CollapsedGPSSM):
        approx = kind(model(p, STILL), points(p), smoothed_states(p), controls=p["c"])
        bound = approx.objective(*observed(p))
        assert np.isclose(bound, log_likelihood, rtol=0, atol=1e-9)
        assert np.isclose(bound, theirs["log_likelihood"], rtol=0, atol=1e-6)
    post = approx.posterior()
    assert np.allclose(post.mean, m, atol=1e-9) and np.allclose(post.cov, V, atol=1e-9)
    seen = post.predict_y(np.arange(1, T + 1))[0]
    assert np.allclose(seen, m[1:] @ p["U"].T + p["d"])


def moved(tree, size, where=lambda tree: tree, seed=3):
    "The same with what is free in a part of it moved along a random direction."
    moving, rest = partition(where(tree))
    random = np.random.default_rng(seed)
    part = jax.tree.map(lambda a: a + size * random.normal(size=a.shape), moving)
    return eqx.tree_at(where, tree, eqx.combine(part, rest))


def test_the_smoother_is_the_best_of_markov_states():
    p, data, best = usual, series(usual["Y"]), kalman(usual)[0]
    approx = GPSSM(model(p, STILL), points(p), smoothed_states(p), controls=p["c"])
    at = lambda size, seed=3: moved(
        approx, size, lambda a: a.states, seed).objective(*data) - best
    for seed in range(5):
        up, down = at(1e-4, seed), at(-1e-4, seed)
        assert abs(up - down) / 2e-4 < 1e-3
        assert -1e-2 < min(up, down) < max(up, down) < -1e-7
    assert at(1.0) < -1


@pytest.mark.parametrize("through", [linear, unscented])
def test_other_expectations_are_the_same_in_a_linear_system(through):
    p = single
    states = smoothed_states(p)
    approx = GPSSM(model(p, STILL), points(p), states, through=through)
    assert np.isclose(approx.objective(*observed(p)), kalman(p)[0], rtol=0, atol=1e-9)


# 2. The bound, by quadrature

SEPARATE = gpt.Independent(
    [gpt.RBF(1.3, 0.8), gpt.RBF(np.array([0.9, 1.4, 2.0]), 1.2)])


@pytest.mark.parametrize("p, markov, separate", [
    (usual, True, False), (single, False, False), (gappy, True, True)],
    ids=["Markov", "factorised", "two kernels"])
def test_the_bound_by_quadrature(p, markov, separate):
    approx = learned(markov=markov, p=p)
    if separate:
        process = gpt.Process(SEPARATE, approx.model.transition.mean)
        approx = eqx.tree_at(lambda a: a.model.transition, approx, process)
    times, Y = observed(p)
    plain = jax.tree.map(np.asarray, unwrap(approx))
    states, q = plain.states, plain.transition.q
    by_hand = sum(step_by_hand(plain, states, q, t)
                  + emitted_by_hand(plain, states, Y, t) for t in times)
    by_hand += entropy_by_hand(states)[0] + start_by_hand(plain.model, states)
    value = approx.objective(times, Y)
    assert np.isclose(value, by_hand - kl_by_hand(q), rtol=1e-9)


def test_pairs_and_entropy_of_markov_states_are_those_of_one_gaussian():
    states, times = unwrap(some_states()), jnp.arange(1, T + 1)
    by_hand, joint = entropy_by_hand(jax.tree.map(np.asarray, states))
    found = eqx.filter_jit(lambda s: (s.entropy(), s.pairs(times)))(states)
    entropy, pairs = jax.tree.map(np.asarray, found)
    assert np.isclose(entropy, by_hand, rtol=1e-12)
    square = lambda a: a @ a.swapaxes(1, 2)
    blocks = joint.reshape(T + 1, D, T + 1, D).swapaxes(1, 2)
    each, before = np.arange(1, T + 1), np.arange(T)
    assert np.allclose(blocks[each, each], square(np.asarray(states.root)[1:]))
    onward = pairs.link @ pairs.root.swapaxes(1, 2)
    assert np.allclose(blocks[each, before], onward)
    assert np.allclose(blocks[each, each], square(pairs.link) + square(pairs.rest))


# 3. Collapsed

def uncollapsed(collapsed, q=None):
    q = eqx.filter_jit(best_q)(unwrap(collapsed)) if q is None else q
    parts = collapsed.model, collapsed.transition.inducing, collapsed.states
    return with_q(GPSSM(*parts, controls=collapsed.controls.tree), q)


def test_collapsed_is_the_best_of_all_q_and_touches_its_bound():
    data, collapsed = series(usual["Y"]), learned(CollapsedGPSSM)
    value, at_best = collapsed.objective(*data), uncollapsed(collapsed)
    assert np.isclose(value, at_best.objective(*data), rtol=1e-9)
    for seed in range(4):
        # The same slopes in all parameters: what is between them is of second order.
        each = [value - moved(at_best, size, lambda a: a.transition.q, seed)
                .objective(*data) for size in (0.01, 0.1)]
        assert 0 < each[0] and 30 < each[1] / each[0] < 300
        gaps = []
        for size in (1e-3, 4e-3):
            where = lambda a: (a.model, a.transition.inducing, a.states)
            there = moved(collapsed, size, where, seed)
            below = uncollapsed(there, unwrap(at_best.transition.q))
            gaps.append(there.objective(*data) - below.objective(*data))
        assert 0 < gaps[0] and 12 < gaps[1] / gaps[0] < 20


def test_collapsed_with_a_kernel_for_each_state():
    p, data = gappy, observed(gappy)
    collapsed = CollapsedGPSSM(model(p, kernel=SEPARATE), points(p),
                               some_states(True, p), controls=p["c"])
    best = uncollapsed(collapsed).objective(*data)
    assert np.isclose(collapsed.objective(*data), best, rtol=1e-9)


# 4. Tied powers

def log_integral(precision, shift):
    "log ∫ exp(shiftᵀ x - ½ xᵀ precision x)."
    log_det = np.linalg.slogdet(precision / (2 * np.pi))[1]
    return 0.5 * (shift @ np.linalg.solve(precision, shift) - log_det)


def natural(m, R):
    precision = np.linalg.inv(R @ R.T)
    return precision, precision @ m


def log_tilted(mean, cov, noise, power):
    "log E N(e | 0, diag noise)^power, (3.55)."
    constants = np.log(2 * np.pi * noise / power) - power * np.log(2 * np.pi * noise)
    widened = stats.multivariate_normal(mean, cov + np.diag(noise / power))
    return 0.5 * np.sum(constants) + widened.logpdf(np.zeros(len(noise)))


def energy_by_hand(approx, Y, power):
    """(3.79) with T equal factors of u, and equal factors of each state, from natural
    parameters: log integrals of q, p and cavities."""
    plain = jax.tree.map(np.asarray, unwrap(approx))
    q, states, model, T = plain.transition.q, plain.states, plain.model, len(Y)
    energy, M, D = 0.0, len(q.m), states.mean.shape[1]
    rest, cavities = ([], []), ([], [])

    def without(all_of_it, prior, factors, moments):
        nonlocal energy
        (P, h), (P0, h0) = all_of_it, prior
        cavity = P - power / factors * (P - P0), h - power / factors * (h - h0)
        gain = log_integral(*cavity) - log_integral(P, h)
        energy += log_integral(P, h) + factors / power * gain
        moments[0].append(np.linalg.solve(*cavity))
        moments[1].append(np.linalg.cholesky(np.linalg.inv(cavity[0])))

    for m, R in zip(q.m.reshape(M, -1).T, q.S_factor.reshape(-1, M, M)):
        prior = np.eye(M), np.zeros(M)
        without(natural(m, R), prior, T, rest)
        energy -= log_integral(*prior)
    start = natural(model.initial_mean, np.diag(np.sqrt(model.initial_variance)))
    nothing = np.zeros((D, D)), np.zeros(D)
    for t, (m, R) in enumerate(zip(states.mean, states.root)):
        touched = 1 if t == 0 else 2 if t == T else 3
        without(natural(m, R), nothing if t else start, touched, cavities)
    energy -= log_integral(*start)
    q = VariationalGaussian(np.array(rest[0]).T, np.array(rest[1]))
    both = tuple(map(np.array, cavities))
    states = eqx.tree_at(lambda s: (s.mean, s.root), states, both)
    U, bias = model.emission.weights, model.emission.bias
    for t, y in enumerate(Y, 1):
        seen, root = ~np.isnan(y), U @ states.root[t]
        mean, V = U @ states.mean[t] + bias - y, root @ root.T
        noise = np.broadcast_to(model.emission.likelihood.variance, y.shape)[seen]
        step = gaussian_moments(plain, states, q, t)
        energy += log_tilted(*step, model.noise, power) / power
        if seen.any():
            found = log_tilted(mean[seen], V[np.ix_(seen, seen)], noise, power)
            energy += found / power
    return energy


@pytest.mark.parametrize("p, power", [(usual, 0.3), (usual, 0.9), (gappy, 1.0)],
                         ids=["0.3", "0.9", "1, gaps"])
def test_the_energy_of_tied_factors_in_natural_parameters(p, power):
    times, Y = observed(p)
    approx = learned(ApproximatePowerGPSSM, markov=False, p=p, power=power)
    by_hand = energy_by_hand(approx, Y, power)
    assert np.isclose(approx.objective(times, Y), by_hand, rtol=1e-9)


def to_power_zero(energy, steps):
    "The limit, by Richardson's extrapolation."
    at = [energy(power) for power in 0.004 * 0.5 ** np.arange(steps)]
    for order in range(1, steps):
        at = [b + (b - a) / (2**order - 1) for a, b in zip(at, at[1:])]
    return at[0]


def test_tied_powers_towards_zero_are_the_bound():
    data = series(usual["Y"])
    bound = learned(markov=False).objective(*data)
    energy = lambda power: learned(
        ApproximatePowerGPSSM, markov=False, power=power).objective(*data)
    assert np.isclose(energy(1e-4), bound, rtol=1e-3)
    assert np.isclose(to_power_zero(energy, 5), bound, rtol=0, atol=1e-6)


def test_cavities_of_states_have_the_share_of_a_factor_less():
    whole, states = unwrap(model(usual)), unwrap(some_states(False))
    found, _ = eqx.filter_jit(state_cavities)(whole, states, 0.6)
    mean, root = np.asarray(found.mean), np.asarray(found.root)
    start = np.diag(1 / usual["S0"]), usual["m0"] / usual["S0"]
    for t in range(T + 1):
        P, h = natural(np.asarray(states.mean[t]), np.asarray(states.root[t]))
        P0, h0 = (0, 0) if t else start
        share = 0.6 / (1 if t == 0 else 2 if t == T else 3)
        precision = P - share * (P - P0)
        assert np.allclose(root[t] @ root[t].T @ precision, np.eye(D))
        assert np.allclose(precision @ mean[t], h - share * (h - h0))
    assert np.allclose(np.triu(root, 1), 0)


# 5. Power EP

def settled(approx, Y, sites):
    if isinstance(sites, FactorisedStates):
        sites = eqx.filter_jit(type(approx).start)(approx, jnp.asarray(Y), sites)
    sites, left = approx.rounds(Y, sites, 400, 0.5)
    assert left == 0
    return sites


def states_of_sites(approx, Y, sites):
    "MarkovStates of a chain of sites, from the dense Gaussian of all states."
    (p_u, start), (T, D) = priors(unwrap(approx)), (len(Y), len(unwrap(approx.model.noise)))
    seen, _ = emission_sites(unwrap(approx.model), jnp.asarray(Y))
    precision, shift = np.zeros(((T + 1) * D,) * 2), np.zeros((T + 1) * D)
    precision[:D, :D] += start.precision
    shift[:D] += start.shift
    for t in range(T):
        both, last = slice(t * D, (t + 2) * D), slice((t + 1) * D, (t + 2) * D)
        precision[both, both] += sites.pair.precision[t]
        shift[both] += sites.pair.shift[t]
        precision[last, last] += seen.precision[t]
        shift[last] += seen.shift[t]
    cov = np.linalg.inv(precision)
    parts = [slice(t * D, (t + 1) * D) for t in range(T + 1)]
    R = np.array([np.linalg.cholesky(cov[part, part]) for part in parts])
    C = np.array([np.linalg.solve(R2, np.linalg.solve(R1, cov[b, a].T).T)
                  for R1, R2, a, b in zip(R, R[1:], parts, parts[1:])])
    left = np.linalg.cholesky(np.eye(D) - C @ C.swapaxes(1, 2))
    return states_of((cov @ shift).reshape(T + 1, D), R, np.linalg.solve(left, C))


def slope_in_sites(approx, Y, sites, seed):
    random = np.random.default_rng(seed)

    def direction(a):
        step = random.normal(size=a.shape)
        square = a.shape[-1:] == a.shape[-2:-1]
        return step + np.swapaxes(step, -1, -2) if square else step

    step = jax.tree.map(direction, sites)
    along = lambda size: approx.energy(
        Y, jax.tree.map(lambda a, b: a + size * b, sites, step))
    return (along(1e-5) - along(-1e-5)) / 2e-5


def near_the_smoother(p, kind=PowerGPSSM):
    _, m, V, _ = kalman(p)
    if kind is PowerChainGPSSM:
        return smoothed_states(p)
    return states_of(m, np.linalg.cholesky(V))


KINDS = [PowerGPSSM, PowerChainGPSSM]


@pytest.mark.parametrize("kind, power", [
    (PowerGPSSM, 1.0), (PowerChainGPSSM, 1.0), (PowerChainGPSSM, 0.4)])
def test_power_ep_is_exact_in_a_linear_system(kind, power):
    p, Y, (log_likelihood, m, V, _) = usual, usual["Y"], kalman(usual)
    approx = kind(model(p, STILL), points(p), T, power, p["c"])
    sites = settled(approx, Y, some_states(kind is PowerChainGPSSM))
    assert np.isclose(approx.energy(Y, sites), log_likelihood, rtol=0, atol=1e-9)
    post = approx.posterior(Y, sites)
    assert np.allclose(post.mean, m, atol=1e-9) and np.allclose(post.cov, V, atol=1e-9)


def test_sites_of_a_chain_begin_with_its_posterior():
    p, Y, states = usual, usual["Y"], some_states(True)
    approx = PowerChainGPSSM(model(p), points(p), T, 0.5, p["c"])
    q = VariationalGaussian(free(np.ones((4, 2))), lower_triangular(
        np.tril(0.3 * np.ones((2, 4, 4))) + np.eye(4)))
    post = approx.posterior(Y, approx.start(Y, states, q))
    root = unwrap(states).root
    assert np.allclose(post.mean, unwrap(states).mean, rtol=0, atol=1e-10)
    assert np.allclose(post.cov, root @ np.swapaxes(root, 1, 2), rtol=0, atol=1e-10)
    assert np.allclose(post.transition.m, 1, rtol=0, atol=1e-10)
    S = unwrap(q).S_factor @ np.swapaxes(unwrap(q).S_factor, 1, 2)
    found = post.transition.S_factor @ np.swapaxes(post.transition.S_factor, 1, 2)
    assert np.allclose(found, S, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_power_ep_is_stationary_where_it_settles(kind):
    p, Y = usual, usual["Y"]
    approx = kind(model(p), points(p), T, 1.0, p["c"])
    sites = settled(approx, Y, near_the_smoother(p, kind))
    slopes = [slope_in_sites(approx, Y, sites, seed) for seed in range(4)]
    away = jax.tree.map(lambda a: 1.01 * a, sites)
    assert np.max(np.abs(slopes)) < 1e-5
    steep = 1e-2 if kind is PowerGPSSM else 3e-4  # what pairs share is flat along them
    assert steep < abs(slope_in_sites(approx, Y, away, 0))
    # The energy's slope with sites held still is that of the settled one.
    others = [moved(approx, size, lambda a: a.model.noise) for size in (1e-4, -1e-4)]
    again = [other.energy(Y, settled(other, Y, sites)) for other in others]
    held = [other.energy(Y, sites) for other in others]
    assert abs(held[0] - held[1]) > 1e-5
    assert np.isclose(held[0] - held[1], again[0] - again[1], rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_power_ep_towards_zero_is_stationary_for_the_bound(kind):
    p, power = usual | dict(R=np.full(3, 0.02), Q=np.full(2, 0.3)), 1e-3
    Y, data, parts = p["Y"], series(p["Y"]), (model(p), points(p))
    approx = kind(*parts, T, power, p["c"])
    sites = settled(approx, Y, near_the_smoother(p, kind))
    post = approx.posterior(Y, sites)
    states = states_of(np.asarray(post.mean), np.linalg.cholesky(post.cov))
    if kind is PowerChainGPSSM:
        states = states_of_sites(approx, Y, sites)
    q = jax.tree.map(np.asarray, (post.transition.m, post.transition.S_factor))
    bound = with_q(GPSSM(*parts, states, p["c"]), VariationalGaussian(*q))
    best = bound.objective(*data)
    assert np.isclose(approx.energy(Y, sites), best, rtol=0, atol=40 * power)
    for part, seed in product((lambda a: a.states, lambda a: a.transition.q), range(3)):
        at = lambda size: moved(bound, size, part, seed).objective(*data)
        assert abs(at(1e-4) - at(-1e-4)) / 2e-4 < 40 * power
        assert at(0.1) < best - 0.05


# 6. Draws

def test_draws_agree_with_moment_matching_in_the_bound():
    data = series(usual["Y"])
    exact, drawn = learned().objective(*data), learned(through=Draws(2000))
    found = [drawn.objective(*data, key=key) for key in jax.random.split(KEY, 20)]
    error = np.std(found) / 20**0.5
    assert abs(np.mean(found) - exact) < 4 * error and error < 0.1


@eqx.filter_jit
def terms_at_known_states(approx, times, Y):
    f, g = posteriors(approx)
    emission, noise = approx.model.emission, approx.model.noise
    states = eqx.tree_at(lambda s: s.root, approx.states, 1e-9 * approx.states.root)
    ways = [(through, 0.5) for through in (match, linear, Draws(2))]
    step = lambda way: step_terms(
        f, noise, states.pairs(times), approx.controls[times - 1], *way, KEY)
    emitted = lambda way: emitted_terms(
        emission, g, *states.marginals(times), Y, *way, KEY)
    return list(map(step, ways)), list(map(emitted, ways))


def test_ways_to_take_expectations_agree_at_known_states():
    approx, data = with_emission(gpt.Gaussian(0.3), 1), series(single["Y"])
    for terms in terms_at_known_states(unwrap(approx), *map(jnp.asarray, data)):
        assert all(np.allclose(each, terms[0], atol=1e-6) for each in terms)


# 7. States that depend on the function

def exact_conditionals(p):
    "x_t given x_{t-1} and all of y, as N(A f(x_{t-1}) + b, R Rᵀ)."
    _, m, V, back = kalman(p)
    B = back @ np.linalg.inv(V[:-1])
    gain, known = B @ np.linalg.inv(p["F"]), p["c"] @ p["B"].T + p["b"]
    of = lambda A, x: np.einsum("tij,tj->ti", A, x)
    made = {"mean": free(m[0]), "root": lower_triangular(np.linalg.cholesky(V[0])),
            "gain": free(gain), "offset": free(m[1:] - of(B, m[:-1]) - of(gain, known)),
            "spread": lower_triangular(
                np.linalg.cholesky(V[1:] - B @ back.swapaxes(1, 2)))}
    where = lambda s: [getattr(s, name) for name in made]
    return eqx.tree_at(where, CoupledStates(m), list(made.values()))


def test_coupled_states_are_exact_in_a_linear_system():
    p, data, states = usual, series(usual["Y"]), exact_conditionals(usual)
    approx = CoupledGPSSM(model(p, STILL), points(p), states, p["c"], number=300)
    values = [approx.objective(*data, key=key) for key in jax.random.split(KEY, 20)]
    error = np.std(values) / 20**0.5
    assert abs(np.mean(values) - kalman(p)[0]) < 4 * error and error < 0.05


def test_coupled_states_begin_as_a_chain():
    "By hand in a linear system, whose function has the slope F everywhere."
    p, states = usual, some_states(True)
    chain = GPSSM(model(p, STILL), points(p), states, p["c"])
    begun = unwrap(coupled(chain, 7))
    pairs, F = unwrap(states).pairs(jnp.arange(1, T + 1)), p["F"]
    for t, (m, R, m2, G, H) in enumerate(zip(*pairs)):
        W, V = G @ np.linalg.inv(R), R @ R.T
        A = W @ V @ F.T @ np.linalg.inv(F @ V @ F.T + np.diag(p["Q"]))
        f = F @ m + p["B"] @ p["c"][t] + p["b"]
        S = H @ H.T + (W - A @ F) @ V @ (W - A @ F).T
        root = begun.states.spread[t]
        assert np.allclose(begun.states.gain[t], A, rtol=0, atol=1e-9)
        assert np.allclose(begun.states.offset[t], m2 - A @ f, rtol=0, atol=1e-6)
        assert np.allclose(root @ root.T, S, rtol=0, atol=1e-9)
    assert np.allclose(begun.states.root, unwrap(states).root[0])
    assert np.allclose(begun.states.mean, unwrap(states).mean[0])
    assert begun.through == Draws(7) and np.allclose(begun.controls, p["c"])


def test_coupled_states_begin_with_the_best_q():
    p = usual
    collapsed = CollapsedGPSSM(model(p), points(p), some_states(True), p["c"])
    q = eqx.filter_jit(best_q)(unwrap(collapsed))
    begun = unwrap(coupled(collapsed)).transition.q
    assert np.allclose(begun.m, q.m) and np.allclose(begun.S_factor, q.S_factor)


def test_the_bound_of_coupled_states_is_unbiased():
    "One step from x_0: all but x_0 and u is known in closed form."
    p = single | {name: single[name][:1] for name in ("Y", "c", "seen")}
    made = CoupledStates(np.array([[0.4], [0.1]]), 0.7, 0.5)
    approx = with_q(CoupledGPSSM(model(p), points(p), made, number=40), some_q(P=1))
    plain = jax.tree.map(np.asarray, unwrap(approx))
    s, q, noise, (e, w) = plain.states, plain.transition.q, p["Q"], nodes(1)
    x, process = s.mean + e @ s.root.T, plain.model.transition
    found = conditional([process.kernel], plain.transition.inducing.Z, q, x)
    f, v = (a[:, 0] for a in found)
    f = f + (x @ process.mean.weights + process.mean.bias)[:, 0]
    A, b, R = s.gain[0, 0, 0], s.offset[0, 0], s.spread[0, 0, 0]
    apart, ahead = w @ (((A - 1) * f + b) ** 2 + (A - 1) ** 2 * v), A * f + b
    cost = 0.5 * ((R**2 + apart) / noise - 1 + np.log(noise / R**2))
    miss = p["Y"][0] - p["d"] - p["U"][:, 0] * ahead
    spread = 0.5 * p["U"][0] ** 2 * (A**2 * v + R**2) / p["R"]
    fit = w @ (stats.norm(0, np.sqrt(p["R"])).logpdf(miss) - spread)
    z, r = (s.mean - p["m0"]) / np.sqrt(p["S0"]), s.root[0] / np.sqrt(p["S0"])
    start = 0.5 * (z**2 + r**2 - 1) - np.log(r)
    exact = (fit - cost - start).item() - kl_by_hand(q)
    keys = jax.random.split(KEY, 40)
    values = [approx.objective(*series(p["Y"]), key=key) for key in keys]
    error = np.std(values) / len(keys) ** 0.5
    assert abs(np.mean(values) - exact) < 4 * error and error < 0.1


def own_steps(p=usual, **settings):
    states = PriorStates(np.zeros(len(p["F"])), T)
    return CoupledGPSSM(model(p, **settings), points(p), states, p["c"])


def test_steps_of_the_model_itself_cost_nothing():
    run = eqx.filter_jit(lambda a: trajectories(KEY, a, posteriors(a)[0], 3))
    x, cost = run(unwrap(own_steps()))
    assert x.shape == (3, T + 1, D) and abs(cost) < 1e-10


# 8. Minibatches, and emissions that are processes

@pytest.mark.parametrize("kind", [GPSSM, ApproximatePowerGPSSM])
def test_minibatches_of_steps_are_unbiased(kind):
    approx, (times, Y) = learned(kind, markov=False), series(usual["Y"])
    whole, order = approx.objective(times, Y), np.random.default_rng(1).permutation(T)
    each = [approx.objective(times[[t]], Y[[t]]) for t in range(T)]
    assert np.isclose(np.mean(each), whole, rtol=1e-10) and np.std(each) > 1
    assert np.isclose(approx.objective(times[order], Y[order]), whole, rtol=1e-12)


LOG_DENSITIES = {
    gpt.Gaussian: lambda g, y: stats.norm(g, 0.3**0.5).logpdf(y),
    gpt.Poisson: lambda g, y: y * g - np.exp(g) - gammaln(y + 1)}


def with_emission(likelihood, outputs, kind=GPSSM, **settings):
    p, q = single, some_q(P=outputs)
    emission = gpt.GP(gpt.RBF(0.9, 1.1), likelihood, gpt.ConstantMean(0.2))
    whole = model(p, emission=emission, num_outputs=outputs)
    approx = kind(whole, points(p), some_states(False, p),
                  emission_inducing=points(p), **settings)
    approx = with_q(approx, some_q(P=1))
    return eqx.tree_at(lambda a: a.emission.q, approx, movable(q))


def labels(outputs):
    Y = np.random.default_rng(2).integers(0, 2, (T, outputs)).astype(float)
    Y[2, -1] = np.nan
    return Y


@pytest.mark.parametrize("likelihood, outputs", [
    (gpt.Gaussian(0.3), 1), (gpt.Poisson(), 2)], ids=["Gaussian", "Poisson"])
def test_an_emission_that_is_a_process_by_quadrature(likelihood, outputs):
    Y, approx = labels(outputs), with_emission(likelihood, outputs)
    plain, (e, w) = jax.tree.map(np.asarray, unwrap(approx)), nodes(1)
    states, f, emission = plain.states, plain.transition, plain.emission
    total = sum(step_by_hand(plain, states, f.q, t) for t in range(1, T + 1))
    total += entropy_by_hand(states)[0] + start_by_hand(plain.model, states)
    total -= kl_by_hand(f.q) + kl_by_hand(emission.q)
    kernels = [plain.model.emission.kernel] * outputs
    for t, y in enumerate(Y, 1):
        x = states.mean[t] + e @ states.root[t].T
        m, v = conditional(kernels, emission.inducing.Z, emission.q, x)
        g = 0.2 + m[:, None] + np.sqrt(v)[:, None] * e  # nodes of x, of g, outputs
        terms = LOG_DENSITIES[type(likelihood)](g, y)
        total += np.sum(np.einsum("x,g,xgp->p", w, w, terms)[~np.isnan(y)])
    # Poisson's expectations are by moment matching of g(x) first.
    rtol = 1e-9 if outputs == 1 else 0.02
    assert np.isclose(approx.objective(*series(Y)), total, rtol=rtol)


def test_counts_through_a_process_have_the_same_limit_at_power_zero():
    data = series(labels(2))
    energy = lambda power: with_emission(
        gpt.Poisson(), 2, ApproximatePowerGPSSM, power=power).objective(*data)
    bound = with_emission(gpt.Poisson(), 2).objective(*data)
    assert np.isclose(to_power_zero(energy, 4), bound, rtol=0, atol=1e-5)


ONE = {"mean": jnp.array([[0.3]]), "root": jnp.array([[[1.2]]])}


def test_outputs_of_one_state_at_a_power_are_dependent():
    emission = unwrap(LinearEmission(np.ones((2, 1)), 0.0, gpt.Bernoulli()))
    (e, w), Y = nodes(1), jnp.ones((1, 2))
    cdf = ndtr(0.3 + 1.2 * e[:, 0])
    for power in (1.0, 0.5):
        found = emitted_terms(emission, None, *ONE.values(), Y, match, power, None)
        expected = np.log(w @ cdf ** (2 * power)) / power
        assert np.isclose(found[0], expected, atol=1e-6)
    seen = emitted_terms(emission, None, *ONE.values(), Y.at[0, 1].set(jnp.nan), match,
                         0.5, None)
    assert np.isclose(seen[0], np.log(w @ cdf**0.5) / 0.5, atol=1e-6)


@pytest.mark.parametrize("power", [None, 1.0])
def test_functions_of_one_state_behind_one_label_are_dependent(power):
    weights = np.array([[1.0], [-0.5], [0.0]])
    emission, (e, w) = unwrap(LinearEmission(weights, 0.0, gpt.Softmax(3))), nodes(1)
    g = (0.3 + 1.2 * e) @ weights.T
    logs = g[:, 0] - np.log(np.sum(np.exp(g), axis=1))
    expected = w @ logs if power is None else np.log(w @ np.exp(logs))
    Y = jnp.zeros(1)
    found = emitted_terms(emission, None, *ONE.values(), Y, match, power, None)
    assert np.isclose(found[0], expected, atol=1e-6)


def test_labels_with_several_functions_behind_each():
    Y = np.array([0, 2, 1, np.nan, 1, 0, 2])
    approx = with_emission(gpt.RobustMax(3), 3)
    value = approx.objective(*series(Y))
    assert np.isfinite(value) and value < 0
    assert approx.posterior().log_density(Y[:3]).shape == (3,)


def test_slopes_of_a_batch_of_gaps_are_finite():
    Y, root = jnp.full((2, 3), jnp.nan), jnp.ones((2, D, D))
    for likelihood in (gpt.Poisson(), gpt.Bernoulli("logit")):
        emission = unwrap(LinearEmission(usual["U"], 0.0, likelihood))
        slope = jax.grad(lambda mean: jnp.sum(emitted_terms(
            emission, None, mean, root, Y, match, None, None)))
        assert np.all(slope(jnp.ones((2, D))) == 0)


# 9. What comes next

@pytest.fixture(scope="module")
def linear_posterior():
    p = usual
    states = smoothed_states(p)
    return GPSSM(model(p, STILL), points(p), states, controls=p["c"]).posterior()


def ahead_by_kalman(p, controls):
    _, means, covs, _ = kalman(p)
    m, V, found = means[-1], covs[-1], []
    for c in controls:
        m, V = p["F"] @ m + p["B"] @ c + p["b"], p["F"] @ V @ p["F"].T + np.diag(p["Q"])
        S = p["U"] @ V @ p["U"].T + np.diag(p["R"])
        found.append((m, V, p["U"] @ m + p["d"], S))
    return map(np.array, zip(*found))


def test_what_comes_next_in_a_linear_system(linear_posterior):
    controls = np.random.default_rng(4).normal(size=(3, 1))
    post, n = linear_posterior, 4000
    m, V, y, S = ahead_by_kalman(usual, controls)
    ahead = post.forecast(3, controls)
    variances = np.diagonal(S, axis1=1, axis2=2)
    for found, expected in zip(ahead, (m, V, y, variances)):
        assert np.allclose(found, expected, atol=1e-9)
    paths = post.draw(KEY, 3, n, controls)
    for drawn, mean, cov in ((paths.states, m, V), (paths.observations, y, S)):
        sd = np.sqrt(np.diagonal(cov, axis1=1, axis2=2))
        assert np.all(np.abs(np.mean(drawn, 0) - mean) < 4.5 * sd / n**0.5)
        assert np.all(np.abs(np.var(drawn, 0) / sd**2 - 1) < 4.5 * (2 / n) ** 0.5)
    Y = y + 0.3
    expected = [stats.multivariate_normal(*pair).logpdf(now)
                for *pair, now in zip(y, S, Y)]
    assert np.allclose(post.log_density(Y, controls), expected, atol=1e-9)
    drawn = post.log_density(Y, controls, through=Draws(n), key=KEY)
    assert np.allclose(drawn, expected, atol=0.15)


def test_steps_from_another_start(linear_posterior):
    p, controls = usual, np.array([[0.4], [0.0], [1.0]])
    mean, cov = np.array([0.5, -1.0]), np.diag([0.2, 0.1])
    ahead = linear_posterior.forecast(3, controls, (mean, cov))
    assert np.allclose(ahead.state_mean[0], p["F"] @ mean + p["B"][:, 0] * 0.4 + p["b"])
    assert np.allclose(ahead.state_cov[0], p["F"] @ cov @ p["F"].T + np.diag(p["Q"]))


def test_log_densities_of_labels_that_share_a_state():
    p, (e, w) = single, nodes(1)
    emission = LinearEmission(np.array([[1.0], [1.5]]), 0.2, gpt.Bernoulli())
    whole = model(p, STILL, emission=emission)
    post = GPSSM(whole, points(p), smoothed_states(p)).posterior()
    m, V, _, _ = (a[0] for a in ahead_by_kalman(p, np.zeros((1, 0))))
    g = (m + np.sqrt(V[0]) * e) @ np.array([[1.0, 1.5]]) + 0.2
    expected = np.log(w @ np.prod(ndtr([1, -1] * g), axis=1))
    Y = np.array([[1.0, 0.0]])
    assert np.isclose(post.log_density(Y)[0], expected, atol=1e-6)
    drawn = post.log_density(Y, through=Draws(4000), key=KEY)[0]
    assert np.isclose(drawn, expected, atol=0.02)


def test_draws_of_u_have_the_moments_of_u():
    post = unwrap(learned().posterior().transition)
    X = jnp.asarray(np.random.default_rng(6).normal(size=(5, 3)))
    at = jax.jit(jax.vmap(lambda key: with_u_drawn(key, post).latent_marginals(X)))
    m, v = at(jax.random.split(KEY, 20000))
    mean, var = post.latent_marginals(X)
    assert np.allclose(np.mean(m, 0), mean, atol=0.03)
    assert np.allclose(np.var(m, 0) + np.mean(v, 0), var, rtol=0.04)
    assert np.std(v, 0).max() < 1e-12 and np.all(np.mean(v, 0) < var)


def test_draws_through_an_emission_that_is_a_process_have_its_variance():
    plain = VariationalGaussian(np.zeros(4), np.eye(4))
    approx = with_q(with_emission(gpt.Gaussian(1e-6), 1), plain)
    approx = eqx.tree_at(lambda a: a.emission.q, approx, movable(plain))
    y = approx.posterior().draw(KEY, 3, 4000).observations
    assert np.allclose(np.var(y, axis=0), 1.1, rtol=4.5 * (2 / 4000) ** 0.5)


def test_draws_with_a_kernel_for_each_state():
    approx = known(model=model(usual, kernel=SEPARATE))
    paths = approx.posterior().draw(KEY, 2, 3, np.ones((2, 1)))
    assert paths.states.shape == (3, 2, 2) and paths.observations.shape == (3, 2, 3)
    approx = own_steps(kernel=SEPARATE)
    assert jax.eval_shape(lambda Y: approx.objective(times, Y, key=KEY), Y).shape == ()


# 10. Precision, derivatives and programs

def one_state(kind):
    p = single
    if kind is not CoupledGPSSM:
        return learned(kind, kind is not ApproximatePowerGPSSM, p), {}
    approx = CoupledGPSSM(model(p), points(p), CoupledStates(kalman(p)[1]), number=3)
    return with_q(approx, some_q(P=1)), {"key": KEY}


KINDS = [GPSSM, CollapsedGPSSM, ApproximatePowerGPSSM, CoupledGPSSM]


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision(kind):
    (approx, key), (times, Y) = one_state(kind), series(single["Y"])
    apart = gpt.InducingPoints(np.linspace(-2.2, 2.2, 4)[:, None])  # K_uu is lifted
    approx = eqx.tree_at(lambda a: a.transition.inducing, approx, apart)
    rounded = lambda Y: gpt.cast(approx, jnp.float32).objective(times, Y, **key)
    assert jax.eval_shape(rounded, jnp.asarray(Y)).dtype == jnp.float32
    if kind is CoupledGPSSM:  # whose draws are others
        assert np.isfinite(rounded(Y))
    else:
        assert np.isclose(rounded(Y), approx.objective(times, Y), rtol=5e-3, atol=0.02)


def test_states_of_the_model_itself_have_the_precision_of_their_mean():
    made = unwrap(PriorStates(np.zeros(2, np.float32), T))
    assert made.mean.dtype == made.root.dtype == jnp.float32


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_right(kind):
    "In all parameters, as `fit` takes them: reverse, forward and of second order."
    (approx, key), data = one_state(kind), series(single["Y"])
    along = lambda s: moved(approx, s).objective(*data, **key)
    slope = jax.jit(jax.grad(along))
    both = jax.jit(lambda s: jax.jvp(jax.value_and_grad(along), (s,), (1.0,)))
    (_, reverse), (forward, curvature) = both(0.0)
    assert np.isclose(reverse, (along(1e-4) - along(-1e-4)) / 2e-4, rtol=1e-4)
    assert np.isclose(forward, reverse, rtol=1e-8)
    assert np.isclose(curvature, (slope(1e-4) - slope(-1e-4)) / 2e-4, rtol=1e-4)


def size(program):
    "How many operations there are, with those of inner programs."
    inner = jax.tree.leaves([eqn.params for eqn in program.eqns],
                            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"))
    inner = [getattr(each, "jaxpr", each) for each in inner]
    inner = [each for each in inner if hasattr(each, "eqns")]
    return len(program.eqns) + sum(map(size, inner))


def programs(T):
    "What is run for a series of so many steps."
    p = single | {name: np.resize(single[name], (T, 1)) for name in ("Y", "seen")}
    p["c"], mean = np.zeros((T, 0)), np.zeros((T + 1, 1))
    parts, data = (model(p), points(p)), (jnp.arange(1, T + 1), jnp.asarray(p["Y"]))
    bound = GPSSM(*parts, MarkovStates(mean))
    yield "bound", bound.objective, data
    yield "collapsed", CollapsedGPSSM(*parts, MarkovStates(mean)).objective, data
    tied = ApproximatePowerGPSSM(*parts, FactorisedStates(mean), 0.5)
    yield "tied", tied.objective, data
    coupled = CoupledGPSSM(*parts, CoupledStates(mean))
    yield "coupled", lambda *data: coupled.objective(*data, key=KEY), data
    power = PowerGPSSM(*parts, T, 0.5)
    start = lambda Y: power.start(Y, FactorisedStates(mean))
    yield "rounds", lambda Y: power.rounds(Y, start(Y)), data[1:]
    yield "energy", lambda Y: power.energy(Y, start(Y)), data[1:]
    ahead = lambda mean: bound.posterior().forecast(T, start=(mean, jnp.eye(1)))
    yield "forecast", ahead, (jnp.zeros(1),)
    yield "draws", lambda key: bound.posterior().draw(key, T), (KEY,)


def test_programs_do_not_grow_with_the_series():
    "No loop over time is unrolled."
    sizes = [{name: size(jax.make_jaxpr(run)(*given).jaxpr)
              for name, run, given in programs(T)} for T in (5, 9)]
    assert sizes[0] == sizes[1] and min(sizes[0].values()) > 100


# 11. What cannot work

times, Y = series(usual["Y"])


def known(kind=GPSSM, **settings):
    "A GPSSM of the usual system whose parts are replaced."
    parts = dict(model=model(usual), inducing=points(usual), states=some_states(),
                 controls=usual["c"])
    return kind(**parts | settings)


def power_ep(whole=None, inducing=None, power=0.5, controls=usual["c"]):
    whole = model(usual) if whole is None else whole
    inducing = points(usual) if inducing is None else inducing
    return PowerGPSSM(whole, inducing, T, power, controls)


def emitted(emission_inducing, **settings):
    whole = model(usual, emission=gpt.GP(gpt.RBF(), gpt.Gaussian(0.3)))
    return known(model=whole, emission_inducing=emission_inducing, **settings)


def space(emission=LinearEmission(np.ones((3, 2))), transition=gpt.Process(gpt.RBF()),
          **settings):
    return StateSpace(transition, emission, **settings)


def linear_mean(rows, columns):
    mean = gpt.LinearMean(np.ones((rows, columns)))
    process = gpt.Process(gpt.RBF(), mean)
    return eqx.tree_at(lambda m: m.transition, model(usual), process)


on_states = gpt.InducingPoints(np.ones((3, D)) * np.arange(3)[:, None])
matrix, windows = np.ones((3, 3)), gpt.GaussianWindow(np.ones((3, 3)))
counts = LinearEmission(usual["U"], 0.0, gpt.Poisson())
few = LinearEmission(usual["U"][:1])
regression = gpt.GP(gpt.RBF(), gpt.Gaussian())
three = gpt.Independent(3 * [gpt.RBF()])
prior_states = PriorStates(np.zeros(2), T)
POWER = "power must be a number above 0 and at most 1"
COUNT = "must be a positive integer"
def pair_sites(approx):
    chain = PowerChainGPSSM(model(usual), points(usual), T, 0.5, usual["c"])
    return approx.energy(Y, chain.start(Y, some_states(True)))


ON_2, CONTROLS = "inducing must be inducing variables on 2", "controls must have shape"
EMITTED = "emission_inducing must be given if the emission is a GP, and only then"
POINTS = "inducing must be InducingPoints"
GAUSSIAN = "LinearEmission with a Gaussian likelihood"


@pytest.mark.parametrize("make, message", [
    # the model
    (lambda: LinearEmission(np.ones(3)), r"weights must be a matrix.*got shape \(3,\)"),
    (lambda: LinearEmission(np.ones((3, 2)), np.ones(2)),
     r"bias must be one number or \(3,\), got shape \(2,\)"),
    (lambda: LinearEmission(np.ones((3, 2)), 0.0, 0.3), "likelihood must be a gp_th"),
    (lambda: space(noise=np.ones(3)), "noise must be one number or one for each of 2"),
    (lambda: space(noise=-1.0), "noise must be positive"),
    (lambda: space(initial_mean=np.ones(3)), "initial_mean must be one number"),
    (lambda: space(3), "emission must be"),
    (lambda: space(transition=gpt.RBF()), "transition must be"),
    (lambda: space(num_states=3), "num_states must be 2"),
    (lambda: space(num_outputs=2), "num_outputs must be 3"),
    (lambda: space(gpt.GP(three, gpt.Gaussian()), num_outputs=2), "num_outputs must"),
    (lambda: space(LinearEmission(np.ones((3, 2)), 0.0, gpt.Softmax(4))),
     "the likelihood looks at 4 functions, but the emission has 3"),
    (lambda: space(LinearEmission(np.ones((3, 2)), 0.0, gpt.Gaussian(np.ones(2)))),
     "variance must be one number or one for each of 3 outputs"),
    # states
    (lambda: FactorisedStates(np.ones(3)), r"mean must have shape \(T \+ 1, D\)"),
    (lambda: MarkovStates(np.ones((1, 3))), r"mean must have shape \(T \+ 1, D\)"),
    (lambda: CoupledStates(np.ones(3)), r"mean must have shape \(T \+ 1, D\)"),
    (lambda: PriorStates(np.ones((3, 2)), 2), r"mean must have shape \(D,\)"),
    (lambda: PriorStates(np.ones(2), 0), f"num_steps {COUNT}"),
    # their approximations
    (lambda: known(model=regression), "model must be a StateSpace, got GP"),
    (lambda: known(inducing=matrix), ON_2),
    (lambda: known(inducing=gpt.InducingPoints(np.ones((3, 1)))), ON_2),
    (lambda: known(states=np.ones((T + 1, 2))), "states must be FactorisedStates"),
    (lambda: known(states=CoupledStates(np.ones((T + 1, 2)))), "states must be Fact"),
    (lambda: known(states=MarkovStates(np.ones((T + 1, 3)))), "2 columns.*got 3"),
    (lambda: known(controls=usual["c"][1:]), r"shape \(7, 1\).*got \(6, 1\)"),
    (lambda: known(controls=None), r"controls must have shape \(7, 1\).*got none"),
    (lambda: known(controls=np.full((T, 1), np.nan)), "controls must be finite"),
    (lambda: known(inducing=on_states, model=linear_mean(2, 2)), r"shape \(7, 0\)"),
    (lambda: known(model=linear_mean(2, 2)), "a mean that looks at 3 columns"),
    (lambda: known(model=linear_mean(3, 3)), "a mean of one function or of 2"),
    (lambda: known(model=model(usual, kernel=three)), "kernel for each of 2"),
    (lambda: known(through="match"), "through must be match, linear.*got 'match'"),
    (lambda: known(through=Draws(0)), f"number {COUNT}"),
    (lambda: known(emission_inducing=on_states), EMITTED),
    (lambda: emitted(None), EMITTED),
    (lambda: emitted(np.ones((3, 2))), "emission_inducing must be inducing variables"),
    (lambda: emitted(points(usual)), "must look at 2 states, got 3 columns"),
    (lambda: known(CollapsedGPSSM, inducing=windows), POINTS),
    (lambda: learned(ApproximatePowerGPSSM, False, power=1.5), POWER),
    (lambda: learned(ApproximatePowerGPSSM, True), "FactorisedStates"),
    (lambda: known(CoupledGPSSM), "states must be CoupledStates or PriorStates"),
    (lambda: known(CoupledGPSSM, states=prior_states, number=0), f"number {COUNT}"),
    # Power EP
    (lambda: power_ep(power=0.0), POWER),
    (lambda: power_ep(model(usual, emission=few), power=1.0), "power must be below 1"),
    (lambda: power_ep(model(usual, emission=counts)), GAUSSIAN),
    (lambda: power_ep(emitted(on_states).model), GAUSSIAN),
    (lambda: power_ep(controls=usual["c"][1:]), CONTROLS),
    (lambda: power_ep(inducing=matrix), ON_2),
    (lambda: power_ep(regression), "model must be a StateSpace"),
    (lambda: power_ep(inducing=gpt.InducingPoints(np.ones((3, 1)))), ON_2),
    (lambda: power_ep(inducing=windows), POINTS),
    (lambda: power_ep().start(Y[1:], some_states(False)), "Y must have 7 rows"),
    (lambda: power_ep().start(Y, some_states(False, single)), r"means \(8, 2\)"),
    (lambda: power_ep().rounds(Y, None, 0), f"number {COUNT}"),
    (lambda: power_ep().rounds(Y, None), "sites must be what start.*got NoneType"),
    (lambda: pair_sites(power_ep()), "7 of Site, got PairSite"),
    (lambda: coupled(known(CoupledGPSSM, states=prior_states)), "chain must be a GPSSM"),
    (lambda: coupled(regression), "chain must be a GPSSM.*got GP"),
    (lambda: power_ep().rounds(Y, None, 3, 0.0), "damping must be above 0"),
])
def test_parts_that_do_not_fit(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("batch, message", [
    ((times * 1.0, Y), r"times must be 7 integers.*dtype float64"),
    ((times - 1, Y), "times must be from 1 to 7.*got 0"),
    ((times + 1, Y), "times must be from 1 to 7.*got 8"),
    ((times[1:], Y), r"times must be 7 integers.*shape \(6,\)"),
    ((times[:, None], Y), "times must be 7 integers"),
    ((None, Y), "times must be 7 integers"),
    ((times, Y[:, :2]), r"Y must have 3 columns.*got shape \(7, 2\)"),
    ((times, Y[:, 0]), "Y must have 3 columns"),
    ((times, np.where(Y == Y.max(), np.inf, Y)), "= inf"),
    ((times, Y * np.nan), "Y must hold an observation, got NaN only"),
    ((times, Y + 1j), "Y must be real"),
    ((times, 7 * [["a", "b", "c"]]), "Y must be"),
    ((times,), "GPSSM.objective needs Y: pass times and Y"),
])
def test_batches_that_do_not_fit(batch, message):
    with pytest.raises(ValueError, match=message):
        known().objective(*batch)


def test_what_needs_the_whole_series_gets_it():
    for approx in (learned(CollapsedGPSSM), own_steps()):
        with pytest.raises(ValueError, match="the whole series: times must be 1 to 7"):
            approx.objective(times[::-1], Y, key=KEY)
    with pytest.raises(ValueError, match="counts 0, 1, 2"):
        known(model=model(usual, emission=counts)).objective(times, Y)
    with pytest.raises(ValueError, match="key must be a JAX random key"):
        known(through=Draws(3)).objective(times, Y)


@pytest.mark.parametrize("ask, message", [
    (lambda post: post.forecast(0), f"steps {COUNT}"),
    (lambda post: post.forecast(2), CONTROLS),
    (lambda post: post.forecast(2, np.ones((3, 1))), r"shape \(2, 1\)"),
    (lambda post: post.forecast(2, np.ones((2, 1)), (np.full(2, np.nan), np.eye(2))),
     "start must be finite"),
    (lambda post: post.forecast(2, np.ones((2, 1)), through=Draws(3)), "through must"),
    (lambda post: post.draw(KEY, 2, 3, np.ones((2, 1)), (np.ones(3), np.eye(2))),
     r"start must be a mean \(2,\) and a covariance \(2, 2\)"),
    (lambda post: post.draw(KEY, 2, 0, np.ones((2, 1))), f"n {COUNT}"),
    (lambda post: post.draw(0, 2, 3, np.ones((2, 1))), "key must be a JAX random key"),
    (lambda post: post.log_density(Y[:2, :2], np.ones((2, 1))), "Y must have 3 col"),
    (lambda post: post.log_density(Y[:2], np.ones((2, 1)), through=Draws(3)),
     "key must be a JAX random key"),
    (lambda post: post.predict_y([T + 1]), "times must be from 0 to 7"),
    (lambda post: post.predict_y([-1]), "times must be from 0 to 7"),
])
def test_questions_that_make_no_sense(linear_posterior, ask, message):
    with pytest.raises(ValueError, match=message):
        ask(linear_posterior)


@pytest.mark.parametrize("Y", [np.ones((T, 2)), np.ones((T, 3))], ids=["two", "three"])
def test_outputs_that_an_emission_has_no_function_for(Y):
    with pytest.raises(ValueError, match="Y must have 1 column"):
        emitted(on_states).check(times, Y)


def test_power_one_needs_the_last_observation():
    gap, states = single["Y"].copy(), some_states(False, single)
    gap[-1] = np.nan
    approx = PowerGPSSM(model(single), points(single), T, 1.0)
    with pytest.raises(ValueError, match="last"):
        approx.start(gap, states)
    sites = approx.start(single["Y"], states)
    for ask in (approx.rounds, approx.energy, approx.posterior):
        with pytest.raises(ValueError, match="last"):
            ask(gap, sites)


@pytest.mark.parametrize("number", [True, False], ids=["number", "vector"])
def test_noise_keeps_what_is_said_of_it(number):
    value = 0.1 if number else np.full(2, 0.1)
    frozen = space(noise=gpt.freeze(gpt.positive(value)))
    assert frozen.num_states == 2 and not jax.tree.leaves(partition(frozen.noise)[0])
    prior = distributions.Exponential(3.0)
    likely = space(noise=gpt.positive(value, prior))
    assert jax.tree.leaves(partition(likely.noise)[0])[0].shape == (2,)
    assert np.isclose(log_prior(likely.noise), 2 * (np.log(3) - 0.3))


def test_more_states_than_outputs_and_no_prior():
    "Where the states are not known from the data, there is still a proper answer."
    wide = StateSpace(gpt.Process(gpt.RBF(np.ones(2))), LinearEmission(np.eye(1, 2)))
    start = initial_means(wide, single["Y"])
    assert np.allclose(start[1:], single["Y"] * [1, 0])
    approx = GPSSM(wide, on_states, FactorisedStates(start))
    assert np.isfinite(approx.objective(*series(single["Y"])))
    with pytest.raises(ValueError, match="num_states must be at most 1, the columns"):
        initial_means(space(regression, num_states=2), Y[:, 0])


# 12. First guesses, programs of a user, and files

def test_first_guesses_solve_for_the_states():
    x = np.random.default_rng(8).normal(size=(T, D))
    found = initial_means(model(usual), x @ usual["U"].T + usual["d"])
    assert np.allclose(found[1:], x) and np.allclose(found[0], x[0])
    gaps = np.stack([np.arange(7.0), np.arange(7.0) ** 2], axis=1)
    gaps[3] = np.nan
    whole = space(LinearEmission(np.eye(2)))
    assert np.allclose(initial_means(whole, gaps)[4], [3, 10])
    components = initial_means(model(usual, emission=regression), usual["Y"])
    assert components.shape == (T + 1, D)
    assert np.allclose(np.mean(components[1:] ** 2, axis=0), 1)


def test_first_guesses_from_poor_columns():
    whole, middle = model(usual, emission=regression), np.arange(3) == 1
    assert np.isfinite(initial_means(whole, np.where(middle, 2.0, usual["Y"]))).all()
    with pytest.raises(ValueError, match="in each column, got none in column 1"):
        initial_means(whole, np.where(middle, np.nan, usual["Y"]))


def test_one_column_may_be_a_vector_under_jit():
    approx, y = learned(markov=False, p=single), jnp.asarray(single["Y"][:, 0])
    assert jax.eval_shape(lambda y: approx.objective(times, y), y).shape == ()
    assert np.array_equal(approx.check(times, y)[1], single["Y"])


def test_several_series_at_once():
    approx, (times, Y) = learned(p=single), series(single["Y"])
    several = np.stack([Y, Y + 0.1])
    found = jax.vmap(lambda Y: approx.objective(times, Y))(several)
    each = [approx.objective(times, Y) for Y in several]
    assert np.allclose(found, each, rtol=1e-12)


def test_saved_and_loaded_bit_by_bit(tmp_path, linear_posterior):
    exact = known(CoupledGPSSM, states=exact_conditionals(usual))
    tied = learned(ApproximatePowerGPSSM, False, power=0.3)
    things = [learned(), learned(through=Draws(3)), learned(CollapsedGPSSM), tied,
              own_steps(), exact, power_ep(), with_emission(gpt.Poisson(), 2),
              linear_posterior]
    for n, thing in enumerate(things):
        gpt.save(tmp_path / str(n), thing)
        assert eqx.tree_equal(gpt.load(tmp_path / str(n)), thing)
