"""The record of a run in `run.json`: enough to reproduce a result and to distinguish two runs."""

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
"""Version of the layout of a run folder; no other version is read."""
MODEL_HOOKS, PAST_HOOKS = "hooks of the model", "past model.hooks"
"""The options that record the hooks of `with model.hooks(...)`, and other changes to the model."""
NAME_IT = 'Give it a text attribute that you change with it (f.identity = "v1")'
SHOWN = 80
"""Most characters of a value that a message or a printed record shows."""
_LIBRARIES = ("headwater", "transformer-lens", "transformers", "torch")
_version = functools.cache(importlib.metadata.version)


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that affect a result."""
    return {name: _version(name) for name in _LIBRARIES}


@runtime_checkable
class Recorded(Protocol):
    """The fields of a model that a run record uses: of a `HookedModel`, or of the weights of a checkpoint."""

    @property
    def name(self) -> str:
        """The hub name or folder."""

    @property
    def revision(self) -> str | None:
        """The revision on the hub; for a GGUF file its name, tensor types and SHA-256."""

    @property
    def fingerprint(self) -> str:
        """A hash of weights and configuration."""

    @property
    def tokenizer_digest(self) -> str:
        """A hash of the tokenizer."""

    @property
    def interventions(self) -> Mapping[str, object]:
        """Everything besides the weights that affects the model, by the option that records it."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""

    @property
    def device(self) -> torch.device:
        """Device of the computation."""


@dataclasses.dataclass(frozen=True, repr=False)
class RunRecord:
    """The record of a run: enough to reproduce its result, and to distinguish two runs."""

    analysis: str
    """The entry function, e.g. `classify_heads`."""
    model: str
    """The name or folder the model was loaded from."""
    fingerprint: str
    """A hash of the model's weights and configuration."""
    dtype: str
    device: str
    options: dict[str, Any]
    """The options of the call, as JSON values: data and functions become digests (`runs.identity`)."""
    tokenizer: str | None = None
    """A hash of the tokenizer; "none" for a model without one, None if unknown."""
    bos: list[int] | None = None
    """The ids that every text began with; None for the weights of a model, which are read without texts."""
    revision: str | None = None
    seed: int | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=library_versions)
    created: str = dataclasses.field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    )

    def __repr__(self) -> str:
        """Return a line per field and per option, long values cut."""
        lines = []
        for name in (field.name for field in dataclasses.fields(self)):
            value = getattr(self, name)
            if isinstance(value, dict):
                lines += [f"{name}:", *(f"    {option}: {_cut(repr(part))}" for option, part in value.items())]
            else:
                lines.append(f"{name}: {_cut(repr(value))}")
        return "\n    ".join([type(self).__name__, *lines])

    @classmethod
    def of(cls, analysis: str, model: Recorded, options: dict[str, Any], seed: int | None = None) -> RunRecord:
        """Record a run of an analysis on a model or its weights; options may have any type.

        Attached hooks that edit the model (`with model.hooks(...)`), and other changes to it, are also recorded as
        options.
        """
        return cls(
            analysis=analysis,
            model=model.name,
            fingerprint=model.fingerprint,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            # Described now: changing a function or table later must not change the record.
            options=describe(options | dict(model.interventions)),
            tokenizer=model.tokenizer_digest,
            bos=list(model.bos) if hasattr(model, "bos") else None,
            revision=model.revision,
            seed=describe(seed),
        )

    @property
    def unknown(self) -> str | None:
        """Why this run cannot be compared with others, and what to do; None if it can."""
        if self.tokenizer is not None and self.tokenizer.startswith(UNKNOWN):
            return f"the tokenizer: {self.tokenizer.removeprefix(UNKNOWN + ': ')}. {NAME_IT}"
        for name, value in self.options.items():
            reason = unknown_in(value)
            if reason and name == PAST_HOOKS:
                return f"{reason}, attached to the model without model.hooks. Use `with model.hooks(...)` instead"
            if reason:
                return f"the option {name}: {reason}. {NAME_IT}"
        return None

    def mismatch(self, model: Recorded) -> str | None:
        """Return how `model` differs from this run's, such as "other weights"; None if it does not."""
        if self.fingerprint != model.fingerprint:
            return "other weights"
        if self.tokenizer is not None and self.tokenizer != model.tokenizer_digest:
            return "another tokenizer"
        is_other = self.bos is not None and hasattr(model, "bos") and self.bos != list(model.bos)
        return "another beginning of texts" if is_other else None

    def differences(self, other: RunRecord) -> list[str]:
        """Return the differences between this run and another; empty if `other` would compute the same result.

        Of long values only the part around the first difference is shown.
        """
        ours, theirs = self._identity, other._identity
        pairs = {key: (theirs.get(key), ours.get(key)) for key in sorted(ours | theirs)}
        return [f"{key}: {_unlike(repr(a), repr(b))}" for key, (a, b) in pairs.items() if a != b]

    @property
    def identity(self) -> str:
        """A hash of the fields that must agree for two runs to be the same run."""
        return digest(self._identity)

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """The flattened fields that must agree for two runs to be the same run (date and device may differ)."""
        # Without the model's name: a moved folder, or a hub name for the same weights, is the same run.
        fixed = {name: getattr(self, name) for name in ("analysis", "fingerprint", "tokenizer", "bos", "dtype", "seed")}
        versions = {f"version of {name}": version for name, version in self.versions.items()}
        # Through JSON, so that a record from a file and a new one compare equal (tuples become lists).
        options = {f"option {name}": value for name, value in json.loads(json.dumps(self.options)).items()}
        return fixed | versions | options


def _unlike(there: str, here: str) -> str:
    """Show two texts that differ, each cut to the part around the first difference."""
    alike = next((i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), min(len(there), len(here)))
    begin = max(0, alike - SHOWN // 2)

    return f"{_cut(there, begin)} there, {_cut(here, begin)} here"


def _cut(text: str, begin: int = 0) -> str:
    """Cut a text of more than `SHOWN` characters to these from `begin` on."""
    if len(text) <= SHOWN:
        return text
    return f"{'...' * (begin > 0)}{text[begin : begin + SHOWN]}{'...' * (len(text) > begin + SHOWN)}"


def refuse_other_run(path: Path, run: RunRecord, names: Iterable[str]) -> RunRecord | None:
    """Return the record in a folder, or None for a new folder; refuse another run, and foreign files of these names."""
    if not (path / RUN_FILE).exists():
        refuse_foreign(path, RUN_FILE, names)
        return None
    earlier, _ = read_record(path)
    if differences := run.differences(earlier):
        is_code = any("function " in one for one in differences)
        why = " A function differs by its code, or by a value that it reads or keeps." if is_code else ""
        raise RunFolderError(
            f"The output folder {path} holds another run ({'; '.join(differences[:4])}).{why} "
            "Choose another folder, or delete this one."
        )
    return earlier


def read_record(path: Path) -> tuple[RunRecord, dict[str, Any]]:
    """Read the record of the run in a folder, and the whole content of its `run.json`."""
    if (written := read_json(path / RUN_FILE).get("format")) != FORMAT:
        raise RunFolderError(
            f"{path / RUN_FILE} is of format {written!r}; this headwater reads format {FORMAT}. Choose another folder."
        )
    plain = read_sealed(path / RUN_FILE)
    try:
        return RunRecord(**plain["run"]), plain
    except (KeyError, TypeError):
        raise RunFolderError(f"{path / RUN_FILE} holds no record of a run: choose another folder.") from None
