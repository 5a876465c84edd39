"""Numbers and links: labels of equations, figures, tables and theorems, and the references to them.

The syntax is Quarto's; the numbers are ours, `chapter.count`, because they run through a whole book of notebooks and
may stand beside the number that a source gives the same equation. Labels are collected from every notebook first;
`Book.resolve` then rewrites one piece of Markdown. Code, in fences or in ticks, is never touched.
"""

import io
import json
import re
import tokenize
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from .citations import Bibliography

KINDS = {"eq": "Equation", "fig": "Figure", "tbl": "Table", "thm": "Theorem", "lem": "Lemma",
         "cor": "Corollary", "prp": "Proposition", "def": "Definition"}
REFERENCES = "references.ipynb"                      # the page that lists the works cited
LABEL = rf"(?:{'|'.join(KINDS)})-[\w-]*\w"
DIVS = "thm|lem|cor|prp|def"

# One alternative for each construct, tried from the left; what none of them matches is plain prose.
TOKENS = re.compile(rf"""
    (?P<code>^[ \t>]*(?P<fence>`{{3,}}|~{{3,}})[\s\S]*?^[ \t>]*(?P=fence)[`~]*[ \t]*$ | (?P<ticks>`+)(?!`)[\s\S]*?(?<!`)(?P=ticks)(?!`) | <!--[\s\S]*?-->)
  | (?P<prefix>^[ \t>]*)?\$\$(?P<tex>[\s\S]+?)\$\$(?:[ \t]*\{{\#(?P<equation>eq-[\w-]+)(?P<eq_attrs>[^}}]*)\}})?
  | (?P<math>(?<![\\\w$])\$(?=\S)(?:\\.|[^$\\])*?(?<=\S)\$(?!\d))
  | ^(?P<div>:{{3,}})[ \t]*\{{\#(?P<theorem>(?:{DIVS})-[\w-]+)(?P<thm_attrs>[^}}]*)\}}[ \t]*$(?:\s*^\#+[ \t]+(?P<name>.*)$)?
  | ^:[ \t]+(?P<caption>.*?)[ \t]*\{{\#(?P<table>tbl-[\w-]+)[^}}]*\}}[ \t]*$
  | \[(?P<group>[^\[\]`$]*?(?<![\w/.])-?@[^\[\]`$]*)\](?![(\[{{])
  | (?<![\w/.@\\])@(?P<key>[A-Za-z][\w-]*\w)
""", re.X | re.M)
IN_CODE = re.compile(rf"(?<![\w.])@(?P<label>{LABEL})|\[(?P<works>@[A-Za-z][^\[\]<>@]*(?:; ?@[^\[\]<>@]*)*)\]")
TITLE = re.compile(r"#[ \t]+\S.*\s*(>[ \t]+\S.*\s*)?(-[ \t]+\S.*:.*\s*)*")
OPTION = re.compile(r"^#\|[ \t]*(?P<key>[\w-]+):[ \t]*(?P<value>.*?)[ \t]*$", re.M)
IPYTHON = re.compile(r"^[ \t]*[%!].*$", re.M)               # magics are no Python
HIDDEN = re.compile(r"^#\|[ \t]*(hide[ \t]*$|include:[ \t]*false)", re.M)


class BookError(ValueError):
    "Something in a notebook that the site cannot be built from; the message names the notebook."


@dataclass(frozen=True)
class Target:
    "What a label stands for."

    notebook: str
    kind: str
    number: str

    @property
    def text(self) -> str:
        return f"({self.number})" if self.kind == "eq" else f"{KINDS[self.kind]} {self.number}"


def source_of(attrs: str | None) -> str:
    "The value of `source=` in an attribute list, or nothing."
    found = re.search(r"""source=(["'])(.*?)\1""", attrs or "")
    return found[2] if found else ""


def in_lines(source: str, width: int = 20) -> list[str]:
    "A list of places, parted where a comma or semicolon stands: a number beside a formula takes its width from both sides."
    lines: list[str] = []
    for place in re.split(r"(?<=[,;]) ", source):
        if lines and len(lines[-1]) + 1 + len(place) <= width:
            lines[-1] += f" {place}"
        else:
            lines.append(place)
    return lines


def options(cell: str) -> dict[str, str]:
    "The `#| key: value` options of a code cell, as plain strings."
    return {m["key"]: m["value"].strip("\"'") for m in OPTION.finditer(cell)}


def chapter_number(notebook: str) -> str:
    "12 of `12_regression.ipynb`; nothing for a page outside the chapters."
    found = re.match(r"0*(\d+)_", notebook)
    return found[1] if found else ""


def read_cells(path: Path) -> list[tuple[str, str]]:
    "The cells of a notebook that reach the page: their type and their source."
    cells = [(c["cell_type"], "".join(c["source"])) for c in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    return [(kind, text) for kind, text in cells if not (kind == "code" and HIDDEN.search(text))]


@dataclass
class Book:
    "All notebooks of a folder, the labels in them, and the works they cite."

    folder: Path
    bibliography: Bibliography
    labels: dict[str, Target] = field(default_factory=dict)
    cited: set[str] = field(default_factory=set)

    def __post_init__(self):
        self.notebooks = sorted(Path(self.folder).glob("*.ipynb"))
        for path in self.notebooks:
            self._collect(path)

    # ---- first pass: labels

    def _collect(self, path: Path):
        counts = {}
        for kind, text in read_cells(path):
            for label in labels_in(kind, text):
                if label in self.labels:
                    raise BookError(f"{path.name}: the label {label} stands in {self.labels[label].notebook} already")
                prefix = label.split("-")[0]
                counts[prefix] = counts.get(prefix, 0) + 1
                number = ".".join(filter(None, [chapter_number(path.name), str(counts[prefix])]))
                self.labels[label] = Target(path.name, prefix, number)

    def check(self):
        "Resolve every piece of Markdown once: learn which works are cited, and report all that is unknown together."
        wrong = []
        for path in self.notebooks:
            cells = read_cells(path)
            if not cells or cells[0][0] != "markdown" or not TITLE.fullmatch(cells[0][1]):
                wrong.append(f"{path.name}: the first cell must hold a title, a one-line description and nothing else")
            for kind, text in cells:
                pieces = [text] if kind == "markdown" else [*captions_in(text), *references_in(text)]
                for piece in pieces:
                    try:
                        self.resolve(piece, path.name)
                    except BookError as error:
                        wrong.append(str(error))
        if wrong:
            raise BookError("\n".join(wrong))

    # ---- second pass: text

    def in_code(self, html: str, page: str) -> str:
        "HTML of code with links where its comments and docstrings refer to labels or cite works."
        def address(notebook):
            return "" if Path(notebook).stem == Path(page).stem else Path(notebook).with_suffix(".html").name

        def link(match):
            if match["label"]:
                target = self.labels.get(match["label"])         # else code that explains the syntax
                return f'<a href="{address(target.notebook)}#{match["label"]}">{target.text}</a>' if target else match[0]
            items = [item.strip().partition(",") for item in match["works"].split(";")]
            if any(key[1:] not in self.bibliography for key, *_ in items):
                return match[0]
            said = [f'<a href="{address(REFERENCES)}#ref-{key[1:]}">{self.bibliography.names(key[1:])}, '
                    f'{self.bibliography.year(key[1:])}</a>{comma}{detail}' for key, comma, detail in items]
            return f"({'; '.join(said)})"

        return IN_CODE.sub(link, html)

    def resolve(self, text: str, notebook: str) -> str:
        "Markdown of a notebook with numbers for labels and links for references and citations."
        return TOKENS.sub(lambda match: self._token(match, notebook), text)

    def _token(self, match: re.Match, notebook: str) -> str:
        if match["code"] or match["math"]:
            return match[0]
        if match["tex"]:
            return self._equation(match)
        if match["theorem"]:
            return self._theorem(match, notebook)
        if match["table"]:
            caption = self.resolve(match["caption"], notebook)
            return f': {anchor(match["table"])}**{self.labels[match["table"]].text}.** {caption}'
        if match["group"]:
            return self._group(match, notebook)
        return self._single(match["key"], notebook)

    def _equation(self, match: re.Match) -> str:
        if not match["equation"]:
            return match[0]
        prefix = match["prefix"] or ""
        number, source = self.labels[match["equation"]].number, source_of(match["eq_attrs"])
        small = "".join(rf"\\[-.2em]\scriptsize\text{{{line}}}" for line in in_lines(source))                 # small, below ours
        beside = rf"$\begin{{array}}{{r}}({number}){small}\end{{array}}$"
        tag = rf"\tag*{{{beside}}}" if source else rf"\tag{{{number}}}"
        return f'{prefix}{anchor(match["equation"])}\n{prefix}$${match["tex"].rstrip()} {tag}$$'

    def _theorem(self, match: re.Match, notebook: str) -> str:
        label, name, source = match["theorem"], match["name"], source_of(match["thm_attrs"])
        title = f"**{self.labels[label].text}**" + (f" ({self.resolve(name, notebook)})" if name else "")
        title += f" · {source}" if source else ""
        return f'{match["div"]} {{.theorem}}\n{anchor(label)}[{title}]{{.theorem-title}}\n'

    def _link(self, key: str, notebook: str, text: str | None = None) -> str:
        "A link for a label or a key of the bibliography; `text` replaces what it says."
        if re.fullmatch(LABEL, key):
            if key not in self.labels:
                raise BookError(f"{notebook}: unknown reference @{key}")
            target = self.labels[key]
            page = "" if target.notebook == notebook else target.notebook
            return f"[{text or target.text}]({page}#{key})"
        if key not in self.bibliography:
            raise BookError(f"{notebook}: unknown citation @{key}, not in {self.bibliography.path.name}")
        self.cited.add(key)
        return f"[{text}]({'' if notebook == REFERENCES else REFERENCES}#ref-{key})"

    def _single(self, key: str, notebook: str) -> str:
        if re.fullmatch(LABEL, key):
            return self._link(key, notebook)
        link = self._link(key, notebook, "YEAR")             # an unknown key ends here
        return f"{self.bibliography.names(key)} ({link.replace('YEAR', self.bibliography.year(key))})"

    def _group(self, match: re.Match, notebook: str) -> str:
        "`[see @a, section 2; @b]`: works in parentheses; references to labels without."
        items, labels_only = [], True
        for item in match["group"].split(";"):
            found = re.fullmatch(r"(?P<before>.*?)(?P<minus>-?)@(?P<key>[A-Za-z][\w-]*\w)(?P<after>.*)", item.strip(), re.S)
            if not found:
                raise BookError(f"{notebook}: cannot read the citation [{match['group']}]")
            key = found["key"]
            if re.fullmatch(LABEL, key):
                link = self._link(key, notebook)
            else:
                labels_only = False
                self._link(key, notebook, "-")
                names = [] if found["minus"] else [self.bibliography.names(key)]
                link = self._link(key, notebook, ", ".join([*names, self.bibliography.year(key)]))
            items.append(found["before"] + link + found["after"])
        return ", ".join(items) if labels_only else f"({'; '.join(items)})"


def anchor(label: str) -> str:
    return f'<span id="{label}" class="anchor"></span>'


def labels_in(kind: str, text: str) -> list[str]:
    "The labels that a cell defines, in order."
    if kind == "markdown":
        found = (m["equation"] or m["theorem"] or m["table"] for m in TOKENS.finditer(text))
        return [label for label in found if label]
    label = options(text).get("label", "") if kind == "code" else ""
    return [label] if re.fullmatch(LABEL, label) else []


def captions_in(cell: str):
    "The captions of a code cell: Markdown too."
    return (value for key, value in options(cell).items() if key in ("fig-cap", "tbl-cap"))


def references_in(cell: str):
    "What the comments and docstrings of a code cell refer to: labels, and works in brackets."
    for token in tokenize.generate_tokens(io.StringIO(IPYTHON.sub("", cell)).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from (match[0] for match in IN_CODE.finditer(token.string))


@lru_cache
def read_book(folder: Path, bibliography: Path) -> Book:
    "The book of a folder of notebooks, read and checked once."
    book = Book(folder, Bibliography(bibliography))
    book.check()
    return book
