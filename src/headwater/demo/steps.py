"""The findings of the tour, a row each: what is asked and run, the number beside its control, sentences and figures.

The page, its first lines, the report of a command and the words on the screen come from this table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from headwater.demo import numbers as of
from headwater.errors import HeadwaterError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headwater.models.hooked import HookedModel
    from headwater.questions.answers import AnsweredQuestions
    from headwater.questions.states import TokenName
    from headwater.runs.result import Result
    from headwater.runs.view import View

PAIRS = 16


@dataclass
class Seen:
    """The models, and what was found of them so far."""

    model: HookedModel
    """The embedded one."""
    questions: int
    """How many of each set are asked."""
    found: dict[str, Result] = field(default_factory=dict)
    loaded: HookedModel | None = None

    @property
    def real(self) -> HookedModel:
        """The real language model, of the steps that need one."""
        assert self.loaded is not None
        return self.loaded


@dataclass(frozen=True)
class Step:
    """One analysis of the demonstration."""

    title: str
    asks: str
    caption: str
    run: Callable[[Seen, dict[str, Any]], Result]
    needs: Sequence[str] = ()
    companions: Sequence[tuple[str, Callable[[Any], Figure | Axes], str]] = ()
    """Further figures: file name, what draws it, caption."""
    number: Callable[[Any], of.Number] | None = None
    table: Callable[[Any], pd.DataFrame] | None = None
    leads: Sequence[str] = ()
    """How the sentences begin that are above the figure. Default: with each question set, or all of them."""
    concludes: bool = False
    """Whether the last sentence is the one to begin with."""
    is_on_top: bool = True
    """Whether its number is among the five lines on top of the page; the others are folded below them."""
    view: Callable[[Seen, Any], View | None] | None = None
    """What can be looked into, in place of the result's own view; the figure where that is None."""
    beside: tuple[str, Callable[[Seen, Any], View]] | None = None
    """What else can be looked into, under its title."""


def _heads(seen: Seen, options: dict[str, Any]) -> Result:
    from headwater.heads.classify import classify_heads

    return classify_heads(seen.model, **options)


def _answers(seen: Seen, options: dict[str, Any]) -> Result:
    from headwater.questions.answers import answer
    from headwater.questions.sources import load_questions

    return answer(seen.model, load_questions(sample=seen.questions), **options)


def _pathways(token: TokenName) -> Callable[[Seen, dict[str, Any]], Result]:
    def run(seen: Seen, options: dict[str, Any]) -> Result:
        from headwater.pathways.trace import trace_pathways

        return trace_pathways(seen.model, _answered(seen), token=token, **options)

    return run


def _saliency(seen: Seen, options: dict[str, Any]) -> Result:
    from headwater.pathways.attention_saliency import saliency

    traced: Any = seen.found["pathways"]
    return saliency(seen.model, _answered(seen), traced.probe, **options)


def _detection(seen: Seen, options: dict[str, Any]) -> Result:
    from headwater.detection.detection import detect

    return detect(seen.model, _answered(seen), token="before_answer", **options)


def _memorization(seen: Seen, options: dict[str, Any]) -> Result:
    from headwater.likelihood.graph import load_depth_graph
    from headwater.likelihood.profile import memorization

    return memorization(seen.model, load_depth_graph(), layers="all", **options)


def _patching(seen: Seen, options: dict[str, Any]) -> Result:
    from headwater.patching.activation_patching import patch
    from headwater.patching.metrics import logit_difference

    pairs = prompt_pairs(_answered(seen).table)
    clean, corrupted, right, wrong = (list(column) for column in zip(*pairs, strict=True))
    metric = logit_difference(right, wrong)
    return patch(seen.model, clean, corrupted, sites=["resid_pre", "z"], metric=metric, **options)


def _cards(seen: Seen, heads: Any) -> View:
    """The head map, with what each head writes."""
    shown: View = heads.view(model=seen.model)
    return shown


def _attention(seen: Seen, sweep: Any) -> View:
    """The attention in both prompts of the first pair that was patched, dated as the sweep: pages stay equal."""
    clean, corrupted, *_ = sweep.run.options["prompts"]
    cache = seen.model.cache([list(clean[0]), list(corrupted[0])], sites=["pattern"], progress=False)
    cache = replace(cache, run=replace(cache.run, created=sweep.run.created))
    return cache.view(example=[0, 1], values=seen.model)


def _answered(seen: Seen) -> AnsweredQuestions:
    answered: Any = seen.found["answers"]
    return answered


def prompt_pairs(table: pd.DataFrame) -> list[tuple[list[int], list[int], int, int]]:
    """Pair prompts that differ in their subject alone, both answered rightly, with different first tokens.

    Of all wordings of a question, the one with most such prompts is taken.

    Returns:
        (clean tokens, corrupted tokens, first token of the right answer, of the other prompt's), `PAIRS` at most.
    """
    families: dict[object, list[tuple[list[int], int]]] = {}
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


def _figure(name: str, **options: object) -> Callable[[Any], Figure | Axes]:
    """Return what draws a companion."""

    def draw(result: object) -> Figure | Axes:
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
        "The knockout and its controls: as many random question tokens, on the rows that have as many; another "
        "subject; the answer alone.",
    ),
)
STEPS = {
    "heads": Step(
        "What the attention heads do",
        "Each head's parameters are read as a map from words to words and compared with relations between words; "
        "what shuffled pairs would score, and mere copying, do not count (Elhelo & Geva, 2025).",
        "A mark per head, coloured by the category of the relations it implements.",
        _heads,
        number=of.heads,
        table=of.head_table,
        view=_cards,
    ),
    "answers": Step(
        "What the model answers",
        "Four sets of questions about the world the model was trained on, answered greedily; an answer is wrong when "
        "it contains no accepted answer.",
        "Share of the questions answered rightly and wrongly.",
        _answers,
        number=of.answers,
        is_on_top=False,
    ),
    "pathways": Step(
        "Does the truthfulness signal come from the question or from the answer?",
        "A probe at the last token of the answer tells wrong from right answers. Nothing may attend to the question's "
        "exact tokens in layers up to each: Q-anchored is what then flips (Luo et al., 2026). A split by the flip "
        "always looks like two groups, so the controls decide.",
        "ΔP, the change of the probe's probability of its own prediction, against the layer; bands are 95 %.",
        _pathways("exact_answer_last"),
        number=of.pathways,
        needs=("answers",),
        companions=COMPANIONS,
        table=of.pathway_table,
        concludes=True,
    ),
    "pathways_before": Step(
        "The same, read before the answer",
        "The probe reads the token before the answer instead: there the model must have decided already, and nothing "
        "can come from the answer itself.",
        "ΔP against the layer, of probes at the token before the answer.",
        _pathways("before_answer"),
        is_on_top=False,
        number=of.pathways,
        needs=("answers",),
        companions=COMPANIONS,
        table=of.pathway_table,
        concludes=True,
    ),
    "saliency": Step(
        "What the probe hangs on",
        "Saliency |A · ∂L/∂A| of the attention that the answer's tokens, or all tokens, pay to the question's exact "
        "tokens. A confident and right probe has no cross-entropy gradient whatever flows: the logit's is given too.",
        "Densities of S(E_Q→E_A) and S(E_Q→*) per example.",
        _saliency,
        number=of.saliency,
        is_on_top=False,
        needs=("answers", "pathways"),
    ),
    "detection": Step(
        "Can wrong answers be detected?",
        "Detectors are fitted on half of each question set and measured on the other half; the first row needs no "
        "model, only the question's relation, popularity and depth. Probes read the token before the answer.",
        "AUC with 95 % intervals over questions; the dashed line is chance.",
        _detection,
        number=of.detection,
        needs=("answers",),
        table=of.detection_table,
    ),
    "memorization": Step(
        "Memorization by question depth",
        "Questions of depth 2 and 3 join facts that questions of depth 1 ask for. Min-K% is the mean negative "
        "log-likelihood of the least likely tokens of the answer: higher is less likely seen.",
        "Min-K% by depth, and the density of the score gap from depth 2 to 3 where Min-K% is in its lowest quarter "
        "(25%) and in its highest (75%).",
        _memorization,
        number=of.memorization,
        companions=(("layers", _figure("layer_curves"), "The same, read off every layer by the logit lens."),),
        leads=("Min-K%, median", "The medians", "From depth 1 to 3", "Among answers", "The score gap", "Over all"),
        table=of.depth_table,
    ),
    "patching": Step(
        "Where an answer can be changed",
        "Pairs of questions that differ in their subject alone. An activation of the one run is written into the "
        "other, at each layer and position or head: how far does the answer come back?",
        "Effect on the logit difference of the two answers, mean over pairs.",
        _patching,
        number=of.patching,
        needs=("answers",),
        table=of.patching_table,
        beside=("What each token of the first pair reads, head by head", _attention),
    ),
}
