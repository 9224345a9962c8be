"""States after a knockout in every layer: one ordinary run of many rows, in which hooks sever the edges of each.

The state of layer k of a run severed everywhere is that of the run severed in layers 0..k
(`patching.edge_knockout`), so one run gives all k. Edges are severed before the softmax (`mask`) or after it (`zero`);
every pattern is looked at, and what was to be cut must be 0 there. Where attention can only be read, the walk of
`knocked_out_states` takes over: the same states, from a recorded run and the positions that change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from jaxtyping import Bool
from torch import Tensor

from headwater.errors import InterventionError
from headwater.kernels.devices import to_device
from headwater.models.checks import edges_are_cut
from headwater.models.edits import Hook, read_hook, replace_hook
from headwater.models.hooked import HookedModel
from headwater.models.positions import Prompt
from headwater.models.sites import hook_name
from headwater.patching.edge_knockout import Edges, VariantName, knocked_out_states
from headwater.probes.linear import States
from headwater.questions.states import ProbeSiteName, states_at


def severed_states(
    model: HookedModel,
    tokens: Sequence[Sequence[int]],
    edges: Edges,
    site: ProbeSiteName,
    positions: Sequence[int],
    variant: VariantName,
    batch_size: int,
) -> States:
    """Return the state of every layer at one position of each row, severed in all layers up to it.

    Args:
        model: the model.
        tokens: of each row.
        edges: what is severed, row by row.
        site: what is read.
        positions: where, in each row.
        variant: `mask` or `zero`.
        batch_size: rows in one run.

    Raises:
        InputError: a row has no edge to sever.
        InterventionError: a query is left without any key (`mask`).
    """
    cuts = [
        edges.matrix(Prompt(tuple(row), ()), i, len(tokens), ahead=model.looks_ahead) for i, row in enumerate(tokens)
    ]

    def cutting(rows: Sequence[int]) -> Iterator[Hook]:
        return _hooks(to_device(_stacked([cuts[row] for row in rows]), model.device), model.shape.n_layers, variant)

    try:
        return states_at(model, tokens, positions, site, batch_size, progress=False, editing=cutting)
    except InterventionError:  # its edits of attention are thrown away, or a query has no key: the walk says which
        given = [list(row) for row in tokens]
        options = {"sites": site, "variant": variant, "batch_size": batch_size, "progress": False}
        return knocked_out_states(model, given, block=edges, at=list(positions), **options)[1][site]  # type: ignore[arg-type]


def _stacked(cuts: Sequence[Bool[Tensor, "_ _"]]) -> Bool[Tensor, "row head query key"]:
    """Put the edges of rows of several lengths together, the same for all heads."""
    longest = max(map(len, cuts))
    found = torch.zeros(len(cuts), 1, longest, longest, dtype=torch.bool)
    for own, cut in zip(found, cuts, strict=True):
        own[0, : len(cut), : len(cut)] = cut
    return found


def _hooks(cut: Bool[Tensor, "row head query key"], n_layers: int, variant: VariantName) -> Iterator[Hook]:
    for layer in range(n_layers):
        pattern = hook_name("pattern", layer)
        if variant == "zero":
            yield pattern, replace_hook(partial(_mask_attention, cut=cut, value=0.0))
        else:
            yield hook_name("attn_scores", layer), replace_hook(partial(_mask_attention, cut=cut, value=None))
            yield pattern, read_hook(partial(_seen, cut=cut, name=pattern))


def _mask_attention(weights: Tensor, hook: object, cut: Tensor, value: float | None) -> Tensor:
    return weights.masked_fill(cut.to(weights.device), torch.finfo(weights.dtype).min if value is None else value)


def _seen(pattern: Tensor, hook: object, cut: Tensor, name: str) -> None:
    edges_are_cut(pattern, cut.to(pattern.device).expand_as(pattern), name)
