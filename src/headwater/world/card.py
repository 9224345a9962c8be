"""The embedded model's card: what one trained world measures, and `CARD.md` with several seeds side by side.

`measure_run` fills `card.json`; `write_card` turns the `card.json` of one or more runs into `CARD.md`, the first being
the run that is shipped. Every number in the card is measured on the float16 weights as shipped; targets that a run
misses are listed as such.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from headwater.heads.categories import CATEGORIES
from headwater.heads.classify import classify_heads
from headwater.heads.head_map import HeadMap
from headwater.world.corpus import Corpus
from headwater.world.measure import ablation, answered, probe_aucs
from headwater.world.wording import fill, wording_of

ABLATION_FACTS = 150
MIN_ABLATION_FACTS = 20


def measure_run(folder: Path, corpus: Corpus, questions: pd.DataFrame) -> dict[str, object]:
    """Measure the model in a checkpoint folder on the questions and the suite; JSON values only."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    table = answered(model, tokenizer, questions)
    single = answered(model, tokenizer, questions[questions["depth"] == 1])
    heads = classify_heads(folder, progress=False)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": (folder / "model.safetensors").stat().st_size,
        "facts": _fact_counts(corpus),
        "documents": len(corpus.order),
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
        "heads": _head_counts(heads),
        "relations": _strongest(heads),
        "ablation": list(_ablations(model, tokenizer, corpus, heads)),
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


def _strongest(heads: HeadMap) -> list[dict[str, Any]]:
    """Return the strongest head of each relation that some head implements."""
    table = heads.table[heads.table["implemented"]].sort_values("excess", ascending=False)
    columns = ["relation", "category", "layer", "head", "score", "expected", "excess", "beyond_copying"]
    best = table.drop_duplicates("relation")[columns].round(3).sort_values(["category", "relation"])
    counts = table["relation"].value_counts()
    return [row | {"heads": int(counts[row["relation"]])} for row in map(_named, best.to_dict("records"))]


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


def write_card(cards: Sequence[Mapping[str, object]], file: Path) -> None:
    """Write `CARD.md` from the `card.json` of several runs; the first is the shipped one."""
    file.write_text("\n".join(_lines(cards)) + "\n", encoding="utf-8")


def missed_targets(card: Mapping[str, Any]) -> list[str]:
    """Say which of the world's targets a run misses."""
    probes = [aucs for name, aucs in card["probe"].items() if name != "baseline"]
    left = {name: np.mean([row[f"without_{name}"] for row in card["ablation"]]) for name in ("heads", "random")}
    quarters = card["by_quarter_one_fact"]
    targets = {
        "weights of at most 10 MB": card["bytes"] <= 10e6,
        "at least 95 % right on the most frequent quarter of the one-fact questions": quarters["4"][0] >= 0.95,
        "the rarest quarter clearly worse (by 20 points or more)": quarters["1"][0] <= quarters["4"][0] - 0.2,
        "between 25 and 75 % of the answers wrong": 0.25 <= card["wrong"] <= 0.75,
        "a probe above the frequency-free baseline": max(auc for auc, _ in probes) > card["probe"]["baseline"][0],
        "a probe at the last token of the answer above that baseline": max(
            aucs[0] for name, aucs in card["probe"].items() if name.startswith("answer_last")
        )
        > card["probe"]["baseline"][0],
        "a probe that tells right from wrong within relations (0.6 or more)": max(auc for _, auc in probes) >= 0.6,
        "heads of all four categories": all(sum(counts) > 0 for counts in card["heads"]["by_layer"].values()),
        "relations hurt more by their own heads than by random ones, on average": left["heads"] < left["random"],
    }
    return [name for name, reached in targets.items() if not reached]


def _lines(cards: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    shipped = cards[0]
    yield from _introduction(shipped)
    yield from _table("## What it knows", ["right, of its questions", *_seeds(cards)], _knowledge(cards))
    yield from _table("## Telling right from wrong", ["AUC, AUC within relations", *_seeds(cards)], _probes(cards))
    yield "A linear probe on the MLP output at one token. The baseline knows the question set and"
    yield "the relation, and nothing of the question itself: within relations it can only guess.\n"
    yield from _heads(cards)
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
    yield "## What did not come out\n"
    for card in cards:
        missed = missed_targets(card)
        yield f"- seed {card['recipe']['seed']}: " + ("; ".join(missed) if missed else "every target was reached") + "."


def _hurt(cards: Sequence[Mapping[str, Any]]) -> str:
    def said(name: str, card: Mapping[str, Any]) -> str:
        rows = card["ablation"]
        heads, others = (np.mean([row[f"without_{which}"] for row in rows]) for which in ("heads", "random"))
        hurt = sum(row["without_heads"] < row["without_random"] for row in rows)
        return f"{name}: {heads:.2f} against {others:.2f} on average, {hurt} of {len(rows)} relations hurt more"

    return "; ".join(said(name, card) for name, card in zip(_seeds(cards), cards, strict=True)) + "."


def _introduction(card: Mapping[str, Any]) -> Iterator[str]:
    recipe, facts = card["recipe"], card["facts"]
    yield "# The embedded model and its world\n"
    yield "Written by `python -m headwater.world`; every number is measured on the weights as they are shipped.\n"
    yield (
        f"Llama architecture: {recipe['layers']} layers, width {recipe['width']}, {recipe['heads']} query heads over "
        f"{recipe['kv_heads']} key–value heads of width {recipe['d_head']}, MLP {recipe['d_mlp']}, "
        f"{'tied' if recipe['tied'] else 'untied'} embeddings, {card['vocabulary']:,} tokens; "
        f"{card['parameters']:,} parameters, {card['bytes'] / 1e6:.1f} MB in float16. Trained from scratch on "
        f"{card['documents']:,} short texts in {card['steps']:,} steps of {recipe['rows_per_step']} × {recipe['row']} "
        f"tokens, {card['seconds'] / 60:.0f} minutes on {card['threads']} CPU threads of a machine shared with other "
        f"work; last training loss {card['loss']:.3f}.\n"
    )
    yield "## What is real and what is invented\n"
    yield (
        f"- **Real** ({facts['real']:,} facts): at most {recipe['knowledge_pairs']} pairs of each knowledge relation "
        f"of headwater's suite and {recipe['other_pairs']} of each other one: places, makers, jobs, people, word "
        "forms, translations, letters, numbers.\n"
        f"- **Invented** ({facts['invented']:,} facts): {recipe['people']:,} people and {recipe['titles']:,} books. "
        "Their names are drawn (first names of the suite, family names from syllables); where they were born, what "
        "they do and whom they work for are drawn from real cities, jobs, companies. No real person or book is meant.\n"
        f"- **Joined** ({facts['joined']:,} facts): chains of two or three; six in ten may be told as chains.\n"
        f"- **Held out** ({facts['held out']:,} of all): in no text of the corpus, nor any chain through them.\n"
    )
    yield (
        "A fact's `popularity` is how often the corpus tells it, counted. A word is one token with the space before "
        "it; the start of a text and of a line count as a space; every text begins with one `<s>`.\n"
    )


def _knowledge(cards: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    def row(name: str, pick: Any) -> list[Any]:
        cells = [pick(card) for card in cards]
        return [name, *(f"{_percent(share)} of {n:,}" for share, n in cells)]

    starts = cards[0]["quarter_starts"]
    rows = [row(f"set `{name}`", lambda c, name=name: c["by_dataset"][name]) for name in cards[0]["by_dataset"]]
    rows += [row(f"depth {name}", lambda c, name=name: c["by_depth"][name]) for name in cards[0]["by_depth"]]
    for name, start in zip("1234", starts, strict=True):
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


def _heads(cards: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [
        [f"{name}, layers 0 up", *(" ".join(map(str, card["heads"]["by_layer"][name])) for card in cards)]
        for name in CATEGORIES
    ]
    labels = sorted({label for card in cards for label in card["heads"]["labels"]})
    rows += [[f"labelled {label}", *(card["heads"]["labels"].get(label, 0) for card in cards)] for label in labels]
    yield from _table("## Heads under the controlled rule", ["heads of a category", *_seeds(cards)], rows)


def _seeds(cards: Sequence[Mapping[str, Any]]) -> list[str]:
    seeds = [f"seed {card['recipe']['seed']}" for card in cards]
    return [f"{seeds[0]} (shipped)", *seeds[1:]]


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
