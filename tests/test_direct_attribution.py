"""Direct logit attribution: parts sum to the logit difference on every architecture and are what Hugging Face has."""

import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes

import headwater as hw
from headwater.errors import HeadwaterError, InputError
from headwater.models import unembedding
from tests.random_models import random_model
from tests.tiny import FAMILIES, tiny_hooked, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PROMPTS = [" the capital of France is in", " see the big cat", " the dog"]
TOKENS = (" Paris", " Rome")
CORRECT, WRONG = (TOKENIZER.encode(token, add_special_tokens=False)[0] for token in TOKENS)


@pytest.fixture
def models():
    return tiny_hooked


def attributed(model, prompts=PROMPTS, tokens=TOKENS, **options):
    return hw.direct_logit_attribution(model, prompts, tokens=tokens, progress=False, **options)


def sums(result):
    return torch.tensor(result.table.groupby("example")["contribution"].sum().to_numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_contributions_sum_to_the_logit_difference_on_every_architecture(models, family):
    model = models(family)
    logits = model.run(PROMPTS, keep="last")[:, 0].double()
    cap = getattr(model.config, "final_logit_softcapping", None)
    logits = cap * (logits / cap).atanh() if cap else logits  # a difference before the cap
    expected = logits[:, CORRECT] - logits[:, WRONG]
    for by in ("head", "layer", "component", "position"):
        result = attributed(model, by=by, batch_size=2)
        assert torch.allclose(sums(result), expected, atol=1e-4)
        assert torch.allclose(torch.tensor(result.totals["logit_difference"].to_numpy()), expected, atol=1e-4)


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_head_and_mlp_contributes_what_hugging_face_computes(models, family):
    hf = tiny_model(family)
    is_gpt2 = family == "gpt2"
    blocks = hf.transformer.h if is_gpt2 else hf.model.layers
    norm = hf.transformer.ln_f if is_gpt2 else hf.model.norm
    seen = {}
    for layer, block in enumerate(blocks):
        output = block.attn.c_proj if is_gpt2 else block.self_attn.o_proj
        output.register_forward_pre_hook(lambda module, args, layer=layer: seen.update({("z", layer): args[0]}))
        block.mlp.register_forward_hook(lambda module, args, out, layer=layer: seen.update({("mlp", layer): out}))
    norm.register_forward_pre_hook(lambda module, args: seen.update(final=args[0]))
    ids = models(family).tokenize(PROMPTS[0]).tokens
    with torch.no_grad():
        hidden = hf(ids, output_hidden_states=True).hidden_states
    x = seen["final"][0, -1].double()
    x = x - x.mean() if is_gpt2 else x
    scale = (x.square().mean() + (1e-5 if is_gpt2 else hf.config.rms_norm_eps)).sqrt()
    unembedding = hf.get_output_embeddings().weight.detach()
    written = (unembedding[CORRECT] - unembedding[WRONG]).double() * norm.weight.detach().double() / scale

    def contribution(part):
        part = part.detach().double()
        return float((part - part.mean() if is_gpt2 else part) @ written)

    table = attributed(models(family), PROMPTS[0]).table.set_index(["component", "layer", "head"])["contribution"]
    assert table["embed"].item() == pytest.approx(contribution(hidden[0][0, -1]), abs=1e-5)
    for layer, block in enumerate(blocks):
        weight = block.attn.c_proj.weight if is_gpt2 else block.self_attn.o_proj.weight.T
        z = seen["z", layer][0, -1].reshape(4, -1)
        for head, rows in enumerate(weight.reshape(4, -1, weight.shape[-1])):
            assert table["head", layer, head] == pytest.approx(contribution(z[head] @ rows), abs=1e-5)
        mlp = table.xs("mlp", level="component").xs(layer, level="layer").item()
        assert mlp == pytest.approx(contribution(seen["mlp", layer][0, -1]), abs=1e-5)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:Layer 0 is left out. z of")
@pytest.mark.parametrize(("name", "mixer"), [("jamba", "mamba"), ("granite4", "mamba"), ("granite-moe", None)])
def test_a_layer_without_heads_contributes_what_its_mixer_adds_scales_and_all(name, mixer):
    hf = random_model(name)
    model, ids = hw.load(hf, tokenizer=TOKENIZER), [2, 40, 41, 42, 43]
    result = attributed(model, [ids], (17, 18), by="position")
    with torch.no_grad():
        held = []
        handle = mixer and getattr(hf.model.layers[0], mixer).register_forward_hook(lambda *call: held.append(call[2]))
        states = hf(torch.tensor([ids]), output_hidden_states=True)
    scales = hf.config.to_dict()
    found = result.totals["logit_difference"].iloc[0]
    assert found == pytest.approx(float(states.logits[0, -1, 17] - states.logits[0, -1, 18]), abs=1e-5)
    assert result.table["contribution"].sum() == pytest.approx(found, abs=1e-5)
    mixed = result.table.query("component == 'mixer'")
    assert mixed["layer"].tolist() == [0] * bool(mixer)
    assert result.plot() is not None
    if handle:
        handle.remove()
        residual = []
        norm = hf.get_decoder().final_layernorm if name == "jamba" else hf.get_decoder().norm
        watched = norm.register_forward_pre_hook(lambda module, args: residual.append(args[0][0, -1]))
        with torch.no_grad():
            hf(torch.tensor([ids]))
            watched.remove()
            written = held[0][0] if isinstance(held[0], tuple) else held[0]
            scale = (residual[0].square().mean() + norm.variance_epsilon).sqrt()
            direction = norm.weight * (hf.lm_head.weight[17] - hf.lm_head.weight[18]) / scale
            expected = (
                written[0, -1] @ direction * scales.get("residual_multiplier", 1) / scales.get("logits_scaling", 1)
            )
        assert mixed["contribution"].iloc[0] == pytest.approx(float(expected), abs=1e-5)


def test_the_table_names_components_layers_heads_and_positions(models):
    result = attributed(models("gpt2"))
    table = result.table
    assert list(table.columns) == ["example", "component", "layer", "head", "position", "contribution"]
    assert table.groupby("component").size().to_dict() == {"bias": 12, "embed": 3, "head": 36, "mlp": 9}
    lengths = models("gpt2").tokenize(PROMPTS).lengths
    assert table.groupby("example")["position"].unique().map(list).tolist() == [[int(n) - 1] for n in lengths]
    layers = attributed(models("gpt2"), by="layer").table
    assert layers["head"].isna().all()
    of_heads = table[table["component"] == "head"].groupby(["example", "layer"])["contribution"].sum()
    merged = layers[layers["component"] == "head"].groupby(["example", "layer"])["contribution"].sum()
    pd.testing.assert_series_equal(of_heads, merged)


@pytest.mark.oracle
def test_a_head_contributes_from_each_position_what_its_pattern_and_values_carry(models):
    hf, seen = tiny_model("llama"), {}
    layer, prompt = hf.model.layers[1], PROMPTS[0]
    layer.self_attn.v_proj.register_forward_hook(lambda module, args, out: seen.update(v=out[0]))
    hf.model.norm.register_forward_pre_hook(lambda module, args: seen.update(final=args[0][0, -1].double()))
    with torch.no_grad():
        pattern = hf(models("llama").tokenize(prompt).tokens, output_attentions=True).attentions[1][0, :, -1].double()
    scale = (seen["final"].square().mean() + hf.config.rms_norm_eps).sqrt()
    W_U, gain = (part.weight.detach().double() for part in (hf.lm_head, hf.model.norm))
    written = (W_U[CORRECT] - W_U[WRONG]) * gain / scale
    W_O = layer.self_attn.o_proj.weight.T.reshape(4, 8, 32).detach().double()
    values = seen["v"].reshape(-1, 2, 8).repeat_interleave(2, 1).double()
    expected = pattern * torch.einsum("shk,hkd,d->hs", values, W_O, written)
    table = attributed(models("llama"), prompt, by="position").table
    found = table[(table["component"] == "head") & (table["layer"] == 1)].pivot(
        index="head", columns="position", values="contribution"
    )
    torch.testing.assert_close(torch.tensor(found.to_numpy(dtype=float)), expected, atol=1e-5, rtol=1e-4)


def test_what_heads_attend_to_adds_up_to_the_heads_over_several_prompts_and_positions(models):
    options = {"at": {0, -1}, "batch_size": 2}
    whole = attributed(models("gemma3"), **options).table
    split = attributed(models("gemma3"), by="position", **options).table
    keys = ["example", "component", "layer", "head"]
    one, other = (part.groupby(keys, dropna=False)["contribution"].sum() for part in (whole, split))
    pd.testing.assert_series_equal(one, other, atol=1e-5)
    assert list(split.columns) == list(whole.columns)
    lengths = models("gemma3").tokenize(PROMPTS).lengths.tolist()
    heads = split[split["component"] == "head"]
    assert heads.groupby("example")["position"].nunique().tolist() == lengths


def test_positions_by_role_are_named_in_the_table(models):
    prompts = [" the capital of France is in", " see the capital of Italy"]
    roles = {"country": [" France", " Italy"], "end": "last"}
    table = attributed(models("llama"), prompts[:1], at={"country": " France", "end": "last"}).table
    assert table.groupby("position")["role"].unique().map(list).to_dict() == {4: ["country"], 6: ["end"]}
    seen = hw.lens(models("llama"), prompts, positions=roles, top_k=1, progress=False).table
    assert seen[seen["layer"] == 0].groupby("example")["role"].agg(list).tolist() == [
        ["country", "end"], ["country, end"],
    ]  # fmt: skip


def test_several_positions_share_the_mean_of_their_logit_differences(models):
    model = models("llama")
    result = attributed(model, PROMPTS[0], at=(1, 4))
    logits = model.run(PROMPTS[0])[0, 1:4].double()
    assert result.table["position"].unique().tolist() == [1, 2, 3]
    assert sums(result).item() == pytest.approx(float((logits[:, CORRECT] - logits[:, WRONG]).mean()), abs=1e-4)


def test_a_prompt_has_its_own_tokens_where_several_are_given(models):
    result = attributed(models("llama"), tokens=([" Paris", " Rome", " cat"], " dog"))
    alone = attributed(models("llama"), PROMPTS[2], tokens=(" cat", " dog"))
    own = result.table[result.table["example"] == 2]["contribution"].to_numpy()
    assert own == pytest.approx(alone.table["contribution"].to_numpy(), abs=1e-5)


def test_bfloat16_parts_sum_to_its_rounding():
    model = hw.load(tiny_model("gemma2", dtype=torch.bfloat16), tokenizer=TOKENIZER)
    result = attributed(model)
    assert torch.allclose(sums(result), torch.tensor(result.totals["logit_difference"].to_numpy()), atol=0.5)


def test_parts_that_do_not_sum_are_refused(models, monkeypatch):
    monkeypatch.setattr(unembedding.LoadedWeights, "attention_post_gain", lambda self, layer: None)
    with pytest.raises(HeadwaterError, match=r"contributions of example 0 sum to .*but its logit difference is"):
        attributed(models("gemma3"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": " Paris"}, "must be the pair"),
        ({"tokens": (" Paris", " Paris")}, "prompt 0 are the same"),
        ({"tokens": (" Paris", "xyzzy")}, "is 5 tokens"),
        ({"by": "heads"}, "by='heads' is not one of head, layer, component, position. Did you mean 'head'"),
        ({"at": 40}, "Position 40 is not in prompt 0"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_what_cannot_be_used_is_named(models, options, message):
    with pytest.raises(InputError, match=message):
        attributed(models("llama"), **options)


def test_two_pairs_of_two_prompts_may_not_be_read_as_right_tokens_and_wrong_ones(models):
    pairs = [(" Paris", " Rome"), (" Rome", " Paris")]
    with pytest.raises(
        InputError, match=r"two meanings .* by prompt: tokens=\(\[' Paris', ' Rome'\], \[' Rome', ' Paris'"
    ):
        hw.direct_logit_attribution(models("llama"), PROMPTS[:2], tokens=pairs)


def test_it_is_saved_and_loaded_and_a_run_folder_gives_it_back(models, tmp_path):
    result = attributed(models("llama"), out=tmp_path / "run")
    again = attributed(models("llama"), out=tmp_path / "run")
    loaded = hw.DirectAttribution.load(result.save(tmp_path / "saved"))
    for other in (again, loaded):
        pd.testing.assert_frame_equal(other.table, result.table)
        pd.testing.assert_frame_equal(other.totals, result.totals)
    assert result.run.analysis == "direct_logit_attribution"
    summary = result.summary()
    assert summary["mean"].sum() == pytest.approx(result.totals["logit_difference"].mean())
    assert {"component", "layer", "head", "examples", "low", "high", "p_value"} <= set(summary.columns)


@pytest.mark.parametrize(("by", "marks"), [("head", 3 * 6), ("layer", 9), ("component", 4), ("position", 3 * 7)])
def test_the_figure_shows_every_head_and_mlp_or_what_they_attend_to_or_layers_or_components(models, by, marks):
    ax = attributed(models("gpt2"), by=by).plot()
    assert isinstance(ax, Axes)
    drawn = (
        ax.collections[-1].get_array().size if by in ("head", "position") else sum(len(bars) for bars in ax.containers)
    )
    assert drawn == marks
    assert "logit difference" in ax.get_title(loc="left")
    assert "n = 3" in ax.get_title(loc="left")
