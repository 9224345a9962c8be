"""What every result shares: a table, a summary and a report of it, a plot, a folder on disk, and what made it.

A result is a frozen dataclass. `save` writes its data frames as parquet, its tensors as safetensors and everything else
as `run.json`, with the size and SHA-256 of each file, and of itself; `load` reads them back. Tensors in parts
(`headwater.runs.storage`) are files in a folder of their field's name, which carry their hash and are not read until
they are requested.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import html
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import pandas as pd
from pyarrow import ArrowException
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwater.calls import checked_calls
from headwater.errors import InputError, RunFolderError, UnknownNameError, did_you_mean
from headwater.foreign_names import TABLES, missing
from headwater.options import checked_number, checked_path, checked_several, shown
from headwater.registry import Registry
from headwater.runs.identity import describe, digest
from headwater.runs.record import FORMAT, RUN_FILE, RunRecord, read_record, refuse_other_run
from headwater.runs.storage import NAME, Shards, make_folder, read_sealed, seal_of, write_atomically, write_sealed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headwater.stats.claims import Judgement


TENSORS = "tensors.safetensors"
FILES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx", ".pkl", ".pt", ".npz", ".safetensors")
"""What a folder's name does not end in: who saves to such a name means a file."""
DRAWINGS: Registry[type, Callable[..., Any]] = Registry("figure of a result", "headwater.figures")
"""What draws a result, by its class: a function of the result, `ax`, and the options of the class's `plot`."""
INLINE = 256 * 2**10
"""Characters of a page that a notebook shows unasked, as the last line of a cell."""
VIEWS: Registry[type, Callable[..., View]] = Registry("view of a result", "headwater.views")
"""What shows a result as a page, by its class; what has none of its own shows as `Result` does."""


def _followed_by(method: Callable[..., Any], finish: Callable[[Any], Any]) -> Any:
    """Return a method that gives what `finish` makes of its outcome."""

    @functools.wraps(method)
    def finished(*args: Any, **options: Any) -> Any:
        return finish(method(*args, **options))

    return finished


def _printable(sentences: list[str]) -> list[str]:
    # A name that the caller gave may hold what no terminal prints.
    return [plain_text(sentence) for sentence in sentences]


def _known_columns(summary: pd.DataFrame) -> pd.DataFrame:
    return summary[[name for name in summary if summary[name].notna().any() or not len(summary)]]


@checked_calls
class Result:
    """Base of the result dataclasses: a `table`, a `run`, and what is said, drawn and kept of them.

    `result["layer"]`, `len(result)` and `for row in result` read the table.

    A result of one's own defines `summary` and `report`, and registers what draws it: `DRAWINGS.add(ItsClass)`.
    """

    table: pd.DataFrame
    run: RunRecord

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Classes of users too get their calls checked, and their reports made printable.
        checked_calls(cls)
        for name, finish in (("summary", _known_columns), ("report", _printable)):
            if name in vars(cls):
                setattr(cls, name, _followed_by(getattr(cls, name), finish))

    def summary(self) -> pd.DataFrame:
        """Return the few numbers that are worth a glance, one row for each thing that they are about.

        Columns of which nothing is known, such as the interval of one prompt, are left out.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no summary().")

    def report(self) -> list[str]:
        """Return what the numbers say, and what they do not, as plain sentences."""
        raise NotImplementedError(f"{type(self).__name__} defines no report().")

    def findings(self) -> dict[str, Any]:
        """Return the numbers of the summary as JSON values, with the model: what the command line prints of a run."""
        return {"model": self.run.model, "summary": records_of(whole_summary(self))}

    def plot(self, ax: Axes | None = None, *, title: str | None = None, figsize: Size | None = None) -> Axes | Figure:
        """Draw the result's main figure on `ax`, or on a new figure; nothing is shown or written.

        Args:
            ax: where to draw; default: a new figure.
            title: in place of the figure's own.
            figsize: width and height of a new figure, in inches; default: what suits what is drawn.

        Raises:
            InputError: `DRAWINGS` has no figure of this class.
        """
        return self._drawn(ax, title, figsize)

    def _drawn(self, ax: Axes | None, title: str | None, figsize: Size | None, **options: object) -> Axes | Figure:
        """Draw with what is registered for the result's class, or for the nearest that it inherits from."""
        return drawn_by(self, ax, title, figsize, **options)

    def view(self, **what: object) -> View:
        """Return the result as one self-contained page, to look at in a notebook or to keep with `save_html`.

        Args:
            what: what the view of this class offers to choose.

        Raises:
            InputError: it offers no such choice, or refuses the one made.
        """
        return shown_by(self, what)

    def save_html(self, path: str | Path, **what: object) -> Path:
        """Write the view into one file that can be sent and opened anywhere; see `view` for `what`.

        Raises:
            InputError: see `view`; or the path cannot be one.
            RunFolderError: the file cannot be written.
        """
        return self.view(**what).save_html(path)

    def save(self, folder: str | Path) -> Path:
        """Write the result into `folder`: a parquet file per table, `tensors.safetensors`, `run.json`.

        Raises:
            RunFolderError: the folder holds another run, or files of others that would be overwritten.
        """
        path = checked_path("folder", folder)
        if path.suffix in FILES:
            raise InputError(
                f"save writes a folder, not a file such as {path}: result.save({path.stem!r}) is read back by "
                f"{type(self).__name__}.load; result.table.to_csv(path) writes the rows alone."
            )
        refuse_other_run(path, self.run, file_names(type(self)))
        make_folder(path)
        write_result(path, self)
        return path

    @classmethod
    def load(cls: type[AnyResult], folder: str | Path) -> AnyResult:
        """Read back a result that `save` or a run with `out=` wrote.

        Raises:
            RunFolderError: the folder holds no finished run, or a run of another kind.
        """
        return read_result(cls, checked_path("folder", folder))

    def digest(self) -> str:
        """Name this result in the record of a run that starts from it: a hash of all but its own record."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return digest([type(self).__name__, *(getattr(self, field.name) for field in fields if field.name != "run")])

    if not TYPE_CHECKING:  # a type checker would take every name for one that is there

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if name.startswith("_") or hasattr(type(self), name):
                return object.__getattribute__(self, name)
            place = kind if kind in TABLES else "result"
            if place == "result" and hasattr(pd.DataFrame, name):
                raise UnknownNameError(f"This {kind} has no {name!r}: its table has, result.table.{name}.")
            raise UnknownNameError(missing(f"This {kind}", place, name, dir(self)))

    def __getitem__(self, column: Any) -> Any:
        try:
            return self.table[column]
        except (IndexError, KeyError, TypeError, ValueError):
            raise InputError(
                f"The table has no column {shown(column)}.{did_you_mean(column, self.table.columns)} A row is "
                "result.table.iloc[0]."
            ) from None

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Any]:
        return self.table.itertuples(index=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.run.model}: {len(self.table):,} rows)"

    def _repr_html_(self) -> str:
        return table_html(self, self.table)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str | bytes]:
        """Return what a notebook shows as the last line of a cell: the view above the table, where it is small."""
        if not self.is_explored:
            return {"text/plain": repr(self), "text/html": self._repr_html_()}
        return bundle_of(self)

    @property
    def is_explored(self) -> bool:
        """Whether this class has a view of its own, beside the one that every result has."""
        return VIEWS.of_class(type(self)) is not VIEWS.of_class(Result)


AnyResult = TypeVar("AnyResult", bound=Result)


def whole_summary(result: Result, **options: Any) -> pd.DataFrame:
    """Return a summary with all its columns, for what reads them by name."""
    whole: pd.DataFrame = inspect.unwrap(type(result).summary)(result, **options)
    return whole


def drawn_by(
    result: object, ax: Axes | None, title: str | None, figsize: Size | None, **options: object
) -> Axes | Figure:
    """Draw with what is registered for the class of a result, or for the nearest that it inherits from."""
    if ax is not None and not hasattr(ax, "get_subplotspec"):
        raise InputError(
            f"ax={shown(ax)} is not a matplotlib axes: give one, as plt.subplots()[1] is, or leave it out for a new "
            "figure. result.plot().savefig(path) writes it."
        )
    size = checked_size(figsize, ax)
    token = _ASKED.set(size)
    try:
        drawn: Any = DRAWINGS.of_class(type(result))(result, ax, **options)
    finally:
        _ASKED.reset(token)
    if not hasattr(drawn, "savefig"):
        drawn.savefig = drawn.figure.savefig  # plot().savefig(path) writes one panel as it writes several
    return apply_title_and_size(drawn, title, size)


def shown_by(shown: Any, what: Mapping[str, object]) -> View:
    """Return what the view registered for an object's class makes of it, with the options it offers."""
    show = VIEWS.of_class(type(shown))
    known = list(inspect.signature(show).parameters)[1:]
    if unknown := [name for name in what if name not in known]:
        offered = f"it takes {', '.join(known)}" if known else "it takes none"
        hint = did_you_mean(unknown[0], known)
        raise InputError(f"The view of a {type(shown).__name__} has no option {unknown[0]}=: {offered}.{hint}")
    return show(shown, **what)


def bundle_of(shown: Any) -> dict[str, str | bytes]:
    """Return what a notebook shows of what has a view: it above the table, where its page is small.

    Else the table, and why there is no more than that.
    """
    table = shown._repr_html_()
    bundle: dict[str, str | bytes] = {"text/plain": repr(shown)}
    try:
        view = shown.view()
        size = len(view.page)
        large = f"Its view takes {size / 1000:,.0f} kB, so it is not shown unasked: call view(), or save_html()."
        why = large if size > INLINE else ""
    except InputError as error:
        why = f"There is no view of all of it: {error}"
    if why:
        return bundle | {"text/html": f"{table}<p>{html.escape(why, quote=False)}</p>"}
    below = f"<details><summary>table</summary>{table}</details>"
    bundle["text/html"] = f"<p>{html.escape(repr(shown), quote=False)}</p>{view._repr_html_()}{below}"
    return bundle if view.picture is None else bundle | {"image/png": view.picture}


def table_html(shown: object, table: pd.DataFrame) -> str:
    """Return what a notebook shows of a result: its one line, and the first rows and outer columns of its table."""
    return f"<p>{html.escape(repr(shown), quote=False)}</p><div>{table.head(8).to_html(max_cols=12, border=0)}</div>"


def file_names(kind: type[Result]) -> set[str]:
    """Return the names under which a result of a class may be written, beside `run.json`."""
    kinds = get_type_hints(kind)
    fields = [name for name in getattr(kind, "__dataclass_fields__", {}) if name != "run"]
    return {TENSORS, *(name if kinds[name] is Shards else f"{name}.parquet" for name in fields)}


def write_result(path: Path, result: Result) -> None:
    """Write every field of a result into `path`; `run.json` says first and last whether the folder is finished."""
    if not (path / RUN_FILE).exists() or read_sealed(path / RUN_FILE).get("finished"):
        # Unfinished first, finished last: a process killed in between leaves no folder that looks whole.
        going = {"format": FORMAT, "run": dataclasses.asdict(result.run), "finished": False}
        write_sealed(path / RUN_FILE, going)
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
        elif isinstance(value, Shards):
            files += [f"{field.name}/{name}" for name in value.write(path / field.name)]
        elif isinstance(value, RunRecord):
            plain["run"] = dataclasses.asdict(value)
        else:
            plain[field.name] = value
    if tensors:
        files.append(TENSORS)
        write_atomically(path / TENSORS, lambda temporary: save_file(tensors, temporary))
    about = {"format": FORMAT, "result": type(result).__name__, "finished": True}
    write_sealed(path / RUN_FILE, about | plain | {"manifest": {name: _seal(path / name) for name in files}})


def read_result(cls: type[AnyResult], path: Path) -> AnyResult:
    """Read the fields that `write_result` wrote."""
    if not (path / RUN_FILE).exists():
        raise RunFolderError(f"{path} holds no {RUN_FILE}: it is not a folder that headwater wrote.")
    run, plain = read_record(path)
    if not plain.get("finished"):
        raise RunFolderError(
            f"The run in {path} is not finished. Run the same command again with this folder to finish it."
        )
    if plain.get("result") != cls.__name__:
        found = plain.get("result")
        raise RunFolderError(f"{path} holds a {found}, not a {cls.__name__}: use {found}.load.")
    manifest = _checked_manifest(path, plain.get("manifest"), cls)
    kinds = get_type_hints(cls)
    try:
        tensors = load_file(path / TENSORS) if (path / TENSORS).exists() else {}
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if field.name == "run":
                values["run"] = run
            elif kinds[field.name] is Shards:
                parts = sorted(path / name for name in manifest if name.startswith(f"{field.name}/"))
                values[field.name] = Shards.of_files(parts)
            elif (path / f"{field.name}.parquet").exists():
                table = values[field.name] = pd.read_parquet(path / f"{field.name}.parquet")
                for name in table.columns:
                    if len(table) and isinstance(table[name].iloc[0], np.ndarray):
                        table[name] = table[name].map(_tuple)
            else:
                values[field.name] = tensors[field.name] if field.name in tensors else plain[field.name]
    except (OSError, SafetensorError, ArrowException, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"The result in {path} is damaged ({error}). Delete the folder and run again.") from None
    for name, kind in kinds.items():
        if name in values and not _is_of(values[name], kind):
            raise _damaged(path, f"its {name} is a {type(values[name]).__name__} of another kind")
    return cls(**values)


def _is_of(value: object, kind: Any) -> bool:
    """Whether a value is of an annotated kind: a table, a tensor with its axes, a text, one of some, or lists."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_is_of(value, one) for one in inside)
    if origin is None:
        return isinstance(value, kind)
    if origin is Literal:
        return isinstance(value, str) and value in inside
    return isinstance(value, origin) and not isinstance(value, str) and all(_is_of(item, inside[0]) for item in value)


def _seal(file: Path) -> dict[str, Any]:
    """Return the size of a file, and the hash of its bytes; of a part (`Shards`) its own seal, without reading it."""
    if NAME.fullmatch(file.name):
        return {"bytes": file.stat().st_size, "seal": seal_of(file)}
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def _checked_manifest(path: Path, manifest: object, cls: type[Result]) -> dict[str, Any]:
    """Return the seals of the files of a result, none of which has changed since the run wrote it."""
    allowed = file_names(cls)
    if not isinstance(manifest, dict):
        why = "so it is not known whether its files are the ones the run wrote"
        raise _damaged(path, f"{RUN_FILE} has no manifest, {why}")
    # A table that lies there beside the manifest would be read as if the run had written it.
    unsealed = sorted(name for name in allowed - set(manifest) if (path / name).is_file())
    if unsealed:
        raise _damaged(path, f"{unsealed[0]} is not in its manifest")
    for name, seal in manifest.items():
        folder, _, part = name.partition("/")
        # A manifest is a file that anyone may have written: its names must not lead out of the folder.
        if (folder if part else name) not in allowed or (part and not NAME.fullmatch(part)):
            raise _damaged(path, f"its manifest names {name[:60]!r}, which is not a file of a {cls.__name__}")
        file = path / name
        if not file.is_file():
            raise _damaged(path, f"{name} is missing")
        if _seal(file) != seal:
            raise _damaged(path, f"{name} is changed since the run wrote it")
    return manifest


def _damaged(path: Path, what: str) -> RunFolderError:
    return RunFolderError(f"The result in {path} is damaged: {what}. Delete the folder and run again.")


def _tuple(cell: object) -> object:
    """Turn the array that parquet makes of a list-valued cell back into a tuple, also of tuples."""
    return tuple(_tuple(item) for item in cell.tolist()) if isinstance(cell, np.ndarray) else cell


# The few numbers of a result that are worth a glance: as JSON values, as a data frame, as words in a sentence.


def rounded(value: float) -> float | None:
    """Return a number as JSON has it, with four places; None where it was not measured."""
    return round(float(value), 4) if math.isfinite(value) else None


def each_row(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table, by the names of its columns."""
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def records_of(table: pd.DataFrame) -> list[dict[str, object]]:
    """Return the rows of a table as JSON values; None where there is no value."""
    return each_row(table.astype(object).where(table.notna(), None))


def frame_of(rows: Iterable[Mapping[str, object]]) -> pd.DataFrame:
    """Return findings as a data frame, a row each; NaN where there is no value."""
    table = pd.DataFrame(list(rows))
    return table.where(table.notna(), np.nan).infer_objects()


def with_interval(value: float, low: float = math.nan, high: float = math.nan, places: int = 2) -> str:
    """Write a number with its interval, where it has one: "0.52 (0.41 to 0.60)"."""
    if not math.isfinite(value):
        return "not measured"
    interval = f" ({low:.{places}f} to {high:.{places}f})" if math.isfinite(low) and math.isfinite(high) else ""
    return f"{value:.{places}f}{interval}"


def plain_text(text: str) -> str:
    """Return text with what no terminal prints spelled out: line breaks, controls, what turns the writing direction."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


# What every figure of a result can be given, whatever it draws: another title, another size.
#
# It is done to the figure that was drawn, so that what draws a result, also one of a user's own, need not know of it.


Size: TypeAlias = tuple[float, float]
"""Width and height, in inches."""
LARGEST = 100.0
"""Inches; the largest picture that can be written has 65,536 dots, at 300 an inch 218 inches."""


def checked_size(figsize: object, ax: Axes | None) -> Size | None:
    """Return the size of a new figure, if one was given."""
    if figsize is None:
        return None
    if ax is not None:
        raise InputError("figsize= is of a new figure, and ax= is on one already: give one of the two.")
    sides = checked_several("figsize", figsize, "(width, height) in inches, as figsize=(7, 3)")
    if len(sides) != 2:
        raise InputError(f"figsize={shown(figsize)} must be (width, height) in inches.")
    width, height = (checked_number("figsize", side, 0.0, LARGEST, up_to=True) for side in sides)
    return width, height


_ASKED: ContextVar[Size | None] = ContextVar("size", default=None)
"""The size that the figure now drawn was given, if it was given one."""


def requested_size() -> Size | None:
    """Return the size that the figure now drawn was given."""
    return _ASKED.get()


def apply_title_and_size(drawn: Axes | Figure, title: str | None, size: Size | None) -> Axes | Figure:
    """Give what was drawn a title and a size of the caller's, and break lines that are longer than there is room."""
    if title is not None and not isinstance(title, str):
        raise InputError(f"title={shown(title)} must be a text.")
    whole = hasattr(drawn, "add_subplot")
    figure: Any = drawn if whole else drawn.figure
    if size is not None:
        figure.set_size_inches(size)
    if title is not None and whole and len(figure.axes) != 1:
        figure.suptitle(title)
    elif title is not None:
        _title(figure.axes[0] if whole else drawn, title)
    if whole and figure.get_suptitle():
        _break(figure._suptitle, _share, figure, "width", 0.98)
    for ax in figure.axes if whole else [drawn, *_bars(drawn)]:
        # The title where the next panel or the figure ends, labels where their axes do.
        for place in _titles(ax):
            _break(place, _to_the_right, ax)
        _break(ax.xaxis.label, _around, ax)
        _break(ax.yaxis.label, _share, ax, "height", 1.05)
    return drawn


def _bars(ax: Any) -> list[Any]:
    return [one.colorbar.ax for one in (*ax.collections, *ax.images) if getattr(one, "colorbar", None)]


def _to_the_right(ax: Any) -> float:
    """The pixels from the left end of axes to the next panel or the end of the figure."""
    box = ax.get_window_extent()
    level = [one.get_window_extent() for one in ax.figure.axes if one is not ax and one.get_subplotspec()]
    ends = [one.x0 for one in level if one.x0 > box.x1 and one.y0 < box.y1 and box.y0 < one.y1]
    return float(min([box.x1 + 0.8 * (end - box.x1) for end in ends] or [ax.figure.bbox.x1]) - box.x0)


def _around(ax: Any) -> float:
    """The pixels that a label below axes has: a little more than they are wide, as far as the figure reaches."""
    box, page = ax.get_window_extent(), ax.figure.bbox
    middle = (box.x0 + box.x1) / 2
    return float(min(1.15 * box.width, 1.96 * min(middle - page.x0, page.x1 - middle)))


def _share(of: Any, side: str, share: float) -> float:
    return float(share * getattr(of.get_window_extent(), side))


def _break(text: Any, room: Callable[..., float], *of: object) -> None:
    """Let matplotlib break a text whenever it draws it, into lines of a length that depends on where it then is."""
    text.set_wrap(True)
    # matplotlib wraps at the figure's edge alone, and would write a title over the next panel.
    text._get_wrap_line_width = partial(_narrowest, text, {}, room, *of)


def _narrowest(text: Any, least: dict[tuple[float, ...], float], room: Callable[..., float], *of: object) -> float:
    """The least room that a figure of the same size had: lines and layout do not change by turns."""
    size = tuple(text.figure.bbox.size)
    least[size] = min(room(*of), least.get(size, math.inf))
    return least[size]


def _title(ax: Any, title: str) -> None:
    """Put a title where the axes' own is, as far above them."""
    for place in _titles(ax):
        if place.get_text():
            place.set_text(title)
            return
    ax.set_title(title)


def _titles(ax: Any) -> tuple[Any, Any, Any]:
    return ax._left_title, ax.title, ax._right_title


# A view of a result: a page of HTML that holds all that it shows, to look at in a notebook or to keep as a file.


FITTING = """(() => {
  addEventListener("message", (event) => {
    const high = Math.min(20000, Math.ceil(Number(event.data && event.data.headwater)));
    const frame = [...document.querySelectorAll("iframe")].find((one) => one.contentWindow === event.source);
    if (!frame || !(high > 0)) return;
    const still = frame.parentElement.querySelector(":scope > img");
    if (still) still.style.maxHeight = `${high}px`;
    frame.style.height = `${high}px`;
  });
  if (window.google && google.colab) google.colab.output.setIframeHeight(0, true, { maxHeight: 20000 });
})();"""
"""Makes each frame of a document as high as the page in it says that it is; the page can do nothing else to it.

VS Code runs a script of an output elsewhere than where it was written, so the frame is found by who sent the message.
Colab shows an output in a frame of its own, which follows what is in it up to 1000 pixels unless more are asked for.
"""
STACKED = "grid-area:1/1"
"""Where a picture and a frame are in a grid: one over the other, and the grid as high as the higher of what is left."""


@dataclass(frozen=True)
class View:
    """A page that reaches for nothing outside: no script, style or picture from elsewhere."""

    page: str
    """The whole page, from its doctype on."""
    height: int = 560
    """In pixels, of its frame in a notebook, until the page says how high it is."""
    picture: bytes | None = None
    """A PNG of the figure: what is seen where a notebook shows no frames, or a document no HTML."""

    def save_html(self, path: str | Path) -> Path:
        """Write the page into a file; folders on the way are made."""
        file = checked_path("path", path)
        make_folder(file.parent)
        write_atomically(file, lambda temporary: temporary.write_text(self.page, encoding="utf-8"))
        return file

    @property
    def title(self) -> str:
        """What is over the page."""
        found = re.search(r"<title>(.*?)</title>", self.page, re.DOTALL)
        return html.unescape(found[1]) if found else ""

    def __repr__(self) -> str:
        return f"View({len(self.page):,} characters of HTML)"

    def _repr_html_(self) -> str:
        """Return the page in a frame that can reach nothing of the notebook, over its picture.

        A notebook that is not trusted, or a site that shows notebooks, takes the frame out; the picture remains.
        """
        below = ""
        if self.picture is not None:
            data = base64.b64encode(self.picture).decode("ascii")
            alt = 'alt="the same as a picture"'
            below = f'<img src="data:image/png;base64,{data}" {alt} style="{STACKED};max-width:100%">'
        frame, fitting = self.framed(f"position:relative;{STACKED}"), f"<script>{FITTING}</script>"
        return f'<div style="display:grid;grid-template-columns:100%">{below}{frame}{fitting}</div>'

    def framed(self, look: str = "", title: str | None = None) -> str:
        """Return the page in a frame, of a look and title, that can reach nothing of the document around it."""
        page = self.page.replace("&", "&amp;").replace('"', "&quot;")  # all that a quoted attribute needs: a tenth less
        return (
            f'<iframe sandbox="allow-scripts allow-downloads" title="{html.escape(title or self.title, quote=True)}" '
            f'srcdoc="{page}" '
            f'style="width:100%;height:{self.height}px;border:0;{look}"></iframe>'
        )


# A claim, as a result: what was found of a set of cells, heads or edges, and the run that it was found in.
#
# What is measured, and when a claim holds, is said in `headwater.stats.claims`; `Sweep.claim`, `Circuit.claim`,
# `CircuitRuns.claim` and `hw.heads.claim` make them. A claim's record is that of the run which measured the set, with
# what was claimed as one more option.


@dataclass(frozen=True, eq=False, repr=False)
class Claim(Result):
    """What was found of a claim."""

    table: pd.DataFrame
    """One row: `effect, low, high, placebo, placebo_high, p_value, other_ablation, split_half, held_out, margin,
    holds`; NaN where nothing was given to measure it by."""
    what: str
    """The set that it is about, in words."""
    sentences: list[str]
    """What was measured, and whether the claim holds."""
    notes: list[str]
    """What weakens the claim, such as prompts that discovery and test share; its last sentence ends with them."""
    run: RunRecord
    """That of the run, with the option `claim`: what was claimed, and beside what."""

    @classmethod
    def of(cls, judged: Judgement, run: RunRecord, asked: Mapping[str, object]) -> Claim:
        """Return what was judged of a run, as a result; its record says what was claimed, and beside what."""
        given = {name: _identity(one) if isinstance(one, RunRecord) else one for name, one in asked.items()}
        record = replace(run, options=run.options | {"claim": describe(given | {"level": judged.level})})
        return cls(judged.table, judged.what, [judged.measured, judged.verdict], list(judged.notes), record)

    @property
    def holds(self) -> bool:
        """Whether the claim holds; see the first lines of `headwater.stats.claims`."""
        return bool(self.table["holds"].iloc[0])

    @property
    def sentence(self) -> str:
        """All of the report in one line."""
        return " ".join(self.sentences)

    def summary(self) -> pd.DataFrame:
        """Return the one row of the table."""
        return self.table.copy()

    def report(self) -> list[str]:
        """Return what was measured, and whether the claim holds."""
        return list(self.sentences)

    def plot(self, ax: Axes | None = None, *, title: str | None = None, figsize: Size | None = None) -> Axes | Figure:
        """Draw the effect with its interval above all that it is compared with, and the margin."""
        return self._drawn(ax, title, figsize)

    def __repr__(self) -> str:
        row = self.table.iloc[0]
        verdict = "holds" if self.holds else "does not hold"
        return f"Claim({self.what}: effect {row['effect']:.3g}, p = {row['p_value']:.2g}; {verdict})"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.sentence, quote=False)}</p>{self.table.to_html(index=False)}"


def _identity(run: RunRecord) -> dict[str, object]:
    """Return what of another run's record tells it from others."""
    return {"fingerprint": run.fingerprint, "seed": run.seed, "options": run.options}
