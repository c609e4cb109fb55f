"""The core of a session over a chain of stages: computes passes, even if stages are lost at any time. Pure.

The client *submits* passes; up to ``MOST_PASSES`` may be under way, and are answered in order. The *history* is the
session's token positions so far. A pass cuts it to its first ``keep`` positions, appends token ids, and has a token
sampled for each of the last ``samples`` positions. ``keep`` may lie within positions of passes under way.

A position is *committed* when its pass was answered and no pass that was sent cuts it off. (The word has another
meaning for a training step.) Every stage holds the committed positions. The client keeps the token ids, so a lost stage
is rebuilt by sending them through the chain again, up to that stage. Stages are numbered from 0. A *seat* number
identifies a holder of a stage; each new holder gets a higher number.

Any failure raises the session's *epoch* and begins a *mending*. Stages and this core drop whatever belongs to an older
epoch. A mending has no script. After each event it compares the state of every stage with what it should be, and asks
for what is missing. So a second loss during a mending needs no special case, and opening a session is a mending in
which all stages are missing. It begins with the positions of its prompt that all stages have computed for others:

    state of a stage                                instruction
    it has no peer                                  Replace, once; StageAssigned answers, or StageUnassigned,
                                                    which ends the session
    it has not opened the session                   Ask open, once the next stage is ready: the stage dials it then;
                                                      the answer tells how many of its positions the stage has
    it does not know the epoch, or its link does    Ask resume: cut the history to the committed positions; the answer
      not lead to the next stage's current peer       tells how many it holds (fewer if it was still being rebuilt)
    all are ready, some hold fewer positions than   Send the token ids again, in requests that end at the last such
      the first pass under way keeps                  stage; the stages before it compute them again, too
    all hold these positions                        Send the passes under way again, in order: RUNNING

Repeated requests give the same tokens, because samples are numbered. But a rebuilt stage computed its positions in
other batches, so a token may differ where rounding decides between two (``compute.linears`` says where it does not).

If a stage dropped the session's positions for older sessions, the session is mended, and the stage answers the resume
when it has room. If it reports another failure of its own, the session ends. If a stage cannot reach the next one, the
next stage's peer is replaced; the second time its own peer is. More than ``MOST_SETBACKS`` end the session. If
no stage is lost and an answer is overdue, the epoch is raised. A stage that hangs does not answer the resume that
follows, and is replaced. More than ``MOST_STALLS`` overdue answers in a row end the session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from p2ptrain.core.errors import DeadlineExceeded, P2PTrainError, PeerError
from p2ptrain.core.serving import TOP_BYTES, HashedIds, hash_blocks, scored_rows
from roles.pass_queue import SHARED_CHUNK
from roles.serving.model import MOST_PASSES, PassRequest, PassResult
from wire.chain_messages import MAX_REQUEST_POSITIONS, NEXT_LOST, PREEMPTED, UNKNOWN_PART, UNKNOWN_SESSION, ChainBroken

TOO_SLOW = "too-slow"
"""Code of ``StageDeclined``, set by the client: no answer came in time."""

ANSWER_S, POSITION_S = 120.0, 0.2
"""Deadline of an answer, and what each position ahead of it adds (long prompts of a large model on slow processors).
Lost peers are detected by a closed connection or by silence instead."""
MOST_STALLS = 3
MOST_SETBACKS = 100
"""Most failures of stages in a row, without an answered pass. That a stage drops the session's positions for older
sessions is one, too."""

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
class StageLost:
    """The peer in ``seat`` is gone, or its loss was decided."""

    stage: int
    seat: int
    reason: str


@dataclass(frozen=True, slots=True)
class StageAnswered:
    """An ``StageAsk`` was answered. ``position``: what the stage holds now."""

    stage: int
    ask: int
    position: int = 0


@dataclass(frozen=True, slots=True)
class StageDeclined:
    """An ``StageAsk`` was refused, or not answered in time."""

    stage: int
    ask: int
    code: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class SamplesArrived:
    """A ``Sampled`` message from the stage at which a request ended."""

    epoch: int
    number: int
    tokens: tuple[int, ...]
    spent_us: tuple[int, ...]
    scores: bytes = b""
    tops: bytes = b""


@dataclass(frozen=True, slots=True)
class StageBroken:
    """A message of stage ``sender``. If a peer is known to be lost, ``StageLost`` comes first."""

    sender: int
    message: ChainBroken


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. ``end``: the client closes the session."""

    end: bool = False


ChainEvent = (
    StageAssigned
    | StageUnassigned
    | StageLost
    | StageAnswered
    | StageDeclined
    | SamplesArrived
    | StageBroken
    | PassRequest
    | Tick
)


# -------------------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class ForwardSend:
    """A forward request for the first stage. ``number``, ``last``, ``block_hashes``: as in
    ``wire.chain_messages.ForwardRequest``. ``history``: as of ``p2ptrain.core.serving.Pass``."""

    seat: int
    epoch: int
    number: int
    work: PassRequest
    last: int
    block_hashes: tuple[bytes, ...] = ()
    history: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StageAsk:
    """A request to the stage's peer.

    Attributes:
        kind: ``open`` the session, or ``resume`` it in a new epoch with the first ``keep`` positions at most.
        ask: number of this request.
        next_seat: seat of the next stage, which the stage dials; -1 for the last stage.
        block_hashes: to open it: of the positions that the stage is to have, if it has computed them for another one.
    """

    kind: str
    stage: int
    seat: int
    ask: int
    epoch: int
    timeout_s: float
    next_seat: int = -1
    keep: int = 0
    block_hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class StageClose:
    stage: int
    seat: int


@dataclass(frozen=True, slots=True)
class StageReplace:
    """Find another peer for the stage. -1: it has none; else the one in ``seat`` is unusable."""

    stage: int
    seat: int
    reason: str


@dataclass(frozen=True, slots=True)
class SessionReady:
    """The session runs: it was opened or mended. ``lost``: lost stages with reasons. ``took_s``: since the first."""

    lost: tuple[tuple[int, str], ...]
    took_s: float


@dataclass(frozen=True, slots=True)
class SessionFailed:
    error: P2PTrainError


ChainInstruction = ForwardSend | StageAsk | StageClose | StageReplace | PassResult | SessionReady | SessionFailed
"""A ``PassResult`` is of the oldest pass under way."""


# ------------------------------------------------------------------------------------------------------------ the core


class ChainPhase(Enum):
    MENDING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True)
class ForwardWork:
    """A forward request: a pass, or one that rebuilds stages.

    Attributes:
        last: the stage at which it ends.
        number: of its last sending. due: time by which the answer is expected; 0: it is not sent in this epoch.
        sent_at: when it was first sent; None: it was not.
    """

    work: PassRequest
    last: int
    number: int = 0
    due: float = 0.0
    sent_at: float | None = None
    mended: bool = False


@dataclass(slots=True)
class _Stage:
    """What the session knows of a stage.

    Attributes:
        seat: seat of its peer; -1: it has none. sought: a replacement was requested.
        opened: its peer has the session. epoch: the last one that its peer confirmed.
        next_seat: seat of the next stage to which its link leads; None: it must dial again.
        has: positions that it holds in ``epoch``.
        ask: the open or resume under way.
        failures: failures of reaching the next stage, since a pass was last answered.
    """

    seat: int = -1
    sought: bool = False
    opened: bool = False
    epoch: int = 0
    next_seat: int | None = None
    has: int = 0
    ask: StageAsk | None = None
    failures: int = 0


class ChainSessionCore:
    """One session over a chain; see the module's docstring. The first event starts it.

    Args:
        seats: current seat of each stage, in order; -1: the stage has no peer.
        sample_from: as of ``ModelSession``; the positions before it are a prompt's.
        prompt: ids with which the session may begin, as far as all stages have computed them for other sessions.

    Attributes:
        ids: token ids of all answered positions, and of those with which the session began.
        passes: passes under way, in order.
        awaited: requests of this epoch, in order: those that rebuild stages, or, when RUNNING, the passes.
    """

    def __init__(self, seats: Sequence[int], now: float, sample_from: int, prompt: Sequence[int] = ()) -> None:
        if not seats:
            raise ValueError("a chain needs at least one stage")
        self.epoch = 1
        self.phase = ChainPhase.MENDING
        self.ids: list[int] = []
        self.passes: deque[ForwardWork] = deque()
        self.awaited: deque[ForwardWork] = deque()
        self.last_number = 0
        self._sample_from = sample_from
        self._stages = [_Stage(seat=seat) for seat in seats]
        self._mending_since: float | None = now
        self._lost: dict[int, str] = {}  # stage -> reason, in this mending
        self._last_ask = 0
        self._prompt: Sequence[int] | None = prompt  # None: the session has begun
        self._sent = HashedIds()  # as the first stage has them when it has computed all that was sent
        self._setbacks = self._stalls = 0

    # ---------------------------------------------------------------------------------------------------- for callers

    @property
    def committed(self) -> int:
        """Positions that every stage holds, unless it was lost since, and that no pass that was sent cuts off."""
        return min([len(self.ids), *(each.work.keep for each in self.passes if each.sent_at is not None)])

    @property
    def _needed(self) -> int:
        """Positions that every stage must hold before the passes under way can be computed."""
        return self.passes[0].work.keep if self.passes else len(self.ids)

    def next_deadline(self) -> float | None:
        """Time at which ``Tick`` is due if no event comes first. None: no answer to a forward request is awaited (an
        ``StageAsk`` has its own timeout)."""
        return self.awaited[0].due or None if self.awaited else None

    def handle(self, event: ChainEvent, now: float) -> list[ChainInstruction]:
        """Process ``event``. A ``PassRequest`` is as ``ModelSession.append`` allows it."""
        out: list[ChainInstruction] = []
        if self.phase is ChainPhase.ENDED:
            return out
        match event:
            case PassRequest():
                self.passes.append(ForwardWork(event, len(self._stages) - 1))
            case SamplesArrived():
                self._take_samples(event, now, out)
            case StageAssigned(index, seat):
                if self._stages[index].seat < seat:
                    if self._stages[index].seat >= 0:  # its loss was not reported
                        self._vacate(index, "another peer replaced it", now)
                    self._stages[index] = _Stage(seat=seat)
            case StageLost(index, seat, reason):
                if self._stages[index].seat == seat:
                    self._vacate(index, reason, now)
            case StageUnassigned(index, error):
                if self._stages[index].seat < 0:
                    self._fail(error, out)
            case StageAnswered():
                self._take_agreement(event)
            case StageDeclined():
                self._take_refusal(event, now, out)
            case StageBroken():
                self._take_break(event, now, out)
            case Tick(end):
                if end:
                    self._close(out)
                else:
                    self._tick(now, out)
        self._steer(now, out)
        return out

    # --------------------------------------------------------------------------------------------------------- events

    def _take_samples(self, event: SamplesArrived, now: float, out: list[ChainInstruction]) -> None:
        if event.epoch != self.epoch or not self.awaited:
            return
        request = self.awaited[0]
        work = request.work
        scored = scored_rows(len(work.targets), work.samples, work.tops)
        sizes = (len(event.tokens), len(event.scores), len(event.tops), len(event.spent_us))
        wanted = (work.samples, 4 * scored, TOP_BYTES * scored * (work.tops or 0), request.last + 1)
        if event.number != request.number or sizes != wanted:
            self._begin_mending(now)
            reason = f"it sent an invalid answer to request {request.number}"
            self._count_setback(f"stage {request.last}: {reason}", "", out)
            self._give_up(request.last, reason, now, out)
            return
        self.awaited.popleft()
        self._stalls = 0
        if self.awaited:  # the next request had to wait for this one
            following = self.awaited[0]
            following.due = max(following.due, now + _patience_s(len(following.work.ids)))
        if self.phase is not ChainPhase.RUNNING:
            for stage in self._stages[: request.last + 1]:
                stage.has = work.stop
            return
        self._setbacks = 0
        for stage in self._stages:
            stage.failures = 0
        self.passes.popleft()
        del self.ids[work.keep :]
        self.ids += work.ids
        assert request.sent_at is not None
        out.append(
            PassResult(event.tokens, now - request.sent_at, event.spent_us, request.mended, event.scores, event.tops)
        )

    def _take_agreement(self, event: StageAnswered) -> None:
        stage = self._stages[event.stage]
        if stage.ask is not None and event.ask == stage.ask.ask:
            asked, stage.ask = stage.ask, None
            stage.opened = True
            stage.epoch, stage.next_seat = asked.epoch, asked.next_seat
            stage.has = max(0, min(event.position, self.committed if self._prompt is None else len(self._prompt)))

    def _take_refusal(self, event: StageDeclined, now: float, out: list[ChainInstruction]) -> None:
        stage = self._stages[event.stage]
        asked = stage.ask
        if asked is None or asked.ask != event.ask:
            return
        stage.ask = None
        self._begin_mending(now)  # the stage may already be in this epoch, and would get no resume
        self._count_setback(f"stage {event.stage} refuses to {asked.kind}: {event.reason}", event.remedy, out)
        if event.code == NEXT_LOST:
            self._unreachable(event.stage, asked.next_seat, event.reason, now, out)
        elif event.code == UNKNOWN_SESSION:
            stage.opened = False
            if event.stage > 0:
                self._stages[event.stage - 1].next_seat = None
        elif event.code in (TOO_SLOW, UNKNOWN_PART):
            self._give_up(event.stage, event.reason, now, out)
        else:  # no memory, or the model has fewer positions: any peer would refuse
            self._fail(PeerError(event.reason, remedy=event.remedy), out)

    def _take_break(self, event: StageBroken, now: float, out: list[ChainInstruction]) -> None:
        sender, message = self._stages[event.sender], event.message
        if message.epoch != self.epoch or sender.seat < 0 or not sender.opened:
            return
        self._begin_mending(now)
        self._count_setback(f"stage {event.sender} reports: {message.reason}", message.remedy, out)
        if message.lost == event.sender and message.code == PREEMPTED:
            return  # it answers the resume when it has room for the positions again
        if message.lost == event.sender:
            self._fail(PeerError(message.reason, remedy=message.remedy), out)
        else:
            sender.next_seat = None  # it dials again; if that fails the next stage is given up

    def _tick(self, now: float, out: list[ChainInstruction]) -> None:
        due = self.next_deadline()
        if due is None or now < due:
            return
        self._stalls += 1
        if self._stalls > MOST_STALLS:
            silent_s = now - (self.awaited[0].sent_at or now)
            text = f"the workers of the split model did not answer for {silent_s:.0f} s"
            self._fail(DeadlineExceeded(text, remedy="a worker may be overloaded: see p2ptrain peers list"), out)
            return
        self._begin_mending(now)

    # ------------------------------------------------------------------------------------------------------- setbacks

    def _begin_mending(self, now: float) -> None:
        self.epoch += 1
        self.awaited.clear()
        for each in self.passes:
            each.mended = True
        if self._mending_since is None:
            self._mending_since = now
        self.phase = ChainPhase.MENDING

    def _vacate(self, index: int, reason: str, now: float) -> None:
        fresh = not self._stages[index].opened and self._stages[index].ask is None
        self._stages[index] = _Stage()
        if not fresh or self.phase is ChainPhase.RUNNING:
            self._begin_mending(now)
        self._lost[index] = reason

    def _give_up(self, index: int, reason: str, now: float, out: list[ChainInstruction]) -> None:
        seat = self._stages[index].seat
        if self.phase is ChainPhase.ENDED or seat < 0:
            return
        out.append(StageClose(index, seat))
        self._vacate(index, reason, now)
        self._stages[index].sought = True
        out.append(StageReplace(index, seat, reason))

    def _unreachable(self, index: int, next_seat: int, reason: str, now: float, out: list[ChainInstruction]) -> None:
        stage = self._stages[index]
        stage.next_seat = None
        if self._next_seat(index) != next_seat:
            return  # the peer that it could not dial is given up already
        stage.failures += 1
        self._give_up(index if stage.failures > 1 else index + 1, reason, now, out)

    def _count_setback(self, what: str, remedy: str, out: list[ChainInstruction]) -> None:
        self._setbacks += 1
        if self._setbacks > MOST_SETBACKS:
            text = f"the split model failed {self._setbacks} times without any progress; the last failure: {what}"
            self._fail(PeerError(text, remedy=remedy), out)

    def _fail(self, error: P2PTrainError, out: list[ChainInstruction]) -> None:
        if self.phase is not ChainPhase.ENDED:
            self._close(out)
            out.append(SessionFailed(error))

    def _close(self, out: list[ChainInstruction]) -> None:
        for index, stage in enumerate(self._stages):
            if stage.seat >= 0 and (stage.opened or stage.ask):
                out.append(StageClose(index, stage.seat))
        self.phase = ChainPhase.ENDED
        self.awaited.clear()

    # --------------------------------------------------------------------------------------------------------- steering

    def _steer(self, now: float, out: list[ChainInstruction]) -> None:
        if self.phase is ChainPhase.MENDING:
            for index, stage in enumerate(self._stages):
                if stage.seat < 0 and not stage.sought:
                    stage.sought = True
                    out.append(StageReplace(index, -1, self._lost.get(index, "")))
            self._connect(out)
            if all(self._ready(index) for index in range(len(self._stages))):
                self._rebuild_or_run(now, out)
        if self.phase is ChainPhase.RUNNING:
            for each in list(self.passes)[len(self.awaited) :]:
                each.due = 0.0
                self.awaited.append(each)
        self._send_all(now, out)

    def _next_seat(self, index: int) -> int:
        return self._stages[index + 1].seat if index + 1 < len(self._stages) else -1

    def _ready(self, index: int) -> bool:
        stage = self._stages[index]
        if stage.seat < 0 or not stage.opened or stage.ask is not None or stage.epoch != self.epoch:
            return False
        return stage.next_seat == self._next_seat(index)

    def _connect(self, out: list[ChainInstruction]) -> None:
        for index in reversed(range(len(self._stages))):
            stage, next_seat = self._stages[index], self._next_seat(index)
            if stage.seat < 0 or stage.ask is not None or self._ready(index):
                continue
            dials = index + 1 < len(self._stages) and (not stage.opened or stage.next_seat != next_seat)
            if dials and not self._ready(index + 1):
                continue
            kind, keep = ("resume", self.committed) if stage.opened else ("open", 0)
            timeout_s = _patience_s(MAX_REQUEST_POSITIONS)  # a request of another session may have to end first
            self._last_ask += 1
            hashes: tuple[bytes, ...] = ()
            if not stage.opened:
                hashes = hash_blocks(self.ids[: self.committed] if self._prompt is None else self._prompt)
            about = (self._last_ask, self.epoch, timeout_s, next_seat, keep, hashes)
            stage.ask = StageAsk(kind, index, stage.seat, *about)
            out.append(stage.ask)

    def _rebuild_or_run(self, now: float, out: list[ChainInstruction]) -> None:
        if self.awaited:
            return
        if self._prompt is not None:
            self.ids = list(self._prompt[: min(stage.has for stage in self._stages)])
            self._prompt = None
        self._sent = HashedIds(self.ids)
        lacking = [index for index, stage in enumerate(self._stages) if stage.has < self._needed]
        if lacking:
            self.awaited.extend(self._again(lacking[-1]))
            return
        assert self._mending_since is not None
        out.append(SessionReady(tuple(self._lost.items()), now - self._mending_since))
        self.phase, self._mending_since, self._lost = ChainPhase.RUNNING, None, {}

    def _again(self, last: int) -> list[ForwardWork]:
        """Requests that send positions to stages [0, last] again, ``MOST_PASSES`` of them at a time. None mixes ids of
        the prompt and generated ones."""
        requests: list[ForwardWork] = []
        start = min(stage.has for stage in self._stages[: last + 1])
        while start < self._needed:
            end = min(start + SHARED_CHUNK, self._needed)
            if start < self._sample_from:
                end = min(end, self._sample_from)
            requests.append(ForwardWork(PassRequest(start, tuple(self.ids[start:end])), last))
            start = end
        return requests

    def _send_all(self, now: float, out: list[ChainInstruction]) -> None:
        ahead = 0
        for request in list(self.awaited)[:MOST_PASSES]:
            ahead += len(request.work.ids)
            if request.due:
                continue
            self.last_number += 1
            request.number, request.due = self.last_number, now + _patience_s(ahead)
            if request.sent_at is None:
                request.sent_at = now
            work, seat = request.work, self._stages[0].seat
            hashes = self._sent.append(work.keep, work.ids)
            history = self._sent.next_history() if work.samples else ()
            out.append(ForwardSend(seat, self.epoch, request.number, work, request.last, hashes, history))


def _patience_s(positions: int) -> float:
    return ANSWER_S + POSITION_S * positions
