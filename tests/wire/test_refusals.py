"""Refused callers are told in one line a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError, Refused, ResourceError
from p2ptrain.lab.memory import VirtualClockLoop
from wire.handshake import REFUSALS_S, Refusals
from wire.messages import RefusalCode


@pytest.fixture
def loop() -> Iterator[VirtualClockLoop]:
    loop = VirtualClockLoop()
    yield loop
    loop.close()


def test_first_refusal_is_told_at_once_and_the_others_are_counted(loop: VirtualClockLoop) -> None:
    lines: list[tuple[float, str]] = []
    refusals = Refusals(lambda line: lines.append((loop.time(), line)))

    def knock(at: float, problem: P2PTrainError, host: str) -> None:
        loop.call_at(at, refusals, problem, (host, 4242))

    knock(0, Refused("busy", "too many"), "10.0.0.1")
    for number in range(30):
        knock(1 + number, Refused("busy", "too many"), f"10.0.0.{number % 2}")
    knock(40, ConnectionLost("it went away"), "10.0.0.3")
    knock(50, ProtocolError("it does not speak our protocol"), "10.0.0.2")
    knock(71, Refused("what a caller made up", "no"), "2001:db8::8")
    knock(300, Refused("role", "this is a seed"), "10.0.0.1")
    loop.call_at(1000, loop.stop)
    loop.run_forever()
    assert lines == [
        (0, "refused a caller: 10.0.0.1:4242: too many"),
        (
            REFUSALS_S,
            "refused 31 more callers in a minute; last 10.0.0.2:4242: it does not speak our protocol",
        ),
        (2 * REFUSALS_S, "refused 1 more caller in a minute; last [2001:db8::8]:4242: no"),
        (300, "refused a caller: 10.0.0.1:4242: this is a seed"),
    ]


def test_problems_of_this_machine_raise_an_alarm_and_expected_refusals_are_not_told() -> None:
    lines: list[str] = []
    alarms: list[str] = []
    refusals = Refusals(lines.append, alarms.append)
    refusals(Refused(RefusalCode.LOOPBACK_ONLY, "it listens on the loopback only"), ("127.0.0.1", 4242))
    refusals(ResourceError("too many open files", remedy="raise the limit"), ("127.0.0.1", 7337))
    assert (lines, alarms) == ([], ["too many open files; raise the limit"])
