"""Heads compared along a training and between two seeds of it: what was learned is found where it was learned."""

import copy
from functools import cache

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from torch import Tensor

import headwater as hw
from headwater.heads.relations import tokenize_relations
from headwater.planted.circuits import PlantedModel
from tests import chance
from tests.planted_heads import implements, plant_relations
from tests.planted_relations import CAPITALS, CHOSEN, OPPOSITES, WORDS

CAPITAL, OPPOSITE = CAPITALS.name, OPPOSITES.name


def logits_of(model, layer: int, x: Tensor) -> Tensor:
    """What the heads of a layer write for these embeddings, `head source d_vocab`: the formula of the static score."""
    attention, n_heads = model.model.layers[layer].self_attn, model.config.num_attention_heads
    values = attention.v_proj.weight.unflatten(0, (n_heads, -1))
    outputs = attention.o_proj.weight.unflatten(1, (n_heads, -1))
    written = torch.einsum("sd,hkd,ehk->hse", x, values, outputs)
    return written @ model.lm_head.weight.T


def train(planted: PlantedModel, layer: int, heads: list[int], steps: int, seed: int) -> list[dict[str, Tensor]]:
    """Learn the capitals in some heads of a layer by gradient descent; the weights before, in the middle and after."""
    model = planted.model
    (tokens,) = tokenize_relations([CAPITALS], planted.tokenizer)
    x = model.model.embed_tokens.weight[tokens.source].detach()
    target = torch.tensor([accepted[0] for accepted in tokens.targets])
    attention = model.model.layers[layer].self_attn
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for part in (attention.v_proj.weight, attention.o_proj.weight):
            part.add_(torch.randn(part.shape, generator=generator) * 0.02)
    taught = torch.tensor(heads)
    optimizer = torch.optim.Adam([attention.v_proj.weight, attention.o_proj.weight], lr=0.02)
    kept = [copy.deepcopy(model.state_dict())]
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        logits = logits_of(model, layer, x)[taught].flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, target.repeat(len(heads))).backward()
        optimizer.step()
        if step in (steps // 2, steps):
            kept.append(copy.deepcopy(model.state_dict()))
    return kept


@cache
def trained(heads: tuple[int, ...], seed: int) -> tuple[hw.HookedModel, ...]:
    """The checkpoints of one training: capitals are learned in heads of layer 1, opposites stay in head 0.0."""
    planted = plant_relations({(0, 0): [implements(OPPOSITES.pairs)]}, n_layers=2, n_heads=3, words=WORDS, reads="raw")
    kept = train(planted, 1, list(heads), 60, seed)
    models = []
    for weights in kept:
        one = copy.deepcopy(planted.model)
        one.load_state_dict(weights)
        models.append(hw.load(one.requires_grad_(requires_grad=False), tokenizer=planted.tokenizer))
    return tuple(models)


def compared(**models: hw.HookedModel) -> hw.HeadComparison:
    return hw.compare_heads(models, relations=CHOSEN, embedding="raw", progress=False)


def changes(comparison: hw.HeadComparison, model: str) -> set[tuple]:
    rows = comparison.changed[comparison.changed["model"] == model]
    columns = ["layer", "head", "relation", "sign", "change"]
    return set(rows[columns].itertuples(index=False, name=None))


def test_what_a_training_teaches_a_head_is_found_at_the_checkpoints_that_have_it():
    start, middle, end = trained((1,), chance.seed_of("along"))
    comparison = compared(start=start, middle=middle, end=end)
    learned = (1, 1, CAPITAL, "score", "gained")
    assert changes(comparison, "end") == {learned}
    assert changes(comparison, "middle") <= {learned}
    table = comparison.table.set_index(["model", "layer", "head", "relation", "sign"])
    along = [table.loc[(model, 1, 1, CAPITAL, "score"), "excess"] for model in ("start", "middle", "end")]
    assert along == sorted(along)
    assert along[-1] > 0.9
    kept = [table.loc[(model, 0, 0, OPPOSITE, "score"), "excess"] for model in ("start", "middle", "end")]
    assert kept == pytest.approx([1.0] * 3)
    summary = comparison.summary().set_index(["model", "category"])["heads"]
    upper, lower = comparison.plot().axes
    (knowledge,) = [line for line in upper.lines if line.get_label() == "knowledge"]
    assert knowledge.get_ydata().tolist() == [summary[model, "knowledge"] for model in ("start", "middle", "end")]
    assert knowledge.get_ydata()[[0, -1]].tolist() == [0, 1]
    assert [label.get_text() for label in lower.get_xticklabels()] == ["start", "middle", "end"]
    plt.close("all")


def test_two_seeds_that_learned_the_same_in_other_heads_differ_there_and_nowhere_else():
    *_, one = trained((1,), chance.seed_of("one"))
    *_, other = trained((2,), chance.seed_of("other"))
    comparison = compared(one=one, other=other)
    assert changes(comparison, "other") == {
        (1, 1, CAPITAL, "score", "lost"), (1, 2, CAPITAL, "score", "gained"),
    }  # fmt: skip
    summary = comparison.summary().set_index(["model", "category"])["heads"]
    assert summary["one", "knowledge"] == summary["other", "knowledge"] == 1


def test_two_seeds_that_learned_it_in_the_same_head_do_not_differ_although_their_weights_do():
    *_, one = trained((1,), chance.seed_of("one"))
    *_, again = trained((1,), chance.seed_of("again"))
    assert one.fingerprint != again.fingerprint
    assert compared(one=one, again=again).changed.empty


def test_a_relation_of_few_distinct_sources_counts_its_sources_and_cannot_change_much():
    """Thirty-five items of three sources: three gained sources are no more than p = 2 / 2³."""
    sources = [source for source, _ in CAPITALS.pairs[:3]]
    targets = [accepted[0] for _, accepted in CAPITALS.pairs[:35]]
    few = hw.Relation("few", "knowledge", tuple((sources[i % 3], (one,)) for i, one in enumerate(targets)))
    start, _, end = trained((1,), chance.seed_of("along"))
    comparison = hw.compare_heads({"start": start, "end": end}, relations=[few], embedding="raw", progress=False)
    rows = comparison.table[comparison.table["model"] == "end"]
    assert (rows["sources"] == 3).all()
    assert (rows["p_value"] >= 2 / 2**3).all()
    assert comparison.changed.empty
    assert isinstance(comparison.summary(), pd.DataFrame)
