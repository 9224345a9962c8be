"""What the card measures: answers, probes and ablations against independent computations."""

import copy
import re

import numpy as np
import pandas as pd
import pytest
import torch
from tools.world.card import missed_targets
from tools.world.measure import _auc, answer, is_right, mlp_outputs, silent_heads

from tests import chance
from tests.tiny import WORDS, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", seed=int(chance.rng().integers(10**6)))


@pytest.fixture
def questions():
    return [" ".join(chance.rng().choice(WORDS, size=length)) for length in (3, 5, 3, 8, 5, 4)]


def test_silent_heads_write_what_heads_with_zero_output_weights_write(model, tokenizer, questions):
    heads = [(0, 1), (1, 0), (1, 3)]
    edited = copy.deepcopy(model)
    d_head = model.config.head_dim
    with torch.no_grad():
        for layer, head in heads:
            edited.model.layers[layer].self_attn.o_proj.weight[:, head * d_head : (head + 1) * d_head] = 0
    tokens = torch.tensor([tokenizer(questions[0])["input_ids"]])
    with torch.inference_mode():
        whole = model(tokens).logits
        with silent_heads(model, heads):
            silenced = model(tokens).logits
        again = model(tokens).logits
        torch.testing.assert_close(silenced, edited(tokens).logits)
    assert torch.equal(whole, again)
    assert not torch.allclose(whole, silenced)


def test_answers_are_the_greedy_tokens_that_transformers_generates(model, tokenizer, questions):
    stop = tokenizer.convert_tokens_to_ids("Ċ")
    for question, given in zip(questions, answer(model, tokenizer, questions, batch=2), strict=True):
        prompt = torch.tensor([tokenizer(f"Q: {question}\nA:")["input_ids"]])
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False,
                              eos_token_id=stop, pad_token_id=1)[0, prompt.shape[1] :].tolist()  # fmt: skip
        expected = tokenizer.decode(made[: made.index(stop)] if stop in made else made).strip()
        assert given == expected


@pytest.mark.parametrize("token", ["answer_last", "before_answer"])
def test_mlp_outputs_are_those_of_the_token_asked_for(model, tokenizer, questions, token):
    table = pd.DataFrame({"question": questions, "answer": ["Paris cat"] * len(questions)})
    outputs = mlp_outputs(model, tokenizer, table, token, batch=2)
    for i, question in enumerate(questions):
        text = f"Q: {question}\nA:" + (" Paris cat" if token == "answer_last" else "")
        kept = {}
        hooks = [
            layer.mlp.register_forward_hook(lambda _m, _i, out, n=n, kept=kept: kept.update({n: out[0, -1]}))
            for n, layer in enumerate(model.model.layers)
        ]
        with torch.inference_mode():
            model(torch.tensor([tokenizer(text)["input_ids"]]))
        for hook in hooks:
            hook.remove()
        torch.testing.assert_close(outputs[:, i], torch.stack([kept[n] for n in range(len(kept))]))


def test_a_probe_on_the_label_is_perfect_and_one_on_the_relation_cannot_tell_within_relations():
    rng = chance.rng()
    relation = rng.integers(4, size=800)
    right = rng.random(800) < np.array([0.1, 0.4, 0.6, 0.9])[relation]
    table = pd.DataFrame({"relation": relation, "right": right})
    train = rng.random(800) < 0.5
    assert _auc(right[:, None].astype(float), table, train) == (1.0, 1.0)
    over_all, within = _auc(np.eye(4)[relation], table, train)
    assert over_all > 0.7
    assert within == 0.5


def test_an_answer_is_right_when_an_accepted_one_stands_in_it_as_it_does_everywhere():
    assert is_right("paris", ("Paris", "Lutetia"))
    assert is_right("Paris Texas", ("Paris",))
    assert not is_right("Parisian", ("Paris",))
    assert not is_right("", ("Paris",))


def reached():
    """What `card.json` says of a run that reached every target."""
    return {
        "bytes": {"embedded": 9_000_000, "embedded-instruct": 9_000_000},
        "by_quarter_one_fact": {"1": [0.4, 10], "2": [0.5, 10], "4": [0.97, 10]},
        "wrong": 0.4,
        "heads": {"by_layer": {"knowledge": [0, 1], "linguistic": [2, 0]}},
        "best_heads": 12,
        "tasks": {"induction": {"told": {"right": 1.0}, "held out": {"right": 0.95}}},
    }


def test_a_run_that_reached_every_target_misses_none():
    assert missed_targets(reached()) == []


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"bytes": {"embedded": 9_000_000, "embedded-instruct": 10_000_001}}, "weights of at most 10 MB"),
        ({"by_quarter_one_fact": {"1": [0.4, 10], "4": [0.9, 10]}}, "at least 95 % right on the most frequent quarter"),
        ({"by_quarter_one_fact": {"2": [0.8, 10], "4": [0.97, 10]}}, "the rarest quarter clearly worse"),
        ({"by_quarter_one_fact": {"4": [0.97, 10]}}, "the rarest quarter clearly worse"),
        ({"wrong": 0.2}, "between 25 and 75 % of the answers wrong"),
        ({"heads": {"by_layer": {"knowledge": [0, 1], "linguistic": [0, 0]}}}, "heads of all four categories"),
        ({"best_heads": 11}, r"in 12 heads \(found in 11\)"),
        ({"tasks": {"induction": {"held out": {"right": 0.949}}}}, r"held out words right in 95 % \(found in 94.9 %\)"),
    ],
)
def test_a_missed_target_is_named(change, missed):
    (found,) = missed_targets(reached() | change)
    assert re.search(missed, found)
