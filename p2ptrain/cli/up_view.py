"""The full-screen view of a cluster that this process runs, and what it has to say while the view has the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from p2ptrain.core.errors import P2PTrainError

if TYPE_CHECKING:
    import asyncio

_OVER = "q leaves the view, and what was started here ends"


class View:
    """Of the seed at this port of this machine."""

    def __init__(self, port: int) -> None:
        from tui.app import P2PTrainApp
        from tui.source import PlainWay, SeedSource
        from wire.transport import TcpNetwork

        self.app = P2PTrainApp(SeedSource(PlainWay(TcpNetwork(), "127.0.0.1", port), f"127.0.0.1:{port}"))

    async def show(self, work: asyncio.Task[Any]) -> bool:
        """Until the person leaves it; whether with Ctrl+C. That ``work`` has ended, and why, is said within it."""
        work.add_done_callback(self._over)
        try:
            return bool(await self.app.run_async())
        finally:
            work.remove_done_callback(self._over)

    def say(self, level: str, text: str) -> None:
        """A line of the terminal below, if it is one of trouble: it stays until it is clicked away."""
        if level != "info":
            self.app.tell(level, "Trouble", text)

    def serves(self, text: str) -> None:
        """What was trained is served now: that view is shown, and how to ask."""
        from tui.app import SERVING

        self.app.go_to(SERVING)
        self.app.tell("info", "They serve", text)

    def _over(self, work: asyncio.Task[Any]) -> None:
        if work.cancelled():
            return
        problem = work.exception()
        if problem is None:
            self.app.tell("info", "It is over", _OVER)
        elif isinstance(problem, P2PTrainError):
            remedy = f"\n{problem.remedy}" if problem.remedy else ""
            self.app.tell("error", "It has failed", f"{problem.message}{remedy}\n{_OVER}")
        else:
            self.app.tell("error", "It has failed", f"{type(problem).__name__}: {problem}\n{_OVER}")
