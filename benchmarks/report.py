"""From the rows that were measured to comparisons, a table and a file."""

import json
from datetime import date
from pathlib import Path

import numpy as np
from machine import facts

OURS = "gp_thesis"
RESULTS = Path(__file__).parent / "results"
COLUMNS = ("first", "median", "min", "max", "processor")


def relative_difference(values: dict, reference: dict) -> float:
    "The largest difference between two sets of named vectors, relative to the largest component of the reference."
    pairs = [(np.asarray(values[name]), np.asarray(reference[name])) for name in reference]
    return float(max(np.abs(a - b).max() for a, b in pairs) / max(np.abs(b).max() for _, b in pairs))


def compare(rows: dict[str, dict], reference: dict) -> None:
    "Add to each row its relative differences from the reference; none where the objective is another, and has no gradient to show."
    for row in (row for row in rows.values() if row["gradient"]):
        row["objective_difference"] = relative_difference({"": row["objective"]}, {"": reference["objective"]})
        row["gradient_difference"] = relative_difference(row["gradient"], reference["gradient"])


def disagreements(rows: dict[str, dict], dtype: str, tolerance: dict) -> list[str]:
    "Every difference above `tolerance[dtype]`, a pair for objective and gradient, as a sentence."
    found = []
    for library, row in ((library, row) for library, row in rows.items() if row["gradient"]):
        for what, allowed in zip(("objective", "gradient"), tolerance[dtype]):
            difference = row[f"{what}_difference"]
            if not difference <= allowed:  # written so that NaN is a disagreement
                found.append(f"{library} {dtype}: {what} differs by {difference:.1e}, allowed {allowed:.0e}")
    return found


def speed_ratio(rows: dict[str, dict]) -> float | None:
    "Our median over that of the fastest peer."
    peers = [row["median"] for library, row in rows.items() if library != OURS]
    return rows[OURS]["median"] / min(peers) if peers and OURS in rows else None


def show(dtype: str, rows: dict[str, dict], failures: dict[str, str], ratio: float | None) -> None:
    "Print one dtype's table; times in milliseconds."
    heads = "".join(f"{name:>10}" for name in COLUMNS)
    print(f"{dtype:<11}{heads}{'calls':>7}{'others':>8}{'objective':>16}{'differs':>9}{'gradient':>9}")
    for library, row in rows.items():
        times = "".join(f"{1e3 * row[name]:10.1f}" for name in COLUMNS)
        others = "-" if row["others"] is None else f"{row['others']:.0%}"
        compared = f"{row['objective_difference']:9.0e}{row['gradient_difference']:9.0e}" if row["gradient"] else f"{'other':>9}{'-':>9}"
        print(f"{library:<11}{times}{row['calls']:7}{others:>8}{row['objective']:16.6f}{compared}")
    for library, error in failures.items():
        print(f"{library:<11}failed: {error}")
    print("" if ratio is None else f"ours / fastest peer: {ratio:.3f}\n", flush=True)


def recorded(name: str) -> dict:
    "What results/NAME.json holds from this kind of machine, so that a benchmark can be run in parts."
    file = RESULTS / f"{name}.json"
    contents = json.loads(file.read_text()) if file.exists() else {}
    return contents if contents.get("machine") == facts() else {}


def write(name: str, contents: dict) -> None:
    "results/NAME.json, with the date and the machine."
    file = RESULTS / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    contents = {"benchmark": file.stem, "date": date.today().isoformat(), "machine": facts(), **contents}
    file.write_text(json.dumps(contents, indent=1) + "\n")
