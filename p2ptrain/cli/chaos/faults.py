"""Carries a schedule out: picks who is whole, hurts them, mends them, and says what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from p2ptrain.cli.chaos.cluster import Cluster, Place
from p2ptrain.cli.chaos.judge import Fetch, Injury, pause_before, recovered
from p2ptrain.cli.chaos.observer import Observer, Told
from p2ptrain.cli.chaos.schedule import DONOR, Action
from p2ptrain.cli.console import Console
from p2ptrain.core.errors import P2PTrainError
from roles.seed.updates import INTERVAL_S
from roles.worker.fetch import DONORS

PATIENCE_S = 180.0
"""For a step, or for all to be members again, before it counts as never: the seed waits 30 s for whoever is silent, as
long for whoever sits out, and a worker on a busy machine loads its libraries for as long again."""
LEAVE_S = 30.0  # a worker leaves after its step, and writes a checkpoint first where it must
FETCH_BPS = 12e6
"""Bytes per second of each way from a member to a newcomer whose fetch is to be hit: on a bare loopback all would be
there before its beginning is known here."""
FIRST_FETCH_S = 1.0
"""How long a transfer is taken to last before one was seen."""
TRIES = 3
"""Of each donor that is to be killed in the middle of a transfer, before that counts as impossible here."""
LONGER = 1.1
_ENDS_VIEW = frozenset({"kill", "two", "leave", "join", DONOR})
_OF_LINKS = frozenset({"cut", "corrupt"})
_COSTS_NO_PLACE = frozenset({"slow", "disk", "seed"})

now = time.monotonic


@dataclass(slots=True)
class Faults:
    """One run of a schedule.

    Args:
        alone: one fault at a time, the next one when all are members again.
        stop: the person pressed Ctrl+C.

    Attributes:
        done: the injuries, in order.
        stuck: what did not come back in time.
        fetch_s: how long a transfer lasts, as the last ones did.
    """

    cluster: Cluster
    observer: Observer
    console: Console
    stop: asyncio.Event
    alone: bool
    done: list[Injury] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    fetch_s: float = FIRST_FETCH_S
    _tasks: set[asyncio.Task[object]] = field(default_factory=set)
    _seed_busy: bool = False

    async def run(self, actions: Iterator[Action], *, count: int, duration_s: float) -> None:
        """``count`` faults, or as many as begin within ``duration_s``; returns when the last one is mended.

        A donor that did not die in the middle of a transfer is no fault of the ``count``.

        Raises ``P2PTrainError`` where a process cannot be started.
        """
        began = now()
        try:
            for action in actions:
                if (count and self._counted >= count) or self._over:
                    break
                if count and action.number > TRIES * count:
                    self.stuck.append(f"{self._counted} of {count} faults were done in {action.number - 1} tries")
                    break
                wait_s = action.gap_s if self.alone else began + action.at_s - now()
                if not count and began + duration_s <= now() + max(wait_s, 0.0):
                    break
                await self._pause(wait_s)
                places = await self._taken(action)
                if places is None:
                    break
                work = self._in_a_transfer if action.kind == DONOR else self._injure
                task: asyncio.Task[object] = asyncio.create_task(work(action, places), name=f"fault {action.number}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                if self.alone:
                    await asyncio.wait({task})
                    task.result()
            if not count:
                await self._pause(began + duration_s - now())
            await self._settled()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _settled(self) -> None:
        while self._tasks:
            finished, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()

    @property
    def _counted(self) -> int:
        return sum(injury.counts for injury in self.done)

    @property
    def _over(self) -> bool:
        return self.stop.is_set() or self.observer.finished or bool(self.stuck)

    async def _pause(self, seconds: float) -> None:
        """Let time go by, unless it is over."""
        await self.observer.until(lambda: self._over, max(seconds, 0.0))

    # ------------------------------------------------------------------------------------------------------- who

    async def _taken(self, action: Action) -> list[Place] | None:
        """Who is to be hit, reserved: those next in turn who are whole, while somebody else is. None: it is over."""
        found: list[Place] = []

        def fits() -> bool:
            nonlocal found
            found = self._whole(action)
            return self._over or self._may(action, found)

        if not await self.observer.until(fits, PATIENCE_S):
            self.stuck.append(f"fault {action.number} ({action.kind}): nobody could be hit within {PATIENCE_S:.0f} s")
        if self._over:
            return None
        if action.kind == "seed":
            self._seed_busy = True
            return []
        if action.kind in ("join", DONOR):
            return [await self._extra()]
        chosen = found[: 2 if action.kind == "two" else 1]
        for place in chosen:
            place.busy = True
        return chosen

    def _whole(self, action: Action) -> list[Place]:
        members = set(self.observer.members)
        places = (self.cluster.places[number] for number in action.order)
        alive = (place for place in places if not place.busy and place.child is not None and place.child.alive)
        return [place for place in alive if self.observer.id_of(place.name) in members]

    def _may(self, action: Action, whole: Collection[Place]) -> bool:
        if action.kind == "seed":
            return not self._seed_busy
        if self._seed_busy and self.alone:
            return False
        if action.kind in ("join", DONOR):
            extra = self.cluster.places.get(self.cluster.workers + 1)
            return len(whole) > (action.kind == DONOR) and (extra is None or not extra.busy)
        taken = 2 if action.kind == "two" else 1
        return len(whole) > taken and bool(self._holders() & {place.name for place in list(whole)[taken:]})

    def _holders(self) -> set[str]:
        """Who surely has the state: the members of the view that committed the newest step, as far as they are whole.

        Were none of them left, the others would rightly wait for one to come back: no fault of theirs to measure.
        """
        rows, views = self.observer.rows, self.observer.views
        newest = rows[-1].generation if rows else 0
        members = next((view.members for view in reversed(views) if view.generation == newest), ())
        return {self.observer.names.get(peer, "") for peer in members}

    async def _extra(self) -> Place:
        place = await self.cluster.place(self.cluster.workers + 1)
        place.busy = True
        return place

    def _ends_of(self, places: Collection[Place]) -> frozenset[str]:
        """The workers, and their neighbours in the ring: a broken link is no more the fault of the one end."""
        members, ids = self.observer.members, {self.observer.id_of(place.name) for place in places}
        near = {
            members[(rank + turn) % len(members)]
            for rank, peer in enumerate(members)
            if peer in ids
            for turn in (-1, 1)
        }
        return frozenset(ids | near)

    # ------------------------------------------------------------------------------------------------------- what

    async def _injure(self, action: Action, places: list[Place]) -> Injury:
        observer = self.observer
        kind = action.kind
        hit = frozenset(observer.id_of(place.name) for place in places)
        injury = Injury(
            number=action.number,
            kind=kind,
            at_s=now(),
            generation=observer.generation,
            step=observer.step,
            new_view=kind in _ENDS_VIEW,
            peers=tuple(place.name for place in places) or ("seed",),
            excused=frozenset() if kind in _COSTS_NO_PLACE else self._ends_of(places) if kind in _OF_LINKS else hit,
        )
        self.done.append(injury)
        first_row = len(observer.rows)
        try:
            await self._hurt(action, places, injury)
            self.console.event("info", f"fault {action.number}: {_told(injury)}")
            back = asyncio.create_task(self._recovery(injury, first_row), name=f"recovery {action.number}")
            try:
                await self._mend(action, places, injury)
                injury.until_s = now()
                await self._until_whole(injury)
                await back
            finally:
                back.cancel()
                await asyncio.wait({back})
        finally:
            for place in places:
                place.busy = False
            if kind == "seed":
                self._seed_busy = False
            observer.wake()
        return injury

    async def _hurt(self, action: Action, places: list[Place], injury: Injury) -> None:
        """Do it, as one instant. Sets ``injury.detail``."""
        cluster = self.cluster
        place = places[0] if places else None
        match action.kind:
            case "donor":
                injury.detail = "which gives the state to a newcomer"
                self._mend_lines(action)
                places[0].data.cut(silent=False)  # else this system's kernel would still deliver what it took
                await cluster.kill(places[0])
            case "kill" | "two":
                await asyncio.gather(*(cluster.kill(each) for each in places))
            case "seed":
                await cluster.kill_seed()
            case "freeze" if place is not None:
                injury.detail = f"for {action.lasts_s:.1f} s"
                cluster.freeze(place)
            case "cut" if place is not None:
                where, how = action.cut.split()
                injury.kind = f"cut {action.cut}"
                injury.detail = f"for {action.lasts_s:.1f} s"
                for link in (place.data, place.control) if where == "all" else (getattr(place, _LINKS[where]),):
                    link.cut(silent=how == "silent")
            case "slow" if place is not None:
                delay_ms = 1e3 * action.delay_s
                injury.detail = f"to {action.rate_bps / 1e6:.2f} MB/s, {delay_ms:.0f} ms, for {action.lasts_s:.1f} s"
                place.data.slow(action.rate_bps, action.delay_s)
            case "corrupt" if place is not None:
                injury.detail = f"one byte in the next {action.skip_bytes + 1} on the ring"
                place.data.damage(action.skip_bytes)
            case "disk" if place is not None:
                limit_bytes = cluster.fill_disk(place)
                injury.detail = f"no file past {limit_bytes} bytes, for {action.lasts_s:.1f} s"
                await self._ask_for_checkpoint()
            case "leave" if place is not None:
                await cluster.leave(place, LEAVE_S)
            case "join" if place is not None:
                await cluster.start_worker(place.number)

    async def _ask_for_checkpoint(self) -> None:
        """So that something is written in time; where the job stands still just now, the next boundary does."""
        try:
            await self.observer.ask("jobs.save", job=self.observer.job.id if self.observer.job else "")
        except P2PTrainError as problem:
            self.console.event("info", f"no checkpoint was asked for: {problem.message}")

    async def _mend(self, action: Action, places: list[Place], injury: Injury) -> None:
        """Wait as long as it lasts, then make it good."""
        cluster, observer = self.cluster, self.observer
        if action.kind == "join":
            await self._visit(action, places[0], injury)
            return
        damaged = places[0].data.damaged if places else 0
        await self._pause(action.lasts_s)
        if self.stop.is_set():
            return  # the whole cluster is let go
        for place in places:
            if action.kind in ("kill", "two", "leave", DONOR):
                began = now()
                await cluster.start_worker(place.number)
                injury.figures.setdefault("restarted_s", began - injury.at_s)
            cluster.thaw(place)
            if action.kind == "corrupt" and place.data.damaged == damaged:
                injury.detail += "; nothing came by"
            place.data.mend()
            place.control.mend()
            if action.kind == "disk":
                cluster.empty_disk(place)
        if action.kind == DONOR and await self._let_in(cluster.places[cluster.workers + 1], injury):
            peer = observer.id_of(cluster.places[cluster.workers + 1].name)
            views = (view.at_s for view in observer.views if view.at_s > injury.at_s and peer in view.members)
            injury.figures["newcomer in"] = next(views, now()) - injury.at_s
        if action.kind == "seed":
            before = observer.step
            observer.peers.clear()
            await cluster.start_seed()
            began = now()
            injury.figures["listens again"] = began - injury.at_s - action.lasts_s
            running = {each.name for each in cluster.places.values() if each.child is not None and not each.frozen}
            if await observer.until(lambda: self._registered(running), PATIENCE_S):
                injury.figures["found again"] = now() - began
            await observer.until(lambda: self._over or (bool(observer.members) and observer.step > before), PATIENCE_S)
            injury.figures["next step told"] = now() - began
            injury.figures["steps/s meanwhile"] = (observer.step - injury.step) / (now() - injury.at_s)
            if self.alone and not self._over:
                await self._newcomer(injury)

    def _registered(self, names: Collection[str]) -> bool:
        peers = self.observer.peers
        return self._over or all(name in peers and peers[name].state != "lost" for name in names)

    async def _visit(self, action: Action, place: Place, injury: Injury) -> None:
        """An extra worker, until it was a member for a while, and left."""
        if await self._until_member(place, injury, "became a member"):
            await self._pause(action.lasts_s)
        if place.child is not None:
            await self.cluster.leave(place, LEAVE_S)

    async def _newcomer(self, injury: Injury) -> None:
        """A worker that the restarted seed has never seen in its life: how soon it is let in."""
        place = await self._extra()
        try:
            await self.cluster.start_worker(place.number)
            injury.excused |= {self.observer.id_of(place.name)} - {""}
            await self._until_member(place, injury, "newcomer in")
            if place.child is not None:
                injury.excused |= {self.observer.id_of(place.name)}
                await self.cluster.leave(place, LEAVE_S)
        finally:
            place.busy = False

    async def _until_member(self, place: Place, injury: Injury, label: str) -> bool:
        """Whether it came to be a member. Notes when it had built its model, how much later it was one (``label``), and
        the ring's pause for it."""
        observer, began = self.observer, now()
        ready = {"waiting", "healing", "training", "held"}

        def state() -> str:
            return observer.peers[place.name].state if place.name in observer.peers else ""

        await observer.until(lambda: self._over or place.gone or self._is_in(place) or state() in ready, PATIENCE_S)
        built = now()
        injury.figures["built"] = built - began
        if not await self._let_in(place, injury):
            return False
        injury.figures[label] = now() - built
        await self._note_pause(injury, observer.generation, "pause to let it in")
        return True

    async def _let_in(self, place: Place, injury: Injury) -> bool:
        """Whether an extra worker came to be a member."""
        await self.observer.until(lambda: self._over or place.gone or self._is_in(place), PATIENCE_S)
        if not self._is_in(place):
            if place.child is not None and not self._over:
                self.stuck.append(f"{place.name} was not let in within {PATIENCE_S:.0f} s")
            return False
        injury.excused |= {self.observer.id_of(place.name)}
        return True

    def _is_in(self, place: Place) -> bool:
        return self.observer.id_of(place.name) in self.observer.members

    async def _note_pause(self, injury: Injury, generation: int, label: str) -> None:
        """The figure ``label``: seconds without a step before the view."""
        rows = self.observer.rows
        if await self.observer.until(
            lambda: self._over or (bool(rows) and rows[-1].generation >= generation), PATIENCE_S
        ):
            pause_s = pause_before(generation, rows[-_RECENT:])
            if pause_s is not None:
                injury.figures[label] = pause_s

    # ----------------------------------------------------------------------------------------------- in a transfer

    async def _in_a_transfer(self, action: Action, places: list[Place]) -> None:
        """An extra worker fetches the state, one who gives it dies, the extra one gets in all the same, and leaves."""
        extra, first_line = places[0], len(self.observer.told)
        injury: Injury | None = None
        try:
            for number in action.order:  # what the ring has open already is as fast as before
                self.cluster.places[number].data.slow(FETCH_BPS, 0.0, new=True)
            await self.cluster.start_worker(extra.number)
            begun = await self._told_of("fetching", extra, first_line)
            if begun is None:
                return
            await self._pause(action.share * self.fetch_s)
            victims = self._whole(action)
            if len(victims) < 2 or self._over:
                return
            victims[0].busy = True
            injury = await self._injure(action, victims[:1])
            if not self._over:
                await self._note_fetch(injury, extra, begun, first_line)
        finally:
            self._mend_lines(action)
            if extra.child is not None and not self._over:
                await self.cluster.leave(extra, LEAVE_S)
            if injury is not None:
                injury.until_s = now()  # the newcomer was to leave, too
            extra.busy = False
            self.observer.wake()

    def _mend_lines(self, action: Action) -> None:
        for number in action.order:
            self.cluster.places[number].data.mend()

    async def _told_of(self, kind: str, place: Place, first_line: int) -> Told | None:
        """The first such line of the diary by the worker of this place; None: it came to be a member without."""
        observer = self.observer

        def lines() -> list[Told]:
            peer = observer.id_of(place.name)
            return [told for told in observer.told[first_line:] if (told.event.kind, told.event.peer) == (kind, peer)]

        await observer.until(lambda: bool(lines()) or self._over or self._is_in(place) or not place.child, PATIENCE_S)
        return next(iter(lines()), None)

    async def _note_fetch(self, injury: Injury, extra: Place, begun: Told, first_line: int) -> None:
        """What the newcomer tells of its fetch. The next donor's moment is drawn from as long a time as this one took;
        where the donors had nobody to spare for once one of them was dead, from somewhat more."""
        observer = self.observer
        fetched = await self._told_of("fetched", extra, first_line)
        peer = observer.peers.get(extra.name)
        if fetched is None or peer is None:
            return
        later = (it.event for it in observer.told[first_line:] if it.event.peer == peer.id and it.at_s > injury.at_s)
        injury.fetch = fetch = Fetch(
            peer.fetched_bytes,
            peer.received_bytes,
            peer.lost_donors,
            donors=DONORS,
            begun=1 + sum(event.kind == "fetching" for event in later),
        )
        took_s = fetched.at_s - begun.at_s
        self.fetch_s = max(took_s, LONGER * self.fetch_s) if fetch.hit else took_s
        injury.figures["into the transfer"] = injury.at_s - begun.at_s
        where = "in the middle" if fetch.hit else "not in the middle"
        text = f"{where} of a transfer of {fetch.state_bytes / 1e6:.1f} MB, {fetch.twice_bytes / 1e6:.2f} MB came twice"
        self.console.event("info", f"fault {injury.number}: {text}")

    # ------------------------------------------------------------------------------------------------------- and then

    async def _recovery(self, injury: Injury, first_row: int) -> None:
        """Wait for the step that shows that it goes on, and tell."""
        observer = self.observer
        await observer.until(
            lambda: self._over or recovered(injury, observer.rows[first_row:], INTERVAL_S) is not None, PATIENCE_S
        )
        row = recovered(injury, observer.rows[first_row:], INTERVAL_S)
        if row is None:
            if not self._over:
                self.stuck.append(f"fault {injury.number} ({injury.kind}): no step within {PATIENCE_S:.0f} s")
            return
        injury.recovery_s = row.at_s - injury.at_s
        if injury.kind == "join":  # it was not there before: what counts is the pause that it caused
            injury.recovery_s = pause_before(row.generation, observer.rows[-_RECENT:])
        if injury.recovery_s is not None:
            self.console.event(
                "info",
                f"fault {injury.number}: step {row.step} in view {row.generation}, after {injury.recovery_s:.2f} s",
            )

    async def _until_whole(self, injury: Injury) -> None:
        """All whom it hit are members again."""
        observer, places = self.observer, self.cluster.places.values()

        def back() -> bool:
            hit = [place for place in places if place.name in injury.peers and place.number <= self.cluster.workers]
            return self._over or all(observer.id_of(place.name) in observer.members for place in hit)

        if not await observer.until(back, PATIENCE_S):
            self.stuck.append(f"{', '.join(injury.peers)}: no member {PATIENCE_S:.0f} s after fault {injury.number}")
            return
        injury.whole_s = now()
        if "restarted_s" in injury.figures:
            injury.figures["member again"] = injury.whole_s - injury.until_s
            await self._note_pause(injury, observer.generation, "pause to let it in")


_LINKS = {"ring": "data", "seed": "control"}
_RECENT = 64  # rows among which the last one of the view before is


def _told(injury: Injury) -> str:
    return " ".join(part for part in (injury.kind, " and ".join(injury.peers), injury.detail) if part)
