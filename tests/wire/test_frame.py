"""The frame core, fed whole, byte by byte, and with trailing bytes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError, UserError
from tests.invariants import check_invariants
from wire.frame import (
    CONTROL_FRAME_BYTES,
    HANDSHAKE_FRAME_BYTES,
    HEADER,
    MAX_BULK_BYTES,
    BulkDone,
    ControlFrame,
    Event,
    FrameDecoder,
    encode_bulk_header,
    encode_control,
)
from wire.messages import BULK_KIND

KINDS = frozenset({1, 2, 16})
CHUNKS = [1, 3, HEADER.size, 1 << 20]


def nothing() -> None: ...


def decoder(*, large: bool = True, fence: int = 0) -> FrameDecoder:
    made = FrameDecoder(KINDS)
    if large:
        made.allow_large()
    made.raise_fence(fence)
    return made


def feed(core: FrameDecoder, data: bytes, chunk: int = 1 << 20) -> tuple[list[Event], bytes]:
    """Give ``data`` in reads of at most ``chunk`` bytes; returns the events and what could not be taken yet."""
    events = []
    while data and not core.waiting:
        buffer = core.next_buffer()
        nbytes = min(len(buffer), len(data), chunk)
        buffer[:nbytes] = data[:nbytes]
        data = data[nbytes:]
        event = core.received(nbytes)
        check_invariants(core)
        if event is not None:
            events.append(event)
    return events, data


def control(body: bytes, kind: int = 16, generation: int = 0, stream: int = 0) -> bytes:
    return encode_control(kind, body, generation=generation, stream=stream)


def bulk(payload: bytes, generation: int = 0, stream: int = 0) -> bytes:
    return encode_bulk_header(len(payload), generation=generation, stream=stream) + payload


def post(core: FrameDecoder, size: int, generation: int = 0, stream: int = 0, done: Callable[[], None] = nothing):
    into = bytearray(size)
    event = core.post(memoryview(into), generation=generation, stream=stream, done=done)
    check_invariants(core)
    return into, event


# --------------------------------------------------------------------------------------------------------- whole frames


def test_header_layout_is_the_one_of_the_architecture_page():
    frame = control(b"body", kind=16, generation=7, stream=9)
    assert frame == bytes.fromhex("00000014 10 00 0004 0000000000000007 00000009") + b"body"
    assert encode_bulk_header(5, generation=1, stream=2) == bytes.fromhex(
        "00000015 40 00 0000 0000000000000001 00000002"
    )


@pytest.mark.parametrize("cut", range(1, len(control(b"one"))))
def test_a_stream_must_not_end_within_a_frame(cut: int):
    core = decoder()
    assert core.between_frames
    assert feed(core, control(b"one")[:cut]) == ([], b"")
    assert not core.between_frames


def test_a_destination_of_any_format_is_filled_as_bytes():
    core, into = decoder(), memoryview(bytearray(8)).cast("d")
    core.post(into, generation=0, stream=0, done=nothing)
    assert feed(core, bulk(bytes.fromhex("000000000000f03f")))[0] == [BulkDone(nothing)]
    assert into[0] == 1.0


@pytest.mark.parametrize("chunk", CHUNKS)
def test_bulk_without_a_post_waits_for_it(chunk: int):
    core = decoder()
    events, rest = feed(core, bulk(b"12345", 2, 1) + control(b"next"), chunk)
    assert not events
    assert rest == b"12345" + control(b"next")
    assert core.waiting
    post(core, 5, generation=2, stream=9)
    assert core.waiting
    into, event = post(core, 5, generation=2, stream=1)
    assert event is None
    assert not core.waiting
    assert feed(core, rest, chunk)[0] == [BulkDone(nothing), ControlFrame(16, 0, 0, bytearray(b"next"))]
    assert into == b"12345"


# ---------------------------------------------------------------------------------------------------------------- fence


def test_the_fence_takes_back_the_buffer_of_a_frame_half_read():
    core = decoder()
    into, _ = post(core, 6, generation=1)
    feed(core, bulk(b"123456", generation=1)[:-3])
    core.raise_fence(2)
    check_invariants(core)
    assert feed(core, b"456" + control(b"next"))[0] == [ControlFrame(16, 0, 0, bytearray(b"next"))]
    assert into == b"123\0\0\0"


def test_the_fence_drops_a_control_frame_half_read():
    core = decoder()
    feed(core, control(b"123456", generation=1)[:-3])
    core.raise_fence(2)
    assert feed(core, b"456" + control(b"next"))[0] == [ControlFrame(16, 0, 0, bytearray(b"next"))]


def test_the_fence_frees_a_frame_that_waits():
    core = decoder()
    _, rest = feed(core, bulk(b"123456", generation=1) + control(b"next"))
    core.raise_fence(2)
    check_invariants(core)
    assert not core.waiting
    assert feed(core, rest)[0] == [ControlFrame(16, 0, 0, bytearray(b"next"))]


def test_the_fence_drops_posts_that_it_passes_and_refuses_new_ones():
    core = decoder()
    post(core, 3, generation=1)
    core.raise_fence(2)
    post(core, 3, generation=1)
    kept, _ = post(core, 3, generation=2)
    assert feed(core, bulk(b"old", generation=1) + bulk(b"new", generation=2))[0] == [BulkDone(nothing)]
    assert kept == b"new"


# --------------------------------------------------------------------------------------------------------------- bounds


def header(length: int, kind: int = 16, flags: int = 0, header_bytes: int | None = None, generation: int = 0) -> bytes:
    return HEADER.pack(length, kind, flags, length - 16 if header_bytes is None else header_bytes, generation, 0)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (header(20, flags=1), "unknown flags 0x01"),
        (header(20, kind=0), "unknown kind 0"),
        (header(20, kind=99), "unknown kind 99"),
        (header(20, kind=255), "unknown kind 255"),
        (header(16), "0 bytes"),
        (header(15, header_bytes=0), "invalid length of 19 bytes"),
        (header(0, header_bytes=0), "invalid length of 4 bytes"),
        (header(20, header_bytes=3), "says its header has 3"),
        (header(20, header_bytes=5), "says its header has 5"),
        (header(CONTROL_FRAME_BYTES - 3), "a control frame of 65537 bytes"),
        (header(20, kind=BULK_KIND, header_bytes=4), "a bulk frame with a header"),
        (header(MAX_BULK_BYTES + 17, kind=BULK_KIND, header_bytes=0), "invalid length of 1073741845 bytes"),
        (header(0xFFFFFFFF, kind=BULK_KIND, header_bytes=0), "invalid length of 4294967299 bytes"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_what_no_correct_peer_sends_after_the_handshake(data: bytes, what: str, chunk: int):
    core = decoder()
    with pytest.raises(ProtocolError, match=what):
        feed(core, data, chunk)
    check_invariants(core)


@pytest.mark.parametrize("kind", [16, 15, BULK_KIND, 0])
def test_before_the_handshake_only_its_own_kinds_pass(kind: int):
    with pytest.raises(ProtocolError):
        feed(decoder(large=False), header(20, kind=kind, header_bytes=4 if kind != BULK_KIND else 0))


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_a_length_of_4_gib_is_refused_by_its_first_four_bytes_and_nothing_is_allocated(large: bool, chunk: int):
    core = decoder(large=large)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            feed(core, b"\xff\xff\xff\xff", chunk)
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [4, 6])
def test_a_bulk_frame_must_have_the_planned_length(size: int):
    core = decoder()
    post(core, size)
    with pytest.raises(ProtocolError, match=f"5 bytes .* {size} were planned"):
        feed(core, bulk(b"12345"))
    core = decoder()
    feed(core, bulk(b"12345"))
    with pytest.raises(ProtocolError, match=f"5 bytes .* {size} were planned"):
        post(core, size)


def test_nothing_is_sent_that_would_be_refused():
    control(bytes(HANDSHAKE_FRAME_BYTES - HEADER.size), kind=15)
    control(bytes(CONTROL_FRAME_BYTES - HEADER.size), kind=16)
    with pytest.raises(UserError):
        control(bytes(HANDSHAKE_FRAME_BYTES - HEADER.size + 1), kind=15)
    with pytest.raises(UserError):
        control(bytes(CONTROL_FRAME_BYTES - HEADER.size + 1), kind=16)
    with pytest.raises(ValueError, match="1073741825"):
        encode_bulk_header(MAX_BULK_BYTES + 1, generation=0, stream=0)


# ----------------------------------------------------------------------------------------------------------- properties


FRAMES = st.lists(
    st.one_of(
        st.tuples(st.just("control"), st.binary(min_size=1, max_size=40), st.integers(0, 3), st.integers(0, 1)),
        st.tuples(st.just("bulk"), st.binary(max_size=60), st.integers(0, 3), st.integers(0, 1)),
    ),
    max_size=12,
)


@given(
    frames=FRAMES, chunks=st.lists(st.integers(1, 50), min_size=1), fence=st.integers(0, 3), early=st.integers(0, 12)
)
def test_any_sequence_in_any_chunks_gives_the_same_events(frames, chunks, fence: int, early: int):
    """The first ``early`` bulk frames are posted beforehand, the others when they are asked for."""
    core, seen, reads = decoder(fence=fence), [], 0
    fresh = [frame for frame in frames if not 0 < frame[2] < fence]
    planned = [frame for frame in fresh if frame[0] == "bulk"]
    stream = b"".join(
        control(data, generation=generation, stream=number) if name == "control" else bulk(data, generation, number)
        for name, data, generation, number in frames
    )

    def post_next() -> Event | None:
        _, payload, generation, number = planned.pop(0)
        into = bytearray(len(payload))
        seen_as = lambda: seen.append(("bulk", bytes(into), generation, number))  # noqa: E731
        return core.post(memoryview(into), generation=generation, stream=number, done=seen_as)

    for _ in range(min(early, len(planned))):
        post_next()
    while stream:
        events, rest = feed(core, stream[: chunks[reads % len(chunks)]], 1 << 20)
        stream = rest + stream[chunks[reads % len(chunks)] :]
        reads += 1
        if core.waiting:
            events.append(post_next())
        for event in events:
            if isinstance(event, BulkDone):
                event.done()
            elif isinstance(event, ControlFrame):
                seen.append(("control", bytes(event.body), event.generation, event.stream))
    assert seen == fresh
    assert core.between_frames
