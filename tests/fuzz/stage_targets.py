"""Split models: what clients, stages and senders of tensors say to a worker, and the files that it keeps of them."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import torch
from hypothesis import strategies as st

from p2ptrain.compute.picking import Picker
from p2ptrain.core.activations import ENCODINGS, activation_bytes, encode_ids
from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.serving import PartSpec, Pass, Sampling
from roles.model_directory import (
    FILE,
    TableReceiver,
    check_record_untrusted,
    files_untrusted,
    is_file_name,
)
from roles.worker import stage_requests
from roles.worker.model_loading import _owned_untrusted
from roles.worker.stage_session import batch_sizes_untrusted
from tests.roles.stage_doubles import PORT, open_params, session_of
from tests.roles.stage_stand_in import WIDTH, StandInBuilder, StandInStage, shapes_of, stand_in_config, stand_in_part
from wire.chain_messages import (
    MAX_REQUEST_POSITIONS,
    MOST_EXTRA_BYTES,
    ForwardRequest,
    TensorRecord,
    TensorsPage,
)
from wire.job_messages import RANGE_BYTES

from .engine import accepted, target
from .strategies import FREE, REAL, TEXT, WHOLE, made

CONFIG = stand_in_config(layers=3, rows=1)

# ------------------------------------------------------------------------------------------------------------ requests

_PLACE = {"peer": "w1", "host": "w1", "port": PORT}
_VALID: dict[str, dict[str, Any]] = {
    "part.load": {
        "model": "ab",
        "name": "a model",
        "config": CONFIG,
        "start": 0,
        "stop": 2,
        "layers": 3,
        "dtype": "",
        "weights": "int8",
        "positions": 64,
        "path": "",
        "sender": _PLACE,
    },
    "session.open": open_params("s1", "p1", 0, 2, "w1"),
    "session.resume": {"session": "s1", "index": 0, "epoch": 1, "keep": 0, "next": _PLACE},
    "session.close": {"session": "s1", "index": 0},
    "part.free": {"part": "p1"},
    "model.open": {"path": "/nowhere"},
    "model.measure": {"config": CONFIG, "dtype": "", "weights": ""},
}
_ODD = (
    FREE
    | WHOLE
    | REAL
    | st.sampled_from(["[" * 9000, "1" * 20000, "\x00", float("nan"), 1 << 40, -1, True, "x" * 5000])
)


@st.composite
def _params(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A request whose parameters are changed in a place or two, in those of a place to dial, too."""
    method = draw(st.sampled_from(sorted(_VALID)))
    params: dict[str, Any] = json.loads(json.dumps(_VALID[method]))
    for _ in range(draw(st.integers(0, 2))):
        target = params
        place = params.get("next", params.get("sender"))
        if isinstance(place, dict) and draw(st.booleans()):
            target = place
        name = draw(st.sampled_from(sorted({*target, "part"})) | TEXT)  # a target may be empty by now
        if draw(st.integers(0, 3)):
            target[name] = draw(_ODD)
        else:
            target.pop(name, None)
    return method, params


@target("stage-requests", _params(), "roles.worker.stage_requests.request_untrusted", peak_bytes=8 << 20)
def _check_params(case: tuple[str, dict[str, Any]]) -> None:
    method, params = case
    found = stage_requests.request_untrusted(method, params)
    if isinstance(found, stage_requests.LoadRequest):
        assert 0 <= found.start < found.stop <= found.layers <= stage_requests.MAX_LAYERS
        assert 0 <= found.positions <= stage_requests.MAX_POSITIONS
        assert found.title.isprintable()
    if isinstance(found, stage_requests.OpenRequest):
        assert 0 <= found.index < found.stages
        assert 0 < found.positions <= stage_requests.MAX_POSITIONS
        assert {found.encoding, found.prefill_encoding} <= ENCODINGS.keys()
        assert found.next is None or 0 < found.next.port < 65536


# --------------------------------------------------------------------------------------------------------------- works

_WORK_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "session": st.just("s1"),
    "epoch": st.integers(0, 1),
    "number": st.integers(0, 3),
    "keep": st.integers(0, 3),
    "count": st.integers(1, 5),
    "encoding": st.sampled_from(["ids", "fp32", "int8"]),
    "last": st.integers(0, 1),
    "samples": st.integers(0, 1),
    "sample_index": st.integers(0, 3),
    "spent_us": st.sampled_from([[], [1], [1, 2]]),
    "prefill": st.booleans(),
    "history": st.integers(0, 5),
    "mask_bytes": st.sampled_from([0, 8, 1 << 21]),
}
_WORKS = made(ForwardRequest, **_WORK_VALUES)
_ENGINE = stand_in_part(CONFIG, 0, 3)


@target(
    "works",
    st.tuples(_WORKS, st.integers(0, 2), st.sampled_from([bytes(n) for n in (0, 4, 8, 16, 20, 60, 96, 160, 161)])),
    "roles.worker.stage_session.StageSession.payload_bytes_untrusted",
    "roles.worker.stage_session.batch_sizes_untrusted",
    peak_bytes=1 << 20,
)
def _check_work(case: tuple[ForwardRequest, int, bytes]) -> None:
    work, index, payload = case
    session = session_of("s1", index)
    with suppress(ProtocolError):
        size = session.payload_bytes_untrusted(work)
        assert 0 < size <= MAX_REQUEST_POSITIONS * 4 * WIDTH + MOST_EXTRA_BYTES
        assert size == activation_bytes(work.encoding, work.count, WIDTH) + work.extra_bytes
        assert work.keep + work.count <= 64
    with suppress(ProtocolError):
        sizes = batch_sizes_untrusted([work, work], [session, None], WIDTH * (index > 0))
        assert sizes == [activation_bytes(work.encoding, work.count, WIDTH) + work.extra_bytes] * 2
        assert 2 * work.extra_bytes <= MOST_EXTRA_BYTES
        assert 2 * work.count <= MAX_REQUEST_POSITIONS
    engine: StandInStage = _ENGINE if index == 0 else stand_in_part(CONFIG, 1, 3)
    with suppress(ProtocolError):
        assert len(engine._taken_in_untrusted(memoryview(payload), work.encoding, work.count)) == work.count


_IDS = st.lists(st.integers(-1, 40), max_size=5).map(encode_ids) | st.binary(max_size=9)


@target(
    "sampling-extras",
    st.tuples(st.integers(0, 4), st.integers(1, 4), _IDS, st.sampled_from([b"", bytes(8), bytes(16), bytes(9)])),
    "p2ptrain.compute.picking.Picker.check_untrusted",
)
def _check_extras(case: tuple[int, int, bytes, bytes]) -> None:
    keep, count, history, masks = case
    picker = Picker(Sampling(0.0, repetition_penalty=2.0))
    first = Pass(0, memoryview(b""), 2, "ids", "fp32", samples=1, history=encode_ids([1, 2]))
    assert len(picker.pick_pass(torch.zeros(2, 40), first)) == 1
    work = Pass(keep, memoryview(b""), count, "ids", "fp32", samples=1, history=history, masks=masks)
    picker.check_untrusted(work, 40)
    assert len(picker.pick_pass(torch.zeros(count, 40), work)) == 1
    assert len(picker._history) == keep + count


# -------------------------------------------------------------------------------------------------------------- tables

_SHAPES = shapes_of(CONFIG)
_RECORDS = st.sampled_from(sorted(_SHAPES)).flatmap(
    lambda name: made(
        TensorRecord,
        name=st.just(name),
        dtype=st.just("F32"),
        shape=st.just(list(_SHAPES[name])),
        size_bytes=st.just(4 * WIDTH * (1 if len(_SHAPES[name]) == 1 else _SHAPES[name][0])),
        digest=st.just(bytes(32)),
    )
) | made(
    TensorRecord,
    name=st.sampled_from(["a.json", "../a.json", ".a.json", "a/b.json", "a.txt"]),
    dtype=st.just(FILE),
    shape=st.sampled_from([[5], [1 << 40], [], [5, 1]]),
    size_bytes=st.sampled_from([5, 1 << 40]),
    digest=st.just(bytes(32)),
)
_PAGES = made(TensorsPage, total=st.integers(1, 6), tensors=st.lists(_RECORDS, max_size=6), error=st.just(""))
_WHOLE = st.lists(_RECORDS, unique_by=lambda record: record.name, min_size=1, max_size=6).map(
    lambda records: [TensorsPage(len(records), records)]
)


@target(
    "tensor-tables",
    st.lists(_PAGES, min_size=1, max_size=4) | _WHOLE,
    "roles.model_directory.TableReceiver.take_untrusted",
    "roles.model_directory.check_record_untrusted",
    "roles.worker.model_loading._owned_untrusted",
    peak_bytes=1 << 20,
)
def _check_pages(pages: list[TensorsPage]) -> None:
    recipient = TableReceiver()
    for page in pages:
        recipient.take_untrusted(page)
    for record in recipient.records.values():
        with accepted():
            check_record_untrusted(record)
        assert record.dtype != FILE or is_file_name(record.name)
        assert record.size_bytes >= 0
    names = tuple(sorted(_SHAPES))
    owned = _owned_untrusted(StandInBuilder(PartSpec(CONFIG, 0, 1, 3), names), recipient.records)
    assert [tuple(record.shape) for record in owned] == [_SHAPES["embed.weight"], _SHAPES["layers.0.weight"]]


_RANGES = st.lists(
    made(
        TensorRecord,
        name=st.sampled_from(["a.bin#0", "a.bin#1", "a.bin#2", "b.json#0", "b.json", "#0", "a.bin#-1"]),
        dtype=st.sampled_from(["U8", "U8", "F32"]),
        shape=st.just([]),
        size_bytes=st.sampled_from([0, 5, RANGE_BYTES, RANGE_BYTES, RANGE_BYTES + 1]),
        digest=st.just(bytes(32)),
    ),
    max_size=4,
)


@target("input-files", _RANGES, "roles.model_directory.files_untrusted", peak_bytes=1 << 20)
def _check_ranges(records: list[TensorRecord]) -> None:
    for name, ranges in files_untrusted(records).items():
        assert [record.name for record in ranges] == [f"{name}#{number}" for number in range(len(ranges))]
        assert all(record.size_bytes == RANGE_BYTES for record in ranges[:-1])
