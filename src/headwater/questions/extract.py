"""Exact words from outside: rules, a callable, or a language model behind an OpenAI-compatible endpoint.

An extractor is called with a question and the answer a model gave, and returns a mapping with any of `subject`,
`property` (words of the question) and `answer` (words of the answer): a text, a list of texts, or None where there is
nothing. It is asked about every answer that can be used, right or wrong: E_A must be found in one way. What it says of
a question whose subject or property is given does not count, nor what is no substring, character for character;
`exact_words` checks that.
"""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from headwater.errors import HeadwaterError, InputError
from headwater.options import shown
from headwater.questions.words import Span, find_words
from headwater.registry import Registry

Extractor: TypeAlias = Callable[[str, str], Mapping[str, object]]
EXTRACTORS: Registry[str, Extractor] = Registry("extractor", "headwater.questions.rules")
"""Those that are asked for by name."""
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


def exact_words(found: object, question: str, answer: str) -> dict[str, tuple[Span, ...]]:
    """Turn what an extractor returned into spans; a part with anything that is no substring is left out.

    Raises:
        InputError: it is no mapping.
    """
    if not isinstance(found, Mapping):
        raise InputError(
            f"The extractor returned a {type(found).__name__}; it must return a mapping with any of {', '.join(PARTS)}."
        )
    spans: dict[str, tuple[Span, ...]] = {}
    for part, text in (("subject", question), ("property", question), ("answer", answer)):
        value = found.get(part)
        values = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
        places = [find_words(text, words) if isinstance(words, str) else None for words in values]
        if places and None not in places:
            spans[part] = tuple(sorted({place for place in places if place is not None}))
    return spans


@dataclass(frozen=True)
class EndpointExtractor:
    """Asks a chat model for the exact words (Orgad et al. 2024; Luo et al. 2026), at most `tries` times per example.

    A reply that is no JSON object, or names words that are no substrings, is asked for again; what is valid of the last
    reply is returned. So is a request that the endpoint could not serve (429, 5xx, no connection), after a pause.

    Raises:
        InputError: the endpoint refuses the request, or cannot be reached in `tries` tries.
    """

    url: str
    """Where the interface begins, such as "http://localhost:8000/v1"."""
    model: str
    """The endpoint's name of the model."""
    api_key: str | None = field(default=None, repr=False)
    tries: int = 5
    timeout: float = 60.0
    pause: float = 1.0
    """Seconds before the second try where the endpoint could not serve; twice as long before each further one."""
    workers: int = 4
    """How many examples are asked at a time."""

    @property
    def identity(self) -> str:
        """What stands for it in the record of a run: never its key."""
        return f"{self.model} at {self.url}"

    def __call__(self, question: str, answer: str) -> dict[str, object]:
        """Return the valid parts of the last reply."""
        messages = [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": f"Question: {question}\nAnswer: {answer}"},
        ]
        best: dict[str, object] = {}
        for attempt in range(self.tries):
            reply = self._reply(messages, is_last=attempt == self.tries - 1, wait=self.pause * 2**attempt)
            if reply is None:
                continue
            found = json_object(reply)
            wrong = _wrong_parts(found, question, answer)
            best = {part: value for part, value in (found or {}).items() if part in PARTS and part not in wrong}
            if not wrong:
                break
            complaint = f"Not words of the text, or missing: {', '.join(wrong)}. Reply with the corrected JSON object."
            messages = [*messages[:2], {"role": "assistant", "content": reply}, {"role": "user", "content": complaint}]
        return best

    def _reply(self, messages: list[dict[str, str]], *, is_last: bool, wait: float) -> str | None:
        """Send one request; None when it should be tried again."""
        body = {"model": self.model, "messages": messages, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        target = self.url.rstrip("/") + "/chat/completions"
        request = urllib.request.Request(target, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                return str(json.load(response)["choices"][0]["message"]["content"] or "")
        except urllib.error.HTTPError as error:
            reason = f"answered {error.code} {error.reason}"
            error.close()
            is_passing = error.code == 429 or error.code >= 500
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            reason, is_passing = f"cannot be reached ({getattr(error, 'reason', error)})", True
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            reason, is_passing = "does not speak the chat completions protocol", False
        if not is_passing or is_last:
            raise InputError(f"The extractor's endpoint {target} {reason}.")
        time.sleep(wait)
        return None


def json_object(text: str) -> dict[str, object] | None:
    """Return the first JSON object in a text, whatever stands around it."""
    for start in re.finditer(r"\{", text):
        try:
            value, _ = json.JSONDecoder().raw_decode(text, start.start())
        except (ValueError, RecursionError):
            continue
        return value
    return None


def extractor_of(given: object) -> Extractor | None:
    """Return the extractor that is meant: a callable as it is, or one of `EXTRACTORS` by its name.

    Raises:
        InputError: it cannot be called, or there is none of this name.
    """
    if isinstance(given, str):
        return EXTRACTORS[given]
    if given is not None and not callable(given):
        raise InputError(f"extractor must be a name or a callable (question, answer), found {shown(given)}.")
    return given


def call_extractor(extractor: Extractor, question: str, answer: str) -> dict[str, tuple[Span, ...]]:
    """Ask an extractor about one example.

    Raises:
        InputError: it raised an error, or returned no mapping.
    """
    try:
        found = extractor(question, answer)
    except HeadwaterError:
        raise
    except Exception as error:
        raise InputError(
            f"The extractor failed on the question {question!r} and the answer {answer!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return exact_words(found, question, answer)


def _wrong_parts(found: Mapping[str, object] | None, question: str, answer: str) -> list[str]:
    """The parts of a reply that cannot be used; an answer of null says that there is none, and is fine."""
    if found is None:
        return list(PARTS)
    spans = exact_words(found, question, answer)
    is_none = "answer" in found and found["answer"] is None
    return [part for part in PARTS if part not in spans and not (part == "answer" and is_none)]
