"""Suite `generation`: tokens written greedily by `model.generate`, beside `generate` of transformers.

Question: what does it cost to let a model write through headwater, where nothing watches it?

The two have the same weights and write the same number of tokens after the same prompts, which must be the same
tokens. Transformers attends in one pass, as it does by default. They take turns; the best of several is reported, since
what is short is disturbed easily. The first row is the embedded model's, whose steps are so short that only overhead
counts; the others have GPT-2's 124M shape and random weights. With `--model` all rows are of that model.
"""

from collections.abc import Iterator

import torch
import transformers

from benchmarks.machine import Machine, Work, best_in_turns
from benchmarks.models import Chosen, chosen_model, titled
from benchmarks.report import Row
from headwater.models.generation import generate_tokens
from headwater.models.hooked import HookedModel

PROMPT, NEW, ROUNDS = 16, 32, 5


def run(machine: Machine, device: str, model: Chosen = None) -> Iterator[Row]:
    """Yield a row for one prompt to each model, and one for a batch to the last."""
    for chosen in ("embedded", None) if model is None else (model,):
        loaded = chosen_model(chosen, device)
        yield _row(machine, device, loaded, titled(chosen), 1)
    yield _row(machine, device, loaded, titled(chosen), 8)


def plain(model: HookedModel, device: str) -> transformers.PreTrainedModel:
    """A transformers model of the same weights, without wrappers."""
    twin = transformers.AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa").eval()
    named = model.raw.original_model.state_dict().items()
    weights = {name.replace("_original_component.", ""): tensor for name, tensor in named}
    twin.load_state_dict({name: weights[name] for name in twin.state_dict()})
    return twin.to(device=device, dtype=model.dtype)


def _row(machine: Machine, device: str, model: HookedModel, what: str, rows: int) -> Row:
    twin = plain(model, device)
    twin.generation_config.eos_token_id = None  # both write on after an end token
    tokens = torch.randint(2, model.shape.d_vocab, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
    there, batch = tokens.to(device), model.tokenize(tokens)
    asked = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}

    def theirs() -> torch.Tensor:
        return twin.generate(there, attention_mask=torch.ones_like(there), **asked)[:, PROMPT:]

    def ours() -> torch.Tensor:
        return generate_tokens(model, batch, max_new_tokens=NEW).tokens

    agrees = torch.equal(theirs().cpu(), ours())
    peer_s, headwater_s = best_in_turns(theirs, ours, device, ROUNDS)
    shape = model.shape
    count = sum(parameter.numel() for parameter in twin.parameters())
    work = Work(2 * count * rows * (PROMPT + NEW), 4 * count * NEW, done=rows * NEW, unit="tokens")
    return Row(
        name=f"generation: {NEW} new tokens, batch {rows}, prompts of {PROMPT}, {what}",
        peer="generate of transformers, attention in one pass",
        floor_s=machine.floor_of(work),
        work=work,
        peer_s=peer_s,
        headwater_s=headwater_s,
        agrees=agrees,
        peak_bytes=None,
        target=">= 0.95 x, the same tokens",
        note=f"{shape.n_layers} layers of width {shape.d_model}; best of {ROUNDS} of each, in turns",
    )
