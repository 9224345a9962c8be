"""The exact effect of exchanging what some senders tell some receivers, directly or through the MLPs between them.

    effect(S → R) = metric(base run in which every r in R gives what it gives of x_r + δ_r) - metric(base run)

δ_r is what exchanging the senders S changes in front of r while all other heads give what they gave
(`headwater.circuits.exact`). What the receivers make of x_r + δ_r is computed first, once for each set of senders;
then each path is a row that joins at its first receiver's layer, and is changed again wherever a receiver of it lies.
What an earlier receiver changes does not reach a later receiver itself, which gives what was computed first, as with
the hooks of Wang et al. 2022. The logits read everything and are a receiver by themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwater.circuits.both_runs import BothRuns, Place
from headwater.circuits.exact import EdgeRows, NotFiniteRowError, Receivers, ResidualChange
from headwater.circuits.graph import KINDS, RECEIVERS, Graph, Indices
from headwater.kernels.devices import to_device
from headwater.models.edits import replace_hook
from headwater.models.memory import in_halves
from headwater.models.sites import SITES

MLP, LOGITS = RECEIVERS.index("mlp"), RECEIVERS.index("logits")


def has_path(graph: Graph, senders: Indices, receivers: Indices) -> bool:
    """Return whether a sender of the first comes before a receiver of the second."""
    return bool(senders.min() < graph.reach[receivers].max())


def first_layer(graph: Graph, receivers: Indices) -> int:
    """Return the layer of the first of some receivers; `n_layers` for the logits."""
    layers = graph.receivers.layer[receivers]
    return int(np.where(layers < 0, graph.n_layers, layers).min())


@dataclass(frozen=True)
class Made:
    """What the receivers of a layer make of their changed inputs, by set of senders."""

    heads: dict[str, Float[Tensor, "set position head d_head"]]
    mlp: Float[Tensor, "set position d_model"] | None


class Paths:
    """Exact effects of paths of one example, at one place.

    Args:
        runs: the example's two runs.
        place: where senders are exchanged.
        through: see `headwater.circuits.exact`.
        tile_tokens: tokens given to a sublayer at once; default: as many as suit the device.
    """

    def __init__(self, runs: BothRuns, place: Place, through: str, tile_tokens: int | None = None):
        self.runs, self.graph, self.through = runs, runs.graph, through
        self.rows = EdgeRows(runs, place.start, tile_tokens)
        self.changes = runs.changes_at(place)
        self.changed: Bool[np.ndarray, " sender"] = self.changes.flatten(1).any(1).cpu().numpy()

    def effects(
        self, senders: Sequence[Indices], receivers: Sequence[Indices]
    ) -> Float[Tensor, "sender receiver metric"]:
        """Return the effect of each set of senders by way of each set of receivers; NaN where no path leads."""
        shape = len(senders), len(receivers), len(self.runs.plan.metrics)
        effects = torch.full(shape, torch.nan, dtype=torch.float64)
        with self.rows.blocks.fused():
            for first in range(0, len(senders), self.rows.at_once):
                some = range(first, min(first + self.rows.at_once, len(senders)))
                carried = ResidualChange(self.rows, self.changes, [senders[s] for s in some], self.through)
                # Once for all sets of receivers: sets share layers, and often receivers.
                by_layer = self._made(carried, receivers)
                for r, targets in enumerate(receivers):
                    reached = [s for s in some if has_path(self.graph, senders[s], targets)]
                    # A path from senders that are the same in both runs changes nothing, and needs no run.
                    effects[reached, r] = 0.0
                    changing = [s for s in reached if self._is_felt(senders[s], targets)]

                    # As defaults: a closure would see the last values of the loop.
                    def measure(cells: Sequence[int], r: int = r, first: int = first, by_layer: Any = by_layer) -> None:
                        number = [s - first for s in cells]
                        try:
                            last = self._last(number, receivers[r], by_layer)
                            effects[cells, r] = self.rows.measure(last) - self.rows.unedited
                        except NotFiniteRowError as error:
                            path = self._named(senders[cells[error.row]], receivers[r])
                            raise self.rows.not_finite(f"the path {path} changed") from None

                    for at in range(0, len(changing), self.rows.at_once):
                        in_halves(changing[at : at + self.rows.at_once], measure)
        return effects

    def _is_felt(self, senders: Indices, receivers: Indices) -> bool:
        """Whether a sender that the two runs differ in comes before a receiver."""
        return bool(self.changed[senders[senders < self.graph.reach[receivers].max()]].any())

    def _made(self, carried: ResidualChange, receivers: Sequence[Indices]) -> dict[int, Made]:
        """Return by layer what its receivers make of what reaches them; of the last, the changes that logits read."""
        nodes = self.graph.receivers
        wanted = np.unique(np.concatenate(receivers))
        layers = np.where(nodes.layer[wanted] < 0, self.rows.n_layers, nodes.layer[wanted])
        by_layer = {}
        for layer in np.unique(layers).tolist():
            into_heads, into_mlp = carried.at(layer)
            kinds = set(nodes.kind[wanted[layers == layer]].tolist())
            heads: list[dict[str, Tensor]] = []
            mlps: list[Tensor] = []
            for some in torch.arange(len(into_heads), device=into_heads.device).split(self.rows.at_once):
                if kinds & set(range(len(KINDS))):
                    receivers_here = Receivers(self.rows, layer)
                    with receivers_here.hooked():
                        heads.append(receivers_here.projected(receivers_here.entering + into_heads[some]))
                if MLP in kinds:
                    mlps.append(self.rows.feed_forward(layer, self.rows.read_by_mlp(layer) + into_mlp[some]))
            mlp = torch.cat(mlps) if mlps else into_heads if LOGITS in kinds else None
            by_layer[layer] = Made({k: torch.cat([one[k] for one in heads]) for k in KINDS} if heads else {}, mlp)
        return by_layer

    def _last(
        self, sets: Sequence[int], receivers: Indices, made: dict[int, Made]
    ) -> Float[Tensor, "row kept d_model"]:
        """Return the last states of the runs with some receivers changed, one for each set of senders."""
        rows, nodes = self.rows, self.graph.receivers
        which = to_device(torch.tensor(sets), rows.runs.model.device)
        first = first_layer(self.graph, receivers)
        if first == rows.n_layers:
            change = made[first].mlp
            assert change is not None
            # No layer is left to run: the change is in front of the final norm.
            return (rows.base("resid_post", first - 1) + change[which])[:, rows.kept]
        residual = rows.base("resid_pre", first).expand(len(sets), -1, -1)
        for layer in range(first, rows.n_layers):
            own = receivers[nodes.layer[receivers] == layer]
            attends = bool((nodes.kind[own] < MLP).any())
            with self._written(layer, own, which, made) if attends else contextlib.nullcontext():
                attended = rows.attention(layer, residual)
            leaving = rows.leaving(layer)
            residual = residual[:, leaving]
            middle = residual + attended
            if (nodes.kind[own] == MLP).any():
                # In place of what the MLP makes of this run: it read what reached it along the path alone.
                added = made[layer].mlp
                assert added is not None
                residual = middle + added[which][:, leaving]
            else:
                residual = middle + rows.feed_forward(layer, residual if rows.blocks.parallel else middle)
        return residual

    @contextlib.contextmanager
    def _written(self, layer: int, own: Indices, which: Tensor, made: dict[int, Made]) -> Iterator[None]:
        """Write what the receivers of a layer made in place of what they would make."""
        nodes, hooks = self.graph.receivers, []
        for number, kind in enumerate(KINDS):
            heads = nodes.head[own[nodes.kind[own] == number]].tolist()
            if heads:
                given = made[layer].heads[kind][which]
                hooks.append(
                    (SITES[kind].hook_name(layer), replace_hook(partial(_exchanged, heads=heads, given=given)))
                )
        with self.runs.model.hooks(hooks):
            yield

    def _named(self, senders: Indices, receivers: Indices) -> str:
        ends = (self.graph.senders, senders), (self.graph.receivers, receivers)
        return " -> ".join(" + ".join(nodes.name(i) for i in one) for nodes, one in ends)


def _exchanged(activation: Tensor, hook: object, heads: list[int], given: Tensor) -> Tensor:
    exchanged = activation.clone()
    chosen = to_device(torch.tensor(heads), exchanged.device)
    exchanged[:, :, chosen] = given[:, :, chosen].to(exchanged)
    return exchanged
