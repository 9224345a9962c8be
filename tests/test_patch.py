"""Patching sweeps equal TransformerLens's own and one whole run per cell, on every architecture, with fresh inputs."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
import torch
from transformer_lens import patching as lens

import headwater as hw
from headwater.errors import HeadwaterError, InputError, RunFolderError
from headwater.figures.sweep import shown
from headwater.models.sites import SITES
from tests import chance
from tests.same_table import assert_same_table
from tests.tiny import FAMILIES, tiny_folder, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
N_TOKENS = len(TOKENIZER)
RESIDUAL = ("resid_pre", "resid_post", "attn_out", "mlp_out")
HEADS = ("z", "q", "k", "v", "pattern")
LENS_SWEEPS = {
    "resid_pre": lens.get_act_patch_resid_pre,
    "attn_out": lens.get_act_patch_attn_out,
    "mlp_out": lens.get_act_patch_mlp_out,
    "z": lens.get_act_patch_attn_head_out_all_pos,
    "q": lens.get_act_patch_attn_head_q_all_pos,
    "k": lens.get_act_patch_attn_head_k_all_pos,
    "v": lens.get_act_patch_attn_head_v_all_pos,
    "pattern": lens.get_act_patch_attn_head_pattern_all_pos,
}
LENS_SWEEPS_BY_POSITION = {
    "z": lens.get_act_patch_attn_head_out_by_pos,
    "v": lens.get_act_patch_attn_head_v_by_pos,
    "pattern": lens.get_act_patch_attn_head_pattern_by_pos,
}


@pytest.fixture(scope="module")
def models():
    made = {}

    def model(family):
        if family not in made:
            seed = chance.seed_of(family)
            made[family] = hw.load(tiny_model(family, seed=seed), tokenizer=TOKENIZER)
        return made[family]

    return model


def random_pairs(lengths, changed=3):
    """Token lists that differ at a few positions, the first of them early."""
    clean = [torch.randint(2, N_TOKENS, (length,)).tolist() for length in lengths]
    corrupted = [list(tokens) for tokens in clean]
    for tokens in corrupted:
        for position in [1, *torch.randint(1, len(tokens), (changed,)).tolist()]:
            tokens[position] = 2 + (tokens[position] + 5) % (N_TOKENS - 2)
    return clean, corrupted


def assert_all_the_way(table):
    """The patched run reaches the other run, as near as a small gap between the two lets it be seen."""
    gap = (table["clean"] - table["corrupted"]).abs()
    assert ((table["normalized_effect"] - 1).abs() < 1e-4 / gap)[gap > 1e-4].all()


def sites_of(model):
    return [*RESIDUAL, *HEADS] + ([] if model.shape.parallel_blocks else ["resid_mid"])


def by_whole_runs(*args, **options):
    sweep = hw.patch(*args, engine="whole runs", **options)
    assert sweep.engine == "whole runs"
    return sweep


def grid(sweep, rows="layer", columns="position"):
    return torch.tensor(sweep.table.pivot(index=rows, columns=columns, values="effect").to_numpy())


def test_the_engine_is_part_of_the_run_and_attribution_has_none(models, tmp_path):
    (clean,), (corrupted,) = random_pairs([5])
    options = {"sites": "z", "metric": hw.logit_difference(5, 9), "progress": False}
    hw.patch(models("gpt2"), [clean], [corrupted], out=tmp_path, **options)
    with pytest.raises(RunFolderError, match="option engine"):
        hw.patch(models("gpt2"), [clean], [corrupted], out=tmp_path, engine="whole runs", **options)
    with pytest.raises(InputError, match="engine='whole run' is not one of auto, whole runs"):
        hw.patch(models("gpt2"), [clean], [corrupted], engine="whole run", **options)
    with pytest.raises(InputError, match="method='attribution' has no engine"):
        hw.patch(models("gpt2"), [clean], [corrupted], method="attribution", engine="whole runs", **options)


@pytest.mark.oracle
@pytest.mark.diagonal
@pytest.mark.parametrize("site", LENS_SWEEPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_sweeps_equal_transformer_lens_on_every_architecture(models, family, site):
    model = models(family)
    (clean,), (corrupted,) = random_pairs([11])
    metric = hw.logit_difference(5, 9)
    _, cache = model.raw.run_with_cache(torch.tensor([clean]))
    plain = model.run([corrupted])[0, -1]

    def lens_metric(logits):
        return logits[0, -1, 5] - logits[0, -1, 9]

    expected = LENS_SWEEPS[site](model.raw, torch.tensor([corrupted]), cache, lens_metric).detach()
    found = hw.patch(model, [clean], [corrupted], sites=site, metric=metric, progress=False)
    assert found.engine == "wavefront"
    columns = "position" if site in RESIDUAL else SITES[site].head_column
    assert torch.allclose(grid(found, columns=columns).float(), expected - float(plain[5] - plain[9]), atol=1e-4)


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_sweeps_by_layer_position_and_head_equal_transformer_lens(models, family):
    model = models(family)
    (clean,), (corrupted,) = random_pairs([4])
    _, cache = model.raw.run_with_cache(torch.tensor([clean]))
    base = model.run([corrupted])[0, -1, 7]
    for site, sweep_of in LENS_SWEEPS_BY_POSITION.items():
        expected = sweep_of(model.raw, torch.tensor([corrupted]), cache, lambda x: x[0, -1, 7]).detach() - base
        found = hw.patch(
            model,
            [clean],
            [corrupted],
            sites=site,
            over=("layer", "position", "head"),
            metric=lambda x: x[:, -1, 7],
            progress=False,
        )
        head = SITES[site].head_column
        axes = ["layer", head, "position"] if site == "pattern" else ["layer", "position", head]
        table = found.table.sort_values(axes)
        assert torch.allclose(torch.tensor(table["effect"].to_numpy()).float(), expected.flatten(), atol=1e-4), site


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_sweeps_over_single_attention_edges_equal_transformer_lens(models, family):
    model = models(family)
    (clean,), (corrupted,) = random_pairs([4])
    _, cache = model.raw.run_with_cache(torch.tensor([clean]))
    base = model.run([corrupted])[0, -1, 7]
    expected = lens.get_act_patch_attn_head_pattern_dest_src_pos(
        model.raw, torch.tensor([corrupted]), cache, lambda x: x[0, -1, 7]
    ).detach()
    found = hw.patch(
        model, [clean], [corrupted], sites="pattern", over=("layer", "head", "position", "key"),
        metric=lambda x: x[:, -1, 7], progress=False,
    ).table.sort_values(["layer", "head", "position", "key"])  # fmt: skip
    assert torch.allclose(torch.tensor(found["effect"].to_numpy()).float(), (expected - base).flatten(), atol=1e-4)
    assert (found.loc[found["key"] > found["position"], "effect"] == 0).all()
    assert found["effect"].abs().max() > 1e-3


def test_edges_are_drawn_as_query_and_key_with_their_tokens(models):
    clean, corrupted = random_pairs([5])
    sweep = hw.patch(
        models("llama"), clean, corrupted, sites="pattern", over=("position", "key"), layers=[1, 2],
        metric=hw.logit_difference(5, 9), progress=False,
    )  # fmt: skip
    ax = sweep.plot()
    queries, keys = ([tick.get_text() for tick in axis.get_ticklabels()] for axis in (ax.yaxis, ax.xaxis))
    assert queries == keys == [shown(token) for token in sweep.tokens[0]]
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("Query", "Key")


@pytest.mark.oracle
def test_windows_of_attention_edges_equal_whole_runs(models):
    clean, corrupted = random_pairs([7, 5])
    options = {
        "sites": ["pattern", "z"], "over": ("layer", "key"), "window": {"layer": 2, "key": 3}, "positions": -1,
        "metric": hw.logit_difference(5, 9), "progress": False,
    }  # fmt: skip
    with pytest.raises(InputError, match="z has no key axis"):
        hw.patch(models("neox"), clean, corrupted, **options)
    options |= {"sites": "pattern"}
    fast = hw.patch(models("neox"), clean, corrupted, **options)
    slow = by_whole_runs(models("neox"), clean, corrupted, **options)
    assert (fast.table["effect"] - slow.table["effect"]).abs().max() < 1e-4
    gradients = hw.patch(models("neox"), clean, corrupted, method="attribution", **options)
    assert gradients.agreement(fast)["cells"].tolist() == [3 * (7 + 5)]


@pytest.mark.parametrize("window", [3, "cumulative"])
def test_a_window_around_a_chosen_layer_covers_the_layers_beside_it(models, window):
    model, options = models("llama"), {"metric": hw.logit_difference(5, 9), "window": window, "progress": False}
    for call, given in (
        (hw.patch, {"clean": [[2, 5, 7, 9]], "corrupted": [[2, 6, 7, 8]], "sites": "z", "over": "layer"}),
        (hw.knockout, {"prompts": [[2, 5, 7, 9]], "block": ("last", 1)}),
    ):
        every = call(model, **given, **options).table.query("layer == 1").reset_index(drop=True)
        pd.testing.assert_frame_equal(call(model, **given, **options, layers=[1]).table, every, atol=1e-6)


@pytest.mark.diagonal
@pytest.mark.oracle
@pytest.mark.parametrize("window", [None, 2, "cumulative"])
def test_padded_batches_of_different_lengths_equal_one_whole_run_per_cell(models, family, window):
    model = models(family)
    clean, corrupted = random_pairs([12, 7, 9])
    options = {
        "sites": sites_of(model),
        "metric": [
            hw.logit_difference([5, 6, 7], 9),
            hw.kl_divergence(at=-2),
            hw.Metric("state", lambda states: states.mean((1, 2)), site="mlp_out"),
        ],
        "window": window,
        "layers": [0, 2] if window is None else None,
        "progress": False,
    }
    fast = hw.patch(model, clean, corrupted, **options)
    assert fast.engine == "wavefront"
    alone = [
        by_whole_runs(model, [a], [b], **options | {"metric": [hw.logit_difference(t, 9), *options["metric"][1:]]})
        for a, b, t in zip(clean, corrupted, [5, 6, 7], strict=True)
    ]
    slow = pd.concat([sweep.table.assign(example=i) for i, sweep in enumerate(alone)], ignore_index=True)
    keys = [name for name in ("example", "site", "layer", "position", "head", "metric") if name in slow.columns]
    pd.testing.assert_frame_equal(fast.table[keys], slow[keys], check_dtype=False)
    for column in ("effect", "clean", "corrupted"):
        assert (fast.table[column] - slow[column]).abs().max() < 1e-4


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gpt2", "neox", "llama"])
def test_noising_and_zero_mean_and_resampled_values_equal_whole_runs(models, family):
    model = models(family)
    clean, corrupted = random_pairs([9, 9, 6, 6])
    shared = {"sites": ["z", "mlp_out"], "metric": hw.log_probability(4), "progress": False}
    for options in (
        {"corrupted": corrupted, "direction": "noise"},
        {"values": "zero"},
        {"values": "mean", "dataset": random_pairs([5, 8])[0]},
        {"values": "mean", "dataset": random_pairs([9, 9])[0], "clean": clean[:2]},
        {"values": "resample", "seed": 3},
    ):
        given = {"clean": clean} | options | shared
        fast, slow = hw.patch(model, **given), by_whole_runs(model, **given)
        assert (fast.table["effect"] - slow.table["effect"]).abs().max() < 1e-4
        assert fast.table["effect"].abs().max() > 1e-3


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_a_bfloat16_model_is_swept_as_near_to_float32_as_whole_runs_are(family):
    hf = tiny_model(family, seed=int(torch.randint(1 << 30, ())), dtype=torch.bfloat16)
    model, exact = hw.load(hf, tokenizer=TOKENIZER), hw.load(hf, tokenizer=TOKENIZER, dtype="float32")
    clean, corrupted = random_pairs([9, 6])
    options = {"sites": ["resid_pre", "z", "pattern"], "metric": hw.logit_difference(5, 9), "progress": False}
    expected = hw.patch(exact, clean, corrupted, **options).table
    sweeps = [
        hw.patch(model, clean, corrupted, **options),
        by_whole_runs(model, clean, corrupted, **options),
    ]
    assert sweeps[0].engine == "wavefront"
    after = [table["corrupted"] + table["effect"] for table in (*(sweep.table for sweep in sweeps), expected)]
    fast, slow = (((reached - after[2]) ** 2).mean() ** 0.5 for reached in after[:2])
    assert fast < max(2 * slow, 0.01)
    assert slow < 0.5 * expected["effect"].std()


def test_a_model_whose_placement_is_left_to_accelerate_gives_the_same_sweep(tmp_path):
    folder = tiny_folder(tmp_path, "llama", seed=int(torch.randint(1 << 30, ())))
    clean, corrupted = random_pairs([9, 6])
    options = {"sites": ["resid_pre", "z"], "metric": hw.logit_difference(5, 9), "progress": False}
    loaded = [hw.load(folder, device=device) for device in ("cpu", "auto")]
    effects = [hw.patch(model, clean, corrupted, **options).table["effect"] for model in loaded]
    assert (effects[0] - effects[1]).abs().max() < 1e-4


def test_mean_values_are_the_mean_over_the_data_set(models):
    model = models("gpt2")
    prompts, dataset = [[5, 6, 7, 8]], random_pairs([4, 4, 4])[0]
    held = []
    for prompt in dataset:
        model.run([prompt], [("blocks.1.hook_mlp_out", lambda x, hook: held.append(x[0].clone()))])
    means = torch.stack(held).mean(0)
    edited = model.run(prompts, [("blocks.1.hook_mlp_out", lambda x, hook: means[None])])[0, -1]
    found = hw.patch(
        model, prompts, sites="mlp_out", over="layer", layers=1, values="mean", dataset=dataset,
        metric=lambda x: x[:, -1, 3], progress=False,
    ).table  # fmt: skip
    assert found["clean"][0] + found["effect"][0] == pytest.approx(float(edited[3]), abs=1e-4)


def test_patching_resid_mid_everywhere_gives_the_other_run(models, family):
    model = models(family)
    if model.shape.parallel_blocks:
        with pytest.raises(InputError, match="parallel"):
            hw.patch(model, [[2, 3]], [[2, 4]], sites="resid_mid", metric=hw.logit_difference(5, 9))
        return
    clean, corrupted = random_pairs([8])
    found = hw.patch(
        model, clean, corrupted, sites="resid_mid", over="layer", metric=hw.logit_difference(5, 9), progress=False
    )
    assert_all_the_way(found.table)


def test_patching_everything_at_the_last_layer_brings_back_the_clean_run(models, family):
    model = models(family)
    clean, corrupted = random_pairs([10, 7])
    found = hw.patch(
        model, clean, corrupted, sites=["resid_pre", "resid_post"], over="layer", metric=hw.logit_difference(5, 9),
        progress=False,
    ).table  # fmt: skip
    assert (found["corrupted"] + found["effect"] - found["clean"]).abs().max() < 1e-4
    assert_all_the_way(found)


def test_positions_before_the_first_difference_have_no_effect_at_all(models):
    clean, corrupted = [[5, 6, 7, 8, 9]], [[5, 6, 70, 8, 9]]
    found = hw.patch(
        models("llama"), clean, corrupted, sites="resid_pre", metric=hw.logit_difference(5, 9), progress=False
    ).table
    assert (found.loc[found["position"] < 2, "effect"] == 0).all()
    assert (found.loc[(found["position"] == 2) & (found["layer"] == 0), "effect"] != 0).all()


def test_what_lies_after_the_position_read_has_no_effect_at_all(models):
    clean, corrupted = random_pairs([9])
    found = hw.patch(
        models("qwen3"), clean, corrupted, sites="resid_pre", metric=hw.logit_difference(5, 9, at=4), progress=False
    ).table
    assert (found.loc[found["position"] > 4, "effect"] == 0).all()


def test_texts_and_tables_of_pairs_give_the_same_as_token_ids(models, tmp_path):
    model = models("llama")
    clean, corrupted = [" the capital of France is", " see the cat"], [" the capital of Spain is", " see the dog"]
    options = {"sites": "resid_pre", "metric": hw.logit_difference(" Paris", " Madrid"), "progress": False}
    ids = [[model.tokenize(text).tokens[0].tolist() for text in texts] for texts in (clean, corrupted)]
    expected = hw.patch(model, *ids, **options).table["effect"]
    table = pd.DataFrame({"clean": clean, "corrupted": corrupted})
    table.to_csv(tmp_path / "pairs.csv", index=False)
    for given in ((clean, corrupted), (table,), (tmp_path / "pairs.csv",)):
        found = hw.patch(model, *given, **options)
        assert (found.table["effect"] - expected).abs().max() == 0
        assert found.table.set_index(["example", "position"]).loc[(0, 3), "token"].unique().tolist() == [" of"]


def test_a_pair_that_does_not_align_is_shown_side_by_side(models):
    with pytest.raises(InputError, match=r"Pair 0 does not align: 4 tokens .* 5 .*\n[\s\S]*' cat'\s+<>\s+' big'"):
        hw.patch(models("llama"), " see the cat", " see the big cat", sites="z", metric=hw.logit_difference(5, 9))


def test_a_pair_of_which_one_prompt_alone_begins_with_bos_is_refused(models):
    """Each cell would compare a token with the one before it."""
    model, metric = models("llama"), hw.logit_difference(5, 9)
    ids = model.tokenize(" see the cat of Rome").tokens[0].tolist()
    options = {"metric": metric, "progress": False}
    for clean, corrupted in (
        ([ids[:-1]], [ids[1:]]),
        ([ids[1:]], [ids[:-1]]),
        (" see the cat of Paris", [[*ids[1:], 100]]),
    ):
        for call in (hw.patch, hw.edges, hw.path_patch):
            ends = {"senders": ["head 0.0"], "receivers": ["logits"]}
            more = {hw.patch: {"sites": "z"}, hw.path_patch: ends}.get(call, {})
            with pytest.raises(InputError, match="one of its prompts begins with '<s>' and the other does not"):
                call(model, clean, corrupted, **more, **options)
    with pytest.raises(InputError, match="one of its prompts begins with '<s>'"):
        hw.patch(model, [ids], [ids[1:]], sites="z", positions={"end": "last"}, **options)


def test_a_text_that_falls_on_different_tokens_is_shown_side_by_side(models):
    with pytest.raises(InputError, match=r"different tokens in the two prompts of pair 0[\s\S]*<>"):
        hw.patch(
            models("llama"), " the cat is big", " the big is cat", sites="resid_pre", positions=" cat",
            metric=hw.logit_difference(5, 9),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sites": "resid_per"}, "no site 'resid_per'. Did you mean 'resid_pre'"),
        ({"sites": "resid_pre", "over": ("layer", "head")}, "resid_pre has no head axis"),
        ({"sites": "z", "over": "layers"}, "over=.* is not one of layer"),
        ({"sites": "z", "direction": "forward"}, "is not one of denoise, noise"),
        ({"sites": "z", "values": "noise"}, "is not one of other run"),
        ({"sites": "z", "layers": [7]}, "no layer 7; they are 0 to 2"),
        ({"sites": "z", "window": 0}, "neither a number of layers nor"),
        ({"sites": "z", "positions": 30}, "Position 30 is not in prompt 0"),
        (
            {"sites": "z", "positions": -30},
            r"Position -30 is not in prompt 0 of \d+ tokens, whose positions are -\d+ to",
        ),
        ({"sites": "z", "metric": hw.logit_difference(" Paris", " Parisian")}, r"is \d tokens"),
        ({"sites": "z", "metric": lambda logits: logits.sum()}, "must give one real number per row"),
        (
            {"sites": "z", "metric": hw.logit_difference([5, 6], 9)},
            "2 answers for 1 prompt: give one for all, or a list with one for each",
        ),
        ({"sites": "z", "method": "fast"}, "is not one of exact, attribution"),
        ({"sites": "mlp_out", "heads": [0]}, "heads=.0. was given, but mlp_out has no heads"),
        ({"sites": "z", "positions": lambda strings: {"cat"}}, "does not name positions"),
        ({"sites": "z", "dataset": [" cat"]}, "dataset= was given, but values='other run'"),
        ({"sites": "z", "batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"sites": "z", "metric": hw.logit_difference}, "is not a metric"),
        ({"sites": "z", "metric": hw.Metric("m", len, site="mlp_out", layer=9)}, "layer=9 is not a layer"),
    ],
)
def test_what_cannot_be_used_is_named(models, options, message):
    given = {"metric": hw.logit_difference(5, 9), "progress": False} | options
    with pytest.raises(InputError, match=message):
        hw.patch(models("llama"), " see the cat", " see the dog", **given)


def test_the_model_gives_bit_identical_logits_before_and_after(models, family):
    model = models(family)
    clean, corrupted = random_pairs([8])
    before = model.run(clean)
    hw.patch(model, clean, corrupted, sites=sites_of(model), metric=hw.logit_difference(5, 9), progress=False)
    assert torch.equal(model.run(clean), before)
    assert not any(point.fwd_hooks for point in model.raw.hook_dict.values())


def test_an_exception_in_a_metric_leaves_no_hook_behind(models):
    model = models("gpt2")
    clean, corrupted = random_pairs([8])
    before, calls = model.run(clean), []

    def metric(logits):
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return logits[:, -1, 0]

    with pytest.raises(KeyboardInterrupt):
        hw.patch(model, clean, corrupted, sites=["z", "pattern"], metric=metric, progress=False)
    assert torch.equal(model.run(clean), before)
    assert not any(point.fwd_hooks for point in model.raw.hook_dict.values())
    assert not any(block.attn._forward_pre_hooks for block in model.raw.blocks)


@pytest.fixture
def restless():
    """Threads change places as often as the interpreter lets them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_threads_that_use_one_model_at_once_get_what_each_would_get_alone(models, restless):
    model, metric = models("neox-sequential"), hw.logit_difference(5, 9)

    def patch(pair):
        return hw.patch(model, *pair, sites=["z", "resid_pre"], metric=metric, progress=False).table

    def attribute(pair):
        return hw.patch(model, *pair, sites="z", metric=metric, method="attribution", progress=False).table

    def knockout(pair):
        return hw.knockout(model, pair[0], block=("after", (1, 3)), variant="zero", metric=metric, progress=False).table

    def states(pair):
        return hw.knocked_out_states(model, pair[0], block=("after", (1, 3)), at=-1, progress=False)[1]["mlp_out"]

    def cache(pair):
        return model.cache(pair[0], progress=False).residual

    def run(pair):
        return model.run(pair[0], [("blocks.1.hook_mlp_out", lambda x, hook: x / 2)])

    jobs = [(use, random_pairs([9, 7])) for use in (patch, run, knockout, cache, attribute, states, run, patch) * 2]
    alone = [use(pair) for use, pair in jobs]
    model.steps_checked = False
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda job: job[0](job[1]), jobs))
    for found, expected in zip(together, alone, strict=True):
        if isinstance(expected, pd.DataFrame):
            pd.testing.assert_frame_equal(found, expected)
        else:
            assert torch.equal(found, expected)
    assert not any(point.fwd_hooks for point in model.raw.hook_dict.values())


def test_a_model_with_hooks_of_its_own_is_swept_by_whole_runs_and_says_so_once(models):
    model = models("gpt2")
    clean, corrupted = random_pairs([7])
    model.raw.add_hook("blocks.0.hook_mlp_out", lambda x, hook: x * 1.5)
    try:
        with pytest.warns(UserWarning, match="swept with whole runs, .* because it already has hooks") as caught:
            found = hw.patch(
                model, clean, corrupted, sites="resid_pre", metric=hw.logit_difference(5, 9), progress=False
            )
        assert found.engine == "whole runs"
        assert len(caught) == 1
        edited = model.run(clean)[0, -1]
    finally:
        model.raw.reset_hooks()
    assert found.table["clean"][0] == pytest.approx(float(edited[5] - edited[9]), abs=1e-4)


def test_blocks_that_compute_something_else_are_noticed_and_served_by_whole_runs(models, monkeypatch):
    from headwater.models.blocks import Blocks

    model = hw.load(tiny_model("phi"), tokenizer=TOKENIZER)
    clean, corrupted = random_pairs([7])
    right = hw.patch(model, clean, corrupted, sites="z", metric=hw.logit_difference(5, 9), progress=False)
    plain, model.steps_checked = Blocks.feed_forward, False
    monkeypatch.setattr(Blocks, "feed_forward", lambda self, layer, x: 1.01 * plain(self, layer, x))
    with pytest.warns(UserWarning, match="stepping through its blocks changes its logits"):
        found = hw.patch(model, clean, corrupted, sites="z", metric=hw.logit_difference(5, 9), progress=False)
    assert (found.table["effect"] - right.table["effect"]).abs().max() < 1e-4


def test_tiles_are_halved_when_memory_runs_out_and_the_result_is_the_same(models, monkeypatch):
    from headwater.models.blocks import Blocks

    model = models("llama")
    clean, corrupted = random_pairs([8, 6])
    options = {"sites": ["resid_pre", "z"], "metric": hw.logit_difference(5, 9), "progress": False}
    expected = hw.patch(model, clean, corrupted, **options).table
    plain = Blocks.attention

    def small(self, layer, residual, *rest, **call):
        if residual.shape[0] * residual.shape[1] > 24:
            raise torch.OutOfMemoryError("out of memory")
        return plain(self, layer, residual, *rest, **call)

    monkeypatch.setattr(Blocks, "attention", small)
    found = hw.patch(model, clean, corrupted, **options).table
    assert (found["effect"] - expected["effect"]).abs().max() < 1e-4


@pytest.mark.parametrize("method", ["exact", "attribution"])
def test_when_the_recorded_run_does_not_fit_its_examples_are_halved_and_the_table_is_the_same(
    models, monkeypatch, method
):
    from headwater.models.blocks import Blocks
    from headwater.models.hooked import HookedModel

    model = models("gpt2")
    clean, corrupted = random_pairs([8, 6, 7, 5, 8])
    options = {
        "sites": ["resid_pre", "z"], "metric": hw.logit_difference(5, 9), "method": method, "progress": False,
    }  # fmt: skip
    expected = hw.patch(model, clean, corrupted, **options).table
    record, run, recorded = Blocks.record, HookedModel.run, []

    def small_record(self, tokens, *others, **options):
        if len(tokens) > 4:
            raise torch.OutOfMemoryError("out of memory")
        recorded.append(len(tokens))
        return record(self, tokens, *others, **options)

    def small_run(self, inputs, *rest, **more):
        if len(inputs) > 2:
            raise torch.OutOfMemoryError("out of memory")
        recorded.append(len(inputs))
        return run(self, inputs, *rest, **more)

    monkeypatch.setattr(Blocks, "record", small_record)
    monkeypatch.setattr(HookedModel, "run", small_run)
    found = hw.patch(model, clean, corrupted, **options).table
    assert sum(recorded) == 2 * len(clean)
    assert_same_table(found, expected, atol=1e-4)


def test_a_run_that_does_not_fit_even_alone_ends_with_the_error_and_no_hook(models, monkeypatch):
    from headwater.models.blocks import Blocks

    def never(self, *others, **options):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Blocks, "record", never)
    with pytest.raises(HeadwaterError, match="even with one sequence at a time"):
        hw.patch(models("gpt2"), *random_pairs([8, 6]), sites="z", metric=hw.logit_difference(5, 9), progress=False)
    assert not any(point.fwd_hooks for point in models("gpt2").raw.hook_dict.values())


def test_iterators_may_name_sites_axes_layers_and_heads_of_several_pairs(models):
    clean, corrupted = random_pairs([6, 5])
    options = {"sites": "z", "over": ("layer", "head"), "layers": [0, 1], "positions": 1, "heads": [1, 2]}
    metric = hw.logit_difference(5, 9)
    expected = hw.patch(models("llama"), clean, corrupted, metric=metric, progress=False, **options).table
    once = {name: iter(options[name]) for name in ("over", "layers", "heads")} | {"sites": iter(["z"]), "positions": 1}
    found = hw.patch(models("llama"), clean, corrupted, metric=metric, progress=False, **once).table
    pd.testing.assert_frame_equal(found, expected)


def test_a_metric_that_edits_what_it_is_given_spoils_no_other(models):
    def spoiler(logits):
        return logits.zero_()[:, -1, 0]

    clean, corrupted = random_pairs([6])
    metrics = [spoiler, hw.kl_divergence(), hw.log_probability(5)]
    options = {"sites": "z", "direction": "noise", "progress": False}
    alone = hw.patch(models("llama"), clean, corrupted, metric=metrics[1:], **options).table
    table = hw.patch(models("llama"), clean, corrupted, metric=metrics, **options).table
    beside = table[table["metric"] != "spoiler"].reset_index(drop=True)
    pd.testing.assert_frame_equal(beside, alone)


@pytest.mark.parametrize("method", ["exact", "attribution"])
def test_a_sweep_gives_the_same_one_example_at_a_time_and_too_long_a_list_is_refused(models, monkeypatch, method):
    clean, corrupted = random_pairs([8, 30])
    model = models("llama")
    options = {"sites": ["z", "pattern"], "metric": hw.logit_difference(5, 9), "method": method, "progress": False}
    expected = hw.patch(model, clean, corrupted, **options).table
    monkeypatch.setattr("headwater.patching.plan.GROUP_FLOATS", 1)
    found = hw.patch(model, clean, corrupted, **options).table
    assert_same_table(found, expected, atol=1e-4)
    monkeypatch.setattr("headwater.kernels.devices.available_memory", lambda device: 10_000)
    monkeypatch.setattr(model.raw, "forward", None)
    with pytest.raises(InputError, match=r"list of this sweep's 11,568 cells would take"):
        hw.patch(
            model, clean, corrupted, **options | {"sites": "pattern", "over": ("layer", "head", "position", "key")}
        )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_batch_size_changes_nothing(models, batch_size):
    clean, corrupted = random_pairs([8, 5])
    options = {"sites": ["resid_pre", "v"], "metric": hw.logit_difference(5, 9), "progress": False}
    expected = hw.patch(models("gemma3"), clean, corrupted, **options).table["effect"]
    found = hw.patch(models("gemma3"), clean, corrupted, batch_size=batch_size, **options).table["effect"]
    assert (found - expected).abs().max() < 1e-4


def test_an_interrupted_sweep_goes_on_where_it_stopped_and_gives_the_same_table(models, tmp_path, monkeypatch):
    from headwater.patching import plan
    from headwater.patching.runners import WalkRunner

    monkeypatch.setattr(plan, "WAVE_TOKENS", 60)
    model = models("gpt2")
    clean, corrupted = random_pairs([8, 7, 6])
    options = {"sites": ["resid_pre", "z"], "metric": hw.logit_difference(5, 9), "progress": False}
    expected = hw.patch(model, clean, corrupted, **options)
    measured, plain = [], WalkRunner.measure

    def dies_in_the_third_wave(self, cells):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(cells)
        return plain(self, cells)

    with monkeypatch.context() as patched:
        patched.setattr(WalkRunner, "measure", dies_in_the_third_wave)
        with pytest.raises(KeyboardInterrupt, match=r"patch was interrupted\. The same call with out=.* continues"):
            hw.patch(model, clean, corrupted, out=tmp_path / "run", **options)
    assert len(list((tmp_path / "run" / "pieces").iterdir())) == 2
    again = []
    monkeypatch.setattr(WalkRunner, "measure", lambda self, cells: again.append(cells) or plain(self, cells))
    resumed = hw.patch(model, clean, corrupted, out=tmp_path / "run", **options)
    assert not set(again) & set(measured)
    pd.testing.assert_frame_equal(resumed.table, expected.table)
    loaded = hw.Sweep.load(tmp_path / "run")
    pd.testing.assert_frame_equal(loaded.table, expected.table, check_dtype=False)
    with pytest.raises(hw.HeadwaterError, match="another run"):
        hw.patch(model, clean, corrupted, out=tmp_path / "run", **options | {"direction": "noise"})


def test_a_sweep_interrupted_before_its_first_piece_says_that_nothing_is_saved(models, tmp_path, monkeypatch):
    from headwater.patching.runners import WalkRunner

    def dies(self, cells):
        raise KeyboardInterrupt

    monkeypatch.setattr(WalkRunner, "measure", dies)
    with pytest.raises(KeyboardInterrupt, match=r"Nothing is saved in .*run' yet: the same call begins anew\."):
        hw.patch(models("gpt2"), *random_pairs([8]), sites="z", metric=hw.logit_difference(5, 9), out=tmp_path / "run")


def test_on_a_cpu_a_wave_is_a_few_seconds_of_work_and_at_least_a_thousand_tokens(models, monkeypatch):
    from headwater.patching import plan

    model = models("gpt2")
    size = sum(parameter.numel() for parameter in model.raw.blocks.parameters())
    assert plan.wave_tokens(model) == plan.WAVE_TOKENS
    monkeypatch.setattr(plan, "CPU_WORK", 5000 * size)
    assert plan.wave_tokens(model) == 5000
    monkeypatch.setattr(plan, "CPU_WORK", 1)
    assert plan.wave_tokens(model) == plan.CPU_TOKENS


def test_every_family_is_listed():
    assert len(FAMILIES) == 11


def test_prompts_may_stand_in_columns_of_a_table():
    model = hw.load()
    pairs = [(" The capital of France is", " The capital of Italy is"), (" Paris is in", " Rome is in")]
    table = pd.DataFrame(pairs, columns=["clean", "corrupted"], index=[5, 2])
    options = {"sites": "mlp_out", "metric": hw.logit_difference(" Paris", " Rome"), "progress": False}
    sweep = hw.patch(model, table["clean"], table["corrupted"], **options)
    same = hw.patch(model, *map(list, zip(*pairs, strict=True)), **options)
    pd.testing.assert_frame_equal(sweep.table, same.table)
    named = hw.Edges("last", [" France", " Paris"])
    severed = hw.knockout(model, table["clean"], block=named, metric=hw.log_probability(" Rome"), progress=False)
    assert severed.table["effect"].abs().max() > 0
