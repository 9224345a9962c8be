"""A habit, however strong, classifies no head under the controlled rule; nor does copying, or saying the same twice.

A habit writes the same favourite answers whatever the relation wants, after all sources or after a random part of them.
"""

import random
from collections.abc import Mapping, Sequence

import pandas as pd
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import headwater as hw
from headwater.heads.categories import apply_rule
from headwater.heads.relation_tokens import TokenRelation
from headwater.heads.relations import Relation
from headwater.heads.scores import score_layer, score_table, suite_pairs
from headwater.kernels.ov import OVMaps
from headwater.planted import implements, plant_relations, suppresses
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
    ov = OVMaps(every_token[sources], every_token[None], torch.cat([maps, -maps]), every_token, 1.0)
    table = score_table([vars(score_layer(ov, suite_pairs([tokens], [1]), null="where hit"))], [tokens])
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
    assert "pairs left out whose target is the token of its source" in note


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


def test_intervals_count_a_source_once_however_many_pairs_it_is_in():
    """Each source stands in four pairs, and a head knows one of the four."""
    pairs = [(word("from", i), (word(f"to{'abcd'[j]}", i),)) for i in range(40) for j in range(4)]
    several, one = Relation("several", "knowledge", tuple(pairs)), Relation("one", "knowledge", tuple(pairs[::4]))
    heads = {(0, 1): [implements(pairs[::4])]}
    table = classify(heads, [several, one], words_of(pairs), rule="published").table
    rows = table.set_index(["layer", "head", "relation"]).loc[(0, 1)]
    assert rows[["score", "pairs"]].to_numpy().tolist() == [[0.25, 160], [1.0, 40]]
    assert rows.loc["several", "high"] - rows.loc["several", "low"] == pytest.approx(0.2601, abs=1e-3)  # 10 of 40
