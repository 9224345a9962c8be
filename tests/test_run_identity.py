"""`out=` returns the result of the same weights, tokenizer, functions and data, or refuses: never that of others."""

import copy
import dataclasses
import functools
import itertools
import json
import shutil
import threading

import numpy as np
import pytest
import torch
from xxhash import xxh3_128_digest

import headwater as hw
from headwater.errors import InputError, RunFolderError
from headwater.models import fingerprint
from headwater.models.edits import read_hook
from tests.tiny import tiny_folder, tiny_model, tiny_tokenizer

CLEAN, CORRUPTED = "A the cat is in Paris", "A the dog is in Paris"
QUIET = {"progress": False}
K = 5


def tiny(family: str = "llama", **options):
    return hw.load(tiny_model(family, **options), tokenizer=tiny_tokenizer())


def patched(model, metric, out=None, **options):
    options = {"sites": "resid_post", "layers": [1], "positions": "last"} | options
    return hw.patch(model, CLEAN, CORRUPTED, metric=metric, out=out, **options, **QUIET)


def made(source: str, **names):
    """Define `metric` as a notebook's cell would."""
    scope = {"torch": torch, "__name__": "__main__"} | names
    exec(compile(source, "<cell>", "exec"), scope)
    return scope["metric"]


EDITS = {
    "a constant": ("metric = lambda x: x[:, -1, 5]", "metric = lambda x: x[:, -1, 9] * 100"),
    "a redefined function": (
        "def metric(x): return x[:, -1, 5]",
        "def metric(x):\n    y = x[:, -1]\n    return y[:, 9]",
    ),
    "a default": ("def metric(x, k=5): return x[:, -1, k]", "def metric(x, k=9): return x[:, -1, k]"),
    "a keyword": ("def metric(x, *, k=5): return x[:, -1, k]", "def metric(x, *, k=9): return x[:, -1, k]"),
    "a closure": (
        "def of(k): return lambda x: x[:, -1, k]\nmetric = of(5)",
        "def of(k): return lambda x: x[:, -1, k]\nmetric = of(9)",
    ),
    "a global": ("K = 5\ndef metric(x): return x[:, -1, K]", "K = 9\ndef metric(x): return x[:, -1, K]"),
    "a function that it calls": (
        "def of(x): return x[:, -1, 5]\ndef metric(x): return of(x)",
        "def of(x): return x[:, -1, 9]\ndef metric(x): return of(x)",
    ),
    "a partial": (
        "from functools import partial\ndef of(k, x): return x[:, -1, k]\nmetric = partial(of, 5)",
        "from functools import partial\ndef of(k, x): return x[:, -1, k]\nmetric = partial(of, 9)",
    ),
    "a method": (
        "class M:\n def f(self, x): return x[:, -1, 5]\nmetric = M().f",
        "class M:\n def f(self, x): return x[:, -1, 9]\nmetric = M().f",
    ),
    "an object": (
        "class M:\n def __init__(self, k): self.k = k\n def __call__(self, x): return x[:, -1, self.k]\nmetric = M(5)",
        "class M:\n def __init__(self, k): self.k = k\n def __call__(self, x): return x[:, -1, self.k]\nmetric = M(9)",
    ),
    "a tensor": (
        "w = torch.arange(3.0)\ndef metric(x): return x[:, -1, :3] @ w",
        "w = torch.arange(3.0) + 1\ndef metric(x): return x[:, -1, :3] @ w",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_metric_never_gets_the_old_numbers(edit, tmp_path):
    model, (before, after) = tiny(), EDITS[edit]
    first = patched(model, made(before), tmp_path / "out")
    again = patched(model, made("\n\n" + before), tmp_path / "out")
    assert again.run.created == first.run.created
    assert again.table.equals(first.table)
    with pytest.raises(RunFolderError, match=r"holds another run \(option metrics: .*function differs by its code"):
        patched(model, made(after), tmp_path / "out")
    assert not np.allclose(patched(model, made(after)).table["effect"], first.table["effect"])


def test_a_metric_object_and_where_it_reads_are_part_of_the_run(tmp_path):
    model = tiny()
    patched(model, hw.Metric("n", lambda x: x[:, -1, 5]), tmp_path / "out")
    patched(model, hw.Metric("n", lambda x: x[:, -1, 5], at=lambda strings: -1), tmp_path / "out")
    for other in (
        hw.Metric("n", lambda x: x[:, -1, 9]),
        hw.Metric("n", lambda x: x[:, -1, 5], at=lambda strings: 1),
        hw.Metric("n", lambda x: x[:, -1, 5], site="resid_post"),
    ):
        with pytest.raises(RunFolderError, match="holds another run"):
            patched(model, other, tmp_path / "out")


def test_positions_and_answers_count_by_what_they_came_to(tmp_path):
    model = tiny()
    metric = hw.logit_difference(" Paris", " Rome")
    first = patched(model, metric, tmp_path / "out", positions=lambda strings: len(strings) - 1)
    ids = [tiny_tokenizer().encode(word, add_special_tokens=False)[0] for word in (" Paris", " Rome")]
    again = patched(model, hw.logit_difference(*ids), tmp_path / "out", positions=[-1])
    assert again.run.created == first.run.created
    with pytest.raises(RunFolderError, match="option positions"):
        patched(model, metric, tmp_path / "out", positions=lambda strings: 2)
    with pytest.raises(RunFolderError, match="option metrics"):
        patched(model, hw.logit_difference(" Paris", " Madrid"), tmp_path / "out")


SPELLINGS = (
    {"layers": 2, "positions": -1},
    {"layers": [2], "positions": "last"},
    {"layers": -1, "positions": {5 + 1}},
    {"layers": np.array([2]).tolist(), "positions": range(6, 7)},
    {"layers": (i for i in [2]), "positions": (6, 7)},
    {"layers": {2}, "positions": [6], "over": {"position", "layer"}},
    {"layers": range(2, 3), "positions": lambda strings: len(strings) - 1, "over": ("layer", "position")},
)


def test_options_that_mean_the_same_are_one_run(tmp_path):
    model, metric = tiny(), hw.logit_difference(" Paris", " Rome")
    assert len(model.tokenize(CLEAN).tokens[0]) == 7
    records = [patched(model, metric, **spelling).run for spelling in SPELLINGS]
    assert [records[0].differences(other) for other in records] == [[]] * len(records)
    heads = [patched(model, metric, sites="z", heads=h, positions="all").run for h in (None, range(4), [-1, 0, 1, 2])]
    assert [heads[0].differences(other) for other in heads] == [[]] * 3
    block = [((0, 2), "last"), (range(2), -1), ({0, 1}, [6])]
    cut = [
        hw.knockout(model, CLEAN, block=(last, first), metric=metric, layers=layers, **QUIET).run
        for (first, last), layers in zip(block, ([0, 1, 2], None, range(3)), strict=True)
    ]
    assert [cut[0].differences(other) for other in cut] == [[]] * 3


def test_a_function_without_identity_keeps_no_folder_unless_it_names_itself(tmp_path):
    model, lines = tiny(), (line for line in ["5"])

    def metric(x):
        return x[:, -1, 5] + (lines is None)

    assert len(patched(model, metric).table)
    with pytest.raises(InputError, match=r"option metrics: function .*metric: a generator.*identity = \"v1\""):
        patched(model, metric, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    metric.identity = "v1"
    first = patched(model, metric, tmp_path / "out")
    assert patched(model, metric, tmp_path / "out").run.created == first.run.created
    metric.identity = "v2"
    with pytest.raises(RunFolderError, match="holds another run"):
        patched(model, metric, tmp_path / "out")


def test_a_lens_and_a_judge_of_ones_own_are_part_of_the_run(tmp_path):
    model = hw.load()
    texts = ["The cat is in Paris."]
    hw.token_statistics(model, texts, lens=lambda h, layer: 2 * h, out=tmp_path / "lens", **QUIET)
    with pytest.raises(RunFolderError, match="option lens"):
        hw.token_statistics(model, texts, lens=lambda h, layer: 3 * h, out=tmp_path / "lens", **QUIET)
    graph = hw.load_depth_graph()
    graph = dataclasses.replace(graph, table=graph.table.head(6).reset_index(drop=True))
    options = {"controls": False, "out": tmp_path / "judge", **QUIET}
    hw.memorization(model, graph, judge=lambda question, accepted, answer: 3, **options)
    with pytest.raises(RunFolderError, match="option judge"):
        hw.memorization(model, graph, judge=lambda question, accepted, answer: 4, **options)


def test_words_swapped_in_the_tokenizer_are_another_run(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    tiny_folder(first, "llama")
    shutil.copytree(first, second)
    file = second / "tokenizer.json"
    content = json.loads(file.read_text())
    places = {piece: n for n, (piece, _) in enumerate(content["model"]["vocab"])}
    a, b = places["ĠParis"], places["ĠRome"]
    vocabulary = content["model"]["vocab"]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    file.write_text(json.dumps(content))
    one, other = hw.load(first), hw.load(second)
    assert one.fingerprint == other.fingerprint
    hw.token_statistics(one, CLEAN, out=tmp_path / "out", **QUIET)
    with pytest.raises(RunFolderError, match=r"holds another run \(tokenizer: "):
        hw.token_statistics(other, CLEAN, out=tmp_path / "out", **QUIET)
    words = [hw.heads.relations.Relation(f"r{i}", "knowledge", tuple(PAIRS)) for i in range(1)]
    for model, another in ((one, other), (first, second)):
        out = tmp_path / ("heads" if model is one else "streamed")
        hw.classify_heads(model, relations=words, embedding="raw", out=out, **QUIET)
        with pytest.raises(RunFolderError, match=r"holds another run \(tokenizer: "):
            hw.classify_heads(another, relations=words, embedding="raw", out=out, **QUIET)


WORDS = [" Paris", " Rome", " Madrid", " Berlin", " France", " Italy", " Spain", " Germany", " cat", " dog"]
PAIRS = [(a.strip(), (b.strip(),)) for a in WORDS for b in WORDS if a != b][:40]


def test_how_texts_begin_is_part_of_the_run_also_if_each_model_has_its_own_default(tmp_path):
    texts, out = tmp_path / "texts.txt", tmp_path / "out"
    texts.write_text(f"{CLEAN}\n{CORRUPTED}\n")
    tokenizer = tiny_tokenizer(bos=False)
    model = hw.load(tiny_model("gpt2"), tokenizer=tokenizer)
    model.raw.cfg.default_prepend_bos = False
    other = hw.load(model.raw, tokenizer=tokenizer)
    assert (model.bos, other.bos) == ((0,), ())
    hw.score_file(model, texts, out=out, **QUIET)
    with pytest.raises(RunFolderError, match=r"holds another run \(bos: "):
        hw.score_file(other, texts, out=out, **QUIET)
    assert model.fingerprint == other.fingerprint
    assert model.tokenizer_digest == other.tokenizer_digest
    assert model.digest() != other.digest()
    run = hw.token_statistics(model, CLEAN, **QUIET).run
    assert run.mismatch(model) is None
    assert run.mismatch(other) == "another beginning of texts"


def replaced(model):
    model.raw.blocks[1].ln1.weight = torch.nn.Parameter(model.raw.blocks[1].ln1.weight * 2)


def replaced_module(model):
    mlp = model.raw.blocks[1].mlp.original_component
    mlp.down_proj = copy.deepcopy(mlp.down_proj)
    next(mlp.down_proj.parameters()).mul_(2)


def other_memory(weight):
    weight.data = weight.data * 2


def without_version(model):
    with torch.inference_mode():
        model.raw.blocks[1].ln1.weight.data = model.raw.blocks[1].ln1.weight * 2


def swapped(row):
    row[1:3] = row[1:3].flip(0)


WEIGHT_EDITS = {
    "in place": lambda hf, model: hf.model.layers[1].mlp.up_proj.weight.mul_(1.7),
    "through .data": lambda hf, model: hf.model.layers[1].mlp.up_proj.weight.data.mul_(1.7),
    "two entries swapped": lambda hf, model: swapped(hf.model.embed_tokens.weight.data[7]),
    "one row through .data": lambda hf, model: hf.model.embed_tokens.weight.data[7].copy_(torch.ones(32)),
    "load_state_dict": lambda hf, model: hf.load_state_dict(tiny_model("llama", seed=1).state_dict()),
    "a replaced parameter": lambda hf, model: replaced(model),
    "a replaced module": lambda hf, model: replaced_module(model),
    "other memory": lambda hf, model: other_memory(model.raw.blocks[1].ln1.weight),
    "in inference mode": lambda hf, model: without_version(model),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("hashed", [fingerprint.HASHED, frozenset()], ids=["on the host", "as on a card"])
@pytest.mark.parametrize("edit", WEIGHT_EDITS)
def test_weights_edited_after_loading_are_other_weights(edit, hashed, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "HASHED", hashed)
    hf = tiny_model("llama")
    model = hw.load(hf, tokenizer=tiny_tokenizer())
    before = model.fingerprint
    hw.token_statistics(model, CLEAN, out=tmp_path, **QUIET)
    with torch.no_grad():
        WEIGHT_EDITS[edit](hf, model)
    assert model.fingerprint != before
    with pytest.raises(RunFolderError, match=r"holds another run \(fingerprint"):
        hw.token_statistics(model, CLEAN, out=tmp_path, **QUIET)


def test_an_edit_taken_back_is_the_model_it_was():
    model = tiny()
    before, weight = model.fingerprint, model.raw.blocks[1].ln1.weight
    kept = weight.clone()
    with torch.no_grad():
        weight.mul_(3)
        assert model.fingerprint != before
        weight.copy_(kept)
    assert model.fingerprint == before


def test_a_buffer_or_a_config_changed_after_loading_is_another_model():
    model = tiny()
    before = model.fingerprint
    buffer = next(b for name, b in model.raw.named_buffers() if name.endswith("inv_freq"))
    kept = buffer.clone()
    buffer.mul_(0.5)
    assert model.fingerprint != before
    buffer.copy_(kept)
    assert model.fingerprint == before
    model.raw.original_model.config.rope_parameters = {"rope_type": "default", "rope_theta": 5.0}
    assert model.fingerprint != before


def test_parameters_that_only_this_model_has_count():
    hf = tiny_model("llama")
    before = hw.load(hf).fingerprint
    hf.model.layers[0].mlp.up_proj.register_parameter("lora_A", torch.nn.Parameter(torch.ones(2, 3)))
    with_adapter = hw.load(hf).fingerprint
    with torch.no_grad():
        hf.model.layers[0].mlp.up_proj.lora_A.add_(1)
    assert len({before, with_adapter, hw.load(hf).fingerprint}) == 3


@pytest.mark.parametrize("hashed", [fingerprint.HASHED, frozenset()], ids=["on the host", "as on a card"])
@pytest.mark.parametrize("layout", ["whole", "transposed", "with gaps"])
def test_a_checksum_tells_one_changed_number_and_two_rows_in_another_order(hashed, layout, monkeypatch):
    monkeypatch.setattr(fingerprint, "HASHED", hashed)
    held = torch.randn(700, 600)
    made = {"whole": held, "transposed": held.T, "with gaps": held[:, :500]}[layout]
    seen = [fingerprint._checksums([("w", made)])]
    held.data[313, 7] += 1e-6
    seen.append(fingerprint._checksums([("w", made)]))
    held.data[[3, 4]] = held.data[[4, 3]]
    seen.append(fingerprint._checksums([("w", made)]))
    assert all(one != other for one, other in itertools.combinations(seen, 2))
    assert fingerprint._checksums([("w", made)]) == seen[-1]


@pytest.mark.parametrize("hashed", [fingerprint.HASHED, frozenset()], ids=["on the host", "as on a card"])
def test_memory_that_tensors_share_is_read_once_and_every_change_in_it_is_seen(hashed, monkeypatch):
    monkeypatch.setattr(fingerprint, "HASHED", hashed)
    held = torch.randn(700, 600)
    q, v, tied = held[:, :20], held[:, 40:].T, held[:350]
    for named in ([("q", q), ("v", v), ("qkv", held), ("tied", tied)], [("q", q), ("tied", tied)]):
        read = []
        monkeypatch.setattr(
            fingerprint,
            "xxh3_128_digest",
            lambda memory, read=read: read.append(memory.nbytes) or xxh3_128_digest(memory),
        )
        seen = fingerprint._checksums(named)
        assert read == ([held.nbytes] if hashed else [])
        q.data[699, 19] += 1e-6
        assert fingerprint._checksums(named) != seen


def test_one_row_of_a_large_embedding_changes_the_fingerprint():
    hf = tiny_model("llama", d_vocab=140_000)
    assert hf.model.embed_tokens.weight.numel() > 2**22
    model = hw.load(hf)
    before = model.fingerprint
    with torch.no_grad():
        hf.model.embed_tokens.weight[70_001] += 100
    after = model.fingerprint
    hf.model.embed_tokens.weight.data[70_001, 3] += 1e-3
    assert len({before, after, model.fingerprint}) == 3
    model.raw.to(torch.float64)
    wide = model.fingerprint
    next(p for p in model.raw.parameters() if p.ndim == 2).data[5, 5] += 1e-12
    assert model.fingerprint != wide == hw.load(hf, dtype=torch.float64).fingerprint


def test_answers_of_another_tokenizer_or_other_weights_are_refused():
    model = hw.load()
    answered = hw.answer(model, hw.load_questions("natural", sample=20), **QUIET)
    model.tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(InputError, match=r"answered by embedded \(another tokenizer than embedded's\)"):
        hw.trace_pathways(model, answered, **QUIET)


def test_hooks_around_an_analysis_are_part_of_the_run(tmp_path):
    model, site = tiny(), "blocks.1.hook_resid_mid"

    def table(*hooks, out=tmp_path):
        with model.hooks(hooks):
            return hw.token_statistics(model, CLEAN, out=out, **QUIET).table

    halved = (site, lambda a, hook: a / 2)
    plain, edited = table(out=tmp_path / "plain"), table(halved)
    assert edited.equals(table((site, lambda a, hook: a / 2)))
    assert not edited.equals(plain)
    for others in ((), ((site, lambda a, hook: a / 3),), (halved, halved), (("blocks.0.hook_resid_mid", halved[1]),)):
        with pytest.raises(RunFolderError, match="hooks of the model"):
            table(*others)
    watched = (site, read_hook(lambda a, hook: None))
    assert table(watched, out=tmp_path / "plain").equals(plain)


def doubled(*given):
    return given[-1] * 2


def undone(holder, name, value):
    """Set an attribute, and return what sets it back."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    return lambda: setattr(holder, name, before)


def patched_method(mlp):
    usual = mlp.forward
    return undone(mlp, "forward", lambda *given, **options: usual(*given, **options) * 2)


def raw_hook(model, method):
    getattr(model.raw, method)("blocks.1.hook_resid_post", lambda a, hook: a * 2)
    return lambda: model.raw.reset_hooks(including_permanent=True)


def patched_class(mlp):
    usual = type(mlp).forward
    return undone(type(mlp), "forward", lambda self, *given: usual(self, *given) * 2)


UNNAMED = {
    "add_hook": (lambda model, mlp: raw_hook(model, "add_hook"), "a forward hook on blocks.1.hook_out"),
    "add_perma_hook": (lambda model, mlp: raw_hook(model, "add_perma_hook"), "a forward hook on blocks.1.hook_out"),
    "a hook on a module": (
        lambda model, mlp: mlp.register_forward_hook(doubled).remove,
        "a forward hook on blocks.1.mlp",
    ),
    "a hook before a module": (
        lambda model, mlp: mlp.register_forward_pre_hook(lambda module, given: (given[0] * 2,)).remove,
        "a forward pre-hook on blocks.1.mlp",
    ),
    "a hook on the way back": (
        lambda model, mlp: mlp.register_full_backward_hook(lambda module, into, out: None).remove,
        "a backward hook on blocks.1.mlp",
    ),
    "a hook on the whole model": (
        lambda model, mlp: model.raw.original_model.model.register_forward_hook(lambda *given: None).remove,
        "a forward hook on original_model.model",
    ),
    "a hook on everything": (
        lambda model, mlp: torch.nn.modules.module.register_module_forward_hook(lambda *given: None).remove,
        "a forward hook on all modules of torch",
    ),
    "a forward of one's own": (lambda model, mlp: patched_method(mlp), "a forward of blocks.1.mlp"),
    "a forward of a library's": (
        lambda model, mlp: undone(mlp.act_fn, "forward", torch.relu),
        "a forward of blocks.1.mlp.act_fn",
    ),
    "a forward of the class": (lambda model, mlp: patched_class(mlp), "a forward of the class LlamaMLP"),
    "a module of one's own": (
        lambda model, mlp: undone(mlp, "act_fn", Own()),
        "blocks.1.mlp.act_fn is a Own",
    ),
}


class Own(torch.nn.Module):
    def forward(self, x):
        return x * 2


@pytest.mark.parametrize("kind", UNNAMED)
def test_what_is_put_into_the_model_past_its_hooks_keeps_no_folder(kind, tmp_path):
    model, (put, said) = tiny(), UNNAMED[kind]
    mlp = model.raw.blocks[1].mlp.original_component
    first = hw.token_statistics(model, CLEAN, out=tmp_path, **QUIET)
    take_away = put(model, mlp)
    try:
        with pytest.raises(
            InputError, match=rf"{said}, attached to the model without model.hooks. Use `with model.hooks"
        ):
            hw.token_statistics(model, CLEAN, out=tmp_path, **QUIET)
        without_folder = hw.token_statistics(model, CLEAN, **QUIET)
    finally:
        take_away()
    assert said in without_folder.run.unknown
    again = hw.token_statistics(model, CLEAN, out=tmp_path, **QUIET)
    assert again.run.created == first.run.created


VALUES = {
    "the eps of a norm": (
        lambda model: undone(model.raw.blocks[1].ln1.original_component, "variance_epsilon", 0.5),
        "variance_epsilon = 0.5",
    ),
    "the scale of attention": (
        lambda model: undone(model.raw.blocks[1].attn.original_component, "scaling", 2.0),
        "scaling = 2.0",
    ),
    "training": (lambda model: (model.raw.blocks[1].train(), model.raw.eval)[1], "training = True"),
    "another activation": (
        lambda model: undone(model.raw.blocks[1].mlp.original_component, "act_fn", torch.nn.ReLU()),
        "act_fn is a ReLU",
    ),
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_changed_in_a_module_is_another_run(kind, tmp_path):
    model, (put, said) = tiny(), VALUES[kind]
    hw.token_statistics(model, CLEAN, out=tmp_path / "before", **QUIET)
    take_away = put(model)
    with pytest.raises(RunFolderError, match=rf"option past model.hooks: None there, .*{said}"):
        hw.token_statistics(model, CLEAN, out=tmp_path / "before", **QUIET)
    changed = hw.token_statistics(model, CLEAN, out=tmp_path / "after", **QUIET)
    assert hw.token_statistics(model, CLEAN, out=tmp_path / "after", **QUIET).run.created == changed.run.created
    take_away()
    hw.token_statistics(model, CLEAN, out=tmp_path / "before", **QUIET)
    with pytest.raises(RunFolderError, match=r"option past model\.hooks"):
        hw.token_statistics(model, CLEAN, out=tmp_path / "after", **QUIET)


def test_nothing_is_found_in_a_model_that_was_only_used(family):
    model = tiny(family)
    assert model.interventions == {}
    model.cache([CLEAN, "A the"], **QUIET)
    found = model.as_loaded()
    patched(model, lambda x: x[:, -1, 5])  # attention keeps the pattern of the last run
    assert model.as_loaded() is found is not None
    hw.patch(model, CLEAN, CORRUPTED, metric=lambda x: x[:, -1, 5], sites="resid_post", method="attribution", **QUIET)
    model.raw.run_with_cache(model.tokenize(CLEAN).tokens)
    model.raw.original_model(model.tokenize(CLEAN).tokens, output_attentions=True, output_hidden_states=True)
    model.raw.reset_hooks()
    assert model.interventions == {}
    edit = ("blocks.1.hook_resid_post", lambda a, hook: a * 2)
    with model.hooks([edit, ("blocks.1.attn.hook_q", doubled_at)]), model.hooks([edit]):
        assert list(model.interventions) == ["hooks of the model"]
        assert len(model.interventions["hooks of the model"]) == 3
    assert model.interventions == {}


def doubled_at(activation, hook):
    return activation * 2


def test_a_model_that_was_asked_for_its_attentions_by_transformers_is_as_it_was_loaded():
    hf = tiny_model("gpt2")
    model = hw.load(hf)
    hf(torch.tensor([[1, 2]]), output_attentions=True, output_hidden_states=True)
    assert any(module._forward_hooks for module in hf.modules())
    assert model.as_loaded() is not None
    assert not model.interventions


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_hooks_that_stood_there_before_loading_count_unless_they_are_of_a_library():
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
    from peft import LoraConfig, get_peft_model

    hf = tiny_model("llama")
    model = hw.load(hf)
    add_hook_to_module(hf.model.layers[1].mlp, ModelHook())
    add_hook_to_module(model.raw.blocks[1].mlp.original_component, ModelHook())
    assert hw.load(hf).interventions == model.interventions == {}
    remove_hook_from_module(model.raw.blocks[1].mlp.original_component)
    assert model.interventions == {}
    merged = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"])).merge_and_unload()
    assert hw.load(merged).interventions == {}
    hf.model.layers[1].mlp.register_forward_hook(functools.partial(doubled))
    assert "a forward hook on blocks.1.mlp" in str(hw.load(hf).interventions)


def test_a_record_waits_for_what_another_thread_does_to_the_model():
    model, seen = tiny("neox"), []

    def edit(activation, hook):
        other = threading.Thread(target=lambda: seen.append(model.interventions))
        other.start()
        other.join(timeout=0.5)
        assert seen == []
        threads.append(other)
        return activation * 2

    threads = list[threading.Thread]()
    model.run(CLEAN, [("blocks.1.hook_mlp_out", edit)])
    threads[0].join()
    assert seen == [{}]
