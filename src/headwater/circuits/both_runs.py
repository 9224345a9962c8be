"""The two runs of one example, and by how much each sender's output differs from what it is exchanged for.

    Δ_s = s(other run) - s(base run)

The base run is the one whose receivers are given other inputs. In place of the other run there may be zeros, means, or
another prompt's run (`headwater.circuits.senders`). Before the first position at which the prompts differ all Δ of the
other run are 0, and nothing is recomputed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.circuits.graph import Graph
from headwater.circuits.senders import Exchanged, Recorded, changed_by_layer, hook_names, written
from headwater.errors import ModelError
from headwater.kernels.devices import to_device
from headwater.models.gradients import refuse_without_gradients
from headwater.models.hooked import HookedModel
from headwater.models.rotary import original_length
from headwater.models.sites import SITES, hook_name
from headwater.models.weights.loaded_weights import LoadedWeights
from headwater.patching.plan import Plan
from headwater.patching.prompts import first_difference
from headwater.patching.walk_runner import CannotStepError, WalkRunner

READ = ("q", "k", "v", "mlp_in")
"""Where the gradients at receivers are taken. A HookedTransformer has no hook at `mlp_in`."""
WRITTEN = ("z", "attn_out", "mlp_out")
"""Where the gradients at what they write are taken."""


def sloped_names(model: HookedModel) -> list[str]:
    """Name all places where gradients are taken, by hook name; the first comes before the others."""
    n_layers = model.shape.n_layers
    names = [hook_name("resid_pre", layer) for layer in range(n_layers)]
    read = READ if hook_name("mlp_in") in model.raw.hook_dict else READ[:-1]
    names += [hook_name(site, layer) for layer in range(n_layers) for site in (*read, *WRITTEN)]
    return [*names, hook_name("resid_post", n_layers - 1)]


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
        exchanged: what stands for the other run, where that is not a run of the other prompt.
        sloped: whether gradients in the base run will be taken: at `sloped_names`.

    Attributes:
        graph: the model's.
        wave: the recorded runs: the base run is row 0, the other row 1.
        start: the first position at which the prompts differ.
        stop: the position after the last that is read.
        kept: the positions that are read.

    Raises:
        ModelError: the model's blocks cannot be stepped through, or heads do not add up to what attention adds.
    """

    def __init__(
        self,
        plan: Plan,
        example: int,
        weights: LoadedWeights,
        exchanged: Exchanged | None = None,
        sloped: bool = False,
    ):
        self.exchanged = exchanged
        self.plan, self.example, self.model, self.weights = plan, example, plan.model, weights
        if self.model.looks_ahead:
            raise ModelError(f"The edges of {self.model.name} cannot be computed: its attention reads later tokens.")
        self.graph = Graph.of(plan.model.shape)
        if sloped:
            refuse_without_gradients(self.model)
        try:
            held = sloped_names(self.model) if sloped else ()
            with torch.inference_mode(False) if sloped else contextlib.nullcontext():
                self.wave = WalkRunner(plan, range(example, example + 1), hook_names(self.graph), held)
        except CannotStepError as error:
            raise ModelError(f"The edges of {plan.model.name} cannot be computed, because {error}.") from None
        self.kept = plan.positions[example]
        self.stop = self.kept[-1] + 1
        self.start = min(self._first, self.kept[0])
        self.changes: Float[Tensor, "sender position d_model"] = self._changes()

    @property
    def is_felt(self) -> bool:
        """Whether senders differ at or before the last position that is read."""
        return self._first < self.stop

    @property
    def _first(self) -> int:
        """The first position at which senders differ from what they are exchanged for."""
        if self.exchanged is not None:
            return 0
        assert self.plan.other is not None
        lengths = {len(side[self.example]) for side in (self.plan.base, self.plan.other)}
        if len({length > original_length(self.model.rotary_by_length) for length in lengths}) == 2:
            return 0  # equal tokens are turned otherwise
        return first_difference(self.plan.base[self.example], self.plan.other[self.example])

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
        at = to_device(torch.tensor(place.at), changes.device)
        alone[:, at - place.start] = self.changes[:, at - self.start]
        return alone

    def _recorded(self, site: str, layer: int, row: int) -> Tensor:
        return self.wave.recording.activations[SITES[site].hook_name(layer)][row]

    def _changes(self) -> Float[Tensor, "sender position d_model"]:
        graph, weights = self.graph, self.weights

        def recorded(row: int) -> Recorded:
            return lambda site, layer: self._recorded(site, layer, row)[self.start : self.stop]

        if self.exchanged is None:
            changes, first = self.base("resid_pre", 0).new_empty(self._size), 0
            for some in changed_by_layer(self.model, graph, weights, recorded(0), recorded(1)):
                changes[first : first + len(some)] = some
                first += len(some)
            return changes
        given = self.exchanged.of(self.example, len(self.plan.base[self.example]))
        return given[:, self.start : self.stop] - written(self.model, graph, weights, recorded(0))

    @property
    def _size(self) -> tuple[int, int, int]:
        return len(self.graph.senders), self.stop - self.start, self.model.shape.d_model
