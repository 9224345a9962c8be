"""What each sender adds to the residual stream: in a run, and in the runs that its output is exchanged for.

    other run    what it adds in the other prompt's run
    zero         nothing
    mean         the mean of what it adds over the prompts of a data set: at each position where all are of one length,
                 else over all tokens but each prompt's first
    resample     what it adds in the run of another prompt of the data set, drawn by lot

A head's output is its share of what attention adds: z W_O, and where a norm stands behind attention (Gemma), its share
of that norm's output under the run's own scale, so that the shares of the heads, with what the biases give, sum to what
attention adds. Both are checked in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.circuits.graph import Graph
from headwater.circuits.head_shares import HeadShares
from headwater.errors import InputError, ModelError
from headwater.models.hooked import HookedModel
from headwater.models.positions import Prompt
from headwater.models.sites import SITES
from headwater.models.tokens import Batch, pad_id
from headwater.models.weights.loaded_weights import LoadedWeights
from headwater.patching.replacements import Mean, Replacement, Resample, ValueName, Zero, capture

RECORDED: Sequence[str] = ("resid_pre", "z", "attn_out", "mlp_out", "resid_post")
"""The sites that are recorded of a run, at every layer."""
TOLERANCE = 1e-3
"""What the outputs of a layer's heads may leave out of what attention adds, as a part of it, in float32."""
KINDS = get_args(ValueName)
"""What senders' outputs may be exchanged for."""
Recorded: TypeAlias = Callable[[str, int], Tensor]
"""The activation of a run at a site of a layer, `position ...`."""
Left: TypeAlias = tuple[int, Tensor, float]
"""A layer, what its heads leave out as a part of what its attention adds, and how much that may be."""


def hook_names(graph: Graph) -> list[str]:
    """Name all that is recorded of a run."""
    return [SITES[site].hook_name(layer) for layer in range(graph.n_layers) for site in RECORDED]


def written(
    model: HookedModel, graph: Graph, weights: LoadedWeights, recorded: Recorded
) -> Float[Tensor, "sender position d_model"]:
    """Return what each sender adds in a run.

    Raises:
        ModelError: heads do not add up to what attention adds.
    """
    return torch.cat(list(written_by_layer(model, graph, weights, recorded)))


def written_by_layer(
    model: HookedModel, graph: Graph, weights: LoadedWeights, recorded: Recorded
) -> Iterator[Float[Tensor, "sender position d_model"]]:
    """Yield what each sender adds in a run, some senders at a time.

    Raises:
        ModelError: heads do not add up to what attention adds.
    """
    left: list[Left] = []
    yield recorded("resid_pre", 0)[None]
    for layer in range(graph.n_layers):
        yield _by_heads(HeadShares(model, layer, weights), recorded, layer, left)
        yield recorded("mlp_out", layer)[None]
    _refuse_what_is_left(model, left)


def changed_by_layer(
    model: HookedModel, graph: Graph, weights: LoadedWeights, base: Recorded, other: Recorded
) -> Iterator[Float[Tensor, "sender position d_model"]]:
    """Yield what each sender adds in another run less what it adds in the base run, some senders at a time.

    Raises:
        ModelError: heads do not add up to what attention adds.
    """
    left: list[Left] = []
    yield (other("resid_pre", 0) - base("resid_pre", 0))[None]
    for layer in range(graph.n_layers):
        shares = HeadShares(model, layer, weights)
        if shares.norm is None:  # shares are linear in z
            z, before = (base(site, layer) for site in ("z", "attn_out"))
            outputs, added = shares.of(other("z", layer) - z), other("attn_out", layer) - before
            left.append((layer, *_sizes(outputs.sum(1) - added.to(outputs), before)))
            yield outputs.movedim(1, 0).to(before)
        else:
            yield _by_heads(shares, other, layer, left) - _by_heads(shares, base, layer, left)
        yield (other("mlp_out", layer) - base("mlp_out", layer))[None]
    _refuse_what_is_left(model, left)


def _by_heads(
    shares: HeadShares, recorded: Recorded, layer: int, left: list[Left]
) -> Float[Tensor, "head position d_model"]:
    z, added = recorded("z", layer), recorded("attn_out", layer)
    outputs, bias = shares.of(z), shares.of_bias(z)
    left.append((layer, *_sizes(outputs.sum(1) + bias - added.to(outputs), added)))
    return outputs.movedim(1, 0).to(added)


def _sizes(left: Tensor, added: Tensor) -> tuple[Tensor, float]:
    """Return how large what is left out is, as a part of what attention adds, and how large it may be."""
    return left.abs().max() / added.abs().max().clamp_min(1e-9), max(TOLERANCE, 16 * torch.finfo(added.dtype).eps)


def _refuse_what_is_left(model: HookedModel, left: Sequence[Left]) -> None:
    """Refuse heads that leave something out of what attention adds: all layers are looked at in one copy.

    Raises:
        ModelError: with how much.
    """
    parts = torch.stack([part.double().to(left[0][1].device) for _, part, _ in left]).tolist() if left else []
    for part, (layer, _, allowed) in zip(parts, left, strict=True):
        if not part <= allowed:
            raise ModelError(
                f"The heads of layer {layer} of {model.name} do not add up to what its attention adds: {part:.1%} "
                "is left over. Edges from and to its heads have no meaning."
            )


def refuse_other_kinds(source: Replacement) -> None:
    """Refuse values that are made of one activation at one site, which a sender's output is not.

    Raises:
        InputError: with those that there are.
    """
    if source.inputs.kind not in KINDS:
        raise InputError(
            f"values={source.inputs.kind!r} is not defined for what a sender adds; it may be {', '.join(KINDS)}."
        )


class Exchanged:
    """What senders' outputs are exchanged for, where it is not the other prompt's run.

    Args:
        model: the model.
        source: the kind of values, with its prompts.
        weights: the model's, opened once for all pairs.
    """

    def __init__(self, model: HookedModel, source: Replacement, weights: LoadedWeights):
        self.model, self.source, self.graph = model, source, Graph.of(model.shape)
        self._weights = weights
        self._mean: Tensor | None = None

    def of(self, example: int, length: int) -> Float[Tensor, "sender position d_model"]:
        """Return what stands for each sender's output in a prompt of some length."""
        if isinstance(self.source, Zero):
            shape = self.model.shape
            size = (len(self.graph.senders), length, shape.d_model)
            return torch.zeros(size, dtype=self.model.dtype, device=self.model.device)
        if isinstance(self.source, Resample):
            return self._run(self.source.pool[self.source.donors[example]])
        assert isinstance(self.source, Mean)
        if self._mean is None:
            self._mean = self._mean_of(self.source)
        return self._mean.expand(-1, length, -1)

    def _mean_of(self, source: Mean) -> Float[Tensor, "sender position d_model"]:
        """Return the mean over the data set; one position where it is one over tokens."""
        by_position, total, count = source.mean_over == "examples", torch.zeros(()), 0
        for prompt in source.pool:
            outputs = self._run(prompt).double()
            total = total + (outputs if by_position else outputs[:, 1:].sum(1, keepdim=True))
            count += 1 if by_position else len(prompt) - 1
        return (total / count).to(self.model.dtype)

    def _run(self, prompt: Prompt) -> Float[Tensor, "sender position d_model"]:
        batch = Batch.of([list(prompt.ids)], pad_id(self.model.tokenizer))
        held, _ = capture(self.model, batch, hook_names(self.graph))
        recorded = lambda site, layer: held[SITES[site].hook_name(layer)][0]  # noqa: E731
        return written(self.model, self.graph, self._weights, recorded)
