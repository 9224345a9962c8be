"""Everything about one relation: a row per head, when the answer passes to the end, what silencing costs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from headwater.causes.naming import Choice
from headwater.causes.prompts import PairedPrompts, RelationPrompts, mean_of
from headwater.causes.relation import Head, both_sides, metric_of, silenced
from headwater.causes.results import Evidence, EvidenceSuite
from headwater.errors import ModelError
from headwater.heads.claims import matched_sets
from headwater.heads.classify import classify_heads
from headwater.lenses.direct_attribution import direct_logit_attribution
from headwater.models.hooked import HookedModel
from headwater.patching.activation_patching import patch
from headwater.runs.analysis import Run
from headwater.stats.resample import Bootstrap, interval

TOGETHER = 3
"""So many heads, the first by margin × attention, are silenced together."""
FEW = 8
"""Pairs that costs, positions and direct writing are measured on."""
CONTROLS = 2
"""Other relations that the same heads are silenced on."""
WHEN = ["role", "layer", "share", "low", "high"]
COST = ["what", "heads", "cost", "low", "high", "share"]
BY_HEAD = ["layer", "head", "score", "excess", "q_value", "margin", "attention", "product", "first_half", "effect"]
BY_HEAD += ["low", "high", "direct"]


def one_relation(
    model: HookedModel,
    suite: EvidenceSuite,
    prompts: RelationPrompts | None,
    choice: Choice | None,
    known: Mapping[str, Tensor] | None,
    others: Sequence[RelationPrompts],
    options: Mapping[str, Any],
    seed: int,
    run: Run,
) -> Evidence:
    """Return everything about the first relation of a suite.

    Args:
        model: the model.
        suite: of which the relation is the first row.
        prompts: the relation's; None where there are none.
        choice: what its first half says; None where the model cannot do it.
        known: its gap pair by pair, and where the model can do it the effects of all heads.
        others: prompts of further relations, the controls of silencing.
        options: of the run.
        seed: of intervals and random heads.
        run: the run.
    """
    templates = pd.DataFrame() if prompts is None else prompts.templates
    if prompts is None or known is None or choice is None:
        empty = {"when": pd.DataFrame(columns=WHEN), "cost": pd.DataFrame(columns=COST)}
        return Evidence(pd.DataFrame(columns=BY_HEAD), suite.table, templates, ways=suite.ways, run=suite.run, **empty)
    pairs = prompts.second
    gap = known["gap"].numpy()
    heads = _by_head(model, prompts, choice, known["effects"].numpy(), gap, options)
    named: list[Head] = [(layer, head) for layer, head in heads[["layer", "head"]].head(TOGETHER).to_numpy().tolist()]
    with run.bar("When, and what it costs", "part", 2 + CONTROLS) as bar:
        when = _when(model, pairs.few(FEW), gap[:FEW].mean())
        bar.update(1)
        cost = _cost(model, pairs.few(FEW), named, choice.family, options["draws"], seed)
        bar.update(1)
        for control in others[:CONTROLS]:
            beside = control.second.few(FEW)
            lost, difference = silenced(model, beside, [named])
            cost.append(_row(f"named together, on {control.relation.name}", named, lost[:, 0], beside, difference))
            bar.update(1)
    return Evidence(heads, suite.table, templates, when, suite.ways, pd.DataFrame(cost, columns=COST), suite.run)


def _by_head(
    model: HookedModel,
    prompts: RelationPrompts,
    choice: Choice,
    effects: Float[ndarray, "pair layer head"],
    gap: Float[ndarray, " pair"],
    options: Mapping[str, Any],
) -> pd.DataFrame:
    """A row per head, the largest product of margin and attention first."""
    layer, head = (index.ravel() for index in np.indices(choice.attention.shape))
    frame = pd.DataFrame({"layer": layer, "head": head, "margin": choice.margins[0].ravel()})
    frame["attention"] = choice.attention.ravel()
    frame["product"] = frame["margin"] * frame["attention"]
    frame["first_half"] = choice.share.ravel()
    means = Bootstrap.of(prompts.second.item.tolist()).mean(effects.reshape(len(effects), -1) / gap.mean())
    found = [interval(means[:, place]) for place in range(means.shape[1])]
    frame[["effect", "low", "high"]] = [(one.value, one.low, one.high) for one in found]
    if prompts.tokens.usable:
        given = {"relations": prompts.relation, "embedding": options["embedding"], "every_excess": True}
        scores = classify_heads(model, **given, progress=False).table[["layer", "head", "score", "excess", "q_value"]]
        # Relations of which too few words are single tokens have margins and no score.
        frame = frame.merge(scores, on=["layer", "head"])
    frame["direct"] = _direct(model, prompts.second.few(FEW), gap[:FEW].sum())
    return frame.reindex(columns=BY_HEAD).sort_values("product", ascending=False, ignore_index=True)


def _direct(model: HookedModel, pairs: PairedPrompts, gap: float) -> ndarray | float:
    """The share of the gap that each head writes into the logits itself; NaN where logits are not that simple."""
    tokens = pairs.answer.tolist(), pairs.foil.tolist()
    try:
        both = [direct_logit_attribution(model, side, tokens=tokens, progress=False) for side in both_sides(pairs)]
    except ModelError:
        return np.nan
    written = []
    for found in both:
        rows = found.table[found.table["component"] == "head"]
        written.append(rows.groupby(["layer", "head"])["contribution"].sum().to_numpy(dtype=float))
    # The difference of both sides: what a head writes for the answer whatever the source is cancels.
    return (written[0] - written[1]) / gap


def _when(model: HookedModel, pairs: PairedPrompts, gap: float) -> pd.DataFrame:
    """The share of the gap that the residual stream carries at the source and the last position, by layer."""
    options = {"sites": "resid_pre", "positions": {"source": pairs.source, "last": "last"}, "direction": "noise"}
    sweep = patch(model, *both_sides(pairs), **options, metric=metric_of(pairs), progress=False)  # type: ignore[arg-type]
    rows = []
    for (role, layer), cell in sweep.table.groupby(["role", "layer"], sort=False):
        mean = mean_of(-cell["effect"].to_numpy(dtype=float) / gap, pairs.item.tolist())
        rows.append((role, layer, mean.value, mean.low, mean.high))
    return pd.DataFrame(rows, columns=WHEN)


def _cost(
    model: HookedModel, pairs: PairedPrompts, named: list[Head], strongest_head: Head, draws: int, seed: int
) -> list[dict[str, Any]]:
    """What the logit difference loses when heads write nothing at the last position, beside random ones."""
    sets = [*(("named", [head]) for head in named), ("named together", named), ("largest effect", [strongest_head])]
    random = [list(one) for one in matched_sets(model, named, draws, seed)]
    # Named and random sets in one call, so that all share one recorded run.
    lost, difference = silenced(model, pairs, [*(heads for _, heads in sets), *random])
    rows = [_row(what, heads, one, pairs, difference) for (what, heads), one in zip(sets, lost.T, strict=False)]
    if random:
        sizes = lost[:, len(sets) :].mean(0)
        value, (low, high) = sizes.mean(), np.quantile(sizes, [0.025, 0.975])
        what = f"random, {len(sizes)} sets of {len(named)} of the same layers"
        rows.append({"what": what, "heads": "", "cost": value, "low": low, "high": high, "share": value / difference})
    return rows


def _row(
    what: str, heads: list[Head], lost: Float[ndarray, " pair"], pairs: PairedPrompts, difference: float
) -> dict[str, Any]:
    cost = mean_of(lost, pairs.item.tolist())
    row = {"what": what, "heads": ", ".join(map(_name, heads)), "cost": cost.value, "low": cost.low, "high": cost.high}
    return row | {"share": cost.value / difference}


def _name(head: Head) -> str:
    return f"{head[0]}.{head[1]}"
