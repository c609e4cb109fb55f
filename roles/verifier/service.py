"""A verifier's ``TextService``: texts of its model, with drafters.

A limited number of texts is written at a time. Others wait, and are refused if that takes too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import median

from p2ptrain.compute.text import ChatFormat, ModelText
from p2ptrain.core.errors import P2PTrainError, Refused
from p2ptrain.core.serving import Sampling
from p2ptrain.core.world import World
from roles.gauges import Rate
from roles.serving.model import DecodingStats, PassRequest, ServedModel
from roles.serving.text_service import WAIT_S, ModelTextService, TextSession
from roles.serving.text_stats import RecentSums, add_sums, figures_of, shares_of
from roles.serving.texts import TextRequest
from roles.verifier.cost_model import CostModel
from roles.verifier.drafters import DrafterLink, Drafters, TextDrafts
from roles.verifier.speculation import Speculation
from wire.messages import RefusalCode

WARM_UP = (8, 9)
"""Before the first request: positions of a prompt, and steps whose median is measured."""


class VerifierFigures:
    """Sums and recent figures of all texts."""

    def __init__(self) -> None:
        self.running: dict[TextSession, bool] = {}  # whether drafters may help
        self._rate, self._noted_tokens = Rate(), 0
        self._ended = DecodingStats()
        self._recent, self._ended_sums = RecentSums(), dict[str, float]()

    def begin(self, session: TextSession, *, speculates: bool) -> None:
        self.running[session] = speculates

    def end(self, session: TextSession, now: float, step_s: float) -> None:
        self._ended.add(session.decoding.stats)
        if self.running.pop(session):
            self._ended_sums = add_sums([self._ended_sums, session.sums()])
            self._note_sums(step_s)
        self._add_up(now)

    def as_map(self, now: float, step_s: float) -> dict[str, float]:
        """Totals, the rate of the last seconds, and recent values as of ``text_stats.figures_of``."""
        self._note_sums(step_s)
        total = self._add_up(now)
        counts = {name: float(getattr(total, name)) for name in ("tokens", "drafted", "accepted", "wasted")}
        return {"tokens_per_s": self._rate.per_s(now)} | counts | figures_of(self._recent.grown, step_s)

    def shares(self) -> dict[str, float]:
        """Each drafter's share of the recent right drafts, by peer id; empty: there were none."""
        return shares_of(self._recent.grown)

    def _add_up(self, now: float) -> DecodingStats:
        total = DecodingStats()
        for stats in (self._ended, *(session.decoding.stats for session in self.running)):
            total.add(stats)
        self._rate.add(total.tokens - self._noted_tokens, now)
        self._noted_tokens = total.tokens
        return total

    def _note_sums(self, step_s: float) -> None:
        under_way = [session.sums() for session, speculates in self.running.items() if speculates]
        self._recent.add(add_sums([self._ended_sums, *under_way]), step_s)


class VerifierService(ModelTextService):
    """A ``ModelTextService`` with drafters and a queue of requests.

    Args:
        model, text, form, name, created, positions: as of ``ModelTextService``.
        drafters: None: there are none.
        sessions: texts written at a time. waiting: most requests that wait, each for ``WAIT_S`` at most.
        on_change: called when a text begins or ends.

    Attributes:
        cost_model: what its texts have learned of drafters.
    """

    def __init__(
        self,
        world: World,
        model: ServedModel,
        text: ModelText,
        *,
        form: ChatFormat | None = None,
        name: str,
        created: int,
        drafters: Drafters | None = None,
        sessions: int = 4,
        waiting: int = 32,
        positions: int = 0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(world, model, text, form=form, name=name, created=created, positions=positions)
        self.cost_model = CostModel()
        self._drafters, self._on_change = drafters, on_change
        self._most_texts, self._most_waiting = sessions, waiting
        self._places, self._waiting = asyncio.Semaphore(sessions), 0
        self._figures = VerifierFigures()
        self._is_closed = False

    @property
    def sessions(self) -> int:
        return len(self._figures.running)

    async def warm_up(self) -> None:
        """Measure a step before the first request, while no drafter works, to judge drafters by. Raises
        ``P2PTrainError``."""
        prompt, steps = WARM_UP
        if self.context is not None and self.context < prompt + steps:
            return
        greedy = Sampling(temperature=0.0)
        session = await self._served.open(positions=prompt + steps, sampling=greedy, sample_from=prompt)
        try:
            result = await session.append(PassRequest(0, (0,) * prompt, 1))
            took_s = list[float]()
            for step in range(steps):
                result = await session.append(PassRequest(prompt + step, result.tokens, 1))
                took_s.append(result.took_s)
        finally:
            await session.close()
        self.cost_model = CostModel(median(took_s))

    async def write(self, request: TextRequest) -> TextSession:
        await self._enter()
        try:
            self._check_open()
            session, prepared = await self.prepare(request, self._end)
        except BaseException:
            self._places.release()
            raise
        self._figures.begin(session, speculates=request.speculate)
        core = Speculation(session.decoding, self.cost_model, vocab_size=self._served.vocab_size)
        drafters = self._drafters if request.speculate else None
        session.begin(
            TextDrafts(drafters, core, positions=prepared.positions, sampling=prepared.sampling, now=self._now)
        )
        self._on_change()
        if self._is_closed:
            await session.end(_leaving())
            raise _leaving()
        return session

    def _check_open(self) -> None:
        if self._is_closed:
            raise _leaving()

    def figures(self) -> dict[str, float]:
        """Figures by name, as of ``VerifierFigures.as_map``."""
        return {"waiting": float(self._waiting)} | self._figures.as_map(self._now(), self.cost_model.step_s)

    def drafters(self) -> list[tuple[DrafterLink, float | None]]:
        """Connected drafters, each with its share of the recent right drafts; None: there were none."""
        shares = self._figures.shares()
        links = self._drafters.connected_links() if self._drafters is not None else []
        return [(link, shares.get(link.at.peer_id, 0.0) if shares else None) for link in links]

    async def close(self, reason: P2PTrainError | None = None) -> None:
        """End all texts, with ``reason`` for their readers. The model stays open. Never raises."""
        self._is_closed = True
        await super().close(reason or _leaving())

    async def _enter(self) -> None:
        """Wait for a place, in the order of requests. Raises ``Refused``: too busy."""
        busy = f"{self._most_texts} texts are being written, and {self._waiting} wait"
        remedy = "try again in a few seconds, or start another verifier"
        if self._places.locked() and self._waiting >= self._most_waiting:
            raise Refused(RefusalCode.BUSY, f"the verifier is busy: {busy}", remedy=remedy)
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._places.acquire()
        except TimeoutError:
            text = f"the verifier is busy: no place became free within {WAIT_S:.0f} s"
            raise Refused(RefusalCode.BUSY, text, remedy=remedy) from None
        finally:
            self._waiting -= 1

    def _end(self, session: TextSession) -> None:
        self._figures.end(session, self._now(), self.cost_model.step_s)
        self._places.release()
        self._on_change()


def _leaving() -> Refused:
    return Refused(RefusalCode.SHUTTING_DOWN, "the verifier is shutting down", remedy="use another verifier")
