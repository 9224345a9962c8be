"""Draws the words that the classical tasks are made of from the relation suite, and writes them beside the models."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tools.world.recipe import Recipe

from headwater.heads.relations import Relation
from headwater.runs.storage import write_json
from headwater.world.tasks import TWO_DIGITS, WORDS, Split, Words

MOST_NOUNS = 400


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

    def who_are(wanted: str) -> Split:
        return Split(
            *(tuple(name for name in part if pronoun.get(name) == wanted) for part in (names.in_texts, names.held_out))
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


def write_words(words: Words, world: Path) -> None:
    """Write the words of a world's tasks into its folder."""
    write_json(world / WORDS, dataclasses.asdict(words))


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
