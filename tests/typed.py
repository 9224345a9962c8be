"""Shapes in annotations, compared with every tensor that a test sends through them.

jaxtyping's import hook wraps each function of a module, and does so anew in every process. Wrapping all modules that
name shapes took 40 % of the processor time of `tests/test_knockout.py` (88 s against 53 s). So `make test` wraps the
kernels, and SHAPES=everywhere wraps all: `make test-shapes`, which computes a result of every class, and
`make test-fresh`. Plain types are what mypy reads (`make check`), and so are names: to `checker` a Literal is any text,
since a name that is not there is to reach the function, which says so in its own words.
"""

import importlib.util
import os
import re
from pathlib import Path
from typing import Literal

from beartype import BeartypeConf, FrozenDict, beartype
from jaxtyping import install_import_hook

NAMES_SHAPES = re.compile(r"^from (jaxtyping|headwater\.axes) import", re.MULTILINE)
LITERAL = re.compile(r"\bLiteral\[[^\]]+\]")
PACKAGE = Path(importlib.util.find_spec("headwater").submodule_search_locations[0])
SOURCES = {file: file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
EVERYWHERE = os.environ.get("SHAPES") == "everywhere"


def modules_with_shapes() -> list[str]:
    """The modules of headwater that import names of shapes, found without importing any."""
    files = [file for file, source in SOURCES.items() if NAMES_SHAPES.search(source)]
    dotted = [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files]
    return sorted(name.removesuffix(".__init__") for name in dotted)


def wrapped() -> list[str]:
    """Those of them that this run wraps."""
    return [name for name in modules_with_shapes() if EVERYWHERE or name.startswith("headwater.kernels")]


LITERALS = {eval(text, {"Literal": Literal}) for source in SOURCES.values() for text in LITERAL.findall(source)}
checker = beartype(conf=BeartypeConf(hint_overrides=FrozenDict(dict.fromkeys(LITERALS, str))))


def check_shapes() -> None:
    """Wrap these modules as they are imported; to be called before the first of them is."""
    install_import_hook(wrapped(), "tests.typed.checker")
