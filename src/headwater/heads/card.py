"""A head's card: all results for one head on one page, as text, and as HTML in a notebook.

Words and tokens are untrusted text: HTML escapes them, and both forms spell out unprintable characters.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from headwater.calls import checked_call
from headwater.heads.categories import SAYS, by_sign
from headwater.heads.weight_maps import PIECE, known_tokens, tokens_at_ends
from headwater.models.effective_embedding import EmbeddingName
from headwater.models.part_names import HeadName, head_named
from headwater.models.tokens import token_strings
from headwater.models.weights import WeightSource
from headwater.options import checked_count
from headwater.runs.result import plain_text

NUMBERS = ("score", "expected", "excess", "q_value")
AT_LEAST = 3
"""Number of relations on the card of a head that neither implements nor suppresses any."""
AT_MOST = 15
"""Most relations on the card of a head that implements or suppresses some."""
USE = ("loss", "loss_low", "loss_high", "used")
OF_BEHAVIOUR = ("on", "behaviour", "score", "expected", "excess", "q_value", "called")
"""The columns of a table of behaviours that a card shows."""


@dataclass(frozen=True, eq=False, repr=False)
class HeadCard:
    """The result of `HeadMap.head`; it prints as text, and displays as HTML in a notebook."""

    model: str
    """The model's short name."""
    layer: int
    head: int
    label: str
    """The head's label in the head map."""
    relations: pd.DataFrame
    """A row per relation and sign, rows with a nonempty `says` first, then by excess: `relation, category, says`
    ("implements", "suppresses", "copies", or empty), `sign` ("score" or "suppression"), and its `score, expected,
    excess, q_value`; for a validated map also `loss`, its interval `loss_low, loss_high`, and `used`."""
    writes: pd.DataFrame | None
    """The result of `HeadMap.salient`; None if no sources were requested."""
    behaviour: pd.DataFrame | None
    """The head's rows of the table of behaviours, the strongest first; None if no behaviours were passed."""

    @property
    def title(self) -> str:
        """The head, its model, and its label."""
        return f"Head {self.layer}.{self.head}, {self.model}: {self.label}"

    @property
    def sections(self) -> list[tuple[str, pd.DataFrame]]:
        """The tables on the card, each with its heading, all cells as text."""
        called = int((self.relations["says"] != "").sum())
        heading = "Relations" if called <= AT_MOST else f"Relations, the first {AT_MOST} of {called}"
        tables = [(heading, self.relations.head(min(called, AT_MOST)))]
        if not called:
            tables = [("No relation found; the closest", self.relations.head(AT_LEAST))]
        if self.behaviour is not None:
            tables.append(("Attends to", self.behaviour[list(OF_BEHAVIOUR)]))
        if self.writes is not None:
            tables.append(("Writes most strongly about", _by_source(self.writes)))
        return [(heading, table.map(_cell).astype(object)) for heading, table in tables]

    @property
    def use(self) -> str:
        """Whether the running model uses the head, as text."""
        if "used" not in self.relations:
            return "Whether the running model uses it was not measured; HeadMap.validate measures it."
        called = self.relations[self.relations["says"].isin(list(SAYS.values()))]
        measured = called[called["used"].notna()]
        if called.empty:
            return "It implements or suppresses no relation, so there is no use to test."
        if measured.empty:
            return "The running model was not tested on its relations, or answers none of their items."
        is_used = measured["used"].astype(bool)
        used = ", ".join(measured.loc[is_used, "relation"].map(plain_text))
        others = ", ".join(
            f"{plain_text(row['relation'])} (loss {row['loss']:.2f}, 95 % interval {row['loss_low']:.2f} to "
            f"{row['loss_high']:.2f})"
            for row in measured[~is_used].to_dict("records")
        )
        sentences = [f"Used by the running model for {used}."] if used else []
        return " ".join([*sentences, f"Its use was not shown for {others}."] if others else sentences)

    def __str__(self) -> str:
        parts = [plain_text(self.title), self.use]
        parts += [f"\n{heading}\n{table.to_string(index=False)}" for heading, table in self.sections]
        return "\n".join(parts)

    def __repr__(self) -> str:
        return f"HeadCard({plain_text(self.title)})"

    def _repr_html_(self) -> str:
        with pd.option_context("display.max_colwidth", None):
            tables = [f"<h4>{heading}</h4>{table.to_html(index=False, border=0)}" for heading, table in self.sections]
        return f"<h3>{html.escape(plain_text(self.title))}</h3><p>{html.escape(self.use)}</p>{''.join(tables)}"


def relations_of_head(table: pd.DataFrame, layer: int, head: int) -> pd.DataFrame:
    """Return `HeadCard.relations` from the table of a head map."""
    rows = table[(table["layer"] == layer) & (table["head"] == head)]
    larger = np.where(rows["suppression"] > rows["score"], "suppression", "score")
    found = by_sign(rows.assign(larger=larger))
    copies = found["copying"] & ~found["called"] & (found["sign"] == found["larger"])
    found["says"] = np.where(found["called"], found["sign"].map(SAYS), np.where(copies, "copies", ""))
    use = [name for name in USE if "used" in rows]
    found = found.assign(**{name: found[name].where(found["called"]) for name in use})
    order = np.lexsort((-found["score"], -found["excess"].fillna(-np.inf), found["says"] == ""))
    return found[["relation", "category", "says", "sign", *NUMBERS, *use]].iloc[order].reset_index(drop=True)


def _by_source(writes: pd.DataFrame) -> pd.DataFrame:
    """Return salient operations as a table with a row per source."""
    rows = []
    for (_, source), of_source in writes.groupby(["rank", "source"], sort=False):
        targets = {sign: of_source.loc[of_source["sign"] == sign, "target"] for sign in SIGNS}
        row = {"token": repr(str(source)), "sigma": float(of_source["sigma"].iloc[0])}
        rows.append(row | {sign: ", ".join(map(repr, tokens)) for sign, tokens in targets.items()})
    return pd.DataFrame(rows, columns=["token", "sigma", *SIGNS])


def _cell(value: Any) -> str:
    """Return a cell as text: numbers shortened, missing values as a dash."""
    if isinstance(value, str):
        return plain_text(value)
    if value is None or pd.isna(value):
        return "–"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "<0.001" if 0 < value < 0.0005 else f"{value:.3f}"
    return str(value)


# Salient operations of a head: the tokens for which its output is strongest, and the tokens that it maps them to.
#
# Elhelo & Geva (ACL 2025), in addition to the predefined relations. With x_t the head's input for token t (its
# effective embedding) and W_V, W_O the head's factors:
#
# 1. Every token of the vocabulary gets the gain sigma_t = |x_t W_V W_O| / |x_t|.
# 2. The tokens with the largest gains are the head's salient sources.
# 3. Each source is described by the n largest entries of x_t W_V W_O W_U (tokens that the head writes) and by the n
#    smallest (tokens that it suppresses).


SIGNS = ("writes", "suppresses")
COLUMNS = ("rank", "sigma", "source", "source_id", "sign", "place", "target", "target_id", "logit")
Factors: TypeAlias = tuple[Float[Tensor, "d_model d_head"], Float[Tensor, "d_head d_model"]]
"""A head's W_V and W_O."""


@checked_call
def salient_operations(
    weights: WeightSource,
    heads: Sequence[HeadName],
    *,
    embedding: EmbeddingName = "raw",
    sources: int = 15,
    targets: int = 5,
) -> pd.DataFrame:
    """Return the salient tokens of heads, those with the strongest output, and the tokens that a head maps them to.

    Args:
        weights: the model's parameters; the vocabulary is read once for all heads.
        heads: heads as "9.2" or (9, 2).
        embedding: the input of the heads: "raw", "mlp0", "embed+mlp0" or "layer0".
        sources: number of salient tokens of a head.
        targets: number of written and of suppressed tokens to list for each.

    Returns:
        A row per head, source, sign and place: `layer, head`, `rank` of the source (from 1), `sigma` (the norm of the
        head's output over the norm of its input), `source, source_id`, `sign` ("writes", "suppresses"), `place` (from
        1), `target, target_id`, `logit`.
    """
    sources, targets = checked_count("sources", sources), checked_count("targets", targets)
    places = [head_named(name, None, weights.shape) for name in heads]
    if not places:
        return pd.DataFrame(columns=["layer", "head", *COLUMNS])
    rows = []
    with torch.inference_mode():
        factors = []
        for layer, head in places:
            ov = weights.ov(layer)
            factors.append((ov.W_V[ov.value_head(head)], ov.W_O[head]))
        gains = gains_of_heads(weights, factors, embedding)
        unembedding = weights.unembedding()  # once for all heads, because each call checks it for NaN
        for (layer, head), (W_V, W_O), of_head in zip(places, factors, gains, strict=True):
            n_tokens = len(of_head)
            strongest = of_head.topk(min(sources, n_tokens))
            x = weights.effective_embedding(strongest.indices, embedding)
            logits = (x @ W_V @ W_O @ unembedding)[:, :n_tokens]
            ids = strongest.indices.tolist()
            words, sigmas = token_strings(weights.tokenizer, ids), strongest.values.tolist()
            for rank, of_source in enumerate(logits):
                about = layer, head, rank + 1, sigmas[rank], words[rank], ids[rank]
                ends = tokens_at_ends(weights, of_source, targets)
                rows += [(*about, SIGNS[end], *of_token) for end, *of_token in ends]
    return pd.DataFrame(rows, columns=["layer", "head", *COLUMNS])


def gains_of_heads(
    weights: WeightSource, factors: Sequence[Factors], embedding: str, piece: int = PIECE
) -> list[Float[Tensor, " token"]]:
    """Return sigma_t = |x_t W_V W_O| / |x_t| of every token the tokenizer knows, for each head; 0 where x_t is 0."""
    # |z W_O|² = z (W_O W_Oᵀ) zᵀ needs d_head² numbers per head and no token's output.
    grams = [(W_O @ W_O.T).double() for _, W_O in factors]
    gains: list[list[Tensor]] = [[] for _ in factors]
    every = torch.arange(known_tokens(weights), device=factors[0][0].device if factors else None)
    for tokens in every.split(piece):
        # For all heads at once, because the MLP's output for the vocabulary costs more than the heads.
        x = weights.effective_embedding(tokens, embedding)
        read = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
        for of_head, (W_V, _), gram in zip(gains, factors, grams, strict=True):
            z = (x @ W_V).double()
            # Rounding can make a squared norm near 0 negative.
            written = torch.linalg.vecdot(z @ gram, z).clamp(min=0).sqrt()
            of_head.append(torch.where(read > 0, written / read, 0.0))
    return [torch.cat(of_head).float() for of_head in gains]
