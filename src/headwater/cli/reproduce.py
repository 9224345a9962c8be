"""The commands `headwater reproduce maps`, `pathways` and `depth`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headwater.cli.command import (
    EMBEDDED,
    AsJson,
    Device,
    Dtype,
    Out,
    Quiet,
    columns,
    continues,
    load_model,
    plain,
    report,
    write,
)
from headwater.errors import InputError

if TYPE_CHECKING:
    from headwater.reference.published import Reproduction

app = typer.Typer(
    help="Measure published numbers again: published | measured | difference.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Model = Annotated[str, typer.Argument(help="Checkpoint folder or hub name; `embedded` for the embedded model.")]
PublishedModel = Annotated[
    str | None,
    typer.Option("--published", help="Published model to compare with. Default: by name.", show_default=False),
]

NUMBERS = ("published", "measured", "difference")


@app.command()
def maps(
    model: Model,
    datasets: Annotated[Path, typer.Option(help="The published relations: a folder of NAME/NAME.json.")],
    published: PublishedModel = None,
    correlations: Annotated[
        bool, typer.Option(help="Also run the model, and correlate what heads write with their scores.")
    ] = True,
    templates: Annotated[
        Path | None,
        typer.Option(
            help="Sentences for the correlations, one a line, each with {source}. Default: headwater's own.",
            show_default=False,
        ),
    ] = None,
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
        from headwater.heads.validation import TEMPLATES
        from headwater.reference.maps import reproduce_maps

        found = reproduce_maps(
            load_model(model) if model == EMBEDDED else model,
            datasets,
            published=published,
            correlations=correlations,
            templates=_lines(templates) if templates else TEMPLATES,
            progress=not quiet,
            out=out,
        )
        _report(found, out, as_json)


@app.command()
def pathways(
    model: Model,
    questions: Annotated[
        list[str], typer.Option(help="Question file; repeat for several. Of the embedded model: a set by name.")
    ],
    published: PublishedModel = None,
    sample: Annotated[int, typer.Option(help="Questions drawn of each set; 0 for all.")] = 4000,
    method: Annotated[
        list[str] | None, typer.Option(help="Methods of detection; repeatable. Default: all.", show_default=False)
    ] = None,
    token: Annotated[str, typer.Option(help="Where probes read.")] = "exact_answer_last",
    seeds: Annotated[int, typer.Option(help="Splits into halves.")] = 3,
    extract: Annotated[
        tuple[str, str] | None,
        typer.Option(
            help="URL and MODEL of an OpenAI-compatible endpoint that names the exact words.", show_default=False
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows in one run.")] = 64,
    device: Device = None,
    dtype: Dtype = None,
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
        from headwater.questions.extract import EndpointExtractor
        from headwater.reference.pathways import METHODS, reproduce_pathways

        found = reproduce_pathways(
            load_model(model, device, dtype),
            questions,
            published=published,
            sample=sample or None,
            methods=tuple(method) if method else tuple(METHODS),
            token=token,
            seeds=seeds,
            extractor=EndpointExtractor(*extract) if extract else None,
            batch_size=batch_size,
            progress=not quiet,
            out=out,
        )
        _report(found, out, as_json)


@app.command()
def depth(
    model: Model,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder in the layout of DepthQA, or a graph file. Default: the embedded model's world.",
            show_default=False,
        ),
    ] = None,
    predictions: Annotated[
        str | None, typer.Option(help="Of a folder: the file with answers and scores.", show_default=False)
    ] = None,
    published: PublishedModel = None,
    label: Annotated[bool, typer.Option("--label", help="Score answers by label match.")] = False,
    batch_size: Annotated[int, typer.Option(help="Texts in one run.")] = 16,
    device: Device = None,
    dtype: Dtype = None,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Accuracy and discrepancies by question depth (Ko et al., EMNLP 2024).

    **Example**

    `headwater reproduce depth meta-llama/Meta-Llama-3-8B-Instruct --data depthqa --out runs/depth`
    """
    with continues(out):
        from headwater.likelihood.graph import load_depth_graph
        from headwater.reference.depth import reproduce_depth

        found = reproduce_depth(
            load_model(model, device, dtype),
            load_depth_graph(data, predictions=predictions),
            published=published,
            judge="label" if label else None,
            batch_size=batch_size,
            progress=not quiet,
            out=out,
        )
        _report(found, out, as_json)


def _lines(file: Path) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}.") from None
    return tuple(line for line in lines if line.strip())


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
