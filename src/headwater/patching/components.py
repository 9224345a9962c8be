"""Sets of components: heads, MLPs, neurons, features of dictionaries, together; read, checked, complemented and named.

A set says of each kind which ones it holds. What it holds in the activations is a part of a site in some layers:

    heads     (layer, head)      z of this query head (with grouped heads too: never a key-value head)
    mlps      layer              mlp_out of this layer
    neurons   (layer, neuron)    mlp_post of this neuron
    features  dictionaries       of each, those that `.only([...])` chose, or all of them

The complement of a set holds every other component of the kinds that were named: that of heads alone leaves the MLPs
as they are, that of heads and MLPs takes both. A kind is named with an empty list too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.errors import InputError, did_you_mean
from headwater.models.dictionaries.features import Features
from headwater.models.hooked import HookedModel
from headwater.models.part_names import parts_of_kind, read_part, within
from headwater.models.shape import ModelShape
from headwater.models.sites import Site, sites_named
from headwater.options import is_one, one_or_several, shown, whole_number
from headwater.patching.variants import Replace

NAMED_IN_FULL = 8
"""A set of more components is called by how many it has of each kind."""


@dataclass(frozen=True)
class Kind:
    """A kind of component."""

    name: str
    """Of one."""
    site: str
    """Whose activation it is a part of."""
    among: Callable[[ModelShape], int] | None
    """How many there are in a layer; None where the layer's one is the whole activation."""


FEATURES = "features"
KINDS = {
    "heads": Kind("head", "z", lambda shape: shape.n_heads),
    "mlps": Kind("mlp", "mlp_out", None),
    "neurons": Kind("neuron", "mlp_post", lambda shape: shape.d_mlp),
}
"""By the word that names several of them."""


@dataclass(frozen=True)
class Part:
    """What a set holds at one site of one layer."""

    site: Site
    layer: int
    among: tuple[int, ...] | None
    """Which heads or neurons; None is the whole activation."""

    def edit(self, positions: tuple[int, ...] | None, since: int) -> Replace:
        """Return the edit that replaces it at some positions."""
        layers = range(self.layer, self.layer + 1)
        if self.site.has_heads:
            return Replace(self.site, layers, positions, heads=self.among, since=since)
        return Replace(self.site, layers, positions, units=self.among, since=since)


@dataclass(frozen=True)
class ComponentSet:
    """Some components, and what they are called together."""

    name: str
    members: Mapping[str, tuple[Any, ...]]
    """By kind, those that were named: `(layer, index)`, the layer, or the features of a dictionary."""
    parts: tuple[Part, ...]
    """What is edited: of these, or of all others."""

    def described(self) -> dict[str, Any]:
        """Return what the record of a run says of it."""
        features = [site.described for site in self.members.get(FEATURES, ())]
        return {"name": self.name, **self.members} | ({FEATURES: features} if features else {})


def read_sets(
    model: HookedModel, one: Mapping[str, Any], several: Any = None, complement: bool = False
) -> tuple[ComponentSet, ...]:
    """Read the sets that were asked for.

    Args:
        model: whose components they are.
        one: a single set: by kind, its members, or None.
        several: in its place, a mapping from names to sets, or a list of sets; a set is a mapping from kinds to
            members, or a list of heads.
        complement: whether everything of these kinds but the set is meant.

    Raises:
        InputError: there is no such component, one is named twice, a set is empty, or both forms are given.
    """
    given = {kind: members for kind, members in one.items() if members is not None}
    if several is None:
        return (_read(model, given, None, complement),)
    if given:
        raise InputError(f"sets= and {next(iter(given))}= were both given: put all sets into sets=, or give one set.")
    if isinstance(several, Mapping):
        named = list(several.items())
    elif is_one(several):
        raise InputError(f"sets={shown(several)} holds no sets: give a mapping from names to sets, or a list of sets.")
    else:
        named = [(None, members) for members in several]
    if not named:
        raise InputError("sets= is empty: there is nothing to ablate.")
    return _told_apart([_read(model, _by_kind(members, name), name, complement) for name, members in named])


def _by_kind(members: object, name: object) -> dict[str, Any]:
    """The members of a set by kind; a list holds heads, and MLPs by name."""
    where = "A set" if name is None else f"The set {shown(name)}"
    if is_one(members):
        raise InputError(f"{where} is {shown(members)}: give a mapping such as {{'heads': [(0, 1)], 'mlps': [4]}}.")
    if hasattr(members, "columns"):
        return {"heads": members}
    if not isinstance(members, Mapping):
        listed = list(members)  # type: ignore[call-overload]
        mlps = [one for one in listed if (part := read_part(one)) and part.kind == "mlp"]
        return {"heads": [one for one in listed if one not in mlps]} | {"mlps": mlps} if mlps else {"heads": listed}
    if unknown := [kind for kind in members if kind not in (*KINDS, FEATURES)]:
        raise InputError(f"{where} names {shown(unknown[0])}.{did_you_mean(unknown[0], (*KINDS, FEATURES))}")
    return {kind: listed for kind, listed in members.items() if listed is not None}


def _read(model: HookedModel, given: Mapping[str, Any], name: object, complement: bool) -> ComponentSet:
    members = {
        kind: _dictionaries(model, listed) if kind == FEATURES else _members(model, kind, listed)
        for kind, listed in given.items()
    }
    if not any(members.values()):
        called = "The set" if name is None else f"The set {shown(name)}"
        raise InputError(
            f"{called} is empty: name {', '.join(f'{kind}=' for kind in (*KINDS, FEATURES))}, one or several of them."
        )
    parts: list[Part] = []
    for kind, listed in members.items():
        of_features = kind == FEATURES
        parts += _feature_parts(listed, complement) if of_features else _parts(model, kind, listed, complement)
    if not parts:
        raise InputError(f"The complement of all {' and '.join(members)} is empty: there is nothing left to ablate.")
    return ComponentSet(str(name) if name is not None else _name(members, complement), members, tuple(parts))


def _members(model: HookedModel, kind: str, listed: Any) -> tuple[Any, ...]:
    """Check the members of one kind; layers counted from the end are counted from the beginning."""
    row = KINDS[kind]
    found = _neurons(listed, model.shape) if kind == "neurons" else parts_of_kind(kind, listed, model.shape)
    if twice := [member for member, count in Counter(found).items() if count > 1]:
        raise InputError(f"{_called(row, twice[0])} is named twice.")
    (site,) = sites_named(row.site, model)
    for layer in sorted({layer for layer, *_ in found}):
        site.among([layer], model, edited=True)
    return tuple(sorted(found)) if row.among is not None else tuple(sorted(layer for layer, *_ in found))


def _dictionaries(model: HookedModel, listed: object) -> tuple[Features, ...]:
    """Check dictionaries: features of one, or of several."""
    asked = one_or_several(listed)
    if wrong := [one for one in asked if not isinstance(one, Features)]:
        raise InputError(
            f"features= holds {shown(wrong[0])}: give what hw.features or hw.load_sae returns, .only([...])."
        )
    found = tuple(one.fitted(model) for one in asked)
    if len({one.name for one in found}) < len(found):
        raise InputError(f"The dictionary {found[0].name!r} is named twice: name its features together, or name= it.")
    return found


def _feature_parts(members: Sequence[Features], complement: bool) -> list[Part]:
    """What a set of features, or its complement in their dictionaries, holds."""
    parts = []
    for site in members:
        held = set(site.units)
        among = tuple(feature for feature in range(site.count) if (feature in held) != complement)
        if among:
            parts.append(Part(site, site.layer, None if len(among) == site.count else among))
    return parts


def _neurons(listed: Any, shape: ModelShape) -> list[tuple[int, ...]]:
    """Check pairs (layer, neuron)."""
    found: list[tuple[int, ...]] = []
    for member in [listed] if is_one(listed) else listed:
        try:
            layer, neuron = map(whole_number, member)
        except (TypeError, ValueError):
            wanted = "give a list of pairs (layer, neuron), as [(0, 1), (2, 3)]"
            raise InputError(f"neurons= holds {shown(member)}: {wanted}.") from None
        layer = within(layer, shape.n_layers, "layer")
        found.append((layer, within(neuron, shape.d_mlp, "neuron", f" in layer {layer}")))
    return found


def _parts(model: HookedModel, kind: str, members: Sequence[Any], complement: bool) -> list[Part]:
    """What a set, or its complement, holds at the site of a kind, layer by layer."""
    row, shape = KINDS[kind], model.shape
    (site,) = sites_named(row.site, model)
    own = site.among(range(shape.n_layers), model, edited=True) if complement else range(shape.n_layers)
    if row.among is None:
        return [Part(site, layer, None) for layer in own if (layer in members) != complement]
    every, held = range(row.among(shape)), set(members)
    parts = []
    for layer in own:
        among = tuple(index for index in every if ((layer, index) in held) != complement)
        if among:
            parts.append(Part(site, layer, None if len(among) == len(every) else among))
    return parts


def _called(row: Kind, member: object) -> str:
    numbers = member if isinstance(member, tuple) else (member,)
    return f"{row.name} {'.'.join(map(str, numbers))}"


def _name(members: Mapping[str, Sequence[Any]], complement: bool) -> str:
    """Name a set by its members, or by their number."""
    said = [
        f"feature {number} of {member.name}" if kind == FEATURES else _called(KINDS[kind], member)
        for kind, listed in members.items()
        for member, number in ((m, n) for m in listed for n in (m.units if kind == FEATURES else (None,)))
    ]
    if len(said) > NAMED_IN_FULL:
        sizes = {k: sum(len(m.units) if k == FEATURES else 1 for m in listed) for k, listed in members.items()}
        said = [f"{size:,} {kind}" for kind, size in sizes.items() if size]
    return f"all {' and '.join(members)} but {', '.join(said)}" if complement else ", ".join(said)


def _told_apart(sets: Iterable[ComponentSet]) -> tuple[ComponentSet, ...]:
    """Number sets that would be called the same; sets of different names may be equal, one without a name may not.

    Raises:
        InputError: two sets in a list have the same parts.
    """
    found: list[ComponentSet] = []
    for one in sets:
        if any(other.parts == one.parts and other.name == one.name for other in found):
            raise InputError(f"The set {shown(one.name)} was given twice: give it once, or name both.")
        count = sum(other.name.split(" #")[0] == one.name for other in found)
        found.append(ComponentSet(f"{one.name} #{count + 1}", one.members, one.parts) if count else one)
    return tuple(found)
