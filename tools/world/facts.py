"""The facts of the world: real ones from the relation suite, invented ones about people and books, and joined ones.

1. Real: pairs of the suite, as facts (source, relation, accepted targets).
2. Invented: people and books (`population`), whose targets are real cities, jobs and companies.
3. Joined: a chain of two or three facts read as one, "the country where X was born" = birth city, then its country.
   Its depth is the number of facts in the chain.
4. Held out: a share of the facts is never told, together with every fact between the same two names and every chain
   through it.
5. Popularity: subjects get a rank, real ones and invented ones apart, members of an invented family near one another;
   a fact is told in proportion to (rank / N + shift)^-exponent.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tools.world.population import draw_people, draw_population
from tools.world.recipe import Recipe

from headwater.heads.relations import Pair, Relation

CHAINS: dict[str, tuple[str, ...]] = {
    "birth_country": ("birth_city", "city_to_country"),
    "birth_language": ("birth_city", "city_to_country", "country_to_language"),
    "birth_continent": ("birth_city", "city_to_country", "country_to_continent"),
    "birth_capital": ("birth_city", "city_to_country", "country_to_capital"),
    "birth_currency": ("birth_city", "city_to_country", "country_to_currency"),
    "city_language": ("city_to_country", "country_to_language"),
    "city_continent": ("city_to_country", "country_to_continent"),
    "city_capital": ("city_to_country", "country_to_capital"),
    "city_currency": ("city_to_country", "country_to_currency"),
    "work_place": ("profession", "job_to_workplace"),
    "employer_country": ("employer", "company_to_country"),
    "product_country": ("product_to_company", "company_to_country"),
    "author_city": ("author", "birth_city"),
    "author_profession": ("author", "profession"),
    "author_country": ("author", "birth_city", "city_to_country"),
    "author_workplace": ("author", "profession", "job_to_workplace"),
}
CHAIN_OF = {chain: name for name, chain in CHAINS.items()}


@dataclass(frozen=True)
class Fact:
    """One thing that can be asked: a subject, a relation, and every accepted answer (the first is the one told)."""

    subject: str
    relation: str
    answers: tuple[str, ...]
    category: str
    """The category of the suite's relation, "invented", or "joined"."""
    path: tuple[int, ...] = ()
    """The facts that a joined one goes through, by number, first hop first."""
    held_out: bool = False
    weight: float = 0.0
    """How often it is told, in proportion to the other facts of its kind (real, invented, joined)."""

    @property
    def depth(self) -> int:
        """How many facts have to be joined to answer it."""
        return max(1, len(self.path))

    @property
    def kind(self) -> str:
        """Return "real", "invented" or "joined"."""
        return self.category if self.category in ("invented", "joined") else "real"


@dataclass(frozen=True)
class World:
    """All facts, numbered by their place, and the recipe that made them."""

    facts: tuple[Fact, ...]
    recipe: Recipe

    @cached_property
    def number(self) -> dict[tuple[str, str], int]:
        """The number of the fact with this (relation, subject)."""
        return {(fact.relation, fact.subject): i for i, fact in enumerate(self.facts)}


def build_world(relations: Sequence[Relation], recipe: Recipe) -> World:
    """Make every fact of the world from the suite, the recipe and its seed."""
    rng = np.random.default_rng([recipe.seed, 1])
    relations = choose_pairs(relations, recipe)
    real = [
        Fact(source, relation.name, targets, relation.category or "")
        for relation in relations
        for source, targets in relation.pairs
    ]
    single = real + _invented(rng, relations, recipe)
    single = _ranked(rng, _hold_out(rng, single, recipe.held_out), recipe)
    return World(tuple(single + _joined(rng, single)), recipe)


def choose_pairs(relations: Sequence[Relation], recipe: Recipe) -> list[Relation]:
    """Keep the pairs of the suite that the world tells: those whose words come in the most relations.

    A small model has room for some thousands of words only; words that many relations share leave room for facts.
    """
    uses = Counter(
        word
        for relation in relations
        for word in {w for source, targets in relation.pairs for w in (source, targets[0])}
    )

    def shared(pair: Pair) -> tuple[int, str]:
        return -uses[pair[0]] - uses[pair[1][0]], pair[0]

    def kept(relation: Relation) -> tuple[Pair, ...]:
        size = recipe.knowledge_pairs if relation.category == "knowledge" else recipe.other_pairs
        return tuple(sorted(sorted(relation.pairs, key=shared)[:size]))

    return [replace(relation, pairs=kept(relation)) for relation in relations]


def _invented(rng: np.random.Generator, relations: Sequence[Relation], recipe: Recipe) -> list[Fact]:
    pairs = {relation.name: dict(relation.pairs) for relation in relations}
    countries = set(pairs["country_to_capital"]) & set(pairs["country_to_language"]) & set(pairs["country_to_currency"])
    placed = [city for city, where in pairs["city_to_country"].items() if countries & set(where)]
    choices = {
        "birth_city": rng.permutation(sorted(placed))[: recipe.birth_cities].tolist(),
        "profession": sorted(pairs["job_to_workplace"]),
        "employer": sorted(pairs["company_to_country"]),
    }
    people = draw_people(rng, first_names(relations), recipe.people, recipe.family_names)
    triples = draw_population(rng, people, recipe.titles, choices)
    return [Fact(t.subject, t.relation, (t.target,), "invented") for t in triples]


def first_names(relations: Iterable[Relation]) -> list[str]:
    """Return the first names of the suite (its name-copying relation), one word each."""
    named = (relation for relation in relations if relation.is_copying and "name" in relation.name)
    return sorted({source for relation in named for source, _ in relation.pairs if source.isalpha()})


def _hold_out(rng: np.random.Generator, facts: Sequence[Fact], share: float) -> list[Fact]:
    pairs = [{frozenset((fact.subject, answer)) for answer in fact.answers} for fact in facts]
    chosen = [pair for pair, out in zip(pairs, rng.random(len(facts)) < share, strict=True) if out]
    hidden = {names for pair in chosen for names in pair}
    return [replace(fact, held_out=bool(pair & hidden)) for fact, pair in zip(facts, pairs, strict=True)]


def _ranked(rng: np.random.Generator, facts: Sequence[Fact], recipe: Recipe) -> list[Fact]:
    ranks: dict[tuple[str, str], float] = {}
    for kind, family_share in (("real", 0.0), ("invented", recipe.family_share)):
        subjects = sorted({fact.subject for fact in facts if fact.kind == kind})
        places = _places(rng, subjects, family_share)
        ranks |= {(kind, subject): place for subject, place in zip(subjects, places.tolist(), strict=True)}
    shift = {"real": recipe.shift_real, "invented": recipe.shift_invented}
    noise = np.exp(0.25 * rng.standard_normal(len(facts)))
    return [
        replace(fact, weight=float((ranks[fact.kind, fact.subject] + shift[fact.kind]) ** -recipe.exponent * jitter))
        for fact, jitter in zip(facts, noise, strict=True)
    ]


def _places(rng: np.random.Generator, subjects: Sequence[str], family_share: float) -> NDArray[np.float64]:
    """Rank subjects from 0 (most popular) to 1; those with the same last word, a family, are near one another."""
    families = [subject.split()[-1] for subject in subjects]
    family = dict(zip(sorted(set(families)), rng.random(len(set(families))), strict=True))
    own = rng.random(len(subjects))
    mixed = family_share * np.array([family[name] for name in families]) + (1 - family_share) * own
    return np.argsort(np.argsort(mixed)) / len(subjects)


def _joined(rng: np.random.Generator, single: Sequence[Fact]) -> list[Fact]:
    """Read every chain of `CHAINS` from every subject that has one; a part of them is never told as a chain."""
    starts: dict[str, list[int]] = defaultdict(list)
    number = {}
    for i, fact in enumerate(single):
        number[fact.relation, fact.subject] = i
        starts[fact.relation].append(i)
    joined = []
    for name, chain in CHAINS.items():
        for start in starts[chain[0]]:
            path = _follow(single, number, start, chain[1:])
            if path:
                facts = [single[i] for i in path]
                told = rng.random() < 0.6
                joined.append(
                    Fact(
                        facts[0].subject,
                        name,
                        facts[-1].answers,
                        "joined",
                        path,
                        any(fact.held_out for fact in facts),
                        facts[0].weight * told,
                    )
                )
    return joined


def _follow(
    facts: Sequence[Fact], number: dict[tuple[str, str], int], start: int, chain: Sequence[str]
) -> tuple[int, ...]:
    path = [start]
    for relation in chain:
        steps = (number.get((relation, answer)) for answer in facts[path[-1]].answers)
        step = next((i for i in steps if i is not None), None)
        if step is None:
            return ()
        path.append(step)
    return tuple(path)
