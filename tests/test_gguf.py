"""GGUF files are read as llama.cpp's converter writes them: weights, tokenizer and numbers are transformers' own."""

import pytest
import torch
import transformers as tf

import headwater as hw
from headwater.models import open_weights
from tests.gguf_files import tiny_bpe, written

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
TEXTS = [" Paris is the capital of France 123", " cat 7 dogs"]


def random_model(name):
    """A model of random weights, none of which is 0 or 1."""
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
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
