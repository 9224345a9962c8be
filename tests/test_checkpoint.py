"""Checkpoint folders that cannot be read are refused with a message that says what is wrong and what to do."""

import json
import shutil

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from headwater.errors import InputError, ModelError
from headwater.models.checkpoint import checkpoint_folder, hub_name, open_checkpoint, open_safetensors
from headwater.models.weights import open_weights
from tests.tiny import tiny_folder, tiny_model, tiny_tokenizer


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy of a checkpoint folder, free to be damaged."""
    return shutil.copytree(checkpoint("llama"), tmp_path / "llama")


def edit_config(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        open_weights(folder)
    assert "\n" not in str(caught.value)


def test_every_tensor_is_read_as_it_was_saved(folder):
    tensors = load_file(folder / "model.safetensors")
    opened = open_checkpoint(folder)
    assert len(opened.names) == len(tensors)
    for name, own in opened.names.items():
        assert torch.equal(opened.read(name), tensors[own])


def test_a_folder_without_a_config_is_refused(folder):
    (folder / "config.json").unlink()
    refused(folder, "has no config.json")


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 8}', '{"model_type": "no such type"}'])
def test_a_damaged_config_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder, r"(config|model type) .*")


def test_an_unsupported_architecture_is_refused_with_the_supported_ones(tmp_path):
    tf.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8).save_pretrained(
        tmp_path
    )
    refused(tmp_path, "'bert' is not supported; headwater reads gpt2, gpt_neox")


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "has no weights")


def test_pickled_weights_are_refused_with_the_way_out(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, r"pickled weights only.*model.save_pretrained")


def test_a_folder_without_a_tokenizer_is_refused(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    refused(folder, "has no tokenizer")


def test_the_tokenizer_of_another_model_is_refused(folder):
    tiny_tokenizer([f"word{i}" for i in range(200)]).save_pretrained(folder)
    refused(folder, r"tokenizer .* has \d+ tokens, the model \d+: it belongs to another model")


@pytest.mark.parametrize("kept", [0, 4, 40, 0.5, 0.999])
def test_a_truncated_file_is_refused_by_name(folder, kept):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    refused(folder, r"model.safetensors is missing, damaged or cut short")


def test_a_missing_tensor_is_named_with_the_shape_expected(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    refused(folder, r"has no tensor 'layers.2.mlp.up_proj.weight' \(expected shape \(48, 32\)\)")


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.1.self_attn.v_proj.weight": torch.zeros(8, 32)}))
    refused(folder, r"'model.layers.1.self_attn.v_proj.weight' .* has shape \(8, 32\), but the config says \(16, 32\)")


def test_weights_of_more_layers_or_another_width_than_the_config_are_refused(folder):
    edit_config(folder, num_hidden_layers=4)
    refused(folder, "has no tensor 'layers.3.")
    edit_config(folder, num_hidden_layers=3, hidden_size=64)
    refused(folder, r"has shape .* but the config says")


def test_fewer_layers_in_the_config_than_in_the_weights_are_refused(folder):
    edit_config(folder, num_hidden_layers=2)
    refused(folder, r"layers\.2\..*is not used by any module of the config")


def test_a_missing_unembedding_is_refused_unless_tied(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    refused(folder, "has no tensor 'lm_head.weight'")
    edit_config(folder, tie_word_embeddings=True)
    source = open_weights(folder)
    assert torch.equal(source.unembedding(), source.embedding().T)


def test_weights_without_an_embedding_are_refused(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    refused(folder, "has 0 tensors named 'embed_tokens.weight'")


def test_quantized_weights_are_refused(folder):
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    refused(folder, "quantized")


def test_a_missing_shard_is_named(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    refused(tmp_path, f"{shard.name} is missing, damaged or cut short")


def test_memory_that_runs_out_is_not_called_damage(folder):
    with pytest.raises(torch.OutOfMemoryError), open_safetensors(folder / "model.safetensors"):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_a_damaged_index_is_refused(folder, text):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "index.json is damaged")


@pytest.mark.parametrize("name", ["no/such-model-anywhere", "./no/such/folder", "a b", "/no/such/folder"])
def test_a_name_that_is_no_folder_and_cannot_be_fetched_is_refused(name):
    refused(name, "folder")


def test_an_empty_name_is_refused():
    with pytest.raises(InputError, match=r"model='' is empty: give a path"):
        open_weights("")


def test_a_file_given_instead_of_its_folder_is_refused(folder):
    refused(folder / "model.safetensors", "is a file")


def test_a_hub_name_is_read_from_the_cache_when_offline(tmp_path, monkeypatch):
    commit = "0123456789012345678901234567890123456789"
    cached = tmp_path / "models--someone--tiny"
    snapshot = cached / "snapshots" / commit
    snapshot.mkdir(parents=True)
    tiny_folder(snapshot, "qwen2")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert checkpoint_folder("someone/tiny") == snapshot
    source = open_weights("someone/tiny")
    assert (source.name, source.revision) == ("someone/tiny", commit)
    assert source.fingerprint == open_weights(snapshot).fingerprint
    (tmp_path / "smollm2").mkdir()
    cached.rename(tmp_path / "models--HuggingFaceTB--SmolLM2-135M-Instruct")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headwater.models.checkpoint.packaged_file", lambda name: None)
    assert open_weights("smollm2").revision == commit


def test_short_names_of_transformer_lens_are_resolved_also_with_a_dot():
    assert hub_name("pythia-1.4b") == "EleutherAI/pythia-1.4b"
    assert [hub_name(name) for name in ("model.gguf", "./gpt2", "EleutherAI/pythia-1.4b")] == [
        "model.gguf",
        "./gpt2",
        "EleutherAI/pythia-1.4b",
    ]
