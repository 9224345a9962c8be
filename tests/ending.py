"""Answers of random models: these never end a text by themselves, and an answer that has not ended is left out."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from headwater.models.generation import generate_tokens
from headwater.questions import asking


@contextmanager
def every_answer_ends() -> Iterator[None]:
    """Let what a model has written at the token limit be a whole answer."""

    def ended(*args: Any, **options: Any) -> Any:
        made = generate_tokens(*args, **options)
        return dataclasses.replace(made, stopped=torch.ones_like(made.stopped))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "generate_tokens", ended)
        yield
