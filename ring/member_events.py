"""Events of a member's core (``ring.job_member``), and the instructions that follow. Pure.

An activity's instruction has a ticket, which the event at its end repeats.
"""

from __future__ import annotations

from ring.token import Flag
from ring.view import View
from wire.job_messages import LedgerRow, Report
from wire.schema import Declared

# ----------------------------------------------------------------------------------------------- events of every member


class StateLoaded(Declared):
    """The engine holds a state: the initial one or a checkpoint's."""

    applied: int
    lineage: str
    square_sum: float = 0.0


class StateDiscarded(Declared):
    """The job goes back to a checkpoint, or replacing the state beside a ring failed or was called off."""

    reason: str


class StateTorn(Declared):
    """While no ring runs here, the worker begins to replace its state. A ``StateFollowed`` or ``StateDiscarded``
    comes next."""


class StateFollowed(Declared):
    """While no ring runs here, the state in memory became that of a step of a running ring."""

    applied: int
    lineage: str
    square_sum: float


class ViewArrived(Declared):
    view: View


class ActivityFinished(Declared):
    ticket: int


class ViewBroken(Declared):
    """The ring of ``generation`` lost a neighbour, or a collective failed. The fields are those of ``Report``.
    ``beside``: the member at the other end of the suspect's link, which noticed the loss."""

    generation: int
    suspect: str
    reason: str
    cause: str = ""
    beside: str = ""


class MemberFailed(Declared):
    """This member cannot continue: out of memory, a loss that is not finite, a full disk."""

    reason: str


class FlagRequested(Declared):
    """Ask the ring for something at the next step boundary. ``generation`` 0: in whichever view runs."""

    flag: Flag
    generation: int = 0


# ----------------------------------------------------------------------------------------- instructions of every member


class FormRing(Declared):
    ticket: int
    view: View


class Apply(Declared):
    """Take one optimizer step from the reduced bytes. ``redo``: an earlier view reduced them."""

    ticket: int
    step: int
    square_sum: float
    redo: bool = False


class Boundary(Declared):
    """Do the work between two steps.

    Attributes:
        save: write a checkpoint; no break can take back the step.
        snapshot: copy the state, because sources were asked for it.
        last: the job is complete.
    """

    ticket: int
    applied: int
    save: bool
    last: bool
    snapshot: bool = False


class CloseRing(Declared):
    """Close the session of the current view and abandon its activity."""

    reason: str


class Reload(Declared):
    """The state in memory is torn: load the newest good state from the disk. ``StateLoaded`` comes next."""


class SendReport(Declared):
    report: Report


class RecordStep(Declared):
    """Record an applied step with the view that computed it. ``lineage``: before the step, hex."""

    row: LedgerRow
    lineage: str


# ---------------------------------------------------------------------------------------------- of the step transaction


class StepReduced(Declared):
    """The reduce succeeded. The fields are those of this member's token (``ring.token.Token``). ``stop``: the step is
    the job's last."""

    ticket: int
    digest: bytes
    part: float
    own: float = 0.0
    unit_us: int = 0
    stop: bool = False


class TokensGathered(Declared):
    """``tokens``: of all members, in rank order."""

    ticket: int
    tokens: tuple[bytes, ...]


class DigestsGathered(Declared):
    """``digests``: of all members' states, in rank order."""

    ticket: int
    digests: tuple[bytes, ...]


class Heal(Declared):
    """Fetch the state of ``view.step`` from the healthy members. ``torn``: the state in memory cannot be reused."""

    ticket: int
    view: View
    torn: bool = True


class Compute(Declared):
    """Compute the gradients of micro-batches ``range(first, first + count)`` of the step after the first ``step`` ones:
    the share of this member, or of its replica if the model is split."""

    ticket: int
    step: int
    first: int
    count: int


class Reduce(Declared):
    ticket: int
    step: int


class Vote(Declared):
    """Gather the tokens of all members. ``token``: this one's."""

    ticket: int
    token: bytes


class Confirm(Declared):
    """Gather all members' state digests after step ``applied``, because a checkpoint is due."""

    ticket: int
    applied: int


# ------------------------------------------------------------------------------------------------- of strategy 'server'


class VersionCombined(Declared):
    """The reduce buffer holds the combined contributions of the next version.

    Attributes:
        square_sum: its squared norm. digest: of its bytes.
        counts, made_of: as in ``LedgerRow``.
        stop: it is the job's last.
    """

    ticket: int
    digest: bytes
    square_sum: float
    counts: bytes
    made_of: bytes
    stop: bool = False


class VersionPulled(Declared):
    """A worker has exchanged with its server, and may adopt the state of this version.

    Attributes:
        over: the server stops here. last: the job has no further version.
    """

    ticket: int
    applied: int
    lineage: str
    square_sum: float
    over: bool = False
    last: bool = False


class Collect(Declared):
    """Wait for the contributions of the version after ``step``, and combine them. Ends with ``VersionCombined``, or as
    finished if none is made."""

    ticket: int
    step: int


class EndCollect(Declared):
    """Let ``Collect`` finish without a version."""


class ExchangeWithServer(Declared):
    """Push a contribution to the server, if this worker was asked for one, and pull. ``VersionPulled`` comes next."""

    ticket: int


class Adopt(Declared):
    """Replace the state by the one that was pulled, of version ``applied``."""

    ticket: int
    applied: int
    lineage: str
