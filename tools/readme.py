"""README.md from nbs/index.ipynb: `python -m tools.readme`, or `--check` to see that the two are in step.

The text and the code of the first page, without outputs. Links to chapters go to the notebooks, and works
cited are plain text: their list is made for the site.
"""

import json
import re
import sys
from pathlib import Path

from .api import PAGE
from .crossref import HIDDEN, OPTION, REFERENCES, read_book

TOP = Path(__file__).resolve().parent.parent
INDEX = "index.ipynb"


def readme() -> str:
    book = read_book(TOP / "nbs", TOP / "references.bib")
    cells = json.loads((TOP / "nbs" / INDEX).read_text())["cells"]
    parts = []
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(book.resolve(text, INDEX))
        elif cell["cell_type"] == "code" and not HIDDEN.search(text):
            parts.append(f"```python\n{OPTION.sub('', text).strip()}\n```")
    text = "\n\n".join(part.strip() for part in parts) + "\n"
    text = re.sub(rf"\[([^\]]+)\]\({REFERENCES}#[\w-]+\)", r"\1", text).replace(f"]({REFERENCES})", "](references.bib)")
    text = re.sub(rf"\[([^\]]+)\]\({PAGE}[^)]*\)", r"\1", text)             # made for the site, too
    return re.sub(r"\]\(([\w.-]+\.ipynb)", r"](nbs/\1", text)


def main():
    path, text = TOP / "README.md", readme()
    if "--check" not in sys.argv:
        path.write_text(text)
    elif path.read_text() != text:
        raise SystemExit("README.md and nbs/index.ipynb are out of step: python -m tools.readme")


if __name__ == "__main__":
    main()
