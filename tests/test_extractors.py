"""Extractors: what counts of their words, and the endpoint extractor against a server that speaks the protocol."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import headwater as hw
from headwater.errors import InputError
from headwater.questions.extract import EndpointExtractor, call_extractor, exact_words, json_object
from headwater.runs.identity import describe
from tests.ending import every_answer_ends
from tests.tiny import tiny_model, tiny_tokenizer

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
                status, text = (reply, "{}") if isinstance(reply, int) else (200, reply)
                if status == 200 and not text.startswith("RAW"):
                    text = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.removeprefix("RAW").encode())

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
    with Endpoint(503) as endpoint, pytest.raises(InputError, match="answered 503"):
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
        left = pytest.raises(InputError, match=r"No question is left of 5: 5 no exact words of the answer")
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
