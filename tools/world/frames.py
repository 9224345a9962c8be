"""What the corpus tells beside the lines of the classical tasks: in other sentences, what they need of held-out words.

A held-out name has its gender told, a held-out noun its number; the lines of the tasks themselves are drawn here too.
"""

from collections.abc import Iterator

import numpy as np

from headwater.world.tasks import EVENTS, NEAR, OBJECTS, PLACES, STATES, TASKS, Line, Words, pick


def gender(rng: np.random.Generator, words: Words) -> str:
    """Tell the gender of any name, held out or not, in a sentence of another kind."""
    male = rng.random() < 0.5
    group = words.he if male else words.she
    name, thing = pick(rng, group.in_texts + group.held_out), pick(rng, OBJECTS)
    he, him, his, man = ("he", "him", "his", "man") if male else ("she", "her", "her", "woman")
    return pick(
        rng,
        (
            f"{name} is a {man}.",
            f"{name} lost {his} {thing}.",
            f"We saw {name} and thanked {him}.",
            f"{name} said that {he} is ready.",
            f"The {man} is called {name}.",
            f"{name} found a {thing} and {he} kept it.",
        ),
    )


def number(rng: np.random.Generator, words: Words) -> str:
    """Tell the number of any noun, held out or not, in a sentence of another kind."""
    noun = pick(rng, words.singular.in_texts + words.singular.held_out)
    many, state = words.plural[noun], pick(rng, STATES)
    return pick(
        rng,
        (
            f"The {noun} is {state}.",
            f"The {many} are {state}.",
            f"This {noun} and these {many}.",
            f"One {noun} is enough, two {many} are not.",
            f"There is a {noun}.",
            f"There are many {many}.",
        ),
    )


FRAMES = {"gender": gender, "number": number}


def lines(rng: np.random.Generator, words: Words, name: str, how_many: int) -> Iterator[tuple[Line, str]]:
    """Draw told lines of a task, each with the answer that the corpus says."""
    for _ in range(how_many):
        line = TASKS[name](rng, words, False)
        yield line, pick(rng, line.correct)


def task_words() -> list[str]:
    """Return the words that only the tasks' sentences need."""
    return [*PLACES, *OBJECTS, *EVENTS, *NEAR, *STATES]
