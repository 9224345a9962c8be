"""Forty small random configurations: every answer equals Hugging Face's own, or is refused in one line.

The other side of each comparison is the transformers model alone, with plain hooks on its own modules.
"""

import contextlib
import copy
import warnings

import pytest
import torch

import headwater as hw
from headwater.errors import HeadwaterError, RunFolderError
from headwater.heads.relations import Relation, word_tokens
from headwater.models.weights import open_weights
from tests.compatibility import REFUSED_HERE, TINY, WHOLE_RUNS
from tests.random_models import CONFIGS, TAIL, random_model
from tests.tiny import WORDS, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TEXT = "the capital of France is Paris"
TOLERANCE = 1e-4
READ = 17
"""The token whose logit is measured."""
ATTENTION = ("self_attn", "attn", "attention", "self_attention", "linear_attn")
OUTPUT = ("o_proj", "c_proj", "dense", "out_proj")
SOME = (
    "cohere",
    "falcon-new-decoder",
    "gemma4",
    "gpt-oss",
    "granite",
    "phi3",
    "phi3-longrope",
    "lfm2",
    "bloom",
    "mamba",
    "deepseek-v2",
)
"""Those that the quick tests of the last rows of the table go through."""
every_model = pytest.mark.parametrize(
    "name", [*CONFIGS, *(pytest.param(name, marks=pytest.mark.slow) for name in (*TINY, *TAIL))]
)
some_models = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in (*CONFIGS, *TINY, *TAIL)]
)
FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "layer_norm", "norm_f")
MULTIPLIED = dict.fromkeys(("granite", "granite4", "granite-moe"), 12.0) | {"recurrent_gemma": 5.65625}
"""What transformers multiplies the embedding with outside of its embedding module."""


@pytest.fixture(scope="module")
def prompts():
    """Two lists of token ids of one length."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(2, len(TOKENIZER), (2, 7), generator=generator).tolist()


@pytest.fixture(scope="module")
def twins():
    """The same random weights twice: in Hugging Face alone, and in headwater, or None where it refuses them."""
    made = {}

    def pair(name):
        if name not in made:
            hf = tiny_model(name) if name in TINY else random_model(name)
            made[name] = hf, unless_refused("load", name, lambda: hw.load(hf, tokenizer=TOKENIZER))
        return made[name]

    return pair


def unless_refused(what, name, compute):
    """What is computed; None where it is to be refused, after seeing that it is, in one line."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(.*swept with whole runs|Layers? .* left out: (z|pattern) of)")
        if (what, name) not in REFUSED_HERE:
            return compute()
        with pytest.raises(HeadwaterError, match=REFUSED_HERE[what, name]) as caught:
            compute()
    assert "\n" not in str(caught.value)
    return None


def assert_equal(found, expected):
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < TOLERANCE


def layers_of(hf):
    """The decoder's layers."""
    decoder = hf.get_decoder()
    n_layers = hf.config.get_text_config().num_hidden_layers
    lists = [m for m in (decoder or hf).modules() if isinstance(m, torch.nn.ModuleList) and len(m) == n_layers]
    return lists[0]


def attention_of(layer):
    """A layer's attention, or None."""
    found = next((getattr(layer, name) for name in ATTENTION if hasattr(layer, name)), None)
    return getattr(found, "attention", found)


def output_of(attention):
    """The projection that takes all heads' outputs to the residual stream."""
    return next(getattr(attention, name) for name in OUTPUT if hasattr(attention, name))


@contextlib.contextmanager
def hooked(*hooks):
    """Plain hooks of torch on modules: (module, "before" or "after", function)."""
    with contextlib.ExitStack() as stack:
        for module, when, function in hooks:
            if when == "before":
                handle = module.register_forward_pre_hook(function, with_kwargs=True)
            else:
                handle = module.register_forward_hook(function)
            stack.callback(handle.remove)
        yield


def first_input(args, options):
    return args[0] if args else options["hidden_states"]


def with_first_input(args, options, value):
    return ((value, *args[1:]), options) if args else (args, options | {"hidden_states": value})


def first_output(output):
    return output[0] if isinstance(output, tuple | list) else output


@torch.inference_mode()
def logits_of(hf, tokens, *hooks):
    with hooked(*hooks):
        return hf(torch.tensor(tokens), use_cache=False).logits


def seen_at(hf, tokens, module):
    """What a module is given in a run."""
    seen = []
    logits_of(hf, tokens, (module, "before", lambda m, args, options: seen.append(first_input(args, options).clone())))
    return seen[0]


def written(value):
    """A hook that gives a module this input."""
    return lambda module, args, options: with_first_input(args, options, value)


@torch.inference_mode()
def head_writes(hf, layer, head, n_heads, x):
    """What one head writes for each row of x, attention's input, when its token sees itself alone, less its biases."""
    attention = attention_of(layers_of(hf)[layer])
    output = output_of(attention)

    def run(rows, heads):
        weights, out = [], []

        def only(module, args, options):
            z = first_input(args, options)
            split = z.reshape(*z.shape[:-1], n_heads, -1)
            kept = torch.zeros(n_heads).index_fill(0, torch.tensor(heads, dtype=torch.long), 1.0)
            return with_first_input(args, options, (split * kept[:, None]).reshape(z.shape))

        def take(module, args, result):
            out.append(first_output(result)[:, 0].clone())
            more = result[1:] if isinstance(result, tuple) else ()
            shown = [w for w in more if isinstance(w, torch.Tensor) and w.shape == (len(rows), n_heads, 1, 1)]
            weights.append(shown[0][:, heads, 0].sum(1) if shown and heads else torch.ones(len(rows), 1))

        hooks = [(output, "before", only), (attention, "before", written(rows[:, None])), (attention, "after", take)]
        residual = contains_residual(attention)
        if residual:
            hooks.append((attention, "before", without_residual))
        logits_of(hf, [[5]] * len(rows), *hooks)
        return out[0], weights[0]

    nothing, _ = run(torch.zeros_like(x), [])
    at_x, seen = run(x, [head])
    at_zero, seen_zero = run(torch.zeros_like(x), [head])
    return (at_x - nothing) / seen - (at_zero - nothing) / seen_zero


def contains_residual(attention):
    """Bloom's attention adds the residual stream itself."""
    return type(attention).__name__ == "BloomAttention"


def without_residual(module, args, options):
    if len(args) > 1:
        return (args[0], torch.zeros_like(args[0]), *args[2:]), options
    return args, options | {"residual": torch.zeros_like(args[0])}


@torch.inference_mode()
def embeddings_of(hf, name, tokens):
    """E and what the first MLP adds when it reads E alone: the first block without attention."""
    raw = hf.get_input_embeddings()(tokens) * MULTIPLIED.get(name, 1.0)
    first = layers_of(hf)[0]
    if name == "bloom":
        raw = hf.transformer.word_embeddings_layernorm(raw)
    if attention_of(first) is None or raw.shape[-1] != hf.config.get_text_config().hidden_size:
        return raw, None
    silent, out = attention_of(first), []

    def nothing(module, args, result):
        zeros = torch.zeros_like(first_output(result))
        return zeros if isinstance(result, torch.Tensor) else type(result)([zeros, *result[1:]])

    def take(module, args, result):
        out.append(first_output(result)[:, 0].clone())

    hooks = [(first, "before", written(raw[:, None])), (silent, "after", nothing), (first, "after", take)]
    if name in ("bloom",):
        hooks[1] = (attention_of(first), "after", lambda m, args, result: (args[1], *result[1:]))
    logits_of(hf, [[5]] * len(tokens), *hooks)
    return raw, out[0] - raw


@pytest.mark.oracle
@every_model
def test_logits_equal_hugging_faces_or_the_model_is_refused(twins, prompts, name):
    hf, model = twins(name)
    if model is not None:
        ragged = [prompts[0], prompts[1][:4]]
        found = unless_refused("run", name, lambda: model.run(ragged))
        if found is not None:
            for own, tokens in zip(found, ragged, strict=True):
                assert_equal(own[: len(tokens)], logits_of(hf, [tokens])[0])


@pytest.mark.oracle
@every_model
def test_token_statistics_equal_hugging_faces_or_are_refused(twins, name):
    hf, model = twins(name)
    if model is None:
        return
    found = unless_refused("statistics", name, lambda: hw.token_statistics(model, TEXT, progress=False).table)
    if found is not None:
        tokens = model.tokenize(TEXT).tokens
        expected = logits_of(hf, tokens.tolist()).log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
        assert_equal(torch.tensor(found["log_probability"].to_numpy(), dtype=torch.float32), expected)


@pytest.mark.oracle
@every_model
def test_what_a_head_writes_equals_the_models_own_attention_or_is_refused(twins, name):
    hf, model = twins(name)
    if model is None:
        return
    x = torch.randn(5, model.shape.d_model, generator=torch.Generator().manual_seed(5))
    factors = unless_refused("ov", name, lambda: open_weights(model).ov(1))
    if factors is None:
        return
    for head in range(model.shape.n_heads):
        found = x @ factors.W_V[factors.value_head(head)] @ factors.W_O[head]
        assert_equal(found, head_writes(hf, 1, head, model.shape.n_heads, x))


@pytest.mark.oracle
@every_model
def test_head_scores_equal_counts_over_the_models_own_attention_or_are_refused(twins, name):
    hf, model = twins(name)
    if model is None:
        return
    pairs = tuple(zip(WORDS, [(word,) for word in WORDS[1:]], strict=False))
    relation = Relation("next", "linguistic", pairs)
    options = {"relations": [relation], "rule": "published", "k": 20, "embedding": "raw", "progress": False}
    found = unless_refused("heads", name, lambda: hw.classify_heads(model, **options))
    if found is None:
        return
    tokens = torch.tensor(word_tokens(TOKENIZER, WORDS))[:, 0]
    raw, _ = embeddings_of(hf, name, tokens[: len(pairs)])
    with torch.inference_mode():
        W_U = hf.get_output_embeddings().weight.T
    for head in range(model.shape.n_heads):
        best = (head_writes(hf, 1, head, model.shape.n_heads, raw) @ W_U).topk(20).indices
        expected = float((best == tokens[1:, None]).any(1).float().mean())
        row = found.table.query(f"layer == 1 and head == {head}")
        assert float(row["score"].iloc[0]) == pytest.approx(expected), head


@pytest.mark.oracle
@every_model
def test_effective_embeddings_equal_the_models_own_first_block_or_are_refused(twins, name):
    hf, model = twins(name)
    if model is None:
        return
    tokens = torch.tensor([3, 70, 200, 281])
    raw, mlp0 = embeddings_of(hf, name, tokens)
    source = open_weights(model)
    for kind, expected in (("raw", raw), ("mlp0", mlp0), ("embed+mlp0", None if mlp0 is None else raw + mlp0)):
        what = kind.removeprefix("embed+")
        found = unless_refused(what, name, lambda kind=kind: source.effective_embedding(tokens, kind))
        if found is not None:
            assert expected is not None, kind
            assert_equal(found, expected)
    found = unless_refused("layer0", name, lambda: source.effective_embedding(tokens, "layer0"))
    if found is not None:
        pairs = torch.stack([torch.zeros_like(tokens), tokens], 1).tolist()
        assert_equal(found, seen_at(hf, pairs, layers_of(hf)[1])[:, 1])


@pytest.mark.oracle
@every_model
def test_patching_the_residual_stream_equals_plain_hooks_or_is_refused(twins, prompts, name):
    hf, model = twins(name)
    if model is None:
        return
    clean, corrupted = prompts
    metric = {"metric": lambda logits: logits[:, -1, READ], "progress": False}
    sweep = unless_refused("patch", name, lambda: hw.patch(model, [clean], [corrupted], sites="resid_pre", **metric))
    if sweep is None:
        return
    assert (sweep.engine == "whole runs") is (name in WHOLE_RUNS)
    for layer, position in ((0, 2), (1, 3), (model.shape.n_layers - 1, 6)):
        block = layers_of(hf)[layer]
        mixed = seen_at(hf, [corrupted], block).clone()
        mixed[:, position] = seen_at(hf, [clean], block)[:, position]
        expected = logits_of(hf, [corrupted], (block, "before", written(mixed)))[0, -1, READ]
        assert_cell(sweep, expected - logits_of(hf, [corrupted])[0, -1, READ], layer=layer, position=position)


@pytest.mark.oracle
@every_model
def test_patching_a_heads_output_equals_plain_hooks_or_is_refused(twins, prompts, name):
    hf, model = twins(name)
    if model is None:
        return
    clean, corrupted = prompts
    metric = {"metric": lambda logits: logits[:, -1, READ], "progress": False}
    sweep = unless_refused("z", name, lambda: hw.patch(model, [clean], [corrupted], sites="z", layers=1, **metric))
    if sweep is None:
        return
    output = output_of(attention_of(layers_of(hf)[1]))
    here, there = (seen_at(hf, [tokens], output) for tokens in (corrupted, clean))
    for head in (0, 3):
        mixed = here.clone()
        width = here.shape[-1] // model.shape.n_heads
        mixed[..., head * width : (head + 1) * width] = there[..., head * width : (head + 1) * width]
        expected = logits_of(hf, [corrupted], (output, "before", written(mixed)))[0, -1, READ]
        assert_cell(sweep, expected - logits_of(hf, [corrupted])[0, -1, READ], layer=1, head=head)


@pytest.mark.oracle
@some_models
def test_caches_hold_what_hugging_faces_modules_are_given_or_are_refused(twins, prompts, name):
    hf, model = twins(name)
    if model is None:
        return
    cache = unless_refused("cache", name, lambda: model.cache(prompts))
    if cache is not None:
        assert_equal(cache["resid_post", model.shape.n_layers - 2], seen_at(hf, prompts, layers_of(hf)[-1]))
        with torch.inference_mode():
            attended = hf(torch.tensor(prompts), use_cache=False, output_attentions=True).attentions
        assert_equal(cache["pattern", model.shape.n_layers - 1], attended[-1])


@pytest.mark.oracle
@some_models
def test_an_edge_to_the_logits_equals_a_final_norm_given_more_or_is_refused(twins, prompts, name):
    hf, model = twins(name)
    if model is None:
        return
    base, other = ([tokens] for tokens in prompts)
    options = {"senders": "embed", "receivers": "logits", "metric": lambda logits: logits[:, -1, READ]}
    found = unless_refused("edges", name, lambda: hw.edges(model, base, other, progress=False, **options))
    if found is None:
        return
    norm = next(getattr(hf.get_decoder(), one) for one in FINAL_NORMS if hasattr(hf.get_decoder(), one))
    entering = [seen_at(hf, tokens, layers_of(hf)[0]) for tokens in (base, other)]
    changed = seen_at(hf, base, norm) + entering[1] - entering[0]
    expected = (logits_of(hf, base, (norm, "before", written(changed))) - logits_of(hf, base))[0, -1, READ]
    assert float(found.table["effect"].iloc[0]) == pytest.approx(float(expected), abs=TOLERANCE)


@pytest.mark.oracle
@some_models
def test_what_is_generated_equals_what_hugging_face_generates_or_is_refused(twins, prompts, name):
    hf, model = twins(name)
    if model is None:
        return
    options = {"max_new_tokens": 4}
    ragged = [prompts[0], prompts[1][:4]]
    found = unless_refused("generate", name, lambda: model.generate(ragged, **options))
    if found is not None:
        for row, prompt in zip(found.tokens, ragged, strict=True):
            tokens = [*prompt]
            for _ in row:
                tokens.append(int(logits_of(hf, [tokens])[0, -1].argmax()))
            assert row == tokens[len(prompt) :]
            assert len(row) == 4 or row[-1] == 0, "shorter only where the model ended its text"


@contextlib.contextmanager
def severed(monkeypatch, hf, layer, query, key):
    """One edge masked before the softmax of one layer's attention."""
    plain, at = torch.nn.functional.softmax, []

    def softmax(scores, *args, **options):
        if at and at[-1] == layer and (scores.ndim == 4 or scores.shape[1:-1] == scores.shape[-1:]):
            scores = scores.clone()
            scores[..., query, key] = torch.finfo(scores.dtype).min
        return plain(scores, *args, **options)

    entered = [(block, "before", lambda m, args, options, i=i: at.append(i)) for i, block in enumerate(layers_of(hf))]
    with monkeypatch.context() as patched, hooked(*entered):
        patched.setattr(torch.nn.functional, "softmax", softmax)
        yield


@pytest.mark.oracle
@every_model
def test_knockouts_equal_masked_softmaxes_or_are_refused(twins, prompts, monkeypatch, name):
    hf, model = twins(name)
    if model is None:
        return
    tokens, query, key = prompts[0], len(prompts[0]) - 1, 4
    options = {"block": (query, key), "metric": lambda logits: logits[:, -1, READ], "progress": False}
    sweep = unless_refused("knockout", name, lambda: hw.knockout(model, [tokens], **options))
    if sweep is None:
        return
    plain = logits_of(hf, [tokens])[0, -1, READ]
    for layer in sweep.table["layer"].unique():
        with severed(monkeypatch, hf, layer, query, key):
            expected = logits_of(hf, [tokens])[0, -1, READ]
        assert expected != plain
        assert_cell(sweep, expected - plain, layer=layer)


@every_model
def test_a_run_folder_knows_its_model_again_and_no_other(twins, prompts, tmp_path, name):
    hf, model = twins(name)
    if model is None:
        return
    options = {"sites": "resid_pre", "metric": hw.logit_difference(READ, 5), "progress": False, "out": tmp_path / "run"}

    def sweep(model):
        return unless_refused("patch", name, lambda: hw.patch(model, [prompts[0]], [prompts[1]], **options))

    first = sweep(model)
    if first is None:
        return
    assert sweep(model).table.equals(first.table)
    other = copy.deepcopy(hf)
    with torch.no_grad():
        other.get_input_embeddings().weight[3] += 1.0
    with pytest.raises(RunFolderError):
        sweep(hw.load(other, tokenizer=TOKENIZER))


def assert_cell(sweep, expected, **where):
    table = sweep.table
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table) == 1
    assert abs(float(table["effect"].iloc[0]) - float(expected)) < TOLERANCE, where
