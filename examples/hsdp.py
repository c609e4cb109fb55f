"""Parameters that are sharded over pairs and replicated over the pairs: torchrun --nproc-per-node 4 examples/hsdp.py"""

import torch.distributed as dist
from shared import finish, network, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("p2p")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
model = network()
for layer in model[::2]:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
train(model, dist.get_rank(), dist.get_world_size())
finish("hsdp", [parameter.full_tensor() for parameter in model.parameters()])
