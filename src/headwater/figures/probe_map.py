"""AUC of probes for wrong answers by token and layer, a map per question set; the best pair is framed."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from headwater.colors import INK
from headwater.figures.style import entitle, label, model_title, new_figure, style, whole_numbers
from headwater.pathways.token_map import ProbeMap
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

    Args:
        found: what `probe_map` gave.
        ax: where to draw the first question set; default: a new figure with a panel for each.
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
