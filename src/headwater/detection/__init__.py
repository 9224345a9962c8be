"""Detectors of wrong answers, fitted on half of each question set and measured on the other."""

from typing import TYPE_CHECKING

from headwater.rooms import lazy_exports

if TYPE_CHECKING:
    from headwater.detection.detection import Detection as Detection
    from headwater.detection.detection import detect as detect
    from headwater.detection.methods import Detector as Detector
    from headwater.detection.reweighting import Reweighting as Reweighting

__getattr__, __dir__, __all__ = lazy_exports(__name__)
