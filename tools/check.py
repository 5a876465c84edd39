"""Everything that must hold, `python -m tools.check [NAME ...]`: the export, the site, every notebook and every test file.

Each runs in a process of its own, two at a time, so that its memory goes back when it ends; they share one cache of
compiled programs. One line for each with its processor time and peak memory, the output of what failed, the slowest ten,
and a last line of sums. No NAMEs: all; else only what contains one. Times are printed and never judged."""

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
FIRST = ["tools.check_export", "tools.site"]    # tests look at what these leave behind
ALONE = ["tests/test_memory.py"]                # as large as all others together may be
TOTAL_MEMORY, SECONDS = 8.0, 60                 # GiB of all at the same time; processor time above which a line is marked
NOTEBOOK = "import sys; from nbdev.test import test_nb; sys.exit(not test_nb(*sys.argv[1:], skip_flags=['notest'], basepath='.')[0])"
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


def command(name: str) -> list[str]:
    "The arguments of Python that check `name`: a module, a notebook or a file of tests."
    if name.endswith(".ipynb"):
        return ["-c", NOTEBOOK, name]
    return ["-m", "pytest", "-q", "--tb=short", name] if name.endswith(".py") else ["-m", name]


def outcomes(output: str) -> dict[str, int]:
    "The counts of the last line that pytest prints."
    last = output.strip().rpartition("\n")[2]
    return {outcome: int(number) for number, outcome in re.findall(r"(\d+) (passed|failed|skipped|xfailed|xpassed|error)", last)}


def check(name: str, limit: float) -> Done:
    "Run one check to its end and print its line."
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen([sys.executable, *command(name)], cwd=TOP, env=os.environ | ENVIRONMENT, stdout=file, stderr=file)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        file.seek(0)
        output = file.read().decode(errors="replace")
    kibi = 2**20 if sys.platform != "darwin" else 2**30                         # macOS counts bytes
    done = Done(name, process.returncode != 0, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / kibi, output)
    if done.memory > limit:
        done.failed, done.output = True, f"{output}\n{name} took {done.memory:.1f} GiB, more than {limit:.1f}\n"
    done.counts = outcomes(output) if name.endswith(".py") else {}
    skipped = re.findall(r"^SKIPPED .*$", output, re.M)
    print("\n".join([str(done), *(" " * 8 + line for line in skipped), *([done.output] if done.failed else [])]), flush=True)
    return done


def main(wanted: list[str]) -> int:
    "Run all that is wanted; the number of failures, at most 1."
    notebooks, tests = (sorted(map(str, (Path(folder, file.name) for file in (TOP / folder).glob(pattern))),
                               key=lambda name: -(TOP / name).stat().st_size)           # the long ones first
                        for folder, pattern in (("nbs", "*.ipynb"), ("tests", "test_*.py")))
    names = [name for name in [*FIRST, *notebooks, *tests] if not wanted or any(part in name for part in wanted)]
    together = [name for name in names if name not in FIRST + ALONE]
    done = [check(name, TOTAL_MEMORY) for name in names if name in FIRST]
    with ThreadPoolExecutor(2) as pool:
        done += pool.map(partial(check, limit=TOTAL_MEMORY / 2), together)
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
