"""What `hw.path_patch` found: the effect of each sender by way of each receiver, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from headwater.circuits.by_metric import ByMetric
from headwater.circuits.places import Places
from headwater.errors import InputError
from headwater.options import checked_count, checked_name
from headwater.patching.summaries import summarize
from headwater.runs.findings import said_number
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, table_html

if TYPE_CHECKING:
    pass

GLANCE = 20
"""Paths in a summary."""
WAYS = {"direct": "directly", "mlps": "directly and through MLPs, other heads frozen"}
"""How each `through` is said."""


@dataclass(frozen=True, repr=False)
class PathEffects(ByMetric, Result):
    """What `hw.path_patch` found."""

    table: pd.DataFrame
    """A row per example, path and metric: `example, sender, receiver, through, position or role (where taken apart),
    metric, effect, normalized_effect, clean, corrupted, floor`. `normalized_effect` is the effect as a part of the gap
    between the base run and the other, and `floor` what rounding alone makes of the metric."""
    run: RunRecord

    @property
    def through(self) -> str:
        """What lies between senders and receivers and was recomputed: `direct` (nothing) or `mlps`."""
        return str(self.run.options["through"])

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(self.table["metric"].unique())

    @property
    def coordinates(self) -> list[str]:
        """The columns that name a path."""
        return [name for name in ("sender", "receiver", "position", "role", "metric") if name in self.table]

    def top(self, n: int = GLANCE, *, metric: str | None = None) -> pd.DataFrame:
        """Return the paths whose mean effect over examples is largest in size, the largest first.

        Args:
            n: how many.
            metric: on which metric; default: the first.

        Returns:
            A row per path: what names it, and the mean of `effect` and `normalized_effect` over examples.

        Raises:
            InputError: there is no such metric.
        """
        n, own = checked_count("n", n), self.table[self.table["metric"] == self._metric(metric)]
        named = [name for name in self.coordinates if name != "metric"]
        means = own.groupby(named, sort=False)[["effect", "normalized_effect"]].mean().reset_index()
        order = np.argsort(-means["effect"].abs().to_numpy(), kind="stable")[:n]
        return means.iloc[order].reset_index(drop=True)

    def summary(self, *, level: float = 0.95, seed: int = 0) -> pd.DataFrame:
        """Summarize the 20 largest paths of each metric over examples: mean, bootstrap interval, sign-flip p of 0.

        Args:
            level: of the interval.
            seed: of the bootstrap and the permutations.

        Returns:
            A row per metric and path, the largest first: what names it, `examples, mean, low, high, p_value, q_value`.
            Interval and p are NaN for one example.
        """
        parts = []
        for metric in self.metrics:
            largest = self.top(metric=metric).drop(columns=["effect", "normalized_effect"])
            parts.append(largest.assign(metric=metric).merge(self.table, how="left"))
        return summarize(pd.concat(parts, ignore_index=True), self.coordinates, "effect", level, seed)

    def report(self) -> list[str]:
        """Return the strongest path of each metric, how many are beyond rounding, and what lay between."""
        said, summary = [], self.summary()
        for metric in self.metrics:
            own = self.table[self.table["metric"] == metric]
            named = [name for name in self.coordinates if name != "metric"]
            means = own.groupby(named, sort=False)["effect"].mean().abs()
            floor, row = float(own["floor"].mean()), summary[summary["metric"] == metric].iloc[0]
            n, where = int(row["examples"]), f" at {row['role']}" if "role" in own else ""
            where = f" at position {row['position']}" if "position" in own else where
            said.append(
                f"Of {len(means):,} paths the largest effect on {metric.replace('_', ' ')} is {row['sender']} -> "
                f"{row['receiver']}{where}: {said_number(row['mean'], row['low'], row['high'])}, over {n} "
                f"pair{'s' * (n != 1)}; {int((means > floor).sum()):,} are beyond what rounding makes ({floor:.1e})."
            )
        said.append(f"Senders reach receivers {WAYS[self.through]}.")
        said.append("Effects of paths that share a part count it more than once: they do not add up to a whole.")
        return said

    def matrix(self, metric: str | None = None) -> pd.DataFrame:
        """Return the mean effects over examples, receivers down and senders across; NaN where no path leads.

        Of positions or roles taken apart, the sum.

        Raises:
            InputError: there is no such metric.
        """
        own = self.table[self.table["metric"] == self._metric(metric)]
        by_example = own.groupby(["example", "receiver", "sender"], sort=False)["effect"].sum()
        means = by_example.groupby(level=["receiver", "sender"], sort=False).mean().unstack("sender")
        return means.reindex(index=own["receiver"].unique(), columns=own["sender"].unique())

    def __repr__(self) -> str:
        senders, receivers = (self.table[end].nunique() for end in ("sender", "receiver"))
        return (
            f"PathEffects({self.run.model}: {senders:,} senders x {receivers:,} receivers, "
            f"{self.table['example'].nunique():,} pairs, through={self.through!r})"
        )

    def _repr_html_(self) -> str:
        return table_html(self, self.top(8))

    def _metric(self, name: str | None) -> str:
        return self.metrics[0] if name is None else checked_name("metric", name, self.metrics)


def tabulated(
    effects: Float[Tensor, "example place sender receiver metric"],
    baselines: Float[Tensor, "example metric 3"],
    ends: tuple[Sequence[str], Sequence[str]],
    metrics: Sequence[str],
    places: Places,
    options: Mapping[str, Any],
) -> pd.DataFrame:
    """Lay effects out as rows; see `PathEffects.table`.

    Args:
        effects: NaN where no path leads.
        baselines: the metric of the clean and the corrupted run, and what rounding makes of it.
        ends: the names of senders and receivers.
        metrics: their names.
        places: what `place` counts.
        options: of the run.

    Raises:
        InputError: a run left nothing to tabulate.
    """
    example, place, sender, receiver, m = (column.numpy() for column in (~effects.isnan()).nonzero().T)
    if not len(example):
        raise InputError("No position that was named can change what is read.")
    senders, receivers, named = (np.array(names, dtype=object) for names in (*ends, metrics))
    columns: dict[str, Any] = {"example": example, "sender": senders[sender], "receiver": receivers[receiver]}
    columns["through"] = str(options["through"])
    if places.roles:
        columns["role"] = np.array(places.roles, dtype=object)[place]
    elif places.apart:
        columns["position"] = place
    clean, corrupted, floor = baselines.numpy()[example, m].T
    effect = effects.numpy()[example, place, sender, receiver, m]
    gap = clean - corrupted if options["direction"] == "denoise" else corrupted - clean
    normalized = np.divide(effect, gap, out=np.full_like(effect, np.nan), where=np.abs(gap) > 1e-9)
    columns |= {"metric": named[m], "effect": effect, "normalized_effect": normalized}
    return pd.DataFrame(columns | {"clean": clean, "corrupted": corrupted, "floor": floor})
