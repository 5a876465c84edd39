"""The spread of fifty evaluations of the evidence and its gradient with two busy processes beside.

    python benchmarks/steady.py [--no-write] [rows ...]

Three ways: by a program of the user's own as JAX runs it, where LAPACK has a thread for each core; by the same program
within `one_blas_thread`; and the value alone by the method, which is always within it. Seconds of the wall clock, and of the
processor over all threads. Writes results/steady.json after each number of rows, and keeps what it holds of others from the same
kind of machine; 5000 rows take a quarter of an hour."""

import argparse
import json
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext

import numpy as np
from problems import regression
from report import recorded, write
from run import in_process

SIZES, REPETITIONS, BUSY = (300, 691, 2000, 5000), 50, 2


@contextmanager
def busy_process():
    "A process that does nothing as fast as it can."
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()


def evaluations(size: int) -> dict:
    "Seconds and processor seconds of each evaluation, by the way it was asked for."
    import equinox as eqx
    import gp_thesis as gpt
    import jax
    from worker import timed

    jax.config.update("jax_enable_x64", True)
    problem = regression(size, 8, "float64")
    X, y = problem.X, problem.y
    approx = gpt.Exact(gpt.GP(gpt.RBF(problem.lengthscale, problem.variance), gpt.Gaussian(problem.noise)))
    trainable, rest = gpt.partition(approx)
    own = jax.jit(jax.value_and_grad(lambda part: eqx.combine(part, rest).objective(X, y)))
    ways = {"own program": (nullcontext, lambda: own(trainable)),
            "own program, one_blas_thread": (gpt.one_blas_thread, lambda: own(trainable)),
            "objective(X, y)": (nullcontext, lambda: approx.objective(X, y))}
    found = {}
    for way, (context, function) in ways.items():
        with context():
            jax.block_until_ready(function())
            times = [timed(lambda: jax.block_until_ready(function()))[:2] for _ in range(REPETITIONS)]
        found[way] = dict(zip(("wall", "processor"), map(list, zip(*times))))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", type=int, help=f"{SIZES} by default")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave results/ alone")
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.size:
        print(json.dumps(evaluations(options.size)))
        return 0
    results = recorded("steady").get("rows", {})
    print(f"{'rows':>6} {'':<30}{'wall: least':>12}{'median':>9}{'most':>9}{'processor: median':>19}{'most':>9}   milliseconds")
    for size in map(str, options.rows or SIZES):
        with ExitStack() as stack:
            for _ in range(BUSY):
                stack.enter_context(busy_process())
            time.sleep(1)
            results[size] = in_process("steady.py", "--size", size)
        if "error" in results[size]:
            print(size, results[size]["error"], file=sys.stderr)
            return 1
        for way, times in results[size].items():
            wall, processor = (1e3 * np.array(times[kind]) for kind in ("wall", "processor"))
            print(f"{size:>6} {way:<30}{wall.min():12.1f}{np.median(wall):9.1f}{wall.max():9.1f}"
                  f"{np.median(processor):19.1f}{processor.max():9.1f}", flush=True)
        if options.write:
            write("steady", {"title": __doc__.splitlines()[0], "busy processes": BUSY, "rows": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
