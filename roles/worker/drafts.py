"""Drafts of a worker: it opens its draft model when the seed orders that, and closes it when a job needs the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

from p2ptrain.core.background import Background
from p2ptrain.core.errors import P2PTrainError
from roles.member import REPORT_S, CallerService
from roles.seed_link import Notify
from wire.messages import Message
from wire.text_messages import Serving


class DraftService(CallerService, Protocol):
    """What the worker uses of ``roles.drafter.draft_server.DraftServer``."""

    def describe(self) -> list[Serving]: ...


OpenDrafter: TypeAlias = "Callable[[], AbstractAsyncContextManager[DraftService]]"
"""Opens a draft model for the block."""


class WorkerDrafts:
    """See the module's docstring. ``server``: drafts for callers of purpose ``draft``; None while there is no order.

    Args:
        open_drafter: None: the worker has no draft model.
        send: sends a message to the seed.
    """

    def __init__(self, open_drafter: OpenDrafter | None, send: Callable[[Message], object], notify: Notify) -> None:
        self.server: DraftService | None = None
        self._open, self._send, self._notify = open_drafter, send, notify
        self._tasks = Background()
        self._task: asyncio.Task[None] | None = None

    def order(self, model: str) -> None:
        """Draft for the served ``model`` from now on; empty: no longer."""
        if self._task is not None:
            self._task.cancel()
            self._task = self.server = None
        if model and self._open is not None:
            self._task = self._tasks.start(self._draft(model, self._open), "drafts")

    async def end(self) -> None:
        await self._tasks.stop()

    async def _draft(self, model: str, open_drafter: OpenDrafter) -> None:
        reported = list[Serving]()
        try:
            async with open_drafter() as server:
                self.server = server
                self._notify("info", "drafting", f"no job needs this worker: it drafts for {model}")
                while True:
                    if (now := server.describe()) != reported:
                        reported = now
                        self._send(now[0])
                    await asyncio.sleep(REPORT_S)
        except P2PTrainError as problem:
            self.server = None
            self._notify("warning", "drafting", f"cannot draft: {problem.with_remedy}")
