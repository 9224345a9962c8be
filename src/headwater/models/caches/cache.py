"""A cache: activations of many texts, real tokens only, in memory or in files that are read memory-mapped.

What is kept of a text is a row per token asked for, and nothing where another text is longer. `cache.rows(site, layer)`
is `token ...`: the rows of all texts, one after the other, and `cache.frame` says of each its example, position and
token. Where all texts have as many rows, `cache[site, layer]` is `batch position ...`.

Attention patterns and scores say something of each key, and texts differ in keys. They are kept text by text, each as
`head position key` with the keys of that text alone: `cache.example(site, layer, example)`. Where all texts are equally
long, `cache[site, layer]` is `batch head query key`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from headwater.axes import AttentionCache, ResidualCache
from headwater.calls import checked_call
from headwater.errors import InputError, did_you_mean
from headwater.models.caches.activations import Activation, Names, layers_said, ranges
from headwater.models.caches.sequences import CacheLayout, Sequences, asked_columns
from headwater.models.tokens import Batch
from headwater.options import checked_count, shown
from headwater.runs.figure_options import Size
from headwater.runs.identity import digest
from headwater.runs.record import RunRecord
from headwater.runs.result import Result
from headwater.runs.shards import Shards

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST = 1e30
"""Numbers beyond it are what a mask writes into scores, and no activations."""


@dataclass(frozen=True, repr=False, eq=False)
class Cache(Result):
    """Activations of texts, with the labels of every axis; `model.cache(...)` and `hw.load_cache(folder)` give it."""

    table: pd.DataFrame
    """A row per token that is kept, in the order given: `example, position, token`, and `role` where positions were
    asked for by role. Also as `frame`."""
    tokens: pd.DataFrame
    """A row per token of every text: `example, position, token_id, token`, and for texts `start, end`, its
    characters."""
    texts: pd.DataFrame
    """A row per text: `example, tokens` (how many), `text` (None where token ids were given)."""
    contents: list[dict[str, Any]]
    """What is kept: see `headwater.models.caches.activations.Activation`."""
    asked: list[int] | None
    """The positions asked for, where they were asked for by numbers."""
    kept_layers: list[int]
    kept_heads: list[int]
    n_layers: int
    """Of the model."""
    pad: int
    """The token id at padding, where `batch` has any."""
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
        return {one["name"]: Activation.of(one) for one in self.contents}

    @property
    def nbytes(self) -> int:
        """How many bytes the numbers take."""
        rows = {one.name: int(self._layout.sizes(one).sum()) * len(one.places) for one in self.kept.values()}
        widths = {one.name: 1 if one.has_keys else math.prod(one.size) for one in self.kept.values()}
        return sum(rows[one.name] * widths[one.name] * one.torch_dtype().itemsize for one in self.kept.values())

    @property
    def layers(self) -> tuple[int, ...]:
        """Which layers were asked for, in that order."""
        return tuple(self.kept_layers)

    @property
    def heads(self) -> tuple[int, ...]:
        """Which query head each entry of the head axis is."""
        return tuple(self.kept_heads)

    def keys(self) -> list[str | tuple[str, int]]:
        """Return all that `cache[...]` answers to: ("z", 3) and "blocks.3.attn.hook_z"."""
        return self._names.keys()

    def axes(self, site: str) -> tuple[str, ...]:
        """Return the words for the axes of `cache[site, layer]`; those of `rows` begin with `token` in their place.

        Raises:
            InputError: nothing of that name is kept.
        """
        one, _ = self._names.found((site, None), any_layer=True)
        if one.has_keys:
            return ("batch", *("query" if axis == "position" else axis for axis in one.axes))
        return ("batch", *one.axes)

    def __len__(self) -> int:
        return len(self.keys())

    def __iter__(self) -> Iterator[str | tuple[str, int]]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        try:
            self._names.found(key)
        except InputError:
            return False
        return True

    def _ipython_key_completions_(self) -> list[str | tuple[str, int]]:
        return self.keys()

    # The numbers

    def __getitem__(self, key: str | tuple[str, int]) -> Shaped[Tensor, "batch ..."]:
        """Return an activation of all texts: `batch position ...`, or `batch head query key`."""
        one, place = self._names.found(key)
        what = f"{one.name!r}, {one.layers[place]}" if one.layers else repr(one.name)
        if not self._layout.same_counts or (one.has_keys and not self._layout.same_lengths):
            counted = self._lengths if one.has_keys else self._counts
            instead = (
                f"cache.example({what}, example) is one text's"
                if one.has_keys
                else f"cache.rows({what}) is `token ...`, with cache.frame beside it"
            )
            raise InputError(
                f"cache[{what}] would be {' '.join(self.axes(one.name))}, but the texts have "
                f"{int(counted.min())} to {int(counted.max())} tokens each: {instead}."
            )
        whole = self._layout.numbers(one, place)
        if not one.has_keys:
            return whole.reshape(len(self._counts), -1, *one.size)
        return whole.reshape(len(self._counts), *one.size, int(self._counts[0]), int(self._lengths[0]))

    def rows(self, site: str, layer: int | None = None, *, role: str | None = None) -> Shaped[Tensor, "token ..."]:
        """Return an activation of every token that is kept, in the order of `frame`: `token ...`.

        Args:
            site: a short name, or a hook's.
            layer: negative numbers count from the last; not needed where one alone is kept.
            role: only tokens of this role, where positions were asked for by role.

        Raises:
            InputError: nothing of that name and layer is kept, or it has keys, of which texts have different numbers.
        """
        one, place = self._names.found((site, layer))
        whole, of_role = self._layout.numbers(one, place), self._of_role(role)
        if not one.has_keys:
            return whole if of_role is None else whole[of_role]
        if not self._layout.same_lengths:
            raise InputError(
                f"{one.name} says something of each key, and the texts have {int(self._lengths.min())} to "
                f"{int(self._lengths.max())}: cache.example({one.name!r}, layer, example) is one text's."
            )
        parts = whole.split(self._layout.sizes(one).tolist())
        rows = torch.cat([self._layout.block(one, part, n).movedim(-2, 0) for n, part in enumerate(parts)])
        return rows if of_role is None else rows[of_role]

    def example(self, site: str, layer: int | None, example: int) -> Tensor:
        """Return an activation of one text: `position ...`, or `head position key` with its own keys.

        Raises:
            InputError: nothing of that name and layer is kept, or there is no such text.
        """
        one, place = self._names.found((site, layer))
        example = checked_count("example", example, least=0, most=len(self._counts) - 1)
        return self._layout.of_example(one, place, example).clone()

    def to_numpy(
        self, site: str, layer: int | None = None, *, role: str | None = None
    ) -> Shaped[np.ndarray, "token width"]:
        """Return a row per token and a column per number, as scikit-learn takes them.

        Raises:
            InputError: see `rows`.
        """
        rows = self.rows(site, layer, role=role)
        return rows.reshape(len(rows), -1).cpu().numpy()

    def to_frame(self, site: str, layer: int | None = None, *, role: str | None = None) -> pd.DataFrame:
        """Return `frame` with a further column for every number, named by its place: `z.0.3` is head 0, number 3.

        Raises:
            InputError: see `rows`.
        """
        one, _ = self._names.found((site, layer))
        numbers, of_role = self.to_numpy(site, layer, role=role), self._of_role(role)
        sizes = (*one.size, int(self._lengths[0])) if one.has_keys else one.size
        labels = [self.heads if axis in ("head", "kv_head") and size == len(self.heads) else range(size)
                  for axis, size in zip([a for a in one.axes if a != "position"], sizes, strict=True)]  # fmt: skip
        index: Any = np.stack(np.meshgrid(*labels, indexing="ij"), -1).reshape(-1, len(labels)) if labels else [[]]
        names = [".".join([one.name, *map(str, place)]) for place in index]
        table = self.table if of_role is None else self.table[of_role.tolist()].reset_index(drop=True)
        return pd.concat([table, pd.DataFrame(numbers, columns=names)], axis=1)

    # The form of several layers at once, padded

    @property
    def site(self) -> str | None:
        """The first site kept that has one vector per token; None where there is none."""
        found = (one.name for one in self.kept.values() if len(one.axes) == 2 and one.layers)
        return next(found, None)

    @cached_property
    def residual(self) -> ResidualCache:
        """What is kept at `site`, padded: `layer batch position d_model`, zero where `mask` is False.

        Raises:
            InputError: no site with one vector per token is kept.
        """
        if self.site is None:
            raise InputError(
                f"This cache keeps {self._said_sites()} and no residual stream: ask for sites='resid_post'."
            )
        return self._layout.padded(self.kept[self.site], self.mask)

    @cached_property
    def attention(self) -> AttentionCache:
        """Attention patterns, padded: `layer batch head query key`, zero where the query or key is padding.

        Raises:
            InputError: they are not kept.
        """
        if "pattern" not in self.kept:
            raise InputError(f"This cache keeps {self._said_sites()} and no attention: ask for sites='pattern'.")
        return self._layout.padded(self.kept["pattern"], self.mask)

    def attention_by_role(self) -> pd.DataFrame:
        """Return how much each head attends from the tokens of a role to those of a role, as positions were asked for.

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
        found = einsum(pattern.float(), share, attended, axes)
        labels = pd.MultiIndex.from_product(
            [self.layers, self.heads, roles, roles], names=["layer", "head", "role", "to"]
        )
        return labels.to_frame(index=False).assign(attention=found.flatten().numpy())

    @cached_property
    def positions(self) -> Int[Tensor, "batch position"]:
        """Which token of its text each entry of the padded position (or query) axis is; -1 where there is none."""
        if self.asked is not None:
            return asked_columns(self.asked, self._lengths)
        columns = torch.full((len(self._counts), int(self._counts.max())), -1)
        columns[torch.arange(columns.shape[1]) < self._counts[:, None]] = torch.tensor(
            self.table["position"].to_numpy()
        )
        return columns

    @property
    def mask(self) -> Bool[Tensor, "batch position"]:
        """True where the padded position (or query) axis holds a real token."""
        return self.positions >= 0

    @cached_property
    def batch(self) -> Batch:
        """The tokens that were run, padded; its positions are the key axis."""
        ids, spans = (self.tokens[names].to_numpy() for names in (["token_id"], ["start", "end"]))
        texts = tuple(self.texts["text"])
        known = None not in texts and not np.isnan(spans.astype(float)).any()
        sequences = Sequences(
            torch.tensor(ids[:, 0].astype(np.int64)),
            self._lengths,
            self.pad,
            torch.tensor(spans.astype(np.int32)) if known else None,
            texts if None not in texts else None,
        )
        return sequences.batch(range(len(texts)))

    @cached_property
    def strings(self) -> tuple[tuple[str, ...], ...]:
        """The text of each row's real tokens."""
        ends = self._lengths.cumsum(0).tolist()
        words = self.tokens["token"].tolist()
        return tuple(tuple(words[end - n : end]) for end, n in zip(ends, self._lengths.tolist(), strict=True))

    def labels(self, row: int) -> tuple[str, ...]:
        """Return the text of the tokens along the padded position axis of one row; empty strings at padding."""
        return tuple(self.strings[row][p] if p >= 0 else "" for p in self.positions[row].tolist())

    # What every result has

    def summary(self) -> pd.DataFrame:
        """Return a row for each activation and layer: `site, layer, tokens, width, rms, largest`.

        `rms` is the root of the mean square of its numbers, `largest` the largest of them regardless of sign; numbers
        that a mask wrote into scores are left out.
        """
        found = []
        for one in self.kept.values():
            for place, layer in enumerate(one.places):
                squares, count, largest = 0.0, 0, 0.0
                for part in self.activations:
                    numbers = part[one.name][place].double().flatten()
                    numbers = numbers[numbers.abs() < LARGEST]
                    squares, count = squares + float(numbers.square().sum()), count + numbers.numel()
                    largest = max(largest, float(numbers.abs().max()) if numbers.numel() else 0.0)
                rms = (squares / max(count, 1)) ** 0.5
                width = math.prod(one.size)
                found.append((one.name, layer, len(self.table), width, rms, largest))
        names = ["site", "layer", "tokens", "width", "rms", "largest"]
        return pd.DataFrame(found, columns=names).astype({"layer": "Int64"})

    def report(self) -> list[str]:
        """Return what is kept, and of how many tokens."""
        said = [
            f"{len(self.table):,} tokens of {len(self.texts):,} texts are kept, {self.nbytes / 2**20:,.1f} MiB; "
            "nothing is kept of padding."
        ]
        for one in self.kept.values():
            layers = f" of {layers_said(one.layers)}" if one.layers else ""
            said.append(f"{one.name}{layers}: {' '.join(self.axes(one.name))}, {one.dtype}.")
        return said

    def plot(self, ax: Axes | None = None, *, title: str | None = None, figsize: Size | None = None) -> Axes | Figure:
        """Draw how large the numbers of each activation are, by layer; of attention patterns alone, the patterns.

        Patterns are those of the first text, a panel for each head (of many heads, their mean for each layer).
        """
        return self._drawn(ax, title, figsize)

    def digest(self) -> str:
        """Name this cache in the record of a run that starts from it: by what made it, or else by all it holds."""
        if self.run.unknown:
            return super().digest()
        run = self.run
        return digest(["Cache", run.analysis, run.fingerprint, run.tokenizer, run.dtype, run.options, run.versions])

    def __repr__(self) -> str:
        said = {"pattern": "attention"}  # as the attribute is called
        shapes = ", ".join(f"{said.get(one.name, one.name)} {self._said_shape(one)}" for one in self._in_order())
        size = self.nbytes / 2**20
        layers = f"layers {ranges(self.layers)}; " if any(one.layers for one in self.kept.values()) else ""
        return f"Cache({shapes}; {layers}{size:,.1f} MiB)"

    # Inside

    def _said_sites(self) -> str:
        return ", ".join(one.name for one in self._in_order())

    def _of_role(self, role: str | None) -> Bool[Tensor, " token"] | None:
        """Return which rows are of a role; None for all of them."""
        if role is None:
            return None
        known = list(dict.fromkeys(self.table["role"])) if "role" in self.table else []
        if role not in known:
            raise InputError(f"No position of this cache has the role {shown(role)}.{did_you_mean(role, known)}")
        return torch.tensor((self.table["role"] == role).tolist())

    def _in_order(self) -> list[Activation]:
        return sorted(self.kept.values(), key=lambda one: one.has_keys)

    def _said_shape(self, one: Activation) -> str:
        """The sizes of the axes; where texts differ, how many tokens there are in all."""
        alike = self._layout.same_counts
        counted = f"{self._counts[0]}" if alike else f"{self._counts.sum()} tokens"
        keys = set(self._lengths.tolist())
        of_keys = f"{keys.pop()}" if len(keys) == 1 else "its keys"
        sizes = [*one.size, counted, of_keys] if one.has_keys else [counted, *one.size]
        return f"({', '.join(map(str, [len(one.places), len(self._counts), *sizes]))})"

    @cached_property
    def _names(self) -> Names:
        """What it answers to."""
        return Names(self.kept, self.n_layers)

    @cached_property
    def _layout(self) -> CacheLayout:
        """Where the numbers lie."""
        return CacheLayout(self.activations, self._counts, self._lengths)

    @cached_property
    def _lengths(self) -> Int[Tensor, " example"]:
        return torch.tensor(self.texts["tokens"].to_numpy(dtype=np.int64))

    @cached_property
    def _counts(self) -> Int[Tensor, " example"]:
        """How many rows each text has."""
        counts = np.bincount(self.table["example"].to_numpy(dtype=np.int64), minlength=len(self.texts))
        return torch.tensor(counts.astype(np.int64))


@checked_call
def load_cache(folder: str | Path) -> Cache:
    """Read a cache that `save`, or `model.cache(..., out=folder)`, wrote; the numbers stay in its files.

    Raises:
        RunFolderError: the folder holds no finished cache.
    """
    return Cache.load(folder)
