"""Print what sweeps are estimated to take in memory beside what they take: `python tools/sweep_memory.py`.

Each sweep runs in a fresh process, on GPT-2's 124M shape with random weights, in float32 on the CPU.
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine import in_fresh_process, peak_bytes
from benchmarks.patching import random_gpt2

import headwater as hw
from headwater.patching import footprint

METRICS = {"logit difference": hw.logit_difference(5, 9), "KL divergence": hw.kl_divergence()}
ALL_SITES = ["resid_pre", "attn_out", "mlp_out", "z", "q", "k", "v"]
SWEEPS: tuple[tuple[int, int, str, dict[str, Any]], ...] = (
    (8, 128, "logit difference", {"sites": "resid_pre", "over": "layer"}),
    (4, 256, "logit difference", {"sites": "resid_pre", "over": "layer"}),
    (4, 128, "KL divergence", {"sites": "resid_pre", "over": "layer"}),
    (4, 128, "logit difference", {"sites": ALL_SITES, "over": "layer"}),
    (4, 128, "logit difference", {"sites": "mlp_out", "over": "layer", "values": "mean"}),
    (4, 128, "logit difference", {"sites": "pattern", "over": "layer"}),
    (4, 256, "logit difference", {"sites": "z"}),
    (8, 128, "logit difference", {"sites": "z"}),
    (4, 128, "logit difference", {"sites": "resid_pre", "over": "layer", "method": "attribution"}),
    (4, 256, "logit difference", {"sites": "z", "method": "attribution"}),
)


@torch.inference_mode(False)
def measured(n_pairs: int, length: int, metric: str, options: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes that were estimated for all pairs, and those that the process grew by."""
    model = random_gpt2("cpu")
    model.run([[1, 2]])  # what the libraries allocate once is no part of a sweep
    clean, corrupted = torch.randint(1000, model.shape.d_vocab, (2, n_pairs, length)).tolist()
    estimates, estimate = [], footprint.example_bytes

    def noted(*given: Any, **named: Any) -> int:
        estimates.append(estimate(*given, **named))
        return estimates[-1]

    footprint.example_bytes = noted
    peak = peak_bytes(lambda: hw.patch(model, clean, corrupted, metric=METRICS[metric], progress=False, **options))
    if peak is None:
        raise SystemExit("This system does not say how much memory a process takes.")
    return n_pairs * max(estimates), peak


def main() -> None:
    """Print a row per sweep."""
    print("| sweep | pairs × tokens | estimate, MiB | taken, MiB | ratio |\n|---|---|---|---|---|")
    for n_pairs, length, metric, options in SWEEPS:
        estimate, taken = in_fresh_process(measured, n_pairs, length, metric, options)
        what = ", ".join(f"{name} {value}" for name, value in options.items())
        numbers = f"{estimate / 2**20:,.0f} | {taken / 2**20:,.0f} | {estimate / taken:.2f}"
        print(f"| {what}, {metric} | {n_pairs} × {length} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
