"""Which peers and operators the seed admits.

The seed dials a peer back before it admits it. Neighbours could hardly reach a peer that the seed cannot reach. Such a
peer is refused at once, with a remedy, instead of breaking a ring later.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

from p2ptrain.core.errors import DeadlineExceeded, P2PTrainError, Refused
from p2ptrain.core.world import World
from ring.detector import beat_defaults
from roles.seed.enrolment import EnrolmentPolicy
from roles.seed.overview import SeedIdentity
from roles.seed.peers import NAME_CHARS, ConnectedPeer, PeerTable, check_hello, clipped
from wire.address import how_to_open, is_loopback
from wire.connection import Connection
from wire.handshake import PERMITTED, dial, local_hello, local_welcome
from wire.messages import Hello, RefusalCode, Refuse, Welcome
from wire.transport import is_out_of_files

MAX_PEERS = 1024
DIAL_BACK_S = 10.0
"""For a peer that the seed dials back. It may be loading torch on a slow machine."""
MAX_OPERATORS = 64


class Acceptor:
    """Answers every ``Hello`` with a welcome or a refusal. ``Seed`` serves the admitted peers.

    Args:
        alarm: tells (kind, text) to the person at this machine.

    Attributes:
        host: the address on which the seed listens.
        measured: round trip in ms to each admitted peer, until ``Seed`` serves it.
        operators: the connection of each operator → its software.
    """

    def __init__(
        self,
        identity: SeedIdentity,
        world: World,
        enrolment: EnrolmentPolicy,
        peers: PeerTable,
        alarm: Callable[[str, str], None],
    ) -> None:
        self.closed = False
        self.host = "127.0.0.1"
        self.measured: WeakKeyDictionary[Connection, float] = WeakKeyDictionary()
        self.operators: dict[Connection, str] = {}
        self._foreign_jobs: set[str] = set()  # those that people were warned of
        self._identity, self._world, self._enrolment, self._peers = identity, world, enrolment, peers
        self._alarm = alarm

    async def decide(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        if self.closed:
            return Refuse(RefusalCode.SHUTTING_DOWN, "the seed is stopping", "try again when it is back")
        self._enrolment.judge(connection)
        if hello.cluster == self._identity.cluster_id and hello.term > self._identity.term:
            text = "a seed that was restored from a backup has replaced this one"
            return Refuse(RefusalCode.STALE_TERM, text, "stop this seed, and use the restored one")
        match hello.purpose:
            case "peer":
                return await self._decide_peer(hello, connection)
            case "probe" if hello.port:  # `check` asks whether this seed can reach it
                return await self._decide_peer(hello, connection)
            case "operator" if len(self.operators) >= MAX_OPERATORS:
                return Refuse(RefusalCode.FULL, f"{MAX_OPERATORS} operators are connected", "close one of them")
            case "operator" | "probe":
                return self._welcome(0.0, 0.0)
            case "enrol" if self._enrolment.encrypted:
                return self._welcome(0.0, 0.0)
        text = f"this is a seed: it accepts no connection for {hello.purpose[:40]!r}"
        return Refuse(RefusalCode.ROLE, text, "dial the member itself")

    async def _decide_peer(self, hello: Hello, connection: Connection) -> Welcome | Refuse:
        check_hello(hello)
        if hello.purpose == "peer" and (len(hello.roles) != 1 or hello.roles[0] not in PERMITTED["peer"]):
            text = "a peer must have one role: worker, verifier or drafter"
            return Refuse(RefusalCode.ROLE, text, "set the role with p2ptrain join --role")
        if hello.job and hello.cluster not in ("", self._identity.cluster_id):
            return self._refuse_foreign(hello)
        host = hello.host or connection.ends.remote[0]
        old = self._peers.connected.get(hello.peer_id)
        if old is not None and not self._is_replaced(old, host, hello.port):
            text = f"a {old.role} with this id ({hello.peer_id}) is already here, as {old.name} at {old.host}"
            return Refuse(RefusalCode.DUPLICATE_PEER, text, "stop the other one, or give this one its own --state")
        listens = hello.capabilities.get("listens")
        if isinstance(listens, str) and is_loopback(listens) and not is_loopback(self.host):
            text = "this peer listens on the loopback only, so members on other machines cannot reach it"
            return Refuse(RefusalCode.LOOPBACK_ONLY, text, "join with --host 0.0.0.0")
        if len(self._peers.connected) >= MAX_PEERS:
            return Refuse(RefusalCode.FULL, f"{MAX_PEERS} peers are connected, the limit", "start another seed")
        began = self._world.clock.now()
        try:
            await self.dial_back(host, hello.port, hello.peer_id)
        except P2PTrainError as problem:
            return self._refuse_unreached(problem, hello.port)
        rtt_ms = (self._world.clock.now() - began) / 2 * 1e3  # TCP's handshake is one round trip, ours another
        if (least_s := connection.least_rtt_s) is not None:
            rtt_ms = min(rtt_ms, least_s * 1e3)  # the kernel answers in time, even while the worker loads libraries
        self.measured[connection] = rtt_ms
        return self._welcome(*beat_defaults(rtt_ms))

    def _refuse_foreign(self, hello: Hello) -> Refuse:
        """Refuse a worker that holds a job of another cluster: here the job would be over, and the worker drop it."""
        name, job = hello.name[:NAME_CHARS], hello.job[:64]
        text = f"{name} works on job {job} of cluster {hello.cluster[:64]}, whose records are not here"
        remedy = "restore them (p2ptrain seed --restore DIR), or stop the worker and join again, which gives the job up"
        if job not in self._foreign_jobs and len(self._foreign_jobs) < MAX_PEERS:
            self._foreign_jobs.add(job)
            self._alarm("foreign-job", clipped(f"{text}. The worker is refused, and trains on: {remedy}"))
        return Refuse(RefusalCode.UNKNOWN_JOB, text, remedy)

    def _is_replaced(self, old: ConnectedPeer, host: str, port: int) -> bool:
        silent_s = self._world.clock.now() - old.connection.last_heard
        closed = old.connection.closed.is_set() or old.connection.close_cause is not None
        return closed or silent_s > 2 * old.detector.heartbeat_s or (old.host, old.port) == (host, port)

    @staticmethod
    def _refuse_unreached(problem: P2PTrainError, port: int) -> Refuse:
        """The answer to a peer that was not reached back: it may try again if it, or this seed, is only busy."""
        slow = isinstance(problem, Refused) and problem.code in (RefusalCode.BUSY, RefusalCode.TOO_SLOW)
        if slow or isinstance(problem, DeadlineExceeded) or is_out_of_files(problem.__cause__):
            text = f"the seed dialled this machine back: {problem.message}"
            return Refuse(RefusalCode.TOO_SLOW, text, problem.remedy)
        text = f"the seed cannot reach this machine back: {problem.message}"
        return Refuse(RefusalCode.UNREACHABLE, text, how_to_open(port))

    async def dial_back(self, host: str, port: int, peer_id: str) -> None:
        """Check that a peer can be reached. Raises ``P2PTrainError`` if it cannot."""
        cluster_id = self._identity.cluster_id
        hello = local_hello(
            peer_id=cluster_id,
            name=self._identity.name,
            roles=["seed"],
            purpose="probe",
            cluster=cluster_id,
            term=self._identity.term,
        )
        network = self._world.network
        connection, _ = await dial(network, host, port, hello, timeout_s=DIAL_BACK_S, expect_peer=peer_id)
        await connection.close()

    def _welcome(self, heartbeat_s: float, death_s: float) -> Welcome:
        return local_welcome(
            peer_id=self._identity.cluster_id,
            name=self._identity.name,
            wall=self._world.clock.wall(),
            cluster_id=self._identity.cluster_id,
            heartbeat_s=heartbeat_s,
            death_s=death_s,
            term=self._identity.term,
        )
