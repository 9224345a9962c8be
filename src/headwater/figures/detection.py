"""Right and wrong answers: how many, how well detectors separate them, and the AUC of probes by layer."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import headwater.figures.style as st
from headwater.colors import BLUE, FAINT, INK, ORANGE, UNSEEN, looks_of_sets
from headwater.detection.detection import Detection
from headwater.detection.methods import NAMES
from headwater.errors import InputError
from headwater.pathways.token_map import ProbeMap
from headwater.probes.selectivity import ProbeFit
from headwater.questions.answers import AnsweredQuestions
from headwater.runs.result import DRAWINGS, whole_summary


@DRAWINGS.add(Detection)
def plot_detection(detection: Detection, ax: Axes | None = None) -> Axes:
    """Draw a row per method, a marker and interval per question set; the dashed line is chance."""
    table = detection.table[detection.table["auc"].notna()]
    if table.empty:
        raise InputError("No method of this detection could be measured: there is nothing to draw.")
    methods = [name for name in NAMES if (table["method"] == name).any()]
    sets = list(dict.fromkeys(table["dataset"]))
    shifts = np.linspace(-0.3, 0.3, len(sets)) if len(sets) > 1 else np.zeros(1)
    is_new, height = ax is None, 0.7 + len(methods) * (0.13 + 0.065 * len(sets)) + 0.16 * -(-len(sets) // 2)
    with st.one_panel(ax, 3.9, height) as ax:
        for row in range(0, len(methods), 2):
            ax.axhspan(row - 0.5, row + 0.5, color=UNSEEN, linewidth=0, zorder=0)
        ax.axvline(0.5, color=FAINT, linewidth=0.8, linestyle=st.DASHED, zorder=1)
        for (name, (color, marker)), shift in zip(looks_of_sets(sets).items(), shifts, strict=True):
            part = table[table["dataset"] == name].set_index("method")
            here = [method for method in methods if method in part.index]
            y = [methods.index(method) + shift for method in here]
            found = part.loc[here]
            counted = f"{st.label(name)} ({found['answers'].iloc[0]:,.0f} answers, {found['wrong'].iloc[0]:,.0f} wrong)"
            st.draw_points(ax, found["auc"], y, found["low"], found["high"], color, marker, label=counted)
        ax.set_yticks(range(len(methods)), [NAMES[method] for method in methods])
        ax.tick_params(axis="y", length=0)
        ax.set(xlim=(min(0.45, float(table["low"].min()) - 0.02), 1.0), ylim=(len(methods) - 0.5, -0.5))
        ax.set_xlabel(f"AUC, wrong against right answers\n({st.LINES_ARE})")
        ax.set_title(st.model_title(detection.run, "wrong answers detected"))
        if is_new:
            st.figure_of(ax).legend(loc="outside lower center", ncols=min(2, len(sets)), fontsize=7, **st.MARKS_ONLY)
        else:
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=min(2, len(sets)), **st.MARKS_ONLY)
    return ax


COLORS = {"right": (BLUE, "white"), "wrong": (ORANGE, INK), "cut off": (FAINT, "white"), "dropped": ("#d0d0d0", INK)}
"""Colours of bars, and of the numbers in them."""


@DRAWINGS.add(AnsweredQuestions)
def plot_answers(answered: AnsweredQuestions, ax: Axes | None = None) -> Axes:
    """Draw a bar per question set: the shares right, wrong, cut at the token limit, and dropped for other reasons."""
    rows = whole_summary(answered)
    written = st.ticks(rows["dataset"])
    names = [f"{name} ({count:,})" for name, count in zip(written, rows["questions"], strict=True)]
    wrong = rows["wrong"].fillna(0.0).astype(float) * rows["used"]
    counts = (rows["used"] - wrong, wrong, rows["cut"], rows["dropped"] - rows["cut"])
    with st.one_panel(ax, 4.5, 1.0 + 0.3 * len(names)) as ax:
        starts = np.zeros(len(names))
        for (name, (color, ink)), count in zip(COLORS.items(), counts, strict=True):
            shares = (count / rows["questions"]).to_numpy()
            if not shares.any():
                continue
            bars = ax.barh(range(len(names)), shares, left=starts, height=0.6, color=color, label=name)
            # Narrower bars have no room for their number.
            fitting = [f"{share:.0%}" if share >= 0.06 else "" for share in shares]
            ax.bar_label(bars, fitting, label_type="center", color=ink, fontsize=7)
            starts += shares
        st.name_rows(ax, names)
        ax.set(xlim=(0, 1), xlabel="Share of the questions")
        st.legend_above(ax, 4, st.model_title(answered.run, "right and wrong answers"))
    return ax


TOKEN_NAMES = {
    "question_last": "exact question, last",
    "prompt_last": "prompt, last",
    "answer_first": "answer, first",
    "before_answer": "before exact answer",
    "exact_answer_first": "exact answer, first",
    "exact_answer_last": "exact answer, last",
    "after_answer": "after exact answer",
    "answer_last": "answer, last",
}


@DRAWINGS.add(ProbeMap)
def plot_probe_map(result: ProbeMap, ax: Axes | None = None) -> Axes | Figure:
    """Draw a row per token and a column per layer; darker is a higher AUC, from 0.5 to 1; the best cell is framed.

    One panel per question set.
    """
    sets, n_tokens = result.datasets, result.table["token"].nunique()
    across = min(2, len(sets))
    size = 2.6 * across + 1.6, (0.2 * n_tokens + 0.7) * -(-len(sets) // across) + 0.5
    title = st.model_title(result.run, f"wrong answers detected by probes of {result.run.options['site']}")
    with st.several_panels(ax, size, len(sets), across, title, sharey=True) as axes:
        for panel, name in zip(axes, sets, strict=True):
            rows = result.table[result.table["dataset"] == name]
            wide = rows.pivot(index="token", columns="layer", values="auc")
            tokens = [token for token in TOKEN_NAMES if token in wide.index]
            values = wide.loc[tokens].to_numpy(dtype=float)
            image = panel.imshow(values, cmap="Blues", vmin=0.5, vmax=1.0, aspect="auto", interpolation="none")
            row, column = divmod(int(values.argmax()), values.shape[1])
            panel.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=1.0))
            panel.set_yticks(range(len(tokens)), [TOKEN_NAMES[token] for token in tokens])
            panel.set_xlabel("Layer")
            st.whole_numbers(panel.xaxis)
            counted = f"{st.label(name)} (n = {rows['answers'].iloc[0]:,})"
            panel.set_title(f"{title}\n{counted}" if len(sets) == 1 else counted)
        st.color_bar(image, axes, "AUC")
    return st.plot_of(axes)


@DRAWINGS.add(ProbeFit)
def plot_probe_fit(fit: ProbeFit, ax: Axes | None = None) -> Axes:
    """Draw AUC, the control task's AUC, and selectivity by layer."""
    table = fit.table.sort_values("layer")
    layers = table["layer"].to_numpy(dtype=float)
    with st.one_panel(ax, 3.6, 2.5) as ax:
        ax.axhline(0.5, color=FAINT, linewidth=0.6)
        ax.axhline(0, color=FAINT, linewidth=0.6)
        for name, text, color in (("auc", "AUC", BLUE), ("selectivity", "selectivity (accuracy)", ORANGE)):
            values = (table[f"{name}{end}"].to_numpy(dtype=float) for end in ("", "_low", "_high"))
            st.draw_line(ax, layers, *values, color=color, marker="o", markersize=2.6, label=text)
        if table["control_auc"].notna().any():
            ax.plot(layers, table["control_auc"], color=FAINT, linestyle=st.DASHED, label="AUC of control tasks")
        ax.set_ylim(min(-0.1, float(table["selectivity_low"].min(skipna=True) or 0) - 0.02), 1.03)
        for y, text in ((0.5, "chance AUC"), (0.0, "no selectivity")):
            at = ("axes fraction", "data")
            ax.annotate(text, (1.02, y), xycoords=at, fontsize="small", va="center")
        st.whole_numbers(ax.xaxis)
        ax.set_xlim(layers.min() - 0.5, layers.max() + 0.5)  # no tick beyond the last layer
        ax.set(xlabel=f"Layer ({st.BANDS_ARE})", ylabel="AUC; selectivity")
        st.legend_above(ax, 2, st.model_title(fit.run, f"probes of {fit.site} (n = {int(table['rows'].iloc[0]):,})"))
    return ax
