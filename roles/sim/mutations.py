"""Safeguards switched off, inside the simulation only: a simulator that does not notice would prove nothing.

Each is a patch of the product for the time of a run, and names the faults that bring it to light soonest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ring import crews, transaction
from ring.coordinator import Coordinator
from ring.links import Inbound
from ring.transaction import Transaction
from ring.view import View
from roles.seed import backup
from roles.seed.jobs import Desk
from roles.seed.store import Records
from roles.sim.disk import ProcessDisk
from roles.sim.watching import replaced
from roles.strategies import pipeline
from roles.worker.heal_source import HealSource
from roles.worker.reports import Ledger
from roles.worker.runner import JobRunner
from wire.frame import FrameDecoder

Patch = tuple[Any, str, Callable[[Any], Any]]


def _no_fence() -> list[Patch]:
    """A generation's number is forgotten with the seed's memory, and nobody tells an old one from the present one."""

    def is_current(original: Any) -> Any:
        def call(self: Coordinator, peer_id: str, generation: int) -> bool:
            return self.view is not None and self.view.rank_of(peer_id) is not None

        return call

    def add_view(original: Any) -> Any:
        def call(self: Records, view: View, *rest: Any, **more: Any) -> None:
            original(self, view, *rest, **more)
            self._db.execute("DELETE FROM views WHERE job = ? AND generation = ?", (view.job, view.generation))

        return call

    return [
        (Records, "add_view", add_view),
        (Coordinator, "_is_current", is_current),
        (Inbound, "_judge", lambda original: lambda self, job, generation, peer_id, topology: None),
        (FrameDecoder, "_is_stale", lambda original: lambda self, generation: False),
    ]


def _no_digest() -> list[Patch]:
    """Members commit whatever the others' tokens say of the reduced bytes."""

    def verdict(original: Any) -> Any:
        def call(*args: Any) -> Any:
            fault = original(*args)
            return None if fault is not None and fault.cause == "digest" else fault

        return call

    return [(transaction, "verdict", verdict)]


def _no_redo() -> list[Patch]:
    """The redo buffer is not kept until the outcome is known."""

    def disband(original: Any) -> Any:
        def call(self: JobRunner, reason: str) -> None:
            original(self, reason)
            if self._engine is not None:
                self._engine.reduce_buffer[:] = 0

        return call

    return [(JobRunner, "_disband", disband)]


def _no_dir_sync() -> list[Patch]:
    """Directories are not flushed after their entries changed."""
    return [(ProcessDisk, "sync_dir", lambda original: lambda self, path: None)]


def _no_ledger() -> list[Patch]:
    """What was told while the seed was away is not told again."""
    return [(Ledger, "tell_beyond", lambda original: lambda self, step: None)]


def _no_confirm() -> list[Patch]:
    """A checkpoint is written as soon as this member has applied its step."""

    def confirm(original: Any) -> Any:
        return lambda self: self._to_boundary(confirmed=True)

    return [(Transaction, "_confirm", confirm)]


def _same_term() -> list[Patch]:
    """A restored seed goes on in the term of its copy."""
    return [(backup, "next_term", lambda original: lambda term: term)]


def _copy_is_newest() -> list[Patch]:
    """A restored seed goes on from the newest view in its copy, whatever the members are in."""
    return [(Desk, "_newest_told", lambda original: lambda self: None)]


MUTATIONS: dict[str, tuple[Callable[[], list[Patch]], tuple[str, ...]]] = {
    "fence": (_no_fence, ("seed-kill", "seed-restart", "cut", "join")),
    "digest": (_no_digest, ("bit-flip",)),
    "redo": (_no_redo, ("kill-in-vote", "join")),
    "dir-sync": (_no_dir_sync, ("power-cut", "save")),
    "ledger": (_no_ledger, ("seed-kill", "seed-freeze", "silence", "cut", "one-way", "seed-away")),
    "term": (_same_term, ("seed-lost", "join", "kill")),
    "adopt": (_copy_is_newest, ("seed-lost", "join")),
    "confirm": (_no_confirm, ("kill-in-phase", "kill-two", "join", "save", "cut", "freeze")),
}
"""Name → what is patched, and kinds of faults that are apt to show that it is missing."""


def _any_stage() -> list[Patch]:
    """A member that heals takes the state of any other, whichever part of the model that holds."""
    return [
        (View, "same_stage", lambda original: lambda self, rank: self.members),
        (HealSource, "_has_part", lambda original: lambda self, request: True),
    ]


def _too_far_back() -> list[Patch]:
    """Where a part of the newest state is gone, the run begins anew."""
    return [(crews, "newest_kept", lambda original: lambda by_stage, wholes=(): 0)]


def _nobody_gives() -> list[Patch]:
    """Nobody is told who has the whole model's checkpoint that the run goes back to."""
    return [(crews.Crews, "_holders", lambda original: lambda self, worker, step: ())]


def _own_digest() -> list[Patch]:
    """The lineage is made of the first stage's sums alone."""
    return [(pipeline, "joined_digest", lambda original: lambda digests: digests[:16])]


def _all_alike() -> list[Patch]:
    """At a checkpoint every member's state is compared with everybody's."""
    return [(transaction, "odd_ones_out", lambda original: lambda digests, stages=1: original(digests))]


STAGED: dict[str, tuple[Callable[[], list[Patch]], tuple[str, ...]]] = {
    "stage": (_any_stage, ("kill", "join", "power-cut", "cut-in-follow")),
    "back": (_too_far_back, ("power-cut", "kill-most", "kill", "save", "join")),
    "files": (_nobody_gives, ("lose-disk", "save", "join")),
    "joined": (_own_digest, ("bit-flip",)),
    "alike": (_all_alike, ("save", "join")),
}
"""The same, of jobs whose model is split."""


@contextmanager
def without(name: str) -> Iterator[None]:
    """Switch a safeguard off within the block; an empty name: none."""
    with ExitStack() as stack:
        for owner, attribute, make in (MUTATIONS | STAGED)[name][0]() if name else []:
            stack.enter_context(replaced(owner, attribute, make))
        yield
