"""Edits of several components at once, as one cell: ablation of sets, and nodes (single activations) patched together.

A node is an activation, given by site, layer, token, head and attended token, as in `{"site": "resid_pre", "layer": 3,
"position": 5}`; an omitted field is covered whole. It may also be a name (`headwater.models.part_names`): "9.2" and
"L9H2" are the z of a head, "9.2.q" its query, "m9" the output of an MLP, and "blocks.3.hook_resid_pre" the site of this
hook.

A set contains heads (z of query heads, also where these share keys and values), MLPs, neurons (mlp_post) and features
of dictionaries. Its complement contains every other component of the kinds that were named; an empty list names a kind
too.

Effects do not add up, so the joint effect of two heads is measured jointly. Knockout of whole circuits (Wang et al.
2023; Chan et al. 2022, resampling; Li and Janson 2024, on the choice of values) uses, for each set and prompt, one run
in which every component of the set is replaced at once, in all its layers. If the complement is replaced, the run shows
what the set does alone.

    effect = metric of the edited run - metric of the unedited run

All sets go through the layers together (`headwater.patching.walk`): later components of a set are replaced in the run
that results from replacing the earlier ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from headwater.calls import checked_call
from headwater.errors import InputError, did_you_mean
from headwater.models.dictionaries import Features
from headwater.models.hooked import HookedModel
from headwater.models.part_names import part_named, parts_of_kind, read_part, within
from headwater.models.positions import Prompt, Where
from headwater.models.sites import SITES, place_named, sites_named
from headwater.options import (
    checked_several,
    is_one,
    one_or_several,
    shown,
    whole_number,
)
from headwater.patching.edits import CellTable, CellTemplate, Edit, ReplacementSpec, refuse_too_many_cells
from headwater.patching.metrics import Measures, as_metrics
from headwater.patching.plan import Plan, recorded_roles
from headwater.patching.prompts import Prompts, read_prompt_pair, refuse_columns_as_answers, seen_positions
from headwater.patching.replacements import Replacement, TensorLike, ValueName, build_replacement
from headwater.patching.sweep import Sweep, run_sweep


@dataclass(frozen=True)
class ActivationNode:
    """One activation, or a part of it; None means all of an axis."""

    site: str
    layer: int
    position: int | None = None
    """The token; in a pattern, the query token. Negative counts from the end, in prompts of different lengths."""
    head: int | None = None
    """The head; for the sites `k` and `v` the key-value head."""
    key: int | None = None
    """In a pattern, the key token."""

    def in_prompt(self, length: int) -> ActivationNode:
        """Return the node with its position and key counted from the beginning of a prompt of this length."""
        position, key = (None if one is None else one % length for one in (self.position, self.key))
        return replace(self, position=position, key=key)

    def edit(self, since: int, sample: int = 0) -> Edit:
        """Return the edit that replaces the node; before the token `since` the new values equal the old ones."""
        at, of, to = (None if one is None else (one,) for one in (self.position, self.head, self.key))
        return Edit(SITES[self.site], range(self.layer, self.layer + 1), at, of, to, since=since, sample=sample)

    def described(self) -> dict[str, str | int]:
        """Return the node as a mapping that `read_nodes` accepts."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def __str__(self) -> str:
        called = f"{self.site} {self.layer}" + ("" if self.head is None else f".{self.head}")
        at = "" if self.position is None else f" @{self.position}"
        return called + at + ("" if self.key is None else f" <- {self.key}")


def read_nodes(model: HookedModel, listed: object, prompts: Sequence[Prompt]) -> tuple[ActivationNode, ...]:
    """Read nodes to change together: a list of nodes, of their names, or of mappings with their fields."""
    if is_one(listed):
        raise InputError(
            f"together={shown(listed)} holds no nodes: give a list, as in "
            "[{'site': 'z', 'layer': 0, 'head': 1}, {'site': 'resid_pre', 'layer': 2, 'position': 3}]."
        )
    lengths = {len(prompt) for prompt in prompts}
    nodes = tuple(_read_node(model, one, lengths) for one in listed)  # type: ignore[attr-defined]
    if not nodes:
        raise InputError("together= is empty: name at least one node.")
    for length in lengths:
        places = [node.in_prompt(length) for node in nodes]
        if twice := [node for node, place in zip(nodes, places, strict=True) if places.count(place) > 1]:
            raise InputError(f"The node {twice[0]} is named twice.")
    return nodes


def set_name(nodes: Sequence[ActivationNode]) -> str:
    """Return one name for several nodes."""
    return " + ".join(map(str, nodes)) if len(nodes) <= 4 else f"{len(nodes)} nodes from {nodes[0]} to {nodes[-1]}"


def _read_node(model: HookedModel, entry: object, lengths: Set[int]) -> ActivationNode:
    field_names = [field.name for field in fields(ActivationNode)]
    entry = _by_name(model, entry) if isinstance(entry, str | tuple) else entry
    named = entry.described() if isinstance(entry, ActivationNode) else entry
    values: dict[Any, Any] = {}
    if isinstance(named, Mapping):
        values = {name: value for name, value in named.items() if value is not None}
    if not {"site", "layer"} <= set(values) or not set(values) <= set(field_names):
        raise InputError(
            f"{shown(entry)} is not a node: give its site and layer, and any of {', '.join(field_names[2:])}, as in "
            "{'site': 'z', 'layer': 0, 'head': 1}."
        )
    name, shape = values.pop("site"), model.shape
    (site,) = sites_named(name, model)
    # Every prompt that is edited must have the token.
    counts = {"layer": shape.n_layers, "position": min(lengths), "key": min(lengths)}
    counts |= {"head": site.n_heads(shape)} if site.has_heads else {}
    for axis in values:
        if axis not in site.swept_axes:
            raise InputError(f"A node of {site.name} has no {axis}; it has {', '.join(site.swept_axes)}.")
    places: dict[str, int] = {}
    for axis, value in values.items():
        try:
            number = whole_number(value)
        except TypeError:
            raise InputError(f"The {axis} of a node is a whole number, not {shown(value)}.") from None
        if not -counts[axis] <= number < counts[axis]:
            raise InputError(f"There is no {axis} {number} of {site.name}; they are 0 to {counts[axis] - 1}.")
        is_of_each = axis in ("position", "key") and len(lengths) > 1  # counted from each prompt's own end
        places[axis] = number if is_of_each else number % counts[axis]
    node = ActivationNode(site.name, **places)
    site.among([node.layer], model, edited=True)
    return node


def _by_name(model: HookedModel, name: Any) -> dict[str, Any]:
    if isinstance(name, str) and (place := place_named(name)) is not None:
        return {"site": place[0].name, "layer": place[1]}
    kind, layer, head, _ = part_named(name, model.shape)
    site = {"head": "z", "mlp": "mlp_out"}.get(kind, kind)
    if layer is None or site not in SITES:
        raise InputError(f"{shown(name)} is not a node with a layer; give one such as '9.2', 'm9' or a mapping.")
    return {"site": site, "layer": layer, "head": head}


NAMED_IN_FULL = 8
"""A larger set is named by its number of components of each kind."""
FEATURES = "features"
KINDS = {"heads": "z", "mlps": "mlp_out", "neurons": "mlp_post"}
"""By kind of component: the site that its members are parts of; an MLP is the whole activation."""


@dataclass(frozen=True)
class ComponentSet:
    """Some components with one name."""

    name: str
    members: Mapping[str, tuple[Any, ...]]
    """By kind, the named components: `(layer, index)`, the layer, or the features of a dictionary."""
    edits: tuple[Edit, ...]
    """At all positions, by site and layer, of the named components, or of all others."""

    def described(self) -> dict[str, Any]:
        """Return the description of the set for the record of a run."""
        features = [site.described for site in self.members.get(FEATURES, ())]
        return {"name": self.name, **self.members} | ({FEATURES: features} if features else {})


def read_sets(
    model: HookedModel, single: Mapping[str, Any], several: Any = None, complement: bool = False
) -> tuple[ComponentSet, ...]:
    """Read the sets requested, as `ablate` takes them: `single`, the members of one set by kind, or `several`."""
    by_kind = {kind: members for kind, members in single.items() if members is not None}
    named: list[tuple[Any, Any]] = [(None, by_kind)]
    if several is not None:
        if by_kind:
            raise InputError(
                f"sets= and {next(iter(by_kind))}= were both given: put all sets into sets=, or give one set."
            )
        wanted = "a mapping from names to sets, or a list of sets"
        is_named = isinstance(several, Mapping)
        named = [*several.items()] if is_named else [(None, one) for one in checked_several("sets", several, wanted)]
    if not named:
        raise InputError("sets= is empty: there is nothing to ablate.")
    sets: list[ComponentSet] = []
    for name, members in named:
        read = _read_set(model, members, name, complement)
        # Sets without names may have equal names, as "9 heads": the later ones are numbered.
        count = sum(other.name.split(" #")[0] == read.name for other in sets)
        sets.append(replace(read, name=f"{read.name} #{count + 1}") if count else read)
    return tuple(sets)


def _read_set(model: HookedModel, listed: Any, name: object, complement: bool) -> ComponentSet:
    """Read the members of a set, given by kind; a list contains heads, and MLPs by name."""
    called, kinds = "The set" if name is None else f"The set {shown(name)}", (*KINDS, FEATURES)
    if is_one(listed):
        raise InputError(f"{called} is {shown(listed)}: give a mapping such as {{'heads': [(0, 1)], 'mlps': [4]}}.")
    if hasattr(listed, "columns"):  # a table of heads
        listed = {"heads": listed}
    elif not isinstance(listed, Mapping):
        parts = list(listed)
        mlps = [one for one in parts if (part := read_part(one)) and part.kind == "mlp"]
        listed = {"heads": [one for one in parts if one not in mlps]} | {"mlps": mlps} if mlps else {"heads": parts}
    if unknown := [kind for kind in listed if kind not in kinds]:
        raise InputError(f"{called} names {shown(unknown[0])}.{did_you_mean(unknown[0], kinds)}")
    members = {kind: _members(model, kind, some) for kind, some in listed.items() if some is not None}
    if not any(members.values()):
        raise InputError(f"{called} is empty: name {', '.join(f'{kind}=' for kind in kinds)}, one or several of them.")
    edits = [edit for kind, some in members.items() for edit in _edits(model, kind, some, complement)]
    if not edits:
        raise InputError(f"The complement of all {' and '.join(members)} is empty: there is nothing left to ablate.")
    return ComponentSet(str(name) if name is not None else _name(members, complement), members, tuple(edits))


def _members(model: HookedModel, kind: str, listed: Any) -> tuple[Any, ...]:
    """Check the members of one kind, and convert layers counted from the end."""
    shape = model.shape
    if kind == FEATURES:
        dictionaries = one_or_several(listed)
        if wrong := [features for features in dictionaries if not isinstance(features, Features)]:
            raise InputError(
                f"features= holds {shown(wrong[0])}: give what hw.features or hw.load_sae returns, .only([...])."
            )
        fitted = tuple(features.fitted(model) for features in dictionaries)
        if len({features.name for features in fitted}) < len(fitted):
            raise InputError(
                f"Two dictionaries are named {fitted[0].name!r}: give the features of one together, or name= one."
            )
        return fitted
    if kind == "neurons":
        members = list[tuple[int, ...]]()
        for member in one_or_several(listed):
            try:
                layer, neuron = map(whole_number, member)
            except (TypeError, ValueError):
                raise InputError(
                    f"neurons= holds {shown(member)}: give a list of pairs (layer, neuron), as [(0, 1), (2, 3)]."
                ) from None
            layer = within(layer, shape.n_layers, "layer")
            members.append((layer, within(neuron, shape.d_mlp, "neuron", f" in layer {layer}")))
    else:
        members = parts_of_kind(kind, listed, shape)
    if twice := [member for member, count in Counter(members).items() if count > 1]:
        raise InputError(f"{_called(kind, twice[0])} is named twice.")
    (site,) = sites_named(KINDS[kind], model)
    for layer in sorted({layer for layer, *_ in members}):
        site.among([layer], model, edited=True)
    return tuple(sorted(layer for layer, *_ in members)) if kind == "mlps" else tuple(sorted(members))


def _edits(model: HookedModel, kind: str, members: Sequence[Any], complement: bool) -> list[Edit]:
    """Return the edits of a set, or of its complement, at the sites of a kind, layer by layer."""
    if kind == FEATURES:
        places = [(site, site.layer, site.count, set(site.units)) for site in members]
    else:
        (site,), shape = sites_named(KINDS[kind], model), model.shape
        # In a hybrid model the complement covers the layers that have such parts: a layer without heads is not refused.
        layers = site.among(range(shape.n_layers), model, edited=True) if complement else range(shape.n_layers)
        # For MLPs the whole activation is the one component of its layer.
        pairs = [(layer, 0) for layer in members] if kind == "mlps" else members
        count = {"heads": shape.n_heads, "mlps": 1, "neurons": shape.d_mlp}[kind]
        places = [(site, layer, count, {index for at, index in pairs if at == layer}) for layer in layers]
    edits = []
    for site, layer, count, chosen in places:
        if indices := tuple(index for index in range(count) if (index in chosen) != complement):
            # None if all are named: the whole activation is written without an index.
            among = None if len(indices) == count else indices
            heads, units = (among, None) if site.has_heads else (None, among)
            edits.append(Edit(site, range(layer, layer + 1), heads=heads, units=units))
    return edits


def _called(kind: str, member: object) -> str:
    numbers = member if isinstance(member, tuple) else (member,)
    return f"{kind.removesuffix('s')} {'.'.join(map(str, numbers))}"


def _name(members: Mapping[str, Sequence[Any]], complement: bool) -> str:
    by_kind = {kind: [_called(kind, one) for one in listed] for kind, listed in members.items() if kind != FEATURES}
    if FEATURES in members:
        by_kind[FEATURES] = [f"feature {number} of {one.name}" for one in members[FEATURES] for number in one.units]
    names = [name for listed in by_kind.values() for name in listed]
    if len(names) > NAMED_IN_FULL:
        names = [f"{len(listed):,} {kind}" for kind, listed in by_kind.items() if listed]
    return f"all {' and '.join(members)} but {', '.join(names)}" if complement else ", ".join(names)


@checked_call
def ablate(
    model: HookedModel,
    prompts: Prompts,
    corrupted: Prompts | ReplacementSpec | None = None,
    *,
    metric: Measures,
    heads: object = None,
    mlps: object = None,
    neurons: object = None,
    features: object = None,
    sets: Mapping[str, Any] | Any = None,
    complement: bool = False,
    values: ValueName | ReplacementSpec | TensorLike | Callable[..., Any] = "zero",
    dataset: Prompts | None = None,
    positions: Where = "all",
    seed: int = 0,
    batch_size: int | None = None,
    engine: Literal["auto", "whole runs"] = "auto",
    progress: bool = True,
    out: str | Path | None = None,
) -> Sweep:
    """Ablate sets of components, each set jointly.

        hw.ablate(model, "The capital of France is", heads=[(9, 3), (10, 0)], mlps=[4], metric=hw.rank(" Paris"))

    effect = metric of the ablated run - metric of the unedited run, in units of the metric.

    Args:
        model: the model; it is left unchanged.
        prompts: one prompt, several, or token ids: those whose runs are ablated.
        corrupted: the other prompt of each pair, for values from the other run; or noise at its embeddings, see
            `hw.patch`.
        metric: see `hw.patch`.
        heads: the attention heads of one set, as pairs (layer, head) or names ("9.2"), or one of them. These are query
            heads, also where they share keys and values.
        mlps: its MLPs, as layers, or one of them.
        neurons: its neurons, as pairs (layer, neuron): the inputs of the MLP's output projection.
        features: its features, as `hw.features(...)` or `hw.load_sae(...)` with `.only([...])`, one or several.
        sets: several sets instead of one: a mapping from names to sets, or a list of sets. A set is a mapping with
            `heads`, `mlps`, `neurons`, `features`, or a list of heads.
        complement: replace everything except the set, among the kinds that are named: with `heads` and `mlps` (which
            may be an empty list) all other heads and all other MLPs.
        values: the values that replace the components: see `hw.patch`.
        dataset: the prompts for `mean` and `resample`; default: `prompts`.
        positions: the positions to ablate; with roles (see `hw.patch`) each set is ablated at each role separately.
        seed: of `resample`.
        batch_size: see `hw.patch`.
        engine: see `hw.patch`.

    Returns:
        A sweep whose table has a row per example, set and metric; `set` is the set's name, or its members in words.
    """
    metrics = as_metrics(metric)
    refuse_columns_as_answers(prompts, metrics)
    # The clean run is the one that is ablated.
    pair = read_prompt_pair(model, prompts, corrupted, "noise", positions=positions)
    one = {"heads": heads, "mlps": mlps, "neurons": neurons, "features": features}
    chosen = read_sets(model, one, sets, complement)
    sites = tuple(dict.fromkeys(edit.site for component_set in chosen for edit in component_set.edits))
    edited = pair.spans(positions)
    replacement = build_replacement(model, values, dataset, pair, sites, seed, positions=positions)
    matched = pair.matched(edited, sites)
    refuse_too_many_cells(sum(map(len, edited)) * len(chosen) * len(metrics) * (replacement.samples or 1) * pair.draws)

    site_label = {"site": "complement" if complement else "ablation"}
    rows = []
    for example, prompt in enumerate(pair.base):
        i = example // pair.draws
        # Tokens before the first difference are equal only if both prompts have them at the same positions.
        since = replacement.since(example) if matched[i] is None else 0
        for role, span in edited[i].items():
            seen = {site.name: seen_positions(site, prompt, span.base) for site in sites}
            at = {name: None if len(found) == len(prompt) else found for name, found in seen.items()}
            for component_set, sample in product(chosen, range(replacement.samples or 1)):
                labels = site_label | {"set": component_set.name} | replacement.labels(sample)
                labels |= {"role": role} if isinstance(positions, Mapping) else {}
                edits = [
                    replace(edit, positions=at[edit.site.name], since=since, sample=sample)
                    for edit in component_set.edits
                ]
                # A list per cell, unlike a sweep's: sets and roles make few cells per prompt.
                rows.append((example, [CellTemplate(labels, tuple(edits))]))
    plan = Plan(model, pair, CellTable.of(rows), metrics, replacement, batch_size, matched=matched)
    options = {
        "sets": [component_set.described() for component_set in chosen],
        "complement": complement,
        "positions": recorded_roles(edited),
    }
    return run_sweep("ablate", plan, options, engine=engine, seed=seed, progress=progress, out=out)


def joint_template(
    nodes: Sequence[ActivationNode], example: int, replacement: Replacement, sample: int = 0
) -> CellTemplate:
    """Return the template in which nodes of one example are replaced together."""
    labels = {"site": "together", "set": set_name(nodes)} | replacement.labels(sample)
    length, since = len(replacement.inputs.pair.base[example]), replacement.since(example)
    return CellTemplate(labels, tuple(node.in_prompt(length).edit(since, sample) for node in nodes))
