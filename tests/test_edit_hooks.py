"""hw.edit writes features, roles and fixed positions as plain hooks on the transformers model do, in runs and texts."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import headwater as hw
from headwater.errors import InputError, InterventionError
from tests.plain_hooks import hooked_plainly
from tests.tiny import tiny_hooked, tiny_model

FAMILIES = ("gpt2", "llama", "neox", "gemma2")
PROMPTS = [[2, 40, 41, 42, 43, 44, 45], [2, 50, 41, 47]]
TEXTS = [" the cat of France is", " Paris is in the capital of France"]
LAYER, CHOSEN, STEPS = 1, [3, 7, 11], 5
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Dictionary:
    """More features than the activation is wide, and a decoder that misses something."""

    def __init__(self, width, count=40):
        self.into, self.out = torch.randn(width, count) / width**0.5, torch.randn(count, width) / count**0.5

    def encode(self, rows):
        return (rows @ self.into + 0.1).tanh()

    def decode(self, features):
        return features @ self.out

    def scaled(self, rows, factor):
        """Rows with the chosen features times a factor, by the formula, the error kept."""
        before = self.encode(rows)
        after = before.clone()
        after[:, CHOSEN] *= factor
        return rows + self.decode(after) - self.decode(before)


def of_features(model, at):
    dictionary = Dictionary(hw.models.SITES[at].width(model.shape, 1))
    return dictionary, hw.features(dictionary.encode, dictionary.decode, at=at, layer=LAYER).only(CHOSEN)


def plainly(hf, family, site, tokens, act):
    """Logits of one prompt, with one of torch's own hooks."""
    with ExitStack() as stack, torch.no_grad():
        handle = hooked_plainly(hf, family, site, LAYER, act)
        stack.callback(handle.remove)
        return hf(torch.tensor([tokens])).logits[0]


def continued_plainly(hf, family, site, prompt, act):
    """The greedy tokens after a prompt, each from a whole run of all tokens so far under a plain hook."""
    tokens = list(prompt)
    for _ in range(STEPS):
        tokens.append(int(plainly(hf, family, site, tokens, act)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.diagonal
@pytest.mark.oracle
@pytest.mark.parametrize("site", ["resid_post", "mlp_out"])
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_edited_in_runs_and_in_texts_as_the_formula_in_a_plain_hook_does(models, family, site):
    model, hf = models(family), tiny_model(family, seed=3)
    dictionary, features = of_features(model, site)
    hooks = [hw.edit(features, None, hw.scale(-4.0))]

    def everywhere(activation):
        activation[:] = dictionary.scaled(activation[0], -4.0)[None]

    logits = model.run(PROMPTS, hooks)
    for row, prompt in enumerate(PROMPTS):
        expected = plainly(hf, family, site, prompt, everywhere)
        torch.testing.assert_close(logits[row, : len(prompt)], expected, **CLOSE)
    assert float((logits - model.run(PROMPTS)).abs().max()) > 1e-3
    written = model.generate(PROMPTS, hooks, max_new_tokens=STEPS, progress=False).tokens
    for prompt, tokens in zip(PROMPTS, written, strict=True):
        assert tokens == continued_plainly(hf, family, site, prompt, everywhere)[: len(tokens)]


def test_an_edit_of_features_is_the_cell_of_a_sweep_over_them(llama):
    _, features = of_features(llama, "resid_post")
    metric = hw.logit_difference(5, 9)
    direction = torch.linspace(-1, 1, 40)
    for values in (hw.scale(3.0), "zero", hw.add(direction), lambda a, o, p: a + 1, direction.abs()):
        sweep = hw.patch(
            llama, PROMPTS[:1], sites=features, values=values, metric=metric, over=(), positions=3, progress=False
        )
        logits = llama.run(PROMPTS[:1], hooks=[hw.edit(features, LAYER, values, positions=3)])[0, -1]
        expected = float(logits[5] - logits[9]) - sweep.table["clean"].item()
        assert sweep.table["effect"].item() == pytest.approx(expected, abs=1e-5)
        assert abs(expected) > 1e-4


@pytest.mark.oracle
@pytest.mark.parametrize("family", FAMILIES)
def test_fixed_positions_are_edited_in_the_prompt_and_felt_by_every_token_after_it(models, family):
    """Rows of unlike length; whole runs of transformers in which the prompt's position is edited at every step."""
    model, hf = models(family), tiny_model(family, seed=3)
    direction = 8 * torch.randn(model.shape.d_model)
    hooks = [hw.edit("resid_post", LAYER, hw.add(direction), positions=[{1, 3}, {2}])]
    written = model.generate(PROMPTS, hooks, max_new_tokens=STEPS, progress=False).tokens
    for prompt, tokens, places in zip(PROMPTS, written, ([1, 3], [2]), strict=True):

        def add(activation, places=places):
            activation[:, places] += direction

        assert tokens == continued_plainly(hf, family, "resid_post", prompt, add)[: len(tokens)]
        expected = plainly(hf, family, "resid_post", prompt, add)
        torch.testing.assert_close(model.run([prompt], _alone(direction, places))[0], expected, **CLOSE)


def _alone(direction, places):
    return [hw.edit("resid_post", LAYER, hw.add(direction), positions=set(places))]


@pytest.mark.parametrize("family", ["llama", "neox"])
def test_roles_are_resolved_in_each_prompt_and_edited_together(models, family):
    model = models(family)
    direction = torch.randn(model.shape.d_model)
    batch = model.tokenize(TEXTS)
    strings = [model.token_strings(row[real].tolist()) for row, real in zip(batch.tokens, batch.mask, strict=True)]
    places = [{row.index(" France"), len(row) - 1} for row in strings]
    roles = {"country": [" France", " France"], "end": "last"}
    by_role = model.run(
        TEXTS,
        hooks=[hw.edit("resid_mid" if family == "llama" else "mlp_out", LAYER, hw.add(direction), positions=roles)],
    )
    by_hand = model.run(
        TEXTS,
        hooks=[hw.edit("resid_mid" if family == "llama" else "mlp_out", LAYER, hw.add(direction), positions=places)],
    )
    assert torch.equal(by_role, by_hand)
    assert not torch.equal(by_role, model.run(TEXTS))


def test_the_record_of_a_text_tells_dictionaries_and_features_apart(llama):
    def recorded(features, factor=2.0):
        return str(llama.generate(PROMPTS, [hw.edit(features, None, hw.scale(factor))], max_new_tokens=1).run.options)

    _, features = of_features(llama, "resid_post")
    _, others = of_features(llama, "resid_post")
    assert recorded(features) == recorded(features)
    assert len({recorded(features), recorded(others), recorded(features.only([1])), recorded(features, 3.0)}) == 4


def test_edits_of_features_that_cannot_be_are_refused_in_one_line(llama):
    _, features = of_features(llama, "resid_post")
    narrow = Dictionary(7)
    with pytest.raises(InputError, match="layer=2 must be None, the dictionary has its own"):
        hw.edit(features, 2, "zero")
    with pytest.raises(InputError, match="has no heads"):
        hw.edit(features, None, "zero", heads=[0])
    with pytest.raises(InputError, match="does not accept resid_post of LlamaForCausalLM, 32 wide"):
        llama.run(PROMPTS, hooks=[hw.edit(hw.features(narrow.encode, narrow.decode, layer=1), None, "zero")])
    with pytest.raises(InputError, match="Did you mean 'resid_post'"):
        hw.edit("resid_pots", 0, "zero")


@pytest.mark.parametrize("made", [hw.add, lambda v: hw.scale(1 + v[0]), lambda v: hw.noise(abs(v[0]), 1)])
def test_a_dose_of_zero_is_run_and_changes_nothing(llama, made):
    direction, plain = np.linspace(-1, 1, llama.shape.d_model), llama.run(PROMPTS)
    texts = [llama.generate(PROMPTS, max_new_tokens=6, progress=False)]
    runs = []
    for dose in (0, 8):
        hooks = [hw.edit("resid_post", LAYER, made(dose * direction))]
        runs.append(llama.run(PROMPTS, hooks=hooks))
        texts.append(llama.generate(PROMPTS, hooks, max_new_tokens=6, progress=False))
    assert torch.equal(runs[0], plain)
    assert not torch.equal(runs[1], plain)
    assert texts[0] == texts[1] != texts[2]
    options = {"sites": "resid_post", "metric": hw.logit_difference(5, 9), "progress": False}
    assert (hw.patch(llama, PROMPTS, values=made(0 * direction), **options).table["effect"].abs() < 1e-5).all()


def test_arrays_and_lists_of_numbers_are_values_as_tensors_are(llama):
    vector = torch.linspace(-1, 1, llama.shape.d_model)
    for values in (lambda v: v, hw.add):
        found = [
            llama.run(PROMPTS, hooks=[hw.edit("resid_post", LAYER, values(given))])
            for given in (vector, vector.numpy(), vector.tolist(), tuple(vector.tolist()))
        ]
        assert all(torch.equal(found[0], other) for other in found[1:])


def left_alone(activation, other, place):
    return activation.clone()


def test_a_single_hook_needs_no_list_and_a_site_with_a_layer_is_an_edit(llama):
    steer = hw.edit("resid_post", LAYER, hw.add(torch.ones(llama.shape.d_model)))
    halved = "blocks.1.hook_resid_post", lambda activation, hook: activation / 2
    for hook in (steer, halved):
        assert torch.equal(llama.run(TEXTS, hook), llama.run(TEXTS, [hook]))
    with pytest.raises(InputError, match=r"give \[hw\.edit\(site, layer, value\)\]"):
        llama.run(TEXTS, ("resid_post", 1, hw.add(torch.ones(llama.shape.d_model))))


def test_values_that_change_no_row_of_a_sweep_are_refused(llama, tmp_path):
    options = {"sites": ["resid_pre", "z"], "metric": hw.logit_difference(5, 9), "progress": False}
    for more in ({}, {"method": "attribution"}, {"out": tmp_path}, {"out": tmp_path}):
        with pytest.raises(
            InterventionError, match=r"function \(left_alone\) given as values left every row"
        ) as refused:
            hw.patch(llama, PROMPTS, values=left_alone, **options, **more)
        assert "\n" not in str(refused.value)
    with pytest.raises(InterventionError, match="left every row of z"):
        hw.ablate(llama, PROMPTS, heads=[(0, 1)], values=left_alone, metric=options["metric"], progress=False)

    def in_one_place(activation, other, place):
        return torch.where(((place.layer == 2) & (place.position == 3))[:, None], activation + 1, activation)

    assert hw.patch(llama, PROMPTS, values=in_one_place, **options).table["effect"].abs().max() > 0


RAGGED = [" the capital of France is", " see the big cat", " the dog"]


def decoded_by_whole_runs(model, prompts, hooks, steps):
    """Greedy tokens of each prompt: every step runs all texts anew, with the edits at all of their tokens."""
    rows = [list(row) for row in model.tokenize(prompts).ids]
    ends = [len(row) for row in rows]
    for _ in range(steps):
        logits = model.run(rows, hooks=hooks, keep="last")[:, -1]
        rows = [[*row, token] for row, token in zip(rows, logits.argmax(-1).tolist(), strict=True)]
    return [row[end:] for row, end in zip(rows, ends, strict=True)]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["pattern", "by position", "by prompt", "function"])
def test_an_edit_of_all_positions_is_in_generation_what_it_is_in_runs_of_the_grown_texts(family, kind):
    model = tiny_hooked(family)
    by_token = 3 * torch.randn(3, 16, model.shape.d_model)

    def by_place(activation, other, place):
        return activation + by_token.to(activation)[place.example, place.position]

    edit = {
        "pattern": hw.edit("pattern", 1, hw.scale(0.5)),
        "by position": hw.edit("resid_post", 0, by_token),
        "by prompt": hw.edit("resid_post", 0, hw.add(by_token[:, 0])),
        "function": hw.edit("resid_post", 0, by_place),
    }[kind]
    wanted = decoded_by_whole_runs(model, RAGGED, [edit], 5)
    for batch_size in (1, 2, 64):
        options = {"max_new_tokens": 5, "batch_size": batch_size, "progress": False}
        tokens = model.generate(RAGGED, hooks=[edit], **options).tokens
        cut = [row[: len(found)] for row, found in zip(wanted, tokens, strict=True)]
        assert tokens == cut
    plain = model.generate(RAGGED, max_new_tokens=5, progress=False).tokens
    assert plain != tokens


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_edit_attached_by_a_context_is_in_generation_the_edit_given_to_it(family):
    model = tiny_hooked(family)
    by_token = 3 * torch.randn(1, 16, model.shape.d_model)
    options = {"max_new_tokens": 5, "progress": False}
    plain = model.generate(RAGGED, **options).tokens
    for edit in (
        hw.edit("pattern", 1, hw.scale(0.5)),
        hw.edit("resid_post", 0, hw.add(by_token)),
        hw.edit("resid_post", 0, lambda activation, other, place: activation + by_token[0, place.position]),
    ):
        with model.hooks([edit]):
            attached = model.generate(RAGGED, **options).tokens
            cache = DynamicCache()
            model.run([[40, 41]], past_key_values=cache)
            continued = model.run([[42]], past_key_values=cache)
        assert attached == model.generate(RAGGED, hooks=[edit], **options).tokens != plain
        assert torch.allclose(continued[0, -1], model.run([[40, 41, 42]], [edit])[0, -1], atol=1e-5)


def test_an_edit_attached_by_a_context_knows_which_prompt_is_in_which_batch():
    model = tiny_hooked("llama")
    numbered = hw.edit("resid_post", 0, lambda activation, other, place: activation + place.example[:, None])
    texts = [[40, 41], [42, 43, 44, 45], [46]]  # a cache sorts them by length
    options = {"sites": ["resid_post"], "layers": [0], "progress": False}
    plain = model.cache(texts, **options)
    for batch_size in (1, 2, 3):
        with model.hooks([numbered]):
            edited = model.cache(texts, batch_size=batch_size, **options)
        for i in range(3):
            added = edited.example("resid_post", 0, i) - plain.example("resid_post", 0, i)
            assert torch.allclose(added, torch.full_like(added, i), atol=1e-5)


def test_generated_tokens_get_noise_of_their_own_and_each_prompt_its_own_draw():
    model, seen = tiny_hooked("llama"), []
    edit = hw.edit("resid_post", 1, hw.noise(3.0, samples=1, absolute=True))
    before = ("blocks.1.hook_resid_post", lambda activation, hook: seen.append(activation.clone()))
    model.generate(RAGGED[:1], max_new_tokens=4, hooks=[hw.edit("resid_post", 1, "zero"), edit, before], progress=False)
    drawn = torch.stack([one[0, -1] for one in seen])
    assert torch.corrcoef(drawn).triu(1).abs().max() < 0.8
    alone, together = (
        list(model.generate(RAGGED[:1] * 3, max_new_tokens=4, hooks=[edit], batch_size=size, progress=False))
        for size in (1, 64)
    )
    assert alone == together
    assert len(set(alone)) == 3


def test_values_that_generated_tokens_do_not_have_are_refused():
    model = tiny_hooked("llama")
    options = {"max_new_tokens": 3, "progress": False}
    for values, message in [
        (torch.randn(1, 6, model.shape.d_model), r"must be .* \(example 1, position 7, d_model 32\)"),
        (hw.mean([" the capital of France is", " the capital of Italy is"]), "none for generated ones"),
        (hw.resample([" the capital of Italy is"]), "none for generated ones"),
    ]:
        with pytest.raises(InputError, match=message):
            model.generate(RAGGED[:1], hooks=[hw.edit("resid_post", 1, values)], **options)
    named = hw.edit("resid_post", 1, hw.mean([" the capital of France is", " the capital of Italy is"]), positions=-1)
    model.generate(RAGGED[:1], hooks=[named], **options)
