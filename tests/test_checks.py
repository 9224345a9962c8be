"""The self-checks: each passes where all is well, and each is made to fail on a real model."""

import math
import warnings

import pytest
import torch
import transformers as tf

import headwater as hw
from headwater.errors import InterventionError, ModelError
from headwater.models import bridge_check
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer


def foreign_model(config: tf.PretrainedConfig) -> hw.HookedModel:
    config.bos_token_id = config.eos_token_id = 0
    config.pad_token_id = 1
    return hw.load(tf.AutoModelForCausalLM.from_config(config).eval(), tokenizer=tiny_tokenizer())


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, checkpoint):
    return hw.load(checkpoint(request.param))


def test_attention_that_transformer_lens_only_reports_is_found_out():
    v = len(tiny_tokenizer())
    configs = [
        tf.GPTJConfig(vocab_size=v, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
        tf.GPTNeoConfig(
            vocab_size=v,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            max_position_embeddings=64,
            attention_types=[[["global"], 2]],
        ),
        tf.OPTConfig(
            vocab_size=v,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=48,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        ),
    ]
    for config in configs:
        model = foreign_model(config)
        text = "the capital of France"
        edited = model.run(text, [("blocks.0.hook_resid_post", halved)])
        assert not torch.allclose(edited, model.run(text))
        for name in ("blocks.0.attn.hook_attn_scores", "blocks.0.attn.hook_pattern"):
            with pytest.raises(InterventionError, match="did not take effect"):
                model.run(text, [(name, halved)])


def test_finding_a_discarded_edit_leaves_the_warnings_of_the_process_alone():
    config = {"vocab_size": len(tiny_tokenizer()), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    one, other = (foreign_model(tf.GPTJConfig(**config, rotary_dim=4)) for _ in range(2))
    name, text = "blocks.1.attn.hook_pattern", "the capital of France"
    filters = list(warnings.filters)
    contexts = [model.hooks([(name, lambda pattern, hook: None)]) for model in (one, other)]
    for enter in contexts:  # as two threads would: the first leaves while the second is still in
        enter.__enter__()
    assert warnings.filters == filters
    for leave in contexts:
        leave.__exit__(None, None, None)
    assert warnings.filters == filters
    with warnings.catch_warnings(action="ignore"), one.hooks([(name, lambda pattern, hook: None)]):
        with pytest.raises(InterventionError, match="hook_pattern did not take effect: GPTJ"):
            one.run(text, [(name, halved)])
        with pytest.raises(InterventionError, match="hook_pattern did not take effect: GPTJ"):
            one.run(text, [(name, halved)])
    with pytest.warns(UserWarning, match="edit is discarded"), one.raw.hooks(fwd_hooks=[(name, halved)]):
        one.raw(one.tokenize(text).tokens)  # outside headwater TransformerLens warns as ever


def halved(activation, hook):
    return activation / 2


def pattern_after(model, text, edit):
    kept = []
    model.run(
        text,
        [
            ("blocks.1.attn.hook_attn_scores", edit),
            ("blocks.1.attn.hook_pattern", lambda pattern, hook: kept.append(pattern.clone())),
        ],
    )
    return kept[0]


def test_a_knockout_cuts_its_edges(model):
    n = model.tokenize(" Paris Rome cat dog").tokens.shape[1]
    cut = torch.zeros(1, n, n, dtype=torch.bool)
    cut[:, 2:, 1] = True

    def knock_out(scores, hook):
        return scores.masked_fill(cut[:, None], torch.finfo(scores.dtype).min)

    each_head = cut[:, None].expand(-1, model.shape.n_heads, -1, -1)
    bridge_check.edges_are_cut(pattern_after(model, " Paris Rome cat dog", knock_out), each_head)
    with pytest.raises(InterventionError, match="did not take effect"):
        bridge_check.edges_are_cut(pattern_after(model, " Paris Rome cat dog", lambda scores, hook: None), each_head)


def test_a_model_in_training_mode_is_found_out(checkpoint):
    model = hw.load(checkpoint("gpt2"))
    bridge_check.evaluation_mode(model)
    model.raw.blocks[1].train()
    with pytest.raises(ModelError, match=r"training mode \(module .*blocks\.1"):
        bridge_check.evaluation_mode(model)
    model.raw.train()
    for run in (model.run, lambda text: model.generate(text, max_new_tokens=2), lambda text: hw.lens(model, text)):
        with pytest.raises(ModelError, match="in training mode, where dropout is random"):
            run(" the dog")


@pytest.mark.diagonal
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number_is_found_and_named(family, value):
    hf = tiny_model(family)
    name, parameter = list(hf.named_parameters())[int(torch.randint(len(list(hf.parameters())), ()))]
    with torch.no_grad():
        parameter.view(-1)[int(torch.randint(parameter.numel(), ()))] = value
    with pytest.raises(ModelError, match="NaN or infinite"):
        hw.load(hf, tokenizer=tiny_tokenizer())
    assert name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_whose_sum_overflows_are_finite_and_infinities_that_cancel_are_not(dtype):
    largest = torch.finfo(dtype).max
    assert bridge_check.is_finite(torch.full((300,), largest, dtype=dtype))
    assert not bridge_check.is_finite(torch.tensor([math.inf, -math.inf], dtype=dtype))
    assert not bridge_check.is_finite(torch.tensor([1.0, math.nan], dtype=dtype))


def test_a_tokenizer_must_fit_the_vocabulary():
    tokenizer = tiny_tokenizer()
    bridge_check.tokenizer_fits(tokenizer, len(tokenizer))
    bridge_check.tokenizer_fits(tokenizer, len(tokenizer) + 64)
    for d_vocab in (len(tokenizer) - 1, 2 * len(tokenizer) + 1):
        with pytest.raises(ModelError, match="another model"):
            bridge_check.tokenizer_fits(tokenizer, d_vocab)
