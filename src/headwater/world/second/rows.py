"""A corpus as training rows of one length: `<s>`, then documents, a line break after each, packed by best fit.

Documents come in the corpus's order; each goes into the fullest open row that still has room for it. Rows are read in
the order in which they were begun.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headwater.models.tokens import Tokenizer
from headwater.world.corpus import Corpus, Document, Rows
from headwater.world.tokenizer import BOS_ID, PAD_ID
from headwater.world.wording import QUESTION_SETS

BATCH = 50_000
ENDS = frozenset((*QUESTION_SETS, "sentence", "yes or no", "choice", "story", "refusal", "induction"))
"""Forms whose line break is part of the answer: the answer is over."""


def pack_rows(corpus: Corpus, tokenizer: Tokenizer, width: int) -> Rows:
    """Turn a corpus into rows of `width` tokens.

    Returns:
        tokens: shape (row, position), `uint16`, the rest of a row is padding.
        answers: of the same shape, whether a token is part of an answer.

    Raises:
        ValueError: a document is longer than a row.
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


def best_fit(lengths: NDArray[np.int64], room: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row of each document and where in it the document starts; a row has room for so many tokens."""
    if len(lengths) and lengths.max() > room:
        raise ValueError(f"a document of {lengths.max()} tokens does not fit into a row of {room}")
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
