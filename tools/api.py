"""One page with everything that the package exports: signatures as they are written, what each argument means, and where
it is derived. Read from the source, so that a type reads as its author wrote it."""

import ast
import inspect
import pkgutil
import re
from importlib import import_module
from operator import attrgetter
from types import ModuleType

import gp_thesis

from . import help as source
from .crossref import Book, chapter_number

PAGE = "api.qmd"
MADE_FROM = re.compile(r"File to edit: \.\./nbs/(\S+\.ipynb)")
HEAD = """---
title: "Reference"
description: "Every public name of the package, chapter by chapter"
toc-depth: 2
---

"""


def modules() -> dict[str, ModuleType]:
    "The modules that notebooks export, by their notebook, in its order."
    names = [name for _, name, _ in pkgutil.iter_modules(gp_thesis.__path__)]
    found = {name: MADE_FROM.search(inspect.getsource(import_module(f"gp_thesis.{name}"))) for name in names}
    return {made[1]: import_module(f"gp_thesis.{name}") for name, made in sorted(found.items(), key=lambda item: item[1] and item[1][1] or "") if made}


def assignments(module: ModuleType) -> dict[str, str]:
    "The constants of a module, each with the text of its assignment."
    text = inspect.getsource(module)
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    return {target.id: ast.get_source_segment(text, node) for node in nodes for target in node.targets if isinstance(target, ast.Name)}


def of_field(default: str) -> str:
    "The default of a field of a module, which says more than that."
    field = ast.parse(default, mode="eval").body
    if not (isinstance(field, ast.Call) and ast.unparse(field.func) == "eqx.field"):
        return default
    return next((ast.unparse(said.value) for said in field.keywords if said.arg == "default"), "")


def argument(name: str, kind, said: dict) -> str:
    "`name: type = default`, of what the source says."
    annotation, default = said.get(name, ("", ""))
    default = of_field(default) if default else default
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(kind, "")
    equal = f" = {default}" if annotation else f"={default}"
    return f"{stars}{name}" + (f": {annotation}" if annotation else "") + (equal if default else "")


def signature(name: str, member, written: dict) -> str:
    "`member` with its arguments, on one line or one line for each."
    found = inspect.signature(member).parameters.values()
    parts, stars = [], False
    for p in found:
        if p.name == "self":
            continue
        if p.kind is p.KEYWORD_ONLY and not stars:
            parts.append("*")
        stars = stars or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        parts.append(argument(p.name, p.kind, written))
    returns = f" -> {written['return'][0]}" if written.get("return", ("",))[0] else ""
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= 88:
        return line
    return f"{name}(\n    " + ",\n    ".join(parts) + f",\n){returns}"


def place(module: str, name: str) -> str:
    "Where a name stands on the page: its anchor."
    return f"{module.partition('.')[2]}.{name}"


class Reference:
    "The text of the page."

    def __init__(self, book: Book):
        self.book = book
        self.modules = modules()
        self.sources = {module.__name__: source.read(module) for module in self.modules.values()}

    def written(self, member, where: source.Source) -> tuple[dict, dict]:
        "Types and defaults, and what the comments say, of a function or of a constructor with what it inherits."
        if not inspect.isclass(member):
            return where.types, where.comments
        bases = [self.sources.get(base.__module__, {}).get(base.__qualname__) for base in reversed(member.__mro__)]
        types, said = {}, {}
        for base in filter(None, bases):
            types |= base.types
            said |= {name: text for name, text in base.comments.items() if text}
        return {name: text for name, text in types.items() if name != "return"}, said

    def resolved(self, text: str) -> str:
        return self.book.resolve(text, PAGE)

    def methods(self, owner: type) -> dict[str, str]:
        "Public documented methods of a class itself: their names, and those with the name of the class."
        known = self.sources.get(owner.__module__, {})
        names = {name: f"{owner.__qualname__}.{name}" for name in vars(owner) if not name.startswith("_")}
        return {name: full for name, full in names.items() if full in known and known[full].docstring
                and inspect.isroutine(inspect.getattr_static(owner, name))}

    def inherited(self, member, own: dict[str, str]) -> list[str]:
        "Links to the methods that a class has from others on this page."
        if not inspect.isclass(member):
            return []
        links = {}
        for base in member.__mro__[1:]:
            public = base.__qualname__ in getattr(inspect.getmodule(base), "__all__", [])
            links = {name: f"[`{name}`](#{place(base.__module__, full)})" for name, full in self.methods(base).items() if public} | links
        return [link for name, link in links.items() if name not in own]

    def entry(self, module: ModuleType, name: str, level: str = "###") -> list[str]:
        "A function or a class, and a class's public methods."
        where, member = self.sources[module.__name__].get(name), attrgetter(name)(module)
        head = f"{level} `{name}` {{#{place(module.__name__, name)}}}"
        if where is None:                                        # a constant
            return [head, f"```python\n{assignments(module).get(name, f'{name} = {member!r}')}\n```"]
        types, said = self.written(member, where)
        plain = inspect.isclass(member) and issubclass(member, (Exception, type))
        call = name.rpartition(".")[2] if plain else signature(name.rpartition(".")[2], member, types)
        text = [f"```python\n{call}\n```", re.sub(r"\A\[\(", "Equation [(", self.resolved(inspect.cleandoc(where.docstring or "")))]
        shown = [] if plain else [p for p in inspect.signature(member).parameters if said.get(p)]
        text.append("\n".join(f"- `{p}`: {self.resolved(said[p])}" for p in shown))
        if where.comments.get("return") and not inspect.isclass(member):
            text.append(f"Returns {self.resolved(where.comments['return'])}")
        own = self.methods(member) if inspect.isclass(member) else {}
        inherited = ", ".join(self.inherited(member, own))
        text.append(f"Also has {inherited}." if inherited else "")
        methods = (part for full in own.values() for part in self.entry(module, full, "####"))
        return [head, *filter(None, text), *methods]

    def page(self) -> str:
        parts = []
        for notebook, module in self.modules.items():
            short = module.__name__.partition(".")[2]
            about = (module.__doc__ or "").strip()
            parts.append(f"## gp_thesis.{short} {{#{short}}}\n\n{about}. [Chapter {chapter_number(notebook)}]({notebook})\n")
            parts += [part for name in module.__all__ for part in self.entry(module, name)]
        return HEAD + "\n\n".join(parts) + "\n"
