"""Gradients compressed to a low rank (PowerSGD): torchrun --nproc-per-node 2 examples/powersgd.py

The compression keeps 8 dimensions. Here the gradients have no more, because the batch has only 8 rows. So nothing is
lost, and the result is that of one process.
"""

import torch.distributed as dist
from shared import batch, finish, network, optimizer_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

ROWS = 8


def train(model: nn.Module, rank: int, size: int) -> nn.Module:
    optimizer = optimizer_of(model.parameters())
    for step in range(4):
        inputs, targets = (tensor[:ROWS].chunk(size)[rank] for tensor in batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model


dist.init_process_group("p2p")
model = DistributedDataParallel(network())
state = PowerSGDState(None, 8, start_powerSGD_iter=2, min_compression_rate=1.1, use_error_feedback=True)
model.register_comm_hook(state, powerSGD_hook)
train(model, dist.get_rank(), dist.get_world_size())
finish("powersgd", model.module.parameters(), train(network(), 0, 1).parameters())
