"""Attribution patching: what a patch would do, to first order (Nanda 2023; Syed et al. 2023).

    effect ≈ Σ (value - activation) · ∂ metric / ∂ activation

1. One forward of the prompts that values come from, one of the prompts that are edited, for a batch of pairs.
2. One backward per metric gives the gradient at every site at once.
3. A cell sums the product over the layers, positions and heads it covers; a window of layers is a sum too.

It is exact where the metric is linear in the activation, and can be far off where a softmax or a norm saturates:
`sweep.agreement(exact)` says how far.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwater.errors import InputError, NumericsError
from headwater.models.gradients import refuse_without_gradients
from headwater.models.memory import in_halves
from headwater.models.sites import SITES
from headwater.patching.engine import Measured
from headwater.patching.footprint import examples_at_once
from headwater.patching.group import GRADIENTS, Group
from headwater.patching.job import Cell, Job, waves
from headwater.patching.variants import LOGITS, Replace
from headwater.runs.analysis import Run


@torch.inference_mode(False)
def attribute(job: Job, run: Run) -> Measured:
    """Approximate a patching sweep.

    Raises:
        InputError: a metric reads the last edited layer (a gradient needs one layer for all cells), or has no gradient,
            or the model was loaded under `torch.inference_mode()`.
    """
    refuse_without_gradients(job.model)
    own_layer = [metric.name for metric in job.metrics if metric.site != LOGITS and metric.layer is None]
    if own_layer:
        raise InputError(f"The metric {own_layer[0]!r} reads each cell's own layer; attribution needs layer= a number.")
    n_cells, n_metrics = len(job.cells), len(job.metrics)
    values, unedited, other = (torch.full((n_cells, n_metrics), torch.nan, dtype=torch.float64) for _ in range(3))
    most = examples_at_once(job, gradients=True)
    groups = dict.fromkeys(examples for examples, _ in waves(job))
    with run.bar("cells", "cell", n_cells) as bar, job.model.lock:

        def attribute_group(examples: range) -> None:
            group = Group(job, examples, GRADIENTS)
            products = [_products(job, group, m) for m in range(n_metrics)]
            for index, cell in enumerate(job.cells):
                if cell.example not in examples:
                    continue
                unedited[index] = group.unedited(cell)
                other[index] = group.of_other_run(cell)
                effects = [_sum(product, cell, cell.example - examples.start) for product in products]
                values[index] = unedited[index] + torch.tensor(effects, dtype=torch.float64)
                bar.update()

        for examples in groups:
            for start in range(0, len(examples), most):
                in_halves(examples[start : start + most], attribute_group)
    return Measured(values, unedited, other, torch.full((n_cells,), torch.nan, dtype=torch.float64), GRADIENTS)


def _products(job: Job, group: Group, m: int) -> dict[tuple[str, int], Tensor]:
    """By site and layer: (value - activation) · gradient of one metric, summed over the width; by key for a pattern."""
    metric = job.metrics[m]
    reading = job.reading(metric, ())
    with torch.enable_grad():
        measured = [group.apply(m, reading, values[None], [i])[0] for i, values in enumerate(group.base_run[reading])]
        total = torch.stack(measured).sum()
    if not total.requires_grad:
        raise InputError(f"The metric {metric.name!r} has no gradient; attribution needs one (a logit difference has).")
    wanted = list(group.values.by_site)
    ends = [group.held[SITES[_gradient_site(site)].hook_name(layer)] for site, layer in wanted]
    slopes = torch.autograd.grad(total, ends, retain_graph=m + 1 < len(job.metrics), allow_unused=True)
    products = {}
    for (site, layer), slope in zip(wanted, slopes, strict=True):
        activation = group.held[SITES[site].hook_name(layer)].detach()
        change = group.values.by_site[site, layer] - activation
        product = change.double() * (0.0 if slope is None else slope.double())
        products[site, layer] = product if SITES[site].has_keys else product.sum(-1)
        wrong = ~products[site, layer].flatten(1).isfinite().all(1)
        if bool(wrong.any()):
            raise NumericsError(
                f"The gradient of {metric.name!r} at {site} of layer {layer} is NaN or infinite in example "
                f"{group.examples[int(wrong.nonzero()[0])]} ({job.model.dtype}). Load the model with dtype='float32'."
            )
    return products


def _gradient_site(site: str) -> str:
    """Where a gradient is taken: at what carries an edit of the site, with respect to which it has the same slope."""
    carrier = SITES[site].carrier
    return carrier.at if carrier else site


def _sum(products: Mapping[tuple[str, int], Tensor], cell: Cell, example: int) -> float:
    """Add up what a cell covers."""
    total = 0.0
    for edit in cell.edits:
        assert isinstance(edit, Replace)
        for layer in edit.layers:
            product = products[edit.site.name, layer][example]
            if edit.site.has_keys:
                product = (product if edit.keys is None else product[..., list(edit.keys)]).sum(-1).T
            if edit.positions is not None:
                product = product[list(edit.positions)]
            if edit.heads is not None:
                product = product[:, list(edit.heads)]
            total += float(product.sum())
    return total
