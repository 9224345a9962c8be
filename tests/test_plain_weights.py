"""Models with adapters beside their weights, or with weights that are no float numbers, are refused by name."""

import warnings

import pytest
import torch
import transformers as tf

import headwater as hw
from headwater.errors import InputError, ModelError
from headwater.models.weights import open_weights
from tests.tiny import tiny_model, tiny_tokenizer

DEQUANTIZE = "without quantization, or save a dequantized copy"


class BaseTunerLayer:
    """Carries the name of the class that peft gives every layer with an adapter."""


class LoraLinear(torch.nn.Module, BaseTunerLayer):
    """A linear layer and what an adapter of rank 2 adds to it, as peft lays it out."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = torch.nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class PackedLinear(torch.nn.Module):
    """A linear layer whose weight is a buffer of int8 numbers, unpacked when it runs."""

    def __init__(self, base):
        super().__init__()
        self.register_buffer("weight", (base.weight.data * 100).to(torch.int8))

    def forward(self, x):
        return x @ (self.weight.float() / 100).T


def with_value_projection(make):
    """A tiny Llama whose second layer has another module in place of W_V."""
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    attention.v_proj = make(attention.v_proj)
    return model


def bridge_of(model):
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers("tiny", hf_model=model, tokenizer=tiny_tokenizer(), device="cpu")


@pytest.mark.parametrize("wrap", [lambda model: model, bridge_of])
def test_a_layer_with_an_adapter_is_refused_and_the_way_to_merge_it_named(wrap):
    with pytest.raises(InputError, match=r"first at .*1\.self_attn.*v.*merge_adapters=True\) loads a copy") as caught:
        hw.load(wrap(with_value_projection(LoraLinear)))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_adapters_of_peft_are_refused_and_what_it_merges_is_right():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    added = tiny_model("llama")
    added.add_adapter(config)
    with pytest.raises(InputError, match=r"first at model\.layers\.0\.self_attn\.q_proj: .*merge_adapters=True"):
        hw.load(added, tokenizer=tiny_tokenizer())
    tokens = torch.tensor([[5, 60, 270, 281]])
    with torch.inference_mode():
        before = added(tokens).logits
    merged_here = hw.load(added, tokenizer=tiny_tokenizer(), merge_adapters=True)
    torch.testing.assert_close(merged_here.run(tokens), before, rtol=0, atol=1e-4)
    values = added.model.layers[1].self_attn.v_proj
    effective = values.base_layer.weight + values.get_delta_weight("default")
    torch.testing.assert_close(merged_here.W_V[1, 0].T, effective[:8].detach())
    with torch.inference_mode():
        assert torch.equal(added(tokens).logits, before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(tiny_model("llama"), config)
    with pytest.raises(InputError, match=r"separate from the weights of this PeftModel.*merge_adapters=True"):
        hw.load(wrapped, tokenizer=tiny_tokenizer())
    ours = hw.load(wrapped, tokenizer=tiny_tokenizer(), merge_adapters=True).run(tokens)
    merged = wrapped.merge_and_unload()
    with torch.inference_mode():
        expected = merged(tokens).logits
        assert not torch.allclose(expected, tiny_model("llama")(tokens).logits)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(hw.load(merged, tokenizer=tiny_tokenizer()).run(tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_rows_and_modules_that_peft_trained_themselves_are_merged(name):
    peft = pytest.importorskip("peft")
    trained = {"trainable_token_indices": [5, 60]} | ({} if name == "llama-tied" else {"modules_to_save": ["lm_head"]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(tiny_model(name), peft.LoraConfig(r=2, target_modules=["q_proj"], **trained))
    for key, parameter in wrapped.named_parameters():
        if "lora_B" in key or "trainable_tokens_delta" in key or "modules_to_save" in key:
            parameter.data += torch.randn_like(parameter)
    tokens = torch.tensor([[5, 60, 270, 281]])
    with torch.inference_mode():
        expected = wrapped.eval()(tokens).logits
    found = hw.load(wrapped, tokenizer=tiny_tokenizer(), merge_adapters=True).run(tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(expected, tiny_model(name)(tokens).logits, atol=0.1)


def test_weights_that_are_not_in_memory_are_refused_by_the_name_of_the_first():
    offloaded = tiny_model("llama")
    offloaded.model.layers[1].to("meta")  # as accelerate leaves what it moves to a disk
    with torch.device("meta"):
        nowhere = tf.AutoModelForCausalLM.from_config(offloaded.config)
    for model, name in ((offloaded, r"model\.layers\.1\.self_attn\.q_proj"), (nowhere, r"model\.embed_tokens")):
        with pytest.raises(
            ModelError, match=rf"LlamaForCausalLM are not all .*\({name}\.weight is .* on the device meta\)"
        ):
            hw.load(model, tokenizer=tiny_tokenizer())


class MergingLinear(LoraLinear):
    """One that can add its adapter to a copy of its weight, as peft's layers do."""

    disable_adapters = False

    def merge(self, safe_merge):
        assert safe_merge
        self.base_layer.weight.data = self.base_layer.weight.data + self.lora_B.weight @ self.lora_A.weight

    def get_base_layer(self):
        return self.base_layer


def test_adapters_are_merged_into_a_copy_whose_factors_are_the_effective_weights():
    model, tokens = with_value_projection(MergingLinear), torch.tensor([[5, 60, 270, 281]])
    layer = model.model.layers[1].self_attn.v_proj
    stored = layer.base_layer.weight.detach().clone()
    with torch.inference_mode():
        expected = model(tokens).logits
    merged = hw.load(model, tokenizer=tiny_tokenizer(), merge_adapters=True)
    torch.testing.assert_close(merged.run(tokens), expected, rtol=0, atol=1e-5)
    effective = (stored + layer.lora_B.weight @ layer.lora_A.weight).detach()
    torch.testing.assert_close(merged.W_V[1, 0].T, effective[:8])
    assert torch.equal(layer.base_layer.weight, stored)
    assert model.model.layers[1].self_attn.v_proj is layer
    assert merged.fingerprint != hw.load(tiny_model("llama")).fingerprint


def test_what_acts_beside_the_weights_and_is_no_change_of_them_is_refused():
    class PeftModel(torch.nn.Module):
        def get_base_model(self):
            return tiny_model("llama")

    for asked in ({}, {"merge_adapters": True}):
        with pytest.raises(InputError, match=r"this PeftModel: .*Learned prompts cannot be merged"):
            hw.load(PeftModel(), **asked)


def test_a_folder_of_an_adapter_is_told_as_one(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    for opened in (hw.load, open_weights):
        with pytest.raises(ModelError, match=r"load an adapter.*hw\.load\(peft_model, merge_adapters=True\)"):
            opened(tmp_path)


def int8_parameter(model):
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter((layer.weight.data * 100).to(torch.int8), requires_grad=False)
    return model


def test_an_int8_parameter_is_refused_by_its_name():
    with pytest.raises(ModelError, match=rf"layers\.1\.mlp\.up_proj\.weight is a Tensor of torch\.int8 .*{DEQUANTIZE}"):
        hw.load(int8_parameter(tiny_model("llama")))


def test_a_packed_buffer_of_weights_is_refused_by_its_name():
    with pytest.raises(ModelError, match=rf"1\.self_attn\.v_proj\.weight is a Tensor of torch\.int8 .*{DEQUANTIZE}"):
        hw.load(with_value_projection(PackedLinear))


def test_layers_of_bitsandbytes_are_refused_by_name_also_with_float_weights():
    kind = type("Linear8bitLt", (torch.nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    model = with_value_projection(lambda base: kind(base.in_features, base.out_features, bias=False))
    with pytest.raises(ModelError, match=rf"1\.self_attn\.v_proj is a quantized Linear8bitLt.*{DEQUANTIZE}"):
        hw.load(model)


def test_modules_that_torch_has_quantized_are_refused_by_name():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(tiny_model("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ModelError, match=rf"0\.self_attn\.q_proj is a quantized Linear.*{DEQUANTIZE}"):
        hw.load(model)
