"""Classify every attention head of a model from its parameters.

Elhelo & Geva, "Inferring Functionality of Attention Heads from their Parameters", ACL 2025. A head with factors W_V,
W_O maps a source token s to the logits m_s = x_s W_V W_O W_U. For a relation of n items (s, accepted targets)

    score       = share of items with a target among the k largest entries of m_s
    suppression = share of items with a target among the k smallest

1. Relations are turned into tokens; pairs whose words are not one token, that are repeated, or that a head would hit by
   copying fall out, and so do relations with fewer than 30 pairs left (`relations`).
2. x_s is the token's embedding at layer 0, and from layer 1 on what the first block makes of it (`embedding_choice`).
3. Every layer's heads are scored on all relations, layer by layer (`scores`).
4. The null model: what would shuffled targets have scored? p-values of all scores from the threshold (or from 0.10,
   where that is less) on, then false-discovery control over all heads, relations and both signs, in which what scores
   less counts as p = 1 (`stats.significance`). Below the threshold nothing is called, whatever its p.
5. A rule says which scores count, and the categories of these relations are the head's categories (`categories`).
"""

from pathlib import Path
from typing import Literal

import torch

from headwater.calls import checked_call
from headwater.heads.categories import RULES, apply_rule, head_categories
from headwater.heads.head_map import HeadMap
from headwater.heads.patterns import attention_classes
from headwater.heads.relation_tokens import MultiTokenName
from headwater.heads.relations import Relations, load_relations
from headwater.heads.scores import relation_table, score_table
from headwater.heads.scoring import (
    callable_from,
    checked_scoring,
    chosen_embedding,
    relations_digest,
    scored_layers,
    scored_relations,
)
from headwater.models.hooked import HookedModel
from headwater.models.loading import hooked_of, weights_of
from headwater.models.weights.effective_embedding import EmbeddingName
from headwater.models.weights.weight_source import WeightSource
from headwater.options import checked_flag, checked_name
from headwater.runs.analysis import Run, run_or_resume


@checked_call
def classify_heads(
    model: "HookedModel | WeightSource | str | Path",
    *,
    relations: Relations = None,
    rule: Literal["controlled", "published"] = "controlled",
    k: int | None = None,
    threshold: float = 0.15,
    embedding: EmbeddingName | Literal["auto"] | None = None,
    progress: bool = True,
    out: str | Path | None = None,
    multi_token: MultiTokenName | None = None,
    norm_gain: bool = False,
    every_excess: bool = False,
    attention: bool = False,
    device: str | torch.device | None = None,
) -> HeadMap:
    """Classify every attention head as algorithmic, knowledge, linguistic, translation, several of them, or none.

    The score of a relation is the share of its pairs (s, t) whose t is among the k largest logits of x_s W_V W_O
    W_U; its excess is (score - expected) / (1 - expected), expected where targets are shuffled (Elhelo and Geva,
    ACL 2025).

    Args:
        model: a loaded model; or a checkpoint folder, GGUF file or hub name, then read straight from safetensors (or
            dequantised as it is read) with one layer in memory at a time.
        relations: a folder or file of relations, the name of one of the suite that comes with headwater, a relation,
            or several of these; by default the whole suite.
        rule: "controlled" (chance-corrected score, null model and copying control) or "published" (score alone).
        k: how many of the largest logits count as a hit; by default 1 for copying relations and 10 for others, on
            Llama 3 vocabularies 3 and 25.
        threshold: the chance-corrected score (with `rule="published"`, the score) from which on a head implements a
            relation.
        embedding: what heads from layer 1 on read for a token: "raw", "mlp0", "embed+mlp0", "layer0", or "auto", the
            default of the controlled rule: the one that agrees best with what the first block writes
            (`heads.scoring`). With `rule="published"` by default as published, "mlp0", and "raw" for the shape
            of Llama-3.1-70B. Heads of layer 0 read the raw embedding.
        progress: show a progress bar over layers.
        out: a folder for the result. It keeps finished layers: an interrupted call, repeated, goes on from there.
        multi_token: by default words of several tokens fall out. "first" lets the first token represent a word,
            "distinguishing" for a target the first one that no other target of the relation has (`relation_tokens`).
        norm_gain: fold the gain of each layer's own norm into what its heads read, and that of the final norm into W_U;
            left out by default, as published.
        every_excess: compute `expected`, `excess`, p and q of every head and relation, not only of scores that could be
            called, so that heads can be ranked by them; several times slower. `margin` is there for every head anyway.
        attention: run the model on repeated random tokens as well, and add what each head attends to (previous token,
            duplicate token, induction) as columns of `HeadMap.categories`; see `heads.patterns`.
        device: where a checkpoint is scored, as "cpu" or "cuda"; default: a CUDA device if there is one, else the CPU.
            Scores do not depend on it. A loaded model is scored where it is.

    Raises:
        ModelError: the model cannot be read, or its weights are NaN or infinite.
        InputError: a relation file is wrong, no relation keeps 30 pairs, or an option does not exist.
        RunFolderError: `out` holds another run.
    """
    checked_name("rule", rule, RULES)
    k, threshold = checked_scoring(k, threshold, embedding)
    norm_gain, attention = checked_flag("norm_gain", norm_gain), checked_flag("attention", attention)
    every_excess = checked_flag("every_excess", every_excess)
    given = load_relations(relations)
    weights = weights_of(model, device)
    # The publication keeps items whose target is their source.
    same_words = rule == "published"
    tokenized, ks, usable = scored_relations(given, weights, k, multi_token=multi_token, same_words=same_words)
    wanted = embedding or ("auto" if rule == "controlled" else None)
    chosen, embeddings = chosen_embedding(weights, usable, wanted)
    options = {
        "relations": relations_digest(given),
        "rule": rule,
        "k": k,
        "threshold": threshold,
        "embedding": chosen,
        "multi_token": multi_token,
        "norm_gain": norm_gain,
        "every_excess": every_excess,
        "attention": attention,
    }

    def work(run: Run) -> HeadMap:
        # Below this no head is called whatever its p: the null model there is most of the price and decides nothing.
        null_from = callable_from(threshold) if rule == "controlled" else None
        null_from = 0.0 if every_excess else null_from
        layers = scored_layers(weights, usable, options, run, null_from=null_from)
        table = score_table(layers, [relation for relation, _ in usable])
        table = table.assign(**apply_rule(table, rule, threshold))
        categories = head_categories(table)
        if attention:
            categories = categories.merge(attention_classes(hooked_of(model)), on=["layer", "head"])
        return HeadMap(table, categories, relation_table(tokenized, ks), embeddings, run.record)

    return run_or_resume(HeadMap, "classify_heads", weights, options, work, out=out, progress=progress)
