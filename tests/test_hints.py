"""Hints where people err: said where they help, and nowhere else."""

import warnings

import pytest
import torch

import headwater as hw
from headwater.models.loading import warn_of_other_beginnings
from headwater.models.tokens import warn_of_missing_spaces
from tests.tiny import tiny_hooked, tiny_model, tiny_tokenizer

PROMPTS = ("the capital of France is", "the capital of Italy is")
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model():
    return tiny_hooked("llama")


def said(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught]


def test_a_word_without_its_space_is_said_where_both_are_tokens(model):
    words = said(lambda: warn_of_missing_spaces(("A", " B"), ["is", " is"], model.tokenizer))
    assert len(words) == 1
    assert words[0].startswith("The answer 'A' and ' A', with a space, are two different tokens")


@pytest.mark.parametrize(
    ("answers", "ends"),
    [
        ((" A",), ["is"]),
        (("A",), [" "]),
        (("A",), ["("]),
        ((7, [3, 4]), ["is", "is"]),
        (("2",), ["is"]),
        (("Paris",), ["is"]),  # several tokens, which the metric itself refuses
    ],
)
def test_a_word_that_is_meant_as_it_stands_is_left_alone(model, answers, ends):
    assert said(lambda: warn_of_missing_spaces(answers, ends, model.tokenizer)) == []
    assert said(lambda: warn_of_missing_spaces(answers, ends, None)) == []


def test_a_sweep_a_lens_and_an_attribution_say_it_of_their_own_prompts(model):
    calls = [
        lambda: hw.patch(model, *PROMPTS, sites="resid_post", metric=hw.logit_difference("A", " B"), progress=False),
        lambda: hw.lens(model, list(PROMPTS), answer=["A", " B"], progress=False),
        lambda: hw.direct_logit_attribution(model, list(PROMPTS), tokens=("A", " B"), progress=False),
    ]
    for call in calls:
        with pytest.warns(UserWarning, match="a space, are two different tokens") as caught:
            call()
        assert [one.filename for one in caught] == [__file__]  # the user's line, not headwater's
        (one,) = [str(warned.message) for warned in caught]
        assert "' is' the one with the space is usually meant" in one
    at = hw.logit_difference("A", " B", at=1)
    assert said(lambda: hw.patch(model, *PROMPTS, sites="resid_post", metric=at, progress=False)) == []


def test_two_beginnings_of_a_prompt_are_said_once_for_texts_and_for_ids(model):
    (one,) = said(lambda: model.tokenize("<s><s> the cat"))
    assert one.startswith("Prompt 0 begins with two beginning-of-sequence tokens. ")
    (several,) = said(lambda: model.tokenize([[5, 6], [0, 0, 5], [0, 0, 7]]))
    assert several.startswith("Prompt 1 begins with two beginning-of-sequence tokens (2 of 3 prompts do).")
    for inputs in ("<s> the cat", " the cat", [[0, 5, 0, 0]], torch.tensor([[0]])):
        assert said(lambda inputs=inputs: model.tokenize(inputs)) == []
    with warnings.catch_warnings(action="ignore"):
        batch = model.tokenize("<s><s> the cat")
    assert said(lambda: model.tokenize(batch)) == []


def test_a_chat_model_asked_without_its_template_is_told_of_it():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chat = hw.load(tiny_model("llama"), tokenizer=tokenizer)

    def asked(prompts):
        return said(lambda: chat.generate(prompts, max_new_tokens=1, progress=False))

    assert asked("<s> the capital of France is") == []
    assert asked([[0, 5, 6]]) == []
    assert asked([{"role": "user", "content": "the cat"}]) == []
    tokenizer.chat_template = None
    assert asked("the capital of France is") == []
    tokenizer.chat_template = TEMPLATE
    (one,) = asked("the capital of France is")
    assert "has a chat template and reads plain text without it" in one
    assert asked("the capital of France is") == []


def test_smollm2_reads_texts_that_break_off_without_a_word_and_says_it_of_a_question():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chat = hw.load(tiny_model("llama"), tokenizer=tokenizer)
    chat.name = "smollm2"
    assert said(lambda: chat.run(" the capital of France is")) == []
    (one,) = said(lambda: chat.generate("the capital of France ?", max_new_tokens=1, progress=False))
    assert "has a chat template and reads plain text without it" in one


def test_only_smollm2_is_loaded_without_a_line_on_its_beginning():
    tokenizer = tiny_tokenizer()
    other = hw.load(tiny_model("llama"), tokenizer=tokenizer, bos=False)
    other.resolve_bos = lambda rule: (0,) if rule == "transformer_lens" else ()
    (one,) = said(lambda: warn_of_other_beginnings(other))
    assert "texts begin with nothing" in one
    other.name = "smollm2"
    assert said(lambda: warn_of_other_beginnings(other)) == []


@pytest.mark.parametrize(
    "reads",
    [
        lambda model: model.run(" the cat"),
        lambda model: model.cache(" the cat"),
        lambda model: hw.patch(model, *PROMPTS, sites="resid_post", metric=hw.logit_difference(5, 9), progress=False),
        lambda model: hw.lens(model, " the cat", progress=False),
        lambda model: hw.token_statistics(model, " the cat", progress=False),
        lambda model: hw.direct_logit_attribution(model, " the cat", tokens=(5, 9), progress=False),
    ],
)
def test_whatever_reads_plain_text_says_once_that_the_model_has_a_chat_template(reads):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chat = hw.load(tiny_model("llama"), tokenizer=tokenizer)
    (one,) = said(lambda: reads(chat))
    assert "has a chat template and reads plain text without it" in one
    assert said(lambda: reads(chat)) == []
