"""Attention classes find what a head attends to, and agree with TransformerLens's detector."""

import pandas as pd
import pytest
import torch
from transformer_lens import head_detector
from transformer_lens.head_detector import compute_head_attention_similarity_score, detect_head

import headwater as hw
from headwater.errors import InputError
from headwater.heads.patterns import (
    BEHAVIOURS,
    attended_keys,
    attention_on,
    repeated_tokens,
    token_kinds,
)
from headwater.planted import induction
from tests.tiny import tiny_hooked

ATTENTION_CLASSES = ("previous_token", "duplicate_token", "induction")
"""The behaviours that TransformerLens's detector has."""


def keys_of(name, tokens):
    """The keys of each query as TransformerLens's detector defines them."""
    pattern = getattr(head_detector, f"get_{name}_head_detection_pattern")
    return pattern(tokens[None]).to(torch.bool)


def load(planted):
    return hw.load(planted.model, tokenizer=planted.tokenizer)


def scores_of(model, **options):
    """The scores of `hw.attention_behaviour`: a row per head, a column per behaviour."""
    found = hw.attention_behaviour(model, copying=False, progress=False, **options).table
    return found.pivot(index=["layer", "head"], columns="behaviour", values="score")


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_scores_are_the_detectors_own_up_to_the_queries_that_have_no_such_key(family):
    model = tiny_hooked(family, seed=5)
    table = scores_of(model, sequences=4, length=9, seed=11)
    tokens = repeated_tokens(model, 4, 9, 11)
    for name in ATTENTION_CLASSES:
        expected = torch.zeros(model.shape.n_layers, model.shape.n_heads)
        share = torch.stack([keys_of(name, row).any(-1).float().mean() for row in tokens]).mean()
        for row in tokens:
            _, cache = model.raw.run_with_cache(row[None], remove_batch_dim=True)
            for layer in range(model.shape.n_layers):
                for head in range(model.shape.n_heads):
                    expected[layer, head] += compute_head_attention_similarity_score(
                        cache["pattern", layer, "attn"][head],
                        keys_of(name, row).float(),
                        exclude_bos=False,
                        exclude_current_token=False,
                        error_measure="mul",
                    ) / len(tokens)
        found = torch.tensor(table[name].to_numpy()).reshape(expected.shape)
        torch.testing.assert_close(found.float() * share, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.oracle
def test_on_words_that_survive_the_way_through_text_the_detector_agrees_too():
    planted = induction()
    model = load(planted)
    text = " ant bat cow dog elk ant bat cow dog elk"
    batch = model.tokenize(text)
    expected = detect_head(model.raw, text, "induction_head")
    keys, visible = attended_keys(batch.tokens, batch.mask, token_kinds(model))
    pattern = model.cache(text, sites="pattern", progress=False).attention[1]
    found = attention_on(pattern, keys, visible)["on"][0, list(BEHAVIOURS).index("induction")]
    torch.testing.assert_close(found / batch.tokens.shape[1], expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.oracle
def test_keys_are_those_of_the_detector_also_where_tokens_follow_themselves():
    tokens = torch.randint(0, 4, (5, 11))
    model = tiny_hooked("llama")
    keys, _ = attended_keys(tokens, torch.ones_like(tokens, dtype=torch.bool), token_kinds(model))
    for name in ATTENTION_CLASSES:
        expected = torch.stack([keys_of(name, row) for row in tokens])
        assert torch.equal(keys[list(BEHAVIOURS).index(name)], expected), name


def test_random_sequences_hold_no_special_token_and_repeat_once():
    model = tiny_hooked("llama")
    tokens = repeated_tokens(model, 5, 12, seed=1)
    assert (tokens[:, :1] == torch.tensor(model.bos)).all()
    assert torch.equal(tokens[:, 1:13], tokens[:, 13:])
    assert not torch.isin(tokens[:, 1:], torch.tensor(model.tokenizer.all_special_ids)).any()
    assert all(len(row.unique()) == 12 for row in tokens[:, 1:13])
    assert not torch.equal(tokens, repeated_tokens(model, 5, 12, seed=2))


def test_more_sequences_take_no_more_memory_and_none_are_lost_where_it_runs_out(monkeypatch):
    model = tiny_hooked("llama", seed=5)
    whole = scores_of(model, sequences=7, length=5, batch_size=4)
    run, sizes = type(model).run, []

    def short_of_memory(self, tokens, *args, **options):
        sizes.append(len(tokens))
        if len(tokens) > 2:
            raise torch.OutOfMemoryError
        return run(self, tokens, *args, **options)

    monkeypatch.setattr(type(model), "run", short_of_memory)
    parts = scores_of(model, sequences=7, length=5, batch_size=4)
    assert sizes == [4, 2, 2, 3, 1, 2]
    pd.testing.assert_frame_equal(parts, whole, rtol=1e-5)
    with pytest.raises(InputError, match=r"^sequences=10001 must be from 1 to 10000[.]$"):
        hw.attention_behaviour(model, sequences=10_001)


def test_sequences_shrink_to_the_context_and_a_context_of_three_is_refused():
    model = tiny_hooked("gpt2")
    assert repeated_tokens(model, 2, 500, seed=0).shape[1] <= model.shape.n_ctx
    with pytest.raises(InputError, match="too small"):
        repeated_tokens(model, 2, 1, seed=0)
