"""The commands `headwater reproduce maps`, `pathways`, `depth` and `membership`, and the plan of them all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headwater.cli.asked import EXTRACTOR, JUDGE
from headwater.cli.command import (
    LOAD,
    AsJson,
    Out,
    Quiet,
    columns,
    continues,
    load_model,
    plain,
    report,
    write,
)
from headwater.cli.memorization import GRAPH
from headwater.cli.offered import Of, Options, Shaped, command
from headwater.errors import InputError

if TYPE_CHECKING:
    from typer import Context

    from headwater.reference.published import Reproduction
else:
    Context = typer.Context.__mro__[1]  # click's, which is what a callback is given

app = typer.Typer(
    help="Measure published numbers again: published | measured | difference.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Model = Annotated[str, typer.Argument(help="Checkpoint folder or hub name; `embedded` for the embedded model.")]

NUMBERS = ("published", "measured", "low", "high", "difference")


def _lines(file: Path) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}.") from None
    return tuple(line for line in lines if line.strip())


def _another(name: str) -> Any:
    from headwater.models.loading import load

    return load(name)


MAPS = Of(
    "headwater.reference.maps:reproduce_maps",
    offers="published correlations ablations multi_token device",
    shaped=(
        Shaped(
            "templates",
            Path,
            help="Sentences for the correlations, one a line, each with {source}. Default: headwater's own.",
            read=_lines,
        ),
    ),
    filled="datasets",
)
PATHWAYS = Of(
    "headwater.reference.pathways:reproduce_pathways",
    offers="published token seeds batch_size",
    shaped=(
        Shaped("sample", help="Questions drawn of each set; 0 for all.", read=lambda count: count or None),
        Shaped("methods", name="method"),
        EXTRACTOR,
    ),
    filled="questions",
)
DEPTH = Of(
    "headwater.reference.depth:reproduce_depth",
    offers="published predecessors batch_size",
    choices={"predecessors": "headwater.likelihood.contexts:PREDECESSORS"},
    shaped=(JUDGE,),
    filled="graph",
)
MEMBERSHIP = Of(
    "headwater.reference.membership:reproduce_membership",
    offers="published benchmark batch_size",
    choices={"benchmark": "BENCHMARKS"},
    shaped=(
        Shaped(
            "reference",
            str,
            help="Another model, for the score of that name, as EleutherAI/pythia-70m, the published one.",
            read=_another,
        ),
    ),
    filled="texts",
)


@app.callback(invoke_without_command=True)
def reproduce(
    context: Context,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="List every command, its data, the size of its weights and the published numbers; run nothing.",
        ),
    ] = False,
    runs: Annotated[Path, typer.Option(help="With --plan: the folder whose finished runs are shown beside.")] = Path(
        "runs"
    ),
    as_json: AsJson = False,
) -> None:
    """Measure published numbers again: published | measured | difference."""
    if context.invoked_subcommand is not None:
        if plan:
            raise InputError("--plan stands alone: it lists the commands and runs none.")
        return
    if not plan:
        raise InputError("Nothing is asked for: name maps, pathways, depth or membership, or give --plan.")
    from dataclasses import asdict

    from headwater.reference.plan import reproduction_plan
    from headwater.runs.findings import records_of

    lines = reproduction_plan(runs)
    listed = [asdict(line) | {"numbers": records_of(line.numbers)} for line in lines]
    report({"lines": listed}, as_json, _show_plan)


def _show_plan(found: dict[str, Any], console: Console) -> None:
    for line in found["lines"]:
        console.print(f"[bold]{plain(line['command'])}[/]")
        for one in line["data"]:
            console.print(f"  data: {plain(one)}")
        console.print(f"  weights: {line['weights']:.1f} GiB")
        for one in line["limits"]:
            console.print(f"  limit: {plain(one)}")
        if line["numbers"]:
            console.print("  published | measured [95 % interval] | difference")
            for row in line["numbers"]:
                published, measured, low, high, difference = (_number(row[name]) for name in NUMBERS)
                ends = "" if low == "-" else plain(f" [{low}, {high}]")
                named = plain(f"{row['quantity']}, {row['of']}")
                console.print(f"  {named}: {published} | {measured}{ends} | {difference}")
        console.print("")


@app.command()
@command(MAPS)
def maps(
    model: Model,
    datasets: Annotated[Path, typer.Option(help="The published relations: a folder of NAME/NAME.json.")],
    options: Options,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Head classification (Elhelo & Geva, ACL 2025): best scores, ranked heads, correlations.

    **Examples**

    `headwater reproduce maps gpt2-xl --datasets MAPS/datasets`

    `headwater reproduce maps path/to/pythia-12b --datasets MAPS/datasets --no-correlations --out runs/maps`
    """
    with continues(out):
        from headwater.reference.maps import reproduce_maps

        found = reproduce_maps(model, datasets, progress=not quiet, out=out, **options.of("reproduce_maps"))
        _report(found, out, as_json)


@app.command()
@command(PATHWAYS, LOAD)
def pathways(
    model: Model,
    questions: Annotated[
        list[str], typer.Option(help="Question file; repeat for several. Of the embedded model: a set by name.")
    ],
    options: Options,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Detection of wrong answers (Luo et al., ACL 2026, Tables 2 and 3): AUC of every method, and of the mode.

    Question sets other than PopQA need columns `subject` and `property` with the exact words, or --extract.

    **Example**

    `headwater reproduce pathways meta-llama/Meta-Llama-3-8B --questions popqa.jsonl --out runs/pathways`
    """
    with continues(out):
        from headwater.reference.pathways import reproduce_pathways

        given = options.of("reproduce_pathways")
        found = reproduce_pathways(load_model(model, options), questions, progress=not quiet, out=out, **given)
        _report(found, out, as_json)


@app.command()
@command(GRAPH, DEPTH, LOAD)
def depth(options: Options, model: Model, out: Out = None, as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Accuracy and discrepancies by question depth (Ko et al., EMNLP 2024).

    **Example**

    `headwater reproduce depth meta-llama/Meta-Llama-3-8B-Instruct --data depthqa --out runs/depth`
    """
    with continues(out):
        from headwater.likelihood.graph import load_depth_graph
        from headwater.reference.depth import reproduce_depth

        graph = load_depth_graph(**options.of("load_depth_graph"))
        given = options.of("reproduce_depth")
        found = reproduce_depth(load_model(model, options), graph, progress=not quiet, out=out, **given)
        _report(found, out, as_json)


@app.command()
@command(MEMBERSHIP, LOAD)
def membership(
    model: Model,
    texts: Annotated[list[Path], typer.Option(help="Texts with input and label; of several files, the mean.")],
    options: Options,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Telling seen texts from unseen ones (Zhang et al., ICLR 2025): AUC of every score.

    **Example**

    `headwater reproduce membership EleutherAI/pythia-2.8b --texts WikiMIA_length32.jsonl --out runs/wikimia`
    """
    with continues(out):
        from headwater.reference.membership import reproduce_membership

        given = options.of("reproduce_membership")
        found = reproduce_membership(load_model(model, options), texts, progress=not quiet, out=out, **given)
        _report(found, out, as_json)


def _report(found: Reproduction, out: Path | None, as_json: bool) -> None:
    from headwater.runs.findings import records_of

    comparable = found.table["difference"].notna().any()
    files = write(found, out, "reproduction") if out and comparable else []
    rows = records_of(found.table)
    report(found.findings() | {"rows": rows, "files": files}, as_json, _show)


def _show(found: dict[str, Any], console: Console) -> None:
    console.print(
        f"[bold]{plain(found['model'])}[/] beside {plain(found['published_model'] or 'no published model')}\n"
    )
    rows = found["rows"]
    names = [name for name in rows[0] if name not in ("quantity", *NUMBERS)]
    for quantity in dict.fromkeys(row["quantity"] for row in rows):
        table = columns(",".join(names), ",".join(NUMBERS))
        for row in rows:
            if row["quantity"] == quantity:
                table.add_row(*(plain(str(row[name])) for name in names), *(_number(row[name]) for name in NUMBERS))
        console.print(f"[bold]{quantity}[/]", table, "", sep="\n")
    for note in found["notes"]:
        console.print(f"Note: {plain(note)}")
    console.print(f"Published numbers: {plain(found['source'])}")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) > 1 else f"{value:.4g}"
