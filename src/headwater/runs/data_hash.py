"""The hash of plain data: parts put together, the numbers of a tensor, the cells of a table."""

from __future__ import annotations

import hashlib
import json

import pandas as pd
import torch
from torch import Tensor

from headwater.errors import InputError


class UnknownIdentityError(InputError):
    """A value whose identity cannot be had; `places` is the way to it, innermost first."""

    def __init__(self, what: str):
        super().__init__(what)
        self.what, self.places = what, list[str]()

    def __str__(self) -> str:
        way = " of ".join(self.places[-3:])
        return f"{way} is {self.what}" if way else self.what


def hashed(kind: str, *parts: bytes | memoryview) -> bytes:
    """Hash parts, each with its length."""
    whole = hashlib.sha256(kind.encode())
    for part in parts:
        # With lengths, or the parts "ab", "c" and "a", "bc" would have one hash.
        whole.update(b"%d:" % len(part))
        whole.update(part)
    return whole.digest()


def hash_of_tensor(tensor: Tensor) -> bytes:
    """Hash the numbers of a tensor, with its dtype and shape."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        raise UnknownIdentityError(f"a tensor without plain numbers ({tensor.layout}, {tensor.device})")
    # As bytes: numpy has no bfloat16. Conjugates and negatives may be mere flags of a view.
    numbers = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashed("tensor", f"{tensor.dtype} {tuple(tensor.shape)}".encode(), numbers.data)


def hash_of_frame(frame: pd.DataFrame) -> bytes:
    """Hash a table by its cells, the same before it is written as parquet and after it is read back."""
    parts = [json.dumps([list(map(str, frame.columns)), len(frame)]).encode()]
    for place in range(frame.shape[1]):
        # By place, as two columns may have one name; as objects, as parquet gives back other dtypes.
        cells = frame.iloc[:, place].astype(object)
        parts.append(json.dumps(cells.where(cells.notna(), None).tolist(), default=_cell).encode())
    parts.append(json.dumps(frame.index.tolist(), default=_cell).encode())
    return hashed("frame", *parts)


def _cell(cell: object) -> object:
    """What JSON writes of a cell that it does not know."""
    if isinstance(cell, set | frozenset):
        return sorted(map(str, cell))
    return cell.tolist() if hasattr(cell, "tolist") else str(cell)
