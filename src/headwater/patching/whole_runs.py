"""Whole runs: ordinary forwards of whole prompts, with hooks that make the edits of each row or keep what is wanted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from headwater.errors import InterventionError
from headwater.kernels.devices import to_device
from headwater.models.bridge_check import edges_are_cut
from headwater.models.edits import Hook, read_hook, replace_hook
from headwater.models.hooked import HookedModel
from headwater.models.memory import in_halves
from headwater.models.sites import SITES, Stage, hook_name, main_site
from headwater.models.tokens import Batch
from headwater.patching.edits import LOGITS, Deliver, Edit, Indices, Place, Reading, Variant, Variants
from headwater.patching.plan import Group, Measured, Plan, Readout, Reads, columns_of, read_run
from headwater.patching.replacements import ValueRequest, capture, compute_values
from headwater.patching.writing import ReplacementValues, TokenSpanEdit, write_patterns, write_tokens


def run_variants(
    model: HookedModel,
    prompts: Batch,
    variants: Sequence[Variant],
    examples: Sequence[int],
    values: ReplacementValues,
    before: Sequence[Hook] = (),
) -> dict[Reading, dict[int, Tensor]]:
    """Run prompts with hooks, each row with the edits of its variant; return by reading and row, `kept width`.

    `examples` is which of the group each row is, `before` are hooks that act before the edits.
    """
    n_layers = model.shape.n_layers
    stop = max(deepest(variant) for variant in variants)
    readings = sorted({reading for variant in variants for reading in variant.readings})
    rows = {reading: [i for i, v in enumerate(variants) if reading in v.readings] for reading in readings}
    read: dict[Reading, dict[int, Tensor]] = {reading: {} for reading in rows}

    def take(activation: Tensor, hook: object, reading: Reading) -> None:
        # Cloned: a view would hold the whole activation, which a later hook might also write into.
        read[reading] = {row: activation[row, list(variants[row].kept)].clone() for row in rows[reading]}

    # Noise that makes the corrupted run comes first: edits act on that run.
    hooks = [*before, *_edits(variants, examples, values, stop)]
    for site, layer in rows:
        if site != LOGITS:
            hooks.append((SITES[site].hook_name(layer), read_hook(partial(take, reading=(site, layer)))))
    # Only these go through W_U: in a large vocabulary it is the costliest product of a short prompt.
    columns = sorted({position for variant in variants for position in variant.kept})
    wants_logits = (LOGITS, n_layers) in rows
    # Layers below the deepest reading are not run.
    stop_at = None if wants_logits or stop == n_layers else stop
    out = model.run(prompts, hooks, keep=columns if stop_at is None else None, stop_at=stop_at)
    if wants_logits:
        at = {position: column for column, position in enumerate(columns)}
        for row in rows[LOGITS, n_layers]:
            read[LOGITS, n_layers][row] = out[row, [at[position] for position in variants[row].kept]]
    return read


def deepest(variant: Variant) -> int:
    """Return how many layers of the model what is read of a variant needs."""
    return max(layer + (site != LOGITS) for site, layer in variant.readings)


def run_edited(
    model: HookedModel,
    prompt: Batch,
    variant: Variant,
    example: int,
    values: ReplacementValues,
    before: Sequence[Hook] = (),
) -> None:
    """Run one prompt with a variant's edits after other hooks, for what the model's own checks say of it."""
    n_layers = model.shape.n_layers
    model.run(prompt, [*before, *_edits([variant], [example], values, n_layers)], stop_at=n_layers)


def visible_keys(model: HookedModel, prompt: Batch, layers: Collection[int]) -> dict[int, Bool[Tensor, "query key"]]:
    """Return which keys each query sees at these layers, read off the masked scores of one run."""
    visible: dict[int, Tensor] = {}

    def look(scores: Tensor, hook: object, layer: int) -> None:
        # Half of the least: a masked score is finfo.min and a little, or -inf in models of TransformerLens's own.
        visible[layer] = scores[0, 0] > torch.finfo(scores.dtype).min / 2

    hooks = [(hook_name("attn_scores", layer), read_hook(partial(look, layer=layer))) for layer in layers]
    # Read off, not derived: windows of layers that slide, and chunks, are what the model itself masks.
    model.run(prompt, hooks, stop_at=max(layers) + 1)
    return visible


def _edits(variants: Sequence[Variant], examples: Sequence[int], values: ReplacementValues, stop: int) -> list[Hook]:
    """Return the hooks that make the edits of each row's variant in the layers before one."""
    written: dict[Place, list[tuple[int, Edit]]] = {}
    severed: dict[tuple[int, bool], list[tuple[int, Edit]]] = {}
    for row, variant in enumerate(variants):
        for edit in variant.edits:
            # Not beyond the last layer that runs: hooks there would never fire.
            for layer in range(edit.layers.start, min(edit.layers.stop, stop)):
                if edit.writes:
                    written.setdefault((edit.site.name, layer), []).append((row, edit))
                else:
                    severed.setdefault((layer, edit.after_softmax), []).append((row, edit))
    hooks: list[Hook] = []
    for (layer, zero), cuts in severed.items():
        hooks += _cutting(cuts, layer, zero)
    for (_, layer), row_edits in written.items():
        edits = [(edit, examples[row]) for row, edit in row_edits]
        act = partial(written_into, edits=edits, values=values, layer=layer, rows=[row for row, _ in row_edits])
        hooks.append((row_edits[0][1].site.hook_name(layer), replace_hook(act)))
    return hooks


def _cutting(cuts: Sequence[tuple[int, Edit]], layer: int, zero: bool) -> list[Hook]:
    """Return the hooks that sever the edges of some rows in a layer, after the softmax or before it."""
    pattern = main_site(Stage.PATTERN).hook_name(layer)
    if zero:
        return [(pattern, replace_hook(partial(_zero, cuts=cuts)))]
    masked = replace_hook(partial(_mask, cuts=cuts, where=f"layer {layer}"))
    return [
        (hook_name("attn_scores", layer), masked),
        # Attention in transformers' own code may ignore edited scores: the pattern says whether they were cut.
        (pattern, read_hook(partial(_see_cut, cuts=cuts, where=pattern))),
    ]


def written_into(
    activation: Tensor,
    hook: object,
    edits: Sequence[tuple[Edit, int]],
    values: ReplacementValues,
    layer: int,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Return an activation of whole prompts, `batch position ...`, with edits of these rows written.

    With each edit comes the example whose values it writes. Without `rows`, the edits are those of every row in turn.
    """
    # A copy, as TransformerLens's cache may hold this tensor; contiguous, so that flatten is a view to write into.
    edited = activation.clone(memory_format=torch.contiguous_format)
    site, length = edits[0][0].site, edited.shape[2 if edits[0][0].site.has_keys else 1]
    # Padding is not edited: a change would be given rows that no prompt has.
    lengths = [values.lengths[example] if values.lengths else length for _, example in edits]
    rows, apart = range(len(edits)) if rows is None else rows, 1 if site.has_keys else length
    stretches = [
        TokenSpanEdit(edit, np.array([example]), 0, held, np.array([row * apart]))
        for (edit, example), held, row in zip(edits, lengths, rows, strict=True)
    ]
    if not site.has_keys:
        write_tokens(edited.flatten(0, 1), stretches, values, site, layer)
        return edited
    of_row, keys = np.zeros(len(edited), dtype=np.int64), np.arange(edited.shape[-1])
    of_row[list(rows)] = lengths
    columns = to_device(np.where(keys < of_row[:, None], keys, -1), edited.device)
    write_patterns(edited, stretches, columns, values, site, layer)
    return edited


def _zero(pattern: Tensor, hook: object, cuts: Sequence[tuple[int, Edit]]) -> Tensor:
    return pattern.masked_fill(_severed(pattern, cuts), 0.0)


def _mask(scores: Tensor, hook: object, cuts: Sequence[tuple[int, Edit]], where: str) -> Tensor:
    least, severed = torch.finfo(scores.dtype).min, _severed(scores, cuts)
    visible = scores > least / 2
    # A row of finfo.min alone attends to every key alike, future ones too; one that saw none before is left alone.
    blind = visible.any(-1) & ~(visible & ~severed).any(-1)
    if bool(blind.any()):
        token = int(blind.nonzero()[0][-1])
        raise InterventionError(
            f"Knocking out these edges leaves token {token} no key to attend to in {where}. Leave it at least one key, "
            "or use variant='zero'."
        )
    return scores.masked_fill(severed, least)


def _see_cut(pattern: Tensor, hook: object, cuts: Sequence[tuple[int, Edit]], where: str) -> None:
    edges_are_cut(pattern, _severed(pattern, cuts), where)


def _severed(scores: Tensor, cuts: Sequence[tuple[int, Edit]]) -> Bool[Tensor, "row head query key"]:
    """Say which edges are severed, of attention scores or weights of whole prompts."""
    severed = torch.zeros_like(scores, dtype=torch.bool)
    for row, cut in cuts:
        edges = cut.edges[: scores.shape[-2], : scores.shape[-1]].to(scores.device)
        heads: Any = slice(None) if cut.heads is None else list(cut.heads)
        # |=, since several cuts may meet in one row and head.
        severed[row, heads, : len(edges), : edges.shape[1]] |= edges
    return severed


TILE_TOKENS = {"cpu": 1024, "cuda": 1 << 15}
"""Tokens of a model of the width `WIDTH` given to a sublayer at once; halved when memory runs out."""


WIDTH = 768


TILE_WEIGHTS = 1 << 20
"""At most so many attention weights in a tile that is larger for being of a narrow model."""


def tile_tokens(model: HookedModel, length: int) -> int:
    """Return how many tokens are given to a sublayer at once: of a narrow model more, as a cache holds more of them."""
    usual = TILE_TOKENS.get(model.device.type, TILE_TOKENS["cpu"])
    # The same number of bytes, until attention weights, which do not shrink with the width, are the larger part.
    narrow = usual * WIDTH // model.shape.d_model
    return max(usual, min(narrow, TILE_WEIGHTS // (length * model.shape.n_heads)))


class Runner(ABC):
    """The runs of a group of examples: made unedited at once, then edited for any of the group's cells.

    Use inside the model's lock, and inside `torch.inference_mode()` unless it needs a graph.
    """

    name: ClassVar[str]
    needs_graph: ClassVar[bool]

    @abstractmethod
    def __init__(self, plan: Plan, examples: range):
        """Make the unedited runs."""

    @abstractmethod
    def measure(self, cells: range) -> Measured:
        """Measure some of the group's cells."""


class WholeRuns(Runner):
    """One forward of each side, then forwards of whole prompts, a cell in each row."""

    name: ClassVar[str] = "whole runs"
    needs_graph: ClassVar[bool] = False

    def __init__(self, plan: Plan, examples: range):
        self.plan, self.group = plan, Group(plan, examples)
        group, model = self.group, plan.model
        self._prompts = group.batch("base")
        before = group.corrupting("base")
        captured = capture(model, self._prompts, state_names(group), columns_of(group.kept), before)
        base = read_run(group, group.kept, *captured)
        # Which keys a query sees depends on its position: the longest prompt has every query there is.
        longest = self._prompts.rows(group.longest, group.longest + 1)
        visible = visible_keys(model, longest, group.severed_layers) if group.severed_layers else {}
        others, other = other_run(group)
        self.values = values_written(group, others)
        self.readout = Readout(group, base, other, visible)
        length = max(group.lengths)
        self.at_once = plan.batch_size or max(1, tile_tokens(model, length) // length)
        """How many rows a forward has: as many tokens as a tile of the walk."""

    def measure(self, cells: range) -> Measured:
        """Measure some of the group's cells, many in each forward."""
        return self.readout.collect(cells, self.run)

    def run(self, variants: Variants, deliver: Deliver) -> None:
        """Deliver what is read of variants of the group's runs, `at_once` of them in a forward.

        Rows of a forward read the same positions of as deep a layer, so that no logits are made that nobody reads.
        """
        alike: dict[tuple[object, ...], list[int]] = {}
        keys = [(change.kept, deepest(change), change.whole) for change in variants.changes]
        for index in np.flatnonzero(variants.each(lambda change: change.can_change_output)).tolist():
            alike.setdefault(keys[variants.which[index]], []).append(index)
        for indices in alike.values():
            # Rows of one length side by side need no padding.
            indices.sort(key=lambda index: self.group.lengths[variants.example[index]])
            while indices:
                rows, indices = np.array(indices[: self.at_once]), indices[self.at_once :]
                parts = in_halves(rows, lambda part: self._forward(variants, part, deliver))
                self.at_once = max(1, self.at_once // len(parts))

    def _forward(self, variants: Variants, indices: Indices, deliver: Deliver) -> None:
        """Deliver what is read of some variants, made in one forward."""
        examples, changes = variants.example[indices].tolist(), [variants[index] for index in indices.tolist()]
        before = self.group.corrupting("base", rows=examples)
        prompts = self._prompts.take(examples)
        for reading, read in run_variants(self.plan.model, prompts, changes, examples, self.values, before).items():
            deliver(reading, indices[list(read)], torch.stack(list(read.values())))


def state_names(group: Group) -> list[str]:
    """Name the activations that something reads."""
    return [SITES[site].hook_name(layer) for site, layer in group.readings if site != LOGITS]


def _value_names(group: Group) -> dict[Place, str]:
    """Name the other run's activations that values are made of."""
    source = group.plan.replacement
    if source is None or not source.takes_other_run:
        return {}
    return {(site, layer): group.sites[site].hook_name(layer) for site, layer in group.sources}


def other_run(group: Group) -> tuple[Mapping[str, Tensor], Reads | None]:
    """Run the other prompt of each pair, and keep what values are made of."""
    plan = group.plan
    if plan.other is None:
        return {}, None
    names = [*state_names(group), *_value_names(group).values()]
    kept, before = columns_of(group.other_kept), group.corrupting("other")
    activations, logits = capture(plan.model, group.batch("other"), names, kept, before)
    return activations, read_run(group, group.other_kept, activations, logits)


def values_written(group: Group, others: Mapping[str, Tensor]) -> ReplacementValues:
    """Return what edits write, given the other run's activations."""
    plan = group.plan
    if plan.replacement is None:
        return ReplacementValues({})
    names, sites = _value_names(group), group.sites
    other = {
        place: sites[place[0]].read(group.aligned_with_base(others[name], sites[place[0]]))
        for place, name in names.items()
    }
    wanted = ValueRequest(plan.model, group.examples, max(group.lengths), tuple(sorted(group.sources)), other, sites)
    return compute_values(plan.replacement, wanted, group.lengths)
