"""The view of a sweep: a heat map of two axes; site, metric, role, example and scale to choose, and cells to pick."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from headwater.figures.sweep import LABELS, panel_axes, panels_of, title_of
from headwater.patching.summaries import MEASURES, ROLES
from headwater.patching.sweep import Sweep
from headwater.runs.result import VIEWS, View
from headwater.views.page import interactive, packed, picture

LARGEST = 2**22
"""Numbers of a page, at most: of larger sweeps the page holds the means over examples alone."""


@VIEWS.add(Sweep)
def view_sweep(sweep: Sweep) -> View:
    """Show the effect of every cell, by example; a sweep over one axis, or over three without roles, as its figure."""
    panels = panels_of(sweep.table, {})
    if any(len(panel_axes(part, {})) != 2 for _, part in panels):
        return picture(sweep)
    examples = sorted(sweep.table["example"].unique().tolist())
    cells = sum(int(np.prod([part[axis].nunique() for axis in panel_axes(part, {})])) for _, part in panels)
    by_example = cells * len(examples) <= LARGEST
    spec = {
        "title": title_of(sweep, panels),
        "examples": len(examples) if by_example else 1,
        "names": examples if by_example else [f"mean of {len(examples)}"],
        "tokens": [list(sweep.tokens[example]) for example in examples] if len(sweep.tokens) else [],
        "panels": [_panel(name, part, examples if by_example else None) for name, part in panels],
    }
    return interactive(sweep, "sweep.js", spec)


def _panel(name: Sequence[object], part: pd.DataFrame, examples: Sequence[int] | None) -> dict[str, object]:
    axes = panel_axes(part, {})
    places = [_places(part[axis]) for axis in axes]
    numbers = {}
    for column in [name for name in MEASURES if name in part]:  # of one run alone no effect is normalized
        means = part.groupby(["example", *axes] if examples else axes, sort=False, dropna=False)[column].mean()
        index = [pd.Index(one) for one in ([examples, *places] if examples else places)]
        whole = means.reindex(pd.MultiIndex.from_product(index, names=means.index.names))
        numbers[column] = whole.to_numpy(dtype=float).reshape(len(examples or [0]), *map(len, places))
    return {
        "site": str(name[0]),
        "metric": str(name[1]),
        "role": str(name[2]) if len(name) > 2 else "",
        "fixed": {
            axis: str(part[axis].iloc[0]) for axis in ROLES if len(name) > 2 and axis in part and axis not in axes
        },
        "axes": axes,
        "said": [LABELS[axis] for axis in axes],
        "rows": places[0],
        "columns": places[1],
        **{column: packed(found, "f4") for column, found in numbers.items()},
    }


def _places(column: pd.Series) -> list[int | str]:
    """Return the places along an axis: numbers in order, names as they come first."""
    seen = column.dropna().drop_duplicates()
    return [int(one) for one in seen.sort_values()] if is_numeric_dtype(column) else [str(one) for one in seen]
