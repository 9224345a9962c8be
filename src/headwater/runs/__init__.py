"""Runs: the record of each computation, its identity, and the folder that keeps it."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.runs.analysis import Run as Run
    from headwater.runs.analysis import run_or_resume as run_or_resume
    from headwater.runs.folder import RunFolder as RunFolder
    from headwater.runs.record import RunRecord as RunRecord
    from headwater.runs.result import DRAWINGS as DRAWINGS
    from headwater.runs.result import VIEWS as VIEWS
    from headwater.runs.result import Claim as Claim
    from headwater.runs.result import Result as Result

__getattr__, __dir__, __all__ = lazy_exports(__name__)
