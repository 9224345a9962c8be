"""TransformerLens's head detector, as far as it can be used: which keys each kind of head should attend to.

`transformer_lens.head_detector.detect_head` itself is not called. In 4.3 it takes text, not tokens (random tokens do
not survive the way through text and back), runs one prompt at a time and caches every activation of the model for it,
and divides by all query positions, also those at which there is nothing to attend to. What it looks for, though, is
the definition worth sharing, and is taken from it.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

ATTENTION_CLASSES = ("previous_token", "duplicate_token", "induction")


def keys_of(attention_class: str, tokens: Int[Tensor, "position"]) -> Bool[Tensor, "query key"]:
    """Say which keys a head of a class attends to from each query, by TransformerLens's definition.

    Args:
        attention_class: "previous_token" (the position before), "duplicate_token" (earlier positions with the same
            token) or "induction" (the positions after those).
        tokens: one sequence.
    """
    from transformer_lens import head_detector

    pattern = getattr(head_detector, f"get_{attention_class}_head_detection_pattern")
    return pattern(tokens[None].cpu()).to(torch.bool)
