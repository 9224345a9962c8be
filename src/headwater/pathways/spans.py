"""From characters to tokens: where the exact tokens of a question and of its answer stand.

1. Exact words are spans of characters: given by the question table, read off a wording, or found as words in a text.
2. The tokens of a text are those the tokenizer made of the prompt and those the model generated; each has the
   characters it stands for (`models.tokens`, `models.generation`). Nothing is tokenized a second time.
3. A span of characters is the run of tokens that hold any of them.
"""

from collections.abc import Iterable

from headwater.models.tokens import Offsets, token_span
from headwater.words import Span


def shifted(spans: Iterable[Span], by: int) -> tuple[Span, ...]:
    """Move spans `by` characters to the right."""
    return tuple((start + by, end + by) for start, end in spans)


def tokens_of(offsets: Offsets, spans: Iterable[Span]) -> tuple[int, ...]:
    """Return the positions of all tokens that hold characters of the spans, ascending, each once."""
    return tuple(sorted({position for start, end in spans for position in token_span(offsets, start, end)}))
