"""The shell of one session over a chain of stages: carries out the instructions of its core, ``chain_core``.

A pass is a chunk of a prompt, a token, or drafts. Several are under way, one after the other in the chain. The next
pass's ``keep`` cuts off wrong drafts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from p2ptrain.core.activations import decode_ids, encode_ids
from p2ptrain.core.background import Background
from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    NetworkError,
    P2PTrainError,
    ProtocolError,
    UserError,
)
from p2ptrain.core.serving import Sampling
from p2ptrain.core.texts import shortened
from p2ptrain.core.world import World
from roles.serving import chain_core as ev
from roles.serving.chain_core import ChainSessionCore
from roles.serving.model import MOST_PASSES, PassRequest, PassResult
from roles.serving.worker_peer import WorkerPeer
from wire.chain_messages import (
    MAX_OPEN_HASHES,
    NEXT_LOST,
    PREEMPTED,
    ChainBroken,
    ForwardRequest,
    Sampled,
)


@dataclass(slots=True)
class ChainTimes:
    """Sums over the passes of a chain. Prompts are counted separately, and passes with a mending are not counted.

    Attributes:
        mendings: (what was lost, seconds until the passes went on) for each mending of a session.
        preemptions: how often a stage dropped a session's positions for those of older sessions.
    """

    tokens: int = 0
    took_s: float = 0.0
    stages_us: list[int] = field(default_factory=list)
    prompts: int = 0
    prompt_s: float = 0.0
    mendings: list[tuple[str, float]] = field(default_factory=list)
    preemptions: int = 0

    def add(self, result: PassResult, *, prefill: bool) -> None:
        if result.mended:
            return
        if prefill:
            self.prompts += len(result.tokens)
            self.prompt_s += result.took_s
            return
        self.tokens += len(result.tokens)
        self.took_s += result.took_s
        spent_us = result.spent_us
        before = self.stages_us if len(self.stages_us) == len(spent_us) else [0] * len(spent_us)
        self.stages_us = [before_us + us for before_us, us in zip(before, spent_us, strict=True)]


class SeatedChain(Protocol):
    """The chain as its sessions know it: ``chain.StageChain``, which documents the methods."""

    times: ChainTimes

    @property
    def vocab_size(self) -> int: ...
    def peer_in(self, index: int, number: int) -> WorkerPeer | None: ...
    def held_by(self, peer: WorkerPeer) -> list[int]: ...
    def address_after(self, index: int, number: int) -> dict[str, Any] | None: ...
    def part_of(self, index: int) -> str: ...
    def replace(self, session: ChainSession, index: int, number: int, reason: str) -> None: ...
    def forget(self, session: ChainSession) -> None: ...


class ChainSession:
    """A ``ModelSession`` over all stages. Made by ``StageChain.open``.

    Args:
        seats: current seat of each stage; -1: nobody holds it.
        opening: parameters of ``session.open`` that are equal for all stages.
        ids: the prompt.
    """

    most_passes = MOST_PASSES

    def __init__(
        self,
        chain: SeatedChain,
        seats: Sequence[int],
        opening: dict[str, Any],
        sampling: Sampling,
        *,
        sample_from: int,
        ids: Sequence[int],
        world: World,
    ) -> None:
        self.id = world.new_id()
        self.sample_from = sample_from
        self._chain, self._opening, self._now = chain, opening | {"sampling": asdict(sampling)}, world.clock.now
        self._core = ChainSessionCore(seats, self._now(), sample_from, ids[:-1])  # the last position is always computed
        self._has_penalties = sampling.has_penalties
        self._answers: deque[asyncio.Future[PassResult]] = deque()  # of the passes under way
        self._pending: deque[ev.ChainEvent] = deque()
        self._settled = asyncio.Event()  # it was opened, or has failed
        self.cached = 0
        self._error: P2PTrainError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Background(self.fail)
        self._closed = False

    async def append(self, request: PassRequest) -> PassResult:
        """See ``ModelSession``. The duration includes the transfer and other sessions' passes at a stage.

        Raises:
            UserError: more positions than the session was opened for.
            NetworkError: a stage was lost and cannot be replaced.
        """
        if request.stop > self._opening["positions"]:
            text = f"{request.stop} positions are too many: the session has {self._opening['positions']}"
            raise UserError(text, remedy="open it for more positions")
        if self._closed:
            raise ConnectionLost("this session is closed", remedy="open another session")
        if self._error is not None:
            raise self._failure()
        self.event(request)
        self._answers.append(asyncio.get_running_loop().create_future())
        result = await self._answers[-1]  # the core ends this wait: each of its waits has a deadline
        self._chain.times.add(result, prefill=request.keep < self.sample_from)
        return result

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.event(ev.Tick(end=True))
        self._fail_passes(ConnectionLost("this session was closed meanwhile", remedy="open another session"))
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.stop()
        self._chain.forget(self)

    async def wait_until_open(self) -> None:
        """Wait until every stage has the session. Raises ``P2PTrainError`` if that fails."""
        self.event(ev.Tick())
        await self._settled.wait()  # the core ends this wait
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        self._error = self._error or NetworkError(f"this client failed: {type(error).__name__}: {error}")
        self._fail_passes(self._failure())

    def event(self, event: ev.ChainEvent) -> None:
        self._pending.append(event)
        if len(self._pending) > 1:
            return  # the call that handles the first of them goes on with this one
        try:
            while self._pending:
                self._carry_out(self._core.handle(self._pending[0], self._now()))
                self._pending.popleft()
        finally:
            self._pending.clear()
        self._set_timer()

    def take_untrusted(self, peer: WorkerPeer, message: Sampled | ChainBroken) -> None:
        """Process a message from a stage at ``peer``. Raises ``ProtocolError``: no correct stage sends it."""
        if message.epoch != self._core.epoch:
            return  # an older epoch: the sender may hold another stage by now, or none
        if isinstance(message, ChainBroken):
            sender = self._sender_untrusted(peer, message)
            if sender is None:
                return
            self._chain.times.preemptions += message.code == PREEMPTED
            reason = f"{peer.name}: {shortened(message.reason)}"
            self.event(ev.StageBroken(sender, replace(message, reason=reason, remedy=shortened(message.remedy))))
        else:
            samples = samples_untrusted(message, self._chain.vocab_size)
            last = len(samples.spent_us) - 1
            if last not in self._chain.held_by(peer):  # a stage must not put the blame on another one
                raise ProtocolError(f"{peer.name} answered for stage {last}, which it does not hold")
            self.event(samples)

    def _sender_untrusted(self, peer: WorkerPeer, message: ChainBroken) -> int | None:
        """The stage that sent it; None: ``peer`` holds no stage any more. Raises ``ProtocolError``."""
        held = self._chain.held_by(peer)
        if not held:
            return None
        # A peer with two consecutive stages means the first one if the next stage is lost.
        wanted = (message.lost - 1, message.lost) if message.code == NEXT_LOST else (message.lost,)
        for index in wanted:
            if index in held:
                return index
        raise ProtocolError(f"{peer.name} reported stage {message.lost}, which is neither its own nor the next one")

    def _carry_out(self, instructions: Sequence[ev.ChainInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case ev.ForwardSend():
                    self._send(instruction)
                case ev.StageAsk():
                    self._tasks.start(self._ask(instruction), instruction.kind)
                case ev.StageClose(stage, seat):
                    peer = self._chain.peer_in(stage, seat)
                    if peer is not None:
                        peer.ask_later("session.close", {"session": self.id, "index": stage})
                case ev.StageReplace(stage, seat, reason):
                    self._chain.replace(self, stage, seat, reason)
                case PassResult():
                    answer = self._answers.popleft()
                    if not answer.done():  # its caller was cancelled
                        answer.set_result(instruction)
                case ev.SessionReady(lost, took_s):
                    if not self._settled.is_set():
                        self.cached = len(self._core.ids)
                    if lost:
                        what = "; ".join(f"stage {stage}: {reason}" for stage, reason in lost)
                        self._chain.times.mendings.append((what, took_s))
                    self._settled.set()
                case ev.SessionFailed(error):
                    self._error = error
                    self._fail_passes(self._failure())

    def _send(self, send: ev.ForwardSend) -> None:
        peer = self._chain.peer_in(0, send.seat)
        if peer is not None:  # otherwise ``StageLost`` follows
            work, count = send.work, len(send.work.ids)
            what = (send.last, work.samples, work.sample_index(self.sample_from))
            how: dict[str, Any] = {"prefill": work.keep < self.sample_from, "targets": encode_ids(work.targets)}
            how["block_hashes"] = b"".join(send.block_hashes)
            history = send.history if self._has_penalties else ()
            how |= {"tops": work.tops, "history": len(history), "mask_bytes": len(work.masks)}
            request = ForwardRequest(self.id, send.epoch, send.number, work.keep, count, "ids", *what, **how)
            peer.send_forward(request, encode_ids((*work.ids, *history)) + work.masks)

    async def _ask(self, asked: ev.StageAsk) -> None:
        peer = self._chain.peer_in(asked.stage, asked.seat)
        if peer is None:
            return  # ``Lost`` follows
        try:
            method, params = self._request(asked)
        except ConnectionLost as problem:
            self.event(ev.StageDeclined(asked.stage, asked.ask, NEXT_LOST, problem.message))
            return
        peer.listeners[self.id] = self.take_untrusted
        peer.watch_closely()  # before the answer: only the answer may be late
        try:
            answer = await peer.ask(method, params, timeout_s=asked.timeout_s)
            position = _position_untrusted(answer)
        except ConnectionLost:
            return  # ``Lost`` follows
        except DeadlineExceeded as problem:
            self.event(ev.StageDeclined(asked.stage, asked.ask, ev.TOO_SLOW, problem.message, problem.remedy))
        except P2PTrainError as problem:
            self.event(ev.StageDeclined(asked.stage, asked.ask, problem.code, problem.message, problem.remedy))
        else:
            self.event(ev.StageAnswered(asked.stage, asked.ask, position))

    def _request(self, asked: ev.StageAsk) -> tuple[str, dict[str, Any]]:
        params: dict[str, Any] = {"session": self.id, "index": asked.stage, "epoch": asked.epoch}
        params["next"] = self._chain.address_after(asked.stage, asked.next_seat)
        if asked.kind == "resume":
            return "session.resume", params | {"keep": asked.keep}
        hashes = b"".join(asked.block_hashes[:MAX_OPEN_HASHES]).hex()
        params |= self._opening | {"part": self._chain.part_of(asked.stage), "block_hashes": hashes}
        return "session.open", params

    def _fail_passes(self, problem: NetworkError) -> None:
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(problem)
        self._settled.set()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._core.next_deadline()
        if due is not None and not self._closed:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, due - self._now()), self.event, ev.Tick())

    def _failure(self) -> NetworkError:
        assert self._error is not None
        text = f"the split model broke and cannot be repaired: {self._error.message}"
        failure = NetworkError(text, remedy=self._error.remedy or "start another worker: p2ptrain join; then try again")
        failure.__cause__ = self._error
        return failure


def samples_untrusted(message: Sampled, vocab_size: int) -> ev.SamplesArrived:
    """Check a ``Sampled`` message. Raises ``ProtocolError``."""
    tokens, half = decode_ids(message.tokens), len(message.tops) // 2
    if not all(0 <= token < vocab_size for token in (*tokens, *decode_ids(message.tops[:half]))):
        raise ProtocolError(f"a token is not in the vocabulary of {vocab_size} tokens")
    if not np.isfinite(np.frombuffer(message.scores + message.tops[half:], "<f4")).all():
        raise ProtocolError("a log-probability is not finite")
    what = tokens, tuple(message.spent_us), message.scores, message.tops
    return ev.SamplesArrived(message.epoch, message.number, *what)


def _position_untrusted(answer: dict[str, Any]) -> int:
    position = answer.get("position")
    if type(position) is not int or position < 0:
        raise ProtocolError("a request to open or resume a session was answered without a position")
    return position
