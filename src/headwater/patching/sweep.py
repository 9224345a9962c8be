"""Patching sweeps: replace an activation, run on, see what becomes of a metric.

Activation patching (Vig et al. 2020; Meng et al. 2022; Heimersheim and Nanda 2024): of a clean and a corrupted prompt
that align token by token, one run's activation at a site is written into the other's.

    denoise   clean activations into the corrupted run: what suffices to bring the answer back
    noise     corrupted activations into the clean run: what is needed to keep it

    effect            = metric of the edited run - metric of the run that was edited
    normalized_effect = effect / (metric of the other run - metric of the run that was edited)

so that 0 is no effect and 1 is all the way to the other run. Values may also be zero, a mean over prompts (ablation),
or another prompt's (resampling).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headwater.errors import InputError
from headwater.models.hooked import HookedModel, check_model
from headwater.models.positions import Prompt, Where
from headwater.models.sites import Site, sites_named
from headwater.options import checked_count, checked_kind, checked_name, checked_seed, shown
from headwater.patching.averages import (
    chosen_rows,
    grid_axes,
    grid_of,
    measure_of,
    note_of_gaps,
    note_of_lengths,
    strongest,
    summarize,
)
from headwater.patching.cells import (
    AXES,
    SPANS,
    Asked,
    Window,
    cells_of,
    chosen,
    covered,
    lasting,
    matched_positions,
)
from headwater.patching.claims import MATCH, Drawing, Swept, claim_on
from headwater.patching.footprint import refuse_too_many_cells, refuse_whole_dictionaries
from headwater.patching.measure import measure
from headwater.patching.metrics import Metric, as_metrics
from headwater.patching.plan import Cell, Plan
from headwater.patching.prompts import Prompts, Spot, read_pairs
from headwater.patching.readout import Measured
from headwater.patching.runners import Gradients, Wave
from headwater.patching.values import Recipe, asked_source, recorded
from headwater.runs.analysis import Run, carry_out
from headwater.runs.record import RunRecord
from headwater.runs.result import Result
from headwater.stats.claims import Claim

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIRECTIONS = ("denoise", "noise")
METHODS = ("exact", "attribution")
COORDINATES = (
    *("site", "layer", "position", "role", "token", "head", "kv_head", "key", "feature"),
    *("window", "set", "from_layer", "values", "sample", "metric"),
)
"""The columns that name a cell, as far as a sweep has them."""
NOT_AXES = ("token", "window", "values")
"""Those of them that say more of a cell, and that no grid runs over."""


@dataclass(frozen=True, repr=False)
class Sweep(Result):
    """What a patching or knockout sweep found."""

    table: pd.DataFrame
    """A row per example, cell and metric: `example, site, layer, position, role, token, head, kv_head, key, feature,
    window, set, values, metric, effect, normalized_effect, clean, corrupted, edges`, those that apply. `role` is what
    positions were named as (`position` is `<NA>` where it is several tokens); `head` counts query heads, `kv_head` the
    key-value heads of the sites `k` and `v`; `values` says over what a mean was taken, `set` what was ablated
    together."""
    run: RunRecord
    tokens: Sequence[Sequence[str]] = ()
    """The tokens of each example's edited prompt."""
    engine: str = "wavefront"
    """How it was run: `wavefront`, `whole runs` or `gradients`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(tuple(strings) for strings in self.tokens))

    def summary(
        self, *, level: float = 0.95, value: str = "effect", normalize: str | None = None, seed: int = 0
    ) -> pd.DataFrame:
        """Summarize each cell over examples: mean, bootstrap interval, and sign-flip permutation p of a zero mean.

        Args:
            level: of the interval.
            value: the column summarized, `effect` or `normalized_effect`.
            normalize: how effects become shares of the gap between the two runs: `mean of ratios` is the mean of
                `normalized_effect`, in which a pair of hardly any gap counts beyond measure; `ratio of means` divides
                the mean effect by the mean gap. Its p is that of the mean effect.
            seed: of the bootstrap and the permutations.

        Returns:
            A row per cell and metric: its coordinates, `examples` (how many have this cell), `mean, low, high,
            p_value`, and `q_value`, adjusted for all cells of the metric (Benjamini and Hochberg): of the cells with
            q ≤ 0.05 about one in twenty is expected to be chance. Intervals are of each cell by itself, not adjusted.
            With n prompts p is at least 2 / 2ⁿ: five prompts can give no p below 0.06. Interval and p are NaN for one
            example. `attrs["notes"]` keeps what was warned of.

        Raises:
            InputError: there is no such column or way to normalize.

        Warns:
            UserWarning: prompts of different length share the cells of a position; or pairs whose gap is a tenth of
                the others' stand in a mean of ratios.
        """
        measure = measure_of(self.table, value, normalize)
        notes = self.warn_of_averages(self.table, measure)
        summary = summarize(self.table, self.coordinates, measure, level, seed)
        summary.attrs["notes"] = notes
        return summary

    def grid(
        self,
        rows: str | None = None,
        columns: str | None = None,
        *,
        value: str = "effect",
        normalize: str | None = None,
        **fixed: Any,
    ) -> pd.DataFrame:
        """Lay the means over examples out as a grid, such as layers by heads or layers by roles.

        Args:
            rows: the axis that runs down; default: the first that the sweep runs over.
            columns: the axis that runs across; default: the second.
            value: `effect` or `normalized_effect`.
            normalize: see `summary`.
            **fixed: `site=`, `metric=`, `layer=`, `head=`, `role=`, ...: take these rows alone. Whatever else the sweep
                runs over must be fixed: nothing is averaged but examples.

        Returns:
            A frame indexed by `rows` with a column for each of `columns`; NaN where there is no such cell.
            `attrs["examples"]` is a frame of how many examples each mean is of, `attrs["notes"]` what was warned of.

        Raises:
            InputError: there is no such axis or value, or the sweep runs over another axis that is not fixed.
        """
        table = chosen_rows(self.table, fixed)
        measure = measure_of(table, value, normalize)
        down, across = grid_axes(table, [name for name in self.coordinates if name not in NOT_AXES], rows, columns)
        notes = self.warn_of_averages(table, measure)
        grid = grid_of(table, down, across, measure)
        felt = table.dropna(subset=["effect"]).groupby([down, across])["example"].nunique().unstack(across)
        grid.attrs["examples"] = felt.reindex_like(grid).fillna(0).astype(int)
        grid.attrs["notes"] = notes
        return grid

    def claim(
        self,
        cells: Any,
        *,
        metric: str | None = None,
        value: str = "effect",
        other: Sweep | None = None,
        held_out: Sweep | None = None,
        match: str = MATCH[0],
        placebos: int = 1000,
        margin: float | Any = None,
        level: float = 0.95,
        seed: int = 0,
    ) -> Claim:
        """Judge whether some cells matter, beside random ones, another ablation, halves, and held-out prompts.

        Args:
            cells: a mapping such as `{"layer": 3, "head": [1, 4]}` (all cells with these values), a list of such
                mappings, or rows of `summary()`. Their effect is the mean of the cells', each edited by itself.
            metric: of which metric, where there are several.
            value: `effect` or `normalized_effect`.
            other: the same sweep with another kind of values (zero, mean, resample).
            held_out: the same sweep on other prompts. Those that this sweep has too are left out, which the claim says.
            match: random sets have as many cells of each site and `layer`, or of each `site` in any layer. With fewer
                than 19 such sets no p can be 0.05, and the claim says so.
            placebos: how many random sets; all where there are no more.
            margin: how large an effect has to be to matter, in the units of `value`; default: the 95 % quantile of the
                random sets' sizes.
            level: of the interval.
            seed: of the random sets, the bootstrap and the halves.

        Returns:
            A `Claim`: `table` is one row `effect, low, high, placebo, placebo_high, p_value, other_ablation,
            split_half, held_out, margin, holds`; `sentence` says it. What holds, and what it takes for p to be one, is
            said in the first lines of `headwater.stats.claims`.

        Raises:
            InputError: there are no such cells or metric, another sweep has not the same, or nothing to compare with.
        """
        sweeps = {"other": other, "held_out": held_out}
        given = {o: checked_kind(o, one, Sweep, "hw.patch(...)") for o, one in sweeps.items() if one is not None}
        others = {o: Swept(one.table, one.coordinates, one.run) for o, one in given.items()}
        value = measure_of(self.table, value, None)
        drawing = Drawing(match, placebos, seed)
        here = Swept(self.table, self.coordinates, self.run)
        return claim_on(here, cells, metric, value, others, drawing, margin=margin, level=level)

    def report(self) -> list[str]:
        """Return the strongest cell of each site and metric, and what to mind about the means."""
        value = "normalized_effect" if "normalized_effect" in self.table else "effect"
        direction = str(self.run.options.get("direction", DIRECTIONS[0]))
        cells = summarize(self.table, self.coordinates, value, level=0.95, seed=0)
        parts = [part for _, part in cells.groupby(["site", "metric"], sort=False)]
        said = [sentence for part in parts for sentence in strongest(part, value, direction)]
        if self.engine == Gradients.name:
            said.append("These effects are linear estimates from gradients, not runs with the edit.")
        return said + self.notes_on_averages(self.table, value)

    def warn_of_averages(self, table: pd.DataFrame, measure: str) -> list[str]:
        """Warn of what makes the means over examples another thing than they seem, and return it."""
        notes = self.notes_on_averages(table, measure)
        for note in notes:
            warnings.warn(note, stacklevel=3)
        return notes

    def notes_on_averages(self, table: pd.DataFrame, measure: str) -> list[str]:
        """Say what makes the means over examples of some of the table's rows another thing than they seem."""
        lengths = [len(self.tokens[i]) for i in table["example"].unique()] if len(self.tokens) else []
        columns = [name for name in self.coordinates if name in table.columns and table[name].notna().any()]
        return [note for note in (note_of_lengths(lengths, columns), note_of_gaps(table, columns, measure)) if note]

    @property
    def coordinates(self) -> list[str]:
        """The columns that name a cell; its draws (`sample`) are averaged as its examples are."""
        named = [name for name in COORDINATES if name in self.table.columns and name != "sample"]
        if self.table["example"].nunique() == 1:
            return named
        own = ("token", "position") if "role" in named else ("token",)
        return [name for name in named if name not in own]

    def plot(
        self,
        ax: Axes | None = None,
        *,
        site: str | None = None,
        metric: str | None = None,
        value: str = "effect",
        normalize: str | None = None,
        **fixed: Any,
    ) -> Axes | Figure:
        """Draw layer × position or layer × head as a heat map centred at 0, or the curve over layers.

        Args:
            ax: where to draw; only for a single panel.
            site: draw this site alone; default: a panel for each.
            metric: draw this metric alone; default: a panel for each.
            value: `effect` or `normalized_effect`.
            normalize: see `summary`.
            **fixed: `layer=`, `position=`, `role=`, `head=`, `kv_head=` or `key=`: draw this one alone (needed where
                there are three axes; roles have a panel each).

        Raises:
            InputError: there is nothing of that name, or more than a figure can show.

        Warns:
            UserWarning: see `summary`.
        """
        return self._drawn(ax, site=site, metric=metric, value=value, normalize=normalize, **fixed)

    def agreement(self, exact: Sweep) -> pd.DataFrame:
        """Compare an approximate sweep with the exact one, cell by cell.

        Returns:
            A row per site and metric: `cells, pearson, spearman, sign_agreement`.

        Raises:
            InputError: the sweeps do not have the same cells.
        """
        from headwater.patching.averages import agreement

        return agreement(self.table, checked_kind("exact", exact, Sweep, "hw.patch(...)").table)


def patch(
    model: HookedModel,
    clean: Prompts | pd.DataFrame | Path,
    corrupted: Prompts | None = None,
    *,
    sites: str | Site | Iterable[str | Site],
    metric: Metric | Any,
    over: str | Iterable[str] | None = None,
    direction: str = "denoise",
    values: str | Recipe | Tensor | Callable[..., Any] = "other run",
    layers: Iterable[int] | int | None = None,
    positions: Where = "all",
    heads: Iterable[int] | int | None = None,
    spans: str = SPANS[0],
    window: Window = None,
    from_layer: Iterable[int] | int | None = None,
    dataset: Prompts | None = None,
    method: str = "exact",
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
    out: str | Path | None = None,
) -> Sweep:
    """Sweep patches over layers, positions and heads.

    Args:
        model: the model; it is left as it was.
        clean: one prompt, several, token ids, or a table of pairs with columns `clean` and `corrupted` (a data frame,
            or the path of a CSV or JSON Lines file).
        corrupted: the other prompt of each pair. May be absent when values come from elsewhere.
        sites: one or more of resid_pre, resid_mid, resid_post, attn_out, mlp_post, mlp_out, z, q, k, v, pattern, or
            features of a dictionary, as `hw.features` and `hw.load_sae` give them.
        metric: one or more of `hw.logit_difference(...)` and its relatives, or a function of the logits
            `row kept d_vocab` at the last position that gives a number per row.
        over: the axes to run over, of `layer`, `position`, `head`, for `pattern` `key`, and for a dictionary `feature`.
            Default: layer and head where a site has heads, layer and feature of a dictionary, layer and position
            otherwise. What is not run over is patched all at once.
        direction: `denoise` edits the corrupted run, `noise` the clean one.
        values: `other run`, `zero`, `mean` (over `dataset`: at each position where all prompts are of one length, else
            over all tokens but the first, as the column `values` says) or `resample` (another prompt of `dataset`);
            `hw.mean(prompts)`, `hw.resample(prompts)`; `hw.add(direction)`, `hw.scale(factor)`, `hw.noise(...)`; a
            tensor with the axes `d`, `head d_head`, `example (head) d` or `example position (head) d` of the site (one
            example may stand for all; of a pattern `example head query key`); or a function `(activation, other,
            place) -> activation` of rows, `row width`: what stands there, what the other run has there (None without
            one) and which rows they are (`place.layer`, `.example`, `.position`, `.head`, ...). It must treat each row
            by itself.
        layers: which take part.
        positions: which take part; query positions for `pattern`. A mapping names them by role, each prompt resolved by
            itself: `{"subject": [" France", " Italy"], "end": "last"}`. The sweep runs over roles, which stand in a
            column `role`, and prompts may be of any lengths, also the two of a pair. See `headwater.models.positions`.
        heads: which take part; key-value heads for `k` and `v`.
        spans: whether the tokens of a role are patched `together` (one cell) or `token by token`.
        window: patch this many layers around each at once, or `"cumulative"`; a mapping gives it by axis.
        from_layer: write what the other run has at this layer, whatever layer is written (Ghandeharioun et al. 2024);
            several are tried in turn, in the column `from_layer`. Default: the layer that is written.
        dataset: the prompts of `mean` and `resample`; default: the prompts that are edited.
        method: `exact`, or `attribution`: effect ≈ (value - activation) · gradient, from two forwards and one backward.
        seed: of `resample`.
        batch_size: rows given to a sublayer at once; by default as many as suit the device. Halved when memory runs
            out.
        progress: show a progress bar.
        out: a folder: finished cells are written as they come, an interrupted sweep goes on where it stopped.

    Raises:
        InputError: an option or prompt cannot be used; pairs that do not align are shown side by side.
        InterventionError: an edit did not take effect.
    """
    checked_name("direction", direction, DIRECTIONS)
    checked_name("method", method, METHODS)
    batch_size, seed = check_call(model, batch_size), checked_seed(seed)
    over, layers, heads, from_layer = lasting(over), lasting(layers), lasting(heads), lasting(from_layer)
    ask = Asked(over, layers, positions, heads, window, spans, from_layer)
    first, second = read_pairs(model, clean, corrupted, by_role=ask.by_role)
    base_is_clean = direction == "noise" or second is None
    base, other = (first, second) if base_is_clean or second is None else (second, first)
    named = sites_named(sites, model)
    if heads is not None and not any(site.has_heads for site in named):
        raise InputError(f"heads={shown(heads)} was given, but {', '.join(site.name for site in named)} has no heads.")
    metrics = as_metrics(metric)
    source = asked_source(model, values, dataset, base=base, other=other, sites=named, seed=seed)
    if from_layer is not None and not source.takes_other_run:
        kind = source.given.kind
        raise InputError(f"from_layer={shown(from_layer)} was given, but values={kind!r} come from no layer.")
    spots = ask.spots(base, other, 0 if base_is_clean else 1)
    matched = matched_by_example(spots, base, other, named)
    planned = [(i, site, ask.steps(model, site, base, spots[i], i)) for i in range(len(base)) for site in named]
    if method == "exact":
        refuse_whole_dictionaries([(site, steps) for _, site, steps in planned], model.shape)
    n_each = len(metrics) * (source.samples or 1) * len(ask.sources(model))
    refuse_too_many_cells(sum(math.prod(map(len, steps.values())) for _, _, steps in planned) * n_each)
    cells: list[Cell] = []
    for i, site, listed in planned:
        cells += cells_of(base[i], i, site, listed, ask.sizes(site), source, matched[i] is None, ask.sources(model))
    plan = Plan(
        model, base, other, base_is_clean, tuple(cells), metrics, source, batch_size=batch_size, matched=matched
    )
    options = {
        "sites": [site.described for site in named],
        "over": {site.name: ask.axes(site) for site in named},
        "window": {site.name: ask.sizes(site) for site in named},
        "layers": chosen(layers, model.shape.n_layers, "layer"),
        "positions": [covered(listed["position"], len(base[i])) for i, site, listed in planned if site == named[0]],
        "heads": {s.name: chosen(heads, s.n_heads(model.shape), "head") for s in named if s.has_heads},
        "direction": direction,
        "from_layer": ask.sources(model) if from_layer is not None else None,
        "values": recorded(source),
        "mean_over": source.mean_over,
        "method": method,
        **prompt_options(first, second, source.given.dataset),
        "metrics": metric_options(plan),
    } | ({"roles": recorded_roles(spots), "spans": spans} if ask.by_role else {})

    def work(run: Run) -> Sweep:
        return sweep_of(plan, measure(plan, run, Gradients if method == "attribution" else Wave), run)

    return carry_out(Sweep, "patch", model, options, work, out=out, seed=seed, progress=progress)


def matched_by_example(
    spots: Sequence[Mapping[str, Spot]],
    base: Sequence[Prompt],
    other: Sequence[Prompt] | None,
    sites: Iterable[Site],
) -> tuple[dict[int, int] | None, ...]:
    """Return by example which position of the other prompt each position is that may be edited (see `Plan.matched`).

    Raises:
        InputError: they differ, and a site holds keys, for all of which there would have to be a match.
    """
    others = other if other is not None else [None] * len(base)
    matched = tuple(matched_positions(*pair) for pair in zip(spots, base, others, strict=True))
    unlike = [i for i, one in enumerate(matched) if one is not None]
    keyed = [site.name for site in sites if site.has_keys]
    if unlike and keyed:
        raise InputError(
            f"The site {keyed[0]} holds every key of a prompt, and pair {unlike[0]} does not align token by token: "
            "give pairs that do."
        )
    return matched


def recorded_roles(spots: Sequence[Mapping[str, Spot]]) -> list[dict[str, list[list[int]]]]:
    """Write down by example and role the positions in both prompts."""
    return [{role: [list(spot.base), list(spot.other)] for role, spot in one.items()} for one in spots]


def check_call(model: Any, batch_size: Any) -> int | None:
    """Return the batch size; refuse one that is no number of rows, and what is no model of `hw.load`.

    Raises:
        InputError: one of these.
    """
    check_model(model)
    return None if batch_size is None else checked_count("batch_size", batch_size)


def sweep_of(plan: Plan, measured: Measured, run: Run) -> Sweep:
    """Make the result of what was measured."""
    return Sweep(tabulate(plan, measured), run.record, tuple(prompt.strings for prompt in plan.base), measured.engine)


def tabulate(plan: Plan, measured: Measured) -> pd.DataFrame:
    """Lay cells and metrics out as rows."""
    n_cells, n_metrics = measured.values.shape
    columns: dict[str, Any] = {"example": np.repeat([cell.example for cell in plan.cells], n_metrics)}
    for name in COORDINATES[:-1]:
        if any(name in cell.labels for cell in plan.cells):
            listed = [cell.labels.get(name) for cell in plan.cells for _ in range(n_metrics)]
            is_index = name in (*AXES, "kv_head", "from_layer", "sample")
            columns[name] = pd.array(listed, dtype="Int64" if None in listed else "int64") if is_index else listed
    columns["metric"] = [metric.name for metric in plan.metrics] * n_cells
    effect = measured.values - measured.unedited
    columns["effect"] = effect.flatten().numpy()
    if plan.other is not None:
        gap = measured.other - measured.unedited
        normalized = torch.where(gap.abs() > 1e-9, effect / gap + 0.0, torch.nan)
        columns["normalized_effect"] = normalized.flatten().numpy()
    clean, corrupted = (
        (measured.unedited, measured.other) if plan.base_is_clean else (measured.other, measured.unedited)
    )
    columns["clean"] = clean.flatten().numpy()
    if plan.other is not None:
        columns["corrupted"] = corrupted.flatten().numpy()
    if not bool(measured.edges.isnan().all()):
        columns["edges"] = np.repeat(measured.edges.numpy(), n_metrics).astype(np.int64)
    return pd.DataFrame(columns)


def prompt_options(*sets: Sequence[Prompt] | None) -> dict[str, Any]:
    """Name the prompts of a run by their token ids."""
    return {"prompts": [[list(prompt.ids) for prompt in prompts] if prompts is not None else None for prompts in sets]}


def metric_options(plan: Plan) -> list[dict[str, Any]]:
    """Describe the metrics of a sweep: what each computes with, and the positions and token ids that it came to."""
    return [
        {
            "name": metric.name,
            "function": metric.function,
            "site": metric.site,
            "layer": metric.layer,
            "against_clean": metric.against_clean,
            "at": [kept[number] for kept in plan.kept],
            "answers": [ids.tolist() for ids in plan.answers[number]],
        }
        for number, metric in enumerate(plan.metrics)
    ]
