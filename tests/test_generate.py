"""What a model writes: transformers' tokens where no hook is given, and with hooks those of plain hooks of torch."""

from functools import partial
from inspect import signature

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import headwater as hw
from headwater.errors import InputError, InterventionError
from headwater.models.forward import now_reading
from headwater.models.generation import ANCHOR, Sampling, drawn_with, draws, generate_tokens, new_text
from headwater.models.sites import SITES
from tests import chance
from tests.plain_hooks import hooked_plainly
from tests.random_models import random_model
from tests.tiny import WORDS, tiny_hooked, tiny_model, tiny_tokenizer

PROMPTS = [" Paris of France is the capital", " cat", " the dog", " small one two three four five six Rome Italy chat"]
WATCHED = ("gpt2", "neox", "llama", "mistral", "gemma2", "gemma3")
TOKEN = 258  # that the model below writes
EDITED = ("resid_pre", "k", "z", "attn_out", "resid_mid", "mlp_out", "resid_post")


@pytest.fixture(scope="module")
def llama():
    return tiny_hooked("llama", seed=3)


def shrunk(activation):
    return activation * 0.2 + 0.5


def newest(activation, hook):
    """Edit the last token of each prompt, and every token after it."""
    reading = now_reading()
    edited = reading.positions >= reading.prompts[:, None] - 1
    return torch.where(edited.view(*edited.shape, *[1] * (activation.ndim - 2)), shrunk(activation), activation)


def plainly_continued(hf, ids, steps, family=None, site=None):
    """Continue one prompt token by token by transformers alone, while a hook of torch edits what is last."""

    def act(activation):
        activation[:, -1] = shrunk(activation[:, -1])

    handle = hooked_plainly(hf, family, site, 1, act) if site else None
    new, log_probs, cache, reads = [], [], None, list(ids)
    name = "cache" if "cache" in signature(hf.forward).parameters else "past_key_values"  # from transformers 5.24 on
    with torch.no_grad():
        for _ in range(steps):
            out = hf(torch.tensor([reads]), **{name: cache}, use_cache=True)
            cache, logits = out[name], out.logits[0, -1].log_softmax(-1)
            reads = [int(logits.argmax())]
            new += reads
            log_probs.append(float(logits.max()))
    if handle:
        handle.remove()
    return new, log_probs


@pytest.mark.oracle
def test_greedy_texts_are_those_of_transformers(family):
    hf, tokenizer = tiny_model(family), tiny_tokenizer()
    model = hw.load(hf, tokenizer=tokenizer)
    texts, tokens = model.generate(PROMPTS, max_new_tokens=9, return_tokens=True)
    assert texts.tokens == tokens
    for prompt, text, new in zip(PROMPTS, texts, tokens, strict=True):
        ids = model.tokenize(prompt).tokens
        made = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, pad_token_id=1)
        assert new == made[0, ids.shape[1] :].tolist()
        assert text == tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.oracle
@pytest.mark.parametrize("family", WATCHED)
def test_hooks_act_at_every_token_as_plain_hooks_of_torch_do(family):
    hf, tokenizer = tiny_model(family, seed=3), tiny_tokenizer()
    hf.generation_config.eos_token_id = hf.config.eos_token_id = tokenizer.eos_token = None
    model = hw.load(hf, tokenizer=tokenizer)
    rows = [model.tokenize(prompt).tokens[0].tolist() for prompt in PROMPTS]
    unedited = model.generate(PROMPTS, max_new_tokens=6).tokens
    for site in EDITED:
        if SITES[site].absent(model.shape):
            continue
        hooks = [(SITES[site].hook_name(1), newest)]
        found = model.generate(PROMPTS, hooks, max_new_tokens=6).tokens
        assert found == [plainly_continued(hf, row, 6, family, site)[0] for row in rows], site
        assert found != unedited, site


@pytest.mark.parametrize("name", ["bloom", "gpt-oss", "opt", "mamba", "jamba", "qwen3-next"])
def test_rows_of_other_architectures_are_those_of_the_rows_alone_also_where_a_state_is_kept(name):
    model = hw.load(random_model(name), tokenizer=tiny_tokenizer())
    rows = [[0, 40, 41, 42, 43], [0, 51], [0, *range(100, 112)]]
    for row, new in zip(rows, model.generate(rows, max_new_tokens=3).tokens, strict=True):
        for step, token in enumerate(new):
            assert token == int(model.run([row + new[:step]], keep="last")[0, 0].argmax())


def test_an_edit_of_every_token_is_that_of_whole_runs_in_which_every_token_is_edited(llama):
    hooks = [("blocks.1.attn.hook_z", lambda z, hook: shrunk(z)), ("blocks.0.hook_mlp_out", lambda x, hook: x / 2)]
    rows = [llama.tokenize(prompt).tokens[0].tolist() for prompt in PROMPTS]
    tokens = llama.generate(rows, hooks, max_new_tokens=5).tokens
    for row, new in zip(rows, tokens, strict=True):
        for step, token in enumerate(new):
            assert token == int(llama.run([row + new[:step]], hooks, keep="last")[0, 0].argmax())


def test_hooks_see_the_prompts_as_a_run_does_and_then_one_token_of_every_row(llama):
    seen = []

    def look(activation, hook):
        seen.append((activation.clone(), now_reading()))

    batch = llama.tokenize(PROMPTS)
    whole = llama.generate(PROMPTS, max_new_tokens=6).tokens
    stop = llama.token_strings(whole[1])[1]
    made = llama.generate(PROMPTS, [("blocks.1.hook_resid_post", look)], max_new_tokens=6, stop=stop)
    assert min(map(len, made.tokens)) < 6
    first, reading = seen[0]
    alone = {}
    llama.run(batch, [("blocks.1.hook_resid_post", lambda x, hook: alone.update(x=x))])
    torch.testing.assert_close(first, alone["x"])
    assert torch.equal(reading.positions >= 0, batch.mask)
    for step, (activation, reading) in enumerate(seen[1:]):
        assert activation.shape[:2] == (4, 1)
        assert reading.positions[:, 0].tolist() == [length + step for length in batch.lengths.tolist()]
        assert reading.prompts.tolist() == batch.lengths.tolist()
        assert reading.rows == (0, 1, 2, 3)
    assert len(seen) == max(map(len, made.tokens))
    assert now_reading() is None


def test_rows_of_later_batches_have_their_own_numbers(llama):
    rows = []
    llama.generate(
        PROMPTS, [("blocks.0.hook_resid_pre", lambda x, hook: rows.append(now_reading().rows))], max_new_tokens=1,
        batch_size=3, progress=False,
    )  # fmt: skip
    assert rows == [(0, 1, 2), (3,)]


def test_hooks_of_the_context_act_as_those_of_the_call(llama):
    hooks = [("blocks.1.hook_resid_post", newest)]
    with llama.hooks(hooks):
        inside = llama.generate(PROMPTS, max_new_tokens=5)
    assert inside == llama.generate(PROMPTS, hooks, max_new_tokens=5)
    assert inside != llama.generate(PROMPTS, max_new_tokens=5)
    assert "blocks.1.hook_resid_post" in str(inside.run.options["hooks of the model"])


def test_the_record_tells_hooks_prompts_and_sampling_apart(llama):
    def record(prompts=PROMPTS[:2], hooks=(), **options):
        return llama.generate(prompts, hooks, max_new_tokens=1, **options).run

    one, other = ([("blocks.1.hook_resid_post", lambda x, hook, c=c: x * c)] for c in (2, 3))
    plain = record()
    assert plain.analysis == "generate"
    assert record().differences(plain) == []
    runs = [plain, record(hooks=one), record(hooks=other), record(PROMPTS[1:3]), record(stop="cat"), record(seed=1)]
    runs += [record(do_sample=True), record(do_sample=True, temperature=0.5)]
    assert all(a.differences(b) for i, a in enumerate(runs) for b in runs[:i])


def test_an_edit_acts_on_every_token_or_on_positions_of_the_prompt_alone(llama):
    direction, name = torch.randn(32) * 3, "blocks.1.hook_resid_post"
    everywhere = llama.generate(PROMPTS, [hw.edit("resid_post", 1, hw.add(direction))], max_new_tokens=5)
    assert everywhere == llama.generate(PROMPTS, [(name, lambda x, hook: x + direction)], max_new_tokens=5)

    def last_of_the_prompt(activation, hook):
        reading = now_reading()
        activation[reading.positions == reading.prompts[:, None] - 1] += direction
        return activation

    at_the_end = llama.generate(PROMPTS, [hw.edit("resid_post", 1, hw.add(direction), positions="last")])
    assert at_the_end == llama.generate(PROMPTS, [(name, last_of_the_prompt)])
    assert at_the_end != llama.generate(PROMPTS)
    other = llama.generate(PROMPTS, [hw.edit("resid_post", 1, hw.add(-direction), positions="last")])
    assert other.run.differences(at_the_end.run) != []
    assert other.run.unknown is None


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "glm4_moe_lite"])
def test_steered_texts_of_latent_attention_are_those_of_whole_runs(name):
    model = hw.load(random_model(name), tokenizer=tiny_tokenizer())
    hooks = [hw.edit("resid_post", 0, hw.scale(3.0))]
    for row, new in zip(ROWS, model.generate(ROWS, hooks, max_new_tokens=3).tokens, strict=True):
        for step, token in enumerate(new):
            assert token == int(model.run([row + new[:step]], hooks, keep="last")[0, 0].argmax())


def test_a_hook_that_never_fires_or_does_not_fit_is_an_error(llama):
    with pytest.raises(InterventionError, match="no activation named"):
        llama.generate(PROMPTS, [("blocks.9.hook_resid_post", newest)])
    with pytest.raises(InterventionError, match="must return an activation like the one it was given"):
        llama.generate(PROMPTS, [("blocks.1.hook_resid_post", lambda x, hook: x[:, :1])], max_new_tokens=2)


ROWS = [[0, 40, 41, 42, 43], [0, 51, 60], [0, *range(100, 112)]]
DIRECTION = torch.linspace(-3, 3, 32)


def at_fixed(positions, prompt):
    return (positions == 1) | (positions == prompt - 1)


STEERED = {
    "everywhere": (hw.edit("resid_post", 0, hw.add(DIRECTION)), lambda x, at: x + DIRECTION, lambda p, n: p >= 0),
    "positions": (
        hw.edit("resid_post", 0, hw.add(DIRECTION), positions=[{1, 4}, {1, 2}, {1, 12}]),
        lambda x, at: x + DIRECTION,
        at_fixed,
    ),
    "function": (("blocks.0.hook_resid_post", newest), lambda x, at: shrunk(x), lambda p, n: p >= n - 1),
}


@pytest.mark.oracle
@pytest.mark.parametrize("kind", STEERED)
@pytest.mark.parametrize("name", ["mamba", "rwkv", "jamba", "lfm2", "qwen3-next", "bamba"])
def test_texts_of_models_that_run_every_step_anew_are_steered_as_plain_hooks_of_torch_do(name, kind):
    hf = random_model(name, seed=2)
    hf.generation_config.eos_token_id = hf.config.eos_token_id = None
    model = hw.load(hf, tokenizer=tiny_tokenizer())
    hook, edited, where = STEERED[kind]
    calls: list[tuple[int, ...]] = []
    watch = ("blocks.0.hook_resid_post", lambda x, hook: calls.append(tuple(now_reading().positions.shape)))
    batch, options = model.tokenize(ROWS), {"max_new_tokens": 5}
    made = generate_tokens(model, batch, hooks=[hook, watch], stop=lambda token: token % 3 == 0, **options)
    steps = [(3, 13), *[(3, 1)] * (int(made.lengths.max()) - 1)]
    assert calls == steps
    blocks = next(m for m in hf.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == model.shape.n_layers)

    def act(module, args, out, prompt):
        states = out[0] if isinstance(out, tuple) else out
        at = where(torch.arange(states.shape[1]), prompt)
        states[:, at] = edited(states, at)[:, at]

    plain = generate_tokens(model, batch, **options)
    for row, (ids, new, log_probs) in enumerate(zip(ROWS, made.tokens.tolist(), made.log_probs.tolist(), strict=True)):
        handle = blocks[0].register_forward_hook(partial(act, prompt=len(ids)))
        for step in range(int(made.lengths[row])):
            with torch.no_grad():
                logits = hf(torch.tensor([ids + new[:step]]), use_cache=False).logits[0, -1].log_softmax(-1)
            assert float(logits[new[step]]) == float(logits.max()) == pytest.approx(log_probs[step], abs=1e-4)
        handle.remove()
    assert float((made.log_probs[:, 0] - plain.log_probs[:, 0]).abs().max()) > 1e-2


def test_where_attention_looks_ahead_what_was_read_before_is_edited_as_it_is_now(monkeypatch):
    monkeypatch.setattr("headwater.models.generation.takes_cache", lambda raw: False)
    model = hw.load(random_model("gemma3-looks-ahead"), tokenizer=tiny_tokenizer())
    hooks = [hw.edit("resid_post", 0, hw.scale(2.0))]
    made = generate_tokens(model, model.tokenize(ROWS), max_new_tokens=4, hooks=hooks)
    for ids, new, found in zip(ROWS, made.tokens.tolist(), made.log_probs.tolist(), strict=True):
        runs = [model.run([ids + new[:step]], hooks, keep="last")[0, 0].log_softmax(-1) for step in range(4)]
        assert found == pytest.approx([float(run[token]) for run, token in zip(runs, new, strict=True)], abs=1e-4)


def test_hooks_that_cannot_act_on_one_token_of_a_whole_text_are_refused():
    model = hw.load(random_model("jamba"), tokenizer=tiny_tokenizer())
    with (
        model.hooks([hw.edit("resid_post", 0, "zero")]),
        pytest.raises(InputError, match="would act on all of it each time: pass them to generate as hooks="),
    ):
        model.generate(ROWS)
    model = hw.load(random_model("granite4"), tokenizer=tiny_tokenizer())
    with pytest.raises(InterventionError, match=r"blocks\.1\.attn\.hook_pattern cannot act while this model generates"):
        model.generate(ROWS, [("blocks.1.attn.hook_pattern", lambda x, hook: x)])


@pytest.mark.parametrize("seed", range(3))
def test_a_stop_string_cuts_exactly_wherever_tokens_begin(seed):
    tokenizer = tiny_tokenizer((*WORDS, "dogĊĊRome", "cat!", "ab", "abab"))
    model = hw.load(tiny_model("gpt2", len(tokenizer), seed=seed), tokenizer=tokenizer)
    rng, whole = chance.rng(), model.generate(PROMPTS, max_new_tokens=12)
    for _ in range(12):
        stops = []
        for text in rng.choice(whole, 2):
            start = int(rng.integers(len(text) - 1))
            stops.append(text[start : start + int(rng.integers(1, 8))])
        texts = model.generate(PROMPTS, max_new_tokens=12, stop=stops)
        for text, new, full, ids in zip(texts, texts.tokens, whole, whole.tokens, strict=True):
            assert new == ids[: len(new)]
            written, before = (new_text(model.tokenizer, [], some) for some in (new, new[:-1]))
            found = [written.find(stop) for stop in stops if stop in written]
            assert text == (full[: min(found)] if found else full)
            assert not any(stop in before for stop in stops)


def test_the_text_of_many_tokens_is_that_of_the_tokenizer(llama):
    ids = llama.tokenizer(" Rome é – 日本 cat 🙂 the" * 12, add_special_tokens=False)["input_ids"]
    for prompt in (ids, ids[-ANCHOR:], ids[:1], []):
        assert new_text(llama.tokenizer, prompt, ids) == llama.tokenizer.decode(ids)


def test_end_tokens_and_special_stops_end_a_text_and_are_no_part_of_it(llama):
    whole = llama.generate(PROMPTS, max_new_tokens=8)
    tokenizer = tiny_tokenizer()
    special = tokenizer.convert_ids_to_tokens(whole.tokens[0][2])
    tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    made = hw.load(llama.raw.original_model, tokenizer=tokenizer).generate(PROMPTS[0], max_new_tokens=8, stop=special)
    assert made.tokens == [whole.tokens[0][: whole.tokens[0].index(whole.tokens[0][2]) + 1]]
    assert made == [tokenizer.decode(made.tokens[0][:-1])]


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_end_tokens_may_be_of_any_kind_of_list(kind):
    model = hw.load(tiny_model("llama"), tokenizer=tiny_tokenizer())
    whole = model.generate(PROMPTS[0], max_new_tokens=8).tokens[0]
    model.raw.original_model.generation_config.eos_token_id = kind([whole[2], whole[3]])
    assert model.generate(PROMPTS[0], max_new_tokens=8).tokens[0] == whole[: whole.index(whole[2]) + 1]


@pytest.mark.oracle
def test_what_is_drawn_from_is_what_transformers_draws_from():
    for temperature, top_k, top_p in [
        (1.0, None, 1.0),
        (0.7, 5, 0.8),
        (2.0, None, 0.5),
        (1.3, 3, 1.0),
        (0.5, 40, 0.999),
    ]:
        logits = torch.randn(6, 40) * 3
        expected = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
        expected = TopKLogitsWarper(top_k)(None, expected) if top_k else expected
        expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
        found = Sampling(temperature, top_p, top_k).probabilities(logits)
        torch.testing.assert_close(
            found / found.sum(-1, keepdim=True), expected.softmax(-1).double(), atol=1e-6, rtol=0
        )


def test_tokens_are_drawn_as_often_as_they_are_probable_and_never_one_of_probability_zero():
    logits = torch.randn(1, 12) * 2
    logits[0, [0, 5, 11]] = -torch.inf
    sampling = Sampling(top_p=0.9)
    numbers = torch.cat([torch.linspace(0, 1, 20_001, dtype=torch.float64)[:-1], torch.tensor([1 - 2.0**-53]).double()])
    choose = drawn_with(sampling, numbers[:, None])
    drawn = choose(logits.expand(len(numbers), -1), torch.arange(len(numbers)), 0)
    p = sampling.probabilities(logits)[0]
    torch.testing.assert_close(drawn.bincount(minlength=12) / len(numbers), (p / p.sum()).float(), atol=1e-3, rtol=0)
    assert not set(drawn.tolist()) & set((p == 0).nonzero()[:, 0].tolist())


def test_a_sample_depends_on_its_prompt_and_the_seed_alone(llama):
    def sampled(prompts, **options):
        return llama.generate(prompts, do_sample=True, temperature=1.5, progress=False, **{"seed": 7, **options})

    together = sampled(PROMPTS, max_new_tokens=6)
    assert together == [sampled(prompt, max_new_tokens=6)[0] for prompt in PROMPTS]
    assert together == sampled(PROMPTS[::-1], max_new_tokens=6)[::-1]
    assert together == sampled(PROMPTS, max_new_tokens=6, batch_size=3)
    longer = sampled(PROMPTS, max_new_tokens=9).tokens
    assert together.tokens == [row[:6] for row in longer]
    assert together != sampled(PROMPTS, max_new_tokens=6, seed=8)
    several = sampled([PROMPTS[0]] * 3, max_new_tokens=6)
    assert several[0] == together[0]
    assert len(set(several)) == 3


@pytest.mark.oracle
@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 2.5},
        {"no_repeat_ngram_size": 1},
        {"bad_words_ids": [[TOKEN]]},
        {"suppress_tokens": [TOKEN]},
        {"begin_suppress_tokens": [TOKEN]},
        {"sequence_bias": [[[TOKEN], -50.0]]},
        {"forced_eos_token_id": 7},
        {"exponential_decay_length_penalty": (1, 30.0)},
        {"min_new_tokens": 6, "eos_token_id": [1, TOKEN]},
        {"min_length": 9, "eos_token_id": [1, TOKEN]},
    ],
)
def test_the_rules_of_a_generation_config_are_obeyed_as_transformers_does(setting):
    hf, tokenizer = tiny_model("llama", seed=3), tiny_tokenizer()
    model = hw.load(hf, tokenizer=tokenizer)
    options = {"max_new_tokens": 8, "progress": False}
    before = model.generate(PROMPTS, **options).tokens
    for name, value in setting.items():
        setattr(model.raw.original_model.generation_config, name, value)
        setattr(hf.generation_config, name, value)
    found = model.generate(PROMPTS, **options)
    batch = model.tokenize(PROMPTS)
    for row, n, written in zip(batch.tokens, batch.lengths, found.tokens, strict=True):
        out = hf.generate(row[None, :n], max_new_tokens=8, do_sample=False, **setting)[0, n:].tolist()
        assert written == out
    assert found.tokens != before
    assert set(found.run.options["generation_config"]) == set(setting) - {"eos_token_id"}


def test_what_a_generation_config_asks_for_in_vain_is_said_once(llama):
    model = hw.load(tiny_model("llama", seed=3), tokenizer=tiny_tokenizer())
    model.raw.original_model.generation_config.num_beams = 4
    with pytest.warns(UserWarning, match="sets num_beams, which headwater does not use"):
        model.generate(PROMPTS, max_new_tokens=1)
    assert model.generate(PROMPTS, max_new_tokens=1) == llama.generate(PROMPTS, max_new_tokens=1)


def test_the_numbers_of_a_draw_are_spread_evenly():
    numbers = draws(0, [[i] for i in range(200)], 50).numpy()
    assert np.abs(np.histogram(numbers, 10, (0, 1))[0] - 1000).max() < 150
    assert abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1]) < 0.3


def test_greedy_is_what_sampling_at_a_low_temperature_or_of_one_token_gives(llama):
    greedy = llama.generate(PROMPTS, max_new_tokens=6)
    assert greedy == llama.generate(PROMPTS, max_new_tokens=6, do_sample=True, top_k=1)
    assert greedy == llama.generate(PROMPTS, max_new_tokens=6, do_sample=True, temperature=1e-4)
    assert greedy == llama.generate(PROMPTS, max_new_tokens=6, do_sample=True, temperature=1e-320)
    for options in ({"temperature": 0}, {"temperature": 0.0, "do_sample": True, "top_p": 0.5}):
        assert greedy == llama.generate(PROMPTS, max_new_tokens=6, **options)


def test_where_memory_runs_out_texts_are_as_they_would_have_been(llama, monkeypatch):
    expected = llama.generate(PROMPTS, max_new_tokens=6, do_sample=True)
    run, calls = hw.HookedModel.run, []

    def fails_once(self, *args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, *args, **options)

    monkeypatch.setattr(hw.HookedModel, "run", fails_once)
    made = llama.generate(PROMPTS, max_new_tokens=6, do_sample=True)
    assert made == expected
    assert made.tokens == expected.tokens


def test_one_prompt_gives_a_list_of_one_text(llama):
    assert llama.generate(PROMPTS[0]) == llama.generate([PROMPTS[0]])
    assert llama.generate(llama.tokenize(PROMPTS[0])) == llama.generate([PROMPTS[0]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.7}, "temperature=0.7 has no effect while the most probable token is taken"),
        ({"top_p": 0.9}, "top_p=0.9 has no effect"),
        ({"top_k": 5}, "top_k=5 has no effect"),
        ({"do_sample": True, "temperature": -1.0}, "temperature=-1.0 must be a number above 0"),
        ({"do_sample": True, "top_p": 1.5}, "top_p=1.5 must be a number above 0 and at most 1"),
        ({"do_sample": True, "top_k": 10**6}, "top_k=1000000 must be from 1 to"),
        ({"stop": ["cat", ""]}, "must be a text or a list of texts, none of them empty"),
        ({"max_new_tokens": 60}, r"add up to 7\d tokens; the model reads at most 64"),
        ({"seed": -1}, "seed=-1 must be"),
    ],
)
def test_options_that_cannot_be_used_or_contradict_one_another_are_refused(llama, options, message):
    with pytest.raises(InputError, match=message):
        llama.generate(PROMPTS, **options)


def test_a_model_without_a_tokenizer_writes_no_texts():
    with pytest.raises(InputError, match="has no tokenizer to generate texts with"):
        hw.load(tiny_model("llama")).generate([[3, 4]])


def test_a_model_of_masked_tokens_writes_no_texts():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    bert = BertForMaskedLM(BertConfig(vocab_size=len(tiny_tokenizer()), **sizes)).eval()
    with pytest.raises(InputError, match="BertForMaskedLM cannot generate"):
        hw.load(bert, tokenizer=tiny_tokenizer()).generate(PROMPTS)
