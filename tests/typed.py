"""Shapes in annotations, compared with every tensor that a test sends through them.

jaxtyping's import hook wraps each function of a module, and does so anew in every process. Wrapping all modules that
name shapes took 40 % of the processor time of `tests/test_knockout.py` (88 s against 53 s). So `make test` wraps the
kernels, and SHAPES=everywhere wraps all: `make test-shapes`, which computes a result of every class, and
`make test-fresh`. Plain types are what mypy reads (`make check`).
"""

import importlib.util
import os
import re
from pathlib import Path

from jaxtyping import install_import_hook

NAMES_SHAPES = re.compile(r"^from (jaxtyping|headwater\.axes) import", re.MULTILINE)
EVERYWHERE = os.environ.get("SHAPES") == "everywhere"


def modules_with_shapes() -> list[str]:
    """The modules of headwater that import names of shapes, found without importing any."""
    (package,) = importlib.util.find_spec("headwater").submodule_search_locations
    files = [file for file in Path(package).rglob("*.py") if NAMES_SHAPES.search(file.read_text(encoding="utf-8"))]
    dotted = [".".join(file.relative_to(Path(package).parent).with_suffix("").parts) for file in files]
    return sorted(name.removesuffix(".__init__") for name in dotted)


def wrapped() -> list[str]:
    """Those of them that this run wraps."""
    return [name for name in modules_with_shapes() if EVERYWHERE or name.startswith("headwater.kernels")]


def check_shapes() -> None:
    """Wrap these modules as they are imported; to be called before the first of them is."""
    install_import_hook(wrapped(), "beartype.beartype")
