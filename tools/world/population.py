"""The invented part of the world: people, with a birthplace, a profession and an employer, and the books they wrote.

Names are drawn, never taken from anyone: first names come from the relation suite, family names are put together from
syllables, book titles from an adjective and a noun. Everything that an invented person is tied to is real and comes
from the suite (cities, jobs, companies), so that questions can be joined: person → city → country → capital.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

_ONSETS = "Al Bar Bel Cor Dal Den El Fal Gar Hal Hol Jen Kel Lan Lor Mar Mel Nor Or Pel Ral Ros Sal Sel Tal Tor Ul Ver"
_CODAS = (
    "berg den dorf ford gren ham holt kamp ley lund bach mond mere nek quist row rup sen stad strom ton vick voss wood"
)
_ADJECTIVES = (
    "Silver Broken Hidden Golden Quiet Burning Distant Frozen Crimson Hollow Scarlet Wandering Forgotten Endless"
)
_NOUNS = (
    "Harbour Garden River Mirror Tower Lantern Orchard Meadow Bridge Compass Winter Voyage Shadow Letter Island Clock "
    "Forest Window Crown Feather Valley Storm Candle Mountain Key Door Thread Harvest Road Stone Bell Desert Wheel Song"
)


@dataclass(frozen=True)
class Triple:
    """One invented fact."""

    subject: str
    relation: str
    target: str


def family_names() -> list[str]:
    """Return every family name, put together from two syllables."""
    return [first + second for first, second in product(_ONSETS.split(), _CODAS.split())]


def draw_people(rng: np.random.Generator, first_names: Sequence[str], how_many: int, families: int) -> list[str]:
    """Draw different full names, popular or not: the order says nothing yet."""
    last = rng.permutation(family_names())[:families]
    codes = rng.permutation(len(first_names) * len(last))[:how_many]
    return [f"{first_names[code // len(last)]} {last[code % len(last)]}" for code in codes.tolist()]


def draw_population(
    rng: np.random.Generator, people: Sequence[str], titles: int, choices: dict[str, Sequence[str]]
) -> list[Triple]:
    """Draw the facts of every person and the author of every book.

    Args:
        rng: where every draw comes from.
        people: the full names.
        titles: how many books there are (at most `len(book_titles())`).
        choices: for each relation of a person, what it may be; some are common and some are rare.
    """
    triples = []
    for relation, targets in choices.items():
        order = rng.permutation(targets)
        weights = (1.0 + np.arange(len(order))) ** -0.75
        drawn = rng.choice(order, size=len(people), p=weights / weights.sum())
        triples += [Triple(person, relation, str(target)) for person, target in zip(people, drawn, strict=True)]
    authors = rng.choice(np.array(people, dtype=object), size=titles)
    books = rng.permutation(book_titles())[:titles]
    return triples + [Triple(str(book), "author", str(author)) for book, author in zip(books, authors, strict=True)]


def book_titles() -> list[str]:
    """Return every title that can be made."""
    pairs = product(_ADJECTIVES.split(), _NOUNS.split())
    return [title for a, n in pairs for title in (f"The {a} {n}", f"A {a} {n}")]
