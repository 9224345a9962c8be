"""The words that the classical tasks are made of, from the relation suite: told in a task, or held out of it.

Held out of a task does not mean unknown: a held-out name has its gender told in other sentences, a held-out noun its
number, a held-out word its facts. Only the sentences of the task itself never hold it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headwater.errors import InputError
from headwater.heads.relations import Relation
from headwater.models.embedded import world_folder
from headwater.runs.storage import read_json, write_json
from headwater.world.recipe import Recipe

TWO_DIGITS = tuple(f"{number:02d}" for number in range(100))
CENTURIES = (16, 17, 18, 19)
WORDS = "task_words.json"
SPLITS = ("names", "he", "she", "singular", "plain", "starts")
MOST_NOUNS = 400


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


def choose_words(relations: Sequence[Relation], plain: Sequence[str], recipe: Recipe) -> Words:
    """Draw which words the tasks use.

    Args:
        relations: the whole suite.
        plain: the words of the world, for repetitions.
        recipe: its seed and `held_out_words` decide which are held out.
    """
    rng = np.random.default_rng([recipe.seed, 7])
    pairs = {relation.name: dict(relation.pairs) for relation in relations}
    pronoun = {word: targets[0] for word, targets in pairs["noun_to_pronoun"].items()}
    plural = {one: many[0] for one, many in pairs["noun_to_plural"].items() if one.islower() and one != many[0]}
    nouns = sorted(rng.permutation(sorted(plural))[:MOST_NOUNS].tolist())

    def split(words: Sequence[str]) -> Split:
        order = [str(word) for word in rng.permutation(sorted(words))]
        held = round(len(order) * recipe.held_out_words)
        return Split(tuple(order[held:]), tuple(order[:held]))

    def who_are(said: str) -> Split:
        return Split(
            *(tuple(name for name in part if pronoun.get(name) == said) for part in (names.told, names.held_out))
        )

    names = split([name for name in pairs["name_copying"] if name.isalpha()])
    return Words(
        names=names,
        he=who_are("he"),
        she=who_are("she"),
        singular=split(nouns),
        plain=split(plain),
        starts=split(TWO_DIGITS[2:90]),
        plural={noun: plural[noun] for noun in nouns},
        runs=tuple(_runs(pairs)),
        capitals=tuple(
            (country, names[0])
            for country, names in sorted(pairs["country_to_capital"].items())
            if country.isalpha() and names[0].isalpha()
        ),
    )


def pick(rng: np.random.Generator, words: Sequence[str]) -> str:
    """Draw one word."""
    return words[int(rng.integers(len(words)))]


def write_words(words: Words, world: Path) -> None:
    """Write the words of a world's tasks into its folder."""
    write_json(world / WORDS, dataclasses.asdict(words))


def read_words(world: Path | None = None) -> Words:
    """Read the words of a world's tasks.

    Args:
        world: the folder of a trained world; None for the embedded model's.

    Raises:
        InputError: the folder is of no world, or its words are not such.
    """
    folder = world or world_folder()
    if not (folder / WORDS).is_file():
        raise InputError(f"{folder} has no {WORDS}: give a folder that `python -m headwater.world train` wrote.")
    values = read_json(folder / WORDS)
    try:
        splits = {name: Split(*map(tuple, values[name].values())) for name in SPLITS}
        runs, capitals = (tuple(tuple(row) for row in values[name]) for name in ("runs", "capitals"))
        return Words(**splits, plural=dict(values["plural"]), runs=runs, capitals=capitals)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise InputError(f"{folder / WORDS} does not hold the words of tasks: train that world again.") from None


def _runs(pairs: Mapping[str, Mapping[str, tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Chain the pairs of "what comes next" into runs of at least five; a circle is opened and closed once more."""
    after = {word: targets[0] for word, targets in pairs["sequence_to_next"].items()}
    starts = [word for word in after if word not in set(after.values())] + sorted(after)
    seen: set[str] = set()
    runs = []
    for start in starts:
        if start in seen:
            continue
        run = [start]
        while run[-1] in after and after[run[-1]] not in run and after[run[-1]] not in seen:
            run.append(after[run[-1]])
        seen |= set(run)
        if after.get(run[-1]) == start:
            run += run[: min(4, len(run) - 1)]
        if len(run) >= 5:
            runs.append(tuple(run))
    letters = tuple(chr(ord("A") + k) for k in range(26))
    numbers = [tuple(map(str, range(start, start + 40))) for start in range(0, 200, 20)]
    return [*runs, letters, *numbers]
