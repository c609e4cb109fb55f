"""HTTP requests that one peer passes on to another, one on each connection (``wire.http_messages``).

The seed or an operator asks (``pass_request``), and an ASGI application of a verifier answers (``answer_request``). A
peer that is lost is noticed at once if its socket closes, else by its silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from urllib.parse import unquote

from starlette.types import ASGIApp, Scope
from starlette.types import Message as Event

from p2ptrain.core.errors import DeadlineExceeded, P2PTrainError, ProtocolError
from roles.http.answers import tell, while_wanted
from roles.line import Line
from wire.connection import Connection
from wire.http_messages import HEADER_CHARS, PART_BYTES, HttpPart, HttpRequest
from wire.messages import Hello, Message
from wire.text_messages import StreamRefused, encode_refusal, error_untrusted

PART_S = 3600.0
"""Longest wait for a part of an answer, of a verifier that lives: a long text that is not streamed is one part."""
READ_S = 60.0
"""Longest time in which a client reads nothing. The seed's HTTP server cuts it off earlier."""
ASKED_HEADERS = frozenset({"accept", "content-type", "anthropic-version", "anthropic-beta"})
ANSWERED_HEADERS = frozenset(
    {"content-type", "retry-after", "x-accel-buffering", "x-request-id", "p2ptrain-turns-left-out"}
)

# ------------------------------------------------------------------------------------------------------ the asking end


async def pass_request(connection: Connection, request: HttpRequest, body: bytes) -> AsyncGenerator[HttpPart, None]:
    """Send a request over a new connection. Yields the parts of the answer. At the end the connection is closed.

    Raises ``P2PTrainError``: the other side is lost, refuses, or breaks the protocol.
    """
    line = Line(connection)
    async with line.keep_alive():
        connection.send(request)
        connection.send_bulk(memoryview(body), generation=0, stream=0)
        part = await _next_untrusted(line, is_first=True)
        yield part
        while not part.is_last:
            part = await _next_untrusted(line, is_first=False)
            yield part


async def _next_untrusted(line: Line, *, is_first: bool) -> HttpPart:
    try:
        async with asyncio.timeout(PART_S):
            message = (await line.receive()).message
    except TimeoutError:
        raise DeadlineExceeded(f"it wrote nothing for {PART_S:.0f} s") from None
    if isinstance(message, StreamRefused):
        raise error_untrusted(message)
    if not isinstance(message, HttpPart) or message.status not in (range(200, 600) if is_first else (0,)):
        raise ProtocolError(f"it sent {type(message).__name__} where {'the first ' * is_first}HttpPart was due")
    return message


# --------------------------------------------------------------------------------------------------- the answering end


async def answer_request(app: ASGIApp, connection: Connection, hello: Hello) -> None:
    """Let ``app`` answer the request of one connection. If the asking end leaves, the answer is cancelled."""
    line = Line(connection)
    async with line.keep_alive():
        request = (await line.receive()).message
        if not isinstance(request, HttpRequest):
            raise ProtocolError(f"it sent {type(request).__name__} where HttpRequest was due")
        body = await line.receive_bulk(request.size_bytes, stream=0)

        async def wait_for_end() -> Event:
            with suppress(P2PTrainError):
                await line.receive()  # the asking end has nothing more to send
            return {"type": "http.disconnect"}

        async def answer() -> None:
            await _Reply(connection).write(app, request, bytes(body))
            await connection.closed.wait()  # by the asking end: all has arrived there

        await while_wanted(wait_for_end, answer(), asyncio.Event())


class _Reply:
    """What an application sends, as messages. ``is_over``: its last part was sent."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self.is_over = connection, False
        self._head: tuple[int, dict[str, str]] = 0, {}  # status and headers of the next part

    async def write(self, app: ASGIApp, request: HttpRequest, body: bytes) -> None:
        news: list[Event] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Event:
            if not news:
                await asyncio.Event().wait()  # a client that leaves cancels the whole answer
            return news.pop()

        problem = P2PTrainError("the answer ended early")
        try:
            await app(scope_untrusted(request), receive, self._send)
        except P2PTrainError as error:
            problem = error
        except Exception as defect:  # of this program: the client must not wait  # noqa: BLE001
            tell(defect)
        if not self.is_over:
            await self._put(encode_refusal(problem))

    async def _send(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            headers = {name.decode().lower(): value.decode("latin-1") for name, value in event.get("headers", ())}
            self._head = event["status"], pick_headers(headers, ANSWERED_HEADERS)
            return
        data, more = event.get("body", b""), event.get("more_body", False)
        for start in range(0, max(len(data), 1), PART_BYTES):
            self.is_over = not more and start + PART_BYTES >= len(data)
            await self._put(HttpPart(bytes(data[start : start + PART_BYTES]), self.is_over, *self._head))
            self._head = 0, {}

    async def _put(self, message: Message) -> None:
        try:
            await self._connection.flush(timeout_s=READ_S)  # the other end reads no faster than its client
            self._connection.send(message)
        except P2PTrainError as problem:
            self._connection.abort(problem)
            await asyncio.Event().wait()  # ``answer_request`` sees the end of the connection, and cancels this


def pick_headers(headers: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Those of the headers with these names that can be passed on."""
    found = {name: headers[name][:HEADER_CHARS] for name in names if name in headers}
    return {name: value for name, value in found.items() if value.isascii() and value.isprintable()}


def scope_untrusted(request: HttpRequest) -> Scope:
    """The request as applications get it. Never raises."""
    path, _, query = request.target.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in request.headers.items()],
        "state": {"model": request.model},
    }
