"""Two small attention circuits on a GPT-2 with learned positions: induction, and name movers.

Attention scores are CERTAIN times small whole or half numbers, so each head's choice below is made with a probability
within e⁻¹⁰ of 1 (e⁻³⁰ where codes are one-hot). A head that finds nothing rests on BOS, from which nothing is moved.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence

import torch
from jaxtyping import Float
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from headwater.calls import checked_call
from headwater.models.transformers_names import PreTrainedTokenizerFast
from headwater.planted.wiring import CERTAIN, Head, Layout, PlantedModel, gpt2, word_token

WORDS = tuple(
    "ant bat cow dog elk fox gnu hen ibis jay koala lion mole newt owl pig quail rat seal toad".split()  # noqa: SIM905
)
NAMES = tuple("Anna Boris Clara David Emma Frank Grace Henry Irene Jacob Karen Louis".split())  # noqa: SIM905
N_POSITIONS = 64
CODE_WIDTH = 48
PREVIOUS_TOKEN_HEAD = (0, 1)
INDUCTION_HEAD = (1, 2)
DUPLICATE_NAME_HEAD = (0, 2)
INHIBITION_HEAD = (1, 1)
NAME_MOVER_HEAD = (2, 3)


@checked_call
def induction(words: tuple[str, ...] = WORDS, seed: int = 0) -> PlantedModel:
    """Build a previous-token head and an induction head; the other heads of the two layers write nothing.

    Ground truth. Tokens have ±1 codes c of unit length, any two with an inner product of at most 1/2.
      PREVIOUS_TOKEN_HEAD at position i attends to i − 1 (BOS to itself) and writes c of the token there to `previous`.
      INDUCTION_HEAD at position i attends to the positions whose previous token equals the token at i (evenly, where
      there are several; to BOS where there is none) and writes c of their token to the logits.
    So after `... A B ... A` the most likely token is B, its logit 8 and all others 4 or less; after a token that has
    not been seen, all logits are 0.
    """
    tokenizer = build_tokenizer((), always=words)
    layout = Layout(token=CODE_WIDTH, previous=CODE_WIDTH, out=CODE_WIDTH, position=N_POSITIONS)
    codes = _separate_codes(len(tokenizer), seed)
    codes[tokenizer.bos_token_id] = 0.0
    token, previous, position = layout["token"], layout["previous"], layout["position"]
    anywhere, at_bos = layout.total("position"), position[:1]
    shifted = torch.cat([position[:1], position[:-1]])
    previous_token = Head(query=CERTAIN * position, key=shifted, read=token, write=previous)
    rest = 0.75 * at_bos
    induct = Head(
        query=torch.cat([CERTAIN * token, CERTAIN * anywhere]),
        key=torch.cat([previous, rest]),
        read=token,
        write=8 * layout["out"],
    )
    return gpt2(
        tokenizer,
        embedding=codes @ token,
        positions=position,
        unembedding=codes @ layout["out"],
        heads={PREVIOUS_TOKEN_HEAD: previous_token, INDUCTION_HEAD: induct},
        n_layers=2,
        n_heads=4,
    )


@checked_call
def name_mover() -> PlantedModel:
    """Build the indirect-object circuit: find the name said twice, look away from it, copy the other.

    Ground truth, for a text with names, S standing for one that comes twice (S1, S2), IO for one that comes once, and
    END for any position after S2:
      DUPLICATE_NAME_HEAD at a name attends to its earlier occurrence and writes its code to `duplicate`: at S2 only.
      INHIBITION_HEAD attends to S2 from every position after it and moves the code into `inhibit`.
      NAME_MOVER_HEAD attends to the names that `inhibit` does not hold, evenly, and copies them to the logits.
    The logit of IO is 10 and of S 0; with three different names instead, all three get 10/3. Words that are no names
    have a zero embedding. The logits at END depend on what three heads write and on nothing else: DUPLICATE_NAME_HEAD
    at S2, INHIBITION_HEAD and NAME_MOVER_HEAD at END.
    """
    words = ["When", "and", "went", "to", "the", "store", "gave", "a", "drink", "Then", "had", "fun", "at", "park"]
    tokenizer = build_tokenizer((), always=[*NAMES, *words])
    n = len(NAMES)
    layout = Layout(name=n, duplicate=n, inhibit=n, out=n, position=N_POSITIONS)
    name, position = layout["name"], layout["position"]
    anywhere, at_bos = layout.total("position"), position[:1]
    is_name, rest = layout.total("name"), 0.5 * at_bos
    duplicate = Head(
        query=CERTAIN * torch.cat([name, -position, anywhere]),
        key=torch.cat([name, position, rest]),
        read=name,
        write=layout["duplicate"],
    )
    inhibit = Head(
        query=CERTAIN * anywhere,
        key=layout.total("duplicate") + rest,
        read=layout["duplicate"],
        write=layout["inhibit"],
    )
    move = Head(
        query=CERTAIN * torch.cat([anywhere, -layout["inhibit"]]),
        key=torch.cat([is_name + rest, name]),
        read=name,
        write=10 * layout["out"],
    )
    ids = [word_token(tokenizer, word) for word in NAMES]
    spread = torch.zeros(len(tokenizer), n)
    spread[ids, range(n)] = 1.0
    return gpt2(
        tokenizer,
        embedding=spread @ name,
        positions=position,
        unembedding=spread @ layout["out"],
        heads={DUPLICATE_NAME_HEAD: duplicate, INHIBITION_HEAD: inhibit, NAME_MOVER_HEAD: move},
        n_layers=3,
        n_heads=4,
    )


def _separate_codes(count: int, seed: int) -> Float[Tensor, "neuron d_model"]:
    """Draw ±1 codes of unit length one by one, keeping those within 1/2 of every earlier one."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.zeros(count, CODE_WIDTH)
    for index in range(count):
        while True:
            code = torch.randint(0, 2, (CODE_WIDTH,), generator=generator) * 2.0 - 1.0
            code /= CODE_WIDTH**0.5
            if index == 0 or (codes[:index] @ code).abs().max() <= 0.5:
                codes[index] = code
                break
    return codes


# The world's tokenizer: every word of the corpus, with the space before it, is one token; anything else is bytes.
#
# It is a Unigram model over GPT-2's byte alphabet: words score high, the 256 single bytes low, so that a word is
# spelled out only when it is not in the vocabulary. The start of a text and the start of a line count as a space:
# "Paris" and " Paris" are the same token wherever they are. Every text begins with exactly one `<s>`; there is no
# unknown token.


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
