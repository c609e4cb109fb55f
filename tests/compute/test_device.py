"""Devices found and refused."""

from __future__ import annotations

from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from p2ptrain.compute.device import ComputeDevice, DeviceClock, flushed_denormals, pick_device, share_cores
from p2ptrain.core.errors import ConfigError, UserError


def test_the_cpu_with_a_thread_count() -> None:
    device = pick_device("cpu", 1)
    assert device.kind == "cpu"
    assert device.label == "cpu (1 thread)"
    assert torch.get_num_threads() == 1
    assert pick_device("cpu", 2).label == "cpu (2 threads)"


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What torch finds on this machine: the number of CUDA devices, and whether there is an Apple GPU."""
    found = SimpleNamespace(cuda=0, mps=False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: found.mps)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found.cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found.cuda)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    return found


def test_auto_takes_what_there_is(accelerators: SimpleNamespace) -> None:
    assert pick_device("auto", 1).kind == "cpu"
    accelerators.mps = True
    assert pick_device("auto", 1).kind == "mps"
    accelerators.cuda = 2
    assert pick_device("auto", 1).label == "cuda:0 GPU 0"
    assert pick_device("cuda:1", 1).torch_device == torch.device("cuda", 1)
    with pytest.raises(UserError, match="2 CUDA devices") as caught:
        pick_device("cuda:2", 1)
    assert "cuda:0 to cuda:1" in caught.value.remedy


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("kind", ["cuda", "cuda:1", "mps"])
def test_a_device_that_is_not_there(kind: str) -> None:
    with pytest.raises(UserError) as caught:
        pick_device(kind)
    assert "cpu" in caught.value.remedy


@pytest.mark.parametrize("kind", ["", "cpu:1", "cuda:-1"])
def test_a_setting_that_is_no_device_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"device\.kind"):
        pick_device(kind)


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


def test_the_clock_of_a_gpu_reads_events_after_it_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """Is reached a millisecond after the one before it, once the device is awaited."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            self.at_ms, self.stream = len(recorded), stream
            recorded.append(self)

        def elapsed_time(self, other: Event) -> float:
            assert awaited == [device.torch_device], "not reached yet"
            return other.at_ms - self.at_ms

    recorded, awaited, device = list[Event](), list[torch.device](), ComputeDevice(torch.device("cuda", 1), "a GPU")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: f"stream of {of}")
    monkeypatch.setattr(torch.accelerator, "synchronize", awaited.append)
    clock = DeviceClock(device.torch_device)
    first, _, third = clock.mark(), clock.mark(), clock.mark()
    assert not awaited, "marks do not wait"
    assert recorded[0].stream == "stream of cuda:1"
    device.wait()
    assert clock.between_s(first, third) == 2e-3


def test_the_clock_of_a_cpu_is_the_hosts() -> None:
    clock = DeviceClock(torch.device("cpu"))
    first = clock.mark()
    assert clock.between_s(first, first + 1.5) == 1.5
