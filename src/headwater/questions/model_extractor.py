"""Exact words from a loaded model: it is shown examples of questions whose words are marked, and asked to go on.

1. Prompt: examples of `Question`, `Answer`, `Subject`, `Property`, `Exact answer`, a line each, then the question and
   the answer at hand, up to `Subject:`. A model with a chat template gets it as a message of the user. As many examples
   as fit into what the model reads; none fits, none is asked.
2. Greedy generation, three lines at most. A part counts where its words are a piece of the text, character for
   character (`questions.extract.exact_words`).
3. Where a part has no such words the model is asked again with the examples in another order, `TRIES` times at most
   (Orgad et al. 2024; Luo et al. 2026: five), and each part is the first that was valid.

Small models cannot do this; `headwater.questions.extract` says how well a model does where the words are known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headwater.errors import InputError
from headwater.models.generation import Wrote, end_tokens, generate_tokens
from headwater.models.hooked import HookedModel
from headwater.models.tokens import by_length, chat_text, encode
from headwater.questions.extract import EXTRACTORS, PARTS, exact_words

TRIES = 5
NEW_TOKENS = 48
BATCH = 16
ASKED = (
    "Mark the words of each question that name its subject and the property asked about, and the shortest words of the "
    "answer that by themselves answer the question. Copy them character for character; write none where there are "
    "none.\n\n"
)
NONE = "none"
LABELS = {"subject": "Subject", "property": "Property", "answer": "Exact answer"}


class Shot(NamedTuple):
    """An example with its words."""

    question: str
    answer: str
    subject: str
    property: str
    exact: str

    def written(self) -> str:
        """Write it as the model is to go on."""
        words = f"Subject: {self.subject}\nProperty: {self.property}\nExact answer: {self.exact}\n\n"
        return f"Question: {self.question}\nAnswer: {self.answer}\n{words}"


SHOTS = (
    Shot("What is the capital of South Carolina?", "It is Columbia, a hub of trade.", "South Carolina", "capital",
         "Columbia"),
    Shot("Who wrote the novel Middlemarch?", "George Eliot", "Middlemarch", "wrote", "George Eliot"),
    Shot("In what year did the Battle of Hastings take place?", "The battle was fought in 1070.", "Battle of Hastings",
         "year", "1070"),
    Shot("What is Ada Lovelace's occupation?", "She was a mathematician and a writer.", "Ada Lovelace", "occupation",
         "mathematician"),
    Shot("Which river flows through the city of Basel?", "That depends.", "Basel", "river", NONE),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class ModelExtractor:
    """Asks a loaded model for the exact words; without one, the model whose answers they are."""

    model: HookedModel | None = None
    tries: int = TRIES

    @property
    def identity(self) -> str:
        """What represents it in the record of a run."""
        return "the model itself" if self.model is None else self.model.digest()

    def of_model(self, model: HookedModel | None) -> ModelExtractor:
        """Return the extractor that asks `model` where this one names none."""
        extractor = self.model or model
        if extractor is None:
            raise InputError("extractor='model' names no model: give model= too, or the loaded model in its place.")
        if extractor.tokenizer is None:
            raise InputError(f"{extractor.name} has no tokenizer: it cannot be asked for exact words.")
        return ModelExtractor(extractor, self.tries)

    def __call__(self, question: str, answer: str) -> Mapping[str, object]:
        """Return the words of one example."""
        return self.many([(question, answer)])[0]

    def many(self, pairs: Sequence[tuple[str, str]]) -> list[dict[str, object]]:
        """Return the words of each question and answer that are pieces of them."""
        if self.model is None:
            raise InputError("This extractor names no model: give hw.answer extractor='model', or a loaded model.")
        words: list[dict[str, object]] = [{} for _ in pairs]
        is_open = set(range(len(pairs)))
        for turn in range(self.tries):
            if not is_open:
                break
            prompts = {place: _prompt(self.model, *pairs[place], turn) for place in sorted(is_open)}
            fitting = {place: tokens for place, tokens in prompts.items() if tokens}
            for place, text in _written(self.model, fitting).items():
                parts = parts_of(text)
                valid = exact_words(parts, *pairs[place])
                new = {part: parts[part] for part in PARTS if part in valid and part not in words[place]}
                words[place] |= new
                # "none" is a reply, too: an answer without exact words is not asked about again.
                has_none = not pairs[place][1].strip() or parts.get("answer", "").strip(". ").lower() == NONE
                if {*PARTS} - {*words[place]} <= ({"answer"} if has_none else set()):
                    is_open.discard(place)
            # A pair too long for one example is too long in every order.
            is_open &= set(fitting)
        return words


EXTRACTORS.add("model", ModelExtractor())


def parts_of(text: str) -> dict[str, str]:
    """Read what was written after `Subject:`; a chat model may begin with that word itself."""
    parts: dict[str, str] = {}
    for number, line in enumerate(text.split("\n")):
        label = re.match(r"\s*(Subject|Property|Exact answer)\s*:(.*)", line)
        if label:
            part = next(name for name, shown in LABELS.items() if shown == label[1])
            parts.setdefault(part, label[2].strip())
        elif number == 0 and line.strip():
            parts["subject"] = line.strip()
        elif parts and not line.strip():
            break
    return {part: words for part, words in parts.items() if words}


def _prompt(model: HookedModel, question: str, answer: str, turn: int) -> list[int]:
    """Return the tokens of a prompt with as many examples as fit, in the order of a turn; none where none fits."""
    # Greedy decoding repeats itself: only another prompt can bring another reply.
    shots = [*SHOTS[turn % len(SHOTS) :], *SHOTS[: turn % len(SHOTS)]]
    while shots:
        text = ASKED + "".join(shot.written() for shot in shots) + f"Question: {question}\nAnswer: {answer}\nSubject:"
        written = chat_text(model.tokenizer, text) or text  # type: ignore[arg-type]
        tokens, _ = encode(model.tokenizer, written, model.bos)  # type: ignore[arg-type]
        if len(tokens) + NEW_TOKENS <= model.shape.n_ctx:
            return tokens
        shots = shots[:-1]
    return []


def _written(model: HookedModel, prompts: Mapping[int, Sequence[int]]) -> dict[int, str]:
    """Let the model continue prompts for three lines."""
    places, ends = list(prompts), end_tokens(model)

    def text_of(*tokens: int) -> str:
        return str(model.tokenizer.decode(list(tokens), skip_special_tokens=True))  # type: ignore[union-attr]

    texts: dict[int, str] = {}
    for batch in by_length([len(prompts[place]) for place in places], BATCH):
        rows = [places[i] for i in batch]
        generated = generate_tokens(
            model, model.tokenize([list(prompts[place]) for place in rows]),
            max_new_tokens=NEW_TOKENS, stop=lambda token: token in ends, wrote=_three_lines(text_of),
        )  # fmt: skip
        for row, place in enumerate(rows):
            tokens = generated.tokens[row, : generated.lengths[row]].tolist()
            texts[place] = text_of(*tokens)
    return texts


def _three_lines(text_of: Callable[[int], str]) -> Wrote:
    """Return what ends a row after its third line that holds something."""
    texts: dict[int, str] = {}

    def wrote(row: int, step: int, token: int) -> bool:
        texts[row] = text_of(token) if step == 0 else texts[row] + text_of(token)
        lines = texts[row].lstrip().split("\n")
        return sum(bool(line.strip()) for line in lines[:-1]) >= len(PARTS)

    return wrote
