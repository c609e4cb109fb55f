"""A fresh batch of schedules in every run, and its number where one looks when it fails."""

from __future__ import annotations

import os
import secrets

import pytest

FIRST = pytest.StashKey[int]()
VARIABLE = "P2PTRAIN_SIM_SEED"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIRST] = int(os.environ.get(VARIABLE) or secrets.randbelow(1 << 31))


@pytest.fixture
def first(request: pytest.FixtureRequest) -> int:
    """Number of the first schedule; another one in every run, unless the environment names it."""
    return request.config.stash[FIRST]
