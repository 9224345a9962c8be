"""Factors, embeddings and fingerprints: against Hugging Face's own modules, and streamed against loaded."""

from dataclasses import fields

import pytest
import torch
from einops import einsum, rearrange
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from headwater.errors import InputError, ModelError
from headwater.models import checkpoint as checkpoint_module
from headwater.models.effective_embedding import KINDS
from headwater.models.loading import load
from headwater.models.weights import HeadWeights, open_weights
from tests.tiny import FEW, tiny_model, tiny_tokenizer

ATTENTION = {"gpt2": "attn", "neox": "attention", "neox-sequential": "attention"}
OUTPUT = {"gpt2": "c_proj", "neox": "dense", "neox-sequential": "dense", "phi": "dense"}
SCALED = {"gemma2", "gemma3"}


def huggingface(folder) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def attention_modules(model, family):
    return [block.get_submodule(ATTENTION.get(family, "self_attn")) for block in blocks(model)]


def blocks(model):
    base = model.base_model
    return base.h if hasattr(base, "h") else base.layers


def record(module, kept: dict, key, pick) -> None:
    module.register_forward_hook(
        lambda module, args, kwargs, output: kept.__setitem__(key, pick(args, kwargs, output)), with_kwargs=True
    )


def attention_input(args, kwargs, output) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def random_tokens(d_vocab: int, *shape: int) -> Tensor:
    return torch.randint(2, d_vocab, shape)


@pytest.mark.oracle
@torch.no_grad()
def test_the_factors_reproduce_each_heads_output_in_hugging_face_eager_attention(checkpoint, family):
    folder = checkpoint(family)
    model, source = huggingface(folder), open_weights(folder)
    inputs, outputs, concatenated = {}, {}, {}
    for layer, attention in enumerate(attention_modules(model, family)):
        record(attention, inputs, layer, attention_input)
        record(attention, outputs, layer, lambda args, kwargs, output: output[0])
        record(attention.get_submodule(OUTPUT.get(family, "o_proj")), concatenated, layer, lambda args, *_: args[0])
    tokens = random_tokens(source.shape.d_vocab, 2, 11)
    patterns = model(tokens, output_attentions=True).attentions
    for layer in range(source.shape.n_layers):
        heads = source.layer(layer)
        W_V = heads.expand_kv(heads.W_V)
        v = einsum(inputs[layer], W_V, "batch key d_model, head d_model d_head -> batch head key d_head")
        if heads.b_V is not None:
            v = v + heads.expand_kv(heads.b_V)[:, None]
        z = einsum(patterns[layer], v, "batch head query key, batch head key d_head -> batch query head d_head")
        expected_z = rearrange(
            concatenated[layer], "batch query (head d_head) -> batch query head d_head", head=len(W_V)
        )
        torch.testing.assert_close(z, expected_z, atol=1e-5, rtol=1e-4)
        written = einsum(z, heads.W_O, "batch query head d_head, head d_head d_model -> batch query d_model")
        if heads.b_O is not None:
            written = written + heads.b_O
        torch.testing.assert_close(written, outputs[layer], atol=1e-4, rtol=1e-4)


@pytest.mark.oracle
@torch.no_grad()
def test_the_factors_reproduce_queries_and_keys_before_rotary_embedding(checkpoint, family):
    folder = checkpoint(family)
    model, source = huggingface(folder), open_weights(folder)
    for layer, attention in enumerate(attention_modules(model, family)):
        x = torch.randn(5, source.shape.d_model)
        heads = source.layer(layer)
        q, k = (
            einsum(x, W, "position d_model, head d_model d_head -> position head d_head")
            for W in (heads.W_Q, heads.W_K)
        )
        if heads.b_Q is not None:
            q, k = q + heads.b_Q, k + heads.b_K
        expected_q, expected_k = projections(attention, family, x, source.shape.d_head)
        torch.testing.assert_close(q, expected_q, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(k, expected_k, atol=1e-5, rtol=1e-5)


def projections(attention, family: str, x: Tensor, d_head: int) -> tuple[Tensor, Tensor]:
    """Queries and keys as the source of each architecture in transformers splits its projections."""
    if family == "gpt2":
        q, k, _ = attention.c_attn(x).split(x.shape[-1], dim=-1)
        return q.view(len(x), -1, d_head), k.view(len(x), -1, d_head)
    if family.startswith("neox"):
        q, k, _ = attention.query_key_value(x).view(len(x), -1, 3 * d_head).chunk(3, dim=-1)
        return q, k
    return attention.q_proj(x).view(len(x), -1, d_head), attention.k_proj(x).view(len(x), -1, d_head)


@pytest.mark.oracle
@torch.no_grad()
def test_the_pre_softmax_scores_of_gpt2_follow_from_the_factors(checkpoint):
    folder = checkpoint("gpt2")
    model, source = huggingface(folder), open_weights(folder)
    inputs = {}
    for layer, attention in enumerate(attention_modules(model, "gpt2")):
        record(attention, inputs, layer, attention_input)
    patterns = model(random_tokens(source.shape.d_vocab, 1, 9), output_attentions=True).attentions
    for layer in range(3):
        heads, x = source.layer(layer), inputs[layer][0]
        q, k = (x @ heads.W_Q + heads.b_Q[:, None]), (x @ heads.W_K + heads.b_K[:, None])
        scores = q @ k.mT / source.shape.d_head**0.5
        scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
        torch.testing.assert_close(scores.softmax(-1), patterns[layer][0], atol=1e-5, rtol=1e-4)


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
@torch.no_grad()
def test_the_patterns_of_grouped_heads_follow_from_the_factors_their_norms_and_rotary_embedding(checkpoint, family):
    """Biased (Qwen 2) and normed (Qwen 3, Gemma 3) queries and keys, too; the model says the angles and the scale."""
    folder = checkpoint(family)
    model, source = huggingface(folder), open_weights(folder)
    inputs, angles, modules = {}, {}, attention_modules(model, family)
    for layer, attention in enumerate(modules):
        record(attention, inputs, layer, attention_input)
        record(attention, angles, layer, lambda args, kwargs, output: kwargs["position_embeddings"])
    patterns = model(random_tokens(source.shape.d_vocab, 1, 9), output_attentions=True).attentions
    assert source.shape.n_kv_heads < source.shape.n_heads
    for layer, attention in enumerate(modules):
        heads, x, (cos, sin) = source.layer(layer), inputs[layer][0], (one[0] for one in angles[layer])
        q, k = x @ heads.W_Q, x @ heads.expand_kv(heads.W_K)
        if heads.b_Q is not None:
            q, k = q + heads.b_Q[:, None], k + heads.expand_kv(heads.b_K)[:, None]
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = (rotated(one, cos, sin) for one in (q, k))
        seen = patterns[layer][0] > 0  # causal, and within a window
        scores = (q @ k.mT * attention.scaling).masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(scores.softmax(-1), patterns[layer][0], atol=1e-5, rtol=1e-4)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of a vector by its angle."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[..., :half], sin[..., :half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@pytest.mark.oracle
@torch.no_grad()
def test_norm_gains_turn_a_normed_stream_into_what_attention_and_unembedding_read(checkpoint, family):
    folder = checkpoint(family)
    model, source = huggingface(folder), open_weights(folder)
    x = torch.randn(4, source.shape.d_model)
    centred = x - x.mean(-1, keepdim=True) if family in {"gpt2", "neox", "neox-sequential", "phi"} else x
    normed = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    final = next(
        getattr(model.base_model, n)
        for n in ("ln_f", "final_layer_norm", "final_layernorm", "norm")
        if hasattr(model.base_model, n)
    )
    first = [getattr(block, "ln_1", None) or block.input_layernorm for block in blocks(model)]
    gains = [source.layer(layer).norm_gain for layer in range(3)]
    for norm, gain in zip([*first, final], [*gains, source.final_norm_gain()], strict=True):
        bias = getattr(norm, "bias", None)
        torch.testing.assert_close(normed * gain + (0 if bias is None else bias), norm(x), atol=1e-4, rtol=1e-4)


@pytest.mark.oracle
@torch.no_grad()
def test_embedding_and_unembedding_are_those_of_the_model(checkpoint, family):
    folder = checkpoint(family)
    model, source = huggingface(folder), open_weights(folder)
    every_token = torch.arange(source.shape.d_vocab)
    torch.testing.assert_close(source.embedding(), model.get_input_embeddings()(every_token))
    x = torch.randn(3, source.shape.d_model)
    head = model.get_output_embeddings()
    expected = head(x) - (0 if head.bias is None else head.bias)
    torch.testing.assert_close(x @ source.unembedding(), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def expected_embeddings(model, family: str, tokens: Tensor, bos: int) -> dict[str, Tensor]:
    """Each kind of effective embedding, by calling the modules of the whole model in transformers directly."""
    raw = model.get_input_embeddings()(tokens)
    block = blocks(model)[0]
    if family in SCALED:
        mlp0 = block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(raw)))
    elif family == "gpt2":
        mlp0 = block.mlp(block.ln_2(raw))
    elif family == "phi":
        mlp0 = block.mlp(block.input_layernorm(raw))
    else:
        mlp0 = block.mlp(block.post_attention_layernorm(raw))
    pairs = torch.stack([torch.full_like(tokens, bos), tokens], dim=1)
    layer0 = model(pairs, output_hidden_states=True).hidden_states[1][:, 1]
    return {"raw": raw, "mlp0": mlp0, "embed+mlp0": raw + mlp0, "layer0": layer0}


@pytest.mark.oracle
def test_effective_embeddings_equal_hugging_face_modules_called_directly(checkpoint, family):
    folder = checkpoint(family)
    source = open_weights(folder)
    tokens = random_tokens(source.shape.d_vocab, 40)
    expected = expected_embeddings(huggingface(folder), family, tokens, source.tokenizer.bos_token_id)
    assert set(expected) == set(KINDS)
    for kind, value in expected.items():
        torch.testing.assert_close(source.effective_embedding(tokens, kind), value, atol=1e-5, rtol=1e-5, msg=kind)


@pytest.mark.parametrize("family", FEW)
def test_effective_embeddings_do_not_depend_on_how_tokens_are_chunked(checkpoint, family, monkeypatch):
    source = open_weights(checkpoint(family))
    tokens = random_tokens(source.shape.d_vocab, 23)
    whole = {kind: source.effective_embedding(tokens, kind) for kind in KINDS}
    monkeypatch.setattr("headwater.models.effective_embedding.WORKSPACE_ENTRIES", 5 * source.shape.d_mlp)
    for kind in KINDS:
        torch.testing.assert_close(source.effective_embedding(tokens, kind), whole[kind], atol=1e-5, rtol=1e-5)


def assert_same_parameters(one, other) -> None:
    assert one.shape == other.shape
    for layer in range(one.shape.n_layers):
        a, b = one.layer(layer), other.layer(layer)
        for field in fields(HeadWeights):
            x, y = getattr(a, field.name), getattr(b, field.name)
            assert type(x) is type(y)
            if isinstance(x, Tensor):
                assert x.dtype == y.dtype
                assert torch.equal(x, y), f"layer {layer} {field.name}"
        for source, whole in ((one, a), (other, b)):
            found = source.ov(layer)
            assert found.layer == layer
            for name in ("W_V", "W_O", "norm_gain"):
                assert getattr(found, name).dtype == getattr(whole, name).dtype
                assert torch.equal(getattr(found, name), getattr(whole, name)), f"layer {layer} {name}"
    for read in ("embedding", "unembedding", "final_norm_gain"):
        assert torch.equal(getattr(one, read)(), getattr(other, read)()), read


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_streamed_checkpoint_equals_the_loaded_model(checkpoint, family, dtype):
    folder = checkpoint(family, dtype=dtype)
    streamed, loaded = open_weights(folder), open_weights(load(folder, dtype=torch.float32))
    assert streamed.dtype == dtype
    assert streamed.fingerprint == loaded.fingerprint
    assert_same_parameters(streamed, loaded)
    tokens = random_tokens(streamed.shape.d_vocab, 30)
    for kind in KINDS:
        torch.testing.assert_close(
            streamed.effective_embedding(tokens, kind), loaded.effective_embedding(tokens, kind), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("family", FEW)
def test_a_bfloat16_model_in_memory_has_the_fingerprint_and_parameters_of_its_folder(checkpoint, family):
    folder = checkpoint(family, dtype=torch.bfloat16)
    loaded = open_weights(load(folder), dtype=torch.bfloat16)
    streamed = open_weights(folder, dtype=torch.bfloat16)
    assert loaded.dtype == streamed.dtype == torch.bfloat16
    assert streamed.fingerprint == loaded.fingerprint
    assert_same_parameters(streamed, loaded)


def test_reading_a_loaded_model_copies_no_head_factor_and_leaves_the_model_as_it_was(checkpoint):
    model = load(checkpoint("llama"))
    before = {name: parameter.clone() for name, parameter in model.raw.named_parameters()}
    source = open_weights(model)
    heads = source.layer(1)
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.raw.parameters()}
    for factor in (heads.W_Q, heads.W_K, heads.W_V, heads.W_O):
        assert factor.untyped_storage().data_ptr() in storages
    for kind in KINDS:
        source.effective_embedding(torch.arange(9), kind)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.raw.named_parameters())


@pytest.mark.parametrize("family", ["neox", "gpt2", "llama"])
def test_a_changed_value_head_changes_the_fingerprint_of_a_model_in_memory(checkpoint, family):
    model = load(checkpoint(family))
    before = model.fingerprint
    with torch.no_grad():
        model.raw.blocks[2].attn.W_V[1, 3, 2] += 0.5
    assert model.fingerprint != before


def test_the_fingerprint_changes_with_one_weight_and_with_the_config_but_not_with_the_dtype_that_holds_it(tmp_path):
    def saved(model):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        return open_weights(folder).fingerprint

    model = tiny_model("qwen3", seed=5, dtype=torch.bfloat16)
    first = saved(model)
    assert saved(model.to(torch.float32)) == first
    model.config.rms_norm_eps *= 10
    assert saved(model) != first
    model.config.rms_norm_eps /= 10
    assert saved(model) == first
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 0.01
    assert saved(model) != first


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
def test_shards_read_as_the_single_file(checkpoint, family, tmp_path):
    folder = checkpoint(family)
    huggingface(folder).save_pretrained(tmp_path, max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert open_weights(tmp_path).fingerprint == open_weights(folder).fingerprint
    assert_same_parameters(open_weights(tmp_path), open_weights(folder))


@pytest.mark.parametrize(
    ("family", "stored", "renamed"), [("gpt2", "transformer.", ""), ("gemma3", "model.", "language_model.model.")]
)
def test_the_prefix_of_a_checkpoints_names_does_not_matter(checkpoint, family, stored, renamed, tmp_path):
    folder = checkpoint(family)
    open_weights(folder).tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    save_file({name.replace(stored, renamed, 1): t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    assert open_weights(tmp_path).fingerprint == open_weights(folder).fingerprint
    assert_same_parameters(open_weights(tmp_path), open_weights(folder))


def test_factors_come_in_the_dtype_asked_and_by_default_in_at_least_float32(checkpoint):
    folder = checkpoint("llama", dtype=torch.bfloat16)
    tokens = torch.arange(5)
    for asked, given in [(None, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float64, torch.float64)]:
        source = open_weights(folder, dtype=asked)
        parts = [source.layer(0).W_V, source.layer(0).norm_gain, source.embedding(), source.unembedding()]
        parts += [source.effective_embedding(tokens, kind) for kind in KINDS]
        assert {part.dtype for part in parts} == {given}


def test_each_query_head_reads_with_the_value_head_of_its_group(checkpoint):
    heads = open_weights(checkpoint("llama")).layer(0)
    assert [heads.value_head(head) for head in range(4)] == [0, 0, 1, 1]
    expanded = heads.expand_kv(heads.W_V)
    assert all(torch.equal(expanded[head], heads.W_V[heads.value_head(head)]) for head in range(4))


def test_one_layers_tensors_are_read_at_a_time_and_let_go(checkpoint, monkeypatch):
    read = []
    original = checkpoint_module.Checkpoint.read
    monkeypatch.setattr(
        checkpoint_module.Checkpoint, "read", lambda self, name: (read.append(name), original(self, name))[1]
    )
    source = open_weights(checkpoint("llama"))
    read.clear()
    heads = source.layer(1)
    assert len(read) == 5
    assert all(name.startswith("layers.1.") for name in read)
    pointer = torch.multiprocessing.reductions.StorageWeakRef(heads.W_V.untyped_storage())
    assert not pointer.expired()
    heads = source.layer(2)
    assert pointer.expired()
    assert heads.layer == 2
    read.clear()
    source.ov(2)
    attention = "layers.2.self_attn."
    assert set(read) == {f"{attention}v_proj.weight", f"{attention}o_proj.weight", "layers.2.input_layernorm.weight"}


@pytest.mark.parametrize("layer", [-1, 3])
@pytest.mark.parametrize("opened", [lambda folder: open_weights(folder), lambda folder: open_weights(load(folder))])
def test_a_layer_that_is_not_there_is_refused(checkpoint, layer, opened):
    with pytest.raises(InputError, match=rf"Layer {layer} was requested; the model has layers 0 to 2"):
        opened(checkpoint("llama")).layer(layer)
    with pytest.raises(InputError, match=rf"Layer {layer} was requested; the model has layers 0 to 2"):
        opened(checkpoint("llama")).ov(layer)


def test_unknown_embeddings_and_tokens_outside_the_vocabulary_are_refused(checkpoint):
    source = open_weights(checkpoint("llama"))
    with pytest.raises(InputError, match=r"'mlp1' does not exist.* Did you mean 'mlp0'"):
        source.effective_embedding(torch.arange(3), "mlp1")
    with pytest.raises(InputError, match=rf"from 2 to {source.shape.d_vocab} were given"):
        source.effective_embedding(torch.tensor([2, source.shape.d_vocab]), "raw")
    with pytest.raises(InputError, match="none were given"):
        source.effective_embedding(torch.tensor([], dtype=torch.long), "raw")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number_is_named(checkpoint, tmp_path, value):
    folder = checkpoint("llama")
    model = huggingface(folder)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3, 4] = value
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    source = open_weights(tmp_path)
    assert source.layer(0).layer == 0
    with pytest.raises(ModelError, match=r"'layers.1.self_attn.v_proj.weight' has 1 of 512 values"):
        source.layer(1)


@pytest.mark.gpu
def test_parameters_on_the_gpu_equal_those_on_the_cpu(checkpoint, family):
    folder = checkpoint(family)
    here, there = open_weights(folder), open_weights(folder, device="cuda")
    tokens = random_tokens(here.shape.d_vocab, 20)
    assert torch.equal(here.layer(1).W_V, there.layer(1).W_V.cpu())
    assert torch.equal(here.unembedding(), there.unembedding().cpu())
    for kind in KINDS:
        given = there.effective_embedding(tokens, kind)
        assert given.device.type == "cuda"
        torch.testing.assert_close(given.cpu(), here.effective_embedding(tokens, kind), atol=1e-3, rtol=1e-3)
