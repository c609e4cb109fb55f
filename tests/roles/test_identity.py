"""Slots of the state directory: who a peer is across restarts, and beside others on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import UserError
from roles.member import claim


def test_a_second_worker_takes_the_next_slot_and_a_restarted_one_its_own(tmp_path: Path) -> None:
    first = claim(RealDisk(), tmp_path, role="worker")
    second = claim(RealDisk(), tmp_path, role="worker", name="laptop")
    assert (first.directory.name, second.directory.name) == ("worker-1", "worker-2")
    assert first.peer_id != second.peer_id
    assert second.name == "laptop"
    first.release()
    again = claim(RealDisk(), tmp_path, role="worker")
    assert (again.peer_id, again.directory) == (first.peer_id, first.directory)
    for identity in (again, second):
        identity.release()


def test_a_slot_that_is_asked_for_and_in_use_is_refused(tmp_path: Path) -> None:
    holder = claim(RealDisk(), tmp_path, role="worker", slot=3)
    with pytest.raises(UserError, match=r"worker-3 .* is in use"):
        claim(RealDisk(), tmp_path, role="worker", slot=3)
    holder.release()


def test_a_damaged_peer_id_is_replaced(tmp_path: Path) -> None:
    first = claim(RealDisk(), tmp_path, role="worker")
    first.release()
    (first.directory / "peer-id").write_bytes(b"\xff\x00 not an id")
    again = claim(RealDisk(), tmp_path, role="worker")
    assert again.peer_id != first.peer_id
    again.release()
    once_more = claim(RealDisk(), tmp_path, role="worker")
    assert once_more.peer_id == again.peer_id
    once_more.release()


def test_a_lock_is_exclusive_and_ends_with_its_holder(tmp_path: Path) -> None:
    held = RealDisk().try_lock(tmp_path / "lock")
    assert held is not None
    assert RealDisk().try_lock(tmp_path / "lock") is None
    held.close()
    free = RealDisk().try_lock(tmp_path / "lock")
    assert free is not None
    free.close()
