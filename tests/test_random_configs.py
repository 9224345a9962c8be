"""Models of odd sizes: one layer, one head, grouped heads, tied and untied, against Hugging Face and their folders."""

import pytest
import torch
import transformers as tf

import headwater as hw
from headwater.models.weights.opening import open_weights
from tests import chance
from tests.tiny import tiny_tokenizer

BUILT = {
    "llama": tf.LlamaConfig, "qwen2": tf.Qwen2Config, "olmo": tf.OlmoConfig, "olmo2": tf.Olmo2Config,
    "phi3": tf.Phi3Config, "granite": tf.GraniteConfig, "cohere": tf.CohereConfig,
    "smollm3": tf.SmolLM3Config, "gemma": tf.GemmaConfig, "mistral": tf.MistralConfig,
}  # fmt: skip
SIZES = {"one-layer-one-head": (1, 1, 1), "odd": (3, 3, 1), "groups": (2, 6, 2), "every-head": (1, 5, 5)}
QUICK = (("llama", "odd", True), ("phi3", "groups", False), ("granite", "one-layer-one-head", True))
CASES = [(family, sizes, tied) for family in BUILT for sizes in SIZES for tied in (True, False)]


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("family", "sizes", "tied"), [pytest.param(*c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES]
)
def test_an_odd_model_gives_hugging_faces_logits_and_its_folder_the_factors_it_computes_with(
    family, sizes, tied, tmp_path
):
    n_layers, n_heads, n_kv_heads = SIZES[sizes]
    config = BUILT[family](
        vocab_size=len(tiny_tokenizer()),
        hidden_size=6 * n_heads,
        intermediate_size=11,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        max_position_embeddings=19,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        **({"head_dim": 6} if family == "gemma" else {}),
    )
    with chance.apart("odd model"):
        hf = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in hf.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    hf.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model, streamed = hw.load(tmp_path), open_weights(tmp_path)
    tokens = torch.randint(2, config.vocab_size, (2, 7))
    with torch.inference_mode():
        torch.testing.assert_close(model.run(tokens), hf(tokens).logits, rtol=0, atol=1e-4)
    assert streamed.fingerprint == model.fingerprint
    there = vars(open_weights(model).layer(n_layers - 1))
    for name, factor in vars(streamed.layer(n_layers - 1)).items():
        torch.testing.assert_close(factor, there[name], msg=name)
    assert torch.equal(streamed.unembedding(), open_weights(model).unembedding())
