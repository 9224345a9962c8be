"""On pretrained models each method gives what plain hooks on transformers' own eager run give.

Effects agree to 1e-4 logits, other numbers to 1e-4 of the largest that is compared (thousands in a residual stream).
"""

import re
from contextlib import ExitStack
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import transformers as tf

import headwater as hw
from headwater.models.sites import SITES
from tests.edge_reference import Reference
from tests.plain_hooks import hooked_plainly, pattern_plainly
from tests.real_models import real_folder
from tests.saliency_reference import answered_by, compare, random_probe

pytestmark = [pytest.mark.real, pytest.mark.oracle]
FAMILIES = {"smollm2": "llama", "gemma": "gemma3"}
LAYERS = {"smollm2": (1, 14, 29), "gemma": (1, 5, 17)}
"""The second, one between and the last; of Gemma's the one between sees the whole text, the others a window of 512."""
TEXTS = "The city of Paris is the capital of", "The city of Rome is the capital of"
ANSWERS = " France", " Italy"
QUIET = {"progress": False}


@pytest.fixture(scope="module", params=FAMILIES)
def real(request):
    """A model in headwater and in transformers alone, and two texts, as token ids, that differ at one place."""
    folder = real_folder(request.param)
    hf = tf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    base, other = (tokenizer(text).input_ids for text in TEXTS)
    (place,) = (at for at, pair in enumerate(zip(base, other, strict=True)) if len({*pair}) == 2)
    answers = [tokenizer(answer, add_special_tokens=False).input_ids[0] for answer in ANSWERS]
    named = {"family": FAMILIES[request.param], "layers": LAYERS[request.param], "place": place, "answers": answers}
    return SimpleNamespace(model=hw.load(folder), hf=hf, tokenizer=tokenizer, base=base, other=other, **named)


def assert_close(found, expected):
    found, expected = (torch.as_tensor(one, dtype=torch.float64) for one in (found, expected))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.abs().max())))


def plainly(real, ids, *edits):
    """The logits of a text, `position d_vocab`, in which plain hooks make edits: (site, layer, act)."""
    with ExitStack() as stack, torch.no_grad():
        for site, layer, act in edits:
            if site == "pattern":
                stack.enter_context(pattern_plainly(layer, act))
            else:
                stack.callback(hooked_plainly(real.hf, real.family, site, layer, act).remove)
        return real.hf(torch.tensor([ids]), use_cache=False).logits[0]


def seen(real, ids, layer):
    """Every site of one layer as plain hooks see it."""
    found = {}
    plainly(real, ids, *((site, layer, lambda x, site=site: found.update({site: x.clone()})) for site in SITES))
    return found


def metric(real):
    return {"metric": hw.logit_difference(*real.answers), "progress": False}


def assert_effects(real, found, logits, ids=None):
    """Compare effects with the logits of plain runs in which the same was edited."""
    right, wrong = real.answers
    before, *after = (one[-1, right] - one[-1, wrong] for one in (plainly(real, ids or real.base), *logits))
    expected = torch.stack(after) - before
    assert float((expected.abs() > 5e-4).double().mean()) > 0.6, "edits that do nothing test nothing"
    torch.testing.assert_close(torch.tensor(list(found)), expected, rtol=0, atol=1e-4, check_dtype=False)


def test_every_site_is_what_plain_hooks_see(real):
    cache = real.model.cache([real.base], sites=list(SITES), layers=real.layers, **QUIET)
    for layer in real.layers:
        for site, expected in seen(real, real.base, layer).items():
            assert_close(cache[site, layer], expected)


def test_every_site_is_edited_as_plain_hooks_edit_it(real):
    options = {"sites": list(SITES), "layers": real.layers[:2], "positions": [{real.place, len(real.base) - 1}]}
    options |= {"over": ("layer", "position")} | metric(real)
    table = hw.patch(real.model, [real.other], [real.base], **options).table
    donors = {layer: seen(real, real.other, layer) for layer in real.layers[:2]}
    expected = []
    for row in table.itertuples():
        where = (..., row.position, slice(None)) if row.site == "pattern" else (slice(None), row.position)

        def exchange(x, donor=donors[row.layer][row.site], where=where):
            x[where] = donor[where]

        expected.append(plainly(real, real.base, (row.site, row.layer, exchange)))
    assert len(expected) == 4 * len(SITES)
    assert_effects(real, table["effect"], expected)


def test_an_edit_in_a_run_is_that_of_a_plain_hook(real):
    layer = real.layers[1]

    def halve(x):
        x /= 2

    for site in SITES:
        edited = real.model.run([real.base], [hw.edit(site, layer, hw.scale(0.5))])[0]
        assert_close(edited, plainly(real, real.base, (site, layer, halve)))


@pytest.mark.parametrize("variant", ["mask", "zero"])
def test_a_knockout_is_a_pattern_without_the_edge(real, variant):
    end = len(real.base) - 1
    options = {"block": (end, real.place), "layers": real.layers, "variant": variant}

    def cut(pattern):
        pattern[:, :, end, real.place] = 0
        pattern /= pattern.sum(-1, keepdim=True) if variant == "mask" else 1

    table = hw.knockout(real.model, [real.base], **options, **metric(real)).table
    assert_effects(
        real, table["effect"], [plainly(real, real.base, ("pattern", layer, cut)) for layer in table["layer"]]
    )


def test_ablations_are_zeros_in_plain_hooks(real):
    first, layer, _ = real.layers

    def zero(x, places=...):
        x[..., places] = 0

    edits = {
        "heads": [("z", first, lambda z: zero(z[:, :, 2])), ("z", layer, lambda z: zero(z[:, :, 1:3]))],
        "mlps": [("mlp_out", first, zero)],
        "neurons": [("mlp_post", layer, lambda x: zero(x, [3, 500]))],
    }
    sets = {"heads": [(first, 2), (layer, 1), (layer, 2)], "mlps": [first], "neurons": [(layer, 3), (layer, 500)]}
    table = hw.ablate(
        real.model, [real.base], sets={kind: {kind: of} for kind, of in sets.items()}, **metric(real)
    ).table
    assert_effects(real, table["effect"], [plainly(real, real.base, *edits[kind]) for kind in table["set"]])


@torch.no_grad()
def test_edges_are_plain_runs_in_which_one_input_changes(real):
    """To the logits at the place where the texts differ: after it the embeddings are alike."""
    for end, receivers in ((None, ["q 1.1", "k 1.0", "v 1.0", "mlp 1"]), (real.place + 1, ["logits"])):
        base, other = real.base[:end], real.other[:end]
        options = {"senders": ["embed", "head 0.1", "mlp 0"], "receivers": receivers}
        found = hw.edges(real.model, [base], [other], **options, **metric(real))
        plain = Reference(real.hf, base, other)
        runs = [plain.logits(*found.graph.name(edge).split(" -> ")) for edge in found.chosen.tolist()]
        assert len(runs) == 3 * len(receivers)
        assert_effects(real, found.table["effect"], runs, base)


@torch.no_grad()
def test_contributions_are_what_each_part_writes_over_the_scale_of_the_final_norm(real):
    found = hw.direct_logit_attribution(real.model, [real.base], tokens=tuple(real.answers), **QUIET).table
    plain, norm = Reference(real.hf, real.base, real.base), real.hf.model.norm
    scale = (plain.inputs["last"][0, -1].square().mean() + real.hf.config.rms_norm_eps).sqrt()
    right, wrong = real.hf.get_output_embeddings().weight[real.answers]
    reads = (norm.weight + (real.family == "gemma3")) * (right - wrong) / scale
    found = found.set_index(["component", "layer", "head"])["contribution"]
    for name, written in plain.sent.items():
        component, *place = re.split("[ .]", name)
        place = [int(number) for number in place] + [pd.NA] * (2 - len(place))
        assert float(found[component, *place]) == pytest.approx(float(written[0, -1] @ reads), abs=1e-4), name
    assert len(found) == len(plain.sent)


@torch.no_grad()
def test_layers_predict_what_the_models_own_norm_and_head_read_from_them(real):
    found = hw.lens(real.model, [real.base], layers=list(real.layers), top_k=3, **QUIET).table
    states = [seen(real, real.base, layer)["resid_post"][0] for layer in real.layers]
    log_p = torch.stack([real.hf.lm_head(real.hf.model.norm(state)) for state in states]).log_softmax(-1)
    values, top = log_p.topk(3)
    assert_close(found["probability"], values.exp().flatten())
    assert found["top_token"].tolist() == [real.tokenizer.decode([token]) for token in top.flatten()]
    first = found[found["top"] == 1]
    assert_close(first["kl"], (log_p[-1].exp() * (log_p[-1] - log_p)).sum(-1).flatten())
    chosen = log_p[:, :-1].gather(-1, torch.tensor(real.base[1:]).expand(len(states), -1)[..., None])
    above, near = ((log_p[:, :-1] > chosen + off).sum(-1).flatten() for off in (1e-4, -1e-4))
    ranks = torch.tensor(first["rank"].dropna().to_numpy(int))
    assert ((above <= ranks) & (ranks <= near)).all(), "a rank is exact but for logits that are as good as equal"


@torch.no_grad()
def test_saliency_is_autograd_through_transformers_patterns(real):
    answered, probe = answered_by(real.model, 2, prefix=20), random_probe(real.model, layer=real.layers[1])
    compare(hw.saliency(real.model, answered, probe, **QUIET), answered, real.hf, probe)


@pytest.mark.filterwarnings("ignore:.*reads plain text without it")
def test_likelihoods_are_those_of_transformers_and_min_k_their_lowest(real):
    """The tokens are headwater's: what stands before a text has a test of its own."""
    statistics = hw.token_statistics(real.model, TEXTS[0], **QUIET)
    ids = real.model.tokenize(TEXTS[0]).tokens[0]
    log_p = plainly(real, ids.tolist())[:-1].double().log_softmax(-1)
    own = log_p.gather(1, ids[1:, None])[:, 0]
    mean = (log_p.exp() * log_p).sum(-1)
    variance = (log_p.exp() * log_p.square()).sum(-1) - mean.square()
    table = statistics.table.iloc[-len(own) :]
    for column, expected in (("log_probability", own), ("entropy", -mean), ("variance", variance)):
        assert_close(table[column], expected)
    scores = hw.memorization_scores(statistics, k=0.4).table.set_index("score")["value"]
    kept = int(0.4 * len(own))
    assert_close(scores["min_k"], own.sort().values[:kept].mean())
    assert_close(scores["min_k++"], ((own - mean) / variance.sqrt()).sort().values[:kept].mean())


@pytest.mark.parametrize("edited", [False, True])
def test_rows_of_a_batch_go_on_as_transformers_goes_on_with_each_alone(real, edited):
    """One row is read and written across the end of Gemma's window of 512 tokens."""
    long = (real.base + real.other) * 40
    prompts, layer = [real.base, long[: 509 if real.family == "gemma3" else 40], real.base[:3]], real.layers[1]
    direction = seen(real, real.other, layer)["resid_post"][0, real.place]

    def steer(x):
        x += direction

    hooks = [hw.edit("resid_post", layer, hw.add(direction))] if edited else []
    found = real.model.generate(prompts, hooks, max_new_tokens=8, **QUIET).tokens
    for prompt, tokens in zip(prompts, found, strict=True):
        with ExitStack() as stack:
            if edited:
                stack.callback(hooked_plainly(real.hf, real.family, "resid_post", layer, steer).remove)
            ids = torch.tensor([prompt])
            expected = real.hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert tokens == expected[0, len(prompt) :].tolist()
