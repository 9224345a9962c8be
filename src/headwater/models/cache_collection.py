"""Collect activations of many texts: only those requested, and only at real tokens.

1. Resolve the names of activations and the tokens of each text; estimate the space they need, and raise an error with
   that figure if the device or the disk has too little.
2. Run the texts in batches of similar length, so that there is little padding. Hooks copy the chosen layers, heads and
   positions of the real tokens directly into the result, so nothing else is ever kept. Layers after the last one
   requested do not run.
3. With `out=`, the texts of several batches form a part, which is written to its file once complete: memory holds only
   one part, and an interrupted collection resumes after its last part.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from headwater.errors import InputError, did_you_mean
from headwater.kernels.devices import in_halves, refuse_too_large, refuse_too_large_for_disk, to_device, usable_device
from headwater.models.cache import Activation, Cache, TokenizedTexts, kept_at, read_texts, rows_of, seen_by
from headwater.models.dictionaries import Features
from headwater.models.edits import Hook, read_hook
from headwater.models.part_names import Heads, layers_and_heads
from headwater.models.positions import Where
from headwater.models.sites import AXES, OTHER_ACTIVATIONS, SITES, Site, SiteName, sites_named
from headwater.models.tokens import Batch, Inputs, by_length
from headwater.options import checked_path, one_or_several, resolve_indices, shown
from headwater.progress import Bar
from headwater.runs.analysis import Run, run_or_resume

if TYPE_CHECKING:
    from headwater.models.model import Model


PART_BYTES = 2**26
"""Most bytes in a part of a collection in files, unless the part is a single text."""
PART_TEXTS = 1024
"""Most texts in a part, which limits the work that an interruption can lose."""
PADDED, PADDING = 1.5, 8
"""The longest text of a batch has at most `PADDED` times the tokens of its shortest, plus `PADDING`."""
BEFORE_BLOCKS = ("hook_embed", "hook_pos_embed", "embed.", "pos_embed.")
N_PROBES = 2
"""Number of texts in the run that determines the axes of a hook."""


def cache(
    model: Model,
    inputs: Inputs,
    *,
    sites: SiteName | str | Site | Iterable[SiteName | str | Site] = ("resid_post", "pattern"),
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
        inputs: any input of `model.tokenize`.
        sites: the activations to keep: sites by their short names ("resid_post", "z", "pattern", ...), any hook by its
            TransformerLens name, in which `*` matches one part ("blocks.*.mlp.hook_post"), and features
            (`hw.features`, `hw.load_sae`), at the layer of their dictionary.
        layers: the layers, kept in ascending order; default: all. Negative numbers count from the last.
        positions: the tokens of each text to keep; default: all. Numbers, where -1 or "last" is the last token of each
            text; or a word, a span, a function of the token strings, a list with one of these per text; or roles, such
            as {"subject": [" France", " Italy"], "end": "last"} (see `headwater.models.positions`), which appear in
            the column `role` of the frame. For attention these are the queries; all keys are always kept.
        heads: the query heads, by number or by names of heads of one layer, such as "9.2", kept in ascending order;
            default: all. Sites without heads are kept whole.
        out: a folder. The numbers are written there part by part, so memory stays flat, an interrupted collection
            resumes when repeated, and several processes can share the work (`accelerate launch`).
        batch_size: texts in one run.
        device: the device of the cache, without `out`.
        progress: show a bar while several batches run.

    Returns:
        A cache, in float32 (or the model's dtype if wider); in files with `out`.
    """
    device = usable_device(device)
    if out is not None and device.type != "cpu":
        raise InputError(f"out= keeps the cache in files, which cannot be on device={str(device)!r}: omit one of them.")
    of_layers, numbers = layers_and_heads(layers, heads, model.shape)
    of_heads = resolve_indices(numbers, model.shape.n_heads, "head")
    texts, on_chats = read_texts(inputs, model)
    names = one_or_several(sites)
    fitted = [name.fitted(model) if isinstance(name, Features) else name for name in names]
    features = {name.name: name for name in fitted if isinstance(name, Features)}
    chosen_layers = resolve_indices(of_layers, model.shape.n_layers, "layer")
    activations = activations_named(fitted, chosen_layers, None if heads is None else of_heads, model)
    texts = seen_by(list(features.values()), kept_at(positions, texts))
    nbytes = torch.stack([each.nbytes(texts.counts, texts.lengths) for each in activations]).sum(0)
    advice = "Request fewer layers, heads or positions, or leave out pattern (it grows with the square of the length)."
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
        lengths = texts.lengths.tolist()
        parts = [list(range(len(lengths)))] if run.folder is None else _parts(lengths, nbytes.tolist())
        with run.bar("Caching", " texts", total=len(lengths)) as bar:
            shards = run.stored("activations", parts, partial(collection.part, bar=bar), bar, len)
        return Cache(
            **{field.name: getattr(texts, field.name) for field in dataclasses.fields(texts)},
            contents=[each.plain() for each in activations],
            kept_heads=list(of_heads),
            n_layers=model.shape.n_layers,
            activations=shards,
            run=run.record,
        )

    shows = progress and len(texts.texts) > batch_size
    return run_or_resume(Cache, "cache", model, options, collect, out=out, progress=shows)


@dataclass(frozen=True)
class _Collection:
    """The texts and activations of a collection, and how they are run."""

    model: Model
    texts: TokenizedTexts
    activations: list[Activation]
    heads: tuple[int, ...]
    """The query heads to keep, of activations with query heads."""
    features: dict[str, Features]
    """The dictionaries that compute features, by name."""
    batch_size: int
    device: torch.device

    def part(self, examples: Sequence[int], bar: Bar) -> dict[str, Tensor]:
        """Run some texts in batches of similar length, and return their activations."""
        numbers = torch.tensor(examples)
        counts, lengths = self.texts.counts[numbers], self.texts.lengths[numbers]
        columns = torch.tensor(self.texts.table["position"].to_numpy())[rows_of(numbers, self.texts.counts)]
        part = {"examples": numbers}
        for each in self.activations:
            shape = len(each.places), int(each.rows(counts, lengths).sum()), *each.row
            part[each.name] = torch.zeros(shape, dtype=each.torch_dtype, device=self.device)
        # A hook without a layer is before the first block, and needs no block, or after the last, and needs all.
        needs_all = any(not each.layers and not each.hook.startswith(BEFORE_BLOCKS) for each in self.activations)
        last = max((layer for each in self.activations for layer in each.layers), default=0)

        def run(places: list[int]) -> None:
            """Run the texts with these indices in the part, and copy their activations into it."""
            # Made anew for each run: copies that a failed run has started are never written.
            transfer = Transfer()
            batch, rows = self.texts.batch_of(numbers[places].tolist()), rows_of(places, counts)
            row, column = torch.arange(len(batch)).repeat_interleave(counts[places]), columns[rows]

            def write_tokens(each: Activation, target: Tensor, values: Tensor, hook: object) -> None:
                values = values[to_device(row, values.device), to_device(column, values.device)]
                # After the tokens are selected: a dictionary has many times more features than an activation numbers.
                transfer.write(self.read(each, values), target, rows)

            def write_patterns(each: Activation, target: Tensor, values: Tensor, hook: object) -> None:
                """Copy the chosen queries text by text, each with the keys of its text."""
                ends = each.rows(counts, lengths).cumsum(0)[places].tolist()
                queries = to_device(column, values.device).split(counts[places].tolist())
                texts = zip(self.read(each, values), queries, ends, lengths[places].tolist(), strict=True)
                for text, chosen, end, length in texts:
                    block = text[:, chosen, :length]
                    transfer.write(block, target[end - block.numel() : end].view(block.shape))

            hooks: list[Hook] = []
            for each in self.activations:
                copy = write_patterns if each.has_keys else write_tokens
                for layer, target in zip(each.places, part[each.name], strict=True):
                    hooks.append((each.hook_name(layer), read_hook(partial(copy, each, target))))
            self.model.run(batch, hooks, stop_at=None if needs_all else last + 1)
            transfer.finish()
            bar.update(len(places))

        for places in by_length(
            lengths.tolist(), self.batch_size, longest=lambda shortest: PADDED * shortest + PADDING
        ):
            # A half that runs again overwrites its rows with the same numbers, so nothing has to be undone.
            in_halves(places, run)
        return part

    def read(self, each: Activation, values: Tensor) -> Tensor:
        """Return the part of an activation to keep: its features, or its chosen heads."""
        if (features := self.features.get(each.name)) is not None:
            values = features.read(values)
            return values if features.chosen is None else values[..., list(features.chosen)]
        axis = each.head_axis
        if axis is None or values.shape[axis] == each.size[axis - 1]:
            return values
        return values.index_select(axis, to_device(torch.tensor(self.heads), values.device))


def _parts(lengths: Sequence[int], nbytes: Sequence[int]) -> list[list[int]]:
    """Split texts, shortest first, into parts of limited size; a part runs in its own batches, with little padding."""
    parts: list[list[int]] = [[]]
    size = 0
    for example in sorted(range(len(lengths)), key=lengths.__getitem__):
        if parts[-1] and (size + nbytes[example] > PART_BYTES or len(parts[-1]) == PART_TEXTS):
            parts.append([])
            size = 0
        parts[-1].append(example)
        size += nbytes[example]
    return parts


# How names resolve to activations: sites by short names, hooks by TransformerLens's names, with `*`.
#
# 1. A short name is a row of `SITES` or `OTHER_ACTIVATIONS`: it selects that activation at every layer requested.
# 2. A hook's name selects that activation; `*` matches one part between dots, so that "blocks.*.mlp.hook_post" is one
#    activation at every layer. The hook of a site resolves to the site.
# 3. The axes of a site are in its row. The axes of any other hook come from a small run: the axis that matches the
#    number of texts is `batch`, the axes that match their length are `position` and `key`. A hook without such axes is
#    refused.
# 4. Features of a dictionary (`headwater.models.dictionaries`) are computed from the activation at their own layer.


def activations_named(
    names: Sequence[Any], layers: Sequence[int], heads: Sequence[int] | None, model: Model
) -> list[Activation]:
    """Resolve names to activations of a model at these layers, with only these query heads unless `heads` is None.

    Features must be fitted to the model already.
    """
    if not names or not all(isinstance(name, str | Site) for name in names):
        raise InputError(f"sites={shown(names)} names no activation: give names of sites or of hooks.")
    hooks: dict[str, dict[int, None]] = {}  # a dictionary in place of a set keeps the order
    for name in names:
        if not isinstance(name, Features):
            for hook, layer in _places(name.name if isinstance(name, Site) else name, layers, model):
                # One entry per hook under any of its names: "z" and "blocks.*.attn.hook_z" are kept once.
                hooks.setdefault(hook, {}).update({} if layer is None else {layer: None})
    short = {hook: name for name, hook in OTHER_ACTIVATIONS.items()} | {site.hook: name for name, site in SITES.items()}
    layouts = _layouts({hook: at for hook, at in hooks.items() if short.get(hook) not in SITES}, model)
    activations = []
    for hook, at in hooks.items():
        name = short.get(hook, hook.replace("{layer}", "*"))
        if hook in layouts:
            axes, size, dtype = layouts[hook]
        else:
            (site,) = sites_named(name, model)
            axes, dtype = site.axes, _kept_in(model.dtype)
            size = tuple(AXES[axis](model.shape, 0) for axis in axes if axis not in ("position", "key"))
        activations.append(Activation(name, hook, tuple(at), axes, size, dtype))
    for features in (name for name in names if isinstance(name, Features)):
        axes, size, hook = ("position", "feature"), (len(features.units),), SITES[features.at].hook
        activations.append(Activation(features.name, hook, (features.layer,), axes, size, "float32", is_read=True))
    known = [activation.name for activation in activations]
    if twice := [name for n, name in enumerate(known) if name in known[:n]]:
        raise InputError(f"Two activations to keep are called {twice[0]!r}: give them different names.")
    return activations if heads is None else _with_heads(activations, heads, model)


def _with_heads(activations: list[Activation], heads: Sequence[int], model: Model) -> list[Activation]:
    """Return activations reduced to these query heads, if they have any."""
    shape = model.shape
    if grouped := [each.name for each in activations if "kv_head" in each.axes and shape.group_size > 1]:
        raise InputError(
            f"heads= counts the {shape.n_heads} query heads, and {grouped[0]} has {shape.n_kv_heads} key-value heads: "
            f"cache {grouped[0]} without heads=, and index its axis kv_head."
        )
    if all(each.head_axis is None for each in activations):
        names = ", ".join(each.name for each in activations)
        raise InputError(f"heads= chooses heads, but no activation to keep has any: {names}.")
    return [
        each
        if (axis := each.head_axis) is None
        else dataclasses.replace(each, size=(*each.size[: axis - 1], len(heads), *each.size[axis:]))
        for each in activations
    ]


def _kept_in(dtype: torch.dtype) -> str:
    """Return the name of the dtype in which activations of a dtype are kept: float32 or wider; integers unchanged."""
    kept = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    return str(kept).removeprefix("torch.")


def _places(name: str, layers: Sequence[int], model: Model) -> list[tuple[str, int | None]]:
    """Return the hooks that a name matches, with `{layer}` in place of the layer, and the layer of each."""
    if name in SITES:
        (site,) = sites_named(name, model)
        return [(site.hook, layer) for layer in site.among(layers, model)]
    if name in OTHER_ACTIVATIONS:
        hook = OTHER_ACTIVATIONS[name]
        return [(hook, layer) for layer in layers] if "{layer}" in hook else [(hook, None)]
    # `*` matches within one part between dots; an exact name is a pattern without `*`.
    n_dots, hook_dict = name.count("."), model.raw.hook_dict
    matching = [hook for hook in hook_dict if hook.count(".") == n_dots and fnmatchcase(hook, name)]
    if not matching:
        open_names = dict.fromkeys(re.sub(r"^blocks\.\d+\.", "blocks.*.", hook) for hook in hook_dict)
        known_names = [*SITES, *OTHER_ACTIVATIONS, *(open_names if "." in name else ())]
        near = did_you_mean(re.sub(r"^blocks\.\d+\.", "blocks.*.", name), known_names)
        raise InputError(f"{model.name} has no activation named {shown(name)}.{near}")
    places: list[tuple[str, int | None]] = []
    for hook in matching:
        # `layers=` limits a pattern with `*` for the layer; a hook named with its layer is always included.
        if (of_layer := re.fullmatch(r"blocks\.(\d+)\.(.+)", hook)) is None:
            places.append((hook, None))
        elif not name.startswith("blocks.*.") or int(of_layer[1]) in layers:
            places.append((f"blocks.{{layer}}.{of_layer[2]}", int(of_layer[1])))
    return places


def _layouts(
    hooks: Mapping[str, Iterable[int]], model: Model
) -> dict[str, tuple[tuple[str, ...], tuple[int, ...], str]]:
    """Run the model on a few tokens; return axes, size and dtype of hooks that are not sites."""
    if not hooks:
        return {}
    shape = model.shape
    dims = [("d_model", shape.d_model), ("d_mlp", shape.d_mlp), ("d_vocab", shape.d_vocab), ("head", shape.n_heads)]
    dims += [("d_head", shape.d_head)] + ([("kv_head", shape.n_kv_heads)] if shape.group_size > 1 else [])
    # A length that no axis of the model has: an axis of that size is one of tokens. Not 3, the queries, keys and values
    # of a fused projection. Every vocabulary has token 0.
    length = next(n for n in range(5, 99) if n not in dict(dims).values())
    layouts: dict[str, tuple[tuple[str, ...], tuple[int, ...], str]] = {}

    def note(activation: object, hook: object, name: str) -> None:
        shown_name = name.replace("{layer}", "*")
        if not isinstance(activation, Tensor):
            raise InputError(f"{shown_name} is a {type(activation).__name__} and cannot be kept.")
        sizes = tuple(activation.shape)
        is_one_per_token = sizes[:2] == (N_PROBES, length) and length not in sizes[2:]
        kept = sizes[2:] if is_one_per_token else sizes[1:2]
        if not is_one_per_token and sizes[:1] + sizes[2:] != (N_PROBES, length, length):
            raise InputError(
                f"{shown_name} cannot be kept text by text: for {N_PROBES} texts of {length} tokens "
                f"its shape is {sizes}."
            )
        # The only axis of the model with this size, or "width".
        matching = [[axis for axis, dim in dims if dim == size] for size in kept]
        named = [names[0] if len(names) == 1 else "width" for names in matching]
        axes = ("position", *named) if is_one_per_token else (*named, "position", "key")
        layout = axes, kept, _kept_in(activation.dtype)
        if layouts.setdefault(name, layout) != layout:
            raise InputError(f"{shown_name} has different shapes in different layers: name its layers separately.")

    watching: list[Hook] = [
        (place, read_hook(partial(note, name=hook)))
        for hook, layers in hooks.items()
        for place in [hook.format(layer=layer) for layer in layers] or [hook]
    ]
    model.run(Batch.of([[0] * length] * N_PROBES, pad=0), watching)
    return layouts


PENDING_BYTES = 2**28
"""Most bytes of copies from a device that wait to be written into the cache."""


class Transfer:
    """Writes the activations of one run into a cache; `finish` writes those that are still on their way.

    A CUDA device copies an activation into pinned memory while the host goes on to the next operation. All other
    activations (on a CPU, or for a cache on the device) are written immediately.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, torch.device, Tensor, Tensor | None]] = []
        self._pending_bytes = 0

    def write(
        self,
        activation: Shaped[Tensor, "row ..."],
        target: Shaped[Tensor, "place ..."],
        where: Int[Tensor, " row"] | None = None,
    ) -> None:
        """Write an activation into the rows `where` of a tensor; without `where` it fills the whole tensor."""
        if where is not None and len(where) and bool((where.diff() == 1).all()):
            # Consecutive rows are a slice, and copying into a slice is faster.
            target, where = target[int(where[0]) : int(where[-1]) + 1], None
        if not copies_later(activation, target) or not activation.numel():
            _put(activation, target, where)
            return
        # In parts, so that pinned memory stays small: torch rounds its size up to a power of two, and never frees it.
        n_rows = max(1, PENDING_BYTES // activation[0].nbytes)
        for start in range(0, len(activation), n_rows):
            rows = slice(start, start + n_rows)
            # In the model's dtype, so that bfloat16 transfers two bytes per number. torch copies into pinned memory, in
            # the order of the model's operations: an edit of the activation in place comes later.
            arriving = activation.detach()[rows].to("cpu", non_blocking=True)
            place = (target[rows], None) if where is None else (target, where[rows])
            self._pending.append((arriving, activation.device, *place))
            self._pending_bytes += arriving.nbytes
            if self._pending_bytes > PENDING_BYTES:
                self.finish()

    def finish(self) -> None:
        """Wait for the pending copies and write them into the cache."""
        for device in {device for _, device, _, _ in self._pending}:
            torch.cuda.synchronize(device)
        for arrived, _, target, where in self._pending:
            _put(arrived, target, where)
        self._pending.clear()
        self._pending_bytes = 0


def copies_later(activation: Tensor, target: Tensor) -> bool:
    """Return whether a copy of an activation is started now and read after a wait for the device."""
    return activation.device.type == "cuda" and target.device.type == "cpu"


def _put(rows: Tensor, target: Tensor, where: Tensor | None) -> None:
    if where is None:
        target.copy_(rows)
    else:
        target[where] = rows.to(target.device, target.dtype)
