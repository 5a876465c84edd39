"""Whole runs as a newcomer starts them, on data that the book does not use: `python benchmarks/first_hour.py [--no-write] [--methods METHOD ...] [name ...]`.

Each run is a process of its own: import, model, fit from the same start, prediction of the test rows. Scores are in standard
units (root mean squared error and mean log density; error rate and mean log probability), the objective is what was maximised,
seconds are those of the whole process: on the wall, and of the processor over all threads. Regression: three standard splits
each; the best of two and of four starts where a library has such a thing, and at the end our two beside one of a peer ("2 for 1").
`again` is our run once more with README's two lines for JAX's cache, which the first such run has filled: what every run but the
first costs. Writes results/first_hour.json after each problem, and keeps what it holds of others, problems or libraries, from the
same kind of machine, so that the whole can be run in parts; each row has the date of its run. Further splits are run when they are
named, such as 'yacht 7' or 'breast cancer 2', and so are 'VFE, to its end' and 'VGP, to its end', which do not stop after a thousand
iterations of L-BFGS as the others do.
The functions of the libraries are named after them; a library without a method has no row."""

import argparse
import compileall
import json
import resource
import sys
import tempfile
import time
from datetime import date
from itertools import product
from pathlib import Path

import numpy as np
from machine import in_words
from report import OURS, recorded, write
from run import in_process

ONE_START = ("exact RBF", "exact Matern52")
EXACT = (*ONE_START, *(f"{method}, best of {number}" for number in (2, 4) for method in ONE_START))
TO_ITS_END = ", to its end"  # with SciPy's own limit of iterations
REGRESSION = (*EXACT, "VFE", "FITC", "power 0.5", "SVGP", "VFE" + TO_ITS_END)
CLASSIFICATION = ("VGP", "EP", "Laplace", "SVGP", "VGP" + TO_ITS_END)
METHODS = list(dict.fromkeys(REGRESSION + CLASSIFICATION))
TWO_FOR_ONE = {f"{method}, 2 for 1": (f"{method}, best of 2", method) for method in ONE_START}
COMPARED = {method: (method, method) for method in METHODS} | TWO_FOR_ONE  # our method and the peers'
SPLITS, INDUCING, STEPS, BATCH, RATE = 3, 50, 2000, 256, 0.01
LIMIT, SCIPY_LIMIT = 1000, 15_000
AGAIN = "again"
PACKAGE = Path(__file__).resolve().parent.parent / "gp_thesis"
ALL_SPLITS = 20  # of which the first few are run when nobody says
PROBLEMS = {**{f"{name} {split}": REGRESSION for name in ("yacht", "energy") for split in range(ALL_SPLITS)},
            "breast cancer": CLASSIFICATION, **{f"breast cancer {split}": CLASSIFICATION for split in range(1, ALL_SPLITS)},
            "a thousand rows": ("exact RBF",), "a million rows": ("SVGP",)}
SIZES = {"a thousand rows": (1000, 3), "a million rows": (1_000_000, 8)}  # made up, N and D


def parts(name: str) -> tuple[str, int]:
    "The data and the split; a name without a number is split 0."
    data, _, split = name.rpartition(" ")
    return (data, int(split)) if split.isdigit() else (name, 0)


BY_DEFAULT = [name for name, methods in PROBLEMS.items() if parts(name)[1] < (SPLITS if methods == REGRESSION else 1)]


def problem(name: str) -> dict:
    "Arrays X, y, Xs, ys in standard units and inducing inputs Z; labels are 0 and 1. Standard splits of UCI's, else splits at random."
    data, split = parts(name)
    kind = "labels" if data == "breast cancer" else "values"
    random = np.random.default_rng(split if kind == "labels" else 0)
    if data == "breast cancer":
        from sklearn.datasets import load_breast_cancer
        X, y = load_breast_cancer(return_X_y=True)
        order = random.permutation(len(X))
        train, test = order[:400], order[400:]
    elif name in SIZES:
        N, D = SIZES[name]
        X = random.standard_normal((N + 1000, D))
        y = np.sin(X @ random.standard_normal((D, 3))).sum(1) + 0.3 * random.standard_normal(len(X))
        train, test = np.arange(N), np.arange(N, len(X))
    else:
        from gp_thesis.data import standard_split, uci
        both = standard_split(uci(data), split)
        X, y = (np.concatenate([getattr(part, array) for part in both]) for array in "Xy")
        train, test = np.split(np.arange(len(X)), [len(both[0].X)])
    unit = lambda a: (a - a[train].mean(0)) / np.where(a[train].std(0) > 0, a[train].std(0), 1)
    X, y = unit(X), y.astype(float) if kind == "labels" else unit(y)
    Z = X[random.permutation(train)[:INDUCING if name != "a million rows" else 200]]
    return {"X": X[train], "y": y[train], "Xs": X[test], "ys": y[test], "Z": Z, "kind": kind}


def starts(method: str) -> int:
    "Of how many starts the method takes the best."
    return int(method.rpartition("best of ")[2]) if "best of " in method else 1


def regression_scores(mean, variance, ys) -> tuple[np.ndarray, np.ndarray]:
    "Squared error and log density of each test row."
    return (ys - mean) ** 2, -0.5 * (np.log(2 * np.pi * variance) + (ys - mean) ** 2 / variance)


def label_scores(p, ys) -> tuple[np.ndarray, np.ndarray]:
    "Error (1 or 0) and log probability of each test row."
    return (p > 0.5) != ys, np.log(np.where(ys > 0, p, 1 - p))


def gp_thesis(method, X, y, Xs, ys, Z, kind, limit):
    import gp_thesis as gpt
    import jax
    import optax
    jax.config.update("jax_enable_x64", True)
    kernel = (gpt.Matern52 if "Matern52" in method else gpt.RBF)(np.ones(X.shape[1]))
    model = gpt.GP(kernel, gpt.Bernoulli() if kind == "labels" else gpt.Gaussian(0.1))
    inducing, settings = gpt.InducingPoints(Z), dict(steps=limit)
    if method == "SVGP":
        settings = dict(optimiser=optax.adam(RATE), steps=STEPS, batch_size=BATCH, key=jax.random.key(0))
    if (number := starts(method)) > 1:
        settings |= dict(restarts=number, key=jax.random.key(0))
    approx = {"exact": gpt.Exact, "VGP": lambda model: gpt.VGP(model, len(X)), "EP": gpt.EP}.get(method.split()[0])
    sparse = {"VFE": gpt.VFE, "FITC": gpt.FITC, "SVGP": gpt.SVGP,
              "power 0.5": lambda model, inducing: gpt.PowerEPRegression(model, inducing, 0.5)}.get(method)
    if approx is None and sparse is None:
        return None
    approx = approx(model) if sparse is None else sparse(model, inducing)
    fitted = gpt.fit(approx, (X, y), progress=False, **settings)
    post = fitted.approx.posterior(X, y)
    mean, variance = (np.asarray(a) for a in post.predict_y(Xs))
    scores = label_scores(mean, ys) if kind == "labels" else regression_scores(mean, variance, ys)
    return fitted.history.objective[-1] if method != "SVGP" else None, *scores


def again(method, **data):
    return gp_thesis(method, **data) if method.startswith("exact") else None


def sklearn(method, X, y, Xs, ys, Z, kind, limit):
    from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel
    scale = np.ones(X.shape[1])
    if method == "Laplace":
        model = GaussianProcessClassifier(ConstantKernel() * RBF(scale)).fit(X, y)
        return model.log_marginal_likelihood_value_, *label_scores(model.predict_proba(Xs)[:, 1], ys)
    if not method.startswith("exact"):
        return None
    kernel = Matern(scale, nu=2.5) if "Matern52" in method else RBF(scale)
    model = GaussianProcessRegressor(ConstantKernel() * kernel + WhiteKernel(0.1), n_restarts_optimizer=starts(method) - 1, random_state=0).fit(X, y)
    mean, deviation = model.predict(Xs, return_std=True)
    return model.log_marginal_likelihood_value_, *regression_scores(mean, deviation**2, ys)


def gpflow(method, X, y, Xs, ys, Z, kind, limit):
    import gpflow
    import tensorflow as tf
    kernel = (gpflow.kernels.Matern52 if method.endswith("Matern52") else gpflow.kernels.SquaredExponential)(lengthscales=np.ones(X.shape[1]))
    data, y = (X, y[:, None]), y[:, None]
    if method == "SVGP":
        likelihood = gpflow.likelihoods.Bernoulli() if kind == "labels" else gpflow.likelihoods.Gaussian(0.1)
        model = gpflow.models.SVGP(kernel, likelihood, Z, num_data=len(X))
        batches = iter(tf.data.Dataset.from_tensor_slices(data).repeat().shuffle(min(len(X), 100_000), seed=0).batch(BATCH))
        loss, optimiser = model.training_loss_closure(batches), tf.optimizers.Adam(RATE)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                value = loss()
            optimiser.apply_gradients(zip(tape.gradient(value, model.trainable_variables), model.trainable_variables))

        for _ in range(STEPS):
            step()
        objective = None
    else:
        models = {"exact": lambda: gpflow.models.GPR(data, kernel, noise_variance=0.1),
                  "VFE": lambda: gpflow.models.SGPR(data, kernel, Z, noise_variance=0.1),
                  "FITC": lambda: gpflow.models.GPRFITC(data, kernel, Z, noise_variance=0.1),
                  "VGP": lambda: gpflow.models.VGP(data, kernel, gpflow.likelihoods.Bernoulli())}
        if (make := models.get(method.split()[0])) is None:
            return None
        model = make()
        gpflow.optimizers.Scipy().minimize(model.training_loss, model.trainable_variables, options={"maxiter": limit})
        objective = -float(model.training_loss())
    mean, variance = (a.numpy()[:, 0] for a in model.predict_y(Xs))
    scores = label_scores(mean, ys) if kind == "labels" else regression_scores(mean, variance, ys)
    return objective, *scores


def gpytorch(method, X, y, Xs, ys, Z, kind, limit):
    import gpytorch
    import torch
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    X, y, Xs, Z = map(torch.from_numpy, (X, y, Xs, Z))
    base = gpytorch.kernels.MaternKernel(2.5, ard_num_dims=X.shape[1]) if method.endswith("Matern52") else gpytorch.kernels.RBFKernel(ard_num_dims=X.shape[1])
    kernel = gpytorch.kernels.ScaleKernel(base)
    base.lengthscale, kernel.outputscale = 1.0, 1.0
    likelihood = gpytorch.likelihoods.BernoulliLikelihood() if kind == "labels" else gpytorch.likelihoods.GaussianLikelihood()
    if kind == "values":
        likelihood.noise = 0.1
    prior = lambda self, X: gpytorch.distributions.MultivariateNormal(gpytorch.means.ZeroMean()(X), kernel(X))
    if method == "SVGP":
        class Model(gpytorch.models.ApproximateGP):
            def __init__(self):
                q = gpytorch.variational.CholeskyVariationalDistribution(len(Z))
                super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q))
                self.kernel = kernel
            forward = prior
        model = Model()
        objective, parameters = gpytorch.mlls.VariationalELBO(likelihood, model, len(X)), {*model.parameters(), *likelihood.parameters()}
        optimiser = torch.optim.Adam(parameters, lr=RATE)
        for _ in range(STEPS):
            rows = torch.randint(len(X), (BATCH,))
            optimiser.zero_grad()
            (-objective(model(X[rows]), y[rows])).backward()
            optimiser.step()
        value = None
    elif method == "VFE" or method.startswith("exact"):
        class Model(gpytorch.models.ExactGP):
            forward = prior
        model = Model(X, y, likelihood)
        if method == "VFE":
            kernel = gpytorch.kernels.InducingPointKernel(kernel, Z, likelihood)
        model.kernel = kernel
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        optimiser = torch.optim.LBFGS([*model.parameters()], max_iter=limit, line_search_fn="strong_wolfe")

        def closure():
            optimiser.zero_grad()
            loss = -objective(model(X), y)
            loss.backward()
            return loss

        model.train(), optimiser.step(closure)
        value = -float(closure()) * len(X)
    else:
        return None
    model.eval(), likelihood.eval()
    with torch.no_grad():
        found = likelihood(model(Xs))
        mean, variance = found.mean.numpy(), found.variance.numpy()
    return value, *(label_scores(mean, ys) if kind == "labels" else regression_scores(mean, variance, ys))


def worker(library: str, method: str, file: str) -> dict:
    "What one run found, or `absent`."
    if starts(method) > 1 and library in ("gpflow", "gpytorch"):
        return {"absent": True}
    with np.load(file) as arrays:
        arrays = {name: arrays[name] for name in arrays}
    arrays["kind"] = str(arrays["kind"])
    if library == AGAIN:
        import jax
        jax.config.update("jax_compilation_cache_dir", str(Path(file).with_name("programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    limit = SCIPY_LIMIT if method.endswith(TO_ITS_END) else LIMIT
    found = globals()[library](method.removesuffix(TO_ITS_END), limit=limit, **arrays)
    if found is None:
        return {"absent": True}
    used = resource.getrusage(resource.RUSAGE_SELF)
    objective, errors, densities = found
    np.save(of_rows(file, library), (errors, densities))
    error = np.mean(errors) if arrays["kind"] == "labels" else np.sqrt(np.mean(errors))
    if not np.isfinite(error + np.mean(densities)):
        return {"error": "predictions that are no numbers"}
    return {"objective": None if objective is None else float(objective), "error": float(error), "density": float(np.mean(densities)),
            "processor": used.ru_utime + used.ru_stime}


def of_rows(file, library: str) -> Path:
    "Where the scores of each test row wait until all libraries have run."
    return Path(file).with_name(f"{library}.npy")


def behind(file, libraries) -> dict:
    "Our scores less a peer's, error (squared error for values) and log density: means of paired differences and their standard errors."
    rows = {library: np.load(of_rows(file, library)) for library in libraries if of_rows(file, library).exists()}
    if OURS not in rows:
        return {}
    gaps = {library: rows[OURS] - rows[library] for library in rows.keys() - {OURS, AGAIN}}
    return {library: {score: [float(g.mean()), float(g.std(ddof=1) / np.sqrt(len(g)))] for score, g in zip(("error", "density"), gap)}
            for library, gap in gaps.items()}


def side_by_side(methods: dict, compared: str) -> dict:
    "Our row and the peers' of one comparison."
    ours, theirs = COMPARED[compared]
    rows = {library: found for library, found in methods.get(theirs, {}).items() if library not in (OURS, AGAIN)}
    return rows | {library: found for library, found in methods.get(ours, {}).items() if library in (OURS, AGAIN)}


def over_splits(runs: dict) -> str:
    "Scores beside each peer's, means over the splits that both have run, the standard error of paired differences, and when."
    lines = [f"{'over the splits of':<20}{'method':<27}{'peer':<10}{'error':>7}{'peer':>9}{'ours less that':>18}{'density':>10}{'peer':>9}{'ours less that':>18}  measured"]
    peers = ("gpflow", "gpytorch", "sklearn")
    for data, method, peer in product(dict.fromkeys(parts(name)[0] for name in runs), COMPARED, peers):
        each = [side_by_side(runs[name], method) for name in runs if parts(name)[0] == data]
        pairs = [(rows[OURS], rows[peer]) for rows in each if all("processor" in rows.get(library, {}) for library in (OURS, peer))]
        if len(pairs) < 2:
            continue
        line = f"{f'{data}, {len(pairs)}':<20}{method:<27}{peer:<10}"
        for score in ("error", "density"):
            ours, theirs = np.array([[run[score] for run in pair] for pair in pairs]).T
            gap = ours - theirs
            line += f"{ours.mean():8.4f}{theirs.mean():9.4f}{gap.mean():10.4f} ± {gap.std(ddof=1) / np.sqrt(len(gap)):.4f} "
        dates = sorted({run["date"] for pair in pairs for run in pair})
        lines.append(f"{line} {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}")
    return "\n".join(lines)


def over_rows(runs: dict) -> str:
    "Where the name has no number: our scores less each peer's, with the standard error of paired differences over the test rows."
    lines = [f"{'over test rows of':<20}{'method':<27}{'peer':<11}{'ours less peer: error':>24}{'log density':>20}"]
    for name, method, peer, found in ((name, method, peer, found) for name, methods in runs.items() if parts(name)[0] == name
                                      for method, rows in methods.items() for peer, found in rows.items()):
        if gap := found.get("ours less this"):
            lines.append(f"{name:<20}{method:<27}{peer:<11}" + "".join(f"{gap[score][0]:{w}.4f} ± {gap[score][1]:.4f}" for score, w in (("error", 15), ("density", 11))))
    return "\n".join(lines)


def quickest(rows: dict, least_objective: float = -np.inf) -> tuple[str, dict] | None:
    "Of the peers that ended, those at least so far if they say how far, the one of the least processor time."
    far = lambda found: found["objective"] is None or found["objective"] >= least_objective
    ended = [(library, found) for library, found in rows.items() if library not in (OURS, AGAIN) and "processor" in found and far(found)]
    return min(ended, key=lambda row: row[1]["processor"], default=None)


def in_time(runs: dict, methods, what: str) -> list[str]:
    "In how many whole runs we took at most the fastest peer's processor time."
    seconds = lambda found: found["processor"]
    longer, lines, as_far = [], [], []
    for name, method in ((name, method) for name in runs for method in methods):
        rows = side_by_side(runs[name], method)
        ours, peer = rows.get(OURS, {}), quickest(rows)
        if not peer or "processor" not in ours:
            continue
        goal = -np.inf if ours["objective"] is None else ours["objective"] - 1
        level = quickest(rows, goal)
        as_far.append(level is None or seconds(ours) <= seconds(level[1]))
        longer.append(seconds(ours) > seconds(peer[1]))
        if longer[-1]:
            short = "" if ours["objective"] is None else f", objective less ours {peer[1]['objective'] - ours['objective']:8.1f}"
            again = f", {AGAIN} {seconds(rows[AGAIN]):.2f}" if "processor" in rows.get(AGAIN, {}) else ""
            lines.append(f"  {f'{name} {method}':<32}{seconds(ours):6.2f} s, {peer[0]:<9}{seconds(peer[1]):5.2f}{short}{again}")
    return [f"processor time at most the fastest peer's in {longer.count(False)} of {len(longer)} {what}, "
            f"that of the fastest which ended no more than a nat lower in {sum(as_far)}" + ("; longer:" if lines else ""), *lines]


def in_all(runs: dict) -> str:
    "How often we took at most the fastest peer's processor time, and how often four starts found at least the peer's evidence."
    lines = in_time(runs, METHODS, "whole runs") + in_time(runs, TWO_FOR_ONE, "with two starts of ours for one of theirs")
    four = {f"{name} {method}": rows for name, methods in runs.items() for method, rows in methods.items() if method.endswith("best of 4")}
    gains = {what: rows[OURS]["objective"] - rows["sklearn"]["objective"] for what, rows in four.items()
             if all("objective" in rows.get(library, {}) for library in (OURS, "sklearn"))}
    if gains:
        lines.append(f"evidence of four starts less scikit-learn's: {min(gains.values()):.1e} to {max(gains.values()):.1e}, "
                     f"not below by more than .001 in {sum(gain > -1e-3 for gain in gains.values())} of {len(gains)}")
    return "\n".join(lines)


def whole_run(library, method, file) -> dict:
    "What a run in a process of its own found, its seconds and its date."
    of_rows(file, library).unlink(missing_ok=True)
    run = ("first_hour.py", "--worker", library, method, file)
    if library == AGAIN:
        in_process(*run)
    start = time.perf_counter()
    found = in_process(*run)
    return found | {"wall": time.perf_counter() - start, "date": date.today().isoformat()}


def middle(found: list[dict]) -> dict:
    "Of several runs the one of median processor time; one that failed, if any did."
    return next((run for run in found if "processor" not in run), sorted(found, key=lambda run: run.get("processor", 0))[(len(found) - 1) // 2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {[*BY_DEFAULT]}, which are run by default, or further splits, such as 'yacht 7'")
    libraries = ["gpflow", "gpytorch", "sklearn", OURS, AGAIN]
    parser.add_argument("--libraries", nargs="*", choices=libraries, default=libraries, help="with none: only what is recorded")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=[name for name in METHODS if not name.endswith(TO_ITS_END)],
                        help="such as 'exact RBF'; by default all but those to the end")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each in turns, of which the one of median processor time counts")
    parser.add_argument("--folder", default="", help="within results/, for another kind of machine, such as intel")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave results/ alone")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(*options.worker)))
        return 0
    compileall.compile_dir(PACKAGE, quiet=1)                                   # as pip does with what it installs: the peers
    file_of_runs = str(Path(options.folder, "first_hour"))
    before, failed = recorded(file_of_runs), 0
    runs = before.get("runs", {})
    for found in (found for methods in runs.values() for rows in methods.values() for found in rows.values()):
        found.setdefault("date", before["date"])                               # of rows without one of their own
    print(in_words())
    print(f"{'':<16}{'method':<27}{'library':<11}{'objective':>11}{'error':>9}{'density':>9}{'wall s':>9}{'processor s':>13}")
    for name in (options.names or BY_DEFAULT) if options.libraries else ():
        runs.setdefault(name, {})
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "problem.npz")
            np.savez(file, **problem(name))
            for method in (method for method in PROBLEMS[name] if method in options.methods):
                rounds = [{library: whole_run(library, method, file) for library in options.libraries} for _ in range(options.rounds)]
                for library in options.libraries:
                    found = middle([taken[library] for taken in rounds])
                    if "absent" in found:
                        continue
                    runs[name].setdefault(method, {})[library] = found
                    line = f"{name:<16}{method:<27}{library:<11}"
                    if "processor" not in found:
                        failed += library == OURS
                        print(f"{line}failed: {found['error']}", flush=True)
                        continue
                    value = "-" if found["objective"] is None else f"{found['objective']:.1f}"
                    print(f"{line}{value:>11}{found['error']:9.4f}{found['density']:9.3f}{found['wall']:9.1f}{found['processor']:13.1f}", flush=True)
                for library, gap in behind(file, options.libraries).items():
                    runs[name][method][library]["ours less this"] = gap
        if options.write:
            write(file_of_runs, {"title": __doc__.splitlines()[0].split(":")[0], "steps": STEPS, "batch": BATCH, "runs": runs})
    print(over_splits(runs), over_rows(runs), in_all(runs), sep="\n\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
