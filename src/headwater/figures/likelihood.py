"""Figures of likelihood results: tokens by rank and entropy, scores against K, and members against non-members."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from headwater.colors import BLUE, FAINT, INK, ORANGE
from headwater.figures.style import cell_ticks, legend_above, model_title, new_figure, style, whole_numbers
from headwater.likelihood.files import ScoredTexts
from headwater.likelihood.formulas import SCORES
from headwater.likelihood.members import BASELINE, Membership
from headwater.likelihood.scores import MemorizationScores
from headwater.likelihood.statistics import TextStatistics
from headwater.runs.result import DRAWINGS

QUARTILES = np.array([0.25, 0.5, 0.75])


@DRAWINGS.add(TextStatistics)
def plot_statistics(stats: TextStatistics, ax: Axes | None = None) -> Axes:
    """Draw how the log-probabilities of tokens are distributed; with several layers, their quartiles by layer."""
    table = stats.table
    with style(ax):
        ax = ax if ax is not None else new_figure(3.6, 2.4).add_subplot()
        if "layer" in table and table["layer"].nunique() > 1:
            found = table.groupby("layer")["log_probability"].quantile(QUARTILES).unstack()
            ax.fill_between(found.index, found[0.25], found[0.75], color=BLUE, alpha=0.25, linewidth=0)
            ax.plot(found.index, found[0.5], "o-", color=BLUE, markersize=3)
            ax.set(xlabel="Layer (band: quartiles of tokens)", ylabel="log p of a token (nats)")
            tokens = len(table) // table["layer"].nunique()
            ax.set_title(model_title(stats.run, f"log-probability of {tokens:,} tokens"))
            whole_numbers(ax.xaxis)
        else:
            values = np.sort(table["log_probability"].to_numpy(float))
            ax.plot(values, np.arange(1, len(values) + 1) / max(1, len(values)), color=BLUE)
            greedy = float((table["rank"] == 0).mean()) if len(table) else float("nan")
            ax.set_title(model_title(stats.run, f"{len(values):,} tokens, {greedy:.0%} its first choice"))
            ax.set(xlabel="log p of a token (nats)", ylabel="Share of tokens at or below", ylim=(0, 1))
    return ax


@DRAWINGS.add(MemorizationScores)
def plot_scores(scores: MemorizationScores, ax: Axes | None = None) -> Axes:
    """Draw the median over texts, and the quartiles, of Min-K%, Min-K%++ and Gap-K% against K, at the last layer."""
    table = scores.table
    if "layer" in table:
        table = table[table["layer"] == table["layer"].max()]
    with style(ax):
        ax = ax if ax is not None else new_figure(3.6, 2.9).add_subplot()
        texts = table["text"].nunique()
        drawn = {name: SCORES[name] for name in SCORES if SCORES[name].takes_k and (table["score"] == name).any()}
        for name, score in drawn.items():
            found = table[table["score"] == name].groupby("k")["value"].quantile(QUARTILES).unstack()
            ax.fill_between(found.index, found[0.25], found[0.75], color=score.color, alpha=0.15, linewidth=0)
            ax.plot(found.index, found[0.5], marker=score.mark, color=score.color, markersize=3, label=score.title)
        ax.set(xlabel="K, share of lowest tokens (bands: quartiles of texts)", xlim=(0, 1.02))
        ax.set_ylabel("Score (higher = more likely seen)")
        legend_above(ax, 3, model_title(scores.run, f"scores of {texts:,} texts by K"))
    return ax


@DRAWINGS.add(Membership)
def plot_membership(membership: Membership, ax: Axes | None = None) -> Axes:
    """Draw the AUC of each score, at its K, with its interval, beside the baseline that never sees the model.

    Of several layers the last is drawn.
    """
    table = membership.table
    if "layer" in table:
        table = table[table["layer"].isna() | (table["layer"] == table["layer"].max())]
    names = [
        row["score"] if np.isnan(row["k"]) else f"{SCORES[row['score']].title}, K = {row['k']:g}"
        for row in table.to_dict("records")
    ]
    with style(ax):
        if ax is None:
            ax = new_figure(4.2, 0.9 + 0.17 * len(names)).add_subplot()
        y = np.arange(len(names))
        is_baseline = (table["score"] == BASELINE).to_numpy()
        for where, color, mark in ((~is_baseline, BLUE, "o"), (is_baseline, ORANGE, "s")):
            ax.hlines(y[where], table["auc_low"][where], table["auc_high"][where], colors=color, linewidths=1)
            ax.plot(table["auc"][where], y[where], mark, color=color, markersize=3.5)
        ax.axvline(0.5, color=FAINT, linewidth=0.7, linestyle="--")
        cell_ticks(ax.yaxis, y, [f"{name}, no model" if name == BASELINE else name for name in names])
        ax.set_ylim(len(names) - 0.4, -0.6)
        most = table[["members", "nonmembers"]].max()
        level = membership.run.options["level"]
        ax.set_xlabel(f"AUC, {most['members']:,} members against {most['nonmembers']:,} others (lines: {level:.0%})")
        ax.set_title(model_title(membership.run, "telling texts seen in training"))
        ax.tick_params(axis="y", colors=INK, length=0)
    return ax


@DRAWINGS.add(ScoredTexts)
def plot_scored_texts(scored: ScoredTexts, ax: Axes | None = None) -> Axes:
    """Draw how the texts of a file are distributed over Min-K% (its K nearest 20 %), as a histogram."""
    shares = [float(str(name).removeprefix("min_k_")) for name in scored.table if str(name).startswith("min_k_")]
    share = min(shares, key=lambda one: abs(one - 0.2))
    values = scored.table[f"min_k_{share:g}"].dropna()
    with style(ax):
        ax = ax if ax is not None else new_figure(3.6, 2.4).add_subplot()
        ax.hist(values, bins=min(40, max(5, int(len(values) ** 0.5))), color=BLUE, alpha=0.85)
        ax.set(xlabel=f"Min-K% at K = {share:g} (higher = more likely seen)", ylabel="Texts")
        ax.set_title(model_title(scored.run, f"Min-K% of {len(values):,} texts"))
        whole_numbers(ax.yaxis)
    return ax
