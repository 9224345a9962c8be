"""Do weights predict the cause? Which head each way of naming names, and its share of the largest effect.

A way names the head with the largest value of what it knows, all of it of the first half of the items:

    weights and attention    margin × attention to the source                              (what is put to the test)
    weights                  margin
    attention                attention to the source
    other relations' weights the margin for a relation of another family × attention; the mean over such relations
    other relations' effect  the mean share of the gap that a head moves in relations of other families, no weights
    shuffled targets         the margin with targets shuffled among the items × attention; the mean over the draws
    effect                   the effect on the first half: what a cause that is known names, the ceiling

The share of a head is its mean effect on the second half divided by the largest one there, so that 1 is the head that
moves most; intervals are over sources. Three are baselines, which a claim about weights must beat: attention alone,
other relations' weights, other relations' effect. Shuffled targets give p: with strength = (the named head's margin ×
attention) × its share, p = (1 + draws with at least the strength of the targets as they are) / (1 + draws).

Why this statistic: over all heads, rank correlation and AUC reward heads that matter for everything.

Families: relations whose strongest head on the first half is the same are one family, one finding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from numpy import ndarray

from headwater.causes.relation import Head, strongest
from headwater.stats.resample import Bootstrap, interval

NAMED = "weights and attention"
BASELINES = ("attention", "other relations' weights", "other relations' effect")
WAYS = (NAMED, "weights", *BASELINES, "shuffled targets", "effect")
ByHead = Float[ndarray, "layer head"]


@dataclass(frozen=True)
class Choice:
    """What is known of one relation from its first half, by head."""

    relation: str
    margins: Float[ndarray, "draw layer head"]
    """The margin, then those with shuffled targets, of items of the first half."""
    attention: ByHead
    share: ByHead
    """The effect on the first half, as a share of the gap."""

    @property
    def family(self) -> Head:
        """The head that names the relation's family: the one with the largest effect on the first half."""
        return strongest(self.share, 1)[0]


def names_of(choice: Choice, others: Sequence[Choice]) -> dict[str, list[Head]]:
    """Return the heads that each way names; several where it is a mean over relations or draws."""
    # Targets are shuffled in the margins alone; attention is that of the run in every draw.
    gated = choice.margins * choice.attention
    # A relation of the same family names the same head, which cannot beat itself.
    foreign = [one for one in others if one.family != choice.family]
    named = {
        NAMED: [strongest(gated[0], 1)[0]],
        "weights": [strongest(choice.margins[0], 1)[0]],
        "attention": [strongest(choice.attention, 1)[0]],
        "other relations' weights": [strongest(one.margins[0] * choice.attention, 1)[0] for one in foreign],
        "other relations' effect": [],
        "shuffled targets": [strongest(draw, 1)[0] for draw in gated[1:]],
        "effect": [choice.family],
    }
    if foreign:
        named["other relations' effect"] = strongest(np.mean([one.share for one in foreign], axis=0), 1)
    return named


def judged(
    choice: Choice,
    named: Mapping[str, Sequence[Head]],
    effects: Float[ndarray, "pair layer head"],
    sources: Int[ndarray, " pair"],
    seed: int,
) -> tuple[pd.DataFrame, Float[ndarray, " draw"]]:
    """Return what share of the largest effect the head of each way of naming has, on the second half.

    Args:
        choice: the relation.
        named: what `names_of` returned for it.
        effects: of the heads that are named and those that may be strongest; NaN of others.
        sources: of each pair, which source it asks for.
        seed: of the bootstrap.

    Returns:
        A row per way: `way, layer, head` (absent where several are named), `heads` (how many different ones), `rank` of
        its effect (the median of several), `share, low, high`; `difference, difference_low, difference_high`, by how
        much the share of "weights and attention" is greater; `p_value`, of "weights and attention" against shuffled
        targets. And the strength of the targets as they are, and of each draw of shuffled ones.
    """
    heads = [(int(layer), int(head)) for layer, head in np.ndindex(effects.shape[1:])]
    # draw × head; the first row is the data
    means = Bootstrap.of(sources.tolist(), seed=seed).mean(effects.reshape(len(effects), -1))
    # The largest of each draw: in a resample another head may be the strongest.
    largest = np.nanmax(means, 1, keepdims=True)
    shares = means / np.where(largest > 0, largest, np.nan)  # where no head moves anything there is no share
    place = {head: number for number, head in enumerate(heads)}
    # Heads that were not measured are weaker on the first half, and rank after those that were.
    rank = np.argsort(np.argsort(-means[0], kind="stable"), kind="stable") + 1  # NaN comes last
    of_way = {way: np.array([place[head] for head in some], dtype=int) for way, some in named.items()}
    rows: list[dict[str, object]] = []
    ours = shares[:, of_way[NAMED]].mean(1)
    for way in WAYS:
        chosen = of_way[way]
        if not len(chosen):
            rows.append({"way": way, "heads": 0})
            continue
        theirs = shares[:, chosen].mean(1)
        share, ahead = interval(theirs), interval(ours - theirs)
        different = len(set(chosen.tolist()))
        row: dict[str, object] = {"way": way}
        if different == 1:
            row |= dict(zip(("layer", "head"), heads[chosen[0]], strict=True))
        row |= {"heads": different, "rank": float(np.median(rank[chosen]))}
        row |= {"share": share.value, "low": share.low, "high": share.high, "difference": ahead.value}
        rows.append(row | {"difference_low": ahead.low, "difference_high": ahead.high})
    table = pd.DataFrame(rows)
    # The first draw is the relation as it is; so is the first of the names.
    products = (choice.margins * choice.attention).reshape(len(choice.margins), -1).max(1)
    strength = products * shares[0, [*of_way[NAMED], *of_way["shuffled targets"]]]
    table["p_value"] = np.where(table["way"] == NAMED, shuffled_p(strength), np.nan)
    return table.astype({"layer": "Int64", "head": "Int64", "heads": int}), strength


def shuffled_p(strength: Float[ndarray, " draw"]) -> float:
    """Return how probable the first strength is among those of shuffled targets, the others."""
    return float((strength >= strength[0]).mean())
