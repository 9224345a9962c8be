"""What one trained world measures, and which of the targets that were set before its training it misses.

`measure_world` gives the values of `card.json`; `card_page` makes the page of one or more runs of them. Every number is
measured on the float16 weights as they are saved.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tools.world.abilities import measure_conversations, measure_forms, measure_notes, measure_tasks
from tools.world.documents import Corpus
from tools.world.measure import ablation, answered, probe_aucs
from tools.world.model_folder import opened
from tools.world.written import Written
from transformers import PreTrainedTokenizerBase

from headwater.heads.categories import CATEGORIES
from headwater.heads.classify import classify_heads
from headwater.heads.head_map import HeadMap
from headwater.models.packaged import FOLDERS
from headwater.world.wording import fill, wording_of

ABLATION_FACTS = 150
MIN_ABLATION_FACTS = 20
WANTED_HEADS = 12
"""Heads over which the best ones of the relations are to be spread."""
WANTED_RIGHT = 0.95
"""Share of each task's prompts that are to go on rightly."""


def measure_world(folder: Path, written: Written, questions: pd.DataFrame) -> dict[str, Any]:
    """Measure the two models of a world's folder on its questions, its tasks and the suite; JSON values only."""
    base, chat = (folder / name for name in FOLDERS.values())
    model, tokenizer = opened(base)
    tasks = measure_tasks(model, tokenizer, written.words)
    heads = classify_heads(base, progress=False)
    relations = strongest(heads)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": {name: (folder / path / "model.safetensors").stat().st_size for name, path in FOLDERS.items()},
        "facts": _fact_counts(written.corpus),
        "documents": len(written.corpus.order),
        **_knowledge(model, tokenizer, questions),
        "tasks": {name: {kind: vars(score) for kind, score in both.items()} for name, both in tasks.items()},
        "forms": {name: list(share) for name, share in measure_forms(model, tokenizer, written).items()},
        "notes": {str(times): list(row) for times, row in measure_notes(model, tokenizer, written).items()},
        "conversations": {name: list(share) for name, share in measure_conversations(*opened(chat), written).items()},
        "heads": _head_counts(heads),
        "relations": relations,
        "best_heads": best_heads(relations),
        "ablation": list(_ablations(model, tokenizer, written.corpus, heads)),
    }


def missed_targets(card: Mapping[str, Any]) -> list[str]:
    """Say which of the targets that were set before the training a run misses.

    They are about what the model knows and how its relations are spread, never about what an analysis finds in it.
    """
    quarters, spread = card["by_quarter_one_fact"], card["best_heads"]
    rarest, most_frequent = (quarters[end(quarters)][0] for end in (min, max))
    targets = {
        "weights of at most 10 MB": max(card["bytes"].values()) <= 10e6,
        "at least 95 % right on the most frequent quarter of the one-fact questions": most_frequent >= 0.95,
        "the rarest quarter clearly worse (by 20 points or more)": rarest <= most_frequent - 0.2,
        "between 25 and 75 % of the answers wrong": 0.25 <= card["wrong"] <= 0.75,
        "heads of all four categories": all(sum(counts) > 0 for counts in card["heads"]["by_layer"].values()),
        f"best heads of the relations in {WANTED_HEADS} heads (found in {spread})": spread >= WANTED_HEADS,
    }
    for name, both in card["tasks"].items():
        for kind, score in both.items():
            found = f"found in {100 * score['right']:.1f} %"
            targets[f"{name} on {kind} words right in {100 * WANTED_RIGHT:.0f} % ({found})"] = (
                score["right"] >= WANTED_RIGHT
            )
    return [name for name, reached in targets.items() if not reached]


def _knowledge(model: Any, tokenizer: PreTrainedTokenizerBase, questions: pd.DataFrame) -> dict[str, Any]:
    """Answer the questions of the world, and probe for right and wrong."""
    table = answered(model, tokenizer, questions)
    single = answered(model, tokenizer, questions[questions["depth"] == 1])
    return {
        "questions": len(table),
        "wrong": 1 - float(table["right"].mean()),
        "by_dataset": _shares(table, "dataset"),
        "by_depth": _shares(table, "depth"),
        "by_quarter": _shares(table, "quarter"),
        "by_quarter_one_fact": _shares(single, "quarter"),
        "quarter_starts": [int(start) for start in single.groupby("quarter")["popularity"].min()],
        "held_out": _right(table[table["held_out"]]),
        "chain_never_told": _right(table[(table["depth"] > 1) & (table["popularity"] == 0) & ~table["held_out"]]),
        "told_and_asked": _right(single[(single["popularity"] > 0) & (single["asked"] > 0)]),
        "told_not_asked": _right(single[(single["popularity"] > 0) & (single["asked"] == 0)]),
        "by_relation": _shares(table, "relation"),
        "probe": {name: [round(auc, 4) for auc in aucs] for name, aucs in probe_aucs(model, tokenizer, table).items()},
    }


def _right(table: pd.DataFrame) -> list[float]:
    """Return [share right, number of questions]."""
    return [round(float(table["right"].mean()), 4) if len(table) else float("nan"), len(table)]


def _shares(table: pd.DataFrame, column: str) -> dict[str, list[float]]:
    return {str(name): _right(group) for name, group in table.groupby(column)}


def _fact_counts(corpus: Corpus) -> dict[str, int]:
    kinds = pd.Series([fact.kind for fact in corpus.world.facts])
    held_out = pd.Series([fact.held_out for fact in corpus.world.facts])
    counts = {str(kind): int(count) for kind, count in kinds.value_counts().items()}
    return {**counts, "held out": int(held_out.sum())}


def _head_counts(heads: HeadMap) -> dict[str, object]:
    """Count, under the controlled rule, the heads of each category by layer and the heads of several categories."""
    categories = heads.categories["categories"]
    layers = sorted(heads.categories["layer"].unique().tolist())
    by_layer = {
        name: [int(sum(name in names for names in categories[heads.categories["layer"] == layer])) for layer in layers]
        for name in CATEGORIES
    }
    return {"by_layer": by_layer, "labels": heads.categories["label"].value_counts().to_dict()}


def strongest(heads: HeadMap) -> list[dict[str, Any]]:
    """Return the strongest head of each relation that some head implements."""
    table = heads.table[heads.table["implemented"]].sort_values("excess", ascending=False)
    columns = ["relation", "category", "layer", "head", "score", "expected", "excess", "beyond_copying"]
    best = table.drop_duplicates("relation")[columns].round(3).sort_values(["category", "relation"])
    counts = table["relation"].value_counts()
    return [row | {"heads": int(counts[row["relation"]])} for row in map(_named, best.to_dict("records"))]


def best_heads(relations: Sequence[Mapping[str, Any]]) -> int:
    """Count the heads that are the `strongest` of some relation."""
    return len({(row["layer"], row["head"]) for row in relations})


def _named(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in row.items()}


def _ablations(
    model: object, tokenizer: PreTrainedTokenizerBase, corpus: Corpus, heads: HeadMap
) -> Iterator[dict[str, Any]]:
    """Ablate the heads of each relation that the model answers questions about."""
    implemented = heads.table[heads.table["implemented"]]
    for relation, rows in implemented.groupby("relation"):
        facts = [fact for fact in corpus.world.facts if fact.relation == relation and not fact.held_out]
        sentence = wording_of(str(relation)).questions["properties"][0]
        order = np.random.default_rng(0).permutation(len(facts))[: 2 * ABLATION_FACTS].tolist()
        asked = pd.DataFrame(
            [{"question": fill(sentence, facts[i].subject).text, "answers": facts[i].answers} for i in order]
        ).assign(popularity=0)
        known = answered(model, tokenizer, asked) if len(asked) else asked.assign(right=[])
        known = known[known["right"].astype(bool)].head(ABLATION_FACTS)
        if len(known) >= MIN_ABLATION_FACTS:
            chosen = list(zip(rows["layer"].tolist(), rows["head"].tolist(), strict=True))
            shares = ablation(model, tokenizer, known, chosen)
            yield {"relation": relation, "heads": len(chosen), "facts": len(known)} | {
                name: round(share, 4) for name, share in shares.items()
            }
