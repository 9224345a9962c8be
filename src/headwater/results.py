"""What every result shares: a tidy table, a plot, a folder on disk, and the record of the run that made it.

A result is a frozen dataclass. `save` writes its data frames as parquet, its tensors as safetensors and everything else
as `run.json`, with the size and SHA-256 of each file; `load` reads them back. `RunFolder` is the same folder while the
run is still going: finished pieces are written as they come, so that an interrupted run continues where it stopped.
With several processes (`headwater.shards`) each writes its own pieces, and the main one the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import html
import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import pandas as pd
import torch
from pyarrow import ArrowException
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwater.errors import RunFolderError
from headwater.shards import processes, wait_for
from headwater.storage import (
    LOCK,
    make_folder,
    one_writer,
    read_json,
    release_writer,
    remove_leftovers,
    write_atomically,
    write_json,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RUN_FILE = "run.json"
FORMAT = 1
"""The layout of a run folder. 0 (before it was written down) has no manifest and is read all the same."""
TENSORS = "tensors.safetensors"
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
            options=options,
            revision=model.revision,
            seed=seed,
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


class Result:
    """Base of the result dataclasses: one with a `table`, a `run` and a `plot` can be shown, saved and loaded."""

    table: pd.DataFrame
    run: RunRecord

    def plot(self, ax: Axes | None = None) -> Axes | Figure:
        """Draw the result's main figure on `ax`, or on a new figure; nothing is shown or written."""
        raise NotImplementedError

    def save(self, folder: str | Path) -> Path:
        """Write the result into `folder`: a parquet file per table, `tensors.safetensors`, `run.json`.

        Raises:
            RunFolderError: the folder holds another run.
        """
        path = Path(folder)
        refuse_other_run(path, self.run)
        make_folder(path)
        write_result(path, self)
        return path

    @classmethod
    def load(cls: type[AnyResult], folder: str | Path) -> AnyResult:
        """Read back a result that `save` or a run with `out=` wrote.

        Raises:
            RunFolderError: the folder holds no finished run, or a run of another kind.
        """
        return read_result(cls, Path(folder))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.run.model}: {len(self.table):,} rows)"

    def _repr_html_(self) -> str:
        return table_html(self, self.table)


AnyResult = TypeVar("AnyResult", bound=Result)


def table_html(shown: object, table: pd.DataFrame) -> str:
    """Return what a notebook shows of a result: its one line, and the first rows and outer columns of its table."""
    return f"<p>{html.escape(repr(shown), quote=False)}</p><div>{table.head(8).to_html(max_cols=12, border=0)}</div>"


Compute: TypeAlias = Callable[[], Mapping[str, Tensor]]
"""What makes a piece: named tensors, from nothing that another piece makes."""


class RunFolder:
    """The folder of a run still going. Finished pieces survive an interrupt; another run's folder is refused.

    One process (or thread) may write to a folder at a time, or the processes of one launch together.
    """

    def __init__(self, path: str | Path, run: RunRecord):
        self.path = Path(path)
        self._pieces = self.path / "pieces"
        self._processes = processes()
        self._count = 0
        self._lock: Any = None
        self.run = self._processes.on_main(lambda: self._open(run))

    @property
    def finished(self) -> bool:
        """Whether the folder holds the whole result already: `load` it."""
        return bool(read_json(self.path / RUN_FILE).get("finished"))

    def piece(self, name: str, compute: Compute) -> dict[str, Tensor]:
        """Return the named piece: from the folder if it is there, else computed and written now.

        With several processes, one of them computes it and the others wait; `pieces` keeps all of them busy.

        Raises:
            RunFolderError: the piece cannot be written, for example because the disk is full.
        """
        mine, self._count = self._processes.owns(self._count), self._count + 1
        return self._made(name, compute) if mine else wait_for(lambda: self._read(name))

    def pieces(self, work: Iterable[tuple[str, Compute]]) -> Iterator[dict[str, Tensor]]:
        """Yield every piece in order; of several processes, each computes its own before it reads the others'."""
        if self._processes.count == 1:
            yield from (self.piece(name, compute) for name, compute in work)
            return
        names = []
        for name, compute in work:
            names.append(name)
            mine, self._count = self._processes.owns(self._count), self._count + 1
            if mine:
                self._made(name, compute)
        yield from (wait_for(lambda name=name: self._read(name)) for name in names)  # type: ignore[misc]

    def finish(self, result: Result) -> None:
        """Write the whole result and drop the pieces it was made from."""
        self._processes.wait_for_all()
        self._processes.on_main(lambda: self._close(result))

    def _open(self, run: RunRecord) -> RunRecord:
        earlier = refuse_other_run(self.path, run)
        if earlier is not None and self.finished:
            self._tidy()
            return earlier
        make_folder(self.path)
        self._lock = one_writer(self.path)
        earlier = refuse_other_run(self.path, run)
        if self._lock is None:
            writer = read_json(self.path / RUN_FILE).get("writer", "unknown") if earlier else "just begun"
            raise RunFolderError(
                f"Another run is writing to {self.path} ({writer}). Wait for it, or choose another folder."
            )
        if earlier is not None and self.finished:
            self._let_go()
            return earlier
        remove_leftovers(self.path)
        if earlier is None:
            shutil.rmtree(self._pieces, ignore_errors=True)
        here = f"process {os.getpid()} on {platform.node()}"
        record = dataclasses.asdict(earlier or run)
        write_json(self.path / RUN_FILE, {"format": FORMAT, "run": record, "finished": False, "writer": here})
        make_folder(self._pieces)
        remove_leftovers(self._pieces)
        return earlier or run

    def _close(self, result: Result) -> None:
        write_result(self.path, result)
        shutil.rmtree(self._pieces, ignore_errors=True)
        self._let_go()

    def _tidy(self) -> None:
        """Remove what a process left that was killed after the result was whole."""
        if not (self._pieces.exists() or (self.path / LOCK).exists()):
            return
        with contextlib.suppress(RunFolderError):
            self._lock = one_writer(self.path)
        if self._lock is not None:
            remove_leftovers(self.path)
            shutil.rmtree(self._pieces, ignore_errors=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            release_writer(self._lock)
            self._lock = None

    def _made(self, name: str, compute: Compute) -> dict[str, Tensor]:
        found = self._read(name)
        if found is not None:
            return found
        tensors = {key: value.contiguous() for key, value in compute().items()}
        write_atomically(self._file(name), lambda temporary: save_file(tensors, temporary))
        return tensors

    def _read(self, name: str) -> dict[str, Tensor] | None:
        """Return a piece that is there and whole, else None."""
        try:
            return load_file(self._file(name))
        except (SafetensorError, OSError):
            return None

    def _file(self, name: str) -> Path:
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ValueError(f"A piece cannot be named {name!r}: the name is part of a file's.")
        return self._pieces / f"{name}.safetensors"


def run_pieces(folder: RunFolder | None, work: Iterable[tuple[str, Compute]]) -> Iterator[dict[str, Tensor]]:
    """Yield every piece of a run in order, kept in its folder where it has one (see `RunFolder.pieces`)."""
    if folder is not None:
        yield from folder.pieces(work)
    else:
        yield from (dict(compute()) for _, compute in work)


def refuse_other_run(path: Path, run: RunRecord) -> RunRecord | None:
    """Return the record that `path` holds, or None for a new folder.

    Raises:
        RunFolderError: the folder holds a different run; the message names what differs.
    """
    if not (path / RUN_FILE).exists():
        return None
    earlier = _read_record(path, read_json(path / RUN_FILE))
    differences = run.differences(earlier)
    if differences:
        raise RunFolderError(
            f"The output folder {path} holds another run ({'; '.join(differences[:4])}). "
            "Choose another folder, or delete this one."
        )
    return earlier


def write_result(path: Path, result: Result) -> None:
    """Write every field of a result into `path`; `run.json` comes last, so a half-written folder is unfinished."""
    if (path / RUN_FILE).exists() and (before := read_json(path / RUN_FILE)).get("finished"):
        write_json(path / RUN_FILE, {"format": FORMAT, "run": before.get("run"), "finished": False})
    plain: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    files: list[str] = []
    for field in dataclasses.fields(result):  # type: ignore[arg-type]
        value = getattr(result, field.name)
        if isinstance(value, pd.DataFrame):
            files.append(f"{field.name}.parquet")
            write_atomically(path / files[-1], value.to_parquet)
        elif isinstance(value, Tensor):
            tensors[field.name] = value.contiguous()
        elif isinstance(value, RunRecord):
            plain["run"] = dataclasses.asdict(value)
        else:
            plain[field.name] = value
    if tensors:
        files.append(TENSORS)
        write_atomically(path / TENSORS, lambda temporary: save_file(tensors, temporary))
    about = {"format": FORMAT, "result": type(result).__name__, "finished": True}
    write_json(path / RUN_FILE, about | plain | {"manifest": {name: _seal(path / name) for name in files}})


def read_result(cls: type[AnyResult], path: Path) -> AnyResult:
    """Read the fields that `write_result` wrote."""
    if not (path / RUN_FILE).exists():
        raise RunFolderError(f"{path} holds no {RUN_FILE}: it is not a folder that headwater wrote.")
    plain = read_json(path / RUN_FILE)
    run = _read_record(path, plain)
    if not plain.get("finished"):
        raise RunFolderError(
            f"The run in {path} is not finished. Run the same command again with this folder to finish it."
        )
    if plain.get("result") != cls.__name__:
        found = plain.get("result")
        raise RunFolderError(f"{path} holds a {found}, not a {cls.__name__}: use {found}.load.")
    _check_manifest(path, plain.get("manifest", {}))
    try:
        tensors = load_file(path / TENSORS) if (path / TENSORS).exists() else {}
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if field.name == "run":
                values["run"] = run
            elif (path / f"{field.name}.parquet").exists():
                values[field.name] = _tuples(pd.read_parquet(path / f"{field.name}.parquet"))
            else:
                values[field.name] = tensors[field.name] if field.name in tensors else plain[field.name]
    except (OSError, SafetensorError, ArrowException, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"The result in {path} is damaged ({error}). Delete the folder and run again.") from None
    return cls(**values)


def _seal(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def _check_manifest(path: Path, manifest: object) -> None:
    """Refuse files that are not the ones the run wrote."""
    for name, seal in manifest.items() if isinstance(manifest, dict) else ():
        file = path / Path(name).name
        if not file.is_file() or _seal(file) != seal:
            found = "changed since the run wrote it" if file.is_file() else "missing"
            raise RunFolderError(
                f"The result in {path} is damaged: {file.name} is {found}. Delete the folder and run again."
            )


def _read_record(path: Path, plain: Mapping[str, Any]) -> RunRecord:
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


def _tuples(table: pd.DataFrame) -> pd.DataFrame:
    """Turn the arrays that parquet makes of list-valued cells back into tuples, also of tuples."""
    for name in table.columns:
        if len(table) and isinstance(table[name].iloc[0], np.ndarray):
            table[name] = table[name].map(_tuple)
    return table


def _tuple(cell: object) -> object:
    return tuple(_tuple(item) for item in cell.tolist()) if isinstance(cell, np.ndarray) else cell
