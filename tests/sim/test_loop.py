"""Processes on one loop: frozen, thawed, killed; and threads that take virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from p2ptrain.lab.sim.machine import Process, SimLoop, SimThreads


def run(main: Callable[[SimLoop], Coroutine[Any, Any, None]]) -> None:
    loop = SimLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main(loop))


async def tick(seen: list[float]) -> None:
    while True:
        seen.append(asyncio.get_running_loop().time())
        await asyncio.sleep(1)


def test_a_frozen_process_does_nothing_and_catches_up() -> None:
    async def main(loop: SimLoop) -> None:
        frozen, free = Process("a"), Process("b")
        seen: dict[Process, list[float]] = {frozen: [], free: []}
        for process, times in seen.items():
            loop.start(process, tick(times))
        await asyncio.sleep(1.5)
        frozen.frozen = True
        await asyncio.sleep(3)
        assert (seen[frozen], seen[free]) == ([0, 1], [0, 1, 2, 3, 4])
        loop.thaw(frozen)
        await asyncio.sleep(1.2)
        assert seen[frozen] == [0, 1, 4.5, 5.5]
        loop.kill(frozen)
        loop.kill(free)

    run(main)


def test_a_killed_process_is_unwound_and_its_children_with_it() -> None:
    async def main(loop: SimLoop) -> None:
        process, ended = Process("a"), []

        async def child() -> None:
            try:
                await asyncio.sleep(99)
            finally:
                ended.append("child")

        async def parent() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(child())

        task = loop.start(process, parent())
        await asyncio.sleep(1)
        loop.kill(process)
        await asyncio.wait([task])
        assert (ended, process.alive, loop.time()) == (["child"], False, 1)

    run(main)


def test_calls_of_a_thread_follow_each_other_and_take_time() -> None:
    async def main(loop: SimLoop) -> None:
        process, done = Process("a"), []
        thread = SimThreads(process, random.Random(1), 1.0).start("compute")

        async def work(number: int) -> None:
            await thread.submit(lambda: done.append(number))

        began = loop.time()
        await asyncio.gather(*(work(number) for number in range(4)))
        assert done == [0, 1, 2, 3]
        assert 2.0 <= loop.time() - began <= 6.0
        cancelled = [asyncio.create_task(work(number)) for number in (4, 5)]
        await asyncio.sleep(0)
        cancelled[1].cancel()  # it has not begun
        await asyncio.wait(cancelled)
        assert done == [0, 1, 2, 3, 4]
        process.alive = False
        assert thread.submit(lambda: done.append(6)).cancelled()

    run(main)


def test_order_of_tasks_and_futures_in_sets_does_not_depend_on_their_addresses() -> None:
    orders: list[list[int]] = []

    async def main(loop: SimLoop) -> None:
        made = [*(asyncio.ensure_future(asyncio.sleep(0)) for _ in range(3)), loop.create_future()]
        orders.append([made.index(it) for it in {*made}])

    for _ in range(3):
        run(main)
    assert orders == [[0, 1, 2, 3]] * 3
