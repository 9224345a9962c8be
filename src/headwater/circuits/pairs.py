"""Pairs of prompts as every analysis of edges and circuits uses them: two runs of each, and what senders add there.

    Δ_s = s(other run) - s(base run)

Pairs align token by token. The base run is the one whose receivers get other inputs: the clean run for `noise`, the
corrupted run for `denoise`. The other run can be replaced by zeros, by the means of what senders add in the runs of a
data set, or by the run of another prompt of it (`resample`). Before the first position at which the prompts differ, all
Δ of the other run are 0 and nothing is recomputed.

Each head of a layer adds a share to the residual stream, computed from the heads' outputs z:

    share_h = z_h W_O^h                                             where attention's output is added unchanged
    share_h = gain · centred(z_h W_O^h) / scale(Σ z W_O + b_O)      where a norm comes after attention (Gemma)

times the model's residual multiplier, if it has one (Granite). The scale is computed from the same run as z, so that
the shares of the heads, plus the contribution of the biases, sum to what attention adds. Every run checks this.

Senders' outputs are replaced at all positions together, at each position separately, at some positions, or by role.
What a sender adds at a position is replaced by what it adds at the same position of the other run; a role must
therefore be at the same positions in both prompts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from headwater.circuits.graph import Graph
from headwater.errors import InputError, ModelError
from headwater.kernels.devices import to_device
from headwater.models.gradients import refuse_without_gradients
from headwater.models.hooked import HookedModel
from headwater.models.model import residual_scale
from headwater.models.positions import Prompt, Where, refuse_two_meanings
from headwater.models.sites import hook_name
from headwater.models.tokens import Batch, pad_id
from headwater.models.unembedding import attention_post_norm
from headwater.models.weights import LoadedWeights
from headwater.options import checked_name
from headwater.patching.edits import LOGITS, CellTable, Indices
from headwater.patching.metrics import Metric, as_metrics
from headwater.patching.plan import Plan
from headwater.patching.prompts import (
    PromptPair,
    Prompts,
    prompt_options,
    read_pairs,
    refuse_columns_as_answers,
    side_by_side,
)
from headwater.patching.replacements import Mean, Resample, ValueName, Zero, build_replacement, capture
from headwater.patching.runners import CannotStepError, WalkRunner

OTHER_RUN = "other run"
VALUE_NAMES = get_args(ValueName)
"""Kinds of values that can replace senders' outputs."""
RECORDED = ("resid_pre", "z", "attn_out", "mlp_out", "resid_post")
"""The sites that are recorded in a run, at every layer."""
READ = ("q", "k", "v", "mlp_in")
"""Sites of the gradients at receivers. A HookedTransformer has no hook at `mlp_in`."""
WRITTEN = ("z", "attn_out", "mlp_out")
"""Sites of the gradients at the outputs of receivers."""
LEFT_OVER = 1e-3
"""Largest allowed gap between the sum of the heads' shares and what attention adds, relative to it, in float32."""
Recorded: TypeAlias = Callable[[str, int], Tensor]
"""Returns the activation of a run at a site and a layer, `position ...`."""


def hook_names(graph: Graph) -> list[str]:
    """Return the hook names of everything that is recorded in a run."""
    return [hook_name(site, layer) for layer in range(graph.n_layers) for site in RECORDED]


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


class Pairs:
    """The pairs and metrics of a call, and what replaces senders' outputs; makes the runs of one pair at a time.

    `over` and `positions` are those of `hw.edges`. With `pair_with_donors`, the other run of a pair is that of the
    prompt that `resample` drew.
    """

    def __init__(
        self,
        model: HookedModel,
        clean: Prompts | pd.DataFrame | Path,
        corrupted: Prompts | None,
        metric: Metric | Any,
        *,
        direction: str = "noise",
        values: object = OTHER_RUN,
        dataset: Prompts | None = None,
        over: str | None = None,
        positions: Where | None = None,
        seed: int = 0,
        batch_size: int | None = None,
        pair_with_donors: bool = False,
    ):
        self.seed = seed
        pair, metrics = PromptPair(*read_pairs(model, clean, corrupted), direction), as_metrics(metric)
        if elsewhere := [one.name for one in metrics if one.site != LOGITS]:
            raise InputError(
                f"The metric {elsewhere[0]!r} reads the residual stream; edges and circuits are measured at the logits."
            )
        refuse_columns_as_answers(clean, metrics)
        self.model, self.graph = model, Graph.of(model.shape)
        self.plan = Plan(model, pair, CellTable.unedited(len(pair.base)), metrics, batch_size=batch_size)
        self.source = source = build_replacement(model, values, dataset, pair, (), self.seed)
        self.values = source.inputs.kind
        if self.values not in VALUE_NAMES:
            raise InputError(
                f"values={self.values!r} is not defined for what a sender adds; it may be {', '.join(VALUE_NAMES)}."
            )
        pool = [] if source.inputs.dataset is None else [source.inputs.dataset]
        self.options: dict[str, Any] = {
            "direction": "noise" if pair.base_is_clean else "denoise",
            "values": source.described,
            **({} if source.takes_other_run else {"seed": source.inputs.seed}),
            **prompt_options(pair.clean, pair.corrupted, *pool),
            "metrics": self.plan.metric_options,
        }
        self.roles: tuple[str, ...] = tuple(positions) if isinstance(positions, Mapping) else ()
        self.over = over
        self.positions = self._positions(positions)
        if positions is not None:
            named = [[at for at in one if at is not None] for one in self.positions]
            self.options |= {"positions": named, "roles": list(self.roles)}
        if pair_with_donors and isinstance(source, Resample):
            # The run of the prompt that was drawn is used like the other prompt's run from here on.
            pair = PromptPair(pair.base, tuple(source.pool[donor] for donor in source.donors))
            self.plan = replace(self.plan, pair=pair)
            self.source = build_replacement(model, OTHER_RUN, None, pair, ())
        self.has_other_run = self.source.takes_other_run
        self.n_places, self.metrics = max(map(len, self.positions)), tuple(metric.name for metric in metrics)
        starts = [min(self.source.since(i), kept[0]) for i, kept in enumerate(self.plan.positions)]
        self.tokens: Indices = np.array([kept[-1] + 1 for kept in self.plan.positions]) - starts
        """For each pair, the number of tokens that are rerun: from the first changed one to the last read."""
        self.fingerprint: str | None = None
        """Hash of the model's weights, if known: then they are not checked again."""
        self.sloped = False
        """Whether gradients in the base runs will be taken, at `names_with_gradient`."""
        self._runs: BothRuns | None = None

    def __len__(self) -> int:
        return len(self.plan.pair.base)

    def _positions(self, where: Where | None) -> list[list[tuple[int, ...] | None]]:
        """Return by pair the positions of each place at which senders are replaced separately; None for all."""
        pair, n = self.plan.pair, len(self)
        if self.over is not None:
            checked_name("over", self.over, ("position",))
            if self.roles:
                raise InputError("over='position' and positions by role were both given: give one of them.")
        places: list[list[tuple[int, ...] | None]] = [[None]] * n
        if where is not None:
            if not isinstance(where, Mapping):
                refuse_two_meanings(where, n, of_pairs=pair.other is not None)
            places = []
            for i, spans in enumerate(pair.spans(where)):
                for role, span in spans.items() if self.roles else ():
                    if span.base != span.other:
                        assert pair.other is not None
                        raise InputError(
                            f"The role {role!r} is tokens {list(span.base)} of one prompt of pair {i} and "
                            f"{list(span.other)} of the other. What senders add is exchanged position by position: "
                            "give pairs in which roles have the same positions.\n"
                            f"{side_by_side(pair.base[i], pair.other[i])}"
                        )
                places.append([span.base for span in spans.values()])
        if self.over is None:
            return places
        return [
            [(at,) if some is None or at in some else () for at in range(kept[-1] + 1)]
            for (some,), kept in zip(places, self.plan.positions, strict=True)
        ]

    def places(self, runs: BothRuns) -> Iterator[tuple[int, Place]]:
        """Yield the places of a pair at which a change can have an effect, each with its index."""
        if runs.first >= runs.stop:
            return  # no sender can affect a position that is read
        for number, positions in enumerate(self.positions[runs.example]):
            if positions is None:
                yield number, Place(runs.start)
            elif at := tuple(position for position in positions if runs.start <= position < runs.stop):
                yield number, Place(min(*at, runs.kept[0]), at)

    def zeros(self, example: int, *size: int) -> Float[Tensor, "place *size metric"]:
        """Return a table with 0 at the places of a pair and NaN beyond, where its prompt is shorter than others."""
        table = torch.zeros(self.n_places, *size, len(self.plan.metrics), dtype=torch.float64)
        table[len(self.positions[example]) :] = torch.nan
        return table

    def runs(self, example: int) -> BothRuns:
        """Return the two runs of a pair; they are reused if it is the last pair, otherwise computed."""
        if self._runs is None or self._runs.example != example:
            # Freed before the next pair's runs are computed: both at once would take twice the memory.
            self._runs = None
            self._runs = BothRuns(self, example)
        return self._runs

    @cached_property
    def weights(self) -> LoadedWeights:
        """The model's weights."""
        return LoadedWeights(self.model, self.fingerprint)

    @cached_property
    def shares(self) -> list[HeadShares]:
        """By layer, the shares of its heads."""
        return [HeadShares(self.model, layer, self.weights) for layer in range(self.graph.n_layers)]

    def values_of(self, example: int) -> Float[Tensor, "sender position d_model"]:
        """Return what replaces each sender's output in a pair, if it is not the other prompt's run."""
        source, length = self.source, len(self.plan.pair.base[example])
        if isinstance(source, Zero):
            size = (len(self.graph.senders), length, self.model.shape.d_model)
            return torch.zeros(size, dtype=self.model.dtype, device=self.model.device)
        if isinstance(source, Resample):
            return self._sent_in(source.pool[source.donors[example]])
        return self._mean.expand(-1, length, -1)

    @cached_property
    def _mean(self) -> Float[Tensor, "sender position d_model"]:
        """Return the mean over the data set; a single position if the mean is over tokens."""
        assert isinstance(self.source, Mean)
        by_position, total, count = self.source.mean_over == "examples", torch.zeros(()), 0
        for prompt in self.source.pool:
            # float64, because a sum over many prompts stops growing in bfloat16.
            outputs = self._sent_in(prompt).double()
            total = total + (outputs if by_position else outputs[:, 1:].sum(1, keepdim=True))
            count += 1 if by_position else len(prompt) - 1
        return (total / count).to(self.model.dtype)

    def _sent_in(self, prompt: Prompt) -> Float[Tensor, "sender position d_model"]:
        """Return what each sender adds in a prompt's run."""
        batch = Batch.of([list(prompt.ids)], pad_id(self.model.tokenizer))
        activations, _ = capture(self.model, batch, hook_names(self.graph))
        return torch.cat([one.to(self.model.dtype) for one in written(self, recorded_in(activations, 0))])


class HeadShares:
    """The shares of the heads of one layer."""

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


def recorded_in(activations: Mapping[str, Tensor], row: int, positions: slice = slice(None)) -> Recorded:
    """Return the function that reads one run of a batch, at some positions."""
    return lambda site, layer: activations[hook_name(site, layer)][row, positions]


def written(
    pairs: Pairs, run: Recorded, base: Recorded | None = None
) -> Iterator[Float[Tensor, "sender position d_model"]]:
    """Yield what each sender adds in a run (minus what it adds in the base run, if given), a few senders at a time.

    What heads add is of the dtype in which it was computed, if it is not a difference of runs.
    """
    left_over = list[tuple[int, Tensor]]()

    def added(site: str, layer: int) -> Tensor:
        return run(site, layer) if base is None else run(site, layer) - base(site, layer)

    def by_heads(read: Recorded, layer: int, biased: bool = True) -> Float[Tensor, "head position d_model"]:
        shares, attended = pairs.shares[layer], read("attn_out", layer)
        outputs = shares.outputs(read("z", layer))
        heads = shares.of(outputs)
        total = heads.sum(1) + shares.of_bias(outputs) if biased else heads.sum(1)
        of_all = (run if base is None else base)("attn_out", layer)
        # Stays on the device: all layers are checked together at the end.
        left_over.append((layer, (total - attended.to(total)).abs().max() / of_all.abs().max().clamp_min(1e-9)))
        return heads.movedim(1, 0)

    yield added("resid_pre", 0)[None]
    for layer, shares in enumerate(pairs.shares):
        if base is None:
            yield by_heads(run, layer)
        elif shares.norm is None:  # shares are linear in z
            # One product of the difference with W_O instead of one per run (NOTES.md, EAP).
            yield by_heads(added, layer, biased=False).to(base("attn_out", layer))
        else:
            yield (by_heads(run, layer) - by_heads(base, layer)).to(base("attn_out", layer))
        yield added("mlp_out", layer)[None]
    allowed = max(LEFT_OVER, 16 * torch.finfo(run("attn_out", 0).dtype).eps)
    parts = torch.stack([part.double().to(left_over[0][1].device) for _, part in left_over]).tolist()
    for (layer, _), part in zip(left_over, parts, strict=True):
        if not part <= allowed:
            raise ModelError(
                f"The heads of layer {layer} of {pairs.model.name} do not add up to what its attention adds: "
                f"{part:.1%} is left over. Edges from and to its heads have no meaning."
            )


class BothRuns:
    """The two runs of a pair. Use inside `torch.no_grad()` and the model's lock.

    Raises:
        ModelError: the model's blocks cannot be stepped through, or heads do not add up to what attention adds.
    """

    def __init__(self, pairs: Pairs, example: int):
        self.pairs, self.example, self.plan = pairs, example, pairs.plan
        self.model, self.graph = pairs.model, pairs.graph
        # If attention reads later tokens, every position changes and no prefix can be kept.
        if self.model.is_bidirectional:
            raise ModelError(f"The edges of {self.model.name} cannot be computed: its attention reads later tokens.")
        if pairs.sloped:
            refuse_without_gradients(self.model)
        try:
            sloped_sites = names_with_gradient(self.model) if pairs.sloped else ()
            # A tensor created in inference mode can never be part of an autograd graph.
            with torch.inference_mode(False) if pairs.sloped else contextlib.nullcontext():
                self.wave = WalkRunner(self.plan, range(example, example + 1), hook_names(self.graph), sloped_sites)
        except CannotStepError as error:
            raise ModelError(f"The edges of {self.model.name} cannot be computed, because {error}.") from None
        # Metrics read the positions `kept`; `stop` is after them.
        self.kept = self.plan.positions[example]
        self.stop = self.kept[-1] + 1
        self.first = pairs.source.since(example)  # first position at which senders differ from their replacements
        # Metrics read recomputed rows, so these include every position read, even one before the first difference.
        self.start = min(self.first, self.kept[0])
        activations, recomputed = self.wave.recording.activations, slice(self.start, self.stop)
        self.base, self.other = recorded_in(activations, 0), recorded_in(activations, 1)
        self._recomputed = recorded_in(activations, 0, recomputed), recorded_in(activations, 1, recomputed)

    @property
    def metrics(self) -> tuple[Float[Tensor, " metric"], Float[Tensor, " metric"]]:
        """The metrics of the base run, and of the other prompt's run; NaN without one."""
        readout, reading = self.wave.readout, (LOGITS, self.graph.n_layers)
        base = readout.base_metrics[reading][0]
        return base, readout.other_metrics[reading][0] if readout.other_metrics else torch.full_like(base, torch.nan)

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
        base, other = self._recomputed
        if not self.pairs.has_other_run:
            sent = self.sent()
            return sent - torch.cat([one.to(sent) for one in written(self.pairs, base)])
        size = len(self.graph.senders), self.stop - self.start, self.model.shape.d_model
        changes, first = self.base("resid_pre", 0).new_empty(size), 0
        # Filled layer by layer: concatenating at the end would hold the largest tensor in memory twice.
        for some in written(self.pairs, other, base):
            changes[first : first + len(some)] = some
            first += len(some)
        return changes

    def sent(self) -> Float[Tensor, "sender position d_model"]:
        """Return what each sender adds in the other run, or what replaces it, at the recomputed positions."""
        if not self.pairs.has_other_run:
            return self.pairs.values_of(self.example)[:, self.start : self.stop]
        return torch.cat([*written(self.pairs, self._recomputed[1])])
