"""Score a file of texts, a few hundred at a time: finished scores are saved, and memory holds only scores.

The file name's extension determines the format: `.jsonl` has a JSON object per line with the text in one of its fields,
`.csv` and `.tsv` have a column of texts, any other file has a text per line; other tables and compressed files are
refused. Rows that cannot be scored keep their place, with a note that says why: empty, not UTF-8, no text in the row,
nothing before the only token.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from headwater.calls import checked_call
from headwater.data.rows import check_readable, read_texts
from headwater.errors import InputError
from headwater.kernels.likelihood import PrecisionName
from headwater.likelihood.formulas import SCORES
from headwater.likelihood.scores import (
    SHARES,
    Counts,
    checked_counts,
    checked_prefix,
    checked_shares,
    column,
    memorization_scores,
    prefixed_statistics,
    score_of,
    score_sentences,
    score_summary,
)
from headwater.likelihood.statistics import (
    EMPTY,
    NOT_UNICODE,
    NOTHING_BEFORE,
    LongName,
    check_texts,
    scored_tokens,
    token_statistics,
)
from headwater.models.gradients import parameter_gradient_norms
from headwater.models.hooked import HookedModel
from headwater.models.tokens import chats_written
from headwater.options import checked_number, checked_path, checked_several, shown
from headwater.progress import progress_bar
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.identity import digest, digest_of_file
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, whole_summary

TEXTS_AT_ONCE = 256
NO_TEXT = "no text in this row"
NOTES = ("", EMPTY, NOT_UNICODE, NOTHING_BEFORE, NO_TEXT)


@dataclasses.dataclass(frozen=True, repr=False)
class ScoredTexts(Result):
    """The scores of a file of texts; higher = more likely seen."""

    table: pd.DataFrame
    """A row per text, in the order of the file: `text` (counted from 0), `tokens`, `scored`, `windows`, `note`,
    `zlib_bytes`, `clamped`, then a column per score, such as `loss`, `zlib` and `min_k_0.2`; see
    `headwater.likelihood.formulas`."""
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Return a row per score, at the published K of 0.2 or else at the first K.

        `score, k, texts` (number with a value), `median, lower_quartile, upper_quartile`.
        """
        parts = [
            pd.DataFrame({"score": found[0], "k": found[1], "value": self.table[name]})
            for name in self.table
            if (found := score_of(str(name))) is not None
        ]
        return score_summary(pd.concat(parts))

    def report(self) -> list[str]:
        """Report how many texts have scores and why others have none, the medians, and what these cannot show alone."""
        table, scored = self.table, int((self.table["scored"] > 0).sum())
        notes = table.loc[table["note"] != "", "note"].value_counts()
        return [
            f"{scored:,} of {len(table):,} texts have scores ({table['scored'].sum():,} tokens); "
            f"{(table['windows'] > 1).sum():,} texts were read in windows.",
            *(f"Not scored: {count:,} ({note})." for note, count in notes.items()),
            *score_sentences(whole_summary(self)),
        ]


@checked_call
def score_file(
    model: HookedModel,
    file: str | Path,
    *,
    field: str = "text",
    k: Sequence[float] = SHARES,
    reference: HookedModel | None = None,
    lowercase: bool = False,
    prefix: str | None = None,
    token_counts: Counts | None = None,
    maximum_entropy: float | None = None,
    gradient_norm: bool = False,
    long: LongName = "window",
    stride: int | None = None,
    precision: PrecisionName = "highest",
    batch_size: int = 16,
    progress: bool = True,
    out: str | Path | None = None,
) -> ScoredTexts:
    """Score every text of a file.

    Args:
        model: the model.
        file: a `.jsonl`, `.csv` or `.tsv` file, or a file with a text per line.
        field: the field or column that holds the text.
        k: the shares of lowest tokens.
        reference: another model, for the score `reference`.
        lowercase: also run the model on the lowercased texts, for the score `lowercase`.
        prefix: a text that is known not to have been seen; also run the model on every text after it, for `recall`.
        token_counts: how often each token id occurs in a corpus, for the score `dc_pdd`.
        maximum_entropy: in nats; the score `surp` uses positions with a lower entropy.
        gradient_norm: also compute the gradient of every text's loss, for `grad_norm`: one backward pass per text.
        long: how to treat texts longer than the context: read them in windows ("window"), or raise an "error".
        stride: number of new tokens that each further window scores. Default: half the context.
        precision: how a CUDA device multiplies float32 states with W_U, "highest" or "high"; see `token_statistics`.
        batch_size: texts in one forward pass.
    """
    path = checked_path("file", file)
    check_readable(path, "texts")
    if not isinstance(field, str):
        raise InputError(f"field={shown(field)} must be the name of a field or column, as a string.")
    shares = checked_shares(k)
    if maximum_entropy is not None:
        checked_number("maximum_entropy", maximum_entropy, above=0.0)
    counts = None if token_counts is None else checked_counts(token_counts)
    options: dict[str, Any] = {
        "file": digest_of_file(path), "field": field, "k": shares, "maximum_entropy": maximum_entropy,
        "prefix": None if prefix is None else checked_prefix(prefix),
        "token_counts": None if counts is None else digest(counts),
        "reference": reference, "lowercase": lowercase, "long": long, "stride": stride,
        "gradient_norm": gradient_norm, "precision": precision,
    }  # fmt: skip
    computing: dict[str, Any] = {"precision": precision, "batch_size": batch_size, "progress": False}
    reading: dict[str, Any] = {"long": long, "stride": stride, **computing}

    def columns_of(texts: list[str | None]) -> dict[str, Tensor]:
        contents = [text if text is not None else "" for text in texts]
        stats = token_statistics(model, contents, **reading)
        other = token_statistics(reference, contents, **reading) if reference is not None else None
        lowered = [text.lower() for text in stats.texts["content"]]
        lower = token_statistics(model, lowered, **reading) if lowercase else None
        prefixed = prefixed_statistics(model, contents, prefix, **computing) if prefix else None
        norms = gradient_norms(model, stats.texts["content"], progress=False) if gradient_norm else None
        scores = memorization_scores(
            stats,
            k=shares,
            reference=other,
            lowercased=lower,
            prefixed=prefixed,
            token_counts=counts,
            maximum_entropy=maximum_entropy,
            gradient_norms=norms,
        )
        wide = scores.wide().drop(columns="text")
        wide["note"] = [
            NOTES.index(NO_TEXT if text is None else n) for text, n in zip(texts, wide["note"], strict=True)
        ]
        return {str(name): torch.from_numpy(wide[name].to_numpy(copy=True)) for name in wide}

    def work(run: Run) -> ScoredTexts:
        texts = read_texts(path, field)
        chunks = iter(lambda: list(itertools.islice(texts, TEXTS_AT_ONCE)), [])
        with model.hashed_once(), (reference or model).hashed_once(), run.bar("Scoring", "text") as bar:
            pieces = list(run.pieces("texts", chunks, columns_of, bar, len))
        if not pieces:
            raise InputError(f"{path} contains no texts.")
        columns = {name: torch.cat([piece[name] for piece in pieces]).numpy() for name in pieces[0]}
        # Pieces hold only numbers, so notes are stored as indices into NOTES.
        columns["note"] = np.array(NOTES, dtype=object)[columns["note"]]
        table = pd.DataFrame(columns)
        table.insert(0, "text", range(len(table)))
        first = ["text", "tokens", "scored", "windows", "note", "zlib_bytes", "clamped"]
        scores = [column(name, k) for name in SCORES for k in (sorted(shares) if SCORES[name].takes_k else [math.nan])]
        return ScoredTexts(table[[*first, *(name for name in scores if name in table)]], run.record)

    return run_or_resume(ScoredTexts, "score_file", model, options, work, out=out, progress=progress)


# The gradient norm of a text: how far one training step on it would move the model's parameters.
#
# MIMIR (Duan et al. 2024) after "Pandora's White-Box" (Wang et al., 2402.17012): the mean over the model's parameters,
# as stored in the checkpoint, of the norm of the gradient of the text's mean negative log-likelihood. The published
# norm is the largest entry. Texts that were seen have smaller norms, so the score `grad_norm` is minus the norm.


ORDERS = (1, 2, math.inf)


@checked_call
def gradient_norms(
    model: HookedModel, texts: Iterable[str], *, order: float = math.inf, progress: bool = True
) -> Float[ndarray, " text"]:
    """Return the gradient norm of every text, for the score `grad_norm`; NaN for texts without tokens to score.

    Each text takes a forward and a backward pass. Besides the model, memory holds the activations for the backward pass
    and the gradient of one parameter at a time.

    Args:
        model: the model. For a HookedTransformer the parameters are its own, not those of a checkpoint.
        texts: the texts.
        order: the order of the norm: 1, 2, or infinity for the largest entry.
    """
    if isinstance(order, bool) or order not in ORDERS:
        raise InputError(f"order={shown(order)} is not one of 1, 2, inf.")
    listed = chats_written(checked_several("texts", texts, "a list of texts"), model.tokenizer)
    check_texts(model, listed)
    # Tokenize all texts before the first run, so that a text that is too long is refused at once.
    read = [scored_tokens(model, text, (), index) for index, text in enumerate(listed)]
    for index, (ids, _) in enumerate(read):
        if len(ids) > model.shape.n_ctx:
            raise InputError(
                f"Text {index} has {len(ids):,} tokens; the model reads at most {model.shape.n_ctx:,}, and a gradient "
                "needs the whole text."
            )
    means = np.full(len(listed), np.nan)
    with progress_bar(progress, len(listed), desc="Gradients", unit="text") as bar:
        for index, (ids, scored) in enumerate(read):
            if scored:
                norms = parameter_gradient_norms(model, ids, scored, order)
                means[index] = np.mean(list(norms.values()))
            bar.update(1)
    return means
