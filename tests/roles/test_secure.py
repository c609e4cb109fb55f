"""Secure aggregation: masks that cancel exactly, look random, are used once, and survive a drop-out."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from configs.loader import load
from configs.schema import Conflict
from p2ptrain.compute.gradients import to_fixed, to_float
from p2ptrain.core.errors import ConfigError, JobFailed, ProtocolError
from p2ptrain.lab.memory import MemoryNetwork
from p2ptrain.lab.stand_in import StandInEngine
from ring.session import RingSession
from roles.compute_thread import ComputeThread
from roles.strategies.secure import MaskedSum, Masks, pair_keys_untrusted
from roles.strategies.strategy import Strategy
from roles.strategies.sync import MicroBatches
from tests.ring.local import local_ring
from tests.roles.in_process import Cluster, Gate
from tests.roles.test_cluster import at, done, small_profile, state_of
from tests.roles.test_strategy import PATIENCE_S, PROFILE

NUMEL = 50_000


def masks_of(members: int, label: str = "job 1 ") -> list[Masks]:
    secrets = [X25519PrivateKey.from_private_bytes(bytes([rank + 1]) * 32) for rank in range(members)]
    told = [secret.public_key().public_bytes_raw() for secret in secrets]
    return [Masks(rank, pair_keys_untrusted(secret, told, rank, label)) for rank, secret in enumerate(secrets)]


def masked(masks: Masks, values: np.ndarray, step: int) -> np.ndarray:
    copy = values.copy()
    masks.add(copy, step)
    return copy


def looks_random(values: np.ndarray) -> bool:
    """Chi-squared test of the bytes, and the correlation of neighbours."""
    counts = np.bincount(values.view(np.uint8), minlength=256)
    expected = values.nbytes / 256
    chi_squared = float(np.sum((counts - expected) ** 2) / expected)
    unit = values.view(np.uint64) / 2.0**64 - 0.5
    correlation = 12 * float(np.mean(unit[1:] * unit[:-1]))
    return abs(chi_squared - 255) < 6 * np.sqrt(2 * 255) and abs(correlation) < 6 / np.sqrt(len(values))


def contribution(seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0, 1e-2, NUMEL).astype(np.float32)
    return to_fixed(values, 3)[0]


def test_masks_cancel_in_the_sum_and_nowhere_before() -> None:
    members, values = masks_of(4), [contribution(seed) for seed in range(4)]
    assert not any(map(looks_random, values))
    sent = [masked(masks, own, 0) for masks, own in zip(members, values, strict=True)]
    assert np.array_equal(np.add.reduce(sent), np.add.reduce(values))
    for first in range(4):  # what passes each hop of the ring
        for many in (1, 2, 3):
            assert looks_random(np.add.reduce([sent[(first + each) % 4] for each in range(many)]))


def test_no_mask_covers_two_contributions() -> None:
    """The difference of two masked contributions is random, too: of two steps, two views, and two members."""
    first, second = contribution(1), contribution(2)
    mine, others = masks_of(3)[0], masks_of(3, "job 2 ")
    sent = masked(mine, first, 0)
    assert looks_random(sent - masked(mine, second, 1))
    assert looks_random(sent - masked(others[0], second, 0))
    assert looks_random(sent - masked(masks_of(3)[1], second, 0))
    for step in (0, 1):
        with pytest.raises(RuntimeError, match="used before"):
            mine.add(second.copy(), step)


def test_a_public_key_of_no_curve_point_is_refused() -> None:
    secret = X25519PrivateKey.from_private_bytes(b"\1" * 32)
    mine = secret.public_key().public_bytes_raw()
    for bad in (bytes(32), b"short"):
        with pytest.raises(ProtocolError, match="an invalid key for masks"):
            pair_keys_untrusted(secret, [mine, bad], 0, "job 1 ")


async def test_invalid_key_names_its_sender_before_it_is_passed_on() -> None:
    """c's key is no point of the curve: a has it first, and says so of c; b never gets it."""
    thread = ComputeThread()
    try:
        async with local_ring(3, MemoryNetwork()) as ring, asyncio.timeout(30):
            sessions = [place.session for place in ring]
            honest = [MaskedSum(StandInEngine(PROFILE), thread) for _ in range(2)]
            pairs = zip(honest, sessions[:2], strict=True)
            begun: list[Any] = [exchange.begin_view(session) for exchange, session in pairs]
            await asyncio.gather(*begun, sessions[2].all_gather(bytes(32)), return_exceptions=True)
            assert all(session.broken.done() for session in sessions[:2]), "nobody is named"
            assert {session.broken.result().suspect for session in sessions[:2]} == {"c"}
            assert sessions[0].broken.result().cause.message == "lost the left neighbour c: an invalid key for masks"
    finally:
        thread.close()


class Fixed(StandInEngine):
    """Contributes an array of its own."""

    def __init__(self, own: np.ndarray) -> None:
        super().__init__(PROFILE, numel=len(own) - 1)
        self.own = own

    def micro_batch(self, step: int, index: int, on_final: Any = None) -> None:
        self.reduce_buffer[:] = self.own


async def step_of(engines: list[Fixed]) -> tuple[list[Any], list[np.ndarray]]:
    """One step of a ring of ``engines``: contributions' summaries, and the arrays that members submitted."""
    submitted: list[np.ndarray] = []
    threads = [ComputeThread() for _ in engines]

    async def one(session: RingSession, engine: Fixed, thread: ComputeThread) -> Any:
        submit = session.submit

        def recording(buffer: Any, *args: Any, **kwargs: Any) -> Any:
            submitted.append(buffer.copy())
            return submit(buffer, *args, **kwargs)

        work = MicroBatches(engine, thread, lambda: None)
        strategy = Strategy(engine, thread, 0, work=work, exchange=MaskedSum(engine, thread))
        await strategy.begin_view(session, None)  # type: ignore[arg-type]
        session.submit = recording  # type: ignore[method-assign]
        await strategy.compute(0, 0, 1, patience_s=PATIENCE_S)
        return await strategy.reduce()

    try:
        async with local_ring(len(engines), MemoryNetwork()) as ring, asyncio.timeout(30):
            places = zip(ring, engines, threads, strict=True)
            said = await asyncio.gather(*(one(place.session, engine, thread) for place, engine, thread in places))
    finally:
        for thread in threads:
            thread.close()
    return said, submitted


async def test_the_ring_sums_exactly_and_gets_only_masked_numbers() -> None:
    values = [np.random.default_rng(seed).normal(0, 1, NUMEL).astype(np.float32) for seed in range(3)]
    engines = [Fixed(own) for own in values]
    said, submitted = await step_of(engines)
    whole = to_float(sum(to_fixed(own, 3)[0] for own in values))
    assert all(np.array_equal(engine.reduce_buffer, whole) for engine in engines)
    assert len({one.digest for one in said}) == 1
    assert [one.own for one in said] == pytest.approx([np.sum(np.square(own[:-1], dtype=float)) for own in values])
    assert sum(map(len, submitted)) == 3 * NUMEL
    assert all(looks_random(piece) for piece in submitted if len(piece) > 1000)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0**18])
async def test_a_contribution_that_does_not_fit_is_refused_by_its_member(bad: float) -> None:
    good = np.ones(2000, np.float32)
    said, _ = await step_of([Fixed(good), Fixed(good * np.float32(bad)), Fixed(good)])
    assert [np.isnan(one.own) for one in said] == [False, True, False]


async def test_a_view_of_two_is_refused_whoever_minted_it() -> None:
    with pytest.raises(JobFailed, match="would show each what the other contributes"):
        await step_of([Fixed(np.ones(2000, np.float32)) for _ in range(2)])


async def test_a_drop_out_is_survived_and_two_wait_for_a_third(cluster: Cluster) -> None:
    profile = small_profile(job={"strategy": "federated", "workers": 3}, federated={"secure": True})
    job = await cluster.create(profile)
    gate = Gate(5)
    peers = [cluster.join(gate.build) for _ in range(3)]
    await cluster.job_until(job, at(5))
    await peers[2].die()
    gate.away()
    await cluster.job_until(job, lambda item: "of 3 are ready" in item["reason"])
    newcomer = cluster.join()
    ended = await cluster.job_until(job, done)
    assert ended["step"] == 12
    assert state_of(peers[0]) == state_of(peers[1]) == state_of(newcomer)


@pytest.mark.parametrize(
    "setting",
    ["job.strategy=local", "job.workers=2", "ring.codec=bf16", "federated.sample=2"],
)
def test_what_masks_cannot_hide_is_refused(setting: str) -> None:
    with pytest.raises((Conflict, ConfigError), match=r"federated\.secure"):
        load("federated", {}, ["federated.secure=true", setting])
