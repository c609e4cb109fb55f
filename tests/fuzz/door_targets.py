"""Conversations with strangers: first bytes at a doorway, plain and TLS; and healing, from both sides."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from configs.schema import Profile
from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError, Refused, StorageError
from p2ptrain.core.training import Blob
from p2ptrain.core.world import LoopClock, Probe
from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.stand_in import StandInEngine
from ring.view import View
from roles.line import Line
from roles.snapshots import CHUNK_BYTES, Snapshot
from roles.worker.heal import StateFetch, StateLayout, StateSource
from roles.worker.heal_source import HealSource, piece_untrusted
from tests.roles.in_process import HOST
from tests.wire.doubles import credentials
from wire.circuits import CircuitNetwork
from wire.codec import MESSAGE_TYPES, encode
from wire.connection import Connection
from wire.credentials import PeerIdentity, unverified_context
from wire.frame import encode_control
from wire.handshake import local_hello, local_welcome, serve
from wire.job_messages import BlobRecord, HealOffer, HealRequest, MemberRecord, RangeGone, RangeRequest, StepLogged
from wire.messages import Hello, JoinCircuit, Message, Refuse, Welcome
from wire.tls import TlsNetwork

from .engine import target
from .strategies import WHOLE, chunked, made, mostly, mutated

# ---------------------------------------------------------------------------------------------------------- the doorway

_ANY = st.one_of([made(kind) for kind in MESSAGE_TYPES.values()])
_HELLOS = st.sampled_from(["peer", "operator", "ring", "heal", "probe", "enrol", "?"]).map(
    lambda purpose: local_hello(peer_id="a1", name="a", roles=["worker"], purpose=purpose)
)


def _frame(message: Message) -> bytes:
    return encode_control(message.KIND, encode(message), generation=0, stream=0)


@cache
def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    shaking = unverified_context().wrap_bio(incoming, outgoing)
    try:
        shaking.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("nobody answered, and yet it shook hands")


_CIRCUIT = "cd" * 32
_JOINS = made(JoinCircuit, id=mostly(st.just(_CIRCUIT), st.just("0" * 64))).map(lambda join: _frame_if_small(join))
_FIRST = st.one_of(
    _HELLOS.map(_frame),
    _JOINS,
    st.tuples(_HELLOS, _ANY).map(lambda both: _frame(both[0]) + _frame_if_small(both[1])),
    st.deferred(lambda: st.just(_client_hello())),
    st.sampled_from(
        [b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16", b"\x15\x03\x03\x00\x02\x02\x50", b"\xff" * 64]
    ),
    st.binary(max_size=64),
)


def _frame_if_small(message: Message) -> bytes:
    try:
        return _frame(message)
    except (P2PTrainError, ValueError):  # longer than a frame, or more items than it may have
        return b""


@dataclass(frozen=True)
class ProbeContext:
    """What a stranger does at the door.

    Attributes:
        tls: the door is that of an encrypted cluster.
        circuits: ends of circuits may meet there, too.
        shakes: it speaks TLS itself, and ``chunks`` are what it says inside.
        flips: (offset, mask) of bytes that it sends wrongly.
        leaves: what it does after its words: ``stays``, ``closes`` or ``aborts``.
    """

    tls: bool
    circuits: bool
    shakes: bool
    chunks: list[bytes]
    flips: list[tuple[int, int]]
    leaves: str


class _Stranger(asyncio.BufferedProtocol):
    """Says its words, a chunk at a time, through TLS where it speaks that."""

    def __init__(self, visit: ProbeContext) -> None:
        self.gone = asyncio.Event()
        self._flips = dict(visit.flips)
        self._sent = 0
        self._buffer = bytearray(4096)
        self._words = deque(visit.chunks)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = unverified_context().wrap_bio(self._incoming, self._outgoing) if visit.shakes else None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.write(self._buffer[:nbytes])
        if self._ssl is not None:
            self._shake(self._ssl)

    def say(self) -> None:
        """The next chunk, if there is one."""
        if self._ssl is not None:
            self._shake(self._ssl)
        elif self._words:
            self._send(self._words.popleft())

    def _shake(self, inside: ssl.SSLObject) -> None:
        try:
            inside.do_handshake()
            while self._words:
                inside.write(self._words.popleft() or b"\0")
        except ssl.SSLError:
            pass  # it waits for more, or was refused
        self._send(self._outgoing.read())

    def _send(self, data: bytes) -> None:
        wrong = bytearray(data)
        for at in range(len(wrong)):
            wrong[at] ^= self._flips.get(self._sent + at, 0)
        self._sent += len(wrong)
        if not self.transport.is_closing():
            self.transport.write(bytes(wrong))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()


@cache
def _seed_credentials() -> Any:
    return credentials("seed", "seed")


@target(
    "doorway",
    st.builds(
        ProbeContext,
        st.booleans(),
        st.booleans(),
        st.booleans(),
        chunked(mutated(_FIRST, most=2)),
        st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 255)), max_size=2),
        st.sampled_from(["stays", "closes", "aborts"]),
    ),
    peak_bytes=4 << 20,
    weight=50,
)
async def _visited(visit: ProbeContext) -> None:
    problems: list[P2PTrainError] = []
    network = MemoryNetwork()
    door: Any = network
    meeting = CircuitNetwork(network)
    if visit.circuits:
        door = meeting
        meeting.expect_circuit(_CIRCUIT, 1.0)
    if visit.tls:
        door = TlsNetwork(door, _seed_credentials(), require_client_certificate=False)

    async def decide(hello: Hello, connection: Connection) -> Welcome:
        assert not visit.tls or hello.purpose == "enrol", "let in without a certificate"
        return local_welcome(peer_id="seed", name="seed", wall=0.0)

    async def listen(connection: Connection, hello: Hello) -> None:
        while True:
            await connection.receive(timeout_s=1)

    server = await serve(
        door, HOST, 0, decide=decide, serve=listen, on_problem=lambda problem, address: problems.append(problem)
    )
    stranger = _Stranger(visit)
    await network.connect(*server.address, lambda: stranger, timeout_s=1)
    for _ in range(1 + len(visit.chunks)):  # inside TLS, as far as the doorway lets it
        stranger.say()
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    if visit.leaves == "closes":
        stranger.transport.close()
    elif visit.leaves == "aborts":
        stranger.transport.abort()
    async with asyncio.timeout(60):  # virtual seconds: nobody may stay for ever
        await stranger.gone.wait()
    await asyncio.sleep(2)
    for served in (server._handlers, server._served):
        assert not served, "somebody is still served"
    await server.close()
    for left in (meeting._meetings, meeting.relayed, meeting._joining):
        assert not left, "a circuit is left"
    assert all(isinstance(problem, P2PTrainError) for problem in problems)
    for half_open in (server._half_open, meeting.half_open, *([door.half_open] if visit.tls else [])):
        assert not half_open._by_machine, "a place in the doorway is not given back"


# ------------------------------------------------------------------------------------------------- said to a connection


class _Heard:
    """Stands for a connection: what the other side says is written down beforehand.

    Args:
        lands: whether what is posted arrives.
    """

    def __init__(self, said: list[Any], *, lands: bool = True, identity: PeerIdentity | None = None) -> None:
        self._said = deque(said)
        self._lands = lands
        self.ends = SimpleNamespace(remote=("10.0.0.9", 5), identity=identity)
        self.answers: list[Message] = []
        self.closed = asyncio.Event()
        self.close_cause: P2PTrainError | None = None
        self.last_heard = 0.0
        self.unsent_bytes = self.bytes_in = self.bytes_out = 0

    async def receive(self, *, timeout_s: float) -> Any:
        await asyncio.sleep(0)
        if not self._said:
            raise ConnectionLost("it closed the connection")
        said = self._said.popleft()
        return dataclasses.make_dataclass("Received", ["message"])(said(self) if callable(said) else said)

    async def expect(self, kind: type[Message], *, timeout_s: float) -> Any:
        message = (await self.receive(timeout_s=timeout_s)).message
        if isinstance(message, kind):
            return message
        if isinstance(message, Refuse):
            raise Refused(message.code, message.message)
        raise ProtocolError(f"{type(message).__name__} is not due")

    def send(self, message: Message, **_: int) -> None:
        _frame(message)  # it can be sent
        self.answers.append(message)

    def send_bulk(self, payload: memoryview, **_: int) -> None:
        assert payload.nbytes <= CHUNK_BYTES

    async def flush(self, *, timeout_s: float) -> None: ...

    def post(self, into: memoryview, *, done: Callable[[], None], **_: int) -> None:
        if self._lands:
            done()
        else:
            self.closed.set()

    def abort(self, cause: P2PTrainError | None = None) -> None:
        self.closed.set()

    async def close(self) -> None:
        self.closed.set()


# -------------------------------------------------------------------------------------------------------------- healing

_SIZES = {"weights": 3000, "moments": (1 << 20) + 1}
_BLOBS = [BlobRecord(name, size) for name, size in _SIZES.items()]
_LINEAGE = "ab" * 16
_HEALER = MemberRecord("healer", "healer", "", 1, 0, 8, False)
_VIEW = View("job", 3, 7, _LINEAGE, (_HEALER,))
_INDICES, _STEPS, _DIGESTS = st.integers(-1, 4), st.integers(5, 12), st.sampled_from([bytes(16), b"", b"x" * 16])
_WANTED = made(
    RangeRequest,
    name=st.sampled_from(["#table", "#step 7", "#step -1", "#step " + "9" * 400, *_SIZES, "nothing"]),
    start=mostly(_INDICES, WHOLE),
    stop=mostly(st.sampled_from([1, 3000, CHUNK_BYTES]), WHOLE),
    stream=_INDICES,
)
_HEAL = HealRequest("job", 7, _LINEAGE, 2.0)
_ASKED = mostly(
    st.sampled_from([_HEAL, HealRequest("job", -1, "", 2.0), HealRequest("job", -1, "", 2.0, 7, _LINEAGE)]),
    made(HealRequest),
)
_OFFERED = made(
    HealOffer,
    step=mostly(st.just(7), st.just(-1)),
    lineage=mostly(st.just(_LINEAGE), st.just("")),
    blobs=mostly(st.just(_BLOBS), st.sampled_from([[], _BLOBS[1:]])),
    chunk_bytes=mostly(st.just(CHUNK_BYTES), WHOLE),
    root=_DIGESTS,
)
_NEWS = st.one_of(
    made(StepLogged, step=_STEPS, digest=_DIGESTS, size_bytes=mostly(st.just(4120), st.just(0)), changes=st.just(0)),
    made(RangeGone),
)


_STATE = [Blob(name, memoryview(bytearray(size))) for name, size in _SIZES.items()]


@dataclass(frozen=True)
class Healing:
    """What a healing member says to its source, what a source says to one, and whether what it asks for arrives."""

    to_source: list[Message]
    from_source: list[Message]
    lands: bool


def _then(first: st.SearchStrategy[Any], next_ones: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    rest = st.lists(mostly(next_ones, _ANY), max_size=8)
    return st.tuples(mostly(first, _ANY), rest).map(lambda both: [both[0], *both[1]])


class _Inline:
    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


@target(
    "healing",
    st.builds(Healing, _then(_ASKED, _WANTED), _then(_OFFERED, _NEWS), st.booleans()),
    "roles.worker.heal_source.piece_untrusted",
    "roles.worker.heal.StateFetch.heard_untrusted",
    "roles.worker.heal.StepReplay.take_report_untrusted",
    "roles.worker.heal.offered_state_untrusted",
    "roles.worker.heal.check_report_untrusted",
    peak_bytes=1 << 20,
    weight=100,
)
async def _healed(case: Healing) -> None:
    given = Snapshot(7, _LINEAGE, 1.0, _STATE)
    to_source = [message for message in case.to_source if _frame_if_small(message)]  # the others are never on the wire
    for message in to_source:
        if isinstance(message, RangeRequest):
            with suppress(ProtocolError, StorageError):
                assert piece_untrusted(given, None, message).nbytes == message.stop - message.start
    world = SimpleNamespace(clock=LoopClock(), probe=Probe())
    context = SimpleNamespace(world=world, compute=_Inline(), peer_id="healer", notify_here=lambda *text: None)
    core = SimpleNamespace(view=_VIEW, may_give=True, torn=False, applied=7, lineage=_LINEAGE, square_sum=1.0)
    source = HealSource(context, core, want_snapshot=lambda: None)  # type: ignore[arg-type]
    hello = local_hello(peer_id="healer", name="healer", roles=["worker"], purpose="heal", job="job", generation=3)
    heard = _Heard(list(to_source))
    asyncio.get_running_loop().call_later(60, heard.closed.set)  # it goes, though nobody reads on
    with suppress(P2PTrainError):
        await source.give(heard, hello, StandInEngine(Profile()))  # type: ignore[arg-type]
    assert not source.followers
    fetch = StateFetch(
        context,  # type: ignore[arg-type]
        StateLayout(_STATE, 4120),
        request=next((message for message in to_source if isinstance(message, HealRequest)), _HEAL),
        generation=3,
        members=[_HEALER],
        on_torn=lambda: None,
        on_progress=lambda *progress: None,
    )
    sender = StateSource("d", "d", Line(_Heard([], lands=case.lands)))  # type: ignore[arg-type]
    fetch.receiver.sources["d"] = sender
    for message in case.from_source:
        with suppress(ProtocolError):
            fetch.heard_untrusted(sender, message)
