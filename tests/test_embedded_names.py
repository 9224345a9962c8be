"""The embedded models are found by their names wherever a model is named, and their world's files beside them."""

import json

import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import ModelError
from headwater.models.checkpoint import checkpoint_folder
from headwater.models.packaged import FOLDERS, is_embedded, world_folder
from headwater.models.weights import open_weights
from tests import small_world

QUIET = {"progress": False}


@pytest.fixture(autouse=True)
def world(tmp_path, monkeypatch):
    """A tiny world in place of the one that comes with headwater."""
    (tmp_path / "world").symlink_to(small_world.tiny().folder)
    monkeypatch.setattr("headwater.models.packaged.files", lambda package: tmp_path)
    return tmp_path / "world"


@pytest.fixture(scope="module")
def relation():
    return [one for one in hw.load_relations() if one.name == "name_copying"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_name_is_a_model_in_memory_a_folder_and_weights_to_be_read(name, world):
    model, weights = hw.load(name), open_weights(name)
    assert (model.name, weights.name, model.revision, weights.revision) == (name, name, None, None)
    assert checkpoint_folder(name) == world / FOLDERS[name]
    assert model.fingerprint == weights.fingerprint == open_weights(world / FOLDERS[name]).fingerprint


def test_without_a_name_the_base_model_is_loaded_and_the_two_differ():
    base, chat = hw.load(), hw.load("embedded-instruct")
    assert base.name == "embedded"
    assert base.fingerprint == hw.load("embedded").fingerprint != chat.fingerprint
    assert base.tokenizer.chat_template is None
    assert "<|assistant|>" in chat.tokenizer.chat_template


@pytest.mark.parametrize(("name", "expected"), [("embedded", True), ("./embedded", False), (None, False), (3, False)])
def test_a_folder_of_the_same_name_is_given_as_a_path(name, expected):
    assert is_embedded(name) == expected


def test_a_head_map_finds_its_model_again_by_name(relation, tmp_path):
    hw.classify_heads("embedded-instruct", relations=relation, **QUIET).save(tmp_path / "heads")
    heads = hw.HeadMap.load(tmp_path / "heads")
    assert heads.run.model == "embedded-instruct"
    pd.testing.assert_frame_equal(heads.salient(1, 0), heads.salient(1, 0, model=hw.load("embedded-instruct")))


def test_base_and_instruct_are_compared_by_name(relation):
    assert set(hw.compare_heads(list(FOLDERS), relations=relation, **QUIET).run.options["models"]) == set(FOLDERS)


def test_the_files_of_the_world_are_found(world):
    assert world_folder() == world
    assert set(hw.load_questions().datasets) == {"properties", "paraphrased", "natural", "multi_hop"}
    assert len(hw.load_depth_graph().table) > 0
    assert set(hw.load_member_texts()["kind"]) == {"member", "other wording", "held out", "note"}
    assert len(hw.world.task("indirect_object", 5)) == 5


def test_the_instruct_model_is_read_on_texts_of_its_world():
    found = hw.attention_behaviour(hw.load("embedded-instruct"), sequences=2, length=4, copying=False, **QUIET)
    assert set(found.table["on"]) == {"random", "text"}


@pytest.mark.parametrize("name", [None, "embedded-instruct"])
def test_commands_take_the_names(name, run):
    given = [] if name is None else [name]
    for command in (["relations", *given], ["heads", *given, "--relations", "name_copying", "--quiet"]):
        assert json.loads(run(*command, "--json")[1])["model"] == (name or "embedded")


def test_a_model_that_does_not_come_with_headwater_is_named_with_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.setattr("headwater.models.packaged.files", lambda package: tmp_path / "empty")
    with pytest.raises(ModelError, match=r"instruct is absent or incomplete .* `python -m tools.world train`"):
        hw.load("embedded-instruct")


def test_the_instruct_model_writes_on_from_its_template():
    model = hw.load("embedded-instruct")
    text = model.tokenizer.apply_chat_template([{"role": "user", "content": "Who?"}], tokenize=False)
    assert torch.isfinite(model.run(text)).all()
