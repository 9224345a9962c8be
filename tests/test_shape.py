"""The shape read from a config is the shape of the model built from it."""

import pytest
import transformers as tf

from headwater.errors import ModelError
from headwater.models.families import shape_of
from tests.tiny import tiny_model

GROUPED = {"llama", "llama-tied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"}


def test_the_shape_is_that_of_the_model_built_from_the_config(family):
    model = tiny_model(family, d_vocab=83)
    shape = shape_of(model.config)
    tensors = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert shape.architecture == type(model).__name__
    assert (shape.n_layers, shape.n_heads, shape.n_kv_heads) == (3, 4, 2 if family in GROUPED else 4)
    assert tuple(model.get_input_embeddings().weight.shape) == (shape.d_vocab, shape.d_model) == (83, 32)
    assert any(shape.d_mlp in sizes for name, sizes in tensors.items() if ".mlp." in name)
    assert any(shape.n_heads * shape.d_head in sizes for name, sizes in tensors.items() if ".0." in name)
    assert shape.n_ctx == 64
    assert shape.group_size == (2 if family in GROUPED else 1)
    assert shape.parallel_blocks == (family in {"neox", "phi"})


def test_a_multimodal_config_gives_the_shape_of_its_text_part():
    text = tf.Gemma3TextConfig(hidden_size=48, num_hidden_layers=5, num_attention_heads=4, head_dim=16, vocab_size=99)
    shape = shape_of(tf.Gemma3Config(text_config=text))
    assert (shape.architecture, shape.n_layers, shape.d_model) == ("Gemma3ForCausalLM", 5, 48)


def test_a_head_width_of_its_own_is_kept():
    config = tf.Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
    assert shape_of(config).d_head == 128


def test_an_unsupported_architecture_is_named_with_the_supported_ones():
    with pytest.raises(ModelError, match=r"'bert' is not supported; headwater reads gpt2, gpt_neox, phi"):
        shape_of(tf.BertConfig())
    with pytest.raises(ModelError, match="'xglm' is not supported"):
        shape_of(tf.XGLMConfig())
