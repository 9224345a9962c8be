"""How answers to questions of neighbouring depths agree: the discrepancies of DepthQA (Ko et al., EMNLP 2024).

Judge scores s run from 1 to 5. For a question t with direct predecessors (the shallower questions it builds on) of mean
score P, and direct successors (the deeper questions built on it) of mean score S:

    accuracy     mean s over the questions of a depth, each counted once
    forward      max(0, (P - s_t) / 4), over the t with P >= 4: the parts are known, the whole is not
    backward     max(0, (S - s_t) / 4), over the t with S >= 4: the whole is known, a part is not
    gap          (s_t - P) / 4

A discrepancy is the mean over the questions that pass; over all depths, they are pooled. The released code takes for S
the score of the first successor alone (`backward_first`), in the order of the deeper nodes. Neighbours without a score
do not count; where nothing passes, the value is NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray

from headwater.stats.resample import Bootstrap, interval

GOOD = 4.0
"""The mean score from which neighbours count as answered well."""
SPAN_OF_SCORES = 4.0
MEASURES = ("forward", "backward", "backward_first")


def discrepancies(nodes: pd.DataFrame) -> pd.DataFrame:
    """Return, for every node, its discrepancies and its gap; NaN where a measure does not apply.

    Args:
        nodes: `id, predecessors, successors, score`.

    Returns:
        A row per node: `predecessor_score` (P), `successor_score` (S), `forward`, `backward`, `backward_first`, `gap`.
    """
    score_of = dict(zip(nodes["id"], nodes["score"].astype(float), strict=True))
    own = nodes["score"].to_numpy(float)

    def neighbours(column: str, count: int | None = None) -> Float[ndarray, " node"]:
        found = [[score_of[name] for name in names][:count] for names in nodes[column]]
        return np.array([_mean(scores) for scores in found], dtype=float)

    below, above, first = neighbours("predecessors"), neighbours("successors"), neighbours("successors", 1)
    return pd.DataFrame(
        {
            "predecessor_score": below,
            "successor_score": above,
            "forward": _lacking(below, own),
            "backward": _lacking(above, own),
            "backward_first": _lacking(first, own),
            "gap": (own - below) / SPAN_OF_SCORES,
        },
        index=nodes.index,
    )


def judged(nodes: pd.DataFrame, graphs: Bootstrap) -> pd.DataFrame:
    """Sum the measures up: accuracy by depth, discrepancies by pair of depths and over all.

    Args:
        nodes: `depth, question_id, score` and what `discrepancies` gives.
        graphs: draws of the nodes, by graph.

    Returns:
        A row per measure and depths: `measure, depths` ("2", "1-2", "all"), `nodes` (that count), `value, low, high`.
    """
    # A question of several graphs is one answer: accuracy counts it once.
    repeated = nodes.duplicated(["depth", "question_id"]).to_numpy()
    rows = []
    depths = sorted(nodes["depth"].unique().tolist())

    def add(measure: str, name: str, values: Float[ndarray, " node"]) -> None:
        count = int((~np.isnan(values)).sum())
        rows.append({"measure": measure, "depths": name, "nodes": count} | interval(graphs.mean(values))._asdict())

    for depth in depths:
        here = (nodes["depth"] == depth).to_numpy() & ~repeated
        add("accuracy", str(depth), np.where(here, nodes["score"].to_numpy(float), math.nan))
    for measure in MEASURES:
        values = nodes[measure].to_numpy(float)
        for shallower, deeper in reversed(list(itertools.pairwise(depths))):
            at = (nodes["depth"] == (deeper if measure == "forward" else shallower)).to_numpy()
            add(measure, f"{shallower}-{deeper}", np.where(at, values, math.nan))
        add(measure, "all", values)
    return pd.DataFrame(rows)


def _mean(scores: Sequence[float]) -> float:
    present = [score for score in scores if not math.isnan(score)]
    return sum(present) / len(present) if present else math.nan


def _lacking(neighbours: Float[ndarray, " node"], own: Float[ndarray, " node"]) -> Float[ndarray, " node"]:
    """How far a node stays behind neighbours that are answered well; NaN where they are not, or nothing is scored."""
    lacking = np.maximum(0.0, (neighbours - own) / SPAN_OF_SCORES)
    return np.where(neighbours >= GOOD, lacking, math.nan)
