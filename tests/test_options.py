"""Options: what is no choice, no count or no number in range is one line; what numpy calls a number is one."""

import enum
import json
from functools import reduce
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.heads.card import salient_operations
from headwater.heads.relations import load_relations
from headwater.models.weights import open_weights
from headwater.options import (
    LONGEST_SHOWN,
    checked_count,
    checked_name,
    checked_names,
    checked_number,
    checked_path,
    checked_repeats,
    checked_several,
    is_one,
    one_or_several,
    shown,
    whole_numbers,
)
from headwater.patching.metrics import answer_ids
from headwater.runs.identity import describe
from tests.tiny import embedded
from tests.typed import EVERYWHERE


def test_what_can_be_used_is_returned_as_python_has_it():
    assert checked_name("edges", "after", ("after", "answer")) == "after"
    assert type(checked_count("seeds", np.int64(3))) is int
    assert checked_count("seed", 0, least=0) == 0
    assert checked_path("out", "~/runs") == Path.home() / "runs"
    assert checked_number("level", np.float64(0.5), above=0.0, below=1.0) == 0.5


@pytest.mark.parametrize(
    ("check", "arguments", "message"),
    [
        (
            checked_name,
            ("edges", "aftr", ("after", "answer")),
            "is not one of after, answer[.] Did you mean 'after'",
        ),
        (checked_name, ("edges", "zzz", ("after", "answer")), "edges='zzz' is not one of after, answer[.]$"),
        (checked_name, ("edges", None, ("after",)), "edges=None is not one of after"),
        (checked_name, ("edges", ["after"], ("after",)), "is not one of after"),
        (checked_count, ("seeds", 0), "^seeds=0 must be at least 1[.]$"),
        (checked_count, ("seeds", True), "seeds=True must be"),
        (checked_count, ("seeds", 1.5), "^seeds=1.5 must be a whole number, at least 1[.]$"),
        (checked_count, ("seeds", "3"), "seeds='3' must be a whole number"),
        (checked_path, ("out", 3), "^out=3 must be a path: a text or a pathlib.Path, not int[.]$"),
        (checked_number, ("level", 1.0, 0.0, 1.0), "^level=1.0 must be a number between 0 and 1[.]$"),
        (checked_number, ("variance", float("nan"), 0.0), "variance=nan must be a number above 0"),
        (checked_number, ("variance", "1", 0.0), "variance='1' must be a number above 0"),
    ],
)
def test_what_cannot_be_used_is_one_line(check, arguments, message):
    with pytest.raises(InputError, match=message):
        check(*arguments)


@pytest.mark.skipif(EVERYWHERE, reason="beartype refuses these calls where all modules are wrapped")
def test_a_caller_without_a_type_checker_is_told_too():
    model = embedded()
    weights, quiet = open_weights(model), {"progress": False}
    two = hw.token_statistics(model, [" a b", " c d"], **quiet)
    lines = []
    for use, given in (
        (load_relations, 3),
        (load_relations, [None, 3.5]),
        (hw.Sweep.load, 3),
        (hw.load_depth_graph, 3),
        (lambda k: hw.classify_heads(model, k=k, **quiet), True),
        (lambda layer: salient_operations(weights, [(layer, 0)]), "1"),
        (lambda answer: answer_ids(answer, model.tokenizer, 2, 300), {5, 9}),
        (lambda pairs: hw.Relation("r", None, pairs), {"ja": "nein"}),
        (lambda pairs: hw.Relation("r", None, pairs), ["ja"]),
        (lambda lens: hw.token_statistics(model, " a b", lens=lens, **quiet), {0: 1}),
        (lambda lens: hw.token_statistics(model, " a b", lens=lens, **quiet), {"a": (1, 2)}),
        (lambda labels: hw.membership(two, labels), {0: 0, 1: 1}),
    ):
        with pytest.raises(hw.HeadwaterError) as told:
            use(given)
        lines.append(str(told.value))
    starts = (
        "relations=3 must be",
        "relations=3.5 must be",
        "folder=3 must be",
        "source=3 must be",
        "k=True must be a whole number, at least 1",
        "('1', 0) is not one head",
        "A set was given as an answer: give a token, or a list with a token for each prompt.",
        "Relation 'r': pairs={'ja': 'nein'} is not a list of pairs",
        "Relation 'r': 'ja' is not a pair",
        "A tuned lens maps layers, whole numbers, to pairs of tensors (A, b), here of shapes",
        "A tuned lens maps layers, whole numbers, to pairs of tensors (A, b), here of shapes",
        "A dict was given as labels: give a list of labels, one for each text",
    )
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == list(starts)


@pytest.mark.parametrize("given", [True, np.bool_(True), 1.5, "3", None, torch.tensor([1, 2])])
def test_what_is_no_count_is_refused_as_such(given):
    with pytest.raises(InputError, match=r"k=.* must be a whole number, at least 1"):
        checked_count("k", given)


@pytest.mark.parametrize("given", [np.int64(10), np.uint8(10), torch.tensor(10), np.array(10)])
def test_numbers_of_any_library_are_counts(given):
    number = checked_count("k", given, most=10)
    assert (number, type(number)) == (10, int)
    with pytest.raises(InputError, match="k=10 must be from 1 to 9"):
        checked_count("k", given, most=9)


@pytest.mark.parametrize(
    "given", ["z", b"z", 3, None, object, torch.tensor(2.5), np.array(2.5), np.float32(1)], ids=repr
)
def test_one_thing_is_one_though_it_has_the_methods_of_several(given):
    assert is_one(given)
    assert one_or_several(given) == [given]
    with pytest.raises(InputError, match=r"was given as labels: give a list with a label for each text[.]$"):
        checked_several("labels", given, "a list with a label for each text")


@pytest.mark.parametrize(
    "given", [[1, 2], (1, 2), iter([1, 2]), pd.Series([1, 2]), np.array([1, 2]), torch.tensor([1, 2])]
)
def test_what_lists_columns_arrays_and_iterators_hold_is_several(given):
    assert [int(part) for part in checked_several("labels", given, "a list")] == [1, 2]


@pytest.mark.parametrize("given", [{0: True}, {1, 2}, pd.DataFrame({"label": [1]})], ids=["dict", "set", "DataFrame"])
def test_labels_are_not_taken_from_keys_or_columns_or_from_what_has_no_order(given):
    with pytest.raises(InputError, match=f"^A {type(given).__name__} was given as labels: give a list"):
        checked_several("labels", given, "a list")


def test_a_layer_may_be_a_number_of_any_library_and_no_text():
    assert whole_numbers(torch.tensor(2)) == whole_numbers(np.int8(2)) == whole_numbers([2]) == [2]
    for given in ("2", torch.tensor(2.5), None, [2, "2"]):
        with pytest.raises(TypeError):
            whole_numbers(given)


def test_what_is_shown_of_a_long_value_is_its_beginning_on_one_line():
    assert shown(["a  b", 3]) == "['a  b', 3]"
    assert "\n" not in shown(np.zeros((3, 3)))
    assert shown(reduce(lambda inner, _: [inner], range(3000), [])) == "<a list whose repr fails>"
    assert shown(["ab"] * 5000) == f"{str(['ab'] * 5000)[:LONGEST_SHOWN]}... (30,000 characters)"


def test_work_that_would_be_for_nothing_is_refused():
    assert checked_repeats("seeds", np.int64(1000)) == 1000
    with pytest.raises(InputError, match=r"^seeds=1001 must be from 1 to 1000[.]$"):
        checked_repeats("seeds", 1001)


def test_a_share_may_reach_its_upper_end_where_that_is_allowed():
    assert checked_number("threshold", 1, above=0.0, below=1.0, up_to=True) == 1.0
    for given in (0, 1.1, True, float("nan"), "0.5"):
        with pytest.raises(InputError, match=r"threshold=.* must be a number above 0 and at most 1"):
            checked_number("threshold", given, above=0.0, below=1.0, up_to=True)


def test_a_name_of_an_enumeration_is_recorded_as_plain_text():
    class Named(enum.StrEnum):
        ONE = "one"

    assert [type(checked_name("name", name, ["one"])) for name in (Named.ONE, np.str_("one"))] == [str, str]


def test_names_in_a_set_have_the_same_order_in_every_process():
    letters = list("hgfedcba")
    assert checked_names("names", set(letters), letters) == letters
    assert checked_names("names", ("a", "h", "a"), letters) == ["a", "h"]


def test_numbers_of_numpy_are_recorded_as_pythons_own():
    given = {"k": np.int64(3), "levels": (np.float32(0.5), [np.int8(1)]), "name": "x", "none": None}
    assert json.dumps(describe(given)) == '{"k": 3, "levels": [0.5, [1]], "name": "x", "none": null}'
