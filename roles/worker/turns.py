"""Whose work is computed next: sessions take turns, in the order in which their works arrived."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Turns(Generic[T]):
    """Those that have something to do, each once. Who had a turn goes to the end, so nobody waits for more than one
    turn of each other."""

    def __init__(self) -> None:
        self._waiting: dict[T, None] = {}

    def add(self, who: T) -> None:
        """It has something to do. Who waits already keeps its place."""
        self._waiting.setdefault(who)

    def drop(self, who: T) -> None:
        self._waiting.pop(who, None)

    def take(self, ready: Callable[[T], bool]) -> T | None:
        """The first that is ready, which is in the queue no more; None where nobody is."""
        for who in self._waiting:
            if ready(who):
                del self._waiting[who]
                return who
        return None
