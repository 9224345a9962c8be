"""Attention in one pass, `scaled_dot_product_attention`, where nothing inside it is watched.

TransformerLens's bridge computes scores, softmax and weighted values one after the other, so that hooks can read and
edit each: `batch head query key` numbers several times over. Inside `one_pass_attention` every block calls the
transformers module that the bridge wraps, with its scaled-dot-product form: the same weights, rotation, window and
mask, and no pattern. The bridge's own attention stays where this cannot be: a soft cap (Gemma 2), attention sinks
(gpt-oss), layers on several devices, a hook inside attention, folded weights, architectures that headwater does not
know.

Both round differently, so runs that are compared with one another (a patch, a knockout) must not be mixed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from headwater.models.families import family_named
from headwater.models.model import is_bridge

if TYPE_CHECKING:
    from headwater.models.model import Model


@contextlib.contextmanager
def one_pass_attention(model: Model) -> Iterator[bool]:
    """Let a model's attention go in one pass as long as the context lasts; no other thread can run it meanwhile.

    Runs inside must not hook anything inside attention (`blocks.{layer}.attn.*`): it would not fire, an error.

    Yields:
        whether it does; if not, the model runs as ever.
    """
    with model.lock:
        if not _can(model):
            yield False
            return
        from transformer_lens.model_bridge.generalized_components.attention import AttentionBridge

        bridges = [block.attn for block in model.raw.blocks]
        configs = {id(config): config for config in (bridge.original_component.config for bridge in bridges)}
        configs[id(model.raw.original_model.config)] = model.raw.original_model.config
        before = {key: config._attn_implementation for key, config in configs.items()}
        try:
            for config in configs.values():
                config._attn_implementation = "sdpa"
            for bridge in bridges:
                bridge.__dict__["forward"] = partial(AttentionBridge.forward, bridge)
            yield True
        finally:
            for bridge in bridges:
                bridge.__dict__.pop("forward", None)
            for key, config in configs.items():
                config._attn_implementation = before[key]


def _can(model: Model) -> bool:
    """Whether the wrapped modules compute what the bridge's attention computes, and nobody looks inside."""
    raw = model.raw
    if not is_bridge(raw) or model.spread or getattr(raw, "compatibility_mode", False):
        return False
    watched = any(point.fwd_hooks or point.bwd_hooks for name, point in raw.hook_dict.items() if ".attn." in name)
    return not watched and is_the_same_in_one_pass(model)


def is_the_same_in_one_pass(model: Model) -> bool:
    """Whether attention in one pass is what the architecture computes, with nothing between its steps."""
    inner, family = model.raw.original_model, family_named(model.shape.architecture)
    if family is None or not getattr(inner, "_supports_sdpa", False):
        return False
    return not any(getattr(inner.config, option, None) for option in family.not_in_one_pass)
