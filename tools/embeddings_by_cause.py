"""Which effective embedding predicts causes: the numbers of docs/heads.md, for models given by name or folder.

    python tools/embeddings_by_cause.py embedded smollm2

For every relation that the model can do, with four examples in the prompt, the cause is the effect of each head's z at
the last position, patched between two items (mean over 12 pairs, as a share of the mean gap). It can do a relation
where the 95 % interval of that gap of logit differences is above 0. Each embedding names a head per relation by the
largest score, margin, and margin times attention from the last position to the source. Shown: in how many relations
that head has the largest effect, or one of the first three, and its mean share of the largest effect. Beside them
attention alone, and the head that is strongest over all other relations. Relations of a family share heads, so few are
independent.
"""

import sys

import numpy as np
import pandas as pd
import torch

import headwater as hw
from headwater.heads.relations import TokenRelation, load_relations, tokenize_relations
from headwater.heads.scoring import compare_embeddings
from headwater.models.effective_embedding import KINDS
from headwater.models.hooked import HookedModel
from headwater.models.loading import weights_of

SHOTS, PAIRS = 4, 12
COLUMNS = "embedding", "agreement", "named by", "largest effect", "in the first three", "share of the largest"


def pairs_of(model: HookedModel, tokens: TokenRelation) -> tuple[list[str], list[str], list[int], list[int]]:
    """Return clean and corrupted prompts, and the first target of each."""
    order = np.random.default_rng(0).permutation(len(tokens.targets))
    sources = model.token_strings(tokens.source.tolist())
    targets = [accepted[0] for accepted in tokens.targets]
    examples = "".join(f"Input:{sources[i]} Output:{model.token_strings([targets[i]])[0]}\n" for i in order[:SHOTS])
    asked = [f"{examples}Input:{source} Output:" for source in sources]
    pairs = zip(order[SHOTS::2], order[SHOTS + 1 :: 2], strict=False)
    both = [(i, j) for i, j in pairs if not set(tokens.targets[i]) & set(tokens.targets[j])][:PAIRS]
    clean, corrupted = (list(side) for side in zip(*both, strict=True))
    texts, right = ([[one[i] for i in side] for side in (clean, corrupted)] for one in (asked, targets))
    return (*texts, *right)


def effects_and_attention(model: HookedModel, tokens: TokenRelation) -> pd.DataFrame | None:
    """Return a row per head: `effect, attention`; None where the model cannot do the relation."""
    clean, corrupted, right, wrong = pairs_of(model, tokens)
    metric = hw.logit_difference(right, wrong)
    sweep = hw.patch(model, clean, corrupted, sites="z", positions="last", metric=metric, progress=False)
    first = sweep.table.drop_duplicates("example")
    gap = (first["clean"] - first["corrupted"]).to_numpy()
    if gap.mean() - 1.96 * gap.std(ddof=1) / len(gap) ** 0.5 <= 0:
        return None
    heads = sweep.table.groupby(["layer", "head"])["effect"].mean().rename("effect").to_frame() / gap.mean()
    looked = []
    for one, other in zip(clean, corrupted, strict=True):
        source = (model.to_tokens(one) != model.to_tokens(other))[0].nonzero()[0, 0]
        cache = model.cache([one], sites=["pattern"], progress=False)
        looked.append(torch.stack([cache["pattern", layer][0, :, -1, source] for layer in range(model.shape.n_layers)]))
    return heads.assign(attention=torch.stack(looked).mean(0).flatten().float().numpy())


def main(name: str) -> None:
    """Print the table of one model."""
    model = hw.load(None if name == "embedded" else name)
    suite = load_relations(None)
    usable = [tokens for tokens in tokenize_relations(suite, model.tokenizer) if tokens.usable]
    found = {tokens.relation.name: effects_and_attention(model, tokens) for tokens in usable}
    found = {relation: heads for relation, heads in found.items() if heads is not None}
    effect = pd.DataFrame({relation: heads["effect"] for relation, heads in found.items()})
    attention = pd.DataFrame({relation: heads["attention"] for relation, heads in found.items()})
    sources = torch.cat([tokens.source for tokens in usable])
    agreement = compare_embeddings(weights_of(model), sources, None)[1].set_index("embedding")["agreement"]
    named = {("", "", "attention alone"): attention}
    everywhere = effect.sum(axis=1)
    named["", "", "strongest over other relations"] = effect.rsub(everywhere, axis=0)
    for kind in KINDS:
        chosen = [relation for relation in suite if relation.name in found]
        heads = hw.classify_heads(model, relations=chosen, rule="published", embedding=kind, progress=False)
        by_head = heads.table.pivot(index=["layer", "head"], columns="relation", values=["score", "margin"])
        score, margin = (by_head[one][list(found)] for one in ("score", "margin"))
        for what, values in {"score": score, "margin": margin, "margin × attention": margin * attention}.items():
            named[kind, f"{agreement.get(kind, 1.0):.2f}", what] = values
    movers = effect.idxmax().nunique()
    print(f"\n{name}: {len(found)} of {len(usable)} relations; {movers} different heads have the largest effect")
    print(f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", sep="\n")
    rank, share = effect.rank(ascending=False), effect / effect.max()
    for key, values in named.items():
        best = values.idxmax()
        ranks, shares = (np.array([one.loc[best[name], name] for name in found]) for one in (rank, share))
        print(f"| {' | '.join(key)} | {(ranks == 1).sum()} | {(ranks <= 3).sum()} | {shares.mean():.2f} |", flush=True)


if __name__ == "__main__":
    for one in sys.argv[1:]:
        main(one)
