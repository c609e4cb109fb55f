"""Records of the cluster: what a viewer believes of a seed's maps, and what it makes of a ring's edges."""

from __future__ import annotations

import math
from typing import Any

import pytest

from wire.records import JobInfo

JOB = JobInfo("j", "job", "tiny", "sync", "running", 0.0, 10, members=["a", "b", "c"])


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
