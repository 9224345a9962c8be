"""Do weights predict the cause? Which head each criterion ("way") names, and its share of the largest effect.

A way names the head with the largest value of its criterion, which is computed only from the first half of the items:

    weights and attention    margin × attention to the source                              (the way under test)
    weights                  margin
    attention                attention to the source
    other relations' weights the margin for a relation of another family × attention; the mean over such relations
    other relations' effect  the mean share of the gap that a head moves in relations of other families, no weights
    shuffled targets         the margin with targets shuffled among the items × attention; the mean over the draws
    effect                   the effect on the first half: the ceiling, because it uses the measured cause

The share of a head is its mean effect on the second half divided by the largest mean effect there, so that the head
with the largest effect has share 1; intervals are over sources. Three ways are baselines that a claim about weights
must beat: attention alone, other relations' weights, other relations' effect. Shuffled targets give p: with strength =
(the named head's margin × attention) × its share, p = (1 + draws at least as strong as the true targets) / (1 + draws).

Why this statistic: over all heads, rank correlation and AUC reward heads that matter for everything.

Families: relations with the same strongest head on the first half are one family, and count as one finding.
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
from headwater.patching.replacements import ValueName
from headwater.stats.resample import Bootstrap, interval

# For a pair of prompts that differ in the source, with answer t and foil f, all logits at the last position:
#
# difference    logit(t) - logit(f)
# gap           difference of the clean prompt - difference of the corrupted one
# effect        of a head: loss of the difference when its z at the last position is the corrupted run's
# share         mean effect / mean gap
# attention     of a head from the last position to the source, mean over clean prompts


def head_effects(
    model: HookedModel, pairs: PairedPrompts, heads: Collection[Head] | None = None
) -> tuple[Float[ndarray, "pair layer head"], Float[ndarray, " pair"]]:
    """Return the exact effects of heads (default: all; those of other heads are NaN), and the gap of each pair.

    Only the last token is rerun through the layers, from its head on. In a model of 30 layers and 9 heads, all heads of
    a pair cost as much as reading about 135 tokens, less than a gradient estimate and a check of its leaders.
    """
    size = model.shape.n_layers, model.shape.n_heads
    chosen = sorted(np.ndindex(size) if heads is None else heads)
    by_head = np.full((len(pairs), *size), np.nan)
    by_head[:, *np.transpose(chosen)], ends = _losses(model, pairs, [[head] for head in chosen], "other run")
    return by_head, (ends["clean"] - ends["corrupted"]).to_numpy(dtype=float)


def ablated(
    model: HookedModel, pairs: PairedPrompts, sets: Sequence[Sequence[Head]]
) -> tuple[Float[ndarray, "pair set"], float]:
    """Return each pair's loss of the difference when heads are zeroed at the last position, and the mean difference."""
    losses, ends = _losses(model, pairs, sets, "zero")
    return losses, float(ends["clean"].mean())


def _losses(
    model: HookedModel, pairs: PairedPrompts, sets: Sequence[Sequence[Head]], values: ValueName
) -> tuple[Float[ndarray, "pair set"], pd.DataFrame]:
    """Return each pair's loss of the difference for each set of heads, and the first row of its table."""
    named = {str(number): list(heads) for number, heads in enumerate(sets)}
    options = {"sets": named, "values": values, "positions": "last", "metric": pairs.metric, "progress": False}
    table = ablate(model, *pairs.sides[: 2 if values == "other run" else 1], **options).table  # type: ignore[arg-type]
    # pivot sorts its columns as strings ("10" before "2"), so they are put back in the order of the sets.
    effects = table.pivot(index="example", columns="set", values="effect")[list(named)].to_numpy(dtype=float)
    return -effects, table.groupby("example").first()


def attention_to_source(model: HookedModel, pairs: PairedPrompts) -> Float[ndarray, "layer head"]:
    """Return the mean attention of each head from the last position of the clean prompts to their source."""
    roles: dict[str, Place] = {"source": pairs.source, "last": "last"}
    cache = model.cache(pairs.clean, sites=["pattern"], positions=roles, progress=False)
    looked = cache.attention_by_role().query("role == 'last' and to == 'source'")["attention"]
    return looked.to_numpy(dtype=float).reshape(model.shape.n_layers, model.shape.n_heads)


def strongest(values: Float[ndarray, "layer head"], n: int) -> list[Head]:
    """Return the n heads with the largest values, the largest first."""
    # Stable, so that among equal values, such as those of heads without effect, the first layer comes first everywhere.
    flat = np.argsort(-values, axis=None, kind="stable")[:n]
    return [(int(i), int(j)) for i, j in zip(*np.unravel_index(flat, values.shape), strict=True)]


NAMED = "weights and attention"
BASELINES = ("attention", "other relations' weights", "other relations' effect")
WAYS = (NAMED, "weights", *BASELINES, "shuffled targets", "effect")
ByHead = Float[ndarray, "layer head"]


@dataclass(frozen=True)
class Choice:
    """Values of one relation from its first half, by head."""

    relation: str
    margins: Float[ndarray, "draw layer head"]
    """Row 0 is the margin, the further rows are margins with shuffled targets; for items of the first half."""
    attention: ByHead
    share: ByHead
    """The effect on the first half, as a share of the gap."""

    @property
    def family(self) -> Head:
        """The head that identifies the relation's family: the one with the largest effect on the first half."""
        return strongest(self.share, 1)[0]


def names_of(choice: Choice, others: Sequence[Choice]) -> dict[str, list[Head]]:
    """Return the heads that each way names; several if the way is a mean over relations or draws."""
    # Only the margins use shuffled targets; attention is that of the run in every draw.
    gated = choice.margins * choice.attention
    # A relation of the same family names the same head, and a head cannot beat itself.
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
    """Return the share of the largest effect of the head that each way (`names_of`) names, on the second half.

    Effects are NaN for heads that are neither named nor candidates for the strongest. `sources` is each pair's item.

    Returns:
        A row per way: `way, layer, head` (absent if several are named), `heads` (number of different ones), `rank` of
        its effect (the median of several), `share, low, high`; `difference, difference_low, difference_high`, by how
        much the share of "weights and attention" is greater; `p_value`, of "weights and attention" against shuffled
        targets. Second, the strength for the true targets, and for each draw of shuffled targets.
    """
    n_heads = effects.shape[2]
    means = Bootstrap.of(sources.tolist(), seed=seed).mean(effects.reshape(len(effects), -1))  # draw × head
    # The largest within each bootstrap draw, because in a resample another head may be the strongest.
    largest = np.nanmax(means, 1, keepdims=True)
    shares = means / np.where(largest > 0, largest, np.nan)  # there is no share if no head has an effect
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
        rows.append(row | {"share": share.value, "low": share.low, "high": share.high} | ahead.named("difference"))
    table = pd.DataFrame(rows)
    # Row 0 of the margins has the true targets; `named` has the same order.
    products = (choice.margins * choice.attention).reshape(len(choice.margins), -1).max(1)
    strength = products * shares[0, [*of_way[NAMED], *of_way["shuffled targets"]]]
    table["p_value"] = np.where(table["way"] == NAMED, shuffled_p(strength), np.nan)
    return table.astype({"layer": "Int64", "head": "Int64", "heads": int}), strength


def shuffled_p(strength: Float[ndarray, " draw"]) -> float:
    """Return the fraction of strengths that are at least the first one, that of the true targets; it counts itself."""
    return float((strength >= strength[0]).mean())
