"""Peak memory in a process of its own: `memory.py NAME N` prints a line of JSON.

`exact`: the exact objective and its gradient. `streamed`: the variational bound with 200 inducing points, its statistics summed
over batches of rows read from disk, and then its gradient with the data in memory. `stochastic`: `fit` of an SVGP with 200
inducing points to minibatches of 1000 rows drawn from disk, from a twentieth of the rows and then from all. `tied`: the same of
Power EP with one factor for all rows. `steps`: the time of a step of such a fit, from disk and in memory."""

import json
import re
import sys
import tempfile
from functools import partial
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


def stochastic_problem(size: int, kind: str = "SVGP"):
    "An SVGP, or another class, in single precision, and `fit` for it with settings that all runs share."
    import gp_thesis as gpt
    import jax
    import optax
    from problems import sparse_regression

    problem = sparse_regression(size, 200, 8, "float32")
    inducing = gpt.InducingPoints(problem.Z)
    kernel = gpt.RBF(lengthscale=problem.lengthscale, variance=np.float32(problem.variance))
    approximation = gpt.cast(getattr(gpt, kind)(gpt.GP(kernel, gpt.Gaussian(np.float32(problem.noise))), inducing), np.float32)
    settings = dict(optimiser=optax.adam(0.01), batch_size=1000, key=jax.random.key(0))
    return (problem.X, problem.y), lambda data, **more: gpt.fit(approximation, data, **settings, **more)


def on_disk(arrays, folder: str) -> tuple:
    "The arrays, read from files."
    for number, array in enumerate(arrays):
        np.save(Path(folder, f"{number}.npy"), array)
    return tuple(np.load(Path(folder, f"{number}.npy"), mmap_mode="r") for number in range(len(arrays)))


def stochastic(size: int, kind: str = "SVGP") -> dict:
    data, fit = stochastic_problem(size, kind)
    with tempfile.TemporaryDirectory() as folder:
        data = on_disk(data, folder)
        few = tuple(array[:size // 20] for array in data)

        def train(data):
            private = []  # what the process holds beside the pages of the files, which the system takes back when it needs them
            result = fit(data, steps=100, every=10, callback=lambda *_: private.append(private_memory()))
            return float(result.history.objective[-1]), private

        before = peak_memory()
        train(few), train(data)  # compilation takes memory too
        seconds, _, ((_, for_few), (objective, for_all)) = timed(lambda: (train(few), train(data)))
        return {"before": before, "peak": peak_memory(), "seconds": seconds, "stage": "stochastic fit streamed from disk",
                "dtype": "float32", "objective": objective, "private": {"few": for_few, "all": for_all}}


def steps(size: int) -> dict:
    data, fit = stochastic_problem(size)
    with tempfile.TemporaryDirectory() as folder:
        places = {"disk": on_disk(data, folder), "memory": data}
        before = peak_memory()
        seconds, _, rounds = timed(lambda: [{place: fit(rows, steps=50, every=50).history for place, rows in places.items()}
                                            for _ in range(12)])
        found = {place: {"step": min(histories[place].seconds[-1] for histories in rounds) / 50,
                         "objective": float(rounds[0][place].objective[-1])} for place in places}
        return found | {"before": before, "peak": peak_memory(), "seconds": seconds, "stage": "steps from disk and from memory", "dtype": "float32"}


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


MEASURED = {"exact": exact, "streamed": streamed, "stochastic": stochastic, "steps": steps,
            "tied": partial(stochastic, kind="ApproximatePowerEP")}

if __name__ == "__main__":
    name, size = sys.argv[1], int(sys.argv[2])
    print(json.dumps({"size": size} | MEASURED[name](size)))
