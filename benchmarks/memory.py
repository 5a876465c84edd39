"""Peak memory in a process of its own: `memory.py NAME N` prints a line of JSON.

`exact`: the exact objective and its gradient. `streamed`: the variational bound with 200 inducing points, its statistics summed
over batches of rows read from disk, and then its gradient with the data in memory. `stochastic`: `fit` of an SVGP with 200
inducing points to minibatches of 1000 rows drawn from disk, and the time of a step beside that of a fit in memory."""

import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
from machine import peak_memory
from problems import regression
from worker import timed

BATCH = 50_000  # rows read from disk at once


def exact(size: int) -> dict:
    from with_gp_thesis import exact

    return objective_and_gradient(*exact(regression(size, 8, "float64")))


def streamed(size: int) -> dict:
    import with_gp_thesis
    from problems import sparse_regression

    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("X.npy", "y.npy")]
        problem = regression(size, 8, "float64")
        for file, array in zip(files, (problem.X, problem.y)):
            np.save(file, array)
        del problem
        X, y = (np.load(file, mmap_mode="r") for file in files)
        small = sparse_regression(1000, 200, 8, "float64")
        approximation = with_gp_thesis.variational(small)
        before = peak_memory()

        def one_pass():
            total = sum(approximation.statistics(X[i:i + BATCH], y[i:i + BATCH]) for i in range(0, size, BATCH))
            return float(approximation.objective_from(total))

        seconds, _, value = timed(one_pass)
        found = {"pass": {"objective": value, "peak": peak_memory(), "before": before, "seconds": seconds}}
        whole = with_gp_thesis.objective_and_gradient(approximation, np.asarray(X), np.asarray(y))
        return found | objective_and_gradient(*whole)


def stochastic(size: int) -> dict:
    import gp_thesis as gpt
    import jax
    import optax
    from problems import sparse_regression

    problem = sparse_regression(size, 200, 8, "float32")
    inducing = gpt.InducingPoints(problem.Z)
    kernel = gpt.RBF(lengthscale=problem.lengthscale, variance=np.float32(problem.variance))
    approximation = gpt.cast(gpt.SVGP(gpt.GP(kernel, gpt.Gaussian(np.float32(problem.noise))), inducing), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("X.npy", "y.npy")]
        for file, array in zip(files, (problem.X, problem.y)):
            np.save(file, array)
        del problem
        on_disk = tuple(np.load(file, mmap_mode="r") for file in files)
        private = []  # what the process holds beside the pages of the files, which the system takes back when it needs them
        settings = dict(optimiser=optax.adam(0.01), batch_size=1000, key=jax.random.key(0), every=100)
        train = lambda data, steps: gpt.fit(approximation, data, steps=steps, **settings,
                                            callback=lambda *_: private.append(private_memory()))
        before = peak_memory()
        seconds, _, streamed = timed(lambda: train(on_disk, 1000))
        found = {"before": before, "peak": peak_memory(), "seconds": seconds, "private": private[-11:]}
        in_memory = tuple(np.array(array) for array in on_disk)
        rounds = [[train(data, 50).history for data in (on_disk, in_memory)] for _ in range(12)]
        for name, histories in zip(("disk", "memory"), zip(*rounds)):
            found[name] = {"step": min(h.seconds[-1] for h in histories) / 50, "objective": float(histories[0].objective[-1])}
        return found | {"stage": "stochastic fit streamed from disk", "dtype": "float32", "objective": float(streamed.history.objective[-1])}


def private_memory() -> float | None:
    "Resident memory of this process that belongs to no file, in GiB; Linux only."
    status = Path("/proc/self/status")
    found = status.exists() and re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
    return int(found[1]) / 2**20 if found else None


def objective_and_gradient(step, read) -> dict:
    before = peak_memory()
    seconds, _, result = timed(step)
    objective, gradient = read(result)
    return {
        "peak": peak_memory(),
        "before": before,
        "seconds": seconds,
        "objective": float(objective),
        "gradient": {name: np.ravel(values).tolist() for name, values in gradient.items()},
    }


if __name__ == "__main__":
    name, size = sys.argv[1], int(sys.argv[2])
    print(json.dumps({"size": size} | {"exact": exact, "streamed": streamed, "stochastic": stochastic}[name](size)))
