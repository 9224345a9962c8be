"""The classical tasks as paired prompts, ready for patching: `task("indirect_object")`.

The words come from `task_words.json`, written by the training beside its model: what a held-out prompt is made of, no
text of the corpus said in that task.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.models.positions import Characters, characters
from headwater.options import checked_count, checked_flag, checked_name, checked_path, checked_seed
from headwater.patching.metrics import Metric, logit_difference
from headwater.world.tasks import TASKS, TWO_DIGITS, Line, Words, read_words

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel

MOST_REPEATED = 500
"""So many draws in a row that were there already: the task has no more."""


@dataclass(frozen=True)
class PairedTask:
    """Pairs of prompts of one task; `len` says how many."""

    name: str
    about: str
    clean: tuple[str, ...]
    corrupted: tuple[str, ...]
    correct: tuple[str, ...]
    """What follows each clean prompt; of several words that may, one."""
    wrong: tuple[str, ...]
    """What follows each corrupted prompt, and not the clean one."""
    roles: Mapping[str, list[tuple[Characters, Characters]]]
    """Where what the task turns on occurs in each pair, and "end": what `positions=` of a sweep takes."""
    held_out: bool

    def __len__(self) -> int:
        return len(self.clean)

    @property
    def table(self) -> pd.DataFrame:
        """A row for each pair: clean, corrupted, correct, wrong."""
        return pd.DataFrame({name: getattr(self, name) for name in ("clean", "corrupted", "correct", "wrong")})

    def metric(self, model: HookedModel) -> Metric:
        """Return the task's metric: the logit of the right word minus that of the wrong one.

        Of years it is the probability of all later years minus that of the others (Hanna et al. 2023).
        """
        if self.name != "greater_than":
            return logit_difference(self.correct, self.wrong)
        if model.tokenizer is None:
            raise InputError("The task's answers are words, and the model has no tokenizer: load it with one.")
        vocabulary = model.tokenizer.get_vocab()
        missing = [year for year in TWO_DIGITS if year not in vocabulary]
        if missing:
            raise InputError(
                f"The metric of 'greater_than' adds up the {len(TWO_DIGITS)} endings of years, and {len(missing)} of "
                f"them, as {missing[0]!r}, are not one token of this model. Give a metric of your own."
            )
        # After the century, so without a space.
        ids = torch.tensor([vocabulary[year] for year in TWO_DIGITS])

        def year_difference(
            logits: Float[Tensor, "row kept d_vocab"], start: Int[Tensor, " row"]
        ) -> Float[Tensor, " row"]:
            years = logits[:, -1].softmax(-1)[:, ids.to(logits.device)]
            place = (start[:, None].cpu() == ids[None]).int().argmax(1).to(logits.device)
            later = torch.arange(len(ids), device=logits.device)[None] > place[:, None]
            return (years * later).sum(1) - (years * ~later).sum(1)

        starts = [int(ids[int(line.split(" to ")[0][-2:])]) for line in self.clean]
        return Metric("year_difference", year_difference, answers=(starts,))


@checked_call
def task(
    name: object,
    examples: object = 64,
    *,
    held_out: bool = True,
    seed: object = 0,
    world: str | Path | Words | None = None,
) -> PairedTask:
    """Draw pairs of prompts of a task.

    Args:
        name: "indirect_object", "greater_than", "induction", "successor", "gendered_pronoun", "agreement" or "capital".
        examples: how many pairs.
        held_out: made of words with which the corpus never told the task (of capitals, there are none such).
        seed: for the draws.
        world: the folder of another trained world, or the words of its tasks; None for the embedded model's.

    Raises:
        InputError: there is no such task, it has fewer prompts, or the folder is of no world.
    """
    name = checked_name("task", name, tuple(TASKS))
    checked_flag("held_out", held_out)
    count = checked_count("examples", examples)
    rng = np.random.default_rng([checked_seed(seed), list(TASKS).index(name), held_out])
    words = world if isinstance(world, Words) else read_words(None if world is None else checked_path("world", world))
    lines = list(_distinct(rng, name, words, count, held_out))
    roles = {role: [_places(line, role) for line in lines] for role in lines[0].roles}
    return PairedTask(
        name,
        TASKS[name].about,
        tuple(line.clean for line in lines),
        tuple(line.corrupted for line in lines),
        tuple(line.correct[0] for line in lines),
        tuple(next(word for word in line.wrong if word not in line.correct) for line in lines),
        roles | {"end": [(_last(line.clean), _last(line.corrupted)) for line in lines]},
        held_out,
    )


def _distinct(rng: np.random.Generator, name: str, words: Words, count: int, held_out: bool) -> Iterator[Line]:
    prompts: set[str] = set()
    repeated = 0
    while len(prompts) < count:
        line = TASKS[name].line(rng, words, held_out)
        repeated = repeated + 1 if line.clean in prompts else 0
        if not repeated:
            prompts.add(line.clean)
            yield line
        elif repeated > MOST_REPEATED:
            raise InputError(
                f"The task {name!r} has fewer than {count:,} different prompts; ask for at most {len(prompts):,}."
            )


def _places(line: Line, role: str) -> tuple[Characters, Characters]:
    (clean, corrupted), which = line.roles[role], line.occurrence.get(role, 0)
    return _found(line.clean, clean, which), _found(line.corrupted, corrupted, which)


def _found(text: str, word: str, which: int) -> Characters:
    places = [match.span() for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text)]
    start, stop = places[which] if places else (text.index(word), text.index(word) + len(word))
    return characters(start, stop)


def _last(text: str) -> Characters:
    return characters(len(text) - 1, len(text))
