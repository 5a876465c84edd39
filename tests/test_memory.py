"Memory at full size, in processes of their own: exact regression on ten thousand rows, the sparse bound on a million."
import json
import math
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "memory.py"


def measure(name, rows):
    done = subprocess.run([sys.executable, SCRIPT, name, str(rows)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["size"] == rows and measured["before"] < measured["peak"]
    return measured


def numbers(measured):
    found = [measured["objective"], *(g for gradient in measured["gradient"].values() for g in gradient)]
    assert all(map(math.isfinite, found))
    return found


def test_exact_objective_and_gradient_stay_within_the_limit():
    measured = measure("exact", 10_000)
    assert len(numbers(measured)) == 1 + 8 + 1 + 1  # lengthscales, variance, noise
    assert measured["peak"] <= 6.0  # GiB


def test_a_million_rows_stream_within_the_limit():
    measured = measure("streamed", 1_000_000)
    assert len(numbers(measured)) == 1 + 8 + 1 + 1 + 200 * 8
    assert math.isclose(measured["pass"]["objective"], measured["objective"], rel_tol=1e-9)
    assert measured["pass"]["peak"] <= 2.0 and measured["peak"] <= 2.0  # GiB; batches from disk, then the gradient in memory
