"""Colours of figures: distinct for colour-blind readers, and always combined with a shape or a line style."""

from collections.abc import Iterable

INK = "#262626"
FAINT = "#8a8a8a"
BLUE, ORANGE, GREEN, RED = "#2b6cb8", "#f08c1a", "#2f9e55", "#d1352f"
PURPLE, PINK, BROWN = "#642d9c", "#e377a8", "#8c5a3c"
UNSEEN = "#f4f4f4"
"""The ground of maps, visible where there is no value."""
DIVERGING = "RdBu_r"
SETS = ((BLUE, "o"), (GREEN, "s"), (PURPLE, "^"), (PINK, "D"), (BROWN, "v"), (ORANGE, "P"))
"""The colours and marks of question sets; the first four as published."""
OF_KNOWN = {
    **{"properties": 0, "paraphrased": 1, "natural": 2, "multi_hop": 3},
    **{"popqa": 0, "triviaqa": 1, "hotpotqa": 2, "nq": 3, "nq_open": 3},
}
"""Indices in `SETS` for sets of the embedded world or of the literature, in every figure, with any other sets."""


def places_of_sets(names: Iterable[str]) -> dict[str, int]:
    """Return the index in `SETS` of each question set: its fixed one if it has one, else the first that is free."""
    listed = list(dict.fromkeys(names))
    places: dict[str, int] = {}
    for name in listed:
        place = OF_KNOWN.get(name.lower().replace("-", "_").replace(" ", "_"))
        if place is not None and place not in places.values():
            places[name] = place
    free = [place for place in range(len(SETS)) if place not in places.values()]
    for number, name in enumerate(name for name in listed if name not in places):
        places[name] = free[number] if number < len(free) else number % len(SETS)
    return {name: places[name] for name in listed}


def looks_of_sets(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the colour and mark of each question set."""
    return {name: SETS[place] for name, place in places_of_sets(names).items()}
