"""Texts of members and non-members put together, each stretch of 32 words told apart within what stands before it.

Zhang et al., ICLR 2025, "WikiMIA_concat": a row has `input`, a text, and `label`, a list with 1 or 0 for every 32 of
its words.

1. Words are what single spaces separate; the stretch j of a text is its words 32 j to 32 j + 32.
2. The text is read once, whole. A stretch has the tokens that hold any of its characters, without the first one, as in
   the released code; behind a beginning-of-sequence token the first stretch keeps its first.
3. A stretch is then a text of its own, with its own label and its own length under zlib.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from headwater.data.rows import check_readable, read_objects
from headwater.errors import InputError
from headwater.likelihood.statistics import TextStatistics
from headwater.models.hooked import HookedModel
from headwater.models.tokens import encode, token_span
from headwater.options import checked_path

WORDS = 32


def load_joined_texts(source: str | Path) -> pd.DataFrame:
    """Read texts put together.

    Args:
        source: a .jsonl, .json (a list) or .parquet file.

    Returns:
        A row per stretch: `row` (of the text, from 0), `text` (the whole one), `start, end` (characters of the
        stretch), `member`.

    Raises:
        InputError: the file cannot be read, or a row has no text or not a label of 1 or 0 for every 32 words.
    """
    path = checked_path("source", source)
    check_readable(path, "texts")
    found = [
        stretch for row, (where, fields) in enumerate(read_objects(path)) for stretch in _stretches(row, where, fields)
    ]
    if not found:
        raise InputError(f"{path} holds no texts.")
    return pd.DataFrame(found, columns=["row", "text", "start", "end", "member"])


def _stretches(row: int, where: str, fields: dict[str, object]) -> Iterator[tuple[int, str, int, int, bool]]:
    text, given = fields.get("input"), fields.get("label")
    labels = given.tolist() if hasattr(given, "tolist") else given
    words = text.split(" ") if isinstance(text, str) else []
    if not words or not isinstance(labels, list) or len(labels) != len(words) // WORDS or set(labels) - {0, 1}:
        raise InputError(
            f"{where}: expected input, a text, and label, a list with 1 or 0 for every {WORDS} of its words "
            f"({len(words) // WORDS}), found {str(given)[:60]}."
        )
    assert isinstance(text, str)
    start = 0
    for place, label in enumerate(labels):
        stretch = " ".join(words[place * WORDS : (place + 1) * WORDS])
        yield row, text, start, start + len(stretch), bool(label)
        start += len(stretch) + 1


def of_stretches(model: HookedModel, stats: TextStatistics, joined: pd.DataFrame) -> TextStatistics:
    """Return the statistics of every stretch, out of those of the whole texts.

    Raises:
        InputError: the tokenizer does not say which characters its tokens hold.
    """
    by_text = dict(tuple(stats.table.groupby("text")))
    tables, texts = [], []
    for number, one in enumerate(joined.to_dict("records")):
        _, offsets = encode(model.tokenizer, one["text"], model.bos)  # type: ignore[arg-type]
        if offsets is None:
            raise InputError("Texts put together need a fast tokenizer, which says the characters of each token.")
        places = token_span(offsets, one["start"], one["end"])
        is_first = one["start"] == 0 and bool(model.bos)
        of_text = by_text.get(one["row"], stats.table.head(0))
        own = of_text[of_text["position"].isin(places if is_first else places[1:])]
        tables.append(own.assign(text=number))
        content = one["text"][one["start"] : one["end"]]
        sizes = {"zlib_bytes": len(zlib.compress(content.encode())), "tokens": len(places), "scored": len(own)}
        texts.append({"text": number, "content": content, **sizes, "windows": 1, "note": "" if len(own) else "empty"})
    return TextStatistics(pd.concat(tables, ignore_index=True), pd.DataFrame(texts), stats.run)
