"""Scripts that use the backend ``p2p`` of torch.distributed, in real processes."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Machine

DEADLINE_S = 120


def run(arguments: list[str], environment: dict[str, str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.slow
def test_an_example_agrees_with_one_process(environment: dict[str, str], tmp_path: Path) -> None:  # others: by hand
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = run([*launch, str(ROOT / "examples" / "fsdp2.py")], environment, tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(re.findall("differs from one process by", ended.stdout)) == 2


FP16 = """
import os, torch, torch.distributed as dist
child = os.fork()
rank = int(child > 0)
dist.init_process_group("p2p", store=dist.FileStore("store", 2), rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Linear(5, 3)
ddp = torch.nn.parallel.DistributedDataParallel(model)
ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
inputs = torch.arange(20.).reshape(2, 2, 5) / 7
for _ in range(2):
    model.zero_grad()
    ddp(inputs[rank]).square().sum().backward()
got = model.weight.grad.clone()
model.zero_grad()
(model(inputs.reshape(4, 5)).square().sum() / 2).backward()
error = ((got - model.weight.grad) / model.weight.grad).abs().max()
if rank:
    assert os.waitpid(child, 0)[1] == 0
print(float(error), flush=True)
if not rank:
    os._exit(0)
"""


@pytest.mark.slow
def test_builtin_hook_for_fp16_sums_gradients(environment: dict[str, str], tmp_path: Path) -> None:
    ended = run(["-c", FP16], environment, tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    errors = [float(line) for line in ended.stdout.split()]
    assert len(errors) == 2
    assert 0 < max(errors) < 2e-3  # in fp16: 2^-11, of each part of the sum


LOADED = """
import sys
import torch
loaded = {"wire", "ring", "roles", "configs", "asyncio.runners", "p2ptrain.compute", "msgpack"} & set(sys.modules)
assert not loaded - {"asyncio.runners"}, loaded
import os, torch.distributed as dist
def begin(name):
    dist.init_process_group("p2p", store=dist.FileStore(name, 1), rank=0, world_size=1)
try:
    begin("first")
except ImportError as error:
    print(error)
os.rename("ring.py", "other.py")
sys.path_importer_cache.clear()
begin("second")
tensor = torch.ones(3)
dist.all_reduce(tensor)
print(dist.get_backend(), tensor.tolist())
"""


def test_the_backend_loads_beside_files_that_have_the_names_of_its_packages(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("raise RuntimeError('the configs of the user')")
    (tmp_path / "ring.py").write_text("raise RuntimeError('the ring of the user')")
    ended = run(["-c", LOADED], environment, tmp_path)
    assert ended.returncode == 0, ended.stderr
    error, reduced = ended.stdout.splitlines()
    assert error.startswith(f"the backend p2p cannot be used: {tmp_path}/ring.py hides the package 'ring' of p2ptrain.")
    assert reduced == "p2p [1.0, 1.0, 1.0]"


ENCRYPTED = """
import os, torch, torch.distributed as dist
child = os.fork()
rank = int(child > 0)
dist.init_process_group("p2p", store=dist.FileStore("store", 2), rank=rank, world_size=2)
tensor = torch.full((100_000,), float(rank))
dist.all_reduce(tensor)
(dist.send if rank else dist.recv)(tensor, 1 - rank)
from p2ptrain import torch_backend
if rank:
    assert os.waitpid(child, 0)[1] == 0
print(type(torch_backend._host.world.network).__name__, tensor.mean().item(), flush=True)
if not rank:
    os._exit(0)
"""


@pytest.mark.slow
async def test_a_ticket_encrypts_the_group(machine: Machine, environment: dict[str, str], tmp_path: Path) -> None:
    seed = await machine.start("seed", "--tls", "--port", "0", "--state", str(tmp_path / "seed"))
    ticket = (await seed.until(r"^p2ptrain join (\S+)$"))[1]
    env = environment | {"P2PTRAIN_TICKET": ticket}
    ended = await asyncio.to_thread(run, ["-c", ENCRYPTED], env, tmp_path)
    assert ended.stdout == "TlsNetwork 1.0\n" * 2, ended
