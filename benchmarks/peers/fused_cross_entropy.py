"""The loss of every token by kernels made for training, which multiply with W_U and keep no logits: where installed.

Liger goes through chunks of tokens, whose logits it rounds to the dtype of the states; cut-cross-entropy through blocks
in one kernel. Both give the log-probability of the token that came, of headwater's five statistics the first.
"""

import importlib
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from benchmarks import peers

LogProbabilities: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of hidden states `token d_model`, W_U as models store it, `d_vocab d_model`, and the tokens that came."""


def liger(hidden: Tensor, by_token: Tensor, target: Tensor) -> Tensor:
    """Liger Kernel's fused linear cross-entropy."""
    module = importlib.import_module("liger_kernel.transformers.functional")
    loss: Tensor = module.liger_fused_linear_cross_entropy(hidden, by_token, target, reduction="none")
    return -loss.float()


def cut(hidden: Tensor, by_token: Tensor, target: Tensor) -> Tensor:
    """Apple's cut-cross-entropy."""
    module = importlib.import_module("cut_cross_entropy")
    loss: Tensor = module.linear_cross_entropy(hidden, by_token, target, reduction="none")
    return -loss.float()


KERNELS: dict[str, tuple[str, LogProbabilities]] = {
    "Liger's fused linear cross-entropy": ("liger_kernel", liger),
    "cut-cross-entropy": ("cut_cross_entropy", cut),
}
"""By name: the package, and what it computes."""


def installed() -> dict[str, LogProbabilities]:
    """Those whose packages are here."""
    return {name: kernel for name, (package, kernel) in KERNELS.items() if peers.installed(package)}
