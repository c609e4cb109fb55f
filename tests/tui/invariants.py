"""What is always true of what the viewer knows."""

from itertools import pairwise

from tui import model
from tui.model import RecordStore, Series


def check_series(series: Series) -> None:
    rows = series.rows
    assert len(rows) <= model.MAX_ROWS
    assert len(series.validations) <= model.MAX_VALIDATIONS
    assert all(one.step < two.step for one, two in pairwise(rows))
    assert all((one.generation or 0) <= (two.generation or 0) for one, two in pairwise(rows))


def check_store(store: RecordStore) -> None:
    for topic in ("peers", "jobs", "checkpoints", "parts", "serving", "recoveries", "peer_changes", "_paces"):
        assert len(getattr(store, topic)) <= model.MAX_RECORDS, topic
    assert len(store.series) <= model.MAX_SERIES
    assert len(store.events) <= model.MAX_EVENTS
    assert all(len(paces) <= model.MAX_PACES for paces in store._paces.values())
    for series in store.series.values():
        check_series(series)
