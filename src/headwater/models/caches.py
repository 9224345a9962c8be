"""Keep activations of many inputs: the residual stream and the attention patterns, only what was asked for.

1. Estimate what the cache will take, and refuse with the figure when the device has not got it.
2. Allocate it once. Run the inputs in batches of rows; hooks copy the chosen layers, heads and positions straight into
   their place, so nothing else is ever kept. Layers after the last one asked for do not run.
3. What lies at padding is set to zero: a padded batch gives the values of its sequences run alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwater.axes import AttentionCache, ResidualCache
from headwater.errors import InputError, did_you_mean
from headwater.kernels.devices import usable_device
from headwater.models.edits import Hook, HookFunction, looks
from headwater.models.memory import in_halves, refuse_too_large
from headwater.models.sites import SITES, hook_name
from headwater.models.tokens import Batch, Inputs
from headwater.options import checked_count, checked_flag, shown, whole_numbers
from headwater.progress import progress_bar

if TYPE_CHECKING:
    from headwater.models.model import Model


@dataclasses.dataclass(frozen=True, repr=False)
class Cache:
    """Activations of a batch, with the labels of every axis.

    Attributes:
        residual: the residual stream at `site`; zero where `mask` is False.
        attention: the patterns after softmax, one per query head; zero where the query or key is padding.
        site: the name of the site, such as "resid_post".
        layers: which layer each entry of the layer axis is.
        heads: which query head each entry of the head axis is.
        positions: which token of its sequence each entry of the position (or query) axis is, row by row; -1 where a
            sequence has no such token.
        batch: the tokens that were run; its positions are the key axis.
        strings: the text of each row's real tokens.
    """

    residual: ResidualCache | None
    attention: AttentionCache | None
    site: str | None
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    positions: Int[Tensor, "batch position"]
    batch: Batch
    strings: tuple[tuple[str, ...], ...]

    @property
    def mask(self) -> Bool[Tensor, "batch position"]:
        """True where the position (or query) axis holds a real token."""
        return self.positions >= 0

    def labels(self, row: int) -> tuple[str, ...]:
        """Return the text of the tokens along the position axis of one row; empty strings at padding."""
        return tuple(self.strings[row][p] if p >= 0 else "" for p in self.positions[row].tolist())

    def __repr__(self) -> str:
        kept = {self.site or "residual": self.residual, "attention": self.attention}
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in kept.items() if value is not None)
        size = sum(value.nbytes for value in kept.values() if value is not None)
        return f"Cache({shapes}; layers {_ranges(self.layers)}; {size / 2**20:,.1f} MiB)"


def fill_cache(
    model: Model,
    inputs: Inputs,
    *,
    residual: bool | str = True,
    attention: bool = True,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    batch_size: int = 16,
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> Cache:
    """Run a model and keep activations.

    Args:
        model: the model.
        inputs: anything `model.tokenize` takes.
        residual: which residual stream to keep: "resid_pre", "resid_mid" or "resid_post", or another site that has a
            vector per token ("attn_out", "mlp_out"); True means "resid_post".
        attention: whether to keep the attention patterns.
        layers: default all; negative numbers count from the last.
        positions: which tokens of each sequence to keep; default all. -1 is each sequence's own last token. For
            attention these are the queries; the keys are always all.
        heads: which query heads; default all.
        batch_size: rows in one run.
        device: where the cache lies.
        progress: show a bar while several batches run.

    Returns:
        `residual` `[layer, batch, position, d_model]` and `attention` `[layer, batch, head, query, key]` in float32 (or
        the model's dtype when that is wider).

    Raises:
        InputError: an option names nothing of this model, or the cache would not fit.
    """
    shape, device = model.shape, usable_device(device)
    progress, attention = checked_flag("progress", progress), checked_flag("attention", attention)
    batch = model.tokenize(inputs)
    site = _site(residual, model)
    if site is None and not attention:
        raise InputError("There is nothing to keep: residual and attention are both False.")
    checked_count("batch_size", batch_size)
    chosen_layers = _choose("layer", layers, shape.n_layers)
    chosen_heads = _choose("head", heads, shape.n_heads)
    columns = _columns(positions, batch)
    rows, width = columns.shape
    dtype = torch.promote_types(model.dtype, torch.float32)
    sizes = {
        "residual": (len(chosen_layers), rows, width, SITES[site].width(shape, width)) if site else None,
        "attention": (len(chosen_layers), rows, len(chosen_heads), width, batch.tokens.shape[1]) if attention else None,
    }
    _refuse_too_large(sizes.values(), dtype.itemsize, device)
    kept = {name: torch.zeros(size, dtype=dtype, device=device) for name, size in sizes.items() if size is not None}

    stop_at = max(chosen_layers) + 1

    def run(chunk: range) -> None:
        where, piece = slice(chunk.start, chunk.stop), batch.rows(chunk.start, chunk.stop)
        here = columns[where]
        hooks: list[Hook] = []
        for index, layer in enumerate(chosen_layers):
            if site is not None:
                hooks.append((hook_name(site, layer), _keep_residual(kept["residual"][index, where], here)))
            if attention:
                target = kept["attention"][index, where]
                hooks.append((hook_name("pattern", layer), _keep_pattern(target, here, piece, chosen_heads)))
        model.run(piece, hooks, stop_at=stop_at)

    chunks = [range(len(batch))[start : start + batch_size] for start in range(0, len(batch), batch_size)]
    for chunk in progress_bar(progress and len(chunks) > 1, chunks, desc="Caching", unit="batch"):
        in_halves(chunk, run)
    return Cache(
        residual=kept.get("residual"),
        attention=kept.get("attention"),
        site=site,
        layers=chosen_layers,
        heads=chosen_heads,
        positions=columns,
        batch=batch,
        strings=tuple(
            model.token_strings(row[real].tolist()) for row, real in zip(batch.tokens, batch.mask, strict=True)
        ),
    )


def _keep_residual(target: Tensor, columns: Int[Tensor, "batch position"]) -> HookFunction:
    """Return a hook that copies the chosen positions of a residual stream into their place."""

    def keep(residual: Tensor, hook: Any) -> None:
        target.copy_(_at(residual, columns.to(residual.device)))

    return looks(keep)


def _keep_pattern(
    target: Tensor, columns: Int[Tensor, "batch position"], piece: Batch, heads: tuple[int, ...]
) -> HookFunction:
    """Return a hook that copies the chosen heads and queries of an attention pattern into their place."""

    def keep(pattern: Tensor, hook: Any) -> None:
        chosen = pattern[:, torch.tensor(heads, device=pattern.device)]
        by_query = _at(chosen.transpose(1, 2), columns.to(pattern.device)).transpose(1, 2)
        by_query = by_query * piece.mask[:, None, None].to(pattern.device)
        target[..., : by_query.shape[-1]].copy_(by_query)

    return looks(keep)


def _at(values: Tensor, columns: Int[Tensor, "batch position"]) -> Tensor:
    """Pick each row's own positions (axis 1); zeros where there is none (-1)."""
    rows = torch.arange(len(values), device=values.device)[:, None]
    picked = values[rows, columns.clamp(min=0)]
    missing = (columns < 0).reshape(*columns.shape, *[1] * (picked.ndim - 2))
    return picked.masked_fill(missing, 0)


def _columns(positions: Sequence[int] | None, batch: Batch) -> Int[Tensor, "batch position"]:
    """Say for each row which of its tokens is meant; -1 where the row is too short."""
    width = batch.tokens.shape[1]
    asked = tuple(range(width)) if positions is None else _numbers("positions", positions)
    if not asked:
        raise InputError("positions= names no position.")
    if outside := [position for position in asked if not -width <= position < width]:
        raise InputError(f"No sequence has a position {outside[0]}; the longest has {width} tokens.")
    wanted = torch.tensor(asked, dtype=torch.long)
    lengths = batch.lengths[:, None]
    columns = torch.where(wanted < 0, lengths + wanted, wanted.expand(len(batch), -1))
    columns = torch.where((columns >= 0) & (columns < lengths), columns, -1)
    if bool((columns < 0).all(0).any()):
        absent = int(wanted[(columns < 0).all(0)][0])
        raise InputError(f"No sequence has a position {absent}; the longest has {int(lengths.max())} tokens.")
    return columns


def _numbers(option: str, wanted: Any) -> tuple[int, ...]:
    try:
        return tuple(whole_numbers(wanted))
    except TypeError:
        raise InputError(f"{option}={shown(wanted)} does not name {option} by whole numbers.") from None


def _choose(axis: str, wanted: Iterable[int] | None, size: int) -> tuple[int, ...]:
    """Resolve negative numbers and check the range."""
    if wanted is None:
        return tuple(range(size))
    chosen = _numbers(f"{axis}s", wanted)
    for i in chosen:
        if not -size <= i < size:
            raise InputError(f"There is no {axis} {i}; the model has {axis}s 0 to {size - 1}.")
    if not chosen or len({i % size for i in chosen}) < len(chosen):
        raise InputError(f"{axis}s={list(chosen)} must name at least one {axis}, each once.")
    return tuple(i % size for i in chosen)


def _site(residual: bool | str, model: Model) -> str | None:
    """The site to keep: one that has a vector per token."""
    if isinstance(residual, bool):
        return "resid_post" if residual else None
    kept = [name for name, site in SITES.items() if len(site.axes) == 2 and site.axes[0] == "position"]
    if not isinstance(residual, str) or residual not in kept:
        raise InputError(f"There is no residual site {shown(residual)}.{did_you_mean(str(residual), kept)}")
    if reason := SITES[residual].absent(model.shape):
        raise InputError(f"There is no {residual} to keep: {reason}")
    if reason := model.misfits.get(residual):
        raise InputError(reason)
    return residual


def _refuse_too_large(sizes: Iterable[tuple[int, ...] | None], itemsize: int, device: torch.device) -> None:
    needed = sum(torch.Size(size).numel() * itemsize for size in sizes if size is not None)
    advice = (
        "Ask for fewer layers, heads or positions, or leave out attention (it grows with the square of the length)."
    )
    refuse_too_large("This cache", needed, device, advice)


def _ranges(numbers: tuple[int, ...]) -> str:
    whole = numbers == tuple(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))
