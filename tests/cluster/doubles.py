"""A child process of tests, which lives until it is told to die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from p2ptrain.core.errors import P2PTrainError


class Process:
    """What a child is of a process. ``leave``: what it does when its standard input is closed."""

    def __init__(self, leave: Callable[[], Any] = lambda: asyncio.sleep(0)) -> None:
        self.returncode: int | None = None
        self.stdin = SimpleNamespace(close=self._asked)
        self._leave, self._over, self._leaving = leave, asyncio.Event(), list[asyncio.Task[None]]()

    def _asked(self) -> None:
        if not self._leaving and self.returncode is None:
            self._leaving.append(asyncio.create_task(self._end()))

    async def _end(self) -> None:
        try:
            await self._leave()
        except P2PTrainError as error:
            self.die(error.exit_code)
        else:
            self.die(0)

    def die(self, code: int = 1) -> None:
        self.returncode = code
        self._over.set()

    async def wait(self) -> int:
        await self._over.wait()
        assert self.returncode is not None
        return self.returncode
