"""What goes wrong over HTTP, in the form in which OpenAI's clients expect it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from p2ptrain.core.errors import NetworkError, P2PTrainError, PeerError, Refused, ResourceError, TooLong, UserError

RETRY_AFTER_S = 2
"""What a client is told to wait where it is too busy here: a text takes seconds, so a place is free soon."""

HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
"""Of every answer: no browser is to guess what it is, nobody to keep it."""


class Problem(Exception):
    """What a client is told instead of an answer.

    Args:
        status: of HTTP.
        message: for people, with what to do about it.
        code: a stable word for programs, OpenAI's where it has one.
        param: of the request, where one is at fault.
    """

    def __init__(
        self, status: int, message: str, *, code: str = "", param: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    def as_json(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        said = {"message": self.message, "type": kind, "param": self.param or None, "code": self.code or None}
        return {"error": said}

    def response(self) -> Response:
        return json_response(self.as_json(), status=self.status, headers=self.headers)


def json_bytes(said: Mapping[str, Any]) -> bytes:
    """``said`` as JSON of ASCII letters only.

    Half a surrogate pair has no UTF-8, and some clients take U+2028 for the end of a line, which is one of an event.
    """
    return json.dumps(said, separators=(",", ":"), allow_nan=False).encode("ascii")


def json_response(said: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json_bytes(said), status, HEADERS | dict(headers or {}), media_type="application/json")


def problem_of(error: Exception) -> Problem:
    """What a client is told of ``error``: of one that nobody expected, nothing but that it was one."""
    if isinstance(error, Problem):
        return error
    if not isinstance(error, P2PTrainError):
        return Problem(500, "a mistake in this program; whoever runs it finds it told there", code="internal_error")
    message = f"{error.message}: {error.remedy}" if error.remedy else error.message
    if isinstance(error, TooLong):
        return Problem(400, message, code="context_length_exceeded")
    if isinstance(error, UserError):
        return Problem(400, message, code="invalid_value")
    if isinstance(error, Refused | ResourceError):
        return Problem(503, message, code="overloaded", headers={"retry-after": str(RETRY_AFTER_S)})
    if isinstance(error, NetworkError | PeerError):
        return Problem(503, message, code="model_unreachable", headers={"retry-after": str(RETRY_AFTER_S)})
    return Problem(500, message, code="model_failed")
