"""A view: the members that train together, their order and shares, and the step from which they start."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from p2ptrain.core.errors import ProtocolError
from ring.token import is_lineage
from wire.job_messages import MemberRecord, ViewAnnounced

LONGEST_SILENCE_S = 86_400.0
MAX_STREAMS = 16
MAX_STAGES = 256
REDUCED_TO_STATE = 3
"""The state is about this many times as large as what a step reduces: parameters and two moments."""
MIN_SUB_CHUNK_BYTES, MAX_SUB_CHUNK_BYTES = 8, 64 << 20
TERM_BITS = 40
"""The seed of term t mints generations above t << 40, so a restored seed mints none a second time."""
LABEL = "/"
"""Separates a job's id, which never contains it, from the stage of a ring."""
CODEC_NAMES = frozenset({"fp32", "bf16", "fp16", "int8", "int4", "topk"})
"""The names in ``ring.codecs``. A test keeps both equal; this copy serves code that does not import numpy."""


@dataclass(frozen=True, slots=True)
class View:
    """One generation of a job's membership. Immutable: any change is a new generation.

    Attributes:
        generation: increases with every view of the job. Every frame between members has it.
        step: steps already applied when the view begins.
        lineage: lineage at ``step``, hex.
        members: in rank order; the right neighbour of rank r is rank (r + 1) mod n.
        square_sum: squared gradient norm with which step ``step`` was committed; members that redo the step clip by it.
        heartbeat_s, death_s: between neighbours; 0: not set by the seed. All members use the same values: a member with
            longer ones would be declared dead by a neighbour with shorter ones.
        streams: bulk connections from each member to its right neighbour; an array is striped over them.
        sub_chunk_bytes: size of the pieces that are reduced and passed on over far links; 0: the members are near each
            other, and the session chooses.
        codec: name of the encoding in which gradients travel (``ring.codecs``).
        lenient: a finite outlier is applied, because the data is its cause (``ring.quarantine``).
        ledger_step: the seed's ledger has each step up to this one.
        stages: number of parts of the model; rank r holds part r mod ``stages``. 1: each member holds all of it. The
            members of one replica have consecutive ranks; the replica's share is that of its stage 0.
        reduce_bytes: size of the largest array that a step reduces at any stage; 0: not known.
    """

    job: str
    generation: int
    step: int
    lineage: str
    members: tuple[MemberRecord, ...]
    square_sum: float = 0.0
    heartbeat_s: float = 0.0
    death_s: float = 0.0
    streams: int = 1
    sub_chunk_bytes: int = 0
    codec: str = "fp32"
    lenient: bool = False
    ledger_step: int = 0
    stages: int = 1
    reduce_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Approximate size of the largest state that a member may have to load, fetch or update while others wait."""
        return REDUCED_TO_STATE * self.reduce_bytes

    @property
    def term(self) -> int:
        return self.generation >> TERM_BITS

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def replicas(self) -> int:
        return len(self.members) // self.stages

    def stage_of(self, rank: int) -> int:
        return rank % self.stages

    def replica_of(self, rank: int) -> int:
        return rank // self.stages

    def replica(self, rank: int) -> tuple[MemberRecord, ...]:
        first = rank - rank % self.stages
        return self.members[first : first + self.stages]

    def same_stage(self, rank: int) -> tuple[MemberRecord, ...]:
        return self.members[self.stage_of(rank) :: self.stages]

    def stage_ring(self, rank: int) -> View:
        """The ring of the members that hold the same part, as a view with a label of its own. Each member has the share
        of its replica."""
        heads = self.members[:: self.stages]
        members = (
            replace(member, first=head.first, count=head.count)
            for member, head in zip(self.members[self.stage_of(rank) :: self.stages], heads, strict=True)
        )
        label = f"{self.job}{LABEL}{self.stage_of(rank)}"
        return replace(self, job=label, members=tuple(members), stages=1)

    def rank_of(self, peer_id: str) -> int | None:
        for rank, member in enumerate(self.members):
            if member.peer_id == peer_id:
                return rank
        return None

    def right_of(self, rank: int) -> MemberRecord:
        return self.members[(rank + 1) % self.size]

    def left_of(self, rank: int) -> MemberRecord:
        return self.members[(rank - 1) % self.size]

    def sources(self) -> tuple[MemberRecord, ...]:
        return tuple(member for member in self.members if member.healthy)

    def to_message(self) -> ViewAnnounced:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ViewAnnounced(**(values | {"members": list(self.members)}))

    @classmethod
    def from_message_untrusted(cls, message: ViewAnnounced) -> View:
        members = tuple(message.members)
        if not members:
            raise ProtocolError("a view without members")
        if len({member.peer_id for member in members}) != len(members):
            raise ProtocolError("a view that names a member twice")
        if message.generation < 1 or message.step < 0:
            raise ProtocolError(f"invalid view: generation {message.generation}, step {message.step}")
        covered = 0
        for member in members:
            if not 0 < member.port < 65536:
                raise ProtocolError(f"a view with a member's invalid port {member.port}")
            if member.first != covered or member.count < 0:
                raise ProtocolError("a view whose shares do not cover the micro-batches in order")
            covered += member.count
        _check_stages_untrusted(members, message.stages)
        if not is_lineage(message.lineage):
            raise ProtocolError("a view with an invalid lineage")
        beats = (message.heartbeat_s, message.death_s)
        if not all(0 <= seconds <= LONGEST_SILENCE_S for seconds in beats) or not math.isfinite(message.square_sum):
            raise ProtocolError("a view with invalid heartbeat times or an invalid norm")
        _check_carriage_untrusted(message.streams, message.sub_chunk_bytes, message.codec)
        if min(message.ledger_step, message.reduce_bytes) < 0:
            raise ProtocolError(f"invalid view: ledger step {message.ledger_step}, reduce_bytes {message.reduce_bytes}")
        values = {field.name: getattr(message, field.name) for field in fields(cls)}
        return cls(**(values | {"members": members}))


def _check_carriage_untrusted(streams: int, sub_chunk_bytes: int, codec: str) -> None:
    if not 1 <= streams <= MAX_STREAMS:
        raise ProtocolError(f"a view of {streams} streams, 1 to {MAX_STREAMS} are possible")
    if sub_chunk_bytes and not MIN_SUB_CHUNK_BYTES <= sub_chunk_bytes <= MAX_SUB_CHUNK_BYTES:
        raise ProtocolError(f"a view with invalid sub-chunks of {sub_chunk_bytes} bytes")
    if codec not in CODEC_NAMES:
        raise ProtocolError(f"a view with the unknown codec {codec[:20]!r}")


def _check_stages_untrusted(members: tuple[MemberRecord, ...], stages: int) -> None:
    if not 1 <= stages <= MAX_STAGES or len(members) % stages:
        raise ProtocolError(f"invalid view: {len(members)} members, {stages} stages")
    if any(member.count and rank % stages for rank, member in enumerate(members)):
        raise ProtocolError("a view that gives a share to a member beyond its replica's first stage")


def shares(micro_batches: int, members: int) -> list[tuple[int, int]]:
    """Cut ``range(micro_batches)`` into equal (first, count) runs. The first members take the remainder, one each."""
    bounds = [rank * (micro_batches // members) + min(rank, micro_batches % members) for rank in range(members + 1)]
    return [(first, stop - first) for first, stop in pairwise(bounds)]
