"""Every number that decides the world and the model: a recipe and a seed make the same world, corpus and weights.

A recipe is a JSON object with the names below; what it leaves out has the default.
`python -m headwater.world.second recipe` writes the defaults as a file to begin from.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.errors import InputError, RunFolderError, did_you_mean
from headwater.runs.storage import read_json, write_json
from headwater.world import recipe as first

SHARES = {
    "real": 0.31,
    "invented": 0.31,
    "joined": 0.07,
    "stories": 0.06,
    "strangers": 0.01,
    "induction": 0.07,
    "indirect_object": 0.05,
    "greater_than": 0.02,
    "successor": 0.02,
    "gendered_pronoun": 0.015,
    "gender": 0.015,
    "agreement": 0.015,
    "number": 0.015,
    "capital": 0.01,
    "lists": 0.01,
}
"""How the documents are divided among their kinds (`corpus.KINDS`)."""


@dataclass(frozen=True)
class Recipe(first.Recipe):
    """How large the world is, how often its facts are told, and how the model is shaped and trained."""

    people: int = 4500
    family_names: int = 350
    other_pairs: int = 100
    titles: int = 900

    documents: int = 2_000_000
    shares: dict[str, float] = field(default_factory=SHARES.copy)
    copying_documents: int = 75_000
    """Texts that say random words twice, read first, with embedding and unembedding held still."""
    notes: int = 300
    """Random texts told once; as many are told 2, 4, 8, 16 and 32 times, and as many are never told."""
    held_out_words: float = 0.1
    """Share of the words, names, nouns and years of the tasks with which no text tells the task."""

    layers: int = 6
    width: int = 160
    heads: int = 8
    kv_heads: int = 8
    d_head: int = 24
    d_mlp: int = 400
    common: float = 1.0
    """Length of what all token embeddings have in common at the start, beside the length of what is each one's own."""
    looking: float = 3.0
    """By how many nats heads of the first layer prefer, at the start, the token looked at to its neighbour."""
    copying_layers: int = 2
    """In so many of the first layers a head begins by writing what it reads; the layers above write nothing."""
    copying_gain: float = 4.0

    row: int = 128
    rows_per_step: int = 32
    learning_rate: float = 3e-3
    embedding_rate: float = 0.5
    unembedding_rate: float = 0.1
    """Learning rates of the two, as shares of the others': words that no text copies must stay like those copied."""
    flat: float = 0.6
    """The share of the steps after which the learning rate begins to fall."""

    conversations: int = 60_000
    """Conversations that the instruct model reads after all this, once."""
    instruct_rate: float = 1e-3


def read_recipe(file: str | Path) -> Recipe:
    """Read a recipe: a JSON object with some of the names of `Recipe`.

    Raises:
        InputError: there is no such file, it is no JSON object, a name is not of a recipe, or a value is
            of another kind.
    """
    try:
        values = read_json(Path(file))
    except (OSError, RunFolderError) as error:
        raise InputError(f"The recipe {file} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise InputError(
            f"The recipe {file} must be a JSON object, as {{'people': 300}}; found {type(values).__name__}."
        )
    return recipe_of_values(values, str(file))


def recipe_of_values(values: dict[str, Any], where: str = "The recipe") -> Recipe:
    """Make a recipe of some of its values.

    Raises:
        InputError: a name is not of a recipe, or a value is of another kind or out of its range.
    """
    defaults = dataclasses.asdict(Recipe())
    for name, value in values.items():
        if name not in defaults:
            raise InputError(f"{where} has {name!r}, which no recipe has.{did_you_mean(name, defaults)}")
        _check(where, name, value, defaults[name])
    if isinstance(values.get("shares"), dict):
        values = values | {"shares": {name: float(share) for name, share in values["shares"].items()}}
    return Recipe(**values)


def write_recipe(recipe: Recipe, file: Path) -> None:
    """Write a recipe as a file that `read_recipe` reads."""
    write_json(file, dataclasses.asdict(recipe))


def _check(where: str, name: str, value: Any, default: Any) -> None:
    if isinstance(default, dict):
        _check_shares(where, value)
        return
    whole = isinstance(default, int) and not isinstance(default, bool)
    kinds = bool if isinstance(default, bool) else (int if whole else (int, float))
    if not isinstance(value, kinds) or (not isinstance(default, bool) and isinstance(value, bool)):
        wanted = "a whole number" if whole else ("true or false" if isinstance(default, bool) else "a number")
        raise InputError(f"{where}: {name} must be {wanted}, found {value!r}.")
    if not isinstance(value, bool) and not 0 <= value < float("inf"):
        raise InputError(f"{where}: {name} must be a finite number of at least 0, found {value!r}.")


def _check_shares(where: str, shares: Any) -> None:
    if not isinstance(shares, dict):
        raise InputError(f"{where}: shares must be an object of kinds and their shares, found {shares!r}.")
    for kind, share in shares.items():
        if kind not in SHARES:
            raise InputError(f"{where}: shares has {kind!r}, no kind of document.{did_you_mean(kind, SHARES)}")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise InputError(f"{where}: the share of {kind} must lie between 0 and 1, found {share!r}.")
    if not 0 < sum(shares.values()) <= 1 + 1e-9:
        raise InputError(f"{where}: the shares add up to {sum(shares.values()):.3g}; they must not exceed 1.")
