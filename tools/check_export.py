"Fail when exporting, cleaning or writing the help changes a file: notebooks and package are out of step, or outputs not clean."

import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent


def snapshot() -> dict[Path, bytes]:
    files = [*(TOP / "gp_thesis").rglob("*.py"), *(TOP / "gp_thesis").glob("*.json"), *(TOP / "nbs").glob("*.ipynb")]
    return {path.relative_to(TOP): path.read_bytes() for path in files}


def main():
    before = snapshot()
    for command in ("nbdev-export", "nbdev-clean"):
        subprocess.run([Path(sys.executable).with_name(command)], cwd=TOP, check=True)
    subprocess.run([sys.executable, "-m", "tools.help"], cwd=TOP, check=True)
    after = snapshot()
    changed = sorted(str(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    if changed:
        raise SystemExit("nbdev-export, nbdev-clean or `python -m tools.help` changed these files; look at them and commit:\n" + "\n".join(changed))
    print(f"export check: {len(after)} files in step")


if __name__ == "__main__":
    main()
