"""Where a conversation's tokens come from, each behind a plain iterator that the terminal's own thread reads.

The work is done on another thread, so that Ctrl+C is heard at once, whatever is being computed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from p2ptrain.compute.text import ModelText
from p2ptrain.core.serving import Sampling

T = TypeVar("T")


class Leaving(BaseException):
    """Ctrl+C while a cancelled answer was still being computed: nobody waits for it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model wrote. ``first_s``: until its first token came; ``ended``: ``stop``, ``end``, ``length`` (as of
    ``TextWriter``), ``cancelled``, or ``failed``: the text is what had come by then."""

    prompt: str
    text: str
    tokens: int
    seconds: float
    first_s: float
    ended: str


class TokenSource(Protocol):
    """A model that goes on from token ids.

    Attributes:
        text: its text side.
        label: what it is, for people.
        context: positions that a prompt and its answer may have; None: nobody knows.
    """

    text: ModelText
    label: str
    context: int | None

    def tokens(
        self, ids: Sequence[int], *, max_new_tokens: int, sampling: Sampling, end_tokens: frozenset[int]
    ) -> Generator[int, None, None]:
        """The ids that follow, as they come. Closing the iterator, or Ctrl+C in it, ends the computing.

        Raises:
            P2PTrainError: as the model behind it.
            Leaving: see there.
        """
        ...

    def facts(self) -> dict[str, Any]:
        """What is known of where and how it was computed, for programs."""
        ...

    def close(self) -> None: ...


def pumped(
    work: Callable[[Callable[[T], bool]], None],
    *,
    most: int,
    on_cancel: Callable[[], object] = lambda: None,
    name: str = "tokens",
) -> Generator[T, None, None]:
    """What ``work`` hands over on a thread of its own, as an iterator for this one.

    Args:
        work: hands each token, or piece of text, to what it is given, and ends soon after that says no more
            (``False``).
        most: that it may hand over; the bound of what waits here.
        on_cancel: called when no more are wanted, for a ``work`` that would hear of it with its next token only.
    """
    arrived: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(most + 1)
    cancelled = threading.Event()

    def hand_over(item: T) -> bool:
        arrived.put((item,))
        return not cancelled.is_set()

    def run() -> None:
        problem: BaseException | None = None
        try:
            work(hand_over)
        except BaseException as error:  # noqa: BLE001 - raised again where the iterator is read
            problem = error
        arrived.put(problem)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        while (item := arrived.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
    finally:
        cancelled.set()
        on_cancel()
        try:
            thread.join()
        except KeyboardInterrupt:
            raise Leaving from None


class LocalSource:
    """The whole model on this machine. Raises as ``LocalModel`` and its ``load``."""

    def __init__(self, directory: Path, *, device: str) -> None:
        from p2ptrain.compute.generate import LocalModel

        self._model = LocalModel(directory, device=device)
        self.text = self._model.text
        self.label, self.context = str(directory), self.text.context
        self._model.load()

    def tokens(
        self, ids: Sequence[int], *, max_new_tokens: int, sampling: Sampling, end_tokens: frozenset[int]
    ) -> Generator[int, None, None]:
        def work(hand_over: Callable[[int], bool]) -> None:
            self._model.tokens(
                ids,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                on_token=lambda token: hand_over(token) and token not in end_tokens,
            )

        return pumped(work, most=max_new_tokens)

    def facts(self) -> dict[str, Any]:
        return {"checkpoint": self.label}

    def close(self) -> None:
        """Nothing is kept beyond this process."""
