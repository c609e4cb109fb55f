"""Layers that are cut by columns and rows: torchrun --nproc-per-node 2 examples/tensor_parallel.py"""

import torch.distributed as dist
from shared import finish, network, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("p2p")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
train(model)
whole = [item.full_tensor() if isinstance(item, DTensor) else item for item in model.parameters()]
finish("tensor parallel", whole)
