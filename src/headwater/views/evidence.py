"""The view of one relation's evidence: maps of what weights write, who looks and who moves it, by layer and head.

A head that is clicked in one map is marked in all of them, and in the tables of what silencing costs and of which way
names which head; its card has all its numbers, and what the last position carries before and after its layer.
"""

from __future__ import annotations

import re
from typing import Any

import pandas as pd

from headwater.causes.naming import NAMED
from headwater.causes.results import Evidence
from headwater.figures.evidence import MAPS, ROLE_LOOKS, title_of
from headwater.runs.result import VIEWS
from headwater.runs.view import View
from headwater.views.interactive import interactive, line_of, packed, rounded
from headwater.views.page import picture


@VIEWS.add(Evidence)
def view_evidence(found: Evidence) -> View:
    """Show the heads of a relation in linked maps; where the model cannot do it, the sentence that says so."""
    if not found.is_measured:
        return picture(found)
    return interactive(found, ("chart.js", "curves.js", "head_plane.js", "evidence.js"), spec_of(found), height=900)


def spec_of(found: Evidence) -> dict[str, object]:
    """Return what the script draws: every number of a head, `column layer head`, and the rows that name heads."""
    by_head = found.table.sort_values(["layer", "head"])
    layers, heads = (int(by_head[axis].max()) + 1 for axis in ("layer", "head"))
    columns = [name for name in by_head if name not in ("layer", "head")]
    named = found.way(NAMED)
    ways = found.ways.dropna(subset=["share"])
    return {
        "title": title_of(found),
        "layers": layers,
        "heads": heads,
        "columns": columns,
        "values": packed(by_head[columns].to_numpy(dtype=float).T.reshape(-1, layers, heads), "f4"),
        "maps": [{"column": column, "name": name} for column, name in MAPS.items()],
        "named": [int(named["layer"]), int(named["head"])],
        "when": _when(found.when),
        "tables": [
            _rows("named by", ways.assign(heads=_heads_of(ways)), ["way", "heads", "share", "low", "high"]),
            _rows("silenced", found.cost, ["what", "heads", "cost", "low", "high"]),
        ],
    }


def _heads_of(ways: pd.DataFrame) -> list[str]:
    """Return the head that each way names, or how many it names."""
    rows = zip(ways["layer"], ways["head"], ways["heads"], strict=True)
    return [f"{n} heads" if pd.isna(layer) else f"{layer}.{head}" for layer, head, n in rows]


def _rows(title: str, table: pd.DataFrame, columns: list[str]) -> dict[str, Any]:
    """Return a table of the page, and which heads each of its rows is about."""
    cells = zip(*(rounded(table[name]) if table[name].dtype == float else table[name] for name in columns), strict=True)
    about = [re.findall(r"\d+\.\d+", heads) for heads in table["heads"]]
    return {"columns": [title, *columns[1:]], "rows": list(map(list, cells)), "about": about}


def _when(when: pd.DataFrame) -> dict[str, object]:
    lines = [
        line_of(rows, ("layer", "share", "low", "high"), name=f"at the {role} token", look=ROLE_LOOKS[str(role)])
        for role, rows in when.groupby("role", sort=False)
    ]
    return {
        "said": {"title": "When: residual stream patched", "x": "before layer", "count": ""},
        "x": {"label": "Before layer", "whole": True},
        "choices": [],
        "charts": [{"y": "Share of gap", "lines": lines}],
    }
