"""What chance does to numbers: resampling by unit, discrimination, correlation, significance, peaks."""

from headwater.rooms import opened

__getattr__, __dir__, __all__ = opened(__name__)
