"""What the timings ran on, and how much of it others were using at the time."""

import os
import platform
import re
import resource
import subprocess
import sys
import time
from pathlib import Path


def facts() -> dict:
    "The machine, in words that belong beside a timing."
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def in_words() -> str:
    "The processor, as a line above a table."
    return "{processor}, {cores} cores, {system}".format(**facts())


def gpu_in_words() -> str:
    "The first GPU and its driver, as nvidia-smi has them."
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def busy_seconds() -> float:
    "Processor seconds that the machine has spent since it started, over all cores; Linux only."
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def others_share():
    """Start watching; the function returned says which share of all cores other processes have used since.

    None where there is no /proc/stat."""
    if not Path("/proc/stat").exists():
        return lambda: None
    start, busy, own = time.perf_counter(), busy_seconds(), time.process_time()

    def share() -> float:
        wall = time.perf_counter() - start
        others = (busy_seconds() - busy) - (time.process_time() - own)
        return max(0.0, others / (wall * os.cpu_count()))

    return share


def wait_for_quiet(patience: float, limit: float = 0.05) -> float:
    "Wait, at most `patience` seconds, until others use less than `limit` of the cores; returns the seconds waited."
    start = time.perf_counter()
    while (waited := time.perf_counter() - start) < patience:
        share = others_share()
        time.sleep(1)
        if (share() or 0) < limit:
            break
    return waited


def peak_memory() -> float:
    """The largest resident memory of this process so far, in GiB.

    VmHWM first: ru_maxrss also counts the process that started this one, up to the start."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
