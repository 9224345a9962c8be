"""What a transformers model must be before it is wrapped: a language model of plain float weights.

adapters     LoRA and its kin act beside the weights: what is read from the weights would not be what runs; refused,
             or added to the weights of a copy
quantized    weights that are not float numbers, or are unpacked on the way; refused
multimodal   the text model inside is taken out: the same modules, and no others, give its logits (Gemma 3, Llava); or
             the same parameters in a text model that has their names (Qwen 2.5 VL, Qwen 3 VL)

What is set right in TransformerLens's adapters, which say how a model is wrapped, and in what they wrap.

Falcon with `new_decoder_architecture` (40B, 180B, Falcon 2): each key-value head is with its query heads in one
matrix (`weights.conversion`), whatever `multi_query` says; TransformerLens 4.3 takes it for queries, keys and
values one after the other, and its one norm, where there is one, for two.

Granite 4 without positions (`position_embedding_type` is not "rope"): TransformerLens 4.3 looks for a rotary
embedding, which transformers does not make.

OLMo 1 to 3 and FlexOlmo turn queries and keys in float32 and go on in the dtype of the weights; TransformerLens 4.3
goes on in float32, and fails in bfloat16 and float16.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from headwater.errors import InputError, ModelError
from headwater.models.bridge_check import WRAPPED, difference
from headwater.models.conversion import split_heads
from headwater.models.families import ModelShape, family_of, shape_of, text_config
from headwater.models.fingerprint import is_a

MERGE = "hw.load(transformers_model, merge_adapters=True) loads a copy whose weights hold them"
SAME_TEXT_MODELS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Types of text models that turn texts without images as another type does, by whose class they are run."""
WEIGHT_BUFFERS = (".weight", ".qweight")
"""What buffers that hold packed weights are called."""


def refuse_adapters(model: Any) -> None:
    """Refuse a PeftModel, and a model some of whose layers carry adapters (`add_adapter`)."""
    if is_a(model, "PeftModel"):
        if not any(is_a(module, "BaseTunerLayer") for module in model.modules()):
            raise InputError(
                f"A {type(model).__name__} of peft was given that changes no weights, as learned prompts do not: there "
                "is nothing to merge, and headwater does not run it. Give its get_base_model() to load that."
            )
        raise InputError(
            f"A {type(model).__name__} of peft was given, whose adapters act beside the weights: {MERGE}; or give what "
            "its merge_and_unload() returns."
        )
    for name, module in model.named_modules():
        if is_a(module, "BaseTunerLayer"):
            where = name.replace(WRAPPED, "")  # as a TransformerBridge names what it wraps
            raise InputError(
                f"Adapters act beside the weights of this {type(model).__name__}, first at {where}: {MERGE}."
            )


def with_adapters_merged(model: Any) -> Any:
    """Return a copy of a model whose weights hold its adapters; a model without adapters itself.

    What is not merged shares its numbers with the model, which stays as it is. Adapters that are switched off are left
    out.
    """
    whole = model.get_base_model() if is_a(model, "PeftModel") else model
    adapted = any(is_a(module, "BaseTunerLayer") for module in whole.modules())
    if not adapted or not isinstance(whole, PreTrainedModel):
        refuse_adapters(model)
        return model
    copy = twin(whole).eval()
    for name, module in list(copy.named_modules()):
        if is_a(module, "AuxiliaryTrainingWrapper"):  # around what is trained itself, or rows of it
            merge = not module.disable_adapters
            module = module.unload_and_optionally_merge_module(merge, safe_merge=True, adapter_names=None)
            copy.set_submodule(name, module)
        # One inside a wrapper that was replaced above went with it.
        elif is_a(module, "BaseTunerLayer") and module in copy.modules():
            if not module.disable_adapters:
                module.merge(safe_merge=True)
            copy.set_submodule(name, module.get_base_layer())
    was_training = whole.training
    whole.eval()
    try:
        # peft's layers differ by kind and version: that merging was right is seen, not believed.
        _same_logits(whole, copy, "The model with its adapters merged")
    finally:
        whole.train(was_training)
    copy._hf_peft_config_loaded = False
    return copy


def twin(hf: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules and config; the parameters are new objects that share the original's memory."""
    shared = {id(p): torch.nn.Parameter(p.detach(), requires_grad=False) for p in hf.parameters()}
    return deepcopy(hf, shared)


def refuse_quantized(model: Any) -> None:
    """Refuse weights that are not stored as float numbers, or not in memory."""
    advice = "headwater reads float weights: load the model without quantization, or save a dequantized copy."
    for name, module in model.named_modules():
        if type(module).__module__.startswith(("torch.ao.nn.", "bitsandbytes.")):
            raise ModelError(f"{name} of this {type(model).__name__} is a quantized {type(module).__name__}; {advice}")
    packed = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(WEIGHT_BUFFERS)]
    for name, tensor in [*model.named_parameters(), *packed]:
        if tensor.is_meta:
            raise ModelError(
                f"{name} of this {type(model).__name__} is not in memory: it was offloaded, to the host or to disk, or "
                "never loaded (device 'meta'). Load the whole model on one device; hw.load(folder) does."
            )
        if type(tensor.data) is not torch.Tensor or not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(
                f"{name} of this {type(model).__name__} is stored as {kind} {type(tensor.data).__name__}; {advice}"
            )
    if getattr(model, "is_quantized", False):
        raise ModelError(f"This {type(model).__name__} is quantized; {advice}")


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or the text model inside a multimodal one, seen to give the same logits."""
    name = type(model).__name__
    if model.get_output_embeddings() is None:
        raise ModelError(f"A {name} has no unembedding; load the checkpoint as AutoModelForCausalLM does.")
    if not hasattr(model.config, "text_config"):
        return model
    config = text_config(model.config)
    decoder: Any = model.get_decoder()
    if (plain := SAME_TEXT_MODELS.get(config.model_type)) is not None:
        text = _with_parameters_of(decoder, plain, config)
        text.set_output_embeddings(model.get_output_embeddings())
    elif decoder.get_output_embeddings() is not None:  # a language model by itself (Llama 4)
        text = decoder
    else:
        try:
            with torch.device("meta"):
                text = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        except ValueError:
            raise ModelError(
                f"{name} is multimodal, and transformers has no text model of its type {config.model_type!r} by "
                "itself: give a language model, or run this one with transformers."
            ) from None
        setattr(text, text.base_model_prefix, decoder)
        text.set_output_embeddings(model.get_output_embeddings())
    text.name_or_path = model.name_or_path
    text.eval()
    _same_logits(model, text, f"The text model of this {name}, {type(text).__name__},")
    return text


def _with_parameters_of(decoder: Any, plain: str, config: Any) -> Any:
    """Return a language model of another type that holds a decoder's parameters under the same names."""
    like = CONFIG_MAPPING[plain].from_dict({**config.to_dict(), "model_type": plain})
    with torch.device("meta"):
        text = AutoModelForCausalLM.from_config(like, attn_implementation="eager")
    text.model.rotary_emb = type(text.model.rotary_emb)(like).to(decoder.device)  # its numbers are in no state
    text.model.load_state_dict(decoder.state_dict(), assign=True)
    return text


@torch.inference_mode()
def _same_logits(whole: PreTrainedModel, text: PreTrainedModel, what: str) -> None:
    tokens = torch.arange(4, device=whole.get_input_embeddings().weight.device)[None]
    error = difference(*(model(tokens, use_cache=False).logits for model in (text, whole)))
    if not error <= 1e-4:
        raise ModelError(f"{what} gives other logits than the whole: {error:.1%} apart.")


def config_for_adapter(config: Any) -> Any:
    """Return the config from which TransformerLens is to make its adapter: the model's own, or one that says more."""
    if not _is_new_falcon(config):
        return config
    config = deepcopy(config)
    config.multi_query, config.num_key_value_heads = False, config.num_kv_heads
    return config


def setter_right(config: Any) -> Callable[[Any], None] | None:
    """Return what sets an adapter right; None where nothing has to be."""
    if config.model_type == "granitemoehybrid" and config.position_embedding_type != "rope":

        def without_positions(adapter: Any) -> None:
            adapter.component_mapping.pop("rotary_emb")
            adapter.cfg.positional_embedding_type = "none"

        return without_positions
    if not _is_new_falcon(config):
        return None
    family, shape = family_of(config), shape_of(config)

    def set_right(adapter: Any) -> None:
        parts = adapter.component_mapping["blocks"].submodules
        parts["ln1"].name = family.norms.before_attention
        parts["attn"].split_qkv_matrix = lambda attention: _split(attention.query_key_value, family.fused, shape)

    return set_right


def keep_dtype_when_turned(raw: Any, hf: Any) -> None:
    """Let queries and keys of OLMo have the dtype of the weights, as in transformers, once they are turned."""
    if hf.config.model_type not in ("olmo", "olmo2", "olmo3", "flex_olmo"):
        return

    def cast(point: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(one.to(hf.dtype) for one in given)

    for block in raw.blocks:
        for point in (block.attn.hook_rot_q, block.attn.hook_rot_k):
            point.register_forward_pre_hook(cast)


def _is_new_falcon(config: Any) -> bool:
    return config.model_type == "falcon" and config.new_decoder_architecture


def _split(joined: nn.Linear, fused: Any, shape: ModelShape) -> tuple[nn.Linear, ...]:
    """Return a linear map each for queries, keys and values."""
    maps = []
    biases = [None] * 3 if joined.bias is None else split_heads(joined.bias.detach(), fused, shape)
    for by_head, bias in zip(split_heads(joined.weight.detach(), fused, shape), biases, strict=True):
        weight = by_head.transpose(1, 2).flatten(0, 1)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.contiguous())
        if bias is not None:
            linear.bias = nn.Parameter(bias.flatten().contiguous())
        maps.append(linear)
    return tuple(maps)
