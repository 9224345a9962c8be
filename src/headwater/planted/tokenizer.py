"""The world's tokenizer: every word of the corpus, with the space before it, is one token; anything else is bytes.

It is a Unigram model over GPT-2's byte alphabet: words score high, the 256 single bytes low, so that a word is spelled
out only when it is not in the vocabulary. The start of a text and the start of a line count as a space: "Paris" and
" Paris" are the same token wherever they are. Every text begins with exactly one `<s>`; there is no unknown token.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, PAD = "<s>", "<pad>"
BOS_ID, PAD_ID = 0, 1


def build_tokenizer(
    texts: Iterable[str],
    always: Iterable[str] = (),
    *,
    marks: Sequence[str] = (),
    endings: Sequence[str] = (),
    spelled: Container[str] = (),
) -> PreTrainedTokenizerFast:
    """Make the tokenizer in which every word of `texts` is one token.

    Args:
        texts: what the vocabulary is taken from: the most frequent word gets the smallest id.
        always: words that must be there, in `texts` or not.
        marks: special tokens beside `<s>` and `<pad>`, as the marks of a chat's turns.
        endings: pieces that a word may end in, with no space before them.
        spelled: words that are put together from pieces, as 1732 of 17 and 32.
    """
    split = pre_tokenizers.ByteLevel(add_prefix_space=True)
    counts = Counter(piece for text in texts for piece, _ in split.pre_tokenize_str(text))
    counts.update(piece for word in sorted(set(always)) for piece, _ in split.pre_tokenize_str(word))
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    words = [piece for piece, _ in common if len(piece) > 1 and piece[1:] not in spelled]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [(mark, 0.0) for mark in (BOS, PAD, *marks)] + [(byte, -20.0) for byte in alphabet]
    pieces += [(ending, -1.0) for ending in endings] + [(word, -1.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=None, byte_fallback=False))
    tokenizer.normalizer = normalizers.Replace(Regex(r"\n(?=\S)"), "\n ")
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    tokenizer.add_special_tokens(list(marks))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=BOS,
        pad_token=PAD,
        add_bos_token=True,
        add_prefix_space=True,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
