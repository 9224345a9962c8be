"""The commands `headwater edges` and `headwater circuit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from headwater.cli.command import (
    LOAD,
    AsJson,
    Model,
    Out,
    Quiet,
    columns,
    continues,
    is_main,
    load_model,
    report,
    write,
)
from headwater.cli.offered import Of, Options, Shaped, command
from headwater.cli.patching import Measured, Pairs
from headwater.errors import InputError
from headwater.names import RankName

if TYPE_CHECKING:
    import pandas as pd

    from headwater.circuits.circuit import Circuit
    from headwater.circuits.result import EdgeEffects
    from headwater.circuits.search import CircuitSearch

THROUGH = "headwater.circuits.carried:THROUGH"
EDGES = Of(
    "headwater.circuits.edge_effects:edges",
    offers="senders receivers direction over through method verify steps quadrature seed hours",
    choices={
        "direction": "headwater.patching.sides:DIRECTIONS",
        "through": THROUGH,
        "method": "METHODS",
        "quadrature": "QUADRATURES",
    },
    filled="clean corrupted metric",
    left_out={
        "batch_size": "as many as suit the device",
        "positions": "a mapping, for a notebook",
        "values": "a pair says what is exchanged for what",
        "dataset": "of a mean over other prompts",
    },
)
OF_A_CIRCUIT = Of(
    EDGES.function,
    offers="method verify steps quadrature seed hours",
    choices={"method": "METHODS", "quadrature": "QUADRATURES"},
    filled="clean corrupted metric",
    left_out=dict(EDGES.left_out)
    | {
        "senders": "a circuit is chosen of all edges",
        "receivers": "as senders",
        "direction": "an edge's effect is what is lost without it",
        "through": "circuits are of direct edges",
        "over": "edges of single positions make no circuit",
    },
)
SEARCH = Of(
    "headwater.circuits.search:find_circuit",
    offers="budget placebos seed hours",
    shaped=(
        Shaped(
            "threshold",
            float,
            help="Search instead: take edges out one after the other, in the order of ACDC, where the mean of the "
            "metric over pairs changes by less than this.",
        ),
    ),
    filled="clean corrupted metric by",
    left_out={name: EDGES.left_out[name] for name in ("batch_size", "values", "dataset")}
    | {"start": "the strongest edges, where not all can be tried"},
)
SHOWN, SIZE = 10, 20


@command(EDGES, LOAD, summary=EDGES)
def edges(
    model: Model = None,
    *,
    pairs: Pairs,
    measured: Measured,
    options: Options,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """One receiver's input is changed by one sender's output of the other run, and everything after it is rerun.

    **Examples**

    `headwater edges --clean "The capital of France is" --corrupted "The capital of Italy is"
    --tokens " Paris" " Rome"`

    `headwater edges gpt2 --pairs pairs.csv --metric kl-divergence --out runs/edges`
    """
    with continues(out):
        found = _effects(model, pairs, measured, options, out, quiet)
        files = write(found, out, "edges") if out else []
        if out:
            found.summary().to_csv(out / "summary.csv", index=False, lineterminator="\n")
            files.append(str(out / "summary.csv"))
        report(_summary(found, found.top(SHOWN)) | {"said": found.report(), "files": files}, as_json, _show)


@command(OF_A_CIRCUIT, SEARCH, LOAD)
def circuit(
    model: Model = None,
    *,
    pairs: Pairs,
    measured: Measured,
    size: Annotated[int | None, typer.Option(help=f"How many edges the circuit has.  [default: {SIZE}]")] = None,
    by: Annotated[
        Literal["size", "signed"],
        typer.Option(help="The largest effects, or those that speak most for the clean prompt's answer."),
    ] = "size",
    options: Options,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Choose the circuit of the strongest edges on pairs of prompts, draw it by layers, and keep it as one file.

    With --threshold the circuit is what a greedy search by exact effects leaves of all edges; --budget bounds it.

    **Examples**

    `headwater circuit --clean "The capital of France is" --corrupted "The capital of Italy is"
    --tokens " Paris" " Rome" --size 20 --out runs/circuit`

    `headwater circuit gpt2 --pairs pairs.csv --tokens " Paris" " Rome" --threshold 0.1 --budget 2000`
    """
    refuse_options_of_the_other_way(options, size)
    with continues(out):
        if "threshold" in options.of("find_circuit"):
            found = _searched(model, pairs, measured, by, options, out, quiet)
            files = write(found, out, "search") if out else []
            summary, said = _of_search(found), found.report()
            chosen = found.circuit
        else:
            effects = _effects(model, pairs, measured, options, out, quiet)
            chosen, files = effects.circuit(SIZE if size is None else size, by=by), []
            summary = _summary(effects, _strongest(chosen))
            said = [
                f"Circuit of {len(chosen):,} of {effects.graph.n_edges:,} edges, {len(chosen.on_a_path):,} on a path "
                "from the embedding to the logits.",
                "It was chosen on these prompts: what it is worth shows on others.",
            ]
        if out and is_main():
            from headwater.demo.written import write_figure

            files += [str(chosen.save(out / "circuit.parquet")), *write_figure(chosen.plot(), out / "circuit")]
        report(summary | {"said": said, "files": files}, as_json, _show)


def refuse_options_of_the_other_way(options: Options, size: int | None) -> None:
    """Refuse options of a search where none is asked for, and of the strongest edges where one is.

    Raises:
        InputError: they would say nothing.
    """
    if "threshold" in options.of("find_circuit"):
        given = options.given_for("edges", not_for="find_circuit") + ["--size"] * (size is not None)
        reason = "a search runs every edge exactly, and its threshold decides how many are left: leave out --threshold"
    else:
        given, reason = options.given_for("find_circuit", not_for="edges"), "they are of a search: give --threshold"
    if given:
        raise InputError(f"{', '.join(given)} cannot be used here; {reason}, or these.")


def _searched(
    model: str | None, pairs: Pairs, measured: Measured, by: RankName, options: Options, out: Path | None, quiet: bool
) -> CircuitSearch:
    from headwater.circuits.search import find_circuit

    prompts, metric = pairs.prompts, measured.asked()
    loaded, given = load_model(model, options), options.of("find_circuit")
    return find_circuit(loaded, prompts, pairs.corrupted, metric=metric, by=by, progress=not quiet, out=out, **given)


def _of_search(found: CircuitSearch) -> dict[str, object]:
    counts = {"pairs": int(found.alone["example"].nunique()), "edges": len(found.table), "method": "greedy search"}
    rows = _strongest(found.circuit)[["edge", "effect"]].dropna().to_dict("records")
    return {"model": found.run.model, **counts, "metric": found.alone["metric"].iloc[0], "strongest": rows}


def _strongest(circuit: Circuit) -> pd.DataFrame:
    return circuit.table.sort_values("effect", key=abs, ascending=False).head(SHOWN)


def _effects(
    model: str | None, pairs: Pairs, measured: Measured, options: Options, out: Path | None, quiet: bool
) -> EdgeEffects:
    from headwater.circuits.edge_effects import edges as run

    prompts, metric = pairs.prompts, measured.asked()
    loaded, given = load_model(model, options), options.of("edges")
    return run(loaded, prompts, pairs.corrupted, metric=metric, progress=not quiet, out=out, **given)


def _summary(found: EdgeEffects, strongest: pd.DataFrame) -> dict[str, object]:
    rows = []
    for row in strongest.to_dict("records"):
        known = [float(row[name]) for name in ("effect", "estimate") if name in row and row[name] == row[name]]
        rows.append({"edge": row["edge"], "effect": known[0] if known else None})
    counts = {"pairs": len(found.baselines), "edges": len(found.chosen), "method": found.method}
    return {"model": found.run.model, **counts, "metric": found.metrics[0], "strongest": rows}


def _show(found: dict[str, Any], console: Console) -> None:
    pairs = f"{found['pairs']} pair{'s' * (found['pairs'] != 1)}"
    console.print(f"{found['model']}: {found['edges']:,} edges, {found['method']}, {pairs}\n", markup=False)
    table = columns("edge", "effect")
    for row in found["strongest"]:
        table.add_row(row["edge"], f"{row['effect']:.4g}")
    console.print(table)
    for sentence in found["said"]:
        console.print(f"\n{sentence}", markup=False)
