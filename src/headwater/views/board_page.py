"""The page of a patch board: the grids to click on, both runs' attention, and the effects that it knows already.

A page that is alone knows all single nodes: cells, heads, heads at each token, and edges into the last token that
the metric reads. One in a notebook knows the grids, and asks the kernel for whatever is clicked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headwater.errors import InputError
from headwater.figures.style import plain_title
from headwater.patching.activation_patching import patch
from headwater.patching.sweep import Sweep
from headwater.runs.view import View
from headwater.views.clicks import EDGES, HEADS, HOWS, Clicks
from headwater.views.interactive import interactive, packed

LONGEST = 256
"""Tokens of the prompts of a page."""
KINDS = {
    "cells": ("{site}", "layer", "position"),
    "heads": (HEADS, "layer", "head"),
    "places": (HEADS, "layer", "position", "head"),
    "edges": (EDGES, "layer", "head", "key", "position"),
}
"""The kinds of single nodes: where they lie, and what numbers one; the last of an edge is the same for all."""


def board_page(clicks: Clicks, hows: Sequence[str], *, live: bool = False) -> View:
    """Return the page of a board that knows some kinds of change; a live one asks a kernel for what is clicked."""
    tokens = clicks.tokens(hows[0])
    if len(tokens) > LONGEST:
        raise InputError(f"A board shows prompts of at most {LONGEST} tokens; these have {len(tokens)}. Use click().")
    shape, sweeps = clicks.model.shape, {how: known(clicks, how, live) for how in hows}
    spec = {
        "title": plain_title(clicks.model.name, f"patch board, {clicks.metric.name}"),
        "metric": clicks.metric.name,
        "layers": shape.n_layers,
        "heads": shape.n_heads,
        "sites": list(clicks.sites),
        "first": clicks.how if clicks.how in hows else hows[0],
        "live": live,
        "causal": not clicks.model.looks_ahead,
        "hows": {how: about(clicks, how) for how in (HOWS if live else hows)},
        "known": {how: stored(clicks, found) for how, found in sweeps.items()},
        "pattern": patterns(clicks),
    }
    return interactive(sweeps[hows[0]]["cells"], "board.js", spec, height=900)


def known(clicks: Clicks, how: str, live: bool) -> dict[str, Sweep]:
    """Return the sweeps of single nodes: of each kind, or, for a page with a kernel, of cells and heads."""
    query = clicks.bench(how).kept[-1]
    sweeps: dict[str, dict[str, Any]] = {
        "cells": {"sites": list(clicks.sites), "over": ("layer", "position")},
        "heads": {"sites": HEADS, "over": ("layer", "head")},
        "places": {"sites": HEADS, "over": ("layer", "position", "head")},
        "edges": {"sites": EDGES, "over": ("layer", "head", "key"), "positions": query},
    }
    kinds = ("cells", "heads") if live else tuple(sweeps)
    direction, values = HOWS[how]
    options: dict[str, Any] = {"metric": clicks.metric, "direction": direction, "values": values, "progress": False}
    options |= {"dataset": clicks.mean_of} if values == "mean" else {}
    return {kind: patch(clicks.model, clicks.clean, clicks.corrupted, **sweeps[kind], **options) for kind in kinds}


def stored(clicks: Clicks, sweeps: dict[str, Sweep]) -> dict[str, object]:
    """Return the effects of each kind as arrays: of cells `site layer position`, else in the order of their axes."""
    found: dict[str, object] = {}
    for kind, sweep in sweeps.items():
        index = ["site", "layer", "position"] if kind == "cells" else list(KINDS[kind][1:4])
        effects = sweep.table.set_index(index)["effect"]
        wanted = [list(clicks.sites) if name == "site" else sorted(sweep.table[name].unique()) for name in index]
        grid = np.full([len(one) for one in wanted], np.nan)
        places = [sweep.table[name].map(one.index).to_numpy() for name, one in zip(index, wanted, strict=True)]
        grid[tuple(places)] = effects.to_numpy(dtype=float)
        found[kind] = packed(grid, "f4")
    return found


def about(clicks: Clicks, how: str) -> dict[str, object]:
    """Return what is known of one kind of change before anything is clicked."""
    bench = clicks.bench(how)
    before, goal = bench.unedited
    ids = bench.before.likeliest(5)
    named = clicks.model.token_strings(ids)
    top = [[token, float(bench.before.probabilities[i])] for token, i in zip(named, ids, strict=True)]
    left_open = {kind: {axis: f"{{{axis}}}" for axis in axes} for kind, (_, *axes) in KINDS.items()}
    return {
        "tokens": list(clicks.tokens(how)),
        "other": list(clicks.bench("noise" if how == "denoise" else "denoise").pair.prompts[0].strings),
        "run": "corrupted" if HOWS[how][0] == "denoise" else "clean",
        "query": bench.kept[-1],
        "before": before,
        "goal": goal,
        "layers": bench.before.by_layer,
        "top": top,
        "code": {kind: clicks.code([{"site": KINDS[kind][0], **axes}], how) for kind, axes in left_open.items()},
    }


def patterns(clicks: Clicks) -> dict[str, object]:
    """Return the square roots of both runs' attention, in 8 bits, `layer head query key`."""
    found: dict[str, object] = {}
    for name, prompts in (("clean", clicks.clean), ("corrupted", clicks.corrupted)):
        cache = clicks.model.cache(prompts, sites=[EDGES], progress=False)
        whole = np.stack([cache.example(EDGES, layer, 0).float().numpy() for layer in cache.kept[EDGES].layers])
        found[name] = packed(np.rint(255 * np.sqrt(whole.clip(0, 1))), "u1")
    return found
