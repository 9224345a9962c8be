"""Readers of rows and texts, each error with its file, row and field."""

from typing import TYPE_CHECKING

from headwater.rooms import opened

if TYPE_CHECKING:
    from headwater.data.rows import read_rows as read_rows

__getattr__, __dir__, __all__ = opened(__name__)
