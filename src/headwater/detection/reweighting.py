"""Pathway reweighting (PR): amplify the pathway that an example takes, then read its state again.

Luo et al., "Two Pathways to Truthfulness", ACL 2026, §5.2, Eq. 4-5. For layers l up to the probe's layer, queries i in
E_A and keys j in E_Q

    Ã_l(i, j) = (1 + s_l) A_l(i, j)        s_l = π_Q α_Q,l − (1 − π_Q) α_A,l        α >= 0, other weights unchanged

π_Q is the gate's probability that the example is Q-anchored, from an ordinary run. The model is frozen; α and the probe
of the reweighted state are trained together.

Left open by the publication, and parameters here: whether α is per layer or per head, and the initial values of α
(here small) and of the probe (here the fitted probe). α is kept between 0 and 1, so that no weight turns negative. The
probe is trained on states standardized as for the fitted probe, under the same L2 penalty. A probe at the token before
the answer cannot see edges into E_A: there the edges into the token that is read are reweighted.

The prefix that all rows share, such as a prompt's examples, does not depend on α: it is run once, not in every epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from headwater.kernels.attention import reweighted
from headwater.models.edits import at_tokens, keeping, replace_hook
from headwater.models.forward import FixedPrefix, KeysValues, unpadded
from headwater.models.gradients import refuse_cut_texts
from headwater.models.hooked import HookedModel
from headwater.models.sites import SITES, hook_name
from headwater.models.tokens import Batch, by_length
from headwater.options import checked_count, checked_number
from headwater.probes.linear import Probe
from headwater.questions.answers import AnsweredQuestions
from headwater.questions.states import probe_positions, shared_start

Strength = Float[Tensor, "pathway layer head"]
"""α of the two pathways, question first; a single head if all heads of a layer share it."""


@dataclass(frozen=True)
class Reweighting:
    """Training options of pathway reweighting; defaults are the published values if there are any."""

    returned_by = "hw.detection.Reweighting(...)"

    learning_rate: float = 1e-2
    """Learning rate of Adam, with betas 0.9 and 0.999."""
    examples_per_step: int = 512
    epochs: int = 10
    start: float = 0.1
    """Initial value of every α (not published)."""
    per_head: bool = False
    """Whether every head has its own α, instead of every layer."""

    def check(self) -> None:
        """Raise on values that cannot be trained with."""
        checked_number("learning_rate", self.learning_rate, above=0.0)
        checked_count("examples_per_step", self.examples_per_step)
        checked_count("epochs", self.epochs, least=0)
        if self.start != 0:
            checked_number("start", self.start, above=0.0, below=1.0, up_to=True)


@dataclass(frozen=True, eq=False)
class Reweighted:
    """The states that a probe reads after the edges from E_Q are reweighted."""

    model: HookedModel
    tokens: tuple[tuple[int, ...], ...]
    """Up to the token that is read, which later tokens cannot change."""
    queries: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[int, ...], ...]
    site: str
    layer: int
    gate: Float[Tensor, " example"]
    """π_Q."""
    shared: int = 0
    """Number of first tokens, equal in all rows, that were already run."""
    start: KeysValues = field(default_factory=dict)
    """Their keys and values, by layer."""

    @classmethod
    def of(cls, model: HookedModel, answered: AnsweredQuestions, probe: Probe, gate: Tensor) -> Reweighted:
        """Find each row's edges: from E_Q into the tokens of E_A that the state read can depend on."""
        refuse_cut_texts(model, "Pathway reweighting")
        table, read = answered.table, probe_positions(answered, probe.token)
        tokens = tuple(tuple(row[: at + 1]) for row, at in zip(table["tokens"], read, strict=True))
        rows = zip(table["exact_answer_tokens"], read, strict=True)
        queries = tuple(tuple(i for i in exact if i <= at) or (at,) for exact, at in rows)
        return cls(model, tokens, queries, answered.exact_question_tokens(), probe.site, probe.layer, gate)

    def states(self, rows: Sequence[int], alpha: Strength, *, grad: bool = False) -> Float[Tensor, "example d_model"]:
        """Run some rows from the end of their shared prefix, and return the states; `grad` gives `alpha` a gradient."""
        rest = [list(self.tokens[row][self.shared :]) for row in rows]
        batch, options = Batch.of(rest, 0) if self.shared else self.model.tokenize(rest), dict[str, Any]()
        if self.shared:
            batch, options = unpadded(batch.tokens), {"past_key_values": FixedPrefix(self.start)}
        device, width = self.model.device, self.shared + batch.tokens.shape[1]
        queries = _marked([self.queries[row] for row in rows], width)[:, self.shared :].to(device)
        keys = _marked([self.keys[row] for row in rows], width).to(device)
        gate = self.gate[list(rows)].to(alpha)[:, None, None]
        scale = gate * alpha[0] - (1 - gate) * alpha[1]  # example layer head
        states: dict[str, Tensor] = {}
        name, last = SITES[self.site].hook_name(self.layer), torch.tensor([len(row) - 1 for row in rest])
        hooks = keeping([name], states, at_tokens(torch.arange(len(rest)), last))
        for layer, here in enumerate(rearrange(scale.to(device), "example layer head -> layer example head")):

            def reweigh(pattern: Tensor, hook: object, here: Tensor = here) -> Tensor:
                return reweighted(pattern, queries, keys, here.to(pattern.dtype))

            hooks.append((hook_name("pattern", layer), replace_hook(reweigh)))
        self.model.run(batch, hooks, stop_at=self.layer + 1, grad=grad, **options)
        return states[name]

    def batches(self, rows: Sequence[int], batch_size: int) -> list[list[int]]:
        """Deal rows out in batches of about equal length."""
        dealt = by_length([len(self.tokens[row]) for row in rows], batch_size)
        return [[rows[i] for i in batch] for batch in dealt]

    def begin(self) -> Reweighted:
        """Run what all rows share before their first query, if the model then yields the same states."""
        half = torch.full((2, self.layer + 1, 1), 0.5, dtype=torch.float64)
        first = min(min(queries) for queries in self.queries)
        shared, start = shared_start(
            self.model, self.tokens, first, self.layer + 1,
            lambda shared, start: replace(self, shared=shared, start=start).states([0], half),
        )  # fmt: skip
        return replace(self, shared=shared, start=start)


def train_reweighting(
    inputs: Reweighted,
    z: Float[Tensor, " example"],
    probe: Probe,
    spread: Float[Tensor, " d_model"],
    options: Reweighting,
    *,
    penalty: float,
    seed: int,
    batch_size: int,
) -> tuple[Strength, Probe]:
    """Train α and the probe of reweighted states, starting from the given probe; the seed orders the rows.

    `spread` is the standard deviation of the states that the probe was fitted on; `penalty` is the weight of |w|²/2 in
    standardized units.
    """
    inputs = inputs.begin()
    n_heads = inputs.model.shape.n_heads if options.per_head else 1
    alpha = torch.full((2, inputs.layer + 1, n_heads), options.start, dtype=torch.float64, requires_grad=True)
    # In standardized units, so that Adam's steps and the penalty mean the same for every coordinate.
    weight = (probe.weight * spread).clone().requires_grad_()
    bias = torch.tensor(probe.bias, dtype=torch.float64, requires_grad=True)
    learned = [alpha, weight, bias]
    adam = torch.optim.Adam(learned, lr=options.learning_rate)
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(options.epochs):
        for step in torch.randperm(len(z), generator=shuffle).split(options.examples_per_step):
            slopes = [torch.zeros_like(tensor) for tensor in learned]
            for rows in inputs.batches(step.tolist(), batch_size):
                states = inputs.states(rows, alpha, grad=True).cpu().double()
                logits = states @ (weight / spread) + bias
                losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, z[rows], reduction="sum")
                # Batch by batch, so that the graph of one batch is freed before the next runs.
                parts = torch.autograd.grad(losses / len(step), learned, allow_unused=True)
                slopes = [s if part is None else s + part for s, part in zip(slopes, parts, strict=True)]
            # The penalty is added once per step, not per batch; biases and α have none, as in the probe's original fit.
            slopes[1] = slopes[1] + penalty * weight.detach()
            for tensor, slope in zip(learned, slopes, strict=True):
                tensor.grad = slope
            adam.step()
            with torch.no_grad():
                alpha.clamp_(0, 1)
    trained = Probe(probe.site, probe.token, probe.layer, (weight / spread).detach(), bias.item())
    return alpha.detach(), trained


def _marked(positions: Sequence[Sequence[int]], width: int) -> Bool[Tensor, "example position"]:
    marks = torch.zeros(len(positions), width, dtype=torch.bool)
    for own, places in zip(marks, positions, strict=True):
        own[list(places)] = True
    return marks
