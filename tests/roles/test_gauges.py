"""What a worker measures of its machine's GPUs, with a library of NVIDIA's that is made up."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from roles.gauges import Gauges, free_memory_bytes, gpu_name
from wire.messages import GpuInfo


class NVMLError(Exception):
    pass


def _library(reads: list[int]) -> SimpleNamespace:
    """Two GPUs; the second one has no sensors but its memory's."""

    def sensed(handle: int, value: object) -> object:
        if handle == 1:
            raise NVMLError
        return value

    def memory(handle: int) -> SimpleNamespace:
        reads.append(handle)
        return SimpleNamespace(used=(handle + 1) << 30, total=80 << 30, free=5 << 30)

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: [b"H100", "G" * 100][handle],
        nvmlDeviceGetUtilizationRates=lambda handle: sensed(handle, SimpleNamespace(gpu=93)),
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetTemperature=lambda handle, sensor: sensed(handle, 61),
        nvmlDeviceGetPowerUsage=lambda handle: sensed(handle, 312_500),
    )


def test_every_gpu_is_read_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    monkeypatch.setitem(sys.modules, "pynvml", _library(reads))
    now = 100.0
    gauges = Gauges(lambda: now)
    full = GpuInfo(0, "H100", 0.93, 1 << 30, 80 << 30, 61.0, 312.5)
    assert gauges.gpus() == [full, GpuInfo(1, "G" * 64, None, 2 << 30, 80 << 30)]
    now += 0.5
    assert gauges.gpus()[0] == full
    assert reads == [0, 1]
    now += 0.5
    gauges.gpus()
    assert reads == [0, 1, 0, 1]
    assert (gpu_name(), free_memory_bytes("")) == ("H100", 5 << 30)


def test_a_machine_without_one_reports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gauges(lambda: 0.0).gpus() == []
