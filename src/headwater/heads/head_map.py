"""The result of head classification: its tables, findings, validation and head cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pandas as pd

from headwater.errors import InputError, ModelError
from headwater.heads import scoring
from headwater.heads.behaviour import AttentionBehaviour
from headwater.heads.card import HeadCard, relations_of_head, salient_operations
from headwater.heads.categories import CATEGORIES, SAYS, UNCLASSIFIED, by_sign, label_counts
from headwater.heads.causal import COLUMNS, head_use, sentences_of_use
from headwater.heads.relations import (
    TEMPLATE,
    MultiTokenName,
    Relations,
    TokenRelation,
    load_relations,
    tokenize_relations,
)
from headwater.heads.scores import score_table
from headwater.models.effective_embedding import EmbeddingName
from headwater.models.hooked import HookedModel
from headwater.models.loading import weights_of
from headwater.models.part_names import Counts, HeadName, head_named, parts_of_kind
from headwater.models.weights import WeightSource
from headwater.options import checked_count, checked_name, checked_names, checked_repeats, shown
from headwater.runs.analysis import Run
from headwater.runs.identity import describe
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, whole_summary

VARIED = ("embedding", "k", "norm_gain")
"""The options of `classify_heads` that `HeadMap.sensitivity` varies if it has the model."""


@dataclass(frozen=True, eq=False, repr=False)
class HeadMap(Result):
    """The heads of a model, scored on relations and assigned to categories.

    Drawn as layer by head: a marker per head in its category's colour; after `validate`, a ring if it is used.
    """

    returned_by = "hw.classify_heads(...)"

    table: pd.DataFrame
    """A row per layer, head and relation.

    `layer, head, relation, category`; `score, suppression` (0 to 1); `expected`, the mean score under shuffled targets;
    `excess`, the chance-corrected score (score - expected) / (1 - expected); `p_value, q_value` of the score under
    shuffled targets; `margin`, by how many logits the head puts a target above the other items' targets, which ranks
    heads even if they hit nothing; `pairs`, the number of items; `low, high`, the 95 % interval of the score;
    `beyond_copying`, the score that counts only items whose target beats the source itself; the same columns for
    suppression; and the rule's flags `implemented, suppressed, copying`. The null model is computed for scores at or
    above 0.10, or the threshold if that is less (`every_excess=True`: for all). Lower scores cannot pass the rule; for
    them `expected`, `excess`, p and q are NaN, and the q of the others count them as p = 1. If a head hits no item of a
    relation, p is 1 by definition. With `rule="published"` all columns of the null model and the excess are NaN.

    `validate` adds, for each called head (one that implements or suppresses the relation): `accuracy`, the share of
    items that the running model answers; `without`, that share with the head ablated, and `others`, with another head
    of its layer ablated (mean over those drawn), each with `_low, _high`; `loss`, `others` minus `without`, with its
    interval, `loss_p_value` and `loss_q_value`; and `used`, whether the model uses the head for the relation.
    """
    categories: pd.DataFrame
    """A row per layer and head: `categories`, a tuple of names, and `label`, its name in figures."""
    relations: pd.DataFrame
    """A row per relation: `relation, category, pairs, kept, used, k, note`."""
    embeddings: pd.DataFrame
    """A row per effective embedding: `embedding, agreement` with the first block's output, and `chosen`."""
    run: RunRecord

    @property
    def title(self) -> str:
        """The model's short name."""
        return Path(self.run.model).name

    def sensitivity(
        self,
        model: HookedModel | str | Path | None = None,
        *,
        relations: Relations = None,
        vary: Sequence[str] = VARIED,
        progress: bool = True,
    ) -> scoring.Sensitivity:
        """Count the heads in each category under both rules, for thresholds from 0.10 to 0.30.

        With the model, the heads are scored again for each other setting (every embedding, half and twice the map's
        largest k, norm gains). Each setting takes as long as a map, or several times as long with `embedding="raw"`. A
        map with `rule="published"` has no null model, so it has rows of that rule only.

        Args:
            model: the model that was classified; None varies only threshold and rule.
            relations: the relations that were passed to `classify_heads`, if any.
            vary: which of "embedding", "k" and "norm_gain" to vary, one at a time.
        """
        tables = {scoring.AS_MAPPED: self.table}
        if model is None:
            return scoring.Sensitivity(scoring.heads_by_threshold(tables), self.run)
        names = checked_names("vary", vary, VARIED)
        weights, base, loaded = self._weights(model), self.run.options, load_relations(relations)
        if scoring.relations_digest(loaded) != base["relations"]:
            raise InputError("relations= are not those of the map: give those that classify_heads was given.")
        most, readable = int(self.relations["k"].max()), self.embeddings.dropna()["embedding"]
        others: dict[str, list[Any]] = {
            "embedding": [kind for kind in (*readable, "layer0") if kind != base["embedding"]] if len(readable) else [],
            "k": [max(1, most // 2), 2 * most],
            "norm_gain": [not base["norm_gain"]],
        }
        is_published = base["rule"] == "published"
        null_from = None if is_published else scoring.callable_from(float(base["threshold"]))
        for name, value in ((varied, value) for varied in names for value in others[varied]):
            options: dict[str, Any] = {**base, name: value}
            asked: dict[str, Any] = {"multi_token": base["multi_token"], "same_words": is_published}
            *_, usable = scoring.scored_relations(loaded, weights, options["k"], **asked)
            run, desc = Run(self.run, progress=progress), f"{name}={value}"
            layers = scoring.scored_layers(weights, usable, options, run, null_from=null_from, desc=desc)
            tables[desc] = score_table(layers, [relation for relation, _ in usable])
        return scoring.Sensitivity(scoring.heads_by_threshold(tables), self.run)

    def summary(self) -> pd.DataFrame:
        """Return a row per relation: how many heads implement or suppress it, and its best head.

        The best head has the largest excess of either sign among the called heads. If none is called, it has the
        largest excess of all, or the highest score if no excess was computed. Columns: `relation, category, pairs,
        heads, copying, layer, head, sign, score, expected, excess`. `copying` is the number of heads rejected only
        because they copy; `sign` is "implements" or "suppresses", and `score, expected, excess` belong to it.
        """
        table = self.table
        ranked = by_sign(table).sort_values(["called", "excess", "score"], ascending=False, kind="stable")
        best = ranked.drop_duplicates("relation").set_index("relation").loc[table["relation"].unique()].reset_index()
        best["sign"] = best["sign"].map(SAYS)
        for column, rows in {"heads": table["implemented"] | table["suppressed"], "copying": table["copying"]}.items():
            best[column] = best["relation"].map(table.loc[rows, "relation"].value_counts()).fillna(0).astype(int)
        about = ["relation", "category", "pairs", "heads", "copying"]
        return best[[*about, "layer", "head", "sign", "score", "expected", "excess"]]

    def report(self) -> list[str]:
        """Report how many heads are classified, the strongest head, and the relations without heads."""
        relations, rule = whole_summary(self), self.run.options["rule"]
        labels = {name: n for name, n in label_counts(self.categories).items() if n and name != UNCLASSIFIED}
        named = ", ".join(f"{count} {'in ' * name.endswith('categories')}{name}" for name, count in labels.items())
        first = f"{sum(labels.values())} of {len(self.categories)} heads are classified under the {rule} rule"
        sentences = [f"{first}: {named}." if named else f"{first}: no head implements any of the relations."]
        called = relations[relations["heads"] > 0]
        if len(called):
            best = called.iloc[called["excess"].fillna(called["score"]).argmax()]
            by_habit = "" if pd.isna(best["excess"]) else f", {best['expected']:.0%} with shuffled targets"
            ends = "largest" if best["sign"] == "implements" else "smallest"
            sentences.append(
                f"{len(called)} of {len(relations)} relations are implemented or suppressed by some head. The "
                f"strongest is head {best['layer']}.{best['head']}: it {best['sign']} {best['relation']}, with a "
                f"target among the {ends} logits for {best['score']:.0%} of the sources{by_habit}."
            )
        else:
            best = relations.iloc[relations["score"].argmax()]
            where = f"head {best['layer']}.{best['head']} on {best['relation']}"
            sentences.append(f"The highest score of any head is {best['score']:.0%}: {where}.")
        listed = self.categories["categories"].explode().value_counts()
        if several := [name for name in CATEGORIES if listed.get(name, 0) > labels.get(name, 0)]:
            counts = ", ".join(f"{listed[name]} {name}" for name in several)
            sentences.append(f"With heads of several categories counted in each: {counts}.")
        if vetoed := relations["copying"].sum():
            sentences.append(
                f"{vetoed} more pairs of a head and a relation reach the threshold but are rejected as copying: the "
                "head ranks the source itself above most of these targets."
            )
        sentences += scoring.sentences_of_embedding(str(self.run.options["embedding"]), self.embeddings)
        if rule == "published":
            sentences.append(
                "The published rule uses only the score: a head that writes the same few tokens for every source can "
                "pass too, and no control measures this."
            )
        if len(missing := relations.loc[relations["heads"] == 0, "relation"]):
            sentences.append(f"No head was found for: {', '.join(missing)}.")
        if len(left_out := self.relations.loc[~self.relations["used"], "relation"]):
            sentences.append(f"Too few single-token pairs to score: {', '.join(left_out)}.")
        return sentences + (sentences_of_use(self.table) if self.is_validated else [])

    @property
    def is_validated(self) -> bool:
        """Whether `validate` measured which heads the running model uses."""
        return "used" in self.table

    def validate(
        self,
        model: HookedModel,
        *,
        relations: Relations = None,
        template: str | Mapping[str, str] = TEMPLATE,
        shots: int = 3,
        draws: int = 5,
        seed: int = 0,
        progress: bool = True,
    ) -> HeadMap:
        """Test whether the running model uses each called head: ablate it, and other heads of its layer one at a time.

        Compares the accuracy on a relation with the head's z set to zero at the last position with the accuracy after
        ablating another head; see `heads.causal` for the test. A head with the right weights but no effect is not used.
        Ablating some heads even helps: their `loss` is below 0. If the map represents words of several tokens by one
        token, the model is asked for that token, after the word's preceding tokens.

        Args:
            model: the model that was classified.
            relations: the relations that were passed to `classify_heads`, if any, or some of these, to test only them.
            template: the prompt, with one `{source}` after a space; or a mapping from relations to such texts, to test
                only these relations.
            shots: number of examples before each prompt.
            draws: number of other heads to ablate, one at a time, per called head.
            seed: seed of examples, other heads and intervals.

        Returns:
            This head map with more columns in its `table`, among them `used`, which `plot` draws as rings. They are NaN
            (`used` is NA) if a head is not called, its relation is not tested, or the whole model answers no item of
            it; `report` names the relations that it does not answer.
        """
        multi_token = self.run.options["multi_token"]
        tokens_and_k = relations_of(model, self, relations, multi_token, some=True)
        tokenized = {name: tokens for name, (tokens, _) in tokens_and_k.items()}
        if isinstance(template, str) and len(tokenized) < int(self.relations["used"].sum()):
            template = dict.fromkeys(tokenized, template)
        if isinstance(template, Mapping):
            template = {checked_name("template", name, list(tokenized)): text for name, text in template.items()}
        elif not isinstance(template, str):
            raise InputError(
                f"template={shown(template)} is neither a text with {{source}} nor a mapping of relations to texts."
            )
        shots, draws = checked_count("shots", shots, least=0), checked_repeats("draws", draws)
        asking: dict[str, Any] = {"template": template, "shots": shots, "draws": draws, "seed": seed}
        use = head_use(model, self.table, tokenized, **asking, progress=progress)
        options = describe(asking | dict(model.interventions))
        run = replace(self.run, options=self.run.options | {"validate": options})
        return replace(self, table=self.table.drop(columns=list(COLUMNS), errors="ignore").join(use), run=run)

    def head(
        self,
        layer: int | HeadName,
        head: int | None = None,
        *,
        model: HookedModel | str | Path | None = None,
        behaviour: AttentionBehaviour | None = None,
        sources: int = 5,
        targets: int = 5,
    ) -> HeadCard:
        """Return the card of one head: its relations, its output for salient tokens, and whether the model uses it.

        Args:
            layer: the head's layer, or the head itself as "9.2" or (9, 2).
            head: the head's index, if `layer` is a layer.
            model: the model of this map; default: it is opened by its name. Not needed with `sources=0`.
            behaviour: the result of `hw.attention_behaviour` for this model: what the head attends to.
            sources: number of salient tokens (those with the strongest output) to show.
            targets: number of written and of suppressed tokens to show for each.

        Returns:
            A card that prints as text and displays as HTML in a notebook.
        """
        layer, head = head_named(layer, head, self._sizes)
        sources, targets = checked_count("sources", sources, least=0), checked_count("targets", targets)
        named = self.categories[(self.categories["layer"] == layer) & (self.categories["head"] == head)]
        attends = None
        if behaviour is not None:
            if behaviour.run.fingerprint != self.run.fingerprint:
                raise ModelError(f"behaviour= is of {behaviour.run.model}, with other weights than {self.run.model}.")
            rows = behaviour.table[(behaviour.table["layer"] == layer) & (behaviour.table["head"] == head)]
            attends = rows.sort_values("excess", ascending=False, ignore_index=True)
        salient = self.salient(layer, head, model=model, sources=sources, targets=targets) if sources else None
        relations = relations_of_head(self.table, layer, head)
        return HeadCard(self.title, layer, head, str(named["label"].iloc[0]), relations, salient, attends)

    def salient(
        self,
        layer: int | HeadName | Sequence[HeadName] | pd.DataFrame,
        head: int | None = None,
        *,
        model: HookedModel | str | Path | None = None,
        embedding: EmbeddingName | None = None,
        sources: int = 15,
        targets: int = 5,
    ) -> pd.DataFrame:
        """Return a head's salient tokens, those with the strongest output, and the tokens that it maps them to.

        Args:
            layer: the head's layer, or the head itself as "9.2" or (9, 2). A list of heads, or rows with `layer` and
                `head` such as those of `table`, for the rows of all of them, with these two columns.
            head: the head's index, if `layer` is a layer.
            model: the model of this map; default: it is opened by its name.
            embedding: the head's input: "raw", "mlp0", "embed+mlp0" or "layer0"; default: the one used for scoring,
                which is the raw embedding in layer 0 and the map's embedding from layer 1 on. The publication uses
                "mlp0" in all layers.
            sources: number of salient tokens.
            targets: number of written and of suppressed tokens to list for each.
        """
        several = head is None and isinstance(layer, list | pd.DataFrame)
        heads: Any = parts_of_kind("heads", layer, self._sizes) if several else [head_named(layer, head, self._sizes)]
        weights, by_embedding = self._weights(model), dict[EmbeddingName, list[HeadName]]()
        for place in dict.fromkeys(heads):
            # Layer 0 reads the token embedding, because nothing is computed before it.
            scored_with = cast("EmbeddingName", self.run.options["embedding"]) if place[0] else "raw"
            by_embedding.setdefault(embedding or scored_with, []).append(place)
        options = {"sources": sources, "targets": targets}
        # The vocabulary is read once for each embedding.
        tables = [salient_operations(weights, some, embedding=kind, **options) for kind, some in by_embedding.items()]
        table = pd.concat(tables, ignore_index=True) if tables else salient_operations(weights, [])
        return table if several else table.drop(columns=["layer", "head"])

    @property
    def _sizes(self) -> Counts:
        layers, heads = (int(self.categories[name].max()) + 1 for name in ("layer", "head"))
        return Counts(layers, heads, heads)

    def _weights(self, model: HookedModel | str | Path | None) -> WeightSource:
        weights = weights_of(self.run.model if model is None else model)
        _refuse_other(self, weights)
        return weights


def _refuse_other(head_map: HeadMap, model: HookedModel | WeightSource) -> None:
    """Refuse a model that is not that of a head map."""
    if other := head_map.run.mismatch(model):
        raise ModelError(
            f"{model.name} is not the model of this head map, {head_map.run.model}: it has {other}. Pass that model."
        )


def relations_of(
    model: HookedModel,
    head_map: HeadMap,
    relations: Relations,
    multi_token: MultiTokenName | None = None,
    *,
    some: bool = False,
) -> dict[str, tuple[TokenRelation, int]]:
    """Return the tokenized relations that a head map was scored on, by name, each with its k.

    `multi_token` selects the token that represents a word of several tokens; by default only items of single tokens are
    returned, even if the map has others. With `some`, `relations` may be a part of the map's relations.
    """
    _refuse_other(head_map, model)
    used = head_map.relations[head_map.relations["used"]]
    selected = [relation for relation in load_relations(relations) if relation.name in set(used["relation"])]
    if some and relations is not None and selected:  # otherwise missing relations raise an error below
        used = used[used["relation"].isin([relation.name for relation in selected])]
    same_words = head_map.run.options["rule"] == "published"
    tokenized = tokenize_relations(selected, model.tokenizer, multi_token=multi_token, same_words=same_words)
    by_name = {tokens.relation.name: tokens for tokens in tokenized}
    lacking = [name for name in used["relation"] if name not in by_name or not by_name[name].targets]
    if lacking:
        raise InputError(
            f"No items of single tokens for the map's relation {lacking[0]!r}: give the relations= that classify_heads "
            "got, or classify the heads without multi_token=."
        )
    return {name: (by_name[name], int(k)) for name, k in zip(used["relation"], used["k"], strict=True)}
