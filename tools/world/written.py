"""The text the model learns from: every document of the world, how often it comes, and in which order.

1. Facts (real, invented, joined) are told in many forms, as often as their popularity says (`forms`).
2. Stories, notes, lists, words said again, the classical tasks, each with its share of the recipe.
3. The repetitions that are read first, from which copying is learnt (`copying`).

Everything is drawn from the seed; the documents are shuffled and packed into rows (`rows`), a document never
cut.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tools.world.chosen_words import choose_words
from tools.world.documents import Corpus, Document
from tools.world.facts import World, build_world
from tools.world.forms import teller_of
from tools.world.frames import FRAMES, lines
from tools.world.lists import write_lists
from tools.world.notes import notes
from tools.world.recipe import Recipe
from tools.world.stories import stories_of

from headwater.heads.relations import Relation
from headwater.world.tasks import TASKS, Words, pick

FACTS = ("real", "invented", "joined")
SAID = ("Q: Say the word {}.\nA:", "The word {} is written", "Read {} aloud:", "{}, and again")


@dataclass(frozen=True)
class Written:
    """A world in words: the main corpus, the repetitions read before it, and the words of the tasks."""

    corpus: Corpus
    copying: Corpus
    words: Words


def write_corpus(relations: Sequence[Relation], recipe: Recipe) -> Written:
    """Write everything that a recipe's model reads."""
    world = build_world(relations, recipe)
    words = choose_words(relations, plain_words(world), recipe)
    rng = np.random.default_rng([recipe.seed, 2])
    documents = _facts(rng, world)
    documents += notes(rng, words.plain.in_texts, recipe.notes)
    for kind, share in recipe.shares.items():
        if kind not in FACTS:
            documents += _KINDS[kind](rng, world, words, round(share * recipe.documents))
    rng = np.random.default_rng([recipe.seed, 8])
    copying = list(_task_lines(rng, words, "induction", recipe.copying_documents))
    return Written(_shuffled(rng, world, documents), _shuffled(rng, world, copying), words)


def plain_words(world: World) -> list[str]:
    """Return the words that repetitions and notes are made of: one word each, letters only, of real facts."""
    real = (word for fact in world.facts if fact.kind == "real" for word in (fact.subject, fact.answers[0]))
    return sorted({word for word in real if word.isalpha() and word.isascii() and len(word) > 2})


def _shuffled(rng: np.random.Generator, world: World, documents: list[Document]) -> Corpus:
    order = rng.permutation(np.repeat(np.arange(len(documents)), [document.times for document in documents]))
    return Corpus(world, tuple(documents), order)


def _facts(rng: np.random.Generator, world: World) -> list[Document]:
    """Tell every fact as often as its weight among the facts of its kind says."""
    recipe, teller = world.recipe, teller_of(world)
    kinds = np.array([fact.kind for fact in world.facts])
    weights = np.array([0.0 if fact.held_out else fact.weight for fact in world.facts])
    documents = []
    for kind in FACTS:
        here = weights * (kinds == kind)
        expected = here / max(here.sum(), 1e-12) * recipe.shares.get(kind, 0.0) * recipe.documents
        times = np.floor(expected + rng.random(len(expected)) * (here > 0)).astype(np.int64)
        for number in np.flatnonzero(kinds == kind).tolist():
            documents += teller.documents(rng, number, int(times[number]))
    return documents


def _task_lines(rng: np.random.Generator, words: Words, name: str, how_many: int) -> Iterator[Document]:
    """Write lines of a task with their answers; of a repetition everything said again is the answer."""
    for line, answer in lines(rng, words, name, how_many):
        text = f"{line.clean}{answer}{line.rest}"
        start, end = len(line.clean) + answer.startswith(" "), len(line.clean) + len(answer)
        if name == "induction":
            start, end = line.clean.index(" : ") + 3, len(text)
        yield Document(text, ((start, end),), (), name, 1)


def _task(name: str) -> Callable[..., list[Document]]:
    def write(rng: np.random.Generator, world: World, words: Words, how_many: int) -> list[Document]:
        return list(_task_lines(rng, words, name, how_many))

    return write


def _frames(name: str) -> Callable[..., list[Document]]:
    frame = FRAMES[name]
    assert frame is not None

    def write(rng: np.random.Generator, world: World, words: Words, how_many: int) -> list[Document]:
        texts = [frame(rng, words) for _ in range(how_many)]
        return [Document(text, ((text.index(" ") + 1, len(text)),), (), name, 1) for text in texts]

    return write


def _stories(rng: np.random.Generator, world: World, words: Words, how_many: int) -> list[Document]:
    stories = stories_of(world, words, rng)
    return [stories.story(rng) for _ in range(how_many)]


def _strangers(rng: np.random.Generator, world: World, words: Words, how_many: int) -> list[Document]:
    stories = stories_of(world, words, rng)
    return [stories.unknown(rng) for _ in range(how_many)]


def _said(rng: np.random.Generator, world: World, words: Words, how_many: int) -> list[Document]:
    """Have single words said again, every other one held out of the tasks: there is no word that nothing copies."""
    told, held_out = ((*words.names.of(held), *words.plain.of(held)) for held in (False, True))
    documents = []
    for _ in range(how_many):
        word = pick(rng, told if rng.random() < 0.5 else held_out)
        text = f"{pick(rng, SAID).format(word)} {word}"
        documents.append(Document(text, ((len(text) - len(word), len(text)),), (), "said", 1))
    return documents


def _lists(rng: np.random.Generator, world: World, words: Words, how_many: int) -> list[Document]:
    return write_lists(rng, world, how_many)


_KINDS: dict[str, Callable[..., list[Document]]] = {
    "stories": _stories,
    "strangers": _strangers,
    "said": _said,
    "lists": _lists,
    **{name: _task(name) for name in TASKS},
    **{name: _frames(name) for name in FRAMES},
}
