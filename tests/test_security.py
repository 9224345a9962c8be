"""Nothing that is read can run code, or reach outside the folders that were named; what is shown is escaped."""

import contextlib
import json
import pickle
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

import headwater as hw
from headwater.errors import HeadwaterError, ModelError
from headwater.models.checkpoint import stored_tensors
from headwater.runs.folder import RunFolder
from tests.made_up import record, sample
from tests.tiny import embedded

MARK = "touched by code from a data file"


class Runs:
    """Unpickling it writes a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.write_text, (self.file, MARK)


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint("llama"), tmp_path / "model")


def test_pickled_weights_are_never_read(tmp_path):
    config = {"d_model": 8, "n_layers": 1, "d_head": 4, "n_ctx": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    victim = tmp_path / "victim"
    (tmp_path / "model.pth").write_bytes(pickle.dumps({"W_E": Runs(victim)}, protocol=2))
    with pytest.raises(ModelError, match="Pickled files are not read"):
        hw.load(tmp_path)
    assert not victim.exists()
    pickle.loads((tmp_path / "model.pth").read_bytes())  # the attack itself works
    assert victim.read_text() == MARK


def test_a_tokenizer_class_that_is_none_leaves_the_tokenizer_of_the_file(folder):
    expected = hw.load(folder, device="cpu").tokenize(" Paris").tokens
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": ["Mine"]}))
    assert torch.equal(hw.load(folder, device="cpu").tokenize(" Paris").tokens, expected)


def test_a_checkpoint_that_brings_code_is_refused_unless_trusted(folder, tmp_path):
    victim = tmp_path / "victim"
    (folder / "code.py").write_text(f"from pathlib import Path\nPath({str(victim)!r}).write_text('ran')\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "unheard_of",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    for use in (hw.load, hw.classify_heads):
        with pytest.raises(ModelError, match=r"cannot be read"):
            use(folder)
    assert not victim.exists()


def test_a_tokenizer_that_brings_code_does_not_run_it(folder, tmp_path):
    victim = tmp_path / "victim"
    (folder / "code.py").write_text(f"from pathlib import Path\nPath({str(victim)!r}).write_text('ran')\n")
    file = folder / "tokenizer_config.json"
    changed = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", "code.Mine"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with contextlib.suppress(HeadwaterError):
        hw.load(folder, device="cpu")
    assert not victim.exists()


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "a/b", "a\\b", "a\0b", "..", "", "a" * 256, "é" * 128, 5, None, ["x"]],
)
def test_the_index_of_a_checkpoint_cannot_name_files_elsewhere(tmp_path, name):
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(ModelError, match=r"not a file of the folder|is damaged|is missing, damaged or"):
        stored_tensors(folder, 1)


def test_question_sets_and_relations_with_paths_for_names_write_nothing_outside_the_output_folder(tmp_path):
    model = embedded()
    names = ["../../outside", "/tmp/outside", "<b>set</b>"]
    rows = hw.load_questions("properties", sample=24).table
    rows["dataset"] = [names[i % 3] for i in range(len(rows))]
    work = tmp_path / "work"
    answered = hw.answer(model, hw.load_questions(rows), out=work / "answers", progress=False)
    assert set(answered.datasets) <= set(names)
    relation = hw.load_relations()[0]
    evil = type(relation)("../../outside", relation.category, relation.pairs)
    head_map = hw.classify_heads(model, relations=[evil], out=work / "heads", progress=False)
    head_map.save(work / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work"]
    assert sorted(path.name for path in work.iterdir()) == ["again", "answers", "heads"]


def test_results_and_models_are_shown_with_their_data_escaped():
    model = hw.load()
    model.name = "<script>alert(1)</script>"
    assert "<script>" not in model._repr_html_()
    rows = hw.load_questions("properties", sample=6).table
    rows["dataset"] = "<script>alert(1)</script>"
    answered = hw.answer(model, hw.load_questions(rows), progress=False)
    assert "<script>" not in answered._repr_html_()
    assert "&lt;script&gt;" in answered._repr_html_()
    assert isinstance(answered.table, pd.DataFrame)


def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_read(folder, monkeypatch):
    monkeypatch.setattr("headwater.kernels.devices.available_memory", lambda device: 2**10)
    monkeypatch.setattr("headwater.models.loading.read_pretrained", lambda *_: pytest.fail("read"))
    with pytest.raises(HeadwaterError, match=r"The model in .* would take .* MiB; cpu has .* MiB free"):
        hw.load(folder, device="cpu")


def test_a_model_spread_over_devices_gives_the_same_logits(folder):
    spread, whole = hw.load(folder, device="auto"), hw.load(folder, device="cpu")
    tokens = torch.randint(2, 100, (2, 7))
    torch.testing.assert_close(spread.run(tokens), whole.run(tokens))
    assert spread.fingerprint == whole.fingerprint


def test_links_in_a_run_folder_are_replaced_and_what_they_lead_to_is_left_alone(tmp_path):
    elsewhere, file = tmp_path / "elsewhere", tmp_path / "file"
    elsewhere.mkdir()
    file.write_text("mine")
    save_file({"a": torch.zeros(1)}, elsewhere / "a.safetensors")
    (elsewhere / ".mine.tmp").write_text("mine")
    folder = tmp_path / "run"
    RunFolder(folder, record())
    (folder / "pieces").rmdir()
    (folder / "pieces").symlink_to(elsewhere)
    for name in ("table.parquet", "tensors.safetensors"):
        (folder / name).symlink_to(file)
    run = RunFolder(folder, record())
    assert float(run.piece("a", lambda: {"a": torch.ones(1)})["a"]) == 1
    run.finish(sample())
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert sorted(path.name for path in elsewhere.iterdir()) == [".mine.tmp", "a.safetensors"]
    assert file.read_text() == "mine"


def test_a_lock_that_is_a_link_is_refused_and_its_target_keeps_its_bytes(tmp_path):
    file, folder = tmp_path / "file", tmp_path / "run"
    file.write_text("mine")
    folder.mkdir()
    (folder / ".lock").symlink_to(file)
    with pytest.raises(HeadwaterError, match="cannot be written"):
        RunFolder(folder, record())
    assert file.read_text() == "mine"
