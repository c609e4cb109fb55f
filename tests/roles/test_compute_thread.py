"""The one thread that computes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from p2ptrain.core.threads import RealThreads
from roles.compute_thread import ComputeFailed, ComputeThread, translate_error


async def test_calls_run_in_order_on_one_other_thread() -> None:
    thread = ComputeThread()
    seen: list[int] = []
    threads = await asyncio.gather(
        *(thread.run(lambda n=n: (seen.append(n), threading.get_ident())[1]) for n in range(5))
    )  # type: ignore[misc]
    assert seen == [0, 1, 2, 3, 4]
    assert set(threads) != {threading.get_ident()}
    assert len(set(threads)) == 1
    thread.close()


async def test_an_error_reaches_the_caller_and_the_thread_goes_on() -> None:
    thread = ComputeThread()
    with pytest.raises(ComputeFailed, match="ZeroDivisionError while computing") as caught:
        await thread.run(lambda: 1 // 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert await thread.run(lambda: 7) == 7
    thread.close()


async def test_a_cancelled_call_that_has_not_begun_is_skipped_and_one_that_has_runs_out() -> None:
    thread = ComputeThread()
    begun, let_go = threading.Event(), threading.Event()
    ran: list[str] = []

    def first() -> None:
        begun.set()
        let_go.wait()
        ran.append("first")

    running = asyncio.create_task(thread.run(first))
    waiting = asyncio.create_task(thread.run(ran.append, "second"))
    await asyncio.to_thread(begun.wait)
    for task in (running, waiting):
        task.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    let_go.set()
    await thread.run(ran.append, "third")
    assert ran == ["first", "third"]
    thread.close()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")])
def test_too_little_memory_names_what_to_lower(error: BaseException) -> None:
    assert "micro_batch_sequences" in translate_error(error).remedy


async def test_a_straggler_takes_so_many_times_as_long_to_compute() -> None:
    at_s, slept = [10.0], list[float]()

    def call(seconds: float) -> str:
        at_s[0] += seconds
        if not seconds:
            raise ValueError("fails at once")
        return "done"

    slow = RealThreads(5.0, sleep=slept.append, clock=lambda: at_s[0])
    thread, disk = ComputeThread(slow), slow.start("disk")
    assert await thread.run(call, 2.0) == "done"
    with pytest.raises(ComputeFailed, match="fails at once"):
        await thread.run(call, 0.0)
    assert await disk.submit(lambda: call(3.0)) == "done"
    assert slept == [8.0, 0.0]
    thread.close()
    disk.close()
