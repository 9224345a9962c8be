"""Whole runs take many cells and examples in each, and give what one run per cell gives."""

import math
import warnings

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.errors import ModelError
from headwater.patching import runners, walk
from tests.random_models import random_model
from tests.same_table import assert_same_table
from tests.tiny import FAMILIES, tiny_hooked, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*swept with whole runs")
CLOSE = 1e-5
QUIET = {"progress": False}


@pytest.fixture(scope="module")
def models():
    made = {}

    def model(name):
        if name not in made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made[name] = hw.load(random_model(name), tokenizer=tiny_tokenizer())
        return made[name]

    return model


@pytest.fixture
def forwards(monkeypatch):
    """How many rows each forward of edited prompts had."""
    rows, plain = [], runners.WholeRuns.forward

    def counted(self, *args):
        rows.append(len(args[-1]))
        plain(self, *args)

    monkeypatch.setattr(runners.WholeRuns, "forward", counted)
    return rows


def pairs(lengths):
    drawn = [torch.randint(2, 200, (2, length)).tolist() for length in lengths]
    return [clean for clean, _ in drawn], [corrupted for _, corrupted in drawn]


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "sites"), [("mamba", "resid_pre"), ("jamba", ("resid_pre", "mlp_out")), ("bloom", ("z", "mlp_out"))]
)
def test_many_cells_and_examples_in_a_run_give_what_one_run_per_cell_gives(models, forwards, name, sites):
    model, (clean, corrupted) = models(name), pairs([6, 4, 6])
    metrics = [hw.logit_difference([5, 6, 7], 9), hw.kl_divergence(at=-2)]
    options = {"sites": sites, "metric": metrics, "window": 2, **QUIET}
    batched = hw.patch(model, clean, corrupted, **options)
    assert batched.engine == "whole runs"
    in_batches, rows = len(forwards), sum(forwards)
    alone = hw.patch(model, clean, corrupted, batch_size=1, **options)
    assert forwards[in_batches:] == [1] * rows
    assert in_batches <= 4 < rows, "a forward for each length and depth that is read"
    slack = CLOSE * max(1.0, float(alone.table[["clean", "corrupted"]].abs().max(axis=None)))
    assert_same_table(batched.table, alone.table, slack)
    assert batched.table["effect"].abs().max() > 1e-3


def test_cells_times_examples_over_the_batch_is_how_many_runs_there_are(models, forwards):
    model, (clean, corrupted) = models("mamba"), pairs([5, 5, 5, 5])
    sweep = hw.patch(
        model, clean, corrupted, sites="resid_pre", metric=hw.logit_difference(5, 9), batch_size=7, **QUIET
    )
    assert len(sweep.table) == 4 * 2 * 5
    assert len(forwards) == math.ceil(4 * 2 * 5 / 7)
    assert sum(forwards) == 4 * 2 * 5


@pytest.mark.parametrize("variant", ["mask", "zero"])
def test_edges_cut_in_one_row_stay_in_the_others(models, forwards, variant):
    model, (tokens, _) = models("bloom"), pairs([6, 4])
    options = {
        "block": {"near": hw.Edges({2, 3}, {0, 1}), "far": hw.Edges(-1, 0)},
        "metric": hw.logit_difference(5, 9),
        "over": ("layer", "head"),
        "variant": variant,
        **QUIET,
    }
    batched = hw.knockout(model, tokens, **options)
    in_batches = len(forwards)
    alone = hw.knockout(model, tokens, batch_size=1, **options)
    assert (batched.engine, set(forwards[in_batches:])) == ("whole runs", {1})
    assert in_batches < len(forwards) / 8
    columns = ["effect", "edges"]
    assert (batched.table[columns] - alone.table[columns]).abs().max(axis=None) < CLOSE
    assert batched.table["effect"].abs().max() > 1e-3


def test_a_run_has_half_of_its_rows_where_memory_runs_out(models, forwards, monkeypatch):
    model, (clean, corrupted) = models("mamba"), pairs([5, 5])
    options = {"sites": "resid_pre", "metric": hw.logit_difference(5, 9), **QUIET}
    expected = hw.patch(model, clean, corrupted, **options)
    assert forwards == [20]
    counted = runners.WholeRuns.forward

    def too_large(self, *args):
        if len(args[-1]) > 6:
            raise torch.OutOfMemoryError("out of memory")
        counted(self, *args)

    forwards.clear()
    monkeypatch.setattr(runners.WholeRuns, "forward", too_large)
    assert_same_table(hw.patch(model, clean, corrupted, **options).table, expected.table, CLOSE)
    assert forwards == [5, 5, 5, 5]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_side_by_side_in_attention_give_what_each_gives_alone(family, monkeypatch):
    model, (clean, corrupted) = tiny_hooked(family), pairs([9, 9, 7])
    sites = ("z", "resid_pre", "mlp_out")
    asked = {"sites": sites, "positions": {4, 6}, "metric": hw.logit_difference(5, 9), **QUIET}
    found, groups_of_rows = [], walk.groups_of_rows
    monkeypatch.setattr(walk, "groups_of_rows", lambda tile: found.append(groups_of_rows(tile)) or found[-1])
    side_by_side = hw.patch(model, clean, corrupted, **asked)
    assert any(groups is not None and len(groups) <= groups.max() for groups in found)
    monkeypatch.setattr(walk, "groups_of_rows", lambda tile: None)
    assert_same_table(side_by_side.table, hw.patch(model, clean, corrupted, **asked).table, CLOSE)


@pytest.mark.parametrize("changed", ["eps", "module"])
def test_a_model_with_another_eps_or_module_is_swept_with_whole_runs(changed):
    model = hw.load(tiny_model("gpt2"))  # one of its own, because it is changed for good
    options = {"sites": "resid_pre", "metric": hw.logit_difference(5, 9), **QUIET}
    hw.patch(model, *pairs([5]), **options)
    block = model.raw.original_model.transformer.h[1]
    if changed == "eps":
        block.ln_2.original_component.eps = 0.5
    else:
        block.ln_2 = torch.nn.Identity()
    with pytest.warns(UserWarning, match=r"it was changed since it was loaded: blocks\.1\.ln_?2"):
        assert hw.patch(model, *pairs([5]), **options).engine == "whole runs"


def test_a_module_with_a_hook_of_torch_is_swept_with_whole_runs_that_use_it():
    model, quiet = tiny_hooked("llama"), {"progress": False}
    pair, metric = (" the capital of France is", " the capital of Italy is"), hw.logit_difference(" Paris", " Rome")
    options = {"sites": "resid_pre", "layers": [0, 1], "positions": 4, "metric": metric, **quiet}
    plain = hw.patch(model, *pair, **options)
    layer = model.raw.original_model.model.layers[1]
    handle = layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.warns(UserWarning, match="it was changed since it was loaded: a forward"):
        found = hw.patch(model, *pair, **options)
    logits = model.run(list(pair), keep="last")[:, -1]
    answers = [model.to_single_token(" Paris"), model.to_single_token(" Rome")]
    values = (logits[:, answers[0]] - logits[:, answers[1]]).tolist()
    assert found.table[["clean", "corrupted"]].drop_duplicates().to_numpy()[0].tolist() == pytest.approx(
        values, rel=1e-5
    )
    assert not np.allclose(found.table["effect"], plain.table["effect"])
    with pytest.raises(ModelError, match="changed since it was loaded"):
        hw.edges(model, *pair, metric=metric, **quiet)
    handle.remove()
    assert hw.patch(model, *pair, **options).table["effect"].tolist() == plain.table["effect"].tolist()
