"""`device="auto"`: the layers of a checkpoint go where there is room, or it says that there is none."""

import accelerate.utils.modeling
import pytest
import torch
import transformers.integrations.accelerate
from transformers import AutoModelForCausalLM

import headwater as hw
from headwater.errors import InputError

TEXT = "the capital of France"


@pytest.fixture
def memory(monkeypatch):
    """`memory(cpu=1000)` makes accelerate believe that the machine has so many bytes, by device."""

    def has(**sizes):
        for module in (transformers.integrations.accelerate, accelerate.utils.modeling):
            monkeypatch.setattr(module, "get_max_memory", lambda max_memory=None: dict(sizes))

    return has


def test_without_a_gpu_it_is_the_model_on_the_cpu(checkpoint, family, memory):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA devices")
    folder = checkpoint(family)
    spread, whole = hw.load(folder, device="auto"), hw.load(folder)
    assert {parameter.device.type for parameter in spread.raw.parameters()} == {"cpu"}
    assert torch.equal(spread.run(TEXT), whole.run(TEXT))
    assert spread.fingerprint == whole.fingerprint


@pytest.mark.parametrize("share", [0.0, 0.2, 0.8])
def test_a_model_that_would_lie_on_the_disk_in_part_is_refused_with_what_to_do(checkpoint, memory, share):
    folder = checkpoint("llama")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    memory(cpu=int(share * size))
    with pytest.raises(InputError, match=r"All devices together are too small .* not in memory\. Use more or larger"):
        hw.load(folder, device="auto")


def test_what_is_in_memory_already_cannot_be_spread(checkpoint):
    hf = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    model = hw.load(checkpoint("llama"))
    for what in (hf, model.raw):
        with pytest.raises(RuntimeError, match="device string: auto"):
            hw.load(what, device="auto")
