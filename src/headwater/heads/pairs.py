"""Heads as callers name them: pairs (layer, head), or rows of a table that has these columns."""

from __future__ import annotations

from typing import Any

import pandas as pd

from headwater.errors import InputError
from headwater.options import checked_several, shown, whole_numbers

WANTED = "(layer, head) pairs"


def head_pairs(heads: Any) -> list[tuple[int, int]]:
    """Return heads as pairs, in the order given, each once.

    Raises:
        InputError: they are neither pairs of whole numbers nor a table with the columns `layer` and `head`.
    """
    if isinstance(heads, pd.DataFrame):
        if missing := [name for name in ("layer", "head") if name not in heads.columns]:
            raise InputError(f"heads= has no column {missing[0]!r}: give rows with layer and head, or pairs of them.")
        heads = list(heads[["layer", "head"]].itertuples(index=False, name=None))
    pairs = [_pair(one) for one in checked_several("heads", heads, WANTED)]
    return list(dict.fromkeys(pairs))


def _pair(one: Any) -> tuple[int, int]:
    try:
        layer, head = whole_numbers(one)
    except (TypeError, ValueError):
        raise InputError(f"heads= holds {shown(one)}; it takes {WANTED}, such as [(0, 3), (5, 1)].") from None
    return layer, head
