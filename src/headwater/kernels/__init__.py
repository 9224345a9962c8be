"""Typed einops kernels: tensors in, tensors out.

No model, no file, no pandas.
"""

from headwater.rooms import opened

__getattr__, __dir__, __all__ = opened(__name__)
