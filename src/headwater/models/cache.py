"""A cache: activations of many texts, real tokens only, in memory or in files that are read memory-mapped.

What is kept of a text is a row per token requested, and nothing where another text is longer. `cache.rows(site, layer)`
is `token ...`: the rows of all texts, one after the other, and `cache.frame` says of each its example, position and
token. Where all texts have as many rows, `cache[site, layer]` is `batch position ...`.

Attention patterns and scores say something of each key, and texts differ in keys. They are kept text by text, each as
`head position key` with the keys of that text alone: `cache.example(site, layer, example)`. Where all texts are equally
long, `cache[site, layer]` is `batch head query key`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from headwater.axes import AttentionCache, ResidualCache
from headwater.calls import checked_call, checked_calls
from headwater.errors import InputError, did_you_mean
from headwater.models.positions import Prompt, positions_of, roles_of
from headwater.models.sites import Site
from headwater.models.tokens import Batch, Inputs, note_on_chats, pad_id, refuse_what_has_no_order
from headwater.options import checked_count, has_no_order, is_one, shown, whole_numbers
from headwater.runs.identity import digest
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, Size
from headwater.runs.storage import Shards

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headwater.models.model import Model


LARGEST = 1e30
"""Numbers beyond it are what a mask writes into scores, and no activations."""
AT_ONCE = 256
"""Texts that are tokenized together."""


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
        return getattr(torch, self.dtype)

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


# Tokens of many texts, one text after the other, and which of them `positions=` means.
#
# Nothing is padded, so that one long text costs no more than itself; a `Batch` is made of whichever texts run together.
# Numbers in `positions=` count from each text's own beginning or end; words and roles are looked for in each text.


@checked_calls
@dataclass(frozen=True, eq=False)
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
    rows: list[int] = []
    roles: list[str] = []
    if (numbers := _numbers(positions)) is None:
        n_texts, spans = len(texts.texts), texts._spans
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


def seen_by(sites: Sequence[Site], texts: TokenizedTexts) -> TokenizedTexts:
    """Keep of texts no token that some of these sites leaves out; refuse a text of which nothing is left."""
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
    strings = [text for batch in batches for text in batch.texts or [None] * len(batch)]
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
    texts = pd.DataFrame({"example": range(len(lengths)), "tokens": lengths.numpy(), "text": strings})
    read = TokenizedTexts(tokens[["example", "position", "token"]], tokens, texts, None, pad_id(model.tokenizer))
    return read, note_on_chats(strings)


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


@dataclass(frozen=True, repr=False, eq=False)
class Cache(TokenizedTexts, Result):
    """Activations of texts, with the labels of every axis; `model.cache(...)` and `hw.load_cache(folder)` give it."""

    contents: list[dict[str, Any]]
    """What is kept: see `Activation`."""
    kept_heads: list[int]
    n_layers: int
    """Of the model."""
    activations: Shards
    """The numbers. Every part has `examples`, the texts that it holds, and by name `layer token ...`; what has keys,
    `layer number`: text by text its `head position key`."""
    run: RunRecord

    # What is there

    @property
    def frame(self) -> pd.DataFrame:
        """The table: which example, position and token each row of `rows` is."""
        return self.table

    @cached_property
    def kept(self) -> dict[str, Activation]:
        """What is kept, by short name, or by hook name with `*` for its layer."""
        return {plain["name"]: Activation.of(plain) for plain in self.contents}

    @property
    def nbytes(self) -> int:
        """How many bytes the numbers take."""
        return sum(int(kept.nbytes(self.counts, self.lengths).sum()) for kept in self.kept.values())

    @property
    def layers(self) -> tuple[int, ...]:
        """Which layers were requested, in that order."""
        return tuple(dict.fromkeys(layer for kept in self.kept.values() for layer in kept.layers))

    @property
    def heads(self) -> tuple[int, ...]:
        """Which query head each entry of the head axis is."""
        return tuple(self.kept_heads)

    def keys(self) -> list[str | tuple[str, int]]:
        """Return all that `cache[...]` answers to: ("z", 3) and "blocks.3.attn.hook_z"."""
        kept = self.kept.values()
        short: list[str | tuple[str, int]] = [(each.name, layer) for each in kept for layer in each.layers]
        return short + [each.hook_name(layer) for each in kept if not each.is_read for layer in each.places]

    def axes(self, site: str) -> tuple[str, ...]:
        """Return the words for the axes of `cache[site, layer]`; those of `rows` begin with `token` in their place.

        Raises:
            InputError: nothing of that name is kept.
        """
        kept, _ = self._named(site)
        return ("batch", *("query" if axis == "position" and kept.has_keys else axis for axis in kept.axes))

    def __len__(self) -> int:
        return len(self.keys())

    def __iter__(self) -> Iterator[str | tuple[str, int]]:
        return iter(self.keys())

    def __array__(self, *_: object, **__: object) -> Any:
        raise InputError("A cache holds several tensors: take one, as cache['resid_post', 3], or cache.residual.")

    def __contains__(self, key: object) -> bool:
        try:
            self._find(key)
        except InputError:
            return False
        return True

    _ipython_key_completions_ = keys

    # The numbers

    def __getitem__(self, key: str | tuple[str, int]) -> Shaped[Tensor, "batch ..."]:
        """Return an activation of all texts: `batch position ...`, or `batch head query key`."""
        activation, place = self._find(key)
        what = f"{activation.name!r}, {activation.layers[place]}" if activation.layers else repr(activation.name)
        if not _alike(self.counts) or (activation.has_keys and not _alike(self.lengths)):
            counted, instead = self.counts, f"cache.rows({what}) is `token ...`, with cache.frame beside it"
            if activation.has_keys:
                counted, instead = self.lengths, f"cache.example({what}, example) is one text's"
            raise InputError(
                f"cache[{what}] would be {' '.join(self.axes(activation.name))}, but the texts have "
                f"{int(counted.min())} to {int(counted.max())} tokens each: {instead}."
            )
        return self._numbers(activation, place).reshape(len(self.counts), *self._shape(activation, 0))

    def rows(self, site: str, layer: int | None = None, *, role: str | None = None) -> Shaped[Tensor, "token ..."]:
        """Return an activation of every token that is kept, in the order of `frame`: `token ...`.

        Args:
            site: a short name, or a hook's.
            layer: negative numbers count from the last; not needed where one alone is kept.
            role: only tokens of this role, where positions were asked for by role.

        Raises:
            InputError: nothing of that name and layer is kept, or it has keys, of which texts have different numbers.
        """
        activation, place = self._find((site, layer))
        numbers, of_role = self._numbers(activation, place), self._of_role(role)
        if activation.has_keys:
            if not _alike(self.lengths):
                raise InputError(
                    f"{activation.name} says something of each key, and the texts have {int(self.lengths.min())} to "
                    f"{int(self.lengths.max())}: cache.example({activation.name!r}, layer, example) is one text's."
                )
            texts = numbers.split(self._sizes(activation).tolist())
            numbers = torch.cat([text.view(self._shape(activation, n)).movedim(-2, 0) for n, text in enumerate(texts)])
        return numbers if of_role is None else numbers[of_role]

    def example(self, site: str, layer: int | None, example: int) -> Tensor:
        """Return an activation of one text: `position ...`, or `head position key` with its own keys.

        Raises:
            InputError: nothing of that name and layer is kept, or there is no such text.
        """
        activation, place = self._find((site, layer))
        example = checked_count("example", example, least=0, most=len(self.counts) - 1)
        number, before = self._part_of[example]
        part, sizes = self.activations[number], self._sizes(activation)
        start = int(sizes[part["examples"][:before]].sum())
        numbers = part[activation.name][place][start : start + int(sizes[example])]
        # A copy: a view would hold the whole mapped part, and writing into it is not allowed in files.
        return numbers.reshape(self._shape(activation, example)).clone()

    def to_numpy(
        self, site: str, layer: int | None = None, *, role: str | None = None
    ) -> Shaped[np.ndarray, "token width"]:
        """Return `rows` with a row per token and a column per number, as scikit-learn takes them.

        Raises:
            InputError: see `rows`.
        """
        rows = self.rows(site, layer, role=role)
        return rows.reshape(len(rows), -1).cpu().numpy()

    def to_frame(self, site: str, layer: int | None = None, *, role: str | None = None) -> pd.DataFrame:
        """Return `frame` with a column for every number of `rows`, named by its place: `z.0.3` is head 0, number 3.

        Raises:
            InputError: see `rows`.
        """
        activation, _ = self._find((site, layer))
        sizes = (*activation.size, int(self.lengths[0])) if activation.has_keys else activation.size
        labels = [
            self.heads if axis in ("head", "kv_head") and size == len(self.heads) else range(size)
            for axis, size in zip([axis for axis in activation.axes if axis != "position"], sizes, strict=True)
        ]
        names = [".".join([activation.name, *map(str, place)]) for place in product(*labels)]
        numbers, of_role = self.to_numpy(site, layer, role=role), self._of_role(role)
        table = self.table if of_role is None else self.table[of_role.tolist()].reset_index(drop=True)
        return pd.concat([table, pd.DataFrame(numbers, columns=names)], axis=1)

    # The form of several layers at once, padded

    @property
    def site(self) -> str | None:
        """The first site kept that has one vector per token; None where there is none."""
        return next((kept.name for kept in self.kept.values() if len(kept.axes) == 2 and kept.layers), None)

    @cached_property
    def residual(self) -> ResidualCache:
        """What is kept at `site`, padded: `layer batch position d_model`, zero where `mask` is False.

        Raises:
            InputError: no site with one vector per token is kept.
        """
        if self.site is None:
            raise InputError(f"This cache keeps {self._site_names} and no residual stream: ask for sites='resid_post'.")
        return self._padded(self.kept[self.site])

    @cached_property
    def attention(self) -> AttentionCache:
        """Attention patterns, padded: `layer batch head query key`, zero where the query or key is padding.

        Raises:
            InputError: they are not kept.
        """
        if "pattern" not in self.kept:
            raise InputError(f"This cache keeps {self._site_names} and no attention: ask for sites='pattern'.")
        return self._padded(self.kept["pattern"])

    def attention_by_role(self) -> pd.DataFrame:
        """Return how much each head attends from the tokens of a role to those of a role, as positions were requested.

        A row per layer, head, role and role attended to: `layer, head, role, to, attention`, what a token of `role`
        gives to all tokens of `to` together, as a mean over the tokens of `role` in all texts.

        Raises:
            InputError: patterns are not kept, or positions were not asked for by role.
        """
        pattern, mask = self.attention, self.mask
        if "role" not in self.table:
            raise InputError('This cache keeps no roles: ask for them, as in positions={"source": 3, "end": "last"}.')
        roles = self.table["role"].unique().tolist()
        code = torch.full(mask.shape, -1)
        code[mask] = torch.tensor(self.table["role"].map(roles.index).to_numpy())
        attending = code == torch.arange(len(roles))[:, None, None]
        attended = torch.zeros(len(roles), len(mask), pattern.shape[-1])
        role, text, row = attending.nonzero(as_tuple=True)
        attended[role, text, self.positions[text, row]] = 1
        share = attending / attending.sum((1, 2), keepdim=True)
        axes = "layer batch head query key, role batch query, to batch key -> layer head role to"
        attention = einsum(pattern.float(), share, attended, axes)
        labels = pd.MultiIndex.from_product(
            [self.layers, self.heads, roles, roles], names=["layer", "head", "role", "to"]
        )
        return labels.to_frame(index=False).assign(attention=attention.flatten().numpy())

    # What every result has

    def summary(self) -> pd.DataFrame:
        """Return a row for each activation and layer: `site, layer, tokens, width, rms, largest`.

        `rms` is the root of the mean square of its numbers, `largest` the largest of them regardless of sign; numbers
        that a mask wrote into scores are left out.
        """
        rows = []
        for activation, place, layer in ((each, *at) for each in self.kept.values() for at in enumerate(each.places)):
            squares, count, largest = 0.0, 0, 0.0
            # Part by part, since a cache in files may be larger than memory.
            for part in self.activations:
                sizes = part[activation.name][place].double().abs().flatten()
                sizes = sizes[sizes < LARGEST]
                squares, count = squares + float(sizes.square().sum()), count + sizes.numel()
                largest = max(largest, float(sizes.max()) if sizes.numel() else 0.0)
            rms = (squares / max(count, 1)) ** 0.5
            rows.append((activation.name, layer, len(self.table), math.prod(activation.size), rms, largest))
        names = ["site", "layer", "tokens", "width", "rms", "largest"]
        return pd.DataFrame(rows, columns=names).astype({"layer": "Int64"})

    def report(self) -> list[str]:
        """Return what is kept, and of how many tokens."""
        lines = [
            f"{len(self.table):,} tokens of {len(self.texts):,} texts are kept, {self.nbytes / 2**20:,.1f} MiB; "
            "nothing is kept of padding."
        ]
        for kept in self.kept.values():
            layers = f" of {_layers(kept.layers)}" if kept.layers else ""
            lines.append(f"{kept.name}{layers}: {' '.join(self.axes(kept.name))}, {kept.dtype}.")
        return lines

    def plot(
        self,
        ax: Axes | None = None,
        *,
        heads: Sequence[tuple[int, int]] | None = None,
        example: int = 0,
        title: str | None = None,
        figsize: Size | None = None,
    ) -> Axes | Figure:
        """Draw how large activations are, by layer; of chosen heads, or where nothing else is kept, attention patterns.

        Args:
            ax: where to draw; default: a new figure. Where no head is chosen, it shows the mean of all patterns.
            heads: pairs (layer, head), a panel each, of more than 48 a tile each in one image, by layer and head;
                default: all that are kept, of many the mean of each layer.
            example: the text whose patterns are drawn.
            title: in place of the figure's own.
            figsize: width and height of a new figure, in inches.

        Raises:
            InputError: a head is not in the cache, or there is no such text; or `ax` was given for several heads.
        """
        return self._drawn(ax, title, figsize, heads=heads, example=example)

    def digest(self) -> str:
        """Name this cache in the record of a run that starts from it: by what made it, or else by all it holds."""
        if self.run.unknown:
            return super().digest()
        run = self.run
        return digest(["Cache", run.analysis, run.fingerprint, run.tokenizer, run.dtype, run.options, run.versions])

    def __repr__(self) -> str:
        shapes = []
        for activation in sorted(self.kept.values(), key=lambda each: each.has_keys):
            # where texts differ, how many tokens there are in all
            counted = f"{self.counts[0]}" if _alike(self.counts) else f"{self.counts.sum()} tokens"
            keys = f"{self.lengths[0]}" if _alike(self.lengths) else "its keys"
            sizes = [*activation.size, counted, keys] if activation.has_keys else [counted, *activation.size]
            name = "attention" if activation.name == "pattern" else activation.name  # as the attribute is called
            shapes.append(f"{name} ({', '.join(map(str, [len(activation.places), len(self.counts), *sizes]))})")
        layers = f"layers {_ranges(self.layers)}; " if any(each.layers for each in self.kept.values()) else ""
        return f"Cache({', '.join(shapes)}; {layers}{self.nbytes / 2**20:,.1f} MiB)"

    # Inside

    @property
    def _site_names(self) -> str:
        return ", ".join(sorted(self.kept, key=lambda name: self.kept[name].has_keys))

    def _of_role(self, role: str | None) -> Bool[Tensor, " token"] | None:
        """Return which rows are of a role; None for all of them."""
        if role is None:
            return None
        known = list(dict.fromkeys(self.table["role"])) if "role" in self.table else []
        if role not in known:
            raise InputError(f"No position of this cache has the role {shown(role)}.{did_you_mean(role, known)}")
        return torch.tensor((self.table["role"] == role).tolist())

    def _find(self, key: object) -> tuple[Activation, int]:
        """Return the activation that a key means, and which of its layers, by their order."""
        name, layer = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        activation, place = self._named(name)
        if layer is None and place is not None:
            return activation, place
        where = f"is kept at {_layers(activation.layers)}" if activation.layers else "has no layer"
        if layer is None:
            example = f"cache[{activation.name!r}, {activation.layers[-1]}]"
            raise InputError(f"{activation.name} {where}: name one of them, as in {example}.")
        number = checked_count("layer", layer, least=-self.n_layers)
        number += self.n_layers if number < 0 else 0
        if number not in activation.layers or place not in (None, activation.layers.index(number)):
            raise InputError(f"The cache holds no {activation.name!r} of layer {layer}: {activation.name} {where}.")
        return activation, activation.layers.index(number)

    def _named(self, name: object) -> tuple[Activation, int | None]:
        """Return the activation of a name, and which of its layers where the name, or there being one, says it."""
        if not isinstance(name, str):
            raise InputError(f"The cache holds no {shown(name)}: ask for a site and a layer, as in cache.keys().")
        names: dict[str, tuple[Activation, int | None]] = {}
        for activation in self.kept.values():
            place = 0 if len(activation.places) == 1 else None
            names[activation.name] = (activation, place)
            if not activation.is_read:
                names.setdefault(activation.hook.replace("{layer}", "*"), (activation, place))
                names |= {activation.hook_name(layer): (activation, n) for n, layer in enumerate(activation.places)}
        if name not in names:
            near = did_you_mean(name, list(names), or_all=False)
            if not near:
                sites = [
                    each.name + (f" at {_layers(each.layers)}" if each.layers else "") for each in self.kept.values()
                ]
                near = f" It keeps {'; '.join(sites[:12])}{'; ...' * (len(sites) > 12)}."
            raise InputError(f"The cache does not hold {shown(name)}.{near}")
        return names[name]

    def _sizes(self, kept: Activation) -> Int[Tensor, " example"]:
        """How many rows each text has in one layer."""
        return kept.rows(self.counts, self.lengths)

    def _shape(self, kept: Activation, example: int) -> tuple[int, ...]:
        """The shape of one text's activation."""
        return kept.shape(int(self.counts[example]), int(self.lengths[example]))

    def _numbers(self, activation: Activation, place: int) -> Tensor:
        """What is kept in one layer, the texts one after the other in the order given."""
        if len(self.activations) == 1 and [*self._part_of] == [*range(len(self.counts))]:
            return self.activations[0][activation.name][place]  # without a copy
        sizes = self._sizes(activation)
        whole = torch.empty(int(sizes.sum()), *activation.row, dtype=activation.torch_dtype)
        for part in self.activations:  # in files, parts are ordered by length
            whole[rows_of(part["examples"], sizes)] = part[activation.name][place]
        return whole

    def _padded(self, activation: Activation) -> Tensor:
        """What is kept in all layers: `layer batch ...`, every text as long as the longest, 0 where `mask` is False."""
        mask, n_texts, n_layers = self.mask, len(self.counts), len(activation.places)
        alike = bool(mask.all()) and (not activation.has_keys or _alike(self.lengths))
        if alike and len(self.activations) == 1 and self.activations.in_memory:
            shape = self._shape(activation, 0)
            return self.activations[0][activation.name].reshape(n_layers, n_texts, *shape)  # without a copy
        rows = torch.stack([self._numbers(activation, place) for place in range(n_layers)])
        padded = rows.new_zeros(n_layers, n_texts, *activation.shape(mask.shape[1], int(self.lengths.max())))
        if not activation.has_keys:
            padded[:, mask.to(rows.device)] = rows
            return padded
        for example, text in enumerate(rows.split(self._sizes(activation).tolist(), dim=1)):
            queries, n_keys = mask[example].nonzero()[:, 0], int(self.lengths[example])
            padded[:, example, ..., queries, :n_keys] = text.reshape(n_layers, *self._shape(activation, example))
        return padded

    @cached_property
    def _part_of(self) -> dict[int, tuple[int, int]]:
        """By text, which part it is in, and how many texts come before it there."""
        listed = enumerate(part["examples"].tolist() for part in self.activations)
        return {text: (part, n) for part, texts in listed for n, text in enumerate(texts)}


def _alike(counts: Int[Tensor, " example"]) -> bool:
    return bool((counts == counts[0]).all())


def _layers(layers: tuple[int, ...]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {_ranges(layers)}"


def _ranges(numbers: tuple[int, ...]) -> str:
    """Name numbers, those of a row by its ends."""
    is_row = len(numbers) > 2 and numbers == tuple(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if is_row else ", ".join(map(str, numbers))


@checked_call
def load_cache(folder: str | Path) -> Cache:
    """Read a cache that `save`, or `model.cache(..., out=folder)`, wrote; the numbers stay in its files.

    Raises:
        RunFolderError: the folder holds no finished cache.
    """
    return Cache.load(folder)
