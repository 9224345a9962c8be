"""Typed einops kernels: tensors in, tensors out.

No model, no file, no pandas.
"""

from headwater.rooms import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
