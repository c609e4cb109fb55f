"""What a seed tells of drafters."""

from __future__ import annotations

from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.ids import is_id
from roles.member import drafters_untrusted
from wire.address import is_loopback
from wire.text_messages import MAX_DRAFTERS, DrafterAt, DraftersHere

from .engine import Target
from .strategies import TEXT, made, mostly

_IDS = st.sampled_from([f"d{index}" for index in range(70)])
_DRAFTERS = made(
    DrafterAt,
    peer_id=mostly(_IDS, TEXT),
    host=mostly(st.sampled_from(["", "127.0.0.1", "::1", "10.0.0.2"]), TEXT),
    port=mostly(st.integers(1, 65535), st.integers()),
    vocab_size=mostly(st.integers(0, 2**17), st.integers()),
)


def _check_drafters(case: tuple[list[DrafterAt], str]) -> None:
    drafters, seed_host = case
    try:
        found = drafters_untrusted(DraftersHere(drafters), seed_host)
    except ProtocolError:
        return
    assert len({item.peer_id for item in found}) == len(drafters) <= MAX_DRAFTERS
    for item in found:
        assert is_id(item.peer_id)
        assert item.host
        assert 0 < item.port < 65536
        assert is_loopback(seed_host) or not is_loopback(item.host)


TARGETS = (
    Target(
        "drafters-here",
        st.tuples(st.lists(_DRAFTERS, max_size=MAX_DRAFTERS + 2), st.sampled_from(["127.0.0.1", "10.0.0.9", "seed"])),
        _check_drafters,
        ("roles.member.drafters_untrusted",),
        peak_bytes=256 << 10,
    ),
)
