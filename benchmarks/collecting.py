"""Suite `collecting`: two sites of many texts to disk by `model.cache(..., out=)`, beside a loop of `run_with_cache`.

Question: how long does it take until the activations of texts of every length, one of them far longer than the rest,
lie in files, of real tokens alone? The lengths follow a skewed law (most texts have 8 to 40 tokens); the longest
fills the context of the suite.

The peer is the loop that is written for it with TransformerLens: batches in the order given, padded on the right with
their mask, `run_with_cache` with a filter of just those activations that stops after the last layer requested where
that is not the model's last, the real tokens of each batch saved as safetensors. Both write float32. The texts of a CPU
run are fewer (`TEXTS`): both sides take time in proportion to them, and memory is reported.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.machine import Machine, Work, in_fresh_process, peak_bytes, seconds
from benchmarks.models import Chosen, are_equal, block_weights, chosen_model, titled, weights_note
from benchmarks.report import Row
from headwater.models.hooked import HookedModel

TEXTS = {"cpu": 320, "cuda": 10_000}
LONGEST, BATCH, ROUNDS = 512, 16, 2
SITES = {"resid_post": "hook_resid_post", "z": "attn.hook_z"}


def run(machine: Machine, device: str, model: Chosen = None) -> Iterator[Row]:
    """Yield a row for sites of a layer in the middle, and one for the last layer."""
    loaded = chosen_model(model, device)
    last = loaded.shape.n_layers - 1
    for layer in sorted({last // 2, last}):
        yield _row(machine, device, loaded, model, layer)


def texts_of(model: HookedModel, count: int) -> list[list[int]]:
    """Draw texts as token ids, of 8 to about 100 tokens, and one as long as the suite allows."""
    generator = torch.Generator().manual_seed(0)
    longest = min(LONGEST, model.shape.n_ctx)
    lengths = (8 * torch.exp(torch.randn(count, generator=generator).abs())).long().clamp(max=longest).tolist()
    lengths[count // 3] = longest
    return [torch.randint(2, model.shape.d_vocab, (n,), generator=generator).tolist() for n in lengths]


def collected(model: HookedModel, texts: list[list[int]], layer: int, folder: Path) -> None:
    """Headwater: a cache in files."""
    model.cache(texts, sites=list(SITES), layers=[layer], out=folder, batch_size=BATCH, progress=False)


def lens_loop(model: HookedModel, texts: list[list[int]], layer: int, folder: Path) -> None:
    """TransformerLens: one batch after the other, its real tokens saved."""
    names = [f"blocks.{layer}.{name}" for name in SITES.values()]
    stop = {"stop_at_layer": layer + 1} if layer + 1 < model.shape.n_layers else {}
    folder.mkdir(parents=True)
    device = model.device
    for start in range(0, len(texts), BATCH):
        rows = texts[start : start + BATCH]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
        _, cache = model.raw.run_with_cache(tokens, names_filter=names, attention_mask=mask, **stop)
        kept = {name: cache[name][mask.bool()].cpu() for name in names}
        save_file(kept, folder / f"{start:06d}.safetensors")


def _peak(device: str, chosen: Chosen, count: int, layer: int) -> int | None:
    model = chosen_model(chosen, device)
    texts = texts_of(model, count)
    model.run([[1, 2]])  # what the libraries allocate once is not workspace
    with tempfile.TemporaryDirectory() as folder:
        return peak_bytes(lambda: collected(model, texts, layer, Path(folder) / "out"), device)


def _row(machine: Machine, device: str, model: HookedModel, chosen: Chosen, layer: int) -> Row:
    texts = texts_of(model, TEXTS[device.split(":")[0]])
    with tempfile.TemporaryDirectory() as made:
        ours, theirs = Path(made) / "headwater", Path(made) / "lens"

        def timed(work: object, folder: Path) -> float:
            shutil.rmtree(folder, ignore_errors=True)
            return seconds(lambda: work(model, texts, layer, folder), device)  # type: ignore[operator]

        taken = [(timed(lens_loop, theirs), timed(collected, ours)) for _ in range(ROUNDS)]
        agrees = _agree(model, chosen, texts, layer, ours, theirs)
    tokens = sum(map(len, texts))
    shape = model.shape
    kept = 4 * tokens * (shape.d_model + shape.n_heads * shape.d_head)
    work = Work(tokens * (layer + 1) * 2 * block_weights(model) // shape.n_layers, kept, done=tokens, unit="tokens")
    return Row(
        name=f"collecting: resid_post and z of layer {layer}, {titled(chosen)}, {len(texts):,} texts to disk",
        peer="run_with_cache, batch by batch, real tokens saved",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=min(peer for peer, _ in taken),
        headwater_s=min(own for _, own in taken),
        agrees=agrees,
        peak_bytes=in_fresh_process(_peak, device, chosen, len(texts), layer),
        target=">= 1.2 x, memory flat, real tokens only",
        note=f"{weights_note(chosen)}; {tokens:,} tokens, {kept / 2**20:.1f} MB in files; best of {ROUNDS} of each",
    )


def _agree(model: HookedModel, chosen: Chosen, texts: list[list[int]], layer: int, ours: Path, theirs: Path) -> bool:
    """Whether both wrote the same numbers, in the order of the texts."""
    cache = model.cache(texts, sites=list(SITES), layers=[layer], out=ours, batch_size=BATCH, progress=False)
    parts = [load_file(file) for file in sorted(theirs.iterdir())]
    return all(
        are_equal(chosen, cache.rows(site, layer), torch.cat([part[f"blocks.{layer}.{hook}"] for part in parts]))
        for site, hook in SITES.items()
    )
