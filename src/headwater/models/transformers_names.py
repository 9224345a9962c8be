"""All imports from transformers: the only file to check against a new version (`make test-next`).

Public classes come from its top level. Two names are not public API: the rules that convert saved tensors to
parameters, and the module that computes GPT-2's GELU from its formula. Configs and modules are read by attribute names,
which the rows of `headwater.models.families` list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers import CONFIG_MAPPING as CONFIG_MAPPING
from transformers import AutoConfig as AutoConfig
from transformers import AutoModelForCausalLM as AutoModelForCausalLM
from transformers import AutoModelForImageTextToText as AutoModelForImageTextToText
from transformers import AutoTokenizer as AutoTokenizer
from transformers import DynamicCache as DynamicCache
from transformers import GPT2Config as GPT2Config
from transformers import GPT2LMHeadModel as GPT2LMHeadModel
from transformers import PreTrainedModel as PreTrainedModel
from transformers import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.activations import NewGELUActivation as NewGELUActivation
from transformers.core_model_loading import revert_weight_conversion as revert_weight_conversion
from transformers.utils import logging


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' loading bar and report; callers check the contents of the report themselves."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
