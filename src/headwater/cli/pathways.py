"""The commands `headwater pathways`, `headwater saliency` and `headwater detect`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

import headwater as hw
from headwater.cli.options import (
    ANY_TEXT,
    Extract,
    Load,
    Model,
    ProbeToken,
    RunOptions,
    Variant,
    documented_by,
    is_main,
    read_extractor,
    report,
)
from headwater.errors import InputError
from headwater.models.packaged import BASE, is_embedded

if TYPE_CHECKING:
    from headwater.runs.result import Result

DEFAULT_SAMPLE = 500


@documented_by("pathways/trace:trace_pathways")
@Parameter(name="*")
@dataclass(frozen=True)
class ProbeAt:
    """Options of the states that probes read."""

    site: Literal["mlp_out", "attn_out", "resid_post"] = "mlp_out"
    token: ProbeToken = "exact_answer_last"


@documented_by("questions/answers:answer")
@Parameter(name="*")
@dataclass(frozen=True)
class Answering:
    """How to prompt a model, and how to read its answers.

    Args:
        examples: A question file whose questions, each with its first answer, come before every question, in the same
            prompt or as turns of a chat; `none` for the bare question, as published. Default: four of headwater's own
            if the model's context is long enough for them; none before a --prompt.
        label: When an answer is right: an accepted answer occurs in it ("contains"), begins it ("starts") or is all of
            it ("exact"), after normalisation. `headwater.questions.labels` has the sources and limits.
        max_new_tokens: The token limit of an answer; an unfinished one is left out. Default: 32, in a chat 64.
    """

    prompt: Annotated[str | None, ANY_TEXT] = None
    examples: str | None = None
    label: Literal["contains", "exact", "starts"] = "contains"
    max_new_tokens: int | None = None
    batch_size: int = 64
    extract: Extract = None

    def read(self) -> dict[str, Any]:
        """Return these options as arguments of `hw.answer`."""
        return {
            "prompt": self.prompt, "examples": _examples(self.examples), "label": self.label,
            "max_new_tokens": self.max_new_tokens, "batch_size": self.batch_size,
            "extractor": read_extractor(self.extract),
        }  # fmt: skip


@documented_by("questions/sources:load_questions")
@Parameter(name="*")
@dataclass(frozen=True)
class QuestionOptions(Answering):
    """Which questions to ask a model, and how.

    Args:
        questions: Question file (PopQA, TriviaQA, HotpotQA, NQ-open, or a table), or a set of the embedded model's
            world; repeatable. Default: the four sets of its world.
        sample: Number of questions drawn from each set. Default: all; 500 of each of the world's.
    """

    questions: list[str] | None = None
    sample: int | None = None
    seed: int = 0

    def answered(self, model: str | None, load: Load, run: RunOptions) -> tuple[hw.HookedModel, hw.AnsweredQuestions]:
        """Load the model, and let it answer the questions."""
        from headwater.questions.sources import WORLD_SETS, Questions

        # Checked before a large model is loaded in vain.
        if self.questions is None and not is_embedded(model or BASE):
            raise InputError(f"There are no questions for {model}: pass a file with --questions.")
        read = []
        for source in self.questions or WORLD_SETS:
            of_world = source in WORLD_SETS and not Path(source).exists()
            sample = DEFAULT_SAMPLE if of_world and self.sample is None else self.sample
            read.append(hw.load_questions(source, sample=sample, seed=self.seed))
        questions, how = Questions.joined(read), self.read()
        loaded = load.model(model)
        return loaded, hw.answer(loaded, questions, **run.kept("answers"), **how)


@documented_by("pathways/trace:trace_pathways")
def pathways(
    model: Model = None,
    *,
    answering: QuestionOptions = QuestionOptions(),
    probe: ProbeAt = ProbeAt(),
    variant: Variant = "mask",
    edges: Literal["after", "answer"] = "after",
    window: int | None = None,
    seeds: int = 3,
    controls: bool = True,
    saliency: bool = True,
    detection: bool = True,
    load: Load = Load(),
    run: RunOptions = RunOptions(),
) -> None:
    """Test whether a model's truthfulness signal flows from the question or from its answer.

    Answers the questions, locates their exact tokens, fits probes, knocks out the question at every layer, with
    controls; then measures saliency and the detection of wrong answers (Luo et al., ACL 2026).

    **Examples**

    - `headwater pathways`
    - `headwater pathways meta-llama/Llama-3.2-1B --questions popqa.jsonl --sample 4000 --out runs/popqa`
    - `headwater pathways gpt2 --questions triviaqa.json --extract rules --window 9`

    Args:
        saliency: Measure saliency too.
        detection: Fit detectors of wrong answers too.
    """
    loaded, answered = answering.answered(model, load, run)
    results: dict[str, Result] = {"answers": answered}
    results["pathways"] = traced = hw.trace_pathways(
        loaded, answered, variant=variant, edges=edges, window=window, seeds=seeds, controls=controls,
        batch_size=answering.batch_size, **run.kept("pathways"), **vars(probe),
    )  # fmt: skip
    if saliency:
        results["saliency"] = hw.saliency(loaded, answered, traced.probe, **run.kept("saliency"))
    if detection:
        results["detection"] = hw.detect(
            loaded, answered, variant=variant, seeds=seeds, batch_size=answering.batch_size,
            **run.kept("detection"), **vars(probe),
        )  # fmt: skip
    _finish(results, run)


@documented_by("pathways/attention_saliency:saliency")
def saliency(
    model: Model = None,
    *,
    answering: QuestionOptions = QuestionOptions(),
    probe: ProbeAt = ProbeAt(),
    target: Literal["cross_entropy", "logit"] = "cross_entropy",
    layer: int | None = None,
    load: Load = Load(),
    run: RunOptions = RunOptions(),
) -> None:
    """Measure the saliency of the attention edges from the exact question tokens.

    Shows how much a truthfulness probe depends on the attention paid to these tokens.

    **Example**

    `headwater saliency meta-llama/Meta-Llama-3-8B --questions triviaqa.json --sample 4000 --extract rules
    --out runs/saliency`

    Args:
        layer: Layer of the probe. Default: the best one.
    """
    from headwater.probes.linear import fit_probes
    from headwater.questions.states import probe_states
    from headwater.runs.folder import processes

    loaded, answered = answering.answered(model, load, run)

    def fit() -> hw.Probe:
        """Fit the probe on all answers together."""
        states = probe_states(loaded, answered, batch_size=answering.batch_size, progress=run.progress, **vars(probe))
        groups = answered.table["question"].tolist()
        probes = fit_probes(states, answered.z, groups=groups, **vars(probe))
        return probes[probes.best if layer is None else layer]

    fitted = processes().on_main("the probe", fit)  # one for all, since the last digits differ between machines
    measured = hw.saliency(loaded, answered, fitted, target=target, **run.kept("saliency"))
    _finish({"answers": answered, "saliency": measured}, run)


@documented_by("detection/detection:detect")
def detect(
    model: Model = None,
    *,
    answering: QuestionOptions = QuestionOptions(),
    method: list[str] | None = None,
    probe: ProbeAt = ProbeAt(),
    variant: Variant = "mask",
    seeds: int = 3,
    load: Load = Load(),
    run: RunOptions = RunOptions(),
) -> None:
    """Fit detectors of wrong answers on half of each question set, and measure them on the other half.

    The detectors are those of Luo et al. (ACL 2026) and their baselines.

    **Examples**

    - `headwater detect --method probe --method mop`
    - `headwater detect meta-llama/Llama-3.2-1B --questions popqa.jsonl --sample 4000 --out runs/detection`
    - `headwater detect gpt2 --questions triviaqa.json --extract rules`

    Args:
        method: Detectors to fit: question, p_true, logit_mean, logit_min, probe, random_gate, vanilla_experts, mop, pr
            (`headwater.detection.methods`). Default: all.
    """
    from headwater.detection.methods import METHODS
    from headwater.options import checked_names

    methods = METHODS if method is None else method
    checked_names("methods", methods, METHODS)
    loaded, answered = answering.answered(model, load, run)
    measured = hw.detect(
        loaded, answered, methods=methods, variant=variant, seeds=seeds, batch_size=answering.batch_size,
        **run.kept("detection"), **vars(probe),
    )  # fmt: skip
    _finish({"answers": answered, "detection": measured}, run)


def _examples(source: str | None) -> list[tuple[str, str]] | None:
    """Return the questions and answers of the file that `--examples` names; an empty list for "none"."""
    if source is None or source == "none":
        return None if source is None else []
    table = hw.load_questions(source).table
    return [(question, answers[0]) for question, answers in zip(table["question"], table["answers"], strict=True)]


def _finish(results: dict[str, Result], run: RunOptions) -> None:
    """Write figures, tables and the report, and print the findings."""
    if not is_main():
        return
    files = [file for name, result in results.items() for file in run.write(result, name, name)]
    files += run.write_report(results)
    summary: dict[str, Any] = {name: result.findings() for name, result in results.items()}
    report(summary | {"files": files}, {name: result.report() for name, result in results.items()}, run.as_json)
