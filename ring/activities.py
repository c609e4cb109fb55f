"""The step transaction's vocabulary: what it is told (events), and what it has its shell do (instructions)."""

from __future__ import annotations

from dataclasses import dataclass

from ring.token import Flag
from ring.view import View
from wire.job_messages import LedgerRow, Report

# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True)
class Loaded(Event):
    """The engine holds a state: the initial one or a checkpoint's."""

    applied: int
    lineage: str
    square_sum: float = 0.0


@dataclass(frozen=True, slots=True)
class Unloaded(Event):
    """The state in memory is given up: a person took the run back to a checkpoint. ``Loaded`` follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class Torn(Event):
    """Outside a view, the state in memory begins to be replaced by another. ``Followed`` follows, or ``Unloaded``."""


@dataclass(frozen=True, slots=True)
class Followed(Event):
    """Outside a view, the state in memory was brought to that of a running ring's step."""

    applied: int
    lineage: str
    square_sum: float


@dataclass(frozen=True, slots=True)
class ViewArrived(Event):
    view: View


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The activity with ``ticket`` ended well."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Reduced(Event):
    """The reduce with ``ticket`` ended well. The rest is what this member's token says (``ring.token.Token``)."""

    ticket: int
    digest: bytes
    part: float
    own: float = 0.0
    unit_us: int = 0
    sent: int = 0
    received: int = 0
    stage_sent: int = 0
    stage_received: int = 0


@dataclass(frozen=True, slots=True)
class Voted(Event):
    """The tokens of all members, in rank order."""

    ticket: int
    tokens: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Broken(Event):
    """The ring of ``generation`` cannot go on: a neighbour is gone, or a collective failed. Words as in ``Report``."""

    generation: int
    suspect: str
    reason: str
    cause: str = ""
    beside: str = ""


@dataclass(frozen=True, slots=True)
class Confirmed(Event):
    """The digests of all members' states, in rank order."""

    ticket: int
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """This member cannot go on at all: out of memory, a loss that is not finite, a disk that is full."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wish(Event):
    """Ask the ring for something at the next step boundary. ``generation`` 0 means: whichever view runs."""

    flag: Flag
    generation: int = 0


# ------------------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class Instruction:
    """Base of all instructions. Activities carry a ticket that their closing event repeats."""


@dataclass(frozen=True, slots=True)
class Form(Instruction):
    ticket: int
    view: View


@dataclass(frozen=True, slots=True)
class Heal(Instruction):
    """Fetch the state of ``view.step`` from ``view.donors()``. ``torn``: nothing in memory can be built on."""

    ticket: int
    view: View
    torn: bool = True


@dataclass(frozen=True, slots=True)
class Compute(Instruction):
    """Gradients of micro-batches ``range(first, first + count)`` of step ``step`` (steps applied so far): this member's
    share, or that of its crew, of whose model it holds a part."""

    ticket: int
    step: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Reduce(Instruction):
    ticket: int
    step: int


@dataclass(frozen=True, slots=True)
class Vote(Instruction):
    ticket: int
    token: bytes


@dataclass(frozen=True, slots=True)
class Apply(Instruction):
    """One optimizer step from the reduced bytes. ``redo``: the commit was another view's."""

    ticket: int
    step: int
    square_sum: float
    redo: bool


@dataclass(frozen=True, slots=True)
class Confirm(Instruction):
    """Gather the digests of all members' states after step ``applied``: a checkpoint is due."""

    ticket: int
    applied: int


@dataclass(frozen=True, slots=True)
class Boundary(Instruction):
    """Between two steps.

    Attributes:
        save: a checkpoint is due, and the step is confirmed.
        snapshot: donors were asked for a copy of the state.
        last: the job is complete.
    """

    ticket: int
    applied: int
    save: bool
    last: bool
    snapshot: bool = False


@dataclass(frozen=True, slots=True)
class Disband(Instruction):
    """Close the session of the current view, and abandon its activity."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reload(Instruction):
    """The state in memory is torn: load the newest good one from the disk, then say ``Loaded``."""


@dataclass(frozen=True, slots=True)
class Say(Instruction):
    """Send this to the seed."""

    report: Report


@dataclass(frozen=True, slots=True)
class Record(Instruction):
    """A step was applied: who computed it, be it redone in a later view. ``lineage``: before the step, hex."""

    row: LedgerRow
    lineage: str
