"""A coordinator, and what it said: the shell of its tests."""

from __future__ import annotations

from typing import Any

from ring import coordination as co
from ring.coordinator import Coordinator
from ring.view import View
from tests.invariants import check_invariants
from wire.job_messages import Report

TERMS = co.JobOptions(replicas=2, micro_batches=8)


class Desk:
    """Attributes: ``slow``: a newcomer that is asked to catch up follows when the test says so, else at once."""

    def __init__(self, options: co.JobOptions = TERMS, past: co.StoredJob | None = None, *, slow: bool = False) -> None:
        self.now = 0.0
        self.slow = slow
        self.core = Coordinator("job", options, past=past, now=0.0)
        self.said: list[co.Instruction] = []

    def tell(self, event: co.Event, after_s: float = 0.0) -> list[co.Instruction]:
        self.now += after_s
        self.said = said = self.core.handle(event, self.now)
        check_invariants(self.core)
        for item in [] if self.slow else said:
            if isinstance(item, co.SendCatchUp):
                said = [*said, *self.report(item.peer_id, "following", self.core.known_step)]
        self.said = said
        return said

    def after(self, seconds: float) -> list[co.Instruction]:
        """Let time pass, as the shell does: a tick at each deadline."""
        until, said = self.now + seconds, []
        while (at := self.core.next_deadline()) is not None and at < until:
            self.now = at
            said += self.tell(co.Signal.TICK)
        self.now = until
        self.said = said + self.tell(co.Signal.TICK)
        return self.said

    def offer(self, *workers: str | co.JobWorker) -> None:
        for worker in workers:
            self.tell(co.PeerOffered(peer(worker) if isinstance(worker, str) else worker))

    def lose(self, *peer_ids: str) -> None:
        for peer_id in peer_ids:
            self.tell(co.PeerLost(peer_id, "closed"))

    def report(
        self, peer_id: str, status: str, applied: int = 0, lineage: str = "", **more: Any
    ) -> list[co.Instruction]:
        beside = status in co.OUTSIDE
        generation = 0 if beside or self.core.view is None else self.core.view.generation
        values: dict[str, Any] = {
            "job": "job", "generation": generation, "status": status, "applied": applied, "prepared": applied,
            "lineage": lineage or f"L{applied}", "corpus": "C", **more,
        }  # fmt: skip
        return self.tell(co.PeerReported(peer_id, Report(**values)))

    def ready(self, *peer_ids: str, applied: int = 0) -> None:
        for peer_id in peer_ids:
            self.report(peer_id, "ready", applied)

    def start(self, *peer_ids: str, applied: int = 0) -> View:
        """A running view of these."""
        self.offer(*peer_ids)
        self.ready(*peer_ids, applied=applied)
        return self.minted()

    def run(self, *peer_ids: str, applied: int = 0) -> View:
        """The same, with its first step committed."""
        view = self.start(*peer_ids, applied=applied)
        self.tell(co.StepCommitted(view.step + 1))
        return view

    def stand(self, status: str, applied: int, *peer_ids: str, **more: Any) -> None:
        for peer_id in peer_ids:
            self.report(peer_id, status, applied, **more)

    def of(self, kind: type[Any]) -> list[Any]:
        return [item for item in self.said if isinstance(item, kind)]

    @property
    def view(self) -> View:
        assert self.core.view is not None
        return self.core.view

    def minted(self) -> View:
        (mint,) = self.of(co.Mint)
        view: View = mint.view
        return view

    def kinds(self) -> list[str]:
        return [item.kind for item in self.of(co.Emit)]


def peer(peer_id: str) -> co.JobWorker:
    return co.JobWorker(peer_id, f"name-{peer_id}", "10.0.0.1", 7000)


def ids(view: View) -> list[str]:
    return [member.peer_id for member in view.members]


def healthy(view: View) -> list[str]:
    return [member.peer_id for member in view.members if member.healthy]
