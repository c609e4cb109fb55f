"""Ctrl+C is heard when nobody reads any more what is said: in ``p2ptrain join ... | tee log`` it ends both."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys

import pytest

from p2ptrain.cluster.console import Console, stop_on_signals, stoppable


class Unread(io.StringIO):
    """A terminal that is closed, or a pipe whose reader has ended."""

    tries = 0

    def write(self, text: str) -> int:
        self.tries += 1
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError

    def isatty(self) -> bool:
        return True


async def test_who_reads_may_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", unread := Unread())
    console, stop = stoppable()
    console.event("info", "joined")
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(10):
        await stop.wait()
    assert unread.tries >= 2


def test_nothing_is_said_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for live in (True, False):
        monkeypatch.setattr(sys, "stderr", unread := Unread())
        unread.isatty = lambda live=live: live  # type: ignore[method-assign]
        console = Console(lambda: 0.0)
        console.progress("loading")
        console.progress("loaded", last=True)
        console.event("warning", "what is said next")
        assert unread.tries >= 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_it_is_asked_before_anything_is_said(number: signal.Signals) -> None:
    stop, asked = asyncio.Event(), list[bool]()
    before = signal.signal(number, signal.SIG_DFL)  # `nohup` may have started the tests
    try:
        stop_on_signals(stop, lambda text: asked.append(stop.is_set()))
        os.kill(os.getpid(), number)
        async with asyncio.timeout(10):
            await stop.wait()
    finally:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, before)
    assert asked == [True]


async def test_nohup_is_obeyed() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop_on_signals(asyncio.Event(), lambda text: None)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
