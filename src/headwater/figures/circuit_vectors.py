"""Singular vectors of a head: the share of each of the first ones beside random factors, and the tokens along them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from matplotlib.axes import Axes

from headwater.colors import BLUE, FAINT, INK
from headwater.figures.style import columns, inches, model_title, new_figure, others, style
from headwater.figures.sweep import shown
from headwater.heads.circuit_vectors import CIRCUITS, SIGNS, SingularVectors
from headwater.runs.result import DRAWINGS

TOKENS = 4
"""Listed of each side and sign, where there is room."""
SIZE = 6
"""Of their type, in points."""


@DRAWINGS.add(SingularVectors)
def plot_singular_vectors(result: SingularVectors, ax: Axes | None = None) -> Axes:
    """Draw the vectors that have tokens as bars, with their tokens written beside them."""
    table = result.table
    vectors = table["vector"].unique().tolist()
    values = result.values.set_index("vector").loc[vectors]
    first = table.iloc[0]
    with style(ax):
        if ax is None:
            ax = new_figure(7.2, 0.9 + 0.42 * len(vectors)).add_subplot()
        ax.barh(vectors, values["share"], height=0.55, color=BLUE, label="share of the circuit")
        ax.plot(values["random_share"], vectors, "|", color=INK, markersize=9, label="of random factors")
        # Beside the bars: two thirds of the width, in letters of their size.
        room = 72 * 0.64 * inches(ax)[0] / (0.55 * SIZE)
        widest = float(max(values["share"].max(), values["random_share"].max()))
        for vector in vectors:
            for sign, offset in zip(SIGNS, (-0.19, 0.19), strict=True):
                part = table[(table["vector"] == vector) & (table["sign"] == sign)]
                sides = [part.loc[part["side"] == side, "token"] for side in CIRCUITS[str(first["circuit"])]]
                lines = (_line(sign, sides, n) for n in range(TOKENS, 0, -1))
                line = next((line for line in lines if columns(line) <= room), _line(sign, sides, 1))
                ax.text(
                    widest * 1.06, vector + offset, line, size=SIZE, va="center", in_layout=False,
                    family=["sans-serif", *others()], color=INK if sign == "+" else FAINT,
                )  # fmt: skip
        ax.set_yticks(vectors, [str(vector) for vector in vectors])
        ax.set_ylim(max(vectors) + 0.6, 0.4)
        ax.set_xlim(0, widest * 3.2)
        ticks = [tick for tick in ax.get_xticks() if 0 <= tick <= widest * 1.01]
        ax.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
        ax.set(ylabel="Singular vector")
        ax.set_xlabel("Share of the circuit (bar; tick: random factors)", loc="left")
        circuit = f"what {str(first['circuit']).upper()} of layer {first['layer']}, head {first['head']} does to tokens"
        ax.set_title(model_title(result.run, circuit))
    return ax


def _line(sign: str, sides: Iterable[Iterable[str]], n: int) -> str:
    """The first tokens of both sides."""
    first = (" ".join(map(shown, islice(side, n))) for side in sides)
    return f"{sign.replace('-', '−')}  {'  →  '.join(first)}"
