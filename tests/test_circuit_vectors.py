"""Singular vectors of a head's circuits are those of the full products, and list what a planted head does."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.heads.weight_maps import decomposed, singular_vectors
from headwater.models.weights import open_weights
from tests.planted_heads import implements, plant_relations
from tests.tiny import tiny_folder, tiny_hooked


def test_the_product_of_the_parts_is_the_product_of_the_factors():
    left, right = torch.randn(20, 4), torch.randn(4, 20)
    u, s, v = decomposed(left, right)
    torch.testing.assert_close((u * s) @ v.T, (left @ right).double(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(s, torch.linalg.svdvals((left @ right).double())[:4])
    for vectors in (u, v):
        torch.testing.assert_close(vectors.T @ vectors, torch.eye(4).double(), atol=1e-6, rtol=0)


@pytest.mark.diagonal
@pytest.mark.oracle
@pytest.mark.parametrize("circuit", ["ov", "qk"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "neox"])
def test_tokens_along_a_vector_are_those_of_the_full_product(family, circuit):
    model = tiny_hooked(family)
    weights, (layer, head) = open_weights(model), (2, 3)
    result = singular_vectors(model, layer, head, circuit=circuit, embedding="mlp0", vectors=2, tokens=3)
    factors = weights.layer(layer)
    group = factors.value_head(head)
    first, second = (factors.W_V[group], factors.W_O[head]) if circuit == "ov" else (
        factors.W_Q[head], factors.W_K[group].T
    )  # fmt: skip
    u, s, vt = torch.linalg.svd(first.double() @ second.double())
    n = len(weights.tokenizer)
    x = weights.effective_embedding(torch.arange(n), "mlp0").double()
    reads, writes = u.T @ x.T, (vt @ weights.unembedding().double()[:, :n] if circuit == "ov" else vt @ x.T)
    torch.testing.assert_close(torch.tensor(result.values["singular_value"]), s[:8], rtol=1e-5, atol=1e-7)
    for vector in (1, 2):
        part = result.table[result.table["vector"] == vector]
        found = {key: rows["token_id"].tolist() for key, rows in part.groupby(["side", "sign"])}
        sides = ("reads", "writes") if circuit == "ov" else ("query", "key")
        ends = [{"+": p[vector - 1].topk(3).indices.tolist(), "-": (-p[vector - 1]).topk(3).indices.tolist()}
                for p in (reads, writes)]  # fmt: skip
        flipped = found[sides[0], "+"] != ends[0]["+"]
        for side, end in zip(sides, ends, strict=True):
            for sign in "+-":
                assert found[side, sign] == end["-+"["+-".index(sign)] if flipped else sign]


def test_a_folder_gives_what_the_loaded_model_gives_and_gains_can_be_folded_in(tmp_path):
    folder = tiny_folder(tmp_path / "model", "llama")
    plain = singular_vectors(folder, 1, 2)
    loaded = singular_vectors(hw.load(folder), 1, 2)
    assert plain.table["token_id"].tolist() == loaded.table["token_id"].tolist()
    gained = singular_vectors(folder, 1, 2, norm_gain=True)
    factors = open_weights(folder).layer(1)
    expected = torch.linalg.svdvals((factors.W_V[1] * factors.norm_gain[:, None]) @ factors.W_O[2])[:8]
    torch.testing.assert_close(torch.tensor(gained.values["singular_value"]).float(), expected, rtol=1e-4, atol=1e-6)
    assert plain.values["share"].sum() == pytest.approx(1)
    assert plain.values["random_share"].sum() == pytest.approx(1)


def test_tables_that_were_sorted_give_the_same_report_and_summary():
    result = singular_vectors(tiny_hooked("llama"), 1, 2, vectors=2, tokens=3)
    tables = {"table": result.table, "values": result.values}
    turned = replace(result, **{name: table[::-1].reset_index(drop=True) for name, table in tables.items()})
    assert turned.report() == result.report()
    pd.testing.assert_frame_equal(turned.summary(), result.summary())


@pytest.mark.planted
def test_a_planted_head_writes_its_targets_along_its_singular_vectors():
    capital = (("France", ("Paris",)), ("Italy", ("Rome",)), ("Spain", ("Madrid",)))
    planted = plant_relations({(1, 2): [implements(capital)]}, first_mlp=True, n_kv_heads=2)
    model = hw.load(planted.model, tokenizer=planted.tokenizer)
    table = singular_vectors(model, 1, 2, embedding="mlp0", vectors=3, tokens=1).table
    ends = table[table["product"].abs() > 0.3]
    assert set(ends.loc[ends["side"] == "reads", "token"]) <= {" France", " Italy", " Spain"}
    assert set(ends.loc[ends["side"] == "writes", "token"]) <= {" Paris", " Rome", " Madrid"}
    assert len(ends) >= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 9}, "There is no layer 9; they are 0 to 2"),
        ({"circuit": "vo"}, "circuit='vo' is not one of ov, qk"),
        ({"embedding": "mlp"}, "embedding='mlp'"),
        ({"vectors": 9}, "vectors=9 must be from 1 to 8"),
        ({"tokens": 0}, "tokens=0"),
    ],
)
def test_what_cannot_be_used_is_named(change, message):
    model = tiny_hooked("llama")
    with pytest.raises(InputError, match=message):
        singular_vectors(**{"model": model, "layer": 0, "head": 0} | change)
