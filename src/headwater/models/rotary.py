"""Rotary embeddings whose angles depend on how long a text is, for each row of a batch by its own length.

longrope (Phi-3, 3.5, 4-mini) has other angles in texts that are longer than the model was first trained on.
transformers gives all rows of a batch the angles of the longest. Here a row has those that it has alone. (Dynamic
rotary embeddings are others past `max_position_embeddings` only, and longer texts are refused.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rotary_by_length(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules of a model that make such embeddings."""
    return [module for module in model.modules() if vars(module).get("rope_type") == "longrope"]


def original_length(modules: Sequence[Any]) -> float | int:
    """Return the length of the longest text that has the angles of short ones; infinity where all texts have them."""
    lengths = [module.config.rope_parameters["original_max_position_embeddings"] for module in modules]
    return min(lengths, default=float("inf"))


@contextlib.contextmanager
def angles_by_row(modules: Sequence[torch.nn.Module], lengths: Int[Tensor, " row"] | None = None) -> Iterator[None]:
    """Let each row of a run have the angles of its own length.

    Args:
        modules: what `rotary_by_length` returned.
        lengths: of each row, how many tokens its text has; default: one more than the last position it is given.
    """
    own = lengths.tolist() if modules and lengths is not None else None
    try:
        for module in modules:
            module.__dict__["forward"] = partial(_angles, module, own)
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def _angles(
    module: Any, lengths: list[int] | None, x: Tensor, position_ids: Int[Tensor, "_ position"], **options: Any
) -> tuple[Float[Tensor, "row position d_head"], ...]:
    """Return the angles of each row, at the positions of all: those of short texts up to the original length."""
    lengths = (position_ids.max(1).values + 1).tolist() if lengths is None else lengths
    original = int(original_length([module]))
    made: dict[bool, tuple[Tensor, ...]] = {}
    for long in {length > original for length in lengths}:
        last = position_ids.new_full((len(position_ids), 1), original if long else original - 1)
        ids = torch.cat([position_ids if long else position_ids.clamp_max(original - 1), last], 1)
        made[long] = tuple(angles[:, :-1] for angles in type(module).forward(module, x, ids, **options))
    if len(made) == 1:
        return next(iter(made.values()))
    rows = [[part[min(row, len(part) - 1)] for part in made[length > original]] for row, length in enumerate(lengths)]
    return tuple(torch.stack(part) for part in zip(*rows, strict=True))
