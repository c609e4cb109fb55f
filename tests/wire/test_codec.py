"""Messages there and back, everything that is not one, the reference that is made of them, and records."""

from __future__ import annotations

import importlib
import ipaddress
import math
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wire
from p2ptrain.core.errors import ProtocolError
from tests.fuzz.strategies import made
from wire.codec import (
    COMPRESSED,
    MAX_CONTAINERS,
    MAX_HANDSHAKE_ITEMS,
    MAX_LIST_ITEMS,
    MAX_MAP_ITEMS,
    MESSAGE_TYPES,
    decode_untrusted,
    encode,
    unpack_untrusted,
)
from wire.frame import CONTROL_FRAME_BYTES
from wire.job_messages import CheckpointSaved, LedgerRow, LedgerRows, MemberRecord, ViewAnnounced
from wire.messages import BULK_KIND, PROTOCOL_VERSION, Heartbeat, Hello, Message, Refuse, Request, Update, Welcome
from wire.protocol import document
from wire.records import JobInfo
from wire.schema import MAX_DEPTH
from wire.text_messages import DrafterList


def sendable(message: Message) -> bool:
    try:
        return bool(encode(message))
    except (ValueError, TypeError):
        return False


MESSAGES = st.one_of(
    [
        made(cls, valid=True, version=st.just(PROTOCOL_VERSION)) if cls in (Hello, Welcome) else made(cls, valid=True)
        for cls in MESSAGE_TYPES.values()
    ]
).filter(sendable)


def same(left: Any, right: Any) -> bool:
    """Equal, and of equal types all the way down."""
    return repr(left) == repr(right)


def packed(**fields: Any) -> bytes:
    return msgpack.packb(fields)


BOMB = COMPRESSED + zlib.compress(bytes(1 << 20))
PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
JOB = JobInfo("j", "job", "tiny", "sync", "running", 0.0, 10, members=["a", "b", "c"])
BEAT = {"seq": 1, "progress": 2, "step": 3, "state": "training", "stats": {"rtt_ms": 1.5}, "gpus": [], "ways": {}}
HELLO = {
    "version": PROTOCOL_VERSION,
    "software": "p2ptrain 0.1",
    "peer_id": "a1",
    "name": "anna",
    "roles": ["worker"],
    "purpose": "peer",
}


def test_every_message_class_has_its_own_kind():
    files = sorted(Path(wire.__file__).parent.glob("*messages.py"))
    modules = [importlib.import_module(f"wire.{file.stem}") for file in files]
    items = [item for module in modules for item in vars(module).values()]
    classes = {item for item in items if isinstance(item, type) and issubclass(item, Message)}
    assert len(MESSAGE_TYPES) == len(classes) - 1 > 20
    assert max(MESSAGE_TYPES) < 256
    assert BULK_KIND not in MESSAGE_TYPES


@given(MESSAGES)
def test_there_and_back(message: Message):
    back = decode_untrusted(message.KIND, encode(message))
    assert type(back) is type(message)
    assert same(back, message)


def test_view_of_a_thousand_members_fits_a_frame_and_is_encoded_once():
    rng = random.Random(1)
    members = tuple(
        MemberRecord(rng.randbytes(8).hex(), f"machine-{rank}.local", str(ipaddress.IPv6Address(rng.getrandbits(128))),
                     rng.randrange(1 << 10, 1 << 16), rank, 1, True)
        for rank in range(1024)
    )  # fmt: skip
    view = ViewAnnounced("job", 1, 0, "0" * 32, members)
    body = encode(view)
    assert len(body) < CONTROL_FRAME_BYTES - 1024
    assert encode(view) is body
    assert decode_untrusted(view.KIND, body) == view


@pytest.mark.parametrize(
    "damage",
    [lambda body: body[:-1], lambda body: body + b"x", lambda body: body[:20], lambda body: BOMB],
    ids=["cut", "longer", "beginning", "bomb"],
)
def test_damaged_compressed_view_is_refused(damage: Callable[[bytes], bytes]):
    members = tuple(MemberRecord(f"a{rank}", "name", "host", 1, rank, 1, True) for rank in range(400))
    body = encode(ViewAnnounced("job", 1, 0, "0" * 32, members))
    with pytest.raises(ProtocolError, match="compressed"):
        decode_untrusted(ViewAnnounced.KIND, damage(body))


def test_floats_may_be_sent_as_ints_but_arrive_as_floats():
    beat = decode_untrusted(Heartbeat.KIND, packed(**BEAT | {"stats": {"rtt_ms": 3}}))
    assert isinstance(beat, Heartbeat)
    assert same(beat.stats, {"rtt_ms": 3.0})


def test_what_may_be_several_types_keeps_its_own():
    hello = decode_untrusted(
        Hello.KIND, packed(**HELLO, capabilities={"a": 1, "b": 1.0, "c": True, "d": None, "e": ""})
    )
    assert isinstance(hello, Hello)
    assert same(hello.capabilities, {"a": 1, "b": 1.0, "c": True, "d": None, "e": ""})
    saved = CheckpointSaved("job", 1, "/p", "ff", 9, None)
    assert decode_untrusted(CheckpointSaved.KIND, encode(saved)) == saved


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("field", BEAT)
def test_every_field_must_be_there(field: str):
    with pytest.raises(ProtocolError, match=f"lacks '{field}'"):
        decode_untrusted(Heartbeat.KIND, packed(**{name: value for name, value in BEAT.items() if name != field}))


def test_drafter_that_is_listed_twice_or_with_an_invalid_address_is_refused():
    drafter = {"peer_id": "d1", "name": "d", "host": "", "port": 1, "model": "m", "tokenizer": "",
               "role": "worker"}  # fmt: skip
    assert decode_untrusted(DrafterList.KIND, packed(drafters=[drafter, drafter | {"peer_id": "d2"}]))
    for drafters in (
        [drafter] * 2,
        [drafter | {"port": 0}],
        [drafter | {"peer_id": "D 1"}],
        [drafter | {"host": "h" * 256}],
    ):
        with pytest.raises(ProtocolError):
            decode_untrusted(DrafterList.KIND, packed(drafters=drafters))


def test_handshake_messages_may_come_from_a_newer_release():
    hello = decode_untrusted(Hello.KIND, packed(**HELLO, invented_later=1))
    assert isinstance(hello, Hello)
    assert (hello.name, hello.port) == ("anna", 0)
    with pytest.raises(ProtocolError, match="lacks 'name'"):
        decode_untrusted(Hello.KIND, packed(version=PROTOCOL_VERSION))


@pytest.mark.parametrize("kind", [Hello.KIND, Welcome.KIND])
def test_of_another_version_only_version_and_software_are_understood(kind: int):
    other = decode_untrusted(kind, packed(version=99, software="p2ptrain 9.0", peer_id={"now": "a map"}))
    assert isinstance(other, Hello | Welcome)
    assert (other.version, other.software, other.peer_id) == (99, "p2ptrain 9.0", "")
    other = decode_untrusted(kind, packed(version=0))
    assert isinstance(other, Hello | Welcome)
    assert other.software == "an unknown release"
    with pytest.raises(ProtocolError):
        decode_untrusted(kind, packed(version="99"))


def request(params: Any) -> Message:
    return decode_untrusted(Request.KIND, packed(id=1, method="m", params=params))


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 1


def test_lists_and_maps_are_bounded():
    assert request({"a": [0] * MAX_LIST_ITEMS})
    assert request({"a": dict.fromkeys(map(str, range(MAX_MAP_ITEMS)), 0)})
    with pytest.raises(ProtocolError, match="max_array_len"):
        request({"a": [0] * (MAX_LIST_ITEMS + 1)})
    with pytest.raises(ProtocolError, match="max_map_len"):
        request({"a": dict.fromkeys(map(str, range(MAX_MAP_ITEMS + 1)), 0)})
    roles = [""] * (MAX_HANDSHAKE_ITEMS + 1)
    assert decode_untrusted(Hello.KIND, packed(**HELLO | {"roles": roles[1:]}))
    with pytest.raises(ProtocolError, match="max_array_len"):
        decode_untrusted(Hello.KIND, packed(**HELLO | {"roles": roles}))


@pytest.mark.parametrize("empty", [[], {}])
def test_lists_and_maps_are_counted_before_they_fill_the_memory(empty: object):
    body: bytes = msgpack.packb([[empty] * MAX_LIST_ITEMS] * (MAX_CONTAINERS // MAX_LIST_ITEMS))
    with pytest.raises(ProtocolError, match="lists and maps"):
        unpack_untrusted(body)


# -------------------------------------------------------------------------------------------------------------- sending


@pytest.mark.parametrize(
    "message",
    [
        Refuse(code=None, message=""),  # type: ignore[arg-type]
        LedgerRows("job", "", [LedgerRow(1, 1, "text", b"")]),  # type: ignore[arg-type]
        Request(1, "m", {"a": nested(MAX_DEPTH + 1)}),
        Request(1, "m", {1: "a"}),  # type: ignore[dict-item]
        Update("peers", [{}] * (MAX_LIST_ITEMS + 1)),
    ],
)
def test_what_a_peer_would_refuse_is_not_sent(message: Message):
    with pytest.raises(ValueError, match="cannot be sent"):
        encode(message)


# -------------------------------------------------------------------------------------------------------- the reference


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), "make format writes it"


def test_every_message_is_on_the_page() -> None:
    page = document()
    assert all(f"### {cls.__name__} (kind {cls.KIND}" in page for cls in MESSAGE_TYPES.values())


# -------------------------------------------------------------------------------------------------------------- records


def with_edges(edge_ms: list[Any], edge_bps: list[Any]) -> JobInfo:
    return JobInfo.from_map_untrusted(JOB.to_map() | {"edge_ms": edge_ms, "edge_bps": edge_bps})


@pytest.mark.parametrize(
    ("edge_ms", "edge_bps", "slowest"),
    [
        ([1.0, 2.0, 3.0], [1e6, 1e6, 1e6], 2),
        ([1.0, 2.0, 3.0], [1e6, None, None], 0),
        ([None, 2.0, 3.0], [1e6, None, None], 2),
        ([1.0, 1.0, 1.0], [1e6, 1e6, 1e6], 0),
        ([None, None, None], [None, None, None], None),
        ([], [], None),
        ([1.0], [1e6], None),
    ],
)
def test_the_slowest_edge_has_least_bandwidth_then_most_latency(
    edge_ms: list[Any], edge_bps: list[Any], slowest: int | None
) -> None:
    assert with_edges(edge_ms, edge_bps).slowest_edge() == slowest


def test_what_is_no_figure_counts_as_unknown() -> None:
    assert with_edges([math.nan, -1.0, 1.0], [1e6, 1e6, math.inf]).edges() == [(None, 1e6), (None, 1e6), (1.0, None)]
