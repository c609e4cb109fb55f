"""What goes into the cores of speculation, and what they want done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from roles.speculation.cost_model import DrafterModel

# ------------------------------------------------------------------------------------------------- into both of them


@dataclass(frozen=True, slots=True)
class Began:
    """The session begins: the first ``Run`` comes out."""


# ---------------------------------------------------------------------------------------- into ``verifying.Verifying``


@dataclass(frozen=True, slots=True)
class PassDone:
    """The ``Run`` that was asked for: its picks, and how long the target computed."""

    tokens: tuple[int, ...]
    took_s: float


@dataclass(frozen=True, slots=True)
class DrafterReady:
    """A drafter has taken in the ids that it was opened with, in a new session.

    Attributes:
        known: how many ids those were: the first of ``Verifying.history`` as it was then.
        model: averages of this drafter; whoever measures its latency writes it there.
    """

    drafter: int
    known: int
    model: DrafterModel


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """It is gone, or refuses to go on."""

    drafter: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """Tokens from a drafter: unchecked numbers of the line that began with verdict ``epoch``."""

    drafter: int
    epoch: int
    position: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """No more is wanted."""


@dataclass(frozen=True, slots=True)
class Tick:
    """``next_deadline`` has come."""


# ------------------------------------------------------------------------------------------ into ``drafting.Drafting``


@dataclass(frozen=True, slots=True)
class VerdictReceived:
    """A verdict; as of ``wire.text_messages.Verdict``, with its number."""

    number: int
    start: int
    tokens: tuple[int, ...]
    depth: int


@dataclass(frozen=True, slots=True)
class RunDone:
    """The pick of the ``Run`` that was asked for; none if none was asked for, or it is no token of the verifier."""

    samples: tuple[int, ...]


# ------------------------------------------------------------------------------------------------------- out of either


@dataclass(frozen=True, slots=True)
class Run:
    """Cut the model's history to ``keep`` positions, take ``ids`` more, and pick for the last ``samples`` of them.

    One at a time: the next one is asked for when this one is done. ``sample_index``: sample index of the first pick.
    """

    keep: int
    ids: tuple[int, ...]
    samples: int
    sample_index: int
    prefill: bool = False


@dataclass(frozen=True, slots=True)
class SendVerdict:
    """Verifying: a verdict to a drafter. ``right``: drafts that it finds right: from what was told up to ``start``."""

    drafter: int
    number: int
    start: int
    tokens: tuple[int, ...]
    depth: int
    right: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Verifying: this drafter says what no correct one says. It is forgotten; its session is to be closed."""

    drafter: int
    reason: str


@dataclass(frozen=True, slots=True)
class Give:
    """Verifying: new tokens of the text, in order."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """Verifying: no more come: ``length``, ``stop`` or ``cancelled``."""

    reason: str


@dataclass(frozen=True, slots=True)
class Send:
    """Drafting: drafts to the verifier."""

    epoch: int
    position: int
    tokens: tuple[int, ...]


DrafterState: TypeAlias = "DrafterReady | Drafted | DrafterLost"
VerifierEvent: TypeAlias = "Began | PassDone | DrafterState | Cancel | Tick"
VerifierInstruction: TypeAlias = "Run | SendVerdict | Drop | Give | Finished"
