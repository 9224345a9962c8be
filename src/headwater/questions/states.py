"""The states that probes read: of every layer, at one token of each answered question.

Orgad et al., "LLMs Know More Than They Show", ICLR 2025, find most information about a model's errors at the tokens of
the exact answer.

1. Sites: the MLP output, the attention output, or the residual stream after the block.
2. Tokens (`PROBE_TOKENS`): the last token of the prompt; the first token of the answer; the token before the exact
   answer, its first token, its last token, and the token after it; the last token of the answer. If the answer ends
   with its exact words, the token after them is their last token. Maps (`MAP_TOKENS`) also use the last token of E_Q.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from headwater.calls import checked_call
from headwater.models.bridge_check import rounding
from headwater.models.edits import Hook, at_tokens, keeping
from headwater.models.forward import FixedPrefix, KeysValues, can_continue, common_start, keys_values, unpadded
from headwater.models.hooked import HookedModel
from headwater.models.sites import SITES
from headwater.models.tokens import Batch, by_length
from headwater.options import checked_name
from headwater.probes.linear import States
from headwater.progress import progress_bar
from headwater.questions.answers import AnsweredQuestions

ProbeSiteName: TypeAlias = Literal["mlp_out", "attn_out", "resid_post"]
PROBE_SITES = get_args(ProbeSiteName)
TokenName: TypeAlias = Literal[
    "prompt_last", "answer_first", "before_answer", "exact_answer_first", "exact_answer_last", "after_answer",
    "answer_last",
]  # fmt: skip
PROBE_TOKENS = get_args(TokenName)
MAP_TOKENS = ("question_last", *PROBE_TOKENS)
BEFORE = ("prompt_last", "before_answer")
"""Tokens before the exact answer: their states cannot depend on it."""


def probe_positions(answered: AnsweredQuestions, token: str) -> list[int]:
    """Return the position in each row's tokens of one of `PROBE_TOKENS`, or of `MAP_TOKENS` for maps."""
    if token == "question_last":
        return [max(positions) for positions in answered.exact_question_tokens()]
    table = answered.table
    exact, last = table["exact_answer_tokens"], table["tokens"].map(len) - 1
    readers = {
        "prompt_last": lambda: table["answer_start"] - 1,
        "answer_first": lambda: table["answer_start"],
        "before_answer": lambda: exact.map(min) - 1,
        "exact_answer_first": lambda: exact.map(min),
        "exact_answer_last": lambda: exact.map(max),
        "after_answer": lambda: (exact.map(max) + 1).clip(upper=last),
        "answer_last": lambda: last,
    }
    return [int(position) for position in readers[checked_name("token", token, PROBE_TOKENS)]()]


@checked_call
def probe_states(
    model: HookedModel,
    answered: AnsweredQuestions,
    *,
    site: ProbeSiteName = "mlp_out",
    token: TokenName = "exact_answer_last",
    batch_size: int = 64,
    progress: bool = True,
) -> States:
    """Return the states that probes read, of every layer and row, in float32 on the CPU; runs similar lengths together.

    `site` is `mlp_out`, `attn_out` or `resid_post`; `token` is one of `PROBE_TOKENS`.
    """
    return states_at(
        model, list(answered.table["tokens"]), probe_positions(answered, token), site, batch_size, progress
    )


def states_at(
    model: HookedModel,
    tokens: Sequence[Sequence[int]],
    positions: Sequence[int],
    site: str,
    batch_size: int,
    progress: bool,
    editing: Callable[[Sequence[int], int], Iterable[Hook]] | None = None,
    edited_from: int | None = None,
) -> States:
    """Return the state of every layer at one position of each row of token ids.

    The common prefix of all rows, such as a prompt's examples, runs once, and each row continues from its cached keys
    and values, if the model then yields the same states as in one run. `editing` returns the hooks for some rows, from
    these rows and the number of cached prefix tokens; it edits no position before `edited_from`.
    """
    n_layers = model.shape.n_layers
    states = torch.empty(n_layers, len(tokens), model.shape.d_model)
    # The shared prefix ends before any position that is read or edited.
    first = min(*positions, len(tokens[0]) if edited_from is None else edited_from) if tokens else 0

    def run(rows: Sequence[int], shared: int, start: KeysValues) -> States:
        columns = torch.tensor([positions[row] - shared for row in rows])
        rest, options = [list(tokens[row][shared:]) for row in rows], dict[str, Any]()
        batch = Batch.of(rest, 0) if shared else model.tokenize(rest)
        if shared:
            batch, options = unpadded(batch.tokens), {"past_key_values": FixedPrefix(start)}
        hooks = list(editing(rows, shared)) if editing is not None else []
        collected: dict[str, Tensor] = {}
        names = [SITES[site].hook_name(layer) for layer in range(n_layers)]
        hooks += keeping(names, collected, at_tokens(torch.arange(len(columns)), columns))
        model.run(batch, hooks, stop_at=n_layers, **options)
        # The layers of a model may be on several devices; their states are stacked on the first.
        by_layer = [collected[name].to(model.device) for name in names]
        return torch.stack(by_layer).cpu().float()  # one copy, so that each run waits for the device once

    shared, start = shared_start(model, tokens, first, n_layers, partial(run, [0]))
    with progress_bar(progress, len(tokens), desc="States", unit="row") as bar:
        for rows in by_length([len(row) for row in tokens], batch_size):
            states[:, rows] = run(rows, shared, start)
            bar.update(len(rows))
    return states


def shared_start(
    model: HookedModel,
    tokens: Sequence[Sequence[int]],
    first: int,
    n_layers: int,
    run: Callable[[int, KeysValues], Tensor],
) -> tuple[int, KeysValues]:
    """Run once what all rows share of their `first` tokens; return its length, and its keys and values by layer.

    `run` continues one row from such a prefix. The length is 0 if its state then differs from that of a whole run.
    """
    shared = 0
    if tokens and can_continue(model):
        shared = common_start(torch.tensor([list(row[:first]) for row in tokens], dtype=torch.long))
    if not shared:
        return 0, {}
    start = keys_values(model, torch.tensor([list(tokens[0][:shared])]), {}, n_layers)
    # Tested on one row first, because model families handle a cache differently.
    whole, resumed = run(0, {}), run(shared, start)
    is_same = float((resumed - whole).abs().max()) <= rounding(model.dtype) * float(whole.abs().max())
    return (shared, start) if is_same else (0, {})
