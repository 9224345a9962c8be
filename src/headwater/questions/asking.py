"""Ask a model questions: the prompt around each question, and the generated answer.

1. Frame: the text before and after a question. In a raw context it is a prompt, by default `Q: {question}` and `A:` on
   the next line; the answer follows after a space. In a chat, the question is a user message in the tokenizer's chat
   template, and the answer follows directly; other messages can be passed, one of which contains the question. If a
   template rejects or drops a system message, its text moves to the beginning of the next message.
   Answered examples (`EXAMPLES`) may come first: in a raw context in the same prompt, a blank line after each; in a
   chat as turns, after an instruction to answer in a few words.
2. Greedy generation (`models.generation`), shortest prompts first, up to a special token such as the end token, or up
   to the first line break, which may be part of a token. The log-probability of every token is kept.
3. A prompt that leaves no room for an answer is not asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from headwater.errors import InputError
from headwater.models.edits import Hook, PromptHook
from headwater.models.generation import end_tokens, generate_tokens
from headwater.models.hooked import HookedModel, warn_of_no_template
from headwater.models.tokens import ChatText, by_length, chat_text, encode
from headwater.options import checked_count, checked_name, shown
from headwater.runs.analysis import Run

RAW, CHAT = CONTEXTS = ("raw", "chat")
PROMPT = "Q: {question}\nA:"
SLOT = "{question}"
EXAMPLES = (
    ("What is the capital of Portugal?", "Lisbon"),
    ("who wrote the novel middlemarch", "George Eliot"),
    ("In which year did the Titanic sink?", "1912"),
    ("Were Marie Curie and Niels Bohr both physicists?", "yes"),
)
"""Answered questions that show the model how short answers should be."""
BRIEFLY = "Answer each question with a name, a number or a few words only, never with a sentence."
ROOM = 4
"""Default examples may fill at most 1 / ROOM of the context."""
LIMITS = {False: 32, True: 64}
"""Default token limit of an answer in a raw prompt, and in a chat. Of 64 answers in chats of SmolLM2-135M-Instruct to
questions of four sets, 8 have more than 32 tokens, and one has more than 64."""
Example: TypeAlias = tuple[str, str]
"""A question and its answer."""
Messages: TypeAlias = Sequence[Mapping[str, str]]
"""The messages of a chat, each with `role` and `content`."""


class Frame(NamedTuple):
    """The text before a question, the text after it, and the text that joins an answer to it."""

    before: str
    after: str
    joint: str
    is_chat: bool = False

    def asking(self, question: str) -> str:
        """Return the prompt of a question, up to the point where the model answers."""
        text = f"{self.before}{question}{self.after}"
        return ChatText(text) if self.is_chat else text


class WrittenAnswer(NamedTuple):
    """The generated continuation of a prompt."""

    tokens: list[int]
    """The new tokens, without the end token."""
    log_probs: list[float]
    """Log-probability of each new token."""
    ended: bool
    """Whether it ended by itself, not at the token limit."""


def question_frame(
    model: HookedModel,
    context: str | None = None,
    prompt: str | Messages | None = None,
    examples: Sequence[Example] = (),
) -> Frame:
    """Return the frame of a context, "raw" or "chat"; None selects a chat if there is a template and no prompt.

    In a raw context, the prompt is a text with one `{question}`; in a chat, it is messages with one `{question}` in
    total. Examples come before it in the same prompt, or as turns of a chat without messages.
    """
    if context is None:
        context = CHAT if prompt is None and getattr(model.tokenizer, "chat_template", None) else RAW
    if checked_name("context", context, CONTEXTS) == CHAT:
        if examples and prompt is None:
            # As turns, after the instruction to be brief.
            turns = [("system", BRIEFLY)]
            for question, answer in examples:
                turns += [("user", question), ("assistant", answer)]
            prompt = [{"role": role, "content": text} for role, text in (*turns, ("user", SLOT))]
        return _chat(model, prompt)
    if prompt is None:
        warn_of_no_template(model, [PROMPT])
        prompt = PROMPT
    if not isinstance(prompt, str) or prompt.count(SLOT) != 1:
        raise InputError(f"prompt must be a text with {SLOT} in it exactly once, found {shown(prompt)}.")
    before, after = prompt.split(SLOT)
    # Example answers are joined like the model's answer, whose first token contains the space.
    joint = "" if after.endswith((" ", "\n")) else " "
    shown_first = "".join(f"{before}{question}{after}{joint}{answer}\n\n" for question, answer in examples)
    return Frame(shown_first + before, after, joint)


def answering_frame(model: HookedModel, prompt: str | None, examples: Sequence[Example] | None) -> Frame:
    """Return the frame for `hw.answer`: without examples= and prompt= with `EXAMPLES`, if there is `ROOM`."""
    if examples is not None or prompt is not None:
        return question_frame(model, prompt=prompt, examples=_checked(() if examples is None else examples))
    frame = question_frame(model, examples=EXAMPLES)
    tokens, _ = encode(model.tokenizer, frame.before, model.bos)  # type: ignore[arg-type]
    # Counted with the model's tokenizer; the contexts of the embedded models are too short for examples.
    return frame if ROOM * len(tokens) <= model.shape.n_ctx else question_frame(model)


def limit_of(model: HookedModel, frame: Frame, requested: int | None) -> int:
    """Return the requested token limit of an answer, or the default; a chat's only if the context has room for it."""
    if requested is not None:
        return checked_count("max_new_tokens", requested, most=model.shape.n_ctx - 1)
    has_room = ROOM * LIMITS[True] <= model.shape.n_ctx
    return LIMITS[frame.is_chat and has_room]


def _checked(examples: Sequence[Example]) -> list[Example]:
    for pair in examples if isinstance(examples, list | tuple) else [examples]:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise InputError(
                f"examples must be pairs of a question and its answer, as [('What is ...?', 'Lisbon')]; found "
                f"{shown(pair)}."
            )
    return [(question.strip(), answer.strip()) for question, answer in examples]


def _chat(model: HookedModel, messages: Any) -> Frame:
    listed = messages if isinstance(messages, list | tuple) else []
    texts = [isinstance(one, Mapping) and isinstance(one.get(k), str) for one in listed for k in ("role", "content")]
    if messages is not None and not (texts and all(texts)):
        raise InputError(
            f"prompt={shown(messages)} must be messages, a list of {{'role': ..., 'content': ...}}; a text belongs to "
            "context='raw'."
        )
    written = _written_chat(model.tokenizer, messages) if model.tokenizer is not None else None
    if written is None:
        raise InputError(f"The tokenizer of {model.name} has no chat template.")
    if written.count(SLOT) != 1:
        raise InputError(f"{model.name}'s chat template does not write a message out exactly once; pass prompt=.")
    before, after = written.split(SLOT)
    return Frame(before, after, "", is_chat=True)


def _written_chat(tokenizer: Any, messages: Messages | None) -> str | None:
    """Apply the chat template; if it takes no system message, prepend that message to the next one."""
    if messages is None:
        return chat_text(tokenizer, SLOT)
    has_system = len(messages) > 1 and messages[0].get("role") == "system"
    written = None
    try:
        written = chat_text(tokenizer, messages)
    except InputError:
        if not has_system:
            raise
    # Some templates raise on a system message, others drop it silently, so the result is searched for it.
    if not has_system or (written is not None and messages[0]["content"].strip() in written):
        return written
    system, first, *others = messages
    return chat_text(tokenizer, [{**first, "content": f"{system['content']}\n{first['content']}"}, *others])


def ask(
    run: Run,
    model: HookedModel,
    prompts: Mapping[int, Sequence[int]],
    max_new_tokens: int,
    until: Literal["line", "end"],
    batch_size: int,
    hooks: Sequence[Hook | PromptHook] = (),
    stage: str = "answers",
) -> Iterator[list[tuple[int, WrittenAnswer]]]:
    """Generate continuations of prompts batch by batch, shortest prompts first, or reuse those of an interrupted run.

    `prompts` maps row numbers to token ids. Prompts that leave no room for `max_new_tokens`, including the end token or
    line break, are skipped. An answer ends at its first line break ("line"), or where the model ends it ("end"). Hooks
    act at every step; `now_reading().rows` (`headwater.models.forward`) identifies rows by these numbers. A run that
    asks several times names each `stage`.

    Yields:
        The row numbers of a batch, each with its continuation.
    """
    tokenizer: Any = model.tokenizer
    ends = answer_ends(model)

    @cache  # decodes each token of the vocabulary once; many tokens may contain a line break
    def is_end(token: int) -> bool:
        return token in ends or (until == "line" and "\n" in tokenizer.decode([token]))

    # Prompts are never truncated, because a shortened prompt asks another question.
    fitting = [place for place, tokens in prompts.items() if len(tokens) + max_new_tokens <= model.shape.n_ctx]
    order = by_length([len(prompts[place]) for place in fitting], batch_size)
    batches = [[fitting[i] for i in batch] for batch in order]

    def compute(places: Sequence[int]) -> dict[str, Tensor]:
        batch = model.tokenize([list(prompts[place]) for place in places]).named(places)
        return dict(vars(generate_tokens(model, batch, max_new_tokens=max_new_tokens, stop=is_end, hooks=hooks)))

    with run.bar("Answering", "question", len(fitting)) as bar:
        for places, piece in zip(batches, run.pieces(stage, batches, compute, bar, len), strict=True):
            yield [(place, _written(piece, row, ends)) for row, place in enumerate(places)]


class AnswerText(NamedTuple):
    """A generated answer."""

    text: str
    ended: bool
    """Whether it ended by itself, not at the token limit."""


def answer_texts(
    run: Run,
    model: HookedModel,
    prompts: Sequence[str],
    max_new_tokens: int,
    until: Literal["line", "end"],
    batch_size: int,
    stage: str = "answers",
) -> dict[str, AnswerText]:
    """Return the model's answers to distinct prompts, stripped of spaces; skip prompts that leave no room."""
    ids = {place: encode(model.tokenizer, text, model.bos)[0] for place, text in enumerate(prompts)}  # type: ignore[arg-type]
    answers = {}
    for batch in ask(run, model, ids, max_new_tokens, until, batch_size, stage=stage):
        for place, written in batch:
            text = plain_text(model, ids[place], written.tokens)
            line = text.split("\n", 1)[0] if until == "line" else text
            answers[prompts[place]] = AnswerText(line.strip(), written.ended)
    return answers


def answer_ends(model: HookedModel) -> frozenset[int]:
    """Return the tokens that end an answer and are not part of it: end tokens and all other special tokens.

    Other special tokens begin another turn or document, such as SmolLM2-Instruct's `<|endoftext|>`.
    """
    return end_tokens(model) | frozenset(getattr(model.tokenizer, "all_special_ids", ()))


def _written(generated: Mapping[str, Tensor], row: int, ends: frozenset[int]) -> WrittenAnswer:
    tokens = generated["tokens"][row, : generated["lengths"][row]].tolist()
    # The token with the line break is kept, because it may begin with text of the answer.
    tokens = tokens[:-1] if tokens[-1] in ends else tokens
    return WrittenAnswer(tokens, generated["log_probs"][row, : len(tokens)].tolist(), bool(generated["stopped"][row]))


def plain_text(model: HookedModel, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Decode tokens as the continuation of a prompt, without special tokens."""
    tokenizer: Any = model.tokenizer
    before = tokenizer.decode(prompt[-1:], skip_special_tokens=True)
    return str(tokenizer.decode([*prompt[-1:], *tokens], skip_special_tokens=True)[len(before) :])
