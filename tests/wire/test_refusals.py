"""Refused callers are told in one line a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from p2ptrain.core.errors import ConnectionLost, P2PTrainError, ProtocolError, Refused, ResourceError
from p2ptrain.lab.memory import VirtualClockLoop
from wire.handshake import MAX_MACHINES, REFUSALS_S, Refusals
from wire.messages import RefusalCode

GARBAGE = ProtocolError("it does not speak our protocol")


@pytest.fixture
def loop() -> Iterator[VirtualClockLoop]:
    loop = VirtualClockLoop()
    yield loop
    loop.close()


def test_the_first_is_told_at_once_and_the_others_are_counted(loop: VirtualClockLoop) -> None:
    told: list[tuple[float, str]] = []
    refusals = Refusals(lambda line: told.append((loop.time(), line)))

    def knock(at: float, problem: P2PTrainError, host: str) -> None:
        loop.call_at(at, refusals, problem, (host, 4242))

    knock(0, Refused("busy", "too many"), "10.0.0.1")
    for number in range(30):
        knock(1 + number, Refused("busy", "too many"), f"10.0.0.{number % 2}")
    knock(40, ConnectionLost("it went away"), "10.0.0.3")
    knock(50, GARBAGE, "10.0.0.2")
    knock(70, Refused("what a caller made up", "hm"), "2001:db8::7")
    knock(71, Refused("\n" * 4000, "ha"), "2001:db8::8")  # the same network
    knock(300, Refused("role", "this is a seed"), "10.0.0.1")
    loop.call_at(1000, loop.stop)
    loop.run_forever()
    assert told == [
        (0, "refused a caller: 10.0.0.1:4242: too many"),
        (
            REFUSALS_S,
            "refused 31 more callers in a minute, from 3 addresses: 30 busy, 1 protocol-error; "
            "last 10.0.0.2:4242: it does not speak our protocol",
        ),
        (
            2 * REFUSALS_S,
            "refused 2 more callers in a minute, from 1 address: 2 other reasons; last [2001:db8::8]:4242: ha",
        ),
        (300, "refused a caller: 10.0.0.1:4242: this is a seed"),
    ]


def test_what_this_machine_lacks_is_told_apart_and_what_comes_again_is_not_told(loop: VirtualClockLoop) -> None:
    told: list[str] = []
    alarms: list[str] = []
    refusals = Refusals(told.append, alarms.append)
    refusals(Refused(RefusalCode.LOOPBACK_ONLY, "it listens on the loopback only"), ("127.0.0.1", 4242))
    refusals(ResourceError("too many open files", remedy="raise the limit"), ("127.0.0.1", 7337))
    assert (told, alarms) == ([], ["too many open files; raise the limit"])


def test_the_memory_for_counting_is_bounded(loop: VirtualClockLoop) -> None:
    told: list[str] = []
    refusals = Refusals(told.append)

    def crowd() -> None:
        for number in range(2 * MAX_MACHINES):
            refusals(Refused(f"code {number}", "no"), (f"10.0.{number // 256}.{number % 256}", number))
        assert len(refusals._codes) == 1
        assert len(refusals._machines) == MAX_MACHINES + 1

    loop.call_soon(crowd)
    loop.call_at(REFUSALS_S + 1, loop.stop)
    loop.run_forever()
    assert f"refused {2 * MAX_MACHINES - 1} more callers in a minute, from more than {MAX_MACHINES}" in told[1]
