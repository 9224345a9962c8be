"""Public calls with something wrong in them, and what came of each.

Run as `python -m tests.wrong_calls [--few] NAME ...`, in a process of its own: the suite's import hook checks
annotations where a user's process does not. For each public function there is one call that works; each of its
arguments in turn is left out, where it is needed, and replaced by each of `WRONG`. With `--few` a call meets one half
of `FEW`, the next call the other half: its arguments share them out, and each meets at least one. What comes back
should be a result, or a HeadwaterError of one readable message; anything else is printed.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file

import headwater as hw
from headwater.heads import (
    ablate_heads,
    composition_scores,
    dynamic_scores,
    relation_coverage,
    salient_operations,
    singular_vectors,
)
from headwater.models import open_weights
from headwater.models.packaged import world_folder
from tests.planted_lookup import ask, question_lookup
from tests.tiny import WORDS, tiny_folder, tiny_model, tiny_tokenizer

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
    "{'a': 1}": lambda: {"a": 1},
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
    "[3]": lambda: [3],
    "tensor of 2.5": lambda: torch.tensor(2.5),
    "module": lambda: hw,
}
FEW = (
    "object", "10**30", "text", "long text", "['x', 3]", "{'a': 1}", "class", "array", "tensor of 2.5", "empty frame",
)  # fmt: skip
"""Those that found what the others did not."""
FEWER = ("object", "array")
"""Of functions that take long."""
LONGEST = 1500
"""The most characters of a message that is still read."""
SIDE_BY_SIDE = "prompts that differ token for token.\n"
"""What follows is a table of two tokenizations, on lines of their own."""


def readable(error: hw.HeadwaterError) -> bool:
    """Whether a message is there, one line, not too long, and no dump of an object."""
    message = str(error)
    one_line = "\n" not in message or SIDE_BY_SIDE in message
    return one_line and 10 < len(message) < LONGEST and "Traceback" not in message and " object at 0x" not in message


def complaints(
    function: Callable[..., Any], given: dict[str, Any], values: Sequence[str], apart: int
) -> Iterator[tuple[str, str, str]]:
    """Replace each argument of a call in turn by values so far apart; yield argument, value, what went wrong.

    Of a call that is checked, each argument that it needs is left out first, and one more given than it takes.
    """
    parameters = [
        argument
        for argument in inspect.signature(function).parameters.values()
        if argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY) and argument.name != "ax"
    ]
    tried: list[tuple[str, str, Callable[[], Any]]] = []
    if hasattr(function, "is_checked"):
        needed = [argument.name for argument in parameters if argument.default is argument.empty]
        for name in needed:
            without = {other: value for other, value in given.items() if other != name}
            tried.append((name, "left out", partial(function, **without)))
        tried.append(("all", "too many", partial(function, *range(len(parameters) + 1))))
    apart = min(apart, len(parameters))
    for index, argument in enumerate(parameters):
        for label in values[index % apart :: apart]:
            wrong = given | {argument.name: WRONG[label]()}
            tried.append((argument.name, label, partial(function, **wrong)))
    for name, label, call in tried:
        try:
            call()
        except hw.HeadwaterError as error:
            if not readable(error):
                yield name, label, f"unreadable: {str(error)[:300]}"
        except Exception as error:
            yield name, label, f"{type(error).__name__}: {str(error)[:200]} [{place_of(error)}]"
        else:
            if label in ("left out", "too many"):
                yield name, label, "was taken"


def place_of(error: BaseException) -> str:
    """The last line of headwater that an exception came through."""
    frame, found = error.__traceback__, ""
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if "headwater" in file and "site-packages" not in file:
            found = f"{Path(file).name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found


class Given:
    """What the calls are made of, each made when it is first needed."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def model(self) -> Any:
        tokenizer = tiny_tokenizer()
        return hw.load(tiny_model("llama", len(tokenizer)), tokenizer=tokenizer)

    @cached_property
    def embedded(self) -> Any:
        return hw.load()

    @cached_property
    def relation(self) -> Any:
        pairs = [(WORDS[i], (WORDS[(i * 7 + 3) % len(WORDS)],)) for i in range(len(WORDS))] * 2
        return hw.Relation("pairs", "knowledge", tuple(pairs))

    @cached_property
    def heads(self) -> Any:
        return hw.classify_heads(self.model, relations=self.relation, **QUIET)

    @cached_property
    def next_number(self) -> Any:
        return hw.Relation("next", "algorithmic", hw.load_relations("number_to_next")[0].pairs)

    @cached_property
    def compared(self) -> hw.HeadComparison:
        return hw.compare_heads({"a": self.model, "b": self.model}, relations=self.relation, **QUIET)

    @cached_property
    def known_heads(self) -> Any:
        return hw.classify_heads(self.embedded, relations=[self.next_number], **QUIET)

    @cached_property
    def edges(self) -> hw.EdgeEffects:
        pairs = [[CLEAN, CLEAN], [CORRUPTED, CORRUPTED]]
        return hw.edges(self.model, *pairs, metric=METRIC, receivers="logits", **QUIET)

    @cached_property
    def paths(self) -> hw.PathEffects:
        pairs = [[CLEAN, CLEAN], [CORRUPTED, CORRUPTED]]
        return hw.path_patch(self.model, *pairs, senders="embed", receivers="logits", metric=METRIC, **QUIET)

    @cached_property
    def all_edges(self) -> hw.EdgeEffects:
        return hw.edges(self.model, CORRUPTED, CLEAN, metric=METRIC, method="eap", **QUIET)

    @cached_property
    def circuit_runs(self) -> hw.CircuitRuns:
        return hw.run_circuits(self.model, CLEAN, CORRUPTED, self.edges.circuit(3), metric=METRIC, **QUIET)

    @cached_property
    def search(self) -> hw.CircuitSearch:
        asked = {"metric": METRIC, "threshold": 0.5, "budget": 2, **QUIET}
        return hw.find_circuit(self.model, CLEAN, CORRUPTED, **asked)

    @cached_property
    def curve(self) -> hw.CircuitCurve:
        return hw.circuit_curve(self.model, self.all_edges, CLEAN, CORRUPTED, metric=METRIC, sizes=(0.1, 1), **QUIET)

    @cached_property
    def sweep(self) -> Any:
        return hw.patch(self.model, CLEAN, CORRUPTED, sites="resid_pre", metric=METRIC, **QUIET)

    @cached_property
    def by_layer(self) -> Any:
        return hw.patch(self.model, CLEAN, CORRUPTED, sites="resid_pre", over="layer", metric=METRIC, **QUIET)

    @cached_property
    def claim(self) -> hw.Claim:
        return self.sweep.claim({"layer": 1, "position": 2}, match="site")

    @cached_property
    def stats(self) -> Any:
        return hw.token_statistics(self.model, [" Paris is big", " Rome is small cat dog"], **QUIET)

    @cached_property
    def scores(self) -> Any:
        return hw.memorization_scores(self.stats)

    @cached_property
    def text_file(self) -> Path:
        file = self.folder / "texts.txt"
        file.write_text("Paris is big\nRome is small\n")
        return file

    @cached_property
    def asked(self) -> Any:
        return ask(question_lookup())

    @cached_property
    def two(self) -> dict[str, Any]:
        return {"model": self.asked[0], "answered": self.asked[1]}

    @cached_property
    def pathways(self) -> Any:
        return hw.trace_pathways(**self.two, seeds=1, controls=False, **QUIET)

    @cached_property
    def detection(self) -> Any:
        return hw.detect(**self.two, methods=("question", "probe"), seeds=1, **QUIET)

    @cached_property
    def saliency(self) -> Any:
        return hw.saliency(**self.two, probe=self.pathways.probe, **QUIET)

    @cached_property
    def graph(self) -> Any:
        return hw.load_depth_graph()

    @cached_property
    def attribution(self) -> Any:
        return hw.direct_logit_attribution(self.model, [CLEAN, CORRUPTED], tokens=(5, 9), **QUIET)

    @cached_property
    def dictionary(self) -> Any:
        return hw.features(torch.relu, torch.relu, layer=1)

    @cached_property
    def sae(self) -> Path:
        folder = self.folder / "sae"
        folder.mkdir(exist_ok=True)
        (folder / "cfg.json").write_text(json.dumps({"hook_name": "blocks.1.hook_resid_post"}))
        weights = {
            "W_enc": torch.ones(32, 4),
            "W_dec": torch.ones(4, 32),
            "b_enc": torch.ones(4),
            "b_dec": torch.ones(32),
        }
        save_file(weights, folder / "sae_weights.safetensors")
        return folder

    @cached_property
    def cache(self) -> hw.Cache:
        return self.model.cache([CLEAN, CORRUPTED], sites="z", **QUIET)

    @cached_property
    def world(self) -> Path:
        folder = self.folder / "world"
        folder.mkdir(exist_ok=True)
        shutil.copy(world_folder() / "task_words.json", folder)
        return folder

    @cached_property
    def checkpoint(self) -> Path:
        return tiny_folder(self.folder / "checkpoint", "llama")


Call = tuple[Callable[..., Any], dict[str, Any]]
QUIET: Any = {"progress": False}
CLEAN, CORRUPTED = " Paris is big", " Rome is big"
METRIC = hw.logit_difference(5, 9)
PAIR = [("a", "b")]
BLOCK = {"block": hw.Edges(query="last", key={1})}


def run(model: Any, inputs: Any, hooks: Any = (), keep: Any = None, stop_at: Any = None, grad: Any = False) -> Any:
    """`HookedModel.run` without what it passes on."""
    return model.run(inputs, hooks, keep=keep, stop_at=stop_at, grad=grad)


def plot_of_sweep(sweep: Any, site: Any, metric: Any, value: Any, normalize: Any, layer: Any) -> Any:
    """`Sweep.plot` with its options."""
    return sweep.plot(site=site, metric=metric, value=value, normalize=normalize, layer=layer)


def calls(g: Given) -> dict[str, Callable[[], Call]]:
    """By name: what gives a public function, and arguments with which it works."""
    return {
        "load": lambda: (hw.load, {"what": g.checkpoint}),
        "HookedModel.cache": lambda: (g.model.cache, {"inputs": CLEAN, **QUIET}),
        "Cache.rows": lambda: (g.cache.rows, {"site": "z", "layer": 1}),
        "Cache.example": lambda: (g.cache.example, {"site": "z", "layer": 1, "example": 0}),
        "Cache.to_frame": lambda: (g.cache.to_frame, {"site": "z", "layer": 1}),
        "Cache.plot": lambda: (
            g.model.cache(CLEAN, sites="pattern", **QUIET).plot,
            {"heads": [(1, 0)], "example": 0},
        ),
        "Cache.axes": lambda: (g.cache.axes, {"site": "z"}),
        "Cache.save": lambda: (g.cache.save, {"folder": g.folder / "cache"}),
        "load_cache": lambda: (hw.load_cache, {"folder": g.cache.save(g.folder / "cache")}),
        "HookedModel.run": lambda: (partial(run, g.model), {"inputs": CLEAN}),
        "HookedModel.generate": lambda: (g.model.generate, {"prompts": CLEAN, "max_new_tokens": 2, **QUIET}),
        "HookedModel.run_with_hooks": lambda: (g.model.run_with_hooks, {"input": CLEAN}),
        "HookedModel.run_with_cache": lambda: (g.model.run_with_cache, {"input": CLEAN}),
        "HookedModel.to_tokens": lambda: (
            lambda text, tokens, prepend_bos, token: [
                g.model.to_tokens(text, prepend_bos),
                g.model.to_str_tokens(text, prepend_bos),
                g.model.to_string(tokens),
                g.model.to_single_token(text),
                g.model.to_single_str_token(token),
            ],
            {"text": " Paris", "tokens": [3, 4], "prepend_bos": None, "token": 3},
        ),
        "HookedModel.tokenize": lambda: (g.model.tokenize, {"inputs": CLEAN}),
        "HookedModel.token_strings": lambda: (g.model.token_strings, {"tokens": [3, 4]}),
        "classify_heads": lambda: (hw.classify_heads, {"model": g.model, "relations": g.relation, **QUIET}),
        "evidence": lambda: (hw.evidence, {"model": g.model, "relations": g.relation, **QUIET}),
        "Evidence.save": lambda: (
            hw.evidence(g.model, g.relation, pairs=6, draws=2, **QUIET).save,
            {"folder": g.folder / "evidence"},
        ),
        "EvidenceSuite.compared": lambda: (
            hw.evidence(g.model, [g.relation], pairs=6, draws=2, **QUIET).compared,
            {"seed": 0},
        ),
        "relation_prompts": lambda: (hw.relation_prompts, {"model": g.model, "relation": g.relation}),
        "head_margins": lambda: (hw.head_margins, {"model": g.model, "relations": g.relation}),
        "compare_heads": lambda: (
            hw.compare_heads,
            {"models": {"a": g.model, "b": g.model}, "relations": g.relation, **QUIET},
        ),
        "attention_behaviour": lambda: (
            hw.attention_behaviour,
            {"model": g.model, "texts": [CLEAN, CORRUPTED], "sequences": 2, "length": 4, **QUIET},
        ),
        "AttentionBehaviour.plot": lambda: (
            hw.attention_behaviour(g.model, sequences=2, length=4, **QUIET).plot,
            {"on": None},
        ),
        "HeadComparison.save": lambda: (g.compared.save, {"folder": g.folder / "compared"}),
        "HeadComparison.load": lambda: (hw.HeadComparison.load, {"folder": g.compared.save(g.folder / "compared")}),
        "HeadComparison.plot": lambda: (g.compared.plot, {"ax": None}),
        "load_relations": lambda: (hw.load_relations, {"relations": None}),
        "Relation": lambda: (hw.Relation, {"name": "pairs", "category": "knowledge", "pairs": g.relation.pairs}),
        "Relation.pairs": lambda: (
            lambda pair, source, target: [hw.Relation("r", None, [pair]), hw.Relation("r", None, [(source, target)])],
            {"pair": PAIR[0], "source": "a", "target": "b"},
        ),
        "world.task": lambda: (
            hw.world.task,
            {"name": "capital", "examples": 3, "held_out": True, "seed": 0, "world": g.world},
        ),
        "world.question_templates": lambda: (hw.world.question_templates, {"relations": ["country_to_capital"]}),
        "HeadMap.salient": lambda: (g.heads.salient, {"layer": 1, "head": 0, "model": g.model, "embedding": "raw"}),
        "HeadMap.view": lambda: (
            lambda beside, model: g.heads.view(beside=beside, model=model),
            {"beside": [g.heads], "model": g.model},
        ),
        "Cache.view": lambda: (
            lambda example, layers, values: g.model.cache([CLEAN, CORRUPTED], sites="pattern", **QUIET).view(
                example=example, layers=layers, values=values
            ),
            {"example": 0, "layers": [0], "values": None},
        ),
        "HeadMap.head": lambda: (
            g.heads.head,
            {"layer": 1, "head": 0, "model": g.model, "behaviour": None, "sources": 1, "targets": 1},
        ),
        "HeadMap.validate": lambda: (
            lambda model, relations, template, shots, draws, seed: g.known_heads.validate(
                model, relations=relations, template=template, shots=shots, draws=draws, seed=seed, **QUIET
            ),
            {
                "model": g.embedded,
                "relations": [g.next_number],
                "template": {"next": "The {source} is"},
                "shots": 1,
                "draws": 1,
                "seed": 0,
            },
        ),
        "HeadMap.save": lambda: (g.heads.save, {"folder": g.folder / "heads"}),
        "HeadMap.load": lambda: (hw.HeadMap.load, {"folder": g.heads.save(g.folder / "heads")}),
        "heads.relation_coverage": lambda: (
            relation_coverage,
            {"relations": [g.relation], "tokenizer": g.model.tokenizer},
        ),
        "heads.salient_operations": lambda: (
            lambda embedding: salient_operations(open_weights(g.model), [(1, 0)], embedding=embedding),
            {"embedding": "raw"},
        ),
        "heads.composition_scores": lambda: (composition_scores, {"model": g.model, **QUIET}),
        "Composition.plot": lambda: (
            lambda kind: composition_scores(g.model, **QUIET).plot(kind=kind),
            {"kind": "q"},
        ),
        "heads.singular_vectors": lambda: (singular_vectors, {"model": g.model, "layer": 0, "head": 1}),
        "heads.dynamic_scores": lambda: (
            lambda model, heads, templates, bos: dynamic_scores(
                model, heads, templates=templates, bos=bos, relations=[g.next_number], **QUIET
            ),
            {"model": g.embedded, "heads": g.known_heads, "templates": "The {source} is", "bos": True},
        ),
        "heads.ablate_heads": lambda: (
            lambda relation, controls, shots, draws, seed: ablate_heads(
                g.embedded,
                g.known_heads,
                relation,
                controls=controls,
                shots=shots,
                draws=draws,
                seed=seed,
                top=1,
                relations=[g.next_number],
                **QUIET,
            ),
            {"relation": "next", "controls": [], "shots": 3, "draws": 1, "seed": 0},
        ),
        "figures.dose_response": lambda: (
            hw.figures.dose_response,
            {"sweeps": {0: g.by_layer}, "ax": None, "title": None, "figsize": None},
        ),
        "figures.head_maps": lambda: (
            lambda maps, columns, axes, title, figsize: [
                g.heads.plot(axes),
                hw.figures.head_maps([g.heads], ax=axes, title=title),
                hw.figures.head_maps(maps, columns, title=title, figsize=figsize),
            ],
            {"maps": [g.heads], "columns": None, "axes": None, "title": None, "figsize": None},
        ),
        "patch": lambda: (
            hw.patch,
            {"model": g.model, "clean": CLEAN, "corrupted": CORRUPTED, "sites": "z", "metric": METRIC, **QUIET},
        ),
        "board": lambda: (hw.board, {"model": g.model, "clean": CLEAN, "corrupted": CORRUPTED, "metric": METRIC}),
        "Board.click": lambda: (
            hw.board(g.model, CLEAN, CORRUPTED, metric=METRIC).click,
            {"layer": 1, "position": 3, "head": 1, "key": 2, "how": "zero"},
        ),
        "Board.change": lambda: (
            hw.board(g.model, CLEAN, CORRUPTED, metric=METRIC).change,
            {"nodes": [{"site": "z", "layer": 1, "head": 0}], "how": "denoise"},
        ),
        "ablate": lambda: (
            hw.ablate,
            {"model": g.model, "prompts": CLEAN, "heads": [(0, 1)], "metric": METRIC, **QUIET},
        ),
        "features": lambda: (hw.features, {"encode": torch.relu, "decode": torch.relu, "layer": 1}),
        "Features.only": lambda: (g.dictionary.only, {"features": [3]}),
        "Features.sites": lambda: (
            lambda sites, features, encode, decode: [
                hw.patch(g.model, CLEAN, CORRUPTED, sites=sites, metric=METRIC, **QUIET),
                hw.ablate(g.model, CLEAN, features=features, metric=METRIC, **QUIET),
                hw.patch(
                    g.model, CLEAN, sites=hw.features(encode, decode, layer=1), values="zero", metric=METRIC, **QUIET
                ),
            ],
            {"sites": g.dictionary, "features": g.dictionary.only(3), "encode": torch.relu, "decode": torch.relu},
        ),
        "load_sae": lambda: (hw.load_sae, {"folder": g.sae}),
        "ablate.sets": lambda: (
            lambda sets, one, neurons: [
                hw.ablate(g.model, CLEAN, sets=sets, metric=METRIC, **QUIET),
                hw.ablate(g.model, CLEAN, sets={"one": one}, metric=METRIC, **QUIET),
                hw.ablate(g.model, CLEAN, neurons=neurons, metric=METRIC, **QUIET),
            ],
            {"sets": [[(0, 1)]], "one": {"mlps": [1]}, "neurons": [(0, 1)]},
        ),
        "characters": lambda: (
            lambda start, stop: hw.patch(
                g.model, CLEAN, sites="z", values="zero", metric=METRIC, positions=hw.characters(start, stop), **QUIET
            ),
            {"start": 1, "stop": 4},
        ),
        "occurrence": lambda: (
            lambda word, n: hw.knockout(
                g.model, CLEAN, block=hw.Edges("last", hw.occurrence(word, n)), metric=METRIC, **QUIET
            ),
            {"word": " Paris", "n": 1},
        ),
        "last_token_of": lambda: (
            lambda where: hw.knockout(
                g.model, CLEAN, block=hw.Edges("last", hw.last_token_of(where)), metric=METRIC, **QUIET
            ),
            {"where": " Paris"},
        ),
        "patch.roles": lambda: (
            lambda subject, spans: hw.patch(
                g.model,
                CLEAN,
                CORRUPTED,
                sites="resid_pre",
                metric=METRIC,
                positions={"subject": subject, "end": "last"},
                spans=spans,
                **QUIET,
            ),
            {"subject": (" Paris", " Rome"), "spans": "together"},
        ),
        "edges": lambda: (
            hw.edges,
            {
                "model": g.model,
                "clean": CLEAN,
                "corrupted": CORRUPTED,
                "metric": METRIC,
                "receivers": "logits",
                **QUIET,
            },
        ),
        "path_patch": lambda: (
            hw.path_patch,
            {
                "model": g.model,
                "clean": CLEAN,
                "corrupted": CORRUPTED,
                "senders": "mlp 0",
                "receivers": "logits",
                "metric": METRIC,
                **QUIET,
            },
        ),
        "PathEffects.top": lambda: (g.paths.top, {"n": 3}),
        "PathEffects.plot": lambda: (g.paths.plot, {"metric": None}),
        "EdgeEffects.top": lambda: (g.edges.top, {"n": 3}),
        "EdgeEffects.agreement": lambda: (g.edges.agreement, {"exact": g.edges}),
        "EdgeEffects.circuit": lambda: (g.edges.circuit, {"n": 3, "by": "size"}),
        "Circuit.of": lambda: (hw.Circuit.of, {"edges": ["embed -> logits"], "model": g.model}),
        "Circuit.strongest": lambda: (g.edges.circuit(3).strongest, {"n": 2}),
        "Circuit.view": lambda: (
            lambda n, edges, metric, runs: g.edges.circuit(3).view(n=n, edges=edges, metric=metric, runs=runs),
            {"n": 2, "edges": g.edges, "metric": METRIC.name, "runs": g.circuit_runs},
        ),
        "EdgeEffects.view": lambda: (
            lambda n, metric, runs: g.all_edges.view(n=n, metric=metric, runs=runs),
            {"n": 2, "metric": METRIC.name, "runs": g.circuit_runs},
        ),
        "Circuit.placebos": lambda: (g.edges.circuit(3).placebos, {"n": 2, "seed": 0}),
        "Circuit.overlap": lambda: (g.edges.circuit(3).overlap, {"other": g.edges.circuit(2)}),
        "Circuit.save": lambda: (g.edges.circuit(3).save, {"path": g.folder / "circuit.parquet"}),
        "EdgeEffects.stability": lambda: (g.edges.stability, {"splits": 2, "n": 5}),
        "EdgeEffects.plot": lambda: (g.edges.plot, {"metric": None}),
        "run_circuits": lambda: (
            hw.run_circuits,
            {
                "model": g.model,
                "clean": CLEAN,
                "corrupted": CORRUPTED,
                "circuits": [g.edges.circuit(3)],
                "metric": METRIC,
                "values": "other run",
                "placebos": 2,
                **QUIET,
            },
        ),
        "CircuitRuns.summary": lambda: (g.circuit_runs.summary, {}),
        "CircuitRuns.claim": lambda: (g.circuit_runs.claim, {"circuit": None, "margin": 0.1}),
        "CircuitRuns.plot": lambda: (g.circuit_runs.plot, {"metric": None}),
        "circuit_curve": lambda: (
            hw.circuit_curve,
            {
                "model": g.model,
                "edges": g.all_edges,
                "clean": CLEAN,
                "corrupted": CORRUPTED,
                "metric": METRIC,
                "sizes": (0.1, 1),
                "by": "size",
                "placebos": 2,
                **QUIET,
            },
        ),
        "find_circuit": lambda: (
            hw.find_circuit,
            {
                "model": g.model,
                "clean": CLEAN,
                "corrupted": CORRUPTED,
                "metric": METRIC,
                "threshold": 0.5,
                "by": "size",
                "budget": 5,
                "placebos": 2,
                **QUIET,
            },
        ),
        "heads.claim": lambda: (
            hw.heads.claim,
            {
                "model": g.model,
                "prompts": [CLEAN, CORRUPTED],
                "heads": [(0, 1)],
                "metric": METRIC,
                "values": "zero",
                "other": None,
                "chosen_on": [CLEAN],
                "placebos": 2,
                "margin": 0.1,
                "seed": 0,
                "progress": False,
            },
        ),
        "CircuitSearch.summary": lambda: (g.search.summary, {}),
        "circuits.completeness": lambda: (
            hw.circuits.completeness,
            {
                "model": g.model,
                "clean": CLEAN,
                "corrupted": CORRUPTED,
                "circuit": g.edges.circuit(3),
                "metric": METRIC,
                "sets": 1,
                "placebos": 1,
                "seed": 0,
            },
        ),
        "circuits.minimality": lambda: (
            hw.circuits.minimality,
            {
                "model": g.model,
                "clean": CLEAN,
                "corrupted": CORRUPTED,
                "circuit": g.edges.circuit(3),
                "metric": METRIC,
                "sets": 1,
                "placebos": 1,
                "seed": 0,
            },
        ),
        "Circuit.claim": lambda: (
            g.edges.circuit(3).claim,
            {
                "model": g.model,
                "clean": CLEAN,
                "corrupted": CORRUPTED,
                "metric": METRIC,
                "other": "zero",
                "placebos": 2,
                "margin": 0.1,
                "progress": False,
            },
        ),
        "CircuitCurve.areas": lambda: (g.curve.areas, {}),
        "CircuitCurve.plot": lambda: (g.curve.plot, {"metric": None}),
        "Sweep.summary": lambda: (g.sweep.summary, {}),
        "Sweep.grid": lambda: (
            lambda rows, columns, value, normalize, site: g.sweep.grid(
                rows, columns, value=value, normalize=normalize, site=site
            ),
            {"rows": "layer", "columns": "position", "value": "effect", "normalize": None, "site": "resid_pre"},
        ),
        "Sweep.claim": lambda: (g.sweep.claim, {"cells": {"layer": 1, "position": 2}}),
        "Claim.load": lambda: (hw.Claim.load, {"folder": g.claim.save(g.folder / "claim")}),
        "Claim.plot": lambda: (g.claim.plot, {"ax": None, "figsize": None}),
        "Sweep.agreement": lambda: (g.sweep.agreement, {"exact": g.sweep}),
        "Result.plot": lambda: (
            lambda place, title, figsize: [g.sweep.plot(place, title=title), g.sweep.plot(figsize=figsize)],
            {"place": None, "title": None, "figsize": None},
        ),
        "figures.save_figure": lambda: (
            hw.figures.save_figure,
            {"plot": g.sweep.plot(), "stem": g.folder / "figure", "formats": "png"},
        ),
        "Sweep.plot": lambda: (
            partial(plot_of_sweep, g.sweep),
            dict.fromkeys(("site", "metric", "normalize", "layer")) | {"value": "effect"},
        ),
        "patch.values": lambda: (
            lambda values, from_layer: hw.patch(
                g.model,
                CLEAN,
                CORRUPTED,
                sites="z",
                metric=METRIC,
                values=values,
                from_layer=from_layer,
                layers=[1],
                positions=[1],
                **QUIET,
            ),
            {"values": "other run", "from_layer": None},
        ),
        "add": lambda: (hw.add, {"direction": torch.ones(4)}),
        "scale": lambda: (hw.scale, {"factor": 2.0}),
        "noise": lambda: (hw.noise, {"std": 1.0}),
        "patch.corrupted": lambda: (
            lambda std, samples, positions: hw.patch(
                g.model,
                CLEAN,
                hw.noise(std, samples, positions=positions),
                sites="z",
                metric=METRIC,
                layers=[1],
                positions=[1],
                **QUIET,
            ),
            {"std": 3, "samples": 2, "positions": 1},
        ),
        "mean": lambda: (
            lambda prompts: g.model.run(CLEAN, [hw.edit("z", 1, hw.mean(prompts))]),
            {"prompts": [CLEAN, CORRUPTED]},
        ),
        "resample": lambda: (
            lambda prompts, seed: g.model.run(CLEAN, [hw.edit("z", 1, hw.resample(prompts, seed))]),
            {"prompts": [CORRUPTED], "seed": 0},
        ),
        "edit": lambda: (
            lambda site, layer, values, positions, heads: g.model.run(
                CLEAN, [hw.edit(site, layer, values, positions=positions, heads=heads)]
            ),
            {"site": "z", "layer": 1, "values": hw.scale(2.0), "positions": "all", "heads": None},
        ),
        "edit.keys": lambda: (
            lambda keys, place: [
                g.model.run(CLEAN, [hw.edit("pattern", 1, "zero", keys=keys)]),
                hw.patch(g.model, CLEAN, sites="pattern", values="zero", keys=keys, metric=METRIC, **QUIET),
                hw.patch(g.model, CLEAN, sites="pattern", values="zero", keys={"a": place}, metric=METRIC, **QUIET),
            ],
            {"keys": 0, "place": 0},
        ),
        "knockout": lambda: (hw.knockout, {"model": g.model, "prompts": CLEAN, "metric": METRIC, **BLOCK, **QUIET}),
        "knocked_out_states": lambda: (
            hw.knocked_out_states,
            {"model": g.model, "prompts": CLEAN, **BLOCK, **QUIET},
        ),
        "Sweep.save": lambda: (g.sweep.save, {"folder": g.folder / "sweep"}),
        "Sweep.__getitem__": lambda: (lambda column: g.sweep[column], {"column": "layer"}),
        "Edges": lambda: (
            lambda query, key, heads: hw.knockout(
                g.model, CLEAN, block=hw.Edges(query, key, heads), metric=METRIC, **QUIET
            ),
            {"query": "last", "key": {1}, "heads": None},
        ),
        "Metric": lambda: (hw.Metric, {"name": "first", "function": lambda logits: logits[:, -1, 0]}),
        "logit_difference": lambda: (
            lambda correct, wrong, at: hw.knockout(
                g.model, CLEAN, metric=hw.logit_difference(correct, wrong, at=at), **BLOCK, **QUIET
            ),
            {"correct": 5, "wrong": 9, "at": "last"},
        ),
        "log_probability": lambda: (hw.log_probability, {"answer": 5}),
        "probability": lambda: (hw.probability, {"answer": 5}),
        "rank": lambda: (hw.rank, {"answer": 5}),
        "kl_divergence": lambda: (hw.kl_divergence, {}),
        "lens": lambda: (hw.lens, {"model": g.model, "prompts": CLEAN, **QUIET}),
        "LayerPredictions.plot": lambda: (
            lambda example: hw.lens(g.model, CLEAN, **QUIET).plot(example=example),
            {"example": 0},
        ),
        "direct_logit_attribution": lambda: (
            hw.direct_logit_attribution,
            {"model": g.model, "prompts": CLEAN, "tokens": (5, 9), **QUIET},
        ),
        "DirectAttribution.summary": lambda: (g.attribution.summary, {}),
        "load_questions": lambda: (hw.load_questions, {"source": "natural", "sample": 2}),
        "answer": lambda: (
            hw.answer,
            {"model": g.model, "questions": hw.load_questions("natural", sample=1), "max_new_tokens": 2, **QUIET},
        ),
        "AnsweredQuestions.load": lambda: (hw.AnsweredQuestions.load, {"folder": g.asked[1].save(g.folder / "asked")}),
        "detect": lambda: (hw.detect, {**g.two, "methods": ("question",), "seeds": 1, **QUIET}),
        "Detection.detector": lambda: (g.detection.detector, {"dataset": "lookup"}),
        "Detector.score": lambda: (g.detection.detector("lookup").score, {**g.two, **QUIET}),
        "saliency": lambda: (hw.saliency, {**g.two, "probe": g.pathways.probe, **QUIET}),
        "Saliency.of": lambda: (g.saliency.of, {"target": "logit"}),
        "Probe": lambda: (
            lambda site, token, layer, weight, bias: hw.saliency(
                **g.two, probe=hw.Probe(site, token, layer, weight, bias), **QUIET
            ),
            {name: getattr(g.pathways.probe, name) for name in ("site", "token", "layer", "weight", "bias")},
        ),
        "fit_probe": lambda: (
            hw.fit_probe,
            {
                "cache": torch.randn(24, 3),
                "labels": [0, 1] * 12,
                "controls": 1,
                "strengths": (0.1,),
                "folds": 2,
                **QUIET,
            },
        ),
        "ProbeFit.probe": lambda: (
            hw.fit_probe(torch.randn(24, 3), [0, 1] * 12, controls=0, strengths=(0.1,), **QUIET).probe,
            {"layer": 0},
        ),
        "trace_pathways": lambda: (hw.trace_pathways, {**g.two, "seeds": 1, "controls": False, **QUIET}),
        "Pathways.plot": lambda: (
            lambda split_by, value: g.pathways.plot(split_by=split_by, value=value),
            {"split_by": None, "value": "delta_p"},
        ),
        "Pathways.probes_of": lambda: (g.pathways.probes_of, {"dataset": "lookup"}),
        "load_depth_graph": lambda: (hw.load_depth_graph, {"source": None}),
        "token_statistics": lambda: (hw.token_statistics, {"model": g.model, "texts": [CLEAN], **QUIET}),
        "TextStatistics.save": lambda: (g.stats.save, {"folder": g.folder / "stats"}),
        "memorization_scores": lambda: (hw.memorization_scores, {"stats": g.stats}),
        "MemorizationScores.load": lambda: (hw.MemorizationScores.load, {"folder": g.scores.save(g.folder / "scores")}),
        "score_file": lambda: (hw.score_file, {"model": g.model, "file": g.text_file, **QUIET}),
        "load_member_texts": lambda: (hw.load_member_texts, {"source": None}),
        "membership": lambda: (hw.membership, {"scores": g.scores, "labels": [True, False], "resamples": 20}),
        "Membership.load": lambda: (
            hw.Membership.load,
            {"folder": hw.membership(g.scores, [True, False], resamples=20).save(g.folder / "membership")},
        ),
        "memorization": lambda: (hw.memorization, {"model": g.model, "graph": g.graph, "controls": False, **QUIET}),
        "DepthProfile.load": lambda: (hw.DepthProfile.load, {"folder": g.folder}),
    }


SLOW = ("answer", "detect", "memorization", "trace_pathways", "heads.ablate_heads", "heads.dynamic_scores", "load")


def main() -> None:
    """Print every complaint, first of what is public and not called."""
    asked, few = [name for name in sys.argv[1:] if name != "--few"], "--few" in sys.argv
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(name)
        every = calls(Given(Path(name)))
        known = {called.split(".")[0] for called in every} | set(dir(hw.errors))
        sys.stdout.writelines(f"{public} is not called\n" for public in hw.__all__ if public not in known)
        for number, (called, prepared) in enumerate(every.items()):
            if asked and called not in asked:
                continue
            function, given = prepared()
            half = FEWER if called in SLOW else FEW[number % 2 :: 2]
            values, apart = (half, len(half)) if few else (tuple(WRONG), 1)
            for argument, value, what in complaints(function, given, values, apart):
                found = {"call": called, "argument": argument, "value": value, "what": what}
                sys.stdout.write(json.dumps(found) + "\n")
                sys.stdout.flush()
            plt.close("all")


if __name__ == "__main__":
    main()
