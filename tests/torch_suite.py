"""Runs PyTorch's own tests of torch.distributed on a backend. By hand only: it takes minutes and needs `expecttest`.

    python -m tests.torch_suite p2p > p2p.txt
    python -m tests.torch_suite gloo > gloo.txt
    python -m tests.torch_suite as-gloo > as-gloo.txt

Many tests run only if the backend is named "gloo". With `as-gloo` they run, but all groups are of the backend p2p. Each
test runs in three forked processes. The last line counts the results. Further arguments name tests.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import unittest
from collections import Counter
from typing import Any

import torch


class Result(unittest.TestResult):
    """Prints each test with its outcome, as soon as it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def _note(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        self.counts[outcome] += 1
        print(f"{outcome:8}{test.id().rpartition('.')[2]}  {why}".rstrip(), flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._note(test, "failed", self.failures[-1][1])

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._note(test, "failed", self.errors[-1][1])


def instead_of_gloo() -> None:
    """Make every group that is asked for as Gloo's one of the backend p2p, under Gloo's name."""
    import torch.distributed.distributed_c10d as c10d

    make, named = c10d._new_process_group_helper, c10d.get_backend

    def ours(size: int, rank: int, ranks: list[int], backend: Any, *rest: Any, **more: Any) -> Any:
        return make(size, rank, ranks, c10d.Backend("p2p"), *rest, **more)

    c10d._new_process_group_helper = ours
    c10d.get_backend = torch.distributed.get_backend = lambda group=None: str(named(group)).replace("p2p", "gloo")


def main(backend: str, names: list[str]) -> None:
    as_gloo = backend == "as-gloo"
    backend = "gloo" if as_gloo else backend
    os.environ.update(BACKEND=backend, WORLD_SIZE="3", TEMP_DIR=tempfile.mkdtemp(), OMP_NUM_THREADS="1")
    common = importlib.import_module("torch.testing._internal.common_distributed")  # reads the environment
    for feature in ("ddp", "subgroup", "cuda", "gpu"):  # what Gloo has; without a GPU it runs most of these tests
        common.DistTestCases.backend_feature[feature].add(backend)
    theirs = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    importlib.import_module("p2ptrain.torch_backend").autoload()
    if as_gloo:
        theirs.PROFILING_SUPPORTED_BACKENDS = []  # they count events that Gloo's own code records
        instead_of_gloo()

    class TestBackend(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)  # torch is imported only once

    result = Result()
    for name in names or unittest.defaultTestLoader.getTestCaseNames(TestBackend):
        TestBackend(name).run(result)
    print(dict(result.counts))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
