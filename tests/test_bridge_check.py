"""A model is compared with the one it wraps when it is loaded, and its activations with what their names say."""

import warnings

import pytest
import torch
import transformers as tf
from transformer_lens.tools.analysis.attribution_patching import attribution_patch

import headwater as hw
from headwater.errors import HeadwaterError, InputError, InterventionError, ModelError
from headwater.likelihood.files import gradient_norms
from headwater.models.bridge_check import compare_with_reference, unusable_sites
from headwater.models.edits import replace_hook
from headwater.models.gradients import refuse_cut_texts
from tests.random_models import random_model
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

IDS, OTHER_IDS = [2, 40, 41, 42, 43], [2, 40, 51, 42, 43]
METRIC = hw.logit_difference(5, 9)
WHOLE = hw.features(lambda rows: rows, lambda features: features, at="resid_mid", layer=0)


def of_config(config, scale=1.0):
    config.bos_token_id = config.eos_token_id = 0
    config.pad_token_id = 1
    with torch.random.fork_rng(devices=[]):  # the card that other tests stand in for a second device has no generator
        torch.manual_seed(0)
        hf = tf.AutoModelForCausalLM.from_config(config).eval()
    for parameter in hf.parameters():
        parameter.data.mul_(scale)
    return hf


def deepseek(kind):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    return kind(
        vocab_size=len(tiny_tokenizer()), intermediate_size=48, moe_intermediate_size=16, max_position_embeddings=64,
        n_group=2, topk_group=1, **sizes, **experts, **ranks,
    )  # fmt: skip


def small_gpt2(**option):
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
    return of_config(tf.GPT2Config(vocab_size=len(tiny_tokenizer()), **sizes, **option), scale=5)


def test_an_option_that_transformer_lens_does_not_know_is_refused():
    with pytest.raises(ModelError, match="does not know an option of the config"):
        hw.load(small_gpt2(scale_attn_weights=False), tokenizer=tiny_tokenizer())


def test_an_option_that_transformer_lens_knows_is_right():
    hf = small_gpt2(scale_attn_by_inverse_layer_idx=True)
    with torch.no_grad():
        expected = hf(torch.tensor([IDS])).logits
    torch.testing.assert_close(hw.load(hf, tokenizer=tiny_tokenizer()).run([IDS]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_forward_of_the_callers_own_that_would_be_ignored_is_refused(family):
    hf = tiny_model(family)
    attention = hf.transformer.h[2].attn if family == "gpt2" else hf.model.layers[1].self_attn
    theirs = attention.forward
    attention.forward = lambda *args, **options: tuple(
        -part if i == 0 else part for i, part in enumerate(theirs(*args, **options))
    )
    with pytest.raises(ModelError, match=r"The logits of .* ignores a module's own forward"):
        hw.load(hf, tokenizer=tiny_tokenizer())


def test_a_part_of_the_callers_own_that_transformer_lens_calls_is_kept():
    hf = tiny_model("llama")
    hf.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    with torch.no_grad():
        expected = hf(torch.tensor([IDS])).logits
    model = hw.load(hf, tokenizer=tiny_tokenizer())
    torch.testing.assert_close(model.run([IDS]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_supported_model_agrees_with_itself_in_every_precision(family, dtype):
    model = hw.load(tiny_model(family, dtype=dtype), tokenizer=tiny_tokenizer())
    assert not model.misfits
    assert not model.read_only


@pytest.fixture(scope="module", params=[tf.DeepseekV2Config, tf.DeepseekV3Config])
def latent_attention(request):
    hf = of_config(deepseek(request.param))
    return hf, hw.load(hf, tokenizer=tiny_tokenizer())


@pytest.mark.filterwarnings("ignore:.*swept with whole runs")
@pytest.mark.parametrize("site", ["q", "k", "v", "z"])
def test_heads_of_other_sizes_than_the_model_has_are_refused_by_name(latent_attention, site):
    _, model = latent_attention
    sweep = {"metric": METRIC, "progress": False}
    with pytest.raises(
        InputError, match=f"{site} of Deepseek.* cannot be used in layer 0: blocks.0.attn.hook_{site} holds"
    ):
        hw.patch(model, [IDS], [OTHER_IDS], sites=["resid_pre", site], **sweep)
    with pytest.raises(InterventionError, match=f"{site} of Deepseek.* cannot be used"):
        model.run([IDS], [(f"blocks.1.attn.hook_{site}", lambda activation, hook: None)])


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.*swept with whole runs")
def test_sites_of_the_residual_stream_are_right_where_heads_are_refused(latent_attention):
    hf, model = latent_attention
    with torch.no_grad():
        clean, held = hf(torch.tensor([IDS])).logits, []
        torch.testing.assert_close(model.run([IDS]), clean, rtol=1e-5, atol=1e-5)
        for tokens in (IDS, OTHER_IDS):
            reading = hf.model.layers[0].register_forward_hook(lambda module, args, out: held.append(out))
            hf(torch.tensor([tokens]))
            reading.remove()
        states = [out[0] if isinstance(out, tuple) else out for out in held]
        states[1][0, 2] = states[0][0, 2]
        writing = hf.model.layers[1].register_forward_pre_hook(
            lambda module, args, options: ((states[1], *args[1:]), options), with_kwargs=True
        )
        expected = hf(torch.tensor([OTHER_IDS])).logits[0, -1]
        writing.remove()
    sweep = hw.patch(
        model, [IDS], [OTHER_IDS], sites="resid_post", layers=[0], positions=2, metric=METRIC, progress=False
    )
    (cell,) = sweep.table.itertuples()
    assert cell.corrupted + cell.effect == pytest.approx(float(expected[5] - expected[9]), abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*swept with whole runs")
def test_a_knockout_works_or_says_why_not_where_attention_is_latent(latent_attention):
    hf, model = latent_attention
    sweep = hw.knockout(model, [IDS], block=("last", 1), metric=METRIC, layers=[1], progress=False)
    n, mask = len(IDS), torch.full((1, 1, 5, 5), torch.finfo(torch.float32).min).triu(1)
    cut = mask.clone()
    cut[..., n - 1, 1] = torch.finfo(torch.float32).min
    handle = hf.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, options: (args, options | {"attention_mask": cut}), with_kwargs=True
    )
    with torch.no_grad():
        expected = hf(torch.tensor([IDS])).logits[0, -1]
    handle.remove()
    (cell,) = sweep.table.itertuples()
    assert cell.clean + cell.effect == pytest.approx(float(expected[5] - expected[9]), abs=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("kind", "options", "reader"),
    [
        (tf.GraniteConfig, {"residual_multiplier": 0.5}, "post_attention_layernorm"),
        (tf.Olmo2Config, {}, "mlp"),
        (tf.Phi3Config, {}, "post_attention_layernorm"),
    ],
)
def test_the_middle_of_a_block_is_edited_right_where_attention_is_scaled_or_normed_before_it_is_added(
    kind, options, reader
):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = kind(
        vocab_size=len(tiny_tokenizer()), intermediate_size=48, max_position_embeddings=64, bos_token_id=0,
        eos_token_id=0, pad_token_id=1, **sizes, **options,
    )  # fmt: skip
    hf = of_config(config, scale=5)
    model = hw.load(hf, tokenizer=tiny_tokenizer())
    found = model.run([IDS], [("blocks.1.hook_resid_mid", lambda activation, hook: activation * 1.5)])

    def grown(module, args):
        args[0].mul_(1.5)  # in place, so that the skip connection grows too

    getattr(hf.model.layers[1], reader).register_forward_pre_hook(grown)
    with torch.no_grad():
        expected = hf(torch.tensor([IDS])).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_middle_that_is_no_sum_of_what_comes_before_can_be_read_and_not_edited():
    model, name, kept = hw.load(tiny_model("llama"), tokenizer=tiny_tokenizer()), "blocks.1.hook_resid_mid", []
    recorded = {
        (site, 1): torch.full((1, 5, 32), size)
        for site, size in {"resid_pre": 1.0, "resid_mid": 1.0, "mlp_out": 1.0, "resid_post": 2.0}.items()
    }
    _, model.read_only = unusable_sites(model.shape, recorded, (1, 5), (), ())
    assert list(model.read_only) == [("resid_mid", 1)]
    model.run([IDS], [(name, lambda activation, hook: kept.append(activation))])
    assert len(kept) == 1
    for edit in (lambda activation, hook: activation / 2, replace_hook(lambda activation, hook: activation / 2)):
        with pytest.raises(InterventionError, match=r"resid_mid of Llama.* can be read but not edited in layer 1"):
            model.run([IDS], [(name, edit)])


@pytest.mark.filterwarnings("ignore:.*swept with whole runs")
@pytest.mark.parametrize(
    "edit",
    [
        lambda model, options: hw.patch(model, [IDS], [OTHER_IDS], sites="resid_mid", layers=0, **options),
        lambda model, options: hw.patch(
            model, [IDS], [OTHER_IDS], sites="resid_mid", layers=[0], method="attribution", **options
        ),
        lambda model, options: hw.patch(
            model, [IDS], [OTHER_IDS], together=[{"site": "resid_mid", "layer": 0}], **options
        ),
        lambda model, options: hw.ablate(model, [IDS], heads=[(0, 1)], **options),
        lambda model, options: hw.ablate(model, [IDS], features=WHOLE.only([3]), **options),
        lambda model, options: hw.knockout(model, [IDS], block=(4, 1), layers=[0], **options),
        lambda model, options: model.run([IDS], [hw.edit("resid_mid", 0, "zero")]),
        lambda model, options: model.generate([IDS], [hw.edit("resid_mid", 0, "zero")], max_new_tokens=1),
    ],
)
def test_a_layer_of_a_hybrid_that_has_no_attention_is_not_edited_as_if_it_had(edit):
    model = hw.load(random_model("jamba"), tokenizer=tiny_tokenizer())
    with pytest.raises(HeadwaterError, match=r"^(resid_mid|z|pattern) of Jamba.* in layer 0"):
        edit(model, {"metric": METRIC, "progress": False})


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.*swept with whole runs")
def test_the_middle_of_a_hybrid_is_patched_right_in_the_layers_that_carry_the_edit():
    hf = random_model("jamba")
    model = hw.load(hf, tokenizer=tiny_tokenizer())
    with pytest.warns(UserWarning, match=r"^Layer 0 is left out: resid_mid of Jamba"):
        sweep = hw.patch(model, [IDS], [OTHER_IDS], sites="resid_mid", metric=METRIC, progress=False)
    assert set(sweep.table["layer"]) == {1}
    reader, kept = hf.model.layers[1].pre_ff_layernorm, []
    for tokens in (IDS, OTHER_IDS):

        def act(module, args):
            kept.append(args[0].clone())
            args[0][:, 2] = kept[0][:, 2]  # in place: the skip connection, too

        handle = reader.register_forward_pre_hook(act)
        with torch.no_grad():
            patched = hf(torch.tensor([tokens])).logits[0, -1]
        handle.remove()
    (cell,) = sweep.table.query("position == 2").itertuples()
    assert cell.corrupted + cell.effect == pytest.approx(float(patched[5] - patched[9]), abs=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "site", "why"),
    [
        ("falcon-h1", "attn_out", "it is not what is added to resid_pre, or only part of it"),
        ("opt-350m", "resid_mid", r"it is neither resid_pre \+ attn_out nor what mlp_out is added to"),
        ("gpt-oss", "mlp_post", "its MLP is a mixture of experts"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*swept with whole runs")
def test_a_site_that_is_not_what_its_name_says_is_refused_everywhere(name, site, why):
    model, options = hw.load(random_model(name), tokenizer=tiny_tokenizer()), {"metric": METRIC, "progress": False}
    for use in (
        lambda: model.cache([IDS], sites=site, progress=False),
        lambda: hw.patch(model, [IDS], [OTHER_IDS], sites=site, **options),
        lambda: hw.patch(model, [IDS], [OTHER_IDS], sites=site, method="attribution", **options),
        lambda: model.run([IDS], [hw.edit(site, 1, "zero")]),
        *([lambda: hw.ablate(model, [IDS], neurons=[(0, 3)], **options)] if site == "mlp_post" else []),
    ):
        with pytest.raises(InputError, match=f"{site} of .* cannot be used in layer [01]: {why}"):
            use()


@pytest.mark.oracle
def test_neurons_of_a_dense_layer_beside_mixtures_of_experts_are_ablated_right():
    hf = random_model("qwen3-moe-mixed")
    model = hw.load(hf, tokenizer=tiny_tokenizer())
    found = hw.ablate(model, [IDS], neurons=[(0, 3)], metric=METRIC, progress=False).table["effect"].iloc[0]
    differences = []
    for factor in (1.0, 0.0):

        def act(module, args, factor=factor):
            args[0][..., 3] *= factor

        handle = hf.model.layers[0].mlp.down_proj.register_forward_pre_hook(act)
        with torch.no_grad():
            logits = hf(torch.tensor([IDS])).logits[0, -1]
        handle.remove()
        differences.append(float(logits[5] - logits[9]))
    assert found == pytest.approx(differences[1] - differences[0], abs=1e-5)
    with pytest.raises(InputError, match=r"mlp_post of .* cannot be used in layer 1: its MLP is a mixture of experts"):
        hw.ablate(model, [IDS], neurons=[(1, 3)], metric=METRIC, progress=False)


def test_an_activation_of_fewer_tokens_than_the_run_reads_is_refused(monkeypatch):
    model, name = hw.load(random_model("gemma4"), tokenizer=tiny_tokenizer()), "blocks.3.hook_resid_post"
    look = (name, lambda activation, hook: None)
    model.run([IDS], [look])
    cut = {"logits_to_keep": 1, "use_cache": False}  # an int cuts the sequence in layers that share keys and values
    monkeypatch.setattr("headwater.models.hooked.forward", lambda model, batch, *_: model.raw(batch.tokens, **cut))
    with pytest.raises(InterventionError, match=f"{name} holds 1 texts of 1 tokens in a run of 1 texts of 5"):
        model.run([IDS], [look])


@pytest.mark.parametrize("make", [lambda: tf.GPT2Model(tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=300))])
def test_a_model_without_logits_is_refused_in_one_line(make):
    with pytest.raises(HeadwaterError) as error:
        hw.load(make().eval(), tokenizer=tiny_tokenizer())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformer_lenss_own_gradients_run_on_a_loaded_model_and_leave_none_behind(family):
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    hf = tiny_model(family)
    theirs = build_bridge_from_module(hf, type(hf).__name__, hf_config=hf.config).eval()
    model = hw.load(tiny_model(family), tokenizer=tiny_tokenizer())

    def metric(logits):
        return logits[0, -1, 5] - logits[0, -1, 9]

    tokens = torch.tensor([IDS]), torch.tensor([OTHER_IDS])
    ours, expected = (attribution_patch(raw, *tokens, metric).node_scores for raw in (model.raw, theirs))
    assert ours == pytest.approx(expected, abs=1e-6)
    assert max(map(abs, ours.values())) > 1e-3
    assert all(p.grad is None and not p.requires_grad for p in model.raw.parameters())
    assert not model.run([IDS], grad=True).requires_grad


def with_bidirectional_attention(kind, **options):
    return of_config(
        kind(
            vocab_size=len(tiny_tokenizer()), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
            num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64, sliding_window=8,
            layer_types=["sliding_attention", "full_attention"], **options,
        ), scale=5,
    )  # fmt: skip


LOOK_AHEAD = {
    "gemma3": lambda: with_bidirectional_attention(
        tf.Gemma3TextConfig, query_pre_attn_scalar=8, use_bidirectional_attention=True
    ),
    "gemma4": lambda: with_bidirectional_attention(
        tf.Gemma4TextConfig, use_bidirectional_attention="all", global_head_dim=8, num_global_key_value_heads=2,
        vocab_size_per_layer_input=len(tiny_tokenizer()), hidden_size_per_layer_input=8, num_kv_shared_layers=0,
    ),
}  # fmt: skip
"""Models of which TransformerLens's config does not say that their attention looks ahead."""


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.*swept with whole runs")
@pytest.mark.parametrize("name", LOOK_AHEAD)
def test_attention_that_looks_ahead_is_found_by_what_changes_whatever_the_config_says(name):
    hf = LOOK_AHEAD[name]()
    model = hw.load(hf, tokenizer=tiny_tokenizer())
    assert model.raw.cfg.attention_dir == "causal"
    assert model.is_bidirectional
    assert model.takes_padding
    short = IDS[:3]
    with torch.no_grad():
        alone = [hf(torch.tensor([tokens])).logits[0] for tokens in (short, IDS)]
    found = model.run([short, IDS])
    torch.testing.assert_close(found[0, :3], alone[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], alone[1], rtol=1e-4, atol=1e-4)
    sweep = hw.patch(
        model, [short, IDS], [[2, 40, 71], [*IDS[:4], 71]], sites="resid_pre", layers=[0], positions="last",
        metric=hw.Metric("first token", lambda logits: logits[:, 0, 5], at="all"), progress=False,
    )  # fmt: skip
    assert sweep.table["effect"].abs().min() > 1e-4, "an edit of the last token is felt at the first"


def test_what_only_looks_like_looking_ahead_is_none_where_the_first_logits_have_no_gradient_at_later_tokens():
    class Rounding(torch.nn.Linear):
        """Gives other numbers, by rounding, beside other tokens, as experts in low precision do."""

        def forward(self, x):
            return super().forward(x) + 1e-3 * x.detach().mean()

    hf = small_gpt2()
    hf.lm_head.__class__ = Rounding
    model = hw.load(hf, tokenizer=tiny_tokenizer())
    assert not model.is_bidirectional


def test_a_model_that_reads_padding_whatever_the_mask_says_is_refused_texts_of_several_lengths():
    model = hw.load(LOOK_AHEAD["gemma3"](), tokenizer=tiny_tokenizer())
    plain = model.raw.original_model.forward
    model.raw.original_model.forward = lambda *args, attention_mask=None, **options: plain(*args, **options)
    compare_with_reference(model, None)
    assert not model.takes_padding
    model.run([IDS, OTHER_IDS])
    with pytest.raises(InputError, match=r"reads the padding: give texts of one length, or one at a time\.$"):
        model.run([IDS, IDS[:3]])


def test_analyses_that_run_texts_only_up_to_the_token_read_refuse_attention_that_looks_ahead():
    model = hw.load(LOOK_AHEAD["gemma3"](), tokenizer=tiny_tokenizer())
    with pytest.raises(InputError, match=r"Saliency runs texts up to the token .* reads later tokens"):
        refuse_cut_texts(model, "Saliency")
    texts = [" the cat of France"]
    for score in (hw.token_statistics, gradient_norms):
        with pytest.raises(InputError, match=r"no next-token likelihoods: its attention reads later tokens"):
            score(model, texts, progress=False)
    with pytest.warns(UserWarning, match=r"has already seen the token whose rank is given\. Give answer="):
        hw.lens(model, [IDS], progress=False)
    with warnings.catch_warnings(action="error"):
        hw.lens(model, [IDS], positions="last", progress=False)
    for method in ("exact", "eap", "eap-ig", "screened", "sublayer"):
        with pytest.raises(hw.HeadwaterError, match=r"^The edges of .* its attention reads later tokens\.$"):
            hw.edges(model, [IDS], [OTHER_IDS], metric=METRIC, method=method, progress=False)
    with pytest.raises(hw.HeadwaterError, match=r"its attention reads later tokens\.$"):
        hw.path_patch(model, [IDS], [OTHER_IDS], senders="head", receivers="logits", metric=METRIC, progress=False)
