"""Lists: three to five pairs of one relation in a line, as "France Paris, Italy Rome, Spain Madrid"."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tools.world.documents import Document
from tools.world.facts import World


def write_lists(rng: np.random.Generator, world: World, how_many: int) -> list[Document]:
    """Write so many lists of real facts, each of a relation drawn from all alike."""
    by_relation: dict[str, list[int]] = {}
    for i, fact in enumerate(world.facts):
        if fact.kind == "real" and not fact.held_out:
            by_relation.setdefault(fact.relation, []).append(i)
    names = sorted(by_relation)
    chances = {name: _shares([world.facts[i].weight for i in by_relation[name]]) for name in names}
    documents = []
    for choice, length in zip(rng.integers(len(names), size=how_many), rng.integers(3, 6, size=how_many), strict=True):
        name = names[choice]
        members = rng.choice(by_relation[name], size=length, p=chances[name])
        documents.append(_list(world, list(dict.fromkeys(members.tolist()))))
    return documents


def _list(world: World, members: Sequence[int]) -> Document:
    text, spans = "", []
    for member in members:
        fact = world.facts[member]
        text += f"{', ' if text else ''}{fact.subject} {fact.answers[0]}"
        spans.append((len(text) - len(fact.answers[0]), len(text)))
    return Document(text, tuple(spans), tuple(members), "list", 1)


def _shares(weights: Sequence[float]) -> NDArray[np.float64]:
    values = np.sqrt(np.array(weights))
    return values / values.sum()
