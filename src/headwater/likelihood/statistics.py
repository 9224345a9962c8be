"""The likelihood statistics of every token of a text: log-probability, entropy, variance, top log-probability, rank.

1. Tokenize each text once, with exactly one BOS if the model uses one; offsets map character spans to tokens.
2. A text longer than the context is refused, or cut into windows. Each window ends `stride` tokens after the previous
   window, begins with BOS if the model uses one, and scores only the tokens that no earlier window has scored.
3. Run windows of similar length together, without computing logits, and without wrappers and with fused attention if
   that yields the same result (`headwater.models.bare_model`); keep the residual stream before each scored token.
4. Read it through a lens: the logit lens (the final norm), or a tuned lens and then the final norm (Belrose et al.
   2023). At the final layer the logit lens is the model's output, also in bfloat16 and float16: the input of W_U is in
   the model's dtype (`headwater.models.unembedding`), but the logits are not rounded to it.
5. Compute the statistics in one pass over tiles of the vocabulary (`headwater.kernels.likelihood_blocked`), so the
   logits of the whole vocabulary are never in memory. A CUDA device multiplies float32 states (of a float32 model, or
   after a lens) with all their bits. With precision="high" it uses fewer tensor-core products, and the error of a logit
   is less than 2⁻¹⁸ of Σ |h_i W_i| with float32 weights and 2⁻¹⁶ with bfloat16 ones, of a log-probability twice that.

A token is scored only if a token precedes it. So if a model uses no BOS (GPT-NeoX, Phi, Qwen), a text's first token
is not scored, and a text of one token has nothing to score; such texts stay in `texts` with a note.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.kernels import likelihood_blocked
from headwater.kernels.devices import in_halves, to_device
from headwater.kernels.likelihood import PrecisionName, TokenStatistics, UnembeddingHead
from headwater.lenses.predictions import Layers, Lens, lens_named, open_lens, reader, resolve_layers
from headwater.models.bare_model import residual_streams
from headwater.models.edits import at_tokens
from headwater.models.hooked import HookedModel, warn_of_no_template
from headwater.models.tokens import (
    Batch,
    Chat,
    by_length,
    chats_written,
    encode,
    note_on_chats,
    pad_id,
    refuse_what_has_no_order,
    token_span,
)
from headwater.models.unembedding import unembedding_head
from headwater.options import checked_count, checked_several, is_index, shown, whole_number
from headwater.progress import Bar
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.identity import digest
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, whole_summary

Spans: TypeAlias = tuple[int, int] | Sequence[tuple[int, int]] | None
"""The characters (start, end) of a text whose tokens are scored, or several such pairs; None for all."""

STATISTICS = TokenStatistics._fields
LongName: TypeAlias = Literal["error", "window"]
"""The ways to treat texts that are longer than the context."""
EMPTY = "empty text"
NOT_UNICODE = "not UTF-8"
NOTHING_BEFORE = "one token, and nothing before it: the model wants no BOS"
WINDOWS_PER_PIECE = 256
"""Number of windows that are finished, and saved in `out`, at a time."""


@dataclasses.dataclass(frozen=True, repr=False)
class TextStatistics(Result):
    """The statistics of the scored tokens of texts."""

    returned_by = "hw.token_statistics(...)"

    table: pd.DataFrame
    """A row per scored token: `text` (its index), `position` (in the token sequence, including a BOS), `token`,
    `token_id`, `layer` (whose output was read; absent for `layers="final"`), `log_probability`, `entropy` and
    `top1_log_probability` in nats, `variance` of log p under p in nats², `rank` (0 is the greedy choice)."""
    texts: pd.DataFrame
    """A row per text, scored or not: `text`, `content`, `zlib_bytes` (of the scored span), `tokens` (without BOS),
    `scored`, `windows`, `note` (why nothing could be scored)."""
    run: RunRecord

    def __repr__(self) -> str:
        unscored = int((self.texts["scored"] == 0).sum())
        lost = f", {unscored:,} with nothing to score" if unscored else ""
        return f"TextStatistics({self.run.model}: {len(self.texts):,} texts{lost}; {len(self.table):,} rows)"

    def summary(self) -> pd.DataFrame:
        """Return a row per layer, or one row: numbers of scored `texts` and `tokens`, means, and greedy accuracy.

        `log_probability` and `entropy` are means over tokens in nats, `greedy` the share of tokens of rank 0.
        """
        table = self.table.assign(greedy=self.table["rank"] == 0)
        by_layer = table.groupby(table["layer"] if "layer" in table else np.zeros(len(table), dtype=int))
        counts = by_layer["text"].agg(texts="nunique", tokens="size")
        summary = counts.join(by_layer[["log_probability", "entropy", "greedy"]].mean())
        return summary.rename_axis("layer").reset_index(drop="layer" not in table)

    def report(self) -> list[str]:
        """Report how likely the tokens are for the model, at the last layer read, and what was not scored."""
        scored = int((self.texts["scored"] > 0).sum())
        sentences = [f"{scored:,} of {len(self.texts):,} texts have tokens to score."]
        lost = self.texts.loc[self.texts["scored"] == 0, "note"].value_counts()
        sentences += [f"Not scored: {count:,} ({note})." for note, count in lost.items()]
        for row in whole_summary(self).tail(1).to_dict("records"):
            at = f" at layer {row['layer']}" if "layer" in row else ""
            sentences.append(
                f"The {row['tokens']:,} tokens{at} have a mean log-probability of {row['log_probability']:.2f} nats, "
                f"where tokens sampled from the model would be expected to have {-row['entropy']:.2f}; "
                f"{row['greedy']:.0%} are the model's most likely token."
            )
        return sentences


class _Window(NamedTuple):
    """A part of a text that the model reads at once."""

    text: int
    ids: list[int]
    scored: list[int]
    """Indices into `ids`."""
    shift: int
    """Offset from an index into `ids` to the position in the whole text."""


@checked_call
def token_statistics(
    model: HookedModel,
    texts: str | Iterable[str] | Chat | Sequence[Chat],
    *,
    spans: Sequence[Spans] | None = None,
    layers: Layers = "final",
    lens: Lens = "logit",
    long: LongName = "error",
    stride: int | None = None,
    precision: PrecisionName = "highest",
    batch_size: int = 16,
    progress: bool = True,
    out: str | Path | None = None,
) -> TextStatistics:
    """Return the likelihood statistics of every token of texts, from one forward pass.

    These are each token's log-probability and rank, and the entropy, the variance of the log-probability and the
    largest log-probability of its predicted distribution, in nats (the variance in nats²).

    Args:
        model: the model.
        texts: a text, or texts; a chat, or chats, as for `model.tokenize`.
        spans: for each text the characters (start, end) whose tokens are scored, several such pairs, or None for all. A
            token with characters on both sides of an edge is scored. The model reads the whole text in any case.
        layers: "final", "all", a layer or several. Layer l is read after its block, resid_post.
        lens: how to read layers: "logit", the folder of a tuned lens, a function, or the (A, b) of a tuned lens by
            layer. A mapping may omit the final layer, which is then read by the logit lens.
        long: whether a text longer than the context raises an "error" or is read in windows ("window").
        stride: number of new tokens that each further window scores. Default: half the context.
        precision: how a CUDA device multiplies float32 states with W_U: "highest" with all bits, "high" in fewer
            tensor-core products. It affects float32 models and lenses; otherwise both are the same.
        batch_size: windows in one forward pass. Results do not depend on it.
    """
    refuse_what_has_no_order(texts)
    texts = [texts] if isinstance(texts, str) else checked_several("texts", texts, "a text, or a list of texts")
    texts = chats_written(texts, model.tokenizer)
    spans = None if spans is None else checked_several("spans", spans, "a list with (start, end) or None for each text")
    chosen = resolve_layers(layers, model.shape.n_layers)
    lens = open_lens(lens, model.shape.n_layers, model.shape.d_model)
    read = reader(lens, chosen, model.shape.n_layers)
    options = {"texts": digest([str(text) for text in texts]), "count": len(texts), "spans": spans or []}
    options |= {"layers": list(chosen), "lens": lens_named(lens), "long": long, "stride": stride}
    options |= {"precision": precision, "layer_column": layers != "final", **note_on_chats(texts)}

    def work(run: Run) -> TextStatistics:
        n_ctx = model.shape.n_ctx
        step = max(1, n_ctx // 2) if stride is None else checked_count("stride", stride, most=n_ctx - 1)
        described, windows = _windows(model, texts, spans, long, step)
        parts = [windows[start : start + WINDOWS_PER_PIECE] for start in range(0, len(windows), WINDOWS_PER_PIECE)]
        with run.bar("Scoring", "text", len(windows)) as bar:
            normalise, head = unembedding_head(model, run.record)

            def compute(part: Sequence[_Window]) -> dict[str, Tensor]:
                return _measure_windows(
                    model, part, chosen, lambda h, layer: normalise(read(h, layer)), head, precision, batch_size, bar
                )

            pieces = list(run.pieces("windows", parts, compute, bar, len))
        return TextStatistics(_table(model, pieces, chosen, with_layer=layers != "final"), described, run.record)

    return run_or_resume(TextStatistics, "token_statistics", model, options, work, out=out, progress=progress)


def check_texts(model: HookedModel, texts: Sequence[Any]) -> None:
    """Refuse unscorable inputs: no texts, non-strings, a model without a tokenizer or without causal attention."""
    if model.is_bidirectional:
        raise InputError(
            f"{model.name} has no next-token likelihoods: its attention reads later tokens, so each token is "
            "seen before it is predicted. Score texts with a causal model."
        )
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer: pass tokenizer= to hw.load.")
    if not texts:
        raise InputError("There are no texts to score.")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"Text {index} is a {type(text).__name__}, not a string.")
    warn_of_no_template(model, texts)


def as_unicode(text: str) -> str:
    """Return a text with "?" for each character that UTF-8 cannot encode; only unchanged texts can be scored."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _windows(
    model: HookedModel, texts: Sequence[Any], spans: Sequence[Spans] | None, long: str, stride: int
) -> tuple[pd.DataFrame, list[_Window]]:
    """Tokenize every text and cut it into windows; also describe texts without anything to score."""
    check_texts(model, texts)
    if spans is not None and len(spans) != len(texts):
        raise InputError(f"{len(spans)} spans were passed for {len(texts)} texts; pass one span or None per text.")
    described, windows = [], []
    for index, text in enumerate(texts):
        own = _checked_spans(None if spans is None else spans[index], text, index)
        content = as_unicode(text)
        ids, positions = scored_tokens(model, text, own, index)
        cut = _cut(model, index, ids, positions, long, stride)
        n_tokens = len(ids) - _begun(model, ids)
        note = ""
        if not positions:
            note = NOT_UNICODE if content != text else NOTHING_BEFORE if n_tokens else EMPTY
        scored_text = content[own[0][0] : own[-1][1]] if own else content
        described.append(
            {
                "text": index,
                "content": content,
                # Only from the first scored character to the last; otherwise the ratio would mix two lengths.
                "zlib_bytes": len(zlib.compress(scored_text.encode("utf-8"))),
                "tokens": n_tokens,
                "scored": len(positions),
                "windows": len(cut),
                "note": note,
            }
        )
        windows += cut
    return pd.DataFrame({name: [one[name] for one in described] for name in described[0]}), windows


def scored_tokens(
    model: HookedModel, text: str, spans: Sequence[tuple[int, int]], index: int
) -> tuple[list[int], list[int]]:
    """Return a text's token ids, and the indices of tokens to score: in the spans (if any), after the BOS."""
    assert model.tokenizer is not None
    # Half a character cannot be encoded as UTF-8; scored as "?" it would be a different text.
    if not text or as_unicode(text) != text:
        return [], []
    ids, offsets = encode(model.tokenizer, text, model.bos)
    positions: Iterable[int] = range(len(ids))
    if spans:
        if offsets is None:
            raise InputError(
                "Spans need a fast tokenizer, which reports the characters of each token; this one does not."
            )
        try:
            positions = sorted({position for span in spans for position in token_span(offsets, *span)})
        except InputError as error:
            raise InputError(f"Text {index}: {error}") from None
    outside = [token for token in ids if not 0 <= token < model.shape.d_vocab]
    if outside:
        raise InputError(
            f"Text {index} has the token {outside[0]}, outside the model's vocabulary of {model.shape.d_vocab}."
        )
    first = max(1, _begun(model, ids))
    return ids, [place for place in positions if place >= first]


def _begun(model: HookedModel, ids: list[int]) -> int:
    """Return the number of BOS ids at the beginning of a text."""
    return len(model.bos) if ids[: len(model.bos)] == list(model.bos) else 0


def _cut(model: HookedModel, index: int, ids: list[int], positions: list[int], long: str, stride: int) -> list[_Window]:
    """Cut a text into windows; each scores the `positions` that no earlier window has reached."""
    n_ctx = model.shape.n_ctx
    if not positions:
        return []
    if len(ids) <= n_ctx:
        return [_Window(index, ids, positions, shift=0)]
    if long == "error":
        raise InputError(
            f"Text {index} has {len(ids):,} tokens; the model reads at most {n_ctx:,}. Shorten it, or pass "
            "long='window' to read it in windows."
        )
    # Each window begins with BOS like a text, because without it the first tokens of a window are off.
    bos = ids[: _begun(model, ids)]
    ends = [n_ctx, *range(n_ctx + stride, len(ids), stride), len(ids)]
    windows = []
    for reached, end in zip([0, *ends], ends, strict=False):
        scored = [place for place in positions if reached <= place < end]
        start = end - (n_ctx - len(bos))
        shift = start - len(bos)
        # A window that scores nothing (a span elsewhere) is not run.
        if scored:
            windows.append(_Window(index, bos + ids[start:end], [place - shift for place in scored], shift))
    return windows


@torch.inference_mode()
def _measure_windows(
    model: HookedModel,
    windows: Sequence[_Window],
    layers: Sequence[int],
    head_input: Callable[[Tensor, int], Tensor],
    head: UnembeddingHead,
    precision: PrecisionName,
    batch_size: int,
    bar: Bar,
) -> dict[str, Tensor]:
    """Measure windows, those of similar length together: `layer token` for each statistic, `token` for the rest."""
    pad, parts = pad_id(model.tokenizer), []

    def run(group: Sequence[_Window]) -> None:
        batch = Batch.of([window.ids for window in group], pad).named(window.text for window in group)
        rows, columns = torch.tensor([(row, place) for row, window in enumerate(group) for place in window.scored]).T
        # A token is predicted from the state one column before it.
        residuals = residual_streams(model, batch, layers, at_tokens(rows, columns - 1))
        token_ids = target = batch.tokens[rows, columns]
        by_layer = []
        for layer in layers:
            # Popped, to free a layer's states as soon as they are read.
            hidden = head_input(residuals.pop(layer), layer)
            target = to_device(target, hidden.device)
            by_layer.append(likelihood_blocked.token_statistics(hidden, head, target, precision=precision))
        found = {name: torch.stack([getattr(one, name).cpu() for one in by_layer]) for name in STATISTICS}
        text, shift = (torch.tensor([getattr(w, name) for w in group])[rows] for name in ("text", "shift"))
        parts.append(found | {"text": text, "position": columns + shift, "token_id": token_ids})
        bar.update(len(group))

    for rows in by_length([len(window.ids) for window in windows], batch_size):
        in_halves([windows[row] for row in rows], run)
    return {name: torch.cat([part[name] for part in parts], dim=-1) for name in parts[0]}


def _table(
    model: HookedModel, pieces: Sequence[Mapping[str, Tensor]], layers: Sequence[int], with_layer: bool
) -> pd.DataFrame:
    """Return the table of all pieces, in the order of texts, layers and positions."""
    names = ["text", "position", "token", "token_id", *(["layer"] if with_layer else []), *STATISTICS]
    if not pieces:
        return pd.DataFrame({name: [] for name in names})
    whole = {name: torch.cat([piece[name] for piece in pieces], dim=-1).numpy() for name in pieces[0]}
    columns = {name: np.tile(whole[name], len(layers)) for name in ("text", "position", "token_id")}
    columns["layer"] = np.repeat(layers, len(whole["text"]))
    columns |= {name: whole[name].reshape(-1) for name in STATISTICS}
    used = np.unique(whole["token_id"])
    strings = np.array(model.token_strings(used.tolist()), dtype=object)
    columns["token"] = strings[np.searchsorted(used, columns["token_id"])]
    order = np.lexsort((columns["position"], columns["layer"], columns["text"]))
    return pd.DataFrame({name: columns[name][order] for name in names})


def _checked_spans(spans: Any, text: str, index: int) -> list[tuple[int, int]]:
    """Return the spans of a text as a list, in the order of the text; an empty one for the whole text."""
    if spans is None:
        return []
    try:
        listed = [spans] if is_index(next(iter(spans), None)) else spans
        pairs = sorted((whole_number(start), whole_number(end)) for start, end in listed)
        if pairs and all(0 <= start < end <= len(text) for start, end in pairs):
            return pairs
    except (TypeError, ValueError):
        pass
    within = f"a pair (start, end) within its {len(text)} characters, start before end, or several"
    raise InputError(f"The span {shown(spans)} of text {index} is not {within}.")
