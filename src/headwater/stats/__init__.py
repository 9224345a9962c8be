"""What chance does to numbers: resampling by unit, discrimination, correlation, significance, one peak or several."""

from headwater.rooms import opened

__getattr__, __dir__ = opened(__name__)
