"""The base class of all results: a table, its summary and report, a plot, a folder on disk, and the run's record.

A result is a frozen dataclass. `save` writes its data frames as parquet, its tensors as safetensors and everything else
as `run.json`, with the size and SHA-256 of each file, and a hash of `run.json` itself; `load` reads them back. Tensors
in parts (`headwater.runs.storage`) are files in a folder named after their field, which contain their hash and are read
only on request.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin, get_type_hints

import numpy as np
import pandas as pd
from pyarrow import ArrowException
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwater.calls import checked_calls
from headwater.errors import InputError, RunFolderError, UnknownNameError, did_you_mean
from headwater.figure_options import Size as Size
from headwater.figure_options import apply_title_and_size, checked_size, size_requested
from headwater.foreign_names import TABLES, hint_for, missing
from headwater.options import a_or_an, checked_path, shown
from headwater.registry import Registry
from headwater.runs.identity import describe, digest
from headwater.runs.record import FORMAT, RUN_FILE, RunRecord, read_record, refuse_other_run
from headwater.runs.storage import NAME, Shards, make_folder, read_sealed, seal_of, write_atomically, write_sealed
from headwater.stats.claims import VERDICTS, ClaimEffects, claim_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


TENSORS = "tensors.safetensors"
FILES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx", ".pkl", ".pt", ".npz", ".safetensors")
"""Suffixes that a folder's name must not have: a caller who saves to such a name means a file."""
DRAWINGS: Registry[type, Callable[..., Any]] = Registry("figure of a result", "headwater.figures")
"""Drawing functions by class of result: each takes the result, `ax`, and the options that `plot` passes to it."""
INLINE = 256 * 2**10
"""Most characters of a page that a notebook displays automatically, as the last line of a cell."""
VIEWS: Registry[type, Callable[..., View]] = Registry("view of a result", "headwater.views")
"""Functions that show a result as a page, by class; a class without one uses that of `Result`."""


def _followed_by(method: Callable[..., Any], finish: Callable[[Any], Any]) -> Any:
    """Return a method that applies `finish` to the return value of `method`."""

    @functools.wraps(method)
    def finished(*args: Any, **options: Any) -> Any:
        return finish(method(*args, **options))

    return finished


def _printable(sentences: list[str]) -> list[str]:
    # A name from the caller may contain unprintable characters.
    return [plain_text(sentence) for sentence in sentences]


def _known_columns(summary: pd.DataFrame) -> pd.DataFrame:
    return summary[[name for name in summary if summary[name].notna().any() or not len(summary)]]


@checked_calls
class Shown:
    """A table with a figure and a page: what a result and a circuit share."""

    table: pd.DataFrame

    def plot(
        self, ax: Axes | None = None, *, title: str | None = None, figsize: Size | None = None, **what: Any
    ) -> Axes | Figure:
        """Draw the main figure on `ax` or on a new figure, without showing or saving it.

        Args:
            ax: axes to draw on; default: a new figure.
            title: replaces the figure's own title.
            figsize: width and height of a new figure, in inches; default: chosen by the drawing function.
            what: options of this class's figure: for a sweep `site`, `metric`, `value`, `normalize`, and an index of an
                axis, such as `head=3` (see `headwater.figures.sweep.plot_sweep`); for a cache `heads` and `example`
                (see `headwater.figures.activation_sizes.plot_cache`); for pathways `split_by` and `value` (see
                `headwater.figures.delta_p`); `metric` for edges, paths and circuits; `example` for a lens; `on` for
                attention behaviour ("random", "text", "copying" or "position"); `kind` for composition ("q", "k", "v").
        """
        size, draw = checked_size(figsize, ax), DRAWINGS.of_class(type(self))
        self._check_options("plot", draw, what, ("ax", "title", "figsize"))
        with size_requested(size):
            drawn: Any = draw(self, ax, **what)
        if not hasattr(drawn, "savefig"):
            drawn.savefig = drawn.figure.savefig  # so that plot().savefig(path) works for one panel as for several
        return apply_title_and_size(drawn, title, size)

    def view(self, **what: Any) -> View:
        """Return one self-contained page, to show in a notebook or to save with `save_html`.

        Args:
            what: options of this class's view.
        """
        show = VIEWS.of_class(type(self))
        self._check_options("view", show, what)
        return show(self, **what)

    def _check_options(
        self, name: str, function: Callable[..., Any], what: Mapping[str, object], also: Sequence[str] = ()
    ) -> None:
        """Raise if the function that draws or shows this class has no such option."""
        parameters = list(inspect.signature(function).parameters.values())[1:]
        if any(one.kind is one.VAR_KEYWORD for one in parameters):
            return
        known = list(dict.fromkeys([*also, *(one.name for one in parameters)]))
        for option in what:
            if option not in known:
                offered = f"it takes {', '.join(known)}" if known else "it takes none"
                way = hint_for("plot", option) if name == "plot" else None
                hint = f" {way}." if way else did_you_mean(option, known)
                kind = a_or_an(type(self).__name__)
                raise InputError(f"The {name} of {kind} has no option {option}=: {offered}.{hint}")

    def save_html(self, path: str | Path, **what: Any) -> Path:
        """Write the view into one file that can be sent and opened anywhere; see `view` for `what`."""
        return self.view(**what).save_html(path)

    if not TYPE_CHECKING:  # a type checker would accept every name as existing

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if name.startswith("_") or hasattr(type(self), name):
                return object.__getattribute__(self, name)
            place = kind if kind in TABLES else "result"
            if place == "result" and hasattr(pd.DataFrame, name):
                raise UnknownNameError(f"This {kind} has no {name!r}: its table has it, result.table.{name}.")
            raise UnknownNameError(missing(f"This {kind}", place, name, dir(self)))

    def _repr_html_(self) -> str:
        return table_html(self, self.table)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str | bytes]:
        """Return what a notebook shows as the last line of a cell: the view above the table, if its page is small.

        Otherwise the table, and the reason why the view is not shown.
        """
        table = self._repr_html_()
        bundle: dict[str, str | bytes] = {"text/plain": repr(self), "text/html": table}
        if not self.is_explored:
            return bundle
        try:
            view = self.view()
            size = len(view.page)
            large = (
                f"Its view takes {size / 1000:,.0f} kB, so it is not shown automatically: call view(), or save_html()."
            )
            why = large if size > INLINE else ""
        except InputError as error:
            why = f"The whole result cannot be viewed: {error}"
        if why:
            return bundle | {"text/html": f"{table}<p>{html.escape(why, quote=False)}</p>"}
        below = f"<details><summary>table</summary>{table}</details>"
        bundle["text/html"] = f"<p>{html.escape(repr(self), quote=False)}</p>{view._repr_html_()}{below}"
        return bundle if view.picture is None else bundle | {"image/png": view.picture}

    @property
    def is_explored(self) -> bool:
        """Whether this class has its own view, besides the one that every result has."""
        return VIEWS.of_class(type(self)) is not VIEWS.of_class(Result)


@checked_calls
class Result(Shown):
    """Base of the result dataclasses: a `table`, a `run`, and methods to report, draw and save them.

    `result["layer"]`, `len(result)` and `for row in result` read the table.

    Your own result class defines `summary` and `report`, and registers a drawing function: `DRAWINGS.add(ItsClass)`.
    """

    run: RunRecord

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if isinstance(value := getattr(self, field.name), pd.DataFrame):
                object.__setattr__(self, field.name, numbered_from_0(value))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Users' own classes also get checked calls and printable reports.
        checked_calls(cls)
        for name, finish in (("summary", _known_columns), ("report", _printable)):
            if name in vars(cls):
                setattr(cls, name, _followed_by(getattr(cls, name), finish))

    def summary(self) -> pd.DataFrame:
        """Return the main numbers, one row for each item that they describe.

        Columns without any value, such as the interval of a single prompt, are left out.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no summary().")

    def report(self) -> list[str]:
        """Return what the numbers show, and what they do not show, as plain sentences."""
        raise NotImplementedError(f"{type(self).__name__} defines no report().")

    def findings(self) -> dict[str, Any]:
        """Return the model, the summary as JSON values and the report, as the command line prints them."""
        return {"model": self.run.model, "summary": records_of(whole_summary(self)), "report": self.report()}

    def save(self, folder: str | Path) -> Path:
        """Write the result into `folder`: a parquet file per table, `tensors.safetensors`, `run.json`."""
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
        """Read a result that `save` or a run with `out=` wrote."""
        return read_result(cls, checked_path("folder", folder))

    def digest(self) -> str:
        """Return a hash of everything but its own record, to identify this result in the record of a later run."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return digest([type(self).__name__, *(getattr(self, field.name) for field in fields if field.name != "run")])

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


AnyResult = TypeVar("AnyResult", bound=Result)


def whole_summary(result: Result, **options: Any) -> pd.DataFrame:
    """Return a summary with all its columns, for code that reads them by name."""
    whole: pd.DataFrame = inspect.unwrap(type(result).summary)(result, **options)
    return whole


def table_html(shown: object, table: pd.DataFrame) -> str:
    """Return what a notebook shows of a result: its repr, and the first rows and outer columns of its table."""
    return f"<p>{html.escape(repr(shown), quote=False)}</p><div>{table.head(8).to_html(max_cols=12, border=0)}</div>"


def file_names(kind: type[Result]) -> set[str]:
    """Return the file and folder names that a result of a class may use, besides `run.json`."""
    kinds = get_type_hints(kind)
    fields = [name for name in getattr(kind, "__dataclass_fields__", {}) if name != "run"]
    return {TENSORS, *(name if kinds[name] is Shards else f"{name}.parquet" for name in fields)}


def write_result(path: Path, result: Result) -> None:
    """Write every field of a result into `path`; `run.json` is written first as unfinished, and last as finished."""
    if not (path / RUN_FILE).exists() or read_sealed(path / RUN_FILE).get("finished"):
        # Unfinished first, finished last: a process killed in between leaves no folder that looks complete.
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
        runs = ", ".join(sorted(file.parent.name for file in path.glob(f"*/{RUN_FILE}")))
        why = f"it holds the results {runs}: give one of them" if runs else "it is not a folder that headwater wrote"
        raise RunFolderError(f"{path} holds no {RUN_FILE}: {why}.")
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
            elif field.name in tensors:
                values[field.name] = tensors[field.name]
            else:
                is_tuple = get_origin(kinds[field.name]) is tuple  # JSON has lists alone
                values[field.name] = _tuple(plain[field.name]) if is_tuple else plain[field.name]
    except (OSError, SafetensorError, ArrowException, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"The result in {path} is damaged ({error}). Delete the folder and run again.") from None
    return cls(**values)


def _seal(file: Path) -> dict[str, Any]:
    """Return the size of a file and the hash of its bytes; for a part (`Shards`) its own seal, without reading it."""
    if NAME.fullmatch(file.name):
        return {"bytes": file.stat().st_size, "seal": seal_of(file)}
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def _checked_manifest(path: Path, manifest: object, cls: type[Result]) -> dict[str, Any]:
    """Return the seals of a result's files, after checking that none changed since the run wrote it."""
    allowed, manifest = file_names(cls), manifest if isinstance(manifest, dict) else {}
    # A table that is not in the manifest would be read as if the run had written it.
    unsealed = sorted(name for name in allowed - set(manifest) if (path / name).is_file())
    if unsealed:
        raise _damaged(path, f"{unsealed[0]} is not in its manifest")
    for name, seal in manifest.items():
        folder, _, part = name.partition("/")
        # Anyone may have written the manifest: its names must not point outside the folder.
        if (folder if part else name) not in allowed or (part and not NAME.fullmatch(part)):
            raise _damaged(path, f"its manifest names {name[:60]!r}, which is not a file of a {cls.__name__}")
        if not (path / name).is_file() or _seal(path / name) != seal:
            raise _damaged(path, f"{name} is missing, or was changed after the run wrote it")
    return manifest


def _damaged(path: Path, what: str) -> RunFolderError:
    return RunFolderError(f"The result in {path} is damaged: {what}. Delete the folder and run again.")


def _tuple(value: object) -> object:
    """Convert a list, or the array that parquet returns for one, to a tuple, recursively."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


# The main numbers of a result: as JSON values, as a data frame, as words in a sentence.


def numbered_from_0(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose index is 0, 1, 2, ...; a named index becomes columns.

    Analyses use the place of a row as its number, and users filter, shuffle and concatenate tables.
    """
    if table.index.equals(pd.RangeIndex(len(table))):
        return table
    names = table.index.names
    return table.reset_index(drop=not all(name is not None and name not in table for name in names))


def records_of(table: pd.DataFrame) -> list[dict[str, object]]:
    """Return the rows of a table as JSON values; None for missing values."""
    return table.astype(object).where(table.notna(), None).to_dict("records")  # type: ignore[return-value]


def with_interval(
    value: float, low: float = math.nan, high: float = math.nan, digits: str = ".2f", unit: str = ""
) -> str:
    """Format a number with its interval (if any): "0.52 (0.41 to 0.60)".

    Numbers that would all be 0.00 have more decimals, down to a millionth. There is no -0.00.
    """
    if not math.isfinite(value):
        return "not measured"
    numbers = [number for number in (value, low, high) if math.isfinite(number)]
    sign, decimals = digits.removesuffix("f").split(".")
    largest, places = max(map(abs, numbers)), int(decimals)
    if largest >= 1e-6 and round(largest, places) == 0:
        places = 1 - math.floor(math.log10(largest))  # two significant digits
    texts = [f"{number:{sign}z.{places}f}" for number in numbers]
    return texts[0] + unit + (f" ({texts[1]} to {texts[2]})" if len(texts) == 3 else "")


def interval_text(row: Mapping[Any, Any] | pd.Series, name: str = "value", digits: str = ".2f") -> str:
    """Format a number of a row with the ends of its interval: `name_low` and `name_high`, or else `low` and `high`."""
    prefix = f"{name}_" if f"{name}_low" in row else ""
    return with_interval(row[name], row[f"{prefix}low"], row[f"{prefix}high"], digits)


def plain_text(text: str) -> str:
    """Return text with unprintable characters escaped: line breaks, control characters, changes of text direction."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


# A view of a result: a self-contained HTML page, to show in a notebook or to save as a file.


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
"""Sets the height of each frame in a document to the height that its page reports; the page can change nothing else.

VS Code does not run an output's script at its place in the document, so the frame is found by the message's sender.
Colab shows an output in its own frame, which grows with its content up to 1000 pixels unless more are requested.
"""
NOT_HTML = (".pdf", ".png", ".svg", ".jpg", ".jpeg", ".eps")
STACKED = "grid-area:1/1"
"""Grid position of both picture and frame: one over the other; the grid is as high as the higher one that remains."""


@dataclass(frozen=True)
class View:
    """A self-contained page: it loads no script, style or picture from elsewhere."""

    page: str
    """The whole page, from its doctype on."""
    height: int = 560
    """Height in pixels of its frame in a notebook, until the page reports its own height."""
    picture: bytes | None = None
    """A PNG of the figure, for notebooks that show no frames and documents that show no HTML."""

    def save_html(self, path: str | Path) -> Path:
        """Write the page into a file; missing parent folders are created."""
        file = checked_path("path", path)
        if file.suffix.lower() in NOT_HTML:
            raise InputError(
                f"save_html writes a page of HTML, and {file.name} is not its name: use "
                f"{file.with_suffix('.html').name!r}. A figure is written by result.plot().savefig(path)."
            )
        make_folder(file.parent)
        write_atomically(file, lambda temporary: temporary.write_text(self.page, encoding="utf-8"))
        return file

    @property
    def title(self) -> str:
        """The title of the page."""
        found = re.search(r"<title>(.*?)</title>", self.page, re.DOTALL)
        return html.unescape(found[1]) if found else ""

    def __repr__(self) -> str:
        return f"View({len(self.page):,} characters of HTML)"

    def _repr_html_(self) -> str:
        """Return the page in a frame that cannot access the notebook, over its picture.

        Untrusted notebooks, and sites that show notebooks, remove the frame; the picture remains.
        """
        below = ""
        if self.picture is not None:
            data = base64.b64encode(self.picture).decode("ascii")
            alt = 'alt="the same as a picture"'
            below = f'<img src="data:image/png;base64,{data}" {alt} style="{STACKED};max-width:100%">'
        frame, fitting = self.framed(f"position:relative;{STACKED}"), f"<script>{FITTING}</script>"
        return f'<div style="display:grid;grid-template-columns:100%">{below}{frame}{fitting}</div>'

    def framed(self, look: str = "", title: str | None = None) -> str:
        """Return the page in a frame with a style and title; the frame cannot access the surrounding document."""
        page = self.page.replace("&", "&amp;").replace('"', "&quot;")  # enough for a quoted attribute; saves a tenth
        return (
            f'<iframe sandbox="allow-scripts allow-downloads" title="{html.escape(title or self.title, quote=True)}" '
            f'srcdoc="{page}" '
            f'style="width:100%;height:{self.height}px;border:0;{look}"></iframe>'
        )


# A claim about a set of cells, heads or edges, as a result: the findings, and the run that measured them.
#
# `headwater.stats.claims` defines what is measured and when a claim holds; `Sweep.claim`, `Circuit.claim`,
# `CircuitRuns.claim` and `hw.heads.claim` make claims. A claim's record is the record of the run that measured the
# set, with the claim as one more option.


@dataclass(frozen=True, eq=False, repr=False)
class Claim(Result):
    """The measured evidence for a claim, and whether the claim holds."""

    table: pd.DataFrame
    """One row: `effect, low, high, placebo, placebo_high, p_value, other_ablation, split_half, held_out, margin,
    holds`; NaN if the data to measure it were not passed."""
    what: str
    """The claim's set, in words."""
    sentences: list[str]
    """What was measured, and whether the claim holds."""
    notes: list[str]
    """Weaknesses of the claim, such as prompts that discovery and test share; its last sentence ends with them."""
    run: RunRecord
    """The record of the run, with the option `claim`: what was claimed, and compared with what."""

    @classmethod
    def of(cls, evidence: ClaimEffects, run: RunRecord, asked: Mapping[str, object], **judging: Any) -> Claim:
        """Judge a claim by `claim_of`; its record contains what was claimed, and compared with what."""
        given = {name: _identity(one) if isinstance(one, RunRecord) else one for name, one in asked.items()}
        record = replace(run, options=run.options | {"claim": describe(given)})
        return cls(**claim_of(evidence, **judging), run=record)

    @property
    def holds(self) -> bool:
        """Whether the claim holds; see the module docstring of `headwater.stats.claims`."""
        return bool(self.table["holds"].iloc[0])

    @property
    def verdict(self) -> str:
        """The verdict in words: "holds", "does not hold", or "is not decided" if only random sets are too few."""
        return next(words for words in VERDICTS if f" the claim {words}" in self.sentences[-1])

    @property
    def sentence(self) -> str:
        """The whole report in one line."""
        return " ".join(self.sentences)

    def summary(self) -> pd.DataFrame:
        """Return the one row of the table."""
        return self.table.copy()

    def report(self) -> list[str]:
        """Return what was measured, and whether the claim holds."""
        return list(self.sentences)

    def __repr__(self) -> str:
        row = self.table.iloc[0]
        return f"Claim({self.what}: effect {row['effect']:.3g}, p = {row['p_value']:.2g}; {self.verdict})"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.sentence, quote=False)}</p>{self.table.to_html(index=False)}"


def _identity(run: RunRecord) -> dict[str, object]:
    """Return the parts of another run's record that identify it."""
    return {"fingerprint": run.fingerprint, "seed": run.seed, "options": run.options}
