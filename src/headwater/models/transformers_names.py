"""What is called by name in transformers: the one file to read against a new version (`make test-next`).

Public classes are taken from its top level. Three names are not promised by it: the rules by which saved tensors become
parameters, the path of a cached file, and the module that computes GPT-2's GELU from its formula. Configs and modules
are read by attributes, which a row of `headwater.models.families` names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.activations import NewGELUActivation
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import cached_file, logging

__all__ = [
    "CONFIG_MAPPING",
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoTokenizer",
    "DynamicCache",
    "GPT2Config",
    "GPT2LMHeadModel",
    "NewGELUActivation",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "PreTrainedTokenizerFast",
    "cached_file",
    "quiet_transformers",
    "revert_weight_conversion",
]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep the loading bar and report of transformers off the screen; what they say is checked by who loads."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
