"""Measures a member's peak memory with 1, 2 and 4 shards, for docs/strategies.md: python -m tests.compute.shard_memory

Each member is a process; they exchange rows over Gloo. A step has two micro-batches for each member. On a quiet machine
this takes some minutes.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh

from p2ptrain.compute.data import DataSpec
from p2ptrain.compute.device import pick_device
from p2ptrain.compute.flat import OptimizerSpec
from p2ptrain.compute.fsdp import ShardSpec
from p2ptrain.compute.model import ModelSpec
from p2ptrain.compute.recipe import ModelRecipe, TrainingSpec
from p2ptrain.compute.trainer import Trainer

MODEL = ModelSpec(hidden_size=512, layers=16, heads=8, kv_heads=8, intermediate_size=1408, context=64)


def status_bytes(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def member(rank: int, count: int, accumulate: bool, place: str) -> None:
    torch.set_num_threads(1)
    shard = None
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=count)
        shard = ShardSpec(init_device_mesh("cpu", (count,)), accumulate)
    data = DataSpec(path="stdlib", sequence_tokens=64, limit_bytes=1 << 20)
    spec = TrainingSpec(MODEL, data, OptimizerSpec(), 3, 1, 2 * count, 2)
    warm = torch.nn.Linear(8, 8)(torch.zeros(1, 8)).sum()
    warm.backward()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    trainer = Trainer(ModelRecipe(spec, pick_device("cpu", 1), shard=shard))
    built = status_bytes("VmHWM") - before
    for step in range(2):
        trainer.begin_step(step)
        for index in range(2):
            trainer.micro_batch(step, 2 * rank + index)
        trainer.finish_gradients()
        trainer.apply(step, 1.0)
    if rank == 0:
        held = 5 * trainer.built.flat.parameters.nbytes
        peak = status_bytes("VmHWM") - before
        print(f"{count} {accumulate!s:5} {built / 1e6:8.0f} {held / 1e6:8.0f} {peak / 1e6:8.0f}", flush=True)
    if count > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    print("shards accumulate  MB: while built, rows, peak")
    for count in (1, 2, 4):
        for accumulate in (True, False):
            with tempfile.TemporaryDirectory() as place:
                processes.spawn(member, (count, accumulate, place), nprocs=count)  # type: ignore[no-untyped-call]
