"""States that a trace hands on to what reads the same answers after it, such as the detectors of the same command.

While `handing_on()` lasts, states are kept in pieces of `CHUNK` rows under all that they hang on: weights, tokenizer
and dtype of the model, the rows' tokens, what is severed and how, what is read and where, and how many rows run
together. Whoever asks for a piece that is not kept computes it, of the same rows in the same batches: results are the
same whoever came before. A piece is handed on once, and nothing is kept of a model in which hooks or anything else act.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from contextvars import ContextVar

import torch

from headwater.models.hooked import HookedModel
from headwater.models.tokens import by_length
from headwater.pathways.interventions import Intervention, Setup, after_states
from headwater.probes.linear import States

CHUNK = 256
"""Rows in one piece."""
KEPT_BYTES = 1 << 32
"""What is kept at most, in main memory; pieces that would come on top are computed again."""

_KEPT: ContextVar[dict[Hashable, States] | None] = ContextVar("states handed on", default=None)


@contextlib.contextmanager
def handing_on() -> Iterator[None]:
    """Let analyses inside hand on what the next one reads."""
    before = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(before)


def keep(model: HookedModel, piece: Intervention, setup: Setup, states: States) -> None:
    """Keep the states of a piece, if they are to be handed on and there is room."""
    kept = _KEPT.get()
    if kept is not None and not model.interventions:
        held = sum(one.numel() * one.element_size() for one in kept.values())
        if held + states.numel() * states.element_size() <= KEPT_BYTES:
            kept[_key(model, piece, setup)] = states


def states_of(model: HookedModel, rows: Intervention, setup: Setup) -> States:
    """Return the states of rows, piece by piece as they were handed on, or computed."""
    states = torch.empty(model.shape.n_layers, len(rows.tokens), model.shape.d_model)
    for chosen in chunks(rows):
        piece = rows.rows(chosen)
        kept = _KEPT.get()
        found = kept.pop(_key(model, piece, setup), None) if kept and not model.interventions else None
        states[:, chosen] = after_states(model, piece, setup) if found is None else found
    return states


def chunks(rows: Intervention) -> list[list[int]]:
    """Return the rows of each piece."""
    return by_length([len(tokens) for tokens in rows.tokens], CHUNK)


def _key(model: HookedModel, piece: Intervention, setup: Setup) -> Hashable:
    def fixed(rows: object) -> Hashable:
        return None if rows is None else tuple(map(tuple, rows))  # type: ignore[call-overload]

    of_model = (model.digest(), str(model.dtype), str(model.device))
    read = (setup.site, setup.batch_size, None if piece.keys is None else setup.variant)
    rows = (fixed(piece.tokens), tuple(piece.positions), fixed(piece.keys), fixed(piece.queries))
    return of_model, read, rows
