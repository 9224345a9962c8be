"""Digests: equal values have equal ones in every process, others do not; what has no identity says why."""

import dataclasses
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers

import headwater as hw
from headwater.models import fingerprint as fingerprints
from headwater.models.checkpoint import Checkpoint
from headwater.models.weights import open_weights
from headwater.runs.identity import (
    UNKNOWN,
    UnknownIdentityError,
    describe,
    digest,
    is_library,
    tokenizer_digest,
    unknown_in,
)
from tests.tiny import tiny_folder, tiny_model, tiny_tokenizer

MODULE = """
import dataclasses, functools, re, torch
WORDS = {"a", "b", "c", "d", "e"}
PATTERN = re.compile("a+")

@dataclasses.dataclass(frozen=True)
class Judge:
    limit: int = 3
    def strict(self, x):
        return len(x) > self.limit
    def __call__(self, question, accepted, answer):
        return 5 if self.strict(answer) and answer in {"x", "y", "z"} else even(len(answer))

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

def metric(x, *, k=frozenset({"p", "q", "r"})):
    inner = lambda y: y in WORDS and PATTERN.match(y)
    return torch.nn.functional.softmax(x, -1)[:, 0] + sum(map(inner, k))

EVERY = [metric, functools.partial(metric, k=WORDS), Judge(), Judge().strict, Judge, even, torch.relu, max, "a".upper]
"""


def test_functions_have_one_digest_in_every_process_and_wherever_their_lines_stand(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text("# moved\n\n" + MODULE)
    code = "import mine; from headwater.runs.identity import digest; print(*map(digest, mine.EVERY))"
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=dict(os.environ, PYTHONPATH=f"{folder}:{hw.__path__[0]}/..", PYTHONHASHSEED=str(seed)),
        ).stdout.split()
        for seed, folder in ((1, tmp_path), (2, tmp_path / "other"))
    ]
    assert printed[0] == printed[1]
    assert len(set(printed[0])) == len(printed[0]) == 9


def function(source: str, **names):
    scope = {"torch": torch, "np": np, "__name__": "__main__"} | names
    exec(source, scope)
    return scope["f"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("f = lambda x: x + 1", "f = lambda x: x + 2"),
        ("f = lambda x: x + 1", "f = lambda x: x + 1.0"),
        ("f = lambda x: x + 1", "f = lambda x: x + True"),
        ("f = lambda x: x + 1", "f = lambda x: x - 1"),
        ("f = lambda x: x.a", "f = lambda x: x.b"),
        ("f = lambda x: len(x)", "f = lambda x: max(x)"),
        ("f = lambda x: torch.sin(x)", "f = lambda x: torch.cos(x)"),
        ("f = lambda x: x in {1, 2}", "f = lambda x: x in {1, 3}"),
        ("def f(x):\n def g(y): return y + 1\n return g(x)", "def f(x):\n def g(y): return y + 2\n return g(x)"),
        ("def f(x):\n try: return x[0]\n except KeyError: 0", "def f(x):\n try: return x[0]\n except IndexError: 0"),
        ("K = [1, {'a': 2}]\nf = lambda x: K", "K = [1, {'a': 3}]\nf = lambda x: K"),
        ("class A:\n k = 1\nf = lambda x: A.k", "class A:\n k = 2\nf = lambda x: A.k"),
        ("class A:\n @property\n def k(s): return 1\nf = A()", "class A:\n @property\n def k(s): return 2\nf = A()"),
        ("class B:\n k = 1\nclass A(B): pass\nf = A", "class B:\n k = 2\nclass A(B): pass\nf = A"),
        ("f = lambda x: x\nf.k = 1", "f = lambda x: x\nf.k = 2"),
        (
            "class M(type):\n k = 1\nclass A(metaclass=M): pass\nf = lambda x: A.k",
            "class M(type):\n k = 2\nclass A(metaclass=M): pass\nf = lambda x: A.k",
        ),
        ("f = np.ma.array([1, 2], mask=[0, 1])", "f = np.ma.array([1, 2], mask=[1, 0])"),
        (
            "import functools\n@functools.wraps(torch.nn.functional.softmax)\ndef f(x): return x",
            "import functools\n@functools.wraps(torch.nn.functional.softmax)\ndef f(x): return x + 1",
        ),
        ("f = torch.nn.Linear(2, 2)", "f = torch.nn.Linear(2, 2)\nf.bias.data.add_(1)"),
    ],
)
def test_functions_that_compute_other_things_have_other_digests(one, other):
    torch.manual_seed(0)
    first = function(one)
    torch.manual_seed(0)
    second = function(one)
    torch.manual_seed(0)
    assert digest(first) == digest(second) != digest(function(other))


def test_a_file_called_like_a_module_of_python_is_no_part_of_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for k in (1, 2):
        (tmp_path / "this.py").write_text(f"def f(x): return x * {k} + {'0' * k}\n")
        monkeypatch.delitem(sys.modules, "this", raising=False)
        importlib.invalidate_caches()
        found.append(digest(importlib.import_module("this").f))
    monkeypatch.delitem(sys.modules, "this")
    assert found[0] != found[1]


def test_a_package_of_a_cluster_is_a_library_and_a_script_on_the_path_is_not(tmp_path, monkeypatch):
    for name, folder in (("clustered", tmp_path / "torch" / "site-packages"), ("scripted", tmp_path)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text("def f(x): return x\n")
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    assert [is_library("clustered"), is_library("scripted")] == [True, False]


@pytest.mark.parametrize("name", ["eval", "exec", "globals", "__import__"])
def test_a_function_that_may_read_anything_has_no_identity(name):
    with pytest.raises(UnknownIdentityError, match=f"a function that calls {name}"):
        digest(function(f"def g(x): return {name}('K')\ndef f(x): return g(x)"))


def test_values_of_every_kind_are_told_apart():
    class Point:
        def __init__(self, x):
            self.x = x

    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [("x",), None]})
    values = [
        None, 0, 1, 1.0, True, "1", b"1", (1,), [1], {1}, {1: 1}, {"1": 1}, range(3), slice(3), [1, 2], [2, 1],
        [[1], 2],
        np.array([1]), np.array([1.0]), np.array([[1]]), torch.tensor([1]), torch.tensor([1.0]), torch.ones(1, 1),
        torch.ones(1, dtype=torch.bfloat16), frame, frame.iloc[::-1], frame.rename(columns={"a": "c"}),
        frame.assign(a=[1.0, 2.0 + 1e-15]), re.compile("a"), re.compile("b"), Point(1), Point(2), float("nan"), -0.0,
        functools.partial(max, 1), functools.partial(max, 2), np.random.default_rng(1), np.random.default_rng(2),
        *(torch.func.vmap(torch.nn.functional.softmax, n) for n in (0, 1)),
    ]  # fmt: skip
    assert len({digest(value) for value in values}) == len(values)
    assert [digest(value) for value in values] == [digest(value) for value in values]


def test_what_holds_itself_has_a_digest():
    holder: list = [1]
    holder.append(holder)
    assert digest(holder) == digest(holder) != digest([1, [1]])


def test_a_table_has_the_same_digest_after_it_was_written_as_parquet(tmp_path):
    cells = {"n": [1, 2], "f": [0.1, np.nan], "t": ["é", None], "spans": [((1, 2), (3, 4)), ()], "b": [True, False]}
    table = pd.DataFrame(cells)
    table.to_parquet(tmp_path / "t.parquet")
    assert digest(pd.read_parquet(tmp_path / "t.parquet")) == digest(table)
    assert digest(table.assign(f=[0.1 + 1e-18, np.nan])) == digest(table)
    assert digest(table.assign(f=[0.1 + 1e-15, np.nan])) != digest(table)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(PLAIN)
def test_plain_options_are_described_as_they_are_and_in_one_way(value):
    def other(value):
        if isinstance(value, list):
            return tuple(map(other, value))
        if isinstance(value, dict):
            return {key: other(item) for key, item in reversed(value.items())}
        return np.int64(value) if type(value) is int and abs(value) < 2**62 else value

    described = describe(value)
    assert described == describe(other(value)) == describe(described)
    assert unknown_in(described) is None


def test_sets_are_described_in_order_and_dataclasses_by_their_fields():
    @dataclasses.dataclass
    class Setup:
        layers: tuple[int, ...]
        site: str

    assert describe({3, 1, 2}) == [1, 2, 3]
    assert describe(Setup((1, 2), "z")) == {"layers": [1, 2], "site": "z"}
    assert describe(torch.bfloat16) == "bfloat16"
    assert describe(float("inf")) == "inf"


def test_what_has_no_identity_says_what_it_is():
    class Client:
        def __init__(self):
            self.lock = threading.Lock()

        def __call__(self, question, accepted, answer):
            return 1

    said = unknown_in(describe({"a": [1, {"judge": Client()}]}))
    assert said.endswith("Client: a _thread.lock, whose state cannot be read")
    client = Client()
    with pytest.raises(UnknownIdentityError, match=r"^a _thread\.lock, whose state"):
        digest(lambda: client)
    named = Client()
    named.identity = "gpt, prompt 3"
    assert unknown_in(describe(named)) is None
    assert digest(named) != digest(type("Other", (), {"identity": "gpt, prompt 4", "__call__": len})())


class Leaves:
    """Leaves out of a pickle what it computes with."""

    def __init__(self, k, held=None):
        self.k, self.held = k, held

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        self.k, self.held = 0, None

    @functools.cached_property
    def twice(self):
        return 2 * self.k


class Reduces(Leaves):
    def __reduce__(self):
        return Reduces, (0,)


@pytest.mark.parametrize("kind", [Leaves, Reduces])
def test_what_an_object_leaves_out_of_its_pickle_counts(kind):
    before, used = kind(5), kind(5)
    assert used.twice == 10
    assert digest(before) == digest(used)
    assert digest(before) != digest(kind(9))
    assert digest(kind(5).__getstate__) != digest(kind(9).__getstate__)
    with pytest.raises(UnknownIdentityError, match=r"^a _thread\.lock"):
        digest(kind(5, threading.Lock()))


def test_an_array_is_described_by_a_digest_and_a_tuple_as_a_list():
    one, other = (describe(np.array(numbers)) for numbers in ([1, 2], [1, 3]))
    assert isinstance(one, str)
    assert one != other
    assert describe((1, 2)) == [1, 2]


def test_every_part_of_a_tokenizer_counts_and_padding_does_not():
    def changed(change):
        """What was looked at before, as in a session, has the digest of what is new."""
        tokenizer, known = tiny_tokenizer(), tiny_tokenizer()
        assert tokenizer_digest(known) == plain
        change(tokenizer)
        change(known)
        assert tokenizer_digest(known) == tokenizer_digest(tokenizer)
        return tokenizer_digest(tokenizer)

    def other_words(tokenizer):
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        words = rules["model"]["vocab"]
        rules["model"]["vocab"] = [*words[:2], *words[:1:-1]]
        tokenizer.backend_tokenizer.model = Tokenizer.from_str(json.dumps(rules)).model

    plain = tokenizer_digest(tiny_tokenizer())
    assert plain == changed(lambda t: None) == changed(lambda t: t(["a", "a b c"], padding=True, truncation=True))
    others = [
        changed(lambda t: t.add_tokens(["new"])),
        changed(lambda t: setattr(t, "chat_template", "{{ messages }}")),
        changed(lambda t: setattr(t, "eos_token", "<pad>")),
        changed(lambda t: setattr(t.backend_tokenizer, "normalizer", normalizers.Lowercase())),
        changed(lambda t: setattr(t.backend_tokenizer, "pre_tokenizer", pre_tokenizers.Whitespace())),
        changed(other_words),
        tokenizer_digest(None),
        tokenizer_digest(object()),
    ]
    assert len({plain, *others}) == len(others) + 1
    assert others[-1].startswith(UNKNOWN)


def test_files_are_read_once_until_they_change(tmp_path, monkeypatch):
    folder, reads = tiny_folder(tmp_path / "model", "llama"), []
    read = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: (reads.append(name), read(self, name))[1])
    monkeypatch.setattr(fingerprints, "cached_assets_path", lambda *names: tmp_path)
    assert open_weights(folder).fingerprint == open_weights(folder).fingerprint
    young = len(reads)
    monkeypatch.setattr(fingerprints, "YOUNG", -1.0)
    monkeypatch.setattr(fingerprints, "LARGE", 0)
    first = open_weights(folder).fingerprint
    settled = len(reads)
    assert open_weights(folder).fingerprint == first
    monkeypatch.setattr(fingerprints, "_OF_FILES", {})  # as in a new process
    assert open_weights(folder).fingerprint == first
    assert len(reads) - settled < 5 < young / 2 <= settled - young
    tiny_model("llama", seed=1).save_pretrained(folder)
    assert open_weights(folder).fingerprint != first


def test_a_fingerprint_is_the_same_from_any_number_of_threads(monkeypatch):
    hf = tiny_model("gpt2")
    monkeypatch.setattr(fingerprints, "SPAN", 100)
    found = set()
    for threads in (1, 3):
        monkeypatch.setattr(fingerprints, "THREADS", threads)
        found.add(hw.load(hf).fingerprint)
    assert len(found) == 1
