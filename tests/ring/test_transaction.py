"""The step transaction: scenarios by hand, then whole clusters of cores under random deaths, without sockets.

The cluster below plays the ring and the seed: a collective ends for a member only when every member of its view has
come to it; a death is noticed by the others at any later moment; views are minted from reports alone, by the rule
"the highest applied step wins, whoever has prepared it redoes it, the rest heals".
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError
from ring.activities import (
    Apply,
    Boundary,
    Broken,
    Compute,
    Confirm,
    Confirmed,
    Disband,
    Event,
    Failed,
    Finished,
    Form,
    Heal,
    Instruction,
    Loaded,
    Record,
    Reduce,
    Reduced,
    Reload,
    Say,
    Unloaded,
    ViewArrived,
    Vote,
    Voted,
    Wish,
)
from ring.token import TOKEN_BYTES, Flag, Token, first_lineage, next_lineage
from ring.transaction import Phase, Transaction
from ring.view import View, shares
from wire.messages import LedgerRow, MemberRecord, Report

JOB = "job"
ORIGIN = first_lineage("spec")


def view(
    generation: int, peers: list[str], *, step: int = 0, lineage: str = ORIGIN, healthy: set[str] | None = None
) -> View:
    parts = shares(8, [1.0] * len(peers))
    members = tuple(
        MemberRecord(peer, peer, "", 1, first, count, healthy is None or peer in healthy)
        for peer, (first, count) in zip(peers, parts, strict=True)
    )
    return View(JOB, generation, step, lineage, members, square_sum=4.0)


def digest_of(generation: int, step: int) -> bytes:
    """What the ring reduces to: another sum in every view, as floating-point sums are."""
    return hashlib.blake2b(f"{generation}/{step}".encode(), digest_size=16).digest()


class Member:
    """One core with what a real one has around it: a state (the digests that were applied) and a redo buffer."""

    def __init__(self, peer: str, steps_total: int) -> None:
        self.core = Transaction(job=JOB, peer_id=peer, steps_total=steps_total)
        self.state: list[bytes] | None = []  # None: torn
        self.buffer = b""
        self.activity: Instruction | None = None
        self.said: list[Report] = []
        self.boundaries: list[Boundary] = []
        self.rows: list[tuple[LedgerRow, str]] = []

    def handle(self, event: Event) -> None:
        for instruction in self.core.handle(event):
            match instruction:
                case Say(report):
                    self.said.append(report)
                case Disband():
                    self.activity = None
                case Heal():
                    self.state = None
                    self.activity = instruction
                case Compute():
                    self.buffer = b""
                    self.activity = instruction
                case Record(row, lineage):
                    self.rows.append((row, lineage))
                case _:
                    self.activity = instruction
                    if isinstance(instruction, Boundary):
                        self.boundaries.append(instruction)
        self.core.validate()

    def finish(self) -> None:
        """End the activity under way, for those that depend on nobody else."""
        activity, self.activity = self.activity, None
        assert activity is not None
        if isinstance(activity, Apply):
            assert self.buffer, "nothing to apply"
            assert self.state is not None
            self.state.append(self.buffer)
        if isinstance(activity, Reload):
            self.state = []
            self.handle(Loaded(0, ORIGIN))
            return
        if isinstance(activity, Confirm):
            members = self.core.view.size if self.core.view else 0
            self.handle(Confirmed(activity.ticket, (self.digest(),) * members))
            return
        self.handle(Finished(activity.ticket))  # type: ignore[attr-defined]

    def digest(self) -> bytes:
        return hashlib.blake2b(b"".join(self.state or [])).digest()

    def lineage(self) -> str:
        lineage = ORIGIN
        for digest in self.state or []:
            lineage = next_lineage(lineage, digest)
        return lineage


def alone(steps_total: int = 3) -> Member:
    member = Member("a", steps_total)
    member.handle(Loaded(0, ORIGIN))
    return member


def run_step(member: Member, generation: int) -> None:
    """One step of a ring of one."""
    assert isinstance(member.activity, Compute)
    member.finish()
    reduce_(member, generation)
    vote = member.activity
    assert isinstance(vote, Vote)
    member.handle(Voted(vote.ticket, (vote.token,)))
    member.finish()


def reduce_(member: Member, generation: int) -> None:
    activity = member.activity
    assert isinstance(activity, Reduce)
    member.buffer = digest_of(generation, activity.step)
    member.handle(Reduced(activity.ticket, member.buffer, 1.5))


# ---------------------------------------------------------------------------------------------------------- scenarios


def test_a_member_alone_trains_to_the_end() -> None:
    member = alone(steps_total=2)
    assert member.said[-1].status == "ready"
    member.handle(ViewArrived(view(1, ["a"])))
    member.finish()
    for _ in range(2):
        run_step(member, 1)
        member.finish()
    assert isinstance(member.activity, Boundary)
    member.finish()
    assert member.core.phase is Phase.DONE
    assert member.said[-1].status == "done"
    assert [(item.applied, item.last) for item in member.boundaries] == [(1, False), (2, True)]
    assert member.core.lineage == member.lineage()


def test_a_hold_stops_at_the_boundary_and_the_session_stays() -> None:
    member = alone()
    member.handle(ViewArrived(view(1, ["a"])))
    member.finish()
    member.handle(Wish(Flag.HOLD, 1))
    run_step(member, 1)
    member.finish()
    assert member.core.phase is Phase.HELD
    assert (member.said[-1].status, member.said[-1].applied) == ("held", 1)
    member.handle(Broken(1, "b", "the faster one is gone"))
    assert member.core.phase is Phase.HELD


def test_a_hold_before_the_ring_is_formed_is_a_standstill_at_once() -> None:
    member = alone()
    member.handle(ViewArrived(view(1, ["a", "b"])))
    assert isinstance(member.activity, Form)
    member.handle(Wish(Flag.HOLD, 1))
    assert member.activity is None
    assert (member.said[-1].status, member.said[-1].generation) == ("held", 1)
    member.handle(ViewArrived(view(2, ["a"])))
    assert isinstance(member.activity, Form)


def test_a_torn_member_that_is_held_while_it_forms_loads_its_state_first() -> None:
    member = alone()
    member.handle(ViewArrived(view(1, ["a", "b"], step=3, lineage="ab" * 32)))
    member.finish()
    assert isinstance(member.activity, Heal)
    member.handle(ViewArrived(view(2, ["a", "b"], step=3, lineage="ab" * 32)))
    said = len(member.said)
    member.handle(Wish(Flag.HOLD, 2))
    assert isinstance(member.activity, Reload)
    assert len(member.said) == said


def test_a_state_that_is_given_up_is_not_trained_on_nor_given_until_another_is_loaded() -> None:
    member = alone()
    member.handle(ViewArrived(view(1, ["a"])))
    member.finish()
    run_step(member, 1)
    member.handle(Unloaded("back to a checkpoint"))
    assert isinstance(member.activity, Reload)
    member.handle(ViewArrived(view(2, ["a"])))
    assert isinstance(member.activity, Reload), "the view waits for the state"
    assert not member.core.may_give
    member.finish()
    assert member.said[-1].status == "ready"
    assert isinstance(member.activity, Form)


def test_a_hold_for_another_generation_changes_nothing() -> None:
    member = alone()
    member.handle(ViewArrived(view(2, ["a"])))
    member.finish()
    member.handle(Wish(Flag.HOLD, 1))
    run_step(member, 2)
    member.finish()
    assert member.core.phase is Phase.COMPUTING


def test_a_wish_for_a_save_survives_a_break() -> None:
    member = alone()
    member.handle(ViewArrived(view(1, ["a"])))
    member.finish()
    member.handle(Wish(Flag.SAVE))
    member.handle(Broken(1, "", "cut"))
    member.handle(ViewArrived(view(2, ["a"])))
    member.finish()
    run_step(member, 2)
    assert isinstance(member.activity, Confirm)
    member.finish()
    assert member.boundaries[-1].save


def test_a_break_while_applying_waits_for_the_optimizer() -> None:
    member = alone()
    member.handle(ViewArrived(view(1, ["a", "b"])))
    member.finish()
    member.finish()
    reduce_(member, 1)
    vote = member.activity
    assert isinstance(vote, Vote)
    member.handle(Voted(vote.ticket, (vote.token, vote.token)))
    member.handle(Broken(1, "b", "died"))
    assert member.core.phase is Phase.APPLYING
    member.finish()
    assert member.core.phase is Phase.IDLE
    assert (member.said[-1].status, member.said[-1].applied, member.said[-1].suspect) == ("broken", 1, "b")
    assert member.said[-1].square_sum == 3.0


def test_a_late_end_of_an_abandoned_activity_changes_nothing() -> None:
    member = alone()
    member.handle(ViewArrived(view(1, ["a", "b"])))
    form = member.activity
    assert isinstance(form, Form)
    member.handle(Broken(1, "b", "died"))
    member.handle(Finished(form.ticket))
    assert member.core.phase is Phase.IDLE


@pytest.mark.parametrize("same", [True, False])
def test_only_the_very_step_that_was_committed_is_redone(same: bool) -> None:
    member = alone()
    member.handle(ViewArrived(view(1, ["a", "b"])))
    member.finish()
    member.finish()
    reduce_(member, 1)
    member.handle(Broken(1, "b", "died"))
    assert (member.said[-1].applied, member.said[-1].prepared) == (0, 1)
    committed = next_lineage(ORIGIN, digest_of(1 if same else 2, 0))
    member.handle(ViewArrived(view(3, ["a", "c"], step=1, lineage=committed, healthy={"c"})))
    if same:
        assert isinstance(member.activity, Apply)
        assert (member.activity.redo, member.activity.square_sum) == (True, 4.0)
        member.finish()
    assert isinstance(member.activity, Form)
    member.finish()
    assert isinstance(member.activity, Compute if same else Heal)


def test_an_old_view_changes_nothing() -> None:
    member = alone()
    member.handle(ViewArrived(view(3, ["a"])))
    activity = member.activity
    member.handle(ViewArrived(view(2, ["a", "b"])))
    assert member.activity is activity
    assert member.core.view is not None
    assert member.core.view.generation == 3


@pytest.mark.parametrize("name", ["digest", "lineage", "step", "generation"])
def test_a_member_that_differs_stops_the_commit_and_is_named(name: str) -> None:
    member = alone()
    member.handle(ViewArrived(view(1, ["a", "b"])))
    member.finish()
    member.finish()
    reduce_(member, 1)
    vote = member.activity
    assert isinstance(vote, Vote)
    token = Token.decode_untrusted(vote.token)
    changed = {"digest": b"x" * 16, "lineage": b"y" * 16, "step": 9, "generation": 9}
    member.handle(Voted(vote.ticket, (vote.token, replace(token, **{name: changed[name]}).encode())))  # type: ignore[arg-type]
    report = member.said[-1]
    assert (report.status, report.suspect, report.applied, report.prepared) == ("broken", "b", 0, 0)
    assert name in report.reason


def confirming(*, steps_total: int = 3) -> tuple[Member, Confirm]:
    """A member of two that compares its state with the other's, for the step was to be saved."""
    member = alone(steps_total)
    member.handle(ViewArrived(view(1, ["a", "b"])))
    member.finish()
    member.handle(Wish(Flag.SAVE))
    member.finish()
    reduce_(member, 1)
    vote = member.activity
    assert isinstance(vote, Vote)
    member.handle(Voted(vote.ticket, (vote.token, vote.token)))
    member.finish()
    confirm = member.activity
    assert isinstance(confirm, Confirm)
    return member, confirm


def test_a_member_whose_state_drifted_loads_another_and_heals() -> None:
    member = alone()
    member.handle(ViewArrived(view(1, ["b", "a"])))
    member.finish()
    member.handle(Wish(Flag.SAVE))
    member.finish()
    reduce_(member, 1)
    vote = member.activity
    assert isinstance(vote, Vote)
    member.handle(Voted(vote.ticket, (vote.token, vote.token)))
    member.finish()
    confirm = member.activity
    assert isinstance(confirm, Confirm)
    member.handle(Confirmed(confirm.ticket - 1, (b"x", b"y")))
    assert member.activity is confirm, "what belongs to another activity changes nothing"
    member.handle(Confirmed(confirm.ticket, (b"x", b"y")))
    assert isinstance(member.activity, Reload)
    assert not member.core.may_give
    member.finish()
    assert (member.said[-1].status, member.said[-1].applied) == ("ready", 0)


def test_a_step_whose_norm_nobody_knows_is_not_redone() -> None:
    member = alone()
    member.handle(ViewArrived(view(1, ["a", "b"])))
    member.finish()
    member.finish()
    reduce_(member, 1)
    member.handle(Broken(1, "b", "died"))
    committed = next_lineage(ORIGIN, digest_of(1, 0))
    unknown = replace(view(2, ["a", "c"], step=1, lineage=committed, healthy={"c"}), square_sum=0.0)
    member.handle(ViewArrived(unknown))
    assert isinstance(member.activity, Form)
    member.finish()
    assert isinstance(member.activity, Heal)


def test_a_long_reason_is_cut_to_what_a_report_can_carry() -> None:
    member = alone()
    member.handle(ViewArrived(view(1, ["a", "b"])))
    member.handle(Broken(1, "b", "x" * 100_000))
    assert len(member.said[-1].reason) <= 500


def test_a_failure_is_final_until_the_state_is_loaded_anew() -> None:
    member = alone()
    member.handle(ViewArrived(view(1, ["a"])))
    member.handle(Failed("out of memory"))
    assert (member.said[-1].status, member.said[-1].reason) == ("failed", "out of memory")
    member.handle(ViewArrived(view(2, ["a"])))
    assert member.core.phase is Phase.FAILED
    member.handle(Loaded(0, ORIGIN))
    assert member.core.phase is Phase.IDLE


def test_a_torn_state_is_loaded_anew_and_never_reported() -> None:
    member = alone()
    ahead = next_lineage(ORIGIN, digest_of(1, 0))
    member.handle(ViewArrived(view(2, ["a", "b"], step=1, lineage=ahead, healthy={"b"})))
    member.finish()
    assert isinstance(member.activity, Heal)
    said = len(member.said)
    member.handle(Broken(2, "b", "the donor died"))
    assert isinstance(member.activity, Reload)
    assert len(member.said) == said
    member.handle(ViewArrived(view(3, ["a"])))
    assert isinstance(member.activity, Reload)
    member.finish()
    assert member.said[-1].status == "ready"
    assert isinstance(member.activity, Form)


@pytest.mark.parametrize("data", [b"", b"\0" * (TOKEN_BYTES - 1), b"\0" * (TOKEN_BYTES + 1), b"\xff" * TOKEN_BYTES])
def test_what_is_no_token_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Token.decode_untrusted(data)


@given(st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES))
def test_a_token_survives_the_wire(data: bytes) -> None:
    try:
        token = Token.decode_untrusted(data)
    except ProtocolError:
        return
    assert token.encode()[:16] == data[:16]
    assert Token.decode_untrusted(token.encode()).digest == token.digest


# ----------------------------------------------------------------------------------------------------- whole clusters


@dataclass
class Cluster:
    """A ring and a seed, played with one source of chance."""

    rng: random.Random
    steps_total: int
    members: dict[str, Member] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    noticed: set[tuple[str, int]] = field(default_factory=set)
    tokens: dict[tuple[int, int], dict[str, bytes]] = field(default_factory=dict)
    digests: dict[tuple[int, int], dict[str, bytes]] = field(default_factory=dict)
    reduced: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    formed: dict[int, set[str]] = field(default_factory=dict)
    committed: list[bytes] = field(default_factory=list)
    current: View | None = None
    generation: int = 0
    asked_to_hold: int = 0

    def add(self, peer: str) -> None:
        self.members[peer] = Member(peer, self.steps_total)
        self.members[peer].handle(Loaded(0, ORIGIN))

    def live(self) -> dict[str, Member]:
        return {peer: member for peer, member in self.members.items() if peer not in self.dead}

    # ------------------------------------------------------------------------------------------------------ the ring

    def can_end(self, peer: str, member: Member) -> bool:
        """Whether the activity of ``member`` may end now: a collective needs everybody to have come to it."""
        activity, current = member.activity, member.core.view
        if activity is None:
            return False
        if isinstance(activity, Apply | Compute | Boundary | Reload):
            return True
        assert current is not None
        everybody = {item.peer_id for item in current.members}
        key = (current.generation, member.core.applied)
        match activity:
            case Form():
                self.formed.setdefault(current.generation, set()).add(peer)
                return self.formed[current.generation] >= everybody
            case Reduce():
                self.reduced.setdefault(key, set()).add(peer)
                return self.reduced[key] >= everybody
            case Vote(token=token):
                self.tokens.setdefault(key, {})[peer] = token
                return self.tokens[key].keys() >= everybody
            case Confirm():
                self.digests.setdefault(key, {})[peer] = member.digest()
                return self.digests[key].keys() >= everybody
            case Heal():
                return any(self.is_donor(item.peer_id, current) for item in current.members)
        return False

    def is_donor(self, peer: str, current: View) -> bool:
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
        activity, current = member.activity, member.core.view
        match activity:
            case Reduce(ticket=ticket, step=step):
                assert current is not None
                member.buffer = digest_of(current.generation, step)
                member.handle(Reduced(ticket, member.buffer, 1.0))
            case Vote(ticket=ticket):
                assert current is not None
                tokens = self.tokens[(current.generation, member.core.applied)]
                member.handle(Voted(ticket, tuple(tokens[item.peer_id] for item in current.members)))
            case Confirm(ticket=ticket):
                assert current is not None
                digests = self.digests[(current.generation, member.core.applied)]
                member.handle(Confirmed(ticket, tuple(digests[item.peer_id] for item in current.members)))
            case Heal():
                assert current is not None
                donors = [item.peer_id for item in current.members if self.is_donor(item.peer_id, current)]
                member.state = list(self.members[self.rng.choice(donors)].state or [])
                member.finish()
            case _:
                member.finish()
        self.check(member)

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
        gave_up = core.phase is Phase.IDLE and core.view is current  # while the ring was formed
        return (peer, current.generation) in self.noticed or gave_up

    # ------------------------------------------------------------------------------------------------------ the seed

    def may_mint(self) -> bool:
        """Everybody alive stands still and has said where."""
        live = self.live().values()
        ready = all(not m.core.running and m.core.phase is not Phase.EMPTY for m in live)
        finished = all(m.core.phase is Phase.DONE for m in live)
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
        self.current = replace(current, square_sum=best.square_sum)
        for member in live.values():
            member.handle(ViewArrived(self.current))

    # ----------------------------------------------------------------------------------------------------- invariants

    def check(self, member: Member) -> None:
        """Exactly once, no fork: every state is a beginning of the one history of commits."""
        if member.state is None:
            return
        core = member.core
        if core.phase not in (Phase.EMPTY, Phase.FAILED) and not core.torn:
            assert len(member.state) == core.applied
            assert member.lineage() == core.lineage
        common = min(len(member.state), len(self.committed))
        assert member.state[:common] == self.committed[:common], "two histories"
        if len(member.state) > len(self.committed):
            self.committed = list(member.state)

    def others_hold_the_run(self, peer: str) -> bool:
        """Whether the run survives the death of ``peer``: somebody else is at most the step under way behind."""
        others = (member.state for name, member in self.live().items() if name != peer)
        return any(state is not None and len(state) >= len(self.committed) - 1 for state in others)

    def run(self, *, faults: int, newcomers: int, limit: int = 4000) -> None:
        for _ in range(limit):
            live = self.live()
            if live and all(member.core.phase is Phase.DONE for member in live.values()):
                return
            choices: list[tuple[str, str]] = [
                ("end", peer) for peer, member in live.items() if self.can_end(peer, member)
            ]
            choices += [("notice", peer) for peer, _ in self.notice()]
            if self.may_mint():
                choices.append(("mint", ""))
            if newcomers and self.rng.random() < 0.02:
                choices.append(("join", ""))
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
                    self.members[peer].handle(Broken(generation, "", "a neighbour is gone"))
                    self.check(self.members[peer])
                case "mint":
                    self.mint()
                case "join":
                    newcomers -= 1
                    self.add(f"n{newcomers}")
                    for member in self.live().values():
                        member.handle(Wish(Flag.HOLD))
                case "kill":
                    faults -= 1
                    self.dead.add(peer)
                    # What only the dead one had committed is run again: nothing that lives rests on it.
                    states = [member.state for member in self.live().values() if member.state is not None]
                    self.committed = list(max(states, key=len))
        raise AssertionError("no progress")


@settings(max_examples=300, deadline=None)
@given(
    rng=st.randoms(use_true_random=False),
    count=st.integers(1, 5),
    faults=st.integers(0, 4),
    newcomers=st.integers(0, 3),
)
def test_clusters_apply_every_step_exactly_once_whoever_dies(
    rng: random.Random, count: int, faults: int, newcomers: int
) -> None:
    cluster = Cluster(rng, steps_total=5)
    for number in range(count):
        cluster.add(f"p{number}")
    cluster.run(faults=faults, newcomers=newcomers)
    assert len(cluster.committed) == 5
    for member in cluster.live().values():
        assert member.state == cluster.committed
