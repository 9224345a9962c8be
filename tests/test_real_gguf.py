"""The GGUF files of pretrained models are read as the package gguf dequantises them, and as transformers reads them."""

import gguf
import pytest
import torch

import headwater as hw
from headwater.models import open_weights
from headwater.models.gguf_file import read_gguf
from tests.real_models import gguf_of, real_folder

pytestmark = [pytest.mark.real, pytest.mark.oracle, pytest.mark.filterwarnings("ignore:.*chat template:UserWarning")]
TENSORS = {"smollm2": 272, "gemma": 236}


@pytest.fixture(scope="module", params=TENSORS)
def file(request, tmp_path_factory):
    return request.param, gguf_of(request.param, tmp_path_factory.mktemp("real"))


def test_every_tensor_is_what_the_package_gguf_dequantises(file):
    name, path = file
    found, reader = read_gguf(path), gguf.GGUFReader(path)
    assert len(reader.tensors) == TENSORS[name]
    for one in reader.tensors:
        expected = torch.from_numpy(gguf.dequantize(one.data, one.tensor_type).copy())
        assert torch.equal(found.read(one.name), expected), one.name


def test_the_file_gives_the_logits_of_the_folder_that_transformers_made_of_it(file):
    name, path = file
    own = hw.load("smollm2" if name == "smollm2" else path)
    reference = hw.load(real_folder(name))
    ours, theirs = (model.raw.original_model.state_dict() for model in (own, reference))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    text = "The capital of France is Paris. In 1999 the capital of Italy was Rome. " * 50
    assert torch.equal(own.run(text), reference.run(text))
    assert own.revision.startswith(path.name)
    assert open_weights(path).fingerprint == own.fingerprint


def test_smollm2_answers_in_a_chat(file):
    name, _ = file
    if name == "smollm2":
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        (answer,) = hw.load("smollm2").generate([chat], max_new_tokens=20, do_sample=False)
        assert answer == "The capital of France is Paris."


def test_digits_are_split_as_the_file_of_smollm2_asks(file):
    name, path = file
    if name == "smollm2":
        tokenizer = hw.load(path).tokenizer
        for text in ("٣٤٥", "½²³", "12345"):
            assert tokenizer(text)["input_ids"] == [one for digit in text for one in tokenizer(digit)["input_ids"]]
