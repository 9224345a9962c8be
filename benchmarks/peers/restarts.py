"""Sweeps and the logit lens in a few lines of PyTorch, as strong as they get without a library.

A sweep keeps the residual stream in front of every block of both runs. For each layer it runs the blocks from there on
alone: those before it return their input, and the patched block reads the rows. The model is a plain
transformers model whose blocks are a module list (Llama, SmolLM2, Gemma, Qwen, GPT-2, ...).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

OUT = ("self_attn.o_proj", "attn.c_proj", "attention.dense")
"""What maps the heads' outputs to the residual stream, by the names of the families."""
MLP_NORM = ("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2")
MLP_OUT = ("post_feedforward_layernorm", "mlp")
"""The norm that an MLP reads, and what it adds to the residual stream: the first name that a block has."""


def blocks_of(plain: transformers.PreTrainedModel) -> nn.ModuleList:
    """Return a model's blocks."""
    n_layers = plain.config.num_hidden_layers
    return next(one for one in plain.modules() if isinstance(one, nn.ModuleList) and len(one) == n_layers)


def part_of(block: nn.Module, among: tuple[str, ...]) -> nn.Module:
    """Return the first of these parts that a block has."""
    names = dict(block.named_modules())
    return next(names[name] for name in among if name in names)


def final_norm(plain: transformers.PreTrainedModel) -> nn.Module:
    """Return the norm in front of the unembedding."""
    base = plain.base_model
    return base.norm if hasattr(base, "norm") else base.ln_f


@contextmanager
def hooked(*hooks: tuple[nn.Module, Any]) -> Iterator[None]:
    """Put hooks in front of modules, each of which may replace the first argument."""
    handles = [
        module.register_forward_pre_hook(lambda module, args, hook=hook: (hook(args[0]), *args[1:]))
        for module, hook in hooks
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def starting_at(blocks: nn.ModuleList, layer: int, rows: Tensor) -> Iterator[None]:
    """Let runs begin in front of a block, with these rows `row position d_model`."""
    skipped = blocks[:layer]
    for block in skipped:
        block.forward = lambda residual, *args, **options: residual
    try:
        with hooked((blocks[layer], lambda residual: rows)):
            yield
    finally:
        for block in skipped:
            del block.forward


def last_logits(plain: transformers.PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the logits of the last token of each row."""
    return plain(tokens.to(plain.device), use_cache=False, logits_to_keep=1).logits[:, -1]


def residuals(plain: transformers.PreTrainedModel, tokens: Tensor) -> list[Tensor]:
    """Return the residual stream in front of every block, `row position d_model` each."""
    kept: list[Tensor] = []
    with hooked(*((block, lambda residual: kept.append(residual) or residual) for block in blocks_of(plain))):
        last_logits(plain, tokens)
    return kept


def by_position(
    plain: transformers.PreTrainedModel, clean: Tensor, corrupted: Tensor, answers: tuple[int, int]
) -> Tensor:
    """Return the difference of two logits after each patch of the residual stream, `layer position`."""
    blocks, here = blocks_of(plain), torch.arange(len(clean))
    before, values = (residuals(plain, tokens[None]) for tokens in (corrupted, clean))
    found = []
    for layer in range(len(blocks)):
        rows = before[layer].repeat(len(clean), 1, 1)
        rows[here, here] = values[layer][0]
        with starting_at(blocks, layer, rows):
            logits = last_logits(plain, corrupted.repeat(len(clean), 1))
        found.append(logits[:, answers[0]] - logits[:, answers[1]])
    return torch.stack(found)


def by_head(
    plain: transformers.PreTrainedModel, clean: Tensor, corrupted: Tensor, answers: Tensor, n_heads: int
) -> Tensor:
    """Return the difference of two logits after each patch of a head's output at the last token, `layer head pair`."""
    blocks, n_pairs = blocks_of(plain), len(clean)
    outs, kept = [part_of(block, OUT) for block in blocks], []
    with hooked(*((out, lambda z: kept.append(z[:, -1]) or z) for out in outs)):
        last_logits(plain, clean)
    before, (right, wrong) = residuals(plain, corrupted), answers.repeat(1, n_heads).to(plain.device)
    every, found = torch.arange(n_heads * n_pairs), []
    for layer, out in enumerate(outs):
        values = kept[layer].unflatten(-1, (n_heads, -1))

        def write(z: Tensor, values: Tensor = values) -> Tensor:
            z = z.unflatten(-1, (n_heads, -1)).clone()
            for head in range(n_heads):
                z[head * n_pairs : (head + 1) * n_pairs, -1, head] = values[:, head]
            return z.flatten(-2)

        with starting_at(blocks, layer, before[layer].repeat(n_heads, 1, 1)), hooked((out, write)):
            logits = last_logits(plain, corrupted.repeat(n_heads, 1))
        found.append((logits[every, right] - logits[every, wrong]).view(n_heads, n_pairs))
    return torch.stack(found)


def lens(plain: transformers.PreTrainedModel, prompt: list[int], top_k: int) -> tuple[Tensor, Tensor]:
    """Return what each layer would predict: top probabilities `layer position k`, KL(last ‖ layer) `layer position`."""
    out = plain(torch.tensor([prompt], device=plain.device), output_hidden_states=True, use_cache=False)
    norm, head = final_norm(plain), plain.get_output_embeddings()
    last, tops, kls = out.logits[0].log_softmax(-1), [], []
    for state in out.hidden_states[1:-1]:
        log_p = head(norm(state[0])).log_softmax(-1)
        tops.append(log_p.topk(top_k).values.exp())
        kls.append((last.exp() * (last - log_p)).sum(-1))
    tops.append(last.topk(top_k).values.exp())
    kls.append(torch.zeros_like(kls[0]))
    return torch.stack(tops), torch.stack(kls)


def mlp_changes(plain: transformers.PreTrainedModel, clean: Tensor, corrupted: Tensor) -> list[Tensor]:
    """Return what each MLP adds in the corrupted run less what it adds in the clean one, `1 position d_model` each."""
    kept: list[Tensor] = []
    parts = [part_of(block, MLP_OUT) for block in blocks_of(plain)]
    handles = [part.register_forward_hook(lambda module, args, output: kept.append(output)) for part in parts]
    try:
        for tokens in (corrupted, clean):
            last_logits(plain, tokens[None])
    finally:
        for handle in handles:
            handle.remove()
    return [other - own for other, own in zip(kept[: len(parts)], kept[len(parts) :], strict=True)]


def by_edge(plain: transformers.PreTrainedModel, clean: Tensor, change: Tensor, reader: int | None) -> Tensor:
    """Return the last logits of the clean run where one MLP, or the unembedding (None), reads a changed sender."""
    norm = final_norm(plain) if reader is None else part_of(blocks_of(plain)[reader], MLP_NORM)
    with hooked((norm, lambda residual: residual + change[:, -residual.shape[1] :])):
        return last_logits(plain, clean[None])
