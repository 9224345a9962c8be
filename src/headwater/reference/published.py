"""Published numbers beside measured ones.

The JSON files of this folder contain published numbers by model, each file with its source. A reproduction is a table
of rows `published | measured | difference`, with the interval of the measured number; for a model without published
numbers, that column is empty and a note says so.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headwater.errors import InputError
from headwater.options import checked_name
from headwater.progress import say, spelled_time
from headwater.runs.analysis import Run
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, whole_summary

if TYPE_CHECKING:
    from headwater.models.families import ModelShape

KINDS = ("maps", "pathways", "memorization", "membership")
NUMBERS = ("published", "measured", "low", "high", "difference")


@dataclass(frozen=True)
class Published:
    """The numbers of one publication."""

    source: str
    models: Mapping[str, Mapping[str, Any]]
    """By model: its size (`billions` of parameters, `layers`, `heads`) and its published numbers."""

    def name_of(self, model: str, shape: ModelShape, requested: str | None = None) -> str | None:
        """Return the published model that `model` is, or None; raise if its shape is not the published one.

        The last part of the name or path decides, unless a published model is `requested`.
        """
        if requested is not None:
            checked_name("published", requested, list(self.models))
        short = {_short(name): name for name in self.models}
        name = requested or short.get(_short(model))
        if name is None:
            return None
        published = self.models[name]["layers"], self.models[name]["heads"]
        if published != (shape.n_layers, shape.n_heads):
            raise InputError(
                f"{model} is not {name}: it has {shape.n_layers} layers of {shape.n_heads} heads, "
                f"the published model {published[0]} of {published[1]}. Load the published model itself."
            )
        return name

    def reproduction(
        self, run: Run, name: str | None, rows: pd.DataFrame, notes: Sequence[str], not_kept: str = ""
    ) -> Reproduction:
        """Build a `Reproduction` from measured rows and the name of a published model, with a note if there is none.

        `not_kept` names entries that the publication lists but whose numbers are not in this package.
        """
        none = []
        if name is None:
            none = [
                f"No published numbers exist for {run.record.model}: the column is empty. They exist for "
                f"{', '.join(self.models)}; if this is one of them under another name, pass that name as `published`."
            ]
        elif not_kept:
            none = [f"The publication lists {not_kept}, but its numbers are not in this package: the column is empty."]
        return Reproduction(compared(rows), name, self.source, [*none, *notes], run.record)


@dataclass(frozen=True, repr=False)
class Reproduction(Result):
    """Published and measured numbers of one model."""

    table: pd.DataFrame
    """A row per number: `quantity`, what the number is about (relation, dataset, depth), `published, measured`, the
    95 % interval of the measured number (`low, high`; NaN if there is none), `difference`; numbers that were not
    published, or could not be measured, are NaN."""
    published_model: str | None
    """The model whose numbers are in `published`; None if there is none."""
    source: str
    """The source of the published numbers."""
    notes: list[str]
    """What a reader must know before comparing."""
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Return a row per quantity: `quantity, numbers` (rows of the table), `compared, largest_difference, outside`.

        `outside` counts the published numbers outside the interval of the measured number; missing without intervals.
        """
        table = self.table
        beyond = (table["published"] < table["low"]) | (table["published"] > table["high"])
        size, counted = table["difference"].abs(), beyond.astype("Int64").where(table["low"].notna())
        by_quantity = table.assign(size=size, beyond=counted).groupby("quantity", sort=False)
        named = by_quantity.agg(
            numbers=("quantity", "size"),
            compared=("difference", "count"),
            largest_difference=("size", "max"),
            outside=("beyond", lambda rows: rows.sum(min_count=1)),
        )
        return named.reset_index()

    def report(self) -> list[str]:
        """Return how far measured numbers are from published ones, and the notes on the comparison."""
        beside = f"the published {self.published_model}" if self.published_model else "no published model"
        sentences = [f"{self.run.model} and {beside}; numbers compared: {self.table['difference'].count():,}."]
        sentences += [
            f"{row['quantity']}: {row['compared']} of {row['numbers']} numbers compared; the largest difference is "
            f"{row['largest_difference']:.4g}"
            + ("." if pd.isna(row["outside"]) else f"; published numbers outside the interval: {row['outside']}.")
            for row in whole_summary(self).to_dict("records")
            if row["compared"]
        ]
        return [*sentences, *self.notes, f"Published numbers: {self.source}"]


def published_numbers(kind: str) -> Published:
    """Read the numbers of one publication: "maps", "pathways", "memorization" or "membership"."""
    file = f"{checked_name('kind', kind, KINDS)}.json"
    text = (files("headwater.reference") / file).read_text(encoding="utf-8")
    return Published(**json.loads(text))


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Move `published`, `measured`, its interval `low, high` (NaN if there is none) and the `difference` to the end."""
    named = [name for name in rows.columns if name not in NUMBERS]
    numbers = rows.reindex(columns=NUMBERS[:-1]).astype(float)
    return rows[named].join(numbers).assign(difference=numbers["measured"] - numbers["published"])


def _short(name: str) -> str:
    return Path(name).name.lower().removeprefix("meta-")


# A reproduction announces how long it takes, and reports each of its steps when it is done.
#
# All steps are computed on a few items of one set, without a folder: once as a warm-up, then timed at two sizes. The
# additional time of the larger size gives the time per item, and the rest is the time per set.

R = TypeVar("R")


def step(run: Run, name: str, function: Callable[..., R], *args: Any, **options: Any) -> R:
    """Return the result of a function that is called with a subfolder of the run; a repeated call loads it."""
    begun = time.perf_counter()
    result = function(*args, progress=run.progress, out=run.below(name), **options)
    say(run.progress, f"{name}: done in {spelled_time(time.perf_counter() - begun)}.")
    return result


def usual_first(lengths: pd.Series) -> list[int]:
    """Return the indices of texts, ordered by how close to the mean their length is, for timing.

    A batch of both long and short texts would be padded more than the batches of a run, which are sorted by length.
    """
    return np.argsort((lengths - lengths.mean()).abs().to_numpy(), kind="stable").tolist()


def announce_time(
    run: Run,
    make: Callable[[Run, Sequence[int]], object],
    items: int,
    called: str,
    sizes: tuple[int, int] = (4, 12),
    sets: int = 1,
) -> None:
    """Announce how long a run takes, if it shows progress.

    `make` computes all steps for the items at the given indices, in another run; the run has `items` items in `sets`
    sets, and the steps are timed at the two `sizes`.
    """
    few, dozen = sizes
    if not run.progress or items <= dozen:
        return

    def timed(_: int) -> dict[str, Tensor]:
        """Return the seconds for the smaller and the larger size, after an untimed run to warm up."""
        say(True, f"timing {dozen} of {items:,} {called} ...")
        seconds = []
        for size in (few, *sizes):
            begun = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make(replace(run, folder=None, progress=False), np.linspace(0, items - 1, size).astype(int).tolist())
            seconds.append(time.perf_counter() - begun)
        return {"seconds": torch.tensor(seconds[1:])}

    try:
        # Stored as a piece, so that a resumed call does not time again.
        little, much = next(run.pieces("timing", [0], timed))["seconds"].tolist()
    except InputError as error:
        say(True, f"the time for {items:,} {called} is unknown: {error}")
        return
    each = max(much - little, 0.0) / (dozen - few)
    total = spelled_time(sets * max(much - dozen * each, 0.0) + items * each)
    kept = "; parts that are already in the folder are reused" if run.folder is not None else ""
    say(True, f"{items:,} {called} take about {total} on this machine{kept}.")
