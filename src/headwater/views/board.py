"""The patch board: one pair of prompts in a notebook or a page, to click on.

With a kernel and `headwater[live]` the board is a widget, and every click is computed when it is made. A standalone
page (`view`, `save_html`) contains the effects of all single nodes and needs no kernel. Both use the same script, and
both are `headwater.views.clicks`, which needs no browser at all.

The widget's page is in a separate frame without access to the notebook. A few lines of script pass its messages to the
kernel, and the answers back:

    {"id": 7, "how": "denoise", "nodes": [{"site": "z", "layer": 1, "head": 2}]}   what was clicked -> its effect
    {"id": 8, "known": "zero"}                                                     the grids of another kind of change
    {"undo": true}                                                                 no answer

The answer to an error is one line of text.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from headwater.calls import checked_call
from headwater.errors import HeadwaterError, InputError
from headwater.figures.style import plain_title
from headwater.models.hooked import HookedModel, check_model
from headwater.models.sites import SiteName, sites_named
from headwater.options import checked_name, one_or_several
from headwater.patching.activation_patching import patch
from headwater.patching.metrics import Measures, as_metrics
from headwater.patching.prompts import Prompts, read_prompt_pair
from headwater.patching.sweep import Sweep
from headwater.runs.result import View
from headwater.views.clicks import EDGES, HEADS, HOWS, Clicks, HowName, Patched
from headwater.views.page import asset, interactive, packed

CELLS = ("resid_pre", "attn_out", "mlp_out")
"""The sites whose cells a board shows, if the model has them."""


@checked_call
def board(
    model: HookedModel,
    clean: Prompts,
    corrupted: Prompts,
    *,
    metric: Measures,
    dataset: Prompts | None = None,
    sites: SiteName | Sequence[SiteName] | None = None,
    how: HowName = "denoise",
) -> Board:
    """Open a board for one pair of prompts: each click on it is an exact patch, drawn at once.

    As the last line of a notebook cell the board displays itself. With a kernel and `headwater[live]`, clicks are
    computed; otherwise the page contains all effects of single nodes. Without a notebook, `click` does the same.

    Args:
        model: the model; it is not changed.
        clean: one prompt, or its token ids.
        corrupted: the other prompt, with the same number of tokens.
        metric: one metric that reads the logits, as for `hw.patch`.
        dataset: the prompts for `mean`; default: both prompts.
        sites: sites whose cells are shown, of the residual stream's width; default: resid_pre, attn_out and mlp_out.
        how: the initial kind of change: `denoise`, `noise`, `zero` or `mean`.

    Raises:
        InputError: a prompt, metric or site cannot be used; several pairs or metrics were given.
    """
    check_model(model)
    checked_name("how", how, tuple(HOWS))
    sides = read_prompt_pair(model, clean, corrupted, "denoise")
    if sides.corrupted is None or sides.corruption is not None or len(sides.clean) != 1:
        raise InputError("A board needs one pair of prompts: pass one text as clean and another as corrupted.")
    metrics = as_metrics(metric)
    if len(metrics) != 1:
        raise InputError(f"A board needs one metric; {len(metrics)} were passed.")
    every = [name for name in CELLS if model.shape.d_mlp or name != "mlp_out"]
    cells = sites_named(every if sites is None else one_or_several(sites), model)
    if wide := [site.name for site in cells if site.axes != ("position", "d_model")]:
        raise InputError(f"sites= of a board must have the width of the residual stream; {wide[0]} does not.")
    made = Board(model, clean, corrupted, sides, metrics[0], dataset, tuple(site.name for site in cells), how)
    made.bench(how)
    return made


class Board(Clicks):
    """One pair of prompts, to click on. Created by `hw.board`."""

    def view(self, hows: HowName | Sequence[HowName] | None = None) -> View:
        """Return the board as a page that needs no kernel: it contains the exact effects of all single nodes.

        These are every cell, every head, every head at every token, and every edge into the last token that the metric
        reads: layers × (tokens × (sites + 2 × heads) + heads) patches for each of `hows`, all computed now. For five
        tokens and SmolLM2 (30 layers, 9 heads) these are 3,420. Sets, and other edges, need the kernel.

        Args:
            hows: one or several of `denoise`, `noise`, `zero`, `mean`; default: the current kind of change.

        Raises:
            InputError: the kind of change is unknown, or the page would be too large.
        """
        wanted = one_or_several(self.how if hows is None else hows)
        chosen = [checked_name("hows", one, tuple(HOWS)) for one in wanted]
        if not chosen:
            raise InputError(f"hows= is empty; it may hold {', '.join(HOWS)}.")
        return board_page(self, chosen)

    def save_html(self, path: str | Path, hows: HowName | Sequence[HowName] | None = None) -> Path:
        """Write `view` into one self-contained HTML file.

        Raises:
            InputError: see `view`; or the path is not valid.
            RunFolderError: the file cannot be written.
        """
        return self.view(hows).save_html(path)

    def widget(self) -> Any:
        """Return the board as a notebook widget whose clicks are computed by the kernel.

        Raises:
            InputError: `headwater[live]` is not installed.
        """
        if not has_widgets():
            raise InputError(
                'A live board needs anywidget: pip install "headwater[live]". Without it: click(), view().'
            )
        import anywidget
        import traitlets

        spec = {
            "_esm": asset("board_live.js"),
            "page": traitlets.Unicode().tag(sync=True),
            "height": traitlets.Int().tag(sync=True),
        }
        shown = board_page(self, [self.how], live=True)
        # The class is created here, because anywidget may not be installed.
        widget = type("BoardWidget", (anywidget.AnyWidget,), spec)(page=shown.page, height=shown.height)

        def respond(_: object, message: object, buffers: object) -> None:
            if (reply := answer(self, message)) is not None:
                widget.send(reply)

        widget.on_msg(respond)
        return widget

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """Return what a notebook displays: the widget, if available, and a page for use without a kernel."""
        shown = {"text/plain": repr(self)}
        try:
            shown["text/html"] = self.view()._repr_html_()
            live = self.widget()._repr_mimebundle_() if has_widgets() else {}
        except InputError as error:
            return shown | {"text/html": f"<p>{escape(str(error))}</p>"}
        return shown | dict(live[0] if isinstance(live, tuple) else live or {})


def has_widgets() -> bool:
    """Return whether the packages for widgets are installed."""
    return importlib.util.find_spec("anywidget") is not None


def answer(clicks: Clicks, message: object) -> dict[str, Any] | None:
    """Return the answer to a message of the page, as JSON values; None if it needs no answer."""
    fields = message if isinstance(message, Mapping) else {}
    named = {"id": fields.get("id")}
    try:
        if fields.get("undo"):
            clicks.undo()
            return None
        if "known" in fields:
            how = checked_name("how", fields["known"], tuple(HOWS))
            return named | {"kind": "known", "how": how, "known": stored(clicks, known(clicks, how, live=True))}
        return named | {"kind": "patched", **as_json(clicks.change(fields.get("nodes"), fields.get("how")))}
    except HeadwaterError as error:
        return named | {"kind": "error", "text": str(error)}


def as_json(patched: Patched) -> dict[str, Any]:
    """Return the result of a click as JSON values; NaN becomes None."""
    parts = patched.parts[["head", "position", "key", "effect"]].astype(object)
    return {
        "nodes": [node.described() for node in patched.nodes],
        "how": patched.how,
        "before": patched.before,
        "after": patched.after,
        "goal": patched.goal,
        "seconds": patched.seconds,
        "code": patched.code,
        "top": patched.top[["token", "before", "after"]].values.tolist(),
        "layers": patched.layers["after"].tolist(),
        "parts": parts.where(parts.notna(), None).to_dict("records"),
    }


# The page of a patch board: the grids to click on, both runs' attention, and the effects that are already computed.
#
# A standalone page has all single nodes: cells, heads, heads at each token, and edges into the last token that the
# metric reads. A page in a notebook has the grids, and asks the kernel for anything else that is clicked.

LONGEST = 256
"""Largest number of tokens of the prompts of a page."""
KINDS: dict[str, tuple[str, ...]] = {
    "cells": ("{site}", "layer", "position"),
    "heads": (HEADS, "layer", "head"),
    "places": (HEADS, "layer", "position", "head"),
    "edges": (EDGES, "layer", "head", "key", "position"),
}
"""The kinds of single nodes: their site, and the axes that index them; the last axis of an edge is constant."""


def board_page(clicks: Clicks, hows: Sequence[str], *, live: bool = False) -> View:
    """Return the page of a board with some kinds of change precomputed; a live page asks a kernel for other clicks."""
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
        "causal": not clicks.model.is_bidirectional,
        "hows": {how: about(clicks, how) for how in (HOWS if live else hows)},
        "known": {how: stored(clicks, found) for how, found in sweeps.items()},
        "pattern": patterns(clicks),
    }
    return interactive(sweeps[hows[0]]["cells"], "board.js", spec, height=900)


def known(clicks: Clicks, how: str, live: bool) -> dict[str, Sweep]:
    """Return the sweeps of single nodes: of every kind, or, for a page with a kernel, of cells and heads only."""
    direction, values = HOWS[how]
    options: dict[str, Any] = {"metric": clicks.metric, "direction": direction, "values": values, "progress": False}
    options |= {"dataset": clicks.mean_of} if values == "mean" else {}
    sweeps = {}
    for kind in ("cells", "heads") if live else tuple(KINDS):
        site, *axes = KINDS[kind]
        where: dict[str, Any] = {"sites": list(clicks.sites) if kind == "cells" else site, "over": tuple(axes[:3])}
        where |= {"positions": clicks.bench(how).kept[-1]} if kind == "edges" else {}
        sweeps[kind] = patch(clicks.model, clicks.clean, clicks.corrupted, **where, **options)
    return sweeps


def stored(clicks: Clicks, sweeps: dict[str, Sweep]) -> dict[str, object]:
    """Return the effects of each kind as arrays: cells as `site layer position`, others in the order of their axes."""
    arrays: dict[str, object] = {}
    # All layers, because in hybrid models some have no heads.
    whole: dict[str, list[Any]] = {"site": list(clicks.sites), "layer": list(range(clicks.model.shape.n_layers))}
    for kind, sweep in sweeps.items():
        index = ["site", "layer", "position"] if kind == "cells" else list(KINDS[kind][1:4])
        levels = [whole.get(name) or sorted(sweep.table[name].unique()) for name in index]
        grid = np.full([len(axis) for axis in levels], np.nan)
        places = [sweep.table[name].map(axis.index).to_numpy() for name, axis in zip(index, levels, strict=True)]
        grid[tuple(places)] = sweep.table["effect"].to_numpy(dtype=float)
        arrays[kind] = packed(grid, "f4")
    return arrays


def about(clicks: Clicks, how: str) -> dict[str, object]:
    """Return the data of one kind of change that are independent of clicks."""
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
    """Return the square roots of both runs' attention weights, in 8 bits, `layer head query key`."""
    arrays: dict[str, object] = {}
    for name, prompts in (("clean", clicks.clean), ("corrupted", clicks.corrupted)):
        cache = clicks.model.cache(prompts, sites=[EDGES], progress=False)
        length = len(cache.tokens)
        whole = np.zeros((clicks.model.shape.n_layers, clicks.model.shape.n_heads, length, length), np.float32)
        for layer in cache.kept[EDGES].layers:
            whole[layer] = cache.example(EDGES, layer, 0).float().numpy()
        arrays[name] = packed(np.rint(255 * np.sqrt(whole.clip(0, 1))), "u1")
    return arrays
