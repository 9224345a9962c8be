# %% [markdown]
# # 4 · Anchored pathways
#
# In [Colab](https://colab.research.google.com/#upload=true), first: `%pip install -q headwater-0.2.0-py3-none-any.whl`.
#
# **Question.** A linear probe can tell from the model's states, better than chance, whether its answer is wrong. Does
# that signal flow from the question's exact tokens, or is it in the answer itself?
#
# **Method.** Probes are fitted at every layer on half of the answers and read on the other half. Then, in all layers
# up to the probe's, nothing may attend to the subject and property of the question (E_Q), and the probe is read again:
# ΔP is the change of its probability, and an answer whose prediction flips is called Q-anchored (Luo et al., ACL
# 2026). Since such a split always *looks* like two groups, the same is done with as many random question tokens, and
# one mode within each relation is tested against two.

# %%
import headwater as hw

model = hw.load()
questions = hw.load_questions(sample=400)
answered = hw.answer(model, questions)
_ = answered.plot()
# %% [markdown]
# Each row knows where its exact tokens are: E_Q in the question, E_A in the answer.

# %%
row = answered.table.iloc[0]
tokens = model.token_strings(row["tokens"])
print(row["text"].replace("\n", " / "), "   wrong" if row["z"] else "   right")
print("E_Q:", [tokens[i] for i in answered.exact_question_tokens()[0]])
print("E_A:", [tokens[i] for i in row["exact_answer_tokens"]])

# %% [markdown]
# ## Trace
# On this small model the informative token is the one before the answer (the publication reads the last exact-answer
# token of large models).

# %%
pathways = hw.trace_pathways(model, answered, token="before_answer", seeds=2)

# %% [markdown]
# What counts is how the knockout of the exact tokens compares with the controls.

# %%
pathways.auc.query("best").groupby("dataset")[["auc", "auc_after_knockout", "auc_after_random"]].mean().round(3)

# %%
pathways.controls_at_best.query("group == 'all'").round(3).head(5)

# %% [markdown]
# Does the probe know more than which relations are hard? And does anything beyond an undecided logit
# predict the mode?
#
# One population or two? A split by a threshold makes two groups of any population, and relations of different
# difficulty make peaks of their own. So one mode is tested *within* each relation and prediction (dip test, combined
# over these groups, false discovery over the sets); the other rows describe the peaks of everything together. The
# numbers are in `pathways.baselines` and `pathways.components`.

# %% [markdown]
# ## Can the modes be put to use?
# A detector with an expert per mode, beside a single probe and beside `question`, which knows only relation, popularity
# and depth of the question.

# %%
detection = hw.detect(
    model,
    answered,
    methods=("question", "logit_mean", "logit_min", "probe", "vanilla_experts", "mop"),
    token="before_answer",
    seeds=2,
)
_ = detection.plot()
# %%
print("\n".join(detection.report()))

# %% [markdown]
# ## Result
# Sentences made of the numbers:

# %%
for sentence in pathways.report():
    print("-", sentence)

# %% [markdown]
# ΔP in percentage points against the layer of the probe. The Q-anchored curve lies below 0 by definition.

# %%
figure = pathways.plot()

# %% [markdown]
# **What would change one's mind.** Two pathways would be worth believing in where one mode is rejected within
# relations, where as many random question tokens do much less than E_Q, and where the mode is predicted better
# than by −|logit|. Where these fail, ΔP by mode is what any single population would show: that modes keep their
# distance under another fit's probe is not evidence, since both probes read the same states. The dip test is
# strict; with few answers to a relation it finds two modes only when they lie far apart. The embedded model
# answers in one or two words and is small; on a large model run the same cells with
# `token="exact_answer_last"`.
