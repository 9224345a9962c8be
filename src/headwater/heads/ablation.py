"""Does a relation need the heads that implement it? Ablate them; compare with random heads and with other relations.

Elhelo & Geva (ACL 2025), second experiment, with layer-matched random heads and a second way to ablate.

1. Each item becomes a prompt: some examples, then the source; the next token should be the target. The metrics are
   the accuracy (is the most likely token accepted?) and the logit difference (first accepted target minus a foil, the
   target of another item).
2. The relation's heads are ablated at the last position, strongest static score first: z is set to zero, or to its
   mean over the same prompts. First one head, then two, four, ..., all.
3. The same number of other heads, drawn at random from the same layers, is ablated instead, several times.
4. All the relation's heads are ablated on control relations: by default up to five whose heads overlap with the
   relation's by less than 15 % of its heads, and on which the model's accuracy is within 20 points.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.heads.causal import Heads, matched_sets, whole, without
from headwater.heads.head_map import HeadMap, relations_of
from headwater.heads.relations import TEMPLATE, Relations, task_prompts
from headwater.models.hooked import HookedModel
from headwater.options import checked_count, checked_name, checked_repeats, one_or_several
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, whole_summary

MAX_CONTROLS = 5
MAX_OVERLAP = 0.15
MAX_ACCURACY_GAP = 0.2


@dataclass(frozen=True, repr=False)
class HeadAblation(Result):
    """The result of `ablate_heads`; drawn as accuracy by number of ablated heads, beside random heads and controls."""

    table: pd.DataFrame
    """A row per run: `task` (the relation that the prompts ask), `role` ("relation" or "control"), `removed` ("none",
    "relation heads" or "random heads"), `draw` (number of the random set, else 0), `n_heads` (number ablated),
    `accuracy`, `logit_difference`, `items`."""
    heads: pd.DataFrame
    """The relation's heads in the order of ablation: `layer, head, score`."""
    relation: str
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Return a row per `role`, `n_heads` and `removed`: means and standard deviations over draws or controls."""
        grouped = self.table.groupby(["role", "n_heads", "removed"], sort=False)[["accuracy", "logit_difference"]]
        return grouped.mean().join(grouped.std().add_suffix("_sd")).reset_index()

    def report(self) -> list[str]:
        """Report the cost of ablating the relation's heads, compared with random heads and with controls."""
        rows = {(row["role"], row["removed"], row["n_heads"]): row for row in whole_summary(self).to_dict("records")}
        n_heads = len(self.heads)
        untouched, without = rows["relation", "none", 0], rows["relation", "relation heads", n_heads]
        sentences = [
            f"{self.relation}: ablating its {n_heads} head{'s' * (n_heads != 1)} changes the accuracy from "
            f"{untouched['accuracy']:.0%} to {without['accuracy']:.0%} and the logit difference from "
            f"{untouched['logit_difference']:.2f} to {without['logit_difference']:.2f}."
        ]
        if (random := rows.get(("relation", "random heads", n_heads))) is None:
            sentences.append("There is no random control, because these layers have no other heads to ablate.")
        else:
            sentences.append(
                f"Ablating as many random heads of the same layers gives accuracy {random['accuracy']:.0%} and logit "
                f"difference {random['logit_difference']:.2f} (means over draws)."
            )
        if (control := rows.get(("control", "relation heads", n_heads))) is None:
            sentences.append(
                "No other relation serves as a control, so it is unknown whether the loss is specific to this relation."
            )
        else:
            sentences.append(
                "On control relations, ablating the same heads changes the accuracy from "
                f"{rows['control', 'none', 0]['accuracy']:.0%} to {control['accuracy']:.0%} (means over them)."
            )
        return sentences


@checked_call
def ablate_heads(
    model: HookedModel,
    head_map: HeadMap,
    relation: str,
    *,
    relations: Relations = None,
    top: int | None = None,
    method: Literal["zero", "mean"] = "zero",
    template: str = TEMPLATE,
    shots: int = 3,
    draws: int = 5,
    controls: str | Sequence[str] | None = None,
    seed: int = 0,
    batch_size: int = 64,
    progress: bool = True,
    out: str | Path | None = None,
) -> HeadAblation:
    """Ablate a relation's heads and measure the loss, on the relation and on control relations.

    Args:
        model: the model that was classified.
        head_map: the map of which heads implement which relations.
        relation: the relation's name.
        relations: the relations that were passed to `classify_heads`, if any.
        top: number of heads to ablate, the largest scores first; default: all that implement the relation.
        method: "zero" or "mean".
        template: the prompt, with one `{source}` after a space (relations are about words after a space); the target
            follows it.
        shots: number of examples before each prompt.
        draws: number of random sets of heads, at most 1,000, matched by layer; all such sets if there are fewer.
        controls: names of control relations; by default they are chosen as in step 4 of the module's docstring.
        seed: seed of examples, foils and random heads.
        batch_size: number of prompts in a forward pass.

    Warns:
        UserWarning: the model without ablation answers no item correctly.
    """
    shots, draws = checked_count("shots", shots, least=0), checked_repeats("draws", draws)
    top = None if top is None else checked_count("top", top)
    tokenized = relations_of(model, head_map, relations)
    checked_name("relation", relation, list(tokenized))
    if controls is not None:
        others = [name for name in tokenized if name != relation]
        controls = list(dict.fromkeys(checked_name("controls", name, others) for name in one_or_several(controls)))
    rows = head_map.table[head_map.table["relation"] == relation]
    rows = rows[rows["implemented"]] if top is None else rows[rows["score"] > 0]
    if rows.empty:
        raise InputError(f"No head of {head_map.run.model} implements {relation!r}: pass top= to take the best ones.")
    # The strongest first; ties put the later layer and head first, as published.
    ranked = rows.sort_values(["score", "layer", "head"], ascending=False, ignore_index=True).head(top or len(rows))
    ranked = ranked[["layer", "head", "score"]]
    heads = [(int(layer), int(head)) for layer, head in zip(ranked["layer"], ranked["head"], strict=True)]
    if (compared := controls) is None:
        implementing = head_map.table[head_map.table["implemented"]].groupby("relation")
        of = {name: set(zip(some["layer"], some["head"], strict=True)) for name, some in implementing}
        own = of.get(relation, set())
        # The other relations whose heads overlap little with this relation's.
        most = MAX_OVERLAP * max(len(own), 1)
        compared = [name for name in tokenized if name != relation and len(own & of.get(name, set())) < most]
    names = [relation, *compared]
    tasks = {name: task_prompts(model, tokenized[name][0], template, shots, seed) for name in names}
    random = matched_sets(model, heads, draws, seed)
    options: dict[str, Any] = {"relation": relation, "top": top, "method": method, "template": template, "shots": shots}
    options |= {"draws": draws, "controls": controls, "head_map": head_map}

    def work(run: Run) -> HeadAblation:
        def measured(
            stage: str, ablations: Sequence[tuple[str, Mapping[str, Heads]]]
        ) -> list[Float[ndarray, "set metric"]]:
            """Measure each task once per set of ablated heads, or without ablation if it has no sets."""

            def compute(ablation: tuple[str, Mapping[str, Heads]]) -> dict[str, Tensor]:
                task = tasks[ablation[0]]
                if not ablation[1]:
                    return {"measured": torch.from_numpy(whole(model, task, batch_size).mean(1)[None])}
                by_set = without(model, task, ablation[1], method, batch_size)
                return {"measured": torch.tensor(np.stack([by_set[name].mean(1) for name in ablation[1]]))}

            with run.bar("Ablating heads", "run", len(ablations)) as bar:
                return [piece["measured"].numpy() for piece in run.pieces(stage, ablations, compute, bar)]

        base = dict(zip(names, measured("whole", [(name, {}) for name in names]), strict=True))
        accuracy = {name: values[0, 0] for name, values in base.items()}
        if accuracy[relation] == 0:
            warnings.warn(
                f"{model.name} answers none of the {len(tasks[relation].batch):,} items of {relation!r} correctly when "
                f"asked {template!r} after {shots} examples: accuracy is already 0. Give a template= that it "
                "understands.",
                stacklevel=6,
            )
        # Relations of similar accuracy, the most similar first.
        gaps = {name: abs(of_it - accuracy[relation]) for name, of_it in accuracy.items() if name != relation}
        near = sorted((name for name, gap in gaps.items() if gap < MAX_ACCURACY_GAP), key=gaps.__getitem__)
        chosen = list(controls) if controls is not None else near[:MAX_CONTROLS]
        # 1, 2, 4, ..., all heads: the whole curve in few runs.
        sizes = sorted({min(2**power, len(heads)) for power in range(len(heads).bit_length() + 1)})
        ablations = [(relation, _sets(heads, random, size)) for size in sizes]
        ablations += [(control, _sets(heads, [], len(heads))) for control in chosen]
        removed: list[tuple[str, Mapping[str, Heads]]] = [(name, {"none": ()}) for name in (relation, *chosen)]
        numbers = [*(base[name] for name in (relation, *chosen)), *measured("removed", ablations)]
        rows = [
            {
                "task": task, "role": "relation" if task == relation else "control", "removed": name.partition(" #")[0],
                "draw": int(name.partition(" #")[2] or 0), "n_heads": len(part), "accuracy": values[0],
                "logit_difference": values[1], "items": len(tasks[task].accepted),
            }
            for (task, sets), measures in zip([*removed, *ablations], numbers, strict=True)
            for (name, part), values in zip(sets.items(), measures.tolist(), strict=True)
        ]  # fmt: skip
        return HeadAblation(pd.DataFrame(rows), ranked, relation, run.record)

    return run_or_resume(HeadAblation, "ablate_heads", model, options, work, out=out, seed=seed, progress=progress)


def _sets(heads: Heads, random: Sequence[Heads], size: int) -> dict[str, Heads]:
    """Return the first `size` of the relation's heads and of each random set, by name."""
    return {"relation heads": heads[:size]} | {f"random heads #{draw}": one[:size] for draw, one in enumerate(random)}
