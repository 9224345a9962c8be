"""Labels: an accepted answer as whole words after normalisation, hand-made cases and random ones."""

import re
import string
import unicodedata

import numpy as np
import pytest

from headwater.errors import InputError
from headwater.questions.judge import label_score
from headwater.questions.labels import check_label, is_refusal, match, verdict
from headwater.questions.words import find_words, normalised_words
from headwater.world.measure import is_right as world_label
from tests import chance


@pytest.mark.parametrize(
    ("answer", "alias", "found"),
    [
        ("It is Columbia, a hub of trade.", "Columbia", "Columbia"),
        ("the United States of America", "United States", "United States"),
        ("THE BEATLES!", "The Beatles", "BEATLES"),
        ("in the U.S. since 1912", "US", "U.S"),
        ("in the US since 1912", "U.S.", "US"),
        ("New-York", "New York", "New-York"),
        ("New York", "New-York", "New York"),
        ("São Paulo, Brazil", "Sao Paulo", "São Paulo"),
        ("Sa\u0303o Paulo", "São Paulo", "Sa\u0303o Paulo"),
        ("N’Djamena.", "N'Djamena", "N’Djamena"),
        ("NDJAMENA", "N'Djamena", "NDJAMENA"),
        ("“Straße” it was", "strasse", "Straße"),
        ("a ﬁne day", "Fine Day", "ﬁne day"),
        ("The The", "the the", "The The"),
        ("Москва — столица", "москва", "Москва"),
        ("!!!", "!!!", "!!!"),
        ("3,677 seated", "3,677", "3,677"),
        ("the (Holy) Grail", "Holy Grail", "Holy) Grail"),
    ],
)
def test_what_matches_and_which_characters_of_the_answer(answer, alias, found):
    matched = match(answer, ["something else", alias])
    assert matched.alias == alias
    assert answer[slice(*matched.span)] == found


@pytest.mark.parametrize(
    ("answer", "alias"),
    [
        ("Columbian coffee", "Columbia"),
        ("England", "land"),
        ("York New", "New York"),
        ("New old York", "New York"),
        ("Paris", "Parisian"),
        ("", "x"),
        ("the", "x"),
        ("anything", "!!!"),
        ("13", "3"),
    ],
)
def test_what_does_not_match(answer, alias):
    assert match(answer, [alias]) is None


def test_the_first_match_is_taken_and_of_these_the_longest():
    matched = match("Samuel Clemens, called Mark Twain", ["Mark Twain", "Samuel", "Samuel Clemens", "Clemens"])
    assert matched == ("Samuel Clemens", (0, 14))


@pytest.mark.parametrize(
    ("answer", "alias", "rules"),
    [
        ("Beatles", "The Beatles", "contains exact starts"),
        ("The Beatles", "Beatles", "contains exact starts"),
        ("Sao Paulo", "São Paulo", "contains exact starts"),
        ("the US", "U.S.", "contains exact starts"),
        ("the U.S. of old", "US", "contains starts"),
        ("It is Paris.", "Paris", "contains"),
        ("Paris, France", "Paris", "contains starts"),
        ("Parisian", "Paris", ""),
        ("not Paris but Lyon", "Paris", "contains"),  # what the rules do not read: negation,
        ("one of the largest", "one", "contains starts"),  # a part of something else,
        ("14 December 1972", "December 14, 1972", ""),  # another order,
        ("3.5", "35", "contains exact starts"),  # and marks
    ],
)
def test_three_rules_say_when_an_answer_is_right_and_none_of_them_reads(answer, alias, rules):
    found = [rule for rule in ("contains", "exact", "starts") if match(answer, ["no such", alias], rule)]
    assert found == rules.split()
    for rule in ("contains", "exact", "starts"):
        assert verdict(rule, "?", ["no such", alias], answer) == ((True, alias) if rule in found else (False, ""))


@pytest.mark.parametrize("answer", ["the Beatles", "Sao Paulo", "U.S.", "Lyon", "!!!", "", "THE BEATLES, of Liverpool"])
def test_answers_memorization_and_the_world_have_one_label(answer):
    for alias in ("Beatles", "São Paulo", "the US", "Lyon", "!!!"):
        is_right = match(answer, [alias]) is not None
        assert verdict("contains", "?", [alias], answer).is_right == is_right
        assert label_score("?", [alias], answer) == (5 if is_right else 1)
        assert world_label(answer, [alias]) == is_right


def test_a_rule_that_there_is_not_and_a_judge_that_fails_are_one_readable_line():
    with pytest.raises(InputError, match=r"label=3 is neither one of contains, exact, starts nor a function"):
        check_label(3)
    with pytest.raises(
        InputError, match=r"rule='contain' is not one of contains, exact, starts. Did you mean 'contains'"
    ):
        match("x", ["x"], "contain")

    def failing(question, accepted, answer):
        raise ValueError("boom")

    with pytest.raises(InputError, match=r"judge failed on the question 'Q\?' and the answer 'A': ValueError: boom"):
        verdict(failing, "Q?", ["x"], "A")
    assert verdict(lambda *_: np.bool_(True), "Q?", ["x"], "A") == (True, "")
    assert verdict(lambda *_: None, "Q?", ["x"], "A") == (None, "")


def squad(text):
    """The published normalisation of SQuAD, written as its evaluation script does, for plain text."""
    kept = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def test_words_agree_with_the_published_normalisation_on_plain_text():
    rng = chance.rng()
    letters = list("abcXYZ'.-!  1\t")
    for _ in range(2000):
        pieces = rng.choice(["the ", "a ", "An ", *letters], size=rng.integers(1, 12))
        text = "".join(pieces)
        words = normalised_words(text, "joined")
        assert squad(text) in ("", " ".join(word.text for word in words)), text
        assert all(text[word.start : word.end].strip(string.punctuation + " ") for word in words)


def test_a_word_stands_where_it_says():
    rng = chance.rng()
    for _ in range(500):
        text = "".join(rng.choice(list("ab éŁ\u0301ﬁß’'-.東 "), size=rng.integers(1, 15)))
        for marks in ("joined", "apart"):
            words = normalised_words(text, marks)
            ends = [0, *(word.end for word in words)]
            for word, end_before in zip(words, ends, strict=False):
                assert end_before <= word.start < word.end
                again = normalised_words(unicodedata.normalize("NFD", text[word.start : word.end]), marks)
                assert [other.text for other in again] == [word.text]


def test_find_words_prefers_whole_words():
    assert find_words("Chadwick of Chad", "Chad") == (12, 16)
    assert find_words("Chadwick", "Chad") == (0, 4)
    assert find_words("a (b) c", "(b)") == (2, 5)
    assert find_words("Chad", "chad") is None
    assert find_words("Chad", " ") is None


@pytest.mark.parametrize(
    "answer",
    [
        "I don't know.",
        "I’m not sure who that is",
        "I am unable to answer that question.",
        "As an AI language model, I have no access to the news.",
        "Sorry, I cannot verify that.",
        "There is no information about him.",
        "I do not have enough information",
        "Unknown.",
        "N/A",
        "I'm sorry, but nobody knows.",
        "It is not known who wrote it.",
        "That is not known.",
        "Nobody knows.",
        "That was never told.",
        "No one knows where he was born",
    ],
)
def test_refusals_are_told(answer):
    assert is_refusal(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "Paris",
        "The Unknown Soldier",
        "Sorry",
        "I Can't Get No Satisfaction",
        "No one",
        "Nobody",
        "That Was Then",
        "It was not Paris but Lyon",
        "Aiden",
        "Not Today",
        "he said I'm sorry",
    ],
)
def test_answers_are_not_taken_for_refusals(answer):
    assert not is_refusal(answer)
