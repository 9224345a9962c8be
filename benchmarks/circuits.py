"""Suite `circuits`: many circuits of a pair at once, beside plain forwards and another program's runs.

Question: what does it cost to run a circuit alone, where the next one is as good as free?

The circuits are halves of all edges, each drawn by lot, so that every node is in use and none can be left out. Beside
them stands one plain forward of the clean prompt: the time per circuit must be less. TransformerLens's `faithfulness`
runs one circuit, and again without each class of readers; its edges are those of single positions: it is given the same
edges at every position. Its circuit is of the strongest edges, and it must find them as faithful as headwater does.
Model and prompts are those of the suite `edges`. The floor of a circuit is a plain forward from the first token on at
which the prompts differ: every node is in use, and reads something of its own.

`quick` measures a model of few small layers: whether it runs and agrees, not how fast it is.
"""

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from transformer_lens.tools.analysis.attribution_patching import faithfulness

import headwater as hw
from benchmarks.edge_task import LENGTH, METRIC, QUICK, Task, measured, model_with_gradients, nodes, parts
from benchmarks.machine import Machine, Work, seconds
from benchmarks.models import Chosen, block_weights, chosen_model, titled
from benchmarks.report import Row
from headwater.circuits.circuit import circuit_from_edges

BATCHES = (8, 32)
STRONGEST = 26
"""One edge of so many is in the circuit that the peer runs: 1,250 of GPT-2's, 20,000 of its edges at single positions.
"""
POSITION_SPECIFIC = "the peer's edges are those of single positions: it is given each edge at every position"


def run(machine: Machine, device: str, model: Chosen = None, rounds: int = 3) -> Iterator[Row]:
    """Yield a row per number of circuits, and, of random weights, one of the peer's, which takes no grouped heads."""
    task = Task.of(chosen_model(model, device), 6, device)
    plain = _plain_forward(task, rounds)
    for n_circuits in BATCHES:
        yield batched_row(machine, task, titled(model), n_circuits, plain, rounds)
    if not isinstance(model, str):
        yield faithfulness_row(machine, task, rounds)


def quick(machine: Machine, device: str) -> Iterator[Row]:
    """Yield the same rows of a model of three small layers."""
    yield from run(machine, device, model_with_gradients(device, **QUICK), rounds=1)


def least_of_one(task: Task) -> Work:
    """What one circuit takes at least: two operations per weight that a token meets, the last layer's for what is read.

    Of the last layer that is keys and values alone, but for one token; logits are left out. No weight is read anew.
    """
    shape, tokens = task.model.shape, LENGTH - task.start
    block = block_weights(task.model) // shape.n_layers
    keys_values = 2 * shape.n_kv_heads * shape.d_head * shape.d_model
    weights = (shape.n_layers - 1) * block * tokens + keys_values * (tokens - 1) + block
    return Work(2 * weights, 0.0, done=1, unit="circuits")


def least_of_nodes(task: Task, circuit: hw.Circuit) -> Work:
    """The same of a circuit that leaves nodes out: a head has 4 d_model d_head weights, an MLP 8 d_model²."""
    shape, tokens, last = task.model.shape, LENGTH - task.start, task.model.shape.n_layers - 1
    weights = 0.0
    for writer in {name.split(" -> ")[0] for name in circuit.names} - {"embed"}:
        kind, layer, _ = parts(writer)
        read = tokens if layer != last else 1
        weights += 8 * read if kind == "mlp" else (2 * tokens + 2 * read) / shape.n_heads
    return Work(2 * shape.d_model**2 * weights, 0.0, done=1, unit="circuits")


def batched_row(machine: Machine, task: Task, title: str, n_circuits: int, plain: float, rounds: int) -> Row:
    """Some circuits at once: the time of each beside that of one plain forward."""
    some = halves(task, n_circuits)
    agrees = _alone_and_whole_agree(task, some)
    a_call = median(seconds(lambda: together(task, some), task.device) for _ in range(rounds))
    few = median(seconds(lambda: together(task, some[:1]), task.device) for _ in range(rounds))
    return Row(
        name=f"circuits: {n_circuits} at once, the time of one, {title}",
        peer="one plain forward of the clean prompt",
        floor_s=machine.floor_of(least_of_one(task)),
        work=least_of_one(task),
        peer_s=plain,
        headwater_s=a_call / n_circuits,
        agrees=agrees,
        peak_bytes=None,
        target="1 / 0.6 = >= 1.67 x: at most 0.6 of a plain forward's time",
        note=f"half of all edges each; whole calls of hw.run_circuits: that of a single circuit takes {few:.3f} s",
    )


def faithfulness_row(machine: Machine, task: Task, rounds: int) -> Row:
    """A circuit of the strongest edges, one of 32 at once, beside the peer's run of it."""
    circuit = task.edges(method="sublayer").circuit(task.graph.n_edges // STRONGEST)
    found: list[Any] = []
    kept = [edge for name in circuit.names for edge in nodes(name, task.model.shape)]
    peer_s = seconds(lambda: found.append(faithfulness(task.model.raw, *task.tokens, measured, kept)), task.device)
    some = [circuit, *circuit.placebos(max(BATCHES) - 1)]
    ours = together(task, some).table["faithfulness"].iloc[0]
    a_call = median(seconds(lambda: together(task, some), task.device) for _ in range(rounds))
    work = least_of_nodes(task, circuit)
    return Row(
        name=f"circuits: the {len(circuit):,} strongest edges, one of {len(some)} at once",
        peer=f"transformer_lens faithfulness, {len(kept):,} of its edges at single positions",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=peer_s,
        headwater_s=a_call / len(some),
        agrees=bool(abs(found[0].recovered - ours) < 1e-3 * max(1.0, abs(ours))),
        peak_bytes=None,
        target=">= 500 x",
        note=f"{POSITION_SPECIFIC}; its time holds a run without each class of readers, which it always makes",
    )


def halves(task: Task, n_circuits: int) -> list[hw.Circuit]:
    """Return circuits of half of all edges, each drawn by lot."""
    graph, generator = task.graph, torch.Generator().manual_seed(0)
    drawn = (torch.randperm(graph.n_edges, generator=generator) for _ in range(n_circuits))
    return [circuit_from_edges(graph, order[: graph.n_edges // 2].tolist()) for order in drawn]


def together(task: Task, some: list[hw.Circuit]) -> hw.CircuitRuns:
    """Run circuits alone."""
    return hw.run_circuits(task.model, [task.clean], [task.corrupted], some, metric=METRIC, progress=False)


def _alone_and_whole_agree(task: Task, some: list[hw.Circuit]) -> bool:
    """Whether circuits are at once what they are one by one, and the circuit of all edges is a plain run."""
    at_once = together(task, [*some, ~circuit_from_edges(task.graph, [])]).table["value"].to_numpy()
    alone = [together(task, [one]).table["value"].iloc[0] for one in some[:2]]
    plain = float(measured(task.model.raw(task.tokens[0])))
    pairs = [*zip(at_once[:2], alone, strict=True), (at_once[-1], plain)]
    return all(abs(a - b) < 1e-4 * max(1.0, abs(b)) for a, b in pairs)


def _plain_forward(task: Task, rounds: int) -> float:
    forward = lambda: task.model.raw(task.tokens[0])  # noqa: E731
    forward()
    return median(seconds(forward, task.device) for _ in range(5 * rounds))
