"""The table of a model directory against safetensors' own files, and directories that are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from p2ptrain.core.errors import ProtocolError, StorageError
from p2ptrain.core.tensor_files import (
    INDEX_FILE,
    MAX_CONFIG_BYTES,
    MAX_HEADER_BYTES,
    WEIGHTS_FILE,
    TensorTable,
    config_untrusted,
)

TENSORS: dict[str, Any] = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5, dtype=np.float16),
    "scalar": np.array(7, dtype=np.int64),
    "empty": np.zeros((0, 4), dtype=np.uint8),
    "mask": np.array([True, False]),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / WEIGHTS_FILE, metadata={"format": "np"})
    return tmp_path


def split_in_two(directory: Path) -> dict[str, str]:
    (directory / WEIGHTS_FILE).unlink()
    where = {name: f"model-0000{1 + (name > 'b')}-of-00002.safetensors" for name in TENSORS}
    for file in set(where.values()):
        save_file({name: tensor for name, tensor in TENSORS.items() if where[name] == file}, directory / file)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return where


@pytest.mark.parametrize("files", [1, 2])
def test_what_is_read_is_what_safetensors_reads(directory: Path, files: int) -> None:
    expected = load_file(directory / WEIGHTS_FILE)
    if files == 2:
        split_in_two(directory)
    table = TensorTable(directory)
    assert set(table.entries) == set(TENSORS)
    for name, tensor in expected.items():
        entry = table.entries[name]
        assert entry.shape == tensor.shape
        data = table.read(name)
        assert bytes(data) == tensor.tobytes()
        assert entry.size_bytes == tensor.nbytes
    with pytest.raises(KeyError):
        table.read("c")


def test_an_index_may_name_files_of_folders_as_in_transformers(directory: Path) -> None:
    where = {name: f"weights/{file}" for name, file in split_in_two(directory).items()}
    (directory / "weights").mkdir()
    for file in set(where.values()):
        (directory / Path(file).name).rename(directory / file)
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": where}))
    assert bytes(TensorTable(directory).read("a")) == TENSORS["a"].tobytes()


def test_an_index_beside_a_whole_file_is_ignored_as_by_transformers(directory: Path) -> None:
    where = split_in_two(directory)
    save_file({"new": TENSORS["a"]}, directory / WEIGHTS_FILE)
    assert list(TensorTable(directory).entries) == ["new"], "not the old shards"
    for file in set(where.values()):
        (directory / file).unlink()
    assert list(TensorTable(directory).entries) == ["new"]


def test_a_fingerprint_is_of_the_weights_and_not_of_their_files(directory: Path) -> None:
    before = TensorTable(directory).fingerprint()
    for name, changed in {"a": TENSORS["a"] + 1, "b": TENSORS["b"].astype(np.float32), "empty": np.zeros(0)}.items():
        save_file(TENSORS | {name: changed}, directory / WEIGHTS_FILE)
        assert TensorTable(directory).fingerprint() != before, name
    split_in_two(directory)
    assert TensorTable(directory).fingerprint() == before


def test_a_piece_of_a_tensor(directory: Path) -> None:
    table = TensorTable(directory)
    whole = TENSORS["a"].tobytes()
    assert bytes(table.read("a", 5, 11)) == whole[5:11]
    assert bytes(table.read("a", 20)) == whole[20:]
    for start, stop in ((-1, 3), (3, 2), (0, 25)):
        with pytest.raises(ValueError, match="24 bytes"):
            table.read("a", start, stop)


def header(named: dict[str, Any], data_bytes: int) -> bytes:
    encoded = json.dumps(named).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(data_bytes)


def f32(start: int, stop: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "header claims"),
        (b"\x05\0\0", "header claims"),
        ((1 << 60).to_bytes(8, "little") + b"{}", f"header claims {1 << 60} bytes"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + bytes(MAX_HEADER_BYTES + 9), "header claims"),
        (header({"a": f32(0, 8, 3)}, 8), "offsets do not match its shape"),
        (header({"a": f32(0, 8, 2)}, 7), "header describes"),
        (header({"a": f32(0, 8, 2)}, 9), "header describes"),
        (header({"a": f32(0, 8, 2), "b": f32(4, 12, 2)}, 12), "overlap"),
        (header({"a": f32(0, 8, 2), "b": f32(12, 20, 2)}, 20), "between them"),
        (header({"a": f32(8, 0, -2)}, 8), "invalid shape or offset"),
        (header({"a": f32(0, 8, True, 2)}, 8), "invalid shape or offset"),
        (header({"a": f32(0, 4, *[1] * 9)}, 4), "invalid shape or offset"),
        (header({"a": {**f32(0, 8, 2), "dtype": "F4"}}, 8), "dtype"),
        (header({"a": [1]}, 8), "ill-typed"),
        (header({"__metadata__": 1}, 0), "ill-typed metadata"),
        (header([1], 0), "not a table"),  # type: ignore[arg-type]
        (header({}, 0).replace(b"{}", b"{]"), "not JSON"),
    ],
    ids=[
        "empty",
        "no-length",
        "a-header-of-an-exabyte",
        "a-header-over-the-most",
        "a-shape-of-other-bytes",
        "too-short",
        "too-long",
        "overlap",
        "a-gap",
        "negative",
        "a-boolean",
        "nine-dimensions",
        "an-unknown-dtype",
        "no-table-of-a-tensor",
        "metadata-that-are-none",
        "a-list",
        "no-json",
    ],  # else a name of 400 MB is made of the longest one
)
def test_a_damaged_file_is_refused(directory: Path, content: bytes, cause: str) -> None:
    (directory / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(StorageError, match=cause) as caught:
        TensorTable(directory)
    assert str(directory) in caught.value.message


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"a": "../model-00001-of-00002.safetensors"}, "an invalid name of a file"),
        ({"a": "/etc/passwd"}, "an invalid name of a file"),
        ({"a": "b/../../model-00001-of-00002.safetensors"}, "an invalid name of a file"),
        ({"a": 5}, "an invalid name of a file"),
        ({"c": "model-00001-of-00002.safetensors"}, "which lacks it"),
        ({"a": "model-00003-of-00002.safetensors"}, "cannot read"),
    ],
)
def test_a_damaged_index_is_refused(directory: Path, change: dict[str, Any], cause: str) -> None:
    where = split_in_two(directory)
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": where | change}))
    with pytest.raises(StorageError, match=cause):
        TensorTable(directory)


def test_a_file_that_became_shorter(directory: Path) -> None:
    table = TensorTable(directory)
    with (directory / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(table.entries["a"].stop - 1)
    with pytest.raises(StorageError, match="ends 1 bytes too early"):
        table.read("a")
    (directory / WEIGHTS_FILE).unlink()
    with pytest.raises(StorageError, match="cannot read"):
        table.read("a")


GOOD = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "max_position_embeddings": 10485760,
    "rope_parameters": {"rope_theta": 10**9, "factor": 8.0},
    "eos_token_id": [128001, 128008],
    "pad_token_id": -1,
    "tie_word_embeddings": False,
}


def test_what_published_models_say_is_taken() -> None:
    assert config_untrusted(json.dumps(GOOD)) == GOOD
    endless = {"max_position_embeddings": 1 << 30, "sliding_window": (1 << 31) - 1, "text": {"seq_length": 10**9}}
    assert config_untrusted(json.dumps(GOOD | endless)) == GOOD | endless


def test_numbers_that_json_lacks_are_read_as_transformers_does() -> None:
    limits = {"time_step_limit": [0.0, float("inf")], "deep": {"low": [-float("inf")]}}
    tagged = '"time_step_limit": [0.0, {"__float__": "Infinity"}], "deep": {"low": [{"__float__": "-Infinity"}]}}'
    for text in (json.dumps(GOOD | limits), json.dumps(GOOD).removesuffix("}") + ", " + tagged):
        assert config_untrusted(text) == GOOD | limits
    assert config_untrusted(json.dumps(GOOD | {"a": {"__float__": "1"}, "b": {"__float__": []}}))["a"] == {
        "__float__": "1"
    }


def test_what_would_choose_code_is_left_out() -> None:
    code = {"auto_map": {"AutoModel": "evil.py"}, "trust_remote_code": True, "_attn_implementation": "hub/kernel"}
    assert config_untrusted(json.dumps(GOOD | code)) == GOOD


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"model_type": None}, "no model_type"),
        ({"num_hidden_layers": 0}, "must have 1 to 1024 layers"),
        ({"num_hidden_layers": 1025}, "must have 1 to 1024 layers"),
        ({"n_layer": True}, "must have 1 to 1024 layers"),
        ({"num_hidden_layers": 4.0}, "must have 1 to 1024 layers"),
        ({"hidden_size": 1 << 30}, "hidden_size = 1073741824"),
        ({"deep": [{"a": [-(1 << 60)]}]}, "a = -"),
        ({"max_position_embeddings": 1 << 50}, "max_position_embeddings = 1125899906842624"),
        ({"num_local_experts": 1025}, "num_local_experts = 1025"),
        ({"x": "y" * MAX_CONFIG_BYTES}, "more than"),
    ],
)
def test_what_no_model_says_is_refused(change: dict[str, Any], cause: str) -> None:
    with pytest.raises(ProtocolError, match=cause):
        config_untrusted(json.dumps(GOOD | change))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 60_000, "1", '"llama"'])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        config_untrusted(text)
