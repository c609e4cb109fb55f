"""Which drafters of a session draft, and which rest. Pure.

One drafter drafts: the one that a token costs least with. Others draft beside it only while they are not proven yet:
they have to show how often they are right. Who is not the best rests, and is tried again after a while, longer each
time, since texts change. When the best is lost, who rested because of it begins. All rest where the ``trial`` says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from roles.speculation.outlook import Outlook


class Rota:
    """The drafters of one session.

    Args:
        drafters: by number; theirs to whom it belongs.
    """

    def __init__(self, drafters: Mapping[int, Outlook]) -> None:
        self._drafters = drafters

    def review(self, size: int, step_s: float, *, all_rest: bool) -> list[int]:
        """Look who is to draft from now on, with ``size`` tokens of text. Returns those for whom that changed.

        Args:
            step_s: of plain decoding; 0 where it is not known.
        """
        before = {number: outlook.resting for number, outlook in self._drafters.items()}
        outlooks = self._drafters.values()
        if all_rest:
            for outlook in outlooks:
                if not outlook.resting:
                    outlook.rest(size)
        else:
            for outlook in outlooks:
                if outlook.resting and size >= outlook.rests_until:
                    outlook.begin(size)
            proven = [outlook for outlook in outlooks if outlook.proven and not outlook.resting]
            best = min(proven, key=lambda outlook: outlook.token_s(step_s), default=None)
            for outlook in proven:
                if outlook is not best:
                    outlook.lag(size)
            if outlooks and all(outlook.resting for outlook in outlooks):
                min(outlooks, key=lambda outlook: outlook.token_s(step_s)).begin(size)
        return [number for number, outlook in self._drafters.items() if outlook.resting != before[number]]
