"""A HookedTransformer and a bridge with the same weights are the same model here: same caches, same head scores.

The file runs under both supported generations of transformer-lens. Under 3.9 (`make test-tl39`) the HookedTransformer
is an instance; from 4.0 on the class is gone, and what remains of it are checkpoints: a state dict and a config.
"""

import importlib.metadata
import json

import pytest
import torch
from einops import rearrange
from safetensors.torch import save_file

import headwater as hw
from headwater.errors import InputError, ModelError
from headwater.heads.relations import Relation
from headwater.models.checkpoint import hub_name
from headwater.models.weights import open_weights
from tests.tiny import WORDS, tiny_model, tiny_tokenizer

VERSION = tuple(map(int, importlib.metadata.version("transformer-lens").split(".")[:2]))
instances = pytest.mark.skipif(VERSION >= (4, 0), reason="transformer-lens 4 has no HookedTransformer")
pytestmark = [
    pytest.mark.filterwarnings("ignore:HookedTransformer:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]
FAMILIES = ("gpt2", "llama")
TEXTS = [" the capital of France is Paris", " one two", " cat dog chat chien go"]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def gpt2_checkpoint(hf) -> tuple[dict, dict[str, torch.Tensor]]:
    """The config and state dict a HookedTransformer with these weights would save, unprocessed."""
    weights, heads = hf.state_dict(), hf.config.n_head
    config = {"act_fn": "gelu_new", "normalization_type": "LN", "eps": hf.config.layer_norm_epsilon}
    state = {
        "embed.W_E": weights["transformer.wte.weight"],
        "pos_embed.W_pos": weights["transformer.wpe.weight"],
        "ln_final.w": weights["transformer.ln_f.weight"],
        "ln_final.b": weights["transformer.ln_f.bias"],
        "unembed.W_U": weights["lm_head.weight"].T,
        "unembed.b_U": torch.zeros(hf.config.vocab_size),
    }
    for layer in range(hf.config.n_layer):
        theirs, ours = f"transformer.h.{layer}", f"blocks.{layer}"
        fused_w = rearrange(weights[f"{theirs}.attn.c_attn.weight"], "d (qkv h e) -> qkv h d e", qkv=3, h=heads)
        fused_b = rearrange(weights[f"{theirs}.attn.c_attn.bias"], "(qkv h e) -> qkv h e", qkv=3, h=heads)
        for i, which in enumerate("QKV"):
            state[f"{ours}.attn.W_{which}"], state[f"{ours}.attn.b_{which}"] = fused_w[i], fused_b[i]
        state[f"{ours}.attn.W_O"] = rearrange(weights[f"{theirs}.attn.c_proj.weight"], "(h e) d -> h e d", h=heads)
        state[f"{ours}.attn.b_O"] = weights[f"{theirs}.attn.c_proj.bias"]
        for norm in ("1", "2"):
            state[f"{ours}.ln{norm}.w"] = weights[f"{theirs}.ln_{norm}.weight"]
            state[f"{ours}.ln{norm}.b"] = weights[f"{theirs}.ln_{norm}.bias"]
        state[f"{ours}.mlp.W_in"] = weights[f"{theirs}.mlp.c_fc.weight"]
        state[f"{ours}.mlp.b_in"] = weights[f"{theirs}.mlp.c_fc.bias"]
        state[f"{ours}.mlp.W_out"] = weights[f"{theirs}.mlp.c_proj.weight"]
        state[f"{ours}.mlp.b_out"] = weights[f"{theirs}.mlp.c_proj.bias"]
    return config, state


def llama_checkpoint(hf) -> tuple[dict, dict[str, torch.Tensor]]:
    """The same for Llama: grouped heads under `_W_K` and `_W_V`, and zeros for the biases it has not."""
    weights, c = hf.state_dict(), hf.config
    config = {
        "act_fn": "silu",
        "normalization_type": "RMS",
        "final_rms": True,
        "gated_mlp": True,
        "eps": c.rms_norm_eps,
        "n_key_value_heads": c.num_key_value_heads,
        "positional_embedding_type": "rotary",
        "rotary_dim": c.head_dim,
        "rotary_base": int(c.rope_parameters["rope_theta"]),
    }
    state = {
        "embed.W_E": weights["model.embed_tokens.weight"],
        "ln_final.w": weights["model.norm.weight"],
        "unembed.W_U": weights["lm_head.weight"].T,
        "unembed.b_U": torch.zeros(c.vocab_size),
    }
    for layer in range(c.num_hidden_layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        for name, which, n in (
            ("q", "W_Q", c.num_attention_heads),
            ("k", "_W_K", c.num_key_value_heads),
            ("v", "_W_V", c.num_key_value_heads),
        ):
            weight = rearrange(weights[f"{theirs}.self_attn.{name}_proj.weight"], "(h e) d -> h d e", h=n)
            state[f"{ours}.attn.{which}"] = weight
            state[f"{ours}.attn.{which.replace('W', 'b')}"] = torch.zeros(n, c.head_dim)
        o_proj = weights[f"{theirs}.self_attn.o_proj.weight"]
        state[f"{ours}.attn.W_O"] = rearrange(o_proj, "d (h e) -> h e d", h=c.num_attention_heads)
        state[f"{ours}.attn.b_O"] = torch.zeros(c.hidden_size)
        state[f"{ours}.ln1.w"] = weights[f"{theirs}.input_layernorm.weight"]
        state[f"{ours}.ln2.w"] = weights[f"{theirs}.post_attention_layernorm.weight"]
        state[f"{ours}.mlp.W_in"] = weights[f"{theirs}.mlp.up_proj.weight"].T
        state[f"{ours}.mlp.W_gate"] = weights[f"{theirs}.mlp.gate_proj.weight"].T
        state[f"{ours}.mlp.W_out"] = weights[f"{theirs}.mlp.down_proj.weight"].T
        state[f"{ours}.mlp.b_in"] = torch.zeros(c.intermediate_size)
        state[f"{ours}.mlp.b_out"] = torch.zeros(c.hidden_size)
    return config, state


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def same_weights(family):
    """A transformers model, and the config and state dict of a HookedTransformer with its weights."""
    hf = tiny_model(family, seed=int(torch.randint(10**6, ())))
    config, state = {"gpt2": gpt2_checkpoint, "llama": llama_checkpoint}[family](hf)
    config |= {
        "n_layers": 3,
        "d_model": 32,
        "n_heads": 4,
        "d_head": 8,
        "d_mlp": 48 if family == "llama" else 128,
        "n_ctx": 64,
        "d_vocab": len(tiny_tokenizer()),
        "default_prepend_bos": True,
    }
    return hf, config, {name: tensor.clone().contiguous() for name, tensor in state.items()}


@pytest.fixture
def bridge(same_weights):
    return hw.load(same_weights[0], tokenizer=tiny_tokenizer())


@pytest.fixture
def hooked_transformer(same_weights):
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    _, config, state = same_weights
    cfg = HookedTransformerConfig.from_dict({"device": "cpu", **config})
    model = HookedTransformer(cfg, tokenizer=tiny_tokenizer(), move_to_device=False)
    model.load_state_dict(state, strict=False)
    return model.eval()


@pytest.fixture
def folder(same_weights, tmp_path):
    _, config, state = same_weights
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "torch.float32", "device": "cuda"}))
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path


def assert_same_model(ours: hw.HookedModel, bridge: hw.HookedModel) -> None:
    for site in ("resid_pre", "resid_mid", "resid_post"):
        given = {"sites": [site, "pattern"], "batch_size": 2, "progress": False}
        mine, theirs = (model.cache(TEXTS, **given) for model in (ours, bridge))
        torch.testing.assert_close(mine.residual, theirs.residual, **CLOSE)
        torch.testing.assert_close(mine.attention, theirs.attention, **CLOSE)
        assert mine.strings == theirs.strings
        assert torch.equal(mine.mask, theirs.mask)
    torch.testing.assert_close(ours.run(TEXTS[0]), bridge.run(TEXTS[0]), **CLOSE)
    torch.testing.assert_close(ours.run(TEXTS, keep="last"), bridge.run(TEXTS, keep="last"), **CLOSE)
    assert ours.run(TEXTS, stop_at=3).shape == bridge.run(TEXTS, stop_at=3).shape


def assert_same_factors(ours: hw.HookedModel, bridge: hw.HookedModel) -> None:
    mine, theirs = open_weights(ours), open_weights(bridge)
    for layer in range(3):
        a, b = mine.layer(layer), theirs.layer(layer)
        for factor in ("W_V", "W_O", "norm_gain"):
            torch.testing.assert_close(getattr(a, factor), getattr(b, factor))
        for w in (a, b):
            assert len(w.W_K) == bridge.shape.n_kv_heads
        torch.testing.assert_close(
            a.W_Q @ a.expand_kv(a.W_K).transpose(1, 2), b.W_Q @ b.expand_kv(b.W_K).transpose(1, 2), **CLOSE
        )
    torch.testing.assert_close(mine.embedding(), theirs.embedding())
    torch.testing.assert_close(mine.unembedding(), theirs.unembedding())


def assert_same_head_scores(ours: hw.HookedModel, bridge: hw.HookedModel) -> None:
    pairs = [(WORDS[i], (WORDS[j],)) for i, j in torch.randint(len(WORDS), (200, 2)).tolist()]
    relations = [
        Relation(name, "linguistic", tuple(dict(pairs[i::2]).items())) for i, name in enumerate(("first", "second"))
    ]
    tables = [
        hw.classify_heads(model, relations=relations, rule="published", k=20, progress=False).table
        for model in (ours, bridge)
    ]
    columns = ["layer", "head", "relation", "score", "suppression", "pairs"]
    assert tables[0]["score"].nunique() > 3
    assert tables[0][columns].equals(tables[1][columns])


def assert_same(ours: hw.HookedModel, bridge: hw.HookedModel) -> None:
    assert_same_model(ours, bridge)
    assert_same_factors(ours, bridge)
    assert_same_head_scores(ours, bridge)


@instances
@pytest.mark.oracle
def test_a_hooked_transformer_has_the_caches_and_head_scores_of_the_bridge(hooked_transformer, bridge):
    before = {name: tensor.clone() for name, tensor in hooked_transformer.state_dict().items()}
    model = hw.load(hooked_transformer)
    assert model.raw is hooked_transformer
    assert_same(model, bridge)
    assert not any(point.fwd_hooks for point in hooked_transformer.hook_dict.values())
    for name, tensor in hooked_transformer.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@instances
def test_an_edit_of_a_hooked_transformer_has_the_effect_it_has_on_the_bridge(hooked_transformer, bridge):
    hooks = [("blocks.1.hook_resid_post", lambda resid, hook: resid / 2)]
    mine, theirs = (model.run(TEXTS[0], hooks) for model in (hw.load(hooked_transformer), bridge))
    torch.testing.assert_close(mine, theirs, **CLOSE)
    assert not torch.allclose(mine, bridge.run(TEXTS[0]), atol=1e-2)


@instances
@pytest.mark.oracle
def test_a_hooked_transformer_is_swept_in_one_walk_to_what_a_loop_over_the_bridge_gives(hooked_transformer, bridge):
    model = hw.load(hooked_transformer)
    clean, corrupted = [[2, 3, 4, 5, 6, 7], [2, 9, 10, 11]], [[2, 30, 4, 50, 6, 7], [2, 90, 10, 11]]
    metric = hw.logit_difference(5, 9)
    sweep = hw.patch(model, clean, corrupted, sites=["resid_pre", "z"], metric=metric, progress=False)
    assert sweep.engine == "wavefront"
    for cell in sweep.table.sample(12).itertuples():
        name = f"blocks.{cell.layer}.hook_resid_pre" if cell.site == "resid_pre" else f"blocks.{cell.layer}.attn.hook_z"
        place = (0, cell.position) if cell.site == "resid_pre" else (0, slice(None), cell.head)
        held = []
        bridge.run([clean[cell.example]], [(name, lambda x, hook, held=held: held.append(x.clone()))])

        def write(x, hook, value=held[0], place=place):
            x = x.clone()
            x[place] = value[place]
            return x

        logits = bridge.run([corrupted[cell.example]], [(name, write)])[0, -1]
        assert cell.corrupted + cell.effect == pytest.approx(float(logits[5] - logits[9]), abs=1e-4)


@instances
@pytest.mark.oracle
@pytest.mark.parametrize("method", ["exact", "eap", "eap-ig", "sublayer", "screened"])
def test_edges_of_a_hooked_transformer_are_those_of_the_bridge(hooked_transformer, bridge, method):
    pair = [[2, 3, 4, 5, 6, 7]], [[2, 30, 4, 50, 6, 7]]
    mine, theirs = (
        hw.edges(model, *pair, metric=hw.logit_difference(5, 9), method=method, progress=False)
        for model in (hw.load(hooked_transformer), bridge)
    )
    for name in ("effects", "estimates"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), equal_nan=True, atol=1e-5, rtol=1e-3)


@instances
@pytest.mark.oracle
@pytest.mark.parametrize("variant", ["mask", "zero"])
def test_a_knockout_of_a_hooked_transformer_is_what_cut_scores_or_weights_give_on_the_bridge(
    hooked_transformer, bridge, variant
):
    prompt, metric = [2, 3, 4, 5, 6, 7], hw.logit_difference(5, 9)
    sweep = hw.knockout(
        hw.load(hooked_transformer), [prompt], block=("last", (1, 3)), variant=variant, metric=metric,
        window="cumulative", progress=False,
    )  # fmt: skip

    def cut(x, hook):
        x = x.clone()
        x[:, :, -1, 1:3] = torch.finfo(x.dtype).min if variant == "mask" else 0
        return x

    site = "hook_attn_scores" if variant == "mask" else "hook_pattern"
    for layer, effect, clean in sweep.table[["layer", "effect", "clean"]].itertuples(index=False):
        logits = bridge.run([prompt], [(f"blocks.{i}.attn.{site}", cut) for i in range(layer + 1)])[0, -1]
        assert clean + effect == pytest.approx(float(logits[5] - logits[9]), abs=1e-4)


def ordinary_code(model) -> dict[str, object]:
    """A page as people write it for TransformerLens: induction scores, patching loops, direct attribution."""
    found: dict[str, object] = {}
    cfg = model.cfg
    found["cfg"] = [cfg.n_layers, cfg.n_heads, cfg.d_model, cfg.d_head, cfg.d_mlp, cfg.d_vocab, cfg.n_ctx, cfg.act_fn]
    for name in ("W_E", "W_U", "b_U", "W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"):
        found[name] = getattr(model, name)

    # tokens
    text = " the capital of France is Paris"
    tokens = model.to_tokens(text)
    found["tokens"] = tokens.tolist()
    found["without"] = model.to_tokens(text, prepend_bos=False).tolist()
    found["strings"] = [model.to_str_tokens(text), model.to_string(tokens[0]), model.to_string(tokens)]
    found["several"] = model.to_tokens([" Paris", " Rome Italy"]).tolist()
    answer, wrong = model.to_single_token(" Paris"), model.to_single_token(" Rome")
    found["single"] = [answer, wrong, model.to_single_str_token(answer)]
    found["logits"], found["loss"] = model(tokens), model(tokens, return_type="loss")
    found["loss of text"] = model(text, return_type="loss")
    found["loss per token"] = model(tokens, return_type="loss", loss_per_token=True)
    found["both"] = model(tokens, return_type="both")[1]
    assert model(tokens, return_type=None) is None

    # induction scores
    half = torch.arange(10, 30)[None].repeat(2, 1)
    half[1] += 25
    repeated = torch.cat([tokens[:, :1].expand(2, 1), half, half], 1)
    _, cache = model.run_with_cache(repeated, names_filter=lambda name: name.endswith("pattern"))
    found["filtered"] = sorted(cache.keys())
    scores = [
        cache["pattern", layer].diagonal(1 - half.shape[1], dim1=-2, dim2=-1).mean((0, 2))
        for layer in range(cfg.n_layers)
    ]
    found["induction"] = torch.stack(scores)
    kept = torch.zeros(cfg.n_layers, cfg.n_heads)

    def score_hook(pattern, hook):
        kept[hook.layer()] = pattern.diagonal(1 - half.shape[1], dim1=-2, dim2=-1).mean((0, 2))

    model.run_with_hooks(
        repeated, return_type=None, fwd_hooks=[(lambda name: name.endswith("hook_pattern"), score_hook)]
    )
    found["induction by hooks"] = kept

    # patching loops
    clean, corrupted = model.to_tokens(" the capital of France is"), model.to_tokens(" the capital of Italy is")
    clean_logits, cache = model.run_with_cache(clean)
    assert torch.equal(cache["resid_pre", 1], cache["blocks.1.hook_resid_pre"])

    def difference(logits):
        return logits[0, -1, answer] - logits[0, -1, wrong]

    found["clean"] = difference(clean_logits)
    patched = torch.zeros(cfg.n_layers, clean.shape[1])
    for layer in range(cfg.n_layers):
        for position in range(clean.shape[1]):
            name = f"blocks.{layer}.hook_resid_pre"

            def patch_here(resid, hook, name=name, position=position):
                resid[:, position] = cache[name][:, position]
                return resid

            logits = model.run_with_hooks(corrupted, fwd_hooks=[(name, patch_here)])
            patched[layer, position] = difference(logits)
    found["patched"] = patched
    ablated = model.run_with_hooks(
        clean,
        return_type="loss",
        fwd_hooks=[(f"blocks.{layer}.attn.hook_z", lambda z, hook: z * 0) for layer in range(cfg.n_layers)],
    )
    found["ablated"] = ablated

    # direct attribution of heads: what each writes, on the direction of the answer
    direction = model.W_U[:, answer] - model.W_U[:, wrong]
    heads = torch.stack([
        torch.einsum("hd,hdm,m->h", cache["z", layer][0, -1], model.W_O[layer], direction)
        for layer in range(cfg.n_layers)
    ])  # fmt: skip
    found["attribution"] = heads / cache["ln_final.hook_scale"][0, -1]
    found["result"] = cache.stack_head_results(layer=-1, pos_slice=-1)
    found["shapes"] = {
        (name, layer): tuple(cache[name, layer].shape)
        for name in (
            "resid_pre",
            "resid_mid",
            "resid_post",
            "q",
            "k",
            "v",
            "z",
            "pattern",
            "attn_out",
            "mlp_out",
            "post",
        )
        for layer in (0, 2)
    }
    _, bare = model.run_with_cache(clean, remove_batch_dim=True, return_type=None)
    found["bare"] = bare["z", 1]
    found["stopped"] = model(clean, stop_at_layer=2)
    return found


def assert_alike(found: dict[str, object], expected: dict[str, object]) -> None:
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, msg=lambda said, name=name: f"{name}: {said}", **CLOSE)
        else:
            assert found[name] == value, name


@instances
@pytest.mark.oracle
def test_ordinary_code_for_a_hooked_transformer_gives_the_same_on_a_headwater_model(hooked_transformer, bridge):
    expected = ordinary_code(hooked_transformer)
    assert_alike(ordinary_code(bridge), expected)
    assert_alike(ordinary_code(hw.load(hooked_transformer)), expected)


def test_ordinary_code_runs_on_a_checkpoint_of_a_hooked_transformer_as_on_the_bridge(folder, bridge):
    found, expected = ordinary_code(hw.load(folder, tokenizer=tiny_tokenizer())), ordinary_code(bridge)
    for one in (found, expected):  # a rebuilt checkpoint may order the width of queries and keys in another way
        one["QK"] = one.pop("W_Q") @ one.pop("W_K").transpose(-1, -2)
    assert_alike(found, expected)


@instances
def test_a_hooked_transformer_whose_norms_are_folded_is_announced(same_weights, hooked_transformer):
    hooked_transformer.load_and_process_state_dict(hooked_transformer.state_dict())
    with pytest.warns(UserWarning, match="folded"):
        hw.load(hooked_transformer)


@pytest.mark.oracle
def test_a_checkpoint_of_a_hooked_transformer_has_the_caches_and_head_scores_of_the_bridge(folder, bridge):
    assert_same(hw.load(folder, tokenizer=tiny_tokenizer()), bridge)


def test_a_checkpoint_may_hold_computed_buffers(folder, same_weights, bridge):
    buffers = {"blocks.0.attn.mask": torch.ones(64, 64).tril(), "blocks.0.attn.IGNORE": torch.tensor(-1.0)}
    save_file(same_weights[2] | buffers, folder / "model.safetensors")
    model = hw.load(folder, tokenizer=tiny_tokenizer())
    torch.testing.assert_close(model.run(TEXTS[0]), bridge.run(TEXTS[0]), **CLOSE)


def test_a_checkpoint_that_does_not_fit_its_config_is_refused(folder, same_weights):
    _, config, state = same_weights
    (folder / "config.json").write_text(json.dumps(config | {"n_heads": 2, "d_head": 16}))
    with pytest.raises(ModelError, match="does not fit"):
        hw.load(folder)
    (folder / "config.json").write_text(json.dumps(config))
    lacking = {name: tensor for name, tensor in state.items() if "blocks.2.mlp.W_out" not in name}
    save_file(lacking, folder / "model.safetensors")
    with pytest.raises(ModelError, match="does not fit"):
        hw.load(folder)


def test_a_checkpoint_needs_one_whole_state_dict(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="damaged"):
        hw.load(folder)
    (folder / "other.safetensors").write_bytes(whole)
    with pytest.raises(ModelError, match=r"as one \.safetensors file, and holds 2"):
        hw.load(folder)
    save_file({"a": torch.ones(2, dtype=torch.long)}, file)
    (folder / "other.safetensors").unlink()
    with pytest.raises(ModelError, match="does not fit"):
        hw.load(folder)


def test_a_checkpoint_of_blocks_that_cannot_be_rebuilt_is_refused(folder, same_weights):
    (folder / "config.json").write_text(json.dumps(same_weights[1] | {"parallel_attn_mlp": True}))
    with pytest.raises(ModelError, match="parallel_attn_mlp"):
        hw.load(folder)


def test_without_a_tokenizer_the_checkpoint_takes_ids_only(folder):
    model = hw.load(folder)
    assert model.run([[5, 6]]).shape == (1, 2, len(tiny_tokenizer()))
    with pytest.raises(InputError, match="tokenizer"):
        model.run("Paris")


def test_short_names_mean_models_of_the_hub_in_both_generations():
    assert hub_name("pythia-1.4b") == "EleutherAI/pythia-1.4b"
    assert [hub_name(name) for name in ("nobody", "nobody/nothing")] == ["nobody", "nobody/nothing"]
