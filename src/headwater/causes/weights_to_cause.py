"""From weights to a cause: do a head's parameters predict which head carries a relation in the running model?

For each relation, on items split once by source (`prompts`):

1. weights     the margin of every head, on the first half: how far its OV map puts a source's target above the other
               targets (`heads.classify`); and the same with shuffled targets.
2. ability     the gap of the logit difference on the second half. If its interval is not above 0, the model does not
               tell the targets apart, and nothing more is measured.
3. attention   each head's attention from the last position to the source, on the first half.
4. effect      the exact effect of each head's z at the last position, on both halves; for a suite, on the second half
               only for the strongest heads of the first half and all heads that step 5 names.
5. test        margin × attention names one head. Is it the head with the largest effect, and what share of the largest
               effect does it have, compared with three baselines, shuffled targets and a ceiling (`naming`)?

For a single relation also: when the answer passes to the last position, who writes it, what ablation costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from headwater.calls import checked_call
from headwater.causes.naming import (
    Choice,
    ablated,
    attention_to_source,
    head_effects,
    judged,
    names_of,
    strongest,
)
from headwater.causes.prompts import (
    FEWEST_PAIRS,
    PairedPrompts,
    RelationPrompts,
    candidates,
    chosen_prompts,
    differences,
    halves_of,
    measured_candidates,
)
from headwater.causes.results import FEW, Evidence, EvidenceSuite
from headwater.errors import InputError, ModelError
from headwater.heads.causal import Head, matched_sets
from headwater.heads.classify import classify_heads, layer_margins
from headwater.heads.relations import Relations, TokenRelation, checked_templates, load_relations, tokenize_relations
from headwater.heads.scoring import chosen_embedding, relations_digest
from headwater.lenses.direct_attribution import direct_logit_attribution
from headwater.models.effective_embedding import EmbeddingName
from headwater.models.hooked import HookedModel
from headwater.models.loading import weights_of
from headwater.models.positions import Place
from headwater.options import checked_count
from headwater.patching.activation_patching import patch
from headwater.patching.sweep import say_how_long
from headwater.runs.analysis import Run, run_or_resume
from headwater.stats.resample import Bootstrap, interval, mean_interval

LEADERS = 30
"""In a suite, number of strongest heads of the first half that are measured on the second, besides all named heads."""
OTHERS = 8
"""If one relation is requested: number of further relations, for the baselines."""
MOST_DRAWS = 10_000


@checked_call
def evidence(
    model: HookedModel,
    relations: Relations = None,
    *,
    template: str = "auto",
    embedding: EmbeddingName | Literal["auto"] = "auto",
    pairs: int = 12,
    draws: int = 200,
    seed: int = 0,
    progress: bool = True,
    out: str | Path | None = None,
) -> Evidence | EvidenceSuite:
    """Test whether the head that a relation's weights name carries the answer in the running model.

    Args:
        model: the model.
        relations: the name of one relation, or a relation: all details about it (`Evidence`). Several, or by default
            the whole suite: a row for each (`EvidenceSuite`).
        template: the prompt that asks for a target; see `relation_prompts`.
        embedding: the embedding that heads from layer 1 on read; see `classify_heads`.
        pairs: largest number of prompt pairs in the second half of a relation; the first half has at most eight.
        draws: number of times targets are shuffled, and number of random sets of heads that are ablated.
        seed: seed of the halves, pairs, examples, draws and intervals.
    """
    if template != "auto":
        checked_templates(template)
    pairs = checked_count("pairs", pairs, least=FEWEST_PAIRS)
    draws = checked_count("draws", draws, most=MOST_DRAWS)
    loaded = load_relations(relations)
    # A list of one relation is a suite, so that the result's type depends on the argument's type, not on its length.
    single = len(loaded) == 1 and not isinstance(relations, list | tuple)
    tokenized = list(tokenize_relations(loaded, model.tokenizer))
    if single:
        tokenized += unrelated(tokenized[0], tokenize_relations(load_relations(None), model.tokenizer), seed)
    weights = weights_of(model)
    usable = [(tokens, 1) for tokens in tokenized if tokens.targets]
    chosen, _ = chosen_embedding(weights, usable, embedding) if usable else (str(embedding), None)
    options: dict[str, Any] = {
        "relations": relations_digest([tokens.relation for tokens in tokenized]),
        "one": loaded[0].name if single else None,
        "template": template,
        "embedding": chosen,
        "pairs": pairs,
        "draws": draws,
    }
    work: Any = partial(_measure, model, tokenized, len(loaded))
    result_class: type[Evidence | EvidenceSuite] = Evidence if single else EvidenceSuite
    with model.hashed_once():
        return run_or_resume(result_class, "evidence", model, options, work, out=out, seed=seed, progress=progress)


def _ids(tokens: TokenRelation) -> set[int]:
    return {*tokens.source.tolist(), *(target for accepted in tokens.targets for target in accepted)}


def unrelated(tokens: TokenRelation, suite: Sequence[TokenRelation], seed: int) -> list[TokenRelation]:
    """Return random relations that share at most a tenth of this relation's tokens."""
    ids = _ids(tokens)
    others = [other for other in suite if other.usable and other.relation.name != tokens.relation.name]
    far = [other for other in others if len(ids & _ids(other)) <= len(ids) / 10]
    order = np.random.default_rng(seed).permutation(len(far))
    return [far[place] for place in order[:OTHERS]]


def _measure(model: HookedModel, tokenized: Sequence[TokenRelation], n: int, run: Run) -> Evidence | EvidenceSuite:
    """Run the steps in the docstring of this file; the first `n` relations are the requested ones."""
    options, seed = run.record.options, run.record.seed or 0
    tried, reasons = {}, dict[int, str]()
    for number, tokens in enumerate(tokenized):
        template = options["template"] if number < n else "auto"
        try:
            tried[number] = candidates(model, tokens, template, options["pairs"], seed)
        except InputError as error:
            reasons[number] = str(error)
    _say_how_long(model, tokenized[:n], tried, options["pairs"], run.progress)
    results = dict[int, dict[str, Tensor]]()
    for stage, some in (("choose", [i for i in tried if i < n]), ("others", [i for i in tried if i >= n])):
        # The other relations serve only as comparison, so they are skipped unless the model can do a requested one.
        if not some or (stage == "others" and not any("share" in piece for piece in results.values())):
            continue
        with run.bar("Gaps, attention, effects", "relation", len(some)) as bar:
            pieces = run.pieces(stage, some, lambda i: _of_relation(model, tried[i]), bar)
            results |= dict(zip(some, pieces, strict=True))
    prompts = {i: chosen_prompts(tried[i], results[i]["candidates"]) for i in results}
    choices = _choices(model, tokenized, results, run)
    named = {i: names_of(choice, [choices[j] for j in choices if j != i]) for i, choice in choices.items() if i < n}
    single = options["one"] is not None
    with run.bar("Effect of patching, second half", "relation", len(named)) as bar:

        def second(i: int) -> dict[str, Tensor]:
            leaders = strongest(choices[i].share, LEADERS)
            heads = None if single else {*leaders, *(head for some in named[i].values() for head in some)}
            return {"effects": torch.from_numpy(head_effects(model, prompts[i].second, heads)[0])}

        for i, piece in zip(named, run.pieces("second", list(named), second, bar), strict=True):
            results[i] = {**results[i], **piece}
    ways, rows, strength = [], [], {}
    for i in range(n):
        if i in named:
            effects, sources = results[i]["effects"].numpy(), prompts[i].second.item.numpy()
            frame, drawn = judged(choices[i], named[i], effects, sources, seed)
            ways.append(frame.assign(relation=tokenized[i].relation.name))
            strength[tokenized[i].relation.name] = drawn
        family = choices[i].family if i in choices else None
        rows.append(_row(tokenized[i], prompts.get(i), results.get(i), family, reasons.get(i, "")))
    suite = EvidenceSuite.of(rows, ways, pd.DataFrame(strength), run.record)
    if not single:
        return suite
    if 0 not in choices:  # no prompts can be built, or the model cannot do the relation
        templates = prompts[0].templates if 0 in prompts else pd.DataFrame()
        empty = {"when": pd.DataFrame(columns=WHEN), "cost": pd.DataFrame(columns=COST)}
        return Evidence(pd.DataFrame(columns=BY_HEAD), suite.table, templates, ways=suite.ways, run=suite.run, **empty)
    others = [prompts[i] for i in choices if i >= n]
    return _one_relation(model, suite, prompts[0], choices[0], results[0], others, run)


def _say_how_long(
    model: HookedModel,
    requested: Sequence[TokenRelation],
    tried: Mapping[int, Sequence[RelationPrompts]],
    pairs: int,
    progress: bool,
) -> None:
    """Report how long it takes if it is over a minute, from the number of tokens that are run."""
    heads, tokens, n = model.shape.n_layers * model.shape.n_heads, 0, len(requested)
    for i, some in tried.items():
        longest = max(some, key=lambda candidate: candidate.second.clean.numel())
        first, second = longest.first.clean.numel(), longest.second.clean.numel()
        # Every candidate; attention; the gap, both sides; and for the effects of heads both sides.
        tokens += sum(candidate.first.clean.numel() for candidate in some) + 3 * first + 2 * second
        # For each head one token through half of the layers.
        tokens += len(longest.first) * heads // 2
        if i < n:  # comparison relations are not measured on the second half
            tokens += 2 * second + len(longest.second) * (heads if n == 1 else min(heads, 2 * LEADERS)) // 2
    what = (
        f"{len(tried):,} relations" if n > 1 else f"{requested[0].relation.name} and the relations it is compared with"
    )
    advice = f"Fewer relations, or fewer pairs than {pairs}, take less time."
    say_how_long(model, what, tokens, advice, progress=progress)


def _of_relation(model: HookedModel, tried: Sequence[RelationPrompts]) -> dict[str, Tensor]:
    """Choose the prompt; if the model can do the relation, measure attention and effects on the first half."""
    measured = measured_candidates(model, tried)
    prompts = chosen_prompts(tried, measured)
    second = prompts.second
    clean, correct = differences(model, second)
    gap = clean - differences(model, second, corrupted=True)[0]
    result = {"candidates": measured, "correct": torch.from_numpy(correct), "gap": torch.from_numpy(gap)}
    # `not ... > 0`, so that an interval of NaN does not count as an effect.
    if not mean_interval(gap, second.item.tolist()).low > 0:
        return result
    effect, first_gap = head_effects(model, prompts.first)
    result["share"] = torch.from_numpy(effect.mean(0) / first_gap.mean())
    result["attention"] = torch.from_numpy(attention_to_source(model, prompts.first))
    return result


def _choices(
    model: HookedModel,
    tokenized: Sequence[TokenRelation],
    results: Mapping[int, Mapping[str, Tensor]],
    run: Run,
) -> dict[int, Choice]:
    """Return the first-half values of each relation that the model can do; margins are over its first half's items."""
    options, seed = run.record.options, run.record.seed or 0
    can = [i for i, piece in results.items() if "share" in piece]
    if not can:
        return {}
    generator, halves, orders = np.random.default_rng(seed), [], []
    for tokens in (tokenized[i] for i in can):
        items = halves_of(tokens, seed)[0]
        targets = tuple(tokens.targets[item] for item in items)
        halves.append(replace(tokens, source=tokens.source[items], targets=targets, words=()))
        drawn = [generator.permutation(len(items)) for _ in range(options["draws"])]
        # The same permutations at every layer, so that a draw is one shuffled relation and names one head.
        orders.append(torch.from_numpy(np.stack(drawn)))
    weights, scoring = weights_of(model), {"embedding": options["embedding"], "norm_gain": False}
    with run.bar("Margins of the weights", "layer", weights.shape.n_layers) as bar:

        def margins(_: object) -> dict[str, Tensor]:
            layers = []
            for layer in layer_margins(weights, halves, scoring, orders):
                layers.append(layer)
                bar.update(1)
            return {"margins": torch.stack(layers, 1)}  # draw × layer × head × relation

        (piece,) = run.pieces("weights", [None], margins)
    choices = {}
    for i, scores in zip(can, piece["margins"].double().unbind(-1), strict=True):
        known = (tensor.numpy() for tensor in (scores, results[i]["attention"], results[i]["share"]))
        choices[i] = Choice(tokenized[i].relation.name, *known)
    return choices


def _row(
    tokens: TokenRelation,
    prompts: RelationPrompts | None,
    result: Mapping[str, Tensor] | None,
    family: Head | None,
    reason: str,
) -> dict[str, Any]:
    """Return the part of a relation's row that reports whether the model can do it."""
    relation = tokens.relation
    row: dict[str, Any] = {"relation": relation.name, "category": relation.category, "items": len(tokens.targets)}
    if prompts is None or result is None:
        return row | {"can": False, "reason": reason}
    gap = mean_interval(result["gap"].numpy(), prompts.second.item.tolist())
    row |= {"prompt": prompts.kind, "pairs": len(prompts.second)}
    row |= gap.named("gap")
    row |= {"accuracy": result["correct"].double().mean().item()}
    if family is None:
        why = f"the 95 % interval of its gap includes 0 ({gap.low:.2f} to {gap.high:.2f} logits)"
        return row | {"can": False, "reason": why}
    return row | {"can": True, "reason": "", "family": f"{family[0]}.{family[1]}"}


# All details about one relation: a row per head, when the answer passes to the end, what ablation costs.


TOGETHER = 3
"""Number of heads, the first by margin × attention, that are ablated together."""
CONTROLS = 2
"""Number of other relations on which the same heads are ablated."""
WHEN = ["role", "layer", "share", "low", "high"]
COST = ["what", "heads", "cost", "low", "high", "share"]
BY_HEAD = ["layer", "head", "score", "excess", "q_value", "margin", "attention", "product", "first_half", "effect"]
BY_HEAD += ["low", "high", "direct"]


def _one_relation(
    model: HookedModel,
    suite: EvidenceSuite,
    prompts: RelationPrompts,
    choice: Choice,
    result: Mapping[str, Tensor],
    others: Sequence[RelationPrompts],
    run: Run,
) -> Evidence:
    """Return all details about the first relation of a suite; `others` are the controls of ablation."""
    options, pairs, gap = run.record.options, prompts.second.few(FEW), result["gap"].numpy()
    heads = _by_head(model, prompts, choice, result["effects"].numpy(), gap, str(options["embedding"]))
    named: list[Head] = [(layer, head) for layer, head in heads[["layer", "head"]].head(TOGETHER).to_numpy().tolist()]
    with run.bar("Residual stream, cost of ablation", "part", 2 + len(others[:CONTROLS])) as bar:
        # The share of the gap that the residual stream carries at the source and the last position, by layer.
        roles: dict[str, Place] = {"source": pairs.source, "last": "last"}
        there: dict[str, Any] = {"sites": "resid_pre", "positions": roles, "direction": "noise", "progress": False}
        sweep, when = patch(model, *pairs.sides, metric=pairs.metric, **there), []
        for (role, layer), cell in sweep.table.groupby(["role", "layer"], sort=False):
            share = -cell["effect"].to_numpy(dtype=float) / gap[:FEW].mean()
            when.append((role, layer, *mean_interval(share, pairs.item.tolist())))
        bar.update(1)
        cost = _cost(model, pairs, named, choice.family, options["draws"], run.record.seed or 0)
        bar.update(1)
        for control in others[:CONTROLS]:
            sample = control.second.few(FEW)
            lost, difference = ablated(model, sample, [named])
            what = f"named together, on {control.relation.name}"
            cost.append(_ablation_row(what, named, lost[:, 0], sample, difference))
            bar.update(1)
    tables = pd.DataFrame(when, columns=WHEN), suite.ways, pd.DataFrame(cost, columns=COST)
    return Evidence(heads, suite.table, prompts.templates, *tables, suite.run)


def _by_head(
    model: HookedModel,
    prompts: RelationPrompts,
    choice: Choice,
    effects: Float[ndarray, "pair layer head"],
    gap: Float[ndarray, " pair"],
    embedding: str,
) -> pd.DataFrame:
    """Return a row per head, the largest product of margin and attention first."""
    layer, head = (index.ravel() for index in np.indices(choice.attention.shape))
    frame = pd.DataFrame({"layer": layer, "head": head, "margin": choice.margins[0].ravel()})
    frame["attention"] = choice.attention.ravel()
    frame["product"] = frame["margin"] * frame["attention"]
    frame["first_half"] = choice.share.ravel()
    means = Bootstrap.of(prompts.second.item.tolist()).mean(effects.reshape(len(effects), -1) / gap.mean())
    frame[["effect", "low", "high"]] = np.array([interval(of_head) for of_head in means.T])
    if prompts.tokens.usable:
        given: dict[str, Any] = {"relations": prompts.relation, "embedding": embedding, "every_excess": True}
        scores = classify_heads(model, **given, progress=False).table[["layer", "head", "score", "excess", "q_value"]]
        # Relations with too few single-token words have margins but no score.
        frame = frame.merge(scores, on=["layer", "head"])
    few, written = prompts.second.few(FEW), []
    tokens = few.answer.tolist(), few.foil.tolist()
    try:
        for side in few.sides:
            found = direct_logit_attribution(model, side, tokens=tokens, progress=False).table
            of_heads = found[found["component"] == "head"].groupby(["layer", "head"])["contribution"].sum()
            written.append(of_heads.to_numpy(dtype=float))
        # The difference of both sides cancels what a head writes for the answer whatever the source is.
        frame["direct"] = (written[0] - written[1]) / gap[:FEW].sum()
    except ModelError:  # the logits are not a sum of direct contributions
        frame["direct"] = np.nan
    return frame.reindex(columns=BY_HEAD).sort_values("product", ascending=False, ignore_index=True)


def _cost(
    model: HookedModel, pairs: PairedPrompts, named: list[Head], strongest_head: Head, draws: int, seed: int
) -> list[dict[str, Any]]:
    """Return the loss of the logit difference when heads are zeroed at the last position, beside random heads."""
    sets = [("named", [head]) for head in named]
    sets += [("named together", named), ("largest effect, first half", [strongest_head])]
    random = [list(heads) for heads in matched_sets(model, named, draws, seed)]
    # Named and random sets in one call, so that they share one recorded run.
    lost, difference = ablated(model, pairs, [*(heads for _, heads in sets), *random])
    each = zip(sets, lost.T, strict=False)
    rows = [_ablation_row(what, heads, loss, pairs, difference) for (what, heads), loss in each]
    if random:
        sizes = lost[:, len(sets) :].mean(0)
        value, (low, high) = sizes.mean(), np.quantile(sizes, [0.025, 0.975])
        is_same = {layer for heads in random for layer, _ in heads} <= {layer for layer, _ in named}
        where = "same layers" if is_same else "same and nearest layers"
        what = f"random heads ({len(sizes)} sets of {len(named)}, {where})"
        rows.append({"what": what, "heads": "", "cost": value, "low": low, "high": high, "share": value / difference})
    return rows


def _ablation_row(
    what: str, heads: list[Head], lost: Float[ndarray, " pair"], pairs: PairedPrompts, difference: float
) -> dict[str, Any]:
    cost = mean_interval(lost, pairs.item.tolist())
    names = ", ".join(f"{layer}.{head}" for layer, head in heads)
    row = {"what": what, "heads": names, "cost": cost.value, "low": cost.low, "high": cost.high}
    return row | {"share": cost.value / difference}
