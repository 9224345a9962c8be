"""Attribution patching: the cells of a sweep to first order, from gradients (Nanda 2023; Syed et al. 2023).

    effect ≈ Σ (value - activation) · ∂ metric / ∂ activation

One forward of the prompts that values come from and one of the prompts that are edited, one backward per metric for the
gradient at every site at once, and a cell sums the product over the layers, positions and heads that it covers. Exact
where the metric is linear in the activation, it can be far off where a softmax or a norm saturates:
`sweep.agreement(exact)` says how far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.errors import InputError, NumericsError
from headwater.kernels.devices import to_device
from headwater.models.edits import Hook, replace_hook
from headwater.models.gradients import refuse_without_gradients
from headwater.models.sites import SITES, Site, hook_name
from headwater.patching.edits import LOGITS, CellTable, Edit, Indices
from headwater.patching.plan import Group, Measured, Plan, Readout, columns_of, read_run
from headwater.patching.runners import Runner, other_run, written_into

Drawn: TypeAlias = tuple[str, int, int, int]
"""A site, a layer, the layer of the values that are written there, and which draw of them."""
AT_ONCE = 1 << 22
"""At most so many products are gathered at once."""


class AttributionRunner(Runner):
    """One forward with a graph, a backward per metric, and for each cell the sum of what it covers.

    Raises:
        InputError: a metric reads the last edited layer (a gradient needs one layer for all cells), or has no gradient,
            or the model was loaded under `torch.inference_mode()`.
    """

    name: ClassVar[str] = "gradients"
    needs_graph: ClassVar[bool] = True

    def __init__(self, plan: Plan, examples: range):
        refuse_without_gradients(plan.model)
        if own_layer := [one.name for one in plan.metrics if one.site != LOGITS and one.layer is None]:
            raise InputError(
                f"The metric {own_layer[0]!r} reads each cell's own layer; attribution needs layer= a number."
            )
        self.plan, self.group = plan, Group(plan, examples)
        group, places = self.group, self.group.places
        recorded: dict[str, Tensor] = {}

        def hold(activation: Tensor, hook: object, name: str) -> Tensor:
            # a fork: what else is computed of the same tensor (Gemma 4's later layers read the embedding) is not edited
            recorded[name] = activation.view_as(activation)
            return recorded[name]

        names = [*group.read_names, *(group.sites[site].hook_name(layer) for site, layer in places)]
        names += [_carrying(group.sites[site]).hook_name(layer) for site, layer in places]
        # Detached: the graph begins here, at the embeddings, whether or not parameters are frozen.
        begin = replace_hook(lambda activation, hook: activation.detach().requires_grad_(True))
        hooks: list[Hook] = [*group.corrupting("base"), (hook_name("embed"), begin)]
        # Returned, not only kept: the hooks of q, k, v and z see a reshaped view that nothing later is computed from.
        hooks += [(name, replace_hook(partial(hold, name=name))) for name in dict.fromkeys(names)]
        logits = plan.model.run(group.batch("base"), hooks, keep=columns_of(group.kept), grad=True)
        with torch.enable_grad():
            base = read_run(group, group.kept, recorded, logits)
        self.values, other = other_run(group)
        self.readout = Readout(group, base, other, {})
        self._products = [self._product(m, recorded) for m in range(len(plan.metrics))]

    def measure(self, cells: range) -> Measured:
        """Add to the unedited values what each cell covers."""
        measured, chosen = self.readout.unedited(cells), self.plan.cells.part(cells)
        for m, products in enumerate(self._products):
            measured.values[:, m] += sums(products, chosen, self.group.examples.start).cpu()
        return measured

    def _product(self, m: int, recorded: Mapping[str, Tensor]) -> dict[Drawn, Tensor]:
        """By place, layer of the values and draw: (value - activation) · gradient, summed over the width (not keys)."""
        metric, readout = self.plan.metrics[m], self.readout
        reading = self.plan.reading(metric, ())
        with torch.enable_grad():
            # By prompt, since each keeps positions of its own. Prompts do not mix: one sum has the gradients of all.
            measured = [readout.apply(m, reading, read[None], [i])[0] for i, read in enumerate(readout.base[reading])]
            total = torch.stack(measured).sum()
        if not total.requires_grad:
            raise InputError(
                f"The metric {metric.name!r} has no gradient; attribution needs one (a logit difference has)."
            )
        places, sites = sorted(self.group.places), self.group.sites
        ends = [recorded[_carrying(sites[site]).hook_name(layer)] for site, layer in places]
        # A site after all that a metric reads has no slope: None, taken as 0 below.
        slopes = torch.autograd.grad(total, ends, retain_graph=m + 1 < len(self.plan.metrics), allow_unused=True)
        products, finite = {}, []
        for (site, layer), slope in zip(places, slopes, strict=True):
            row = sites[site]
            current = recorded[row.hook_name(layer)].detach()
            slope = torch.zeros_like(current) if slope is None else slope
            here = [edit for edit in self.group.writes if edit.site.name == site and layer in edit.layers]
            for source, sample in sorted({(edit.source_layer_of(layer), edit.sample) for edit in here}):
                value = self._written(row.inner, layer, source, sample, row.read(current))
                product = row.first_order(current, slope, value)
                products[site, layer, source, sample] = product
                finite.append(product.flatten(1).isfinite().all(1))
        # All products in one copy: each copy waits for the device.
        seen = torch.stack([one.to(finite[0].device) for one in finite]).cpu()
        for (site, layer, _, _), examples in zip(products, seen, strict=True):
            if not bool(examples.all()):
                raise NumericsError(
                    f"The gradient of {metric.name!r} at {site} of layer {layer} is NaN or infinite in example "
                    f"{self.group.examples[int((~examples).nonzero()[0])]} ({self.plan.model.dtype}). Load the model "
                    "with dtype='float32'."
                )
        return products

    def _written(self, site: Site, layer: int, source: int, sample: int, standing: Tensor) -> Tensor:
        """Return what an edit of every token of every example would leave of what a site reads."""
        if self.values.change is None:
            return self.values.by_site[site.name, source]
        edit = Edit(site, range(layer, layer + 1), source_layer=source, sample=sample)
        with torch.no_grad():
            edits = [(edit, example) for example in range(len(self.group.examples))]
            return written_into(standing, None, edits, self.values, layer)


def _carrying(site: Site) -> Site:
    """Where a gradient is taken: at what carries an edit of the site, with respect to which it has the same slope."""
    return SITES[site.carrier.at] if site.carrier else site


def sums(products: Mapping[Drawn, Tensor], cells: CellTable, first: int) -> Float[Tensor, " cell"]:
    """Add up what each cell covers, of products whose first axis begins with the example `first`."""
    # At once for all cells that cover as many places of the same layer. A cell by itself would be a few launches; on a
    # GPU thousands of them would take longer than both runs.
    groups: dict[tuple[int, Drawn, tuple[int | None, ...]], list[tuple[Indices, Edit]]] = {}
    for number in np.unique(cells.template):
        cells_of_template, turn = np.flatnonzero(cells.template == number), 0
        # A cell adds its layers in the order in which it would alone: its last bits do not depend on the others.
        for edit in cells.templates[number].edits:
            size = tuple(None if at is None else len(at) for at in _covered(edit))
            for layer in edit.layers:
                drawn = (edit.site.name, layer, edit.source_layer_of(layer), edit.sample)
                groups.setdefault((turn, drawn, size), []).append((cells_of_template, edit))
                turn += 1
    total = torch.zeros(len(cells), dtype=torch.float64, device=next(iter(products.values())).device)
    for (_, drawn, _), edits_alike in sorted(groups.items(), key=lambda item: item[0][0]):
        product = products[drawn]
        # All keys of each query: summed once for all cells.
        if edits_alike[0][1].site.has_keys and edits_alike[0][1].keys is None:
            product = product.sum(-1).transpose(1, 2)
        numbers = [cells_of_template for cells_of_template, _ in edits_alike]
        index = np.concatenate(numbers)
        listed = [_listed([_covered(edit)[axis] for _, edit in edits_alike], numbers) for axis in range(4)]
        every = product.shape[1:3]  # positions and heads, for a pattern's keys heads and positions
        each = math.prod(every) * math.prod(at.shape[1] for at in listed[2:] if at is not None)
        most = max(1, AT_ONCE // max(1, each))
        for start in range(0, len(index), most):
            part = slice(start, start + most)
            at = [None if one is None else to_device(one[part], product.device) for one in listed]
            rows = to_device(cells.example[index[part]] - first, product.device)
            total[to_device(index[part], total.device)] += _sums_alike(product, rows, *at).to(total.device)
    return total


def _covered(edit: Edit) -> tuple[tuple[int, ...] | None, ...]:
    """Which positions, heads, keys and units an edit covers; None is all. After units there is their error."""
    return edit.positions, edit.heads, edit.keys, None if edit.units is None else (*edit.units, -1)


def _listed(covered: Sequence[tuple[int, ...] | None], numbers: Sequence[Indices]) -> Int[np.ndarray, "cell _"] | None:
    """List what cells cover on an axis, for each cell of each edit; None where they cover all of it."""
    if any(one is None for one in covered):
        return None
    return np.repeat(np.array(covered, dtype=np.int64), [len(one) for one in numbers], 0)


def _sums_alike(
    product: Float[Tensor, "example ..."],
    rows: Int[Tensor, " cell"],
    positions: Int[Tensor, "cell position"] | None,
    heads: Int[Tensor, "cell head"] | None,
    keys: Int[Tensor, "cell key"] | None,
    units: Int[Tensor, "cell unit"] | None,
) -> Float[Tensor, " cell"]:
    """Add up what cells cover that are alike in how much they cover."""
    # Each in the order in which it would be alone: over keys first, then over the rest as it lies in memory.
    every = torch.arange(max(product.shape), device=rows.device).expand(len(rows), -1)
    second = heads if heads is not None else units
    whole = positions is None and second is None
    if whole and keys is None:
        order = sorted(range(1, product.ndim), key=product.stride, reverse=True)
        return product.permute(0, *order)[rows].flatten(1).sum(-1)
    positions = every[:, : product.shape[-2 if keys is not None else 1]] if positions is None else positions
    if keys is not None:
        heads = every[:, : product.shape[1]] if heads is None else heads
        first, then = (heads[:, :, None], positions[:, None]) if whole else (heads[:, None], positions[:, :, None])
        covered = product[rows[:, None, None, None], first[..., None], then[..., None], keys[:, None, None, :]]
        return covered.sum(-1).flatten(1).sum(-1)
    if product.ndim == 2:
        return product[rows[:, None], positions].sum(-1)
    second = every[:, : product.shape[2]] if second is None else second
    return product[rows[:, None, None], positions[:, :, None], second[:, None, :]].flatten(1).sum(-1)
