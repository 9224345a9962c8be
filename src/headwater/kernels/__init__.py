"""Typed einops kernels: tensors in, tensors out. No model, no file, no pandas."""
