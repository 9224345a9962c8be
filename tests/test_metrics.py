"""Metrics are the textbook numbers of the kept logits."""

import pytest
import torch

import headwater as hw
from headwater.errors import InputError
from headwater.models.positions import Prompt, positions_of
from headwater.patching.metrics import answer_ids, as_metrics
from headwater.patching.prompts import side_by_side
from tests.tiny import embedded, tiny_tokenizer


@pytest.fixture
def logits():
    return 3 * torch.randn(4, 2, 50)


def measured(metric, logits, *answers, clean=None):
    return metric.measure(logits, [torch.tensor(ids) for ids in answers], clean)


def test_logit_differences_log_probabilities_probabilities_and_ranks(logits):
    right, wrong = torch.randint(50, (2, 4)).tolist()
    rows = range(4)
    kept_means = {
        hw.logit_difference(0, 0): [(logits[i, :, right[i]] - logits[i, :, wrong[i]]).mean() for i in rows],
        hw.log_probability(0): [logits[i].log_softmax(-1)[:, right[i]].mean() for i in rows],
        hw.probability(0): [logits[i].softmax(-1)[:, right[i]].mean() for i in rows],
        hw.rank(0): [torch.stack([sum(k > k[right[i]]) for k in logits[i]]).float().mean() for i in rows],
    }
    for metric, expected in kept_means.items():
        answers = [right, wrong][: len(metric.answers)]
        assert torch.allclose(measured(metric, logits, *answers), torch.stack(expected), atol=1e-5), metric.name


def test_a_token_is_not_compared_with_itself_by_a_sweep_and_what_a_sweep_has_not_is_told_with_what_it_has():
    model, pair = embedded(), (" Paris is in", " Rome is in")
    with pytest.raises(InputError, match=r"compares token \d+ with itself for prompt 0, which is always 0"):
        hw.patch(model, *pair, sites="z", layers=0, metric=hw.logit_difference(" France", " France"), progress=False)
    mixed = hw.logit_difference([" France", " Italy"], [7, model.tokenizer(" Italy")["input_ids"][-1]])
    with pytest.raises(InputError, match=r"compares token \d+ with itself for prompt 1, which is always 0"):
        hw.patch(model, *([one] * 2 for one in pair), sites="z", layers=0, metric=mixed, progress=False)
    sweep = hw.patch(model, *pair, sites="z", layers=[0, 2], metric=hw.rank(" France"), progress=False)
    with pytest.raises(InputError, match=r"This sweep has no layer 1; it has 0, 2\."):
        sweep.plot(layer=1)
    with pytest.raises(InputError, match=r"This sweep has no metric 'rnak'; it has rank\."):
        sweep.plot(metric="rnak")


@pytest.mark.parametrize(
    ("correct", "wrong", "said"),
    [
        (" France", " France", r"token \d+ with itself for prompt 0,"),
        ([" Italy", " France"], [" Spain", " France"], r"token \d+ with itself for prompt 1,"),
        (5, [5, 6], "token 5 with itself for prompt 0,"),
        ((4, 6), [1, 6], "token 6 with itself for prompt 1,"),
    ],
)
def test_every_call_refuses_to_compare_a_token_with_itself(correct, wrong, said):
    model, pairs = embedded(), ([" Paris is in", " Berlin is in"], [" Rome is in", " Madrid is in"])
    options = {"metric": hw.logit_difference(correct, wrong), "progress": False}
    ends = {"senders": ["head 0.0"], "receivers": ["logits"]}
    circuit = ~hw.Circuit.of([], model)
    calls = [
        lambda: hw.patch(model, *pairs, sites="z", layers=0, **options),
        lambda: hw.patch(model, *pairs, sites="z", layers=0, method="attribution", **options),
        lambda: hw.knockout(model, pairs[0], block=("last", 1), **options),
        lambda: hw.ablate(model, pairs[0], heads=[(0, 1)], **options),
        lambda: hw.edges(model, *pairs, receivers="logits", **options),
        lambda: hw.path_patch(model, *pairs, **ends, **options),
        lambda: hw.find_circuit(model, *pairs, threshold=0.05, **options),
        lambda: hw.run_circuits(model, *pairs, circuits=circuit, **options),
    ]
    for call in calls:
        with pytest.raises(InputError, match=f"compares {said} which is always 0"):
            call()


def test_kl_divergence_is_from_the_clean_run_and_zero_for_it(logits):
    clean = torch.randn(4, 2, 50)
    p, q = clean.softmax(-1), logits.softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean(-1)
    assert torch.allclose(measured(hw.kl_divergence(), logits, clean=clean), expected, atol=1e-4)
    assert measured(hw.kl_divergence(), clean, clean=clean).abs().max() < 1e-6


def test_half_precision_logits_are_measured_in_float32(logits):
    half = logits.to(torch.bfloat16)
    assert measured(hw.log_probability(0), half, [1, 2, 3, 4]).dtype == torch.float32


def test_a_function_must_give_one_number_per_row(logits):
    (metric,) = as_metrics(lambda x: x.mean((1, 2)))
    assert torch.allclose(measured(metric, logits), logits.mean((1, 2)))
    with pytest.raises(InputError, match=r"was given values of shape \(4, 2, 50\).* gave \(\)"):
        measured(as_metrics(lambda x: x.mean())[0], logits)


def test_what_is_no_metric_is_named():
    with pytest.raises(InputError, match="'logits' is not a metric"):
        as_metrics(["logits"])
    with pytest.raises(InputError, match="different names"):
        as_metrics([hw.rank(1), hw.rank(2)])
    with pytest.raises(InputError, match="cannot read 'mlp_ot'"):
        hw.Metric("probe", lambda x: x, site="mlp_ot")


def test_answers_are_single_tokens_as_written():
    tokenizer = tiny_tokenizer()
    paris = tokenizer.convert_tokens_to_ids("ĠParis")
    assert answer_ids(" Paris", tokenizer, 2, 300).tolist() == [paris, paris]
    assert answer_ids([" Paris", 7], tokenizer, 2, 300).tolist() == [paris, 7]
    with pytest.raises(InputError, match="With a leading space, ' Paris' is one"):
        answer_ids("Paris", tokenizer, 1, 300)
    with pytest.raises(InputError, match=r"is 5,000 tokens, .*[.]{3} \(25,000 characters\); a metric needs one token"):
        answer_ids("a" * 5000, tokenizer, 1, 300)
    with pytest.raises(InputError, match="outside the model's vocabulary of 5"):
        answer_ids(7, tokenizer, 1, 5)


PROMPT = Prompt((1, 2, 3, 4), ("<s>", " the", " cat", " is"), ((0, 0), (0, 3), (3, 7), (7, 10)), "the cat is")


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (2, (2,)), (-1, (3,)), ("last", (3,)), ("first", (0,)), ("all", (0, 1, 2, 3)), ((1, 3), (1, 2)),
        (range(0, 4, 2), (0, 2)), (slice(2, None), (2, 3)), ({3, -3}, (1, 3)), ([1, -1], (1, 3)),
        ("cat", (2,)), ("the cat", (1, 2)),
        (lambda strings: strings.index(" is"), (3,)), ([{1, 2}], (1, 2)), ([[1, 2]], (1, 2)),
    ],
)  # fmt: skip
def test_positions_can_be_named_in_many_ways(where, expected):
    assert positions_of(where, PROMPT, 0, 1) == expected


@pytest.mark.parametrize("where", [4, -5, "dog", (2, 2), ["a", "b"], [1, 4], [], (1, 2, 3), True, None, 2.5])
def test_positions_that_are_not_there_are_refused(where):
    with pytest.raises(InputError):
        positions_of(where, PROMPT, 0, 1)
    with pytest.raises(InputError, match="0 were given for 1 prompt"):
        positions_of([], PROMPT, 0, 1)


def test_two_tokenizations_are_shown_in_columns_with_their_differences_marked():
    other = Prompt((1, 2, 9), ("<s>", " the", " dog"))
    lines = side_by_side(PROMPT, other).splitlines()
    assert len(lines) == 4
    assert "<>" not in lines[1]
    assert "' cat'" in lines[2]
    assert "<>" in lines[2]
    assert "' dog'" in lines[2]


LAST = [
    lambda z: z[:, -1, 5] - z[:, -1, 2],
    lambda z: z.log_softmax(-1)[:, -1, 3],
    lambda z: z[..., 5].mean(1),
    lambda z: z.mean(1)[:, 0],
    lambda z: z[:, -1:].mean((1, 2)),
    lambda z: z[..., -1, :].max(-1).values,
    lambda z: torch.stack([row[-1, 2] for row in z]),
    lambda z: z[:, None][:, 0, -1, 3],
    lambda z: z[torch.arange(len(z)), -1, 4],
    lambda z: z[:, -1][:, 0],
    lambda z: z.squeeze(1)[:, 3],
    lambda z: torch.einsum("rkv->r", z),
]
OTHER = [
    lambda z: z[:, 0, 5],
    lambda z: z[:, -3, 5],
    lambda z: z.log_softmax(-1)[:, 0, 3],
    lambda z: torch.softmax(z, -1)[:, 4, 2],
    lambda z: z[..., 5][:, 0],
    lambda z: z[..., 0, :].max(-1).values,
    lambda z: z[:, :3].mean((1, 2)),
    lambda z: z[:, -3:].mean((1, 2)),
    lambda z: z[:, [0, 1]].mean((1, 2)),
    lambda z: z[torch.arange(len(z)), torch.zeros(len(z), dtype=torch.long), 2],
    lambda z: torch.stack([row[0, 2] for row in z]),
    lambda z: z.select(1, 0)[:, 3],
]


@pytest.mark.parametrize("number", range(len(LAST)))
def test_a_function_of_the_last_position_is_given_the_last_position(number):
    logits = torch.randn(3, 1, 50)
    (metric,) = as_metrics(LAST[number])
    metric.refuse_misread(logits, [])
    assert torch.equal(metric.measure(logits, []), LAST[number](logits))


@pytest.mark.parametrize("number", range(len(OTHER)))
def test_a_function_that_indexes_another_position_than_the_last_is_refused(number):
    for metric in (*as_metrics(OTHER[number]), hw.Metric("mine", OTHER[number])):
        with pytest.raises(InputError, match=r"write \[:, -1\], or read all positions with .*at='all'"):
            metric.refuse_misread(torch.randn(3, 1, 50), [])


def test_a_metric_of_all_positions_reads_the_one_it_indexes_and_without_them_it_is_refused():
    model = embedded()
    clean, corrupted = "Q: What is the capital of France?\nA:", "Q: What is the capital of Italy?\nA:"
    options = {"sites": "resid_post", "layers": -1, "positions": "all", "progress": False}
    third = lambda z: z[:, 3, 5] - z[:, 3, 9]  # noqa: E731
    swept = hw.patch(model, clean, corrupted, metric=hw.Metric("third", third, at="all"), **options).table
    logits = model.run([clean, corrupted])
    gap = float((logits[1, 3, 5] - logits[1, 3, 9]).float())
    assert swept["corrupted"].tolist() == pytest.approx([gap] * len(swept), abs=1e-4)
    only_last = r"A metric reads position 3, but gets only the last position .* token 3 are logits\[:, -1, 3\]"
    with pytest.raises(InputError, match=only_last):
        hw.patch(model, clean, corrupted, metric=third, **options)
    with pytest.raises(InputError, match="A metric reads position 0"):
        hw.edges(model, clean, corrupted, metric=lambda z: z[:, 0, 5], receivers="logits", progress=False)
