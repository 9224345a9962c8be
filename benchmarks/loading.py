"""Suite `loading`: from a checkpoint folder to a model with hooks, beside transformers and TransformerLens alone.

Question: what do the checks at load (finite weights, a tokenizer that fits, one forward held against the model's own)
cost in time and in memory?

The folder holds GPT-2's 124M shape with random weights and as many words as its vocabulary has. The peer reads model
and tokenizer with transformers and wraps them with TransformerLens's bridge; it checks nothing. The two take turns,
after both have read the folder once; the best of several is reported. Memory is measured in a process of its own, which
has loaded the embedded model before.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module

import headwater as hw
from benchmarks.machine import Machine, Work, best_in_turns, in_fresh_process, peak_bytes
from benchmarks.report import Row

ROUNDS = 5
TOKENS = [[5, 9, 13, 17, 21]]


def run(machine: Machine, device: str, **sizes: int) -> Iterator[Row]:
    """Yield the row of one checkpoint, of GPT-2's shape unless sizes say otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        _save(Path(folder), **sizes)
        yield _row(machine, device, folder)


def with_transformers(folder: str, device: str) -> TransformerBridge:
    """The same model with hooks, by transformers and TransformerLens alone."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").to(device).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return build_bridge_from_module(
        hf, "GPT2LMHeadModel", hf_config=hf.config, tokenizer=tokenizer, model_name=Path(folder).name
    )


def _save(folder: Path, **sizes: int) -> None:
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w0").save_pretrained(folder)


def _peak(folder: str, device: str) -> int | None:
    hw.load(device=device)
    return peak_bytes(lambda: hw.load(folder, device=device), device)


def _row(machine: Machine, device: str, folder: str) -> Row:
    peak = in_fresh_process(_peak, folder, device)

    def ours() -> hw.HookedModel:
        return hw.load(folder, device=device)

    with torch.inference_mode():
        found, expected = ours().run(TOKENS), with_transformers(folder, device)(torch.tensor(TOKENS, device=device))
    peer_s, headwater_s = best_in_turns(lambda: with_transformers(folder, device), ours, device, ROUNDS)
    weights = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    work = Work(0, weights, done=weights / 2**20, unit="MB")
    share = f", peak {peak / weights:.2f} x the weights" if peak is not None else ""
    return Row(
        name=f"loading: a folder of {weights / 2**20:.0f} MB",
        peer="transformers and TransformerLens's bridge, unchecked",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=peer_s,
        headwater_s=headwater_s,
        agrees=bool((found.cpu() - expected.cpu()).abs().max() < 1e-4),
        peak_bytes=peak,
        target=">= 0.83 x (at most 1.2 x the time), peak <= 1.2 x the weights",
        note=f"best of {ROUNDS} of each, in turns{share}",
    )
