"""Safeguards that the simulator can do without, one at a time. It would prove nothing if it did not notice a mutation.

``python -m tests.sim.mutations dir-sync`` finds the first schedule that shows the lack of this safeguard. A mutation
acts at the events and points of a probe, such as on a message that a worker sends. Only a rule of a pure core, which
has no probe, is replaced where it is defined.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any
from unittest.mock import patch

from p2ptrain.core.errors import ProtocolError
from p2ptrain.lab.sim.machine import ProcessDisk
from p2ptrain.lab.sim.observer import ObservedMachine
from p2ptrain.lab.sim.probe import Act
from p2ptrain.lab.sim.run import PRIVATE, SimulationResult, run_schedule
from ring import member_events as ev
from ring import replicas, transaction
from ring.coordinator import Coordinator
from ring.links import Inbound
from ring.neighbours import AT_WORK
from ring.quarantine import Quarantine
from ring.session import RingSession
from ring.staleness import Accepted, Intake
from ring.token import Token, odd_ones_out
from ring.transaction import Transaction
from ring.view import View
from roles.seed import jobs
from roles.seed import run as seed_run
from roles.seed.job_history import ViewCensus
from roles.seed.store import Records
from roles.strategies import parts, server
from roles.worker.privacy import COUNT_FILE, Budget
from roles.worker.reports import LEDGER_FILE
from wire.frame import FrameDecoder
from wire.job_messages import LedgerRows, Report
from wire.messages import Message


@dataclass(frozen=True)
class Mutation:
    """A safeguard switched off.

    Attributes:
        kinds: of faults that are likely to reveal the missing safeguard.
        acts: name of an event or a point of the probe → what is done there.
        rules: owner, name and replacement of rules.
    """

    kinds: tuple[str, ...] = ()
    acts: dict[str, Act] = field(default_factory=dict)
    rules: tuple[tuple[Any, str, Any], ...] = ()

    def run(self, number: int, **options: Any) -> SimulationResult:
        """As ``run_schedule``, without the safeguard."""
        with self.rules_replaced():
            return run_schedule(number, kinds=self.kinds, acts=self.acts, **options)

    @contextmanager
    def rules_replaced(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, replacement in self.rules:
                stack.enter_context(patch.object(owner, name, replacement))
            yield


# --------------------------------------------------------------------------------------------------------------- acts


def _on_tokens(change: Callable[[list[Token], Token, int], list[Token]]) -> Act:
    """``change`` takes the tokens of a vote, this member's own, and the number of the model's parts."""

    def act(machine: ObservedMachine, event: object) -> object:
        view, core = machine.core.view if machine.core else None, machine.core
        if not isinstance(event, ev.TokensGathered) or core is None or view is None:
            return event
        try:
            tokens = [Token.decode_untrusted(token) for token in event.tokens]
        except ProtocolError:
            return event
        own = tokens[view.rank_of(core.peer_id) or 0]
        return replace(event, tokens=tuple(token.encode() for token in change(tokens, own, view.stages)))

    return act


def _believe_own(tokens: list[Token], own: Token, stages: int) -> list[Token]:
    return [replace(token, digest=own.digest, part=own.part) for token in tokens]


def _believe_largest(tokens: list[Token], own: Token, stages: int) -> list[Token]:
    largest = max(token.part for token in tokens)
    return [replace(token, part=largest, own=abs(token.own)) for token in tokens]


def _believe_least(tokens: list[Token], own: Token, stages: int) -> list[Token]:
    least = [min(token.part for token in tokens[stage::stages]) for stage in range(stages)]
    return [replace(token, part=least[rank % stages]) for rank, token in enumerate(tokens)]


def _obey_any_flag(tokens: list[Token], own: Token, stages: int) -> list[Token]:
    flags = reduce(or_, (token.flags for token in tokens))
    return [replace(token, flags=flags, part=own.part, own=abs(token.own)) for token in tokens]


def _forget_view(machine: ObservedMachine, facts: dict[str, Any]) -> None:
    if facts["method"] is Records.add_view:
        view = facts["arguments"][0]
        for database in machine.disk.databases.values():
            database.execute("DELETE FROM views WHERE job = ? AND generation = ?", (view.job, view.generation))


def _clear_redo_buffer(machine: ObservedMachine, facts: dict[str, Any]) -> None:
    closes = any(isinstance(instruction, ev.CloseRing) for instruction in facts["instructions"])
    if machine.engine is not None and closes:
        machine.engine.reduce_buffer[:] = 0


def _send_only_new_rows(machine: ObservedMachine, message: Message) -> Message | None:
    newest = machine.core.applied if machine.core is not None else 0
    is_old = isinstance(message, LedgerRows) and [row.step for row in message.rows] != [newest]
    return None if is_old else message


def _conceal_hang(machine: ObservedMachine, message: Message) -> Message | None:
    return None if isinstance(message, Report) and message.status == "hung" else message


# -------------------------------------------------------------------------------------------------------------- rules

_read, _rename, _accept = ProcessDisk.read, ProcessDisk.rename, Intake._accepted


def _read_no_rows(self: ProcessDisk, path: Path, *, max_bytes: int) -> bytes:
    return b"" if path.name == LEDGER_FILE else _read(self, path, max_bytes=max_bytes)


def _write_no_count(self: ProcessDisk, source: Path, target: Path) -> None:
    if target.name != COUNT_FILE:
        _rename(self, source, target)


def _is_in_view(self: Coordinator, peer_id: str, generation: int) -> bool:
    return self.view is not None and self.view.rank_of(peer_id) is not None


def _accept_any_staleness(self: Intake) -> Any:
    first = self._waiting[: self._buffer] if len(self._waiting) >= self._buffer else []
    return [self._accepted(rank) for rank in first], []


def _weigh_fully(self: Intake, rank: int) -> Accepted:
    return replace(_accept(self, rank), weight=1.0)


async def _count_alone(self: Budget, session: RingSession, *, patience_s: float) -> None:
    """In place of ``Budget.agree``."""


ALWAYS = {
    # The seed forgets a generation's number on restart, and no member rejects an old generation.
    "fence": Mutation(
        ("seed-kill", "seed-restart", "cut", "join"),
        {"stored": _forget_view},
        (
            (Coordinator, "_is_current", _is_in_view),
            (Inbound, "_judge", lambda self, job, generation, peer_id, topology: None),
            (FrameDecoder, "_is_stale", lambda self, generation: False),
        ),
    ),
    # Members commit without comparing the digests and the norms of the reduced bytes.
    "digest": Mutation(("bit-flip",), {"member-event": _on_tokens(_believe_own)}),
    # Members believe the norm that one of them tells.
    "norm": Mutation(("false-token",), {"member-event": _on_tokens(_believe_largest)}),
    # One member's word ends the job, for the others and for the seed.
    "stop": Mutation(
        ("false-token",),
        {"member-event": _on_tokens(_obey_any_flag)},
        ((jobs, "least_steps", lambda profile: 0),),
    ),
    # The redo buffer is not kept until the outcome is known.
    "redo": Mutation(("kill-in-vote",), {"member-handled": _clear_redo_buffer}),
    # Directories are not flushed after their entries changed.
    "dir-sync": Mutation(("power-cut", "save"), rules=((ProcessDisk, "sync_dir", lambda self, path: None),)),
    # Reports lost while the seed was away are not repeated.
    "ledger": Mutation(
        ("seed-kill", "seed-freeze", "silence", "cut", "one-way", "seed-away"),
        {"message-to-seed": _send_only_new_rows},
    ),
    # Checkpoints lack the rows that the seed may not have.
    "rows": Mutation(("kill-all", "join"), rules=((ProcessDisk, "read", _read_no_rows),)),
    # A restored seed continues in the term of its copy.
    "term": Mutation(("seed-lost", "join", "kill"), rules=((seed_run, "next_term", lambda term: term),)),
    # A restored seed continues from the newest view in its copy, whatever view the members are in.
    "adopt": Mutation(("seed-lost", "join"), rules=((ViewCensus, "newest_view", lambda self, known: None),)),
    # A checkpoint is written as soon as this member has applied its step.
    "confirm": Mutation(
        ("kill-in-phase", "kill-two", "join", "save", "cut", "freeze"),
        rules=((Transaction, "_confirm", lambda self: self._begin_boundary(save=True)),),
    ),
    # A job is done although no disk has its result.
    "result": Mutation(
        ("disk-full",), rules=((replicas.RecoveryPolicy, "has_saved", lambda *arguments, in_parts: True),)
    ),
    # After a break the ring runs the same way, and heartbeats do not say how far a member is.
    "turned": Mutation(
        ("withhold",),
        rules=((Quarantine, "reverses_ring", False), (RingSession, "status", lambda self: (0, AT_WORK))),
    ),
    # Bytes are not checked before they are passed on.
    "check": Mutation(("garble", "join"), {"vote": lambda machine, vote: (vote[0], None)}),
    # A member whose computing hangs does not say so.
    "hang": Mutation(("hang", "join"), {"message-to-seed": _conceal_hang}),
}

"""For jobs of every kind."""

STAGED = {
    # A member that heals accepts the state of any other member, whichever stage that one holds.
    "stage": Mutation(
        ("kill", "join", "power-cut", "cut-in-follow"),
        {"heal-request": lambda machine, request: replace(request, stage=machine.stage)},
        ((View, "same_stage", lambda self, rank: self.members),),
    ),
    # If a part of the newest state is lost, the run starts from the beginning.
    "back": Mutation(
        ("lose-disk", "save", "join"), rules=((replicas.RecoveryPolicy, "_kept", lambda self, *peers: 0),)
    ),
    # Workers are not told which worker has the whole model's checkpoint that the run goes back to.
    "files": Mutation(
        ("lose-disk", "save", "join"),
        rules=((replicas.RecoveryPolicy, "holders", lambda self, step, part, peer_ids: []),),
    ),
    # The lineage covers only the first stage's sums, and members believe their norms.
    "joined": Mutation(
        ("bit-flip",),
        {"member-event": _on_tokens(_believe_least)},
        ((parts, "joined_digest", lambda digests: digests[:16]),),
    ),
    # At a checkpoint each member's state is compared with all others, across stages.
    "alike": Mutation(
        ("save", "join"), rules=((transaction, "odd_ones_out", lambda digests, stages=1: odd_ones_out(digests)),)
    ),
}
"""For jobs whose model is split."""

ASYNCHRONOUS = {
    # The server accepts contributions of any staleness.
    "bound": Mutation(("join", "slow"), rules=((Intake, "choose", _accept_any_staleness),)),
    # Stale contributions weigh as much as others.
    "weight": Mutation(("join",), rules=((Intake, "_accepted", _weigh_fully),)),
    # The server of a new view assigns numbers from 0 again.
    "numbers": Mutation(("kill", "join"), rules=((server, "next_number", lambda *arguments: 0),)),
    # A view that lacks versions that nobody pulled counts as if none were lost.
    "lost": Mutation(
        ("kill-two", "save"),
        rules=((replicas.RecoveryPolicy, "abandoned", lambda self, *arguments: ("", "")),),
    ),
}
"""For strategy 'server'."""

OF_PRIVATE = {
    # Members do not agree on what the job has spent.
    "agree": Mutation(("join", "kill"), rules=((Budget, "agree", _count_alone),)),
    # What a member has spent is not written to its disk.
    "count": Mutation(("kill-all", "kill", "join"), rules=((ProcessDisk, "rename", _write_no_count),)),
}
"""For private jobs."""

MUTATIONS: dict[str, tuple[Mutation, dict[str, Any]]] = {
    name: (mutation, options)
    for table, options in (
        (ALWAYS, {}),
        (STAGED, {"stages": 2}),
        (ASYNCHRONOUS, {"strategy": "server"}),
        (OF_PRIVATE, {"strategy": PRIVATE}),
    )
    for name, mutation in table.items()
}
"""Name → the mutation, and options of ``run_schedule`` for a job that has the safeguard."""


if __name__ == "__main__":
    chosen, kind_of_job = MUTATIONS[sys.argv[1]]
    found = (chosen.run(number, **kind_of_job) for number in itertools.count())
    print(next(f"schedule {result.number}: {result.text}" for result in found if result.violated))
