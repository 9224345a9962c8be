"""Texts of which it is known whether the training data hold them: members and non-members.

A file has a row per text: .jsonl, .json (a list), .csv or .parquet, with the columns `text` and `member`, or `input`
and `label` as WikiMIA has them (Shi et al., ICLR 2024). The embedded model comes with such texts, because its corpus is
known to the last line: members; facts of the corpus in wordings that it does not use ("other wording"); facts that it
does not hold in any ("held out"); and notes, random texts that were told up to 32 times or never ("note").
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from headwater.calls import checked_call
from headwater.data.rows import check_readable, read_objects, read_parquet, refuse_repeated
from headwater.errors import InputError
from headwater.models.packaged import world_folder
from headwater.options import checked_path

NAMES = {"input": "text", "label": "member"}


@checked_call
def load_member_texts(source: str | Path | None = None) -> pd.DataFrame:
    """Read texts and whether they are members.

    Args:
        source: a file as the module describes; None for the texts of the embedded model's world.

    Returns:
        A row per text: `text`, `member` (bool), and what else the file has. The world's have `kind` ("member", "other
        wording", "held out", "note"), `form`, `relation`, `depth` and `times`, how often the corpus holds them.

    Raises:
        InputError: the file is missing or cannot be read, or a row has no text or no label of 1 or 0.
    """
    path = world_folder() / "texts.jsonl" if source is None else checked_path("source", source)
    check_readable(path, "texts")
    table = _read(path)
    table = table.rename(columns={old: new for old, new in NAMES.items() if new not in table})
    missing = {"text", "member"} - set(table)
    if missing or table.empty:
        lacking = f"no column {' and '.join(sorted(missing))}" if missing else "no rows"
        raise InputError(f"{path} has {lacking}; expected text and member, or input and label.")
    for place, (text, member) in enumerate(zip(table["text"], table["member"], strict=True), start=1):
        if not isinstance(text, str) or member not in (0, 1):
            raise InputError(f"{path}, row {place}: expected a text and a label of 1 or 0, found {text!r}, {member!r}.")
    return table.astype({"member": bool})


def _read(path: Path) -> pd.DataFrame:
    if path.suffix in (".jsonl", ".json"):
        return pd.DataFrame([row for _, row in read_objects(path)])
    if path.suffix == ".parquet":
        return read_parquet(path)
    try:
        # pandas would rename the second of two equal columns, silently.
        header = pd.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False)
        refuse_repeated(path, header.iloc[0])
        return pd.read_csv(path, keep_default_na=False)
    except (ValueError, AttributeError, OSError) as error:
        raise InputError(f"{path} cannot be read ({error}).") from None
