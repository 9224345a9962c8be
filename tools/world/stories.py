"""Texts of several sentences about one person, and questions after them whose answers stand in the text.

About people of the world a story tells facts that the corpus tells elsewhere too. Strangers are people of whom nothing
else is told: what a question asks of them can only be read in the text, and without a text nobody knows it.
"""

from dataclasses import dataclass

import numpy as np
from tools.world.documents import Document
from tools.world.facts import World
from tools.world.forms import answered, question_of, refused, statement
from tools.world.population import family_names

from headwater.world.tasks import Words, pick
from headwater.world.wording import wording_of

PERSONAL = ("birth_city", "profession", "employer", "birth_country", "birth_language", "employer_country", "work_place")
ASKED_OF_STRANGERS = ("birth_city", "profession", "employer")


@dataclass(frozen=True)
class Life:
    """A person with what is told: (relation, answer, number of the fact or None)."""

    name: str
    told: tuple[tuple[str, str, int | None], ...]


@dataclass(frozen=True)
class Stories:
    """Writes stories about the people of a world and about strangers."""

    lives: tuple[Life, ...]
    shares: np.ndarray
    """How often each person is told of."""
    strangers: tuple[str, ...]
    answers: dict[str, tuple[str, ...]]
    words: Words

    def story(self, rng: np.random.Generator) -> Document:
        """Write a story about a person of the world, or one time in three about a stranger."""
        if rng.random() < 1 / 3:
            name = pick(rng, self.strangers)
            told = tuple((relation, pick(rng, self.answers[relation]), None) for relation in ASKED_OF_STRANGERS)
            life = Life(name, told)
        else:
            life = self.lives[int(np.searchsorted(self.shares, rng.random()))]
        return self._written(rng, life)

    def unknown(self, rng: np.random.Generator) -> Document:
        """Ask something of a stranger, without a text."""
        name = pick(rng, self.strangers)
        text, spans = refused(rng, question_of(rng, pick(rng, ASKED_OF_STRANGERS), name))
        return Document(text, spans, (), "refusal", 1)

    def _written(self, rng: np.random.Generator, life: Life) -> Document:
        order = rng.permutation(len(life.told))[: int(rng.integers(2, 5))].tolist()
        text, spans, facts = "", [], []
        for place, k in enumerate(order):
            relation, answer, number = life.told[k]
            sentence, found = self._sentence(rng, relation, life.name, answer, later=place > 0)
            text += " " if text else ""
            if number is not None:
                spans += [(start + len(text), end + len(text)) for start, end in found[:1]]
                facts.append(number)
            text += sentence
        for k in order[: 1 + int(rng.random() < 0.4)][::-1]:
            relation, answer, _ = life.told[k]
            asked, found = answered(question_of(rng, relation, life.name), answer)
            spans += [(start + len(text) + 1, end + len(text) + 1) for start, end in found]
            text += f"\n{asked}"
        return Document(text, tuple(spans), tuple(facts), "story", 1)

    def _sentence(
        self, rng: np.random.Generator, relation: str, name: str, answer: str, *, later: bool
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        sentence = pick(rng, wording_of(relation).statements)
        pronoun = self._pronoun(name.split()[0])
        if later and pronoun and sentence.startswith("{s} ") and sentence.count("{s}") == 1 and rng.random() < 0.5:
            return statement(sentence, pronoun, answer)
        return statement(sentence, name, answer)

    def _pronoun(self, first_name: str) -> str:
        for pronoun, split in (("He", self.words.he), ("She", self.words.she)):
            if first_name in split.in_texts or first_name in split.held_out:
                return pronoun
        return ""


def stories_of(world: World, words: Words, rng: np.random.Generator) -> Stories:
    """Gather what is told of each person, and draw the strangers."""
    told: dict[str, list[tuple[str, str, int | None]]] = {}
    weight: dict[str, float] = {}
    answers: dict[str, set[str]] = {}
    for number, fact in enumerate(world.facts):
        if fact.relation in PERSONAL and not fact.held_out and fact.weight > 0:
            told.setdefault(fact.subject, []).append((fact.relation, fact.answers[0], number))
            weight[fact.subject] = max(weight.get(fact.subject, 0.0), fact.weight)
            answers.setdefault(fact.relation, set()).add(fact.answers[0])
    lives = [Life(name, tuple(rows)) for name, rows in sorted(told.items()) if len(rows) >= 2]
    shares = np.cumsum([weight[life.name] ** 0.5 for life in lives])
    known = {fact.subject for fact in world.facts}
    first = sorted({name.split()[0] for name in told})
    last = sorted(family_names())
    drawn = (f"{pick(rng, first)} {pick(rng, last)}" for _ in range(6_000))
    strangers = tuple(sorted({name for name in drawn if name not in known}))
    return Stories(
        tuple(lives), shares / shares[-1], strangers, {k: tuple(sorted(v)) for k, v in answers.items()}, words
    )
