"""Suite `scaling`: how the time of likelihood statistics grows with vocabulary, tokens, layers, length and batch.

The kernel: five statistics per token at four vocabularies and three numbers of tokens, beside log_softmax over full
logits. The whole path: `hw.token_statistics` of a model of GPT-2's 124M shape with random weights, beside what it
replaces: a run with every layer's residual stream cached, then log_softmax over the logits read from each.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import headwater as hw
from benchmarks import likelihood
from benchmarks.machine import Machine, Work, in_fresh_process, peak_bytes, seconds
from benchmarks.peers import min_k as peer
from benchmarks.report import Row
from headwater.models.hooked import HookedModel
from headwater.models.loading import load

KERNEL = likelihood.LikelihoodShape("kernel", tokens=256, more_tokens=0, d_model=512, d_vocab=64_000, exact_tokens=8)
VOCABULARIES = (32_000, 64_000, 128_256, 256_000)
TOKENS = (64, 1024)
CASES = ((1, 64, 1), (1, 256, 1), (1, 1024, 1), (4, 128, 1), (16, 128, 1), (2, 128, 4), (2, 128, 12))
"""Batch, length, layers."""


def run(
    machine: Machine, device: str, model: HookedModel | None = None, kernel: likelihood.LikelihoodShape = KERNEL
) -> Iterator[Row]:
    """Yield the suite's rows: the kernel's, then the whole path's."""
    shares = [vocabulary / KERNEL.d_vocab for vocabulary in VOCABULARIES]
    for share in shares:
        yield _kernel(machine, device, replace(kernel, d_vocab=int(share * kernel.d_vocab)))
    for tokens in TOKENS:
        yield _kernel(machine, device, replace(kernel, tokens=max(1, tokens * kernel.tokens // KERNEL.tokens)))
    model = model or random_gpt2_with_words(device)
    for batch, length, n_layers in CASES:
        if n_layers <= model.shape.n_layers and length <= model.shape.n_ctx:
            yield _path(machine, device, model, batch, length, n_layers)


def _kernel(machine: Machine, device: str, shape: likelihood.LikelihoodShape) -> Row:
    inputs = likelihood.random_inputs(shape, shape.tokens, device)
    hidden, W_U = inputs.hidden.float(), inputs.head.W_U.float()
    numbers = shape.d_model * shape.d_vocab
    work = Work(2 * shape.tokens * numbers, 2 * numbers, done=shape.tokens, unit="tokens", half=True)
    return Row(
        name=f"scaling: five statistics, V = {shape.d_vocab:,}, {shape.tokens:,} tokens, width {shape.d_model}",
        peer="log_softmax over full float32 logits",
        floor_s=machine.floor_of(work),
        work=work,
        agrees=likelihood.is_accurate(shape, inputs),
        peer_s=likelihood.median_seconds(lambda: peer.usual(hidden, W_U, inputs.target), device),
        headwater_s=likelihood.median_seconds(lambda: likelihood.our_statistics(inputs), device),
        peak_bytes=in_fresh_process(likelihood.workspace, shape, shape.tokens, device),
        target="none: how it grows",
        note="random numbers, bfloat16 inputs",
    )


def random_gpt2_with_words(device: str, **sizes: int) -> HookedModel:
    """Return a model of GPT-2's shape (124M unless sizes say otherwise) with random weights and words w0, w1, ..."""
    config = transformers.GPT2Config(**sizes)
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", name_or_path="words")
    return load(transformers.AutoModelForCausalLM.from_config(config).eval(), tokenizer=tokenizer, device=device)


def _path(machine: Machine, device: str, model: HookedModel, batch: int, length: int, n_layers: int) -> Row:
    shape, tokens = model.shape, _tokens(model, batch, length)
    layers = list(range(shape.n_layers - n_layers, shape.n_layers))

    def ours() -> Tensor:
        return measured(model, batch, length, n_layers)

    def theirs() -> Tensor:
        there = tokens.to(device)
        names = [f"blocks.{layer}.hook_resid_post" for layer in layers]
        _, cache = model.raw.run_with_cache(there, names_filter=names)
        found = []
        for name in names:
            hidden = model.raw.ln_final(cache[name][:, :-1]).flatten(0, 1)
            found.append(peer.usual(hidden, model.raw.unembed.W_U, there[:, 1:].flatten()).log_probability)
        return torch.cat(found)

    agrees = bool((ours() - theirs().double().cpu()).abs().max() < 1e-3)
    scored = batch * (length - 1)
    per_token = 24 * shape.n_layers * shape.d_model**2 + 2 * n_layers * shape.d_model * shape.d_vocab
    weights = 12 * shape.n_layers * shape.d_model**2 + shape.d_model * shape.d_vocab
    work = Work(scored * per_token, 4 * weights, done=scored * n_layers, unit="tokens x layers")
    return Row(
        name=f"scaling: token_statistics, batch {batch}, length {length}, {n_layers} of {shape.n_layers} layers",
        peer="run_with_cache, then log_softmax over each layer's logits",
        floor_s=machine.floor_of(work),
        work=work,
        agrees=agrees,
        peer_s=min(seconds(theirs, device) for _ in range(2)),
        headwater_s=min(seconds(ours, device) for _ in range(2)),
        peak_bytes=in_fresh_process(_peak, device, batch, length, n_layers),
        target="none: how it grows",
        note="GPT-2 124M shape, random weights; best of 2 of each",
    )


def measured(model: HookedModel, batch: int, length: int, n_layers: int) -> Tensor:
    """Return the log-probabilities that headwater finds, by layer, text and position."""
    texts = [" ".join(f"w{token}" for token in row) for row in _tokens(model, batch, length).tolist()]
    layers = list(range(model.shape.n_layers - n_layers, model.shape.n_layers))
    found = hw.token_statistics(model, texts, layers=layers, batch_size=batch, progress=False).table
    return torch.tensor(found.sort_values(["layer", "text", "position"])["log_probability"].to_numpy())


def _tokens(model: HookedModel, batch: int, length: int) -> Tensor:
    return torch.randint(model.shape.d_vocab, (batch, length), generator=torch.Generator().manual_seed(0))


def _peak(device: str, batch: int, length: int, n_layers: int) -> int | None:
    model = random_gpt2_with_words(device)
    measured(model, 1, 2, 1)  # what the libraries allocate once is not workspace
    return peak_bytes(lambda: measured(model, batch, length, n_layers), device)
