"""What goes into the cores of speculation, and what they want done."""

from __future__ import annotations

from dataclasses import dataclass

# ------------------------------------------------------------------------------------------------- into both of them


@dataclass(frozen=True, slots=True)
class Began:
    """The session begins: the first ``Run`` comes out."""


# ---------------------------------------------------------------------------------------- into ``verifying.Verifying``


@dataclass(frozen=True, slots=True)
class PassDone:
    """The pass that was asked for by ``Run``: its picks, and how long the model computed.

    Attributes:
        turn_s: after so long the next one could begin; 0: only now.
    """

    tokens: tuple[int, ...]
    took_s: float
    turn_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DrafterReady:
    """A drafter has taken in the ids that it was opened with, in a new session.

    Attributes:
        known: how many ids those were: the first of ``Verifying.history`` as it was then.
        latency_s: one way. step_s: of a draft; 0 where it is not known.
        name: of it and of its model, for all sessions; empty: nothing is remembered of it.
    """

    drafter: int
    known: int
    latency_s: float
    step_s: float = 0.0
    name: str = ""


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """It is gone, or refuses to go on."""

    drafter: int


@dataclass(frozen=True, slots=True)
class Latency:
    """A drafter's one-way latency, measured again."""

    drafter: int
    latency_s: float


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
class Told:
    """A verdict; as of ``wire.speculation_messages.Verdict``, with its number."""

    number: int
    start: int
    tokens: tuple[int, ...]
    depth: int


@dataclass(frozen=True, slots=True)
class RunDone:
    """The picks of the ``Run`` that was asked for, and what the model would pick behind these. A look-up gives none if
    it knows none. ``taken``: of the tokens, the first so many the model has taken in as well."""

    tokens: tuple[int, ...]
    taken: int = 0


@dataclass(frozen=True, slots=True)
class RunDropped:
    """The ``Run`` that was asked for never began: what is to be run is asked for anew."""


# ------------------------------------------------------------------------------------------------------- out of either


@dataclass(frozen=True, slots=True)
class Run:
    """Cut the model's history to ``keep`` positions, take ``ids`` more, and pick for the last ``picks`` of them.

    One at a time: the next one is asked for when this one is done; of a target that has room for several (``PassDone``)
    there may be some, answered in their order. ``draw``: number of the first pick's draw.
    ``drafter``: verifying: whose drafts the ids are but for the first; 0: there are none.
    ``most``: drafting: tokens that are of use, the pick and what the model would pick behind it.
    """

    keep: int
    ids: tuple[int, ...]
    picks: int
    draw: int
    prefill: bool = False
    drafter: int = 0
    most: int = 1


@dataclass(frozen=True, slots=True)
class Tell:
    """Verifying: a verdict to a drafter. ``right``: drafts that it finds right: from what was told up to ``start``."""

    drafter: int
    number: int
    start: int
    tokens: tuple[int, ...]
    depth: int
    right: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Verifying: this drafter says what none says that is right. It is forgotten; its session is to be closed."""

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


VerifierEvent = Began | PassDone | DrafterReady | DrafterLost | Latency | Drafted | Cancel | Tick
VerifierInstruction = Run | Tell | Drop | Give | Finished
DrafterEvent = Began | Told | RunDone | RunDropped
DrafterInstruction = Run | Send
