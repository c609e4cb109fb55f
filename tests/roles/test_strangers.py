"""Refusals in the event log: the first at once, then one a second for each machine and reason, with a count."""

from __future__ import annotations

from unittest.mock import MagicMock

from roles.seed.events import MAX_KEPT, TOLD_EVERY_S, EventLog, Subscriptions


def log() -> EventLog:
    return EventLog(MagicMock(), MagicMock(), Subscriptions(MagicMock()))


def test_a_crowd_is_told_once_a_second_and_counted():
    strangers = log()
    told = [strangers._told("10.0.0.9", "busy", f"call {number}", number / 100) for number in range(250)]
    assert [line for line in told if line] == [
        "call 0",
        "call 100 (99 more like it before)",
        "call 200 (99 more like it before)",
    ]


def test_another_machine_and_another_reason_are_told_at_once():
    strangers = log()
    assert strangers._told("10.0.0.9", "busy", "a", 0.0) == "a"
    assert strangers._told("10.0.0.8", "busy", "b", 0.1) == "b"
    assert strangers._told("10.0.0.9", "role", "c", 0.2) == "c"
    assert strangers._told("10.0.0.9", "busy", "d", 0.3) is None
    assert strangers._told("10.0.0.9", "busy", "e", TOLD_EVERY_S) == "e (1 more like it before)"


def test_what_is_remembered_is_bounded():
    strangers = log()
    for number in range(3 * MAX_KEPT):
        strangers._told(f"host-{number}", "busy", "text", 0.0)
    assert len(strangers._refused) == MAX_KEPT
