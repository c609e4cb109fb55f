"""The core of one session over a chain of stages: forward requests go through it one after another, and through the
loss of any stage at any moment. Pure.

Theory of operation
-------------------
The client *submits* forward requests: so many more token ids, after the history was cut to its first ``keep``, and for
how many of the last positions a token is to be sampled. Requests are answered in their order. What lies behind the last
answered request, and is not cut off by one that is under way, every stage holds: it is *committed*. The client keeps
the token ids, and every stage what it gave on, which is the next stage's input: so any stage that is lost can be made
again from the one before. Stages are numbered from 0; a *seat* numbers the peers that held a stage, and grows.

Whatever goes wrong raises the session's *epoch* and begins a *mending*; what stages still do for an older epoch is
dropped by whoever comes to see it, this core included. A mending does not follow a script. It compares, after each
event, what every stage should be with what it is, and asks for what is missing, so that a second loss in the middle of
it is nothing special, and a session that is only being opened is one of which all stages are missing:

    a stage has no peer                             Replace, once; Seated or NoSeat answers
    it has not opened the session                   Ask open, when the next stage is ready: it is dialled then
    it does not know the epoch, or its link to      Ask resume: history cut to what is committed; the answer tells what
      the next stage's peer is not the one it had     it holds (less, where it was still being filled)
    all are ready, some hold less than committed    Ask replay of the last stage before them that has it, through them
                                                      only; where the first is among them, requests from the token ids
    all hold what is committed                      the requests under way are sent again: RUNNING

Before the first of them, positions between what is committed and where it begins are sent again as a request of their
own (a request under way cut the history below what was answered already). Samples are numbered: the same tokens come.

A stage whose own request failed is closed and opened again at the same peer; a second time before any request was
answered it is replaced. A stage that cannot reach the next one costs the next one its place, and a second time itself.
Too many setbacks without an answer end the session. All stages alive and yet no answer in time: the epoch is raised,
which costs a hung stage its place, for it does not answer that; after ``MOST_STALLS`` in a row the session ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from p2ptrain.core.errors import DeadlineExceeded, P2PTrainError, PeerError

NEXT_LOST = "next-stage"
"""Code of a refusal, or of ``ChainBroken``: the next stage cannot be reached."""
UNKNOWN_SESSION = "unknown-session"
"""Code of a refusal: the stage does not have the session (any more)."""
UNKNOWN_PART = "unknown-part"
"""Code of a refusal: the peer does not have the part (any more)."""
TOO_SLOW = "too-slow"
"""Code of what was not answered in time: this side's own word for it."""

CHUNK = 2048
"""Positions in one request, at most."""
WINDOW = 8
"""Requests under way at a time, at most: more than a chain has stages would only wait in queues, and take memory."""
ANSWER_S, POSITION_S = 120.0, 0.2
"""How long an answer may take, and besides for each position before it (a large model's prompt on slow processors, of
other sessions, too). Death is not noticed by this but by the end of a connection, or by silence."""
MOST_STALLS = 3

# -------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class StageAssigned:
    stage: int
    seat: int


@dataclass(frozen=True, slots=True)
class StageUnassigned:
    stage: int
    error: P2PTrainError


@dataclass(frozen=True, slots=True)
class Lost:
    """The peer in ``seat`` is gone, for whatever reason."""

    stage: int
    seat: int
    reason: str


@dataclass(frozen=True, slots=True)
class Answered:
    """An ``Ask`` was answered. ``position``: of a resume, what the stage holds now."""

    stage: int
    ask: int
    position: int = 0


@dataclass(frozen=True, slots=True)
class Declined:
    """An ``Ask`` was refused, or not answered in time."""

    stage: int
    ask: int
    code: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Arrived:
    """``Sampled`` from the stage at which a request ended."""

    epoch: int
    number: int
    tokens: tuple[int, ...]
    spent_us: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """``ChainBroken`` of stage ``sender``. That a peer is known to be lost is told before it."""

    sender: int
    epoch: int
    lost: int
    code: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Submit:
    """Take ``ids`` after the first ``keep`` positions of what was submitted.

    Attributes:
        samples: for so many of the last positions a token is sampled.
        sample_index: number of the first one: 0 for the first new token of a generation.
        prefill: it is of a prompt.
    """

    ids: tuple[int, ...]
    keep: int
    samples: int
    sample_index: int
    prefill: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. ``end``: the client has enough."""

    end: bool = False


Event = StageAssigned | StageUnassigned | Lost | Answered | Declined | Arrived | Broken | Submit | Tick


# -------------------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class Send:
    """A forward request for the first stage; fields as of ``wire.chain_messages.ForwardRequest``."""

    seat: int
    epoch: int
    number: int
    keep: int
    ids: tuple[int, ...]
    last: int
    samples: int
    sample_index: int
    prefill: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to the stage's peer.

    Attributes:
        kind: ``open`` the session; ``resume`` it in another epoch with what the stage holds of the first ``keep``
            positions; ``replay``: give the first ``keep`` positions on once more, up to stage ``last``.
        ask: its number.
        next_seat: of the stage that it is to dial, -1 on the last one.
        number: of the first request of a replay.
    """

    kind: str
    stage: int
    seat: int
    ask: int
    epoch: int
    timeout_s: float
    next_seat: int = -1
    keep: int = 0
    number: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class Close:
    stage: int
    seat: int


@dataclass(frozen=True, slots=True)
class Replace:
    """The peer in ``seat`` is of no use: find another one. -1: there is none."""

    stage: int
    seat: int
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """A submitted request was answered.

    Attributes:
        index: of the submitted requests, from 0.
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
class SessionReady:
    """The session runs; the first time because it was opened, and then nothing was lost.

    Attributes:
        lost: stages that were lost, and why.
        took_s: since the first loss was known.
    """

    lost: tuple[tuple[int, str], ...]
    took_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    error: P2PTrainError


Instruction = Send | Ask | Close | Replace | Done | SessionReady | Failed


# ------------------------------------------------------------------------------------------------------------ the core


class Phase(Enum):
    MENDING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True)
class Request:
    """A forward request under way.

    Attributes:
        index: of the submitted ones; -1 where the session made it itself, to bring back what stages held.
        number: of now; it has another one each time that it is sent.
        due: when its answer is missed; 0: it was not sent in this epoch.
        sent: in any epoch.
    """

    index: int
    number: int
    keep: int
    ids: tuple[int, ...]
    last: int
    samples: int
    sample_index: int
    prefill: bool
    sent: bool = False
    sent_at: float = 0.0
    due: float = 0.0
    mended: bool = False


@dataclass(slots=True)
class _Stage:
    """What is known of a stage.

    Attributes:
        seat: -1: it has no peer.
        sought: a peer is being looked for.
        opened: its peer has the session.
        epoch: that its peer was told last.
        next_seat: of the stage that it is linked to; None: it must dial anew.
        has: positions it holds, since ``epoch``.
        ask: the open or resume that is under way.
        replay: the one of this epoch.
        failures: of its requests, or to reach the next stage, since a request was answered.
    """

    seat: int = -1
    sought: bool = False
    opened: bool = False
    epoch: int = 0
    next_seat: int | None = None
    has: int = 0
    ask: Ask | None = None
    replay: Ask | None = None
    failures: int = 0


class Session:
    """One session over a chain; see the module's docstring. The first event, whichever, begins it.

    Args:
        seats: of each stage in order, who holds it now; -1 where that is nobody.

    Attributes:
        epoch: of now.
        phase: where it stands.
        ids: token ids of all positions, as submitted.
        flight: requests under way, in order.
        submitted: requests so far.
        last_number: of a request.
    """

    def __init__(self, seats: Sequence[int], now: float) -> None:
        if not seats:
            raise ValueError("a chain has a stage")
        self.epoch = 1
        self.phase = Phase.MENDING
        self.ids: list[int] = []
        self.flight: deque[Request] = deque()
        self.submitted = 0
        self.last_number = 0
        self._answered: list[int] = []
        self._prefilled = bytearray()  # of each answered position: whether it was a prompt's
        self._stages = [_Stage(seat=seat) for seat in seats]
        self._feed: deque[Request] | None = None  # requests that fill lost first stages again; None: not begun
        self._mending_since: float | None = now
        self._lost: dict[int, str] = {}  # in this mending
        self._owed = 0  # positions that are being replayed: they are computed before what is sent after
        self._last_ask = 0
        self._setbacks = 0
        self._stalls = 0

    # ---------------------------------------------------------------------------------------------------- for callers

    @property
    def answered(self) -> int:
        return len(self._answered)

    @property
    def room(self) -> int:
        return WINDOW - sum(request.index >= 0 for request in self.flight)

    @property
    def committed(self) -> int:
        """Positions that every stage holds which was not lost since, and that will not change."""
        return min([len(self._answered), *(request.keep for request in self.flight if request.sent)])

    def next_deadline(self) -> float | None:
        """When ``Tick`` is due, if nothing comes before; None where nothing is waited for that has no deadline of its
        own."""
        requests = self._waited_for
        return requests[0].due if requests and requests[0].sent and self.phase is not Phase.ENDED else None

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take ``event`` in.

        Raises:
            ValueError: what is submitted cannot be: no ids, too many, or ``keep`` beyond the history.
        """
        out: list[Instruction] = []
        if self.phase is Phase.ENDED:
            return out
        match event:
            case Submit():
                self._submit(event)
            case Arrived():
                self._arrived(event, now, out)
            case StageAssigned(index, seat):
                if self._stages[index].seat < seat:
                    if self._stages[index].seat >= 0:  # its loss was not told
                        self._vacate(index, "another peer has its place", now)
                    self._stages[index] = _Stage(seat=seat)
            case Lost(index, seat, reason):
                if self._stages[index].seat == seat:
                    self._vacate(index, reason, now)
            case StageUnassigned(index, error):
                if self._stages[index].seat < 0:
                    self._fail(error, out)
            case Answered():
                self._agreed(event)
            case Declined():
                self._declined(event, now, out)
            case Broken():
                self._broken(event, now, out)
            case Tick(end):
                if end:
                    self._close(out)
                else:
                    self._tick(now, out)
        self._steer(now, out)
        return out

    # --------------------------------------------------------------------------------------------------------- events

    @property
    def _waited_for(self) -> deque[Request] | None:
        return self.flight if self.phase is Phase.RUNNING else self._feed

    def _submit(self, event: Submit) -> None:
        if not 0 < len(event.ids) <= CHUNK:
            raise ValueError(f"a forward request has 1 to {CHUNK} positions, not {len(event.ids)}")
        if not 0 <= event.keep <= len(self.ids) or not 0 <= event.samples <= len(event.ids) or event.sample_index < 0:
            raise ValueError(f"request {self.submitted} keeps {event.keep} of {len(self.ids)} positions")
        if not self.room:
            raise ValueError(f"{WINDOW} requests are under way")
        del self.ids[event.keep :]
        self.ids += event.ids
        last, number = len(self._stages) - 1, self._number()
        of = (event.keep, event.ids, last, event.samples, event.sample_index, event.prefill)
        self.flight.append(Request(self.submitted, number, *of))
        self.submitted += 1

    def _arrived(self, event: Arrived, now: float, out: list[Instruction]) -> None:
        requests = self._waited_for
        if event.epoch != self.epoch or not requests:
            return  # of an older epoch; or the end of a stage's replay, whose order all that follows keeps anyway
        request = requests[0]
        if event.number != request.number:
            if event.number > self.last_number or any(event.number == other.number for other in requests):
                what = f"it answered request {event.number} where {request.number} was due"
                self._misbehaved(request.last, what, now, out)
            return
        if len(event.tokens) != request.samples or len(event.spent_us) != request.last + 1:
            what = f"its answer to request {request.number} has the wrong numbers of values"
            self._misbehaved(request.last, what, now, out)
            return
        requests.popleft()
        self._stalls = 0
        if requests:  # which had to wait for this one
            requests[0].due = max(requests[0].due, now + self._patience_s(len(requests[0].ids)))
        if self.phase is not Phase.RUNNING:
            if not self._feed:
                for stage in self._stages[: request.last + 1]:
                    stage.has = self.committed
            return
        self._setbacks = self._owed = 0
        for stage in self._stages:
            stage.failures = 0
        if request.index >= 0:
            del self._answered[request.keep :], self._prefilled[request.keep :]
            self._answered += request.ids
            self._prefilled += bytes([request.prefill]) * len(request.ids)
            took_s = now - request.sent_at
            out.append(Done(request.index, event.tokens, event.spent_us, took_s, request.mended))

    def _agreed(self, event: Answered) -> None:
        stage = self._stages[event.stage]
        if stage.replay is not None and event.ask == stage.replay.ask:
            for filled in self._stages[event.stage + 1 : stage.replay.last + 1]:
                filled.has = self.committed
            stage.replay = None
        elif stage.ask is not None and event.ask == stage.ask.ask:
            asked, stage.ask = stage.ask, None
            stage.opened = True
            stage.epoch, stage.next_seat = asked.epoch, asked.next_seat
            stage.has = 0 if asked.kind == "open" else max(0, min(event.position, self.committed))

    def _declined(self, event: Declined, now: float, out: list[Instruction]) -> None:
        stage = self._stages[event.stage]
        asked = next((each for each in (stage.replay, stage.ask) if each is not None and each.ask == event.ask), None)
        if asked is None:
            return
        if asked is stage.ask:
            stage.ask = None
        self._begin_mending(now)  # it may know the epoch, and would not be told of it again
        self._set_back(f"stage {event.stage} refuses to {asked.kind}: {event.reason}", event.remedy, out)
        if event.code == NEXT_LOST and asked.kind == "replay":
            stage.next_seat = None
        elif event.code == NEXT_LOST:
            self._unreached(event.stage, asked.next_seat, event.reason, now, out)
        elif event.code == UNKNOWN_SESSION:
            stage.opened = False
            self._unlink(event.stage - 1)
        elif event.code in (TOO_SLOW, UNKNOWN_PART):
            self._give_up(event.stage, event.reason, now, out)
        elif asked.kind == "open":  # no memory for it, or the model knows fewer positions: another peer says the same
            self._fail(PeerError(event.reason, remedy=event.remedy), out)
        else:
            self._failed_itself(event.stage, event.reason, now, out)

    def _broken(self, event: Broken, now: float, out: list[Instruction]) -> None:
        sender = self._stages[event.sender]
        if event.epoch != self.epoch or sender.seat < 0 or not sender.opened:
            return
        self._begin_mending(now)
        self._set_back(f"stage {event.sender} reports: {event.reason}", event.remedy, out)
        if event.lost == event.sender:
            self._failed_itself(event.sender, event.reason, now, out)
        else:
            sender.next_seat = None  # it dials again; where that fails the next stage is given up

    def _tick(self, now: float, out: list[Instruction]) -> None:
        due, requests = self.next_deadline(), self._waited_for
        if due is None or now < due or not requests:
            return
        self._stalls += 1
        if self._stalls > MOST_STALLS:
            text = f"no stage is lost, and yet the chain did not answer for {now - requests[0].sent_at:.0f} s"
            self._fail(DeadlineExceeded(text, remedy="a worker may be overloaded: see p2ptrain peers"), out)
            return
        self._begin_mending(now)

    # ------------------------------------------------------------------------------------------------------- setbacks

    def _begin_mending(self, now: float) -> None:
        self.epoch += 1
        self._feed = None
        self._owed = 0
        while self.flight and self.flight[0].index < 0:
            self.flight.popleft()
        for request in self.flight:
            request.mended = True
        for stage in self._stages:
            stage.replay = None
        if self._mending_since is None:
            self._mending_since = now
        self.phase = Phase.MENDING

    def _vacate(self, index: int, reason: str, now: float) -> None:
        fresh = not self._stages[index].opened and self._stages[index].ask is None
        self._stages[index] = _Stage()
        if not fresh or self.phase is Phase.RUNNING:
            self._begin_mending(now)
        self._lost[index] = reason

    def _give_up(self, index: int, reason: str, now: float, out: list[Instruction]) -> None:
        seat = self._stages[index].seat
        if self.phase is Phase.ENDED or seat < 0:
            return
        out.append(Close(index, seat))
        self._vacate(index, reason, now)
        self._stages[index].sought = True
        out.append(Replace(index, seat, reason))

    def _failed_itself(self, index: int, reason: str, now: float, out: list[Instruction]) -> None:
        """What a stage holds of the session is spoilt: it is opened again, the second time elsewhere."""
        stage = self._stages[index]
        if stage.failures or self.phase is Phase.ENDED or stage.seat < 0:
            self._give_up(index, reason, now, out)
            return
        out.append(Close(index, stage.seat))
        self._lost[index] = reason
        self._stages[index] = _Stage(seat=stage.seat, failures=1)
        self._unlink(index - 1)

    def _unlink(self, index: int) -> None:
        if index >= 0:
            self._stages[index].next_seat = None

    def _misbehaved(self, index: int, reason: str, now: float, out: list[Instruction]) -> None:
        self._begin_mending(now)
        self._set_back(f"stage {index}: {reason}", "", out)
        self._give_up(index, reason, now, out)

    def _unreached(self, index: int, next_seat: int, reason: str, now: float, out: list[Instruction]) -> None:
        stage = self._stages[index]
        stage.next_seat = None
        if self._next_seat(index) != next_seat:
            return  # the one that it could not dial is given up already
        stage.failures += 1
        self._give_up(index if stage.failures > 1 else index + 1, reason, now, out)

    def _set_back(self, what: str, remedy: str, out: list[Instruction]) -> None:
        self._setbacks += 1
        if self._setbacks > 8 + 3 * len(self._stages):
            text = f"the chain was set back {self._setbacks} times without any progress; the last time {what}"
            self._fail(PeerError(text, remedy=remedy), out)

    def _fail(self, error: P2PTrainError, out: list[Instruction]) -> None:
        if self.phase is not Phase.ENDED:
            self._close(out)
            out.append(Failed(error))

    def _close(self, out: list[Instruction]) -> None:
        for index, stage in enumerate(self._stages):
            if stage.seat >= 0 and (stage.opened or stage.ask):
                out.append(Close(index, stage.seat))
        self.phase = Phase.ENDED
        self._feed = None

    # --------------------------------------------------------------------------------------------------------- steering

    def _steer(self, now: float, out: list[Instruction]) -> None:
        if self.phase is Phase.MENDING:
            for index, stage in enumerate(self._stages):
                if stage.seat < 0 and not stage.sought:
                    stage.sought = True
                    out.append(Replace(index, -1, self._lost.get(index, "")))
            self._connect(out)
            if all(self._ready(index) for index in range(len(self._stages))) and self._filled(now, out):
                self._go_on(now, out)
        if self.phase is Phase.RUNNING:
            self._send_all(self.flight, now, out)

    def _next_seat(self, index: int) -> int:
        return self._stages[index + 1].seat if index + 1 < len(self._stages) else -1

    def _ready(self, index: int) -> bool:
        stage = self._stages[index]
        if stage.seat < 0 or not stage.opened or stage.ask is not None or stage.epoch != self.epoch:
            return False
        return stage.next_seat == self._next_seat(index)

    def _connect(self, out: list[Instruction]) -> None:
        for index in reversed(range(len(self._stages))):
            stage, next_seat = self._stages[index], self._next_seat(index)
            if stage.seat < 0 or stage.ask is not None or self._ready(index):
                continue
            dials = index + 1 < len(self._stages) and (not stage.opened or stage.next_seat != next_seat)
            if dials and not self._ready(index + 1):
                continue
            kind, keep = ("resume", self.committed) if stage.opened else ("open", 0)
            timeout_s = self._patience_s(CHUNK)  # a request of another session may have to end before
            self._last_ask += 1
            stage.ask = Ask(kind, index, stage.seat, self._last_ask, self.epoch, timeout_s, next_seat, keep)
            out.append(stage.ask)

    def _filled(self, now: float, out: list[Instruction]) -> bool:
        committed, complete = self.committed, True
        index = 0
        while index < len(self._stages):
            if self._stages[index].has >= committed:
                index += 1
                continue
            complete, first = False, index
            while index + 1 < len(self._stages) and self._stages[index + 1].has < committed:
                index += 1
            if first == 0:
                if self._feed is None:
                    self._feed = deque(self._again(0, committed, index))
                self._send_all(self._feed, now, out)
            elif self._stages[first - 1].replay is None:
                source = self._stages[first - 1]
                self._last_ask += 1
                of = (self._last_ask, self.epoch, self._patience_s(committed), -1, committed, self._number(), index)
                source.replay = Ask("replay", first - 1, source.seat, *of)
                self._owed = max(self._owed, committed)
                out.append(source.replay)
            index += 1
        return complete

    def _go_on(self, now: float, out: list[Instruction]) -> None:
        if self.flight:
            again = self._again(self.committed, self.flight[0].keep, len(self._stages) - 1)
            self.flight.extendleft(reversed(again))
        for request in self.flight:
            request.due, request.number = 0.0, self._number()
        assert self._mending_since is not None
        out.append(SessionReady(tuple(self._lost.items()), now - self._mending_since))
        self.phase, self._feed, self._mending_since = Phase.RUNNING, None, None
        self._lost = {}

    def _again(self, start: int, stop: int, last: int) -> list[Request]:
        """Requests that bring answered positions [start, stop) to stages [0, last] once more, a prompt's as such."""
        requests: list[Request] = []
        while start < stop:
            end = min(start + CHUNK, stop)
            prefill = self._prefilled[start]
            if (other := self._prefilled.find(not prefill, start, end)) >= 0:
                end = other
            ids = tuple(self._answered[start:end])
            requests.append(Request(-1, self._number(), start, ids, last, 0, 0, bool(prefill)))
            start = end
        return requests

    def _number(self) -> int:
        self.last_number += 1
        return self.last_number

    def _patience_s(self, positions: int) -> float:
        return ANSWER_S + POSITION_S * (self._owed + positions)

    def _send_all(self, requests: deque[Request], now: float, out: list[Instruction]) -> None:
        ahead = 0
        for place, request in enumerate(requests):
            if place >= WINDOW:
                break
            ahead += len(request.ids)
            if request.due:
                continue
            if not request.sent:
                request.sent, request.sent_at = True, now
            request.due = now + self._patience_s(ahead)
            what = (request.keep, request.ids, request.last, request.samples, request.sample_index, request.prefill)
            out.append(Send(self._stages[0].seat, self.epoch, request.number, *what))
