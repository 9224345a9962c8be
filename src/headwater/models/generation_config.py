"""What a model's generation config says of all that it writes: the tokens that end a text, and which may not come.

`RULES` are transformers' own processors of logits, made for each row as if it were alone. They change which token is
chosen, not its reported probability. Temperature, top_k and the like are options of the call, not rules; the
settings in `UNUSED` are not obeyed, which is said once per model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.models.hints import warn_of_unused_settings

if TYPE_CHECKING:
    from headwater.models.model import Model
    from headwater.models.tokens import Batch

RULES: dict[str, object] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    **dict.fromkeys(("sequence_bias", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
}
"""Settings that are obeyed, each with the value that says nothing; None never does."""
UNUSED: dict[str, object] = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "guidance_scale", "encoder_repetition_penalty"), 1),
    "encoder_no_repeat_ngram_size": 0,
    **dict.fromkeys(("stop_strings", "penalty_alpha", "dola_layers", "watermarking_config", "max_time")),
}
"""Settings that are not, likewise."""


def end_tokens(model: Model) -> frozenset[int]:
    """Return the ids that end a text: those of the tokenizer, the config and the generation config together."""
    named: list[Any] = [getattr(model.tokenizer, "eos_token_id", None)]
    for config in (model.config, _config(model.raw)):
        value = getattr(config, "eos_token_id", None)
        named += value if isinstance(value, list) else [value]
    return frozenset(int(token) for token in named if token is not None)


def settings(raw: object, names: dict[str, object]) -> dict[str, object]:
    """Return which of some settings the generation config of a model has, for the record of a run."""
    config = _config(raw)
    found = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None and value != names[name]}


class Rules:
    """What the rules make of the logits of each row."""

    def __init__(self, model: Model, prompts: Batch, max_new_tokens: int):
        self._prompts, self._processors = prompts, list[Any]()
        warn_of_unused_settings(model, list(settings(model.raw, UNUSED)))
        if not settings(model.raw, RULES):
            return
        config = copy.deepcopy(_config(model.raw))
        # Else temperature, top_k and top_p of the config would come along as processors.
        config.do_sample = False
        # guidance_scale, for one, would come back as a processor that runs the model a second time.
        for name in UNUSED:
            setattr(config, name, None)
        # `generate` sets it before it asks for processors; those of min_length and bad_words_ids read it.
        config._eos_token_tensor = torch.tensor(sorted(end_tokens(model)), device=model.device)
        for length in prompts.lengths.tolist():
            # A forced end token comes at this length, which is another for each prompt.
            config.max_length = length + max_new_tokens
            processors = model.raw.original_model._get_logits_processor(config, length, device=model.device)
            self._processors.append(processors)

    def __call__(
        self, logits: Float[Tensor, "row d_vocab"], live: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Float[Tensor, "row d_vocab"]:
        """Return the logits that tokens are chosen by."""
        if not self._processors:
            return logits
        ruled = []
        for row, of_row in zip(live, logits.clone().split(1), strict=True):
            prompt = self._prompts.tokens[row][self._prompts.mask[row]].tolist()
            ids = torch.tensor([[*prompt, *tokens[row]]], device=logits.device)
            ruled.append(self._processors[row](ids, of_row))
        return torch.cat(ruled)


def _config(raw: object) -> Any:
    """Return the generation config of the model of transformers, where there is one."""
    return getattr(getattr(raw, "original_model", None), "generation_config", None)
