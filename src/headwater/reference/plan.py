"""The plan of a full reproduction: a command per model, its data, the size of its weights.

`plan.json` has for each analysis the options of its commands (by benchmark, if there are several), its data, the
commands that draw the published figures from its runs, and what it cannot measure, or not as published, which explains
differences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from headwater.calls import checked_call
from headwater.options import checked_path
from headwater.reference.published import published_numbers

RUNS = "runs"
ONE_GPU = 70
"""GiB that weights may take on a GPU of 80 GB."""
PLAN: dict[str, Any] = json.loads((files("headwater.reference") / "plan.json").read_text(encoding="utf-8"))
FLAGS = {"ablation": " --ablations", "multi_token": " --multi-token"}
"""By published number of a relation: the flag with which a command measures it."""


@dataclass(frozen=True)
class PlanLine:
    """The command that measures the published numbers of one model again."""

    analysis: str
    """"maps", "pathways", "memorization" or "membership"."""
    model: str
    command: str
    data: tuple[str, ...]
    """The files and folders that the command names, described in `plan.json`."""
    weights: float
    """GiB, in the dtype of the command: float32 for head maps and membership, otherwise bfloat16."""
    folder: str
    """Folder of the command's run, below `runs`."""
    published: int
    """Number of published numbers."""


@checked_call
def reproduction_plan(runs: str | Path = RUNS) -> tuple[PlanLine, ...]:
    """Return the commands that measure every published number again, a line per analysis, model and benchmark.

    Args:
        runs: the folder into which the commands write.
    """
    folder_of_runs, lines = checked_path("runs", runs), list[PlanLine]()
    for kind, plan in PLAN.items():
        for model, numbers in published_numbers(kind).models.items():
            relations = numbers.get("relations", {}).values()
            flags = "".join(flag for part, flag in FLAGS.items() if any(part in one for one in relations))
            for benchmark, options in plan["commands"].items():
                measured = numbers.get(benchmark) if benchmark else numbers
                if measured is None:
                    continue
                folder = folder_of_runs / "-".join(filter(None, (kind, model.rpartition("/")[2], benchmark)))
                weights = numbers["billions"] * 1e9 * (2 if "bfloat16" in options else 4) / 2**30
                spread = " --device auto" if weights > ONE_GPU else ""
                command = f"headwater reproduce {kind} {model} {options}{flags}{spread} --out {folder}"
                data = tuple(word for word in options.split() if word in plan["data"])
                lines.append(PlanLine(kind, model, command, data, weights, str(folder), _count(measured)))
    return tuple(lines)


def figure_commands(kind: str, runs: str | Path = RUNS) -> list[str]:
    """Return the commands that draw the published figures of an analysis from its finished runs."""
    return [f"headwater figure {one.replace('RUNS', str(Path(runs)))}" for one in PLAN[kind]["figures"]]


def _count(numbers: object) -> int:
    """Count the published numbers of a model, without its shape; a ranking of heads counts once."""
    if isinstance(numbers, Mapping):
        return sum(_count(value) for name, value in numbers.items() if name not in ("billions", "layers", "heads"))
    return 1
