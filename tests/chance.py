"""Chance in the tests: every draw follows from one seed, so that a failure repeats.

`make test` has the seed 0, `make test-fresh` draws a new one and prints it, `pytest --seed N` repeats a run.

1. Before each test the generators of torch, numpy and Python are seeded with the seed and the test's name, so a test
   draws the same whatever ran before it, and in whichever process.
2. A fixture that several tests share is seeded with its own name, and leaves the generators as it found them.
3. What a test makes once and keeps for others takes `seed_of("what", "it", "is")`.
"""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch

seed = 0
"""The seed of this run of the tests; set from `--seed`."""


def seed_of(*names: object) -> int:
    """A seed below 2**31 for something of a name, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr((seed, *names)).encode()).digest()[:4]) >> 1


def rng() -> np.random.Generator:
    """A numpy generator that continues the test's own chance."""
    return np.random.default_rng(int(torch.randint(1 << 31, ())))


def begin(*names: object) -> None:
    """Seed the generators of torch, numpy and Python."""
    number = seed_of(*names)
    torch.manual_seed(number)
    np.random.seed(number)  # noqa: NPY002 - what a library draws from numpy's own generator repeats, too
    random.seed(number)


@contextlib.contextmanager
def apart(*names: object) -> Iterator[None]:
    """Seed the generators for a while and leave them as they were."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    begin(*names)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])
