"""Tiny random models of every supported architecture, built offline, with norms and biases that are not trivial."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import headwater as hw
from tests import chance

WORDS = tuple(
    "Paris Rome Madrid Berlin France Italy Spain Germany cat dog chat chien big bigger small smaller go went see saw "  # noqa: SIM905
    "the of is in capital A B C one two three four five six".split()
)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GATED = SIZES | {"intermediate_size": 48}
GROUPED = GATED | {"num_key_value_heads": 2, "head_dim": 8}

CONFIGS: dict[str, Callable[[int], tf.PretrainedConfig]] = {
    "gpt2": lambda v: tf.GPT2Config(vocab_size=v, n_embd=32, n_layer=3, n_head=4, n_positions=64),
    "neox": lambda v: tf.GPTNeoXConfig(vocab_size=v, **GATED, rotary_pct=0.25),
    "neox-sequential": lambda v: tf.GPTNeoXConfig(vocab_size=v, **GATED, use_parallel_residual=False),
    "phi": lambda v: tf.PhiConfig(vocab_size=v, **GATED, partial_rotary_factor=0.5),
    "llama": lambda v: tf.LlamaConfig(vocab_size=v, **GROUPED),
    "llama-tied": lambda v: tf.LlamaConfig(vocab_size=v, **GROUPED, tie_word_embeddings=True),
    "mistral": lambda v: tf.MistralConfig(vocab_size=v, **GROUPED, sliding_window=8),
    "mixtral": lambda v: tf.MixtralConfig(vocab_size=v, **GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": lambda v: tf.Qwen2Config(vocab_size=v, **{k: w for k, w in GROUPED.items() if k != "head_dim"}),
    "qwen3": lambda v: tf.Qwen3Config(vocab_size=v, **GROUPED),
    "gemma2": lambda v: tf.Gemma2Config(vocab_size=v, **GROUPED, query_pre_attn_scalar=8, sliding_window=8),
    "gemma3": lambda v: tf.Gemma3TextConfig(
        vocab_size=v,
        **GROUPED,
        query_pre_attn_scalar=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "olmo2": lambda v: tf.Olmo2Config(vocab_size=v, **{k: w for k, w in GROUPED.items() if k != "head_dim"}),
}
FAMILIES = tuple(name for name in CONFIGS if name not in ("mixtral", "olmo2"))
"""Those that every test of architectures goes through; tests/test_families.py has the others."""
FEW = ("gpt2", "phi", "llama", "gemma2")
"""Of each kind one, for what is compared with the model itself: learned positions, parallel blocks, grouped heads, and
windows with norms after each part."""


def tiny_tokenizer(words: Sequence[str] = WORDS, bos: bool = True) -> tf.PreTrainedTokenizerFast:
    """A byte-level tokenizer in which each of `words`, with its leading space, is one token; anything else is bytes.

    It writes `<s>` before a text, or with `bos=False` nothing.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [("<s>", 0.0), ("<pad>", 0.0)] + [(c, -20.0) for c in alphabet] + [("Ġ" + word, -1.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<s>",
        pad_token="<pad>",
        name_or_path="tiny",
        add_bos_token=bos,
    )


def tokenizer_of(family: str) -> tf.PreTrainedTokenizerFast:
    """A tokenizer that writes before a text what the published ones of a family do: some token, or nothing."""
    return tiny_tokenizer(bos=not family.startswith(("gpt2", "neox", "phi", "qwen")))


def tiny_model(
    family: str, d_vocab: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> tf.PreTrainedModel:
    """A random model of one architecture; every parameter, norms and biases too, is drawn afresh.

    `changes` are made to its configuration, and change no weight.
    """
    config = CONFIGS[family](d_vocab or len(tiny_tokenizer()))
    for name, value in changes.items():
        setattr(config, name, value)
    config.bos_token_id = config.eos_token_id = 0
    config.pad_token_id = 1
    config._attn_implementation = "eager"
    with chance.apart("tiny model"):  # transformers draws weights that are drawn again below
        model = tf.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    generator = torch.Generator().manual_seed(seed)
    gain = 0 if family.startswith("gemma") else 1  # Gemma stores the gains of its norms less 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm_gain = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(gain + 0.2 * noise if is_norm_gain else 0.2 * noise)
    return model.to(dtype).eval()


@cache
def tiny_hooked(family: str, seed: int = 0) -> hw.HookedModel:
    """A tiny model whose texts begin with `<s>`, loaded once in a process: for tests that leave it as it is."""
    return hw.load(tiny_model(family, seed=seed), tokenizer=tiny_tokenizer())


embedded = cache(hw.load)
"""The embedded model, loaded once in a process: for tests that leave it as it is."""


def tiny_folder(folder: Path, family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Save a tiny model and its tokenizer as an ordinary checkpoint folder."""
    tiny_model(family, seed=seed, dtype=dtype).save_pretrained(folder)
    tokenizer_of(family).save_pretrained(folder)
    return folder


def padded_batch(model):
    """Three rows of random tokens, of different length, padded on the right."""
    n_ctx = min(30, model.shape.n_ctx)
    tokens = torch.randint(model.shape.d_vocab, (3, n_ctx))
    return model.tokenize(tokens, mask=torch.arange(n_ctx) < torch.tensor([[n_ctx], [n_ctx // 2], [2]]))


def counted_runs(monkeypatch: Any) -> dict[str, int]:
    """Count the runs of models as `made`; the one beyond `at_most` is interrupted."""
    runs, run = {"made": 0, "at_most": 10**9}, hw.HookedModel.run

    def counted(*args, **options):
        runs["made"] += 1
        if runs["made"] > runs["at_most"]:
            raise KeyboardInterrupt
        return run(*args, **options)

    monkeypatch.setattr(hw.HookedModel, "run", counted)
    return runs
