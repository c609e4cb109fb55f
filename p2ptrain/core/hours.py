"""The hours of the day in which a machine takes part."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Self

from p2ptrain.core.errors import UserError

DAY_S = 86400


@dataclass(frozen=True, slots=True)
class OpenHours:
    """From ``begin_s`` to ``end_s``, in seconds of the local day; past midnight if it ends before it begins."""

    begin_s: int
    end_s: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read hours such as 22-8 or 9:30-17. Raises ``UserError``."""
        found = re.fullmatch(r"(\d{1,2})(?::([0-5]\d))?-(\d{1,2})(?::([0-5]\d))?", text.replace(" ", ""))
        hours = [int(part or 0) for part in found.groups()] if found else [99, 0, 99, 0]
        begin_s, end_s = hours[0] * 3600 + hours[1] * 60, hours[2] * 3600 + hours[3] * 60
        if max(begin_s, end_s) > DAY_S or begin_s % DAY_S == end_s % DAY_S:
            raise UserError(f"--hours {text} are no hours of a day", remedy="such as 22-8, or 9:30-17")
        return cls(begin_s % DAY_S, end_s % DAY_S)

    def until_change_s(self, wall: float) -> tuple[bool, float]:
        """Whether ``wall`` (Unix time) is within the hours, and the time until they end or begin, if the clock is not
        put forward or back meanwhile."""
        now = time.localtime(wall)
        second = now.tm_hour * 3600 + now.tm_min * 60 + now.tm_sec
        is_open = (second - self.begin_s) % DAY_S < (self.end_s - self.begin_s) % DAY_S
        return is_open, (((self.end_s if is_open else self.begin_s) - second - 1) % DAY_S) + 1

    def __str__(self) -> str:
        return "-".join(f"{s // 3600}:{s % 3600 // 60:02}" for s in (self.begin_s, self.end_s))
