"""Relations of made-up words, for planted models."""

import dataclasses

import headwater as hw
from headwater.heads.relations import Relation
from tests.tiny import tiny_tokenizer


def word(prefix: str, index: int) -> str:
    """A made-up word: the prefix and two letters."""
    return f"{prefix}{chr(97 + index // 26)}{chr(97 + index % 26)}"


def relation(name: str, category: str, n: int, targets: int | None = None, accepted: int = 1) -> Relation:
    """A relation of n sources to `targets` different words (default: each to its own), `accepted` for each source."""
    different = targets or n
    pairs = tuple(
        (word(f"{name}from", i), tuple(word(f"{name}to", i % different + different * j) for j in range(accepted)))
        for i in range(n)
    )
    return Relation(name, category, pairs)


SUITE = {one.name: one for one in hw.load_relations()}

CAPITALS, OPPOSITES = (
    dataclasses.replace(SUITE[name], pairs=SUITE[name].pairs[:40]) for name in ("country_to_capital", "word_to_antonym")
)

CHOSEN = [CAPITALS, OPPOSITES]

WORDS = [word for one in CHOSEN for source, targets in one.pairs for word in (source, *targets)]


TEMPLATES = ("We asked about {source} and", "The notes on {source} say:")


def random_words(n=31):
    """A random model of words that are each one token, and a relation among them."""
    shuffled = relation("random", "knowledge", n, accepted=2)
    words = [word for source, targets in shuffled.pairs for word in (source, *targets)]
    return shuffled, tiny_tokenizer([*words, "We", "asked", "about", "and", "The", "notes", "on", "say"])
