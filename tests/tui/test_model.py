from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.texts import TEXT_CHARS
from tests.tui.demo import DemoCluster
from tests.tui.demo_serving import verifier
from tests.tui.invariants import check_series, check_store
from tui.model import (
    MAX_EVENTS,
    MAX_FIGURES,
    MAX_PACES,
    MAX_RECORDS,
    MAX_ROWS,
    MAX_SERIES,
    MAX_VALIDATIONS,
    RECENT_ROWS,
    RecordStore,
    Series,
    eta_s,
)
from wire.records import EventInfo, JobInfo, MetricRow


def row(step: int, generation: int = 1, **values: Any) -> MetricRow:
    return MetricRow("j", step, float(step), generation=generation, **({"loss": 1.0 / (abs(step) + 1)} | values))


def fed(cluster: DemoCluster) -> RecordStore:
    store = RecordStore()
    for update in cluster.everything():
        store.apply(update.topic, update.items, 100.0)
    check_store(store)
    return store


# ------------------------------------------------------------------------------------------------------------- store


def test_everything_a_seed_tells_is_kept():
    store = fed(DemoCluster(6))
    assert store.cluster is not None
    assert store.cluster.name == "attic"
    assert [peer.name for peer in store.peers_in_order()] == ["atlas", "borea", "castor", "delos", "elara", "fjord"]
    assert [job.id for job in store.jobs_in_order()] == ["j2", "j1", "j0"]
    assert store.series["j1"].rows[-1].step == 640
    assert [item.step for item in store.checkpoints_in_order("j1")] == [600, 400, 200]
    assert store.events_in_order()[0].text == "fjord joined and follows the ring"
    assert [item.number for item in store.recoveries_in_order("j1")] == [1, 2, 3]
    peer = store.peers["peer0"]
    assert store.heartbeat_age_s(peer, 107.0) == pytest.approx(peer.heartbeat_age_s + 7)
    store.apply("weather", [{"rain": True}], 1.0)  # of a newer seed
    for topic, gone in (("jobs", "j0"), ("checkpoints", store.checkpoints_in_order("j1")[0].id)):
        store.apply(f"{topic}-gone", [{"id": gone}], 0.0)
        assert gone not in getattr(store, topic)
    store.begin()
    store.apply("peers", [peer.to_map()], 5.0)
    assert len(store.peers) == 6, "what was known stays until all is told again"
    store.settle()
    assert list(store.peers) == ["peer0"]
    store.apply("cluster", [cluster_of(6, cluster_id="other")], 2.0)
    assert not any([store.peers, store.jobs, store.series, store.events, store.checkpoints, store.parts])


def cluster_of(peers: int, **changes: Any) -> dict[str, Any]:
    return DemoCluster(peers).cluster().to_map() | changes


MALFORMED = [
    ("cluster", {}),
    ("peers", 7),
    ("peers", {"id": "a"}),
    ("peers-gone", {"id": 3}),
    ("peers-gone", "peer1"),
    ("jobs", {"id": "j", "name": 1}),
    ("jobs", DemoCluster(3).job().to_map() | {"members": ["x"] * (MAX_RECORDS + 1)}),
    ("metrics", {"job": "j1", "step": "7", "wall": 0.0}),
    ("events", {"id": 1.5}),
    ("parts", {}),
    ("serving", {}),
    *(
        ("serving", verifier(1).to_map() | changes)
        for changes in (
            {"stats": {"alpha": math.nan}},
            {"stats": {f"x{index}": 1.0 for index in range(MAX_FIGURES + 1)}},
            {"drafters": [1]},
            {"drafters": [{"peer": "d1", "alpha": 1.5}]},
            {"port": 0},
        )
    ),
    *(
        ("parts", DemoCluster(1).parts()[0].to_map() | changes)
        for changes in (
            {"start": -1},
            {"stop": 29},
            {"layers": 10**6, "stop": 10**6},
            {"compute_ms": math.nan},
            {"sessions": 2**60},
        )
    ),
]


@pytest.mark.parametrize(("topic", "item"), MALFORMED)
def test_a_malformed_item_is_refused_and_counted(topic: str, item: object):
    store = RecordStore()
    with pytest.raises(ProtocolError):
        store.apply(topic, [item], 1.0)
    assert store.malformed == 1
    with pytest.raises(ProtocolError):
        store.apply("peers", [{"id": 1}, DemoCluster(1).peer(0).to_map()], 1.0)
    assert list(store.peers) == ["peer0"], "the good one beside it is taken in"
    check_store(store)


def test_those_that_serve_are_bounded():
    store, serving = fed(DemoCluster(3, serving=True)), verifier(1).to_map()
    store.apply("serving", [serving | {"id": f"v{index}"} for index in range(MAX_RECORDS + 9)], 1.0)
    for at in range(MAX_PACES + 9):
        store.apply("serving", [serving], float(at))
    check_store(store)
    assert len(store.serving) == MAX_RECORDS
    store.apply("cluster", [cluster_of(6, cluster_id="another")], 1.0)
    assert (store.serving, store.paces("verifier", 1.0, 5)) == ({}, [])


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(
    topic=st.sampled_from(["cluster", "peers", "peers-gone", "jobs", "metrics", "events", "checkpoints", "serving"]),
    field=st.integers(0, 30),
    value=json,
    item=json,
)
def test_nothing_but_protocol_errors_comes_of_strange_items(topic: str, field: int, value: Any, item: Any):
    store = RecordStore()
    good = next(
        (u.items[0] for u in DemoCluster(2, step=1, serving=True).everything() if u.topic == topic and u.items),
        {"id": "a"},
    )
    key = sorted(good)[field % len(good)]
    for strange in (item, good | {key: value}):
        try:
            store.apply(topic, [strange], 1.0)
        except ProtocolError:
            assert store.malformed
        check_store(store)
        store.peers_in_order(), store.jobs_in_order(), store.events_in_order(), store.checkpoints_in_order()


def test_everything_is_bounded():
    store, cluster = RecordStore(), DemoCluster(2, step=1)
    peer, checkpoint = cluster.peer(0).to_map(), cluster.checkpoint(1).to_map()
    event = dataclasses.asdict(EventInfo(1, 0.0, "info", "x", "y"))
    store.apply("peers", [peer | {"id": f"p{n}"} for n in range(3 * MAX_RECORDS)], 1.0)
    store.apply("events", [event | {"id": n} for n in range(MAX_EVENTS * 2)], 1.0)
    store.apply("checkpoints", [checkpoint | {"id": f"c{n}"} for n in range(MAX_RECORDS + 5)], 1.0)
    store.apply("metrics", [row(1).to_map() | {"job": f"j{n}"} for n in range(MAX_SERIES + 5)], 1.0)
    store.apply("parts", [cluster.parts()[0].to_map() | {"id": f"p/{n}"} for n in range(MAX_RECORDS + 9)], 1.0)
    check_store(store)
    assert len(store.peer_changes) <= 2 * MAX_RECORDS
    assert min(store.events) == MAX_EVENTS  # the newest stay
    assert f"j{MAX_SERIES + 4}" in store.series


def test_texts_are_short_and_of_one_line():
    store = RecordStore()
    name = "evil\x1b[31m\nname" + "x" * 10_000
    store.apply("peers", [DemoCluster(1).peer(0).to_map() | {"name": name}], 1.0)
    shown = store.peers["peer0"].name
    assert shown.isprintable()
    assert len(shown) == TEXT_CHARS


# ------------------------------------------------------------------------------------------------------------ series


def test_a_restored_job_loses_the_steps_that_became_untrue():
    series = Series()
    for step in range(1, 11):
        series.add(row(step, val_loss=2.0))
    assert series.add(row(5, generation=2))
    assert series.rows[-1].step == 5
    assert not series.add(row(8, generation=1))  # a late page of the history
    assert not series.add(row(5, generation=1))
    assert sorted(series.validations) == [1, 2, 3, 4, 5]
    check_series(series)


def test_old_rows_are_thinned_and_new_ones_are_not():
    series = Series()
    for step in range(1, 50_001):
        series.add(row(step, val_loss=1.0))
    check_series(series)
    assert len(series.rows) > MAX_ROWS // 4
    recent = [item.step for item in series.recent(RECENT_ROWS)]
    assert recent == list(range(50_000 - RECENT_ROWS + 1, 50_001))
    assert series.rows[0].step < 100
    gaps = [two.step - one.step for one, two in zip(series.rows, series.rows[1:], strict=False)]
    assert max(gaps) < 50_000 / 500
    assert len(series.validations) <= MAX_VALIDATIONS


@given(st.lists(st.tuples(st.integers(-5, 60), st.integers(0, 3), st.none() | st.floats()), max_size=60))
def test_a_series_keeps_its_invariants(rows: list[tuple[int, int, float | None]]):
    series = Series()
    for step, generation, value in rows:
        series.add(row(step, generation, val_loss=value))
        check_series(series)


def test_curves_leave_out_what_cannot_be_drawn():
    series = Series()
    for step, value in enumerate([1.0, None, math.nan, math.inf, 2.0]):
        series.add(row(step, loss=value, val_loss=value))
    assert series.curve("loss") == ([0, 4], [1.0, 2.0])
    assert series.validation_curve() == ([0, 4], [1.0, 2.0])


# ------------------------------------------------------------------------------------------------------------ numbers


def job(**values: Any) -> JobInfo:
    return JobInfo(**({"state": "running", "steps_total": 100, "step": 50} | JOB | values))


JOB: dict[str, Any] = {"id": "j", "name": "n", "profile": "p", "strategy": "sync", "created_at": 0.0}


def test_the_time_left_follows_the_recent_pace():
    rows = [MetricRow("j", step, step * 2.0) for step in range(40, 51)]
    assert eta_s(job(), rows) == 100.0
    assert eta_s(job(state="paused"), rows) is None
    assert eta_s(job(), rows[:1]) is None
    assert eta_s(job(), list(reversed(rows))) is None
    assert eta_s(job(step=120), rows) == 0.0
