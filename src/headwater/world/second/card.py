"""What a trained world measures, and its page: the first edition's card with the tasks, forms, notes and spread beside.

`measure_world` fills `card.json`; `page_lines` are what the page of several runs has beside the first edition's tables.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headwater.world.card import measure_run
from headwater.world.second.abilities import measure_forms, measure_notes, measure_tasks
from headwater.world.second.corpus import Written
from headwater.world.second.recipe import Recipe

WANTED_HEADS = 12
WANTED_RIGHT = 0.95


def measure_world(folder: Path, written: Written, recipe: Recipe, questions: pd.DataFrame) -> dict[str, Any]:
    """Measure a trained world on its questions, the suite and its tasks; JSON values only."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    card: dict[str, Any] = dict(measure_run(folder / "model", written.corpus, questions))
    tasks = measure_tasks(model, tokenizer, written.words)
    card["tasks"] = {name: {kind: vars(score) for kind, score in both.items()} for name, both in tasks.items()}
    card["forms"] = {name: list(share) for name, share in measure_forms(model, tokenizer, written, recipe).items()}
    card["notes"] = {str(times): list(row) for times, row in measure_notes(model, tokenizer, written).items()}
    card["best_heads"] = len({(row["layer"], row["head"]) for row in card["relations"]})
    return card


def missed(card: Mapping[str, Any]) -> list[str]:
    """Say which of the targets that were set before the training a run misses."""
    tasks = [
        f"{name} on {kind} words right in {score['right']:.0%} ({WANTED_RIGHT:.0%} wanted)"
        for name, both in card["tasks"].items()
        for kind, score in both.items()
        if score["right"] < WANTED_RIGHT
    ]
    spread = card["best_heads"]
    few = [f"best heads of the relations in {spread} heads ({WANTED_HEADS} wanted)"] if spread < WANTED_HEADS else []
    return tasks + few


def page_lines(cards: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[str]:
    """Write the tables of tasks, forms of answering, notes and spread, a column for each run."""
    yield "## The classical tasks\n"
    yield "Share of prompts whose most likely next token, of the whole vocabulary, is one that may follow.\n"
    yield from _table(["task, words", *names], _task_rows(cards))
    yield "## Forms of answering\n"
    yield "Facts are drawn as often as they are told; a refusal is right where nobody knows the answer.\n"
    yield from _table(["asked as", *names], _rows(cards, "forms", lambda row: f"{100 * row[0]:.1f} % of {row[1]}"))
    yield "## Notes\n"
    yield "Random texts by how often they were told: mean log-probability of a token, in nats.\n"
    yield from _table(["told", *names], _rows(cards, "notes", lambda row: f"{row[0]:.2f} ({row[1]} notes)"))
    yield "## Spread\n"
    yield from _table(
        ["", *names], [["heads that are the best of some relation", *(card["best_heads"] for card in cards)]]
    )


def _task_rows(cards: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [
        [f"{name}, {kind}", *(f"{100 * card['tasks'][name][kind]['right']:.1f} %" for card in cards)]
        for name, both in cards[0]["tasks"].items()
        for kind in both
    ]


def _rows(cards: Sequence[Mapping[str, Any]], part: str, write: Any) -> list[list[Any]]:
    return [[key, *(write(card[part][key]) for card in cards)] for key in cards[0][part]]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"
    yield ""
