"""Sweeps compared: effects within a tolerance, normalized ones within what it makes of them."""

import pandas as pd


def assert_same_table(found, expected, atol):
    """Effects within a tolerance; normalized ones within what it makes of them, as they are divided by a gap."""
    measured = ["effect", "clean", "corrupted", "normalized_effect"]
    pd.testing.assert_frame_equal(found.drop(columns=measured), expected.drop(columns=measured))
    for column in measured[:3]:
        assert (found[column] - expected[column]).abs().max() < atol
    gap = (expected["clean"] - expected["corrupted"]).abs()
    slack = 3 * atol * (1 + expected["normalized_effect"].abs()) / gap
    assert ((found["normalized_effect"] - expected["normalized_effect"]).abs() < slack)[gap > 3 * atol].all()
