"""The numbers of public calls on four models, kept: what a change of the house must leave as it is.

`python -m tests.golden_calls [MODEL ...]` computes them anew, prints which columns changed, and writes
`tests/golden/MODEL.json`. A column of numbers is kept as how many it has, how many of them are NaN, their mean size,
and their mean when each is weighted by the cosine of its row: two machines share these, and no two rows can swap.
Any other column is kept as a hash. `floor`, which is how a machine rounds, is not kept.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import xxhash

import headwater as hw
from headwater.heads.ablation import ablate_heads
from headwater.heads.dynamic import dynamic_scores
from headwater.heads.relations import relation_coverage
from headwater.heads.weight_maps import composition_scores, singular_vectors
from headwater.pathways.refusal_rates import refusals
from headwater.pathways.token_map import probe_map
from tests.real_models import real_folder
from tests.tiny import WORDS, tiny_model, tokenizer_of

FOLDER = Path(__file__).with_name("golden")
QUIET: Any = {"progress": False}
CLOSE, ROUNDED = 2e-4, 1e-5
"""How far two machines may be apart: a share of a column's mean size, and what logits of ten are rounded by."""


@dataclass(frozen=True)
class Example:
    """A model, and what it is given."""

    model: hw.HookedModel
    clean: list[str]
    corrupted: list[str]
    answers: tuple[str, str]
    word: str
    """Occurs in every clean prompt."""
    relations: list[hw.Relation]

    @property
    def metric(self) -> dict[str, Any]:
        return {"metric": hw.logit_difference(*self.answers), **QUIET}


def suite(*names: str) -> list[hw.Relation]:
    return [relation for relation in hw.load_relations() if relation.name in names]


def embedded() -> Example:
    prompts = [f"Q: What is the capital of {country}?\nA:" for country in ("France", "Italy", "Spain", "Germany")]
    relations = suite("country_to_nationality", "number_to_next")
    return Example(hw.load(), prompts[:2], prompts[2:], (" Paris", " Madrid"), "capital", relations)


def random(family: str) -> Callable[[], Example]:
    def example() -> Example:
        model = hw.load(tiny_model(family, seed=7), tokenizer=tokenizer_of(family))
        words = [(WORDS[i], (WORDS[(i * 7 + 3) % len(WORDS)],)) for i in range(len(WORDS))]
        relations = [hw.Relation("pairs", "knowledge", tuple(words * 2)), hw.Relation("back", None, tuple(words[::-1]))]
        clean, corrupted = (
            (" Paris is big in France", " cat is big in the"),
            (" Rome is small in Italy", " dog is small of the"),
        )
        return Example(model, [*clean], [*corrupted], (" Paris", " Rome"), " is", relations)

    return example


def smollm2() -> Example:
    texts = [f"The city of {city} is the capital of" for city in ("Paris", "Madrid", "Rome", "Berlin")]
    relations = suite("country_to_capital")
    return Example(hw.load(real_folder("smollm2")), texts[:2], texts[2:], (" France", " Italy"), "capital", relations)


MODELS: dict[str, Callable[[], Example]] = {
    "embedded": embedded,
    "gpt2": random("gpt2"),
    "llama": random("llama"),
    "smollm2": smollm2,
}
Calls = dict[str, Callable[[], Any]]


def calls(x: Example) -> Calls:
    """What is called of every model, by name; each gives results, tables or tensors."""
    model, prompts, pairs = x.model, x.clean, (x.clean, x.corrupted)
    patch = lambda **options: hw.patch(model, *pairs, **x.metric | options)  # noqa: E731
    one = lambda **options: hw.patch(model, prompts, **x.metric | {"sites": "z", "layers": [1]} | options)  # noqa: E731
    edges = lambda **options: hw.edges(model, *pairs, **x.metric | options)  # noqa: E731
    last = hw.Edges("last", hw.occurrence(x.word, 1))
    metrics = [
        hw.log_probability(x.answers[0]),
        hw.probability(x.answers[0]),
        hw.rank(x.answers[0]),
        hw.kl_divergence(),
    ]
    direction = torch.linspace(-1, 1, model.shape.d_model)
    small = model.shape.n_layers * model.shape.n_heads <= 200
    found: Calls = {
        "tokens": lambda: model.tokenize(prompts).tokens,
        "run": lambda: model.run(prompts)[:, -1],
        "run, edited": lambda: model.run(prompts, [hw.edit("resid_post", 1, hw.add(direction))])[:, -1],
        "cache": lambda: [
            model.cache(prompts, sites=site, layers=[1], **QUIET).rows(site, 1) for site in ("resid_pre", "z", "k")
        ],
        "generate": lambda: pd.DataFrame({"text": model.generate(prompts, max_new_tokens=6, **QUIET)}),
        "generate, edited": lambda: pd.DataFrame(
            {"text": model.generate(prompts, [hw.edit("resid_post", 1, hw.scale(0.5))], max_new_tokens=4, **QUIET)}
        ),
        "patch z": lambda: patch(sites="z", positions="last"),
        "patch resid_pre, noise direction": lambda: patch(sites="resid_pre", layers=[0, 1], direction="noise"),
        "patch, four metrics": lambda: patch(sites="mlp_out", layers=[1], metric=metrics),
        "patch q k v": lambda: patch(sites=["q", "k", "v"], layers=[1], positions="last"),
        "patch pattern": lambda: patch(sites="pattern", layers=[1]),
        "patch roles": lambda: patch(sites="resid_mid", positions={"word": x.word, "end": "last"}, layers=[0, 2]),
        "patch window": lambda: patch(sites="attn_out", window=2, positions="last"),
        "patch by gradients": lambda: patch(sites="z", positions="last", method="attribution"),
        "patch zero": lambda: one(values="zero"),
        "patch mean": lambda: one(values=hw.mean(x.corrupted)),
        "patch resample": lambda: one(values=hw.resample(x.corrupted, seed=3), positions="last"),
        "patch noise": lambda: hw.patch(
            model, prompts, hw.noise(1.0, 2, positions={1}), sites="resid_pre", layers=[1, 2], **x.metric
        ),
        "ablate": lambda: hw.ablate(model, prompts, sets={"two": [(0, 1), (1, 0)], "MLP": {"mlps": [1]}}, **x.metric),
        "ablate neurons": lambda: hw.ablate(model, prompts, neurons=[(1, 3), (2, 5)], **x.metric),
        "knockout": lambda: hw.knockout(model, prompts, block=last, **x.metric),
        "knockout windows": lambda: hw.knockout(model, prompts, block=last, window=2, variant="zero", **x.metric),
        "knocked out states": lambda: [
            states["mlp_out"] for states in hw.knocked_out_states(model, prompts, block=last, layers=[1, 2], **QUIET)
        ],
        "edges to logits": lambda: edges(receivers="logits"),
        "edges, head to head": lambda: edges(senders="head 0.1", receivers=["head 1.0", "mlp 2"], over="position"),
        "edges by EAP": lambda: edges(method="eap"),
        "edges by EAP-IG": lambda: edges(method="eap-ig", senders="embed"),
        "paths": lambda: hw.path_patch(model, *pairs, senders="mlp 0", receivers=["head 1.1", "logits"], **x.metric),
        "paths through MLPs": lambda: hw.path_patch(
            model, *pairs, senders="head 0.0", receivers="logits", through="mlps", **x.metric
        ),
        "lens": lambda: hw.lens(model, prompts, top_k=2, answer=x.answers[0], positions="last", **QUIET),
        "direct attribution": lambda: hw.direct_logit_attribution(model, prompts, tokens=x.answers, **QUIET),
        "token statistics": lambda: hw.token_statistics(model, prompts, layers=[0, -1], **QUIET),
        "likelihood scores": lambda: hw.memorization_scores(hw.token_statistics(model, x.clean + x.corrupted, **QUIET)),
        "heads": lambda: hw.classify_heads(model, relations=x.relations, **QUIET),
        "heads, published rule": lambda: hw.classify_heads(model, relations=x.relations, rule="published", **QUIET),
        "compared heads": lambda: hw.compare_heads(
            {"a": model, "b": model}, relations=x.relations[:1], embedding="mlp0", **QUIET
        ),
        "attention behaviour": lambda: hw.attention_behaviour(model, sequences=4, length=8, copying=False, **QUIET),
        "relation coverage": lambda: relation_coverage(x.relations, model.tokenizer),
        "singular vectors": lambda: singular_vectors(model, 1, 0),
    }  # fmt: skip
    return found | (small_models(x, edges) if small else {}) | (questions(model) if x.model.name == "embedded" else {})


def small_models(x: Example, edges: Callable[..., hw.EdgeEffects]) -> Calls:
    """What takes too long, on a model of hundreds of heads, to be called here."""
    pairs, asked = (x.clean, x.corrupted), x.metric | {"placebos": 2}
    circuit = lambda: edges(method="eap").circuit(12)  # noqa: E731
    return {
        "edges, every one": lambda: edges(method="exact"),
        "edges, screened": lambda: edges(method="screened", verify=20),
        "circuit runs": lambda: hw.run_circuits(x.model, *pairs, {"strong": circuit()}, **asked),
        "circuit curve": lambda: hw.circuit_curve(x.model, edges(method="eap"), *pairs, sizes=(0.1, 1), **x.metric),
        "circuit search": lambda: hw.find_circuit(x.model, *pairs, threshold=1.0, budget=30, **asked),
        "completeness": lambda: hw.circuits.completeness(x.model, *pairs, circuit(), sets=2, **asked),
        "minimality": lambda: hw.circuits.minimality(x.model, *pairs, circuit().strongest(3), sets=1, **asked),
        "composition": lambda: composition_scores(x.model, **QUIET),
    }


def questions(model: hw.HookedModel) -> Calls:
    """What asks a model questions."""
    answered = hw.answer(model, hw.load_questions("natural", sample=60), **QUIET)
    few = suite("country_to_nationality")
    heads = hw.classify_heads(model, relations=few, **QUIET)
    pathways = hw.trace_pathways(model, answered, token="before_answer", seeds=1, **QUIET)
    asked = {"relations": few, "template": "Q: What is the adjective for {source}?\nA:", "draws": 2, **QUIET}
    graph = hw.load_depth_graph()
    return {
        "answers": lambda: answered,
        "pathways": lambda: pathways,
        "saliency": lambda: hw.saliency(model, answered, pathways.probe, **QUIET),
        "refusals": lambda: refusals(model, answered, pathways, **QUIET),
        "probe map": lambda: probe_map(model, answered, tokens=("prompt_last", "answer_last"), **QUIET),
        "detection": lambda: hw.detect(
            model, answered, methods=("probe", "logit_mean"), token="before_answer", seeds=1, **QUIET
        ),
        "memorization": lambda: hw.memorization(
            model, dataclasses.replace(graph, table=graph.table.head(60)), controls=False, **QUIET
        ),
        "validation": lambda: heads.validate(model, **asked),
        "ablated heads": lambda: ablate_heads(model, heads, "country_to_nationality", shots=0, **asked),
        "dynamic scores": lambda: dynamic_scores(
            model, heads, relations=few, templates=("The notes on {source} say",), **QUIET
        ),
    }  # fmt: skip


def fingerprint(values: np.ndarray | pd.Series) -> list[float] | str:
    """Return what is kept of a column."""
    values = pd.Series(values.ravel() if isinstance(values, np.ndarray) else values)
    if values.dtype == object and any(isinstance(one, tuple) and float in map(type, one) for one in values):
        values = values.explode().astype(float)
    if values.dtype.kind != "f":
        return xxhash.xxh64_hexdigest(repr([str(one) for one in values]).encode())
    numbers = values.to_numpy(np.float64)
    finite = np.where(np.isfinite(numbers), numbers, 0.0)
    weights = np.cos(np.arange(len(numbers)))
    mean = [float(f"{one:.7g}") for one in (np.abs(finite).mean(), (finite * weights).mean())] if len(numbers) else []
    return [len(numbers), int(np.isnan(numbers).sum()), *mean]


def fingerprints(result: Any) -> dict[str, Any]:
    """Return what is kept of a result, by column."""
    if isinstance(result, torch.Tensor):
        return {"tensor": fingerprint(result.detach().numpy())}
    if isinstance(result, list | tuple):
        return {f"{i} {name}": kept for i, one in enumerate(result) for name, kept in fingerprints(one).items()}
    table = result if isinstance(result, pd.DataFrame) else getattr(result, "table", None)
    if table is None:
        return fingerprints([one for one in vars(result).values() if isinstance(one, torch.Tensor)])
    return {str(name): fingerprint(table[name]) for name in table.columns if name != "floor"}


def same(kept: Any, now: Any) -> bool:
    """Whether two fingerprints are of one column, as far as two machines can share it."""
    if isinstance(kept, str) or isinstance(now, str) or len(kept) != len(now) or kept[:2] != now[:2]:
        return bool(kept == now)
    size = max(kept[2], now[2]) if len(kept) > 2 else 0.0
    return all(
        math.isclose(a, b, rel_tol=0, abs_tol=CLOSE * size + ROUNDED) for a, b in zip(kept[2:], now[2:], strict=True)
    )


def changed(kept: dict[str, Any], now: dict[str, Any]) -> Iterable[str]:
    """Yield a line for each column that is not as it was kept."""
    for name in [*kept, *(name for name in now if name not in kept)]:
        if name not in kept or name not in now or not same(kept[name], now[name]):
            yield f"{name}: {kept.get(name, 'not there')} before, {now.get(name, 'not there')} now"


def kept_of(model: str) -> dict[str, dict[str, Any]]:
    file = FOLDER / f"{model}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def main() -> None:
    """Compute and write them anew; print what changed."""
    for name in sys.argv[1:] or MODELS:
        kept = kept_of(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            now = {call: fingerprints(made()) for call, made in calls(MODELS[name]()).items()}
        for call in [*kept, *(call for call in now if call not in kept)]:
            for line in changed(kept.get(call, {}), now.get(call, {})):
                sys.stdout.write(f"{name}, {call}, {line}\n")
        lines = ",\n".join(f" {json.dumps(call)}: {json.dumps(columns)}" for call, columns in now.items())
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
