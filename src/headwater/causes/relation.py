"""One relation in the running model: what is chosen on the first half of its items, and what is measured on the second.

For a pair of prompts that differ in the source, with answer t and foil f, all logits at the last position:

    difference    logit(t) - logit(f)
    gap           difference of the clean prompt - difference of the corrupted one
    effect        of a head: how much of the difference goes when its z at the last position is the corrupted run's
    share         mean effect / mean gap
    estimate      the effect by attribution: (z of the corrupted run - z) times the difference's gradient
    attention     of a head from the last position to the source, mean over clean prompts
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from headwater.causes.prompts import PairedPrompts
from headwater.models.hooked import HookedModel
from headwater.models.positions import Place
from headwater.patching.ablation import ablate
from headwater.patching.activation_patching import patch
from headwater.patching.metrics import Metric, logit_difference

Head = tuple[int, int]
Heads = Sequence[Head]


def metric_of(pairs: PairedPrompts) -> Metric:
    """Return the logit difference of the pairs' answers and foils."""
    return logit_difference(pairs.answer.tolist(), pairs.foil.tolist())


def both_sides(pairs: PairedPrompts) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of the clean and of the corrupted prompts."""
    return pairs.clean.tolist(), pairs.corrupted.tolist()


@dataclass(frozen=True)
class Estimates:
    """What two forwards and a backward of each pair say."""

    effect: Float[ndarray, "layer head"]
    """Every head's mean effect, by attribution."""
    gap: Float[ndarray, " pair"]


def estimated_effects(model: HookedModel, pairs: PairedPrompts) -> Estimates:
    """Estimate every head's effect by attribution, and measure the gap of each pair on the way."""
    asked = {"sites": "z", "positions": "last", "metric": metric_of(pairs), "direction": "noise"}
    sweep = patch(model, *both_sides(pairs), **asked, method="attribution", progress=False)  # type: ignore[arg-type]
    by_head = sweep.table.groupby(["layer", "head"])["effect"].mean().to_numpy(dtype=float)
    clean, corrupted = sweep.table.groupby("example")[["clean", "corrupted"]].first().to_numpy(dtype=float).T
    return Estimates(-by_head.reshape(model.shape.n_layers, model.shape.n_heads), clean - corrupted)


def exact_effects(model: HookedModel, pairs: PairedPrompts, heads: Heads) -> Float[ndarray, "pair head"]:
    """Return the effect of each of some heads on each pair, by running what comes after it again."""
    sets = {f"{layer}.{head}": [(layer, head)] for layer, head in heads}
    return -replaced(model, pairs, sets, "other run")[0]


def replaced(
    model: HookedModel, pairs: PairedPrompts, sets: dict[str, list[Head]], values: str
) -> tuple[Float[ndarray, "pair set"], Float[ndarray, " pair"]]:
    """Return how the difference changes when z of each set of heads is replaced at the last position, and from what."""
    clean, corrupted = both_sides(pairs)
    asked = {"sets": sets, "positions": "last", "metric": metric_of(pairs), "values": values, "progress": False}
    sweep = ablate(model, clean, corrupted if values == "other run" else None, **asked)  # type: ignore[arg-type]
    effects = sweep.table.pivot(index="example", columns="set", values="effect")[list(sets)].to_numpy(dtype=float)
    return effects, sweep.table.groupby("example")["clean"].first().to_numpy(dtype=float)


def attention_to_source(model: HookedModel, pairs: PairedPrompts) -> Float[ndarray, "layer head"]:
    """Return the mean attention of each head from the last position of the clean prompts to their source."""
    roles: dict[str, Place] = {"source": pairs.source, "last": "last"}
    cache = model.cache(pairs.clean, sites=["pattern"], positions=roles, progress=False)
    looked = cache.attention_by_role().query("role == 'last' and to == 'source'")["attention"]
    return looked.to_numpy(dtype=float).reshape(model.shape.n_layers, model.shape.n_heads)


def strongest(values: Float[ndarray, "layer head"], n: int) -> list[Head]:
    """Return the n heads with the largest values, the largest first."""
    flat = np.argsort(-values, axis=None, kind="stable")[:n]
    return [(int(i), int(j)) for i, j in zip(*np.unravel_index(flat, values.shape), strict=True)]
