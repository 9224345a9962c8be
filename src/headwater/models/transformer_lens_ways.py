"""What TransformerLens's users know and a headwater model has in another form: settings to be read, and other names.

`model.cfg` gives the sizes and settings under TransformerLens's names. A name that a headwater model does not have is
an AttributeError that says what to use here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwater.errors import did_you_mean

if TYPE_CHECKING:
    from headwater.models.model import Model

HOOKS_END = "hooks end with the run, or with the context `with model.hooks([(name, function)]):`"
AS_STORED = "weights stay as the checkpoint stores them"
RAW = "model.raw.{name} is TransformerLens's own, past headwater's checks (docs: Coming from TransformerLens)"
WAYS = {
    "add_hook": HOOKS_END,
    "add_perma_hook": HOOKS_END,
    "reset_hooks": f"there is nothing to reset: {HOOKS_END}",
    "remove_all_hook_fns": f"there is nothing to remove: {HOOKS_END}",
    "blocks": "activations: model.run_with_cache(tokens) or model.cache(...); parameters: model.W_Q ... model.W_O",
    "W_in": "headwater.models.open_weights(model) has heads and embeddings; MLPs are under model.raw.blocks[layer].mlp",
    "ln_final": "its gain is headwater.models.open_weights(model).final_norm_gain(); its output hook is "
    "ln_final.hook_normalized",
    "unembed": "use model.W_U and model.b_U",
    "embed": "use model.W_E",
    "W_pos": "some families alone learn positions: model.raw.pos_embed.W_pos; rotary ones turn queries and keys",
    "parameters": "headwater.models.open_weights(model) has them by name, layer by layer",
    "QK": "multiply model.W_Q[layer, head] @ model.W_K[layer, head].T",
    "OV": "multiply model.W_V[layer, head] @ model.W_O[layer, head]",
    "tokens_to_residual_directions": "use model.W_U[:, token]",
    "set_use_attn_result": "what each head writes is cache['z', layer] times model.W_O[layer]; see also "
    "hw.direct_logit_attribution(model, prompts, tokens=...)",
    "eval": "a model is always in evaluation mode",
    "train": "a model is always in evaluation mode",
    "to": "choose where it lies when it is loaded: hw.load(name, device=..., dtype=...)",
    **dict.fromkeys(("half", "bfloat16", "float", "double"), "hw.load(name, dtype=...) chooses the dtype"),
    "cuda": "choose where it lies when it is loaded: hw.load(name, device='cuda')",
    "from_pretrained": "hw.load(name)",
    "load": "hw.load(name)",
    "from_pretrained_no_processing": "hw.load(name)",
    "load_and_process_state_dict": AS_STORED,
    "fold_layer_norm": AS_STORED,
    "center_writing_weights": AS_STORED,
    "center_unembed": AS_STORED,
    "enable_compatibility_mode": AS_STORED,
    "loss_fn": "model(tokens, return_type='loss', loss_per_token=True)",
    "hook_points": "model.raw.hook_dict has the names",
    "hook_dict": "hooks are given by name, with the run: model.run_with_hooks(tokens, fwd_hooks=[(name, function)])",
}
"""By name of TransformerLens: what to use here."""


class Config:
    """The sizes and settings of a model, by TransformerLens's names; to be read only."""

    def __init__(self, model: Model):
        self.__dict__["_model"] = model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        model = self.__dict__["_model"]
        if name in ("device", "dtype"):
            return getattr(model, name)
        if name in ("n_layers", "n_heads", "d_model", "d_head", "d_mlp", "d_vocab", "n_ctx"):
            return getattr(model.shape, name)
        if not hasattr(model.raw.cfg, name):
            raise AttributeError(f"cfg has no {name!r}.{did_you_mean(name, dir(self))}")
        return getattr(model.raw.cfg, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"cfg.{name} can only be read: the model would not follow. TransformerLens's own is model.raw.cfg."
        )

    def __dir__(self) -> list[str]:
        return sorted({name for name in dir(self._model.raw.cfg) if not name.startswith("_")} | {"device", "dtype"})

    def __repr__(self) -> str:
        sizes = ("n_layers", "n_heads", "d_model", "d_head", "d_mlp", "d_vocab", "n_ctx", "act_fn", "dtype", "device")
        return f"cfg({', '.join(f'{name}={getattr(self, name, None)!r}' for name in sizes)})"


def what_a_class_would_use(kind: type, name: str) -> str:
    """Say what stands here for a name that the class of models does not have."""
    way = WAYS.get(name)
    said = f": {way}." if way else f".{did_you_mean(name, [one for one in dir(kind) if not one.startswith('_')])}"
    return f"The class {kind.__name__} has no {name!r}{said}"


def what_to_use(model: object, name: str) -> str:
    """Say what stands here for a name that a headwater model does not have."""
    here = f"A HookedModel has no {name!r}"
    raw = vars(model).get("raw")
    if name in WAYS:
        return f"{here}: {WAYS[name]}. {RAW.format(name=name)}." if hasattr(raw, name) else f"{here}: {WAYS[name]}."
    if raw is not None and hasattr(raw, name):
        return f"{here}. {RAW.format(name=name)}."
    return f"{here}.{did_you_mean(name, [one for one in dir(type(model)) if not one.startswith('_')])}"
