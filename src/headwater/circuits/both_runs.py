"""The two runs of one example, and by how much each sender's output differs between them.

    Δ_s = s(other run) - s(base run)

The base run is the one whose receivers are given other inputs. A head's output is its share of what attention adds:
z W_O, and where a norm stands behind attention (Gemma), its share of that norm's output under the run's own scale, so
that the shares of the heads, with what the biases give, sum to what attention adds. Both are checked at every example.
Before the first position at which the prompts differ all Δ are 0, and nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.circuits.graph import Graph
from headwater.circuits.head_shares import HeadShares
from headwater.errors import ModelError
from headwater.models.sites import SITES
from headwater.models.weights.loaded_weights import LoadedWeights
from headwater.patching.plan import Plan
from headwater.patching.prompts import first_difference
from headwater.patching.runners import CannotStepError, Wave

TOLERANCE = 1e-3
"""What the outputs of a layer's heads may leave out of what attention adds, as a part of it, in float32."""


@dataclass(frozen=True)
class Place:
    """Where the senders' outputs are exchanged: everywhere, or at some positions."""

    start: int
    """From this position on the runs are recomputed."""
    at: tuple[int, ...] | None = None
    """The positions; None for all."""


class BothRuns:
    """An example's two runs. Use inside `torch.no_grad()` and the model's lock.

    Args:
        plan: pairs of prompts and metrics.
        example: which pair.
        weights: the model's, opened once for all pairs.

    Attributes:
        graph: the model's.
        wave: the recorded runs: the base run is row 0, the other row 1.
        start: the first position at which the prompts differ.
        stop: the position after the last that is read.
        kept: the positions that are read.

    Raises:
        ModelError: the model's blocks cannot be stepped through, or heads do not add up to what attention adds.
    """

    def __init__(self, plan: Plan, example: int, weights: LoadedWeights):
        self.plan, self.example, self.model, self.weights = plan, example, plan.model, weights
        if self.model.looks_ahead:
            raise ModelError(f"The edges of {self.model.name} cannot be computed: its attention reads later tokens.")
        self.graph = Graph.of(plan.model.shape)
        sites = [(site, layer) for layer in range(self.graph.n_layers) for site in RECORDED]
        try:
            self.wave = Wave(plan, range(example, example + 1), [SITES[site].hook_name(layer) for site, layer in sites])
        except CannotStepError as error:
            raise ModelError(f"The edges of {plan.model.name} cannot be computed, because {error}.") from None
        assert plan.other is not None
        self.kept = plan.positions[example]
        self.stop = self.kept[-1] + 1
        self.start = min(first_difference(plan.base[example], plan.other[example]), self.kept[0])
        self.changes: Float[Tensor, "sender position d_model"] = self._changes()

    @property
    def is_felt(self) -> bool:
        """Whether the prompts differ at or before the last position that is read."""
        assert self.plan.other is not None
        return first_difference(self.plan.base[self.example], self.plan.other[self.example]) < self.stop

    def base(self, site: str, layer: int) -> Tensor:
        """Return an activation of the base run, `position ...`."""
        return self._recorded(site, layer, 0)

    def place(self, positions: tuple[int, ...] | None = None) -> Place | None:
        """Return a place where outputs are exchanged at some positions (None: at all); None where nothing feels it."""
        if not self.is_felt:
            return None
        if positions is None:
            return Place(self.start)
        at = tuple(position for position in positions if self.start <= position < self.stop)
        return Place(min(*at, self.kept[0]), at) if at else None

    def other(self, site: str, layer: int) -> Tensor:
        """Return an activation of the other run, `position ...`."""
        return self._recorded(site, layer, 1)

    def changes_at(self, place: Place) -> Float[Tensor, "sender position d_model"]:
        """Return Δ from the first recomputed position of a place on; 0 but at its positions, where it names some."""
        changes = self.changes[:, place.start - self.start :]
        if place.at is None:
            return changes
        alone = torch.zeros_like(changes)
        at = torch.tensor(place.at, device=changes.device)
        alone[:, at - place.start] = self.changes[:, at - self.start]
        return alone

    def _recorded(self, site: str, layer: int, row: int) -> Tensor:
        return self.wave.recording.activations[SITES[site].hook_name(layer)][row]

    def _changes(self) -> Float[Tensor, "sender position d_model"]:
        def change(site: str, layer: int) -> Tensor:
            base, other = (self._recorded(site, layer, row)[self.start : self.stop] for row in (0, 1))
            return other - base

        parts = [change("resid_pre", 0)[None]]
        for layer in range(self.graph.n_layers):
            base, other = (self._head_outputs(layer, row) for row in (0, 1))
            parts += [other - base, change("mlp_out", layer)[None]]
        return torch.cat(parts)

    def _head_outputs(self, layer: int, row: int) -> Float[Tensor, "head position d_model"]:
        """What each head adds to the residual stream, from the first position that differs on."""
        z = self._recorded("z", layer, row)[self.start : self.stop]
        added = self._recorded("attn_out", layer, row)[self.start : self.stop]
        shares = HeadShares(self.model, layer, self.weights)
        outputs, bias = shares.of(z), shares.of_bias(z)
        left = float((outputs.sum(1) + bias - added.to(outputs)).abs().max() / added.abs().max().clamp_min(1e-9))
        if not left <= max(TOLERANCE, 16 * torch.finfo(added.dtype).eps):
            raise ModelError(
                f"The heads of layer {layer} of {self.model.name} do not add up to what its attention adds: {left:.1%} "
                "is left over. Edges from and to its heads have no meaning."
            )
        return outputs.movedim(1, 0).to(added)


RECORDED: Sequence[str] = ("resid_pre", "z", "attn_out", "mlp_out", "resid_post")
"""The sites that are recorded of both runs, at every layer."""
