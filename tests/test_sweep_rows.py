"""A site, a metric, a kind of values of one's own: swept, tabulated, drawn, offered and suggested like the others."""

import json
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.models.sites import SITES, Site, Stage, register_site
from headwater.patching.edits import Edit, EditedRows, ReplacementValues, TokenSpanEdit, write_patterns
from headwater.patching.metrics import METRICS
from headwater.patching.replacements import VALUES, Replacement
from tests.tiny import tiny_model

CLEAN, CORRUPTED = [[5, 33, 12, 40, 7, 21]], [[5, 33, 12, 44, 7, 21]]
LOGITS = hw.logit_difference(5, 9)
NEURONS = Site("neurons", "blocks.{layer}.mlp.hook_post", ("position", "d_mlp"), Stage.NEURONS)
SOMEWHERE = Site("somewhere", "blocks.{layer}.mlp.hook_post", ("position", "d_mlp"))


@pytest.fixture
def loaded():
    """A model by family, once per test."""
    models = {}
    return lambda family: models.setdefault(family, hw.load(tiny_model(family, seed=3)))


@pytest.fixture(params=["serial", "parallel"])
def family(request):
    return {"serial": "gpt2", "parallel": "neox"}[request.param]


def last_linear(hf, layer):
    """What takes a layer's neurons back to the residual stream."""
    return (
        hf.transformer.h[layer].mlp.c_proj
        if hasattr(hf, "transformer")
        else hf.gpt_neox.layers[layer].mlp.dense_4h_to_h
    )


def by_plain_hooks(hf, cells):
    """The logit difference of the corrupted run with clean neurons at each (layer, position), and of the plain run."""
    held = {}

    def keeping(layer):
        return lambda module, args: held.__setitem__(layer, args[0].clone())

    def writing(layer, position):
        def write(module, args):
            args[0][:, position] = held[layer][:, position]

        return write

    def difference(tokens):
        logits = hf(torch.tensor(tokens)).logits[0, -1]
        return float(logits[5] - logits[9])

    with torch.no_grad():
        handles = [last_linear(hf, layer).register_forward_pre_hook(keeping(layer)) for layer in {c[0] for c in cells}]
        difference(CLEAN)
        for handle in handles:
            handle.remove()
        before, edited = difference(CORRUPTED), []
        for layer, position in cells:
            handle = last_linear(hf, layer).register_forward_pre_hook(writing(layer, position))
            edited.append(difference(CORRUPTED) - before)
            handle.remove()
    return torch.tensor(edited)


def effects(sweep):
    return torch.tensor(sweep.table["effect"].to_numpy(), dtype=torch.float32)


@pytest.mark.diagonal
@pytest.mark.parametrize("site", [NEURONS, SOMEWHERE], ids=lambda site: site.name)
def test_a_site_of_ones_own_is_swept_as_plain_hooks_on_the_transformers_model_do(loaded, family, site):
    model = loaded(family)
    with SITES.with_row(site.name, site), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sweep = hw.patch(model, CLEAN, CORRUPTED, sites=site.name, metric=LOGITS, progress=False)
    cells = list(zip(sweep.table["layer"], sweep.table["position"], strict=True))
    expected = by_plain_hooks(tiny_model(family, seed=3), cells)
    torch.testing.assert_close(effects(sweep), expected, atol=1e-5, rtol=0)
    assert float(expected.abs().max()) > 1e-2
    known = site is NEURONS
    assert sweep.engine == ("wavefront" if known else "whole runs")
    texts = [str(one.message) for one in said]
    assert any("does not know where somewhere lies in a block" in text for text in texts) is not known


@pytest.mark.diagonal
@pytest.mark.parametrize("options", [{"window": 2}, {"window": "cumulative"}, {"values": "zero"}, {"values": "mean"}])
def test_windows_and_values_at_a_site_of_ones_own_equal_whole_runs(loaded, family, options):
    model, pairs = loaded(family), ([*CLEAN, [8, 3, 9, 4]], [*CORRUPTED, [8, 3, 2, 4]])
    given = {"sites": ["z", "neurons", "mlp_out"], "metric": LOGITS, "progress": False} | options
    with SITES.with_row("neurons", NEURONS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stepped = hw.patch(model, *pairs, **given)
        whole = hw.patch(model, *pairs, engine="whole runs", **given)
    assert (stepped.engine, whole.engine) == ("wavefront", "whole runs")
    torch.testing.assert_close(effects(stepped), effects(whole), atol=1e-5, rtol=0)


def test_gradients_reach_a_site_of_ones_own(loaded):
    model = loaded("gpt2")
    with SITES.with_row("neurons", NEURONS):
        options = {"sites": "neurons", "metric": LOGITS, "layers": [model.shape.n_layers - 1], "progress": False}
        exact = hw.patch(model, CLEAN, CORRUPTED, **options)
        near = hw.patch(model, CLEAN, CORRUPTED, method="attribution", **options)
    assert float(near.agreement(exact)["pearson"].iloc[0]) > 0.9


def test_a_site_of_ones_own_is_drawn_and_suggested(loaded):
    model = loaded("gpt2")
    with SITES.with_row("neurons", NEURONS):
        sweep = hw.patch(model, CLEAN, CORRUPTED, sites="neurons", metric=LOGITS, progress=False)
        with pytest.raises(InputError, match="Did you mean 'neurons'"):
            hw.patch(model, CLEAN, CORRUPTED, sites="neuron", metric=LOGITS, progress=False)
    assert set(sweep.table["site"]) == {"neurons"}
    assert sweep.plot().get_title(loc="left") == "GPT2LMHeadModel: neurons patched"
    plt.close("all")


def test_a_site_whose_positions_are_not_its_rows_is_refused():
    with pytest.raises(InputError, match="they must begin with position"):
        register_site(Site("rotated", "blocks.{layer}.attn.hook_rot_q", ("head", "position", "d_head")))
    assert "rotated" not in SITES


def certainty(*, at="last"):
    """The largest probability of any token."""
    return hw.Metric("certainty", lambda logits: logits.softmax(-1).amax(-1).mean(1), at)


def test_a_metric_of_ones_own_stands_in_table_figure_command_and_suggestions(run, tmp_path):
    model = hw.load()
    pair = (" The capital of France is", " The capital of Italy is")
    with METRICS.with_row("certainty", certainty):
        by_name = hw.patch(model, *pair, sites="resid_pre", metric="certainty", over="layer", progress=False)
        made = hw.patch(model, *pair, sites="resid_pre", metric=certainty(), over="layer", progress=False)
        out = tmp_path / "sweep"
        options = ["--metric", "certainty", "--sites", "resid_pre", "--over", "layer", "--json", "--quiet"]
        command = ("patch", "--clean", pair[0], "--corrupted", pair[1])
        code, printed, _ = run(*command, *options, "--out", out)
        wrong, _, error = run(*command, "--metric", "certaint")
        with pytest.raises(InputError, match="Did you mean 'certainty'"):
            hw.patch(model, *pair, sites="resid_pre", metric="certaint", progress=False)
    pd.testing.assert_frame_equal(by_name.table, made.table)
    assert set(by_name.table["metric"]) == {"certainty"}
    assert by_name.table["effect"].abs().max() > 0
    assert "certainty" in by_name.plot().get_ylabel().lower()
    plt.close("all")
    assert code == 0
    assert json.loads(printed)["strongest"][0]["metric"] == "certainty"
    assert wrong == 2
    assert "Did you mean 'certainty'" in error
    pd.testing.assert_frame_equal(hw.Sweep.load(out).table, made.table, check_dtype=False)


def test_a_metric_that_needs_answers_is_not_made_of_its_name():
    with pytest.raises(InputError, match=r"is not a metric.*Call hw.logit_difference"):
        hw.patch(hw.load(), " a", " b", sites="z", metric="rank", progress=False)


class Halved(Replacement):
    """Half of what the edited run has there itself."""

    def values(self, wanted):
        own = wanted.of_runs([self.inputs.pair.base[i] for i in wanted.examples], wanted.examples)
        return {place: activation / 2 for place, activation in own.items()}


@pytest.mark.parametrize("site", ["mlp_out", "z", "resid_mid"])
def test_values_of_ones_own_are_what_a_hook_writes(loaded, site):
    model = loaded("gpt2")
    with VALUES.with_row("halved", Halved):
        sweep = hw.patch(model, CLEAN, sites=site, values="halved", metric=LOGITS, over="layer", progress=False)
    before = model.run(CLEAN)[0, -1]
    for layer in range(model.shape.n_layers):
        logits = model.run(CLEAN, [(SITES[site].hook_name(layer), lambda activation, hook: activation / 2)])[0, -1]
        expected = float((logits - before)[5] - (logits - before)[9])
        assert sweep.table["effect"][layer] == pytest.approx(expected, abs=1e-5)
    assert set(sweep.table["values"]) == {"halved"}
    assert sweep.engine == "wavefront"


def test_values_of_ones_own_stand_in_figure_record_and_suggestions(loaded, tmp_path):
    model, options = loaded("gpt2"), {"sites": "mlp_out", "metric": LOGITS, "over": "layer", "progress": False}
    with VALUES.with_row("halved", Halved):
        sweep = hw.patch(model, CLEAN, values="halved", out=tmp_path, **options)
        again = hw.patch(model, CLEAN, values="halved", out=tmp_path, **options)
        with pytest.raises(InputError, match="Did you mean 'halved'"):
            hw.patch(model, CLEAN, values="halve", **options)
        with pytest.raises(InputError, match="dataset= was given, but values='halved' does not use it"):
            hw.patch(model, CLEAN, values="halved", dataset=CORRUPTED, **options)
    assert "halved" in sweep.plot().get_title(loc="left")
    plt.close("all")
    pd.testing.assert_frame_equal(again.table, sweep.table, check_dtype=False)
    other = type("Halved", (Replacement,), {"values": lambda self, wanted: wanted.other})
    with VALUES.with_row("halved", other), pytest.raises(hw.HeadwaterError, match="another run"):
        hw.patch(model, CLEAN, values="halved", out=tmp_path, **options)


def write_one(held, stretch, example, columns, values, site, layer):
    """Write an edit into the patterns of one row, a head and a query at a time."""
    edit = stretch.edit
    known, length = columns >= 0, values.lengths[example]
    for head in range(held.shape[0]) if edit.heads is None else edit.heads:
        for position in stretch.positions.tolist():
            standing = held[head, position - stretch.start].clone()
            weights = values.by_site[site.name, edit.source_layer_of(layer)][example, head, position]
            if values.change is not None:
                ordered = torch.zeros(1, length)
                ordered[:, columns[known]] = standing[known]
                at = (torch.tensor([values.examples[example]]), torch.tensor([position]), torch.tensor([head]))
                place = EditedRows(site.name, layer, *at, torch.tensor([edit.sample]))
                weights = values.change(ordered, weights[None, :length], place)[0]
            written = weights[columns.clamp_min(0)].masked_fill(~known, 0.0)
            chosen = torch.ones_like(known) if edit.keys is None else torch.isin(columns, torch.tensor(edit.keys))
            held[head, position - stretch.start] = torch.where(chosen, written, standing)


@pytest.mark.parametrize("at_once", [1 << 22, 40])
@pytest.mark.parametrize("changed", [False, True])
def test_patterns_written_together_are_those_written_one_by_one(changed, at_once, monkeypatch):
    monkeypatch.setattr("headwater.patching.edits.PATTERNS_AT_ONCE", at_once)
    site, layer, lengths, starts = SITES["pattern"], 1, [7, 9, 7], [2, 5, 3, 2]
    examples, width, before = [0, 1, 2, 2], 5, 5
    columns = torch.full((4, before + width), -1)
    for row, (example, start) in enumerate(zip(examples, starts, strict=True)):
        columns[row, :start] = torch.arange(start)
        n = min(width, lengths[example] - start)
        columns[row, before : before + n] = torch.arange(start, start + n)
    edits = [
        [(Edit(site, range(3), None, (1, 3)), [0, 3])],
        [(Edit(site, range(3), (5, 6, 8), None, (2, 5)), [1]), (Edit(site, range(3), (6,), (2,), (5, 6)), [1])],
        [(Edit(site, range(3), None, None, None, source_layer=0), [2]), (Edit(site, range(3), (4,), (0,)), [2])],
    ]
    stretches = [
        TokenSpanEdit(edit, np.array([examples[i] for i in at]), starts[at[0]], width, np.array(at))
        for own in edits
        for edit, at in own
    ]
    by_site = {("pattern", of): torch.rand(3, 4, 9, 9) for of in (0, 1)}

    def change(activation, other, place):
        return activation * activation.sum(-1, keepdim=True) + other + place.head[:, None] * place.example[:, None]

    values = ReplacementValues(by_site, change if changed else None, [4, 5, 6], lengths)
    held = torch.rand(4, 4, width, before + width).masked_fill(columns[:, None, None] < 0, 0.0)
    together, alone = held.clone(), held.clone()
    write_patterns(together, stretches, columns, values, site, layer)
    for stretch in stretches:
        for row, example in zip(stretch.offset.tolist(), stretch.example.tolist(), strict=True):
            write_one(alone[row], stretch, example, columns[row], values, site, layer)
    assert torch.equal(together, alone)
    assert not torch.equal(together, held)
