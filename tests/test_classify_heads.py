"""classify_heads equals the formula written naively, on any model, and keeps its promises about runs and folders."""

import json
import random
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from scipy import stats

import headwater as hw
from headwater.errors import AgreementWarning, InputError, ModelError, RunFolderError
from headwater.heads import scores
from headwater.heads.categories import CATEGORIES
from headwater.heads.classify import classify_heads
from headwater.heads.relations import Relation, tokenize_relations
from headwater.heads.scoring import LEVEL, hits_of
from headwater.models.effective_embedding import bos_token, published_embedding
from headwater.models.families import ModelShape
from headwater.models.weights import open_weights
from headwater.stats.significance import wilson_interval
from tests import chance
from tests.naive_heads import KEYS, default_k, naive_scores, naive_shares, random_relation
from tests.tiny import FAMILIES, tiny_folder, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.oracle


def random_suite(seed: int) -> tuple[Relation, ...]:
    return (
        random_relation("facts", "knowledge", seed),
        random_relation("forms", "linguistic", seed + 1, pairs=50, most_targets=3),
        random_relation("things_copying", "algorithmic", seed + 2),
        random_relation("loose", None, seed + 3),
        random_relation("few", "translation", seed + 4, pairs=29),
    )


@pytest.fixture
def suite():
    return random_suite(random.randrange(10**6))


def published_folder(folder, relations):
    """Write relations in the published layout, a row per pair of source and target."""
    for relation in relations:
        rows = [[source, target] for source, targets in relation.pairs for target in targets]
        (folder / relation.name).mkdir(parents=True)
        (folder / relation.name / f"{relation.name}.json").write_text(json.dumps(rows))
    categories = {relation.name: relation.category for relation in relations if relation.category}
    (folder / "categories.json").write_text(json.dumps(categories))
    return folder


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_published_table_equals_the_naive_formula_in_every_architecture(family, tmp_path, suite, dtype):
    model = tiny_folder(tmp_path / "model", family, seed=random.randrange(10**6), dtype=dtype)
    folder = published_folder(tmp_path / "relations", suite)
    heads = classify_heads(model, relations=folder, rule="published", progress=False)
    relations = hw.load_relations(folder)
    used = [tokens for tokens in tokenize_relations(relations, tiny_tokenizer()) if tokens.usable]
    naive = naive_scores(open_weights(model), used, default_k, "mlp0")
    columns = [*KEYS, "score", "suppression"]
    pd.testing.assert_frame_equal(heads.table[columns], naive[columns], check_dtype=False, check_exact=True)
    np.testing.assert_allclose(heads.table["margin"], naive["margin"], atol=1e-5 * naive["margin"].abs().max())
    assert (heads.table["implemented"] == (naive["score"] >= 0.15)).all()
    assert (heads.table["suppressed"] == (naive["suppression"] >= 0.15)).all()
    assert heads.table[["expected", "p_value", "q_value", "suppression_p_value"]].isna().all(axis=None)
    assert not heads.table["copying"].any()


@pytest.mark.parametrize(("family", "embedding"), [("llama", "raw"), ("gpt2", "embed+mlp0"), ("gemma2", "layer0")])
def test_other_embeddings_targets_and_k_equal_the_naive_formula(checkpoint, suite, family, embedding):
    model = checkpoint(family)
    k = random.randrange(1, 30)
    heads = classify_heads(model, relations=suite, embedding=embedding, k=k, progress=False)
    used = [tokens for tokens in tokenize_relations(suite, tiny_tokenizer()) if tokens.usable]
    naive = naive_scores(open_weights(model), used, lambda _: k, embedding)
    columns = naive.columns.drop("margin")
    pd.testing.assert_frame_equal(heads.table[columns], naive[columns], check_dtype=False, check_exact=True)
    np.testing.assert_allclose(heads.table["margin"], naive["margin"], atol=1e-5 * naive["margin"].abs().max())


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_norm_gains_are_folded_in_on_request(checkpoint, suite, family):
    heads = classify_heads(checkpoint(family), relations=suite, norm_gain=True, rule="published", progress=False)
    used = [tokens for tokens in tokenize_relations(suite, tiny_tokenizer()) if tokens.usable]
    naive = naive_scores(open_weights(checkpoint(family)), used, default_k, "mlp0", norm_gain=True)
    columns = [*KEYS, "score", "suppression"]
    pd.testing.assert_frame_equal(heads.table[columns], naive[columns], check_dtype=False, check_exact=False, atol=0.04)


def test_a_llama_is_scored_as_its_transformers_module_says(tmp_path, suite):
    model = tiny_model("llama", seed=random.randrange(10**6), dtype=torch.float64)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    heads = classify_heads(folder, relations=suite, rule="published", progress=False).table.set_index(KEYS)
    facts = tokenize_relations(suite, tiny_tokenizer())[0]
    with torch.no_grad():
        block = model.model.layers[0]
        mlp = block.mlp(block.post_attention_layernorm(model.model.embed_tokens.weight))
        for layer in range(3):
            x = model.model.embed_tokens.weight if layer == 0 else mlp
            attention = model.model.layers[layer].self_attn
            values = (x @ attention.v_proj.weight.T).unflatten(1, (2, 8)).repeat_interleave(2, dim=1)
            for head in range(4):
                written = values[:, head] @ attention.o_proj.weight.T[head * 8 : head * 8 + 8]
                score, _ = naive_shares(model.lm_head(written).numpy(), facts, 10)
                assert heads.loc[(layer, head, "facts"), "score"] == score


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(FAMILIES),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 10**6),
    k=st.integers(1, 12),
    padding=st.integers(0, 64),
)
def test_ties_are_counted_as_the_formula_says(tmp_path_factory, family, dtype, seed, k, padding):
    """Weights of -1, 0 and 1: sums are exact in any order, and many logits are equal."""
    model = tiny_model(family, d_vocab=len(tiny_tokenizer()) + padding, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    folder = tmp_path_factory.mktemp("ties")
    model.to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    suite = random_suite(seed)
    heads = classify_heads(folder, relations=suite, embedding="raw", k=k, progress=False)
    used = [tokens for tokens in tokenize_relations(suite, tiny_tokenizer()) if tokens.usable]
    naive = naive_scores(open_weights(folder), used, lambda _: k, "raw")
    columns = naive.columns.drop("margin")
    pd.testing.assert_frame_equal(heads.table[columns], naive[columns], check_dtype=False, check_exact=True)
    np.testing.assert_allclose(heads.table["margin"], naive["margin"], atol=1e-5 * naive["margin"].abs().max())


def test_a_loaded_model_and_its_folder_give_the_same_result(checkpoint, suite):
    folder = checkpoint("qwen3")
    streamed = classify_heads(folder, relations=suite, progress=False)
    loaded = classify_heads(hw.load(folder), relations=suite, progress=False)
    pd.testing.assert_frame_equal(streamed.table, loaded.table)
    assert streamed.run.fingerprint == loaded.run.fingerprint


def test_the_null_columns_are_what_shuffled_targets_give(checkpoint):
    relation = random_relation("facts", "knowledge", random.randrange(10**6), pairs=40, most_targets=2)
    weights = open_weights(checkpoint("neox"))
    heads = classify_heads(checkpoint("neox"), relations=[relation], k=20, threshold=1 / 40, progress=False)
    table = heads.table.set_index(KEYS)
    (facts,) = tokenize_relations([relation], tiny_tokenizer())
    sources, place = facts.source.unique(return_inverse=True)
    assert len(sources) < 40  # items of one source are shuffled together
    rng = chance.rng()
    orders = rng.permuted(np.broadcast_to(np.arange(len(sources)), (20_000, len(sources))), axis=1)
    for layer in range(3):
        factors = weights.layer(layer)
        x = weights.effective_embedding(sources, "raw" if layer == 0 else "mlp0").double()
        for head in range(4):
            rows = (
                x @ factors.W_V[head].double() @ factors.W_O[head].double() @ weights.unembedding().double()
            ).numpy()
            for sign, prefix in ((1, ""), (-1, "suppression_")):
                greater = np.array([[(sign * row > sign * own).sum() for own in row] for row in rows])
                hits = np.stack([(greater[:, list(targets)] < 20).any(axis=1) for targets in facts.targets], axis=1)
                row = table.loc[(layer, head, "facts")]
                observed = hits[place, np.arange(40)].sum()
                if not observed:  # P(at least 0 hits)
                    assert row[f"{prefix}p_value"] == 1
                    assert np.isnan(row[f"{prefix}expected"])
                    continue
                assert row[f"{prefix}expected"] == pytest.approx(hits.mean())
                counts = np.stack([hits[:, place == one].sum(axis=1) for one in range(len(sources))], axis=1)
                share = (counts[np.arange(len(sources)), orders].sum(axis=1) >= observed).mean()
                assert row[f"{prefix}p_value"] == pytest.approx(share, rel=0.25, abs=0.02)


@pytest.mark.parametrize("threshold", [0.05, 0.15])
def test_the_null_model_is_left_out_where_nothing_can_be_called_and_is_the_same_elsewhere(
    threshold, checkpoint, suite, monkeypatch
):
    call = partial(classify_heads, checkpoint("llama"), relations=suite, k=15, threshold=threshold, progress=False)
    table = call().table
    monkeypatch.setattr("headwater.heads.scoring.THRESHOLDS", (0.0,))
    everywhere = call().table
    for sign, prefix in (("score", ""), ("suppression", "suppression_")):
        names = [f"{prefix}{name}" for name in ("expected", "excess", "p_value", "q_value")]
        found, none = table[sign] >= min(threshold, 0.10), table[sign] == 0
        assert 0 < found.sum() < (~none).sum() < len(table)
        pd.testing.assert_frame_equal(table.loc[found, names[:3]], everywhere.loc[found, names[:3]])
        assert (table.loc[found, names[3]] >= everywhere.loc[found, names[3]]).all()  # the others count as p = 1
        assert table.loc[~found & ~none, names].isna().all(axis=None)
        assert table.loc[none, names[:2]].isna().all(axis=None)
        assert (table.loc[none, names[2]] == 1).all()
        assert (everywhere.loc[none, names[1]] <= 0).all()
        assert everywhere.loc[none, names[2]].min() > 0.5
    flags = ["implemented", "suppressed", "copying"]
    pd.testing.assert_frame_equal(table[flags], everywhere[flags])


def test_intervals_and_q_values_belong_to_scores_and_p_values(checkpoint, suite):
    table = classify_heads(checkpoint("llama"), relations=suite, progress=False).table
    sources = {tokens.relation.name: tokens.distinct_sources for tokens in tokenize_relations(suite, tiny_tokenizer())}
    for row in table.sample(20).itertuples():
        n = np.array([float(sources[row.relation])])
        assert (row.low, row.high) == pytest.approx(tuple(float(end[0]) for end in wilson_interval(row.score * n, n)))
    both = np.concatenate([table["p_value"], table["suppression_p_value"]])
    q = stats.false_discovery_control(np.where(np.isnan(both), 1, both))
    known = np.where(np.isnan(both), np.nan, q)
    np.testing.assert_allclose(table["q_value"], known[: len(table)])
    np.testing.assert_allclose(table["suppression_q_value"], known[len(table) :])


def test_the_table_has_the_promised_columns_and_a_row_per_layer_head_and_relation(checkpoint, suite):
    heads = classify_heads(checkpoint("phi"), relations=suite, progress=False)
    promised = (
        "layer head relation category score suppression expected excess p_value q_value pairs low high beyond_copying"
    )
    assert list(heads.table.columns)[:14] == promised.split()
    assert len(heads.table) == 3 * 4 * 4
    assert not heads.table[KEYS].duplicated().any()
    assert heads.categories[["layer", "head"]].to_numpy().tolist() == [[i, j] for i in range(3) for j in range(4)]
    assert heads.table.loc[heads.table["relation"] == "loose", "category"].isna().all()
    assert "loose" not in set().union(*heads.categories["categories"])


def test_relations_with_too_few_pairs_are_left_out_and_say_so(checkpoint, suite):
    longer = Relation("longer", "knowledge", (("Stockholm", ("Sweden",)), *suite[0].pairs))
    heads = classify_heads(checkpoint("gpt2"), relations=[*suite, longer], rule="published", progress=False)
    coverage = heads.relations.set_index("relation")
    assert coverage["used"].to_dict() == {name: name != "few" for name in coverage.index}
    assert coverage.loc["few", "note"] == "left out: 29 of 29 pairs survive, 30 are needed"
    assert coverage.loc["longer", ["pairs", "kept", "k"]].tolist() == [37, 36, 10]
    assert coverage.loc["things_copying", "k"] == 1
    assert "few" not in set(heads.table["relation"])


def test_no_usable_relation_is_an_error_that_names_the_best(checkpoint, suite):
    with pytest.raises(
        InputError, match=r"None of the 1 relations keeps 30 single-token pairs .* the most is 29 of 29 \(few\)"
    ) as caught:
        classify_heads(checkpoint("llama"), relations=[suite[-1]], progress=False)
    assert "multi_token" not in str(caught.value)
    with pytest.raises(InputError, match="No relations were given"):
        classify_heads(checkpoint("llama"), relations=[], progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "publish"}, "rule='publish' is not one of controlled, published. Did you mean 'published'"),
        ({"k": 0}, "k=0 must be at least 1"),
        ({"k": 10**6}, "k=1000000: every token would be a hit"),
        ({"k": True}, "k=True must be a whole number"),
        ({"threshold": 0.0}, "threshold=0.0 must be a number above 0 and at most 1"),
        ({"threshold": 15.0}, "threshold=15.0 must be a number above 0 and at most 1"),
        ({"threshold": float("nan")}, "threshold=nan must be a number above 0 and at most 1"),
        ({"embedding": "mlp"}, "embedding='mlp' is not one of .* Did you mean 'mlp0'"),
        ({"multi_token": "last"}, "multi_token='last' is not one of first, distinguishing"),
    ],
)
def test_options_that_do_not_exist_are_refused(checkpoint, suite, options, message):
    with pytest.raises(InputError, match=message):
        classify_heads(checkpoint("llama"), relations=suite, progress=False, **options)


def test_weights_that_are_not_numbers_are_refused(tmp_path, suite):
    folder = tiny_folder(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers.1.self_attn.v_proj.weight.* NaN"):
        classify_heads(folder, relations=suite, progress=False)


def test_published_choices_follow_vocabulary_and_shape():
    def shape(**sizes):
        plain = {"n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "d_model": 4096, "d_head": 128, "d_mlp": 14336}
        rest = {"architecture": "LlamaForCausalLM", "d_vocab": 128256, "n_ctx": 8192, "parallel_blocks": False}
        return ModelShape(**plain | rest | sizes)

    copying, other = Relation("name_copying", None, ()), Relation("capital", None, ())
    llama, gpt2 = (SimpleNamespace(name="a model", shape=one) for one in (shape(), shape(d_vocab=50257)))
    assert [hits_of(relation, llama, None) for relation in (copying, other)] == [3, 25]
    assert [hits_of(relation, gpt2, None) for relation in (copying, other)] == [1, 10]
    assert published_embedding(shape()) == "mlp0"
    assert published_embedding(shape(n_layers=80, d_model=8192)) == "raw"


# --- runs and folders


def interrupt_after(monkeypatch, layers: int) -> list[int]:
    """Make scoring raise KeyboardInterrupt once so many layers are done; return the list of layers begun."""
    begun = []

    def scored(*args, **options):
        if len(begun) == layers:
            raise KeyboardInterrupt
        begun.append(len(begun))
        return original(*args, **options)

    original = scores.score_layer
    monkeypatch.setattr(scores, "score_layer", scored)
    return begun


def contents(folder) -> dict[str, bytes]:
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "run.json"}
    record = json.loads((folder / "run.json").read_text())
    record["run"].pop("created")
    record.pop("sha256")
    return files | {"run.json": json.dumps(record).encode()}


def test_an_interrupted_run_continues_where_it_stopped_and_ends_the_same_to_the_byte(
    checkpoint, suite, tmp_path, monkeypatch
):
    model = checkpoint("mistral")
    classify_heads(model, relations=suite, progress=False, out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_after(patch, layers=2)
        with pytest.raises(KeyboardInterrupt):
            classify_heads(model, relations=suite, progress=False, out=tmp_path / "parts")
    with pytest.raises(RunFolderError, match="not finished"):
        hw.HeadMap.load(tmp_path / "parts")
    with monkeypatch.context() as patch:
        begun = interrupt_after(patch, layers=99)
        classify_heads(model, relations=suite, progress=False, out=tmp_path / "parts")
        assert len(begun) == 1
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert sorted(file.name for file in (tmp_path / "parts").iterdir()) == [
        "categories.parquet",
        "embeddings.parquet",
        "relations.parquet",
        "run.json",
        "table.parquet",
    ]


def test_a_finished_run_is_read_back_instead_of_repeated(checkpoint, suite, tmp_path, monkeypatch):
    first = classify_heads(checkpoint("llama"), relations=suite, progress=False, out=tmp_path)
    interrupt_after(monkeypatch, layers=0)
    again = classify_heads(checkpoint("llama"), relations=suite, progress=False, out=tmp_path)
    pd.testing.assert_frame_equal(first.table, again.table)
    pd.testing.assert_frame_equal(first.categories, again.categories)
    assert first.run == again.run


@pytest.mark.parametrize("other", [{"rule": "published"}, {"threshold": 0.2}, {"k": 3}, {"embedding": "layer0"}])
def test_a_folder_of_another_run_is_refused_and_left_alone(checkpoint, suite, tmp_path, other):
    classify_heads(checkpoint("llama"), relations=suite, progress=False, out=tmp_path)
    before = contents(tmp_path)
    with pytest.raises(RunFolderError, match=f"holds another run .*option {next(iter(other))}"):
        classify_heads(checkpoint("llama"), relations=suite, progress=False, out=tmp_path, **other)
    with pytest.raises(RunFolderError, match=r"holds another run .*fingerprint"):
        classify_heads(checkpoint("gpt2"), relations=suite, progress=False, out=tmp_path)
    with pytest.raises(RunFolderError, match=r"holds another run .*option relations"):
        classify_heads(checkpoint("llama"), relations=suite[1:], progress=False, out=tmp_path)
    assert contents(tmp_path) == before
    assert not (tmp_path / "pieces").exists()


def test_a_head_map_survives_saving_and_loading(checkpoint, suite, tmp_path):
    heads = classify_heads(checkpoint("gemma3"), relations=suite, progress=False)
    loaded = hw.HeadMap.load(heads.save(tmp_path / "saved"))
    for name in ("table", "categories", "relations", "embeddings"):
        pd.testing.assert_frame_equal(getattr(loaded, name), getattr(heads, name))
    assert loaded.run == heads.run
    assert repr(loaded) == repr(heads)


def test_the_excess_is_the_way_from_habit_to_perfection_and_the_summary_shows_it(checkpoint, suite):
    heads = classify_heads(checkpoint("llama"), relations=suite, k=30, progress=False)
    for sign, prefix in (("score", ""), ("suppression", "suppression_")):
        expected = heads.table[f"{prefix}expected"]
        np.testing.assert_allclose(heads.table[f"{prefix}excess"], (heads.table[sign] - expected) / (1 - expected))
    for row in heads.summary().to_dict("records"):
        of_relation = heads.table[heads.table["relation"] == row["relation"]]
        prefix = {"implements": "", "suppresses": "suppression_"}[row["sign"]]
        called = of_relation[of_relation["implemented"] | of_relation["suppressed"]]
        assert row["heads"] == len(called)
        of_relation = called if len(called) else of_relation
        assert row["excess"] == of_relation[["excess", "suppression_excess"]].max(axis=None)
        best = of_relation.loc[of_relation[f"{prefix}excess"].idxmax()]
        assert (row["layer"], row["head"]) == (best["layer"], best["head"])
        assert (row["excess"], row["expected"]) == (best[f"{prefix}excess"], best[f"{prefix}expected"])
    published = classify_heads(checkpoint("llama"), relations=suite, rule="published", progress=False)
    assert published.table["excess"].isna().all()
    assert all(row["excess"] is None for row in published.findings()["summary"])
    assert set(published.sensitivity().table["rule"]) == {"published"}


def test_salient_operations_reopen_the_model_and_refuse_another(checkpoint, suite):
    heads = classify_heads(checkpoint("llama"), relations=suite, progress=False)
    salient = heads.salient(2, 1, sources=4, targets=3)
    assert salient["source_id"].nunique() == 4
    pd.testing.assert_frame_equal(
        salient, heads.salient(2, 1, sources=4, targets=3, model=hw.load(checkpoint("llama")))
    )
    with pytest.raises(ModelError, match="it has other weights"):
        heads.salient(2, 1, model=checkpoint("gpt2"))
    with pytest.raises(InputError):
        heads.salient(3, 0)


def test_the_model_is_left_unhooked_and_unchanged(checkpoint, suite):
    model = hw.load(checkpoint("neox"))
    before = {name: parameter.clone() for name, parameter in model.raw.named_parameters()}
    classify_heads(model, relations=suite, progress=False)
    for name, parameter in model.raw.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_labels_follow_from_the_flags_of_the_table(checkpoint):
    suite = [random_relation(name, name, random.randrange(10**6)) for name in CATEGORIES]
    heads = classify_heads(checkpoint("llama"), relations=suite, rule="published", k=25, progress=False)
    flagged = heads.table[heads.table["implemented"] | heads.table["suppressed"]]
    for layer, head, categories, label in heads.categories.itertuples(index=False):
        expected = set(flagged.loc[(flagged["layer"] == layer) & (flagged["head"] == head), "category"])
        assert set(categories) == expected
        assert label == (f"{len(expected)} categories" if len(expected) > 1 else next(iter(expected), "unclassified"))


def test_auto_takes_what_agrees_with_the_first_block_and_the_published_choice_where_they_are_level(checkpoint, suite):
    """Agreement by the independent way: the running model's residual stream after block 0, at [BOS, token]."""
    folder = checkpoint("llama")
    heads = classify_heads(folder, relations=suite, progress=False)
    model, weights = hw.load(folder), open_weights(folder)
    sources = torch.cat([tokens.source for tokens in tokenize_relations(suite, tiny_tokenizer()) if tokens.usable])
    sources = sources.unique()
    written = model.cache(
        [[bos_token(model.tokenizer), token] for token in sources.tolist()],
        sites="resid_post",
        layers=[0],
        positions=-1,
    )["resid_post", 0].flatten(0, -2)
    found = heads.embeddings.set_index("embedding")["agreement"]
    for kind, agreement in found.items():
        read = weights.effective_embedding(sources, kind)
        assert agreement == pytest.approx(torch.cosine_similarity(read, written, dim=-1).mean().item(), abs=1e-5)
    level = found + pd.Series({"mlp0": LEVEL, "embed+mlp0": 0, "raw": 0})
    assert heads.run.options["embedding"] == level.idxmax()
    assert heads.embeddings.set_index("embedding")["chosen"].idxmax() == level.idxmax()
    assert f"embedding={level.idxmax()!r}" in " ".join(heads.report())


def test_a_block_whose_mlp_is_weak_reads_the_embedding_and_says_so(tmp_path, suite):
    """Planted: with a thousandth of its MLP and attention the first block hands the embedding on."""
    folder = tiny_folder(tmp_path / "model", "llama", seed=3)
    weights = load_file(folder / "model.safetensors")
    weak = {
        name: one / 1000 for name, one in weights.items() if re.search(r"layers\.0\.(mlp\.down|self_attn\.o)", name)
    }
    assert len(weak) == 2
    save_file(weights | weak, folder / "model.safetensors", metadata={"format": "pt"})
    heads = classify_heads(folder, relations=suite, progress=False)
    assert heads.run.options["embedding"] in ("raw", "embed+mlp0")
    assert heads.embeddings["agreement"].max() > 0.99
    with pytest.warns(AgreementWarning, match="below 0.6"):
        classify_heads(folder, relations=suite, rule="published", progress=False)


def test_every_excess_is_there_on_request_and_changes_nothing_else(checkpoint, suite):
    some, every = (
        classify_heads(checkpoint("gpt2"), relations=suite, k=30, progress=False, every_excess=asked)
        for asked in (False, True)
    )
    assert some.table["excess"].isna().any()
    assert not every.table[["expected", "excess", "p_value", "q_value"]].isna().any(axis=None)
    there = some.table["excess"].notna()
    for column in ("score", "margin", "implemented", "suppressed"):
        assert (some.table[column] == every.table[column]).all()
    np.testing.assert_allclose(some.table.loc[there, "excess"], every.table.loc[there, "excess"])


def test_sensitivity_scores_again_with_one_setting_changed(checkpoint, suite):
    folder = checkpoint("llama")
    heads = classify_heads(folder, relations=suite, k=30, progress=False)
    found = heads.sensitivity(folder, relations=suite, vary=["k", "norm_gain"], progress=False)
    assert found.table["setting"].unique().tolist() == ["as mapped", "k=15", "k=60", "norm_gain=True"]
    other = classify_heads(folder, relations=suite, k=60, progress=False)
    rows = found.table[found.table["setting"] == "k=60"].drop(columns=["setting", "kept"]).reset_index(drop=True)
    own = other.sensitivity().table.drop(columns=["setting", "kept"])
    pd.testing.assert_frame_equal(rows, own)
    assert (found.table["kept"] <= found.table["heads"]).all()
    assert len(found.report()) == 2 + 3
    assert len(found.plot().axes) == 3
    with pytest.raises(InputError, match="relations= are not those of the map"):
        heads.sensitivity(folder, relations=suite[:1], vary="k", progress=False)
    with pytest.raises(InputError, match="vary='embeding' is not one of"):
        heads.sensitivity(folder, relations=suite, vary="embeding", progress=False)
