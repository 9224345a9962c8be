"""What probes read by layer: AUC with its interval, the control task's AUC, and selectivity.

Also the AUC of probes for wrong answers by token and layer, a map per question set; the best pair is framed.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from headwater.colors import BLUE, FAINT, INK, ORANGE
from headwater.figures.style import (
    BANDS_ARE,
    DASHED,
    entitle,
    label,
    legend_above,
    model_title,
    new_figure,
    style,
    whole_numbers,
)
from headwater.pathways.token_map import ProbeMap
from headwater.probes.selectivity import ProbeFit
from headwater.runs.result import DRAWINGS

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
def plot_probe_map(found: ProbeMap, ax: Axes | None = None) -> Axes | Figure:
    """Draw a row per token and a column per layer; darker is a higher AUC, from 0.5 to 1.

    A panel for each question set; on a given `ax`, the first one's.
    """
    sets = found.datasets
    with style(ax):
        if ax is not None:
            _panel(found, sets[0], ax)
            ax.set_title(model_title(found.run, f"wrong answers detected by probes, {label(sets[0])}"))
            return ax
        tokens = found.table["token"].nunique()
        across = min(2, len(sets))
        rows = -(-len(sets) // across)
        size = (2.6 * across + 1.6, (0.2 * tokens + 0.7) * rows + 0.5)
        figure = new_figure(*size)
        axes = figure.subplots(rows, across, squeeze=False, sharey=True).ravel().tolist()
        for panel, name in zip(axes, sets, strict=False):
            image = _panel(found, name, panel)
            answers = found.table.loc[found.table["dataset"] == name, "answers"].iloc[0]
            panel.set_title(f"{label(name)} (n = {answers:,})")
        for spare in axes[len(sets) :]:
            spare.set_axis_off()
        figure.colorbar(image, ax=axes, label="AUC")
        entitle(figure, model_title(found.run, f"wrong answers detected by probes of {found.run.options['site']}"))
    return figure


def _panel(found: ProbeMap, name: str, ax: Axes):  # type: ignore[no-untyped-def]
    wide = found.table[found.table["dataset"] == name].pivot(index="token", columns="layer", values="auc")
    tokens = [token for token in TOKEN_NAMES if token in wide.index]
    values = wide.loc[tokens].to_numpy(dtype=float)
    image = ax.imshow(values, cmap="Blues", vmin=0.5, vmax=1.0, aspect="auto", interpolation="none")
    row, column = divmod(int(values.argmax()), values.shape[1])
    ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=1.0))
    ax.set_yticks(range(len(tokens)), [TOKEN_NAMES[token] for token in tokens])
    ax.set_xlabel("Layer")
    whole_numbers(ax.xaxis)
    return image


@DRAWINGS.add(ProbeFit)
def plot_probe_fit(fit: ProbeFit, ax: Axes | None = None) -> Axes:
    """Draw AUC, the control task's AUC, and selectivity by layer."""
    table = fit.table.sort_values("layer")
    layers = table["layer"].to_numpy(dtype=float)
    with style(ax):
        ax = ax or new_figure(3.6, 2.5).add_subplot()
        ax.axhline(0.5, color=FAINT, linewidth=0.6)
        ax.axhline(0, color=FAINT, linewidth=0.6)
        for name, text, color in (("auc", "AUC", BLUE), ("selectivity", "selectivity (accuracy)", ORANGE)):
            value = table[name].to_numpy(dtype=float)
            low, high = (table[f"{name}_{end}"].to_numpy(dtype=float) for end in ("low", "high"))
            ax.fill_between(layers, low, high, color=color, alpha=0.18, linewidth=0)
            ax.plot(layers, value, color=color, marker="o", markersize=2.6, label=text)
        if table["control_auc"].notna().any():
            ax.plot(layers, table["control_auc"], color=FAINT, linestyle=DASHED, label="AUC of control tasks")
        ax.set_ylim(min(-0.1, float(table["selectivity_low"].min(skipna=True) or 0) - 0.02), 1.03)
        whole_numbers(ax.xaxis)
        ax.set(xlabel=f"Layer ({BANDS_ARE})", ylabel="AUC, or difference of accuracies")
        legend_above(ax, 2, model_title(fit.run, f"probes of {fit.site} (n = {int(table['rows'].iloc[0]):,})"))
    return ax
