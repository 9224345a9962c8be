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

Positions before a row's first reweighted query do not depend on α: training runs them once, and in every epoch only the
remaining positions, on top of their keys and values (`SharedPrefixes`); one position for an answer of one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwater.errors import ModelError
from headwater.kernels.attention import reweighted
from headwater.kernels.devices import available_memory, is_out_of_memory
from headwater.models.bridge_check import rounding
from headwater.models.edits import Hook, read_hook, replace_hook
from headwater.models.forward import FixedPrefix, KeysValues, common_start, keys_values, takes_cache
from headwater.models.gradients import refuse_cut_texts
from headwater.models.hooked import HookedModel
from headwater.models.sites import SITES, hook_name
from headwater.models.tokens import by_length
from headwater.options import checked_count, checked_number
from headwater.probes.linear import Probe
from headwater.questions.answers import AnsweredQuestions
from headwater.questions.states import probe_positions

# SharedPrefixes: the keys and values of the first tokens of rows that are run many times and change only later.
#
# A causal model's activations at a position do not depend on later positions. Rows that are edited from some position
# on are run up to it once, and from there on as often as needed. Prefixes of different lengths run together,
# left-padded to the longest; the attention mask marks the padding before a shorter one.


KEPT_SHARE = 1 / 4
"""Share of free memory for keys and values; rows beyond it keep no prefix, and are run in full every time."""


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """The keys and values of the first tokens of some rows; the prefix shared by all rows is stored once."""

    places: Mapping[int, Int[Tensor, " position"]] = field(default_factory=dict)
    """By row, the indices of its tokens in `keys_values`."""
    keys_values: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By layer, `token kv_head d_head`."""

    @property
    def bytes_per_row(self) -> int:
        """Bytes that the keys and values of the row with the longest beginning take in a run."""
        pairs = self.keys_values.values()
        return self.longest(list(self.places)) * sum(o[0].numel() * o.element_size() for pair in pairs for o in pair)

    def length(self, row: int) -> int:
        """Return the number of tokens in the beginning of a row."""
        return len(self.places.get(row, ()))

    def longest(self, rows: Sequence[int]) -> int:
        """Return the number of tokens in the longest beginning of some rows."""
        return max(map(self.length, rows), default=0)

    def of(self, rows: Sequence[int]) -> tuple[KeysValues, Bool[Tensor, "row position"]]:
        """Return the keys and values of some rows, left-padded to the longest, and a mask of the real ones."""
        longest = self.longest(rows)
        places, real = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest).bool()
        for number, row in enumerate(rows):
            first = longest - self.length(row)
            places[number, first:], real[number, first:] = self.places.get(row, places.new_empty(0)), True

        def gathered(kept: Tensor) -> Tensor:
            return rearrange(kept[places.to(kept.device)], "row token kv_head d_head -> row kv_head token d_head")

        pairs = self.keys_values.items()
        return {layer: (gathered(keys), gathered(values)) for layer, (keys, values) in pairs}, real


def shared_prefixes(
    model: HookedModel, tokens: Sequence[Sequence[int]], lengths: Sequence[int], n_layers: int, batch_size: int
) -> SharedPrefixes:
    """Run the first tokens of rows through the first layers, longest rows first, while memory for them lasts.

    The prefix shared by all rows, such as a prompt's examples, is run once.
    """
    room = available_memory(model.device) * KEPT_SHARE
    shared = common_start(torch.tensor([list(row[: min(lengths)]) for row in tokens], dtype=torch.long))
    start = keys_values(model, torch.tensor([list(tokens[0][:shared])]), {}, n_layers)
    places: dict[int, Tensor] = {}
    parts, n_tokens = [_by_token(start, 0)] if shared else [], shared
    # longest=float: each batch has one length, so no padding is kept. The longest rows save most, and come first.
    for rows in reversed(by_length(lengths, batch_size, longest=float)):
        if not (first := lengths[rows[0]]):
            break
        made = keys_values(model, torch.tensor([list(tokens[row][shared:first]) for row in rows]), start, n_layers)
        part = _by_token(made, shared) if first > shared else {}
        room -= sum(one.numel() * one.element_size() for pair in part.values() for one in pair)
        if room < 0:
            break
        parts += [part] if part else []
        for row in rows:
            places[row] = torch.cat([torch.arange(shared), torch.arange(n_tokens, n_tokens + first - shared)])
            n_tokens += first - shared
    # pop: each layer's parts are freed once joined; otherwise all would be in memory twice.
    joined = {}
    for layer in list(parts[0]) if parts else []:
        keys, values = zip(*(part.pop(layer) for part in parts), strict=True)
        joined[layer] = torch.cat(keys), torch.cat(values)
    return SharedPrefixes(places, joined)


def _by_token(made: KeysValues, first: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Concatenate the keys and values of all rows, from token `first` on, along one token axis."""
    shape = "row kv_head token d_head -> (row token) kv_head d_head"
    return {
        layer: (rearrange(keys[:, :, first:], shape), rearrange(values[:, :, first:], shape))
        for layer, (keys, values) in made.items()
    }


Strength = Float[Tensor, "pathway layer head"]
"""α of the two pathways, question first; a single head if all heads of a layer share it."""
MOST_BEGUN = 8
"""Rows with a beginning run together in batches of at most this many times `batch_size`."""
MOST_BYTES = 1 << 29
"""Most bytes of keys and values per batch: autograd keeps a copy for each query head that reads them."""
CHECKED = 8
"""Rows that are also run whole, to check the beginnings before they are used."""


@dataclass(frozen=True)
class Reweighting:
    """Training options of pathway reweighting; defaults are the published values if there are any."""

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
    begun: SharedPrefixes = field(default_factory=SharedPrefixes)
    """The positions of each row that were already run."""

    @classmethod
    def of(cls, model: HookedModel, answered: AnsweredQuestions, probe: Probe, gate: Tensor) -> Reweighted:
        """Find each row's edges: from E_Q into the tokens of E_A that the state read can depend on."""
        refuse_cut_texts(model, "Pathway reweighting", answered.table["tokens"].map(len))
        table, read = answered.table, probe_positions(answered, probe.token)
        tokens = tuple(tuple(row[: at + 1]) for row, at in zip(table["tokens"], read, strict=True))
        rows = zip(table["exact_answer_tokens"], read, strict=True)
        queries = tuple(tuple(i for i in exact if i <= at) or (at,) for exact, at in rows)
        return cls(model, tokens, queries, answered.exact_question_tokens(), probe.site, probe.layer, gate)

    def states(self, rows: Sequence[int], alpha: Strength, *, grad: bool = False) -> Float[Tensor, "example d_model"]:
        """Run some rows, each from the end of its beginning, and return the states; `grad` gives `alpha` a gradient."""
        batch = self.model.tokenize([list(self.tokens[row][self.begun.length(row) :]) for row in rows])
        before = self.begun.longest(rows)
        options: dict[str, Any] = {}
        if before:
            pairs, real = self.begun.of(rows)
            mask = torch.cat([real, batch.mask], 1).long().to(self.model.device)
            options = {"past_key_values": FixedPrefix(pairs), "attention_mask": mask}
        columns = range(before + batch.tokens.shape[1])
        shifts = [before - self.begun.length(row) for row in rows]
        queries = _marked([self.queries[row] for row in rows], shifts, columns)[:, before:].to(self.model.device)
        keys = _marked([self.keys[row] for row in rows], shifts, columns).to(self.model.device)
        gate = self.gate[list(rows)].to(alpha)[:, None, None]
        scale = gate * alpha[0] - (1 - gate) * alpha[1]  # example layer head
        outs: list[Tensor] = []
        reads = (SITES[self.site].hook_name(self.layer), read_hook(lambda activation, hook: outs.append(activation)))
        hooks: list[Hook] = [*_hooks(scale.to(self.model.device), queries, keys), reads]
        self.model.run(batch, hooks, stop_at=self.layer + 1, grad=grad, **options)
        state = outs[0]
        return state[torch.arange(len(rows), device=state.device), (batch.lengths - 1).to(state.device)]

    def batches(self, rows: Sequence[int], batch_size: int) -> list[list[int]]:
        """Deal rows out in batches of about equal length.

        Batches of rows with beginnings are larger, but have no more tokens than `batch_size` whole rows.
        """
        most_begun = min(MOST_BEGUN * batch_size, MOST_BYTES / max(self.begun.bytes_per_row, 1))
        rest = {row: len(self.tokens[row]) - self.begun.length(row) for row in rows}
        most = batch_size * max(map(len, self.tokens))
        batches: list[list[int]] = []
        for row in sorted(rest, key=lambda row: (row not in self.begun.places, rest[row])):
            batch = batches[-1] if batches else []
            if row in self.begun.places:
                joins = len(batch) + 1 <= most_begun and (len(batch) + 1) * rest[row] <= most
            else:
                joins = len(batch) < batch_size
            if batch and joins:
                batch.append(row)
            else:
                batches.append([row])
        return batches

    def begin(self, batch_size: int) -> Reweighted:
        """Run the positions before the first query of each row, while memory for them lasts.

        Without effect on a model that accepts no keys and values of earlier tokens, or whose states differ between a
        run in two parts and a single run.
        """
        model = self.model
        if not takes_cache(model.raw):
            return self
        firsts = [min(queries) for queries in self.queries]
        try:
            begun = replace(self, begun=shared_prefixes(model, self.tokens, firsts, self.layer + 1, batch_size))
            # Rows of all lengths, with α = 0.5.
            ordered = sorted(range(len(self.tokens)), key=lambda row: firsts[row])
            rows = ordered[:: -(-len(ordered) // CHECKED)]
            half = torch.full((2, self.layer + 1, 1), 0.5, dtype=torch.float64)
            expected, found = (one.states(rows, half).float() for one in (self, begun))
            tolerance = rounding(model.dtype) * float(expected.abs().max())
            return begun if float((found - expected).abs().max()) <= tolerance else self
        except (ModelError, RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            if is_out_of_memory(error):
                raise
            return self


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
    """Train α and the probe, starting from the given probe, on all rows; return α and the probe of reweighted states.

    `spread` is the standard deviation of every dimension of the states that the probe was fitted on; `penalty` is the
    weight of |w|²/2 in standardized units, added to the mean cross-entropy. The seed orders the rows.
    """
    inputs = inputs.begin(batch_size)
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


def _hooks(
    scale: Float[Tensor, "example layer head"],
    queries: Bool[Tensor, "example query"],
    keys: Bool[Tensor, "example key"],
) -> Iterator[Hook]:
    for layer, here in enumerate(rearrange(scale, "example layer head -> layer example head")):

        def reweigh(pattern: Tensor, hook: object, here: Tensor = here) -> Tensor:
            return reweighted(pattern, queries, keys, here.to(pattern.dtype))

        yield hook_name("pattern", layer), replace_hook(reweigh)


def _marked(
    positions: Sequence[Sequence[int]], shifts: Sequence[int], columns: range
) -> Bool[Tensor, "example position"]:
    marks = torch.zeros(len(positions), len(columns), dtype=torch.bool)
    moved = [[place + shift for place in places] for places, shift in zip(positions, shifts, strict=True)]
    marked = [(row, place) for row, places in enumerate(moved) for place in places if place in columns]
    if marked:
        marks[tuple(torch.tensor(marked).T)] = True
    return marks
