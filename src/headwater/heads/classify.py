"""Classify every attention head of a model from its parameters.

Elhelo & Geva, "Inferring Functionality of Attention Heads from their Parameters", ACL 2025. A head with factors W_V,
W_O maps a source token s to the logits m_s = x_s W_V W_O W_U. For a relation of n items (s, accepted targets)

    score       = share of items with a target among the k largest entries of m_s
    suppression = share of items with a target among the k smallest

1. Relations are turned into tokens; pairs whose words are not one token, that are repeated, or that a head would hit by
   copying fall out, and so do relations with fewer than 30 pairs left (`relations`).
2. x_s is the token's embedding at layer 0, and from layer 1 on what the first block makes of it.
3. Every layer's heads are scored on all relations, layer by layer (`scores`).
4. The null model: what would shuffled targets have scored? p-values, then false-discovery control over heads,
   relations and both signs (`stats.significance`).
5. A rule says which scores count, and the categories of these relations are the head's categories (`categories`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pandas as pd
import torch
from torch import Tensor

from headwater.errors import InputError, ModelError
from headwater.heads.categories import RULES, add_excess, apply_rule, head_categories, label_counts, sensitivity
from headwater.heads.findings import as_json, best_heads, sentences_of
from headwater.heads.patterns import attention_classes
from headwater.heads.relations import (
    MIN_PAIRS,
    Relation,
    Relations,
    TokenRelation,
    load_relations,
    tokenize_relations,
)
from headwater.heads.salient import salient_operations
from headwater.heads.scores import SuitePairs, score_layer, suite_pairs
from headwater.heads.tables import relation_table, score_table
from headwater.kernels.devices import usable_device
from headwater.kernels.ov import OVMaps, longest_column
from headwater.models.effective_embedding import KINDS
from headwater.models.hooked import HookedModel
from headwater.models.layers_ahead import LayersAhead
from headwater.models.loading import load
from headwater.models.shape import ModelShape
from headwater.models.weights import WeightSource, open_weights
from headwater.options import checked_count, checked_flag, checked_name, checked_number
from headwater.runs.analysis import Run, carry_out
from headwater.runs.findings import each_row
from headwater.runs.identity import describe, digest
from headwater.runs.record import RunRecord
from headwater.runs.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LLAMA_3_VOCABULARY = 128256


@dataclass(frozen=True, eq=False, repr=False)
class HeadMap(Result):
    """The heads of a model, scored on relations and put into categories."""

    table: pd.DataFrame
    """A row per layer, head and relation.

    `layer, head, relation, category`; `score, suppression` (0 to 1); `expected`, the mean score under shuffled targets;
    `excess`, the chance-corrected score (score - expected) / (1 - expected); `p_value, q_value` of the score under
    shuffled targets; `pairs`, the number of items; `low, high`, the 95 % interval of the score; `beyond_copying`, the
    score that counts only items whose target beats the source itself; the same of the suppression side; and what the
    rule says: `implemented, suppressed, copying`. With `rule="published"` the null model's columns, and so the excess,
    are NaN.
    """
    categories: pd.DataFrame
    """A row per layer and head: `categories`, a tuple of names, and `label`, the figure's name for it; with
    `attention=True` also `previous_token, duplicate_token, induction` (0 to 1) and `attention_class`."""
    relations: pd.DataFrame
    """A row per relation: `relation, category, pairs, kept, used, k, note`."""
    run: RunRecord

    @property
    def title(self) -> str:
        """The model's short name."""
        return Path(self.run.model).name

    @classmethod
    def load(cls, folder: str | Path) -> "HeadMap":
        """Read back a head map, also one of headwater 0.1.0, which did not know the excess.

        Its excess follows from its scores, and what the rule says of it is said anew: 0.1.0's controlled rule asked for
        a score of the threshold, not for an excess.

        Raises:
            RunFolderError: the folder holds no finished run, or a run of another kind.
        """
        result = super().load(folder)
        return result if "excess" in result.table else _with_excess(result)

    def sensitivity(self) -> pd.DataFrame:
        """Return how many heads would be in each category under both rules, for thresholds from 0.10 to 0.30.

        Returns:
            A row per rule and threshold: `rule, threshold, heads` (in any category), and a column per category, in
            which a head of several categories counts in each. A map made with `rule="published"` has no null model,
            so its rows are those of that rule alone.
        """
        return sensitivity(self.table)

    def summary(self) -> pd.DataFrame:
        """Return a row per relation: how many heads implement or suppress it, and its best head.

        `relation, category, pairs, heads`, then `layer, head, score, expected, excess` of the head with the largest
        excess, where there is one, else the highest score.
        """
        return best_heads(self.table)

    def findings(self) -> dict[str, Any]:
        """Return the numbers worth a glance, as JSON values: heads per label, and the rows of the summary."""
        return {
            "model": self.run.model,
            "rule": self.run.options["rule"],
            "heads": len(self.categories),
            "labels": label_counts(self.categories),
            "relations": [as_json(row) for row in each_row(self.summary())],
            "left_out": self.relations.loc[~self.relations["used"], "relation"].tolist(),
        }

    def report(self) -> list[str]:
        """Return how many heads are classified, which is the strongest, and which relations have none."""
        return sentences_of(self.findings())

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw layer by head, a mark per head in the colour of its category."""
        return cast("Axes", self._drawn(ax))

    def salient(
        self,
        layer: int,
        head: int,
        *,
        model: "HookedModel | str | Path | None" = None,
        sources: int = 15,
        targets: int = 5,
    ) -> pd.DataFrame:
        """Return the tokens a head writes most strongly about, and what it maps them to.

        Args:
            layer: the head's layer.
            head: the head.
            model: the model these heads belong to; by default it is opened again by its name.
            sources: how many salient tokens.
            targets: how many tokens to list for each, written and suppressed.

        Raises:
            ModelError: the model cannot be opened by its name, or is another one.
            InputError: the head does not exist.
        """
        layer = checked_count("layer", layer, least=0)
        if model is None:
            model = load() if self.run.model == "embedded" else self.run.model
        weights = _open(model)
        if other := self.run.mismatch(weights):
            raise ModelError(
                f"{weights.name} is not the model of this head map, {self.run.model}: it has {other}. "
                "Pass that model as model=."
            )
        embedding = self.run.options["embedding"] if layer > 0 else "raw"
        return salient_operations(weights, layer, head, embedding=embedding, sources=sources, targets=targets)


def classify_heads(
    model: "HookedModel | WeightSource | str | Path",
    *,
    relations: Relations = None,
    rule: str = "controlled",
    k: int | None = None,
    threshold: float = 0.15,
    embedding: str | None = None,
    progress: bool = True,
    out: str | Path | None = None,
    multi_token: str | None = None,
    norm_gain: bool = False,
    attention: bool = False,
    device: str | torch.device | None = None,
) -> HeadMap:
    """Classify every attention head as algorithmic, knowledge, linguistic, translation, several of them, or none.

    Args:
        model: a loaded model; or a checkpoint folder or hub name, then read straight from safetensors with one layer in
            memory at a time.
        relations: a folder or file of relations, the name of one of the suite that comes with headwater, a relation,
            or several of these; by default the whole suite.
        rule: "controlled" (chance-corrected score, null model and copying control) or "published" (score alone).
        k: how many of the largest logits count as a hit; by default 1 for copying relations and 10 for others, on
            Llama 3 vocabularies 3 and 25.
        threshold: the chance-corrected score (with `rule="published"`, the score) from which on a head implements a
            relation.
        embedding: what heads from layer 1 on read for a token: "raw", "mlp0", "embed+mlp0" or "layer0"; by default, as
            published, "mlp0", and "raw" for the shape of Llama-3.1-70B. Heads of layer 0 read the raw embedding.
        progress: show a progress bar over layers.
        out: a folder for the result. It keeps finished layers: an interrupted call, repeated, goes on from there.
        multi_token: "first" lets the first token stand for a word of several; by default such words fall out.
        norm_gain: fold the gain of each layer's own norm into what its heads read, and that of the final norm into W_U;
            left out by default, as published.
        attention: run the model on repeated random tokens as well, and add what each head attends to (previous token,
            duplicate token, induction) as columns of `HeadMap.categories`; see `heads.patterns`.
        device: where a checkpoint is scored; default: a CUDA device if there is one, else the CPU. Scores do not depend
            on it. A loaded model is scored where it is.

    Raises:
        ModelError: the model cannot be read, or its weights are NaN or infinite.
        InputError: a relation file is wrong, no relation keeps 30 pairs, or an option does not exist.
        RunFolderError: `out` holds another run.
    """
    k, threshold = _check_options(rule, k, threshold, embedding)
    norm_gain, attention = checked_flag("norm_gain", norm_gain), checked_flag("attention", attention)
    given = load_relations(relations)
    weights = _open(model, device)
    if k is not None and k >= weights.shape.d_vocab:
        raise InputError(
            f"k={k}: every token would be a hit; the vocabulary of {weights.name} has {weights.shape.d_vocab:,}."
        )
    tokenized = tokenize_relations(given, weights.tokenizer, multi_token=multi_token, same_words=rule == "published")
    ks = [k or published_k(relation, weights.shape) for relation in given]
    options = {
        "relations": digest(describe([[relation.name, relation.category, relation.pairs] for relation in given])),
        "rule": rule,
        "k": k,
        "threshold": threshold,
        "embedding": embedding or published_embedding(weights.shape),
        "multi_token": multi_token,
        "norm_gain": norm_gain,
        "attention": attention,
    }
    usable = [(relation, k) for relation, k in zip(tokenized, ks, strict=True) if relation.usable]
    if not usable:
        raise _nothing_usable(tokenized, weights.name)

    def work(run: Run) -> HeadMap:
        n_layers = weights.shape.n_layers
        with LayersAhead(weights) as read_layer, run.bar("Scoring heads", "layer", n_layers) as bar:
            pairs = suite_pairs(*zip(*usable, strict=True))
            scorer = LayerScorer(weights, read_layer, pairs, rule == "controlled", options)
            layers = list(run.pieces("layer", range(n_layers), scorer, bar))
        table = score_table(layers, [relation for relation, _ in usable])
        table = table.assign(**apply_rule(table, rule, threshold))
        categories = head_categories(table)
        if attention:
            categories = categories.merge(attention_classes(_hooked(model)), on=["layer", "head"])
        return HeadMap(table, categories, relation_table(tokenized, ks), run.record)

    return carry_out(HeadMap, "classify_heads", weights, options, work, out=out, progress=progress)


def published_k(relation: Relation, shape: ModelShape) -> int:
    """Return how many logits counted as a hit in the publication: by relation and vocabulary."""
    if shape.d_vocab == LLAMA_3_VOCABULARY:
        return 3 if relation.is_copying else 25
    return 1 if relation.is_copying else 10


def published_embedding(shape: ModelShape) -> str:
    """Return what heads read for a token in the publication: the first MLP's output, except for Llama-3.1-70B."""
    is_llama_70b = (shape.n_layers, shape.d_model, shape.d_vocab) == (80, 8192, LLAMA_3_VOCABULARY)
    return "raw" if is_llama_70b else "mlp0"


@dataclass(frozen=True)
class LayerScorer:
    """Scores one layer; what all layers share is read once, when first needed."""

    weights: WeightSource
    read_layer: LayersAhead
    suite: SuitePairs
    null: bool
    options: Mapping[str, Any]

    def __call__(self, layer: int) -> dict[str, Tensor]:
        """Return what `LayerScores` holds of one layer, by name."""
        with torch.inference_mode():
            factors = self.read_layer(layer)
            x = self._later_embeddings if layer > 0 else self._raw_embeddings
            if self.options["norm_gain"]:
                x = x * factors.norm_gain
            W_V, W_O = self._as_stored(factors.W_V), self._as_stored(factors.W_O)
            maps = OVMaps(x, W_V, W_O, self._unembedding, self._longest)
            scores = score_layer(maps, self._suite, null=self.null)
        return {name: value for name, value in vars(scores).items() if value is not None}

    def _as_stored(self, factor: Tensor) -> Tensor:
        """On a CUDA device a factor of a bfloat16 or float16 model as the model stores it: so tensor cores take it."""
        is_half = self.weights.dtype in (torch.bfloat16, torch.float16)
        return factor.to(self.weights.dtype) if factor.is_cuda and is_half else factor

    @cached_property
    def _suite(self) -> SuitePairs:
        return self.suite.to(self.weights.device)

    @cached_property
    def _unembedding(self) -> Tensor:
        W_U = self.weights.unembedding()
        if self.options["norm_gain"]:
            return W_U * self.weights.final_norm_gain()[:, None]
        return self._as_stored(W_U)

    @cached_property
    def _longest(self) -> float:
        return longest_column(self._unembedding)

    @cached_property
    def _raw_embeddings(self) -> Tensor:
        return self.weights.effective_embedding(self.suite.source_tokens, "raw")

    @cached_property
    def _later_embeddings(self) -> Tensor:
        kind = self.options["embedding"]
        x = self.weights.effective_embedding(self.suite.source_tokens, kind)
        if nothing := int((x == 0).all(-1).sum()):
            raise InputError(
                f"{self.weights.name}: the {kind!r} embedding of {nothing} of {len(x)} sources is zero, "
                'so every token would tie. A model without MLPs is read with embedding="raw".'
            )
        return x


def _open(model: Any, device: str | torch.device | None = None) -> WeightSource:
    if isinstance(model, str | Path):
        return open_weights(model, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    source = model if isinstance(model, WeightSource) else open_weights(_hooked(model))
    if device is not None and usable_device(device).type != source.device.type:
        raise InputError(f"device={device}: this model is on {source.device}, and is scored there; load it elsewhere.")
    return source


def _hooked(model: Any) -> HookedModel:
    return model if isinstance(model, HookedModel) else load(model)


def _check_options(rule: str, k: int | None, threshold: float, embedding: str | None) -> tuple[int | None, float]:
    """Return k and threshold as plain numbers."""
    checked_name("rule", rule, RULES)
    if embedding is not None:
        checked_name("embedding", embedding, KINDS)
    threshold = checked_number("threshold", threshold, above=0.0, below=1.0, up_to=True)
    return None if k is None else checked_count("k", k), threshold


def _with_excess(saved: HeadMap) -> HeadMap:
    """Return a head map of headwater 0.1.0 with its excess, and with what the rule says now."""
    options = saved.run.options
    table = add_excess(saved.table)
    table = table.assign(**apply_rule(table, options["rule"], options["threshold"]))
    said = head_categories(table)
    others = saved.categories.drop(columns=["categories", "label"])
    return replace(saved, table=table, categories=said.merge(others, on=["layer", "head"]))


def _nothing_usable(relations: Sequence[TokenRelation], model: str) -> InputError:
    if not relations:
        return InputError("No relations were given: give a folder of relations, or none for headwater's own suite.")
    best = max(relations, key=lambda relation: len(relation.targets))
    return InputError(
        f"None of the {len(relations)} relations keeps {MIN_PAIRS} pairs of single tokens with the tokenizer of "
        f"{model}; the most is {len(best.targets)} of {len(best.relation.pairs)} ({best.relation.name}). Give "
        "relations between words that are one token there; `headwater relations MODEL` lists what survives."
    )
