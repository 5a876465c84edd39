"The notebooks as a book: import order, the shape of a chapter, clean outputs."
import ast
import json
import re

import pytest

from conftest import TOP

NOTEBOOKS = sorted((TOP / "nbs").glob("[0-9]*.ipynb"))
CHAPTERS = [path for path in NOTEBOOKS if 10 <= int(path.name[:2]) < 90]


def cells(path, kind):
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def module(path):
    "The module that a notebook exports to, or None."
    found = re.findall(r"^#\| default_exp (\w+)", "\n".join(cells(path, "code")), re.M)
    return found[0] if found else None


def imported(path):
    "The modules of the package that a notebook imports."
    names = set()
    for source in cells(path, "code"):
        source = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!")))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gp_thesis"):
                parts = node.module.split(".")
                names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("gp_thesis.")}
    return names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_imports_only_modules_of_lower_numbers(path):
    numbers = {module(other): other.name for other in NOTEBOOKS if module(other)}
    late = {name for name in imported(path) if name in numbers and numbers[name] >= path.name}
    assert not late, f"{path.name} imports {late}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_with_title_and_description_and_works_on_colab(path):
    first = cells(path, "markdown")[0]
    assert re.match(r"# \S.*\n+> \S", first), f"{path.name} must open with '# Title' and '> description'"
    assert any('"google.colab" in sys.modules' in source for source in cells(path, "code"))


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


def test_exported_cells_are_short():
    for path in NOTEBOOKS:
        for source in cells(path, "code"):
            if source.startswith("#| export"):
                assert len(source.splitlines()) <= 65, f"{path.name}: {source[:60]}"
