"""Tokens: exactly one BOS where the model wants one, batches without silent padding, spans by offsets."""

import json
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformer_lens.model_bridge import TransformerBridge

import headwater as hw
from headwater.errors import InputError
from headwater.heads.relations import word_tokens
from headwater.models.checkpoint import load_tokenizer
from headwater.models.tokens import Batch, encode, make_batch, token_span, token_strings
from tests.tiny import FAMILIES, WORDS, tiny_folder, tiny_hooked, tiny_model, tiny_tokenizer

WANTS_BOS = {"gpt2", "llama", "llama-tied", "mistral", "gemma2", "gemma3"}
TOKENIZER = tiny_tokenizer()
SENTENCES = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map(lambda words: " " + " ".join(words))


def llama2_style_tokenizer() -> tf.PreTrainedTokenizerFast:
    """As in Llama 2: every text gets a space in front, and spaces are the character ▁."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("▁", -2.0)] + [("▁" + word, -1.0) for word in WORDS]
    tokenizer = Tokenizer(models.Unigram(pieces + [(c, -9.0) for c in "abcdefghijklmnopqrstuvwxyz"], unk_id=0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Metaspace()
    return tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_begins_with_exactly_one_bos_where_the_model_wants_one(name, models):
    model = models(name)
    for text in ("Paris is", "<s>Paris is"):
        tokens = model.tokenize(text).tokens[0].tolist()
        assert tokens.count(0) == (1 if name in WANTS_BOS or "<s>" in text else 0)
        assert (tokens[0] == 0) == (name in WANTS_BOS or "<s>" in text)
    assert model.bos == ((0,) if name in WANTS_BOS else ())


KINDS = {
    # kind: what the tokenizer writes before a text, its BOS, end and further special tokens, the family of the model;
    # then what texts begin with by default, by the tokenizer, by TransformerLens
    "GPT-2": ("", "<|endoftext|>", "<|endoftext|>", (), "gpt2", ("<|endoftext|>", "", "<|endoftext|>")),
    "Pythia": ("", "<|endoftext|>", "<|endoftext|>", (), "neox", ("", "", "")),
    "Llama": ("<s>", "<s>", "</s>", (), "llama", ("<s>", "<s>", "<s>")),
    "Llama, BOS not written": ("", "<s>", "</s>", (), "llama", ("", "", "<s>")),
    "SmolLM2": ("", "<|endoftext|>", "<|endoftext|>", (), "llama", ("<|endoftext|>", "", "<|endoftext|>")),
    "SmolLM2-Instruct": ("", "<|im_start|>", "<|im_end|>", (), "llama", ("", "", "<|im_start|>")),
    "Qwen": ("", None, "<|im_end|>", (), "qwen2", ("", "", "")),
    "DeepSeek-R1-Distill-Qwen": ("<|begin|>", "<|begin|>", "<|end|>", (), "qwen2", ("<|begin|>", "<|begin|>", "")),
    "GLM": ("[gMASK]<sop>", None, "<|user|>", ("[gMASK]", "<sop>"), "llama", ("[gMASK]<sop>", "[gMASK]<sop>", "")),
}


def tokenizer_of_kind(before: str, bos: str | None, eos: str, others: tuple[str, ...]) -> tf.PreTrainedTokenizerFast:
    """A tokenizer that writes some special tokens before a text, and an end token of its own after it."""
    backend = tiny_tokenizer(bos=False).backend_tokenizer
    special = tuple(dict.fromkeys([*([bos] if bos else []), eos, *others]))
    backend.add_special_tokens(list(special))
    written = [token for token in special if token in before]
    backend.post_processor = processors.TemplateProcessing(
        single=[*written, "$A", eos], special_tokens=[(token, backend.token_to_id(token)) for token in special]
    )
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token="<pad>")


@pytest.mark.parametrize("kind", KINDS)
def test_texts_begin_as_the_tokenizer_begins_them_or_with_a_token_that_separates_documents(kind):
    *tokens, family, expected = KINDS[kind]
    tokenizer = tokenizer_of_kind(*tokens)
    network, text = tiny_model(family, d_vocab=len(tokenizer)), " Paris is"
    for bos, begins in zip((None, "tokenizer", "transformer_lens"), expected, strict=True):
        ids = tuple(tokenizer(begins, add_special_tokens=False)["input_ids"])
        with warnings.catch_warnings(record=True) as lines:
            warnings.simplefilter("always")
            model = hw.load(network, tokenizer=tokenizer, bos=bos)
        rows = [model.tokenize(given).tokens[0].tolist() for given in (text, begins + text)]
        assert rows == [[*ids, *tokenizer(text, add_special_tokens=False)["input_ids"]]] * 2
        assert model.bos == ids
        assert f"texts begin with {begins!r}" in repr(model) if begins else "begin with nothing" in repr(model)
        lines = [str(line.message) for line in lines if "texts begin with" in str(line.message)]
        assert len(lines) == (bos is None and len(set(expected)) > 1)
        assert all(repr(begins) in line for line in lines for begins in expected if begins)
        run = hw.token_statistics(model, [text], progress=False).run
        assert run.bos == list(ids)
        assert len(model.tokenize(text).offsets[0]) == len(rows[0])


def test_a_user_chooses_what_texts_begin_with():
    tokenizer = tokenizer_of_kind(*KINDS["GLM"][:4])
    network = tiny_model("llama", d_vocab=len(tokenizer))
    first, second = tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>"])
    for bos, ids in ((False, ()), ("<sop>", (second,)), (second, (second,)), ([second, first], (second, first))):
        assert hw.load(network, tokenizer=tokenizer, bos=bos).bos == ids
    for wrong in ("<no such>", True, 10**6, [], -1, 1.5, [[1]]):
        with pytest.raises(InputError, match=r"bos=.* names no token of the tokenizer: give False"):
            hw.load(network, tokenizer=tokenizer, bos=wrong)
    with pytest.raises(InputError, match=r"bos='<sop>' sets what texts begin with, but there is no tokenizer"):
        hw.load(network, bos="<sop>")


def test_a_bridge_is_read_by_the_tokenizers_own_rule_and_not_by_the_one_that_transformer_lens_set(tmp_path):
    tokenizer = tokenizer_of_kind(*KINDS["SmolLM2-Instruct"][:4])
    tiny_model("llama", d_vocab=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    bridge = TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
    assert bridge.tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    assert hw.load(bridge).bos == hw.load(tmp_path).bos == ()


@given(st.lists(SENTENCES, min_size=1, max_size=5))
def test_a_batch_holds_each_texts_own_tokens_and_padding_only_behind_them(texts):
    batch = make_batch(texts, TOKENIZER, bos=(0,))
    alone = [make_batch(text, TOKENIZER, bos=(0,)).tokens[0] for text in texts]
    assert batch.tokens.shape == (len(texts), max(map(len, alone)))
    for row, mask, tokens in zip(batch.tokens, batch.mask, alone, strict=True):
        assert torch.equal(row[: len(tokens)], tokens)
        assert mask.tolist() == [True] * len(tokens) + [False] * (len(row) - len(tokens))
        assert set(row[len(tokens) :].tolist()) <= {1}


@given(st.lists(st.lists(st.integers(2, 290), min_size=1, max_size=7), min_size=1, max_size=4))
def test_lists_tensors_and_left_padded_tensors_of_the_same_ids_make_the_same_batch(rows):
    from_lists = make_batch(rows, TOKENIZER)
    width = max(map(len, rows)) + 2
    left = torch.tensor([[1] * (width - len(row)) + row for row in rows])
    from_left = make_batch(left, TOKENIZER, mask=(left != 1).int())
    right = torch.tensor([row + [1] * (width - len(row)) for row in rows])
    from_right = make_batch(right, TOKENIZER, mask=right != 1)
    for other in (from_left, from_right):
        assert torch.equal(from_lists.tokens, other.tokens)
        assert torch.equal(from_lists.mask, other.mask)


@pytest.mark.parametrize("tokens", [[[5, 6, 1], [5, 6, 7]], [[1, 5, 6], [7, 8, 9]]])
def test_a_padded_tensor_without_mask_is_refused(tokens):
    with pytest.raises(InputError, match="mask="):
        make_batch(torch.tensor(tokens), TOKENIZER)


def test_a_leading_bos_is_not_taken_for_padding_when_the_two_share_an_id():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "<s>"
    assert make_batch(torch.tensor([[0, 5, 6]]), tokenizer).mask.all()
    for padded in ([[0, 0, 5, 6]], [[0, 5, 6, 0]]):
        with pytest.raises(InputError, match="mask="):
            make_batch(torch.tensor(padded), tokenizer)


@pytest.mark.parametrize(
    ("mask", "complaint"),
    [([[1, 0, 1]], "unbroken"), ([[0, 0, 0]], "unbroken"), ([[1, 1]], "shape")],
)
def test_a_mask_must_mark_one_run_of_tokens_in_every_row(mask, complaint):
    with pytest.raises(InputError, match=complaint):
        make_batch(torch.tensor([[5, 6, 7]]), TOKENIZER, mask=torch.tensor(mask))


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        ([], "none empty"),
        ([[]], "none empty"),
        ([[5], []], "no tokens"),
        ("", "no tokens"),
        (torch.ones(2, 2), "whole numbers"),
        (torch.ones(2, 2, 2, dtype=torch.long), "one or two axes"),
        (torch.ones(1, 0, dtype=torch.long), "none empty"),
        ([[5, 300]], "Token id 300"),
        ([[-1]], "Token id -1"),
        ([[5] * 65], "65 tokens"),
    ],
)
def test_inputs_that_cannot_be_run_are_refused_with_the_reason(inputs, complaint):
    with pytest.raises(InputError, match=complaint):
        make_batch(inputs, TOKENIZER, d_vocab=292, n_ctx=64)


@pytest.mark.parametrize("inputs", [[1.5], ["a", 3], [["a"]], 7, None, [True, 5], np.array([[True, False]])])
def test_anything_but_texts_and_ids_is_refused(inputs):
    with pytest.raises(InputError, match="whole numbers"):
        make_batch(inputs, TOKENIZER)


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        ({"tokens": [1]}, "A dict was given: give a text"),
        (TOKENIZER([" cat"]), "A BatchEncoding was given: .*found\\['input_ids'\\] with mask"),
        (pd.DataFrame({"clean": [" cat"]}), "A DataFrame was given: .*one column"),
        ({" cat", " dog"}, "A set was given: give a text, a list of texts"),
        (b" cat", "A bytes was given"),
    ],
)
def test_what_would_be_read_by_its_keys_or_columns_is_refused(inputs, complaint):
    with pytest.raises(InputError, match=complaint):
        make_batch(inputs, TOKENIZER)


@pytest.mark.parametrize("inputs", [np.array([5, 6]), [np.int64(5), np.int32(6)], [torch.tensor(5), torch.tensor(6)]])
def test_numbers_of_any_library_are_token_ids(inputs):
    assert make_batch(inputs, TOKENIZER).tokens.tolist() == [[5, 6]]


@pytest.mark.parametrize("rows", [[[1, 5, 6], [7, 8, 9]], [[5, 6, 7], [5, 6, 1]], [[1, 1, 5], [5, 6, 7], [6]]])
def test_padded_lists_of_ids_are_refused(rows):
    with pytest.raises(InputError, match="padding id 1, and there is no mask"):
        make_batch(rows, TOKENIZER)


def test_a_list_may_begin_and_end_with_one_token_that_also_pads():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "<s>"  # which also begins and ends texts
    assert make_batch([[0, 5, 6, 0], [0]], tokenizer).lengths.tolist() == [4, 1]
    for padded in ([0, 0, 5, 6], [5, 6, 0, 0]):
        with pytest.raises(InputError, match="padding id 0"):
            make_batch([padded], tokenizer)


@pytest.mark.parametrize("given", [list, torch.tensor])
def test_without_a_tokenizer_the_models_config_says_what_pads(given):
    config = SimpleNamespace(pad_token_id=9, bos_token_id=0, eos_token_id=[2, 3])
    with pytest.raises(InputError, match="padding id 9"):
        make_batch(given([[9, 9, 5], [4, 5, 6]]), None, config=config)
    assert make_batch(given([[0, 4, 5]]), None, config=config).tokens.tolist() == [[0, 4, 5]]
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    assert make_batch(torch.tensor([[9, 9, 5], [4, 5, 6]]), None, mask=mask, config=config).lengths.tolist() == [1, 3]


def test_a_text_with_half_a_character_is_refused_before_the_tokenizer_sees_it():
    with pytest.raises(InputError, match="lone surrogate"):
        make_batch(" cat \ud83d", TOKENIZER)


def test_texts_may_stand_in_a_column_of_a_table():
    tokenizer = tiny_tokenizer()
    texts = ["the capital of France", "Paris"]
    column = pd.DataFrame({"text": texts}, index=[7, 3])["text"]
    batch, same = (make_batch(inputs, tokenizer) for inputs in (column, texts))
    assert torch.equal(batch.tokens, same.tokens)
    assert batch.offsets == same.offsets


def test_one_list_of_ids_is_one_row_and_a_batch_passes_through():
    batch = make_batch([5, 6, 7], TOKENIZER)
    assert batch.tokens.tolist() == [[5, 6, 7]]
    assert make_batch(torch.tensor([5, 6, 7]), TOKENIZER).tokens.tolist() == [[5, 6, 7]]
    assert make_batch(batch, TOKENIZER) is batch


def test_a_batch_splits_into_pieces_no_wider_than_their_own_rows():
    batch = make_batch([[5] * n for n in (2, 3, 7, 1, 4)], TOKENIZER)
    pieces = list(batch.split(2))
    assert [piece.tokens.shape for _, piece in pieces] == [(2, 3), (2, 7), (1, 4)]
    for where, piece in pieces:
        assert torch.equal(piece.tokens, batch.tokens[where, : piece.tokens.shape[1]])


@given(SENTENCES, st.data())
def test_a_character_span_maps_to_the_tokens_that_hold_it(text, data):
    text = text + " – naïve 東京"
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    ids, offsets = encode(TOKENIZER, text, bos=(0,))
    span = token_span(offsets, start, end)
    before, inside = TOKENIZER.decode(ids[1 : span.start]), TOKENIZER.decode(ids[span.start : span.stop])
    assert text[start:end] in inside or "�" in inside
    assert text.startswith(before) or "�" in before
    assert all(not (first < end and start < last) for first, last in offsets[: span.start])


def test_a_span_outside_the_text_is_refused():
    _, offsets = encode(TOKENIZER, " Paris", bos=(0,))
    with pytest.raises(InputError, match="ends at 6"):
        token_span(offsets, 10, 12)


def test_batches_of_texts_carry_the_offsets_of_their_tokens():
    text = " Paris Rome"
    batch = make_batch([text, " cat"], TOKENIZER, bos=(0,))
    assert batch.offsets is not None
    span = token_span(batch.offsets[0], text.index("Rome"), len(text))
    assert token_strings(TOKENIZER, batch.tokens[0, span.start : span.stop].tolist()) == (" Rome",)
    assert batch.rows(1, 2).offsets == batch.offsets[1:]


@given(st.sampled_from(WORDS))
def test_a_word_of_the_vocabulary_is_one_token_after_a_space(word):
    one, several = word_tokens(TOKENIZER, [word, word + "ö"])
    assert token_strings(TOKENIZER, one) == (" " + word,)
    assert len(several) != 1


def test_a_tokenizers_own_leading_space_is_not_counted_as_a_token():
    tokenizer = llama2_style_tokenizer()
    assert len(encode(tokenizer, " Paris")[0]) == 2
    known, unknown = word_tokens(tokenizer, ["Paris", "xyz"])
    assert known == [tokenizer.convert_tokens_to_ids("▁Paris")]
    assert len(unknown) != 1


def test_token_strings_keep_the_spaces_of_either_kind_of_tokenizer():
    for tokenizer in (TOKENIZER, llama2_style_tokenizer()):
        (paris,), (cat,) = word_tokens(tokenizer, ["Paris", "cat"])
        assert token_strings(tokenizer, [paris, cat]) == (" Paris", " cat")
    assert token_strings(None, [5, 6]) == ("5", "6")


def test_an_unknown_word_is_not_the_unknown_token():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "Paris": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wordlevel = tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    assert word_tokens(wordlevel, ["Paris", "Rome"]) == [[1], []]


def test_special_tokens_that_only_the_class_knows_are_kept(tmp_path):
    """The hub's GPT-2 names no special tokens in its files; the class does."""
    folder = tiny_folder(tmp_path, "gpt2")
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<|endoftext|>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    loaded = load_tokenizer(folder)
    assert loaded.bos_token_id == loaded.eos_token_id == 256
    assert loaded("ab").input_ids == [vocabulary["a"], vocabulary["b"]]
    assert hw.load(folder, tokenizer=loaded).tokenize("ab").tokens.tolist() == [[256, vocabulary["a"], vocabulary["b"]]]


@pytest.mark.parametrize(("named", "times"), [(None, 1), ("GPT2Tokenizer", 2)])
def test_the_file_of_a_tokenizer_is_read_again_only_for_a_class_that_does_not_follow_it(
    named, times, tmp_path, monkeypatch
):
    TOKENIZER.save_pretrained(tmp_path)
    if named is not None:
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": named}))
    read, from_file = [], tf.PreTrainedTokenizerFast._from_pretrained.__func__

    def counted(cls, *given, **options):
        read.append(cls)
        return from_file(cls, *given, **options)

    monkeypatch.setattr(tf.PreTrainedTokenizerFast, "_from_pretrained", classmethod(counted))
    loaded = load_tokenizer(tmp_path)
    assert len(read) == times
    assert loaded.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    assert loaded.all_special_tokens == TOKENIZER.all_special_tokens


def test_a_batch_says_what_it_is_in_one_line():
    assert repr(make_batch([[5], [5, 6]], TOKENIZER)) == "Batch(2 sequences, 1 to 2 tokens)"
    assert isinstance(make_batch([[5]], TOKENIZER), Batch)


def test_a_mask_beside_texts_and_truth_values_as_ids_are_refused():
    with pytest.raises(InputError, match="texts, lists and batches need none"):
        make_batch(" Paris is", TOKENIZER, mask=torch.ones(1, 2))
    with pytest.raises(InputError, match="whole numbers"):
        make_batch([[True, False]], TOKENIZER)


CHAT = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
CHAT += "{% if add_generation_prompt %}[bot]{% endif %}"
CHATS = [
    [{"role": "user", "content": "the cat"}],
    [
        {"role": "user", "content": "the dog"},
        {"role": "assistant", "content": "small"},
        {"role": "user", "content": "a"},
    ],
]


@pytest.fixture(scope="module")
def chatty():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    return hw.load(tiny_model("llama"), tokenizer=tokenizer)


@pytest.mark.oracle
def test_chats_are_the_tokens_of_the_tokenizers_own_template_wherever_prompts_are_read(chatty):
    expected = [
        chatty.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS
    ]
    batch, quiet = chatty.tokenize(CHATS), {"progress": False}
    assert [row[:n] for row, n in zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)] == expected
    assert chatty.tokenize(CHATS[0]).tokens.tolist() == expected[:1]
    assert torch.equal(chatty.run(CHATS[0]), chatty.run(expected[:1]))
    other, metric = [{"role": "user", "content": "the dog"}], hw.logit_difference(5, 9)
    for read in (
        lambda one: chatty.generate(one, max_new_tokens=3, **quiet),
        lambda one: chatty.cache(one),
        lambda one: hw.lens(chatty, one, **quiet),
        lambda one: hw.direct_logit_attribution(chatty, one, tokens=(5, 9), **quiet),
        lambda one: hw.ablate(chatty, one, heads=[(0, 1)], metric=metric, **quiet),
        lambda one: hw.patch(chatty, one, other, sites="resid_post", metric=metric, **quiet),
    ):
        of_chat, of_ids = read(CHATS[0]).run, read(expected[:1]).run
        assert of_chat.options.pop("messages").startswith("written out by the tokenizer's chat template")
        of_ids.options.pop("messages", None)  # of the other prompt of a pair
        assert of_chat.options == of_ids.options
    scored = hw.token_statistics(chatty, CHATS[:1], **quiet)
    assert scored.run.options["messages"]
    assert scored.table["token"].tolist() == list(chatty.token_strings(expected[0][1:]))


def test_a_chat_whose_template_writes_no_bos_begins_without_one_wherever_it_is_read():
    tokenizer, quiet = tiny_tokenizer(), {"progress": False}
    tokenizer.chat_template = CHAT.replace("{{ bos_token }}", "")
    model = hw.load(tiny_model("llama"), tokenizer=tokenizer)
    chat = CHATS[0]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert model.bos
    assert expected[0] not in model.bos
    assert model.tokenize(chat).tokens.tolist() == [expected]
    model.hinted.add("template")
    assert model.tokenize(" the dog").tokens[0, 0] == model.bos[0]
    assert model.generate(chat, max_new_tokens=3, **quiet) == model.generate([expected], max_new_tokens=3, **quiet)
    table = hw.token_statistics(model, chat, **quiet).table
    assert table["token_id"].tolist() == expected[1:]
    log_p = model.run([expected])[0].log_softmax(-1)
    assert table["log_probability"].iloc[-1] == pytest.approx(float(log_p[-2, expected[-1]]), abs=1e-4)


def test_a_last_message_of_the_assistant_is_continued(chatty):
    (text,) = chatty.tokenize([*CHATS[0], {"role": "assistant", "content": "small"}]).texts
    assert text.endswith("[assistant] small")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([CHATS[0], " cat"], "is neither a chat nor a list of chats"),
        ([{"role": "user"}], "is neither a chat nor a list of chats"),
        (CHATS[0][0], "messages in a list"),
        ([[{"role": "user", "content": {}}, {"role": "user"}]], "is neither a chat"),
    ],
)
def test_what_is_no_chat_is_refused(chatty, inputs, message):
    with pytest.raises(InputError, match=message) as refused:
        chatty.tokenize(inputs)
    assert "\n" not in str(refused.value)


def test_chats_need_a_chat_template():
    model = tiny_hooked("llama")
    with pytest.raises(InputError, match="has no chat template: give texts"):
        model.run(CHATS[0])
