"""A seed that dies for good, and the one that takes over: the real shells on simulated machines and virtual time."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Profile
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import P2PTrainError, Refused, StorageError
from ring.view import View
from roles.seed import run_seed
from roles.seed.feed import tables
from roles.seed.leading import Deposed
from roles.seed.peers import announced_to
from roles.seed.standby import FILE_NAME, TAKEOVER_S, Marker, copy_of, run_standby
from roles.seed.store import Records
from roles.seed.succession import GENERATION_BITS, KNOCK_S, SEATS
from roles.sim.cluster import LISTEN, PERSON, SEED, SEED_PORT, STATE, Machine, Simulation
from roles.sim.disk import MachineDisk
from roles.sim.engine import undisturbed
from roles.sim.loop import Process, SimLoop
from roles.sim.watching import watched
from wire.client import SeedClient
from wire.job_messages import ViewAnnounced

GOOD: dict[str, Any] = {"peer_id": "0123456789ab", "seat": 2, "leader": "10.0.0.1:7337", "following": True}
BAD = [
    {"seat": "x"},
    {"seat": 64},
    {"seat": True},
    {"leader": None},
    {"following": 1},
    {"peer_id": "../x"},
    {"more": 1},
]

WORKERS = 3
GONE_S = TAKEOVER_S + KNOCK_S + 15.0
"""From the death of a leader to a standby that leads: patience, a knock, and the workers' way to it."""


@cache
def profile_of() -> Profile:
    """More steps than any test takes."""
    return Profile.model_validate(
        {"job": {"steps": 3000, "workers": 2}, "batch": {"micro_batches": 8}, "checkpoint": {"every": 200}}
    )


@cache
def expected() -> list[Any]:
    return undisturbed(profile_of())


class SeedMachine(Machine):
    """A machine on which a person starts seeds, and standbys of ``follows``."""

    def __init__(self, simulation: Simulation, host: str) -> None:
        super().__init__(simulation, host, 0.002)
        self.follows = ""
        self.said: list[str] = []
        self.ended: P2PTrainError | None = None
        self.leads = False

    def start(self) -> None:
        self.process, self.stop = Process(self.host), asyncio.Event()
        self.ended, self.leads = None, False
        self.task = self._simulation.loop.start(self.process, self._main())
        self.task.add_done_callback(self._ended)

    def follow(self, leader: str) -> SeedMachine:
        self.follows, self.said = leader, []
        self.start()
        return self

    async def _main(self) -> None:
        try:
            if self.follows:
                address = await run_standby(
                    self._world(),
                    state_dir=STATE,
                    host=LISTEN,
                    port=SEED_PORT,
                    name=self.host,
                    leaders=[(self.follows, SEED_PORT)],
                    tell=lambda level, text: self.say(text),
                    on_ready=lambda address: None,
                    stop=self.stop,
                )
                if address is None:
                    return
            await run_seed(
                self._world(),
                state_dir=STATE,
                host=LISTEN,
                port=SEED_PORT,
                name=self.host,
                on_ready=self._now_leads,
                stop=self.stop,
            )
        except P2PTrainError as problem:
            self.ended = problem
            self.say(f"ended: {problem.message}; {problem.remedy}")
        finally:
            self.leads = False

    def _now_leads(self, address: tuple[str, int]) -> None:
        self.leads = True
        self.say("leads")

    def say(self, text: str) -> None:
        self.said.append(text)
        self._simulation.observer.tell(f"{self.host}: {text}")

    @property
    def records(self) -> Records:
        """Its store, to look at. What a killed process did not commit is gone."""
        found = Records.__new__(Records)
        found._path, found._db = STATE / "seed.sqlite3", self.disk.database(STATE / "seed.sqlite3")
        if not self.up and found._db.in_transaction:
            found._db.rollback()
        return found


class Played(Simulation):
    """A cluster with a seed ``a`` that is named ``seed``, standbys ``b`` and ``c``, and three workers."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__(loop, profile_of(), expected(), 3, peers=WORKERS, verbose=True)
        self.a, self.b, self.c = (SeedMachine(self, host) for host in (SEED, "b", "c"))
        self.machines |= {machine.host: machine for machine in (self.a, self.b, self.c)}
        self.seed = self.a
        self._latency_s = 0.0005

    @property
    def workers(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if not isinstance(machine, SeedMachine)]

    async def until(self, true: Callable[[], bool], seconds: float = 120.0) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not true():  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError("\n".join(f"{at:.2f} {text}" for at, text in self.observer.timeline[-80:])) from None

    async def asked(self, host: str, method: str, **params: Any) -> dict[str, Any]:
        client = await SeedClient.connect(self.network.at(PERSON), host, SEED_PORT, name=PERSON)
        try:
            return await client.request(method, params)
        finally:
            await client.close()

    async def job_at(self, host: str) -> dict[str, Any]:
        return dict((await self.asked(host, "jobs.show", job=self.job))["job"])

    def applied(self) -> list[int]:
        return [m.worker._runner.core.applied for m in self.workers if m.up and m.worker and m.worker._runner]

    async def begin(self, *, standbys: int = 1) -> None:
        """A ring of three trains, and the standbys are in step."""
        self.a.start()
        await self.create_job()
        for machine in self.workers:
            machine.start()
        for standby in (self.b, self.c)[:standbys]:
            standby.follow(SEED)
            await self.in_step(standby)
        await self.until(lambda: len(self.applied()) == WORKERS and min(self.applied()) > 20)

    async def in_step(self, standby: SeedMachine) -> None:
        await self.until(lambda: "in step" in "".join(standby.said[-1:]))

    async def goes_on(self, more: int = 20) -> None:
        goal = max(self.applied()) + more
        await self.until(lambda: bool(self.applied()) and min(self.applied()) >= goal)

    def views(self, host: str) -> list[int]:
        machine = self.machines[host]
        assert isinstance(machine, SeedMachine)
        return [began.generation for began in machine.records.views(self.job, 0, 1000)]


def play(script: Callable[[Played], Awaitable[None]]) -> Played:
    loop = SimLoop()
    made: list[Played] = []

    async def main() -> None:
        played = Played(loop)
        made.append(played)
        loop.set_exception_handler(played.complaint)
        with watched(played, random.Random(3)):
            try:
                await script(played)
            finally:
                played.close()
                await asyncio.sleep(1)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    assert not made[0].complaints, made[0].complaints
    assert not made[0].observer.violation, made[0].observer.violation
    return made[0]


def test_when_the_leader_never_comes_back_its_standby_leads_and_no_step_is_lost() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        minted = cluster.views(SEED)
        assert cluster.views("b") == minted
        cluster.a.kill()
        died, before = cluster.loop.time(), max(cluster.applied())
        await cluster.goes_on()  # without any seed
        await cluster.until(lambda: cluster.b.leads)
        assert TAKEOVER_S <= cluster.loop.time() - died <= GONE_S
        await cluster.goes_on()
        assert cluster.views("b") == minted, "members are taken back as they are"
        item = await cluster.job_at("b")
        assert (item["state"], len(item["members"])) == ("running", WORKERS)
        # A member dies: the new leader mints, in its own term.
        victim = cluster.workers[0]
        victim.kill()
        await cluster.goes_on()
        seat_term = 1
        assert cluster.views("b")[-1] == (seat_term << GENERATION_BITS) + 1
        # It is started again, with the address of the seed that is gone.
        victim.start()
        await cluster.until(lambda: len(cluster.applied()) == WORKERS and min(cluster.applied()) > before)
        await cluster.goes_on()
        assert len((await cluster.job_at("b"))["members"]) == WORKERS
        created = await cluster.asked("b", "jobs.create", name="next", profile="x", spec=profile_of().to_spec())
        assert created["job"]
        records = cluster.b.records
        head = records.ledger_head(cluster.job)
        assert head is not None
        assert head.step > before
        assert [row.step for row in records.ledger_rows(cluster.job, 0, 10**6)] == list(range(1, head.step + 1))

    play(script)


def test_a_leader_that_is_back_in_time_leads_on() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        cluster.a.kill()
        await asyncio.sleep(TAKEOVER_S - 8)
        cluster.a.start()
        await cluster.until(lambda: cluster.a.leads)
        await cluster.in_step(cluster.b)
        await asyncio.sleep(3 * TAKEOVER_S)
        assert cluster.a.leads
        assert not cluster.b.leads
        assert not any("takes over:" in text for text in cluster.b.said)
        await cluster.goes_on()

    play(script)


def test_a_leader_that_comes_back_too_late_refuses_to_lead_and_may_follow() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        cluster.a.kill()
        await cluster.until(lambda: cluster.b.leads)
        await cluster.goes_on()
        cluster.a.start()
        await cluster.until(lambda: cluster.a.ended is not None)
        assert isinstance(cluster.a.ended, Deposed)
        assert "b:" in cluster.a.ended.message
        assert "--standby b:" in cluster.a.ended.remedy
        assert "leads" not in cluster.a.said[1:]
        cluster.a.follow("b")
        await cluster.in_step(cluster.a)
        # And now the other way round.
        cluster.b.kill()
        await cluster.until(lambda: cluster.a.leads)
        await cluster.goes_on()
        assert cluster.a.records.known_fact("term") == str(2), "its seat is the next one"

    play(script)


def test_two_sides_the_higher_term_survives() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        near, *far = cluster.workers
        sides = [(one, other) for one in (SEED, near.host) for other in ("b", *(worker.host for worker in far))]
        for pair in sides:
            cluster.network.silence(*pair)
        await cluster.until(lambda: cluster.b.leads)
        await cluster.until(lambda: cluster.views(SEED)[-1] > 1 and len(cluster.views("b")) > 1, 300)
        assert cluster.a.leads, "it cannot know"
        await asyncio.sleep(5)
        for pair in sides:
            cluster.network.mend(*pair)
        await cluster.until(lambda: cluster.a.ended is not None, 60)
        assert isinstance(cluster.a.ended, Deposed)
        lost = cluster.views(SEED)[-1]
        assert lost < 1 << GENERATION_BITS
        assert lost not in cluster.views("b")[:-1] or cluster.views("b").index(lost) == 0
        async with asyncio.timeout(120):
            while len((await cluster.job_at("b"))["members"]) < WORKERS:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.5)
        await cluster.goes_on()
        lineages = {m.worker._runner.core.view.generation for m in cluster.workers}  # type: ignore[union-attr]
        assert lineages == {cluster.views("b")[-1]}

    play(script)


def test_workers_that_met_a_higher_term_take_no_orders_of_a_lower_one() -> None:
    """The old leader is back and cannot know; the new one is away: its workers wait for it."""

    async def script(cluster: Played) -> None:
        await cluster.begin()
        cluster.a.kill()
        await cluster.until(lambda: cluster.b.leads)
        await cluster.goes_on()
        cluster.network.cut(SEED, "b")
        cluster.a.start()
        await cluster.until(lambda: cluster.a.leads)
        cluster.b.kill()
        await asyncio.sleep(20)
        assert [peer for peer in (await cluster.asked(SEED, "peers.list"))["peers"] if peer["state"] != "lost"] == []
        cluster.workers[0].kill()  # their ring breaks, and stands still: nobody who may leads
        await asyncio.sleep(5)
        cluster.b.follows = ""
        cluster.b.start()
        await cluster.goes_on()
        assert cluster.views(SEED)[-1] < 1 << GENERATION_BITS < cluster.views("b")[-1]
        cluster.network.mend(SEED, "b")
        await cluster.until(lambda: cluster.a.ended is not None)
        assert isinstance(cluster.a.ended, Deposed)

    play(script)


def test_of_two_standbys_the_first_takes_over_and_the_second_follows_it() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin(standbys=2)
        cluster.a.kill()
        await cluster.until(lambda: cluster.b.leads)
        await cluster.until(lambda: any("follows b at b:" in text for text in cluster.c.said))
        await cluster.goes_on()
        cluster.b.kill()
        await cluster.until(lambda: cluster.c.leads)
        await cluster.goes_on()
        assert cluster.c.records.known_fact("term") == "2"
        assert len((await cluster.job_at("c"))["members"]) == WORKERS

    play(script)


def test_the_second_of_two_standbys_waits_longer_but_not_for_ever() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin(standbys=2)
        cluster.b.kill()
        cluster.a.kill()
        died = cluster.loop.time()
        await cluster.until(lambda: cluster.c.leads)
        assert cluster.loop.time() - died >= TAKEOVER_S
        await cluster.goes_on()

    play(script)


def test_a_standby_without_a_majority_does_not_lead() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        near = [cluster.workers[0].host, cluster.workers[1].host, SEED]
        for host in near:
            for other in ("b", cluster.workers[2].host):
                cluster.network.cut(host, other)
        await asyncio.sleep(4 * TAKEOVER_S)
        assert not cluster.b.leads
        assert any("only 1 of the 3 members" in text for text in cluster.b.said), cluster.b.said
        assert cluster.a.leads

    play(script)


def test_a_copy_that_is_behind_the_workers_does_not_lead() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        cluster.b.kill()
        cluster.workers[0].kill()  # a view that the copy lacks
        await cluster.goes_on()
        cluster.a.kill()
        cluster.b.start()
        await asyncio.sleep(3 * TAKEOVER_S)
        assert not cluster.b.leads
        assert any("which the copy here lacks" in text for text in cluster.b.said), cluster.b.said
        await cluster.goes_on()
        # A person may have it so.
        cluster.b.kill()
        cluster.b.follows = ""
        cluster.b.start()
        await cluster.until(lambda: cluster.b.leads)
        await cluster.goes_on()

    play(script)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_a_standby_that_is_killed_anywhere_in_its_copy_has_a_whole_one_or_what_it_had(share: float) -> None:
    """At every share of the first copy's moments, then started again."""

    async def script(cluster: Played) -> None:
        await cluster.begin(standbys=0)
        for number in range(3):
            cluster.b.follow(SEED)
            process, want = cluster.b.process, round(share * MOMENTS) + number
            await cluster.until(lambda process=process, want=want: process.moments >= want)  # type: ignore[misc]
            cluster.b.kill()
            await asyncio.sleep(0.1)
            records = cluster.b.records
            if "jobs" in tables(records._db):
                copy = copy_of(records)
                assert bool(copy.cluster) == (cluster.job in copy.views) == bool(records.views(cluster.job, 0, 9))
        cluster.b.follow(SEED)
        await cluster.in_step(cluster.b)
        assert cluster.views("b") == cluster.views(SEED)

    play(script)


MOMENTS = 100
"""Callbacks of a standby until it is in step."""


def test_a_store_of_another_cluster_is_not_overwritten() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin(standbys=0)
        cluster.c.start()  # another cluster
        await cluster.until(lambda: cluster.c.leads)
        cluster.c.stop.set()
        await cluster.until(lambda: not cluster.c.up)
        before = copy_of(cluster.c.records).cluster
        cluster.c.follow(SEED)
        await cluster.until(lambda: cluster.c.ended is not None)
        assert "another --state" in cluster.c.said[-1]
        assert copy_of(cluster.c.records).cluster == before

    play(script)


def test_a_frozen_standby_holds_nobody_up_for_long() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        cluster.loop.freeze(cluster.b.process)
        cluster.workers[0].kill()
        began = cluster.loop.time()
        await cluster.goes_on(1)
        assert cluster.loop.time() - began < 3
        assert not any("lost the seed" in text for _, text in cluster.observer.timeline)
        cluster.loop.thaw(cluster.b.process)
        await cluster.until(lambda: cluster.views("b") == cluster.views(SEED))

    play(script)


def test_a_view_is_with_the_standbys_before_any_member_hears_of_it() -> None:
    async def script(cluster: Played) -> None:
        cluster.slow[frozenset((SEED, "b"))] = 0.1
        await cluster.begin()
        await asyncio.sleep(2)  # the leader has heard that, too
        last = cluster.views(SEED)[-1]
        cluster.workers[0].kill()
        runners = [machine.worker._runner for machine in cluster.workers[1:] if machine.worker]

        def heard() -> bool:
            return any(runner and runner.core.view and runner.core.view.generation > last for runner in runners)

        await cluster.until(heard)
        assert cluster.views("b")[-1] > last

    play(script)


@pytest.mark.parametrize("standbys", [0, 1])
def test_a_view_that_nobody_heard_of_any_more_costs_no_step(standbys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[Played] = []

    def dies_first(host: str, view: View) -> ViewAnnounced:
        if armed:
            armed.pop().a.kill()
        return announced_to(host, view)

    monkeypatch.setattr("roles.seed.jobs.announced_to", dies_first)

    async def script(cluster: Played) -> None:
        await cluster.begin(standbys=standbys)
        before = min(cluster.applied())
        armed.append(cluster)
        cluster.workers[0].kill()
        await cluster.until(lambda: not armed)
        if not standbys:
            await asyncio.sleep(3)
            cluster.a.start()
        await cluster.until(lambda: cluster.a.leads or cluster.b.leads)
        await cluster.until(lambda: max(cluster.applied()) > before + 20)
        assert not any("loads step" in text for at, text in cluster.observer.timeline if at > 10)

    play(script)


def test_workers_do_not_go_over_to_another_cluster_where_a_standby_was() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin()
        cluster.b.kill()
        cluster.b.disk, cluster.b.follows = MachineDisk(random.Random(1)), ""
        cluster.b.start()
        await cluster.until(lambda: cluster.b.leads)
        cluster.a.kill()
        await asyncio.sleep(5)
        cluster.a.start()
        await cluster.goes_on()
        there = (await cluster.asked("b", "peers.list"))["peers"]
        assert {peer["state"] for peer in there} <= {"lost"}
        assert len((await cluster.job_at(SEED))["members"]) == WORKERS

    play(script)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[" * 4000, '{"peer_id": 5}', *(json.dumps(GOOD | change) for change in BAD)],
)
def test_a_standbys_record_that_is_damaged_is_told_with_a_remedy(tmp_path: Path, text: str) -> None:
    disk = RealDisk()
    (tmp_path / FILE_NAME).write_text(json.dumps(GOOD))
    assert Marker.load(disk, tmp_path) == Marker(**GOOD)
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(StorageError, match="is damaged"):
        Marker.load(disk, tmp_path)


def test_people_see_standbys_and_are_sent_to_the_leader() -> None:
    async def script(cluster: Played) -> None:
        await cluster.begin(standbys=2)
        peers = (await cluster.asked(SEED, "peers.list"))["peers"]
        shown = [(peer["name"], peer["roles"], peer["state"]) for peer in peers[:2]]
        assert shown == [("b", ["seed"], "standby"), ("c", ["seed"], "standby")]
        with pytest.raises(Refused) as caught:
            await cluster.asked("c", "peers.list")
        assert caught.value.code == "standby"
        assert caught.value.elsewhere == (f"{SEED}:{SEED_PORT}",)

    play(script)


def test_seats_make_terms_that_no_two_standbys_share() -> None:
    from roles.seed.succession import next_term

    assert [next_term(0, 1), next_term(1, 1), next_term(1, 2), next_term(2, 1)] == [1, 1 + SEATS, 2, 1 + SEATS]
    assert all(next_term(term, seat) % SEATS == seat for term in range(40) for seat in range(SEATS))
    assert all(next_term(term, seat) > term for term in range(40) for seat in range(SEATS))
