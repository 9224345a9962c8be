"""The plan of a full reproduction: a command per model, its data, the size of its weights.

Also: what the commands of an analysis cannot measure, or not as published (`LIMITS`), which explains differences; and
how many numbers were published for a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.calls import checked_call
from headwater.options import checked_path
from headwater.reference.membership import JOINED
from headwater.reference.published import KINDS, published_numbers

RUNS = "runs"
ONE_GPU = 70
"""GiB that weights may take on a GPU of 80 GB."""
LIMITS = {
    "maps": (
        "correlations and ablations use headwater's own words; --templates FILE sets the published sentences",
        "GPT-4o's descriptions of heads, their human ratings and the list of previously known heads are not here",
    ),
    "pathways": (
        "prompt, label rule and draw of 2,000 + 2,000 questions are not stated in full; rules name the exact words in "
        "place of GPT-4o",
        "0 numbers: the publication lists the model, but its numbers are not in this package",
    ),
    "memorization": ("answers are greedy; published ones were sampled at temperature 1 and judged by GPT-4 (--judge)",),
    "membership": (
        "neighbor: needs texts that another model perturbed, and stays empty",
        "reference: needs --reference MODEL (published: Pythia-70M, LLaMA-7B)",
        "Mamba's texts begin with a beginning-of-sequence token, as TransformerLens has it; published ones did not",
    ),
}
"""By analysis: what it cannot measure, or not as published."""
MIMIR = tuple(
    f"mimir/{one}.jsonl"
    for one in ("arxiv", "dm_mathematics", "github", "hackernews", "pile_cc", "pubmed_central", "wikipedia")
)
TEXTS = {
    "wikimia_32": ("WikiMIA_length32.jsonl",),
    "wikimia_32_paraphrased": ("WikiMIA_length32_paraphrased.jsonl",),
    JOINED: ("WikiMIA_concat.jsonl",),
    "mimir": MIMIR,
}
"""By membership benchmark: its files."""
QUESTIONS = ("popqa.tsv", "triviaqa.json", "hotpotqa.json", "nq_open.jsonl")
DATA = {
    "MAPS/datasets": "the published relations, a folder of NAME/NAME.json (github.com/amitelhelo/MAPS)",
    "popqa.tsv": "PopQA (Mallen et al. 2023)",
    "triviaqa.json": "TriviaQA, unfiltered or RC",
    "hotpotqa.json": "HotpotQA, dev",
    "nq_open.jsonl": "NQ-open",
    "depthqa": "questions, nodes and node_to_q of kaist-ai/DepthQA; answers with scores if there are any",
    "WikiMIA_length32.jsonl": "WikiMIA, 32 words: input, label",
    "WikiMIA_length32_paraphrased.jsonl": "the same, paraphrased: input, label",
    "WikiMIA_concat.jsonl": "WikiMIA, concatenated (zjysteven/WikiMIA_concat): input, labels of 32 words",
    **dict.fromkeys(MIMIR, "MIMIR, ngram_13_0.8, rows of text and member"),
}
"""Descriptions of the files and folders that the commands name."""
FIGURES: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "maps": (("heads", "", ("gpt2-xl", "phi-2", "pythia-12b", "Meta-Llama-3.1-70B")),),
    "pathways": (
        ("pathways", "", ("Llama-3.2-1B", "Llama-3.2-3B")),
        ("saliency", " --set triviaqa", ("Meta-Llama-3-8B", "Meta-Llama-3-70B")),
    ),
    "memorization": ((
        "memorization", "",
        ("Llama-2-7b-chat-hf", "Llama-2-70b-chat-hf", "Meta-Llama-3-8B-Instruct", "Meta-Llama-3-70B-Instruct"),
    ),),
}  # fmt: skip
"""By analysis: the published figures that `headwater figure` draws from its runs, with options, for which models."""


@dataclass(frozen=True)
class PlanLine:
    """The command that measures the published numbers of one model again."""

    analysis: str
    """"maps", "pathways", "memorization" or "membership"."""
    model: str
    command: str
    data: tuple[str, ...]
    """The files and folders that the command names, described in `DATA`."""
    weights: float
    """GiB, in the dtype of the command: float32 for head maps and membership, otherwise bfloat16."""
    folder: str
    """Folder of the command's run, below `runs`."""
    published: int
    """Number of published numbers."""


@checked_call
def reproduction_plan(runs: str | Path = RUNS) -> tuple[PlanLine, ...]:
    """Return the commands that measure every published number again, a line per analysis, model and benchmark.

    Args:
        runs: the folder into which the commands write.

    Raises:
        InputError: `runs` is not a path.
    """
    below = checked_path("runs", runs)
    return tuple(
        _line(below, kind, model, numbers["billions"], *command)
        for kind in KINDS
        for model, numbers in published_numbers(kind).models.items()
        for command in _commands(kind, numbers)
    )


def figure_commands(kind: str, runs: str | Path = RUNS) -> list[str]:
    """Return the commands that draw the published figures of an analysis from its finished runs."""
    return [
        f"headwater figure {figure} {' '.join(str(Path(runs) / f'{kind}-{one}') for one in models)}{options} "
        "--style published"
        for figure, options, models in FIGURES.get(kind, ())
    ]


def _line(
    runs: Path, kind: str, model: str, billions: float, words: str, data: tuple[str, ...], numbers: object, part: str
) -> PlanLine:
    folder = runs / "-".join(filter(None, (kind, model.rpartition("/")[2], part)))
    weights = billions * 1e9 * (4 if kind in ("maps", "membership") else 2) / 2**30
    spread = " --device auto" if weights > ONE_GPU else ""
    command = f"headwater reproduce {kind} {model} {words}{spread} --out {folder}"
    return PlanLine(kind, model, command, data, weights, str(folder), _count(numbers))


def _count(numbers: object) -> int:
    """Count the published numbers of a model, without its shape; a ranking of heads counts once."""
    if isinstance(numbers, Mapping):
        return sum(_count(value) for name, value in numbers.items() if name not in ("billions", "layers", "heads"))
    return 1


def _commands(kind: str, numbers: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], Mapping[str, Any], str]]:
    """Yield the commands that measure a model's numbers: their options, data, published numbers and benchmark."""
    if kind == "maps":
        relations = numbers["relations"].values()
        ablated, longer = (any(part in one for one in relations) for part in ("ablation", "multi_token"))
        words = f"--datasets MAPS/datasets{' --ablations' * ablated}{' --multi-token' * longer}"
        yield words, ("MAPS/datasets",), numbers, ""
    elif kind == "pathways":
        named = " ".join(f"--questions {name}" for name in QUESTIONS)
        yield f"{named} --extract rules --dtype bfloat16", QUESTIONS, numbers, ""
    elif kind == "memorization":
        yield "--data depthqa --dtype bfloat16", ("depthqa",), numbers, ""
    else:
        for benchmark in (one for one in TEXTS if one in numbers):
            named = " ".join(f"--texts {name}" for name in TEXTS[benchmark])
            yield f"{named} --benchmark {benchmark} --dtype float32", TEXTS[benchmark], numbers[benchmark], benchmark
