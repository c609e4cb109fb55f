"""What every HTTP endpoint answers: JSON, ``Problem`` (an error that a client receives), bodies that are read, and the
ASGI application around them: routes, who is let in, and errors as JSON."""

from __future__ import annotations

import asyncio
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Message as Event
from starlette.types import Receive, Scope, Send

from configs.loader import complaint
from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.texts import human_bytes

RETRY_AFTER_S = 2
"""Wait that is suggested to a client when all places are taken: a text takes seconds."""
BODY_S = 60.0
"""Time limit for a body after its headers."""

CLOSE = {"connection": "close"}
HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
"""Headers of every answer: browsers shall not guess the type, and caches shall not keep it."""
MESSAGES = "/v1/messages"
"""Below this path is Anthropic's interface."""
_ANTHROPIC_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


@dataclass(eq=False)
class Problem(Exception):
    """An error that a client receives. With status 503 it is told when to try again: after ``retry_after_s``. ``code``:
    stable word for programs, OpenAI's if there is one. ``param``: the parameter at fault, if any. ``more``: other
    facts for programs."""

    status: int
    message: str
    _: KW_ONLY
    code: str = ""
    param: str = ""
    remedy: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: int = RETRY_AFTER_S
    more: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self, path: str = "") -> dict[str, Any]:
        """The problem in the form of the interface at ``path``."""
        if path.startswith(MESSAGES):
            usual = "invalid_request_error" if self.status < 500 else "api_error"
            message = self.message if self.remedy in self.message else f"{self.message}: {self.remedy}"
            named = {"type": _ANTHROPIC_ERRORS.get(self.status, usual), "message": message}
            return {"type": "error", "error": named | dict(self.more)}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        fields = {"message": self.message, "remedy": self.remedy, "type": kind}
        return {"error": fields | {"param": self.param or None, "code": self.code or None} | dict(self.more)}

    def response(self, path: str = "") -> Response:
        again = {"retry-after": str(self.retry_after_s)} if self.status == 503 else {}
        return json_response(self.as_json(path), status=self.status, headers=again | dict(self.headers))


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """JSON in ASCII: half a surrogate pair has no UTF-8, and some clients take U+2028 for a line end, which would end
    an event."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")


def json_response(
    document: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(json_bytes(document), status, {**HEADERS, **(headers or {})}, media_type="application/json")


def model_card(name: str, *, created: int, context: int | None, owner: str = "p2ptrain") -> dict[str, Any]:
    """A model as in ``GET /v1/models``; ``context_length`` is an extension."""
    return {"id": name, "object": "model", "created": created, "owned_by": owner, "context_length": context}


async def send_head(send: Send, status: int, headers: Mapping[str, str]) -> None:
    """Begin an answer whose body is sent in parts."""
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def send_part(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Read the body. Raises ``Problem``: too large or too slow. A large one is read to its end, so that the client
    gets the answer."""
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= most_bytes:
                    body += chunk
    except TimeoutError:
        late = "the request body did not arrive in time"
        raise Problem(408, late, code="request_timeout", headers=CLOSE) from None
    if size > most_bytes:
        large = f"the request body is larger than {human_bytes(most_bytes)}: send less"
        raise Problem(413, large, code="request_too_large", headers=CLOSE)
    return bytes(body)


_SomeModel = TypeVar("_SomeModel", bound=BaseModel)


def read_model(schema: type[_SomeModel], body: bytes) -> _SomeModel:
    """Parse a JSON body. Raises ``Problem``, which names the first fault."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error) from None


def invalid(error: ValidationError) -> Problem:
    # Lists report their first error only, so there are few.
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    # For a union pydantic names the type that it tried, which is not in the request. The type that came furthest is
    # the one that was meant.
    field = list(itertools.takewhile(_is_in_body, errors[0]["loc"]))
    rivals = [rival for rival in errors if [*rival["loc"][: len(field)]] == field]
    first = max(rivals, key=lambda rival: (len(rival["loc"]), not rival["type"].endswith("_type")))
    where = ".".join(str(part) for part in first["loc"] if _is_in_body(part))
    if first["type"] == "json_invalid":
        return Problem(400, f"the body is not JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "missing":
        return missing(where)
    return wrong(where, complaint(first))


def _is_in_body(part: int | str) -> bool:
    return isinstance(part, int) or (part.isidentifier() and part != "str")


def wrong(param: str, message: str) -> Problem:
    return Problem(400, f"{param or 'the body'}: {message}", code="invalid_value", param=param)


def missing(param: str) -> Problem:
    return Problem(400, f"{param} is missing", code="missing_required_parameter", param=param)


def shutting_down() -> Problem:
    return Problem(503, "this endpoint is shutting down: try again later", code="stopping", headers=CLOSE)


async def while_wanted(receive: Receive, work: Coroutine[Any, Any, None], stopping: asyncio.Event) -> None:
    """Run ``work``; cancel it if its client leaves. Raises what it raises, and ``Problem`` if the endpoint stops."""
    task = asyncio.create_task(work, name="answer a client")
    tasks = [task, asyncio.create_task(_await_leaving(receive)), asyncio.create_task(stopping.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for started in tasks:
            started.cancel()
        await asyncio.wait(tasks)
    if not task.cancelled():
        task.result()
    elif stopping.is_set():
        raise shutting_down()


async def _await_leaving(receive: Receive) -> None:
    while not (await receive())["type"].endswith(".disconnect"):
        pass


class Delivery:
    """An answer whose client may leave at any point, an ASGI application.

    Args:
        work: sends it. app: the endpoint.
        error_frame: the end of a stream that fails. It lacks its usual end: the text is incomplete.
    """

    def __init__(
        self,
        work: Callable[[Send], Coroutine[Any, Any, None]],
        app: JsonApp,
        error_frame: Callable[[Problem], bytes],
    ) -> None:
        self._work, self._app, self._error_frame = work, app, error_frame

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind: str | None = None  # of what has begun

        async def send_on(event: Event) -> None:
            nonlocal kind
            if event["type"] == "http.response.start":
                kind = Headers(raw=event["headers"]).get("content-type", "")
            await send(event)

        try:
            await while_wanted(receive, self._work(send_on), self._app.stopping)
        except Exception as error:
            if kind is None:
                raise
            if not isinstance(error, P2PTrainError | Problem):
                tell(error)
            if kind.startswith("text/event-stream"):  # else the server closes the connection, as the body is too short
                await send_part(send, self._error_frame(self._app.problem(error)), more=False)


_NOT_ROUTED = {404: "unknown_url", 405: "method_not_allowed"}


class JsonApp(ABC):
    """Base of all endpoints. ``problem_of``: what a client is told of an error. ``stopping`` is set when the endpoint
    ends."""

    def __init__(self, routes: Sequence[BaseRoute], problem_of: Callable[[P2PTrainError], Problem]) -> None:
        self.stopping, self._problem_of = asyncio.Event(), problem_of
        kinds = (HTTPException, ClientDisconnect, Problem, P2PTrainError, Exception)
        self._app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, self._answer_error))
        self._app.router.redirect_slashes = False

    @abstractmethod
    def let_in(self, asked: HTTPConnection) -> None:
        """Raise ``Problem`` if the request is not allowed."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self.stopping.is_set():
                raise shutting_down()
            self.let_in(HTTPConnection(scope))
            await self._app(scope, receive, send)
        except Problem as problem:
            await problem.response(scope["path"])(scope, receive, send)
        except Exception as error:  # a defect; Starlette has answered the client  # noqa: BLE001
            tell(error)

    def stop(self) -> None:
        """End what is under way and tell its clients. Refuse new requests."""
        self.stopping.set()

    def problem(self, error: Exception) -> Problem:
        """The ``Problem`` for ``error``. Unexpected errors show no details."""
        if isinstance(error, Problem):
            return error
        if isinstance(error, P2PTrainError):
            return self._problem_of(error)
        return Problem(500, "internal error; the terminal of this program has the details", code="internal_error")

    async def _answer_error(self, request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)
        if isinstance(error, HTTPException):
            text = f"there is no {request.method} {request.url.path[:100]} here"
            error = Problem(
                error.status_code, text, code=_NOT_ROUTED.get(error.status_code, ""), headers=error.headers or {}
            )
        return self.problem(error).response(request.url.path)


def tell(error: Exception) -> None:
    """Report a defect to whoever runs this process."""
    loop = asyncio.get_running_loop()
    loop.call_exception_handler({"message": "an HTTP request failed", "exception": error})
