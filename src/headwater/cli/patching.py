"""The commands `headwater patch`, `headwater knockout`, `headwater edges` and `headwater circuit`."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from cyclopts import Parameter

import headwater as hw
from headwater.cli.options import (
    ANY_TEXT,
    Direction,
    Load,
    MetricOptions,
    Model,
    PairOptions,
    RunOptions,
    Variant,
    changed,
    documented_by,
    is_main,
    position,
)
from headwater.errors import InputError

Axis = Literal["layer", "position", "head", "key", "feature"]
SHOWN, SIZE = 10, 20


@documented_by("circuits/edge_effects:edges")
@Parameter(name="*")
@dataclass(frozen=True)
class Measuring:
    """How to measure the effects of edges."""

    method: Literal["exact", "screened", "sublayer", "eap", "eap-ig"] | None = None
    verify: int = 500


@documented_by("circuits/search:find_circuit")
@Parameter(name="*")
@dataclass(frozen=True)
class Search:
    """Options of a search for a circuit.

    Args:
        threshold: Search for the circuit: remove edges one by one, in the order of ACDC, if this changes the metric's
            mean over pairs by less than the threshold. Default: none.
    """

    threshold: float | None = None
    budget: int | None = None
    placebos: int = 10


@documented_by("patching/activation_patching:patch")
def patch(
    model: Model = None,
    *,
    pairs: PairOptions = PairOptions(),
    measured: MetricOptions = MetricOptions(),
    sites: tuple[str, ...] = ("resid_pre",),
    over: list[Axis] | None = None,
    direction: Direction = "denoise",
    values: str = "other run",
    layers: Annotated[list[str] | None, ANY_TEXT] = None,
    positions: Annotated[list[str] | None, ANY_TEXT] = None,
    heads: list[str] | None = None,
    window: str | None = None,
    method: Literal["exact", "attribution"] = "exact",
    load: Load = Load(),
    run: RunOptions = RunOptions(),
) -> None:
    """Sweep patches over layers, positions and heads.

    The activations of one run replace those of another, cell by cell.

    **Examples**

    - `headwater patch gpt2 --clean "The capital of France is" --corrupted "The capital of Italy is"
      --tokens " Paris" " Rome" --sites resid_pre`
    - `headwater patch gpt2 --pairs pairs.csv --metric kl-divergence --sites z --out runs/patch`

    Args:
        sites: One or more of resid_pre, resid_mid, resid_post, attn_out, mlp_post, mlp_out, z, q, k, v, pattern.
        values: The replacement: other run; zero; mean, over the prompts; or resample, from another prompt.
        layers: Only these layers, or with --window the layers that it is around: --layers 9, or --layers 18-25; repeat
            for several. Default: all.
        positions: Only these positions: last, an index, or words of the prompt; repeat for several. With words, each is
            a role of its own, and the prompts may differ in length. Default: all.
        heads: Only these heads, by number or, of one layer, by name: --heads 3 --heads 7, or --heads 9.3. Default: all.
        window: Number of layers around each to patch at once, such as 3, or "cumulative". Default: one.
    """
    from headwater.models.sites import sites_called
    from headwater.patching.replacements import replacement_spec

    prompts, metric, size = pairs.prompts, measured.read(pairs.pairs), _window(window)
    sites_called(list(sites))  # raises on unknown names before a model is loaded
    replacement_spec(values)
    sweep = hw.patch(
        load.model(model), prompts, pairs.corrupted, sites=cast(Any, list(sites)), metric=metric, over=over,
        direction=direction, values=cast(Any, values), layers=_numbers("--layers", layers),
        heads=heads and [position(one) for one in heads], positions=_positions(positions), window=size, method=method,
        **run.kept(),
    )  # fmt: skip
    _report(sweep, run)


@documented_by("patching/edge_knockout:knockout")
def knockout(
    model: Model = None,
    *,
    prompt: Annotated[list[str] | None, ANY_TEXT] = None,
    query: Annotated[str, ANY_TEXT] = "last",
    key: Annotated[str | None, ANY_TEXT] = None,
    heads: list[str] | None = None,
    measured: MetricOptions = MetricOptions(),
    window: str | None = None,
    variant: Variant = "mask",
    over: list[Axis] | None = None,
    load: Load = Load(),
    run: RunOptions = RunOptions(),
) -> None:
    """Sweep attention knockouts over layers (and heads).

    The keys that must not be read are named by their words; the effect on the answer shows how much it depends on them.

    **Example**

    `headwater knockout gpt2 --prompt "The capital of France is" --key France --query last --window 9
    --tokens " Paris" " Rome"`

    Args:
        prompt: The prompt; repeat for several. Needed.
        query: Positions that must not read the keys: last, after, all, an index, or words of the prompt.
        key: Positions not to read: an index, first, or words of the prompt; " John#2" is the second one. Needed.
        heads: Only these heads, by number or, of one layer, by name: --heads 3 --heads 7, or --heads 9.3. Default: all.
        window: Sever in this many layers around each layer, or "cumulative", in every layer up to each. Default: one.
        over: layer, head, or both. Default: layer.
    """
    if not prompt or key is None:
        raise InputError("Pass at least one --prompt, and --key with the positions that must not be read.")
    metric, layers = measured.read(), _window(window)
    block = hw.Edges(position(query), position(key), heads and [position(one) for one in heads])
    sweep = hw.knockout(
        load.model(model), prompt, block=block, metric=metric, window=layers, variant=variant, over=over,
        **run.kept(),
    )  # fmt: skip
    _report(sweep, run)


@documented_by("circuits/edge_effects:edges")
def edges(
    model: Model = None,
    *,
    pairs: PairOptions = PairOptions(),
    measured: MetricOptions = MetricOptions(),
    senders: list[str] | None = None,
    receivers: list[str] | None = None,
    direction: Direction = "noise",
    over: Literal["position"] | None = None,
    through: Literal["direct", "mlps"] = "direct",
    measuring: Measuring = Measuring(),
    seed: int = 0,
    load: Load = Load(),
    run: RunOptions = RunOptions(),
) -> None:
    """Measure the effect of each edge on an answer: from each sender to each receiver after it.

    In one receiver's input, replace one sender's output with its output in the other run; rerun everything after it.

    **Examples**

    - `headwater edges --clean "The capital of France is" --corrupted "The capital of Italy is"
      --tokens " Paris" " Rome"`
    - `headwater edges gpt2 --pairs pairs.csv --metric kl-divergence --out runs/edges`
    """
    from headwater.runs.result import whole_summary

    prompts, metric = pairs.prompts, measured.read(pairs.pairs)
    result = hw.edges(
        load.model(model), prompts, pairs.corrupted, metric=metric, senders=senders, receivers=receivers,
        direction=direction, over=over, through=through, seed=seed, **run.kept(), **vars(measuring),
    )  # fmt: skip
    files = run.write(result, "edges")
    if run.out is not None:
        whole_summary(result).to_csv(run.out / "summary.csv", index=False, lineterminator="\n")
        files.append(str(run.out / "summary.csv"))
    strongest = result.top(SHOWN)
    strongest["effect"] = strongest["effect"].fillna(strongest["estimate"])
    run.finish(result, files, strongest=strongest[["edge", "effect"]])


@documented_by("circuits/search:find_circuit")
def circuit(
    model: Model = None,
    *,
    pairs: PairOptions = PairOptions(),
    measured: MetricOptions = MetricOptions(),
    size: int | None = None,
    by: Literal["size", "signed"] = "size",
    measuring: Measuring = Measuring(),
    search: Search = Search(),
    seed: int = 0,
    load: Load = Load(),
    run: RunOptions = RunOptions(),
) -> None:
    """Choose the circuit of the strongest edges on pairs of prompts, draw it by layers, and save it as one file.

    With --threshold, the circuit is the result of a greedy search by exact effects among all edges; --budget limits it.

    **Examples**

    - `headwater circuit --clean "The capital of France is" --corrupted "The capital of Italy is"
      --tokens " Paris" " Rome" --size 20 --out runs/circuit`
    - `headwater circuit gpt2 --pairs pairs.csv --tokens " Paris" " Rome" --threshold 0.1 --budget 2000`

    Args:
        size: Number of edges of the circuit. Default: 20.
        by: The largest effects, or those that most favour the clean prompt's answer.
        seed: Seed of the random draws of `screened` and of the search.
    """
    if search.threshold is not None:
        useless = changed(measuring) + ["--size"] * (size is not None)
        reason = "a search runs every edge exactly, and its threshold decides how many remain. Leave out --threshold"
    else:
        useless, reason = changed(search), "only a search uses them. Pass --threshold"
    if useless:
        raise InputError(f"{', '.join(useless)} cannot be used here: {reason}, or leave these out.")
    prompts, metric = pairs.prompts, measured.read(pairs.pairs)
    result: Any
    if search.threshold is not None:
        result = hw.find_circuit(
            load.model(model), prompts, pairs.corrupted, metric=metric, by=by, seed=seed, **run.kept(),
            **vars(search),
        )  # fmt: skip
        files, chosen, sentences = run.write(result, "search"), result.circuit, list[str]()
    else:
        result = hw.edges(
            load.model(model), prompts, pairs.corrupted, metric=metric, seed=seed, **run.kept(),
            **vars(measuring),
        )  # fmt: skip
        files, chosen = [], result.circuit(SIZE if size is None else size, by=by)
        sentences = [
            f"Circuit of {len(chosen):,} of {result.graph.n_edges:,} edges, {len(chosen.on_a_path):,} on a path from "
            "the embedding to the logits.",
            "It was selected on these prompts: test it on others.",
        ]
    if run.out is not None and is_main():
        from headwater.figures.files import write_figure

        files += [str(chosen.save(run.out / "circuit.parquet")), *write_figure(chosen.plot(), run.out / "circuit")]
    strongest = chosen.table.dropna(subset=["effect"]).sort_values("effect", key=abs, ascending=False)
    run.finish(result, files, *sentences, strongest=strongest[["edge", "effect"]].head(SHOWN))


def _numbers(option: str, texts: list[str] | None) -> list[int] | None:
    """Return whole numbers, each of them or from one to another: 18-25."""
    numbers: list[int] = []
    for text in texts or ():
        found = re.fullmatch(r"(-?\d+)(?:-(\d+))?", text)
        if found is None:
            raise InputError(f"{option} {text} is neither a number nor two numbers such as 18-25.")
        numbers += range(int(found[1]), int(found[2] or found[1]) + 1)
    return numbers if texts else None


def _positions(texts: list[str] | None) -> Any:
    """Return the positions of a sweep: one place, several numbers, or several places, each a role."""
    places = [position(text) for text in texts or ["all"]]
    if len(places) == 1:
        return places[0]
    return set(places) if all(isinstance(one, int) for one in places) else dict(zip(texts or (), places, strict=True))


def _window(text: str | None) -> Any:
    """Parse a window, before a model is loaded."""
    from headwater.patching.activation_patching import windows_of
    from headwater.patching.edits import AXES

    window = int(text) if text is not None and text.isdigit() else text
    windows_of(window, AXES)
    return window


def _report(sweep: hw.Sweep, run: RunOptions) -> None:
    """Write a sweep, and print its report and its strongest cells."""
    from headwater.runs.result import whole_summary

    with warnings.catch_warnings(action="ignore"):  # the findings are printed with the same warnings
        summary = whole_summary(sweep)
    sizes = summary["mean"].abs().sort_values(ascending=False)
    strongest = summary.loc[sizes[sizes > 0].index].head(SHOWN)
    run.finish(sweep, run.write(sweep, "sweep"), strongest=strongest)
