"""Both runs of one pair, recorded once, in which any nodes are then changed at once in one short walk.

1. Both prompts are run once. What every layer holds at the sites requested is kept, as a sweep keeps it.
2. For some nodes, and for each of several other sets of nodes beside them, one variant of the edited run goes down the
   layers from its first change on (`headwater.patching.walk`): the numbers are those of `hw.patch`.
3. The residual stream after every layer is read at the positions of the metric. Through the last norm and the
   unembedding it gives the metric by layer (logit lens), and at the end the answers with their probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.errors import InputError
from headwater.kernels.devices import to_device
from headwater.models.hooked import HookedModel
from headwater.models.sites import sites_named
from headwater.models.unembedding import unembedding_head
from headwater.patching.activation_patching import joint_template
from headwater.patching.components import ActivationNode
from headwater.patching.edits import LOGITS, CellTable, Indices, Reading
from headwater.patching.metrics import Metric
from headwater.patching.plan import Plan
from headwater.patching.prompts import PromptPair, Prompts
from headwater.patching.replacements import build_replacement
from headwater.patching.walk_runner import CannotStepError, WalkRunner
from headwater.patching.whole_runs import WholeRuns

STATE = "resid_post"
"""What is read after each layer."""


@dataclass(frozen=True, eq=False)
class NodeEffect:
    """What some nodes did, and each of the other sets by itself."""

    value: float
    """The metric after the change."""
    parts: tuple[float, ...]
    """The same after the change of each other set."""
    states: Float[Tensor, "layer kept d_model"]
    """Behind each layer, at the positions of the metric."""


@dataclass(frozen=True, eq=False)
class NextTokens:
    """What the residual stream after every layer says of the next token."""

    by_layer: list[float]
    """The metric as each layer would have it, were it the last."""
    probabilities: Float[Tensor, " d_vocab"]
    """Of all tokens at the last position of the metric, after the last layer."""

    def likeliest(self, count: int) -> list[int]:
        """Return the ids of the likeliest tokens, the likeliest first."""
        return self.probabilities.topk(min(count, len(self.probabilities))).indices.tolist()


class RecordedPair:
    """Two recorded runs of a pair, one of which is edited with values of one kind.

    Args:
        model: the model; it is left as it was.
        pair: one pair, and which of its runs is edited.
        metric: of the logits.
        values: what is written: `other run`, `zero`, `mean`, ...; values that are drawn several times are not for this.
        dataset: the prompts of `mean`.
        sites: the names of those at which nodes may lie.

    Raises:
        InputError: there are several pairs, or the metric reads no logits.
    """

    def __init__(
        self,
        model: HookedModel,
        pair: PromptPair,
        metric: Metric,
        *,
        values: Any = "other run",
        dataset: Prompts | None = None,
        sites: Sequence[str],
    ):
        if len(pair.prompts) != 1:
            raise InputError(f"One pair of prompts was wanted; {len(pair.prompts)} were given.")
        if metric.site != LOGITS:
            raise InputError(f"The metric {metric.name!r} reads {metric.site}; one of the logits was wanted.")
        self.model, self.pair, self.metric = model, pair, metric
        named = sites_named(sites, model)
        self.replacement = build_replacement(model, values, dataset, pair, named)
        every = [
            ActivationNode(s.name, layer) for s in named for layer in s.among(s.layers(model.shape), model, edited=True)
        ]
        # Cells of every node, none of which is measured: they say what the runs have to record.
        cells = CellTable.of([(0, [joint_template([node], 0, self.replacement) for node in every])])
        states = tuple((STATE, layer) for layer in range(model.shape.n_layers))
        self.plan = Plan(model, pair, cells, (metric,), self.replacement, states=states, states_at=metric.at)
        self.normalise, self.head = unembedding_head(model)
        # Recorded activations of weights that have changed since would be combined with new ones without an error.
        self._fingerprint = model.fingerprint
        with torch.inference_mode(), model.lock:
            self._runner = self._recorded()

    def _recorded(self) -> WalkRunner | WholeRuns:
        try:
            return WalkRunner(self.plan, range(1))
        except CannotStepError:
            return WholeRuns(self.plan, range(1))

    @property
    def kept(self) -> tuple[int, ...]:
        """The positions of the edited prompt that the metric reads."""
        return self.plan.kept[0][0]

    @property
    def unedited(self) -> tuple[float, float]:
        """The metric of the run that is edited, and of the other."""
        found = self._runner.readout.unedited(range(1))
        return float(found.unedited[0, 0]), float(found.other[0, 0])

    @property
    def states(self) -> Float[Tensor, "layer kept d_model"]:
        """What is after each layer of the run that is edited, at the positions of the metric."""
        base = self._runner.readout.base
        return torch.stack([base[reading][0] for reading in self.plan.states])[:, self._columns]

    def look(self, nodes: Sequence[ActivationNode], parts: Sequence[Sequence[ActivationNode]] = ()) -> NodeEffect:
        """Change nodes together, and each of the other sets by itself, in one walk."""
        if self.model.fingerprint != self._fingerprint:
            raise InputError("The model was changed since its runs were recorded: make another board, hw.board(...).")
        runner, end = self._runner, (LOGITS, self.model.shape.n_layers)
        cells = CellTable.of([(0, [joint_template(one, 0, self.replacement) for one in (nodes, *parts)])])
        before, _ = self.unedited
        values = [before] * len(cells)
        states: dict[Reading, Tensor] = {reading: runner.readout.base[reading][0] for reading in self.plan.states}

        def deliver(reading: Reading, indices: Indices, read: Tensor) -> None:
            if reading == end:
                measured = runner.readout.apply(0, reading, read, [0] * len(indices))
                for index, value in zip(indices.tolist(), measured.tolist(), strict=True):
                    values[index] = value
            elif 0 in indices:
                states[reading] = read[indices.tolist().index(0)]

        with torch.inference_mode(), self.model.lock:
            variants = runner.group.variants(cells)
            changes = (
                # Only the first set's states are shown by layer; of the others the logits suffice.
                change if number == variants.which[0] else replace(change, readings=(end,))
                for number, change in enumerate(variants.changes)
            )
            runner.run(replace(variants, changes=tuple(changes)), deliver)
            kept = torch.stack([states[reading] for reading in self.plan.states])[:, self._columns]
        return NodeEffect(values[0], tuple(values[1:]), kept)

    @cached_property
    def before(self) -> NextTokens:
        """What the run that is edited says, read once."""
        return self.read(self.states)

    def read(self, states: Float[Tensor, "layer kept d_model"]) -> NextTokens:
        """Return what states after every layer say, each read as if it were the last (logit lens).

        A metric that is against the clean run is against that run's logits at the end.
        """
        with torch.inference_mode():
            logits = self.logits(states)
            # Layers take the place of examples here: each is a row with the same answers.
            answers = [to_device(ids[:1], logits.device).repeat(len(logits)) for ids in self.plan.answers[0]]
            clean = self._clean().expand_as(logits) if self.metric.against_clean else None
            metric = self.metric.measure(logits, answers, clean).double().tolist()
            return NextTokens(metric, logits[-1, -1].double().softmax(-1).cpu())

    def logits(self, states: Float[Tensor, "layer kept d_model"]) -> Float[Tensor, "layer kept d_vocab"]:
        """Return the logits that states after some layers would give."""
        with torch.inference_mode(), self.model.lock:
            # W_U may lie on another GPU than the states.
            hidden = self.normalise(states.flatten(0, 1)).to(self.head.W_U.device).float()
            return self.head.logits(hidden, slice(None)).view(*states.shape[:2], -1)

    def _clean(self) -> Float[Tensor, "1 kept d_vocab"]:
        last = self.plan.states[-1]
        readout = self._runner.readout
        run = readout.base if self.plan.pair.base_is_clean else readout.other
        assert run is not None
        return self.logits(run[last][0][None][:, self._columns])

    @property
    def _columns(self) -> list[int]:
        """Where the positions of the metric are among all that are read."""
        return [self.plan.positions[0].index(position) for position in self.kept]
