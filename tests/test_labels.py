"""Labels: an accepted answer as whole words after normalisation, hand-made cases and random ones."""

import re
import string
import unicodedata

import numpy as np
import pytest
from tools.world.measure import is_right as world_label

from headwater.errors import InputError
from headwater.questions.labels import is_refusal, label_score, match, verdict
from headwater.questions.words import find_words, normalised_words
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
        ("Paris", "Parisian", ""),
        ("Columbian coffee", "Columbia", ""),
        ("England", "land", ""),
        ("York New", "New York", ""),
        ("New old York", "New York", ""),
        ("It is Shakespeare's play", "Shakespeare", "contains"),
        ("France’s capital", "France", "contains starts"),
        ("It is McDonald's.", "McDonald's", "contains"),
        ("McDonald's—a chain", "McDonald's", "contains starts"),
        ("It is McDonald", "McDonald's", ""),
        ("the 1990's", "1990", ""),
        # what the rules do not read: negation, a part of something else, another order
        ("not Paris but Lyon", "Paris", "contains"),
        ("one of the largest", "one", "contains starts"),
        ("14 December 1972", "December 14, 1972", ""),
        # nothing
        ("", "x", ""),
        ("the", "x", ""),
        ("", "!!!", ""),
        ("", "the", ""),
        # scripts without spaces
        ("日本の首都は東京です", "東京", "contains"),
        ("東京です。", "東京", "contains starts"),
        ("東京", "東京", "contains exact starts"),
        ("「東京」", "東京", "contains exact starts"),
        ("日本的首都是东京。", "东京", "contains"),
        ("大阪です", "東京", ""),
        ("東京都", "京都", ""),
        ("京都と東京", "京都", "contains starts"),
        ("東京、都市", "京都", ""),
        ("首都はパリです", "パリ", "contains"),
        ("バリです", "パリ", ""),
        ("インドネシアです", "インド", ""),
        ("ﾊﾟﾘです", "パリ", "contains starts"),
        ("コカ・コーラ", "コカコーラ", "contains exact starts"),
        ("二十", "十", ""),
        ("1945年です", "1945", "contains starts"),
        ("เมืองหลวงคือกรุงเทพครับ", "กรุงเทพ", "contains"),
        ("กรุงเทพ", "กรุงเทพ", "contains exact starts"),
        ("เกาะ", "กา", ""),
        ("ที่นี่คือเชียงใหม่", "กรุงเทพ", ""),
        ("រាជធានីគឺភ្នំពេញ", "ភ្នំពេញ", "contains"),
        ("မြို့တော်ရန်ကုန်ပါ", "ရန်ကုန်", "contains"),
        ("서울입니다", "서울", "contains starts"),
        ("대한민국의 수도는 서울이에요", "서울", "contains"),
        ("서울에서는", "서울", "contains starts"),
        ("인도네시아", "인도", ""),
        ("남서울입니다", "서울", ""),
        ("서울", "서울", "contains exact starts"),
        ("분", "부", ""),
        # marks without width, and letters that Unicode does not decompose
        ("Pa\u200bris", "Paris", "contains exact starts"),
        ("\u200fParis\u200e", "Paris", "contains exact starts"),
        ("\u2066Paris\u2069 it is", "Paris", "contains starts"),
        ("\ufeffParis", "Paris", "contains exact starts"),
        ("Pa\u00adris", "Paris", "contains exact starts"),
        ("القاهــرة", "القاهرة", "contains exact starts"),
        ("Łódź", "Lodz", "contains exact starts"),
        ("Lodz in Poland", "Łódź", "contains starts"),
        ("Malmø", "Malmo", "contains exact starts"),
        ("Đà Nẵng", "Da Nang", "contains exact starts"),
        ("Straße", "strasse", "contains exact starts"),
        ("Ærø", "Aero", "contains exact starts"),
        ("Þórr", "Thorr", "contains exact starts"),
        ("Hawaiʻi", "Hawaii", "contains exact starts"),
        ("٣", "3", "contains exact starts"),
        # letters
        ("The answer is A.", "A", "contains"),
        ("A", "A", "contains exact starts"),
        ("A.", "A", "contains exact starts"),
        ("(A)", "A", "contains exact starts"),
        ("A) Paris", "A", "contains starts"),
        ("A is correct", "A", "contains starts"),
        ("It is A because", "A", "contains"),
        ("the answer is (a)", "A", "contains"),
        ("It is a dog", "A", ""),
        ("A dog.", "A", ""),
        ("Answer: A dog", "A", ""),
        ("The answer is B.", "A", ""),
        ("The answer is B.", "B", "contains"),
        ("I think it is B", "I", ""),
        ("It is I.", "I", "contains"),
        ("Elizabeth I of England", "Elizabeth I", "contains starts"),
        ("Vitamin C", "Vitamin A", ""),
        ("Vitamin A is it", "Vitamin A", "contains starts"),
        ("a vitamin a day", "Vitamin A", ""),
        ("Once upon a time", "Once Upon A Time", "contains exact starts"),
        ("It is The The.", "The The", "contains"),
        ("the cat", "The", ""),
        # signs, decimals, fractions, times, powers
        ("−5", "5", ""),
        ("-5", "5", ""),
        ("−5", "-5", "contains exact starts"),
        ("It is –5 degrees", "-5", "contains"),
        ("+5", "5", "contains exact starts"),
        ("±5", "5", "contains"),
        ("1990-1995", "1995", "contains"),
        ("1990–1995", "19901995", ""),
        ("COVID-19", "COVID19", "contains exact starts"),
        ("3.5", "35", ""),
        ("3.5", "3", ""),
        ("3,5", "3.5", "contains exact starts"),
        (".5", "5", ""),
        (".5", "0.5", "contains exact starts"),
        ("3,677", "3677", "contains exact starts"),
        ("1.000.000", "1,000,000", "contains exact starts"),
        ("1,2,3", "123", ""),
        ("13", "3", ""),
        ("1/2", "12", ""),
        ("½", "1/2", "contains exact starts"),
        ("1½", "11/2", ""),
        ("1/2", "2", ""),
        ("9/11", "911", ""),
        ("12/14/1972", "1972", "contains"),
        ("1:30", "130", ""),
        ("1:30 pm", "1:30", "contains starts"),
        ("1:30", "30", ""),
        ("2-0", "20", ""),
        ("10⁶", "106", ""),
        ("10⁶", "10^6", "contains exact starts"),
        ("H₂O", "H2O", "contains exact starts"),
        # symbols
        ("$5", "€5", ""),
        ("$5", "5", "contains exact starts"),
        ("5 %", "5%", "contains exact starts"),
        ("5%", "5‰", ""),
        ("C++", "C", ""),
        ("C#", "C", ""),
        ("C", "C++", ""),
        ("It is C++.", "C++", "contains"),
        ("C♯", "C#", "contains exact starts"),
        ("B♭ major", "B major", ""),
        ("B♭", "Bb", "contains exact starts"),
        ("A+", "A", ""),
        ("O−", "O+", ""),
        ("O-", "O-", "contains exact starts"),
        ("x > y", "x < y", ""),
        ("2 + 2", "22", ""),
        ("> Paris", "Paris", "contains exact starts"),
        ("Yahoo!", "Yahoo", "contains exact starts"),
        ("!!!", "!!!", "contains exact starts"),
        ("The band “!!!”.", "!!!", "contains"),
        ("!!! (a band)", "!!!", "contains starts"),
        ("Paris!!!", "!!!", ""),
        ("anything", "!!!", ""),
        ("!!!!", "!!!", ""),
        ("÷", "×", ""),
    ],
)
def test_three_rules_say_when_an_answer_is_right(answer, alias, rules):
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
    letters = list("bcXYZ'.;!  \t")
    for _ in range(2000):
        pieces = rng.choice(["the ", "An ", *letters], size=rng.integers(1, 12))
        text = "".join(pieces)
        words = [word for word in normalised_words(text, "joined") if not word.may_be_article]
        assert squad(text) in ("", " ".join(word.text for word in words)), text
        assert all(text[word.start : word.end].strip(string.punctuation + " ") for word in words)


def test_a_word_stands_where_it_says():
    rng = chance.rng()
    for _ in range(500):
        text = "".join(rng.choice(list("ab éŁ\u0301ﬁß’'-東 "), size=rng.integers(1, 15)))
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
        "The composer of Le Concert is unknown.",
        "The exact date of his birth is still not known.",
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
        "Unknown Pleasures is an album that was unknown in Paris.",
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
