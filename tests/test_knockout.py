"""Knockouts equal a Hugging Face eager forward with that mask, or with those weights set to zero, on every family."""

import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.errors import InputError, InterventionError
from tests import chance
from tests.random_models import random_model
from tests.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
N_TOKENS = len(TOKENIZER)
LENGTH = 7


@pytest.fixture(scope="module")
def twins():
    """The same random weights twice: in headwater, and in Hugging Face alone."""
    made = {}

    def pair(family):
        if family not in made:
            hf = tiny_model(family, seed=chance.seed_of(family))
            made[family] = hw.load(hf, tokenizer=TOKENIZER), hf
        return made[family]

    return pair


def random_prompt(length=LENGTH):
    return torch.randint(2, N_TOKENS, (length,)).tolist()


def random_edges(length=LENGTH):
    """Some edges from later tokens to earlier ones, never to the first token: each query keeps a key."""
    return sorted({int(i) for i in torch.randint(3, length, (2,))}), sorted({int(i) for i in torch.randint(1, 3, (2,))})


def attentions(hf):
    return [module for name, module in hf.named_modules() if name.endswith((".attn", ".attention", ".self_attn"))]


@torch.no_grad()
def masked_forward(hf, prompt, edges, layers):
    """Hugging Face eager attention with the edges masked in some layers: the mask is changed on its way in."""

    def mask_edges(module, args, options):
        mask = options["attention_mask"].clone()
        mask[..., edges] = torch.finfo(mask.dtype).min
        return args, options | {"attention_mask": mask}

    handles = [attentions(hf)[layer].register_forward_pre_hook(mask_edges, with_kwargs=True) for layer in layers]
    try:
        return hf(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    finally:
        [handle.remove() for handle in handles]


@torch.no_grad()
def zeroed_forward(hf, prompt, edges, layers, monkeypatch):
    """Hugging Face eager attention whose softmax is followed by zeros at the edges, in some layers."""
    plain, at = torch.nn.functional.softmax, []

    def softmax(scores, *args, **options):
        weights = plain(scores, *args, **options)
        if at and at[-1] in layers and weights.ndim == 4:
            weights = weights.clone()
            weights[..., edges] = 0
        return weights

    def enter(layer):
        return lambda module, args, options: at.append(layer)

    handles = [m.register_forward_pre_hook(enter(i), with_kwargs=True) for i, m in enumerate(attentions(hf))]
    try:
        with monkeypatch.context() as patched:
            patched.setattr(torch.nn.functional, "softmax", softmax)
            return hf(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    finally:
        [handle.remove() for handle in handles]


@pytest.mark.diagonal
@pytest.mark.oracle
@pytest.mark.parametrize("variant", ["mask", "zero"])
@pytest.mark.parametrize("window", [None, 3, "cumulative"])
def test_knockouts_equal_hugging_face_eager_attention(twins, family, window, variant, monkeypatch):
    model, hf = twins(family)
    prompt = random_prompt()
    queries, keys = random_edges()
    found = hw.knockout(
        model, [prompt], block=(set(queries), set(keys)), window=window, variant=variant,
        metric=[hw.logit_difference(5, 9), hw.kl_divergence()], progress=False,
    )  # fmt: skip
    assert found.engine == "wavefront"
    edges = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    edges[torch.tensor(queries)[:, None], torch.tensor(keys)] = True
    table = found.table.set_index(["metric", "layer"])
    plain = hf(torch.tensor([prompt])).logits[0, -1].detach()
    for layer in range(3):
        layers = {
            None: [layer],
            3: [i for i in range(layer - 1, layer + 2) if 0 <= i < 3],
            "cumulative": range(layer + 1),
        }
        if variant == "mask":
            logits = masked_forward(hf, prompt, edges, layers[window])
        else:
            logits = zeroed_forward(hf, prompt, edges, layers[window], monkeypatch)
        expected = float((logits[5] - logits[9]) - (plain[5] - plain[9]))
        assert table.loc[("logit_difference", layer), "effect"] == pytest.approx(expected, abs=1e-4)
        kl = (plain.softmax(-1) * (plain.log_softmax(-1) - logits.log_softmax(-1))).sum()
        assert table.loc[("kl_divergence", layer), "effect"] == pytest.approx(float(kl), abs=1e-4)


@pytest.mark.diagonal
@pytest.mark.oracle
@pytest.mark.parametrize("variant", ["mask", "zero"])
def test_padded_batches_heads_and_residual_metrics_equal_whole_runs(twins, family, variant):
    model, _ = twins(family)
    prompts = [random_prompt(length) for length in (11, 6, 8)]
    for window in (2, "cumulative"):
        options = {
            "block": {"after": hw.Edges("after", (1, 3)), "last": hw.Edges("last", [{1, 3}, 2, (1, 4)], heads=[0, 3])},
            "metric": [hw.log_probability(7), hw.Metric("probe", lambda x: x[:, -1, :4].sum(-1), site="mlp_out")],
            "window": window,
            "variant": variant,
            "over": ("layer", "head"),
            "progress": False,
        }
        fast = hw.knockout(model, prompts, **options)
        slow = hw.knockout(model, prompts, engine="whole runs", **options)
        assert (fast.engine, slow.engine) == ("wavefront", "whole runs")
        assert (fast.table["effect"] - slow.table["effect"]).abs().max() < 1e-4
        pd.testing.assert_frame_equal(
            fast.table.drop(columns=["effect", "clean"]), slow.table.drop(columns=["effect", "clean"])
        )


def test_a_prompt_in_a_batch_gives_what_it_gives_alone(twins, family):
    model, _ = twins(family)
    prompts = [random_prompt(length) for length in (12, 5)]
    options = {"block": ("after", (1, 3)), "metric": hw.logit_difference(5, 9), "window": 2, "progress": False}
    together = hw.knockout(model, prompts, **options).table
    alone = pd.concat([hw.knockout(model, [prompt], **options).table for prompt in prompts], ignore_index=True)
    assert (together["effect"] - alone["effect"]).abs().max() < 1e-4


@pytest.mark.diagonal
@pytest.mark.oracle
@pytest.mark.parametrize("site", ["mlp_out", "attn_out", "resid_post"])
def test_one_pass_gives_every_layer_what_a_loop_of_cumulative_runs_gives(twins, family, site):
    model, _ = twins(family)
    prompts = [random_prompt(9), random_prompt(6)]
    block = hw.Edges("after", (1, 3))
    before, after = hw.knocked_out_states(model, prompts, block=block, sites=site, at=-1, progress=False)
    assert before[site].shape == after[site].shape == (3, 2, model.shape.d_model)
    for example, prompt in enumerate(prompts):
        edges = block.matrix(hw.patching.prompts.read_prompts(model, [prompt])[0])

        def cut(scores, hook, edges=edges):
            return scores.masked_fill(edges, torch.finfo(scores.dtype).min)

        for layer in range(3):
            cuts = [(f"blocks.{i}.attn.hook_attn_scores", cut) for i in range(layer + 1)]
            for states, hooks in ((after, cuts), (before, [])):
                held = read_last(model, prompt, f"blocks.{layer}.hook_{site}", hooks)
                assert torch.allclose(states[site][layer, example], held, atol=1e-4)


def read_last(model, prompt, name, hooks):
    """The last position of an activation of one hooked run."""
    held = []
    model.run([prompt], [*hooks, (name, lambda activation, hook: held.append(activation[0, -1].clone()))])
    return held[0]


def test_states_of_a_batch_that_does_not_fit_are_those_of_one_that_does(twins, monkeypatch):
    from headwater.models.blocks import Blocks

    model, _ = twins("neox")
    prompts = [random_prompt(length) for length in (9, 6, 8)]
    expected = hw.knocked_out_states(model, prompts, block=("after", (1, 3)), at=-1, progress=False)
    record = Blocks.record

    def small(self, tokens, *others, **options):
        if len(tokens) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return record(self, tokens, *others, **options)

    monkeypatch.setattr(Blocks, "record", small)
    found = hw.knocked_out_states(model, prompts, block=("after", (1, 3)), at=-1, progress=False)
    for before_or_after, states in zip(found, expected, strict=True):
        assert torch.allclose(before_or_after["mlp_out"], states["mlp_out"], atol=1e-5)


def test_cumulative_knockouts_of_residual_metrics_take_one_row_per_prompt(twins, monkeypatch):
    from headwater.models.blocks import Blocks

    model, _ = twins("llama")
    rows, plain = [], Blocks.attention

    def counting(self, layer, residual, *rest, **call):
        rows.append((layer, len(residual)))
        return plain(self, layer, residual, *rest, **call)

    prompts = [random_prompt(8) for _ in range(4)]
    options = {"block": ("after", (1, 3)), "window": "cumulative", "progress": False}
    metric = hw.Metric("probe", lambda x: x.mean((1, 2)), site="resid_post")
    hw.knockout(model, prompts[:1], metric=metric, **options)
    monkeypatch.setattr(Blocks, "attention", counting)
    hw.knockout(model, prompts, metric=metric, **options)
    assert [sum(n for at, n in rows if at == layer) for layer in range(3)] == [4, 4, 4]


@pytest.mark.parametrize("at", [[{2, 3}, {2, 3}], [{3}, {2, 3}], "all"])
def test_states_at_several_positions_are_refused(twins, at):
    model, _ = twins("gpt2")
    with pytest.raises(InputError, match=r"positions of prompt [01]: states are returned for one"):
        hw.knocked_out_states(model, [random_prompt(), random_prompt()], block=("last", 1), at=at, progress=False)


def test_states_after_several_sets_of_edges_at_once_are_refused(twins):
    model, _ = twins("gpt2")
    several = {"first": ("last", 1), "second": ("last", 2)}
    with pytest.raises(InputError, match=r"names 2 sets of edges \(first, second\)"):
        hw.knocked_out_states(model, [random_prompt()], block=several, progress=False)


def test_windows_wider_than_the_model_all_cover_every_layer(twins):
    model, _ = twins("llama")
    prompt = random_prompt()
    options = {"block": ("after", (1, 3)), "metric": hw.logit_difference(5, 9), "progress": False}
    whole = hw.knockout(model, [prompt], over=(), **options).table["effect"][0]
    assert abs(whole) > 1e-4
    found = hw.knockout(model, [prompt], window=9, **options).table["effect"]
    assert found.to_numpy() == pytest.approx(whole, abs=1e-4)


def test_masking_every_key_of_a_query_is_refused_and_zeroing_them_is_not(twins):
    model, _ = twins("gpt2")
    prompt = random_prompt()
    options = {"block": (4, (0, 5)), "metric": hw.logit_difference(5, 9), "progress": False}
    with pytest.raises(InterventionError, match="leaves token 4 of example 0 no key"):
        hw.knockout(model, [prompt], **options)
    assert hw.knockout(model, [prompt], variant="zero", **options).table["effect"].abs().max() > 1e-4


@pytest.mark.parametrize("family", ["phi3", "gpt-oss"])
@pytest.mark.parametrize(("engine", "named"), [("auto", "token 4 of example 0"), ("whole runs", "token 4")])
def test_a_query_without_a_key_is_refused_also_where_a_sink_takes_its_attention(family, engine, named):
    model, prompt = hw.load(random_model(family), tokenizer=TOKENIZER), random_prompt()
    options = {"block": (4, range(5)), "metric": hw.logit_difference(5, 9), "over": (), "progress": False}
    with pytest.raises(InterventionError, match=f"leaves {named} no key"):
        hw.knockout(model, [prompt], engine=engine, **options)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_edges_outside_a_sliding_window_are_reported_and_not_shown_as_no_effect(twins, family):
    model, _ = twins(family)
    prompt = random_prompt(16)
    options = {"block": ("last", (1, 3)), "metric": hw.logit_difference(5, 9), "progress": False}
    if family == "mistral":
        with pytest.raises(InterventionError, match="No requested layer can see"):
            hw.knockout(model, [prompt], **options)
        return
    with pytest.warns(UserWarning, match="outside the sliding window"):
        table = hw.knockout(model, [prompt], **options).table.set_index("layer")
    assert table.loc[0, "edges"] == 0
    assert table["effect"].isna().tolist() == [True, False, True]
    assert table.loc[1, "edges"] == 2 * 4


def test_a_warning_of_edges_outside_the_window_names_layers_only_if_these_are_swept(twins):
    model, _ = twins("mistral")
    prompts = [random_prompt(16), random_prompt(7)]
    options = {"block": ("last", (1, 3)), "metric": hw.logit_difference(5, 9), "progress": False}
    with pytest.warns(UserWarning, match=r"^The edges of some prompts lie outside the sliding window"):
        table = hw.knockout(model, prompts, over=(), **options).table
    assert table["effect"].isna().tolist() == [True, False]
    with pytest.warns(UserWarning, match=r"^At layers \[0, 1, 2\] the edges of some prompts"):
        hw.knockout(model, prompts, **options)


def test_edges_by_text_span_and_function_are_the_same(twins):
    model, _ = twins("llama")
    texts = [" the capital of France is", " see the cat in Rome"]
    options = {"metric": hw.logit_difference(" Paris", " Rome"), "progress": False}
    by_text = hw.knockout(model, texts, block=("last", [" France", " cat"]), **options).table
    spans = [[(4, 5), (3, 4)], [4, 3], lambda strings: [i for i, s in enumerate(strings) if s in (" France", " cat")]]
    for span in spans:
        other = hw.knockout(model, texts, block={"query": -1, "key": span}, **options).table
        pd.testing.assert_frame_equal(by_text, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": (1, 3)}, "no query 1 comes at or after a key 3"),
        ({"block": "last"}, "does not name edges"),
        ({"block": ("last", "cow")}, "does not occur in the prompt"),
        ({"block": ("last", [" see", " cat"])}, "2 were given for 1 prompt"),
        ({"block": hw.Edges("last", 1, heads=9)}, "no head 9; they are 0 to 3"),
        ({"variant": "ablate"}, "is not one of mask, zero"),
        ({"over": "position"}, "no position axis"),
    ],
)
def test_what_cannot_be_used_is_named(twins, options, message):
    given = {"block": ("last", 1), "metric": hw.logit_difference(5, 9), "progress": False} | options
    with pytest.raises(InputError, match=message):
        hw.knockout(twins("llama")[0], " see the cat", **given)


def test_outputs_are_bit_identical_after_a_knockout(twins, family):
    model, _ = twins(family)
    prompt = random_prompt()
    before = model.run([prompt])
    for variant in ("mask", "zero"):
        hw.knockout(
            model, [prompt], block=("last", 1), variant=variant, metric=hw.logit_difference(5, 9), progress=False
        )
    assert torch.equal(model.run([prompt]), before)
