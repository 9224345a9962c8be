"""Edges, paths and circuits shared by several processes are those of one process, and each computes only its part.

The processes are threads here, with a model each; `tests/test_shards.py` has real ones, which take longer.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import NumericsError
from headwater.runs import folder
from headwater.runs.folder import Processes
from tests.tiny import tiny_model, tiny_tokenizer

CLEAN = [[5, 7, 11, 13, 17], [5, 3, 11, 14, 2], [9, 8, 7, 6, 4]]
CORRUPTED = [[5, 7, 12, 13, 18], [5, 4, 10, 14, 2], [9, 3, 7, 6, 2]]
OPTIONS = {"metric": hw.logit_difference(5, 9), "progress": False}
HERE = threading.local()


@dataclass(frozen=True)
class Simulated(Processes):
    """One of several processes that are threads: they meet at a barrier and lay down what each brings."""

    barrier: threading.Barrier | None = None
    brought: tuple[list, ...] = ()

    def together(self, step, value):
        """See `Processes.together`."""
        self.brought[self.index].append((step, value))
        self.barrier.wait(60)
        all_of_them = [mine[-1] for mine in self.brought]
        assert len({name for name, _ in all_of_them}) == 1
        self.barrier.wait(60)
        return [one for _, one in all_of_them]


def loaded() -> hw.HookedModel:
    return hw.load(tiny_model("llama"), tokenizer=tiny_tokenizer())


def several(analysis: Callable[[hw.HookedModel], object], count: int, monkeypatch) -> tuple[list, list[list[str]]]:
    """Run an analysis in several processes; return what each gives, and the pieces that each computed."""
    barrier, brought, made = threading.Barrier(count), tuple([] for _ in range(count)), [[] for _ in range(count)]
    plain = folder.RunFolder._made

    def noted(self, name, compute):
        made[HERE.process.index].append(name)
        return plain(self, name, compute)

    def one(index: int) -> object:
        HERE.process = Simulated(index, count, barrier, brought)
        return analysis(models[index])

    models = [loaded() for _ in range(count)]
    monkeypatch.setattr(folder.RunFolder, "_made", noted)
    monkeypatch.setattr(folder, "processes", lambda: HERE.process)
    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(one, range(count)))
    return found, made


def edges(model: hw.HookedModel, out: Path | None = None, **options) -> hw.EdgeEffects:
    ends = {"senders": ["embed", "head 0", "mlp"], "receivers": ["q 1.1", "k 0", "v 1", "mlp", "logits"]}
    return hw.edges(model, CLEAN, CORRUPTED, out=out, **ends, **OPTIONS, **options)


def paths(model: hw.HookedModel, out: Path | None = None) -> hw.PathEffects:
    ends = {"senders": ["embed", "head 0"], "receivers": ["q 1.1", "mlp 1", "logits"]}
    return hw.path_patch(model, CLEAN, CORRUPTED, out=out, through="mlps", **ends, **OPTIONS)


def circuits(model: hw.HookedModel, out: Path | None = None) -> hw.CircuitRuns:
    chosen = hw.Circuit.of(["embed -> mlp 0", "mlp 0 -> logits", "embed -> v 1", "head 1 -> logits"], model)
    return hw.run_circuits(model, CLEAN, CORRUPTED, {"one": chosen, "rest": ~chosen}, out=out, placebos=3, **OPTIONS)


@pytest.mark.parametrize(
    ("analysis", "count"),
    [
        (edges, 2),
        (edges, 3),
        (partial(edges, method="screened", verify=20), 2),
        (partial(edges, method="eap"), 2),
        (paths, 3),
        (circuits, 2),
    ],
    ids=["exact", "exact by three", "screened", "EAP", "paths by three", "circuits"],
)
def test_several_processes_give_the_table_of_one_and_each_does_its_part(analysis, count, tmp_path, monkeypatch):
    expected = analysis(loaded()).table
    found, made = several(partial(analysis, out=tmp_path / "shared"), count, monkeypatch)
    for one in found:
        pd.testing.assert_frame_equal(one.table, expected)
    pieces = [name for mine in made for name in mine]
    assert len(pieces) == len(set(pieces))
    assert max(map(len, made)) - min(map(len, made)) <= 1
    if analysis is edges:  # a pair and a layer of receivers is a piece
        n_layers = loaded().shape.n_layers
        assert sum(name.startswith("layer-") for name in pieces) == len(CLEAN) * (n_layers + 1)


def test_a_layer_of_many_edges_is_several_pieces(tmp_path, monkeypatch):
    expected = edges(loaded())
    monkeypatch.setattr("headwater.circuits.edge_effects.MOST_EDGES", 3)
    (found,), (made,) = several(partial(edges, out=tmp_path / "parts"), 1, monkeypatch)
    torch.testing.assert_close(found.effects, expected.effects)
    of_layers = np.bincount(found.graph.stage[found.chosen.numpy()])
    assert sum(name.startswith("layer-") for name in made) == len(CLEAN) * (-(-of_layers // 3)).sum()


@pytest.mark.parametrize("through", ["direct", "mlps"])
def test_a_path_whose_run_gives_nan_is_named(through, monkeypatch):
    from headwater.circuits.path_patching import Paths

    plain = Paths._last

    def broken(self, sets, receivers, made):
        last = plain(self, sets, receivers, made)
        name = self.graph.receivers.name(int(receivers[0]))
        if name == "mlp 1" and self.runs.example == 1:
            last[-1] = torch.nan  # of the last set of senders that leads there
        return last

    monkeypatch.setattr(Paths, "_last", broken)
    ends = {"senders": [["embed", "head 0.1"], "head 0.2"], "receivers": ["q 1.1", "mlp 1"]}
    with pytest.raises(NumericsError, match=r"example 1 with the path head 0\.2 -> mlp 1 changed gives NaN") as raised:
        hw.path_patch(loaded(), CLEAN, CORRUPTED, through=through, **ends, **OPTIONS)
    assert "\n" not in str(raised.value)
