"""Coverage: how many pairs of each relation survive a model's tokenizer, and which fall out.

Only words that are one token (with their leading space) can be scored from a head's parameters, so the same relations
mean different items on different models. The table tells which relations a model can be classified by.
"""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from headwater.heads.relations import Relation, tokenize_relations

COLUMNS = ("relation", "category", "items", "kept", "dropped", "usable", "fallen_out")


def relation_coverage(relations: Iterable[Relation], tokenizer: Any, *, multi_token: str | None = None) -> pd.DataFrame:
    """Count the pairs of each relation that survive a tokenizer.

    Args:
        relations: the relations, a row each, in their order.
        tokenizer: the model's tokenizer.
        multi_token: None drops a word of several tokens; "first" keeps its first token.

    Returns:
        relation, category, items (pairs the relation has), kept, dropped, usable (whether enough are kept for a
        score), fallen_out (the sources of the pairs that are dropped; why, says `tokenize_relations`).
    """
    rows = [
        (
            tokens.relation.name,
            tokens.relation.category,
            len(tokens.relation.pairs),
            len(tokens.targets),
            len(tokens.dropped),
            tokens.usable,
            tuple(tokens.dropped["source"]),
        )
        for tokens in tokenize_relations(relations, tokenizer, multi_token=multi_token)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))
