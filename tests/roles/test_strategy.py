"""Gradients that go into the ring while they are still being made: order, equal bits, breaks, codecs."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import Plugins, Profile
from p2ptrain.core.training import Applied, OnFinal
from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.stand_in import StandInEngine
from ring.session import RingSession
from roles.compute_thread import ComputeThread
from roles.snapshots import CHUNK_BYTES, digest_of
from roles.strategies.interface import ConnectPeers, Contribution
from roles.strategies.strategy import Strategy
from roles.strategies.sync import GradientSum, MicroBatches
from tests.ring.local import RingMember, local_ring

MICRO_BATCHES = 4
PATIENCE_S = 20.0
PROFILE = Profile.model_validate({"job": {"workers": 1}, "batch": {"micro_batches": MICRO_BATCHES}})


class Pieces(StandInEngine):
    """Makes its gradients front to back in 16 pieces, as a backward pass does.

    Args:
        on_front: called on the compute thread after the strategy was told that so many elements are final.
    """

    def __init__(
        self, numel: int = 1000, vectors: int = 7, on_front: Callable[[int], None] = lambda numel: None
    ) -> None:
        super().__init__(PROFILE, numel=numel)
        self.codec_numel = numel - vectors
        self._on_front = on_front
        self.whole = threading.Event()

    @staticmethod
    def gradient(step: int, index: int, numel: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng([step, index]).standard_normal(numel).astype(np.float32)

    def micro_batch(self, step: int, index: int, on_final: OnFinal | None = None) -> None:
        gradient = self.gradient(step, index, self.reduce_buffer.size)
        cuts = [gradient.size * number // 16 for number in range(17)]
        for start, stop in pairwise(cuts):
            self.reduce_buffer[start:stop] += gradient[start:stop]
            if on_final is not None:
                on_final(stop)
                self._on_front(stop)
        self.whole.set()


_threads: list[ComputeThread] = []


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    while _threads:
        _threads.pop().close()


def summing(engine: Any, compute: ComputeThread, bucket_bytes: int) -> Strategy:
    work = MicroBatches(engine, compute, lambda: None)
    return Strategy(engine, compute, bucket_bytes, work=work, exchange=GradientSum(engine, Plugins()))


class Member:
    """A strategy, its engine and its place in a ring."""

    def __init__(self, session: RingSession, engine: Any, bucket_bytes: int = 1024) -> None:
        self.engine = engine
        _threads.append(ComputeThread())
        self.strategy = summing(engine, _threads[-1], bucket_bytes)
        self.session, self._begun = session, None

    async def step(self, number: int, first: int, count: int) -> Contribution:
        if self.session is not self._begun:
            self._begun = self.session
            await self.strategy.begin_view(self.session, cast(ConnectPeers, None))
        await self.strategy.compute(number, first, count, patience_s=PATIENCE_S)
        return await self.strategy.reduce()


def submissions(session: RingSession) -> list[tuple[int, int]]:
    """Where each array that is submitted from now on begins in its buffer, and its size."""
    seen: list[tuple[int, int]] = []
    submit = session.submit

    def recording(buffer: Any, *args: Any, **kwargs: Any) -> asyncio.Future[None]:
        base = buffer.base if buffer.base is not None else buffer
        seen.append(((buffer.ctypes.data - base.ctypes.data) // buffer.itemsize, buffer.size))
        return submit(buffer, *args, **kwargs)

    session.submit = recording  # type: ignore[method-assign]
    return seen


def use_codec(members: list[RingMember], codec: str) -> None:
    for member in members:
        member.session.view = replace(member.session.view, codec=codec)


async def everyone(members: list[Member], step: int, shares: list[tuple[int, int]]) -> list[Contribution]:
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        tasks = [group.create_task(member.step(step, *share)) for member, share in zip(members, shares, strict=True)]
    return [task.result() for task in tasks]


@contextmanager
def nothing_unheard() -> Iterator[None]:
    """No error may end where nobody looks: neither a callback's nor that of a future that was forgotten."""
    unheard: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    yield
    gc.collect()
    assert unheard == []


# --------------------------------------------------------------------------------------------------------------- order


async def test_buckets_are_submitted_before_the_backward_pass_has_ended() -> None:
    """Each piece of the backward pass begins only when every bucket that is whole by then has been submitted."""
    async with local_ring(2, MemoryNetwork()) as ring:
        seen = submissions(ring[0].session)
        submitted = threading.Condition()
        watched = ring[0].session.submit

        def submit(*args: Any, **kwargs: Any) -> asyncio.Future[None]:
            with submitted:
                submitted.notify_all()
                return watched(*args, **kwargs)

        ring[0].session.submit = submit  # type: ignore[method-assign]
        story: list[int] = []

        def on_front(numel: int) -> None:
            whole = sum(stop <= numel for _, stop in first.strategy._bounds(0))
            with submitted:
                assert submitted.wait_for(lambda: len(seen) >= whole, 20), "the bucket waited for the pass to end"
            story.append(len(seen))

        first = Member(ring[0].session, Pieces(on_front=on_front))
        second = Member(ring[1].session, Pieces())
        await everyone([first, second], 0, [(0, 2), (2, 2)])
    assert story == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 5]
    assert seen == [(0, 240), (240, 256), (496, 240), (736, 257), (993, 8)]


@pytest.mark.parametrize("shares", [[(0, 4), (4, 0), (4, 0)], [(0, 1), (1, 3), (4, 0)], [(0, 2), (2, 1), (3, 1)]])
async def test_all_members_submit_the_same_whatever_their_shares(shares: list[tuple[int, int]]) -> None:
    async with local_ring(3, MemoryNetwork()) as ring:
        members = [Member(member.session, Pieces()) for member in ring]
        seen = [submissions(member.session) for member in ring]
        said = await everyone(members, 3, shares)
        assert seen[0] == seen[1] == seen[2] != []
        assert len({one.digest for one in said}) == 1
        buffers = [member.engine.reduce_buffer for member in members]
        assert buffers[0].tobytes() == buffers[1].tobytes() == buffers[2].tobytes()
        whole = sum(Pieces.gradient(3, index, 1001).astype(np.float64) for index in range(4))
        np.testing.assert_allclose(buffers[0], whole, rtol=1e-5, atol=1e-5)
        total = float(np.sum(buffers[0][:-1].astype(np.float64) ** 2))
        assert len({one.part for one in said}) == 1
        assert said[0].part == pytest.approx(total, rel=1e-12)


@settings(max_examples=25)
@given(
    numel=st.integers(8, 3000),
    vectors=st.integers(0, 8),
    bucket_bytes=st.sampled_from([0, 1024, 2048, 5120]),
    cut=st.integers(0, MICRO_BATCHES),
    sub_chunk_bytes=st.sampled_from([64, 1024]),
)
def test_two_members_get_the_bits_of_the_plain_sum(
    numel: int, vectors: int, bucket_bytes: int, cut: int, sub_chunk_bytes: int
) -> None:
    """a + b is b + a, so for two members it does not matter whose chunk it is; for more, the last bit may."""

    async def run() -> None:
        async with local_ring(2, MemoryNetwork(), sub_chunk_bytes=sub_chunk_bytes) as ring:
            members = [Member(member.session, Pieces(numel, vectors), bucket_bytes) for member in ring]
            shares = [(0, cut), (cut, MICRO_BATCHES - cut)]
            await everyone(members, 5, shares)
            own = []
            for first, count in shares:
                alone = Pieces(numel, vectors)
                for index in range(first, first + count):
                    alone.micro_batch(5, index)
                own.append(alone.reduce_buffer)
            plain = own[0] + own[1]
            assert all(member.engine.reduce_buffer.tobytes() == plain.tobytes() for member in members)

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------------------ measures


class Measured(Pieces):
    """Counts the elements of which each kind of norm was taken. ``first``: of a sum."""

    def __init__(self, numel: int, on_front: Callable[[int], None] = lambda numel: None) -> None:
        super().__init__(numel, on_front=on_front)
        self.contributed = self.summed = 0
        self.first, self.is_own = threading.Event(), False

    def contributed_square_sum(self, start: int, stop: int) -> float:
        self.contributed += stop - start
        return super().contributed_square_sum(start, stop)

    def partial_square_sum(self, start: int, stop: int) -> float:
        self.summed += stop - start
        self.first.set()
        return super().partial_square_sum(start, stop)

    def apply(self, step: int, square_sum: float, *, is_own: bool = False) -> Applied:
        self.is_own = is_own
        return super().apply(step, square_sum, is_own=is_own)


async def test_sums_are_measured_once_and_while_later_gradients_are_computed() -> None:
    numel = 3 * CHUNK_BYTES // 4 + 5

    def on_front(final: int) -> None:
        if final > numel * 3 // 4:
            assert first.engine.first.wait(20), "the sums waited for the pass to end"

    async with local_ring(2, MemoryNetwork(), sub_chunk_bytes=1 << 17) as ring:
        first = Member(ring[0].session, Measured(numel, on_front), CHUNK_BYTES // 2)
        second = Member(ring[1].session, Measured(numel), CHUNK_BYTES // 2)
        said = await everyone([first, second], 0, [(0, 2), (2, 2)])
        for member, one in zip((first, second), said, strict=True):
            buffer = member.engine.reduce_buffer
            assert one.digest == digest_of(memoryview(buffer).cast("B")) == said[0].digest
            assert (member.engine.contributed, member.engine.summed) == (buffer.size, buffer.size)
            await member.strategy.commit(0, one.part)
            assert not member.engine.is_own


async def test_a_member_that_is_alone_measures_its_contribution_only() -> None:
    async with local_ring(1, MemoryNetwork()) as ring:
        member = Member(ring[0].session, Measured(3 * CHUNK_BYTES // 4), CHUNK_BYTES)
        (said,) = await everyone([member], 0, [(0, 4)])
        await member.strategy.commit(0, said.part)
    engine = member.engine
    assert (engine.contributed, engine.summed, engine.is_own) == (engine.reduce_buffer.size, 0, True)
    assert said.part == said.own == pytest.approx(float(np.sum(engine.reduce_buffer[:-1].astype(np.float64) ** 2)))
    assert said.digest == digest_of(memoryview(engine.reduce_buffer).cast("B"))


# -------------------------------------------------------------------------------------------------------------- breaks


async def test_a_break_while_computing_leaves_nothing_behind_and_the_step_is_done_again() -> None:
    go = threading.Event()
    held = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_front(numel: int) -> None:
        if not go.is_set() and numel > 500:
            loop.call_soon_threadsafe(held.set)
            assert go.wait(20)

    engine = Pieces(on_front=on_front)
    with nothing_unheard():
        async with local_ring(2, MemoryNetwork()) as ring:
            use_codec(ring, "int4")
            member = Member(ring[0].session, engine)
            computing = asyncio.create_task(member.step(0, 0, 4))
            await held.wait()
            ring[1].die()
            await ring[0].session.broken
            computing.cancel()
            await asyncio.gather(computing, return_exceptions=True)
            ring[0].session.close()
        del computing
        async with local_ring(2, MemoryNetwork()) as ring:
            use_codec(ring, "int4")
            member.session, other = ring[0].session, Member(ring[1].session, Pieces())
            engine.whole.clear()
            again = asyncio.create_task(everyone([member, other], 0, [(0, 2), (2, 2)]))
            go.set()  # only now the pass of the step that was given up goes on, and tells of more buckets
            assert len({one.digest for one in await again}) == 1
        async with local_ring(2, MemoryNetwork()) as ring:
            use_codec(ring, "int4")
            fresh = [Member(local.session, Pieces()) for local in ring]
            await everyone(fresh, 0, [(0, 2), (2, 2)])
        assert fresh[0].engine.reduce_buffer.tobytes() == engine.reduce_buffer.tobytes()


# -------------------------------------------------------------------------------------------------------------- codecs


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "topk"])
async def test_a_lossy_codec_gives_all_members_the_same_bits_and_leaves_vectors_and_the_loss_alone(codec: str) -> None:
    async with local_ring(3, MemoryNetwork(), sub_chunk_bytes=4096) as ring:
        use_codec(ring, codec)
        members = [Member(local.session, Pieces(4000, vectors=600), 4096) for local in ring]
        said = await everyone(members, 1, [(0, 2), (2, 1), (3, 1)])
        assert len({one.digest for one in said}) == 1
        assert len({member.engine.reduce_buffer.tobytes() for member in members}) == 1
        parts = [Pieces.gradient(1, index, 4001) for index in range(4)]
        plain = (parts[0] + parts[1]) + parts[2] + parts[3]
        reduced = members[0].engine.reduce_buffer
        np.testing.assert_allclose(reduced[3400:], plain[3400:], rtol=1e-6, atol=1e-6)
        error = np.linalg.norm(reduced - plain) / np.linalg.norm(plain)
        assert 0 < error < {"bf16": 0.01, "int8": 0.03, "int4": 0.3, "topk": 1.0}[codec]


async def test_what_the_codec_left_out_goes_out_later_and_is_dropped_with_the_view() -> None:
    """Over many steps with the same gradients the mean of the sums is the sum; without feedback it would not be."""
    plain = sum(Pieces.gradient(0, index, 4001) for index in range(4))[:3993]

    async def sums(ring: list[RingMember], members: list[Member], rounds: int) -> Any:
        use_codec(ring, "int4")
        for member, local in zip(members, ring, strict=True):
            member.session = local.session
        total = np.zeros(3993)
        for _ in range(rounds):
            await everyone(members, 0, [(0, 2), (2, 2)])
            total += members[0].engine.reduce_buffer[:3993]
        return total / rounds

    async with local_ring(2, MemoryNetwork(), sub_chunk_bytes=4096) as ring:
        members = [Member(local.session, Pieces(4000), 4096) for local in ring]
        once = await sums(ring, members, 1)
        mean = await sums(ring, members, 30)
    error, mean_error = (float(np.linalg.norm(value - plain) / np.linalg.norm(plain)) for value in (once, mean))
    assert mean_error < error / 5
    async with local_ring(2, MemoryNetwork(), sub_chunk_bytes=4096) as ring:
        assert np.array_equal(await sums(ring, members, 1), once), "something of the last view was left"
