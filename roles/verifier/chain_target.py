"""A target whose model is split over workers: the verifier is the client of a chain of stages.

Several sessions are in the chain at once, each at another stage. A stage that is lost is replaced while a pass is under
way, and its picks are the same; the pass takes as long as that takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2ptrain.core.errors import NetworkError, Refused, ResourceError, UserError
from p2ptrain.core.serving import Sampling
from roles.chain.client import Chain
from roles.chain.generation import GenerationSession
from roles.chain.session import Submit
from roles.verifier.target import Passed
from wire.handshake import RefusalCode

MAX_SESSIONS = 16


class ChainTarget:
    """See the module's docstring, and ``roles.verifier.target.Target``.

    Args:
        chain: loaded; it is closed with this target, its crew is not.
        context: positions that the model knows; None: nobody says.
        max_sessions: at a time.
        encoding, prefill_encoding: of hidden states, as of ``Chain.open``. Smaller ones than the chain's own change
            the text.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        label: str,
        context: int | None = None,
        max_sessions: int = MAX_SESSIONS,
        encoding: str = "",
        prefill_encoding: str = "",
    ) -> None:
        self.vocab_size, self.context, self.label = chain.vocab_size, context, label
        self._chain, self._max_sessions = chain, max_sessions
        self._encodings = {"encoding": encoding, "prefill_encoding": prefill_encoding}
        self._opening = 0
        self._sessions: set[ChainSession] = set()

    async def open(self, *, positions: int, sampling: Sampling) -> ChainSession:
        """Begin a session of at most so many positions at every stage.

        Raises:
            UserError: the model knows fewer positions.
            Refused: too many sessions are open.
            NetworkError: a stage is lost without a spare; it may come back.
            P2PTrainError: a stage refuses.
        """
        if positions < 1:
            raise UserError(f"a session of {positions} positions", remedy="ask for at least one")
        if self.context is not None and positions > self.context:
            raise UserError(
                f"{positions} positions are more than the model's context of {self.context}",
                remedy=f"ask for at most {self.context}, prompt and new tokens together",
            )
        if len(self._sessions) + self._opening >= self._max_sessions:
            text = f"{self._max_sessions} sessions are open"
            raise Refused(RefusalCode.BUSY, text, remedy="try again when other texts are finished")
        self._opening += 1
        try:
            opened = await self._chain.open(positions=positions, sampling=sampling, **self._encodings)
        except ResourceError as problem:
            if self._chain.lacking:  # not for lack of room here: none is made by ending other texts
                raise NetworkError(problem.message, remedy=problem.remedy) from problem
            raise
        finally:
            self._opening -= 1
        session = ChainSession(self, opened)
        self._sessions.add(session)
        return session

    def facts(self) -> dict[str, Any]:
        plan = self._chain.plan
        return {
            "kind": "split",
            "dtype": self._chain.encoding,
            "layers": plan.layers,
            "sessions": len(self._sessions),
            "stages": [{"name": stage.worker.name, "start": stage.start, "stop": stage.stop} for stage in plan.stages],
        }

    async def close(self) -> None:
        self._sessions.clear()
        await self._chain.close()  # with all of its sessions

    def drop(self, session: ChainSession) -> None:
        """It is closed."""
        self._sessions.discard(session)


class ChainSession:
    """A session of a ``ChainTarget``, which makes it; see ``roles.verifier.target.TargetSession``.

    Attributes:
        mendings: as of ``GenerationSession``.
    """

    def __init__(self, target: ChainTarget, session: GenerationSession) -> None:
        self.mendings = session.mendings
        self._target, self._session = target, session
        self._over = False

    @property
    def lost(self) -> bool:
        return self._session.failed

    async def run(self, *, keep: int, ids: Sequence[int], picks: int, draw: int, prefill: bool) -> Passed:
        """See ``TargetSession``. It took from when it was sent until its answer was there: the way counts, and so do
        other sessions' works at a stage. The next one may be given while it is under way: it has to wait for the
        slowest stage only."""
        if self._over:
            raise RuntimeError("a session that failed was given a pass")
        try:
            done = await self._session.run(Submit(tuple(ids), keep, picks, draw, prefill))
        except BaseException:
            self._over = True  # cancelled, too: then it is only to be closed
            raise
        return Passed(done.tokens, done.took_s)

    async def close(self) -> None:
        self._target.drop(self)
        await self._session.close()
