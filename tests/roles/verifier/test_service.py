"""A verifier's texts: those of the model alone, whoever drafts; who waits, who is refused, and what is let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.compute.text import Turn
from p2ptrain.core.errors import ConfigError, DeadlineExceeded, Refused, ResourceError, UserError
from p2ptrain.core.serving import Sampling, SamplingOptions
from roles.serving.text_session import READER_S, TextSession
from roles.serving.texts import TextRequest
from roles.verifier.drafters import Drafters
from roles.verifier.service import ModelTextService, Places
from tests.roles.verifier.doubles import ScriptedTarget, connected_drafters, reference, service, text_of

pytestmark = pytest.mark.virtual_time

PROMPT = "def f(x):"


async def read(session: TextSession, tokens: list[int] | None = None) -> tuple[str, list[int]]:
    text, tokens = "", list[int]() if tokens is None else tokens
    async for piece in session:
        text += piece.text
        tokens += piece.tokens
    return text, tokens


def wish(tokens: int | None = 40, **more: Any) -> TextRequest:
    return TextRequest(prompt=more.pop("prompt", PROMPT), max_new_tokens=tokens, **more)


@pytest.fixture
async def drafters(request: pytest.FixtureRequest) -> AsyncIterator[Drafters | None]:
    """Connected drafters, which have no session at the end; None if that is the parameter."""
    options = getattr(request, "param", {})
    if options is None:
        yield None
        return
    async with connected_drafters(**options) as (made, hosts):
        yield made
        await asyncio.sleep(30)  # virtual: the last messages arrive
        assert not any(host.drafter.sessions for host in hosts)


async def settled(serving: ModelTextService, target: ScriptedTarget) -> None:
    """Nothing is open any more once the service is closed."""
    await serving.close()
    assert not target.open_now
    assert serving.sessions == 0
    assert serving.cost_model.sessions == 0


@pytest.mark.parametrize("sampling", [SamplingOptions(), SamplingOptions(temperature=0.9, seed=11)])
@pytest.mark.parametrize("drafters", [None, {"count": 2, "alpha": 0.7}, {"alpha": 0.0}], indirect=True)
async def test_the_text_is_the_models_own(tmp_path: Path, sampling: SamplingOptions, drafters: Drafters | None) -> None:
    target = ScriptedTarget()
    serving = service(tmp_path, target, drafters)
    writing = await serving.write(wish(sampling=sampling))
    text, tokens = await read(writing)
    drawn = Sampling(0.9, 50, 1.0, 11) if sampling.temperature else Sampling(0.0)
    expected = reference(PROMPT, 40, drawn)
    assert tuple(tokens) == expected
    assert text == text_of(expected)
    assert writing.ended == "length"
    said = writing.stats()
    assert said["tokens"] == 40
    assert said["prompt_tokens"] == writing.prompt_tokens == len(PROMPT)
    await settled(serving, target)


@pytest.mark.parametrize("drafters", [{}, {"alpha": 0.7, "latency_s": 0.04}, {"count": 2}], indirect=True)
async def test_the_parts_of_a_tokens_time_add_up(tmp_path: Path, drafters: Drafters) -> None:
    target = ScriptedTarget()
    serving = service(tmp_path, target, drafters)
    writings = [await serving.write(wish(60, prompt=f"{PROMPT}{number}")) for number in range(2)]
    await asyncio.gather(*(read(writing) for writing in writings))
    for stats in (writing.stats() for writing in writings):
        parts = [stats[name] for name in ("verify_ms", "draft_ms", "wait_ms")]
        assert sum(parts) == pytest.approx(stats["token_ms"], abs=1e-6)
        assert stats["rest_ms"] == pytest.approx(0, abs=1e-6)
        assert min(parts) >= 0
        assert stats["verify_ms"] >= 1e3 * target.pass_s / stats["accepted_length"] * 0.9
    await settled(serving, target)


async def test_a_stop_string_ends_the_text_before_it(tmp_path: Path, drafters: Drafters) -> None:
    whole = text_of(reference(PROMPT, 40))
    stop = next(whole[at : at + 2] for at in range(12, 38) if "\ufffd" not in whole[at : at + 2])

    target = ScriptedTarget()
    serving = service(tmp_path, target, drafters)
    writing = await serving.write(wish(400, stop=(stop,)))
    text, tokens = await read(writing)
    assert writing.decoding.stats.tokens < 60, "the model stops, too"
    assert text == whole[: whole.index(stop)]
    assert writing.ended == "stop"
    assert tuple(tokens) == reference(PROMPT, 60)[: len(tokens)]
    await settled(serving, target)


async def test_invalid_requests_are_refused(tmp_path: Path) -> None:
    target = ScriptedTarget()
    serving = service(tmp_path, target, positions=100)
    assert serving.context == 100
    target.vocab_size = 120
    for wrong in (wish(prompt="x"), TextRequest(turns=(Turn("user", "x"),))):
        with pytest.raises(UserError, match="the token 'x', id 120, but the model has only the ids 0 to 119"):
            await serving.write(wrong)
    target.vocab_size = 256
    for wrong in (
        wish(prompt=""),
        wish(92),
        wish(prompt="x" * 200),
        wish(stop=("",)),
        TextRequest(turns=(Turn("judge", "hm"),)),
        TextRequest(turns=(Turn("user", "a"), Turn("assistant", "b"))),
        TextRequest(turns=(Turn("user", "a" * 200),)),
    ):
        with pytest.raises(UserError):
            await serving.write(wrong)
    writing = await serving.write(wish(None))
    _, tokens = await read(writing)
    assert len(tokens) == 100 - len(PROMPT)
    long = await serving.write(TextRequest(turns=(Turn("user", "a" * 75),)))  # over three quarters of the context
    _, tokens = await read(long)
    assert len(tokens) == 100 - long.prompt_tokens
    await settled(serving, target)


async def test_the_oldest_turns_of_a_conversation_are_left_out(tmp_path: Path) -> None:
    target = ScriptedTarget()
    serving = service(tmp_path, target, positions=120)
    turns = (
        Turn("system", "be brief"),
        Turn("user", "a" * 40),
        Turn("assistant", "b" * 30),
        Turn("user", "and now?"),
    )
    writing = await serving.write(TextRequest(turns=turns, max_new_tokens=20))
    await read(writing)
    assert writing.left_out == 2
    asked = bytes(token for _, ids, _ in target.runs for token in ids)
    assert asked.startswith(b"be brief\n\nUser: and now?\nAssistant:")
    await settled(serving, target)


async def test_a_chat_that_its_template_cannot_write_disturbs_no_other(tmp_path: Path) -> None:
    target = ScriptedTarget()
    template = "{% if messages[0].content == 'now' %}{{ 'a' * (10 ** 10) }}{% endif %}{{ messages[0].content }}"
    serving = service(tmp_path, target, template=template)
    chats = [TextRequest(turns=(Turn("user", text),), max_new_tokens=5) for text in ("now", "hi")]
    failed, *written = await asyncio.gather(
        *(serving.write(each) for each in (*chats, wish(5))), return_exceptions=True
    )
    assert isinstance(failed, ConfigError)
    assert "takes more than 1 GiB of memory" in failed.message
    for session in written:
        assert not isinstance(session, BaseException)
        await read(session)
    await settled(serving, target)


async def test_a_conversation_goes_on_from_what_is_computed(tmp_path: Path, drafters: Drafters) -> None:
    target = ScriptedTarget()
    serving = service(tmp_path, target, drafters)
    asked = (Turn("user", "what is a ring of machines, and what is a chain of them?"),)
    text, _ = await read(await serving.write(TextRequest(turns=asked, max_new_tokens=20)))
    before = len(target.runs)
    turns = (*asked, Turn("assistant", text.strip()), Turn("user", "and now?"))
    second = await serving.write(TextRequest(turns=turns, max_new_tokens=20))
    _, tokens = await read(second)
    whole = f"User: {turns[0].text}\nAssistant: {turns[1].text}\nUser: and now?\nAssistant:"
    assert tuple(tokens) == reference(whole, 20)[: len(tokens)]
    keep, ids, _ = target.runs[before]
    assert keep == second.stats()["cached_tokens"] == 64, "a whole block"
    assert keep + len(ids) == len(whole.encode())
    # The text's sampling has nothing to do with what is computed.
    other = await serving.write(TextRequest(turns=turns, max_new_tokens=5, sampling=SamplingOptions(temperature=1.0)))
    await read(other)
    assert other.stats()["cached_tokens"] == 128
    await settled(serving, target)


async def test_text_begins_when_those_that_ended_have_left_the_memory(tmp_path: Path) -> None:
    target = ScriptedTarget(room=80)
    serving = service(tmp_path, target)
    first = await serving.write(wish(40))
    with pytest.raises(ResourceError):
        await serving.write(wish(40, prompt="another one"))
    assert (await read(first))[1] == list(reference(PROMPT, 40))
    second = await serving.write(wish(40, prompt="another one"))
    assert (await read(second))[1] == list(reference("another one", 40))
    await settled(serving, target)


async def test_requests_wait_for_a_place_up_to_a_limit(tmp_path: Path) -> None:
    target = ScriptedTarget()
    serving = service(tmp_path, target, sessions=2, waiting=1)
    first, second = await serving.write(wish()), await serving.write(wish())
    third = asyncio.create_task(serving.write(wish()))
    await asyncio.sleep(0.5)
    assert not third.done()
    with pytest.raises(Refused) as busy:
        await serving.write(wish())
    assert busy.value.code == "busy"
    assert "try again in" in busy.value.remedy
    assert serving.figures()["waiting"] == 1
    await asyncio.gather(read(first), read(second))
    assert (await read(await third))[1] == list(reference(PROMPT, 40))
    await settled(serving, target)


async def test_text_of_a_lower_priority_number_begins_first(tmp_path: Path) -> None:
    target, begun = ScriptedTarget(), list[int]()
    serving = service(tmp_path, target, sessions=1)
    first = await serving.write(wish(5))

    async def write(number: int, priority: int) -> None:
        writing = await serving.write(wish(5, priority=priority))
        begun.append(number)
        await read(writing)

    waiting = [asyncio.create_task(write(number, priority)) for number, priority in enumerate((5, 1, 1, -2, 5))]
    await asyncio.sleep(0.01)
    assert serving.figures()["waiting"] == 5
    waiting[1].cancel()
    await asyncio.sleep(0.01)
    assert serving.figures()["waiting"] == 4
    await read(first)
    await asyncio.wait(waiting)
    assert begun == [3, 2, 0, 4]
    await settled(serving, target)


async def test_place_that_a_cancelled_request_got_goes_to_the_next_one() -> None:
    places = Places(1, 2)
    await places.take(0)
    waiting = [asyncio.create_task(places.take(0)) for _ in range(2)]
    await asyncio.sleep(0)
    places.give_back()
    waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (waiting[0].cancelled(), places.free, places.waiting) == (True, 0, 0)
    places.give_back()
    assert places.free == 1


async def test_refusal_says_when_to_try_again_and_figures_say_how_texts_are_written(tmp_path: Path) -> None:
    target = ScriptedTarget(pass_s=0.5)
    serving = service(tmp_path, target, sessions=2, waiting=2)
    await read(await serving.write(wish(40)))  # takes 20 s
    tasks = [asyncio.create_task(serving.write(wish(40))) for _ in range(4)]
    await asyncio.sleep(0.01)
    with pytest.raises(Refused) as busy:
        await serving.write(wish(40))
    assert busy.value.retry_after_s == 30, "two wait, and two texts are written in 20 s"
    assert "try again in 30 s" in busy.value.remedy
    for task in tasks:
        await read(await task)
    found = serving.figures()
    assert found["first_ms"] == pytest.approx(500, rel=0.03)
    assert found["first_p95_ms"] == pytest.approx(20_500, rel=0.03), "with the time for which it waited"
    assert found["between_p95_ms"] == pytest.approx(500, rel=0.03)
    assert found["cached_share"] == 0.0
    assert found["preemptions"] == 0.0
    await settled(serving, target)


async def test_a_request_that_waits_too_long_is_refused(tmp_path: Path) -> None:
    held = asyncio.Event()
    target = ScriptedTarget(before=lambda count: held.wait() if count > 3 else None)
    serving = service(tmp_path, target, sessions=1)
    first = await serving.write(wish())
    began = asyncio.get_running_loop().time()
    with pytest.raises(Refused, match="no place became free"):
        await serving.write(wish())
    assert asyncio.get_running_loop().time() - began <= 60
    held.set()
    await read(first)
    await settled(serving, target)


@pytest.mark.parametrize("drafters", [{"alpha": 0.5}], indirect=True, ids=[pytest.HIDDEN_PARAM])
@pytest.mark.parametrize("when", ["prefill", "writing", "unread"])
async def test_a_closed_text_ends_soon(tmp_path: Path, drafters: Drafters, when: str) -> None:
    target = ScriptedTarget()
    serving = service(tmp_path, target, drafters)
    writing = await serving.write(wish(500))
    await asyncio.sleep({"prefill": 0.01, "writing": 0.5, "unread": 100.0}[when])
    began = asyncio.get_running_loop().time()
    await writing.close()
    assert asyncio.get_running_loop().time() - began <= 0.05
    assert writing.ended == "cancelled"
    passes = len(target.runs)
    await asyncio.sleep(10)
    assert len(target.runs) == passes
    assert not target.open_now
    await writing.close()
    await settled(serving, target)


async def test_a_pass_that_does_not_end_is_cancelled(tmp_path: Path) -> None:
    target = ScriptedTarget(before=lambda count: asyncio.Event().wait() if count == 2 else None)
    serving = service(tmp_path, target)
    writing = await serving.write(wish())
    await asyncio.sleep(1)
    await writing.close()
    await asyncio.sleep(1)
    assert not target.open_now
    await settled(serving, target)


async def test_a_text_whose_reader_stops_is_ended(tmp_path: Path) -> None:
    target = ScriptedTarget()
    serving = service(tmp_path, target)
    writing = await serving.write(wish(200))
    await asyncio.sleep(READER_S + 10)
    assert serving.sessions == 0
    with pytest.raises(DeadlineExceeded):
        await read(writing)
    await settled(serving, target)


async def test_a_closing_service_ends_its_texts_and_refuses_others(tmp_path: Path) -> None:
    target = ScriptedTarget()
    serving = service(tmp_path, target, sessions=1)
    writing = await serving.write(wish(500))
    waiting = asyncio.create_task(serving.write(wish()))
    await asyncio.sleep(0.2)
    await settled(serving, target)
    with pytest.raises(Refused, match="shutting down"):
        await read(writing)  # after what had come
    with pytest.raises(Refused, match="shutting down"):
        await waiting
