"""The commands `headwater pathways`, `headwater saliency` and `headwater detect`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from headwater.cli.command import (
    EMBEDDED,
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
    write,
)
from headwater.errors import InputError

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel
    from headwater.pathways.probes import Probe
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
Sample = Annotated[
    int | None,
    typer.Option(
        help=f"Questions drawn of each set. Default: all; {DEFAULT_SAMPLE} of each of the world's.", show_default=False
    ),
]
Seed = Annotated[int, typer.Option(help="Of the draw of questions.")]
Prompt = Annotated[
    str | None,
    typer.Option(
        help="Text with one {question}. Default: the chat template, or Q: and A: on two lines.", show_default=False
    ),
]
Label = Annotated[
    Literal["contains", "exact", "starts"],
    typer.Option(help="An answer is right when an accepted one stands in it, is all of it, or begins it."),
]
NewTokens = Annotated[int, typer.Option(help="An answer that has not ended after so many tokens is left out.")]
Extract = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--extract",
        help="URL and MODEL of an OpenAI-compatible endpoint that names the exact words. Without it the exact answer "
        "is all of the answer.",
        show_default=False,
    ),
]
Token = Annotated[
    Literal["exact_answer_last", "answer_last", "before_answer"], typer.Option(help="The token that probes read.")
]
Site = Annotated[Literal["mlp_out", "attn_out", "resid_post"], typer.Option(help="What they read.")]
Variant = Annotated[Literal["mask", "zero"], typer.Option(help="Knockout before the softmax, or after it.")]
Seeds = Annotated[int, typer.Option(help="How many times the answers are split into halves.")]
BatchSize = Annotated[int, typer.Option(help="Answers in one run of the model.")]


def pathways(
    model: Model = None,
    questions: QuestionSets = None,
    sample: Sample = None,
    seed: Seed = 0,
    prompt: Prompt = None,
    label: Label = "contains",
    max_new_tokens: NewTokens = 32,
    extract: Extract = None,
    token: Token = "exact_answer_last",
    site: Site = "mlp_out",
    variant: Variant = "mask",
    window: Annotated[
        int | None, typer.Option(help="Knock out so many layers around each, not all up to it.", show_default=False)
    ] = None,
    seeds: Seeds = 3,
    controls: Annotated[bool, typer.Option(help="Run the controls too.")] = True,
    saliency: Annotated[bool, typer.Option(help="Measure saliency too.")] = True,
    detection: Annotated[bool, typer.Option(help="Fit detectors of wrong answers too.")] = True,
    batch_size: BatchSize = 64,
    device: Device = None,
    dtype: Dtype = None,
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
    """
    with continues(out):
        from headwater.detection.detection import detect as run_detection
        from headwater.pathways.attention_saliency import saliency as run_saliency
        from headwater.pathways.trace import trace_pathways

        asked = _Asked(questions, sample, seed, prompt, label, max_new_tokens, extract, batch_size)
        read, loaded = asked.questions(model), load_model(model, device, dtype)
        answered = asked.answers(loaded, read, progress=not quiet, out=_part(out, "answers"))
        shared: dict[str, Any] = {"batch_size": batch_size, "progress": not quiet}
        probed: dict[str, Any] = {"site": site, "token": token, "variant": variant, "seeds": seeds}
        found: dict[str, Result] = {"answers": answered}
        traced = found["pathways"] = trace_pathways(
            loaded, answered, window=window, controls=controls, out=_part(out, "pathways"), **probed, **shared
        )
        if saliency:
            found["saliency"] = run_saliency(
                loaded, answered, traced.probe, progress=not quiet, out=_part(out, "saliency")
            )
        if detection:
            found["detection"] = run_detection(loaded, answered, out=_part(out, "detection"), **probed, **shared)
        _finish(found, out, as_json)


def saliency(
    model: Model = None,
    questions: QuestionSets = None,
    sample: Sample = None,
    seed: Seed = 0,
    prompt: Prompt = None,
    label: Label = "contains",
    max_new_tokens: NewTokens = 32,
    extract: Extract = None,
    token: Token = "exact_answer_last",
    site: Site = "mlp_out",
    target: Annotated[
        Literal["cross_entropy", "logit"], typer.Option(help="Of what the gradient is taken, in the figure.")
    ] = "cross_entropy",
    layer: Annotated[
        int | None, typer.Option(help="Of the probe. Default: the one that does best.", show_default=False)
    ] = None,
    batch_size: BatchSize = 64,
    device: Device = None,
    dtype: Dtype = None,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure how much a truthfulness probe hangs on the attention paid to the exact question tokens.

    **Example**

    `headwater saliency meta-llama/Meta-Llama-3-8B --questions triviaqa.json --sample 4000 --extract
    http://localhost:8000/v1 my-model --out runs/saliency`
    """
    with continues(out):
        from headwater.pathways.attention_saliency import saliency as run

        asked = _Asked(questions, sample, seed, prompt, label, max_new_tokens, extract, batch_size)
        read, loaded = asked.questions(model), load_model(model, device, dtype)
        answered = asked.answers(loaded, read, progress=not quiet, out=_part(out, "answers"))
        probe = _probe(loaded, answered, site, token, layer, batch_size, quiet)
        measured = run(loaded, answered, probe, target=target, progress=not quiet, out=_part(out, "saliency"))
        _finish({"answers": answered, "saliency": measured}, out, as_json)


def detect(
    model: Model = None,
    questions: QuestionSets = None,
    sample: Sample = None,
    seed: Seed = 0,
    prompt: Prompt = None,
    label: Label = "contains",
    max_new_tokens: NewTokens = 32,
    extract: Extract = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="question, p_true, logit_mean, logit_min, probe, random_gate, vanilla_experts, mop, pr; repeatable. "
            "Default: all.",
            show_default=False,
        ),
    ] = None,
    token: Token = "exact_answer_last",
    site: Site = "mlp_out",
    variant: Variant = "mask",
    seeds: Seeds = 3,
    batch_size: BatchSize = 64,
    device: Device = None,
    dtype: Dtype = None,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Fit detectors of wrong answers on half of the questions, and measure them on the other half.

    **Examples**

    `headwater detect --method probe --method mop`

    `headwater detect meta-llama/Llama-3.2-1B --questions popqa.jsonl --sample 4000 --out runs/detection`
    """
    with continues(out):
        from headwater.detection.detection import detect as run
        from headwater.detection.methods import METHODS, check_methods

        methods = check_methods(method or METHODS)
        asked = _Asked(questions, sample, seed, prompt, label, max_new_tokens, extract, batch_size)
        read, loaded = asked.questions(model), load_model(model, device, dtype)
        answered = asked.answers(loaded, read, progress=not quiet, out=_part(out, "answers"))
        measured = run(
            loaded,
            answered,
            methods=methods,
            site=site,
            token=token,
            variant=variant,
            seeds=seeds,
            batch_size=batch_size,
            progress=not quiet,
            out=_part(out, "detection"),
        )
        _finish({"answers": answered, "detection": measured}, out, as_json)


@dataclass(frozen=True)
class _Asked:
    """What a model is asked, and how: the options that the three commands share."""

    sources: list[str] | None
    sample: int | None
    seed: int
    prompt: str | None
    label: str
    max_new_tokens: int
    extract: tuple[str, str] | None
    batch_size: int

    def questions(self, model: str | None) -> Questions:
        """Read the questions, before a large model is loaded in vain."""
        import pandas as pd

        from headwater.questions.sources import WORLD_SETS, Questions, load_questions

        if self.sources is None and model not in (None, EMBEDDED):
            raise InputError(f"Which questions shall {model} answer? Give a file with --questions.")
        read = []
        for source in self.sources or WORLD_SETS:
            is_file = source not in WORLD_SETS or Path(source).exists()
            sample = self.sample if self.sample is not None or is_file else DEFAULT_SAMPLE
            read.append(load_questions(source, sample=sample, seed=self.seed))
        names = [name for questions in read for name in questions.datasets]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise InputError(f"Two of the --questions are called {double!r}: give one of them a column dataset.")
        table = pd.concat([questions.table for questions in read], ignore_index=True)
        return Questions(table, ", ".join(questions.source for questions in read))

    def answers(
        self, model: HookedModel, questions: Questions, *, progress: bool, out: Path | None
    ) -> AnsweredQuestions:
        """Let the model answer them."""
        from headwater.questions.answers import answer
        from headwater.questions.extract import EndpointExtractor

        return answer(
            model,
            questions,
            prompt=self.prompt,
            label=self.label,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            extractor=EndpointExtractor(*self.extract) if self.extract else None,
            progress=progress,
            out=out,
        )


def _probe(
    model: HookedModel,
    answered: AnsweredQuestions,
    site: str,
    token: str,
    layer: int | None,
    batch_size: int,
    quiet: bool,
) -> Probe:
    """Fit the probe whose saliency is measured, on all answers together."""
    from headwater.pathways.probes import fit_probes, probe_states
    from headwater.runs.processes import processes

    def fit() -> Probe:
        states = probe_states(model, answered, site=site, token=token, batch_size=batch_size, progress=not quiet)
        probes = fit_probes(states, answered.z, site=site, token=token, groups=answered.table["question"].tolist())
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
