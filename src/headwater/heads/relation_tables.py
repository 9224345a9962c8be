"""A relation that is given as a table: a row per pair, with columns source and target, and maybe category.

The targets of a source that has several rows are all accepted. A relation is of one category, the same in every row.
"""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import pandas as pd

from headwater.data.rows import refuse_repeated
from headwater.errors import InputError
from headwater.options import shown
from headwater.runs.findings import records_of

NumberedRows: TypeAlias = Iterable[tuple[int, Mapping[str, object]]]
"""Rows, each with the number that a person would look for."""


def rows_of(table: pd.DataFrame) -> NumberedRows:
    """Return the rows of a data frame, counted from 1.

    Raises:
        InputError: a column occurs twice.
    """
    refuse_repeated("The data frame", table.columns)
    return enumerate(records_of(table), start=1)


def category_and_pairs(rows: NumberedRows, where: str) -> tuple[str | None, tuple[tuple[str, tuple[str, ...]], ...]]:
    """Return the category of a table, None if it names none, and its pairs: each source with its accepted targets.

    Args:
        rows: the rows.
        where: the table, for messages.

    Raises:
        InputError: a row has no source or no target, the rows are of several categories, or there are none.
    """
    accepted: dict[str, dict[str, None]] = {}
    categories: dict[str | None, None] = {}
    for number, row in rows:
        source, target = (_word(row, field, f"{where}, row {number}") for field in ("source", "target"))
        accepted.setdefault(source, {})[target] = None
        category = row.get("category")
        categories[None if category is None else str(category)] = None
    if not accepted:
        raise InputError(f"{where} holds no pairs: a relation has columns source and target, with a row per pair.")
    if len(categories) > 1:
        named = ", ".join(map(str, categories))
        raise InputError(f"{where} has several categories ({named}): a relation is of one. Make a relation of each.")
    return next(iter(categories)), tuple((source, tuple(targets)) for source, targets in accepted.items())


def _word(row: Mapping[str, object], field: str, where: str) -> str:
    word = row.get(field)
    if not isinstance(word, str) or not word.strip():
        raise InputError(
            f"{where}: its {field} is {shown(word)}; a relation has columns source and target, with a word in each row."
        )
    return word.strip()
