"""What the embedded model knows, measured on its weights.

1. Answers: greedy, after the prompt `Q: {question}` and, on its own line, `A:`, up to the line break. Right when an
   accepted answer stands in it, by the one label rule (`headwater.questions.labels`).
2. Probe: logistic regression on the MLP output of a layer at one token (the last of the answer, or the one before the
   answer), fitted on half of the questions, AUC for right against wrong on the other half, over all questions and
   within relations (mean over relations, by size). Beside it the frequency-free baseline: the same on question set and
   relation alone.
3. Ablation: the share of a relation's facts, among those answered rightly, that stay right when the relation's heads
   write nothing, against as many random other heads of the same layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from headwater.models.tokens import Tokenizer, by_length
from headwater.questions.labels import match
from headwater.stats.discrimination import auc
from headwater.world.wording import prompt_of

MAX_NEW_TOKENS = 6
PROBED_TOKENS = ("answer_last", "before_answer")
Head = tuple[int, int]


def answer(
    model: Any, tokenizer: Tokenizer, questions: Sequence[str], batch: int = 512, tokens: int = MAX_NEW_TOKENS
) -> list[str]:
    """Answer each question greedily, in so many tokens at most; an answer ends at the line break."""
    prompts = tokenizer([prompt_of(question) for question in questions])["input_ids"]
    return continued(model, tokenizer, prompts, "Ċ", batch, tokens)


@torch.inference_mode()
def continued(
    model: Any, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], end: str, batch: int, tokens: int
) -> list[str]:
    """Go on greedily from the tokens of each prompt, in so many tokens at most, up to the token `end`."""
    stop = tokenizer.convert_tokens_to_ids(end)
    said = [""] * len(prompts)
    for places in equally_long(prompts, batch):
        written = torch.tensor([prompts[place] for place in places])
        length = written.shape[1]
        for _ in range(tokens):
            hidden = model.model(input_ids=written, use_cache=False).last_hidden_state[:, -1]
            written = torch.cat([written, model.lm_head(hidden).argmax(-1, keepdim=True)], dim=1)
            if (written[:, length:] == stop).any(1).all():
                break
        for place, new in zip(places, written[:, length:].tolist(), strict=True):
            said[place] = tokenizer.decode(new[: new.index(stop)] if stop in new else new).strip()
    return said


def is_right(given: str, accepted: Sequence[str]) -> bool:
    """Say whether an accepted answer stands in a given one."""
    return match(given, accepted) is not None


def answered(model: Any, tokenizer: Tokenizer, questions: pd.DataFrame) -> pd.DataFrame:
    """Return the questions with the model's `answer`, whether it is `right`, and the `quarter` of its popularity.

    Quarter 1 is the rarest, 4 the most frequent.
    """
    given = answer(model, tokenizer, questions["question"].tolist())
    right = [is_right(a, accepted) for a, accepted in zip(given, questions["answers"], strict=True)]
    quarter = np.ceil(questions["popularity"].rank(method="average", pct=True) * 4).astype(int)
    return questions.assign(answer=given, right=right, quarter=quarter)


@torch.inference_mode()
def mlp_outputs(
    model: Any, tokenizer: Tokenizer, table: pd.DataFrame, token: str, batch: int = 512
) -> Float[Tensor, "layer example d_model"]:
    """Return the MLP output of every layer at one token of each question with its answer.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        table: question, answer.
        token: "answer_last", the last token of the answer, or "before_answer", the token that the answer follows.
        batch: how many questions at a time.
    """
    texts = [prompt_of(question) for question in table["question"]]
    if token == "answer_last":
        texts = [f"{text} {answer}" for text, answer in zip(texts, table["answer"], strict=True)]
    ids = tokenizer(texts)["input_ids"]
    layers = model.model.layers
    outputs = torch.empty(len(layers), len(ids), model.config.hidden_size)
    for places in equally_long(ids, batch):
        seen: list[Tensor] = []

        def keep_last(_module: Any, _inputs: Any, output: Tensor, seen: list[Tensor] = seen) -> None:
            seen.append(output[:, -1])

        hooks = [layer.mlp.register_forward_hook(keep_last) for layer in layers]
        try:
            model.model(input_ids=torch.tensor([ids[place] for place in places]), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        outputs[:, places] = torch.stack(seen)
    return outputs


def probe_aucs(model: Any, tokenizer: Tokenizer, table: pd.DataFrame, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Return (AUC, AUC within relations) of the baseline and of the probe at each token and layer."""
    train = np.random.default_rng(seed).random(len(table)) < 0.5
    features = {"baseline": pd.get_dummies(table[["dataset", "relation"]]).to_numpy(dtype=np.float64)}
    for token in PROBED_TOKENS:
        for layer, output in enumerate(mlp_outputs(model, tokenizer, table, token)):
            features[f"{token}, layer {layer}"] = output.double().numpy()
    return {name: _auc(values, table, train) for name, values in features.items()}


def _auc(values: NDArray[np.float64], table: pd.DataFrame, train: NDArray[np.bool_]) -> tuple[float, float]:
    right, tested = table["right"].to_numpy(), table[~train]
    if len(set(right[train])) < 2 or tested["right"].nunique() < 2:
        return float("nan"), float("nan")
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
    classifier.fit(values[train], right[train])
    scored = tested.assign(score=classifier.decision_function(values[~train]))
    mixed = [group for _, group in scored.groupby("relation") if group["right"].nunique() == 2]
    within = [auc(group["score"].to_numpy(), group["right"].to_numpy()) for group in mixed]
    whole = auc(scored["score"].to_numpy(), scored["right"].to_numpy())
    return float(whole), float(np.average(within, weights=[len(group) for group in mixed])) if mixed else float("nan")


def ablation(
    model: Any, tokenizer: Tokenizer, facts: pd.DataFrame, heads: Sequence[Head], draws: int = 5, seed: int = 0
) -> dict[str, float]:
    """Compare a relation without its heads and without random others of the same layers.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        facts: question, answers: facts of one relation that the model answers rightly.
        heads: the relation's heads.
        draws: how many sets of random heads.
        seed: for the draws.

    Returns:
        `without_heads`, `without_random`: the share that stays right.
    """
    rng = np.random.default_rng(seed)
    stays = [_share_right(model, tokenizer, facts, heads)]
    for _ in range(draws):
        stays.append(_share_right(model, tokenizer, facts, _others(rng, model, heads)))
    return {"without_heads": stays[0], "without_random": float(np.mean(stays[1:]))}


def _share_right(model: Any, tokenizer: Tokenizer, facts: pd.DataFrame, heads: Sequence[Head]) -> float:
    with silent_heads(model, heads):
        given = answer(model, tokenizer, facts["question"].tolist())
    return float(np.mean([is_right(a, accepted) for a, accepted in zip(given, facts["answers"], strict=True)]))


def _others(rng: np.random.Generator, model: Any, heads: Sequence[Head]) -> list[Head]:
    """Draw as many heads of each layer, other than `heads` where there are enough."""
    drawn: list[Head] = []
    for layer in sorted({layer for layer, _ in heads}):
        taken = [head for at, head in heads if at == layer]
        free = [head for head in range(model.config.num_attention_heads) if head not in taken]
        pool = free if len(free) >= len(taken) else list(range(model.config.num_attention_heads))
        drawn += [(layer, int(head)) for head in rng.permutation(pool)[: len(taken)]]
    return drawn


@contextmanager
def silent_heads(model: Any, heads: Sequence[Head]) -> Iterator[None]:
    """Let the given heads, as (layer, head), write nothing."""
    d_head = model.config.head_dim
    hooks = []
    for layer in {layer for layer, _ in heads}:
        columns = [h * d_head + i for at, h in heads if at == layer for i in range(d_head)]

        def silence(_module: Any, inputs: tuple[Tensor], columns: list[int] = columns) -> tuple[Tensor]:
            z = inputs[0].clone()
            z[..., columns] = 0
            return (z,)

        hooks.append(model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(silence))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def equally_long(ids: Sequence[Sequence[int]], batch: int) -> list[list[int]]:
    """Return the places of prompts of one length, in so many at most, so that a batch needs no padding."""
    return by_length([len(tokens) for tokens in ids], batch, longest=lambda length: length)
