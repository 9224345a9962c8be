"""Scores of heads by the formula alone."""

import random

import numpy as np
import pandas as pd
import torch

from headwater.heads.relations import Relation
from tests.tiny import WORDS


def random_relation(name: str, category: str | None, seed: int, pairs: int = 36, most_targets: int = 1) -> Relation:
    """Different pairs, none of them of a word with itself."""
    rng = random.Random(seed)
    chosen = {}
    while len(chosen) < pairs:
        source, *targets = rng.sample(WORDS, 1 + rng.randint(1, most_targets))
        chosen[source, frozenset(targets)] = (source, tuple(targets))
    return Relation(name, category, tuple(chosen.values()))


def naive_scores(weights, relations, k_of, embedding: str, norm_gain: bool = False) -> pd.DataFrame:
    """Score, suppression and their shares beyond copying, head by head, from the whole map in float64."""
    rows = []
    everything = torch.arange(weights.shape.d_vocab)
    for layer in range(weights.shape.n_layers):
        factors = weights.layer(layer)
        x = weights.effective_embedding(everything, "raw" if layer == 0 else embedding).double()
        W_U = weights.unembedding().double()
        if norm_gain:
            x, W_U = x * factors.norm_gain.double(), W_U * weights.final_norm_gain().double()[:, None]
        for head in range(weights.shape.n_heads):
            group = head // (weights.shape.n_heads // weights.shape.n_kv_heads)
            ov = factors.W_V[group].double() @ factors.W_O[head].double()
            maps = (x @ ov @ W_U).numpy()
            for tokens in relations:
                shares = [naive_shares(sign * maps, tokens, k_of(tokens.relation)) for sign in (1, -1)]
                margin = naive_margin(maps, np.sqrt((x.numpy() ** 2).mean(1)), tokens)
                rows.append((layer, head, tokens.relation.name, *shares[0], *shares[1], margin))
    columns = [*KEYS, "score", "beyond_copying", "suppression", "suppression_beyond_copying", "margin"]
    return pd.DataFrame(rows, columns=columns)


def default_k(relation: Relation) -> int:
    return 1 if "copying" in relation.name else 10


KEYS = ["layer", "head", "relation"]


def naive_margin(maps: np.ndarray, size: np.ndarray, tokens) -> float:
    """How many logits a target is above the others' targets, item by item."""
    source = tokens.source.numpy()
    means = np.stack([maps[:, list(targets)].mean(1) for targets in tokens.targets], 1)[source] / size[source, None]
    own = means.diagonal()
    return float((own - (means.sum(1) - own) / (len(own) - 1)).mean())


def naive_shares(maps: np.ndarray, tokens, k: int) -> tuple[float, float]:
    hits, beyond = [], []
    for source, targets in zip(tokens.source.tolist(), tokens.targets, strict=True):
        row = maps[source]
        top = [target for target in targets if (row > row[target]).sum() < k]
        hits.append(bool(top))
        beyond.append(any(row[target] > row[source] or target == source for target in top))
    return np.mean(hits), np.mean(beyond)
