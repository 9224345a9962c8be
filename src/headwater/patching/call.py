"""What every call of a sweep checks first, and what its record says of prompts, roles and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headwater.models.hooked import check_model
from headwater.models.positions import Prompt
from headwater.models.tokens import said_of_chats
from headwater.options import checked_count
from headwater.patching.plan import Plan
from headwater.patching.prompts import Spot


def check_call(model: object, batch_size: object) -> int | None:
    """Return the batch size; refuse one that is no number of rows, and what is no model of `hw.load`.

    Raises:
        InputError: one of these.
    """
    check_model(model)
    return None if batch_size is None else checked_count("batch_size", batch_size)


def prompt_options(*sets: Sequence[Prompt] | None) -> dict[str, object]:
    """Name the prompts of a run by their token ids, and say where they were chats."""
    ids = [[list(prompt.ids) for prompt in prompts] if prompts is not None else None for prompts in sets]
    return {"prompts": ids, **said_of_chats(prompt.text for prompts in sets for prompt in prompts or ())}


def engine_option(engine: str) -> dict[str, str]:
    """Name the engine where one was chosen; nothing is named of the default."""
    return {} if engine == "auto" else {"engine": engine}


def recorded_roles(spots: Sequence[Mapping[str, Spot]]) -> list[dict[str, list[list[int]]]]:
    """Write down by example and role the positions in both prompts."""
    return [{role: [list(spot.base), list(spot.other)] for role, spot in one.items()} for one in spots]


def metric_options(plan: Plan) -> list[dict[str, Any]]:
    """Describe the metrics of a sweep: what each computes with, and the positions and token ids that it came to."""
    return [
        {
            "name": metric.name,
            "function": metric.function,
            "site": metric.site,
            "layer": metric.layer,
            "against_clean": metric.against_clean,
            "at": [kept[number] for kept in plan.kept[:: plan.draws]],
            "answers": [ids[:: plan.draws].tolist() for ids in plan.answers[number]],
        }
        for number, metric in enumerate(plan.metrics)
    ]
