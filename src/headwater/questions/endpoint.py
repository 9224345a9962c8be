"""A chat model behind an OpenAI-compatible endpoint: requests, retries, and missing replies.

1. A failed request (429, 5xx, no connection, timeout, a reply that violates the protocol) is sent again after a pause
   that doubles each time; a rejected request (another 4xx) is an error at once.
2. If no try brings a reply, `NoReplyError` is raised: the caller counts it and continues.
3. If many requests in a row bring no reply, the endpoint is down: `FailureLimit` ends the run, which keeps its replies.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from headwater.errors import InputError
from headwater.options import checked_count, checked_number, shown

T = TypeVar("T")
U = TypeVar("U")
SILENT = 16
"""Number of failed items in a row that ends a run."""
CHUNK = 2**16
AT_ONCE = 64


class NoReplyError(InputError):
    """An endpoint did not reply in any try."""


@dataclass(frozen=True)
class ChatEndpoint:
    """Address of a chat model, with timeout and retries."""

    url: str
    """Base address of the API, such as "http://localhost:8000/v1"."""
    model: str
    """The endpoint's name of the model."""
    api_key: str | None = field(default=None, repr=False)
    tries: int = 5
    timeout: float = 60.0
    """Seconds that a reply may take, to its last byte."""
    pause: float = 1.0
    """Seconds before the second try after a failed request; doubles with each further try."""
    workers: int = 4
    """Number of parallel requests; their replies are saved before the next requests."""
    key_from: str | None = None
    """The environment variable that holds the key, instead of `api_key`."""

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url.startswith(("http://", "https://")):
            raise InputError(f"url={shown(self.url)} is not an address: it must begin with http:// or https://.")
        if not isinstance(self.model, str) or not self.model:
            raise InputError(f"model={shown(self.model)} must be the name of a model at the endpoint: a text.")
        checked_count("tries", self.tries)
        checked_count("workers", self.workers)
        checked_number("timeout", self.timeout, above=0.0)
        if self.key_from is not None and not os.environ.get(self.key_from):
            raise InputError(f"The environment variable {shown(self.key_from)}, which should hold the key, is not set.")

    @property
    def identity(self) -> str:
        """Its identity in a run record, which never contains the key."""
        return f"{self.model} at {self.url}"

    def request(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Send messages once and return the reply."""
        body = {"model": self.model, "messages": list(messages), "temperature": 0}
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(self.key_from) if self.key_from is not None else self.api_key
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        target = self.url.rstrip("/") + "/chat/completions"
        request = urllib.request.Request(target, json.dumps(body).encode(), headers)
        try:
            return str(json.loads(self._read(request))["choices"][0]["message"]["content"] or "")
        except urllib.error.HTTPError as error:
            error.close()
            # Overload and server failures are temporary; a wrong key, model or address is not, so it is an error.
            kind = NoReplyError if error.code == 429 or error.code >= 500 else InputError
            raise kind(f"The endpoint {target} answered {error.code} {error.reason}.") from None
        except (OSError, http.client.HTTPException) as error:  # a broken connection, or a timeout
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise NoReplyError(f"The endpoint {target} cannot be reached ({reason}).") from None
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise NoReplyError(f"The endpoint {target} does not speak the chat completions protocol.") from None

    def ask(self, messages: Sequence[Mapping[str, str]], read: Callable[[str], tuple[T | None, str]]) -> T | None:
        """Ask until a reply is valid, at most `tries` times, and return the content of the last readable reply.

        `read` returns the content of a reply (None for nothing), and a complaint, "" if the reply is valid. The next
        request shows the reply and the complaint to the model.
        """
        best: T | None = None
        sent, is_silent = list(messages), True
        for attempt in range(self.tries):
            try:
                reply = self.request(sent)
            except NoReplyError:
                if attempt < self.tries - 1:
                    time.sleep(self.pause * 2**attempt)
                elif is_silent:  # an unreadable reply counts as a reply
                    raise
                continue
            is_silent, (found, complaint) = False, read(reply)
            best = best if found is None else found
            if not complaint:
                break
            sent = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": complaint}]
        return best

    def _read(self, request: urllib.request.Request) -> bytes:
        """Read a reply to its end, within the timeout for the whole reply."""
        end = time.monotonic() + self.timeout
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            parts: list[bytes] = []
            # urlopen's timeout applies to each read, so a server that sends single bytes would never exceed it.
            while part := response.read1(CHUNK):
                parts.append(part)
                if time.monotonic() > end:
                    raise TimeoutError(f"no reply in {self.timeout:g} seconds")
        return b"".join(parts)


def json_object(text: str) -> dict[str, object] | None:
    """Return the first JSON object in a text, ignoring other text around it."""
    for start in re.finditer(r"\{", text):
        try:
            value, _ = json.JSONDecoder().raw_decode(text, start.start())
        except (ValueError, RecursionError):
            continue
        return value
    return None


def workers_of(asked: object) -> int:
    """Return the number of parallel requests of an extractor or a judge; 1 if it has no `workers`."""
    return max(1, getattr(asked, "workers", 1))


def asked_at_once(asked: object) -> int:
    """Return the number of items after which replies are saved: a round of requests, or `AT_ONCE` without workers."""
    workers = workers_of(asked)
    return workers if workers > 1 else AT_ONCE


class FailureLimit:
    """Counts consecutive items without a reply, and ends a run after `SILENT` of them."""

    def __init__(self) -> None:
        self._unheard = 0

    def map(self, ask: Callable[[T], U], things: Sequence[T], workers: int = 1) -> list[U | None]:
        """Ask about each item, `workers` at a time; return None for items without a reply."""

        def one(thing: T) -> U | NoReplyError:
            try:
                return ask(thing)
            except NoReplyError as error:
                return error

        if workers == 1:  # an error ends the loop, so that nothing is asked after it
            replies = [one(thing) for thing in things]
        else:
            with ThreadPoolExecutor(max_workers=workers) as pool:
                replies = list(pool.map(one, things))
        for reply in replies:
            self._unheard = self._unheard + 1 if isinstance(reply, NoReplyError) else 0
        if self._unheard >= SILENT:
            raise InputError(
                f"There was no reply {self._unheard} times in a row: {replies[-1]} With out=, earlier replies are "
                "kept: the same call continues from there."
            )
        return [None if isinstance(reply, NoReplyError) else reply for reply in replies]
