"The repository's own rules: what importing costs, what is committed, what is in step."

import configparser
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
import yaml
from packaging.utils import canonicalize_name

import gp_thesis
from tools.crossref import chapter_number
from tools.readme import readme
from tools.site import listed

PLOTTING_AND_NOTEBOOKS = ["matplotlib", "seaborn", "IPython", "ipywidgets", "pandas", "nbdev", "pooch", "sklearn"]
ONLY_DEPENDENCIES = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {refused}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
import gp_thesis
"""
CONFIGURATION = """
import jax
before = dict(jax.config.values)
import gp_thesis
changed = {key: (before[key], value) for key, value in jax.config.values.items() if before.get(key) != value}
assert not changed, changed
"""


def python(code, top, *arguments):
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=top, capture_output=True, text=True)


def distribution(line):
    "The name that a requirement begins with, in its normal form: builders write wadler_lindig with either sign."
    return canonicalize_name(re.match(r"[\w.-]+", line)[0])


def requirements(extra=None):
    "The names of what the package, or one of its extras, requires directly."
    names = set()
    for line in metadata.requires("gp-thesis"):
        wanted = re.search(r"extra == ['\"](\w+)['\"]", line)
        if (wanted[1] if wanted else None) == extra:
            names.add(distribution(line))
    return names


def closure(names):
    "Those distributions and all that they require, as far as it is installed."
    found, todo = set(), list(names)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        todo += [distribution(line) for line in required if "extra ==" not in line]
    return found


def test_import_leaves_jax_configuration_alone(top):
    done = python(CONFIGURATION, top)
    assert done.returncode == 0, done.stderr


COLLECTOR = """
import gc, sys
if sys.argv[1] == "off":
    gc.disable()
if sys.argv[1] == "frozen":
    gc.freeze()
before, phases = (gc.isenabled(), gc.get_freeze_count()), []
watch = lambda phase, about: phases.append(phase)
gc.callbacks.append(watch)
import gp_thesis
gc.callbacks.remove(watch)
assert len(phases) < 60, len(phases)  # begin and end of each; 800 without care
assert gc.isenabled() == before[0] and (gc.get_freeze_count() > 0) == (before[1] > 0)
class Ring: ...
ring = Ring(); ring.ring = ring; del ring
assert gc.collect() > 0
"""


@pytest.mark.parametrize("state", ["on", "off", "frozen"])
def test_import_looks_for_no_garbage_and_leaves_the_collector_as_it_was(top, state):
    done = python(COLLECTOR, top, state)
    assert done.returncode == 0, done.stderr


def test_import_takes_no_notebook_or_plotting_library_along(top):
    done = python(f"import sys, gp_thesis; print([m for m in {PLOTTING_AND_NOTEBOOKS} if m in sys.modules])", top)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_import_needs_no_extra(top):
    core = {name.replace("-", "_") for name in closure(requirements())}
    installed = metadata.packages_distributions()
    refused = {module for module, owners in installed.items()
               if not any(owner.lower().replace("-", "_") in core | {"gp_thesis"} for owner in owners)}
    assert "matplotlib" in refused and "jax" not in refused
    done = python(ONLY_DEPENDENCIES.format(refused=refused), top)
    assert done.returncode == 0, done.stderr


HELP = """
import importlib, inspect, pkgutil, pydoc, re, sys
import numpy as np
import gp_thesis as gpt
from gp_thesis import data, gpssm as GPSSM, linalg, plotting
files = [importlib.import_module("gp_thesis." + file.name) for file in pkgutil.iter_modules(gpt.__path__) if file.name[0] != "_"]
modules = [module for name, module in sys.modules.items() if name.startswith("gp_thesis.") and hasattr(module, "__all__")]
public = {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}
public |= {f"{name}.{inner}": member for name, owner in public.items() if inspect.isclass(owner)
           for inner, member in inspect.getmembers(owner) if inner == "__call__" or not inner.startswith("_")}
raw = [name for name, member in public.items() if re.search(r"@(eq|fig|tbl|thm)-|\\[@", inspect.getdoc(member) or "")]
assert len(modules) == len(files) and not raw, raw
ours = {name: getattr(gpt, name) for name in {*vars(gpt), *gpt._WHEN_ASKED_FOR} if name[0] != "_"} | {
    "plot_posterior": plotting.plot_posterior, "set_theme": plotting.set_theme, "standardise": data.standardise, "log_density": linalg.log_density}
ours = {name: owner for name, owner in ours.items() if callable(owner) and owner.__module__.startswith("gp_thesis.")}
made_by_others = (gpt.Posterior, GPSSM.SeriesPosterior, GPSSM.Draws)                   # not by a user, who needs no words for their fields
asked = {name: owner for name, owner in ours.items() if not (inspect.isclass(owner) and issubclass(owner, made_by_others))}
silent = {name: missing for name, owner in asked.items() if owner is not gpt.PowerGPSSM and (missing := [
    argument for argument in inspect.signature(owner).parameters if not re.search(rf"^    {argument}: \\S", inspect.getdoc(owner) or "", re.M)])}
assert len(asked) > 100 and not silent, silent
post = gpt.Exact(gpt.GP(gpt.RBF(), gpt.Gaussian())).posterior(np.zeros((2, 1)), np.zeros(2))
for query in ("mean", "marginals", "covariance", "sample", "predict_y", "log_predictive_density"):
    for owner in (post, gpt.ExactPosterior, gpt.GaussianPosterior, gpt.Mixture):
        assert inspect.cleandoc(getattr(owner, query).__doc__) == inspect.getdoc(getattr(gpt.Posterior, query)), (owner, query)
assert "Mean and variance of f" in pydoc.render_doc(post.marginals) and list(inspect.signature(post.marginals).parameters) == ["Xs"]
assert re.search(r"equation 30\\.\\d+", gpt.SVGP.__doc__) and "(Hensman et al., 2015)" in gpt.SVGP.__doc__
assert "    callback: callback(approx, steps, seconds)" in inspect.getdoc(gpt.fit)       # code keeps its letters
print(inspect.getdoc(gpt.Exact.objective))
"""


def test_help_shows_numbers_names_and_what_arguments_mean(top):
    done = python(HELP, top)
    assert done.returncode == 0 and "A batch is (X, y)" in done.stdout, done.stderr


def test_the_version_stands_in_one_place(top):
    project = tomllib.loads((top / "pyproject.toml").read_text())["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", gp_thesis.__version__)
    assert gp_thesis.__version__ in (top / "CHANGELOG.md").read_text()


def test_constraints_are_plain_pins_of_what_is_installed(top):
    lines = [line for line in (top / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pinned = {distribution(line): line.split("==")[1] for line in lines}
    assert "torch" not in pinned
    assert closure(requirements()) & set(pinned) >= requirements()
    differ = {name: (version, metadata.version(name)) for name, version in pinned.items() if metadata.version(name) != version}
    assert not differ


def test_the_sidebar_lists_every_notebook_in_order(top):
    sidebar = yaml.safe_load((top / "_quarto.yml").read_text())["website"]["sidebar"]["contents"]
    chapters = [name for name in listed(sidebar) if chapter_number(name)]
    assert chapters == sorted(path.name for path in (top / "nbs").glob("[0-9]*.ipynb"))
    assert set(listed(sidebar)) - set(chapters) == {"index.ipynb", "api.qmd", "references.ipynb"}


def test_readme_is_the_index(top):
    text = (top / "README.md").read_text()
    assert text == readme()
    assert "make book" in text and "make test" in text


def test_notebooks_hold_no_error_and_no_path_of_a_machine(top):
    home = re.compile(r"/(?:home|Users|root|work|tmp)/\w")
    for path in (top / "nbs").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            for output in cell.get("outputs", []):
                assert output["output_type"] != "error", path.name
                assert not home.search(json.dumps([output.get("text"), (output.get("data") or {}).get("text/plain")])), path.name


@pytest.mark.parametrize("profile", ["quick", "paper"])
def test_settings_name_entries_of_the_catalogue_or_chapters(top, profile):
    settings = configparser.ConfigParser(interpolation=None)
    settings.optionxform = str
    settings.read(top / "settings.ini")
    entries = {entry["id"] for entry in tomllib.loads((top / "nbs" / "catalogue.toml").read_text())["entry"]}
    entries |= {f"chapter-{path.name[:2]}" for path in (top / "nbs").glob("[0-9]*.ipynb")}  # examples of a chapter's own
    assert "seed" in settings.defaults() and settings.has_section(profile)
    for key in settings[profile]:
        assert "." not in key or any(key.startswith(f"{entry}.") for entry in entries), key


def test_the_index_leads_to_every_chapter(top):
    text = (top / "README.md").read_text()
    missing = [path.name for path in (top / "nbs").glob("[0-9]*.ipynb") if f"](nbs/{path.name})" not in text]
    assert not missing


VERDICTS = {"agrees", "differs by", "other data", "contradicts", "not comparable", "not done"}


def test_the_reproduction_shows_the_records_as_they_are(top):
    cells = json.loads((top / "nbs" / "90_reproduction.ipynb").read_text())["cells"]
    shown = "".join("".join((output.get("data") or {}).get("text/markdown", "")) for cell in cells for output in cell.get("outputs", []))
    done, waiting = shown.split("## Not done yet")
    catalogue = tomllib.loads((top / "nbs" / "catalogue.toml").read_text())["entry"]
    records = {path.stem: json.loads(path.read_text()) for path in (top / "nbs" / "results").glob("*.json")}
    lines, name = {}, None
    for line in done.splitlines():
        if line.startswith("|") and not line.startswith(("| entry", "|--")):
            name = found[1] if (found := re.search(r">([\w.-]+)</span>", line)) else name
            lines.setdefault(name, []).append(re.split(r" ?(?<!\\)\| ?", line)[1:-1])
    assert lines.keys() == records.keys() <= {entry["id"] for entry in catalogue}
    plain = lambda text: re.sub(r"([\\`*_\[\]^~|@$<>])", r"\\\1", text)
    for entry in catalogue:
        if record := records.get(entry["id"]):
            rows = lines[entry["id"]]                                                       # first, published, here, difference, verdict, why
            assert record["profile"] in rows[0][0] and len(rows) == len(record["published"]) + len(entry.get("claim", [])) > 0
            for row, (number, text) in zip(rows, record["published"].items()):
                same = record["checks"][number] == "matches"
                assert row[1] == plain(f"{number} {text}") and row[4] in ({"agrees"} if same else VERDICTS - {"agrees"}), row
                assert same or f"{record['values'][number] - float(text):+.3g}" in row[3]
            for row, claim in zip(rows[len(record["published"]):], entry.get("claim", [])):
                assert row[1] == plain(claim["published"]) and row[4] == claim["verdict"] in VERDICTS, row
                assert claim["why"] or claim["verdict"] in ("agrees", "contradicts"), entry["id"]
        else:
            assert f">{entry['id']}</span>" in waiting and "claim" not in entry
    assert "nothing published" not in shown and all("nothing published" not in json.dumps(record) for record in records.values())


def test_figures_of_the_catalogue_are_there(top):
    for entry in tomllib.loads((top / "nbs" / "catalogue.toml").read_text())["entry"]:
        if "figure" in entry:
            assert re.search(rf"(label: |\{{#){re.escape(entry['figure'])}\b", (top / "nbs" / entry["notebook"]).read_text()), entry["id"]
