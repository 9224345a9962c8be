"""The view of memorization by question depth: boxes to point at, scores by layer, and the tokens of questions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from headwater.figures.depth_profile import AVERAGE, DEPTH_COLORS, DEPTH_MARKS, title_of
from headwater.likelihood.profile import DepthProfile
from headwater.runs.result import VIEWS
from headwater.runs.view import View
from headwater.views.interactive import interactive, line_of, packed, rounded

QUESTIONS = 1500
"""Questions whose words and tokens are in a page; beyond them its boxes have dots that open nothing."""


@VIEWS.add(DepthProfile)
def view_depth_profile(profile: DepthProfile) -> View:
    """Show a box per depth for every score, what each dot is made of, and means by layer where several were read."""
    return interactive(profile, ("chart.js", "curves.js", "strip.js", "depth.js"), spec_of(profile), height=900)


def spec_of(profile: DepthProfile) -> dict[str, object]:
    """Return what the script draws: `score row` values, the depth and name of each row, and the questions."""
    scores = [name for name in profile.by_layer["score"].unique() if name in profile.depthwise]
    by_group, averages = profile.run.options["aggregate"] == "group", profile.depthwise
    looks = _looks(profile)
    return {
        "title": title_of(profile),
        "main": profile.main,
        "y": AVERAGE.replace("\n", " ") if by_group else "MIN-K% of a Question (nats)",
        "unit": "graph",
        "scores": scores,
        "depths": [{"depth": depth, "color": look[0], "shape": look[1]} for depth, look in looks.items()],
        "rows": {"depth": averages["depth"].tolist(), "name": averages["group"].astype(str).tolist()},
        "values": packed(np.stack([averages[name].to_numpy(dtype=float) for name in scores]), "f4"),
        "questions": _questions(profile),
        "by_layer": _by_layer(profile, scores) if profile.by_layer["layer"].nunique() > 1 else None,
    }


def _looks(profile: DepthProfile) -> dict[int, tuple[str, str]]:
    n = len(DEPTH_COLORS)
    return {depth: (DEPTH_COLORS[i % n], DEPTH_MARKS[i % n]) for i, depth in enumerate(profile.depths)}


def _questions(profile: DepthProfile) -> list[dict[str, Any]]:
    table = profile.table
    if len(table) > QUESTIONS:
        return []
    texts = table["question"].astype(str) + "\0" + table["answer"].astype(str)
    owners = {text: name for text, name in zip(texts, table["id"], strict=True) if name in set(profile.tokens["id"])}
    tokens = dict(list(profile.tokens.sort_values("position").groupby("id", sort=False)))
    none = profile.tokens.head(0)
    found = []
    for text, row in zip(texts, table.to_dict("records"), strict=True):
        part = tokens[owners[text]] if text in owners else none
        answer, score = row.get("model_answer"), row.get("score", math.nan)
        found.append(
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
    return found


def _by_layer(profile: DepthProfile, scores: list[str]) -> dict[str, object]:
    """Charts of each score against the layer, with the figure's sign: minus the score of the tables."""
    curves = profile.by_layer.assign(**{name: -profile.by_layer[name] for name in ("value", "low", "high")})
    # A minus sign swaps the ends of an interval.
    curves = curves.rename(columns={"low": "high", "high": "low"})
    ordered = [profile.main, *(name for name in scores if name != profile.main)]
    columns = "layer", "value", "low", "high"
    charts = []
    for score in ordered:
        rows = curves[curves["score"] == score]
        lines = [
            line_of(rows[rows["depth"] == depth].sort_values("layer"), columns, name=f"Depth {depth}", look=look)
            for depth, look in _looks(profile).items()
        ]
        charts.append({"y": f"minus {score}", "lines": lines})
    return {
        "said": {"title": "By layer", "x": "layer", "count": ""},
        "x": {"label": "Layer", "whole": True},
        "choices": [{"label": "score by layer", "names": ordered}],
        "charts": charts,
    }
