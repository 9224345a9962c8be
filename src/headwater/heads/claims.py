"""A claim of heads: silencing them together changes the answer more than silencing other heads of their layers does.

The effect of a set of heads on a prompt is that of `hw.ablate`: the metric when all of them are replaced at once, less
that of the run as it is. Random sets are as many other heads of the same layers (`headwater.heads.ablation`); halves of
the prompts are compared in how they rank the set among these; held out are the prompts that did not choose the heads.
What is made of these numbers is `headwater.stats.claims`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from headwater.calls import checked_call
from headwater.heads.ablation import Heads, layer_matched
from headwater.models.hooked import HookedModel, check_model
from headwater.models.part_names import parts_of_kind
from headwater.options import checked_count, checked_number, checked_seed
from headwater.patching.ablation import ablate
from headwater.patching.components import read_sets
from headwater.patching.edits import ReplacementSpec
from headwater.patching.metrics import Measures, metric_of_a_claim
from headwater.patching.prompts import Prompts, places_among, read_pairs
from headwater.patching.replacements import TensorLike, ValueName
from headwater.patching.sweep import Sweep
from headwater.runs.claim import Claim
from headwater.stats.claims import ClaimEffects, claim_of, notes_of_few, notes_of_seen

CLAIMED = "claimed"
MOST_PLACEBOS = 1000
REDRAWS = 20
"""So many draws for each random set that is wanted; a small model has fewer sets than are requested."""


@checked_call
def claim(
    model: HookedModel,
    prompts: Prompts,
    heads: Any,
    corrupted: Prompts | None = None,
    *,
    metric: Measures,
    values: ValueName | ReplacementSpec | TensorLike | Callable[..., Any] = "zero",
    other: Any = "mean",
    chosen_on: Prompts | None = None,
    placebos: int = 100,
    margin: float | Any = None,
    level: float = 0.95,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
) -> Claim:
    """Judge whether some heads matter together, on prompts that did not choose them.

    Args:
        model: the model; it is left as it was.
        prompts: one prompt, several, or token ids.
        heads: pairs (layer, head), names such as "9.2", or rows with the columns `layer` and `head`, such as those of a
            head map's table.
        corrupted: the other prompt of each, for values from the other run.
        metric: one metric; see `hw.patch`.
        values: what replaces the heads' outputs; see `hw.ablate`.
        other: the other ablation, in a second run; None for none.
        chosen_on: the prompts that chose the heads: those among `prompts` do not count as held out, which the claim
            says. An empty list where no prompt did, as for heads that were classified from parameters.
        placebos: how many random sets of other heads from the same layers; all where there are no more.
        margin: how large an effect has to be to matter, in units of the metric; default: the 95 % quantile of the
            random sets' sizes.
        level: of the interval.
        seed: of the random sets, the bootstrap, the halves, and of `resample`.
        batch_size: see `hw.patch`.
        progress: show progress bars.

    Returns:
        A `Claim`, as `Sweep.claim` gives it.

    Raises:
        InputError: there are no such heads, as many others, or several metrics; or another option cannot be used.
    """
    check_model(model)
    chosen = _pairs(model, heads)
    level, seed = checked_number("level", level, above=0.0, below=1.0), checked_seed(seed)
    margin = None if margin is None else checked_number("margin", margin, above=0.0)
    placebos = checked_count("placebos", placebos, least=0, most=MOST_PLACEBOS)
    name = metric_of_a_claim(metric).name
    drawn = matched_sets(model, chosen, placebos, seed)
    run: dict[str, Any] = {"metric": metric, "seed": seed, "batch_size": batch_size, "progress": progress}
    sets = {CLAIMED: chosen} | {f"random {number}": one for number, one in enumerate(drawn)}
    swept = ablate(model, prompts, corrupted, sets=sets, values=values, **run)
    beside = None
    if other is not None:
        beside = _effects(ablate(model, prompts, corrupted, sets={CLAIMED: chosen}, values=other, **run))[0]
    effects = _effects(swept)
    seen = [] if chosen_on is None else _coinciding(model, swept, chosen_on)
    held_out = None if chosen_on is None else np.delete(effects[0], seen)
    notes = notes_of_few(len(drawn)) + notes_of_seen(seen, "heads")
    evidence = ClaimEffects(effects[0], effects[1:], beside, effects.T, held_out)
    named = ", ".join(f"{layer}.{head}" for layer, head in chosen[:8]) + " ..." * (len(chosen) > 8)
    what = f"Head{'s' * (len(chosen) > 1)} {named} on {name.replace('_', ' ')}"
    judged = claim_of(evidence, what=what, margin=margin, level=level, seed=seed, notes=notes)
    options = {"heads": chosen, "margin": margin, "other": other, "seen": seen if chosen_on is not None else None}
    return Claim.of(judged, swept.run, options)


def _pairs(model: HookedModel, heads: Any) -> list[tuple[int, int]]:
    """Return heads as pairs, each of the model's and named once."""
    found = parts_of_kind("heads", heads, model.shape)
    # For its checks alone: a head named twice, or of a layer that has none.
    read_sets(model, {"heads": found})
    return [(layer, head) for layer, head in found]


def matched_sets(model: HookedModel, chosen: Heads, n: int, seed: int) -> list[Heads]:
    """Draw different sets of as many other heads of the same layers, or of the nearest where one has too few."""
    generator, sets = np.random.default_rng(seed), dict[tuple[tuple[int, int], ...], Heads]()
    # Few heads have few sets of their layers: after so many draws what is there is all that is found.
    for _ in range(REDRAWS * n):
        drawn = layer_matched(chosen, model.shape.n_layers, model.shape.n_heads, generator)
        sets.setdefault(tuple(sorted(drawn)), drawn)
        if len(sets) == n:
            break
    return list(sets.values())


def _effects(swept: Sweep) -> Float[ndarray, "draw example"]:
    """Return the effect of each set on each prompt, the claimed one first."""
    effects = swept.table.groupby(["set", "example"], sort=False)["effect"].mean().unstack("example")
    return np.asarray(effects.to_numpy(), dtype=np.float64)


def _coinciding(model: HookedModel, swept: Sweep, chosen_on: Prompts) -> list[int]:
    """Return which prompts, by number, the heads were chosen on."""
    if isinstance(chosen_on, list | tuple) and not len(chosen_on):
        return []
    return places_among(swept.run.options["prompts"][0], (one.ids for one in read_pairs(model, chosen_on, None)[0]))
