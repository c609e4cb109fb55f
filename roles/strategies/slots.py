"""The exchange of exact averages of LoRA adapters: as ``sync``, but each member that takes part has a slot."""

from __future__ import annotations

from typing import Any

from ring.session import RingSession
from ring.token import ShareRule
from roles.strategies.sync import SyncStrategy


class SlotStrategy(SyncStrategy):
    """``rule``: the job's, which gives each member that takes part in a round a slot."""

    def __init__(self, *common: Any, rule: ShareRule) -> None:
        super().__init__(*common)
        self._rule = rule

    async def compute(self, step: int, first: int, count: int, session: RingSession, *, patience_s: float) -> None:
        counts = self._rule.of_step([member.count for member in session.view.members], step).counts
        engine: Any = self._engine
        # In rank order. A member that does not take part adds zeros to the last slot.
        slot = sum(count > 0 for count in counts[: session.rank])
        await self._compute.run(engine.use_slot, min(slot, sum(count > 0 for count in counts) - 1))
        await super().compute(step, first, count, session, patience_s=patience_s)
