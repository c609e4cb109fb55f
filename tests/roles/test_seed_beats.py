"""How often neighbours beat."""

from __future__ import annotations

from typing import Any

import pytest

from ring.detector import FailureDetector, beat_defaults
from roles.seed.peers import ConnectedPeer, ring_beats
from wire.handshake import local_hello

NEAR, FAR = beat_defaults(0.1), beat_defaults(80.0)


def link(rtt_ms: float = 0.1) -> ConnectedPeer:
    heartbeat_s, death_s = beat_defaults(rtt_ms)
    detector = FailureDetector(heartbeat_s=heartbeat_s, death_s=death_s)
    hello = local_hello(peer_id="a", name="a", roles=["worker"], purpose="peer")
    connection: Any = None
    return ConnectedPeer(connection, hello, "h", 1, rtt_ms, 0.0, detector)


@pytest.mark.parametrize(
    ("links", "latencies_s", "expected"),
    [
        ([], [], (0.0, 0.0)),
        ([link(0.1), link(80.0)], [None, None], FAR),
        ([link(0.1), link(80.0)], [1e-4, None], FAR),
        ([link(0.1), link(80.0)], [1e-4, 1e-4], NEAR),
        ([link(0.1), link(0.1)], [0.04, 1e-4], NEAR),
    ],
    ids=["nobody", "unmeasured", "half measured", "slow only to join", "never more than before"],
)
def test_a_ring_beats_as_its_own_ways_allow(links, latencies_s, expected):
    assert ring_beats(links, latencies_s) == expected
