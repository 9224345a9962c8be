"""One call of the wrapped model: how padding is masked, which logits are left out, where its layers end.

Each row of a batch has the rotary angles of its own length. longrope (Phi-3, 3.5, 4-mini) has other angles in texts
that are longer than the model was first trained on, and transformers gives all rows of a batch those of the longest;
here a row has those that it has alone. (Dynamic rotary embeddings are others past `max_position_embeddings` only, and
longer texts are refused.)
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.errors import InputError, ModelError
from headwater.kernels.devices import to_device
from headwater.models.cache_names import NAMES
from headwater.models.model import is_bridge
from headwater.models.sites import hook_name
from headwater.models.tokens import Batch

if TYPE_CHECKING:
    from headwater.models.model import Model


def original_length(modules: Sequence[Any]) -> float | int:
    """Return the length of the longest text that has the angles of short ones; infinity where all texts have them."""
    lengths = [module.config.rope_parameters["original_max_position_embeddings"] for module in modules]
    return min(lengths, default=float("inf"))


@contextlib.contextmanager
def forward_replaced(functions: Iterable[tuple[torch.nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Let modules call these functions in place of their `forward` for as long as the context lasts."""
    modules = []
    try:
        for module, function in functions:
            module.__dict__["forward"] = function
            modules.append(module)
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def angles_by_row(
    modules: Sequence[torch.nn.Module], lengths: Int[Tensor, " row"] | None = None
) -> AbstractContextManager[None]:
    """Let each row of a run have the angles of its own length.

    Args:
        modules: `model.rotary_by_length`.
        lengths: of each row, how many tokens its text has; default: one more than the last position it is given.
    """
    n_tokens = lengths.tolist() if modules and lengths is not None else None
    return forward_replaced([(module, partial(_angles, module, n_tokens)) for module in modules])


def _angles(
    module: Any, lengths: list[int] | None, x: Tensor, position_ids: Int[Tensor, "_ position"], **options: Any
) -> tuple[Float[Tensor, "row position d_head"], ...]:
    """Return the angles of each row, at the positions of all: those of short texts up to the original length."""
    lengths = (position_ids.max(1).values + 1).tolist() if lengths is None else lengths
    original = int(original_length([module]))
    angles: dict[bool, tuple[Tensor, ...]] = {}
    for long in {length > original for length in lengths}:
        # the module takes long or short angles by the largest position: one is appended, and its angles left out
        last = position_ids.new_full((len(position_ids), 1), original if long else original - 1)
        # Past its own text a short row has padding, whose position must not turn the whole batch long.
        ids = torch.cat([position_ids if long else position_ids.clamp_max(original - 1), last], 1)
        angles[long] = tuple(part[:, :-1] for part in type(module).forward(module, x, ids, **options))
    if len(angles) == 1:
        return next(iter(angles.values()))
    rows = [[part[min(row, len(part) - 1)] for part in angles[length > original]] for row, length in enumerate(lengths)]
    return tuple(torch.stack(part) for part in zip(*rows, strict=True))


LAST = slice(-1, None)
"""`logits_to_keep` of the last logits. Of a number Gemma 4 runs the layers that share keys for so many tokens only."""


def forward(
    model: Model,
    batch: Batch,
    columns: Int[Tensor, " kept"] | None = None,
    stop_at: int | None = None,
    options: dict[str, Any] | None = None,
) -> Float[Tensor, "batch position _"]:
    """Call the wrapped model with a batch, whatever hooks are attached to it.

    Returns:
        Logits of the columns, or the residual stream in front of layer `stop_at`.
    """
    options = padding_option(model, batch) | (options or {})
    # After a cache the batch holds new tokens alone: its lengths are not those of the texts.
    begins = all(past is None or past.get_seq_length() == 0 for name, past in options.items() if name in NAMES)
    with angles_by_row(model.rotary_by_length, batch.lengths if begins and "position_ids" not in options else None):
        return _called(model, to_device(batch.tokens, model.device), columns, stop_at, options)


def _called(
    model: Model,
    tokens: Int[Tensor, "batch position"],
    columns: Int[Tensor, " kept"] | None,
    stop_at: int | None,
    options: dict[str, Any],
) -> Float[Tensor, "batch _ _"]:
    raw = model.raw
    if not is_bridge(raw):
        out = raw(tokens, stop_at_layer=stop_at, **options)
        return out if columns is None else out[:, to_device(columns, out.device)]
    options = {"use_cache": False} | options
    if stop_at == model.shape.n_layers:
        return _residual_after_last_block(model, tokens, options)
    if columns is None:
        return raw(tokens, stop_at_layer=stop_at, **options)
    if leaves_logits_out(raw):
        # as a list where the logits are on another device than the inputs: it fits everywhere
        keep = columns.tolist() if model.spread else to_device(columns, model.device)
        return raw(tokens, **{"logits_to_keep": keep} | options)
    return raw(tokens, **options)[:, columns]


def padding_option(model: Model, batch: Batch) -> dict[str, Tensor]:
    """Return the option that says what is padding; nothing where nobody reads it, since it comes last."""
    if not batch.padded:
        return {}
    if not model.takes_padding:
        raise InputError(
            f"{model.name} gives a text other values beside a longer one than alone, since it reads the padding after "
            "it: give texts of one length, or one at a time."
        )
    return {"attention_mask": to_device(batch.mask.long(), model.device)} if model.looks_ahead else {}


def leaves_logits_out(raw: Any) -> bool:
    """Whether a wrapped model itself can leave out the logits that are not wanted (`logits_to_keep`)."""
    return is_bridge(raw) and _takes_logits_to_keep(type(raw.original_model).forward)


def last_logits_only(raw: Any) -> dict[str, slice]:
    """Return the option that leaves out all logits but the last, where a wrapped model takes it."""
    return {"logits_to_keep": LAST} if leaves_logits_out(raw) else {}


@functools.cache
def _takes_logits_to_keep(run: Callable[..., object]) -> bool:
    return "logits_to_keep" in inspect.signature(run).parameters


class _EnoughError(Exception):
    """Ends a run after the last block."""


def _residual_after_last_block(
    model: Model, tokens: Int[Tensor, "batch position"], options: dict[str, Any]
) -> Float[Tensor, "batch position d_model"]:
    """The bridge gives logits where a HookedTransformer gives the residual stream: take it from its hook.

    The run ends there, without the head, unless somebody has put a hook after the blocks.
    """
    kept: list[Tensor] = []
    ends = not _is_hooked_after_blocks(model.raw)

    def keep(residual: Tensor, hook: object) -> None:
        kept.append(residual)
        if ends:
            raise _EnoughError

    name = hook_name("resid_post", model.shape.n_layers - 1)
    with contextlib.suppress(_EnoughError), model.raw.hooks(fwd_hooks=[(name, keep)]):
        model.raw(tokens, **last_logits_only(model.raw) | options)
    if not kept:
        raise ModelError(
            f"Nothing passes through {name} of {model.name} ({model.shape.architecture}): its residual stream after "
            "the last block cannot be read. Use the logits of model.run."
        )
    return kept[0]


def _is_hooked_after_blocks(raw: Any) -> bool:
    """Whether a hook of anyone is in the last norm or the unembedding."""
    ends = [getattr(raw, name, None) for name in ("ln_final", "unembed")]
    modules = [module for one in ends if isinstance(one, torch.nn.Module) for module in one.modules()]
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)
