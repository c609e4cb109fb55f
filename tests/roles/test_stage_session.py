"""The cores behind the stages: what a session takes, what fits."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.core.activations import activation_bytes
from p2ptrain.core.errors import ProtocolError, Refused
from p2ptrain.core.serving import PartSpec, Preempted
from roles.worker.part_cache import IDLE_S, Part, PartCache
from roles.worker.stage_session import StageSession
from tests.invariants import check_invariants
from tests.roles.stage_doubles import session_of
from tests.roles.stage_stand_in import WIDTH, stand_in_config, stand_in_part
from wire.chain_messages import ForwardRequest


def session_at(index: int = 1, **changes: Any) -> StageSession:
    return session_of("s", index, **changes)


def work_of(**changes: Any) -> ForwardRequest:
    values: dict[str, Any] = {"session": "s", "epoch": 0, "number": 0, "keep": 0, "count": 4, "encoding": "int8"}
    return ForwardRequest(
        **{**values, "last": 2, "samples": 0, "sample_index": 0, "spent_us": [1], "prefill": True, **changes}
    )


def test_requests_of_an_older_epoch_are_dropped() -> None:
    session = session_at(epoch=2)
    assert session.admit(work_of(epoch=2), memoryview(b""))
    assert not session.admit(work_of(epoch=1), memoryview(b""))
    with pytest.raises(ProtocolError, match="epoch 3"):
        session.admit(work_of(epoch=3), memoryview(b""))
    with pytest.raises(Refused, match="not newer"):
        session.raise_epoch(2)
    session.raise_epoch(7)
    assert not session.queue
    assert not session.current(work_of(epoch=2))
    assert session.admit(work_of(epoch=7), memoryview(b""))
    session.fail()
    assert not session.queue
    assert not session.admit(work_of(epoch=7), memoryview(b""))
    assert not session.current(work_of(epoch=7))
    session.raise_epoch(8)
    assert session.admit(work_of(epoch=8), memoryview(b""))
    session.close()
    assert not session.admit(work_of(epoch=8), memoryview(b""))
    assert not session.queue


def test_a_request_keeps_computed_positions_only() -> None:
    session = session_at()
    session.position = 4
    assert session.begin(work_of(keep=4), memoryview(b"")).out_encoding == "int8"
    with pytest.raises(ProtocolError, match="the request keeps 5 positions, but the session has 4"):
        session.begin(work_of(keep=5), memoryview(b""))


def test_positions_that_were_dropped_are_not_kept() -> None:
    session = session_at()
    session.position = 9
    session.drop_positions()
    with pytest.raises(Preempted):
        session.begin(work_of(keep=1), memoryview(b""))
    session.begin(work_of(keep=0), memoryview(b""))
    session.end(work_of(keep=0))
    session.begin(work_of(keep=4), memoryview(b""))


def test_clients_and_encodings_share_no_blocks() -> None:
    work = work_of(keep=0, count=130, block_hashes=bytes(32))
    sessions = [session_at(client=client) for client in ("a", "b")] + [session_at(client="a", encoding="bf16")]
    each = [session.begin(work, memoryview(b"")).block_hashes for session in sessions]
    assert [len(hashes) for hashes in each] == [2, 2, 2]
    assert len(set(each)) == 3
    assert session_at(client="a").begin(work, memoryview(b"")).block_hashes == each[0]
    text = work_of(keep=0, count=130, block_hashes=bytes(32), prefill=False)
    assert session_at(client="a").begin(text, memoryview(b"")).block_hashes == (), "a prompt would be encoded otherwise"
    assert len(session_at(prefill_encoding="fp32").begin(text, memoryview(b"")).block_hashes) == 2


@pytest.mark.parametrize("size_bytes", [17, 48])
def test_block_hashes_are_those_of_full_blocks(size_bytes: int) -> None:
    with pytest.raises(ProtocolError, match="block hashes"):
        session_at(positions=200).payload_bytes_untrusted(work_of(count=130, block_hashes=bytes(size_bytes)))


@pytest.mark.parametrize("count", [1, 4])
def test_only_prompts_travel_in_their_own_encoding(count: int) -> None:
    first, second = session_at(0), session_at(1)
    for prefill, encoding in ((True, "int8"), (False, "fp32")):
        assert first.out_encoding(work_of(count=count, encoding="ids", prefill=prefill)) == encoding
        work = work_of(count=count, encoding=encoding, prefill=prefill)
        assert second.out_encoding(work) == encoding
        assert second.payload_bytes_untrusted(work) == activation_bytes(encoding, count, WIDTH)
        with pytest.raises(ProtocolError, match=r"hidden states in .*, expected"):
            second.payload_bytes_untrusted(work_of(count=count, encoding=encoding, prefill=not prefill))
    assert first.payload_bytes_untrusted(work_of(encoding="ids", spent_us=[])) == 16


# --------------------------------------------------------------------------------------------------------------- shelf

CONFIG = stand_in_config(layers=2)
SPEC = PartSpec(CONFIG, 0, 2, 2, "fp32")
ENGINE = stand_in_part(CONFIG, 0, 2)
WEIGHTS = ENGINE.weights_bytes


def part_of(name: str, idle_since: float = 0.0) -> Part:
    return Part(name, name, name, SPEC, ENGINE, idle_since)


def test_idle_parts_make_room_longest_idle_first() -> None:
    shelf = PartCache(3 * WEIGHTS + 100)
    for name, idle_since in (("a", 5.0), ("b", 3.0), ("c", 4.0)):
        shelf.parts[name] = part_of(name, idle_since)
    shelf.parts["c"].users.add("client")
    check_invariants(shelf)
    assert shelf.free_bytes == 2 * WEIGHTS + 100
    assert shelf.make_room(100, "x") == []
    assert [part.id for part in shelf.make_room(101, "x")] == ["b"]
    with pytest.raises(Refused, match="are free"):
        shelf.make_room(2 * WEIGHTS + 101, "x")
    assert list(shelf.parts) == ["a", "c"], "nothing goes for what cannot be had"
    with pytest.raises(Refused):
        shelf.make_room(2 * WEIGHTS + 100, "x", keep=shelf.parts["a"])
    shelf.reserve("load", WEIGHTS)
    assert shelf.free_bytes == WEIGHTS + 100
    with pytest.raises(Refused):
        shelf.make_room(WEIGHTS + 101, "x")
    shelf.release("load")
    assert [part.id for part in shelf.make_room(2 * WEIGHTS + 100, "x")] == ["a"]


def test_a_parts_memory_for_sessions_grows_and_stays_with_it() -> None:
    """Clients ask for memory beside each other. A block's 64 positions count together."""
    position_bytes = ENGINE.cache_position_bytes
    shelf = PartCache(WEIGHTS + 200 * position_bytes)
    part = shelf.parts["a"] = part_of("a")
    assert shelf.use(part, "one", 10) == []
    assert (part.pool_positions, shelf.free_bytes) == (64, 136 * position_bytes)
    shelf.use(part, "one", 64)
    shelf.use(part, "two", 1)
    assert part.pool_positions == 128
    with pytest.raises(Refused, match="193 positions of sessions need"):
        shelf.use(part, "two", 193 - 64)
    check_invariants(shelf)
    assert part.wanted == {"one": 64, "two": 1}
    shelf.grow(part, 192)
    shelf.leave(part, "one", 7.0)
    shelf.use(part, "three", 128)
    assert (part.pool_positions, shelf.free_bytes) == (192, 8 * position_bytes)
    shelf.leave(part, "two", 8.0)
    shelf.leave(part, "three", 9.0)
    assert (shelf.free_bytes, part.idle_since) == (WEIGHTS + 200 * position_bytes, 9.0)
    assert shelf.expired(9.0 + IDLE_S - 0.1) == []
    assert shelf.expired(9.0 + IDLE_S) == [part]
    assert shelf.expired(9.0 + IDLE_S) == []
