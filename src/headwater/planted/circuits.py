"""Write a transformer's weights by hand: what each head matches and moves; with two small circuits written this way.

The models are ordinary Hugging Face modules, so everything that loads a checkpoint can load them. Norms would distort
hand-written weights: the epsilon is 2²⁶ and the gain 2¹³, so that x / sqrt(mean(x²) + 2²⁶) · 2¹³ = x, exactly in
float32, where adding mean(x²) < 4 to 2²⁶ changes no bit. LayerNorm also subtracts the mean; one spare coordinate
balances every written vector, so the mean is zero already.

The residual stream is a `Layout`: named groups of coordinates. A head is four lists of directions in it (`Head`).
All other weights are zero.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from headwater.calls import checked_call
from headwater.models.transformers_names import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast

NORM_EPSILON = 2.0**26
NORM_GAIN = 2.0**13
ANY_CONFIG: dict[str, Any] = {
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "attn_implementation": "eager",
}
"""Config values of all planted models."""
CERTAIN = 60.0
"""Attention score, or pre-activation, that leaves e⁻³⁰ or less to alternatives half as good."""


class PlantedModel:
    """A hand-written model and its tokenizer, ready for `hw.load(planted.model, tokenizer=planted.tokenizer)`."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast):
        self.model = model
        self.tokenizer = tokenizer

    def token(self, word: str) -> int:
        """Return the id of a word with its leading space."""
        return word_token(self.tokenizer, word)

    @torch.inference_mode()
    def logits(self, text: str) -> Float[Tensor, " d_vocab"]:
        """Return the logits after `text`, with BOS prepended."""
        tokens = self.tokenizer(text, return_tensors="pt").input_ids
        return self.model(tokens).logits[0, -1]


@dataclass(frozen=True)
class Head:
    """One attention head as directions of the residual stream x.

    The score of query position i for key position j is Σ_m (query_m · x_i)(key_m · x_j); the output moved from j is
    Σ_n (read_n · x_j) write_n.
    """

    query: Float[Tensor, "match d_model"]
    key: Float[Tensor, "match d_model"]
    read: Float[Tensor, "move d_model"]
    write: Float[Tensor, "move d_model"]


class Layout:
    """The residual stream as named groups of coordinates: `Layout(token=300, out=300)`."""

    def __init__(self, **widths: int):
        self.widths = widths
        self.size = sum(widths.values())

    def __getitem__(self, name: str) -> Float[Tensor, "width d_model"]:
        """Return the unit vectors of a group, one row each."""
        start = sum(list(self.widths.values())[: list(self.widths).index(name)])
        rows = torch.zeros(self.widths[name], self.size)
        rows.diagonal(start).fill_(1.0)
        return rows

    def total(self, name: str) -> Float[Tensor, "1 d_model"]:
        """Return the direction that reads the sum of a group: 1 if the group contains a one-hot code."""
        return self[name].sum(0, keepdim=True)


def word_token(tokenizer: PreTrainedTokenizerFast, word: str) -> int:
    """Return the id of the single token of a word with its leading space; raise if there are several."""
    ids = tokenizer.encode(f" {word}", add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"' {word}' is {len(ids)} tokens: add it to the planted vocabulary.")
    return ids[0]


@torch.no_grad()
def gpt2(
    tokenizer: PreTrainedTokenizerFast,
    embedding: Float[Tensor, "d_vocab d_model"],
    positions: Float[Tensor, "position d_model"],
    unembedding: Float[Tensor, "d_vocab d_model"],
    heads: Mapping[tuple[int, int], Head],
    *,
    n_layers: int,
    n_heads: int,
) -> PlantedModel:
    """Write an attention-only GPT-2 with learned positions; a last coordinate gives every written vector mean zero."""
    written = embedding.shape[1]
    need = max(max(len(head.query), len(head.read)) for head in heads.values())
    d_head = head_size(max(need, -(-(written + 1) // n_heads)))
    d_model = n_heads * d_head
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(embedding),
            n_positions=len(positions),
            n_embd=d_model,
            n_layer=n_layers,
            n_head=n_heads,
            n_inner=1,
            layer_norm_epsilon=NORM_EPSILON,
            **ANY_CONFIG,
        )
    )
    clear(model)
    put(_balanced(embedding, d_model), model.transformer.wte.weight)
    put(_balanced(positions, d_model), model.transformer.wpe.weight)
    put(unembedding, model.lm_head.weight)
    for (layer, head), wiring in heads.items():
        attention = model.transformer.h[layer].attn
        for slot, directions in enumerate((wiring.query * d_head**0.5, wiring.key, wiring.read)):
            put(directions, rows_of(attention.c_attn.weight.T, slot * n_heads + head, d_head))
        put(_balanced(wiring.write, d_model), rows_of(attention.c_proj.weight, head, d_head))
    return finished(model, tokenizer)


def _balanced(vectors: Float[Tensor, "row written"], d_model: int) -> Float[Tensor, "row d_model"]:
    """Widen vectors to d_model; the last coordinate is minus the sum of the others."""
    wide = torch.zeros(len(vectors), d_model)
    wide[:, : vectors.shape[1]] = vectors
    wide[:, -1] = -vectors.sum(1)
    return wide


def clear(model: PreTrainedModel) -> None:
    """Set every parameter to zero, and the gains of the norms so that they cancel the epsilon."""
    for name, parameter in model.named_parameters():
        is_gain = parameter.ndim == 1 and name.endswith("weight")
        parameter.fill_(NORM_GAIN if is_gain else 0.0)


def rows_of(weight: Tensor, index: int, d_head: int) -> Tensor:
    """Return a view of one head's rows."""
    return weight[index * d_head : (index + 1) * d_head]


def put(directions: Float[Tensor, "row written"], weight: Float[Tensor, "rows d_model"]) -> None:
    """Write directions into the first rows and columns of a weight, or of a view of one."""
    weight[: directions.shape[0], : directions.shape[1]] = directions


def head_size(size: int) -> int:
    """Round up to a multiple of 8, as head sizes are."""
    return -(-size // 8) * 8


def finished(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> PlantedModel:
    """Set the architecture name of a written model, so that it can be loaded from a folder."""
    model.config.architectures = [type(model).__name__]
    return PlantedModel(model.eval(), tokenizer)


# Two small attention circuits on a GPT-2 with learned positions: induction, and name movers.
#
# Attention scores are CERTAIN times small whole or half numbers, so each head's choice below has a probability within
# e⁻¹⁰ of 1 (e⁻³⁰ for one-hot codes). A head without a match attends to BOS, from which it moves nothing.

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
      INDUCTION_HEAD at position i attends to the positions whose previous token equals the token at i (evenly if there
      are several; to BOS if there is none) and writes c of their token to the logits.
    So after `... A B ... A` the most likely token is B, with logit 8 and all others 4 or less; after an unseen token,
    all logits are 0.
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
    """Build the indirect-object circuit: find the repeated name, look away from it, copy the other.

    Ground truth, for a text with names, where S is a name that occurs twice (S1, S2), IO one that occurs once, and
    END any position after S2:
      DUPLICATE_NAME_HEAD at a name attends to its earlier occurrence and writes its code to `duplicate`: at S2 only.
      INHIBITION_HEAD attends to S2 from every position after it and moves the code into `inhibit`.
      NAME_MOVER_HEAD attends evenly to the names that are not in `inhibit`, and copies them to the logits.
    The logit of IO is 10 and of S 0; with three different names instead, all three get 10/3. Words that are not names
    have a zero embedding. The logits at END depend only on the output of three heads: DUPLICATE_NAME_HEAD at S2,
    INHIBITION_HEAD and NAME_MOVER_HEAD at END.
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
    """Draw ±1 codes of unit length one by one; reject codes with an inner product above 1/2 with an earlier one."""
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


# The world's tokenizer: every word of the corpus, with the space before it, is one token; everything else is bytes.
#
# It is a Unigram model over GPT-2's byte alphabet: words score high, the 256 single bytes low, so a word is spelled out
# only if it is not in the vocabulary. The start of a text and the start of a line count as a space, so "Paris" and
# " Paris" are the same token everywhere. Every text begins with exactly one `<s>`; there is no unknown token.

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
    """Build the tokenizer in which every word of `texts` is one token.

    Args:
        texts: source of the vocabulary: the most frequent word gets the smallest id.
        always: words to include, whether in `texts` or not.
        marks: special tokens besides `<s>` and `<pad>`, such as markers of a chat's turns.
        endings: pieces that can end a word, without a leading space.
        spelled: words to compose of pieces, such as 1732 of 17 and 32.
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
