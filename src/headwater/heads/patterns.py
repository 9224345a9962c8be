"""What a head attends to: previous-token, duplicate-token and induction heads, on random tokens said twice.

The OV map says what a head writes, not when; these three classes are about when (its QK side). As TransformerLens's
head detector defines them:

    previous_token    to the position before
    duplicate_token   to earlier positions with the same token
    induction         to the positions after those (Olsson et al. 2022)

1. Sequences of random tokens, each said twice in the same order, without text statistics that a head could use.
2. A head's score is the share of its attention on the keys of its class, averaged over the queries that have such
   keys and over sequences: 1 for a perfect head. TransformerLens's detector divides by all queries instead, so that
   its score is this one times the share of queries that have such keys (about half).
3. A head is called by its highest score when that reaches the threshold.
"""

from functools import partial

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwater.axes import Pattern
from headwater.errors import InputError, ModelError
from headwater.models.compat import ATTENTION_CLASSES, keys_of
from headwater.models.edits import looks
from headwater.models.hooked import HookedModel
from headwater.models.memory import in_halves
from headwater.models.sites import hook_name
from headwater.options import checked_count, checked_number, checked_seed, shown

MOST_SEQUENCES = 10_000
"""The score of a head, from 0 to 1, is then exact to 0.005 however much sequences differ."""
SEQUENCES_AT_ONCE = 64
"""How many are in one run of the model: so memory does not grow with their number."""


def attention_classes(
    model: HookedModel, *, sequences: int = 16, length: int = 24, threshold: float = 0.4, seed: int = 0
) -> pd.DataFrame:
    """Score every head as previous-token, duplicate-token and induction head.

    Args:
        model: the model.
        sequences: how many random sequences, at most 10,000.
        length: how many tokens before they are said again; fewer where the vocabulary or the context is small.
        threshold: the score from which on a head is called by a class.
        seed: of the random tokens.

    Returns:
        A row per layer and head: `layer, head, previous_token, duplicate_token, induction` (scores, 0 to 1) and
        `attention_class` (one of these names, or "none").

    Raises:
        ModelError: the model is none that runs.
        InputError: the vocabulary or the context is too small for a repeated sequence, or an option is no number.
    """
    if not isinstance(model, HookedModel):
        raise ModelError(f"model={shown(model)} cannot be run: give what hw.load returns.")
    sequences = checked_count("sequences", sequences, most=MOST_SEQUENCES)
    length = checked_count("length", length, least=2)
    threshold = checked_number("threshold", threshold, above=0.0, below=1.0, up_to=True)
    seed = checked_seed(seed)
    tokens = repeated_tokens(model, sequences, length, seed)
    parts = []
    for start in range(0, sequences, SEQUENCES_AT_ONCE):
        parts += in_halves(range(sequences)[start : start + SEQUENCES_AT_ONCE], partial(_scores, model, tokens))
    scores = torch.stack([found * (rows / sequences) for found, rows in parts]).sum(0)
    columns = dict(zip(ATTENTION_CLASSES, scores.flatten(1).numpy(), strict=True))
    layers = range(model.shape.n_layers)
    table = pd.DataFrame({"layer": [layer for layer in layers for _ in range(model.shape.n_heads)]})
    table["head"] = list(range(model.shape.n_heads)) * model.shape.n_layers
    table = table.assign(**columns)
    best = table[list(ATTENTION_CLASSES)]
    return table.assign(attention_class=best.idxmax(axis=1).where(best.max(axis=1) >= threshold, "none"))


def _scores(
    model: HookedModel, tokens: Int[Tensor, "batch position"], rows: range
) -> tuple[Float[Tensor, "class layer head"], int]:
    """Return the scores of every head on some of the sequences, and on how many."""
    tokens = tokens[rows.start : rows.stop]
    wanted = [torch.stack([keys_of(name, row) for row in tokens]) for name in ATTENTION_CLASSES]
    scores = torch.zeros(len(wanted), model.shape.n_layers, model.shape.n_heads)

    def score(pattern: Pattern, hook: object, layer: int) -> None:
        for index, keys in enumerate(wanted):
            scores[index, layer] = mean_attention(pattern, keys.to(pattern.device))

    layers = range(model.shape.n_layers)
    hooks = [(hook_name("pattern", layer), looks(partial(score, layer=layer))) for layer in layers]
    model.run(tokens, hooks, keep=[-1])
    return scores, len(tokens)


def repeated_tokens(model: HookedModel, sequences: int, length: int, seed: int) -> Int[Tensor, "batch position"]:
    """Draw sequences of different ordinary tokens, each sequence said twice, behind the model's BOS if it wants one."""
    special = set(model.tokenizer.all_special_ids) if model.tokenizer is not None else set()
    known = len(model.tokenizer) if model.tokenizer is not None else model.shape.d_vocab
    ordinary = torch.tensor([token for token in range(min(known, model.shape.d_vocab)) if token not in special])
    n_bos = int(model.bos is not None)
    length = min(length, len(ordinary), (model.shape.n_ctx - n_bos) // 2)
    if length < 2:
        raise InputError(f"{model.name} has too small a vocabulary or context to say a sequence of tokens twice.")
    generator = torch.Generator().manual_seed(seed)
    once = torch.stack([torch.randperm(len(ordinary), generator=generator)[:length] for _ in range(sequences)])
    bos = torch.full((sequences, n_bos), model.bos or 0)
    return torch.cat([bos, ordinary[once], ordinary[once]], dim=1)


def mean_attention(pattern: Pattern, keys: Bool[Tensor, "batch query key"]) -> Float[Tensor, "head"]:
    """Return each head's share of attention on `keys`, averaged over the queries that have any."""
    on_keys = torch.einsum("b h q k, b q k -> h", pattern.float(), keys.float())
    return (on_keys / keys.any(-1).sum().clamp(min=1)).cpu()
