"""Everything that must hold, `python -m tools.check [NAME ...]`: the export, the site, every notebook and every test file.

Each runs in a process of its own, two at a time, so that its memory goes back when it ends. The processes are forks of one
that has imported what most of them need, and share one cache of compiled programs. One line for each with its processor time and peak memory, the output of what failed, the slowest ten,
and a last line of sums. No NAMEs: all; else only what contains one. Times are printed and never judged."""

import gc
import multiprocessing
import os
import queue
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
FIRST = ["tools.check_export", "tools.site"]    # tests look at what these leave behind
INSTALLED = TOP / ".cache" / "wheel"            # the package as others have it: notebooks are run with it, without the checkout
ALONE = ["tests/test_memory.py"]                # as large as all others together may be
TOTAL_MEMORY, SECONDS = 8.0, 60                 # GiB of all at the same time; processor time above which a line is marked
FORKS = multiprocessing.get_context("forkserver")
# Not the package itself, which some tests must be the first to import; none of these starts a thread.
FORKS.set_forkserver_preload([
    "equinox", "hypothesis", "IPython", "jax", "matplotlib.pyplot", "nbdev.test", "numpyro.distributions", "optax", "pytest",
    "scipy.stats", "seaborn"])
ENVIRONMENT = {
    "GP_THESIS_PROFILE": "quick",
    "OPENBLAS_NUM_THREADS": "1",                            # two processes share two cores; idle threads would spin
    "JAX_COMPILATION_CACHE_DIR": str(TOP / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",      # small programs are many, and the same in every file
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # Programs run once or twice: compiled five times faster, they may run slower. The last digits differ.
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
}


@dataclass
class Done:
    "What came of one process and those it started; memory is that of the largest of them, in GiB."
    name: str
    failed: bool
    seconds: float
    memory: float
    output: str
    counts: dict = field(default_factory=dict)  # of tests, by outcome

    def __str__(self) -> str:
        mark = "FAILED  " if self.failed else "slow    " if self.seconds > SECONDS else "        "
        counts = ", ".join(f"{number} {outcome}" for outcome, number in self.counts.items())
        return f"{mark}{self.seconds:7.1f} s {self.memory:5.1f} GiB  {self.name}  {counts}".rstrip()


def build_wheel() -> None:
    "Build the wheel and unpack it, as an installation would, without what it depends on."
    shutil.rmtree(INSTALLED, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, str(TOP)], check=True)
        subprocess.run([*pip, "install", "--no-deps", "--target", str(INSTALLED), *map(str, Path(folder).glob("*.whl"))], check=True)


def away_from_the_checkout(notebook: str) -> None:
    "A copy of a notebook in an empty folder becomes all that there is, beside the package from the wheel."
    folder = INSTALLED.parent / "alone" / Path(notebook).stem
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(notebook, folder)
    os.chdir(folder)
    sys.path[:] = [str(INSTALLED), *(place for place in sys.path if Path(place).resolve() != TOP)]


def run(name: str) -> bool:
    "Whether `name`, a module, a notebook or a file of tests, failed."
    if name.endswith(".ipynb"):
        away_from_the_checkout(name)
        from matplotlib_inline.config import InlineBackend
        from nbdev.test import test_nb
        InlineBackend.instance(print_figure_kwargs={"bbox_inches": None, "dpi": 30})    # each is drawn once, and small
        return not test_nb(Path(name).name, skip_flags=["notest"])[0]
    if name.endswith(".py"):
        import pytest
        return bool(pytest.main(["-q", "--tb=short", "-W", "ignore:Module already imported", name]))
    runpy.run_module(name, run_name="__main__")
    return False


def work(name: str, output: str, cores: set[int], answer) -> None:
    "Run one check in this process; send whether it failed, its processor time and the peak memory of its largest process."
    if cores:
        os.sched_setaffinity(0, cores)
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)                    # a fork of the server would ignore it
    gc.freeze(), gc.set_threshold(100_000, 50, 100)                             # little of what tracing makes is garbage
    os.chdir(TOP)
    sys.argv = [name]
    failed = True
    try:
        failed = run(name)
    except SystemExit as end:
        failed = bool(end.code)
        print(end.code if isinstance(end.code, str) else "", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    answer.send((failed, sum(each.ru_utime + each.ru_stime for each in used), max(each.ru_maxrss for each in used)))


def outcomes(output: str) -> dict[str, int]:
    "The counts of the last line that pytest prints."
    last = output.strip().rpartition("\n")[2]
    return {outcome: int(number) for number, outcome in re.findall(r"(\d+) (passed|failed|skipped|xfailed|xpassed|error)", last)}


def check(name: str, limit: float, cores: set[int] = frozenset()) -> Done:
    "Run one check to its end, on these processors or on all, and print its line."
    answer, theirs = FORKS.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "output")
        process = FORKS.Process(target=work, args=(name, str(file), cores, theirs))
        process.start()
        theirs.close()
        try:
            failed, seconds, memory = answer.recv()
        except EOFError:                                                        # it was killed
            failed, seconds, memory = True, 0.0, 0
        process.join()
        output = file.read_text(errors="replace") if file.exists() else ""
    kibi = 2**20 if sys.platform != "darwin" else 2**30                         # macOS counts bytes
    done = Done(name, failed or process.exitcode != 0, seconds, memory / kibi, output)
    if process.exitcode:
        done.output += f"\n{name} ended with exit code {process.exitcode}\n"
    if done.memory > limit:
        done.failed, done.output = True, f"{output}\n{name} took {done.memory:.1f} GiB, more than {limit:.1f}\n"
    done.counts = outcomes(output) if name.endswith(".py") else {}
    skipped = re.findall(r"^SKIPPED .*$", output, re.M)
    print("\n".join([str(done), *(" " * 8 + line for line in skipped), *([done.output] if done.failed else [])]), flush=True)
    return done


def halves() -> queue.Queue:
    "The processors of this machine in two parts, one for each process of two: what wanders between them spends a tenth more."
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []      # macOS has no such thing
    free = queue.Queue()
    free.put(set(cores[::2])), free.put(set(cores[1::2] or cores))
    return free


def main(wanted: list[str]) -> int:
    "Run all that is wanted; 1 if something failed, else 0."
    os.environ.update(ENVIRONMENT)                                              # before the first fork
    notebooks, tests = (sorted(map(str, (Path(folder, file.name) for file in (TOP / folder).glob(pattern))),
                               key=lambda name: -(TOP / name).stat().st_size)           # the long ones first
                        for folder, pattern in (("nbs", "*.ipynb"), ("tests", "test_*.py")))
    names = [name for name in [*FIRST, *notebooks, *tests] if not wanted or any(part in name for part in wanted)]
    together = [name for name in names if name not in FIRST + ALONE]
    done = [check(name, TOTAL_MEMORY) for name in names if name in FIRST]
    if any(name.endswith(".ipynb") for name in names):
        build_wheel()
    free = halves()

    def beside_another(name: str) -> Done:
        cores = free.get()
        try:
            return check(name, TOTAL_MEMORY / 2, cores)
        finally:
            free.put(cores)

    with ThreadPoolExecutor(2) as pool:
        done += pool.map(beside_another, together)
    done += [check(name, TOTAL_MEMORY) for name in names if name in ALONE]
    for kind in (".ipynb", ".py"):
        print(f"\nslowest ({kind}), processor time and peak memory")
        print(*sorted((each for each in done if each.name.endswith(kind)), key=lambda each: -each.seconds)[:10], sep="\n")
    print(f"\nprocessor time in all: {sum(each.seconds for each in done) / 60:.1f} minutes")
    total = lambda *kinds: sum(each.counts.get(kind, 0) for each in done for kind in kinds)
    others = sum(each.failed and not each.counts.get("failed") for each in done)         # a notebook, or no test at all
    ran = sum(not each.failed for each in done if not each.name.endswith(".py"))
    print(f"{total('passed', 'xfailed') + ran} passed, {total('failed', 'error', 'xpassed') + others} failed, {total('skipped')} skipped")
    return int(any(each.failed for each in done))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
