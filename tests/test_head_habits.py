"""A habit, however strong, classifies no head under the controlled rule; nor does copying, or saying the same twice.

A habit writes the same favourite answers whatever the relation wants, after all sources or after a random part of them.
"""

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binomtest
from transformers import GPT2Config, GPT2LMHeadModel

import headwater as hw
from headwater.heads.categories import apply_rule
from headwater.heads.relations import Relation, TokenRelation
from headwater.heads.scores import score_layer, score_table, suite_pairs
from headwater.kernels.ov import OVMaps, first_tokens
from headwater.stats.significance import permutation_moments, permutation_p_values, q_values
from tests import chance
from tests.planted_heads import implements, plant_relations, suppresses
from tests.planted_relations import relation, word
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.planted

HABITS = [share / 100 for share in range(5, 100, 5)]
FAVOURITE, ANSWERS = 0, 5
"""The favourite answer is token 0, the other answers are the next four, then come the sources."""

Writes = Mapping[int, int]
"""What a head writes: a token for each source it writes anything about."""


def popular(n: int, favourite_share: float) -> list[int]:
    """Return right answers of n sources: the favourite for a share of them, the others for equal parts of the rest."""
    first = round(n * favourite_share)
    return [FAVOURITE] * first + [1 + i % (ANSWERS - 1) for i in range(n - first)]


def classified(heads: Sequence[Writes], answers: Sequence[int]) -> pd.DataFrame:
    """Score heads, each once as it is and once with its sign turned, at k = 1; return their rows under both rules.

    Answers that a head does not write are in the middle of its logits, thanks to noise on the sources.
    """
    n, d_vocab = len(answers), ANSWERS + len(answers)
    maps = torch.zeros(len(heads), d_vocab, d_vocab)
    maps[..., ANSWERS:] = 0.01 * torch.linspace(-1, 1, n)
    for head, writes in enumerate(heads):
        for source, token in writes.items():
            maps[head, ANSWERS + source, token] = 1.0
    every_token, asked = torch.eye(d_vocab), Relation("popular", "knowledge", ())
    sources = torch.arange(ANSWERS, d_vocab)
    tokens = TokenRelation(asked, sources, tuple((answer,) for answer in answers), pd.DataFrame())
    ov = OVMaps(
        every_token[sources],
        every_token[None],
        torch.cat([maps, -maps]),
        every_token,
        1.0,
        first_tokens(every_token, 64),
    )
    table = score_table([score_layer(ov, suite_pairs([tokens], [1]), null_from=0.0)], [tokens])
    flags = {rule: apply_rule(table, rule, 0.15) for rule in ("published", "controlled")}
    return table.assign(**{rule: found["implemented"] | found["suppressed"] for rule, found in flags.items()})


def habits(answers: Sequence[int], leaning: float = 0.0) -> list[Writes]:
    """A head per habit: it writes the favourite after a random share of the sources, the habit.

    Where it leans, it does so after a larger part of those whose answer it is: `leaning` of the way from habit to all.
    """
    rng, heads = random.Random(1), []
    for habit in HABITS:
        chosen = []
        for right in (True, False):
            sources = [source for source, answer in enumerate(answers) if (answer == FAVOURITE) == right]
            chosen += rng.sample(sources, round((habit + right * leaning * (1 - habit)) * len(sources)))
        heads.append(dict.fromkeys(chosen, FAVOURITE))
    return heads


@pytest.mark.parametrize("favourite_share", [0.3, 0.6, 0.95])
def test_a_source_blind_head_of_any_habit_is_never_classified(favourite_share):
    answers = popular(80, favourite_share)
    table = classified([*habits(answers), dict.fromkeys(range(80), FAVOURITE)], answers)
    assert table["published"].sum() > 18
    assert not table["controlled"].any()


def test_a_habit_that_leans_a_little_towards_the_right_sources_is_significant_and_not_classified():
    """Hardly better than the habit alone, but in so many items that shuffled targets never do as well."""
    answers = popular(140, 0.5)
    table = classified(habits(answers, leaning=0.25), answers)
    for sign, prefix in (("score", ""), ("suppression", "suppression_")):
        fooling = table[(table[sign] >= 0.15) & (table[f"{prefix}q_value"] <= 0.05)]
        assert len(fooling) >= 2
        assert (fooling[f"{prefix}excess"] < 0.15).all()
    assert not table["controlled"].any()


def test_a_head_that_knows_the_relation_is_found_however_popular_one_answer_is():
    answers = popular(60, 0.6)
    knows = dict(enumerate(answers))
    habit = {source: answer if source % 2 else FAVOURITE for source, answer in knows.items()}
    table = classified([knows, habit], answers)
    assert table["controlled"].all()
    assert table["excess"][0] == table["suppression_excess"][2] == 1.0
    assert 0.15 < table["excess"][1] < table["score"][1] < 1.0


def copier(tokenizer, seed: int) -> hw.HookedModel:
    """A GPT-2 of one layer and one head, whose values and outputs are the identity, on random embeddings."""
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=48, n_layer=1, n_head=1, n_positions=32)
    model = GPT2LMHeadModel(config).eval()
    attention = model.transformer.h[0].attn
    with torch.no_grad():
        attention.c_attn.weight[:, 2 * 48 :] = torch.eye(48)
        attention.c_proj.weight.copy_(torch.eye(48))
    return hw.load(model, tokenizer=tokenizer)


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def alike(n: int, seed: int) -> Relation:
    """Words of several tokens, as most are to a small vocabulary; source and target mostly begin with one letter."""
    rng = random.Random(seed)
    firsts = [(a, b if rng.random() < 0.1 else a) for a in LETTERS for b in rng.sample(LETTERS, 8)]
    pairs = tuple((f"{a}{word('x', i)}", (f"{b}{word('y', i)}",)) for i, (a, b) in enumerate(firsts[:n]))
    return Relation("alike", "linguistic", pairs)


@pytest.mark.parametrize("seed", range(3))
def test_a_pure_copier_is_classified_by_copying_alone_with_and_without_first_tokens(seed):
    words = relation("fact", "knowledge", 60)
    known = [one for source, targets in words.pairs for one in (source, *targets)]
    model = copier(tiny_tokenizer([*known, *LETTERS]), seed)
    copying = Relation("own_copying", "algorithmic", tuple((source, (source,)) for source, _ in words.pairs))
    apart = Relation(
        "apart", "translation", tuple((f"{a}{word('x', i)}", (f"{b}q",)) for i, (a, b) in enumerate(permuted(seed)))
    )
    for multi_token in (None, "first"):
        head_map = hw.classify_heads(
            model, relations=[words, copying, alike(200, seed), apart], multi_token=multi_token, progress=False
        )
        assert head_map.categories["categories"].tolist() == [("algorithmic",)]
        assert set(head_map.table.query("implemented")["relation"]) == {"own_copying"}
    note = head_map.relations.set_index("relation").loc["alike", "note"]
    assert "left out: " in note
    assert "pairs left out whose target is the same token as its source" in note


def permuted(seed: int) -> list[tuple[str, str]]:
    """Pairs of different letters."""
    rng = random.Random(seed)
    return [(a, b) for a in LETTERS for b in rng.sample(LETTERS, 3) if a != b]


def classify(heads, relations: Sequence[Relation], words: Sequence[str], **options) -> hw.HeadMap:
    """Plant heads in a model that reads these words, and classify them."""
    planted = plant_relations(heads, words=words)
    model = hw.load(planted.model, tokenizer=planted.tokenizer)
    return hw.classify_heads(model, relations=relations, embedding="raw", progress=False, **options)


def words_of(pairs) -> list[str]:
    return [given for source, targets in pairs for given in (source, *targets)]


def test_a_pair_said_six_times_is_evidence_once():
    asked = relation("capital", "knowledge", 40)
    heads = {(0, 1): [implements(asked.pairs[::3])], (1, 2): [suppresses(asked.pairs[::3])]}
    again = Relation(asked.name, asked.category, asked.pairs * 6)
    once, six_times = (classify(heads, [one], words_of(asked.pairs)) for one in (asked, again))
    assert once.table["p_value"].min() < 1e-9
    assert once.table.equals(six_times.table)
    assert six_times.relations["note"].tolist() == ["200 repeated pairs merged"]
    assert six_times.relations[["pairs", "kept"]].to_numpy().tolist() == [[240, 40]]


def by_source(written: Sequence[Sequence[int]], items: int, n_noise: int = 30) -> pd.DataFrame:
    """Score heads on a relation whose sources have several items each; return their rows.

    Args:
        written: of each head and source the source whose targets it writes, all of them.
        items: how many items a source has, each with a target of its own.
        n_noise: tokens with logits on either side of those that a head does not write.
    """
    n_heads, n_sources = len(written), len(written[0])
    n_targets = n_sources * items
    maps = torch.zeros(n_heads, n_sources, n_targets + n_noise)
    maps[..., n_targets:] = 0.01 * torch.linspace(-1, 1, n_noise)
    targets = torch.arange(n_targets).view(n_sources, items)
    maps.scatter_(2, targets[torch.tensor(written)].flatten(2), 1.0)
    every_token = torch.eye(n_targets + n_noise)
    x = every_token[:n_sources]
    ov = OVMaps(x, x.T[None], maps, every_token, 1.0, first_tokens(every_token, 64))
    sources = torch.arange(n_sources).repeat_interleave(items)
    asked = Relation("several", "knowledge", ())
    tokens = TokenRelation(asked, sources, tuple((one,) for one in range(n_targets)), pd.DataFrame())
    return score_table([score_layer(ov, suite_pairs([tokens], [items]), null_from=0.0)], [tokens])


def shuffled_by_pair(table: pd.DataFrame, written: Sequence[Sequence[int]], items: int) -> np.ndarray:
    """The p-values, were each item's target shuffled by itself, as if the items of a source said different things."""
    n_sources = len(written[0])
    hits = torch.nn.functional.one_hot(torch.tensor(written), n_sources).bool()
    hits = hits.repeat_interleave(items, 1).repeat_interleave(items, 2)
    counts = np.rint(table["score"].to_numpy() * n_sources * items)
    return permutation_p_values(counts, permutation_moments(hits).numpy())


@pytest.mark.parametrize(("n_sources", "items"), [(8, 5), (12, 4), (40, 3)])
def test_a_habit_by_source_is_called_no_more_often_than_the_level_says(n_sources, items):
    """Each head writes for each source what belongs to some source or other: so it hits several items at a time."""
    rng, n_heads = chance.rng(), 800
    written = rng.integers(n_sources, size=(n_heads, n_sources)).tolist()
    table = by_source(written, items)
    by_pair = shuffled_by_pair(table, written, items)
    for level in (0.05, 0.01):
        called = int((table["p_value"] <= level).sum())
        assert binomtest(called, n_heads, level, "greater").pvalue > 1e-3
    assert (by_pair <= 0.01).mean() > 0.03
    flags = apply_rule(table, "controlled", 0.15)
    assert not (flags["implemented"] | flags["suppressed"]).any()
    as_if_apart = table.assign(p_value=by_pair, q_value=q_values(by_pair))
    assert apply_rule(as_if_apart, "controlled", 0.15)["implemented"].sum() >= 3 * (n_sources < 40)


def test_a_head_that_knows_what_belongs_to_each_of_several_sources_is_found():
    """Eight sources can be told apart from habits, three cannot: these have six orders."""
    rng = chance.rng()
    for n_sources, is_found in ((8, True), (3, False)):
        habits = rng.integers(n_sources, size=(50, n_sources)).tolist()
        table = by_source([list(range(n_sources)), *habits], items=12)
        assert table["score"][0] == 1
        assert apply_rule(table, "controlled", 0.15)["implemented"].tolist()[0] == is_found


def test_intervals_count_a_source_once_however_many_pairs_it_is_in():
    """Each source stands in four pairs, and a head knows one of the four."""
    pairs = [(word("from", i), (word(f"to{'abcd'[j]}", i),)) for i in range(40) for j in range(4)]
    several, one = Relation("several", "knowledge", tuple(pairs)), Relation("one", "knowledge", tuple(pairs[::4]))
    heads = {(0, 1): [implements(pairs[::4])]}
    table = classify(heads, [several, one], words_of(pairs), rule="published").table
    rows = table.set_index(["layer", "head", "relation"]).loc[(0, 1)]
    assert rows[["score", "pairs"]].to_numpy().tolist() == [[0.25, 160], [1.0, 40]]
    assert rows.loc["several", "high"] - rows.loc["several", "low"] == pytest.approx(0.2601, abs=1e-3)  # 10 of 40
