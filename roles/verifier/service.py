"""A verifier's ``TextService``: texts of its model, with drafters.

A limited number of texts is written at a time. Others wait, and are refused if that takes too long: then they are told
when to try again.
"""

from __future__ import annotations

import asyncio
import math

from p2ptrain.compute.text import ChatFormat, ModelText
from p2ptrain.core.errors import P2PTrainError, Refused
from p2ptrain.core.world import World
from roles.gauges import MovingAverage, Rate
from roles.serving.model import ServedModel
from roles.serving.text_service import WAIT_S, ModelTextService, TextSession
from roles.serving.text_stats import RecentSums, TextSums, add_sums, figures_of
from roles.serving.texts import TextRequest
from roles.verifier.cost_model import CostModel
from roles.verifier.drafters import Drafters, TextDrafts
from roles.verifier.speculation import Speculation
from wire.messages import RefusalCode
from wire.text_messages import Serving

USUAL_SESSIONS = 16
"""Texts written at a time, in one pass."""
LONGEST_RETRY_S = 3600


class Places:
    """A number of places. Who waits gets one in the order of priority, lower ones first, then first come, first served.

    Attributes:
        free: places that nobody has. waiting: how many wait.
    """

    def __init__(self, count: int) -> None:
        self.free = count
        self._asked: list[tuple[int, int, asyncio.Future[None]]] = []
        self._last = 0

    @property
    def waiting(self) -> int:
        return sum(not place.done() for *_, place in self._asked)

    async def take(self, priority: int) -> None:
        if self.free:
            self.free -= 1
            return
        self._last += 1
        place = asyncio.get_running_loop().create_future()
        entry = priority, self._last, place
        self._asked.append(entry)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it got a place just now
                self.give_back()
            raise
        finally:
            self._asked.remove(entry)

    def give_back(self) -> None:
        if first := min((entry for entry in self._asked if not entry[2].done()), default=None):
            first[2].set_result(None)
        else:
            self.free += 1


class VerifierFigures:
    """Sums and recent figures of all texts.

    Attributes:
        running: texts under way, and when each began. duration: of a text.
    """

    def __init__(self) -> None:
        self.running: dict[TextSession, float] = {}
        self.duration = MovingAverage()
        self._rate, self._recent = Rate(), RecentSums()
        self._ended: TextSums = {}

    def end(self, session: TextSession, now: float) -> None:
        self.duration.add(now - self.running.pop(session))
        self._ended = add_sums([self._ended, session.sums()])
        self._add_up(now)

    def as_map(self, now: float, step_s: float) -> dict[str, float]:
        """Totals, the rate of the last seconds, and recent values as of ``text_stats.figures_of``."""
        total = self._add_up(now)
        counts = {name: total.get(name, 0.0) for name in ("tokens", "drafted", "accepted", "wasted")}
        return {"tokens_per_s": self._rate.per_s(now)} | counts | figures_of(self._recent.grown, step_s)

    def _add_up(self, now: float) -> TextSums:
        total = add_sums([self._ended, *(session.sums() for session in self.running)])
        self._rate.add(self._recent.add(total), now)
        return total


class VerifierService(ModelTextService):
    """A ``ModelTextService`` with drafters and a queue of requests.

    Args:
        model, text, form, name, created, positions: as of ``ModelTextService``.
        drafters: None: there are none.
        sessions: texts written at a time. waiting: most requests that wait, each for ``WAIT_S`` at most.

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
        sessions: int = USUAL_SESSIONS,
        waiting: int = 32,
        positions: int = 0,
    ) -> None:
        super().__init__(world, model, text, form=form, name=name, created=created, positions=positions)
        self.cost_model = CostModel()
        self._drafters = drafters
        self._most_texts, self._most_waiting = sessions, waiting
        self._places = Places(sessions)
        self._figures = VerifierFigures()
        self._is_closed = False

    @property
    def sessions(self) -> int:
        return len(self._figures.running)

    async def write(self, request: TextRequest) -> TextSession:
        asked_at = self._now()
        await self._enter(request.priority)
        try:
            self._check_open()
            session, prepared = await self.prepare(request, asked_at, self._end)
        except BaseException:
            self._places.give_back()
            raise
        self._figures.running[session] = self._now()
        core = Speculation(session.decoding, self.cost_model)
        drafters = self._drafters if request.speculate else None
        session.begin(
            TextDrafts(drafters, core, positions=prepared.positions, sampling=prepared.sampling, now=self._now)
        )
        if self._is_closed:
            await session.end(_leaving())
            raise _leaving()
        return session

    def _check_open(self) -> None:
        if self._is_closed:
            raise _leaving()

    def figures(self) -> dict[str, float]:
        """Figures by name, as of ``VerifierFigures.as_map`` and ``RecentPace.as_map``."""
        now = self._now()
        counts = {"waiting": float(self._places.waiting), "preemptions": float(self._served.preemptions)}
        counts["places"] = float(self._most_texts)
        return counts | self._figures.as_map(now, self.cost_model.step_s) | self._pace.as_map(now)

    def describe(self, weights: str, http: str) -> Serving:
        """What the seed lists of this model. ``weights``: their digest."""
        links = self._drafters.connected_links() if self._drafters is not None else []
        return Serving(
            model=self.model,
            vocab_size=self._served.vocab_size,
            context=self.context or 0,
            tokenizer=self._text.tokenizer.digest,
            http=http,
            sessions=self.sessions,
            stats=self.figures(),
            drafters=[link.figures for link in links],
            weights=weights,
        )

    async def close(self, reason: P2PTrainError | None = None) -> None:
        """End all texts, with ``reason`` for their readers. The model stays open. Never raises."""
        self._is_closed = True
        await super().close(reason or _leaving())

    async def _enter(self, priority: int) -> None:
        """Wait for a place. Raises ``Refused``: too busy."""
        if not self._places.free and self._places.waiting >= self._most_waiting:
            raise self._busy(f"{self._most_texts} texts are being written, and {self._places.waiting} wait")
        try:
            async with asyncio.timeout(WAIT_S):
                await self._places.take(priority)
        except TimeoutError:
            raise self._busy(f"no place became free within {WAIT_S:.0f} s") from None

    def _busy(self, why: str) -> Refused:
        """Expect that those who wait now go first, and that texts take as long as the last ones."""
        wait_s = self._figures.duration.seconds * (self._places.waiting + 1) / self._most_texts
        after_s = min(math.ceil(wait_s), LONGEST_RETRY_S)
        when = f"{after_s} s" if after_s else "a few seconds"
        remedy = f"try again in {when}, or start another verifier"
        return Refused(RefusalCode.BUSY, f"the verifier is busy: {why}", remedy=remedy, retry_after_s=after_s)

    def _end(self, session: TextSession) -> None:
        self._figures.end(session, self._now())
        self._places.give_back()


def _leaving() -> Refused:
    return Refused(RefusalCode.SHUTTING_DOWN, "the verifier is shutting down", remedy="use another verifier")
