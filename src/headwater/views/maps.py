"""Views by layer: head maps, the evidence of a relation, sweeps, circuits, attention patterns.

Head maps: layer by head; hover for a head's relations, filter, colour by a relation, open its card.
Several maps are shown side by side (`beside=`) and linked: hovering, selecting, filtering and colouring apply to all
of them. With `model=` a head's card lists what it writes and suppresses, for the tokens that it affects most strongly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from einops import rearrange
from jaxtyping import Float
from pandas.api.types import is_numeric_dtype
from torch import Tensor, stack

from headwater.causes.naming import NAMED
from headwater.causes.results import Evidence
from headwater.circuits.circuit import Circuit, strength_order
from headwater.circuits.circuit_runs import CircuitRuns
from headwater.circuits.graph import Graph
from headwater.circuits.result import EdgeEffects
from headwater.errors import InputError
from headwater.figures.circuits import ABOVE, BELOW, layout, lines_of
from headwater.figures.circuits import title_of as circuit_title
from headwater.figures.head_map import extent, mark_of, names_of, title_of
from headwater.figures.heads import MAPS, ROLE_LOOKS, evidence_title
from headwater.figures.style import WAYS, plain_title
from headwater.figures.sweep import LABELS, panel_axes, panels_of
from headwater.figures.sweep import title_of as sweep_title
from headwater.heads.card import SIGNS
from headwater.heads.categories import UNCLASSIFIED, best_excess, label_counts, labels
from headwater.heads.head_map import HeadMap
from headwater.models.cache import Cache
from headwater.models.hooked import HookedModel
from headwater.models.weights import open_weights
from headwater.options import checked_count, checked_kind, checked_name, one_or_several, shown
from headwater.patching.summaries import MEASURES, ROLES
from headwater.patching.sweep import Sweep
from headwater.runs.result import VIEWS, View, whole_summary
from headwater.stats.resample import Bootstrap, percentile_interval
from headwater.views.page import (
    array_of,
    drawn,
    interactive,
    line_of,
    packed,
    page_around,
    picture,
    rounded,
    short_of,
    table_of,
)

CARDS = 64
"""Largest number of heads whose cards list what they write: the classified ones first, by their best excess."""
SOURCES, TARGETS = 5, 5
"""Tokens in a card: those for which the head writes most strongly, and what it writes for each."""
NUMBERS = ("score", "expected", "q_value")
FLAGS = {"implemented": 1, "suppressed": 2, "copying": 4}
"""The rule's results for a head and a relation, as bits of one number."""


@VIEWS.add(HeadMap)
def view_head_map(
    head_map: HeadMap, *, model: HookedModel | str | Path | None = None, beside: Sequence[HeadMap] | Any = ()
) -> View:
    """Show every head's label and its score, expected score, excess and q on every relation.

    Args:
        head_map: a result of `classify_heads`.
        model: the model of `head_map`: cards then list what their heads write, for at most 64 heads.
        beside: other head maps, shown side by side with this one and linked.
    """
    listed = list(beside) if isinstance(beside, Sequence) else [beside]
    maps = [head_map, *(checked_kind("beside", other, HeadMap) for other in listed)]
    relations = list(dict.fromkeys(name for one_map in maps for name in one_map.table["relation"]))
    present = {label for one_map in maps for label in one_map.categories["label"]}
    legend = [label for label in labels() if label in present]
    panels = [_map(name, one_map, relations, legend) for name, one_map in zip(names_of(maps), maps, strict=True)]
    if model is not None:
        # By "layer.head", a row per salient token: the token, sigma, and the tokens of each sign.
        table = head_map.salient(heads_with_cards(head_map), model=model, sources=SOURCES, targets=TARGETS)
        written: dict[str, list[list[object]]] = {}
        for (layer, head, _), rows in table.groupby(["layer", "head", "rank"]):
            source, sigma = rows[["source", "sigma"]].iloc[0]
            ends = [rows.loc[rows["sign"] == sign, "target"].tolist() for sign in SIGNS]
            written.setdefault(f"{layer}.{head}", []).append([str(source), round(float(sigma), 4), *ends])
        panels[0]["writes"] = written
    spec = {
        "title": title_of(maps),
        "note": f"{maps[0].run.options['rule']} rule",
        "relations": relations,
        "labels": [{"name": name, "color": mark_of(name)[0], "shape": mark_of(name)[1]} for name in legend],
        "quiet": UNCLASSIFIED,
        "maps": panels,
    }
    return interactive(head_map, ("head_plane.js", "head_grid.js", "head_map.js"), spec, height=620)


def _map(name: str, head_map: HeadMap, relations: Sequence[str], legend: Sequence[str]) -> dict[str, object]:
    """Return one map: arrays are `layer head relation`, with the relations of all maps."""
    table, categories = head_map.table, head_map.categories
    layers, heads = extent(categories)
    numbers_of = categories.set_index(["layer", "head"])["label"].map(list(legend).index)
    label = np.nan_to_num(array_of(numbers_of, range(layers), range(heads)))
    counts, places = label_counts(categories), pd.MultiIndex.from_frame(table[["layer", "head", "relation"]])

    def laid(values: pd.Series) -> np.ndarray:
        return array_of(values.set_axis(places), range(layers), range(heads), relations)

    # Suppression, or copying found by it: layer, head, relation, and the numbers of the suppressing side.
    rows = table[table["suppressed"] | (table["copying"] & (table["suppression"] > table["score"]))]
    numbers = [rounded(rows[f"suppression{'' if name == 'score' else f'_{name}'}"]) for name in NUMBERS]
    suppressing = rows["layer"], rows["head"], rows["relation"].map(list(relations).index)
    suppressed = zip(*suppressing, *numbers, strict=True)
    flags = sum((table[flag].astype(bool) * bit for flag, bit in FLAGS.items()), start=table["layer"] * 0)
    return {
        "name": name,
        "layers": layers,
        "heads": heads,
        "counts": [counts[entry] for entry in legend],
        "label": packed(label, "u1"),
        "score": packed(laid(table["score"]), "f4"),
        "expected": packed(laid(table["expected"]), "f4"),
        "q": packed(laid(table["q_value"]), "f2"),
        "flags": packed(np.nan_to_num(laid(flags)), "u1"),
        "suppressed": [[*map(int, row[:3]), *row[3:]] for row in suppressed],
        # 0 not measured, 1 no, 2 yes, because 8-bit integers have no NaN.
        "use": packed(np.nan_to_num(laid(table["used"].astype(float) + 1)), "u1") if head_map.is_validated else None,
        "loss": packed(laid(table["loss"]), "f2") if head_map.is_validated else None,
        "writes": None,
    }


def heads_with_cards(head_map: HeadMap) -> list[tuple[int, int]]:
    """Return the heads whose cards list what they write: all in a small model, the classified first in a large one."""
    every = head_map.categories[["layer", "head", "label"]]
    best = best_excess(head_map.table).fillna(0)
    strength = best.reindex(pd.MultiIndex.from_frame(every[["layer", "head"]])).fillna(0).to_numpy()
    # lexsort uses its last key first: classified heads, and among these by strength.
    order = np.lexsort((-strength, every["label"] == UNCLASSIFIED))[:CARDS]
    return [(layer, head) for layer, head in every.iloc[order][["layer", "head"]].to_numpy().tolist()]


# The view of one relation's evidence: maps of the margin of the weights, attention and effects, by layer and head.
#
# A head that is clicked in one map is marked in all of them, and in the tables of ablation costs and of the ways that
# name heads; its card has all its numbers, and the share that the last position carries before and after its layer.


@VIEWS.add(Evidence)
def view_evidence(evidence: Evidence) -> View:
    """Show the heads of a relation in linked maps; if the model cannot do the relation, only its report."""
    if not evidence.is_measured:
        return picture(evidence)
    by_head = evidence.table.sort_values(["layer", "head"])
    layers, heads = extent(by_head)
    columns = [name for name in by_head if name not in ("layer", "head")]
    named = evidence.way(NAMED)
    ways = evidence.ways.dropna(subset=["share"])
    rows = zip(ways["layer"], ways["head"], ways["heads"], strict=True)
    lines = [
        line_of(rows, ("layer", "share", "low", "high"), name=f"at the {role} token", look=ROLE_LOOKS[str(role)])
        for role, rows in evidence.when.groupby("role", sort=False)
    ]
    heads_of = [f"{n} heads" if pd.isna(layer) else f"{layer}.{head}" for layer, head, n in rows]
    spec = {
        "title": evidence_title(evidence),
        "layers": layers,
        "heads": heads,
        "columns": columns,
        "values": packed(by_head[columns].to_numpy(dtype=float).T.reshape(-1, layers, heads), "f4"),
        "maps": [{"column": column, "name": name} for column, name in MAPS.items()],
        "named": [int(named["layer"]), int(named["head"])],
        "when": {
            "said": {"title": "Residual stream patched", "x": "before layer", "count": ""},
            "x": {"label": "Before layer", "whole": True},
            "choices": [],
            "charts": [{"y": "Share of gap", "lines": lines}],
        },
        "tables": [
            _rows("named by", ways.assign(heads=heads_of), ["way", "heads", "share", "low", "high"]),
            _rows("ablated", evidence.cost, ["what", "heads", "cost", "low", "high"]),
        ],
    }
    return interactive(evidence, ("chart.js", "curves.js", "head_plane.js", "evidence.js"), spec, height=900)


def _rows(title: str, table: pd.DataFrame, columns: list[str]) -> dict[str, Any]:
    """Return a table of the page, and the heads that each of its rows is about."""
    cells = zip(*(rounded(table[name]) if table[name].dtype == float else table[name] for name in columns), strict=True)
    about = [re.findall(r"\d+\.\d+", heads) for heads in table["heads"]]
    return {"columns": [title, *columns[1:]], "rows": list(map(list, cells)), "about": about}


# The view of a sweep: a heat map of two axes, with site, metric, role, example and scale to choose, and cells to pick.

MOST_NUMBERS = 2**22
"""Largest number of values in a page: for larger sweeps the page contains only the means over examples."""


@VIEWS.add(Sweep)
def view_sweep(sweep: Sweep) -> View:
    """Show the effect of every cell, by example; a sweep over one axis, or over three without roles, as its figure."""
    panels = panels_of(sweep.table, {})
    if any(len(panel_axes(part, {})) != 2 for _, part in panels):
        return picture(sweep)
    examples = sorted(sweep.table["example"].unique().tolist())
    cells = sum(int(np.prod([part[axis].nunique() for axis in panel_axes(part, {})])) for _, part in panels)
    by_example = cells * len(examples) <= MOST_NUMBERS
    spec = {
        "title": sweep_title(sweep, panels, {}),
        "examples": len(examples) if by_example else 1,
        "names": examples if by_example else [f"mean of {len(examples)}"],
        "tokens": [list(sweep.tokens[example]) for example in examples] if len(sweep.tokens) else [],
        "panels": [_panel(name, part, examples if by_example else None) for name, part in panels],
    }
    return interactive(sweep, "sweep.js", spec)


def _panel(name: Sequence[object], part: pd.DataFrame, examples: Sequence[int] | None) -> dict[str, object]:
    axes = panel_axes(part, {})
    places: list[list[int | str]] = []
    for axis in axes:  # numbers in ascending order, names in order of first occurrence
        seen = part[axis].dropna().drop_duplicates()
        is_number = is_numeric_dtype(seen)
        places.append([int(one) for one in seen.sort_values()] if is_number else [str(one) for one in seen])
    numbers = {}
    for column in [name for name in MEASURES if name in part]:  # a single run has no normalized effects
        means = part.groupby(["example", *axes] if examples else axes, sort=False, dropna=False)[column].mean()
        whole = array_of(means, *([examples] if examples else []), *places)
        numbers[column] = whole.reshape(len(examples or [0]), *map(len, places))
    return {
        "site": str(name[0]),
        "metric": str(name[1]),
        "role": str(name[2]) if len(name) > 2 else "",
        "fixed": {
            axis: str(part[axis].iloc[0]) for axis in ROLES if len(name) > 2 and axis in part and axis not in axes
        },
        "axes": axes,
        "said": [LABELS[axis] for axis in axes],
        "rows": places[0],
        "columns": places[1],
        **{column: packed(found, "f4") for column, found in numbers.items()},
    }


# The view of edges and of circuits: layers upward, the strongest first; each edge with its interval and placebo.
#
# The placebo of an edge is the 95 % quantile of the sizes of the mean effects of all other edges between the same kinds
# of parts in the same layers. The interval is a bootstrap interval over examples. The faithfulness of the strongest
# edges comes only from runs of exactly these edges; it is never interpolated.

LARGEST = 200
"""Default number of edges in a page."""
MOST = 5000
"""Largest number of edges in a page."""
ROWS = 50
"""Number of edges in the table below a circuit."""


@VIEWS.add(EdgeEffects)
def view_edges(
    edges: EdgeEffects, *, n: int | None = None, metric: str | None = None, runs: CircuitRuns | None = None
) -> View:
    """Show the strongest edges as a circuit; edges of single positions, or through MLPs, as their figure.

    Args:
        edges: a result of `hw.edges`.
        n: largest number of edges of the slider; default: at most 200.
        metric: name of the metric; default: the first.
        runs: a result of `hw.run_circuits`, for the faithfulness of `edges.circuit(n)` alone, at several sizes.
    """
    most = min(MOST, len(edges.chosen))
    n = min(LARGEST, most) if n is None else checked_count("n", n, most=most)
    if edges.by_position or {"positions", "through"} & set(edges.run.options):
        return picture(edges)
    spec = spec_of(edges, edges.circuit(n, metric=metric), metric, runs)
    name = (metric or edges.metrics[0]).replace("_", " ")
    note = (
        f"the {n:,} strongest of {len(edges.chosen):,} edges; {WAYS[edges.run.options['direction']]}, effect on {name}"
    )
    return interactive(edges, "circuit.js", spec | {"note": note}, height=760)


@VIEWS.add(Circuit)  # type: ignore[arg-type]
def view_circuit(
    circuit: Circuit,
    *,
    n: int | None = None,
    edges: EdgeEffects | None = None,
    metric: str | None = None,
    runs: CircuitRuns | None = None,
) -> View:
    """Show a circuit; see `Circuit.view`."""
    if not len(circuit):
        raise InputError("The circuit has no edges: there is nothing to show.")
    most = min(MOST, len(circuit))
    strongest = circuit.strongest(min(LARGEST, most) if n is None else checked_count("n", n, most=most))
    spec = spec_of(edges, strongest, metric, runs)
    spec["note"] = f"the {len(strongest):,} strongest of {len(circuit):,} edges" * (len(strongest) < len(circuit))
    below = f"<p>{escape(repr(circuit))}.</p>{table_of(strongest.table.head(ROWS))}"
    return page_around(spec, "circuit.js", (drawn(strongest), circuit_title(strongest)), below, height=760)


def spec_of(
    edges: EdgeEffects | None, circuit: Circuit, metric: str | None, runs: CircuitRuns | None
) -> dict[str, object]:
    """Return the input of the script: nodes with places, the lines between them, and edges, the strongest first."""
    graph, order = circuit.graph, strength_order(circuit.effects)
    lines, rank = lines_of(circuit), np.argsort(order)
    places = layout(graph, lines)
    numbers = circuit.edges[order]
    about: dict[str, object] = dict.fromkeys(("low", "high", "placebo"), [None] * len(order))
    about |= {"others": [0] * len(order), "exact": [True] * len(order)}
    if edges is not None:
        about = _intervals(edges, numbers, metric)
    return {
        "title": circuit_title(circuit),
        "examples": None if edges is None else len(edges.effects),
        "colors": [ABOVE, BELOW],
        "nodes": {
            str(node): {"name": "logits" if node == len(graph.senders) else graph.senders.name(node), "at": list(place)}
            for node, place in places.items()
        },
        "lines": [[int(rank[line.edge]), line.source, line.target, line.kind] for line in lines],
        "edges": {"name": [graph.name(int(edge)) for edge in numbers], "effect": rounded(circuit.effects[order])}
        | about,
        "runs": None if runs is None else _alone(runs, numbers),
    }


def _intervals(edges: EdgeEffects, numbers: np.ndarray, metric: str | None) -> dict[str, object]:
    """Return the interval and placebo of some edges, and whether their effects are exact."""
    checked_kind("edges", edges, EdgeEffects)
    m = 0 if metric is None else list(edges.metrics).index(checked_name("metric", metric, tuple(edges.metrics)))
    exact, estimated = (part[:, 0, :, m].double().numpy() for part in (edges.effects, edges.estimates))
    values, chosen = np.where(np.isnan(exact).all(0), estimated, exact), edges.chosen.numpy()
    if absent := [int(edge) for edge in numbers if edge not in chosen]:
        raise InputError(f"edges= has no effect of {edges.graph.name(absent[0])}, an edge of the circuit.")
    columns = np.searchsorted(chosen, numbers)
    low, high = percentile_interval(Bootstrap.of(range(len(values))).mean(values[:, columns]))
    placebo, others = _placebos(edges.graph, chosen, values.mean(0), columns)
    result = {"low": rounded(low), "high": rounded(high), "placebo": rounded(placebo), "others": others}
    return result | {"exact": [bool(one) for one in ~np.isnan(exact[:, columns]).all(0)]}


def _alone(runs: CircuitRuns, numbers: np.ndarray) -> list[dict[str, object]]:
    """Return the faithfulness of the strongest edges alone, by number, beside random circuits of their shape."""
    checked_kind("runs", runs, CircuitRuns)
    named = {name: one for name, one in runs.circuits.items() if 0 < len(one) <= len(numbers)}
    nested = [name for name, one in named.items() if set(one.edges.tolist()) == set(numbers[: len(one)].tolist())]
    summary = whole_summary(runs)
    rows = summary[summary["circuit"].isin(nested) & (summary["metric"] == summary["metric"].iloc[0])]
    if not len(rows):
        raise InputError(
            "runs= has no circuit made of the strongest edges of this one: pass circuits such as "
            "circuit.strongest(20) to hw.run_circuits."
        )
    rows = rows.sort_values("edges", kind="stable")
    found: dict[str, list[Any]] = {name: rows[name].tolist() for name in ("edges", "examples")}
    found |= {name: rounded(rows[name]) for name in ("faithfulness", "low", "high", "placebo", "placebo_high")}
    return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]


def _placebos(graph: Graph, chosen: np.ndarray, means: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return for each edge the 95 % quantile of the effect sizes of other edges of its stratum, and their number."""
    shapes, sizes = graph.stratum[chosen], np.abs(means)
    quantiles, counts = np.full(len(columns), np.nan), []
    for place, column in enumerate(columns):
        is_peer = (shapes == shapes[column]) & ~np.isnan(sizes)
        is_peer[column] = False
        counts.append(int(is_peer.sum()))
        if is_peer.any():
            quantiles[place] = np.quantile(sizes[is_peer], 0.95)
    return quantiles, counts


# The view of a cache: the attention patterns of texts, head by head, each with its text to hover over.
#
# Weights are stored as square roots in 8 bits, `a ≈ (q / 255)²`, with an error of at most 0.004. In a long text most
# weights are small: those below `SMALLEST` of the uniform attention to a key are stored as 0, which halves the page and
# omits 0.03 of a query's attention (Gemma 3 270M, 241 tokens). With `values=model` a head's weight can be multiplied by
# the norm of what the key writes through it, `|v_j W_O|` (Kobayashi et al., EMNLP 2020).


LONGEST = 2048
"""Largest number of tokens of a text whose patterns are drawn."""
SMALLEST, MANY = 1 / 4, 64
"""Weights below this fraction of uniform attention are stored as 0; for a query with fewer than `MANY` keys, those
below 0.004."""
SMALL = 2**20
"""Largest number of weights in a page, over all texts, if the caller chose no texts; a single text may have more."""


@VIEWS.add(Cache)
def view_cache(
    cache: Cache,
    *,
    example: int | Sequence[int] | None = None,
    layers: int | Sequence[int] | None = None,
    values: HookedModel | None = None,
) -> View:
    """Show the attention patterns of texts; a cache without patterns shows the sizes of its activations.

    Args:
        cache: a cache with `pattern` among its sites, at all positions.
        example: index of a text, or several to choose from; default: the first ones, as many as make a small page.
        layers: layers to show; default: all layers in the cache.
        values: the model the cache was made with: weights can then be multiplied by what each key writes.
    """
    if "pattern" not in cache.kept:
        return picture(cache)
    cached = cache.kept["pattern"].layers
    requested = list(cached) if layers is None else one_or_several(layers)
    chosen = list(dict.fromkeys(checked_count("layers", layer, least=0) for layer in requested))
    if not chosen or not {*chosen} <= {*cached}:
        raise InputError(f"layers={shown(layers)} must be of those whose pattern the cache has: {list(cached)}.")
    texts = _chosen(cache, example, len(chosen) * len(cache.heads))
    which = f"text {texts[0]}" if len(texts) == 1 else f"{len(texts)} texts"
    of_all = f" of {len(cache.texts):,}" if len(texts) not in (1, len(cache.texts)) else ""
    spec = {
        "title": plain_title(cache.run.model, "attention patterns"),
        "note": f"{which}{of_all}",
        "layers": chosen,
        "heads": list(cache.heads),
        "texts": [_text(cache, number, chosen, values) for number in texts],
    }
    return interactive(cache, ("strip.js", "attention.js"), spec, height=820)


def _chosen(cache: Cache, example: int | Sequence[int] | None, heads: int) -> list[int]:
    """Return the requested texts, or as many of the first as make a small page."""
    most = len(cache.texts) - 1
    if example is not None:
        listed = one_or_several(example)
        if not listed:
            raise InputError("example=[] is empty: choose a text, or leave it out.")
        return list(dict.fromkeys(checked_count("example", one, least=0, most=most) for one in listed))
    weights = np.cumsum(cache.texts["tokens"].to_numpy().astype(float) ** 2 / 2 * heads)
    return list(range(max(1, int((weights <= SMALL).sum()))))


def _text(cache: Cache, number: int, layers: Sequence[int], values: HookedModel | None) -> dict[str, object]:
    tokens = cache.tokens.loc[cache.tokens["example"] == number, "token"].astype(str).tolist()
    whole = np.stack([cache.example("pattern", layer, number).float().numpy() for layer in layers])
    if whole.shape[-2] != len(tokens) or len(tokens) > LONGEST:
        raise InputError(
            f"Text {number} has {len(tokens):,} tokens and {whole.shape[-2]:,} of its queries are kept: a view needs "
            f"patterns of all positions, for texts of at most {LONGEST:,} tokens."
        )
    name = f"{number}: {short_of(''.join(tokens))} ({len(tokens)} tokens)"
    text: dict[str, object] = {"name": name, "tokens": tokens, **weights_of(whole)}
    if values is not None:
        text["norms"] = packed(written_norms(values, cache, number, layers).numpy(), "f2")
    return text


def weights_of(patterns: Float[np.ndarray, "layer head query key"]) -> dict[str, object]:
    """Return patterns in the format of a page, key by key; without the upper triangle if no query looks ahead."""
    queries, keys = patterns.shape[-2:]
    # Determined from the numbers: half of a causal pattern is omitted, a bidirectional model needs all of it.
    causal = not np.triu(patterns, 1).any()
    # Key by key, because a key that few queries read gives runs of zeros.
    key, query = np.triu_indices(queries) if causal else np.indices((keys, queries)).reshape(2, -1)
    weights = patterns[..., query, key].clip(0, 1)
    weights[weights < SMALLEST / np.maximum(query + 1 if causal else keys, MANY)] = 0
    return {"causal": causal, "pattern": packed(np.rint(255 * np.sqrt(weights)), "u1")}


def written_norms(
    model: HookedModel, cache: Cache, example: int, layers: Sequence[int]
) -> Float[Tensor, "layer head key"]:
    """Return the norm of what each key alone would write through each head, `|v_j W_O|`."""
    checked_kind("values", model, HookedModel)
    if other := cache.run.mismatch(model):
        raise InputError(f"The cache was made with {cache.run.model}, but values= is another model: it has {other}.")
    ids = cache.tokens.loc[cache.tokens["example"] == example, "token_id"].tolist()
    read = model.cache([ids], sites=["v"], layers=list(layers), progress=False)
    weights, heads = open_weights(model), list(cache.heads)
    norms = []
    for layer in layers:
        factors = weights.ov(layer)
        v = rearrange(read.example("v", layer, 0).float(), "key kv_head d_head -> kv_head key d_head")
        norms.append((factors.expand_kv(v) @ factors.W_O.float().cpu()).norm(dim=-1)[heads])
    return stack(norms)
