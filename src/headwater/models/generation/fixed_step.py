"""A step of generation in fixed memory, recorded once as a CUDA graph and then replayed.

A token costs the host some forty small operations a layer, a quarter of a millisecond (`python tools/scaling.py host`),
however little the device has to do for them: in a small model, or for few rows, the device waits for its host. A graph
is asked for as one operation.

1. Keys and values move from the cache that the prompts filled into one of fixed size (transformers' `StaticCache`).
   Tokens, positions and the mask, with a column for every token there may be, lie in memory of their own.
2. The first step runs once, to set up what libraries set up, and is recorded. Every step writes its tokens into that
   memory and replays.
3. A graph lives as long as the prompts of one batch are continued. It reads weights where they lay when it was
   recorded: where one lies elsewhere now, the step is recorded anew.
4. What cannot be recorded (an operation that waits for a number) runs as it is, in the same memory.

`DEVICES` says where. It is empty: no card has shown yet that this is right and faster. To try it:

    from headwater.models.generation import fixed_step
    fixed_step.DEVICES = ("cuda",)

It is used where every layer attends to the whole text, nothing is hooked, and two steps give, once for each model, what
a whole run gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from headwater.kernels.devices import sent
from headwater.models.agreement import few_tokens, same_but_for_rounding
from headwater.models.unwrapped import Unwrapped

if TYPE_CHECKING:
    from headwater.models.model import Model

DEVICES: tuple[str, ...] = ()
"""The types of device whose steps are recorded."""
FEWEST = 8
"""Recording takes about three steps: fewer tokens than this are not worth it."""


class FixedStep:
    """One new token for each row, in memory that stays where it is.

    Args:
        bare: the model without wrappers.
        cache: the keys and values of the columns before.
        mask: which of these are real.
        room: how many tokens may follow.
    """

    def __init__(self, bare: Unwrapped, cache: DynamicCache, mask: Bool[Tensor, "row column"], room: int):
        self._bare = bare
        rows, self._column = mask.shape
        self._cache = static_cache(bare, self._column + room)
        for held, layer in zip(cache.layers, self._cache.layers, strict=True):
            layer.update(held.keys, held.values)
        keys = cache.layers[0].keys
        closed, self._given = torch.finfo(keys.dtype).min, torch.zeros(2, rows, 1, dtype=torch.long, device=keys.device)
        self._mask = torch.full((rows, 1, 1, self._column + room), closed, dtype=keys.dtype, device=keys.device)
        self._mask[..., : self._column].masked_fill_(sent(mask, keys.device)[:, None, None], 0)
        self._weights = [*bare.model.parameters(), *bare.model.buffers()]
        self._replay: Callable[[], Tensor] | None = None
        self._read_at: list[int] = []

    def __call__(self, tokens: Int[Tensor, " row"], positions: Int[Tensor, " row"]) -> Float[Tensor, "row d_vocab"]:
        """Return the logits behind each row's newest token; they are overwritten by the next step."""
        self._given.copy_(torch.stack([tokens, positions])[..., None])
        self._mask[..., self._column] = 0
        self._column += 1
        read_at = [weight.data_ptr() for weight in self._weights]
        if self._replay is None or read_at != self._read_at:
            self._replay, self._read_at = self._recorded(), read_at
        return self._replay()

    def _recorded(self) -> Callable[[], Tensor]:
        """Record the step; keys and values that it writes meanwhile are written again by the first replay."""
        lengths: list[Tensor] = [layer.cumulative_length for layer in self._cache.layers]
        before = [length.clone() for length in lengths]
        try:
            return recorded(self._run, self._given.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return self._run
        finally:
            for length, count in zip(lengths, before, strict=True):
                length.copy_(count)

    def _run(self) -> Float[Tensor, "row d_vocab"]:
        tokens, positions = self._given
        return self._bare.last_logits(tokens, self._cache, attention_mask=self._mask, position_ids=positions)


def recorded(work: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Record what a function asks of a CUDA device; return what asks for all of it again, and gives the same tensor.

    The function runs once before, on a stream of its own.

    Raises:
        RuntimeError: it waits for the device, or does what else cannot be recorded.
    """
    with torch.cuda.device(device):
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            work()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local")
        with torch.cuda.stream(here), recording:  # the former comes back where the latter fails
            out = work()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def is_fixed(model: Model, bare: Unwrapped, room: int) -> bool:
    """Whether steps of a model are to be recorded, and give what they should."""
    if model.device.type not in DEVICES or room < FEWEST:
        return False
    if model.fixed_step_checked is None:
        whole = all(type(layer) is StaticLayer for layer in static_cache(bare, 1).layers)
        model.fixed_step_checked = whole and _gives_the_same_logits(model, bare)
    return model.fixed_step_checked


def static_cache(bare: Unwrapped, columns: int) -> Any:
    """Return a cache for so many columns, with nothing in it."""
    return StaticCache(config=bare.model.config, max_cache_len=columns)


@torch.inference_mode()
def _gives_the_same_logits(model: Model, bare: Unwrapped) -> bool:
    """Whether the second of two steps, a replay, gives what a whole run does; a mask of another kind may not fit."""
    tokens = few_tokens(model.shape.d_vocab, model.shape.n_ctx, model.device)
    n, cache = tokens.shape[1] - 2, DynamicCache()
    if n < 1:
        return False
    try:
        bare.last_logits(tokens[:, :n], cache)
        step = FixedStep(bare, cache, torch.ones(1, n, dtype=torch.bool), 2)
        for column in (n, n + 1):
            found = step(tokens[:, column].cpu(), torch.tensor([column]))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return False
    return same_but_for_rounding(found, bare.last_logits(tokens))
