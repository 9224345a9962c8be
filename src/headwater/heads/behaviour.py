"""What each head attends to in forward passes on random tokens and on text, compared with keys drawn at random.

1. On repeated random tokens and on texts: the share of a head's attention on each behaviour's keys, averaged over the
   queries that have such keys; and the expected share for as many keys at shuffled positions (`patterns`).
2. `excess` is the chance-corrected score (score - expected) / (1 - expected). Sequences are the statistical unit: the
   interval is a bootstrap over them, p is that of a mean this far above shuffled positions (`excess_p` in
   `stats.significance`), and q controls false discoveries over heads, behaviours, and both kinds of sequences.
3. A head has a behaviour (`called`) if q is at most 5 % and the excess reaches the threshold. Its label is the one with
   the largest excess; `first_token` only if it has no other, because heads that find nothing rest there.
4. From the parameters: whether the head copies its input, by the eigenvalues of its OV circuit (`patterns`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headwater.calls import checked_call
from headwater.data.rows import read_texts
from headwater.heads import patterns
from headwater.heads.categories import FALSE_DISCOVERY_RATE
from headwater.models.effective_embedding import EmbeddingName, published_embedding
from headwater.models.hooked import HookedModel
from headwater.models.loading import weights_of
from headwater.models.packaged import is_embedded, world_folder
from headwater.models.sites import sites_named
from headwater.models.tokens import Batch, Inputs, by_length, encode
from headwater.options import checked_count, checked_number
from headwater.progress import Bar
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, whole_summary
from headwater.stats.resample import Bootstrap, percentile_interval
from headwater.stats.significance import chance_corrected, excess_p, q_values

NONE = "none"
RESTING = "first_token"
"""The behaviour of heads that find nothing: it is a head's label only if the head has no other behaviour."""
OWN_TEXTS = 64
"""Number of texts from the embedded model's world that are read by default."""
SEQUENCES_PER_PIECE = 64
"""Number of sequences that are finished, and kept in `out`, at a time."""
MOST_NAMED = 5
"""Most heads per behaviour that the report names."""


@dataclass(frozen=True, repr=False)
class AttentionBehaviour(Result):
    """The result of `attention_behaviour`."""

    returned_by = "hw.attention_behaviour(...)"

    table: pd.DataFrame
    """A row per kind of sequences, layer, head and behaviour.

    `on` ("random" tokens, or "text"), `layer, head, behaviour`; `score`, the share of attention on the behaviour's keys
    (0 to 1), with its 95 % interval over sequences, `low, high`; `expected`, that share for as many keys at shuffled
    positions; `excess`, the chance-corrected score; `p_value, q_value` of the score under shuffled positions; `called`,
    whether the head has the behaviour; and `sequences, queries, keys`, the numbers of sequences and queries that have
    such keys, and of these keys. Without such keys all numbers are NaN; p and intervals need two sequences.
    """
    heads: pd.DataFrame
    """A row per layer and head: `behaviours`, a tuple of the head's behaviours, on random tokens or on text, the
    largest excess first; `label`, the first of these other than "first_token", else that, or "none"; `position`, the
    share of the variance of its pre-softmax scores, on random tokens, that the two positions alone explain; `copying`,
    the sum of its OV circuit's eigenvalues over the sum of their sizes, -1 to 1, and `copying_low, copying_high`, the
    bounds within which 95 % of heads with random parameters lie (with `copying=False` these three are NaN)."""
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Return a row per kind of sequences and behaviour: the number of heads that have it, and the strongest head.

        `on, behaviour, heads`, then `layer, head, score, expected, excess` of the head with the largest excess.
        """
        called = self.table.groupby(["on", "behaviour"], sort=False)["called"].sum().astype(int).rename("heads")
        known = self.table[self.table["excess"].notna()]
        best = known.loc[known.groupby(["on", "behaviour"], sort=False)["excess"].idxmax()]
        columns = ["on", "behaviour", "layer", "head", "score", "expected", "excess"]
        return called.reset_index().merge(best[columns], on=["on", "behaviour"])

    def report(self) -> list[str]:
        """Report which behaviours the heads have, the strongest heads, and what could not be measured."""
        sentences = []
        for on, part in whole_summary(self).groupby("on", sort=False):
            called, listed = [row for row in part.to_dict("records") if row["heads"]], []
            for row in called:
                rows = self.table.query("called and on == @on and behaviour == @row['behaviour']")
                rows = rows.sort_values("excess", ascending=False, kind="stable").head(MOST_NAMED)
                heads = ", ".join(f"{one['layer']}.{one['head']}" for one in rows.to_dict("records"))
                more = f" and {row['heads'] - MOST_NAMED} more" if row["heads"] > MOST_NAMED else ""
                # Resting heads are too many to name.
                by_name = "" if row["behaviour"] == RESTING else f" ({heads}{more})"
                listed.append(f"{row['heads']} {words(row['behaviour'])}{by_name}")
            named = ", ".join(listed)
            sentences.append(f"{_where(on)}, heads by behaviour (a head can have several): {named or 'none'}.")
            called = [row for row in called if row["behaviour"] != RESTING]
            if called:
                best = max(called, key=lambda row: row["excess"])
                name = best["behaviour"]
                # A behaviour of a loaded result need not be registered here.
                keys = patterns.BEHAVIOURS[name].says if name in patterns.BEHAVIOURS else words(name)
                sentences.append(
                    f"The strongest is head {best['layer']}.{best['head']}: {best['score']:.0%} of its attention is on "
                    f"{keys}, compared with {best['expected']:.0%} on as many random keys."
                )
        unseen = self.table[self.table["score"].isna()].groupby("on", sort=False)["behaviour"].unique()
        sentences += [
            f"{_where(on)}, {', '.join(map(words, names))} cannot be measured." for on, names in unseen.items()
        ]
        if (self.table["sequences"] == 1).any():
            sentences.append("A single sequence has no interval and no p-value, so no head is classified there.")
        if self.heads["copying"].notna().any():
            above = int((self.heads["copying"] > self.heads["copying_high"]).sum())
            below = int((self.heads["copying"] < self.heads["copying_low"]).sum())
            sentences.append(
                f"By the eigenvalues of their OV circuits, {above} of {len(self.heads)} heads copy what they read and "
                f"{below} suppress it (outside the central 95 % of random heads: by chance, 2.5 % for each)."
            )
        return [*sentences, "Attention to a position does not show that the head moves information from it."]


@checked_call
def attention_behaviour(
    model: HookedModel,
    texts: Inputs | None = None,
    *,
    sequences: int = 32,
    length: int = 24,
    threshold: float = 0.4,
    copying: bool = True,
    embedding: EmbeddingName | None = None,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
    out: str | Path | None = None,
) -> AttentionBehaviour:
    """Score what each head attends to: current, first, previous, delimiter, duplicate, induction or successor tokens.

    The score of a behaviour is the mean attention on its keys. Its excess is (score - expected) / (1 - expected), where
    `expected` is the score of as many keys at shuffled positions.

    Args:
        model: a loaded model.
        texts: texts, or anything else that `model.tokenize` accepts. Default: for the embedded model, texts of its
            world; for other models no texts, only random tokens.
        sequences: number of sequences of random tokens, at most 10,000.
        length: number of random tokens before they repeat; fewer if the vocabulary or the context is small.
        threshold: the smallest chance-corrected score with which a head has a behaviour.
        copying: also compute the eigenvalues of each head's OV circuit.
        embedding: the input of heads from layer 1 on for these: "raw", "mlp0", "embed+mlp0" or "layer0"; default: the
            published one ("raw" without MLPs). It is computed for every token, so "raw" is much cheaper with large
            vocabularies.
        batch_size: sequences in one forward pass; fewer if their patterns would take too much memory.
        seed: seed of the random tokens, the intervals and the random heads.

    Raises:
        ModelError: with `copying`, the model has no factors of single heads.
    """
    sequences = checked_count("sequences", sequences, most=patterns.MOST_SEQUENCES)
    length = checked_count("length", length, least=2)
    threshold = checked_number("threshold", threshold, above=0.0, below=1.0, up_to=True)
    kind = None
    if copying:
        # The requested or published embedding; raw without an MLP.
        published = published_embedding(model.shape) if model.shape.d_mlp else "raw"
        kind = embedding or published
    kinds, (pattern,) = patterns.token_kinds(model), sites_named("pattern", model)
    layers = pattern.among(range(model.shape.n_layers), model)
    read = {"random": Batch.of(patterns.repeated_tokens(model, sequences, length, seed, kinds).tolist(), pad=0)}
    inputs = texts
    if texts is None and is_embedded(model.name):
        lines = read_texts(world_folder() / "texts.jsonl", "text")
        inputs = [encode(model.tokenizer, text, model.bos)[0] for text in islice(lines, OWN_TEXTS) if text]  # type: ignore[arg-type]
    if inputs is not None:
        read["text"] = model.tokenize(inputs)
    at_once = {on: min(batch_size, patterns.rows_at_once(model, batch.tokens.shape[1])) for on, batch in read.items()}
    options = {"texts": [read["text"].tokens, read["text"].lengths] if "text" in read else [], "sequences": sequences}
    options |= {"length": length, "threshold": threshold, "embedding": kind}

    def work(run: Run) -> AttentionBehaviour:
        with run.bar("Reading attention", "text", sum(map(len, read.values()))) as bar:
            sums = {on: _summed(model, read[on], kinds, run, on, at_once[on], bar) for on in read}
        table = pd.concat([scored(on, totals, seed, layers) for on, totals in sums.items()], ignore_index=True)
        q = q_values(table["p_value"].to_numpy())  # over everything there is
        is_called = (q <= FALSE_DISCOVERY_RATE) & (table["excess"] >= threshold)
        counts = table[["sequences", "queries", "keys"]]
        table = table.drop(columns=list(counts)).assign(q_value=q, called=is_called, **counts)
        position = patterns.position_share(*(sums["random"][name] for name in patterns.POSITION))
        columns = dict.fromkeys(("copying", "copying_low", "copying_high"), np.full(position.numel(), np.nan))
        if kind is not None:
            with torch.inference_mode(), run.bar("Eigenvalues of OV", "layer", len(layers)) as bar:
                copied, bounds = patterns.copying_scores(weights_of(model), kind, seed, bar, layers)
            by_head = copied, *(side[:, None].expand_as(copied) for side in bounds.T)
            columns = dict(zip(columns, (values.flatten().numpy() for values in by_head), strict=True))
        heads = named(table).assign(position=position.flatten().numpy(), **columns)
        return AttentionBehaviour(table, heads, run.record)

    return run_or_resume(
        AttentionBehaviour, "attention_behaviour", model, options, work, out=out, seed=seed, progress=progress
    )


def _summed(
    model: HookedModel, batch: Batch, kinds: patterns.TokenKinds, run: Run, on: str, at_once: int, bar: Bar
) -> dict[str, Tensor]:
    """Sum what heads attend to in all sequences, in pieces of some sequences each."""
    # Similar lengths together, because patterns of padding take as much memory as patterns of tokens.
    order = [row for part in by_length(batch.lengths.tolist(), len(batch)) for row in part]
    batch = Batch(batch.tokens[order], batch.mask[order])
    n_bos = len(model.bos)
    said_once = range(n_bos, n_bos + (batch.tokens.shape[1] - n_bos) // 2) if on == "random" else None

    def compute(rows: range) -> dict[str, Tensor]:
        parts = [batch.rows(start, min(start + at_once, rows.stop)) for start in rows[::at_once]]
        return joined([one for part in parts for one in patterns.pattern_sums(model, part, kinds, said_once=said_once)])

    whole = range(len(batch))
    pieces = [whole[start : start + SEQUENCES_PER_PIECE] for start in whole[::SEQUENCES_PER_PIECE]]
    return joined(list(run.pieces(on, pieces, compute, bar, len)))


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Combine the sums of several forward passes: concatenate those by sequence, add up the others."""
    by_name = {name: [part[name] for part in parts] for name in parts[0]}
    return {
        name: sum(some[1:], some[0]) if name in patterns.POSITION else torch.cat(some) for name, some in by_name.items()
    }


def scored(on: str, sums: Mapping[str, Tensor], seed: int, layers: Sequence[int]) -> pd.DataFrame:
    """Return the rows of one kind of sequences: scores, intervals, and expected scores at shuffled positions."""
    _, n_classes, _, n_heads = sums["on"].shape
    draws, parts = Bootstrap.of(range(len(sums["on"])), seed=seed), []
    heads = pd.DataFrame({"layer": np.repeat(layers, n_heads), "head": np.tile(np.arange(n_heads), len(layers))})
    for place, name in enumerate(list(patterns.BEHAVIOURS)[:n_classes]):
        queries = sums["queries"][:, place].double().numpy()
        has, whole = queries > 0, queries.sum() or np.nan
        attended, expected, variance = (sums[one][:, place].flatten(1).double().numpy() for one in patterns.SUMS)
        score, chance = attended.sum(0) / whole, expected.sum(0) / whole
        low, high = percentile_interval(
            draws.ratio_of_units(attended, np.broadcast_to(queries[:, None], attended.shape))
        )
        parts.append(
            heads.assign(
                behaviour=name,
                score=score,
                low=low,
                high=high,
                expected=chance,
                excess=chance_corrected(score, chance),
                p_value=excess_p((attended - expected)[has], variance[has], queries[has]),
                sequences=int(has.sum()),
                queries=int(queries.sum()),
                keys=int(sums["keys"][:, place].sum()),
            )
        )
    table = pd.concat(parts, ignore_index=True).sort_values(["layer", "head"], kind="stable", ignore_index=True)
    table.insert(0, "on", on)
    return table


def named(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per head: all its behaviours, the largest excess first, and its label."""
    strongest = table[table["called"]].sort_values("excess", ascending=False, kind="stable")
    by_head = strongest.groupby(["layer", "head"], sort=False)["behaviour"].unique().to_dict()
    heads = table[["layer", "head"]].drop_duplicates(ignore_index=True)
    behaviours = [tuple(by_head.get(head, ())) for head in heads.itertuples(index=False, name=None)]
    # Heads rest on the first position when they find nothing, so it is the label only if there is no other.
    labels = [next((name for name in found if name != RESTING), found[0] if found else NONE) for found in behaviours]
    return heads.assign(behaviours=pd.Series(behaviours, dtype=object), label=labels)


def words(behaviour: object) -> str:
    """Return a behaviour's name as written in a sentence."""
    return str(behaviour).replace("_", " ")


def _where(on: object) -> str:
    return "On random tokens" if on == "random" else "On text"
