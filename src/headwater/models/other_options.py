"""Options of `generate`, `from_pretrained` and `hooks` elsewhere, and what is used in their place here."""

BEGINS = "hw.load(..., bos=) says what texts begin with (model.bos)"
GENERATE = {
    "input": "the first argument is prompts",
    "verbose": "progress=False shows no bar",
    "prepend_bos": f"{BEGINS}; otherwise give token ids, model.to_tokens(text, prepend_bos=False).tolist()",
    "stop_at_eos": "a text ends at the end token; stop= ends it at texts, too",
    "eos_token_id": "a text ends at the model's end token; stop= ends it at texts, too",
    "stop_strings": "stop= takes a text or texts",
    "freq_penalty": "temperature, top_p and top_k are what draws take",
    "repetition_penalty": "temperature, top_p and top_k are what draws take",
    "num_beams": "it is greedy, or draws: do_sample=True",
    "num_return_sequences": "repeat the prompt: [prompt] * 5 with do_sample=True gives five different texts",
    "use_past_kv_cache": "keys and values are always kept",
    "use_cache": "keys and values are always kept",
    "padding_side": "prompts are padded on the right, and masked",
    "return_type": "texts come back; return_tokens=True gives the ids, too",
    "return_dict_in_generate": "texts come back; return_tokens=True gives the ids, too",
    "output_logits": "model.run(texts) gives logits",
    "max_length": "max_new_tokens= counts what is written",
}
"""By option of `generate` elsewhere: what to use here."""
UNPROCESSED = "nothing is folded or centred: weights stay as the checkpoint stores them"
LOAD = {
    **dict.fromkeys(("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"), UNPROCESSED),
    "refactor_factored_attn_matrices": UNPROCESSED,
    "hf_model": "give it as the first argument: hw.load(hf_model, tokenizer=...)",
    "model_name": "give it as the first argument: hw.load(name)",
    "torch_dtype": "it is called dtype=",
    "device_map": "device='auto' spreads the layers over all CUDA devices",
    "n_devices": "device='auto' spreads the layers over all CUDA devices",
    "move_to_device": "device= says where it runs",
    "default_padding_side": "texts are padded on the right, and masked",
    "default_prepend_bos": BEGINS,
    "checkpoint_index": "revision= names a revision of the hub, such as 'step1000'",
    "checkpoint_value": "revision= names a revision of the hub, such as 'step1000'",
    "first_n_layers": "model.run(texts, stop_at=layer) runs the layers below one",
    "cache_dir": "the hub's cache is where HF_HOME says",
    "token": "`hf auth login` once, or HF_TOKEN",
    **dict.fromkeys(
        ("load_in_8bit", "load_in_4bit", "quantization_config"), "dtype='bfloat16'; quantized weights are refused"
    ),
}
"""By option of `from_pretrained` elsewhere: what to use here."""
RUN = {
    "fwd_hooks": "the second argument is hooks, pairs (name, function) or hw.edit(...)",
    "bwd_hooks": "grad=True records gradients",
    "prepend_bos": f"{BEGINS}; or give token ids, model.to_tokens(text, prepend_bos=False)",
    "return_type": "logits come back; hw.token_statistics(model, texts) has log-probabilities",
    "stop_at_layer": "it is called stop_at=",
    "names_filter": "model.cache(texts, sites=...) keeps activations",
    "output_hidden_states": "model.cache(texts, residual=True) keeps the residual stream",
    "output_attentions": "model.cache(texts, attention=True) keeps the patterns",
    "cache": "keys and values of the tokens before are past_key_values=",
    "past_kv_cache": "keys and values of the tokens before are past_key_values=",
    "use_cache": "keys and values are not returned; past_key_values= takes a cache of transformers, and fills it",
    "batch_size": "all inputs are one batch; model.cache(texts, batch_size=...) takes some at a time",
}
"""By option of a forward pass elsewhere: what to use here."""
ENDS = "hooks end with the context"
HOOKS = {
    "fwd_hooks": "hooks come first, as in `with model.hooks([(name, function)]):`",
    "bwd_hooks": "model.run(tokens, hooks, grad=True) records gradients",
    "reset_hooks_end": ENDS,
    "clear_contexts": ENDS,
}
"""By option of `hooks` elsewhere: what to use here."""
