"""The commands `headwater memorization` and `headwater score`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headwater.cli.asked import JUDGE
from headwater.cli.command import (
    LOAD,
    AsJson,
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
from headwater.cli.offered import SAME_AS_MODEL, Of, Options, Shaped, command
from headwater.errors import InputError

if TYPE_CHECKING:
    from headwater.likelihood.files import ScoredTexts
    from headwater.likelihood.profile import DepthProfile


def _layers(text: str) -> str | list[int]:
    """Read the layers asked for: a word, or numbers with commas between them."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.strip().lstrip("-").isdigit() for part in parts) else text


def _text(file: Path) -> str:
    from headwater.data.rows import check_readable

    check_readable(file, "texts before the others")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{file} is not UTF-8 text. Save the file as UTF-8.") from None


def _counts(file: Path) -> Any:
    from headwater.data.strict_json import parse_json

    try:
        return parse_json(_text(file))
    except ValueError as error:
        raise InputError(f"{file} is not a JSON list of numbers ({error}).") from None


GRAPH = Of(
    "headwater.likelihood.graph:load_depth_graph",
    shaped=(
        Shaped(
            "source",
            Path,
            name="data",
            help="A folder in the layout of DepthQA, or a JSON file. Default: that of the embedded model.",
        ),
        Shaped("predictions", str),
    ),
)
PROFILE = Of(
    "headwater.likelihood.profile:memorization",
    offers="span context predecessors aggregate k answers max_new_tokens controls seed batch_size",
    shaped=(Shaped("layers", str, help="final, all, or layers such as 0,4,8.", read=_layers), JUDGE),
    choices={
        "span": "SPANS",
        "context": "headwater.questions.asking:CONTEXTS",
        "predecessors": "headwater.likelihood.contexts:PREDECESSORS",
        "aggregate": "AGGREGATES",
        "answers": "headwater.likelihood.answering:SOURCES",
    },
    filled="graph",
    left_out={
        "lens": "takes a function or a result",
        "prompt": "several lines, or messages of a chat",
        "predecessor_prompt": "likewise",
        "quartiles": "the other reading is a question for a notebook",
    },
)
SCORE = Of(
    "headwater.likelihood.files:score_file",
    offers="field lowercase maximum_entropy gradient_norm long stride precision batch_size",
    shaped=(
        Shaped("k", list[float]),
        Shaped("prefix", Path, help="A file with texts known not to have been seen, for the score recall.", read=_text),
        Shaped(
            "token_counts",
            Path,
            help="How often each token id stands in a corpus, for the score dc_pdd: a JSON list of numbers.",
            read=_counts,
        ),
    ),
    choices={"precision": "headwater.kernels.likelihood:PRECISIONS"},
    filled="file reference",
)


@command(GRAPH, PROFILE, LOAD, summary=PROFILE)
def memorization(
    options: Options, model: Model = None, out: Out = None, as_json: AsJson = False, quiet: Quiet = False
) -> None:
    """Min-K% at depth 1, 2, 3, and the score gap by quartile of Min-K%.

    **Examples**

    `headwater memorization`

    `headwater memorization meta-llama/Llama-2-7b-chat-hf --data depthqa --context chat --out runs/depth`

    `headwater memorization gpt2 --data questions.json --judge label`
    """
    with continues(out):
        from headwater.likelihood.graph import load_depth_graph
        from headwater.likelihood.profile import memorization as run

        graph = load_depth_graph(**options.of("load_depth_graph"))
        given = options.of("memorization")
        profile = run(load_model(model, options), graph, progress=not quiet, out=out, **given)
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


@command(SCORE, LOAD)
def score(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] FILE",
            help="Checkpoint folder or hub name, by default the embedded model; and the texts: .jsonl, .csv, .tsv, or "
            "any other file with a text per line.",
        ),
    ],
    options: Options,
    model: Annotated[str | None, typer.Option(help=SAME_AS_MODEL, show_default=False)] = None,
    reference: Annotated[
        str | None, typer.Option(help="Another model, for the reference score. Default: none.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the table. An interrupted run, repeated with it, continues. Default: none.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as one JSON line on stdout.")] = False,
    quiet: Quiet = False,
) -> None:
    """Score how likely each text of a file was in a model's training data: loss, zlib, Min-K%, Min-K%++, Gap-K%.

    Higher = more likely seen, in every column of scores. One row per text, in the order of the file, as CSV on stdout
    or with --out in a folder; texts that cannot be scored keep their row, with a note.

    **Examples**

    `headwater score texts.txt`

    `headwater score gpt2 texts.txt > scores.csv`

    `headwater score gpt2 texts.jsonl --field passage --k 0.2 --out runs/scores --json`

    `headwater score EleutherAI/pythia-2.8b texts.jsonl --reference EleutherAI/pythia-70m --prefix unseen.txt
    --token-counts counts.json --maximum-entropy 2`
    """
    name, file = _model_and_file(given, model)
    with continues(out):
        from headwater.data.rows import check_readable
        from headwater.likelihood.files import score_file
        from headwater.likelihood.scores import checked_shares

        check_readable(file, "texts")
        asked = options.of("score_file")
        checked_shares(asked["k"])
        loaded = load_model(name, options)
        other = load_model(reference, options) if reference is not None else None
        scored = score_file(loaded, file, reference=other, progress=not quiet, out=out, **asked)
        _report(scored, out, as_json)


def _model_and_file(given: list[str], model: str | None) -> tuple[str | None, Path]:
    """Return the model and the file of texts: of one word it is the file, of two the model comes first.

    Raises:
        InputError: there are more words, or two models.
    """
    if len(given) + (model is not None) > 2:
        raise InputError(f"Give [MODEL] FILE, a model and one file of texts; found {' '.join(given)}.")
    return (given[0] if len(given) == 2 else model), Path(given[-1])


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
