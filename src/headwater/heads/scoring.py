"""What classifying, comparing and varying have in common: which relations are scored, with which k, layer by layer."""

import warnings
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from headwater.errors import AgreementWarning, InputError
from headwater.heads.embedding_choice import LOW, compare_embeddings, sentences_of_embedding
from headwater.heads.relation_tokens import MIN_PAIRS, MultiTokenName, TokenRelation, tokenize_relations
from headwater.heads.relations import Relation
from headwater.heads.scores import MOMENTS, LayerScorer, suite_pairs
from headwater.heads.sensitivity import THRESHOLDS
from headwater.models.shape import ModelShape
from headwater.models.weights.effective_embedding import KINDS, LLAMA_3_VOCABULARY
from headwater.models.weights.opening import LayersAhead
from headwater.models.weights.weight_source import WeightSource
from headwater.options import checked_count, checked_name, checked_number
from headwater.runs.analysis import Run
from headwater.runs.identity import describe, digest


def callable_from(threshold: float) -> float:
    """Return the score from which on a head is called at some threshold of the sensitivity table, or at this one."""
    return min(threshold, *THRESHOLDS)


Usable: TypeAlias = Sequence[tuple[TokenRelation, int]]
"""Relations with enough items, and how many of the largest logits count as a hit for each."""


def chosen_embedding(weights: WeightSource, usable: Usable, embedding: str | None) -> tuple[str, pd.DataFrame]:
    """Return the embedding to score with, and how each agrees with what the first block writes.

    Args:
        weights: the model.
        usable: the relations, whose sources are compared.
        embedding: one by name, "auto" for the one that agrees best, or None for the published one, of which a warning
            says where it agrees badly.
    """
    sources = torch.cat([relation.source for relation, _ in usable])
    name, embeddings = compare_embeddings(weights, sources, embedding)
    if embedding is None and (embeddings.loc[embeddings["chosen"], "agreement"] < LOW).any():
        said = " ".join(sentences_of_embedding(name, embeddings))
        warnings.warn(f"{weights.name}: {said}", AgreementWarning, stacklevel=4)
    return name, embeddings


def scored_relations(
    given: Sequence[Relation],
    weights: WeightSource,
    k: int | None,
    *,
    multi_token: MultiTokenName | None = None,
    same_words: bool = False,
) -> tuple[list[TokenRelation], list[int], Usable]:
    """Return relations as token ids, the k of each, and which have enough items left; see `tokenize_relations`.

    Raises:
        InputError: there is none, or k is every token of the vocabulary.
    """
    tokenized = tokenize_relations(given, weights.tokenizer, multi_token=multi_token, same_words=same_words)
    ks = [hits_of(relation, weights, k) for relation in given]
    usable = [(tokens, k) for tokens, k in zip(tokenized, ks, strict=True) if tokens.usable]
    if not usable:
        raise _nothing_usable(tokenized, weights.name)
    return list(tokenized), ks, usable


def scored_layers(
    weights: WeightSource,
    usable: Usable,
    options: Mapping[str, object],
    run: Run,
    *,
    null_from: float | None,
    items: bool = False,
    desc: str = "Scoring heads",
) -> list[dict[str, Tensor]]:
    """Score a model's heads layer by layer, each a piece of the run.

    Args:
        weights: the model.
        usable: what is scored.
        options: `embedding` and `norm_gain`.
        run: keeps the pieces and shows the bar.
        null_from: the score from which on shuffled targets are scored too; None for none.
        items: whether the hits of single items are kept.
        desc: what the bar says.

    Returns:
        What `LayerScores` holds of each layer, by name.
    """
    n_layers = weights.shape.n_layers
    with LayersAhead(weights) as read_layer, run.bar(desc, "layer", n_layers) as bar:
        scorer = LayerScorer(weights, read_layer, suite_pairs(*zip(*usable, strict=True)), null_from, options, items)
        return list(run.pieces("layer", range(n_layers), scorer, bar))


def with_moments(
    weights: WeightSource,
    usable: Usable,
    options: Mapping[str, object],
    run: Run,
    layers: list[dict[str, Tensor]],
    wanted: Bool[Tensor, "layer sign head relation"],
    desc: str,
) -> list[dict[str, Tensor]]:
    """Return what `scored_layers` returned, with the moments under shuffled targets of what is wanted besides.

    Args:
        weights: the model.
        usable: what was scored.
        options: `embedding` and `norm_gain`.
        run: keeps the pieces and shows the bar.
        layers: what `scored_layers` returned.
        wanted: by layer, of which signs, heads and relations; those that have moments are not made again.
        desc: what the bar says.
    """
    missing = wanted & torch.stack([torch.stack([one[name][..., 0].isnan() for name in MOMENTS]) for one in layers])
    there = [layer for layer in range(len(layers)) if missing[layer].any()]
    with LayersAhead(weights) as read_layer, run.bar(desc, "layer", len(there)) as bar:
        scorer = LayerScorer(weights, read_layer, suite_pairs(*zip(*usable, strict=True)), None, options)
        pieces = run.pieces("null", there, lambda layer: scorer.moments(layer, missing[layer]), bar)
        found = dict(zip(there, pieces, strict=True))
    for layer, piece in found.items():
        layers[layer] = layers[layer] | {
            name: torch.where(layers[layer][name].isnan(), piece[name], layers[layer][name]) for name in MOMENTS
        }
    return layers


def relations_digest(relations: Sequence[Relation]) -> str:
    """Return what a run records of its relations: a hash of their names, categories and pairs."""
    return digest(describe([[relation.name, relation.category, relation.pairs] for relation in relations]))


def hits_of(relation: Relation, weights: WeightSource, k: int | None) -> int:
    """Return how many of the largest logits count as a hit: k, or as published.

    Raises:
        InputError: that is every token of the vocabulary.
    """
    if k is not None and k >= weights.shape.d_vocab:
        raise InputError(
            f"k={k}: every token would be a hit; the vocabulary of {weights.name} has {weights.shape.d_vocab:,}."
        )
    return k or published_k(relation, weights.shape)


def published_k(relation: Relation, shape: ModelShape) -> int:
    """Return how many logits counted as a hit in the publication: by relation and vocabulary."""
    if shape.d_vocab == LLAMA_3_VOCABULARY:
        return 3 if relation.is_copying else 25
    return 1 if relation.is_copying else 10


def checked_scoring(k: int | None, threshold: float, embedding: str | None) -> tuple[int | None, float]:
    """Return k and threshold as plain numbers.

    Raises:
        InputError: one of them is none, or there is no such embedding.
    """
    if embedding is not None:
        checked_name("embedding", embedding, ("auto", *KINDS))
    threshold = checked_number("threshold", threshold, above=0.0, below=1.0, up_to=True)
    return None if k is None else checked_count("k", k), threshold


def _nothing_usable(relations: Sequence[TokenRelation], model: str) -> InputError:
    if not relations:
        return InputError("No relations were given: give a folder of relations, or none for headwater's own suite.")
    best = max(relations, key=lambda relation: len(relation.targets))
    return InputError(
        f"None of the {len(relations)} relations keeps {MIN_PAIRS} pairs of single tokens with the tokenizer of "
        f"{model}; the most is {len(best.targets)} of {len(best.relation.pairs)} ({best.relation.name}). Give "
        "relations between words that are one token there; `headwater relations MODEL` lists what survives."
    )
