"""The view of a head map: layer by head; hover for a head's relations, filter by category, colour by one relation."""

from __future__ import annotations

import numpy as np

from headwater.figures.head_map import mark_of
from headwater.heads.categories import label_counts
from headwater.heads.head_map import HeadMap
from headwater.runs.result import VIEWS
from headwater.runs.view import View
from headwater.views.interactive import interactive, packed


@VIEWS.add(HeadMap)
def view_head_map(head_map: HeadMap) -> View:
    """Show every head's label and its score, expected score, excess and q on every relation."""
    return interactive(head_map, "head_map.js", spec_of(head_map))


def spec_of(head_map: HeadMap) -> dict[str, object]:
    """Return what the script draws: numbers by layer, head and relation, and a name, colour and shape by label."""
    table, categories = head_map.table, head_map.categories
    relations = list(dict.fromkeys(table["relation"]))
    layers, heads = (int(categories[name].max()) + 1 for name in ("layer", "head"))
    counts = label_counts(categories)
    known = [label for label, count in counts.items() if count]
    place = tuple(table[name].to_numpy() for name in ("layer", "head")), table["relation"].map(relations.index)
    numbers = {}
    for column in ("score", "expected", "q_value"):
        numbers[column] = np.full((layers, heads, len(relations)), np.nan)
        numbers[column][(*place[0], place[1].to_numpy())] = table[column].to_numpy(dtype=float)
    label = np.zeros((layers, heads))
    label[categories["layer"], categories["head"]] = categories["label"].map(known.index)
    marks = {name: mark_of(name) for name in known}
    return {
        "title": f"Heads of {head_map.title}, {head_map.run.options['rule']} rule",
        "layers": layers,
        "heads": heads,
        "relations": relations,
        "labels": [
            {"name": name, "color": marks[name][0], "shape": marks[name][1], "count": counts[name]} for name in known
        ],
        "label": packed(label, "u1"),
        "score": packed(numbers["score"], "f4"),
        "expected": packed(numbers["expected"], "f4"),
        "q": packed(numbers["q_value"], "f2"),
    }
