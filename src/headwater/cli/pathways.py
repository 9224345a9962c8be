"""The commands `headwater pathways`, `headwater saliency` and `headwater detect`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headwater.cli.asked import EXTRACTOR
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
    write,
)
from headwater.cli.offered import Of, Options, Shaped, command
from headwater.errors import InputError
from headwater.models.embedded import BASE, is_embedded

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel
    from headwater.probes.linear import Probe
    from headwater.questions.answers import AnsweredQuestions
    from headwater.questions.sources import Questions
    from headwater.runs.result import Result

DEFAULT_SAMPLE = 500

QuestionSets = Annotated[
    list[str] | None,
    typer.Option(
        help="Question file (PopQA, TriviaQA, HotpotQA, NQ-open, or a table), or a set of the embedded model's world; "
        "repeatable. Default: the four sets of its world.",
        show_default=False,
    ),
]


PROBED = {"site": "headwater.questions.states:PROBE_SITES", "token": "headwater.questions.states:PROBE_TOKENS"}
KNOCKED_OUT = PROBED | {"variant": "VARIANTS"}
READ = Of(
    "headwater.questions.sources:load_questions",
    offers="seed",
    shaped=(
        Shaped("sample", help=f"Questions drawn of each set. Default: all; {DEFAULT_SAMPLE} of each of the world's."),
    ),
    filled="source",
    left_out={"format": "told from the first row"},
)
ANSWER = Of(
    "headwater.questions.answers:answer",
    offers="prompt label max_new_tokens batch_size",
    shaped=(EXTRACTOR,),
    choices={"label": "headwater.questions.labels:RULES"},
    filled="questions",
    left_out={"hooks": "functions"},
)
TRACE = Of(
    "headwater.pathways.trace:trace_pathways",
    offers="token site variant edges window seeds controls batch_size",
    choices=KNOCKED_OUT | {"edges": "QUERIES"},
    filled="answered",
)
STATES = Of(
    "headwater.questions.states:probe_states", offers="site token batch_size", choices=PROBED, filled="answered"
)
SALIENCY = Of(
    "headwater.pathways.attention_saliency:saliency",
    offers="target",
    choices={"target": "TARGETS"},
    filled="answered probe",
    left_out={
        "edges": "both are measured",
        "heads": "the other reading is a question for a notebook",
        "pairs": "the other reading is a question for a notebook",
        "layers": "all are measured",
        "batch_size": "that of the questions is another; its default suits all devices",
    },
)
BY_HAND = {
    "layer": "found on the training half",
    "cross_fit": "the other reading is a question for a notebook",
    "reweighting": "takes an object",
}
DETECT = Of(
    "headwater.detection.detection:detect",
    offers="site token variant seeds batch_size",
    shaped=(Shaped("methods", name="method"),),
    choices=KNOCKED_OUT,
    filled="answered",
    left_out=BY_HAND,
)
DETECT_ALL = replace(
    DETECT, shaped=(), left_out=BY_HAND | {"methods": "all of them; `headwater detect` has the choice"}
)


@command(READ, ANSWER, TRACE, DETECT_ALL, LOAD)
def pathways(
    model: Model = None,
    questions: QuestionSets = None,
    *,
    options: Options,
    saliency: Annotated[bool, typer.Option(help="Measure saliency too.")] = True,
    detection: Annotated[bool, typer.Option(help="Fit detectors of wrong answers too.")] = True,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Ask whether a model's truthfulness signal flows from the question or from its answer.

    Answers the questions, locates their exact tokens, fits probes, knocks out the question at every layer, with
    controls; then saliency and the detection of wrong answers (Luo et al., ACL 2026).

    **Examples**

    `headwater pathways`

    `headwater pathways meta-llama/Llama-3.2-1B --questions popqa.jsonl --sample 4000 --out runs/popqa`

    `headwater pathways gpt2 --questions triviaqa.json --extract rules --window 9`
    """
    with continues(out):
        from headwater.detection.detection import detect as run_detection
        from headwater.pathways.attention_saliency import saliency as run_saliency
        from headwater.pathways.trace import trace_pathways

        loaded, answered = _answered(model, questions, options, not quiet, out)
        found: dict[str, Result] = {"answers": answered}
        given = options.of("trace_pathways")
        traced = trace_pathways(loaded, answered, progress=not quiet, out=_part(out, "pathways"), **given)
        found["pathways"] = traced
        if saliency:
            folder = _part(out, "saliency")
            found["saliency"] = run_saliency(loaded, answered, traced.probe, progress=not quiet, out=folder)
        if detection:
            folder, given = _part(out, "detection"), options.of("detect")
            found["detection"] = run_detection(loaded, answered, progress=not quiet, out=folder, **given)
        _finish(found, out, as_json)


@command(READ, ANSWER, STATES, SALIENCY, LOAD, summary=SALIENCY)
def saliency(
    model: Model = None,
    questions: QuestionSets = None,
    *,
    options: Options,
    layer: Annotated[
        int | None, typer.Option(help="Of the probe. Default: the one that does best.", show_default=False)
    ] = None,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """How much a truthfulness probe depends on the attention paid to them.

    **Example**

    `headwater saliency meta-llama/Meta-Llama-3-8B --questions triviaqa.json --sample 4000 --extract rules
    --out runs/saliency`
    """
    with continues(out):
        from headwater.pathways.attention_saliency import saliency as run

        loaded, answered = _answered(model, questions, options, not quiet, out)
        probe, folder = _probe(loaded, answered, options, layer, quiet), _part(out, "saliency")
        measured = run(loaded, answered, probe, progress=not quiet, out=folder, **options.of("saliency"))
        _finish({"answers": answered, "saliency": measured}, out, as_json)


@command(READ, ANSWER, DETECT, LOAD, summary=DETECT)
def detect(
    model: Model = None,
    questions: QuestionSets = None,
    *,
    options: Options,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """The detectors are those of Luo et al. (ACL 2026) and their baselines.

    **Examples**

    `headwater detect --method probe --method mop`

    `headwater detect meta-llama/Llama-3.2-1B --questions popqa.jsonl --sample 4000 --out runs/detection`

    `headwater detect gpt2 --questions triviaqa.json --extract rules`
    """
    with continues(out):
        from headwater.detection.detection import detect as run
        from headwater.detection.methods import METHODS, check_methods

        given = options.of("detect")
        check_methods(given.get("methods", METHODS))
        loaded, answered = _answered(model, questions, options, not quiet, out)
        measured = run(loaded, answered, progress=not quiet, out=_part(out, "detection"), **given)
        _finish({"answers": answered, "detection": measured}, out, as_json)


def _answered(
    model: str | None, sources: list[str] | None, options: Options, progress: bool, out: Path | None
) -> tuple[HookedModel, AnsweredQuestions]:
    """Load the model, and let it answer the questions."""
    from headwater.questions.answers import answer

    questions, given = _questions(model, sources, options), options.of("answer")
    loaded, folder = load_model(model, options), _part(out, "answers")
    return loaded, answer(loaded, questions, progress=progress, out=folder, **given)


def _questions(model: str | None, sources: list[str] | None, options: Options) -> Questions:
    """Read the questions, before a large model is loaded in vain."""
    import pandas as pd

    from headwater.questions.sources import WORLD_SETS, Questions, load_questions

    if sources is None and not is_embedded(model or BASE):
        raise InputError(f"Which questions shall {model} answer? Give a file with --questions.")
    read, given = [], options.of("load_questions")
    for source in sources or WORLD_SETS:
        of_world = source in WORLD_SETS and not Path(source).exists()
        drawn = {"sample": DEFAULT_SAMPLE} if of_world else {}
        read.append(load_questions(source, **drawn | given))
    names = [name for questions in read for name in questions.datasets]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise InputError(f"Two of the --questions are called {double!r}: give one of them a column dataset.")
    table = pd.concat([questions.table for questions in read], ignore_index=True)
    return Questions(table, ", ".join(questions.source for questions in read))


def _probe(model: HookedModel, answered: AnsweredQuestions, options: Options, layer: int | None, quiet: bool) -> Probe:
    """Fit the probe whose saliency is measured, on all answers together."""
    from headwater.probes.linear import fit_probes
    from headwater.questions.states import probe_states
    from headwater.runs.processes import processes

    given = options.of("probe_states")
    where = {"site": given["site"], "token": given["token"]}

    def fit() -> Probe:
        states = probe_states(model, answered, progress=not quiet, **given)
        probes = fit_probes(states, answered.z, groups=answered.table["question"].tolist(), **where)
        return probes[probes.best if layer is None else layer]

    return processes().on_main("the probe", fit)  # one for all: of two machines the last digits differ


def _part(out: Path | None, name: str) -> Path | None:
    return out / name if out is not None else None


def _finish(found: dict[str, Result], out: Path | None, as_json: bool) -> None:
    """Write figures, tables and the report, and print what was found."""
    if not is_main():
        return
    from headwater.demo.page import write_report

    files = []
    if out is not None:
        for name, result in found.items():
            files += write(result, out / name, name)
        files.append(str(write_report(found, out / "report.md")))
    summary: dict[str, Any] = {name: result.findings() for name, result in found.items()}
    said = {name: result.report() for name, result in found.items()}

    def show(_: dict[str, Any], console: Console) -> None:
        for name, lines in said.items():
            console.print(f"[bold]{name}[/]", *map(plain, lines), "", sep="\n")

    report(summary | {"files": files}, as_json, show)
