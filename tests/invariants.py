"""What is always true of a core, between any two events. Tests check it after each."""

from __future__ import annotations

import math
from functools import singledispatch

from ring.collectives import Schedule
from ring.coordination import ENDED, JobPhase
from ring.coordinator import Coordinator
from ring.job_member import CHANGING, JobMember, MemberPhase
from ring.staleness import Intake
from ring.transaction import Transaction
from roles.drafter.drafting import DraftedText
from roles.serving.model import Decoding
from roles.verifier.speculation import Speculation
from roles.worker.part_cache import MAX_PARTS, PartCache
from roles.worker.transfer import WINDOW, Transfer
from wire.emulate import LinkShaper
from wire.frame import CONTROL_FRAME_BYTES, FrameDecoder, _State


@singledispatch
def validate(core: object) -> None:
    """Fail if ``core`` is in a state that no events lead to."""
    raise TypeError(f"no invariants of {type(core).__name__}")


@validate.register
def _(core: FrameDecoder) -> None:
    assert core._left > 0 or core._state is not _State.DISCARD
    assert (core._done is not None) == (core._state is _State.BULK)
    assert len(core._rest) > 0 or core._state in (_State.WAITING, _State.DISCARD, _State.FAILED)
    assert all(posts and not core._is_stale(key[0]) for key, posts in core._posts.items())
    assert len(core._body) <= CONTROL_FRAME_BYTES


@validate.register
def _(core: LinkShaper) -> None:
    assert core._credit_s >= 0
    earliest = core._through_at - core._credit_s - 1e-6
    assert core._last_delivery_at == -math.inf or core._last_delivery_at >= earliest


@validate.register
def _(core: Schedule) -> None:
    receives, sends = core._receives, core._sends
    assert 0 <= core._handled <= core._posted <= len(receives)
    assert 0 <= core._sent <= len(sends)
    assert all(0 <= span.start < span.stop for span in [*sends, *receives]), "an empty sub-chunk"
    assert all(send.after <= len(receives) for send in sends), "a send that waits for ever"
    relays = [send.relay for send in sends if send.relay is not None]
    assert relays == [index for index, item in enumerate(receives) if item.relayed], "a relay is lost"


@validate.register
def _(core: Coordinator) -> None:
    history, who, view, phase = core.history, core._roster, core.view, core.phase
    parts = {member.peer_id: view.stage_of(rank) for rank, member in enumerate(view.members)} if view else {}
    assert who.running <= parts.keys(), history
    assert who.unheard <= who.running, history
    assert who.running <= set(who.peers) | who.unheard, history
    assert not who.running & (set(who.standing()) | who.away), history
    assert all(who.part_of(peer_id) == parts[peer_id] for peer_id in who.running), history
    assert not core._failures.banned & set(who.peers), history
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


@validate.register
def _validate_member(core: JobMember) -> None:
    assert core.applied >= 0
    assert core.lineage or core.phase in (MemberPhase.EMPTY, MemberPhase.FAILED)
    assert not core.running or core.view is not None
    assert core._postponed_break is None or core.phase in CHANGING
    assert core._postponed_view is None or core.phase in CHANGING | {MemberPhase.EMPTY}


@validate.register
def _(core: Transaction) -> None:
    _validate_member(core)
    phases, prepared = MemberPhase, core._prepared
    torn = (phases.EMPTY, phases.IDLE, phases.FORMING, phases.HEALING, phases.FAILED)
    assert not core.torn or core.phase in torn
    if core.phase in (phases.FORMING, phases.COMPUTING, phases.REDUCING):
        assert prepared is None, "computing would overwrite the redo buffer"
    if core.phase in (phases.VOTING, phases.APPLYING, phases.REDOING):
        assert prepared is not None, "nothing to apply"
    assert prepared is None or prepared.step == core.applied + 1, "a row of another step"
    if core.view is not None:
        whole = sum(member.count for member in core.view.members)
        assert sum(core.shares.counts) == whole, "the shares do not cover the micro-batches"


@validate.register
def _(core: Intake) -> None:
    numbers = [worker.number for worker in core._workers.values() if worker.number is not None]
    assert len({*numbers, *core._again}) == len(numbers) + len(core._again), "a number is assigned twice"
    assert all(number < core._next for number in (*numbers, *core._again))
    assert len(set(core._waiting)) == len(core._waiting), "two contributions of one worker"


@validate.register
def _(core: Transfer) -> None:
    under_way = [key for known in core._sources.values() for key in known.under_way if key in core._wanted]
    queued = [*under_way, *core._waiting]
    assert len(queued) == len(set(queued)), "a piece is asked for twice"
    assert set(queued) == {key for key in core._wanted if not core.has(key)}, "a piece was forgotten"
    assert all(len(known.under_way) <= WINDOW for known in core._sources.values())


@validate.register
def _(core: PartCache) -> None:
    assert sum(part.bytes for part in core.parts.values()) + sum(core._reserved.values()) <= core.limit_bytes
    assert len(core.parts) <= MAX_PARTS
    assert all(part.users or not part.promised for part in core.parts.values())


@validate.register
def _(core: Decoding) -> None:
    assert core.prompt_tokens <= len(core.ids) <= core._stop
    assert core.ended or len(core.ids) < core._stop


@validate.register
def _(core: DraftedText) -> None:
    assert core._prompt <= core._verified <= len(core._ids) <= core._positions
    assert core._verified <= core._sent <= len(core._ids)
    assert core._held <= len(core._ids)
    assert core.epoch <= core.number


@validate.register
def _(core: Speculation) -> None:
    if (line := core._line) is None:
        return
    size = len(core.decoding.ids)
    assert line.size <= size
    assert line._matched <= min(size, line._end)
    assert line.depth <= line._reach
    assert len(line.ahead) <= line._reach
    assert not line.dead or not line.ahead
    assert line.dead or not line.ahead or line._end == size + len(line.ahead)
    assert line.epoch < len(line.sizes)
