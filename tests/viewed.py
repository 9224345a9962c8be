"""A result of each kind that has a view, made once in a process, and what a page holds."""

import base64
import json
import re
import zlib
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest

import headwater as hw
from headwater.causes import weights_to_cause
from headwater.heads.causal import COLUMNS
from tests import chance
from tests.tiny import embedded

HOSTILE = ["</script><script>window.PWNED=1</script>", "<img src=x onerror=alert(1)>", "<!--", "&amp;"]
HOSTILE += ["\0", "\u202ex", " ", "", "'", "{{7*7}}"]
PAIR = "Q: What is the capital of France?\nA:", "Q: What is the capital of Italy?\nA:"


RELATIONS = ["letter_to_next", "sequence_to_next", "year_to_next", "country_to_capital", "city_to_state"]
RELATIONS += ["name_copying", "verb_to_past", "adjective_to_adverb", "english_to_portuguese", "tool_to_job"]


@cache
def swept():
    metric = hw.logit_difference(" Paris", " Rome")
    clean, corrupted = [PAIR[0]] * 2, [PAIR[1], PAIR[1]]
    return hw.patch(embedded(), clean, corrupted, sites=["z", "resid_pre"], metric=metric, progress=False)


@cache
def mapped():
    return hw.classify_heads(embedded(), relations=RELATIONS, rule="published", progress=False)


@cache
def attended():
    return embedded().cache(list(PAIR), sites=["pattern", "resid_pre"], layers=[1, 3], progress=False)


@cache
def read():
    texts = [PAIR[0], "", "The capital of Italy is Rome."]
    return hw.token_statistics(embedded(), texts, layers=[1, -1], progress=False)


@cache
def answered():
    return hw.answer(embedded(), hw.load_questions("natural", sample=100), progress=False)


@cache
def traced():
    return hw.trace_pathways(embedded(), answered(), token="before_answer", seeds=1, progress=False)


@cache
def profiled():
    graph = hw.load_depth_graph()
    few = replace(graph, table=graph.table.head(90))
    return hw.memorization(embedded(), few, controls=False, layers=[0, -1], progress=False)


@cache
def wired():
    metric = hw.logit_difference(" Paris", " Rome")
    clean = [PAIR[0], PAIR[0].replace("France", "Spain")]
    return hw.edges(embedded(), clean, [PAIR[1]] * 2, metric=metric, receivers=["mlp", "logits"], progress=False)


@cache
def evident():
    """Compared with three other relations: eight take as long as all views besides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_to_cause, "OTHERS", 3)
        return hw.evidence(embedded(), "country_to_capital", pairs=6, draws=20, progress=False)


SHOWN = {
    "edges": wired,
    "evidence": evident,
    "heads": mapped,
    "sweep": swept,
    "attention": attended,
    "likelihood": read,
    "pathways": traced,
    "memorization": profiled,
}


@cache
def viewed(kind):
    """The view of each kind of result, made once."""
    return SHOWN[kind]().view()


def spec_in(view):
    """What the page hands its script."""
    found = re.search(r'<script type="application/json" id="spec">(.*?)</script>', view.page, re.DOTALL)
    return json.loads(found[1])


def unpacked(one):
    raw = base64.b64decode(one["data"])
    raw = zlib.decompress(raw) if one["deflate"] else raw
    return np.frombuffer(raw, f"<{one['dtype']}").reshape(one["shape"])


@cache
def controlled():
    """A map with a null model, of which some heads are said to be used."""
    found = hw.classify_heads(embedded(), relations=RELATIONS, progress=False)
    called = found.table["implemented"] | found.table["suppressed"]
    used = pd.Series(chance.rng().random(len(found.table)) < 0.5, dtype="boolean").mask(~called)
    loss = pd.Series(chance.rng().normal(size=len(found.table))).where(called)
    measured = dict.fromkeys(COLUMNS, loss) | {"used": used, "loss_q_value": loss.abs().clip(0, 1)}
    return replace(found, table=found.table.assign(**measured))


@cache
def circuit():
    return wired().circuit(60)


def of_shape(layers, heads):
    """The view of a map of so many heads, with 62 relations."""
    small, rng = controlled(), chance.rng()
    places = pd.MultiIndex.from_product([range(layers), range(heads)], names=["layer", "head"]).to_frame(index=False)
    first = small.table.query("layer == 0 and head == 0").drop(columns=["layer", "head"])
    more = [first.assign(relation=first["relation"] + str(i)) for i in range(62 // len(first) + 1)]
    table = places.merge(pd.concat(more).head(62), how="cross")[small.table.columns]
    table["score"] = rng.integers(0, 120, len(table)) / 120
    categories = places.assign(label="unclassified", categories=[()] * len(places))
    return replace(small, table=table, categories=categories).view()
