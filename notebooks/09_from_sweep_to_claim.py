# %% [markdown]
# # 9 · From sweep to claim: the indirect object
#
# To run it in Colab, [upload it there](https://colab.research.google.com/#upload=true) and install headwater's wheel in
# a first cell: `%pip install -q headwater-0.2.0-py3-none-any.whl`.
#
# **Question.** *When Anna and David went to the store, David gave a drink to* … Which heads find the answer, *Anna*,
# and what may one claim about them?
#
# **Method.** The task of Wang et al. (2022), first on a model whose circuit is known because its weights were written
# by hand: the sweep has to find that circuit and nothing else. Then on the embedded model, which is asked whether it
# can do the task at all; what is claimed there is tested with random sets of heads, the other direction and names that
# the choice has not seen.
#
# **Result and what would change one's mind** stand at the end.

# %%
from collections.abc import Sequence
from typing import Any

import torch

import headwater as hw
from headwater.planted import circuits

# %% [markdown]
# ## A model whose circuit is known
# Three heads: one finds the name that was said before (S2), one tells the end of the text about it, one copies the
# names that are not it. The ground truth is in the docstring of `name_mover`.

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
# Pairs of prompts that differ in who gives: in the clean one a name comes twice, in the corrupted one three names
# come once each. Half of the prompts name the indirect object first, half second, so its *position* says nothing;
# positions are named by role.


# %%
def task(people: Sequence[str], scenes: tuple[str, str]) -> dict[str, Any]:
    """Return clean and corrupted prompts, roles and metric; each of the people is the indirect object once."""
    n = len(people)
    triples = [(people[i], people[(i + 3) % n], people[(i + 5) % n]) for i in range(n)]
    told = [(scenes[i % 2], *triple) for i, triple in enumerate(triples)]
    indirect, subject = [f" {name}" for name, _, _ in triples], [f" {name}" for _, name, _ in triples]
    roles = {
        "IO": indirect,
        "S1": [lambda tokens, name=name: tokens.index(name) for name in subject],
        "S2": lambda tokens: tokens.index(" gave") - 1,
        "end": "last",
    }
    return {
        "clean": [scene.format(a=a, b=b, c=b) for scene, a, b, _ in told],
        "corrupted": [scene.format(a=a, b=b, c=c) for scene, a, b, c in told],
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
# The three heads of the truth, each at the one role where it matters, and no other. Patching says how much of the gap
# a head *restores alone*: the mover brings all of it, the two before it half, since without them the mover splits its
# attention between two names.

# %%
planted_cells = [
    {"layer": 0, "head": truth["duplicate name"][1], "role": "S2"},
    {"layer": 1, "head": truth["inhibition"][1], "role": "end"},
    {"layer": 2, "head": truth["name mover"][1], "role": "end"},
]
planted_claim = found.claim(planted_cells, value="normalized_effect", match="site")
print(planted_claim.sentence)

# %% [markdown]
# ## Can the embedded model do it?
# Its corpus holds such scenes, in other words than these, with nine names in ten; the other names it has read only
# elsewhere. The share of prompts whose most likely next token, of the whole vocabulary, is the answer:

# %%
import pandas as pd

model = hw.load()
scenes = (
    "When {a} and {b} went to the market, {c} gave a book to",
    "Then {b} and {a} met at the station. {c} gave a letter to",
)
told = [
    "Lynn", "Greg", "Terry", "Louis", "Jacob", "Andre", "Gloria", "Marie", "Kathleen", "Michael", "Malcolm", "Tim",
    "Anna", "Alex", "Alice", "Shirley", "Dan", "Justin", "Ruby", "Gene", "Lillian", "Anthony", "Jennifer", "Ted",
]  # fmt: skip
elsewhere = [
    "Noah", "Vanessa", "Collins", "Anita", "Tyler", "Franklin", "Manuel", "Lydia", "Julia", "Wallace", "Marshall",
    "Richard",
]  # fmt: skip
rows = []
for kind, people in (("told in such scenes", told), ("read elsewhere", elsewhere)):
    logits = torch.stack([model.run([prompt])[0, -1] for prompt in task(people, scenes)["clean"]])
    answers = model.tokenize([f" {name}" for name in people]).tokens[:, -1]
    its = logits[torch.arange(len(people)), answers]
    rows.append(
        (
            kind,
            len(people),
            (logits.argmax(dim=-1) == answers).double().mean().item(),
            (logits > its[:, None]).sum(dim=-1).double().median().item(),
        )
    )
pd.DataFrame(rows, columns=["names", "prompts", "answered right", "median rank of the answer"]).round(2)

# %% [markdown]
# With names from such scenes it does the task, with others less often; what follows is about the former.
#
# ## Choose on some names, test on others
# Prompts with twelve names choose, prompts with twelve others test. Both scenes are in both halves, so the claim is not
# about one sentence.

# %%
choosing, testing = told[::2], told[1::2]
chosen = hw.patch(model, **task(choosing, scenes), sites="z")
tested = hw.patch(model, **task(testing, scenes), sites="z")
noised = hw.patch(model, **task(choosing, scenes), sites="z", direction="noise")
# %%
summary = chosen.summary(value="normalized_effect").sort_values("mean", ascending=False)
summary[["layer", "head", "role", "mean", "low", "high", "q_value"]].head(6)

# %% [markdown]
# The strongest head at the end, and the three strongest together, as claims. Everything that could overturn them is in
# the row: random cells, the other direction (is the head needed, too?), halves of the prompts, names that the choice
# has not seen. Beside them a head that nothing speaks for.

# %%
best = summary[summary["role"] == "end"].head(1)
few = summary.head(3)
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
# `noise` writes the corrupted activation into the clean run. A head that suffices need not be needed, since another
# may do the same; here nearly the same cells come first. No cell does much alone: the strongest restores a tenth of the
# gap, so the work is shared, and a claim about one head is a claim about a small part of it.

# %%
needed = noised.summary(value="normalized_effect").sort_values("mean", ascending=False)
needed[["layer", "head", "role", "mean", "low", "high", "q_value"]].head(3)

# %% [markdown]
# ## Result

# %%
print("Planted:", planted_claim.sentence)
print("Embedded:", claims["one head"].sentence)

# %%
_ = chosen.plot(value="normalized_effect", figsize=(7.8, 6.0))

# %% [markdown]
# **What would change one's mind.** The planted circuit is found because nothing else is there; it shows that the
# method can find the truth, not that it always does. On the embedded model the claim is about sufficiency for one
# task, one kind of corruption (another giver), two scenes and names of one token. Another ablation, another scene, a
# second model trained from another seed may each overturn it, and where the verdict above says "does not hold",
# nothing was found.
