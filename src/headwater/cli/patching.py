"""The commands `headwater patch` and `headwater knockout`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headwater.cli.command import LOAD, AsJson, Model, Out, Quiet, columns, continues, load_model, report, write
from headwater.cli.offered import Of, Options, Shaped, command
from headwater.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from headwater.patching.metrics import Metric
    from headwater.patching.sweep import Sweep


@dataclass(frozen=True)
class Pairs:
    """Prompts in pairs: as options, or in a table."""

    clean: Annotated[
        list[str] | None, typer.Option(help="Clean prompt; repeat for several pairs. Default: those of --pairs.")
    ] = None
    corrupted: Annotated[
        list[str] | None, typer.Option(help="Corrupted prompt of each pair, in order. Default: those of --pairs.")
    ] = None
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="CSV, TSV, JSON or JSON Lines file with columns clean and corrupted. Default: --clean, --corrupted.",
            show_default=False,
        ),
    ] = None

    @property
    def prompts(self) -> list[str] | Path:
        """The clean prompts, or the file that holds the pairs.

        Raises:
            InputError: neither was given, or both.
        """
        if (self.clean is None) == (self.pairs is None):
            raise InputError("Give the prompts with --clean and --corrupted, or as a table with --pairs.")
        return self.pairs if self.pairs is not None else self.clean or []


@dataclass(frozen=True)
class Measured:
    """What is measured of each run."""

    metric: Annotated[
        str, typer.Option(help="logit-difference, log-probability, probability, rank or kl-divergence.")
    ] = "logit-difference"
    tokens: Annotated[
        tuple[str, str] | None,
        typer.Option(
            help="For logit-difference: the right and the wrong token. Mind leading spaces. Default: none.",
            show_default=False,
        ),
    ] = None
    token: Annotated[
        str | None,
        typer.Option(
            help='For log-probability, probability and rank: the token, as --token " Paris". Default: none.',
            show_default=False,
        ),
    ] = None
    at: Annotated[str, typer.Option(help="Where the metric reads: last, a position, or a text of the prompt.")] = "last"

    def asked(self) -> Metric:
        """Return the metric that the options name.

        Raises:
            InputError: there is none of this name, or it takes other tokens.
        """
        from headwater.patching.metrics import METRICS, answers_of

        known = {key.replace("_", "-"): key for key in METRICS}
        plain = self.metric.replace("_", "-")
        if plain not in known:
            raise InputError(f"There is no metric {self.metric!r}.{did_you_mean(plain, known)}")
        given = [*(self.tokens or ()), *([self.token] if self.token is not None else [])]
        needed = {0: "no token", 1: "--token ANSWER", 2: "--tokens RIGHT WRONG"}
        wanted = len(answers_of(known[plain]))
        if len(given) != wanted:
            raise InputError(f"The metric {plain} takes {needed[wanted]}; {given or 'no token'} was given.")
        return METRICS[known[plain]](*given, at=_position(self.at))


def _window(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdigit() else text


WINDOW = Shaped("window", str, help='So many layers at once, as 3, or "cumulative". Default: one.', read=_window)
PYTHON = {
    "layers": "all take part",
    "batch_size": "as many as suit the device",
}
PATCH = Of(
    "headwater.patching.activation_patching:patch",
    offers="over direction method",
    shaped=(
        Shaped(
            "sites",
            default=("resid_pre",),
            help="One or more of resid_pre, resid_mid, resid_post, attn_out, mlp_post, mlp_out, z, q, k, v, pattern.",
        ),
        Shaped(
            "values",
            help="What is written: other run; zero; mean, over the prompts given; or resample, another of them.",
        ),
        WINDOW,
    ),
    choices={"direction": "DIRECTIONS", "method": "METHODS"},
    filled="clean corrupted metric",
    left_out=PYTHON
    | {
        "positions": "all take part; a choice may be a function",
        "spans": "of positions by role alone",
        "heads": "all take part",
        "keys": "all take part, as positions do",
        "dataset": "a mean over other prompts than these is a question for a notebook",
        "seed": "of resample alone",
        "from_layer": "all layers are written from themselves",
        "together": "nodes picked by hand, for a notebook or the patch board",
    },
)
KNOCKOUT = Of(
    "headwater.patching.edge_knockout:knockout",
    offers="over variant",
    shaped=(WINDOW,),
    choices={"variant": "VARIANTS"},
    filled="prompts block metric",
    left_out=PYTHON,
)


@command(PATCH, LOAD, summary=PATCH)
def patch(
    model: Model = None,
    *,
    pairs: Pairs,
    measured: Measured,
    options: Options,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Activations of one run are written into another, cell by cell.

    **Examples**

    `headwater patch gpt2 --clean "The capital of France is" --corrupted "The capital of Italy is"
    --tokens " Paris" " Rome" --sites resid_pre`

    `headwater patch gpt2 --pairs pairs.csv --metric kl-divergence --sites z --out runs/patch`
    """
    prompts = pairs.prompts
    with continues(out):
        from headwater.models.sites import sites_called
        from headwater.patching.activation_patching import patch as run
        from headwater.patching.values import recipe_of

        measure, given = measured.asked(), options.of("patch")
        sites_called(given["sites"])
        _check_axes(given)
        recipe_of(given["values"])
        loaded = load_model(model, options)
        sweep = run(loaded, prompts, pairs.corrupted, metric=measure, progress=not quiet, out=out, **given)
        _report(sweep, out, as_json)


@command(KNOCKOUT, LOAD, summary=KNOCKOUT)
def knockout(
    model: Model = None,
    prompt: Annotated[list[str] | None, typer.Option(help="The prompt; repeat for several. Needed.")] = None,
    query: Annotated[
        str, typer.Option(help="Who must not read: last, after, all, a position, or a text of the prompt.")
    ] = "last",
    key: Annotated[
        str | None,
        typer.Option(
            help='What must not be read: a position, first, or a text of the prompt; " John#2" is the second one. '
            "Needed.",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(
            help="These heads only, by number or, of one layer, by name: --heads 3 --heads 7, or --heads 9.3. "
            "Default: all.",
            show_default=False,
        ),
    ] = None,
    *,
    measured: Measured,
    options: Options,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """What must not be read is named by its words; what becomes of the answer says how much it was needed.

    **Example**

    `headwater knockout gpt2 --prompt "The capital of France is" --key France --query last --window 9
    --tokens " Paris" " Rome"`
    """
    if not prompt or key is None:
        raise InputError("Give at least one --prompt, and with --key what must not be read.")
    with continues(out):
        from headwater.patching.edge_knockout import Edges
        from headwater.patching.edge_knockout import knockout as run

        measure, block = (
            measured.asked(),
            Edges(_position(query), _position(key), heads and [_position(one) for one in heads]),
        )
        given = options.of("knockout")
        _check_axes(given)
        loaded = load_model(model, options)
        sweep = run(loaded, prompt, block=block, metric=measure, progress=not quiet, out=out, **given)
        _report(sweep, out, as_json)


def _check_axes(given: Mapping[str, Any]) -> None:
    """See whether axes and window can be asked for, before a model is loaded.

    Raises:
        InputError: there is no such axis, or the window is neither a size nor "cumulative".
    """
    from headwater.options import checked_name
    from headwater.patching.sweep_axes import AXES, windows_of

    for axis in given.get("over", ()):
        checked_name("over", axis, AXES)
    windows_of(given.get("window"), AXES)


def _position(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


def _report(sweep: Sweep, out: Path | None, as_json: bool) -> None:
    from headwater.runs.findings import records_of

    files = write(sweep, out, "sweep") if out else []
    summary = sweep.summary()
    felt = summary["mean"].abs().sort_values(ascending=False)
    strongest = summary.loc[felt[felt > 0].index].head(10)
    rows = records_of(strongest)
    found = {"model": sweep.run.model, "engine": sweep.engine, "cells": len(summary), "strongest": rows, "files": files}
    report(found, as_json, _show)


def _show(found: dict[str, Any], console: Console) -> None:
    rows = found["strongest"]
    metrics = ", ".join(dict.fromkeys(row["metric"].replace("_", " ") for row in rows))
    console.print(f"{found['model']}: {found['cells']} cells, the strongest effects on {metrics}\n", markup=False)
    named = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []
    varied = [n for n in named if n not in ("site", "metric", "examples") or len({row[n] for row in rows}) > 1]
    words = [name for name in varied if isinstance(rows[0][name], str)]
    table = columns(",".join(words), ",".join(name for name in varied if name not in words))
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in sorted(varied, key=lambda name: name not in words)))
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
