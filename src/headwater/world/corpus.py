"""The text the model learns from: every document of the world, how often it comes, and the rows of tokens it makes.

1. Each fact is told a number of times that follows its popularity, in statements and in questions with answers.
   A question wording is told or not told for a fact by a draw: those not told are new to the model.
2. Lists put pairs of one relation side by side; repetitions say the same words twice.
3. All documents, each as often as it comes, are shuffled and packed into rows of one length: `<s>`, then documents with
   a line break after each. A document is never cut.

The corpus is made whole, from the seed alone; step n of the training reads the n-th block of its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headwater.models.tokens import Tokenizer
from headwater.world.facts import Fact, World
from headwater.world.recipe import Recipe
from headwater.world.tokenizer import BOS_ID, PAD_ID
from headwater.world.wording import QUESTION_SETS, Span, fill, wording_of

Spans = tuple[Span, ...]


@dataclass(frozen=True)
class Document:
    """One text of the corpus."""

    text: str
    answers: Spans
    """Where the words stand that the text is about: (start, end) of each."""
    facts: tuple[int, ...]
    """The numbers of the facts it tells."""
    form: str
    """"statement", a question set, "list" or "repetition"."""
    times: int
    """How often the corpus holds it; 0 for a text that it could hold and does not."""


@dataclass(frozen=True)
class Corpus:
    """Every document and the order they come in."""

    world: World
    documents: tuple[Document, ...]
    order: NDArray[np.int64]

    @cached_property
    def frequency(self) -> NDArray[np.int64]:
        """How often each fact is told, over all documents."""
        counts = np.zeros(len(self.world.facts), dtype=np.int64)
        for document in self.documents:
            for fact in document.facts:
                counts[fact] += document.times
        return counts

    @cached_property
    def times(self) -> dict[str, int]:
        """How often each text comes."""
        return {document.text: document.times for document in self.documents}


def build_corpus(world: World) -> Corpus:
    """Write the whole corpus of a world."""
    recipe = world.recipe
    rng = np.random.default_rng([recipe.seed, 2])
    documents = []
    for i, times in enumerate(_tellings(rng, world).tolist()):
        documents += _told(rng, i, world.facts[i], times, recipe.asked)
    left = recipe.documents - sum(document.times for document in documents)
    documents += write_lists(rng, world, left // 2)
    documents += _repetitions(rng, world, left - left // 2)
    order = rng.permutation(np.repeat(np.arange(len(documents)), [document.times for document in documents]))
    return Corpus(world, tuple(documents), order)


def prompt_of(question: str) -> str:
    """Write a question as the corpus does, up to where the answer begins."""
    return f"Q: {question}\nA:"


def _tellings(rng: np.random.Generator, world: World) -> NDArray[np.int64]:
    """Draw how often each fact is told."""
    recipe = world.recipe
    shares = {"real": recipe.share_real, "invented": recipe.share_invented, "joined": recipe.share_joined}
    kinds = np.array([fact.kind for fact in world.facts])
    weights = np.array([0.0 if fact.held_out else fact.weight for fact in world.facts])
    tellings = np.zeros(len(kinds), dtype=np.int64)
    for kind, share in shares.items():
        here = weights * (kinds == kind)
        expected = here / max(here.sum(), 1e-12) * share * recipe.documents
        tellings += np.floor(expected + rng.random(len(expected)) * (here > 0)).astype(np.int64)
    return tellings


def _told(rng: np.random.Generator, number: int, fact: Fact, times: int, asked: float) -> list[Document]:
    """Spread the tellings of one fact over its statements and the questions that the corpus asks about it."""
    wording = wording_of(fact.relation)
    answer = fact.answers[0]
    forms = [("statement", *_statement(sentence, fact.subject, answer)) for sentence in wording.statements]
    for name in QUESTION_SETS:
        for sentence in wording.questions.get(name, ()):
            prompt = prompt_of(fill(sentence, fact.subject).text)
            forms.append((name, f"{prompt} {answer}", ((len(prompt) + 1, len(prompt) + 1 + len(answer)),)))
    is_question = np.array([form != "statement" for form, _, _ in forms])
    told = ~is_question | (rng.random(len(forms)) < asked)
    chances = told * np.where(is_question, 0.5 / max(1, (told & is_question).sum()), 0.5 / (~is_question).sum())
    counts = rng.multinomial(times, chances / chances.sum())
    return [
        Document(text, spans, (number,), form, count)
        for (form, text, spans), count in zip(forms, counts.tolist(), strict=True)
    ]


def _statement(sentence: str, subject: str, answer: str) -> tuple[str, Spans]:
    before, after = sentence.split("{t}")
    before, after = before.replace("{s}", subject), after.replace("{s}", subject)
    end = len(before) + len(answer)
    late = ((end + after.index(subject), end + after.index(subject) + len(subject)),) if subject in after else ()
    return before + answer + after, ((len(before), end), *late)


def write_lists(rng: np.random.Generator, world: World, how_many: int) -> list[Document]:
    """Put three to five pairs of one relation into a line: "France Paris, Italy Rome, Spain Madrid"."""
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
        text, spans = "", []
        for member in dict.fromkeys(members.tolist()):
            fact = world.facts[member]
            text += f"{', ' if text else ''}{fact.subject} {fact.answers[0]}"
            spans.append((len(text) - len(fact.answers[0]), len(text)))
        documents.append(Document(text, tuple(spans), tuple(dict.fromkeys(members.tolist())), "list", 1))
    return documents


def _repetitions(rng: np.random.Generator, world: World, how_many: int) -> list[Document]:
    """Say two to six words twice: "tiger Rome walked : tiger Rome walked"."""
    words = sorted({fact.subject for fact in world.facts if fact.kind == "real"})
    lengths = rng.integers(2, 7, size=how_many)
    drawn = rng.integers(len(words), size=(how_many, 6))
    documents = []
    for places, length in zip(drawn.tolist(), lengths.tolist(), strict=True):
        line = " ".join(words[place] for place in places[:length])
        documents.append(Document(f"{line} : {line}", ((len(line) + 3, 2 * len(line) + 3),), (), "repetition", 1))
    return documents


def _shares(weights: Sequence[float]) -> NDArray[np.float64]:
    values = np.sqrt(np.array(weights))
    return values / values.sum()


@dataclass(frozen=True)
class Rows:
    """The corpus as training rows."""

    tokens: NDArray[np.uint16]
    answers: NDArray[np.bool_]
    """Whether the token is part of an answer."""


def pack_rows(corpus: Corpus, tokenizer: Tokenizer, recipe: Recipe) -> Rows:
    """Turn the corpus into rows of `recipe.row` tokens."""
    told = [i for i, document in enumerate(corpus.documents) if document.times]
    ids, marks = _tokenize([corpus.documents[i] for i in told], tokenizer)
    place = np.zeros(len(corpus.documents), dtype=np.int64)
    place[told] = np.arange(len(told))
    lengths = np.array([len(i) for i in ids])
    order = place[corpus.order]
    row, start = _rows_and_starts(lengths[order], recipe.row)
    tokens = np.full((row[-1] + 1, recipe.row), PAD_ID, dtype=np.uint16)
    answers = np.zeros(tokens.shape, dtype=bool)
    tokens[:, 0] = BOS_ID
    for r, s, document in zip(row.tolist(), start.tolist(), order.tolist(), strict=True):
        end = s + len(ids[document])
        tokens[r, s:end] = ids[document]
        answers[r, s:end] = marks[document]
    return Rows(tokens, answers)


def _rows_and_starts(lengths: NDArray[np.int64], width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows, starts = np.empty_like(lengths), np.empty_like(lengths)
    row, position = 0, 1
    for i, length in enumerate(lengths.tolist()):
        if position + length > width:
            row, position = row + 1, 1
        rows[i], starts[i] = row, position
        position += length
    return rows, starts


def _tokenize(
    documents: Sequence[Document], tokenizer: Tokenizer
) -> tuple[list[NDArray[np.uint16]], list[NDArray[np.bool_]]]:
    """Return the tokens of each document with the line break after it, and which of them are answers."""
    ids, marks = [], []
    encodings = tokenizer.backend_tokenizer.encode_batch(
        [f"{document.text}\n" for document in documents], add_special_tokens=False
    )
    for document, encoding in zip(documents, encodings, strict=True):
        ends = np.array([end for _, end in encoding.offsets])
        is_answer = np.any([(start < ends) & (ends <= stop) for start, stop in document.answers], axis=0)
        is_answer[-1] = document.form in QUESTION_SETS
        ids.append(np.array(encoding.ids, dtype=np.uint16))
        marks.append(is_answer)
    return ids, marks
