"""The command line: what it prints and writes, its exit codes, and how it continues after an interrupt."""

import itertools
import json
import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pandas as pd
import pytest

import headwater
from headwater import cli
from headwater.errors import InputError
from headwater.heads import classify, scores
from headwater.heads.categories import label_counts
from headwater.heads.head_map import HeadMap
from headwater.runs.result import records_of
from tests import chance
from tests.tiny import WORDS


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """A folder of relations in the published layout: two that the tiny tokenizer can say, one that it cannot."""
    folder = tmp_path_factory.mktemp("relations")
    rng = random.Random(chance.seed_of("words"))
    rows = {name: [[rng.choice(WORDS), rng.choice(WORDS)] for _ in range(40)] for name in ("facts", "forms")}
    longer = [[f"{a}tockholm", f"{b}orway"] for a, b in itertools.islice(itertools.permutations("SNABCDE", 2), 35)]
    known = "Paris France Rome Italy Madrid Spain Berlin Germany cat dog".split()  # noqa: SIM905
    rows["cities"] = [*longer, *zip(known[::2], known[1::2], strict=True)]
    for name, pairs in rows.items():
        (folder / name).mkdir()
        (folder / name / f"{name}.json").write_text(json.dumps(pairs))
    (folder / "categories.json").write_text('{"facts": "knowledge", "forms": "linguistic"}')
    return folder


def test_heads_prints_a_summary_and_writes_figure_and_tables(run, checkpoint, suite, tmp_path):
    code, printed, _ = run("heads", checkpoint("llama"), "--relations", suite, "--out", tmp_path / "out")
    assert code == 0
    head_map = HeadMap.load(tmp_path / "out")
    counts = label_counts(head_map.categories)
    assert f"{12 - counts['unclassified']} of 12 heads are classified under the controlled rule" in printed
    assert "facts" in printed
    assert "Too few single-token pairs to score: cities." in printed
    written = {file.name for file in (tmp_path / "out").iterdir()}
    tables = {
        f"{name}.{kind}" for name in ("table", "categories", "relations", "embeddings") for kind in ("csv", "parquet")
    }
    assert written == tables | {"run.json", "head_map.png", "head_map.svg", "head_map.pdf"}
    assert all(str(tmp_path / "out" / name) in printed for name in written - {"run.json"})
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "out" / "table.csv"), head_map.table, check_dtype=False)


def test_json_is_one_line_on_stdout_that_says_what_the_result_holds(run, checkpoint, suite):
    code, printed, _ = run("heads", checkpoint("gpt2"), "--relations", suite, "--rule", "published", "--json")
    assert code == 0
    assert printed.count("\n") == 1
    summary = json.loads(printed)
    head_map = classify.classify_heads(checkpoint("gpt2"), relations=suite, rule="published", progress=False)
    shown = {"files": [], "relations": records_of(head_map.summary())}
    assert summary == json.loads(json.dumps(head_map.findings() | shown))
    for row in summary["summary"]:
        of_relation = head_map.table[head_map.table["relation"] == row["relation"]]
        assert row["score"] == of_relation[["score", "suppression"]].max(axis=None)


def test_options_reach_the_analysis(run, checkpoint, suite, tmp_path):
    options = [
        "--k",
        3,
        "--threshold",
        0.3,
        "--embedding",
        "raw",
        "--multi-token",
        "first",
        "--rule",
        "published",
        "--quiet",
    ]
    code, _, noise = run("heads", checkpoint("llama"), "--relations", suite, "--out", tmp_path, *options)
    assert code == 0
    assert "layer/s" not in noise
    used = HeadMap.load(tmp_path).run.options
    wanted = {"k": 3, "threshold": 0.3, "embedding": "raw", "multi_token": "first", "rule": "published"}
    assert {name: used[name] for name in wanted} == wanted


def test_heads_are_validated_beside_what_was_read_of_them(run, tmp_path):
    folder = Path(classify.__file__).parent / "suite"
    asked = ("heads", "--relations", folder / "country_to_capital.json", "--quiet", "--validate", "--json")
    template = "The capital of {source} is"
    code, printed, _ = run(*asked, "--template", template, "--out", tmp_path / "run")
    assert code == 0
    plain, validated = HeadMap.load(tmp_path / "run"), HeadMap.load(tmp_path / "run" / "validated")
    expected = plain.validate(
        headwater.load(), relations=folder / "country_to_capital.json", template=template, shots=0, progress=False
    )
    assert not plain.is_validated
    pd.testing.assert_series_equal(validated.table["used"], expected.table["used"])
    assert validated.table["used"].notna().any()
    assert json.loads(printed)["report"] == expected.report()
    assert (tmp_path / "run" / "validated" / "head_map.png").stat().st_size > 5000
    code, printed, _ = run(*asked)  # as the embedded model was trained to be asked
    ask = headwater.world.question_templates(["country_to_capital"])
    assert ask == {"country_to_capital": "Q: What is the capital of {source}?\nA:"}
    measured = plain.table["implemented"].sum()  # all: with three examples, none
    assert f"Of {measured} head-relation pairs ablated in the running model" in " ".join(json.loads(printed)["report"])
    code, _, noise = run(*asked[:-2], "--template", template)
    assert (code, noise.strip()) == (2, "Error: --template is a prompt for the running model: pass --validate too.")


def test_targets_of_several_tokens_are_told_apart_on_the_command_line(run, checkpoint, suite, tmp_path, monkeypatch):
    told_apart = ("--multi-token", "distinguishing")
    code, *_ = run("heads", checkpoint("llama"), "--relations", suite, *told_apart, "--out", tmp_path, "--quiet")
    assert code == 0
    assert HeadMap.load(tmp_path).run.options["multi_token"] == "distinguishing"
    seen = []
    monkeypatch.setattr(
        "headwater.heads.relations.relation_coverage",
        lambda *_, **options: seen.append(options) or pd.DataFrame({"usable": []}),
    )
    run("relations", checkpoint("llama"), "--relations", suite, *told_apart, "--json")
    assert seen == [{"multi_token": "distinguishing"}]


def test_bars_go_to_stderr_and_only_where_that_is_a_terminal(run, checkpoint, suite, monkeypatch):
    _, printed, noise = run("heads", checkpoint("llama"), "--relations", suite)
    assert "layer/s" not in noise + printed
    assert "\r" not in noise + printed
    monkeypatch.setattr("headwater.progress.is_seen", lambda: True)
    _, printed, noise = run("heads", checkpoint("llama"), "--relations", suite)
    assert "layer/s" in noise
    assert "layer/s" not in printed


def test_relations_counts_what_survives_and_names_what_falls_out(run, checkpoint, suite):
    code, printed, _ = run("relations", checkpoint("llama"), "--relations", suite)
    assert code == 0
    assert "2 of 3 relations can be used" in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("cities"))
    assert line.split()[1:6] == ["-", "40", "5", "no", "Stockholm,"]
    code, printed, _ = run("relations", checkpoint("llama"), "--relations", suite, "--json")
    (cities,) = (row for row in json.loads(printed)["relations"] if row["relation"] == "cities")
    assert (cities["items"], cities["kept"], cities["usable"], cities["category"]) == (40, 5, False, None)
    code, printed, _ = run("relations", checkpoint("llama"), "--relations", suite, "--multi-token", "first")
    assert "3 of 3 relations can be used" in printed


BAD = {
    "no such model": (["heads", "no/such/folder"], "no/such/folder"),
    "no relations": (
        ["heads", "MODEL", "--relations", "no/such/relations"],
        "There is no relation or folder no/such/relations",
    ),
    "no embedding": (
        ["heads", "MODEL", "--relations", "SUITE", "--embedding", "[raw]"],
        'Invalid value "[raw]" for --embedding. Choose from: "auto", "raw", "mlp0"',
    ),
    "threshold": (["heads", "MODEL", "--relations", "SUITE", "--threshold", "15"], "threshold=15.0"),
    "no such device": (["heads", "MODEL", "--relations", "SUITE", "--device", "gpu"], "device='gpu' cannot be used"),
    "no such tokenizer": (["relations", "no/such/folder"], "no/such/folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_on_stderr_and_exit_code_two(run, checkpoint, suite, case):
    arguments, message = BAD[case]
    code, printed, error = run(*({"MODEL": checkpoint("llama"), "SUITE": suite}.get(word, word) for word in arguments))
    assert (code, printed) == (2, "")
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
    assert message in error


def test_a_wrong_pair_of_a_relation_is_reported_with_its_file(run, checkpoint, tmp_path):
    (tmp_path / "facts").mkdir()
    file = tmp_path / "facts" / "facts.json"
    file.write_text('[["a", "b"],\n["c", 4]]')
    code, _, error = run("heads", checkpoint("llama"), "--relations", tmp_path)
    assert code == 2
    assert error.startswith(f"Error: {file}: Relation 'facts': ['c', 4] is not a pair (source, target)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["headz"], 'Unknown command "headz". Did you mean "heads"?'),
        (
            ["heads", "--rule", "[publish]"],
            'Invalid value "[publish]" for --rule. Choose from: "controlled"',
        ),
        (["heads", "--k", "many"], "Invalid value for --k"),
        (["heads", "--treshold", "1"], "--threshold"),
        (["heads", "--modle", "gpt2"], "Unknown option: --modle. Did you mean --model?"),
        (["patch", "--prompts", "a"], "Unknown option: --prompts. Did you mean --pairs? Help: headwater patch --help"),
        (["evidence", "gpt2", "--relation", "a"], "Unknown option: --relation."),
        (["score"], "MODEL-AND-FILE requires an argument"),
    ],
)
def test_usage_errors_too_are_one_line_and_exit_code_two(run, arguments, message):
    code, printed, error = run(*arguments)
    assert (code, printed) == (2, "")
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
    assert message in error
    assert error.endswith("--help\n")


def test_another_runs_folder_is_refused_and_kept(run, checkpoint, suite, tmp_path):
    run("heads", checkpoint("llama"), "--relations", suite, "--out", tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    code, _, error = run("heads", checkpoint("llama"), "--relations", suite, "--out", tmp_path, "--rule", "published")
    assert code == 2
    assert "holds another run (" in error
    assert "option rule: 'controlled' there, 'published' here" in error
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_an_interrupt_before_the_first_piece_says_that_nothing_is_saved(run, checkpoint, suite, tmp_path, monkeypatch):
    command = ["heads", checkpoint("llama"), "--relations", suite, "--out"]
    run(*command, tmp_path / "whole")

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scores, "score_layer", interrupted)
        code, printed, error = run(*command, tmp_path / "parts")
    assert (code, printed) == (130, "")
    assert f"classify_heads was interrupted. Nothing is saved in '{tmp_path / 'parts'}' yet" in error
    assert run(*command, tmp_path / "parts")[0] == 0
    for file in (tmp_path / "whole").iterdir():
        if file.name != "run.json":
            assert (tmp_path / "parts" / file.name).read_bytes() == file.read_bytes()


def test_an_interrupt_without_a_folder_says_that_nothing_was_kept(run, checkpoint, suite, monkeypatch):
    monkeypatch.setattr(scores, "score_layer", lambda *args, **options: (_ for _ in ()).throw(KeyboardInterrupt))
    code, _, error = run("heads", checkpoint("llama"), "--relations", suite)
    assert code == 130
    assert "Nothing was kept; with out=FOLDER a run can be continued." in error


def test_an_interrupt_outside_of_any_call_says_how_a_command_continues(run, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("headwater.load_relations", interrupted)
    code, printed, error = run("heads")
    assert (code, printed) == (130, "")
    assert "Interrupted. With --out FOLDER the same command continues." in error


def test_version_and_help(run):
    assert run("--version") == (0, f"headwater {headwater.__version__}\n", "")
    for command in ([], ["heads"], ["relations"], ["demo"]):
        code, printed, _ = run(*command, "--help")
        assert code == 0
        assert "Usage: headwater" in printed
    for command in ("heads", "relations", "demo"):
        assert (
            f"headwater {command} "
            in run(command, "--help")[1].split("Examples" if command != "demo" else "Example")[1]
        )


def test_no_command_at_all_shows_the_commands(run):
    code, printed, _ = run()
    assert code == 0
    assert all(command in printed for command in ("heads", "patch", "score", "demo"))


@pytest.mark.filterwarnings("default")
def test_a_warning_is_a_line_without_its_place_in_the_code(run, checkpoint, suite, monkeypatch):
    def warned(*arguments, **options):
        warnings.warn("mind the gap [0]", stacklevel=1)
        return classify_heads(*arguments, **options)

    classify_heads = classify.classify_heads
    monkeypatch.setattr(classify, "classify_heads", warned)
    before = warnings.showwarning
    code, _, error = run("heads", checkpoint("llama"), "--relations", suite, "--quiet")
    assert (code, error) == (0, "Note: mind the gap [0]\n")
    assert warnings.showwarning is before


def test_a_group_of_commands_alone_names_them(run):
    code, _, error = run("reproduce")
    assert (code, error.count("\n")) == (2, 1)
    assert "choose maps, pathways, memorization or membership" in error


def test_help_comes_without_loading_torch():
    code = (
        "import sys, headwater.cli as cli\n"
        "for words in ([], ['reproduce'], ['reproduce', 'maps'], *([one.__name__] for one in cli.COMMANDS)):\n"
        "    sys.argv = ['headwater', *words, '--help']\n"
        "    try:\n        cli.main()\n    except SystemExit:\n        pass\n"
        "heavy = {'torch', 'transformers', 'pandas', 'matplotlib', 'scipy'}\n"
        "print('LOADED', heavy & set(sys.modules))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.rstrip().endswith("LOADED set()")


def test_the_module_runs_as_the_command():
    ended = subprocess.run([sys.executable, "-m", "headwater", "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout == f"headwater {headwater.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["heads", "gpt2", "--model", "gpt2-xl"], "Unused Tokens: ['gpt2']"),
        (
            ["score", "gpt2", "a.txt", "--k", "0.2", "0.3"],
            "Unused Tokens: ['0.3']. For several values, repeat the option.",
        ),
        (["reproduce", "mpas"], "Unused Tokens: ['mpas']"),
        (["score", "gpt2", "no", "such"], "found gpt2 no such"),
        (["score", "no-such.txt"], "The file of texts no-such.txt does not exist"),
    ],
)
def test_words_that_are_too_many_or_no_file_are_refused(run, arguments, message):
    code, printed, error = run(*arguments)
    assert (code, printed) == (2, "")
    assert message in error


def test_a_model_is_given_as_a_word_or_by_name(run, checkpoint, suite):
    folder = checkpoint("llama")
    assert run("relations", "--model", folder, "--relations", suite) == run("relations", folder, "--relations", suite)


def test_one_word_behind_score_is_the_file_and_the_model_may_be_left_out(run, checkpoint, tmp_path):
    (tmp_path / "texts.txt").write_text("Paris is in France.\n")
    of_one = run("score", "--model", checkpoint("llama"), tmp_path / "texts.txt", "--json")
    assert of_one[0] == 0
    assert of_one[1] == run("score", checkpoint("llama"), tmp_path / "texts.txt", "--json")[1]
    code, printed, _ = run("score", tmp_path / "texts.txt", "--json")
    assert (code, json.loads(printed)["model"]) == (0, "embedded")


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("words", "completed"),
    [(["behav"], "behaviour"), (["heads", "--thres"], "--threshold"), (["heads", "--rule", "pub"], "published")],
)
def test_bash_completes_with_what_it_is_given(words, completed, tmp_path):
    (tmp_path / "completion").write_text(cli.app.generate_completion(shell="bash"))
    typed = " ".join(["headwater", *words])
    asked = f"source ./completion; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; "
    ended = subprocess.run(
        ["bash", "-c", asked + '_headwater; echo "${COMPREPLY[@]}"'], cwd=tmp_path, capture_output=True, text=True
    )
    assert completed in ended.stdout.split(), ended.stderr


def test_a_name_is_refused_before_anything_is_loaded(run, monkeypatch, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("a\n")

    def load(*_, **__):
        raise InputError("a model is loaded")

    monkeypatch.setattr("headwater.models.checkpoint.embedded_folder", load)
    prompts = ["--clean", "a", "--corrupted", "b", "--tokens", " a", " b"]
    for command, name in [
        (["patch", *prompts, "--sites", "resid_per"], "resid_per"),
        (["patch", *prompts, "--dtype", "float3"], "float3"),
        (["patch", *prompts, "--metric", "logit-diff"], "logit_diff"),
        (["patch", *prompts, "--over", "heads"], "heads"),
        (["patch", *prompts, "--values", "zeros"], "Did you mean 'zero'"),
        (["patch", *prompts, "--direction", "denoize"], "denoize"),
        (["patch", *prompts, "--window", "wide"], "window='wide' is neither a number of layers nor 'cumulative'"),
        (["knockout", "--prompt", "a", "--key", "a", *prompts[-3:], "--window", "wide"], "window='wide'"),
        (["score", texts, "--k", "3"], "k="),
        (["heads", "--relations", "capitols"], "capitols"),
        (["edges", *prompts, "--method", "eapp"], "eapp"),
        (["pathways", "--extract", "rulez"], "rulez"),
        (["memorization", "--data", "no-such.json"], "no-such.json"),
    ]:
        code, _, error = run(*command)
        assert (code, name in error) == (2, True), (command, error)
