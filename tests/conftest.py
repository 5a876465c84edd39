"What all tests share: double precision unless a test asks otherwise, the quick profile, and data beside the checkout."

import os
from pathlib import Path

import hypothesis
import jax
import pytest

TOP = Path(__file__).resolve().parent.parent
DATA = TOP.parent / "shared" / "data"

jax.config.update("jax_enable_x64", True)
os.environ.setdefault("GP_THESIS_PROFILE", "quick")
if DATA.is_dir():
    os.environ.setdefault("GP_THESIS_DATA", str(DATA))

hypothesis.settings.register_profile("book", deadline=None, derandomize=True)     # compilation takes the time it takes
hypothesis.settings.load_profile("book")


@pytest.fixture(scope="session")
def top() -> Path:
    "The top of the repository."
    return TOP
