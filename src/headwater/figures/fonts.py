"""Text of any script in a figure: the fonts that this machine has for it, and a mark for what none of them holds.

Matplotlib's own font has no Chinese, Korean, Thai or Hindi. It would draw boxes and warn once a character, each time.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache

from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font

OTHERS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei", "Droid Sans Fallback", "Microsoft YaHei", "Malgun Gothic", "PingFang SC", "Hiragino Sans GB",
    "Apple SD Gothic Neo", "Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Thai", "Noto Sans Devanagari",
    "Noto Sans Bengali", "Nirmala UI", "Noto Emoji", "Segoe UI Symbol", "Symbola", "Arial Unicode MS",
)  # fmt: skip
"""Fonts looked for where the usual one has no glyph, in this order."""
UNKNOWN = "▯"
LONGEST = 40
"""Characters of a name that a tick shows."""


@cache
def others() -> tuple[str, ...]:
    """Return which of the further fonts are installed."""
    installed = {font.name for font in fontManager.ttflist}
    return tuple(name for name in OTHERS if name in installed)


def label(text: str) -> str:
    """Return a text of the data as a title, tick or legend shows it: in one line, nothing in it read as mathematics."""
    return drawable(" ".join(text.split())).replace("$", r"\$")


def ticks(names: Iterable[str], most: int = LONGEST) -> list[str]:
    """Return names of the data as tick labels, each of `most` characters at most.

    A longer name keeps its beginning and ends in "…". Names that would then read alike lose their middle instead, so
    that what tells them apart at their ends can be read.
    """
    listed = [" ".join(name.split()) for name in names]
    shortened = [name if len(name) <= most else f"{name[: most - 1].rstrip()}…" for name in listed]
    alike = {name for name, times in Counter(shortened).items() if times > 1}
    end = (most - 1) // 2
    told_apart = [f"{name[: most - 1 - end].rstrip()}…{name[-end:].lstrip()}" for name in listed]
    return [
        label(longer if short in alike and short != name else short)
        for name, short, longer in zip(listed, shortened, told_apart, strict=True)
    ]


def drawable(text: str, family: str = "sans-serif") -> str:
    """Return a text with a mark for each character that no font here has; joiners without a glyph are left out."""
    if text.isascii() and text.isprintable():
        return text
    fonts = [get_font(findfont(FontProperties(family=[name]))) for name in (family, *others())]  # type: ignore[arg-type]
    return "".join(
        c if c == "\n" or any(font.get_char_index(ord(c)) for font in fonts) else "" if _is_joined(c) else UNKNOWN
        for c in text
    )


def columns(text: str) -> int:
    """Return how many columns of a monospaced line a text takes: Chinese characters two, combining marks none."""
    return sum(0 if _is_joined(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _is_joined(character: str) -> bool:
    """Whether a character changes its neighbour instead of standing for itself."""
    return unicodedata.category(character) in ("Mn", "Me", "Cf")
