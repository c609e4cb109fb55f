"""What holds in a core between any two events. Tests call ``check_invariants`` after each of them."""

from __future__ import annotations

import math
from functools import singledispatch

from ring.collectives import Receive, Schedule, Send
from ring.coordination import ENDED, JobPhase
from ring.coordinator import Coordinator
from ring.job_member import CHANGING, JobMember, MemberPhase
from ring.staleness import Intake
from ring.transaction import Transaction
from wire.emulate import LinkShaper
from wire.frame import CONTROL_FRAME_BYTES, FrameDecoder, _State


@singledispatch
def check_invariants(core: object) -> None:
    raise TypeError(f"no invariants of {type(core).__name__} are known")


@check_invariants.register
def _(core: FrameDecoder) -> None:
    assert core._left > 0 or core._state is not _State.DISCARD
    assert (core._done is not None) == (core._state is _State.BULK)
    assert len(core._rest) > 0 or core._state in (_State.WAITING, _State.DISCARD, _State.FAILED)
    assert all(posts and not core._is_stale(key[0]) for key, posts in core._posts.items())
    assert len(core._body) <= CONTROL_FRAME_BYTES


@check_invariants.register
def _(core: LinkShaper) -> None:
    assert core._credit_s >= 0
    least = core._through_at - core._credit_s - 1e-6
    assert core._last_delivery_at == -math.inf or core._last_delivery_at >= least


@check_invariants.register
def _(core: Schedule) -> None:
    assert 0 <= core._handled <= core._posted <= len(core._receives)
    assert 0 <= core._sent <= len(core._sends)
    spans: list[Send | Receive] = [*core._sends, *core._receives]
    assert all(0 <= span.start < span.stop for span in spans), "an empty sub-chunk"
    assert all(send.after <= len(core._receives) for send in core._sends), "a send that waits for ever"
    relays = [send.relay for send in core._sends if send.relay is not None]
    assert relays == [index for index, item in enumerate(core._receives) if item.relayed], "a relay is lost"


@check_invariants.register
def _(core: Intake) -> None:
    numbers = [worker.number for worker in core._workers.values() if worker.number is not None]
    assert len({*numbers, *core._again}) == len(numbers) + len(core._again), "a number is assigned twice"
    assert all(number < core._next for number in (*numbers, *core._again))
    assert len(set(core._waiting)) == len(core._waiting), "two contributions of one worker"


@check_invariants.register
def _(core: JobMember) -> None:
    phase = core.phase
    assert core.applied >= 0
    assert core.lineage or phase in (MemberPhase.EMPTY, MemberPhase.FAILED)
    assert not core.running or core.view is not None
    assert core._postponed_break is None or phase in CHANGING
    assert core._postponed_view is None or phase in CHANGING | {MemberPhase.EMPTY}
    if not isinstance(core, Transaction):
        return
    untorn = frozenset(MemberPhase) - {
        MemberPhase.EMPTY, MemberPhase.IDLE, MemberPhase.FORMING, MemberPhase.HEALING, MemberPhase.FAILED,
    }  # fmt: skip
    assert not core.torn or phase not in untorn
    if phase in (MemberPhase.FORMING, MemberPhase.COMPUTING, MemberPhase.REDUCING):
        assert core._prepared is None, "computing would overwrite the redo buffer"
    if phase in (MemberPhase.VOTING, MemberPhase.APPLYING, MemberPhase.REDOING):
        assert core._prepared is not None, "nothing to apply"
    assert core._prepared is None or core._prepared.step == core.applied + 1, "a row of another step"
    if core.view is not None:
        whole = sum(member.count for member in core.view.members)
        assert sum(core.shares.counts) == whole, "the shares do not cover the micro-batches"


@check_invariants.register
def _(core: Coordinator) -> None:
    history, who, phase, view = core.history, core._roster, core.phase, core.view
    parts = {member.peer_id: view.stage_of(rank) for rank, member in enumerate(view.members)} if view else {}
    assert who.running <= parts.keys(), history
    assert who.unheard <= who.running, history
    assert who.running <= set(who.peers) | who.unheard, history
    assert not who.running & (set(who.standing()) | who.away), history
    assert all(who.part_of(peer_id) == parts[peer_id] for peer_id in who.running), history
    assert not core._failures.banned & set(who.peers), history
    assert who.withdrawn <= set(who.peers), history
    assert core._catch_ups.moving <= set(who.peers), history
    assert not core._catch_ups.moving & who.running, history
    assert phase is not JobPhase.RUNNING or who.running | who.away, history
    assert phase is not JobPhase.RUNNING or not who.unheard | who.away or "absence" in core._deadlines, history
    assert phase is not JobPhase.STOPPING or who.running, history
    assert (phase is JobPhase.STOPPING) == ("stop" in core._deadlines), history
    assert phase is not JobPhase.WAITING or not who.running, history
    assert phase is not JobPhase.PAUSED or core.paused, history
    assert phase not in ENDED or not who.peers, history
    assert phase not in ENDED or core.next_deadline() is None, history
