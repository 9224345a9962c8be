"""Results of random numbers, for figures and folders."""

import dataclasses
import zlib

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headwater.heads.categories import CATEGORIES, add_excess, label_of
from headwater.heads.head_map import HeadMap
from headwater.likelihood.profile import DepthProfile
from headwater.likelihood.statistics import EMPTY, TextStatistics
from headwater.pathways.attention_saliency import COLUMNS, TARGETS, Saliency
from headwater.runs.record import RunRecord
from headwater.runs.result import Result
from tests import chance


def map_of(title: str, categories: pd.DataFrame, table: pd.DataFrame) -> HeadMap:
    """What the figure needs of a head map."""
    run = RunRecord("classify_heads", title, "abc", "float32", "cpu", {"rule": "controlled"})
    return HeadMap(table, categories, pd.DataFrame(), pd.DataFrame(), run)


def random_map(n_layers: int, n_heads: int, title: str = "model", share: float = 0.3) -> HeadMap:
    rng = chance.rng()
    rows = []
    for layer in range(n_layers):
        for head in range(n_heads):
            categories = tuple(name for name in CATEGORIES if rng.random() < share)
            rows.append((layer, head, categories, label_of(categories)))
    categories = pd.DataFrame(rows, columns=["layer", "head", "categories", "label"])
    table = categories[["layer", "head"]].assign(
        excess=rng.uniform(0.15, 1, len(rows)), implemented=categories["label"] != "unclassified"
    )
    return map_of(title, categories, table.assign(suppression_excess=0.0, suppressed=False))


def made_up_saliency(datasets=("TriviaQA", "NQ"), n=60, model="org/tiny", scale=1e-3):
    """Random saliencies; E_Q→* four times as large as E_Q→E_A, cross-entropy half of the logit."""
    parts, rng = [], chance.rng()
    for name in datasets:
        flow = scale * rng.gamma(3, size=n)
        for target in TARGETS:
            values = flow * (0.5 if target == "cross_entropy" else 1)
            parts.append(
                pd.DataFrame(
                    {"dataset": name, "example": range(n), "target": target, "z": np.arange(n) % 2, "probability": 0.5}
                    | {"logit": np.arange(n) % 2 - 0.5, COLUMNS[0]: values, COLUMNS[1]: 4 * values}
                )
            )
    run = RunRecord("saliency", model, "0", "float32", "cpu", {"probe": {}})
    return Saliency(pd.concat(parts, ignore_index=True), pd.DataFrame(), "cross_entropy", run)


def made_up_profile(rng, name="tiny", graphs=12, layers=(0, 1), token=" x"):
    """A profile of random numbers."""
    rows = [
        {"group": str(g), "id": f"{g}_d{depth}_n{i}", "depth": depth, "question": f"{g} {depth} {i}?", "answer": "a"}
        for g in range(graphs)
        for depth, count in ((1, 3), (2, 2), (3, 1))
        for i in range(count)
    ]
    table = pd.DataFrame(rows)
    table["min_k_0.2"] = -rng.exponential(3, len(table))
    table["gap"] = np.where(table["depth"] == 3, rng.normal(0, 0.4, len(table)), np.nan)
    deep = -table["min_k_0.2"].where(table["depth"] == 3)
    table["quartile"] = np.select([deep <= deep.quantile(0.25), deep >= deep.quantile(0.75)], [25, 75], 0)
    table["note"] = ""
    averages = table.groupby(["group", "depth"])["min_k_0.2"].mean().reset_index()
    curves = pd.DataFrame(
        [
            {
                "layer": layer,
                "depth": depth,
                "score": "min_k_0.2",
                "value": value,
                "low": value - 0.2,
                "high": value + 0.1,
            }
            for layer in layers
            for depth, value in zip((1, 2, 3), -rng.exponential(3, 3), strict=True)
        ]
    )
    tokens = pd.DataFrame(
        [
            {"id": name, "position": p, "token": token, "log_probability": -rng.exponential(4), "lowest": p == 2}
            for name in table["id"]
            for p in range(1, 6)
        ]
    )
    run = RunRecord("memorization", name, "0", "float32", "cpu", {"k": [0.2], "aggregate": "group", "answers": "data"})
    return DepthProfile(table, averages, curves, pd.DataFrame(), pd.DataFrame(), tokens, run)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Sample(Result):
    table: pd.DataFrame
    effects: Tensor
    note: str
    run: RunRecord


def record(**changes) -> RunRecord:
    plain = {"analysis": "sample", "model": "some/model", "fingerprint": "abc", "dtype": "float32", "device": "cpu"}
    return RunRecord(**plain | {"options": {"k": 10, "names": ["a", "b"], "share": 0.15, "none": None}} | changes)


def sample(run: RunRecord | None = None) -> Sample:
    rng = chance.rng()
    table = pd.DataFrame(
        {
            "layer": np.arange(6) // 2,
            "score": rng.random(6),
            "p_value": [np.nan, *rng.random(5)],
            "name": list("abcdeé"),
            "categories": [(), ("x",), ("x", "y"), (), ("z",), ()],
            "found": rng.random(6) < 0.5,
        }
    )
    return Sample(table, torch.randn(2, 3, dtype=torch.float64).T, "a note, é", run or record())


def run_record(**options):
    return RunRecord("token_statistics", "made up", "0", "float32", "cpu", options)


def made_up_statistics(lengths, rng, contents=None, certain=0.1):
    """Statistics of texts of these many scored tokens, drawn at random; some positions are certain (variance 0)."""
    rows = []
    for text, length in enumerate(lengths):
        for position in range(1, length + 1):
            top = -rng.exponential(0.7)
            variance = 0.0 if rng.random() < certain else rng.exponential(2)
            log_p = top - rng.choice([0, 1]) * rng.exponential(3)
            rows.append((text, position, " x", 7, log_p, rng.exponential(2), variance, top, int(rng.integers(50))))
    columns = ["text", "position", "token", "token_id", "log_probability", "entropy", "variance"]
    table = pd.DataFrame(rows, columns=[*columns, "top1_log_probability", "rank"])
    contents = contents or [f"Text {i} " + "ab" * int(rng.integers(20)) for i in range(len(lengths))]
    texts = pd.DataFrame(
        {
            "text": range(len(lengths)),
            "content": contents,
            "zlib_bytes": [len(zlib.compress(c.encode())) for c in contents],
            "tokens": lengths,
            "scored": lengths,
            "windows": 1,
            "note": ["" if length else EMPTY for length in lengths],
        }
    )
    return TextStatistics(table, texts, run_record())


def made_up_table(n_heads: int, seed: int) -> pd.DataFrame:
    """A score table of random heads of one layer, a relation per category and one without."""
    rng = np.random.default_rng(seed)
    names = [(head, category) for head in range(n_heads) for category in (*CATEGORIES, None)]
    table = pd.DataFrame(names, columns=["head", "category"]).assign(layer=0)
    for prefix, sign in (("", "score"), ("suppression_", "suppression")):
        table[sign] = rng.uniform(0, 0.6, len(table))
        table[f"{prefix}expected"] = rng.uniform(0, 0.3, len(table))
        table[f"{prefix}q_value"] = rng.choice([0.01, 0.2], len(table))
        table[f"{prefix}beyond_copying"] = table[sign] * rng.choice([0.5, 1.0], len(table))
    return add_excess(table)
