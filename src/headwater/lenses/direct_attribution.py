"""Direct logit attribution: what each head, MLP, embedding and bias writes straight into a logit difference.

Elhage et al. 2021; Wang et al. 2022 (heads that move names write the logit difference). The residual stream after the
last block is a sum: the embedding, what every head and every MLP added, and the attention's biases. With the scale of
the final norm held as it was in this run, the logit difference is a sum over the same parts.

1. One run of the prompts keeps, at the positions read, the embedding, z of every head, what attention and MLP add, and
   the residual stream after the last block.
2. The direction w = W_U[correct] - W_U[wrong] is pulled back through the final norm at its recorded scale.
3. A part contributes its dot product with that direction. A head's z W_O first goes through the norm after the
   attention, where there is one (Gemma), at that norm's recorded scale.
   A layer without heads (recurrent, convolution) has one part in their place, `mixer`: resid_mid - resid_pre.
4. What depends on no input is `bias`: b_O of each layer, and, without a layer, the final norm's and the unembedding's.
5. By position, a head's contribution is split over what it attends to: z = Σ pattern[s] v[s], so that the source s has
   the share pattern[s] v[s] W_O. Embeddings, MLPs and biases are those of the position that is read.
6. The contributions of an example must sum to its logit difference; checked at every call.

Where the architecture caps its logits (Gemma 2), they sum to the difference before the cap. The weights stay as the
checkpoint has them: nothing is folded, and nothing needs to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.lenses.contributions import Contributions, Part
from headwater.models.hints import warn_of_missing_spaces
from headwater.models.hooked import HookedModel, check_model
from headwater.models.positions import Prompt, Where, positions_of, roles_of
from headwater.models.tokens import note_on_chats
from headwater.options import checked_count, checked_name, shown
from headwater.patching.metrics import Answer, answer_ids
from headwater.patching.prompts import Prompts, read_prompts
from headwater.patching.summaries import strongest_first, summarize
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.figure_options import Size
from headwater.runs.findings import with_interval
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, whole_summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BY = {
    "head": ["component", "layer", "head"],
    "layer": ["component", "layer"],
    "component": ["component"],
    "position": ["component", "layer", "head"],
}
"""What a row of the table is, and the columns that name it. By position it is a head and a source, too."""


@dataclass(frozen=True, repr=False)
class DirectAttribution(Result):
    """What each part of a model writes into the logit difference of each prompt."""

    table: pd.DataFrame
    """A row per example, part and position: `example, component, layer, head, position, contribution` (logits).
    `component` is embed, head, mlp, bias, or mixer (what a layer without heads adds in their place); `layer` and
    `head` are `<NA>` where a row is of none or of all; `position`
    is where the logits are read, and with `by="position"` of a head where it attends to. With several positions read a
    contribution is its share of their mean. Where positions are named by role, `role` says which, and
    means are of each role by itself."""
    totals: pd.DataFrame
    """A row per example: `example, correct, wrong` (token ids), `logit_difference` (before a soft cap)."""
    run: RunRecord

    def summary(self, *, level: float = 0.95, seed: int = 0) -> pd.DataFrame:
        """Summarize each part over examples: mean, bootstrap interval, and sign-flip permutation p of a zero mean.

        Returns:
            A row per part (and role), the largest first: its `component, layer, head`, then `examples, mean, low, high,
            p_value`.
        """
        named = [*self._roles, *BY["head"]]
        each = self.table.groupby(["example", *named], sort=False, dropna=False)["contribution"].sum().reset_index()
        return strongest_first(summarize(each, named, "contribution", level, seed))

    @property
    def _roles(self) -> list[str]:
        """The column that says what positions are, where there is one."""
        return [name for name in ("role",) if name in self.table.columns]

    def report(self) -> list[str]:
        """Return the parts that write most for the correct token and for the wrong one; by role, of each role."""
        if not self._roles:
            return self._findings()
        sentences = []
        for role in self.totals["role"].unique():
            table, totals = (rows[rows["role"] == role].drop(columns="role") for rows in (self.table, self.totals))
            sentences += [f"{role}: {line}" for line in DirectAttribution(table, totals, self.run)._findings()[:3]]
        return sentences

    def _findings(self) -> list[str]:
        parts = whole_summary(self).sort_values("mean", ascending=False)
        total, examples = self.totals["logit_difference"].mean(), len(self.totals)
        sentences = [
            f"The logit difference is {total:.2f} on average over {examples} prompt{'s' * (examples > 1)}: the sum of "
            f"what {len(parts)} parts write."
        ]
        for row, what in ((parts.iloc[0], "correct"), (parts.iloc[-1], "wrong")):
            part = f"head {row['head']}" if pd.notna(row["head"]) else str(row["component"])
            part += f" of layer {row['layer']}" if pd.notna(row["layer"]) else ""
            size = with_interval(row["mean"], row["low"], row["high"])
            sentences.append(f"Most for the {what} token writes {part}: {size} logits.")
        if examples < 2:
            sentences.append("One prompt has no intervals, and says nothing of others.")
        return [*sentences, "What a part does through later parts counts as theirs: this is what each writes itself."]

    def plot(self, ax: Axes | None = None, *, title: str | None = None, figsize: Size | None = None) -> Axes | Figure:
        """Draw the mean contribution of every head and MLP as a map, or of layers or components as bars."""
        return self._drawn(ax, title, figsize)


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
    """Split the logit difference of prompts into what each part of the model writes into it.

    Contributions are in logits, with the scale of the final norm held as it was, and sum to the logit difference
    (Elhage et al. 2021).

    Args:
        model: the model.
        prompts: one prompt, several, or token ids.
        tokens: the correct and the wrong token, as texts (mind leading spaces) or ids; each one for all prompts, or one
            per prompt.
        at: the position whose logits are read, as in `hw.patch`; of several, the mean. By role, of each role by itself,
            in a column `role`.
        by: a row of the table is a `head` (or MLP, embedding, bias of a layer), a `layer`'s heads together, a
            `component` over all layers, or a head and a `position` that it attends to.
        batch_size: prompts in one run.
        progress: show a bar.
        out: a folder for the result. An interrupted run, repeated with it, continues.

    Raises:
        InputError: a prompt, token, position or option cannot be used.
        ModelError: the model's logits are not its final norm, unembedding and soft cap alone.
        NumericsError: the contributions do not sum to the logit difference.
    """
    check_model(model)
    checked_name("by", by, tuple(BY))
    batch_size = checked_count("batch_size", batch_size)
    read = read_prompts(model, prompts)
    correct, wrong = _answers(model, tokens, len(read))
    warn_of_missing_spaces(tuple(tokens), [prompt.strings[-1] for prompt in read], model.tokenizer)
    spots = _spots(at, read)
    where: list[tuple[int, ...]] = [()] * len(read)
    for spot in spots:
        where[spot.example] += spot.places
    options = {
        "prompts": [list(prompt.ids) for prompt in read],
        "tokens": [correct.tolist(), wrong.tolist()],
        "positions": [list(places) for places in where],
        "by": by,
        **note_on_chats(prompt.text for prompt in read),
    } | ({"roles": [[spot.role, list(spot.places)] for spot in spots]} if isinstance(at, Mapping) else {})

    def work(run: Run) -> DirectAttribution:
        writer = Contributions(model, read, where, torch.stack([correct, wrong], 1), by == "position")
        batches = [range(len(read))[start : start + batch_size] for start in range(0, len(read), batch_size)]
        with run.bar("prompts", "prompt", len(read)) as bar:
            pieces = list(run.pieces("examples", batches, writer.measure, bar, len))
        contributions, totals = (torch.cat([piece[name] for piece in pieces]) for name in ("contributions", "totals"))
        if by == "position":
            sources = torch.cat([piece["sources"] for piece in pieces])
            table = _by_source(sources, writer.parts, spots, contributions)
        else:
            table = _table(contributions, writer.parts, spots, by)
        return DirectAttribution(table, _totals(totals, spots, correct, wrong), run.record)

    name = "direct_logit_attribution"
    return run_or_resume(DirectAttribution, name, model, options, work, out=out, progress=progress)


class _Spot(NamedTuple):
    """Positions of an example whose mean is one: those of a role, or all that are read."""

    example: int
    role: str | None
    places: tuple[int, ...]


def _spots(at: object, prompts: Sequence[Prompt]) -> list[_Spot]:
    """Return what is read of each prompt, role by role."""
    n = len(prompts)
    if not isinstance(at, Mapping):
        return [_Spot(i, None, positions_of(at, prompt, i, n)) for i, prompt in enumerate(prompts)]
    by_role = [roles_of(at, prompt, i, n) for i, prompt in enumerate(prompts)]
    return [_Spot(i, role, places) for i, roles in enumerate(by_role) for role, places in roles.items()]


def _answers(
    model: HookedModel, tokens: object, n_prompts: int
) -> tuple[Int[Tensor, " example"], Int[Tensor, " example"]]:
    """Return the correct and the wrong token id of each prompt."""
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or len(tokens) != 2:
        raise InputError(f"tokens={shown(tokens)} must be the pair (correct, wrong), as in tokens=(' Paris', ' Rome').")
    correct, wrong = (answer_ids(token, model.tokenizer, n_prompts, model.shape.d_vocab) for token in tokens)
    same = (correct == wrong).nonzero().flatten().tolist()
    if same:
        raise InputError(f"The correct and the wrong token of prompt {same[0]} are the same: their difference is 0.")
    return correct, wrong


def _table(
    contributions: Float[Tensor, "row part"], parts: Sequence[Part], spots: Sequence[_Spot], by: str
) -> pd.DataFrame:
    """Lay the contributions out as rows, those that are nowhere but 0 (a bias the model lacks) left out."""
    counts = [len(spot.places) for spot in spots]
    shares = (contributions / torch.tensor(counts).repeat_interleave(torch.tensor(counts))[:, None]).numpy()
    present = [p for p, (component, *_) in enumerate(parts) if component != "bias" or np.any(shares[:, p])]
    n_rows = len(shares)
    table = pd.DataFrame(
        {
            "example": np.repeat(np.repeat([spot.example for spot in spots], counts), len(present)),
            "component": [parts[p][0] for p in present] * n_rows,
            "layer": pd.array([parts[p][1] for p in present] * n_rows, dtype="Int64"),
            "head": pd.array([parts[p][2] for p in present] * n_rows, dtype="Int64"),
            "position": np.repeat([place for spot in spots for place in spot.places], len(present)),
            "contribution": shares[:, present].flatten(),
        }
    )
    roles = ["role"] if spots[0].role is not None else []
    if roles:
        table.insert(5, "role", np.repeat(np.repeat([str(spot.role) for spot in spots], counts), len(present)))
    if by == "head":
        return table
    columns = list(table.columns)
    keys = ["example", *BY[by], *roles, "position"]
    # dropna=False: rows without a layer or head are parts, too.
    table = table.groupby(keys, sort=False, dropna=False)["contribution"].sum().reset_index()
    for name in ("layer", "head"):
        if name not in table:
            table[name] = pd.array([None] * len(table), dtype="Int64")
    return table[columns]


def _by_source(
    sources: Float[Tensor, "row layer head key"],
    parts: Sequence[Part],
    spots: Sequence[_Spot],
    contributions: Float[Tensor, "row part"],
) -> pd.DataFrame:
    """Lay out what each head contributes from each position up to the one read, and the other parts as they are."""
    others = _table(contributions, parts, spots, "head")
    tables, row = [others[others["component"] != "head"]], 0
    for spot in spots:
        length, n_places = max(spot.places) + 1, len(spot.places)
        mean = sources[row : row + n_places, :, :, :length].sum(0).numpy() / n_places
        row += n_places
        layer, head, position = (index.reshape(-1) for index in np.indices(mean.shape))
        found = {"example": spot.example, "component": "head", "layer": pd.array(layer, dtype="Int64")}
        found |= {"head": pd.array(head, dtype="Int64"), "position": position}
        found |= ({} if spot.role is None else {"role": spot.role}) | {"contribution": mean.reshape(-1)}
        tables.append(pd.DataFrame(found))
    return pd.concat(tables).sort_values("example", kind="stable").reset_index(drop=True)


def _totals(totals: Float[Tensor, " row"], spots: Sequence[_Spot], correct: Tensor, wrong: Tensor) -> pd.DataFrame:
    """Lay out what the contributions of each example sum to."""
    means = [part.mean().item() for part in totals.split([len(spot.places) for spot in spots])]
    examples = [spot.example for spot in spots]
    named: dict[str, Any] = {"example": examples, "correct": correct[examples], "wrong": wrong[examples]}
    roles = {"role": [spot.role for spot in spots]} if spots[0].role is not None else {}
    return pd.DataFrame(named | roles | {"logit_difference": means})
