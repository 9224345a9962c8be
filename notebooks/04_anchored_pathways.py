# %% [markdown]
# # 4 · Anchored pathways
#
# In [Colab](https://colab.research.google.com/#upload=true), first: `%pip install -q headwater-0.2.0-py3-none-any.whl`.
#
# **Question.** A linear probe of the model's states can predict, better than chance, whether its answer is wrong. Does
# that signal flow from the question's exact tokens, or is it in the answer itself?
#
# **Method.** Probes are fitted at every layer on half of the answers and read on the other half. Then attention to the
# question's subject and property (E_Q) is blocked in all layers up to the probe's, and the probe is read again. ΔP is
# the change of its probability. An answer whose prediction flips is called Q-anchored (Luo et al., ACL 2026). Such a
# split always *looks* like two groups. So the same is done with as many random question tokens, and one mode within
# each relation is tested against two.

# %%
import headwater as hw

model = hw.load()
questions = hw.load_questions(sample=400)
answered = hw.answer(model, questions)
_ = answered.plot()
# %% [markdown]
# Each row has the positions of its exact tokens: E_Q in the question, E_A in the answer.

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
# The question is how the knockout of the exact tokens compares with the controls.

# %%
pathways.auc.query("best").groupby("dataset")[["auc", "auc_after_knockout", "auc_after_random"]].mean().round(3)

# %%
pathways.controls_at_best.query("group == 'all'").round(3).head(5)

# %% [markdown]
# Does the probe know more than which relations are hard? And does anything beyond an undecided logit
# predict the mode?
#
# One population or two? A split by a threshold makes two groups of any population, and relations of different
# difficulty create separate peaks. So one mode is tested *within* each relation and prediction (dip test, combined over
# these groups, false discovery over the sets); the other rows describe the pooled peaks. The numbers are in
# `pathways.baselines` and `pathways.components`.

# %% [markdown]
# ## Can the modes be put to use?
# A detector with an expert per mode, compared with a single probe and with `question`, which knows only relation,
# popularity and depth of the question.

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
# Sentences generated from the numbers:

# %%
for sentence in pathways.report():
    print("-", sentence)

# %% [markdown]
# ΔP in percentage points against the layer of the probe. The Q-anchored curve lies below 0 by definition.

# %%
figure = pathways.plot()

# %% [markdown]
# **What would change one's mind.** Evidence for two pathways needs three things: one mode is rejected within relations,
# random question tokens have a much smaller effect than E_Q, and the mode is predicted better than by −|logit|.
# Otherwise ΔP by mode is what any single population would show. That modes stay apart under another fit's probe is not
# evidence, since both probes read the same states. The dip test is strict; with few answers per relation it finds two
# modes only if they lie far apart. The embedded model answers in one or two words and is small; on a large model run
# the same cells with `token="exact_answer_last"`.
