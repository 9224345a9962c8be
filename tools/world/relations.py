"""The relations that the embedded models were trained on, pinned: the suite may grow, and their world stays.

One more relation in the corpus changes the weight of nearly every fact. `relations.json` has the name of each relation
that the world tells, and the SHA-256 of its name, category and pairs.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from headwater.errors import InputError
from headwater.heads.relations import Relation
from headwater.runs.storage import read_json, write_json

PINNED = Path(__file__).with_name("relations.json")


def digest_of(relation: Relation) -> str:
    """Return the SHA-256 of a relation's name, category and pairs."""
    return hashlib.sha256(json.dumps([relation.name, relation.category, relation.pairs]).encode()).hexdigest()


def pinned_relations(relations: Iterable[Relation]) -> list[Relation]:
    """Keep the pinned ones, in the order given.

    Raises:
        InputError: a pinned relation is missing or has changed.
    """
    pinned = read_json(PINNED)
    kept = [relation for relation in relations if relation.name in pinned]
    if missing := sorted(set(pinned) - {relation.name for relation in kept}):
        raise InputError(f"The relations {missing} of the world are missing: give the whole suite.")
    if changed := [relation.name for relation in kept if digest_of(relation) != pinned[relation.name]]:
        raise InputError(
            f"The relations {changed} are not those that the embedded models were trained on: their hashes differ from "
            "those in tools/world/relations.json. Undo the change; or pin them anew, and train both models again."
        )
    return kept


def pin(relations: Sequence[Relation]) -> None:
    """Write the names and hashes of the relations of a new world."""
    write_json(PINNED, {relation.name: digest_of(relation) for relation in relations})
