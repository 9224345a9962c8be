"""A cache: activations of many texts, real tokens only, in memory or in files that are read memory-mapped.

What is kept of a text is a row per token requested, and nothing where another text is longer. `cache.rows(site, layer)`
is `token ...`: the rows of all texts, one after the other, and `cache.frame` says of each its example, position and
token. Where all texts have as many rows, `cache[site, layer]` is `batch position ...`.

Attention patterns and scores say something of each key, and texts differ in keys. They are kept text by text, each as
`head position key` with the keys of that text alone: `cache.example(site, layer, example)`. Where all texts are equally
long, `cache[site, layer]` is `batch head query key`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
from headwater.calls import checked_call
from headwater.errors import InputError, did_you_mean
from headwater.models.cache_selection import Activation, TokenizedTexts, rows_of
from headwater.options import checked_count, shown
from headwater.runs.identity import digest
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, Size
from headwater.runs.storage import Shards

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LARGEST = 1e30
"""Numbers beyond it are what a mask writes into scores, and no activations."""


@dataclass(frozen=True, repr=False, eq=False)
class Cache(TokenizedTexts, Result):
    """Activations of texts, with the labels of every axis; `model.cache(...)` and `hw.load_cache(folder)` give it."""

    contents: list[dict[str, Any]]
    """What is kept: see `headwater.models.cache_selection.Activation`."""
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
        kept, place = self._find(key)
        what = f"{kept.name!r}, {kept.layers[place]}" if kept.layers else repr(kept.name)
        if not _alike(self.counts) or (kept.has_keys and not _alike(self.lengths)):
            counted, instead = self.counts, f"cache.rows({what}) is `token ...`, with cache.frame beside it"
            if kept.has_keys:
                counted, instead = self.lengths, f"cache.example({what}, example) is one text's"
            raise InputError(
                f"cache[{what}] would be {' '.join(self.axes(kept.name))}, but the texts have "
                f"{int(counted.min())} to {int(counted.max())} tokens each: {instead}."
            )
        return self._numbers(kept, place).reshape(len(self.counts), *self._shape(kept, 0))

    def rows(self, site: str, layer: int | None = None, *, role: str | None = None) -> Shaped[Tensor, "token ..."]:
        """Return an activation of every token that is kept, in the order of `frame`: `token ...`.

        Args:
            site: a short name, or a hook's.
            layer: negative numbers count from the last; not needed where one alone is kept.
            role: only tokens of this role, where positions were asked for by role.

        Raises:
            InputError: nothing of that name and layer is kept, or it has keys, of which texts have different numbers.
        """
        kept, place = self._find((site, layer))
        numbers, of_role = self._numbers(kept, place), self._of_role(role)
        if kept.has_keys:
            if not _alike(self.lengths):
                raise InputError(
                    f"{kept.name} says something of each key, and the texts have {int(self.lengths.min())} to "
                    f"{int(self.lengths.max())}: cache.example({kept.name!r}, layer, example) is one text's."
                )
            texts = numbers.split(self._sizes(kept).tolist())
            numbers = torch.cat([text.view(self._shape(kept, n)).movedim(-2, 0) for n, text in enumerate(texts)])
        return numbers if of_role is None else numbers[of_role]

    def example(self, site: str, layer: int | None, example: int) -> Tensor:
        """Return an activation of one text: `position ...`, or `head position key` with its own keys.

        Raises:
            InputError: nothing of that name and layer is kept, or there is no such text.
        """
        kept, place = self._find((site, layer))
        example = checked_count("example", example, least=0, most=len(self.counts) - 1)
        number, before = self._part_of[example]
        part, sizes = self.activations[number], self._sizes(kept)
        start = int(sizes[part["examples"][:before]].sum())
        numbers = part[kept.name][place][start : start + int(sizes[example])]
        # A copy: a view would hold the whole mapped part, and writing into it is not allowed in files.
        return numbers.reshape(self._shape(kept, example)).clone()

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
        kept, _ = self._find((site, layer))
        sizes = (*kept.size, int(self.lengths[0])) if kept.has_keys else kept.size
        labels = [
            self.heads if axis in ("head", "kv_head") and size == len(self.heads) else range(size)
            for axis, size in zip([axis for axis in kept.axes if axis != "position"], sizes, strict=True)
        ]
        names = [".".join([kept.name, *map(str, place)]) for place in product(*labels)]
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
        for kept, place, layer in ((each, *at) for each in self.kept.values() for at in enumerate(each.places)):
            squares, count, largest = 0.0, 0, 0.0
            # Part by part, since a cache in files may be larger than memory.
            for part in self.activations:
                sizes = part[kept.name][place].double().abs().flatten()
                sizes = sizes[sizes < LARGEST]
                squares, count = squares + float(sizes.square().sum()), count + sizes.numel()
                largest = max(largest, float(sizes.max()) if sizes.numel() else 0.0)
            rms = (squares / max(count, 1)) ** 0.5
            rows.append((kept.name, layer, len(self.table), math.prod(kept.size), rms, largest))
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
        for kept in sorted(self.kept.values(), key=lambda kept: kept.has_keys):
            # where texts differ, how many tokens there are in all
            counted = f"{self.counts[0]}" if _alike(self.counts) else f"{self.counts.sum()} tokens"
            keys = f"{self.lengths[0]}" if _alike(self.lengths) else "its keys"
            sizes = [*kept.size, counted, keys] if kept.has_keys else [counted, *kept.size]
            name = "attention" if kept.name == "pattern" else kept.name  # as the attribute is called
            shapes.append(f"{name} ({', '.join(map(str, [len(kept.places), len(self.counts), *sizes]))})")
        layers = f"layers {_ranges(self.layers)}; " if any(kept.layers for kept in self.kept.values()) else ""
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
        kept, place = self._named(name)
        if layer is None and place is not None:
            return kept, place
        where = f"is kept at {_layers(kept.layers)}" if kept.layers else "has no layer"
        if layer is None:
            example = f"cache[{kept.name!r}, {kept.layers[-1]}]"
            raise InputError(f"{kept.name} {where}: name one of them, as in {example}.")
        number = checked_count("layer", layer, least=-self.n_layers)
        number += self.n_layers if number < 0 else 0
        if number not in kept.layers or place not in (None, kept.layers.index(number)):
            raise InputError(f"The cache holds no {kept.name!r} of layer {layer}: {kept.name} {where}.")
        return kept, kept.layers.index(number)

    def _named(self, name: object) -> tuple[Activation, int | None]:
        """Return the activation of a name, and which of its layers where the name, or there being one, says it."""
        if not isinstance(name, str):
            raise InputError(f"The cache holds no {shown(name)}: ask for a site and a layer, as in cache.keys().")
        names: dict[str, tuple[Activation, int | None]] = {}
        for kept in self.kept.values():
            place = 0 if len(kept.places) == 1 else None
            names[kept.name] = (kept, place)
            if not kept.is_read:
                names.setdefault(kept.hook.replace("{layer}", "*"), (kept, place))
                names |= {kept.hook_name(layer): (kept, n) for n, layer in enumerate(kept.places)}
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

    def _numbers(self, kept: Activation, place: int) -> Tensor:
        """What is kept in one layer, the texts one after the other in the order given."""
        if len(self.activations) == 1 and [*self._part_of] == [*range(len(self.counts))]:
            return self.activations[0][kept.name][place]  # without a copy
        sizes = self._sizes(kept)
        whole = torch.empty(int(sizes.sum()), *kept.row, dtype=kept.torch_dtype)
        for part in self.activations:  # in files, parts are ordered by length
            whole[rows_of(part["examples"], sizes)] = part[kept.name][place]
        return whole

    def _padded(self, kept: Activation) -> Tensor:
        """What is kept in all layers: `layer batch ...`, every text as long as the longest, 0 where `mask` is False."""
        mask, n_texts, n_layers = self.mask, len(self.counts), len(kept.places)
        alike = bool(mask.all()) and (not kept.has_keys or _alike(self.lengths))
        if alike and len(self.activations) == 1 and self.activations.in_memory:
            return self.activations[0][kept.name].reshape(n_layers, n_texts, *self._shape(kept, 0))  # without a copy
        rows = torch.stack([self._numbers(kept, place) for place in range(n_layers)])
        padded = rows.new_zeros(n_layers, n_texts, *kept.shape(mask.shape[1], int(self.lengths.max())))
        if not kept.has_keys:
            padded[:, mask.to(rows.device)] = rows
            return padded
        for example, text in enumerate(rows.split(self._sizes(kept).tolist(), dim=1)):
            queries, n_keys = mask[example].nonzero()[:, 0], int(self.lengths[example])
            padded[:, example, ..., queries, :n_keys] = text.reshape(n_layers, *self._shape(kept, example))
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
