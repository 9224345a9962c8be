"""Documents, and the corpus that they make: which texts there are, what they tell, and how often each comes."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tools.world.facts import World

from headwater.world.wording import Span


@dataclass(frozen=True)
class Document:
    """One text of the corpus."""

    text: str
    answers: tuple[Span, ...]
    """Where the words stand that the text is about: (start, end) of each."""
    facts: tuple[int, ...]
    """The numbers of the facts it tells."""
    form: str
    """The form of a telling (`forms`), a question set, a task, "story", "refusal", "list", "note", ..."""
    times: int
    """How often the corpus holds it; 0 for a text that it could hold and does not."""


@dataclass(frozen=True)
class Corpus:
    """Every document and the order they come in."""

    world: World
    documents: tuple[Document, ...]
    order: NDArray[np.int64]

    @cached_property
    def frequency(self) -> NDArray[np.int64]:
        """How often each fact is told, over all documents."""
        counts = np.zeros(len(self.world.facts), dtype=np.int64)
        for document in self.documents:
            for fact in document.facts:
                counts[fact] += document.times
        return counts

    @cached_property
    def times(self) -> dict[str, int]:
        """How often each text comes."""
        return {document.text: document.times for document in self.documents}
