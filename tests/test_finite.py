"""NaN and infinity are named by layer, example and token; memory that runs out is taken in halves."""

import re

import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.circuits.exact import EdgeRows
from headwater.errors import HeadwaterError, ModelError, NumericsError
from headwater.kernels.devices import in_halves, in_tiles, is_out_of_memory, refuse_too_large
from headwater.models.blocks import Blocks
from headwater.models.forward import forward
from headwater.models.generation import generate_tokens
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

QUIET = {"progress": False}
TEXTS = [" Paris is in France", " cat dog", " the capital of Italy is Rome", " one two three"]


@pytest.fixture(scope="module")
def model(checkpoint):
    return hw.load(checkpoint("llama"), device="cpu")


def spoil(example: int, position: int, value: float):
    def edit(activation, hook):
        activation = activation.clone()
        activation[example, position, 3] = value
        return activation

    return edit


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("keep", [None, "last", [1]])
def test_the_layer_example_and_token_of_the_first_nan_are_named(model, value, keep):
    layer, example = int(torch.randint(model.shape.n_layers - 1, ())), int(torch.randint(len(TEXTS), ()))
    batch = model.tokenize(TEXTS)
    token = model.token_strings([int(batch.tokens[example, 1])])[0]
    with pytest.raises(NumericsError) as caught:
        model.run(batch, [(f"blocks.{layer}.hook_resid_post", spoil(example, 1, value))], keep=keep)
    wanted = f"first in the output of layer {layer}, example {example}, position 1 ({token!r}); 1 of 4 examples"
    assert wanted in str(caught.value)
    assert "an edit caused it" in str(caught.value)
    assert model.run(batch, keep="last").isfinite().all()  # the model is clean


def test_what_lies_at_padding_does_not_count(model):
    batch = model.tokenize(TEXTS)
    assert int(batch.lengths[1]) < batch.tokens.shape[1]
    out = model.run(batch, [("blocks.2.hook_resid_post", spoil(1, -1, torch.nan))])
    assert out[1, -1].isnan().all()


def test_weights_too_large_for_float16_are_told_by_every_way_to_run_the_model(checkpoint):
    folder = checkpoint("llama")
    large = hw.load(folder, device="cpu", dtype="float16")
    with torch.no_grad():
        large.raw.blocks[1].mlp.out.weight.mul_(60000)
    hidden = large.raw.original_model(large.tokenize(TEXTS[0]).tokens, output_hidden_states=True).hidden_states
    bad = [not state.isfinite().all() for state in hidden[1:-1]]
    assert bad.index(True) == 1
    for use in (
        lambda: large.run(TEXTS[0], keep="last"),
        lambda: large.run(TEXTS[0], stop_at=2),
        lambda: large.cache(TEXTS[:1], progress=False),
        lambda: hw.token_statistics(large, TEXTS[:1], progress=False),
    ):
        with pytest.raises(NumericsError, match=r"\(float16\).*output of layer 1, example 0.*dtype='bfloat16'"):
            use()


def test_the_same_answer_is_given_when_memory_runs_out_for_more_than_some_rows(model, monkeypatch):
    whole = model.cache(TEXTS, batch_size=4, progress=False)
    sizes = []

    def limited(model, batch, *rest):
        sizes.append(len(batch))
        if len(batch) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(model, batch, *rest)

    monkeypatch.setattr("headwater.models.hooked.forward", limited)
    parts = model.cache(TEXTS, batch_size=4, progress=False)
    assert sizes == [4, 2, 1, 1, 2, 1, 1]
    torch.testing.assert_close(parts.residual, whole.residual)
    torch.testing.assert_close(parts.attention, whole.attention)


def test_texts_are_scored_alike_when_memory_runs_out_for_more_than_one(model, monkeypatch):
    whole = hw.token_statistics(model, TEXTS, progress=False).table

    def limited(model, batch, *rest):
        if len(batch) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
        return forward(model, batch, *rest)

    monkeypatch.setattr("headwater.models.hooked.forward", limited)
    pd.testing.assert_frame_equal(hw.token_statistics(model, TEXTS, progress=False).table, whole)


def test_generation_that_runs_out_of_memory_goes_on_in_halves(model, monkeypatch):
    batch = model.tokenize(TEXTS)
    whole = generate_tokens(model, batch, max_new_tokens=6, stop=lambda token: token % 5 == 0)

    def limited(model, batch, *rest):
        if len(batch) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(model, batch, *rest)

    monkeypatch.setattr("headwater.models.hooked.forward", limited)
    parts = generate_tokens(model, batch, max_new_tokens=6, stop=lambda token: token % 5 == 0)
    for name, value in vars(whole).items():
        torch.testing.assert_close(getattr(parts, name), value)


def test_halves_cover_every_row_once_and_in_order_and_one_row_too_many_is_an_error(monkeypatch):
    monkeypatch.setattr("gc.collect", lambda: 0)
    for _ in range(20):
        limit, start, count = (int(torch.randint(1, 30, ())) for _ in range(3))
        done = []

        def work(rows, limit=limit, done=done):
            if len(rows) > limit:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
            done.extend(rows)

        in_halves(range(start, start + count), work)
        assert done == list(range(start, start + count))
    with pytest.raises(HeadwaterError, match="even with one sequence at a time"):
        in_halves(range(5, 9), lambda rows: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(RuntimeError, match="something else"):
        in_halves(range(4), lambda rows: (_ for _ in ()).throw(RuntimeError("something else")))


def test_after_a_tile_that_runs_out_of_memory_later_tiles_have_the_size_that_fitted(monkeypatch):
    monkeypatch.setattr("gc.collect", lambda: 0)
    tried, done = [], []

    def work(items):
        tried.append(len(items))
        if len(items) > 5:
            raise MemoryError
        done.extend(items)

    assert in_tiles(list(range(40)), 16, work) == 4
    assert done == list(range(40))
    assert tried == [16, 8, 4, 4, 8, 4, 4, *[4] * 6]
    assert in_tiles(range(0), 16, work) == 16


@pytest.mark.parametrize("what", ["edges", "paths", "circuits"])
def test_rows_of_edges_paths_and_circuits_exceed_memory_only_once(what, monkeypatch):
    model = hw.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    options = {"metric": lambda logits: logits[:, -1, 5], "batch_size": 12, **QUIET}
    pair, too_large, measure = (" the capital of France is", " the capital of Italy is"), [], EdgeRows.measure
    circuits = [hw.Circuit.of([f"embed -> q 1.{head}", f"head 1.{head} -> logits"], model) for head in range(4)] * 8

    def run():
        if what == "circuits":
            return hw.run_circuits(model, *pair, circuits, **options).table["value"]
        if what == "paths":
            return hw.path_patch(model, *pair, senders=None, receivers=["q 2", "logits"], **options).table["effect"]
        return hw.edges(model, *pair, receivers=["q 2", "k 2"], **options).table["effect"]

    def limited(self, last, *rest):
        if len(last) > 6:
            too_large.append(len(last))
            raise MemoryError
        return measure(self, last, *rest)

    whole = run()
    monkeypatch.setattr(EdgeRows, "measure", limited)
    assert run().to_numpy() == pytest.approx(whole.to_numpy(), abs=1e-5)
    assert len(too_large) == (2 if what == "paths" else 1)  # receivers of two layers are separate pieces


def test_a_sweep_that_ran_out_of_memory_at_the_logits_makes_later_tiles_smaller_only_once(monkeypatch):
    model = hw.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    pair, seen, logits = (" the capital of France is in A", " the capital of Italy is of A"), [], Blocks.logits
    options = {"sites": ["resid_pre", "z"], "metric": lambda logits: logits[:, -1, 5], **QUIET}
    expected = hw.patch(model, *pair, **options).table

    def limited(self, residual):
        if len(residual) > 5:
            raise MemoryError
        seen.append(len(residual))
        return logits(self, residual)

    monkeypatch.setattr(Blocks, "logits", limited)
    monkeypatch.setattr("headwater.patching.runners.TILE_TOKENS", {"cpu": 16})
    monkeypatch.setattr("headwater.patching.runners.WIDTH", 1)
    found = hw.patch(model, *pair, **options).table
    assert found["effect"].to_numpy() == pytest.approx(expected["effect"].to_numpy(), abs=1e-5)
    assert len(seen) > 6
    assert set(seen[2:-1]) == {4}  # the first two are the unedited runs


def test_an_allocation_that_the_machine_refuses_is_out_of_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_what_does_not_fit_is_refused_with_both_figures(monkeypatch):
    monkeypatch.setattr("headwater.kernels.devices.available_memory", lambda device: 2**30)
    refuse_too_large("This", 2**30, torch.device("cpu"), "Do less.")
    with pytest.raises(HeadwaterError, match=re.escape("This would take 2.0 GiB; cpu has 1.0 GiB free. Do less.")):
        refuse_too_large("This", 2**31, torch.device("cpu"), "Do less.")


PAIRS = (
    [" Paris is in France", " Rome is in Italy", " Madrid is in Spain"],
    [" Rome is in France", " Paris is in Italy", " Berlin is in Spain"],
)
SWEEPS = {
    "wavefront": {},
    "whole runs": {"engine": "whole runs"},
    "attribution": {"method": "attribution"},
}


def sweep(model, engine, *prompts, **options):
    """Patch by one of the three ways to do it."""
    defaults = {"metric": hw.logit_difference(" Paris", " Rome"), "progress": False} | SWEEPS[engine]
    return hw.patch(model, *prompts, **(defaults | options))


@pytest.fixture
def spoilt(checkpoint):
    """A model whose embedding of one word is broken after it was loaded."""
    model = hw.load(checkpoint(FAMILIES[int(torch.randint(len(FAMILIES), ()))]), device="cpu")
    word = model.tokenizer.encode(" Berlin", add_special_tokens=False)[0]
    with torch.no_grad():
        model.raw.original_model.get_input_embeddings().weight[word, 1] = torch.inf
    return model


@pytest.mark.diagonal
@pytest.mark.parametrize("engine", SWEEPS)
@pytest.mark.parametrize(("sides", "name"), [(PAIRS, "2 (corrupted prompt)"), (PAIRS[::-1], "2 (clean prompt)")])
@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_a_sweep_names_layer_example_and_token_of_a_nan(spoilt, engine, sides, name, direction):
    found = rf"the embedding, example {re.escape(name)}, position [01] \(' Berlin'\)"
    with pytest.raises(NumericsError, match=found):
        sweep(spoilt, engine, *sides, sites="z", direction=direction)


@pytest.mark.parametrize("engine", ["wavefront", "whole runs"])
@pytest.mark.parametrize("values", ["mean", "resample"])
def test_a_sweep_names_the_prompt_of_the_data_set_with_a_nan(spoilt, engine, values):
    dataset = [" Berlin is in", " Berlin is of", " Berlin is the"]
    with pytest.raises(NumericsError, match=r"the embedding, example \d of the data set, position [01] \(' Berlin'\)"):
        sweep(spoilt, engine, [" Paris is in"], sites="z", values=values, dataset=dataset)


def test_the_example_of_a_nan_is_counted_over_all_batches(spoilt):
    texts = [" Paris is in", " Rome is in", " Berlin is in"]
    named = r"the embedding, example 2, position [01] \(' Berlin'\)"
    with pytest.raises(NumericsError, match=named):
        hw.knockout(spoilt, texts, block=("last", 1), metric=hw.rank(" Paris"), progress=False)
    with pytest.raises(NumericsError, match=named):
        spoilt.cache(texts, batch_size=2, layers=[-1], progress=False)
    is_tied = spoilt.raw.original_model.config.tie_word_embeddings
    expected = (ModelError, "unembed.W_U") if is_tied else (NumericsError, named)
    with pytest.raises(expected[0], match=expected[1]):
        hw.token_statistics(spoilt, texts, batch_size=1, progress=False)


@pytest.mark.parametrize("engine", ["wavefront", "whole runs"])
def test_a_nan_that_an_edit_brings_about_is_named(checkpoint, engine):
    model = hw.load(checkpoint("llama"), device="cpu")
    for module in model.raw.original_model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.0  # the norm of a residual stream of zeros is 0 / 0
    # Loaded again: a model that was changed after loading is swept with whole runs.
    model = hw.load(model.raw, tokenizer=model.tokenizer)
    layer, position = (int(torch.randint(1, 3, ())) for _ in range(2))
    with pytest.raises(NumericsError, match="computed NaN") as caught:
        sweep(
            model, engine, PAIRS[0][1:2] * 2 + PAIRS[0][:1], sites="resid_pre", values="zero",
            layers=layer, positions=position,
        )  # fmt: skip
    assert f"output of layer {layer}, example 0, position {position}" in str(caught.value)
    assert "an edit caused it" in str(caught.value)
    assert model.run(PAIRS[0], keep="last").isfinite().all()


@pytest.mark.parametrize("engine", SWEEPS)
def test_logits_and_gradients_beyond_float16_are_named(checkpoint, engine):
    model = hw.load(checkpoint("llama"), device="cpu", dtype="float16")
    with torch.no_grad():
        model.raw.original_model.lm_head.weight[:] = 60000.0
    with pytest.raises(NumericsError, match=r"float16\).* the logits, example 0 \(.* prompt\), position 4"):
        sweep(model, engine, *PAIRS, sites="z", metric=hw.log_probability(" Paris"))
    model = hw.load(checkpoint("llama"), device="cpu", dtype="float16")
    if engine == "attribution":
        steep = hw.Metric("steep", lambda logits: logits[:, -1, 3].mul(1e30))
        with pytest.raises(
            NumericsError, match=r"gradient of 'steep' at z of layer \d is NaN or infinite in example 0"
        ):
            sweep(model, engine, *PAIRS, sites="z", metric=steep)
