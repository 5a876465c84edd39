"""The book's nbdev processor: it runs after nbdev's own and hands either renderer plain Markdown and code.

It puts the chapter's number in the title and the Colab badge at the head, keeps exported code in sight with its
documentation folded below it, captions figures and tables, and resolves citations and cross-references.
"""

import base64
import html
import re
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path

import nbdev.config
import yaml
from fastcore.nbio import mk_cell
from nbdev.config import get_config, nbpath2html
from nbdev.doclinks import NbdevLookup
from nbdev.process import Processor

from . import api
from .crossref import OPTION, REFERENCES, anchor, chapter_number, options, read_book

SHOW_DOC = re.compile(r"^show_doc\((?P<name>[\w.]+)", re.M)
EXERCISE = re.compile(r"^(?=\*\*\d+\.[ *])", re.M)                   # before the number that an exercise begins with
HEADING = re.compile(r"^## Exercises *$", re.M)
GROUND = re.compile(r'(<g id="(?:axes|figure)_\d+">\s*<g id="patch_\d+">\s*<path d="[^"]*"\s*style=")fill: #ffffff')
PATH, FINE = re.compile(r' d="[^"]*"'), re.compile(r"(\.\d\d)\d+")
METADATA = re.compile(r"\s*<metadata>[\s\S]*?</metadata>")
COLAB = "https://colab.research.google.com/github"

nbdev.config._load_toml = cache(nbdev.config._load_toml)         # read for each name that nbdev looks up, 4500 times


class BookProcessor(Processor):
    "Everything between nbdev's notebooks and the pages."

    def __init__(self, nb):
        super().__init__(nb)
        self.config = get_config()
        path = Path(nb.path_).resolve()
        self.name = path.name
        self.book = read_book(path.parent, self.config.config_path / "references.bib")

    @cached_property
    def module(self):
        "The module that the notebook exports, which its documentation is read from; no cell is run for it."
        name, = (cell.directives_["default_exp"] for cell in self.nb.cells if "default_exp" in cell.directives_)
        return import_module(f"{self.config.lib_path.name}.{name.strip()}")

    def begin(self):
        cells, names = [], []                       # names: those that show_doc documents at this place
        for cell in self.nb.cells:
            if cell.cell_type == "code" and (shown := SHOW_DOC.search(cell.source)):
                names.append(shown["name"])
                continue
            cells += self.documentation(names)
            names = []
            if cell.cell_type == "code":
                cells += self.code(cell)
            else:
                cell.source = self.text(cell.source) if cell.cell_type == "markdown" else cell.source
                cells.append(cell)
        self.nb.cells = self.exercises(cells + self.documentation(names))
        self.title()

    # ---- text

    def text(self, markdown: str) -> str:
        "Resolve what the book resolves, and turn nbdev's addresses of our own pages into relative links."
        if "#refs" in markdown:
            listing = self.book.bibliography.listing(self.book.cited)
            markdown = re.sub(r"^:::+ *\{#refs\} *\n(.*\n)*?:::+ *$", lambda _: listing, markdown, flags=re.M)
        pages = {nbpath2html(path).name: path.name for path in self.book.notebooks}
        site = re.escape(self.config.doc_host + self.config.doc_baseurl.rstrip("/") + "/")
        markdown = re.sub(rf"\]\({site}([\w.-]+\.html)", lambda m: f"]({pages.get(m[1], m[1])}", markdown)
        return self.book.resolve(markdown, self.name)

    def title(self):
        "The number before the title in the front matter, and the badge as the first thing on the page."
        front = self.nb.cells[0]
        if front.cell_type != "raw":
            return
        meta = yaml.safe_load(front.source.strip().strip("-"))
        meta.pop("output-file", None)                        # both renderers then name a page after its notebook
        meta["title"] = " ".join(filter(None, [chapter_number(self.name), meta["title"]]))
        front.source = f"---\n{yaml.safe_dump(meta, allow_unicode=True)}---\n\n"
        if self.name != REFERENCES and self.config.repo:
            where = f"{COLAB}/{self.config.user}/{self.config.repo}/blob/{self.config.branch}/nbs/{self.name}"
            kept = f'<a href="notebooks/{self.name}" class="colab" download>Download the notebook</a>'
            self.nb.cells.insert(1, mk_cell(f"[Open in Colab]({where}){{.colab}} {kept}", "markdown"))

    def exercises(self, cells: list) -> list:
        "Everything between one exercise's question and the next one under the word *Solution*."
        shown, solution, begun = [], [], False

        def close():
            if solution:
                shown.extend([mk_cell('<details class="solution">\n<summary>Solution</summary>', "markdown"), *solution,
                              mk_cell("</details>", "markdown")])
                solution.clear()

        for cell in cells:
            heading = HEADING.search(cell.source) if cell.cell_type == "markdown" else None
            if begun and cell.cell_type == "code":
                cell.source = "\n".join(line for line in cell.source.split("\n") if not line.startswith("#| code-"))
                solution.append(cell)
            elif begun or heading:
                start = 0 if begun else heading.end()
                before, *questions = EXERCISE.split(cell.source[start:])
                if answer := (cell.source[:start] + before).strip():
                    (solution if begun else shown).append(mk_cell(answer, "markdown"))
                for question in questions:
                    close()
                    shown.append(mk_cell(question.strip(), "markdown"))
                begun = True
            else:
                shown.append(cell)
        close()
        return shown

    # ---- code

    def code(self, cell) -> list:
        "The cells that a code cell becomes on the page."
        if "default_exp" in cell.directives_ or "exporti" in cell.directives_:
            return []
        cell.outputs = joined(cell.get("outputs", []))
        for output in cell.outputs:
            data = output.get("data") or {}
            if "text/markdown" in data:
                data["text/markdown"] = self.text("".join(data["text/markdown"]))
            if "image/svg+xml" in data:
                output["data"] = {"text/html": drawing("".join(data["image/svg+xml"]), options(cell.source).get("fig-alt", ""))}
        if "export" in cell.directives_ and only_imports(cell):
            cell.source = f'#| code-fold: true\n#| code-summary: "Imports"\n{cell.source}'
        label = options(cell.source).get("label", "")
        return self.captioned(cell, label) if label in self.book.labels else [cell]

    def documentation(self, names: list[str]) -> list:
        "Links from these names to the reference, with the anchors that links to them and to their methods point at."
        if not names:
            return []
        known = [full.split(".", 2)[-1] for full in NbdevLookup().syms if full.startswith(f"{self.module.__name__}.")]
        links = []
        for name in reversed(names):                # nbdev puts the last of a cell first
            anchors = dict.fromkeys([name, *(other for other in known if other.startswith(f"{name}."))])
            links.append("".join(anchor(other.lower()) for other in anchors)
                         + f"[`{name}`]({api.PAGE}#{api.place(self.module.__name__, name)})")
        return [mk_cell(f'::: {{.reference}}\nReference: {", ".join(links)}\n:::', "markdown")]

    def captioned(self, cell, label: str) -> list:
        "A cell with a label: its code and printed text, then its figure or table under a number and a caption."
        target, chosen = self.book.labels[label], options(cell.source)
        caption = chosen.get(f"{target.kind}-cap", "")
        kept = [m[0] for m in OPTION.finditer(cell.source) if m["key"] in ("fig-alt", "echo", "code-fold", "code-summary")]
        code = OPTION.sub("", cell.source).strip()
        shown = [o for o in cell.outputs if is_picture(o)]
        cell.outputs = [o for o in cell.outputs if not is_picture(o)]
        cell.source = "\n".join([*(line for line in kept if "fig-alt" not in line), code])
        figure = mk_cell("\n".join(["#| echo: false", *(line for line in kept if "fig-alt" in line), "pass"]))
        figure.outputs = shown
        words = f"**{target.text}.** {self.text(caption)}".strip()
        above = mk_cell(f'<figure class="book-{target.kind}" id="{label}">', "markdown")
        below = mk_cell(f"<figcaption>\n\n{words}\n\n</figcaption>\n</figure>", "markdown")
        return [cell, above, figure, below]


def joined(outputs: list) -> list:
    "Outputs with what was printed in several parts as one."
    kept = []
    for output in outputs:
        if kept and output.output_type == "stream" and kept[-1].get("name") == output.name:
            kept[-1].text = [*kept[-1].text, *output.text]
        else:
            kept.append(output)
    return kept


def drawing(svg: str, alt: str) -> str:
    "A figure as an image of its own, without its white ground, so that the page's shows."
    svg = METADATA.sub("", GROUND.sub(r"\1fill: none", svg[svg.index("<svg"):]))
    svg = PATH.sub(lambda path: FINE.sub(r"\1", path[0]).replace("\n", " "), svg)       # to a hundredth of a point
    data = base64.b64encode(svg.encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(alt)}" class="img-fluid">'


def is_picture(output) -> bool:
    "Whether an output is what a caption describes: a picture or a table, not printed text."
    return any(mime.startswith("image/") or mime in ("text/html", "text/markdown") for mime in output.get("data") or {})


def only_imports(cell) -> bool:
    return all(type(node).__name__ in ("Import", "ImportFrom") for node in cell.parsed_() or [None])
