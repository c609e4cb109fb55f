"""The ledger in a seed's store, and the audit of whole runs over it: with churn, restarts, and rows tampered with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.loader import load
from configs.schema import Profile
from p2ptrain.lab.audit import AuditResult, audit
from ring.coordination import JobWorker
from ring.replicas import with_shares
from ring.token import Shares, balance_counts, next_lineage
from ring.view import View
from roles.seed import ledger as module
from roles.seed.ledger import JobLedger
from roles.seed.store import JobRecord, Records
from tests.roles.in_process import Cluster
from wire.job_messages import LedgerRow, LedgerRows
from wire.records import LedgerHead

JOB = JobRecord("j1", "first", "tiny", "sync", workers=2, micro_batches=8, steps_total=10**6, created_at=1.0)
START = "00" * 16


def view(generation: int, step: int, lineage: str = START, members: str = "ab") -> View:
    peers = [JobWorker(peer_id, peer_id, "h", 1) for peer_id in members]
    return View("j1", generation, step, lineage, with_shares(peers, balance_counts(8, [0] * len(peers)), members))


def row(step: int, generation: int = 1, members: int = 2) -> LedgerRow:
    return LedgerRow(step, generation, step.to_bytes(16, "big"), Shares([8 // members] * members).packed())


def lineages(steps: int) -> list[str]:
    found = [START]
    for step in range(1, steps + 1):
        found.append(next_lineage(found[-1], row(step).digest))
    return found


def told(kept: Records, ledger: JobLedger, first: int, last: int, lineage: str, **shape: Any) -> None:
    newest = shape.pop("view", view(1, 0))
    rows = [row(step, **shape) for step in range(first, last + 1)]
    message = LedgerRows("j1", lineage, rows)
    entries, problem = ledger.take_untrusted(message, newest, micro_batches=8, steps_total=10**6)
    assert not problem
    kept.add_rows(list(entries))


def known(kept: Records) -> JobLedger:
    """As a seed that starts has it."""
    return JobLedger("j1", kept.ledger_head("j1"), kept.begins("j1"))


@pytest.fixture
def kept(tmp_path: Path) -> Records:
    records_ = Records(tmp_path / "seed.sqlite3")
    records_.add_job(JOB, "{}")
    records_.add_view(view(1, 0), JOB)
    return records_


def test_rows_come_back_after_a_restart_and_go_with_the_job(kept: Records, tmp_path: Path) -> None:
    past = lineages(20)
    told(kept, JobLedger("j1", kept.ledger_head("j1")), 1, 20, START)
    kept.close()
    again = Records(tmp_path / "seed.sqlite3")
    head = again.ledger_head("j1")
    assert head is not None
    assert (head.base_step, head.step, head.lineage) == (0, 20, past[20])
    assert again.ledger_rows("j1", 17, 2) == [row(18), row(19)]
    again.forget_job("j1")
    assert (again.ledger_head("j1"), again.ledger_rows("j1", 0, 9)) == (None, [])


def test_a_view_takes_back_later_steps(kept: Records) -> None:
    past, ledger = lineages(20), JobLedger("j1", kept.ledger_head("j1"))
    told(kept, ledger, 1, 20, START)
    back = view(2, 12, past[12])
    ledger.view_began(back)
    assert not kept.add_view(back, JOB)
    assert [item.step for item in kept.ledger_rows("j1", 10, 99)] == [11, 12]
    assert kept.ledger_head("j1") == ledger.head
    assert ledger.step == 12


@pytest.mark.parametrize("step", [0, 7, 12, 15, 20])
def test_with_a_view_of_another_past_the_ledger_begins_anew(kept: Records, step: int) -> None:
    past, ledger = lineages(20), JobLedger("j1", kept.ledger_head("j1"))
    told(kept, ledger, 1, 12, START)
    second = view(2, 12, past[12])
    assert not kept.add_view(second, JOB)
    ledger.view_began(second)
    told(kept, ledger, 13, 20, past[12], generation=2, view=second)
    other = view(3, step, "11" * 16)
    ledger.view_began(other)
    assert kept.add_view(other, JOB)
    ledger.restart(other)
    assert kept.ledger_head("j1") == ledger.head == LedgerHead(step, other.lineage, step, other.lineage)
    assert kept.ledger_rows("j1", 0, 99) == []
    told(kept, ledger, step + 1, step + 2, other.lineage, generation=3, view=other)
    assert kept.ledger_rows("j1", 0, 99) == [row(step + 1, 3), row(step + 2, 3)]


def test_what_was_told_beyond_a_gap_is_there_when_the_gap_is_filled(kept: Records) -> None:
    past, ledger = lineages(20), JobLedger("j1", kept.ledger_head("j1"))
    told(kept, ledger, 4, 6, past[3])
    told(kept, ledger, 9, 10, past[8])
    assert ledger.step == 0
    told(kept, ledger, 1, 3, START)
    assert ledger.step == 6
    told(kept, ledger, 6, 8, past[5])
    assert kept.ledger_rows("j1", 0, 99) == [row(step) for step in range(1, 11)]
    assert kept.ledger_head("j1") == ledger.head


def test_a_gap_that_nobody_can_fill_is_given_up(kept: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AHEAD", 6)
    past, ledger = lineages(40), JobLedger("j1", kept.ledger_head("j1"))
    told(kept, ledger, 1, 2, START)
    told(kept, ledger, 10, 12, past[9])
    assert ledger.step == 2
    message = LedgerRows("j1", past[12], [row(step) for step in range(13, 18)])
    entries, problem = ledger.take_untrusted(message, view(1, 0), micro_batches=8, steps_total=10**6)
    assert problem == "steps 3 to 9 are not on record: no member remembers them; the record restarts with step 10"
    kept.add_rows(list(entries))
    assert kept.ledger_head("j1") == ledger.head == LedgerHead(9, past[9], 17, past[17])
    assert kept.ledger_rows("j1", 0, 99) == [row(step) for step in range(10, 18)]
    told(kept, ledger, 18, 20, past[17])
    assert kept.ledger_head("j1") == ledger.head


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ([range(6, 6), range(5, 6)], "steps 3 to 4 are"),  # the second member has the row of step 5
        ([range(6, 6), range(1, 3)], "steps 3 to 5 are"),
        ([range(6, 6), range(3, 6)], ""),  # it has them all, and they are on their way
        ([range(6, 6), range(1, 4)], ""),
        ([], ""),  # not all members have reported
    ],
)
def test_a_gap_that_no_member_can_fill_is_given_up_at_the_next_row(kept: Records, held: list[range], text: str) -> None:
    past, ledger = lineages(9), JobLedger("j1", kept.ledger_head("j1"))
    told(kept, ledger, 1, 2, START)
    third = view(2, 5, past[5])
    kept.add_view(third, JOB)
    ledger.view_began(third)
    found = []
    for step in (6, 5, 7) if range(5, 6) in held else (6, 7):
        message = LedgerRows("j1", past[step - 1], [row(step, 1 if step < 6 else 2)])
        entries, problem = ledger.take_untrusted(message, third, micro_batches=8, steps_total=99, held=held)
        kept.add_rows(list(entries))
        found += [problem] if problem else []
    assert [problem.split(" not")[0] for problem in found] == ([text] if text else [])
    assert kept.ledger_head("j1") == ledger.head
    assert ledger.step == (7 if text else 2)


@pytest.mark.parametrize("restarted", [False, True])
def test_rows_of_a_course_that_was_taken_back_fill_no_gap(kept: Records, restarted: bool) -> None:
    """A ring that lost the seed went on from step 4; another one, begun there since, is the job's."""
    past, ledger = lineages(20), known(kept)
    told(kept, ledger, 1, 4, START)
    second = view(2, 4, past[4])
    kept.add_view(second, JOB)
    ledger.view_began(second)
    own = [LedgerRow(step, 2, bytes([step]) * 16, Shares([4, 4]).packed()) for step in (5, 6)]
    third = view(3, 6, next_lineage(next_lineage(past[4], own[0].digest), own[1].digest))
    kept.add_view(third, JOB)
    ledger.view_began(third)
    if restarted:
        ledger = known(kept)
    told(kept, ledger, 1, 20, START, view=third)  # by the first ring, which is back
    told(kept, ledger, 6, 20, past[5], view=third)
    assert ledger.step == 4
    entries, problem = ledger.take_untrusted(
        LedgerRows("j1", next_lineage(past[4], own[0].digest), own[1:]), third, micro_batches=8, steps_total=10**6
    )
    assert (entries, problem) == ([], "")
    told(kept, ledger, 5, 9, past[4], view=third)
    entries, problem = ledger.take_untrusted(
        LedgerRows("j1", past[4], own[:1]), third, micro_batches=8, steps_total=10**6
    )
    assert ([entry.row for entry in entries], problem) == (own, "")
    assert ledger.head is not None
    assert ledger.head.lineage == third.lineage


def test_the_oldest_rows_are_folded_into_a_base(kept: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_KEPT", 64)
    past, ledger = lineages(200), JobLedger("j1", kept.ledger_head("j1"))
    for step in range(1, 201):
        told(kept, ledger, step, step, past[step - 1])
    head = kept.ledger_head("j1")
    assert head is not None
    assert head.step == 200
    assert 64 <= head.step - head.base_step <= 68
    assert head.base_lineage == past[head.base_step]
    assert [item.step for item in kept.ledger_rows("j1", 0, 999)] == list(range(head.base_step + 1, 201))


# ----------------------------------------------------------------------------------------------------------- whole runs


def profile(steps: int, *sets: str) -> Profile:
    every = ["checkpoint.every=20", "validation.every=0", "job.workers=3", f"job.steps={steps}", *sets]
    return load("tiny", {}, every).profile


async def audited(cluster: Cluster, job: str, made: Profile) -> AuditResult:
    async with cluster.operator() as client:
        return await audit(client, job, made, lambda step, of: None)


async def test_a_run_with_a_death_a_restart_and_a_newcomer_stands_in_its_ledger(cluster: Cluster) -> None:
    made = profile(250)
    for _ in range(3):
        cluster.join()
    job = await cluster.create(made)
    await cluster.job_until(job, lambda item: item["step"] >= 15)
    await cluster.peers[1].die()
    await cluster.job_until(job, lambda item: item["step"] >= 25)
    await cluster.restart_seed()
    cluster.join()
    await cluster.job_until(job, lambda item: item["state"] == "done")
    verdict = await audited(cluster, job, made)
    assert verdict.fault is None
    assert (verdict.first_step, verdict.steps, verdict.samples) == (1, 250, 250 * 8 * made.batch.micro_batch_sequences)
    assert sum(verdict.computed.values()) == 250 * 8
    listed = (await cluster.ask("recoveries.list", job=job))["recoveries"]
    assert listed
    assert all(item["total_s"] < 20 and item["form_s"] is not None for item in listed)
    assert cluster.peers[1].identity.name in listed[0]["text"], "people know names, not addresses"
