"""Several processes share a run and end with the bytes of one, also when one of them is killed half-way."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import headwater as hw
from headwater.runs.folder import Processes, RunFolder, processes
from tests import chance
from tests.counting_run import count_up, files, record
from tests.forking import shared

ACCELERATE = (
    sys.executable,
    "-m",
    "accelerate.commands.accelerate_cli",
    "launch",
    "--multi_gpu",
    "--num_machines",
    "1",
)
PLAIN = ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")


def launch(processes: int, code: str, timeout: float = 300) -> subprocess.CompletedProcess:
    """Run Python code in several processes, started by accelerate."""
    begin = (
        "import sys; from pathlib import Path; from accelerate import PartialState; state = PartialState(cpu=True); "
        "sys.path.insert(0, '.'); from tests.test_shards import *\n"
    )
    script = f"{begin}{code}\nstate.destroy_process_group()\n"
    file = Path(os.environ["PYTEST_TMP"]) / f"script-{hashlib.sha256(script.encode()).hexdigest()[:8]}.py"
    file.write_text(script)
    command = [*ACCELERATE, "--num_processes", str(processes), *PLAIN, str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=Path(__file__).parents[1])


@pytest.fixture(autouse=True)
def _scripts(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path_factory.mktemp("scripts")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_without_a_process_group_there_is_one_process_which_owns_every_piece():
    alone = processes()
    assert alone == Processes(0, 1)
    assert all(alone.owns(piece) for piece in range(9))
    assert alone.on_main("a step", lambda: 5) == 5
    assert alone.together("another", 6) == [6]


def test_every_piece_has_one_owner_and_the_shares_differ_by_one_piece_at_most():
    for count in range(1, 6):
        group = [Processes(index, count) for index in range(count)]
        for pieces in range(12):
            owners = [[p.index for p in group if p.owns(piece)] for piece in range(pieces)]
            assert all(len(owner) == 1 for owner in owners)
            shares = [sum(p.owns(piece) for piece in range(pieces)) for p in group]
            assert max(shares) - min(shares) <= 1


def test_two_processes_one_of_them_killed_and_three_that_resume_give_the_bytes_of_one(tmp_path):
    count_up(tmp_path / "one", tmp_path / "one.log")
    out, log = tmp_path / "many", tmp_path / "many.log"
    killed = shared(2, lambda: count_up(out, log, pause=0.05, kill=(1, 3)), tmp_path / "meeting")
    assert killed == [1, -signal.SIGKILL]
    assert not RunFolder(out, record()).finished
    before = set(log.read_text().split("\n"))
    assert "1 1" in before
    assert "1 3" not in before
    resumed = launch(3, f"sys.stdout.write(str(len(count_up(Path({str(out)!r}), Path({str(log)!r})).table)) + '\\n')")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert resumed.stdout.split() == ["35", "35", "35"]
    computed = [int(line.split()[1]) for line in log.read_text().splitlines()]
    assert set(computed) == set(range(7))
    assert computed.count(1) == 1  # what the killed process had done was kept
    assert len(computed) <= 8  # the launcher may have ended the other one between computing a piece and keeping it
    assert files(out) == files(tmp_path / "one")


ANALYSES = """
import dataclasses
import headwater as hw
import headwater.patching.plan
from headwater.runs import folder as runs
from tests import chance
headwater.patching.plan.WAVE_TOKENS = 64  # several waves
def run(out, texts, die_at=None):
    if die_at is not None and processes().index == 1:
        made = runs.RunFolder._made
        def dying(folder, name, compute, left=[die_at]):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return made(folder, name, compute)
        runs.RunFolder._made = dying
    model = hw.load()
    chosen = hw.load_relations()[:6]
    hw.classify_heads(model, relations=chosen, out=out / "heads", progress=False)
    questions = hw.load_questions("properties", sample=60)
    answered = hw.answer(model, questions, batch_size=8, out=out / "answers", progress=False)
    options = {"token": "before_answer", "controls": False, "progress": False}
    traced = hw.trace_pathways(model, answered, seeds=1, **options, out=out / "pathways")
    wanted = {"edges": "all", "batch_size": 8, "progress": False}
    hw.saliency(model, answered, traced.probe, **wanted, out=out / "saliency")
    hw.detect(model, answered, seeds=3, progress=False, out=out / "detection")
    hw.score_file(model, texts, out=out / "scores", progress=False)
    graph = hw.load_depth_graph()
    few = graph.table["group"].isin(sorted(graph.table["group"].unique())[:30])
    graph = dataclasses.replace(graph, table=graph.table[few].reset_index(drop=True))
    judged = {"answers": "model", "judge": lambda question, accepted, answer: 1.0 + len(answer) % 5}
    hw.memorization(model, graph, layers="all", **judged, batch_size=8, out=out / "memorization", progress=False)
    pairs = ["France Paris is in the"] * 3, ["Italy Rome is in the"] * 3
    metric = {"metric": hw.logit_difference(" a", " b"), "progress": False}
    hw.patch(model, *pairs, sites=["resid_pre", "z", "mlp_out"], out=out / "sweep", **metric)
    hw.patch(model, *pairs, sites="resid_pre", method="attribution", out=out / "attribution", **metric)
    hw.knockout(model, pairs[0], block=("last", (1, 2)), window=2, out=out / "knockout", **metric)
"""
FITTED = {"pathways", "detection"}
"""Results of iterations, whose last digits depend on the process: equal to 1e-6, and not to the byte."""


def alike(found: Path, expected: Path) -> None:
    """Check that two folders hold the same results."""
    names = {folder.name for folder in expected.iterdir()}
    assert {folder.name for folder in found.iterdir()} == names
    assert names >= FITTED
    for name in names - FITTED:
        assert files(found / name) == files(expected / name)
    for name in FITTED:
        assert files(found / name).keys() == files(expected / name).keys()
        for file in (expected / name).glob("*.parquet"):
            tables = pd.read_parquet(found / name / file.name), pd.read_parquet(file)
            pd.testing.assert_frame_equal(*tables, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The texts, and the folder of what one process makes of them and of what comes with headwater."""
    texts, out = tmp_path_factory.mktemp("texts") / "texts.txt", tmp_path_factory.mktemp("one")
    texts.write_text("\n".join(f"Paris is the capital of France {i}" for i in range(700)))
    code = f"from pathlib import Path{ANALYSES}\nrun(Path({str(out)!r}), {str(texts)!r})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return texts, out


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_every_analysis_gives_the_same_files_from_several_processes_as_from_one(tmp_path, alone, count):
    texts, expected = alone
    many = launch(count, f"{ANALYSES}\nrun(Path({str(tmp_path / 'many')!r}), {str(texts)!r})", timeout=500)
    assert many.returncode == 0, many.stderr[-2000:]
    alike(tmp_path / "many", expected)


@pytest.mark.slow
def test_analyses_killed_again_and_again_in_several_processes_end_with_the_files_of_one(tmp_path, alone):
    texts, expected = alone
    call = f"run(Path({str(tmp_path / 'many')!r}), {str(texts)!r}"
    for attempt in range(4):
        die_at = int(chance.rng().integers(1, 6))
        killed = launch(3 - attempt % 2, f"{ANALYSES}\n{call}, die_at={die_at})", timeout=500)
        assert killed.returncode != 0 or attempt > 0  # a later one may have too little left to do to die of it
    resumed = launch(3, f"{ANALYSES}\n{call})", timeout=500)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    alike(tmp_path / "many", expected)


@pytest.mark.slow
def test_the_command_line_shares_its_work_and_prints_once(tmp_path):
    relations = tmp_path / "relations"
    relations.mkdir()
    for relation in hw.load_relations()[:3]:
        rows = [[source, list(targets)] for source, targets in relation.pairs]
        content = {"name": relation.name, "category": relation.category, "pairs": rows}
        (relations / f"{relation.name}.json").write_text(json.dumps(content))
    command = ["-m", "headwater", "heads", "--relations", str(relations), "--json", "--out"]
    alone = subprocess.run(
        [sys.executable, *command, str(tmp_path / "one")], capture_output=True, text=True, check=True
    )
    launched = [*ACCELERATE, "--num_processes", "2", *PLAIN, *command, str(tmp_path / "two")]
    many = subprocess.run(launched, capture_output=True, text=True, check=False)
    assert many.returncode == 0, many.stderr[-2000:]
    (line,) = many.stdout.splitlines()
    assert json.loads(line)["relations"] == json.loads(alone.stdout)["relations"]
    for name in ("table.parquet", "categories.parquet", "relations.parquet", "table.csv"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
