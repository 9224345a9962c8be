"""Conversations: the instruct model's template, and what it is trained on.

A conversation is `<s>`, then turns: `<|system|>…<|end|>` (or none), `<|user|>…<|end|>`, `<|assistant|>…<|end|>`, one or
two questions. The system's wish decides how the same question is answered: in one word, or in a sentence. Of people
whom nobody knows the assistant says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tools.world.forms import UNKNOWN, Teller, inside, opened, question_of, teller_of
from tools.world.stories import ASKED_OF_STRANGERS, Stories, stories_of
from tools.world.written import Written

from headwater.world.tasks import pick
from headwater.world.wording import wording_of

SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
MARKS = (SYSTEM, USER, ASSISTANT, END)
SHORTLY = ("Answer in one word.", "Be brief.", "Give the answer alone.")
FULLY = ("Answer in a sentence.", "Answer in full sentences.", "Be polite and complete.")
PHRASES = (*SHORTLY, *FULLY, *UNKNOWN, "Yes. No.")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant, found ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Turn:
    """What one side says."""

    role: str
    content: str

    @property
    def text(self) -> str:
        """The turn as the template writes it."""
        return f"<|{self.role}|>{self.content}{END}"


def conversations(written: Written) -> list[tuple[Turn, ...]]:
    """Draw the conversations of a world: facts by popularity, and questions about strangers."""
    world = written.corpus.world
    rng = np.random.default_rng([world.recipe.seed, 9])
    weights = np.array([0.0 if fact.held_out else fact.weight**0.5 for fact in world.facts])
    drawn = rng.choice(len(weights), size=2 * world.recipe.conversations, p=weights / weights.sum())
    teller, stories = teller_of(world), stories_of(world, written.words, rng)
    return [_conversation(rng, teller, stories, pair) for pair in drawn.reshape(-1, 2).tolist()]


def _conversation(rng: np.random.Generator, teller: Teller, stories: Stories, pair: Sequence[int]) -> tuple[Turn, ...]:
    kind = rng.random()
    wish = None if kind < 0.3 else (SHORTLY if kind < 0.65 else FULLY)
    turns = [] if wish is None else [Turn("system", pick(rng, wish))]
    for number in pair[: 1 + int(rng.random() < 0.4)]:
        question, answer = _exchange(rng, teller, stories, number, in_full=wish is FULLY)
        turns += [Turn("user", question), Turn("assistant", answer)]
    return tuple(turns)


def _exchange(
    rng: np.random.Generator, teller: Teller, stories: Stories, number: int, *, in_full: bool
) -> tuple[str, str]:
    chance = rng.random()
    if chance < 0.12:
        relation = pick(rng, ASKED_OF_STRANGERS)
        return question_of(rng, relation, pick(rng, stories.strangers)), pick(rng, UNKNOWN)
    fact = teller.world.facts[number]
    sentence = pick(rng, wording_of(fact.relation).statements)
    if chance < 0.24:
        yes = rng.random() < 0.5
        word = fact.answers[0] if yes else teller.wrong(rng, fact)
        claim = inside(sentence, fact.subject, word)
        return f"Is it right that {claim}?", "Yes." if yes else "No."
    question = question_of(rng, fact.relation, fact.subject)
    return question, opened(rng, sentence, fact.subject, fact.answers[0]) if in_full else fact.answers[0]
