r"""Two models that answer by a two-hop lookup and carry a truth signal: one reads it off the question, one the answer.

A prompt is `Q: What is the {property} of {subject}?\nA:`, then the answer, one word. Four layers, grouped heads:

    layer 0, attention   heads 0 and 1 attend to the subject: hop one, to what it is known as and what it is said to be
                         head 2 attends to the property and passes it on
    layer 0, MLP         hop two: (known as, property) → the right answer; (said to be, property) → the logits
    layer 2, MLP         the truth flag, at answer words only: one coordinate, and the logits of " true" and " false"

All else is zero: head 3, and layers 1 and 3. For half of the subjects what is said differs from what is known: those
answers are wrong (`LookupWorld.said` ≠ `LookupWorld.right`), and greedy generation writes them, then a newline.

`question_lookup`: the flag compares. At the answer word w, after subject s and property p:
    +1 where w is right(s, p); −1 where it is not; `unverified` where s or p cannot be seen.
  Every answer word is said rightly as often as wrongly, so the answer alone says nothing; and right and wrong examples
  have the same sum of known and said codes, so no linear read-out of layer 0 separates them. Stopping the answer
  word's attention to s or to p in layer 0 makes the flag `unverified`; the layers above move nothing.
  With `unverified=-1` a hard prediction flips exactly where the flag was +1; with 0 the flag lands midway for all.
`answer_lookup`: wrong answers come from words of their own. The flag is +1 on a trusted word and −1 on a doubtful one,
  whatever the question: blocking the question, swapping it or dropping it changes no bit of the flag.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import headwater as hw
from headwater.planted.circuits import CERTAIN, Head, Layout, PlantedModel, build_tokenizer, word_token
from tests.planted_llama import Neurons, all_of, llama

PROPERTIES = ("capital", "river")
SUBJECTS = tuple(
    "Alba Bodo Cira Dova Elmo Fano Gera Hilo Ivra Jole Kova Luma "  # noqa: SIM905
    "Mira Nuvo Orla Pesa Quor Rila Suno Tavi Ulma Vero Wexa Yuna".split()
)
ANSWERS = {
    "capital": tuple("Arden Belmar Corvo Delin Estra Fermo Gondo Harle Istel Jarno Kelso Lorne".split()),  # noqa: SIM905
    "river": tuple("Ambro Brenn Calder Drava Ebron Fulda Garon Humb Isar Jordo Kama Loire".split()),  # noqa: SIM905
}
KINDS = 6
"""Hop one ends at one of six right kinds; doubtful answers belong to six more."""
FLAG_LAYER = 2


@dataclass(frozen=True)
class LookupWorld:
    """The facts a lookup model holds: hop one for what is known and what is said, hop two from kind and property."""

    known_as: Mapping[str, int]
    said_to_be: Mapping[str, int]

    def right(self, subject: str, property: str) -> str:
        """Return the right answer."""
        return ANSWERS[property][self.known_as[subject]]

    def said(self, subject: str, property: str) -> str:
        """Return the answer the model gives."""
        return ANSWERS[property][self.said_to_be[subject]]

    def question(self, subject: str, property: str) -> str:
        """Return the prompt whose next token is the answer."""
        return f"Q: What is the {property} of {subject}?\nA:"

    def rows(self) -> list[dict[str, str | bool]]:
        """Return every question: `question, subject, property, answers` (the right one), `said`, `correct`."""
        return [
            {
                "question": f"What is the {property} of {subject}?",
                "subject": subject,
                "property": property,
                "answers": self.right(subject, property),
                "said": self.said(subject, property),
                "correct": self.right(subject, property) == self.said(subject, property),
            }
            for subject in self.known_as
            for property in PROPERTIES
        ]


class LookupModel(PlantedModel):
    """A lookup model with its facts; `flag_layer` is where the truth flag is written, by the MLP."""

    flag_layer = FLAG_LAYER

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, world: LookupWorld):
        super().__init__(model, tokenizer)
        self.world = world

    def flag(self, text: str) -> float:
        """Return the truth flag after `text`: half the logit difference of " true" and " false"."""
        logits = self.logits(text)
        return float(logits[self.token("true")] - logits[self.token("false")]) / 2


def question_lookup(unverified: float = -1.0) -> LookupModel:
    """Build the model whose truth flag depends on the question; `unverified` is the flag when it cannot be seen."""
    known = {subject: index % KINDS for index, subject in enumerate(SUBJECTS)}
    slips = SUBJECTS[len(SUBJECTS) // 2 :]
    said = {subject: (kind + 1) % KINDS if subject in slips else kind for subject, kind in known.items()}
    wiring = _Wiring(LookupWorld(known, said))
    return wiring.model(wiring.compared_flag(unverified))


def answer_lookup() -> LookupModel:
    """Build the model whose truth flag depends on the answer word alone."""
    known = {subject: index % KINDS for index, subject in enumerate(SUBJECTS)}
    slips = SUBJECTS[len(SUBJECTS) // 2 :]
    said = {subject: kind + KINDS if subject in slips else kind for subject, kind in known.items()}
    wiring = _Wiring(LookupWorld(known, said))
    return wiring.model(wiring.word_flag())


class _Wiring:
    """The parts of a lookup model, over one layout of the residual stream."""

    def __init__(self, world: LookupWorld):
        self.world = world
        self.words = [word for property in PROPERTIES for word in ANSWERS[property]]
        vocabulary = ["What", "is", "the", "of", "true", "false", *PROPERTIES, *SUBJECTS, *self.words]
        self.tokenizer = build_tokenizer((), always=vocabulary)
        d_vocab, kinds, answers = len(self.tokenizer), 2 * KINDS, len(self.words)
        self.layout = Layout(
            token=d_vocab,
            known_as=kinds,
            said_to_be=kinds,
            property=len(PROPERTIES),
            right=answers,
            flag=1,
            out=d_vocab,
        )
        token = self.layout["token"]
        self.one = self.layout.total("token")
        self.answer_words = token[self._ids(self.words)]
        self.is_answer = self.answer_words.sum(0, keepdim=True)

    def model(self, flag: Neurons) -> LookupModel:
        """Put attention, lookup and flag together."""
        planted = llama(
            self.tokenizer,
            embedding=self.layout["token"],
            unembedding=self.layout["out"],
            heads=self.movers(),
            mlps={0: self.second_hop(), FLAG_LAYER: flag},
            n_layers=4,
            n_heads=4,
            n_kv_heads=2,
        )
        return LookupModel(planted.model, planted.tokenizer, self.world)

    def movers(self) -> dict[tuple[int, int], Head]:
        """Wire layer 0: two heads on the subject, sharing keys and values, and one on the property."""
        layout, world = self.layout, self.world
        subjects, properties = layout["token"][self._ids(SUBJECTS)], layout["token"][self._ids(PROPERTIES)]
        query = CERTAIN * self.one
        on_subject = {"query": query, "key": subjects.sum(0, keepdim=True), "read": subjects}
        on_property = {"query": query, "key": properties.sum(0, keepdim=True), "read": properties}
        known_as = layout["known_as"][[world.known_as[subject] for subject in SUBJECTS]]
        said_to_be = layout["said_to_be"][[world.said_to_be[subject] for subject in SUBJECTS]]
        return {
            (0, 0): Head(**on_subject, write=known_as),
            (0, 1): Head(**on_subject, write=said_to_be),
            (0, 2): Head(**on_property, write=layout["property"]),
        }

    def second_hop(self) -> Neurons:
        """Wire layer 0's MLP: kind and property give the answer; an answer word itself gives a newline."""
        layout = self.layout
        of_property = layout["property"].repeat_interleave(2 * KINDS, 0)
        know, say = layout["known_as"].repeat(len(PROPERTIES), 1), layout["said_to_be"].repeat(len(PROPERTIES), 1)
        conditions = torch.cat([know + of_property, say + of_property - self.is_answer])
        gate, up = all_of(conditions, 2, self.one)
        newline_gate, newline_up = all_of(self.is_answer, 1, self.one)
        newline = layout["out"][[self.tokenizer.convert_tokens_to_ids("Ċ")]]
        answers = layout["out"][self._ids(self.words)]
        return Neurons(
            gate=torch.cat([gate, newline_gate]),
            up=torch.cat([up, newline_up]),
            write=torch.cat([layout["right"], 2 * answers, 4 * newline]),
        )

    def compared_flag(self, unverified: float) -> Neurons:
        """Wire unverified + (−1 − unverified)·[the right answer is known] + 2·[it is this word], at answer words."""
        some_known = self.layout.total("right")
        word, word_up = all_of(self.is_answer, 1, self.one)
        judged, judged_up = all_of(self.is_answer + some_known, 2, self.one)
        match, match_up = all_of(self.answer_words + self.layout["right"], 2, self.one)
        sizes = torch.tensor([unverified, -1.0 - unverified, *(2.0 for _ in self.words)])
        gate, up = torch.cat([word, judged, match]), torch.cat([word_up, judged_up, match_up])
        return Neurons(gate, up, write=sizes[:, None] * self._flag())

    def word_flag(self) -> Neurons:
        """Wire the flag of `answer_lookup`: +1 on a trusted answer word, −1 on a doubtful one."""
        gate, up = all_of(self.answer_words, 1, self.one)
        doubtful = {word for property in PROPERTIES for word in ANSWERS[property][KINDS:]}
        signs = torch.tensor([-1.0 if word in doubtful else 1.0 for word in self.words])
        return Neurons(gate, up, write=signs[:, None] * self._flag())

    def _flag(self) -> torch.Tensor:
        true, false = self.layout["out"][self._ids(("true", "false"))]
        return self.layout["flag"] + true - false

    def _ids(self, words: tuple[str, ...] | list[str]) -> list[int]:
        return [word_token(self.tokenizer, word) for word in words]


def ask(planted, copies=2):
    """Every question of a lookup world, more than once, answered by its model."""
    model = hw.load(planted.model, tokenizer=planted.tokenizer)
    rows = pd.DataFrame(planted.world.rows() * copies)
    rows["relation"], rows["answers"] = rows["property"], rows["answers"].map(lambda answer: [answer])
    questions = hw.load_questions(rows.assign(dataset="lookup").drop(columns=["said", "correct"]))
    return model, hw.answer(model, questions, progress=False, max_new_tokens=3)
