"""What made a result: the record that `run.json` keeps, enough to make it again and to tell two runs apart."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from headwater.errors import RunFolderError
from headwater.runs.identity import UNKNOWN, describe, digest, unknown_in
from headwater.runs.storage import read_json, read_sealed, refuse_foreign

RUN_FILE = "run.json"
FORMAT = 4
"""The layout of a run folder; no other is read."""
HOOKS, PAST_HOOKS = "hooks of the model", "past model.hooks"
"""The options that record what `with model.hooks(...)` attached, and what was put into the model in other ways."""
NAME_IT = 'Give it a text attribute that you change with it (f.identity = "v1")'
_LIBRARIES = ("headwater", "transformer-lens", "transformers", "torch")
_version = functools.cache(importlib.metadata.version)


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that decide a result."""
    return {name: _version(name) for name in _LIBRARIES}


@runtime_checkable
class Recorded(Protocol):
    """What a run record tells of a model: a `HookedModel`, or the weights of a checkpoint."""

    @property
    def name(self) -> str:
        """The hub name or folder."""

    @property
    def revision(self) -> str | None:
        """The revision of the hub; of a GGUF file its name, types of numbers and SHA-256."""

    @property
    def fingerprint(self) -> str:
        """A hash of weights and configuration."""

    @property
    def tokenizer_digest(self) -> str:
        """A hash of the tokenizer."""

    @property
    def interventions(self) -> Mapping[str, object]:
        """What acts in the model beside its weights, by the option that records it."""

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
    """The options of the call, JSON values only: data and functions are there as digests (`runs.identity`)."""
    tokenizer: str | None = None
    """A hash of the tokenizer; "none" for a model without one, None where it is not known."""
    bos: list[int] | None = None
    """The ids that every text began with; None where weights were read and no text."""
    revision: str | None = None
    seed: int | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=library_versions)
    created: str = dataclasses.field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    )

    @classmethod
    def of(cls, analysis: str, model: Recorded, options: dict[str, Any], seed: int | None = None) -> RunRecord:
        """Record a run of an analysis on a model, or on the weights of one; options may be of any kind.

        Hooks that edit the model meanwhile (`with model.hooks(...)`), and what was put into it past them, are recorded
        as options too.
        """
        return cls(
            analysis=analysis,
            model=model.name,
            fingerprint=model.fingerprint,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            # Described now: a function or table that is changed later must not change the record.
            options=describe(options | dict(model.interventions)),
            tokenizer=model.tokenizer_digest,
            bos=list(model.bos) if hasattr(model, "bos") else None,
            revision=model.revision,
            seed=describe(seed),
        )

    @property
    def unknown(self) -> str | None:
        """Why it is not known whether another run is the same, and what to do; None where it is."""
        if self.tokenizer is not None and self.tokenizer.startswith(UNKNOWN):
            return f"the tokenizer: {self.tokenizer.removeprefix(UNKNOWN + ': ')}. {NAME_IT}"
        for name, value in self.options.items():
            reason = unknown_in(value)
            if reason and name == PAST_HOOKS:
                return f"{reason}, put into the model past model.hooks. Use `with model.hooks(...)` instead"
            if reason:
                return f"the option {name}: {reason}. {NAME_IT}"
        return None

    def mismatch(self, model: Recorded) -> str | None:
        """Say what of another model than this run's `model` has, "other weights" or "another tokenizer"; else None."""
        if self.fingerprint != model.fingerprint:
            return "other weights"
        is_other = self.tokenizer is not None and self.tokenizer != model.tokenizer_digest
        return "another tokenizer" if is_other else None

    def differences(self, other: RunRecord) -> list[str]:
        """Name what tells this run from another; empty when `other` would compute the same result."""
        ours, theirs = self._identity, other._identity
        return [
            f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here"
            for key in sorted(ours | theirs)
            if ours.get(key) != theirs.get(key)
        ]

    def is_sound(self) -> bool:
        """Whether every field is of its kind, as in a record that was not written by hand."""
        texts: tuple[str, ...] = (self.analysis, self.model, self.fingerprint, self.dtype, self.device, self.created)
        texts += () if self.tokenizer is None else (self.tokenizer,)
        tables = (self.options, self.versions)
        return all(isinstance(text, str) for text in texts) and all(isinstance(table, dict) for table in tables)

    @property
    def identity(self) -> str:
        """A hash of what must agree for two runs to be the same run."""
        return digest(self._identity)

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """Flatten what must agree for two runs to be the same run (date and device may differ)."""
        # Not the model's name: a folder that was moved, or a hub name for the same weights, is the same run.
        fixed = {name: getattr(self, name) for name in ("analysis", "fingerprint", "tokenizer", "dtype", "seed")}
        versions = {f"version of {name}": version for name, version in self.versions.items()}
        # Through JSON, so that a record from a file and one just made compare alike (tuples are lists there).
        options = {f"option {name}": value for name, value in json.loads(json.dumps(self.options)).items()}
        return fixed | versions | options


def refuse_other_run(path: Path, run: RunRecord, names: Iterable[str]) -> RunRecord | None:
    """Return the record that a folder holds, or None for a new one; refuse another run, and files of these names."""
    if not (path / RUN_FILE).exists():
        refuse_foreign(path, RUN_FILE, names)
        return None
    earlier, _ = read_record(path)
    differences = run.differences(earlier)
    if differences:
        is_code = any("function " in difference for difference in differences)
        why = " A function differs by its code, or by a value that it reads or keeps." if is_code else ""
        raise RunFolderError(
            f"The output folder {path} holds another run ({'; '.join(differences[:4])}).{why} "
            "Choose another folder, or delete this one."
        )
    return earlier


def read_record(path: Path) -> tuple[RunRecord, dict[str, Any]]:
    """Read the record of the run in a folder, and all else that its `run.json` says."""
    if (written := read_json(path / RUN_FILE).get("format")) != FORMAT:
        raise RunFolderError(
            f"{path / RUN_FILE} is of format {written!r}; this headwater reads format {FORMAT}. Choose another folder."
        )
    plain = read_sealed(path / RUN_FILE)
    try:
        record = RunRecord(**plain["run"])
    except (KeyError, TypeError):
        record = None
    if record is None or not record.is_sound():
        raise RunFolderError(f"{path / RUN_FILE} holds no record of a run: choose another folder.")
    return record, plain
