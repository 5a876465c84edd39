"""Effective draws a second from the posterior of the coal mining disasters with thirty inducing points, by chains.

    python benchmarks/sampling.py [--rounds 5] [--no-write]

The same model for both libraries: an RBF kernel with Gamma priors, Poisson counts in 56 cells, SGPMC with the same inducing inputs,
two chains, 500 iterations of warm-up and 1000 draws of each. GPflow runs the Hamiltonian chains of its own documentation, at the
mode that its Scipy optimiser finds, with a step size that adapts during all of the warm-up to an acceptance of 0.75, for
trajectories of ten leapfrogs, which it shows, and of thirty, about as many as NUTS takes here. We run `sample` as it comes, from the
mode of the same density. Starts and compilation are not timed. Effective sizes are those of `gp_thesis.mcmc.effective_sizes`, for
both hyperparameters and for E[f | u] at all cells, the conditional computed by one function for both libraries. The runs take
turns, each in a process of its own. Writes results/sampling.json after each round."""

import argparse
import json
import sys

import numpy as np
from machine import others_share
from report import write
from run import in_process
from worker import timed

CHAINS, WARMUP, SAMPLES, INDUCING = 2, 500, 1000, 30
WAYS = {"gp_thesis, NUTS": "gp_thesis", "gpflow, 10 leapfrogs": "10", "gpflow, 30 leapfrogs": "30"}


def problem() -> tuple:
    "Years, counts and inducing inputs, and the length of a cell."
    from gp_thesis.cox import cell_counts
    from gp_thesis.data import coal_disasters
    days, window = coal_disasters()
    return cell_counts(days, window, 56)[:2] + (np.linspace(*window[0], INDUCING)[:, None], float(np.ptp(window) / 56))


def by_gp_thesis(seed: int) -> dict:
    import gp_thesis as gpt
    import jax
    import numpyro.distributions as dist
    from gp_thesis.mcmc import held
    jax.config.update("jax_enable_x64", True)
    years, counts, Z, length = problem()
    kernel = gpt.RBF(gpt.positive(10.0, prior=dist.Gamma(4.0, 0.25)), gpt.positive(0.5, prior=dist.Gamma(2.0, 2.0)))
    approx = gpt.SGPMC(gpt.GP(kernel, gpt.Poisson(binsize=length)), gpt.InducingPoints(Z))
    start = gpt.fit(held(approx), (years, counts), steps=1000, progress=False).approx
    settings = dict(start=start, chains=CHAINS, progress=False)
    gpt.sample(approx, (years, counts), key=jax.random.key(seed), warmup=5, samples=4, **settings)
    share = others_share()
    _, processor, run = timed(lambda: gpt.sample(approx, (years, counts), key=jax.random.key(seed), warmup=WARMUP, samples=SAMPLES,
                                                 **settings))
    drawn = run.draws.model.kernel
    return scores(drawn.lengthscale, drawn.variance, run.draws.v) | {
        "warm-up": run.warmup_seconds, "sampling": run.seconds, "processor": processor, "others": share(),
        "gradients": int(run.steps.sum()), "acceptance": float(run.accepted.mean())}


def by_gpflow(seed: int, leapfrogs: int) -> dict:
    import gpflow
    import tensorflow as tf
    import tensorflow_probability as tfp
    years, counts, Z, length = problem()
    number, gamma = gpflow.utilities.to_default_float, tfp.distributions.Gamma
    kernel = gpflow.kernels.SquaredExponential(variance=0.5, lengthscales=10.0)
    kernel.lengthscales.prior, kernel.variance.prior = gamma(number(4.0), number(0.25)), gamma(number(2.0), number(2.0))
    model = gpflow.models.SGPMC((years, counts[:, None]), kernel, gpflow.likelihoods.Poisson(binsize=length), inducing_variable=Z)
    gpflow.set_trainable(model.inducing_variable, False)
    gpflow.optimizers.Scipy().minimize(model.training_loss, model.trainable_variables, options={"maxiter": 1000})
    helper = gpflow.optimizers.SamplingHelper(model.log_posterior_density, model.trainable_parameters)
    start = [tf.identity(variable) for variable in helper.current_state]
    hmc = tfp.mcmc.HamiltonianMonteCarlo(helper.target_log_prob_fn, num_leapfrog_steps=leapfrogs, step_size=number(0.01))

    @tf.function
    def chain(warmup, samples, seed):
        adaptive = tfp.mcmc.SimpleStepSizeAdaptation(hmc, num_adaptation_steps=warmup, target_accept_prob=number(0.75),
                                                     adaptation_rate=0.1)
        return tfp.mcmc.sample_chain(num_results=samples, num_burnin_steps=warmup, current_state=start, kernel=adaptive, seed=seed,
                                     trace_fn=lambda _, results: (results.inner_results.is_accepted, results.new_step_size))

    def run(warmup, samples):
        sizes = tf.constant(warmup), tf.constant(samples)
        return [tf.nest.map_structure(lambda tensor: tensor.numpy(), chain(*sizes, tf.constant([seed, k]))) for k in range(CHAINS)]

    run(2, 2)
    share = others_share()
    wall, processor, found = timed(lambda: run(WARMUP, SAMPLES))
    others = share()
    chains = [helper.convert_to_constrained_values([tf.constant(state) for state in states]) for states, _ in found]
    names = [[name for name, p in (("lengthscale", kernel.lengthscales), ("variance", kernel.variance), ("v", model.V)) if p is parameter][0]
             for parameter in model.trainable_parameters]
    drawn = {name: np.stack([np.asarray(values[k]) for values in chains]) for k, name in enumerate(names)}
    return scores(drawn["lengthscale"], drawn["variance"], drawn["v"].reshape(CHAINS, SAMPLES, -1)) | {
        "warm-up": wall * WARMUP / (WARMUP + SAMPLES), "sampling": wall * SAMPLES / (WARMUP + SAMPLES), "processor": processor,
        "others": others, "gradients": CHAINS * SAMPLES * leapfrogs,
        "acceptance": float(np.mean([accepted for _, (accepted, _) in found]))}


def scores(lengthscale, variance, v) -> dict:
    "Effective sizes and means from draws (chains, S) and whitened values (chains, S, M)."
    from gp_thesis.mcmc import effective_sizes, split_rhat
    from scipy.linalg import cholesky, solve_triangular
    years, _, Z, _ = problem()
    lengthscale, variance, v = (np.asarray(a, float) for a in (lengthscale, variance, v))

    def values(scale, variance, v):
        k = lambda a, b: variance * np.exp(-0.5 * ((a - b.T) / scale) ** 2)
        L = cholesky(k(Z, Z) + 1e-6 * variance * np.eye(INDUCING), lower=True)
        return solve_triangular(L, k(Z, years), lower=True).T @ v

    f = np.array([[values(*draw) for draw in zip(*chain)] for chain in zip(lengthscale, variance, v)])
    hyper = np.stack([lengthscale, variance], axis=2)
    sizes = {"hyperparameters": effective_sizes(hyper)[0], "f": effective_sizes(f)[0]}
    return {"hyperparameters": sizes["hyperparameters"].tolist(), "f, least": float(sizes["f"].min()), "f, median":
            float(np.median(sizes["f"])), "least": float(min(x.min() for x in sizes.values())),
            "R-hat": float(max(split_rhat(hyper).max(), split_rhat(f).max())),
            "means": hyper.mean(axis=(0, 1)).tolist(), "mean f": f.mean(axis=(0, 1)).tolist()}


def rates(runs: list[dict]) -> dict:
    "Least, median and most effective draws a second of several runs, over all of their time and without the warm-up."
    whole = [run["least"] / (run["warm-up"] + run["sampling"]) for run in runs]
    after, processor = ([run["least"] / run[time] for run in runs] for time in ("sampling", "processor"))
    return {name: [min(x), float(np.median(x)), max(x)] for name, x in (
        ("with warm-up", whole), ("without", after), ("processor", processor))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave results/ alone")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        way, seed = options.worker[0], int(options.worker[1])
        print(json.dumps(by_gp_thesis(seed) if way == "gp_thesis" else by_gpflow(seed, int(way))))
        return 0
    runs = {name: [] for name in WAYS}
    print(f"{'':<23}{'hyper':>14}{'f least':>9}{'R-hat':>7}{'accepted':>9}{'warm-up':>9}{'sampling':>9}{'processor':>10}{'others':>8}")
    for seed in range(options.rounds):
        for name, way in WAYS.items():
            found = in_process("sampling.py", "--worker", way, seed)
            if "error" in found:
                print(name, found["error"], file=sys.stderr)
                return 1
            runs[name].append(found)
            hyper = ", ".join(f"{size:.0f}" for size in found["hyperparameters"])
            print(f"{name:<23}{hyper:>14}{found['f, least']:9.0f}{found['R-hat']:7.3f}{found['acceptance']:9.2f}{found['warm-up']:9.1f}"
                  f"{found['sampling']:9.1f}{found['processor']:10.1f}{found['others'] or 0:8.0%}", flush=True)
        summary = {name: rates(found) for name, found in runs.items()}
        ours, *peers = summary.values()
        ratio = {kind: ours[kind][1] / max(peer[kind][1] for peer in peers) for kind in ours}
        if options.write:
            write("sampling", {"title": __doc__.splitlines()[0], "chains": CHAINS, "warm-up": WARMUP, "samples": SAMPLES,
                               "least effective draws a second: least, median, most": summary, "ours / best peer": ratio, "runs": runs})
    for name, found in summary.items():
        print(f"{name:<23}" + "; ".join(f"{kind}: {b:.2f} ({a:.2f} to {c:.2f})" for kind, (a, b, c) in found.items()))
    print("ours / best peer: " + ", ".join(f"{kind} {x:.1f}" for kind, x in ratio.items()))
    return int(ratio["with warm-up"] < 2)


if __name__ == "__main__":
    sys.exit(main())
