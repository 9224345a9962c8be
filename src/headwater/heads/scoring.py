"""Shared by `classify`, `comparison` and sensitivity: which relations are scored, with which k, layer by layer.

Effective embedding: the input of heads from layer 1 on for a token, chosen by comparison with the first block's output.
The publication uses MLP₀(LN(E)) in every model. How close this is to the residual stream after block 0 differs between
models; if it is far off, a head map can be empty. So every candidate is compared with the residual stream at the token
in [BOS, token] ("layer0"), on the relations' source tokens:

    agreement = mean over source tokens of cos(x_s, resid_post of block 0)

`embedding="auto"` uses the published embedding unless another one agrees better by more than `LEVEL`; docs/heads.md
shows which choice predicts causes on three models. "layer0" itself is not a candidate: it agrees by definition, costs
the computation of a block, and predicts no better.

`Sensitivity`: how much a head map depends on its options. A label thresholds a continuous number, so the number of
labelled heads depends on the threshold. The counts are the results of `categories.apply_rule` at each threshold, from
the map's scores and from the scores of other settings.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwater.errors import AgreementWarning, InputError
from headwater.heads.categories import CATEGORIES, RULES, apply_rule
from headwater.heads.relations import MIN_PAIRS, MultiTokenName, Relation, TokenRelation, tokenize_relations
from headwater.heads.scores import MOMENTS, LayerScorer, suite_pairs
from headwater.models.effective_embedding import LLAMA_3_VOCABULARY, published_embedding
from headwater.models.weights import LayersAhead, WeightSource
from headwater.options import checked_count, checked_number
from headwater.runs.analysis import Run
from headwater.runs.identity import describe, digest
from headwater.runs.record import RunRecord
from headwater.runs.result import Result

LEVEL = 0.02
"""By how much another embedding must agree better than the published one to be chosen."""
LOW = 0.6
"""Reports warn below this agreement."""
TOKENS = 512
"""Most source tokens to compare, evenly spaced."""


def compare_embeddings(
    weights: WeightSource, tokens: Int[Tensor, " token"], embedding: str | None
) -> tuple[str, pd.DataFrame]:
    """Compare the effective embeddings of some tokens with the first block's output, and choose one.

    `embedding` is "auto" for the best one, None for the published one, or a name. Returns the chosen name, and a row
    per embedding except "layer0": `embedding, agreement` (NaN if it cannot be computed) and `chosen`.
    """
    tokens = tokens.unique()
    # Evenly spaced ids, because low ids are frequent words and would fill the first 512.
    tokens = tokens[:: -(-len(tokens) // TOKENS)]
    written = _read(weights, tokens, "layer0")
    agreement = {
        kind: torch.cosine_similarity(_read(weights, tokens, kind), written, dim=-1).mean().item()
        for kind in ("mlp0", "embed+mlp0", "raw")
    }
    published = published_embedding(weights.shape)
    if embedding == "auto":
        best = max(agreement, key=lambda kind: agreement[kind] + LEVEL * (kind == published))
        embedding = published if pd.isna(agreement[published]) else best
    chosen = embedding or published
    rows = [(kind, value, kind == chosen) for kind, value in agreement.items()]
    return chosen, pd.DataFrame(rows, columns=["embedding", "agreement", "chosen"])


def _read(weights: WeightSource, tokens: Int[Tensor, " token"], kind: str) -> Float[Tensor, "token d_model"]:
    """Return an effective embedding in float64; NaN if the model has none (for instance no BOS to prepend)."""
    try:
        return weights.effective_embedding(tokens, kind).double()
    except InputError:
        return torch.full((len(tokens), weights.shape.d_model), torch.nan, dtype=torch.float64, device=weights.device)


def sentences_of_embedding(embedding: str, agreement: pd.DataFrame) -> list[str]:
    """Return sentences on the embedding of heads from layer 1 on, and its agreement with the first block's output."""
    by_name = dict(agreement.dropna().set_index("embedding")["agreement"].astype(float))
    if embedding == "layer0":
        return ["Heads from layer 1 on read the first block's output for [BOS, token] (embedding='layer0')."]
    if embedding not in by_name:
        return [f"The agreement of embedding={embedding!r} with the first block's output cannot be computed here."]
    others = ", ".join(f"{kind!r} {value:.2f}" for kind, value in by_name.items() if kind != embedding)
    sentences = [
        f"Heads from layer 1 on read embedding={embedding!r}, whose mean cosine to the first block's output for the "
        f"relations' sources is {by_name[embedding]:.2f} ({others})."
    ]
    if by_name[embedding] < LOW:
        sentences.append(
            f"That is low (below {LOW}): in a text these heads may read something else, which their scores do not "
            "describe."
        )
    return sentences


THRESHOLDS = (0.10, 0.15, 0.20, 0.25, 0.30)
AS_MAPPED = "as mapped"
"""The setting of the map itself."""


@dataclass(frozen=True, eq=False, repr=False)
class Sensitivity(Result):
    """The result of `HeadMap.sensitivity`, drawn as heads by threshold: a line per category and a panel per rule.

    If other settings were scored, another panel shows how many heads each classifies, and how many of the map's.
    """

    table: pd.DataFrame
    """A row per setting, rule and threshold: `setting, rule, threshold, heads` (in any category), `kept`, how many of
    these share a category with the same head under the map's own setting, at the same rule and threshold, and a column
    per category, where a head of several categories counts in each."""
    run: RunRecord
    """The run record of the head map."""

    def summary(self) -> pd.DataFrame:
        """Return the number of heads in any category: a row per setting and threshold, and a column per rule."""
        heads = self.table.pivot(index=["setting", "threshold"], columns="rule", values="heads")
        order = dict.fromkeys(self.table["setting"])
        heads = heads[[rule for rule in RULES if rule in heads]].rename_axis(columns=None)
        return heads.loc[list(order)].reset_index()

    def report(self) -> list[str]:
        """Report how many heads are classified at the lowest and highest threshold, and under other settings."""
        sentences = []
        for rule, rows in self.as_mapped.groupby("rule", sort=False):
            first, last = rows.iloc[0], rows.iloc[-1]
            sentences.append(
                f"Under the {rule} rule {first['heads']} heads are in a category at a threshold of "
                f"{first['threshold']:.2f}, and {last['heads']} at {last['threshold']:.2f}."
            )
        own, *others = (row for _, row in self.at_own_threshold.iterrows())
        sentences += [
            f"With {row['setting']}, otherwise as mapped: {row['heads']} heads; {row['kept']} of them share a category "
            f"with the map's {own['heads']} heads."
            for row in others
        ]
        return sentences

    @property
    def as_mapped(self) -> pd.DataFrame:
        """The rows of the map's own setting."""
        return self.table[self.table["setting"] == AS_MAPPED]

    @property
    def at_own_threshold(self) -> pd.DataFrame:
        """A row per setting, under the map's rule, at the threshold of `THRESHOLDS` nearest to the map's."""
        nearest = min(THRESHOLDS, key=lambda one: abs(one - float(self.run.options["threshold"])))
        own = self.table["rule"] == self.run.options["rule"]
        return self.table[own & (self.table["threshold"] == nearest)]


def heads_by_threshold(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the table of a `Sensitivity`, from one score table per setting, the map's own first."""
    rows, as_mapped = [], dict[tuple[str, float], pd.DataFrame]()
    for setting, table in tables.items():
        # The controlled rule needs the numbers of a null model.
        rules = RULES if table["q_value"].notna().any() else ["published"]
        for rule, threshold in itertools.product(rules, THRESHOLDS):
            # From the setting's scores: no score is computed again for a threshold.
            flags = apply_rule(table, rule, threshold)
            called = table[(flags["implemented"] | flags["suppressed"]) & table["category"].notna()]
            called = called[["layer", "head", "category"]].drop_duplicates()
            # The first setting is the map's own; the others are compared with the heads it classifies.
            common = called.merge(as_mapped.setdefault((rule, threshold), called))
            heads, kept = (len(one[["layer", "head"]].drop_duplicates()) for one in (called, common))
            counts = called["category"].value_counts().reindex(list(CATEGORIES), fill_value=0)
            rows.append((setting, rule, threshold, heads, kept, *counts))
    return pd.DataFrame(rows, columns=["setting", "rule", "threshold", "heads", "kept", *CATEGORIES])


def callable_from(threshold: float) -> float:
    """Return the lowest score that can reach this threshold, or one of the sensitivity table's."""
    return min(threshold, *THRESHOLDS)


Usable: TypeAlias = Sequence[tuple[TokenRelation, int]]
"""Relations with enough items, each with its k: a target among the k largest logits is a hit."""


def chosen_embedding(weights: WeightSource, usable: Usable, embedding: str | None) -> tuple[str, pd.DataFrame]:
    """Return `compare_embeddings` of the relations' sources; warn if the default (published) one agrees badly."""
    sources = torch.cat([relation.source for relation, _ in usable])
    name, embeddings = compare_embeddings(weights, sources, embedding)
    if embedding is None and (embeddings.loc[embeddings["chosen"], "agreement"] < LOW).any():
        note = " ".join(sentences_of_embedding(name, embeddings))
        warnings.warn(f"{weights.name}: {note}", AgreementWarning, stacklevel=4)
    return name, embeddings


def scored_relations(
    relations: Sequence[Relation],
    weights: WeightSource,
    k: int | None,
    *,
    multi_token: MultiTokenName | None = None,
    same_words: bool = False,
) -> tuple[list[TokenRelation], list[int], Usable]:
    """Return relations as token ids, the k of each, and those with enough items left; see `tokenize_relations`."""
    tokenized = tokenize_relations(relations, weights.tokenizer, multi_token=multi_token, same_words=same_words)
    ks = [hits_of(relation, weights, k) for relation in relations]
    usable = [(tokens, k) for tokens, k in zip(tokenized, ks, strict=True) if tokens.usable]
    if not tokenized:
        raise InputError("No relations were given: give a folder of relations, or None for headwater's suite.")
    if not usable:
        best = max(tokenized, key=lambda relation: len(relation.targets))
        raise InputError(
            f"None of the {len(tokenized)} relations keeps {MIN_PAIRS} single-token pairs with the tokenizer of "
            f"{weights.name}; the most is {len(best.targets)} of {len(best.relation.pairs)} ({best.relation.name}). "
            "Give relations between words that are single tokens; `headwater relations MODEL` lists what survives."
        )
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
    """Score a model's heads, each layer a piece of the run; return the result of `score_layer` for each.

    `options` holds `embedding` and `norm_gain`. Scores of at least `null_from` also get the null model of shuffled
    targets; None for no null model. With `items` the hits of single items are kept.
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
    mask: Bool[Tensor, "layer sign head relation"],
    desc: str,
) -> list[dict[str, Tensor]]:
    """Return the result of `scored_layers` with moments under shuffled targets added wherever `mask` is true."""
    missing = mask & torch.stack([torch.stack([one[name][..., 0].isnan() for name in MOMENTS]) for one in layers])
    missing_layers = missing.any(dim=(1, 2, 3)).nonzero()[:, 0].tolist()
    with LayersAhead(weights) as read_layer, run.bar(desc, "layer", len(missing_layers)) as bar:
        scorer = LayerScorer(weights, read_layer, suite_pairs(*zip(*usable, strict=True)), None, options)
        pieces = run.pieces("null", missing_layers, lambda layer: scorer.moments(layer, missing[layer]), bar)
        by_layer = dict(zip(missing_layers, pieces, strict=True))
    for layer, piece in by_layer.items():
        known = layers[layer]
        layers[layer] = known | {name: torch.where(known[name].isnan(), piece[name], known[name]) for name in MOMENTS}
    return layers


def relations_digest(relations: Sequence[Relation]) -> str:
    """Return the hash that a run records for its relations, of their names, categories and pairs."""
    return digest(describe([[relation.name, relation.category, relation.pairs] for relation in relations]))


def hits_of(relation: Relation, weights: WeightSource, k: int | None) -> int:
    """Return the k of a relation: the argument, or the published k by relation and vocabulary."""
    d_vocab = weights.shape.d_vocab
    if k is not None and k >= d_vocab:
        raise InputError(f"k={k}: every token would be a hit; the vocabulary of {weights.name} has {d_vocab:,}.")
    copying, others = (3, 25) if d_vocab == LLAMA_3_VOCABULARY else (1, 10)
    return k or (copying if relation.is_copying else others)


def checked_scoring(k: int | None, threshold: float) -> tuple[int | None, float]:
    """Return k and threshold as plain numbers."""
    threshold = checked_number("threshold", threshold, above=0.0, below=1.0, up_to=True)
    return None if k is None else checked_count("k", k), threshold
