"""The patch board: one pair of prompts in a notebook or a page, to click on.

With a kernel and `headwater[live]` the board is a widget, and every click is computed when it is made. A standalone
page (`view`, `save_html`) contains the effects of all single nodes and needs no kernel. Both use the same script, and
both are `Board.click`, which needs no browser at all.

The widget's page is in a separate frame without access to the notebook. A few lines of script pass its messages to the
kernel, and the answers back:

    {"id": 7, "how": "denoise", "nodes": [{"site": "z", "layer": 1, "head": 2}]}   what was clicked -> its effect
    {"id": 8, "known": "zero"}                                                     the grids of another kind of change
    {"undo": true}                                                                 no answer

The answer to an error is one line of text.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from headwater.calls import checked_call, checked_calls
from headwater.errors import HeadwaterError, InputError
from headwater.figures.style import plain_title
from headwater.models.hooked import HookedModel
from headwater.models.sites import SiteName, sites_named
from headwater.options import checked_name, checked_names, one_or_several
from headwater.patching.activation_patching import patch
from headwater.patching.components import ActivationNode, read_nodes, set_name
from headwater.patching.metrics import Measures, Metric, as_metrics
from headwater.patching.prompts import PromptPair, Prompts, read_prompt_pair
from headwater.patching.sweep import Sweep
from headwater.runs.result import View
from headwater.views.clicks import EDGES, HEADS, HOWS, TOP, HowName, Patched, RecordedPair, share
from headwater.views.page import array_of, asset, interactive, packed

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
    """
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


@checked_calls
@dataclass(eq=False, repr=False)
class Board:
    """One pair of prompts whose nodes are changed by clicks; each is kept until it is undone. Created by `hw.board`."""

    model: HookedModel
    clean: Prompts
    corrupted: Prompts
    _sides: PromptPair
    metric: Metric
    dataset: Prompts | None
    sites: tuple[str, ...]
    how: HowName
    """The kind of change of a click: `denoise`, `noise`, `zero` or `mean`."""
    clicks: list[Patched] = field(init=False, default_factory=list)
    """The clicks that were not undone, the latest last."""
    _benches: dict[str, RecordedPair] = field(init=False, default_factory=dict)
    _known: dict[tuple[str, tuple[ActivationNode, ...]], Patched] = field(init=False, default_factory=dict)

    def bench(self, how: str) -> RecordedPair:
        """Return the recorded runs for one kind of change; they are computed once."""
        if how not in self._benches:
            direction, values = HOWS[how]
            # Each kind of change has separate recorded runs: noise edits the run that denoise reads from.
            pair = PromptPair(self._sides.clean, self._sides.corrupted, direction)
            look: dict[str, Any] = {"values": values, "dataset": self.mean_of if values == "mean" else None}
            self._benches[how] = RecordedPair(self.model, pair, self.metric, **look, sites=[*self.sites, HEADS, EDGES])
        bench = self._benches[how]
        # Activations recorded with old weights would silently be combined with new ones after a change of the model.
        if self.model.fingerprint != bench.fingerprint:
            raise InputError("The model was changed since its runs were recorded: make another board, hw.board(...).")
        return bench

    @property
    def mean_of(self) -> Prompts:
        """The prompts for `mean`: by default both prompts."""
        if self.dataset is not None:
            return self.dataset
        return [list(prompts[0].ids) for prompts in (self._sides.clean, self._sides.corrupted or ())]

    def click(
        self,
        layer: int,
        position: int | None = None,
        *,
        head: int | None = None,
        key: int | None = None,
        site: str | None = None,
        how: HowName | None = None,
        add: bool = False,
    ) -> Patched:
        """Change a cell, a head or an attention edge, and return the effect.

        Args:
            layer: the layer.
            position: the token; for an edge, the token that reads. Default: all tokens.
            head: selects a head instead of the cell.
            key: with `head` and `position`, the token that is read: selects an attention edge.
            site: site of a cell; default: the first site of the board.
            how: kind of change, see `hw.board`; it becomes the current kind.
            add: add the node to those of the last click, and change all of them together.
        """
        default = EDGES if key is not None else HEADS if head is not None else self.sites[0]
        node = {"site": default if site is None else site, "layer": layer, "position": position}
        clicked = [node | {"head": head, "key": key}]
        before = [one.described() for one in self.clicks[-1].nodes] if add and self.clicks else []
        return self.change([*before, *clicked], how)

    def change(self, nodes: Any, how: HowName | None = None) -> Patched:
        """Change several nodes together; each is a mapping with some of `site, layer, position, head, key`."""
        how = self.how if how is None else how
        bench = self.bench(how)
        read = read_nodes(self.model, nodes, bench.pair.prompts)
        if absent := [node.site for node in read if node.site not in (*self.sites, HEADS, EDGES)]:
            raise InputError(f"This board has no {absent[0]}; it has {', '.join((*self.sites, HEADS, EDGES))}.")
        self.how = how
        key = (how, read)
        # Results are cached, so that repeating an undone click costs nothing.
        if key not in self._known:
            self._known[key] = self._look(bench, read, how)
        self.clicks.append(self._known[key])
        return self.clicks[-1]

    def undo(self) -> Patched | None:
        """Undo the latest click; return the click before it, or None."""
        if self.clicks:
            self.clicks.pop()
        return self.clicks[-1] if self.clicks else None

    @property
    def table(self) -> pd.DataFrame:
        """The clicks: `nodes, how, effect, normalized_effect, before, after, answer, seconds, code`."""
        names = ["nodes", "how", "effect", "normalized_effect", "before", "after", "answer", "seconds", "code"]
        rows = [[set_name(one.nodes), *(getattr(one, name) for name in names[1:])] for one in self.clicks]
        return pd.DataFrame(rows, columns=names)

    def code(self, nodes: Sequence[Mapping[str, object]], how: str) -> str:
        """Return the call of `hw.patch` that changes the described nodes together, with the names as in `hw.board`."""
        direction, values = HOWS[how]
        options = [f"direction={direction!r}"] + ([f"values={values!r}"] if values != "other run" else [])
        both = "[clean, corrupted]" if isinstance(self.clean, str) else "[*clean, *corrupted]"
        options += [f"dataset={both if self.dataset is None else 'dataset'}"] * (values == "mean")
        if len(nodes) > 1:
            where = [f"together={[dict(node) for node in nodes]!r}"]
        else:
            (node,) = nodes
            where = [f"sites={node['site']!r}"]
            where += [f"{axis}s={node[axis]}" for axis in ("layer", "position", "head", "key") if axis in node]
            if not {"position", "head"} & set(node):
                where.append("over='layer'")
            elif node["site"] == EDGES and "head" not in node:
                where.append("over=('layer', 'position')")
        return f"hw.patch(model, clean, corrupted, {', '.join([*where, 'metric=metric', *options])})"

    def _look(self, bench: RecordedPair, nodes: tuple[ActivationNode, ...], how: str) -> Patched:
        since, (before, goal), shape = time.perf_counter(), bench.unedited, self.model.shape
        # The parts of a single node: for a cell its layer's heads there, for a head the edges it reads.
        parts, node = [], nodes[0]
        if len(nodes) == 1 and node.key is None and node.site == HEADS and node.head is not None:
            query = bench.kept[-1] if node.position is None else node.position
            keys = len(bench.pair.prompts[0]) if self.model.is_bidirectional else query + 1
            parts = [ActivationNode(EDGES, node.layer, query, node.head, key) for key in range(keys)]
        elif len(nodes) == 1 and node.site in self.sites and node.position is not None:
            parts = [ActivationNode(HEADS, node.layer, node.position, head) for head in range(shape.n_heads)]
        (value, *of_parts), states = bench.look(nodes, [[part] for part in parts])
        first, after = bench.before, bench.read(states)
        likely = after.likeliest(TOP)
        ids = list(dict.fromkeys([*likely[: TOP // 2], *first.likeliest(TOP // 2), *likely]))[:TOP]
        top = pd.DataFrame({"token": self.model.token_strings(ids)})
        top["before"], top["after"] = first.probabilities[ids].numpy(), after.probabilities[ids].numpy()
        top["change"] = top["after"] - top["before"]
        by_layer = {"layer": range(len(after.by_layer)), "before": first.by_layer, "after": after.by_layer}
        by_part = [
            [part.head, part.position, part.key, one - before, share(one - before, goal - before)]
            for part, one in zip(parts, of_parts, strict=True)
        ]
        columns = ["head", "position", "key", "effect", "normalized_effect"]
        return Patched(
            nodes, how, before, value, goal,
            top=top.sort_values("after", ascending=False, kind="stable").reset_index(drop=True),
            layers=pd.DataFrame(by_layer).assign(change=lambda table: table["after"] - table["before"]),
            parts=pd.DataFrame(by_part, columns=columns).astype(dict.fromkeys(columns[:3], "Int64")),
            seconds=time.perf_counter() - since,
            code=self.code([node.described() for node in nodes], how),
        )  # fmt: skip

    def __repr__(self) -> str:
        n = len(self.clicks)
        state = f"{len(self._sides.clean[0])} tokens, {self.metric.name}, {n} click{'s' * (n != 1)}"
        return f"Board({self.model.name}: {state})"

    def view(self, hows: HowName | Sequence[HowName] | None = None) -> View:
        """Return the board as a page that needs no kernel: it contains the exact effects of all single nodes.

        These are every cell, every head, every head at every token, and every edge into the last token that the metric
        reads: layers × (tokens × (sites + 2 × heads) + heads) patches for each of `hows`, all computed now. For five
        tokens and SmolLM2 (30 layers, 9 heads) these are 3,420. Sets, and other edges, need the kernel.

        Args:
            hows: one or several of `denoise`, `noise`, `zero`, `mean`; default: the current kind of change.
        """
        return board_page(self, checked_names("hows", self.how if hows is None else hows, tuple(HOWS)))

    def save_html(self, path: str | Path, hows: HowName | Sequence[HowName] | None = None) -> Path:
        """Write `view` into one self-contained HTML file."""
        return self.view(hows).save_html(path)

    def widget(self) -> Any:
        """Return the board as a notebook widget whose clicks are computed by the kernel."""
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


def answer(board: Board, message: object) -> dict[str, Any] | None:
    """Return the answer to a message of the page, as JSON values; None if it needs no answer."""
    fields = message if isinstance(message, Mapping) else {}
    named = {"id": fields.get("id")}
    try:
        if fields.get("undo"):
            board.undo()
            return None
        if "known" in fields:
            how = checked_name("how", fields["known"], tuple(HOWS))
            return named | {"kind": "known", "how": how, "known": stored(board, known(board, how, live=True))}
        return named | {"kind": "patched", **as_json(board.change(fields.get("nodes"), fields.get("how")))}
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


def board_page(board: Board, hows: Sequence[str], *, live: bool = False) -> View:
    """Return the page of a board with some kinds of change precomputed; a live page asks a kernel for other clicks."""
    tokens = board.bench(hows[0]).pair.prompts[0].strings
    if len(tokens) > LONGEST:
        raise InputError(f"A board shows prompts of at most {LONGEST} tokens; these have {len(tokens)}. Use click().")
    shape, sweeps = board.model.shape, {how: known(board, how, live) for how in hows}
    spec: dict[str, Any] = {
        "title": plain_title(board.model.name, f"patch board, {board.metric.name}"),
        "metric": board.metric.name,
        "layers": shape.n_layers,
        "heads": shape.n_heads,
        "sites": list(board.sites),
        "first": board.how if board.how in hows else hows[0],
        "live": live,
        "causal": not board.model.is_bidirectional,
        "hows": {how: about(board, how) for how in (HOWS if live else hows)},
        "known": {how: stored(board, found) for how, found in sweeps.items()},
        "pattern": {},
    }
    # The square roots of both runs' attention weights in 8 bits, `layer head query key`.
    for name, prompts in (("clean", board.clean), ("corrupted", board.corrupted)):
        cache = board.model.cache(prompts, sites=[EDGES], progress=False)
        whole = np.zeros((shape.n_layers, shape.n_heads, len(cache.tokens), len(cache.tokens)), np.float32)
        for layer in cache.kept[EDGES].layers:
            whole[layer] = cache.example(EDGES, layer, 0).float().numpy()
        spec["pattern"][name] = packed(np.rint(255 * np.sqrt(whole.clip(0, 1))), "u1")
    return interactive(sweeps[hows[0]]["cells"], "board.js", spec, height=900)


def known(board: Board, how: str, live: bool) -> dict[str, Sweep]:
    """Return the sweeps of single nodes: of every kind, or, for a page with a kernel, of cells and heads only."""
    direction, values = HOWS[how]
    options: dict[str, Any] = {"metric": board.metric, "direction": direction, "values": values, "progress": False}
    options |= {"dataset": board.mean_of} if values == "mean" else {}
    sweeps = {}
    for kind in ("cells", "heads") if live else tuple(KINDS):
        site, *axes = KINDS[kind]
        where: dict[str, Any] = {"sites": list(board.sites) if kind == "cells" else site, "over": tuple(axes[:3])}
        where |= {"positions": board.bench(how).kept[-1]} if kind == "edges" else {}
        sweeps[kind] = patch(board.model, board.clean, board.corrupted, **where, **options)
    return sweeps


def stored(board: Board, sweeps: dict[str, Sweep]) -> dict[str, object]:
    """Return the effects of each kind as arrays: cells as `site layer position`, others in the order of their axes."""
    arrays: dict[str, object] = {}
    # All layers, because in hybrid models some have no heads.
    whole: dict[str, list[Any]] = {"site": list(board.sites), "layer": list(range(board.model.shape.n_layers))}
    for kind, sweep in sweeps.items():
        index = ["site", "layer", "position"] if kind == "cells" else list(KINDS[kind][1:4])
        levels = [whole.get(name) or sorted(sweep.table[name].unique()) for name in index]
        arrays[kind] = packed(array_of(sweep.table.set_index(index)["effect"], *levels), "f4")
    return arrays


def about(board: Board, how: str) -> dict[str, object]:
    """Return the data of one kind of change that are independent of clicks."""
    bench = board.bench(how)
    before, goal = bench.unedited
    ids = bench.before.likeliest(5)
    named = board.model.token_strings(ids)
    top = [[token, float(bench.before.probabilities[i])] for token, i in zip(named, ids, strict=True)]
    left_open = {kind: {axis: f"{{{axis}}}" for axis in axes} for kind, (_, *axes) in KINDS.items()}
    return {
        "tokens": list(bench.pair.prompts[0].strings),
        "other": list(board.bench("noise" if how == "denoise" else "denoise").pair.prompts[0].strings),
        "run": "corrupted" if HOWS[how][0] == "denoise" else "clean",
        "query": bench.kept[-1],
        "before": before,
        "goal": goal,
        "layers": bench.before.by_layer,
        "top": top,
        "code": {kind: board.code([{"site": KINDS[kind][0], **axes}], how) for kind, axes in left_open.items()},
    }
