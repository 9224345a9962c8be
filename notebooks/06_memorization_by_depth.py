# %% [markdown]
# # 6 · Memorization by question depth
#
# In [Colab](https://colab.research.google.com/#upload=true), first: `%pip install -q headwater-0.2.0-py3-none-any.whl`.
#
# **Question.** Deeper questions join facts that shallower ones ask for one by one. Is what they ask less likely to have
# been seen in training, and do answers fail for that reason?
#
# **Method.** Min-K% is the mean log-probability of the least likely 20 % of tokens (Shi et al., ICLR 2024), here of
# the accepted answer given the question, averaged over each graph's questions of a depth. Answers are scored 1 to 5,
# and discrepancies between neighbouring depths follow DepthQA (Ko et al., EMNLP 2024). Lengths, shuffled words and,
# since the corpus of this model is known, the true number of times a fact is in the corpus, serve as controls.

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
# ## Which tokens make the score?
# The lowest 20 % are framed; darker is less likely.

# %%
from IPython.display import HTML

deepest = profile.table.query("depth == 3")["id"].head(3).tolist()
HTML(hw.figures.token_html(profile, deepest))

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
# Sentences made of the numbers:

# %%
print("\n".join(profile.report()))

# %% [markdown]
# Boxes of minus Min-K%, higher = less likely seen, a value per graph and depth; beside them the density of the gap
# between the score of a deepest question and of those it builds on, for the quarter of questions with the lowest and
# the highest minus Min-K%.

# %%
_ = profile.plot()

# %% [markdown]
# **What would change one's mind.** If the difference between depths went away among questions of the same length, or
# were the same with shuffled words, it would be about form, not memory. If Min-K% did not follow the number of times a
# fact is in this corpus, which is known, there would be no reason to read it so elsewhere. And a likelihood given the
# question (`span="answer"`) is also how surely the model answers: `span="question"` asks about the question itself.
