"""What layers predict is what Hugging Face's own norm and head make of its hidden states, on every architecture."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError, ModelError
from headwater.kernels import likelihood_blocked as kernel
from headwater.kernels.likelihood import UnembeddingHead
from headwater.lenses.predictions import load_tuned_lens
from tests.tiny import FAMILIES, FEW, tiny_hooked, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPTS = [" the capital of France is in", " see the big cat", " the dog"]
NORMS = ("transformer.ln_f", "gpt_neox.final_layer_norm", "model.final_layernorm", "model.norm")


@pytest.fixture
def models():
    return tiny_hooked


def read(model, prompts=PROMPTS, **options):
    return hw.lens(model, prompts, progress=False, **options)


def expected_logits(family, ids, lens=lambda h, layer: h):
    """`layer position d_vocab` from Hugging Face: what its final norm and head make of each block's output."""
    hf = tiny_model(family).double()
    norm = next(module for name, module in hf.named_modules() if name in NORMS)
    seen = {}
    norm.register_forward_pre_hook(lambda module, args: seen.update(last=args[0]))
    with torch.no_grad():
        hidden = hf(torch.tensor([ids]), output_hidden_states=True).hidden_states[1:-1]
        blocks = [lens(h[0], layer) for layer, h in enumerate([*hidden, seen["last"]])]
        logits = torch.stack([hf.get_output_embeddings()(norm(h)) for h in blocks])
    cap = getattr(hf.config, "final_logit_softcapping", None)
    return cap * (logits / cap).tanh() if cap else logits


def assert_same(table, logits, ids):
    """Compare the rows of one prompt with logits `layer position d_vocab`."""
    log_p = logits.log_softmax(-1)
    kl = (log_p[-1].exp() * (log_p[-1] - log_p)).sum(-1)
    values, top = log_p.topk(3)
    first = table[table["top"] == 1]
    np.testing.assert_allclose(first["kl"], kl.flatten(), atol=1e-5)
    np.testing.assert_allclose(table["probability"], values.exp().flatten(), atol=1e-5)
    assert table["top_token"].tolist() == [TOKENIZER.decode([i]) for i in top.flatten()]
    own = log_p[:, :-1].gather(-1, torch.tensor(ids[1:]).expand(len(log_p), -1)[..., None])
    ranks = (log_p[:, :-1] > own).sum(-1)
    assert first["rank"].dropna().tolist() == ranks.flatten().tolist()
    assert first.loc[first["rank"].isna(), "position"].unique().tolist() == [len(ids) - 1]


@pytest.mark.oracle
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_predicts_what_hugging_face_reads_from_it(models, family):
    model = models(family)
    table = read(model, top_k=3, batch_size=2).table
    assert list(table.columns) == [
        "example", "layer", "position", "token", "top", "top_token", "probability", "rank", "kl",
    ]  # fmt: skip
    for example, prompt in enumerate(PROMPTS):
        ids = model.tokenize(prompt).tokens[0].tolist()
        assert_same(table[table["example"] == example], expected_logits(family, ids), ids)


@pytest.mark.parametrize("family", FEW)
def test_the_last_layer_is_the_models_own_output(models, family):
    model = models(family)
    table = read(model, PROMPTS[0], layers=2, positions="last", top_k=model.shape.d_vocab).table
    log_p = model.run(PROMPTS[0], keep="last")[0, 0].double().log_softmax(-1)
    np.testing.assert_allclose(table["probability"], log_p.exp().sort(descending=True).values, atol=1e-6)
    assert (table["kl"] == 0).all()


def test_a_last_layer_that_is_not_the_models_output_is_refused(models, monkeypatch):
    model = models("llama")
    monkeypatch.setattr("headwater.models.unembedding.refuse_other_logits", lambda *given: None)
    monkeypatch.setattr("headwater.models.unembedding.LoadedWeights.final_norm_gain", lambda self: torch.ones(32))
    with pytest.raises(ModelError, match="are more than its final norm, unembedding and soft cap"):
        read(model)


def tuned_folder(folder, d_model=32, n_layers=3):
    """A lens as the tuned-lens package saves it: a translator for what goes into each block."""
    translators = torch.nn.ModuleList([torch.nn.Linear(d_model, d_model) for _ in range(n_layers)])
    folder.mkdir(exist_ok=True)
    torch.save(translators.state_dict(), folder / "params.pt")
    config = {"base_model_name_or_path": "some/model", "d_model": d_model, "num_hidden_layers": n_layers, "bias": True}
    (folder / "config.json").write_text(json.dumps(config | {"lens_type": "linear_tuned_lens"}))
    return translators


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_a_published_tuned_lens_reads_behind_a_block_with_the_translator_of_the_next(models, family, tmp_path):
    translators = tuned_folder(tmp_path).double()
    model = models(family)
    ids = model.tokenize(PROMPTS[0]).tokens[0].tolist()

    def translated(h, layer):
        return h + translators[layer + 1](h) if layer < 2 else h

    with torch.no_grad():
        expected = expected_logits(family, ids, translated)
    assert_same(read(model, PROMPTS[0], lens=tmp_path, top_k=3).table, expected, ids)


def test_token_statistics_read_the_same_folder_of_a_tuned_lens(models, tmp_path):
    tuned_folder(tmp_path)
    options = {"layers": "all", "progress": False}
    one = hw.token_statistics(models("llama"), PROMPTS[0], lens=str(tmp_path), **options).table
    other = hw.token_statistics(models("llama"), PROMPTS[0], lens=load_tuned_lens(tmp_path), **options).table
    pd.testing.assert_frame_equal(one, other)
    ranks = read(models("llama"), PROMPTS[0], lens=tmp_path, top_k=1).table.dropna(subset="rank")["rank"]
    assert ranks.tolist() == one["rank"].tolist()


def test_folders_that_hold_no_lens_of_the_model_are_named(models, tmp_path):
    model = models("llama")
    with pytest.raises(InputError, match="nor the folder of a tuned lens"):
        read(model, lens=tmp_path / "none")
    tuned_folder(tmp_path / "deep", n_layers=4)
    with pytest.raises(InputError, match="of a model of 4 layers; this one has 3"):
        read(model, lens=tmp_path / "deep")
    tuned_folder(tmp_path / "wide", d_model=16)
    with pytest.raises(InputError, match=r"here of shapes \(32, 32\)"):
        read(model, lens=tmp_path / "wide")
    (tmp_path / "wide" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config.json or params.pt is missing or damaged"):
        read(model, lens=tmp_path / "wide")
    (tmp_path / "deep" / "params.pt").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"config.json or params.pt is missing or damaged"):
        read(model, lens=tmp_path / "deep")


def test_a_lens_that_gives_nan_is_refused_and_names_its_layer(models):
    with pytest.raises(InputError, match="NaN or infinity at layer 1"):
        read(models("llama"), PROMPTS[0], lens=lambda h, layer: h.log() if layer == 1 else h)
    broken = (torch.full((32, 32), torch.nan), torch.zeros(32))
    with pytest.raises(InputError, match="translator of layer 0 of the tuned lens holds NaN"):
        read(models("llama"), PROMPTS[0], lens={0: broken, 1: broken})


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_tiles_give_what_the_formula_gives_on_all_logits(monkeypatch, softcap):
    monkeypatch.setattr(kernel, "TILE_BYTES", 1)
    monkeypatch.setattr(kernel, "ROWS_AT_ONCE", 12)
    d_model, d_vocab, k = 16, 700, 9
    head = UnembeddingHead(torch.randn(d_model, d_vocab), torch.randn(d_vocab), softcap=softcap)
    hidden, target = 2 * torch.randn(3, 7, d_model), torch.randint(d_vocab, (7,))
    found = kernel.layer_predictions(hidden, hidden[-1], head, target, k)
    wide = kernel.layer_predictions_reference(
        hidden.double(), hidden[-1].double(), head._replace(bias=head.bias.double()), target, k
    )
    for one, other in zip(found, wide, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=2e-5, rtol=1e-5)


def test_a_product_gives_no_more_than_a_tile_of_logits_of_some_states(monkeypatch):
    monkeypatch.setattr(kernel, "TILE_BYTES", 1)
    monkeypatch.setattr(kernel, "ROWS_AT_ONCE", 10)
    widths, rows = [], []
    plain = UnembeddingHead.logits

    def watched(self, hidden, tile, out=None):
        widths.append(self.W_U.shape[1])
        rows.append(len(hidden))
        return plain(self, hidden, tile, out)

    monkeypatch.setattr(UnembeddingHead, "logits", watched)
    head, hidden = UnembeddingHead(torch.randn(8, 1000)), torch.randn(4, 5, 8)
    kernel.layer_predictions(hidden, hidden[-1], head, torch.zeros(5, dtype=torch.long), 3)
    assert (max(widths), max(rows)) == (128, 10)


def test_the_rank_is_that_of_a_given_answer_at_every_position(models):
    model = models("llama")
    table = read(model, PROMPTS[:2], answer=[" Paris", " Rome"], positions={1, -1}).table
    paris, rome = (TOKENIZER.encode(word, add_special_tokens=False)[0] for word in (" Paris", " Rome"))
    for example, answer in enumerate((paris, rome)):
        logits = model.run(PROMPTS[example])[0]
        last = table[(table["example"] == example) & (table["layer"] == 2) & (table["top"] == 1)]
        expected = [int((logits[p] > logits[p, answer]).sum()) for p in last["position"]]
        assert last["rank"].tolist() == expected
    ranked = read(model, PROMPTS[:2]).table.query("layer == 2 and top == 1")["rank"].count()
    assert f"% of {ranked} positions" in " ".join(read(model, PROMPTS[:2]).report())
    targets = read(model, PROMPTS[0]).targets
    assert targets["target"].tolist()[:-1] == list(
        model.token_strings(model.tokenize(PROMPTS[0]).tokens[0, 1:].tolist())
    )
    assert targets["target_id"].isna().tolist() == [False] * (len(targets) - 1) + [True]


def test_a_function_reads_the_residual_stream_and_half_precision_is_the_models_own(models):
    table = read(models("llama"), PROMPTS[0], lens=lambda h, layer: 0 * h, layers=[0], top_k=1).table
    assert table[table["layer"] == 0]["probability"].nunique() == 1
    model = hw.load(tiny_model("llama", dtype=torch.bfloat16), tokenizer=TOKENIZER)
    last = read(model, PROMPTS[0], positions="last", layers=2, top_k=1).table
    assert last["top_token"].item() == TOKENIZER.decode([int(model.run(PROMPTS[0], keep="last")[0, 0].argmax())])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lens": "tuned"}, "lens='tuned' is neither 'logit' nor the folder of a tuned lens"),
        ({"layers": 7}, "no layer 7"),
        ({"positions": 40}, "Position 40 is not in prompt 0"),
        ({"answer": "xyzzy"}, "is 5 tokens"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 10**6}, "top_k=1000000"),
        ({"lens": lambda h, layer: h[:1]}, "The lens must give a tensor of shape"),
    ],
)
def test_what_cannot_be_used_is_named(models, options, message):
    with pytest.raises(InputError, match=message):
        read(models("llama"), **options)


def test_the_summary_says_how_far_each_layer_is_from_the_last(models):
    result = read(models("gpt2"))
    summary = result.summary()
    assert summary["layer"].tolist() == [0, 1, 2]
    assert summary.iloc[-1][["agrees", "kl", "low", "high"]].tolist() == [1, 0, 0, 0]
    assert (summary["low"] <= summary["kl"]).all()
    first = result.table[(result.table["layer"] == 0) & (result.table["top"] == 1)]
    assert summary["kl"].iloc[0] == pytest.approx(first["kl"].mean())
    assert summary["rank"].iloc[0] == first["rank"].median()


def test_a_run_folder_gives_a_reading_back_and_knows_another_lens(models, tmp_path):
    one = read(models("llama"), out=tmp_path / "run")
    pd.testing.assert_frame_equal(read(models("llama"), out=tmp_path / "run").table, one.table)
    tuned_folder(tmp_path / "lens")
    with pytest.raises(hw.HeadwaterError, match="lens"):
        read(models("llama"), lens=tmp_path / "lens", out=tmp_path / "run")


def test_a_run_folder_knows_where_roles_are_and_not_their_names_alone(models, tmp_path):
    read(models("llama"), positions={"one": 1, "other": 2}, out=tmp_path / "run")
    with pytest.raises(hw.HeadwaterError, match="option roles"):
        read(models("llama"), positions={"one": 2, "other": 1}, out=tmp_path / "run")


def test_the_figure_writes_the_top_token_of_the_last_positions_into_its_cells(models):
    ax = read(models("gpt2"), [*PROMPTS, " the" * 30]).plot(example=1)
    assert len(ax.texts) == 3 * 5
    long = read(models("gpt2"), " the" * 30).plot()
    assert len(long.texts) == 3 * 14
    assert long.get_xlabel() == "The last 14 positions"
    with pytest.raises(InputError, match="example=4 must be"):
        read(models("gpt2"), PROMPTS).plot(example=4)
