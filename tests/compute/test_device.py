"""Devices found and refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from threading import Thread

import pytest
import torch

from p2ptrain.compute.device import HOST, check_memory, compute_flops, flushed_denormals, pick_device, share_cores
from p2ptrain.core.errors import ConfigError, ResourceError, UserError


def test_the_cpu_with_a_thread_count() -> None:
    device = pick_device("cpu", 1)
    assert device.kind == "cpu"
    assert device.label == "cpu (1 thread)"
    assert torch.get_num_threads() == 1
    assert pick_device("cpu", 2).label == "cpu (2 threads)"


def test_auto_takes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto", 1).kind == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto", 1).kind == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    assert pick_device("auto", 1).label == "cuda:0 GPU 0"
    assert pick_device("cuda:1", 1).torch_device == torch.device("cuda", 1)
    with pytest.raises(UserError, match="2 CUDA devices") as caught:
        pick_device("cuda:2", 1)
    assert "cuda:0 to cuda:1" in caught.value.remedy


@pytest.mark.parametrize("kind", ["cuda", "cuda:1", "mps"])
def test_a_device_that_is_not_there(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError) as caught:
        pick_device(kind)
    assert "cpu" in caught.value.remedy


@pytest.mark.parametrize("kind", ["", "cpu:1", "cuda:-1"])
def test_no_such_kind(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"device\.kind"):
        pick_device(kind)


@pytest.mark.parametrize("threads", [-1, 5000])
def test_no_such_thread_count(threads: int) -> None:
    with pytest.raises(ConfigError, match=r"device\.threads"):
        pick_device("cpu", threads)


def test_denormals_are_flushed_and_come_back() -> None:
    tiny = torch.full((64,), 1e-30)
    with flushed_denormals():
        assert (tiny * 1e-10).count_nonzero() == 0
    assert (tiny * 1e-10).count_nonzero() == 64


def test_kernels_threads_flush_denormals_too() -> None:
    """On a fresh thread, as the worker's compute thread is: the kernels' threads are its own."""
    counts: list[int] = []

    def compute() -> None:
        torch.set_num_threads(2)
        with flushed_denormals():
            tiny = torch.full((1 << 20,), 1e-30)
        with flushed_denormals():
            counts.append(int((tiny * 1e-10).count_nonzero()))

    thread = Thread(target=compute)
    thread.start()
    thread.join()
    assert counts == [0]


def test_memory_is_checked_with_numbers() -> None:
    check_memory(1 << 20, HOST, "a little", "lower it")
    with pytest.raises(
        ResourceError, match=r"a lot needs 1024\.0 TiB of memory, and this machine .* has \d+\.\d GiB free"
    ):
        check_memory(1 << 50, HOST, "a lot", "lower it")


@pytest.mark.parametrize(("asked", "workers", "expected"), [(0, 2, 2), (0, 3, 1), (0, 99, 1), (0, 0, 4), (3, 2, 3)])
def test_workers_share_the_cores_unless_a_person_chose(
    monkeypatch: pytest.MonkeyPatch, asked: int, workers: int, expected: int
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    try:
        device = pick_device("cpu", threads=asked)
        share_cores(device, workers)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


# --------------------------------------------------------------------------------------------------------------- speed


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_as_before")
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
    by_clock = 2 * 384**3 * 3 / (time.perf_counter() - began)
    assert measured > 1.5 * by_clock
