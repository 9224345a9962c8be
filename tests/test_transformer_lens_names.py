"""TransformerLens's names on a headwater model.

`tests/test_hooked_transformer.py` holds them against a HookedTransformer. Here are the families that it has not, hooks
by filter, words to tokens, refusals, and names that are not there.
"""

import copy
import pickle

import pytest
import torch

import headwater as hw
from headwater.errors import InputError, InterventionError
from headwater.models.sites import SITES
from tests.tiny import tiny_model, tiny_tokenizer, tokenizer_of

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TEXT, OTHER = " the capital of France is", " cat dog"


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gpt2", "neox", "llama", "qwen2", "gemma2", "phi"])
def test_parameters_by_head_compute_what_the_model_computes(models, family):
    model = models(family)
    shape = model.shape
    tokens = model.to_tokens(TEXT)
    logits, cache = model.run_with_cache(tokens)
    W_Q, W_K, W_V, W_O = model.W_Q, model.W_K, model.W_V, model.W_O
    assert W_Q.shape == W_K.shape == W_V.shape == (shape.n_layers, shape.n_heads, shape.d_model, shape.d_head)
    assert W_O.shape == (shape.n_layers, shape.n_heads, shape.d_head, shape.d_model)
    assert model.b_Q.shape == model.b_K.shape == model.b_V.shape == (shape.n_layers, shape.n_heads, shape.d_head)
    for layer in range(shape.n_layers):
        x = cache[f"blocks.{layer}.attn.q.hook_in" if family != "gpt2" else f"blocks.{layer}.attn.hook_in"]
        for letter, W, b in (("q", W_Q, model.b_Q), ("k", W_K, model.b_K), ("v", W_V, model.b_V)):
            found = torch.einsum("bpm,hmd->bphd", x, W[layer]) + b[layer]
            held = cache[letter, layer]
            held = held if held.shape[2] == shape.n_heads else held.repeat_interleave(shape.group_size, 2)
            torch.testing.assert_close(found, held, msg=lambda said, where=(letter, layer): f"{where}: {said}", **CLOSE)
        values = torch.einsum("bpm,hmd->bphd", x, W_V[layer]) + model.b_V[layer]
        z = torch.einsum("bhqk,bkhd->bqhd", cache["pattern", layer], values)
        torch.testing.assert_close(z, cache["z", layer], **CLOSE)
        written = torch.einsum("bphd,hdm->bpm", z, W_O[layer]) + model.b_O[layer]
        torch.testing.assert_close(written, cache[f"blocks.{layer}.attn.o.hook_out"], **CLOSE)
    if family != "gemma2":  # whose logits are capped
        torch.testing.assert_close(cache["unembed.hook_in"] @ model.W_U + model.b_U, logits, **CLOSE)
    torch.testing.assert_close(model.W_E[tokens[0]], cache["hook_embed"][0].reshape(-1, shape.d_model), **CLOSE)


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gpt2", "neox", "llama", "gemma2", "mixtral"])
def test_a_cache_is_what_transformer_lens_itself_keeps(models, family):
    model = models(family)
    tokens = model.to_tokens(TEXT)
    _, theirs = model.raw.run_with_cache(tokens)
    logits, ours = model.run_with_cache(tokens)
    torch.testing.assert_close(logits, model.run(tokens))
    refused = {SITES[site].hook_name(layer) for site, layer in model.misfits}
    assert set(theirs.keys()) - refused <= set(ours.keys())
    assert not refused & set(ours.keys())
    for name in set(theirs.keys()) - refused:
        torch.testing.assert_close(ours[name], theirs[name], msg=lambda said, name=name: f"{name}: {said}")
    assert ours["pattern", 0] is ours["blocks.0.attn.hook_pattern"]
    assert torch.equal(ours["resid_post", -1], ours["resid_post", model.shape.n_layers - 1])
    kept = model.cache([TEXT], sites="resid_mid" if not model.shape.parallel_blocks else "resid_pre", progress=False)
    site = "resid_pre" if model.shape.parallel_blocks else "resid_mid"
    torch.testing.assert_close(kept.residual[1], ours[site, 1])


def test_a_filter_keeps_names_a_name_or_what_a_function_says(llama):
    def kept(which):
        return sorted(llama.run_with_cache(TEXT, names_filter=which)[1].keys())

    assert kept("blocks.1.attn.hook_z") == ["blocks.1.attn.hook_z"]
    assert kept(["hook_embed", "blocks.0.hook_resid_pre"]) == ["blocks.0.hook_resid_pre", "hook_embed"]
    assert kept(lambda name: name.endswith("hook_z")) == [f"blocks.{layer}.attn.hook_z" for layer in range(3)]
    with pytest.raises(InterventionError, match=r"no activation named 'blocks.0.attn.hook_zz'. Did you mean"):
        kept("blocks.0.attn.hook_zz")
    with pytest.raises(InputError, match="is True for no hook"):
        kept(lambda name: False)
    with pytest.raises(InputError, match="names no hooks"):
        kept([])


def test_what_is_kept_can_be_written_into_and_changes_nothing(llama):
    before = llama(TEXT)
    _, cache = llama.run_with_cache(TEXT)
    cache["resid_post", 0][:] = 0
    before -= before.mean()
    assert not torch.equal(before, llama(TEXT))
    W_Q = llama.W_Q
    W_Q *= 0
    assert llama.W_Q.any()


def test_a_hook_by_filter_acts_once_at_each_place_and_like_one_by_name(llama):
    seen = []

    def halve(activation, hook):
        seen.append(hook.name)
        return activation / 2

    by_filter = llama.run_with_hooks(TEXT, fwd_hooks=[(lambda name: name.endswith("resid_mid"), halve)])
    assert len(seen) == 3
    names = [f"blocks.{layer}.hook_resid_mid" for layer in range(3)]
    torch.testing.assert_close(by_filter, llama.run(TEXT, [(name, lambda x, hook: x / 2) for name in names]))
    torch.testing.assert_close(by_filter, llama.run_with_hooks(TEXT, fwd_hooks=[(names, halve)]))
    torch.testing.assert_close(by_filter, llama.run_with_hooks(TEXT, fwd_hooks=((name, halve) for name in names)))
    assert not torch.allclose(by_filter, llama(TEXT))


def test_hooks_follow_the_rules_of_headwater(llama):
    def forgets(activation, hook):
        activation[:] = 0

    with pytest.raises(InterventionError, match="wrote into the activation and returned None"):
        llama.run_with_hooks(TEXT, fwd_hooks=[("blocks.0.hook_resid_pre", forgets)])
    with pytest.raises(InputError, match=r"model.run\(tokens, hooks, grad=True\)"):
        llama.run_with_hooks(TEXT, bwd_hooks=[("blocks.0.hook_resid_pre", forgets)])
    with pytest.raises(InputError, match=r"hooks has no option fwd_hooks=: hooks are pairs \(name, function\)"):
        llama.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", forgets)])


def test_the_loss_leaves_out_padding_and_is_that_of_each_text(llama):
    batch = llama.tokenize([TEXT, OTHER])
    each = [llama(text, return_type="loss", loss_per_token=True) for text in (TEXT, OTHER)]
    torch.testing.assert_close(llama(batch, return_type="loss"), torch.cat(each, 1).mean())
    of_both = llama([TEXT, OTHER], return_type="loss", loss_per_token=True)
    assert torch.equal(of_both.isnan(), ~batch.mask[:, 1:])
    torch.testing.assert_close(of_both.nanmean(), torch.cat(each, 1).mean())
    logits, loss = llama(TEXT, return_type="both")
    tokens = llama.to_tokens(TEXT)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]))
    assert llama(TEXT, return_type=None) is None
    with pytest.raises(InputError, match="return_type='logit' is not one of logits, loss, both"):
        llama(TEXT, return_type="logit")


def test_every_id_of_a_tensor_is_read_as_a_token_and_padding_in_front_is_refused(llama):
    tokens = llama.to_tokens([TEXT, OTHER])
    alone = llama.to_tokens(OTHER)
    torch.testing.assert_close(llama(tokens)[1, : alone.shape[1]], llama(alone)[0])
    with pytest.raises(InputError, match="begins with padding, which would shift its positions"):
        llama(tokens.flip(1))


def test_words_become_tokens_and_tokens_words(llama):
    tokens = llama.to_tokens([TEXT, OTHER])
    assert tokens.tolist() == llama.tokenize([TEXT, OTHER]).tokens.tolist()
    assert llama.to_tokens(TEXT, prepend_bos=False).tolist() == tokens[:1, 1:].tolist()
    assert llama.to_tokens(" cat" * 100).shape == (1, 64)
    assert llama.to_str_tokens(TEXT) == ["<s>", " the", " capital", " of", " France", " is"]
    assert llama.to_str_tokens(TEXT, prepend_bos=False)[0] == " the"
    assert llama.to_str_tokens([OTHER, " cat"]) == [["<s>", " cat", " dog"], ["<s>", " cat"]]
    assert llama.to_str_tokens(tokens[0]) == llama.to_str_tokens(tokens[:1]) == llama.to_str_tokens(TEXT)
    assert llama.to_string(tokens[0]) == "<s>" + TEXT
    assert llama.to_string(tokens[0].tolist()) == "<s>" + TEXT
    assert llama.to_string([tokens[0], tokens[0].tolist()]) == ["<s>" + TEXT] * 2
    assert llama.to_single_str_token(llama.to_single_token(" Paris")) == " Paris"
    with pytest.raises(InputError, match=r"' Par' is not a single token: ' ' \+ 'P' \+ 'a' \+ 'r'"):
        llama.to_single_token(" Par")
    with pytest.raises(InputError, match="outside the model's vocabulary"):
        llama.to_string([10**6])
    pythia = hw.load(tiny_model("neox"), tokenizer=tokenizer_of("neox"))
    assert not pythia.bos
    assert pythia.to_str_tokens(" cat") == [" cat"]
    assert pythia.to_str_tokens(" cat", prepend_bos=True) == ["<s>", " cat"]
    torch.testing.assert_close(pythia(" cat", prepend_bos=True), pythia(pythia.to_tokens(" cat", prepend_bos=True)))


def test_cfg_tells_and_takes_nothing(llama):
    cfg = llama.cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.d_model, cfg.d_head, cfg.d_mlp, cfg.n_ctx) == (3, 4, 32, 8, 48, 64)
    assert (cfg.d_vocab, cfg.act_fn, cfg.n_key_value_heads) == (len(tiny_tokenizer()), "silu", 2)
    assert (cfg.device, cfg.dtype) == (llama.device, torch.float32)
    assert {"n_layers", "device", "act_fn"} <= set(dir(cfg))
    assert "n_layers=3" in repr(cfg)
    with pytest.raises(AttributeError, match="is read-only"):
        cfg.use_attn_result = True
    with pytest.raises(AttributeError, match="n_layer"):
        _ = cfg.n_layer


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("reset_hooks", "there is nothing to reset: hooks last for one run"),
        ("blocks", r"model.run_with_cache\(tokens\).*model.raw.blocks is TransformerLens's own"),
        ("ln_final", "final_norm_gain"),
        ("set_use_attn_result", "cache"),
        ("to", r"hw.load\(name, device="),
        ("hook_dict", "run_with_hooks.*model.raw.hook_dict is TransformerLens's own"),
        ("W_pos", "rotary ones rotate queries and keys"),
        ("parameters", "open_weights"),
        ("run_with_caches", "Did you mean 'run_with_cache'"),
    ],
)
def test_a_name_that_is_not_there_says_what_to_use(llama, name, way):
    assert not hasattr(llama, name)
    with pytest.raises(AttributeError, match=f"(?s)has no '{name}'.*{way}"):
        getattr(llama, name)


def test_names_that_are_not_there_leave_python_as_it_is(llama):
    assert not hasattr(llama, "__array__")
    assert not hasattr(llama, "_repr_png_")
    assert {"run_with_cache", "W_Q", "run"} <= set(dir(llama))
    assert copy.copy(llama).shape is llama.shape
    assert object.__new__(hw.HookedModel).__class__ is hw.HookedModel
    with pytest.raises(AttributeError):
        _ = object.__new__(hw.HookedModel).blocks
    with pytest.raises((TypeError, pickle.PicklingError, AttributeError)):
        pickle.dumps(llama)
