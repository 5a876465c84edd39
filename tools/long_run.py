"""Go on with the long runs of a chapter: `python -m tools.long_run NOTEBOOK SECONDS CELL ...`

Runs the code cells of a notebook up to the last CELL, named by its id, in the paper profile; figures, tables and records are left out.
A cell that calls `go_on(entry, run, order, columns, seconds)` gets so many SECONDS if it is one of the CELLS, and none if not:
then it reads what its file under nbs/results holds. Stopped at any time, it goes on from there the next time."""

import json
import os
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent


def sources(notebook, last):
    "The code up to a cell, by the ids of its cells."
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}
    first = dict(list(code.items())[: list(code).index(last) + 1])
    shows = ("#| label:", "get_ipython", "\nrecord(")
    return {id: text for id, text in first.items() if id == last or not any(mark in text for mark in shows)}


def go_on_for(go_on, seconds):
    "A `go_on` that gets so many seconds."
    return lambda *arguments: go_on(*arguments[:-1], seconds)


def main(notebook, seconds, *chosen, goes_on=go_on_for):
    os.environ["GP_THESIS_PROFILE"] = "paper"
    notebook = Path(notebook).resolve()
    os.chdir(TOP / "nbs")
    names, go_on = {}, None
    for id, text in sources(notebook, chosen[-1]).items():
        if go_on:
            names["go_on"] = goes_on(go_on, float(seconds)) if id in chosen else go_on_for(go_on, 0.0)
        exec(compile(text, f"{notebook.name} {id}", "exec"), names)
        go_on = go_on or names.get("go_on")


if __name__ == "__main__":
    main(*sys.argv[1:])
