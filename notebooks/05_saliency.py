# %% [markdown]
# # 5 · Saliency
#
# In [Colab](https://colab.research.google.com/#upload=true), first: `%pip install -q headwater-0.2.0-py3-none-any.whl`.
#
# **Question.** Along which attention edges does the information that the probe reads flow: from the question's exact
# tokens to the answer's (E_Q→E_A), or to other tokens that may pass it on (E_Q→*)?
#
# **Method.** The saliency of an edge is |A · ∂L/∂A|, attention times the gradient of the probe's loss, averaged over
# heads and over the layers up to the probe's (Luo et al., ACL 2026, Eq. 1). It is measured with the published loss (the
# probe's cross-entropy) and with the probe's logit, whose gradient does not vanish where the probe is confident and
# right. Every answer is measured with probe coefficients not fitted on its question: a probe is more confident on its
# training data, which creates a spurious peak near 0. The figure shows the density over examples.

# %%
import headwater as hw

model = hw.load()
answered = hw.answer(model, hw.load_questions(sample=250))
pathways = hw.trace_pathways(model, answered, token="answer_last", seeds=1, controls=False)
probe = pathways.probe
left_out = pathways.auc.query("best")["auc"].mean()
print(f"probe of layer {probe.layer} at {probe.token}: AUC {left_out:.2f} on answers left out, mean over sets")

# %% [markdown]
# Here the probe reads the answer's last token, so edges into the answer can matter; a probe before the answer cannot
# depend on them.

# %%
saliency = hw.saliency(model, answered, probe)
# %% [markdown]
# ## Is a saliency near 0 an absence of flow?
# The figure, at the end, has a peak near 0. If the probe is confident and right, the cross-entropy has no gradient,
# whatever flows. Then the same example has a small saliency under `cross_entropy` and an ordinary one under `logit`.

# %%
wide = saliency.table.pivot(index="example", columns="target", values="saliency_all")
confidence = saliency.of("logit").set_index("example")["probability"]
z = saliency.of("logit").set_index("example")["z"]
sure = (confidence - z).abs() < 0.2
wide.groupby(sure.rename("sure and right")).median()

# %% [markdown]
# ## By layer

# %%
layers = saliency.by_layer.query("target == 'logit'")
layers.groupby("layer")[["saliency_exact_answer", "saliency_all"]].median()

# %% [markdown]
# ## Does saliency agree with knockout?
# A gradient shows what a small change would do, knockout what removal does. Per example: the saliency of E_Q→* and the
# size of the logit change when E_Q is knocked out.

# %%
from scipy.stats import spearmanr

severed = pathways.table.query("layer == @probe.layer and seed == 0").set_index("example")["delta_logit"].abs()
both = wide["logit"].to_frame("saliency").join(severed.rename("knockout"), how="inner").dropna()
r = spearmanr(both["saliency"], both["knockout"])
print(f"Spearman {r.statistic:.2f} (p = {r.pvalue:.1g}) over {len(both)} answers")

# %% [markdown]
# ## Result

# %%
near_zero = {}
for target in ("cross_entropy", "logit"):
    values = saliency.of(target).set_index("example")["saliency_all"]
    near_zero[target] = values < 0.1 * values.mean()
only_loss = near_zero["cross_entropy"] & ~near_zero["logit"]
n = len(only_loss)
print(f"S(E_Q→*) is under a tenth of its mean for {near_zero['cross_entropy'].sum()} of {n} answers with the published")
print(f"loss and for {near_zero['logit'].sum()} with the logit; {only_loss.sum()} are so for saturation alone.")
ratio = wide.groupby(sure)["cross_entropy"].median()
print(f"Where the probe is sure and right, the published saliency is {ratio[True] / ratio[False]:.2f} times what it is")
print(f"elsewhere; the logit's, {wide.groupby(sure)['logit'].median().pipe(lambda m: m[True] / m[False]):.2f} times.")

# %%
_ = saliency.plot()

# %% [markdown]
# **What would change one's mind.** A probe can be explained only as far as it is accurate: its AUC is at the top. If
# the peak near 0 remains under the `logit` target, saturation does not explain it. Where the ranks of saliency and
# knockout disagree, as here, one of the two measures something other than flow, and neither can replace the other. The
# averages over heads (`heads="abs_mean"`) and over pairs (`pairs="mean"`) are choices: a result that depends on them is
# not about the model.
