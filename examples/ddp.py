"""DistributedDataParallel: torchrun --nproc-per-node 2 examples/ddp.py"""

import torch.distributed as dist
from shared import finish, network, train
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("p2p")
model = train(DistributedDataParallel(network()), dist.get_rank(), dist.get_world_size())
finish("ddp", model.module.parameters())
