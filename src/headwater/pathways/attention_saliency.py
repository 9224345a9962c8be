"""Saliency: does the information that the probe reads reach the answer's tokens directly from the question's tokens?

Luo et al., "Two Pathways to Truthfulness", ACL 2026, §2.3 (Eq. 1); after Wang et al., "Label Words are Anchors", 2023.

    S(i, j) = |A(i, j) · ∂L/∂A(i, j)|        at each layer, averaged over heads; i is the query, j the key

1. L is the cross-entropy of the hallucination probe at layer l* with the true z, or the probe's logit. Since L depends
   on the attention through the logit alone, ∂L/∂A = (p - z) · ∂logit/∂A with p the probe's probability: one backward
   pass serves both, and a confident and right probe (p ≈ z) has no cross-entropy gradient whatever flows.
2. A ∂L/∂A = A ⟨g, v⟩ (`kernels.attention`), with g the gradient at the head's output, from `models.gradients`: no
   gradient of a pattern is formed, layers above l* and positions after the probe's token are not run, and positions
   before the first edge are run without gradients (once for the prefix that all texts share).
3. S(E_Q→E_A): the sum over i in E_A, j in E_Q. S(E_Q→*): over all i that can see j, up to the probe's token, including
   i = j, which the released code of label words sets to 0 (the mean is then up to 7.5 % smaller). Both are averaged
   over the layers up to l*. The sum is the "total" of the publication; S(E_Q→*) is then never smaller than S(E_Q→E_A),
   since E_A is among its rows. The mean over pairs (`pairs="mean"`) divides it by many rows of little flow; this
   reverses the order.
4. p and the gradient of an example come from probe coefficients that were not fitted on it (`Probe.folds`): on examples
   that it has seen, a probe of many coordinates is confident and right whether or not there is anything to learn.

At l* itself only the probe's token has a gradient; other queries count as 0 there. Pairs hidden by a sliding window are
left out, and a layer without a visible pair is NaN and left out of the average. A probe that reads before the exact
answer cannot depend on E_A: S(E_Q→E_A) is then NaN, not 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.kernels.attention import Heads, Pairs, edge_saliency, over_pairs
from headwater.kernels.devices import in_tiles, to_device
from headwater.models.forward import KeysValues, common_start, keys_values
from headwater.models.gradients import Descent, graphs_in_memory, refuse_cut_texts, refuse_without_gradients
from headwater.models.hooked import HookedModel
from headwater.models.sites import SITES
from headwater.models.tokens import Batch, by_length
from headwater.options import checked_name, checked_names, resolve_indices, shown
from headwater.probes.linear import Probe
from headwater.questions.answers import AnsweredQuestions, check_answered
from headwater.questions.sources import HasDatasets
from headwater.questions.states import PROBE_SITES, PROBE_TOKENS, probe_positions
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, whole_summary
from headwater.stats.discrimination import CHANCE
from headwater.stats.resample import DRAWS
from headwater.stats.significance import critical_dip, dip, wilson_interval


@dataclass(frozen=True, eq=False, repr=False)
class Saliency(HasDatasets, Result):
    """How much the probe depends on the attention paid to the exact question tokens, per example."""

    table: pd.DataFrame
    """A row per example and target: `dataset, example, target, z, fold, logit, probability, saliency_exact_answer`
    (S(E_Q→E_A)), `saliency_all` (S(E_Q→*)). `example` is the row of the answered questions' table; `fold` is the fold
    of the probe that measures it (-1: the probe itself, which has not seen an answer to this question); `logit` and
    `probability` are of a wrong answer, by that fold."""
    by_layer: pd.DataFrame
    """The same at each layer: `dataset, example, target, layer, saliency_exact_answer, saliency_all`."""
    target: LossName
    """The target that figures and `of` show by default."""
    run: RunRecord

    def of(self, target: LossName | None = None) -> pd.DataFrame:
        """Return the rows of one target, by default the one requested."""
        return self.table[self.table["target"] == (target or self.target)]

    def summary(self) -> pd.DataFrame:
        """Return a row per question set, kind of edge and target of the derivative.

        `dataset, edges, target, examples`; `median_right, median_wrong` by the answer; `near_zero`, the share of
        examples below a tenth of the mean; `several_peaks`, whether the dip test rejects a single peak at 5 %.
        """
        rows = []
        for dataset, edges, target in product(self.datasets, EDGES, TARGETS):
            measured, values = self.values_of(dataset, edges, target)
            row = {"dataset": dataset, "edges": edges, "target": target}
            row["examples"] = self.table.loc[self.table["dataset"] == dataset, "example"].nunique()
            row |= {f"median_{name}": values[measured["z"] == z].median() for z, name in enumerate(("right", "wrong"))}
            several = len(values) > 1 and dip(values.to_numpy()) > critical_dip(len(values))
            row |= {"near_zero": near_zero(values).mean(), "several_peaks": several if len(values) else np.nan}
            rows.append(row)
        return pd.DataFrame(rows)

    def values_of(self, dataset: str, edges: str, target: str) -> tuple[pd.DataFrame, pd.Series]:
        """Return the rows of a set with a value for these edges and target, by example, and these values."""
        column, rows = f"saliency_{edges}", self.of(target)  # type: ignore[arg-type]
        rows = rows[rows["dataset"] == dataset].dropna(subset=[column]).set_index("example")
        return rows, rows[column]

    def report(self) -> list[str]:
        """Return the summary and its reasons as sentences; the ratio of medians has an interval over examples."""
        rows = self.table.drop_duplicates("example")
        seen = f"All {len(rows):,} examples are measured with probe coefficients that were fitted on other examples."
        if not self.run.options["probe"].get("fitted_on") and (rows["fold"] == -1).any():
            seen = (
                "The probe does not record which answers it was fitted on. If it was fitted on these, a peak near zero "
                "with the cross-entropy may only mean that it has memorized them."
            )
        summary, lines = whole_summary(self), [seen]
        for dataset, edges in product(self.datasets, EDGES):
            of_edges = summary[(summary["dataset"] == dataset) & (summary["edges"] == edges)]
            lines += [f"{dataset}: {sentence}" for sentence in self._sentences(dataset, edges, of_edges)]
        return lines

    def _sentences(self, dataset: str, edges: str, summary: pd.DataFrame) -> Iterator[str]:
        """Yield the sentences on one kind of edge in one set, from the rows of its summary."""
        name = {"exact_answer": "S(E_Q→E_A)", "all": "S(E_Q→*)"}[edges]
        rows, flow = self.values_of(dataset, edges, "logit")
        if flow.empty:
            yield f"{name} was not measured: it was not requested, or the probe cannot depend on these edges."
            return
        wrong, right = (flow[rows["z"] == z].to_numpy() for z in (1, 0))
        if (times := _times(wrong, right)) is not None:
            ratio, low, high = times
            chance = f", {CHANCE}" if low <= 1 <= high else ""
            yield (
                f"the median {name} of the logit is {ratio:.2f} ({low:.2f} to {high:.2f}) times as large for "
                f"{len(wrong):,} wrong answers as for {len(right):,} right ones{chance}."
            )
        near, near_flow = near_zero(self.values_of(dataset, edges, "cross_entropy")[1]), near_zero(flow)
        # Near zero with the cross-entropy alone: the probe is confident and right there, which says nothing about flow.
        saturated, why = float((~near_flow[near]).mean()) if near.any() else 0.0, ""
        if saturated:
            why = (
                f" (in {saturated:.0%} of these only because the probe is confident and right: with the logit they "
                "are not)"
            )
        yield (
            f"of {len(flow):,} examples, {_percent(near)} have {name} near zero with the cross-entropy{why} and "
            f"{_percent(near_flow)} with the logit."
        )
        entropy, logit = ("more than one peak" if several else "one peak" for several in summary["several_peaks"])
        yield f"by the dip test, {name} has {entropy} with the cross-entropy and {logit} with the logit."


@checked_call
def saliency(
    model: HookedModel,
    answered: AnsweredQuestions,
    probe: Probe,
    *,
    target: LossName = "cross_entropy",
    edges: Literal["exact_answer", "all"] | Sequence[Literal["exact_answer", "all"]] = ("exact_answer", "all"),
    heads: Heads = "mean_abs",
    pairs: Pairs = "sum",
    layers: Iterable[int] | int | None = None,
    batch_size: int = 16,
    progress: bool = True,
    out: str | Path | None = None,
) -> Saliency:
    """Measure the saliency of the attention edges from the exact question tokens.

    S(i, j) = |A(i, j) · ∂L/∂A(i, j)|, averaged over heads, summed over pairs of tokens and averaged over the layers up
    to the probe's (Luo et al., ACL 2026, §2.3).

    Args:
        model: the model that answered.
        answered: what `hw.answer` returned.
        probe: the probe of the layer l* to explain, such as `trace_pathways(...).probe` or `fit_probes(...)[best]`.
            Each example is measured by coefficients of this probe that were not fitted on an answer to its question. A
            `Probe` made by hand does not record what it was fitted on, and is assumed to be fitted on other answers.
        target: what figures show: `cross_entropy` of the probe with the true z, or its `logit`. Both are stored.
        edges: `exact_answer` (E_Q→E_A), `all` (E_Q→*), or both. E_Q→E_A alone is faster, since it needs gradients only
            at the answer's positions; the other column is then NaN.
        heads: `mean_abs` averages |A ∂L/∂A| over heads, `abs_mean` takes the absolute value of the average.
        pairs: the `sum` over pairs of tokens, or their `mean`, which usually puts S(E_Q→E_A) above S(E_Q→*).
        layers: the layers to average over; default: all up to the probe's.
        batch_size: examples in one run; examples that need about the same positions run together.

    Returns:
        The saliency of every row of `answered`, in float64. Memory: the residual stream and the keys and values of
        each layer, and the graphs of a few layers at a time.
    """
    check_answered(model, answered)
    spec: dict[str, Any] = {
        "edges": tuple(checked_names("edges", edges, EDGES)),
        "heads": heads,
        "pairs": pairs,
        "layers": _layers(model, probe, layers),
    }
    if not hasattr(model.raw, "original_model"):
        raise InputError(f"Saliency needs a model that hw.load made; {model.name} is a {type(model.raw).__name__}.")
    refuse_without_gradients(model)
    refuse_cut_texts(model, "Saliency")
    checked_name("the probe's site", probe.site, PROBE_SITES)
    checked_name("the probe's token", probe.token, PROBE_TOKENS)
    width = tuple(probe.weight.shape) if isinstance(probe.weight, Tensor) else shown(probe.weight)
    if width != (model.shape.d_model,) or not isinstance(probe.bias, float):
        raise InputError(
            f"A probe of {model.name} needs a weight of shape ({model.shape.d_model},) and a bias (a float), "
            f"found {width} and {shown(probe.bias)}."
        )
    fold = _folds(answered, probe)
    options = {
        "answered": answered,
        "probe": vars(probe)
        | {
            "weight": probe.weight.double(),
            "fitted_on": len(probe.fitted_on),
            "folds": [[one.weight.double(), one.bias] for one in probe.folds],
            "fold_of_each": fold,
        },
        **spec,
        "target": target,
        "batch_size": batch_size,
    }

    def work(run: Run) -> Saliency:
        rows = rows_of(answered, probe, spec["edges"])
        blind = sum(not row.queries for row in rows)
        if blind and "exact_answer" in spec["edges"]:
            warnings.warn(
                f"The probe reads {probe.token}, before the exact answer of {blind:,} of {len(rows):,} examples: it "
                "cannot depend on the attention of their answer tokens, and S(E_Q→E_A) is NaN there.",
                stacklevel=4,
            )
        readers = (*probe.folds, probe)  # the probe itself is last: fold -1
        first = min(row.first for row in rows)
        shared = common_start(torch.tensor([row.tokens[:first] for row in rows], dtype=torch.long))

        @cache  # only when a piece needs it: a resumed run may find all pieces in its folder
        def start() -> KeysValues:
            return keys_values(model, torch.tensor([rows[0].tokens[:shared]], dtype=torch.long), {}, probe.layer + 1)

        def compute(places: list[int]) -> dict[str, Tensor]:
            # Inference mode set by the caller would forbid autograd graphs.
            with torch.inference_mode(False):
                read = readers[fold[places[0]]]
                return measure_batch(model, [rows[i] for i in places], read, start(), shared, **spec)

        batches = []
        # One probe measures a batch, so rows of different folds are not mixed.
        for place in np.unique(fold):
            part = np.flatnonzero(fold == place).tolist()
            # Batches of rows with a similar first position and a similar length.
            dealt = by_length([len(rows[i].tokens) for i in part], batch_size, before=[rows[i].first for i in part])
            batches += [[part[i] for i in batch] for batch in dealt]
        nothing = torch.full((len(rows), len(spec["layers"])), torch.nan, dtype=torch.float64)
        measured = {name: nothing.clone() for name in EDGES} | {"logit": nothing[:, 0].clone()}
        with run.bar("Saliency", "example", len(rows)) as bar:
            for places, piece in zip(batches, run.pieces("rows", batches, compute, bar, len), strict=True):
                for name, values in piece.items():
                    measured[name][places] = values
        return Saliency(*_tables(answered, measured, fold, spec["layers"]), target, run.record)

    return run_or_resume(Saliency, "saliency", model, options, work, out=out, progress=progress)


def _tables(
    answered: AnsweredQuestions, measured: dict[str, Tensor], fold: NDArray[np.int64], layers: Sequence[int]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables; the gradient of the cross-entropy is the logit's times |p - z|."""
    z, logit = torch.tensor(answered.z, dtype=torch.float64), measured["logit"]
    # |z - p| from the signed logit, since 1 - sigmoid(logit) is exactly 0 from logits of 37 on.
    distance = torch.where(z == 1, torch.sigmoid(-logit), torch.sigmoid(logit))
    slopes = {"cross_entropy": distance, "logit": torch.ones_like(distance)}
    names = {"dataset": answered.table["dataset"].to_numpy(), "example": np.arange(len(z))}
    probe = {"z": answered.z, "fold": fold, "logit": logit.numpy(), "probability": torch.sigmoid(logit).numpy()}
    tables, by_layer = [], []
    for target in TARGETS:
        flows = {f"saliency_{name}": measured[name] * slopes[target][:, None] for name in EDGES}
        means = {column: flow.nanmean(1).numpy() for column, flow in flows.items()}
        tables.append(pd.DataFrame({**names, "target": target, **probe, **means}))
        repeated = {key: np.repeat(values, len(layers)) for key, values in names.items()}
        flat = {column: flow.flatten().numpy() for column, flow in flows.items()}
        by_layer.append(pd.DataFrame({**repeated, "target": target, "layer": np.tile(layers, len(z)), **flat}))
    return pd.concat(tables, ignore_index=True), pd.concat(by_layer, ignore_index=True)


def _layers(model: HookedModel, probe: Probe, layers: Iterable[int] | int | None) -> tuple[int, ...]:
    """Return the requested layers; refuse layers whose heads cannot affect the probe."""
    if probe.layer not in range(model.shape.n_layers):
        raise InputError(
            f"The probe is of layer {shown(probe.layer)}; {model.name} has layers 0 to {model.shape.n_layers - 1}."
        )
    # With parallel attention, the MLP of a layer does not read the output of that layer's heads.
    last = probe.layer - (model.shape.parallel_blocks and probe.site == "mlp_out")
    if last < 0:
        raise InputError(f"No head of {model.name} precedes the MLP of layer 0: attention runs in parallel with it.")
    chosen = tuple(range(last + 1)) if layers is None else resolve_indices(layers, model.shape.n_layers, "layer")
    above = [layer for layer in chosen if layer > last]
    if above:
        raise InputError(f"layers={above} cannot reach the probe, which reads {probe.site} of layer {probe.layer}.")
    return chosen


def _folds(answered: AnsweredQuestions, probe: Probe) -> NDArray[np.int64]:
    """Return which coefficients measure each row: a fold of the probe, or -1 for the probe itself."""
    if "question" not in answered.table:
        return np.full(len(answered.table), -1)
    places = [probe.reader(str(question)) for question in answered.table["question"]]
    seen = sum(place is None for place in places)
    if seen:
        raise InputError(
            f"The probe was fitted on {seen:,} of these {len(places):,} answers, and has no folds fitted without them: "
            "a probe is more confident, and more often right, on its training answers. Fit it on other questions, or "
            "use a probe with folds: pathways.probe, or fit_probes(..., cross_fit=True)."
        )
    return np.array(places, dtype=np.int64)


# The saliency of the edges of a few examples at every layer: which positions matter, what is run, what is read.
#
# Only the tokens up to the probe's are run, and gradients are needed from an example's first edge on: from E_Q for
# E_Q→*, from E_A for E_Q→E_A. Earlier tokens are run without gradients.


BEFORE_A_GRAPH = 16
"""Fewer tokens than this before the first position that matters are run with it, though they need no gradient."""


@dataclass(frozen=True)
class SaliencyRow:
    """One example: its tokens up to the probe's, and the positions at the ends of its edges."""

    tokens: list[int]
    keys: tuple[int, ...]
    queries: tuple[int, ...]
    first: int
    """The first position that needs a gradient."""


def rows_of(answered: AnsweredQuestions, probe: Probe, edges: Sequence[str]) -> list[SaliencyRow]:
    """Return the tokens to run for each example, and the ends of its edges."""
    rows, table = [], answered.table
    read, questions = probe_positions(answered, probe.token), answered.exact_question_tokens()
    for tokens, at, *ends in zip(table["tokens"], read, questions, table["exact_answer_tokens"], strict=True):
        keys, queries = (tuple(place for place in places if place <= at) for places in ends)
        first = min((at, *(keys if "all" in edges else queries)))
        rows.append(SaliencyRow(list(tokens[: at + 1]), keys, queries, first))
    return rows


def measure_batch(
    model: HookedModel,
    rows: Sequence[SaliencyRow],
    probe: Probe,
    start: KeysValues,
    shared: int,
    *,
    edges: Sequence[str],
    heads: Any,
    pairs: Any,
    layers: Sequence[int],
) -> dict[str, Tensor]:
    """Measure some rows; `start` contains the keys and values of the `shared` first tokens of all rows."""
    device = model.device
    earliest = min(row.first for row in rows)
    first = earliest if earliest - shared >= BEFORE_A_GRAPH else shared
    # Shorter rows are padded with token 0: no earlier position attends to it, and no gradient comes from it.
    batch = Batch.of([row.tokens for row in rows], pad=0)
    tokens, reads = to_device(batch.tokens, device), to_device(batch.lengths - 1, device)
    width = tokens.shape[1]
    before = keys_values(model, tokens[:, shared:first], start, probe.layer + 1)
    n_keys = max(1, *(len(row.keys) for row in rows))
    # A row with fewer keys than others gets some after all positions, which no query sees.
    keys = torch.tensor([[*row.keys, *[width] * (n_keys - len(row.keys))] for row in rows], device=device)
    queries = torch.arange(first, width, device=device)
    sees = (keys[:, None] <= queries[:, None]) & (queries <= reads[:, None])[:, :, None]
    asks = torch.tensor([[q in row.queries for q in range(first, width)] for row in rows], device=device)
    is_edge = {"exact_answer": sees & asks[:, :, None], "all": sees}
    keys = keys.clamp(max=width - 1)
    # As many rows as the graphs of all layers fit for: with more, the lower layers would run a second time.
    at_once = max(1, graphs_in_memory(model, width - first, width) // (probe.layer + 1 - min(layers)))
    parts = []

    def measure(part: range) -> None:
        chunk = slice(part.start, part.stop)
        descent = Descent(
            model,
            tokens[chunk, first:],
            {layer: (k[chunk], v[chunk]) if len(k) > 1 else (k, v) for layer, (k, v) in before.items()},
            (SITES[probe.site].hook_name(probe.layer), probe.layer),
            reads[chunk] - first,
            min(layers),
        )
        flows: dict[str, dict[int, Tensor]] = {name: {} for name in edges}
        for slopes in descent.slopes(probe.weight.clone().to(device, torch.float64)):
            if slopes.layer not in layers:
                continue
            pattern = torch.take_along_dim(slopes.pattern, keys[chunk, None, None], -1)
            values = torch.take_along_dim(slopes.values, keys[chunk, None, :, None], 2)
            flow = edge_saliency(pattern, slopes.gradient, values, heads).double()
            # A masked pair has weight 0 in every head, so this finds sliding windows without the config.
            visible = pattern.amax(1) > 0
            for name in edges:
                flows[name][slopes.layer] = over_pairs(flow, is_edge[name][chunk] & visible, pairs)
        stacked = {name: torch.stack([flow[i] for i in layers], 1).cpu() for name, flow in flows.items()}
        parts.append(stacked | {"logit": probe.logits(descent.states.cpu()).double()})

    in_tiles(range(len(rows)), at_once, measure)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


# Summary of a question set: medians, how many examples are near zero and why, one peak or several.


LossName: TypeAlias = Literal["cross_entropy", "logit"]
TARGETS = get_args(LossName)
EDGES = ("exact_answer", "all")
COLUMNS = tuple(f"saliency_{name}" for name in EDGES)
NEAR_ZERO = 0.1
"""An example is near zero if its saliency is less than this share of its set's mean."""


def near_zero(values: pd.Series) -> pd.Series:
    """Return which examples have less than a tenth of the mean."""
    return values < NEAR_ZERO * values.mean()


def _times(wrong: NDArray[np.float64], right: NDArray[np.float64]) -> list[float] | None:
    """Return the median of wrong answers divided by the median of right ones, with its 95 % interval over examples."""
    if min(len(wrong), len(right)) < 2 or not np.median(right):
        return None
    rng = np.random.default_rng(0)
    top, bottom = (
        np.median(values[rng.integers(len(values), size=(DRAWS, len(values)))], 1) for values in (wrong, right)
    )
    # A resampled median of 0 has no ratio, and would make the interval infinite.
    drawn = top[bottom > 0] / bottom[bottom > 0]
    ends = np.quantile(drawn, [0.025, 0.975]) if len(drawn) else (0.0, np.inf)
    return [float(np.median(wrong) / np.median(right)), *map(float, ends)]


def _percent(near: pd.Series) -> str:
    low, high = (100 * float(end) for end in wilson_interval(near.sum(), len(near)))
    return f"{near.mean():.1%} ({low:.0f} to {high:.0f})"
