"""Statistics of texts equal float64 computations on the model's own logits, whatever the batch, window or lens."""

import numpy as np
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError, ModelError, RunFolderError
from headwater.kernels import likelihood_blocked
from headwater.kernels.likelihood import UnembeddingHead, token_statistics_reference
from headwater.likelihood import statistics
from headwater.likelihood.statistics import EMPTY, NOT_UNICODE, NOTHING_BEFORE, TextStatistics, token_statistics
from headwater.models import unembedding
from headwater.models.bare_model import residual_streams
from headwater.models.tokens import encode
from headwater.models.unembedding import unembedding_head
from tests import chance
from tests.tiny import WORDS, tiny_model, tiny_tokenizer

COLUMNS = list(statistics.STATISTICS)
NUMBERS = ["log_probability", "entropy", "variance", "top1_log_probability"]


@pytest.fixture(scope="module")
def load(checkpoint):
    """`load("llama")` is a tiny model, loaded once."""
    models = {}

    def one(family: str, **options):
        key = (family, *options.items())
        if key not in models:
            models[key] = hw.load(checkpoint(family, **options))
        return models[key]

    return one


@pytest.fixture
def rng():
    return chance.rng()


def texts_of(rng, count=7, longest=12):
    return ["".join(" " + word for word in rng.choice(WORDS, rng.integers(2, longest + 1))) for _ in range(count)]


def score(model, texts, **options):
    return token_statistics(model, texts, **{"progress": False} | options)


def from_logits(logits, target):
    """The statistics on full float64 logits `token d_vocab`."""
    head = UnembeddingHead(torch.eye(logits.shape[-1], dtype=torch.float64))
    found = token_statistics_reference(logits.double(), head, target)
    return pd.DataFrame({name: getattr(found, name).numpy() for name in COLUMNS})


def assert_close(found, expected, atol=1e-5):
    np.testing.assert_allclose(found[NUMBERS], expected[NUMBERS], atol=atol, rtol=1e-5)
    assert np.abs(found["rank"].to_numpy() - expected["rank"].to_numpy()).max() <= 1  # a near tie may fall either way


def test_the_final_layer_is_the_models_own_log_softmax_on_every_family(family, load, rng):
    model, texts = load(family), texts_of(rng, 3)
    table = score(model, texts).table
    for index, text in enumerate(texts):
        (ids,) = model.tokenize(text).tokens
        logits = model.run(text)[0, :-1]
        mine = table[table["text"] == index]
        assert mine["token_id"].tolist() == ids[1:].tolist()
        assert mine["position"].tolist() == list(range(1, len(ids)))
        assert_close(mine, from_logits(logits, ids[1:]))


def test_the_tiny_families_hold_a_soft_cap_a_head_bias_and_models_without_bos(load):
    assert unembedding_head(load("gemma2"))[1].softcap == 30.0
    assert unembedding_head(load("phi"))[1].bias is not None
    assert load("llama").bos
    assert not load("neox").bos


def in_float64(model, hidden):
    """The logits that follow from what goes into the unembedding."""
    raw = model.raw
    logits = hidden.double() @ raw.unembed.W_U.double() + raw.unembed.b_U.double()
    return 30 * torch.tanh(logits / 30) if unembedding_head(model)[1].softcap else logits


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_a_half_precision_model_the_statistics_are_those_of_what_it_multiplies_itself(family, dtype, load, rng):
    """Which states these are, to the last bit of so coarse a type, depends on the processor: read the same way."""
    model, text = load(family, dtype=dtype), texts_of(rng, 1)[0]
    batch, last = model.tokenize(text), model.shape.n_layers - 1
    unembedded = model.raw.ln_final(residual_streams(model, batch, [last], torch.clone)[last])
    assert unembedded.dtype == dtype
    logits, ids = in_float64(model, unembedded[0, :-1]), batch.tokens[0]
    assert_close(score(model, text).table, from_logits(logits, ids[1:]))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_what_a_lens_gives_is_normed_in_float32_whatever_the_weights(family, load, rng):
    model, text = load(family, dtype=torch.bfloat16), texts_of(rng, 1)[0]
    batch, last = model.tokenize(text), model.shape.n_layers - 1
    residual = residual_streams(model, batch, [last], torch.clone)[last][0, :-1].double()
    norm = model.raw.ln_final.original_component
    if family == "gpt2":
        hidden = torch.nn.functional.layer_norm(residual, (32,), norm.weight.double(), norm.bias.double(), norm.eps)
    else:
        gain = norm.weight.double() + (family == "gemma2")
        hidden = residual * (residual.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain
    (ids,) = batch.tokens
    found = score(model, text, lens=lambda residual, layer: residual).table
    assert_close(found, from_logits(in_float64(model, hidden), ids[1:]))


@pytest.fixture
def products(monkeypatch):
    """The precisions that the kernel was asked for."""
    asked, kernel = [], likelihood_blocked.token_statistics

    def seen(hidden, head, target, *, precision):
        asked.append(precision)
        return kernel(hidden, head, target, precision=precision)

    monkeypatch.setattr(likelihood_blocked, "token_statistics", seen)
    return asked


def test_the_precision_of_products_reaches_the_kernel_at_every_layer_and_is_full_unless_asked(products, load, rng):
    model, texts = load("llama"), texts_of(rng, 2)
    plain = score(model, texts, layers=[0, 2])
    assert products == ["highest", "highest"]
    products.clear()
    high = score(model, texts, layers=[0, 2], precision="high")
    assert products == ["high", "high"]
    pd.testing.assert_frame_equal(high.table, plain.table)  # a CPU multiplies in full in any case
    assert [stats.run.options["precision"] for stats in (plain, high)] == ["highest", "high"]


def test_behind_a_lens_a_card_multiplies_in_two_products_of_bfloat16_or_three(monkeypatch, load, rng):
    pytest.importorskip("triton")
    model, texts = load("llama", dtype=torch.bfloat16), texts_of(rng, 2)
    asked = {"lens": lambda residual, layer: residual.float()}
    expected = score(model, texts, **asked).table
    monkeypatch.setattr(likelihood_blocked, "runs_triton", lambda hidden: True)  # on a CPU Triton interprets
    found = {precision: score(model, texts, **asked, precision=precision).table for precision in ("highest", "high")}
    assert_close(found["highest"], expected)
    W_U, width = unembedding_head(model)[1].W_U.double(), model.shape.d_model
    most = 2 * 2**-16 * float(width**0.5 * W_U.norm(dim=0).max()) * 2  # |h| is √width, gains of at most 2
    error = np.abs(found["high"]["log_probability"] - found["highest"]["log_probability"])
    assert 0 < error.max() < most


def test_a_folder_of_other_products_is_refused_and_a_misspelt_precision_is_told(load, tmp_path):
    model = load("llama")
    score(model, " one two", out=tmp_path)
    with pytest.raises(RunFolderError, match="option precision"):
        score(model, " one two", out=tmp_path, precision="high")
    with pytest.raises(InputError, match=r"precision='hihg' is not one of highest, high\. Did you mean"):
        score(model, " one two", precision="hihg")


@pytest.mark.parametrize("family", ["gpt2", "neox", "gemma3"])
def test_neither_padding_nor_batch_size_changes_anything(family, load, rng):
    model, texts = load(family), texts_of(rng, 6)
    together, by_two = score(model, texts).table, score(model, texts, batch_size=2).table
    alone = pd.concat([score(model, text).table.assign(text=i) for i, text in enumerate(texts)], ignore_index=True)
    for other in (by_two, alone):
        assert together[["text", "position", "token"]].equals(other[["text", "position", "token"]])
        assert_close(together, other)


def test_every_layer_is_read_through_the_final_norm_and_the_unembedding(load, rng):
    model, texts = load("gemma2"), texts_of(rng, 3)
    found = score(model, texts, layers="all").table
    assert found["layer"].unique().tolist() == [0, 1, 2]
    (ids,) = model.tokenize(texts[1]).tokens
    for layer in range(2):
        residual = model.run(texts[1], stop_at=layer + 1)
        logits = model.raw.unembed(model.raw.ln_final(residual))[0, :-1]
        mine = found[(found["text"] == 1) & (found["layer"] == layer)]
        assert_close(mine, from_logits(30 * torch.tanh(logits / 30), ids[1:]))
    final = found[found["layer"] == 2].drop(columns="layer").reset_index(drop=True)
    pd.testing.assert_frame_equal(final, score(model, texts).table)
    some = score(model, texts, layers=[-1, 0]).table
    assert_close(some, found[found["layer"] != 1])
    assert some["layer"].tolist() == found.loc[found["layer"] != 1, "layer"].tolist()


def test_a_tuned_lens_is_applied_before_the_final_norm(load, rng):
    model, texts = load("llama"), texts_of(rng, 2)
    A, b = torch.randn(32, 32) / 6, torch.randn(32)
    mapped = score(model, texts, layers=[1, 2], lens={1: (A, b)}).table
    called = score(model, texts, layers=[1, 2], lens=lambda h, layer: h + h @ A.T + b if layer == 1 else h).table
    assert_close(mapped, called)
    residual = model.run(texts[0], stop_at=2)
    logits = model.raw.unembed(model.raw.ln_final(residual + torch.einsum("bpd, ed -> bpe", residual, A) + b))
    (ids,) = model.tokenize(texts[0]).tokens
    mine = mapped[(mapped["text"] == 0) & (mapped["layer"] == 1)]
    assert_close(mine, from_logits(logits[0, :-1], ids[1:]))
    assert_close(mapped[mapped["layer"] == 2], score(model, texts).table)


def test_spans_score_the_tokens_that_hold_their_characters_and_change_no_value(load):
    model = load("llama")
    text = " the capital of France is Paris"
    whole = score(model, [text, text]).table
    answer = (text.index("Paris"), len(text))
    found = score(model, [text, text], spans=[answer, None])
    assert found.table["token"].tolist()[0] == " Paris"
    assert found.texts["scored"].tolist() == [1, 6]
    expected = whole[(whole["text"] == 1) | (whole["position"] == 6)]
    assert_close(found.table, expected)
    capital = (text.index("capital"), text.index("capital") + 7)
    apart = score(model, text, spans=[[answer, capital]])
    assert_close(apart.table, whole[(whole["text"] == 0) & whole["token"].isin([" capital", " Paris"])])
    assert apart.texts["scored"].tolist() == [2]


def test_a_model_that_wants_bos_gets_exactly_one_and_the_first_token_is_scored_only_then(load):
    for family, first in (("llama", " cat"), ("neox", " dog")):
        model = load(family)
        plain = score(model, " cat dog")
        assert plain.table["token"].iloc[0] == first
        assert plain.texts["tokens"].item() == 2
    given = score(load("llama"), ["<s> cat dog", " cat dog"]).table
    assert_close(given[given["text"] == 0], given[given["text"] == 1])


@pytest.mark.diagonal
@pytest.mark.parametrize("family", ["llama", "neox"])
@pytest.mark.parametrize("stride", [1, 7, 32, 63, None])
def test_windows_score_every_token_once_with_all_the_context_that_fits(family, stride, load, rng):
    model = load(family)
    text = "".join(" " + word for word in rng.choice(WORDS, 150))
    found = score(model, [" cat dog", text], long="window", stride=stride)
    mine = found.table[found.table["text"] == 1]
    ids, _ = encode(model.tokenizer, text, model.bos)
    assert mine["position"].tolist() == list(range(1, len(ids)))
    assert mine["token_id"].tolist() == ids[1:]
    bos = list(model.bos)
    for position in rng.choice(np.arange(1, len(ids)), 12, replace=False):
        stop = 64
        while stop <= position:
            stop = min(stop + (stride or 32), len(ids))
        start = max(len(bos), stop - 64 + len(bos))
        logits = model.run([bos + ids[start:position]])[0, -1:]
        assert_close(mine[mine["position"] == position], from_logits(logits, torch.tensor([ids[position]])))
    assert found.texts["windows"].tolist() == [1, 1 + -(-(len(ids) - 64) // (stride or 32))]


def test_texts_with_nothing_to_score_stay_in_the_result_with_the_reason(load):
    texts = ["", " cat", " cat dog", "caf\udcff", " go"]
    with_bos, without = score(load("llama"), texts), score(load("neox"), texts)
    assert with_bos.texts["note"].tolist() == [EMPTY, "", "", NOT_UNICODE, ""]
    assert with_bos.texts["scored"].tolist() == [0, 1, 2, 0, 1]
    assert without.texts["note"].tolist() == [EMPTY, NOTHING_BEFORE, "", NOT_UNICODE, NOTHING_BEFORE]
    assert without.table["text"].tolist() == [2]
    assert "4 with nothing to score" in repr(without)
    nothing = score(load("neox"), ["", " cat"])
    assert len(nothing.table) == 0
    assert set(nothing.table) == set(without.table)
    assert "nan" not in nothing.plot().get_title(loc="left")


def test_the_logits_of_all_of_the_vocabulary_are_never_held(load, monkeypatch, rng):
    model, widest = load("qwen3"), []
    unpatched = UnembeddingHead.logits

    def watched(self, hidden, tile, out=None):
        logits = unpatched(self, hidden, tile, out)
        widest.append(logits.shape[1])
        return logits

    made = unembedding_head(model)  # its check looks at all logits of four tokens
    monkeypatch.setattr(statistics, "unembedding_head", lambda model, record: made)
    monkeypatch.setattr(statistics.likelihood_blocked, "WORKSPACE_BYTES", 2**14)
    monkeypatch.setattr(UnembeddingHead, "logits", watched)
    positions = []
    hook = model.raw.unembed.hook_out
    hook.add_hook(lambda logits, hook: positions.append(logits.shape[1]))
    try:
        score(model, texts_of(rng, 4))
    finally:
        hook.remove_hooks()
    assert max(widest) < model.shape.d_vocab
    assert set(positions) == {1}  # the bridge's own forward still ends in the logits of one position


def test_a_result_is_saved_loaded_and_continued_after_an_interrupt(load, rng, tmp_path, monkeypatch):
    model, texts = load("llama"), [*texts_of(rng, 9), ""]
    monkeypatch.setattr(statistics, "WINDOWS_PER_PIECE", 3)
    whole = score(model, texts, layers="all")
    measured = statistics._measure_windows
    calls = []

    def interrupted(*args):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measured(*args)

    monkeypatch.setattr(statistics, "_measure_windows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        score(model, texts, layers="all", out=tmp_path)
    continued = score(model, texts, layers="all", out=tmp_path)
    assert len(calls) == 4
    pd.testing.assert_frame_equal(continued.table, whole.table)
    loaded = TextStatistics.load(tmp_path)
    pd.testing.assert_frame_equal(loaded.table, whole.table)
    pd.testing.assert_frame_equal(loaded.texts, whole.texts)
    assert score(model, texts, layers="all", out=tmp_path).run == loaded.run
    assert len(calls) == 4
    with pytest.raises(RunFolderError, match="layers"):
        score(model, texts, out=tmp_path)
    with pytest.raises(RunFolderError, match="texts"):
        score(model, [*texts[:-1], "."], layers="all", out=tmp_path)


BAD = {
    "no texts": ({"texts": []}, "no texts"),
    "mapping": ({"texts": {"input_ids": [[1]]}}, "A dict was given: give a text"),
    "table": ({"texts": pd.DataFrame({"text": [" cat"]})}, "A DataFrame was given"),
    "no string": ({"texts": iter([" cat", 3])}, "Text 1 is a int"),
    "too long": ({"texts": [" cat", " cat" * 80]}, "Text 1 has 81 tokens; the model reads at most 64"),
    "long": ({"long": "cut"}, "long='cut'"),
    "stride": ({"stride": 64}, "stride=64 must be from 1 to 63"),
    "number of spans": ({"spans": [None, None]}, "2 spans were passed for 1 texts"),
    "span": ({"spans": [(3, 99)]}, "span \\(3, 99\\) of text 0"),
    "layer": ({"layers": [3]}, "no layer 3"),
    "layers": ({"layers": "last"}, "layers='last'"),
    "twice": ({"layers": [0, -3]}, "each once"),
    "lens": ({"lens": "tuned"}, "lens='tuned'"),
    "lens layer": ({"lens": {1: (torch.eye(32), torch.zeros(32))}, "layers": [0, 1]}, "no translator for layer 0"),
    "lens shape": (
        {"lens": {1: (torch.eye(5), torch.zeros(5))}, "layers": [1]},
        r"of shapes \(32, 32\) and \(32,\); layer 1 has \[\(5, 5\)",
    ),
    "batch size": ({"batch_size": 0}, "batch_size=0"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_named(case, load):
    options, message = BAD[case]
    with pytest.raises(InputError, match=message):
        score(load("llama"), **{"texts": [" cat dog"]} | options)


def test_an_architecture_that_does_more_to_its_logits_is_refused(monkeypatch):
    model = hw.load(tiny_model("llama"), tokenizer=tiny_tokenizer())  # of which nothing was checked before
    unchanged = type(model).run
    monkeypatch.setattr(
        type(model), "run", lambda self, *a, **o: unchanged(self, *a, **o) * (1 if "stop_at" in o else 0.9)
    )
    with pytest.raises(ModelError, match=r"differ by 11\.1%"):
        score(model, " cat dog")


def checks_of(monkeypatch):
    """Count how often an unembedding is checked against the model's own logits."""
    checks, check = [], unembedding.refuse_other_logits
    monkeypatch.setattr(unembedding, "refuse_other_logits", lambda *given: (checks.append(1), check(*given)))
    return checks


def test_an_unembedding_is_checked_once_until_weights_change_or_something_acts_in_the_model(monkeypatch):
    model, checks = hw.load(tiny_model("llama", seed=5), tokenizer=tiny_tokenizer()), checks_of(monkeypatch)

    def scored():
        checks.clear()
        table = hw.token_statistics(model, " Paris of France", progress=False).table
        expected = model.run(" Paris of France")[0].float().log_softmax(-1)
        targets = torch.tensor(table["token_id"].to_numpy())[:, None]
        assert np.allclose(table["log_probability"], expected[:-1].gather(1, targets)[:, 0], atol=1e-5)
        return len(checks)

    assert [scored(), scored()] == [1, 0]
    with torch.no_grad():
        model.raw.unembed.W_U.data.mul_(1.5)
    assert [scored(), scored()] == [1, 0]
    with model.hooks([("blocks.1.hook_resid_post", lambda x, hook: x * 0.5)]):
        assert [scored(), scored()] == [1, 1]
    assert [scored(), scored()] == [1, 0]
    handle = model.raw.ln_final.register_forward_hook(lambda module, args, out: out * 3)
    with pytest.raises(ModelError, match="are more than its final norm"):
        scored()
    handle.remove()
    assert scored() == 0
