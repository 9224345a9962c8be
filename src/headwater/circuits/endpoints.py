"""Ends of paths: nodes of a graph one by one, or several together.

What is named by a text is each node of that name by itself ("head 9.9" one, "head 9" every head of layer 9), also in a
list. A list within the list is taken together, and so is what a mapping gives under a name:

    senders=["head 9.9", "head 9.6"]                          two senders
    receivers=[["q 9.9", "q 10.0"], "logits"]                 two receivers, the first of two nodes together
    receivers={"movers": ["q 9.9", "q 10.0"]}                 one, under a name of its own
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headwater.circuits.graph import Graph, Indices, Nodes
from headwater.errors import InputError
from headwater.models.part_names import read_part
from headwater.options import has_no_order, is_one, shown


def ends_named(graph: Graph, nodes: Nodes, option: str, given: object) -> dict[str, Indices]:
    """Return by name the nodes that are taken together; of None, every node by itself.

    Args:
        graph: whose nodes.
        nodes: its senders or receivers.
        option: the name of the option, for messages.
        given: see the first lines of this file.

    Raises:
        InputError: a name is none of the nodes', a set is empty, or the logits are taken together with others.
    """
    ends: dict[str, Indices] = {}
    for name, several in _several(nodes, option, given):
        found = graph.find(nodes, several)
        if name is not None:
            ends[name] = _together(nodes, name, found)
            continue
        ends |= {nodes.name(index): np.array([index]) for index in found}
    return ends


def _several(nodes: Nodes, option: str, given: Any) -> list[tuple[str | None, list[Any]]]:
    """Return lists of names, each with the name of what they are together, None where each is by itself."""
    if given is None:
        return [(None, list(nodes.kinds))]
    if isinstance(given, Mapping):
        if not given or not all(isinstance(name, str) and name for name in given):
            raise InputError(f"{option}={shown(given)} does not map names to the nodes that are taken together.")
        return [(name, _listed(option, name, some)) for name, some in given.items()]
    if isinstance(given, str):
        return [(None, [given])]
    if is_one(given) or has_no_order(given):
        raise InputError(f"{option}={shown(given)} must be a name such as 'mlp 0', a list of names, or a mapping.")
    if not (items := list(given)):
        raise InputError(f"{option} is an empty list; leave it out for all.")
    return [
        (None, [item])
        if is_one(item) or read_part(item)
        else (" + ".join(map(str, _listed(option, "a set", item))), list(item))
        for item in items
    ]


def _listed(option: str, name: str, some: Any) -> list[Any]:
    """Return what is taken together as a list."""
    if not isinstance(some, str) and (is_one(some) or isinstance(some, Mapping)):
        raise InputError(f"{option}: {name} is {shown(some)}; give a name such as 'mlp 0', or a list of names.")
    if not (found := [some] if isinstance(some, str) else list(some)):
        raise InputError(f"{option}: {name} is empty.")
    return found


def _together(nodes: Nodes, name: str, found: Indices) -> Indices:
    if len(found) > 1 and "logits" in nodes.kinds and len(nodes) - 1 in found:
        raise InputError(
            f"The receivers {shown(name)} hold the logits with others. The logits read all that others change: take "
            "them by themselves."
        )
    return found
