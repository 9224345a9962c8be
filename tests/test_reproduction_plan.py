"""The plan of all published numbers: every model has its line, its arithmetic is right, and every line runs."""

import json
import shlex

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as tf
from benchmarks.hardware import SIZES

from headwater.errors import InputError
from headwater.likelihood.members import membership
from headwater.likelihood.scores import memorization_scores
from headwater.likelihood.statistics import token_statistics
from headwater.models.loading import load
from headwater.reference import maps, pathways
from headwater.reference import membership as members
from headwater.reference import memorization as depth
from headwater.reference.plan import PLAN, figure_commands, reproduction_plan
from headwater.reference.published import KINDS, Published, Reproduction, published_numbers
from tests import chance
from tests.dry_runs import answerable_files, depth_folder, family_of, member_file, random_checkpoint, relation_folder
from tests.tiny import WORDS

LINES = reproduction_plan("nowhere")


def test_every_published_model_has_its_line_and_every_line_its_data_and_numbers():
    wanted = {(kind, model) for kind in KINDS for model in published_numbers(kind).models}
    assert {(line.analysis, line.model) for line in LINES} == wanted
    assert len({line.folder for line in LINES}) == len(LINES)
    for line in LINES:
        assert line.weights > 0
        assert line.data
        assert all(name in line.command for name in line.data)
        assert ("--device auto" in line.command) == (line.weights > 70)
    assert sum(line.published for line in LINES) > 800


def test_a_line_counts_the_numbers_that_ship():
    counts = {(line.analysis, line.model): line.published for line in LINES if line.analysis != "membership"}
    mistral = published_numbers("pathways").models["mistralai/Mistral-7B-v0.3"]
    by_method = [len(one) for one in mistral["detection"].values()]
    assert counts["pathways", "mistralai/Mistral-7B-v0.3"] == sum(by_method) + len(mistral["mode"])
    assert counts["pathways", "meta-llama/Llama-3.2-1B"] == 0
    assert (
        published_numbers("membership").models["huggyllama/llama-13b"]["wikimia_concat"]["auc"]["min_k++_0.2"] == 0.679
    )


def test_published_figures_are_drawn_of_runs_that_the_plan_makes():
    folders = {line.folder for line in LINES}
    commands = [one for kind in PLAN for one in figure_commands(kind, "nowhere")]
    assert len(commands) == 4
    for command in commands:
        runs = [word for word in shlex.split(command) if word.startswith("nowhere")]
        assert len(runs) >= 2
        assert set(runs) <= folders


def config_of(name: str) -> tf.PretrainedConfig:
    """The published shape as a transformers config."""
    s, family = SIZES[name], family_of(name)
    if family == "gpt2":
        return tf.GPT2Config(vocab_size=s.d_vocab, n_embd=s.d_model, n_layer=s.layers, n_head=s.heads)
    shape = {"vocab_size": s.d_vocab, "hidden_size": s.d_model, "intermediate_size": s.d_mlp}
    shape |= {"num_hidden_layers": s.layers, "num_attention_heads": s.heads}
    if family == "neox":
        return tf.GPTNeoXConfig(**shape)
    if family == "mamba":
        return tf.MambaConfig(vocab_size=s.d_vocab, hidden_size=s.d_model, num_hidden_layers=s.layers)
    kinds = {"phi": tf.PhiConfig, "llama": tf.LlamaConfig, "mistral": tf.MistralConfig, "qwen3": tf.Qwen3Config}
    grouped = {"num_key_value_heads": s.kv_heads, "head_dim": s.d_head, "tie_word_embeddings": s.tied}
    return kinds[family](**shape, **grouped)


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_counted_as_transformers_builds_the_model(name):
    with torch.device("meta"):
        network = tf.AutoModelForCausalLM.from_config(config_of(name))
    sizes = SIZES[name]
    matrices = [one for one in network.parameters() if one.ndim == 2]
    positions = network.config.n_positions * sizes.d_model if family_of(name) == "gpt2" else 0
    assert sizes.parameters == sum(one.numel() for one in matrices) - positions
    published = [published_numbers(kind).models.get(name) for kind in KINDS]
    size = round(sizes.parameters / 1e9, 2), sizes.layers, sizes.heads
    assert {tuple(one[key] for key in ("billions", "layers", "heads")) for one in published if one} == {size}


def test_a_model_that_takes_twice_the_forwards_takes_twice_the_time():
    sizes = SIZES["meta-llama/Meta-Llama-3-8B"]
    assert sizes.weights == 2 * sizes.parameters
    assert sizes.forward_seconds(2_000) == pytest.approx(2 * sizes.forward_seconds(1_000))
    assert sizes.forward_seconds(1) == pytest.approx(2 * (sizes.parameters - 128256 * 4096) / (989e12 * 0.4))
    assert sizes.generation_seconds(3) == pytest.approx(3 * 2 * sizes.parameters / (3.35e12 * 0.6))


def test_the_command_lists_the_plan_on_a_page_and_runs_nothing(run, tmp_path):
    code, printed, _ = run("reproduce", "--plan", "--runs", tmp_path)
    assert code == 0
    assert all(line.command.split(" --out")[0] in printed for line in LINES)
    assert len(printed.splitlines()) < 80
    assert "262.8 GiB" in printed
    assert printed.count("headwater figure ") == 4
    assert "its numbers are not in this package" in printed
    code, printed, _ = run("reproduce", "--plan", "--json")
    assert code == 0
    assert len(json.loads(printed)["lines"]) == len(LINES)


@pytest.mark.parametrize(("given", "message"), [([], "pass --plan"), (["--plan", "maps"], "Unused Tokens")])
def test_the_plan_stands_alone(run, given, message):
    code, _, error = run("reproduce", "--runs", "x", *given)
    assert code == 2
    assert message in error


@pytest.fixture(scope="module")
def texts():
    """Texts of words, members and others."""
    rng = chance.rng()
    return pd.DataFrame(
        {"text": [" ".join(rng.choice(WORDS, size=12)) for _ in range(40)], "member": [n % 2 == 0 for n in range(40)]}
    )


def test_members_are_told_apart_as_by_hw_membership_and_the_best_k_is_named(texts, tmp_path, monkeypatch):
    model = load(random_checkpoint(tmp_path, "EleutherAI/pythia-2.8b"))
    file = tmp_path / "texts.jsonl"
    texts.to_json(file, orient="records", lines=True)
    shape = {"layers": 3, "heads": 4}
    auc = dict.fromkeys(("loss", "lowercase", "min_k", "min_k++_0.2", "neighbor", "reference"), 0.5)
    numbers = {"wikimia_32": {"auc": auc, "tpr_at_5": {"loss": 0.1}, "fpr_at_95": {"loss": 0.9}}}
    monkeypatch.setattr(members, "published_numbers", lambda kind: Published("here", {"me": shape | numbers}))
    asked = {"published": "me", "progress": False}
    found = members.reproduce_membership(model, file, **asked, reference=load(), out=tmp_path / "run")
    rows = found.table.set_index(["quantity", "score"])
    given = texts["text"].tolist()
    lowered = token_statistics(model, [text.lower() for text in given], progress=False)
    scores = memorization_scores(token_statistics(model, given, progress=False), lowercased=lowered)
    own = membership(scores, texts["member"], baseline=False).table.set_index("score")
    assert rows.loc[("AUC of members", "loss"), "measured"] == own.loc["loss", "auc"]
    assert (
        rows.loc[("AUC of members", "loss"), ["low", "high"]].tolist()
        == own.loc["loss", ["auc_low", "auc_high"]].tolist()
    )
    assert rows.loc[("AUC of members", "lowercase"), "measured"] == own.loc["lowercase", "auc"]
    assert rows.loc[("AUC of members", "min_k, best K"), "measured"] == own.loc["min_k", "auc"].max()
    assert rows.loc[("true positives at 5 % false positives", "loss"), "measured"] == own.loc["loss", "tpr_at_5"]
    assert np.isnan(rows.loc[("AUC of members", "neighbor"), "measured"])
    assert np.isfinite(rows.loc[("AUC of members", "reference"), "measured"])
    loss = np.array([-one for one in scores.texts["loss"]])
    member = texts["member"].to_numpy()
    passing = [np.mean(loss[~member] >= at) for at in np.sort(loss) if np.mean(loss[member] >= at) >= 0.95]
    measured = rows.loc[("false positives at 95 % true positives", "loss"), "measured"]
    assert measured == pytest.approx(min(passing))
    twice = members.reproduce_membership(model, [file, file], **asked)
    again = twice.table.set_index(["quantity", "score"]).loc[("AUC of members", "loss")]
    assert again["measured"] == pytest.approx(own.loc["loss", "auc"])
    assert again["high"] - again["low"] < own.loc["loss", "auc_high"] - own.loc["loss", "auc_low"]


def test_an_unknown_benchmark_is_refused(texts, tmp_path):
    with pytest.raises(InputError, match="mimir"):
        members.reproduce_membership(load(), tmp_path, benchmark="mimi")


def pretended(monkeypatch):
    """Let every published model have the shape of the tiny ones; the numbers stay."""

    def shrunk(kind):
        found = published_numbers(kind)
        shapes = {name: {"layers": 3, "heads": 1 if "mamba" in name else 4} for name in found.models}
        models = {name: {**one, **shapes[name]} for name, one in found.models.items()}
        for one in models.values():
            for relation in one.get("relations", {}).values():
                if "ablation" in relation:
                    relation["ablation"]["heads"] = 3
        return Published(found.source, models)

    for module in (maps, pathways, depth, members):
        monkeypatch.setattr(module, "published_numbers", shrunk)


SMALLER = {"maps": [], "pathways": ["--seeds", "1"], "memorization": ["--judge", "label"], "membership": []}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*answers none of the")
@pytest.mark.parametrize("line", LINES, ids=[line.folder for line in LINES])
def test_every_line_of_the_plan_runs_on_a_random_model_of_the_family(line, run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    pretended(monkeypatch)
    checkpoint = random_checkpoint(tmp_path / "models", line.model)
    if line.analysis == "maps":
        relation_folder(tmp_path / "MAPS" / "datasets", ["name_copying", "adj_antonym", "verb_past_tense"])
    elif line.analysis == "pathways":
        answerable_files(tmp_path, checkpoint)
    elif line.analysis == "memorization":
        depth_folder(tmp_path / "depthqa")
    for name in line.data if line.analysis == "membership" else ():
        member_file(tmp_path / name)
    words = [str(checkpoint) if word == line.model else word for word in shlex.split(line.command)[1:]]
    words = ["float32" if word == "bfloat16" else word for word in words if word not in ("--device", "auto")]
    code, _, error = run(*words, *SMALLER[line.analysis], "--quiet")
    assert code == 0, error
    found = Reproduction.load(line.folder)
    assert found.published_model == line.model
    assert found.table["measured"].notna().any()
    measured = found.table.dropna(subset=["low", "high"])
    assert len(measured)
    assert (measured["low"] <= measured["measured"] + 1e-9).all()
    assert (measured["measured"] <= measured["high"] + 1e-9).all()
