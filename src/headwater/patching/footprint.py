"""How much memory a sweep takes: refuse what does not fit before it starts, and take fewer examples at once.

Of one example, roughly, in numbers of the model's dtype (T tokens; both prompts of a pair):

    replaced    the activations that edits write, of each site and layer
    recorded    what rows start from: the residual stream, up to three times per layer, and the keys and values
    running     one layer at work: a few widths and MLP widths per token, and the rows of its attention pattern
    rows        the residual stream of the rows that go down the layers together
    graph       for gradients: what autograd keeps of every layer

It is rough: 0.7 to 1.5 times what sweeps of a 124M model take on a CPU at sites of the residual stream, 2 to 5 times at
heads (`benchmarks/NOTES.md`). Memory that runs out all the same is met by halving.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from headwater.errors import InputError
from headwater.models.gradients import graph_bytes
from headwater.models.memory import available_memory, how_many_fit, refuse_too_large
from headwater.models.shape import ModelShape
from headwater.models.sites import Site
from headwater.patching.cells import Kind
from headwater.patching.plan import WAVE_TOKENS, Plan, tokens_of
from headwater.patching.variants import Replace

MOST_FEATURES = 4096
"""A dictionary of more features is swept exactly over those that were chosen only."""
CELL_BYTES = 800
"""What a cell takes from its first label to its row of the table."""


def refuse_too_many_cells(n_cells: int) -> None:
    """Refuse a sweep whose very list of cells would not fit.

    Raises:
        InputError: with the figures.
    """
    advice = "Sweep over fewer axes (over=), layers, heads, positions or prompts."
    refuse_too_large(f"The list of this sweep's {n_cells:,} cells", n_cells * CELL_BYTES, torch.device("cpu"), advice)


def refuse_whole_dictionaries(
    planned: Sequence[tuple[Site, Mapping[str, Sequence[object]]]], shape: ModelShape
) -> None:
    """Refuse to sweep exactly over all features of a large dictionary: a run for each, of which most do nothing.

    Args:
        planned: for each example and site, the places on each axis.
        shape: of the model.

    Raises:
        InputError: with how many runs these would be, and of how many layers.
    """
    cells: dict[Site, int] = {}
    for site, steps in planned:
        if site.has_units and len(steps["feature"]) == site.width(shape, 1):
            cells[site] = cells.get(site, 0) + math.prod(map(len, steps.values()))
    for site, n_cells in cells.items():
        if (count := site.width(shape, 1)) > MOST_FEATURES:
            above = shape.n_layers - min(site.layers(shape))
            raise InputError(
                f"Sweeping all {count:,} features of {site.name} exactly would be {n_cells:,} runs of up to {above} "
                f"layers; at most {MOST_FEATURES:,} features are swept unless they are chosen. Choose them by number, "
                "sites=features.only([...]), for instance the strongest of method='attribution', which takes one "
                "forward and one backward for all."
            )


def examples_at_once(plan: Plan, gradients: bool = False) -> int:
    """Return how many examples of the sweep fit in memory together.

    A model that is spread over devices is taken to have room: which of them would hold what is not known.

    Raises:
        InputError: not even one; the message has the figures.
    """
    if plan.model.spread:
        return len(plan.base)
    tokens = np.bincount(plan.cells.example, tokens_of(plan), len(plan.base)).astype(np.int64).tolist()
    begins = np.searchsorted(plan.cells.example, np.arange(len(plan.base) + 1)).tolist()
    alike: dict[tuple[bytes, int, int, int], int] = {}
    for example, n_tokens in enumerate(tokens):
        kinds = plan.cells.kind[begins[example] : begins[example + 1]].tobytes()
        length = max(len(side[example]) for side in (plan.base, plan.other) if side is not None)
        alike.setdefault((kinds, length, n_tokens, len(plan.positions[example])), example)
    largest = 0
    for (_, length, n_tokens, _), example in alike.items():
        numbers = np.unique(plan.cells.kind[begins[example] : begins[example + 1]])
        replaced = _replaced(plan, [plan.cells.kinds[number] for number in numbers], length)
        largest = max(largest, example_bytes(plan, example, length, replaced, n_tokens, gradients))
    advice = "Give shorter prompts, fewer sites or layers, or load the model in bfloat16, which takes half of float32."
    return how_many_fit("This sweep, one example at a time,", largest, plan.model.device, advice)


def example_bytes(plan: Plan, example: int, length: int, replaced: int, n_tokens: int, gradients: bool = False) -> int:
    """Estimate what one example with its cells takes on the model's device.

    Args:
        plan: the sweep.
        example: which example.
        length: of the longer of its prompts.
        replaced: how many numbers the activations have that its edits write.
        n_tokens: how many tokens the rows of its cells have.
        gradients: whether autograd keeps every layer.
    """
    shape = plan.model.shape
    sides = 1 if plan.other is None else 2
    numbers = replaced + sides * length * _running(shape, length)
    logits = 3 * len(plan.positions[example]) * plan.model.n_logits
    if gradients:
        graph = shape.n_layers * graph_bytes(plan.model, length, length)
        return (numbers + logits) * plan.model.dtype.itemsize + graph
    recorded = shape.n_layers * (3 * shape.d_model + 2 * shape.n_kv_heads * shape.d_head)
    rows = min(n_tokens, WAVE_TOKENS) * shape.d_model
    numbers += sides * length * recorded + rows + (logits if plan.only_answers is None else 0)
    return numbers * plan.model.dtype.itemsize


def runs_at_once(plan: Plan, length: int, kept: int) -> int:
    """Return how many whole runs of prompts of a length, with as many positions read, fit in memory together."""
    if plan.model.spread:
        return sys.maxsize
    numbers = length * _running(plan.model.shape, length) + 3 * kept * plan.model.n_logits
    return max(1, available_memory(plan.model.device) // (numbers * plan.model.dtype.itemsize))


def _running(shape: ModelShape, length: int) -> int:
    """Count the numbers that a layer at work holds of one token of a whole run."""
    return 12 * shape.d_model + 4 * shape.d_mlp + 3 * shape.n_heads * length


def _replaced(plan: Plan, kinds: Sequence[Kind], length: int) -> int:
    """Count the numbers of the activations that edits write, with the runs that they come from."""
    if plan.source is None:
        return 0
    edits = [edit for kind in kinds for edit in kind.edits if isinstance(edit, Replace)]
    places = {(edit.site.name, layer): edit.site for edit in edits for layer in edit.layers}
    widths = (site.width(plan.model.shape, length) for site in places.values())
    return plan.source.copies * length * sum(widths)
