"""Of all tests: drawn inputs have no deadline of their own, which only a busy machine would miss; and directories of
tests are in memory where there is room.

What must be durable is flushed, at every step of a seed, and a disk takes milliseconds for that. What is left when a
machine dies is shown by disks that forget (``p2ptrain/lab/sim/machine.py``); the real one never does.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import fork_server

TEMP_ROOT = "PYTEST_DEBUG_TEMPROOT"
IN_MEMORY, ROOM_BYTES = Path("/dev/shm"), 4 << 30

settings.register_profile("suite", settings.default, deadline=None, max_examples=50)
settings.register_profile("thorough", settings.get_profile("suite"), max_examples=500)  # --hypothesis-profile=thorough
settings.load_profile("suite")

if TEMP_ROOT not in os.environ and IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free >= ROOM_BYTES:
    os.environ[TEMP_ROOT] = str(IN_MEMORY)

# Tiny tensors gain nothing from more threads of torch, and lose much where the machine has other work: threads that
# wait for each other spin, unless they are passive. The processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell's background job ignores SIGINT, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


fork_server.install()

gc.disable()  # until all is imported, which lasts as long as the session and is then left out of collections


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def own_state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands and their processes neither see nor change what this user keeps, such as seeds that run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def real_starts() -> Iterator[None]:
    """Each ``python -m p2ptrain`` of the test is a new interpreter, which imports what it needs."""
    with fork_server.real_starts():
        yield
