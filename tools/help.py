"""Write `gp_thesis/help.json`: what `help()` says where that is more than the source's docstring, `python -m tools.help`.

In the source a docstring names equations by their labels and works by their keys, and a comment beside an argument says what it
means. The page resolves all three; here they become plain text, which `import gp_thesis` puts in the place of the docstrings."""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import gp_thesis

from .crossref import read_book

TOP = Path(__file__).resolve().parent.parent
FILE = TOP / "gp_thesis" / "help.json"
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*?)\]\([^()\s]*\)")
EQUATION = re.compile(r"\[\((\d+\.\d+)\)\]\([^()\s]*\)")


class Source(NamedTuple):
    "A function or a class as it is written: its docstring, and comments, types and defaults of its arguments or fields."
    docstring: str | None
    comments: dict[str, str]
    types: dict[str, tuple[str, str]]


def comment(lines: list[str], number: int) -> str:
    "At the end of a line, counted from one."
    return lines[number - 1].partition("  # ")[2].strip()


def of_function(node: ast.FunctionDef, lines: list[str]) -> dict[str, str]:
    places = [*node.args.posonlyargs, *node.args.args, *filter(None, [node.args.vararg]), *node.args.kwonlyargs,
              *filter(None, [node.args.kwarg])]
    said = {place.arg: comment(lines, place.lineno) for place in places if place.lineno > node.lineno}
    return said | ({"return": comment(lines, node.returns.end_lineno)} if node.returns else {})


def types_of_function(node: ast.FunctionDef) -> dict[str, tuple[str, str]]:
    "Types and defaults, as they are written, and the type of what is returned."
    text = lambda part: ast.unparse(part) if part is not None else ""
    given = node.args
    places = [*given.posonlyargs, *given.args]
    pairs = [*zip(places, [None] * (len(places) - len(given.defaults)) + given.defaults), *zip(given.kwonlyargs, given.kw_defaults),
             *((place, None) for place in (given.vararg, given.kwarg) if place)]
    return {place.arg: (text(place.annotation), text(default)) for place, default in pairs} | {"return": (text(node.returns), "")}


def types_of_class(node: ast.ClassDef) -> dict[str, tuple[str, str]]:
    "Of its fields and of its constructor."
    found = {inner.target.id: (ast.unparse(inner.annotation), ast.unparse(inner.value) if inner.value else "")
             for inner in node.body if isinstance(inner, ast.AnnAssign)}
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            found |= types_of_function(inner)
    return found


def of_class(node: ast.ClassDef, lines: list[str]) -> dict[str, str]:
    "Of its fields, at the end of the line or above it, and of its constructor."
    said = {}
    for inner in node.body:
        if isinstance(inner, ast.AnnAssign):
            above = lines[inner.lineno - 2].strip()
            said[inner.target.id] = comment(lines, inner.end_lineno) or above.strip("# :") * above.startswith("# ")
        elif isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            said |= {name: text for name, text in of_function(inner, lines).items() if text}
    return said


def read(module: ModuleType) -> dict[str, Source]:
    "All functions and classes of a module by their qualified names."
    text = inspect.getsource(module)
    lines, found = text.splitlines(), {}

    def collect(nodes, owner=""):
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                found[owner + node.name] = Source(ast.get_docstring(node), of_function(node, lines), types_of_function(node))
            elif isinstance(node, ast.ClassDef):
                found[owner + node.name] = Source(ast.get_docstring(node), of_class(node, lines), types_of_class(node))
                collect(node.body, f"{owner}{node.name}.")

    collect(ast.parse(text).body)
    return found


def arguments(member, source: Source, sources: dict[str, dict[str, Source]]) -> str:
    "What the comments say: of a function's arguments, or of a constructor's, with those that come from the bases of the class."
    said, returns = dict(source.comments), source.comments.get("return")
    if inspect.isclass(member):
        bases = [sources.get(base.__module__, {}).get(base.__qualname__) for base in reversed(member.__mro__)]
        inherited = {name: text for base in bases if base for name, text in base.comments.items() if text}
        nothing = issubclass(member, (Exception, type))                        # these have no signature
        said = {name: inherited.get(name) for name in ([] if nothing else inspect.signature(member).parameters)}
    said.pop("return", None)
    said = {name: text[:1].upper() + text[1:] if re.match(r"[a-z]{2}(?!\w*[(|])", text) else text for name, text in said.items() if text}
    lines = ["\n", "Arguments:", *(f"    {name}: {text}" for name, text in said.items())] if said else []
    return "\n".join([*lines, *([f"\nReturns: {returns}"] if returns else [])])


def overridden(member_of: str, module: ModuleType, sources: dict[str, dict[str, Source]]) -> Source:
    "A method as it is written, with the docstring of what it overrides, and its arguments, where it has none of its own."
    owner, method = member_of.rsplit(".", 1)
    bases = [sources.get(base.__module__, {}).get(f"{base.__qualname__}.{method}") for base in attrgetter(owner)(module).__mro__]
    return next((base for base in bases if base and base.docstring), sources[module.__name__][member_of])


def plain(docstring: str, book) -> str:
    "A docstring with 'equation 12.3' for a label and names and years for works."
    text = LINK.sub(r"\1", EQUATION.sub(r"equation \1", book.resolve(docstring, "")))
    return text[:1].upper() + text[1:] if text.startswith("equation") else text


def texts() -> dict[str, dict[str, str]]:
    "The text of each public member with a docstring whose help is more than that, by module."
    book = read_book(TOP / "nbs", TOP / "references.bib")
    for module in pkgutil.iter_modules(gp_thesis.__path__):                    # those, too, that are loaded only when asked for
        importlib.import_module(f"gp_thesis.{module.name}")
    modules = {name: module for name, module in sorted(sys.modules.items()) if name.startswith("gp_thesis.") and hasattr(module, "__all__")}
    sources = {name: read(module) for name, module in modules.items()}
    found = {}
    for full, module in modules.items():
        for name, source in sources[full].items():
            owner, *inner = name.split(".")
            own = source.docstring
            if inner and owner in module.__all__:
                source = overridden(name, module, sources)
            if source.docstring and owner in module.__all__ and not any(part.startswith("_") and part != "__call__" for part in inner):
                text = plain(source.docstring, book) + plain(arguments(attrgetter(name)(module), source, sources), book)
                if text != own:
                    found.setdefault(full.partition(".")[2], {})[name] = text
    return found


def main():
    FILE.write_text(json.dumps(texts(), indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
