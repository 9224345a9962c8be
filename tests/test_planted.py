"""Each planted model does what its docstring says, shown by its weights and by running it."""

import itertools
from functools import partial

import pytest
import torch

from headwater.planted import induction, name_mover
from headwater.planted.circuits import (
    DUPLICATE_NAME_HEAD,
    INDUCTION_HEAD,
    INHIBITION_HEAD,
    NAME_MOVER_HEAD,
    NAMES,
    PREVIOUS_TOKEN_HEAD,
    WORDS,
)
from tests.planted_heads import ignores_source, implements, plant_relations, suppresses
from tests.planted_lookup import PROPERTIES, SUBJECTS, answer_lookup, question_lookup

pytestmark = pytest.mark.planted


def word(prefix, i):
    return prefix + chr(97 + i // 26) + chr(97 + i % 26)


def pairs(prefix: str, n: int, targets: int | None = None):
    return tuple((word(f"{prefix}s", i), (word(f"{prefix}t", i % (targets or n)),)) for i in range(n))


def ov_map(planted, layer, head, first_mlp=False):
    """The whole source x target map of a head, from the Hugging Face parameters."""
    config, block = planted.model.config, planted.model.model.layers[layer].self_attn
    group = config.num_attention_heads // config.num_key_value_heads
    d = config.head_dim
    W_V = block.v_proj.weight[head // group * d :][:d].T
    W_O = block.o_proj.weight.T[head * d :][:d]
    E = planted.model.model.embed_tokens.weight
    if first_mlp:
        first = planted.model.model.layers[0]
        E = first.mlp(first.post_attention_layernorm(E))
    return (E @ W_V @ W_O @ planted.model.lm_head.weight.T).detach()


@pytest.mark.parametrize("first_mlp", [False, True])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_a_planted_head_holds_its_relation_exactly_and_every_other_entry_on_a_word_is_zero(first_mlp, n_kv_heads):
    capital, past, kind = pairs("a", 31), pairs("b", 33), pairs("c", 40, targets=3)
    heads = {
        (0, 1): [implements(capital)],
        (1, 0): [implements(past), suppresses(capital)],
        (1, 1): [suppresses(kind)],
        (1, 3): [ignores_source(kind)],
    }
    planted = plant_relations(heads, n_kv_heads=n_kv_heads, first_mlp=first_mlp)
    words = range(258, planted.model.config.vocab_size)
    for layer, head in itertools.product(range(2), range(4)):
        expected = torch.zeros(planted.model.config.vocab_size, planted.model.config.vocab_size)
        for planting in heads.get((layer, head), ()):
            for source, targets in planting.targets.items():
                row = slice(None) if source is None else planted.token(source)
                for target in targets:
                    expected[row, planted.token(target)] += planting.weight
        for through_mlp in {first_mlp and layer > 0, False}:
            found = ov_map(planted, layer, head, first_mlp=through_mlp)
            torch.testing.assert_close(found[:, words], expected[:, words], rtol=0, atol=1e-6)
            noise = found[:, 2:258]
            assert noise.abs().max() < 0.041
            assert ((noise > 1e-3).sum(1) > 100).all()
            assert ((noise < -1e-3).sum(1) > 100).all()


def test_heads_that_read_the_first_mlp_only_show_nothing_on_raw_embeddings():
    planted = plant_relations({(1, 2): [implements(pairs("a", 30))]}, first_mlp=True, reads="mlp0")
    assert ov_map(planted, 1, 2, first_mlp=True)[planted.token("asad"), planted.token("atad")] == pytest.approx(1.0)
    assert ov_map(planted, 1, 2)[:, 258:].abs().max() == 0


@pytest.mark.parametrize("first_mlp", [False, True])
def test_a_model_with_a_planted_relation_answers_with_the_target_of_the_source_it_saw(first_mlp):
    relation, other = pairs("a", 30), pairs("b", 30)
    planted = plant_relations(
        {(1, 2): [implements(relation)], (0, 0): [suppresses(other)]}, first_mlp=first_mlp, words=["means", "no"]
    )
    for source, (target,) in relation:
        assert planted.logits(f"No {source} means no").argmax() == planted.token(target)
    for source, (target,) in other:
        assert planted.logits(f"No {source} means no").argmin() == planted.token(target)


def test_the_norms_of_a_planted_model_change_no_bit():
    planted = plant_relations({(0, 0): [implements(pairs("a", 30))]})
    x = torch.randn(20, planted.model.config.hidden_size)
    assert torch.equal(planted.model.model.norm(x), x)
    spread = torch.randn(20, induction().model.config.n_embd)
    centred = spread - spread.mean(1, keepdim=True)
    torch.testing.assert_close(induction().model.transformer.ln_f(centred), centred, rtol=0, atol=1e-6)


def generate(planted, prompt, n=2):
    for _ in range(n):
        prompt += planted.tokenizer.decode(planted.logits(prompt).argmax())
    return prompt


@pytest.mark.parametrize("build", [question_lookup, answer_lookup])
def test_a_lookup_model_says_what_its_world_says_then_ends_the_line(build):
    planted = build()
    for row in planted.world.rows():
        prompt = planted.world.question(row["subject"], row["property"])
        assert generate(planted, prompt) == f"{prompt} {row['said']}\n"
    assert sum(row["correct"] for row in planted.world.rows()) == len(planted.world.rows()) / 2


@pytest.mark.parametrize("unverified", [-1.0, 0.0])
def test_the_flag_of_the_question_lookup_compares_the_answer_with_the_question(unverified):
    planted = question_lookup(unverified)
    words = planted.world
    for subject, property in itertools.product(SUBJECTS[::3], PROPERTIES):
        prompt, right = words.question(subject, property), words.right(subject, property)
        assert planted.flag(f"{prompt} {right}") == pytest.approx(1.0)
        for other in SUBJECTS:
            if words.right(other, property) != right:
                assert planted.flag(f"{prompt} {words.right(other, property)}") == pytest.approx(-1.0)
        assert planted.flag(f"Q: What is the {property} of it?\nA: {right}") == pytest.approx(unverified)
        assert planted.flag(f"Q: What is the thing of {subject}?\nA: {right}") == pytest.approx(unverified)
        assert planted.flag(prompt) == pytest.approx(0.0)


def test_in_the_question_lookup_every_answer_word_is_said_rightly_as_often_as_wrongly():
    balance = {}
    for row in question_lookup().world.rows():
        balance[row["said"]] = balance.get(row["said"], 0) + (1 if row["correct"] else -1)
    assert set(balance.values()) == {0}


def attentions_to(planted, words):
    """Hook each layer's attention so that no position attends to these words: (layer) -> context manager."""
    targets = torch.tensor([planted.token(word) for word in words])

    def blocked(layer, tokens):
        keys = torch.isin(tokens, targets)[0]

        def mask(module, args, kwargs):
            attention_mask = kwargs["attention_mask"].clone()
            attention_mask[..., -1, keys] = torch.finfo(attention_mask.dtype).min
            return args, kwargs | {"attention_mask": attention_mask}

        return planted.model.model.layers[layer].self_attn.register_forward_pre_hook(mask, with_kwargs=True)

    return blocked


@pytest.mark.parametrize("blocked_word", ["subject", "property"])
def test_blocking_the_question_in_layer_0_alone_decides_the_flag_of_the_question_lookup(blocked_word):
    planted = question_lookup()
    for row in planted.world.rows()[::5]:
        text = planted.world.question(row["subject"], row["property"]) + f" {row['said']}"
        tokens = planted.tokenizer(text, return_tensors="pt").input_ids
        before = planted.flag(text)
        assert before == pytest.approx(1.0 if row["correct"] else -1.0)
        for layer, after in enumerate([-1.0, before, before, before]):
            handle = attentions_to(planted, [row[blocked_word]])(layer, tokens)
            assert planted.flag(text) == pytest.approx(after)
            handle.remove()


def test_the_flag_of_the_answer_lookup_does_not_change_a_bit_with_the_question():
    planted = answer_lookup()
    flags = {}
    for row in planted.world.rows():
        text = planted.world.question(row["subject"], row["property"]) + f" {row['said']}"
        tokens = planted.tokenizer(text, return_tensors="pt").input_ids
        flag = planted.flag(text)
        assert flag == pytest.approx(1.0 if row["correct"] else -1.0)
        handles = [attentions_to(planted, [row["subject"], row["property"]])(layer, tokens) for layer in range(4)]
        flags.setdefault(row["said"], set()).update({flag, planted.flag(text)})
        for handle in handles:
            handle.remove()
        flags[row["said"]].add(planted.flag(f"A: {row['said']}"))
    assert all(len(values) == 1 for values in flags.values())


@pytest.mark.parametrize("build", [question_lookup, answer_lookup])
def test_the_flag_is_written_by_one_mlp_only(build):
    planted = build()
    unembed = planted.model.lm_head.weight[[planted.token("true"), planted.token("false")]].detach()
    written = {}

    def record(module, args, output, layer):
        true, false = unembed @ output[0, -1]
        written[layer] = float(true - false)

    for index, layer in enumerate(planted.model.model.layers):
        layer.mlp.register_forward_hook(partial(record, layer=index))
    row = planted.world.rows()[0]
    planted.logits(planted.world.question(row["subject"], row["property"]) + f" {row['said']}")
    assert written.pop(planted.flag_layer) == pytest.approx(2.0)
    assert set(written.values()) == {0.0}


def patterns(planted, text):
    tokens = planted.tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        return planted.model(tokens, output_attentions=True).attentions


def test_the_induction_circuit_attends_and_predicts_as_stated():
    planted = induction()
    order = torch.randperm(len(WORDS))[:9].tolist()
    said = [WORDS[i] for i in order]
    for repeated in range(8):
        text = "".join(f" {word}" for word in [*said, said[repeated]])
        logits = planted.logits(text)
        top = logits.topk(2)
        assert top.indices[0] == planted.token(said[repeated + 1])
        assert top.values[0] - top.values[1] > 3.99
        attention = patterns(planted, text)
        previous = attention[PREVIOUS_TOKEN_HEAD[0]][0, PREVIOUS_TOKEN_HEAD[1]]
        torch.testing.assert_close(previous[1:].diagonal(), torch.ones(len(said) + 1), rtol=0, atol=1e-4)
        assert attention[INDUCTION_HEAD[0]][0, INDUCTION_HEAD[1], -1, repeated + 2] > 0.9999
    assert planted.logits("".join(f" {word}" for word in said)).abs().max() < 1e-2


def ioi_text(first, second, third):
    return f"Then {first} and {second} went to the store, {third} gave a drink to"


def test_the_name_mover_circuit_names_the_one_that_came_once():
    planted = name_mover()
    for a, b in itertools.permutations(NAMES[:5], 2):
        logits = planted.logits(ioi_text(a, b, a))
        assert logits[planted.token(b)] == pytest.approx(10.0, abs=1e-3)
        assert logits.abs().topk(2).values[1] < 1e-3
    three = planted.logits(ioi_text(*NAMES[:3]))[[planted.token(name) for name in NAMES]]
    torch.testing.assert_close(three[:3], torch.full((3,), 10 / 3), rtol=0, atol=1e-3)
    assert three[3:].abs().max() < 1e-3


def test_only_the_stated_heads_at_the_stated_positions_write_what_the_answer_depends_on():
    planted = name_mover()
    text = ioi_text(NAMES[0], NAMES[1], NAMES[0])
    tokens = planted.tokenizer(text, return_tensors="pt").input_ids[0]
    s2, end = (tokens == planted.token(NAMES[0])).nonzero().flatten()[-1].item(), len(tokens) - 1
    clean = planted.logits(text)
    config = planted.model.config
    d_head = config.n_embd // config.n_head
    changed = set()
    for layer, head, position in itertools.product(range(config.n_layer), range(config.n_head), range(len(tokens))):

        def zero(module, args, head=head, position=position):
            z = args[0].clone()
            z[:, position, head * d_head : (head + 1) * d_head] = 0
            return (z,)

        handle = planted.model.transformer.h[layer].attn.c_proj.register_forward_pre_hook(zero)
        if (planted.logits(text) - clean).abs().max() > 1e-3:
            changed.add((layer, head, position))
        handle.remove()
    assert changed == {(*DUPLICATE_NAME_HEAD, s2), (*INHIBITION_HEAD, end), (*NAME_MOVER_HEAD, end)}
