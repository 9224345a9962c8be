"""hw.load: every way in, the caller's model untouched, and one clear line for everything that cannot be loaded."""

import copy
import json
import math
import re
import shutil
import threading
import warnings

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from transformers import core_model_loading as core

import headwater as hw
from headwater.errors import InputError, ModelError
from headwater.models import loading
from headwater.models.checkpoint import read_config
from headwater.models.conversion import SkipWeightInit
from headwater.models.weights import open_weights
from tests.random_models import random_model
from tests.tiny import FAMILIES, FEW, WORDS, tiny_folder, tiny_model, tiny_tokenizer, tokenizer_of
from tests.typed import EVERYWHERE

TEXTS = ["the capital of France is Paris", "one two three", "Paris"]


def reference_logits(hf, tokens):
    with torch.inference_mode():
        return hf(tokens).logits


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy of a tiny Llama checkpoint that a test may damage."""
    return shutil.copytree(checkpoint("llama"), tmp_path / "model")


@pytest.mark.oracle
def test_a_folder_gives_hugging_faces_own_logits(checkpoint, family):
    path = checkpoint(family)
    model = hw.load(path)
    batch = model.tokenize(TEXTS[0])
    reference = tf.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    torch.testing.assert_close(model.run(batch), reference_logits(reference, batch.tokens), rtol=0, atol=1e-5)


@pytest.mark.oracle
def test_a_model_in_memory_gives_its_own_logits_and_stays_as_it_was(family):
    hf = tiny_model(family, seed=int(torch.randint(10**6, ())))
    hf.set_attn_implementation("sdpa" if family not in ("gemma2", "gpt2") else "eager")
    before = copy.deepcopy(hf)
    modules = {name: type(module) for name, module in hf.named_modules()}
    config = hf.config.to_dict()
    tokenizer = tiny_tokenizer()
    tokenizer_before = tokenizer.backend_tokenizer.to_str(), dict(tokenizer.special_tokens_map)

    model = hw.load(hf, tokenizer=tokenizer)
    batch = model.tokenize(TEXTS)
    logits = model.run(batch, [("blocks.1.hook_resid_post", lambda resid, hook: resid * 0)])
    assert not torch.allclose(logits, model.run(batch))

    assert {name: type(module) for name, module in hf.named_modules()} == modules
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in hf.modules())
    assert hf.config.to_dict() == config
    assert hf.config._attn_implementation == before.config._attn_implementation
    assert all(p.requires_grad for p in hf.parameters())
    for (name, now), (_, then) in zip(hf.state_dict().items(), before.state_dict().items(), strict=True):
        assert torch.equal(now, then), name
    assert (tokenizer.backend_tokenizer.to_str(), dict(tokenizer.special_tokens_map)) == tokenizer_before
    plain = reference_logits(before, batch.tokens[:1])
    assert torch.equal(reference_logits(hf, batch.tokens[:1]), plain)
    torch.testing.assert_close(model.run(batch.rows(0, 1)), plain, rtol=0, atol=1e-4)


def test_a_model_in_memory_shares_its_numbers_with_the_copy():
    hf = tiny_model("llama")
    model = hw.load(hf, tokenizer=tiny_tokenizer())
    ours = {p.data_ptr() for p in model.raw.parameters()}
    assert {p.data_ptr() for p in hf.parameters()} <= ours
    assert not any(p.requires_grad for p in model.raw.parameters())


@pytest.mark.parametrize("family", FEW)
def test_even_compatibility_mode_on_the_copy_leaves_the_callers_weights_alone(family):
    hf = tiny_model(family)
    before = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hw.load(hf, tokenizer=tiny_tokenizer()).raw.enable_compatibility_mode()
    for name, tensor in hf.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_model_in_memory_can_be_cast_without_casting_the_original():
    hf = tiny_model("llama")
    model = hw.load(hf, tokenizer=tiny_tokenizer(), dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert hf.dtype == torch.float32


@pytest.mark.parametrize("source", ["folder", "memory"])
def test_what_texts_begin_with_is_checked_before_a_weight_is_read(source, checkpoint, monkeypatch):
    def read(*_, **__):
        raise AssertionError("weights are read")

    monkeypatch.setattr("headwater.models.loading.read_pretrained", read)
    monkeypatch.setattr("headwater.models.loading.twin", read)
    what, options = (
        (checkpoint("llama"), {}) if source == "folder" else (tiny_model("llama"), {"tokenizer": tiny_tokenizer()})
    )
    for bos in ("<no such token>", 10**9, 3.5, []):
        with pytest.raises(InputError, match="names no token of the tokenizer"):
            hw.load(what, bos=bos, **options)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["olmo", "olmo2", "olmo3", "flex_olmo"])
def test_olmo_runs_and_is_swept_in_bfloat16_as_transformers_runs_it(name):
    hf, ids = random_model(name).to(torch.bfloat16), [[2, 40, 41, 42, 43, 44], [2, 50, 41, 42, 43, 44]]
    model = hw.load(hf, tokenizer=tiny_tokenizer())
    with torch.inference_mode():
        expected = hf(torch.tensor(ids)).logits
    assert torch.equal(model.run(ids), expected)
    effects = (expected[0, -1] - expected[1, -1]).float()
    most = int(effects.abs().argmax())
    metric = hw.Metric("logit", lambda logits: logits[:, -1, most])
    sweep = hw.patch(model, ids[:1], ids[1:], sites="resid_pre", layers=[0], positions=1, metric=metric, progress=False)
    assert sweep.table["effect"].item() == pytest.approx(float(effects[most]), abs=0.02)
    assert float(effects.abs().max()) > 0.05


class OwnConfig(tf.LlamaConfig):
    model_type = "mine"


def test_a_model_type_without_a_row_runs_and_is_recorded_although_it_uses_llamas_class():
    config = OwnConfig(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, bos_token_id=0
    )
    hf = tf.LlamaForCausalLM(config).eval()
    model = hw.load(hf)
    tokens = torch.arange(5, 15)[None]
    torch.testing.assert_close(model.run(tokens), reference_logits(hf, tokens), rtol=0, atol=1e-5)
    assert model.cache(tokens, sites="resid_post", progress=False).run.fingerprint == model.fingerprint
    before = model.fingerprint
    with torch.no_grad():
        hf.model.layers[1].mlp.up_proj.weight.mul_(2)
    assert model.fingerprint != before


def test_a_model_in_training_mode_is_evaluated_without_changing_the_original():
    hf = tiny_model("gpt2").train()
    model = hw.load(hf, tokenizer=tiny_tokenizer())
    assert torch.equal(model.run(TEXTS[0]), model.run(TEXTS[0]))
    assert hf.training


@pytest.fixture
def bridge():
    from transformer_lens.model_bridge import TransformerBridge

    tokenizer = tiny_tokenizer()
    return TransformerBridge.boot_transformers("tiny", hf_model=tiny_model("llama"), tokenizer=tokenizer, device="cpu")


def test_a_bridge_is_used_as_it_is(bridge):
    seen = []
    bridge.add_hook("blocks.0.hook_resid_post", lambda resid, hook: seen.append(resid.shape))
    before = {name: tensor.clone() for name, tensor in bridge.state_dict().items()}
    grads = [p.requires_grad for p in bridge.parameters()]
    model = hw.load(bridge)
    assert model.raw is bridge
    assert len(seen) == 1  # its activations are looked at once
    seen.clear()
    model.run(TEXTS[0], [("blocks.1.hook_resid_post", lambda resid, hook: resid * 0)])
    model.cache(TEXTS, progress=False)
    assert len(seen) == 2
    assert [p.requires_grad for p in bridge.parameters()] == grads
    assert {point.name for point in bridge.hook_dict.values() if point.fwd_hooks} == {"blocks.0.hook_out"}
    for name, tensor in bridge.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_tokenizer_of_a_bridge_is_the_published_one_unless_it_was_changed_in_memory(tmp_path):
    from transformer_lens.model_bridge import TransformerBridge

    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    bridge = TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
    assert bridge.tokenizer.init_kwargs["add_bos_token"]
    assert not hw.load(bridge).tokenizer.init_kwargs.get("add_bos_token")
    bridge.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert hw.load(bridge).tokenizer is bridge.tokenizer
    bridge.tokenizer.name_or_path, bridge.tokenizer.chat_template = "", None
    assert hw.load(bridge).tokenizer is bridge.tokenizer


def test_the_name_of_a_tokenizer_that_cannot_be_fetched_is_an_error_before_transformers_retries(monkeypatch):
    monkeypatch.setattr("headwater.models.checkpoint.AutoTokenizer", None)
    with pytest.raises(ModelError, match="'nobody/nothing' is not a folder"):
        hw.load(tiny_model("llama"), tokenizer="nobody/nothing")


def test_a_bridge_is_not_moved_or_cast(bridge):
    with pytest.raises(InputError, match="does not move"):
        hw.load(bridge, dtype=torch.bfloat16)


def test_a_bridge_in_training_mode_is_refused(bridge):
    bridge.train()
    with pytest.raises(ModelError, match="training mode"):
        hw.load(bridge)


def test_a_bridge_with_folded_weights_is_announced(bridge):
    bridge.enable_compatibility_mode()
    with pytest.warns(UserWarning, match="folded"):
        hw.load(bridge)


@pytest.mark.parametrize("family", FEW)
def test_the_fingerprint_is_the_same_loaded_in_memory_and_streamed(checkpoint, family):
    path = checkpoint(family)
    loaded = hw.load(path)
    given = hw.load(tf.AutoModelForCausalLM.from_pretrained(path), tokenizer=tiny_tokenizer())
    assert loaded.fingerprint == given.fingerprint == open_weights(path).fingerprint
    assert loaded.fingerprint != hw.load(tiny_model(family, seed=1), tokenizer=tiny_tokenizer()).fingerprint


def test_dtype_comes_from_the_checkpoint_unless_asked(checkpoint):
    path = checkpoint("llama", dtype=torch.bfloat16)
    assert hw.load(path).dtype == torch.bfloat16
    assert hw.load(path, dtype=torch.float32).dtype == torch.float32
    with pytest.raises(InputError, match="float23"):
        hw.load(path, dtype="float23")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "tensor"])
def test_a_device_that_is_not_there_is_one_clear_error(checkpoint, device):
    path = checkpoint("llama")
    with pytest.raises(InputError, match=re.escape(f"device={device!r}")) as caught:
        hw.load(path, device=device)
    assert "\n" not in str(caught.value)
    for model in (path, hw.load(path)):
        with pytest.raises(InputError, match=re.escape(f"device={device!r}")):
            hw.classify_heads(model, device=device)


@pytest.mark.parametrize("family", FEW)
def test_a_model_whose_weights_go_straight_to_the_device_is_the_one_read_on_the_host(checkpoint, family, monkeypatch):
    folder = checkpoint(family)
    for options in ({}, {"dtype": "bfloat16"}):
        whole = hw.load(folder, **options)
        with monkeypatch.context() as patch:
            patch.setattr(loading, "STRAIGHT", ("cpu",))
            straight = hw.load(folder, device="cpu", **options)
        assert torch.equal(straight.run(TEXTS[0]), whole.run(TEXTS[0]))
        assert (straight.fingerprint, straight.dtype, straight.spread) == (whole.fingerprint, whole.dtype, False)
        buffers = dict(whole.raw.named_buffers())
        assert buffers.keys() == dict(straight.raw.named_buffers()).keys()
        for name, buffer in straight.raw.named_buffers():
            assert torch.equal(buffer, buffers[name]), name
        assert not any(hasattr(module, "_hf_hook") for module in straight.raw.modules())


class StoppedError(Exception):
    """Raised in place of reading."""


@pytest.mark.parametrize(
    ("device", "own_code", "given"),
    [
        (torch.device("cpu"), False, None),
        (torch.device("mps"), False, None),
        (torch.device("cuda", 1), False, {"": torch.device("cuda", 1)}),
        (torch.device("cuda"), False, {"": torch.device("cuda")}),
        (torch.device("cuda"), True, None),
        (None, False, "auto"),
    ],
)
def test_only_weights_for_a_cuda_device_go_there_one_by_one(checkpoint, device, own_code, given, monkeypatch):
    seen = []

    def read(folder, **options):
        seen.append(options["device_map"])
        raise StoppedError

    monkeypatch.setattr(tf.AutoModelForCausalLM, "from_pretrained", read)
    folder = checkpoint("llama")
    with pytest.raises(ModelError, match="cannot be loaded"):
        loading.read_pretrained(folder, read_config(folder), None, own_code, device)
    assert seen == [given]


def test_of_weights_that_go_one_by_one_the_host_holds_a_few_at_a_time(checkpoint, monkeypatch):
    """Onto the device "meta", which keeps nothing: what is read and has not yet arrived there is counted."""
    arrive, lock, now, most, sizes = core._materialize_copy, threading.Lock(), [], [0], []

    def counted(tensor, device=None, dtype=None):
        size = math.prod(tensor.get_shape()) * 4
        with lock:
            now.append(size)
            sizes.append(size)
            most[0] = max(most[0], sum(now))
        there = arrive(tensor, device, dtype)
        with lock:
            now.remove(size)
        assert there.device == torch.device("meta")
        return there

    monkeypatch.setattr(core, "_materialize_copy", counted)
    monkeypatch.setattr(loading, "STRAIGHT", ("meta",))
    folder = checkpoint("llama")
    with pytest.raises(InputError, match="is not in memory"):
        loading.read_pretrained(folder, read_config(folder), None, False, torch.device("meta"))
    assert len(sizes) == len(load_file(folder / "model.safetensors"))
    assert most[0] <= 4 * max(sizes) < sum(sizes)


def test_a_sharded_checkpoint_loads(checkpoint, tmp_path):
    hf = tiny_model("mistral")
    hf.save_pretrained(tmp_path, max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = hw.load(tmp_path)
    batch = model.tokenize(TEXTS[0])
    torch.testing.assert_close(model.run(batch), reference_logits(hf, batch.tokens), rtol=0, atol=1e-5)


def test_an_absent_embedded_model_says_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.setattr("headwater.models.packaged.files", lambda package: tmp_path)
    for name in (None, "embedded", "embedded-instruct"):
        with pytest.raises(ModelError, match=r"python -m tools\.world train"):
            hw.load(name)


def test_an_unknown_name_offers_the_nearest_ones():
    with pytest.raises(ModelError, match="gpt2-xl'"):
        hw.load("gpt2-xll")
    for call in (hw.load, open_weights):
        with pytest.raises(ModelError, match="Did you mean 'embedded-instruct'"):
            call("embeded-instruct")


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_a_folder_that_is_not_there_is_named(name):
    with pytest.raises(ModelError, match="no folder"):
        hw.load(name)


def test_a_stray_json_with_sizes_does_not_turn_a_checkpoint_into_a_hooked_transformer(folder):
    before = hw.load(folder).fingerprint
    (folder / "a_probe.json").write_text(json.dumps({"d_model": 1, "n_layers": 1, "d_head": 1, "n_ctx": 1}))
    assert hw.load(folder).fingerprint == before


def test_a_file_is_not_a_checkpoint(folder):
    with pytest.raises(ModelError, match="is a file"):
        hw.load(folder / "config.json")


def test_something_else_is_refused():
    with pytest.raises(InputError, match="Cannot load an int"):
        hw.load(3)
    with pytest.raises(InputError, match=r"Cannot load a HookedModel: .*the model\.raw of a loaded model"):
        hw.load(hw.load())


def test_a_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        hw.load(folder)


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        hw.load(folder)


def test_pickled_weights_are_refused(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="pickled"):
        hw.load(folder)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_folder_without_tokenizer_is_refused_unless_one_is_given(family, checkpoint, tmp_path):
    path = shutil.copytree(checkpoint(family), tmp_path / "model")
    for file in path.glob("*token*"):
        file.unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        hw.load(path)
    assert hw.load(path, tokenizer=tiny_tokenizer()).tokenizer is not None
    assert hw.load(path, tokenizer=checkpoint(family)).tokenizer is not None


def test_truncated_weights_are_refused(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        hw.load(folder)


def test_weights_of_another_shape_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ModelError, match="shape"):
        hw.load(folder)


def test_a_missing_parameter_is_named_instead_of_drawn_at_random(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.v_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.v_proj"):
        hw.load(folder)


def test_layers_the_config_does_not_know_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ModelError, match="not used by any module of the config"):
        hw.load(folder)


def test_weights_that_are_not_numbers_are_refused_by_name(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj\.weight' has 1 of \d+ values NaN or infinite"):
        hw.load(folder)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused():
    with pytest.raises(ModelError, match="belongs to another model"):
        hw.load(tiny_model("llama", d_vocab=100), tokenizer=tiny_tokenizer())


def test_a_tokenizer_far_smaller_than_the_vocabulary_is_refused():
    with pytest.raises(ModelError, match="belongs to another model"):
        hw.load(tiny_model("llama", d_vocab=1000), tokenizer=tiny_tokenizer())


def test_a_model_without_tokenizer_takes_token_ids_only():
    model = hw.load(tiny_model("llama"))
    assert model.run([[5, 6, 7]]).shape == (1, 3, len(tiny_tokenizer()))
    with pytest.raises(InputError, match="no tokenizer"):
        model.run("Paris")


def test_a_damaged_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text('{"model":')
    with pytest.raises(ModelError, match="tokenizer"):
        hw.load(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_saved_tokenizer_is_read_as_it_was_saved_whatever_the_model_type(family, tmp_path):
    """AutoTokenizer would pick the model type's class, several of which rebuild the rules from the vocabulary."""
    words = [WORDS[i] for i in torch.randperm(len(WORDS))[:20].tolist()]
    tiny_folder(tmp_path, family)
    tokenizer = tokenizer_of(family)
    loaded = hw.load(tmp_path).tokenizer
    for text in (" ".join(words), "unknown Words, 1234 and ünïcode", " " + words[0]):
        assert loaded(text).input_ids == tokenizer(text).input_ids
        assert loaded.decode(loaded(text).input_ids) == tokenizer.decode(tokenizer(text).input_ids)
    assert loaded.special_tokens_map == tokenizer.special_tokens_map


@pytest.mark.skipif(EVERYWHERE, reason="beartype refuses these calls where all modules are wrapped")
def test_the_name_of_a_model_in_place_of_the_model_is_one_clear_error():
    prompt, metric = " Paris", hw.kl_divergence()
    questions, graph = hw.load_questions("properties", sample=1), hw.load_depth_graph()
    for call in (
        lambda: hw.patch("gpt2", prompt, prompt, sites="z", metric=metric),
        lambda: hw.knockout("gpt2", prompt, block=("last", 0), metric=metric),
        lambda: hw.answer("gpt2", questions),
        lambda: hw.trace_pathways("gpt2", None),
        lambda: hw.detect("gpt2", None),
        lambda: hw.token_statistics("gpt2", prompt),
        lambda: hw.memorization("gpt2", graph),
        lambda: hw.score_file("gpt2", __file__),
    ):
        with pytest.raises(hw.HeadwaterError) as told:
            call()
        assert str(told.value) == "model must be a HookedModel, as hw.load(...) returns; found a str."


def test_loading_fills_nothing_with_random_numbers_and_all_is_as_usual_afterwards(checkpoint):
    hf, folder, state = tiny_model("gpt2"), checkpoint("gpt2"), torch.get_rng_state()
    hw.load(hf, tokenizer=tiny_tokenizer())  # TransformerLens makes new modules of its fused matrices
    hw.load(folder)
    assert torch.equal(torch.get_rng_state(), state)
    new = torch.empty(400)
    with SkipWeightInit():
        torch.nn.init.normal_(new.zero_())
        assert not new.any()
        assert torch.nn.LayerNorm(3).weight.tolist() == [1, 1, 1]
    torch.nn.init.normal_(new)
    assert new.std() > 0.5
