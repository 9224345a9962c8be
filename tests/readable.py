"""Whether all text of a figure can be read: none is cut, none overlaps another."""

from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text

COLUMN, PAGE = (3.25, 2.2), (7.0, 4.0)
"""Inches, of a figure in one column of a paper and across its page."""


def drawn(plot):
    """The figure of what was drawn, and all its axes, those of bars too."""
    figure = plot if isinstance(plot, Figure) else plot.figure
    figure.canvas.draw()
    return figure


def in_view(axis):
    low, high = sorted(axis.get_view_interval())
    return [one for one in axis.get_major_ticks() if low - 1e-9 <= one.get_loc() <= high + 1e-9]


def apart(first, second):
    """How far apart two labels of ticks are that are turned alike, in pixels: of lines of type, across them."""
    one, other = first.get_window_extent(), second.get_window_extent()
    turned = np.deg2rad(first.get_rotation() % 180)
    if turned % (np.pi / 2) < 1e-6:
        return max(max(one.x0, other.x0) - min(one.x1, other.x1), max(one.y0, other.y0) - min(one.y1, other.y1))
    (x0, _), (x1, _) = (text.get_transform().transform(text.get_position()) for text in (first, second))
    return abs(x1 - x0) * np.sin(turned) - first.get_fontsize() * first.figure.dpi / 72


def written(figure, axes):
    """All text that is seen: without the labels of ticks out of view, and of axes that are off."""
    hidden = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            shown = in_view(axis) if ax.axison and ax in axes else []
            beyond = [one for one in axis.get_major_ticks() + axis.get_minor_ticks() if one not in shown]
            hidden |= {id(label) for tick in beyond for label in (tick.label1, tick.label2)}
            hidden |= set() if ax.axison and ax in axes else {id(axis.label), id(axis.offsetText)}
    texts = [one for one in figure.findobj(Text) if id(one) not in hidden and one.get_visible() and one.get_text()]
    return [one for one in texts if one.get_window_extent().width]


def assert_all_is_readable(figure, axes=None):
    """No text overlaps another or lies outside the figure; of some axes alone, where the others are not ours."""
    axes = figure.axes if axes is None else axes
    for axis in (axis for ax in axes if ax.axison for axis in (ax.xaxis, ax.yaxis)):
        labels = [label for tick in in_view(axis) for label in (tick.label1, tick.label2) if label.get_visible()]
        for one, other in pairwise([label for label in labels if label.get_text()]):
            assert apart(one, other) > -1, (one, other)
    texts = written(figure, axes)
    boxes = np.array([text.get_window_extent().extents for text in texts])
    outside = (boxes[:, :2] < -1).any(1) | (boxes[:, 2:] > [figure.bbox.x1 + 1, figure.bbox.y1 + 1]).any(1)
    assert not outside.any(), texts[outside.argmax()]
    # The box around a text that is turned is larger than the text: it is compared above, with its neighbour.
    level = [number for number, text in enumerate(texts) if text.get_rotation() % 90 == 0]
    low, high = boxes[level, None, :2], boxes[level, None, 2:]
    common = (np.minimum(high, high.swapaxes(0, 1)) - np.maximum(low, low.swapaxes(0, 1))).min(-1)
    np.fill_diagonal(common, 0)
    first, second = np.unravel_index(common.argmax(), common.shape)
    assert common.max() < 1, (texts[level[first]], texts[level[second]])
