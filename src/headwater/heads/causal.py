"""Does the running model need a head? Ablate it and compare with other heads, to validate a head map or test a claim.

To validate what the parameters suggest (`HeadMap.validate`):

1. The items of each relation become prompts, as in `ablation`: some examples, then the source; the next token should be
   a target. An item is correct if its most likely next token is an accepted target; accuracy is the share of these.
2. For each called head (it implements or suppresses the relation): the accuracy when its z is set to zero at the last
   position, with the rest of the model computed from there.
3. The same for other heads, one at a time. They are drawn from the head's layer, among those that by the rule neither
   implement nor suppress the relation, or from the nearest layer that has such heads. `others` is the mean over them.
4. loss = others - without: the cost of ablating this head beyond ablating another head. Intervals are percentiles of a
   bootstrap over sources, with all items of a source together.
5. p is the larger of two: McNemar's exact test against the whole model (sources that lose more items than they gain,
   or gain more), and a sign-flip test against the other heads; 1 if they point in different directions. So a head must
   differ from both. q: false-discovery control (Benjamini and Hochberg) over all called heads and relations.
6. An implementing head is used if q is at most 5 % and the loss is above 0; a suppressing head, if the loss is below 0.
   If q is at most 5 % and the sign is opposite, the head is opposed: for example, the model answers better without a
   head that, by its parameters, writes the correct answers. Otherwise `used` is False: its use is not shown, but not
   ruled out either. The interval of the loss bounds its effect.

With an accuracy of 0 there is nothing to lose: if the whole model answers no item of a relation, no head is ablated.

A claim: ablating some heads together changes the answer more than ablating other heads of their layers. The effect of a
set of heads on a prompt is that of `hw.ablate`: the metric with all of them replaced at once, minus the metric of the
unchanged run. Random sets have the same number of other heads of the same layers, or also of the nearest
(`matched_sets`). Half of the prompts are compared with the other half in how they rank the set among these. Held-out
prompts are those that did not choose the heads. `headwater.stats.claims` evaluates these numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from numpy import ndarray
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.heads.categories import FALSE_DISCOVERY_RATE
from headwater.heads.relations import TaskPrompts, TokenRelation, task_prompts
from headwater.models.hooked import HookedModel
from headwater.models.part_names import parts_of_kind
from headwater.options import checked_count
from headwater.patching.components import ablate, read_sets
from headwater.patching.edits import ReplacementSpec
from headwater.patching.metrics import Measures, Metric, logit_difference, metric_of_a_claim
from headwater.patching.prompts import Prompts, places_among, read_pairs
from headwater.patching.replacements import TensorLike, ValueName
from headwater.patching.sweep import Sweep
from headwater.progress import progress_bar
from headwater.runs.result import Claim
from headwater.stats.claims import TOO_FEW, ClaimEffects, notes_of_few, notes_of_seen
from headwater.stats.resample import Bootstrap, percentile_interval
from headwater.stats.significance import mcnemar_p, q_values, sign_flip_p

Head: TypeAlias = tuple[int, int]
"""(layer, head)."""
Heads: TypeAlias = Sequence[Head]
MEASURED = (
    *("accuracy", "without", "without_low", "without_high", "others", "others_low", "others_high"),
    *("loss", "loss_low", "loss_high", "loss_p_value"),
)
COLUMNS = (*MEASURED, "loss_q_value", "used")
"""The columns that `HeadMap.validate` adds to the table of a head map."""
CLAIMED = "claimed"
MOST_PLACEBOS = 1000
REDRAWS = 20
"""Most draws per requested random set, because a small model may not have enough distinct sets."""


def head_use(
    model: HookedModel,
    table: pd.DataFrame,
    relations: Mapping[str, TokenRelation],
    template: str | Mapping[str, str],
    shots: int,
    draws: int,
    seed: int,
    progress: bool,
) -> pd.DataFrame:
    """Return `COLUMNS` for each row of a head map's table: the effect of its heads in the running model.

    `template` is one text for all relations, or a mapping from the requested relations to their texts. NaN if the head
    is not called, its relation is not requested, or (except for the accuracy of 0) the model answers none of its items.
    """
    called = table[table["implemented"] | table["suppressed"]]
    measured = pd.DataFrame(np.nan, index=table.index, columns=list(MEASURED))
    templates = template if isinstance(template, Mapping) else dict.fromkeys(relations, template)
    names = [name for name in called["relation"].unique() if templates.get(name) is not None]
    with progress_bar(progress, len(names), desc="Ablating heads", unit="relation") as bar:
        for name in names:
            task = task_prompts(model, relations[name], str(templates[name]), shots, seed)
            # In a fixed order, because the other heads are drawn head by head.
            rows = called[called["relation"] == name].sort_values(["layer", "head"])
            measured.loc[rows.index] = _of_relation(model, task, rows, relations[name], draws, seed)
            bar.update()
    # NaN is not counted as a test.
    q = q_values(measured["loss_p_value"].to_numpy())
    is_clear = q <= FALSE_DISCOVERY_RATE
    is_used = (table["implemented"] & (measured["loss"] > 0)) | (table["suppressed"] & (measured["loss"] < 0))
    used = (is_used & is_clear).astype("boolean").mask(measured["loss"].isna())
    return measured.assign(loss_q_value=q, used=used)


def sentences_of_use(table: pd.DataFrame) -> list[str]:
    """Return how many pairs of head and relation of a validated map are used in the running model, as sentences."""
    called = table[table["implemented"] | table["suppressed"]]
    if called.empty:
        return ["No head implements or suppresses a relation: there was no head to ablate."]
    measured, sentences = called[called["used"].notna()], []
    if len(measured):
        sentences.append(
            f"Of {len(measured)} head-relation pairs ablated in the running model, {measured['used'].sum()} are used: "
            "the answers change in the expected direction, and more than when another head of the layer is ablated "
            f"(false-discovery rate {FALSE_DISCOVERY_RATE:.0%}). For the others, use is not shown; the loss may be as "
            "large as `loss_high`."
        )
    is_clear = measured["loss_q_value"] <= FALSE_DISCOVERY_RATE
    opposed = measured[is_clear & ~measured["used"].astype(bool)]
    if len(opposed):
        named = [f"{row['layer']}.{row['head']} on {row['relation']}" for row in opposed.to_dict("records")]
        sentences.append(f"Ablation has the opposite effect for {', '.join(named)}.")
    unanswered = set(called.loc[called["used"].isna() & (called["accuracy"] == 0), "relation"])
    if unanswered:
        sentences.append(
            "Whether heads are used is unknown where the whole model answers no item: "
            f"{', '.join(sorted(unanswered))}. Give a template= that it understands."
        )
    if not_tested := called.loc[called["accuracy"].isna(), "relation"].nunique():
        sentences.append(f"Relations with heads that were not tested: {not_tested}.")
    return sentences


def whole(model: HookedModel, task: TaskPrompts, batch_size: int = 64) -> Float[ndarray, "metric item"]:
    """Return, for each item, whether the model answers it (1 or 0), and the logit difference."""
    by_batch: list[list[Tensor]] = []
    for rows, batch in task.batch.split(batch_size):
        logits = model.run(batch, keep="last").cpu()
        measured = [(metric, [torch.tensor(ids)[rows] for ids in metric.answers]) for metric in _metrics(task)]
        by_batch.append([metric.measure(logits, ids) for metric, ids in measured])
    return np.stack([torch.cat(parts).double().numpy() for parts in zip(*by_batch, strict=True)])


def without(
    model: HookedModel,
    task: TaskPrompts,
    sets: Mapping[str, Heads],
    values: str = "zero",
    batch_size: int | None = None,
) -> dict[str, Float[ndarray, "metric item"]]:
    """Return the result of `whole` with each set's heads replaced by zero, or their mean, at the last position.

    "none" holds the same runs without ablation, so that differences do not come from rounding.
    """
    given: dict[str, Any] = {"metric": _metrics(task), "positions": "last", "values": values, "batch_size": batch_size}
    table = ablate(model, task.batch, sets=sets, progress=False, **given).table
    names = [metric.name for metric in given["metric"]]
    none = table[table["set"] == next(iter(sets))].assign(set="none", effect=0.0)
    table = pd.concat([none, table]).assign(value=lambda rows: rows["clean"] + rows["effect"])
    by_item = table.pivot(index=["set", "metric"], columns="example", values="value")
    return {name: by_item.loc[[(name, metric) for metric in names]].to_numpy() for name in ("none", *sets)}


def _metrics(task: TaskPrompts) -> list[Metric]:
    """Return a task's metrics: accuracy, 1 where the most likely next token is accepted, and logit difference."""
    most = max(map(len, task.accepted))
    padded = [(*targets, *targets[:1] * (most - len(targets))) for targets in task.accepted]

    def is_accepted(logits: Float[Tensor, "row kept d_vocab"], *targets: Tensor) -> Tensor:
        best = logits[:, -1].argmax(-1)
        return torch.stack([best == target for target in targets]).any(0).float()

    answers = tuple([targets[place] for targets in padded] for place in range(most))
    return [Metric("accuracy", is_accepted, answers=answers), logit_difference(list(answers[0]), task.foil.tolist())]


def other_heads(
    head: Head, excluded: Heads, n_layers: int, n_heads: int, draws: int, rng: np.random.Generator
) -> list[Head]:
    """Draw up to `draws` non-excluded heads, from the head's layer or the nearest layer that has any."""
    for layer in sorted(range(n_layers), key=lambda one: (abs(one - head[0]), one)):
        free = [(layer, other) for other in range(n_heads) if (layer, other) not in excluded]
        if free:
            return [free[place] for place in rng.permutation(len(free))[:draws]]
    return []


def _of_relation(
    model: HookedModel, task: TaskPrompts, called: pd.DataFrame, tokens: TokenRelation, n_others: int, seed: int
) -> Float[ndarray, "head column"]:
    """Return a row of `MEASURED` for each called head of one relation."""
    heads = list(zip(called["layer"].astype(int), called["head"].astype(int), strict=True))
    rng, shape = np.random.default_rng(seed), model.shape
    others = [other_heads(head, heads, shape.n_layers, shape.n_heads, n_others, rng) for head in heads]
    if not whole(model, task)[0].any():
        return np.array([[0.0, *[np.nan] * (len(MEASURED) - 1)]] * len(heads))
    ablated = dict.fromkeys([*heads, *(other for drawn in others for other in drawn)])
    swept = without(model, task, {f"{layer}.{head}": [(layer, head)] for layer, head in ablated})
    accuracy, *answered = (values[0] > 0.5 for values in swept.values())
    right = dict(zip(ablated, answered, strict=True))
    draws = Bootstrap.of(tokens.source.tolist(), seed=seed)
    return np.array(
        [
            _measured(accuracy, right[head], np.array([right[other] for other in drawn]), draws)
            for head, drawn in zip(heads, others, strict=True)
        ]
    )


def _measured(
    whole: Bool[ndarray, " item"], without: Bool[ndarray, " item"], others: Bool[ndarray, "draw item"], draws: Bootstrap
) -> list[float]:
    """Return the values of `MEASURED` for one head of one relation."""
    mean = others.mean(0) if len(others) else np.full(len(whole), np.nan)
    columns = np.stack([whole, without, mean, mean - without], axis=1).astype(float)
    estimates = draws.mean(columns)
    low, high = percentile_interval(estimates)
    (accuracy, accuracy_without, accuracy_others, loss), net = estimates[0], draws.sums(columns[:, 0] - columns[:, 1])
    p = np.nan
    if len(others):
        changed = [np.array([side.sum()], dtype=np.float64) for side in (net > 0, net < 0)]
        against_whole = float(mcnemar_p(*changed)[0])
        against_others = sign_flip_p(draws.sums(columns[:, 3]), draws.seed)
        agree = np.sign(net.sum()) == np.sign(loss)
        p = float(np.maximum(against_whole, against_others)) if agree else 1.0
    return [accuracy, accuracy_without, low[1], high[1], accuracy_others, low[2], high[2], loss, low[3], high[3], p]


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
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
) -> Claim:
    """Test whether some heads matter together, on prompts that did not choose them.

    Args:
        model: the model; it is not changed.
        prompts: one prompt, several, or token ids.
        heads: pairs (layer, head), names such as "9.2", or rows with the columns `layer` and `head`, such as those of a
            head map's table.
        corrupted: the counterpart of each prompt, for values from the other run.
        metric: one metric; see `hw.patch`.
        values: what replaces the heads' outputs; see `hw.ablate`.
        other: the values of a second ablation, as a check of the first; None for no second ablation.
        chosen_on: the prompts that chose the heads. If they occur in `prompts` they do not count as held out, and the
            claim says so. Pass an empty list if no prompt did, as for heads that were classified from parameters.
        placebos: number of random sets of other heads from the same layers (all such sets if there are fewer), or also
            from the nearest layers if there are fewer than 19.
        margin: the smallest effect that matters, in units of the metric; default: the 95 % quantile of the sizes of
            the random sets' effects.
        seed: seed of the random sets, the bootstrap, the halves, and of `resample`.
        batch_size: see `hw.patch`.

    Returns:
        A `Claim`, as returned by `Sweep.claim`.
    """
    pairs = parts_of_kind("heads", heads, model.shape)
    # Called only for its checks: a head named twice, or in a layer without heads.
    read_sets(model, {"heads": pairs})
    chosen = [(layer, head) for layer, head in pairs]
    placebos = checked_count("placebos", placebos, least=0, most=MOST_PLACEBOS)
    name = metric_of_a_claim(metric).name
    drawn = matched_sets(model, chosen, placebos, seed)
    run: dict[str, Any] = {"metric": metric, "seed": seed, "batch_size": batch_size, "progress": progress}
    sets = {CLAIMED: chosen} | {f"random {number}": placebo for number, placebo in enumerate(drawn)}
    swept = ablate(model, prompts, corrupted, sets=sets, values=values, **run)
    effects, other_effects = _effects(swept), None
    if other is not None:
        other_effects = _effects(ablate(model, prompts, corrupted, sets={CLAIMED: chosen}, values=other, **run))[0]
    overlap: list[int] = []
    if chosen_on is not None and not (isinstance(chosen_on, list | tuple) and not len(chosen_on)):
        others = (pair.ids for pair in read_pairs(model, chosen_on, None)[0])
        overlap = places_among(swept.run.options["prompts"][0], others)
    held_out = None if chosen_on is None else np.delete(effects[0], overlap)
    notes = notes_of_few(len(drawn), placebos, advice="; there are no others") + notes_of_seen(overlap, "heads")
    if not {layer for placebo in drawn for layer, _ in placebo} <= {layer for layer, _ in chosen}:
        notes.append("random sets are also from the nearest layers, because the heads' own layers have too few")
    evidence = ClaimEffects(effects[0], effects[1:], other_effects, effects.T, held_out)
    named = ", ".join(f"{layer}.{head}" for layer, head in chosen[:8]) + " ..." * (len(chosen) > 8)
    what = f"Head{'s' * (len(chosen) > 1)} {named} on {name.replace('_', ' ')}"
    options = {"heads": chosen, "margin": margin, "other": other, "seen": overlap if chosen_on is not None else None}
    return Claim.of(evidence, swept.run, options, what=what, margin=margin, seed=seed, notes=notes)


def layer_matched(
    heads: Heads, layers: Sequence[int], n_layers: int, n_heads: int, rng: np.random.Generator
) -> list[Head]:
    """Draw another head from each of these layers, one per head, or from the nearest layer if one has too few."""
    taken = set(heads)
    free = {layer: [h for h in range(n_heads) if (layer, h) not in taken] for layer in range(n_layers)}
    if sum(map(len, free.values())) < len(heads):
        n = len(heads)
        raise InputError(f"{n} heads need {n} others as controls; the model has fewer: choose fewer heads.")
    drawn_by_layer = {}
    for layer, count in Counter(layers).items():
        drawn_by_layer[layer] = list(rng.permutation(free[layer])[:count])
        free[layer] = [head for head in free[layer] if head not in drawn_by_layer[layer]]
    matched = []
    for layer in layers:
        source = layer
        if drawn_by_layer[layer]:
            head = drawn_by_layer[layer].pop()
        else:
            source = min((other for other in free if free[other]), key=lambda other: (abs(other - layer), other))
            head = free[source].pop(int(rng.integers(len(free[source]))))
        matched.append((source, int(head)))
    return matched


def matched_sets(model: HookedModel, chosen: Heads, n: int, seed: int) -> list[Heads]:
    """Draw up to `n` distinct sets of other heads, matched to the chosen heads' layers by `layer_matched`.

    If these layers have too few sets for a p of 5 %, also from layers next to them, then from layers two away, ...
    """
    generator, sets, n_layers = np.random.default_rng(seed), dict[Heads, Heads](), model.shape.n_layers
    layers = np.array([layer for layer, _ in chosen])
    for reach in range(n_layers):
        # Layers with few heads have few distinct sets, so the number of draws is limited.
        for _ in range(REDRAWS * n):
            shift = generator.integers(-reach, reach, len(layers), endpoint=True) if reach else 0
            near = (layers + shift).clip(0, n_layers - 1).tolist()
            drawn = layer_matched(chosen, near, n_layers, model.shape.n_heads, generator)
            sets.setdefault(tuple(sorted(drawn)), drawn)
            if len(sets) == n:
                break
        if len(sets) >= min(n, TOO_FEW):
            break
    return list(sets.values())


def _effects(swept: Sweep) -> Float[ndarray, "draw example"]:
    """Return the effect of each set on each prompt, the claimed set first."""
    effects = swept.table.groupby(["set", "example"], sort=False)["effect"].mean().unstack("example")
    return np.asarray(effects.to_numpy(), dtype=np.float64)
