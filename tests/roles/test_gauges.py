"""What a worker measures of its machine's GPUs, with a library of NVIDIA's that is made up."""

from __future__ import annotations

import shutil
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from roles.gauges import Gauges, free_memory_bytes, gpu_name
from wire.messages import GpuInfo


class NVMLError(Exception):
    pass


UUIDS = ["GPU-aa11", "GPU-bb22"]


def _library(reads: list[int]) -> SimpleNamespace:
    """Two GPUs; the second one has no sensors but its memory's, and a driver that only has their first version."""

    def sensed(handle: int, value: object) -> object:
        if handle == 1:
            raise NVMLError
        return value

    def memory(handle: int, version: int | None = None) -> SimpleNamespace:
        if version is not None and sensed(handle, version) != 2:
            raise AssertionError(version)
        reads.append(handle)
        reserved = 0 if version else 1 << 29
        return SimpleNamespace(used=(handle + 1 << 30) + reserved, total=80 << 30, free=5 + handle << 30)

    def part_of_gpu(uuid: str) -> int:
        if uuid != "MIG-cc33":
            raise NVMLError
        return 0

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        nvmlMemory_v2=2,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=UUIDS.__getitem__,
        nvmlDeviceGetHandleByUUID=part_of_gpu,
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
    assert gauges.gpus() == [full, GpuInfo(1, "G" * 64, None, (2 << 30) + (1 << 29), 80 << 30)]
    now += 0.5
    assert gauges.gpus()[0] == full
    assert reads == [0, 1]
    now += 0.5
    gauges.gpus()
    assert reads == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("visible", "device", "used"),
    [
        (None, "", 0),
        (None, "cuda:1", 1),
        ("1", "auto", 1),
        ("1, 0", "cuda:1", 0),
        ("GPU-bb,GPU-aa11", "cuda", 1),
        ("MIG-cc33", "cuda:0", 0),
        ("", "cuda", None),
        ("-1", "cuda", None),
        ("0", "cuda:1", None),
    ],
)
def test_the_gpu_of_torch_is_found_among_those_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, used: int | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _library([]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    assert free_memory_bytes(device) == (1 << 20 if used is None else 5 + used << 30)
    if not device.endswith(":1"):
        assert gpu_name() == ("" if used is None else ["H100", "G" * 64][used])


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU")
def test_gpus_are_those_of_nvidia_smi() -> None:
    fields = "name,memory.used,memory.total,temperature.gpu,power.draw,utilization.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    found = Gauges(lambda: 0.0).gpus()
    assert len(found) == len(shown)
    for gpu, line in zip(found, shown, strict=True):
        name, used, total, heat, power, load = line.split(", ")
        assert gpu.name == name[:64]
        assert gpu.memory_total_bytes / 2**20 == pytest.approx(float(total), abs=1)
        assert gpu.memory_bytes / 2**20 == pytest.approx(float(used), abs=64), "without what is reserved"
        assert gpu.temperature_c == pytest.approx(float(heat), abs=10)
        assert gpu.power_w == pytest.approx(float(power), rel=0.5)
        assert 0 <= float(load) <= 100
        assert gpu.load is None or 0 <= gpu.load <= 1


def test_a_machine_without_one_reports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gauges(lambda: 0.0).gpus() == []
