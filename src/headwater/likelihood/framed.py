"""The texts of a depth graph as a model reads them, and their scores.

1. A text is the question in its frame (`questions.asking`, `contexts`), and an answer after it.
2. `span` names what is scored: "question", "answer" (the first accepted one, the question in front of it),
   "model_answer" (likewise), or "both", question and accepted answer without what is between them.
3. Each different text is scored once, at every layer requested, as it is or with its words shuffled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from headwater.lenses.reading import Layers, Lens
from headwater.likelihood.scores import memorization_scores, score_of
from headwater.likelihood.statistics import TextStatistics, token_statistics
from headwater.models.tokens import ChatText, encode, token_span
from headwater.questions.asking import Frame

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel
    from headwater.runs.analysis import Run

SPANS = ("question", "answer", "model_answer", "both")
NO_ANSWER = "no answer of the model"
NO_CONTEXT = "a predecessor has no answer of the model"
DESCRIBED = ("tokens", "scored", "windows", "note")


class Framed(NamedTuple):
    """A text and the characters of it that are scored."""

    text: str
    spans: tuple[tuple[int, int], ...]

    @property
    def outer(self) -> tuple[int, int] | None:
        """From the first scored character to the last."""
        return (self.spans[0][0], self.spans[-1][1]) if self.spans else None


def framed(frame: Frame | None, span: str, question: str, answer: str | None) -> Framed:
    """Write one text; without a frame, or an answer where one is to be scored, there is nothing to score."""
    if frame is None:
        return Framed("", ())
    start, kind = len(frame.before), ChatText if frame.is_chat else str
    characters = (start, start + len(question))
    if span == "question":
        return Framed(kind(frame.before + question), (characters,))
    if not answer:
        return Framed("", ())
    text = kind(f"{frame.asking(question)}{frame.joint}{answer}")
    answered = (len(text) - len(answer), len(text))
    return Framed(text, (characters, answered) if span == "both" else (answered,))


def shuffled_words(text: str, rng: np.random.Generator) -> str:
    """Return the words of a text in another order."""
    return " ".join(rng.permutation(np.array(text.split(), dtype=object)).tolist())


def framed_statistics(
    model: HookedModel, texts: Sequence[Framed], layers: Layers, lens: Lens, **options: Any
) -> TextStatistics:
    """Return the statistics of the tokens that hold scored characters; long texts are read in windows."""
    stats = token_statistics(
        model, [one.text for one in texts], spans=[one.outer for one in texts],
        layers=layers, lens=lens, long="window", **options,
    )  # fmt: skip
    if all(len(one.spans) < 2 for one in texts):
        return stats
    kept = np.zeros(len(stats.table), dtype=bool)
    rows, positions = stats.table.groupby("text").indices, stats.table["position"].to_numpy()
    scored = stats.texts["scored"].to_numpy(copy=True)
    for place, one in enumerate(texts):
        _, offsets = encode(model.tokenizer, one.text, model.bos)  # type: ignore[arg-type]
        inside = {position for span in one.spans for position in token_span(offsets or (), *span)}
        here = rows.get(place, np.array([], dtype=int))
        kept[here] = np.isin(positions[here], sorted(inside))
        scored[place] = len(inside - {0})
    return dataclasses.replace(stats, table=stats.table[kept], texts=stats.texts.assign(scored=scored))


class ScoredNodes(NamedTuple):
    """What the texts of nodes are worth."""

    nodes: pd.DataFrame
    """A row per node and layer: `id, layer, tokens, scored, windows, note`, a column per score."""
    tokens: pd.DataFrame
    """A row per scored token at the last layer; see `DepthProfile.tokens`."""

    @property
    def scores(self) -> list[str]:
        """The names of the columns of scores."""
        return [str(name) for name in self.nodes if name not in ("id", "layer", *DESCRIBED)]


@dataclasses.dataclass(frozen=True)
class FrameScoring:
    """How nodes are scored."""

    run: Run
    model: HookedModel
    frames: Sequence[Frame | None]
    """Of every node."""
    span: str
    layers: list[int]
    lens: Lens
    shares: list[float]
    batch_size: int

    def score(self, nodes: pd.DataFrame) -> ScoredNodes:
        """Score the nodes as they are."""
        return self._score(nodes, nodes["question"].tolist(), self._answers(nodes), "statistics")

    def score_shuffled(self, nodes: pd.DataFrame, seed: int) -> ScoredNodes:
        """Score the nodes with the words of each question, and those of each answer, in another order."""
        rng = np.random.default_rng(seed)
        # Each text once, in the order of the nodes: a question of two graphs is shuffled in one way.
        texts = [*dict.fromkeys(nodes["question"]), *dict.fromkeys(filter(None, self._answers(nodes)))]
        other = {text: shuffled_words(text, rng) for text in texts}
        answers = [other[answer] if answer else None for answer in self._answers(nodes)]
        return self._score(nodes, [other[question] for question in nodes["question"]], answers, "shuffled")

    def _answers(self, nodes: pd.DataFrame) -> list[str | None]:
        if self.span == "model_answer":
            return nodes["model_answer"].tolist()
        return [accepted[0] for accepted in nodes["answers"]]

    def _score(self, nodes: pd.DataFrame, questions: list[str], answers: list[str | None], name: str) -> ScoredNodes:
        """Score each different text once, and give its scores to the nodes that have it."""
        texts = zip(self.frames, questions, answers, strict=True)
        written = [framed(frame, self.span, question, answer) for frame, question, answer in texts]
        # Nodes that share a frame, question and answer are run once.
        numbers: dict[Framed, int] = {}
        number_of = [numbers.setdefault(one, len(numbers)) for one in written]
        stats = framed_statistics(
            self.model, list(numbers), self.layers, self.lens,
            batch_size=self.batch_size, progress=self.run.progress, out=self.run.below(name),
        )  # fmt: skip
        wide = memorization_scores(stats, k=self.shares).wide()
        kept = ["text", "layer", *DESCRIBED, *filter(score_of, map(str, wide))]
        places = pd.DataFrame({"id": nodes["id"].to_numpy(), "text": number_of})
        nodes_scored = places.merge(wide[kept], on="text").drop(columns="text")
        if self.span == "model_answer":
            nodes_scored["note"] = nodes_scored["note"].where(nodes_scored["tokens"] > 0, NO_ANSWER)
        lacking = [name for name, frame in zip(nodes["id"], self.frames, strict=True) if frame is None]
        nodes_scored.loc[nodes_scored["id"].isin(lacking), "note"] = NO_CONTEXT
        return ScoredNodes(nodes_scored, self._tokens(stats.table, places))

    def _tokens(self, table: pd.DataFrame, places: pd.DataFrame) -> pd.DataFrame:
        last = table[table["layer"] == self.layers[-1]]
        # As `lowest_means` counts: exactly k tokens, the earlier one where two are equal.
        rank = last.groupby("text")["log_probability"].rank(method="first")
        size = last.groupby("text")["log_probability"].transform("size")
        count = np.maximum(1, np.floor(size.astype(float) * self.shares[0]))
        first = places.drop_duplicates("text").set_index("text")["id"]
        return (
            pd.DataFrame(
                {"id": last["text"].map(first), **{c: last[c] for c in ("position", "token", "log_probability")}}
            )
            .assign(lowest=rank <= count)
            .reset_index(drop=True)
        )
