"Memory at full size, in processes of their own: exact regression on ten thousand rows, the sparse bound and a fit on a million."
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "memory.py"


def measure(name, rows):
    users = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # programs compiled as users have them
    done = subprocess.run([sys.executable, SCRIPT, name, str(rows)], env=users, capture_output=True, text=True)
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


def test_a_fit_to_a_million_rows_on_disk_takes_no_more_memory_than_to_fewer_rows():
    few, many = measure("stochastic", 50_000), measure("stochastic", 1_000_000)
    assert many["peak"] <= 1.0  # GiB
    for measured in (few, many):
        assert measured["disk"]["objective"] == measured["memory"]["objective"]  # the same rows, the same arithmetic
    if None in many["private"]:
        pytest.skip("this system does not tell a process's own pages from those of its files")
    data = 1_000_000 * 9 * 4 / 2**30
    assert max(many["private"][2:]) - min(many["private"][2:]) < data / 2        # flat, once the first steps have been taken
    assert abs(many["private"][-1] - few["private"][-1]) < data / 2              # whatever the number of rows
