"""Nodes: single activations of one prompt, by site, layer, token, head and attended token; as edits, with names.

    {"site": "resid_pre", "layer": 3, "position": 5}                           a cell: what stands at one token
    {"site": "z", "layer": 3, "head": 2}                                       a head, at every token
    {"site": "z", "layer": 3, "head": 2, "position": 5}                        a head at one token
    {"site": "pattern", "layer": 3, "head": 2, "position": 5, "key": 2}        an attention edge: token 5 reads token 2

What is not named is covered whole. A node may be a name too (`headwater.models.part_names`): "9.2" and "L9H2" are the z
of a head, "9.2.q" its query, "m9" the output of an MLP, and "blocks.3.hook_resid_pre" the site of this hook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from headwater.errors import InputError, did_you_mean
from headwater.models.hooked import HookedModel
from headwater.models.part_names import part_named
from headwater.models.positions import Prompt
from headwater.models.sites import SITES, Site, place_named, sites_named
from headwater.options import is_one, shown, whole_number
from headwater.patching.variants import Replace


@dataclass(frozen=True)
class Node:
    """One activation, or what is meant of it; None is all of it."""

    site: str
    layer: int
    position: int | None = None
    """The token; of a pattern, the one that reads."""
    head: int | None = None
    """Key-value heads for the sites `k` and `v`."""
    key: int | None = None
    """Of a pattern, the token that is read."""

    def edit(self, since: int) -> Replace:
        """Return the edit that replaces it; before the token `since` its values are its own."""
        at, of, to = (None if one is None else (one,) for one in (self.position, self.head, self.key))
        return Replace(SITES[self.site], range(self.layer, self.layer + 1), at, of, to, since=since)

    def described(self) -> dict[str, str | int]:
        """Return it as `read_nodes` takes it."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def __str__(self) -> str:
        called = f"{self.site} {self.layer}" + ("" if self.head is None else f".{self.head}")
        at = "" if self.position is None else f" @{self.position}"
        return called + at + ("" if self.key is None else f" <- {self.key}")


def read_nodes(model: HookedModel, given: object, prompts: Sequence[Prompt]) -> tuple[Node, ...]:
    """Read nodes that are to be changed together.

    Args:
        model: whose activations they are.
        given: a list of nodes, or of mappings with `site`, `layer` and, as far as meant, `position`, `head`, `key`.
        prompts: those that are edited: every one must have the tokens.

    Raises:
        InputError: there is no such site, layer, token or head, the site has none of it, or a node stands twice.
    """
    if is_one(given):
        raise InputError(
            f"together={shown(given)} holds no nodes: give a list, as in "
            "[{'site': 'z', 'layer': 0, 'head': 1}, {'site': 'resid_pre', 'layer': 2, 'position': 3}]."
        )
    length = min(map(len, prompts))
    found = tuple(_read(model, one, length) for one in given)  # type: ignore[attr-defined]
    if not found:
        raise InputError("together= is empty: name at least one node.")
    if twice := [node for node in found if found.count(node) > 1]:
        raise InputError(f"The node {twice[0]} is named twice.")
    return found


def set_name(nodes: Sequence[Node]) -> str:
    """Return what some nodes are called together."""
    return " + ".join(map(str, nodes)) if len(nodes) <= 4 else f"{len(nodes)} nodes from {nodes[0]} to {nodes[-1]}"


def _read(model: HookedModel, given: object, length: int) -> Node:
    known = [field.name for field in fields(Node)]
    given = _by_name(model, given) if isinstance(given, str | tuple) else given
    if not isinstance(given, Node | Mapping):
        raise InputError(f"{shown(given)} is no node: give a mapping such as {{'site': 'z', 'layer': 0, 'head': 1}}.")
    asked = given.described() if isinstance(given, Node) else {str(k): v for k, v in given.items() if v is not None}
    if unknown := [name for name in asked if name not in known]:
        said = did_you_mean(unknown[0], known)
        raise InputError(f"A node has no {shown(unknown[0])}; it has {', '.join(known)}.{said}")
    if absent := [name for name in known[:2] if name not in asked]:
        raise InputError(f"The node {shown(dict(asked))} names no {absent[0]}.")
    (site,) = _site(asked.pop("site"), model)
    shape = model.shape
    counts = {"layer": shape.n_layers, "position": length, "key": length}
    counts |= {"head": site.n_heads(shape)} if site.has_heads else {}
    for axis in asked:
        if axis not in site.swept_axes:
            raise InputError(f"A node of {site.name} has no {axis}; it has {', '.join(site.swept_axes)}.")
    node = Node(site.name, **{axis: _within(value, counts[axis], axis, site) for axis, value in asked.items()})
    site.among([node.layer], model, edited=True)
    return node


def _by_name(model: HookedModel, name: Any) -> dict[str, Any]:
    """Return the node of a name."""
    if isinstance(name, str) and (place := place_named(name)) is not None:
        return {"site": place[0].name, "layer": place[1]}
    kind, layer, head, _ = part_named(name, model.shape)
    site = {"head": "z", "mlp": "mlp_out"}.get(kind, kind)
    if layer is None or site not in SITES:
        raise InputError(f"{shown(name)} is not a node with a layer; give one such as '9.2', 'm9' or a mapping.")
    return {"site": site, "layer": layer, "head": head}


def _site(name: object, model: HookedModel) -> tuple[Site, ...]:
    if not isinstance(name, str):
        raise InputError(f"The site of a node is its name, not {shown(name)}. Valid: {', '.join(SITES)}.")
    return sites_named(name, model)


def _within(value: object, count: int, axis: str, site: Site) -> int:
    try:
        number = whole_number(value)
    except TypeError:
        raise InputError(f"The {axis} of a node is a whole number, not {shown(value)}.") from None
    if not -count <= number < count:
        raise InputError(f"There is no {axis} {number} of {site.name}; they are 0 to {count - 1}.")
    return number % count
