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
    "kv_head": "key-value heads of a layer; one that several query heads share counts once",
    "head_or_one": "query heads, or size 1 for a value that all heads share",
    "d_model": "the width of the residual stream",
    "d_head": "the width of a head",
    "d_vocab": "the tokens of the vocabulary",
    "neuron": "neurons of an MLP",
    "feature": "columns that a classifier reads",
    "width": "the width of the activation at a site",
    "answer": "the answer tokens of a metric, if only their logits are computed",
    "d_vocab_or_answer": "the vocabulary, or the answer tokens alone",
    "circuit": "circuits, sets of edges",
    "placebo": "random circuits of one shape",
    "size": "sizes of circuits, as fractions of all edges",
    # of texts
    "batch": "sequences in one run of the model",
    "position": "tokens of a sequence, including padding",
    "query": "positions that attend",
    "key": "positions that are attended to",
    "kept": "positions of a sequence that are read",
    "token": "tokens of texts or of the vocabulary, one after the other",
    "text": "whole texts",
    "example": "prompts, pairs of prompts, or answered questions",
    "row": "rows of a batched run: an example, or an example with one edit",
    "group": "rows of one example that attention processes together",
    "slot": "rows within a group",
    # of relations
    "relation": "relations",
    "pair": "pairs of a source and an accepted target, or of a head and its queried words",
    "item": "distinct sources of a relation",
    "source": "words that a head reads",
    "target": "words that a head should write",
    "triple": "head, source and target",
    "template": "sentences around a word",
    "context": "with and without the surrounding sentence",
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
    "set": "sets of senders that are patched together, one row each",
    "place": "positions or roles at which senders are patched separately",
    "kind": "inputs of a head: q, k, v",
    "step": "runs on the path from one embedding to another",
    "edge": "from a writer of the residual stream to a reader",
    "role": "roles of tokens in their prompt",
    # of statistics
    "draw": "resamples of the data; the first is the data",
    "unit": "units of resampling: a question, a graph, a text",
    "column": "several statistics of the same rows",
    "value": "numbers of one sample",
    "corner": "corners of a convex hull",
    "score": "kinds of score",
    "k": "fractions of least likely tokens",
    "node": "questions of a depth graph",
    "dataset": "question sets",
    "seed": "repetitions",
    "fit": "probes, one for every set, seed and half",
    "method": "detectors",
    "classifier": "the classifiers of one detector",
    "pathway": "question and answer",
    "class": "what a head attends to: previous, duplicate, induction",
    # of how kernels divide their work
    "block": "heads or columns that a kernel processes at once",
    "alive": "rows of a block that are not decided yet",
    "part": "parts of the vocabulary whose results are combined, or terms of a sum",
    "vocabulary_tile": "columns of the unembedding that are processed at once",
    "task": "the labels that a probe is fitted to, then those of its control tasks",
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
