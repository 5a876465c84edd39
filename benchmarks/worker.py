"""One library, one benchmark, one dtype, in a process of its own: `worker.py BENCHMARK LIBRARY DTYPE REPETITIONS`.

The last line of output is JSON: the first call and the later ones in seconds, and what the last call returned."""

import importlib
import importlib.metadata
import json
import sys
import time

import numpy as np
from machine import others_share
from problems import BENCHMARKS


def timed(step):
    "Seconds on the wall, seconds of processor over all threads, and what `step` returned."
    wall, processor = time.perf_counter(), time.process_time()
    result = step()
    return time.perf_counter() - wall, time.process_time() - processor, result


def few(values, most: int = 2000) -> list[float]:
    "`values` as a list; if there are very many, a hundred sums of them with random signs, which differ if they do."
    values = np.asarray(values, float).ravel()
    if len(values) > most:
        values = values * np.random.default_rng(0).choice([-1.0, 1.0], len(values))
        values = np.add.reduceat(values, np.linspace(0, len(values), 100, endpoint=False).astype(int))
    return values.tolist()


def measure(benchmark: str, library: str, dtype: str, repetitions: int) -> dict:
    module = importlib.import_module(f"with_{library}")
    if not hasattr(module, benchmark) or dtype not in getattr(module, "DTYPES", (dtype,)):
        return {"absent": f"{library} has no {benchmark} in {dtype}"}
    step, read = getattr(module, benchmark)(BENCHMARKS[benchmark].problem(dtype))
    first, _, _ = timed(step)
    share = others_share()
    times, processor, results = zip(*(timed(step) for _ in range(repetitions)))
    others = share()
    objective, gradient = read(results[-1])
    return {
        "first": first,
        "times": times,
        "processor": processor,
        "others": others,
        "objective": float(objective),
        "gradient": {name: few(values) for name, values in gradient.items()},
        "versions": {name: importlib.metadata.version(name) for name in module.PACKAGES},
    }


if __name__ == "__main__":
    benchmark, library, dtype, repetitions = sys.argv[1:]
    print(json.dumps(measure(benchmark, library, dtype, int(repetitions))))
