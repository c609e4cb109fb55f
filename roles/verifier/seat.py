"""A session's place at one drafter, as the session sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2ptrain.core.serving import Sampling
from roles.speculation.events import Drafted, Tell
from roles.verifier.drafter_record import SeatRecord

if TYPE_CHECKING:
    from roles.verifier.drafter_link import DrafterLink

SLOW_S = 5.0
"""Where the ids of an opening are not taken in after so long, the session has another drafter besides."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a session begins with, as of ``roles.verifier.drafting_source.DrafterSource.open``."""

    ids: tuple[int, ...]
    prompt: int
    positions: int
    sampling: Sampling
    depth: int


@dataclass(eq=False)
class Seat:
    """One session's place at one drafter.

    Attributes:
        drafter: its number in the session. stream: the session's number on the connection.
        on_ready: the ids of the beginning are taken in. on_lost: the last of what is told; not after ``leave``.
        refused: the code, where the drafter refused it, or had to be left.
        ready: the first has been told. over: the last has been, or needs not.
        drafted: position behind the drafts that came last; 0 before the first.
        bytes_in, bytes_out: of bodies. frames: that they came and went in.
    """

    link: DrafterLink
    drafter: int
    beginning: Beginning
    on_ready: Callable[[Seat], None]
    on_drafted: Callable[[Seat, Drafted], None]
    on_latency: Callable[[Seat], None]
    on_lost: Callable[[Seat], None]
    stream: int = 0
    refused: str = ""
    ready: bool = False
    over: bool = False
    drafted: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    frames: int = 0

    def __post_init__(self) -> None:
        self.record = SeatRecord(len(self.beginning.ids))
        self.opened_at = 0.0

    def slow(self, now: float) -> bool:
        """It takes long to become ready."""
        return not self.ready and now > self.opened_at + SLOW_S

    def tell(self, tell: Tell) -> None:
        """Give it a verdict. Never raises: that it is lost is told otherwise."""
        if not self.over:
            self.link.tell(self, tell)

    def leave(self) -> None:
        """The session needs it no more."""
        if not self.over:
            self.link.leave(self)
