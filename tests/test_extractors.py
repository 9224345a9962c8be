"""Extractors: what counts of their words, and the endpoint extractor against a server that speaks the protocol."""

import json
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pandas as pd
import pytest

import headwater as hw
from headwater.errors import InputError
from headwater.likelihood.graph import DepthGraph
from headwater.questions.endpoint import NoReplyError, json_object
from headwater.questions.extract import EndpointExtractor, call_extractor, exact_words
from headwater.questions.labels import EndpointJudge, score_in
from headwater.runs.identity import describe
from tests.ending import every_answer_ends
from tests.tiny import embedded, tiny_model, tiny_tokenizer

QUESTION, ANSWER = "What is the capital of South Carolina?", "It is Columbia, a hub of trade."
GOOD = {"subject": "South Carolina", "property": "capital", "answer": "Columbia"}


class Endpoint:
    """A chat completions endpoint on this machine that plays back replies and keeps the requests."""

    def __init__(self, *replies):
        self.requests = []
        left = list(replies)
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append((self.path, dict(self.headers), body))
                reply = left.pop(0) if len(left) > 1 else left[0]
                reply = reply(body) if callable(reply) else reply
                status, text = (reply, "{}") if isinstance(reply, int) else (200, reply)
                if status == 200 and not text.startswith("RAW"):
                    text = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})
                self.send_response(status)
                self.end_headers()
                for part in endpoint.parts(text.removeprefix("RAW").encode()):
                    try:
                        self.wfile.write(part)
                    except OSError:  # the other side waits no longer
                        return

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def parts(self, content):
        """In one piece; a slow endpoint overrides it."""
        yield content

    def extractor(self, **options):
        return EndpointExtractor(self.url, "judge-1", pause=0.001, **options)


def test_a_good_reply_is_taken_at_once_and_the_request_speaks_the_protocol():
    with Endpoint(f"Here you are:\n```json\n{json.dumps(GOOD)}\n```") as endpoint:
        found = endpoint.extractor(api_key="secret")(QUESTION, ANSWER)
    assert found == GOOD
    ((path, headers, body),) = endpoint.requests
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body["model"] == "judge-1"
    assert body["temperature"] == 0
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert QUESTION in body["messages"][1]["content"]
    assert ANSWER in body["messages"][1]["content"]


def test_words_that_are_no_substring_are_asked_for_again_with_a_complaint():
    wrong = GOOD | {"answer": "Columbia, SC"}
    with Endpoint("no json", json.dumps(wrong), json.dumps(GOOD)) as endpoint:
        assert endpoint.extractor()(QUESTION, ANSWER) == GOOD
    complaints = [body["messages"][-1]["content"] for _, _, body in endpoint.requests]
    assert len(complaints) == 3
    assert "answer" in complaints[2]
    assert "subject" not in complaints[2]


def test_after_five_tries_what_is_valid_remains():
    with Endpoint(json.dumps(GOOD | {"answer": "Charleston"})) as endpoint:
        found = endpoint.extractor()(QUESTION, ANSWER)
    assert len(endpoint.requests) == 5
    assert found == {"subject": "South Carolina", "property": "capital"}


def test_null_says_that_there_is_no_answer_and_is_not_asked_again():
    with Endpoint(json.dumps(GOOD | {"answer": None})) as endpoint:
        found = call_extractor(endpoint.extractor(), QUESTION, ANSWER)
    assert len(endpoint.requests) == 1
    assert "answer" not in found


def test_a_busy_endpoint_is_tried_again_and_one_that_refuses_is_not():
    with Endpoint(503, 429, json.dumps(GOOD)) as endpoint:
        assert endpoint.extractor()(QUESTION, ANSWER) == GOOD
    with (
        Endpoint(401) as endpoint,
        pytest.raises(InputError, match=r"/v1/chat/completions answered 401 Unauthorized"),
    ):
        endpoint.extractor()(QUESTION, ANSWER)
    assert len(endpoint.requests) == 1
    with Endpoint(503) as endpoint, pytest.raises(NoReplyError, match="answered 503"):
        endpoint.extractor()(QUESTION, ANSWER)
    assert len(endpoint.requests) == 5


def test_no_endpoint_or_one_of_another_protocol_is_named_in_one_line():
    with Endpoint("RAW{}") as endpoint, pytest.raises(InputError, match="does not speak the chat completions protocol"):
        endpoint.extractor()(QUESTION, ANSWER)
    with pytest.raises(InputError, match=r"cannot be reached .*refused"):
        endpoint.extractor(tries=2)(QUESTION, ANSWER)


@pytest.mark.parametrize("reply", ["[" * 5000, "9" * 5000, '{"a":' * 5000, "\ud800"])
def test_replies_nested_too_deep_or_with_endless_numbers_are_no_replies(reply):
    assert json_object(f'{{"answer": {reply}') is None
    if reply.isascii():
        with Endpoint(f"RAW{reply}") as endpoint, pytest.raises(InputError, match="does not speak"):
            endpoint.extractor()(QUESTION, ANSWER)


def test_words_become_spans_and_only_whole_parts_count():
    spans = exact_words(
        {"subject": ["South", "Carolina"], "property": ("capital", "city"), "answer": 7, "more": "x"}, QUESTION, ANSWER
    )
    assert spans == {"subject": ((23, 28), (29, 37))}
    assert exact_words({"answer": None, "subject": ""}, QUESTION, ANSWER) == {}


def test_an_extractor_that_fails_or_returns_no_mapping_is_named_with_its_example():
    def failing(question, answer):
        raise ValueError("boom")

    with pytest.raises(InputError, match=r"What is the capital.*ValueError: boom"):
        call_extractor(failing, QUESTION, ANSWER)
    with pytest.raises(InputError, match=r"returned a str; it must return a mapping with any of subject"):
        call_extractor(lambda question, answer: "Columbia", QUESTION, ANSWER)


def test_names_for_the_record_never_hold_the_key():
    extractor = EndpointExtractor("http://x/v1", "judge", api_key="secret")
    assert extractor.identity == "judge at http://x/v1"
    assert "secret" not in repr(extractor)
    assert describe(json_object).startswith("function json_object ")


def test_an_endpoint_gives_the_exact_words_of_questions_that_have_none(tmp_path):
    tokenizer = tiny_tokenizer()
    model = hw.load(tiny_model("llama", len(tokenizer)), tokenizer=tokenizer)
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"question": f"big cat {i}", "answers": ["no such"]}) + "\n" for i in range(5)))
    with Endpoint(json.dumps({"subject": "cat", "property": "big", "answer": None})) as endpoint:
        extractor = endpoint.extractor(api_key="secret")
        left = pytest.raises(InputError, match=r"None of the 5 questions is left: 5 no exact words of the answer")
        with every_answer_ends(), left:
            hw.answer(model, hw.load_questions(file), extractor=extractor, out=tmp_path / "run", progress=False)
    assert len(endpoint.requests) == 5
    assert "judge-1" in (tmp_path / "run" / "run.json").read_text()
    assert "secret" not in (tmp_path / "run" / "run.json").read_text()

    def first_word(question, answer):
        return {"subject": "cat", "property": "big", "answer": answer.split()[0]}

    with every_answer_ends():
        answered = hw.answer(model, hw.load_questions(file), extractor=first_word, progress=False)
    for _, row in answered.table.iterrows():
        spans = (*row["property"], *row["subject"], *row["exact_answer"])
        assert [row["text"][a:b] for a, b in spans] == ["big", "cat", row["answer"].split()[0]]


class Dripping(Endpoint):
    """Sends a byte, and the next one in the time that it was given."""

    def parts(self, content):
        for byte in content:
            yield bytes([byte])
            time.sleep(0.02)


def test_a_reply_that_comes_byte_by_byte_is_none_after_its_time():
    with Dripping(json.dumps(GOOD)) as endpoint:
        began = time.monotonic()
        with pytest.raises(NoReplyError, match=r"cannot be reached \(no reply in 0.05 seconds\)"):
            endpoint.extractor(timeout=0.05, tries=2)(QUESTION, ANSWER)
        assert time.monotonic() - began < 2
    assert len(endpoint.requests) == 2


def test_what_a_reply_said_is_kept_when_the_next_tries_bring_none():
    with Endpoint(json.dumps(GOOD | {"answer": "Charleston"}), 503) as endpoint:
        found = endpoint.extractor(tries=3)(QUESTION, ANSWER)
    assert found == {"subject": "South Carolina", "property": "capital"}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A model, and a file of forty questions without exact words."""
    tokenizer = tiny_tokenizer()
    model = hw.load(tiny_model("llama", len(tokenizer)), tokenizer=tokenizer)
    file = tmp_path_factory.mktemp("asked") / "own.jsonl"
    rows = [{"question": f"big cat {i}", "answers": ["no such"]} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model, hw.load_questions(file)


def words_but_for(*silent):
    """Play an endpoint that names words, but is broken for some questions."""

    def reply(body):
        text = body["messages"][1]["content"]
        question, answer = (line.partition(": ")[2] for line in text.split("\n", 1))
        if question in silent:
            return 503
        return json.dumps({"subject": "cat", "property": "big", "answer": answer})

    return reply


def test_what_an_endpoint_does_not_reply_to_is_dropped_and_counted_and_the_others_are_used(asked):
    model, questions = asked
    with Endpoint(words_but_for("big cat 3", "big cat 7")) as endpoint, every_answer_ends():
        found = hw.answer(model, questions, extractor=endpoint.extractor(tries=2), progress=False)
    dropped = found.dropped["cause"].value_counts().to_dict()
    assert dropped["no reply of the extractor"] == 2
    assert not set(found.table["question"]) & {"big cat 3", "big cat 7"}
    assert len(found.table) + sum(dropped.values()) == 40
    assert len(endpoint.requests) == 38 + 2 * 2


def test_an_endpoint_that_falls_silent_ends_the_run_and_nothing_is_asked_twice(asked, tmp_path):
    model, questions = asked
    with Endpoint(*[words_but_for()] * 8, 503) as endpoint, every_answer_ends():
        extractor = endpoint.extractor(tries=1)
        with pytest.raises(InputError, match=r"There was no reply 16 times in a row.*503.*continues from there"):
            hw.answer(model, questions, extractor=extractor, out=tmp_path, progress=False)
    first = {body["messages"][1]["content"] for _, _, body in endpoint.requests[:8]}
    assert len(endpoint.requests) == 8 + 16
    with Endpoint(words_but_for()) as again, every_answer_ends():
        same = again.extractor(tries=1)
        object.__setattr__(same, "url", extractor.url)
        route = f"http://127.0.0.1:{again.server.server_port}/v1"
        with pytest.MonkeyPatch.context() as patch:
            sent = urllib.request.Request
            patch.setattr(urllib.request, "Request", lambda url, *rest: sent(url.replace(extractor.url, route), *rest))
            found = hw.answer(model, questions, extractor=same, out=tmp_path, progress=False)
    later = [body["messages"][1]["content"] for _, _, body in again.requests]
    assert len(later) == len(set(later))
    assert not first & set(later)
    assert len(found.dropped) + len(found.table) == 40


def test_the_key_comes_from_the_environment_and_stands_nowhere(monkeypatch):
    monkeypatch.setenv("HOUSE_KEY", "secret")
    with Endpoint(json.dumps(GOOD)) as endpoint:
        extractor = endpoint.extractor(key_from="HOUSE_KEY")
        extractor(QUESTION, ANSWER)
    assert endpoint.requests[0][1]["Authorization"] == "Bearer secret"
    assert "secret" not in repr(extractor) + extractor.identity
    monkeypatch.delenv("HOUSE_KEY")
    with pytest.raises(InputError, match=r"environment variable 'HOUSE_KEY'.*is not set"):
        endpoint.extractor(key_from="HOUSE_KEY")
    with pytest.raises(InputError, match="must begin with http"):
        EndpointExtractor("localhost:8000", "judge")


def test_a_set_without_exact_words_among_others_is_named(asked):
    model, questions = asked
    named = pd.DataFrame([{"dataset": "named", "question": "big cat", "answers": ["x"], "subject": "cat"}])
    both = hw.load_questions(pd.concat([named, questions.table.drop(columns=["subject", "property"])]))
    with pytest.raises(InputError, match=r"None of the 40 questions of 'own' says where"):
        hw.answer(model, both, progress=False)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"score": 4}', 4), ("Score: 5", 5), ("The score is 3.", 3), ("2", 2), ('so {"score": "1"} it is', 1),
        ("nonsense", None), ('{"score": 9}', None), ("score 2.5", None), ("", None),
    ],
)  # fmt: skip
def test_a_judges_reply_is_a_whole_score_from_1_to_5_or_none(reply, score):
    assert score_in(reply) == score
    with Endpoint(reply) as endpoint:
        judge = EndpointJudge(endpoint.url, "judge-1", pause=0.001, tries=2)
        assert judge("What is it?", ["a cat"], "a dog") == score
    assert len(endpoint.requests) == (1 if score else 2)
    assert "a cat" in endpoint.requests[0][2]["messages"][1]["content"]


def test_an_endpoint_scores_the_answers_of_a_depth_graph_and_what_it_leaves_out_is_counted():
    def reply(body):
        return 503 if "Lom" in body["messages"][1]["content"] else f'{{"score": {1 + len(reply.asked) % 5}}}'

    reply.asked = []

    def counted(body):
        reply.asked.append(body)
        return reply(body)

    graph = hw.load_depth_graph()
    few = DepthGraph(graph.table[graph.table["group"].isin(graph.table["group"].unique()[:6])], graph.name)
    with Endpoint(counted) as endpoint:
        judge = EndpointJudge(endpoint.url, "judge-1", pause=0.001, tries=1)
        profile = hw.memorization(embedded(), few, judge=judge, answers="model", controls=False, progress=False)
    texts = [body["messages"][1]["content"] for body in reply.asked]
    assert len(texts) == len(set(texts))
    assert profile.table["score"].dropna().isin(range(1, 6)).all()
    assert profile.table["gap"].notna().any()
