"""The published figures: their names for things, and measured numbers beside published ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import headwater.figures.style as st
from headwater.colors import FAINT, INK, places_of_sets
from headwater.errors import InputError
from headwater.reference.published import Reproduction
from headwater.runs.result import DRAWINGS

# Names of models and question sets in the published figures, and the style in which a figure is drawn.
#
# `style="headwater"` (default) has intervals, counts and accurate labels. `style="published"` has the panels, series,
# words and axes of the papers, for side-by-side comparison; the numbers are the same.


StyleName: TypeAlias = Literal["headwater", "published"]
SET_NAMES = {"popqa": "PopQA", "triviaqa": "TriviaQA", "hotpotqa": "HotpotQA", "nq": "NQ", "nq_open": "NQ"}
"""Literature names by the name of a question set in lower case, without "-" and spaces."""
MODEL_NAMES = {
    "gpt2-xl": "GPT-2 XL",
    "phi-2": "Phi-2",
    "pythia-6.9b": "Pythia 6.9B",
    "pythia-12b": "Pythia 12B",
    "llama-3.1-8b": "Llama-3.1 8B",
    "llama-3.1-70b": "Llama-3.1 70B",
    "llama-3-8b": "Llama-3-8B",
    "llama-3-70b": "Llama-3-70B",
    "llama-2-7b-chat-hf": "LLaMA 2 7B Chat",
    "llama-2-13b-chat-hf": "LLaMA 2 13B Chat",
    "llama-2-70b-chat-hf": "LLaMA 2 70B Chat",
    "llama-3-8b-instruct": "LLaMA-3 8B Instruct",
    "llama-3-70b-instruct": "LLaMA-3 70B Instruct",
}
"""Names above the papers' panels, by the last part of a model's hub name in lower case, without "meta-"."""


def set_name(name: str) -> str:
    """Return the literature name of a question set; for unknown sets, their own name."""
    return SET_NAMES.get(name.lower().replace("-", "_").replace(" ", "_"), st.label(name))


def set_names(names: Iterable[str]) -> dict[str, str]:
    """Return the literature name of each question set of a figure; if two share one, with their own names added."""
    published = {name: set_name(name) for name in names}
    shared = [one for one, times in Counter(published.values()).items() if times > 1]
    return {name: f"{one}, {st.label(name)}" if one in shared else one for name, one in published.items()}


def in_order(names: Iterable[str]) -> list[str]:
    """Return question sets in the order of the papers, which is also the order of their colours."""
    places = places_of_sets(names)
    return sorted(places, key=places.__getitem__)


def model_name(shown: str) -> str:
    """Return the papers' panel title for a published model; for other models, the name unchanged."""
    return MODEL_NAMES.get(shown.lower().removeprefix("meta-"), shown)


def with_letter(number: int, name: str) -> str:
    """Return the title of a panel as papers count them: (a), (b), ..., (z), (aa), ..."""
    repeated, letter = divmod(number, 26)
    return f"({chr(ord('a') + letter) * (repeated + 1)}) {name}"


# Measured against published numbers, a panel per quantity; on the diagonal they are equal.

COLUMNS = 3


@DRAWINGS.add(Reproduction)
def plot_reproduction(reproduction: Reproduction, ax: Axes | None = None) -> Axes | Figure:
    """Draw every number that was both published and measured."""
    table = reproduction.table.dropna(subset=["difference"])
    if table.empty:
        raise InputError(f"Nothing to draw: no number of {reproduction.run.model} was both published and measured.")
    panels = list(table.groupby("quantity", sort=False))
    columns = min(COLUMNS, len(panels))
    size = 2.3 * columns, 2.4 * -(-len(panels) // COLUMNS)
    title = st.model_title(reproduction.run, "measured and published")
    with st.several_panels(ax, size, len(panels), columns, title) as axes:
        for panel, (quantity, rows) in zip(axes, panels, strict=True):
            numbers = rows[["published", "measured"]].to_numpy()
            low, high = float(np.min(numbers)), float(np.max(numbers))
            room = 0.06 * (high - low or abs(high) or 1.0)
            limits = (low - room, high + room)
            panel.plot(limits, limits, color=FAINT, linewidth=0.8)
            panel.plot(rows["published"], rows["measured"], "o", color=INK, markersize=3.5, markerfacecolor="none")
            panel.set(xlim=limits, ylim=limits, xlabel="published", ylabel="measured", aspect="equal")
            name = ",\n".join(st.label(part) for part in str(quantity).split(", "))
            panel.set_title(f"{title}\n" * (len(panels) == 1) + f"{name} (n = {len(rows):,})", fontsize=8)
    return st.plot_of(axes)
