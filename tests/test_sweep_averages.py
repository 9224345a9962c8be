"""What a sweep averages, and over how many: prompts of unlike length, means of one prompt, ratios, key-value heads."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.patching.sweep import Sweep
from headwater.runs.record import RunRecord
from tests.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
METRIC = hw.logit_difference(5, 9)


@pytest.fixture(scope="module")
def model():
    return hw.load(tiny_model("llama"), tokenizer=TOKENIZER)


def sweep_of(effects, gaps, tokens=None, positions=(0,), direction=1):
    """A sweep of one layer: an effect and a gap by example, at positions that each example has."""
    rows = [
        {"example": e, "site": "resid_pre", "layer": 0, "position": position, "metric": "logit_difference",
         "effect": effect, "normalized_effect": effect / gap, "clean": direction * gap, "corrupted": 0.0}
        for e, (effect, gap) in enumerate(zip(effects, gaps, strict=True))
        for position in positions
        if tokens is None or position < len(tokens[e])
    ]  # fmt: skip
    record = RunRecord("patch", "tiny", "0", "float32", "cpu", {})
    return Sweep(pd.DataFrame(rows), record, tokens or [["a"]] * len(effects))


def test_prompts_of_unlike_length_are_counted_by_position_and_the_reader_is_told():
    sweep = sweep_of([5.5, 5.5, 0.1, 0.1], [6.0] * 4, [["a"] * 3, ["a"] * 3, ["a"] * 5, ["a"] * 5], range(5))
    with pytest.warns(UserWarning, match="Prompts of 3 to 5 tokens are averaged by position"):
        summary = sweep.summary()
    assert summary["examples"].tolist() == [4, 4, 4, 2, 2]
    assert "Prompts of 3 to 5 tokens" in summary.attrs["notes"][0]
    two_layers = Sweep(pd.concat([sweep.table, sweep.table.assign(layer=1)]), sweep.run, sweep.tokens)
    with pytest.warns(UserWarning, match="averaged by position"):
        assert two_layers.plot().get_title(loc="left") == "tiny: resid_pre patched (n = 2 to 4)"


def test_prompts_of_one_length_and_sweeps_over_other_axes_are_averaged_without_a_word(model):
    assert sweep_of([1.0, 2.0], [2.0, 2.0]).summary().attrs["notes"] == []
    prompts = [" the cat", " the big cat"]
    by_layer = hw.patch(
        model, prompts, sites="resid_pre", over="layer", values="zero", metric=METRIC, progress=False, positions="last"
    )
    assert by_layer.summary()["examples"].unique().tolist() == [2]


def test_a_mean_over_one_prompt_is_refused_since_it_changes_nothing(model):
    same = {"sites": "resid_pre", "metric": METRIC, "values": "mean", "progress": False}
    for prompts, dataset in ((" the cat", None), ([" the cat"] * 2, None), (" the cat", " the dog")):
        with pytest.raises(InputError, match=r"values='mean': the mean over .*own activation. Give several prompts"):
            hw.patch(model, prompts, **same, dataset=dataset)


def test_table_and_figure_say_over_what_a_mean_is(model):
    said = []
    for prompts in ([" the cat", " the dog"], [" the cat", " the big dog"]):
        sweep = hw.patch(model, prompts, sites="mlp_out", over="layer", metric=METRIC, values="mean", progress=False)
        (over,) = sweep.table["values"].unique()
        assert over in sweep.plot().get_title(loc="left")
        assert sweep.summary()["values"].unique().tolist() == [over]
        said.append(over)
    assert said == ["mean over examples", "mean over tokens"]
    zero = hw.patch(model, " the cat", sites="mlp_out", metric=METRIC, values="zero", progress=False)
    assert "values" not in zero.table


@pytest.mark.parametrize("direction", [1, -1])
def test_the_ratio_of_means_is_not_led_by_a_pair_of_hardly_any_gap(direction):
    effects, gaps = [1.0, 2.1, 0.225], np.array([1.0, 2.0, 0.05])
    sweep = sweep_of(effects, direction * gaps, direction=1)
    sweep.table["effect"] = direction * np.array(effects)
    sweep.table[["clean", "corrupted"]] = np.stack([gaps, 0 * gaps], 1)  # noising: the gap counts the other way
    sweep.table["normalized_effect"] = np.array(effects) / gaps
    ratio = sweep.summary(normalize="ratio of means")
    assert ratio["mean"].item() == pytest.approx(sum(effects) / gaps.sum())
    assert ratio["low"].item() < ratio["mean"].item() < ratio["high"].item()
    with pytest.warns(UserWarning, match="runs of pair 2 differ by less than a tenth"):
        mean = sweep.summary(normalize="mean of ratios")
    assert mean["mean"].item() == pytest.approx(np.mean([1.0, 1.05, 4.5]))
    with pytest.warns(UserWarning, match="pair 2"):
        pd.testing.assert_frame_equal(mean, sweep.summary(value="normalized_effect"))


def test_the_figure_draws_the_ratio_of_means_that_the_summary_has(model):
    clean, corrupted = [" the cat of France", " the dog of Spain"], [" the cat of Italy", " the big of Rome"]
    sweep = hw.patch(model, clean, corrupted, sites="resid_pre", metric=METRIC, progress=False)
    ax = sweep.plot(normalize="ratio of means")
    drawn = ax.collections[-1].get_array().ravel()
    assert np.allclose(drawn, sweep.summary(normalize="ratio of means")["mean"].sort_index(), equal_nan=True) or (
        np.allclose(
            drawn,
            sweep.summary(normalize="ratio of means").sort_values(["layer", "position"])["mean"],
            equal_nan=True,
        )
    )
    assert "Mean effect / mean gap" in ax.figure.axes[-1].get_ylabel()
    with pytest.raises(InputError, match="'ratio' is not one of mean of ratios, ratio of means"):
        sweep.summary(normalize="ratio")
    alone = hw.patch(model, clean, sites="resid_pre", metric=METRIC, values="zero", progress=False)
    with pytest.raises(InputError, match="needs pairs of prompts"):
        alone.summary(normalize="ratio of means")


def test_key_value_heads_have_a_column_of_their_own(model):
    sweep = hw.patch(model, " the cat", " the dog", sites=["z", "k"], metric=METRIC, progress=False)
    by_site = dict(list(sweep.table.groupby("site")))
    assert by_site["z"]["head"].nunique() == 4
    assert by_site["z"]["kv_head"].isna().all()
    assert by_site["k"]["kv_head"].nunique() == 2
    assert by_site["k"]["head"].isna().all()
    assert {"head", "kv_head"} <= set(sweep.summary().columns)
    drawn = sweep.plot(site="k")
    assert drawn.get_xlabel() == "Key-value head"


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda x: x[:, -1, 5] - x[:, -1, 5].mean(), "its rows depend on one another"),
        (lambda x: (x - x.mean())[:, -1, 5], "its rows depend on one another"),
        (lambda x: x[:, -1, 5] / x.max(), "its rows depend on one another"),
        (lambda x: x[:, -1, 5].softmax(0), "its rows depend on one another"),
        (lambda x: torch.complex(x[:, -1, 5], x[:, -1, 6]), "of torch.complex64; it must give one real number per row"),
        (lambda x: (-x[:, -1, 5].abs() - 1).log(), r"gave nan for example 0, from values that are all finite"),
        (lambda x: x[:, -1, 5] / 0, r"gave -?inf for example 0"),
    ],
)
def test_a_metric_that_is_no_number_of_each_row_is_refused_by_name(model, metric, message):
    for method in ("exact", "attribution"):
        with pytest.raises(InputError, match=f"The metric 'mine' .*{message}"):
            hw.patch(
                model,
                [" the cat", " big cat"],
                [" the dog", " big dog"],
                sites="resid_pre",
                metric=hw.Metric("mine", metric),
                method=method,
                progress=False,
            )


def test_what_a_tokenizer_returned_is_refused_by_every_sweep(model):
    encoded = TOKENIZER([" the cat", " the dog"], return_tensors="pt")
    with pytest.raises(InputError, match="A BatchEncoding was given"):
        hw.patch(model, encoded, sites="resid_pre", values="zero", metric=METRIC, progress=False)
    with pytest.raises(InputError, match="A BatchEncoding was given"):
        hw.knockout(model, encoded, block=("last", 1), metric=METRIC, progress=False)
    with pytest.raises(InputError, match="A DataFrame was given"):
        hw.knockout(model, pd.DataFrame({"text": [" the cat"]}), block=("last", 1), metric=METRIC, progress=False)
    batch = model.tokenize(encoded["input_ids"], mask=encoded["attention_mask"])
    assert hw.knockout(model, batch, block=("last", 1), metric=METRIC, progress=False).table["example"].nunique() == 2


def test_a_model_without_tokenizer_takes_no_left_padded_ids_without_a_mask():
    bare = hw.load(tiny_model("llama"))  # its config pads with 1
    left, mask = torch.tensor([[1, 1, 5], [5, 6, 7]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    for ids in (left, left.tolist()):
        with pytest.raises(InputError, match="padding id 1, and there is no mask"):
            bare.run(ids)
        with pytest.raises(InputError, match="padding id 1, and there is no mask"):
            hw.patch(bare, ids, sites="resid_pre", values="zero", metric=METRIC, progress=False)
    logits = bare.run(bare.tokenize(left, mask=mask), keep="last")
    assert torch.allclose(logits[0, 0], bare.run([[5]])[0, 0], atol=1e-5)


@pytest.mark.parametrize("layer", [True, "1", 1.5, 3, -4])
def test_a_metric_that_reads_no_layer_of_the_model_is_refused(model, layer):
    metric = hw.Metric("norm", lambda x: x.norm(dim=-1)[:, -1], site="mlp_out")
    object.__setattr__(metric, "layer", layer)
    with pytest.raises(InputError, match=r"The metric 'norm': layer=.* is not a layer; the model has layers 0 to 2"):
        hw.knockout(model, " the cat", block=("last", 1), metric=metric, progress=False)
    by_last = []
    for last in (2, -1):
        object.__setattr__(metric, "layer", last)
        by_last.append(hw.knockout(model, " the cat", block=("last", 1), metric=metric, progress=False).table)
    assert by_last[0].equals(by_last[1])


def test_a_mask_may_say_that_padding_ids_in_front_are_real(model):
    ids = torch.tensor([[1, 5, 6], [5, 6, 7]])
    with pytest.raises(InputError, match="padding id 1"):
        hw.knockout(model, ids, block=("last", 1), metric=METRIC, progress=False)
    batch = model.tokenize(ids, mask=torch.ones_like(ids))
    swept = hw.knockout(model, batch, block=("last", 1), metric=METRIC, progress=False)
    assert [len(tokens) for tokens in swept.tokens] == [3, 3]


def test_an_answer_with_half_a_character_is_refused(model):
    with pytest.raises(InputError, match="lone surrogate"):
        hw.knockout(model, " the cat", block=("last", 1), metric=hw.log_probability(" \ud83d"), progress=False)


def test_numbers_of_numpy_are_windows_and_are_recorded(model, tmp_path):
    options = {"sites": "resid_pre", "metric": METRIC, "window": np.int64(2), "progress": False}
    hw.patch(model, " the cat", " the dog", **options, out=tmp_path / "run")
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["run"]["options"]
    assert recorded["window"] == {"resid_pre": {"layer": 2}}
    for wrong in ({"window": True}, {"seed": True}, {"batch_size": True}, {"layers": True}):
        with pytest.raises(InputError, match="=True"):
            hw.patch(model, " the cat", " the dog", **options | wrong)


def test_the_report_names_what_there_is_to_name(model):
    cells = {"sites": "resid_pre", "layers": [1], "progress": False, "metric": METRIC}
    (whole, *_) = hw.patch(model, [[3, 4, 5]], [[3, 6, 5]], over=[], **cells).report()
    assert whole == "resid pre: 1.00 of the way back to the clean logit difference, over 1 pair of prompts."
    (one, *_) = hw.patch(model, [[3, 4, 5]], [[3, 6, 5]], positions=[1], **cells).report()
    assert one.startswith("resid pre: layer 1, position 1: 0.")
    options = {"block": ("last", 0), "window": "cumulative", "metric": METRIC, "progress": False}
    assert re.search(
        r"edges at layer \d, window cumulative changes", hw.knockout(model, [[3, 4, 5]], **options).report()[0]
    )
