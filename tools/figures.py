"""Draw the figures of README and documentation: `make figures`, or this file with names.

All are of the embedded model but `evidence`, which needs SmolLM2's package, and those of `real_`: these need question
files or the runs of docs/real_models.md, and are drawn where they are named.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import headwater as hw
from headwater.figures import save_figure
from headwater.figures.style import style
from headwater.heads.ablation import ablate_heads
from headwater.heads.dynamic import dynamic_scores
from headwater.heads.weight_maps import composition_scores, singular_vectors

DOCS = Path(__file__).resolve().parents[1] / "docs"
ASK = "Q: What is the capital of {}?\nA:"
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Austria": "Vienna", "Poland": "Warsaw"}
REAL = "smollm2", "gemma"
"""The folders in runs/ of what docs/real_models.md measures."""
RELATIONS = ("country_to_nationality", "country_to_capital", "tool_to_job", "year_to_next")


@cache
def model() -> hw.HookedModel:
    """Load the embedded model."""
    return hw.load()


@cache
def answered() -> hw.AnsweredQuestions:
    """Let it answer 400 questions of each set."""
    return hw.answer(model(), hw.load_questions(sample=400))


@cache
def traced() -> hw.Pathways:
    """Trace its pathways before the answer, where its probe is best."""
    return hw.trace_pathways(model(), answered(), token="before_answer")


@cache
def few_heads() -> hw.HeadMap:
    """Classify its heads on a few relations."""
    return hw.classify_heads(model(), relations=few_relations())


def few_relations() -> list:
    """Return a few relations."""
    return [relation for relation in hw.load_relations() if relation.name in RELATIONS]


def pairs() -> dict:
    """Return prompts about countries, each beside the next one's, and a metric."""
    names = list(CAPITALS)
    right = [f" {CAPITALS[name]}" for name in names]
    clean = [ASK.format(name) for name in names]
    metric = hw.logit_difference(right, right[1:] + right[:1])
    return {"clean": clean, "corrupted": clean[1:] + clean[:1], "metric": metric}


@cache
def edges() -> hw.EdgeEffects:
    """Measure every edge on these pairs."""
    return hw.edges(model(), **pairs(), progress=False)


def knocked_out() -> hw.Sweep:
    """Sever the country from the last position."""
    given = pairs()
    severed = hw.Edges("last", [f" {name}" for name in CAPITALS])
    return hw.knockout(model(), given["clean"], block=severed, metric=given["metric"], window="cumulative")


def seen_by_probe() -> hw.Saliency:
    """Trace the probe at the answer's last token back to the question."""
    probe = hw.trace_pathways(model(), answered(), token="answer_last", seeds=1, controls=False).probe
    return hw.saliency(model(), answered(), probe)


def ablated() -> object:
    """Remove the heads of a relation."""
    template = "Q: What is the adjective for {source}?\nA:"
    given = {"relations": few_relations(), "template": template, "shots": 0, "controls": []}
    return ablate_heads(model(), few_heads(), "country_to_nationality", **given)


def probed() -> hw.ProbeFit:
    """Read from the questions for capitals whether the country lies in Africa."""
    pairs = next(one for one in hw.load_relations() if one.name == "country_to_continent").pairs
    prompts = [ASK.format(country.strip()) for country, _ in pairs]
    states = {
        layer: torch.stack([model().run(prompt, stop_at=layer + 1)[0, -1] for prompt in prompts])
        for layer in range(model().shape.n_layers)
    }
    labels = ["Africa" in {target.strip() for target in targets} for _, targets in pairs]
    return hw.fit_probe(states, labels, site="resid_post")


def membership() -> hw.Membership:
    """Tell texts of the model's corpus from others."""
    texts = hw.load_member_texts()
    facts = texts[texts["kind"] != "note"].reset_index(drop=True)
    statistics = hw.token_statistics(model(), facts["text"])
    scores = hw.memorization_scores(statistics, k=(0.2,))
    return hw.membership(scores, facts["member"], strata=facts["relation"] + " " + facts["form"])


def permuted() -> hw.Pathways:
    """Trace the pathways of SmolLM2's answers to HotpotQA, the labels dealt out again among them."""
    answers = hw.AnsweredQuestions.load("runs/smollm2/answers").select("hotpotqa")
    z = np.random.default_rng(0).permutation(answers.z)
    answers = replace(answers, table=answers.table.assign(z=z))
    return hw.trace_pathways(hw.load("smollm2"), answers, seeds=3, out="runs/smollm2/permuted")


def steered() -> Axes:
    """Add the difference of two countries at the last token, by dose, to prompts about others."""
    given, metric = pairs(), hw.logit_difference(" Paris", " Rome")
    states = model().cache(given["clean"][:2], sites=["resid_post"], layers=[3], positions="last")["resid_post", 3]
    direction, where = (states[0] - states[1])[-1], {"sites": "resid_post", "over": "layer", "positions": "last"}
    doses = {
        dose: hw.patch(
            model(), given["clean"][2:], **where, layers=[1, 3, 5], values=hw.add(dose * direction), metric=metric
        )
        for dose in (-2, -1, 0, 1, 2)
    }
    return hw.figures.dose_response(doses)


def growth() -> Figure:
    """Draw how the time of calls grows with each size, from what the benchmark measured on two cores."""
    rows = json.loads((DOCS.parent / "benchmarks/results/x86_64-cpu-growth.json").read_text())["rows"]
    found = pd.DataFrame([(*row["name"].removeprefix("growth: ").rsplit(", ", 1), row["headwater_s"]) for row in rows])
    found[["axis", "value"]] = found[1].str.split(" ", expand=True)
    with style():
        figure, panels = plt.subplots(1, 4, figsize=(7, 2.4), sharey=True, layout="constrained")
        for panel, (axis, here) in zip(panels, found.groupby("axis", sort=False), strict=True):
            for (name, line), marker in zip(here.groupby(0, sort=False), "osD^vP", strict=True):
                panel.loglog(line["value"].astype(int), line[2], marker=marker, markersize=3, linewidth=1, label=name)
            ticks = here["value"].drop_duplicates()
            panel.set_xticks(ticks.astype(int), [f"{int(one):,}" for one in ticks], rotation=30)
            panel.set_xticks([], minor=True)
            panel.set_xlabel(axis)
        panels[0].set_ylabel("seconds of a call")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


FIGURES: dict[str, Callable] = {
    "growth": growth,
    "attention": lambda: model().cache(ASK.format("France"), sites=["pattern"]).plot(heads=[(0, 14), (1, 3), (4, 15)]),
    "steering": steered,
    "evidence": lambda: hw.evidence(hw.load("smollm2"), "country_to_capital"),
    "head_map": lambda: hw.classify_heads(model()),
    "attention_behaviour": lambda: hw.attention_behaviour(model()),
    "head_sensitivity": lambda: hw.classify_heads(model()).sensitivity(),
    "correlations": lambda: dynamic_scores(model(), few_heads(), relations=few_relations()),
    "ablation": ablated,
    "patch": lambda: hw.patch(model(), **pairs(), sites="resid_pre"),
    "lenses": lambda: hw.lens(model(), ASK.format("France"), progress=False),
    "direct_attribution": lambda: hw.direct_logit_attribution(
        model(), ASK.format("France"), tokens=(" Paris", " Rome"), progress=False
    ),
    "probes": probed,
    "edges": edges,
    "circuit": lambda: edges().circuit(20),
    "composition": lambda: composition_scores(model()),
    "circuit_vectors": lambda: singular_vectors(model(), 1, 6),
    "knockout": knocked_out,
    "answers": answered,
    "delta_p": traced,
    "saliency": seen_by_probe,
    "detection": lambda: hw.detect(model(), answered(), token="before_answer", seeds=1),
    "memorization": lambda: hw.memorization(model(), hw.load_depth_graph(), controls=False),
    "membership": membership,
    "real_heads": lambda: hw.figures.head_maps([hw.HeadMap.load(f"runs/{name}/heads") for name in REAL]),
    "real_permuted": permuted,
    "real_delta_p": lambda: hw.figures.delta_p([hw.Pathways.load(f"runs/{name}/pathways") for name in REAL]),
    "real_depth": lambda: hw.figures.depth_profiles(
        [hw.DepthProfile.load(f"runs/{name}/depth/profile") for name in REAL]
    ),
    "real_saliency": lambda: hw.figures.saliency(
        [hw.Saliency.load(f"runs/{name}/saliency") for name in REAL], target="logit"
    ),
}


def main() -> None:
    """Draw the figures named, or all but those of `real_`."""
    for name in sys.argv[1:] or [name for name in FIGURES if not name.startswith("real_")]:
        made = FIGURES[name]()
        drawn = made if isinstance(made, Axes | Figure) else made.plot()
        print(*save_figure(drawn, DOCS / "figures" / name, ("png",)), flush=True)


if __name__ == "__main__":
    main()
