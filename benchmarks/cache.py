"""Suite `cache`: activations of a batch kept by `model.cache`, beside TransformerLens's `run_with_cache`.

Question: how long does it take, and how much does it keep, to have what an experiment reads? Twice: the residual stream
after every layer and every attention pattern; and the residual stream at each text's last token alone.

The model has GPT-2's 124M shape and random weights unless `--model` names one. The peer is `run_with_cache` on the same
model object with a filter of just those activations; for the last token it slices afterwards, as its users do. nnsight,
where it is installed, saves the same residual streams in one trace of the same weights.
"""

from collections.abc import Callable, Iterator

import torch
import transformers
from torch import Tensor

from benchmarks.machine import Machine, Work, in_fresh_process, peak_bytes, seconds
from benchmarks.models import Chosen, are_equal, block_weights, chosen_model, titled, weights_note
from benchmarks.peers import installed
from benchmarks.report import Row
from headwater.models.hooked import HookedModel

BATCH, LENGTH, ROUNDS = 8, 128, 3


def run(machine: Machine, device: str, model: Chosen = None) -> Iterator[Row]:
    """Yield the suite's rows: everything, then the last token, then (where it is installed) against nnsight."""
    loaded = chosen_model(model, device)
    whole = {"sites": ["resid_post", "pattern"]}
    last = {"sites": "resid_post", "positions": [-1]}
    what = "residual stream and patterns of every layer", "residual stream at the last token"
    yield _row(machine, device, loaded, model, what[0], whole, "run_with_cache", lens_cache)
    yield _row(machine, device, loaded, model, what[1], last, "run_with_cache", lens_last)
    if not isinstance(model, str) and installed("nnsight"):
        yield _row(machine, device, loaded, model, what[1], last, "nnsight", nnsight_last(loaded, device))


Kept = tuple[Tensor, Tensor | None]


def cached(model: HookedModel, device: str, asked: dict[str, object]) -> Kept:
    """Headwater: what is asked for, of the suite's texts."""
    cache = model.cache(_tokens(model), **asked, device=device, progress=False)  # type: ignore[arg-type]
    return cache.residual, cache.attention if "pattern" in asked["sites"] else None  # type: ignore[operator]


def _tokens(model: HookedModel) -> Tensor:
    length = min(LENGTH, model.shape.n_ctx)
    return torch.randint(model.shape.d_vocab, (BATCH, length), generator=torch.Generator().manual_seed(0))


def _peak(device: str, chosen: Chosen, asked: dict[str, object]) -> int | None:
    model = chosen_model(chosen, device)
    model.run([[1, 2]])  # what the libraries allocate once is not workspace
    return peak_bytes(lambda: cached(model, device, asked), device)


def lens_cache(model: HookedModel, tokens: Tensor) -> Kept:
    """TransformerLens: residual streams and patterns of every layer."""
    names = [f"blocks.{layer}.{name}" for layer in range(model.shape.n_layers) for name in _WHOLE]
    _, cache = model.raw.run_with_cache(tokens, names_filter=names)
    residual, patterns = (
        torch.stack([cache[f"blocks.{layer}.{name}"] for layer in range(model.shape.n_layers)]) for name in _WHOLE
    )
    return residual, patterns


_WHOLE = ("hook_resid_post", "attn.hook_pattern")


def lens_last(model: HookedModel, tokens: Tensor) -> Kept:
    """TransformerLens: residual streams, sliced afterwards."""
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(model.shape.n_layers)]
    _, cache = model.raw.run_with_cache(tokens, names_filter=names)
    return torch.stack([cache[name][:, -1:] for name in names]), None


def nnsight_last(model: HookedModel, device: str) -> Callable[[HookedModel, Tensor], Kept]:
    """Wrap, in nnsight, a transformers model of the same weights; every block's output is saved in one trace."""
    import nnsight

    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(model.config).eval().to(device)
    wrapped = nnsight.NNsight(plain)

    def last(_: HookedModel, tokens: Tensor) -> Kept:
        with wrapped.trace(tokens):
            saved = nnsight.save([])
            for block in wrapped.transformer.h:
                output = block.output
                saved.append((output[0] if isinstance(output, tuple) else output)[:, -1:])
        return torch.stack(saved), None

    return last


def _row(
    machine: Machine,
    device: str,
    model: HookedModel,
    chosen: Chosen,
    what: str,
    asked: dict[str, object],
    name: str,
    peer: Callable[[HookedModel, Tensor], Kept],
) -> Row:
    tokens = _tokens(model)
    there = tokens.to(device)

    def ours() -> Kept:
        return cached(model, device, asked)

    found, expected = ours(), peer(model, there)
    agrees = all(
        are_equal(chosen, mine, theirs) for mine, theirs in zip(found, expected, strict=True) if theirs is not None
    )
    kept = sum(part.nbytes for part in found if part is not None)
    work = _least_work(model, tokens, kept)
    return Row(
        name=f"cache: {what}, {titled(chosen)}, {len(tokens)} texts of {tokens.shape[1]} tokens",
        peer=f"{name}, the same activations",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=min(seconds(lambda: peer(model, there), device) for _ in range(ROUNDS)),
        headwater_s=min(seconds(ours, device) for _ in range(ROUNDS)),
        agrees=agrees,
        peak_bytes=in_fresh_process(_peak, device, chosen, asked),
        target="no slower, equal to 1e-4",
        note=f"{weights_note(chosen)}; keeps {kept / 2**20:.1f} MB; best of {ROUNDS} of each",
    )


def _least_work(model: HookedModel, tokens: Tensor, kept: int) -> Work:
    """The blocks' arithmetic on every token; no unembedding."""
    shape, weights = model.shape, block_weights(model)
    attention = 4 * tokens.shape[1] * shape.n_heads * shape.d_head
    operations = tokens.numel() * (2 * weights + shape.n_layers * attention)
    return Work(operations, 4 * weights + kept, done=tokens.numel(), unit="tokens")
