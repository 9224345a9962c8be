"""The published head classification, measured again: best scores, ranked heads, correlations.

Elhelo & Geva, "Inferring Functionality of Attention Heads from their Parameters", ACL 2025.

1. Every head is scored on the published relations with the published choices (`rule="published"`).
2. Per relation: the pairs that survive the tokenizer, the best score over heads, and the best suppression.
3. Heads are ranked by score; among equal scores the later layer, then the later head, comes first, and heads that
   score zero are left out. Counted are the places at which this ranking and the published one name the same head.
4. The correlation of static and dynamic scores over heads and sentences, with and without context (`dynamic_scores`).
   Sentences begin as the tokenizer alone begins a text, as in the published code: GPT-2's without a
   beginning-of-sequence token, Llama's with one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from headwater.heads.classify import classify_heads
from headwater.heads.head_map import HeadMap
from headwater.heads.relations import load_relations
from headwater.heads.validation import TEMPLATES, dynamic_scores, published_bos
from headwater.models.hooked import HookedModel
from headwater.models.loading import load
from headwater.models.weights.opening import open_weights
from headwater.options import checked_path
from headwater.reference.published import Reproduction, compared, no_numbers, published_numbers
from headwater.runs.analysis import Run, carry_out

OWN_TEMPLATES = (
    "The correlations are measured with headwater's own sentences, not with those of the publication, which "
    "`templates` takes."
)


def reproduce_maps(
    model: HookedModel | str | Path,
    datasets: str | Path,
    *,
    published: str | None = None,
    correlations: bool = True,
    templates: Sequence[str] = TEMPLATES,
    progress: bool = True,
    out: str | Path | None = None,
) -> Reproduction:
    """Measure the published numbers of head classification on a model.

    Args:
        model: a loaded model, or a checkpoint folder or hub name.
        datasets: the published relations, a folder of `NAME/NAME.json`.
        published: the published model to compare with; by default the one of the model's name.
        correlations: measure the correlations too. That runs the model; the rest reads its parameters alone.
        templates: the sentences of the correlations, each with one `{source}`.
        progress: show progress bars.
        out: a folder for the result. An interrupted call, repeated, goes on from there.

    Raises:
        InputError: no such published model, or one of another shape; or the datasets cannot be read.
    """
    relations = load_relations(datasets)
    if correlations and not isinstance(model, HookedModel):
        model = load(model, dtype="float32")
    weights = open_weights(model)
    reference = published_numbers("maps")
    name = reference.name_of(weights.name, weights.shape, published)
    bos = published_bos(model) if correlations and isinstance(model, HookedModel) else None
    options: dict[str, Any] = {
        "published": name,
        "correlations": correlations,
        "templates": list(templates) if correlations else [],
        "bos": bos,
    }
    head_map = classify_heads(
        weights,
        relations=relations,
        rule="published",
        progress=progress,
        out=checked_path("out", out) / "heads" if out is not None else None,
    )
    options |= {"heads": head_map.run.options}

    def work(run: Run) -> Reproduction:
        numbers = reference.models[name]["relations"] if name else {}
        pieces = [compare_scores(head_map, numbers)]
        notes = [] if name else [no_numbers(weights.name, reference)]
        if correlations and isinstance(model, HookedModel):
            asked: dict[str, Any] = {"relations": relations, "templates": templates, "bos": bos, "progress": progress}
            measured = dynamic_scores(model, head_map, **asked)
            pieces.append(compare_correlations(measured.correlations, numbers))
            notes += [OWN_TEMPLATES] if tuple(templates) == TEMPLATES else []
        table = compared(pd.concat(pieces, ignore_index=True))
        return Reproduction(table, name, reference.source, notes, run.record)

    return carry_out(Reproduction, "reproduce_maps", weights, options, work, out=out, progress=progress)


def compare_scores(head_map: HeadMap, numbers: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows of pairs, best scores and ranked heads: `quantity, relation, published, measured`."""
    rows = []
    scored = dict(tuple(head_map.table.groupby("relation")))
    for relation, kept in zip(head_map.relations["relation"], head_map.relations["kept"], strict=True):
        published = numbers.get(relation, {})
        heads = scored.get(relation)
        rows.append(("surviving pairs", relation, published.get("pairs"), kept))
        for quantity in ("score", "suppression"):
            best = None if heads is None else heads[quantity].max()
            rows.append((f"best {quantity}", relation, published.get(quantity), best))
        ranking = published.get("ranked_heads", "").split()
        if ranking and heads is not None:
            measured = ranked_heads(heads)
            agree = sum(ours == theirs for ours, theirs in zip(measured, ranking, strict=False))
            rows.append(("heads in their published place", relation, len(ranking), agree))
    missing = [relation for relation in numbers if relation not in set(head_map.relations["relation"])]
    for relation in missing:
        rows += [
            (f"best {quantity}", relation, numbers[relation][quantity], None) for quantity in ("score", "suppression")
        ]
    table = pd.DataFrame(rows, columns=["quantity", "relation", "published", "measured"])
    return table.dropna(subset=["published", "measured"], how="all")


def ranked_heads(heads: pd.DataFrame) -> list[str]:
    """Return a relation's heads, as "layer.head", from the highest score down to the last above zero."""
    ordered = heads.sort_values(["layer", "head"])
    order = np.argsort(ordered["score"].to_numpy(), kind="stable")[::-1]
    ranked = ordered.iloc[order].query("score > 0")
    return [f"{layer}.{head}" for layer, head in zip(ranked["layer"], ranked["head"], strict=True)]


def compare_correlations(measured: pd.DataFrame, numbers: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows of the correlations: `quantity, relation, published, measured`."""
    rows = []
    for row in measured.to_dict("records"):
        name = f"{row['sign']} {row['context']} context"
        published = numbers.get(row["relation"], {}).get("correlations", {}).get(name)
        rows.append((f"correlation, {name}", row["relation"], published, row["pearson"]))
    return pd.DataFrame(rows, columns=["quantity", "relation", "published", "measured"])
