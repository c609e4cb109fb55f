"""Requests and answers, as all interfaces have them.

An interface reads a body as an ``HttpAnswer``. It has the service write its texts, and turns the ``events`` of writing
into a document, or into the frames of a stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from p2ptrain import __version__
from p2ptrain.compute.text import Turn
from p2ptrain.core.serving import SamplingOptions
from roles.http.answers import Problem, json_bytes, missing, shutting_down, wrong
from roles.serving.texts import TextPiece, TextRequest, TokenizingService, Writing
from roles.serving.tool_calls import FORMATS, CallReader, Tool, ToolCall, call_grammar, explain_tools, json_grammar
from roles.verifier.http import events
from roles.verifier.http.bodies import MOST_TOOLS, AnswerFormat, FunctionFields, SamplingFields, check_schemas

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


NO_TOOLS = ToolUse()


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


def read_format(wanted: AnswerFormat | None, where: str, *, is_strict: bool | None = None) -> str:
    """The grammar of an answer; empty: it is free. ``where``: the schema's place. ``is_strict``: None: the format says
    so. Raises ``Problem``."""
    if wanted is None or wanted.type == "text":
        return ""
    if wanted.type == "json_object":
        return json_grammar({"type": "object"}, is_strict=False)
    found = wanted.json_schema or wanted
    schema = {} if found.schema_ is None and wanted.json_schema else found.schema_
    if schema is None:
        raise missing(where)
    check_schemas([(where, schema)])
    return json_grammar(schema, is_strict=bool(found.strict if is_strict is None else is_strict))


def read_tool_use(
    functions: Sequence[FunctionFields],
    where: str,
    choice: str | FunctionFields | None = None,
    *,
    is_parallel: bool | None = None,
) -> ToolUse:
    """What a body has about tools. Raises ``Problem``.

    Args:
        where: place of the arguments' schema in a tool.
        choice: as of ``ToolUse``, or the function that the model must call.
        is_parallel: several calls are allowed, which is usual.
    """
    tools = tuple(function.tool(f"tools.{index}.{where}") for index, function in enumerate(functions))
    names, named = {tool.name for tool in tools}, choice.name if isinstance(choice, FunctionFields) else ""
    if len(tools) > MOST_TOOLS or len(names) < len(tools):
        raise wrong("tools", f"at most {MOST_TOOLS} tools are allowed, each with a name of its own")
    if (named and named not in names) or (choice == "required" and not tools):
        raise wrong("tool_choice", "tools has no such tool")
    check_schemas((f"tools.{index}", tool.parameters) for index, tool in enumerate(tools))
    kind = choice if isinstance(choice, str) else "auto"
    return ToolUse(tools, kind, named, has_many=is_parallel is not False and not named)


# -------------------------------------------------------------------------------------------------------------- writing

Taker = Callable[[events.ChoiceEvent], Awaitable[None]]
_ENDED = {"stop": "stop", "end": "stop", "length": "length"}
"""``Writing.ended`` → OpenAI's reason, which is the same for a stop string and the model's own end."""


async def adapt_text(
    service: TokenizingService, text: TextRequest, use: ToolUse
) -> tuple[TextRequest, CallReader | None]:
    """Add tools to a request, as the model's template needs them. Returns the request, and a reader of the calls if
    there may be some."""
    if not text.turns:
        return text, None
    grammar = text.grammar
    tools = () if use.choice == "none" else use.tools
    form, has_tools, turns = FORMATS[service.form.tool_format], service.form.has_tools, text.turns
    if not has_tools:
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
    listed = json.dumps([tool.as_json() for tool in tools]) if tools and has_tools else ""
    reader = CallReader(form, {tool.name for tool in tools}) if tools else None
    return replace(text, turns=turns, tools=listed, grammar=grammar), reader


def _with_short_ids(turn: Turn) -> Turn:
    """A turn with ids of calls as Mistral's templates require them: nine letters."""

    def shorten(ident: str) -> str:
        return hashlib.blake2b(ident.encode("utf-8", "surrogatepass")).hexdigest()[:_MISTRAL_ID_CHARS]

    calls = [{**call, "id": shorten(call["id"])} for call in json.loads(turn.tool_calls or "[]")]
    ident = turn.tool_call_id and shorten(turn.tool_call_id)
    return replace(turn, tool_calls=json.dumps(calls) if calls else "", tool_call_id=ident)


class HttpAnswer(ABC):
    """The answer to one request, in the form of an interface.

    Args:
        texts: one per prompt, in order.
        choices: texts of each prompt in the answer: the likeliest of ``candidates``, if these are more.
        echo: the answer repeats the prompts.

    Attributes:
        service: writes the texts; set before they are written.
        has_usage: a stream shall have the number of tokens.
        left_out: turns of the conversation that did not fit the context.
    """

    service: TokenizingService

    def __init__(
        self,
        fields: SamplingFields,
        origin: AnswerOrigin,
        texts: Sequence[TextRequest],
        tool_use: ToolUse = NO_TOOLS,
        *,
        choices: int = 1,
        candidates: int = 1,
        echo: bool = False,
    ) -> None:
        self.model, self.is_stream, self.origin = fields.model, bool(fields.stream), origin
        self.texts, self.tool_use = texts, tool_use
        self.has_usage = fields.stream_options is not None and bool(fields.stream_options.include_usage)
        self._choices, self._candidates, self._echo = choices, candidates, echo
        self.prompt_tokens = self.new_tokens = self.left_out = 0

    # ---------------------------------------------------------------------------------------------------------- writing

    async def write(self, take: Taker) -> None:
        """Write all texts, ``AT_ONCE`` at a time, and have ``take`` take their events. Raises what the first one
        raises that fails; the others are ended."""
        texts = (
            (index * self._candidates + number, text, number)
            for index, text in enumerate(self.texts)
            for number in range(self._candidates)
        )

        # By prompt: its first text has a piece, so the others find the prompt's blocks in the cache.
        is_computed = [asyncio.Event() for _ in self.texts]

        async def take_event(event: events.ChoiceEvent) -> None:
            if not isinstance(event, events.ChoiceBegan):
                is_computed[event.index // self._candidates].set()
            await take(event)

        async def write_next() -> None:
            for index, text, number in texts:
                if number:
                    await is_computed[index // self._candidates].wait()
                sampling = replace(text.sampling, seed=text.sampling.seed + number)
                await self._write_text(index, replace(text, sampling=sampling), take_event)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE, self._candidates * len(self.texts))):
                    group.create_task(write_next(), name="texts of a request")
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def write_best(self) -> list[list[events.ChoiceEvent]]:
        """The events of the choices of all prompts, in order: of each prompt the likeliest candidates, by the mean
        log-probability of their tokens. Raises as ``write``."""
        candidates, choices = self._candidates, self._choices
        texts = [list[events.ChoiceEvent]() for _ in range(candidates * len(self.texts))]

        async def take(event: events.ChoiceEvent) -> None:
            texts[event.index].append(event)

        await self.write(take)
        groups = (texts[start : start + candidates] for start in range(0, len(texts), candidates))
        if candidates > choices:
            groups = (sorted(group, key=events.mean_logprob, reverse=True)[:choices] for group in groups)
        return [text for group in groups for text in group]

    async def _write_text(self, index: int, text: TextRequest, take: Taker) -> None:
        text, reader = await adapt_text(self.service, text, self.tool_use)
        writing = await self.service.write(text)
        try:
            await self._read_text(index, text, writing, reader, take)
        finally:
            await writing.close()

    async def _read_text(
        self, index: int, text: TextRequest, writing: Writing, reader: CallReader | None, take: Taker
    ) -> None:
        if index % self._candidates == 0:  # a prompt counts once, however many texts follow it
            self.prompt_tokens += writing.prompt_tokens
        self.left_out = max(self.left_out, writing.left_out)
        await take(events.ChoiceBegan(index))
        echoes, calls = self._echo, 0
        async for piece in _with_end(writing):
            if echoes:
                echoes = False
                prompt = text.prompt or await self.service.detokenize(text.ids)
                scored = tuple(writing.prompt_logprobs)
                await take(events.TextAdded(index, prompt, writing.prompt_ids, scored, is_prompt=True))
            if reader is None:
                parts: list[str | ToolCall] = [piece.text] if piece is not None else []
            else:
                parts = reader.feed(piece.text) if piece is not None else reader.finish()
            if piece is not None:
                self.new_tokens += len(piece.tokens)
                first = parts.pop(0) if parts and isinstance(parts[0], str) else ""
                await take(events.TextAdded(index, str(first), piece.tokens, piece.logprobs))
            for part in parts:
                if isinstance(part, str):
                    await take(events.TextAdded(index, part))
                    continue
                ident = f"{self.origin.digits}{index:03x}{calls:x}"
                await take(events.CallAdded(index, calls, ident, part.name, part.arguments))
                calls += 1
                if not self.tool_use.has_many:
                    await take(events.ChoiceEnded(index, "tool_calls"))
                    return
        if (reason := _ENDED.get(writing.ended)) is None:
            raise shutting_down()
        reason = "tool_calls" if calls and reason == "stop" else reason
        await take(events.ChoiceEnded(index, reason, writing.stop_reason))

    # ------------------------------------------------------------------------------------------------------------ forms

    @abstractmethod
    def whole(self, choices: Sequence[Sequence[events.ChoiceEvent]]) -> dict[str, Any]:
        """The document of a complete answer; ``choices``: as of ``write_best``."""

    @abstractmethod
    def frames(self, event: events.ChoiceEvent) -> Iterator[bytes]:
        """Frames of a stream."""

    @abstractmethod
    def last_frames(self) -> Iterator[bytes]:
        """The end of a stream whose texts are complete."""

    def error_frame(self, problem: Problem) -> bytes:
        return frame(problem.as_json())


async def _with_end(writing: Writing) -> AsyncIterator[TextPiece | None]:
    async for piece in writing:
        yield piece
    yield None


Question = tuple[str | None, Callable[[TokenizingService], Awaitable[dict[str, Any]]]]
"""A model, None for the first one, and a question to it that needs no text to be written."""


async def prompt_of(service: TokenizingService, text: TextRequest, use: ToolUse) -> list[int]:
    """Token ids of the prompt of a conversation's next answer."""
    adapted, _ = await adapt_text(service, text, use)
    return await service.tokenize_turns(adapted.turns, adapted.tools)


class OneTextAnswer(HttpAnswer):
    """The answer of an interface that has one text, and whose frames build the document."""

    def whole(self, choices: Sequence[Sequence[events.ChoiceEvent]]) -> dict[str, Any]:
        for event in choices[0]:
            deque(self.frames(event), maxlen=0)
        return self.document()

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """The document as far as the frames have come."""


def frame(document: Mapping[str, Any], name: str = "") -> bytes:
    """An event of a stream."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + json_bytes(document) + b"\n\n"


@cache
def fingerprint(model: str, created: int) -> str:
    """A digest of what may change the text: the model's files and the version of this program."""
    identity = f"{__version__}\n{model}\n{created}"
    return "fp_" + hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
