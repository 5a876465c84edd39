"""Memory at full size: exact regression on ten thousand rows, in a process of its own."""

import json
import math
import subprocess
import sys
from pathlib import Path

ROWS, LIMIT = 10_000, 6.0  # GiB
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "memory.py"


def test_exact_objective_and_gradient_stay_within_the_limit():
    done = subprocess.run([sys.executable, SCRIPT, str(ROWS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["size"] == ROWS
    values = [measured["objective"], *(g for gradient in measured["gradient"].values() for g in gradient)]
    assert len(values) == 1 + 8 + 1 + 1 and all(map(math.isfinite, values))  # lengthscales, variance, noise
    assert measured["before"] < measured["peak"] <= LIMIT
