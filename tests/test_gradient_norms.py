"""Gradient norms are those of the published loop over Hugging Face's own parameters, and leave the model as it was."""

import math

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.errors import InputError, ModelError, NumericsError
from headwater.likelihood import files
from headwater.likelihood.files import gradient_norms, score_file
from headwater.likelihood.scores import memorization_scores
from headwater.likelihood.statistics import token_statistics
from headwater.models import gradients
from tests.compatibility import REFUSED_HERE
from tests.random_models import random_model
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

TEXTS = (" Paris is the capital of France", " cat dog three", " big")
OTHERS = tuple(
    name
    for name in ("bloom", "codegen", "falcon", "falcon-new-decoder", "gpt-oss", "mpt", "olmoe", "opt-350m", "phi3")
    if ("load", name) not in REFUSED_HERE
)


def published(network, ids, order):
    """The loop of the published code: the mean of the norms of all gradients that there are."""
    network.requires_grad_(True)
    network.zero_grad()
    logits = network(torch.tensor([ids])).logits[0, :-1].float()
    loss = -logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).mean()
    loss.backward()
    norms = [parameter.grad.detach().norm(order) for parameter in network.parameters() if parameter.grad is not None]
    return float(torch.stack(norms).mean())


@pytest.mark.oracle
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_norms_are_those_of_the_published_loop_over_the_checkpoints_own_parameters(name):
    make = (lambda: random_model(name)) if name in OTHERS else (lambda: tiny_model(name))
    model, network = hw.load(make(), tokenizer=tiny_tokenizer()), make().eval()
    for order in (1.0, 2.0, math.inf):
        found = gradient_norms(model, TEXTS, order=order, progress=False)
        for text, norm in zip(TEXTS, found, strict=True):
            ids = model.tokenize([text]).tokens[0].tolist()
            expected = published(network, ids, order) if len(ids) > 1 else math.nan
            assert norm == pytest.approx(expected, rel=1e-4, nan_ok=True), (text, order)


def test_the_model_is_left_as_it_was_also_after_an_error(monkeypatch):
    model = hw.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    parameters = list(model.raw.parameters())
    kept = torch.ones_like(parameters[0])
    parameters[0].grad = kept
    before = [one.detach().clone() for one in parameters]
    logits = model.run([TEXTS[0]])

    def untouched():
        assert not any(one.requires_grad for one in parameters)
        assert parameters[0].grad is kept
        assert all(one.grad is None for one in parameters[1:])
        assert not any(one._post_accumulate_grad_hooks for one in parameters)
        assert all(torch.equal(one, old) for one, old in zip(parameters, before, strict=True))
        torch.testing.assert_close(model.run([TEXTS[0]]), logits)

    first = gradient_norms(model, TEXTS, progress=False)
    untouched()
    np.testing.assert_array_equal(gradient_norms(model, TEXTS, progress=False), first)
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        gradient_norms(model, TEXTS, progress=False)
    untouched()


def test_a_fused_matrix_whose_parts_are_not_all_of_it_is_an_error(monkeypatch):
    model = hw.load(tiny_model("gpt2"), tokenizer=tiny_tokenizer())
    monkeypatch.setattr(gradients, "FUSED", {"qkv": ("q", "k")})
    with pytest.raises(ModelError, match=r"attn\.qkv\.weight has no gradient, and .* are not all of its parts"):
        gradient_norms(model, TEXTS, progress=False)


def test_a_gradient_that_is_not_finite_is_an_error_that_names_its_parameter():
    model = hw.load(tiny_model("llama"), tokenizer=tiny_tokenizer())
    one = next(one for name, one in model.raw.named_parameters() if "embed_tokens" in name)
    handle = one.requires_grad_(True).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NumericsError, match=r"embed_tokens\.weight is NaN or infinite"):
        gradient_norms(model, TEXTS, progress=False)
    handle.remove()


def test_the_score_is_minus_the_norm_and_needs_one_for_every_text(checkpoint):
    model = hw.load(checkpoint("llama"))
    texts = [*TEXTS, ""]
    stats = token_statistics(model, texts, progress=False)
    norms = gradient_norms(model, texts, progress=False)
    assert np.isnan(norms).tolist() == [False, False, False, True]
    wide = memorization_scores(stats, gradient_norms=norms).wide()
    np.testing.assert_array_equal(wide["grad_norm"], -norms)
    assert "grad_norm" not in memorization_scores(stats).wide()
    assert memorization_scores(stats, gradient_norms=norms.tolist()).run.options["gradient_norms"]
    for wrong in (norms[:2], [-1.0] * 4, [math.nan] * 4, [math.inf] * 4):
        with pytest.raises(InputError, match=r"gradient_norms=.* must be a number of at least 0 for each"):
            memorization_scores(stats, gradient_norms=wrong)
    by_layer = token_statistics(model, texts, layers="all", progress=False)
    with pytest.raises(InputError, match="layers='final'"):
        memorization_scores(by_layer, gradient_norms=norms)


def test_a_text_of_a_model_without_bos_that_has_one_token_has_no_norm(checkpoint):
    model = hw.load(checkpoint("neox"))
    assert not model.bos
    norms = gradient_norms(model, [" cat", " cat dog"], progress=False)
    assert np.isnan(norms).tolist() == [True, False]
    scored = token_statistics(model, [" cat", " cat dog"], progress=False).texts["scored"]
    assert (scored > 0).tolist() == [False, True]


def test_a_file_is_scored_by_gradients_too(run, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "TEXTS_AT_ONCE", 2)
    model, file = hw.load(checkpoint("llama")), tmp_path / "texts.txt"
    file.write_text("".join(text + "\n" for text in (*TEXTS, "")))
    found = score_file(model, file, gradient_norm=True, k=[0.2], progress=False).table
    expected = -gradient_norms(model, [*TEXTS, ""], progress=False)
    np.testing.assert_allclose(found["grad_norm"], expected, rtol=1e-5)
    assert "grad_norm" not in score_file(model, file, k=[0.2], progress=False).table
    file.write_text(" cat" * 100)
    with pytest.raises(InputError, match=r"Text 0 has 101 tokens; the model reads at most 64"):
        score_file(model, file, gradient_norm=True, k=[0.2], progress=False)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"order": 3.0}, "order=3.0 is not one of 1, 2, inf"),
        ({"texts": ()}, "There are no texts"),
        ({"texts": [" cat" * 80]}, "Text 0 has 81 tokens"),
    ],
)
def test_what_has_no_gradient_norm_is_refused(asked, message, checkpoint):
    model = hw.load(checkpoint("llama"))
    with pytest.raises(InputError, match=message):
        gradient_norms(model, **{"texts": TEXTS, "progress": False} | asked)
