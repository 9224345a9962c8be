"""Correlations behind sources of several tokens are those of a loop over prompts, heads and the vocabulary."""

import json

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.heads.relations import load_relations
from headwater.models.weights import open_weights
from headwater.reference import maps
from headwater.reference.maps import OPENING, multi_token_prompts, multi_token_scores
from headwater.reference.published import Published
from tests import chance
from tests.tiny import WORDS, tiny_model, tiny_tokenizer

RELATION = "name_copying"


@pytest.fixture
def datasets(tmp_path):
    """A published relation of single words, of longer ones, and of pairs that do not count."""
    rng = chance.rng()
    pairs = [[word, str(rng.choice(WORDS))] for word in WORDS]
    pairs += [[f"{word} {rng.choice(WORDS)}", str(rng.choice(WORDS))] for word in WORDS[:12]]
    pairs += [["Paris Rome", "nothing"]]  # a target of several tokens
    for name in (RELATION, "adj_antonym"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / f"{name}.json").write_text(json.dumps(pairs))
    return tmp_path / "data"


@pytest.fixture(params=["llama", "neox"])
def model(request):
    return hw.load(tiny_model(request.param), tokenizer=tiny_tokenizer(bos=request.param == "llama"))


def longer(model, pairs):
    """Token ids of the published prompts, and the token of each target."""
    tokenizer = model.tokenizer
    for source, target in pairs:
        ids = tokenizer.encode(source, add_special_tokens=False)
        wanted = tokenizer.encode(" " + target, add_special_tokens=False)
        if len(wanted) == 1 and len(ids) > 1:
            yield [*tokenizer(OPENING)["input_ids"], *ids], wanted[0]


def pairs_of(datasets):
    return list(dict.fromkeys(map(tuple, json.loads((datasets / RELATION / f"{RELATION}.json").read_text()))))


def test_prompts_are_the_opening_and_the_source_tokenized_apart(model, datasets):
    relation = next(one for one in load_relations(datasets) if one.name == RELATION)
    prompts, items = multi_token_prompts(model, relation)
    expected = list(longer(model, pairs_of(datasets)))
    rows = [row[real].tolist() for row, real in zip(prompts.batch.tokens, prompts.batch.mask, strict=True)]
    assert sorted(rows) == sorted(ids for ids, _ in expected)
    assert prompts.source.tolist() == [len(row) - 1 for row in rows]
    assert len(items.targets) == len(rows) > 10


@pytest.mark.oracle
def test_correlations_are_those_of_a_plain_loop(model, datasets):
    head_map = hw.classify_heads(model, relations=datasets, rule="published", progress=False)
    found = multi_token_scores(model, head_map, datasets, progress=False).correlations
    assert set(found["relation"]) == {RELATION}  # the other was not published
    k = int(head_map.relations.set_index("relation").at[RELATION, "k"])
    weights, shape = open_weights(model), model.shape
    W_U = weights.unembedding()
    hits = np.zeros((2, 2, shape.n_layers, shape.n_heads))
    prompts = list(longer(model, pairs_of(datasets)))
    for ids, target in prompts:
        cache = model.cache([ids], sites=["z", "v"], progress=False)
        for layer in range(shape.n_layers):
            z, v = (torch.as_tensor(cache[site, layer])[0, -1].float() for site in ("z", "v"))
            for head in range(shape.n_heads):
                value = v[head // (shape.n_heads // len(v))]
                for context, vector in enumerate((z[head], value)):
                    logits = vector @ weights.ov(layer).W_O[head] @ W_U
                    hits[context, 0, layer, head] += target in logits.topk(k).indices
                    hits[context, 1, layer, head] += target in logits.topk(k, largest=False).indices
    static = head_map.table[head_map.table["relation"] == RELATION].sort_values(["layer", "head"])
    for row in found.to_dict("records"):
        sign, context = ["score", "suppression"].index(row["sign"]), ["with", "without"].index(row["context"])
        dynamic = hits[context, sign].reshape(-1) / len(prompts)
        ours = static[row["sign"]].to_numpy(float)
        expected = np.corrcoef(ours, dynamic)[0, 1] if ours.std() and dynamic.std() else np.nan
        assert row["pearson"] == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert found["pearson"].notna().any()


def test_they_stand_beside_the_published_ones(model, datasets, monkeypatch):
    shape = {"layers": model.shape.n_layers, "heads": model.shape.n_heads}
    held = {"score": 0.5, "suppression": 0.5, "multi_token": {"score with context": 0.25}}
    numbers = Published("here", {"me": shape | {"relations": {RELATION: held}}})
    monkeypatch.setattr(maps, "published_numbers", lambda kind: numbers)
    asked = {"published": "me", "correlations": False, "progress": False}
    found = maps.reproduce_maps(model, datasets, multi_token=True, **asked).table
    rows = found[found["quantity"].str.contains("several tokens")].set_index("quantity")
    assert len(rows) == 4
    assert rows.at["correlation after sources of several tokens, score with context", "published"] == 0.25
    without = maps.reproduce_maps(model, datasets, **asked).table
    assert not without["quantity"].str.contains("several tokens").any()
