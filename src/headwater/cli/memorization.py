"""The commands `headwater memorization` and `headwater score`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from headwater.cli.command import (
    AsJson,
    Device,
    Dtype,
    Model,
    Out,
    Quiet,
    continues,
    is_main,
    load_model,
    plain,
    report,
    screen,
    write,
)

if TYPE_CHECKING:
    from headwater.likelihood.files import ScoredTexts
    from headwater.likelihood.profile import DepthProfile


def memorization(
    model: Model = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder in the layout of DepthQA, or a graph file. Default: the embedded model's world.",
            show_default=False,
        ),
    ] = None,
    predictions: Annotated[
        str | None,
        typer.Option(help="Of a folder: the file with a model's answers and their scores.", show_default=False),
    ] = None,
    span: Annotated[
        Literal["question", "answer", "model_answer", "both"], typer.Option(help="What is scored.")
    ] = "answer",
    context: Annotated[Literal["raw", "chat"], typer.Option(help="A prompt, or the chat template.")] = "raw",
    aggregate: Annotated[
        Literal["group", "node"], typer.Option(help="A value per graph and depth, or per question.")
    ] = "group",
    layers: Annotated[str, typer.Option(help="final, all, or layers such as 0,4,8.")] = "final",
    k: Annotated[float, typer.Option(help="Share of lowest tokens.")] = 0.2,
    answers: Annotated[
        Literal["data", "model"] | None,
        typer.Option(help="Whose answers are judged. Default: the data's, where there are any.", show_default=False),
    ] = None,
    label: Annotated[
        bool, typer.Option("--label", help="Score answers by label match, 5 or 1, whatever scores the data hold.")
    ] = False,
    controls: Annotated[bool, typer.Option(help="Score texts with shuffled words too.")] = True,
    seed: Annotated[int, typer.Option(help="Of shuffling and of the bootstrap.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Texts in one run of the model.")] = 16,
    device: Device = None,
    dtype: Dtype = None,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure memorization by question depth: Min-K% at depth 1, 2, 3, and the score gap by quartile of Min-K%.

    **Examples**

    `headwater memorization`

    `headwater memorization meta-llama/Llama-2-7b-chat-hf --data depthqa --context chat --out runs/depth`
    """
    with continues(out):
        from headwater.likelihood.graph import load_depth_graph
        from headwater.likelihood.profile import memorization as run

        graph = load_depth_graph(data, predictions=predictions)
        profile = run(
            load_model(model, device, dtype),
            graph,
            span=span,
            context=context,
            aggregate=aggregate,
            layers=_layers(layers),
            k=k,
            answers=answers,
            judge="label" if label else None,
            controls=controls,
            seed=seed,
            batch_size=batch_size,
            progress=not quiet,
            out=out,
        )
        if not is_main():
            return
        files = _written(profile, out) if out is not None else []
    text = "\n\n".join(profile.report())
    report(profile.findings() | {"files": files}, as_json, lambda _, console: console.print(plain(text)))


def _written(profile: DepthProfile, out: Path) -> list[str]:
    """Write the figures, the tables and the report."""
    files = write(profile, out, "depth_profile")
    from headwater.demo.page import write_report
    from headwater.figures.depth_profile import layer_curves
    from headwater.figures.style import save_figure
    from headwater.figures.tokens import token_heat_map, token_html

    files += map(str, save_figure(token_heat_map(profile), out / "tokens", ("png",)))
    (out / "tokens.html").write_text(token_html(profile), encoding="utf-8")
    if profile.by_layer["layer"].nunique() > 1:
        files += map(str, save_figure(layer_curves(profile), out / "layers", ("png", "svg", "pdf")))
    return [*files, str(out / "tokens.html"), str(write_report({"memorization": profile}, out / "report.md"))]


def _layers(text: str) -> str | list[int]:
    """Read the layers asked for: a word, or numbers with commas between them."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.strip().lstrip("-").isdigit() for part in parts) else text


def score(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub name; `embedded` for the embedded model.")],
    file: Annotated[Path, typer.Argument(help="Texts: .jsonl, .csv, .tsv, or any other file with a text per line.")],
    field: Annotated[str, typer.Option(help="Of .jsonl and .csv: the field or column with the text.")] = "text",
    k: Annotated[
        list[float] | None,
        typer.Option(help="Share of lowest tokens; repeatable. Default: 0.05 to 0.6, and 1.", show_default=False),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Another model, for the reference score.", show_default=False)
    ] = None,
    lowercase: Annotated[
        bool, typer.Option("--lowercase", help="Also read the lowercased texts, for the lowercase score.")
    ] = False,
    long: Annotated[str, typer.Option(help="Texts longer than the context: window, or error.")] = "window",
    stride: Annotated[
        int | None,
        typer.Option(help="New tokens that each window scores. Default: half the context.", show_default=False),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts in one run of the model.")] = 16,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the table. An interrupted run, repeated with it, continues.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as one JSON line on stdout.")] = False,
    quiet: Quiet = False,
) -> None:
    """Score how likely each text of a file was in a model's training data: loss, zlib, Min-K%, Min-K%++, Gap-K%.

    Higher = more likely seen, in every column of scores. One row per text, in the order of the file, as CSV on stdout
    or with --out in a folder; texts that cannot be scored keep their row, with a note.

    **Examples**

    `headwater score gpt2 texts.txt > scores.csv`

    `headwater score gpt2 texts.jsonl --field passage --k 0.2 --out runs/scores --json`
    """
    with continues(out):
        from headwater.likelihood.files import score_file
        from headwater.likelihood.scores import SHARES

        scored = score_file(
            load_model(model, device, dtype),
            file,
            field=field,
            k=tuple(k) if k else SHARES,
            reference=load_model(reference, device, dtype) if reference is not None else None,
            lowercase=lowercase,
            long=long,
            stride=stride,
            batch_size=batch_size,
            progress=not quiet,
            out=out,
        )
        _report(scored, out, as_json)


def _report(scored: ScoredTexts, out: Path | None, as_json: bool) -> None:
    if not is_main():
        return
    files = []
    if out is not None:
        scored.table.to_csv(out / "table.csv", index=False, lineterminator="\n")
        files = [str(out / name) for name in ("table.parquet", "table.csv")]
    elif not as_json:
        scored.table.to_csv(sys.stdout, index=False, lineterminator="\n")
        _show(scored.findings() | {"files": files}, screen)
        return
    report(scored.findings() | {"files": files}, as_json, _show)


def _show(summary: dict[str, Any], console: Console) -> None:
    console.print(
        f"[bold]{plain(summary['model'])}[/]: {summary['scored']:,} of {summary['texts']:,} texts scored, "
        f"{summary['tokens']:,} tokens; {summary['windowed']:,} texts were read in windows"
    )
    for note, count in summary["not_scored"].items():
        console.print(f"  not scored: {count:,} × {note}")
