"""Who is let in to a seed.

A worker is let in after the seed dialled it back: who cannot be reached by the seed can hardly be reached by its
neighbours, and is told so at once, with a remedy, instead of breaking a ring later.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from p2ptrain.core.errors import P2PTrainError, ProtocolError, Refused
from p2ptrain.core.world import World
from roles.seed.enrolment import Gate
from roles.seed.followers import Followers
from roles.seed.leading import Rivals, refused_as_standby
from roles.seed.options import Beats
from roles.seed.peers import NAME_CHARS, Link, check_hello
from roles.seed.serving import check_role
from wire.address import is_loopback
from wire.connection import Connection
from wire.handshake import RefusalCode, dial, local_hello, local_welcome
from wire.messages import Hello, Refuse, Welcome

DIAL_BACK_S = 3.0
MAX_PEERS = 1024
MAX_OPERATORS = 64


class Door:
    """Answers every ``Hello``; what is done with who came in is the seed's affair.

    Args:
        cluster_id, name: the seed's own peer id, and its name for people.
        links: the peers that are here.

    Attributes:
        closed: nobody comes in any more.
        host: where the seed listens.
        measured: round trip in ms to the peers and standbys that were let in, until they are served.
        operators: those that are here.
    """

    def __init__(
        self,
        *,
        world: World,
        cluster_id: str,
        name: str,
        beats: Beats,
        links: Mapping[str, Link],
        gate: Gate,
        followers: Followers,
        rivals: Rivals,
    ) -> None:
        self.closed = False
        self.host = "127.0.0.1"
        self.measured: WeakKeyDictionary[Connection, float] = WeakKeyDictionary()
        self.operators: set[Connection] = set()
        self._world, self._cluster_id, self._name, self._beats = world, cluster_id, name, beats
        self._links, self._gate, self._followers, self._rivals = links, gate, followers, rivals

    async def decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        """Whether the caller comes in, and how its link is watched then."""
        if self.closed:
            return Refuse(RefusalCode.SHUTTING_DOWN, "the seed is stopping", "try again when it is back")
        self._gate.judge(connection)
        if refusal := self._rivals.judge(hello, self._cluster_id, connection.remote[0]):
            return refusal
        match hello.purpose:
            case "peer":
                return await self._decide_peer(hello, connection)
            case "standby":
                return await self._decide_standby(hello, connection)
            case "operator" if len(self.operators) >= MAX_OPERATORS:
                return Refuse(RefusalCode.FULL, f"{MAX_OPERATORS} operators are connected", "close one of them")
            case "operator" | "probe":
                return self._welcome(0.0, 0.0)
            case "enrol" if self._gate.encrypted:
                return self._welcome(0.0, 0.0)
        text = f"this is a seed: it does not answer {hello.purpose[:40]!r}"
        return Refuse(RefusalCode.ROLE, text, "dial the member itself")

    async def _decide_peer(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        check_hello(hello)
        check_role(hello)
        host = hello.host or connection.remote[0]
        old = self._links.get(hello.peer_id)
        if old is not None and not self._is_replaced(old, host, hello.port):
            text = f"a {old.role} with this id ({hello.peer_id}) is already here, as {old.name} at {old.host}"
            return Refuse(RefusalCode.DUPLICATE_PEER, text, "stop the other one, or give this one its own --state")
        listens = hello.capabilities.get("listens")
        if isinstance(listens, str) and is_loopback(listens) and not is_loopback(self.host):
            text = "members of other machines join this seed, and this one listens on the loopback only"
            return Refuse(RefusalCode.LOOPBACK_ONLY, text, "join with --host 0.0.0.0")
        if len(self._links) >= MAX_PEERS:
            return Refuse(RefusalCode.FULL, f"{MAX_PEERS} peers are here", "start another seed")
        began = self._world.clock.now()
        try:
            await self.dial_back(host, hello.port, hello.peer_id)
        except P2PTrainError as problem:
            text = f"the seed cannot reach this {hello.roles[0]} back: {problem.message}"
            remedy = "let its port in through the firewall, or choose the address with --host or --advertise"
            return Refuse(RefusalCode.UNREACHABLE, text, remedy)
        rtt_ms = (self._world.clock.now() - began) / 2 * 1e3  # TCP's handshake is one round trip, ours another
        if (least_s := connection.least_rtt_s) is not None:
            rtt_ms = min(rtt_ms, least_s * 1e3)  # a worker that loads its libraries answers late, its kernel does not
        self.measured[connection] = rtt_ms
        return self._welcome(*self._beats.at(rtt_ms), connection.remote[0])

    async def _decide_standby(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        """It must hold the same tables, be of this cluster or of none, and be reached."""
        if refusal := refused_as_standby(hello, self._cluster_id, full=self._followers.full):
            return refusal
        began, host = self._world.clock.now(), hello.host or connection.remote[0]
        try:
            await self.dial_back(host, hello.port)
        except P2PTrainError as problem:
            if not isinstance(problem, Refused) or problem.code != RefusalCode.STANDBY:  # as it says to everybody
                text = f"the seed cannot reach this standby back: {problem.message}"
                return Refuse(RefusalCode.UNREACHABLE, text, "let its port in through the firewall, or use --host")
        rtt_ms = (self._world.clock.now() - began) / 2 * 1e3
        self.measured[connection] = rtt_ms
        return self._welcome(*self._beats.at(rtt_ms), connection.remote[0])

    def _is_replaced(self, old: Link, host: str, port: int) -> bool:
        """Whether a new connection takes the place of ``old``: it is closed, silent, or evidently the same process."""
        silent_s = self._world.clock.now() - old.connection.last_heard
        closed = old.connection.closed.is_set() or old.connection.close_cause is not None
        return closed or silent_s > 2 * old.heartbeat_s or (old.host, old.port) == (host, port)

    async def dial_back(self, host: str, port: int, peer_id: str = "") -> None:
        """Reach a port of somebody who wants to be reached. Raises ``P2PTrainError``."""
        hello = self.introduction("probe", 0)
        connection, welcome = await dial(
            self._world.network, host, port, hello, timeout_s=DIAL_BACK_S, expect_peer=peer_id
        )
        await connection.close()
        if peer_id and welcome.peer_id != peer_id:
            raise ProtocolError(f"another peer ({welcome.name[:NAME_CHARS]}) answers there")

    def introduction(self, purpose: str, port: int) -> Hello:
        """To workers, and to other seeds."""
        return local_hello(
            peer_id=self._cluster_id,
            name=self._name,
            roles=["seed"],
            purpose=purpose,
            port=port,
            cluster=self._cluster_id,
            term=self._followers.term,
        )

    def _welcome(self, heartbeat_s: float, death_s: float, host: str = "127.0.0.1") -> Welcome:
        return local_welcome(
            peer_id=self._cluster_id,
            name=self._name,
            wall=self._world.clock.wall(),
            cluster_id=self._cluster_id,
            heartbeat_s=heartbeat_s,
            death_s=death_s,
            term=self._followers.term,
            seeds=self._followers.addresses(host),
        )
