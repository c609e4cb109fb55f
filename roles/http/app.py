"""The ASGI application of an HTTP endpoint: routes, who is let in, and errors as JSON."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from p2ptrain.core.errors import P2PTrainError
from roles.http.answers import Problem, shutting_down

_NOT_ROUTED = {404: "unknown_url", 405: "method_not_allowed"}


class JsonApp(ABC):
    """Base of all endpoints. ``stopping`` is set when the endpoint ends."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self.stopping = asyncio.Event()
        kinds = (HTTPException, ClientDisconnect, Problem, P2PTrainError, Exception)
        self._app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, self._answer_error))
        self._app.router.redirect_slashes = False

    @abstractmethod
    def let_in(self, asked: HTTPConnection) -> None:
        """Raise ``Problem`` if the request is not allowed."""

    @abstractmethod
    def problem_of(self, error: P2PTrainError) -> Problem:
        """What the client is told of ``error``."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self.stopping.is_set():
                raise shutting_down()
            self.let_in(HTTPConnection(scope))
            await self._app(scope, receive, send)
        except Problem as problem:
            await problem.response()(scope, receive, send)
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
            return self.problem_of(error)
        return Problem(500, "internal error; the terminal of this program has the details", code="internal_error")

    async def _answer_error(self, request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)
        if isinstance(error, HTTPException):
            text = f"there is no {request.method} {request.url.path[:100]} here"
            error = Problem(
                error.status_code, text, code=_NOT_ROUTED.get(error.status_code, ""), headers=error.headers or {}
            )
        return self.problem(error).response()


def tell(error: Exception) -> None:
    """Report a defect to whoever runs this process."""
    loop = asyncio.get_running_loop()
    loop.call_exception_handler({"message": "an HTTP request failed", "exception": error})
