"""Folders of sae-lens are read as its formulas say, by old key names and new ones; what does not fit is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

import headwater as hw
from headwater.errors import InputError
from headwater.models.dictionaries import load_sae
from tests.tiny import embedded, tiny_hooked

D, N = 12, 30
NEWER = {"hook_name": "blocks.1.hook_resid_post", "hook_layer": 1, "d_in": D, "d_sae": N}
QUIET = {"progress": False}


def some_weights(*names):
    sizes = {"W_enc": (D, N), "W_dec": (N, D), "b_dec": (D,)} | dict.fromkeys(names, (N,))
    return {name: torch.randn(*size) / 3 for name, size in sizes.items()}


def written(folder, weights, **config):
    (folder / "cfg.json").write_text(json.dumps(NEWER | config))
    save_file(weights, folder / "sae_weights.safetensors")
    return folder


def edited_through(features, rows, unit):
    """Rows with one feature set to 2."""

    def change(found):
        found[:, unit] = 2.0
        return found

    return features.written(rows, change)


FORMULAS = {
    "standard": (
        {"architecture": "standard"}, ("b_enc",),
        lambda x, w: ((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu(),
    ),
    "no centring": (
        {"architecture": "standard", "apply_b_dec_to_input": False}, ("b_enc",),
        lambda x, w: (x @ w["W_enc"] + w["b_enc"]).relu(),
    ),
    "tanh": (
        {"activation_fn_str": "tanh-relu"}, ("b_enc",),
        lambda x, w: ((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu().tanh(),
    ),
    "gated": (
        {"architecture": "gated"}, ("b_gate", "r_mag", "b_mag"),
        lambda x, w: (((x - w["b_dec"]) @ w["W_enc"] + w["b_gate"]) > 0)
        * ((x - w["b_dec"]) @ (w["W_enc"] * w["r_mag"].exp()) + w["b_mag"]).relu(),
    ),
    "jumprelu": (
        {"architecture": "jumprelu"}, ("b_enc", "threshold"),
        lambda x, w: (p := (x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu() * (p > w["threshold"]),
    ),
    "topk, version 6": (
        {"architecture": "topk", "k": 4}, ("b_enc",),
        lambda x, w: (p := (x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu()
        * (p >= p.sort(-1, descending=True).values[:, 3:4]),
    ),
    "abstopk": (
        {"architecture": "abstopk", "k": 4, "rescale_acts_by_decoder_norm": False}, ("b_enc",),
        lambda x, w: (p := (x - w["b_dec"]) @ w["W_enc"] + w["b_enc"])
        * (p.abs() >= p.abs().sort(-1, descending=True).values[:, 3:4]),
    ),
    "decoder norms, which only topk rescales by": (
        {"architecture": "standard", "rescale_acts_by_decoder_norm": True}, ("b_enc",),
        lambda x, w: ((x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu(),
    ),
    "topk, versions 3 to 5": (
        {"architecture": "standard", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 4}}, ("b_enc",),
        lambda x, w: (p := (x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu()
        * (p >= p.sort(-1, descending=True).values[:, 3:4]),
    ),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("kind", list(FORMULAS))
def test_each_architecture_is_computed_by_its_formula(kind, tmp_path):
    config, names, encode = FORMULAS[kind]
    weights, rows = some_weights(*names), torch.randn(7, D)
    features = load_sae(written(tmp_path, weights, **config))
    expected = encode(rows, weights)
    torch.testing.assert_close(features.encode(rows), expected)
    torch.testing.assert_close(features.decode(expected), expected @ weights["W_dec"] + weights["b_dec"])
    assert (features.at, features.layer, features.count) == ("resid_post", 1, N)
    change = (2.0 - expected[:, 3:4]) * weights["W_dec"][3]  # the decoder is linear, and the error is kept
    torch.testing.assert_close(edited_through(features, rows, 3), rows + change)


@pytest.mark.oracle
@pytest.mark.parametrize("norm", ["layer_norm", "constant_norm_rescale"])
def test_standardized_activations_come_back_in_their_own_units(norm, tmp_path):
    weights, rows = some_weights("b_enc"), torch.randn(7, D) * torch.logspace(-5, 1, 7)[:, None] + 3
    features = load_sae(written(tmp_path, weights, normalize_activations=norm), keep_error=False)
    if norm == "layer_norm":
        shift, scale = rows.mean(-1, keepdim=True), rows.std(-1, keepdim=True)
    else:
        shift, scale = torch.zeros(()), rows.norm(dim=-1, keepdim=True) / D**0.5
    read = (rows - shift) / (scale + 1e-5 if norm == "layer_norm" else scale)
    found = ((read - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]).relu()
    torch.testing.assert_close(features.encode(rows), found)
    torch.testing.assert_close(features.encode(rows[0]), found[0])
    with pytest.raises(InputError, match=r"decode\(features, activation\)"):
        features.decode(found)
    rebuilt = (found @ weights["W_dec"] + weights["b_dec"]) * scale + shift
    torch.testing.assert_close(features.decode(found, rows), rebuilt)
    found[:, 3] = 2.0
    rebuilt = (found @ weights["W_dec"] + weights["b_dec"]) * scale + shift
    torch.testing.assert_close(edited_through(features, rows, 3), rebuilt)


def test_a_factor_that_activations_are_multiplied_with_is_folded_or_asked_for(tmp_path):
    weights, rows = some_weights("b_enc"), torch.randn(7, D)
    options = {"normalize_activations": "expected_average_only_in"}
    features = load_sae(written(tmp_path, weights, **options, norm_scaling_factor=0.5))
    found = ((0.5 * rows - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]).relu()
    torch.testing.assert_close(features.encode(rows), found)
    torch.testing.assert_close(features.decode(found), (found @ weights["W_dec"] + weights["b_dec"]) / 0.5)
    with pytest.raises(InputError, match="needs a norm_scaling_factor"):
        load_sae(written(tmp_path, weights, **options))
    (tmp_path / "activation_scaler.json").write_text('{"scaling_factor": 0.5}')
    torch.testing.assert_close(load_sae(tmp_path).encode(rows), found)


def test_scales_of_features_are_read_where_the_config_asks_for_them(tmp_path):
    weights, rows = some_weights("b_enc", "scaling_factor"), torch.randn(7, D)
    before = (rows - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
    tuned = load_sae(written(tmp_path, weights, finetuning_scaling_factor=True))
    scaled = before.relu() * weights["scaling_factor"]
    torch.testing.assert_close(tuned.decode(before.relu()), scaled @ weights["W_dec"] + weights["b_dec"])
    with pytest.raises(InputError, match="scaling_factor is not 1"):
        load_sae(written(tmp_path, weights))
    for scales in ({"scaling_factor": torch.ones(N)}, {}):
        held = {name: weights[name] for name in weights if name != "scaling_factor"} | scales
        plain = load_sae(written(tmp_path, held, finetuning_scaling_factor=not scales))
        torch.testing.assert_close(plain.decode(before.relu()), before.relu() @ weights["W_dec"] + weights["b_dec"])
    del weights["scaling_factor"]
    norms = weights["W_dec"].norm(dim=-1)
    topk = {"architecture": "topk", "k": N, "rescale_acts_by_decoder_norm": True}
    rescaled = load_sae(written(tmp_path, weights, **topk))
    torch.testing.assert_close(rescaled.encode(rows), (before * norms).relu())
    torch.testing.assert_close(
        rescaled.decode((before * norms).relu()), before.relu() @ weights["W_dec"] + weights["b_dec"]
    )


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"hook_point": "blocks.2.hook_resid_pre", "hook_point_layer": 2}, ("resid_pre", 2)),
        ({"hook_name": "blocks.0.attn.hook_z", "hook_layer": 0}, ("z", 0)),
        ({"hook_name": "blocks.3.hook_mlp_out"}, ("mlp_out", 3)),
        ({"metadata": {"hook_name": "blocks.1.hook_resid_mid"}, "architecture": "standard"}, ("resid_mid", 1)),
        ({"hook_name": "blocks.2.hook_in"}, ("resid_pre", 2)),
        ({"hook_name": "blocks.2.hook_out"}, ("resid_post", 2)),
        ({"hook_name": "blocks.2.attn.hook_out"}, ("attn_out", 2)),
        ({"hook_name": "blocks.2.mlp.hook_out"}, ("mlp_out", 2)),
        ({"hook_name": "model.layers.2"}, ("resid_post", 2)),
        ({"hook_name": "transformer.h.2"}, ("resid_post", 2)),
    ],
)
def test_the_place_is_read_by_the_key_names_of_every_version(config, place, tmp_path):
    save_file(some_weights("b_enc"), tmp_path / "sae_weights.safetensors")
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    features = load_sae(tmp_path)
    assert (features.at, features.layer) == place


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        ({"architecture": "skip_transcoder"}, {}, "no transcoders"),
        ({"hook_name_out": "blocks.1.hook_mlp_out"}, {}, "no transcoders"),
        ({"architecture": "batchtopk"}, {}, "converts batchtopk to jumprelu"),
        ({"architecture": "temporal"}, {}, "'temporal'; supported are standard, gated, jumprelu, topk, abstopk"),
        ({"hook_name": f"blocks.{'1' * 5000}.hook_resid_post"}, {}, "is not a site here"),
        ({"apply_b_dec_to_input": "false"}, {}, "apply_b_dec_to_input is 'false'; supported are True, False"),
        ({"seqpos_slice": [5, -5]}, {}, "counts from the end, and there is no context_size"),
        ({"exclude_special_tokens": "all"}, {}, "'all'; supported are true, false or token ids"),
        ({"hook_name": "blocks.1.ln2.hook_normalized"}, {}, "is not a site here"),
        ({"hook_name": None}, {}, "hook_name 'None' is not a site here"),
        ({"hook_head_index": 3}, {}, "reads one head"),
        ({"normalize_activations": "batch"}, {}, "normalize_activations is 'batch'; supported are"),
        ({"activation_fn_str": "gelu"}, {}, "activation_fn_str is 'gelu'; supported are"),
        ({"architecture": "topk"}, {}, "how many of 30 features are kept, is None"),
        ({"architecture": "topk", "k": 31}, {}, "of 30 features are kept, is 31"),
        ({"d_in": 13}, {}, "says d_in=13, but W_enc is 12 by 30"),
        ({"d_sae": 29}, {}, "says d_sae=29, but W_enc is 12 by 30"),
        ({"architecture": "jumprelu"}, {}, "threshold is missing; a jumprelu autoencoder"),
        ({}, {"b_enc": torch.zeros(29)}, r"b_enc is \(29,\) .* needs finite numbers, \(30,\)"),
        ({}, {"W_dec": torch.full((N, D), torch.nan)}, r"W_dec is \(30, 12\) or holds NaN or infinity"),
        ({}, {"W_enc": torch.zeros(3)}, "no matrix W_enc among W_dec, W_enc"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(config, weights, message, tmp_path):
    with pytest.raises(InputError, match=message) as refused:
        load_sae(written(tmp_path, some_weights("b_enc") | weights, **config))
    assert "\n" not in str(refused.value)


def too_large(file):
    raise RuntimeError("unable to mmap 42949673055 bytes")  # as torch does of a sparse file of 40 GB


def test_damaged_and_missing_files_are_named(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"No such file .*cfg\.json"):
        load_sae(tmp_path)
    written(tmp_path, some_weights("b_enc"))
    (tmp_path / "sae_weights.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"sae_weights\.safetensors: .*header"):
        load_sae(tmp_path)
    monkeypatch.setattr("headwater.models.dictionaries.load_file", too_large)
    with pytest.raises(InputError, match="unable to mmap"):
        load_sae(tmp_path)
    (tmp_path / "cfg.json").write_text("{")
    with pytest.raises(InputError, match="line 1, column 2"):
        load_sae(tmp_path)
    (tmp_path / "cfg.json").write_text("[]")
    with pytest.raises(InputError, match="attribute 'get'"):
        load_sae(tmp_path)


def test_an_autoencoder_of_another_width_is_refused_by_the_model(tmp_path):
    features = load_sae(written(tmp_path, some_weights("b_enc")))
    with pytest.raises(InputError, match="does not accept resid_post of LlamaForCausalLM, 160 wide"):
        hw.patch(embedded(), " a", sites=features, values="zero", metric=hw.probability(" b"), **QUIET)


@pytest.fixture
def centred(tmp_path):
    """A GPT-2, and an autoencoder of its size whose folder says the activations were centred."""
    model = tiny_hooked("gpt2")
    width = model.shape.d_model
    weights = {name: torch.randn(*size) / 3 for name, size in {"W_enc": (width, N), "W_dec": (N, width)}.items()}
    weights |= {"b_enc": torch.zeros(N), "b_dec": torch.randn(width)}
    options = {"center_writing_weights": True, "fold_ln": True}
    return model, written(tmp_path, weights, d_in=width, model_from_pretrained_kwargs=options), weights


@pytest.mark.oracle
def test_centred_activations_are_read_where_writing_weights_were_centred(centred):
    model, folder, weights = centred
    prompt = [5, 7, 9, 4]
    x = model.cache([prompt], sites="resid_post", layers=[1], progress=False).rows("resid_post", 1)
    found = ((x - x.mean(-1, keepdim=True) - weights["b_dec"]) @ weights["W_enc"]).relu()
    cache = model.cache([prompt], sites=load_sae(folder), progress=False)
    torch.testing.assert_close(cache.rows("resid_post 1 features", 1), found, atol=1e-5, rtol=1e-4)


def test_what_a_folder_says_of_other_runs_is_said_in_one_line(centred):
    model, folder, _ = centred
    config = json.loads((folder / "cfg.json").read_text())
    said = {"model_name": "pythia-70m", "prepend_bos": model.bos is None, "exclude_special_tokens": [5]}
    (folder / "cfg.json").write_text(json.dumps(config | said | {"seqpos_slice": [1, None]}))
    with pytest.warns(UserWarning, match="The folder of") as warned:
        model.cache([[3, 7, 9, 4]], sites=load_sae(folder), progress=False)
    (message,) = {str(one.message) for one in warned}
    for part in ("trained on 'pythia-70m'", "BOS token", r"the tokens [5]", "positions [1, None]"):
        assert part in message
    assert "\n" not in message


@pytest.mark.filterwarnings("ignore:The folder of")
def test_positions_that_a_dictionary_never_saw_are_left_out(centred):
    """Special tokens and positions outside a slice are in no cell and in no cache, and no edit reaches them."""
    model, folder, _ = centred
    prompt, metric = [5, 7, 9, 5, 4], hw.logit_difference(6, 8)
    config = json.loads((folder / "cfg.json").read_text()) | {"prepend_bos": None}
    (folder / "cfg.json").write_text(json.dumps(config))
    whole = load_sae(folder).only([2, 3])
    (folder / "cfg.json").write_text(
        json.dumps(config | {"exclude_special_tokens": [5], "seqpos_slice": [0, -1], "context_size": 5})
    )
    features = load_sae(folder).only([2, 3])
    options = {"values": hw.scale(3.0), "metric": metric, "progress": False}
    for method in ("exact", "attribution"):
        swept = hw.patch(model, [prompt], sites=features, over=("feature", "position"), method=method, **options)
        assert set(swept.table["position"]) == {1, 2}
    for call in (
        lambda site, at: hw.patch(model, [prompt], sites=site, positions=at, over="layer", **options).table["effect"][
            0
        ],
        lambda site, at: hw.ablate(model, [prompt], features=site, positions=at, **options).table["effect"][0],
        lambda site, at: model.run([prompt], [hw.edit(site, None, hw.scale(3.0), positions=at)])[0, -1].sum().item(),
    ):
        assert call(features, "all") == pytest.approx(call(whole, {1, 2}), abs=1e-6)
        assert call(features, "all") != pytest.approx(call(whole, "all"), abs=1e-4)
        with pytest.raises(InputError, match=r"cannot be edited at any of the positions \[0, 3\]"):
            call(features, {0, 3})
    cache = model.cache([prompt], sites=features, progress=False)
    assert cache.table["position"].tolist() == [1, 2]
    with pytest.raises(InputError, match="Text 0 has no token to keep"):
        model.cache([[5, 5]], sites=features, progress=False)


def test_a_hook_that_is_elsewhere_in_a_model_is_refused(tmp_path):
    """Gemma 2 adds its attention's output after another norm: `attn.hook_out` is before it."""
    model = tiny_hooked("gemma2")
    width = model.shape.d_model
    weights = {"W_enc": torch.randn(width, N), "W_dec": torch.randn(N, width), "b_enc": torch.zeros(N)}
    weights["b_dec"] = torch.zeros(width)
    folder = written(tmp_path, weights, d_in=width, hook_name="blocks.1.attn.hook_out")
    with pytest.raises(InputError, match=r"'blocks\.1\.attn\.hook_out', which is not the attn_out"):
        model.cache([[5, 7]], sites=load_sae(folder), progress=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An autoencoder trained for seconds on what the embedded model holds at resid_post of layer 2, and its states."""
    model = embedded()
    places = ("France", "Italy", "Spain", "Austria", "Norway", "Poland", "Japan", "Egypt", "Greece", "Portugal")
    texts = [
        f"Q: {asked} {name}?\nA:"
        for name in places
        for asked in ("What is the capital of", "Which language is spoken in", "On which continent is")
    ]
    states = torch.cat([model.cache(text, sites="resid_post", layers=[2]).residual[0, 0] for text in texts])
    centre, width = states.mean(0), model.shape.d_model
    weights = {
        "W_enc": torch.randn(width, 192) / width**0.5, "b_enc": torch.zeros(192),
        "W_dec": torch.randn(192, width) / 192**0.5, "b_dec": centre.clone(),
    }  # fmt: skip
    for weight in weights.values():
        weight.requires_grad_(True)
    step = torch.optim.Adam(weights.values(), lr=1e-2)
    for _ in range(300):
        found = ((states - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]).relu()
        error = (found @ weights["W_dec"] + weights["b_dec"] - states).square().sum(-1).mean()
        loss = error + 0.02 * found.sum(-1).mean()
        step.zero_grad()
        loss.backward()
        step.step()
    folder = tmp_path_factory.mktemp("sae")
    config = {"hook_name": "blocks.2.hook_resid_post", "hook_layer": 2, "d_in": width, "d_sae": 192}
    written(folder, {name: weight.detach().contiguous() for name, weight in weights.items()}, **config)
    return model, folder, states


def test_a_trained_autoencoder_rebuilds_the_states_and_its_features_carry_the_answer(trained):
    model, folder, states = trained
    features = load_sae(folder)
    rebuilt = features.decode(features.encode(states))
    assert float((rebuilt - states).square().sum() / (states - states.mean(0)).square().sum()) < 0.2
    pair = ("Q: What is the capital of France?\nA:", "Q: What is the capital of Italy?\nA:")
    options = {"metric": hw.logit_difference(" Paris", " Rome"), "positions": "last", **QUIET}
    whole = hw.patch(model, *pair, sites="resid_post", layers=2, over="layer", **options).table["effect"][0]
    together = hw.patch(model, *pair, sites=features, over="layer", **options).table["effect"][0]
    assert together / whole > 0.5
    swept = hw.patch(model, *pair, sites=features, **options)
    estimated = hw.patch(model, *pair, sites=features, method="attribution", **options)
    assert estimated.agreement(swept)["spearman"][0] > 0.8
    best = swept.table.loc[swept.table["effect"].abs().nlargest(20).index, "feature"].tolist()
    few = hw.patch(model, *pair, sites=features.only(best), over="layer", **options).table["effect"][0]
    assert few / together > 0.3
    removed = hw.ablate(model, pair[0], features=features.only(best), **options).table
    assert removed["set"].tolist() == ["20 features"]
    assert removed["effect"][0] < 0
