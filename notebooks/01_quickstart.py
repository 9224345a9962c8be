# %% [markdown]
# # 1 · Quickstart
#
# To run it in Colab, [upload it there](https://colab.research.google.com/#upload=true) and install headwater's wheel in
# a first cell: `%pip install -q headwater-0.2.0-py3-none-any.whl`.
#
# **Question.** What can be asked of a model in a quarter of an hour?
#
# **Method.** The model is the one that comes with headwater: a small Llama, trained from scratch on a world written as
# text, so that nothing is downloaded. We look at its activations, classify its attention heads from their parameters,
# patch one prompt into another, let it answer questions, and score the texts. Every analysis returns a result with a
# table and a figure.
#
# **Result and what would change one's mind** stand at the end.

# %%
import headwater as hw

model = hw.load()
model

# %% [markdown]
# `hw.load("gpt2-xl")`, a folder, a transformers model or a TransformerBridge work the same way.
#
# ## Look inside
# A cache holds the residual stream and the attention patterns, with their axes named.

# %%
prompt = "Q: What is the capital of France?\nA:"
cache = model.cache([prompt], layers=[1, 2])
cache

# %%
cache.residual.shape, cache.attention.shape  # layer batch position d_model, layer batch head query key

# %% [markdown]
# ## What do the attention heads do?
# A head implements a relation when, given a source word, it would write an accepted target among its ten largest
# logits, and does so for clearly more pairs than with shuffled targets: its `excess` over chance must reach 0.15.
# Copying the source does not count.

# %%
relations = [r for r in hw.load_relations() if r.name.startswith(("country_to", "city_to", "noun_to", "word_to"))]
heads = hw.classify_heads(model, relations=relations)
_ = heads.plot()
# %%
heads.table.query("implemented").sort_values("score", ascending=False).head(8)[
    ["layer", "head", "relation", "category", "score", "expected", "q_value"]
]

# %% [markdown]
# `expected` is what the head would have scored had the targets been shuffled: a head that writes the same common
# answers whatever it reads has an `expected` close to its `score`.
#
# ## Which activations carry the answer?
# We run the prompt about Italy and put activations of the prompt about France into it, one layer and position at a
# time. The effect is the change of the logit difference, Paris less Rome: 0 where the patch does nothing, about 29
# where it brings the whole answer.

# %%
sweep = hw.patch(
    model,
    clean=prompt,
    corrupted="Q: What is the capital of Italy?\nA:",
    sites="resid_pre",
    metric=hw.logit_difference(" Paris", " Rome"),
)
# %%
sweep.summary().sort_values("mean", ascending=False).head(5)

# %% [markdown]
# ## Ask it questions
# Answers are written greedily and labelled right or wrong, and the exact tokens of question and answer are located.

# %%
answered = hw.answer(model, hw.load_questions("properties", sample=200))
_ = answered.plot()
# %%
answered.table[["question", "answer", "answers", "z"]].head(6)  # z = 1: wrong

# %% [markdown]
# ## How likely did it find these texts?

# %%
statistics = hw.token_statistics(model, answered.table["text"])
scores = hw.memorization_scores(statistics).wide()
scores.groupby(answered.z)[["loss", "min_k_0.2", "min_k++_0.2"]].mean()  # higher = more likely seen

# %% [markdown]
# ## Result

# %%
best = sweep.summary().sort_values("mean", ascending=False).iloc[0]
n_found = (heads.categories["label"] != "unclassified").sum()
print(f"{n_found} of {len(heads.categories)} heads implement at least one of the {len(relations)} relations.")
print(f"The patch with the largest effect: layer {best.layer}, token {best.token!r}, {best['mean']:+.1f} logits.")
print(f"{answered.z.mean():.0%} of {len(answered.z)} answers are wrong.")

# %%
figure = sweep.plot()

# %% [markdown]
# Before layer 0 the whole effect sits on the country's own token, after it on the last one: a single layer moves it.
# Notebook 3 looks for how.
#
# **What would change one's mind.** One pair of prompts is an anecdote, which is why `low`, `high` and p above are NaN:
# with several pairs `sweep.summary()` gives intervals, and the picture may blur. That a head *can* write capitals does
# not say that it *does* here; notebook 2 tests it by ablation. A model of six layers need not resemble a large one:
# everything here runs unchanged on `hw.load("gpt2-xl")`.
