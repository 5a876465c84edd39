"""Rounds of Power EP, and steps of its energy with one factor for all, beside the algorithms as the source states them.

    python benchmarks/power_ep.py [--repetitions 15] [--no-write]

Labels by the probit link at power one half. A round visits all sites: one by one, as Bui's appendix A.6.4 goes (NumPy, O(M²) for
a row, three products of a matrix and a vector), all at once by the same equations (NumPy, the products of all rows together), and
by ours, in parallel and sequentially, beside a step of `SVGP` with all rows (its bound and gradient). A step is the tied energy
of section 2.6 and its gradient on a minibatch of a thousand rows: as stated there, with natural parameters of the factor in the
coordinates of u and logarithms of integrals (JAX, differentiated as it stands), by `ApproximatePowerEP`, and the step of `SVGP`.
All contenders take turns in one process. The sites after five rounds, and the energies, must agree. Writes results/power_ep.json,
and fails if the step of the tied energy takes more than twice that of `SVGP`."""

import argparse
import sys
from functools import partial

import numpy as np
from machine import others_share
from report import write
from scipy.linalg import cho_factor, cho_solve
from scipy.special import log_ndtr
from worker import timed

POWER, BATCH, NODES, ROUNDS = 0.5, 1000, 20, 5
SIZES = {"banana": (400, 50), "made up": (10000, 100)}
LENGTHSCALE, VARIANCE = 0.5, 4.0


def problem(name) -> tuple:
    "Inputs in the plane, labels, and inducing inputs."
    from gp_thesis.data import benchmark_split, classification, standardise
    from gp_thesis.svgp import kmeans_centres
    rows, inducing = SIZES[name]
    if name == "banana":
        train = benchmark_split(classification("banana"), 0)[0]
        X, y = standardise(train.X)[0], np.asarray(train.y, float)
    else:
        rng = np.random.default_rng(0)
        X = rng.uniform(-2, 2, (rows, 2))
        y = (np.sin(3 * X[:, 0]) * X[:, 1] + 0.5 * rng.standard_normal(rows) > 0).astype(float)
    assert X.shape == (rows, 2)
    return X, y, np.asarray(kmeans_centres(X, inducing))


class Stated:
    "Appendix A.6 in NumPy: γ = Kuu⁻¹ m, β = Kuu⁻¹ - Kuu⁻¹ V Kuu⁻¹, and a site (g, v) for each row, v infinite at first."

    def __init__(self, X, y, Z):
        k = lambda A, B: VARIANCE * np.exp(-0.5 * np.sum((A[:, None] - B[None]) ** 2, axis=2) / LENGTHSCALE**2)
        self.Kuu, self.Kuf, self.y = k(Z, Z), k(Z, X), y
        self.factor = cho_factor(self.Kuu, lower=True)
        self.W = cho_solve(self.factor, self.Kuf)
        self.left = VARIANCE - np.sum(self.Kuf * self.W, axis=0)
        self.nodes, self.weights = np.polynomial.hermite_e.hermegauss(NODES)
        self.weights = self.weights / self.weights.sum()
        self.restart()

    def restart(self):
        M, N = self.Kuf.shape
        self.g, self.v = np.zeros(N), np.full(N, np.inf)
        self.gamma, self.beta = np.zeros(M), np.zeros((M, M))

    def slopes(self, mean, var, y):
        "d_1 and d_2 of log E[p(y | f)^power] in the mean, by quadrature."
        t = np.sqrt(var)[..., None] * self.nodes
        tilted = self.weights * np.exp(POWER * log_ndtr((2 * y[..., None] - 1) * (mean[..., None] + t)))
        tilted /= tilted.sum(axis=-1, keepdims=True)
        d1 = np.sum(tilted * t, axis=-1) / var
        return d1, np.sum(tilted * t**2, axis=-1) / var**2 - 1 / var - d1**2

    def one_by_one(self):
        "A.79 to A.86 for each row in turn."
        for n in range(len(self.y)):
            k, w = self.Kuf[:, n], self.W[:, n]
            P = w - self.beta @ k                                       # Kuu⁻¹ V_uf
            d2 = 0.0 if np.isinf(self.v[n]) else -1 / (k @ P - self.v[n] / POWER)       # A.75
            d1 = (k @ self.gamma - self.g[n]) * d2                      # A.76
            gamma, beta = self.gamma + P * d1, self.beta - d2 * np.outer(P, P)          # A.79, A.80
            P = w - beta @ k
            mean, var = k @ gamma, k @ P
            d1, d2 = self.slopes(mean[None], var[None] + self.left[n], self.y[n][None])
            g, v = mean - d1[0] / d2[0], -1 / d2[0] - var               # A.83, A.84
            old = (1 - POWER) / self.v[n]
            self.v[n], shift = 1 / (1 / v + old), g / v + self.g[n] * old               # A.85, A.86
            self.g[n] = self.v[n] * shift
            self.gamma = gamma + P * d1[0]                              # the new fraction, A.81
            self.beta = beta - d2[0] * np.outer(P, P)                   # A.82
        return 1 / self.v

    def all_at_once(self):
        "The same for all rows from the same q, which then collects the sites."
        P = self.W - self.beta @ self.Kuf
        h, s = self.gamma @ self.Kuf, np.sum(self.Kuf * P, axis=0)
        d2 = np.where(np.isinf(self.v), 0.0, -1 / (s - self.v / POWER))
        mean, var = h + s * (h - self.g) * d2, s + d2 * s**2
        d1, d2 = self.slopes(mean, var + self.left, self.y)
        old = (1 - POWER) / self.v
        precision = 1 / (-1 / d2 - var)
        shift = precision * (mean - d1 / d2) + old * self.g
        self.v = 1 / (precision + old)
        self.g = self.v * shift
        B = cho_factor(self.Kuu + (self.Kuf / self.v) @ self.Kuf.T, lower=True)
        self.gamma = cho_solve(B, self.Kuf @ shift)
        self.beta = cho_solve(self.factor, np.eye(len(B[0]))) - cho_solve(B, np.eye(len(B[0])))
        return 1 / self.v


def stated_energy(parameters, X, y, num_data):
    "The tied energy of section 2.6, in the terms of A.87: the factor has natural parameters T1 (M,) and R Rᵀ (M, M) in u."
    import jax.numpy as jnp
    from gp_thesis.likelihoods import Bernoulli
    from jax.scipy.linalg import cho_factor, cho_solve

    lengthscale, variance, Z, T1, R = parameters
    k = lambda A, B: variance * jnp.exp(-0.5 * jnp.sum((A[:, None] - B[None]) ** 2, axis=2) / lengthscale**2)
    Kuu, Kuf, T2 = k(Z, Z), k(Z, X), R @ R.T
    inverse = cho_solve(cho_factor(Kuu), jnp.eye(len(Z)))

    def moments(factors):
        "Mean, covariance and G of p times so many factors, A.90."
        precision = cho_factor(inverse + factors * T2)
        V = cho_solve(precision, jnp.eye(len(Z)))
        m = V @ (factors * T1)
        return m, V, 0.5 * m @ (factors * T1) - jnp.sum(jnp.log(jnp.diag(precision[0])))

    G_prior, G_q = -0.5 * jnp.linalg.slogdet(inverse)[1], moments(num_data)[2]
    m, V, G_cavity = moments(num_data - POWER)
    W = inverse @ Kuf
    var = variance - jnp.sum(Kuf * W, axis=0) + jnp.sum(W * (V @ W), axis=0)
    tilted = jnp.sum(Bernoulli().log_tilted(W.T @ m, var, y, POWER)) * num_data / len(X)
    return G_q - G_prior + (num_data * (G_cavity - G_q) + tilted) / POWER


def rounds(name) -> tuple[dict, dict]:
    "A function for each contender, which visits all sites once, and how far their sites are apart."
    import gp_thesis as gpt
    import jax
    from gp_thesis.ep import look, moved, no_sites, sweep, theta_of
    from gp_thesis.parameters import unwrap
    X, y, Z = problem(name)
    stated = Stated(X, y, Z)
    approx = gpt.PowerEP(gpt.GP(gpt.RBF(LENGTHSCALE, VARIANCE), gpt.Bernoulli()), gpt.InducingPoints(Z), POWER)
    theta = jax.jit(theta_of)(unwrap(approx), *map(jax.numpy.asarray, (X, y)))
    start = no_sites(theta[0])

    @jax.jit
    def parallel(theta, sites):
        prior, likelihood, labels, power = theta
        return moved(sites, look(likelihood, prior, labels, sites, power).target, POWER)

    @jax.jit
    def sequential(theta, sites):
        prior, likelihood, labels, power = theta
        return sweep(likelihood, prior, labels, sites, power)

    parallel, sequential = partial(parallel, theta), partial(sequential, theta)
    ours = {"gp_thesis, in parallel": parallel, "gp_thesis, one by one": sequential}
    ways = {"as stated, all at once": stated.all_at_once, "as stated, one by one": stated.one_by_one}
    ways |= {way: lambda f=f: jax.block_until_ready(f(start)) for way, f in ours.items()}
    ways["SVGP, a step with all rows"] = step_of(gpt.SVGP(approx.model, approx.inducing), *map(jax.numpy.asarray, (X, y)), len(X))
    return ways, agreement(stated, parallel, sequential, start)


def agreement(stated, parallel, sequential, start) -> dict:
    "How far precisions are apart, relative to the largest, after some parallel rounds and at the fixed point of the others."
    apart = lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max())
    sites = start
    for _ in range(ROUNDS):
        theirs, sites = stated.all_at_once(), parallel(sites)
    found = {f"after {ROUNDS} parallel rounds": apart(sites.precision, theirs)}
    stated.restart()
    if len(stated.y) < 1000:  # sixty passes row by row
        sites = start
        for _ in range(60):
            theirs, sites = stated.one_by_one(), sequential(sites)
        found["at the fixed point, one by one"] = apart(sites.precision, theirs)
        stated.restart()
    return found


def step_of(approx, X, y, num_data):
    "A function that returns objective and gradient on this batch."
    import equinox as eqx
    import gp_thesis as gpt
    import jax
    moving, rest = gpt.partition(approx)
    ours = jax.jit(jax.value_and_grad(lambda moving: eqx.combine(moving, rest).objective(X, y, num_data=num_data)))
    return lambda: jax.block_until_ready(ours(moving))


def steps() -> tuple[dict, dict]:
    "A function for each contender that returns energy or bound and its gradient on a minibatch, and how far energies are apart."
    import equinox as eqx
    import gp_thesis as gpt
    import jax
    import jax.numpy as jnp
    from gp_thesis.inducing import inducing_factor
    from gp_thesis.parameters import unwrap
    X, y, Z = problem("made up")
    N, M, X, y = len(X), len(Z), jnp.asarray(X[:BATCH]), jnp.asarray(y[:BATCH])
    rng = np.random.default_rng(1)
    R = 0.05 / np.sqrt(N) * (np.eye(M) + np.tril(0.1 * rng.standard_normal((M, M))))
    T1 = rng.standard_normal(M) / N
    numbers = LENGTHSCALE, VARIANCE, jnp.asarray(Z), jnp.asarray(T1), jnp.asarray(R)
    theirs = jax.jit(jax.value_and_grad(lambda p: stated_energy(p, X, y, N)))

    model, inducing = gpt.GP(gpt.RBF(LENGTHSCALE, VARIANCE), gpt.Bernoulli()), gpt.InducingPoints(Z)
    L = inducing_factor(unwrap(inducing), unwrap(model.kernel)).L
    S = np.linalg.inv(np.eye(M) + N * L.T @ (R @ R.T) @ L)
    q = gpt.svgp.VariationalGaussian(gpt.free(S @ (N * L.T @ T1)), gpt.lower_triangular(np.linalg.cholesky(S)))
    ways = {"as stated": lambda: jax.block_until_ready(theirs(numbers))}
    for name, approx in (("gp_thesis", gpt.ApproximatePowerEP(model, inducing, POWER)), ("SVGP", gpt.SVGP(model, inducing))):
        ways[name] = step_of(eqx.tree_at(lambda a: a.q, approx, q), X, y, N)
    a, b = (float(ways[name]()[0]) for name in ("gp_thesis", "as stated"))
    return ways, {"energies": abs(a - b) / abs(b)}


def in_turns(ways, repetitions) -> dict:
    "Seconds, of the wall clock and of the processor, of each contender; the first call, which compiles, apart."
    for way in ways.values():
        way()
    share, taken = others_share(), {name: [] for name in ways}
    for _ in range(repetitions):
        for name, way in ways.items():
            taken[name].append(timed(way)[:2])
    others = share()
    return {name: {"wall": float(np.median(wall)), "least": min(wall), "processor": float(np.median(processor)), "others": others}
            for name, (wall, processor) in ((name, zip(*pairs)) for name, pairs in taken.items())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave results/ alone")
    options = parser.parse_args()
    import jax
    jax.config.update("jax_enable_x64", True)
    tasks = {f"a round, {name}, N = {N}, M = {M}": lambda name=name: rounds(name) for name, (N, M) in SIZES.items()}
    tasks[f"a step, batch {BATCH}, M = {SIZES['made up'][1]}"] = steps
    results = {}
    print(f"{'':<36}{'wall: median':>14}{'least':>10}{'processor':>11}{'others':>8}   milliseconds")
    for task, make in tasks.items():
        ways, differences = make()
        results[task] = {"times": in_turns(ways, options.repetitions), "relative differences": differences}
        print(task, {name: f"{value:.0e}" for name, value in differences.items()})
        for name, row in results[task]["times"].items():
            print(f"    {name:<32}" + "".join(f"{1e3 * row[key]:{width}.2f}" for key, width in (
                ("wall", 14), ("least", 10), ("processor", 11))) + f"{row['others']:8.0%}", flush=True)
        if max(differences.values()) > 1e-6:
            print("the contenders disagree", file=sys.stderr)
            return 1
    if options.write:
        write("power_ep", {"title": __doc__.splitlines()[0], "power": POWER, "tasks": results})
    step = {name: row["wall"] for name, row in results[task]["times"].items()}  # of the last task, by the tied energy
    if slow := step["gp_thesis"] > 2 * step["SVGP"]:
        print("a step of the tied energy takes more than twice SVGP's", file=sys.stderr)
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
