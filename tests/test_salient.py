"""Salient operations equal the full product, head by head, and show a planted map."""

import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.heads.card import gains_of_heads, salient_operations
from headwater.models.weights import open_weights
from tests.planted_heads import implements, plant_relations, suppresses
from tests.tiny import tiny_hooked


@pytest.mark.diagonal
@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gpt2", "neox", "llama", "gemma2"])
@pytest.mark.parametrize("embedding", ["raw", "mlp0"])
def test_gains_and_targets_equal_those_of_the_whole_product(family, embedding):
    seed = int(torch.randint(1000, ()))
    weights = open_weights(tiny_hooked(family, seed))
    tokens = torch.arange(len(weights.tokenizer))
    x = weights.effective_embedding(tokens, embedding).double()
    for layer, head in [(0, 1), (2, 3)]:
        factors = weights.layer(layer)
        product = factors.expand_kv(factors.W_V)[head].double() @ factors.W_O[head].double()
        sigma = (x @ product).norm(dim=1) / x.norm(dim=1)
        of_head = factors.W_V[factors.value_head(head)], factors.W_O[head]
        (found,) = gains_of_heads(weights, [of_head], embedding, piece=37)
        torch.testing.assert_close(found.double(), sigma, rtol=1e-4, atol=1e-6)
        table = salient_operations(weights, [(layer, head)], embedding=embedding, sources=6, targets=4)
        order = sigma.argsort(descending=True)[:6]
        assert table.groupby("rank")["source_id"].first().tolist() == order.tolist()
        logits = x[order] @ product @ weights.unembedding().double()
        for sign, descending in (("writes", True), ("suppresses", False)):
            expected = logits.argsort(descending=descending)[:, :4]
            listed = table[table["sign"] == sign]["target_id"].to_numpy().reshape(6, 4)
            assert listed.tolist() == expected.tolist()


@pytest.mark.planted
def test_a_planted_head_is_salient_about_its_sources_and_shows_its_targets():
    capital = (("France", ("Paris",)), ("Italy", ("Rome",)), ("Spain", ("Madrid",)))
    colour = (("grass", ("green",)), ("snow", ("white",)))
    planted = plant_relations({(1, 2): [implements(capital), suppresses(colour)]}, first_mlp=True, n_kv_heads=2)
    weights = open_weights(hw.load(planted.model, tokenizer=planted.tokenizer))
    table = salient_operations(weights, [(1, 2)], embedding="mlp0", sources=5, targets=1).set_index(["source", "sign"])
    assert set(table.index.get_level_values("source")) == {" France", " Italy", " Spain", " grass", " snow"}
    for source, (target,) in capital:
        assert table.loc[(f" {source}", "writes"), "target"] == f" {target}"
    for source, (target,) in colour:
        assert table.loc[(f" {source}", "suppresses"), "target"] == f" {target}"


def test_a_head_that_does_not_exist_is_refused():
    weights = open_weights(tiny_hooked("gpt2"))
    with pytest.raises(InputError, match="There is no layer 3; they are 0 to 2"):
        salient_operations(weights, [(3, 0)])
