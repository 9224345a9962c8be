"""The likelihood suite: statistics of every token at a vocabulary of 128,256, without logits of all of it.

Hidden states and an unembedding in bfloat16, random, of Llama 3's vocabulary. Headwater gives the five statistics from
one pass over tiles; the peers make the logits of every token first. Headwater's workspace is measured at two lengths:
it must not grow. `agrees` compares with float64 on a sample of tokens, to 1e-5. On a GPU fused kernels for training,
which give the log-probability alone, stand beside it where they are installed (`peers.fused_cross_entropy`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.machine import Machine, Work, in_fresh_process, on_gpu, peak_bytes, seconds
from benchmarks.peers import fused_cross_entropy
from benchmarks.peers import min_k as peer
from benchmarks.report import Row
from headwater.kernels import likelihood, likelihood_blocked
from headwater.kernels.likelihood import UnembeddingHead
from headwater.likelihood.formulas import TextTokens, min_k, min_k_plus_plus
from headwater.likelihood.scores import SHARES

TARGET = "workspace <= 64 MB for any T, no [T, V] tensor, 1e-5; on a GPU <= 1.2 x the bare product"
ROUNDED_LOGITS = 0.1
"""How far a log-probability may be off whose logits were rounded to bfloat16."""
NUMBERS = likelihood.TokenStatistics._fields[:-1]
SCORED_FROM = ("log_probability", "entropy", "variance", "top1_log_probability")


@dataclass(frozen=True)
class LikelihoodShape:
    """Sizes: how many tokens are scored, in the timed run and in the longer one whose memory is compared."""

    name: str
    tokens: int
    more_tokens: int
    d_model: int
    d_vocab: int
    exact_tokens: int = 32


LLAMA3_VOCABULARY = LikelihoodShape("V = 128,256", tokens=512, more_tokens=4096, d_model=512, d_vocab=128_256)
LLAMA3_8B = LikelihoodShape(
    "V = 128,256 (Llama-3-8B shape)", tokens=4096, more_tokens=8192, d_model=4096, d_vocab=128_256
)


@dataclass(frozen=True)
class Inputs:
    """Hidden states after the final norm, W_U and the tokens that came."""

    hidden: Tensor
    head: UnembeddingHead
    target: Tensor


def random_inputs(shape: LikelihoodShape, tokens: int, device: str) -> Inputs:
    """Return random inputs whose distributions are neither flat nor certain."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, shape.d_model, generator=generator)
    W_U = 4 * torch.randn(shape.d_vocab, shape.d_model, generator=generator) / shape.d_model**0.5
    target = torch.randint(shape.d_vocab, (tokens,), generator=generator)
    head = UnembeddingHead(W_U.to(device, torch.bfloat16).T)
    return Inputs(hidden.to(device, torch.bfloat16), head, target.to(device))


def run(machine: Machine, device: str, shape: LikelihoodShape | None = None) -> Iterator[Row]:
    """Yield the suite's rows: the statistics, and Min-K% and Min-K%++ of one text at eight shares."""
    shape = shape or (LLAMA3_8B if on_gpu(device) else LLAMA3_VOCABULARY)
    short, long = (in_fresh_process(workspace, shape, n, device) for n in (shape.tokens, shape.more_tokens))
    inputs = random_inputs(shape, shape.tokens, device)
    wide = Inputs(inputs.hidden.float(), UnembeddingHead(inputs.head.W_U.float()), inputs.target)
    operations = 2 * shape.tokens * shape.d_model * shape.d_vocab
    work = Work(operations, 2 * shape.d_model * shape.d_vocab, done=shape.tokens, unit="tokens", half=True)
    size = f"{shape.tokens:,} tokens, width {shape.d_model}, {shape.name}, bfloat16 inputs"
    growth = "not measured" if short is None or long is None else f"{short / 2**20:.0f} and {long / 2**20:.0f} MB"
    agrees = is_accurate(shape, inputs), _scores_agree(inputs, wide)
    ours = median_seconds(lambda: our_statistics(inputs), device)
    product = inputs if on_gpu(device) else wide
    product_s = median_seconds(lambda: product.hidden @ product.head.W_U, device)
    yield Row(
        name=f"likelihood: five statistics, {size}",
        peer="log_softmax over full float32 logits",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=median_seconds(lambda: peer.usual(wide.hidden, wide.head.W_U, wide.target), device),
        headwater_s=ours,
        agrees=agrees[0],
        peak_bytes=long,
        target=TARGET,
        note=(
            f"workspace at {shape.tokens:,} and {shape.more_tokens:,} tokens: {growth}; logits would take "
            f"{4 * shape.more_tokens * shape.d_vocab / 2**20:,.0f} MB; {ours / product_s:.2f} x the bare "
            f"{str(product.hidden.dtype).removeprefix('torch.')} product"
        ),
    )
    yield Row(
        name=f"likelihood: Min-K% and Min-K%++ at {len(SHARES)} shares, {size}",
        peer="Min-K%++ as published, naive",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=median_seconds(lambda: peer.min_k_plus_plus(wide.hidden, wide.head.W_U, wide.target, SHARES), device),
        headwater_s=median_seconds(lambda: our_scores(inputs), device),
        agrees=agrees[1],
        peak_bytes=long,
        target=TARGET,
        note="the peer gets float32 copies of the inputs for nothing; headwater converts tiles of bfloat16",
    )
    if on_gpu(device):
        yield from beside_fused_kernels(machine, device, inputs, size, work)


def beside_fused_kernels(machine: Machine, device: str, inputs: Inputs, size: str, work: Work) -> Iterator[Row]:
    """Yield a row for each fused kernel that is installed, all five statistics beside its one."""
    by_token = inputs.head.W_U.T
    for name, kernel in fused_cross_entropy.installed().items():
        theirs = partial(kernel, inputs.hidden, by_token, inputs.target)
        yield Row(
            name=f"likelihood: five statistics, {size}",
            peer=f"{name}, the log-probability alone",
            floor_s=machine.floor_of(work),
            work=work,
            peer_s=median_seconds(theirs, device),
            headwater_s=median_seconds(lambda: our_statistics(inputs), device),
            agrees=torch.allclose(our_statistics(inputs).log_probability, theirs(), rtol=0, atol=ROUNDED_LOGITS),
            peak_bytes=None,
            target=">= 0.8 x",
            note="the peer may round logits to bfloat16",
        )


def our_statistics(inputs: Inputs) -> likelihood.TokenStatistics:
    """Headwater: the five statistics."""
    return likelihood_blocked.token_statistics(inputs.hidden, inputs.head, inputs.target)


def our_scores(inputs: Inputs) -> tuple[list[float], list[float]]:
    """Headwater: Min-K% and Min-K%++ at every share."""
    statistics = our_statistics(inputs)
    found = {name: getattr(statistics, name).double().cpu().numpy() for name in NUMBERS}
    text = TextTokens(**{name: found[name] for name in SCORED_FROM}, zlib_bytes=1)
    return min_k(text, SHARES).tolist(), min_k_plus_plus(text, SHARES).tolist()


def is_accurate(shape: LikelihoodShape, inputs: Inputs) -> bool:
    """Whether every number is within 1e-5 (absolute, or of its size) of float64 logits, a few tokens at a time."""
    found = our_statistics(inputs)
    step = max(1, len(inputs.target) // shape.exact_tokens)
    exact = likelihood.token_statistics_reference(inputs.hidden[::step], inputs.head, inputs.target[::step])
    close = all(
        torch.allclose(getattr(found, name)[::step].double(), getattr(exact, name), rtol=1e-5, atol=1e-5)
        for name in NUMBERS
    )
    return close and int((found.rank[::step] - exact.rank).abs().max()) <= 1


def _scores_agree(inputs: Inputs, wide: Inputs) -> bool:
    ours, theirs = our_scores(inputs), peer.min_k_plus_plus(wide.hidden, wide.head.W_U, wide.target, SHARES)
    return all(
        torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-4, atol=1e-4)
        for a, b in zip(ours, theirs, strict=True)
    )


def median_seconds(work: Callable[[], object], device: str, times: int = 3) -> float:
    """Return the median of a few runs, after one that does not count."""
    work()
    return sorted(seconds(work, device) for _ in range(times))[times // 2]


def workspace(shape: LikelihoodShape, tokens: int, device: str) -> int | None:
    """Peak memory above the inputs."""
    inputs = random_inputs(shape, tokens, device)
    small = Inputs(inputs.hidden[:2], UnembeddingHead(inputs.head.W_U[:, :256]), inputs.target[:2] % 256)
    our_statistics(small)  # what the libraries allocate once is not workspace
    return peak_bytes(lambda: our_statistics(inputs), device)
