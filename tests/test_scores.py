"""A layer's scores equal the published formula, item by item; the null equals shuffling the targets."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.heads.relations import Relation, TokenRelation
from headwater.heads.scores import score_layer, score_table, suite_pairs
from headwater.kernels.ov import OVMaps, first_tokens, longest_column


def relation(generator, d_vocab, items, accepted=3):
    source = torch.randint(d_vocab, (items,), generator=generator)
    targets = tuple(
        tuple(torch.randperm(d_vocab, generator=generator)[: 1 + index % accepted].tolist()) for index in range(items)
    )
    return TokenRelation(Relation("made up", None, ()), source, targets, pd.DataFrame())


def layer(generator, tokens, d_vocab):
    def random(*shape):
        return torch.randn(shape, generator=generator)

    W_U = random(16, d_vocab)
    return OVMaps(
        random(len(tokens), 16), random(2, 16, 4), random(6, 4, 16), W_U, longest_column(W_U), first_tokens(W_U, 64)
    )


def full_maps(maps):
    W_VO = torch.stack([maps.W_V[head // 3].double() @ maps.W_O[head].double() for head in range(6)])
    return maps.x.double() @ W_VO @ maps.W_U.double()


def made_up_suite(seed, d_vocab, sizes):
    """Relations of (items, accepted targets at most, k) each, and one layer's heads."""
    generator = torch.Generator().manual_seed(seed)
    relations = [relation(generator, d_vocab, items, accepted) for items, accepted, _ in sizes]
    suite = suite_pairs(relations, [k for _, _, k in sizes])
    return relations, suite, layer(generator, suite.source_tokens, d_vocab)


any_suite = given(
    seed=st.integers(0, 2**31),
    d_vocab=st.integers(5, 80),
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=4),
)


@pytest.mark.oracle
@any_suite
@settings(max_examples=60)
def test_scores_are_the_shares_of_items_whose_target_is_in_the_top_or_bottom_k(seed, d_vocab, sizes):
    relations, suite, maps = made_up_suite(seed, d_vocab, sizes)
    scores, logits = score_layer(maps, suite, null_from=None), full_maps(maps)
    for head, (index, one) in itertools.product(range(6), enumerate(relations)):
        k = int(suite.k[index])
        hits = {"score": 0, "suppression": 0, "beyond_copying": 0, "suppression_beyond_copying": 0}
        for token, targets in zip(one.source.tolist(), one.targets, strict=True):
            row = logits[head, suite.source_tokens.tolist().index(token)]
            for sign, name in ((1, ""), (-1, "suppression")):
                wanted = set((sign * row).topk(min(k, len(row))).indices.tolist()) & set(targets)
                beating = [t for t in wanted if t == token or sign * row[t] > sign * row[token]]
                hits[name or "score"] += bool(wanted)
                hits[f"{name}_beyond_copying".strip("_")] += bool(beating)
        for name, count in hits.items():
            assert scores[name][head, index] == count / len(one.targets), name


@pytest.mark.oracle
@any_suite
@settings(max_examples=30)
def test_null_moments_are_those_of_every_shuffle_of_the_targets_source_by_source(seed, d_vocab, sizes):
    relations, suite, maps = made_up_suite(seed, d_vocab, sizes)
    scores, logits = score_layer(maps, suite, null_from=0.0), full_maps(maps)
    for head, (index, one) in itertools.product(range(6), enumerate(relations)):
        sources = one.source.unique().tolist()
        if len(sources) > 5:
            continue
        rows = logits[head, [suite.source_tokens.tolist().index(token) for token in sources]]
        of = [[i for i, token in enumerate(one.source.tolist()) if token == source] for source in sources]
        for sign, moments in ((1, scores["moments"]), (-1, scores["suppression_moments"])):
            top = [set(row.topk(min(int(suite.k[index]), len(row))).indices.tolist()) for row in sign * rows]
            counts = [
                sum(
                    bool(best & set(one.targets[item]))
                    for best, place in zip(top, order, strict=True)
                    for item in place
                )
                for order in itertools.permutations(of)
            ]
            np.testing.assert_allclose(moments[head, index, 0], np.mean(counts), atol=1e-12)
            np.testing.assert_allclose(moments[head, index, 1], np.var(counts), atol=1e-12)


def test_sources_shared_by_relations_are_embedded_once():
    generator = torch.Generator().manual_seed(1)
    one, other = relation(generator, 9, 40), relation(generator, 9, 50)
    suite = suite_pairs([one, other], [1, 10])
    assert len(suite.source_tokens) == 9
    assert torch.equal(suite.source_tokens[suite.item_source], torch.cat([one.source, other.source]))
    assert suite.items.tolist() == [40, 50]


@pytest.mark.parametrize(("n_sources", "least"), [(2, 1 / 2), (3, 1 / 6), (36, 0)])
def test_no_p_value_is_below_what_the_orders_of_the_distinct_sources_allow(n_sources, least):
    """36 pairs of so many sources, each with targets of its own, and a head that writes just these."""
    items = 36
    source, target = torch.arange(items) % n_sources, torch.arange(items)
    tokens = TokenRelation(
        Relation("few", "knowledge", ()), source, tuple((one,) for one in target.tolist()), pd.DataFrame()
    )
    x, every_token = torch.zeros(n_sources, items), torch.eye(items)
    x[source, target] = 1.0
    maps = OVMaps(
        x, every_token[None], every_token[None], every_token, longest_column(every_token), first_tokens(every_token, 64)
    )
    scores = score_layer(maps, suite_pairs([tokens], [items // n_sources]), null_from=0.0)
    (row,) = score_table([scores], [tokens]).to_dict("records")
    assert row["score"] == 1
    assert row["p_value"] == pytest.approx(least, abs=1e-6)
