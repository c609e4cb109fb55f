"""The source against a seed that speaks the real protocol, in memory, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from p2ptrain.core.errors import ConnectionLost, DeadlineExceeded, Refused
from tests.tui.conftest import DemoFakeSeed
from tests.tui.invariants import check_store
from tests.wire.doubles import scenario_of
from tui.model import LinkPhase
from tui.source import LONGEST_RETRY_S, PING_S, REQUEST_TIMEOUT_S, SeedSource, backoff_s
from wire.client import PAGE
from wire.messages import Refuse

watched = scenario_of("watch", "seed", "source")


async def until(source: SeedSource, condition: Callable[[], bool]) -> None:
    """Wait, at most 60 virtual seconds, until the condition holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - time is virtual: a look every 10 ms costs nothing and decides nothing
            await asyncio.sleep(0.01)


async def live(source: SeedSource) -> None:
    await until(source, lambda: source.store.link.phase is LinkPhase.LIVE)


def test_backoff_grows_to_its_limit():
    delays = [backoff_s(attempt) for attempt in range(100)]
    assert delays[:3] == [0.5, 1.0, 2.0]
    assert delays == sorted(delays)
    assert delays[-1] == LONGEST_RETRY_S


@watched
async def test_what_a_subscriber_is_told_is_all_and_older_events_are_fetched(
    seed: DemoFakeSeed, source: SeedSource
) -> None:
    await live(source)
    assert len(source.store.peers) == 6
    assert source.store.cluster is not None
    await until(source, lambda: source.store.link.rtt_ms is not None)
    await until(source, lambda: len(source.store.events) == 7)
    assert {method for method, _ in seed.asked} == {"subscribe", "probe.clock", "events.list"}


@watched
async def test_everything_is_told_and_followed(seed: DemoFakeSeed, source: SeedSource) -> None:
    seed.cluster.serves = True
    await live(source)
    assert len(source.store.parts) == 6
    seed.tick()
    await until(source, lambda: source.store.jobs["j1"].step == 641)
    assert source.store.series["j1"].rows[-1].step == 641
    assert {info.peer for info in source.store.serving.values()} == {"verifier", "dora", "nils"}
    seed.tell("serving-gone", [{"id": "nils"}])
    await until(source, lambda: "nils" not in source.store.serving)


@watched
async def test_a_seed_that_restarts_is_found_again_and_the_gap_is_filled(
    seed: DemoFakeSeed, source: SeedSource
) -> None:
    await live(source)
    source.watch("j1")
    await until(source, lambda: "j1" in source._synced)
    pages = [params["after_step"] for method, params in seed.asked if method == "metrics.history"]
    assert pages == [-1, PAGE, 2 * PAGE, 3 * PAGE, 640]
    await seed.stop()
    await until(source, lambda: source.store.link.phase is LinkPhase.LOST)
    with pytest.raises(ConnectionLost):
        await source.request("jobs.pause", {"job": "j1"})
    lost = source.store.link
    assert lost.problem
    assert lost.retry_at is not None
    assert len(source.store.peers) == 6  # what was known stays to be looked at
    await asyncio.sleep(5)
    assert source.store.link.phase is LinkPhase.LOST
    assert source.store.link.since == lost.since
    seed.cluster.step += 300  # training went on
    seed.cluster.size = 5
    await seed.begin()
    await live(source)
    await until(source, lambda: "j1" in source._synced)
    assert source.store.series["j1"].rows[-1].step == 940
    assert len(source.store.series["j1"].rows) == 940
    assert len(source.store.peers) == 5


@watched
async def test_after_a_new_generation_the_history_is_fetched_anew(seed: DemoFakeSeed, source: SeedSource) -> None:
    await live(source)
    source.watch("j1")
    await until(source, lambda: "j1" in source._synced)
    await seed.stop()
    await until(source, lambda: source.store.link.phase is LinkPhase.LOST)
    seed.cluster.generation, seed.cluster.step = 5, 220  # restored from the checkpoint of step 200
    await seed.begin()
    await live(source)
    await until(source, lambda: [row.step for row in source.store.series["j1"].rows][-1:] == [220])
    check_store(source.store)


@watched
async def test_a_malformed_update_is_counted_and_shown_and_the_rest_is_taken_in(
    seed: DemoFakeSeed, source: SeedSource
) -> None:
    await live(source)
    good = seed.cluster.peer(0).to_map() | {"name": "renamed"}
    seed.tell("peers", [{"id": 7}, good])
    await until(source, lambda: source.store.malformed == 1)
    assert source.store.link.phase is LinkPhase.LIVE
    assert "PeerInfo" in source.store.link.problem
    assert source.store.peers["peer0"].name == "renamed"


@watched
async def test_a_seed_that_says_no_is_shown_with_its_remedy(seed: DemoFakeSeed, source: SeedSource) -> None:
    seed.refuse = Refuse("full", "the seed has no room for a viewer", "leave another one")
    await until(source, lambda: source.store.link.phase is LinkPhase.LOST)
    assert source.store.link.problem.endswith("the seed has no room for a viewer")
    assert source.store.link.remedy == "leave another one"
    seed.refuse = None
    await live(source)


@watched
async def test_a_seed_that_falls_silent_is_lost(seed: DemoFakeSeed, source: SeedSource) -> None:
    await live(source)
    now = asyncio.get_running_loop().time
    silent_at = now()
    seed.silent |= {"probe.clock", "subscribe"}
    await until(source, lambda: source.store.link.phase is LinkPhase.LOST)
    assert now() - silent_at < PING_S + REQUEST_TIMEOUT_S + 1


@watched
async def test_a_request_is_passed_on_with_its_answer(seed: DemoFakeSeed, source: SeedSource) -> None:
    await live(source)
    assert await source.request("jobs.pause", {"job": "j1"}) == {"job": "j1"}
    seed.answers["jobs.pause"] = Refused("bad-state", "job j1 is done", remedy="choose another")
    with pytest.raises(Refused) as refused:
        await source.request("jobs.pause", {"job": "j1"})
    assert refused.value.remedy == "choose another"
    seed.silent.add("jobs.save")
    with pytest.raises(DeadlineExceeded):
        await source.request("jobs.save", {"job": "j1"})
