"""What a verifier or a drafter says that it serves, and what a seed tells of drafters."""

from __future__ import annotations

import math
from unittest.mock import MagicMock

from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.ids import is_id
from roles.member import drafters_untrusted
from roles.seed.serving import MAX_STATS, serving_untrusted
from wire.speculation_messages import MAX_DRAFTERS, DrafterAt, DraftersHere, Serving
from wire.transport_base import is_loopback

from .engine import Target
from .strategies import ANY_TEXT, REAL, TEXT, made, mostly

_LINK = MagicMock()
_LINK.id, _LINK.name, _LINK.role, _LINK.host, _LINK.port = "a1", "attic", "drafter", "10.0.0.1", 7000
_NAMES = st.sampled_from(["alpha", "tokens_per_s", "ms_per_token"] + [f"x{index}" for index in range(70)])
_IDS = st.sampled_from([f"d{index}" for index in range(70)])
_SERVED = made(
    Serving,
    model=mostly(st.just("small"), ANY_TEXT),
    vocab_size=mostly(st.integers(0, 2**17), st.integers()),
    context=mostly(st.integers(0, 2**17), st.integers()),
    tokenizer=mostly(st.sampled_from(["", "ab" * 32]), TEXT),
    http=mostly(st.sampled_from(["", "127.0.0.1:8000"]), ANY_TEXT),
    sessions=mostly(st.integers(0, 9), st.integers()),
    stats=st.dictionaries(mostly(_NAMES, TEXT), mostly(st.floats(0, 1e6), REAL), max_size=MAX_STATS + 2),
    drafters=st.lists(mostly(_IDS, TEXT), max_size=MAX_DRAFTERS + 2),
    drafter_alpha=mostly(st.just([]), st.lists(REAL, max_size=3)),
    drafter_latency_ms=mostly(st.just([]), st.lists(REAL, max_size=3)),
    drafter_share=mostly(st.just([]), st.lists(REAL, max_size=3)),
)
_DRAFTERS = made(
    DrafterAt,
    peer_id=mostly(_IDS, TEXT),
    host=mostly(st.sampled_from(["", "127.0.0.1", "::1", "10.0.0.2"]), TEXT),
    port=mostly(st.integers(1, 65535), st.integers()),
    vocab_size=mostly(st.integers(0, 2**17), st.integers()),
)


def _check_serving(message: Serving) -> None:
    try:
        info = serving_untrusted(_LINK, message)
    except ProtocolError:
        return
    assert (info.id, info.name, info.role) == ("a1", "attic", "drafter")
    assert all(text.isprintable() for text in (info.model, info.http, info.tokenizer))
    assert len(info.model.encode()) <= 64
    assert len(info.http.encode()) <= 255
    assert len(info.stats) <= MAX_STATS
    assert all(math.isfinite(value) for value in info.stats.values())
    assert len(info.drafters) <= MAX_DRAFTERS
    assert type(info).from_map_untrusted(info.to_map()) == info


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
    Target("serving", _SERVED, _check_serving, ("roles.seed.serving.serving_untrusted",), peak_bytes=256 << 10),
    Target(
        "drafters-here",
        st.tuples(st.lists(_DRAFTERS, max_size=MAX_DRAFTERS + 2), st.sampled_from(["127.0.0.1", "10.0.0.9", "seed"])),
        _check_drafters,
        ("roles.member.drafters_untrusted",),
        peak_bytes=256 << 10,
    ),
)
