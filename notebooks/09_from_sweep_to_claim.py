# %% [markdown]
# # 9 · From sweep to claim: the indirect object
#
# To run it in Colab, [upload it there](https://colab.research.google.com/#upload=true) and install headwater's wheel in
# a first cell: `%pip install -q headwater-0.2.0-py3-none-any.whl`.
#
# **Question.** *When Anna and David went to the store, David gave a drink to* … Which heads find the answer, *Anna*,
# and which sentence may one write about them?
#
# **Method.** The task of Wang et al. (2022), first on a model whose circuit is known because its weights were written
# by hand: the sweep has to find that circuit and nothing else. Then on the embedded model, which is asked whether it
# can do the task at all; what is claimed there is tested with random sets of heads, another ablation and prompts that
# the choice has not seen.
#
# **Result and what would change one's mind** stand at the end.

# %%
from typing import Any

import headwater as hw
from headwater.planted import circuits

# %% [markdown]
# ## A model whose circuit is known
# Three heads: one finds the name that was said before (S2), one tells the end of the text about it, one copies the
# names that are not it. The ground truth stands in the docstring of `name_mover`.

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
names = circuits.NAMES
triples = [(names[i], names[(i + 3) % 12], names[(i + 5) % 12]) for i in range(12)]
first, second = (
    " When {a} and {b} went to the store {c} gave a drink to",
    " Then {b} and {a} had fun at the park and {c} gave a drink to",
)
clean, corrupted = [], []
for number, (indirect, subject, other) in enumerate(triples):
    template = first if number % 2 else second
    clean.append(template.format(a=indirect, b=subject, c=subject))
    corrupted.append(template.format(a=indirect, b=subject, c=other))
roles: dict[str, Any] = {
    "IO": [f" {indirect}" for indirect, _, _ in triples],
    "S1": [lambda tokens, name=f" {subject}": tokens.index(name) for _, subject, _ in triples],
    "S2": lambda tokens: tokens.index(" gave") - 1,
    "end": "last",
}
print(clean[0], "|", corrupted[0], "|", clean[1], sep="\n")

# %%
answers = [f" {indirect}" for indirect, _, _ in triples], [f" {subject}" for _, subject, _ in triples]
metric = hw.logit_difference(*answers)
found = hw.patch(planted, clean, corrupted, sites="z", positions=roles, metric=metric)
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
# It was trained on a small world of facts; nobody ever gives a drink there. The same question, asked of it:

# %%
import pandas as pd

model = hw.load()
people = [("John", "Ruth"), ("Anna", "Brian"), ("Deborah", "John"), ("Ruth", "Anna")]
asked = [f" When {a} and {b} went to the store , {b} gave a drink to" for a, b in people]
logits = model.run(asked, keep="last")[:, -1]
name = {word: model.tokenize(f" {word}").tokens[0, -1].item() for pair in people for word in pair}
rows = []
for (a, b), row in zip(people, logits, strict=True):
    rank, ahead = int((row > row[name[a]]).sum()), bool(row[name[a]] > row[name[b]])
    rows.append((a, b, *model.token_strings([row.argmax().item()]), rank, ahead))
pd.DataFrame(rows, columns=["indirect object", "subject", "first token", "rank of the answer", "before the subject"])

# %% [markdown]
# It cannot: the answer is nowhere near the first token. A sweep would still draw a figure, of how a model that does
# not do the task fails at it. So the claim is made about a task that it does: *the capital of a country*, in two
# wordings.

# %%
relation = next(one for one in hw.load_relations() if one.name == "country_to_capital")
wordings = (" The capital of {} is", "Q: What is the capital of {}?\nA:")


def known(wording: str) -> set[tuple[str, str]]:
    """Return the countries, with their capitals, that the model answers right: words of one token each."""
    pairs = [(country, cities[0]) for country, cities in relation.pairs]
    pairs = [pair for pair in pairs if all(len(model.tokenize(f" {word}").tokens[0]) == 2 for word in pair)]
    best = model.run([wording.format(country) for country, _ in pairs], keep="last")[:, -1].argmax(dim=-1)
    answers = [model.tokenize(f" {city}").tokens[0, -1] for _, city in pairs]
    return {pair for pair, first, answer in zip(pairs, best, answers, strict=True) if first == answer}


usable = sorted(known(wordings[0]) & known(wordings[1]))
print(f"{len(usable)} capitals are right in both wordings")

# %% [markdown]
# ## Choose on some prompts, test on others
# Even countries choose, odd ones test; each country's corrupted prompt asks for the next one of its half. Both
# wordings are in both halves, so that the claim is not about one sentence.


# %%
def task(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Return clean prompts, corrupted ones, roles and metric of some countries, in both wordings by turns."""
    nexts = pairs[2:] + pairs[:2]  # of the same wording
    text = [wordings[i % 2].format(country) for i, (country, _) in enumerate(pairs)]
    other = [wordings[i % 2].format(country) for i, (country, _) in enumerate(nexts)]
    subject = [(f" {a}", f" {b}") for (a, _), (b, _) in zip(pairs, nexts, strict=True)]
    measured = hw.logit_difference([f" {city}" for _, city in pairs], [f" {city}" for _, city in nexts])
    return {
        "clean": text, "corrupted": other, "positions": {"country": subject, "end": "last"}, "metric": measured,
    }  # fmt: skip


half = len(usable) // 2 // 2 * 2
choosing, testing = usable[0 : 2 * half : 2], usable[1 : 2 * half : 2]
chosen = hw.patch(model, **task(choosing), sites="z")
tested = hw.patch(model, **task(testing), sites="z")
noised = hw.patch(model, **task(choosing), sites="z", direction="noise")
# %%
summary = chosen.summary(value="normalized_effect").sort_values("mean", ascending=False)
summary[["layer", "head", "role", "mean", "low", "high", "q_value"]].head(6)

# %% [markdown]
# The strongest head at the end, and the three strongest together, as claims. Everything that could overturn them
# stands in the row: random cells, the other direction (is the head needed, too?), halves of the prompts, countries
# that the choice has not seen. Beside them a head that nothing speaks for.

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
# may do the same; here the same heads come first.

# %%
needed = noised.summary(value="normalized_effect").sort_values("mean", ascending=False)
needed[["layer", "head", "role", "mean", "low", "high", "q_value"]].head(3)

# %% [markdown]
# ## Result

# %%
print("Planted:", planted_claim.sentence)
print("Embedded:", claims["one head"].sentence)

# %%
_ = chosen.plot(value="normalized_effect")

# %% [markdown]
# **What would change one's mind.** The planted circuit is found because nothing else is there; it shows that the
# method can find the truth, not that it always does. On the embedded model the claim is about sufficiency for one
# relation, one kind of corruption (another country) and words of one token. Another ablation, another wording, a
# second model trained from another seed may each overturn it, and where the verdict above says "does not hold",
# nothing was found.
