"""Which member of the pool does which task. Pure.

Tasks are jobs, served models and drafts for them. Three policies:

``matching``  Places are apportioned to the tasks: first the fewest that each needs, the heaviest task first; then one
              by one to the task with the largest weight / (places + 1), as seats in a parliament are (D'Hondt). Members
              and tasks are matched by deferred acceptance: Gale and Shapley, "College Admissions and the Stability of
              Marriage" (1962). A task ranks members by strength. A member ranks tasks by its strength there, less the
              time until it has begun.
``score``     Each member alone takes the task to whose utility it adds most.
``fifo``      A free member takes the first task that has room. Nobody is moved.

The utility of a task that has its fewest members is ``weight * (need + log(1 + sum of strengths))``, else 0. The
logarithm shares members in proportion to weights; ``NEEDS`` has a worker go from drafts to a served model, and from
both to a job that needs it. A member that has a task is moved only if that repays: what the utilities gain within the
horizon must exceed what is lost while tasks stand still and movers load. So moves end: each raises the utilities' sum.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

POLICIES = ("matching", "score", "fifo")
NEEDS = {"train": 2.0, "serve": 1.0, "draft": 0.0}
"""Kind of a task → what it adds to the utility that the task has what it needs."""
HORIZON_S = 600.0
"""A move must repay within this time: nobody knows for longer who is here and what is asked for."""


Rank: TypeAlias = tuple[float, int, str]


@dataclass(frozen=True, slots=True)
class PoolTask:
    """A task that wants members. Among equal tasks the first one of a list comes first.

    Attributes:
        kind: a key of ``NEEDS``. name: for people.
        least, most: members that it needs, and that it can use. unit: it uses whole multiples of so many.
        members: those that have it now. settled: those of them that have begun. fixed: those that cannot be moved.
        floor: so many members stay.
        strengths: member → its worth for the task, 1 for a usual one; who is not in it cannot do the task.
        start_s: member → time until it has begun; missing: 0, as for those that are there.
        pause_s: the task stands still so long when one begins there, or a settled one leaves.
        left_s: time until it ends; inf: not known.
    """

    id: str
    kind: str
    name: str
    weight: float
    least: int
    most: int
    members: frozenset[str]
    strengths: Mapping[str, float]
    start_s: Mapping[str, float]
    unit: int = 1
    settled: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    floor: int = 0
    pause_s: float = 0.0
    left_s: float = math.inf

    def utility(self, members: Collection[str]) -> float:
        """What these members achieve, in units of the weight."""
        count = len(members) // self.unit * self.unit
        if count < max(self.least, 1):
            return 0.0
        strength = sum(self.strengths.get(member, 1.0) for member in members)
        return self.weight * (NEEDS[self.kind] + math.log1p(strength * count / len(members)))

    def begins_in_s(self, member: str) -> float:
        return 0.0 if member in self.members else self.start_s.get(member, 0.0)

    def fit(self, member: str) -> float:
        """The member's strength there, less the share of the horizon until it has begun."""
        return self.strengths[member] * (1 - min(self.begins_in_s(member) / HORIZON_S, 1.0))

    def rank(self, member: str) -> Rank:
        """Greater for a member that the task prefers."""
        return self.strengths[member], (member in self.members) + (member in self.settled), member


@dataclass(frozen=True, slots=True)
class PoolMove:
    """A member gets a task. ``source``: the task that it leaves; empty: it had none. ``gain``: of the sum of all
    utilities, as a share of it. ``cost_s``: time until it has begun, and for which tasks stand still."""

    member: str
    task: str
    source: str = ""
    gain: float = 0.0
    cost_s: float = 0.0


def match_stably(
    wishes: Mapping[str, Sequence[str]], ranks: Mapping[str, Mapping[str, Rank]],
    places: Mapping[str, int],
) -> dict[str, str]:  # fmt: skip
    """Deferred acceptance with capacities. Returns member → task, without members that no wished-for task takes.

    No member and task prefer each other to what they get, and no other such matching is better for any member.

    Args:
        wishes: member → the tasks that it can do, the best first. ranks: task → member → greater for a better one.
    """
    held: dict[str, list[tuple[Rank, str]]] = {task: [] for task in places}  # heaps, the worst first
    rest = {member: iter(tasks) for member, tasks in wishes.items()}
    waiting = sorted(rest, reverse=True)
    while waiting:
        member = waiting.pop()
        task = next((task for task in rest[member] if places.get(task, 0) > 0 and member in ranks[task]), None)
        if task is None:
            continue
        heapq.heappush(held[task], (ranks[task][member], member))
        if len(held[task]) > places[task]:
            waiting.append(heapq.heappop(held[task])[1])
    return {member: task for task, heap in held.items() for _, member in heap}


def apportion(
    tasks: Sequence[PoolTask], free: Collection[str], placed: Mapping[str, Collection[str]]
) -> dict[str, int]:
    """The number of places of each task: for the members that it has by ``placed``, and for some of the ``free``."""
    able = {task.id: len(placed[task.id]) + sum(member in task.strengths for member in free) for task in tasks}
    places, left = {task.id: len(placed[task.id]) for task in tasks}, len(free)
    for task in sorted(tasks, key=lambda task: -task.weight):
        lacking = task.least - places[task.id]
        if 0 < lacking <= left and able[task.id] >= task.least:
            places[task.id] += lacking
            left -= lacking
    while True:
        room = {task.id: min(task.most, able[task.id]) - places[task.id] for task in tasks}
        growing = [task for task in tasks if task.unit <= min(room[task.id], left) and places[task.id] >= task.least]
        if not growing:
            return places
        best = max(growing, key=lambda task: task.weight * task.unit / (places[task.id] + task.unit))
        places[best.id] += best.unit
        left -= best.unit


def plan_pool(policy: str, tasks: Sequence[PoolTask], free: Sequence[str], *, moves: bool = True) -> list[PoolMove]:
    """Give tasks to the ``free`` members, in the order in which they came, and move others where that repays.

    ``moves``: whether members that have a task may be moved now.
    """
    planner = _Planner(tasks, free)
    if policy == "matching":
        if moves:
            planner.move(planner.match_all())
        planner.match_free()
    elif policy == "score":
        planner.add_best(moves=moves)
    planner.fill_up()
    return planner.moves


class _Planner:
    """One plan. ``placed``: task → members, as the plan is so far; ``free``: those without a task."""

    def __init__(self, tasks: Sequence[PoolTask], free: Iterable[str]) -> None:
        self.tasks = {task.id: task for task in tasks}
        self.placed = {task.id: set(task.members) for task in tasks}
        self.free = list(dict.fromkeys(free))
        self.moves: list[PoolMove] = []
        self._task_of = {member: task.id for task in tasks for member in task.members}

    def match_all(self) -> dict[str, str]:
        """The stable matching of all members, as if none had to begin anew."""
        staying = {task.id: set(task.fixed) for task in self.tasks.values()}
        for task in self.tasks.values():
            others = sorted(task.members - task.fixed, key=task.rank, reverse=True)
            staying[task.id].update(others[: max(0, task.floor - len(task.fixed))])
        there = {member for members in staying.values() for member in members}
        return self._match([*self.free, *(member for member in self._task_of if member not in there)], staying)

    def match_free(self) -> None:
        for member, task in sorted(self._match(self.free, self.placed).items()):
            self._place(PoolMove(member, task))

    def _match(self, members: Collection[str], staying: Mapping[str, Collection[str]]) -> dict[str, str]:
        tasks = list(self.tasks.values())
        places = apportion(tasks, members, staying)
        ranks = {task.id: {key: task.rank(key) for key in members if key in task.strengths} for task in tasks}
        wishes = {
            member: [task.id for task in sorted((task for task in tasks if member in task.strengths),
                                                key=lambda task: -task.fit(member))]  # stable: the first task first
            for member in members
        }  # fmt: skip
        return match_stably(wishes, ranks, {task: count - len(staying[task]) for task, count in places.items()})

    def add_best(self, *, moves: bool) -> None:
        """Give each member, one after the other, the task that it adds most to."""
        for member in sorted(self._task_of) if moves else ():
            if member not in self.tasks[self._task_of[member]].fixed and (best := self._best_for(member)) is not None:
                self.move({member: best.id})
        for member in list(self.free):
            if (best := self._best_for(member)) is not None:
                self._place(PoolMove(member, best.id))

    def _best_for(self, member: str) -> PoolTask | None:
        def added(task: PoolTask) -> float:
            others = self.placed[task.id] - {member}
            if len(others) + 1 < task.least:  # as if the others would come
                return task.weight * (NEEDS[task.kind] + math.log1p(task.least)) / task.least
            return task.utility(others | {member}) - task.utility(others)

        fit = [task for task in self.tasks.values() if member in task.strengths
               and (len(self.placed[task.id]) < task.most or member in self.placed[task.id])]  # fmt: skip
        return max(fit, key=added, default=None)

    def move(self, wanted: Mapping[str, str]) -> None:
        """Carry out the moves that ``wanted`` implies and that repay: all those to one task, or none of them."""
        for task in self.tasks.values():
            movers = {key for key, id in wanted.items() if id == task.id and self._task_of.get(key, id) != id}
            helpers = {key for key in self.free if wanted.get(key) == task.id}  # they come without a move
            if movers and len(self.placed[task.id] | movers | helpers) <= task.most:
                self._move_if_repaid(task, movers, helpers)

    def _move_if_repaid(self, task: PoolTask, movers: set[str], helpers: set[str]) -> None:
        sources = {self._task_of[member] for member in movers}
        left = {id: self.placed[id] - movers for id in sources}
        if any(len(left[id]) < self.tasks[id].floor for id in sources):
            return
        had = task.utility(self.placed[task.id] | helpers)
        gained = task.utility(self.placed[task.id] | helpers | movers) - had
        lost = sum(self.tasks[id].utility(self.placed[id]) - self.tasks[id].utility(left[id]) for id in sources)
        start_s = max(task.begins_in_s(member) for member in movers)
        horizon_s = min(HORIZON_S, task.left_s, *(self.tasks[id].left_s for id in sources))
        paused = [self.tasks[id] for id in sources if movers & self.tasks[id].settled]
        standstill = task.pause_s * had + sum(item.pause_s * item.utility(left[item.id]) for item in paused)
        is_equal = math.isclose(gained, lost, abs_tol=1e-9)  # but for rounding
        if is_equal or horizon_s * (gained - lost) <= start_s * gained + standstill:
            return
        total = sum(item.utility(self.placed[item.id]) for item in self.tasks.values())
        gain = (gained - lost) / total if total else 1.0
        cost_s = start_s + max([task.pause_s, *(item.pause_s for item in paused)])
        for member in sorted(movers):
            self._place(PoolMove(member, task.id, self._task_of[member], gain, cost_s))
        for member in sorted(helpers):
            self._place(PoolMove(member, task.id))

    def fill_up(self) -> None:
        """Give each member that is still free the first task that has room: it waits there for others."""
        for member in list(self.free):
            fit = (task for task in self.tasks.values() if member in task.strengths)
            if task := next((task for task in fit if len(self.placed[task.id]) < task.most), None):
                self._place(PoolMove(member, task.id))

    def _place(self, move: PoolMove) -> None:
        if move.source:
            self.placed[move.source].discard(move.member)
        else:
            self.free.remove(move.member)
        self.placed[move.task].add(move.member)
        self._task_of[move.member] = move.task
        self.moves.append(move)
