"""Whole clusters of transaction cores under random deaths, refusals and wishes, without sockets.

The cluster plays the ring and the seed: a collective ends for a member only when every member of its view has come to
it; a death is noticed by the others at any later moment; views are minted from reports alone, by the rule "the highest
applied step wins, whoever has prepared it redoes it, the rest heals". A member may die between any two events.

A step may be spoiled: by a contribution that is not finite, or by a member that ends with another sum. Which, and by
whom, is drawn before the members come to it.
"""

from __future__ import annotations

import math
import random
import struct
from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ring import member_events as ev
from ring.job_member import MemberPhase
from ring.token import Flag, Token, next_lineage
from ring.view import View
from tests.ring.members import MICRO_BATCHES, ORIGIN, Member, digest_of, view
from wire.job_messages import LedgerRow

STEPS = 6
EVERY = 2
Key = tuple[int, int]  # generation, steps applied before the one that is meant


@dataclass
class Cluster:
    """A ring and a seed, played with one source of chance.

    Attributes:
        committed: digests of the one history, of which every state must be a beginning.
        confirmed: the newest step that is in a checkpoint.
        spoiled: digests that must be in no state.
        ledger: the seed's: step → row, as told when a view begins and, by its rank 0, with each commit.
    """

    rng: random.Random
    members: dict[str, Member] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    noticed: set[tuple[str, int]] = field(default_factory=set)
    views: dict[int, View] = field(default_factory=dict)
    tokens: dict[Key, dict[str, bytes]] = field(default_factory=dict)
    digests: dict[Key, dict[str, bytes]] = field(default_factory=dict)
    reduced: dict[Key, set[str]] = field(default_factory=dict)
    computed: dict[Key, dict[str, tuple[int, int]]] = field(default_factory=dict)
    faults: dict[Key, tuple[str, str]] = field(default_factory=dict)
    formed: dict[int, set[str]] = field(default_factory=dict)
    committed: list[bytes] = field(default_factory=list)
    confirmed: int = 0
    spoiled: set[bytes] = field(default_factory=set)
    ledger: dict[int, LedgerRow] = field(default_factory=dict)
    generation: int = 0
    spoil_budget: int = 0
    rejections: int = 0
    redone: int = 0
    last_step: float = math.inf  # all know that the job ends with it, or the next one that is applied

    def add(self, peer: str) -> None:
        self.members[peer] = Member(peer, STEPS, checkpoint_every=EVERY)
        self.members[peer].handle(ev.StateLoaded(0, ORIGIN))

    def live(self) -> dict[str, Member]:
        return {peer: member for peer, member in self.members.items() if peer not in self.dead}

    # ------------------------------------------------------------------------------------------------------ the ring

    def can_end(self, peer: str, member: Member) -> bool:
        """Whether the activity of ``member`` may end now: a collective needs everybody to have come to it."""
        activity, current = member.activity, member.core.view
        if activity is None:
            return False
        if isinstance(activity, ev.Apply | ev.Compute | ev.Boundary | ev.Reload):
            return True
        assert current is not None
        everybody = {item.peer_id for item in current.members}
        key = (current.generation, member.core.applied)
        match activity:
            case ev.FormRing():
                self.formed.setdefault(current.generation, set()).add(peer)
                return self.formed[current.generation] >= everybody
            case ev.Reduce():
                self.reduced.setdefault(key, set()).add(peer)
                return self.reduced[key] >= everybody
            case ev.Vote(token=token):
                self.tokens.setdefault(key, {})[peer] = token
                return self.tokens[key].keys() >= everybody
            case ev.Confirm():
                self.digests.setdefault(key, {})[peer] = member.digest()
                return self.digests[key].keys() >= everybody
            case ev.Heal():
                return any(self.is_source(item.peer_id, current) for item in current.members)
        return False

    def is_source(self, peer: str, current: View) -> bool:
        member = self.members[peer]
        core = member.core
        return (
            peer not in self.dead
            and member.state is not None
            and core.may_give
            and core.view is current
            and (core.applied, core.lineage) == (current.step, current.lineage)
        )

    def end(self, peer: str, member: Member) -> None:
        activity, current, rows = member.activity, member.core.view, len(member.rows)
        match activity:
            case ev.Compute(first=first, count=count):
                assert current is not None
                self.computed.setdefault((current.generation, member.core.applied), {})[peer] = (first, count)
                member.finish()
            case ev.Reduce(ticket=ticket):
                assert current is not None
                self.reduce(peer, member, ticket, current)
            case ev.Vote(ticket=ticket):
                assert current is not None
                tokens = self.tokens[(current.generation, member.core.applied)]
                member.handle(ev.TokensGathered(ticket, tuple(tokens[item.peer_id] for item in current.members)))
                self.rejections += member.said[-1].cause != ""
            case ev.Confirm(ticket=ticket, applied=applied):
                assert current is not None
                digests = self.digests[(current.generation, applied)]
                member.handle(ev.DigestsGathered(ticket, tuple(digests[item.peer_id] for item in current.members)))
            case ev.Heal():
                assert current is not None
                sources = [item.peer_id for item in current.members if self.is_source(item.peer_id, current)]
                member.state = list(self.members[self.rng.choice(sources)].state or [])
                member.finish()
            case ev.Apply(redo=redo):
                self.redone += redo
                member.finish()
                assert len(member.rows) == rows + 1, "every applied step is recorded, once"
                self.check_row(peer, member, current)
            case _:
                member.finish()
        if isinstance(member.activity, ev.Boundary) and member.activity.save:
            self.check_confirmed(member.activity.applied, current)
        self.check(member)

    def reduce(self, peer: str, member: Member, ticket: int, current: View) -> None:
        """Give ``peer`` what the ring came to, spoiled or not."""
        core = member.core
        key = (current.generation, core.applied)
        kind, culprit = self.fault(key, current)
        digest = digest_of(*key)
        if kind == "digest" and peer == culprit:
            digest = digest[::-1]
        if kind:
            self.spoiled.add(digest)
        member.buffer = digest
        reduced = ev.StepReduced(
            ticket,
            digest,
            part=math.nan if kind == "nan" else 1.0,
            own=math.nan if kind == "nan" and peer == culprit else 1.0,
            unit_us=self.rng.choice([0, 5, 20, 45]),
            stop=core.applied >= self.last_step,
        )
        member.handle(reduced)

    def fault(self, key: Key, current: View) -> tuple[str, str]:
        if key not in self.faults:
            spoil = self.spoil_budget > 0 and current.size > 1 and self.rng.random() < 0.3
            self.spoil_budget -= spoil
            culprit = self.rng.choice(current.members).peer_id
            self.faults[key] = (self.rng.choice(["nan", "digest"]), culprit) if spoil else ("", "")
        return self.faults[key]

    def notice(self) -> list[tuple[str, int]]:
        """Members whose ring lost somebody (dead, or stopped because of a dead one), and who do not know it yet."""
        found = []
        for peer, member in self.live().items():
            current = member.core.view
            if current is None or (peer, current.generation) in self.noticed or not member.core.running:
                continue
            if any(item.peer_id in self.dead or self.has_left(item.peer_id, current) for item in current.members):
                found.append((peer, current.generation))
        return found

    def has_left(self, peer: str, current: View) -> bool:
        core = self.members[peer].core
        gave_up = (
            core.phase is MemberPhase.IDLE and core.view is current
        )  # while the ring was formed, or after a refusal
        return (peer, current.generation) in self.noticed or gave_up

    # ------------------------------------------------------------------------------------------------------ the seed

    def may_mint(self) -> bool:
        """Everybody alive stands still and has said where."""
        live = self.live().values()
        ready = all(not m.core.running and m.core.phase is not MemberPhase.EMPTY for m in live)
        finished = all(m.core.phase is MemberPhase.DONE for m in live)
        return bool(live) and ready and not finished

    def mint(self) -> None:
        live = self.live()
        reports = {peer: member.core.report("held") for peer, member in live.items()}
        best = max(reports.values(), key=lambda report: report.applied)
        healthy = {
            peer
            for peer, report in reports.items()
            if (report.applied, report.lineage) == (best.applied, best.lineage)
            or (report.prepared, report.prepared_lineage) == (best.applied, best.lineage)
        }
        self.generation += 1
        peers = sorted(live)
        self.rng.shuffle(peers)
        current = view(self.generation, peers, step=best.applied, lineage=best.lineage, healthy=healthy)
        current = self.views[self.generation] = replace(current, square_sum=best.square_sum)
        self.ledger = {step: row for step, row in self.ledger.items() if step <= best.applied}
        for member in live.values():
            for row, _ in member.rows:
                if row.step <= best.applied and (member.state or [])[row.step - 1 : row.step] == [row.digest]:
                    self.ledger[row.step] = row
        for member in live.values():
            member.handle(ev.ViewArrived(current))

    # ----------------------------------------------------------------------------------------------------- invariants

    def check_row(self, peer: str, member: Member, current: View | None) -> None:
        """The row of a step that was just applied says what happened, whenever that was; and all had voted for it."""
        row, before = member.rows[-1]
        key = (row.generation, row.step - 1)
        assert member.state is not None
        assert (row.step, row.digest) == (len(member.state), member.state[-1])
        assert next_lineage(before, row.digest) == member.lineage()
        voters = [item.peer_id for item in self.views[row.generation].members]
        assert set(self.tokens[key]) == set(voters), "applied before all had voted"
        tokens = [Token.decode_untrusted(self.tokens[key][voter]) for voter in voters]
        assert all(math.isfinite(token.own) for token in tokens), "applied though a contribution is not finite"
        shares = [self.computed[key][voter] for voter in voters]
        covered = [index for first, count in shares for index in range(first, first + count)]
        assert covered == list(range(MICRO_BATCHES)), "not every micro-batch exactly once"
        assert struct.unpack(f"!{len(voters)}I", row.counts) == tuple(count for _, count in shares)
        if current is not None and current.generation == row.generation and current.rank_of(peer) == 0:
            self.ledger[row.step] = row

    def check_confirmed(self, applied: int, current: View | None) -> None:
        """A checkpoint is made of a step that no death can take back: every member of the view has applied it."""
        assert current is not None
        for item in current.members:
            state = self.members[item.peer_id].state
            if item.peer_id not in self.dead:
                assert state is not None and len(state) >= applied, "saved, but not confirmed"  # noqa: PT018
        self.confirmed = max(self.confirmed, applied)

    def check(self, member: Member) -> None:
        """Exactly once, no fork: every state is a beginning of the one history of commits."""
        if member.state is None:
            return
        core = member.core
        if core.phase not in (MemberPhase.EMPTY, MemberPhase.FAILED) and not core.torn:
            assert len(member.state) == core.applied
            assert member.lineage() == core.lineage
        common = min(len(member.state), len(self.committed))
        assert member.state[:common] == self.committed[:common], "two histories"
        assert not self.spoiled & set(member.state), "a spoiled step was applied"
        if len(member.state) > len(self.committed):
            self.committed = list(member.state)

    def others_hold_the_run(self, peer: str) -> bool:
        """Whether the run survives the death of ``peer``: somebody else is at most the step under way behind."""
        others = (member.state for name, member in self.live().items() if name != peer)
        return any(state is not None and len(state) >= len(self.committed) - 1 for state in others)

    def kill(self, peer: str) -> None:
        self.dead.add(peer)
        # What only the dead one had committed is run again: nothing that lives rests on it.
        states = [member.state for member in self.live().values() if member.state is not None]
        self.committed = list(max(states, key=len))

    def run(self, *, faults: int, newcomers: int, ring_options: int, stops: bool = False, limit: int = 6000) -> None:
        for _ in range(limit):
            live = self.live()
            if live and all(member.core.phase is MemberPhase.DONE for member in live.values()):
                return
            choices: list[tuple[str, str]] = [
                ("end", peer) for peer, member in live.items() if self.can_end(peer, member)
            ]
            choices += [("notice", peer) for peer, _ in self.notice()]
            if self.may_mint():
                choices.append(("mint", ""))
            if newcomers and self.rng.random() < 0.02:
                choices.append(("join", ""))
            if ring_options and self.rng.random() < 0.05:
                choices.append(("wish", self.rng.choice(sorted(live))))
            if stops and self.rng.random() < 0.01:
                choices.append(("stop", self.rng.choice(sorted(live))))
            if faults and self.rng.random() < 0.1:
                choices += [("kill", peer) for peer in live if self.others_hold_the_run(peer)][:1]
            assert choices, {peer: (m.core.phase, m.activity) for peer, m in live.items()}
            what, peer = self.rng.choice(choices)
            match what:
                case "end":
                    self.end(peer, self.members[peer])
                case "notice":
                    generation = self.members[peer].core.view.generation  # type: ignore[union-attr]
                    self.noticed.add((peer, generation))
                    self.members[peer].handle(ev.ViewBroken(generation, "", "a neighbour is gone"))
                    self.check(self.members[peer])
                case "mint":
                    self.mint()
                case "join":
                    newcomers -= 1
                    self.add(f"n{newcomers}")
                    for member in self.live().values():
                        member.handle(ev.FlagRequested(Flag.HOLD))
                case "wish":
                    ring_options -= 1
                    flag = self.rng.choice([Flag.HOLD, Flag.SAVE, Flag.SNAPSHOT, Flag.LEAVE])
                    self.members[peer].handle(ev.FlagRequested(flag))
                case "stop":
                    stops, self.last_step = False, 1 + max(member.core.applied for member in live.values())
                case "kill":
                    faults -= 1
                    self.kill(peer)
        raise AssertionError("no progress")


def cluster_of(rng: random.Random, count: int, spoil: int) -> Cluster:
    cluster = Cluster(rng, spoil_budget=spoil)
    for number in range(count):
        cluster.add(f"p{number}")
    return cluster


def check_the_end(cluster: Cluster) -> None:
    steps = len(cluster.committed)
    assert steps == STEPS or cluster.last_step < steps < STEPS
    for member in cluster.live().values():
        assert member.state == cluster.committed
        for row, _ in member.rows:  # those that died with what they alone had applied are not asked
            if (member.state or [])[row.step - 1] == row.digest:
                cluster.ledger.setdefault(row.step, row)
    assert [cluster.ledger[step].digest for step in range(1, steps + 1)] == cluster.committed, "ledger"
    assert cluster.confirmed == steps, "the last step is in a checkpoint"


@settings(max_examples=100)
@given(
    rng=st.randoms(use_true_random=False),
    count=st.integers(1, 5),
    faults=st.integers(0, 4),
    newcomers=st.integers(0, 3),
    ring_options=st.integers(0, 4),
    spoil=st.integers(0, 3),
    stops=st.booleans(),
)
def test_clusters_apply_every_step_exactly_once_whoever_dies(
    rng: random.Random, count: int, faults: int, newcomers: int, ring_options: int, spoil: int, stops: bool
) -> None:
    cluster = cluster_of(rng, count, spoil)
    cluster.run(faults=faults, newcomers=newcomers, ring_options=ring_options, stops=stops)
    check_the_end(cluster)


def test_seeded_clusters_with_all_at_once() -> None:
    met = Counter[str]()
    for seed in range(60):
        cluster = cluster_of(random.Random(seed), 2 + seed % 4, 3)
        cluster.run(faults=4, newcomers=3, ring_options=4, stops=seed % 3 == 0)
        check_the_end(cluster)
        met["refused"] += cluster.rejections
        met["redone"] += cluster.redone
        met["stopped early"] += len(cluster.committed) < STEPS
        met["rebalanced"] += sum(
            struct.unpack(f"!{len(row.counts) // 4}I", row.counts)
            != tuple(member.count for member in cluster.views[row.generation].members)
            for row in cluster.ledger.values()
        )
    wanted = ("refused", "redone", "rebalanced", "stopped early")
    assert min(met[what] for what in wanted) > 0, met  # what is tested did happen
