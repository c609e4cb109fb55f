"""The shell of one session over a chain: carries out the instructions of its core.

The caller submits a prompt in chunks, several of them under way at once. Then it submits one token at a time, or
several positions with a sample for each. The next request's ``keep`` cuts off the wrong ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from p2ptrain.core.activations import decode_ids
from p2ptrain.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    NetworkError,
    P2PTrainError,
    ProtocolError,
    Refused,
    UserError,
)
from p2ptrain.core.ids import new_id
from p2ptrain.core.texts import shortened
from roles.background import Background
from roles.serving import chain_core as ev
from roles.serving.chain_core import Session
from wire.chain_messages import NEXT_LOST, ChainBroken, ForwardRequest, Sampled

if TYPE_CHECKING:
    from roles.serving.chain import Chain
    from roles.serving.worker_peer import Peer

CLOSE_S = 5.0


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


class GenerationSession:
    """Runs forward requests through all stages. Lost stages are replaced meanwhile, and the tokens stay the same. Made
    by ``Chain.open``.

    Args:
        opening: parameters of ``session.open`` that are equal for all stages.

    Attributes:
        mendings: (what was lost, seconds until the requests went on) for each mending.
    """

    def __init__(self, chain: Chain, opening: dict[str, Any]) -> None:
        self.id = new_id()
        self.mendings: list[tuple[str, float]] = []
        self._chain, self._opening = chain, opening
        self._now = chain.context.world.clock.now
        self._core = Session([seat.number if seat is not None else -1 for seat in chain.seats], self._now())
        self._waiting: dict[int, asyncio.Future[ev.Done]] = {}  # by index of the request
        self._pending: deque[ev.Event] = deque()
        self._handling = False
        self._news = asyncio.Event()
        self._opened = False
        self._error: P2PTrainError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Background(self.fail)
        self._closed = False

    # ---------------------------------------------------------------------------------------------------- for callers

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def history(self) -> list[int]:
        return list(self._core.ids)

    async def run(self, request: ev.Submit) -> ev.Done:
        """Compute one request. Several may be under way; they are computed in the order of the calls. Its samples stay
        the same however many stages are lost meanwhile. After a cancelled call the session can only be closed.

        Raises:
            UserError: ids are not the model's, or more than the session was opened for.
            ValueError: ``keep`` is beyond the history, or there are too many ids, samples or requests.
            NetworkError: a stage was lost and cannot be replaced.
        """
        self._chain.check_ids(request.ids)
        if (needed := request.keep + len(request.ids)) > self._opening["positions"]:
            text = f"{needed} positions are too many: the session has {self._opening['positions']}"
            raise UserError(text, remedy="open it for more positions")
        if self._closed:
            raise ConnectionLost("this session is closed", remedy="open another session")
        if self._error is not None:
            raise self._failure()
        index = self._core.submitted
        answered: asyncio.Future[ev.Done] = asyncio.get_running_loop().create_future()
        # At once, even from within ``event``: the next request's index depends on it.
        self._carry_out(self._core.handle(request, self._now()))
        self._waiting[index] = answered
        self._set_timer()
        return await answered  # the core ends this wait: each of its waits has a deadline

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.event(ev.Tick(end=True))
        self._let_go(ConnectionLost("this session was closed meanwhile", remedy="open another session"))
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.stop()
        self._chain.forget(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # -------------------------------------------------------------------------------------------------- for the chain

    async def opened(self) -> None:
        """Wait until every stage has the session. Raises ``P2PTrainError`` if that fails."""
        self.event(ev.Tick())
        while not self._opened and self._error is None:
            self._news.clear()
            await self._news.wait()  # the core ends this wait
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        self._error = self._error or NetworkError(f"this client failed: {type(error).__name__}: {error}")
        self._let_go(self._failure())

    def event(self, event: ev.Event) -> None:
        self._pending.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._pending:
                self._carry_out(self._core.handle(self._pending.popleft(), self._now()))
        finally:
            self._handling = False
        self._set_timer()

    def heard(self, peer: Peer, message: Sampled | ChainBroken) -> None:
        """Process a message from a stage at ``peer``. Raises ``ProtocolError``: no correct stage sends it."""
        if message.epoch != self._core.epoch:
            return  # an older epoch: the sender may hold another stage by now, or none
        if isinstance(message, ChainBroken):
            sender = self._sender_untrusted(peer, message)
            if sender is None:
                return
            reason = f"{peer.name}: {shortened(message.reason)}"
            self.event(ev.Broken(sender, replace(message, reason=reason, remedy=shortened(message.remedy))))
        else:
            arrived = arrived_untrusted(message, self._chain.vocab_size)
            last = len(arrived.spent_us) - 1
            if last not in self._chain.held_by(peer):  # a stage must not put the blame on another one
                raise ProtocolError(f"{peer.name} answered for stage {last}, which it does not hold")
            self.event(arrived)

    # ------------------------------------------------------------------------------------------------------ internals

    def _sender_untrusted(self, peer: Peer, message: ChainBroken) -> int | None:
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

    def _carry_out(self, instructions: Sequence[ev.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case ev.Send():
                    self._send(instruction)
                case ev.Ask():
                    self._tasks.start(self._ask(instruction), instruction.kind)
                case ev.Close(stage, seat):
                    peer = self._chain.peer_in(stage, seat)
                    if peer is not None:
                        peer.tell("session.close", {"session": self.id, "index": stage}, timeout_s=CLOSE_S)
                case ev.Replace(stage, seat, reason):
                    self._chain.replace(self, stage, seat, reason)
                case ev.Done(index):
                    if (answered := self._waiting.pop(index, None)) is not None and not answered.done():
                        answered.set_result(instruction)
                case ev.SessionReady(lost, took_s):
                    self._opened = True
                    if lost:
                        what = "; ".join(f"stage {stage}: {reason}" for stage, reason in lost)
                        self.mendings.append((what, took_s))
                    self._news.set()
                case ev.Failed(error):
                    self._error = error
                    self._let_go(self._failure())

    def _send(self, send: ev.Send) -> None:
        peer = self._chain.peer_in(0, send.seat)
        if peer is not None:  # otherwise ``Lost`` follows
            work, count = send.work, len(send.work.ids)
            what = (send.last, work.samples, work.sample_index)
            request = ForwardRequest(
                self.id, send.epoch, send.number, work.keep, count, "ids", *what, prefill=work.prefill
            )
            peer.give(request, work.ids)

    async def _ask(self, asked: ev.Ask) -> None:
        peer = self._chain.peer_in(asked.stage, asked.seat)
        if peer is None:
            return  # ``Lost`` follows
        try:
            method, params = self._request(asked, peer)
        except ConnectionLost as problem:
            self.event(ev.Declined(asked.stage, asked.ask, NEXT_LOST, problem.message))
            return
        peer.listeners[self.id] = self.heard
        peer.watch_closely()  # before the answer: only the answer may be late
        try:
            answer = await peer.ask(method, params, timeout_s=asked.timeout_s)
            position = _position_untrusted(answer) if asked.kind == "resume" else 0
        except ConnectionLost:
            return  # ``Lost`` follows
        except DeadlineExceeded as problem:
            self.event(ev.Declined(asked.stage, asked.ask, ev.TOO_SLOW, problem.message, problem.remedy))
        except P2PTrainError as problem:
            code = problem.code if isinstance(problem, Refused) else "failed"
            self.event(ev.Declined(asked.stage, asked.ask, code, problem.message, problem.remedy))
        else:
            self.event(ev.Answered(asked.stage, asked.ask, position))

    def _request(self, asked: ev.Ask, peer: Peer) -> tuple[str, dict[str, Any]]:
        params: dict[str, Any] = {"session": self.id, "index": asked.stage, "epoch": asked.epoch}
        params["next"] = self._chain.place_after(asked.stage, peer, asked.next_seat)
        if asked.kind == "resume":
            return "session.resume", params | {"keep": asked.keep}
        return "session.open", params | self._opening | {"part": self._chain.seated(asked.stage).loaded.part}

    def _let_go(self, problem: NetworkError) -> None:
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(problem)
        self._waiting.clear()
        self._news.set()

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


def arrived_untrusted(message: Sampled, vocab_size: int) -> ev.Arrived:
    """Check a ``Sampled`` message. Raises ``ProtocolError``."""
    tokens = decode_ids(message.tokens)
    if not all(0 <= token < vocab_size for token in tokens):
        raise ProtocolError(f"a token is not in the vocabulary of {vocab_size} tokens")
    return ev.Arrived(message.epoch, message.number, tokens, tuple(message.spent_us))


def _position_untrusted(answer: dict[str, Any]) -> int:
    position = answer.get("position")
    if type(position) is not int or position < 0:
        raise ProtocolError("session.resume was answered without a position")
    return position
