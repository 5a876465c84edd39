"""One library, one benchmark, one dtype, in a process of its own: `worker.py BENCHMARK LIBRARY DTYPE REPETITIONS`.

The last line of output is JSON: the first call, the later ones (seconds), and what the last call returned."""

import importlib
import importlib.metadata
import json
import sys
import time

import numpy as np
from machine import others_share
from problems import BENCHMARKS


def seconds(step):
    start = time.perf_counter()
    result = step()
    return time.perf_counter() - start, result


def measure(benchmark: str, library: str, dtype: str, repetitions: int) -> dict:
    module = importlib.import_module(f"with_{library}")
    if not hasattr(module, benchmark) or dtype not in getattr(module, "DTYPES", (dtype,)):
        return {"absent": f"{library} has no {benchmark} in {dtype}"}
    step, read = getattr(module, benchmark)(BENCHMARKS[benchmark].problem(dtype))
    first, _ = seconds(step)
    share = others_share()
    times, results = zip(*(seconds(step) for _ in range(repetitions)))
    others = share()
    objective, gradient = read(results[-1])
    return {
        "first": first,
        "times": times,
        "others": others,
        "objective": float(objective),
        "gradient": {name: np.asarray(values, float).ravel().tolist() for name, values in gradient.items()},
        "versions": {name: importlib.metadata.version(name) for name in module.PACKAGES},
    }


if __name__ == "__main__":
    benchmark, library, dtype, repetitions = sys.argv[1:]
    print(json.dumps(measure(benchmark, library, dtype, int(repetitions))))
