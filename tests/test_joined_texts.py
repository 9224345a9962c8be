"""Texts of members and non-members put together: stretches of 32 words are scored as the published loop scores them."""

import json
import zlib

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.likelihood.scores import memorization_scores
from headwater.likelihood.statistics import token_statistics
from headwater.reference.membership import load_joined_texts, of_stretches
from tests import chance
from tests.tiny import WORDS, tiny_model, tokenizer_of


def written(tmp_path, *rows):
    file = tmp_path / "joined.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def naive(network, tokenizer, text, labels, bos):
    """The released loop: tokens of the whole text, cut where the stretches' own tokens end, without each first one."""
    words = text.split(" ")
    stretches = [" ".join(words[32 * j : 32 * (j + 1)]) for j in range(len(labels))]
    lengths = [len(tokenizer.encode(" " * (j > 0) + one, add_special_tokens=False)) for j, one in enumerate(stretches)]
    ids = [*bos, *tokenizer.encode(text, add_special_tokens=False)]
    lengths[0] += len(bos)
    with torch.no_grad():
        log_p = network(torch.tensor([ids])).logits[0].log_softmax(-1)
    start = 0
    for stretch, length in zip(stretches, lengths, strict=True):
        own, before = ids[start : start + length][1:], log_p[start : start + length][:-1]
        of_token = before.gather(1, torch.tensor(own)[:, None])[:, 0]
        mean = (before.exp() * before).sum(-1)
        deviation = ((before.exp() * before**2).sum(-1) - mean**2).sqrt()
        scaled = (of_token - mean) / deviation
        lowest = max(1, int(0.2 * len(own)))
        yield {
            "loss": float(of_token.mean()),
            "zlib": float(of_token.mean()) / len(zlib.compress(stretch.encode())),
            "min_k_0.2": float(of_token.sort().values[:lowest].mean()),
            "min_k++_0.2": float(scaled.sort().values[:lowest].mean()),
        }
        start += length


@pytest.mark.parametrize("family", ["llama", "neox"])
def test_stretches_have_the_scores_of_the_published_loop(family, tmp_path):
    rng, tokenizer, network = chance.rng(), tokenizer_of(family), tiny_model(family).eval()
    tokenizer.model_max_length = network.config.max_position_embeddings = 512
    model = hw.load(network, tokenizer=tokenizer)
    texts = [" ".join(rng.choice(WORDS, size=words)) for words in (32, 70)]
    labels = [[1], [0, 1]]
    joined = load_joined_texts(
        written(tmp_path, *({"input": text, "label": one} for text, one in zip(texts, labels, strict=True)))
    )
    assert joined["member"].tolist() == [True, False, True]
    stats = token_statistics(model, texts, progress=False)
    found = memorization_scores(of_stretches(model, stats, joined)).wide()
    reference = tiny_model(family).eval()
    expected = [
        row for pair in zip(texts, labels, strict=True) for row in naive(reference, tokenizer, *pair, model.bos)
    ]
    assert len(found) == len(expected) == 3
    for name in expected[0]:
        np.testing.assert_allclose(found[name], [row[name] for row in expected], rtol=1e-4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "a b", "label": 1}, "row 1"),
        ({"input": " ".join("x" * 64), "label": [1]}, r"every 32 of its words: 2\), found \[1\]"),
        ({"input": " ".join("x" * 32), "label": [2]}, r"found \[2\]"),
        ({"label": [1]}, r"expected input \(a text\)"),
    ],
)
def test_a_text_without_a_label_for_every_stretch_is_refused(row, message, tmp_path):
    with pytest.raises(InputError, match=message):
        load_joined_texts(written(tmp_path, row))


def test_a_file_without_texts_is_refused(tmp_path):
    with pytest.raises(InputError, match="contains no texts"):
        load_joined_texts(written(tmp_path))
