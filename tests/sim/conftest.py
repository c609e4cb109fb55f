"""The number of a batch's first schedule: fixed, unless the environment names another. `make sim` runs fresh ones."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def first() -> int:
    return int(os.environ.get("P2PTRAIN_SIM_SEED", "1"))
