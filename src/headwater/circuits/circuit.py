"""A circuit: a set of edges of a model's graph, with set operations, and random circuits of the same shape.

A random circuit (a placebo) has as many edges as the circuit itself between each kind of sender in each layer and each
kind of receiver in each layer, drawn from all edges there. In a small model there are few such edges, so a placebo
shares many with the circuit: `overlap` measures this. Unmatched random edges would be too easy to beat, because hardly
any of them lie on a path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headwater.calls import checked_calls
from headwater.circuits.graph import Graph, on_a_path
from headwater.errors import InputError, RunFolderError, first_line
from headwater.models.hooked import HookedModel
from headwater.options import (
    checked_count,
    checked_kind,
    checked_path,
    checked_repeats,
    checked_several,
    shown,
)
from headwater.patching.edits import Indices
from headwater.registry import Registry
from headwater.runs.identity import digest
from headwater.runs.result import Claim, Shown, View, table_html
from headwater.runs.storage import SEAL, make_folder, write_atomically

if TYPE_CHECKING:
    from headwater.patching.metrics import Measures


METADATA = b"headwater circuit"
CLAIMS: Registry[str, Callable[..., Claim]] = Registry("claim", "headwater.circuits.circuit_runs")
"""Functions that judge a circuit."""
Prompts = tuple[tuple[int, ...], ...]


@checked_calls
@dataclass(frozen=True, eq=False, repr=False)
class Circuit(Shown):
    """A set of edges of a graph, with the operations `|`, `&`, `-`, `~`, `==`, `name in circuit`, `len(circuit)`."""

    returned_by = "edges.circuit(...) or hw.Circuit.of(...)"

    graph: Graph
    edges: Indices
    """The indices of its edges in the graph, ascending."""
    effects: NDArray[np.float64]
    """The signed effect by which each edge was chosen; NaN if unknown."""
    seen: Prompts = ()
    """The (clean) prompts on which the circuit was chosen, as token ids; empty if unknown."""
    model: str = ""
    """Name of the model it was found in; empty if unknown. Circuits with the same edges are equal regardless of it."""

    @classmethod
    def of(cls, edges: Any, model: HookedModel | Graph) -> Circuit:
        """Return the circuit of the edges with the given names.

        Args:
            edges: names such as "head 9.9 -> q 10.7" or "embed -> logits", with nodes by any name of
                `headwater.models.part_names`, as "9.9 -> 10.7.q"; "head 9 -> mlp" names all edges from any head of
                layer 9 to any MLP. An empty list is the empty circuit; its complement, `~`, has all edges.
            model: the model, or its graph.
        """
        graph = graph_of(model)
        if isinstance(edges, str):
            edges = [edges]
        names = checked_several("edges", edges, 'a list of names such as "head 9.9 -> q 10.7"')
        found = chain.from_iterable(graph.edges_named(name).tolist() for name in names)
        return circuit_from_edges(graph, found, model=model_name(model))

    @property
    def names(self) -> list[str]:
        """The names of its edges."""
        return self.graph.names(self.edges)

    @property
    def table(self) -> pd.DataFrame:  # type: ignore[override]
        """A row per edge: `edge, sender, sender_layer, sender_head, receiver, receiver_layer, receiver_head, effect`.

        Numbers that do not apply are `<NA>`; an unknown effect is NaN.
        """
        return pd.DataFrame({"edge": self.names} | self.graph.columns(self.edges) | {"effect": self.effects})

    @cached_property
    def on_a_path(self) -> Circuit:
        """The circuit of those edges that lie on a path of its edges from the embedding to the logits."""
        return self._kept(on_a_path(self.graph, self.edges))

    def overlap(self, other: Circuit) -> float:
        """Return the fraction of this circuit's edges that another circuit also has; 1 if this circuit is empty."""
        return float(np.isin(self.edges, self._same(other).edges).mean()) if len(self.edges) else 1.0

    def placebos(self, n: int = 30, seed: int = 0) -> list[Circuit]:
        """Draw n random circuits of the same shape: the same number of edges in each stratum.

        A stratum is a kind and layer of sender with a kind and layer of receiver. No placebo equals the circuit itself,
        unless no other is possible. `circuit.overlap(placebo)` returns the overlap.
        """
        n, generator = checked_repeats("n", n), np.random.default_rng(seed)
        strata, counts = np.unique(self.graph.stratum[self.edges], return_counts=True)
        pools = [(np.flatnonzero(self.graph.stratum == s), int(k)) for s, k in zip(strata, counts, strict=True)]
        # If a circuit fills all its strata, no other circuit has its shape, and the placebo is the circuit itself.
        spare = any(len(pool) > count for pool, count in pools)
        drawn: list[Circuit] = []
        while len(drawn) < n:
            parts = [generator.choice(pool, count, replace=False) for pool, count in pools]
            one = circuit_from_edges(self.graph, chain.from_iterable(parts), model=self.model)
            # At least every second draw is another circuit, so this ends; all others are equally likely.
            if one != self or not spare:
                drawn.append(one)
        return drawn

    def save(self, path: str | Path) -> Path:
        """Write the edges into one parquet file, with the graph and the prompts on which they were chosen."""
        file, graph = checked_path("path", path), self.graph
        about = {"graph": graph.sizes, "seen": self.seen, "model": self.model, SEAL: self._hash()}
        table = pa.Table.from_pandas(self.table, preserve_index=False)
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), METADATA: json.dumps(about).encode()})
        make_folder(file.parent)
        write_atomically(file, lambda temporary: pq.write_table(table, temporary))
        return file

    @classmethod
    def load(cls, path: str | Path) -> Circuit:
        """Read a circuit that `save` wrote."""
        file = checked_path("path", path)
        try:
            table = pq.read_table(file)
            about = json.loads(table.schema.metadata[METADATA])
            graph = Graph.of_sizes(about["graph"])
            edges = [graph.edge_named(name) for name in table["edge"].to_pylist()]
            seen = tuple(tuple(int(i) for i in ids) for ids in about["seen"])
            loaded = circuit_from_edges(graph, edges, table["effect"].to_numpy(), seen, str(about["model"]))
            if about[SEAL] != loaded._hash():
                raise ValueError("it was changed since it was written")
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError, InputError) as error:
            reason = first_line(error)[:200]
            if not file.exists():
                reason = "there is no such file"
            elif file.is_dir():
                reason = "it is a folder: if it holds a result, use the load of the result's class"
            raise RunFolderError(f"{file} holds no circuit that Circuit.save wrote ({reason}).") from None
        return loaded

    def claim(
        self,
        model: HookedModel,
        clean: object,
        corrupted: object = None,
        *,
        metric: Measures,
        other: object = "mean",
        placebos: int = 100,
        margin: float | Any = None,
        seed: int = 0,
        batch_size: int | None = None,
        progress: bool = True,
    ) -> Claim:
        """Judge whether the circuit alone has an effect, on prompts that were not used to choose it.

        Args:
            model: the model.
            clean: the held-out prompts, or a table of pairs. Prompts on which the circuit was chosen do not count
                as held out, and the claim reports this.
            corrupted: the other prompt of each pair.
            metric: one metric; see `hw.run_circuits`.
            other: a second ablation: what the edges outside the circuit carry in a second run, `mean`, `zero` or
                `resample` over the clean prompts; None for no second run.
            placebos: number of random circuits of the same shape.
            margin: smallest effect that matters, in units of the metric; default: the 95 % quantile of the sizes of the
                random circuits' effects.
            seed: seed of the random circuits, the bootstrap and the halves.
            batch_size: number of circuits per batch.

        Returns:
            A `Claim`, as `Sweep.claim` returns it. The effect is the metric of the circuit alone minus the metric of
            the empty circuit.
        """
        run = {"metric": metric, "placebos": placebos, "seed": seed, "batch_size": batch_size, "progress": progress}
        judged = {"margin": margin, "seed": seed}
        return CLAIMS["alone"](self, model, clean, corrupted, other=other, run=run, claim=judged)

    def strongest(self, n: int) -> Circuit:
        """Return the circuit of the n edges with the largest absolute effects; edges without an effect come last."""
        most = strength_order(self.effects)[: checked_count("n", n, most=len(self))]
        return self._kept(np.isin(np.arange(len(self)), most))

    def view(self, **what: Any) -> View:
        """Return the circuit as an interactive page: layers upward, with a slider for the strongest edges.

        Args:
            what: `n`, the largest number of edges of the slider (at most 200 by default); `edges`, a result of
                `hw.edges`, for the interval and placebo of each effect, and `metric`, which of its metrics; `runs`, a
                result of `hw.run_circuits`, for the faithfulness of `circuit.strongest(n)` alone, at several sizes.
        """
        return super().view(**what)

    def __or__(self, other: Circuit) -> Circuit:
        return self._joined(other, np.union1d)

    def __and__(self, other: Circuit) -> Circuit:
        return self._joined(other, np.intersect1d)

    def __sub__(self, other: Circuit) -> Circuit:
        return self._joined(other, np.setdiff1d)

    def __invert__(self) -> Circuit:
        rest = np.setdiff1d(np.arange(self.graph.n_edges), self.edges, assume_unique=True)
        return circuit_from_edges(self.graph, rest, seen=self.seen, model=self.model)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.graph.edge_named(name) in self.edges

    def __len__(self) -> int:
        return len(self.edges)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Circuit):
            return NotImplemented
        return self.graph == other.graph and np.array_equal(self.edges, other.edges)

    def __hash__(self) -> int:
        return hash((self.graph, self.edges.tobytes()))

    def __repr__(self) -> str:
        return f"Circuit({len(self):,} of {self.graph.n_edges:,} edges, {len(self.on_a_path):,} on a path)"

    def _repr_html_(self) -> str:
        return table_html(self, self.table.iloc[strength_order(self.effects)])

    def _hash(self) -> str:
        return digest([str(self.graph), self.seen, self.model, self.table])

    def _kept(self, which: NDArray[np.bool_]) -> Circuit:
        return replace(self, edges=self.edges[which], effects=self.effects[which])

    def _same(self, other: object) -> Circuit:
        """Return the other circuit; refuse anything that is not a circuit of this graph."""
        circuit = checked_kind("circuit", other, Circuit)
        self.graph.refuse_other("The other circuit", circuit.graph)
        return circuit

    def _joined(self, other: Circuit, how: Callable[[Indices, Indices], Any]) -> Circuit:
        other = self._same(other)
        # This circuit's effects win: if both have an effect for an edge, the two may come from different prompts.
        known, is_known = np.full(self.graph.n_edges, np.nan), ~np.isnan(self.effects)
        known[other.edges], known[self.edges[is_known]] = other.effects, self.effects[is_known]
        edges = how(self.edges, other.edges)
        model = self.model if other.model in ("", self.model) else "" if self.model else other.model
        seen = tuple(dict.fromkeys((*self.seen, *other.seen)))
        return circuit_from_edges(self.graph, edges, known[edges], seen, model)


def strength_order(effects: NDArray[np.float64]) -> Indices:
    """Return the order of effects: largest absolute value first, unknown ones last."""
    return np.argsort(-np.nan_to_num(np.abs(effects), nan=-1.0), kind="stable")


def circuit_from_edges(
    graph: Graph, edges: Iterable[int], effects: Any = None, seen: Prompts = (), model: str = ""
) -> Circuit:
    """Return the circuit of the edges with the given indices; `effects` has a number for each, if any are known."""
    numbers, first = np.unique(np.fromiter(edges, dtype=np.int64), return_index=True)
    known = np.full(len(numbers), np.nan) if effects is None else np.asarray(effects, dtype=np.float64)[first]
    return Circuit(graph, numbers, known, seen, model)


def graph_of(model: Any) -> Graph:
    """Return the graph of a model, or the graph itself if one was passed."""
    if isinstance(model, Graph):
        return model
    return Graph.of(checked_kind("model", model, HookedModel).shape)


def model_name(model: HookedModel | Graph) -> str:
    """Return the name of a model, or an empty string for a graph."""
    return "" if isinstance(model, Graph) else model.name


def checked_circuits(circuits: Any, graph: Graph) -> dict[str, Circuit]:
    """Return circuits by name: a mapping keeps its names, other circuits become "circuit 0", "circuit 1", ..."""
    if not isinstance(circuits, dict):
        several = "a circuit, a list of them, or a mapping of names to them"
        listed = [circuits] if isinstance(circuits, Circuit) else checked_several("circuits", circuits, several)
        circuits = {f"circuit {i}": circuit for i, circuit in enumerate(listed)}
    if not circuits:
        raise InputError("circuits is empty; give at least one, such as edges.circuit(100).")
    for name, circuit in circuits.items():
        if not isinstance(name, str) or not name:
            raise InputError(f"{shown(name)} is not the name of a circuit; give texts.")
        checked_kind("circuits", circuit, Circuit)
        graph.refuse_other(name, circuit.graph)
    return dict(circuits)
