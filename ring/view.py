"""A view: the members that train together, their order and shares, and the step from which they start.

The ranks go round a ring: rank r sends to rank r + 1. If the model has p parts, p consecutive ranks are one replica, a
worker for each part in order, so ranks r, r + p, r + 2p ... hold the same part. The share of a replica, consecutive
micro-batches of a step, stands at its first member.
"""

from __future__ import annotations

from dataclasses import fields, replace

from ring.collectives import group_count, owned_range
from wire.job_messages import MemberRecord, ViewAnnounced

REDUCED_TO_STATE = 3
"""The state is about this many times as large as what a step reduces: parameters and two moments."""
TERM_BITS = 40
"""The seed of term t mints generations above t << 40, so a restored seed mints none a second time."""
LABEL = "/"
"""Separates a job's id, which never contains it, from the stage of a ring."""


class View(ViewAnnounced):
    """One generation of a job's membership. Immutable: any change is a new generation."""

    @classmethod
    def of(cls, message: ViewAnnounced) -> View:
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})

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

    def replica_ring(self, rank: int) -> View:
        """The ring of the members of one replica, as a view with a label of its own."""
        label = f"{self.job}{LABEL}replica-{self.replica_of(rank)}"
        return replace(self, job=label, members=self.replica(rank), stages=1)

    @property
    def groups(self) -> int:
        return group_count(self.size)

    def leader_ring(self) -> View:
        """The ring of the first members of all groups, as a view with a label of its own."""
        starts = (owned_range(group, self.groups, self.size)[0] for group in range(self.groups))
        leaders = tuple(self.members[start] for start in starts)
        return replace(self, job=f"{self.job}{LABEL}leaders", members=leaders, stages=1, streams=1)

    def rank_of(self, peer_id: str) -> int | None:
        for rank, member in enumerate(self.members):
            if member.peer_id == peer_id:
                return rank
        return None

    def name_of(self, peer_id: str) -> str:
        """The member's name; the id of a peer that is no member."""
        return next((member.name for member in self.members if member.peer_id == peer_id), peer_id)

    def right_of(self, rank: int) -> MemberRecord:
        return self.members[(rank + 1) % self.size]

    def left_of(self, rank: int) -> MemberRecord:
        return self.members[(rank - 1) % self.size]
