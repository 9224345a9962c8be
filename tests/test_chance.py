"""What the tests draw at random repeats."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import chance

UNSEEDED = re.compile(r"default_rng\(\)|\bRandom\(\)|torch\.seed\(\)|SystemRandom|\bsecrets\b|urandom")


def draw():
    return torch.randn(2).tolist(), chance.rng().normal(), np.random.rand(), random.random()  # noqa: NPY002


@pytest.fixture(scope="module")
def shared():
    return draw()


def test_a_name_gives_one_chance_and_another_name_another():
    chance.begin("a")
    first = draw()
    chance.begin("b")
    other = draw()
    chance.begin("a")
    assert draw() == first
    assert all(x != y for x, y in zip(first, other, strict=True))


def test_what_a_test_draws_does_not_depend_on_what_is_made_beside_it(request):
    chance.begin("a")
    expected = draw()
    chance.begin("a")
    with chance.apart("beside"):
        made = draw()
    request.getfixturevalue("shared")
    assert draw() == expected
    with chance.apart("beside"):
        assert draw() == made


def test_another_seed_of_the_run_draws_something_else(monkeypatch):
    at_this = chance.seed_of("model")
    monkeypatch.setattr(chance, "seed", chance.seed + 1)
    assert chance.seed_of("model") != at_this


def test_no_test_draws_from_a_generator_that_nobody_seeded():
    files = [file for file in Path(__file__).parent.glob("*.py") if file != Path(__file__)]
    assert not [file.name for file in files if UNSEEDED.search(file.read_text())]
