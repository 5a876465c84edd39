"The notebooks as a book: import order, the shape of a chapter, clean outputs."
import ast
import json
import re
import tomllib

import pytest

from conftest import TOP
from gp_thesis.data import filled, load_record

NOTEBOOKS = sorted((TOP / "nbs").glob("[0-9]*.ipynb"))
CHAPTERS = [path for path in NOTEBOOKS if 10 <= int(path.name[:2]) < 90]


# Colab installs from the repository, whose address pyproject.toml has; the button to Colab is made of it, too.
REPOSITORY = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
INSTALL = f"""#| hide
import sys
if "google.colab" in sys.modules:
    package = "gp-thesis[book] @ git+{REPOSITORY}"
    get_ipython().run_line_magic("pip", f"install -q '{{package}}'")"""


EATEN = re.compile(r"(\\begin\{(aligned|gathered)\}|\\\\)\s*\[(?!-?[\d.]+(em|pt|ex)\])")


def cells(path, kind):
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def module(path):
    "The module that a notebook exports to, or None."
    found = re.findall(r"^#\| default_exp (\w+)", "\n".join(cells(path, "code")), re.M)
    return found[0] if found else None


def trees(path):
    "The syntax trees of a notebook's code, without the lines that only a notebook knows."
    for source in cells(path, "code"):
        yield ast.parse("\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))))


def homes():
    "The module that each public name of the package comes from; a module comes from itself."
    tree = ast.parse((TOP / "gp_thesis" / "__init__.py").read_text())
    names = {alias.asname or alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    return names | {name: name for path in NOTEBOOKS if (name := module(path))}


def used(code):
    "What syntax trees take from the package, a module's or a public name: by `import`, or as `gpt.NAME`."
    nodes = [node for tree in code for node in ast.walk(tree)]
    names, aliases = set(), set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "gp_thesis":
            parts = node.module.split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("gp_thesis.")}
            aliases |= {alias.asname or "gp_thesis" for alias in node.names if alias.name.split(".")[0] == "gp_thesis"}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            names.add(node.attr)
    return names


@pytest.mark.parametrize("code, names", [
    ("import gp_thesis as gpt\nx = gpt.SVGP(gpt.kernels.RBF())", {"SVGP", "kernels"}),
    ("import gp_thesis\ngp_thesis.fit(y.GP)", {"fit"}), ("x.SVGP\nimport gp_thesis as gpt", set()),
    ("from gp_thesis import VFE, linalg\nfrom gp_thesis.svgp import SVGP", {"VFE", "linalg", "svgp"}),
    ("import gp_thesis.ep", {"ep"}), ("import gp_thesis.ep as ep\nep.EP", {"ep", "EP"}), ("from numpy import linalg", set()),
])
def test_what_code_uses_of_the_package_is_seen(code, names):
    assert used([ast.parse(code)]) == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_uses_only_what_lower_numbers_export(path):
    home, numbers = homes(), {module(other): other.name for other in NOTEBOOKS if module(other)}
    late = {name: numbers[home[name]] for name in used(trees(path)) if name in home and numbers[home[name]] >= path.name}
    assert not late, f"{path.name} uses what comes later: {late}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_with_title_and_description_and_works_on_colab(path):
    first = cells(path, "markdown")[0]
    assert re.match(r"# \S.*\n+> \S", first), f"{path.name} must open with '# Title' and '> description'"
    install, = [source for source in cells(path, "code") if '"google.colab" in sys.modules' in source]
    assert install == INSTALL


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_ends_with_what_to_remember_and_exercises(path):
    text = "\n".join(cells(path, "markdown"))
    assert "## What to remember" in text and "## Exercises" in text


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_figures_have_captions_and_alternative_texts(path):
    for source in cells(path, "code"):
        if re.search(r"^#\| label: fig-", source, re.M):
            assert "#| fig-cap:" in source and "#| fig-alt:" in source, source[:80]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_outputs_hold_no_error_no_warning_and_no_path_of_a_machine(path):
    for cell in json.loads(path.read_text())["cells"]:
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error", path.name
            assert output.get("name") != "stderr", f"{path.name}: {''.join(output['text'])[:200]}"
            text = json.dumps({kind: data for kind, data in output.get("data", {}).items() if not kind.startswith("image/")})
            assert not re.search(r"(/(home|root|tmp)/|site-packages)", text + "".join(output.get("text", []))), path.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_exported_cells_fit_on_a_page(path):
    "At most 40 lines of at most 88 columns, docstrings and comments included: pages cut what is longer."
    found = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        lines = [line for line in source.splitlines() if not line.startswith("#| code-")]              # those are not on the page
        if cell["cell_type"] == "code" and any(re.match(r"#\|\s*export", line) for line in lines):
            found += [f"cell {cell.get('id')}: {len(lines)} lines, {lines[min(1, len(lines) - 1)]}"] if len(lines) > 40 else []
            found += [f"cell {cell.get('id')}: {len(line)} columns, {line.strip()}" for line in lines if len(line) > 88]
    assert not found, "\n".join([f"{len(found)} in {path.name}", *found])


HIDDEN = re.compile(r"^#\|\s*(hide|echo: false|include: false)", re.M)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_code_that_a_page_shows_is_as_wide_as_the_page(path):
    found = [f"cell {cell.get('id')}: {len(line)} columns, {line.strip()}" for cell in json.loads(path.read_text())["cells"]
             if cell["cell_type"] == "code" and not HIDDEN.search("".join(cell["source"]))
             for line in "".join(cell["source"]).splitlines() if len(line) > 88 and not line.startswith("#|")]
    assert not found, "\n".join([f"{len(found)} in {path.name}", *found])


def from_records(path):
    "Of each cell that fills a text from a record: the record, the text, and what its output shows."
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "from_record(" in source:
            for call in ast.walk(ast.parse(source)):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "from_record":
                    entry, text = map(ast.literal_eval, call.args)
                    shown = ["".join(output["data"]["text/markdown"]) for output in cell["outputs"] if "data" in output]
                    yield entry, text, shown


def stale(path):
    "Texts whose numbers are not those of the records."
    return [text for entry, text, shown in from_records(path) if shown != [filled(text, load_record(entry)["values"])]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_numbers_in_prose_are_those_of_the_records(path):
    assert stale(path) == []


def test_a_stale_number_is_found(tmp_path):
    cell = {"cell_type": "code", "source": 'from_record("M-F1.3", "σ is {RBF sigma|.2f}")', "outputs": [{"data": {"text/markdown": "σ is 0.99"}}]}
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    assert stale(path) == ["σ is {RBF sigma|.2f}"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_bracket_that_begins_a_line_of_a_formula_is_taken_for_an_option(path):
    found = [text[max(0, m.start() - 20):m.end() + 40] for text in cells(path, "markdown") for m in EATEN.finditer(text)]
    assert not found, f"{path.name}: write {{}}[ at the beginning of a line: {found}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_name_in_code_is_all_of_a_links_text(path):
    "nbdev makes a link of it, and of a link in a link a page shows the brackets."
    assert not re.findall(r"\[`[^`]+`\]\([^)]*\)", "\n".join(cells(path, "markdown")))


def test_an_eaten_bracket_is_found():
    assert EATEN.search(r"\begin{aligned} [K]_{rn} &= 1") and EATEN.search(r"a \\ [K]_{rn} &= 1")
    assert not EATEN.search(r"\begin{aligned} {}[K]_{rn} &= 1") and not EATEN.search(r"a \\[4pt] b")
