"""What drafts were drawn from takes memory, and counts as such on both sides."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from p2ptrain.core.activations import encode_ids
from p2ptrain.core.errors import Refused, UserError
from p2ptrain.core.serving import Sampling
from p2ptrain.core.threads import LoopThreads
from p2ptrain.core.world import LoopClock
from roles.compute_thread import ComputeThread
from roles.drafter.room import most_ahead, rows
from roles.drafter.testing import DrafterHost, drafter_hosts, model_serves
from roles.speculation.probs import weighed_untrusted
from roles.speculation.received import MAX_DEPTH, packed
from roles.verifier.whole_target import REJECTING_BYTES, WholeTarget
from wire.memory import MemoryNetwork
from wire.speculation_messages import DraftClose, DraftReady, DraftRefused, Drafts, ProbsWanted, Verdict
from wire.virtual import run_virtual

from .rejecting import VOCAB, Chain
from .test_drafters_hostile import OPENING, Verifier, verifier_of

SAMPLING = Sampling(seed=3, method="rejection")
BY_CHANCE = torch.zeros(VOCAB, VOCAB)
REJECTING = replace(OPENING, count=1, prompt=1, vocab_size=VOCAB, method="rejection")
CACHE_BYTES = 4 * REJECTING.positions
ROW_BYTES = 1 << 20


class Wide(Chain):
    """It says that a row takes much."""

    def row_bytes(self, sampling: Sampling) -> int:
        return ROW_BYTES


def test_as_many_drafts_ahead_as_there_are_rows_for() -> None:
    for count in range(4, 600):
        ahead = most_ahead(count)
        assert ahead == MAX_DEPTH or rows(ahead) <= count < rows(ahead + 1)


async def _drafted(verifier: Verifier) -> int:
    """Drafts that come without a verdict."""
    tokens = 0
    try:
        async with asyncio.timeout(1.5):  # virtual
            while True:
                _, message = await verifier.next()
                assert isinstance(message, Drafts)
                tokens += len(weighed_untrusted(message, 0, vocab_size=VOCAB)[0])
    except TimeoutError:
        return tokens


@pytest.mark.parametrize(("count", "ahead"), [(10, 4), (19, 4), (30, 6), (100, 8)])
def test_a_drafter_with_little_memory_drafts_less_far_ahead(count: int, ahead: int) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        serves = model_serves(Wide(BY_CHANCE), limit_bytes=CACHE_BYTES + count * ROW_BYTES)
        async with drafter_hosts([DrafterHost("d", network.at("d"), serves)]), verifier_of(network) as verifier:
            verifier.open(REJECTING, encode_ids([0]))
            assert isinstance((await verifier.next())[1], DraftReady)
            assert await _drafted(verifier) == ahead

    run_virtual(main())


def test_a_drafter_without_memory_for_rows_refuses_with_the_numbers() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        serves = model_serves(Wide(BY_CHANCE), limit_bytes=2 * CACHE_BYTES + 19 * ROW_BYTES)
        async with drafter_hosts([DrafterHost("d", network.at("d"), serves)]), verifier_of(network) as verifier:
            verifier.open(REJECTING, encode_ids([0]))
            assert isinstance((await verifier.next())[1], DraftReady)
            verifier.open(REJECTING, encode_ids([0]), stream=2)
            while (answer := await verifier.next())[0] != 2:
                pass
            assert isinstance(refused := answer[1], DraftRefused)
            assert refused.code == "full"
            assert "4 drafts with all of their probabilities take 10.0 MiB" in refused.reason
            assert "--memory" in refused.remedy
            verifier.open(replace(REJECTING, method="coupled"), encode_ids([0]), stream=3)
            while (answer := await verifier.next())[0] != 3:
                pass
            assert isinstance(answer[1], DraftReady), "there is room for a text without rows"

    run_virtual(main())


def test_a_verifiers_sessions_that_reject_count_with_what_they_need_for_it() -> None:
    async def main() -> None:
        beside, positions = REJECTING_BYTES * VOCAB, 100
        compute = ComputeThread(LoopThreads())
        target = WholeTarget(
            Chain(BY_CHANCE), compute, LoopClock(), label="a table", cache_bytes=2 * 4 * positions + beside
        )
        one = await target.open(positions=positions, sampling=SAMPLING)
        assert target.facts()["cache_bytes"] == 4 * positions + beside
        with pytest.raises(Refused, match="too little"):
            await target.open(positions=positions, sampling=SAMPLING)
        other = await target.open(positions=positions, sampling=replace(SAMPLING, method="coupled"))
        await one.close()
        await other.close()
        with pytest.raises(UserError, match="201 positions that rejects drafts") as caught:
            await target.open(positions=2 * positions + 1, sampling=SAMPLING)
        assert f"at most {2 * positions} positions" in caught.value.remedy
        await target.close()

    run_virtual(main())


def test_who_asks_for_rows_and_does_not_read_them_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roles.drafter.drafter.UNREAD_BYTES", 1 << 20)
    vocab = 4096

    class Flat(Chain):
        def _taken(self, session: str, keep: int, payload: memoryview, picks: int):  # type: ignore[no-untyped-def]
            picker, history = self._sessions[session]
            del history[keep:]
            history += range(len(payload) // 4)
            return picker, torch.zeros(picks, vocab)

    async def main() -> None:
        network = MemoryNetwork()
        engine = Flat(torch.zeros(vocab, 1))
        host = DrafterHost("d", network.at("d"), model_serves(engine))
        opening = replace(REJECTING, vocab_size=vocab, positions=4096)
        async with drafter_hosts([host]), verifier_of(network) as verifier:
            verifier.open(opening, encode_ids([0]))
            for number in range(1, 1000):
                await asyncio.sleep(0.1)  # virtual
                if not host.drafter.sessions:
                    break
                verifier.connection.send(ProbsWanted(number), stream=1)
                verdict = Verdict(0, 8, packed([1], vocab))
                verifier.connection.send(verdict, generation=number, stream=1)
            assert 64 < number < 500, number
            assert not host.problems, "nothing that it said was wrong"

    run_virtual(main())


def test_sessions_that_are_opened_and_closed_at_once_leave_nothing_waiting() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        host = DrafterHost("d", network.at("d"), model_serves(Chain(BY_CHANCE)), step_s=1.0)
        async with drafter_hosts([host]), verifier_of(network) as verifier:
            for stream in range(1, 500):
                verifier.open(replace(REJECTING, method="coupled"), encode_ids([0]), stream=stream)
                verifier.connection.send(DraftClose(), stream=stream)
                if stream % 20 == 0:
                    await asyncio.sleep(0.001)
            assert len(host.drafter._background) <= 2

    run_virtual(main())
