"""A model that is split over workers. This process is the client of the chain of their stages."""

from __future__ import annotations

from typing import Any

from p2ptrain.core.errors import NetworkError, Refused, ResourceError
from p2ptrain.core.serving import Sampling, check_positions
from roles.serving.chain import StageChain
from roles.serving.chain_session import ChainSession, ChainTimes
from roles.serving.local_model import CLOSE_REMEDY
from wire.messages import RefusalCode


class SplitModel:
    """A ``ServedModel``. Several sessions are in the chain at once, at different stages. If a stage is lost during a
    pass, the pass takes longer and gives the same samples.

    Args:
        chain: a loaded chain. It is closed with this model; the workers keep their parts.
        encoding, prefill_encoding: of hidden states, as of ``StageChain.open``. Smaller ones than the default change
            the text.
    """

    def __init__(
        self,
        chain: StageChain,
        *,
        label: str,
        context: int | None = None,
        max_sessions: int = 16,
        encoding: str = "",
        prefill_encoding: str = "",
    ) -> None:
        self.vocab_size, self.context, self.label = chain.vocab_size, context, label
        self._chain, self._max_sessions = chain, max_sessions
        self._encodings = {"encoding": encoding, "prefill_encoding": prefill_encoding}

    @property
    def times(self) -> ChainTimes:
        return self._chain.times

    async def open(self, *, positions: int, sampling: Sampling, sample_from: int) -> ChainSession:
        check_positions(positions, self.context)
        if self._chain.session_count >= self._max_sessions:
            raise Refused(RefusalCode.BUSY, f"{self._max_sessions} sessions are open", remedy=CLOSE_REMEDY)
        try:
            return await self._chain.open(
                positions=positions, sampling=sampling, sample_from=sample_from, **self._encodings
            )
        except ResourceError as problem:
            if self._chain.lacking:  # a missing stage: ending other texts would free nothing
                raise NetworkError(problem.message, remedy=problem.remedy) from problem
            raise

    def facts(self) -> dict[str, Any]:
        plan = self._chain.plan
        return {
            "kind": "split",
            "dtype": self._chain.encoding,
            "layers": plan.layers,
            "sessions": self._chain.session_count,
            "stages": [{"name": stage.peer.name, "start": stage.start, "stop": stage.stop} for stage in plan.stages],
        }

    async def close(self) -> None:
        await self._chain.close()
