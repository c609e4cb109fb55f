"""Circuits: who may join one, what a relay may cost, and what relays that stall, lie or flood can do."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from p2ptrain.core.errors import DeadlineExceeded, P2PTrainError, Refused, Unreachable
from p2ptrain.core.world import Network
from p2ptrain.lab.memory import MemoryNetwork
from tests.wire.circuit_doubles import ThreePeers
from tests.wire.doubles import HOST, Owner, Recorder, connected, credentials, in_memory, on_virtual_time, play
from wire.circuits import JOIN_S, MAX_UNUSED, ORDER_S, CircuitNetwork, peer_host, peer_of_host
from wire.codec import encode
from wire.connection import Connection
from wire.frame import encode_control
from wire.handshake import HANDSHAKE_TIMEOUT_S, dial, local_hello
from wire.messages import (
    ANSWERER,
    CALLER,
    DIRECT,
    RELAYED,
    REVERSED,
    Circuit,
    CircuitJoined,
    JoinCircuit,
    Message,
    SocketAddress,
)
from wire.relay import RelayLimits
from wire.tls import TlsNetwork
from wire.transport import MAX_HALF_OPEN_PER_MACHINE, TcpNetwork

ID, OTHER_ID = "ab" * 32, "cd" * 32


def now() -> float:
    return asyncio.get_running_loop().time()


def frame(message: Message) -> bytes:
    return encode_control(message.KIND, encode(message), generation=0, stream=0)


@asynccontextmanager
async def relaying(network: Network, limits: RelayLimits | None = None) -> AsyncIterator[Any]:
    """The owner of a relay, whose ``circuits`` is its network. At the end nothing of a circuit is left."""
    owner: Any = Owner()
    owner.circuits = CircuitNetwork(network, limits=limits)
    async with owner.listening(owner.circuits):
        yield owner
        await owner.circuits.close()
        await asyncio.sleep(1)
    assert not owner.circuits._meetings
    assert not owner.circuits.relayed
    assert not owner.circuits.half_open._by_machine


async def join(network: Network, relay: Any, side: str, circuit_id: str = ID) -> Connection:
    connection = Connection()
    await network.connect(*relay.address, lambda: connection, timeout_s=5)
    connection.send(JoinCircuit(circuit_id, side))
    return connection


async def joined(*ends: Connection) -> None:
    for end in ends:
        await end.expect(CircuitJoined, timeout_s=JOIN_S)


async def refusal(end: Connection) -> Refused:
    with pytest.raises(Refused) as caught:
        await end.expect(CircuitJoined, timeout_s=JOIN_S)
    await end.close()
    return caught.value


def test_a_peers_host_names_the_peer_and_no_other_host_does() -> None:
    assert peer_of_host(peer_host("a1-b2")) == "a1-b2"
    assert not any(map(peer_of_host, ["", ".peer", "a1", "10.0.0.1", "a1.peer.org", "A1.peer", "x.a1.peer"]))


# --------------------------------------------------------------------------------------------------------- who may join


@in_memory
async def test_an_unknown_circuit_is_refused_once_the_order_had_time_to_come(network: Network) -> None:
    async with relaying(network) as relay:
        began = now()
        error = await refusal(await join(network, relay, CALLER))
        assert (error.code, now() - began) == ("unknown-circuit", pytest.approx(ORDER_S))
        assert relay.problems[0].code == "unknown-circuit"


@in_memory
async def test_ends_may_come_before_the_order(network: Network) -> None:
    async with relaying(network) as relay:
        ends = [await join(network, relay, side) for side in (ANSWERER, CALLER)]
        relay.circuits.expect_circuit(ID, 5.0)
        await joined(*ends)
        assert relay.circuits.count_relayed() == 1
        await ends[0].close()
        await ends[1].closed.wait()


@in_memory
async def test_a_circuit_has_one_end_of_each_side_and_is_used_once(network: Network) -> None:
    async with relaying(network) as relay:
        relay.circuits.expect_circuit(ID, 5.0)
        caller = await join(network, relay, CALLER)
        await asyncio.sleep(0.1)
        assert (await refusal(await join(network, relay, CALLER))).code == "duplicate-peer"
        answerer = await join(network, relay, ANSWERER)
        await joined(caller, answerer)
        for side in (CALLER, ANSWERER):
            assert (await refusal(await join(network, relay, side))).code == "unknown-circuit"
        assert not caller.closed.is_set()
        await caller.close()
        await answerer.closed.wait()


@in_memory
async def test_an_end_that_waits_alone_is_told_so_at_the_deadline(network: Network) -> None:
    async with relaying(network) as relay:
        relay.circuits.expect_circuit(ID, 2.0)
        relay.circuits.expect_circuit(OTHER_ID, 2.0)  # nobody comes
        began = now()
        error = await refusal(await join(network, relay, CALLER))
        assert "the other end did not come to the relay within 2 s" in error.message
        assert now() - began == pytest.approx(2.0)
        assert not relay.circuits._meetings


@in_memory
async def test_a_relay_keeps_its_limits(network: Network) -> None:
    async with relaying(network, RelayLimits(circuits=2, circuits_per_peer=1)) as relay:
        for number, peers in enumerate([("a", "b"), ("c", "d"), ("a", "e"), ("f", "g")]):
            relay.circuits.expect_circuit(f"{number:064x}", 60.0, peers)
        first, second = [await join(network, relay, CALLER, f"{number:064x}") for number in (0, 1)]
        await asyncio.sleep(0.1)
        assert (
            "the relay serves 2 circuits already"
            in (await refusal(await join(network, relay, CALLER, f"{3:064x}"))).message
        )
        second.abort()
        await asyncio.sleep(0.1)
        assert (
            "the relay serves 1 circuits of a already"
            in (await refusal(await join(network, relay, CALLER, f"{2:064x}"))).message
        )
        assert relay.circuits.count_relayed("a") == 1
        assert relay.circuits.count_relayed("c") == 0
        first.abort()
    with pytest.raises(Refused, match="no relay"):
        CircuitNetwork(network, limits=RelayLimits(circuits=0)).expect_circuit(ID, 1.0)


@in_memory
async def test_a_caller_that_never_comes_keeps_no_other_out(network: Network) -> None:
    async with relaying(network) as relay:
        for number in range(MAX_UNUSED):
            relay.circuits.expect_circuit(f"{number:064x}", 60.0, ("a", "b"))
        with pytest.raises(Refused, match="expected here already"):
            relay.circuits.expect_circuit(ID, 60.0, ("a", "c"))
        relay.circuits.expect_circuit(ID, 60.0, ("b", "a"))


@in_memory
async def test_half_a_preamble_keeps_its_place_for_a_few_seconds_only(network: Network) -> None:
    begin = frame(JoinCircuit(ID, CALLER))
    async with relaying(network) as relay:
        half = []
        for length in (1, 4, 5, 30):
            half.append(end := Recorder())
            await network.connect(*relay.address, lambda it=end: it, timeout_s=5)
            end.transport.write(begin[:length])
        await asyncio.sleep(1)
        assert relay.circuits.half_open._by_machine.total() == len(half)
        began = now()
        for end in half:
            await end.until_lost()
        assert now() - began < JOIN_S + HANDSHAKE_TIMEOUT_S + 1
        assert not relay.circuits.half_open._by_machine


@in_memory
async def test_silent_callers_keep_no_other_out(network: Network) -> None:
    async with relaying(network) as relay:
        quiet = [Recorder(buffer_bytes=1) for _ in range(MAX_HALF_OPEN_PER_MACHINE)]
        for each in quiet:
            await network.connect(*relay.address, lambda it=each: it, timeout_s=5)
        hello = local_hello(peer_id="a1", name="a", roles=[], purpose="probe")
        await (await dial(network, *relay.address, hello, timeout_s=1))[0].close()
        assert not relay.problems
        for each in quiet:
            each.transport.abort()
            await each.until_lost()


@on_virtual_time
async def test_a_relay_that_stops_ends_its_circuits() -> None:
    three = ThreePeers(MemoryNetwork().at)
    async with connected(three) as (caller, answerer, _):
        await three.relay.close()
        await caller.until_lost()
        await answerer.until_lost()
    await three.close()


@pytest.mark.parametrize("reversed_", [False, True])
@on_virtual_time
async def test_the_answerer_may_speak_first_and_the_end_leaves_nothing(reversed_: bool) -> None:
    class Greeter(Recorder):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.write(b"welcome")

    three, caller, greeter = ThreePeers(MemoryNetwork().at, reversed_=reversed_), Recorder(), Greeter()
    listener = await three.listen("0.0.0.0", 0, lambda: greeter)
    await three.connect("b2", listener.address[1], lambda: caller, timeout_s=5)
    assert await caller.until_received(7) == b"welcome"
    assert three.ways == [REVERSED if reversed_ else RELAYED]
    assert three.caller.ways() == {"b2": "reversed" if reversed_ else "relayed by relay"}
    assert three.relay.count_relayed() == (not reversed_)
    caller.transport.close()
    await greeter.until_lost()
    await caller.until_lost()
    assert not three.caller.ways()
    assert not three.relay.relayed
    await listener.close()
    await three.close()


@on_virtual_time
async def test_an_idle_circuit_ends_and_a_used_one_stays() -> None:
    three = ThreePeers(MemoryNetwork().at)
    async with connected(three) as (caller, answerer, _):
        for _ in range(3):
            await asyncio.sleep(3000)
            caller.transport.write(b"still here")
        await asyncio.sleep(3000)
        assert caller.events[-1] != "lost"
        await answerer.until_lost(timeout_s=5000)
        assert now() < 17_000
    await three.close()


@on_virtual_time
async def test_what_is_wrong_with_a_circuit_is_said_where_it_was_dialled() -> None:
    three = ThreePeers(MemoryNetwork().at)
    listener = await three.listen("0.0.0.0", 0, Recorder)
    three.alter = lambda circuit: dataclasses.replace(circuit, id="0" * 64)
    with pytest.raises(Unreachable, match=r"cannot reach b2.peer:\d+: relay:\d+ refuses: no such circuit") as caught:
        await three.connect("b2", listener.address[1], Recorder, timeout_s=5)
    assert three.ways == [""]
    assert "dial again" in caught.value.remedy
    alone = CircuitNetwork(MemoryNetwork())
    with pytest.raises(Unreachable, match="b2 is behind a router, and no seed"):
        await alone.connect(peer_host("b2"), 1, Recorder, timeout_s=5)
    with pytest.raises(Unreachable, match="does not listen"):
        await alone.accept(Circuit(ID, "a1", "b2", ANSWERER))
    await listener.close()
    await three.close()


@on_virtual_time
async def test_an_end_that_never_comes_is_given_up_by_a_caller_that_is_the_meeting_point() -> None:
    network = MemoryNetwork()
    async with relaying(network) as caller:

        async def request(peer_id: str) -> Circuit:
            return Circuit(ID, "a1", peer_id, CALLER)

        caller.circuits.request = request
        began = now()
        with pytest.raises(Unreachable, match="did not dial this one within 4 s"):
            await caller.circuits.connect(peer_host("b2"), 1, Recorder, timeout_s=60)
        assert now() - began == pytest.approx(JOIN_S)


# ----------------------------------------------------------------------------------------------------- hostile relays


class _Liar(asyncio.BufferedProtocol):
    """A relay that lets an end join, and then says what it likes. ``says``: after each read."""

    def __init__(self, says: Callable[[int], bytes]) -> None:
        self._says, self._reads = says, 0
        self._buffer = bytearray(64 << 10)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if text := self._says(self._reads):
            self.transport.write(text)
        self._reads += 1

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...


JOINED = frame(CircuitJoined([SocketAddress("b2", 7)]))


@pytest.mark.parametrize(
    ("says", "kind", "message"),
    [
        (lambda reads: b"", Unreachable, "b2.peer:7: the other end did not come to relay within 4 s"),
        (lambda reads: b"\xff" * 64, Unreachable, None),
        (lambda reads: frame(JoinCircuit(ID, CALLER)), Unreachable, None),
        (lambda reads: JOINED if not reads else b"", DeadlineExceeded, "b2.peer:7 accepted the connection"),
        (lambda reads: JOINED if not reads else b"garbage" * 9, P2PTrainError, "b2.peer:7 does not speak TLS"),
        (lambda reads: JOINED if not reads else b"\x16\x03\x01\x00\x05hello", P2PTrainError, "b2.peer:7 .*TLS"),
        (lambda reads: (JOINED if not reads else b"") + b"\x16\x03\x03" + bytes(1 << 20), P2PTrainError, "b2.peer:7"),
    ],
    ids=["stalls", "sends garbage", "echoes", "stalls later", "answers plainly", "breaks TLS", "floods"],
)
@on_virtual_time
async def test_a_hostile_relay_is_noticed_and_costs_little(
    says: Callable[[int], bytes], kind: type[P2PTrainError], message: str | None
) -> None:
    network = MemoryNetwork()
    listener = await network.at("relay").listen("0.0.0.0", 0, lambda: _Liar(says))
    circuits = CircuitNetwork(network.at("a1"))

    async def request(peer_id: str) -> Circuit:
        return Circuit(ID, "a1", peer_id, CALLER, "relay", listener.address[1], "relay")

    ways: list[str] = []
    circuits.request, circuits.on_way = request, lambda circuit, way: ways.append(way)
    secure = TlsNetwork(circuits, credentials("a1"), require_client_certificate=True)
    began = now()
    with pytest.raises(kind, match=message):
        await secure.connect(peer_host("b2"), 7, Connection, timeout_s=5)
    assert now() - began <= 6
    assert ways[-1] == "", "so that another relay is chosen"
    await asyncio.sleep(2)
    assert not network.transports
    await listener.close()


@on_virtual_time
async def test_a_relay_cannot_answer_in_the_other_ends_place() -> None:
    network = MemoryNetwork()
    liar = CircuitNetwork(network.at("relay"))
    own = Owner()
    async with own.listening(TlsNetwork(liar, credentials("c3"), require_client_certificate=True), "0.0.0.0") as relay:
        circuits = CircuitNetwork(network.at("a1"))

        async def request(peer_id: str) -> Circuit:
            host, port = "relay", relay.address[1]
            liar.expect_circuit(ID, 5.0)  # it joins the circuit itself, with its own certificate
            answering = Circuit(ID, "a1", "b2", ANSWERER, "127.0.0.1", port, "relay")
            tasks.append(asyncio.get_running_loop().create_task(liar.accept(answering)))
            return Circuit(ID, "a1", peer_id, CALLER, host, port, "relay")

        tasks: list[asyncio.Task[None]] = []
        circuits.request = request
        secure = TlsNetwork(circuits, credentials("a1"), require_client_certificate=True)
        hello = local_hello(peer_id="a1", name="a", roles=["worker"], purpose="probe")
        with pytest.raises(Refused, match="expected peer 'b2', but the certificate names peer 'c3'"):
            await dial(secure, peer_host("b2"), 7, hello, timeout_s=5, expect_peer="b2")
        await asyncio.gather(*tasks)
        assert not own.hellos
    await liar.close()


# --------------------------------------------------------------------------------------------------------- direct tries


@pytest.mark.parametrize(
    "words", [b"", b"\xff" * 64, frame(JoinCircuit(OTHER_ID, ANSWERER))], ids=["silent", "garbage", "another circuit"]
)
def test_a_stranger_at_the_other_ends_address_is_not_taken_for_it(words: bytes) -> None:
    async def scene() -> None:
        network = TcpNetwork()

        class Stranger(Recorder):
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                transport.write(words)

        listener = await network.listen(HOST, 0, Stranger)
        async with relaying(network) as relay:
            relay.circuits.expect_circuit(ID, 5.0)
            answerer = Connection()
            await network.connect(*relay.address, lambda: answerer, timeout_s=5)
            answerer.send(JoinCircuit(ID, ANSWERER, [SocketAddress(*listener.address)]))
            caller = CircuitNetwork(network)
            circuit = Circuit(ID, "a1", "b2", CALLER, *relay.address, "relay", tries_direct=True)
            trying = asyncio.ensure_future(caller.try_direct(circuit))
            await joined(answerer)
            assert (await answerer.expect(JoinCircuit, timeout_s=5)).side == CALLER
            assert await trying == RELAYED
            await answerer.closed.wait()
        await listener.close()

    play(scene())


def test_a_trial_finds_the_way_and_leaves_nothing() -> None:
    async def scene() -> None:
        network = TcpNetwork()
        async with relaying(network) as relay:
            relay.circuits.expect_circuit(ID, 5.0)
            circuit = Circuit(ID, "a1", "b2", CALLER, *relay.address, "relay", tries_direct=True)
            answering = dataclasses.replace(circuit, side=ANSWERER)
            ways = await asyncio.gather(*(CircuitNetwork(network).try_direct(end) for end in (circuit, answering)))
            assert ways == [DIRECT, DIRECT]  # both ends are on this machine

    play(scene())


# -------------------------------------------------------------------------------------------------- a relay's bandwidth


class _Source:
    """Writes as much as the network takes."""

    def __init__(self, end: Recorder, chunk_bytes: int = 64 << 10) -> None:
        self._task = asyncio.get_running_loop().create_task(self._write(end, bytes(chunk_bytes)))

    async def _write(self, end: Recorder, chunk: bytes) -> None:
        while True:
            end.transport.write(chunk)
            await end.until(lambda: not end.writing_paused, timeout_s=1e6)

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


@on_virtual_time
async def test_a_relays_limit_is_kept_and_shared_fairly() -> None:
    rate, seconds = 1e6, 20.0
    three = ThreePeers(MemoryNetwork().at, limits=RelayLimits(rate))
    async with connected(three) as (a, b, _), connected(three) as (c, d, _), connected(three) as (e, f, _):
        sources = [_Source(a), _Source(b), _Source(c)]  # a circuit that sends both ways has no more than the other
        await asyncio.sleep(seconds)
        first, second = len(a.received) + len(b.received), len(d.received)
        assert first + second == pytest.approx(rate * seconds, rel=0.02)
        assert first == pytest.approx(second, rel=0.05)
        began = now()
        e.transport.write(b"a few words")  # of a circuit that was idle
        await f.until_received(11)
        assert now() - began < 0.1
        await sources[2].stop()
        before = len(a.received) + len(b.received)
        await asyncio.sleep(seconds)
        assert len(a.received) + len(b.received) - before == pytest.approx(rate * seconds, rel=0.05)
        before = len(d.received)
        sources[2] = _Source(c)  # which gets no more than its share now, though it had less than its share before
        await asyncio.sleep(seconds)
        assert len(d.received) - before == pytest.approx(rate * seconds / 2, rel=0.05)
        for source in sources:
            await source.stop()
        for end in (a, b, c, d, e, f):
            end.transport.abort()
    await three.close()
