"""The view of pathways: ΔP against the layer by question set and mode, with random tokens knocked out as control."""

from __future__ import annotations

from headwater.colors import FAINT
from headwater.figures.pathway_curves import DASHES, SPELLED, VALUES, default_split, look_of, title_of
from headwater.pathways.interventions import RANDOM
from headwater.pathways.modes import ALL, MODES
from headwater.pathways.trace import Pathways
from headwater.runs.result import VIEWS, View
from headwater.views.page import interactive, line_of


@VIEWS.add(Pathways)
def view_pathways(pathways: Pathways) -> View:
    """Show the curves of every way to split the examples, and the control, with their intervals."""
    first = default_split(pathways)
    splits = list(dict.fromkeys([first, *pathways.curves["split_by"]]))
    windowed = pathways.run.options["window"] is not None
    title = title_of(pathways, first)
    spec = {
        "title": title,
        "note": f"{SPELLED}; grey: {RANDOM} instead, over all examples (control)",
        "said": {"title": title, "x": "layer", "count": "examples"},
        "x": {"label": "Layer around which edges are severed" if windowed else "Layer", "whole": True},
        "choices": [{"label": "modes", "names": splits}, {"label": "value", "names": list(VALUES.values())}],
        "charts": [
            {
                "title": title_of(pathways, split, value),
                "y": label,
                "lines": _lines(pathways, split, value) + _controls(pathways, value),
            }
            for split in splits
            for value, label in VALUES.items()
        ],
    }
    return interactive(pathways, ("chart.js", "curves.js", "lines.js"), spec, height=660)


def _lines(pathways: Pathways, split: str, value: str) -> list[dict[str, object]]:
    curves, columns = pathways.curves[pathways.curves["split_by"] == split], _columns(value)
    lines = []
    for mode in MODES:
        for name in pathways.datasets:
            rows = curves[(curves["dataset"] == name) & (curves["mode"] == mode)].sort_values("layer")
            drawn = look_of(name, mode, pathways.datasets)
            look = drawn["color"], drawn["marker"]
            dashed = DASHES[mode] != "-"
            if len(rows):
                lines.append(line_of(rows, columns, name=f"{name}, {mode}", look=look, dashed=dashed, count="examples"))
    return lines


def _controls(pathways: Pathways, value: str) -> list[dict[str, object]]:
    """As many random tokens of the question knocked out, over all examples."""
    table, columns = pathways.controls, _columns(value)
    drawn = table[(table["intervention"] == RANDOM) & (table["group"] == ALL)]
    return [
        line_of(
            drawn[drawn["dataset"] == name].sort_values("layer"),
            columns,
            name=f"{name}, {RANDOM} (control)",
            look=(FAINT, look_of(name, MODES[0], pathways.datasets)["marker"]),
            control=True,
            count="examples",
        )
        for name in pathways.datasets
        if (drawn["dataset"] == name).any()
    ]


def _columns(value: str) -> tuple[str, str, str, str]:
    return "layer", value, f"{value}_low", f"{value}_high"
