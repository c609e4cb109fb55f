"""The doorway: how many strangers may stand in it, in all and of one machine."""

from __future__ import annotations

from wire.transport import MAX_HALF_OPEN, MAX_HALF_OPEN_PER_MACHINE, HalfOpen


def fill(doorway: HalfOpen, host: str) -> int:
    count = 0
    while not doorway.enter(host):
        count += 1
    return count


def test_one_machine_leaves_room_for_others() -> None:
    doorway = HalfOpen()
    assert fill(doorway, "10.0.0.1") == MAX_HALF_OPEN_PER_MACHINE
    assert "with 10.0.0.1" in doorway.enter("10.0.0.1")
    assert not doorway.enter("10.0.0.2")
    doorway.leave("10.0.0.1")
    assert not doorway.enter("10.0.0.1")


def test_there_is_a_limit_in_all() -> None:
    doorway = HalfOpen()
    assert sum(fill(doorway, f"10.0.0.{index}") for index in range(10)) == MAX_HALF_OPEN
    assert doorway.enter("10.1.0.1") == f"{MAX_HALF_OPEN} handshakes are under way"


def test_the_loopback_is_one_machine_and_so_is_an_ipv6_network() -> None:
    for one, same, other in [
        ("127.0.0.1", "127.3.2.1", "10.0.0.1"),
        ("127.0.0.1", "::1", "::2"),
        ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1"),
        ("10.0.0.1", "::ffff:10.0.0.1", "10.0.0.2"),
        ("fe80::1%eth0", "fe80::1%eth1", "fe80::2%eth0"),  # of one link; there is nothing else to tell them by
    ]:
        doorway = HalfOpen(limit_per_machine=1)
        assert not doorway.enter(one)
        assert doorway.enter(same)
        assert not doorway.enter(other)
