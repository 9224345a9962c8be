"""The question sets, the depth graph and the membership texts that come with the embedded model.

Four sets stand where PopQA, TriviaQA, HotpotQA and NQ stand:

- `properties`: one wording per relation, one fact; popularity from rare to frequent (as PopQA).
- `paraphrased`: several wordings, knowledge as well as words and translations (as TriviaQA).
- `multi_hop`: two or three facts joined; the chain itself may never have been told (as HotpotQA).
- `natural`: short, without capital or question mark, as typed into a search box (as NQ).

The depth graph takes questions of depth 3 apart: into the two questions of depth 2 that each leave one hop out, and
those into their facts. The membership texts are documents that the corpus holds and documents that it could hold and
does not; to them `write_world` adds the notes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tools.world.chosen_words import write_words
from tools.world.documents import Corpus
from tools.world.facts import CHAIN_OF, CHAINS, Fact
from tools.world.notes import note_rows
from tools.world.written import Written

from headwater.questions.sources import WORLD_SETS
from headwater.runs.storage import write_atomically, write_json
from headwater.world.wording import fill, prompt_of, wording_of

CATEGORIES_OF = {
    "properties": ("knowledge", "invented"),
    "paraphrased": ("knowledge", "invented", "linguistic", "translation"),
    "natural": ("knowledge", "invented"),
    "multi_hop": ("joined",),
}


def write_world(folder: Path, written: Written) -> None:
    """Write what belongs to a world's models: questions, depth graph, membership texts, and the words of its tasks."""
    corpus, recipe = written.corpus, written.corpus.world.recipe
    _write_lines(folder / "questions.jsonl", question_rows(corpus, recipe.questions))
    _write_lines(folder / "texts.jsonl", membership_rows(corpus, recipe.texts) + note_rows(corpus.documents))
    write_json(folder / "depth_graph.json", depth_graph(corpus, recipe.graphs))
    write_words(written.words, folder)


def question_rows(corpus: Corpus, per_set: int) -> list[dict[str, object]]:
    """Draw the questions of every set: a row each, in the columns that `load_questions` reads."""
    rng = np.random.default_rng([corpus.world.recipe.seed, 4])
    rows = []
    for name in WORLD_SETS:
        drawn = _drawn(rng, corpus, name, per_set)
        asked = list(_asked(rng, corpus, name, drawn))
        rows += [{"id": f"{name}-{i:04d}"} | row for i, row in enumerate(asked)]
    return rows


def _drawn(rng: np.random.Generator, corpus: Corpus, name: str, how_many: int) -> list[int]:
    """Draw facts for a set; of the chains, three in four are told in the corpus as such."""
    facts = corpus.world.facts
    candidates = np.array([i for i, fact in enumerate(facts) if fact.category in CATEGORIES_OF[name]])
    if name != "multi_hop":
        return rng.permutation(candidates)[:how_many].tolist()
    told = corpus.frequency[candidates] > 0
    parts = ((candidates[told], how_many * 3 // 4), (candidates[~told], how_many - how_many * 3 // 4))
    return [i for part, size in parts for i in rng.permutation(part)[:size].tolist()]


def _asked(rng: np.random.Generator, corpus: Corpus, name: str, drawn: Sequence[int]) -> Iterator[dict[str, object]]:
    for i in drawn:
        fact = corpus.world.facts[i]
        questions = wording_of(fact.relation).questions
        sentences = questions[name] if name in questions else [s for group in questions.values() for s in group]
        sentence = fill(sentences[rng.integers(len(sentences))], fact.subject)
        yield {
            "dataset": name,
            "question": sentence.text,
            "answers": list(fact.answers),
            "subject": [list(sentence.subject)],
            "property": [list(span) for span in sentence.property],
            "relation": fact.relation,
            "depth": fact.depth,
            "popularity": int(corpus.frequency[i]),
            "asked": corpus.times.get(f"{prompt_of(sentence.text)} {fact.answers[0]}", 0),
            "held_out": fact.held_out,
        }


def depth_graph(corpus: Corpus, groups: int) -> dict[str, object]:
    """Draw questions of depth 3 and take them apart, in the one-file format that `load_depth_graph` reads."""
    rng = np.random.default_rng([corpus.world.recipe.seed, 5])
    facts = corpus.world.facts
    deep = [i for i, fact in enumerate(facts) if fact.depth == 3 and not fact.held_out]
    relations = np.array([facts[i].relation for i in deep])
    names, counts = np.unique(relations, return_counts=True)
    chance = (1 / counts)[np.searchsorted(names, relations)]
    drawn = rng.choice(deep, size=min(groups, len(deep)), replace=False, p=chance / chance.sum())
    nodes = [node for group, i in enumerate(drawn.tolist()) for node in _nodes(corpus, str(group), i)]
    return {"name": "world", "nodes": nodes}


def _nodes(corpus: Corpus, group: str, deepest: int) -> list[dict[str, Any]]:
    """Return the node of one question of depth 3, its two of depth 2, and their facts."""
    world = corpus.world
    whole = world.facts[deepest]
    chain, path = CHAINS[whole.relation], whole.path
    nodes = {path[k]: _node(corpus, f"{group}_d1_n{k}", group, path[k], []) for k in range(3)}
    halves = []
    for k in range(2):
        half = world.number[CHAIN_OF[chain[k : k + 2]], world.facts[path[k]].subject]
        halves.append(_node(corpus, f"{group}_d2_n{k}", group, half, [nodes[path[k]]["id"], nodes[path[k + 1]]["id"]]))
    return [_node(corpus, f"{group}_d3", group, deepest, [half["id"] for half in halves]), *halves, *nodes.values()]


def _node(corpus: Corpus, name: str, group: str, number: int, predecessors: list[str]) -> dict[str, Any]:
    fact = corpus.world.facts[number]
    return {
        "id": name,
        "group": group,
        "depth": fact.depth,
        "question": fill(wording_of(fact.relation).questions["properties"][0], fact.subject).text,
        "answers": list(fact.answers),
        "predecessors": predecessors,
        "relation": fact.relation,
        "popularity": int(corpus.frequency[number]),
    }


def membership_rows(corpus: Corpus, per_kind: int) -> list[dict[str, object]]:
    """Draw texts that the corpus holds ("member"), and two kinds that it does not.

    "other wording": the fact is told, but not in these words. "held out": the fact is told in no words at all. The
    column `form` says how each is told: some forms, such as stories and questions of choice, occur among members alone,
    so that a comparison of kinds has to be made within a form.
    """
    rng = np.random.default_rng([corpus.world.recipe.seed, 6])
    found: dict[str, list[int]] = {"member": [], "other wording": [], "held out": []}
    for i, document in enumerate(corpus.documents):
        if document.facts and document.form != "list":
            found[_membership(corpus.world.facts[document.facts[0]], document.times)].append(i)
    rows = []
    for kind, members in found.items():
        for i in rng.permutation(members)[:per_kind].tolist():
            document = corpus.documents[i]
            fact = corpus.world.facts[document.facts[0]]
            about = {"form": document.form, "relation": fact.relation, "depth": fact.depth, "times": document.times}
            rows.append({"text": document.text, "member": kind == "member", "kind": kind} | about)
    return rows


def _membership(fact: Fact, times: int) -> str:
    if fact.held_out:
        return "held out"
    return "member" if times else "other wording"


def _write_lines(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))
