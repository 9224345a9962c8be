"""A run made of pieces, for several processes that share it."""

import dataclasses
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pandas as pd

from headwater.runs.folder import RunFolder, processes
from headwater.runs.record import RunRecord
from headwater.runs.result import Result


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Numbers(Result):
    """A result made of pieces, for the processes below."""

    table: pd.DataFrame
    run: RunRecord


def record(**changes) -> RunRecord:
    plain = {
        "analysis": "numbers",
        "model": "m",
        "fingerprint": "abc",
        "dtype": "float32",
        "device": "cpu",
        "options": {},
    }
    return RunRecord(**plain | changes)


def count_up(
    out: Path,
    log: Path,
    pieces: int = 7,
    pause: float = 0.0,
    kill: tuple[int, int] | None = None,
    first: int = 0,
) -> Numbers:
    """Compute `pieces` pieces, from the seed `first` on; process `kill[0]` kills itself before its piece `kill[1]`."""
    import torch

    here = processes().index

    def piece(number: int) -> dict:
        if kill == (here, number):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(pause)
        with log.open("a") as lines:
            lines.write(f"{here} {number}\n")
        return {"value": torch.randn(5, generator=torch.Generator().manual_seed(first + number))}

    folder = RunFolder(out, record())
    if folder.finished:
        return Numbers.load(out)
    made = folder.pieces((f"piece-{i}", lambda i=i: piece(i)) for i in range(pieces))
    table = pd.DataFrame({"value": np.concatenate([one["value"].numpy() for one in made])})
    result = Numbers(table, folder.run)
    folder.finish(result)
    return result


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder; of a record, whose date differs, what must agree."""
    return {str(file.relative_to(folder)): _content(file) for file in folder.rglob("*") if file.is_file()}


def _content(file: Path) -> bytes:
    if file.name != "run.json":
        return file.read_bytes()
    run = json.loads(file.read_text())
    run["run"].pop("created")
    run.pop("sha256")
    return json.dumps(run).encode()
