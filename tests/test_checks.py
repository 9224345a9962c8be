"""The self-checks: each passes where all is well, and each is made to fail on a real model."""

import warnings

import pytest
import torch
import transformers as tf

import headwater as hw
from headwater.errors import InterventionError, ModelError
from headwater.models import checks
from tests.test_hooked_model import random_texts
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

EDITABLE = [
    "blocks.1.hook_resid_pre",
    "blocks.1.hook_resid_post",
    "blocks.1.attn.hook_attn_scores",
    "blocks.1.attn.hook_pattern",
    "blocks.1.attn.hook_z",
    "blocks.1.attn.hook_q",
    "blocks.1.attn.hook_k",
    "blocks.1.attn.hook_v",
    "blocks.1.hook_attn_out",
    "blocks.1.hook_mlp_out",
]


def foreign_model(config: tf.PretrainedConfig) -> hw.HookedModel:
    config.bos_token_id = config.eos_token_id = 0
    config.pad_token_id = 1
    return hw.load(tf.AutoModelForCausalLM.from_config(config).eval(), tokenizer=tiny_tokenizer())


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, checkpoint):
    return hw.load(checkpoint(request.param))


def test_every_activation_that_analyses_edit_can_be_edited(model):
    text = random_texts(1)
    checks.hook_fires(model, EDITABLE, text)
    for name in EDITABLE:
        checks.edit_takes_effect(model, name, text)


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
        checks.edit_takes_effect(model, "blocks.0.hook_resid_post", "the capital of France")
        for name in ("blocks.0.attn.hook_attn_scores", "blocks.0.attn.hook_pattern"):
            with pytest.raises(InterventionError, match="did not take effect"):
                checks.edit_takes_effect(model, name, "the capital of France")


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


def test_an_edit_that_reaches_no_logit_is_found_out(checkpoint):
    model = hw.load(checkpoint("llama"))
    model.raw.unembed.register_forward_hook(lambda module, args, logits: torch.zeros_like(logits))
    with pytest.raises(InterventionError, match="changes nothing"):
        checks.edit_takes_effect(model, "blocks.0.hook_resid_post", "Paris")


def test_an_activation_that_never_fires_is_found_out(checkpoint):
    with pytest.raises(InterventionError, match="hook_rot_q"):
        checks.hook_fires(hw.load(checkpoint("neox")), "blocks.0.attn.hook_rot_q", "Paris")


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

    checks.edges_are_cut(pattern_after(model, " Paris Rome cat dog", knock_out), cut)
    with pytest.raises(InterventionError, match="did not take effect"):
        checks.edges_are_cut(pattern_after(model, " Paris Rome cat dog", lambda scores, hook: None), cut)


def test_a_query_without_keys_is_found_out_and_would_attend_to_the_future(checkpoint):
    model = hw.load(checkpoint("llama"))
    n = 6
    causal = torch.ones(1, n, n, dtype=torch.bool).tril()
    checks.one_key_survives(causal)
    visible = causal.clone()
    visible[:, 3] = False
    with pytest.raises(InterventionError, match="position 3"):
        checks.one_key_survives(visible)
    checks.one_key_survives(visible, mask=torch.arange(n)[None] != 3)
    pattern = pattern_after(
        model,
        [list(range(5, 5 + n))],
        lambda scores, hook: scores.masked_fill(~visible[:, None], torch.finfo(scores.dtype).min),
    )
    assert pattern[0, :, 3, 4:].sum() > 0


def test_grouped_value_heads_expand_in_the_right_order_and_a_wrong_order_is_found_out(model):
    kept = {}
    names = {"z": "blocks.1.attn.hook_z", "v": "blocks.1.attn.hook_v", "pattern": "blocks.1.attn.hook_pattern"}
    model.run(
        random_texts(3)[:1],
        [(name, lambda x, hook, key=key: kept.update({key: x.clone()})) for key, name in names.items()],
    )
    group = model.shape.group_size
    values = kept["v"].reshape(*kept["v"].shape[:2], model.shape.n_kv_heads, model.shape.d_head)
    z = kept["z"].reshape(*kept["z"].shape[:2], model.shape.n_heads, model.shape.d_head)
    checks.value_heads_match(z, kept["pattern"], values.repeat_interleave(group, dim=2))
    shuffled = values.repeat(1, 1, group, 1) if group > 1 else values.flip(2)
    with pytest.raises(InterventionError, match="do not match"):
        checks.value_heads_match(z, kept["pattern"], shuffled)


def test_a_model_in_training_mode_is_found_out(checkpoint):
    model = hw.load(checkpoint("gpt2"))
    checks.evaluation_mode(model)
    model.raw.blocks[1].train()
    with pytest.raises(ModelError, match=r"training mode \(module .*blocks\.1"):
        checks.evaluation_mode(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number_is_found_and_named(family, value):
    hf = tiny_model(family)
    name, parameter = list(hf.named_parameters())[int(torch.randint(len(list(hf.parameters())), ()))]
    with torch.no_grad():
        parameter.view(-1)[int(torch.randint(parameter.numel(), ()))] = value
    with pytest.raises(ModelError, match="NaN or infinite"):
        hw.load(hf, tokenizer=tiny_tokenizer())
    assert name


def test_a_tokenizer_must_fit_the_vocabulary():
    tokenizer = tiny_tokenizer()
    checks.tokenizer_fits(tokenizer, len(tokenizer))
    checks.tokenizer_fits(tokenizer, len(tokenizer) + 64)
    for d_vocab in (len(tokenizer) - 1, 2 * len(tokenizer) + 1):
        with pytest.raises(ModelError, match="another model"):
            checks.tokenizer_fits(tokenizer, d_vocab)
