"""The classical tasks: lines that go on as their definitions say, held-out words, and pairs that are swept by role."""

import re
from collections import Counter

import pytest
from tools.world.chosen_words import write_words
from tools.world.model_folder import build_model

import headwater as hw
from headwater.errors import InputError
from headwater.world.tasks import TASKS, read_words, task
from tests import chance, small_world
from tests.planted_lookup import question_lookup
from tests.small_world import SMALL


@pytest.fixture(scope="module")
def prepared():
    return small_world.small()


@pytest.fixture(scope="module")
def written(prepared):
    return prepared[0]


@pytest.mark.parametrize("name", sorted(TASKS))
def test_no_text_says_a_task_with_its_held_out_words(written, name):
    if name in ("capital", "successor"):
        pytest.skip("a fact has no other instance; held-out runs are parts of longer ones")
    words = written.words
    held_out = {
        "indirect_object": words.names.held_out,
        "induction": words.plain.held_out,
        "gendered_pronoun": words.names.held_out,
        "agreement": words.singular.held_out,
        "greater_than": words.starts.held_out,
    }[name]
    texts = [document.text for document in written.corpus.documents if document.form == name]
    if name == "greater_than":
        assert not {re.search(r"from \d\d(\d\d)", text).group(1) for text in texts} & set(held_out)
    else:
        said = set(re.findall(r"\w+", " ".join(texts)))
        others = said & set(held_out)
        assert len(held_out) >= 8 or name == "gendered_pronoun"
        assert not others, others


@pytest.mark.parametrize("name", sorted(TASKS))
@pytest.mark.parametrize("held_out", [False, True])
def test_a_line_goes_on_with_its_answer_and_its_change_with_another(written, name, held_out):
    for _ in range(50):
        line = TASKS[name](chance.rng(), written.words, held_out)
        assert line.clean != line.corrupted
        assert set(line.correct) - set(line.wrong)
        assert len(line.clean.split()) == len(line.corrupted.split())
        for role, (clean, corrupted) in line.roles.items():
            assert clean in line.clean, role
            assert corrupted in line.corrupted, role


def test_the_tasks_say_what_their_definitions_say(written):
    rng = chance.rng()
    for _ in range(100):
        line = TASKS["indirect_object"](rng, written.words, True)
        named = Counter(word for word in re.findall(r"\w+", line.clean) if word in written.words.names.held_out)
        assert sorted(named.values()) == [1, 2]
        assert line.correct == (f" {min(named, key=named.get)}",)
        span = TASKS["greater_than"](rng, written.words, False)
        assert min(span.correct) > re.search(r"from \d\d(\d\d)", span.clean).group(1) >= max(span.wrong)
        words = TASKS["induction"](rng, written.words, True).clean.split(" : ")
        assert words[0].startswith(words[1])


@pytest.mark.parametrize("name", sorted(TASKS))
def test_pairs_of_a_task_align_token_for_token_and_their_roles_are_found(written, prepared, name):
    _, tokenizer = prepared
    pairs = task(name, 20, world=written.words)
    assert len(pairs) == len(pairs.table) == len(set(pairs.clean)) == 20
    for i in range(20):
        clean, corrupted = (tokenizer(text)["input_ids"] for text in (pairs.clean[i], pairs.corrupted[i]))
        assert len(clean) == len(corrupted)
        for text, words in ((pairs.clean[i], pairs.correct[i]), (pairs.corrupted[i], pairs.wrong[i])):
            assert len(tokenizer(text + words)["input_ids"]) == len(clean) + 1
    assert "end" in pairs.roles
    assert all(len(places) == 20 for places in pairs.roles.values())


@pytest.fixture(scope="module")
def tiny(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    _, tokenizer = prepared
    build_model(SMALL, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return hw.load(str(folder))


@pytest.mark.parametrize("name", ["indirect_object", "greater_than"])
def test_a_task_is_swept_by_role_with_its_metric(written, tiny, name):
    pairs = task(name, 3, world=written.words)
    sweep = hw.patch(
        tiny,
        list(pairs.clean),
        list(pairs.corrupted),
        sites="resid_pre",
        positions=pairs.roles,
        metric=pairs.metric(tiny),
        progress=False,
    )
    ends = sweep.table[(sweep.table["role"] == "end") & (sweep.table["layer"] == 0)]
    assert len(ends) == 3
    if name == "greater_than":
        tokens = tiny.tokenize(list(pairs.clean[:1]))
        probabilities = tiny.run(pairs.clean[0])[0, -1].softmax(-1)
        years = [tiny.tokenizer.convert_tokens_to_ids(f"{year:02d}") for year in range(100)]
        start = int(pairs.clean[0].split(" to ")[0][-2:])
        expected = probabilities[years[start + 1 :]].sum() - probabilities[years[: start + 1]].sum()
        assert len(tokens.tokens) == 1
        assert sweep.table["clean"].iloc[0] == pytest.approx(float(expected), abs=1e-5)


def test_words_of_tasks_come_back_from_their_folder(written, tmp_path):
    write_words(written.words, tmp_path)
    assert read_words(tmp_path) == written.words
    assert task("capital", 5, world=tmp_path).table.equals(task("capital", 5, world=written.words).table)


@pytest.mark.parametrize("content", [None, "{}", '{"he": 3}', '{"he": {"told": ["a"]}, "she": []}'])
def test_a_folder_that_is_of_no_world_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "task_words.json").write_text(content)
    with pytest.raises(InputError, match=r"task_words\.json"):
        task("capital", world=tmp_path)


@pytest.mark.parametrize("asked", ["indirect", 3, None])
def test_an_unknown_task_is_named_with_its_neighbours(written, asked):
    with pytest.raises(InputError, match="is not one of indirect_object, greater_than"):
        task(asked, world=written.words)


def test_more_prompts_than_a_task_has_is_said(written):
    with pytest.raises(InputError, match=r"fewer than 100,000 different prompts; ask for at most"):
        task("gendered_pronoun", 100_000, world=written.words)


def test_years_that_are_not_one_token_have_no_metric_and_are_not_read_as_another_token(written):
    planted = question_lookup()
    model = hw.load(planted.model, tokenizer=planted.tokenizer)
    with pytest.raises(InputError, match=r"100 endings of years, but \d+ of them, such as '\d\d', are not one token"):
        task("greater_than", 2, world=written.words).metric(model)
