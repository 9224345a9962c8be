"""Clicks on one pair of prompts: each click changes a node, and its exact effect appears at once.

A click selects a cell (a layer at a token), a head (at one token or at all), an attention edge (a token that reads
another), or a set of these. A set is always changed together, because effects do not add up. The kinds of change:

    denoise   the clean run's values into the corrupted run
    noise     the corrupted run's values into the clean run
    zero      zeros into the clean run
    mean      the mean over `dataset` (default: both prompts) into the clean run

Every number equals that of `hw.patch`, and `Patched.code` is the call that returns it. This is how they are computed
fast:

1. Both prompts are run once. The activations of every layer at the requested sites are kept, as in a sweep.
2. For the clicked nodes, and for each of several additional sets of nodes, one variant of the edited run goes through
   the layers from its first change on (`headwater.patching.walk`).
3. The residual stream after every layer is read at the positions of the metric. The final norm and the unembedding turn
   it into the metric by layer (logit lens), and, after the last layer, into the answers with their probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from headwater.errors import InputError
from headwater.kernels.devices import to_device
from headwater.models.hooked import HookedModel
from headwater.models.sites import sites_named
from headwater.models.unembedding import unembedding_head
from headwater.patching.components import ActivationNode, joint_template, set_name
from headwater.patching.edits import LOGITS, CellTable
from headwater.patching.metrics import Metric
from headwater.patching.plan import Plan
from headwater.patching.prompts import PromptPair, Prompts
from headwater.patching.replacements import build_replacement
from headwater.patching.runners import CannotStepError, WalkRunner, WholeRuns

HowName: TypeAlias = Literal["denoise", "noise", "zero", "mean"]
HOWS = {
    "denoise": ("denoise", "other run"),
    "noise": ("noise", "other run"),
    "zero": ("noise", "zero"),
    "mean": ("noise", "mean"),
}
"""The kinds of change that a board offers, as `direction=` and `values=` of `hw.patch`."""
HEADS, EDGES = "z", "pattern"
TOP = 8
"""Number of answers listed, before and after together."""
STATE = "resid_post"
"""The site that is read after each layer."""


@dataclass(frozen=True)
class Patched:
    """The result of a click."""

    nodes: tuple[ActivationNode, ...]
    """The nodes that were changed together."""
    how: str
    """`denoise`, `noise`, `zero` or `mean`."""
    before: float
    """The metric of the edited run before the change."""
    after: float
    """The metric with the nodes changed."""
    goal: float
    """The metric of the other run."""
    top: pd.DataFrame
    """The most likely answers, before and after: `token, before, after, change`, as probabilities."""
    layers: pd.DataFrame
    """The downstream effect: the metric at each layer by the logit lens: `layer, before, after, change`."""
    parts: pd.DataFrame
    """Effects of single parts: for a cell its layer's heads at that token, for a head the edges it reads at its token
    (or at the last one that the metric reads): `head, position, key, effect, normalized_effect`; empty for sets and
    edges."""
    seconds: float = field(compare=False)
    """Seconds from the click to these numbers."""
    code: str = ""
    """The call that returns the effect, with the names `model, clean, corrupted, metric` as passed to `hw.board`."""

    @property
    def effect(self) -> float:
        """The metric after, minus the metric before."""
        return self.after - self.before

    @property
    def normalized_effect(self) -> float:
        """The effect as a fraction of the gap to the other run; NaN if the runs do not differ."""
        return share(self.effect, self.goal - self.before)

    @property
    def answer(self) -> str:
        """The most likely answer after the change."""
        return str(self.top["token"].iloc[self.top["after"].argmax()])

    def __repr__(self) -> str:
        done = f"{self.how} {set_name(self.nodes)}: {self.effect:+.3f} ({self.normalized_effect:.0%} of the gap)"
        return f"Patched({done}; {self.before:.3f} -> {self.after:.3f})"


def share(effect: float, gap: float) -> float:
    """Return an effect as a fraction of a gap; NaN if the gap is 0."""
    return effect / gap if abs(gap) > 1e-9 else float("nan")


@dataclass(frozen=True, eq=False)
class NextTokens:
    """Predictions of the next token from the residual stream after every layer."""

    by_layer: list[float]
    """The metric at each layer, read as if it were the last."""
    probabilities: Float[Tensor, " d_vocab"]
    """Probabilities of all tokens at the last position of the metric, after the last layer."""

    def likeliest(self, count: int) -> list[int]:
        """Return the ids of the most likely tokens, in descending order."""
        return self.probabilities.topk(min(count, len(self.probabilities))).indices.tolist()


class RecordedPair:
    """Two recorded runs of one pair, one of which is edited with one kind of values; nodes can be at the given sites.

    It does not support values that are drawn several times, or metrics that do not read the logits.
    """

    def __init__(
        self,
        model: HookedModel,
        pair: PromptPair,
        metric: Metric,
        *,
        values: Any,
        dataset: Prompts | None,
        sites: Sequence[str],
    ):
        if metric.site != LOGITS:
            raise InputError(f"The metric {metric.name!r} reads {metric.site}; a metric of the logits is needed.")
        self.model, self.pair, self.metric = model, pair, metric
        named = sites_named(sites, model)
        self.replacement = build_replacement(model, values, dataset, pair, named)
        every = [
            ActivationNode(s.name, layer) for s in named for layer in s.among(s.layers(model.shape), model, edited=True)
        ]
        # Cells of every node; none is measured, but they determine what the runs record.
        cells = CellTable.of([(0, [joint_template([node], 0, self.replacement) for node in every])])
        states = tuple((STATE, layer) for layer in range(model.shape.n_layers))
        self.plan = Plan(model, pair, cells, (metric,), self.replacement, states=states)
        self.normalise, self.head = unembedding_head(model)
        self.fingerprint = model.fingerprint
        self._runner: WalkRunner | WholeRuns
        with torch.inference_mode(), model.lock:
            try:
                self._runner = WalkRunner(self.plan, range(1))
            except CannotStepError:
                self._runner = WholeRuns(self.plan, range(1))

    @property
    def kept(self) -> tuple[int, ...]:
        """The positions of the edited prompt that the metric reads."""
        return self.plan.positions[0]

    @property
    def unedited(self) -> tuple[float, float]:
        """The metric of the edited run before the change, and of the other run."""
        readout, reading = self._runner.readout, (LOGITS, self.model.shape.n_layers)
        assert readout.other_metrics is not None
        return float(readout.base_metrics[reading][0, 0]), float(readout.other_metrics[reading][0, 0])

    def look(
        self, nodes: Sequence[ActivationNode], parts: Sequence[Sequence[ActivationNode]]
    ) -> tuple[list[float], Float[Tensor, "layer kept d_model"]]:
        """Change nodes together, and each of the other sets separately, in one walk.

        Return the metric after the change, and for each other set; and the states after each layer, at the positions of
        the metric.
        """
        cells = CellTable.of([(0, [joint_template(one, 0, self.replacement) for one in (nodes, *parts)])])
        with torch.inference_mode(), self.model.lock:
            measured = self._runner.measure(cells)
            states = torch.stack([measured.after[reading][0] for reading in self.plan.states])
        return measured.values[:, 0].tolist(), states

    @cached_property
    def before(self) -> NextTokens:
        """The predictions of the edited run before the change, computed once."""
        base = self._runner.readout.base
        return self.read(torch.stack([base[reading][0] for reading in self.plan.states]))

    def read(self, states: Float[Tensor, "layer kept d_model"]) -> NextTokens:
        """Return the predictions of states after every layer, each read as if it were the last (logit lens).

        A metric that compares with the clean run uses that run's final logits.
        """
        with torch.inference_mode():
            logits = self.logits(states)
            # Layers take the place of examples: each is a row with the same answers.
            answers = [to_device(ids[:1], logits.device).repeat(len(logits)) for ids in self.plan.answers[0]]
            clean = None
            if self.metric.against_clean:
                readout = self._runner.readout
                run = readout.base if self.plan.pair.base_is_clean else readout.other
                assert run is not None
                clean = self.logits(run[self.plan.states[-1]][0][None]).expand_as(logits)
            metric = self.metric.measure(logits, answers, clean).double().tolist()
            return NextTokens(metric, logits[-1, -1].double().softmax(-1).cpu())

    def logits(self, states: Float[Tensor, "layer kept d_model"]) -> Float[Tensor, "layer kept d_vocab"]:
        """Return the logits of states after some layers, each read as if it were the last."""
        with torch.inference_mode(), self.model.lock:
            # W_U may be on another GPU than the states.
            hidden = self.normalise(states.flatten(0, 1)).to(self.head.W_U.device).float()
            return self.head.logits(hidden, slice(None)).view(*states.shape[:2], -1)
