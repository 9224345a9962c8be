"""Parse names of heads, MLPs, embedding and logits, as people and other tools write them; used by all functions.

    a head                 "9.2"   "head 9.2"   "head 9 2"   "L9H2"   "a9.h2"   (9, 2)   "blocks.9.attn.hook_z[2]"
    its q, k or v          "9.2.q"   "L9H2.q"   "a9.h2<q>"   "q 9.2"   "blocks.9.attn.hook_q[2]"
    an MLP                 "m9"   "mlp 9"   "MLP 9"   "blocks.9.hook_mlp_out"
    the embedding          "embed"   "input"   "hook_embed"
    the logits             "logits"   "unembed"   "output"
    all of a layer, kind   "head 9"   "L9"   "blocks.9.attn.hook_z"   "q 9"   "head"   "mlp"   "k"

In models with grouped heads, `k 9.1`, `v 9.1` and the hooks of `k` and `v` count key-value heads. Names of a head
count query heads: "9.2.k" is the key that query head 9.2 reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import pandas as pd

from headwater.errors import InputError
from headwater.options import has_no_order, is_index, is_one, resolve_indices, shown, whole_number

# Six digits at most: int() refuses thousands of digits with its own error.
_LAYER, _HEAD, _OF = r"(?P<layer>\d{1,6})", r"(?P<head>\d{1,6})", r"(?:[. ]?<?(?P<of>[qkv])>?)?"
_AT = rf"(?:[\[. ](?::, ?:, ?)?{_HEAD}\]?)?"
FORMS: dict[str, str] = {
    "head 9.2, 9.2.q": rf"(?:heads? ?|h)?{_LAYER}[. ,]{_HEAD}{_OF}",
    "L9H2, a9.h2, a9.h2<q>": rf"(?:l|a|layer ?){_LAYER}[., ]*(?:h|head ?){_HEAD}{_OF}",
    "q 9.2, mlp 9, head 9, k": rf"(?P<kind>heads?|mlps?|[qkv])(?: ?{_LAYER}(?:[. ]{_HEAD})?)?",
    "m9": rf"(?P<kind>m){_LAYER}",
    "L9": rf"(?P<kind>l){_LAYER}",
    "blocks.9.attn.hook_z[2]": rf"blocks\.{_LAYER}\.attn\.hook_(?P<kind>z|result|q|k|v){_AT}",
    "blocks.9.hook_q_input[2]": rf"blocks\.{_LAYER}\.hook_(?P<kind>q|k|v)_input{_AT}",
    "blocks.9.hook_mlp_out": rf"blocks\.{_LAYER}\.(?:hook_)?(?P<kind>mlp)(?:_in|_out|\.hook_in|\.hook_out)",
    "embed": r"(?P<kind>embed|input|hook_embed)",
    "logits": r"(?P<kind>logits|unembed|output)",
}
"""Patterns of names in lower case with single spaces, by examples of each form."""
_KINDS = {"m": "mlp", "l": "head", "z": "head", "result": "head", "input": "embed", "hook_embed": "embed"}
_KINDS |= {"unembed": "logits", "output": "logits", "heads": "head", "mlps": "mlp"}
"""Kinds of the words that patterns match as a kind but that are spelled differently."""
HeadName: TypeAlias = str | Sequence[int | str]
"""A head, in one of the forms listed in this module's docstring."""
Heads: TypeAlias = Iterable[int | HeadName] | int | str | None
"""Heads of one layer or of all layers: numbers, or names of heads of one layer."""
EXAMPLES = '"9.2", "L9H2", "a9.h2", (9, 2), "9.2.q", "m9", "embed" or "logits"'


class Sizes(Protocol):
    """The numbers of layers and heads: the shape of a model, or its graph."""

    @property
    def n_layers(self) -> int:
        """Number of layers."""

    @property
    def n_heads(self) -> int:
        """Number of query heads per layer."""

    @property
    def n_kv_heads(self) -> int:
        """Number of key-value heads per layer."""


class Counts(NamedTuple):
    """Only these sizes."""

    n_layers: int
    n_heads: int
    n_kv_heads: int


class NamedPart(NamedTuple):
    """A part of a model; a number that is None stands for all layers or all heads."""

    kind: str
    """`embed`, `head`, `q`, `k`, `v`, `mlp` or `logits`."""
    layer: int | None = None
    head: int | None = None
    """Key-value heads for `k` and `v`."""
    of_query_head: bool = False
    """Whether the head number of a `k` or `v` still counts query heads."""

    def __str__(self) -> str:
        numbers = [str(number) for number in (self.layer, self.head) if number is not None]
        return " ".join([self.kind, *([".".join(numbers)] if numbers else [])])


@lru_cache(maxsize=1 << 16)
def _read(text: str) -> NamedPart | None:
    """Return the part that a text names, in any model; None if it fits no form."""
    small = " ".join(text.casefold().split())
    match_found = next((match for form in FORMS.values() if (match := re.fullmatch(form, small))), None)
    if match_found is None:
        return None
    groups = {name: value for name, value in match_found.groupdict().items() if value is not None}
    layer, head = (int(groups[name]) if name in groups else None for name in ("layer", "head"))
    kind = groups.get("of") or groups.get("kind", "head")
    return NamedPart(_KINDS.get(kind, kind), layer, head, "of" in groups)


def read_part(name: Any) -> NamedPart | None:
    """Return the part that a name means, in any model; None if it fits no form."""
    if isinstance(name, NamedPart):
        return name
    if isinstance(name, str):
        # A page of text is no name, and would stay in the cache of `_read`.
        return _read(name) if len(name) <= 80 else None
    try:
        first, second = name
        if isinstance(first, str):  # a hook, and a head of it
            part = _read(first)
            fits = part is not None and part.head is None and first.startswith("blocks.") and part.kind != "mlp"
            return part._replace(head=whole_number(second)) if part is not None and fits else None
        return NamedPart("head", whole_number(first), whole_number(second))
    except (TypeError, ValueError):
        return None


def part_named(name: Any, sizes: Sizes) -> NamedPart:
    """Return the part of a model that a name means; negative numbers of a pair count from the end."""
    if (part := read_part(name)) is None:
        raise InputError(f"{shown(name)} names no part of a model. Write {EXAMPLES}.")
    kind, layer, head, of_query_head = part
    if kind == "mlp" and head is not None:
        raise InputError(f"{shown(name)} names a head of an MLP, but a layer has one MLP: write 'mlp {layer}'.")
    layer = None if layer is None else within(layer, sizes.n_layers, "layer")
    if head is not None:
        by_kv = kind in ("k", "v") and not of_query_head
        count = sizes.n_kv_heads if by_kv else sizes.n_heads
        shared = sizes.n_heads // sizes.n_kv_heads
        note = f"; {kind} counts key-value heads, each read by {shared} query heads" if by_kv and shared > 1 else None
        head = within(head, count, "head", f" in layer {layer}", note)
        head = head // shared if of_query_head and kind in ("k", "v") else head
    return NamedPart(kind, layer, head)


def within(number: int, count: int, what: str, where: str = "", note: str | None = None) -> int:
    """Return an index counted from the beginning; a negative `number` counts from the end."""
    if not -count <= number < count:
        grouped = "; query heads are counted, not key-value heads" if what == "head" else ""
        raise InputError(f"There is no {what} {number}{where}; they are 0 to {count - 1}{note or grouped}.")
    return number % count


def parts_of_kind(option: str, requested: Any, sizes: Sizes) -> list[tuple[int, ...]]:
    """Return heads as pairs (layer, head), or MLPs as (layer,), in the requested order; `option` is `heads` or `mlps`.

    `requested` is a name, one pair or layer, a list of names, pairs or (for MLPs) layers, or a table of heads with the
    columns `layer`, `head`; "head 9" is every head of layer 9.
    """
    kind = option.removesuffix("s")
    advice = "give a list of pairs (layer, head), as [(0, 1), (2, 3)], or of names, as ['0.1', 'L2H3']"
    if kind == "mlp":
        advice = "give a list of whole numbers, the layers, or of names, as ['mlp 0', 'm3']"
    if isinstance(requested, pd.DataFrame) and kind == "head":
        if missing := [name for name in ("layer", "head") if name not in requested.columns]:
            raise InputError(f"heads= has no column {missing[0]!r}: give rows with layer and head, or pairs of them.")
        requested = list(requested[["layer", "head"]].drop_duplicates().itertuples(index=False, name=None))
    is_pair = isinstance(requested, tuple) and len(requested) == 2 and all(map(is_index, requested))
    if is_index(requested) if kind == "mlp" else is_pair:
        requested = [requested]
    if not isinstance(requested, str) and (is_one(requested) or has_no_order(requested)):
        raise InputError(f"{option}={shown(requested)}: {advice}.")
    parts: list[tuple[int, ...]] = []
    for entry in [requested] if isinstance(requested, str) else requested:
        try:
            part = NamedPart("mlp", whole_number(entry)) if kind == "mlp" else read_part(entry)
        except TypeError:
            part = read_part(entry)
        if part is None or part.kind != kind:
            raise InputError(f"{option}= holds {shown(entry)}{f', which is {part}' if part else ''}: {advice}.")
        _, layer, head, _ = part_named(part, sizes)
        layers = range(sizes.n_layers) if layer is None else [layer]
        heads = range(sizes.n_heads) if head is None else [head]
        parts += [(i,) for i in layers] if kind == "mlp" else product(layers, heads)
    return parts


def head_named(layer: Any, head: Any, sizes: Sizes) -> tuple[int, int]:
    """Return one head from two numbers or, if `head` is None, from its name in `layer`."""
    name = layer if head is None else (layer, head)
    part = read_part(name)
    if part is None or part.kind != "head" or part.layer is None or part.head is None:
        raise InputError(f"{shown(name)} is not one head: give its layer and head, or a name such as '9.2'.")
    _, layer, head, _ = part_named(part, sizes)
    return cast("tuple[int, int]", (layer, head))


def layers_and_heads(
    layers: Any, heads: Any, sizes: Sizes, kv_site: str | None = None, *, advice: str = ": leave layers= out"
) -> tuple[Any, Any]:
    """Return `layers=` and `heads=` as numbers if `heads=` holds names of heads, which contain their layer.

    Numbers are returned unchanged; `kv_site` is a selected site with key-value heads (if any); `advice` ends the
    error of heads that are not in the layers.
    """

    def is_name(head: object) -> bool:
        return isinstance(head, str | tuple | list) or getattr(head, "ndim", 0) == 1

    if heads is None or not (isinstance(heads, str) or (not is_one(heads) and any(map(is_name, heads)))):
        return layers, heads
    named = parts_of_kind("heads", heads, sizes)
    of, numbers = sorted({layer for layer, _ in named}), sorted({head for _, head in named})
    if len(of) > 1:
        raise InputError(
            f"heads={shown(heads)} name heads of layers {', '.join(map(str, of))}: heads= is crossed with layers= "
            "here. Name heads of one layer at a time; hw.ablate(model, prompts, heads=...) and together= of hw.patch "
            "edit heads of several layers at once."
        )
    if kv_site is not None and sizes.n_kv_heads < sizes.n_heads:
        raise InputError(
            f"heads={shown(heads)} names query heads, and {kv_site} has key-value heads: give layers={of[0]} and "
            f"heads= as numbers, {numbers[0] // (sizes.n_heads // sizes.n_kv_heads)} for this one."
        )
    if of[0] not in resolve_indices(layers, sizes.n_layers, "layer"):
        raise InputError(f"heads={shown(heads)} is in layer {of[0]}, which is not in layers={shown(layers)}{advice}.")
    return tuple(of), tuple(numbers)
