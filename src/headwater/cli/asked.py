"""What `--extract` and `--judge` name: rules, a loaded model, or an OpenAI-compatible endpoint with its key."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from headwater.cli.offered import Shaped
from headwater.errors import InputError

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel
    from headwater.questions.endpoint import ChatEndpoint
    from headwater.questions.extract import EndpointExtractor
    from headwater.questions.judge import EndpointJudge

    E = TypeVar("E", bound=ChatEndpoint)
ENDPOINT = '"URL MODEL [VARIABLE]" of an OpenAI-compatible endpoint, with the environment variable that holds its key'


def _endpoint(kind: type[E], words: list[str]) -> E:
    return kind(words[0], words[1], key_from=words[2] if len(words) == 3 else None)


def _is_address(words: list[str]) -> bool:
    return len(words) in (2, 3) and words[0].startswith(("http://", "https://"))


def extractor_named(given: str) -> str | EndpointExtractor | HookedModel:
    """Return the extractor that `--extract` names."""
    from headwater.questions.extract import EXTRACTORS, EndpointExtractor

    words = given.split()
    if _is_address(words):
        return _endpoint(EndpointExtractor, words)
    if len(words) == 2 and words[0] == "model":
        from headwater.models.loading import load

        return load(words[1])
    if len(words) != 1:
        raise InputError(f'--extract {given!r} is no name, no "model FOLDER" and no "URL MODEL [VARIABLE]".')
    EXTRACTORS[words[0]]
    return words[0]


def judge_named(given: str) -> str | EndpointJudge:
    """Return the judge that `--judge` names."""
    from headwater.questions.judge import LABEL, EndpointJudge

    words = given.split()
    if words == [LABEL]:
        return LABEL
    if _is_address(words):
        return _endpoint(EndpointJudge, words)
    raise InputError(f'--judge {given!r} is neither "label" nor "URL MODEL [VARIABLE]" of an endpoint.')


EXTRACTOR = Shaped(
    "extractor",
    str,
    name="extract",
    help='What names the exact words: rules; model (the model itself, shown examples); "model FOLDER", another one; or '
    f"{ENDPOINT}. Without it the exact answer is all of the answer.",
    read=extractor_named,
)
JUDGE = Shaped(
    "judge",
    str,
    help=f"What scores answers, whatever scores the data hold: label, for label match, 5 or 1; or {ENDPOINT}.",
    read=judge_named,
)
