"""The residual stream after layers of a model that nobody edits, for results that are compared with no other run.

1. Where the last layer is among them, the model runs without TransformerLens's wrappers
   (`headwater.models.bare_model`), and without its head: what a block returns is the residual stream after it.
2. Elsewhere, and where that might be something else, the bridge runs up to the last layer that is read, its attention
   in one pass where that can be (`headwater.models.attention_paths`).

Both are the run of the model to the rounding of its dtype. A sweep or a knockout, whose runs are compared with one
another, takes neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.kernels.devices import to_device
from headwater.models.attention_paths import one_pass_attention
from headwater.models.bare_model import BareModel, bare_model
from headwater.models.checks import finite_output
from headwater.models.edits import Hook, read_hook
from headwater.models.forward import angles_by_row, padding_option
from headwater.models.sites import hook_name
from headwater.models.tokens import Batch

if TYPE_CHECKING:
    from headwater.models.model import Model

Take = Callable[[Tensor], Tensor]
"""What is kept of a residual stream `batch position d_model`: a copy, as it is read while the model runs."""


@torch.inference_mode()
def residual_streams(model: Model, batch: Batch, layers: Sequence[int], take: Take) -> dict[int, Tensor]:
    """Run a batch and return what is taken of the residual stream after each of these layers."""
    kept: dict[int, Tensor] = {}

    def keep(layer: int) -> Hook:
        def look(residual: Tensor, hook: object) -> None:
            kept[layer] = take(residual)

        return hook_name("resid_post", layer), read_hook(look)

    with model.lock:
        bare = bare_model(model) if max(layers) == model.shape.n_layers - 1 else None
        if bare is not None:
            return _without_wrappers(model, bare, batch, layers, take)
        with one_pass_attention(model):
            model.run(batch, [keep(layer) for layer in layers], stop_at=max(layers) + 1)
    return kept


def _without_wrappers(
    model: Model, bare: BareModel, batch: Batch, layers: Sequence[int], take: Take
) -> dict[int, Tensor]:
    """Run a batch without wrappers, with torch's hooks on its blocks; layers end with the last."""
    kept: dict[int, Tensor] = {}
    last: list[Tensor] = []

    def look(block: object, args: object, out: Tensor | tuple[Tensor, ...], layer: int) -> None:
        residual = out[0] if isinstance(out, tuple) else out
        kept[layer] = take(residual)
        last[:] = [residual]

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            block = bare.in_place_of(model.raw.blocks[layer])
            hooks.callback(block.register_forward_hook(partial(look, layer=layer)).remove)
        hooks.enter_context(angles_by_row(bare.rotary_by_length, batch.lengths))
        bare.read(to_device(batch.tokens, model.device), **padding_option(model, batch))
    finite_output(model, last[0], batch, None)
    return kept
