"""Attribution patching: the cells of a sweep to first order, from gradients (Nanda 2023; Syed et al. 2023).

    effect ≈ Σ (value - activation) · ∂ metric / ∂ activation

One forward of the prompts that values come from and one of the prompts that are edited, one backward per metric for the
gradient at every site at once, and a cell sums the product over the layers, positions and heads that it covers. Exact
where the metric is linear in the activation, it can be far off where a softmax or a norm saturates:
`sweep.agreement(exact)` says how far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwater.errors import InputError, NumericsError
from headwater.kernels.devices import to_device
from headwater.models.edits import Hook, replace_hook
from headwater.models.gradients import refuse_without_gradients
from headwater.models.sites import SITES, Site, hook_name
from headwater.patching.edits import LOGITS, CellTable, Edit
from headwater.patching.plan import Group, Plan, columns_of
from headwater.patching.readout import Measured, Readout, Reads, read_run
from headwater.patching.whole_runs import Runner, other_run, state_names, values_written, written_into

Drawn: TypeAlias = tuple[str, int, int, int]
"""A site, a layer, the layer of the values that are written there, and which draw of them."""


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
        own_layer = [metric.name for metric in plan.metrics if metric.site != LOGITS and metric.layer is None]
        if own_layer:
            raise InputError(
                f"The metric {own_layer[0]!r} reads each cell's own layer; attribution needs layer= a number."
            )
        self.plan, self.group = plan, Group(plan, examples)
        held, base = self._run_with_graph()
        others, other = other_run(self.group)
        self.values = values_written(self.group, others)
        self.readout = Readout(self.group, base, other, {})
        self._products = [self._product(m, held) for m in range(len(plan.metrics))]

    def measure(self, cells: range) -> Measured:
        """Add to the unedited values what each cell covers."""
        found, chosen = self.readout.unedited(cells), self.plan.cells.part(cells)
        for m, products in enumerate(self._products):
            found.values[:, m] += sums(products, chosen, self.group.examples.start).cpu()
        return found

    def _run_with_graph(self) -> tuple[dict[str, Tensor], Reads]:
        """Run the prompts that are edited, with gradients from the embeddings on; return what they are wanted at."""
        held: dict[str, Tensor] = {}

        def hold(activation: Tensor, hook: object, name: str) -> Tensor:
            # a fork: what else is computed of the same tensor (Gemma 4's later layers read the embedding) is not edited
            held[name] = activation.view_as(activation)
            return held[name]

        group, places = self.group, self.group.places
        names = [*state_names(group), *(group.sites[site].hook_name(layer) for site, layer in places)]
        names += [_carrying(group.sites[site]).hook_name(layer) for site, layer in places]
        begin = replace_hook(lambda activation, hook: activation.detach().requires_grad_(True))
        hooks: list[Hook] = [*group.corrupting("base"), (hook_name("embed"), begin)]
        hooks += [(name, replace_hook(partial(hold, name=name))) for name in dict.fromkeys(names)]
        logits = self.plan.model.run(group.batch("base"), hooks, keep=columns_of(group.kept), grad=True)
        with torch.enable_grad():
            return held, read_run(group, group.kept, held, logits)

    def _product(self, m: int, held: Mapping[str, Tensor]) -> dict[Drawn, Tensor]:
        """By place, layer of the values and draw: (value - activation) · gradient of one metric.

        Summed over the width; by key for a pattern.
        """
        metric, readout = self.plan.metrics[m], self.readout
        reading = self.plan.reading(metric, ())
        with torch.enable_grad():
            measured = [readout.apply(m, reading, read[None], [i])[0] for i, read in enumerate(readout.base[reading])]
            total = torch.stack(measured).sum()
        if not total.requires_grad:
            raise InputError(
                f"The metric {metric.name!r} has no gradient; attribution needs one (a logit difference has)."
            )
        places = sorted(self.group.places)
        sites = self.group.sites
        ends = [held[_carrying(sites[site]).hook_name(layer)] for site, layer in places]
        slopes = torch.autograd.grad(total, ends, retain_graph=m + 1 < len(self.plan.metrics), allow_unused=True)
        products, finite = {}, []
        for (site, layer), slope in zip(places, slopes, strict=True):
            standing = held[sites[site].hook_name(layer)].detach()
            slope = torch.zeros_like(standing) if slope is None else slope
            for source, sample in sorted(self.group.drawn(site, layer)):
                own = sites[site]
                value = self._written(own.inner, layer, source, sample, own.read(standing))
                product = sites[site].first_order(standing, slope, value)
                products[site, layer, source, sample] = product
                finite.append(product.flatten(1).isfinite().all(1))
        self._refuse_not_finite(metric.name, list(products), finite)
        return products

    def _refuse_not_finite(self, metric: str, drawn: Sequence[Drawn], finite: Sequence[Bool[Tensor, " row"]]) -> None:
        """Look at all products in one copy.

        Raises:
            NumericsError: with the first place and example that is not finite.
        """
        seen = torch.stack([one.to(finite[0].device) for one in finite]).cpu()
        for (site, layer, _, _), examples in zip(drawn, seen, strict=True):
            if not bool(examples.all()):
                raise NumericsError(
                    f"The gradient of {metric!r} at {site} of layer {layer} is NaN or infinite in example "
                    f"{self.group.examples[int((~examples).nonzero()[0])]} ({self.plan.model.dtype}). Load the model "
                    "with dtype='float32'."
                )

    def _written(self, site: Site, layer: int, source: int, sample: int, standing: Tensor) -> Tensor:
        """Return what an edit of every token of every example would leave of what a site reads."""
        values = self.values
        if values.change is None:
            return values.by_site[site.name, source]
        edit = Edit(site, range(layer, layer + 1), source_layer=source, sample=sample)
        with torch.no_grad():
            edits = [(edit, example) for example in range(len(self.group.examples))]
            return written_into(standing, None, edits, values, layer)


def _carrying(site: Site) -> Site:
    """Where a gradient is taken: at what carries an edit of the site, with respect to which it has the same slope."""
    return SITES[site.carrier.at] if site.carrier else site


def sums(products: Mapping[Drawn, Tensor], cells: CellTable, first: int) -> Float[Tensor, " cell"]:
    """Add up what each cell covers, for all cells of one template at once.

    Args:
        products: see `AttributionRunner`; by example, on the first axis.
        cells: of these examples.
        first: the number of the first example.
    """
    device = next(iter(products.values())).device
    total = torch.zeros(len(cells), dtype=torch.float64, device=device)
    order = np.argsort(cells.template, kind="stable")
    numbers, counts = np.unique(cells.template, return_counts=True)
    parts = to_device(np.stack([order, cells.example[order] - first]), device).split(counts.tolist(), 1)
    for number, (among, examples) in zip(numbers, parts, strict=True):
        for edit in cells.templates[number].edits:
            for layer in edit.layers:
                product = products[edit.site.name, layer, edit.source_of(layer), edit.sample]
                total[among] += _sum_over(product, edit)[examples.to(product.device)].to(device)
    return total


def _sum_over(product: Float[Tensor, "example ..."], edit: Edit) -> Float[Tensor, " example"]:
    """Add up what an edit covers: over keys first where there are any, then over the rest as it lies in memory."""
    if edit.site.has_keys:  # example head position key
        product = product if edit.keys is None else product[..., list(edit.keys)]
        product = product.sum(-1).transpose(1, 2)
    if edit.positions is not None:
        product = product[:, list(edit.positions)]
    if edit.heads is not None:
        product = product[:, :, list(edit.heads)]
    if edit.units is not None:  # after the units there is the error of the dictionary
        product = product[:, :, [*edit.units, -1]]
    return product.flatten(1).sum(-1)
