"""A pipeline of stages, with 1F1B: torchrun --nproc-per-node 2 examples/pipelining.py"""

import torch.distributed as dist
from shared import STEPS, batch, finish, network, optimizer_of, train
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("p2p")
rank, size = dist.get_rank(), dist.get_world_size()
layers = list(network())
mine = slice(len(layers) * rank // size, len(layers) * (rank + 1) // size)
part = nn.Sequential(*layers[mine])
stage = PipelineStage(part, rank, size, "cpu")
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = optimizer_of(part.parameters())
for step in range(STEPS):
    inputs, targets = batch(step)
    optimizer.zero_grad()
    schedule.step(*([inputs] if rank == 0 else []), **({"target": targets} if rank == size - 1 else {}))
    optimizer.step()
alone = list(train(network()))[mine]
finish("pipelining", part.parameters(), nn.Sequential(*alone).parameters())
