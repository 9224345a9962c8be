"""A shape that an annotation does not allow is an error in the tests: in kernels, or with all modules wrapped."""

import importlib
import inspect

import jaxtyping
import pytest
import torch

from headwater.kernels.attention import saliency_reference
from tests.typed import EVERYWHERE, modules_with_shapes, wrapped


def is_wrapped(function) -> bool:
    plain = function.__wrapped__ if hasattr(function, "is_checked") else function
    return "jaxtyping" in plain.__code__.co_filename


def test_tensors_whose_axes_do_not_fit_together_are_refused():
    pattern = torch.rand(2, 3, 4, 4)
    saliency_reference(pattern, pattern)
    with pytest.raises(jaxtyping.TypeCheckError, match="gradient"):
        saliency_reference(pattern, torch.rand(2, 3, 4, 5))
    with pytest.raises(jaxtyping.TypeCheckError, match="pattern"):
        saliency_reference(pattern.int(), pattern)


def test_every_module_that_is_to_be_wrapped_is_and_no_other():
    names = modules_with_shapes()
    assert {"headwater.kernels.ov", "headwater.models.cache", "headwater.axes"} <= set(names)
    assert "headwater.kernels.ov" in wrapped()
    assert (wrapped() == names) == EVERYWHERE
    for name in [*names, "headwater.registry"]:
        module = importlib.import_module(name)
        own = [one for one in vars(module).values() if inspect.isfunction(one) and one.__module__ == name]
        assert not own or any(is_wrapped(one) for one in own) == (name in wrapped()), name
