"""A run goes on from keys and values of earlier tokens under whatever name they are taken, and never without a word."""

from inspect import signature

import pandas as pd
import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention

import headwater as hw
from headwater.errors import ModelError
from headwater.models.fingerprint import TORCH_HOOKS
from headwater.models.forward import NAMES, attentions_of, name_of_cache, name_read, takes_cache
from headwater.models.generation import generate_tokens
from tests.own_models import HAS_BRIDGE_ONLY, raw_model
from tests.random_models import random_model
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

OTHERS = (
    "bloom", "cohere2", "deepseek-v3", "exaone4", "falcon", "falcon-rw", "gemma4", "gpt-neo", "gpt-oss", "gptj", "mpt",
    "opt", "phi3", "smollm3", "xglm",
)  # fmt: skip
"""Random models whose attention takes or computes something of its own."""
N_BEFORE = 7
USUAL = next(name for name in NAMES if name in signature(LlamaAttention.forward).parameters)
"""What the installed transformers calls it."""


def fresh(family="llama", change=None):
    """Load a tiny model; `change` is done to the attention of every layer of the transformers model before."""
    hf = tiny_model(family, seed=3)
    for layer in hf.model.layers if change else ():
        change(layer.self_attn)
    return hw.load(hf, tokenizer=tiny_tokenizer())


def in_two_runs(model, tokens):
    cache = DynamicCache()
    model.run(tokens[:, :N_BEFORE], past_key_values=cache)
    return model.run(tokens[:, N_BEFORE:], past_key_values=cache), cache


def some_tokens(model):
    return torch.randint(2, model.shape.d_vocab, (2, 12))


class Nameless(LlamaAttention):
    """Takes a cache, but no signature says under which name."""

    def forward(self, hidden_states, **options):
        return super().forward(hidden_states, **options)


class Renaming(LlamaAttention):
    """Calls its cache as transformers does from 5.24 on."""

    def forward(self, hidden_states, cache=None, **options):
        given = {name: options.pop(name) for name in NAMES if name in options}
        cache = next(iter(given.values()), cache)
        return super().forward(hidden_states, **{USUAL: cache}, **options)


def is_now(kind):
    def change(attention):
        attention.__class__ = kind

    return change


def hooks_on(model):
    return [hook for module in model.raw.modules() for key in TORCH_HOOKS for hook in vars(module)[key].values()]


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_two_runs_over_one_cache_give_what_one_run_gives(family):
    hf = random_model(family) if family in OTHERS else tiny_model(family, seed=3)
    model = hw.load(hf, tokenizer=tiny_tokenizer())
    tokens, hooks = some_tokens(model), hooks_on(model)
    whole = model.run(tokens)
    found, cache = in_two_runs(model, tokens)
    torch.testing.assert_close(found, whole[:, N_BEFORE:], atol=1e-4, rtol=1e-4)
    assert cache.get_seq_length() == tokens.shape[1]
    assert hooks_on(model) == hooks


def test_a_cache_that_a_block_hands_on_as_newer_versions_do_reaches_what_the_bridge_computes():
    model = fresh(change=is_now(Renaming))
    attentions = attentions_of(model.raw)
    assert {name_of_cache(one.original_component) for one in attentions} == {"cache"}
    assert {name_read(one) for one in attentions} == {"past_key_values"}

    def as_newer_blocks_do(attention, args, options):
        given = [options.pop(name) for name in NAMES if name in options]
        return args, options | {"cache": given[0]}

    for attention in attentions:
        attention.register_forward_pre_hook(as_newer_blocks_do, with_kwargs=True)
    tokens = some_tokens(model)
    found, cache = in_two_runs(model, tokens)
    torch.testing.assert_close(found, model.run(tokens)[:, N_BEFORE:], atol=1e-5, rtol=1e-4)
    assert cache.get_seq_length() == tokens.shape[1]


def test_attention_that_names_no_cache_is_given_none_and_the_error_says_so():
    model, plain = fresh(change=is_now(Nameless)), fresh()
    tokens = some_tokens(model)
    assert not takes_cache(model.raw)
    with pytest.raises(ModelError, match=r"Nameless takes none under a known name \(cache, past_key_values"):
        model.run(tokens, past_key_values=DynamicCache())
    torch.testing.assert_close(model.run(tokens), plain.run(tokens))


def test_a_model_whose_attention_names_no_cache_writes_by_whole_runs():
    model, plain = fresh(change=is_now(Nameless)), fresh()
    prompts = some_tokens(model)
    found, expected = (generate_tokens(one, one.tokenize(prompts), max_new_tokens=6) for one in (model, plain))
    torch.testing.assert_close(found.tokens, expected.tokens)


def test_a_sweep_of_attention_that_names_no_cache_takes_whole_runs_and_says_so():
    clean, other = [2, 40, 41, 42, 43], [2, 40, 51, 42, 43]
    options = {"sites": "z", "metric": hw.logit_difference(5, 9), "progress": False}
    with pytest.warns(UserWarning, match="does not pass its keys and values to a cache"):
        slow = hw.patch(fresh(change=is_now(Nameless)), [clean], [other], **options)
    fast = hw.patch(fresh(), [clean], [other], **options)
    assert (fast.engine, slow.engine) == ("wavefront", "whole runs")
    pd.testing.assert_frame_equal(fast.table, slow.table, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_bridge_that_swallows_the_cache_is_an_error(earlier):
    model = fresh()
    attention = attentions_of(model.raw)[1]

    class Deaf(type(attention)):
        def _update_kv_cache(self, k, v, **options):
            return k, v

    tokens, cache = some_tokens(model), DynamicCache()
    if earlier:
        model.run(tokens[:, :N_BEFORE], past_key_values=cache)
    whole = model.run(tokens)
    attention.__class__ = Deaf
    torch.testing.assert_close(model.run(tokens), whole)  # without a cache there is nothing to ignore
    with pytest.raises(ModelError, match="Deaf of TransformerLens did not take them as past_key_values"):
        model.run(tokens[:, N_BEFORE:], past_key_values=cache)
    with pytest.raises(ModelError, match="Deaf of TransformerLens did not take them"):
        generate_tokens(model, model.tokenize(tokens), max_new_tokens=3)


def test_attention_that_its_block_hands_no_cache_is_an_error():
    model = fresh()

    def forget(attention, args, options):
        return args, {name: value for name, value in options.items() if name not in NAMES}

    attentions_of(model.raw)[1].register_forward_pre_hook(forget, with_kwargs=True)
    with pytest.raises(ModelError, match="its output ignores these tokens"):
        model.run(some_tokens(model), past_key_values=DynamicCache())


def test_steps_beside_hooks_on_attention_go_on_from_the_cache():
    model, seen = fresh(), []
    prompts = model.tokenize(some_tokens(model))
    hooks = [("blocks.1.attn.hook_pattern", lambda pattern, hook: seen.append(pattern.shape[-1]))]
    watched = generate_tokens(model, prompts, max_new_tokens=4, hooks=hooks)
    assert seen == [12, 13, 14, 15]
    torch.testing.assert_close(watched.tokens, generate_tokens(model, prompts, max_new_tokens=4).tokens)


@pytest.mark.skipif(not HAS_BRIDGE_ONLY, reason="native models are of transformer-lens 4")
@pytest.mark.parametrize("name", ["plain", "rotary"])
def test_a_native_model_takes_no_cache_and_writes_what_whole_runs_give(name):
    tokenizer = tiny_tokenizer()
    model = hw.load(raw_model(name, d_vocab=len(tokenizer)), tokenizer=tokenizer)
    prompts = torch.randint(2, model.shape.d_vocab, (2, 5))
    with pytest.raises(ModelError, match=r"cannot continue from .* earlier tokens: Native\w+ takes none"):
        model.run(prompts, past_key_values=DynamicCache())
    made = generate_tokens(model, model.tokenize(prompts), max_new_tokens=6).tokens
    for row, new in zip(prompts.tolist(), made, strict=True):
        for token in new:
            text = model.tokenize(torch.tensor([row]), mask=torch.ones(1, len(row), dtype=torch.bool))
            assert int(model.run(text, keep="last")[0, -1].argmax()) == token
            row.append(int(token))


def test_a_row_that_has_written_the_padding_token_goes_on():
    model = fresh(change=is_now(Nameless))
    prompts, pad = torch.tensor([[2, 40, 41], [2, 50, 51]]), model.tokenizer.pad_token_id
    seen = []

    def choose(logits, rows, step):
        seen.append(logits)
        return torch.full_like(rows, pad) if step == 0 else logits.argmax(-1)

    generate_tokens(model, model.tokenize(prompts), max_new_tokens=2, choose=choose)
    longer = torch.cat([prompts, torch.full((2, 1), pad)], 1)
    whole = model.run(model.tokenize(longer, mask=torch.ones_like(longer, dtype=torch.bool)), keep="last")
    torch.testing.assert_close(seen[1], whole[:, -1])
