"""Do heads do in a running model what their parameters suggest? Dynamic scores, compared with static scores.

Elhelo & Geva (ACL 2025), first experiment. For a relation's items, each put into several sentences:

1. Run the model. Head h adds z_h W_O at the last position, where z_h is its attention-weighted sum of values there.
   Projected to the vocabulary, without bias and final norm, this is z_h W_O W_U.
2. An item is a hit if an accepted target is among the k largest entries (suppression: the k smallest), k as in the
   static score. The share of items that hit is the dynamic score, per layer, head, relation and template.
3. With context, attention is unchanged. Without context, attention is forced onto the source token and the rest of the
   model is unchanged: then z_h is the value vector at the source, so one run provides both.
4. Pearson's correlation of static and dynamic scores over heads and templates, per relation, with an interval from
   Fisher's transformation, whose sample size is the number of heads, not of heads times templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.calls import checked_call
from headwater.heads.head_map import HeadMap, relations_of
from headwater.heads.relations import Relations, SourcePrompts, TokenRelation, checked_templates, source_prompts
from headwater.heads.scores import any_accepted
from headwater.kernels import ov_blocked
from headwater.kernels.ov import OVMaps, first_tokens, longest_column
from headwater.models.hooked import HookedModel
from headwater.models.tokens import Bos
from headwater.models.weights import open_weights
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, whole_summary
from headwater.stats.discrimination import fisher_interval, pearson

TEMPLATES = (
    "Somebody asked us about {source} and",
    "We have never seen {source} like",
    "The notes on {source} say",
    "A few words about {source}:",
)
CONTEXTS = ("with_context", "without_context")


@dataclass(frozen=True, repr=False)
class DynamicScores(Result):
    """The result of `dynamic_scores`; drawn as the correlations, a line per relation."""

    table: pd.DataFrame
    """A row per layer, head, relation and template: `category, items, static, static_suppression`, and the dynamic
    scores `with_context, without_context, with_context_suppression, without_context_suppression`."""
    correlations: pd.DataFrame
    """A row per relation, sign ("score", "suppression") and context ("with", "without"): `pearson, low, high, heads`;
    NaN if a score is the same for all heads."""
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Return a row per sign and context: the distribution of the relations' correlations.

        `sign, context, relations` (number with a correlation), `pearson` (median), `lowest, highest`, and `above_0`,
        how many have an interval above 0.
        """
        measured = self.correlations.dropna(subset=["pearson"])
        by_kind = measured.assign(above=measured["low"] > 0).groupby(["sign", "context"], sort=False)
        return by_kind.agg(
            relations=("pearson", "size"),
            pearson=("pearson", "median"),
            lowest=("pearson", "min"),
            highest=("pearson", "max"),
            above_0=("above", "sum"),
        ).reset_index()

    def report(self) -> list[str]:
        """Report how well the heads' outputs in the running model agree with their parameters."""
        sentences = [
            f"{row['sign']}, {row['context']} context: heads' static and dynamic scores have correlation "
            f"{row['pearson']:.2f} (median of {row['relations']} relations, {row['lowest']:.2f} to "
            f"{row['highest']:.2f}); for {row['above_0']} of them the 95 % interval is above 0."
            for row in whole_summary(self).to_dict("records")
        ]
        unmeasured = int(self.correlations["pearson"].isna().sum())
        if unmeasured:
            sentences.append(
                f"{unmeasured} of {len(self.correlations)} correlations are undefined: there all heads score the same."
            )
        return sentences


@checked_call
def dynamic_scores(
    model: HookedModel,
    head_map: HeadMap,
    *,
    relations: Relations = None,
    templates: Sequence[str] = TEMPLATES,
    bos: Bos = None,
    batch_size: int = 64,
    progress: bool = True,
    out: str | Path | None = None,
) -> DynamicScores:
    """Score heads by their outputs in the running model, and correlate these scores with a head map.

    Args:
        model: the model that was classified.
        head_map: its static scores, with the relations and k to use.
        relations: the relations that were passed to `classify_heads`, if any.
        templates: sentences with one `{source}`, after a space.
        bos: BOS of each sentence, as in `hw.load`; default: the model's own. The publication followed the tokenizer
            (`bos="tokenizer"`): GPT-2 then gets no BOS, and heads that rest on the first position get other scores.
        batch_size: sentences in a forward pass.
    """
    templates = checked_templates(templates)
    known = relations_of(model, head_map, relations)
    prompted = [(source_prompts(model, tokens, templates, bos=bos), tokens, k) for tokens, k in known.values()]
    options = {"templates": templates, "bos": bos, "head_map": head_map}

    def work(run: Run) -> DynamicScores:
        return scored_prompts(run, model, head_map, prompted, templates, batch_size)

    return run_or_resume(DynamicScores, "dynamic_scores", model, options, work, out=out, progress=progress)


def scored_prompts(
    run: Run,
    model: HookedModel,
    head_map: HeadMap,
    prompted: Sequence[tuple[SourcePrompts, TokenRelation, int]],
    templates: Sequence[str],
    batch_size: int,
) -> DynamicScores:
    """Return the dynamic scores of relations, from each one's prompts, items and k, with the map's static scores."""
    weights = open_weights(model)
    W_U = weights.unembedding()
    unembedding = W_U, longest_column(W_U), first_tokens(W_U, ov_blocked.sample_size(W_U))

    @torch.inference_mode()
    def compute(one: tuple[SourcePrompts, TokenRelation, int]) -> dict[str, Tensor]:
        prompts, tokens, k = one
        values = last_values(model, prompts, batch_size)
        scores = [
            score_outputs(values[:, layer], weights.ov(layer).W_O, unembedding, prompts, tokens, k)
            for layer in range(model.shape.n_layers)
        ]
        return {"scores": torch.stack(scores, dim=2)}

    parts = []
    columns = [f"{context}{suffix}" for context in CONTEXTS for suffix in ("", "_suppression")]
    with run.bar("Dynamic scores", "relation", len(prompted)) as bar:
        pieces = run.pieces("scores", prompted, compute, bar)
        for (prompts, tokens, _), piece in zip(prompted, pieces, strict=True):
            scores: Float[Tensor, "context sign layer template head"] = piece["scores"]
            layer, template, head = (index.ravel() for index in np.indices(scores.shape[2:]))
            about = {"layer": layer, "head": head, "relation": tokens.relation.name}
            about |= {"template": [templates[place] for place in template]}
            about["items"] = prompts.template.bincount(minlength=len(templates)).numpy()[template]
            by_name = dict(zip(columns, scores.flatten(0, 1).flatten(1).double().numpy(), strict=True))
            parts.append(pd.DataFrame(about | by_name))
    names = {"score": "static", "suppression": "static_suppression"}
    static = head_map.table[["layer", "head", "relation", "category", *names]].rename(columns=names)
    table = pd.concat(parts).merge(static, on=["layer", "head", "relation"], validate="many_to_one")
    return DynamicScores(table, correlate(table), run.record)


def last_values(
    model: HookedModel, prompts: SourcePrompts, batch_size: int
) -> Float[Tensor, "context layer row head d_head"]:
    """Return each head's z at the last position, unchanged and with attention forced onto the source.

    The z with forced attention is the value vector at the source position (of the shared value head in grouped heads).
    """
    places = {"last": "last", "source": prompts.source.tolist()}
    kept = model.cache(prompts.batch, sites=["z", "v"], positions=places, batch_size=batch_size, progress=False)
    group, layers = model.shape.group_size, range(model.shape.n_layers)
    z = [kept["z", layer][:, 0] for layer in layers]
    v = [kept["v", layer][:, 1].repeat_interleave(group, dim=1) for layer in layers]
    return torch.stack([*z, *v]).unflatten(0, (len(CONTEXTS), -1)).float()


def score_outputs(
    values: Float[Tensor, "context row head d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
    unembedding: tuple[Float[Tensor, "d_model d_vocab"], float, Int[Tensor, " token"]],
    prompts: SourcePrompts,
    tokens: TokenRelation,
    k: int,
) -> Float[Tensor, "context sign template head"]:
    """Return the share of items with a target among the k largest (k smallest) of z W_O W_U, for one layer's heads.

    This is the static score's count (`kernels.ov`) with z in place of x W_V: x holds z, and W_V is the identity.
    """
    n_rows, d_head = values.shape[1], values.shape[-1]
    accepted = [tokens.targets[item] for item in prompts.item.tolist()]
    pair_row = torch.arange(n_rows).repeat_interleave(torch.tensor([len(targets) for targets in accepted]))
    rows = torch.cat([pair_row + context * n_rows for context in range(len(values))])
    targets = torch.tensor([target for row in accepted for target in row]).repeat(len(values))
    in_template = torch.nn.functional.one_hot(prompts.template).double()
    W_U = unembedding[0]
    # W_V = [I; 0] passes z through unchanged, so that the static score's kernel can be used.
    identity = torch.eye(len(W_U), d_head, device=W_U.device)[None]
    scores = []
    for z, output in zip(values.to(W_U).flatten(0, 1).unbind(1), W_O, strict=True):
        x = torch.nn.functional.pad(z, (0, len(W_U) - d_head))
        maps = OVMaps(x, identity, output[None], *unembedding)
        signs = ov_blocked.topk_membership(maps, rows, targets, torch.full_like(targets, k))
        hits = torch.stack([any_accepted(hit[0], rows, len(x)).unflatten(0, (len(values), n_rows)) for hit in signs], 1)
        scores.append(hits.double() @ in_template / in_template.sum(0))
    return torch.stack(scores, dim=-1).float()


def correlate(table: pd.DataFrame) -> pd.DataFrame:
    """Return Pearson's correlation of static and dynamic scores by relation, sign and context, with its interval."""
    rows = []
    for relation, scores in table.groupby("relation", sort=False):
        n_heads = len(scores[["layer", "head"]].drop_duplicates())
        for sign, suffix in (("score", ""), ("suppression", "_suppression")):
            for context in ("with", "without"):
                dynamic = scores[f"{context}_context{suffix}"].to_numpy()
                r = float(pearson(scores[f"static{suffix}"].to_numpy(), dynamic))
                rows.append((relation, sign, context, r, *fisher_interval(r, n_heads), n_heads))
    return pd.DataFrame(rows, columns=["relation", "sign", "context", "pearson", "low", "high", "heads"])
