"""Public calls with something wrong in them, and what came of each.

Run as `python -m tests.wrong_calls NAME ...`, in a process of its own: the suite's import hook checks annotations where
a user's process does not. For each public function there is one call that works; each of its arguments in turn is
replaced by each of `WRONG`. What comes back should be a result, or a HeadwaterError whose message is one readable text;
anything else is printed as a line of JSON.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import headwater as hw

WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "object": object,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "10**30": lambda: 10**30,
    "True": lambda: True,
    "empty text": lambda: "",
    "text": lambda: "no such thing",
    "half a character": lambda: "\ud800",
    "NUL": lambda: "a\0b",
    "long text": lambda: "a" * 5000,
    "bytes": lambda: b"text",
    "[]": list,
    "[None]": lambda: [None],
    "['x', 3]": lambda: ["x", 3],
    "{}": dict,
    "set": lambda: {1, 2},
    "generator": lambda: (i for i in range(2)),
    "function": lambda: lambda *_: None,
    "class": lambda: int,
    "array": lambda: np.zeros((2, 2)),
    "tensor of NaN": lambda: torch.full((2, 3), torch.nan),
    "empty tensor": lambda: torch.zeros(0),
    "empty frame": pd.DataFrame,
    "path": lambda: Path("no/such/file"),
    "path of NUL": lambda: Path("a\0b"),
    "folder": lambda: Path(tempfile.gettempdir()),
}
LONGEST = 1500
"""The most characters of a message that is still read."""


def readable(error: hw.HeadwaterError) -> bool:
    """Whether a message is there, not too long, and no dump of an object."""
    message = str(error)
    return 10 < len(message) < LONGEST and "Traceback" not in message and " object at 0x" not in message


def complaints(name: str, function: Callable[..., Any], given: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Replace each argument of a call in turn; yield what went wrong: argument, value, what came."""
    names = [
        argument.name
        for argument in inspect.signature(function).parameters.values()
        if argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY) and argument.name != "ax"
    ]
    for argument in names:
        for label, make in WRONG.items():
            call = {key: value() if isinstance(value, Made) else value for key, value in given.items()}
            try:
                function(**call | {argument: make()})
            except hw.HeadwaterError as error:
                if not readable(error):
                    yield argument, label, f"unreadable: {str(error)[:300]}"
            except Exception as error:
                yield argument, label, f"{type(error).__name__}: {str(error)[:200]} [{place_of(error)}]"


def place_of(error: BaseException) -> str:
    """The last line of headwater that an exception came through."""
    frame, found = error.__traceback__, ""
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if "headwater" in file and "site-packages" not in file:
            found = f"{Path(file).name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found


class Made:
    """An argument that a call uses up, made anew for each."""

    def __init__(self, make: Callable[[], Any]):
        self.make = make

    def __call__(self) -> Any:
        return self.make()


def calls(folder: Path) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """By name: a public function, and arguments with which it works."""
    from headwater.world.planted import question_lookup
    from tests.test_trace import ask
    from tests.tiny import WORDS, tiny_folder, tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    model = hw.load(tiny_model("llama", len(tokenizer)), tokenizer=tokenizer)
    pairs = [(WORDS[i], (WORDS[(i * 7 + 3) % len(WORDS)],)) for i in range(len(WORDS))] * 2
    relation = hw.Relation("pairs", "knowledge", tuple(pairs))
    clean, corrupted = " Paris is big", " Rome is big"
    metric = hw.logit_difference(5, 9)
    quiet = {"progress": False}
    heads = hw.classify_heads(model, relations=relation, **quiet)
    sweep = hw.patch(model, clean, corrupted, sites="resid_pre", metric=metric, **quiet)
    text_file = folder / "texts.txt"
    text_file.write_text("Paris is big\nRome is small\n")
    stats = hw.token_statistics(model, [" Paris is big", " Rome is small cat dog"], **quiet)
    scores = hw.memorization_scores(stats)
    questions = hw.load_questions(sample=2)
    asked, answered = ask(question_lookup())
    pathways = hw.trace_pathways(asked, answered, seeds=1, controls=False, **quiet)
    graph = hw.load_depth_graph()
    checkpoint = tiny_folder(folder / "checkpoint", "llama")
    one, two = {"model": model}, {"model": asked, "answered": answered}
    return {
        "load": (hw.load, {"what": checkpoint}),
        "HookedModel.cache": (model.cache, {"inputs": clean, **quiet}),
        "HookedModel.run": (lambda **given: model.run(**given), {"inputs": clean}),
        "HookedModel.tokenize": (model.tokenize, {"inputs": clean}),
        "HookedModel.token_strings": (model.token_strings, {"tokens": [3, 4]}),
        "classify_heads": (hw.classify_heads, {**one, "relations": relation, **quiet}),
        "load_relations": (hw.load_relations, {"relations": None}),
        "Relation": (hw.Relation, {"name": "pairs", "category": "knowledge", "pairs": tuple(pairs)}),
        "HeadMap.salient": (heads.salient, {"layer": 1, "head": 0, "model": model}),
        "HeadMap.save": (heads.save, {"folder": folder / "heads"}),
        "HeadMap.load": (hw.HeadMap.load, {"folder": heads.save(folder / "heads")}),
        "patch": (hw.patch, {**one, "clean": clean, "corrupted": corrupted, "sites": "z", "metric": metric, **quiet}),
        "Sweep.summary": (sweep.summary, {}),
        "Sweep.agreement": (sweep.agreement, {"exact": sweep}),
        "knockout": (
            hw.knockout,
            {**one, "prompts": clean, "block": hw.Edges(query="last", key={1}), "metric": metric, **quiet},
        ),
        "knocked_out_states": (
            hw.knocked_out_states,
            {**one, "prompts": clean, "block": hw.Edges(query="last", key={1}), **quiet},
        ),
        "Edges": (hw.Edges, {"query": "last", "key": {1}}),
        "Metric": (hw.Metric, {"name": "first", "function": lambda logits: logits[:, -1, 0]}),
        "logit_difference": (hw.logit_difference, {"correct": 5, "wrong": 9}),
        "log_probability": (hw.log_probability, {"answer": 5}),
        "probability": (hw.probability, {"answer": 5}),
        "rank": (hw.rank, {"answer": 5}),
        "kl_divergence": (hw.kl_divergence, {}),
        "load_questions": (hw.load_questions, {"source": None, "sample": 2}),
        "answer": (hw.answer, {**one, "questions": questions, "max_new_tokens": 2, **quiet}),
        "detect": (hw.detect, {**two, "methods": ("question",), "seeds": 1, **quiet}),
        "saliency": (hw.saliency, {**two, "probe": pathways.probe, **quiet}),
        "trace_pathways": (hw.trace_pathways, {**two, "seeds": 1, "controls": False, **quiet}),
        "Pathways.plot": (pathways.plot, {}),
        "Pathways.probes_of": (pathways.probes_of, {"dataset": "lookup"}),
        "load_depth_graph": (hw.load_depth_graph, {"source": None}),
        "token_statistics": (hw.token_statistics, {**one, "texts": [clean], **quiet}),
        "memorization_scores": (hw.memorization_scores, {"stats": stats}),
        "MemorizationScores.wide": (scores.wide, {}),
        "score_file": (hw.score_file, {**one, "file": text_file, **quiet}),
        "load_member_texts": (hw.load_member_texts, {"source": None}),
        "membership": (hw.membership, {"scores": scores, "labels": [True, False], "resamples": 20}),
        "memorization": (hw.memorization, {**one, "graph": graph, "controls": False, **quiet}),
    }


def main() -> None:
    """Print every complaint."""
    asked = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        os.chdir(folder)
        for called, (function, given) in calls(folder).items():
            if asked and called not in asked:
                continue
            for argument, value, what in complaints(called, function, given):
                found = {"call": called, "argument": argument, "value": value, "what": what}
                sys.stdout.write(json.dumps(found) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
