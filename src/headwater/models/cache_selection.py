"""Which activations names mean: sites by their short names, hooks by TransformerLens's, with `*`.

1. A short name is a row of `SITES`, or of `HOOKS`: it means that activation at every layer requested.
2. A hook's name means that activation; `*` matches one part of it between dots, so that "blocks.*.mlp.hook_post" is
   one activation at every layer. A hook that is a site's is that site.
3. The axes of a site are in its row. Those of any other hook are seen in two small runs: the axis that goes with the
   number of texts is `batch`, those that go with their length are `position` and `key`; whatever has no such axes is
   refused.
4. Features of a dictionary (`headwater.models.dictionaries`) are read from the activation at their own layer.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwater.calls import checked_calls
from headwater.errors import InputError, did_you_mean
from headwater.models.dictionaries import Features
from headwater.models.edits import Hook, read_hook
from headwater.models.positions import Prompt, positions_of, roles_of
from headwater.models.sites import AXES, HOOKS, SITES, Site, sites_named
from headwater.models.tokens import Batch, Inputs, note_on_chats, pad_id, refuse_what_has_no_order
from headwater.options import has_no_order, is_one, shown, whole_numbers

if TYPE_CHECKING:
    from headwater.models.model import Model


PROBES = ((2, 3), (2, 5))
"""Texts and tokens of the two runs in which the axes of a hook are seen."""


@dataclass(frozen=True)
class Activation:
    """One kind of activation, at some layers.

    Attributes:
        name: the short name of a site, or a hook's name with `*` for its layer.
        hook: the hook's name, with its layer left open as {layer}.
        layers: where it is read; empty for what belongs to no layer.
        axes: of one text's activation; those of a pattern end in position and key.
        size: how long the axes are, without position and key.
        dtype: in which it is kept, as torch names it.
        is_read: whether it is read from what the hook holds (features of a dictionary), and not the thing itself.
    """

    name: str
    hook: str
    layers: tuple[int, ...]
    axes: tuple[str, ...]
    size: tuple[int, ...]
    dtype: str
    is_read: bool = False

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Activation:
        """Read one that is kept as JSON."""
        read: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
        }
        return cls(**read)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON keeps it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @property
    def has_keys(self) -> bool:
        """Whether it says, for each query, something of each key."""
        return "key" in self.axes

    @property
    def head_axis(self) -> int | None:
        """Which axis is heads, if one is; 0 is the axis of tokens, or of texts for what has keys."""
        axes = [axis for axis in self.axes if axis not in ("position", "key")]
        return next((1 + n for n, axis in enumerate(axes) if axis in ("head", "kv_head")), None)

    @property
    def places(self) -> tuple[int | None, ...]:
        """The layers, or None once for what belongs to no layer."""
        return self.layers or (None,)

    @property
    def torch_dtype(self) -> torch.dtype:
        """In which numbers it is kept."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def hook_name(self, layer: int | None) -> str:
        """Return the hook's name at one of its places."""
        return self.hook.format(layer=layer)

    def shape(self, n_tokens: int, n_keys: int) -> tuple[int, ...]:
        """Return the shape of what is kept of one text in one layer."""
        return (*self.size, n_tokens, n_keys) if self.has_keys else (n_tokens, *self.size)

    # In memory and files the texts of a layer lie one after the other: a row per token that is kept. Texts differ in
    # keys, so what has keys is laid flat, a row for each number.

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of a row."""
        return () if self.has_keys else self.size

    def rows(self, counts: Int[Tensor, " example"], lengths: Int[Tensor, " example"]) -> Int[Tensor, " example"]:
        """Return how many rows each text has in one layer, by its tokens that are kept and all of its tokens."""
        return counts * lengths * math.prod(self.size) if self.has_keys else counts

    def nbytes(self, counts: Int[Tensor, " example"], lengths: Int[Tensor, " example"]) -> Int[Tensor, " example"]:
        """Return how many bytes each text takes in all layers."""
        return self.rows(counts, lengths) * math.prod(self.row) * len(self.places) * self.torch_dtype.itemsize


def activations_named(
    names: Sequence[Any], layers: Sequence[int], heads: Sequence[int] | None, model: Model
) -> list[Activation]:
    """Look up what names mean in a model, at these layers; of what has query heads, these alone unless None.

    Features are fitted to the model already.
    """
    if not names or not all(isinstance(name, str | Site) for name in names):
        raise InputError(f"sites={shown(names)} names no activation: give names of sites or of hooks.")
    hooks: dict[str, dict[int, None]] = {}  # a dictionary in place of a set keeps the order
    for name in names:
        if not isinstance(name, Features):
            for hook, layer in _places(name.name if isinstance(name, Site) else name, layers, model):
                # One entry per hook whatever it was called: "z" and "blocks.*.attn.hook_z" are kept once.
                hooks.setdefault(hook, {}).update({} if layer is None else {layer: None})
    short = {hook: name for name, hook in HOOKS.items()} | {site.hook: name for name, site in SITES.items()}
    seen = _axes_seen({hook: at for hook, at in hooks.items() if short.get(hook) not in SITES}, model)
    activations = []
    for hook, at in hooks.items():
        name = short.get(hook, hook.replace("{layer}", "*"))
        if hook in seen:
            axes, size, dtype = seen[hook]
        else:
            ((axes, dtype),) = ((site.axes, _kept_in(model.dtype)) for site in sites_named(name, model))
            size = tuple(AXES[axis](model.shape, 0) for axis in axes if axis not in ("position", "key"))
        activations.append(Activation(name, hook, tuple(at), axes, size, dtype))
    for features in (name for name in names if isinstance(name, Features)):
        axes, size, hook = ("position", "feature"), (len(features.units),), SITES[features.at].hook
        activations.append(Activation(features.name, hook, (features.layer,), axes, size, "float32", is_read=True))
    known = [activation.name for activation in activations]
    if twice := [name for n, name in enumerate(known) if name in known[:n]]:
        raise InputError(f"Two of what is to be kept are called {twice[0]!r}: give them names of their own.")
    return activations if heads is None else _with_heads(activations, heads, model)


def _with_heads(activations: list[Activation], heads: Sequence[int], model: Model) -> list[Activation]:
    """Return activations with these query heads alone, where they have any."""
    shape = model.shape
    chosen = []
    for each in activations:
        if "kv_head" in each.axes and shape.group_size > 1:
            raise InputError(
                f"heads= counts the {shape.n_heads} query heads, and {each.name} has {shape.n_kv_heads} key-value "
                f"heads, each shared by {shape.group_size} of them: cache {each.name} without heads=, and pick along "
                "its axis kv_head."
            )
        if (axis := each.head_axis) is not None:
            each = replace(each, size=(*each.size[: axis - 1], len(heads), *each.size[axis:]))
        chosen.append(each)
    if all(each.head_axis is None for each in activations):
        names = ", ".join(each.name for each in activations)
        raise InputError(f"heads= chooses heads, and none of what is kept has any: {names}.")
    return chosen


def _kept_in(dtype: torch.dtype) -> str:
    """Name the dtype in which activations of a dtype are kept: float32 or wider, whole numbers as they are."""
    kept = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    return str(kept).removeprefix("torch.")


def _places(name: str, layers: Sequence[int], model: Model) -> list[tuple[str, int | None]]:
    """Return the hooks that a name means, their layer left open, each with its layer."""
    if name in SITES:
        (site,) = sites_named(name, model)
        return [(site.hook, layer) for layer in site.among(layers, model)]
    if name in HOOKS:
        hook = HOOKS[name]
        return [(hook, layer) for layer in layers] if "{layer}" in hook else [(hook, None)]
    known, parts = model.raw.hook_dict, name.split(".")
    matching = [name] if name in known else []
    if "*" in name:  # each part between dots by itself
        split = {hook: hook.split(".") for hook in known}
        matching = [hook for hook, own in split.items() if len(own) == len(parts) and all(map(fnmatchcase, own, parts))]
    if not matching:
        open_names = dict.fromkeys(re.sub(r"^blocks\.\d+\.", "blocks.*.", hook) for hook in known)
        known_names = [*SITES, *HOOKS, *(open_names if "." in name else ())]
        near = did_you_mean(re.sub(r"^blocks\.\d+\.", "blocks.*.", name), known_names)
        raise InputError(f"{model.name} has no activation named {shown(name)}.{near}")
    places: list[tuple[str, int | None]] = []
    for hook in matching:
        # `layers=` cuts a pattern that leaves the layer open; a hook named with its layer is meant all the same.
        if (of_layer := re.fullmatch(r"blocks\.(\d+)\.(.+)", hook)) is None:
            places.append((hook, None))
        elif not name.startswith("blocks.*.") or int(of_layer[1]) in layers:
            places.append((f"blocks.{{layer}}.{of_layer[2]}", int(of_layer[1])))
    return places


def _axes_seen(
    hooks: Mapping[str, Iterable[int]], model: Model
) -> dict[str, tuple[tuple[str, ...], tuple[int, ...], str]]:
    """Run the model twice on a few tokens; return axes, size and dtype of hooks that are not sites."""

    def note(activation: object, hook: object, name: str, found: set[Any]) -> None:
        if not isinstance(activation, Tensor):
            raise InputError(f"{name} is a {type(activation).__name__} and cannot be kept.")
        found.add((tuple(activation.shape), _kept_in(activation.dtype)))
        if len(found) > 1:
            raise InputError(f"{name} has another shape in another layer: name its layers separately.")

    # Two lengths: one would not tell an axis of tokens from another of that size. Every vocabulary has token 0.
    runs: list[dict[str, set[Any]]] = []
    for n_texts, length in PROBES if hooks else ():
        found = {hook: set[Any]() for hook in hooks}
        watching: list[Hook] = []
        for hook, layers in hooks.items():
            for place in [hook.format(layer=layer) for layer in layers] or [hook]:
                watching.append((place, read_hook(partial(note, name=place, found=found[hook]))))
        model.run(Batch.of([[0] * length] * n_texts, pad=0), watching)
        runs.append(found)
    seen = {}
    for hook in hooks:
        ((short, dtype),), ((long, _),) = (found[hook] for found in runs)
        seen[hook] = (*_axes(hook, short, long, model), dtype)
    return seen


def _axes(
    hook: str, short: tuple[int, ...], long: tuple[int, ...], model: Model
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Tell the axes of an activation by its shapes in the two runs."""
    (n_texts, short_length), (_, long_length) = PROBES
    axes = ["batch" if n == 0 and size == n_texts else "" for n, size in enumerate(short)]
    for n, sizes in enumerate(zip(short, long, strict=False)):
        if sizes == (short_length, long_length):
            axes[n] = "key" if "position" in axes else "position"
    is_one_per_token = axes[:2] == ["batch", "position"] and "key" not in axes
    if not is_one_per_token and [axes[:1], axes[2:]] != [["batch"], ["position", "key"]]:
        raise InputError(
            f"{hook.replace('{layer}', '*')} cannot be kept text by text: for {n_texts} texts of {short_length} tokens "
            f"its shape is {short}."
        )
    shape = model.shape
    known = [("d_model", shape.d_model), ("d_mlp", shape.d_mlp), ("d_vocab", shape.d_vocab), ("head", shape.n_heads)]
    known += [("d_head", shape.d_head)] + ([("kv_head", shape.n_kv_heads)] if shape.group_size > 1 else [])
    size = tuple(size for size, axis in zip(short, axes, strict=True) if not axis)
    for length in size:  # an axis is named by its length, where one axis of the model alone has it
        names = [name for name, known_length in known if known_length == length]
        axes[axes.index("")] = names[0] if len(names) == 1 else "width"
    return tuple(axes[1:]), size


# Tokens of many texts, one text after the other, and which of them `positions=` means.
#
# Nothing is padded, so that one long text costs no more than itself; a `Batch` is made of whichever texts run together.
# Numbers in `positions=` count from each text's own beginning or end; words and roles are looked for in each text.


AT_ONCE = 256
"""Texts that are tokenized together."""


@checked_calls
@dataclasses.dataclass(frozen=True, eq=False)
class TokenizedTexts:
    """Tokens of texts, and which of them are kept."""

    table: pd.DataFrame
    """A row per token that is kept, in the order given: `example, position, token`, and `role` where positions were
    asked for by role. Also as `frame`."""
    tokens: pd.DataFrame
    """A row per token of every text: `example, position, token_id, token`, and for texts `start, end`, its
    characters."""
    texts: pd.DataFrame
    """A row per text: `example, tokens` (how many), `text` (None where token ids were given)."""
    asked: list[int] | None
    """The positions requested, where they were asked for by numbers."""
    pad: int
    """The token id at padding, where `batch` has any."""

    @cached_property
    def lengths(self) -> Int[Tensor, " example"]:
        """How many tokens each text has."""
        return torch.tensor(self.texts["tokens"].to_numpy(dtype=np.int64))

    @cached_property
    def counts(self) -> Int[Tensor, " example"]:
        """How many tokens of each text are kept."""
        counts = np.bincount(self.table["example"].to_numpy(dtype=np.int64), minlength=len(self.texts))
        return torch.tensor(counts.astype(np.int64))

    @cached_property
    def positions(self) -> Int[Tensor, "batch position"]:
        """Which token of its text each entry of the padded position (or query) axis is; -1 where there is none."""
        if self.asked is not None:
            return _columns_of(self.asked, self.lengths)
        columns = torch.full((len(self.counts), int(self.counts.max())), -1)
        kept = torch.tensor(self.table["position"].to_numpy())
        columns[torch.arange(columns.shape[1]) < self.counts[:, None]] = kept
        return columns

    @property
    def mask(self) -> Bool[Tensor, "batch position"]:
        """True where the padded position (or query) axis holds a real token."""
        return self.positions >= 0

    @property
    def batch(self) -> Batch:
        """The tokens that were run, padded; its positions are the key axis."""
        return self.batch_of(range(len(self.texts)))

    @cached_property
    def strings(self) -> tuple[tuple[str, ...], ...]:
        """The text of each row's real tokens."""
        words, ends = self.tokens["token"].tolist(), self.lengths.cumsum(0).tolist()
        return tuple(tuple(words[start:end]) for start, end in zip([0, *ends], ends, strict=False))

    def labels(self, row: int) -> tuple[str, ...]:
        """Return the text of the tokens along the padded position axis of one row; empty strings at padding."""
        return tuple(self.strings[row][p] if p >= 0 else "" for p in self.positions[row].tolist())

    def batch_of(self, examples: Sequence[int]) -> Batch:
        """Return some of the texts as a batch; errors call its rows by their numbers here."""
        starts, lengths = self._starts[list(examples)].tolist(), self.lengths[list(examples)].tolist()
        rows = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        batch, offsets, texts = Batch.of([self._ids[row].tolist() for row in rows], self.pad), None, None
        if self._spans is not None:
            offsets = tuple(tuple((a, b) for a, b in self._spans[row].tolist()) for row in rows)
        if (given := self.texts["text"].iloc[list(examples)]).notna().all():
            texts = tuple(given)
        return dataclasses.replace(batch, offsets=offsets, names=tuple(examples), texts=texts)

    @cached_property
    def _starts(self) -> Int[Tensor, " example"]:
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def _ids(self) -> np.ndarray:
        return self.tokens["token_id"].to_numpy()

    @cached_property
    def _spans(self) -> np.ndarray | None:
        spans = self.tokens[["start", "end"]]
        return None if spans.isna().any(axis=None) else spans.to_numpy(dtype=np.int64)


def kept_at(positions: Any, texts: TokenizedTexts) -> TokenizedTexts:
    """Return texts with the tokens kept that `positions=` means: see `headwater.models.positions`.

    A list or a tuple of whole numbers is several positions of every text; one that a text is too short for is left out
    there.
    """
    if positions is None:
        return texts
    roles: list[str] = []
    if (numbers := _numbers(positions)) is None:
        rows, roles = _found_in_each(positions, texts)
    else:
        if not numbers:
            raise InputError("positions= names no position.")
        longest = int(texts.lengths.max())
        if outside := [number for number in numbers if not -longest <= number < longest]:
            raise InputError(f"No sequence has a position {outside[0]}; the longest has {longest} tokens.")
        columns = _columns_of(numbers, texts.lengths)
        rows = (columns + texts._starts[:, None])[columns >= 0].tolist()
    table = texts.tokens[["example", "position", "token"]].iloc[rows].reset_index(drop=True)
    if isinstance(positions, Mapping):
        table = table.assign(role=roles)
    return dataclasses.replace(texts, table=table, asked=numbers)


def _found_in_each(positions: Any, texts: TokenizedTexts) -> tuple[list[int], list[str]]:
    """Look for what is named in each text by itself; return which tokens of all it is, and their roles."""
    n_texts, spans = len(texts.texts), texts._spans
    rows: list[int] = []
    roles: list[str] = []
    for example, (start, text) in enumerate(zip(texts._starts.tolist(), texts.texts["text"], strict=True)):
        of_text = slice(start, start + len(texts.strings[example]))
        offsets = None if spans is None else tuple(map(tuple, spans[of_text].tolist()))
        prompt = Prompt(tuple(texts._ids[of_text].tolist()), texts.strings[example], offsets, text)
        if isinstance(positions, Mapping):
            by_role = roles_of(positions, prompt, example, n_texts)
        else:
            by_role = {"": positions_of(positions, prompt, example, n_texts)}
        for role, found in by_role.items():
            rows += [start + position for position in found]
            roles += [role] * len(found)
    return rows, roles


def seen_by(sites: Sequence[Site], texts: TokenizedTexts) -> TokenizedTexts:
    """Keep of texts no token that some of these sites leaves out.

    Raises:
        InputError: nothing is left of a text.
    """
    if not any(site.leaves_out for site in sites):
        return texts
    ids, kept = np.split(texts._ids, texts._starts[1:].numpy()), texts.table["position"].to_numpy()
    is_seen: list[bool] = []
    for example, positions in enumerate(np.split(kept, texts.counts.cumsum(0)[:-1].numpy())):
        left_out = frozenset[int]().union(*(site.left_out(ids[example].tolist()) for site in sites))
        is_seen += [position not in left_out for position in positions.tolist()]
        if left_out.issuperset(positions.tolist()):
            raise InputError(
                f"Nothing of text {example} is left to keep: {sites[0].name} was trained without its tokens."
            )
    if all(is_seen):
        return texts
    return dataclasses.replace(texts, table=texts.table[is_seen].reset_index(drop=True), asked=None)


def read_texts(inputs: Inputs, model: Model) -> tuple[TokenizedTexts, dict[str, str]]:
    """Tokenize inputs, all of whose tokens are kept; return with them what a record says of chats."""
    batches = _batches(inputs, model)
    lengths = torch.cat([batch.lengths for batch in batches])
    # Each different token is decoded once, however often the texts hold it.
    ids, back = np.unique(np.concatenate([batch.tokens[batch.mask].numpy() for batch in batches]), return_inverse=True)
    words = np.array(model.token_strings(ids.tolist()), dtype=object)
    # Where any text has no characters known, as token ids have none, no text has.
    spans: list[tuple[int | None, int | None]] = [(None, None)] * len(back)
    if all(batch.offsets is not None for batch in batches):
        spans = [span for batch in batches for row in batch.offsets or () for span in row]
    given = [text for batch in batches for text in batch.texts or [None] * len(batch)]
    tokens = pd.DataFrame(
        {
            "example": torch.arange(len(lengths)).repeat_interleave(lengths).numpy(),
            "position": np.concatenate([np.arange(length) for length in lengths.tolist()]),
            "token_id": ids[back].astype(np.int64),
            "token": words[back],
            "start": pd.array([start for start, _ in spans], dtype="Int32"),
            "end": pd.array([end for _, end in spans], dtype="Int32"),
        }
    )
    texts = pd.DataFrame({"example": range(len(lengths)), "tokens": lengths.numpy(), "text": given})
    read = TokenizedTexts(tokens[["example", "position", "token"]], tokens, texts, None, pad_id(model.tokenizer))
    return read, note_on_chats(given)


def _batches(inputs: Inputs, model: Model) -> list[Batch]:
    """Tokenize inputs, texts some hundred at a time."""
    refuse_what_has_no_order(inputs)
    parts = [] if isinstance(inputs, Batch | Tensor) or is_one(inputs) else list(inputs)
    is_row = any(isinstance(part, Mapping) or (is_one(part) and not isinstance(part, str)) for part in parts[:1])
    if len(parts) <= AT_ONCE or is_row:  # of a row the parts are token ids, or messages
        return [model.tokenize(parts or inputs)]
    try:
        return [model.tokenize(parts[start : start + AT_ONCE]) for start in range(0, len(parts), AT_ONCE)]
    except InputError:
        model.tokenize(parts)  # the error counts rows from the first of all
        raise


def rows_of(texts: Sequence[int] | Int[Tensor, " text"], counts: Int[Tensor, " example"]) -> Int[Tensor, " row"]:
    """Return which rows some texts have, where each has so many and they come one after the other."""
    texts = torch.as_tensor(texts)
    first, sizes = (counts.cumsum(0) - counts)[texts], counts[texts]
    return torch.arange(int(sizes.sum())) + (first - sizes.cumsum(0) + sizes).repeat_interleave(sizes)


def _columns_of(numbers: Sequence[int], lengths: Int[Tensor, " example"]) -> Int[Tensor, "example position"]:
    """Return which token of each text numbers mean; -1 where a text is too short. Negative ones count from its end."""
    wanted = torch.tensor(list(numbers), dtype=torch.long)
    columns = torch.where(wanted < 0, lengths[:, None] + wanted, wanted.expand(len(lengths), -1))
    return torch.where((columns >= 0) & (columns < lengths[:, None]), columns, -1)


def _numbers(positions: object) -> list[int] | None:
    """Return positions that are numbers, of every text alike; None where they are named in another way."""
    if isinstance(positions, str):
        return [-1] if positions == "last" else None
    if has_no_order(positions):
        return None
    try:
        return whole_numbers(positions)
    except TypeError:
        return None
