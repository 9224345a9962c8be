"""What it takes to measure every published number again: a command per model, its data, its hardware, its numbers.

1. A line per analysis and published model: the command, the files that it wants, GPUs and memory, hours.
2. Hardware is computed, not measured (`hardware`): float32 weights for head maps that run the model, bf16 elsewhere.
   Counted are loading, forwards, generation, and of head maps the products of every head with the vocabulary; fits on
   the processor and waiting are not.
3. What the command cannot measure, or not as published (`limits`): whoever reads a difference must know it.
4. The published numbers of a line, beside what a finished run of the command measured, where its folder is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from headwater.errors import RunFolderError
from headwater.options import checked_path
from headwater.reference.hardware import GIB, SIZES, MambaSizes, Sizes
from headwater.reference.maps import IN_SENTENCES, LONGER, REMOVALS
from headwater.reference.membership import BEST, JOINED, QUANTITIES
from headwater.reference.published import NUMBERS, Reproduction, compared, published_numbers

RUNS = "runs"
SOURCES, SENTENCES, LONGER_SOURCES, ABLATED_ITEMS, ABLATIONS, TASK_TOKENS = 3177, 4, 2800, 1300, 60, 24
"""Of head maps: distinct words of the published relations; sentences per word; sources of several tokens, at
most; items of the ablated relations, how often each is run, and tokens of its prompt."""
SETS, QUESTIONS, PROMPT, NEW, READ, READS, ANSWER_BATCH = 4, 4000, 24, 32, 48, 24, 64
"""Of detection: sets; questions of each; tokens of a prompt, new ones, and of both as they are read; how often an
answer is read (`tools/scaling.py reads`); prompts at a time."""
DEPTH_QUESTIONS, DEPTH_TOKENS, DEPTH_NEW, DEPTH_BATCH = 1571, 345_000, 1024, 16
"""Of question depth: different questions; tokens of questions and accepted answers; new tokens at most; prompts at a
time."""
TEXTS, TEXT_TOKENS, MIMIR_TEXTS, MIMIR_TOKENS = 776, 48, 14_000, 300
"""Of membership, read as they are and in lower case: texts of WikiMIA and their tokens (put together, assumed
to be as many); of MIMIR, assumed."""


NO_NUMBERS = "the publication lists this model; none of its numbers are held here"
LIMITS = {
    "maps": (
        "correlations and ablations ask in headwater's own words; --templates FILE takes the published sentences",
        "descriptions of heads by GPT-4o, people's judgement of them and the list of heads known before are not here",
    ),
    "pathways": (
        "prompt, label rule and draw of 2,000 + 2,000 questions are not stated in full; rules name the exact words in "
        "place of GPT-4o",
    ),
    "depth": ("answers are greedy; published ones were sampled at temperature 1 and judged by GPT-4 (--judge)",),
    "membership": (
        "neighbor: needs texts that another model perturbed, and stays empty",
        "reference: needs --reference MODEL (published: Pythia-70M, LLaMA-7B)",
    ),
}
"""By analysis, what is so for every model."""
BEGUN = "texts begin with a beginning-of-sequence token, as TransformerLens has it for Mamba; published ones did not"


@dataclass(frozen=True)
class Line:
    """What measures the published numbers of one model again."""

    analysis: str
    """"maps", "pathways", "depth" or "membership"."""
    model: str
    command: str
    data: tuple[str, ...]
    """The files and folders that the command names, and what they are."""
    gpus: int
    """Of 80 GB, for one copy."""
    weights: float
    """GiB."""
    hours: float
    folder: str
    """Where the command leaves its run, below `runs`."""
    limits: tuple[str, ...]
    """What the command cannot measure, or not as it was published."""
    numbers: pd.DataFrame
    """`quantity, of, published, measured, low, high, difference`; the last four are NaN until a run is finished."""

    @property
    def is_measured(self) -> bool:
        """Whether a finished run was found."""
        return bool(self.numbers["measured"].notna().any())


def reproduction_plan(runs: str | Path = RUNS) -> tuple[Line, ...]:
    """Return what measures every published number again, a line per analysis and model.

    Args:
        runs: the folder below which the commands leave their runs; numbers of finished ones are read there.

    Raises:
        InputError: `runs` is no path.
    """
    below = checked_path("runs", runs)
    return tuple(line for kind in _LINES for line in _LINES[kind](below, kind))


def _line(
    runs: Path,
    kind: str,
    model: str,
    words: str,
    data: Mapping[str, str],
    cost: _Cost,
    limits: Sequence[str],
    part: str = "",
) -> Line:
    folder = runs / "-".join(filter(None, (kind, model.rpartition("/")[2], part)))
    spread = " --device auto" if cost.gpus > 1 else ""
    command = f"headwater reproduce {kind} {model} {words}{spread} --out {folder}"
    listed = tuple(f"{name}: {what}" for name, what in data.items())
    numbers = _with_measured(published_rows(kind, model, part), folder)
    known = (*limits, *([] if len(numbers) else [NO_NUMBERS]))
    return Line(kind, model, command, listed, cost.gpus, cost.weights, cost.hours, str(folder), known, numbers)


@dataclass(frozen=True)
class _Cost:
    gpus: int
    weights: float
    hours: float

    @classmethod
    def of(cls, sizes: Sizes, seconds: float, bytes_each: int = 2) -> _Cost:
        held = bytes_each * sizes.parameters
        return cls(sizes.gpus(bytes_each), held / GIB, (sizes.load_seconds() + seconds) / 3600)


def _maps(runs: Path, kind: str) -> Iterator[Line]:
    data = {"MAPS/datasets": "the published relations, a folder of NAME/NAME.json (github.com/amitelhelo/MAPS)"}
    for model, numbers in published_numbers(kind).models.items():
        sizes = SIZES[model]
        ablated, longer = (
            any(part in one for one in numbers["relations"].values()) for part in ("ablation", "multi_token")
        )
        rows = SOURCES + 2 * SOURCES * SENTENCES + 2 * longer * LONGER_SOURCES
        tokens = (
            SOURCES * SENTENCES + longer * LONGER_SOURCES
        ) * 10 + ablated * ABLATED_ITEMS * ABLATIONS * TASK_TOKENS
        seconds = sizes.map_seconds(rows) + sizes.forward_seconds(tokens)
        words = f"--datasets MAPS/datasets{' --ablations' * ablated}{' --multi-token' * longer}"
        yield _line(runs, kind, model, words, data, _Cost.of(sizes, seconds, bytes_each=4), LIMITS[kind])


def _pathways(runs: Path, kind: str) -> Iterator[Line]:
    files = {
        "popqa.tsv": "PopQA (Mallen et al. 2023)",
        "triviaqa.json": "TriviaQA, unfiltered or RC",
        "hotpotqa.json": "HotpotQA, dev",
        "nq_open.jsonl": "NQ-open",
    }
    words = " ".join(f"--questions {name}" for name in files) + " --extract rules --dtype bfloat16"
    for model in published_numbers(kind).models:
        sizes, examples = SIZES[model], SETS * QUESTIONS
        seconds = sizes.forward_seconds(examples * (PROMPT + READS * READ))
        seconds += sizes.generation_seconds(math.ceil(examples / ANSWER_BATCH) * NEW)
        yield _line(runs, kind, model, words, files, _Cost.of(sizes, seconds), LIMITS[kind])


def _depth(runs: Path, kind: str) -> Iterator[Line]:
    data = {"depthqa": "questions, nodes and node_to_q of kaist-ai/DepthQA; answers with their scores where there are"}
    for model in published_numbers(kind).models:
        sizes = SIZES[model]
        steps = math.ceil(DEPTH_QUESTIONS / DEPTH_BATCH) * DEPTH_NEW
        seconds = sizes.generation_seconds(steps) + sizes.forward_seconds(DEPTH_TOKENS)
        yield _line(runs, kind, model, "--data depthqa --dtype bfloat16", data, _Cost.of(sizes, seconds), LIMITS[kind])


def _membership(runs: Path, kind: str) -> Iterator[Line]:
    of_mimir = "arxiv dm_mathematics github hackernews pile_cc pubmed_central wikipedia"
    files = {
        "wikimia_32": {"WikiMIA_length32.jsonl": "WikiMIA, 32 words: input, label"},
        "wikimia_32_paraphrased": {"WikiMIA_length32_paraphrased.jsonl": "the same, paraphrased: input, label"},
        JOINED: {"WikiMIA_concat.jsonl": "WikiMIA put together (zjysteven/WikiMIA_concat): input, labels of 32 words"},
        "mimir": {f"mimir/{one}.jsonl": "MIMIR, ngram_13_0.8, rows of text and member" for one in of_mimir.split()},
    }
    for model, numbers in published_numbers(kind).models.items():
        sizes = SIZES[model]
        for benchmark in (one for one in files if one in numbers):
            texts = MIMIR_TEXTS * MIMIR_TOKENS if benchmark == "mimir" else TEXTS * TEXT_TOKENS
            named = " ".join(f"--texts {name}" for name in files[benchmark])
            words = f"{named} --benchmark {benchmark} --dtype float32"
            cost = _Cost.of(sizes, sizes.forward_seconds(2 * texts), bytes_each=4)
            limits = (*LIMITS[kind], *([BEGUN] if isinstance(sizes, MambaSizes) else []))
            yield _line(runs, kind, model, words, files[benchmark], cost, limits, benchmark)


_LINES: dict[str, Callable[[Path, str], Iterator[Line]]] = {
    "maps": _maps,
    "pathways": _pathways,
    "depth": _depth,
    "membership": _membership,
}


def published_rows(kind: str, model: str, benchmark: str = "") -> pd.DataFrame:
    """Return the published numbers of a model, named as its reproduction names them: `quantity, of, published`."""
    numbers = published_numbers(kind).models[model]
    rows = list(_ROWS[kind](numbers.get(benchmark, {}) if benchmark else numbers, benchmark))
    return pd.DataFrame(rows, columns=["quantity", "of", "published"])


def _rows_of_maps(numbers: Mapping[str, Any], _: str) -> Iterator[tuple[str, str, float]]:
    for relation, one in numbers["relations"].items():
        if "pairs" in one:
            yield "surviving pairs", relation, one["pairs"]
        yield "best score", relation, one["score"]
        yield "best suppression", relation, one["suppression"]
        if one.get("ranked_heads"):
            yield "heads in their published place", relation, len(one["ranked_heads"].split())
        for key, quantity in (IN_SENTENCES, LONGER):
            yield from ((f"{quantity}, {name}", relation, value) for name, value in one.get(key, {}).items())
        for quantity, (_, key) in REMOVALS.items():
            if key in one.get("ablation", {}):
                yield quantity, relation, one["ablation"][key]


def _rows_of_pathways(numbers: Mapping[str, Any], _: str) -> Iterator[tuple[str, str, float]]:
    for method, by_set in numbers.get("detection", {}).items():
        for dataset, value in by_set.items():
            yield "AUC of wrong answers", f"{dataset}, {method}", value
    for dataset, value in numbers.get("mode", {}).items():
        yield "AUC of the mode", f"{dataset}, gate", value


def _rows_of_depth(numbers: Mapping[str, Any], _: str) -> Iterator[tuple[str, str, float]]:
    for key, quantity in (("accuracy", "accuracy"), ("forward", "forward discrepancy")):
        yield from ((quantity, depth, value) for depth, value in numbers.get(key, {}).items())
    yield from (("backward discrepancy", depth, value) for depth, value in numbers.get("backward", {}).items())


def _rows_of_membership(numbers: Mapping[str, Any], benchmark: str) -> Iterator[tuple[str, str, float]]:
    for measure, quantity in QUANTITIES.items():
        for score, value in numbers.get(measure, {}).items():
            named = score + BEST if score in ("min_k", "min_k++") else score
            yield quantity, f"{benchmark}, {named}", value


_ROWS: dict[str, Callable[[Mapping[str, Any], str], Iterator[tuple[str, str, float]]]] = {
    "maps": _rows_of_maps,
    "pathways": _rows_of_pathways,
    "depth": _rows_of_depth,
    "membership": _rows_of_membership,
}


def _with_measured(rows: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """Put what a finished run measured beside the published numbers."""
    try:
        found = Reproduction.load(folder).table
    except RunFolderError:
        return compared(rows.assign(measured=math.nan))
    named = [name for name in found if name not in ("quantity", *NUMBERS)]
    found = found.assign(of=[", ".join(map(str, one)) for one in found[named].itertuples(index=False)])
    measured = found[["quantity", "of", "measured", "low", "high"]]
    return compared(rows.merge(measured, on=["quantity", "of"], how="left", validate="one_to_one"))
