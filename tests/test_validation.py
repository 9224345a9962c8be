"""Dynamic scores and ablation: against the running model written out, and on planted models."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr

import headwater as hw
from headwater.errors import InputError, ModelError
from headwater.heads.ablation import HeadAblation, ablate_heads
from headwater.heads.causal import layer_matched, whole, without
from headwater.heads.dynamic import DynamicScores, correlate, dynamic_scores, last_values
from headwater.heads.head_map import relations_of
from headwater.heads.relations import TaskPrompts, source_prompts, task_prompts
from tests import chance
from tests.planted_heads import implements, plant_relations, suppresses
from tests.planted_relations import TEMPLATES, random_words, relation
from tests.tiny import counted_runs, embedded, tiny_model

CAPITAL = relation("capital", "knowledge", 32)
PAST = relation("past", "linguistic", 30, accepted=2)
PLURAL = relation("plural", "linguistic", 30)
PLANTED = {(0, 1): [implements(PAST.pairs)], (1, 2): [implements(CAPITAL.pairs)], (2, 0): [suppresses(PLURAL.pairs)]}


@pytest.fixture(scope="module")
def planted():
    built = plant_relations(PLANTED, n_layers=3, n_kv_heads=2)
    model = hw.load(built.model, tokenizer=built.tokenizer)
    return model, hw.classify_heads(model, relations=[CAPITAL, PAST, PLURAL], embedding="raw", progress=False)


@pytest.fixture(scope="module", params=["gpt2", "llama", "gemma2", "neox"])
def random_model(request):
    shuffled, tokenizer = random_words()
    hf = tiny_model(request.param, d_vocab=len(tokenizer), seed=int(torch.randint(1000, ())))
    model = hw.load(hf, tokenizer=tokenizer)
    return model, hw.classify_heads(model, relations=[shuffled], rule="published", progress=False), shuffled


@pytest.mark.planted
def test_dynamic_scores_find_the_planted_heads_and_no_other(planted):
    model, head_map = planted
    scores = dynamic_scores(model, head_map, relations=[CAPITAL, PAST, PLURAL], templates=TEMPLATES, progress=False)
    table = scores.table
    for context in ("with_context", "without_context"):
        for suffix, expected in (
            ("", {(0, 1, "past"), (1, 2, "capital")}),
            ("_suppression", {(2, 0, "plural")}),
        ):
            high = table[table[context + suffix] > 0.15]
            assert set(zip(high["layer"], high["head"], high["relation"], strict=True)) == expected
            assert (high[context + suffix] == 1.0).all()
            assert len(high) == len(expected) * len(TEMPLATES)
    found = scores.correlations.set_index(["relation", "sign", "context"])["pearson"]
    assert found["capital", "score", "with"] == pytest.approx(1.0)
    assert found["plural", "suppression", "without"] == pytest.approx(1.0)
    assert np.isnan(found["plural", "score", "with"])


@pytest.mark.planted
def test_without_context_the_dynamic_score_is_the_static_one_where_the_layer_reads_what_the_static_score_reads(planted):
    model, head_map = planted
    scores = dynamic_scores(model, head_map, relations=[CAPITAL, PAST, PLURAL], templates=TEMPLATES, progress=False)
    np.testing.assert_allclose(scores.table["without_context"], scores.table["static"])
    np.testing.assert_allclose(scores.table["without_context_suppression"], scores.table["static_suppression"])


@pytest.mark.oracle
def test_dynamic_scores_equal_the_running_model_written_out(random_model):
    model, head_map, shuffled = random_model
    k, group = 3, model.shape.n_heads // model.shape.n_kv_heads
    head_map.relations["k"] = k
    scores = dynamic_scores(
        model, head_map, relations=[shuffled], templates=TEMPLATES[:1], batch_size=7, progress=False
    )
    raw, tokenizer = model.raw, model.tokenizer
    least, most = torch.zeros(2, 2, 2, model.shape.n_layers, model.shape.n_heads)
    for source, targets in shuffled.pairs:
        tokens = model.tokenize(TEMPLATES[0].format(source=source)).tokens
        place = int((tokens[0] == tokenizer.encode(f" {source}", add_special_tokens=False)[0]).nonzero())
        ids = [tokenizer.encode(f" {target}", add_special_tokens=False)[0] for target in targets]
        with torch.inference_mode():
            _, clean = raw.run_with_cache(tokens)
        for layer in range(model.shape.n_layers):
            pattern = clean["pattern", layer]
            forced = torch.zeros_like(pattern)
            forced[..., place] = 1.0
            v = clean["v", layer].repeat_interleave(group, dim=2)
            for context, weights in enumerate((pattern, forced)):
                z = torch.einsum("b h k, b k h d -> b h d", weights[:, :, -1], v)[0]
                for head in range(model.shape.n_heads):
                    logits = z[head] @ raw.blocks[layer].attn.W_O[head] @ raw.W_U
                    rounding = 1e-5 * logits.abs().max()
                    for sign, signed in enumerate((logits, -logits)):
                        beyond = torch.cat([signed[:, None] > signed[ids] + d for d in (-rounding, rounding)], 1).sum(0)
                        least[context, sign, layer, head] += bool((beyond[: len(ids)] - 1 < k).any())
                        most[context, sign, layer, head] += bool((beyond[len(ids) :] < k).any())
    assert (most - least).mean() < 0.1
    for context, name in enumerate(("with_context", "without_context")):
        for sign, suffix in enumerate(("", "_suppression")):
            found = torch.tensor(scores.table[name + suffix].to_numpy()).reshape(least.shape[2:])
            hits = (found * len(shuffled.pairs)).round()
            assert ((least[context, sign] <= hits) & (hits <= most[context, sign])).all()


@pytest.mark.oracle
def test_forcing_the_last_row_of_attention_onto_the_source_gives_its_value_vector(random_model):
    model, head_map, shuffled = random_model
    tokens, _ = relations_of(model, head_map, [shuffled])["random"]
    prompts = source_prompts(model, tokens, TEMPLATES)
    values = last_values(model, prompts, batch_size=9)
    last = prompts.batch.lengths - 1
    rows = torch.arange(len(last))
    for layer in range(model.shape.n_layers):
        kept = {}

        def force(pattern, hook):
            pattern = pattern.clone()
            pattern[rows, :, last] = 0.0
            pattern[rows, :, last, prompts.source] = 1.0
            return pattern

        def keep(z, hook, kept=kept):
            kept["z"] = z[rows, last]

        model.run(prompts.batch, [(f"blocks.{layer}.attn.hook_pattern", force), (f"blocks.{layer}.attn.hook_z", keep)])
        torch.testing.assert_close(kept["z"], values[1, layer], rtol=1e-4, atol=1e-5)


def test_correlations_are_scipys_and_the_interval_holds_the_estimate(random_model):
    model, head_map, shuffled = random_model
    scores = dynamic_scores(model, head_map, relations=[shuffled], templates=TEMPLATES, progress=False)
    generator = chance.rng()
    table = scores.table.assign(
        static=generator.random(len(scores.table)), with_context=generator.random(len(scores.table))
    )
    row = correlate(table).set_index(["sign", "context"]).loc[("score", "with")]
    expected = pearsonr(table["static"], table["with_context"])
    assert row["pearson"] == pytest.approx(expected.statistic)
    assert row["low"] < row["pearson"] < row["high"]
    heads = model.shape.n_layers * model.shape.n_heads
    fewer = table[table["template"] == TEMPLATES[0]]
    interval = pearsonr(fewer["static"], fewer["with_context"]).confidence_interval()
    single = correlate(fewer).set_index(["sign", "context"]).loc[("score", "with")]
    assert (single["low"], single["high"], single["heads"]) == (
        pytest.approx(interval.low), pytest.approx(interval.high), heads,
    )  # fmt: skip


@pytest.mark.oracle
def test_removing_heads_equals_a_hugging_face_forward_whose_output_projection_reads_zero_for_them():
    shuffled, tokenizer = random_words()
    hf = tiny_model("llama", d_vocab=len(tokenizer), seed=int(torch.randint(1000, ())))
    model = hw.load(hf, tokenizer=tokenizer)
    heads = [(0, 1), (2, 0), (2, 3)]
    d_head = model.shape.d_head

    def zero(module, args, chosen):
        z = args[0].clone()
        for head in chosen:
            z[:, -1, head * d_head : (head + 1) * d_head] = 0
        return (z,)

    handles = [
        hf.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(
            lambda module, args, layer=layer: zero(module, args, [h for at, h in heads if at == layer])
        )
        for layer in (0, 2)
    ]
    text = f"{shuffled.pairs[0][0]} -> {shuffled.pairs[0][1][0]}\n {shuffled.pairs[1][0]} ->"
    batch = model.tokenize([text, "The"])
    with torch.inference_mode():
        expected = [hf(model.tokenize(each).tokens).logits[0, -1] for each in (text, "The")]
    for handle in handles:
        handle.remove()
    best, foil = torch.stack(expected).max(-1).indices, torch.stack(expected).min(-1).indices
    task = TaskPrompts(batch, tuple((token,) for token in best.tolist()), foil)
    for answered, logits in [
        (whole(model, task), model.run(batch, keep="last")[:, 0]),
        (without(model, task, {"heads": heads})["none"], model.run(batch, keep="last")[:, 0]),
        (without(model, task, {"heads": heads})["heads"], torch.stack(expected)),
    ]:
        assert answered[0].tolist() == (logits.argmax(-1) == best).tolist()
        difference = logits[torch.arange(2), best] - logits[torch.arange(2), foil]
        np.testing.assert_allclose(answered[1], difference, rtol=1e-4, atol=1e-5)


@pytest.mark.planted
@pytest.mark.parametrize("method", ["zero", "mean"])
def test_removing_the_planted_head_ends_its_relation_and_nothing_else(planted, method):
    model, head_map = planted
    result = ablate_heads(
        model, head_map, "capital", relations=[CAPITAL, PAST, PLURAL], method=method,
        template=TEMPLATES[0], shots=0, draws=4, progress=False,
    )  # fmt: skip
    assert list(zip(result.heads["layer"], result.heads["head"], strict=True)) == [(1, 2)]
    accuracy = result.table.groupby(["task", "removed"])["accuracy"].agg(["min", "max"])
    assert tuple(accuracy.loc[("capital", "none")]) == (1.0, 1.0)
    assert accuracy.loc[("capital", "relation heads")].max() <= 1 / 30
    assert tuple(accuracy.loc[("capital", "random heads")]) == (1.0, 1.0)
    assert tuple(accuracy.loc[("past", "relation heads")]) == (1.0, 1.0)
    assert set(result.table["task"]) == {"capital", "past"}
    random = result.table[result.table["removed"] == "random heads"]
    assert random["draw"].tolist() == [0, 1, 2, 3]
    difference = result.table.set_index(["task", "removed"])["logit_difference"]
    assert difference["capital", "none"] == pytest.approx(1.0, abs=0.1)
    assert difference["capital", "relation heads"] == pytest.approx(0.0, abs=0.1)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:.*answers none of the:UserWarning")  # a random model may or may not
def test_removing_all_heads_by_their_mean_keeps_the_mean_of_what_they_write(random_model):
    model, head_map, shuffled = random_model
    options = {"relations": [shuffled], "template": TEMPLATES[0], "shots": 1, "top": 1, "draws": 1, "progress": False}
    result = ablate_heads(model, head_map, "random", method="mean", **options)
    layer, head = result.heads.loc[0, ["layer", "head"]].astype(int)
    tokens, _ = relations_of(model, head_map, [shuffled])["random"]
    task = task_prompts(model, tokens, TEMPLATES[0], 1, 0)
    last, rows, seen = task.batch.lengths - 1, torch.arange(len(task.batch)), {}
    name = f"blocks.{layer}.attn.hook_z"
    model.run(task.batch, [(name, lambda z, hook: seen.__setitem__("z", z[rows, last, head].clone()))])

    def put(z, hook):
        z = z.clone()
        z[rows, last, head] = seen["z"].mean(0)
        return z

    logits = model.run(task.batch, [(name, put)], keep="last")[:, 0]
    first = torch.tensor([accepted[0] for accepted in task.accepted])
    expected = (logits[rows, first] - logits[rows, task.foil]).mean()
    row = result.table[result.table["removed"] == "relation heads"].iloc[0]
    assert row["logit_difference"] == pytest.approx(float(expected), abs=1e-4)


def test_random_heads_come_from_the_same_layers_and_are_never_the_relations_own():
    rng = chance.rng()
    for _ in range(50):
        heads = [(int(layer), int(head)) for layer, head in {tuple(rng.integers(0, (6, 8))) for _ in range(12)}]
        drawn = layer_matched(heads, [layer for layer, _ in heads], 6, 8, rng)
        assert len(set(drawn)) == len(heads)
        assert not set(drawn) & set(heads)
        if max(sum(layer == at for layer, _ in heads) for at in range(6)) <= 4:
            assert [layer for layer, _ in drawn] == [layer for layer, _ in heads]
    full = [(2, head) for head in range(8)]
    assert {layer for layer, _ in layer_matched(full, [2] * 8, 6, 8, rng)} <= {1, 3}
    with pytest.raises(InputError, match="choose fewer heads"):
        layer_matched([(0, 0), (0, 1)], [0, 0], 1, 3, rng)


def test_a_prompt_that_the_model_does_not_answer_at_all_is_said():
    model, (whole,) = embedded(), [one for one in hw.load_relations() if one.name == "number_to_next"]
    few = [dataclasses.replace(whole, pairs=whole.pairs[:30])]
    numbers = hw.classify_heads(model, relations=few, progress=False)
    given = {"relations": few, "top": 1, "draws": 1, "controls": [], "progress": False}
    with pytest.warns(
        UserWarning, match=r"answers none of the \d+ items of 'number_to_next' correctly when asked 'Input"
    ):
        ablate_heads(model, numbers, "number_to_next", **given)


def test_the_same_seed_gives_the_same_table_and_results_survive_the_disk(planted, tmp_path):
    model, head_map = planted
    suite = [CAPITAL, PAST, PLURAL]
    options = {"relations": suite, "template": TEMPLATES[1], "shots": 1, "top": 3, "draws": 2, "progress": False}
    first = ablate_heads(model, head_map, "past", **options, seed=5)
    assert first.table.equals(ablate_heads(model, head_map, "past", **options, seed=5).table)
    again = HeadAblation.load(first.save(tmp_path / "ablation"))
    assert again.table.equals(first.table)
    assert again.heads.equals(first.heads)
    scores = dynamic_scores(model, head_map, relations=suite, templates=TEMPLATES, progress=False)
    assert DynamicScores.load(scores.save(tmp_path / "scores")).correlations.equals(scores.correlations)
    assert first.plot().get_title(loc="left") == "LlamaForCausalLM: heads removed,\npast (30 items)"
    assert len(scores.plot().get_yticklabels()) == 3
    assert set(first.summary()["removed"]) == {"none", "relation heads", "random heads"}


@pytest.mark.parametrize("call", ["dynamic scores", "ablation"])
def test_an_interrupted_call_goes_on_where_it_stopped(call, planted, monkeypatch, tmp_path):
    (model, head_map), runs = planted, counted_runs(monkeypatch)
    suite = {"relations": [CAPITAL, PAST, PLURAL], "progress": False}
    ablation = {"template": TEMPLATES[1], "shots": 1, "top": 3, "draws": 2}

    def made(out=None):
        runs["made"] = 0
        if call == "ablation":
            return ablate_heads(model, head_map, "past", **suite, **ablation, out=out)
        return dynamic_scores(model, head_map, **suite, templates=TEMPLATES, out=out)

    whole, total = made(), runs["made"]
    runs["at_most"] = total - 1
    with pytest.raises(KeyboardInterrupt, match="continues from what is saved there"):
        made(tmp_path)
    assert made(tmp_path).table.equals(whole.table)
    assert 0 < runs["made"] <= total / 2
    assert made(tmp_path).table.equals(whole.table)
    assert runs["made"] == 0


def test_what_does_not_fit_together_is_refused(planted):
    model, head_map = planted
    with pytest.raises(InputError, match="give the relations="):
        dynamic_scores(model, head_map, relations=[CAPITAL, PAST], progress=False)
    with pytest.raises(InputError, match="Did you mean 'capital'"):
        ablate_heads(model, head_map, "capitol", relations=[CAPITAL, PAST, PLURAL], progress=False)
    with pytest.raises(InputError, match="pass top="):
        ablate_heads(model, head_map, "plural", relations=[CAPITAL, PAST, PLURAL], progress=False)
    with pytest.raises(InputError, match="must hold"):
        dynamic_scores(model, head_map, relations=[CAPITAL, PAST, PLURAL], templates=["no place"], progress=False)
    with pytest.raises(InputError, match="No templates"):
        dynamic_scores(model, head_map, relations=[CAPITAL, PAST, PLURAL], templates=[], progress=False)
    templates = [*TEMPLATES, "x{source} and"]
    with pytest.raises(InputError, match=r"In no prompt of 'x\{source\} and' .* put a space before it"):
        dynamic_scores(model, head_map, relations=[CAPITAL, PAST, PLURAL], templates=templates, progress=False)
    for wrong, message in (({"top": 0}, "top=0"), ({"draws": 0}, "draws=0"), ({"shots": -1}, "shots=-1")):
        with pytest.raises(InputError, match=message):
            ablate_heads(model, head_map, "capital", relations=[CAPITAL, PAST, PLURAL], progress=False, **wrong)
    with pytest.raises(InputError, match="method"):
        ablate_heads(model, head_map, "capital", method="none", progress=False)
    other = plant_relations({(0, 0): [implements(CAPITAL.pairs)]})
    with pytest.raises(ModelError, match="is not the model of this head map"):
        dynamic_scores(hw.load(other.model, tokenizer=other.tokenizer), head_map, relations=[CAPITAL], progress=False)


def test_sentences_begin_with_bos_as_the_model_wants_it_or_as_is_asked_and_scores_depend_on_it():
    shuffled, tokenizer = random_words()
    model = hw.load(tiny_model("gpt2", d_vocab=len(tokenizer), seed=3), tokenizer=tokenizer)
    heads = hw.classify_heads(model, relations=[shuffled], rule="published", progress=False)
    tokens, _ = relations_of(model, heads, [shuffled])["random"]
    begun = {bos: source_prompts(model, tokens, TEMPLATES, bos=bos) for bos in (None, True, False)}
    assert torch.equal(begun[None].batch.tokens, begun[True].batch.tokens)
    assert (begun[True].batch.tokens[:, :1] == torch.tensor(model.bos)).all()
    assert torch.equal(begun[False].batch.tokens, begun[True].batch.tokens[:, 1:])
    assert torch.equal(begun[False].source, begun[True].source - 1)
    options = {"relations": [shuffled], "templates": TEMPLATES, "progress": False}
    scores = {bos: dynamic_scores(model, heads, bos=bos, **options) for bos in (None, True, False)}
    assert scores[None].table.equals(scores[True].table)
    assert not scores[False].table.equals(scores[True].table)
    assert scores[False].run.options["bos"] is False


def test_the_published_rules_items_are_those_its_running_scores_are_taken_on():
    """A word that is its own target counts in the publication and not under the controlled rule."""
    own = hw.Relation("past", "linguistic", (*PAST.pairs, (CAPITAL.pairs[0][0], (CAPITAL.pairs[0][0],))))
    built = plant_relations(PLANTED, n_layers=3, n_kv_heads=2)
    model = hw.load(built.model, tokenizer=built.tokenizer)
    for rule, items in (("published", 31), ("controlled", 30)):
        heads = hw.classify_heads(model, relations=[own], rule=rule, embedding="raw", progress=False)
        assert heads.relations["kept"].tolist() == [items]
        tokens, _ = relations_of(model, heads, [own])["past"]
        assert len(tokens.targets) == items
