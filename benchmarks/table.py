"""The table of results in README.md, made from the JSON documents in results/: `python -m benchmarks table`."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
COLUMNS = ("", "peer", "headwater", "ratio", "throughput", "matrix rate", "bandwidth", "workspace", "agrees")


def results_table(documents: Iterable[Mapping[str, Any]], suites: Iterable[str]) -> str:
    """Return a Markdown table per device, the newest measurement of each row; what no GPU measured is said to be so."""
    documents = sorted(documents, key=lambda document: document.get("date", ""))
    sections, measured_gpu = [], set()
    for device in sorted({document["device"] for document in documents}):
        here = [document for document in documents if document["device"] == device]
        # Rows without a peer are for the figure in docs/scaling.md.
        rows = {(row["name"], row["peer"]): row for document in here for row in document["rows"] if row["peer"]}
        sections.append(_section(device, here, rows))
        if not device.endswith("CPU"):
            measured_gpu |= {name.split(":")[0] for name, _ in rows}
    if missing := [suite for suite in suites if suite not in measured_gpu]:
        sections.append("On a GPU, not measured: " + ", ".join(f"`{suite}`" for suite in missing) + ".\n")
    return "\n".join(sections)


def _section(device: str, documents: list[Mapping[str, Any]], rows: Mapping[tuple[str, str], Any]) -> str:
    newest = documents[-1]
    measured = dict.fromkeys(_measured_on(document) for document in documents)
    lines = [
        f"### {device}\n",
        f"{newest['machine']['threads']} threads; {'; '.join(measured)}. Newest: "
        f"{', '.join(f'{name} {version}' for name, version in newest['versions'].items())}.\n",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows.values()]
    return "\n".join(lines) + "\n"


def _measured_on(document: Mapping[str, Any]) -> str:
    """Which suites were measured when, and the rates of the machine then."""
    machine, half = document["machine"], document["machine"].get("half_rate")
    rates = f"{machine['matrix_rate'] / 1e9:,.0f} GFLOP/s in float32" + (
        f", {half / 1e12:,.0f} TFLOP/s in bfloat16" if half else ""
    )
    day = f", {document['date']}" if "date" in document else ""
    return f"{document['suite']}: {rates}, {machine['bandwidth'] / 1e9:,.1f} GB/s{day}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    def share(name: str) -> str:
        return f"{row[name]:.0%}" if row.get(name) is not None else "-"

    return [
        row["name"],
        f"{_time(row['peer_s'])}, {row['peer']}",
        _time(row["headwater_s"]),
        f"{row['ratio']:.3g} ×" if row["ratio"] is not None else "-",
        f"{_number(row['throughput'])} {row['unit']}" if "unit" in row else "-",
        share("matrix_share"),
        share("bandwidth_share"),
        f"{row['peak_bytes'] / 2**20:,.0f} MB" if row["peak_bytes"] is not None else "-",
        {True: "yes", False: "NO", None: "-"}[row["agrees"]],
    ]


def _time(value: float | None) -> str:
    return "not measured" if value is None else f"{value:,.3g} s" if value < 1000 else f"{value:,.0f} s"


def documents_in(folder: Path) -> list[dict[str, Any]]:
    """Read every result."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def with_table(text: str, table: str) -> str:
    """Return the README's text with the table in its place."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n{END}{rest.split(END)[1]}"


def update(suites: Iterable[str], folder: Path = HERE) -> None:
    """Put the table of the results there are into the README beside them."""
    readme = folder / "README.md"
    readme.write_text(with_table(readme.read_text(), results_table(documents_in(folder / "results"), suites)))
