"""How fast this machine computes: alike workers say alike figures, whoever else computes beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from p2ptrain.compute import speed
from p2ptrain.compute.speed import compute_flops


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_one_thread_is_measured_and_counts_as_often_as_there_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def best_s(device: torch.device, rows: int, clock: object) -> float:
        seen.append(torch.get_num_threads())
        return 0.5

    monkeypatch.setattr(speed, "_best_s", best_s)
    alone, four = compute_flops("cpu", 1), compute_flops("cpu", 4)
    assert (seen, alone, four) == ([1, 1], 4 * speed.HOST_ROWS**3, 4 * alone)
    assert torch.get_num_threads() == 4


def test_time_in_which_others_have_the_core_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product is held up for 50 ms, as by another process that has its turn: a speed by the clock would be a
    hundredth of what it is."""
    wait, usual = threading.Event(), torch.Tensor.__matmul__

    def held_up(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        wait.wait(0.05)
        return usual(one, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", held_up)
    began = time.perf_counter()
    measured = compute_flops("cpu", 1)
    by_clock = 2 * speed.HOST_ROWS**3 * speed.LEAST_PASSES / (time.perf_counter() - began)
    assert measured > 1.5 * by_clock
