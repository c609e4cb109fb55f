"""Requests over HTTP: the bodies of OpenAI's requests, as far as they apply here.

There are three kinds of parameters. Obeyed ones are fields. Those that do not change the text are ignored
(``IGNORED``). All others are refused with the reason, except for values that request nothing (``NOT_OBEYED``): ignoring
a parameter that changes the text would be worse than a refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from p2ptrain.compute.text import Turn
from p2ptrain.core.errors import NetworkError, P2PTrainError, PeerError, Refused, ResourceError, TooLong, UserError
from p2ptrain.core.serving import MOST_TOP_K, SamplingOptions
from p2ptrain.core.texts import shortened
from roles.http.answers import RETRY_AFTER_S, Problem, read_model, wrong
from roles.serving.texts import TextRequest
from wire.text_messages import MOST_PRIORITY

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "parallel_tool_calls",
        "prediction",
        "reasoning_effort",
        "verbosity",
    }
)
"""Parameters for OpenAI's own service, and hints: the text is the same without them."""
_PICKED = "tokens are sampled by temperature, top_k and top_p only"
_TEXT_ONLY = "only text is supported"
_NO_TOOLS = "this endpoint has no tools"
NOT_OBEYED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "each prompt gets one text; ask again with another seed"),
    "best_of": ((1,), "each prompt gets one text; ask again with another seed"),
    "echo": ((False,), "the answer never repeats the prompt"),
    "suffix": (("",), "text is written after the prompt, not into a gap"),
    "logprobs": ((False,), "probabilities are not returned"),
    "top_logprobs": ((0,), "probabilities are not returned"),
    "presence_penalty": ((0, 0.0), _PICKED),
    "frequency_penalty": ((0, 0.0), _PICKED),
    "repetition_penalty": ((1, 1.0), _PICKED),
    "min_p": ((0, 0.0), _PICKED),
    "logit_bias": (({},), _PICKED),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "response_format": (({"type": "text"},), "the format of the text cannot be set"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "web_search_options": ((), "there is no web search"),
}
"""Parameters that would change the text → values that request nothing, and why others are refused."""


def problem_of(error: P2PTrainError) -> Problem:
    message = f"{error.message}: {error.remedy}" if error.remedy else error.message
    if isinstance(error, TooLong):
        return Problem(400, message, code="context_length_exceeded")
    if isinstance(error, UserError):
        return Problem(400, message, code="invalid_value")
    if isinstance(error, Refused | ResourceError):
        after_s = error.retry_after_s if isinstance(error, Refused) else 0
        return Problem(503, message, code="overloaded", retry_after_s=after_s or RETRY_AFTER_S)
    if isinstance(error, NetworkError | PeerError):
        return Problem(503, message, code="model_unreachable")
    return Problem(500, message, code="model_failed")


@dataclass(frozen=True, slots=True)
class HttpTextRequest:
    """A valid request.

    Attributes:
        model: name of the wanted model.
        texts: one per prompt, in order.
        include_usage: the stream's last event has the token counts.
    """

    model: str
    texts: tuple[TextRequest, ...]
    stream: bool
    include_usage: bool


def read_completion(body: bytes, draw_seed: Callable[[], int]) -> HttpTextRequest:
    """Parse the body of ``POST /v1/completions``. Raises ``Problem``.

    Args:
        draw_seed: makes a seed for a request without one.
    """
    fields = _read(_Completion, body)
    prompts = [fields.prompt] if isinstance(fields.prompt, str) else fields.prompt
    return _request(fields, tuple({"prompt": prompt} for prompt in prompts), draw_seed)


def read_chat(body: bytes, draw_seed: Callable[[], int]) -> HttpTextRequest:
    """Parse the body of ``POST /v1/chat/completions``; as ``read_completion``."""
    fields = _read(_Chat, body)
    for index, message in enumerate(fields.messages):
        for name, value in (message.model_extra or {}).items():
            if name != "name" and value not in (None, []):  # earlier answers may have empty fields
                raise _unsupported(f"messages.{index}.{shortened(name, 64)}", _TEXT_ONLY)
    if fields.messages[-1].role != "user":
        raise wrong("messages", "the last message must be a user's, for the model to answer")
    return _request(fields, ({"turns": tuple(message.turn() for message in fields.messages)},), draw_seed)


class _StrictModel(BaseModel):
    """Fields of a body, without silent conversions. ``_check_other`` checks all other parameters."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class _StreamOptions(_StrictModel):
    include_usage: bool | None = None


class _Part(_StrictModel):
    type: Literal["text"]
    text: str


class _Message(_StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[_Part], Field(min_length=1, fail_fast=True)]

    def turn(self) -> Turn:
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return Turn("system" if self.role == "developer" else self.role, text)


_Stop = Annotated[str, Field(min_length=1, max_length=512)]


class _Body(_StrictModel):
    model: str = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=MOST_TOP_K)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    speculate: Literal["auto", "off"] = "auto"
    priority: int = Field(default=0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)


_SomeBody = TypeVar("_SomeBody", bound=_Body)


class _Completion(_Body):
    # Prompts are written one after the other.
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=16, fail_fast=True)]


class _Chat(_Body):
    messages: Annotated[list[_Message], Field(min_length=1, max_length=4096, fail_fast=True)]


def _read(schema: type[_SomeBody], body: bytes) -> _SomeBody:
    fields = read_model(schema, body)
    for name, value in (fields.model_extra or {}).items():
        _check_other(name, value)
    return fields


def _check_other(name: str, value: object) -> None:
    if name in IGNORED:
        return
    if name not in NOT_OBEYED:
        named = shortened(name, 64)
        raise Problem(400, f"unknown parameter {named}: leave it out", code="unknown_parameter", param=named)
    if value is None:
        return
    harmless, why = NOT_OBEYED[name]
    if not any(type(value) is type(known) and value == known for known in harmless):
        raise _unsupported(name, why)


def _request(fields: _Body, asked: tuple[dict[str, Any], ...], draw_seed: Callable[[], int]) -> HttpTextRequest:
    named = {limit for limit in (fields.max_tokens, fields.max_completion_tokens) if limit is not None}
    if len(named) > 1:
        raise wrong("max_tokens", "max_completion_tokens is its new name, and has another value")
    if fields.stream_options is not None and not fields.stream:
        raise wrong("stream_options", "allowed only if stream is true")
    sampling = SamplingOptions(
        temperature=fields.temperature,
        top_k=fields.top_k,
        top_p=fields.top_p,
        seed=draw_seed() if fields.seed is None else fields.seed,
    )
    texts = tuple(
        TextRequest(
            **text,
            max_new_tokens=max(named) if named else None,
            sampling=sampling,
            stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
            speculate=fields.speculate == "auto",
            priority=fields.priority,
        )
        for text in asked
    )
    usage = fields.stream_options is not None and bool(fields.stream_options.include_usage)
    return HttpTextRequest(fields.model, texts, stream=bool(fields.stream), include_usage=usage)


def _unsupported(param: str, why: str) -> Problem:
    return Problem(400, f"{param} is not supported here: {why}", code="unsupported_parameter", param=param)
