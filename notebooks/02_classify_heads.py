# %% [markdown]
# # 2 · Classify attention heads from their parameters
#
# To run it in Colab, [upload it there](https://colab.research.google.com/#upload=true) and install headwater's wheel in
# a first cell: `%pip install -q headwater-0.2.0-py3-none-any.whl`.
#
# **Question.** Which relations can a head write out, and how sure can one be that this is more than chance, habit or
# copying?
#
# **Method.** For a head with value and output matrices W_V and W_O, the row x_s W_V W_O W_U says how strongly a source
# word s pushes every word of the vocabulary (Elhelo & Geva, ACL 2025). The score of a relation is the share of its
# pairs whose target is among the ten largest entries (one for copying relations). The checks: what the head's habits
# alone would score, whether shuffled targets score as much, whether the head only copies its source, and what happens
# when the heads are removed.
#
# **Result and what would change one's mind** stand at the end.

# %%
import headwater as hw

model = hw.load()
names = [
    "country_to_nationality", "company_to_country", "country_to_capital", "country_to_continent", "job_to_workplace",
    "tool_to_job", "number_to_next", "word_copying", "word_to_first_letter", "noun_to_plural", "verb_to_past",
    "word_to_antonym", "english_to_french", "french_to_english",
]  # fmt: skip
relations = [relation for relation in hw.load_relations() if relation.name in names]

# %% [markdown]
# Only words that are one token (with the space before them) can be scored, and a relation needs 30 such pairs. What
# falls out depends on the tokenizer, so look first.

# %%
from headwater.heads.coverage import relation_coverage

relation_coverage(relations, model.tokenizer)[["relation", "category", "items", "kept", "usable"]].head(6)

# %% [markdown]
# ## The published rule, and the controlled one
# `rule="published"` is the score alone. The default corrects it for what the head writes whatever it reads: `excess` is
# (score − expected) / (1 − expected), the share of the way from the head's habit to perfection, and has to reach the
# same threshold. It asks two things more: that the score is not what shuffled targets would have given (false-discovery
# rate 5 % over all heads, relations and signs), and that the target beats the source word itself. On the left the
# published rule, on the right the controlled one, where a mark grows with the head's best excess.

# %%
controlled = hw.classify_heads(model, relations=relations)
published = hw.classify_heads(model, relations=relations, rule="published")
_ = hw.figures.head_maps([published, controlled])
# %%
table = controlled.table
passes = table[table["score"] >= 0.15]
print(f"{len(passes)} pairs of head and relation reach the published threshold.")
print(f"{(passes['excess'] < 0.15).sum()} of them do not once the head's habit is taken off;", end=" ")
print(f"{(passes['q_value'] > 0.05).sum()} would with shuffled targets, too.")
passes.sort_values("expected", ascending=False).head(6)[
    ["layer", "head", "relation", "score", "expected", "excess", "q_value", "implemented"]
]

# %% [markdown]
# A head with a high `expected` writes the relation's usual answers whatever it reads; what it knows beyond that is its
# `excess`. The interval (`low`, `high`) is that of `score`. The label still depends on the threshold:

# %%
_ = controlled.sensitivity().plot()

# %% [markdown]
# ## What else does a head write about?
# The salient operations of a head are the tokens that W_V W_O lengthens most, and what it maps them to.

# %%
best = table.query("implemented").sort_values("excess").iloc[-1]
layer, head = int(best["layer"]), int(best["head"])
print(f"head {layer}.{head}, best at {best['relation']}")
salient = controlled.salient(layer, head, sources=8)
writes = salient[salient["sign"] == "writes"].groupby(["rank", "source", "sigma"])["target"].agg(", ".join)
writes.reset_index()

# %% [markdown]
# ## Do heads do so when the model runs?
# The dynamic score is the same test on what the head really adds at the last position of a sentence, with attention as
# it is ("with") or forced onto the source ("without" context). Few relations and sentences keep this quick.

# %%
from headwater.heads.validation import dynamic_scores

few = [relation for relation in relations if relation.name in ("country_to_capital", "tool_to_job", "number_to_next")]
small = hw.classify_heads(model, relations=few)
dynamic = dynamic_scores(
    model, small, relations=few, templates=("The notes on {source} say", "A few words about {source}:")
)
_ = dynamic.plot()
# %%
dynamic.correlations.query("sign == 'score'")

# %% [markdown]
# ## Does the model need them?
# The relation's heads write nothing at the last position, strongest first, beside as many random heads of the same
# layers. Control relations (`controls=None` chooses some) would need prompts of their own here, so there are none.

# %%
from headwater.heads.ablation import ablate_heads

ablation = ablate_heads(
    model,
    controlled,
    "country_to_nationality",
    relations=relations,
    template="Q: What is the adjective for {source}?\nA:",  # as the model's world asks it
    shots=0,
    controls=[],
)

# %%
ablation.summary()

# %% [markdown]
# ## Result

# %%
counts = {
    name: (m.categories["label"] != "unclassified").sum()
    for name, m in [("published", published), ("controlled", controlled)]
}
r = dynamic.correlations.query("sign == 'score'").groupby("context")["pearson"].mean()
print(
    f"Heads with a category: {counts['published']} by the published rule, {counts['controlled']} by the controlled one."
)
print(f"Mean correlation of static and dynamic scores: {r['without']:.2f} without context, {r['with']:.2f} with it.")
removed = ablation.summary().set_index(["n_heads", "removed"])
n_heads = int(ablation.summary()["n_heads"].max())
accuracy, spread = removed["accuracy"], removed["accuracy_sd"]
own, random = (n_heads, "relation heads"), (n_heads, "random heads")
print(f"country_to_nationality is right for {accuracy[0, 'none']:.0%} with every head,", end=" ")
print(f"{accuracy[own]:.0%} without its {n_heads} heads and {accuracy[random]:.0%}", end=" ")
print(f"(±{spread[random]:.0%}) without as many random ones.")

# %%
_ = ablation.plot()

# %% [markdown]
# **What would change one's mind.** If ablating the relation's heads hurts no more than ablating random heads of the
# same layers, the classes do not say what the model uses: compare the two curves above, and mind how few heads
# there are to draw from. If the correlation without context were low, the embedding that heads are assumed to read
# (`embedding="mlp0"`) would be the wrong one for this model: try `"embed+mlp0"` or `"layer0"`. And no score here knows
# where a head attends.
