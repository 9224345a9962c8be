"""The role of each position in a table, where positions were named by role (`models.positions`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from headwater.models.positions import Prompt, Where, roles_of


def with_roles(table: pd.DataFrame, where: Where, prompts: Sequence[Prompt]) -> pd.DataFrame:
    """Return a table of examples and positions with a column `role`; as it is where positions have other names.

    A position of several roles has all of them, joined by a comma.
    """
    if not isinstance(where, Mapping):
        return table
    named: dict[tuple[int, int], list[str]] = {}
    for example, prompt in enumerate(prompts):
        for role, places in roles_of(where, prompt, example, len(prompts), None).items():
            for place in places:
                named.setdefault((example, place), []).append(role)
    rows = zip(table["example"], table["position"], strict=True)
    return table.assign(role=[", ".join(named[int(example), int(place)]) for example, place in rows])
