"""Gradient estimates of the effects of all edges; a screen ranks the edges by them.

    eap         Δ_s · ∂metric/∂x_r                                       (Syed et al. 2023)
    eap-ig      the same, the gradient averaged over runs on the way     (Hanna et al. 2024)
                from the base run's embeddings to the other's
    sublayer    (output of r for x_r + Δ_s, minus its output for x_r) · ∂metric/∂(its output)

The gradient at each receiver's copy of x does not require forking the residual stream: with u = ∂metric/∂q of a head
(or k, v, or the argument of an MLP), from one ordinary backward pass,

    ∂metric/∂x_r = J_norm(x)ᵀ W_Q u

layer by layer, without any tensor `sender position head d_model`; one product with the senders' Δ gives all edges of a
layer. The sublayer's estimate is exact up to the receiver's output (through its norm, softmax or MLP) and first order
only after it; edges to the logits are exact.

After a screen, the edges with the strongest estimates are recomputed exactly, and so is a random sample of the rest,
stratified by kind of receiver: `EdgeEffects.report` bounds how many of the rest exceed the weakest recomputed edge. The
strength of an edge is the larger of two estimates, sublayer and first-order, each relative to the largest of its kind.
The sublayer estimate is far better, but it can be near 0 by accident where a softmax rises and falls again between the
two runs; the slope is not 0 there. On 112 single pairs of the embedded model's tasks, one of the exact top 100 was
missing from the first 500 in 8 pairs by the sublayer estimate alone, and in 3 pairs by the larger of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from headwater.circuits.exact import Exact, Receivers
from headwater.circuits.graph import QKV
from headwater.circuits.pairs import BothRuns, Place, names_with_gradient
from headwater.errors import InputError, NumericsError
from headwater.kernels.devices import to_device
from headwater.models.edits import Hook, forking, replace_hook
from headwater.models.gradients import refuse_without_gradients
from headwater.models.sites import hook_name
from headwater.models.tokens import Batch
from headwater.patching.edits import LOGITS, Indices

DRAWN = 50
"""Number of random edges drawn from the rest."""


def strength(estimates: Float[np.ndarray, "example position edge metric"]) -> Float[np.ndarray, " edge"]:
    """Return the strength of each edge: its mean size over pairs relative to the largest, for its largest metric."""
    # Absolute values before the mean, because an edge that helps one pair and hurts another is strong, not absent.
    sizes = np.abs(estimates).sum(1).mean(0)
    return np.asarray((sizes / np.maximum(sizes.max(0), np.finfo(float).tiny)).max(1))


def strongest_and_drawn(
    strengths: Float[np.ndarray, " edge"], kinds: Indices, verify: int, seed: int
) -> tuple[Bool[np.ndarray, " edge"], Bool[np.ndarray, " edge"]]:
    """Return masks of the strongest edges and of the edges drawn from the rest, stratified by kind of receiver."""
    strongest, drawn = np.zeros(len(strengths), dtype=bool), np.zeros(len(strengths), dtype=bool)
    # Stable, so that ties are broken by index, the same in every process.
    strongest[np.argsort(-strengths, kind="stable")[:verify]] = True
    rest = np.flatnonzero(~strongest)
    n_drawn = min(DRAWN, len(rest))
    if not n_drawn:
        return strongest, drawn
    generator = np.random.default_rng(seed)
    strata = [rest[kinds[rest] == kind] for kind in np.unique(kinds[rest])]
    for stratum, count in zip(strata, _shares([len(one) for one in strata], n_drawn), strict=True):
        drawn[generator.choice(stratum, count, replace=False)] = True
    return strongest, drawn


def _shares(sizes: list[int], total: int) -> NDArray[np.int64]:
    """Divide a total in proportion to sizes, and round the largest remainders up."""
    exact = np.array(sizes) * total / sum(sizes)
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return np.asarray(np.minimum(counts, sizes))


SMALLEST = 1e-6
"""A gradient at the last residual stream up to this size counts as zero."""


class Slopes:
    """One or several runs of a pair with an autograd graph, and the gradients of each metric in them.

    `shares` give the position of each run between the base run's embeddings (0) and the other run's (1).

    Raises:
        InputError: a metric has no gradient, or its gradient is 0 everywhere.
        NumericsError: a gradient is NaN or infinite.
    """

    def __init__(self, runs: BothRuns, shares: tuple[float, ...] = (0.0,)):
        refuse_without_gradients(runs.model)
        self.runs, self.shares = runs, shares
        self.recorded: dict[str, Tensor] = {}
        n_layers = runs.graph.n_layers
        self._final = hook_name("resid_post", n_layers - 1)
        # Computed here, and not in a hook of a run with an autograd graph.
        changes = runs.changes
        with torch.inference_mode(False), torch.enable_grad():
            # The recorded run has an autograd graph that serves once, so EAP needs no additional run.
            if shares == (0.0,) and (forks := runs.wave.recording.forks):
                self.recorded = dict(forks)
                # Used only once: the last backward frees its graph, and a second `Slopes` makes a new run.
                forks.clear()
                with runs.wave.blocks.fused():
                    logits = runs.wave.logits(self.recorded[self._final][0, list(runs.kept)])[None]
            else:
                logits = self._run(changes[0])
            reading, owners, metrics = (LOGITS, n_layers), [0] * len(shares), runs.plan.metrics
            # Each metric, summed over the runs.
            self._totals = [runs.wave.readout.apply(m, reading, logits, owners).sum() for m in range(len(metrics))]
        for metric, total in zip(metrics, self._totals, strict=True):
            if not total.requires_grad:
                raise InputError(f"The metric {metric.name!r} has no gradient; use method='exact'.")
        self.by_metric = [self._gradients(m) for m in range(len(self._totals))]

    def at(self, m: int, site: str, layer: int) -> Float[Tensor, "step position ..."]:
        """Return the gradient of a metric at a site of a layer, at the recomputed positions."""
        # Only the rows of these runs: the other run may follow the base run.
        return self.by_metric[m][hook_name(site, layer)][: len(self.shares), self.runs.start : self.runs.stop]

    def input_of(self, layer: int, mlp: bool) -> Float[Tensor, "step position d_model"]:
        """Return the input of a layer's attention, or of its MLP, before its norm."""
        entering = self.recorded[hook_name("resid_pre", layer)]
        if mlp and not self.runs.wave.blocks.parallel:
            entering = entering + self.recorded[hook_name("attn_out", layer)]
        return entering[: len(self.shares), self.runs.start : self.runs.stop].detach()

    def _run(self, difference: Float[Tensor, "position d_model"]) -> Float[Tensor, "step kept d_vocab_or_answer"]:
        """Run the prompt with embeddings between those of the two runs; return the logits with their autograd graph."""
        runs, first = self.runs, hook_name("resid_pre", 0)

        def begin(activation: Tensor, hook: object) -> Tensor:
            start, change = runs.base("resid_pre", 0), torch.zeros_like(runs.base("resid_pre", 0))
            change[runs.start : runs.stop] = difference
            # All steps between the two embeddings are rows of one batch.
            rows = torch.stack([start + share * change for share in self.shares]).clone()
            self.recorded[first] = rows.requires_grad_(True)
            return self.recorded[first]

        hooks: list[Hook] = [(first, replace_hook(begin))]
        hooks += forking(names_with_gradient(runs.model)[1:], self.recorded)
        prompt = runs.plan.pair.base[runs.example]
        batch = Batch.of([list(prompt.ids)] * len(self.shares), 0)
        # Fused once the hooks are attached: a norm after attention (Gemma) that has one inside must stay as it is.
        with runs.model.hooks(hooks), runs.wave.blocks.fused():
            logits = runs.model.run(batch, keep=list(runs.kept), grad=True)
        answers = runs.plan.only_answers
        return logits if answers is None else logits[:, :, to_device(answers[runs.example], logits.device)]

    def _gradients(self, m: int) -> dict[str, Tensor]:
        """Return the gradients of one metric at all recorded activations."""
        metric, more = self.runs.plan.metrics[m].name, m + 1 < len(self._totals)
        ends = {name: kept for name, kept in self.recorded.items() if name != hook_name("resid_pre", 0)}
        found = torch.autograd.grad(self._totals[m], [*ends.values()], retain_graph=more, allow_unused=True)
        gradients = zip(ends.items(), found, strict=True)
        slopes = {name: torch.zeros_like(end) if one is None else one for (name, end), one in gradients}
        last = slopes[self._final]
        # One check for all of them, because each check waits for the device.
        peaks = [slope.abs().amax().double().to(last.device) for slope in slopes.values()]
        if not bool(torch.stack(peaks).isfinite().all()):
            raise NumericsError(
                f"The gradient of {metric!r} is NaN or infinite in example {self.runs.example} "
                f"({self.runs.model.dtype}). Load the model with dtype='float32'."
            )
        if float(last.abs().max()) <= SMALLEST:
            raise InputError(
                f"The gradient of {metric!r} is 0 in the edited run (example {self.runs.example}), so all estimates "
                "would be. KL divergence from the run itself has its minimum there, and the difference of a token from "
                "itself is 0 everywhere. Use method='exact', or hw.logit_difference(...) of two tokens."
            )
        return slopes


def gradient_scores(slopes: Slopes, places: Sequence[Place], edges: Indices) -> Float[Tensor, "position edge metric"]:
    """Return Δ_s · ∂metric/∂x_r of edges at each of the given places, with the gradient averaged over the runs."""
    runs, graph = slopes.runs, slopes.runs.graph
    estimates = torch.zeros(len(places), len(edges), len(slopes.by_metric), dtype=torch.float64)
    changes = [runs.changes_at(place).float() for place in places]
    scores = torch.zeros(len(places), len(graph.receivers), len(graph.senders), device=runs.changes.device)
    for m in range(len(slopes.by_metric)):
        with runs.wave.blocks.fused():
            for receivers, gradient in _by_receiver(slopes, m):
                reach = int(graph.reach[receivers].max())
                for number, change in enumerate(changes):
                    # Both end at the last position that is read; a place may begin later than the runs do.
                    along = gradient[:, -change.shape[1] :].flatten(1).float()
                    scores[number, receivers, :reach] = along.to(change) @ change[:reach].flatten(1).T
        estimates[:, :, m] = scores.cpu()[:, graph.receiver[edges], graph.sender[edges]].double()
    return estimates


def _by_receiver(slopes: Slopes, m: int) -> Iterator[tuple[slice, Float[Tensor, "receiver position d_model"]]]:
    """Yield the gradients at receivers' inputs, a few receivers at a time."""
    runs, first = slopes.runs, 0
    for layer in range(runs.graph.n_layers):
        factors = runs.pairs.weights.layer(layer)
        normed = []
        for kind, weight in zip(QKV, (factors.W_Q, factors.W_K, factors.W_V), strict=True):
            # W_Q u of all heads comes first, so that the norm's backward takes them as rows of one batch.
            normed.append(torch.einsum("sphk,hdk->hspd", slopes.at(m, kind, layer).to(weight), weight))
        heads = torch.cat(normed)
        blocks = runs.wave.blocks
        before_norm = partial(blocks.normed, layer, mlp=False)
        yield slice(first, first + len(heads)), _pulled_back(slopes.input_of(layer, mlp=False), heads, before_norm)
        first += len(heads)
        # A HookedTransformer has no hook at `mlp_in`: the gradient is pulled back through the MLP itself.
        has_hook = hook_name("mlp_in", layer) in slopes.recorded
        gradient = slopes.at(m, "mlp_in" if has_hook else "mlp_out", layer)[None]
        made = partial(blocks.normed, layer, mlp=True) if has_hook else partial(blocks.feed_forward, layer)
        yield slice(first, first + 1), _pulled_back(slopes.input_of(layer, mlp=True), gradient, made)
        first += 1
    yield slice(first, first + 1), slopes.at(m, "resid_post", runs.graph.n_layers - 1).mean(0)[None]


def _pulled_back(
    entering: Float[Tensor, "step position d_model"],
    gradient: Float[Tensor, "receiver step position d_model"],
    function: Callable[[Tensor], Tensor],
) -> Float[Tensor, "receiver position d_model"]:
    """Pull gradients back through a function of a component's input to that input; average them over the runs."""
    # Tensors created in inference mode cannot be leaves of an autograd graph.
    with torch.inference_mode(False), torch.enable_grad():
        rows = entering.expand(len(gradient), *entering.shape).clone().requires_grad_(True)
        out = function(rows.flatten(0, 1))
        (pulled,) = torch.autograd.grad(out, rows, gradient.flatten(0, 1).to(out))
    return pulled.mean(1)


def sublayer_scores(slopes: Slopes, exact: Exact, stage: int, edges: Indices) -> Float[Tensor, "edge metric"]:
    """Return (output of r for x_r + Δ_s, minus its output for x_r) · the gradient, of edges to one layer.

    The output of a q, k or v is the output (z) of the heads that read it; edges to the logits are exact.
    """
    if stage == exact.rows.n_layers:
        return exact.effects(stage, edges)
    graph, rows, metrics = exact.graph, exact.rows, range(len(slopes.by_metric))
    sender, receiver = torch.from_numpy(graph.sender[edges]), graph.receiver[edges]
    kind, head = (torch.from_numpy(column[receiver]) for column in (graph.receivers.kind, graph.receivers.head))
    within, mlp = (kind < len(QKV)).nonzero()[:, 0], (kind == len(QKV)).nonzero()[:, 0]
    changed = torch.from_numpy(np.flatnonzero(exact.changed[: int(sender.max()) + 1]))
    estimates = torch.zeros(len(edges), len(metrics), dtype=torch.float64, device=exact.changes.device)
    into_heads, into_mlp = exact.reaching(stage)

    def slope(site: str) -> Float[Tensor, "metric position ..."]:
        reached = slice(exact.place.start - slopes.runs.start, None)
        return torch.stack([slopes.at(m, site, stage).mean(0)[reached] for m in metrics])

    with rows.blocks.fused():
        if len(changed) and len(within):
            receivers, of_z = Receivers(rows, stage), slope("z")
            # The change of the reading heads' z along the gradient; for k and v by key-value head.
            size = len(QKV), len(exact.changes), of_z.shape[2], len(metrics)
            written: Float[Tensor, "kind sender head metric"] = torch.zeros(size, device=of_z.device)
            before = int(graph.reach[receiver[within.numpy()]].max())
            earlier = changed[changed < before]
            for some in earlier.split(rows.at_once) if len(earlier) else ():
                projected = receivers.projected(receivers.entering + into_heads[some])
                for number, name in enumerate(QKV):
                    moved = receivers.heads_of(**{name: projected[name]}) - receivers.z
                    along = torch.einsum("sphk,mphk->shm", moved.to(of_z), of_z)
                    if name != "q":
                        along = along.unflatten(1, (-1, receivers.group)).sum(2)
                    written[number, some, : along.shape[1]] = along.float()
            estimates[within] = written[kind[within], sender[within], head[within]].double()
        if len(changed) and len(mlp):
            of_mlp, read, recorded = slope("mlp_out"), rows.read_by_mlp(stage), rows.base("mlp_out", stage)
            by_mlp = torch.zeros(len(exact.changes), len(metrics), device=of_mlp.device)
            for some in changed.split(rows.at_once):
                moved = rows.blocks.feed_forward(stage, read + into_mlp[some]) - recorded
                by_mlp[some] = torch.einsum("spd,mpd->sm", moved.to(of_mlp), of_mlp).float()
            estimates[mlp] = by_mlp[sender[mlp]].double()
    return estimates.cpu()
