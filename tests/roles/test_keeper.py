"""A worker's checkpoints of one job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.schema import Profile
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import StorageError, UserError
from ring.token import first_lineage
from roles.stand_in import StandInEngine
from roles.worker.keeper import Keeper, odd_ones_out, state_digest

LINEAGE = "0123456789abcdef" * 2


def keeper(root: Path, told: list[tuple[str, str, str]] | None = None) -> Keeper:
    return Keeper(RealDisk(), root, 2, lambda *notice: (told if told is not None else []).append(notice))


def test_without_a_checkpoint_the_initial_state_and_its_own_bits_make_the_lineage(tmp_path: Path) -> None:
    engine = StandInEngine(Profile())
    applied, lineage, square_sum, entry = keeper(tmp_path).load(engine, spec="spec", restore_step=-1)
    assert (applied, square_sum, entry) == (0, 0.0, None)
    assert lineage == first_lineage("spec", state_digest(engine.state()))
    assert lineage != first_lineage("spec", b"other bits")


def test_what_was_saved_is_loaded_with_its_lineage_and_norm(tmp_path: Path) -> None:
    engine, other = StandInEngine(Profile()), StandInEngine(Profile())
    engine.load_initial()
    keeper(tmp_path).save(engine, 7, {"lineage": LINEAGE, "square_sum": 2.5})
    applied, lineage, square_sum, entry = keeper(tmp_path).load(other, spec="spec", restore_step=-1)
    assert (applied, lineage, square_sum) == (7, LINEAGE, 2.5)
    assert entry is not None
    assert other.digest() == engine.digest()


@pytest.mark.parametrize("lineage", [None, "", "xyz", 5, "AB" * 16])
def test_a_manifest_that_names_no_lineage_is_refused(tmp_path: Path, lineage: object) -> None:
    engine = StandInEngine(Profile())
    keeper(tmp_path).save(engine, 7, {"lineage": lineage})  # type: ignore[dict-item]
    with pytest.raises(StorageError, match="does not say which state"):
        keeper(tmp_path).load(engine, spec="spec", restore_step=-1)


def test_going_back_sets_the_newer_ones_aside(tmp_path: Path) -> None:
    told: list[tuple[str, str, str]] = []
    engine = StandInEngine(Profile())
    for step in (5, 9):
        keeper(tmp_path).save(engine, step, {"lineage": LINEAGE})
    applied, *_ = keeper(tmp_path, told).load(engine, spec="spec", restore_step=5)
    assert applied == 5
    assert [kind for _, kind, _ in told] == ["checkpoint-superseded"]
    assert len(list(tmp_path.glob("superseded-step-00000009-*"))) == 1


def test_verify_finds_what_is_missing_and_what_is_damaged(tmp_path: Path) -> None:
    engine, mine = StandInEngine(Profile()), keeper(tmp_path)
    entry = mine.save(engine, 7, {"lineage": LINEAGE})
    assert mine.verify(7).digest == entry.digest
    with pytest.raises(UserError, match="no checkpoint of step 8"):
        mine.verify(8)
    state = entry.path / "state.bin"
    data = bytearray(state.read_bytes())
    data[3] ^= 1
    state.write_bytes(data)
    with pytest.raises(StorageError, match="differs"):
        mine.verify(7)


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    class Full(StandInEngine):
        def save(self, directory: Path) -> None:
            (directory / "config.json").write_text(json.dumps({}))
            raise StorageError("the disk is full")

    with pytest.raises(StorageError, match="full"):
        keeper(tmp_path).save(Full(Profile()), 7, {"lineage": LINEAGE})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("digests", "odd"),
    [([b"a"], set()), ([b"a", b"a"], set()), ([b"a", b"b", b"a"], {1}), ([b"a", b"b", b"b"], {0}), ([b"a", b"b"], {1})],
)
def test_the_most_are_believed_and_the_lowest_rank_where_they_are_even(digests: list[bytes], odd: set[int]) -> None:
    assert odd_ones_out(digests) == odd
