"The site's own code: labels, numbers, references, citations and the processor, on small notebooks made here."

import ast
import base64
import builtins
import json
import re
import tomllib
from importlib import import_module

import pytest
from nbdev.frontmatter import FrontmatterProc
from nbdev.process import NBProcessor
from nbdev.processors import hide_

from conftest import TOP
from tools import mathjax
from tools.check import check, outcomes
from tools.citations import Bibliography
from tools.api import Reference
from tools.crossref import Book, BookError, read_book
from tools.long_run import sources
from tools.processor import BookProcessor
from tools.site import OUTSIDE, WEB_FONT, listed

TITLE = "# A title\n> What it is about"
EQUATION = '$$ a = b $$ {#eq-one}\n\ntext\n\n$$\n\\begin{aligned} a &= b \\\\ c &= d \\end{aligned}\n$$ {#eq-two source="Matthews 1.8"}'


@pytest.fixture
def make_book(tmp_path, top):
    "A book from the Markdown, or (type, source) cells, of each notebook."

    def make(check=True, **notebooks):
        for name, cells in notebooks.items():
            cells = [("markdown", TITLE), *(("markdown", cell) if isinstance(cell, str) else cell for cell in cells)]
            content = [{"cell_type": kind, "source": text.splitlines(keepends=True)} for kind, text in cells]
            (tmp_path / f"{name[1:]}.ipynb").write_text(json.dumps({"cells": content}))
        book = Book(tmp_path, Bibliography(top / "references.bib"))
        if check:
            book.check()
        return book

    return make


def test_equations_are_numbered_by_chapter_and_carry_the_source(make_book):
    book = make_book(_12_regression=[EQUATION], _03_gaussians=["$$ x $$ {#eq-three}"], _index=["$$ y $$ {#eq-four}"])
    assert {label: target.number for label, target in book.labels.items()} == {
        "eq-three": "3.1", "eq-one": "12.1", "eq-two": "12.2", "eq-four": "1"}
    text = book.resolve(EQUATION, "12_regression.ipynb")
    assert "$$ a = b \\tag{12.1}$$" in text
    assert re.search(r"\\end\{aligned\} \\tag\*\{.*\(12\.2\).*Matthews 1\.8.*\}\$\$", text)
    assert 'id="eq-one"' in text and "{#eq" not in text


def test_long_sources_stand_in_lines(make_book):
    places = '$$ a $$ {#eq-one source="HMG15, section 3.2, and 14"}'
    text = make_book(_12_regression=[places]).resolve(places, "12_regression.ipynb")
    assert r"\scriptsize\text{HMG15, section 3.2,}\\[-.2em]\scriptsize\text{and 14}\end{array}" in text


def test_references_link_within_a_page_and_across_pages(make_book):
    book = make_book(_12_regression=[EQUATION], _13_fitting=["See @eq-two."])
    assert book.resolve("See @eq-one.", "12_regression.ipynb") == "See [(12.1)](#eq-one)."
    assert book.resolve("See @eq-two.", "13_fitting.ipynb") == "See [(12.2)](12_regression.ipynb#eq-two)."
    assert book.resolve("([@eq-one; @eq-two])", "12_regression.ipynb") == "([(12.1)](#eq-one), [(12.2)](#eq-two))"


def test_figures_tables_and_theorems(make_book):
    figure = ("code", '#| label: fig-draws\n#| fig-cap: "Draws, see @eq-one"\nplot()')
    theorem = '::: {#thm-zero source="Matthews 3.1"}\n## Zero $x$\nIt holds, @eq-one.\n:::'
    table = "| a |\n|---|\n| 1 |\n\n: What it shows {#tbl-costs}"
    book = make_book(_12_regression=[EQUATION, figure, theorem, table])
    assert [book.labels[label].text for label in ("fig-draws", "thm-zero", "tbl-costs")] == [
        "Figure 12.1", "Theorem 12.1", "Table 12.1"]
    stated = book.resolve(theorem, "12_regression.ipynb")
    assert "**Theorem 12.1** (Zero $x$) · Matthews 3.1" in stated and "## Zero" not in stated
    assert "It holds, [(12.1)](#eq-one)." in stated and stated.endswith(":::")
    assert "**Table 12.1.** What it shows" in book.resolve(table, "12_regression.ipynb")


@pytest.mark.parametrize(("text", "expected"), [
    ("@matthews2016thesis", "Matthews ([2016](references.ipynb#ref-matthews2016thesis))"),
    ("[@matthews2016thesis]", "([Matthews, 2016](references.ipynb#ref-matthews2016thesis))"),
    ("[-@matthews2016thesis]", "([2016](references.ipynb#ref-matthews2016thesis))"),
    ("[see @matthews2016thesis, section 2; @opper2009]",
     "(see [Matthews, 2016](references.ipynb#ref-matthews2016thesis), section 2; "
     "[Opper and Archambeau, 2009](references.ipynb#ref-opper2009))"),
    ("@hensman2015scalable", "Hensman et al. ([2015](references.ipynb#ref-hensman2015scalable))"),
    ("@abramowitz1964.", "Abramowitz and Stegun ([1964](references.ipynb#ref-abramowitz1964))."),
])
def test_citations(make_book, text, expected):
    assert make_book(_12_regression=[text]).resolve(text, "12_regression.ipynb") == expected


def test_works_cited_are_listed_and_no_others(make_book):
    docstring = ("code", '#| export\ndef f():\n    "As in [@smith1995]."')
    book = make_book(_12_regression=["[@opper2009]", docstring])
    assert book.cited == {"opper2009", "smith1995"}
    listing = book.bibliography.listing(book.cited)
    assert listing.count("<p id=") == 2 and listing.index("ref-opper2009") < listing.index("ref-smith1995")
    assert "Neural Computation" in listing and "Cédric" in listing.replace('<span class="bibtex-protected">é</span>', "é")


@pytest.mark.parametrize("text", [
    "`@eq-unknown` and ``x = `@nobody` ``",
    "```python\n@nobody\ndef f(): return A @ eq\n$$ a $$ {#eq-inside}\n```",
    "> ```\n> @nobody\n> ```",
    "a@b.org, <!-- @nobody --> and $A@B$, \\@nobody",
    "[a link](https://example.org/@nobody)",
    "It costs $5 and not $6.",
])
def test_code_maths_and_addresses_are_left_alone(make_book, text):
    book = make_book(_12_regression=[text])
    assert book.resolve(text, "12_regression.ipynb") == text and not book.labels


@pytest.mark.parametrize(("cell", "message"), [
    ("See @eq-nowhere.", "01_a.ipynb: unknown reference @eq-nowhere"),
    ("See [@fig-nowhere].", "01_a.ipynb: unknown reference @fig-nowhere"),
    ("See @nobody2020.", "01_a.ipynb: unknown citation @nobody2020, not in references.bib"),
    ("See [@opper2009; @nobody2020].", "01_a.ipynb: unknown citation @nobody2020"),
    ("::: {#thm-x}\n## A claim of @nobody2020\nIt.\n:::", "unknown citation @nobody2020"),
    (("code", '#| label: fig-x\n#| fig-cap: "See @eq-nowhere"\nplot()'), "unknown reference @eq-nowhere"),
    (("code", '#| export\ndef f():\n    "See @eq-nowhere."'), "unknown reference @eq-nowhere"),
    (("code", "x = 1  # as in @eq-nowhere"), "unknown reference @eq-nowhere"),
    (("code", "%matplotlib inline\nx = 1  # [@opper2009; @nobody2020]"), "unknown citation @nobody2020"),
])
def test_what_is_unknown_fails_by_file_and_name(make_book, cell, message):
    with pytest.raises(BookError) as raised:
        make_book(_01_a=[cell])
    assert message in str(raised.value)


def test_all_that_is_unknown_is_reported_together(make_book):
    with pytest.raises(BookError) as raised:
        make_book(_01_a=["@eq-nowhere"], _02_b=["@nobody2020"])
    assert "@eq-nowhere" in str(raised.value) and "02_b.ipynb" in str(raised.value)


def test_duplicate_labels_fail(make_book):
    with pytest.raises(BookError, match="02_b.ipynb: the label eq-one stands in 01_a.ipynb already"):
        make_book(_01_a=["$$ a $$ {#eq-one}"], _02_b=["$$ b $$ {#eq-one}"])


def test_a_first_cell_with_more_than_the_title_fails(tmp_path, top):
    cells = [{"cell_type": "markdown", "source": f"{TITLE}\n\nText that nbdev would drop."}]
    (tmp_path / "01_a.ipynb").write_text(json.dumps({"cells": cells}))
    with pytest.raises(BookError, match="01_a.ipynb: the first cell"):
        Book(tmp_path, Bibliography(top / "references.bib")).check()


def test_the_processor_shows_code_folds_imports_and_captions_figures(tmp_path, top):
    sources = [("markdown", TITLE), ("code", "#| default_exp exact"), ("code", "#| hide\nsecret = 1"),
               ("code", "#| export\nimport numpy as np"), ("code", "#| export\ndef f(): return np.pi   # [@opper2009]"),
               ("code", '#| label: fig-x\n#| fig-cap: "A curve [@opper2009]"\n#| fig-alt: "Curve"\nplot()')]
    cells = [{"cell_type": kind, "source": text, "metadata": {}, **({"outputs": [], "execution_count": None} if kind == "code" else {})}
             for kind, text in sources]
    cells[-1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "printed"},
                            {"output_type": "display_data", "metadata": {}, "data": {"image/png": "AA=="}}]
    path = tmp_path / "12_regression.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    processor = NBProcessor(path, [FrontmatterProc, hide_, BookProcessor], rm_directives="quarto")
    processor.process()
    out = processor.nb.cells
    text = "\n".join(cell.source for cell in out)
    repository = tomllib.loads((top / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    assert "title: 12 A title" in out[0].source
    assert repository.removeprefix("https://github.com/") + "/blob/main/nbs/12_regression.ipynb" in out[1].source
    assert "secret" not in text and "default_exp" not in text and "def f(): return np.pi   # [@opper2009]" in text
    assert '#| code-summary: "Imports"' in text and "import numpy as np" in text
    figure, = (cell for cell in out if "echo: false" in cell.source)
    assert 'fig-alt: "Curve"' in figure.source and [list(o["data"]) for o in figure.outputs] == [["image/png"]]
    assert "**Figure 12.1.** A curve ([Opper and Archambeau, 2009](references.ipynb#ref-opper2009))" in text
    assert [o.text for cell in out for o in cell.get("outputs", []) if o.output_type == "stream"] == ["printed"]


def test_references_in_code_become_links(make_book):
    book = make_book(_01_a=[EQUATION], _02_b=[])
    html = book.in_code("<pre># @eq-two, [@opper2009, section 2]; @eq-other; @property; m[@key]</pre>", "02_b.html")
    assert html == ('<pre># <a href="01_a.html#eq-two">(1.2)</a>, (<a href="references.html#ref-opper2009">Opper and Archambeau, 2009</a>, section 2); '
                    "@eq-other; @property; m[@key]</pre>")
    assert book.in_code("# @eq-two", "01_a.html") == '# <a href="#eq-two">(1.2)</a>'


def processed(path, *cells):
    "The cells of a page, from those of a notebook: (type, source, outputs)."
    made = [{"cell_type": kind, "source": text, "metadata": {}, **({"outputs": list(outputs), "execution_count": None} if kind == "code" else {})}
            for kind, text, *outputs in [("markdown", TITLE), *cells]]
    path.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    processor = NBProcessor(path, [FrontmatterProc, hide_, BookProcessor], rm_directives="quarto")
    processor.process()
    return processor.nb.cells


def test_all_of_a_solution_is_folded(tmp_path):
    cells = processed(
        tmp_path / "12_regression.ipynb", ("markdown", "## What to remember\n\n**1. Not this.**\n\n## Exercises\n\n**1. How?** Say so."),
        ("code", "#| code-fold: true\nsolve()"), ("markdown", "Because.\n\n**2. Why?**\n\nAnd *when*?"), ("code", "answer()"), ("markdown", "So."))
    assert [cell.source for cell in cells[2:]] == [
        "## What to remember\n\n**1. Not this.**\n\n## Exercises", "**1. How?** Say so.", '<details class="solution">\n<summary>Solution</summary>',
        "solve()", "Because.", "</details>", "**2. Why?**\n\nAnd *when*?", '<details class="solution">\n<summary>Solution</summary>', "answer()",
        "So.", "</details>"]


def test_printed_text_is_one_block_and_a_drawing_an_image(tmp_path):
    printed = [{"output_type": "stream", "name": "stdout", "text": [f"{k}\n"]} for k in range(2)]
    svg = ('<?xml version="1.0"?>\n<svg width="9pt"><metadata>x</metadata><g id="figure_1"><g id="patch_1">'
           '<path d="M 0 0" style="fill: #ffffff"/></g></g></svg>')
    figure = {"output_type": "display_data", "metadata": {}, "data": {"image/svg+xml": svg, "text/plain": "<Figure>"}}
    cells = processed(tmp_path / "12_regression.ipynb", ("code", '#| fig-alt: "A <curve>"\nplot()', *printed, figure))
    text, image = cells[-1].outputs
    assert "".join(text.text) == "0\n1\n" and list(image["data"]) == ["text/html"]
    assert 'alt="A &lt;curve&gt;"' in image["data"]["text/html"]
    drawn = base64.b64decode(re.search("base64,([^\"]*)", image["data"]["text/html"])[1]).decode()
    assert drawn == '<svg width="9pt"><g id="figure_1"><g id="patch_1"><path d="M 0 0" style="fill: none"/></g></g></svg>'


def test_the_reference_reads_as_the_source_is_written():
    from gp_thesis import inducing, products
    page = Reference(read_book(TOP / "nbs", TOP / "references.bib")).page()
    assert all(f"### `{name}` {{#inducing.{name}}}" in page for name in inducing.__all__)
    assert "SVGP(model: GP, inducing, num_latents: int | None = None, whiten: bool = True)" in page
    assert "jaxtyping" not in page and "@eq-" not in page and " at 0x" not in page
    assert f"PANEL = {products.PANEL}\n" in page and "active_dims: tuple[int, ...] | None = None" in page
    assert not [line for code in re.findall(r"```python\n(.*?)\n```", page, re.S) for line in code.splitlines() if len(line) > 88]


def test_hidden_cells_define_no_labels(make_book):
    assert not make_book(_01_a=[("code", "#| hide\n#| label: fig-x\nplot()")]).labels


def test_an_altered_archive_is_refused_and_removed(tmp_path):
    altered = tmp_path / "archive.whl"
    altered.write_bytes(b"something else")
    with pytest.raises(SystemExit, match="expected"):
        mathjax.verify(altered)
    assert not altered.exists()


def test_formulas_of_a_page(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(r'<span class="math inline">\(a &lt; b\)</span> <span class="math display">\[x \tag{1}\]</span>')
    assert mathjax.formulas(page) == [("page.html", "a < b", False), ("page.html", r"x \tag{1}", True)]


@pytest.mark.parametrize(("text", "outside"), [
    ('<script src="https://example.org/a.js"></script>', True),
    ('<img src="//example.org/a.png">', True),
    ('<link rel="stylesheet" href="https://example.org/a.css">', True),
    ('<script src="site_libs/a.js"></script><a href="https://example.org">x</a>', False),
    ('<img src="data:image/png;base64,AA==">', False),
])
def test_what_counts_as_loaded_from_outside(text, outside):
    assert bool(OUTSIDE.search(text)) == outside


def test_web_fonts_are_cut_out_whole():
    css = '@import url(https://example.org/css2?family=A:wght@300;400&display=swap);body{margin:0}'
    assert WEB_FONT.sub("", css) == "body{margin:0}"


def test_sidebar_is_read_in_order():
    assert listed(["a.ipynb", {"section": "S", "contents": ["b.ipynb", {"href": "c.ipynb"}]}]) == ["a.ipynb", "b.ipynb", "c.ipynb"]


@pytest.mark.parametrize(("output", "counts"), [
    ("...\n2 failed, 31 passed, 4 skipped, 1 error in 5.2s\n", {"failed": 2, "passed": 31, "skipped": 4, "error": 1}),
    ("3 failed\n1 passed in 0.12s", {"passed": 1}),
    ("======= 7 passed, 1 warning in 61.00s (0:01:01) =======", {"passed": 7}),
    ("2 passed, 2 errors in 1s", {"passed": 2, "error": 2}),
    ("Fatal Python error: Aborted", {}), ("", {}),
])
def test_counts_of_tests_are_read(output, counts):
    assert outcomes(output) == counts


@pytest.mark.parametrize(("source", "fails"), [("assert 1 + 1 == 3", True), ("#| eval: false\nassert False", False), ("x = 1", False),
    # the package of the wheel and no other, and nothing else in the folder
    ("import os, sys\nassert all(place.endswith('.cache/wheel') for place in sys.path if os.path.exists(f'{place}/gp_thesis/__init__.py'))\n"
     "assert os.listdir() == ['some.ipynb']", False)])
def test_a_notebook_that_fails_is_found(tmp_path, source, fails, capsys):
    path = tmp_path / "some.ipynb"
    cell = {"cell_type": "code", "source": source, "metadata": {}, "outputs": [], "execution_count": None}
    path.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    done = check(str(path), 8.0)
    assert done.failed == fails and done.seconds > 0 and ("AssertionError" in capsys.readouterr().out) == fails


def test_a_process_that_fails_or_takes_too_much_memory_is_found(capsys):
    assert check("tools.no_such_module", 8.0).failed and "No module named" in capsys.readouterr().out
    assert not check("this", 8.0).failed and check("this", 0.001).failed     # the Zen of Python, and a MiB
    assert "more than" in capsys.readouterr().out


def test_a_process_that_is_killed_is_found(tmp_path, capsys):
    path = tmp_path / "test_killed.py"
    path.write_text("import os, signal\ndef test(): os.kill(os.getpid(), signal.SIGKILL)\n")
    assert check(str(path), 8.0).failed and "exit code -9" in capsys.readouterr().out


def long_cells():
    "Each cell that goes on with a file of runs, as notebook and id."
    for notebook in sorted((TOP / "nbs").glob("[5-6]*.ipynb")):
        for cell in json.loads(notebook.read_text())["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "code" and re.search(r"= go_on\(", text):
                yield pytest.param(notebook, cell["id"], id=f"{notebook.stem}-{cell['id']}")


@pytest.mark.parametrize("notebook, cell", [*long_cells()])
def test_a_long_run_leaves_out_no_cell_that_it_needs(notebook, cell):
    tree = ast.parse("\n".join(sources(notebook, cell).values()))
    known, used = {*dir(builtins)}, set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module, names=[ast.alias(name="*")]):
                known |= {*import_module(module).__all__}
            case ast.alias():
                known.add((node.asname or node.name).split(".")[0])
            case ast.FunctionDef() | ast.ClassDef():
                known.add(node.name)
            case ast.arg():
                known.add(node.arg)
            case ast.Name(ctx=ast.Store()):
                known.add(node.id)
            case ast.Name():
                used.add(node.id)
    assert used <= known, used - known
