"""The ways in which the corpus tells a fact or asks it: shortly, in a sentence, as a choice, doubted, corrected.

Every telling of a fact is one of `FORMS`, drawn by their shares. The forms that hold a wrong answer draw it from the
answers of the same relation, so that what is right is decided by the fact alone. Only forms that say the truth count as
tellings: the others are about the fact and do not tell it (`Document.facts` is empty).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tools.world.documents import Document
from tools.world.facts import Fact, World

from headwater.questions.sources import WORLD_SETS
from headwater.world.tasks import pick
from headwater.world.wording import Span, fill, prompt_of, wording_of

FORMS = {
    "statement": 0.40,
    "short": 0.34,
    "sentence": 0.09,
    "yes or no": 0.06,
    "choice": 0.05,
    "doubted": 0.03,
    "corrected": 0.03,
}
IN_A_SENTENCE = ("Say it in a sentence.", "Answer in full.", "Tell me in a whole sentence.")
OPENINGS = (
    "",
    "",
    "",
    "As far as is known, ",
    "It is said in many books that ",
    "Everyone here knows it: ",
    "In short, ",
)
UNKNOWN = ("That is not known.", "Nobody knows.", "I do not know.", "That was never told.")


@dataclass(frozen=True)
class Teller:
    """Writes the documents of a world's facts."""

    world: World
    others: Mapping[str, Sequence[str]]
    """The answers that each relation has."""

    def documents(self, rng: np.random.Generator, number: int, times: int) -> list[Document]:
        """Tell a fact so often: forms and wordings are drawn; a question wording is told of it or is not."""
        fact = self.world.facts[number]
        asked = self._asked(rng, fact)
        names = list(FORMS)
        counts = rng.multinomial(times, np.array(list(FORMS.values())) / sum(FORMS.values()))
        documents = []
        for name, count in zip(names, counts.tolist(), strict=True):
            if name == "statement":
                documents += self._statements(rng, fact, number, count)
            elif name == "short":
                documents += self._short(rng, fact, number, asked, count)
            else:
                documents += [self._other(rng, name, fact, number, asked) for _ in range(count)]
        return documents

    def asked_as(self, rng: np.random.Generator, form: str, number: int) -> Document:
        """Write one question about a fact, with its answer: "sentence", "yes or no" or "choice"."""
        fact = self.world.facts[number]
        return self._other(rng, form, fact, number, self._asked(rng, fact))

    def _asked(self, rng: np.random.Generator, fact: Fact) -> list[tuple[str, str]]:
        """Draw which of a fact's question wordings the corpus asks: (question set, sentence)."""
        every = every_question(fact.relation)
        share = self.world.recipe.asked
        return [form for form in every if rng.random() < share] or [every[int(rng.integers(len(every)))]]

    def _statements(self, rng: np.random.Generator, fact: Fact, number: int, times: int) -> list[Document]:
        sentences = wording_of(fact.relation).statements
        counts = rng.multinomial(times, np.full(len(sentences), 1 / len(sentences)))
        return [
            Document(*statement(sentence, fact.subject, fact.answers[0]), (number,), "statement", count)
            for sentence, count in zip(sentences, counts.tolist(), strict=True)
        ]

    def _short(
        self, rng: np.random.Generator, fact: Fact, number: int, asked: Sequence[tuple[str, str]], times: int
    ) -> list[Document]:
        """Ask a fact in every wording, those that the corpus does not ask it in 0 times."""
        counts = dict(zip(asked, rng.multinomial(times, np.full(len(asked), 1 / len(asked))).tolist(), strict=True))
        documents = []
        for name, sentence in every_question(fact.relation):
            text, spans = answered(fill(sentence, fact.subject).text, fact.answers[0])
            documents.append(Document(text, spans, (number,), name, counts.get((name, sentence), 0)))
        return documents

    def _other(
        self, rng: np.random.Generator, form: str, fact: Fact, number: int, asked: Sequence[tuple[str, str]]
    ) -> Document:
        question = fill(asked[int(rng.integers(len(asked)))][1], fact.subject).text
        if form == "sentence":
            text, spans = in_a_sentence(rng, question, fact.subject, fact.relation, fact.answers[0])
            return Document(text, spans, (number,), form, 1)
        wrong = self.wrong(rng, fact)
        sentences = wording_of(fact.relation).statements
        sentence = pick(rng, sentences)
        true, false = (inside(sentence, fact.subject, word) for word in (fact.answers[0], wrong))
        if form == "yes or no":
            yes = rng.random() < 0.5
            text, spans = answered(f"Is it right that {true if yes else false}?", "Yes" if yes else "No")
            return Document(text, spans, (number,) if yes else (), form, 1)
        if form == "choice":
            pair = [fact.answers[0], wrong][:: 1 if rng.random() < 0.5 else -1]
            text, spans = answered(f"{question} {pair[0]} or {pair[1]}?", fact.answers[0])
            return Document(text, spans, (number,), form, 1)
        if form == "doubted":
            text = f"Some say that {false}, but this is doubted."
            end = " but this is doubted"
            return Document(text, ((len(text) - 1 - len(end), len(text) - 1),), (), form, 1)
        text = f"It is not true that {false}: {true}."
        told, spans = statement(sentence, fact.subject, fact.answers[0])
        shift = len(text) - len(told)
        return Document(text, tuple((a + shift, b + shift) for a, b in spans), (number,), form, 1)

    def wrong(self, rng: np.random.Generator, fact: Fact) -> str:
        """Draw an answer of the same relation that is not accepted for this fact."""
        others = self.others[fact.relation]
        for place in rng.integers(len(others), size=20).tolist():
            if others[place] not in fact.answers:
                return others[place]
        return next((word for word in others if word not in fact.answers), "nothing")


def every_question(relation: str) -> list[tuple[str, str]]:
    """Return the question wordings of a relation: (question set, sentence)."""
    questions = wording_of(relation).questions
    return [(name, sentence) for name in WORLD_SETS for sentence in questions.get(name, ())]


def question_of(rng: np.random.Generator, relation: str, subject: str) -> str:
    """Ask something of a subject, in any wording that the relation has."""
    return fill(pick(rng, [sentence for _, sentence in every_question(relation)]), subject).text


def teller_of(world: World) -> Teller:
    """Make the teller of a world."""
    others: dict[str, list[str]] = {}
    for fact in world.facts:
        others.setdefault(fact.relation, []).append(fact.answers[0])
    return Teller(world, others)


def answered(question: str, answer: str) -> tuple[str, tuple[Span, ...]]:
    """Write a question with its answer; the span is the answer's."""
    prompt = prompt_of(question)
    return f"{prompt} {answer}", ((len(prompt) + 1, len(prompt) + 1 + len(answer)),)


def split_answer(text: str) -> tuple[str, str]:
    """Return the question and the answer of a document that is a question with its answer."""
    question, said = text.split("\nA: ")
    return question.removeprefix("Q: "), said


def in_a_sentence(
    rng: np.random.Generator, question: str, subject: str, relation: str, answer: str
) -> tuple[str, tuple[Span, ...]]:
    """Write a question that wants a sentence, with one; the span is the whole sentence's."""
    sentences = wording_of(relation).statements
    said = opened(rng, pick(rng, sentences), subject, answer)
    wish = pick(rng, IN_A_SENTENCE)
    return answered(f"{question} {wish}", said)


def refused(rng: np.random.Generator, question: str) -> tuple[str, tuple[Span, ...]]:
    """Write a question that nobody can answer."""
    return answered(question, pick(rng, UNKNOWN))


def statement(sentence: str, subject: str, answer: str) -> tuple[str, tuple[Span, ...]]:
    """Fill a statement; spans of the answer and, where it comes later, of the subject."""
    before, after = sentence.split("{t}")
    before, after = before.replace("{s}", subject), after.replace("{s}", subject)
    end = len(before) + len(answer)
    late = ((end + after.index(subject), end + after.index(subject) + len(subject)),) if subject in after else ()
    return before + answer + after, ((len(before), end), *late)


def opened(rng: np.random.Generator, sentence: str, subject: str, answer: str) -> str:
    """Fill a statement, some times behind an opening as "As far as is known"."""
    opening = pick(rng, OPENINGS)
    return f"{opening}{inside(sentence, subject, answer)}." if opening else statement(sentence, subject, answer)[0]


def inside(sentence: str, subject: str, answer: str) -> str:
    """Fill a statement as it stands inside another sentence: no full stop, and no capital but those of names."""
    sentence = sentence.removesuffix(".")
    first = "" if sentence.startswith("{") else sentence[0].lower()
    return statement(first + sentence[len(first) :], subject, answer)[0]
