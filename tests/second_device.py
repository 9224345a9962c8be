"""More devices made of the first: tensors that say they are on "card:0" or "card:1" and compute on the CPU.

Inside `second_device()` a tensor sent to it really is another kind of tensor: an operation on tensors of both kinds is
an error, as it is with a GPU (indices and single numbers apart), and so is reading it into numpy. What an analysis must
move, and to where, is tested so without a GPU; what it does on CUDA devices alone is not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

CPU = torch.device("cpu")
MOVES = {"_to_copy", "to", "copy_", "copy"}
INDEXES = {"index", "index_put_", "index_put", "_index_put_impl_"}
"""Take indices from the CPU on a GPU too."""


class Elsewhere(torch.Tensor):
    """A tensor of the second device; `here` is what it holds."""

    @staticmethod
    def __new__(cls, here, device):
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                here.size(),
                strides=here.stride(),
                storage_offset=here.storage_offset(),
                dtype=here.dtype,
                device=device,
                requires_grad=False,
            )
        made.here = here
        return made

    def __repr__(self):
        return f"Elsewhere({self.here!r})"

    def tolist(self):
        return self.here.tolist()

    def untyped_storage(self):
        return self.here.untyped_storage()

    def numpy(self, *, force=False):
        raise TypeError("can't convert card:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, dtype=None):
        raise TypeError("can't convert card:0 device type tensor to numpy. Use Tensor.cpu() first.")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


class _SecondDevice(TorchDispatchMode):
    """Makes what is created on the device, which no operand shows."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    """Run an operation on what its operands hold, and put the result where a GPU would."""
    name = func.overloadpacket.__name__
    if name in ("is_pinned", "_pin_memory", "pin_memory"):
        return False if name == "is_pinned" else args[0]
    if name == "_has_compatible_shallow_copy_type":
        return False  # as across any two devices: a module that is moved gets new parameters
    operands = tree_flatten((args, kwargs))[0]
    tensors = [value for value in operands if isinstance(value, torch.Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, Elsewhere)]
    asked = next((value for value in operands if isinstance(value, torch.device)), None)
    if there and name not in MOVES:
        if name in INDEXES and isinstance(args[0], Elsewhere):
            tensors = [*there, *(value for value in args[2:] if isinstance(value, torch.Tensor))]
        met = {str(tensor.device) for tensor in tensors if tensor.ndim > 0}
        if len(met) > 1:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {' and '.join(met)}")
    held = {id(tensor.here): tensor for tensor in there}
    args, kwargs = tree_map(_held, (args, kwargs))
    if kwargs.pop("pin_memory", None):
        kwargs["pin_memory"] = False
    if name == "mm" and "dtype" in func._overloadname:
        found = args[0].float() @ args[1].float()
    else:
        found = func(*args, **kwargs)
    if name == "copy_":
        goes = held[id(args[0])].device if id(args[0]) in held else CPU
    else:
        goes = asked or max((t.device for t in there), key=lambda d: d.index, default=CPU)
    goes = card(goes.index or 0) if goes.type == "card" else goes

    def place(value):
        if not isinstance(value, torch.Tensor) or goes.type == "cpu":
            return value
        before = held.get(id(value))
        return before if before is not None and before.device == goes else Elsewhere(value, goes)

    return tree_map(place, found)


def _held(value):
    if isinstance(value, torch.device):
        return CPU
    return value.here if isinstance(value, Elsewhere) else value


@contextmanager
def _tensors_made_here_first() -> Iterator[None]:
    """`torch.tensor(..., device="card")` makes a tensor on the CPU and moves it."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def card(index: int = 0) -> torch.device:
    """One of the devices."""
    _make_known()
    return torch.device("card", index)


@cache
def _make_known() -> None:
    _setup_privateuseone_for_python_backend("card")


@contextmanager
def second_device() -> Iterator[torch.device]:
    """Yield the first of the devices."""
    device = card()
    with _SecondDevice(), _tensors_made_here_first():
        yield device


def move(model):
    """Send a HookedModel's weights to the second device, in place."""
    _move(model.raw, card())
    return model


def split(model, first):
    """Send a HookedModel's layers from `first` on, and what follows them, to one device, and all before to another.

    As with a device_map, what enters a module comes to the module's device first.
    """
    _move(model.raw, card())
    for module in (*model.raw.blocks[first:], model.raw.ln_final, model.raw.unembed):
        _move(module, card(1))
    for module in model.raw.modules():
        if module is not model.raw and (own := next(module.parameters(), None)) is not None:
            move_inputs = partial(_sent, device=own.device)
            if len({parameter.device for parameter in module.parameters()}) == 1:
                module.register_forward_pre_hook(lambda _, *given, to=move_inputs: to(given), with_kwargs=True)
    return model


def _sent(given, device):
    return tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) and v.device != device else v, given)


def _move(root, device):
    for module in root.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.device != device:
                module._parameters[name] = torch.nn.Parameter(parameter.detach().to(device), requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
