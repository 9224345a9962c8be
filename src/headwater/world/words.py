"""The words that the classical tasks are made of, from the relation suite: told in a task, or held out of it.

Held out of a task does not mean unknown: a held-out name has its gender told in other sentences, a held-out noun its
number, a held-out word its facts. Only the sentences of the task itself never hold it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headwater.errors import InputError
from headwater.models.packaged import world_folder
from headwater.runs.storage import read_json

TWO_DIGITS = tuple(f"{number:02d}" for number in range(100))
CENTURIES = (16, 17, 18, 19)
WORDS = "task_words.json"
SPLITS = ("names", "he", "she", "singular", "plain", "starts")


@dataclass(frozen=True)
class Split:
    """Words that the texts of a task use, and words held out of them."""

    told: tuple[str, ...]
    held_out: tuple[str, ...]

    def of(self, held_out: bool) -> tuple[str, ...]:
        """Return the ones or the others."""
        return self.held_out if held_out else self.told


@dataclass(frozen=True)
class Words:
    """What the tasks are made of."""

    names: Split
    """First and family names. They are many more than the model is wide: what is done with the told ones has to be a
    rule, since no table of single names fits."""
    he: Split
    """The names of men among them."""
    she: Split
    singular: Split
    plain: Split
    """Words of all kinds, for repetitions."""
    starts: Split
    """The last two digits of a first year."""
    plural: Mapping[str, str]
    runs: tuple[tuple[str, ...], ...]
    """Things that follow one another."""
    capitals: tuple[tuple[str, str], ...]

    @property
    def every(self) -> list[str]:
        """Every word that a line of a task may hold."""
        splits = (self.names, self.singular, self.plain)
        split = [word for one in splits for word in (*one.told, *one.held_out)]
        return [*split, *self.plural.values(), *sum(self.runs, ()), *sum(self.capitals, ())]


def pick(rng: np.random.Generator, words: Sequence[str]) -> str:
    """Draw one word."""
    return words[int(rng.integers(len(words)))]


def read_words(world: Path | None = None) -> Words:
    """Read the words of a world's tasks.

    Args:
        world: the folder of a trained world; None for the embedded model's.
    """
    folder = world or world_folder()
    if not (folder / WORDS).is_file():
        raise InputError(f"{folder} has no {WORDS}: give the folder of a trained world.")
    values = read_json(folder / WORDS)
    try:
        splits = {name: Split(*map(tuple, values[name].values())) for name in SPLITS}
        runs, capitals = (tuple(tuple(row) for row in values[name]) for name in ("runs", "capitals"))
        return Words(**splits, plural=dict(values["plural"]), runs=runs, capitals=capitals)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise InputError(f"{folder / WORDS} does not hold the words of tasks: train that world again.") from None
