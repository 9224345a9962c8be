"""What measures every published number again: a command per model, its data, the size of its weights, its numbers.

What the command cannot measure, or not as published (`limits`), stands beside: whoever reads a difference must know it.
So do the numbers that a finished run of the command measured, where its folder is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from headwater.calls import checked_call
from headwater.errors import RunFolderError
from headwater.options import checked_path
from headwater.reference.maps import IN_SENTENCES, LONGER, REMOVALS
from headwater.reference.membership import BEST, JOINED, QUANTITIES
from headwater.reference.published import NUMBERS, Reproduction, compared, published_numbers

RUNS = "runs"
BILLIONS = {
    "gpt2-xl": 1.55, "microsoft/phi-2": 2.78, "state-spaces/mamba-1.4b-hf": 1.37,
    "EleutherAI/pythia-160m": 0.16, "EleutherAI/pythia-1.4b": 1.41, "EleutherAI/pythia-2.8b": 2.77,
    "EleutherAI/pythia-6.9b": 6.86, "EleutherAI/pythia-12b": 11.84,
    "huggyllama/llama-13b": 13.02, "huggyllama/llama-30b": 32.53, "huggyllama/llama-65b": 65.28,
    "meta-llama/Llama-2-7b-chat-hf": 6.74, "meta-llama/Llama-2-13b-chat-hf": 13.02,
    "meta-llama/Llama-2-70b-chat-hf": 68.98, "meta-llama/Llama-3.2-1B": 1.24,
    "meta-llama/Llama-3.2-3B": 3.21, "meta-llama/Llama-3.2-3B-Instruct": 3.21,
    "meta-llama/Meta-Llama-3-8B": 8.03, "meta-llama/Meta-Llama-3-8B-Instruct": 8.03,
    "meta-llama/Meta-Llama-3-70B": 70.55, "meta-llama/Meta-Llama-3-70B-Instruct": 70.55,
    "meta-llama/Meta-Llama-3.1-8B": 8.03, "meta-llama/Meta-Llama-3.1-70B": 70.55,
    "mistralai/Mistral-7B-v0.1": 7.24, "mistralai/Mistral-7B-Instruct-v0.1": 7.24,
    "mistralai/Mistral-7B-v0.3": 7.25, "mistralai/Mistral-7B-Instruct-v0.3": 7.25,
    "Qwen/Qwen3-8B": 8.19, "Qwen/Qwen3-32B": 32.76,
}  # fmt: skip
"""Parameters of every published model, by its name on the hub."""
ONE_GPU = 70
"""GiB that weights may take of a GPU of 80 GB."""
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
    weights: float
    """GiB, in the dtype that the command names: float32 for head maps and membership, otherwise bfloat16."""
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


@checked_call
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
    limits: Sequence[str],
    part: str = "",
) -> Line:
    folder = runs / "-".join(filter(None, (kind, model.rpartition("/")[2], part)))
    weights = BILLIONS[model] * 1e9 * (4 if kind in ("maps", "membership") else 2) / 2**30
    spread = " --device auto" if weights > ONE_GPU else ""
    command = f"headwater reproduce {kind} {model} {words}{spread} --out {folder}"
    listed = tuple(f"{name}: {what}" for name, what in data.items())
    numbers = _with_measured(published_rows(kind, model, part), folder)
    known = (*limits, *([] if len(numbers) else [NO_NUMBERS]))
    return Line(kind, model, command, listed, weights, str(folder), known, numbers)


def _maps(runs: Path, kind: str) -> Iterator[Line]:
    data = {"MAPS/datasets": "the published relations, a folder of NAME/NAME.json (github.com/amitelhelo/MAPS)"}
    for model, numbers in published_numbers(kind).models.items():
        relations = numbers["relations"].values()
        ablated, longer = (any(part in one for one in relations) for part in ("ablation", "multi_token"))
        words = f"--datasets MAPS/datasets{' --ablations' * ablated}{' --multi-token' * longer}"
        yield _line(runs, kind, model, words, data, LIMITS[kind])


def _pathways(runs: Path, kind: str) -> Iterator[Line]:
    files = {
        "popqa.tsv": "PopQA (Mallen et al. 2023)",
        "triviaqa.json": "TriviaQA, unfiltered or RC",
        "hotpotqa.json": "HotpotQA, dev",
        "nq_open.jsonl": "NQ-open",
    }
    words = " ".join(f"--questions {name}" for name in files) + " --extract rules --dtype bfloat16"
    for model in published_numbers(kind).models:
        yield _line(runs, kind, model, words, files, LIMITS[kind])


def _depth(runs: Path, kind: str) -> Iterator[Line]:
    data = {"depthqa": "questions, nodes and node_to_q of kaist-ai/DepthQA; answers with their scores where there are"}
    for model in published_numbers(kind).models:
        yield _line(runs, kind, model, "--data depthqa --dtype bfloat16", data, LIMITS[kind])


def _membership(runs: Path, kind: str) -> Iterator[Line]:
    of_mimir = "arxiv dm_mathematics github hackernews pile_cc pubmed_central wikipedia"
    files = {
        "wikimia_32": {"WikiMIA_length32.jsonl": "WikiMIA, 32 words: input, label"},
        "wikimia_32_paraphrased": {"WikiMIA_length32_paraphrased.jsonl": "the same, paraphrased: input, label"},
        JOINED: {"WikiMIA_concat.jsonl": "WikiMIA put together (zjysteven/WikiMIA_concat): input, labels of 32 words"},
        "mimir": {f"mimir/{one}.jsonl": "MIMIR, ngram_13_0.8, rows of text and member" for one in of_mimir.split()},
    }
    for model, numbers in published_numbers(kind).models.items():
        for benchmark in (one for one in files if one in numbers):
            named = " ".join(f"--texts {name}" for name in files[benchmark])
            words = f"{named} --benchmark {benchmark} --dtype float32"
            limits = (*LIMITS[kind], *([BEGUN] if "mamba" in model else []))
            yield _line(runs, kind, model, words, files[benchmark], limits, benchmark)


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
