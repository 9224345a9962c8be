"""Extractors of exact words: rules, a loaded model, an OpenAI-compatible endpoint, or your own function.

An extractor is called with a question and a model's answer. It returns a mapping with any of `subject`, `property`
(words of the question) and `answer` (words of the answer): a text, a list of texts, or None for nothing. It is called
for every usable answer, right or wrong, because E_A must be found in one way. Its subject and property are ignored if
the question table has a subject or property. A part with words that are not substrings, character for character, is
ignored too (`exact_words`).

An extractor may have a method `many`, which takes several pairs of question and answer at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.kernels.devices import failures_named
from headwater.models.hooked import HookedModel
from headwater.models.tokens import chat_text, encode
from headwater.options import shown
from headwater.questions.endpoint import ChatEndpoint, FailureLimit, json_object, workers_of
from headwater.questions.sources import Questions
from headwater.questions.words import Span, find_words
from headwater.registry import Registry

Extractor: TypeAlias = Callable[[str, str], Mapping[str, object]]
EXTRACTORS: Registry[str, Any] = Registry("extractor", "headwater.questions.rules")
"""The extractors by name; of a class, the one made with the model that gave the answers."""


PARTS = ("subject", "property", "answer")
INSTRUCTION = (
    "You mark words. You are given a question and an answer that somebody gave to it; the answer may be wrong, and you "
    'do not judge it. Reply with one JSON object with three keys. "subject": the words of the question that name the '
    'entity it asks about. "property": the words of the question that name what it asks about that entity. '
    '"answer": the shortest words of the answer that by themselves answer the question, or null if there are none. '
    "Copy every value character for character from the text; never rephrase, never correct.\n"
    'Example: question "What is the capital of South Carolina?", answer "It is Columbia, a hub of trade." gives '
    '{"subject": "South Carolina", "property": "capital", "answer": "Columbia"}'
)


def exact_words(reply: object, question: str, answer: str) -> dict[str, tuple[Span, ...]]:
    """Turn the reply of an extractor into spans; omit a part if any of its words is not a substring."""
    if not isinstance(reply, Mapping):
        raise InputError(
            f"The extractor returned a {type(reply).__name__}; it must return a mapping with any of {', '.join(PARTS)}."
        )
    spans: dict[str, tuple[Span, ...]] = {}
    for part, text in (("subject", question), ("property", question), ("answer", answer)):
        value = reply.get(part)
        values = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
        places = [find_words(text, words) if isinstance(words, str) else None for words in values]
        if places and None not in places:
            spans[part] = tuple(sorted({place for place in places if place is not None}))
    return spans


@dataclass(frozen=True)
class EndpointExtractor(ChatEndpoint):
    """Asks a chat model for the exact words (Orgad et al. 2024; Luo et al. 2026), at most `tries` times per example.

    If a reply is not a JSON object, or has words that are not substrings, the model is asked again; the valid parts of
    the last reply are returned. Examples without any reply are dropped and counted (`headwater.questions.endpoint`).
    """

    def __call__(self, question: str, answer: str) -> dict[str, object]:
        """Return the valid parts of the last reply."""
        messages = [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": f"Question: {question}\nAnswer: {answer}"},
        ]

        def read(reply: str) -> tuple[dict[str, object], str]:
            found = json_object(reply) or {}
            spans = exact_words(found, question, answer)
            # A null answer is valid: there are no exact words.
            is_none = "answer" in found and found["answer"] is None
            wrong = [part for part in PARTS if part not in spans and not (part == "answer" and is_none)]
            valid = {part: value for part, value in found.items() if part in PARTS and part not in wrong}
            complaint = f"Not words of the text, or missing: {', '.join(wrong)}. Reply with the corrected JSON object."
            return valid, complaint if wrong else ""

        return self.ask(messages, read) or {}


def extractor_of(choice: object, model: HookedModel | None) -> Extractor | None:
    """Resolve a callable, the name of one of `EXTRACTORS`, or a loaded model; "model" is `model`, which answered."""
    if isinstance(choice, HookedModel):
        return ModelExtractor(choice)
    if isinstance(choice, str):
        choice = EXTRACTORS[choice]
        choice = choice(model) if isinstance(choice, type) else choice
    if choice is not None and not callable(choice):
        raise InputError(f"extractor must be a name, a model or a callable (question, answer), found {shown(choice)}.")
    return choice


def call_extractor(extractor: Extractor, question: str, answer: str) -> dict[str, tuple[Span, ...]]:
    """Call an extractor on one example."""
    what = f"The extractor failed on the question {question!r} and the answer {answer!r}"
    with failures_named(what, in_a_run=False):
        found = extractor(question, answer)
    return exact_words(found, question, answer)


def call_extractor_on(
    extractor: Extractor, pairs: Sequence[tuple[str, str]], failures: FailureLimit
) -> list[dict[str, tuple[Span, ...]] | None]:
    """Call an extractor on examples, all at once if it has `many`, else `workers` at a time; None without a reply."""
    if (many := getattr(extractor, "many", None)) is not None:
        return [exact_words(one, *pair) for one, pair in zip(many(pairs), pairs, strict=True)]
    return failures.map(lambda pair: call_extractor(extractor, *pair), pairs, workers_of(extractor))


WHOLE = "whole question"
SENTENCES = ("{answer}", "It is {answer}.", "The answer is {answer}.", "{answer}, I think.", "I would say {answer}.")
"""Sentences for the accepted answers of a set, used in turn."""


@checked_call
def agreement(
    questions: Questions, extractor: str | Extractor | HookedModel = "rules", *, model: HookedModel | None = None
) -> pd.DataFrame:
    """Compare an extractor with the words that question sets themselves mark, such as PopQA's by its wordings.

    No set marks the exact words of answers, so accepted answers are put into sentences (`SENTENCES`, used in turn). The
    control, the whole question and answer, contains all marked words but selects nothing.

    Args:
        questions: questions with subject and property.
        extractor: see `hw.answer`; called with each question and a sentence with its accepted answer.
        model: the model that extractor "model" asks.

    Returns:
        Two rows per set, for the extractor and for the whole question: `dataset, extractor, questions`, and as shares
        `subject`, `property` (exactly the same characters), `found` (any word of either), `overlap` (mean share of
        marked characters that were found), `named` (mean share of found characters that are marked); `answer` (exactly
        the same characters), `answer_overlap`, `answer_named`; `no_reply`.
    """
    table = questions.table
    named = table[(table["subject"].map(len) > 0) | (table["property"].map(len) > 0)]
    if named.empty:
        raise InputError("No question names its subject or property: there is nothing to compare with.")
    ask = extractor_of(extractor, model)
    if ask is None:
        raise InputError("extractor=None names no extractor.")
    pairs, answers = [], []
    for place, (question, accepted) in enumerate(zip(named["question"], named["answers"], strict=True)):
        # In turn, not at random: this needs no seed, and all sentences are equally frequent.
        sentence = SENTENCES[place % len(SENTENCES)]
        start = sentence.index("{answer}")
        pairs.append((question, sentence.replace("{answer}", accepted[0])))
        answers.append(((start, start + len(accepted[0])),))
    name = extractor if isinstance(extractor, str) else getattr(extractor, "__name__", type(extractor).__name__)
    whole = [{"subject": ((0, len(question)),), "answer": ((0, len(answer)),)} for question, answer in pairs]
    marked = list(zip(named["subject"], named["property"], answers, strict=True))
    tables = []
    for title, replies in ((name, call_extractor_on(ask, pairs, FailureLimit())), (WHOLE, whole)):
        rows = [_compared(words, reply) for words, reply in zip(marked, replies, strict=True)]
        each = pd.DataFrame(rows).groupby(named["dataset"].to_numpy(), sort=False)
        counted = pd.DataFrame({"extractor": title, "questions": each.size()})
        tables.append(counted.join(each.mean()).rename_axis("dataset").reset_index())
    return pd.concat(tables, ignore_index=True)


def _compared(marked: Sequence[Iterable[Span]], extracted: Mapping[str, tuple[Span, ...]] | None) -> dict[str, float]:
    """Compare the characters of subject, property and answer that are marked with those that were extracted."""
    subject, prop, answer = map(_places, marked)
    found_subject, found_prop, found_answer = (_places((extracted or {}).get(part, ())) for part in PARTS)
    words, found = subject | prop, found_subject | found_prop
    return {
        "subject": float(subject == found_subject),
        "property": float(prop == found_prop),
        "found": float(bool(found)),
        "overlap": len(words & found) / len(words),
        "named": len(words & found) / len(found) if found else float("nan"),
        "answer": float(answer == found_answer),
        "answer_overlap": len(answer & found_answer) / len(answer),
        "answer_named": len(answer & found_answer) / len(found_answer) if found_answer else float("nan"),
        "no_reply": float(extracted is None),
    }


def _places(spans: Iterable[Span]) -> set[int]:
    return {place for start, end in spans for place in range(start, end)}


TRIES = 5
NEW_TOKENS = 48
NEXT_SHOT = "\n\nQ"
"""What a model writes where it continues with another example."""
BATCH = 16
ASKED = (
    "Mark the words of each question that name its subject and the property asked about, and the shortest words of the "
    "answer that by themselves answer the question. Copy them character for character; write none where there are "
    "none.\n\n"
)
NONE = "none"
LABELS = {"Subject": "subject", "Property": "property", "Exact answer": "answer"}
SHOT = "Question: {}\nAnswer: {}\nSubject: {}\nProperty: {}\nExact answer: {}\n\n"
SHOTS = (
    ("What is the capital of South Carolina?", "It is Columbia, a hub of trade.", "South Carolina", "capital",
         "Columbia"),
    ("Who wrote the novel Middlemarch?", "George Eliot", "Middlemarch", "wrote", "George Eliot"),
    ("In what year did the Battle of Hastings take place?", "The battle was fought in 1070.", "Battle of Hastings",
         "year", "1070"),
    ("What is Ada Lovelace's occupation?", "She was a mathematician and a writer.", "Ada Lovelace", "occupation",
         "mathematician"),
    ("Which river flows through the city of Basel?", "That depends.", "Basel", "river", NONE),
)  # fmt: skip
"""Examples in the format of `SHOT`: question, answer, and the marked words."""


@dataclass(frozen=True, eq=False)
class ModelExtractor:
    """Asks a loaded model for the exact words; by default the model that gave the answers.

    1. Prompt: examples of `Question`, `Answer`, `Subject`, `Property`, `Exact answer`, a line each, then the question
       and its answer, up to `Subject:`; as many examples as fit into the context, or the model is not asked. A model
       with a chat template gets the prompt as a user message.
    2. Greedy generation up to the next example. A part is valid if its words are a substring of the text.
    3. If a part is not valid, the model is asked again with the examples in another order, at most `tries` times (Orgad
       et al. 2024; Luo et al. 2026: five); the first valid reply for each part is used.

    Small models cannot do this; `agreement` measures how well a model does if the words are known.
    """

    model: HookedModel
    tries: int = TRIES

    def __post_init__(self) -> None:
        if self.model is None:
            raise InputError("extractor='model' names no model: give model= too, or the loaded model in its place.")
        if self.model.tokenizer is None:
            raise InputError(f"{self.model.name} has no tokenizer: it cannot be asked for exact words.")

    @property
    def identity(self) -> str:
        """Its identity in a run record."""
        return self.model.digest()

    def __call__(self, question: str, answer: str) -> Mapping[str, object]:
        """Return the exact words of one example."""
        return self.many([(question, answer)])[0]

    def many(self, pairs: Sequence[tuple[str, str]]) -> list[dict[str, object]]:
        """Return the exact words of each question and answer; only words that are substrings."""
        words: list[dict[str, object]] = [{} for _ in pairs]
        remaining = set(range(len(pairs)))
        for turn in range(self.tries):
            prompts = {place: _prompt(self.model, *pairs[place], turn) for place in sorted(remaining)}
            # A pair that leaves no room for one example is not asked in any turn.
            prompts = {place: tokens for place, tokens in prompts.items() if tokens}
            if not prompts:
                break
            remaining = set(prompts)
            for place, text in _written(self.model, prompts).items():
                parts, (question, answer) = parts_of(text), pairs[place]
                valid = exact_words(parts, question, answer)
                words[place] |= {part: parts[part] for part in valid if part not in words[place]}
                # "none" is a valid reply, so an answer without exact words is not asked about again.
                has_none = not answer.strip() or parts.get("answer", "").strip(". ").lower() == NONE
                if {*PARTS} - {*words[place]} <= ({"answer"} if has_none else set()):
                    remaining.discard(place)
        return words


EXTRACTORS.add("model", ModelExtractor)


def parts_of(text: str) -> dict[str, str]:
    """Parse the text generated after `Subject:`; a chat model may repeat that label."""
    parts: dict[str, str] = {}
    for number, line in enumerate(text.split("\n")):
        if label := re.match(rf"\s*({'|'.join(LABELS)})\s*:(.*)", line):
            parts.setdefault(LABELS[label[1]], label[2].strip())
        elif number == 0 and line.strip():
            parts["subject"] = line.strip()
        elif parts and not line.strip():
            break
    return {part: words for part, words in parts.items() if words}


def _prompt(model: HookedModel, question: str, answer: str, turn: int) -> list[int]:
    """Return the tokens of a prompt with as many examples as fit, in the order of a turn; empty if none fits."""
    # Greedy decoding is deterministic, so only another prompt can bring another reply.
    shots = [*SHOTS[turn % len(SHOTS) :], *SHOTS[: turn % len(SHOTS)]]
    asked = f"Question: {question}\nAnswer: {answer}\nSubject:"
    while shots:
        text = ASKED + "".join(SHOT.format(*shot) for shot in shots) + asked
        written = chat_text(model.tokenizer, text) or text  # type: ignore[arg-type]
        tokens, _ = encode(model.tokenizer, written, model.bos)  # type: ignore[arg-type]
        if len(tokens) + NEW_TOKENS <= model.shape.n_ctx:
            return tokens
        shots = shots[:-1]
    return []


def _written(model: HookedModel, prompts: Mapping[int, Sequence[int]]) -> dict[int, str]:
    """Let the model continue prompts, up to where another example would begin."""
    ids = [list(tokens) for tokens in prompts.values()]
    texts: Any = model.generate(ids, max_new_tokens=NEW_TOKENS, stop=NEXT_SHOT, batch_size=BATCH, progress=False)
    return dict(zip(prompts, texts, strict=True))
