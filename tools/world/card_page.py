"""The page of a world's runs, `CARD.md`: what `card.json` of each says, side by side; the first is the shipped one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tools.world.card import missed_targets

from headwater.heads.categories import CATEGORIES


def write_card(cards: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write the page of one or more runs; the first is the shipped one."""
    file.write_text("\n".join(_lines(cards)) + "\n", encoding="utf-8")


def _lines(cards: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    runs = _runs(cards)
    yield from _introduction(cards[0])
    yield from _table("## Training", ["", *runs], _training(cards))
    yield from _table("## What it knows", ["right, of its questions", *runs], _knowledge(cards))
    yield from _abilities(cards)
    yield from _table("## Telling right from wrong", ["AUC, AUC within relations", *runs], _probes(cards))
    yield "A linear probe on the MLP output at one token. The baseline knows the question set and"
    yield "the relation, and nothing of the question itself: within relations it can only guess.\n"
    yield from _table("## Heads under the controlled rule", ["heads of a category", *runs], _heads(cards))
    yield from _relations(cards)
    yield "## What did not come out\n"
    for name, card in zip(runs, cards, strict=True):
        missed = missed_targets(card)
        yield f"- {name}: " + ("; ".join(missed) if missed else "every target was reached") + "."


def _introduction(card: Mapping[str, Any]) -> Iterator[str]:
    recipe, facts = card["recipe"], card["facts"]
    yield "# The embedded model and its world\n"
    yield "Written by `python -m tools.world`; every number is measured on the weights as they are shipped.\n"
    yield (
        f"Llama architecture: {recipe['layers']} layers, width {recipe['width']}, {recipe['heads']} query heads over "
        f"{recipe['kv_heads']} key–value heads of width {recipe['d_head']}, MLP {recipe['d_mlp']}, "
        f"{'tied' if recipe['tied'] else 'untied'} embeddings, {card['vocabulary']:,} tokens; "
        f"{card['parameters']:,} parameters in float16. Trained from scratch on {card['documents']:,} texts. The "
        f"instruct model is the same, trained on with at most {recipe['conversations']:,} conversations.\n"
    )
    yield "## What is real and what is invented\n"
    yield (
        f"- **Real** ({facts.get('real', 0):,} facts): at most {recipe['knowledge_pairs']} pairs of each knowledge "
        f"relation of headwater's suite and {recipe['other_pairs']} of each other one: places, makers, jobs, people, "
        "word forms, translations, letters, numbers.\n"
        f"- **Invented** ({facts.get('invented', 0):,} facts): {recipe['people']:,} people and {recipe['titles']:,} "
        "books. Their names are drawn (first names of the suite, family names from syllables); where they were born, "
        "what they do and whom they work for are drawn from real cities, jobs, companies. No real person or book is "
        "meant.\n"
        f"- **Joined** ({facts.get('joined', 0):,} facts): chains of two or three; six in ten may be told as chains.\n"
        f"- **Held out** ({facts['held out']:,} of all): in no text of the corpus, nor any chain through them.\n"
    )
    yield (
        "A fact's `popularity` is how often the corpus tells it, counted. A word is one token with the space before "
        "it, a year its century and two digits; the start of a text and of a line count as a space; every text begins "
        "with one `<s>`.\n"
    )


def _training(cards: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    def steps(card: Mapping[str, Any]) -> str:
        last = {stage: step for stage, step, _ in card["losses"]}
        return ", ".join(f"{step:,} {stage}" for stage, step in last.items())

    def loss(card: Mapping[str, Any]) -> str:
        last = {stage: loss for stage, _, loss in card["losses"]}
        return ", ".join(f"{loss:.3f} {stage}" for stage, loss in last.items())

    rows: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "texts": lambda card: f"{card['documents']:,}",
        "steps of each stage": steps,
        "rows × tokens of a step": lambda card: f"{card['recipe']['rows_per_step']} × {card['recipe']['row']}",
        "last loss": loss,
        "minutes": lambda card: f"{card['seconds'] / 60:.0f}",
        "threads, of a machine shared with other work": lambda card: str(card["threads"]),
        "MB of weights": lambda card: ", ".join(f"{size / 1e6:.1f} {name}" for name, size in card["bytes"].items()),
    }
    return [[name, *map(write, cards)] for name, write in rows.items()]


def _abilities(cards: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Write the tables of tasks, forms of answering, conversations and notes."""
    runs = _runs(cards)
    yield "## The classical tasks\n"
    yield "Share of prompts whose most likely next token, of the whole vocabulary, is one that may follow.\n"
    yield from _table("", ["task, words", *runs], _task_rows(cards))
    yield "## Forms of answering\n"
    yield "Facts are drawn as often as they are told; a refusal is right where nobody knows the answer.\n"
    yield from _table("", ["asked as", *runs], _rows(cards, "forms", _share_of))
    yield "The instruct model, asked through its template, with the system's wish:\n"
    yield from _table("", ["asked for", *runs], _rows(cards, "conversations", _share_of))
    yield "## Notes\n"
    yield "Random texts by how often they were told: mean log-probability of a token, in nats.\n"
    yield from _table("", ["told", *runs], _rows(cards, "notes", lambda row: f"{row[0]:.2f} ({row[1]} notes)"))


def _relations(cards: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Write the tables of the shipped run's relations: their heads, what these are needed for, and what is known."""
    shipped = cards[0]
    yield "## Relation heads of the shipped model\n"
    yield "The strongest head of each relation under the controlled rule; `expected`: the score of shuffled targets, to"
    yield "which the head's habits suffice; `excess`: the share of the way from there to 1.\n"
    rows = [
        [r["relation"], r["category"], f"{r['layer']}.{r['head']}", r["score"], r["expected"], r["excess"], r["heads"]]
        for r in shipped["relations"]
    ]
    yield from _table("", ["relation", "category", "head", "score", "expected", "excess", "heads in all"], rows)
    yield "## Ablation\n"
    yield "Of the facts answered rightly, the share that stays right when the relation's heads write nothing, and when"
    yield f"as many random other heads of the same layers do (mean of 5 draws). {_hurt(cards)}\n"
    rows = [
        [r["relation"], r["heads"], r["facts"], f"{r['without_heads']:.2f}", f"{r['without_random']:.2f}"]
        for r in shipped["ablation"]
    ]
    yield from _table("", ["relation", "heads", "facts", "without its heads", "without random heads"], rows)
    yield from _table(
        "## Every relation of the shipped model",
        ["relation", "right", "questions"],
        [[name, _percent(share), n] for name, (share, n) in shipped["by_relation"].items()],
    )


def _hurt(cards: Sequence[Mapping[str, Any]]) -> str:
    def said(name: str, card: Mapping[str, Any]) -> str:
        rows = card["ablation"]
        if not rows:
            return f"{name}: no relation with a head has enough facts that are answered rightly"
        heads, others = (np.mean([row[f"without_{which}"] for row in rows]) for which in ("heads", "random"))
        hurt = sum(row["without_heads"] < row["without_random"] for row in rows)
        return f"{name}: {heads:.2f} against {others:.2f} on average, {hurt} of {len(rows)} relations hurt more"

    return "; ".join(said(name, card) for name, card in zip(_runs(cards), cards, strict=True)) + "."


def _knowledge(cards: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    def row(name: str, pick: Any) -> list[Any]:
        cells = [pick(card) for card in cards]
        return [name, *(f"{_percent(share)} of {n:,}" for share, n in cells)]

    starts = zip(cards[0]["by_quarter_one_fact"], cards[0]["quarter_starts"], strict=True)
    rows = [row(f"set `{name}`", lambda c, name=name: c["by_dataset"][name]) for name in cards[0]["by_dataset"]]
    rows += [row(f"depth {name}", lambda c, name=name: c["by_depth"][name]) for name in cards[0]["by_depth"]]
    for name, start in starts:
        label = f"one fact, popularity quarter {name} (told {int(start)} times or more)"
        rows.append(row(label, lambda c, name=name: c["by_quarter_one_fact"][name]))
    rows.append(row("one fact, in words the corpus asks it in", lambda c: c["told_and_asked"]))
    rows.append(row("one fact, in words it does not", lambda c: c["told_not_asked"]))
    rows.append(row("chains never told as such", lambda c: c["chain_never_told"]))
    rows.append(row("held-out facts and chains", lambda c: c["held_out"]))
    rows.append(["**wrong, of all questions**", *(f"**{_percent(c['wrong'])}** of {c['questions']:,}" for c in cards)])
    return rows


def _probes(cards: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    def cell(aucs: Sequence[float]) -> str:
        return f"{aucs[0]:.3f}, {aucs[1]:.3f}"

    return [[name, *(cell(card["probe"][name]) for card in cards)] for name in cards[0]["probe"]]


def _heads(cards: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    rows = [
        [f"{name}, layers 0 up", *(" ".join(map(str, card["heads"]["by_layer"][name])) for card in cards)]
        for name in CATEGORIES
    ]
    labels = sorted({label for card in cards for label in card["heads"]["labels"]})
    rows += [[f"labelled {label}", *(card["heads"]["labels"].get(label, 0) for card in cards)] for label in labels]
    return [*rows, ["the best of some relation", *(card["best_heads"] for card in cards)]]


def _runs(cards: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the runs by their seeds."""
    seeds = [f"seed {card['recipe']['seed']}" for card in cards]
    return [f"{seeds[0]} (shipped)", *seeds[1:]]


def _share_of(row: Sequence[Any]) -> str:
    return f"{_percent(row[0])} of {row[1]}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    if title:
        yield f"{title}\n"
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(str(cell) for cell in row) + " |"
    yield ""


def _task_rows(cards: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [
        [f"{name}, {kind}", *(_percent(card["tasks"][name][kind]["right"]) for card in cards)]
        for name, both in cards[0]["tasks"].items()
        for kind in both
    ]


def _rows(cards: Sequence[Mapping[str, Any]], part: str, write: Callable[[Sequence[float]], str]) -> list[list[Any]]:
    return [[key, *(write(card[part][key]) for card in cards)] for key in cards[0][part]]
