"""The two runs of one example, and the difference between each sender's output and its replacement.

    Δ_s = s(other run) - s(base run)

In the base run, receivers get changed inputs. The other run can be replaced by zeros, means, or another prompt's run.
Before the first position at which the prompts differ, all Δ of the other run are 0 and nothing is recomputed.

Each head of a layer adds a share to the residual stream, computed from the heads' outputs z:

    share_h = z_h W_O^h                                             where attention's output is added unchanged
    share_h = gain · centred(z_h W_O^h) / scale(Σ z W_O + b_O)      where a norm comes after attention (Gemma)

times the model's residual multiplier, if it has one (Granite). The scale is computed from the same run as z, so that
the shares of the heads, plus the contribution of the biases, sum to what attention adds.

A mean is over what a sender adds in the runs of a data set, as in `headwater.patching.replacements`; `resample` is what
it adds in the run of another prompt of the data set.

Every run checks that the shares sum to what attention adds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.circuits.graph import Graph
from headwater.errors import InputError, ModelError
from headwater.kernels.devices import to_device
from headwater.models.gradients import refuse_without_gradients
from headwater.models.hooked import HookedModel
from headwater.models.model import residual_scale
from headwater.models.positions import Prompt
from headwater.models.sites import SITES, hook_name
from headwater.models.tokens import Batch, pad_id
from headwater.models.unembedding import attention_post_norm
from headwater.models.weights import LoadedWeights
from headwater.patching.plan import Plan
from headwater.patching.prompts import first_difference
from headwater.patching.replacements import Mean, Replacement, Resample, ValueName, Zero, capture
from headwater.patching.runners import CannotStepError, WalkRunner


class HeadShares:
    """The shares of the heads of one layer; the model's weights are loaded once for all layers."""

    def __init__(self, model: HookedModel, layer: int, weights: LoadedWeights):
        factors = weights.layer(layer)
        self.weight, bias = factors.W_O, factors.b_O
        self.scale = residual_scale(model)
        self.bias = self.scale * bias if bias is not None else torch.zeros_like(self.weight[0, 0])
        self.norm = attention_post_norm(model, layer)

    def outputs(self, z: Float[Tensor, "*row head d_head"]) -> Float[Tensor, "*row head d_model"]:
        """Return z W_O of each head: what it adds if no norm follows attention."""
        return self.scale * torch.einsum("...hk,hkd->...hd", z.to(self.weight), self.weight)

    def of(self, outputs: Float[Tensor, "*row head d_model"]) -> Float[Tensor, "*row head d_model"]:
        """Return what each head adds, computed from the outputs of all heads."""
        if self.norm is None:
            return outputs
        # All heads use the scale of this run's sum: shares with separate scales would not add up.
        return self.norm.share((outputs.sum(-2) + self.bias)[..., None, :], outputs)

    def of_bias(self, outputs: Float[Tensor, "*row head d_model"]) -> Float[Tensor, "*#row d_model"]:
        """Return what the biases add, computed from the outputs of all heads."""
        if self.norm is None:
            return self.bias
        written = outputs.sum(-2) + self.bias
        added = self.norm.share(written, self.bias.expand_as(written))
        return added if self.norm.bias is None else added + self.norm.bias


RECORDED: Sequence[str] = ("resid_pre", "z", "attn_out", "mlp_out", "resid_post")
"""The sites that are recorded in a run, at every layer."""
LEFT_OVER = 1e-3
"""Largest allowed gap between the sum of the heads' shares and what attention adds, relative to it, in float32."""
VALUE_NAMES = get_args(ValueName)
"""Kinds of values that can replace senders' outputs."""
Recorded: TypeAlias = Callable[[str, int], Tensor]
"""Maps a site and a layer to the activation in a run, `position ...`."""
Left: TypeAlias = tuple[int, Tensor, float]
"""A layer, the gap between its heads' shares and what its attention adds (relative to it), and the largest allowed gap.
"""


def hook_names(graph: Graph) -> list[str]:
    """Return the hook names of everything that is recorded in a run."""
    return [SITES[site].hook_name(layer) for layer in range(graph.n_layers) for site in RECORDED]


def written(
    model: HookedModel, graph: Graph, weights: LoadedWeights, run: Recorded, base: Recorded | None = None
) -> Iterator[Float[Tensor, "sender position d_model"]]:
    """Yield what each sender adds in a run (minus what it adds in the base run, if given), a few senders at a time.

    What heads add is of the dtype in which it was computed, if it is not a difference of runs.
    """
    remainders = list[Left]()

    def added(site: str, layer: int) -> Tensor:
        return run(site, layer) if base is None else run(site, layer) - base(site, layer)

    yield added("resid_pre", 0)[None]
    for layer in range(graph.n_layers):
        shares = HeadShares(model, layer, weights)
        if base is None:
            yield _by_heads(shares, run, layer, remainders)
        elif shares.norm is None:  # shares are linear in z
            before = base("attn_out", layer)
            # One product of the difference with W_O instead of one per run (NOTES.md, EAP).
            outputs = shares.outputs(added("z", layer))
            remainders.append((layer, *_sizes(outputs.sum(1) - added("attn_out", layer).to(outputs), before)))
            yield outputs.movedim(1, 0).to(before)
        else:
            before = base("attn_out", layer)
            yield (_by_heads(shares, run, layer, remainders) - _by_heads(shares, base, layer, remainders)).to(before)
        yield added("mlp_out", layer)[None]
    # One copy to the host checks all layers.
    parts = torch.stack([part.double().to(remainders[0][1].device) for _, part, _ in remainders]).tolist()
    for part, (layer, _, allowed) in zip(parts, remainders, strict=True):
        if not part <= allowed:
            raise ModelError(
                f"The heads of layer {layer} of {model.name} do not add up to what its attention adds: {part:.1%} "
                "is left over. Edges from and to its heads have no meaning."
            )


def _by_heads(
    shares: HeadShares, recorded: Recorded, layer: int, remainders: list[Left]
) -> Float[Tensor, "head position d_model"]:
    outputs, added = shares.outputs(recorded("z", layer)), recorded("attn_out", layer)
    by_head = shares.of(outputs)
    remainders.append((layer, *_sizes(by_head.sum(1) + shares.of_bias(outputs) - added.to(outputs), added)))
    return by_head.movedim(1, 0)


def _sizes(left: Tensor, added: Tensor) -> tuple[Tensor, float]:
    """Return the size of the gap, relative to what attention adds, and the largest allowed size."""
    # Stays on the device: all layers are checked together at the end.
    return left.abs().max() / added.abs().max().clamp_min(1e-9), max(LEFT_OVER, 16 * torch.finfo(added.dtype).eps)


def refuse_other_kinds(source: Replacement) -> None:
    """Refuse values that are defined only for an activation at one site, because a sender's output is not one."""
    if source.inputs.kind not in VALUE_NAMES:
        raise InputError(
            f"values={source.inputs.kind!r} is not defined for what a sender adds; it may be {', '.join(VALUE_NAMES)}."
        )


class Exchanged:
    """The replacements of senders' outputs when they come from a kind of values and not from the other prompt's run."""

    def __init__(self, model: HookedModel, graph: Graph, source: Replacement, weights: LoadedWeights):
        self.model, self.source, self.graph, self._weights = model, source, graph, weights

    def of(self, example: int, length: int) -> Float[Tensor, "sender position d_model"]:
        """Return the replacement of each sender's output in a prompt of the given length."""
        if isinstance(self.source, Zero):
            size = (len(self.graph.senders), length, self.model.shape.d_model)
            return torch.zeros(size, dtype=self.model.dtype, device=self.model.device)
        if isinstance(self.source, Resample):
            return self._run(self.source.pool[self.source.donors[example]])
        return self._mean.expand(-1, length, -1)

    @cached_property
    def _mean(self) -> Float[Tensor, "sender position d_model"]:
        """Return the mean over the data set; a single position if the mean is over tokens."""
        assert isinstance(self.source, Mean)
        by_position, total, count = self.source.mean_over == "examples", torch.zeros(()), 0
        for prompt in self.source.pool:
            outputs = self._run(prompt).double()
            # float64, because a sum over many prompts stops growing in bfloat16.
            total = total + (outputs if by_position else outputs[:, 1:].sum(1, keepdim=True))
            count += 1 if by_position else len(prompt) - 1
        return (total / count).to(self.model.dtype)

    def _run(self, prompt: Prompt) -> Float[Tensor, "sender position d_model"]:
        batch = Batch.of([list(prompt.ids)], pad_id(self.model.tokenizer))
        activations, _ = capture(self.model, batch, hook_names(self.graph))
        recorded = lambda site, layer: activations[SITES[site].hook_name(layer)][0]  # noqa: E731
        return torch.cat([one.to(self.model.dtype) for one in written(self.model, self.graph, self._weights, recorded)])


READ = ("q", "k", "v", "mlp_in")
"""Sites of the gradients at receivers. A HookedTransformer has no hook at `mlp_in`."""
WRITTEN = ("z", "attn_out", "mlp_out")
"""Sites of the gradients at the outputs of receivers."""


def names_with_gradient(model: HookedModel) -> list[str]:
    """Return the hook names of all sites where gradients are taken; the first comes before the others in the model."""
    n_layers = model.shape.n_layers
    names = [hook_name("resid_pre", layer) for layer in range(n_layers)]
    read = READ if hook_name("mlp_in") in model.raw.hook_dict else READ[:-1]
    names += [hook_name(site, layer) for layer in range(n_layers) for site in (*read, *WRITTEN)]
    return [*names, hook_name("resid_post", n_layers - 1)]


@dataclass(frozen=True)
class Place:
    """Where the senders' outputs are replaced: everywhere, or at some positions."""

    start: int
    """The runs are recomputed from this position on."""
    at: tuple[int, ...] | None = None
    """The positions; None for all positions."""


class BothRuns:
    """An example's two runs. Use inside `torch.no_grad()` and the model's lock.

    `exchanged` replaces the run of the other prompt, if given; `sloped` means that gradients in the base run will be
    taken, at `names_with_gradient`.

    Raises:
        ModelError: the model's blocks cannot be stepped through, or heads do not add up to what attention adds.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        example: int,
        weights: LoadedWeights,
        exchanged: Exchanged | None = None,
        sloped: bool = False,
    ):
        self.exchanged, self.graph = exchanged, graph
        self.plan, self.example, self.model, self.weights = plan, example, plan.model, weights
        # If attention reads later tokens, every position changes and no prefix can be kept.
        if self.model.is_bidirectional:
            raise ModelError(f"The edges of {self.model.name} cannot be computed: its attention reads later tokens.")
        if sloped:
            refuse_without_gradients(self.model)
        try:
            sloped_sites = names_with_gradient(self.model) if sloped else ()
            # A tensor created in inference mode can never be part of an autograd graph.
            with torch.inference_mode(False) if sloped else contextlib.nullcontext():
                self.wave = WalkRunner(plan, range(example, example + 1), hook_names(self.graph), sloped_sites)
        except CannotStepError as error:
            raise ModelError(f"The edges of {plan.model.name} cannot be computed, because {error}.") from None
        # The base run is row 0 of `wave`, the other run row 1. Metrics read the positions `kept`; `stop` is after them.
        self.kept = plan.positions[example]
        self.stop = self.kept[-1] + 1
        self.first = 0  # first position at which senders differ from their replacements
        if exchanged is None:
            assert plan.pair.other is not None
            self.first = first_difference(plan.pair.base[example], plan.pair.other[example])
        # Metrics read recomputed rows, so these include every position read, even one before the first difference.
        self.start = min(self.first, self.kept[0])

    def base(self, site: str, layer: int) -> Tensor:
        """Return an activation of the base run, shape `position ...`."""
        return self.wave.recording.activations[SITES[site].hook_name(layer)][0]

    def other(self, site: str, layer: int) -> Tensor:
        """Return an activation of the other run, shape `position ...`."""
        return self.wave.recording.activations[SITES[site].hook_name(layer)][1]

    def changes_at(self, place: Place) -> Float[Tensor, "sender position d_model"]:
        """Return Δ from the first recomputed position of a place on; 0 outside its positions, if it lists any."""
        changes = self.changes[:, place.start - self.start :]
        if place.at is None:
            return changes
        alone, at = torch.zeros_like(changes), to_device(torch.tensor(place.at) - place.start, changes.device)
        alone[:, at] = changes[:, at]
        return alone

    @cached_property
    def changes(self) -> Float[Tensor, "sender position d_model"]:
        """Δ of each sender at the recomputed positions."""
        base, other = self._at_recomputed(self.base), self._at_recomputed(self.other)
        if self.exchanged is not None:
            sent = self.sent()
            return sent - torch.cat([one.to(sent) for one in written(self.model, self.graph, self.weights, base)])
        size = len(self.graph.senders), self.stop - self.start, self.model.shape.d_model
        changes, first = self.base("resid_pre", 0).new_empty(size), 0
        # Filled layer by layer: concatenating at the end would hold the largest tensor in memory twice.
        for some in written(self.model, self.graph, self.weights, other, base):
            changes[first : first + len(some)] = some
            first += len(some)
        return changes

    def sent(self) -> Float[Tensor, "sender position d_model"]:
        """Return what each sender adds in the other run, or what replaces it, at the recomputed positions."""
        if self.exchanged is not None:
            length = len(self.plan.pair.base[self.example])
            return self.exchanged.of(self.example, length)[:, self.start : self.stop]
        return torch.cat([*written(self.model, self.graph, self.weights, self._at_recomputed(self.other))])

    def _at_recomputed(self, run: Recorded) -> Recorded:
        return lambda site, layer: run(site, layer)[self.start : self.stop]
