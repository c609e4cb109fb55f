"""Requests and answers, as all interfaces have them.

An interface reads a body as an ``HttpAnswer``, which has an ``AnswerRequest``. ``AnswerWriter`` has the service write
its texts, and reports ``events``. The answer turns them into a document, or into the frames of a stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from p2ptrain import __version__
from p2ptrain.compute.text import Turn
from p2ptrain.core.serving import SamplingOptions
from roles.http.answers import Problem, json_bytes, missing, shutting_down, wrong
from roles.serving.texts import TextPiece, TextRequest, TokenizingService, Writing
from roles.serving.tool_calls import FORMATS, CallReader, Tool, ToolCall, call_grammar, explain_tools, json_grammar
from roles.verifier.http import events
from roles.verifier.http.bodies import MOST_TOOLS, AnswerFormat, JsonSchema, SamplingFields, check_schemas

AT_ONCE = 8
"""Texts of one request that are written at a time: half of the usual places of a verifier."""
MOST_TEXTS = 4096
_MISTRAL_ID_CHARS = 9


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``choice``: ``none``; ``auto``: the model may call tools; ``required``: it must. ``named``: the only one that it
    may call. ``has_many``: more than one call is allowed."""

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    named: str = ""
    has_many: bool = True


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A valid request.

    Attributes:
        texts: one per prompt, in order.
        choices: texts of each prompt in the answer: the likeliest of ``candidates``, if these are more.
        echo: the answer repeats the prompts.
        schema: the text is JSON that matches it.
    """

    model: str
    texts: tuple[TextRequest, ...]
    is_stream: bool
    choices: int = 1
    candidates: int = 1
    echo: bool = False
    tool_use: ToolUse = field(default_factory=ToolUse)
    schema: JsonSchema | None = None


@dataclass(frozen=True, slots=True)
class AnswerOrigin:
    """What an answer has that is not in its request: random ``digits`` for its id, a ``seed`` for a request without
    one, and the Unix time at which it was made."""

    digits: str
    seed: int
    created: int


def text_request(fields: SamplingFields, origin: AnswerOrigin, **more: Any) -> TextRequest:
    """A request without a text. ``more``: other fields."""
    bias = fields.logit_bias or {}
    if not all(token.isascii() and token.isdecimal() and len(token) < 10 for token in bias):
        raise wrong("logit_bias", "its keys must be token ids")
    sampling = SamplingOptions(
        **fields.model_dump(include={"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=tuple((int(token), value) for token, value in bias.items()),
        seed=origin.seed if fields.seed is None else fields.seed,
    )
    options: dict[str, Any] = {
        "sampling": sampling,
        "stop": (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        "stop_ids": tuple(fields.stop_token_ids or ()),
        "ignore_end": bool(fields.ignore_eos),
        "speculate": fields.speculate == "auto",
        "priority": fields.priority,
    }
    return TextRequest(**(options | more))


def read_schema(wanted: AnswerFormat | None, schema: JsonSchema | None, where: str) -> JsonSchema | None:
    """The JSON schema of an answer; ``schema``: that of the type ``json_schema``. Raises ``Problem``."""
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return JsonSchema(schema={"type": "object"})
    if schema is None:
        raise missing(where)
    check_schemas([(where, schema.schema_)])
    return schema


def read_tool_use(tools: Sequence[Tool], choice: str | None, named: str, *, is_parallel: bool | None) -> ToolUse:
    """What a body has about tools. ``is_parallel``: several calls are allowed, which is usual. Raises ``Problem``."""
    names = {tool.name for tool in tools}
    if len(tools) > MOST_TOOLS or len(names) < len(tools):
        raise wrong("tools", f"at most {MOST_TOOLS} tools are allowed, each with a name of its own")
    if (named and named not in names) or (choice == "required" and not tools):
        raise wrong("tool_choice", "tools has no such tool")
    check_schemas((f"tools.{index}", tool.parameters) for index, tool in enumerate(tools))
    return ToolUse(tuple(tools), choice or "auto", named, has_many=is_parallel is not False and not named)


# -------------------------------------------------------------------------------------------------------------- writing

Taker = Callable[[events.ChoiceEvent], Awaitable[None]]
_ENDED = {"stop": "stop", "end": "stop", "length": "length"}
"""``Writing.ended`` → OpenAI's reason, which is the same for a stop string and the model's own end."""


async def adapt_text(
    service: TokenizingService, text: TextRequest, use: ToolUse, schema: JsonSchema | None
) -> tuple[TextRequest, CallReader | None]:
    """Add tools and the format of the answer to a request, as the model's template needs them. Returns the request, and
    a reader of the calls if there may be some."""
    grammar = "" if schema is None else json_grammar(schema.schema_, is_strict=bool(schema.strict))
    if not text.turns:
        return replace(text, grammar=grammar), None
    tools = () if use.choice == "none" else use.tools
    form = FORMATS[service.tool_format if service.has_tools else "json"]
    turns = text.turns
    if not service.has_tools:
        turns = explain_tools(turns, tools)
    elif form.is_list:
        turns = tuple(_with_short_ids(turn) for turn in turns)
    is_forced = use.choice == "required" or bool(use.named)
    if is_forced or (tools and (grammar or any(tool.is_strict for tool in tools))):
        marks = {mark: await service.tokenize(mark, add_special=False) for mark in (form.begin, form.end) if mark}
        grammar = call_grammar(
            form,
            [tool for tool in tools if use.named in ("", tool.name)],
            is_forced=is_forced,
            has_many=use.has_many,
            answer=grammar,
            ids={mark: ids[0] for mark, ids in marks.items() if len(ids) == 1},
        )
    listed = json.dumps([tool.as_json() for tool in tools]) if tools and service.has_tools else ""
    reader = CallReader(form, {tool.name for tool in tools}) if tools else None
    return replace(text, turns=turns, tools=listed, grammar=grammar), reader


def _with_short_ids(turn: Turn) -> Turn:
    """A turn with ids of calls as Mistral's templates require them: nine letters."""

    def shorten(ident: str) -> str:
        return hashlib.blake2b(ident.encode("utf-8", "surrogatepass")).hexdigest()[:_MISTRAL_ID_CHARS]

    calls = [{**call, "id": shorten(call["id"])} for call in json.loads(turn.tool_calls or "[]")]
    ident = turn.tool_call_id and shorten(turn.tool_call_id)
    return replace(turn, tool_calls=json.dumps(calls) if calls else "", tool_call_id=ident)


class AnswerWriter:
    """Has a service write the texts of a request.

    Args:
        close: ends a writing, also if its task is cancelled.
        draw_id: makes the digits of a call's id.
    """

    def __init__(
        self,
        service: TokenizingService,
        request: AnswerRequest,
        *,
        close: Callable[[Writing], Awaitable[None]],
        draw_id: Callable[[], str],
    ) -> None:
        self._service, self._request = service, request
        self._close, self._draw_id = close, draw_id

    async def write(self, take: Taker) -> None:
        """Write all texts, ``AT_ONCE`` at a time, and have ``take`` take their events. Raises what the first one
        raises that fails; the others are ended."""
        candidates = self._request.candidates
        texts = (
            (index * candidates + number, text, number)
            for index, text in enumerate(self._request.texts)
            for number in range(candidates)
        )

        async def write_next() -> None:
            for index, text, number in texts:
                sampling = replace(text.sampling, seed=text.sampling.seed + number)
                await self._write_text(index, replace(text, sampling=sampling), take)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE, candidates * len(self._request.texts))):
                    group.create_task(write_next(), name="texts of a request")
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def write_best(self, note: Callable[[events.ChoiceEvent], None]) -> list[events.WrittenChoice]:
        """The choices of all prompts, in order: of each prompt the likeliest candidates, by the mean log-probability of
        their tokens. ``note`` is called with each event. Raises as ``write``."""
        candidates, choices = self._request.candidates, self._request.choices
        texts = [events.WrittenChoice() for _ in range(candidates * len(self._request.texts))]

        async def take(event: events.ChoiceEvent) -> None:
            note(event)
            texts[event.index].events.append(event)

        await self.write(take)
        groups = (texts[start : start + candidates] for start in range(0, len(texts), candidates))
        if candidates > choices:
            groups = (sorted(group, key=lambda text: -text.mean_logprob)[:choices] for group in groups)
        return [text for group in groups for text in group]

    async def _write_text(self, index: int, text: TextRequest, take: Taker) -> None:
        adapted, reader = await adapt_text(self._service, text, self._request.tool_use, self._request.schema)
        writing = await self._service.write(adapted)
        try:
            async with aclosing(self._events(index, adapted, writing, reader)) as stream:
                async for event in stream:
                    await take(event)
        finally:
            await self._close(writing)

    async def _events(
        self, index: int, text: TextRequest, writing: Writing, reader: CallReader | None
    ) -> AsyncGenerator[events.ChoiceEvent, None]:
        yield events.ChoiceBegan(index, writing.prompt_tokens, writing.left_out)
        echoes, calls = self._request.echo, 0
        async for piece in _with_end(writing):
            if echoes:
                echoes = False
                prompt = text.prompt or await self._service.detokenize(text.ids)
                scored = tuple(writing.prompt_logprobs)
                yield events.TextAdded(index, prompt, writing.prompt_ids, scored, is_prompt=True)
            if reader is None:
                parts: list[str | ToolCall] = [piece.text] if piece is not None else []
            else:
                parts = reader.feed(piece.text) if piece is not None else reader.finish()
            if piece is not None:
                first = parts.pop(0) if parts and isinstance(parts[0], str) else ""
                yield events.TextAdded(index, str(first), piece.tokens, piece.logprobs)
            for part in parts:
                if isinstance(part, str):
                    yield events.TextAdded(index, part)
                    continue
                yield events.CallAdded(index, calls, self._draw_id(), part.name, part.arguments)
                calls += 1
                if not self._request.tool_use.has_many:
                    yield events.ChoiceEnded(index, "tool_calls")
                    return
        if (reason := _ENDED.get(writing.ended)) is None:
            raise shutting_down()
        yield events.ChoiceEnded(index, "tool_calls" if calls and reason == "stop" else reason, writing.stop_reason)


async def _with_end(writing: Writing) -> AsyncIterator[TextPiece | None]:
    async for piece in writing:
        yield piece
    yield None


# -------------------------------------------------------------------------------------------------------------- answers


class HttpAnswer(ABC):
    """The answer to one request, in the form of an interface.

    Attributes:
        service: writes the texts; set before they are written.
    """

    service: TokenizingService

    def __init__(self, request: AnswerRequest, origin: AnswerOrigin) -> None:
        self.request, self.origin = request, origin
        self.prompt_tokens = self.new_tokens = 0

    def count(self, event: events.ChoiceEvent) -> None:
        """Add up tokens. A prompt counts once, however many texts follow it."""
        if isinstance(event, events.ChoiceBegan) and event.index % self.request.candidates == 0:
            self.prompt_tokens += event.prompt_tokens
        elif isinstance(event, events.TextAdded) and not event.is_prompt:
            self.new_tokens += len(event.tokens)

    @abstractmethod
    def whole(self, choices: Sequence[events.WrittenChoice]) -> dict[str, Any]:
        """The document of a complete answer."""

    @abstractmethod
    def frames(self, event: events.ChoiceEvent) -> Iterator[bytes]:
        """Frames of a stream."""

    @abstractmethod
    def last_frames(self) -> Iterator[bytes]:
        """The end of a stream whose texts are complete."""

    def error_frame(self, problem: Problem) -> bytes:
        return frame(problem.as_json())


class OneTextAnswer(HttpAnswer):
    """The answer of an interface that has one text, and whose frames build the document."""

    def whole(self, choices: Sequence[events.WrittenChoice]) -> dict[str, Any]:
        for event in choices[0].events:
            deque(self.frames(event), maxlen=0)
        return self.document()

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """The document as far as the frames have come."""


def frame(document: Mapping[str, Any], name: str = "") -> bytes:
    """An event of a stream."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + json_bytes(document) + b"\n\n"


def fingerprint(service: TokenizingService) -> str:
    """A digest of what may change the text: the model's files and the version of this program."""
    identity = f"{__version__}\n{service.model}\n{service.created}"
    return "fp_" + hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
