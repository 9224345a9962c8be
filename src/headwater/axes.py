"""The axis vocabulary: one word per axis, the same in annotations, table columns and docstrings.

The aliases below name the shapes that rooms exchange. All other shapes are annotated in place with jaxtyping, in the
words of `AXES`.
"""

from jaxtyping import Float, Int
from torch import Tensor

AXES = {
    # of a model
    "layer": "blocks, from the input up",
    "head": "query heads of a layer",
    "kv_head": "key-value heads of a layer: those that several query heads share count once",
    "head_or_one": "query heads, or one for what all heads share",
    "d_model": "the width of the residual stream",
    "d_head": "the width of a head",
    "d_vocab": "the tokens of the vocabulary",
    "neuron": "neurons of an MLP",
    "feature": "columns that a classifier reads",
    "width": "the width of whatever a site holds",
    "answer": "the answer tokens of a metric, whose logits alone are computed",
    "d_vocab_or_answer": "the vocabulary, or the answer tokens alone",
    "circuit": "circuits, sets of edges",
    "placebo": "random circuits of one shape",
    "size": "sizes of circuits, as parts of all edges",
    # of texts
    "batch": "sequences in one run of the model",
    "position": "tokens of a sequence, padding counted",
    "query": "positions that attend",
    "key": "positions that are attended to",
    "kept": "positions of a sequence that are read",
    "token": "tokens of texts or of the vocabulary, one after the other",
    "text": "whole texts",
    "example": "prompts, pairs of prompts, or answered questions",
    "row": "what is computed side by side: an example, or an example with one edit",
    "group": "rows of one example that go through attention side by side",
    "slot": "rows of such a group",
    # of relations
    "relation": "relations",
    "pair": "pairs of a source and an accepted target, or of a head and what it is asked",
    "item": "distinct sources of a relation",
    "source": "words that a head reads",
    "target": "words that a head is to write",
    "triple": "head, source and target",
    "template": "sentences around a word",
    "context": "with the sentence around it, and without",
    "sign": "implemented and suppressed",
    "moment": "mean and variance under the null",
    # of sweeps and interventions
    "window": "layers that are edited together",
    "cell": "one edit of a sweep",
    "metric": "metrics",
    "read": "layers whose states are read",
    "depth": "levels of questions, or of a recursion",
    "sender": "where a path begins",
    "receiver": "where a path ends",
    "set": "senders that are exchanged together, a row for each",
    "place": "where senders are exchanged apart: positions or roles",
    "kind": "what a head reads: q, k, v",
    "step": "runs on the way from one embedding to another",
    "edge": "from what writes into the residual stream to what reads it",
    "role": "what a token is in its prompt",
    # of statistics
    "draw": "resamples of the data; the first is the data",
    "unit": "what is resampled whole: a question, a graph, a text",
    "column": "several statistics of the same rows",
    "value": "numbers of one sample",
    "corner": "corners of a convex hull",
    "score": "kinds of score",
    "k": "shares of lowest tokens",
    "node": "questions of a depth graph",
    "dataset": "question sets",
    "seed": "repetitions",
    "fit": "probes, one for every set, seed and half",
    "method": "detectors",
    "classifier": "the classifiers of one detector",
    "pathway": "question and answer",
    "class": "what a head attends to: previous, duplicate, induction",
    # of how kernels divide their work
    "block": "heads, or columns, that a kernel takes at once",
    "alive": "of these, what is not decided yet",
    "part": "shares of the vocabulary whose results are joined, or contributions to a sum",
    "vocabulary_tile": "columns of the unembedding that are taken at once",
    "out": "whatever a module writes",
    "d": "the width of what is joined",
    # of planted models
    "match": "conditions under which a planted head attends",
    "move": "directions that a planted head reads and writes",
    "written": "dimensions that are written",
    "rows": "rows of a weight",
}
"""Every word that an annotation uses for an axis, with its meaning."""

Tokens = Int[Tensor, "batch position"]
"""Token ids, right- or left-padded; a mask accompanies them."""

ResidualCache = Float[Tensor, "layer batch position d_model"]
"""The residual stream at one site of several layers."""

AttentionCache = Float[Tensor, "layer batch head query key"]
"""Attention patterns (after softmax) of several layers; `head` counts query heads."""

Pattern = Float[Tensor, "batch head query key"]
"""Attention patterns of one layer."""
