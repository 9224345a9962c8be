"""Attention saliency by plain autograd, and random answers and probes to compare it on."""

import numpy as np
import pandas as pd
import torch

from headwater.pathways.attention_saliency import COLUMNS
from headwater.probes.linear import Probe
from headwater.questions.answers import AnsweredQuestions
from headwater.questions.states import probe_positions
from headwater.runs.record import RunRecord
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
D_VOCAB = len(TOKENIZER)


def answered_by(model, n_rows=5, *, prefix=0, datasets=("PopQA", "TriviaQA")):
    """Random token rows with E_Q and E_A at random places; all begin with the same `prefix` tokens."""
    same = torch.randint(2, D_VOCAB, (prefix,)).tolist()
    rows = []
    for i in range(n_rows):
        question, answer = int(torch.randint(5, 9, ())), int(torch.randint(2, 6, ()))
        start, length = prefix + question, prefix + question + answer
        keys = sorted((prefix + torch.randperm(question)[: 1 + i % 3]).tolist())
        exact = sorted((start + torch.randperm(answer)[: 1 + i % 2]).tolist())
        rows.append(
            {
                "dataset": datasets[i % len(datasets)],
                "z": i // 2 % 2,
                "tokens": (*same, *torch.randint(2, D_VOCAB, (length - prefix,)).tolist()),
                "answer_start": start,
                "subject_tokens": tuple(keys[:1]),
                "property_tokens": tuple(keys[1:]),
                "exact_answer_tokens": tuple(exact),
            }
        )
    record = RunRecord("answer", model.name, model.fingerprint, "float32", "cpu", {})
    return AnsweredQuestions(pd.DataFrame(rows), pd.DataFrame({"dataset": [], "cause": []}), record)


def random_probe(model, *, layer=2, site="mlp_out", token="exact_answer_last"):
    weight = torch.randn(model.shape.d_model, dtype=torch.float64) / 4
    return Probe(site, token, layer, weight, float(torch.randn(())))


def by_autograd(hf, row, position, probe, target, *, window=None, heads="mean_abs", pairs="sum"):
    """S(E_Q→E_A) and S(E_Q→*) at each layer, from the gradients that Hugging Face's patterns retain, one row alone."""
    base, blocks = hf.base_model, next(m for m in hf.modules() if isinstance(m, torch.nn.ModuleList))
    state = []
    module = blocks[probe.layer] if probe.site == "resid_post" else mlp_output_of(blocks[probe.layer])
    handle = module.register_forward_hook(lambda _, __, out: state.append(out[0] if isinstance(out, tuple) else out))
    with torch.enable_grad():
        embedded = base.get_input_embeddings()(torch.tensor([row["tokens"]])).detach().requires_grad_(True)
        patterns = base(inputs_embeds=embedded, output_attentions=True, use_cache=False).attentions
        handle.remove()
        logit = state[0][0, position].double() @ probe.weight + probe.bias
        z = torch.tensor(float(row["z"]), dtype=torch.float64)
        reached = torch.nn.functional.binary_cross_entropy_with_logits(logit, z) if target == "cross_entropy" else logit
        gradients = torch.autograd.grad(reached, patterns[: probe.layer + 1], allow_unused=True)
    keys = sorted({*row["subject_tokens"], *row["property_tokens"]})
    found = []
    for pattern, gradient in zip(patterns, gradients, strict=False):
        flow = (pattern * (0 if gradient is None else gradient))[0]
        flow = (flow.abs().mean(0) if heads == "mean_abs" else flow.mean(0).abs()).detach().double()
        ends = {"exact": row["exact_answer_tokens"], "all": range(position + 1)}
        both = []
        for queries in ends.values():
            values = [flow[i, j] for i in queries for j in keys if j <= i <= position and pattern[0, :, i, j].any()]
            nothing = torch.tensor(torch.nan, dtype=torch.float64)
            both.append((torch.stack(values).mean() if pairs == "mean" else sum(values)) if values else nothing)
        found.append(torch.stack(both))
    return torch.stack(found)


def mlp_output_of(block):
    """The module whose output the MLP adds to the residual stream."""
    return getattr(block, "post_feedforward_layernorm", None) or block.mlp


def compare(found, answered, hf, probe, layers=None, **options):
    table = found.by_layer.set_index(["target", "example", "layer"])
    for target in ("cross_entropy", "logit"):
        for i, position in enumerate(probe_positions(answered, probe.token)):
            expected = by_autograd(hf, answered.table.iloc[i], position, probe, target, **options)
            measured = table.loc[target, i][list(COLUMNS)]
            assert list(measured.index) == list(layers or range(probe.layer + 1))
            torch.testing.assert_close(
                torch.tensor(measured.to_numpy()),
                expected[list(measured.index)],
                atol=2e-6 * float(expected.nan_to_num().max()) + 1e-9,
                rtol=1e-4,
                equal_nan=True,
            )
            means = found.of(target).set_index("example").loc[i, list(COLUMNS)].to_numpy(dtype=float)
            assert np.allclose(means, measured.mean(), equal_nan=True)
