"""Direct logit attribution: the direct contribution of each head, MLP, embedding and bias to a logit difference.

Elhage et al. 2021; Wang et al. 2022 (name mover heads write the logit difference). The residual stream after the last
block is a sum: the embedding, the outputs of all heads and MLPs, and the biases of attention. With the scale of the
final norm frozen at its value in this run, the logit difference is a sum over the same parts.

1. One run of the prompts records, at the positions read, the embedding, z of every head, the output of each MLP, and
   the residual stream after the last block.
2. The direction w = W_U[correct] - W_U[wrong] is pulled back through the final norm at its recorded scale.
3. A part contributes its dot product with that direction. If a norm comes after attention (Gemma), a head's z W_O first
   goes through it, at its recorded scale.
   A layer without heads (recurrent, convolution) has one part instead, `mixer`: resid_mid - resid_pre.
4. Constants are `bias`: b_O of each layer, and, without a layer, the biases of the final norm and the unembedding.
5. By position, a head's contribution is split over what it attends to: z = Σ pattern[s] v[s], so that the source s has
   the share pattern[s] v[s] W_O. Embeddings, MLPs and biases belong to the position that is read.
6. The contributions of an example must sum to its logit difference; this is checked at every call.

If the architecture caps its logits (Gemma 2), they sum to the difference before the cap. The weights are those of the
checkpoint: nothing is folded, and nothing needs to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError, NumericsError
from headwater.kernels.devices import to_device
from headwater.kernels.likelihood import UnembeddingHead
from headwater.models.edits import at_tokens, keeping
from headwater.models.hooked import HookedModel
from headwater.models.model import residual_scale
from headwater.models.positions import Prompt, Where, positions_read
from headwater.models.sites import SITES
from headwater.models.tokens import Batch, note_on_chats, pad_id, warn_of_missing_spaces
from headwater.models.unembedding import Norm, attention_post_norm, final_norm, unembedding_head
from headwater.models.weights import LoadedWeights
from headwater.options import shown
from headwater.patching.metrics import Answer, answer_ids
from headwater.patching.prompts import Prompts, read_prompts
from headwater.patching.summaries import strongest_first, summarize
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, interval_text, whole_summary

BY = {
    "head": ["component", "layer", "head"],
    "layer": ["component", "layer"],
    "component": ["component"],
    "position": ["component", "layer", "head"],
}
"""For each value of `by`, the columns that name a row of the table. By position, a row also has a source position."""
PARTS = {"embed": "The embedding", "head": "Attention", "mlp": "The MLP", "bias": "The bias", "mixer": "The mixer"}
"""By component, its name in a sentence of the report."""


@dataclass(frozen=True, repr=False)
class DirectAttribution(Result):
    """The direct contribution of each part of a model to the logit difference of each prompt."""

    table: pd.DataFrame
    """A row per example, part and position: `example, component, layer, head, position, contribution` (logits).
    `component` is embed, head, mlp, bias, or mixer (the output of a layer without heads); `layer` and `head` are
    `<NA>` where a row has none or sums over them; `position` is where the logits are read, and, with `by="position"`,
    for a head the position it attends to. If several positions are read, a contribution is its share of their mean.
    With positions by role, `role` names the role, and means are for each role separately."""
    totals: pd.DataFrame
    """A row per example: `example, correct, wrong` (token ids), `logit_difference` (before a soft cap)."""
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Summarize each part over examples: mean, bootstrap interval, and sign-flip permutation p of a zero mean.

        Returns:
            A row per part (and role), the largest first: its `component, layer, head`, then `examples, mean, low, high,
            p_value`.
        """
        named = [*self._roles, *BY["head"]]
        each = self.table.groupby(["example", *named], sort=False, dropna=False)["contribution"].sum().reset_index()
        return strongest_first(summarize(each, named, "contribution"))

    @property
    def _roles(self) -> list[str]:
        """The column that names the role of positions, if there is one."""
        return [name for name in ("role",) if name in self.table.columns]

    def report(self) -> list[str]:
        """Return the parts that contribute most to the correct token and to the wrong one, for each role if any."""
        if not self._roles:
            return self._findings()
        sentences = []
        for role in self.totals["role"].unique():
            table, totals = (rows[rows["role"] == role].drop(columns="role") for rows in (self.table, self.totals))
            sentences += [f"{role}: {line}" for line in DirectAttribution(table, totals, self.run)._findings()[:3]]
        return sentences

    def _findings(self) -> list[str]:
        parts = whole_summary(self).sort_values("mean", ascending=False)
        totals = self.totals[self.totals["example"].isin(self.table["example"])]
        total, examples = totals["logit_difference"].mean(), len(totals)
        sentences = [
            f"The logit difference is {total:.2f} on average over {examples} prompt{'s' * (examples > 1)}, "
            f"the sum of the direct contributions of {len(parts)} parts."
        ]
        for row, what, sign in ((parts.iloc[0], "correct", 1), (parts.iloc[-1], "wrong", -1)):
            if not sign * row["mean"] > 0:
                sentences.append(f"No part contributes to the {what} token on average.")
                continue
            part, layer = PARTS[row["component"]], row["layer"]
            part += f" of layer {layer}" if pd.notna(layer) else ""
            part = f"Head {layer}.{row['head']}" if pd.notna(row["head"]) else part
            size = interval_text(row, "mean")
            sentences.append(f"{part} contributes most to the {what} token: {size} logits.")
        if examples < 2:
            sentences.append("One prompt has no intervals, and other prompts may differ.")
        return [*sentences, "These are direct effects: what a part does through later parts counts as theirs."]


@checked_call
def direct_logit_attribution(
    model: HookedModel,
    prompts: Prompts,
    *,
    tokens: tuple[Answer, Answer] | Any,
    at: Where = "last",
    by: Literal["head", "layer", "component", "position"] = "head",
    batch_size: int = 16,
    progress: bool = True,
    out: str | Path | None = None,
) -> DirectAttribution:
    """Split the logit difference of prompts into the direct contributions of the parts of the model.

        hw.direct_logit_attribution(model, "The capital of France is", tokens=(" Paris", " Rome"), by="head")

    Contributions are in logits, with the scale of the final norm frozen, and sum to the logit difference (Elhage et al.
    2021).

    Args:
        model: the model.
        prompts: one prompt, several, or token ids.
        tokens: the correct and the wrong token, as texts (mind leading spaces) or ids; each one for all prompts, or one
            per prompt.
        at: the position whose logits are read, as in `hw.patch`; for several, their mean. With roles, each role is read
            separately, and a column `role` names it.
        by: what a row of the table is: a `head` (or MLP, embedding, bias of a layer), all heads of a `layer`, a
            `component` over all layers, or a head and a `position` that it attends to.
        batch_size: prompts in one run.

    Raises:
        ModelError: the model's logits are computed by more than its final norm, unembedding and soft cap.
        NumericsError: the contributions do not sum to the logit difference.
    """
    read = read_prompts(model, prompts)
    correct, wrong = _answers(model, tokens, len(read))
    warn_of_missing_spaces(tuple(tokens), [prompt.strings[-1] for prompt in read], model.tokenizer)
    reads = positions_read(at, read, "at")
    # A contribution is its share of the mean over the positions read, for each role separately.
    reads["of"] = reads.groupby(["example", *reads.columns[2:]])["position"].transform("size")
    options = {
        "prompts": [list(prompt.ids) for prompt in read],
        "tokens": [correct.tolist(), wrong.tolist()],
        "positions": reads[["example", "position"]].to_numpy().tolist(),
        "by": by,
        **note_on_chats(prompt.text for prompt in read),
    } | ({"roles": reads["role"].tolist()} if "role" in reads else {})

    def work(run: Run) -> DirectAttribution:
        writer = Contributions(model, read, reads, torch.stack([correct, wrong], 1), by == "position", run.record)
        batches = [range(len(read))[start : start + batch_size] for start in range(0, len(read), batch_size)]
        with run.bar("Attributing", "prompt", len(read)) as bar:
            pieces = list(run.pieces("examples", batches, writer.measure, bar, len))
        contributions, totals = (torch.cat([piece[name] for piece in pieces]) for name in ("contributions", "totals"))
        table = _table(contributions, writer.parts, reads, by)
        if by == "position":
            sources = torch.cat([piece["sources"] for piece in pieces])
            heads = _by_source(sources, reads)
            parts = pd.concat([table[table["component"] != "head"], heads])
            table = parts.sort_values("example", kind="stable", ignore_index=True)
        return DirectAttribution(table, _totals(totals, reads, correct, wrong), run.record)

    name = "direct_logit_attribution"
    return run_or_resume(DirectAttribution, name, model, options, work, out=out, progress=progress)


def _answers(
    model: HookedModel, tokens: object, n_prompts: int
) -> tuple[Int[Tensor, " example"], Int[Tensor, " example"]]:
    """Return the correct and the wrong token id of each prompt."""
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or len(tokens) != 2:
        raise InputError(
            f"tokens={shown(tokens)} must be the pair (correct, wrong), as in tokens=(' Paris', ' Rome'), or two lists "
            "with one entry per prompt, tokens=(right, wrong)."
        )
    if n_prompts == 2 and isinstance(tokens, list) and all(isinstance(one, tuple) and len(one) == 2 for one in tokens):
        first, second = ([one[i] for one in tokens] for i in range(2))
        raise InputError(
            f"tokens={shown(tokens)} has two meanings for 2 prompts. A pair by prompt: tokens=({first}, {second}). "
            f"The correct tokens, then the wrong ones: tokens=({list(tokens[0])}, {list(tokens[1])})."
        )
    correct, wrong = (answer_ids(token, model.tokenizer, n_prompts, model.shape.d_vocab) for token in tokens)
    same = (correct == wrong).nonzero().flatten().tolist()
    if same:
        raise InputError(f"The correct and the wrong token of prompt {same[0]} are the same: their difference is 0.")
    return correct, wrong


def _table(
    contributions: Float[Tensor, "row part"], parts: Sequence[Part], reads: pd.DataFrame, by: str
) -> pd.DataFrame:
    """Return the contributions as rows, without biases that are 0 everywhere (because the model lacks them)."""
    shares = contributions.numpy() / reads[["of"]].to_numpy()
    present = [p for p, (component, *_) in enumerate(parts) if component != "bias" or np.any(shares[:, p])]
    n_rows, each = len(shares), reads.loc[reads.index.repeat(len(present))].reset_index(drop=True)
    component, layer, head = zip(*(parts[p] for p in present), strict=True)
    table = pd.DataFrame(
        {
            "example": each["example"],
            "component": component * n_rows,
            "layer": pd.array(layer * n_rows, dtype="Int64"),
            "head": pd.array(head * n_rows, dtype="Int64"),
            "position": each["position"],
            **({"role": each["role"]} if "role" in each else {}),
            "contribution": shares[:, present].flatten(),
        }
    )
    if by in ("head", "position"):
        return table
    keys = ["example", *BY[by], *(["role"] if "role" in each else []), "position"]
    # dropna=False, because rows without a layer or head are parts too.
    summed = table.groupby(keys, sort=False, dropna=False)["contribution"].sum().reset_index()
    return summed.reindex(columns=table.columns).astype({"layer": "Int64", "head": "Int64"})


def _by_source(sources: Float[Tensor, "row layer head key"], reads: pd.DataFrame) -> pd.DataFrame:
    """Return each head's contributions by source position, up to the position read."""
    tables = []
    for _, spot in reads.groupby([name for name in ("example", "role") if name in reads], sort=False):
        mean = sources[spot.index.tolist(), :, :, : spot["position"].max() + 1].sum(0).numpy() / len(spot)
        layer, head, position = (index.reshape(-1) for index in np.indices(mean.shape))
        found = {"example": spot["example"].iloc[0], "component": "head", "layer": pd.array(layer, dtype="Int64")}
        found |= {"head": pd.array(head, dtype="Int64"), "position": position}
        found |= {"role": spot["role"].iloc[0]} if "role" in spot else {}
        tables.append(pd.DataFrame(found | {"contribution": mean.reshape(-1)}))
    return pd.concat(tables)


def _totals(totals: Float[Tensor, " row"], reads: pd.DataFrame, correct: Tensor, wrong: Tensor) -> pd.DataFrame:
    """Return the logit difference of each example, the sum of its contributions, as a table."""
    keys = [name for name in ("example", "role") if name in reads]
    means = reads.assign(logit_difference=totals.numpy()).groupby(keys, sort=False)["logit_difference"].mean()
    table = means.reset_index()
    examples = table["example"].tolist()
    table.insert(1, "correct", correct[examples].tolist())
    table.insert(2, "wrong", wrong[examples].tolist())
    return table


Part: TypeAlias = tuple[str, int | None, int | None]
"""Component, layer, head."""


class Contributions:
    """Measures the direct contributions of the parts of a model to the logit difference of prompts."""

    def __init__(
        self,
        model: HookedModel,
        prompts: Sequence[Prompt],
        reads: pd.DataFrame,
        tokens: Int[Tensor, "example 2"],
        by_source: bool,
        record: RunRecord,
    ):
        self.by_source = by_source
        self.model, self.prompts, self.reads, self.tokens = model, prompts, reads, tokens
        self.head: UnembeddingHead = unembedding_head(model, record)[1]
        self.norm: Norm = final_norm(model)
        self.weights = LoadedWeights(model, record.fingerprint)  # for all layers, because it compares them with one run
        n_layers, n_heads = model.shape.n_layers, model.shape.n_heads
        self.attended = SITES["z"].among(range(n_layers), model)
        self.parts: list[Part] = [("embed", None, None)]
        for layer in range(n_layers):
            heads: list[Part] = [("head", layer, head) for head in range(n_heads)]
            self.parts += [*heads, ("bias", layer, None)] if layer in self.attended else [("mixer", layer, None)]
            self.parts.append(("mlp", layer, None))
        self.parts.append(("bias", None, None))

    @torch.inference_mode()
    def measure(self, examples: range) -> dict[str, Tensor]:
        """Return the contributions, `row part`, and their sums; a row is a position read in an example."""
        reads = self.reads[self.reads["example"].isin(examples)]
        recorded = self._run(examples, reads)
        final = recorded[SITES["resid_post"].hook_name(self.model.shape.n_layers - 1)]
        tokens = to_device(self.tokens[reads["example"].tolist()], self.head.W_U.device)
        # Columns are selected before the cast: W_U in float32 would take twice the memory of a bfloat16 model's W_U.
        wanted, unwanted = (self.head.W_U[:, ids].T.float() for ids in tokens.unbind(1))
        written = (wanted - unwanted).to(self.norm.gain.device)
        constant = torch.zeros(len(written), device=written.device)
        if self.head.bias is not None:
            constant = (self.head.bias[tokens[:, 0]] - self.head.bias[tokens[:, 1]]).float().to(written.device)
        total = (self.norm(final) * written).sum(-1) + constant
        if self.norm.bias is not None:
            constant = constant + written @ self.norm.bias
        # One direction for all parts: each part costs one dot product, and none goes through the norm.
        direction = self.norm.pulled_back(final, written)
        columns = [_dot(recorded[SITES["resid_pre"].hook_name(0)], direction)[:, None]]
        sources = []
        for layer in range(self.model.shape.n_layers):
            of_layer, of_sources = self._of_layer(layer, recorded, direction)
            columns += of_layer
            if of_sources is not None:
                sources.append(of_sources)
        columns.append(constant.double()[:, None])
        contributions = torch.cat([one.to(constant.device) for one in columns], 1).cpu()
        if sources:
            split = torch.stack([part.sum(-1) for part in sources], 1).flatten(1)
            contributions[:, [part[0] == "head" for part in self.parts]] = split
        self._refuse_what_does_not_sum(contributions, total.double().cpu(), reads)
        found = {"contributions": contributions, "totals": total.double().cpu()}
        return found | ({"sources": torch.stack(sources, 1)} if sources else {})

    def _run(self, examples: range, reads: pd.DataFrame) -> dict[str, Tensor]:
        """Run some prompts; return the needed activations by hook name, `row ...` at the positions read."""
        n_layers = self.model.shape.n_layers
        batch = Batch.of([self.prompts[i].ids for i in examples], pad_id(self.model.tokenizer)).named(examples)
        rows, places = torch.tensor(reads[["example", "position"]].to_numpy()).T
        rows = rows - examples.start
        recorded: dict[str, Tensor] = {}
        sites = [("resid_pre", 0), ("resid_post", n_layers - 1)]
        for layer in range(n_layers):
            read = ("z",) if layer in self.attended else ("resid_pre", "resid_mid")
            sites += [(site, layer) for site in (*read, "mlp_out")]
        names, take = [SITES[site].hook_name(layer) for site, layer in sites], at_tokens(rows, places)
        hooks = keeping(names, recorded, lambda activation: take(activation).float())
        if self.by_source:
            patterns, values = ([SITES[site].hook_name(layer) for layer in self.attended] for site in ("pattern", "v"))
            hooks += keeping(patterns, recorded, lambda pattern: take(pattern.movedim(1, 2)).float())
            # v at all positions, because each may be attended to.
            hooks += keeping(values, recorded, lambda v: v[to_device(rows, v.device)].float())
        self.model.run(batch, hooks, stop_at=n_layers)
        return recorded

    def _of_layer(
        self, layer: int, recorded: dict[str, Tensor], direction: Tensor
    ) -> tuple[list[Float[Tensor, "row part"]], Float[Tensor, "row head key"] | None]:
        """Return the contributions of a layer's heads (or mixer), attention bias and MLP; if requested, by source."""
        mlp = _dot(recorded[SITES["mlp_out"].hook_name(layer)], direction)[:, None]
        if layer not in self.attended:
            before, middle = (recorded[SITES[site].hook_name(layer)] for site in ("resid_pre", "resid_mid"))
            return [_dot(middle - before, direction)[:, None], mlp], None
        factors, post_norm = self.weights.layer(layer), attention_post_norm(self.model, layer)
        z = recorded[SITES["z"].hook_name(layer)].to(factors.W_O)
        summed = torch.einsum("rhk,hkd->rd", z, factors.W_O)
        if factors.b_O is not None:
            summed = summed + factors.b_O
        # Pulled back through the norm after attention, at its recorded scale.
        along = direction if post_norm is None else post_norm.pulled_back(summed, direction)
        along = residual_scale(self.model) * along.to(summed)
        heads = torch.einsum("rhk,hkd,rd->rh", z, factors.W_O, along)
        constant = z.new_zeros(len(z)) if factors.b_O is None else _dot(factors.b_O, along)
        if post_norm is not None and post_norm.bias is not None:
            constant = constant + _dot(post_norm.bias, direction).to(constant)
        columns = [heads.double(), constant.double()[:, None], mlp]
        if not self.by_source:
            return columns, None
        pattern, v = (recorded[SITES[site].hook_name(layer)].to(factors.W_O) for site in ("pattern", "v"))
        read = torch.einsum("hkd,rd->rhk", factors.W_O, along)
        # The hook of v has key-value heads only.
        values = v.repeat_interleave(len(factors.W_O) // v.shape[2], dim=2)
        shares = pattern.double() * torch.einsum("rshk,rhk->rhs", values.double(), read.double())
        longest = max(len(prompt) for prompt in self.prompts)
        return columns, torch.nn.functional.pad(shares.cpu(), (0, longest - shares.shape[-1]))

    def _refuse_what_does_not_sum(self, contributions: Tensor, total: Tensor, reads: pd.DataFrame) -> None:
        """Check that contributions sum to the logit difference, up to the rounding of the model's dtype."""
        sums = contributions.sum(1)
        # Relative to the parts and not to their sum, which cancels: a part's rounding error scales with its own size.
        rounding = max(1e-5, 16 * torch.finfo(self.model.dtype).eps) * (1 + contributions.abs().sum(1))
        wrong = ((sums - total).abs() > rounding).nonzero().flatten().tolist()
        if wrong:
            example = reads["example"].iloc[wrong[0]]
            raise NumericsError(
                f"The contributions of example {example} sum to {float(sums[wrong[0]]):.4g}, but its logit difference "
                f"is {float(total[wrong[0]]):.4g}: {self.model.shape.architecture} adds something to its residual "
                "stream that is neither embedding, head, MLP nor bias, a hook edits it on the way, or the weights are "
                "not those that it computes with."
            )


def _dot(a: Tensor, b: Tensor) -> Float[Tensor, " row"]:
    """Return the dot product along the last axis, in float64."""
    # Terms of both signs nearly cancel, which would cost float32 several digits.
    return (a.to(b.device).double() * b.double()).sum(-1)
