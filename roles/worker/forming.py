"""How a job's worker forms the ring of a view, and what its strategy wants beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

from configs.schema import Membership
from p2ptrain.core.world import World
from ring.chain import Chain
from ring.links import Inbound, Topology
from ring.session import RingSession
from ring.view import View
from roles.worker.context import Context

FORM_TIMEOUT_S = 20.0  # a neighbour may still be aborting a long micro-batch before it turns to the new view
REDO_BYTES_PER_S = 100e6  # it may also be redoing a step: one thread's optimizer, seen at four times that


class _Usual(TypedDict):
    world: World
    peer_id: str
    name: str
    seed_host: str
    inbound: Inbound
    heartbeat_s: float
    death_s: float
    streams: int
    timeout_s: float


class Forming:
    """``roles.strategies.Meet``, for one job.

    Args:
        state_bytes: of this member's state; a neighbour may still be busy with one that is as large, or larger.
        joined: called with what was formed beside a view's ring: it ends with the view's, and the view's with it.
    """

    def __init__(
        self,
        around: Context,
        membership: Membership,
        *,
        state_bytes: Callable[[], int],
        joined: Callable[[RingSession | Chain], None],
    ) -> None:
        self._around, self._membership = around, membership
        self._state_bytes, self._joined = state_bytes, joined

    async def meet(self, view: View, topology: Topology = Topology.RING) -> RingSession:
        """The ring of a view. Raises as ``RingSession.form``."""
        return await RingSession.form(
            view=view, topology=topology, sub_chunk_bytes=view.sub_chunk_bytes, **self._usual(view)
        )

    async def ring(self, view: View, topology: Topology = Topology.RING) -> RingSession:
        """Another ring of the same members, or of some."""
        session = await self.meet(view, topology)
        self._joined(session)
        return session

    async def chain(
        self, view: View, order: Sequence[str], *, activation_bytes: int, gradient_bytes: int, in_flight: int
    ) -> Chain:
        """A chain of some members. Raises as ``Chain.form``."""
        chain = await Chain.form(
            view=view,
            order=order,
            activation_bytes=activation_bytes,
            gradient_bytes=gradient_bytes,
            in_flight=in_flight,
            **self._usual(view),
        )
        self._joined(chain)
        return chain

    def _usual(self, view: View) -> _Usual:
        """What all that is formed for a view has in common."""
        around, membership, usual_s = self._around, self._membership, self._around.beats()
        return {
            "world": around.world,
            "peer_id": around.peer_id,
            "name": around.name,
            "seed_host": around.seed_host,
            "inbound": around.inbound,
            "heartbeat_s": membership.heartbeat_s or view.heartbeat_s or usual_s[0],
            "death_s": membership.death_s or view.death_s or usual_s[1],
            "streams": view.streams,
            "timeout_s": FORM_TIMEOUT_S + max(self._state_bytes(), view.state_bytes) / REDO_BYTES_PER_S,
        }
