"""A corpus as training rows of one length: `<s>`, then documents, a line break after each, packed by best fit.

Documents come in the corpus's order; each goes into the fullest open row that still has room for it. Rows are read in
the order in which they were begun.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tools.world.conversations import conversations
from tools.world.documents import Corpus, Document
from tools.world.written import Written

from headwater.errors import InputError
from headwater.models.tokens import Tokenizer
from headwater.planted.circuits import BOS_ID, PAD_ID
from headwater.questions.sources import WORLD_SETS

BATCH = 50_000
ENDS = frozenset((*WORLD_SETS, "sentence", "yes or no", "choice", "story", "refusal", "induction"))
"""Forms whose line break is part of the answer: the answer is over."""


@dataclass(frozen=True)
class Rows:
    """Texts as training rows."""

    tokens: NDArray[np.uint16]
    """Shape (row, position); the rest of a row is padding."""
    answers: NDArray[np.bool_]
    """Of the same shape: whether the token is part of an answer."""


def pack_rows(corpus: Corpus, tokenizer: Tokenizer, width: int) -> Rows:
    """Turn a corpus into rows of `width` tokens.

    Raises:
        InputError: a document is longer than a row.
    """
    ids, marks, lengths = _tokenize(corpus.documents, tokenizer)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    place, offset = best_fit(lengths[corpus.order], width - 1)
    tokens = np.full((place.max() + 1, width), PAD_ID, dtype=np.uint16)
    answers = np.zeros(tokens.shape, dtype=bool)
    tokens[:, 0] = BOS_ID
    sizes = lengths[corpus.order]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    source = np.repeat(starts[corpus.order], sizes) + within
    rows, columns = np.repeat(place, sizes), np.repeat(offset, sizes) + within + 1
    tokens[rows, columns] = ids[source]
    answers[rows, columns] = marks[source]
    return Rows(tokens, answers)


def chat_rows(written: Written, tokenizer: Tokenizer) -> Rows:
    """Pack conversations into rows, each behind its own `<s>`; what the assistant says, with its end, is the answer."""
    recipe = written.corpus.world.recipe
    ids: list[NDArray[np.uint16]] = []
    marks: list[NDArray[np.bool_]] = []
    for turns in conversations(written):
        tokens, said = [BOS_ID], [False]
        for turn in turns:
            encoded = tokenizer(turn.text, add_special_tokens=False)["input_ids"]
            tokens += encoded
            said += [False] + [turn.role == "assistant"] * (len(encoded) - 1)
        if len(tokens) <= recipe.row:
            ids.append(np.array(tokens, dtype=np.uint16))
            marks.append(np.array(said))
    place, offset = best_fit(np.array([len(tokens) for tokens in ids]), recipe.row)
    packed = np.full((place.max() + 1, recipe.row), PAD_ID, dtype=np.uint16)
    answers = np.zeros(packed.shape, dtype=bool)
    for row, start, encoded, answer in zip(place.tolist(), offset.tolist(), ids, marks, strict=True):
        packed[row, start : start + len(encoded)] = encoded
        answers[row, start : start + len(encoded)] = answer
    order = np.random.default_rng([recipe.seed, 10]).permutation(len(packed))
    return Rows(packed[order], answers[order])


def best_fit(lengths: NDArray[np.int64], room: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row of each document and where in it the document starts; a row has room for so many tokens."""
    if len(lengths) and lengths.max() > room:
        raise InputError(
            f"A text of {lengths.max()} tokens does not fit into a row of {room}: give the recipe a longer `row`."
        )
    open_rows: list[list[int]] = [[] for _ in range(room + 1)]
    free_sizes = 0  # bit n: there is an open row with n free places
    rows, offsets = np.empty(len(lengths), dtype=np.int64), np.empty(len(lengths), dtype=np.int64)
    begun = 0
    for i, length in enumerate(lengths.tolist()):
        fitting = free_sizes >> length << length
        if fitting:
            free = (fitting & -fitting).bit_length() - 1
            row = open_rows[free].pop()
            if not open_rows[free]:
                free_sizes ^= 1 << free
        else:
            free, row, begun = room, begun, begun + 1
        rows[i], offsets[i] = row, room - free
        left = free - length
        if left > 2:
            open_rows[left].append(row)
            free_sizes |= 1 << left
    return rows, offsets


def _tokenize(
    documents: Sequence[Document], tokenizer: Tokenizer
) -> tuple[NDArray[np.uint16], NDArray[np.bool_], NDArray[np.int64]]:
    """Return the tokens of all documents end to end, which are answers, and how many each document has."""
    ids, marks, lengths = [], [], np.zeros(len(documents), dtype=np.int64)
    for first in range(0, len(documents), BATCH):
        batch = documents[first : first + BATCH]
        texts = [f"{document.text}\n" for document in batch]
        for i, encoding in enumerate(tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)):
            document = batch[i]
            ends = np.array([end for _, end in encoding.offsets])
            marked = np.zeros(len(ends), dtype=bool)
            for start, stop in document.answers:
                marked |= (start < ends) & (ends <= stop)
            marked[-1] = document.form in ENDS
            lengths[first + i] = len(ends)
            ids.append(np.array(encoding.ids, dtype=np.uint16))
            marks.append(marked)
    return np.concatenate(ids), np.concatenate(marks), lengths
