"""A worker's connections in the view of its job: the ring, what the strategy forms beside it, and direct messages."""

from __future__ import annotations

from collections.abc import Callable

from p2ptrain.core.errors import NetworkError
from ring import member_events as ev
from ring.chain import Chain
from ring.direct import DirectMessages
from ring.links import Topology
from ring.neighbours import RingBroken, cause_of
from ring.session import RingSession
from ring.view import View
from roles.worker.context import Context

STILL_S, NEW_S = 12.0, 60.0
"""Part of the patience with members, and with new ones. It is longer than a hang takes to be noticed."""
FORM_TIMEOUT_S = 20.0  # a neighbour may have to abort a long micro-batch before it joins the new view


def forming_s(view: View, state_bytes: int) -> float:
    # A neighbour may be redoing a step: allow four times what the optimizer takes on one thread.
    return FORM_TIMEOUT_S + max(state_bytes, view.state_bytes) / 100e6


def patience_s(view: View, applied: int, *, longest_s: float, state_bytes: int, trained: set[str]) -> float:
    """Longest time a collective may make no progress. Heartbeats prove that a peer lives; this bounds a stuck one.

    Three causes of slowness are allowed for. A member computes: 5 times the longest step so far, or 600 s before the
    first one. A member copies its state, at 100 MB/s. In the first step of a view, a member that was not in the last
    step is new: it loads libraries and heals, the whole state (of a split model, the largest stage's) at 1 MB/s.

    Args:
        applied: steps that this member has applied. trained: peer ids of the members of the newest one.
        longest_s: of a step; 0: there was none. state_bytes: of this member's state.
    """
    usual_s = 5.0 * longest_s if longest_s else 600.0
    state_bytes = max(state_bytes, view.state_bytes)
    known = {member.peer_id for member in view.members if member.healthy} & trained
    if applied > view.step or len(known) == view.size:
        return STILL_S + usual_s + state_bytes / 100e6
    return NEW_S + usual_s + state_bytes / 1e6


class ViewConnections:
    """Implements ``roles.strategies.interface.ConnectPeers``. ``on_broken`` is called once when one of them broke.

    Attributes:
        messages: between the members of the view, if the strategy asked for them.
        state_bytes: size of this member's state.
    """

    def __init__(self, context: Context, *, on_broken: Callable[[ev.ViewBroken], None]) -> None:
        self._context, self._on_broken = context, on_broken
        self._ring: RingSession | None = None
        self._sessions: list[RingSession | Chain] = []
        self.messages: DirectMessages | None = None
        self.state_bytes = 0
        self._closed_bytes = (0, 0)  # received and sent, by connections that are closed

    @property
    def session(self) -> RingSession:
        """The ring of all members. Raises ``NetworkError`` if it has ended."""
        if self._ring is None:
            raise NetworkError("the ring has ended")
        return self._ring

    @property
    def members(self) -> set[str]:
        """Peer ids of the members of the ring, if there is one."""
        return {member.peer_id for member in self._ring.view.members} if self._ring is not None else set()

    @property
    def busy(self) -> bool:
        """Whether other members wait for this one in a ring."""
        return any(isinstance(ring, RingSession) and ring.is_busy() for ring in self._sessions)

    async def form(self, view: View) -> RingSession:
        """Form the ring of all members. Raises as ``RingSession.form``."""
        self._ring = await self.ring(view)
        return self._ring

    async def ring(self, view: View, topology: Topology = Topology.RING) -> RingSession:
        timeout_s = forming_s(view, self.state_bytes)
        session = await RingSession.form(self._context, view, timeout_s=timeout_s, topology=topology)
        self._sessions.append(session)
        self._watch(session)
        return session

    async def chain(self, view: View, *, activation_bytes: int, gradient_bytes: int) -> Chain:
        chain = await Chain.form(
            self._context,
            view,
            activation_bytes=activation_bytes,
            gradient_bytes=gradient_bytes,
            timeout_s=forming_s(view, self.state_bytes),
        )
        self._sessions.append(chain)
        self._watch(chain)
        return chain

    def direct(self, session: RingSession) -> DirectMessages:
        self.messages = DirectMessages(self._context, session.view, session.rank)
        self.messages.attach(session)
        return self.messages

    def failure(self, generation: int) -> ev.ViewBroken | None:
        """Which lost neighbour made an activity fail; None: no connection names one."""
        ended = [session.broken.result() for session in self._sessions if session.broken.done()]
        return next((view_broken(broken, generation) for broken in ended if broken.suspect), None)

    def close(self) -> None:
        self._closed_bytes = self.totals()
        sessions, self._ring, self._sessions = self._sessions, None, []
        messages, self.messages = self.messages, None
        if messages is not None:
            messages.close()
        for session in sessions:
            session.close()

    def totals(self) -> tuple[int, int]:
        """Bytes received and sent in this job."""
        counted = [session.links for session in self._sessions]
        received, sent = self._closed_bytes
        received += sum(links.bytes_in for links in counted) + (self.messages.bytes_in if self.messages else 0)
        return received, sent + sum(links.bytes_out for links in counted) + (
            self.messages.bytes_out if self.messages else 0
        )

    def _watch(self, session: RingSession | Chain) -> None:
        session.broken.add_done_callback(lambda _: self._broke(session))

    def _broke(self, session: RingSession | Chain) -> None:
        if session in self._sessions and not session.broken.cancelled():
            broken = session.broken.result()
            for other in self._sessions:
                if other is not session and not other.links.follow_loss(broken):
                    other.close(broken.cause.message)
            self._on_broken(view_broken(broken, session.view.generation))


def view_broken(lost: RingBroken, generation: int) -> ev.ViewBroken:
    return ev.ViewBroken(generation, lost.suspect, lost.cause.message, cause=cause_of(lost.cause), beside=lost.beside)
