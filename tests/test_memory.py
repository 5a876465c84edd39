"""Memory in processes of their own, in units of what the method has to hold. `make peers` measures the same at ten thousand
and a million rows."""
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

GIBI, COMPILER = 2**30, 0.15  # GiB that compilation takes for itself
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


def test_exact_objective_and_gradient_hold_five_matrices():
    N = 4000
    measured = measure("exact", N)
    assert len(numbers(measured)) == 1 + 8 + 1 + 1  # lengthscales, variance, noise
    assert measured["peak"] - measured["before"] < 5 * N**2 * 8 / GIBI + COMPILER


def test_streamed_rows_are_never_held_at_once():
    N, M = 400_000, 200
    measured = measure("streamed", N)
    assert len(numbers(measured)) == 1 + 8 + 1 + 1 + M * 8
    assert math.isclose(measured["pass"]["objective"], measured["objective"], rel_tol=1e-9)
    assert measured["pass"]["peak"] - measured["pass"]["before"] < N * M * 8 / GIBI / 2 + COMPILER  # batches from disk
    assert measured["peak"] - measured["pass"]["peak"] < N * M * 8 / GIBI / 2 + COMPILER            # and the gradient in memory


@pytest.mark.parametrize("name", ["stochastic", "tied"])
def test_a_fit_to_rows_on_disk_takes_no_more_memory_than_to_a_twentieth_of_them(name):
    N = 1_000_000
    private = measure(name, N)["private"]
    if None in private["all"]:
        pytest.skip("this system does not tell a process's own pages from those of its files")
    data = N * 9 * 4 / GIBI
    assert max(private["all"][2:]) - min(private["all"][2:]) < data / 2  # flat, once the first steps have been taken
    assert private["all"][-1] - private["few"][-1] < data / 2
