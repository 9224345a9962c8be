"""AUC of a probe for every token and layer: where do states separate right from wrong answers?

Orgad et al., "LLMs Know More Than They Show", ICLR 2025, Figure 2; Luo et al., "Two Pathways", 2026, B.2.

1. Tokens: of the prompt, around the exact answer, and the last of the answer (`headwater.questions.states`); also the
   last token of E_Q.
2. Per token and layer, a logistic regression is fitted on half of the questions and evaluated on the other half, and
   vice versa, for every seed. AUCs of the halves are averaged; intervals resample questions and keep the fits.
3. Control: labels permuted among the questions. A probe of many coordinates memorises them and predicts nothing on the
   other half: its AUC is about 0.5, and shows the size of chance alone.
4. A baseline beside the map that needs no states: length and place of the exact answer (`tables.span_logits`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from headwater.calls import checked_call
from headwater.models.hooked import HookedModel
from headwater.options import checked_names
from headwater.pathways.effects import Halves, each_half, halves
from headwater.pathways.tables import half_aucs, span_logits
from headwater.probes.linear import States, fit_linear, read_linear
from headwater.questions.answers import AnsweredQuestions, check_answered
from headwater.questions.sources import HasDatasets
from headwater.questions.states import MAP_TOKENS, ProbeSiteName, probe_positions, states_at
from headwater.questions.words import span_shapes
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, interval_text
from headwater.stats.resample import Bootstrap, interval

BOUNDS = ("auc", "low", "high")


@dataclass(frozen=True, eq=False, repr=False)
class ProbeMap(HasDatasets, Result):
    """How well a probe detects wrong answers, by token and layer."""

    table: pd.DataFrame
    """A row per question set, token and layer: `dataset, token, layer, auc, low, high` (95 %), `control_auc` for
    permuted labels (NaN without controls), `answers`."""
    spans: pd.DataFrame
    """A row per question set: `dataset, auc, low, high` of the exact answer's length and place alone."""
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Return a row per question set and token: its best layer, and the AUC there with its interval and control.

        `dataset, token, layer, auc, low, high, control_auc, answers`; the best of many layers is overestimated.
        """
        best = self.table.groupby(["dataset", "token"], sort=False)["auc"].idxmax()
        names = ["dataset", "token", "layer", "auc", "low", "high", "control_auc", "answers"]
        return self.table.loc[best, names].reset_index(drop=True)

    def report(self) -> list[str]:
        """Return where wrong answers are detected best, and whether this is better than permuted labels and spans."""
        lines = []
        for name in self.datasets:
            rows = self.table[self.table["dataset"] == name]
            row = rows.iloc[int(rows["auc"].to_numpy().argmax())]
            spans = self.spans[self.spans["dataset"] == name].iloc[0]
            lines.append(
                f"{name}: the wrong ones among {row['answers']:,} answers are detected best at {row['token']}, layer "
                f"{row['layer']}: AUC {interval_text(row, 'auc', '.3f')}, an overestimate, "
                f"as the best of {len(rows)} pairs of token and layer."
            )
            if np.isfinite(row["control_auc"]):
                highest = float(rows["control_auc"].max())
                lines.append(f"{name}: with permuted labels, the highest AUC of any token and layer is {highest:.3f}.")
            if np.isfinite(spans["auc"]):
                more = "exceed this" if row["low"] > spans["high"] else "do not clearly exceed this"
                lines.append(
                    f"{name}: the exact answer's length and position alone give AUC "
                    f"{interval_text(spans, 'auc', '.3f')}; the states {more}."
                )
        return lines


@checked_call
def probe_map(
    model: HookedModel,
    answered: AnsweredQuestions,
    *,
    tokens: Iterable[str] = MAP_TOKENS,
    site: ProbeSiteName = "mlp_out",
    seeds: int = 1,
    controls: bool = True,
    batch_size: int = 64,
    progress: bool = True,
    out: str | Path | None = None,
) -> ProbeMap:
    """Measure how well a probe detects wrong answers at every token and layer.

    Args:
        model: the model that answered.
        answered: what `hw.answer` returned.
        tokens: tokens whose states are read, from `headwater.questions.states.MAP_TOKENS`.
        site: what probes read: `mlp_out`, `attn_out` or `resid_post`.
        seeds: how many times the questions are split into halves, at most 1,000.
        controls: also fit probes to permuted labels; doubles the fits.
        batch_size: rows in one run of the model.
    """
    check_answered(model, answered)
    names = checked_names("tokens", tokens, MAP_TOKENS)
    options = {"answered": answered, "tokens": names, "site": site, "seeds": seeds, "controls": controls}

    def work(run: Run) -> ProbeMap:
        sets = {name: answered.select(name) for name in answered.datasets}
        split = {name: halves(subset, seeds) for name, subset in sets.items()}
        parts = [(name, token) for name in sets for token in names]

        def compute(part: tuple[str, str]) -> dict[str, Tensor]:
            subset, half = sets[part[0]], split[part[0]]
            at = probe_positions(subset, part[1])
            states = states_at(model, list(subset.table["tokens"]), at, site, batch_size, progress=False)
            labels = {"logit": np.broadcast_to(subset.z, half.shape)}
            labels |= {"control": _permuted(subset.z, half)} if controls else {}
            return {name: torch.from_numpy(_logits(states, z, half)) for name, z in labels.items()}

        with run.bar("Probing", "token", len(parts)) as bar:
            pieces = dict(zip(parts, run.pieces("token", parts, compute, bar), strict=True))
        rows, spans = [], []
        for name, subset in sets.items():
            draws, half = Bootstrap.of(subset.table["question"]), split[name]
            alone = span_logits(span_shapes(subset.table), subset.z, half)
            spans.append({"dataset": name} | _named(half_aucs(draws, subset.z, half, alone).mean(0)))
            permuted = _permuted(subset.z, half)
            for token, layer in product(names, range(model.shape.n_layers)):
                at_layer = {kind: logits[:, layer].numpy() for kind, logits in pieces[name, token].items()}
                row = {"dataset": name, "token": token, "layer": layer}
                row |= _named(half_aucs(draws, subset.z, half, at_layer["logit"]).mean(0)) | {"control_auc": np.nan}
                if controls:
                    row["control_auc"] = float(half_aucs(draws, permuted, half, at_layer["control"]).mean(0)[0])
                rows.append(row | {"answers": half.shape[1]})
        return ProbeMap(pd.DataFrame(rows), pd.DataFrame(spans), run.record)

    return run_or_resume(ProbeMap, "probe_map", model, options, work, out=out, progress=progress)


def _named(aucs: Float[ndarray, " draw"]) -> dict[str, float]:
    return dict(zip(BOUNDS, interval(aucs), strict=True))


def _logits(states: States, z: Int[ndarray, "seed example"], half: Halves) -> Float[ndarray, "seed layer example"]:
    """Return the logit of z = 1 of every answer at every layer, by the probe of the other half."""
    logits = np.empty((len(half), len(states), half.shape[1]))
    for layer in range(len(states)):
        features = states[layer].double().numpy()
        for seed, other, here in each_half(half):
            logits[seed, layer, here] = read_linear(features[here], *fit_linear(features[other], z[seed, other]))
    return logits


def _permuted(z: Int[ndarray, " example"], half: Halves) -> Int[ndarray, "seed example"]:
    """Permute the labels within each half of every seed, so that both halves keep their share of wrong answers."""
    drawn, generators = np.empty(half.shape, dtype=np.int64), [np.random.default_rng(seed) for seed in range(len(half))]
    for seed, _, here in each_half(half):
        drawn[seed, here] = z[generators[seed].permutation(here)]
    return drawn
