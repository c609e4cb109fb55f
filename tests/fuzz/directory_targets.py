"""Model directories from anywhere (headers, index, a part's manifest), activations, and the commands of an island."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import msgpack
import torch
from hypothesis import strategies as st

from p2ptrain.compute.activations import decode_untrusted, ids_untrusted
from p2ptrain.compute.island import COMMANDS, command_untrusted
from p2ptrain.compute.token_store import facts_untrusted
from p2ptrain.core.activations import ENCODINGS, IDS, activation_bytes
from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.tensor_files import (
    ITEM_BYTES,
    MAX_CONFIG_BYTES,
    MAX_DIMS,
    MAX_TENSORS,
    config_untrusted,
    index_files_untrusted,
    parse_header_untrusted,
)
from roles.worker.checkpoint_assembler import parse_offer_untrusted
from wire.job_messages import FilesRequest

from .engine import target
from .strategies import FREE, TEXT, WHOLE, mostly, mutated

_FILE_BYTES = 1 << 20
_DTYPES = st.sampled_from([*ITEM_BYTES, "F4", "", "f32"])


@st.composite
def _headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """A header, and how many bytes its file has."""
    end = 0
    named: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(["a", "b.weight", "c" * 600, "", "__metadata__"]), max_size=4)):
        dtype = draw(mostly(st.sampled_from(sorted(ITEM_BYTES)), _DTYPES))
        shape = draw(mostly(st.lists(st.integers(0, 5), max_size=3), st.lists(FREE, max_size=12)))
        size = math.prod(shape) * ITEM_BYTES.get(dtype, 1) if all(type(n) is int for n in shape) else 0
        place = draw(mostly(st.just([end, end + size]), st.lists(FREE, max_size=3)))
        item = {"dtype": dtype, "shape": shape, "data_offsets": place}
        named[name] = draw(mostly(st.just(item), FREE))
        end += size
    header = json.dumps(named).encode()
    return header, draw(mostly(st.just(8 + len(header) + end), st.integers(-(2**40), 2**63)))


_HUGE = st.integers(0, 2**62).map(lambda n: {"a": {"dtype": "F32", "shape": [n] * 7, "data_offsets": [0, n]}})
_ODD: Any = st.sampled_from([b"[" * 5000, b'{"a":' * 5000, b"\xff\xfe", b"9" * 5000, b'{"a":1,"a":1}', b""])


@target(
    "tensor-headers",
    _headers()
    | st.tuples(mutated(_headers().map(lambda case: case[0])), st.integers(0, _FILE_BYTES))
    | st.tuples(_HUGE.map(lambda named: json.dumps(named).encode()) | _ODD | st.binary(max_size=40), st.just(64)),
    "p2ptrain.core.tensor_files.parse_header_untrusted",
    "p2ptrain.core.tensor_files._entry_untrusted",
    "p2ptrain.core.tensor_files._json_object_untrusted",
    peak_bytes=8 << 20,  # a thousand levels of nesting, until it is refused
)
def _check_header(case: tuple[bytes, int]) -> None:
    header, file_bytes = case
    entries, _ = parse_header_untrusted(header, "model.safetensors", file_bytes)
    covered = 8 + len(header)
    for entry in sorted(entries.values(), key=lambda each: (each.start, each.stop)):
        assert entry.start == covered
        assert entry.size_bytes == math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        assert len(entry.shape) <= MAX_DIMS
        covered = entry.stop
    assert covered == file_bytes


_FILES = mostly(st.sampled_from(["model-00001-of-00002.safetensors", "model.safetensors"]), FREE)
_PATHS = st.sampled_from(["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", ".x.safetensors", "x", "x\x00"])
_INDEXES = st.fixed_dictionaries(
    {"weight_map": mostly(st.dictionaries(st.text(max_size=8), _FILES | _PATHS, max_size=4), FREE), "metadata": FREE}
)


@target(
    "tensor-index",
    mutated(_INDEXES.map(lambda index: json.dumps(index).encode()), most=2) | _ODD | st.binary(max_size=40),
    "p2ptrain.core.tensor_files.index_files_untrusted",
    "p2ptrain.core.tensor_files._json_object_untrusted",
    peak_bytes=8 << 20,
)
def _check_index(encoded: bytes) -> None:
    where = index_files_untrusted(encoded)
    assert 0 < len(where) <= MAX_TENSORS
    for file in where.values():
        assert file.endswith(".safetensors")
        assert not set(file) & set("\\\x00")
        assert all(part and not part.startswith(".") for part in file.split("/"))


_STEP = 7
_DIGEST = hashlib.sha256(b"").hexdigest()
_ODD_MANIFESTS: Any = st.sampled_from([b"[" * 5000, b'{"a":' * 5000, b"\xff\xfe", b"9" * 5000, b'"\\ud800"', b""])


_ASKED = FilesRequest("job1", _STEP, "", 1, 2)
_META = {"job": "job1", "stage": 1, "stages": 2, "lineage": "ab" * 16}
_PART_NAMES = ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors", "config.json", "manifest.json"]
_PART = st.fixed_dictionaries(
    {
        "format": st.just(1),
        "step": mostly(st.just(_STEP), FREE),
        "meta": mostly(st.just(_META), FREE),
        "files": mostly(
            st.dictionaries(
                st.sampled_from(_PART_NAMES),
                st.fixed_dictionaries({"size_bytes": mostly(st.just(9), FREE), "sha256": st.just(_DIGEST)}),
                max_size=3,
            ),
            FREE,
        ),
    }
)


@target(
    "part-manifests",
    mutated(_PART.map(lambda manifest: json.dumps(manifest).encode()), most=2)
    | _ODD_MANIFESTS
    | st.binary(max_size=40),
    "p2ptrain.core.checkpoints.manifest_untrusted",
    "roles.worker.checkpoint_assembler.parse_offer_untrusted",
    peak_bytes=8 << 20,
)
def _check_offer(manifest: bytes) -> None:
    meta, files = parse_offer_untrusted(manifest, _ASKED)
    assert (meta["job"], meta["stage"], meta["stages"]) == ("job1", 1, 2)
    assert set(files) == {"model-00002-of-00002.safetensors"}, "a file of another stage"
    assert all(0 <= size <= 1 << 48 for size, _ in files.values())


_VOCAB = 100


@st.composite
def _payloads(draw: st.DrawFn) -> tuple[bytes, str, int, int]:
    """Bytes, what they are said to be, and how many positions of which width were announced."""
    encoding = draw(mostly(st.sampled_from([*ENCODINGS, IDS]), TEXT))
    rows, width = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    size = activation_bytes(encoding, rows, width) if encoding in (*ENCODINGS, IDS) else 8
    payload = draw(st.binary(min_size=size, max_size=size) | st.lists(st.integers(0, _VOCAB), max_size=4).map(bytes))
    said = draw(mostly(st.just(rows), st.integers(-(2**40), 2**40)))
    return draw(mutated(st.just(payload), most=1)), encoding, said, width


@target(
    "activations",
    _payloads(),
    "p2ptrain.compute.activations.decode_untrusted",
    "p2ptrain.compute.activations.ids_untrusted",
    "p2ptrain.compute.activations._checked_untrusted",
    peak_bytes=1 << 20,
)
def _check_payload(case: tuple[bytes, str, int, int]) -> None:
    payload, encoding, rows, width = case
    for dtype in (torch.float32, torch.bfloat16):
        try:
            hidden = decode_untrusted(payload, encoding, rows, width, dtype)
        except ProtocolError:
            continue
        assert hidden.shape == (rows, width)
        assert hidden.dtype == dtype
    ids = ids_untrusted(payload, rows, _VOCAB)
    assert ids.shape == (rows,)
    assert all(0 <= number < _VOCAB for number in ids.tolist())


_CONFIGS = st.fixed_dictionaries(
    {"model_type": mostly(st.sampled_from(["llama", "gpt2"]), FREE), "num_hidden_layers": mostly(st.just(4), FREE)},
    optional={
        "hidden_size": mostly(st.just(64), WHOLE),
        "n_layer": FREE,
        "num_experts": WHOLE,
        "rope_parameters": FREE,
        "auto_map": FREE,
        "_attn_implementation": FREE,
    },
)


@target(
    "model-configs",
    mutated(_CONFIGS.map(lambda table: json.dumps(table).encode()), most=2).map(lambda data: data.decode("latin-1"))
    | st.sampled_from(["[" * 50_000, '{"a":' * 10_000, "9" * 5000, '{"model_type":"a"' + " " * MAX_CONFIG_BYTES, ""]),
    "p2ptrain.core.tensor_files.config_untrusted",
    peak_bytes=8 << 20,  # a thousand levels of nesting, until it is refused
)
def _check_config(text: str) -> None:
    table = config_untrusted(text)
    assert len(text) <= MAX_CONFIG_BYTES
    assert isinstance(table["model_type"], str)
    assert not {"auto_map", "_attn_implementation"} & set(table)
    layers = table.get("num_hidden_layers", 1)
    assert type(layers) is int
    assert 1 <= layers <= 1024


# ------------------------------------------------------------------------------- what the leader of an island commands

_WRONG = st.none() | st.booleans() | TEXT | st.binary(max_size=8) | st.floats() | st.integers(-(2**63), 2**63)

_COMMAND_VALUES = {int: 7, float: 0.5, str: "{}"}
_COMMANDS = [msgpack.packb([name, *(_COMMAND_VALUES[kind] for kind in kinds)]) for name, kinds in COMMANDS.items()]


@target(
    "island-commands",
    mutated(st.sampled_from(_COMMANDS))
    | st.tuples(st.sampled_from(sorted(COMMANDS)), st.lists(_WRONG, max_size=4)).map(
        lambda command: msgpack.packb([command[0], *command[1]])
    )
    | st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, b"\x91\xdb\xff\xff\xff\xff"]),
    "p2ptrain.compute.island.command_untrusted",
    peak_bytes=1 << 20,
)
def _check_command(body: bytes) -> None:
    name, *arguments = command_untrusted(body)
    assert tuple(map(type, arguments)) == COMMANDS[name]


_STORE = {"path": "/a", "form": "text", "sources": "", "dtype": "uint16", "vocab_size": 300, "has_marks": False}
_STORES = [_STORE, {**_STORE, "numel": 1 << 60}, {**_STORE, "dtype": "object"}, {**_STORE, "rows": {"count": "x"}}]


@target(
    "token-stores",
    mutated(st.sampled_from([json.dumps(store).encode() for store in _STORES])) | _ODD,
    "p2ptrain.compute.token_store.facts_untrusted",
    peak_bytes=1 << 20,
)
def _check_store(data: bytes) -> None:
    facts = facts_untrusted(data)
    assert 0 <= facts.size_bytes <= 1 << 54
