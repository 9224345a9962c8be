"""What users of other libraries look for in the package, and what does it here; an AttributeError says so.

Names of TransformerLens, nnsight, pyvene, transformers and sae-lens, and names that tutorials give to their own
functions. What a *model* is asked for is in `headwater.models.transformer_lens_ways`.
"""

LOAD = "hw.load(name) loads a model: a hub name, a folder, or a model in memory"
HOOKS = "hooks are given with a run: model.run(texts, [(name, function)]), or `with model.hooks([(name, function)]):`"
SAID = (
    ("HookedTransformer TransformerBridge HookedEncoder", f"{LOAD}; it has TransformerLens's names"),
    ("load_model from_pretrained get_model Model model LanguageModel NNsight IntervenableModel ReplacementModel", LOAD),
    ("AutoModel AutoModelForCausalLM", LOAD),
    ("HookedTransformerConfig", "sizes come with the checkpoint: model.shape, or model.cfg by TransformerLens's names"),
    ("ActivationCache", "model.run_with_cache(tokens) returns TransformerLens's, model.cache(texts) a hw.Cache"),
    ("HookPoint HookedRootModule add_hook hooks", HOOKS),
    (
        "FactoredMatrix SVDInterpreter",
        "hw.heads.singular_vectors(model, layer, head), hw.heads.composition_scores(model)",
    ),
    (
        "utils get_act_name",
        "sites by name are in hw.models.SITES; a hook's name is hw.models.SITES['z'].hook_name(layer)",
    ),
    ("test_prompt", "model.generate(prompt); hw.log_probability(answer) and hw.rank(answer) are metrics of hw.patch"),
    ("head_detector detect_head", "hw.classify_heads(model), hw.attention_behaviour(model)"),
    (
        "run run_with_cache run_with_hooks to_tokens to_str_tokens tokenize cache generate",
        "a model has it: model = hw.load(name), then model.{name}(...)",
    ),
    ("trace", f"hw.trace_pathways asks where wrong answers come from; in place of nnsight's, {HOOKS}"),
    ("activation_patching activation_patch causal_tracing", "hw.patch(model, clean, corrupted, sites=..., metric=...)"),
    ("attribution_patching", "hw.patch(..., method='attribution'); of edges, hw.edges(..., method='eap')"),
    ("path_patching", "hw.path_patch(model, clean, corrupted, senders=..., receivers=..., metric=...)"),
    (
        "ablation zero_ablation mean_ablation",
        "hw.ablate(model, prompts, heads=..., values='zero' or 'mean', metric=...)",
    ),
    ("logit_lens tuned_lens LogitLens TunedLens", "hw.lens(model, prompts)"),
    ("steer steering", "model.generate(prompts, [hw.edit(site, layer, hw.add(vector))])"),
    ("SAE Transcoder", "hw.load_sae(folder), or hw.features(encode, decode, at=..., layer=...)"),
    ("plot view summary report", "every result has it: result.{name}()"),
    ("load_result", "the class of a result reads its folder, as hw.HeadMap.load(folder)"),
    (
        "load_dataset datasets",
        "hw.load_questions reads questions, hw.load_member_texts texts, hw.load_relations relations",
    ),
)
"""Names, with what to use."""
WAYS = {name: way for names, way in SAID for name in names.split()}


def what_to_use(name: str) -> str | None:
    """Return what does here what another library has under this name; None for names that it does not know."""
    return WAYS[name].format(name=name) if name in WAYS else None
