"""A recipe is a file that may leave things out, and one that cannot be used is refused by name."""

import dataclasses
import json

import pytest
from tools.world.recipe import Recipe, read_recipe, recipe_of_values, write_recipe

from headwater.errors import InputError
from tests.small_world import SMALL


def test_a_recipe_is_a_file_that_may_leave_things_out(tmp_path):
    write_recipe(SMALL, tmp_path / "whole.json")
    assert read_recipe(tmp_path / "whole.json") == SMALL
    (tmp_path / "part.json").write_text(json.dumps({"people": 300, "shares": {"real": 1}}))
    assert read_recipe(tmp_path / "part.json") == dataclasses.replace(Recipe(), people=300, shares={"real": 1.0})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"poeple": 3}, r"'poeple', which no recipe has\. Did you mean 'people'"),
        ({"people": 2.5}, r"people must be a whole number, found 2\.5"),
        ({"people": True}, "people must be a whole number, found True"),
        ({"tied": 1}, "tied must be true or false, found 1"),
        ({"learning_rate": "fast"}, "learning_rate must be a number, found 'fast'"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number of at least 0"),
        ({"people": -1}, "people must be a finite number of at least 1, found -1"),
        ({"layers": 0}, "layers must be a finite number of at least 1, found 0"),
        ({"notes": -1}, "notes must be a finite number of at least 0, found -1"),
        ({"heads": 6, "kv_heads": 4}, "kv_heads must divide heads, found 4 and 6"),
        ({"kv_heads": 3}, "kv_heads must divide heads, found 3 and 16"),
        ({"heads": 12, "kv_heads": 12}, "heads must divide width, found 12 and 160"),
        ({"looking_still": 17}, "looking_still must be at most heads, found 17 and 16"),
        ({"heads_left_out": 1.0}, "heads_left_out must be less than 1, found 1.0"),
        ({"shares": {"rael": 1}}, r"shares has 'rael', no kind of document\. Did you mean 'real'"),
        ({"shares": {"real": 2}}, "share of real must lie between 0 and 1, found 2"),
        ({"shares": {"real": 0.7, "invented": 0.7}}, r"the shares add up to 1\.4"),
        ({"shares": []}, "shares must be an object"),
    ],
)
def test_a_wrong_recipe_is_named(values, message):
    with pytest.raises(InputError, match=message):
        recipe_of_values(values)


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_file_that_is_no_recipe_is_named(tmp_path, content):
    (tmp_path / "recipe.json").write_text(content)
    with pytest.raises(InputError, match=r"recipe\.json"):
        read_recipe(tmp_path / "recipe.json")
    with pytest.raises(InputError, match=r"gone\.json cannot be read"):
        read_recipe(tmp_path / "gone.json")
