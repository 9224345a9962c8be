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
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from headwater.errors import InputError, did_you_mean
from headwater.kernels.devices import to_device, usable_device
from headwater.models.caches.activations import Activation, activations_named, query_head_axes
from headwater.models.caches.cache import Cache
from headwater.models.caches.sequences import Chosen, Sequences, chosen_tokens, sequences_of, starts_of, steps
from headwater.models.caches.transfer import Transfer
from headwater.models.dictionaries.features import Features
from headwater.models.edits import Hook, HookFunction, read_hook
from headwater.models.memory import in_halves, refuse_too_large, refuse_too_large_for_disk
from headwater.models.part_names import Heads, layers_and_heads
from headwater.models.positions import Where
from headwater.models.sites import SITES, Site, SiteName
from headwater.models.tokens import Inputs, by_length, note_on_chats
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


@dataclass(frozen=True)
class _Plan:
    """What is kept of which texts.

    Attributes:
        activations: which.
        sequences: the texts.
        chosen: which of their tokens.
        heads: the query heads kept of activations that have some.
        head_axes: by the name of those of which not all heads are kept, the axis of heads; 0 is tokens, or texts.
        features: by name, the dictionaries by which activations are read.
    """

    activations: tuple[Activation, ...]
    sequences: Sequences
    chosen: Chosen
    heads: tuple[int, ...]
    head_axes: dict[str, int]
    features: dict[str, Features]

    def rows(self, activation: Activation) -> Int[Tensor, " example"]:
        """Return how many rows each text has in one layer."""
        return activation.rows(self.chosen.counts, self.sequences.lengths)

    def nbytes(self) -> Int[Tensor, " example"]:
        """Return how many bytes each text takes."""
        counts, lengths = self.chosen.counts, self.sequences.lengths
        return torch.stack([activation.nbytes(counts, lengths) for activation in self.activations]).sum(0)


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
    plan = _plan(model, inputs, names, layers, positions, heads)
    nbytes = plan.nbytes()
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
        "tokens": plan.sequences.tokens,
        "lengths": plan.sequences.lengths,
        "sites": [dataclasses.asdict(activation) for activation in plan.activations],
        "features": [name.described for name in names if isinstance(name, Features)],
        "positions": plan.chosen,
        "heads": plan.heads,
        **note_on_chats(plan.sequences.texts or ()),
    }
    shows = progress and len(plan.sequences) > batch_size
    collect = partial(_collected, model, plan, batch_size, device)
    return run_or_resume(Cache, "cache", model, options, collect, out=out, progress=shows)


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


def _plan(
    model: Model,
    inputs: Inputs,
    names: list[Any],
    layers: Sequence[int] | None,
    positions: Where | Sequence[int] | None,
    heads: Heads,
) -> _Plan:
    """Check what is to be kept of which texts."""
    shape = model.shape
    of_layers, numbers = layers_and_heads(layers, heads, shape)
    chosen_layers = resolve_indices(of_layers, shape.n_layers, "layer")
    chosen_heads = resolve_indices(numbers, shape.n_heads, "head")
    sequences = sequences_of(inputs, model)
    activations = activations_named(names, chosen_layers, model)
    head_axes = {} if heads is None else query_head_axes(activations, model)
    if chosen_heads == tuple(range(shape.n_heads)):
        head_axes = {}
    for n, activation in enumerate(activations):
        if (axis := head_axes.get(activation.name)) is not None:
            size = list(activation.size)
            size[axis - 1] = len(chosen_heads)
            activations[n] = dataclasses.replace(activation, size=tuple(size))
    features = {name.name: name.fitted(model) for name in names if isinstance(name, Features)}
    chosen = chosen_tokens(positions, sequences, model).seen_by(list(features.values()), sequences)
    return _Plan(tuple(activations), sequences, chosen, chosen_heads, head_axes, features)


def _collected(model: Model, plan: _Plan, batch_size: int, device: torch.device, run: Run) -> Cache:
    """Run all batches, and put what they gave together."""
    sequences, chosen = plan.sequences, plan.chosen
    n_texts = len(sequences)
    with run.bar("Caching", " texts", total=n_texts) as bar:

        def part(examples: list[int]) -> dict[str, Tensor]:
            texts = torch.tensor(examples)
            kept = {"examples": texts}
            for activation in plan.activations:
                shape = len(activation.places), int(plan.rows(activation)[texts].sum()), *activation.row
                kept[activation.name] = torch.zeros(shape, dtype=activation.torch_dtype, device=device)
            _fill(model, plan, kept, batch_size, bar)
            return kept

        if run.folder is None:
            activations = Shards([part(list(range(n_texts)))])
        else:
            # The texts of a part run in batches of their own, which hardly pad where their lengths are about equal.
            (shortest_first,) = by_length(sequences.lengths.tolist(), n_texts)
            activations = run.stored("activations", _parts(shortest_first, plan.nbytes().tolist()), part, bar, len)
    tokens, texts = _tables(sequences, model)
    at = starts_of(sequences.lengths).repeat_interleave(chosen.counts) + chosen.positions
    table = tokens[["example", "position", "token"]].iloc[at.numpy()].reset_index(drop=True)
    if chosen.roles is not None:
        table["role"] = list(chosen.roles)
    plain = [dataclasses.asdict(activation).items() for activation in plan.activations]
    return Cache(
        table=table,
        tokens=tokens,
        texts=texts,
        contents=[{name: list(value) if isinstance(value, tuple) else value for name, value in one} for one in plain],
        asked=None if chosen.numbers is None else list(chosen.numbers),
        kept_layers=list(dict.fromkeys(layer for activation in plan.activations for layer in activation.layers)),
        kept_heads=list(plan.heads),
        n_layers=model.shape.n_layers,
        pad=sequences.pad,
        activations=activations,
        run=run.record,
    )


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


def _tables(sequences: Sequences, model: Model) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a row per token of every text, and a row per text."""
    # Each different token is decoded once, however often the texts hold it.
    ids, back = np.unique(sequences.tokens.numpy(), return_inverse=True)
    words = np.array(model.token_strings(ids.tolist()), dtype=object)
    lengths, spans = sequences.lengths, sequences.characters
    starts, ends = ([None] * len(back),) * 2 if spans is None else spans.numpy().T
    tokens = pd.DataFrame(
        {
            "example": torch.arange(len(lengths)).repeat_interleave(lengths).numpy(),
            "position": steps(lengths).numpy(),
            "token_id": ids[back].astype(np.int64),
            "token": words[back],
            "start": pd.array(starts, dtype="Int32"),
            "end": pd.array(ends, dtype="Int32"),
        }
    )
    given = pd.Series(list(sequences.texts if sequences.texts is not None else [None] * len(lengths)))
    return tokens, pd.DataFrame({"example": range(len(lengths)), "tokens": lengths.numpy(), "text": given})


def _fill(model: Model, plan: _Plan, kept: dict[str, Tensor], batch_size: int, bar: Bar) -> None:
    """Run the texts of a part in batches, and copy what is kept of them into their place."""
    examples, transfer = kept["examples"], Transfer()
    row_of = {example: row for row, example in enumerate(examples.tolist())}
    starts = {activation.name: starts_of(plan.rows(activation)[examples]) for activation in plan.activations}
    # A hook of no layer is before the first block or after the last: the one needs no block, the other all.
    after_blocks = [a.hook for a in plan.activations if not a.layers and not a.hook.startswith(BEFORE_BLOCKS)]
    layers = [layer for activation in plan.activations for layer in activation.layers]
    stop_at = None if after_blocks else 1 + max(layers, default=0)

    def run(texts: Sequence[int]) -> None:
        batch, rows = plan.sequences.batch(texts), [row_of[text] for text in texts]
        copies, hooks = _BatchCopies(plan, torch.tensor(texts), batch.tokens.shape[1], transfer), list[Hook]()
        for activation in plan.activations:
            copy = copies.with_keys if activation.has_keys else copies.vectors
            for layer, target in zip(activation.places, kept[activation.name], strict=True):
                hooks.append((activation.hook_name(layer), copy(activation, target, starts[activation.name][rows])))
        with transfer:
            model.run(batch, hooks, stop_at=stop_at)
        bar.update(len(texts))

    lengths = plan.sequences.lengths[examples].tolist()
    for batch in by_length(lengths, batch_size, longest=lambda shortest: PADDED * shortest + PADDING):
        # A half that runs again writes the same rows again, so nothing has to be undone.
        in_halves(examples[batch].tolist(), run)


class _BatchCopies:
    """Hooks that copy what is kept of the texts of one batch into its place."""

    def __init__(self, plan: _Plan, texts: Int[Tensor, " row"], width: int, transfer: Transfer):
        self.plan, self.transfer = plan, transfer
        self.counts, self.lengths = plan.chosen.counts[texts], plan.sequences.lengths[texts]
        first = starts_of(plan.chosen.counts)[texts].repeat_interleave(self.counts)
        self.columns = plan.chosen.positions[first + steps(self.counts)]
        self.row = torch.arange(len(texts)).repeat_interleave(self.counts)
        self.whole = plan.chosen.everything and bool((self.lengths == width).all())
        """Whether every entry of an activation is kept, as there is no padding."""

    def vectors(self, activation: Activation, target: Tensor, starts: Int[Tensor, " row"]) -> HookFunction:
        """Return a hook that copies the chosen tokens into the rows of `target` that begin at `starts`."""
        where = starts.repeat_interleave(self.counts) + steps(self.counts)
        is_slice = bool(len(where)) and bool((where.diff() == 1).all())  # copying into one is quicker
        place = target[int(where[0]) : int(where[-1]) + 1] if is_slice else target
        features = self.plan.features.get(activation.name)

        def keep(values: Tensor, hook: object) -> None:
            if self.whole:
                chosen = values.flatten(0, 1)
            else:
                chosen = values[to_device(self.row, values.device), to_device(self.columns, values.device)]
            if features is None:
                chosen = self._heads(activation, chosen)
            else:
                # After tokens are chosen: a dictionary has many times as many features as an activation has numbers.
                chosen = features.read(chosen)
                chosen = chosen if features.chosen is None else chosen[..., list(features.chosen)]
            self.transfer.write(chosen, place, None if is_slice else where)

        return read_hook(keep)

    def with_keys(self, activation: Activation, target: Tensor, starts: Int[Tensor, " row"]) -> HookFunction:
        """Return a hook that copies the chosen queries, and each text's own keys, after `starts`."""

        def keep(values: Tensor, hook: object) -> None:
            chosen = self._heads(activation, values)
            columns = to_device(self.columns, values.device).split(self.counts.tolist())
            for row, (start, length) in enumerate(zip(starts.tolist(), self.lengths.tolist(), strict=True)):
                block = chosen[row] if self.whole else chosen[row][:, columns[row], :length]
                self.transfer.write(block, target[start : start + block.numel()].view(block.shape))

        return read_hook(keep)

    def _heads(self, activation: Activation, values: Tensor) -> Tensor:
        """Pick the heads of an activation whose first axis is texts, or tokens."""
        axis = self.plan.head_axes.get(activation.name)
        if axis is None:
            return values
        return values.index_select(axis, to_device(torch.tensor(self.plan.heads), values.device))
