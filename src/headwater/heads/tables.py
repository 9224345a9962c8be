"""The tables of a head map: every score with its interval and its null model, and the relations that were scored.

From what each layer gave (`scores.LayerScores`) follow, per layer, head and relation:

    low, high           Wilson's 95 % interval of the score, of as many items as there are distinct sources
    expected            the mean score under shuffled targets
    excess              the chance-corrected score, (score - expected) / (1 - expected)
    p_value, q_value    P(at least this score) under shuffled targets, and the same after false-discovery control over
                        everything the map holds: heads, relations and both signs
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headwater.heads.categories import add_excess
from headwater.heads.relations import TokenRelation
from headwater.stats.significance import Numbers, permutation_p_values, q_values, wilson_interval


def score_table(layers: Sequence[Mapping[str, Tensor]], relations: Sequence[TokenRelation]) -> pd.DataFrame:
    """Put the layers' scores into one table, and add what follows from them: intervals, p-values, q-values.

    Args:
        layers: what `LayerScores` holds of each layer, by name.
        relations: the relations that were scored.
    """
    scores = {name: torch.stack([layer[name] for layer in layers]).numpy() for name in layers[0]}
    shape = scores["score"].shape
    layer, head, relation = (index.ravel() for index in np.indices(shape))
    pairs = np.array([len(tokens.targets) for tokens in relations], dtype=float)
    expected, p, q = _null(scores, pairs)
    sources = np.array([tokens.distinct_sources for tokens in relations], dtype=float)
    low, high = wilson_interval(np.rint(scores["score"] * pairs) * (sources / pairs), sources)
    columns = {
        "layer": layer,
        "head": head,
        "relation": np.array([tokens.relation.name for tokens in relations], dtype=object)[relation],
        "category": np.array([tokens.relation.category for tokens in relations], dtype=object)[relation],
        "score": scores["score"],
        "suppression": scores["suppression"],
        "expected": expected[0],
        "p_value": p[0],
        "q_value": q[0],
        "pairs": pairs.astype(int)[relation],
        "low": low,
        "high": high,
        "beyond_copying": scores["beyond_copying"],
        "suppression_expected": expected[1],
        "suppression_p_value": p[1],
        "suppression_q_value": q[1],
        "suppression_beyond_copying": scores["suppression_beyond_copying"],
    }
    return add_excess(pd.DataFrame({name: np.ravel(column) for name, column in columns.items()}))


def _null(scores: Mapping[str, Numbers], pairs: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return the expected scores, p-values and q-values of both signs, [sign, layer, head, relation]."""
    observed = np.stack([scores["score"], scores["suppression"]])
    if "moments" not in scores:
        unknown = np.full_like(observed, np.nan)
        return unknown, unknown, unknown
    moments = np.stack([scores["moments"], scores["suppression_moments"]])
    p = permutation_p_values(np.rint(observed * pairs), moments)
    return moments[..., 0] / pairs, p, q_values(p)


def relation_table(relations: Sequence[TokenRelation], ks: Sequence[int]) -> pd.DataFrame:
    """Return a row per relation: how many pairs survive, whether it is scored, with which k, and what fell out."""
    rows = [
        (
            tokens.relation.name,
            tokens.relation.category,
            len(tokens.relation.pairs),
            len(tokens.targets),
            tokens.usable,
            k,
            tokens.note,
        )
        for tokens, k in zip(relations, ks, strict=True)
    ]
    return pd.DataFrame(rows, columns=["relation", "category", "pairs", "kept", "used", "k", "note"])
