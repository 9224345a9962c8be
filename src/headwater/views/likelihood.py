"""The view of token statistics: a text as its tokens, in the colours of how likely each is; the lowest are framed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from headwater.errors import InputError
from headwater.figures.style import plain_title
from headwater.figures.tokens import SEEN
from headwater.likelihood.statistics import STATISTICS, TextStatistics
from headwater.options import checked_count, shown
from headwater.runs.result import VIEWS
from headwater.runs.view import View
from headwater.views.interactive import interactive, packed
from headwater.views.page import picture, short_of

LARGEST = 100_000
"""Rows of the table in a page: texts beyond are left out, and the page says so."""


@VIEWS.add(TextStatistics)
def view_likelihood(stats: TextStatistics, *, texts: Sequence[int] | int | None = None) -> View:
    """Show texts token by token, at each layer that was read.

    Args:
        stats: a result of `token_statistics`.
        texts: which, by their index; the first ones by default, as many as a page takes.
    """
    chosen = _chosen(stats, texts)
    if not len(stats.table):
        return picture(stats)
    return interactive(stats, ("strip.js", "likelihood.js"), spec_of(stats, chosen), height=420)


def spec_of(stats: TextStatistics, texts: Sequence[int]) -> dict[str, object]:
    """Return what the script draws: by text its tokens, and one column of numbers by text, layer and token each."""
    table = stats.table if "layer" in stats.table else stats.table.assign(layer=-1)
    layers = sorted(table["layer"].unique().tolist())
    rows = table[table["text"].isin(texts)].sort_values(["text", "layer", "position"], kind="stable")
    first = rows[rows["layer"] == layers[0]]
    known = dict(zip(stats.texts["text"].tolist(), stats.texts.to_dict("records"), strict=True))
    parts = dict(list(first.groupby("text", sort=False)))
    left = len(stats.texts) - len(texts)
    return {
        "title": plain_title(stats.run.model, SEEN),
        "note": f"{len(texts):,} of {len(stats.texts):,} texts" if left else "",
        "layers": ["final"] if "layer" not in stats.table else layers,
        "texts": [_text(text, parts.get(text, first.head(0)), known[text]) for text in texts],
    } | {name: packed(rows[name].to_numpy(dtype=float), "f4") for name in STATISTICS}


def _text(number: int, rows: pd.DataFrame, known: Mapping[Hashable, Any]) -> dict[str, object]:
    return {
        "number": number,
        "begins": short_of(str(known["content"])),
        "tokens": rows["token"].astype(str).tolist(),
        "positions": rows["position"].tolist(),
        "note": str(known["note"]),
    }


def _chosen(stats: TextStatistics, texts: Sequence[int] | int | None) -> list[int]:
    """Return the texts requested, or as many as a page takes."""
    known = stats.texts["text"].tolist()
    if texts is None:
        sizes = stats.table["text"].value_counts().reindex(known, fill_value=0).cumsum().to_numpy()
        return known[: max(1, int(np.searchsorted(sizes, LARGEST, side="right")))]
    listed = [texts] if isinstance(texts, int) else texts
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise InputError(f"texts={shown(texts)} must be the index of a text, or a list of them.")
    return [checked_count("texts", one, least=0, most=len(known) - 1) for one in listed]
