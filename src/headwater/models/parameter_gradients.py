"""How large the gradient of a text's loss is at each parameter of a model.

1. A run of one text with gradients at every parameter; the loss is the mean negative log-likelihood of some tokens.
2. One step back. The gradient of a parameter is reduced to its norm as soon as it is complete, and dropped: those of
   all parameters at once would take as much memory as the model.
3. TransformerLens computes with parts of fused matrices (queries, keys and values; gate and input). The norm of the
   matrix follows from the norms of its parts, so that parameters are those of the checkpoint.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwater.errors import ModelError, NumericsError
from headwater.kernels.devices import to_device
from headwater.models.gradients import refuse_without_gradients

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel

FUSED = {"qkv": ("q", "k", "v"), "gate_up_proj": ("gate", "in")}
"""What fused matrices are called, and their parts."""
WRAPPED = "._original_component"


def parameter_gradient_norms(
    model: HookedModel, ids: Sequence[int], scored: Sequence[int], order: float = math.inf
) -> dict[str, float]:
    """Return the norm of the gradient of a text's mean negative log-likelihood at every parameter that it reaches.

    Args:
        model: the model; it is left as it was.
        ids: the tokens of the text.
        scored: the places in `ids` whose tokens count; at least one, and not the first.
        order: of the norm: 1, 2 or infinity (the largest entry).
    """
    refuse_without_gradients(model)
    parameters = {name.replace(WRAPPED, ""): one for name, one in model.raw.named_parameters()}
    assert len(parameters) == len(list(model.raw.parameters())), "two parameters have one name"
    norms: dict[str, float] = {}
    with model.lock, _collected(parameters, norms, order):
        logits = model.run([list(ids)], grad=True)[0]
        places = to_device(torch.tensor(list(scored)), logits.device)
        target = to_device(torch.tensor(list(ids)), logits.device)[places]
        log_probs = logits[places - 1].float().log_softmax(-1)
        (-log_probs.gather(-1, target[:, None]).mean()).backward()  # type: ignore[no-untyped-call]
    if wrong := next((name for name, norm in norms.items() if not math.isfinite(norm)), None):
        raise NumericsError(
            f"The gradient at {wrong} is NaN or infinite in {model.name} ({model.dtype}). Load the model with "
            "dtype='float32'."
        )
    return _joined(parameters, norms, order)


@contextlib.contextmanager
def _collected(parameters: dict[str, torch.nn.Parameter], norms: dict[str, float], order: float) -> Iterator[None]:
    """Write the norm of every gradient down as it comes, and leave the parameters as they were."""

    def reduce(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        norms[name] = float(torch.linalg.vector_norm(parameter.grad, order, dtype=torch.float32))
        parameter.grad = None

    before = {name: (weight.requires_grad, weight.grad) for name, weight in parameters.items()}
    hooks = []
    try:
        for name, weight in parameters.items():
            weight.requires_grad_(True).grad = None
            hooks.append(weight.register_post_accumulate_grad_hook(partial(reduce, name)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, weight in parameters.items():
            weight.requires_grad_(before[name][0]).grad = before[name][1]


def _joined(parameters: dict[str, torch.nn.Parameter], norms: dict[str, float], order: float) -> dict[str, float]:
    """Give fused matrices the norm of their parts together."""
    joined = dict(norms)
    for name, whole in parameters.items():
        module, _, kind = name.rpartition(".")
        above, _, fused = module.rpartition(".")
        if name in norms or fused not in FUSED:
            continue
        parts = [f"{above}.{part}.{kind}" for part in FUSED[fused]]
        if not all(part in norms for part in parts) or sum(parameters[p].numel() for p in parts) != whole.numel():
            raise ModelError(f"{name} has no gradient, and its parts, {', '.join(parts)}, are not all of it.")
        part_norms = torch.tensor([joined.pop(part) for part in parts], dtype=torch.float64)
        joined[name] = float(torch.linalg.vector_norm(part_norms, order))
    return joined
