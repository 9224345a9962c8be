"""Threads on one model, interrupts, and long runs: right results, a clean model, memory that does not grow."""

import asyncio
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import ModelError, RunFolderError
from headwater.models.bare_model import BareModel


@pytest.fixture(scope="module")
def model():
    loaded = hw.load()
    loaded.run("Paris")  # TransformerLens wires hooks of its own in the first run
    return loaded


def hooks_left(model) -> int:
    """Count what is attached to the model's modules and hook points."""
    points = sum(len(point.fwd_hooks) + len(point.bwd_hooks) for point in model.raw.hook_dict.values())
    return points + sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.raw.modules())


def test_threads_on_one_model_get_what_each_would_get_alone(model):
    questions = hw.load_questions("properties", sample=16)
    texts = ["Paris is the capital of France", "one two three"]
    metric = hw.logit_difference(" a", " the")
    jobs = [
        lambda: hw.answer(model, questions, batch_size=4, progress=False).table,
        lambda: hw.token_statistics(model, texts, progress=False).table,
        lambda: hw.patch(model, "Paris is in", "Rome is in", sites="z", metric=metric, progress=False).table,
        lambda: pd.DataFrame(model.cache(texts, progress=False).residual.flatten(1).numpy()),
    ]
    before = hooks_left(model)
    alone = [job() for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        together = [pool.submit(job) for job in [*jobs, *jobs[::-1]]]
        found = [one.result() for one in together]
    for table, expected in zip(found, [*alone, *alone[::-1]], strict=True):
        pd.testing.assert_frame_equal(table, expected)
    assert hooks_left(model) == before


def test_a_call_after_an_interrupt_gives_what_it_would_have_given(model, tmp_path, monkeypatch):
    questions = hw.load_questions("properties", sample=16)
    whole = hw.answer(model, questions, batch_size=4, progress=False)
    before, forward, runs = hooks_left(model), BareModel.last_logits, []

    def interrupted(self, *args, **options):
        runs.append(1)
        if len(runs) == 5:
            raise KeyboardInterrupt
        return forward(self, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(BareModel, "last_logits", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:  # as a notebook keeps the traceback, and with it the frames
            hw.answer(model, questions, batch_size=4, progress=False, out=tmp_path)
    assert hooks_left(model) == before
    again = hw.answer(model, questions, batch_size=4, progress=False, out=tmp_path)
    pd.testing.assert_frame_equal(again.table, whole.table)
    assert kept.traceback


def test_an_interrupt_inside_a_hook_leaves_the_model_clean(model):
    before, wanted = hooks_left(model), model.run("Paris is in", keep="last")

    def interrupt(activation, hook):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.run("Paris is in", [("blocks.1.hook_resid_post", interrupt)])
    assert hooks_left(model) == before
    torch.testing.assert_close(model.run("Paris is in", keep="last"), wanted, rtol=0, atol=0)


def test_two_threads_on_one_folder_are_told_apart_by_a_clear_error(model, tmp_path):
    questions = hw.load_questions("properties", sample=24)

    def run():
        return hw.answer(model, questions, batch_size=2, progress=False, out=tmp_path)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(run), pool.submit(run)
        errors = [one.exception() for one in (first, second)]
    results = [one.result() for one, error in zip((first, second), errors, strict=True) if error is None]
    assert results
    for error in errors:
        assert error is None or (isinstance(error, RunFolderError) and "Another run is writing" in str(error))
    pd.testing.assert_frame_equal(run().table, results[0].table)


def in_a_fork(job, seconds=30):
    """What a job comes to in a forked process, or the error it raises; the process is ended when it takes too long."""
    out, into = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of every fork beside threads
        child = os.fork()
    if child == 0:
        try:
            found = job()
        except BaseException as error:
            found = error
        os.write(into, pickle.dumps(found))
        os._exit(0)
    os.close(into)
    try:
        assert select.select([out], [], [], seconds)[0], "the forked process hangs"
        with os.fdopen(out, "rb") as pipe:
            return pickle.load(pipe)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def sweep(model):
    metric = hw.logit_difference(" a", " the")
    return hw.patch(model, "Paris is in", "Rome is in", sites="z", metric=metric, progress=False).table


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@forks
def test_a_forked_process_computes_what_its_parent_does_although_the_parent_has_computed_with_threads(model):
    def logits():
        return model.run([list(range(2, 66))])

    alone, before = logits(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        logits()  # OpenMP starts its threads, which a fork does not copy
        found = in_a_fork(logits)
    finally:
        torch.set_num_threads(before)
    assert isinstance(found, torch.Tensor), found
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits(), alone, rtol=0, atol=0)


@forks
def test_a_process_forked_while_another_thread_runs_the_model_refuses_its_copy_in_one_line(model):
    runs, done = threading.Event(), threading.Event()

    def run():
        with model.hooks([("blocks.1.hook_resid_post", lambda activation, hook: activation * 0)]):
            runs.set()
            done.wait(60)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(run)
        runs.wait(60)
        error = in_a_fork(lambda: model.run("Paris is in"))
        done.set()
        other.result()
    assert isinstance(error, ModelError)
    assert "forked while another thread was running the model" in str(error)
    assert "\n" not in str(error)
    assert isinstance(in_a_fork(lambda: model.run("Paris is in")), torch.Tensor), "nobody runs it any more"


def test_a_cell_of_a_running_event_loop_and_the_threads_it_starts_get_what_a_plain_call_gets(model):
    async def cell():
        here = sweep(model)
        there = await asyncio.gather(*(asyncio.to_thread(sweep, model) for _ in range(2)))
        return here, *there

    alone, before = sweep(model), hooks_left(model)
    for found in asyncio.run(cell()):
        pd.testing.assert_frame_equal(found, alone)
    assert hooks_left(model) == before


GROWTH = """
import resource, sys, tempfile
from pathlib import Path
import headwater as hw
model, folder = hw.load(), Path(tempfile.mkdtemp())
def peak(texts, name):
    file = folder / f"{name}.txt"
    file.write_text("\\n".join(f"Paris is the capital of France and not of Italy {i}" for i in range(texts)))
    hw.score_file(model, file, batch_size=8, progress=False, out=folder / name)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
peak(256, "warm")
print(peak(256, "short"), peak(256 * 5, "long"))
"""


@pytest.mark.slow
def test_five_times_the_texts_do_not_take_more_memory():
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    short, long = map(int, done.stdout.split())
    assert long - short < 24 * 1024  # KiB; the scores themselves are under one MiB
