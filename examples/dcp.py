"""A distributed checkpoint, saved by all and loaded into new shards: torchrun --nproc-per-node 2 examples/dcp.py"""

import shutil
import tempfile

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shared import finish, network, train
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("p2p")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
place = [tempfile.mkdtemp()]
dist.broadcast_object_list(place)
trained = train(fully_shard(network(), mesh=mesh), dist.get_rank(), dist.get_world_size())
dcp.save(get_model_state_dict(trained), checkpoint_id=place[0])

restored = fully_shard(network(), mesh=mesh)
state = get_model_state_dict(restored)
dcp.load(state, checkpoint_id=place[0])
set_model_state_dict(restored, state)
dist.barrier()
shutil.rmtree(place[0], ignore_errors=True)
finish("dcp", [parameter.full_tensor() for parameter in restored.parameters()])
