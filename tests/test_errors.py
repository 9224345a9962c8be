"""Messages can be printed and read whatever they quote."""

import pytest

from headwater.errors import HeadwaterError, did_you_mean


class Thing:
    pass


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (object(), "<object>"),
        (Thing(), "<Thing>"),
        (lambda: None, "<lambda>>"),
        ("\ud800", "\\ud800"),
        ("a" * 5000, " characters)"),
        ("a b " * 100, "a b a b"),
    ],
)
def test_a_message_shows_what_was_given_without_addresses_half_characters_and_endless_words(given, shown):
    message = str(HeadwaterError(f"x={given!r} cannot be used."))
    assert shown in message
    assert " at 0x" not in message
    assert message.endswith("cannot be used.")
    assert len(message) < 500
    message.encode()


@pytest.mark.parametrize("asked", [None, 3, object(), ["resid_pre"]])
def test_what_is_no_name_at_all_is_told_the_valid_ones(asked):
    assert did_you_mean(asked, ["resid_pre", "z"]) == " Valid: resid_pre, z."
    assert did_you_mean("resid_per", ["resid_pre", "z"]) == " Did you mean 'resid_pre'?"


def test_a_name_in_other_letters_is_near_and_the_nearest_in_its_own_is_nearer():
    assert did_you_mean("EAP-IG", ["eap-ig", "exact"]) == " Did you mean 'eap-ig'?"
    assert did_you_mean("edgess", ["Edges", "edges"]).startswith(" Did you mean 'edges'")
