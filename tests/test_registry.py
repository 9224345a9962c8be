"""Rows by name: added once, found by name, and told apart where a name is not there."""

import sys

import pytest

from headwater.errors import InputError
from headwater.registry import Registry


def colours() -> Registry[str, int]:
    registry: Registry[str, int] = Registry("colour")
    registry.add("red", 1)
    registry.add("green", 2)
    return registry


def test_rows_stand_in_the_order_in_which_they_were_added():
    registry = colours()
    registry.add("blue", 0)
    assert list(registry) == ["red", "green", "blue"]
    assert dict(registry) == {"red": 1, "green": 2, "blue": 0}


def test_a_decorator_adds_what_it_decorates_and_gives_it_back():
    registry: Registry[str, object] = Registry("function")

    @registry.add("double")
    def double(x):
        return 2 * x

    assert registry["double"] is double
    assert double(2) == 4


def test_a_name_that_is_taken_is_an_error_and_the_row_stays():
    registry = colours()
    with pytest.raises(InputError, match="There is a colour 'red' already"):
        registry.add("red", 3)
    assert registry["red"] == 1


@pytest.mark.parametrize("name", ["gren", 3, None, ["red"]])
def test_a_name_that_is_not_there_is_told_what_there_is(name):
    with pytest.raises(InputError, match=r"There is no colour .*green"):
        colours()[name]
    assert name not in colours()


def test_a_row_added_for_a_while_is_gone_afterwards_even_after_an_error():
    registry = colours()
    with registry.with_row("blue", 3):
        assert registry["blue"] == 3
    assert list(registry) == ["red", "green"]
    with pytest.raises(ZeroDivisionError), registry.with_row("blue", 3):
        _ = 1 / 0
    assert list(registry) == ["red", "green"]


def test_a_registry_is_filled_by_its_module_at_the_first_look(tmp_path, monkeypatch):
    (tmp_path / "fills_it.py").write_text("import tests.test_registry as here\nhere.LATE.add('late', 1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    global LATE
    LATE = Registry("row", "fills_it")
    assert "fills_it" not in sys.modules
    assert list(LATE) == ["late"]


def test_a_registry_may_be_filled_by_all_files_of_a_package(tmp_path, monkeypatch):
    (tmp_path / "fills_much").mkdir()
    (tmp_path / "fills_much" / "__init__.py").write_text("")
    for name in ("first", "second"):
        line = f"import tests.test_registry as here\nhere.LATE.add({name!r}, 1)\n"
        (tmp_path / "fills_much" / f"{name}.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    global LATE
    LATE = Registry("row", "fills_much")
    assert sorted(LATE) == ["first", "second"]


def test_rows_keyed_by_classes_are_named_by_them():
    registry: Registry[type, str] = Registry("figure")
    registry.add(int, "whole")
    assert registry[int] == "whole"
    with pytest.raises(InputError, match=r"There is no figure float. Valid: int."):
        registry[float]


def test_the_row_of_a_class_is_that_of_the_nearest_class_it_inherits_from():
    registry: Registry[type, str] = Registry("figure")
    registry.add(Exception, "any")
    registry.add(ArithmeticError, "arithmetic")
    assert registry.of_class(ZeroDivisionError) == "arithmetic"
    assert registry.of_class(KeyError) == "any"
    with pytest.raises(InputError, match=r"There is no figure int"):
        registry.of_class(int)
