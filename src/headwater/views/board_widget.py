"""The live patch board: a widget whose clicks the kernel answers. A thin layer: pages draw, `views.clicks` computes.

The page is in a frame of its own, which can reach nothing of the notebook. A few lines of script hand its messages
to the kernel, and the answers back:

    {"id": 7, "how": "denoise", "nodes": [{"site": "z", "layer": 1, "head": 2}]}   what was clicked -> what it did
    {"id": 8, "known": "zero"}                                                     the grids of another kind of change
    {"undo": true}                                                                 no answer

An error is answered as one line of text.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from headwater.errors import HeadwaterError, InputError
from headwater.options import checked_name
from headwater.views.board_page import board_page, known, stored
from headwater.views.clicks import HOWS, Clicks, Patched
from headwater.views.interactive import asset


def has_widgets() -> bool:
    """Whether what widgets need is installed."""
    return importlib.util.find_spec("anywidget") is not None


def widget_of(clicks: Clicks) -> Any:
    """Return a widget that shows a board and answers its clicks."""
    if not has_widgets():
        raise InputError('A live board needs anywidget: pip install "headwater[live]". Without it: click(), view().')
    import anywidget
    import traitlets

    held = {
        "_esm": asset("board_live.js"),
        "page": traitlets.Unicode().tag(sync=True),
        "height": traitlets.Int().tag(sync=True),
    }
    shown = board_page(clicks, [clicks.how], live=True)
    # The class is made here, since anywidget need not be installed.
    widget = type("BoardWidget", (anywidget.AnyWidget,), held)(page=shown.page, height=shown.height)
    widget.on_msg(lambda _, message, buffers: _send(widget, clicks, message))
    return widget


def _send(widget: Any, clicks: Clicks, message: object) -> None:
    reply = answer(clicks, message)
    if reply is not None:
        widget.send(reply)


def answer(clicks: Clicks, message: object) -> dict[str, Any] | None:
    """Return the answer to a message of the page, as JSON values; None where it wants none."""
    asked = message if isinstance(message, Mapping) else {}
    named = {"id": asked.get("id")}
    try:
        if asked.get("undo"):
            clicks.undo()
            return None
        if "known" in asked:
            how = checked_name("how", asked["known"], tuple(HOWS))
            return named | {"kind": "known", "how": how, "known": stored(clicks, known(clicks, how, live=True))}
        return named | {"kind": "patched", **as_json(clicks.change(asked.get("nodes"), asked.get("how")))}
    except HeadwaterError as error:
        return named | {"kind": "error", "text": str(error)}


def as_json(patched: Patched) -> dict[str, Any]:
    """Return what a click did as JSON values; NaN is None."""
    parts = patched.parts[["head", "position", "key", "effect"]].astype(object)
    return {
        "nodes": [node.described() for node in patched.nodes],
        "how": patched.how,
        "before": patched.before,
        "after": patched.after,
        "goal": patched.goal,
        "seconds": patched.seconds,
        "code": patched.code,
        "top": patched.top[["token", "before", "after"]].values.tolist(),
        "layers": patched.layers["after"].tolist(),
        "parts": parts.where(parts.notna(), None).to_dict("records"),
    }
