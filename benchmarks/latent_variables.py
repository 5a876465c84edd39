"""Bayesian latent variable models of GPflow, GPy and this package: the same bound at the same place, and fits of the oil flow.

    python benchmarks/latent_variables.py --gpy .venv-gpy/bin/python [--steps 300] [--no-write]

in the environment of requirements-peers.txt with this package; GPy has one of its own, and is left out without `--gpy`. First a
small problem: every library's bound, which must agree, or the exit status is 1. Then the oil flow, a thousand rows of twelve
outputs, ten latent columns, fifty inducing points: all begin at the same place and take so many iterations of their own L-BFGS-B.
The numbers of what they end with are put into one class of ours, which says the bound there, how probable rows are that were held
out, and how many rows have their nearest neighbour in another class. Each runs in a process of its own, one after the other. Last
the rows a second of steps of Adam by minibatches with this package. Writes results/latent_variables.json, with the small
problem, so that tests/test_gplvm.py can compare without peers at hand."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SMALL = dict(rows=15, outputs=3, latent_dims=2, inducing=5)
LARGE = dict(rows=1000, latent_dims=10, inducing=50, held_out=300, draws=1000)
BATCHES, DEVIATION = (100, 500), 0.3


def small() -> dict:
    "Outputs, and numbers at which the bound is asked for."
    rng = np.random.default_rng(7)
    N, P, Q, M = SMALL.values()
    X = rng.normal(size=(N, Q))
    Y = np.sin(X @ rng.normal(size=(Q, P))) + 0.1 * rng.normal(size=(N, P))
    return dict(Y=Y, mean=X, var=rng.uniform(0.02, 0.4, (N, Q)), Z=rng.normal(size=(M, Q)), lengthscale=np.array([0.8, 1.3]),
                variance=np.array(1.2), noise=np.array(0.15))


def large() -> dict:
    "The oil flow, and where the fits begin."
    from gp_thesis.data import oil_flow, standardise
    from gp_thesis.gplvm import principal_components
    from gp_thesis.svgp import kmeans_centres
    flow, (N, Q, M) = oil_flow(), list(LARGE.values())[:3]
    Y, units = standardise(flow.X[:N])
    start = principal_components(Y, Q)
    return dict(Y=Y, mean=start, var=np.full((N, Q), DEVIATION**2), Z=kmeans_centres(start, M), lengthscale=np.full(Q, Q**0.5),
                variance=np.array(1.0), noise=np.array(0.1), kinds=flow.y[:N],
                held_out=units.apply(oil_flow("test").X[:LARGE["held_out"]]))


def of_gpflow(p: dict):
    import gpflow
    gpflow.config.set_default_jitter(1e-8 * p["variance"].item())  # as we have it, so that the bound can be compared
    kernel = gpflow.kernels.SquaredExponential(p["variance"].item(), p["lengthscale"])
    model = gpflow.models.BayesianGPLVM(p["Y"], X_data_mean=p["mean"], X_data_var=p["var"], kernel=kernel,
                                        inducing_variable=p["Z"].copy())
    model.likelihood.variance.assign(p["noise"].item())
    return model


def gpflow(p: dict, steps: int) -> dict:
    import gpflow as library
    import tensorflow as tf
    model = of_gpflow(p)
    if not steps:
        return dict(bound=model.elbo().numpy())
    library.optimizers.Scipy().minimize(tf.function(model.training_loss), model.trainable_variables, options=dict(maxiter=steps))
    return dict(bound=model.elbo().numpy(), mean=model.X_data_mean.numpy(), var=model.X_data_var.numpy(),
                Z=model.inducing_variable.Z.numpy(), lengthscale=model.kernel.lengthscales.numpy(),
                variance=model.kernel.variance.numpy(), noise=model.likelihood.variance.numpy())


def gpy(p: dict, steps: int) -> dict:
    import GPy
    kernel = GPy.kern.RBF(p["mean"].shape[1], variance=p["variance"], lengthscale=p["lengthscale"], ARD=True)
    noise = GPy.likelihoods.Gaussian(variance=p["noise"].item())
    M, Q = p["Z"].shape
    model = GPy.models.BayesianGPLVM(p["Y"], Q, X=p["mean"].copy(), X_variance=p["var"].copy(), Z=p["Z"].copy(), num_inducing=M,
                                     kernel=kernel, likelihood=noise)
    if steps:
        model.optimize("lbfgsb", max_iters=steps)
    return dict(bound=model.log_likelihood().item() if hasattr(model.log_likelihood(), "item") else model.log_likelihood(),
                mean=model.X.mean.values, var=model.X.variance.values, Z=model.Z.values, lengthscale=model.rbf.lengthscale.values,
                variance=model.rbf.variance.values, noise=model.likelihood.variance.values)


def ours(p: dict):
    "A collapsed model with these numbers."
    import equinox as eqx
    import gp_thesis as gpt
    from gp_thesis.parameters import free, positive
    model = gpt.GP(gpt.RBF(p["lengthscale"], np.ravel(p["variance"])[0]), gpt.Gaussian(np.ravel(p["noise"])[0]))
    approx = gpt.CollapsedGPLVM(model, gpt.InducingPoints(p["Z"]), *p["mean"].shape)
    latents = gpt.Latents(free(p["mean"]), positive(np.sqrt(p["var"])))
    return eqx.tree_at(lambda a: a.latents, approx, latents)


def gp_thesis(p: dict, steps: int) -> dict:
    import gp_thesis as gpt
    approx, data = ours(p), (np.arange(len(p["Y"])), p["Y"])
    if steps:
        approx = gpt.fit(approx, data, steps=steps, progress=False).approx
    model, root = approx.model, np.asarray(approx.latents.root)
    return dict(bound=approx.objective(*data), mean=approx.latents.mean, var=root**2, Z=approx.inducing.Z,
                lengthscale=model.kernel.lengthscale, variance=model.kernel.variance, noise=model.likelihood.variance)


LIBRARIES = {"gp_thesis": gp_thesis, "gpflow": gpflow, "gpy": gpy}


def work(name: str, steps: int, source: str, target: str) -> None:
    "One library, in a process of its own."
    if name == "gp_thesis":
        import jax
        jax.config.update("jax_enable_x64", True)
    problem = dict(np.load(source))
    wall, processor = time.perf_counter(), time.process_time()
    found = LIBRARIES[name](problem, steps)
    spent = dict(wall=time.perf_counter() - wall, processor=time.process_time() - processor)
    module = sys.modules[{"gpy": "GPy"}.get(name, name)]
    np.savez(target, version=module.__version__, **{key: np.asarray(value) for key, value in (found | spent).items()})


def in_process(python: str, name: str, problem: dict, steps: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.npz"), Path(folder, "out.npz")
        np.savez(source, **problem)
        subprocess.run([python, __file__, "--worker", name, str(steps), source, target], check=True)
        return dict(np.load(target))


def judged(found: dict, problem: dict) -> dict:
    "What one class of ours says of the numbers that a fit ended with."
    import jax
    from gp_thesis.gplvm import infer_rows, row_log_density
    approx, data = ours(found), (np.arange(len(problem["Y"])), problem["Y"])
    post, relevance = approx.posterior(*data), 1 / np.asarray(found["lengthscale"]) ** 2
    new = infer_rows(post, problem["held_out"], found["mean"], steps=100)
    density = row_log_density(post, new, problem["held_out"], jax.random.key(1), LARGE["draws"])
    X, kinds = found["mean"][:, np.argsort(-relevance)[:2]], problem["kinds"]
    apart = np.sum((X[:, None] - X) ** 2, axis=2)
    np.fill_diagonal(apart, np.inf)
    return {"bound, theirs": float(found["bound"]), "bound, ours": float(approx.objective(*data)),
            "held-out log density": float(np.mean(density)), "its error": float(np.std(density) / len(density) ** 0.5),
            "neighbour errors": int(np.sum(kinds[apart.argmin(axis=1)] != kinds)), "noise": float(np.ravel(found["noise"])[0]),
            "relevance": sorted((relevance / relevance.max()).tolist(), reverse=True),
            "wall": float(found["wall"]), "processor": float(found["processor"])}


def minibatches(problem: dict, steps: int = 200) -> dict:
    "Rows a second of steps of Adam, by processor time."
    import gp_thesis as gpt
    import jax
    import optax
    from gp_thesis.gplvm import GPLVM
    approx, rows = ours(problem), {}
    start = GPLVM(approx.model, approx.inducing, *problem["mean"].shape, problem["Y"].shape[1], problem["mean"])
    for batch in BATCHES:
        spent = []
        for count in (steps, 2 * steps):
            clock = time.process_time()
            gpt.fit(start, (np.arange(len(problem["Y"])), problem["Y"]), optimiser=optax.adam(0.01), steps=count, batch_size=batch,
                    key=jax.random.key(0), progress=False)
            spent.append(time.process_time() - clock)
        rows[str(batch)] = batch * steps / (spent[1] - spent[0])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpy", help="the Python of an environment that has GPy")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave results/ alone")
    options = parser.parse_args()
    import jax
    from report import write
    jax.config.update("jax_enable_x64", True)
    pythons = {name: options.gpy if name == "gpy" else sys.executable for name in LIBRARIES if name != "gpy" or options.gpy}
    problem, versions, bounds = small(), {}, {}
    for name, python in pythons.items():
        found = in_process(python, name, problem, 0)
        bounds[name], versions[name] = float(found["bound"]), str(found["version"])
    print("bounds of the small problem", bounds)
    result = {"title": __doc__.splitlines()[0], "libraries": versions, "steps": options.steps, "settings": LARGE,
              "small": {key: value.tolist() for key, value in problem.items()} | {"bounds": bounds}, "oil flow": {}}
    if max(abs(value / bounds["gp_thesis"] - 1) for value in bounds.values()) > 1e-6:
        print("the bounds disagree", file=sys.stderr)
        return 1
    problem = large()
    for name, python in pythons.items():
        row = judged(in_process(python, name, problem, options.steps), problem)
        result["oil flow"][name] = row
        print(name, json.dumps({key: value for key, value in row.items() if key != "relevance"}), flush=True)
    result["rows a second by minibatches"] = minibatches(problem)
    print("rows a second", result["rows a second by minibatches"])
    if options.write:
        write("latent_variables", result)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
    else:
        sys.exit(main())
