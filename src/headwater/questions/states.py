"""The states that probes read: at one token of each answered question, of every layer.

Orgad et al., "LLMs Know More Than They Show", ICLR 2025, find most of what a model knows of its errors at the tokens of
the exact answer.

1. What is read: what the MLP adds, what attention adds, or the whole residual stream.
2. Where (`PROBE_TOKENS`): the last token of the prompt; the first of the answer; the token that the exact answer
   follows, its first, its last, and the one behind it; the last of the answer. Where the answer ends with its exact
   words, the token behind them is their last. Maps (`MAP_TOKENS`) have the last token of E_Q too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from headwater.errors import InputError, did_you_mean
from headwater.kernels.devices import to_device
from headwater.models.edits import Hook, read_hook
from headwater.models.hooked import HookedModel
from headwater.models.sites import SITES
from headwater.models.tokens import by_length
from headwater.options import checked_count, shown
from headwater.probes.linear import States
from headwater.progress import progress_bar
from headwater.questions.answers import AnsweredQuestions

ProbeSiteName: TypeAlias = Literal["mlp_out", "attn_out", "resid_post"]
PROBE_SITES = get_args(ProbeSiteName)
TokenName: TypeAlias = Literal[
    "prompt_last",
    "answer_first",
    "before_answer",
    "exact_answer_first",
    "exact_answer_last",
    "after_answer",
    "answer_last",
]
PROBE_TOKENS = get_args(TokenName)
MAP_TOKENS = ("question_last", *PROBE_TOKENS)
BEFORE = ("prompt_last", "before_answer")
"""Tokens that come before the exact answer whatever it is: nothing there can come from it."""


def check_probe_options(site: str, token: str, batch_size: int) -> None:
    """Refuse a site, token or batch size that there is not."""
    if not isinstance(site, str) or site not in PROBE_SITES:
        raise InputError(f"There is no probe site {shown(site)}.{did_you_mean(site, PROBE_SITES)}")
    if not isinstance(token, str) or token not in PROBE_TOKENS:
        raise InputError(f"There is no probe token {shown(token)}.{did_you_mean(token, PROBE_TOKENS)}")
    checked_count("batch_size", batch_size)


def probe_positions(answered: AnsweredQuestions, token: str) -> list[int]:
    """Return the position that a probe reads in each row's tokens."""
    table = answered.table
    exact, last = table["exact_answer_tokens"], table["tokens"].map(len) - 1
    found = {
        "prompt_last": lambda: table["answer_start"] - 1,
        "answer_first": lambda: table["answer_start"],
        "before_answer": lambda: exact.map(min) - 1,
        "exact_answer_first": lambda: exact.map(min),
        "exact_answer_last": lambda: exact.map(max),
        "after_answer": lambda: (exact.map(max) + 1).clip(upper=last),
        "answer_last": lambda: last,
    }
    if token not in found:
        raise InputError(f"There is no probe token {token!r}.{did_you_mean(token, PROBE_TOKENS)}")
    return [int(position) for position in found[token]()]


def map_positions(answered: AnsweredQuestions, token: str) -> list[int]:
    """Return the same, also of the last token of E_Q."""
    if token == "question_last":
        return [max(positions) for positions in answered.exact_question_tokens()]
    return probe_positions(answered, token)


def probe_states(
    model: HookedModel,
    answered: AnsweredQuestions,
    *,
    site: ProbeSiteName = "mlp_out",
    token: TokenName = "exact_answer_last",
    batch_size: int = 64,
    progress: bool = True,
) -> States:
    """Return the states that probes read, of every layer and row, in float32 on the CPU.

    Args:
        model: the model that answered.
        answered: what `hw.answer` returned.
        site: what probes read: `mlp_out`, `attn_out` or `resid_post`.
        token: where probes read, one of `PROBE_TOKENS`.
        batch_size: rows in one run; rows of about equal length run together.
        progress: show a bar.
    """
    check_probe_options(site, token, batch_size)
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
    editing: Callable[[Sequence[int]], Iterable[Hook]] | None = None,
) -> States:
    """Return the state of every layer at one position of each row of token ids.

    With `editing`, of runs in which the hooks act that it returns for the rows of each.
    """
    shape = model.shape
    states = torch.empty(shape.n_layers, len(tokens), shape.d_model)
    with progress_bar(progress, total=len(tokens), desc="States", unit="row") as bar:
        for rows in by_length([len(row) for row in tokens], batch_size):
            columns = torch.tensor([positions[row] for row in rows])
            batch = model.tokenize([list(tokens[row]) for row in rows])
            edits = editing(rows) if editing is not None else ()
            held: dict[int, Tensor] = {}
            model.run(batch, [*edits, *_keep(held, shape.n_layers, columns, site)], stop_at=shape.n_layers)
            by_layer = [held[layer].to(model.device) for layer in range(shape.n_layers)]
            states[:, rows] = torch.stack(by_layer).cpu().float()  # one copy: a device is waited for once a run
            bar.update(len(rows))
    return states


def _keep(held: dict[int, Tensor], n_layers: int, columns: Tensor, site: str) -> Iterator[Hook]:
    """Yield a hook per layer that keeps each row's state, `row d_model`."""
    for layer in range(n_layers):

        def keep(activation: Tensor, hook: object, layer: int = layer) -> None:
            there = activation.device
            held[layer] = activation[torch.arange(len(columns), device=there), to_device(columns, there)]

        yield SITES[site].hook_name(layer), read_hook(keep)
