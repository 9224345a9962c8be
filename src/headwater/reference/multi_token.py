"""The published correlation of static scores with what heads write behind sources of several tokens.

Elhelo & Geva, ACL 2025: static scores are about sources of one token; do they tell what a head does at the last token
of a longer one?

1. Items: a source of several tokens, without a space in front, and a target of one, with it.
2. Prompt: the opening, which ends in a space, and the source; both tokenized apart, as the published code does.
3. Dynamic scores at the prompt's last token, which is the source's last, with context and without (`dynamic_scores`);
   their correlation with the static scores over heads.

Eleven relations were published, of models for which they have enough items of single tokens.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from headwater.heads.head_map import HeadMap
from headwater.heads.prompts import SourcePrompts, relations_of
from headwater.heads.relation_tokens import TokenRelation, word_tokens
from headwater.heads.relations import Relation, Relations
from headwater.heads.validation import correlate, scored_prompts
from headwater.models.hooked import HookedModel
from headwater.models.tokens import Batch, pad_id
from headwater.progress import progress_bar

OPENING = "This is a document about "
RELATIONS = (
    "country_to_capital_wikidata", "country_to_official_language_wikidata", "entity_to_pronoun",
    "general_copying_english_500", "name_copying", "object_superclass", "word_first_letter", "word_last_letter",
    "word_to_synonym", "work_location", "year_to_following",
)  # fmt: skip


def multi_token_correlations(
    model: HookedModel, head_map: HeadMap, relations: Relations, *, batch_size: int = 64, progress: bool = True
) -> pd.DataFrame:
    """Correlate a head map with dynamic scores of sources of several tokens.

    Args:
        model: the model that was classified.
        head_map: its static scores; relations and k are taken from there.
        relations: what `classify_heads` was given.
        batch_size: sentences in a run.
        progress: show a bar.

    Returns:
        A row per published relation that the map has, sign and context: `relation, sign, context, pearson, low, high,
        heads`; none of a relation without such an item.
    """
    known = {name: one for name, one in relations_of(model, head_map, relations).items() if name in RELATIONS}
    asked = [(*multi_token_prompts(model, tokens.relation), k) for tokens, k in known.values()]
    asked = [one for one in asked if one[1].targets]
    if not asked:
        return pd.DataFrame(columns=["relation", "sign", "context", "pearson", "low", "high", "heads"])
    bar = progress_bar(progress, asked, desc="Longer sources", unit="relation")
    return correlate(scored_prompts(model, head_map, bar, [OPENING], batch_size))


def multi_token_prompts(model: HookedModel, relation: Relation) -> tuple[SourcePrompts, TokenRelation]:
    """Return the prompts of a relation's longer sources, and the items that they are of."""
    tokenizer: Any = model.tokenizer
    opening = tokenizer(OPENING)["input_ids"]
    rows, targets = [], []
    for source, accepted in relation.pairs:
        ids = tokenizer.encode(source, add_special_tokens=False)
        single = {tokens[0] for tokens in word_tokens(tokenizer, accepted) if len(tokens) == 1}
        if len(ids) > 1 and single:
            rows.append([*opening, *ids])
            targets.append(tuple(sorted(single)))
    batch = Batch.of(rows, pad_id(tokenizer)) if rows else Batch.of([opening], pad_id(tokenizer)).rows(0, 0)
    last = batch.lengths - 1
    prompts = SourcePrompts(batch, last, torch.arange(len(rows)), torch.zeros(len(rows), dtype=torch.long))
    last_tokens = torch.tensor([row[-1] for row in rows], dtype=torch.long)
    dropped = pd.DataFrame(columns=["source", "target", "reason"])
    return prompts, TokenRelation(relation, last_tokens, tuple(targets), dropped)
