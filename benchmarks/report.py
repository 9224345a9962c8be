"""What a suite reports: a row per comparison, printed for people and as one JSON document."""

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.machine import Machine, Work

LIBRARIES = (
    "headwater",
    "torch",
    "transformer-lens",
    "transformers",
    "triton",
    "nnsight",
    "pyvene",
    "liger-kernel",
    "cut-cross-entropy",
)
"""Those that are installed are named with their versions."""


@dataclass(frozen=True)
class Row:
    """One comparison. Times are seconds for the whole job; None means that it was not measured."""

    name: str
    peer: str
    floor_s: float | None
    peer_s: float | None
    headwater_s: float
    agrees: bool | None
    peak_bytes: int | None
    target: str
    note: str = ""
    work: Work | None = None
    """What the job takes at least and how much it gets done: for throughput and for the shares of the machine's rates.
    """

    @property
    def ratio(self) -> float | None:
        """How many times faster than the peer."""
        return self.peer_s / self.headwater_s if self.peer_s is not None else None

    def use_of(self, machine: Machine) -> dict[str, float | str]:
        """Return the throughput, and the shares of the matrix rate and of the bandwidth that headwater reached."""
        if self.work is None:
            return {}
        done = (
            {"throughput": self.work.done / self.headwater_s, "unit": f"{self.work.unit}/s"} if self.work.unit else {}
        )
        return done | {
            "matrix_share": self.work.operations / self.headwater_s / machine.rate(self.work),
            "bandwidth_share": self.work.moved / self.headwater_s / machine.bandwidth,
        }

    def as_json(self, machine: Machine) -> dict[str, object]:
        """Return the row as the JSON document holds it."""
        fields = asdict(self)
        del fields["work"]
        return fields | {"ratio": self.ratio} | self.use_of(machine)


def describe(row: Row, machine: Machine) -> str:
    """Return the row for people: the floor first."""
    ratio = f"{row.ratio:.4g} x" if row.ratio is not None else "-"
    peak = f"{row.peak_bytes / 2**20:.0f} MB" if row.peak_bytes is not None else "not measured"
    lines = [
        row.name,
        f"  floor      {_time(row.floor_s)}",
        f"  peer       {_time(row.peer_s)}   {row.peer}",
        f"  headwater  {_time(row.headwater_s)}   {ratio} (target {row.target})",
        f"  agrees     {'not compared' if row.agrees is None else 'yes' if row.agrees else 'NO'}   workspace {peak}",
    ]
    if use := row.use_of(machine):
        speed = f"{use['throughput']:,.4g} {use['unit']}   " if "unit" in use else ""
        shares = f"{use['matrix_share']:.1%} of the matrix rate, {use['bandwidth_share']:.1%} of the bandwidth"
        lines.append(f"  reaches    {speed}{shares}")
    return "\n".join([*lines, *([f"  note       {row.note}"] if row.note else [])])


def document(
    suites: Sequence[str], machine: Machine, rows: Iterable[Row], failed: Mapping[str, str] | None = None
) -> str:
    """Return one line of JSON: the suites, the machine as measured, versions, rows, and what suites failed of."""
    installed = {found.metadata["Name"] for found in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES if name in installed}
    versions |= {"python": platform.python_version()}
    return json.dumps(
        {
            "suite": " ".join(suites),
            "device": machine.device,
            "date": datetime.date.today().isoformat(),
            "machine": asdict(machine),
            "versions": versions,
            "rows": [row.as_json(machine) for row in rows],
        }
        | ({"failed": dict(failed)} if failed else {})
    )


def _time(value: float | None) -> str:
    return "not measured" if value is None else f"{value:10.3f} s"
