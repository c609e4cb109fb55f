"""Which drafters of a session draft, and which rest. Pure.

One drafter drafts: the one that a token costs least with. Others draft beside it only while they are not proven yet:
they have to show how often they are right. Who gives the text nothing rests, and so does who is not the best; after a
while, longer each time, it is tried again, since texts change. When the best is lost, who rested because of it begins.
"""

from __future__ import annotations

from collections.abc import Mapping

from roles.speculation.outlook import Outlook

WINDOW = 48
"""Tokens of text after which it is looked at whether a drafter was of use."""
USELESS = 0.04
"""Of the text: who gave less of it does not pay for being told of it."""


class Rota:
    """The drafters of one session.

    Args:
        drafters: by number; theirs to whom it belongs.
    """

    def __init__(self, drafters: Mapping[int, Outlook]) -> None:
        self._drafters = drafters

    def review(self, size: int, step_s: float) -> list[int]:
        """Look who is to draft from now on, with ``size`` tokens of text. Returns those for whom that changed.

        Args:
            step_s: of plain decoding.
        """
        before = {number: outlook.resting for number, outlook in self._drafters.items()}
        for outlook in self._drafters.values():
            if outlook.resting and size >= outlook.rests_until:
                outlook.begin(size)
        self._rest(size, step_s)
        if all(outlook.resting for outlook in self._drafters.values()):
            able = [outlook for outlook in self._drafters.values() if not outlook.useless]
            if able:
                min(able, key=lambda outlook: outlook.token_s(step_s)).begin(size)
        return [number for number, outlook in self._drafters.items() if outlook.resting != before[number]]

    def _rest(self, size: int, step_s: float) -> None:
        working = [outlook for outlook in self._drafters.values() if not outlook.resting]
        for outlook in working:
            if size - outlook.since >= WINDOW:
                if outlook.useful < USELESS * (size - outlook.since) and not self._beside_another(outlook, working):
                    outlook.rest(size, useless=True)
                else:
                    outlook.renew(size)
        proven = [outlook for outlook in working if outlook.proven and not outlook.resting]
        best = min(proven, key=lambda outlook: outlook.token_s(step_s), default=None)
        for outlook in proven:
            if outlook is not best:
                outlook.rest(size, useless=False)

    @staticmethod
    def _beside_another(outlook: Outlook, working: list[Outlook]) -> bool:
        """The text took another's drafts: that says nothing of this one's."""
        return any(other.useful for other in working if other is not outlook)
