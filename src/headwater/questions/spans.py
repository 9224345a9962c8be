"""From characters to tokens: where the exact tokens of a question and of its answer are.

1. Exact words are spans of characters: given by the question table, read off a wording, or found as words in a text.
2. The tokens of a text are those the tokenizer made of the prompt and those the model generated; each has the
   characters it represents (`models.tokens`, `models.generation`). Nothing is tokenized a second time.
3. A span of characters is the run of tokens that hold any of them.
4. `span_shapes`: how long E_A is and where it is. Where these tell right from wrong answers, a probe that reads at
   E_A may know no more.
"""

from collections.abc import Iterable

import pandas as pd

from headwater.models.tokens import Offsets, token_span
from headwater.questions.words import Span


def shifted(spans: Iterable[Span], by: int) -> tuple[Span, ...]:
    """Move spans `by` characters to the right."""
    return tuple((start + by, end + by) for start, end in spans)


def tokens_of(offsets: Offsets, spans: Iterable[Span]) -> tuple[int, ...]:
    """Return the positions of all tokens that hold characters of the spans, ascending, each once."""
    return tuple(sorted({position for start, end in spans for position in token_span(offsets, start, end)}))


def span_shapes(table: pd.DataFrame) -> pd.DataFrame:
    """Return the length and place of E_A in each row of answered questions.

    Args:
        table: `tokens, answer_start, exact_answer_tokens`.

    Returns:
        `exact_length`, its tokens; `exact_before` and `exact_after`, the tokens of the answer before its first and
        after its last one; `exact_share`, its share of the answer's tokens.
    """
    exact, starts, lengths = table["exact_answer_tokens"], table["answer_start"], table["tokens"].map(len)
    sizes = exact.map(len)
    shapes = {
        "exact_length": sizes,
        "exact_before": exact.map(min) - starts,
        "exact_after": lengths - 1 - exact.map(max),
        "exact_share": sizes / (lengths - starts),
    }
    return pd.DataFrame(shapes, index=table.index)
