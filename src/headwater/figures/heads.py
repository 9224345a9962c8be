"""Attention heads: what they attend to, which compose, singular vectors of one; and comparisons of head maps.

Maps are compared between models, against the threshold, and with dynamic scores of running heads. Last, from weights to
a cause: does the head that a relation's weights name carry the answer?
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import headwater.figures.style as st
from headwater.causes.naming import BASELINES, NAMED
from headwater.causes.results import Evidence, EvidenceSuite
from headwater.colors import BLUE, FAINT, GREEN, INK, ORANGE, PINK
from headwater.errors import InputError
from headwater.figures.head_map import AREAS, CELL, LARGEST, NONE, extent, frame, legend_mark, mark_area, mark_heads
from headwater.figures.sweep import shown
from headwater.heads.ablation import HeadAblation
from headwater.heads.behaviour import NONE as NOT_CALLED
from headwater.heads.behaviour import AttentionBehaviour, named, words
from headwater.heads.categories import CATEGORIES
from headwater.heads.comparison import HeadComparison
from headwater.heads.dynamic import DynamicScores
from headwater.heads.patterns import BEHAVIOURS
from headwater.heads.scoring import Sensitivity
from headwater.heads.weight_maps import CIRCUITS, LONG, SIGNS, Composition, SingularVectors
from headwater.options import checked_name
from headwater.runs.result import DRAWINGS, whole_summary

# What heads attend to, on random tokens and on text, and what their parameters say: maps of layer by head.
#
# A marker's colour and shape are the behaviour that names the head there; its area grows with the excess. Heads named
# by no behaviour are small grey discs. The legend counts heads, on random tokens and on text. Below: the copying share
# of OV eigenvalues, from brown (suppresses) to violet (copies), with a dot if it is beyond 95 % of random heads; and
# the share of the scores before the softmax that positions determine. Missing values are grey.


SEEN = {"random": "random tokens", "text": "text"}
SHADES: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "copying": ("Σλ / Σ|λ|, eigenvalues of OV", "PuOr", (-1.0, -0.5, 0.0, 0.5, 1.0)),
    "position": ("share of the scores' variance", "Blues", (0.0, 0.5, 1.0)),
}
"""By column of `AttentionBehaviour.heads`: label of the colour bar, colour map, and ticks of the bar."""
UNCALLED_AREA = 0.12
LEFT, BOTTOM, TITLE, LEGEND, LINES = 1.0, 0.75, 0.8, 1.6, 1.7
"""Inches: left of a map, below it, above and below all maps, beside a single map, and the least height of a map."""


@DRAWINGS.add(AttentionBehaviour)
def plot_behaviour(result: AttentionBehaviour, ax: Axes | None = None, *, on: str | None = None) -> Axes | Figure:
    """Draw maps of layer by head: behaviours on random tokens and on text, `copying` and `position`.

    `on` selects one map: "random" or "text" draw a marker per head, in the colour and shape of its label there;
    "copying" or "position" draw the numbers of `heads`. By default every map is drawn on a new figure.
    """
    run_on = list(result.table["on"].unique())
    present = [*run_on, *(name for name in SHADES if result.heads[name].notna().any())]
    shown = present if on is None else [checked_name("on", on, present)]
    (n_layers, n_heads), maps, is_alone = extent(result.heads), len(shown), ax is None
    # Maps with markers come first; beside a single map there is room for the legend.
    columns = max(sum(name in kinds for name in shown) for kinds in (SEEN, SHADES))
    cell = min(CELL, LARGEST[0] / n_layers / maps**0.5, LARGEST[1] / n_heads)
    width = columns * (LEFT + max(n_layers * cell, 1.3)) + LEGEND * (maps == 1)
    height = -(-maps // columns) * (BOTTOM + max(n_heads * cell, LINES)) + TITLE * (maps > 1)
    title, labelled = st.model_title(result.run, "what heads attend to"), dict[str, pd.DataFrame]()
    with st.several_panels(ax, (width, height), maps, columns, title, instead="choose one with on=") as axes:
        for name, place in zip(shown, axes, strict=True):
            frame(place, result.heads)
            seen = SEEN.get(name, name)
            alone = f"attention on {seen}" if name in SEEN else f"{seen} by head"
            place.set_title(seen if maps > 1 else st.model_title(result.run, alone))
            if name in SHADES:
                _shade(result.heads, name, place)
            else:
                labelled[name] = _mark_heads(result.table[result.table["on"] == name], place)
        if labelled:
            # The behaviours, with the heads that each names per map.
            counts = [one["label"].value_counts() for one in labelled.values()]
            texts = {one: " / ".join(f"{n.get(one, 0):,}" for n in counts) for one in (*BEHAVIOURS, NOT_CALLED)}
            handles = [legend_mark(*_look(name), f"{words(name)} ({text})") for name, text in texts.items()]
            of_maps = f"heads ({' / '.join(labelled)}), " if len(labelled) > 1 else ""
            look: dict[str, Any] = {"handles": handles, "title": f"{of_maps}area: excess over chance"}
            if maps == 1:
                st.legend_beside(axes[0], is_alone, **look)
            else:
                st.legend_below(st.figure_of(axes[0]), len(handles), **look)
    return st.plot_of(axes)


def _mark_heads(table: pd.DataFrame, ax: Axes) -> pd.DataFrame:
    """Mark each head; return a row per head: the behaviour that names it, and its excess."""
    excess = table.rename(columns={"behaviour": "label"})[["layer", "head", "label", "excess"]]
    heads = named(table).merge(excess, on=["layer", "head", "label"], how="left")
    for name, rows in heads.groupby("label"):
        color, shape, area = _look(str(name))
        mark_heads(ax, rows, mark_area(area, rows["excess"]), c=color, marker=shape, linewidths=0, label=str(name))
    return heads


def _shade(heads: pd.DataFrame, name: str, ax: Axes) -> None:
    """Colour each head by a quantity, with a labelled colour bar."""
    bar, colors, ticks = SHADES[name]
    values = heads.pivot_table(index="head", columns="layer", values=name, dropna=False)
    mesh = st.heat_map(ax, values.reindex(columns=range(int(heads["layer"].max()) + 1)), colors, ticks[0], 1.0)
    if name == "copying":
        beyond = heads[(heads[name] > heads[f"{name}_high"]) | (heads[name] < heads[f"{name}_low"])]
        mark_heads(ax, beyond, np.full(len(beyond), 0.35**2), c="white", edgecolors=INK, linewidths=0.5)
        ax.set_xlabel("Layer (dot: beyond random heads)")
    st.color_bar(mesh, ax, bar, ticks=ticks)


def _look(name: str) -> tuple[str, str, float]:
    """Return the colour, shape and relative area of a behaviour's markers."""
    if name not in BEHAVIOURS:
        return *NONE, UNCALLED_AREA
    row = BEHAVIOURS[name]
    return row.color, row.mark, AREAS.get(row.mark, 1.0)


# Composition of heads: earlier heads upwards, later heads to the right, a map for the queries, keys and values.
#
# The colour is the score above the expectation for randomly rotated matrices, from white; lines separate the layers.
# Impossible pairs (the later head is not later) stay grey.


@DRAWINGS.add(Composition)
def plot_composition(result: Composition, ax: Axes | None = None, *, kind: str | None = None) -> Axes | Figure:
    """Draw the scores of one `kind` ("q", "k", "v"; default: a panel per kind): earlier by later heads."""
    present = list(result.table["kind"].unique())
    kinds = present if kind is None else [checked_name("kind", kind, present)]
    above = (result.table["score"] - result.table["expected"]).clip(lower=0)
    limit = float(above.max()) or 1.0
    n, title = len(kinds), st.model_title(result.run, "composition of heads, by parameters")
    with st.several_panels(ax, (0.6 + 2.5 * n, 2.8), n, n, title, instead="choose one with kind=") as axes:
        for panel, name in zip(axes, kinds, strict=True):
            part = result.table[result.table["kind"] == name]
            mesh = _map(panel, part, above[part.index], limit)
            by = LONG[str(name)]
            panel.set_title(by if n > 1 else st.model_title(result.run, f"composition of heads by {by}"))
        axes[0].set_ylabel("Earlier head, by layer")
        st.color_bar(mesh, axes, f"Score above chance ({result.table['expected'].iloc[0]:.2f})", fraction=0.04)
    return st.plot_of(axes)


def _map(ax: Axes, part: pd.DataFrame, above: pd.Series, limit: float) -> Any:
    heads = max(part["writer_head"].max(), part["reader_head"].max()) + 1
    layers = int(part["reader_layer"].max()) + 1
    grid = np.full((heads * (layers - 1), heads * (layers - 1)), np.nan)
    rows = part["writer_layer"].to_numpy() * heads + part["writer_head"].to_numpy()
    columns = (part["reader_layer"].to_numpy() - 1) * heads + part["reader_head"].to_numpy()
    grid[rows, columns] = above
    mesh = st.heat_map(ax, grid, "Blues", 0.0, limit)
    for edge in range(1, layers - 1):
        ax.axhline(edge * heads - 0.5, color="white", linewidth=0.6)
        ax.axvline(edge * heads - 0.5, color="white", linewidth=0.6)
    places = np.arange(0, layers - 1, -(-layers // 12))
    ax.set_yticks((places + 0.5) * heads - 0.5, [str(one) for one in places])
    ax.set_xticks((places + 0.5) * heads - 0.5, [str(one + 1) for one in places])
    ax.set_xlabel("Later head, by layer")
    return mesh


TOKENS = 4
"""Most tokens listed per side and sign, if there is room."""
SIZE = 6
"""Font size of the tokens, in points."""


@DRAWINGS.add(SingularVectors)
def plot_singular_vectors(result: SingularVectors, ax: Axes | None = None) -> Axes:
    """Draw the vectors that have tokens as bars, with their tokens written beside them."""
    table = result.table.sort_values(["vector", "place"])
    vectors = table["vector"].unique().tolist()
    values = result.values.set_index("vector").loc[vectors]
    first = table.iloc[0]
    with st.one_panel(ax, 7.2, 0.9 + 0.42 * len(vectors)) as ax:
        ax.barh(vectors, values["share"], height=0.55, color=BLUE, label="share of the circuit")
        ax.plot(values["random_share"], vectors, "|", color=INK, markersize=9, label="of random factors")
        # The tokens are beside the bars, in two thirds of the width.
        room = 72 * 0.64 * st.inches(ax)[0] / (0.55 * SIZE)
        widest = float(max(values["share"].max(), values["random_share"].max()))
        for vector in vectors:
            for sign, offset in zip(SIGNS, (-0.19, 0.19), strict=True):
                part = table[(table["vector"] == vector) & (table["sign"] == sign)]
                sides = [part.loc[part["side"] == side, "token"] for side in CIRCUITS[str(first["circuit"])]]
                lines = (_line(sign, sides, n) for n in range(TOKENS, 0, -1))
                line = next((line for line in lines if st.columns(line) <= room), _line(sign, sides, 1))
                ax.text(
                    widest * 1.06, vector + offset, line, size=SIZE, va="center", in_layout=False,
                    family=["sans-serif", *st.others()], color=INK if sign == "+" else FAINT,
                )  # fmt: skip
        ax.set_yticks(vectors, [str(vector) for vector in vectors])
        ax.set(xlim=(0, widest * 3.2), ylim=(max(vectors) + 0.6, 0.4))
        ticks = [tick for tick in ax.get_xticks() if 0 <= tick <= widest * 1.01]
        ax.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
        ax.set(ylabel="Singular vector")
        ax.set_xlabel("Share of the circuit (bar; tick: random factors)", loc="left")
        circuit = f"{str(first['circuit']).upper()} of layer {first['layer']}, head {first['head']}, as tokens"
        ax.set_title(st.model_title(result.run, circuit))
    return ax


def _line(sign: str, sides: Iterable[Iterable[str]], n: int) -> str:
    """Return the first `n` tokens of both sides as one line."""
    first = (" ".join(map(shown, islice(side, n))) for side in sides)
    return f"{sign.replace('-', '−')}  {'  →  '.join(first)}"


# Changes of heads from one model to another: layer by head, or model by model.
#
# Two models: a marker where a head gained (triangle up), lost (triangle down), strengthened or weakened (plus, minus) a
# relation, in the colour of the relation's category; each head shows its largest change. Grey discs are heads that are
# classified in the first model and did not change. More than two: the number of heads per category, model by model, and
# below it, the number of heads that gained and lost a relation compared with the first.


MARKS = {"gained": "^", "lost": "v", "stronger": "+", "weaker": "_"}
UNCHANGED = "#cfcfcf"
APART = 0.24
"""Inches between heads."""


@DRAWINGS.add(HeadComparison)
def plot_comparison(comparison: HeadComparison, ax: Axes | None = None) -> Axes | Figure:
    """Draw the changes of heads, or for more than two models the curves over models, not on `ax`."""
    if len(comparison.models) > 2:
        return _draw_curves(comparison, ax)
    table, is_alone, (first, other) = comparison.table, ax is None, comparison.models
    n_layers, n_heads = extent(table)
    cell = min(APART, LARGEST[0] / n_layers, LARGEST[1] / n_heads)
    with st.one_panel(ax, max(n_layers * cell, 1.4) + 2.6, max(n_heads * cell, 1.6) + 0.9) as ax:
        frame(ax, table)
        ax.set_title(st.label(f"{first} → {other}: heads that changed"))
        largest = comparison.changed.drop_duplicates(["layer", "head"])
        classified = table[(table["model"] == first) & table["found"] & table["category"].notna()]
        heads, drawn = (one[["layer", "head"]].drop_duplicates() for one in (classified, largest))
        same = heads[~pd.MultiIndex.from_frame(heads).isin(pd.MultiIndex.from_frame(drawn))]
        ax.scatter(same["layer"], same["head"], s=14, c=UNCHANGED, linewidths=0)
        for (change, category), rows in largest.groupby(["change", largest["category"].fillna("")]):
            color = CATEGORIES[str(category)].color if category else INK
            ax.scatter(rows["layer"], rows["head"], s=30, c=color, marker=MARKS[str(change)], linewidths=1.2)
        counts = largest["change"].value_counts()
        entries = [("o", UNCHANGED, f"classified, unchanged ({len(same):,})")]
        entries += [(mark, INK, f"{name} ({counts.get(name, 0):,})") for name, mark in MARKS.items()]
        present = set(largest["category"])
        entries += [("s", category.color, name) for name, category in CATEGORIES.items() if name in present]
        handles = [
            Line2D([], [], linestyle="none", marker=mark, color=color, markersize=5, label=name)
            for mark, color, name in entries
        ]
        st.legend_beside(ax, is_alone, handles=handles, title="mark: change, colour: category")
    return ax


def _draw_curves(comparison: HeadComparison, ax: Axes | None) -> Axes | Figure:
    models, summary = comparison.models, whole_summary(comparison)
    size, heights = (max(3.6, 0.5 * len(models) + 2.2), 4.0), (3, 2)
    with st.several_panels(ax, size, 2, 1, instead="compare two models", sharex=True, height_ratios=heights) as (
        upper,
        lower,
    ):
        at = range(len(models))
        for name, category in CATEGORIES.items():
            heads = summary[summary["category"] == name]["heads"]
            upper.plot(at, heads, marker=category.mark, color=category.color, markersize=4, clip_on=False, label=name)
        upper.set(ylabel="Heads", ylim=(0, None), title="Heads by category")
        every = summary[summary["category"] == "any"]
        lower.bar(at, every["gained"], width=0.6, color=BLUE, label="gained")
        lower.bar(at, -every["lost"], width=0.6, color=ORANGE, hatch="///", edgecolor="white", label="lost")
        lower.axhline(0, color=FAINT, linewidth=0.6)
        most = max(1, int(every[["gained", "lost"]].to_numpy().max()))
        lower.set(ylabel="Heads", ylim=(-1.15 * most, 1.15 * most))
        lower.set_title(st.label(f"Gained or lost a relation since {models[0]}"))
        lower.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
        lower.set_xticks(at, st.ticks(models, 24), rotation=30 if len(models) > 4 else 0)
        for panel in (upper, lower):
            panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        st.whole_numbers(upper.yaxis, lower.yaxis)
    return st.plot_of([upper, lower])


# Number of classified heads against the threshold: a line per category, a panel per rule.
#
# The black line counts heads in any category; a head with several categories counts in each of their lines. The dashed
# vertical line is the threshold of the head map, in the panel of its rule. If other settings were scored, a last panel
# shows the number of heads classified under each, and how many of these the map classifies alike.

PANEL = (2.7, 2.8)


@DRAWINGS.add(Sensitivity)
def plot_sensitivity(sensitivity: Sensitivity, ax: Axes | None = None) -> Axes | Figure:
    """Draw the result of `HeadMap.sensitivity`.

    `ax` is supported only for a map without a null model, which has one panel.
    """
    rules = list(dict.fromkeys(sensitivity.table["rule"]))
    n_settings = sensitivity.table["setting"].nunique()
    n_panels, is_new = len(rules) + (n_settings > 1), ax is None
    size = max(n_panels * PANEL[0], 3.6), max(PANEL[1], 1.4 + 0.2 * n_settings)
    with st.several_panels(ax, size, n_panels, n_panels) as panels:
        for panel, rule in zip(panels, rules, strict=False):
            _draw_rule(sensitivity, rule, panel)
        if not is_new:
            panels[0].set_title(st.model_title(sensitivity.run, f"heads classified, {rules[0]} rule"))
            panels[0].legend(loc="upper right")
            return panels[0]
        for panel in panels[1 : len(rules)]:
            panel.sharey(panels[0])
            panel.set_ylabel("")
        figure = st.figure_of(panels[0])
        first: Any = panels[0]
        handles, names = first.get_legend_handles_labels()
        if n_panels > len(rules):
            rows, last = sensitivity.at_own_threshold, panels[-1]
            handles.append(last.barh(range(len(rows)), rows["heads"], color=FAINT, height=0.7))
            handles.append(last.scatter(rows["kept"], range(len(rows)), color=INK, s=12, zorder=2))
            names += ["heads", "of these, in the map"]
            last.set(yticks=[*range(len(rows))], yticklabels=rows["setting"], ylim=(len(rows) - 0.5, -0.5))
            last.set(xlabel="Heads", title="other settings")
            st.whole_numbers(last.xaxis)
        columns = max(2, int(figure.bbox_inches.width))
        figure.legend(handles, names, loc="outside lower center", ncols=columns, title="dashed: the map's")
        st.set_figure_title(figure, st.model_title(sensitivity.run, "heads classified, by threshold"))
    return figure


def _draw_rule(sensitivity: Sensitivity, rule: str, ax: Axes) -> None:
    rows = sensitivity.as_mapped[sensitivity.as_mapped["rule"] == rule]
    ax.plot(rows["threshold"], rows["heads"], color=INK, marker="o", markersize=3, clip_on=False, label="any category")
    for name, category in CATEGORIES.items():
        if name in rows:
            ax.plot(
                rows["threshold"], rows[name], color=category.color, marker=category.mark, markersize=3, linewidth=0.9,
                clip_on=False, label=st.label(name),
            )  # fmt: skip
    if rule == sensitivity.run.options["rule"]:
        ax.axvline(sensitivity.run.options["threshold"], color=FAINT, linewidth=0.8, linestyle=st.DASHED, zorder=0)
    most = max(1, int(sensitivity.table["heads"].max()))
    what = "excess\n(score beyond chance)" if rule == "controlled" else "score"
    ax.set(xlabel=f"Threshold of the {what}", ylabel="Heads", ylim=(0, 1.05 * most), title=f"{rule} rule")
    st.cell_ticks(ax.xaxis, rows["threshold"], [f"{one:g}" for one in rows["threshold"]])
    st.whole_numbers(ax.yaxis)


CONTEXT_LOOKS = {"without": (BLUE, "o"), "with": (ORANGE, "s")}


@DRAWINGS.add(DynamicScores)
def plot_correlations(scores: DynamicScores, ax: Axes | None = None) -> Axes:
    """Draw the correlation of static and dynamic scores with its interval, a line per relation and context."""
    rows = scores.correlations[scores.correlations["sign"] == "score"]
    names = list(dict.fromkeys(rows["relation"]))
    with st.one_panel(ax, 4.5, 0.95 + 0.22 * len(names)) as ax:
        for shift, (context, (color, mark)) in zip((-0.15, 0.15), CONTEXT_LOOKS.items(), strict=True):
            found = rows[rows["context"] == context].set_index("relation").loc[names]
            y = [place + shift for place in range(len(names))]
            st.draw_points(
                ax, found["pearson"], y, found["low"], found["high"], color, mark, label=f"{context} context"
            )
        st.name_rows(ax, st.ticks(name.replace("_", " ") for name in names), 0.6)
        ax.set_xlim(min(0.0, rows["low"].min(skipna=True) or 0.0), 1.02)
        ax.set_xlabel(f"Pearson correlation over {int(rows['heads'].max()):,} heads ({st.LINES_ARE})")
        st.legend_above(ax, 2, st.model_title(scores.run, "scores of heads, static and dynamic"), **st.MARKS_ONLY)
    return ax


@DRAWINGS.add(HeadAblation)
def plot_ablation(ablation: HeadAblation, ax: Axes | None = None) -> Axes:
    """Draw accuracy against the number of heads removed."""
    table = ablation.table
    base = table[(table["role"] == "relation") & (table["removed"] == "none")]
    with st.one_panel(ax, 3.6, 3.0) as ax:
        solid, dashed = {"marker": "o"}, {"marker": "s", "linestyle": "--"}
        for removed, color, look in (("relation heads", BLUE, solid), ("random heads", FAINT, dashed)):
            rows = table[(table["role"] == "relation") & (table["removed"] == removed)]
            if rows.empty:
                continue
            means = rows.groupby("n_heads")["accuracy"].agg(["mean", "min", "max"])
            start, draws = base["accuracy"].iloc[0], rows["draw"].nunique()
            name = f"{removed} ({draws} draws, band: all)" if draws > 1 else removed
            values = ([start, *means[column]] for column in ("mean", "min", "max"))
            st.draw_line(ax, [0, *means.index], *values, color=color, **look, markersize=3, label=name)
        controls = table[(table["role"] == "control") & (table["removed"] == "relation heads")]
        if len(controls):
            ax.plot(
                controls["n_heads"], controls["accuracy"], "x", color=INK, markersize=5, label="on control relations"
            )
        ax.set(ylim=(-0.03, 1.03), xlabel="Heads removed", ylabel="Accuracy")
        st.whole_numbers(ax.xaxis)
        items = base["items"].iloc[0]
        seen = f"{st.label(ablation.relation.replace('_', ' '))} ({items:,} items)"
        st.legend_above(ax, 1, st.model_title(ablation.run, f"heads removed,\n{seen}"))
    return ax


# From weights to a cause: five panels for one relation, a line per relation for several.
#
# A ring marks the head that weights and attention name. A share of 1 is the largest effect of a head; lines are 95 %
# intervals over sources.

WAY_LOOKS: dict[str, tuple[str, str]] = {
    NAMED: (BLUE, "o"),
    "attention": (ORANGE, "s"),
    "other relations' weights": (GREEN, "^"),
    "other relations' effect": (PINK, "D"),
}
MAPS = {
    "margin": "margin of the weights (logits)",
    "attention": "attention to the source",
    "effect": "effect of patching (share of gap)",
}
ROLE_LOOKS = {"source": (ORANGE, "s"), "last": (BLUE, "o")}
OURS = "named", "named together"
IN_FULL = {"largest effect, first half": "head with the largest effect on the first half,"}
"""Ablated heads by the name that the figure gives them, if it is not that of the table."""


@DRAWINGS.add(EvidenceSuite)
def plot_suite(suite: EvidenceSuite, ax: Axes | None = None) -> Axes:
    """Draw the named head's share of the largest effect per relation, with the baselines beside it."""
    order = suite.measured.sort_values(["family", "share"])["relation"].tolist()
    if not order:
        raise InputError(f"{suite.run.model} can do none of these relations: there is nothing to draw.")
    with st.one_panel(ax, 6.5, 1.2 + 0.17 * len(order)) as ax:
        place = {relation: number for number, relation in enumerate(order)}
        for way in (*BASELINES, NAMED):
            rows = suite.ways[(suite.ways["way"] == way) & suite.ways["share"].notna()]
            y, (color, mark) = rows["relation"].map(place), WAY_LOOKS[way]
            if way == NAMED:
                ax.hlines(y, rows["low"], rows["high"], color=color, lw=1.0)
            # Baselines are larger and hollow, so that they stay visible around a marker at the same place.
            look: dict[str, Any] = (
                {"mfc": color, "ms": 4.0, "mew": 0} if way == NAMED else {"mfc": "none", "ms": 6.5, "mew": 1.1}
            )
            ax.plot(rows["share"], y, mark, color=color, label=way, ls="none", **look)
        families = suite.table.set_index("relation")["family"]
        st.cell_ticks(ax.yaxis, range(len(order)), [f"{relation}  ({families[relation]})" for relation in order])
        ax.set(ylim=(-0.7, len(order) - 0.3), xlim=(min(-0.05, ax.get_xlim()[0]), 1.05))
        ax.set_xlabel(f"Share of the largest effect ({st.LINES_ARE.removeprefix('lines: ')} of weights and attention)")
        ax.set_title(st.model_title(suite.run, "effects of the named heads"))
        st.legend_beside(ax, title="head named by")
    return ax


@DRAWINGS.add(Evidence)
def plot_evidence(result: Evidence, ax: Axes | None = None) -> Axes | Figure:
    """Draw five panels: three maps by layer and head, the residual stream patched, and the cost of ablation."""
    if not result.is_measured:
        raise InputError(result.verdict)
    st.refuse_panels(ax, 5)
    with st.style(ax):
        figure = st.new_figure(10.0, 5.2)
        # Each row has its own layout, because the names of costs are long.
        above, below = figure.subfigures(2, 1)  # type: ignore[misc]
        axes = [*above.subplots(1, 3), *below.subplots(1, 2)]
        named = result.way(NAMED)
        for (column, title), place in zip(MAPS.items(), axes, strict=False):
            grid = result.table.pivot(index="head", columns="layer", values=column)
            # Attention is never negative.
            st.color_bar(st.heat_map(place, grid, "Blues" if column == "attention" else ""), place)
            place.set(title=title, xlabel="Layer", ylabel="Head")
            st.whole_numbers(place.xaxis, place.yaxis)
            for color, width in (("white", 2.6), (INK, 1.2)):  # visible on dark and on light cells
                place.plot(named["layer"], named["head"], "o", ms=9, mfc="none", mec=color, mew=width)
        when, cost = axes[3:]
        for role, rows in result.when.groupby("role", sort=False):
            color, mark = ROLE_LOOKS[str(role)]
            values = (rows[name] for name in ("layer", "share", "low", "high"))
            st.draw_line(when, *values, color=color, marker=mark, ms=2.5, label=f"at the {role} token")
        when.set(xlabel="Before layer", ylabel="Share of gap", title="residual stream patched")
        st.whole_numbers(when.xaxis)
        when.legend()
        rows, y = result.cost, range(len(result.cost))
        both = list(zip(rows["what"], rows["heads"], strict=True))
        # Heads that are ablated together are listed one by one in the rows above.
        both = [(IN_FULL.get(what, what), heads) for what, heads in both]
        names = [what if not heads or "," in heads else f"{what} {heads}" for what, heads in both]
        colors = [FAINT if what.startswith("random") else BLUE if what in OURS else ORANGE for what in rows["what"]]
        cost.hlines(y, rows["low"], rows["high"], color=colors, lw=1.2)
        cost.scatter(rows["cost"], y, c=colors, s=14)
        cost.axvline(0, color=FAINT, lw=0.6)
        st.name_rows(cost, st.ticks(names, 60))
        cost.set(xlabel="Logits lost", title="cost of ablation")
        st.set_figure_title(figure, st.label(evidence_title(result)))
    return figure


def evidence_title(found: Evidence) -> str:
    """Return the title of the figure and of the view, as plain text."""
    return st.plain_title(found.run.model, f"{found.relation}, from weights to a cause")
