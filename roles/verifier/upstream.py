"""A verifier without a model: it passes requests on to an existing server with OpenAI's HTTP interface.

The seed hears of the models that this server lists. While it does not answer, they count as not loaded.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import httpx2
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from p2ptrain.core.errors import NetworkError, ProtocolError
from p2ptrain.core.texts import printable
from roles.http.access import read_key
from roles.http.passed_requests import ASKED_HEADERS, answer_request, pick_headers
from roles.member import ServingMember
from wire.text_messages import MODEL_CHARS, MOST_MODELS, Serving

LOOK_S = 5.0
READ_S = 600.0
"""Longest time in which the server sends nothing: it may write a whole text before."""


class _ModelCard(BaseModel):
    """A model as such servers list it; some name the length of its context."""

    id: Annotated[str, Field(min_length=1, max_length=MODEL_CHARS)]
    max_model_len: Annotated[int, Field(ge=0, le=2**53)] | None = None


class _ModelList(BaseModel):
    data: list[_ModelCard]


async def serve_upstream(member: ServingMember, url: str, key_file: Path | None) -> None:
    """Be the member's program (``ServingMember``). Raises ``UserError``: the key cannot be read."""
    key = ""
    if key_file is not None:
        key = read_key(key_file, lambda text: member.notify("warning", "api-key", text), least_chars=1)
    server = UpstreamServer(url, key, member.notify)
    try:
        member.answer("http", partial(answer_request, server))
        member.serves(server.describe)
        await server.look()
    finally:
        await server.aclose()


class UpstreamServer:
    """The server, as an ASGI application that passes requests on.

    Args:
        url: of the server, without ``/v1``. key: bearer key that it needs; empty: none.
        notify: (level, kind, text), for people.
        transport: to the server; None: the network.
        trusted: the authorities that may sign its certificate; None: the usual ones.
    """

    def __init__(
        self,
        url: str,
        key: str,
        notify: Callable[[str, str, str], None],
        transport: httpx2.AsyncBaseTransport | None = None,
        trusted: ssl.SSLContext | None = None,
    ) -> None:
        self._url, self._notify = url, notify
        self._client = httpx2.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(10.0, read=READ_S),
            limits=httpx2.Limits(max_connections=256),
            trust_env=False,
            verify=trusted or True,
            transport=transport,
        )
        self._models: dict[str, Serving] = {}
        self._under_way = Counter[str]()  # by model
        self._state = ""

    async def aclose(self) -> None:
        await self._client.aclose()

    def describe(self) -> list[Serving]:
        """What the seed lists."""
        return [replace(served, sessions=self._under_way[model]) for model, served in self._models.items()]

    async def look(self) -> None:
        """Read the list of models again and again."""
        while True:
            try:
                listed = {served.model: served for served in await self.read_models()}
                state = f"{self._url} has {', '.join(listed) or 'no model'}"
            except (NetworkError, ProtocolError) as problem:
                listed, state = {}, problem.with_remedy
            away = {model: replace(served, loaded=0.0) for model, served in self._models.items()}
            self._models = dict([*(away | listed).items()][:MOST_MODELS])
            if state != self._state:
                self._state = state
                self._notify("info" if listed else "warning", "upstream", printable(state))
            await asyncio.sleep(LOOK_S)

    async def read_models(self) -> list[Serving]:
        """Raises ``NetworkError``, ``ProtocolError``."""
        try:
            answer = (await self._client.get("/v1/models", timeout=LOOK_S)).raise_for_status()
        except httpx2.HTTPError as error:
            raise self._lost(error) from error
        return read_models_untrusted(answer.content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on. Raises ``NetworkError``: the server is not reached, or lost."""
        request, model = Request(scope, receive), scope["state"]["model"]
        headers = pick_headers(request.headers, ASKED_HEADERS)
        target = scope["raw_path"].decode() + (f"?{request.url.query}" if request.url.query else "")
        body = await request.body()
        self._under_way[model] += 1
        try:
            async with self._client.stream(request.method, target, headers=headers, content=body) as answer:
                await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.headers.raw})
                async for data in answer.aiter_bytes():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx2.HTTPError as error:
            raise self._lost(error) from error
        finally:
            self._under_way[model] -= 1

    def _lost(self, error: httpx2.HTTPError) -> NetworkError:
        why = str(error) or type(error).__name__
        return NetworkError(f"the server {self._url} does not answer: {why}", remedy="check that it runs, and its key")


def read_models_untrusted(body: bytes) -> list[Serving]:
    """The models in the answer of ``/v1/models``. Raises ``ProtocolError``."""
    try:
        cards = _ModelList.model_validate_json(body).data
    except ValidationError:
        raise ProtocolError("the server's /v1/models is not a list of models as OpenAI's") from None
    return [Serving(printable(card.id, MODEL_CHARS), context=card.max_model_len or 0, upstream=True) for card in cards]
