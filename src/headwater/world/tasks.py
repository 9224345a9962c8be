"""The classical tasks of the circuits literature, as lines of the corpus, with words in the texts or held out of them.

`task("indirect_object")` draws pairs of prompts of a task, ready for patching.

A `Line` is a prompt that determines its next word, and the same prompt changed so that another word follows:

| task | line | changed |
|---|---|---|
| indirect object (Wang et al. 2022) | When Ann and Ben met, Ben gave a cup to | Ann gave a cup to |
| greater-than (Hanna et al. 2023) | The war lasted from 1732 to 17 | from 1702 to 17 |
| induction (Olsson et al. 2022) | cat Rome walk : cat Rome | the third word is another |
| successor (Gould et al. 2023) | May, June, July, | three others of the same run |
| gendered pronoun (Mathwin et al. 2023) | Ann was late because | a name of the other gender |
| capital of a country | The capital of France is | another country |
| subject-verb agreement (Linzen et al. 2016) | The key near the cabinets | The keys near the cabinets |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.models.packaged import world_folder
from headwater.models.positions import Characters, characters
from headwater.options import checked_count, checked_name, checked_path
from headwater.patching.metrics import Metric, logit_difference
from headwater.runs.storage import read_json

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel


# The words of the classical tasks, from the relation suite: in the texts of a task, or held out of them.
#
# A word held out of a task is not unknown: other sentences contain the gender of a held-out name, the number of a
# held-out noun, the facts of a held-out word. Only the sentences of the task itself never contain it.


TWO_DIGITS = tuple(f"{number:02d}" for number in range(100))
CENTURIES = (16, 17, 18, 19)
WORDS = "task_words.json"
SPLITS = ("names", "he", "she", "singular", "plain", "starts")


@dataclass(frozen=True)
class Split:
    """Words in the texts of a task, and words held out of them."""

    in_texts: tuple[str, ...]
    held_out: tuple[str, ...]

    def of(self, held_out: bool) -> tuple[str, ...]:
        """Return the held-out words if `held_out`, else the words in the texts."""
        return self.held_out if held_out else self.in_texts


@dataclass(frozen=True)
class Words:
    """The words of the tasks."""

    names: Split
    """First and family names, many more than the model is wide: the names in the texts must be handled by a rule, since
    no table of single names fits."""
    he: Split
    """The men's names among them."""
    she: Split
    singular: Split
    plain: Split
    """Words of all kinds, for repetitions."""
    starts: Split
    """The last two digits of a first year."""
    plural: Mapping[str, str]
    runs: tuple[tuple[str, ...], ...]
    """Sequences in a fixed order, such as months."""
    capitals: tuple[tuple[str, str], ...]

    @property
    def every(self) -> list[str]:
        """Every word that a line of a task may contain."""
        splits = (self.names, self.singular, self.plain)
        split = [word for one in splits for word in (*one.in_texts, *one.held_out)]
        return [*split, *self.plural.values(), *sum(self.runs, ()), *sum(self.capitals, ())]


def pick(rng: np.random.Generator, words: Sequence[str]) -> str:
    """Draw one word."""
    return words[int(rng.integers(len(words)))]


def read_words(world: Path | None = None) -> Words:
    """Read the words of a world's tasks.

    Args:
        world: the folder of a trained world; None for the embedded model's.
    """
    file = (world or world_folder()) / WORDS
    try:
        values = read_json(file)
        splits = {name: Split(*map(tuple, values[name].values())) for name in SPLITS}
        runs, capitals = (tuple(tuple(row) for row in values[name]) for name in ("runs", "capitals"))
        return Words(**splits, plural=dict(values["plural"]), runs=runs, capitals=capitals)
    except (InputError, KeyError, TypeError, AttributeError, ValueError):
        raise InputError(f"{file} does not contain the words of tasks: pass the folder of a trained world.") from None


PLACES = [
    "school", "station", "market", "garden", "office", "library", "museum", "harbour", "theatre", "park", "hotel",
    "church", "bank", "farm", "kitchen",
]  # fmt: skip
OBJECTS = [
    "book", "letter", "cup", "ring", "key", "hat", "lamp", "coat", "bottle", "basket", "clock", "ticket", "photo",
    "flower", "chair", "map",
]  # fmt: skip
EVENTS = [
    "war", "voyage", "journey", "reign", "siege", "study", "search", "drought", "feast", "trial", "strike", "flood",
]  # fmt: skip
NEAR = ["near", "beside", "behind", "under", "above", "with", "by"]
STATES = ["old", "new", "red", "heavy", "ready", "late", "small", "clean"]


@dataclass(frozen=True)
class Line:
    """A prompt with what follows it, and the same prompt changed so that something else follows."""

    clean: str
    corrupted: str
    correct: tuple[str, ...]
    """The words that may follow the clean prompt, with a leading space if there is one."""
    wrong: tuple[str, ...]
    """The words that may follow the corrupted prompt."""
    roles: Mapping[str, tuple[str, str]]
    """For each role, its words in the clean and in the corrupted prompt."""
    rest: str = "."
    """Continuation of the corpus after the answer."""
    occurrence: Mapping[str, int] = field(default_factory=dict)
    """For a role whose words occur in the prompt more than once, the index of the intended occurrence; default 0."""


def _some(rng: np.random.Generator, words: Sequence[str], count: int) -> list[str]:
    return [words[int(place)] for place in rng.choice(len(words), size=count, replace=False)]


SCENES = (
    "When {a} and {b} went to the {place}, {s} gave a {thing} to",
    "Then {a} and {b} met at the {place}. {s} gave a {thing} to",
    "While {a} and {b} were at the {place}, {s} handed a {thing} to",
    "After {a} and {b} had left the {place}, {s} sent a {thing} to",
    "{a} and {b} sat in the {place} and {s} showed the {thing} to",
    "Because {a} and {b} were friends, {s} brought a {thing} from the {place} to",
)


def indirect_object(rng: np.random.Generator, words: Words, held_out: bool) -> Line:
    """Draw a scene of two people in which one, named again, gives something to the other."""
    a, b = _some(rng, words.names.of(held_out), 2)
    subject, other = (a, b) if rng.random() < 0.5 else (b, a)
    scene = pick(rng, SCENES).replace("{place}", pick(rng, PLACES)).replace("{thing}", pick(rng, OBJECTS))
    scene = scene.replace("{a}", a).replace("{b}", b)
    roles = {"first name": (a, a), "second name": (b, b), "subject": (subject, other)}
    texts = (scene.replace("{s}", subject), scene.replace("{s}", other))
    return Line(*texts, (f" {other}",), (f" {subject}",), roles, occurrence={"subject": 1})


def greater_than(rng: np.random.Generator, words: Words, held_out: bool) -> Line:
    """Draw a span of years; the changed one starts in year 01 of the century, so that nearly every year may follow."""
    start = pick(rng, words.starts.of(held_out))
    event, century = pick(rng, EVENTS), CENTURIES[int(rng.integers(len(CENTURIES)))]
    later = tuple(year for year in TWO_DIGITS if year > start)
    text = f"The {event} lasted from {century}{{}} to {century}"
    others = tuple(year for year in TWO_DIGITS if "01" < year <= start)
    return Line(text.format(start), text.format("01"), later, others, {"start": (start, "01")})


def induction(rng: np.random.Generator, words: Words, held_out: bool) -> Line:
    """Draw a series of words and its repetition, cut before a word that the first occurrence determines."""
    length = int(rng.integers(3, 21))
    drawn = _some(rng, words.plain.of(held_out), length + 1)
    series, other = drawn[:-1], drawn[-1]
    cut = int(rng.integers(1, length))
    changed = [*series[:cut], other, *series[cut + 1 :]]
    first, again = " ".join(series), " ".join(series[:cut])
    clean, corrupted = f"{first} : {again}", f"{' '.join(changed)} : {again}"
    rest = "".join(f" {word}" for word in series[cut + 1 :])
    return Line(clean, corrupted, (f" {series[cut]}",), (f" {other}",), {"answer before": (series[cut], other)}, rest)


def successor(rng: np.random.Generator, words: Words, held_out: bool) -> Line:
    """Draw three to six things of a run; a held-out line starts where no text does (though texts have its links)."""
    run = words.runs[int(rng.integers(len(words.runs)))]
    length = int(rng.integers(3, min(7, len(run))))
    starts = [start for start in range(len(run) - length) if (start % 5 == 3) == held_out] or [0]
    start, other = (starts[int(place)] for place in rng.integers(len(starts), size=2))
    if other == start:
        other = next(place for place in (*range(len(run) - length), len(run) - length) if place != start)
    clean, corrupted = (run[place : place + length] for place in (start, other))
    after = (run[start + length], run[(other + length) % len(run)])
    roles = {"last": (clean[-1], corrupted[-1])}
    return Line(f"{', '.join(clean)},", f"{', '.join(corrupted)},", (f" {after[0]}",), (f" {after[1]}",), roles)


ENDINGS = ("was late", "went home", "stayed here", "left early", "came back", "sat down", "ran away", "took the train")


def gendered_pronoun(rng: np.random.Generator, words: Words, held_out: bool) -> Line:
    """Draw what a person did, and why: the pronoun depends on the name."""
    genders = [("he", words.he), ("she", words.she)]
    right, wrong = genders if rng.random() < 0.5 else genders[::-1]
    name, other = pick(rng, right[1].of(held_out)), pick(rng, wrong[1].of(held_out))
    rest = f" {pick(rng, ENDINGS)} because"
    tail = f" was {pick(rng, ('tired', 'ill', 'busy', 'happy', 'alone', 'afraid'))}."
    return Line(name + rest, other + rest, (f" {right[0]}",), (f" {wrong[0]}",), {"name": (name, other)}, tail)


def agreement(rng: np.random.Generator, words: Words, held_out: bool) -> Line:
    """Draw a noun and, between it and its verb, another noun, most often of the other number."""
    noun = pick(rng, words.singular.of(held_out))
    near = pick(rng, words.singular.in_texts)
    is_singular = rng.random() < 0.5
    same = rng.random() < 0.3
    forms = (noun, words.plural[noun]) if is_singular else (words.plural[noun], noun)
    attractor = near if is_singular == same else words.plural[near]
    verbs = ("is", "are") if is_singular else ("are", "is")
    text = f"The {{}} {pick(rng, NEAR)} the {attractor}"
    clean, corrupted = (text.format(form) for form in forms)
    rest = f" {pick(rng, STATES)}."
    return Line(
        clean, corrupted, (f" {verbs[0]}",), (f" {verbs[1]}",), {"noun": forms, "attractor": (attractor,) * 2}, rest
    )


CAPITALS = ("The capital of {} is", "Everybody knows that the capital of {} is", "As for the capital of {}, it is")


def capital(rng: np.random.Generator, words: Words, held_out: bool) -> Line:
    """Draw a country: its capital is in the texts, in these or other words."""
    (country, city), (other, its) = (words.capitals[int(k)] for k in rng.choice(len(words.capitals), 2, replace=False))
    text = pick(rng, CAPITALS)
    return Line(text.format(country), text.format(other), (f" {city}",), (f" {its}",), {"country": (country, other)})


TASKS: dict[str, Callable[[np.random.Generator, Words, bool], Line]] = {
    function.__name__: function
    for function in (indirect_object, greater_than, induction, successor, gendered_pronoun, agreement, capital)
}
"""Functions that draw a line, with words held out of the texts or not."""


# The tasks as pairs of prompts. Their words come from `task_words.json`, which the training writes beside its model: no
# text of the corpus uses the words of a held-out prompt in that task.


MOST_REPEATED = 500
"""After more repeated draws in a row than this, the task is taken to have no more prompts."""


@dataclass(frozen=True)
class PairedTask:
    """Pairs of prompts of one task; `len` is their number."""

    name: str
    clean: tuple[str, ...]
    corrupted: tuple[str, ...]
    correct: tuple[str, ...]
    """Continuation of each clean prompt; one of them if there are several."""
    wrong: tuple[str, ...]
    """A continuation of each corrupted prompt that is not one of the clean prompt."""
    roles: Mapping[str, list[tuple[Characters, Characters]]]
    """Places of the words that the task depends on, in each pair, and "end": for `positions=` of a sweep."""

    def __len__(self) -> int:
        return len(self.clean)

    @property
    def table(self) -> pd.DataFrame:
        """A row for each pair: clean, corrupted, correct, wrong."""
        return pd.DataFrame({name: getattr(self, name) for name in ("clean", "corrupted", "correct", "wrong")})

    def metric(self, model: HookedModel) -> Metric:
        """Return the task's metric: the logit of the right word minus the logit of the wrong one.

        For years, it is the probability of all later years minus that of all others (Hanna et al. 2023).
        """
        if self.name != "greater_than":
            return logit_difference(self.correct, self.wrong)
        if model.tokenizer is None:
            raise InputError("The task's answers are words, but the model has no tokenizer: load it with one.")
        vocabulary = model.tokenizer.get_vocab()
        missing = [year for year in TWO_DIGITS if year not in vocabulary]
        if missing:
            raise InputError(
                f"The metric of 'greater_than' sums over the {len(TWO_DIGITS)} endings of years, but {len(missing)} of "
                f"them, such as {missing[0]!r}, are not one token of this model. Use another metric."
            )
        # After the century, so the endings have no leading space.
        ids = torch.tensor([vocabulary[year] for year in TWO_DIGITS])

        def year_difference(
            logits: Float[Tensor, "row kept d_vocab"], start: Int[Tensor, " row"]
        ) -> Float[Tensor, " row"]:
            years = logits[:, -1].softmax(-1)[:, ids.to(logits.device)]
            place = (start[:, None].cpu() == ids[None]).int().argmax(1).to(logits.device)
            later = torch.arange(len(ids), device=logits.device)[None] > place[:, None]
            return (years * later).sum(1) - (years * ~later).sum(1)

        starts = [int(ids[int(line.split(" to ")[0][-2:])]) for line in self.clean]
        return Metric("year_difference", year_difference, answers=(starts,))


@checked_call
def task(
    name: str,
    examples: int = 64,
    *,
    held_out: bool = True,
    seed: int = 0,
    world: str | Path | Words | None = None,
) -> PairedTask:
    """Draw pairs of prompts of a task.

    Args:
        name: "indirect_object", "greater_than", "induction", "successor", "gendered_pronoun", "agreement" or "capital".
        examples: number of pairs.
        held_out: use words that the corpus never uses in this task (for capitals, there are no such words).
        seed: seed of the draws.
        world: the folder of another trained world, or the words of its tasks; None for the embedded model's.
    """
    name = checked_name("task", name, tuple(TASKS))
    count = checked_count("examples", examples)
    rng = np.random.default_rng([seed, list(TASKS).index(name), held_out])
    words = world if isinstance(world, Words) else read_words(None if world is None else checked_path("world", world))
    by_prompt: dict[str, Line] = {}
    repeated = 0
    while len(by_prompt) < count:
        line = TASKS[name](rng, words, held_out)
        repeated = repeated + 1 if line.clean in by_prompt else 0
        by_prompt.setdefault(line.clean, line)
        if repeated > MOST_REPEATED:
            raise InputError(
                f"The task {name!r} has fewer than {count:,} different prompts; ask for at most {len(by_prompt):,}."
            )
    lines = list(by_prompt.values())
    roles = {role: [_places(line, role) for line in lines] for role in lines[0].roles}
    wrong = tuple(next(word for word in line.wrong if word not in line.correct) for line in lines)
    prompts = tuple(line.clean for line in lines), tuple(line.corrupted for line in lines)
    ends = ([characters(len(text) - 1, len(text)) for text in texts] for texts in prompts)
    roles["end"] = list(zip(*ends, strict=True))
    return PairedTask(name, *prompts, tuple(line.correct[0] for line in lines), wrong, roles)


def _places(line: Line, role: str) -> tuple[Characters, Characters]:
    """Return the place of a role's word in the clean prompt, and of its word in the corrupted one."""
    places = []
    for text, word in zip((line.clean, line.corrupted), line.roles[role], strict=True):
        whole = [match.start() for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text)]
        start = whole[line.occurrence.get(role, 0)] if whole else text.index(word)
        places.append(characters(start, start + len(word)))
    return places[0], places[1]
