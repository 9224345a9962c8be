"""Collect activations of many texts: only what was requested, of real tokens alone.

1. Find which activations are meant, and which tokens of each text; estimate what they take, and refuse with the figure
   when the device, or the disk, has not got it.
2. Run the texts in batches of about equal length, so that a long one hardly pads others. Hooks copy the chosen layers,
   heads and positions of the real tokens into their place, so nothing else is ever kept. Layers after the last
   one requested do not run.
3. With `out=`, the texts of some batches are one part, written to its file as soon as it is whole: memory holds one of
   them, and an interrupted collection goes on after its last part.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from headwater.errors import InputError, did_you_mean
from headwater.kernels.devices import to_device, usable_device
from headwater.models.cache import Cache
from headwater.models.cache_selection import (
    Activation,
    TokenizedTexts,
    activations_named,
    kept_at,
    read_texts,
    rows_of,
    seen_by,
)
from headwater.models.dictionaries import Features
from headwater.models.edits import Hook, read_hook
from headwater.models.memory import in_halves, refuse_too_large, refuse_too_large_for_disk
from headwater.models.part_names import Heads, layers_and_heads
from headwater.models.positions import Where
from headwater.models.sites import SITES, Site, SiteName
from headwater.models.tokens import Inputs, by_length
from headwater.options import checked_count, checked_flag, checked_path, one_or_several, resolve_indices, shown
from headwater.progress import Bar
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.storage import Shards

if TYPE_CHECKING:
    from headwater.models.model import Model


PART_BYTES = 2**26
"""The most bytes in a part of a collection in files, unless it is one text."""
PART_TEXTS = 1024
"""The most texts in it: what an interrupt can cost."""
PADDED, PADDING = 1.5, 8
"""A batch's longest text has at most so many times the tokens of its shortest, and so many more."""
BEFORE_BLOCKS = ("hook_embed", "hook_pos_embed", "embed.", "pos_embed.")


def cache(
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
            TransformerLens name, in which `*` matches a part ("blocks.*.mlp.hook_post"); and features
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
    names = _names(sites, residual, attention, model)
    of_layers, numbers = layers_and_heads(layers, heads, model.shape)
    of_heads = resolve_indices(numbers, model.shape.n_heads, "head")
    texts, on_chats = read_texts(inputs, model)
    fitted = [name.fitted(model) if isinstance(name, Features) else name for name in names]
    features = {name.name: name for name in fitted if isinstance(name, Features)}
    chosen_layers = resolve_indices(of_layers, model.shape.n_layers, "layer")
    activations = activations_named(fitted, chosen_layers, None if heads is None else of_heads, model)
    texts = seen_by(list(features.values()), kept_at(positions, texts))
    nbytes = torch.stack([each.nbytes(texts.counts, texts.lengths) for each in activations]).sum(0)
    advice = (
        "Ask for fewer layers, heads or positions, or leave out attention (it grows with the square of the length)."
    )
    if out is None:
        advice += " With out= the cache is kept in files."
        refuse_too_large("This cache", int(nbytes.sum()), device, advice)
    else:
        refuse_too_large("One text of this cache", int(nbytes.max()), device, advice)
        refuse_too_large_for_disk("This cache", int(nbytes.sum()), checked_path("out", out), advice)
    options: dict[str, Any] = {
        "tokens": texts.tokens["token_id"],
        "lengths": texts.lengths,
        "sites": [each.plain() for each in activations],
        "features": [name.described for name in names if isinstance(name, Features)],
        "positions": {"numbers": texts.asked, "tokens": texts.table.drop(columns="token")},
        "heads": of_heads,
        **on_chats,
    }
    collection = _Collection(model, texts, activations, of_heads, features, batch_size, device)

    def collect(run: Run) -> Cache:
        return Cache(
            **{field.name: getattr(texts, field.name) for field in dataclasses.fields(texts)},
            contents=[each.plain() for each in activations],
            kept_heads=list(of_heads),
            n_layers=model.shape.n_layers,
            activations=collection.run(run, nbytes.tolist()),
            run=run.record,
        )

    shows = progress and len(texts.texts) > batch_size
    return run_or_resume(Cache, "cache", model, options, collect, out=out, progress=shows)


@dataclass(frozen=True)
class _Collection:
    """What is kept of which texts, and how they are run."""

    model: Model
    texts: TokenizedTexts
    activations: list[Activation]
    heads: tuple[int, ...]
    """Of activations that have query heads, those that are kept."""
    features: dict[str, Features]
    """By name, the dictionaries by which activations are read."""
    batch_size: int
    device: torch.device

    def run(self, run: Run, nbytes: list[int]) -> Shards:
        """Run all texts, in parts where the run has a folder; `nbytes` is what each takes."""
        lengths = self.texts.lengths.tolist()
        parts = [list(range(len(lengths)))] if run.folder is None else _parts(lengths, nbytes)
        with run.bar("Caching", " texts", total=len(lengths)) as bar:
            return run.stored("activations", parts, lambda examples: _Part(self, examples).filled(bar), bar, len)

    def read(self, each: Activation, values: Tensor) -> Tensor:
        """Return what is kept of an activation: the features that are read in it, or its chosen heads."""
        if (features := self.features.get(each.name)) is not None:
            values = features.read(values)
            return values if features.chosen is None else values[..., list(features.chosen)]
        axis = each.head_axis
        if axis is None or values.shape[axis] == each.size[axis - 1]:
            return values
        return values.index_select(axis, to_device(torch.tensor(self.heads), values.device))


class _Part:
    """Some texts of a collection, and what is kept of them."""

    def __init__(self, collection: _Collection, examples: Sequence[int]):
        whole, numbers = collection.texts, torch.tensor(examples)
        self._collection, self._examples, self._transfer = collection, numbers, Transfer()
        self._counts, self._lengths = whole.counts[numbers], whole.lengths[numbers]
        self._columns = torch.tensor(whole.table["position"].to_numpy())[rows_of(numbers, whole.counts)]
        self._kept = {"examples": numbers}
        for each in collection.activations:
            shape = len(each.places), int(each.rows(self._counts, self._lengths).sum()), *each.row
            self._kept[each.name] = torch.zeros(shape, dtype=each.torch_dtype, device=collection.device)

    def filled(self, bar: Bar) -> dict[str, Tensor]:
        """Run the texts in batches, and copy what is kept of them into its place."""

        def run(places: list[int]) -> None:
            self._run(torch.tensor(places))
            bar.update(len(places))

        lengths, size = self._lengths.tolist(), self._collection.batch_size
        for places in by_length(lengths, size, longest=lambda shortest: PADDED * shortest + PADDING):
            # A half that runs again writes the same rows again, so nothing has to be undone.
            in_halves(places, run)
        return self._kept

    def _run(self, places: Int[Tensor, " text"]) -> None:
        """Run a batch, whose texts have these places in the part."""
        collection, write = self._collection, self._transfer.write
        batch = collection.texts.batch_of(self._examples[places].tolist())
        counts, rows = self._counts[places], rows_of(places, self._counts)
        row, column = torch.arange(len(batch)).repeat_interleave(counts), self._columns[rows]
        width = batch.tokens.shape[1]
        is_everything = bool((counts == width).all()) and torch.equal(column, torch.arange(width).repeat(len(batch)))

        def write_tokens(each: Activation, target: Tensor, values: Tensor, hook: object) -> None:
            if is_everything:
                values = values.flatten(0, 1)
            else:
                values = values[to_device(row, values.device), to_device(column, values.device)]
            # After tokens are chosen: a dictionary has many times as many features as an activation has numbers.
            write(collection.read(each, values), target, rows)

        def write_patterns(each: Activation, target: Tensor, values: Tensor, hook: object) -> None:
            """Copy the chosen queries text by text, each with its own keys."""
            values = collection.read(each, values)
            ends = each.rows(self._counts, self._lengths).cumsum(0)[places].tolist()
            columns = to_device(column, values.device).split(counts.tolist())
            for text, (end, length) in enumerate(zip(ends, self._lengths[places].tolist(), strict=True)):
                block = values[text] if is_everything else values[text][:, columns[text], :length]
                write(block, target[end - block.numel() : end].view(block.shape))

        hooks: list[Hook] = []
        for each in collection.activations:
            copy = write_patterns if each.has_keys else write_tokens
            for layer, target in zip(each.places, self._kept[each.name], strict=True):
                hooks.append((each.hook_name(layer), read_hook(partial(copy, each, target))))
        # A hook of no layer is before the first block or after the last: the one needs no block, the other all.
        needs_all = any(not each.layers and not each.hook.startswith(BEFORE_BLOCKS) for each in collection.activations)
        last = max((layer for each in collection.activations for layer in each.layers), default=-1)
        with self._transfer:
            collection.model.run(batch, hooks, stop_at=None if needs_all else max(last, 0) + 1)


def _names(sites: object, residual: bool | str | None, attention: object, model: Model) -> list[Any]:
    """Return the names of what is kept, by `sites`, or by `residual` and `attention`."""
    if sites is not None:
        if residual is not None or attention is not None:
            raise InputError("sites= says all that is kept: leave residual= and attention= away.")
        return one_or_several(sites)
    names = ["pattern"] if attention is None or checked_flag("attention", attention) else []
    if isinstance(residual, bool) or residual is None:
        names = names if residual is False else ["resid_post", *names]
        if not names:
            raise InputError("There is nothing to keep: residual and attention are both False.")
        return names
    known = [name for name, site in SITES.items() if len(site.axes) == 2 and site.axes[0] == "position"]
    if not isinstance(residual, str) or residual not in known:
        raise InputError(f"There is no residual site {shown(residual)}.{did_you_mean(residual, known)}")
    if reason := SITES[residual].absent(model.shape):
        raise InputError(f"There is no {residual} to keep: {reason}")
    return [residual, *names]


def _parts(lengths: Sequence[int], nbytes: Sequence[int]) -> list[list[int]]:
    """Cut texts, shortest first, into parts of limited size: a part runs in batches of its own, which hardly pad."""
    parts: list[list[int]] = [[]]
    size = 0
    for example in sorted(range(len(lengths)), key=lengths.__getitem__):
        if parts[-1] and (size + nbytes[example] > PART_BYTES or len(parts[-1]) == PART_TEXTS):
            parts.append([])
            size = 0
        parts[-1].append(example)
        size += nbytes[example]
    return parts


# Activations copied into a cache: from an accelerator by two pinned buffers, elsewhere at once.
#
# What lies on a CUDA device and goes to the host takes this way, while the model runs on:
#
# 1. A copy is made on the device, in the order of the model's operations: the model may write into the activation
#    afterwards. It keeps its dtype, so bfloat16 is two bytes a number on the wire.
# 2. Another stream waits for that copy, and moves it into one of two pinned buffers; an event marks the end.
# 3. Before a buffer is used again, and when the batch ends, its event is waited for; then the host reads the buffer and
#    writes the numbers into the cache, in the cache's dtype.
#
# When a `with` block of `Transfer` ends, everything is written; if it ends with an error, whatever is still moving is
# waited for and not read. Everything else (a CPU, a cache on the device) is written at once.


BUFFER_BYTES = 2**26
"""Of each of the two buffers; what is larger goes in parts. One row that is larger has a buffer of its size."""


class CudaLane:
    """A way from a device to the host: a stream beside the one in which the model runs."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def buffer(self, nbytes: int) -> Tensor:
        """Return pinned memory of the host."""
        # A buffer made in inference mode could not be written into by a later call outside of it.
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, into: Tensor, source: Tensor) -> Callable[[], None]:
        """Begin to copy once the current stream has made `source`; return what waits until it is there."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            into.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        return event.synchronize


def lane_from(device: torch.device) -> CudaLane | None:
    """Return a way from a device to the host that does not stop it; None where there is none to gain."""
    return CudaLane(device) if device.type == "cuda" else None


class Transfer:
    """Writes activations into a cache; for one batch after another, as `with transfer:`."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, CudaLane | None] = {}
        self._moving: list[tuple[Tensor, Callable[[], None], Callable[[], None], Tensor]] = []
        """At most two, the older first: a buffer, what waits for it, what writes it into the cache, what it is of."""
        self._free: list[Tensor] = []

    def write(
        self,
        activation: Shaped[Tensor, "row ..."],
        target: Shaped[Tensor, "place ..."],
        where: Int[Tensor, " row"] | None = None,
    ) -> None:
        """Write an activation into the rows `where` of a tensor, now or before the `with` block ends.

        With where=None it is written into the whole tensor.
        """
        if where is not None and len(where) and bool((where.diff() == 1).all()):
            # Rows that follow one another are a slice, and copying into one is quicker.
            target, where = target[int(where[0]) : int(where[-1]) + 1], None
        device = activation.device
        if device not in self._lanes:
            self._lanes[device] = lane_from(device)
        lane = self._lanes[device] if target.device.type == "cpu" else None
        if lane is None or not activation.numel():
            _put(activation, target, where)
            return
        source = activation.detach().clone(memory_format=torch.contiguous_format)
        n_rows = max(1, BUFFER_BYTES // source[0].nbytes)
        for start in range(0, len(source), n_rows):
            part, rows = source[start : start + n_rows], slice(start, start + n_rows)
            buffer = self._buffer(lane, part.nbytes)
            arriving = buffer[: part.nbytes].view(part.dtype).view(part.shape)
            place = (target[rows], None) if where is None else (target, where[rows])
            # With the part itself, so that the memory that is read stays alive.
            self._moving.append((buffer, lane.copy(arriving, part), partial(_put, arriving, *place), part))

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            while error is None and self._moving:
                self._settle()
        finally:
            for buffer, wait, *_ in self._moving:  # nothing is to be written into memory that is free
                with contextlib.suppress(Exception):  # an error is raised already
                    wait()
                self._free.append(buffer)
            self._moving.clear()

    def _buffer(self, lane: CudaLane, nbytes: int) -> Tensor:
        """Return one of the two buffers, of which the older copy has to end where both are in use."""
        if len(self._moving) == 2:
            self._settle()
        buffer = self._free.pop() if self._free else None
        if buffer is None or len(buffer) < nbytes:
            buffer = None  # the old one goes before the new one is made
            buffer = lane.buffer(max(nbytes, BUFFER_BYTES))
        return buffer

    def _settle(self) -> None:
        """Wait for the older copy, and write it into the cache."""
        buffer, wait, put, _ = self._moving[0]
        wait()
        self._moving.pop(0)
        self._free.append(buffer)
        put()


def _put(rows: Tensor, target: Tensor, where: Tensor | None) -> None:
    if where is None:
        target.copy_(rows)
    else:
        target[where] = rows.to(target.device, target.dtype)
