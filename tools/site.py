"""Build the site: `python -m tools.site [FOLDER OF NOTEBOOKS]`, nbs/ unless another folder is named.

nbdev's processing and our processor write `_proc/`; Quarto, or smalldocs where Quarto is not installed, renders it; the
result is `_docs/`, which can be read offline, from a server or straight from the folder.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import yaml
from nbdev.config import get_config
from nbdev.serve import proc_nbs
from smalldocs.site import build

from . import api, mathjax
from .crossref import BookError, read_book

TOP = Path(__file__).resolve().parent.parent
PROCESSED, SITE = TOP / "_proc", TOP / "_docs"
FILES = ["styles.css", "book.js", "favicon.svg"]
CODE = re.compile(r"<pre\b[\s\S]*?</pre>")
NO_HEADER = re.compile(r"<th( [^>]*)?></th>")                          # the corner of a table heads nothing
KATEX = re.compile(r'<(?:link|script)\b[^>]*/katex@[^>]*>(?:</script>)?\n?')
WEB_FONT = re.compile(r"""@import\s+(?:url\(\s*["']?https?:[^)]*\)|(["'])https?:.*?\1)[^;]*;""")
OUTSIDE = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(?:https?:)?//[^>]*>|<link\b[^>]*rel="(?:stylesheet|icon|preload)"[^>]*href="(?:https?:)?//[^>]*>')


def listed(contents: list) -> list[str]:
    "The notebooks of a sidebar, in order."
    return [name for item in contents for name in (listed(item["contents"]) if isinstance(item, dict) and "contents" in item
                                                   else [item["href"] if isinstance(item, dict) else item])]


def process(notebooks: Path):
    "From notebooks to `_proc/`: everything that either renderer reads."
    shutil.rmtree(PROCESSED, ignore_errors=True)
    proc_nbs(str(notebooks), n_workers=0, force=True)
    (PROCESSED / api.PAGE).write_text(api.Reference(read_book(notebooks, TOP / "references.bib")).page())
    config = get_config()
    settings = yaml.safe_load((TOP / "_quarto.yml").read_text())
    settings["website"]["repo-url"] = config.git_url                    # it stands in pyproject.toml, once
    missing = [name for name in listed(settings["website"]["sidebar"]["contents"]) if not (PROCESSED / name).exists()]
    if missing:
        raise BookError(f"_quarto.yml lists pages that are not there: {', '.join(missing)}")
    (PROCESSED / "_quarto.yml").write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    for name in FILES:
        shutil.copy(TOP / "tools" / name, PROCESSED / name)
    mathjax.install(PROCESSED)


def render():
    "From `_proc/` to `_docs/`."
    quarto = shutil.which("quarto")
    if quarto:
        subprocess.run([quarto, "render", str(PROCESSED), "--no-execute"], check=True)
    else:
        warnings = [w for w in build(PROCESSED, quiet=True).warnings if "html-math-method" not in w]   # ours: see finish
        if warnings:
            raise BookError("\n".join(warnings))
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.move(PROCESSED / "_docs", SITE)


def finish(notebooks: Path):
    "Link what code refers to, point the pages at our copy of MathJax, give the search an index that works from a folder, and look for leaks."
    script = f'<script src="{mathjax.SCRIPT}" defer></script>\n'
    book = read_book(notebooks, TOP / "references.bib")
    shutil.copytree(notebooks, SITE / "notebooks", ignore=lambda _, names: {name for name in names if not name.endswith(".ipynb")})
    for page in sorted(SITE.glob("*.html")):
        text = CODE.sub(lambda code: book.in_code(code[0], page.name), page.read_text())
        text = NO_HEADER.sub(r"<td\1></td>", text)
        page.write_text(text)
        if KATEX.search(text):
            text = KATEX.sub("", text).replace("</head>", f"{script}</head>", 1)
            page.write_text(text)
        leak = OUTSIDE.search(text)
        if leak:
            raise BookError(f"{page.name} loads something from outside the site: {leak[0]}")
    for css in SITE.rglob("*.css"):
        css.write_text(WEB_FONT.sub("", css.read_text()))                # the themes' fallback fonts are the system's
    index = json.loads((SITE / "search.json").read_text())
    (SITE / "search-index.js").write_text(f"window.searchIndex = {json.dumps(index, ensure_ascii=False)};\n")
    mathjax.check(SITE)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("notebooks", nargs="?", type=Path, default=TOP / "nbs")
    notebooks = parser.parse_args().notebooks.resolve()
    os.chdir(TOP)
    try:
        read_book(notebooks, TOP / "references.bib")                     # every unknown label or key, before any work
        process(notebooks)
        render()
        finish(notebooks)
    except BookError as error:
        raise SystemExit(f"the site is not built:\n{error}")
    print(f"{len(list(SITE.glob('*.html')))} pages in {SITE.name}/; open {SITE.name}/index.html in a browser")


if __name__ == "__main__":
    main()
