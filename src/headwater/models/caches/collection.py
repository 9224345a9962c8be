"""Collect activations of many texts: only what was asked for, of real tokens alone.

1. Say which activations are meant, and which tokens of each text (`headwater.models.caches.wanted`); estimate what
   they take, and refuse with the figure when the device, or the disk, has not got it.
2. Run the texts in batches of about equal length, so that a long one hardly pads others. Hooks copy the chosen layers,
   heads and positions of the real tokens into their place (`headwater.models.caches.transfer`), so nothing else is
   ever kept. Layers after the last one asked for do not run.
3. With `out=`, the texts of some batches are one part, written to its file as soon as it is whole: memory holds one of
   them, and an interrupted collection goes on behind its last part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from headwater.errors import InputError
from headwater.kernels.devices import to_device, usable_device
from headwater.models.caches.activations import Activation, features_among
from headwater.models.caches.cache import Cache
from headwater.models.caches.sequences import Sequences, starts_of, steps
from headwater.models.caches.transfer import Place, Transfer
from headwater.models.caches.wanted import Wanted, names_asked, wanted_of
from headwater.models.edits import Hook, HookFunction, read_hook
from headwater.models.memory import in_halves, refuse_too_large, refuse_too_large_for_disk
from headwater.models.part_names import Heads
from headwater.models.positions import Where
from headwater.models.sites import Site, SiteName
from headwater.models.tokens import Inputs, by_length, said_of_chats
from headwater.options import checked_count, checked_flag, checked_path
from headwater.progress import Bar
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.shards import Shards

if TYPE_CHECKING:
    from headwater.models.model import Model

PART_BYTES = 2**26
"""A part of a collection in files is no larger, unless it is one text."""
PART_TEXTS = 1024
"""Nor has it more texts: what an interrupt can cost."""
PADDED, PADDING = 1.5, 8
"""A batch's longest text has at most so many times the tokens of its shortest, and so many more."""


def fill_cache(
    model: Model,
    inputs: Inputs,
    *,
    sites: SiteName | str | Site | Iterable[SiteName | str | Site] | None = None,
    residual: bool | str | None = None,
    attention: bool | None = None,
    layers: Sequence[int] | None = None,
    positions: Where | Sequence[int] | None = None,
    heads: Heads = None,
    out: str | Path | None = None,
    batch_size: int = 16,
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> Cache:
    """Run a model and keep activations.

    Args:
        model: the model.
        inputs: anything `model.tokenize` takes.
        sites: what to keep: sites by their short names ("resid_post", "z", "pattern", ...), and any hook by its
            TransformerLens name, in which `*` stands for a part ("blocks.*.mlp.hook_post"); and features
            (`hw.features`, `hw.load_sae`), at their own layer. Default: what `residual` and `attention` say.
        residual: the other way to ask: which residual stream to keep ("resid_pre", "resid_mid" or "resid_post"), or
            another site that has a vector per token ("attn_out", "mlp_out"); True, the default, means "resid_post".
        attention: with it, whether to keep the attention patterns; the default is True.
        layers: default all; negative numbers count from the last.
        positions: which tokens of each text to keep; default all. Numbers, of which -1, or "last", is each text's own
            last token; or a word, a span, a function of the token strings, a list with one of these per text; or
            roles, as {"subject": [" France", " Italy"], "end": "last"} (see `headwater.models.positions`), which the
            column `role` of the frame names. For attention these are the queries; the keys are always all.
        heads: which query heads, by number or by names of heads of one layer, as "9.2"; default all. Sites that have no
            heads are kept whole.
        out: a folder. The numbers are written there part by part, memory stays flat, an interrupted collection that is
            repeated goes on, and several processes share it (`accelerate launch`).
        batch_size: texts in one run.
        device: where the cache lies, without `out`.
        progress: show a bar while several batches run.

    Returns:
        A cache, in float32 (or the model's dtype when that is wider); in files with `out`.

    Raises:
        InputError: an option names nothing of this model, or the cache would not fit.
        RunFolderError: `out` holds another run, or cannot be written; what is finished there is kept.
    """
    progress = checked_flag("progress", progress)
    checked_count("batch_size", batch_size)
    device = usable_device(device)
    if out is not None and device.type != "cpu":
        raise InputError(f"out= keeps the cache in files, which are on no device={str(device)!r}: leave one away.")
    names = names_asked(sites, residual, attention, model)
    wanted = wanted_of(model, inputs, names, layers, positions, heads)
    _refuse_too_large(wanted, device, out)
    options: dict[str, Any] = {
        "tokens": wanted.sequences.tokens,
        "lengths": wanted.sequences.lengths,
        "sites": [dataclasses.asdict(one) for one in wanted.activations],
        "features": [one.described for one in features_among(names)],
        "positions": wanted.chosen,
        "heads": wanted.heads,
        **said_of_chats(wanted.sequences.texts or ()),
    }

    def work(run: Run) -> Cache:
        return _collected(model, wanted, run, batch_size, device)

    shows = progress and len(wanted.sequences) > batch_size
    return run_or_resume(Cache, "cache", model, options, work, out=out, progress=shows)


def _collected(model: Model, wanted: Wanted, run: Run, batch_size: int, device: torch.device) -> Cache:
    """Run all batches, and put what they gave together."""
    lengths = wanted.sequences.lengths.tolist()
    order = [example for batch in by_length(lengths, len(lengths)) for example in batch]
    with run.bar("Caching", " texts", total=len(lengths)) as bar:
        if run.folder is None:
            room = wanted.room(list(range(len(lengths))), device)
            _fill(model, wanted, room, order, batch_size, bar)
            kept = Shards([room])
        else:
            parts = _parts(order, wanted.nbytes().tolist())

            def part(examples: list[int]) -> dict[str, Tensor]:
                made = wanted.room(examples, device)
                _fill(model, wanted, made, examples, batch_size, bar)
                return made

            kept = run.stored("activations", parts, part, bar, len)
    tokens, texts = _described(wanted.sequences, model)
    at = starts_of(wanted.sequences.lengths).repeat_interleave(wanted.counts) + wanted.chosen.positions
    table = tokens[["example", "position", "token"]].iloc[at.numpy()].reset_index(drop=True)
    if wanted.chosen.roles is not None:
        table["role"] = list(wanted.chosen.roles)
    return Cache(
        table=table,
        tokens=tokens,
        texts=texts,
        contents=[_plain(one) for one in wanted.activations],
        asked=None if wanted.chosen.asked is None else list(wanted.chosen.asked),
        kept_layers=list(dict.fromkeys(layer for one in wanted.activations for layer in one.layers)),
        kept_heads=list(wanted.heads),
        n_layers=model.shape.n_layers,
        pad=wanted.sequences.pad,
        activations=kept,
        run=run.record,
    )


def _fill(
    model: Model, wanted: Wanted, room: dict[str, Tensor], examples: Sequence[int], batch_size: int, bar: Bar
) -> None:
    """Run texts in batches, and copy what is kept of them into their place."""
    held, own = room["examples"], {}
    for one in wanted.activations:
        sizes = wanted.numbers(one) if one.has_keys else wanted.counts
        own[one.has_keys, one.size] = starts_of(sizes[held])
    within = torch.empty(len(wanted.counts), dtype=torch.long)
    within[held] = torch.arange(len(held))
    transfer = Transfer()

    def run(rows: Sequence[int]) -> None:
        batch = wanted.sequences.batch(rows)
        taken = _Taken(wanted, torch.tensor(rows), batch.tokens.shape[1], transfer)
        hooks: list[Hook] = []
        for one in wanted.activations:
            starts = own[one.has_keys, one.size][within[taken.rows]]
            for place, layer in enumerate(one.places):
                target = room[one.name][place]
                keep = taken.pattern(one, target, starts) if one.has_keys else taken.vectors(one, target, starts)
                hooks.append((one.hook_name(layer), keep))
        with transfer:
            model.run(batch, hooks, stop_at=wanted.stop_at)
        bar.update(len(rows))

    lengths = wanted.sequences.lengths[examples].tolist()
    for batch in by_length(lengths, batch_size, longest=lambda shortest: PADDED * shortest + PADDING):
        in_halves([examples[row] for row in batch], run)


class _Taken:
    """What is kept of the texts of one batch, as indices into its activations."""

    def __init__(self, wanted: Wanted, rows: Int[Tensor, " row"], width: int, transfer: Transfer):
        self.transfer = transfer
        self.rows, self.counts = rows, wanted.counts[rows]
        self.lengths = wanted.sequences.lengths[rows]
        first = starts_of(wanted.counts)[rows].repeat_interleave(self.counts)
        self.columns = wanted.chosen.positions[first + steps(self.counts)]
        self.row = torch.arange(len(rows)).repeat_interleave(self.counts)
        self.whole = wanted.chosen.everything and bool((self.lengths == width).all())
        self.heads, self.picked, self.readers = wanted.heads, wanted.picked, wanted.readers

    def vectors(self, one: Activation, target: Tensor, starts: Int[Tensor, " row"]) -> HookFunction:
        """Return a hook that copies the chosen tokens of an activation into their rows."""
        where = starts.repeat_interleave(self.counts) + steps(self.counts)

        def place(rows: slice, arrived: Tensor) -> None:
            target[_run_of(where[rows])] = arrived.to(target.device, target.dtype)

        def keep(activation: Tensor, hook: object) -> None:
            row, columns = (to_device(one, activation.device) for one in (self.row, self.columns))
            chosen = activation.flatten(0, 1) if self.whole else activation[row, columns]
            chosen = self.readers[one.name](chosen) if one.name in self.readers else self._heads(one, chosen)
            self.transfer.bring(chosen, target, place)

        return read_hook(keep)

    def pattern(self, one: Activation, target: Tensor, starts: Int[Tensor, " row"]) -> HookFunction:
        """Return a hook that copies the chosen queries, and each text's own keys, into their place."""
        begins, counts, lengths = starts.tolist(), self.counts.tolist(), self.lengths.tolist()

        def keep(activation: Tensor, hook: object) -> None:
            chosen = self._heads(one, activation)
            columns = to_device(self.columns, activation.device).split(counts)
            for row, (begin, queries) in enumerate(zip(begins, columns, strict=True)):
                block = chosen[row] if self.whole else chosen[row][:, queries, : lengths[row]]
                self.transfer.bring(block, target, _into(target[begin : begin + block.numel()].view(block.shape)))

        return read_hook(keep)

    def _heads(self, one: Activation, activation: Tensor) -> Tensor:
        """Pick the heads of an activation whose first axis is texts, or tokens."""
        axis = self.picked.get(one.name)
        if axis is None:
            return activation
        return activation.index_select(axis, to_device(torch.tensor(self.heads), activation.device))


def _into(target: Tensor) -> Place:
    """Return what writes rows into those of a tensor."""

    def place(rows: slice, arrived: Tensor) -> None:
        target[rows].copy_(arrived)

    return place


def _run_of(where: Int[Tensor, " token"]) -> Int[Tensor, " token"] | slice:
    """Return places as a slice where they follow one another: copying into it is quicker."""
    start, stop = int(where[0]) if len(where) else 0, len(where)
    return slice(start, start + stop) if torch.equal(where, torch.arange(start, start + stop)) else where


def _parts(order: Sequence[int], nbytes: Sequence[int]) -> list[list[int]]:
    """Cut texts, shortest first, into parts of limited size."""
    parts: list[list[int]] = [[]]
    held = 0
    for example in order:
        if parts[-1] and (held + nbytes[example] > PART_BYTES or len(parts[-1]) == PART_TEXTS):
            parts.append([])
            held = 0
        parts[-1].append(example)
        held += nbytes[example]
    return parts


def _described(sequences: Sequences, model: Model) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a row per token of every text, and a row per text."""
    ids, back = np.unique(sequences.tokens.numpy(), return_inverse=True)
    words = np.array(model.token_strings(ids.tolist()), dtype=object)
    lengths = sequences.lengths
    spans = sequences.characters
    tokens = pd.DataFrame(
        {
            "example": torch.arange(len(lengths)).repeat_interleave(lengths).numpy(),
            "position": steps(lengths).numpy(),
            "token_id": ids[back].astype(np.int64),
            "token": words[back],
            "start": pd.array(spans[:, 0].numpy() if spans is not None else [None] * len(back), dtype="Int32"),
            "end": pd.array(spans[:, 1].numpy() if spans is not None else [None] * len(back), dtype="Int32"),
        }
    )
    given = sequences.texts if sequences.texts is not None else [None] * len(lengths)
    content = pd.Series(list(given))
    texts = pd.DataFrame({"example": range(len(lengths)), "tokens": lengths.numpy(), "text": content})
    return tokens, texts


def _plain(activation: Activation) -> dict[str, Any]:
    """Return what describes an activation as JSON keeps it."""
    fields = dataclasses.asdict(activation)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def _refuse_too_large(wanted: Wanted, device: torch.device, out: str | Path | None) -> None:
    sizes = wanted.nbytes()
    advice = (
        "Ask for fewer layers, heads or positions, or leave out attention (it grows with the square of the length)."
    )
    if out is None:
        advice += " With out= the cache is kept in files."
        refuse_too_large("This cache", int(sizes.sum()), device, advice)
        return
    refuse_too_large("One text of this cache", int(sizes.max()), device, advice)
    refuse_too_large_for_disk("This cache", int(sizes.sum()), checked_path("out", out), advice)
