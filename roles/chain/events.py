"""What the core of a session over a chain (``roles.chain.session``) hears, and what it wants done.

Stages are numbered from 0; a *seat* numbers the peers that held a stage, and grows with each.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.core.errors import P2PTrainError

NEXT_LOST = "next-stage"
"""Code of a refusal, or of ``ChainBroken``: the next stage cannot be reached."""
UNKNOWN_SESSION = "unknown-session"
"""Code of a refusal: the stage does not have the session (any more)."""
UNKNOWN_PART = "unknown-part"
"""Code of a refusal: the peer does not have the part (any more)."""
TOO_SLOW = "too-slow"
"""Code of what was not answered in time: this side's own word for it."""

# -------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Seated:
    """A peer holds the part of ``stage``. ``seat`` numbers the peers that did, and grows."""

    stage: int
    seat: int


@dataclass(frozen=True, slots=True)
class NoSeat:
    """Nobody can hold the part of ``stage``."""

    stage: int
    error: P2PTrainError


@dataclass(frozen=True, slots=True)
class Lost:
    """The peer in ``seat`` is gone, for whatever reason."""

    stage: int
    seat: int
    reason: str


@dataclass(frozen=True, slots=True)
class Agreed:
    """An ``Open``, ``Resume`` or ``Replay`` was answered. ``position``: of a ``Resume``, what the stage holds now."""

    stage: int
    ask: int
    position: int = 0


@dataclass(frozen=True, slots=True)
class Declined:
    """An ``Open``, ``Resume`` or ``Replay`` was refused, or not answered in time."""

    stage: int
    ask: int
    code: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Arrived:
    """``Picked``, or ``Took`` (no tokens), from the stage at which a work ended."""

    attempt: int
    number: int
    tokens: tuple[int, ...]
    spent_us: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """``ChainBroken`` of stage ``sender``. That a peer is known to be lost is told before it."""

    sender: int
    attempt: int
    lost: int
    code: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Submit:
    """Take ``ids`` after the first ``keep`` positions of what was submitted.

    Attributes:
        picks: for so many of the last positions a token is picked.
        draw: number of the first pick's draw.
        prefill: it is of a prompt.
    """

    ids: tuple[int, ...]
    keep: int
    picks: int
    draw: int
    prefill: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class End:
    """The client has enough."""


Event = Seated | NoSeat | Lost | Agreed | Declined | Arrived | Broken | Submit | Tick | End


# -------------------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class Send:
    """A work for the first stage; fields as of ``wire.chain_messages.Work``."""

    seat: int
    attempt: int
    number: int
    keep: int
    ids: tuple[int, ...]
    last: int
    picks: int
    draw: int
    prefill: bool


@dataclass(frozen=True, slots=True)
class Open:
    """Ask the stage's peer to open the session; ``next_seat`` is that of the stage that it is to dial, -1 on the last
    one."""

    stage: int
    seat: int
    ask: int
    attempt: int
    next_seat: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Resume:
    """Ask it to go on in another attempt, with what it holds of the first ``keep`` positions."""

    stage: int
    seat: int
    ask: int
    attempt: int
    keep: int
    next_seat: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Replay:
    """Ask it to give the first ``stop`` positions on once more, up to stage ``last``. ``timeout_s``: for all of it."""

    stage: int
    seat: int
    ask: int
    attempt: int
    number: int
    stop: int
    last: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Close:
    """Tell the stage's peer to forget the session."""

    stage: int
    seat: int


@dataclass(frozen=True, slots=True)
class Replace:
    """The peer in ``seat`` is of no use: find another one.

    Attributes:
        unreached_by: the stage that cannot dial it, which the choice of another should know; -1 where that is not it.
    """

    stage: int
    seat: int
    reason: str
    unreached_by: int = -1


@dataclass(frozen=True, slots=True)
class Done:
    """A submitted work was answered.

    Attributes:
        index: of the submitted works, from 0.
        spent_us: of each stage.
        took_s: since it was sent first.
        mended: the chain was mended meanwhile.
    """

    index: int
    tokens: tuple[int, ...]
    spent_us: tuple[int, ...]
    took_s: float
    mended: bool


@dataclass(frozen=True, slots=True)
class Mended:
    """The session runs; the first time because it was opened, and then nothing was lost.

    Attributes:
        lost: stages that were lost, and why.
        took_s: since the first loss was known.
    """

    lost: tuple[tuple[int, str], ...]
    took_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The session is over: it cannot be mended."""

    error: P2PTrainError


Instruction = Send | Open | Resume | Replay | Close | Replace | Done | Mended | Failed
