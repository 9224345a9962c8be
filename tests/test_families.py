"""A family of models is one row: what it says is what the models of that family are, also one added from outside."""

import functools
from itertools import pairwise

import pytest
import torch
import transformers as tf

import headwater as hw
from headwater.errors import InputError, ModelError
from headwater.heads.relations import Relation
from headwater.models.effective_embedding import KINDS
from headwater.models.families import FAMILIES, Family, Norms, shape_of
from headwater.models.weights import open_weights
from tests.random_models import random_model, small_config
from tests.tiny import CONFIGS, WORDS, tiny_tokenizer

LISTED = (
    "bloom", "cohere", "cohere2", "falcon", "falcon-2", "falcon-new-decoder",
    "falcon-rw", "flex_olmo", "gemma1", "gemma3-with-vision", "gpt-neo", "gpt-oss", "gptj", "granite",
    "granite-moe", "internlm3", "iquestcoder", "llava", "mixtral", "mpt", "olmo", "olmo2", "olmo3", "olmoe", "opt",
    "phi3", "qwen2-moe", "qwen3-moe", "smollm3", "stablelm", "stablelm-parallel",
)  # fmt: skip
"""Random models of the families whose folders other tests do not read."""
EXAONE_4 = Family(
    "Exaone4ForCausalLM", norms=Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
)
FROM_OUTSIDE = {"exaone4": ("exaone4", EXAONE_4), "starcoder2": ("starcoder2", Family("Starcoder2ForCausalLM"))}
SOME = ("bloom", "cohere", "falcon-rw", "gpt-oss", "granite", "phi3", "starcoder2")
"""Those that the quick tests go through; the others are slow."""
WHOLE_RUNS = ("bloom", "falcon-rw", "mpt")
"""Those whose blocks cannot be called one by one."""
WORDS_AS_RELATION = [Relation("next", "algorithmic", tuple((a, (b,)) for a, b in pairwise(WORDS)))]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """By random model: a folder that `save_pretrained` wrote."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            random_model(name).save_pretrained(made[name])
            tiny_tokenizer().save_pretrained(made[name])
        return made[name]

    return folder


@pytest.fixture
def folder(request, folder_of):
    """A folder of some family, whose row is there as long as the test lasts."""
    if request.param in LISTED:
        yield folder_of(request.param)
        return
    name, row = FROM_OUTSIDE[request.param]
    with FAMILIES.with_row(request.param, row):
        yield folder_of(name)


of_all = pytest.mark.parametrize("folder", [*LISTED, *FROM_OUTSIDE], indirect=True)
of_some = pytest.mark.parametrize(
    "folder",
    [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in (*LISTED, *FROM_OUTSIDE)],
    indirect=True,
)
loaded_from = functools.cache(hw.load)
ASKED = {"senders": "embed", "receivers": "logits"}
BY_EDGES = {
    "edges": lambda model, *pair, **options: hw.edges(model, *pair, **ASKED, **options),
    "path_patch": lambda model, *pair, **options: hw.path_patch(model, *pair, **ASKED, **options),
    "find_circuit": lambda model, *pair, **options: hw.find_circuit(model, *pair, threshold=0.1, **options),
    "run_circuits": lambda model, *pair, **options: hw.run_circuits(
        model, *pair, hw.Circuit.of(["embed -> logits"], model), **options
    ),
}


def test_every_row_is_that_of_a_model_that_is_read_in_these_tests():
    there = {random_model(name).config.get_text_config().model_type for name in LISTED}
    there |= {config(10).model_type for config in CONFIGS.values()}
    assert there | {"granitemoehybrid"} == set(FAMILIES)  # a folder with layers that have no attention is not read


@of_all
def test_what_is_read_from_a_folder_is_what_the_loaded_model_computes_with(folder):
    streamed, loaded = open_weights(folder), open_weights(loaded_from(folder))
    assert streamed.fingerprint == loaded.fingerprint
    assert streamed.shape == loaded.shape
    for layer in range(streamed.shape.n_layers):
        there = vars(loaded.layer(layer))
        for name, factor in vars(streamed.layer(layer)).items():
            torch.testing.assert_close(factor, there[name], msg=name)
    torch.testing.assert_close(streamed.unembedding(), loaded.unembedding())
    torch.testing.assert_close(streamed.final_norm_gain(), loaded.final_norm_gain())
    tokens = torch.randint(streamed.shape.d_vocab, (9,))
    for kind in KINDS:
        here, there = (weights.effective_embedding(tokens, kind) for weights in (streamed, loaded))
        torch.testing.assert_close(here, there, atol=1e-5, rtol=1e-4, msg=kind)


@of_some
def test_heads_classified_from_a_folder_are_those_of_the_loaded_model(folder):
    options = {"relations": WORDS_AS_RELATION, "k": 20, "progress": False}
    streamed, loaded = hw.classify_heads(folder, **options), hw.classify_heads(loaded_from(folder), **options)
    assert streamed.run.fingerprint == loaded.run.fingerprint
    columns = ["layer", "head", "relation", "score", "suppression"]
    assert streamed.table[columns].equals(loaded.table[columns])
    assert streamed.table["score"].nunique() > 1


@of_some
@pytest.mark.filterwarnings("ignore:.*swept with whole runs")
def test_a_model_of_the_family_is_patched_as_whole_runs_with_a_hook_are(folder, request):
    model = loaded_from(folder)
    clean, corrupted = [[5, 9, 13, 17]], [[5, 11, 13, 17]]
    options = {"sites": ("resid_pre", "mlp_out"), "metric": lambda logits: logits[:, -1, 3], "progress": False}
    sweep = hw.patch(model, clean, corrupted, **options)
    assert (sweep.engine == "wavefront") is (request.node.callspec.params["folder"] not in WHOLE_RUNS)
    table = sweep.table.set_index(["site", "layer", "position"])
    before = model.run(corrupted)[0, -1, 3]
    for site in options["sites"]:
        kept = []
        name = f"blocks.1.hook_{site}"
        model.run(clean, [(name, lambda activation, hook, kept=kept: kept.append(activation[0, 1]))])

        def write(activation, hook, kept=kept):
            activation[0, 1] = kept[0]
            return activation

        effect = model.run(corrupted, [(name, write)])[0, -1, 3] - before
        assert float(table.loc[(site, 1, 1), "effect"]) == pytest.approx(float(effect), abs=1e-4)


def test_a_family_added_from_outside_is_named_where_the_families_are_named():
    config = tf.BertConfig()
    with FAMILIES.with_row("starcoder2", FROM_OUTSIDE["starcoder2"][1]):
        with pytest.raises(ModelError, match=r"headwater reads gpt2, .*starcoder2"):
            shape_of(config)
        with pytest.raises(InputError, match="Did you mean 'starcoder2'"):
            _ = FAMILIES["starcoder"]
    with pytest.raises(ModelError, match=r"headwater reads gpt2, .*olmo2.*\."):
        shape_of(config)


def test_what_a_family_cannot_give_from_its_files_is_refused_with_the_reason(folder_of):
    row = Family("Starcoder2ForCausalLM", cannot={"mlp0": "its MLP is not where others have it."})
    with FAMILIES.with_row("starcoder2", row):
        weights = open_weights(folder_of("starcoder2"))
        assert weights.effective_embedding(torch.arange(3), "layer0").shape == (3, weights.shape.d_model)
        with pytest.raises(InputError, match=r"'mlp0' of .* cannot be read from its files: its MLP is not where"):
            weights.effective_embedding(torch.arange(3), "mlp0")


def test_clipped_values_are_refused_from_a_folder_as_from_memory(folder_of):
    with pytest.raises(ModelError, match=r"clips queries.*clip_qkv=0.3"):
        open_weights(folder_of("olmo-clipped")).ov(0)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_a_mixture_of_experts_without_one_of_its_experts_is_refused(name, folder_of, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = folder_of(name)
    tensors = load_file(folder / "model.safetensors")
    lost = next(key for key in tensors if ".layers.1." in key and ".experts.2." in key)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file({key: tensor for key, tensor in tensors.items() if key != lost}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"has no tensor '{lost.removeprefix('model.')}'"):
        open_weights(tmp_path)


@pytest.mark.parametrize("asked", BY_EDGES)
@pytest.mark.parametrize("folder", ["bloom", "falcon-rw", "mpt"], indirect=True)
def test_edges_of_a_model_with_alibi_are_refused_with_the_reason(folder, asked):
    options = {"metric": hw.logit_difference(5, 9), "progress": False}
    with pytest.raises(ModelError, match=r"The edges of .* cannot be computed, because .* \(ALiBi\)"):
        BY_EDGES[asked](loaded_from(folder), [[5, 9, 13, 17]], [[5, 11, 13, 17]], **options)


def test_sweeps_of_local_attention_equal_whole_runs_beyond_its_window():
    model = hw.load(random_model("gpt-neo"), tokenizer=tiny_tokenizer())
    clean, corrupted = [[*range(5, 19)]], [[5, 40, *range(7, 19)]]
    options = {"sites": "resid_pre", "metric": lambda logits: logits[:, -1, 3], "progress": False}
    sweep = hw.patch(model, clean, corrupted, **options).table.set_index(["layer", "position"])
    held = []
    model.run(clean, [("blocks.1.hook_resid_pre", lambda activation, hook: held.append(activation.clone()))])
    plain = options["metric"](model.run(corrupted))
    for position in (1, 4, 9, 13):

        def write(activation, hook, position=position):
            activation[0, position] = held[0][0, position]
            return activation

        effect = options["metric"](model.run(corrupted, [("blocks.1.hook_resid_pre", write)])) - plain
        assert float(sweep.loc[(1, position), "effect"]) == pytest.approx(float(effect), abs=1e-4)


@pytest.mark.oracle
def test_longrope_reads_texts_up_to_its_original_length_as_hugging_face_does():
    hf, row = random_model("phi3-longrope"), list(range(2, 30))
    model = hw.load(hf, tokenizer=tiny_tokenizer())
    before = model.fingerprint
    torch.testing.assert_close(model.run([row]), hf(torch.tensor([row])).logits, rtol=1e-4, atol=1e-5)
    assert model.fingerprint == before
    found = model.generate([row[:4]], max_new_tokens=6, progress=False).tokens
    assert found == [hf.generate(torch.tensor([row[:4]]), max_new_tokens=6, do_sample=False)[0, 4:].tolist()]
    with pytest.raises(InputError, match="has 33 tokens; the model reads at most 32"):
        model.run([[2] * 33])
    with pytest.raises(InputError, match="at most 32"):
        model.generate([row], max_new_tokens=9)
    earlier = tf.DynamicCache()
    model.run([row], past_key_values=earlier)
    with pytest.raises(InputError, match="has 33 tokens; the model reads at most 32"):
        model.run([row[:5]], past_key_values=earlier)


def test_longrope_is_refused_past_its_original_length_in_a_family_without_a_description_too():
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = small_config("arcee", rope_parameters=rotary | {"original_max_position_embeddings": 32})
    model = hw.load(tf.AutoModelForCausalLM.from_config(config))
    assert model.run([[2] * 32]).shape[1] == 32
    with pytest.raises(InputError, match="at most 32"):
        model.run([[2] * 33])
