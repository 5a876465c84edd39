"""Peak memory of the exact objective and its gradient, in a process of its own: `memory.py N` prints a line of JSON."""

import json
import sys

import numpy as np
from machine import peak_memory
from problems import regression
from with_gp_thesis import exact
from worker import timed


def measure(size: int) -> dict:
    step, read = exact(regression(size, 8, "float64"))
    before = peak_memory()
    seconds, _, result = timed(step)
    objective, gradient = read(result)
    return {
        "size": size,
        "peak": peak_memory(),
        "before": before,
        "seconds": seconds,
        "objective": float(objective),
        "gradient": {name: np.ravel(values).tolist() for name, values in gradient.items()},
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
