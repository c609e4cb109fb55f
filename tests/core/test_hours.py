"""The hours of the day in which a machine takes part."""

from __future__ import annotations

import time

import pytest

from p2ptrain.core.errors import UserError
from p2ptrain.core.hours import OpenHours


@pytest.mark.parametrize(
    ("hours", "at", "is_open", "left_s"),
    [
        ("9-17", "08:59:50", False, 10),
        ("9-17", "09:00:00", True, 8 * 3600),
        ("9-17", "17:00:00", False, 16 * 3600),
        ("22-8", "23:00:00", True, 9 * 3600),
        ("22-8", "07:59:59", True, 1),
        ("22-8", "12:00:00", False, 10 * 3600),
        ("0-24", "12:00:00", True, None),
        ("9:30-17:15", "17:14:00", True, 60),
    ],
)
def test_hours_are_of_the_local_day(hours: str, at: str, is_open: bool, left_s: int | None) -> None:
    wall = time.mktime(time.strptime(f"2026-03-10 {at}", "%Y-%m-%d %H:%M:%S"))
    if left_s is None:
        with pytest.raises(UserError, match="no hours of a day"):
            OpenHours.parse(hours)
        return
    assert OpenHours.parse(hours).until_change_s(wall) == (is_open, left_s)


@pytest.mark.parametrize("text", ["22", "8-8", "25-3", "9:61-10", "a-b", "-"])
def test_text_without_hours_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError) as caught:
        OpenHours.parse(text)
    assert "22-8" in caught.value.remedy
