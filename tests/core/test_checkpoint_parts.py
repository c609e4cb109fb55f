"""The index of a model in several files, and the rows of shards."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from p2ptrain.core.checkpoints import ROWS, Draft, join_rows, shard_name, weights_index
from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import StorageError
from p2ptrain.core.tensor_files import INDEX_FILE, TensorTable, header_of


def shard(directory: Path, stage: int, stages: int, *names: str) -> None:
    header = {name: {"dtype": "U8", "shape": [2], "data_offsets": [2 * i, 2 * i + 2]} for i, name in enumerate(names)}
    encoded = json.dumps(header).encode()
    path = directory / shard_name("model", stage, stages)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(range(2 * len(names))))


def test_names_are_those_of_hugging_face() -> None:
    assert shard_name("model", 0, 12) == "model-00001-of-00012.safetensors"
    assert shard_name("training", 11, 12, ".json") == "training-00012-of-00012.json"


def test_the_index_says_where_each_tensor_is(tmp_path: Path) -> None:
    shard(tmp_path, 0, 2, "b", "a")
    shard(tmp_path, 1, 2, "c")
    index = weights_index({shard_name("model", 1, 2): {"c": 2}, shard_name("model", 0, 2): {"b": 2, "a": 2}})
    assert json.loads(index) == {
        "metadata": {"total_size": 6},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    }
    (tmp_path / INDEX_FILE).write_bytes(index)
    table = TensorTable(tmp_path)
    assert (table.read("a"), table.read("b"), table.read("c")) == (b"\2\3", b"\0\1", b"\0\1")


def test_a_tensor_in_two_files_is_refused() -> None:
    with pytest.raises(StorageError, match=r"a is in x and in y"):
        weights_index({"x": {"a": 1}, "y": {"a": 1}})


@pytest.mark.parametrize("shapes", [[(2, 3), ()], [(), ()], [(2, 3), (1, 4)], [(2, 3), (2,)]])
def test_rows_that_do_not_fit_together_are_refused(tmp_path: Path, shapes: list[tuple[int, ...]]) -> None:
    draft = Draft(RealDisk(), tmp_path / "draft", 1)
    for index, shape in enumerate(shapes):
        size_bytes = math.prod(shape)
        draft.begin(shard_name(f"{ROWS}model", index, len(shapes)))
        draft.add(header_of([("w", "U8", shape, size_bytes)], {}) + bytes(size_bytes))
        draft.end()
    with pytest.raises(StorageError, match="the rows of w do not fit together"):
        join_rows(RealDisk(), draft)


def test_metadata_of_a_shard_may_be_null(tmp_path: Path) -> None:
    draft = Draft(RealDisk(), tmp_path / "draft", 1)
    for index in range(2):
        header = json.dumps(
            {"__metadata__": None, "w": {"dtype": "U8", "shape": [1, 2], "data_offsets": [0, 2]}}
        ).encode()
        draft.begin(shard_name(f"{ROWS}model", index, 2))
        draft.add(len(header).to_bytes(8, "little") + header + bytes([index, index]))
        draft.end()
    join_rows(RealDisk(), draft)
    assert TensorTable(draft.path).read("w") == b"\0\0\1\1"
