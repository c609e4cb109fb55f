"""Baselines for benchmarks: training loops of torch, and transformers' generation with one model or with an assistant.

The loops train in one process, eager or compiled, or with DistributedDataParallel or FSDP2 on torch's collectives. The
backend ``p2p`` takes their turns in the same groups of processes. They use the best settings that their documentation
offers: autocast, fused AdamW, gradients as views of DDP's buckets, and no exchange before the last micro-batch. Their
losses are gathered after the measured steps; ours are reduced with the gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import ContinuousBatchingConfig as _ContinuousBatchingConfig
from transformers import GenerationConfig as _GenerationConfig

from p2ptrain.compute.device import ComputeDevice, compute_flops, flushed_denormals, matrix_products, pick_device
from p2ptrain.compute.gloo import GlooGroup, line_of
from p2ptrain.compute.model import flops_per_token, parameter_count
from p2ptrain.compute.passes import PRECISIONS, DeviceBatch, MicroBatchReader
from p2ptrain.compute.recipe import ModelRecipe, TrainingSpec, tokenizer_and_config
from p2ptrain.compute.served_part import load_module
from p2ptrain.compute.text import ModelText, TextWriter
from p2ptrain.compute.tuning import ALL_OF_IT
from p2ptrain.core.errors import ConfigError, ConnectionLost, JobFailed
from p2ptrain.core.serving import COLDEST, SamplingOptions

GenerationConfig: Any = _GenerationConfig  # its annotations are partial
ContinuousBatchingConfig: Any = _ContinuousBatchingConfig
_GREEDY = SamplingOptions(temperature=0)


class TorchTrainer:
    """Trains like ``compute.trainer.Trainer``, with the same weights and samples, in the loop that a user of torch
    writes.

    Args:
        kind: "plain"; "compiled": ``torch.compile`` of the model with its loss; "ddp": DistributedDataParallel;
            "fsdp2": each layer is a unit.
        group: of the members that train together, for the last two; ``backend``: of the group.

    Raises:
        ConfigError, UserError, ResourceError: see ``ModelRecipe`` and ``MicroBatchReader``.
    """

    def __init__(
        self, spec: TrainingSpec, device: ComputeDevice, kind: str, group: GlooGroup | None = None, backend: str = ""
    ) -> None:
        recipe = ModelRecipe(spec, device)
        self._spec, self._device, self._kind, self._group = spec, device.torch_device, kind, group
        self._batches, optimizer = MicroBatchReader(recipe), spec.optimizer
        network: Any = recipe.initial_module()
        self._network = network.to(self._device)
        if group is not None and kind == "fsdp2":
            mesh = DeviceMesh.from_group(group.groups[backend], device.kind)
            for layer in self._network.get_decoder().layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self._network, mesh=mesh)
        elif group is not None:
            with flushed_denormals():
                self._network = DistributedDataParallel(
                    self._network, process_group=group.groups[backend], gradient_as_bucket_view=True
                )
        self._loss: Callable[[DeviceBatch], torch.Tensor] = self._loss_sum
        if kind == "compiled":
            self._loss = torch.compile(self._loss_sum)
        parameters = list(self._network.parameters())
        groups = [
            {"params": [item for item in parameters if item.ndim >= 2], "weight_decay": optimizer.weight_decay},
            {"params": [item for item in parameters if item.ndim < 2], "weight_decay": 0.0},
        ]
        betas = optimizer.beta1, optimizer.beta2
        self._adamw = torch.optim.AdamW(groups, lr=optimizer.lr, betas=betas, eps=optimizer.eps, fused=True)
        self._losses: list[torch.Tensor] = []

    def step(self, step: int, first: int, count: int) -> None:
        """Run one step; this member computes micro-batches ``range(first, first + count)``. On a GPU it may still
        compute afterwards. Raises ``ConnectionLost``: Gloo lost another member; ``JobFailed``: this member has no
        micro-batch, and DDP needs at least one; or torch failed without a group."""
        if not count:
            raise JobFailed("DistributedDataParallel needs a micro-batch for every member")
        try:
            with flushed_denormals(), matrix_products(self._spec.precision):
                self._step(step, first, count)
        except RuntimeError as error:
            text = f"the step of torch failed: {line_of(error)}"
            if self._group is not None:
                raise ConnectionLost(text) from error
            remedy = (
                "leave it out with --no-compiled" if self._kind == "compiled" else "choose a smaller model or batch"
            )
            raise JobFailed(f"the {self._kind} loop: {text}", remedy=remedy) from error

    def losses(self) -> list[float]:
        """Mean losses of the steps since the last call. All members of a group must call it together."""
        if not self._losses:
            return []
        total = torch.stack(self._losses).cpu()
        self._losses.clear()
        if self._group is not None:
            dist.all_reduce(total)
        return total.tolist()

    def _step(self, step: int, first: int, count: int) -> None:
        optimizer, loss_sum = self._spec.optimizer, torch.zeros((), device=self._device)
        members = 1 if self._group is None else self._group.size
        self._adamw.zero_grad(set_to_none=True)
        targets_of_step = self._batches.targets(step, 0, self._spec.micro_batches)
        for index in range(first, first + count):
            batch = self._batches.training_batch(step, index)
            with self._during_micro_batch(is_last=index == first + count - 1):
                loss = self._loss(batch) / targets_of_step
                (loss * members).backward()  # type: ignore[no-untyped-call]  # DDP averages over members
            loss_sum += loss.detach()
        if optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(self._network.parameters(), optimizer.clip_norm)
        for group in self._adamw.param_groups:
            group["lr"] = optimizer.lr_at(step, self._spec.steps)
        self._adamw.step()
        self._losses.append(loss_sum)

    def _loss_sum(self, batch: DeviceBatch) -> torch.Tensor:
        placed = {} if batch.positions is None else {"position_ids": batch.positions}
        dtype = PRECISIONS[self._spec.precision]
        with torch.autocast(self._device.type, dtype=dtype, enabled=dtype is not None):
            logits = self._network(input_ids=batch.inputs, use_cache=False, **placed).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum")

    def _during_micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Gradients are exchanged after the last micro-batch only."""
        if isinstance(self._network, FSDPModule):
            self._network.set_requires_gradient_sync(is_last)
            return nullcontext()
        return nullcontext() if is_last or self._group is None else self._network.no_sync()


def describe(spec: TrainingSpec, device: ComputeDevice) -> dict[str, Any]:
    """What a report says of a model and its device: the FLOP of a token (0 if only a part of the model trains), and the
    device's peak FLOP/s in the precision of ``spec``, by a product of large matrices."""
    _, config = tokenizer_and_config(spec.model)
    rows = 0 if device.kind == "cpu" else 8192  # on a GPU such a product takes far longer than its launch
    dtype = PRECISIONS[spec.precision] or torch.float32
    with matrix_products(spec.precision):
        peak_flops = compute_flops(str(device.torch_device), device.threads, dtype=dtype, rows=rows)
    return {
        "device": device.label,
        "torch": torch.__version__,
        "parameters": parameter_count(config),
        "flops_per_token": flops_per_token(config, spec.data.sequence_tokens) if spec.tuning == ALL_OF_IT else 0,
        "peak_flops": peak_flops,
    }


class TransformersWriter:
    """Transformers' ``generate`` on the CPU: of a padded batch, and with a drafter's model as assistant; and its
    continuous batching. Each model uses the dtype of its configuration, as a served part does.

    Args:
        model, drafter: model directories with the same tokenizer; ``drafter`` may be None.
        texts, positions: of continuous batching: most at a time, and the most positions of one, its prompt included.

    Attributes:
        can_assist: whether the vocabularies are padded to the same size, which transformers' assistance requires.

    Raises:
        ConfigError: a directory holds no model, or the vocabularies differ.
        ResourceError: the models do not fit into memory.
    """

    def __init__(self, model: Path, drafter: Path | None, *, threads: int, texts: int, positions: int) -> None:
        place = pick_device("cpu", threads)
        self._text = ModelText(model)
        self._model, self._drafter = _load(model, place), None
        self.can_assist = False
        if drafter is not None:
            vocab, own = self._text.tokenizer.vocab_size, ModelText(drafter).tokenizer.vocab_size
            if vocab != own:
                remedy = "use two models of one family, or train a pair: p2ptrain up --profile pair"
                text = f"{model} and {drafter} have different vocabularies: {vocab} and {own} tokens"
                raise ConfigError(text, remedy=remedy)
            self._drafter = _load(drafter, place)
            self.can_assist = self._model.config.vocab_size == self._drafter.config.vocab_size
        blocks = texts * (1 + -(-positions // 64))  # by default it takes most of the memory that is free
        self._room = ContinuousBatchingConfig(page_size=64, num_blocks=blocks, max_batch_tokens=texts * positions)

    def prompt(self, seed: int, tokens: int) -> str:
        """A text of random tokens, about so many."""
        ids = np.random.default_rng(seed).integers(1, self._text.tokenizer.vocab_size, tokens)
        return self._text.tokenizer.backend.decode(ids.tolist())

    def write(
        self,
        prompts: Sequence[str],
        max_new_tokens: int,
        options: SamplingOptions = _GREEDY,
        *,
        assisted: bool = False,
        continuous: bool = False,
    ) -> tuple[list[str], float]:
        """Write a text of so many tokens to each prompt, all at once. Returns them, and the seconds that it took. With
        greedy decoding the assistant does not change a text; with sampling it gives another one of the same
        distribution. Raises ``JobFailed``: a text is missing."""
        ids, sampling = [self._text.prompt_ids(prompt) for prompt in prompts], self._text.sampling(options)
        how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "use_cache": True, "pad_token_id": 0}
        how["do_sample"] = sampling.temperature > COLDEST
        if how["do_sample"]:
            how |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        with torch.random.fork_rng(devices=[]), torch.inference_mode():
            torch.manual_seed(sampling.seed)
            began = time.perf_counter()
            if continuous:
                settings = GenerationConfig(**how, eos_token_id=-1)  # it requires one; no token is
                room = {"continuous_batching_config": self._room, "persistent_manager": True, "warmup": False}
                found = self._model.generate_batch(ids, settings, **room)
                made = [text.generated_tokens for text in found.values()]
            else:
                longest = max(map(len, ids))
                padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
                mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
                assistant = {"assistant_model": self._drafter} if assisted else {}
                settings = GenerationConfig(**how)
                rows = self._model.generate(padded, attention_mask=mask, generation_config=settings, **assistant)
                made = rows[:, longest:].tolist()
            seconds = time.perf_counter() - began
        if [len(row) for row in made] != [max_new_tokens] * len(prompts):
            raise JobFailed("transformers wrote texts of other lengths")
        text = self._text
        writers = [TextWriter(text.tokenizer.backend, row, end_tokens=text.end_tokens) for row in ids]
        pieces = [[writer.take(token) for token in row] for writer, row in zip(writers, made, strict=True)]
        return ["".join([*text, writer.finish()]) for writer, text in zip(writers, pieces, strict=True)], seconds


def _load(directory: Path, place: ComputeDevice) -> Any:
    model, _ = load_module(directory, place)
    model.generation_config = GenerationConfig()
    return model
