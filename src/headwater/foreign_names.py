"""Names and options of other libraries, and their equivalents here, for error messages.

There is a table for each place where such a name may occur: in the package, on a model, as an option, ...
"""

from __future__ import annotations

from collections.abc import Iterable

from headwater.errors import did_you_mean

LOAD_IT = "hw.load(name) loads a model: a hub name, a folder, or a model in memory"
HOOKS_END = "hooks last for one run, or for the context `with model.hooks([(name, function)]):`"
BEGINS = "hw.load(..., bos=) sets what texts begin with (model.bos)"
AS_STORED = "weights stay as the checkpoint stores them: nothing is folded or centred"

PACKAGE = {
    "HookedTransformer TransformerBridge load_model from_pretrained get_model Model model LanguageModel NNsight "
    "IntervenableModel ReplacementModel AutoModel AutoModelForCausalLM": f"{LOAD_IT}; it has TransformerLens's names",
    "ActivationCache": "model.run_with_cache(tokens) returns TransformerLens's, model.cache(texts) a hw.Cache",
    "HookPoint HookedRootModule add_hook hooks": HOOKS_END,
    "FactoredMatrix SVDInterpreter": "hw.heads.singular_vectors(model, layer, head), hw.heads.composition_scores",
    "utils get_act_name": "a hook's name is hw.models.SITES['z'].hook_name(layer)",
    "test_prompt": "model.generate(prompt); hw.log_probability(answer) and hw.rank(answer) are metrics of hw.patch",
    "head_detector detect_head": "hw.classify_heads(model), hw.attention_behaviour(model)",
    "run run_with_cache run_with_hooks to_tokens to_str_tokens tokenize cache generate": "it is a method of a model: "
    "model = hw.load(name), then model.{name}(...)",
    "activation_patching activation_patch causal_tracing": "hw.patch(model, clean, corrupted, sites=..., metric=...)",
    "attribution_patching": "hw.patch(..., method='attribution'); for edges, hw.edges(..., method='eap')",
    "path_patching": "hw.path_patch(model, clean, corrupted, senders=..., receivers=..., metric=...)",
    "ablation zero_ablation mean_ablation": "hw.ablate(model, prompts, heads=..., values='zero' or 'mean', metric=...)",
    "logit_lens tuned_lens LogitLens TunedLens": "hw.lens(model, prompts)",
    "steer steering": "model.generate(prompts, [hw.edit(site, layer, hw.add(vector))])",
    "SAE Transcoder": "hw.load_sae(folder), or hw.features(encode, decode, at=..., layer=...)",
    "induction_heads find_induction_heads": "hw.attention_behaviour(model)",
    "metrics accuracy loss cross_entropy": "metrics are hw.logit_difference, hw.log_probability, hw.probability, "
    "hw.rank, hw.kl_divergence, or a function of the logits",
    "attention get_attention attention_pattern": "model.cache(texts).attention holds the patterns, and "
    "model.cache(texts).plot(heads=[(3, 1)]) draws them",
    "plot view summary report": "it is a method of results, result.{name}()",
    "save load_result load_sweep": "result.save(folder) writes a result, hw.Sweep.load(folder) reads a sweep",
    "load_dataset datasets": "hw.load_questions, hw.load_member_texts and hw.load_relations read data",
}
MODEL = {
    "add_hook add_perma_hook": HOOKS_END,
    "reset_hooks remove_all_hook_fns": f"there is nothing to reset: {HOOKS_END}",
    "blocks layers transformer": "activations: model.run_with_cache(tokens) or model.cache(...); "
    "parameters: model.W_Q ... model.W_O",
    "W_in": "headwater.models.open_weights(model) has heads and embeddings; MLPs are under model.raw.blocks[layer].mlp",
    "ln_final": "its gain is headwater.models.open_weights(model).final_norm_gain(); its hook ln_final.hook_normalized",
    "unembed": "use model.W_U and model.b_U",
    "embed": "use model.W_E",
    "W_pos": "only some families learn positions, model.raw.pos_embed.W_pos; rotary ones rotate queries and keys",
    "parameters named_parameters state_dict": "headwater.models.open_weights(model) has them by name, layer by layer",
    "n_layers n_heads d_model d_head d_mlp d_vocab n_ctx": "model.shape.{name}",
    "num_layers": "model.shape.n_layers",
    "QK": "multiply model.W_Q[layer, head] @ model.W_K[layer, head].T",
    "OV": "multiply model.W_V[layer, head] @ model.W_O[layer, head]",
    "tokens_to_residual_directions": "use model.W_U[:, token]",
    "set_use_attn_result": "a head's output is cache['z', layer] times model.W_O[layer]; see also "
    "hw.direct_logit_attribution(model, prompts, tokens=...)",
    "eval train": "a model is always in evaluation mode",
    "to cuda half bfloat16 float double": "choose it when loading the model: hw.load(name, device=..., dtype=...)",
    "from_pretrained load from_pretrained_no_processing": "hw.load(name)",
    "load_and_process_state_dict fold_layer_norm center_writing_weights center_unembed": AS_STORED,
    "enable_compatibility_mode": AS_STORED,
    "loss_fn": "model(tokens, return_type='loss', loss_per_token=True)",
    "hook_points hook_dict": "pass hooks by name to the run: model.run_with_hooks(tokens, fwd_hooks=[(name, "
    "function)])",
}
OPTIONS = {
    "fold_ln center_writing_weights center_unembed fold_value_biases refactor_factored_attn_matrices": AS_STORED,
    "hf_model model_name": "give it as the first argument: hw.load(name), hw.load(hf_model, tokenizer=...)",
    "torch_dtype": "hw.load takes dtype=",
    "device_map n_devices": "hw.load(name, device='auto') spreads the layers over all CUDA devices",
    "prepend_bos default_prepend_bos": f"{BEGINS}; or give token ids, model.to_tokens(text, prepend_bos=False)",
    "checkpoint_index checkpoint_value": "hw.load(name, revision=...) reads a revision of the hub, such as 'step1000'",
    "first_n_layers": "model.run(texts, stop_at=layer) runs the layers below one",
    "level confidence_level ci": "every interval is of 95 %",
    "cache_dir": "HF_HOME sets the folder of the hub's cache",
    "load_in_8bit load_in_4bit quantization_config": "quantized weights are refused; hw.load takes dtype='bfloat16'",
    "input_ids": "the first argument is texts, or token ids",
    "verbose": "functions that show a bar take progress=False",
    "stop_at_eos eos_token_id": "model.generate stops at the model's end token, and at the texts of stop=",
    "stop_strings": "model.generate takes stop=, a text or texts",
    "freq_penalty repetition_penalty": "model.generate takes temperature=, top_p= and top_k=",
    "num_beams": "model.generate is greedy, or samples with do_sample=True",
    "num_return_sequences": "model.generate([prompt] * 5, do_sample=True) gives five different texts",
    "return_dict_in_generate": "model.generate returns texts, with return_tokens=True the ids too",
    "return_type": "model.run returns logits, model.generate texts, hw.token_statistics(model, texts) likelihoods",
    "output_logits": "model.run(texts) returns logits",
    "max_length": "model.generate limits the new tokens with max_new_tokens=",
    "fwd_hooks": "hooks are pairs (name, function) or hw.edit(...), as in model.run(texts, hooks)",
    "bwd_hooks": "model.run(tokens, hooks, grad=True) records gradients",
    "stop_at_layer": "model.run(texts, stop_at=layer) runs the layers below one; model.cache takes layers=",
    "names_filter output_hidden_states output_attentions residual attention": "model.cache(texts, sites=['resid_post', "
    "'pattern']) keeps activations",
    "past_kv_cache": "model.run takes keys and values of earlier tokens as past_key_values=",
    "use_cache": "model.run takes a cache of transformers as past_key_values=, and fills it",
}
RESULT = {
    "df data dataframe to_dataframe to_pandas results rows": "its rows are a pandas table, result.table",
    "top top_k best strongest sort": "result.summary() lists the strongest first",
    "fig figure savefig save_fig show": "result.plot() draws it, and result.plot().savefig(path) writes it",
}
CACHE = {
    "items values numpy shape mean": "cache['resid_post', 3] is a tensor; cache.keys() lists the activations",
    "to cuda cpu": "model.cache(texts, device=...) chooses where it is stored",
    "logits": "model.run(texts) returns them",
    "hidden_states": "cache.residual, or cache['resid_post', layer]",
    "attentions": "cache.attention, or cache['pattern', layer]",
    "stack_head_results stack_activation accumulated_resid decompose_resid get_full_resid_decomposition logit_attrs "
    "apply_ln_to_stack compute_head_results": "hw.direct_logit_attribution(model, texts, tokens=...) sums these; "
    "model.run_with_cache(tokens) returns TransformerLens's cache, which has {name}",
}
CIRCUIT = {
    "prune top top_k best": "circuit.strongest(n) keeps its n strongest edges; hw.find_circuit removes edges in turn",
    "nodes heads": "circuit.table has a row per edge, with its sender and receiver",
    "faithfulness evaluate run": "hw.run_circuits(model, clean, corrupted, circuits=circuit, metric=...) runs it alone",
}
PLOT = {
    "save savefig filename file path out dpi": "plot().savefig(path, dpi=300) writes it",
    "cmap color colors alpha linewidth fontsize xlabel ylabel xlim ylim vmin vmax": "plot() returns matplotlib's axes "
    "or figure, which you can change as usual",
    "size": "it is called figsize=, (width, height) in inches",
    "show": "a notebook shows it; in a script plt.show() does",
}
TABLES = {
    "package": PACKAGE,
    "model": MODEL,
    "result": RESULT,
    "Cache": CACHE,
    "Circuit": CIRCUIT,
    "option": OPTIONS,
    "plot": PLOT,
}
HINTS = {
    (place, name): hint for place, table in TABLES.items() for names, hint in table.items() for name in names.split()
}


def hint_for(place: str, name: str) -> str | None:
    """Return the equivalent here of another library's name; None if the name is not known.

    The place where it occurred is "package", "model", "result", "Cache", "Circuit", "plot", or "option" of any other
    function.
    """
    hint = HINTS.get((place, name))
    return hint.replace("{name}", name) if hint else None


def missing(owner: str, place: str, name: str, known: Iterable[str], raw: object = None) -> str:
    """Return the message for a missing name, with what to use; `raw` is TransformerLens's model, which may have it."""
    hint, here = hint_for(place, name), f"{owner} has no {name!r}"
    if hasattr(raw, name):
        own = (
            f" model.raw.{name} is TransformerLens's own, without headwater's checks (docs: Coming from "
            "TransformerLens)."
        )
        return f"{here}{f': {hint}' if hint else ''}.{own}"
    if hint:
        return f"{here}: {hint}."
    near = did_you_mean(name, [one for one in known if one[:1] != "_"], or_all=False)
    return f"{here}.{near}" if near else f"{here}; dir() of it lists its names."
