"""One relation in the running model: what is chosen on the first half of its items, and what is measured on the second.

For a pair of prompts that differ in the source, with answer t and foil f, all logits at the last position:

    difference    logit(t) - logit(f)
    gap           difference of the clean prompt - difference of the corrupted one
    effect        of a head: how much of the difference goes when its z at the last position is the corrupted run's
    share         mean effect / mean gap
    attention     of a head from the last position to the source, mean over clean prompts
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from headwater.causes.prompts import PairedPrompts
from headwater.models.hooked import HookedModel
from headwater.models.positions import Place
from headwater.patching.ablation import ablate
from headwater.patching.metrics import Metric, logit_difference

Head = tuple[int, int]


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


def silenced(
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
