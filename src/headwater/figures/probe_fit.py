"""What probes read by layer: AUC with its interval, the control task's AUC, and selectivity on an axis of its own."""

from __future__ import annotations

from matplotlib.axes import Axes

from headwater.colors import BLUE, FAINT, ORANGE
from headwater.figures.style import BANDS_ARE, DASHED, legend_above, model_title, new_figure, style, whole_numbers
from headwater.probes.selectivity import ProbeFit
from headwater.runs.result import DRAWINGS


@DRAWINGS.add(ProbeFit)
def plot_probe_fit(fit: ProbeFit, ax: Axes | None = None) -> Axes:
    """Draw AUC, the control task's AUC, and selectivity by layer.

    Args:
        fit: what `hw.fit_probe` gave.
        ax: where to draw; default: a new figure.
    """
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
