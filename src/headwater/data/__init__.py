"""Readers of rows and texts, each error with its file, row and field."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.data.rows import read_rows as read_rows

__getattr__, __dir__, __all__ = lazy_exports(__name__)
