"""What stands in frames: framing, messages, records, the handshake's judges; and the texts that name a seed."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import zlib
from typing import Any

import msgpack
from hypothesis import strategies as st

from p2ptrain.cli.placement import describe_prediction
from tests.invariants import check_invariants
from wire.address import ROLES, Ticket, is_ticket
from wire.codec import COMPRESSED, MESSAGE_TYPES, decode_untrusted, encode
from wire.frame import (
    CONTROL_FRAME_BYTES,
    HANDSHAKE_FRAME_BYTES,
    HEADER,
    LAST_HANDSHAKE_KIND,
    MAX_BULK_BYTES,
    BulkDone,
    ControlFrame,
    FrameDecoder,
    encode_bulk_header,
    encode_control,
)
from wire.job_messages import ViewAnnounced
from wire.messages import BULK_KIND, MAX_END_ADDRESSES, PROTOCOL_VERSION, Hello, SocketAddress, Welcome
from wire.punching import dialable_untrusted
from wire.records import JobInfo, LedgerRun, PartInfo, Record, ServingInfo, StagePlanInfo, TrainingPlanInfo

from .engine import accepted, target
from .strategies import ANY_TEXT, FREE, PACKABLE, TEXT, conforms, made, mutated, mutated_text, nested, packed

# ------------------------------------------------------------------------------------------------------------- frames

KINDS = frozenset(MESSAGE_TYPES)
_GENERATIONS, _STREAMS = st.integers(0, 3), st.integers(0, 2)
_CONTROL = st.builds(
    lambda kind, size, generation, stream: encode_control(kind, bytes(size), generation=generation, stream=stream),
    st.sampled_from([*KINDS, 0, 15, 63, 255]),
    st.sampled_from([1, 2, 30, HANDSHAKE_FRAME_BYTES - HEADER.size]),
    _GENERATIONS,
    _STREAMS,
)
_BULK = st.builds(
    lambda size, generation, stream: encode_bulk_header(size, generation=generation, stream=stream) + bytes(size),
    st.integers(0, 64),
    _GENERATIONS,
    _STREAMS,
)
_HEADER = st.builds(
    HEADER.pack,
    st.sampled_from([0, 15, 16, 17, HANDSHAKE_FRAME_BYTES, CONTROL_FRAME_BYTES, MAX_BULK_BYTES + 16, 2**31, 2**32 - 1]),
    st.sampled_from([1, 16, BULK_KIND, 255]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([0, 0, 1, 65535]),
    _GENERATIONS,
    _STREAMS,
)
_FEED = st.tuples(st.just("feed"), st.integers(1, 80))
_DEEDS = st.one_of(
    _FEED,
    _FEED,
    st.tuples(st.just("large")),
    st.tuples(st.just("post"), _GENERATIONS, _STREAMS, st.integers(0, 64)),
    st.tuples(st.just("fence"), st.integers(0, 4)),
)


class _Reader:
    """A decoder, fed as a connection feeds it, and what must hold of every answer."""

    def __init__(self, data: bytes) -> None:
        self.core = FrameDecoder(KINDS)
        self.data = data
        self.large = False
        self.posted: set[Any] = set()

    def do(self, deed: tuple[Any, ...]) -> None:
        match deed:
            case ("feed", nbytes):
                self.feed(nbytes)
            case ("large",):
                self.core.allow_large()
                self.large = True
            case ("fence", fence):
                self.core.raise_fence(fence)
            case ("post", generation, stream, size):

                def done() -> None: ...

                self.posted.add(done)
                into = memoryview(bytearray(size))
                self._heard(self.core.post(into, generation=generation, stream=stream, done=done))
        check_invariants(self.core)

    def feed(self, nbytes: int) -> None:
        while nbytes and self.data and not self.core.waiting:
            buffer = self.core.next_buffer()
            assert 0 < len(buffer) <= CONTROL_FRAME_BYTES
            taken = min(len(buffer), len(self.data), nbytes)
            buffer[:taken] = self.data[:taken]
            self.data, nbytes = self.data[taken:], nbytes - taken
            self._heard(self.core.received(taken))

    def _heard(self, event: Any) -> None:
        match event:
            case ControlFrame():
                limit = CONTROL_FRAME_BYTES if self.large else HANDSHAKE_FRAME_BYTES
                assert event.kind in KINDS
                assert self.large or event.kind <= LAST_HANDSHAKE_KIND
                assert 0 < len(event.body) <= limit - HEADER.size
            case BulkDone():
                assert event.done in self.posted
                self.posted.discard(event.done)
            case _:
                assert event is None


@target(
    "frames",
    st.tuples(
        st.lists(_CONTROL | _BULK | _HEADER | mutated(_CONTROL | _BULK), min_size=1, max_size=4).map(b"".join),
        st.lists(_DEEDS, max_size=12),
    ),
    peak_bytes=CONTROL_FRAME_BYTES + (64 << 10),
)
def _check_frames(case: tuple[bytes, list[tuple[Any, ...]]]) -> None:
    data, deeds = case
    reader = _Reader(data)
    for deed in deeds:
        reader.do(deed)
    reader.feed(len(data))
    check_invariants(reader.core)


# ----------------------------------------------------------------------------------------------------------- messages

_OURS = st.just(PROTOCOL_VERSION)
_MADE = {
    kind: made(cls, version=_OURS) if cls in (Hello, Welcome) else made(cls) for kind, cls in MESSAGE_TYPES.items()
}


def _bodies(kind: int) -> st.SearchStrategy[tuple[int, bytes]]:
    limit = (HANDSHAKE_FRAME_BYTES if kind <= LAST_HANDSHAKE_KIND else CONTROL_FRAME_BYTES) - HEADER.size
    valid = packed(_MADE[kind].map(dataclasses.asdict))
    bodies = st.one_of(valid, valid, valid, nested(limit), st.binary(max_size=40), PACKABLE.map(_pack))
    return st.tuples(st.just(kind), bodies.map(lambda body: body[:limit]))


def _compressed(body: bytes) -> st.SearchStrategy[bytes]:
    whole = COMPRESSED + zlib.compress(body)
    return st.just(whole) | st.binary(min_size=1, max_size=8).map(lambda odd: whole[: -len(odd)] + odd)


def _pack(value: Any) -> bytes:
    body: bytes = msgpack.packb(value)
    return body


@target(
    "messages-handshake",
    st.one_of([_bodies(kind) for kind in MESSAGE_TYPES if kind <= LAST_HANDSHAKE_KIND]),
    "wire.codec.decode_untrusted",
    "wire.codec.unpack_untrusted",
    peak_bytes=1 << 20,
)
@target(
    "messages",
    st.one_of([_bodies(kind) for kind in MESSAGE_TYPES if kind > LAST_HANDSHAKE_KIND])
    | st.tuples(st.integers(0, 255).filter(lambda kind: kind not in KINDS), st.binary(max_size=20)),
    "wire.codec.decode_untrusted",
    "wire.codec.unpack_untrusted",
    peak_bytes=40 << 20,  # lists that claim 4096 items, a thousand deep: given back within the call
)
@target(
    "messages-compressed",
    st.one_of([_bodies(kind) for kind, cls in MESSAGE_TYPES.items() if cls.LONG]).flatmap(
        lambda case: st.tuples(st.just(case[0]), _compressed(case[1]))
    )
    | st.just((ViewAnnounced.KIND, COMPRESSED + zlib.compress(bytes(64 << 20)))),  # a bomb
    "wire.codec.decode_untrusted",
    "wire.codec._decompressed_untrusted",
    peak_bytes=40 << 20,
)
def _check_message(case: tuple[int, bytes]) -> None:
    kind, body = case
    message = decode_untrusted(kind, body)
    assert conforms(message, MESSAGE_TYPES[kind])
    again = encode(message)
    with accepted():
        assert encode(decode_untrusted(kind, again)) == again


# ------------------------------------------------------------------------------------------------------------ records


def _records(base: type[Record] = Record) -> list[type[Record]]:
    return [kind for child in base.__subclasses__() for kind in (child, *_records(child))]


@st.composite
def _maps(draw: st.DrawFn, kind: type[Record]) -> tuple[type[Record], Any]:
    source: Any = draw(made(kind).map(dataclasses.asdict))
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(sorted(source)) | TEXT) if source else draw(TEXT)
        if draw(st.booleans()):
            source[name] = draw(FREE)
        else:
            source.pop(name, None)
    return kind, source


@target(
    "records",
    st.deferred(lambda: st.sampled_from(_records()).flatmap(lambda kind: _maps(kind) | st.tuples(st.just(kind), FREE))),
    "wire.schema.Record.from_map_untrusted",
    "wire.schema.instance_untrusted",
    peak_bytes=1 << 20,
)
def _check_record(case: tuple[type[Record], Any]) -> None:
    kind, source = case
    record = kind.from_map_untrusted(source)
    assert conforms(record, kind)
    with accepted():
        assert msgpack.packb(kind.from_map_untrusted(record.to_map()).to_map()) == msgpack.packb(record.to_map())
    if isinstance(record, LedgerRun):
        assert all(row.step >= 1 and len(row.digest) == 16 for row in record.rows())
    if isinstance(record, JobInfo):
        record.edges()
        record.slowest_edge()
    if isinstance(record, PartInfo):
        assert 0 <= record.start < record.stop <= record.layers <= 4096
        assert 0 <= record.used_bytes < 2**55
        assert 0 <= record.busy <= 1
    if isinstance(record, ServingInfo):
        assert 0 < record.port < 65536
        assert all(math.isfinite(value) for value in record.stats.values())
    if isinstance(record, StagePlanInfo):
        assert 0 <= record.start < record.stop
        assert all(value is None or math.isfinite(value) for value in (record.compute_s, record.hop_s))
    if isinstance(record, TrainingPlanInfo):
        assert describe_prediction(record)


# ----------------------------------------------------------------------------------- where to dial the end of a circuit

_HOSTS = [
    "192.168.1.2",
    "127.0.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "::1",
    "::",
    "fe80::1%eth0",
    "::ffff:127.0.0.1",
    "2001:db8::1",
]
_OWN = [[SocketAddress("192.168.1.2", 7)], [SocketAddress("::1", 7)], []]


@target(
    "addresses of ends",
    st.tuples(
        st.lists(
            st.builds(
                SocketAddress,
                st.sampled_from(_HOSTS) | mutated_text(_HOSTS, ["%", ":", "0", "e", "/"]),
                st.integers(1, 65535),
            ),
            max_size=MAX_END_ADDRESSES + 1,
        ),
        st.sampled_from(_OWN),
    ),
    "wire.punching.dialable_untrusted",
)
def _check_addresses(case: tuple[list[SocketAddress], list[SocketAddress]]) -> None:
    addresses, own = case
    for host, port in dialable_untrusted(addresses, own):
        number = ipaddress.ip_address(host)
        assert not any((number.is_multicast, number.is_unspecified, number.is_link_local))
        assert not number.is_loopback or own == _OWN[1]
        assert SocketAddress(host, port) not in own


# ----------------------------------------------------------------------------------------- texts that a person is given

_TICKETS = [
    str(Ticket(host, port, role, "0123456789ab", bytes(range(16)), bytes(range(32))))
    for host, port in [("seed.example", 7337), ("192.168.1.20", 1), ("fe80::1", 65535)]
    for role in ROLES
]
_PIECES = ["/", ":", "[", "]", "::", "-", "_", "=", "A", "\n", " ", "0", "99999", "%", "@", "\u0661", "a" * 600]


@target("tickets", mutated_text(_TICKETS, _PIECES) | ANY_TEXT, "wire.address.Ticket.parse_untrusted")
def _check_ticket(text: str) -> None:
    is_ticket(text)
    ticket = Ticket.parse_untrusted(text)
    assert 1 <= ticket.port <= 65535
    with accepted():
        assert Ticket.parse_untrusted(str(ticket)) == ticket
    assert repr(ticket.secret) not in repr(ticket)
