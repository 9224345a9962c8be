"""Anchored pathways: does the signal that separates right from wrong answers come from the question or the answer?

Luo et al., "Two Pathways to Truthfulness", ACL 2026, with added controls.

1. Cross-fitted probes per layer: every example is measured by probes fitted on others (`effects`, `headwater.probes`).
2. Knockout: no later position attends to E_Q, the question's exact words, in layers 0 to k, for all k in one pass.
   ΔP(k) is the change of the probability that the probe gives its original prediction. An example is Q-anchored if the
   prediction flips, else A-anchored (`modes`), at l*, the layer of the best probe.
3. Controls: as many random question tokens, token swap, answer only; the test of one mode or two within each relation;
   the margin, the relation and the answer's words as baselines (`tables`, `interventions`, `stats.significance`).
4. A report of what holds on this model, as sentences computed from the numbers (`report`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.options import checked_count, checked_name
from headwater.patching.edge_knockout import VariantName
from headwater.pathways.effects import Effects, measure, probes_as_tensors, probes_from_tensors, usable_sets
from headwater.pathways.interventions import Setup
from headwater.pathways.modes import controls_of, curves_of
from headwater.pathways.report import report_of, summary_of
from headwater.pathways.tables import stacked, tables_of
from headwater.probes.linear import Probe, Probes, States, fit_probes, with_halves
from headwater.questions.answers import AnsweredQuestions, check_answered
from headwater.questions.states import BEFORE, ProbeSiteName, TokenName
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Result

POOLED = "all"
POOLED_ROWS = 1000
"""Maximum number of examples of each question set that the pooled probes are fitted on."""


@dataclass(frozen=True, eq=False, repr=False)
class Pathways(Result):
    """Where the truthfulness signal of a model comes from, on each question set. All logits are of z = 1, "wrong"."""

    returned_by = "hw.trace_pathways(...)"

    table: pd.DataFrame
    """A row per dataset, example, seed and layer: the effect of the knockout of E_Q in layers up to this one.

    - `example`: row of the answered questions; `split`: half of the example, measured by probes of the other half;
    - `logit`; `probability`, `probability_after`: of the probe's original prediction; `delta_p`: their difference in
      percentage points; `delta_logit`: the change towards that prediction; `flipped`: the hard prediction changed;
    - `mode`: "Q-anchored" if it flipped at this layer, else "A-anchored" (with `window=`: at l*, without window);
    - `correct`: the answer is right; `random_delta_p`, `random_delta_logit`, `random_flipped`: the same for the
      knockout of an equal number of random question tokens; missing if a question has fewer other tokens.
    """
    modes: pd.DataFrame
    """A row per dataset, example and seed, at l*: `layer, split, logit, margin, predicted_wrong, delta_p, delta_logit,
    mode, crossed_mode` (by the next seed's probe, which reads the same states: a description, not a test),
    `aware_logit` (of a probe that predicts the mode), `correct`, `question`, relation, popularity and depth if the
    questions have them, and the length and place of E_A (`questions.words.span_shapes`)."""
    auc: pd.DataFrame
    """`dataset, seed, split, layer, best, validation_auc, auc, auc_after_knockout, auc_after_random`."""
    mean_effects: pd.DataFrame
    """Mean effects of every intervention: a row per `dataset, intervention, split_by, group, layer`.

    - `layer`: missing in the rows measured at l* of each fit;
    - `split_by`: how the modes are separated (`pathways.modes`), "not split" for the `group` "all";
    - `examples` that are ever in the group, its `share`; `flip_rate, delta_p, delta_logit` with 95 % intervals.

    The random knockout severs as many question tokens as E_Q has, on the `examples` with enough other tokens; the
    knockout of E_Q on these alone is a separate intervention. `curves` and `controls` are rows of this table."""
    baselines: pd.DataFrame
    """AUCs at l* by `dataset, question, score` with 95 % intervals, and differences of two AUCs (`difference`)."""
    components: pd.DataFrame
    """The test of one mode or two within each relation (population "within relations"; see
    `pathways.modes.within_relations`), and the number of peaks of all changes and of the changes of each prediction
    (`pathways.modes.components`), by `dataset, intervention, population`."""
    fits: pd.DataFrame
    """`dataset, seed, split, best`: the probes in the rows of `weight` and `bias`; `split` is the half they measure.
    Dataset "all" is pooled, and its split -1 is fitted on both halves (of seed 0)."""
    weight: Float[Tensor, "fit layer d_model"]
    bias: Float[Tensor, "fit layer"]
    dropped: pd.DataFrame
    """`dataset, cause, examples`: question sets that could not be traced."""
    run: RunRecord

    @property
    def datasets(self) -> tuple[str, ...]:
        """The names of the question sets, in the order of the table."""
        # Not from `table`, which has a row per answer, seed and layer: a million.
        return tuple(self.auc["dataset"].unique())

    @property
    def curves(self) -> pd.DataFrame:
        """Mean ΔP and logit change by `dataset, split_by, mode, layer`, with 95 % intervals; see `pathways.modes`."""
        return curves_of(self.mean_effects, at_best=False)

    @property
    def curves_at_best(self) -> pd.DataFrame:
        """The same at l* of each fit, by `dataset, split_by, mode`."""
        return curves_of(self.mean_effects, at_best=True)

    @property
    def controls(self) -> pd.DataFrame:
        """Flip rates and changes by `dataset, intervention, group, layer`, with 95 % intervals.

        Groups: "all", and the modes at l*, taken from another seed's probe (if any).
        """
        return controls_of(self.mean_effects, at_best=False)

    @property
    def controls_at_best(self) -> pd.DataFrame:
        """The same at l* of each fit, by `dataset, intervention, group`."""
        return controls_of(self.mean_effects, at_best=True)

    @property
    def probes(self) -> Probes:
        """The probes fitted on all question sets together, one per layer.

        Their `folds`, each fitted on one half of the examples, are for measurements on these examples.
        """
        return self.probes_of(POOLED)

    @property
    def probe(self) -> Probe:
        """The pooled probe of the best layer."""
        return self.probes[self.best_layer]

    @property
    def best_layer(self) -> int:
        """l*: the layer whose pooled probe has the highest AUC on held-out rows."""
        return self.probes.best

    def probes_of(self, dataset: str, seed: int = 0, split: int = 0) -> Probes:
        """Return the probes that measured one half of a question set, fitted on its other half.

        Their `folds` are the probes that measured the half they were fitted on. For dataset "all", the probes are
        fitted on both halves, and each fold on one.
        """
        checked_name("dataset", dataset, tuple(self.fits["dataset"].unique()))
        split = checked_count("split", split, least=0, most=1)
        parts = [(0, -1), (0, 0), (0, 1)] if dataset == POOLED else [(seed, split), (seed, 1 - split)]
        whole, *folds = (self._probes(dataset, *part) for part in parts)
        return replace(whole, folds=tuple(folds))

    def _probes(self, dataset: str, seed: int, split: int) -> Probes:
        """Return the probes of one row of `fits`, with the questions that they were fitted on."""
        here = (self.fits[["dataset", "seed", "split"]] == [dataset, seed, split]).all(axis=1)
        if not here.any():
            raise InputError(f"{dataset} has no probes of seed {seed} and split {split}.")
        row, options = int(np.flatnonzero(here)[0]), self.run.options
        rows = self.modes[self.modes["seed"] == seed]
        rows = rows.drop_duplicates("question") if dataset == POOLED else rows[rows["dataset"] == dataset]
        seen = set(rows["question"]) - set(rows.loc[rows["split"] == split, "question"])
        weight, bias, best = self.weight[row], self.bias[row], int(self.fits["best"].iloc[row])
        return Probes(options["site"], options["token"], weight, bias, best, fitted_on=frozenset(seen))

    def summary(self) -> pd.DataFrame:
        """Return a row per question set: the probe's AUC at l* (`layer`), and the effect of knocking out E_Q.

        `dataset, examples, layer`; AUCs of the probe, of relation and spans alone, and after the knockout; flip rates
        for E_Q and for an equal number of random question tokens; ΔP of both modes (percentage points); the verdict of
        the test of two modes.
        """
        return summary_of(self)

    def report(self) -> list[str]:
        """Return what holds on this model and what does not, as sentences computed from the numbers."""
        return report_of(self)


@checked_call
def trace_pathways(
    model: HookedModel,
    answered: AnsweredQuestions,
    *,
    site: ProbeSiteName = "mlp_out",
    token: TokenName = "exact_answer_last",
    variant: VariantName = "mask",
    edges: Literal["after", "answer"] = "after",
    window: int | None = None,
    seeds: int = 3,
    controls: bool = True,
    batch_size: int = 64,
    progress: bool = True,
    out: str | Path | None = None,
) -> Pathways:
    """Trace where the signal that separates right from wrong answers comes from.

    ΔP = 100 (P after - P before), in percentage points, of a probe's prediction when attention to the question's
    exact tokens E_Q is severed (Luo et al., ACL 2026).

    Args:
        model: the model that answered.
        answered: what `hw.answer` returned.
        site: what the probes read: `mlp_out`, `attn_out` or `resid_post`.
        token: where probes read: `prompt_last`, `answer_first`, `before_answer` (the token that the
            exact answer follows), `exact_answer_first`, `exact_answer_last`, `after_answer`, `answer_last`.
        variant: `mask` (severed before the softmax; the rest renormalises) or `zero` (after it: exactly A = 0).
        edges: positions that may no longer attend to E_Q: all `after` it, or the exact tokens of the `answer` alone.
        window: sever in this many layers around each layer instead of in all layers up to it, and read the probe of
            l*; 1 is each layer alone. One walk serves all windows; each window costs what it changes.
        seeds: how many times, at most 1,000, the examples are split and probes fitted; with two or more, the
            modes of each seed are also compared with those of the next seed's probe.
        controls: run the controls too (about eight more passes) and compare with baselines.
        batch_size: rows in one run.

    Example:
        >>> import headwater as hw
        >>> model = hw.load()
        >>> answered = hw.answer(model, hw.load_questions("properties", sample=120), progress=False)
        >>> pathways = hw.trace_pathways(model, answered, controls=False, progress=False)
        >>> sorted(pathways.table["mode"].unique())
        ['A-anchored', 'Q-anchored']
    """
    setup = Setup(site, token, variant, edges, batch_size)
    check_answered(model, answered)
    if edges == "answer" and token in BEFORE:
        raise InputError(
            f"edges='answer' severs the attention of the exact answer, but token={token!r} is read before it: nothing "
            "could change. Use another token=, or edges='after'."
        )
    if window is not None:
        checked_count("window", window)
    options = {"answered": answered, **vars(setup), "window": window, "seeds": seeds, "controls": controls}

    def work(run: Run) -> Pathways:
        usable, dropped = usable_sets(answered, seeds)
        parts, samples = [], []
        fits: list[tuple[str, int, int, Probes]] = []
        half_of: dict[str, int] = {}
        for number, (name, half) in enumerate(usable.items()):
            rows, part = np.flatnonzero(answered.table["dataset"] == name), run.part(f"{number:02d}")
            measured = measure(part, model, answered.select(name), half, setup, window=window, controls=controls)
            parts.append(tables_of(measured, rows.tolist(), controls))
            by_seed = enumerate(measured.fits.probes)
            fits += [(name, seed, side, fit) for seed, sides in by_seed for side, fit in enumerate(sides)]
            samples.append(_sampled(measured, half_of))
            del measured  # a large model's states take gigabytes, and the next set needs the memory
        pooled = _pooled(run.part(POOLED), samples, setup)
        fits += [(POOLED, 0, side, fit) for side, fit in enumerate(pooled, start=-1)]
        return Pathways(
            **stacked(parts),
            fits=pd.DataFrame(
                [(*named, fit.best) for *named, fit in fits], columns=["dataset", "seed", "split", "best"]
            ),
            weight=torch.stack([fit.weight for *_, fit in fits]),
            bias=torch.stack([fit.bias for *_, fit in fits]),
            dropped=dropped,
            run=run.record,
        )

    return run_or_resume(Pathways, "trace_pathways", model, options, work, out=out, seed=0, progress=progress)


_Sample: TypeAlias = tuple[States, NDArray[np.int64], list[str], NDArray[np.int64]]
"""The states, z and questions of a set's examples that go into the pooled probes, and the half of each, of seed 0."""


def _sampled(measured: Effects, halves_before: dict[str, int]) -> _Sample:
    """Draw the examples of a set for the pooled probes; add the halves of its new questions to `halves_before`."""
    questions = measured.answered.table["question"].astype(str).tolist()
    # A question of several sets stays in the half of its first set.
    half = [halves_before.setdefault(*row) for row in zip(questions, measured.fits.half[0].tolist(), strict=True)]
    rows = np.sort(np.random.default_rng(0).permutation(len(questions))[:POOLED_ROWS])
    states, z = measured.states[:, torch.from_numpy(rows)], measured.answered.z[rows]
    return states, z, [questions[row] for row in rows], np.array(half)[rows]


def _pooled(run: Run, samples: list[_Sample], setup: Setup) -> list[Probes]:
    """Fit probes on all question sets together: one on all examples, and one per half on the other half."""
    each_states, each_z, each_questions, each_half = zip(*samples, strict=True)
    groups, z, half = list(chain(*each_questions)), np.concatenate(each_z), np.concatenate(each_half)

    def compute(parts: Sequence[States]) -> dict[str, Tensor]:
        states = torch.cat(list(parts), 1)
        fitted = fit_probes(states, z, site=setup.site, token=setup.token, groups=groups, cross_fit=False)
        probes = with_halves(fitted, states, z, groups, half)
        return probes_as_tensors([probes, *probes.folds])

    (found,) = run.pieces("probes", [each_states], compute)
    return probes_from_tensors(found, setup)
