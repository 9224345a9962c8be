"""A patch board of a tiny model, and what is clicked on it."""

from functools import cache

import headwater as hw
from tests.tiny import tiny_model

CLICKS = {
    "a cell": [{"site": "resid_pre", "layer": 1, "position": 4}],
    "a whole layer": [{"site": "attn_out", "layer": 0}],
    "a head": [{"site": "z", "layer": 0, "head": 1}],
    "a head at a token": [{"site": "z", "layer": 1, "head": 0, "position": 5}],
    "an edge": [{"site": "pattern", "layer": 1, "head": 1, "position": -1, "key": 4}],
    "what a token reads": [{"site": "pattern", "layer": 0, "position": 5}],
    "a set": [
        {"site": "z", "layer": 0, "head": 1},
        {"site": "resid_pre", "layer": 1, "position": 4},
        {"site": "pattern", "layer": 1, "head": 0, "position": 5, "key": 3},
    ],
}

PAIR = [[5, 8, 13, 21, 6, 9, 11]], [[5, 8, 13, 21, 7, 9, 11]]


@cache
def model_of(family):
    return hw.load(tiny_model(family))


def rerun(code, board, **more):
    """The effect by the call that a click names."""
    clean, corrupted = PAIR
    names = {"hw": hw, "model": board.model, "clean": clean, "corrupted": corrupted, "metric": board.metric} | more
    return eval(code.removesuffix(")") + ", progress=False)", names).table
