"""By how much the residual stream changes in front of each layer when senders are exchanged and attention is frozen.

    direct   δ_l = Σ Δ_s, over the exchanged senders s before l
    mlps     the same, and each MLP on the way is recomputed:  δ after it = δ + mlp(x + δ) - mlp(x)

with Δ_s = s(other run) - s(base run). Every head gives what it gave in the base run (an exchanged one what it gave in
the other), so that a change reaches a receiver along the residual stream, or through MLPs, and through no other head
(Wang et al. 2022). One walk up the layers serves every receiver of every set of senders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headwater.circuits.exact import Rows
from headwater.circuits.graph import Indices
from headwater.kernels.devices import to_device

ThroughName: TypeAlias = Literal["direct", "mlps"]
THROUGH = get_args(ThroughName)


class Carried:
    """The changes of some sets of senders, layer by layer, at the positions that are recomputed.

    Args:
        rows: the base run.
        changes: Δ of every sender.
        sets: which senders are exchanged together; a set is a row.
        through: `direct` or `mlps`.
    """

    def __init__(
        self,
        rows: Rows,
        changes: Float[Tensor, "sender position d_model"],
        sets: Sequence[Indices],
        through: str = "direct",
    ):
        self.rows, self.changes, self.through = rows, changes, through
        self._set = torch.from_numpy(np.repeat(np.arange(len(sets)), [len(one) for one in sets]))
        self._sender = torch.from_numpy(np.concatenate(sets))
        self._start()

    def at(self, layer: int) -> tuple[Float[Tensor, "set position d_model"], Float[Tensor, "set position d_model"]]:
        """Return the changes that a layer's heads read, and those that its MLP reads; of `n_layers`, what logits read.

        Layers are best asked for in ascending order: one below the last starts the walk again.
        """
        if layer < self._layer:
            self._start()
        while self._layer < layer:
            self._pass()
        return self._before, self._in_front_of_mlp()

    def _start(self) -> None:
        n_sets = int(self._set.max()) + 1
        self._layer, self._before = 0, self._add(self.changes.new_zeros(n_sets, *self.changes.shape[1:]), 0, 1)

    def _pass(self) -> None:
        """Go through a layer: its exchanged heads, then its MLP."""
        graph, layer, rows = self.rows.runs.graph, self._layer, self.rows
        read, mlp = self._in_front_of_mlp(), self._first_of(layer) + graph.n_heads
        after = self._add(self._before, self._first_of(layer), mlp)
        if self.through == "mlps":
            changed = read.flatten(1).any(1).cpu()
            changed[self._set[self._sender == mlp]] = False
            after, entering = after.clone(), rows.read_by_mlp(layer)
            for part in changed.nonzero()[:, 0].split(rows.at_once):
                some = to_device(part, after.device)
                after[some] += rows.feed_forward(layer, entering + read[some]) - rows.base("mlp_out", layer)
        self._before, self._layer = self._add(after, mlp, mlp + 1), layer + 1

    def _in_front_of_mlp(self) -> Float[Tensor, "set position d_model"]:
        if self.rows.blocks.parallel or self._layer == self.rows.n_layers:
            return self._before
        first = self._first_of(self._layer)
        return self._add(self._before, first, first + self.rows.runs.graph.n_heads)

    def _first_of(self, layer: int) -> int:
        """The number of a layer's first head among senders."""
        return 1 + layer * (self.rows.runs.graph.n_heads + 1)

    def _add(self, changes: Tensor, first: int, stop: int) -> Float[Tensor, "set position d_model"]:
        """Add what the exchanged senders of a range write."""
        mine = (self._sender >= first) & (self._sender < stop)
        if not bool(mine.any()):
            return changes
        device = changes.device
        return changes.index_add(
            0, to_device(self._set[mine], device), self.changes[to_device(self._sender[mine], device)]
        )
