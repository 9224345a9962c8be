"""The published head classification, measured again: best scores, ranked heads, correlations.

Elhelo & Geva, "Inferring Functionality of Attention Heads from their Parameters", ACL 2025.

1. Every head is scored on the published relations with the published choices (`rule="published"`).
2. Per relation: the number of pairs that survive the tokenizer, the best score over heads, and the best suppression.
3. Heads are ranked by score; among equal scores the later layer, then the later head, comes first, and heads that
   score zero are left out. The count is of ranks at which this ranking and the published one have the same head.
4. The correlation of static and dynamic scores over heads and sentences, with and without context (`dynamic_scores`).
   Sentences begin as the tokenizer alone begins a text, as in the published code: for GPT-2 without a
   beginning-of-sequence token, for Llama with one.
5. On request: the same correlation after sources of several tokens (`multi_token`).
6. On request: the accuracy on a relation's items before and after the published number of its heads is removed (zeroed
   at the last position, strongest first), and after equally many random heads of the same layers (`ablate_heads`).

Intervals: Wilson's over the items of a relation. For the best score, the interval is of the head that reached it, which
was selected as the best on these same items. Fisher's for correlations.

After a source of several tokens, do static scores, which concern one token, predict the heads' output at the last one?

1. Items: a source of several tokens, without a leading space, and a target of one token, with a leading space.
2. Prompt: the opening, which ends in a space, then the source; tokenized separately, as in the published code.
3. Dynamic scores at the prompt's last token, which is the source's last, with context and without.

Eleven relations were published, for the models in which they have enough single-token items.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from headwater.calls import checked_call
from headwater.heads.ablation import HeadAblation, ablate_heads
from headwater.heads.classify import classify_heads
from headwater.heads.dynamic import TEMPLATES, DynamicScores, dynamic_scores, scored_prompts
from headwater.heads.head_map import HeadMap, relations_of
from headwater.heads.relations import Relation, Relations, SourcePrompts, TokenRelation, load_relations, word_tokens
from headwater.heads.scoring import relations_digest
from headwater.models.hooked import HookedModel
from headwater.models.loading import load
from headwater.models.tokens import Batch, pad_id
from headwater.models.weights import open_weights
from headwater.reference.published import Reproduction, announce_time, published_numbers, step
from headwater.runs.analysis import Run, run_or_resume
from headwater.stats.significance import wilson_interval

OPENING = "This is a document about "
RELATIONS = (
    "country_to_capital_wikidata", "country_to_official_language_wikidata", "entity_to_pronoun",
    "general_copying_english_500", "name_copying", "object_superclass", "word_first_letter", "word_last_letter",
    "word_to_synonym", "work_location", "year_to_following",
)  # fmt: skip


def multi_token_scores(
    model: HookedModel, head_map: HeadMap, relations: Relations, *, progress: bool = True, out: str | Path | None = None
) -> DynamicScores | None:
    """Score the heads of a map after sources of several tokens, of the published relations; None without such sources.

    `relations` are the relations passed to `classify_heads`; the relations used, and k, come from the map.
    """
    known = {name: one for name, one in relations_of(model, head_map, relations).items() if name in RELATIONS}
    prompted = [(*multi_token_prompts(model, tokens.relation), k) for tokens, k in known.values()]
    prompted = [one for one in prompted if one[1].targets]
    if not prompted:
        return None

    def work(run: Run) -> DynamicScores:
        return scored_prompts(run, model, head_map, prompted, [OPENING], 64)

    options = {"templates": [OPENING], "head_map": head_map}
    return run_or_resume(DynamicScores, "multi_token_scores", model, options, work, out=out, progress=progress)


def multi_token_prompts(model: HookedModel, relation: Relation) -> tuple[SourcePrompts, TokenRelation]:
    """Return the prompts of a relation's multi-token sources, and the items they belong to."""
    tokenizer: Any = model.tokenizer
    opening = tokenizer(OPENING)["input_ids"]
    rows, targets = [], []
    for source, accepted in relation.pairs:
        ids = tokenizer.encode(source, add_special_tokens=False)
        single = {tokens[0] for tokens in word_tokens(tokenizer, accepted) if len(tokens) == 1}
        if len(ids) > 1 and single:
            rows.append([*opening, *ids])
            targets.append(tuple(sorted(single)))
    batch = Batch.of(rows, pad_id(tokenizer)) if rows else Batch.of([opening], pad_id(tokenizer)).rows(0, 0)
    last = batch.lengths - 1
    prompts = SourcePrompts(batch, last, torch.arange(len(rows)), torch.zeros(len(rows), dtype=torch.long))
    last_tokens = torch.tensor([row[-1] for row in rows], dtype=torch.long)
    dropped = pd.DataFrame(columns=["source", "target", "reason"])
    return prompts, TokenRelation(relation, last_tokens, tuple(targets), dropped)


OWN_TEMPLATES = (
    "The correlations are measured with headwater's own sentences, not with the published ones, which can be passed as "
    "`templates`."
)
OWN_TASK = "The ablations ask for a relation's targets in headwater's own words, not in the published ones."
PRACTICE = 60
"""Number of pairs of a relation that are timed."""
IN_SENTENCES = ("correlations", "correlation")
LONGER = ("multi_token", "correlation after sources of several tokens")
"""Names of the correlations: in the published numbers, and in the table."""
REMOVALS = {
    "accuracy": ("none", "before"),
    "accuracy without the relation's heads": ("relation heads", "after"),
    "accuracy without random heads": ("random heads", "random"),
}
"""By quantity: the value of `removed` in our table, and the name of the published number."""


@checked_call
def reproduce_maps(
    model: HookedModel | str | Path,
    datasets: str | Path,
    *,
    published: str | None = None,
    correlations: bool = True,
    ablations: bool = False,
    multi_token: bool = False,
    templates: Sequence[str] = TEMPLATES,
    device: str | None = None,
    progress: bool = True,
    out: str | Path | None = None,
) -> Reproduction:
    """Measure the published numbers of head classification on a model.

    Args:
        model: a loaded model, or a checkpoint folder or hub name.
        datasets: the published relations, a folder of `NAME/NAME.json`.
        published: the published model to compare with, such as "gpt2-xl"; by default the one with the model's name.
        correlations: measure the correlations too. This runs the model; the rest needs its parameters alone.
        ablations: remove the heads of the relations whose ablation was published too, and random ones: 60 runs over a
            relation's items.
        multi_token: also measure the correlations after sources of several tokens, in the published sentence.
        templates: the sentences of the correlations, each with one `{source}`.
        device: device of a model that is loaded here; see `hw.load`.
    """
    relations = load_relations(datasets)
    runs = correlations or ablations or multi_token
    if runs and not isinstance(model, HookedModel):
        model = load(model, dtype="float32", device=device)
    weights = open_weights(model)
    reference = published_numbers("maps")
    name = reference.name_of(weights.name, weights.shape, published)
    options: dict[str, Any] = {
        "published": name,
        "correlations": correlations,
        "ablations": ablations,
        "multi_token": multi_token,
        "templates": list(templates) if correlations else [],
        "bos": "tokenizer" if correlations else None,
        "relations": relations_digest(relations),
    }

    def parts(run: Run, of: Sequence[Relation]) -> Iterator[pd.DataFrame]:
        numbers = reference.models[name]["relations"] if name else {}
        head_map = step(run, "heads", classify_heads, weights, relations=of, rule="published")
        yield compare_scores(head_map, numbers)
        if not isinstance(model, HookedModel):
            return
        if correlations:
            options: dict[str, Any] = {"relations": of, "templates": templates, "bos": "tokenizer"}
            measured = step(run, "correlations", dynamic_scores, model, head_map, **options)
            yield compare_correlations(measured.correlations, numbers)
        if multi_token and (longer := step(run, "longer_sources", multi_token_scores, model, head_map, of)) is not None:
            yield compare_correlations(longer.correlations, numbers, LONGER)
        with_ablation = [one for one in head_map.table["relation"].unique() if "ablation" in numbers.get(one, {})]
        for relation in with_ablation if ablations else ():
            heads = numbers[relation]["ablation"]["heads"]
            arguments: dict[str, Any] = {"relations": of, "top": heads, "controls": []}
            removed = step(run, f"ablation_{relation}", ablate_heads, model, head_map, relation, **arguments)
            yield compare_ablation(removed, numbers[relation]["ablation"])

    def work(run: Run) -> Reproduction:
        largest = sorted(relations, key=lambda relation: -len(relation.pairs))
        some = [replace(relation, pairs=relation.pairs[:PRACTICE]) for relation in largest]
        items = sum(len(relation.pairs) for relation in relations)
        sizes = PRACTICE, 2 * PRACTICE

        def practise(trial: Run, places: Sequence[int]) -> None:
            for _ in parts(trial, some[: len(places) // PRACTICE]):
                pass

        announce_time(run, practise, items, "pairs", sizes)
        rows = pd.concat(list(parts(run, relations)), ignore_index=True)
        notes = [OWN_TEMPLATES] if correlations and tuple(templates) == TEMPLATES else []
        notes += [OWN_TASK] if ablations else []
        return reference.reproduction(run, name, rows, notes)

    return run_or_resume(Reproduction, "reproduce_maps", weights, options, work, out=out, progress=progress)


def compare_scores(head_map: HeadMap, numbers: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows of pairs, best scores and ranked heads: `quantity, relation, published, measured`."""
    rows: list[tuple[object, ...]] = []
    scored = dict(tuple(head_map.table.groupby("relation")))
    for relation, kept in zip(head_map.relations["relation"], head_map.relations["kept"], strict=True):
        published = numbers.get(relation, {})
        heads = scored.get(relation)
        rows.append(("surviving pairs", relation, published.get("pairs"), kept, None, None))
        for quantity in ("score", "suppression"):
            rows.append((f"best {quantity}", relation, published.get(quantity), *_best(heads, quantity)))
        ranking = published.get("ranked_heads", "").split()
        if ranking and heads is not None:
            measured = ranked_heads(heads)
            agree = sum(ours == theirs for ours, theirs in zip(measured, ranking, strict=False))
            rows.append(("heads in their published place", relation, len(ranking), agree, None, None))
    for relation in [one for one in numbers if one not in set(head_map.relations["relation"])]:
        for quantity in ("score", "suppression"):
            rows.append((f"best {quantity}", relation, numbers[relation][quantity], None, None, None))
    table = pd.DataFrame(rows, columns=["quantity", "relation", "published", "measured", "low", "high"])
    return table.dropna(subset=["published", "measured"], how="all")


def _best(heads: pd.DataFrame | None, quantity: str) -> tuple[float, float, float]:
    """Return the best score of a relation's heads, and the interval of the head that reached it."""
    if heads is None:
        return math.nan, math.nan, math.nan
    best = heads.iloc[int(heads[quantity].to_numpy(dtype=float).argmax())]
    if quantity == "score":
        return float(best["score"]), float(best["low"]), float(best["high"])
    return float(best[quantity]), *_wilson(float(best[quantity]), float(best["pairs"]))


def _wilson(share: float, items: float) -> tuple[float, float]:
    low, high = wilson_interval(share * items, items)
    return float(low), float(high)


def ranked_heads(heads: pd.DataFrame) -> list[str]:
    """Return a relation's heads with scores above zero, as "layer.head", in descending order of score."""
    ranked = heads[heads["score"] > 0].sort_values(["score", "layer", "head"], ascending=False)
    return [f"{layer}.{head}" for layer, head in zip(ranked["layer"], ranked["head"], strict=True)]


def compare_correlations(
    measured: pd.DataFrame, numbers: Mapping[str, Any], kind: tuple[str, str] = IN_SENTENCES
) -> pd.DataFrame:
    """Return the rows of the correlations: `quantity, relation, published, measured`.

    `kind` is the name of the correlations in the published numbers, and in the table.
    """
    key, quantity = kind
    rows = []
    for row in measured.to_dict("records"):
        name = f"{row['sign']} {row['context']} context"
        published = numbers.get(row["relation"], {}).get(key, {}).get(name)
        rows.append((f"{quantity}, {name}", row["relation"], published, row["pearson"], row["low"], row["high"]))
    return pd.DataFrame(rows, columns=["quantity", "relation", "published", "measured", "low", "high"])


def compare_ablation(measured: HeadAblation, numbers: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows of an ablation with all of its heads: accuracy before, after, and without random heads."""
    table, rows = measured.table, []
    last = table[(table["removed"] == "none") | (table["n_heads"] == table["n_heads"].max())]
    for quantity, (removed, published) in REMOVALS.items():
        runs = last[last["removed"] == removed]
        right, items = runs["accuracy"].mean(), runs["items"].mean()
        rows.append((quantity, measured.relation, numbers.get(published), right, *_wilson(float(right), float(items))))
    return pd.DataFrame(rows, columns=["quantity", "relation", "published", "measured", "low", "high"])
