"""What this project is compared with: torch's own collectives (Gloo), and DistributedDataParallel on them.

The only home of ``torch.distributed``, which nothing else needs. Rivals get the best that their documentation offers:
fused AdamW, gradients that are views of DDP's buckets, no exchange before the last micro-batch, and losses that are
brought together after the measured steps, where ours travel with the gradients.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch.nn.parallel import DistributedDataParallel

from p2ptrain.compute.data import DataSpec, load_corpus
from p2ptrain.compute.device import flushed_denormals
from p2ptrain.compute.flat import OptimizerSpec
from p2ptrain.compute.model import ModelSpec, build_model
from p2ptrain.compute.sampling import WindowSampler
from p2ptrain.compute.tokenizer import Tokenizer
from p2ptrain.core.errors import ConnectionLost, JobFailed

HOST = "127.0.0.1"
TORCH_VERSION = torch.__version__


def why_no_gloo() -> str:
    """Why this torch has no Gloo; empty where it has."""
    if not dist.is_available():
        return "this torch was built without torch.distributed"
    return "" if dist.is_gloo_available() else "this torch was built without Gloo"


class GlooGroup:
    """This process' place in a Gloo process group on the loopback. One a process, until it ends.

    Args:
        store_port: where rank 0 keeps the rendezvous; rank 0 gives 0, and tells the others ``store_port``.
        timeout_s: of every operation, the rendezvous included.
    """

    def __init__(self, rank: int, size: int, store_port: int, *, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._timeout = timedelta(seconds=timeout_s)
        try:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                HOST, store_port, size, is_master=rank == 0, wait_for_workers=False, timeout=self._timeout
            )
        except RuntimeError as error:
            raise ConnectionLost(f"torch's rendezvous failed: {_line(error)}") from error
        self.store_port = self._store.port

    def join(self) -> None:
        """Wait for the others. Raises ``ConnectionLost``."""
        try:
            dist.init_process_group(
                "gloo", store=self._store, rank=self.rank, world_size=self.size, timeout=self._timeout
            )
        except RuntimeError as error:
            raise ConnectionLost(f"Gloo did not come together: {_line(error)}") from error

    def all_reduce(self, buffer: npt.NDArray[np.generic], dtype: str) -> None:
        """Sum over all members, in place; ``dtype`` as in ``ring.dtypes``. Raises ``ConnectionLost``."""
        try:
            dist.all_reduce(_tensor(buffer, dtype))
        except RuntimeError as error:
            raise ConnectionLost(f"Gloo's all-reduce failed: {_line(error)}") from error


class DdpTrainer:
    """The training of ``compute.trainer.Trainer`` as DistributedDataParallel does it: same weights, same samples.

    Args: see ``Trainer``.

    Raises:
        ConfigError, UserError, ResourceError: see ``model_config`` and ``load_corpus``.
    """

    def __init__(
        self,
        group: GlooGroup,
        *,
        model: ModelSpec,
        data: DataSpec,
        optimizer: OptimizerSpec,
        steps: int,
        seed: int,
        micro_batches: int,
        micro_batch_sequences: int,
    ) -> None:
        self._group, self._spec, self._steps, self._micro_batches = group, optimizer, steps, micro_batches
        tokenizer = Tokenizer.of_bytes() if model.path is None else Tokenizer.of_directory(model.path)
        self._corpus = load_corpus(data, tokenizer)
        self._sampler = WindowSampler(len(self._corpus.training), seed, micro_batches, micro_batch_sequences)
        network = build_model(model, tokenizer.vocab_size, seed)
        with flushed_denormals():
            self._ddp = DistributedDataParallel(network, gradient_as_bucket_view=True)
        parameters = list(self._ddp.parameters())
        groups = [
            {"params": [item for item in parameters if item.ndim >= 2], "weight_decay": optimizer.weight_decay},
            {"params": [item for item in parameters if item.ndim < 2], "weight_decay": 0.0},
        ]
        betas = optimizer.beta1, optimizer.beta2
        self._adamw = torch.optim.AdamW(groups, lr=optimizer.lr, betas=betas, eps=optimizer.eps, fused=True)
        self._losses: list[torch.Tensor] = []

    def step(self, step: int, first: int, count: int) -> None:
        """One whole step, of which this member computes micro-batches ``range(first, first + count)``.

        Raises:
            ConnectionLost: Gloo lost another member.
            JobFailed: this member has no micro-batch; DDP needs at least one.
        """
        if not count:
            raise JobFailed("DistributedDataParallel needs a micro-batch for every member")
        try:
            self._step(step, first, count)
        except RuntimeError as error:
            raise ConnectionLost(f"the DDP step failed: {_line(error)}") from error

    def losses(self) -> list[float]:
        """The mean losses of the steps since the last call: every member calls it at the same time."""
        if not self._losses:
            return []
        total = torch.stack(self._losses)
        self._losses.clear()
        dist.all_reduce(total)
        return [float(value) / self._micro_batches for value in total]

    def _step(self, step: int, first: int, count: int) -> None:
        self._adamw.zero_grad(set_to_none=True)
        loss_sum = torch.zeros(())
        with flushed_denormals():
            for index in range(first, first + count):
                windows = self._corpus.window_tokens(self._corpus.training[self._sampler.sample(step, index)])
                tokens = torch.from_numpy(windows)
                with nullcontext() if index == first + count - 1 else self._ddp.no_sync():
                    logits = self._ddp(input_ids=tokens[:, :-1], use_cache=False).logits
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                    # DDP gives the mean over the members; the global batch wants the mean over its micro-batches.
                    (loss * (self._group.size / self._micro_batches)).backward()  # type: ignore[no-untyped-call]
                loss_sum += loss.detach()
            if self._spec.clip_norm:
                torch.nn.utils.clip_grad_norm_(self._ddp.parameters(), self._spec.clip_norm)
            for group in self._adamw.param_groups:
                group["lr"] = self._spec.lr_at(step, self._steps)
            self._adamw.step()
        self._losses.append(loss_sum)


def _tensor(buffer: npt.NDArray[np.generic], dtype: str) -> torch.Tensor:
    if dtype == "bfloat16":
        return torch.from_numpy(buffer.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(buffer)


def _line(error: RuntimeError) -> str:
    return " ".join(str(error).split())[:200]
