"""The results of `hw.evidence`: a row per relation for several (`EvidenceSuite`), all details for one (`Evidence`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from headwater.causes.naming import BASELINES, NAMED, WAYS, shuffled_p
from headwater.errors import InputError
from headwater.options import checked_name
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, interval_text, whole_summary
from headwater.stats.claims import LARGEST_P
from headwater.stats.resample import Bootstrap, interval
from headwater.stats.significance import q_values

FEW = 8
"""Number of pairs for costs, residual streams and direct effects."""
COLUMNS = ["relation", "category", "items", "prompt", "pairs", "gap", "gap_low", "gap_high", "accuracy", "can"]
COLUMNS += ["reason", "family"]


@dataclass(frozen=True, eq=False, repr=False)
class EvidenceSuite(Result):
    """The result of `hw.evidence` for several relations.

    `plot` draws, for each, the named head's share of the largest effect, beside the three baselines.
    """

    table: pd.DataFrame
    """A row per relation: `relation, category, items` (of single tokens), `prompt` (kind), `pairs`, `gap, gap_low,
    gap_high` (logits), `accuracy`, `can`, `reason` (why not), `family` (its strongest head on the first half), `layer,
    head` (named by margin × attention), `rank`, `share, low, high` (of the largest effect, on the second half),
    `p_value` (shuffled targets), and `holds`: p is at most 5 % and the share is greater than each baseline's."""
    ways: pd.DataFrame
    """A row per relation and way of naming a head; see `headwater.causes.naming.judged`."""
    strength: pd.DataFrame
    """A column per relation that the model can do. Row 0: for the true targets; other rows: for each draw of shuffled
    ones; see `headwater.causes.naming`."""
    run: RunRecord

    @classmethod
    def of(
        cls, rows: Sequence[dict[str, Any]], ways: Sequence[pd.DataFrame], strength: pd.DataFrame, run: RunRecord
    ) -> EvidenceSuite:
        """Assemble the result from the relations' rows and ways."""
        columns = ["relation", "way", "layer", "head", "heads", "rank", "share", "low", "high", "difference"]
        columns += ["difference_low", "difference_high", "p_value"]
        every = pd.concat(ways, ignore_index=True)[columns] if ways else pd.DataFrame(columns=columns)
        named = ["relation", "layer", "head", "rank", "share", "low", "high", "p_value"]
        ours = every.loc[every["way"] == NAMED, named]
        table = pd.DataFrame(rows).reindex(columns=COLUMNS).merge(ours, on="relation", how="left")
        # A baseline that could not be measured does not count as beaten.
        beaten = every[every["way"].isin(BASELINES) & (every["difference_low"] > 0)].groupby("relation").size()
        beats_all = table["relation"].map(beaten).fillna(0) == len(BASELINES)
        table["holds"] = table["can"].astype(bool) & (table["p_value"] <= LARGEST_P).fillna(False) & beats_all
        return cls(table, every, strength, run)

    @property
    def measured(self) -> pd.DataFrame:
        """The rows of the relations that the model can do."""
        return self.table[self.table["can"]]

    def summary(self) -> pd.DataFrame:
        """Return a row per family: relations with the same strongest head are one finding.

        `family, relations, named`: how many of them name their strongest head; `share`, the mean share of the largest
        effect; the same for each other way, in a column with its name; `p_value` of the mean strength against shuffled
        targets, `q_value` over families; largest families first.
        """
        rows = []
        means = self.ways.pivot(index="relation", columns="way", values="share") if len(self.ways) else pd.DataFrame()
        for family, of_family in self.measured.groupby("family", sort=False):
            # The relations of a family are averaged within each draw, so that they count as one finding.
            p = shuffled_p(self.strength[of_family["relation"]].to_numpy().mean(1))
            share = of_family["share"].mean()
            shares = means.loc[of_family["relation"]].mean()
            row = {"family": family, "relations": len(of_family), "named": int((of_family["rank"] == 1).sum())}
            row |= {"share": share} | {_column(way): shares.get(way, np.nan) for way in WAYS[1:]}
            rows.append(row | {"p_value": p})
        columns = ["family", "relations", "named", "share", *map(_column, WAYS[1:]), "p_value"]
        table = pd.DataFrame(rows, columns=columns)
        table["q_value"] = q_values(table["p_value"].to_numpy(dtype=float)) if len(table) else []
        return table.sort_values("relations", ascending=False, ignore_index=True)

    def compared(self) -> pd.DataFrame:
        """Return by how much weights and attention name better than each other way: a mean over families.

        `way, share` (a mean over families of the mean over their relations), `difference, low, high`: the share of
        weights and attention minus that share, with a bootstrap interval over families.
        """
        summary, rows = whole_summary(self), []
        draws = Bootstrap.of(range(len(summary)))
        for way in WAYS[1:]:
            ahead = draws.mean((summary["share"] - summary[_column(way)]).to_numpy(dtype=float))
            rows.append((way, summary[_column(way)].mean(), *(interval(ahead) if len(summary) else [np.nan] * 3)))
        return pd.DataFrame(rows, columns=["way", "share", "difference", "low", "high"])

    def report(self) -> list[str]:
        """Return in how many relations and families the weights name the cause, beside the baselines."""
        sentences = [
            f"{self.run.model} can do {len(self.measured)} of {len(self.table)} relations: there "
            "replacing the source changes the logit difference (95 % interval above 0)."
        ]
        if not len(self.measured):
            return sentences
        summary, n = whole_summary(self), len(self.measured)
        first, among_three = ((self.measured["rank"] <= rank).sum() for rank in (1, 3))
        sentences.append(
            f"The head with the largest weight margin × attention to the source has the largest effect in "
            f"{first} of {n} relations and one of the three largest in {among_three}; its mean share of the largest "
            f"effect is {summary['share'].mean():.2f} over {len(summary)} families (relations with the same strongest "
            "head form one family)."
        )
        for row in self.compared().to_dict("records"):
            if row["way"] in (*BASELINES, "shuffled targets"):
                verdict = "is greater" if row["low"] > 0 else "is not clearly greater"
                sentences.append(
                    f"This share {verdict} than that of the heads chosen by {row['way']} ({row['share']:.2f}): the "
                    f"difference is {row['difference']:.2f} ({row['low']:.2f} to {row['high']:.2f} over families)."
                )
        n_found = (summary["q_value"] <= LARGEST_P).sum()
        sentences.append(
            f"Against shuffled targets, {n_found} of {len(summary)} families are significant at a false-discovery rate "
            f"of 5 %; {int(self.table['holds'].sum())} of {n} relations individually exceed every baseline."
        )
        return sentences


@dataclass(frozen=True, eq=False, repr=False)
class Evidence(Result):
    """The result of `hw.evidence` for one relation.

    `plot` draws margins, attention, effects, when the answer passes on, cost of ablation; on `ax` each way's share.
    """

    table: pd.DataFrame
    """A row per head, the largest product first: `layer, head`; from the weights `score, excess, q_value` (as in
    `classify_heads`), `margin` (logits, first half); `attention` from the last position to the source (first half);
    `product` of margin and attention; `first_half`, the share of the gap that it moves there, and `effect, low, high`,
    this share on the second half; `direct`, the share of the gap that it writes directly into the logits (second half).
    """
    can: pd.DataFrame
    """One row: whether the model can do the relation, as in `EvidenceSuite.table`."""
    templates: pd.DataFrame
    """The candidate prompts; see `RelationPrompts`."""
    when: pd.DataFrame
    """A row per role ("source", "last") and layer: `share, low, high` of the gap that the residual stream carries."""
    ways: pd.DataFrame
    """A row per way of naming a head; see `headwater.causes.naming.judged`."""
    cost: pd.DataFrame
    """Cost of ablation, of the first pairs: `heads` (names), `what` ("named", "named together", "largest effect, first
    half", "random heads (...)", "named together, on RELATION"), `cost` in logits of the difference, `low, high` (of
    random heads 95 % of the sets, else an interval over sources), `share` of the difference."""
    run: RunRecord

    @property
    def relation(self) -> str:
        """The name of the relation."""
        return str(self.can["relation"].iloc[0])

    @property
    def is_measured(self) -> bool:
        """Whether the model can do the relation, so that results exist."""
        return bool(self.can["can"].iloc[0])

    def way(self, name: str) -> dict[str, Any]:
        """Return the row of `ways` with the given name."""
        checked_name("name", name, WAYS)
        if not self.is_measured:
            raise InputError(self.verdict)
        return dict(self.ways[self.ways["way"] == name].iloc[0])

    def summary(self) -> pd.DataFrame:
        """Return a row per way of naming a head, without those that name none; see `ways`."""
        columns = ["way", "layer", "head", "rank", "share", "low", "high", "difference", "difference_low"]
        return self.ways.loc[self.ways["heads"] > 0, columns].reset_index(drop=True)

    @property
    def passes(self) -> int | None:
        """The first layer before which the last position carries half of the gap; None if there is none."""
        last = self.when[(self.when["role"] == "last") & (self.when["share"] >= 0.5)]
        return None if last.empty else int(last["layer"].min())

    @property
    def verdict(self) -> str:
        """A sentence on whether the weights name the cause, and if not, why."""
        if not self.is_measured:
            return f"{self.relation} was not measured on {self.run.model}: {self.can['reason'].iloc[0]}."
        ours = self.way(NAMED)
        share = f"head {_head(ours)} has {interval_text(ours, 'share')} of the largest effect"
        if bool(self.can["holds"].iloc[0]):
            return (
                f"The weights name the cause: {share}, more than what any baseline names "
                f"(p = {ours['p_value']:.3f} against shuffled targets)."
            )
        beaten = [row for row in self.ways.to_dict("records") if row["way"] in BASELINES]
        level = [f"{r['way']} ({r['share']:.2f})" for r in beaten if r["heads"] and not r["difference_low"] > 0]
        why = [f"heads chosen by {' or by '.join(level)} are not clearly worse"] if level else []
        if not all(row["heads"] for row in beaten):
            why.append("no relation of another family could be compared")
        if not ours["p_value"] <= LARGEST_P:
            why.append(f"shuffled targets do as well (p = {ours['p_value']:.2f})")
        return f"It is not shown that the weights name the cause: {share}, but {', and '.join(why)}."

    def report(self) -> list[str]:
        """Return the results of weights, attention, patching, attribution and ablation for this relation's heads."""
        if not self.is_measured:
            return [self.verdict]
        can = self.can.iloc[0]
        sentences = [
            f"{self.run.model} on {self.relation}, with a {can['prompt']} prompt: replacing the source changes "
            f"the logit difference by {can['gap']:.1f} ({can['gap_low']:.1f} to {can['gap_high']:.1f}; "
            f"n = {can['pairs']} held-out pairs); the top prediction is correct in {can['accuracy']:.0%} of them."
        ]
        tried = self.templates.set_index("kind")["difference"]
        if can["prompt"] != "chat" and "chat" in tried:
            sentences.append(
                f"This prompt does not use the chat template, which gave a smaller difference ({tried['chat']:.1f} "
                f"instead of {tried[can['prompt']].max():.1f}, first half): results in a chat may differ."
            )
        if self.passes is not None:
            sentences.append(f"From layer {self.passes} on, the last position carries at least half of this change.")
        top = self.table.dropna(subset=["effect"]).nlargest(3, "effect").to_dict("records")
        moved = ", ".join(f"{_head(row)} ({row['effect']:.2f}, {row['low']:.2f} to {row['high']:.2f})" for row in top)
        sentences.append(f"Shares of this change moved by patching one head at the last position: {moved}.")
        sentences.append(f"Most attention to the source: {self._largest('attention')}.")
        if self.table["direct"].notna().any():
            sentences.append(f"Largest direct effects on the logits (share of this change): {self._largest('direct')}.")
        for row in self.ways.dropna(subset=["share"]).to_dict("records"):
            head = f"head {_head(row)} has" if pd.notna(row["layer"]) else f"{row['heads']} heads have on average"
            sentences.append(f"Chosen by {row['way']}: {head} {interval_text(row, 'share')} of the largest effect.")
        if len(self.cost) and can["pairs"] > FEW:
            sentences.append(f"Direct effects, residual streams and ablations are means of the first {FEW} pairs.")
        for row in self.cost.to_dict("records"):
            several = "s" * ("," in row["heads"])
            heads = f"head{several} {row['heads']} ({row['what']})" if row["heads"] else row["what"]
            over_sets = "95 % of sets: " * (not row["heads"])
            sentences.append(
                f"Ablating {heads} at the last position costs {row['cost']:.2f} logits "
                f"({over_sets}{row['low']:.2f} to {row['high']:.2f})."
            )
        return [*sentences, self.verdict]

    def _largest(self, column: str) -> str:
        rows = self.table.nlargest(3, column).to_dict("records")
        return ", ".join(f"{_head(row)} ({row[column]:.2f})" for row in rows)

    def __repr__(self) -> str:
        return f"Evidence({self.run.model}, {self.relation}: {self.verdict})"


def _column(way: str) -> str:
    return way.replace("'", "").replace(" ", "_")


def _head(row: Mapping[Any, Any]) -> str:
    return f"{row['layer']}.{row['head']}"
