"""Which heads differ between models of one shape: base and instruct, checkpoints of one training, before and after.

All models are scored on the same items, directly from their parameters (`classify`), and compared by which items hit.

1. The relations keep the pairs whose words are single tokens for every model's tokenizer (`shared_relations`).
2. Each model is classified under the controlled rule, one model and one layer at a time. The hits of its items are
   kept: whether a target is among the k largest logits (sign "score") or the k smallest (sign "suppression").
3. A source is gained if more of its items hit than in the first model, and lost if fewer do. All items of a source
   count as one source, because a head reads them alike. McNemar's exact test: if gains and losses were equally likely,
   how often would their numbers differ this much? q: false-discovery control over heads, relations and signs.
4. The effect is the difference of the excess, the chance-corrected score: a head that only changed its favourite answer
   gains and loses items, but its excess stays the same. The null model is computed if any of the models scores high
   enough to pass the rule; elsewhere `expected`, `excess` and `difference` are NaN.
5. A change gets a name if q is at most 5 %: `gained` or `lost` if the rule finds the head in one of the two models
   only, `stronger` or `weaker` if it finds the head in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.heads import scoring
from headwater.heads.categories import CATEGORIES, FALSE_DISCOVERY_RATE, apply_rule, by_sign
from headwater.heads.relations import MultiTokenName, Relations, load_relations, shared_relations
from headwater.heads.scores import score_table
from headwater.models.effective_embedding import EmbeddingName
from headwater.models.hooked import HookedModel
from headwater.models.loading import weights_of
from headwater.models.weights import WeightSource
from headwater.options import checked_several
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, whole_summary
from headwater.stats.significance import Numbers, mcnemar_p, q_values

AnyModel: TypeAlias = HookedModel | WeightSource | str | Path
CHANGES = {
    "gained": "gained a relation",
    "lost": "lost one",
    "stronger": "have a stronger one",
    "weaker": "have a weaker one",
}
"""Kinds of change, and what they say of a head."""
ABOUT = ("model", "layer", "head", "relation", "category", "sign", "pairs")
FOUND = ("share", "expected", "excess", "found")


@dataclass(frozen=True, eq=False, repr=False)
class HeadComparison(Result):
    """The result of `compare_heads`, drawn as changes by layer and head; more than two models, as heads by category."""

    table: pd.DataFrame
    """A row per model, layer, head, relation and sign ("score", "suppression").

    `model, layer, head, relation, category, sign`; `pairs`, the number of items, and `sources`, of distinct sources;
    `share`, the share of items that hit; `expected`, that share under shuffled targets; `excess`, the chance-corrected
    share (both NaN if no model's share is large enough to pass the rule); `found`, whether by the controlled rule the
    head implements (suppresses) the relation. Compared with the first model: `difference` of the excess; `gained,
    lost`, the numbers of sources that hit more and less often; `p_value` (McNemar) and `q_value`; `change`, one of
    gained, lost, stronger, weaker, or empty. In the rows of the first model these columns are NaN or empty.
    """
    relations: pd.DataFrame
    """A row per relation: `relation, category, pairs`; `shared`, the number of pairs kept for every tokenizer; `used`,
    whether these are enough."""
    run: RunRecord

    @property
    def models(self) -> list[str]:
        """The names of the models; the others are compared with the first."""
        return list(dict.fromkeys(self.table["model"]))

    @property
    def changed(self) -> pd.DataFrame:
        """The rows of the table with a named change, the largest difference first."""
        rows = self.table[self.table["change"] != ""]
        return rows.reindex(rows["difference"].abs().sort_values(ascending=False).index)

    def summary(self) -> pd.DataFrame:
        """Return a row per model and category: the number of heads in it, and changes from the first model.

        `model, category, heads`, and the numbers of heads with a relation of the category that is `gained, lost,
        stronger, weaker`. Category "any" counts heads over all categories.
        """
        rows = []
        for model in self.models:
            of_model = self.table[self.table["model"] == model]
            for category in ("any", *CATEGORIES):
                of_category = of_model if category == "any" else of_model[of_model["category"] == category]
                classified = of_category["found"] & of_category["category"].notna()
                changes = {name: _heads(of_category[of_category["change"] == name]) for name in CHANGES}
                rows.append({"model": model, "category": category, "heads": _heads(of_category[classified])} | changes)
        return pd.DataFrame(rows)

    def report(self) -> list[str]:
        """Report what changed from the first model to each other model, and the largest change."""
        first, *others = self.models
        by_model = whole_summary(self).query("category == 'any'").set_index("model")
        sentences = []
        for model in others:
            before, row = by_model.loc[first], by_model.loc[model]
            counts = "; ".join(f"{words}: {row[name]}" for name, words in CHANGES.items())
            sentences.append(
                f"From {first} to {model}: {before['heads']} heads classified before, {row['heads']} after; heads that "
                f"{counts} (false-discovery rate {FALSE_DISCOVERY_RATE:.0%})."
            )
            largest = self.changed[self.changed["model"] == model]
            if len(largest):
                top = largest.iloc[0]
                sentences.append(
                    f"Head {top['layer']}.{top['head']} changes most, on {top['relation']} ({top['sign']}): its excess "
                    f"is {top['excess'] - top['difference']:.2f} before and {top['excess']:.2f} after."
                )
        pairs, shared = self.relations[["pairs", "shared"]].sum()
        if shared < pairs:
            sentences.append(f"The models are compared on {shared:,} of {pairs:,} pairs, kept for every tokenizer.")
        if left_out := self.relations.loc[~self.relations["used"], "relation"].tolist():
            n = f"{len(left_out)} of {len(self.relations)} relations"
            sentences.append(f"{n} have too few pairs that can be scored for every model: {', '.join(left_out)}.")
        return sentences

    def __repr__(self) -> str:
        return f"HeadComparison({' → '.join(self.models)}: {len(self.changed):,} changes in {len(self.table):,} rows)"


@checked_call
def compare_heads(
    models: Sequence[AnyModel] | Mapping[str, AnyModel],
    *,
    relations: Relations = None,
    k: int | None = None,
    threshold: float = 0.15,
    embedding: EmbeddingName | Literal["auto"] | None = None,
    multi_token: MultiTokenName | None = None,
    norm_gain: bool = False,
    device: str | torch.device | None = None,
    progress: bool = True,
    out: str | Path | None = None,
) -> HeadComparison:
    """Find heads that implement or suppress a relation more, or less, than in the first of several models.

    A change is tested with McNemar's exact test (1947), on the sources that hit more often in one model than the other.

    Args:
        models: two or more models with the same numbers of layers and heads: loaded, or checkpoint folders, GGUF files
            or hub names, read with one layer of one model in memory at a time. A mapping names them; otherwise they are
            named after their folders.
        relations: see `classify_heads`. Only pairs of words that are single tokens for every model are compared.
        k: a target among the k largest logits is a hit; default: the published k for each model's vocabulary.
        threshold: the smallest chance-corrected score with which a head implements a relation.
        embedding: the input of heads from layer 1 on for a token, as in `classify_heads`; default: "auto", chosen on
            the first model.
        multi_token: how to treat words of several tokens, as in `classify_heads`; by default they are dropped.
        norm_gain: fold the norms' gains into the heads' input and into W_U, as in `classify_heads`.
        device: the device for scoring checkpoints, such as "cpu" or "cuda"; default: CUDA if available, else the CPU.
    """
    k, threshold = scoring.checked_scoring(k, threshold)
    compared = {name: weights_of(model, device) for name, model in _named(models).items()}
    first_name, first = next(iter(compared.items()))
    for name, other in compared.items():
        ours, theirs = (f"{w.shape.n_layers} layers × {w.shape.n_heads} heads" for w in (first, other))
        if ours != theirs:
            raise InputError(
                f"{name} has {theirs}, {first_name} has {ours}: their heads do not correspond. Compare models of "
                "one shape, or use classify_heads for each."
            )
    loaded = load_relations(relations)
    shared = shared_relations(loaded, [weights.tokenizer for weights in compared.values()], multi_token=multi_token)
    usable = {name: scoring.scored_relations(shared, w, k, multi_token=multi_token)[2] for name, w in compared.items()}
    chosen: str = embedding or "auto"
    if chosen == "auto":
        chosen, _ = scoring.chosen_embedding(first, next(iter(usable.values())), chosen)
    identities = {name: f"{w.fingerprint} {w.tokenizer_digest} {w.dtype}" for name, w in compared.items()}
    options = {"models": identities, "relations": scoring.relations_digest(loaded), "k": k, "threshold": threshold}
    options |= {"embedding": chosen, "multi_token": multi_token, "norm_gain": norm_gain}

    def work(run: Run) -> HeadComparison:
        parts = {name: run.part(f"model-{number:03d}") for number, name in enumerate(compared)}
        null_from, scored = scoring.callable_from(threshold), dict[str, list[dict[str, Tensor]]]()
        for name, weights in compared.items():
            arguments = weights, usable[name], options, parts[name]
            scored[name] = scoring.scored_layers(*arguments, null_from=null_from, items=True, desc=f"Scoring {name}")
        shares = [[torch.stack([one["score"], one["suppression"]]) for one in layers] for layers in scored.values()]
        # If any model's head can pass the rule, all models get the null model, because a difference needs both.
        mask = (torch.stack([torch.stack(share) for share in shares]) >= null_from).any(0)
        tables, hits = [], []
        for name, weights in compared.items():
            arguments, desc = (weights, usable[name], options, parts[name]), f"Chance for {name}"
            layers = scoring.with_moments(*arguments, scored[name], mask, desc)
            hits.append(torch.stack([layer["hits"] for layer in layers], dim=1))
            table = score_table(layers, [tokens for tokens, _ in usable[name]])
            table = by_sign(table.assign(**apply_rule(table, "controlled", threshold), model=name))
            tables.append(table.rename(columns={"score": "share", "called": "found"})[[*ABOUT, *FOUND]])
        changes = [_changes(now, hits[0], usable[name]) for now, name in zip(hits, compared, strict=True)]
        table = pd.concat([_compared(table, tables[0], change) for table, change in zip(tables, changes, strict=True)])
        used = {tokens.relation.name for tokens, _ in next(iter(usable.values()))}
        rows = [
            (one.name, one.category, len(one.pairs), len(common.pairs), one.name in used)
            for one, common in zip(loaded, shared, strict=True)
        ]
        relations = pd.DataFrame(rows, columns=["relation", "category", "pairs", "shared", "used"])
        return HeadComparison(table.reset_index(drop=True), relations, run.record)

    return run_or_resume(HeadComparison, "compare_heads", first, options, work, out=out, progress=progress)


def _named(models: Sequence[AnyModel] | Mapping[str, AnyModel]) -> dict[str, AnyModel]:
    """Return the models by name; a list of them is named by the last parts of their paths, or by the whole paths."""
    if isinstance(models, Mapping):
        named = {str(name): model for name, model in models.items()}
    else:
        listed = checked_several("models", models, "a list of models, or a mapping that names them")
        paths = [str(Path(str(getattr(model, "name", model)))) for model in listed]
        last = [Path(path).name for path in paths]
        names = paths if len({*last}) < len(last) else last
        if len({*names}) < len(names):
            raise InputError(
                f"Several of the models are named {max(names, key=names.count)!r}: give each once, or name them in "
                "Python, in a mapping {name: model}."
            )
        named = dict(zip(names, listed, strict=True))
    if len(named) < 2:
        raise InputError(f"A comparison needs two models or more, and {len(named)} was given.")
    return named


def _changes(
    now: Bool[Tensor, "sign layer head item"], before: Bool[Tensor, "sign layer head item"], usable: scoring.Usable
) -> dict[str, Numbers]:
    """Count, for each sign, layer, head and relation, the sources that hit more often than before, and less often."""
    counts: dict[str, list[Tensor]] = {"sources": [], "gained": [], "lost": []}
    changes = (now.int() - before.int()).split([len(tokens.source) for tokens, _ in usable], dim=-1)
    for (tokens, _), change in zip(usable, changes, strict=True):
        # A head reads items of one source alike, so McNemar's pairs are sources.
        distinct, source = tokens.source.unique(return_inverse=True)
        # Per source, the number of items that hit now minus the number that hit before.
        net = torch.zeros(*change.shape[:-1], len(distinct), dtype=torch.int32).index_add_(-1, source, change)
        counts["gained"].append((net > 0).sum(-1))
        counts["lost"].append((net < 0).sum(-1))
        counts["sources"].append(torch.full(net.shape[:-1], len(distinct)))
    return {name: torch.stack(count, dim=-1).double().numpy().ravel() for name, count in counts.items()}


def _compared(table: pd.DataFrame, first: pd.DataFrame, change: Mapping[str, Numbers]) -> pd.DataFrame:
    """Return a model's rows with the columns that compare it with the first model."""
    counts = pd.DataFrame(dict(change), index=table.index).astype({"sources": int})
    p = mcnemar_p(counts["gained"].to_numpy(), counts["lost"].to_numpy())
    tested = counts.assign(difference=table["excess"] - first["excess"], p_value=p, q_value=q_values(p))
    if table is first:
        tested[["difference", "gained", "lost", "p_value", "q_value"]] = np.nan
    table = table.join(tested)
    now, before = table["found"], first["found"]
    difference = table["difference"].where(now & before)
    named = [now & ~before, before & ~now, difference > 0, difference < 0]
    discovered = table["q_value"] <= FALSE_DISCOVERY_RATE
    change_of = np.select([discovered & name for name in named], list(CHANGES), default="")
    columns = [*ABOUT, "sources", *FOUND, "difference", "gained", "lost", "p_value", "q_value", "change"]
    return table.assign(change=change_of)[columns]


def _heads(rows: pd.DataFrame) -> int:
    return len(rows[["layer", "head"]].drop_duplicates())
