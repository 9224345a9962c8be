"""Quantized checkpoints: float8 is read from its folder tensor by tensor, what is packed is refused by its name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import headwater as hw
from headwater.errors import ModelError
from headwater.models.checkpoint import dequantized
from headwater.models.weights import open_weights
from tests.tiny import tiny_model

BLOCK = (16, 16)


def rewrite(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint("llama"), tmp_path / "model")


def to_float8(weight):
    """A weight in float8, a scale for each block, and what the two stand for, block by block."""
    rows, columns = (-(-length // size) for length, size in zip(weight.shape, BLOCK, strict=True))
    scales, stored, meant = torch.empty(rows, columns), torch.empty_like(weight), torch.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            at = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scales[i, j] = weight[at].abs().max() / 448
            stored[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn).float()
            meant[at] = stored[at] * scales[i, j]
    return stored.to(torch.float8_e4m3fn), scales, meant


@pytest.fixture
def float8(folder):
    """A folder in float8, and the same numbers in another, as they are meant."""
    plain = shutil.copytree(folder, folder.parent / "plain")
    tensors = load_file(folder / "model.safetensors")
    stored, meant = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("proj.weight"):
            stored[name], stored[f"{name}_scale_inv"], meant[name] = to_float8(weight)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    rewrite(folder / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": list(BLOCK)})
    return folder, plain


@pytest.mark.oracle
def test_factors_of_a_folder_in_float8_are_its_numbers_times_their_scales(float8):
    here, there = map(open_weights, float8)
    for layer in range(there.shape.n_layers):
        expected = vars(there.layer(layer))
        for name, factor in vars(here.layer(layer)).items():
            torch.testing.assert_close(factor, expected[name], rtol=0, atol=0, msg=name)
    tokens = torch.arange(5)
    for kind in ("raw", "mlp0", "layer0"):
        assert torch.equal(here.effective_embedding(tokens, kind), there.effective_embedding(tokens, kind))
    assert here.fingerprint == there.fingerprint


def test_a_model_in_float8_is_not_run_and_what_reads_it_is_named(float8):
    with pytest.raises(ModelError, match=r"quantized by fp8; .* hw\.classify_heads\(folder\)"):
        hw.load(float8[0])


def test_scales_that_are_missing_or_too_few_are_refused_with_the_tensor(float8):
    folder, _ = float8
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    scales = tensors.pop(f"{name}_scale_inv")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"has no tensor '{name}_scale_inv'"):
        open_weights(folder).ov(1)
    save_file(
        tensors | {f"{name}_scale_inv": torch.cat([scales, scales])}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ModelError, match=rf"'{name}' of shape .* has \(2, 2\) scales; its blocks of 16 x 16 need"):
        open_weights(folder).ov(1)


def test_one_scale_for_a_whole_weight_is_read():
    stored = torch.tensor([[1.0, -2.0]]).to(torch.float8_e4m3fn)
    assert dequantized(stored, torch.tensor([0.5]), BLOCK, "w").tolist() == [[0.5, -1.0]]


@pytest.mark.diagonal
@pytest.mark.parametrize("opened", [hw.load, open_weights])
@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq"])
def test_packed_weights_are_refused_by_the_name_of_their_method(folder, method, opened):
    rewrite(folder / "config.json", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ModelError, match=f"quantized by {method}; headwater runs float weights") as caught:
        opened(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("opened", [hw.load, open_weights])
def test_float8_that_the_config_does_not_name_is_refused_with_its_file(float8, opened):
    folder, _ = float8
    rewrite(folder / "config.json", quantization_config=None)
    with pytest.raises(
        ModelError, match=r"proj\.weight' in .*model\.safetensors is stored as F8_E4M3, and config\.json names"
    ):
        opened(folder)


def test_a_loaded_model_that_keeps_float8_beside_its_scales_is_refused():
    model = tiny_model("llama")
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    layer.forward = lambda x: x @ layer.weight.to(x.dtype).T
    with pytest.raises(ModelError, match=r"LlamaForCausalLM .*up_proj\.weight is a Tensor of torch\.float8_e4m3fn"):
        hw.load(model)


def test_float8_without_its_scales_is_refused_as_the_folder_is_opened(float8):
    folder, _ = float8
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"has no tensor '{name}_scale_inv', the scales of '{name}'"):
        open_weights(folder)


@pytest.mark.parametrize("said", ["x", [16], 16])
def test_blocks_of_no_two_sizes_are_refused(float8, said):
    folder, _ = float8
    rewrite(folder / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": said})
    with pytest.raises(ModelError, match="describes no model"):
        open_weights(folder)


@pytest.mark.parametrize("opened", [hw.load, open_weights])
def test_packed_weights_are_refused_by_the_tensor_where_no_method_is_named(folder, opened):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    del tensors[f"{name}.weight"]
    tensors[f"{name}.qweight"] = torch.zeros(4, 48, dtype=torch.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"Tensor '{name}.qweight' in .*safetensors is stored as I32"):
        opened(folder)
