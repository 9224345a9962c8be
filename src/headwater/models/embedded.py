"""Where the embedded model lies, and whether its weight file is the one that its manifest describes.

The manifest `world.json` stands beside the weights and is written by the run that trained them: the version of the
format, the size of `model.safetensors` and its SHA-256.
"""

import hashlib
import json
from importlib.resources import files
from pathlib import Path

from headwater.errors import ModelError

VERSION = 1
MANIFEST = "world.json"
REBUILD = "Rebuild it with `python -m headwater.world train`, or install headwater again."


def embedded_folder(folder: str | Path | None = None) -> Path:
    """Return the checkpoint folder of the embedded model after checking that it is whole.

    Args:
        folder: another folder that `python -m headwater.world train` wrote; None for the one that comes with headwater.

    Raises:
        ModelError: a file is missing or damaged, or the weights are of another version; the message has the command
            that rebuilds them.
    """
    path = Path(folder) if folder is not None else Path(str(files("headwater") / "world" / "model"))
    weights = path / "model.safetensors"
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version, size, expected = manifest["version"], manifest["bytes"], manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(f"The embedded model in {path} has no readable {MANIFEST}. {REBUILD}") from None
    if version != VERSION:
        raise ModelError(
            f"The embedded model in {path} is of version {version}; this headwater reads version {VERSION}. {REBUILD}"
        )
    if not weights.is_file():
        raise ModelError(f"The embedded model in {path} has no model.safetensors. {REBUILD}")
    found = weights.stat().st_size
    if found != size:
        raise ModelError(f"{weights} is damaged: it has {found:,} bytes instead of {size:,}. {REBUILD}")
    if hashlib.sha256(weights.read_bytes()).hexdigest() != expected:
        raise ModelError(f"{weights} is damaged: its SHA-256 is not the one in {MANIFEST}. {REBUILD}")
    return path
