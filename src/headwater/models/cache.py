"""A cache: activations of many texts, without padding, in memory or in memory-mapped files.

A cache keeps one row per requested token of a text, and no padding. `cache.rows(site, layer)` is `token ...`: the rows
of all texts, one text after the other. `cache.frame` gives the example, position and token of each row. If all texts
have the same number of rows, `cache[site, layer]` is `batch position ...`.

Attention patterns and scores have a value per key, and texts differ in their number of keys. They are kept text by
text, each as `head position key` with the keys of that text alone: `cache.example(site, layer, example)`. If all texts
have the same length, `cache[site, layer]` is `batch head query key`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from headwater.runs.result import Result
from headwater.runs.storage import Shards

if TYPE_CHECKING:
    from headwater.models.model import Model


LARGEST_ACTIVATION = 1e30
"""Larger numbers are not activations: a mask wrote them into scores."""
AT_ONCE = 256
"""Number of texts to tokenize together: a batch pads all of its texts to the longest."""


@dataclass(frozen=True)
class Activation:
    """One kind of activation, at some layers.

    In memory and in files, the texts of a layer follow one another, with one row per kept token. Texts differ in their
    number of keys, so activations with keys are flattened to one row per number.

    Attributes:
        name: the short name of a site, or a hook's name with `*` for its layer.
        hook: the hook's name, with {layer} in place of its layer.
        layers: the layers kept; empty for an activation that belongs to no layer.
        axes: names of the axes of one text's activation; for a pattern they end in position and key.
        size: lengths of the axes, without position and key.
        dtype: dtype in which it is kept, as torch names it.
        is_read: whether it is computed from the activation at the hook (features of a dictionary), not that activation.
    """

    name: str
    hook: str
    layers: tuple[int, ...]
    axes: tuple[str, ...]
    size: tuple[int, ...]
    dtype: str
    is_read: bool = False

    def plain(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @property
    def has_keys(self) -> bool:
        """Whether it has a value for each pair of query and key."""
        return "key" in self.axes

    @property
    def head_axis(self) -> int | None:
        """Index of the head axis, if any; axis 0 is tokens, or texts for an activation with keys."""
        axes = [axis for axis in self.axes if axis not in ("position", "key")]
        return next((1 + n for n, axis in enumerate(axes) if axis in ("head", "kv_head")), None)

    @property
    def places(self) -> tuple[int | None, ...]:
        """The layers, or a single None for an activation that belongs to no layer."""
        return self.layers or (None,)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in which it is kept."""
        return getattr(torch, self.dtype)

    def hook_name(self, layer: int | None) -> str:
        """Return the hook's name at a layer."""
        return self.hook.format(layer=layer)

    def shape(self, n_tokens: int, n_keys: int) -> tuple[int, ...]:
        """Return the shape of one text's activation in one layer."""
        return (*self.size, n_tokens, n_keys) if self.has_keys else (n_tokens, *self.size)

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of a row."""
        return () if self.has_keys else self.size

    def rows(self, counts: Int[Tensor, " example"], lengths: Int[Tensor, " example"]) -> Int[Tensor, " example"]:
        """Return how many rows each text has in one layer, from its numbers of kept tokens and of all tokens."""
        return counts * lengths * math.prod(self.size) if self.has_keys else counts

    def nbytes(self, counts: Int[Tensor, " example"], lengths: Int[Tensor, " example"]) -> Int[Tensor, " example"]:
        """Return the number of bytes of each text in all layers."""
        return self.rows(counts, lengths) * math.prod(self.row) * len(self.places) * self.torch_dtype.itemsize


# Tokens of many texts, one text after the other, and which of them `positions=` selects. There is no padding, so that
# one long text does not enlarge the others; only texts that run together form a `Batch`.


@checked_calls
@dataclass(frozen=True, eq=False)
class TokenizedTexts:
    """Tokens of texts, and the selection of tokens to keep."""

    table: pd.DataFrame
    """A row per kept token, in the order of texts and requested positions: `example, position, token`, and `role` if
    positions were requested by role. Also as `frame`."""
    tokens: pd.DataFrame
    """A row per token of every text: `example, position, token_id, token`, and the range of its characters as
    `start, end`, for inputs given as texts."""
    texts: pd.DataFrame
    """A row per text: `example, tokens` (their number), `text` (None if the input was token ids)."""
    asked: list[int] | None
    """The positions requested, if they were requested by number."""
    pad: int
    """The token id of padding in `batch`."""

    @cached_property
    def lengths(self) -> Int[Tensor, " example"]:
        """Number of tokens of each text."""
        return torch.tensor(self.texts["tokens"].to_numpy(dtype=np.int64))

    @cached_property
    def counts(self) -> Int[Tensor, " example"]:
        """Number of kept tokens of each text."""
        return torch.tensor(self.table["example"].to_numpy(dtype=np.int64)).bincount(minlength=len(self.texts))

    @cached_property
    def positions(self) -> Int[Tensor, "batch position"]:
        """The position in its text of each entry along the padded position (or query) axis; -1 for padding."""
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
        """The tokens that were run, padded; the key axis of an activation is the position axis of this batch."""
        return self.batch_of(range(len(self.texts)))

    @cached_property
    def strings(self) -> tuple[tuple[str, ...], ...]:
        """The strings of each text's tokens."""
        words, ends = self.tokens["token"].tolist(), self.lengths.cumsum(0).tolist()
        return tuple(tuple(words[start:end]) for start, end in zip([0, *ends], ends, strict=False))

    @cached_property
    def _starts(self) -> Int[Tensor, " example"]:
        """The row of `tokens` at which each text begins."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def _ids_and_spans(self) -> tuple[np.ndarray, np.ndarray | None]:
        spans = self.tokens[["start", "end"]]
        is_text = not spans.isna().any(axis=None)
        return self.tokens["token_id"].to_numpy(), spans.to_numpy(dtype=np.int64) if is_text else None

    def _prompt(self, example: int) -> Prompt:
        """Return a text with its tokens."""
        # Made when needed: the ids and spans of all texts as Python objects take ten times the memory of the arrays.
        (ids, spans), words = self._ids_and_spans, self.strings[example]
        start, text = int(self._starts[example]), self.texts["text"].iloc[example]
        of_text = slice(start, start + len(words))
        offsets = None if spans is None else tuple((first, end) for first, end in spans[of_text].tolist())
        return Prompt(tuple(ids[of_text].tolist()), words, offsets, text if isinstance(text, str) else None)

    def batch_of(self, examples: Sequence[int]) -> Batch:
        """Return a batch of some texts; errors name its rows by their numbers among all texts."""
        prompts = [self._prompt(example) for example in examples]
        batch = Batch.of([prompt.ids for prompt in prompts], self.pad)
        offsets = tuple(prompt.offsets for prompt in prompts if prompt.offsets is not None)
        texts = tuple(prompt.text for prompt in prompts if prompt.text is not None)
        return dataclasses.replace(
            batch,
            offsets=offsets if len(offsets) == len(prompts) else None,
            names=tuple(examples),
            texts=texts if len(texts) == len(prompts) else None,
        )


def kept_at(positions: Any, texts: TokenizedTexts) -> TokenizedTexts:
    """Return texts that keep the tokens selected by `positions=`; see `headwater.models.positions`.

    Several whole numbers, in a list or tuple, select these positions of every text; a position for which a text is too
    short is left out there.
    """
    if positions is None:
        return texts
    numbers, roles = _numbers(positions), list[str]()
    if numbers is None:
        rows, n_texts = list[int](), len(texts.texts)
        for example, start in enumerate(texts._starts.tolist()):
            prompt = texts._prompt(example)
            if isinstance(positions, Mapping):
                by_role = roles_of(positions, prompt, example, n_texts)
            else:
                by_role = {"": positions_of(positions, prompt, example, n_texts)}
            for role, found in by_role.items():
                rows += [start + position for position in found]
                roles += [role] * len(found)
    else:
        if not numbers or len(set(numbers)) < len(numbers):
            each = shown([[number] for number in numbers])
            what = f"names one twice. For one of each text: {each}" if numbers else "names no position"
            raise InputError(f"positions={shown(positions)} {what}.")
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
    """Drop the tokens that any of these sites leaves out; refuse a text with no remaining tokens."""
    if not any(site.leaves_out for site in sites):
        return texts
    prompts = map(texts._prompt, range(len(texts.texts)))
    left_out = [frozenset[int]().union(*(site.left_out(prompt.ids) for site in sites)) for prompt in prompts]
    kept = texts.table
    seen = kept[[at not in left_out[text] for text, at in zip(kept["example"], kept["position"], strict=True)]]
    if gone := {*kept["example"]} - {*seen["example"]}:
        raise InputError(f"Text {min(gone)} has no token to keep: {sites[0].name} was trained without its tokens.")
    if len(seen) == len(kept):
        return texts
    return dataclasses.replace(texts, table=seen.reset_index(drop=True), asked=None)


def read_texts(inputs: Inputs, model: Model) -> tuple[TokenizedTexts, dict[str, str]]:
    """Tokenize inputs, keep all tokens, and return the texts and the entries on chats for a run record."""
    batches = _batches(inputs, model)
    lengths = torch.cat([batch.lengths for batch in batches])
    # Each distinct token is decoded once, however often the texts contain it.
    ids, back = np.unique(np.concatenate([batch.tokens[batch.mask].numpy() for batch in batches]), return_inverse=True)
    words = np.array(model.token_strings(ids.tolist()), dtype=object)
    # If any text has no known character ranges (inputs as token ids have none), all are left out.
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
    """Tokenize inputs, at most `AT_ONCE` texts at a time."""
    refuse_what_has_no_order(inputs)
    parts = [] if isinstance(inputs, Batch | Tensor) or is_one(inputs) else list(inputs)
    is_row = any(isinstance(part, Mapping) or (is_one(part) and not isinstance(part, str)) for part in parts[:1])
    if len(parts) <= AT_ONCE or is_row:  # the parts of one row are token ids, or messages
        return [model.tokenize(parts or inputs)]
    try:
        return [model.tokenize(parts[start : start + AT_ONCE]) for start in range(0, len(parts), AT_ONCE)]
    except InputError:
        model.tokenize(parts)  # so that the error counts rows from the first text of all
        raise


def rows_of(texts: Sequence[int] | Int[Tensor, " text"], counts: Int[Tensor, " example"]) -> Int[Tensor, " row"]:
    """Return the row indices of some texts, where texts with these counts of rows follow one another."""
    texts = torch.as_tensor(texts)
    first, sizes = (counts.cumsum(0) - counts)[texts], counts[texts]
    return torch.arange(int(sizes.sum())) + (first - sizes.cumsum(0) + sizes).repeat_interleave(sizes)


def _columns_of(numbers: Sequence[int], lengths: Int[Tensor, " example"]) -> Int[Tensor, "example position"]:
    """Return the position of each number in each text, -1 if the text is too short; negatives count from the end."""
    wanted = torch.tensor(list(numbers), dtype=torch.long)
    columns = torch.where(wanted < 0, lengths[:, None] + wanted, wanted.expand(len(lengths), -1))
    return torch.where((columns >= 0) & (columns < lengths[:, None]), columns, -1)


def _numbers(positions: object) -> list[int] | None:
    """Return positions that are numbers, the same for every text; None if they are specified in another way."""
    if isinstance(positions, str) and positions == "last":
        return [-1]
    try:
        return None if isinstance(positions, str) or has_no_order(positions) else whole_numbers(positions)
    except TypeError:
        return None


@dataclass(frozen=True, repr=False, eq=False)
class Cache(TokenizedTexts, Result):
    """Activations of texts, with labels for every axis; returned by `model.cache(...)` and `hw.load_cache(folder)`."""

    contents: list[dict[str, Any]]
    """The activations kept, as JSON objects: see `Activation`."""
    kept_heads: list[int]
    n_layers: int
    """Number of layers of the model."""
    activations: Shards
    """The numbers. Every part has `examples`, the texts it contains, and each activation by name as `layer token ...`;
    activations with keys as `layer number`: the flattened `head position key` of each text in turn."""
    run: RunRecord

    # Contents

    @property
    def frame(self) -> pd.DataFrame:
        """The table: example, position and token of each row of `rows`."""
        return self.table

    @cached_property
    def kept(self) -> dict[str, Activation]:
        """The activations kept, by short name, or by hook name with `*` for its layer."""
        kept = {}
        for plain in self.contents:
            fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}
            kept[plain["name"]] = Activation(**fields)
        return kept

    @property
    def nbytes(self) -> int:
        """Number of bytes of all activations."""
        return sum(int(kept.nbytes(self.counts, self.lengths).sum()) for kept in self.kept.values())

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers requested, in that order."""
        return tuple(dict.fromkeys(layer for kept in self.kept.values() for layer in kept.layers))

    @property
    def heads(self) -> tuple[int, ...]:
        """The query head of each entry along the head axis."""
        return tuple(self.kept_heads)

    def keys(self) -> list[str | tuple[str, int]]:
        """Return all keys of `cache[...]`, such as ("z", 3) and "blocks.3.attn.hook_z"."""
        kept = self.kept.values()
        short: list[str | tuple[str, int]] = [(each.name, layer) for each in kept for layer in each.layers]
        return short + [each.hook_name(layer) for each in kept if not each.is_read for layer in each.places]

    def axes(self, site: str) -> tuple[str, ...]:
        """Return the names of the axes of `cache[site, layer]`; in `rows`, `token` replaces batch and position."""
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
        self._refuse_other_keys(activation)
        if not _alike(self.counts):
            raise InputError(
                f"The texts have different lengths, {int(self.counts.min())} to {int(self.counts.max())} tokens: use "
                "cache.rows(site, layer), one row per token (cache.frame names them), or cache with positions='last'."
            )
        return torch.stack(list(self._texts(activation, place).values()))

    def rows(self, site: str, layer: int | None = None) -> Shaped[Tensor, "token ..."]:
        """Return an activation at every kept token, in the order of `frame`: `token ...`.

        Args:
            site: a short name of a site, or a hook's name.
            layer: negative numbers count from the last; not needed if only one layer is kept.
        """
        activation, place = self._find((site, layer))
        self._refuse_other_keys(activation)
        texts = self._texts(activation, place).values()
        return torch.cat([text.movedim(-2, 0) if activation.has_keys else text for text in texts])

    def example(self, site: str, layer: int | None, example: int) -> Tensor:
        """Return an activation of one text: `position ...`, or `head position key` with the keys of that text alone."""
        activation, place = self._find((site, layer))
        example = checked_count("example", example, least=0, most=len(self.counts) - 1)
        part = self.activations[self._part_of[example]]
        # A copy: a view would keep the whole mapped part alive, and mapped files are read-only.
        return self._texts(activation, place, [part])[example].clone()

    def to_numpy(self, site: str, layer: int | None = None) -> Shaped[np.ndarray, "token width"]:
        """Return `rows` as `token width`, the form that scikit-learn accepts; errors as in `rows`."""
        rows = self.rows(site, layer)
        return rows.reshape(len(rows), -1).cpu().numpy()

    def to_frame(self, site: str, layer: int | None = None) -> pd.DataFrame:
        """Return `frame` with a column for every number of `rows`, named by its index: `z.0.3` is head 0, number 3.

        Features are named by their numbers in their dictionary. Errors as in `rows`.
        """
        (activation, _), rows = self._find((site, layer)), self.rows(site, layer)
        features = {one["name"]: one["features"] for one in self.run.options.get("features", ())}
        labels = {"head": self.heads, "kv_head": self.heads, "feature": features.get(activation.name)}
        numbers: list[Sequence[int]] = []
        for axis, size in zip([axis for axis in activation.axes if axis != "position"], rows.shape[1:], strict=True):
            known = labels.get(axis) or ()  # cached without heads=, key-value heads are fewer than `heads`
            numbers.append(known if len(known) == size else range(size))
        names = [".".join([activation.name, *map(str, place)]) for place in product(*numbers)]
        return pd.concat([self.table, pd.DataFrame(rows.reshape(len(rows), -1).cpu().numpy(), columns=names)], axis=1)

    # Several layers in one padded tensor

    @property
    def site(self) -> str | None:
        """The first site kept that has one vector per token; None if there is none."""
        return next((kept.name for kept in self.kept.values() if len(kept.axes) == 2 and kept.layers), None)

    @cached_property
    def residual(self) -> ResidualCache:
        """Activations at `site`, padded: `layer batch position d_model`, zero where `mask` is False."""
        if self.site is None:
            raise InputError(f"This cache keeps {self._site_names} and no residual stream: ask for sites='resid_post'.")
        return self._padded(self.kept[self.site])

    @cached_property
    def attention(self) -> AttentionCache:
        """Attention patterns, padded: `layer batch head query key`, zero where the query or key is padding."""
        if "pattern" not in self.kept:
            raise InputError(f"This cache keeps {self._site_names} and no attention: ask for sites='pattern'.")
        return self._padded(self.kept["pattern"])

    def attention_by_role(self) -> pd.DataFrame:
        """Return how much each head attends from the tokens of each role to the tokens of each role.

        A row per layer, head, role and attended role: `layer, head, role, to, attention`. `attention` is the attention
        of a token of `role` to all tokens of `to` together, as a mean over the tokens of `role` in all texts.
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

    # Methods of every result

    def summary(self) -> pd.DataFrame:
        """Return a row for each activation and layer: `site, layer, tokens, width, rms, largest`.

        `rms` is the root of the mean square of its numbers, `largest` their largest absolute value; numbers that a mask
        wrote into scores are left out.
        """
        rows = []
        for activation, place, layer in ((each, *at) for each in self.kept.values() for at in enumerate(each.places)):
            squares, count, largest = 0.0, 0, 0.0
            # Part by part, because a cache in files may be larger than memory.
            for part in self.activations:
                sizes = part[activation.name][place].double().abs().flatten()
                sizes = sizes[sizes < LARGEST_ACTIVATION]
                squares, count = squares + float(sizes.square().sum()), count + sizes.numel()
                largest = max(largest, float(sizes.max()) if sizes.numel() else 0.0)
            rms = (squares / max(count, 1)) ** 0.5
            rows.append((activation.name, layer, len(self.table), math.prod(activation.size), rms, largest))
        names = ["site", "layer", "tokens", "width", "rms", "largest"]
        return pd.DataFrame(rows, columns=names).astype({"layer": "Int64"})

    def report(self) -> list[str]:
        """Return the report: the activations kept, and the number of tokens and texts."""
        lines = [
            f"{len(self.table):,} tokens of {len(self.texts):,} texts are kept, {self.nbytes / 2**20:,.1f} MiB; "
            "padding is not kept."
        ]
        for kept in self.kept.values():
            layers = f" of {_layers(kept.layers)}" if kept.layers else ""
            lines.append(f"{kept.name}{layers}: {' '.join(self.axes(kept.name))}, {kept.dtype}.")
        return lines

    def digest(self) -> str:
        """Return a digest that names this cache in records of runs that use it: of its run, or of all its contents."""
        if self.run.unknown:
            return super().digest()
        run = self.run
        return digest(["Cache", run.analysis, run.fingerprint, run.tokenizer, run.dtype, run.options, run.versions])

    def __repr__(self) -> str:
        layers = f" at {_layers(self.layers)}" if self.layers else ""
        tokens = f"{len(self.table):,} tokens of {len(self.texts):,} texts"
        return f"Cache({self._site_names}{layers}; {tokens}; {self.nbytes / 2**20:,.1f} MiB)"

    # Internals

    @property
    def _site_names(self) -> str:
        return ", ".join(sorted(self.kept, key=lambda name: self.kept[name].has_keys))

    def _refuse_other_keys(self, activation: Activation) -> None:
        if activation.has_keys and not _alike(self.lengths):
            raise InputError(
                f"{activation.name} has an axis of keys, and the texts have different lengths: use "
                f"cache.example({activation.name!r}, layer, example) for one text."
            )

    def _find(self, key: object) -> tuple[Activation, int]:
        """Return the activation that a key names, and the index of the layer among its layers."""
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
        """Return the activation of a name, and the index of its layer if the name specifies it or there is only one."""
        names: dict[object, tuple[Activation, int | None]] = {}
        for activation in self.kept.values():
            whole = activation, 0 if len(activation.places) == 1 else None
            names[activation.name] = whole
            if not activation.is_read:
                names.setdefault(activation.hook.replace("{layer}", "*"), whole)
                names |= {activation.hook_name(layer): (activation, n) for n, layer in enumerate(activation.places)}
        if not isinstance(name, str) or name not in names:
            sites = [each.name + f" at {_layers(each.layers)}" * bool(each.layers) for each in self.kept.values()]
            near = did_you_mean(name, list(map(str, names)), or_all=False)
            near = near or f" It keeps {'; '.join(sites[:12])}{'; ...' * (len(sites) > 12)}."
            raise InputError(f"The cache does not hold {shown(name)}.{near}")
        return names[name]

    def _texts(
        self, activation: Activation, place: int, parts: Iterable[Mapping[str, Tensor]] | None = None
    ) -> dict[int, Tensor]:
        """Return views of an activation in one layer, by text: of the texts in some parts, or of all."""
        counts, lengths, texts = self.counts.tolist(), self.lengths.tolist(), dict[int, Tensor]()
        sizes = activation.rows(self.counts, self.lengths)
        for part in self.activations if parts is None else parts:
            examples = part["examples"].tolist()
            numbers = part[activation.name][place].split(sizes[examples].tolist())
            for example, of_text in zip(examples, numbers, strict=True):
                texts[example] = of_text.view(activation.shape(counts[example], lengths[example]))
        return dict(sorted(texts.items()))  # in files, parts are ordered by length

    def _padded(self, activation: Activation) -> Tensor:
        """Return an activation in all layers: `layer batch ...`, padded to the longest text; 0 if `mask` is False."""
        mask, n_keys = self.mask, self.lengths.tolist()
        shape = activation.shape(mask.shape[1], max(n_keys))
        device, n_layers = self.activations[0][activation.name].device, len(activation.places)
        padded = torch.zeros(n_layers, len(mask), *shape, dtype=activation.torch_dtype, device=device)
        for place in range(n_layers):
            for example, text in self._texts(activation, place).items():
                rows = mask[example].nonzero()[:, 0].to(device)
                if activation.has_keys:
                    padded[place, example, ..., rows, : n_keys[example]] = text
                else:
                    padded[place, example, rows] = text
        return padded

    @cached_property
    def _part_of(self) -> dict[int, int]:
        """The number of the part that contains each text."""
        return {text: number for number, part in enumerate(self.activations) for text in part["examples"].tolist()}


def _alike(counts: Int[Tensor, " example"]) -> bool:
    return bool((counts == counts[0]).all())


def _layers(layers: tuple[int, ...]) -> str:
    is_row = len(layers) > 2 and layers == tuple(range(layers[0], layers[-1] + 1))
    listed = f"{layers[0]} to {layers[-1]}" if is_row else ", ".join(map(str, layers))
    return f"layer{'s' * (len(layers) > 1)} {listed}"


@checked_call
def load_cache(folder: str | Path) -> Cache:
    """Load a cache written by `save` or `model.cache(..., out=folder)`; the numbers stay in its files."""
    return Cache.load(folder)
