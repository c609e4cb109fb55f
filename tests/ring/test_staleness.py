"""The parameter server's decisions: any order of pulls, contributions and versions keeps its rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError
from ring.ledger import Audit, rows_untrusted
from ring.staleness import (
    LEAST_BOUND,
    MOST_BOUND,
    USUAL_BOUND,
    Accepted,
    Intake,
    next_number,
    packed,
    problem_of,
    unpacked_untrusted,
    weight_of,
)
from ring.token import next_lineage
from tests.invariants import check_invariants
from wire.job_messages import LedgerRow, LedgerRows
from wire.records import LedgerRun, ViewBegan, runs_of

LINEAGE = "00" * 16


@given(
    st.integers(1, 3),
    st.sampled_from([0, 2, 7]),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=80),
)
def test_every_version_keeps_the_rules_whoever_is_when(buffer: int, bound: int, moves: list[tuple[int, int]]) -> None:
    """A rank that moves pulls, or contributes to what it pulled; a 0 beside it lets the server make a version."""
    intake, now = Intake(version=5, number=40, buffer=buffer, bound=bound), 0.0
    waiting, pulled, used, versions = set[int](), dict[int, int](), list[int](), 0
    for rank, wait in moves:
        now += wait
        if rank in waiting:
            continue
        if rank in pulled:
            intake.arrived(rank, now)
            waiting.add(rank)
        else:
            pulled[rank] = intake.assign(rank, intake.version, now)
        if wait:
            continue
        chosen, refused = intake.choose()
        assert not {one.rank for one in chosen} & set(refused)
        assert problem_of(chosen, intake.version + 1, buffer=buffer, bound=bound) == "" or not chosen
        assert not chosen or len({one.rank for one in chosen}) == buffer
        assert all(0 <= one.number == pulled[one.rank] for one in chosen)
        for gone in (*refused, *(one.rank for one in chosen)):
            waiting.discard(gone)
            del pulled[gone]
        if chosen:
            intake.made(chosen)
            versions += 1
            used += [one.number for one in chosen]
        check_invariants(intake)
    assert len(set(used)) == len(used), "a contribution is part of two versions"
    assert intake.version == 5 + versions
    assert next_number([packed([Accepted(0, number, 0, 0, 1.0)]) for number in used], 5, buffer) > max(used, default=-1)


def test_a_worker_that_takes_ten_times_as_long_may_lag_by_a_tenth() -> None:
    intake = Intake(version=0, number=0)
    for rank, took_s in ((1, 1.0), (2, 1.0), (3, 10.0), (4, 1e-3), (5, 1000.0)):
        intake.assign(rank, 0, 0.0)
        assert intake.bound(rank) == USUAL_BOUND, "not known yet"
        intake.arrived(rank, took_s)
    assert [intake.bound(rank) for rank in (1, 2, 3, 4, 5)] == [50, 50, LEAST_BOUND, MOST_BOUND, LEAST_BOUND]


def test_what_is_past_its_bound_is_refused_and_its_number_assigned_again() -> None:
    intake = Intake(version=0, number=0, bound=1)
    numbers = [intake.assign(rank, 0, 0.0) for rank in (1, 2, 3)]
    for rank in (1, 2, 3):
        intake.arrived(rank, 1.0)
    made = []
    for _ in range(2):
        chosen, refused = intake.choose()
        assert not refused
        intake.made(chosen)
        made += [(one.number, one.weight) for one in chosen]
    assert made == [(0, 1.0), (1, weight_of(1))]
    assert intake.choose() == ([], [3])
    assert intake.assign(1, 2, 1.0) == numbers[2] == 2
    with pytest.raises(ProtocolError, match="not asked for"):
        intake.arrived(3, 1.0)


GOOD: dict[str, Any] = {"rank": 1, "number": 3, "base": 6, "bound": 50, "weight": weight_of(2)}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, ""),
        ({"base": 5}, "a weight of"),
        ({"base": 9}, "a staleness of -1"),
        ({"bound": 4}, "the bound 4"),
        ({"base": 0, "weight": weight_of(8), "bound": 7}, "a staleness of 8"),
        ({"weight": 1.0}, "a weight of 1"),
        ({"number": 2}, "part of an earlier version"),
        ({"base": 1, "weight": weight_of(7)}, "before generation 1 began"),
        ({"rank": 0}, "is of the server"),
    ],
)
def test_the_audit_finds_what_a_version_cannot_be_made_of(wrong: dict[str, Any], said: str) -> None:
    view = ViewBegan(1, 7, LINEAGE, ["server", "worker"])
    earlier = [Accepted(1, 2, 7, 50, 1.0)]
    rows = [LedgerRow(8, 1, bytes(16), bytes(3) + b"\0" + bytes(3) + b"\4", packed(earlier))]
    made = [Accepted(**GOOD | {"base": 7, "weight": weight_of(1)} | wrong)]
    counts = rows[0].counts if made[0].rank else rows[0].counts[4:] + bytes(4)
    rows.append(LedgerRow(9, 1, bytes(16), counts, packed(made)))
    audit = Audit(base_step=7, base_lineage=LINEAGE, micro_batches=4, views=[view], server=(1, 0))
    faults = [audit.begin_views(), *map(audit.take, rows)]
    assert faults[:2] == [None, None]
    assert (faults[2] is None) is (not said)
    assert faults[2] is None or said in faults[2].text


def test_the_audit_takes_versions_of_a_time_before_the_known_views() -> None:
    row = LedgerRow(8, 1, bytes(16), bytes(8) + b"\0\0\0\4", packed([Accepted(2, 0, 7, 50, 1.0)]))
    view = ViewBegan(1, 9, LINEAGE, ["server", "worker"])
    audit = Audit(base_step=7, base_lineage=LINEAGE, micro_batches=4, views=[view], server=(1, 0))
    assert (audit.take(row), audit.step) == (None, 8)
    longer = replace(row, made_of=row.made_of + b"?")
    with pytest.raises(ProtocolError, match="is made of"):
        rows_untrusted(LedgerRows("job", LINEAGE, [longer]), micro_batches=4, steps_total=10)


@given(st.lists(st.sampled_from([(0, 2), (2, 0), (1, 1)]), min_size=1, max_size=12))
def test_rows_travel_with_what_they_are_made_of(shares: list[tuple[int, int]]) -> None:
    rows, lineage = list[LedgerRow](), LINEAGE
    for step, counts in enumerate(shares, 1):
        made = [Accepted(rank, 2 * step + rank, step - 1, 50, 1.0) for rank, count in enumerate(counts) if count]
        packed_counts = b"".join(count.to_bytes(4, "big") for count in counts)
        rows.append(LedgerRow(step, 1, bytes([step]) * 16, packed_counts, packed(made)))
        lineage = next_lineage(lineage, rows[-1].digest)
    runs = [LedgerRun.from_map_untrusted(run.to_map()) for run in runs_of(rows)]
    assert [row for run in runs for row in run.rows()] == rows
    assert [len(unpacked_untrusted(row.made_of, counts)) for row, counts in zip(rows, shares, strict=True)] == [
        sum(map(bool, counts)) for counts in shares
    ]
