"""What made a result: the record that `run.json` keeps, enough to make it again and to tell two runs apart."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from headwater.errors import RunFolderError
from headwater.options import plain_numbers
from headwater.storage import read_json

RUN_FILE = "run.json"
FORMAT = 1
"""The layout of a run folder. 0 (before it was written down) has no manifest and is read all the same."""
_LIBRARIES = ("headwater", "transformer-lens", "transformers", "torch")


@runtime_checkable
class Recorded(Protocol):
    """What a run record tells of a model: a `HookedModel`, or the weights of a checkpoint."""

    @property
    def name(self) -> str:
        """The hub name or folder."""

    @property
    def revision(self) -> str | None:
        """The revision of the hub."""

    @property
    def fingerprint(self) -> str:
        """A hash of weights and configuration."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What made a result: enough to make it again, and to tell two runs apart."""

    analysis: str
    """The entry function, e.g. `classify_heads`."""
    model: str
    """The name or folder the model was loaded from."""
    fingerprint: str
    """A hash of the model's weights and configuration."""
    dtype: str
    device: str
    options: dict[str, Any]
    """The options of the call, JSON values only."""
    revision: str | None = None
    seed: int | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: library_versions())
    created: str = dataclasses.field(default_factory=lambda: _now())

    @classmethod
    def of(cls, analysis: str, model: Recorded, options: dict[str, Any], seed: int | None = None) -> RunRecord:
        """Record a run of an analysis on a model, or on the weights of one."""
        return cls(
            analysis=analysis,
            model=model.name,
            fingerprint=model.fingerprint,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            options=plain_numbers(options),
            revision=model.revision,
            seed=plain_numbers(seed),
        )

    def differences(self, other: RunRecord) -> list[str]:
        """Name what tells this run from another; empty when `other` would compute the same result."""
        ours, theirs = self._identity(), other._identity()
        return [
            f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here"
            for key in sorted(ours | theirs)
            if ours.get(key) != theirs.get(key)
        ]

    def is_sound(self) -> bool:
        """Whether every field is of its kind, as in a record that was not written by hand."""
        texts = (self.analysis, self.model, self.fingerprint, self.dtype, self.device, self.created)
        tables = (self.options, self.versions)
        return all(isinstance(text, str) for text in texts) and all(isinstance(table, dict) for table in tables)

    def _identity(self) -> dict[str, Any]:
        """Flatten what must agree for two runs to be the same run (date and device may differ)."""
        fixed = {"analysis": self.analysis, "fingerprint": self.fingerprint, "dtype": self.dtype, "seed": self.seed}
        versions = {f"version of {name}": version for name, version in self.versions.items()}
        options = {f"option {name}": value for name, value in json.loads(json.dumps(self.options)).items()}
        return fixed | versions | options


def refuse_other_run(path: Path, run: RunRecord) -> RunRecord | None:
    """Return the record that `path` holds, or None for a new folder.

    Raises:
        RunFolderError: the folder holds a different run; the message names what differs.
    """
    if not (path / RUN_FILE).exists():
        return None
    earlier = read_record(path, read_json(path / RUN_FILE))
    differences = run.differences(earlier)
    if differences:
        raise RunFolderError(
            f"The output folder {path} holds another run ({'; '.join(differences[:4])}). "
            "Choose another folder, or delete this one."
        )
    return earlier


def read_record(path: Path, plain: Mapping[str, Any]) -> RunRecord:
    """Read the record of a run of this format or an older one."""
    written = plain.get("format", 0)
    if type(written) is not int or not 0 <= written <= FORMAT:
        raise RunFolderError(
            f"{path} was written in format {written!r}; this headwater reads formats 0 to {FORMAT}. Upgrade headwater, "
            "or choose another folder."
        )
    try:
        record = RunRecord(**plain["run"])
    except (KeyError, TypeError):
        record = None
    if record is None or not record.is_sound():
        raise RunFolderError(f"{path / RUN_FILE} holds no record of a run: choose another folder.")
    return record


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that decide a result."""
    return {name: _version(name) for name in _LIBRARIES}


@functools.cache
def _version(library: str) -> str:
    return importlib.metadata.version(library)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
