"""A result with several metrics, of which a figure shows one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.runs.figure_options import Size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headwater.runs.result import Result as Surface
else:
    Surface = object


class ByMetric(Surface):
    """What such a result adds to `Result`: it is drawn one metric at a time."""

    def plot(
        self,
        ax: Axes | None = None,
        *,
        metric: str | None = None,
        title: str | None = None,
        figsize: Size | None = None,
    ) -> Axes | Figure:
        """Draw one metric; what is drawn is described where it is drawn (`headwater.figures`).

        Args:
            ax: where to draw.
            title: in place of the figure's own.
            figsize: of a new figure, width and height in inches.
            metric: which; default: the first.

        Raises:
            InputError: there is no such metric.
        """
        return self._drawn(ax, title, figsize, metric=metric)
