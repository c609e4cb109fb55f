"""One member of the step transaction without a ring, for tests: the core, and what a real one has around it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ring import member_events as ev
from ring.job_member import JobMember, MemberPhase
from ring.token import Shares, balance_counts, first_lineage, next_lineage
from ring.transaction import Transaction
from ring.view import View
from tests.invariants import check_invariants
from wire.job_messages import LedgerRow, MemberRecord, Report

JOB = "job"
MICRO_BATCHES = 8
ORIGIN = first_lineage("spec")


def view(
    generation: int, peers: Sequence[str], *, step: int = 0, lineage: str = ORIGIN, healthy: set[str] | None = None
) -> View:
    parts = Shares(balance_counts(MICRO_BATCHES, [0] * len(peers)))
    members = tuple(
        MemberRecord(peer, peer, "", 1, first, count, healthy is None or peer in healthy)
        for peer, (first, count) in zip(peers, map(parts.of, range(len(peers))), strict=True)
    )
    return View(JOB, generation, step, lineage, members, square_sum=4.0)


def digest_of(generation: int, step: int) -> bytes:
    """What the ring reduces to: another sum in every view, as floating-point sums are."""
    return hashlib.blake2b(f"{generation}/{step}".encode(), digest_size=16).digest()


def handled(core: JobMember, event: object) -> list[object]:
    """The instructions that follow, of which one is in the row of the table for the phase that the event led to."""
    before = core.phase
    instructions = core.handle(event)
    _, leads_to = core.TABLE.get((before, type(event)), ("", {}))
    if core.phase is not before and core.phase is not MemberPhase.IDLE:
        assert any(isinstance(it, leads_to[core.phase]) for it in instructions), (before, event, instructions)
    check_invariants(core)
    return instructions


class Member:
    """One core with what a real one has around it: a state (the digests that were applied) and a redo buffer."""

    def __init__(
        self,
        peer: str,
        steps_total: int,
        *,
        checkpoint_every: int = 0,
        outlier_factor: float = 0.0,
    ) -> None:
        self.core = Transaction(
            job=JOB,
            peer_id=peer,
            steps_total=steps_total,
            checkpoint_every=checkpoint_every,
            outlier_factor=outlier_factor,
        )
        self.state: list[bytes] | None = []  # None: torn
        self.buffer = b""
        self.activity: object | None = None
        self.said: list[Report] = []
        self.boundaries: list[ev.Boundary] = []
        self.rows: list[tuple[LedgerRow, str]] = []

    def handle(self, event: object) -> None:
        for instruction in handled(self.core, event):
            match instruction:
                case ev.SendReport(report):
                    self.said.append(report)
                case ev.CloseRing():
                    self.activity = None
                case ev.Heal():
                    self.state = None
                    self.activity = instruction
                case ev.Compute():
                    self.buffer = b""
                    self.activity = instruction
                case ev.RecordStep(row, lineage):
                    self.rows.append((row, lineage))
                case _:
                    self.activity = instruction
                    if isinstance(instruction, ev.Boundary):
                        self.boundaries.append(instruction)

    def finish(self) -> None:
        """End the activity under way, for those that depend on nobody else."""
        activity, self.activity = self.activity, None
        assert activity is not None
        if isinstance(activity, ev.Apply):
            assert self.buffer, "nothing to apply"
            assert self.state is not None
            self.state.append(self.buffer)
        if isinstance(activity, ev.Reload):
            self.state = []
            self.handle(ev.StateLoaded(0, ORIGIN))
            return
        if isinstance(activity, ev.Confirm):
            members = self.core.view.size if self.core.view else 0
            self.handle(ev.DigestsGathered(activity.ticket, (self.digest(),) * members))
            return
        assert not isinstance(activity, ev.CloseRing | ev.SendReport | ev.RecordStep)
        self.handle(ev.ActivityFinished(activity.ticket))

    def digest(self) -> bytes:
        return hashlib.blake2b(b"".join(self.state or [])).digest()

    def lineage(self) -> str:
        lineage = ORIGIN
        for digest in self.state or []:
            lineage = next_lineage(lineage, digest)
        return lineage
