"""How much of what the clean prompt does a circuit does alone, over prompts, beside random circuits of its shape.

    faithfulness f(C) = (m(C) - m(∅)) / (m(M) - m(∅))

with m(M) the clean run and m(∅) the empty circuit. Over prompts it is the ratio of the means, not the mean of ratios:
where a gap is near 0 a ratio explodes. f is not cut off: it is above 1 where edges that work against the answer are
left out, and below 0 where only these are in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray

from headwater.stats.resample import Draws, ends

RESAMPLES = 1000
Values = Float[ndarray, " example"]


def ratio_of_means(
    value: Float[ndarray, "example _"], clean: Values, corrupted: Values, *, seed: int = 0
) -> Float[ndarray, "draw _"]:
    """Return the faithfulness of circuits, a column each: over the prompts, and in draws of them with replacement."""
    draws = Draws.of(range(len(value)), draws=RESAMPLES if len(value) > 1 else 0, seed=seed)
    gap = np.repeat((clean - corrupted)[:, None], value.shape[1], 1)
    return np.asarray(draws.ratio(value - corrupted[:, None], gap))


def of_examples(value: Any, clean: Any, corrupted: Any, floor: object) -> object:
    """Return the faithfulness on each prompt; NaN where the gap is below what rounding makes."""
    gap = clean - corrupted
    wide = np.abs(gap) > floor
    return np.where(wide, (value - corrupted) / np.where(wide, gap, 1.0), np.nan)


def summarized(table: pd.DataFrame, level: float, seed: int) -> pd.DataFrame:
    """Summarize circuits over prompts: a row per circuit and metric, with its placebos beside it.

    Args:
        table: of `hw.run_circuits`, with the column `overlap`.
        level: of the interval.
        seed: of the bootstrap.
    """
    rows = []
    for (circuit, metric), part in table.groupby(["circuit", "metric"], sort=False):
        own = part[part["placebo"].isna()]
        clean, corrupted = own["clean"].to_numpy(), own["corrupted"].to_numpy()
        found = ratio_of_means(own["value"].to_numpy()[:, None], clean, corrupted, seed=seed)
        low, high = ends(found, level)
        drawn = part[part["placebo"].notna()]
        others = drawn.pivot_table(index="example", columns="placebo", values="value", sort=False)
        f = ratio_of_means(others.to_numpy(), clean, corrupted)[0] if len(drawn) else np.zeros(0)
        rows.append(
            {
                "circuit": circuit,
                "metric": metric,
                "edges": int(own["edges"].iloc[0]),
                "edges_on_a_path": int(own["edges_on_a_path"].iloc[0]),
                "examples": len(own),
                "value": float(own["value"].mean()),
                "faithfulness": float(found[0, 0]),
                "low": float(low[0]),
                "high": float(high[0]),
                "placebo": float(f.mean()) if len(f) else np.nan,
                "placebo_high": float(np.quantile(f, 0.95)) if len(f) else np.nan,
                "overlap": float(drawn["overlap"].mean()) if len(drawn) else np.nan,
                "p_value": (1 + int((f >= found[0, 0]).sum())) / (1 + len(f)) if len(f) else np.nan,
            }
        )
    return pd.DataFrame(rows)
