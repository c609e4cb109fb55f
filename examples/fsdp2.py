"""Fully sharded parameters (FSDP2): torchrun --nproc-per-node 2 examples/fsdp2.py"""

import torch.distributed as dist
from shared import finish, network, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("p2p")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = network()
for layer in model[::2]:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
train(model, dist.get_rank(), dist.get_world_size())
finish("fsdp2", [parameter.full_tensor() for parameter in model.parameters()])
