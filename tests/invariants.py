"""What holds in a core between any two events. Tests call ``check_invariants`` after each of them."""

from __future__ import annotations

import math
from functools import singledispatch
from typing import Any

from ring.collectives import Receive, Schedule, Send
from ring.coordination import ENDED, JobPhase
from ring.coordinator import Coordinator
from ring.job_member import CHANGING, JobMember, MemberPhase
from ring.staleness import Intake
from ring.transaction import Transaction
from roles.drafter.drafting import DraftedText
from roles.pass_queue import PassQueue
from roles.serving.model import Decoding
from roles.verifier.speculation import Speculation
from roles.worker.part_cache import MAX_PARTS, PartCache
from roles.worker.transfer import WINDOW, Transfer
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
    assert not who.banned & set(who.peers), history
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


@check_invariants.register
def _(core: DraftedText) -> None:
    assert core._prompt <= core.known <= len(core._ids) <= core._positions
    assert core.known <= core._sent <= len(core._ids)
    assert core._held <= len(core._ids)
    assert core.epoch <= core.number


@check_invariants.register
def _(core: PartCache) -> None:
    assert sum(part.bytes for part in core.parts.values()) + sum(core._reserved.values()) <= core.limit_bytes
    assert len(core.parts) <= MAX_PARTS
    assert all(part.wanted.keys() <= part.users for part in core.parts.values())


@check_invariants.register
def _(core: Transfer) -> None:
    under_way = [key for known in core._sources.values() for key in known.under_way if key in core._wanted]
    queued = [*under_way, *core._waiting]
    assert len(queued) == len(set(queued)), "a piece is asked for twice"
    assert set(queued) == {key for key in core._wanted if not core.has(key)}, "a piece was forgotten"
    assert all(len(known.under_way) <= WINDOW for known in core._sources.values())


@check_invariants.register(PassQueue)
def _(core: PassQueue[Any]) -> None:
    assert not core._waiting.keys() & core._places.keys()
    places = [*core._places.values(), *(waiting.place for waiting in core._waiting.values())]
    assert len(set(places)) == len(places)
    assert all(0 < place <= core._last_place for place in places)


@check_invariants.register
def _(core: Decoding) -> None:
    assert core.prompt_tokens <= len(core.ids) <= core._stop
    assert core.ended or core.in_prompt or len(core.ids) < core._stop
    assert core._stale <= len(core._passes) <= core.most_passes
    assert core.ended or core._stale or not core.assumed or core._continues(core._passes[0][0])


@check_invariants.register
def _(core: Speculation) -> None:
    line, size = core._line, len(core.decoding.ids)
    if line is None:
        return
    assert line.size <= size
    assert line._matched <= min(size, line._end)
    assert line.depth <= line._reach
    assert len(line.ahead) <= line._reach
    assert not line.dead or not line.ahead
    assert line.dead or not line.ahead or line._end == size + len(line.ahead)
    assert line.epoch < len(line.sizes)
