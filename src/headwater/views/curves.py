"""Views of curves and tokens: memorization by question depth, token statistics, pathways.

Memorization by question depth: boxes with dots to hover over, scores by layer, and the tokens of questions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from headwater.colors import FAINT
from headwater.errors import InputError
from headwater.figures.likelihood import depth_label, looks_of_depths, title_of
from headwater.figures.pathways import SPELLED, VALUES, default_split, layer_label, look_of
from headwater.figures.pathways import title_of as pathways_title
from headwater.figures.style import plain_title
from headwater.likelihood.profile import DepthProfile
from headwater.likelihood.statistics import STATISTICS, TextStatistics
from headwater.options import shown
from headwater.pathways.interventions import RANDOM
from headwater.pathways.modes import ALL, MODES
from headwater.pathways.trace import Pathways
from headwater.runs.result import VIEWS, View
from headwater.views.page import interactive, line_of, packed, picture, rounded, short_of

QUESTIONS = 1500
"""Largest number of questions whose words and tokens are in a page; with more, the dots of its boxes open nothing."""


@VIEWS.add(DepthProfile)
def view_depth_profile(profile: DepthProfile) -> View:
    """Show a box per depth for every score, the data of each dot, and means by layer if several layers were read."""
    scores = [name for name in profile.by_layer["score"].unique() if name in profile.depthwise]
    averages = profile.depthwise
    looks = looks_of_depths(profile)
    # Each score against the layer, with the figure's sign: minus the score of the tables, which swaps the bounds.
    curves = profile.by_layer.assign(**{name: -profile.by_layer[name] for name in ("value", "low", "high")})
    ordered = [profile.main, *(name for name in scores if name != profile.main)]
    charts = []
    for score in ordered:
        rows = curves[curves["score"] == score].sort_values("layer")
        lines = [
            line_of(rows[rows["depth"] == depth], ("layer", "value", "high", "low"), name=f"Depth {depth}", look=look)
            for depth, look in looks.items()
        ]
        charts.append({"y": f"minus {score}", "lines": lines})
    by_layer = {
        "said": {"title": "By layer", "x": "layer", "count": ""},
        "x": {"label": "Layer", "whole": True},
        "choices": [{"label": "score by layer", "names": ordered}],
        "charts": charts,
    }
    spec = {
        "title": title_of(profile),
        "main": profile.main,
        "y": depth_label(profile).replace("\n", " "),
        "unit": "graph",
        "scores": scores,
        "depths": [{"depth": depth, "color": look[0], "shape": look[1]} for depth, look in looks.items()],
        "rows": {"depth": averages["depth"].tolist(), "name": averages["group"].astype(str).tolist()},
        "values": packed(np.stack([averages[name].to_numpy(dtype=float) for name in scores]), "f4"),
        "questions": _questions(profile),
        "by_layer": by_layer if profile.by_layer["layer"].nunique() > 1 else None,
    }
    return interactive(profile, ("chart.js", "curves.js", "strip.js", "depth.js"), spec, height=900)


def _questions(profile: DepthProfile) -> list[dict[str, Any]]:
    table = profile.table
    if len(table) > QUESTIONS:
        return []
    texts = table["question"].astype(str) + "\0" + table["answer"].astype(str)
    tokens = dict(list(profile.tokens.sort_values("position").groupby("id", sort=False)))
    owners = {text: name for text, name in zip(texts, table["id"], strict=True) if name in tokens}
    none = profile.tokens.head(0)
    questions = []
    for text, row in zip(texts, table.to_dict("records"), strict=True):
        part = tokens[owners[text]] if text in owners else none
        answer, score = row.get("model_answer"), row.get("score", math.nan)
        questions.append(
            {
                "name": str(row["group"]),
                "depth": row["depth"],
                "question": str(row["question"]),
                "answer": str(row["answer"]),
                "said": answer if isinstance(answer, str) else None,
                "score": None if pd.isna(score) else float(score),
                "tokens": part["token"].astype(str).tolist(),
                "log_probability": rounded(part["log_probability"]),
                "lowest": part["lowest"].astype(bool).tolist(),
            }
        )
    return questions


# The view of token statistics: a text as its tokens, coloured by their probability; the lowest are framed.

LARGEST = 100_000
"""Largest number of table rows in a page: further texts are omitted, and the page reports this."""


@VIEWS.add(TextStatistics)
def view_likelihood(stats: TextStatistics, *, texts: Sequence[int] | int | None = None) -> View:
    """Show texts token by token, at each layer that was read.

    Args:
        stats: a result of `token_statistics`.
        texts: indices of texts; default: the first ones, as many as fit in a page.
    """
    indices = stats.texts["text"].tolist()
    if texts is None:
        sizes = stats.table["text"].value_counts().reindex(indices, fill_value=0).cumsum().to_numpy()
        chosen = indices[: max(1, int(np.searchsorted(sizes, LARGEST, side="right")))]
    else:
        listed = [texts] if isinstance(texts, int) else texts
        if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
            raise InputError(f"texts={shown(texts)} must be the index of a text, or a list of them.")
        chosen = list(listed)
        if lacking := [one for one in chosen if one not in indices]:
            raise InputError(f"texts={shown(texts)}: there is no text {shown(lacking[0])} in the statistics.")
    if not len(stats.table):
        return picture(stats)
    table = stats.table if "layer" in stats.table else stats.table.assign(layer=-1)
    layers = sorted(table["layer"].unique().tolist())
    rows = table[table["text"].isin(chosen)].sort_values(["text", "layer", "position"], kind="stable")
    first = rows[rows["layer"] == layers[0]]
    records = dict(zip(stats.texts["text"].tolist(), stats.texts.to_dict("records"), strict=True))
    parts, texts_shown = dict(list(first.groupby("text", sort=False))), []
    for number in chosen:
        part, record = parts.get(number, first.head(0)), records[number]
        about = {"number": number, "begins": short_of(str(record["content"])), "note": str(record["note"])}
        tokens = {"tokens": part["token"].astype(str).tolist(), "positions": part["position"].tolist()}
        texts_shown.append(about | tokens)
    omitted = len(stats.texts) - len(chosen)
    spec = {
        "title": plain_title(stats.run.model, "how likely each token is"),
        "note": f"{len(chosen):,} of {len(stats.texts):,} texts" if omitted else "",
        "layers": ["final"] if "layer" not in stats.table else layers,
        "texts": texts_shown,
    } | {name: packed(rows[name].to_numpy(dtype=float), "f4") for name in STATISTICS}
    return interactive(stats, ("strip.js", "likelihood.js"), spec, height=420)


@VIEWS.add(Pathways)
def view_pathways(pathways: Pathways) -> View:
    """Show the curves of every way to split the examples, and of the control, with their intervals."""
    first = default_split(pathways)
    splits = list(dict.fromkeys([first, *pathways.curves["split_by"]]))
    title = pathways_title(pathways, first)
    spec = {
        "title": title,
        "note": f"{SPELLED}; grey: {RANDOM} instead, over all examples (control)",
        "said": {"title": title, "x": "layer", "count": "examples"},
        "x": {"label": layer_label(pathways), "whole": True},
        "choices": [{"label": "modes", "names": splits}, {"label": "value", "names": list(VALUES.values())}],
        "charts": [
            {
                "title": pathways_title(pathways, split, value),
                "y": label,
                "lines": _lines(pathways, split, value),
            }
            for split in splits
            for value, label in VALUES.items()
        ],
    }
    return interactive(pathways, ("chart.js", "curves.js", "lines.js"), spec, height=660)


def _lines(pathways: Pathways, split: str, value: str) -> list[dict[str, object]]:
    """Return the lines of both modes, and of the control: equally many random question tokens, over all examples."""
    curves, table = pathways.curves[pathways.curves["split_by"] == split], pathways.controls
    control = table[(table["intervention"] == RANDOM) & (table["group"] == ALL)]
    columns = ("layer", value, f"{value}_low", f"{value}_high")
    lines = []
    for mode in MODES:
        for name in pathways.datasets:
            rows = curves[(curves["dataset"] == name) & (curves["mode"] == mode)].sort_values("layer")
            drawn = look_of(name, mode, pathways.datasets)
            look: dict[str, Any] = {"look": (drawn["color"], drawn["marker"]), "dashed": drawn["linestyle"] != "-"}
            if len(rows):
                lines.append(line_of(rows, columns, name=f"{name}, {mode}", count="examples", **look))
    for name in pathways.datasets:
        rows = control[control["dataset"] == name].sort_values("layer")
        look = {"look": (FAINT, look_of(name, MODES[0], pathways.datasets)["marker"]), "control": True}
        if len(rows):
            lines.append(line_of(rows, columns, name=f"{name}, {RANDOM} (control)", count="examples", **look))
    return lines
