"""Go on with the long runs of a chapter: `python -m tools.long_run NOTEBOOK SECONDS CELL ...`

The code cells of a notebook up to the last CELL, named by its id, are run in the paper profile; of those that call `go_on`,
only the CELLs, each with so many SECONDS for what its file under nbs/results lacks. Stopped at any time, it goes on later."""

import json
import os
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent


def sources(notebook, chosen):
    "The code that must run, cell by cell."
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}
    last = max(list(code).index(each) for each in chosen)
    return [text for id, text in list(code.items())[: last + 1]
            if id in chosen or "= go_on(" not in text and "get_ipython" not in text]


def main(notebook, seconds, *chosen):
    os.environ["GP_THESIS_PROFILE"] = "paper"
    notebook = Path(notebook).resolve()
    import gp_thesis.data as data

    of_file = data.settings
    data.settings = lambda entry=None: of_file(entry) | {"seconds": float(seconds)}
    texts = sources(notebook, chosen)
    os.chdir(TOP / "nbs")
    names = {}
    for text in texts:
        exec(compile(text, notebook.name, "exec"), names)


if __name__ == "__main__":
    main(*sys.argv[1:])
