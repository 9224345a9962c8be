"""Relations of made-up words, for planted models."""

from headwater.heads.relations import Relation


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
