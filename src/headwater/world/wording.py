"""Wordings of the world: statements and questions for each relation, read from `wordings.json`.

A wording is a sentence with `{s}` for the subject and, in statements, `{t}` for the answer. In questions, square
brackets mark the words that name the requested property: with the subject they are the exact question tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.options import checked_several, shown

Span = tuple[int, int]


@dataclass(frozen=True)
class Wording:
    """The sentences that state or ask a fact of one relation; `questions` maps a question set to its sentences."""

    statements: tuple[str, ...]
    questions: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Sentence:
    """A filled wording: the text and the spans (start, end) of the subject and the property in it."""

    text: str
    subject: Span
    property: tuple[Span, ...]


@cache
def wording_of(relation: str) -> Wording:
    """Return the sentences of a relation, from the first entry of the file whose pattern is its name."""
    for entry in _entries():
        match = re.fullmatch(entry["relation"], relation)
        if match:
            words = {key: value.replace("_", " ").title() for key, value in match.groupdict().items()}
            words["target"] = relation.split("_to_")[-1].replace("_", " ")

            def filled(sentences: list[str], words: Mapping[str, str] = words) -> tuple[str, ...]:
                return tuple(_replace(sentence, words) for sentence in sentences)

            questions = {name: filled(sentences) for name, sentences in entry["questions"].items()}
            return Wording(filled(entry["statements"]), questions)
    raise KeyError(relation)


def fill(sentence: str, subject: str) -> Sentence:
    """Fill the subject into a question and remove the brackets, with the spans of both."""
    text, spans, where = "", [], (0, 0)
    for part in re.split(r"(\[[^\]]*\]|\{s\})", sentence):
        if part == "{s}":
            where = (len(text), len(text) + len(subject))
            text += subject
        elif part.startswith("["):
            spans.append((len(text), len(text) + len(part) - 2))
            text += part[1:-1]
        else:
            text += part
    return Sentence(text, where, tuple(spans))


def prompt_of(question: str) -> str:
    """Return the prompt of a question as in the corpus, up to where the answer begins."""
    return f"Q: {question}\nA:"


@checked_call
def question_templates(relations: Sequence[str]) -> dict[str, str]:
    """Return prompts that ask the embedded models for relations between words: `Q: ... {source} ...?`, and `A:` below.

    These are the questions of the corpus in the wording of the set `properties`, for `HeadMap.validate`. Relations that
    the corpus lacks are asked for by name: "What is the capital of {source}?"

    Args:
        relations: their names, such as `country_to_capital`.
    """
    names = checked_several("relations", relations, "a list of relation names")
    for name in names:
        if not isinstance(name, str) or not name:
            raise InputError(f"relations={shown(names)}: {shown(name)} is not the name of a relation.")
    sentences = {name: wording_of(name).questions["properties"][0] for name in names}
    return {name: prompt_of(fill(sentence, "{source}").text) for name, sentence in sentences.items()}


def _replace(sentence: str, words: Mapping[str, str]) -> str:
    for key, value in words.items():
        sentence = sentence.replace("{" + key + "}", value)
    return sentence


@cache
def _entries() -> list[dict[str, Any]]:
    return json.loads((files("headwater.world") / "wordings.json").read_text(encoding="utf-8"))
