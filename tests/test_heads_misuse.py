"""Whatever is given to the functions about heads, a user without a type checker gets a result or one readable line."""

import subprocess
import sys
from pathlib import Path

CODE = """
import numpy as np
import torch

import headwater as hw
from headwater.heads.ablation import ablate_heads
from headwater.heads.coverage import relation_coverage
from headwater.heads.patterns import attention_classes
from headwater.heads.salient import salient_operations
from headwater.heads.validation import dynamic_scores
from headwater.models.weights import open_weights

model = hw.load()
(whole,) = hw.load_relations("number_to_next")
known = hw.Relation("next", "algorithmic", whole.pairs)
given = {"relations": [known], "progress": False}
heads = hw.classify_heads(model, k=np.int64(10), threshold=np.float32(0.15), **given)
pair = [("a", "b")]
calls = {
    "rule": lambda x: hw.classify_heads(model, rule=x, **given),
    "k": lambda x: hw.classify_heads(model, k=x, **given),
    "threshold": lambda x: hw.classify_heads(model, threshold=x, **given),
    "embedding": lambda x: hw.classify_heads(model, embedding=x, **given),
    "multi_token": lambda x: hw.classify_heads(model, multi_token=x, **given),
    "relations": lambda x: hw.load_relations(x),
    "name": lambda x: hw.Relation(x, None, pair),
    "category": lambda x: hw.Relation("r", x, pair),
    "pairs": lambda x: hw.Relation("r", None, x),
    "pair": lambda x: hw.Relation("r", None, [x]),
    "source": lambda x: hw.Relation("r", None, [(x, "b")]),
    "target": lambda x: hw.Relation("r", None, [("a", x)]),
    "covered": lambda x: relation_coverage(x, model.tokenizer),
    "tokenizer": lambda x: relation_coverage([known], x),
    "layer": lambda x: heads.salient(x, 0, model=model),
    "head": lambda x: heads.salient(0, x, model=model),
    "sources": lambda x: heads.salient(0, 0, model=model, sources=x),
    "read": lambda x: salient_operations(open_weights(model), 1, 0, embedding=x),
    "attended": lambda x: attention_classes(x),
    "sequences": lambda x: attention_classes(model, sequences=x),
    "called from": lambda x: attention_classes(model, threshold=x),
    "run": lambda x: dynamic_scores(x, heads, **given),
    "map": lambda x: dynamic_scores(model, x, **given),
    "templates": lambda x: dynamic_scores(model, heads, templates=x, **given),
    "bos": lambda x: dynamic_scores(model, heads, templates="The {source} is", bos=x, **given),
    "relation": lambda x: ablate_heads(model, heads, x, **given),
    "controls": lambda x: ablate_heads(model, heads, "next", controls=x, top=1, **given),
    "seed": lambda x: ablate_heads(model, heads, "next", seed=x, top=1, draws=1, controls=[], **given),
    "axes": lambda x: heads.plot(x),
    "maps": lambda x: hw.figures.head_maps(x),
    "columns": lambda x: hw.figures.head_maps([heads], x),
}
wrong = [-1, 1.5, float("nan"), "", "\\ud800", b"x", [3], {"a": 1}, object(), "a" * 400, "\\0", torch.tensor(2.5), hw]
for name, call in calls.items():
    for value in wrong:
        try:
            call(value)
        except hw.HeadwaterError as error:
            if "\\n" in str(error) or not str(error).strip():
                print(name, ascii(value), "says", ascii(str(error)))
        except Exception as error:
            print(name, ascii(value), "raises", type(error).__name__, ascii(str(error)))
for call in (lambda: heads.salient("1", 0), lambda: hw.classify_heads(model, k=True, **given)):
    try:
        call()
    except hw.HeadwaterError:
        continue
    print("was accepted")
"""


def test_nothing_raw_comes_out_of_the_functions_about_heads():
    root = Path(__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=root)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
