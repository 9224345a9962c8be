"""Under which names a cache answers: a short name with a layer, a hook's name of TransformerLens, or one with `*`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.errors import InputError, did_you_mean
from headwater.models.caches.activations import Activation
from headwater.options import checked_count, shown


@dataclass(frozen=True)
class Names:
    """The names of what is kept.

    Attributes:
        kept: by short name, or by hook name with `*` for its layer.
        n_layers: of the model.
    """

    kept: dict[str, Activation]
    n_layers: int

    def keys(self) -> list[str | tuple[str, int]]:
        """Return all of them: ("z", 3) and "blocks.3.attn.hook_z"."""
        short: list[str | tuple[str, int]] = []
        full: list[str | tuple[str, int]] = []
        for one in self.kept.values():
            short += [(one.name, layer) for layer in one.layers] if one.layers else []
            full += [] if one.is_read else [one.hook_name(layer) for layer in one.places]
        return short + full

    def found(self, key: object, any_layer: bool = False) -> tuple[Activation, int]:
        """Return what a key means, and which of its places.

        Raises:
            InputError: nothing of that name and layer is kept.
        """
        name, layer = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        if not isinstance(name, str):
            raise InputError(f"The cache holds no {shown(name)}: ask for one of cache.keys().")
        for one in self.kept.values():
            for place, at in enumerate(one.places):
                if layer is None and not one.is_read and name == one.hook_name(at):
                    return one, place
        by_name = {one.hook.replace("{layer}", "*"): one for one in self.kept.values() if not one.is_read} | self.kept
        named = by_name.get(name)
        if named is None:
            near = did_you_mean(name, [*self.kept, *(key for key in self.keys() if isinstance(key, str))])
            kept = [one.name + (f" at {layers_said(one.layers)}" if one.layers else "") for one in self.kept.values()]
            said = near if near.startswith(" Did") else f" It keeps {'; '.join(kept[:12])}{'; ...' * (len(kept) > 12)}."
            raise InputError(f"The cache does not hold {shown(name)}.{said}")
        one = named
        if any_layer or (layer is None and len(one.places) == 1):
            return one, 0
        held = f"{one.name} is kept at {layers_said(one.layers)}" if one.layers else f"{one.name} stands in no layer"
        if layer is None:
            raise InputError(f"{held}: name one of them, as in cache[{one.name!r}, {one.layers[-1]}].")
        number = checked_count("layer", layer, least=-self.n_layers)
        number += self.n_layers if number < 0 else 0
        if number not in one.layers:
            raise InputError(f"The cache holds no {one.name!r} of layer {layer}: {held}.")
        return one, one.layers.index(number)


def layers_said(layers: Sequence[int]) -> str:
    """Name layers."""
    return f"layer{'s' if len(layers) > 1 else ''} {ranges(tuple(layers))}"


def ranges(numbers: tuple[int, ...]) -> str:
    """Name numbers, those of a row by its ends."""
    whole = len(numbers) > 2 and numbers == tuple(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))
