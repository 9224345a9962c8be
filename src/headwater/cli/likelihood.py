"""The commands `headwater memorization` and `headwater score`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

import headwater as hw
from headwater.cli.options import (
    ANY_TEXT,
    ENDPOINT,
    Flag,
    Load,
    Model,
    RunOptions,
    documented_by,
    endpoint_named,
    is_main,
    screen,
    show,
)
from headwater.errors import InputError

if TYPE_CHECKING:
    from headwater.questions.labels import EndpointJudge

Data = Annotated[
    Path | None,
    Parameter(help="A folder in the layout of DepthQA, or a JSON file. Default: that of the embedded model."),
]
Predecessors = Literal["none", "gold", "predicted", "multi-turn"]
Judge = Annotated[
    str | None,
    Parameter(
        help="How to judge answers, instead of by the scores in the data: label (label match, 5 or 1), or "
        f"{ENDPOINT}. Default: the scores in the data."
    ),
]


@documented_by("likelihood/profile:memorization", "likelihood/graph:load_depth_graph")
def memorization(
    model: Model = None,
    *,
    data: Data = None,
    context: Literal["raw", "chat"] = "raw",
    layers: Annotated[str, ANY_TEXT] = "final",
    k: float = 0.2,
    answers: Literal["data", "model"] | None = None,
    judge: Judge = None,
    predecessors: Predecessors = "none",
    max_new_tokens: int = 32,
    controls: bool = True,
    seed: int = 0,
    batch_size: int = 16,
    load: Load = Load(),
    run: RunOptions = RunOptions(),
) -> None:
    """Measure memorization by question depth.

    Min-K% at depth 1, 2, 3, and the score gap by quartile of Min-K%.

    **Examples**

    - `headwater memorization`
    - `headwater memorization meta-llama/Llama-2-7b-chat-hf --data depthqa --context chat --out runs/depth`
    - `headwater memorization gpt2 --data questions.json --judge label`

    Args:
        context: "raw" (as a plain prompt) or "chat" (in the chat template).
        layers: final, all, or layers such as 0,4,8.
        k: Share of the lowest tokens, for Min-K% and its variants.
    """
    graph, scorer = hw.load_depth_graph(data), read_judge(judge)
    profile = hw.memorization(
        load.model(model), graph, context=context, layers=_layers(layers), k=k, answers=answers, judge=scorer,
        predecessors=predecessors, max_new_tokens=max_new_tokens, controls=controls, seed=seed, batch_size=batch_size,
        **run.kept(),
    )  # fmt: skip
    files = run.write(profile, "depth_profile")
    if run.out is not None and is_main():
        from headwater.figures import layer_curves
        from headwater.figures.files import write_figure

        files.append(str(profile.save_html(run.out / "view.html")))
        if profile.by_layer["layer"].nunique() > 1:
            files += write_figure(layer_curves(profile), run.out / "layers")
        files += run.write_report({"memorization": profile})
    run.finish(profile, files)


def read_judge(text: str | None) -> str | EndpointJudge | None:
    """Return the judge that `--judge` names."""
    from headwater.questions.labels import LABEL, EndpointJudge

    words = (text or "").split()
    if text is None or words == [LABEL]:
        return text and LABEL
    if (endpoint := endpoint_named(words, EndpointJudge)) is not None:
        return endpoint
    raise InputError(f'--judge {text!r} must be "label" or "URL MODEL [VARIABLE]" of an endpoint.')


def _layers(text: str) -> Any:
    """Parse the requested layers: a word, or numbers separated by commas."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.strip().lstrip("-").isdigit() for part in parts) else text


@documented_by("likelihood/files:score_file")
def score(
    arguments: Annotated[
        list[str],
        Parameter(
            name="MODEL-AND-FILE",
            help="Checkpoint folder or hub name, by default the embedded model; and the texts: .jsonl, .csv, .tsv, or "
            "any other file with a text per line.",
        ),
    ],
    /,
    *,
    model: str | None = None,
    field: str = "text",
    k: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0),
    reference: str | None = None,
    lowercase: Flag = False,
    batch_size: int = 16,
    load: Load = Load(),
    run: RunOptions = RunOptions(),
) -> None:
    """Score how likely each text of a file was in a model's training data: loss, zlib, Min-K%, Min-K%++, Gap-K%.

    Pass [MODEL] FILE. Higher = more likely seen, in every column of scores. One row per text, in the order of the file,
    as CSV on stdout or with --out in a folder; texts that cannot be scored keep their row, with a note.

    **Examples**

    - `headwater score texts.txt`
    - `headwater score gpt2 texts.txt > scores.csv`
    - `headwater score gpt2 texts.jsonl --field passage --k 0.2 --out runs/scores --json`
    - `headwater score EleutherAI/pythia-2.8b texts.jsonl --reference EleutherAI/pythia-70m`

    Args:
        model: The model by name, as in --model gpt2. Default: the embedded model.
    """
    if len(arguments) + (model is not None) > 2:
        raise InputError(f"Pass [MODEL] FILE, a model and one file of texts; found {' '.join(arguments)}.")
    name, file = (arguments[0] if len(arguments) == 2 else model), Path(arguments[-1])
    from headwater.data.rows import check_readable
    from headwater.likelihood.scores import checked_shares

    check_readable(file, "texts")
    checked_shares(k)
    scored = hw.score_file(
        load.model(name), file, field=field, k=k, reference=load.model(reference) if reference is not None else None,
        lowercase=lowercase, batch_size=batch_size, **run.kept(),
    )  # fmt: skip
    if not is_main():
        return
    files = []
    if run.out is not None:
        scored.table.to_csv(run.out / "table.csv", index=False, lineterminator="\n")
        files = [str(run.out / name) for name in ("table.parquet", "table.csv")]
    elif not run.as_json:
        scored.table.to_csv(sys.stdout, index=False, lineterminator="\n")
        show(scored.report(), screen)
        return
    run.finish(scored, files)
