"""Shapes in annotations, held against every tensor that a test sends through them.

jaxtyping's import hook wraps each function of a module, which takes half of the whole suite's time where it wraps all
modules. So it wraps those whose annotations name shapes; plain types are what mypy reads (`make check`).
"""

import importlib.util
import re
from pathlib import Path

from jaxtyping import install_import_hook

NAMES_SHAPES = re.compile(r"^from (jaxtyping|headwater\.axes) import", re.MULTILINE)


def modules_with_shapes() -> list[str]:
    """The modules of headwater that import names of shapes, found without importing any."""
    (package,) = importlib.util.find_spec("headwater").submodule_search_locations
    files = [file for file in Path(package).rglob("*.py") if NAMES_SHAPES.search(file.read_text(encoding="utf-8"))]
    dotted = [".".join(file.relative_to(Path(package).parent).with_suffix("").parts) for file in files]
    return sorted(name.removesuffix(".__init__") for name in dotted)


def check_shapes() -> None:
    """Wrap these modules as they are imported; to be called before the first of them is."""
    install_import_hook(modules_with_shapes(), "beartype.beartype")
