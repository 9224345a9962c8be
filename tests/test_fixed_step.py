"""Steps of generation that are recorded once and replayed give what steps that run give; emulated on the CPU."""

import pytest
import torch

import headwater as hw
from headwater.models.generation import fixed_step
from tests import replayed
from tests.random_models import random_model
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = [" Paris of France is the capital", " cat", " the dog", " small one two three four five six Rome Italy chat"]
NEW = 12
WHOLE = ("gpt2", "neox", "llama", "qwen2")
"""Families in which every layer attends to the whole text."""


@pytest.fixture
def counted(monkeypatch):
    """Let the CPU's steps be recorded; holds how often one was, and how often one was replayed."""
    counts = {"recorded": 0, "replayed": 0}

    def recorded(work, device):
        replay = replayed.recorded(work, device)
        counts["recorded"] += 1

        def again():
            counts["replayed"] += 1
            return replay()

        return again

    monkeypatch.setattr(fixed_step, "DEVICES", ("cpu",))
    monkeypatch.setattr(fixed_step, "recorded", recorded)
    return counts


def loaded(family="llama", **options):
    return hw.load(tiny_model(family, seed=3, **options), tokenizer=tiny_tokenizer())


def written(model, **options):
    made = model.generate(PROMPTS, max_new_tokens=NEW, progress=False, **options)
    return made.tokens


def test_no_device_records_its_steps_until_a_card_has_shown_that_it_may():
    assert fixed_step.DEVICES == ()


@pytest.mark.parametrize("family", WHOLE)
def test_replayed_steps_write_what_running_ones_write(family, counted, monkeypatch):
    model = loaded(family)
    found = written(model)
    assert model.fixed_step_checked
    assert counted["recorded"] == 2  # for a look at a few tokens, and for the batch
    assert counted["replayed"] > max(map(len, found))
    monkeypatch.setattr(fixed_step, "DEVICES", ())
    assert found == written(model)


def test_rows_that_end_early_stay_and_change_nothing(counted, monkeypatch):
    model = loaded()
    stop = model.token_strings(written(model)[1])[1]
    found = written(model, stop=stop)
    assert len(set(map(len, found))) > 1
    monkeypatch.setattr(fixed_step, "DEVICES", ())
    assert found == written(model, stop=stop)


def test_a_replay_reads_weights_as_they_are_in_place_and_is_recorded_anew_where_they_lie_elsewhere(counted):
    model = loaded()
    weight = model.raw.original_model.lm_head.weight
    before = written(model)
    with torch.no_grad():
        weight.neg_()
    there = written(model)
    assert there != before
    weight.data = -weight.data
    assert written(model) == before
    after = counted["recorded"]

    def moved(number, piece, seen=[]):  # noqa: B006
        seen.append(piece)
        if len(seen) == 16:
            weight.data = -weight.data

    changed = written(model, stream=moved)
    assert counted["recorded"] == after + 2
    assert changed != before
    assert changed[0][:2] == before[0][:2]


def test_a_replay_from_stale_memory_would_be_seen(counted, monkeypatch):
    model = loaded()
    expected = written(model)
    monkeypatch.setattr(fixed_step.FixedStep, "_recorded", lambda self: stale(self))
    assert written(model) != expected


def stale(step):
    """Record a step that reads tokens from memory of its own."""
    given, step._given = step._given, step._given.clone()
    replay = replayed.recorded(step._run, None)
    for layer in step._cache.layers:
        layer.cumulative_length.sub_(2)
    step._given = given
    return replay


def test_a_step_that_cannot_be_recorded_runs_in_the_same_memory(counted, monkeypatch):
    model = loaded()
    expected = written(model)
    work_done = []

    def refuses(work, device):
        work_done.append(work())
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(fixed_step, "recorded", refuses)
    assert written(model) == expected
    assert work_done


def test_out_of_memory_is_no_refusal_and_goes_on_in_halves(counted, monkeypatch):
    model = loaded()
    expected, asked = written(model), []

    def too_large(work, device):
        asked.append(work())
        if len(asked[-1]) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return work

    monkeypatch.setattr(fixed_step, "recorded", too_large)
    assert written(model) == expected
    assert list(map(len, asked)) == [4, 2, 2]


@pytest.mark.parametrize("name", ["mistral", "gemma2", "bloom"])
def test_what_does_not_fit_fixed_memory_goes_as_ever(name, counted):
    """Windows, and positions that a model works out of a mask of its own."""
    raw = random_model(name) if name == "bloom" else tiny_model(name, seed=3)
    model = hw.load(raw, tokenizer=tiny_tokenizer())
    written(model)
    assert model.fixed_step_checked is False
    assert counted["replayed"] <= 2


def test_hooks_and_few_tokens_go_as_ever(counted):
    model = loaded()
    model.generate(PROMPTS, max_new_tokens=fixed_step.FEWEST - 1, progress=False)
    model.generate(PROMPTS, [("blocks.1.hook_resid_post", lambda x, hook: x)], max_new_tokens=NEW, progress=False)
    assert counted == {"recorded": 0, "replayed": 0}


@pytest.mark.gpu
@pytest.mark.parametrize("family", WHOLE)
def test_on_the_card_replayed_steps_write_what_running_ones_write(family, monkeypatch):
    model = hw.load(tiny_model(family, seed=3), tokenizer=tiny_tokenizer(), device="cuda")
    expected = written(model)
    monkeypatch.setattr(fixed_step, "DEVICES", ("cuda",))
    assert written(model) == expected
    assert model.fixed_step_checked
