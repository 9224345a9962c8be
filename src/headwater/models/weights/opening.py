"""Open a model's parameters: the same `WeightSource` for a checkpoint, streamed, and for a model in memory."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headwater.calls import checked_call
from headwater.kernels.devices import usable_device
from headwater.models.checks import tokenizer_fits
from headwater.models.tokenizers import load_tokenizer
from headwater.models.weights.checkpoint import checkpoint_folder, open_checkpoint, revision_of
from headwater.models.weights.loaded_weights import LoadedWeights
from headwater.models.weights.streamed_weights import StreamedWeights
from headwater.models.weights.weight_source import WeightSource

if TYPE_CHECKING:
    from headwater.models.model import Model


@checked_call
def open_weights(
    what: "Model | str | Path",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> WeightSource:
    """Open a model's parameters for reading.

    Args:
        what: a checkpoint folder, GGUF file or hub name, streamed with one layer in memory at a time, or a model in
            memory.
        device: where tensors are handed out; by default the CPU, or where the model in memory is.
        dtype: the dtype tensors are handed out in; by default float32, or the stored dtype where that is wider.
        revision: branch, tag or commit on the hub.
        trust_remote_code: let the checkpoint's own config and tokenizer code run.

    Raises:
        ModelError: the checkpoint cannot be found, is damaged or incomplete, or is of an unsupported architecture.
    """
    if not isinstance(what, str | Path):
        source: WeightSource = LoadedWeights(what)
    else:
        folder = checkpoint_folder(what, revision)
        checkpoint = open_checkpoint(folder, trust_remote_code)
        tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        tokenizer_fits(tokenizer, checkpoint.config.vocab_size)
        source = StreamedWeights(str(what), revision_of(what, folder), checkpoint, tokenizer)
    source.device = usable_device(device or source.device)
    source.given_dtype = dtype or source.given_dtype
    return source
