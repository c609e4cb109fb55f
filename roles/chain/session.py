"""The core of one session over a chain of stages: works go through it one after another, and through the loss of any
stage at any moment.

Theory of operation
-------------------
The client *submits* works: so many more token ids, after the history was cut to its first ``keep``, and for how many of
the last positions a token is to be picked. Works are answered in their order. What lies behind the last answered work,
and is not cut off by one that is under way, every stage holds for *sure*. The client keeps the token ids, and every
stage what it gave on, which is the next stage's input: so any stage that is lost can be made again from the one before.

Whatever goes wrong raises the session's *attempt* and begins a *mending*; what stages still do for an older attempt is
dropped by whoever comes to see it, this core included. A mending does not follow a script. It compares, after each
event, what every stage should be with what it is, and asks for what is missing, so that a second loss in the middle of
it is nothing special, and a session that is only being opened is one of which all stages are missing:

    a stage has no peer                             Replace, once; Seated or NoSeat answers
    it has not opened the session                   Open, when the next stage is ready: it is dialled then
    it does not know the attempt, or its link to    Resume: history cut to what is sure; the answer tells what it holds
      the next stage's peer is not the one it had     (less, where it was still being filled)
    all are ready, some hold less than is sure      Replay from the last stage before them that has it, through them
                                                      only; where the first is among them, works from the token ids
    all hold what is sure                           the works under way are sent again: RUNNING

Before the first of them, positions between what is sure and where it begins are sent again as a work of their own (a
work under way cut the history below what was answered already). Draws are numbered, so the same tokens are picked.

A stage whose own work failed is closed and opened again at the same peer; a second time before any work was answered
it is replaced. A stage that cannot reach the next one costs the next one its place, and a second time itself. Too many
setbacks without an answer end the session. All stages alive and yet no answer in time: the attempt is raised, which
costs a hung stage its place, for it does not answer that; after ``MOST_STALLS`` in a row the session ends.

It is longer than a module should be, for there is no script to take out of it: every event ends in the same comparison.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from p2ptrain.core.errors import DeadlineExceeded, P2PTrainError, PeerError
from roles.chain.events import (
    NEXT_LOST,
    TOO_SLOW,
    UNKNOWN_PART,
    UNKNOWN_SESSION,
    Agreed,
    Arrived,
    Broken,
    Close,
    Declined,
    Done,
    End,
    Event,
    Failed,
    Instruction,
    Lost,
    Mended,
    NoSeat,
    Open,
    Replace,
    Replay,
    Resume,
    Seated,
    Send,
    Submit,
    Tick,
)
from roles.chain.works import WINDOW, Pace, Work, Works

MOST_STALLS = 4
"""Patience is doubled after each: other sessions' prompts may be in the way."""


class Phase(Enum):
    """Where a session stands."""

    MENDING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True)
class _Stage:
    """What is known of a stage.

    Attributes:
        seat: -1: it has no peer.
        opened: its peer has the session.
        attempt: that its peer was told last.
        next_seat: of the stage that it is linked to; None: it must dial anew.
        has: positions it holds, since ``attempt``.
        ask: number of the ``Open`` or ``Resume`` that is under way; 0: none is.
        asked_next: the ``next_seat`` of that.
        replay, filling: number of its ``Replay`` of this attempt, 0 for none, and the stage where that ends.
        failures: of its works, or to reach the next stage, since a work was answered.
    """

    seat: int = -1
    sought: bool = False
    opened: bool = False
    attempt: int = 0
    next_seat: int | None = None
    has: int = 0
    ask: int = 0
    asked_attempt: int = 0
    asked_next: int = -1
    opening: bool = False
    replay: int = 0
    filling: int = 0
    failures: int = 0


@dataclass(slots=True)
class _Mending:
    """Of the mending that runs."""

    began_at: float
    lost: dict[int, str] = field(default_factory=dict)


class Session:
    """One session over a chain; see the module's docstring. The first event, whichever, begins it.

    Args:
        seats: of each stage in order, who holds it now; -1 where that is nobody.
        alike: prompts travel in the encoding of what is decoded. Where they do not, what is computed again is a
            prompt's or is none as it first was.

    Attributes:
        attempt: of now.
        works: what was submitted.
    """

    def __init__(self, seats: Sequence[int], now: float, *, alike: bool = True) -> None:
        if not seats:
            raise ValueError("a chain has a stage")
        self.attempt = 1
        self.works = Works(len(seats) - 1, alike=alike)
        self._phase = Phase.MENDING
        self._stages = [_Stage(seat=seat) for seat in seats]
        self._feed: deque[Work] | None = None  # works that fill lost first stages again; None: not begun
        self._mending: _Mending | None = _Mending(now)
        self._owed = 0  # positions that are being replayed: they are computed before what is sent after
        self._last_ask = 0
        self._setbacks = 0
        self._stalls = 0
        self._pace = Pace()

    # ---------------------------------------------------------------------------------------------------- for callers

    @property
    def phase(self) -> Phase:
        return self._phase

    def next_deadline(self) -> float | None:
        """When ``Tick`` is due, if nothing comes before; None where nothing is waited for that has no deadline of its
        own."""
        works = self._waited_for
        return works[0].due if works and works[0].sent and self._phase is not Phase.ENDED else None

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take ``event`` in.

        Raises:
            ValueError: what is submitted cannot be: no ids, too many, or ``keep`` beyond the history.
        """
        out: list[Instruction] = []
        if self._phase is Phase.ENDED:
            return out
        match event:
            case Submit():
                self.works.submit(event)
            case Arrived():
                self._arrived(event, now, out)
            case Seated():
                self._seated(event, now)
            case Lost(stage, seat, reason):
                if self._stages[stage].seat == seat:
                    self._vacate(stage, reason, now)
                elif stage:  # given up already, because the stage before could not reach it: rightly so
                    self._stages[stage - 1].failures = 0
            case NoSeat(stage, error):
                if self._stages[stage].seat < 0:
                    self._fail(error, out)
            case Agreed():
                self._agreed(event)
            case Declined():
                self._declined(event, now, out)
            case Broken():
                self._broken(event, now, out)
            case Tick():
                self._tick(now, out)
            case End():
                self._close(out)
        self._steer(now, out)
        return out

    # --------------------------------------------------------------------------------------------------------- events

    @property
    def _waited_for(self) -> deque[Work] | None:
        """Works whose answers come next; None where those of this session are not waited for."""
        return self.works.flight if self._phase is Phase.RUNNING else self._feed

    def _arrived(self, event: Arrived, now: float, out: list[Instruction]) -> None:
        works = self._waited_for
        if event.attempt != self.attempt or not works:
            return  # of an older attempt; or the end of a stage's replay, whose order all that follows keeps anyway
        work = works[0]
        if event.number != work.number:
            if event.number > self.works.last_number or any(event.number == other.number for other in works):
                self._misbehaved(work.last, f"it answered work {event.number} where {work.number} was due", now, out)
            return
        if len(event.tokens) != work.picks or len(event.spent_us) != work.last + 1:
            self._misbehaved(work.last, f"its answer to work {work.number} has the wrong numbers of values", now, out)
            return
        works.popleft()
        self._stalls = 0
        if works:  # which had to wait for this one
            works[0].due = max(works[0].due, now + self._patience_s(len(works[0].ids)))
        if self._phase is not Phase.RUNNING:
            self._fed(work)
            return
        self._setbacks = self._owed = 0
        for stage in self._stages:
            stage.failures = 0
        took_s = now - work.sent_at
        if not work.mended and not works:
            self._pace.answered(len(work.ids), took_s)
        self.works.answer(work)
        if work.index >= 0:
            out.append(Done(work.index, event.tokens, event.spent_us, took_s, work.mended))

    def _fed(self, work: Work) -> None:
        if not self._feed:
            for stage in self._stages[: work.last + 1]:
                stage.has = self.works.sure

    def _seated(self, event: Seated, now: float) -> None:
        stage = self._stages[event.stage]
        if stage.seat >= event.seat:
            return
        if stage.seat >= 0:  # its loss was not told
            self._vacate(event.stage, "another peer has its place", now)
        self._stages[event.stage] = _Stage(seat=event.seat)

    def _agreed(self, event: Agreed) -> None:
        stage = self._stages[event.stage]
        if stage.replay and event.ask == stage.replay:
            stage.replay = 0
            for filled in self._stages[event.stage + 1 : stage.filling + 1]:
                filled.has = self.works.sure
            return
        if not stage.ask or event.ask != stage.ask:
            return
        stage.ask = 0
        stage.opened = True
        stage.attempt, stage.next_seat = stage.asked_attempt, stage.asked_next
        stage.has = 0 if stage.opening else max(0, min(event.position, self.works.sure))

    def _declined(self, event: Declined, now: float, out: list[Instruction]) -> None:
        stage = self._stages[event.stage]
        if stage.replay and event.ask == stage.replay:
            stage.replay = 0
            self._begin_mending(now)
            self._set_back(f"stage {event.stage} could not replay: {event.reason}", event.remedy, out)
            if event.code != NEXT_LOST:
                self._failed_itself(event.stage, event.reason, now, out)
            else:
                stage.next_seat = None
            return
        if not stage.ask or event.ask != stage.ask:
            return
        stage.ask = 0
        self._begin_mending(now)  # it may know the attempt, and would not be told of it again
        self._set_back(f"stage {event.stage} refuses: {event.reason}", event.remedy, out)
        if event.code == UNKNOWN_SESSION:
            stage.opened = False
            self._unlink(event.stage - 1)
        elif event.code == NEXT_LOST:
            self._unreached(event.stage, event.reason, now, out)
        elif event.code in (TOO_SLOW, UNKNOWN_PART):
            self._give_up(event.stage, event.reason, now, out)
        elif stage.opening:  # there is no memory for it, or the model knows fewer positions: another peer says the same
            self._fail(PeerError(event.reason, remedy=event.remedy), out)
        else:
            self._failed_itself(event.stage, event.reason, now, out)

    def _broken(self, event: Broken, now: float, out: list[Instruction]) -> None:
        sender = self._stages[event.sender]
        if event.attempt != self.attempt or sender.seat < 0 or not sender.opened:
            return
        self._begin_mending(now)
        self._set_back(f"stage {event.sender} reports: {event.reason}", event.remedy, out)
        if event.lost == event.sender:
            self._failed_itself(event.sender, event.reason, now, out)
        else:
            sender.next_seat = None  # it dials again; where that fails the next stage is given up

    def _tick(self, now: float, out: list[Instruction]) -> None:
        due = self.next_deadline()
        if due is None or now < due:
            return
        works = self._waited_for
        assert works
        self._stalls += 1
        if self._stalls > MOST_STALLS:
            waited_s = now - works[0].sent_at
            text = f"no stage is lost, and yet the chain did not answer for {waited_s:.0f} s"
            self._fail(DeadlineExceeded(text, remedy="a worker may be overloaded: see p2ptrain peers"), out)
            return
        self._begin_mending(now)

    # ------------------------------------------------------------------------------------------------------- setbacks

    def _begin_mending(self, now: float) -> None:
        """Raise the attempt: whatever is under way counts no more."""
        self.attempt += 1
        self._feed = None
        self._owed = 0
        self.works.stop()
        for stage in self._stages:
            stage.replay = 0
        if self._mending is None:
            self._mending = _Mending(now)
        self._phase = Phase.MENDING

    def _vacate(self, index: int, reason: str, now: float) -> None:
        """The peer of a stage is gone."""
        fresh = not self._stages[index].opened and not self._stages[index].ask
        self._stages[index] = _Stage()
        if not fresh or self._phase is Phase.RUNNING:
            self._begin_mending(now)
        assert self._mending is not None
        self._mending.lost[index] = reason

    def _give_up(self, index: int, reason: str, now: float, out: list[Instruction], unreached_by: int = -1) -> None:
        """The peer of a stage is of no use."""
        stage = self._stages[index]
        if self._phase is Phase.ENDED or stage.seat < 0:
            return
        seat = stage.seat
        out.append(Close(index, seat))
        self._vacate(index, reason, now)
        self._stages[index].sought = True
        out.append(Replace(index, seat, reason, unreached_by))

    def _failed_itself(self, index: int, reason: str, now: float, out: list[Instruction]) -> None:
        """What a stage holds of the session is spoilt: it is opened again, the second time elsewhere."""
        stage = self._stages[index]
        if self._phase is Phase.ENDED or stage.seat < 0:
            return
        assert self._mending is not None
        if stage.failures:
            self._give_up(index, reason, now, out)
            return
        out.append(Close(index, stage.seat))
        self._mending.lost[index] = reason
        self._stages[index] = _Stage(seat=stage.seat, failures=1)
        self._unlink(index - 1)

    def _unlink(self, index: int) -> None:
        """Where a stage leads to is another session than the one it dialled."""
        if index >= 0:
            self._stages[index].next_seat = None

    def _misbehaved(self, index: int, reason: str, now: float, out: list[Instruction]) -> None:
        self._begin_mending(now)
        self._set_back(f"stage {index}: {reason}", "", out)
        self._give_up(index, reason, now, out)

    def _unreached(self, index: int, reason: str, now: float, out: list[Instruction]) -> None:
        """Stage ``index`` cannot dial the next one, which this client has not lost."""
        stage = self._stages[index]
        stage.next_seat = None
        if index + 1 >= len(self._stages) or self._stages[index + 1].seat != stage.asked_next:
            return  # the one that it could not dial is given up already
        if stage.failures:
            self._give_up(index, reason, now, out)
        else:
            stage.failures = 1
            self._give_up(index + 1, reason, now, out, unreached_by=index)

    def _set_back(self, what: str, remedy: str, out: list[Instruction]) -> None:
        self._setbacks += 1
        if self._setbacks > 8 + 3 * len(self._stages):
            text = f"the chain was set back {self._setbacks} times without any progress; the last time {what}"
            self._fail(PeerError(text, remedy=remedy), out)

    def _fail(self, error: P2PTrainError, out: list[Instruction]) -> None:
        if self._phase is not Phase.ENDED:
            self._close(out)
            out.append(Failed(error))

    def _close(self, out: list[Instruction]) -> None:
        for index, stage in enumerate(self._stages):
            if stage.seat >= 0 and (stage.opened or stage.ask):
                out.append(Close(index, stage.seat))
        self._phase = Phase.ENDED
        self._feed = None

    # --------------------------------------------------------------------------------------------------------- steering

    def _steer(self, now: float, out: list[Instruction]) -> None:
        """Ask for what is missing; where nothing is, go on."""
        if self._phase is Phase.MENDING:
            self._seek(out)
            self._connect(out)
            if all(self._ready(index) for index in range(len(self._stages))) and self._filled(now, out):
                self._go_on(now, out)
        if self._phase is Phase.RUNNING:
            self._send_all(self.works.flight, now, out)

    def _seek(self, out: list[Instruction]) -> None:
        for index, stage in enumerate(self._stages):
            if stage.seat < 0 and not stage.sought:
                stage.sought = True
                reason = self._mending.lost.get(index, "") if self._mending else ""
                out.append(Replace(index, -1, reason))

    def _next_seat(self, index: int) -> int:
        return self._stages[index + 1].seat if index + 1 < len(self._stages) else -1

    def _ready(self, index: int) -> bool:
        stage = self._stages[index]
        if stage.seat < 0 or not stage.opened or stage.ask or stage.attempt != self.attempt:
            return False
        return stage.next_seat == self._next_seat(index)

    def _connect(self, out: list[Instruction]) -> None:
        for index in reversed(range(len(self._stages))):
            stage, next_seat = self._stages[index], self._next_seat(index)
            if stage.seat < 0 or stage.ask or self._ready(index):
                continue
            dials = index + 1 < len(self._stages) and (not stage.opened or stage.next_seat != next_seat)
            if dials and not self._ready(index + 1):
                continue
            self._last_ask += 1
            stage.ask, stage.asked_attempt, stage.asked_next = self._last_ask, self.attempt, next_seat
            stage.opening = not stage.opened
            timeout_s = self._pace.request_s()
            if stage.opening:
                out.append(Open(index, stage.seat, stage.ask, self.attempt, next_seat, timeout_s))
            else:
                keep = self.works.sure
                out.append(Resume(index, stage.seat, stage.ask, self.attempt, keep, next_seat, timeout_s))

    def _filled(self, now: float, out: list[Instruction]) -> bool:
        """Whether every stage holds what is sure; those that do not are being filled."""
        sure, complete = self.works.sure, True
        index = 0
        while index < len(self._stages):
            stage = self._stages[index]
            if stage.has >= sure:
                index += 1
                continue
            complete, first = False, index
            while index + 1 < len(self._stages) and self._stages[index + 1].has < sure:
                index += 1
            if first == 0:
                if self._feed is None:
                    self._feed = deque(self.works.again(0, sure, index))
                self._send_all(self._feed, now, out)
            elif not self._stages[first - 1].replay:
                self._ask_for_replay(first - 1, sure, index, out)
            index += 1
        return complete

    def _ask_for_replay(self, index: int, stop: int, last: int, out: list[Instruction]) -> None:
        stage = self._stages[index]
        self._last_ask += 1
        stage.replay, stage.filling = self._last_ask, last
        number, timeout_s = self.works.number(), self._patience_s(stop)
        self._owed = max(self._owed, stop)
        out.append(Replay(index, stage.seat, stage.replay, self.attempt, number, stop, last, timeout_s))

    def _go_on(self, now: float, out: list[Instruction]) -> None:
        self._phase, self._feed = Phase.RUNNING, None
        mending, self._mending = self._mending, None
        assert mending is not None
        self.works.begin_again()
        out.append(Mended(tuple(mending.lost.items()), now - mending.began_at))

    def _patience_s(self, positions: int) -> float:
        return self._pace.patience_s(self._owed + positions) * 2.0**self._stalls

    def _send_all(self, works: deque[Work], now: float, out: list[Instruction]) -> None:
        """What is due to be sent, ``WINDOW`` at a time."""
        ahead = 0
        for place, work in enumerate(works):
            if place >= WINDOW:
                break
            ahead += len(work.ids)
            if work.due:
                continue
            if not work.sent:
                work.sent, work.sent_at = True, now
            work.due = now + self._patience_s(ahead)
            out.append(
                Send(
                    self._stages[0].seat,
                    self.attempt,
                    work.number,
                    work.keep,
                    work.ids,
                    work.last,
                    work.picks,
                    work.draw,
                    work.prefill,
                )
            )

    # ------------------------------------------------------------------------------------------------------- checking

    def validate(self) -> None:
        """Raise ``AssertionError`` where what must always be so is not."""
        self.works.validate()
        for index, stage in enumerate(self._stages):
            assert stage.attempt <= self.attempt
            assert stage.seat >= 0 or not (stage.opened or stage.ask or stage.replay)
            if self._phase is Phase.RUNNING:
                assert self._ready(index)
        assert (self._mending is None) == (self._phase is Phase.RUNNING) or self._phase is Phase.ENDED
        if self._phase is Phase.RUNNING:
            assert all(work.due for work in list(self.works.flight)[:WINDOW]), "a work waits without a deadline"
