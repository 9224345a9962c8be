"""What the published figures call things: names of question sets, series, axes; and which style a figure is drawn in.

`style="headwater"` (default) has intervals, counts and honest labels. `style="published"` has the panels, series, words
and axes of the papers, so that the two can be laid side by side; numbers are the same.
"""

from __future__ import annotations

from headwater.figures.fonts import label
from headwater.options import checked_name

STYLES = ("headwater", "published")
SET_NAMES = {"popqa": "PopQA", "triviaqa": "TriviaQA", "hotpotqa": "HotpotQA", "nq": "NQ", "nq_open": "NQ"}
"""By the name of a question set, without its case, "-" and spaces: what the literature calls it."""


def is_published(style: str) -> bool:
    """Whether the published style is asked for.

    Raises:
        InputError: there is no such style.
    """
    return checked_name("style", style, STYLES) == "published"


def set_name(name: str) -> str:
    """Return what the literature calls a question set; of others, their own name."""
    return SET_NAMES.get(name.lower().replace("-", "_").replace(" ", "_"), label(name))


def lettered(number: int, name: str) -> str:
    """Return the title of a panel as papers count them: (a), (b), ..., (z), (aa), ..."""
    repeated, letter = divmod(number, 26)
    return f"({chr(ord('a') + letter) * (repeated + 1)}) {name}"
