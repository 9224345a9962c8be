"""Caches: Hugging Face's own hidden states and attentions, batch = single, only what was asked for."""

import gc

import pytest
import torch
import transformers as tf

import headwater as hw
from headwater.errors import InputError, InterventionError
from tests.plain_hooks import hooked_points, random_texts
from tests.tiny import FAMILIES

PARALLEL = {"neox", "phi"}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family, checkpoint):
    return hw.load(checkpoint(family))


@pytest.fixture(scope="module")
def llama(checkpoint):
    return hw.load(checkpoint("llama"))


@pytest.mark.oracle
def test_a_cache_equals_hugging_faces_hidden_states_and_attentions(model, family, checkpoint):
    reference = tf.AutoModelForCausalLM.from_pretrained(checkpoint(family), attn_implementation="eager").eval()
    text = " the capital of France is Paris cat dog one two three four"  # longer than the sliding windows
    post, pre = model.cache(text), model.cache(text, sites="resid_pre")
    with torch.inference_mode():
        theirs = reference(post.batch.tokens, output_hidden_states=True, output_attentions=True)
    close = {"rtol": 1e-5, "atol": 5e-5}
    torch.testing.assert_close(pre.residual, torch.stack(theirs.hidden_states[:3]), **close)
    torch.testing.assert_close(post.residual[:2], torch.stack(theirs.hidden_states[1:3]), **close)
    norm = (
        reference.base_model.norm
        if hasattr(reference.base_model, "norm")
        else reference.base_model.get_submodule(
            {"gpt2": "ln_f", "phi": "final_layernorm"}.get(family, "final_layer_norm")
        )
    )
    with torch.inference_mode():
        torch.testing.assert_close(norm(post.residual[2]), theirs.hidden_states[3], **close)
    torch.testing.assert_close(post.attention, torch.stack(theirs.attentions), **close)
    assert post.residual.dtype == post.attention.dtype == torch.float32


def test_the_middle_of_a_block_is_its_input_plus_attention(model, family):
    if family in PARALLEL:
        with pytest.raises(InputError, match="resid_mid was requested"):
            model.cache("Paris", sites="resid_mid")
        return
    text = random_texts(1)
    written = {}
    name = "blocks.1.ln1_post.hook_out" if family.startswith("gemma") else "blocks.1.hook_attn_out"
    model.run(text, [(name, lambda out, hook: written.update(out=out.clone()))])
    middle = model.cache(text, sites="resid_mid", layers=[1]).residual[0]
    before = model.cache(text, sites="resid_pre", layers=[1]).residual[0]
    torch.testing.assert_close(middle, before + written["out"], rtol=1e-5, atol=5e-5)


def test_batches_give_what_the_sequences_give_alone_and_zeros_at_padding(model):
    texts = random_texts(7)
    cache = model.cache(texts, batch_size=3, progress=False)
    for i, text in enumerate(texts):
        alone = model.cache(text)
        n = alone.batch.tokens.shape[1]
        assert cache.mask[i].tolist() == [True] * n + [False] * (cache.mask.shape[1] - n)
        torch.testing.assert_close(cache.residual[:, i, :n], alone.residual[:, 0], rtol=1e-5, atol=5e-5)
        torch.testing.assert_close(cache.attention[:, i, :, :n, :n], alone.attention[:, 0], rtol=1e-5, atol=5e-5)
        assert not cache.residual[:, i, n:].any()
        assert not cache.attention[:, i, :, n:].any()
        assert not cache.attention[:, i, :, :, n:].any()


def test_chosen_layers_heads_and_positions_are_cut_from_the_whole(model):
    texts = random_texts(5)
    whole = model.cache(texts)
    part = model.cache(texts, layers=[2, 0], heads=[3, 1], positions=[-1, 0], batch_size=2, progress=False)
    assert (part.layers, part.heads) == ((0, 2), (1, 3))
    last = whole.batch.lengths - 1
    rows = torch.arange(5)
    close = {"rtol": 1e-5, "atol": 5e-5}
    torch.testing.assert_close(part.residual[:, :, 0], whole.residual[[0, 2]][:, rows, last], **close)
    torch.testing.assert_close(part.residual[:, :, 1], whole.residual[[0, 2], :, 0], **close)
    heads = whole.attention[[0, 2]][:, :, [1, 3]]
    torch.testing.assert_close(part.attention[:, :, :, 0], heads[:, rows, :, last].movedim(0, 1), **close)
    torch.testing.assert_close(part.attention[:, :, :, 1], heads[:, :, :, 0], **close)
    assert part.positions.tolist() == [[n, 0] for n in last.tolist()]


def test_a_position_that_a_short_sequence_lacks_is_zero_and_masked(llama):
    cache = llama.cache([[5, 6], [5, 6, 7, 8]], positions=[1, 3, -3])
    assert cache.mask.tolist() == [[True, False, False], [True, True, True]]
    assert cache.positions.tolist() == [[1, -1, -1], [1, 3, 1]]
    assert not cache.residual[:, 0, 1:].any()
    assert not cache.attention[:, 0, :, 1:].any()


def test_the_labels_are_the_tokens(llama):
    cache = llama.cache([" Paris Rome", " cat"])
    assert cache.strings == (("<s>", " Paris", " Rome"), ("<s>", " cat"))


def test_only_what_is_asked_for_is_there(llama):
    with pytest.raises(InputError, match="keeps pattern and no residual stream: ask for sites='resid_post'"):
        _ = llama.cache("Paris", sites="pattern").residual
    assert llama.cache("Paris", sites="pattern").site is None
    with pytest.raises(InputError, match="keeps resid_post and no attention: ask for sites='pattern'"):
        _ = llama.cache("Paris", sites="resid_post").attention
    assert llama.cache("Paris").site == "resid_post"


def test_nothing_but_the_asked_for_numbers_stays_in_memory(llama):
    texts = random_texts(6)
    gc.collect()
    before = sum(x.nbytes for x in gc.get_objects() if type(x) is torch.Tensor)
    cache = llama.cache(texts, sites="resid_post", layers=[1], positions=[-1], batch_size=2, progress=False)
    gc.collect()
    after = sum(x.nbytes for x in gc.get_objects() if type(x) is torch.Tensor)
    labels = cache.batch.tokens.nbytes + cache.batch.mask.nbytes + cache.positions.nbytes
    assert cache.residual.nbytes == cache.residual.untyped_storage().nbytes() == 6 * 32 * 4
    assert after - before <= cache.residual.nbytes + labels


def test_layers_after_the_last_one_asked_for_do_not_run(llama):
    reached = []
    llama.raw.add_hook("blocks.1.attn.hook_q", lambda resid, hook: reached.append(resid.shape))
    try:
        llama.cache("Paris", layers=[0])
        assert reached == []
        llama.cache("Paris", layers=[1])
        assert len(reached) == 1
    finally:
        llama.raw.reset_hooks()


def test_the_cache_is_a_copy_that_later_edits_do_not_reach(llama):
    text = "the capital of France"
    cache = llama.cache(text)

    def spoil(resid, hook):
        resid[:] = 0
        return resid

    kept = cache.residual.clone()
    llama.run(text, [("blocks.1.hook_resid_pre", spoil)])
    assert torch.equal(cache.residual, kept)
    assert hooked_points(llama) == []


def test_a_cache_under_an_edit_sees_the_edit(llama):
    with llama.hooks([("blocks.0.hook_resid_post", lambda resid, hook: torch.zeros_like(resid))]):
        cache = llama.cache("the capital of France", sites="resid_pre")
    assert not cache.residual[1].any()
    assert cache.residual[0].any()


def test_low_precision_activations_are_kept_in_float32(checkpoint):
    model = hw.load(checkpoint("llama", dtype=torch.bfloat16))
    cache = model.cache("the capital of France")
    assert cache.residual.dtype == cache.attention.dtype == torch.float32
    assert torch.equal(cache.residual, cache.residual.bfloat16().float())


def test_a_cache_that_cannot_fit_is_refused_with_the_figure_before_anything_runs(llama, monkeypatch):
    monkeypatch.setattr("headwater.kernels.devices.available_memory", lambda device: 3 * 2**30)
    monkeypatch.setattr(llama, "run", lambda *args, **kwargs: pytest.fail("the model ran"))
    texts = [[5] * 61] * 20_000
    needed = 3 * 20_000 * 61 * (32 + 4 * 61) * 4 / 2**30
    with pytest.raises(InputError, match=rf"{needed:,.1f} GiB; cpu has 3\.0 GiB"):
        llama.cache(texts)


@pytest.mark.oracle
def test_attention_by_role_is_hugging_faces_summed_over_what_is_read_and_averaged_over_who_reads(llama, checkpoint):
    reference = tf.AutoModelForCausalLM.from_pretrained(checkpoint("llama"), attn_implementation="eager").eval()
    texts = [" the capital of France is Paris", " one two the capital of Italy is"]
    roles = {"phrase": " capital of", "country": [" France", " Italy"], "end": "last"}
    cache = llama.cache(texts, sites=["pattern"], positions=roles, layers=[0, 2], heads=[1, 3], progress=False)
    found = cache.attention_by_role().set_index(["layer", "head", "role", "to"])["attention"]
    assert len(found) == 2 * 2 * 3 * 3
    assert cache.frame.groupby("role")["example"].count().to_dict() == {"phrase": 4, "country": 2, "end": 2}
    for (layer, head, role, to), value in found.items():
        read = []
        for example, tokens in cache.tokens.groupby("example"):
            with torch.inference_mode():
                every = reference(torch.tensor([tokens["token_id"].tolist()]), output_attentions=True).attentions
            of_text = cache.frame[cache.frame["example"] == example]
            queries, keys = (of_text.loc[of_text["role"] == one, "position"].tolist() for one in (role, to))
            read += [float(every[layer][0, head, query, keys].sum()) for query in queries]
        assert value == pytest.approx(sum(read) / len(read), abs=1e-5)


def test_attention_by_role_needs_patterns_and_roles(llama):
    with pytest.raises(InputError, match="no attention"):
        llama.cache("Paris", sites=["resid_post"], positions={"end": "last"}).attention_by_role()
    with pytest.raises(InputError, match="no roles"):
        llama.cache("Paris", sites=["pattern"], positions="last").attention_by_role()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"layers": [3]}, "no layer 3"),
        ({"layers": [0, -3]}, "each once"),
        ({"layers": []}, "at least one layer"),
        ({"heads": [-5]}, "no head -5"),
        ({"positions": [9]}, "No sequence has a position 9"),
        ({"positions": []}, "names no position"),
        ({"positions": [1, 1]}, r"names one twice. For one of each text: \[\[1\], \[1\]\]"),
        ({"sites": "resid_past"}, "resid_post"),
        ({"sites": []}, "names no activation"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_options_that_name_nothing_are_refused(llama, options, complaint):
    with pytest.raises(InputError, match=complaint):
        llama.cache("Paris", **options)


def test_a_sliding_window_cuts_the_attention(checkpoint):
    model = hw.load(checkpoint("mistral"))
    pattern = model.cache(" Paris" * 20, sites="pattern").attention
    query, key = torch.meshgrid(torch.arange(21), torch.arange(21), indexing="ij")
    assert not pattern[..., query - key >= 8].any()
    assert (pattern[..., (query - key >= 0) & (query - key < 8)] > 0).all()


def test_an_attention_that_is_not_reported_is_an_error(checkpoint):
    model = hw.load(checkpoint("llama"))
    model.raw.blocks[1].attn.hook_pattern = torch.nn.Identity()
    with pytest.raises(InterventionError, match=r"blocks\.1\.attn\.hook_pattern"):
        model.cache("Paris")


def test_the_cache_says_what_it_is_in_one_line(llama):
    cache = llama.cache([[5, 6, 7]], layers=[0, 2])
    assert repr(cache) == "Cache(resid_post, pattern at layers 0, 2; 3 tokens of 1 texts; 0.0 MiB)"
