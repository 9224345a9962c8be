"""The command `headwater demo`: every analysis on the model that comes with headwater, and a page that shows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headwater.cli.command import AsJson, Quiet, continues, is_main, plain, report, screen, write
from headwater.errors import HeadwaterError, RunFolderError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headwater.demo.page import Section
    from headwater.models.hooked import HookedModel
    from headwater.questions.answers import AnsweredQuestions
    from headwater.runs.result import Result

QUESTIONS, PAIRS = 300, 16
INDEX = "index.html"


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page, figures and tables.")] = Path("runs/demo"),
    questions: Annotated[int, typer.Option(help="Questions of each of the four sets.")] = QUESTIONS,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run every analysis on the model that comes with headwater, and show them on one page, index.html.

    A few minutes on two processor cores. What fails is named, and the others are kept.

    **Example**

    `headwater demo --out runs/demo`
    """
    with continues(out):
        from headwater.models.loading import load
        from headwater.runs.findings import records_of

        tour = _Tour(load(), out, questions, not quiet)
        for number, (name, step) in enumerate(STEPS.items(), start=1):
            if not quiet:
                screen.print(f"[{number}/{len(STEPS)}] {step.title}", markup=False)
            tour.take(name, step)
        if not is_main():
            return
        page = tour.page()
    summaries: dict[str, Any] = {name: result.findings() for name, result in tour.found.items()}
    if "patching" in summaries:
        summaries["patching"] = records_of(tour.found["patching"].summary())
    analyses = summaries | {name: {"failed": why} for name, why in tour.failed.items()}
    report({"model": tour.model.name, "analyses": analyses, "files": [str(page), *tour.files]}, as_json, _show)
    if tour.failed:
        raise typer.Exit(1)


@dataclass
class _Tour:
    """The results so far."""

    model: HookedModel
    out: Path
    questions: int
    progress: bool
    found: dict[str, Result] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def take(self, name: str, step: _Step) -> None:
        """Run one analysis, or read it if it is done; what goes wrong is kept as its failure."""
        from headwater.figures.style import save_figure

        missing = next((needed for needed in step.needs if needed not in self.found), None)
        if missing is not None:
            self.failed[name] = f"It needs the analysis {missing!r}, which failed."
            return
        try:
            result = step.run(self, {"progress": self.progress, "out": self.out / name})
            self.files += write(result, self.out / name, name)
            for stem, draw, _ in step.companions if is_main() else ():
                self.files += map(str, save_figure(draw(result), self.out / name / stem, ("png", "svg", "pdf")))
            self.found[name] = result
        except RunFolderError:
            raise
        except Exception as error:  # one analysis must not take the others with it
            self.failed[name] = str(error) if isinstance(error, HeadwaterError) else f"{type(error).__name__}: {error}"

    def page(self) -> Path:
        """Write the page."""
        from headwater.demo.page import write_index

        run = next(iter(self.found.values())).run if self.found else None
        sections = [self._section(name, step) for name, step in STEPS.items()]
        title = "headwater on its embedded model"
        return write_index(sections, self.out / INDEX, title=title, run=run)

    def _section(self, name: str, step: _Step) -> Section:
        from headwater.demo.page import Section, leading

        if name in self.failed:
            return Section(step.title, step.asks, failure=self.failed[name])
        result = self.found[name]
        said = result.report()
        conclusion = [said.pop()] if step.concludes else []
        lead, further = leading(said, step.leads or [f"{name}:" for name in getattr(result, "datasets", ())])
        return Section(
            step.title,
            step.asks,
            lead=conclusion + lead,
            further=further,
            figures=[
                (self.out / name / f"{stem}.png", caption)
                for stem, caption in ((name, step.caption), *((stem, caption) for stem, _, caption in step.companions))
            ],
            table=step.table(result) if step.table else None,
            folder=self.out / name,
        )


@dataclass(frozen=True)
class _Step:
    """One analysis of the demonstration."""

    title: str
    asks: str
    caption: str
    run: Callable[[_Tour, dict[str, Any]], Result]
    needs: Sequence[str] = ()
    companions: Sequence[tuple[str, Callable[[Any], Figure | Axes], str]] = ()
    """Further figures: file name, what draws it, caption."""
    table: Callable[[Any], pd.DataFrame] | None = None
    leads: Sequence[str] = ()
    """How the sentences begin that stand above the figure. Default: with each question set, or all of them."""
    concludes: bool = False
    """Whether the last sentence is the one to begin with."""


def _heads(tour: _Tour, options: dict[str, Any]) -> Result:
    from headwater.heads.classify import classify_heads

    return classify_heads(tour.model, **options)


def _answers(tour: _Tour, options: dict[str, Any]) -> Result:
    from headwater.questions.answers import answer
    from headwater.questions.sources import load_questions

    return answer(tour.model, load_questions(sample=tour.questions), **options)


def _pathways(token: str) -> Callable[[_Tour, dict[str, Any]], Result]:
    def run(tour: _Tour, options: dict[str, Any]) -> Result:
        from headwater.pathways.trace import trace_pathways

        return trace_pathways(tour.model, _answered(tour), token=token, **options)

    return run


def _saliency(tour: _Tour, options: dict[str, Any]) -> Result:
    from headwater.pathways.attention_saliency import saliency

    traced: Any = tour.found["pathways"]
    return saliency(tour.model, _answered(tour), traced.probe, **options)


def _detection(tour: _Tour, options: dict[str, Any]) -> Result:
    from headwater.detection.detection import detect

    return detect(tour.model, _answered(tour), token="before_answer", **options)


def _memorization(tour: _Tour, options: dict[str, Any]) -> Result:
    from headwater.likelihood.graph import load_depth_graph
    from headwater.likelihood.profile import memorization

    return memorization(tour.model, load_depth_graph(), layers="all", **options)


def _patching(tour: _Tour, options: dict[str, Any]) -> Result:
    from headwater.patching.metrics import logit_difference
    from headwater.patching.sweep import patch

    pairs = prompt_pairs(_answered(tour).table)
    clean, corrupted, right, wrong = (list(column) for column in zip(*pairs, strict=True))
    metric = logit_difference(right, wrong)
    return patch(tour.model, clean, corrupted, sites=["resid_pre", "z"], metric=metric, **options)


def _answered(tour: _Tour) -> AnsweredQuestions:
    answered: Any = tour.found["answers"]
    return answered


def prompt_pairs(table: pd.DataFrame) -> list[tuple[list[int], list[int], int, int]]:
    """Pair prompts that differ in their subject alone, both answered rightly, with different first tokens.

    Of all wordings of a question, the one with most such prompts is taken.

    Returns:
        (clean tokens, corrupted tokens, first token of the right answer, of the other prompt's), `PAIRS` at most.
    """
    families: dict[Any, list[tuple[list[int], int]]] = {}
    for row in table[table["z"] == 0].to_dict("records"):
        prompt, first = list(row["tokens"][: row["answer_start"]]), row["tokens"][row["answer_start"]]
        subject = set(row["subject_tokens"])
        wording = tuple(-1 if place in subject else token for place, token in enumerate(prompt))
        families.setdefault(wording, []).append((prompt, first))
    best = max(families.values(), key=lambda family: (len({first for _, first in family}) > 1, len(family)), default=[])
    pairs = [
        (clean, corrupted, right, wrong) for (clean, right), (corrupted, wrong) in pairwise(best) if right != wrong
    ]
    if not pairs:
        raise HeadwaterError("No two questions in the same words are answered rightly and differently: ask more.")
    return pairs[:PAIRS]


def _head_table(result: Any) -> pd.DataFrame:
    import pandas as pd

    rows = pd.DataFrame(result.findings()["relations"]).sort_values("best_excess", ascending=False).head(10)
    names = {"best_head": "best head", "best_score": "score", "best_expected": "expected", "best_excess": "excess"}
    return rows.rename(columns=names)


def _pathway_table(result: Any) -> pd.DataFrame:
    import pandas as pd

    rows = pd.json_normalize(result.findings()["datasets"])
    names = {
        "dataset": "dataset",
        "examples": "answers",
        "best_layer": "l*",
        "auc": "AUC",
        "auc_relation": "AUC of relation alone",
        "flip_rate": "share that flips",
        "flip_rate_same_rows": "of rows with as many random words",
        "flip_rate_random": "flips, random words",
        "delta_p.Q-anchored": "ΔP, Q-anchored (points)",
        "delta_p.A-anchored": "ΔP, A-anchored (points)",
        "two_modes_survive": "two modes survive",
    }
    return rows[[name for name in names if name in rows]].rename(columns=names)


def _detection_table(result: Any) -> pd.DataFrame:
    import pandas as pd

    from headwater.detection.evaluation import NAMES

    sets = result.findings()["datasets"]
    methods = [NAMES[method] for method in sets[0]["auc"]]
    return pd.DataFrame({"AUC of": methods} | {row["dataset"]: list(row["auc"].values()) for row in sets})


def _depth_table(result: Any) -> pd.DataFrame:
    import pandas as pd

    medians = result.findings()["median_min_k"]
    return pd.DataFrame({"depth": list(medians), "median Min-K% (nats)": list(medians.values())})


def _patching_table(result: Any) -> pd.DataFrame:
    cells = result.summary(value="normalized_effect").dropna(axis=1, how="all")
    order = cells["mean"].abs().sort_values(ascending=False).index
    return cells.loc[order].groupby("site", sort=False).head(4).drop(columns=["metric", "p_value"])


def _figure(name: str, **options: Any) -> Callable[[Any], Figure | Axes]:
    """Return what draws a companion."""

    def draw(result: Any) -> Figure | Axes:
        from headwater import figures

        drawn: Figure | Axes = getattr(figures, name)([result] if name == "delta_p" else result, **options)
        return drawn

    return draw


COMPANIONS = (
    (
        "crossed",
        _figure("delta_p", split_by="cross-fitted"),
        "The same with modes taken from another seed's probe, fitted on other answers. Both probes read the same "
        "states, so one population stays apart as well: this describes the split, and tests nothing.",
    ),
    (
        "logit_changes",
        _figure("logit_changes"),
        "All changes of the probe's logit at l*. Two mechanisms would show as two peaks also within each relation, "
        "which is what is tested; all together may have two because relations, or predictions, differ.",
    ),
    (
        "controls",
        _figure("controls"),
        "The knockout beside its controls: as many random question tokens, on the rows that have as many; another "
        "subject; the answer alone.",
    ),
)
STEPS = {
    "heads": _Step(
        "What the attention heads do",
        "Each head's parameters are read as a map from words to words and compared with relations between words; "
        "what shuffled pairs would score, and mere copying, do not count (Elhelo & Geva, 2025).",
        "A mark per head, coloured by the category of the relations it implements.",
        _heads,
        table=_head_table,
    ),
    "answers": _Step(
        "What the model answers",
        "Four sets of questions about the world the model was trained on, answered greedily; an answer is wrong when "
        "no accepted answer stands in it.",
        "Share of the questions answered rightly and wrongly.",
        _answers,
    ),
    "pathways": _Step(
        "Does the truthfulness signal come from the question or from the answer?",
        "A probe at the last token of the answer tells wrong from right answers. Nothing may attend to the question's "
        "exact tokens in layers up to each: Q-anchored is what then flips (Luo et al., 2026). A split by the flip "
        "always looks like two groups, so the controls decide.",
        "ΔP, the change of the probe's probability of its own prediction, against the layer; bands are 95 %.",
        _pathways("exact_answer_last"),
        needs=("answers",),
        companions=COMPANIONS,
        table=_pathway_table,
        concludes=True,
    ),
    "pathways_before": _Step(
        "The same, read before the answer",
        "The probe reads the token before the answer instead: there the model must have decided already, and nothing "
        "can come from the answer itself.",
        "ΔP against the layer, of probes at the token before the answer.",
        _pathways("before_answer"),
        needs=("answers",),
        companions=COMPANIONS,
        table=_pathway_table,
        concludes=True,
    ),
    "saliency": _Step(
        "What the probe hangs on",
        "Saliency |A · ∂L/∂A| of the attention that the answer's tokens, or all tokens, pay to the question's exact "
        "tokens. A confident and right probe has no cross-entropy gradient whatever flows: the logit's is given too.",
        "Densities of S(E_Q→E_A) and S(E_Q→*) per example.",
        _saliency,
        needs=("answers", "pathways"),
    ),
    "detection": _Step(
        "Can wrong answers be detected?",
        "Detectors are fitted on half of each question set and measured on the other half; the first row needs no "
        "model, only the question's relation, popularity and depth. Probes read the token before the answer.",
        "AUC with 95 % intervals over questions; the dashed line is chance.",
        _detection,
        needs=("answers",),
        table=_detection_table,
    ),
    "memorization": _Step(
        "Memorization by question depth",
        "Questions of depth 2 and 3 join facts that questions of depth 1 ask for. Min-K% is the mean negative "
        "log-likelihood of the least likely tokens of the answer: higher is less likely seen.",
        "Min-K% by depth, and the density of the score gap from depth 2 to 3 where Min-K% is in its lowest quarter "
        "(25%) and in its highest (75%).",
        _memorization,
        companions=(("layers", _figure("layer_curves"), "The same, read off every layer by the logit lens."),),
        leads=("Min-K%, median", "The medians", "From depth 1 to 3", "Among answers", "The score gap", "Over all"),
        table=_depth_table,
    ),
    "patching": _Step(
        "Where an answer can be changed",
        "Pairs of questions that differ in their subject alone. An activation of the one run is written into the "
        "other, at each layer and position or head: how far does the answer come back?",
        "Effect on the logit difference of the two answers, mean over pairs.",
        _patching,
        needs=("answers",),
        table=_patching_table,
    ),
}


def _show(summary: dict[str, Any], console: Console) -> None:
    for name, found in summary["analyses"].items():
        failed = isinstance(found, dict) and "failed" in found
        state = f"[red]failed[/]: {plain(found['failed'])}" if failed else "done"
        console.print(f"{STEPS[name].title}: {state}")
    console.print(f"\nOpen [bold]{plain(summary['files'][0])}[/] in a browser.")
