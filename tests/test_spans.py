"""Characters to tokens: the same whatever the tokenizer does to spaces, bytes, repeated words and unicode."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from headwater.models.tokens import encode
from headwater.questions.words import continuation_offsets, shifted, tokens_of
from tests.tiny import tiny_tokenizer

CORPUS = [
    "Q: What is the capital of South Carolina?\nA: It is Columbia, a hub.",
    "Where is São Paulo? Łódź, 東京 and Москва 🙂🙂 are cities.\n\n",
    "the the the of of of . , ? ! ' -",
]


def byte_level_bpe(trim_offsets):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentencepiece_like():
    """As Llama 2 has it: a space of its own in front, ▁ for spaces, bytes for what is not in the vocabulary."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -30.0) for byte in range(256))]
    pieces += [("▁", -6.0), *((letter, -8.0) for letter in "abcdefghijklmnopqrstuvwxyzQAWSCŁ東?:.,'")]
    pieces += [(word, -3.0) for word in ("▁What", "▁is", "▁the", "▁of", "▁Col", "umb", "ia", "A:", "▁A", "the")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {
    "unigram bytes": tiny_tokenizer(),
    "bpe": byte_level_bpe(trim_offsets=False),
    "bpe, trimmed": byte_level_bpe(trim_offsets=True),
    "sentencepiece": sentencepiece_like(),
}
TEXTS = st.one_of(
    st.text(st.sampled_from("ab the of\nÉéŁ東京🙂\u0301?' A:."), min_size=1, max_size=25),
    st.lists(st.sampled_from(["the", " the", " of", " South", "\n", " Łódź", "🙂", " A:", "?"]), min_size=1).map(
        "".join
    ),
)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150)
@given(before=TEXTS, after=TEXTS, data=st.data())
@example(before="Q: the?\nA:", after=" the 🙂 the", data=None)
def test_generated_tokens_have_the_characters_the_tokenizer_would_give_them(name, before, after, data):
    tokenizer = TOKENIZERS[name]
    text = f"A{before}A{after}"
    ids, offsets = encode(tokenizer, text)
    split = next(i for i, (_, end) in enumerate(offsets) if end > len(before) + 1)
    while split > 1 and offsets[split - 1][1] > offsets[split][0]:
        split -= 1
    split = max(split, 1)
    found, own = continuation_offsets(tokenizer, ids[split - 1 : split], ids[split:])
    assert text.endswith(found)
    joined = (*offsets[:split], *shifted(own, len(text) - len(found)))
    assert len(joined) == len(ids)
    places = [i for i, character in enumerate(text) if not character.isspace()]
    for place in places if data is None else [data.draw(st.sampled_from(places))]:
        ours, theirs = tokens_of(joined, [(place, place + 1)]), tokens_of(offsets, [(place, place + 1)])
        if name == "sentencepiece":  # its offsets do not tell apart the characters of a run of bytes
            assert set(ours) <= set(theirs)
            assert text[place] in tokenizer.decode([ids[token] for token in ours])
        else:
            assert ours == theirs


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100)
@given(text=TEXTS, data=st.data())
def test_the_tokens_of_a_span_hold_its_characters_and_none_can_be_spared(name, text, data):
    tokenizer = TOKENIZERS[name]
    ids, offsets = encode(tokenizer, text)
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    if text[start].isspace() or text[end - 1].isspace():
        return
    tokens = tokens_of(offsets, [(start, end)])
    assert list(tokens) == list(range(tokens[0], tokens[-1] + 1))
    covered = {place for i in tokens for place in range(*offsets[i])}
    assert {place for place in range(start, end) if not text[place].isspace()} <= covered
    for edge in (tokens[0], tokens[-1]):
        assert set(range(*offsets[edge])) & set(range(start, end))
    for outside in set(range(len(ids))) - set(tokens):
        assert not set(range(*offsets[outside])) & set(range(start, end))


def test_a_character_in_bytes_belongs_to_every_token_that_holds_one_of_them():
    tokenizer = TOKENIZERS["unigram bytes"]
    ids, _ = encode(tokenizer, " cat🙂 cat")
    text, offsets = continuation_offsets(tokenizer, ids[:1], ids[1:])
    assert text == "🙂 cat"
    assert offsets == ((0, 1), (0, 1), (0, 1), (0, 1), (1, 5))
    cut, short = continuation_offsets(tokenizer, ids[:1], ids[1:3])
    assert (cut, short) == ("\ufffd", ((0, 1), (1, 1)))


def test_the_same_word_twice_is_two_spans():
    tokenizer = TOKENIZERS["unigram bytes"]
    _, offsets = encode(tokenizer, " the cat the cat", bos=(0,))
    assert tokens_of(offsets, [(13, 16), (5, 8)]) == (2, 4)
    assert tokens_of(offsets, [(9, 12)]) == (3,)
