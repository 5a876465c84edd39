"""Times this package and its peers in turn, each in a process of its own, and measures our peak memory.

    python benchmarks/run.py                 # every benchmark
    python benchmarks/run.py exact --libraries gpflow gp_thesis --dtypes float64 --rounds 1 --no-write
    python benchmarks/run.py --gpu --folder h200

Exit status 1 where libraries disagree, ours fails, or memory is over its limit; a failing peer is only reported."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from machine import facts, gpu_in_words, in_words, wait_for_quiet
from problems import BENCHMARKS
from report import OURS, compare, disagreements, show, speed_ratio, write

LIBRARIES = ("gpflow", "gpytorch", "gpjax", "sklearn", OURS)
DTYPES = ("float64", "float32")
CORES = 2
MEMORY = {"exact": (10_000, 6.0), "streamed": (1_000_000, 2.0), "stochastic": (1_000_000, 1.0), "steps": (1_000_000, 1.0)}  # rows and the limit in GiB
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3"}
NO_GPU = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def two_cores() -> None:
    "Keep to the first cores allowed, so that larger machines give comparable numbers; Linux only."
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


def in_process(script: str, *arguments, gpu: bool = False) -> dict:
    "The JSON on the last line that `script` prints; the last line of its errors under `error` if it fails."
    environment, limit = ({}, None) if gpu else (NO_GPU, two_cores)
    command = [sys.executable, Path(__file__).with_name(script), *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT | environment, capture_output=True, text=True, preexec_fn=limit)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def take_turns(name: str, dtype: str, options) -> tuple[dict[str, dict], dict[str, str]]:
    "Rows of the libraries that have this benchmark, and the errors of those that failed; round after round."
    rounds, failures, absent = {library: [] for library in options.libraries}, {}, set()
    for _ in range(options.rounds):
        for library in [x for x in options.libraries if x not in failures and x not in absent]:
            options.patience -= wait_for_quiet(options.patience)
            measured = in_process("worker.py", name, library, dtype, BENCHMARKS[name].repetitions, gpu=options.gpu)
            if "error" in measured:
                failures[library] = measured["error"]
            elif "absent" in measured:
                absent.add(library)
            else:
                rounds[library].append(measured)
    return {library: row(found) for library, found in rounds.items() if found and library not in failures}, failures


def row(rounds: list[dict]) -> dict:
    "One library's rounds together: the first calls apart from the later ones."
    times, last = [seconds for measured in rounds for seconds in measured["times"]], rounds[-1]
    return {
        "first": median(measured["first"] for measured in rounds),
        "median": median(times),
        "min": min(times),
        "max": max(times),
        "processor": median(seconds for measured in rounds for seconds in measured["processor"]),
        "calls": len(times),
        "others": None if last["others"] is None else max(measured["others"] for measured in rounds),
        **{key: last[key] for key in ("objective", "gradient", "versions")},
    }


def time_benchmark(name: str, options) -> list[str]:
    "Time, show and write one benchmark; what went wrong comes back as sentences."
    benchmark, results, wrong, reference = BENCHMARKS[name], {}, [], None
    where = gpu_in_words() if options.gpu else f"of which {CORES} are used"
    print(f"{name}: {benchmark.title}; milliseconds\n{in_words()}, {where}\n", flush=True)
    for dtype in options.dtypes:
        rows, failures = take_turns(name, dtype, options)
        reference = reference or next((row for row in rows.values() if row["gradient"]), None)
        compare(rows, reference)
        ratio = speed_ratio(rows)
        show(dtype, rows, failures, ratio)
        results[dtype] = {"ratio": ratio, "libraries": rows, "failures": failures}
        wrong += disagreements(rows, dtype, benchmark.tolerance)
        wrong += [f"{OURS} {dtype}: {failures[OURS]}"] if OURS in failures else []
    if options.write:
        machine = facts() | ({"gpu": gpu_in_words()} if options.gpu else {})
        write(str(Path(options.folder, name)), {"machine": machine, "title": benchmark.title, "wanted_ratio": benchmark.wanted, **results})
    return wrong


def measure_memory(options) -> list[str]:
    "Peak memory of our objectives and gradients at full size."
    wrong, found = [], {}
    for name, (rows, limit) in MEMORY.items():
        measured = in_process("memory.py", name, rows)
        if "error" in measured:
            wrong.append(f"memory, {name}: {measured['error']}")
            continue
        stages = {"one pass over the rows": measured["pass"]} if "pass" in measured else {}
        for stage, result in {**stages, measured.get("stage", "objective and gradient"): measured}.items():
            print(f"memory, {name}, N={rows}, D=8, {measured.get('dtype', 'float64')}: {stage}: peak {result['peak']:.2f} GiB "
                  f"(limit {limit:.0f}) in {result['seconds']:.1f} s")
        if "disk" in measured:
            print(f"memory, {name}: {1e3 * measured['disk']['step']:.2f} ms a step, {1e3 * measured['memory']['step']:.2f} ms with the data in memory")
        wrong += [f"memory, {name}: {measured['peak']:.2f} GiB"] if measured["peak"] > limit else []
        found[name] = {"limit": limit, **measured}
    if options.write:
        write(str(Path(options.folder, "memory")), found)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Times this package and its peers; times in milliseconds.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {[*BENCHMARKS, 'memory']}; all by default")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--rounds", type=int, default=3, help="turns that each library has")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds, in all, to wait for a quiet machine")
    parser.add_argument("--folder", default="", help="within results/, for another kind of machine, such as intel")
    parser.add_argument("--gpu", action="store_true", help="leave a GPU, and all cores, to the libraries; without memory")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave results/ alone")
    options = parser.parse_args()
    names = options.names or [*BENCHMARKS, *([] if options.gpu else ["memory"])]
    if unknown := set(names) - {*BENCHMARKS, "memory"}:
        parser.error(f"unknown benchmark {sorted(unknown)}; there are {[*BENCHMARKS, 'memory']}")
    wrong = []
    for name in names:
        wrong += measure_memory(options) if name == "memory" else time_benchmark(name, options)
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
