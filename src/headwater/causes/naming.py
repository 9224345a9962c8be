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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from numpy import ndarray

from headwater.causes.prompts import PairedPrompts
from headwater.heads.causal import Head
from headwater.models.hooked import HookedModel
from headwater.models.positions import Place
from headwater.patching.components import ablate
from headwater.patching.metrics import Metric, logit_difference
from headwater.stats.resample import Bootstrap, interval

# For a pair of prompts that differ in the source, with answer t and foil f, all logits at the last position:
#
# difference    logit(t) - logit(f)
# gap           difference of the clean prompt - difference of the corrupted one
# effect        of a head: how much of the difference goes when its z at the last position is the corrupted run's
# share         mean effect / mean gap
# attention     of a head from the last position to the source, mean over clean prompts


def metric_of(pairs: PairedPrompts) -> Metric:
    """Return the logit difference of the pairs' answers and foils."""
    return logit_difference(pairs.answer.tolist(), pairs.foil.tolist())


def both_sides(pairs: PairedPrompts) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of the clean and of the corrupted prompts."""
    return pairs.clean.tolist(), pairs.corrupted.tolist()


@dataclass(frozen=True)
class HeadEffects:
    """What single heads do on some pairs."""

    effect: Float[ndarray, "pair layer head"]
    gap: Float[ndarray, " pair"]

    @property
    def share(self) -> Float[ndarray, "layer head"]:
        """Every head's mean effect, as a share of the mean gap."""
        return self.effect.mean(0) / self.gap.mean()


def head_effects(model: HookedModel, pairs: PairedPrompts, heads: Collection[Head] | None = None) -> HeadEffects:
    """Measure the effects of heads, all by default, exactly; those of the others are NaN.

    Only the last token goes down the layers again, from its head on: of a model of 30 layers and 9 heads all heads of a
    pair cost as much as reading about 135 tokens, less than an estimate by gradients and a check of its leaders.
    """
    size = model.shape.n_layers, model.shape.n_heads
    chosen = sorted(np.ndindex(size) if heads is None else heads)
    sets = {str(number): [head] for number, head in enumerate(chosen)}
    options = {"sets": sets, "values": "other run", "positions": "last", "metric": metric_of(pairs), "progress": False}
    table = ablate(model, *both_sides(pairs), **options).table  # type: ignore[arg-type]
    by_head = np.full((len(pairs), *size), np.nan)
    # pivot sorts its columns as texts ("10" before "2"); they are put back in the order of the heads.
    by_head[:, *np.transpose(chosen)] = -table.pivot(index="example", columns="set", values="effect")[list(sets)]
    clean, corrupted = table.groupby("example")[["clean", "corrupted"]].first().to_numpy(dtype=float).T
    return HeadEffects(by_head, clean - corrupted)


def ablated(
    model: HookedModel, pairs: PairedPrompts, sets: Sequence[Sequence[Head]]
) -> tuple[Float[ndarray, "pair set"], float]:
    """Return what the difference of each pair loses when heads write nothing at the last position, and its mean."""
    named = {str(number): list(heads) for number, heads in enumerate(sets)}
    options = {"sets": named, "positions": "last", "metric": metric_of(pairs), "progress": False}
    table = ablate(model, pairs.clean.tolist(), **options).table  # type: ignore[arg-type]
    effects = table.pivot(index="example", columns="set", values="effect")[list(named)].to_numpy(dtype=float)
    return -effects, float(table.groupby("example")["clean"].first().mean())


def attention_to_source(model: HookedModel, pairs: PairedPrompts) -> Float[ndarray, "layer head"]:
    """Return the mean attention of each head from the last position of the clean prompts to their source."""
    roles: dict[str, Place] = {"source": pairs.source, "last": "last"}
    cache = model.cache(pairs.clean, sites=["pattern"], positions=roles, progress=False)
    looked = cache.attention_by_role().query("role == 'last' and to == 'source'")["attention"]
    return looked.to_numpy(dtype=float).reshape(model.shape.n_layers, model.shape.n_heads)


def strongest(values: Float[ndarray, "layer head"], n: int) -> list[Head]:
    """Return the n heads with the largest values, the largest first."""
    # Stable: of equal values, such as those of heads that do nothing, the first layer's comes first everywhere.
    flat = np.argsort(-values, axis=None, kind="stable")[:n]
    return [(int(i), int(j)) for i, j in zip(*np.unravel_index(flat, values.shape), strict=True)]


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
    foreign = [other for other in others if other.family != choice.family]
    named = {
        NAMED: [strongest(gated[0], 1)[0]],
        "weights": [strongest(choice.margins[0], 1)[0]],
        "attention": [strongest(choice.attention, 1)[0]],
        "other relations' weights": [strongest(other.margins[0] * choice.attention, 1)[0] for other in foreign],
        "other relations' effect": [],
        "shuffled targets": [strongest(draw, 1)[0] for draw in gated[1:]],
        "effect": [choice.family],
    }
    if foreign:
        named["other relations' effect"] = strongest(np.mean([other.share for other in foreign], axis=0), 1)
    return named


def judged(
    choice: Choice,
    named: Mapping[str, Sequence[Head]],
    effects: Float[ndarray, "pair layer head"],
    sources: Int[ndarray, " pair"],
    seed: int,
) -> tuple[pd.DataFrame, Float[ndarray, " draw"]]:
    """Return what share of the largest effect the head of each way of naming (`names_of`) has, on the second half.

    Effects are NaN of heads that are neither named nor may be strongest; a source is what its pair asks for.

    Returns:
        A row per way: `way, layer, head` (absent where several are named), `heads` (how many different ones), `rank` of
        its effect (the median of several), `share, low, high`; `difference, difference_low, difference_high`, by how
        much the share of "weights and attention" is greater; `p_value`, of "weights and attention" against shuffled
        targets. And the strength of the targets as they are, and of each draw of shuffled ones.
    """
    n_heads = effects.shape[2]
    means = Bootstrap.of(sources.tolist(), seed=seed).mean(effects.reshape(len(effects), -1))  # draw × head
    # The largest of each draw: in a resample another head may be the strongest.
    largest = np.nanmax(means, 1, keepdims=True)
    shares = means / np.where(largest > 0, largest, np.nan)  # where no head moves anything there is no share
    # Heads that were not measured are weaker on the first half, and rank after those that were.
    rank = np.argsort(np.argsort(-means[0], kind="stable"), kind="stable") + 1  # NaN comes last
    of_way = {way: np.array([layer * n_heads + head for layer, head in some], dtype=int) for way, some in named.items()}
    rows: list[dict[str, object]] = []
    ours = shares[:, of_way[NAMED]].mean(1)
    for way in WAYS:
        chosen = of_way[way]
        if not len(chosen):
            rows.append({"way": way, "heads": 0})
            continue
        theirs = shares[:, chosen].mean(1)
        share, ahead = interval(theirs), interval(ours - theirs)
        row: dict[str, object] = {"way": way, "heads": len(set(chosen.tolist()))}
        if row["heads"] == 1:
            row["layer"], row["head"] = divmod(int(chosen[0]), n_heads)
        row["rank"] = float(np.median(rank[chosen]))
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
