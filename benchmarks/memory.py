"""Peak memory in a process of its own: `memory.py NAME N` prints a line of JSON.

`exact`: the exact objective and its gradient. `streamed`: the variational bound with 200 inducing points, its statistics summed
over batches of rows read from disk, and then its gradient with the data in memory."""

import json
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
    print(json.dumps({"size": size} | {"exact": exact, "streamed": streamed}[name](size)))
