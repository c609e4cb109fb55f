"""How the HTTP API asks the seed in whose process it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from p2ptrain.core.errors import ConnectionLost, Refused
from roles.seed.server import Seed
from wire.client import SeedClient, SeedRequests
from wire.messages import Request

Connect = Callable[[], AbstractAsyncContextManager[SeedClient]]


class LocalRequests(SeedRequests):
    """The requests of operators, without a connection. The seed's own deadlines limit them."""

    def __init__(self, seed: Seed) -> None:
        self._seed = seed

    async def request(
        self, method: str, params: dict[str, Any] | None = None, *, timeout_s: float = 20.0
    ) -> dict[str, Any]:
        if self._seed.acceptor.closed:
            raise ConnectionLost("the seed is stopping", remedy="try again when it is back")
        answer = await self._seed.operator_api.answer(Request(1, method, params or {}))
        if answer.error_code:
            raise Refused(answer.error_code, answer.error_message, remedy=answer.error_remedy)
        return answer.result
