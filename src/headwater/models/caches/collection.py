"""Collect activations of many texts: only what was requested, of real tokens alone.

1. Find which activations are meant, and which tokens of each text; estimate what they take, and refuse with the figure
   when the device, or the disk, has not got it.
2. Run the texts in batches of about equal length, so that a long one hardly pads others. Hooks copy the chosen layers,
   heads and positions of the real tokens into their place (`headwater.models.caches.transfer`), so nothing else is
   ever kept. Layers after the last one requested do not run.
3. With `out=`, the texts of some batches are one part, written to its file as soon as it is whole: memory holds one of
   them, and an interrupted collection goes on after its last part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from headwater.errors import InputError, did_you_mean
from headwater.kernels.devices import to_device, usable_device
from headwater.models.caches.activations import Activation, activations_named
from headwater.models.caches.cache import Cache
from headwater.models.caches.sequences import TokenizedTexts, kept_at, read_texts, rows_of, seen_by
from headwater.models.caches.transfer import Transfer
from headwater.models.dictionaries.features import Features
from headwater.models.edits import Hook, read_hook
from headwater.models.memory import in_halves, refuse_too_large, refuse_too_large_for_disk
from headwater.models.part_names import Heads, layers_and_heads
from headwater.models.positions import Where
from headwater.models.sites import SITES, Site, SiteName
from headwater.models.tokens import Inputs, by_length
from headwater.options import checked_count, checked_flag, checked_path, one_or_several, resolve_indices, shown
from headwater.progress import Bar
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.shards import Shards

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
    features = {name.name: name.fitted(model) for name in names if isinstance(name, Features)}
    chosen_layers = resolve_indices(of_layers, model.shape.n_layers, "layer")
    activations = activations_named(names, chosen_layers, None if heads is None else of_heads, model)
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
        with run.bar("Caching", " texts", total=len(lengths)) as bar:
            if run.folder is None:
                return Shards([_Part(self, range(len(lengths))).filled(bar)])
            # The texts of a part run in batches of their own, which hardly pad where their lengths are about equal.
            (shortest_first,) = by_length(lengths, len(lengths))
            parts = _parts(shortest_first, nbytes)
            return run.stored("activations", parts, lambda examples: _Part(self, examples).filled(bar), bar, len)


class _Chosen(NamedTuple):
    """What is kept of the texts of one batch: these columns of these rows."""

    row: Int[Tensor, " token"]
    column: Int[Tensor, " token"]
    is_everything: bool
    """Whether that is every entry, as nothing is padding."""
    places: Int[Tensor, " text"]
    """Which texts of the part they are."""
    rows: Int[Tensor, " token"]
    """Where they go."""


class _Part:
    """Some texts of a collection, and what is kept of them."""

    def __init__(self, collection: _Collection, examples: Sequence[int]):
        whole, numbers = collection.texts, torch.tensor(examples)
        self._collection, self._examples, self._transfer = collection, numbers, Transfer()
        self._counts, self._lengths = whole.counts[numbers], whole.lengths[numbers]
        self._columns = torch.tensor(whole.table["position"].to_numpy())[rows_of(numbers, whole.counts)]
        self._kept = {"examples": numbers}
        for each in collection.activations:
            n_rows = int(each.rows(self._counts, self._lengths).sum())
            shape = len(each.places), n_rows, *each.row
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
        activations, counts = self._collection.activations, self._counts[places]
        batch = self._collection.texts.batch_of(self._examples[places].tolist())
        row = torch.arange(len(batch)).repeat_interleave(counts)
        rows = rows_of(places, self._counts)
        column = self._columns[rows]
        every_column = torch.arange(batch.tokens.shape[1]).repeat(len(batch))
        chosen = _Chosen(row, column, torch.equal(column, every_column), places, rows)
        hooks: list[Hook] = []
        for each in activations:
            copy = self._copy_patterns if each.has_keys else self._copy_rows
            for layer, target in zip(each.places, self._kept[each.name], strict=True):
                hooks.append((each.hook_name(layer), read_hook(partial(copy, each, target, chosen))))
        # A hook of no layer is before the first block or after the last: the one needs no block, the other all.
        needs_all = any(not each.layers and not each.hook.startswith(BEFORE_BLOCKS) for each in activations)
        last = max((layer for each in activations for layer in each.layers), default=-1)
        with self._transfer:
            self._collection.model.run(batch, hooks, stop_at=None if needs_all else max(last, 0) + 1)

    def _copy_rows(self, each: Activation, target: Tensor, chosen: _Chosen, values: Tensor, hook: object) -> None:
        """Copy the chosen tokens of all texts of a batch."""
        if chosen.is_everything:
            values = values.flatten(0, 1)
        else:
            values = values[to_device(chosen.row, values.device), to_device(chosen.column, values.device)]
        # After tokens are chosen: a dictionary has many times as many features as an activation has numbers.
        if (features := self._collection.features.get(each.name)) is None:
            values = self._of_heads(each, values)
        else:
            values = features.read(values)
            values = values if features.chosen is None else values[..., list(features.chosen)]
        self._transfer.write(values, target, chosen.rows)

    def _copy_patterns(self, each: Activation, target: Tensor, chosen: _Chosen, values: Tensor, hook: object) -> None:
        """Copy the chosen queries of a batch, text by text with its own keys."""
        values, places = self._of_heads(each, values), chosen.places
        ends = each.rows(self._counts, self._lengths).cumsum(0)[places].tolist()
        columns = to_device(chosen.column, values.device).split(self._counts[places].tolist())
        for row, (end, length) in enumerate(zip(ends, self._lengths[places].tolist(), strict=True)):
            block = values[row] if chosen.is_everything else values[row][:, columns[row], :length]
            self._transfer.write(block, target[end - block.numel() : end].view(block.shape))

    def _of_heads(self, each: Activation, values: Tensor) -> Tensor:
        """Pick the heads of an activation whose first axis is texts, or tokens."""
        heads = torch.tensor(self._collection.heads)
        if each.head_axis is None or values.shape[each.head_axis] == each.size[each.head_axis - 1]:
            return values
        return values.index_select(each.head_axis, to_device(heads, values.device))


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


def _parts(order: Sequence[int], nbytes: Sequence[int]) -> list[list[int]]:
    """Cut texts, shortest first, into parts of limited size."""
    parts: list[list[int]] = [[]]
    size = 0
    for example in order:
        if parts[-1] and (size + nbytes[example] > PART_BYTES or len(parts[-1]) == PART_TEXTS):
            parts.append([])
            size = 0
        parts[-1].append(example)
        size += nbytes[example]
    return parts
