"""The cluster's ``/v1`` at the seed: it passes each HTTP request on to a verifier, whose application answers it.

The seed reads only the model and the beginning of the conversation. A request goes to the least busy verifier of its
model; but requests with the same beginning go to the same one, which has that beginning in its cache, while it is at
most ``SLACK`` busier. If a verifier is lost or refuses before the first byte of its answer, the next one is asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Send

from p2ptrain.core.errors import P2PTrainError
from p2ptrain.core.texts import shortened
from roles.http.answers import (
    HEADERS,
    RETRY_AFTER_S,
    Delivery,
    JsonApp,
    Problem,
    json_bytes,
    json_response,
    model_card,
    read_body,
    send_head,
    send_part,
)
from roles.http.passed_requests import ASKED_HEADERS, pass_request, pick_headers
from wire.connection import Connection
from wire.http_messages import MOST_HTTP_BYTES, TARGET_CHARS, HttpRequest
from wire.records import ServingInfo

SLACK = 0.5
"""Share of a verifier's places by which it may be busier than the least busy one, and still gets the requests whose
beginning it knows: to compute a long beginning again takes longer than to wait for some texts."""
USUAL_PLACES = 16.0
MOST_REQUESTS = 128
"""Most requests that are passed on at a time."""
LONGEST_RETRY_S = 60
OTHER_PATHS = ("/tokenize", "/detokenize")
_METHODS = ["GET", "POST", "DELETE"]
_BUSY = (429, 503)
"""Statuses with which another verifier is asked: this one is busy, leaves, or has lost its workers."""


def read_beginning(body: bytes) -> tuple[str, bytes]:
    """The model that a body names, and a digest of it with the first two messages, or the first 1024 characters of a
    prompt. A body that has neither, or is no JSON, is for any verifier to refuse."""
    try:
        fields = json.loads(body or b"{}")
        values = [fields.get(name) for name in ("model", "system", "instructions", "messages", "input", "prompt")]
        first = repr([value[:2] if isinstance(value, list) else str(value)[:1024] for value in values])
    except (ValueError, RecursionError, AttributeError):
        values, first = [""], ""
    return values[0] if isinstance(values[0], str) else "", hashlib.blake2b(first.encode()).digest()


class TextGateway:
    """See the module's docstring.

    Args:
        served: returns what verifiers and drafters serve now.
        dial: connects to a verifier for one request. Raises ``P2PTrainError``.

    Attributes:
        under_way: requests of each ``ServingInfo``, by its id.
    """

    def __init__(
        self, served: Callable[[], Sequence[ServingInfo]], dial: Callable[[ServingInfo], Awaitable[Connection]]
    ) -> None:
        self._served, self._dial = served, dial
        self.under_way = Counter[str]()

    def routes(self, app: JsonApp) -> list[Route]:
        pass_on = partial(self._pass_on, app)
        return [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._one_model, methods=["GET"]),
            *(Route(path, pass_on, methods=_METHODS) for path in ("/v1/{path:path}", *OTHER_PATHS)),
        ]

    async def _models(self, request: Request) -> Response:
        cards = {info.model: _card(info) for info in self._verifiers() if info.is_ready}
        return json_response({"object": "list", "data": list(cards.values())})

    async def _one_model(self, request: Request) -> Response:
        found = self._having(request.path_params["model"])
        if not found[0].is_ready:
            raise _loading(found)
        return json_response(_card(found[0]))

    async def _pass_on(self, app: JsonApp, request: Request) -> Delivery:
        body = await read_body(request, MOST_HTTP_BYTES)
        model, beginning = await asyncio.to_thread(read_beginning, body)
        having = self._having(model)
        ready = {info.peer: info for info in having if info.is_ready}
        if not ready:
            raise _loading(having)
        if self.under_way.total() >= MOST_REQUESTS:
            raise Problem(503, f"{MOST_REQUESTS} requests are under way: try again later", code="overloaded")
        target = quote(request.url.path) + (f"?{request.url.query}" if request.url.query else "")
        if len(target) > TARGET_CHARS:
            raise Problem(414, f"the path and the query have more than {TARGET_CHARS} characters", code="invalid_value")
        headers = pick_headers(request.headers, ASKED_HEADERS)
        asked = HttpRequest(request.method, target, headers, len(body), having[0].model if model else "")
        chosen = order_verifiers(list(ready.values()), self._load, beginning)
        return Delivery(partial(self._ask_in_turn, chosen, asked, body), app, partial(_error_event, target))

    async def _ask_in_turn(self, chosen: Sequence[ServingInfo], asked: HttpRequest, body: bytes, send: Send) -> None:
        """Raises ``Problem``: no verifier answers, or one is lost amid its answer."""
        has_begun, left = False, len(chosen)
        for info in chosen:
            left -= 1
            self.under_way[info.id] += 1
            try:
                async with aclosing(pass_request(await self._dial(info), asked, body)) as parts:
                    async for part in parts:
                        if part.status in _BUSY and left:
                            break
                        if part.status:
                            has_begun = True
                            headers = HEADERS | part.headers | {"p2ptrain-verifier": quote(info.name)}
                            await send_head(send, part.status, headers)
                        await send_part(send, part.data, more=not part.is_last)
                    else:
                        return
            except P2PTrainError as error:
                if has_begun or not left:
                    text = shortened(f"the verifier did not answer: {error.with_remedy}", 1000)
                    raise Problem(503, text, code="verifier_lost") from error
            finally:
                self.under_way[info.id] -= 1

    def _verifiers(self) -> list[ServingInfo]:
        return [info for info in self._served() if info.role == "verifier"]

    def _having(self, model: str) -> list[ServingInfo]:
        """The models of this name, those that can be used first; of any name, if it is empty. Raises ``Problem``."""
        verifiers = sorted(self._verifiers(), key=lambda info: not info.is_ready)
        if not verifiers:
            remedy = "start one: p2ptrain join SEED --role verifier --model DIR"
            raise Problem(503, f"no verifier is connected: {remedy}", code="no_verifier", remedy=remedy)
        if found := [info for info in verifiers if model in ("", info.model)]:
            return found
        here = ", ".join(sorted({info.model for info in verifiers}))
        text = f"no verifier has the model {shortened(model, 100)}; there is {here}"
        raise Problem(404, text, code="model_not_found", param="model")

    def _load(self, info: ServingInfo) -> float:
        """Texts under way and waiting, over places. The verifier's report may lack the newest requests."""
        reported = info.sessions + info.stats.get("waiting", 0.0)
        return max(reported, self.under_way[info.id]) / max(info.stats.get("places", USUAL_PLACES), 1.0)


def order_verifiers(
    found: Sequence[ServingInfo], load: Callable[[ServingInfo], float], beginning: bytes
) -> list[ServingInfo]:
    """The verifiers in the order in which they are asked; see the module's docstring. The beginning's own verifier is
    chosen by rendezvous hashing: when another one comes or leaves, other beginnings keep theirs."""
    ordered = sorted(found, key=load)
    own = max(found, key=lambda info: hashlib.blake2b(beginning + info.id.encode()).digest())
    if load(own) <= load(ordered[0]) + SLACK:
        ordered.remove(own)
        ordered.insert(0, own)
    return ordered


def _card(info: ServingInfo) -> dict[str, Any]:
    owner = "upstream" if info.upstream else "p2ptrain"
    return model_card(info.model, created=0, context=info.context or None, owner=owner)


def _loading(having: Sequence[ServingInfo]) -> Problem:
    """The problem of a model that verifiers only load yet: when to try again, and how far the first one is."""
    first = max(having, key=lambda info: info.loaded)
    ready_s = first.stats.get("ready_s")
    state = "away" if first.upstream else "loading"
    after_s = RETRY_AFTER_S if ready_s is None else min(max(math.ceil(ready_s), 1), LONGEST_RETRY_S)
    text = f"{first.name} cannot write with {first.label} yet; try again in {after_s} s"
    more = {"state": state, "percent": round(100 * first.loaded), "ready_s": ready_s}
    return Problem(503, text, code="model_loading", retry_after_s=after_s, more=more)


def _error_event(path: str, problem: Problem) -> bytes:
    """The end of a stream that fails, as clients of each interface read it."""
    return b"event: error\ndata: " + json_bytes({"type": "error"} | problem.as_json(path)) + b"\n\n"
