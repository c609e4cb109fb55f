"""Several texts under way at a time, shown in the order of their prompts: the first that is not whole as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from p2ptrain.cli.generate import Shown
from p2ptrain.core.errors import P2PTrainError, first_error

T = TypeVar("T")


class InOrder(Generic[T]):
    """See the module's docstring.

    Args:
        one: writes the text of a prompt, given its index, and hands its pieces to ``piece``.
        at_once: so many are under way.

    Attributes:
        whole: what was written so far, by the prompt's index.
    """

    def __init__(
        self, prompts: Sequence[str], shown: Shown, one: Callable[[int, str], Awaitable[T]], *, at_once: int
    ) -> None:
        self._prompts, self._shown, self._one, self._at_once = prompts, shown, one, at_once
        self.whole: dict[int, T] = {}
        self._behind: dict[int, str] = {}  # of texts that are not shown yet
        self._showing = 0
        self._next = 0

    async def run(self) -> list[T]:
        """All texts, in order. Raises what the first one that failed raised."""
        self._shown.begin(self._prompts[0])
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(min(self._at_once, len(self._prompts))):
                    tasks.create_task(self._worker(), name=f"text {number}")
        except* P2PTrainError as group:
            raise first_error(group) from None
        return [self.whole[index] for index in range(len(self._prompts))]

    def piece(self, index: int, piece: str) -> None:
        """More of a text."""
        if index == self._showing:
            self._shown.piece(piece)
        else:
            self._behind[index] = self._behind.get(index, "") + piece

    async def _worker(self) -> None:
        while (index := self._next) < len(self._prompts):
            self._next += 1
            self.whole[index] = await self._one(index, self._prompts[index])
            self._advance()

    def _advance(self) -> None:
        """Show what waited for the texts before it."""
        while self._showing in self.whole:
            self._shown.end()
            self._showing += 1
            if self._showing < len(self._prompts):
                self._shown.begin(self._prompts[self._showing])
                if piece := self._behind.pop(self._showing, ""):
                    self._shown.piece(piece)
