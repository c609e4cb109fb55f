"""Safeguards switched off, inside the simulation only: a simulator that does not notice would prove nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(name: str) -> Iterator[None]:
    yield
