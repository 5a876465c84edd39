"""README.md from nbs/index.ipynb: `python -m tools.readme`, or `--check` to see that the two are in step.

The text and the code of the first page, without outputs; links to chapters become addresses of the notebooks in the repository.
"""

import json
import re
import sys
from pathlib import Path

from nbdev.config import get_config

from .crossref import HIDDEN, OPTION, read_book

TOP = Path(__file__).resolve().parent.parent
INDEX = "index.ipynb"


def readme() -> str:
    config = get_config(TOP)
    book = read_book(TOP / "nbs", TOP / "references.bib")
    cells = json.loads((TOP / "nbs" / INDEX).read_text())["cells"]
    parts = []
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(book.resolve(text, INDEX))
        elif cell["cell_type"] == "code" and not HIDDEN.search(text):
            parts.append(f"```python\n{OPTION.sub('', text).strip()}\n```")
    notebooks = f"{config.git_url}/blob/{config.branch}/nbs/"
    return re.sub(r"\]\(([\w.-]+\.ipynb)", rf"]({notebooks}\1", "\n\n".join(part.strip() for part in parts)) + "\n"


def main():
    path, text = TOP / "README.md", readme()
    if "--check" not in sys.argv:
        path.write_text(text)
    elif path.read_text() != text:
        raise SystemExit("README.md and nbs/index.ipynb are out of step: python -m tools.readme")


if __name__ == "__main__":
    main()
