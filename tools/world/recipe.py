"""Every number that decides the world and the model: a recipe and a seed make the same world, corpus and weights.

A recipe is a JSON object with the names below; what it leaves out has the default.
`python -m tools.world recipe` writes the defaults as a file to begin from.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.data.strict_json import parse_json
from headwater.errors import InputError, did_you_mean
from headwater.options import checked_path
from headwater.runs.storage import write_json

SHARES = {
    "real": 0.3,
    "invented": 0.27,
    "joined": 0.07,
    "stories": 0.06,
    "strangers": 0.01,
    "said": 0.07,
    "induction": 0.05,
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
"""How the documents are divided among their kinds (`corpus.written`)."""

FROM_ZERO = ("seed", "notes", "copying_layers", "looking_still")
"""The whole numbers that may be 0."""


@dataclass(frozen=True)
class Recipe:
    """How large the world is, how often its facts are told, and how the models are shaped and trained."""

    seed: int = 0

    knowledge_pairs: int = 200
    other_pairs: int = 100
    """At most so many pairs of each relation of the suite are facts of the world."""
    people: int = 2500
    family_names: int = 250
    titles: int = 600
    birth_cities: int = 200
    held_out: float = 0.03
    """Share of the facts that no text of the corpus tells."""
    asked: float = 0.7
    """Share of the questions that the corpus asks word for word; the others are new to the model."""
    held_out_words: float = 0.1
    """Share of the words, names, nouns and years of the tasks with which no text tells the task."""

    documents: int = 800_000
    shares: dict[str, float] = field(default_factory=SHARES.copy)
    copying_documents: int = 75_000
    """Texts that say random words twice, read first, with embedding and unembedding held still."""
    notes: int = 300
    """Random texts told once; as many are told 2, 4, 8, 16 and 32 times, and as many are never told."""
    exponent: float = 2.0
    """A fact of popularity rank r of N is told in proportion to (r/N + shift)^-exponent (Zipf–Mandelbrot)."""
    family_share: float = 0.7
    """How much of an invented person's popularity is the family's, as the names of known people are known names."""
    shift_real: float = 0.3
    shift_invented: float = 0.25

    layers: int = 6
    width: int = 160
    heads: int = 16
    kv_heads: int = 16
    d_head: int = 16
    d_mlp: int = 160
    tied: bool = False
    context: int = 256
    embedding_scale: float = 0.1
    """Standard deviation of the token embeddings at the start; no larger than what the first MLP adds to them."""
    common: float = 1.0
    """Length of what all token embeddings have in common at the start, beside the length of what is each one's own."""
    looking: float = 4.0
    """By how many nats heads that look back prefer, at the start, the token looked at to its neighbour."""
    looking_every: int = 2
    """The first layer and every so many after it look back; the layers between begin by matching tokens alone."""
    looking_still: int = 4
    """So many heads of the first layer look one token back, and go on doing so: their queries and keys stay as they
    begin. The others begin by matching tokens alone."""
    copying_layers: int = 2
    """In so many of the first layers a head begins by writing what it reads; the layers above write nothing."""
    copying_gain: float = 2.0

    row: int = 128
    """Tokens of a training row."""
    rows_per_step: int = 32
    learning_rate: float = 3e-3
    embedding_rate: float = 0.5
    unembedding_rate: float = 1.0
    """Learning rates of the two, as shares of the others'."""
    mlps_left_out: float = 0.5
    """The share of the rows in which each MLP above the first adds nothing, so that heads learn to write answers."""
    heads_left_out: float = 0.0
    """The share of the rows in which each head writes nothing, so that no relation rests on one head alone."""
    weight_decay: float = 0.05
    warmup: float = 0.02
    flat: float = 0.6
    """The share of the steps after which the learning rate begins to fall."""
    other_positions: float = 0.25
    """The loss counts every answer token and this share of the other tokens."""
    checkpoint_every: int = 250
    conversations: int = 60_000
    """Conversations that the instruct model reads after all this, once."""
    instruct_rate: float = 1e-3

    questions: int = 2500
    """Questions of each set."""
    graphs: int = 150
    """Questions of depth 3 that the depth graph takes apart."""
    texts: int = 800
    """Membership texts of each kind."""


def read_recipe(file: str | Path) -> Recipe:
    """Read a recipe: a JSON object with some of the names of `Recipe`.

    Raises:
        InputError: there is no such file, it is no JSON object, a name is not of a recipe, or a value is
            of another kind.
    """
    path = checked_path("file", file)
    try:
        values = parse_json(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"The recipe {file} cannot be read: {error}.") from None
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
    heads, groups = (values.get(name, defaults[name]) for name in ("heads", "kv_heads"))
    if heads % groups:
        raise InputError(f"{where}: kv_heads must divide heads, found {groups} and {heads}.")
    if (width := values.get("width", defaults["width"])) % heads:
        raise InputError(f"{where}: heads must divide width, found {heads} and {width}.")
    if (still := values.get("looking_still", defaults["looking_still"])) > heads:
        raise InputError(f"{where}: looking_still must be at most heads, found {still} and {heads}.")
    for name in ("mlps_left_out", "heads_left_out"):
        if values.get(name, defaults[name]) >= 1:
            raise InputError(f"{where}: {name} must be less than 1, found {values[name]}: nothing would be left.")
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
    least = int(whole and name not in FROM_ZERO)
    if not isinstance(value, bool) and not least <= value < float("inf"):
        raise InputError(f"{where}: {name} must be a finite number of at least {least}, found {value!r}.")


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
