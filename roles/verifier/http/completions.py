"""``POST /v1/completions``: texts that continue prompts."""

from __future__ import annotations

from abc import abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from p2ptrain.core.serving import MOST_TOP_LOGPROBS, TokenLogprob
from roles.http.answers import wrong
from roles.serving.texts import TokenizingService
from roles.verifier.http import bodies, events
from roles.verifier.http.answer import (
    MOST_TEXTS,
    AnswerOrigin,
    HttpAnswer,
    fingerprint,
    frame,
    read_format,
    text_request,
)

DONE = b"data: [DONE]\n\n"
MOST_CHOICES = 128
MOST_ECHOED = 1 << 23
"""A bound on what ``echo`` repeats: each of these may take a hundred bytes of memory until the answer is sent."""
LOWEST_LOGPROB = -9999.0


class OpenAiFields(bodies.SamplingFields):
    """What bodies of completions and chats share."""

    max_tokens: int | None = Field(default=None, ge=0)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    response_format: bodies.AnswerFormat | None = None

    def most_tokens(self) -> int | None:
        """Raises ``Problem``: two limits."""
        named = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(named) > 1:
            raise wrong("max_tokens", "max_completion_tokens is its new name, and has another value")
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "allowed only if stream is true")
        return max(named) if named else None

    def grammar(self) -> str:
        return read_format(self.response_format, "response_format.json_schema")


class CompletionFields(OpenAiFields):
    prompt: (
        str
        | Annotated[list[bodies.TokenId], Field(min_length=1, fail_fast=True)]
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[
            list[Annotated[list[bodies.TokenId], Field(min_length=1, fail_fast=True)]],
            Field(min_length=1, fail_fast=True),
        ]
    )
    best_of: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP_LOGPROBS)


class OpenAiAnswer(HttpAnswer):
    """What completions and chats share: usage, choices, and the end of a stream.

    Attributes:
        prefix: of the id. kind, frame_kind: names of the document and of a frame.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    frame_kind: ClassVar[str]

    @abstractmethod
    def parts(self, event: events.ChoiceEvent) -> Iterator[dict[str, Any]]:
        """What an event adds to its choice, as in a frame."""

    def part(self, event: events.ChoiceEvent, logprobs: object = None, **content: Any) -> dict[str, Any]:
        end: dict[str, Any] = {"finish_reason": None}
        if isinstance(event, events.ChoiceEnded):
            end = {"finish_reason": event.reason, "stop_reason": event.stop_reason}
        return {"index": event.index, **content, "logprobs": logprobs, **end}

    def frames(self, event: events.ChoiceEvent) -> Iterator[bytes]:
        for part in self.parts(event):
            yield frame(self._document(self.frame_kind, [part]) | ({"usage": None} if self.has_usage else {}))

    def whole(self, choices: Sequence[Sequence[events.ChoiceEvent]]) -> dict[str, Any]:
        listed = list[dict[str, Any]]()
        for index, written in enumerate(choices):
            choice = dict[str, Any]()
            for event in written:
                for part in self.parts(event):
                    _add(choice, part)
            listed.append(choice | {"index": index})
        return self._document(self.kind, listed) | {"usage": self._usage()}

    def last_frames(self) -> Iterator[bytes]:
        if self.has_usage:
            yield frame(self._document(self.frame_kind, []) | {"usage": self._usage()})
        yield DONE

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.origin.digits}",
            "object": kind,
            "created": self.origin.created,
            "model": self.service.model,
            "system_fingerprint": fingerprint(self.service.model, self.service.created),
            "choices": choices,
        }

    def _usage(self) -> dict[str, int]:
        prompt, new = self.prompt_tokens, self.new_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add the next part of a choice to those before: texts and lists grow."""
    for name, value in part.items():
        before = whole.get(name)
        if isinstance(value, dict):
            before = before or {}
            _add(before, value)
        elif before is None:
            before = value
        elif value is not None:
            before += value
        whole[name] = before


class CompletionAnswer(OpenAiAnswer):
    prefix, kind, frame_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: bytes, origin: AnswerOrigin) -> None:
        fields = bodies.read_body_of(CompletionFields, body)
        listed = fields.prompt if isinstance(fields.prompt, list) else [fields.prompt]
        prompts = [listed] if isinstance(listed[0], int) else listed
        choices, most = fields.n or 1, fields.most_tokens()
        candidates = max(choices, fields.best_of or 1)
        if fields.best_of is not None and (fields.best_of < choices or (fields.stream and candidates > choices)):
            raise wrong("best_of", "must be at least n, and in a stream not more")
        if len(prompts) * candidates > MOST_TEXTS:
            raise wrong("prompt", f"at most {MOST_TEXTS} texts are written for a request: send several")
        if most == 0 and not fields.echo:
            raise wrong("max_tokens", "0 is allowed only with echo")
        size = sum(map(len, prompts)) * candidates * (1 + (fields.logprobs or 0))
        if fields.echo and size > MOST_ECHOED:
            raise wrong("echo", f"characters x texts x log-probabilities are {size}, more than {MOST_ECHOED}")
        is_scored = bool(fields.echo) and (fields.logprobs is not None or most == 0)
        needs_logprobs = is_scored or candidates > choices
        text = text_request(
            fields,
            origin,
            max_new_tokens=most,
            logprobs=0 if fields.logprobs is None and needs_logprobs else fields.logprobs,
            prompt_logprobs=is_scored,
            grammar=fields.grammar(),
        )
        texts = [
            replace(text, prompt=prompt) if isinstance(prompt, str) else replace(text, ids=tuple(prompt))
            for prompt in prompts
        ]
        super().__init__(fields, origin, texts, choices=choices, candidates=candidates, echo=bool(fields.echo))
        self._has_logprobs = fields.logprobs is not None
        self._tables = dict[int, LogprobTable]()

    def parts(self, event: events.ChoiceEvent) -> Iterator[dict[str, Any]]:
        if isinstance(event, events.ChoiceEnded):
            yield self.part(event, text="")
        elif isinstance(event, events.TextAdded):
            logprobs = None
            if self._has_logprobs:
                table = self._tables.setdefault(event.index, LogprobTable(self.service))
                logprobs = table.rows(event.tokens, event.logprobs)
            if event.text or (logprobs and event.tokens):
                yield self.part(event, logprobs, text=event.text)


class LogprobTable:
    """Tokens of one text with their log-probabilities, in the form of completions: a list for each property."""

    def __init__(self, service: TokenizingService) -> None:
        self._service = service
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def rows(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, list[Any]]:
        """The next tokens. The likeliest ones include the token itself, as in OpenAI's answers."""
        offsets = list[int]()
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._service.token_bytes(token)))
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [each and finite(each.logprob) for each in logprobs],
            "top_logprobs": [
                each and {self._name(token): finite(value) for token, value in (*each.top, (each.token, each.logprob))}
                for each in logprobs
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """Text of a token; of an incomplete character its bytes."""
        data = self._service.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """A log-probability as JSON has it: of an impossible token a number that is low enough."""
    return max(logprob, LOWEST_LOGPROB)
