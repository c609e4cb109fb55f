"""The policies of the pool (``p2ptrain seed --pool``) on random loads: ``python -m tests.sim.pool_loads 20 8``.

The numbers are those of the loads and of the workers. The seed's planner plays them in virtual time.
"""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import dataclass, field, replace

from p2ptrain.cli.output import print_table
from p2ptrain.core.texts import human_duration
from ring.planning.matching import POLICIES, PoolTask, plan_pool

ROUND_S = 5.0
"""Time between two plans."""
MOST_S = 40_000.0


@dataclass(slots=True)
class Load:
    """One task of a load. A job has ``work_s``: seconds of a usual member. A served model or draft lasts ``work_s``.

    Attributes:
        arrives_at: seconds after the load begins. began_at, ended_at: once it has.
        members: member → when it has begun, or will have. paused_until: it stands still until then.
        used_s: time for which a served model or a draft had its members.
    """

    task: PoolTask
    arrives_at: float
    work_s: float
    done_s: float = 0.0
    began_at: float | None = None
    ended_at: float | None = None
    members: dict[str, float] = field(default_factory=dict)
    paused_until: float = 0.0
    used_s: float = 0.0

    def current(self, now: float) -> PoolTask:
        trains = self.task.kind == "train"
        pace = max(sum(self.task.strengths[key] for key in self.members), 1.0) if trains else 1.0
        floor = 1 if trains and self.began_at is not None else 0
        least = min(self.task.least, max(len(self.members), 1)) if floor else self.task.least
        settled = frozenset(member for member, since in self.members.items() if since <= now)
        return replace(self.task, members=frozenset(self.members), settled=settled, floor=floor, least=least,
                       left_s=(self.work_s - self.done_s) / pace)  # fmt: skip

    def play(self, now: float) -> None:
        """Let ``ROUND_S`` pass."""
        there = [member for member, since in self.members.items() if since <= now]
        trains = self.task.kind == "train"
        if len(there) >= (1 if trains and self.began_at is not None else self.task.least) and now >= self.paused_until:
            self.began_at = now if self.began_at is None else self.began_at
            self.used_s += ROUND_S
            self.done_s += ROUND_S * sum(self.task.strengths[member] for member in there) if trains else 0.0
        if not trains:
            self.done_s = now - self.arrives_at
        if self.done_s >= self.work_s:
            self.ended_at = now + ROUND_S


def make_load(seed: int, members: int) -> list[Load]:
    """Jobs, served models and drafts for ``members`` of different speeds and disks."""
    rng = random.Random(seed)
    names = [f"m{index}" for index in range(members)]
    speeds = {name: rng.choice([0.5, 1.0, 1.0, 2.0]) for name in names}
    loads = []
    for index in range(rng.randint(5, 8)):
        kind = rng.choice(["train", "train", "train", "serve", "draft"]) if index > 1 else "train"
        start_s = {name: rng.choice([10.0, 10.0, 60.0]) for name in names}  # some lack the files
        strengths = {name: speed * rng.choice([1.0, 1.0, 0.7]) for name, speed in speeds.items()}
        able = {name: value for name, value in strengths.items() if kind != "draft" or rng.random() < 0.5}
        least = 1 if kind == "draft" else rng.randint(1, max(2, members // 3))
        most = least + rng.randint(2, members) if kind == "train" else least
        task = PoolTask(str(index), kind, str(index), rng.choice([1.0, 1.0, 1.0, 3.0]), least, most, frozenset(), able,
                        start_s, pause_s=rng.choice([2.0, 10.0]))  # fmt: skip
        work_s = rng.uniform(300, 3000) * (members / 3 if kind == "train" else 1.0)
        loads.append(Load(task, rng.uniform(0, 1500) if index else 0.0, work_s))
    order = {"train": 0, "serve": 1, "draft": 2}
    return sorted(loads, key=lambda load: (order[load.task.kind], load.arrives_at))


def play_load(policy: str, seed: int, members: int = 8) -> dict[str, float]:
    """Play the load of ``seed`` to its end.

    Returns figures: ``completion_s`` from a job's creation to its end, by weight; ``wait_s`` to its first step;
    ``makespan_s`` until all jobs are done; ``served`` and ``drafted``: the share of the time for which models had
    their workers, and drafts theirs (missing without any); ``moves``.
    """
    loads, names, now, moves = make_load(seed, members), [f"m{index}" for index in range(members)], 0.0, 0
    while any(load.ended_at is None for load in loads) and now < MOST_S:
        here = {load.task.id: load for load in loads if load.arrives_at <= now and load.ended_at is None}
        placed = {member for load in here.values() for member in load.members}
        tasks = [load.current(now) for load in here.values()]
        for move in plan_pool(policy, tasks, [name for name in names if name not in placed]):
            target = here[move.task]
            if move.source:
                moves += 1
                del here[move.source].members[move.member]
                here[move.source].paused_until = now + here[move.source].task.pause_s
            target.members[move.member] = now + target.task.start_s[move.member]
            if target.began_at is not None:
                target.paused_until = now + target.task.pause_s
        for load in here.values():
            load.play(now)
            if load.ended_at is not None:
                load.members.clear()
        now += ROUND_S
    jobs = [(load.task.weight, load.arrives_at, load.began_at or MOST_S, load.ended_at or MOST_S)
            for load in loads if load.task.kind == "train"]  # fmt: skip
    figures = {
        "completion_s": sum(job[0] * (job[3] - job[1]) for job in jobs) / sum(job[0] for job in jobs),
        "wait_s": statistics.mean(job[2] - job[1] for job in jobs),
        "makespan_s": max(job[3] for job in jobs),
        "moves": float(moves),
    }
    for kind, name in (("serve", "served"), ("draft", "drafted")):
        if some := [load for load in loads if load.task.kind == kind]:
            figures[name] = sum(load.used_s for load in some) / sum(load.work_s for load in some)
    return figures


def compare_policies(loads: int, members: int) -> dict[str, dict[str, float]]:
    """Policy → the means of the figures over the same loads."""
    found = dict[str, dict[str, float]]()
    for policy in POLICIES:
        figures = [play_load(policy, seed, members) for seed in range(loads)]
        names = sorted({name for item in figures for name in item})
        found[policy] = {name: statistics.mean(item[name] for item in figures if name in item) for name in names}
    return found


if __name__ == "__main__":
    heads = ["POLICY", "JOB DONE AFTER", "ALL DONE AFTER", "WAITED", "SERVED", "DRAFTED", "MOVES"]
    rows = [
        [policy, *(human_duration(item[key]) for key in ("completion_s", "makespan_s", "wait_s")),
         *(f"{item.get(key, 0.0):.0%}" for key in ("served", "drafted")), f"{item['moves']:.1f}"]
        for policy, item in compare_policies(*map(int, sys.argv[1:])).items()
    ]  # fmt: skip
    print_table(heads, rows, right=heads[1:])
    print("means of the loads; served, drafted: share of the time in which a model had its workers, its drafter")
