"""The connections between stages. One carries the forward requests of all of a client's sessions at one stage.

A link to a next stage stays open without sessions, so that the client's next session does not wait for a dial. It ends
with the client's connection here or there, or when another worker has become the next stage and no session uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError, Refused
from roles.line import Line
from roles.worker.context import PeerContext
from roles.worker.stage_requests import PeerAddress
from wire.chain_messages import CHAIN_STREAM, NEXT_LOST, UNKNOWN_SESSION, ForwardBatch, ForwardRequest, split_batch
from wire.connection import Connection, Received
from wire.messages import Message

LINK_UNSENT_BYTES = 4 << 20
"""Bytes to the next stage that may wait unsent; beyond, its sessions compute no further request."""
MAX_INCOMING = 64
"""Connections from stages before, of one client; the oldest one is closed for another."""

LinkKey = tuple[str, int]
"""Id of the part that this worker holds as the stage, and the stage's index."""


def send_forward(connection: Connection, work: Sequence[tuple[ForwardRequest, memoryview]]) -> None:
    """Send requests and their payloads, which must not change, in as few messages as possible. Raises
    ``ConnectionLost``."""
    payloads = iter([payload for _, payload in work])
    for requests in split_batch(request for request, _ in work):
        parts = [next(payloads) for _ in requests]
        connection.send(ForwardBatch(requests))
        payload = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        connection.send_bulk(payload, generation=0, stream=CHAIN_STREAM)


@dataclass(eq=False)
class StageClient:
    """A client's connection, on which it opens sessions.

    Attributes:
        since: Unix time at which it connected.
        links: newest link of each stage to its next one. dials: those under way; their results say why others that
            want the link cannot have it.
        incoming: connections from stages before. changed: a queue of its sessions was.
    """

    line: Line
    peer_id: str
    since: float
    links: dict[LinkKey, NextStage] = field(default_factory=dict)
    dials: dict[tuple[LinkKey, PeerAddress], asyncio.Future[Refused | None]] = field(default_factory=dict)
    incoming: list[Connection] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, message: Message) -> None:
        with suppress(ConnectionLost):  # the reader of this connection notices too, and closes its sessions
            self.line.connection.send(message)

    def add_incoming(self, connection: Connection) -> None:
        self.incoming.append(connection)
        if len(self.incoming) > MAX_INCOMING:
            self.incoming.pop(0).abort()

    def close_links(self, part: str = "") -> None:
        """Close the links of a part that the client gives back, or all connections."""
        for key in [key for key in self.links if part in ("", key[0])]:
            self.links.pop(key).close()
        for connection in self.incoming if not part else ():
            connection.abort()


OnLost = Callable[[Sequence[Hashable], P2PTrainError], None]
"""Called with the users of a link that is lost, and the reason."""


class NextStage:
    """The link of a stage to the next one.

    Attributes:
        users: sessions whose requests it carries.
    """

    def __init__(
        self, client: StageClient, key: LinkKey, place: PeerAddress, line: Line, wake: Callable[[], None], lost: OnLost
    ) -> None:
        self.place, self._line, self._client, self._key, self._lost = place, line, client, key, lost
        self.users = set[Hashable]()
        self.closed = False
        line.connection.on_drained = wake
        self._task = asyncio.create_task(line.run(_refuse_message, self._end), name="next stage")

    @property
    def crowded(self) -> bool:
        return self._line.connection.unsent_bytes > LINK_UNSENT_BYTES

    def send(self, work: Sequence[tuple[ForwardRequest, memoryview]]) -> None:
        """Send requests and their payloads, which must not change. A loss is reported to ``lost``."""
        with suppress(ConnectionLost):
            send_forward(self._line.connection, work)

    def leave(self, user: Hashable) -> None:
        self.users.discard(user)
        if not self.users and self._client.links.get(self._key) is not self:
            self.close()

    def close(self) -> None:
        self.closed = True
        self._line.connection.abort()
        self._task.cancel()

    def _end(self, problem: P2PTrainError) -> None:
        if not self.closed:
            self.closed = True
            if self._client.links.get(self._key) is self:
                del self._client.links[self._key]
            self._lost(list(self.users), problem)


class StageLinks:
    """Dials next stages. ``wake`` is called when a link has room again."""

    def __init__(self, context: PeerContext, wake: Callable[[], None], lost: OnLost) -> None:
        self._context, self._wake, self._lost = context, wake, lost

    async def link(
        self, client: StageClient, key: LinkKey, place: PeerAddress, *, session: str, silence_s: float
    ) -> NextStage:
        """The client's link from a stage to ``place``, dialled once for all sessions that want it.

        Args:
            session: one that is open at the next stage.

        Raises:
            Refused: the next stage cannot be reached.
        """
        while True:
            link = client.links.get(key)
            if link is not None and link.place == place and not link.closed:
                return link
            dial = client.dials.get((key, place))
            if dial is None:
                return await self._dial(client, key, place, session, silence_s)
            problem = await asyncio.shield(dial)
            if problem is not None:
                raise Refused(problem.code, problem.message, remedy=problem.remedy)

    async def _dial(
        self, client: StageClient, key: LinkKey, place: PeerAddress, session: str, silence_s: float
    ) -> NextStage:
        failure: Refused | None = None
        dial = client.dials[key, place] = asyncio.get_running_loop().create_future()
        try:
            # The hello's generation is the index of the dialled stage: one worker may hold several stages.
            hello = self._context.hello("stage", session, key[1] + 1)
            connection, _ = await self._context.dial(place.peer, place.host, place.port, hello)
        except P2PTrainError as problem:
            text = f"stage {key[1]} cannot reach the next stage: {problem.message}"
            lost = Refused(NEXT_LOST, text, remedy=problem.remedy)
            if not (isinstance(problem, Refused) and problem.code == UNKNOWN_SESSION):  # that concerns this one only
                failure = lost
            raise lost from problem
        finally:
            del client.dials[key, place]
            dial.set_result(failure)
        old, line = client.links.get(key), Line(connection, silence_s)
        link = client.links[key] = NextStage(client, key, place, line, self._wake, self._lost)
        if old is not None and not old.users:
            old.close()
        return link


def _refuse_message(received: Received) -> None:
    raise ProtocolError(f"unexpected message {type(received.message).__name__} from the next stage")
