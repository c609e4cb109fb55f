"""Texts whose drafts are rejected by their probabilities: what the verifier would write has their chances."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.core.activations import encode_ids
from p2ptrain.core.serving import DraftProbs, Sampling, Weighed
from roles.drafter.drafter import Drafter, Serves
from roles.drafter.testing import DrafterHost, drafter_hosts, model_serves
from roles.speculation.ngram import NgramEngine
from roles.speculation.probs import weighed_untrusted
from roles.speculation.received import packed
from roles.verifier.drafter_link import PROBS_S
from roles.verifier.rows import ROW_S
from roles.verifier.seat import Seat
from tests.compute.chances import p_value_behind
from wire.connection import Connection
from wire.memory import MemoryNetwork
from wire.speculation_messages import DraftReady, Drafts, ProbsWanted, Verdict
from wire.virtual import run_virtual

from .rejecting import PASS_S, VOCAB, Chain, Liar, Scene, behind
from .test_drafters_hostile import OPENING, verifier_of

SAMPLING = Sampling(seed=11, method="rejection")
TOKENS = 800


def table(seed: int) -> torch.Tensor:
    return 0.4 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


TARGET = table(1)
ALWAYS = torch.zeros(VOCAB, VOCAB)
ALWAYS[:, 3] = 30.0
DRAFTERS = {
    "good": TARGET + table(2),
    "by chance": torch.zeros(VOCAB, VOCAB),
    "always the same": ALWAYS,
    "leans one way": TARGET + torch.tensor([1.2, 1.2, -1.2, -1.2]),
}
Text = tuple[list[int], dict[str, Any], Scene]


def written(
    *engines: Any, tokens: int = TOKENS, sampling: Sampling = SAMPLING, kill_at: int = 0, texts: int = 1, **scene: Any
) -> Text:
    """The last of some texts with these drafters, the first of which is killed when so much of one is there."""

    async def main() -> Text:
        stage = Scene(Chain(TARGET), **scene)
        hosts = [stage.host(f"d{number}", engine) for number, engine in enumerate(engines)]
        kills: list[asyncio.Task[None]] = []

        def on_token(count: int) -> None:
            if kill_at and count >= kill_at and not kills:
                kills.append(asyncio.ensure_future(hosts[0].stop()))

        for host in hosts:
            await host.start()
        stage.drafters.here([host.at for host in hosts])
        await asyncio.sleep(5)
        for _ in range(texts):
            made, stats = await stage.write(tokens, sampling, on_token=on_token)
        await stage.drafters.close()
        await asyncio.gather(*kills)
        for host in hosts[len(kills) :]:
            await host.stop()
        await stage.target.close()
        return made, stats, stage

    return run_virtual(main())


def chance(tokens: list[int], sampling: Sampling = SAMPLING, *, before: int = 2) -> float:
    """Of tokens at least as far from what the target's own text is like, each behind so many before it."""
    return p_value_behind(behind(tokens, before), Chain(TARGET).probs(sampling, before))


@pytest.mark.parametrize("name", DRAFTERS)
def test_whatever_is_drafted_the_text_has_the_verifiers_chances(name: str) -> None:
    tokens, stats, _ = written(Chain(DRAFTERS[name]), one_way_ms=3)
    assert chance(tokens) > 0.01
    judged = stats["rejection"]
    assert judged["rejections"] >= 10, "how often drafts are tried is for others to say"
    assert judged["inexact"] == 0
    if name == "always the same":
        assert judged["asked"] == judged["probs_bytes"] == 0, "who is certain need not be asked"
    else:
        assert judged["asked"] == judged["rejections"]
        assert judged["probs_bytes"] == 4 * VOCAB * judged["asked"]
        assert judged["stood_ms"] == pytest.approx(6, rel=0.01)
    assert stats["wire_ms"] >= judged["stood_ms"] * judged["asked"] / TOKENS


def test_who_is_right_is_rarely_rejected_and_the_text_comes_sooner() -> None:
    tokens, stats, _ = written(Chain(TARGET + 0.15 * table(2)), tokens=300)
    assert stats["alpha"] > 0.9
    assert stats["token_ms"] < 0.4e3 * PASS_S
    assert len(tokens) == 300


def test_a_look_up_a_drafter_that_looks_up_and_drafts_of_few_tokens() -> None:
    sampling = replace(SAMPLING, temperature=0.8, top_k=2)
    look_up = Serves(NgramEngine(1 << 31), "n-gram look-up")

    class Looks(Scene):
        def host(self, name: str, engine: Any) -> DrafterHost:
            return (
                super().host(name, engine) if isinstance(engine, Chain) else DrafterHost(name, self.at(name), look_up)
            )

    async def main() -> Text:
        stage = Looks(Chain(TARGET), look_up=True)
        hosts = [stage.host("d", Chain(DRAFTERS["good"])), stage.host("n", look_up)]
        for host in hosts:
            await host.start()
        stage.drafters.here([host.at for host in hosts])
        await asyncio.sleep(5)
        made, stats = await stage.write(TOKENS // 2, sampling)
        await stage.drafters.close()
        for host in hosts:
            await host.stop()
        return made, stats, stage

    tokens, stats, _ = run_virtual(main())
    assert chance(tokens, sampling, before=1) > 0.01
    assert len(stats["drafters"]) == 3
    assert stats["rejection"]["rejections"]
    assert stats["rejection"]["inexact"] == 0


def test_without_what_drafts_were_drawn_from_the_text_is_another_and_it_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def none(seat: Seat, position: int, token: int, weight: float) -> None:
        return None

    monkeypatch.setattr(Seat, "probs", none)
    tokens, stats, _ = written(Chain(DRAFTERS["leans one way"]))
    assert chance(tokens, before=1) < 1e-6
    assert stats["rejection"]["inexact"] == stats["rejection"]["rejections"] > 100


@pytest.mark.parametrize("others", [0, 1])
def test_a_drafter_that_is_killed_holds_nothing_up(others: int) -> None:
    engines = [Chain(DRAFTERS["by chance"]) for _ in range(1 + others)]
    tokens, stats, _ = written(*engines, tokens=200, kill_at=60, one_way_ms=20)
    assert len(tokens) == 200
    assert stats["rejection"]["inexact"] <= 1
    assert stats["seconds"] < 200 * 2.2 * PASS_S


def test_a_drafter_that_is_killed_while_nobody_reads_and_its_drafts_wait_for_their_pass() -> None:
    async def main() -> Text:
        stage = Scene(Chain(TARGET))
        host = stage.host("d", Chain(TARGET + 0.15 * table(2)))
        await host.start()
        stage.drafters.here([host.at])
        await asyncio.sleep(5)
        stopped: list[int] = []

        async def pause(count: int) -> None:
            if count >= 60 and not stopped:
                await asyncio.sleep(20)  # virtual: until no more is computed
                if any(run.drafter for run in stage.writing._runs):
                    stopped.append(count)
                    await host.stop()
                    await asyncio.sleep(1)

        made, stats = await stage.write(1200, SAMPLING, pause=pause)
        await stage.drafters.close()
        await stage.target.close()
        assert stopped
        return made, stats, stage

    tokens, stats, _ = run_virtual(main())
    assert len(tokens) == 1200
    assert stats["rejection"]["inexact"] == 0


def test_one_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drafter, "_tell_probs_untrusted", lambda drafter, session, position: None)
    tokens, stats, stage = written(Chain(DRAFTERS["by chance"]), tokens=60)
    assert len(tokens) == 60
    assert stats["rejection"]["inexact"] == 1
    assert stats["rejection"]["stood_ms"] == pytest.approx(1e3 * PROBS_S, rel=0.01)
    assert any("did not say what it drew a draft from" in text for _, _, text in stage.told)
    _, stats, _ = written(Chain(DRAFTERS["by chance"]), tokens=60, texts=3)
    assert not stats["rejection"]["inexact"], "it is at fault: the next texts are written without it"
    assert stats["seconds"] < 60 * 1.1 * PASS_S


@pytest.mark.parametrize(("seconds", "inexact"), [(0.9 * ROW_S, 0), (1.1 * ROW_S, 1)])
def test_what_is_announced_may_take_its_time_over_a_slow_link(
    seconds: float, inexact: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_bulk, slow = Connection.send_bulk, [True]

    def late(connection: Connection, data: memoryview, **where: int) -> None:
        if len(data) != 4 * VOCAB or not slow:
            send_bulk(connection, data, **where)
            return
        slow.clear()  # the others take no time
        asyncio.get_running_loop().call_later(seconds, _if_open, send_bulk, connection, data, where)

    monkeypatch.setattr(Connection, "send_bulk", late)
    tokens, stats, _ = written(Chain(DRAFTERS["by chance"]), tokens=200)
    assert len(tokens) == 200
    assert not slow
    assert stats["rejection"]["inexact"] == inexact


def _if_open(send: Callable[..., None], connection: Connection, data: memoryview, where: dict[str, int]) -> None:
    if not connection.closed.is_set():
        send(connection, data, **where)


def _row(*probs: float, ids: list[int] | None = None) -> DraftProbs:
    return DraftProbs(np.array(ids or [], "<i4").tobytes(), np.array(probs, "<f4").tobytes())


@pytest.mark.parametrize(
    ("says", "what"),
    [
        (lambda one: replace(one, weight=0.9 * one.weight), "another probability"),
        (lambda one: replace(one, weight=0.0), "with no probability"),
        (lambda one: replace(one, weight=float("nan")), "with no probability"),
        (lambda one: replace(one, weight=2.0), "with no probability"),
        (lambda one: replace(one, probs=_row(0.5, 0.5, 0.5, 0.5)), "not 1 together"),
        (lambda one: replace(one, probs=_row(float("nan"), 1, 0, 0)), "not 1 together"),
        (lambda one: replace(one, probs=_row(1.5, -0.5, 0, 0)), "not 1 together"),
        (lambda one: replace(one, probs=_row(*[1 / 9] * 9)), "9 probabilities of 4 tokens"),
        (lambda one: replace(one, probs=_row(0.5, 0.5, ids=[2, 1])), "not in order"),
        (lambda one: replace(one, probs=_row(0.5, 0.5, ids=[-1, 1])), "not in order"),
        (lambda one: replace(one, probs=_row(0.5, 0.5, ids=[1, 4])), "not in order"),
    ],
)
def test_who_says_what_cannot_be_is_cut_off(says: Callable[[Weighed], Weighed], what: str) -> None:
    tokens, stats, stage = written(Liar(DRAFTERS["by chance"], says), tokens=40)
    assert len(tokens) == 40
    assert stats["rejection"]["inexact"] <= 1
    assert any(what in text for _, _, text in stage.told), stage.told
    assert not stage.drafters.candidates([])


def test_what_comes_instead_waits_for_no_turn_of_others() -> None:
    sampling, over = replace(SAMPLING, top_k=1), list[str]()

    async def main() -> None:
        target = Scene(Chain(TARGET)).target
        first, *others = [await target.open(positions=9, sampling=sampling) for _ in range(4)]
        (right,) = (await first.run(keep=0, ids=[0], picks=1, draw=0, prefill=True)).tokens
        wrong = (right + 1) % VOCAB
        judged = await first.judge(keep=0, ids=[0, wrong], draw=0, weights=[0.5])
        assert judged.rejected

        async def named(name: str, work: Coroutine[Any, Any, Any]) -> Any:
            result = await work
            over.append(name)
            return result

        passes = [named("pass", each.run(keep=0, ids=[0], picks=1, draw=0, prefill=True)) for each in others]
        under_way = [asyncio.ensure_future(work) for work in passes]
        await asyncio.sleep(0)
        assert await named("instead", first.settle(DraftProbs.certain(wrong))) == right
        await asyncio.gather(*under_way)
        await target.close()

    run_virtual(main())
    assert over == ["pass", "instead", "pass", "pass"]


def test_a_verifier_that_asks_about_a_draft_that_was_not_sent_yet_harms_nobody() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        host = DrafterHost("d", network.at("d"), model_serves(Chain(DRAFTERS["by chance"])))
        opening = replace(OPENING, count=1, prompt=1, vocab_size=VOCAB, method="rejection")
        async with drafter_hosts([host]), verifier_of(network) as verifier:
            verifier.open(opening, encode_ids([0]))
            assert isinstance((await verifier.next())[1], DraftReady)
            drafts: list[int] = []
            while len(drafts) < opening.depth:
                _, message = await verifier.next()
                assert isinstance(message, Drafts)
                drafts += weighed_untrusted(message, 0, vocab_size=VOCAB)[0]
            await asyncio.sleep(1)  # virtual: it drafts no further
            verdict = Verdict(2, opening.depth, packed([(drafts[2] + 1) % VOCAB], VOCAB))
            verifier.connection.send(verdict, generation=1, stream=1)
            await asyncio.sleep(1.5 * host.step_s)  # one of the next line was drafted, and waits for another
            verifier.connection.send(ProbsWanted(4), stream=1)
            await verifier.told_off()
            async with verifier_of(network, name="w") as other:
                other.open(opening, encode_ids([0]))
                assert isinstance((await other.next())[1], DraftReady)
                assert isinstance((await other.next())[1], Drafts)

    run_virtual(main())


def test_the_likeliest_token_is_just_compared() -> None:
    greedy = replace(SAMPLING, temperature=0.0)
    tokens, stats, _ = written(Chain(DRAFTERS["good"]), tokens=50, sampling=greedy)
    plain, _, _ = written(tokens=50, sampling=Sampling(0.0))
    assert tokens == plain
    assert stats["accepted"]
    assert "rejection" not in stats
