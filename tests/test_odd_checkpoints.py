"""Checkpoints that are not what they seem: refused with what to do about it, or read as transformers reads them."""

import json
import shutil

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import headwater as hw
from headwater.errors import ModelError
from headwater.models.weights import open_weights
from tests.random_models import HEADS, VISION, random_model
from tests.tiny import tiny_model, tiny_tokenizer

POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\nsize 4096\n"
)
OPENERS = [hw.load, open_weights]


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy of a tiny Llama checkpoint that a test may damage."""
    return shutil.copytree(checkpoint("llama"), tmp_path / "model")


@pytest.fixture(scope="module")
def unlisted(tmp_path_factory):
    """A checkpoint of an architecture that has no row in the table of families."""
    path = tmp_path_factory.mktemp("starcoder2")
    random_model("starcoder2").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def rewrite(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.diagonal
@pytest.mark.parametrize("opened", OPENERS)
def test_a_git_lfs_pointer_is_refused_by_its_name(folder, opened):
    (folder / "model.safetensors").write_text(POINTER)
    with pytest.raises(ModelError, match=r"is missing, damaged or cut short.*git lfs pull") as caught:
        opened(folder)
    assert str(folder / "model.safetensors") in str(caught.value)


@pytest.mark.diagonal
@pytest.mark.parametrize("opened", OPENERS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 0),
        ("hidden_size", -32),
        ("num_attention_heads", -4),
        ("num_key_value_heads", 0),
        ("vocab_size", 0),
        ("head_dim", -8),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", -5),
    ],
)
def test_a_config_with_an_impossible_size_is_refused_by_that_size(folder, name, value, opened):
    rewrite(folder / "config.json", **{name: value})
    with pytest.raises(ModelError, match=f"The config says {name}={value}, which no model has; it must be at least 1"):
        opened(folder)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": -1}, {"num_hidden_layers": 10**9}, {"hidden_size": 0}])
def test_impossible_sizes_of_other_architectures_are_refused_before_anything_is_built(unlisted, tmp_path, changes):
    path = shutil.copytree(unlisted, tmp_path / "model")
    rewrite(path / "config.json", **changes)
    with pytest.raises(ModelError, match="says") as caught:
        hw.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("opened", OPENERS)
def test_a_width_that_no_model_can_be_outlined_with_is_refused(checkpoint, tmp_path, opened):
    path = shutil.copytree(checkpoint("gpt2"), tmp_path / "model")
    rewrite(path / "config.json", n_embd=10**9)
    with pytest.raises(ModelError, match="describes no model") as caught:
        opened(path)
    assert str(path) in str(caught.value)


def test_a_config_that_does_not_validate_says_why(folder):
    rewrite(folder / "config.json", num_hidden_layers="3")
    with pytest.raises(ModelError, match=r"num_hidden_layers.*int.*str"):
        hw.load(folder)


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "gemma3"])
def test_a_tied_matrix_may_be_stored_under_the_name_of_the_unembedding(family, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint(family), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith(("embed_tokens.weight", "wte.weight")))
    weights["lm_head.weight"] = weights.pop(name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    hf = tf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model, source, original = hw.load(folder), open_weights(folder), open_weights(checkpoint(family))
    tokens = model.tokenize("the capital of France is Paris").tokens
    with torch.inference_mode():
        torch.testing.assert_close(model.run(tokens), hf(tokens).logits, rtol=0, atol=1e-5)
    assert torch.equal(source.embedding(), original.embedding())
    assert torch.equal(source.unembedding(), original.unembedding())
    assert source.fingerprint == original.fingerprint == model.fingerprint


def test_an_unembedding_alone_does_not_stand_for_an_embedding_that_is_not_tied_to_it(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.embed_tokens.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"0 tensors named 'embed_tokens\.weight'"):
        hw.load(folder)


@pytest.mark.parametrize("opened", OPENERS)
def test_a_bias_that_the_config_does_not_know_is_refused_by_its_name_and_a_buffer_is_not(folder, opened):
    weights = load_file(folder / "model.safetensors")
    buffer = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(weights | buffer, folder / "model.safetensors", metadata={"format": "pt"})
    opened(folder)
    name = "model.layers.1.self_attn.q_proj.bias"
    save_file(weights | {name: torch.zeros(32)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"layers\.1\.self_attn\.q_proj\.bias.*not used by any module of the config"
    ) as caught:
        opened(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_weight_without_use_is_refused_with_the_file_it_is_in_where_the_family_has_no_row(unlisted, tmp_path):
    path = shutil.copytree(unlisted, tmp_path / "model")
    shards = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    name = "lm_head.bias"
    assert name not in shards
    parts = {"one.safetensors": shards, "two.safetensors": {name: torch.zeros(8)}}
    for file, tensors in parts.items():
        save_file(tensors, path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {one: file for file, tensors in parts.items() for one in tensors}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"Tensor '{name}' in .* is not used by any module of the config"):
        hw.load(path)


@pytest.mark.parametrize("opened", OPENERS)
def test_a_bias_beside_a_shared_unembedding_is_refused(checkpoint, tmp_path, opened):
    path = shutil.copytree(checkpoint("llama-tied"), tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    weights["lm_head.bias"] = torch.ones(len(weights["model.embed_tokens.weight"]))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"Tensor 'lm_head\.bias' in .* is not used by any module"):
        opened(path)


@pytest.mark.parametrize("opened", OPENERS)
def test_a_norm_of_queries_that_the_config_does_not_know_is_refused_with_its_file(folder, opened):
    weights, name = load_file(folder / "model.safetensors"), "model.layers.1.self_attn.q_norm.weight"
    save_file(weights | {name: torch.ones(8)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"Tensor '.*layers\.1\.self_attn\.q_norm\.weight' in .* is not used by any module"
    ):
        opened(folder)


@pytest.mark.parametrize("opened", OPENERS)
def test_whole_numbers_in_place_of_a_weight_are_refused_where_no_quantization_is_named(folder, opened):
    weights, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    weights[name] = (weights[name] * 100).to(torch.int8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=f"Tensor '{name}' in .*model.safetensors is stored as I8, and config.json names no"
    ):
        opened(folder)


@pytest.mark.parametrize("opened", OPENERS)
def test_a_tensor_in_two_shards_is_refused_with_both(folder, opened):
    weights, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    (folder / "model.safetensors").unlink()
    for file, tensors in {"one.safetensors": weights, "two.safetensors": {name: weights[name] + 1}}.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = dict.fromkeys(weights, "one.safetensors") | {name: "two.safetensors"}
    rewritten = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(rewritten)
    with pytest.raises(ModelError, match=f"Tensor '{name}' is in two files, .*one.safetensors and .*two.safetensors"):
        opened(folder)


def test_a_transposed_matrix_of_a_family_without_a_row_is_refused_with_its_file_and_both_shapes(unlisted, tmp_path):
    path = shutil.copytree(unlisted, tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if name.endswith("1.mlp.c_fc.weight"))
    weights[name] = weights[name].T.contiguous()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"Tensor '{name}' in .* has shape .* but the config says"):
        hw.load(path)
    del weights[name]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"has no tensor '{name}'; the checkpoint is incomplete"):
        hw.load(path)


@pytest.mark.parametrize("opened", OPENERS)
def test_a_transposed_matrix_is_refused_by_its_name_and_both_shapes(folder, opened):
    weights, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].T.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj\.weight.*32, 48|32, 48.*48, 32") as caught:
        opened(folder)
    assert name.removeprefix("model.") in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gemma3-with-vision", "llava"])
@pytest.mark.oracle
def test_a_multimodal_checkpoint_is_read_as_the_text_model_it_holds(name, tmp_path):
    hf = random_model(name)
    hf.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    folder, memory = hw.load(tmp_path), hw.load(hf, tokenizer=tiny_tokenizer())
    tokens = folder.tokenize("the capital of France is Paris").tokens
    with torch.inference_mode():
        expected = hf(tokens).logits
    for model in (folder, memory):
        torch.testing.assert_close(model.run(tokens), expected, rtol=0, atol=1e-5)
    streamed = open_weights(tmp_path)
    assert streamed.fingerprint == folder.fingerprint == memory.fingerprint
    assert folder.shape == memory.shape == streamed.shape
    for source in (open_weights(folder), open_weights(memory)):
        assert torch.equal(source.ov(1).W_V, streamed.ov(1).W_V)
    assert {type(m).__name__ for m in hf.modules()} & {"SiglipVisionModel", "CLIPVisionModel"}


def with_sight(config, text, **vision):
    config = config(text_config=HEADS | text, vision_config=VISION | {"num_heads": 2, "depth": 1} | vision)
    config._attn_implementation = "eager"
    return tf.AutoModelForImageTextToText.from_config(config).eval()


THREE_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
WITH_SIGHT = {
    "llama4": lambda: with_sight(
        tf.Llama4Config, {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
        vision_output_dim=16, projector_input_dim=16, projector_output_dim=16,
    ),
    "qwen2-vl": lambda: with_sight(tf.Qwen2VLConfig, THREE_AXES, embed_dim=16),
    "qwen2.5-vl": lambda: with_sight(tf.Qwen2_5_VLConfig, THREE_AXES, out_hidden_size=32),
    "qwen3-vl": lambda: with_sight(tf.Qwen3VLConfig, THREE_AXES, out_hidden_size=32, deepstack_visual_indexes=[0]),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("name", WITH_SIGHT)
def test_a_multimodal_model_is_run_by_the_class_of_its_text_model_or_by_one_that_turns_texts_alike(name, tmp_path):
    hf = WITH_SIGHT[name]()
    hf.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    folder, memory = hw.load(tmp_path), hw.load(hf, tokenizer=tiny_tokenizer())
    tokens = folder.tokenize("the capital of France is Paris").tokens
    block, ablated = hf.get_decoder().get_submodule("model.layers" if name == "llama4" else "layers")[0], []
    for scale in (1.0, 0.0):
        handle = block.get_submodule("feed_forward" if name == "llama4" else "mlp").register_forward_hook(
            lambda module, args, out, scale=scale: (out[0] * scale, *out[1:]) if type(out) is tuple else out * scale
        )
        with torch.inference_mode():
            ablated.append(hf(tokens).logits)
        handle.remove()
    assert not torch.allclose(*ablated, atol=1e-2)
    for model in (folder, memory):
        torch.testing.assert_close(model.run(tokens), ablated[0], rtol=0, atol=1e-5)
        hooks = [hw.edit("mlp_out", 0, "zero")]
        torch.testing.assert_close(model.run(tokens, hooks), ablated[1], rtol=0, atol=1e-5)
    assert folder.fingerprint == memory.fingerprint


def test_a_model_without_unembedding_is_refused():
    with pytest.raises(ModelError, match="LlamaModel has no unembedding; load the checkpoint as AutoModelForCausalLM"):
        hw.load(tiny_model("llama").model)
