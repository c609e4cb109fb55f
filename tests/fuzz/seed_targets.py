"""What is told of drafters, of who computed which step, and of the sizes of a model to train."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError
from ring.ledger import counts_of_untrusted
from ring.planning.workloads import MAX_LAYERS, ModelShape, TrainingWorkload
from ring.token import Shares, next_lineage
from ring.view import View
from roles.seed.ledger import JobLedger
from roles.worker.reports import StepReporter, WorkerLedger
from wire.job_messages import LedgerRow, LedgerRows, MemberRecord
from wire.records import LedgerHead, runs_of
from wire.schema import instance_untrusted

from .engine import accepted, target
from .strategies import FREE, TEXT, made, mostly, mutated

_SIZES = st.integers(1, 2**40)
_SHAPES = st.fixed_dictionaries(
    {
        "layers_bytes": mostly(st.lists(_SIZES, min_size=1, max_size=6), FREE | st.just([1] * 1025)),
        **{name: mostly(_SIZES, FREE) for name in ("first_bytes", "last_bytes", "tied_bytes")},
        **{name: mostly(st.integers(1, 2**17), FREE) for name in ("width", "inner", "vocab")},
    }
)


@target("model-shapes", _SHAPES | FREE, "wire.schema.Record.from_map_untrusted")
def _check_shape(source: object) -> None:
    shape = ModelShape.from_map_untrusted(source)
    assert 1 <= shape.sizes.layers <= MAX_LAYERS
    with accepted():
        assert ModelShape.from_map_untrusted(shape.to_map()) == shape
    training = TrainingWorkload(shape, 2, 1, tokens=2**20, sequence_tokens=2**20, micro_batches=65536)
    assert 0 < training.need_bytes(0, 0, shape.sizes.layers) < 2**100
    assert math.isfinite(training.compute_s(0, shape.sizes.layers, 1.0))


START = "ab" * 16
_VIEW = View("j", 2, 3, START, (MemberRecord("a", "a", "h", 1, 0, 4, healthy=True),))
_COUNTS = st.sampled_from(
    [Shares([4]).packed(), Shares([1, 3]).packed(), b"", b"123", Shares([2**32 - 1] * 9).packed()]
)


@st.composite
def _told(draw: st.DrawFn) -> LedgerRows:
    first = draw(st.integers(-1, 6))
    likely = {"generation": st.integers(0, 3), "digest": mostly(st.just(bytes(16)), st.binary(max_size=20))}
    rows = [
        draw(made(LedgerRow, step=st.just(first + number) | st.integers(0, 12), counts=_COUNTS, **likely))
        for number in range(draw(st.integers(0, 5)))
    ]
    return draw(made(LedgerRows, rows=st.just(rows), lineage=mostly(st.just(START), st.text(max_size=40))))


@target(
    "ledger-rows",
    _told() | made(LedgerRows),
    "ring.ledger.rows_untrusted",
    "ring.ledger.counts_of_untrusted",
    "roles.seed.ledger.JobLedger.take_untrusted",
)
def _check_told(message: LedgerRows) -> None:
    ledger = JobLedger("j")
    ledger.view_began(View("j", 1, 0, START, _VIEW.members))
    before = ledger.step
    try:
        message = instance_untrusted(LedgerRows, asdict(message))
        entries, _ = ledger.take_untrusted(message, _VIEW, micro_batches=4, steps_total=10)
    except ProtocolError:
        assert ledger.step == before
        return
    assert [entry.row.step for entry in entries] == list(range(before + 1, ledger.step + 1))
    for entry in entries:
        assert sum(counts_of_untrusted(entry.row.counts)) == 4
        assert 1 <= entry.row.step <= 10


@st.composite
def _file(draw: st.DrawFn) -> bytes:
    first, shares = draw(st.integers(1, 3)), st.sampled_from([[4], [1, 3], [2**32 - 1] * 9])
    rows = [
        LedgerRow(first + number, 1, bytes(16), Shares(draw(shares)).packed())
        for number in range(draw(st.integers(0, 4)))
    ]
    head = LedgerHead(first - 1, draw(mostly(st.just(START), TEXT)), draw(st.integers(0, 9)), START)
    return json.dumps({"head": asdict(head), "runs": [run.to_map() for run in runs_of(rows)]}).encode()


@target(
    "ledger-files",
    _file() | mutated(_file()),
    "roles.worker.reports.WorkerLedger.loaded_untrusted",
    "roles.worker.reports.WorkerLedger.take_up_untrusted",
    peak_bytes=512 << 10,
)
def _check_file(data: bytes) -> None:
    kept = WorkerLedger("j", lambda rows: None)
    kept.loaded_untrusted(2, next_lineage(next_lineage(START, bytes(16)), bytes(16)), data)
    assert all(row.step <= 2 for _, row in kept._rows)


@st.composite
def _metrics(draw: st.DrawFn) -> bytes:
    steps = draw(st.lists(st.integers(0, 4), max_size=4))
    rows = [{"job": "j", "generation": 0, "step": step, "values": {"loss": draw(st.floats())}} for step in steps]
    return json.dumps(rows).encode()


@target("metrics-files", _metrics() | mutated(_metrics()), "roles.worker.reports.StepReporter.loaded_untrusted")
def _check_metrics(data: bytes) -> None:
    kept = StepReporter(job="j", steps_total=9, send=lambda row: None, on_step=lambda *step: None)
    kept.loaded_untrusted(2, data)
    assert all(step <= 2 for step, _ in kept._rows)
