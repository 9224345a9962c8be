"""Random texts that are told once, twice, 4, 8, 16 or 32 times, or never: what is remembered of a text by its count.

A note is a date and ten words that have nothing to do with one another, so that it is known only by having been read.
"""

from collections.abc import Sequence

import numpy as np
from tools.world.documents import Document

TIMES = (0, 1, 2, 4, 8, 16, 32)
LENGTH = 10


def notes(rng: np.random.Generator, words: Sequence[str], per_count: int) -> list[Document]:
    """Write so many notes for each number of `TIMES`; the loss counts every word after the first three."""
    documents = []
    for number, times in enumerate(np.repeat(TIMES, per_count).tolist()):
        drawn = [words[int(place)] for place in rng.choice(len(words), size=LENGTH, replace=False)]
        start = f"Note {number % 1000} : {' '.join(drawn[:3])}"
        text = f"{start} {' '.join(drawn[3:])}."
        documents.append(Document(text, ((len(start) + 1, len(text) - 1),), (), "note", times))
    return documents


def note_rows(documents: Sequence[Document]) -> list[dict[str, object]]:
    """Return the notes among documents in the columns of the membership texts, with how often each was told."""
    about = {"kind": "note", "form": "note", "relation": "", "depth": 0}
    notes = [document for document in documents if document.form == "note"]
    return [{"text": note.text, "member": note.times > 0, **about, "times": note.times} for note in notes]
