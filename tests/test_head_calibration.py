"""The controlled rule on models that have nothing to be found, and on heads that know a part of a relation.

Where every call is false, a false-discovery rate of 5 % means that any call at all is made in 5 % of the cases.
"""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
import torch
from scipy.stats import binomtest

import headwater as hw
from headwater.heads.categories import PREFIXES, apply_rule
from headwater.heads.relations import Relation, TokenRelation
from headwater.heads.scores import score_layer, score_table, suite_pairs
from headwater.kernels.ov import OVMaps, first_tokens, longest_column
from headwater.stats.significance import q_values
from tests import chance
from tests.naive_heads import random_relation
from tests.tiny import FAMILIES, embedded, tiny_folder

pytestmark = pytest.mark.planted

TRAINED = ("country_to_nationality", "sequence_to_next", "country_to_continent")
"""Relations of which the embedded model has heads, the last only by habit."""


def calls(table: pd.DataFrame) -> int:
    """How many heads the controlled rule calls, were these rows everything that was tested."""
    p = table[[f"{prefix}p_value" for prefix in PREFIXES.values()]].to_numpy()
    q = q_values(p)
    table = table.assign(**{f"{prefix}q_value": q[:, i] for i, prefix in enumerate(PREFIXES.values())})
    return int(apply_rule(table, "controlled", 0.15)[["implemented", "suppressed"]].any(axis=1).sum())


def is_rare(cases: int, of: int, level: float) -> bool:
    """Whether so many cases of so many could well come of the level."""
    return binomtest(cases, of, level, "greater").pvalue > 1e-3


def shuffled(relation: Relation, number: int) -> Relation:
    """The relation with its targets dealt to its sources at random."""
    sources, targets = zip(*relation.pairs, strict=True)
    dealt = random.Random(f"{chance.seed_of('dealt')} {number}").sample(targets, len(targets))
    return dataclasses.replace(
        relation, name=f"{relation.name} {number}", pairs=tuple(zip(sources, dealt, strict=True))
    )


def shuffles_called(n: int) -> tuple[list[int], pd.DataFrame, pd.DataFrame]:
    """Classify the embedded model's heads on its relations and on so many shuffles of them.

    Returns:
        The number of calls for each shuffle, the rows of all shuffles, and those of the relations themselves.
    """
    relations = hw.load_relations(TRAINED)
    dealt = [[shuffled(relation, number) for relation in relations] for number in range(n)]
    asked = [*relations, *(one for some in dealt for one in some)]
    table = hw.classify_heads(embedded(), relations=asked, progress=False).table
    rows = [table[table["relation"].isin([one.name for one in some])] for some in dealt]
    return [calls(some) for some in rows], pd.concat(rows), table[table["relation"].isin(TRAINED)]


@pytest.mark.parametrize("n", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_shuffled_targets_of_a_trained_model_are_hardly_ever_called(n):
    called, shuffles, real = shuffles_called(n)
    assert is_rare(sum(count > 0 for count in called), n, 0.05)
    assert sum(called) <= 1 + n // 10
    for prefix in PREFIXES.values():
        p = shuffles[f"{prefix}p_value"]
        assert is_rare(int((p <= 0.01).sum()), len(p), 0.01)
    by_score = apply_rule(shuffles, "published", 0.15)
    assert by_score.any(axis=1).sum() > 2 * n  # habits, which the published rule calls
    assert calls(real) >= 4


def random_models(folder: Path, n: int) -> list[pd.DataFrame]:
    """The rows of so many random models, of all families in turn, on a random relation, some items with two targets."""
    tables = []
    for number in range(n):
        seed = chance.seed_of(f"model {number}") % 10**6
        model = tiny_folder(folder / str(number), FAMILIES[number % len(FAMILIES)], seed=seed)
        facts = random_relation("facts", "knowledge", seed, pairs=50, most_targets=2)
        tables.append(hw.classify_heads(model, relations=facts, progress=False).table)
    return tables


@pytest.mark.parametrize("n", [24, pytest.param(240, marks=pytest.mark.slow)])
def test_random_models_are_hardly_ever_called(tmp_path, n):
    tables = random_models(tmp_path, n)
    assert is_rare(sum(calls(table) > 0 for table in tables), n, 0.05)
    rows = pd.concat(tables)
    for prefix in PREFIXES.values():
        p = rows[f"{prefix}p_value"]
        assert is_rare(int((p <= 0.05).sum()), len(p), 0.05)


def planted_in_noise(shares: Sequence[float], items: int, habit: float, seed: int) -> pd.DataFrame:
    """Score heads of random logits, each of which knows a share of a relation and has a habit besides.

    Each head maps a share of the sources to their own target, far above everything else; and, with a habit, the half of
    all sources to the commonest target. Every fifth source has that one as its right answer.
    """
    generator = torch.Generator().manual_seed(seed)
    d_vocab = 500 + items
    maps = torch.randn(len(shares), items, d_vocab, generator=generator)
    target = torch.arange(items)
    target[::5] = 0
    for head, share in enumerate(shares):
        order = torch.randperm(items, generator=generator)
        known = order[: round(share * items)]
        maps[head, known, target[known]] = 10.0
        maps[head, torch.randperm(items, generator=generator)[: round(habit * items)], 0] = 9.0
    every_token = torch.eye(d_vocab)
    x = every_token[500:]
    ov = OVMaps(x, x.T[None], maps, every_token, longest_column(every_token), first_tokens(every_token, 64))
    accepted = tuple((one,) for one in target.tolist())
    tokens = TokenRelation(Relation("known", "knowledge", ()), torch.arange(500, d_vocab), accepted, pd.DataFrame())
    return score_table([score_layer(ov, suite_pairs([tokens], [10]), null_from=0.0)], [tokens])


@pytest.mark.parametrize("habit", [0.0, 0.5])
def test_heads_that_know_a_part_of_a_relation_are_found_from_the_threshold_on(habit):
    """Twenty-four heads for each share, in noise: none that knows nothing, all that know a fourth or more."""
    shares = (0.0, 0.05, 0.25, 0.4, 1.0)
    heads = [share for share in shares for _ in range(24)]
    table = planted_in_noise(heads, 60, habit, chance.seed_of("noise"))
    found = apply_rule(table, "controlled", 0.15)["implemented"].groupby(pd.Series(heads)).sum()
    assert found[0.0] + found[0.05] <= 1
    assert (found[[0.25, 0.4, 1.0]] == 24).all()
    excess = table["excess"].groupby(pd.Series(heads)).mean()
    assert excess[[0.25, 0.4, 1.0]].to_numpy() == pytest.approx([0.25, 0.4, 1.0], abs=0.05)
