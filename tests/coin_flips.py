"""Answers that are right by the flip of a coin: no probe can tell them apart."""

import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.models.generation import Generated
from headwater.questions import asking
from tests import chance
from tests.tiny import WORDS, tiny_model, tiny_tokenizer

SAID = WORDS[:16]
"""What the answers name, and the accepted answers are; each is one token."""
QUESTIONS = 400


def flip_model():
    """A random model whose tokenizer knows the words of the questions and answers."""
    tokenizer = tiny_tokenizer((*WORDS, "It", "as", "far", "know", "What", "capital"))
    return hw.load(tiny_model("llama", len(tokenizer)), tokenizer=tokenizer)


def flip_questions():
    """Questions in PopQA's wording about invented places, and to each an answer that is right by the flip of a coin."""
    rng = chance.rng()
    rows = []
    for number in range(QUESTIONS):
        first, second = rng.choice(SAID, 2, replace=False)
        place = f"{rng.choice(WORDS[16:])} {number}"
        said = f" It is {first}, as far as I know.\n"
        accepted = first if rng.random() < 0.5 else second
        rows.append((f"What is the capital of {place}?", str(accepted), place, said))
    return pd.DataFrame(rows, columns=["question", "answers", "subject", "said"])


def answered(model, coin_flips, extractor=None):
    """Let the model say what was made up, and label and locate it as any answer."""
    said = dict(zip(coin_flips["question"], coin_flips["said"], strict=True))

    def say(model, prompts, *, max_new_tokens, stop, hooks=()):
        read = [model.tokenizer.decode(row[real]) for row, real in zip(prompts.tokens, prompts.mask, strict=True)]
        texts = [said[prompt.split("Q: ")[1].split("\n")[0]] for prompt in read]
        rows = [torch.tensor(model.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        return Generated(tokens, -tokens.float(), lengths, torch.ones(len(rows), dtype=torch.bool))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "generate_tokens", say)
        table = coin_flips.drop(columns="said").assign(dataset="popqa", property="capital", relation="capital")
        return hw.answer(model, hw.load_questions(table), extractor=extractor, progress=False)


def name_of(text):
    """The word between "It is" and the comma."""
    return {"answer": text.split(" is ")[1].split(",")[0]}
