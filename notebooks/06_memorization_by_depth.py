# %% [markdown]
# # 6 · Memorization by question depth
#
# In [Colab](https://colab.research.google.com/#upload=true), first: `%pip install -q headwater-0.2.0-py3-none-any.whl`.
#
# **Question.** Deeper questions combine facts that shallower ones ask for singly. Were they less likely seen in
# training, and do answers fail for that reason?
#
# **Method.** Min-K% is the mean log-probability of the least likely 20 % of tokens (Shi et al., ICLR 2024), here of the
# accepted answer given the question, averaged over each graph's questions of a depth. Answers are scored 1 to 5, and
# discrepancies between neighbouring depths follow DepthQA (Ko et al., EMNLP 2024). Controls are lengths, shuffled words
# and, since this model's corpus is known, the true count of each fact in the corpus.

# %%
import headwater as hw

model = hw.load()
graph = hw.load_depth_graph()
graph

# %%
profile = hw.memorization(model, graph)

# %%
profile.judged.round(3).head(6)

# %% [markdown]
# ## Controls
# Differences between depths, deeper minus shallower (negative = deeper less likely seen): for all questions, for
# questions of the same number of tokens, and with words shuffled.

# %%
profile.comparisons.round(3).head(8)

# %% [markdown]
# ## Which tokens determine the score?
# The lowest 20 % of each text, at least one token, are marked. `profile.view()` shows them with their questions.

# %%
deepest = profile.table.query("depth == 3")["id"].head(3)
profile.tokens[profile.tokens["id"].isin(deepest)].round(2)

# %% [markdown]
# ## By layer
# The same statistics through the logit lens: layer and question depth are two different axes.

# %%
by_layer = hw.memorization(model, graph, layers="all", controls=False)
_ = hw.figures.layer_curves(by_layer)
# %% [markdown]
# ## Where the truth is known: does Min-K% follow the corpus?
# Nobody knows what a large model was trained on. Here the corpus is counted.

# %%
from scipy.stats import spearmanr

single = profile.table.query("depth == 1").dropna(subset=["min_k_0.2", "popularity"])
for score in ("loss", "min_k_0.2", "min_k++_0.2"):
    r = spearmanr(single[score], single["popularity"])
    print(f"{score}: Spearman {r.statistic:.2f} with the frequency of a fact, over {len(single)} questions")

# %% [markdown]
# ## Result
# Sentences generated from the numbers:

# %%
print("\n".join(profile.report()))

# %% [markdown]
# Boxes show minus Min-K% (higher = less likely seen), one value per graph and depth. Beside them is the density of the
# gap between a deepest question's score and that of the questions it builds on, for the quarters with the lowest and
# highest minus Min-K%.

# %%
_ = profile.plot()

# %% [markdown]
# **What would change one's mind.** If the difference between depths vanished among questions of the same length, or
# were the same with shuffled words, it would reflect form, not memory. If Min-K% did not follow the known count of a
# fact in this corpus, there would be no reason to interpret it so elsewhere. And a likelihood given the question
# (`span="answer"`) also measures how confident the model's answer is; `span="question"` scores the question itself.
