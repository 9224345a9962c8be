"""Models of TransformerLens's own go down the layers in one walk, to what its own hooks give, cell by cell.

The file runs under both supported generations of transformer-lens (`make test-tl39`).
"""

import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.models.sites import SITES
from tests.own_models import D_VOCAB, HAS_BRIDGE_ONLY, OWN, own_model, raw_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:HookedTransformer:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]
CLOSE = 1e-5


def sites_of(model) -> list[str]:
    return [name for name, site in SITES.items() if site.absent(model.shape) is None]


def pairs(lengths, changed=2):
    clean = [torch.randint(D_VOCAB, (length,)).tolist() for length in lengths]
    corrupted = [list(tokens) for tokens in clean]
    for tokens in corrupted:
        for position in [1, *torch.randint(1, len(tokens), (changed,)).tolist()]:
            tokens[position] = (tokens[position] + 5) % D_VOCAB
    return clean, corrupted


def by_whole_runs(function, *args, **options):
    sweep = function(*args, engine="whole runs", **options)
    assert sweep.engine == "whole runs"
    return sweep


def by_hooks(raw, cell, values, run):
    """One run of TransformerLens with one hook: the logits of the cell, and those of the plain run."""
    name = SITES[cell.site].hook_name(cell.layer)
    head = slice(None) if cell.head is None else cell.head
    at = slice(None) if cell.position is None else cell.position
    place = (0, head, at) if cell.site == "pattern" else (0, at) if cell.head is None else (0, at, head)

    def write(x, hook):
        x = x.clone()
        x[place] = value[place]
        return x

    value = values[name]
    if cell.site == "resid_mid":  # at its own hook a bridge lets an edit miss the skip connection
        _, standing = raw.run_with_cache(run)
        value = value - standing[SITES["resid_pre"].hook_name(cell.layer)]
        name = SITES["attn_out"].hook_name(cell.layer)
    return raw.run_with_hooks(run, fwd_hooks=[(name, write)])[0, -1]


@pytest.mark.oracle
@pytest.mark.parametrize("name", OWN)
def test_sweeps_of_own_models_equal_a_loop_over_the_hooks_of_transformer_lens(name):
    model = own_model(name)
    clean, corrupted = (torch.tensor(tokens) for tokens in pairs([6]))
    for direction, base, other in (("denoise", corrupted, clean), ("noise", clean, corrupted)):
        sweep = hw.patch(
            model, clean, corrupted, sites=sites_of(model), metric=hw.logit_difference(4, 6), direction=direction,
            progress=False,
        )  # fmt: skip
        assert sweep.engine == "wavefront"
        with torch.no_grad():
            _, values = model.raw.run_with_cache(other)
            plain = model.raw(base)[0, -1]
            table = sweep.table.astype(object).where(sweep.table.notna(), None)
            if "kv_head" in table:
                table["head"] = table["head"].where(table["head"].notna(), table["kv_head"])
            slack = CLOSE * max(1.0, float(plain.abs().max()))
            for cell in table.groupby("site").sample(4).itertuples():
                found = by_hooks(model.raw, cell, values, base) - plain
                assert cell.effect == pytest.approx(float(found[4] - found[6]), abs=slack), cell
        assert sweep.table["effect"].abs().max() > 1e-3


@pytest.mark.parametrize("name", OWN)
def test_padded_batches_windows_and_several_metrics_of_own_models_equal_whole_runs(name):
    model = own_model(name)
    unpadded = model.is_bidirectional and not HAS_BRIDGE_ONLY
    clean, corrupted = pairs([5, 5] if unpadded else [6, 4])
    options = {
        "sites": ["resid_pre", "z", "v"],
        "metric": [hw.logit_difference([4, 5], 6), hw.kl_divergence(at=-2)],
        "window": "cumulative",
        "positions": {1, 2},
        "progress": False,
    }
    fast = hw.patch(model, clean, corrupted, **options)
    slow = by_whole_runs(hw.patch, model, clean, corrupted, **options)
    assert fast.engine == "wavefront"
    slack = CLOSE * max(1.0, slow.table["clean"].abs().max())
    for column in ("effect", "clean", "corrupted"):
        assert (fast.table[column] - slow.table[column]).abs().max() < slack


@pytest.mark.oracle
@pytest.mark.parametrize("name", OWN)
def test_knocking_out_edges_of_own_models_is_cutting_them_out_of_the_pattern_and_normalizing(name):
    model, (tokens, _) = own_model(name), pairs([6])
    sweep = hw.knockout(model, tokens, block=hw.Edges("all", {1, 3}), metric=hw.logit_difference(4, 6), progress=False)

    def cut(pattern, hook):
        pattern = pattern.clone()
        queries = torch.arange(6)
        for key in (1, 3):
            pattern[:, :, queries if model.is_bidirectional else queries[key:], key] = 0
        return pattern / pattern.sum(-1, keepdim=True)

    with torch.no_grad():
        plain = model.raw(torch.tensor(tokens))[0, -1]
        slack = CLOSE * max(1.0, float(plain.abs().max()))
        for cell in sweep.table.itertuples():
            hooks = [(SITES["pattern"].hook_name(cell.layer), cut)]
            found = model.raw.run_with_hooks(torch.tensor(tokens), fwd_hooks=hooks)[0, -1] - plain
            assert cell.effect == pytest.approx(float(found[4] - found[6]), abs=slack)


OTHERS = {
    "scaled": lambda out: 1.01 * out,
    "delayed": lambda out: torch.cat([out[:, :1], out[:, :-1]], 1),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", ["rotary", "looks ahead"])
def test_an_own_model_whose_attention_gives_something_else_is_noticed_and_served_by_whole_runs(name, other):
    raw, (clean, corrupted) = raw_model(name), pairs([5])
    attention = raw.blocks[1].attn
    attention = attention.original_component if HAS_BRIDGE_ONLY else attention
    kind = type(attention)

    def forward(module, *args, **options):
        given = kind.forward(module, *args, **options)
        return (OTHERS[other](given[0]), *given[1:]) if isinstance(given, tuple) else OTHERS[other](given)

    attention.__class__ = type("Other", (kind,), {"forward": forward})
    model = hw.load(raw)
    with pytest.warns(UserWarning, match="stepping through its blocks changes its logits"):
        sweep = hw.patch(model, clean, corrupted, sites="z", metric=hw.logit_difference(4, 6), progress=False)
    assert sweep.engine == "whole runs"
    with torch.no_grad():
        logits = raw(torch.tensor(clean))[0, -1]
    assert sweep.table["clean"][0] == pytest.approx(float(logits[4] - logits[6]), abs=CLOSE)


def test_sites_of_the_mlp_of_a_model_without_one_are_refused_in_one_line():
    model, (clean, corrupted) = own_model("attention alone"), pairs([5])
    for site in ("mlp_post", "mlp_out", "resid_mid"):
        with pytest.raises(InputError, match=f"{site} was requested, but .* attention alone"):
            hw.patch(model, clean, corrupted, sites=site, metric=hw.logit_difference(4, 6), progress=False)


def test_answers_are_tokens_of_the_vocabulary_that_a_model_answers_in():
    model, (clean, corrupted) = own_model("answers in other tokens"), pairs([5])
    assert model.n_logits == 7
    with pytest.raises(InputError, match="7"):
        hw.patch(model, clean, corrupted, sites="z", metric=hw.logit_difference(4, 9), progress=False)


@pytest.mark.parametrize("name", [name for name in OWN if name.startswith("looks ahead")])
def test_where_attention_looks_ahead_an_edit_is_felt_before_its_position(name):
    model, (clean, corrupted) = own_model(name), pairs([6])
    sweep = hw.patch(
        model, clean, corrupted, sites=["resid_pre", "z"], metric=hw.logit_difference(4, 6, at=0), positions=[5],
        progress=False,
    )  # fmt: skip
    assert sweep.table.query("layer == 0")["effect"].abs().max() > 1e-4


@pytest.mark.skipif(HAS_BRIDGE_ONLY, reason="a native model knows what is padding")
def test_a_hooked_transformer_that_looks_ahead_refuses_padding_which_it_would_read():
    with pytest.raises(InputError, match="one length"):
        own_model("looks ahead").run([[1, 2, 3], [1, 2]])


def test_the_edges_of_a_model_that_looks_ahead_are_refused_in_one_line():
    model, (clean, corrupted) = own_model("looks ahead"), pairs([6])
    with pytest.raises(hw.HeadwaterError, match="reads later tokens"):
        hw.edges(model, clean, corrupted, metric=hw.logit_difference(4, 6), progress=False)
