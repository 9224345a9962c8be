"""The view of head maps: what its page holds of each map, what heads write, and which heads have cards."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import headwater as hw
from headwater.errors import InputError, ModelError
from headwater.heads.card import salient_operations
from headwater.models.weights import open_weights
from headwater.views.maps import CARDS, FLAGS, heads_with_cards
from tests import chance
from tests.tiny import embedded, tiny_model
from tests.viewed import controlled, mapped, spec_in, unpacked


def rows_of(head_map, n=60):
    return head_map.table.sample(n, random_state=chance.seed_of("rows")).itertuples()


@pytest.mark.parametrize("of", [mapped, controlled])
def test_the_page_of_a_head_map_holds_the_numbers_of_its_table(of):
    spec = spec_in(of().view())
    (held,) = spec["maps"]
    numbers = {name: unpacked(held[name]) for name in ("score", "expected", "flags")}
    for row in rows_of(of()):
        at = row.layer, row.head, spec["relations"].index(row.relation)
        np.testing.assert_equal(numbers["score"][at], np.float32(row.score))
        np.testing.assert_equal(numbers["expected"][at], np.float32(row.expected))
        assert numbers["flags"][at] == sum(bit for flag, bit in FLAGS.items() if getattr(row, flag))
    names = [one["name"] for one in spec["labels"]]
    named = np.array(names)[unpacked(held["label"])]
    for row in of().categories.itertuples():
        assert named[row.layer, row.head] == row.label
    counted = of().categories["label"].value_counts().to_dict()
    assert dict(zip(names, held["counts"], strict=True)) == counted


def test_the_page_says_which_heads_are_used_and_what_they_suppress():
    head_map = controlled()
    (held,) = spec_in(head_map.view())["maps"]
    use, loss = unpacked(held["use"]), unpacked(held["loss"])
    relations = spec_in(head_map.view())["relations"]
    for row in rows_of(head_map, len(head_map.table)):
        at = row.layer, row.head, relations.index(row.relation)
        assert use[at] == (0 if pd.isna(row.used) else 1 + row.used)
        np.testing.assert_allclose(loss[at], row.loss, rtol=1e-3, atol=1e-4)
    assert (use == 2).any()
    assert (use == 1).any()
    against = head_map.table[head_map.table["suppressed"]]
    assert len(held["suppressed"]) == len(against)
    for (layer, head, relation, score, expected, _), row in zip(held["suppressed"], against.itertuples(), strict=True):
        assert (layer, head, relations[relation]) == (row.layer, row.head, row.relation)
        assert [score, expected] == pytest.approx([row.suppression, row.suppression_expected], rel=1e-6)
    assert spec_in(mapped().view())["maps"][0]["use"] is None


def test_with_its_model_cards_say_what_each_head_writes_and_suppresses():
    model = embedded()
    (held,) = spec_in(mapped().view(model=model))["maps"]
    assert len(held["writes"]) == CARDS < len(mapped().categories)
    for place in list(held["writes"])[::20]:
        layer, head = map(int, place.split("."))
        expected = mapped().salient(layer, head, model=model, sources=5, targets=5)
        found = held["writes"][place]
        for (_, of_source), (source, sigma, writes, suppresses) in zip(expected.groupby("rank"), found, strict=True):
            assert source == of_source["source"].iloc[0]
            assert sigma == pytest.approx(of_source["sigma"].iloc[0], abs=1e-4)
            signs = of_source.groupby("sign")["target"].agg(list)
            assert (writes, suppresses) == (signs["writes"], signs["suppresses"])
    with pytest.raises(ModelError, match="is not the model of this head map"):
        mapped().view(model=hw.load(tiny_model("llama")))


def test_several_heads_at_once_write_what_each_writes_by_itself():
    weights, heads = open_weights(embedded()), [(2, 1), (0, 0), (2, 5)]
    together = salient_operations(weights, heads, embedding="mlp0", sources=4, targets=3)
    for layer, head in heads:
        alone = salient_operations(weights, [(layer, head)], embedding="mlp0", sources=4, targets=3)
        rows = together[(together["layer"] == layer) & (together["head"] == head)]
        pd.testing.assert_frame_equal(rows.reset_index(drop=True), alone)
    assert salient_operations(weights, []).empty
    assert list(salient_operations(weights, []).columns) == list(together.columns)


def test_of_a_large_model_the_classified_heads_have_cards_first():
    small = controlled()
    places = pd.MultiIndex.from_product([range(20), range(8)], names=["layer", "head"]).to_frame(index=False)
    labels = chance.rng().choice(["unclassified", "knowledge"], size=len(places), p=[0.8, 0.2])
    large = replace(small, categories=places.assign(label=labels, categories=[()] * len(places)))
    chosen = heads_with_cards(large)
    assert len(chosen) == len(set(chosen)) == CARDS
    named = set(places[labels == "knowledge"].itertuples(index=False, name=None))
    assert set(chosen[: len(named)]) == named


def test_several_maps_stand_side_by_side_under_names_that_tell_them_apart():
    spec = spec_in(controlled().view(beside=[mapped()]))
    assert [one["name"] for one in spec["maps"]] == ["embedded, controlled", "embedded, published"]
    alone = spec_in(mapped().view())
    order = [spec["relations"].index(name) for name in alone["relations"]]
    np.testing.assert_array_equal(unpacked(spec["maps"][1]["score"])[..., order], unpacked(alone["maps"][0]["score"]))
    fewer = replace(mapped(), table=mapped().table[mapped().table["relation"] != spec["relations"][0]])
    again = spec_in(fewer.view(beside=[mapped()]))
    assert set(again["relations"]) == set(spec["relations"])
    assert np.isnan(unpacked(again["maps"][0]["score"])[..., again["relations"].index(spec["relations"][0])]).all()
    with pytest.raises(InputError, match="beside"):
        mapped().view(beside=[3])
