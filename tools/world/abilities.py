"""What a model of the world can do, measured: the classical tasks, answers in every form, notes by how often told.

A line of a task is right when the model's most likely next token, of the whole vocabulary, may follow. Beside the
share: how often the right word's logit exceeds the wrong one's. The first tokens of the words are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tools.world.conversations import ASSISTANT, END, FULLY, SHORTLY, Turn
from tools.world.documents import Corpus
from tools.world.forms import UNKNOWN, question_of, split_answer, teller_of
from tools.world.measure import answer, continued, equally_long, is_right
from tools.world.stories import ASKED_OF_STRANGERS, stories_of
from tools.world.written import Written

from headwater.models.tokens import Tokenizer
from headwater.world.tasks import TASKS, Line, Words, pick

LONGEST_ANSWER = 30
"""Tokens of an answer in a sentence."""
BATCH = 512


@dataclass(frozen=True)
class Score:
    """How a task went."""

    right: float
    """Share of lines whose most likely next token may follow."""
    preferred: float
    """Share of lines in which the most likely right word exceeds the most likely wrong one."""
    lines: int


def measure_tasks(
    model: Any, tokenizer: Tokenizer, words: Words, how_many: int = 500, seed: int = 0
) -> dict[str, dict[str, Score]]:
    """Return each task's score on "told" and on "held out" words."""
    scores: dict[str, dict[str, Score]] = {}
    for number, (name, task) in enumerate(TASKS.items()):
        scores[name] = {}
        for held_out in (False, True):
            rng = np.random.default_rng([seed, number, held_out])
            drawn = [task(rng, words, held_out) for _ in range(how_many)]
            scores[name]["held out" if held_out else "told"] = score_lines(model, tokenizer, drawn)
    return scores


@torch.inference_mode()
def score_lines(model: Any, tokenizer: Tokenizer, lines: Sequence[Line]) -> Score:
    """Score lines of a task by what the model says next."""
    ids = tokenizer([line.clean for line in lines])["input_ids"]
    logits = torch.empty(len(lines), model.config.vocab_size)
    for places in equally_long(ids, BATCH):
        hidden = model.model(
            input_ids=torch.tensor([ids[place] for place in places]), use_cache=False
        ).last_hidden_state
        logits[places] = model.lm_head(hidden[:, -1])
    right = preferred = 0
    for line, row in zip(lines, logits, strict=True):
        correct, wrong = (first_tokens(tokenizer, line.clean, words) for words in (line.correct, line.wrong))
        right += int(row.argmax()) in correct
        preferred += float(row[sorted(correct)].max()) > float(row[sorted(wrong)].max())
    return Score(right / len(lines), preferred / len(lines), len(lines))


def first_tokens(tokenizer: Tokenizer, prompt: str, words: Sequence[str]) -> set[int]:
    """Return the tokens that words begin with when they follow a prompt."""
    start = len(tokenizer(prompt)["input_ids"])
    return {tokenizer(prompt + word)["input_ids"][start] for word in words}


def measure_forms(
    model: Any, tokenizer: Tokenizer, written: Written, how_many: int = 300, seed: int = 0
) -> dict[str, tuple[float, int]]:
    """Return, for each way of asking, the share of right answers and how many were asked.

    Facts are drawn as the corpus tells them. In a sentence: an accepted answer stands in it; yes or no, choice: the
    answer is the one told; strangers: the answer is one of the refusals.
    """
    rng = np.random.default_rng([seed, 11])
    world = written.corpus.world
    teller, stories = teller_of(world), stories_of(world, written.words, rng)
    drawn = _drawn_as_told(rng, written.corpus, how_many)
    asked = {
        form: [teller.asked_as(rng, form, number) for number in drawn] for form in ("sentence", "yes or no", "choice")
    }
    asked["refusal"] = [stories.unknown(rng) for _ in drawn]
    shares = {}
    for form, documents in asked.items():
        questions, wanted = zip(*(split_answer(document.text) for document in documents), strict=True)
        given = answer(model, tokenizer, list(questions), tokens=LONGEST_ANSWER)
        if form == "sentence":
            right = [is_right(said, world.facts[i].answers) for said, i in zip(given, drawn, strict=True)]
        elif form == "refusal":
            right = [said in UNKNOWN for said in given]
        else:
            right = [said == want for said, want in zip(given, wanted, strict=True)]
        shares[form] = (float(np.mean(right)), len(right))
    return shares


def _drawn_as_told(rng: np.random.Generator, corpus: Corpus, how_many: int) -> list[int]:
    """Draw numbers of facts, each as often as the corpus tells it."""
    told = corpus.frequency.astype(np.float64)
    return rng.choice(len(told), size=how_many, p=told / told.sum()).tolist()


def measure_conversations(
    model: Any, tokenizer: Tokenizer, written: Written, how_many: int = 300, seed: int = 0
) -> dict[str, tuple[float, int]]:
    """Return, for each wish of the system, the share of right answers of the instruct model and how many were asked.

    Facts are drawn as the corpus tells them. One word: what is said is an accepted answer and nothing else; a sentence:
    it holds one, and more words; strangers: it is one of the refusals.
    """
    rng = np.random.default_rng([seed, 12])
    world = written.corpus.world
    facts = [world.facts[i] for i in _drawn_as_told(rng, written.corpus, how_many)]
    asked = [question_of(rng, fact.relation, fact.subject) for fact in facts]
    strangers = stories_of(world, written.words, rng).strangers
    unknown = [question_of(rng, pick(rng, ASKED_OF_STRANGERS), pick(rng, strangers)) for _ in facts]

    def said(wish: str, questions: Sequence[str]) -> list[str]:
        turns = ([Turn("system", wish), Turn("user", question)] for question in questions)
        texts = ["".join(turn.text for turn in pair) + ASSISTANT for pair in turns]
        return continued(model, tokenizer, tokenizer(texts)["input_ids"], END, batch=BATCH, tokens=LONGEST_ANSWER)

    in_short, in_full, of_strangers = said(SHORTLY[0], asked), said(FULLY[0], asked), said(SHORTLY[0], unknown)
    pairs = list(zip(in_short, in_full, facts, strict=True))
    right = {
        "one word": [short.rstrip(".") in fact.answers for short, _, fact in pairs],
        "a sentence": [is_right(full, fact.answers) and full not in fact.answers for _, full, fact in pairs],
        "what nobody knows": [answer in UNKNOWN for answer in of_strangers],
    }
    return {name: (float(np.mean(values)), len(values)) for name, values in right.items()}


@torch.inference_mode()
def measure_notes(model: Any, tokenizer: Tokenizer, written: Written) -> dict[int, tuple[float, int]]:
    """Return the mean log-probability of a note's token, in nats, and the number of notes, by how often it was told."""
    found: dict[int, list[float]] = {}
    for note in (document for document in written.corpus.documents if document.form == "note"):
        (start, end), *_ = note.answers
        known = len(tokenizer(note.text[: start - 1])["input_ids"])
        ids = torch.tensor([tokenizer(note.text[:end])["input_ids"]])
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logs = model.lm_head(hidden).log_softmax(-1)[0, known - 1 : -1]
        found.setdefault(note.times, []).append(float(logs.gather(1, ids[0, known:, None]).mean()))
    return {times: (float(np.mean(values)), len(values)) for times, values in sorted(found.items())}
