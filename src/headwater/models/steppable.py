"""Whether a model's blocks can be stepped through one by one, as far as its structure shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwater.models.cache_names import keeps_an_index
from headwater.models.families import FAMILIES, family_of
from headwater.models.model import is_bridge
from headwater.models.sites import STATES

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel

WIRING = "transformer_lens.model_bridge.component_setup"
"""Where TransformerLens makes the hooks by which those of an MLP fire whose parts stand in the block itself."""


def cannot_step(model: HookedModel) -> str | None:
    """Say why a model's blocks cannot be stepped through, or None when they can (as far as its structure shows)."""
    raw = model.raw
    blocks = getattr(raw, "blocks", None)
    if blocks is None or not all(hasattr(block, "submodules") or not is_bridge(raw) for block in blocks):
        return "it is not a stack of blocks"
    if model.spread:
        return "its layers are spread over several devices"
    for block in blocks:
        needed = ("attn", "mlp") if model.shape.d_mlp else ("attn",)
        if missing := [part for part in needed if not has_part(block, part)]:
            return f"its blocks have no {' or '.join(missing)}"
    if any(not _is_wiring(hook) for point in raw.hook_dict.values() for hook in point.fwd_hooks):
        return "it carries hooks of its own"
    if keeps_an_index(raw):
        return "its attention keeps an index of tokens beside keys and values"
    known = is_bridge(raw) and getattr(model.config, "model_type", None) in FAMILIES
    if known and family_of(model.config).positions_by_place:
        return "its attention reads positions from where tokens stand (ALiBi), and is given them for whole rows"
    if any(site in STATES and site != "resid_mid" for site, _ in model.misfits):
        return "what its blocks add to the residual stream is not what attention and MLP write"
    if is_bridge(raw) and hasattr(raw, "project_out"):
        return "its residual stream is projected before the unembedding"
    return None


def _is_wiring(handle: Any) -> bool:
    """Whether a hook is TransformerLens's own, by which hooks of an MLP whose parts stand in the block fire."""
    return getattr(getattr(handle, "user_hook", None), "__module__", "") == WIRING


def has_part(block: Any, part: str) -> bool:
    """Whether a block has a part of this name itself; a bridge's block finds those of the module it wraps, too."""
    return part in getattr(block, "submodules", block._modules)
