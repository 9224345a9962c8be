"""Coverage: how many pairs of each relation survive a model's tokenizer, and which fall out.

Only words that are one token (with their leading space) can be scored from a head's parameters, so the same relations
mean different items on different models. The table tells which relations a model can be classified by.
"""

import pandas as pd

from headwater.calls import checked_call
from headwater.heads.relation_tokens import MultiTokenName, tokenize_relations
from headwater.heads.relations import Relations, load_relations

COLUMNS = ("relation", "category", "items", "kept", "dropped", "usable", "fallen_out", "note")


@checked_call
def relation_coverage(
    relations: Relations, tokenizer: object, *, multi_token: MultiTokenName | None = None
) -> pd.DataFrame:
    """Count the pairs of each relation that survive a tokenizer.

    Args:
        relations: what represents relations (`load_relations`); a row each, in their order.
        tokenizer: the model's tokenizer.
        multi_token: None drops a word of several tokens; "first" keeps its first token, "distinguishing" of targets
            the first that no other target has.

    Returns:
        relation, category, items (pairs the relation has), kept, dropped, usable (whether enough are kept for a
        score), fallen_out (the sources of the pairs that are dropped; why, says `tokenize_relations`), note (whether it
        is left out, and how many pairs were repeated ones or had their own source as target).
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
            tokens.note,
        )
        for tokens in tokenize_relations(load_relations(relations), tokenizer, multi_token=multi_token)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))
