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


def blocks_of(plain: transformers.PreTrainedModel) -> nn.ModuleList:
    """Return a model's blocks."""
    n_layers = plain.config.num_hidden_layers
    return next(one for one in plain.modules() if isinstance(one, nn.ModuleList) and len(one) == n_layers)


def out_of(block: nn.Module) -> nn.Module:
    """Return what maps the outputs of a block's heads to the residual stream."""
    names = dict(block.named_modules())
    return next(names[name] for name in OUT if name in names)


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
    outs, kept = [out_of(block) for block in blocks], []
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
    base, head = plain.base_model, plain.get_output_embeddings()
    norm = base.norm if hasattr(base, "norm") else base.ln_f
    last, tops, kls = out.logits[0].log_softmax(-1), [], []
    for state in out.hidden_states[1:-1]:
        log_p = head(norm(state[0])).log_softmax(-1)
        tops.append(log_p.topk(top_k).values.exp())
        kls.append((last.exp() * (last - log_p)).sum(-1))
    tops.append(last.topk(top_k).values.exp())
    kls.append(torch.zeros_like(kls[0]))
    return torch.stack(tops), torch.stack(kls)
