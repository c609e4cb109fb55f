"""What seeds tell one another, and workers of one another: rows of a store, files, addresses."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
from hypothesis import strategies as st

from p2ptrain.core.disk import Disk
from p2ptrain.core.errors import ProtocolError
from roles.known_seeds import MAX_SEEDS, Known
from roles.seed import feed
from roles.seed.feed import Change, changes_untrusted, packed, tables, take_untrusted
from roles.seed.standby import _files_untrusted
from roles.seed.store import Records

from .engine import Target
from .strategies import PACKABLE, mostly, mutated

_VALUE = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=9) | st.binary(max_size=9)


class _Memory:
    """A disk with one database, and no more."""

    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:", isolation_level=None)

    def connect(self, path: Path) -> sqlite3.Connection:
        return self.db


@cache
def _store() -> tuple[Records, sqlite3.Connection]:
    disk: Any = _Memory()
    kept: Disk = disk
    return Records(Path("x"), kept), disk.db


@st.composite
def _changes(draw: st.DrawFn) -> list[Change]:
    known = tables(_store()[1])
    table = draw(st.sampled_from(sorted(known.values(), key=lambda item: item.name)))
    gone = draw(st.booleans())
    count = draw(mostly(st.just(len(table.keys) if gone else table.columns), st.integers(0, 70)))
    name = draw(mostly(st.just(table.name), st.sampled_from([feed.FILES, "", "sqlite_master", "x; --"])))
    return [Change(name, tuple(draw(st.lists(_VALUE, min_size=count, max_size=count))), gone)]


def _check_rows(data: bytes) -> None:
    records, db = _store()
    try:
        changes = changes_untrusted(data)
    except ProtocolError:
        return
    before = len(tables(db))
    with suppress(ProtocolError):
        _files_untrusted(changes)
    try:
        take_untrusted(db, changes, first=True, whole=True)
        records.take_untrusted(changes, first=False, whole=True)
    except ProtocolError:
        assert not db.in_transaction
    assert len(tables(db)) == before


ROWS = Target(
    "standby-rows",
    mutated(_changes().map(packed))
    | _changes().map(packed)
    | st.lists(st.lists(PACKABLE, max_size=4)).map(msgpack.packb),
    _check_rows,
    (
        "roles.seed.feed.changes_untrusted",
        "roles.seed.feed._change_untrusted",
        "roles.seed.feed.take_untrusted",
        "roles.seed.store.Records.take_untrusted",
        "roles.seed.standby._files_untrusted",
    ),
    peak_bytes=1 << 20,
)


def _check_seeds(case: tuple[list[str], str, bool]) -> None:
    texts, via, plain = case
    known = Known((("here", 1),), "c", 0).met((via, 7), "c", 1, texts, plain=plain)
    assert known.seeds[0] == (via, 7)
    assert len(known.seeds) <= MAX_SEEDS
    assert all(0 < port < 65536 for _, port in known.seeds)


SEEDS = Target(
    "standby-addresses",
    st.tuples(
        st.lists(st.sampled_from([":7337", "10.0.0.1:7", "[::1]:9", "a", ":", "x:99999"]) | st.text(), max_size=40),
        st.sampled_from(["127.0.0.1", "10.0.0.9", "::1", "seed"]),
        st.booleans(),
    ),
    _check_seeds,
    ("roles.known_seeds.addresses_untrusted",),
    peak_bytes=256 << 10,
)
TARGETS = (ROWS, SEEDS)
